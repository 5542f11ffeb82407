"""Runs one graph on several engines with the same inputs; compares results with the reference and each other; times."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations
from typing import Any, Literal

import numpy as np

from fusegraph.dtypes import DType
from fusegraph.engines import compile as compile_graph
from fusegraph.engines.arguments import with_own_memory
from fusegraph.engines.base import Executable
from fusegraph.errors import DeviceError, GraphError, NotSupportedError, ToolchainError, WorkspaceError, one_line
from fusegraph.graph import Graph
from fusegraph.ops.base import Array
from fusegraph.ops.convert import to_reference
from fusegraph.report.check import (
    LIBRARY_SLACK,
    CheckResult,
    OutputCheck,
    check_executable,
    compare,
    operands,
    random_inputs,
    run,
)
from fusegraph.report.drawing import table
from fusegraph.report.eager import Eager
from fusegraph.runtime.cache import DiskCache
from fusegraph.runtime.timing import ColdTimer

#: What can be compared: every engine, and torch op by op.
ENGINES = ("cuda", "cudnn", "torch", "cpu", "reference")
#: Libraries: an error while they build counts as their refusal, not as a defect of fusegraph.
LIBRARIES = ("cudnn", "torch")
#: An engine that raises one of these while it builds does not support this graph or this machine.
REFUSALS = (NotSupportedError, ToolchainError, DeviceError, WorkspaceError)

REPEATS = 15
_CPU_RUNS = 3
_CPU_SECONDS = 2.0


@dataclass(frozen=True)
class EngineResult:
    """One engine's result for a graph.

    status           "ran"; "refused" (the engine does not support the graph, or is not available here); "failed" (an
                     error in building or running).  reason says why it did not run.
    ok               whether every output is right; None if refused, False if failed.
    us, timing       the microseconds of a call, and how they were measured.
    build_s          the seconds of building, with nothing taken from the disk cache.
    kernels          names of what runs: fusegraph's kernels, cuDNN's plans, torch's calls.
    workspace_bytes  memory for intermediates; None if the engine does not report it.
    outputs          each output compared with the reference.  note: what else is wrong.
    """

    engine: str
    status: Literal["ran", "refused", "failed"]
    ok: bool | None
    reason: str = ""
    us: float | None = None
    timing: str = ""
    build_s: float | None = None
    kernels: tuple[str, ...] = ()
    workspace_bytes: int | None = None
    note: str = ""
    outputs: tuple[OutputCheck, ...] = ()


@dataclass(frozen=True)
class Difference:
    """How one output of two engines differs.

    max_abs  the largest absolute difference of finite elements.
    rel      the norm of the difference over the larger of both norms.
    unequal  how many elements are not equal (NaN equals NaN).
    """

    output: str
    engines: tuple[str, str]
    max_abs: float
    rel: float
    unequal: int


@dataclass(frozen=True)
class Comparison:
    """A graph on several engines.  ok is None if all refused, else whether all others ran and gave right results."""

    graph: str
    seed: int
    engines: tuple[EngineResult, ...]
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool | None:
        verdicts = [e.ok for e in self.engines if e.ok is not None]
        return all(verdicts) if verdicts else None

    def _repr_html_(self) -> str:
        rows = []
        for e in self.engines:
            right, us = {None: "-", True: "yes", False: "NO"}[e.ok], "-" if e.us is None else f"{e.us:.1f}"
            rows.append((e.engine, e.status, right, us, e.timing or e.reason, ", ".join(e.kernels)))
        return f"<p>{escape(self.graph)}</p>{table(('engine', 'status', 'right', 'us', 'how', 'kernels'), rows)}"


@dataclass(frozen=True)
class _Options:
    strict: bool
    partition: bool
    autotune: bool
    repeats: int


def compare_engines(
    graph: Graph,
    engines: Sequence[str],
    *,
    seed: int = 0,
    strict: bool = False,
    partition: bool = False,
    autotune: bool = False,
    repeats: int = REPEATS,
    progress: Callable[[str], object] | None = None,
) -> Comparison:
    """Runs a graph on engines (names of `ENGINES`) on the same random inputs.

    ``partition`` (for cudnn) and ``autotune`` (for cuda and cudnn) are options of `fusegraph.compile`; without
    autotune, remembered schedules are used.  ``repeats`` is the number of timed runs on a GPU.  ``progress`` is called
    with each engine's name.  Raises GraphError for a graph without outputs or one that no engine can run.
    """
    if not graph.outputs:
        raise GraphError(f"graph {graph.name!r} has no outputs; mark its results with graph.output(tensor)")
    inputs = random_inputs(graph, seed)
    options = _Options(strict, partition, autotune, repeats)
    results, values = [], {}
    for engine in engines:
        if progress is not None:
            progress(engine)
        result, outputs = _on(engine, graph, inputs, options)
        results.append(result)
        if outputs is not None:
            values[engine] = outputs
    pairs = combinations(values, 2)
    differences = [_difference(t.name, t.dtype, a, b, values) for a, b in pairs for t in graph.outputs]
    return Comparison(graph.name, seed, tuple(results), tuple(differences))


# --- one engine


@dataclass(frozen=True)
class _Built:
    """A graph built for an engine: functions that run it, check its results and time it; its kernels and workspace."""

    run: Callable[[], dict[str, Array]]
    check: Callable[[dict[str, Array]], CheckResult]
    time: Callable[[], tuple[float, str]]
    kernels: tuple[str, ...]
    workspace_bytes: int | None


def _on(
    engine: str, graph: Graph, inputs: Mapping[str, Array], options: _Options
) -> tuple[EngineResult, dict[str, Array] | None]:
    """Builds, runs, times and checks the graph on one engine; returns its result, and its outputs if it ran."""
    with contextlib.ExitStack() as stack:
        try:
            began = time.perf_counter()
            make = _torch if engine == "torch" else _engine
            built = make(engine, graph, inputs, options, stack)
            build_s = time.perf_counter() - began
        except GraphError:
            raise
        except REFUSALS as error:
            return EngineResult(engine, "refused", None, one_line(error)), None
        except Exception as error:
            return _failed(engine, error, refused=engine in LIBRARIES or _out_of_memory(error)), None
        try:
            outputs = built.run()
            us, timing = built.time()
        except Exception as error:
            # Only running a graph shows whether torch accepts it; lack of memory is not a failure of the engine.
            return _failed(engine, error, refused=engine == "torch" or _out_of_memory(error)), None
        checked = built.check(outputs)
    return (
        EngineResult(
            engine,
            "ran",
            checked.ok,
            us=us,
            timing=timing,
            build_s=build_s,
            kernels=built.kernels,
            workspace_bytes=built.workspace_bytes,
            outputs=checked.outputs,
            note=checked.note,
        ),
        outputs,
    )


def _failed(engine: str, error: Exception, *, refused: bool) -> EngineResult:
    reason = f"{type(error).__name__}: {one_line(error)}"
    return EngineResult(engine, "refused" if refused else "failed", None if refused else False, reason)


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "CUDA_ERROR_OUT_OF_MEMORY" in str(error)


def _engine(
    engine: str, graph: Graph, inputs: Mapping[str, Array], options: _Options, _: contextlib.ExitStack
) -> _Built:
    executable = compile_graph(
        graph,
        engine,
        strict=options.strict,
        cache=DiskCache(limit_bytes=0),
        partition=options.partition,
        autotune=options.autotune or None,
    )
    plans = getattr(executable, "plans", None)  # cuDNN's
    kernels = executable.plan.kernels if executable.plan is not None else ()
    return _Built(
        lambda: run(executable, inputs),
        lambda outputs: check_executable(executable, inputs, outputs=outputs, strict=options.strict),
        lambda: _time(executable, inputs, options.repeats),
        tuple(p.name for p in plans) if plans is not None else tuple(k.name for k in kernels),
        None if engine == "reference" else executable.workspace_bytes,
    )


def _time(executable: Executable, inputs: Mapping[str, Array], repeats: int) -> tuple[float, str]:
    """Returns the microseconds of a call whose arrays, outputs included, exist already, and how they were measured."""
    device = executable.device
    arrays = operands(executable.graph, inputs, device)
    if device.is_cuda:
        out = with_own_memory(executable.graph, executable(*arrays, stream=0))
        timer = ColdTimer(device.index)
        return timer.median(lambda: executable(*arrays, out=out, stream=0), repeats), _gpu_text(repeats)
    out = with_own_memory(executable.graph, executable(*arrays))
    return _best_of(lambda: executable(*arrays, out=out))


def _torch(
    engine: str, graph: Graph, inputs: Mapping[str, Array], options: _Options, stack: contextlib.ExitStack
) -> _Built:
    eager = Eager(graph)
    stack.enter_context(eager.exact())
    tensors = eager.tensors(inputs)

    def check(outputs: dict[str, Array]) -> CheckResult:
        return CheckResult(graph.name, engine, compare(graph, inputs, outputs, eager.rounding, slack=LIBRARY_SLACK))

    def timed() -> tuple[float, str]:
        if eager.is_cuda:
            return ColdTimer().median(lambda: eager(*tensors), options.repeats), _gpu_text(options.repeats)
        return _best_of(lambda: eager(*tensors))

    names = tuple(dict.fromkeys(node.op.name for node in graph.nodes))
    return _Built(lambda: eager.arrays(eager(*tensors)), check, timed, names, None)


def _best_of(call: Callable[[], object]) -> tuple[float, str]:
    """Returns the microseconds of the fastest of a few calls (fewer if they take seconds), and how it was measured."""
    times: list[float] = []
    while len(times) < _CPU_RUNS and sum(times) < _CPU_SECONDS:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times) * 1e6, f"CPU, wall clock, best of {len(times)}"


def _gpu_text(repeats: int) -> str:
    return f"GPU, cold L2, median of {repeats}"


# --- two engines


def _difference(
    output: str, dtype: DType, first: str, second: str, values: Mapping[str, Mapping[str, Array]]
) -> Difference:
    a, b = (to_reference(values[engine][output], dtype) for engine in (first, second))
    unequal = ~((a == b) | (np.isnan(a) & np.isnan(b))) if dtype.is_float else a != b
    x, y = (v.astype(np.float64) for v in (a, b))
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = np.where(finite, x, 0.0), np.where(finite, y, 0.0)
    norm = max(float(np.linalg.norm(x)), float(np.linalg.norm(y)))
    length = float(np.linalg.norm(x - y))
    return Difference(
        output,
        (first, second),
        float(np.abs(x - y).max(initial=0.0)),
        length / norm if norm else length,
        int(unequal.sum()),
    )


def plain(comparison: Comparison) -> dict[str, Any]:
    """Converts a comparison to plain data for JSON; `fusegraph.cli.compare` documents its keys."""
    return {
        "name": comparison.graph,
        "seed": comparison.seed,
        "ok": comparison.ok,
        "engines": [{**vars(e), "outputs": [{**vars(o), "ok": o.ok} for o in e.outputs]} for e in comparison.engines],
        "differences": [vars(d) for d in comparison.differences],
    }
