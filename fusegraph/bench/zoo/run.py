"""Measures what torch.compile makes of models: it compiles them in parallel processes, then times one at a time.

A run goes on where the last one stopped: rows are saved as they come, beside a folder with the caches.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from fusegraph.bench.kept import Kept
from fusegraph.bench.precision import allow_tf32
from fusegraph.bench.torch_engines import ENGINES, OURS, difference, kept, on_engine, use_caches
from fusegraph.bench.torch_timing import kernels_of_call, median_us, other_bytes, peaks_mb, replay_us
from fusegraph.bench.workers import Failure, alone, each, processors
from fusegraph.bench.zoo.models import MODELS, called
from fusegraph.report import artifacts
from fusegraph.runtime.targets import present

#: Seconds that an engine has for a model's first call, and for all that is timed.
COMPILE_S, TIME_S = 300.0, 240.0


@dataclass(frozen=True)
class Task:
    """A model in a dtype (`fusegraph.bench.zoo.models.DTYPES`) at a batch; ``caches`` is the folder of its caches.

    mode    "": inference; else one of `fusegraph.bench.training.steps.MODES`.
    device  "cuda", or "cpu" for a small model, of which nothing is timed but its first calls.
    single  whether it needs so much memory that no other one is compiled beside it.
    """

    model: str
    dtype: str
    batch: int
    mode: str = ""
    device: str = "cuda"
    single: bool = False
    caches: str = ""

    @property
    def name(self) -> str:
        parts = (self.model, self.dtype, f"b{self.batch}", self.mode, self.device if self.device != "cuda" else "")
        return " ".join(part for part in parts if part)


class Subject:
    """What a task measures: inference.  Subclasses measure steps of training.

    engines    that it runs on.
    gradients  whether torch keeps what gradients need.
    calls      how many of its first calls have results that are compared.
    """

    engines: tuple[str, ...] = tuple(ENGINES)
    gradients = False
    calls = 1

    def __init__(self, task: Task) -> None:
        module, names, self.inputs = MODELS[task.model].loaded(task.dtype, task.device, task.batch)
        self.call = called(module, names)

    def step(self, engine: str) -> Callable[[], list[Any]]:
        """Returns what an engine runs; its first call compiles it."""
        function, inputs = on_engine(engine, self.call), self.inputs
        return lambda: [function(*inputs)]

    def expected(self) -> tuple[str, list[Any]] | None:
        """Returns by what the results of the first calls are judged, and these on the host; None: they are random."""
        return "eager", results(self.step("eager"), self.calls)


#: Makes what a task measures; a function or class of a module.
Make: TypeAlias = Callable[[Task], Subject]


@dataclass
class Figures:
    """What was measured of an engine.

    cold_s, warm_s  seconds of the first call, with empty caches on disk beside other processes, and with full ones.
    call_us         of a call, the host's work included, and replay_us of a replay of its CUDA graph; cold L2, medians.
    error           the largest difference to what is expected, relative to the largest element of a tensor.
    kernels         that a call runs.
    pool_mb         megabytes that a call takes of torch's pool at most, the model's included; peak_mb with what is
                    taken beside the pool, as by our intermediates; held_mb with what the pool holds but does not use.
    why             what failed: phase -> reason.
    """

    cold_s: float | None = None
    warm_s: float | None = None
    call_us: float | None = None
    replay_us: float | None = None
    error: float | None = None
    kernels: int | None = None
    peak_mb: float | None = None
    why: dict[str, str] = field(default_factory=dict)
    pool_mb: float | None = None
    held_mb: float | None = None


@dataclass
class Row:
    """A task with the figures of its engines.

    left      operators that fusegraph left to torch.
    timed     whether all has been measured.
    expected  by what errors are told: "eager" or "float64"; empty where results are random.
    flops     operations of a call's products and convolutions, without what is computed again; of training and prompts.
    rate      operations on 16 bits that the device's data sheet promises in a microsecond.
    commit    that it was measured at.
    bytes     that a call has to read at least, where that is what it takes its time for.
    memory    bytes that the device's memory moves in a microsecond, by its data sheet.
    notes     on how it was measured.
    """

    model: str
    dtype: str
    batch: int
    engines: dict[str, Figures] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    timed: bool = False
    mode: str = ""
    device: str = "cuda"
    expected: str = "eager"
    flops: int | None = None
    rate: float | None = None
    commit: str | None = None
    bytes: int | None = None
    memory: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return Task(self.model, self.dtype, self.batch, self.mode, self.device).name

    def figure(self, engine: str, figure: str) -> Any:
        """Returns a figure of an engine; None if there is none."""
        return getattr(self.engines.get(engine, Figures()), figure)

    def ratio(self, figure: str) -> float | None:
        """Returns how many times as much as fusegraph inductor takes, such as by "call_us"; None: not both."""
        ours, theirs = (self.figure(engine, figure) for engine in (OURS, "inductor"))
        return theirs / ours if ours and theirs else None

    def mfu(self, engine: str) -> float | None:
        """Returns the share of the device's operations on 16 bits that an engine's calls use, as "MFU"; None: unknown.

        What it computes twice is not counted.
        """
        us = self.figure(engine, "call_us")
        if not us or not self.flops or not self.rate or self.dtype in ("fp32", "tf32"):
            return None
        return float(self.flops / us / self.rate)

    def read_rate(self, engine: str) -> float | None:
        """Returns the bytes a microsecond at which the device reads, in a replay of an engine's call, what the call has
        to read; None: unknown.
        """
        us = self.figure(engine, "replay_us")
        return float(self.bytes / us) if us and self.bytes else None

    def share(self, engine: str) -> float | None:
        """Returns `read_rate` as a share of the rate of the device's memory; None: unknown."""
        rate = self.read_rate(engine)
        return rate / self.memory if rate and self.memory else None


def row_from_data(data: Mapping[str, Any]) -> Row:
    """Returns the row of which `dataclasses.asdict` made this data."""
    return Row(**{**data, "engines": {name: Figures(**of) for name, of in data["engines"].items()}})


class Zoo(Kept[Row]):
    """Tasks, and the rows of those that were measured, kept in a file; ``make`` makes what a task measures."""

    def __init__(self, tasks: Sequence[Task], file: Path | None, caches: Path, make: Make = Subject) -> None:
        super().__init__(file, row_from_data, lambda row: row.name)
        self.make = make
        self.tasks = [replace(task, caches=str(caches / artifacts.safe_name(task.name))) for task in tasks]

    def measure(self, processes: int, end: float) -> Iterator[Row]:
        """Measures the tasks that have not been timed; yields their rows, first compiled and then timed.

        Some are compiled in parallel, then these are timed, so that a run that is cut short has timed most of what it
        compiled.
        """
        while left := [task for task in self.tasks if not self._timed(task)]:
            first = next((n for n, task in enumerate(left) if task.single), len(left))
            part = left[: min(processes, first) or 1]
            yield from self._compile(part, processes, end)
            yield from self._time(part, end)
            if not all(map(self._timed, part)):
                return

    def _timed(self, task: Task) -> bool:
        return task.name in self.rows and self.rows[task.name].timed

    def _row(self, task: Task) -> Row:
        row = self.rows.setdefault(task.name, Row(task.model, task.dtype, task.batch))
        row.mode, row.device, row.commit = task.mode, task.device, self.facts.get("commit")
        return row

    def _save(self) -> None:
        self.save(complete=all(map(self._timed, self.tasks)))

    def _compile(self, tasks: Sequence[Task], processes: int, end: float) -> Iterator[Row]:
        """Compiles the tasks that have no caches, in parallel; yields their rows, with the seconds of first calls."""
        missing = [task for task in tasks if task.name not in self.rows or not Path(task.caches).exists()]
        for task, result in each(partial(_first_calls, self.make), missing, processes, COMPILE_S * len(ENGINES), end):
            row = self._row(task)
            if isinstance(result, Failure):
                row.engines = {engine: Figures(why={"compile": result.reason}) for engine in ENGINES}
            else:
                row.engines = result
            self._save()
            yield row

    def _time(self, tasks: Sequence[Task], end: float) -> Iterator[Row]:
        """Times tasks, one at a time; yields their rows."""
        # While one process measures, the next one imports what it needs.
        for task, result in each(partial(_times, self.make), tasks, 2, 2 * TIME_S * len(ENGINES), end):
            row = self._row(task)
            before, row.timed = row.engines, True
            if isinstance(result, Failure):
                for engine in ENGINES:
                    row.engines.setdefault(engine, Figures()).why["time"] = result.reason
            else:
                row.engines = dict(before)
                for engine, found in result.pop("engines").items():
                    cold = before.get(engine, Figures())
                    # What failed beside others, as for want of memory, is told unless it runs alone.
                    why = {**cold.why, **found.why} if found.why else {}
                    row.engines[engine] = replace(found, cold_s=cold.cold_s, why=why)
                for name, value in result.items():
                    setattr(row, name, value)
            self._save()
            yield row


# ---- in a process of its own


def begin(task: Task) -> None:
    """Sets a process up for a task, before torch is imported: caches, threads that compile, precision, seed."""
    use_caches(task.caches)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(processors()) if task.single else "1"
    import torch

    allow_tf32(task.dtype)
    torch.manual_seed(0)


def engines(task: Task, subject: Subject) -> list[str]:
    """Returns the engines that a task is measured on: without a GPU there is no other compiler."""
    return [engine for engine in subject.engines if task.device == "cuda" or engine != "inductor"]


def results(step: Callable[[], Sequence[Any]], calls: int) -> list[Any]:
    """Returns the results of so many calls, on the host."""
    return [x for _ in range(calls) for x in _on_host(step())]


def _on_host(tensors: Sequence[Any]) -> list[Any]:
    return [x.detach().to("cpu", copy=True) for x in tensors]


def wait(device: str) -> None:
    """Waits for a device."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def free(device: str) -> None:
    """Gives back to a device what nothing needs any more."""
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def operations(step: Callable[[], Any]) -> int:
    """Returns how many operations the products and convolutions of a call in eager mode have."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def _first_calls(make: Make, task: Task) -> dict[str, Figures]:
    """Returns the seconds of each engine's first call of a model, nothing of it being in a cache."""
    begin(task)
    import torch

    subject = make(task)
    found = {engine: Figures() for engine in engines(task, subject)}
    with torch.set_grad_enabled(subject.gradients):
        for engine, figures in found.items():
            with kept(figures.why, "compile", COMPILE_S):
                on_engine(engine, lambda x: x + 1)(torch.zeros(1, device=task.device))  # loads the compiler itself
                figures.cold_s = _called(task, subject, engine)[0]
            free(task.device)
    return found


def _called(task: Task, subject: Subject, engine: str) -> tuple[float, Callable[[], list[Any]], list[Any]]:
    """Returns the seconds of a first call, the step, and the results of the call."""
    began = time.perf_counter()
    step = subject.step(engine)
    found = step()
    wait(task.device)
    return round(time.perf_counter() - began, 2), step, found


def _times(make: Make, task: Task) -> dict[str, Any]:
    """Returns what a row has of a task, by name; one such process measures at a time."""
    begin(task)
    import torch

    with alone(task.caches):
        subject = make(task)
        found = {engine: Figures() for engine in engines(task, subject)}
        row: dict[str, Any] = {"engines": found, "expected": ""}
        with torch.set_grad_enabled(subject.gradients):
            right: tuple[str, list[Any]] | None = None
            with kept(next(iter(found.values())).why, "expected", TIME_S):
                right = subject.expected()
                row["expected"] = right[0] if right else ""
            for engine, figures in found.items():
                free(task.device)
                with kept(figures.why, "time", TIME_S):
                    row |= _measured(task, subject, engine, figures, right[1] if right else None)
            free(task.device)
    return row


def _measured(
    task: Task, subject: Subject, engine: str, figures: Figures, expected: Sequence[Any] | None
) -> dict[str, Any]:
    """Fills in an engine's figures; returns what a row has of this engine alone, by name."""
    import fusegraph.torch

    fusegraph.torch.report(clear=True)
    other, row = other_bytes() if task.device == "cuda" else 0, dict[str, Any]()
    figures.warm_s, step, got = _called(task, subject, engine)
    if engine == OURS:
        reports = fusegraph.torch.report()
        row["left"] = sorted({op for f in reports for _, op, _ in f.left})
        figures.kernels = sum(f.kernels for f in reports) or None
    if expected is not None:
        if subject.calls > 1:
            got = [*_on_host(got), *results(step, subject.calls - 1)]
        figures.error = difference(expected, got)
    del got
    if engine == "eager" and subject.gradients:
        row["flops"] = operations(step) or None
    if task.device == "cuda":
        row["rate"] = present().published or None
        figures.pool_mb, figures.peak_mb, figures.held_mb = peaks_mb(step, other)
        figures.call_us = median_us(step)
        figures.kernels = len(kernels_of_call(step))
        with kept(figures.why, "replay", TIME_S):
            figures.replay_us = replay_us(step)
    return row


# ---- what was asked for


def tasks(wanted: Callable[[str], Any], dtypes: Sequence[str], batches: Sequence[int]) -> list[Task]:
    """Returns the tasks of models whose names are wanted; a batch of 0 is the model's usual one."""
    return [
        Task(model.name, dtype, batch)
        for dtype in dtypes
        for model in MODELS.values()
        if wanted(model.name)
        for batch in dict.fromkeys(batch or model.batch for batch in batches)
    ]
