"""Measures the zoo: models are compiled by parallel processes into empty caches, then timed one process at a time.

A run goes on where the last one stopped: rows are saved as they come, beside a folder with the caches.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from fusegraph.bench.precision import allow_tf32
from fusegraph.bench.torch_engines import ENGINES, OURS, kept, kernels_of_call, on_engine
from fusegraph.bench.workers import Failure, each
from fusegraph.bench.zoo.models import MODELS
from fusegraph.report import artifacts

#: Seconds that an engine has for a model's first call, and for all that is timed; seconds of runs that are timed, and
#: the fewest and the most of these.
COMPILE_S, TIME_S = 300.0, 120.0
TIMED_S, FEWEST, MOST = 0.5, 5, 50
#: Bytes that are written before every run, so that nothing that it reads is still in the L2 cache.
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Task:
    """A model in a dtype (`fusegraph.bench.zoo.models.DTYPES`) at a batch; ``caches`` is the folder of its caches."""

    model: str
    dtype: str
    batch: int
    caches: str = ""

    @property
    def name(self) -> str:
        return f"{self.model} {self.dtype} b{self.batch}"


@dataclass
class Figures:
    """What was measured of an engine.

    cold_s, warm_s  seconds of the first call, with empty caches on disk beside other processes, and with full ones.
    call_us         of a call, the host's work included, and replay_us of a replay of its CUDA graph; cold L2, medians.
    error           the largest difference to eager torch, relative to the largest result.
    kernels         that a call runs.
    peak_mb         megabytes of device memory at most, the model's included.
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


@dataclass
class Row:
    """A task with the figures of its engines; ``left`` are the operators that fusegraph left to torch."""

    model: str
    dtype: str
    batch: int
    engines: dict[str, Figures] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    timed: bool = False

    @property
    def name(self) -> str:
        return Task(self.model, self.dtype, self.batch).name

    def ratio(self, figure: str) -> float | None:
        """Returns how many times as long as fusegraph inductor takes, by "call_us" or "replay_us"; None: not both."""
        ours, theirs = (getattr(self.engines.get(e, Figures()), figure) for e in (OURS, "inductor"))
        return theirs / ours if ours and theirs else None


def row_from_data(data: Mapping[str, Any]) -> Row:
    """Returns the row of which `dataclasses.asdict` made this data."""
    return Row(**{**data, "engines": {name: Figures(**of) for name, of in data["engines"].items()}})


class Zoo:
    """Tasks, and the rows of those that were measured, kept in a file."""

    def __init__(self, tasks: Sequence[Task], file: Path | None, caches: Path) -> None:
        self.file, self.facts = file, dict[str, Any]()
        self.tasks = [replace(task, caches=str(caches / artifacts.safe_name(task.name))) for task in tasks]
        self.rows: dict[str, Row] = {}
        if file is not None and file.exists():
            found = map(row_from_data, json.loads(file.read_text("utf-8"))["rows"])
            self.rows = {row.name: row for row in found}

    def save(self) -> None:
        """Writes all rows to the file; those of other tasks stay."""
        if self.file is not None:
            rows = [asdict(row) for row in self.rows.values()]
            complete = all(self.rows[task.name].timed if task.name in self.rows else False for task in self.tasks)
            text = artifacts.json_text({**self.facts, "complete": complete, "rows": rows})
            artifacts.write_file(self.file, text)

    def row(self, task: Task) -> Row:
        return self.rows.setdefault(task.name, Row(task.model, task.dtype, task.batch))

    def compile(self, processes: int, end: float) -> Iterator[Row]:
        """Compiles the tasks that have no row, in parallel; yields their rows, with the seconds of first calls."""
        missing = [task for task in self.tasks if task.name not in self.rows]
        for task, result in each(_first_calls, missing, processes, COMPILE_S * len(ENGINES), end):
            row = self.row(task)
            if isinstance(result, Failure):
                row.engines = {engine: Figures(why={"compile": result.reason}) for engine in ENGINES}
            else:
                row.engines = result
            self.save()
            yield row

    def time(self, end: float) -> Iterator[Row]:
        """Times the tasks that have not been timed, one at a time; yields their rows."""
        missing = [task for task in self.tasks if not self.row(task).timed]
        # While one process measures, the next one imports what it needs.
        for task, result in each(_times, missing, 2, 2 * TIME_S * len(ENGINES), end):
            row = self.row(task)
            row.timed = True
            if isinstance(result, Failure):
                for engine in ENGINES:
                    row.engines.setdefault(engine, Figures()).why["time"] = result.reason
            else:
                figures, row.left = result
                for engine, found in figures.items():
                    before = row.engines.get(engine, Figures())
                    row.engines[engine] = replace(found, cold_s=before.cold_s, why={**before.why, **found.why})
            self.save()
            yield row


# ---- in a process of its own


def use_caches(task: Task) -> None:
    """Lets both compilers keep what they make in the task's folder; before torch is imported."""
    os.environ["FUSEGRAPH_CACHE_DIR"] = f"{task.caches}/fusegraph"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{task.caches}/inductor"
    os.environ["TRITON_CACHE_DIR"] = f"{task.caches}/triton"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def loaded(task: Task) -> tuple[Callable[..., Any], list[Any]]:
    allow_tf32(task.dtype)
    _, call, inputs = MODELS[task.model].loaded(task.dtype, "cuda", task.batch)
    return call, inputs


def _first_calls(task: Task) -> dict[str, Figures]:
    """Returns the seconds of each engine's first call of a model, nothing of it being in a cache."""
    use_caches(task)
    import torch

    call, inputs = loaded(task)
    found = {engine: Figures() for engine in ENGINES}
    with torch.no_grad():
        for engine, figures in found.items():
            with kept(figures.why, "compile", COMPILE_S):
                on_engine(engine, lambda x: x + 1)(torch.zeros(1, device="cuda"))  # loads the compiler itself
                began = time.perf_counter()
                on_engine(engine, call)(*inputs)
                torch.cuda.synchronize()
                figures.cold_s = round(time.perf_counter() - began, 2)
            gc.collect()
            torch.cuda.empty_cache()
    return found


def _times(task: Task) -> tuple[dict[str, Figures], list[str]]:
    """Returns the figures of each engine, and what fusegraph left to torch; one such process measures at a time."""
    use_caches(task)
    import torch

    import fusegraph.torch

    torch.cuda.init()
    with alone(task), torch.no_grad():
        call, inputs = loaded(task)
        found: dict[str, Figures] = {}
        expected: Any = None
        fusegraph.torch.report(clear=True)
        left: list[str] = []
        for engine in ENGINES:
            found[engine] = figures = Figures()
            with kept(figures.why, "time", TIME_S):
                result = _measured(engine, call, inputs, figures)
                expected = result.double() if engine == "eager" else expected
                if engine != "eager" and expected is not None:
                    most = expected.abs().max().item() or 1.0
                    figures.error = (expected - result.double()).abs().max().item() / most
                del result
            if engine == OURS:
                left = sorted({op for f in fusegraph.torch.report(clear=True) for _, op, _ in f.left})
            gc.collect()
            torch.cuda.empty_cache()
    return found, left


@contextmanager
def alone(task: Task) -> Iterator[None]:
    """Waits until no other process of this suite measures; a lock that ends with the process."""
    folder = Path(task.caches).parent
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _measured(engine: str, call: Callable[..., Any], inputs: Sequence[Any], figures: Figures) -> Any:
    """Fills in an engine's figures, and returns the result."""
    import torch

    other = _other_bytes()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    function = on_engine(engine, call)
    result = function(*inputs)
    torch.cuda.synchronize()
    figures.warm_s = round(time.perf_counter() - began, 2)
    function(*inputs)
    torch.cuda.synchronize()
    # Our intermediates are not in torch's pool.
    figures.peak_mb = round((torch.cuda.max_memory_allocated() + max(0, _other_bytes() - other)) / 2**20, 1)
    figures.call_us = median_us(lambda: function(*inputs))
    figures.kernels = len(kernels_of_call(lambda: function(*inputs)))
    with kept(figures.why, "replay", TIME_S):
        graph = torch.cuda.CUDAGraph()
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            function(*inputs)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            held = function(*inputs)
        figures.replay_us = median_us(graph.replay)
        del graph, held
    return result


def _other_bytes() -> int:
    """Returns how many bytes of the device are taken, but not by torch's pool."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


def median_us(run: Callable[[], Any]) -> float:
    """Returns the median microseconds from the moment that a call begins to queue its work to the end of that work."""
    import torch

    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    until = time.perf_counter() + TIMED_S
    for _ in range(2):
        run()
    while len(times) < FEWEST or (len(times) < MOST and time.perf_counter() < until):
        flush.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return round(median(times), 1)


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
