"""Measures decoding: several processes compile at a time, and then time what they have compiled, one after the other.

A process measures one task on all engines.  None compiles while another one times: it would take the device's time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fusegraph.bench.decode.steps import Decoding, device_bytes, engines_of
from fusegraph.bench.torch_engines import OURS, difference, kept
from fusegraph.bench.torch_timing import median_us, replay_us
from fusegraph.bench.workers import Failure, alone, each, processors
from fusegraph.bench.zoo.run import Figures, Row, Task, Zoo, begin, free, wait
from fusegraph.runtime import driver
from fusegraph.runtime.targets import present

#: Seconds that an engine has for its first call, and for what is timed, and a process for all.
COMPILE_S, TIME_S, PROCESS_S = 300.0, 60.0, 900.0
#: The share of a device's memory, and of the processors, that processes take.
_MEMORY, _PROCESSORS = 0.85, 0.75
#: How reasons of failures begin, or what they say, that come of too little memory.
_NO_MEMORY = ("out of memory", "OUT_OF_MEMORY", "its process ended")


class Decodings(Zoo):
    """Tasks of decoding, and the rows of those that were measured; ``peers`` tells whether those are timed as well."""

    def __init__(self, tasks: Sequence[Task], file: Path | None, caches: Path, *, peers: bool = True) -> None:
        super().__init__(tasks, file, caches, Decoding)
        # Tasks share what compilers keep: most kernels of a model are those of another batch or position.
        self.tasks = [replace(task, caches=str(caches / "decode")) for task in self.tasks]
        self.peers = peers

    def measure(self, processes: int, end: float) -> Iterator[Row]:
        """Measures the tasks that have not been timed; yields their rows.

        Those that fail for want of memory beside others are measured again, alone.
        """
        while left := [task for task in self.tasks if not self._timed(task)]:
            part = left[: together(left, processes)]
            yield from self._measure(part, len(part), end)
            if len(part) > 1:
                again = [task for task in part if task.name in self.rows and _no_memory(self.rows[task.name])]
                yield from self._measure(again, 1, end)
            if not all(map(self._timed, part)):
                return

    def _timed(self, task: Task) -> bool:
        wanted = engines_of(self.peers and task.device == "cuda")
        return super()._timed(task) and all(engine in self.rows[task.name].engines for engine in wanted)

    def _measure(self, tasks: Sequence[Task], processes: int, end: float) -> Iterator[Row]:
        for task, result in each(partial(measured, self.peers), tasks, processes, PROCESS_S, end):
            row = self._row(task)
            row.timed = True
            if isinstance(result, Failure):
                row.engines = {engine: Figures(why={"time": result.reason}) for engine in engines_of(self.peers)}
            else:
                for name, value in result.items():
                    setattr(row, name, value)
            self._save()
            yield row


def _no_memory(row: Row) -> bool:
    reasons = [why for of in row.engines.values() for why in of.why.values()]
    return any(word in why for why in reasons for word in _NO_MEMORY)


def processes_for(device: str) -> int:
    """Returns how many processes compile at a time."""
    return max(1, int(processors() * _PROCESSORS)) if device == "cuda" else 1


def together(tasks: Sequence[Task], processes: int) -> int:
    """Returns how many of these tasks, from the first, are measured at a time: at least one, and as many as the
    device's memory takes.
    """
    if tasks[0].device != "cuda":
        return 1
    left, count = _MEMORY * driver.properties(0).total_memory, 0
    for task in tasks[:processes]:
        left -= device_bytes(task)
        if left < 0:
            break
        count += 1
    return max(1, count)


# ---- in a process of its own


def measured(peers: bool, task: Task) -> dict[str, Any]:
    """Returns what a row has of a task, by name."""
    begin(task)
    import torch

    figures = {engine: Figures() for engine in ("eager", *engines_of(peers and task.device == "cuda"))}
    row: dict[str, Any] = {"engines": figures, "expected": "", "left": []}
    with torch.no_grad():
        with alone(task.caches, compiles=True):
            subject = Decoding(task)
            row |= {"bytes": subject.bytes, "flops": subject.flops, "notes": subject.notes}
            steps = _first_calls(task, subject, row)
        if task.device == "cuda":
            row |= {"memory": present().memory_rate, "rate": present().published or None}
            with alone(task.caches):
                for engine, step in steps.items():
                    of = figures[engine]
                    with kept(of.why, "time", TIME_S):
                        of.call_us = median_us(step)
                    with kept(of.why, "replay", TIME_S):
                        of.replay_us = replay_us(step)
    return row


def _first_calls(task: Task, subject: Decoding, row: dict[str, Any]) -> dict[str, Any]:
    """Calls every engine once, and fills in what this tells; returns what is to be timed, by engine."""
    import fusegraph.torch

    expected, steps = None, {}
    for engine, of in row["engines"].items():
        with kept(of.why, "compile", COMPILE_S):
            began = time.perf_counter()
            step = subject.step(engine)
            got = step()
            wait(task.device)
            of.cold_s = round(time.perf_counter() - began, 2)
            if engine == "eager":
                expected, row["expected"] = got, engine
                continue
            steps[engine] = step
            if engine == OURS:
                reports = fusegraph.torch.report()
                row["left"] = sorted({op for f in reports for _, op, _ in f.left})
                of.kernels = sum(f.kernels for f in reports) or None
            if expected is not None:
                of.error = difference(expected, got)
            del got
        free(task.device)
    return steps
