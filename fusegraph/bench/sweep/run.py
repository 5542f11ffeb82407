"""Measures a sweep in rounds: parallel processes compile cases for a while, then time them, one process at a time.

A run goes on where the last one stopped: rows are saved as they come, by the number of their case.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fusegraph.bench.sweep.measured import LIMIT_S, Measured, Settings
from fusegraph.bench.sweep.rows import Row, row_from_data
from fusegraph.bench.workers import Failure, Servant
from fusegraph.report import artifacts

#: Seconds in which cases are compiled before all of them are timed.
ROUND_S = 45.0
#: Seconds after which a process that compiles a case with all engines, or times its cases, is given up.
GIVEN_UP_S = 4 * LIMIT_S


class Sweep:
    """A sweep with the rows that it has; they are kept in a file, if one is given."""

    def __init__(self, settings: Settings, file: Path | None = None) -> None:
        self.settings, self.file = settings, file
        self.rows: dict[int, Row] = {}
        self.facts: dict[str, Any] = {}
        self._told = {"seed": settings.seed, "kinds": list(settings.kinds), "dtypes": list(settings.dtypes)}
        if file is not None and file.is_file():
            found = json.loads(file.read_text("utf-8"))
            if all(found[key] == value for key, value in self._told.items()):
                self.rows = {row["number"]: row_from_data(row) for row in found["rows"]}

    def save(self) -> None:
        """Writes all rows to the file."""
        if self.file is not None:
            rows = [asdict(self.rows[n]) for n in sorted(self.rows)]
            artifacts.write_file(self.file, artifacts.json_text({**self.facts, **self._told, "rows": rows}))

    def missing(self, count: int) -> list[int]:
        return [n for n in range(count) if n not in self.rows]

    def measure(
        self, count: int, processes: int, end: float, make: Callable[[Settings], Any] = Measured
    ) -> Iterator[Row]:
        """Yields rows of missing cases as they are measured; none is begun after ``end`` of `time.perf_counter`.

        A process that crashes or hangs has a row that says so for the case that it compiled, and is replaced.
        """
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        left = deque(self.missing(count))
        workers = [_Worker(partial(make, self.settings)) for _ in range(min(processes, len(left)))]
        try:
            while True:
                began = bool(left) and time.perf_counter() < end
                for row in (*self._compile(workers, left, end), *self._time(workers)):
                    self.rows[row.number] = row
                    yield row
                self.save()
                if not began:
                    return
        finally:
            for worker in workers:
                worker.servant.end()

    def _compile(self, workers: list[_Worker], left: deque[int], end: float) -> Iterator[Row]:
        """Examines slow cases and compiles others for a round; yields rows of those whose process fails."""
        until = min(time.perf_counter() + ROUND_S, end)
        for worker in workers:
            worker.servant.begin("examine", limit_s=GIVEN_UP_S)
        busy = list(workers)
        while busy:
            ready = Servant.ready([worker.servant for worker in busy])
            for worker in [worker for worker, has in zip(busy, ready, strict=True) if has]:
                answer = worker.servant.result()
                if isinstance(answer, Failure):
                    failed = worker.numbers[-1:]
                    left.extendleft(worker.numbers[:-1])
                    yield from self._failed(worker, failed, answer)
                if left and time.perf_counter() < until:
                    worker.numbers.append(left.popleft())
                    worker.servant.begin("compile", worker.numbers[-1], limit_s=GIVEN_UP_S)
                else:
                    busy.remove(worker)

    def _time(self, workers: list[_Worker]) -> Iterator[Row]:
        for worker in workers:
            worker.servant.begin("time", limit_s=GIVEN_UP_S)
            answer = worker.servant.result()
            if isinstance(answer, Failure):
                yield from self._failed(worker, worker.numbers, answer)
            else:
                yield from answer
            worker.numbers = []

    def _failed(self, worker: _Worker, numbers: list[int], failure: Failure) -> Iterator[Row]:
        for number in numbers:
            drawn = self.settings.case(number)
            yield Row(number, drawn.name, drawn.kind, drawn.dtype, why={"fusegraph": failure.reason})
        worker.replace()


class _Worker:
    """A process that measures, and the numbers of the cases that it has compiled in this round."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.servant, self.numbers = Servant(make), list[int]()

    def replace(self) -> None:
        self.servant.end()
        self.servant, self.numbers = Servant(self._make), []
