"""Measures a sweep: cases are compiled by parallel processes into caches on disk, then timed one at a time.

A run goes on where the last one stopped: rows are saved as they come, by the number of their case.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from fusegraph.bench.precision import allow_tf32
from fusegraph.bench.sweep import choices
from fusegraph.bench.sweep.cases import case
from fusegraph.bench.sweep.draw import Case, Operand
from fusegraph.bench.torch_engines import ENGINES, OURS, difference, kept, on_engine
from fusegraph.bench.torch_timing import kernels_of_call
from fusegraph.bench.traced import graphs_of
from fusegraph.engines import compile as compile_graph
from fusegraph.engines.scratch import random_array
from fusegraph.report import artifacts
from fusegraph.report.estimates import plan_us
from fusegraph.runtime.targets import present

#: Runs that count, and that do not; seconds in which a case must be compiled, or timed, by an engine.
REPEATS, WARMUP, LIMIT_S = 9, 3, 90.0
#: Below this share of the fastest peer's speed a row has its kernels and the best of the autotuner.
SLOW = 0.9
#: A time of less than this share of another's is faster.
FASTER = 0.95


@dataclass
class Row:
    """A case that was measured.

    us       microseconds of each engine that ran, cold L2, medians; why tells of those that did not.
    floor_us of a device copy of as many bytes, or the operations at the rate of a large product, if longer.
    error    the largest difference to eager torch, relative to the largest result.
    kernels  of a slow row: (name, microseconds) of ours and of the fastest peer's kernels, and ``tuned_us``.
    left     operators that were left to torch.
    predicted_us  what the cost models say of the chosen schedules.
    choices  of a slow row: both sides of each, estimated and measured (`fusegraph.report.explain.describe_choice`).
    """

    number: int
    name: str
    kind: str = ""
    dtype: str = ""
    us: dict[str, float] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    floor_us: float = 0.0
    error: float | None = None
    kernels: dict[str, list[tuple[str, float]]] = field(default_factory=dict)
    tuned_us: float | None = None
    left: list[str] = field(default_factory=list)
    predicted_us: float | None = None
    choices: list[dict[str, Any]] = field(default_factory=list)

    @property
    def peer(self) -> str | None:
        """The fastest engine that is not ours."""
        others = [e for e in self.us if e != "fusegraph"]
        return min(others, key=self.us.__getitem__, default=None)

    @property
    def ratio(self) -> float | None:
        """The fastest peer's time divided by ours."""
        return self.us[self.peer] / self.us["fusegraph"] if self.peer and "fusegraph" in self.us else None

    @property
    def cause(self) -> str | None:
        """Why a row is slow: "choice" (a timed schedule is faster), "partition" (more kernels than the peer's), or
        "form" (none of our kernels is fast enough); None for others.
        """
        if self.ratio is None or self.ratio >= SLOW:
            return None
        if self.tuned_us is not None and self.tuned_us < FASTER * self.us["fusegraph"]:
            return "choice"
        counts = [len(self.kernels.get(engine or "", [])) for engine in ("fusegraph", self.peer)]
        return "partition" if counts[0] > counts[1] > 0 else "form"


def row_from_data(data: Mapping[str, Any]) -> Row:
    """Returns the row of which `dataclasses.asdict` made this data."""
    kernels = {engine: [(name, us) for name, us in every] for engine, every in data["kernels"].items()}
    return Row(**{**data, "kernels": kernels})


def operands(drawn: Case, device: str = "cuda") -> list[Any]:
    """Returns the operands of a case, random and the same each time; on the device "meta" without values."""
    import torch

    kind = getattr(torch, "float32" if drawn.dtype == "tf32" else drawn.dtype)
    generator = None if device == "meta" else torch.Generator(device).manual_seed(len(drawn.name))

    def made(o: Operand) -> Any:
        if o.below:
            return torch.randint(0, o.below, o.shape, device=device, generator=generator)
        order = o.order or tuple(range(len(o.shape)))
        lies = torch.randn([o.shape[d] for d in order], device=device, generator=generator) * o.scale
        return lies.to(kind).permute([order.index(d) for d in range(len(order))])

    return [made(o) for o in drawn.operands]


def _allow_tf32(drawn: Case) -> None:
    import torch

    allow_tf32(drawn.dtype)
    torch.backends.cudnn.benchmark = True


def _prepare(job: tuple[int, int, Sequence[str], Sequence[str]]) -> tuple[int, float]:
    """Compiles a case with all engines, so that the caches on disk have it; returns its number and the seconds."""
    import torch

    seed, number, kinds, dtypes = job
    began = time.perf_counter()
    drawn = case(seed, number, kinds, dtypes)
    _allow_tf32(drawn)
    with torch.no_grad():
        for engine in ("inductor", OURS):
            with kept({}, engine, LIMIT_S):
                on_engine(engine, drawn.function)(*operands(drawn))
    gc.collect()
    torch.cuda.empty_cache()
    return number, time.perf_counter() - began


class Sweep:
    """A sweep of a seed, of cases of some kinds and dtypes, with the rows that it has.

    With ``cudnn``, the graphs that cuDNN takes are also timed there.
    """

    def __init__(
        self,
        seed: int,
        kinds: Sequence[str] = (),
        dtypes: Sequence[str] = (),
        file: Path | None = None,
        *,
        cudnn: bool = False,
    ) -> None:
        self.seed, self.kinds, self.dtypes, self.file = seed, tuple(kinds), tuple(dtypes), file
        self.cudnn = cudnn
        self.rows: dict[int, Row] = {}
        self.facts: dict[str, Any] = {}
        if file is not None and file.is_file():
            found = json.loads(file.read_text("utf-8"))
            if (found["seed"], *map(tuple, (found["kinds"], found["dtypes"]))) == (seed, self.kinds, self.dtypes):
                self.rows = {row["number"]: row_from_data(row) for row in found["rows"]}

    def save(self) -> None:
        """Writes all rows to the file."""
        if self.file is None:
            return
        rows = [asdict(self.rows[n]) for n in sorted(self.rows)]
        document = {**self.facts, "seed": self.seed, "kinds": self.kinds, "dtypes": self.dtypes, "rows": rows}
        artifacts.write_file(self.file, artifacts.json_text(document))

    def missing(self, count: int) -> list[int]:
        return [n for n in range(count) if n not in self.rows]

    def prepare(self, numbers: Sequence[int], processes: int, seconds: float) -> Iterator[tuple[int, float]]:
        """Compiles cases by parallel processes; yields those that are done, until the time is over."""
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        began = time.perf_counter()
        jobs = [(self.seed, n, self.kinds, self.dtypes) for n in numbers]
        with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=40) as pool:
            done = pool.imap_unordered(_prepare, jobs)
            for _ in jobs:
                left = seconds - (time.perf_counter() - began)
                try:
                    yield done.next(timeout=max(left, 0.01))
                except multiprocessing.TimeoutError:
                    pool.terminate()
                    return

    def measure(self, number: int, bench: Any) -> Row:
        """Times a case; ``bench`` is a `fusegraph.bench.measure.Bench`."""
        import torch

        import fusegraph.torch

        drawn = case(self.seed, number, self.kinds, self.dtypes)
        row = self.rows[number] = Row(number, drawn.name, drawn.kind, drawn.dtype)
        _allow_tf32(drawn)
        with torch.no_grad():
            arguments = operands(drawn)
            runs: dict[str, Callable[[], Any]] = {}
            results: dict[str, Any] = {}
            pieces: list[Any] = []
            for engine in ENGINES:
                fusegraph.torch.report(clear=True)
                with kept(row.why, engine, LIMIT_S):
                    function = on_engine(engine, drawn.function)
                    results[engine] = function(*arguments)
                    torch.cuda.synchronize()
                    runs[engine] = partial(function, *arguments)
                if engine == OURS and engine in runs:
                    functions = fusegraph.torch.report(clear=True)
                    row.left = sorted({op for f in functions for _, op, _ in f.left})
                    pieces = [piece for f in functions for piece in f.pieces]
                    row.predicted_us = _predicted_us(pieces)
            row.error = _difference(results)
            results.clear()
            if self.cudnn:
                with kept(row.why, "cudnn", LIMIT_S):
                    _on_cudnn(drawn, runs)
            self._time(row, runs, bench)
            row.floor_us = _floor(drawn, bench)
            if row.ratio is not None and row.ratio < SLOW:
                self._examine(row, drawn, runs, arguments, bench)
                plans = [made for piece in pieces if (made := piece.planned()) is not None]
                with kept({}, "choices", LIMIT_S):
                    row.choices = choices.timed(plans)
        runs.clear()
        arguments.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return row

    def _time(self, row: Row, runs: Mapping[str, Callable[[], Any]], bench: Any) -> None:
        times: dict[str, list[float]] = {engine: [] for engine in runs}
        bench.timer.reset()
        for repeat in range(WARMUP + REPEATS):
            for engine, run in runs.items():
                if engine in row.why:
                    continue
                with kept(row.why, engine, LIMIT_S):
                    us = bench.timer.once(run)
                    times[engine] += [us] if repeat >= WARMUP else []
        row.us = {engine: round(median(every), 2) for engine, every in times.items() if every and engine not in row.why}

    def _examine(
        self, row: Row, drawn: Case, runs: Mapping[str, Callable[[], Any]], arguments: Sequence[Any], bench: Any
    ) -> None:
        """Finds what a slow row's time goes to, and the fastest schedules."""
        assert row.peer is not None
        for engine in (OURS, row.peer):
            row.kernels[engine] = [(name[:120], round(us, 2)) for name, us in kernels_of_call(runs[engine])]
        with kept({}, "tuned", LIMIT_S):
            function = on_engine(OURS, drawn.function, "max-autotune")
            function(*arguments)
            row.tuned_us = round(bench.timer.median(lambda: function(*arguments), REPEATS), 2)


def _predicted_us(pieces: Sequence[Any]) -> float | None:
    """Returns the estimated microseconds of what was compiled; None if some of it is gone."""
    plans = [piece.planned() for piece in pieces]
    if not plans or any(made is None for made in plans):
        return None
    return round(sum(plan_us(made, present()) for made in plans), 2)


def _on_cudnn(drawn: Case, runs: dict[str, Callable[[], Any]]) -> None:
    """Adds a run of cuDNN's to ``runs``, on random arrays.  Raises NotSupportedError where cuDNN refuses the case."""
    (graph,) = graphs_of(drawn.function, operands(drawn, "meta"), drawn.dtype, "cuda:0")
    executable = compile_graph(graph, "cudnn", autotune=True)
    arrays = [random_array(t.shape, t.strides, t.dtype, seed=number) for number, t in enumerate(graph.inputs)]
    out = executable(*arrays)
    runs["cudnn"] = lambda: executable(*arrays, out=out)


def _difference(results: Mapping[str, Any]) -> float | None:
    """Returns the largest difference of ours to eager torch's results; None if one of them is missing."""
    if "eager" not in results or "fusegraph" not in results:
        return None
    return difference(*map(_listed, (results["eager"], results["fusegraph"])))


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def _floor(drawn: Case, bench: Any) -> float:
    each = 2 if "16" in drawn.dtype else 4
    floor = bench.copy_us(sum(prod(o.shape) * (8 if o.below else each) for o in drawn.operands))
    unit = {"tf32": "tf32", "float32": "fp32"}.get(drawn.dtype, "bf16")
    if drawn.operations:
        rate = bench.flops_per_us(unit)
        _allow_tf32(drawn)
        floor = max(floor, drawn.operations / rate)
    return round(float(floor), 2)
