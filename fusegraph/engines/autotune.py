"""The autotuner: which schedule of a kernel is the fastest on a device, measured once and remembered.

The schedules that a kernel's family proposes are compiled in parallel.  Each is timed as soon as it is compiled, while
others are still being compiled, with a cold L2 cache and on scratch arrays of the same sizes and layouts as the
kernel's.  The fastest few are then timed again in turns, so that a change of the clock rate affects all of them.

The winner is the first candidate within 2 % of the fastest, so noise does not change the choice where it does not
matter.  It is kept in the cache of compiled kernels, under a key of all that it depends on: the kernel's specification
without its names, the architecture, the device's name, NVRTC's version and options, and the sources of ``codegen``.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple, Protocol

import codegen
from codegen import KernelSpec, Schedule, best_schedule, render, schedule_data, schedule_from_data, schedules
from codegen.canonical import canonical
from codegen.spec import KernelSource
from codegen.target import Target
from fusegraph.engines.scratch import array_like
from fusegraph.errors import DeviceError, FusegraphError, shown
from fusegraph.graph import Tensor
from fusegraph.passes.partition import Group
from fusegraph.plan import Choice, Chooser, by_cost_model
from fusegraph.runtime import driver, nvrtc
from fusegraph.runtime.cache import DiskCache, digest
from fusegraph.runtime.launch import Launch, Module
from fusegraph.runtime.timing import ColdTimer

#: How many candidates are timed at most.
MOST = 12
#: A later candidate wins over an earlier one only if it is this much faster.
TIE = 1.02
#: Runs of each candidate in the first round, and of each finalist in the second.
FIRST_ROUND, SECOND_ROUND = 5, 11
#: How many finalists there are at most, and the largest ratio of their time to the fastest.
FINALISTS, FINALIST = 4, 1.1
#: A round repeats a candidate only as long as all its runs fit in so many microseconds.
ENOUGH_US = 50_000.0

FORMAT = "1"


class Stopwatch(Protocol):
    """Times kernels on arguments of its own."""

    def __call__(self, source: KernelSource, compiled: nvrtc.CompiledKernel) -> Callable[[], float]:
        """Returns a function that runs the kernel once and returns the time in microseconds.

        Raises DeviceError if the kernel cannot run.
        """


@dataclass(frozen=True)
class Tuned:
    """The fastest schedule, its median time in microseconds, and that of the cost model's choice (None: cannot run)."""

    schedule: Schedule
    us: float
    untuned_us: float | None

    def choice(self, untuned: Schedule) -> Choice:
        """Returns the schedule with the reason that users see."""
        if self.schedule == untuned:
            beside = "as the cost model chose"
        else:
            beside = "untuned it cannot run" if self.untuned_us is None else f"{self.untuned_us:.1f} us untuned"
        return Choice(self.schedule, f"tuned: {self.us:.1f} us, {beside}", self.us)


def from_environment() -> bool | None:
    """Returns ``FUSEGRAPH_AUTOTUNE``: True for 1, False for 0, None if unset.  Raises FusegraphError for other text."""
    text = os.environ.get("FUSEGRAPH_AUTOTUNE", "").strip()
    if text not in ("", "0", "1"):
        raise FusegraphError(f"FUSEGRAPH_AUTOTUNE is {shown(text)}; 1 times schedules, 0 ignores what was found before")
    return text == "1" if text else None


def wanted(autotune: bool | None) -> bool | None:
    """Returns how a build chooses: True times candidates, None uses remembered winners, False the cost model alone.

    If the argument is None, ``FUSEGRAPH_AUTOTUNE`` decides, see `from_environment`.
    """
    return from_environment() if autotune is None else autotune


class Choosers(NamedTuple):
    """Two choosers of schedules: for the build, and for kernels that are built later while a call waits.

    The second one never times anything.  ``state`` changes when the first one may choose otherwise; None if it times.
    ``device_name`` is that of the device whose measurements they use; None if they use none.
    """

    first: Chooser
    later: Chooser
    state: str | None
    device_name: str | None = None


def choosers(
    target: Target,
    device: int,
    autotune: bool | None,
    cache: DiskCache,
    options: Sequence[str] = (),
    jobs: int | None = None,
) -> Choosers:
    """Returns the choosers of schedules for a target.

    ``autotune`` is as for `fusegraph.compile`, ``options`` are NVRTC's.  Raises DeviceError if candidates are to be
    timed and the GPU is missing or of another architecture.
    """
    autotune = wanted(autotune)
    if autotune is False or not driver.available():
        if autotune:
            raise DeviceError(f"autotune=True times kernels on a GPU, and there is none: {driver.unavailable_reason()}")
        chooser = by_cost_model(target)
        return Choosers(chooser, chooser, "cost model")
    properties = driver.properties(device)
    tuner = Tuner(target, properties.name, cache, options=options, device=device, jobs=jobs)
    if autotune and target.arch.compute_capability != properties.compute_capability:
        raise DeviceError(
            f"autotune=True cannot time kernels for {target.arch} on {properties.name}, which is {properties.arch}"
        )
    state = None if autotune else tuner.state()
    return Choosers(tuner.tune if autotune else tuner.remember, tuner.remember, state, properties.name)


class Tuner:
    """Chooses the schedules of kernels for one device.

    ``target`` and ``device_name`` identify the machine that measurements belong to; ``options`` are NVRTC's.
    ``stopwatch`` makes a Stopwatch from the tensors that a kernel reads and writes (default: a DeviceStopwatch on
    ``device``).
    """

    def __init__(
        self,
        target: Target,
        device_name: str,
        cache: DiskCache,
        *,
        options: Sequence[str] = (),
        stopwatch: Callable[[Sequence[Tensor]], Stopwatch] | None = None,
        device: int = 0,
        jobs: int | None = None,
    ) -> None:
        self.arch, self.device_name = target.arch.name, device_name
        self._target = target
        self._cache, self._options, self._jobs = cache, tuple(options), jobs
        self._stopwatch = stopwatch or functools.partial(DeviceStopwatch, device=device)

    def remember(self, spec: KernelSpec, group: Group) -> Choice:
        """Returns what was measured before, else the cost model's choice."""
        untuned = best_schedule(spec, self._target)
        found = self.remembered(spec)
        return found.choice(untuned) if found is not None else Choice(untuned)

    def tune(self, spec: KernelSpec, group: Group) -> Choice:
        """Returns what was measured before, else what is measured now.

        Raises CompileError if a candidate does not compile, DeviceError if none can run or one fails.  If the scratch
        arrays do not fit the device's memory, the cost model's choice stays, and its reason says so.
        """
        untuned = best_schedule(spec, self._target)
        found = self.remembered(spec)
        if found is None:
            try:
                stopwatch = self._stopwatch((*group.reads, *group.writes))
            except DeviceError as error:
                return Choice(untuned, f"cost model; not tuned: {error}")
            found = self._measure(spec, stopwatch)
            self._cache.put(self._key(spec), _encode(found))
            self._cache.put(self._state_key(), os.urandom(16))
        return found.choice(untuned)

    def state(self) -> str:
        """Returns a text that changes with every kernel that is measured on this device."""
        return f"{self.device_name} {(self._cache.get(self._state_key()) or b'').hex()}"

    def _state_key(self) -> str:
        return digest("tuned at last", self.arch, self.device_name)

    def remembered(self, spec: KernelSpec) -> Tuned | None:
        """Returns what was measured before on this device with these sources; None if nothing readable was."""
        entry = self._cache.get(self._key(spec))
        return None if entry is None else _decode(entry)

    def _key(self, spec: KernelSpec) -> str:
        version = (FORMAT, sources_digest(), *map(str, nvrtc.nvrtc_version()))
        counts = str(len(self._options))
        return digest("tuned", counts, *version, *self._options, self.arch, self.device_name, fingerprint(spec))

    def _measure(self, spec: KernelSpec, stopwatch: Stopwatch) -> Tuned:
        candidates = schedules(spec, self._target)[:MOST]
        sources = [render(spec, schedule, self._target) for schedule in candidates]
        runs: dict[int, Callable[[], float]] = {}
        failures: list[DeviceError] = []
        first: dict[int, float] = {}

        def race(source: KernelSource, compiled: nvrtc.CompiledKernel) -> None:
            number = next(n for n, s in enumerate(sources) if s is source)
            try:
                runs[number] = stopwatch(source, compiled)
            except DeviceError as error:  # more registers or shared memory than the device has
                failures.append(error)
            else:
                first[number] = median_of(runs[number])

        nvrtc.compile_kernels(
            sources, self.arch, cache=self._cache, options=self._options, jobs=self._jobs, progress=race
        )
        if not first:
            raise failures[0]
        times = finals(runs, first)
        won = winner(times)
        return Tuned(candidates[won], times[won], times.get(0, first.get(0)))


def winner(times: dict[int, float]) -> int:
    """Returns the lowest number of a candidate within 2 % of the fastest; ``times``: number -> microseconds."""
    fastest = min(times.values())
    return min(n for n, us in times.items() if us <= fastest * TIE)


def finals(
    runs: Mapping[int, Callable[[], float]], first: Mapping[int, float], also: Sequence[int] = ()
) -> dict[int, float]:
    """Returns the microseconds of the fastest candidates, and of those in ``also``, timed again in turns.

    ``first``: those of the first round.
    """
    fastest = min(first.values())
    ranked = sorted((n for n in first if first[n] <= fastest * FINALIST), key=first.__getitem__)
    finalists = sorted({*ranked[:FINALISTS], *also})
    taken: dict[int, list[float]] = {n: [] for n in finalists}
    for _ in range(_repeats(fastest, SECOND_ROUND)):
        for n in finalists:
            taken[n].append(runs[n]())
    return {n: median(values) for n, values in taken.items()}


def median_of(run: Callable[[], float]) -> float:
    """Returns the median microseconds of the first round.

    The first run does not count, unless it takes so long that it is the only one.
    """
    once = run()
    repeats = _repeats(once, FIRST_ROUND)
    return once if repeats == 1 else median(run() for _ in range(repeats))


def _repeats(us: float, most: int) -> int:
    return max(1, min(most, int(ENOUGH_US / max(us, 1.0))))


class DeviceStopwatch:
    """Times kernels on a device, on random arrays like the tensors given.

    Raises DeviceError if the arrays do not fit the device's memory.
    """

    def __init__(self, tensors: Sequence[Tensor], device: int = 0) -> None:
        self._device = device
        self._arrays = [array_like(t, device, seed) for seed, t in enumerate(tensors)]
        self._timer = ColdTimer(device)

    def __call__(self, source: KernelSource, compiled: nvrtc.CompiledKernel) -> Callable[[], float]:
        pointers = [array.pointer for array in self._arrays]
        function = Module(compiled.cubin, self._device).function(source.name)
        launch = Launch.of(function, source, len(pointers))
        return lambda: self._timer.once(lambda: launch(pointers))


# --- what is remembered


def fingerprint(spec: KernelSpec) -> str:
    """Returns a digest of what a kernel computes: its specification without the names of kernel, nodes and tensors."""
    return digest(repr(canonical(spec)))


@functools.cache
def sources_digest() -> str:
    """Returns a digest of the renderers and the device library: another version of them may have another winner."""
    folder = Path(codegen.__file__).parent
    files = sorted([*folder.rglob("*.py"), *(folder / "device").glob("*.cuh")])
    return digest(*(part for file in files for part in (file.relative_to(folder).as_posix(), file.read_bytes())))


def _encode(tuned: Tuned) -> bytes:
    data = {"schedule": schedule_data(tuned.schedule), "us": tuned.us, "untuned_us": tuned.untuned_us}
    return json.dumps(data).encode()


def _decode(entry: bytes) -> Tuned | None:
    try:
        data = json.loads(entry)
        untuned = data["untuned_us"]
        return Tuned(
            schedule_from_data(data["schedule"]), float(data["us"]), None if untuned is None else float(untuned)
        )
    except (ValueError, KeyError, TypeError):
        return None
