"""Times the schedules of kernels: compiled by parallel processes, timed one at a time as they are compiled.

A run goes on where the last one stopped: kernels that are in its file are not measured again.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from codegen import Schedule, render, schedule_data, schedules
from codegen.spec import KernelSource
from codegen.target import Target
from fusegraph.bench.schedules.kernels import Kernel, Source, kernel_data, kernel_from_data, kernels_of, merged
from fusegraph.bench.workers import told
from fusegraph.engines.autotune import DeviceStopwatch, finals, median_of, sources_digest
from fusegraph.errors import FusegraphError
from fusegraph.report import artifacts
from fusegraph.report.estimates import predicted_us
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.targets import named

#: How many kernels are measured between two times that the file is written.
SAVED = 20
#: A kernel that moves fewer bytes than these takes about as long as one that does nothing, whatever its schedule.
LITTLE = 1 << 19


@dataclass(frozen=True)
class _Job:
    """A schedule of a kernel, to be rendered and compiled."""

    kernel: Kernel
    schedule: Schedule
    target: Target


def planned(
    sources: Sequence[Source], target: Target, device: str, processes: int
) -> Iterator[tuple[Source, list[Kernel] | str]]:
    """Yields sources with their kernels, planned by parallel processes, or with the reason why there are none."""
    with _processes(min(processes, len(sources))) as pool:
        yield from zip(sources, pool.imap(_planned, [(source, target, device) for source in sources]))


def _planned(job: tuple[Source, Target, str]) -> list[Kernel] | str:
    try:
        return kernels_of(*job)
    except Exception as error:  # what torch cannot trace here is told, and the others go on
        return told(error)


def _processes(count: int) -> Any:
    return multiprocessing.get_context("spawn").Pool(count)


def _compiled(job: _Job) -> tuple[KernelSource, nvrtc.CompiledKernel] | str:
    try:
        source = render(replace(job.kernel.spec, name="kernel"), job.schedule, job.target)
        (kernel,) = nvrtc.compile_kernels([source], job.target.arch.name, cache=default_cache(), jobs=1)
    except FusegraphError as error:
        return told(error)
    return source, kernel


class Measurements:
    """Measured schedules on one target, kept in a file: kernels by key, and the rows of those that are measured.

    most  how many schedules of a kernel are timed at most.
    """

    def __init__(self, target: Target, most: int, file: Path | None = None) -> None:
        self.target, self.most, self.file = target, most, file
        self.kernels: dict[str, Kernel] = {}
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.sources: list[str] = []
        self.facts: dict[str, Any] = {}
        self._told = {"target": target.name, "most": most, "codegen": sources_digest()}
        if file is not None and file.is_file():
            found = json.loads(file.read_text("utf-8"))
            if all(found.get(key) == value for key, value in self._told.items()):
                self.sources = found["sources"]
                self.kernels, self.rows = _read(found)

    def save(self) -> None:
        """Writes everything to the file."""
        if self.file is not None:
            rows = [{**kernel_data(k), "schedules": self.rows.get(key, [])} for key, k in self.kernels.items()]
            head = {"environment": self.facts, **self._told, "sources": self.sources}
            lines = ",\n".join(map(json.dumps, rows))
            artifacts.write_file(self.file, f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')

    def plan(self, sources: Sequence[Source], device: str, processes: int, failed: Callable[[str, str], None]) -> None:
        """Adds the kernels of those sources that have not been planned; ``failed`` is told of those that fail.

        Kernels are in an order that does not depend on their sources, so that the first few are like all; those that
        move little come last.
        """
        missing = [source for source in sources if source.name not in self.sources]
        found = [list(self.kernels.values())]
        for source, kernels in planned(missing, self.target, device, processes) if missing else ():
            if isinstance(kernels, str):
                failed(source.name, kernels)
            else:
                found.append(kernels)
                self.sources.append(source.name)
        ordered = sorted(merged(found), key=lambda kernel: (kernel.nbytes < LITTLE, kernel.key))
        self.kernels = {kernel.key: kernel for kernel in ordered}

    def measure(self, processes: int, end: float, stopwatch: Any = DeviceStopwatch) -> int:
        """Measures kernels until the time ``end`` of `time.perf_counter`; returns how many schedules have a time."""
        missing = [kernel for key, kernel in self.kernels.items() if key not in self.rows]
        for number, (kernel, candidates, compiled) in enumerate(self._candidates(missing, processes, end)):
            self.rows[kernel.key] = _timed(kernel, candidates, compiled, stopwatch, self.target)
            if number % SAVED == SAVED - 1:
                self.save()
        self.save()
        return sum(s["us"] is not None for rows in self.rows.values() for s in rows)

    def _candidates(
        self, kernels: Sequence[Kernel], processes: int, end: float
    ) -> Iterator[tuple[Kernel, Sequence[Schedule], list[tuple[KernelSource, nvrtc.CompiledKernel] | str]]]:
        """Yields kernels with their schedules, and these compiled, or the reasons why they are not."""
        every = [(kernel, schedules(kernel.spec, self.target)[: self.most]) for kernel in kernels]
        jobs = [_Job(kernel, schedule, self.target) for kernel, some in every for schedule in some]
        if not jobs:
            return
        with _processes(processes) as pool:
            done = pool.imap(_compiled, jobs)
            for kernel, some in every:
                try:
                    yield kernel, some, [done.next(timeout=max(end - time.perf_counter(), 0.01)) for _ in some]
                except multiprocessing.TimeoutError:
                    pool.terminate()
                    return


def _timed(
    kernel: Kernel,
    candidates: Sequence[Schedule],
    compiled: Sequence[tuple[KernelSource, nvrtc.CompiledKernel] | str],
    stopwatch: Any,
    target: Target,
) -> list[dict[str, Any]]:
    """Returns a kernel's schedules as data, with the times measured and estimated."""
    runs: dict[int, Callable[[], float]] = {}
    first: dict[int, float] = {}
    why = {n: found for n, found in enumerate(compiled) if isinstance(found, str)}
    try:
        clock = stopwatch(kernel.arguments)
        for n, found in enumerate(compiled):
            if not isinstance(found, str):
                try:
                    runs[n] = clock(*found)
                    first[n] = median_of(runs[n])
                except FusegraphError as error:  # more registers or shared memory than the device has
                    why[n] = told(error)
        times = {**first, **finals(runs, first, also=sorted({0} & first.keys()))} if first else {}
    except FusegraphError as error:  # the arrays do not fit the device's memory
        times, why = {}, dict.fromkeys(range(len(candidates)), told(error))
    runs.clear()
    gc.collect()
    return [
        {
            "schedule": schedule_data(schedule),
            "us": None if n not in times else round(times[n], 2),
            "predicted_us": round(predicted_us(kernel.spec, schedule, kernel.nbytes, target), 2),
            "why": why.get(n, ""),
        }
        for n, schedule in enumerate(candidates)
    ]


def _read(data: dict[str, Any]) -> tuple[dict[str, Kernel], dict[str, list[dict[str, Any]]]]:
    kernels = {row["key"]: kernel_from_data(row) for row in data["rows"]}
    return kernels, {row["key"]: row["schedules"] for row in data["rows"] if row["schedules"]}


def read(file: Path) -> tuple[Target, list[tuple[Kernel, list[dict[str, Any]]]]]:
    """Returns the target and the measured kernels of a file, with their schedules as data."""
    data = json.loads(file.read_text("utf-8"))
    kernels, rows = _read(data)
    return named(data["target"]), [(kernels[key], every) for key, every in rows.items()]
