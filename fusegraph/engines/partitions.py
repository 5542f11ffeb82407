"""Measured partitions: the choices of a plan are made otherwise, what differs is timed, and the faster is kept.

A plan's `Choice`s say what estimates decided.  For one choice after the other, those first by which most could be
gained if estimates are as wrong as they usually are, the graph is planned with the alternative.  Of both plans the
kernels that the other one has not are run, in their order, with a cold L2 cache; kernels that hand tensors to each
other are one sequence, and sequences that are alike, as those of a network's layers, are timed once.  Choices of layers
that are alike are made together.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, log
from statistics import median
from typing import Protocol, TypeAlias

import numpy as np

from codegen.canonical import canonical
from codegen.target import Target
from fusegraph.engines.plans import Planner, graph_key
from fusegraph.engines.scratch import array_like
from fusegraph.errors import FusegraphError
from fusegraph.graph import Graph, Tensor
from fusegraph.lowering.base import Options
from fusegraph.lowering.choices import Choice, Key, Settled, Settling
from fusegraph.passes.rewrite import as_given
from fusegraph.plan import Kernel, Plan
from fusegraph.runtime import nvrtc
from fusegraph.runtime.arrays import to_device
from fusegraph.runtime.cache import DiskCache, digest
from fusegraph.runtime.launch import Launch, Module
from fusegraph.runtime.timing import ColdTimer

#: The seconds after which no further alternative of a graph is tried.
LIMIT_S = 60.0
#: How much faster an alternative must be to be kept; how much slower it may be for its schedules to be tuned.
TIE, NEAR = 1.02, 1.5
#: Alternatives that are estimated to take so many times as long are not tried.
FAR = 6.0
#: The usual error of estimates, as the standard deviation of the logarithm of their ratio.
ERROR = 0.5
#: Runs of each sequence that count, and that do not.
REPEATS, WARMUP = 7, 2

#: Choices that are made together, by one alternative.
Trial: TypeAlias = tuple[tuple[Choice, ...], str]


class Clock(Protocol):
    """Times kernels that run one after the other."""

    def __call__(self, kernels: Sequence[Kernel]) -> Callable[[], float]:
        """Returns a function that runs kernels once and returns the time in microseconds.

        Raises FusegraphError if they cannot be compiled or run.
        """


@dataclass
class PartitionTuner:
    """Decides on the choices of graphs by time.

    planner  plans a graph for options.
    clock    times sequences of kernels.
    tuned    plans it with schedules that were timed, for alternatives that come near; default: ``planner``.
    limit_s  as `LIMIT_S`; ``now`` tells the seconds.
    """

    planner: Planner
    clock: Clock
    tuned: Planner | None = None
    limit_s: float = LIMIT_S
    now: Callable[[], float] = time.monotonic

    def tune(self, graph: Graph, options: Options) -> Settling:
        """Returns what measurements say of the choices of a graph; nothing of those without any."""
        end = self.now() + self.limit_s
        settled: dict[Key, Settled] = dict(options.settled)
        best = (self.tuned or self.planner)(as_given(graph), options)
        tried: set[tuple[Key, str]] = set()
        while self.now() < end and (trial := _next(best.choices, tried)) is not None:
            choices, other = trial
            tried |= {(c.key, name) for c in choices for name in (other, c.taken)}
            made = replace(options, settled={**settled, **{c.key: Settled(other) for c in choices}})
            try:
                found, us = self._raced(graph, made, best)
            except FusegraphError:  # more registers or memory than there is: no alternative
                continue
            if us is None:
                continue
            won = us[1] * TIE < us[0]
            for c in choices:
                times = {**c.us, c.taken: us[0], other: us[1]}
                settled[c.key] = Settled(other if won else c.taken, times)
            best = found if won else best
        return settled

    def _raced(self, graph: Graph, options: Options, best: Plan) -> tuple[Plan, tuple[float, float] | None]:
        """Returns the plan for options, and the microseconds in which the best one and it differ, if they do."""
        found = self.planner(as_given(graph), options)
        us = compared(best, found, self.clock)
        if us is not None and self.tuned is not None and us[1] < NEAR * us[0]:
            found = self.tuned(as_given(graph), options)
            us = compared(best, found, self.clock)
        return found, us


def _next(choices: Iterable[Choice], tried: set[tuple[Key, str]]) -> Trial | None:
    """Returns the choices, and the alternative to them, by which most could be gained; None if all were tried."""
    together: dict[object, list[Choice]] = {}
    for choice in choices:
        alike = choice.what, choice.taken, tuple(choice.cycles.items()), choice.alike
        together.setdefault(alike, []).append(choice)
    trials: list[tuple[float, Trial]] = []
    for found in together.values():
        for other in found[0].others:
            left = tuple(c for c in found if (c.key, other) not in tried)
            if left and (gain := _promise(left[0], other)) is not None:
                trials.append((gain * len(left), (left, other)))
    return max(trials, key=lambda trial: trial[0], default=(0.0, None))[1]


def _promise(choice: Choice, other: str) -> float | None:
    """Returns the cycles that could be gained by an alternative, 0 if nobody knows; None if it is far behind."""
    now, then = choice.cycles[choice.taken], choice.cycles[other]
    if now is None or then is None:
        return 0.0
    if then > FAR * now:
        return None
    return now * exp(-((log(then / now) / ERROR) ** 2) / 2) if then > now else now


# --- what differs


def compared(first: Plan, second: Plan, clock: Clock) -> tuple[float, float] | None:
    """Returns the microseconds of the kernels in which two plans of a graph differ; None if they do not."""
    one, two = _without_common(first.kernels, second.kernels)
    if not one and not two:
        return None
    runs = [[(clock(kernels), count) for kernels, count in _together(_sequences(side))] for side in (one, two)]
    taken: dict[tuple[int, int], list[float]] = {}
    for repeat in range(WARMUP + REPEATS):
        for side, every in enumerate(runs):
            for number, (run, _) in enumerate(every):
                us = run()
                if repeat >= WARMUP:
                    taken.setdefault((side, number), []).append(us)
    first_us, second_us = (
        sum(count * median(taken[side, number]) for number, (_, count) in enumerate(every))
        for side, every in enumerate(runs)
    )
    return first_us, second_us


def _identity(kernel: Kernel) -> str:
    """Returns what kernels that do the same in the same way have in common."""
    return f"{canonical(kernel.group.lowered.spec)!r} {kernel.choice.schedule!r}"


def _without_common(first: Sequence[Kernel], second: Sequence[Kernel]) -> tuple[list[Kernel], list[Kernel]]:
    """Returns the kernels of both plans without those that write the same tensors in the same way in both."""
    named = [[(_identity(k), tuple(t.name for t in k.group.writes)) for k in side] for side in (first, second)]
    common = Counter(named[0]) & Counter(named[1])
    sides = []
    for kernels, names in zip((first, second), named):
        left, rest = Counter(common), list[Kernel]()
        for kernel, name in zip(kernels, names):
            if left[name]:
                left[name] -= 1
            else:
                rest.append(kernel)
        sides.append(rest)
    return sides[0], sides[1]


def _sequences(kernels: Sequence[Kernel]) -> list[tuple[list[Kernel], int]]:
    """Returns kernels that hand tensors to each other as sequences, of those that are alike one, and their number."""
    sequence_of: dict[Tensor, list[Kernel]] = {}
    sequences: list[list[Kernel]] = []
    for kernel in kernels:
        joined = [kernel]
        for tensor in (t.base for t in kernel.group.reads):
            before = sequence_of.get(tensor)
            if before is not None and any(before is s for s in sequences):
                sequences = [s for s in sequences if s is not before]
                joined[:0] = before
        sequences.append(joined)
        for member in joined:
            sequence_of.update((t.base, joined) for t in member.group.writes)
    alike: dict[tuple[str, ...], list[list[Kernel]]] = {}
    for sequence in sequences:
        alike.setdefault(tuple(map(_identity, sequence)), []).append(sequence)
    return [(found[0], len(found)) for found in alike.values()]


def _together(sequences: Sequence[tuple[list[Kernel], int]]) -> list[tuple[list[Kernel], int]]:
    """Returns those of which there are as many as one sequence: only its first kernel begins on an idle GPU."""
    joined: dict[int, list[Kernel]] = {}
    for kernels, count in sequences:
        joined.setdefault(count, []).extend(kernels)
    return [(kernels, count) for count, kernels in joined.items()]


class DeviceClock:
    """Times sequences of kernels on a device, on random arrays, with a cold L2 cache before the first of them."""

    def __init__(
        self, target: Target, cache: DiskCache, options: Sequence[str] = (), device: int = 0, jobs: int | None = None
    ) -> None:
        """``options`` are NVRTC's; ``jobs`` is how many kernels are compiled at a time."""
        self._target, self._cache, self._options = target, cache, tuple(options)
        self._device, self._jobs = device, jobs

    @cached_property
    def _timer(self) -> ColdTimer:
        return ColdTimer(self._device)

    def __call__(self, kernels: Sequence[Kernel]) -> Callable[[], float]:
        """Returns a function that runs kernels once and returns the microseconds.

        Raises CompileError, and DeviceError if the device cannot run them or lacks memory for their tensors.
        """
        compiled = nvrtc.compile_kernels(
            [k.source for k in kernels], self._target.arch.name, cache=self._cache, options=self._options,
            jobs=self._jobs,
        )  # fmt: skip
        bases = dict.fromkeys(t.base for k in kernels for t in k.arguments)
        indices = {t.base for k in kernels for t in k.group.positions}  # kernels do nothing at those out of range
        values = {t: np.zeros(t.shape, t.dtype.numpy) if t in indices else t.value for t in bases}
        arrays = {
            t: array_like(t, self._device, seed) if value is None else to_device(value, self._device)
            for seed, (t, value) in enumerate(values.items())
        }
        steps: list[tuple[Launch, list[int]]] = []
        for kernel, cubin in zip(kernels, compiled):
            source = kernel.source
            if 0 in source.grid:
                continue
            function, early = Module(cubin.cubin, self._device).function(source.name), self._target.arch.has_pdl
            launch = Launch.of(function, source, len(kernel.arguments), overlapping=early and bool(steps))
            places = [arrays[t.base].pointer + t.start * t.dtype.itemsize for t in kernel.arguments]
            steps.append((launch, places))

        def run(held: object = arrays) -> None:
            for launch, places in steps:
                launch(places)

        self._timer.reset()
        return lambda: self._timer.once(run)


# --- what is remembered


def settling(planner: Planner, tuner: PartitionTuner | None, cache: DiskCache, device_name: str) -> Planner:
    """Returns a planner that makes choices as they were measured on a device; with a ``tuner`` they are measured now.

    What was measured is kept under a key of the graph, the options and the sources.
    """
    ever = digest("settled", device_name)

    def planned(graph: Graph, options: Options) -> Plan:
        if tuner is None and cache.get(ever) is None:
            return planner(graph, options)
        key = graph_key(graph, options, f"settled on {device_name}")
        found = None if key is None else _decoded(cache.get(key))
        if found is None and tuner is not None:
            found = tuner.tune(graph, options)
            if key is not None:
                cache.put(key, _encoded(found))
                cache.put(ever, b"1")
        return planner(graph, replace(options, settled=found) if found else options)

    return planned


def _encoded(settled: Settling) -> bytes:
    return json.dumps([[*key, choice.taken, dict(choice.us)] for key, choice in settled.items()]).encode()


def _decoded(entry: bytes | None) -> Settling | None:
    try:
        return None if entry is None else {(w, n): Settled(taken, us) for w, n, taken, us in json.loads(entry)}
    except (ValueError, TypeError):
        return None
