"""Calls what is compiled once at one random size after another; each case in a process of its own.

On a GPU all cases are called at once, and replays are timed when the last one has been.  A run goes on where the last
one stopped: rows are saved as they come, beside a folder with the caches.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from fusegraph.bench.kept import Kept
from fusegraph.bench.precision import allow_tf32
from fusegraph.bench.sizes.cases import Case, Operand, cases
from fusegraph.bench.torch_engines import OURS, difference, kept, on_engine, use_caches
from fusegraph.bench.torch_timing import replay_us
from fusegraph.bench.workers import Failure, alone, each, told
from fusegraph.bench.zoo.models import MODELS, called, element
from fusegraph.report import artifacts

#: Seconds that an engine has for its first call, and for all sizes that are timed.
COMPILE_S, TIME_S = 600.0, 300.0
#: Sizes at which replays are timed, and at which another engine's compilations are counted.
TIMED, PEER = 8, 50
#: Ours, compiled for one choice of sizes.
STATIC = "static"
#: Where a GPU is: models in bf16; the cpu engine computes in float32.
DTYPES = {"cuda": "bf16", "cpu": "fp32"}
#: The largest error of a result that is not wrong, relative to the largest element: of bfloat16 through many layers.
WRONG = 0.05


@dataclass(frozen=True)
class Task:
    """The sizes of a case from ``first`` to ``count`` on an engine ("cuda" or "cpu"), for so many ``seconds``."""

    case: str
    engine: str
    seed: int
    first: int
    count: int
    seconds: float
    caches: str


@dataclass
class Row:
    """A case at many sizes.

    sizes      with results, of as many as were asked for; ``wrong`` are those whose results are not eager's.
    compiled   plans and compiled kernels that the first call left in the cache on disk; ``later`` those of other calls.
    traced     graphs that torch handed to us: in the first call, and ``retraced`` later; ``left`` of these to torch.
    first_s    of the first call, nothing being cached; ``slowest_s`` of the others.
    error      the largest difference to the reference, relative to the largest result.
    configuration  of the model, where it is not the zoo's.
    peer       inductor with dynamic=True at `PEER` of the sizes: compilations, first_s, slowest_s.
    replay_us  of replays by engine, at `TIMED` of the sizes: ours for all sizes, "static" ours for that size alone,
               inductor's for all sizes.
    why        what failed: phase -> reason.  Sizes that come after a call that failed are left to another run.
    """

    case: str
    engine: str
    seed: int
    sizes: int = 0
    compiled: int = 0
    later: int = 0
    traced: int = 0
    retraced: int = 0
    left: list[str] = field(default_factory=list)
    first_s: float | None = None
    slowest_s: float = 0.0
    error: float = 0.0
    wrong: list[dict[str, int]] = field(default_factory=list)
    configuration: dict[str, Any] = field(default_factory=dict)
    peer: dict[str, float] = field(default_factory=dict)
    replay_us: dict[str, list[float]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def after(self, other: Row) -> Row:
        """Returns this row, of further sizes, with what another one has of those before."""
        return replace(
            self,
            sizes=self.sizes + other.sizes,
            compiled=other.compiled,
            later=self.later + other.later,
            traced=other.traced,
            retraced=self.retraced + other.retraced,
            first_s=other.first_s,
            slowest_s=max(self.slowest_s, other.slowest_s),
            error=max(self.error, other.error),
            wrong=other.wrong + self.wrong,
            peer=self.peer or other.peer,
            replay_us=self.replay_us or other.replay_us,
            why={**other.why, **self.why},
        )


class Sizes(Kept[Row]):
    """Cases, and their rows, kept in a file."""

    def __init__(self, wanted: Sequence[str], engine: str, seed: int, file: Path | None, caches: Path) -> None:
        self.wanted, self.engine, self.seed, self.caches = wanted, engine, seed, caches

        def read(data: Mapping[str, Any]) -> Row | None:
            return Row(**data) if (data["engine"], data["seed"]) == (engine, seed) else None

        super().__init__(file, read, lambda row: row.case)

    def measure(self, count: int, end: float) -> Iterator[Row]:
        """Calls each case until it has so many sizes; yields their rows.

        On a GPU all cases are at work at once, and have half of the time before replays are timed; else one after the
        other is, all for about as long.
        """
        left = [name for name in self.wanted if name not in self.rows or self.rows[name].sizes < count]
        together = len(left) if self.engine == "cuda" else 1
        for number in range(0, len(left), max(together, 1)):
            seconds = (end - time.perf_counter()) / (2 if self.engine == "cuda" else len(left) - number)
            tasks, before = [], {}
            for name in left[number : number + together]:
                row = before[name] = self.rows.get(name, Row(name, self.engine, self.seed))
                row.why.pop("run", None)
                self.rows[name] = _failed(row, "the time was over")
                caches = str(self.caches / artifacts.safe_name(name))
                tasks.append(Task(name, self.engine, self.seed, row.sizes, count, seconds, caches))
            limit_s, waiting = seconds + (COMPILE_S + 2 * TIME_S) * together, [task.case for task in tasks]
            for task, result in each(measured, tasks, together, limit_s, end + COMPILE_S):
                row = before[task.case]
                if isinstance(result, Failure):
                    self.rows[task.case] = _failed(row, result.reason)
                else:
                    self.rows[task.case] = result.after(row) if row.sizes else result
                waiting.remove(task.case)
                self._save(count)
                yield self.rows[task.case]
            self._save(count)
            yield from (self.rows[name] for name in waiting)

    def _save(self, count: int) -> None:
        self.save(complete=all(n in self.rows and self.rows[n].sizes >= count for n in self.wanted))


def _failed(row: Row, reason: str) -> Row:
    return replace(row, why={**row.why, "run": reason})


# ---- in a process of its own


def measured(task: Task) -> Row:
    """Calls a case at its sizes; on a GPU it then times replays beside other engines, while no other process works."""
    use_caches(task.caches)
    case = next(iter(cases(lambda name: name == task.case, small=task.engine == "cpu")))
    row = Row(task.case, task.engine, task.seed, configuration=dict(case.changes))
    with alone(task.caches, compiles=True):
        times = (_graph if case.graph is not None else _model)(task, case, row)
    if task.engine == "cuda" and row.sizes and not task.first:
        with alone(task.caches):
            for engine, replay_times in times.items():
                with kept(row.why, engine, TIME_S):
                    row.replay_us[engine] = replay_times()
    return row


#: The times of an engine's replays at `TIMED` of a case's sizes, by engine: called when nothing else runs.
Times: TypeAlias = dict[str, Callable[[], list[float]]]


@dataclass
class _Calls:
    """The calls of a case at one size after another, with what they compile and how far results are off."""

    task: Task
    case: Case
    row: Row

    def each(
        self, call: Callable[[int, Mapping[str, int]], Any], error: Callable[[int, Mapping[str, int], Any], float]
    ) -> None:
        """Calls until the time is over, or a call fails, and keeps the reason.

        ``call`` runs the case for a number and sizes, ``error`` tells how far its result is off: 1 where it is wrong.
        """
        end = time.perf_counter() + self.task.seconds
        for number in range(self.task.first, self.task.count):
            sizes = self.case.drawn(self.task.seed, number)
            try:
                self.one(number, sizes, call, error)
            except Exception as failed:
                where = ", ".join(f"{name} = {size}" for name, size in sizes.items())
                self.row.why["run"] = f"at {where}: {told(failed)}"
                break
            if time.perf_counter() > end:
                break

    def one(
        self,
        number: int,
        sizes: dict[str, int],
        call: Callable[[int, Mapping[str, int]], Any],
        error: Callable[[int, Mapping[str, int], Any], float],
    ) -> None:
        """Calls once."""
        row = self.row
        before, began = self.entries(), time.perf_counter()
        result = call(number, sizes)
        seconds, fresh = round(time.perf_counter() - began, 3), self.entries() - before
        if number == self.task.first:
            row.first_s = seconds
        else:
            row.slowest_s = max(row.slowest_s, seconds)
        if before:  # a run that goes on finds all in the cache
            row.later += fresh
        else:
            row.compiled = fresh
        found = error(number, sizes, result)
        row.error = max(row.error, found)
        if not found <= WRONG:
            row.wrong.append(sizes)
        row.sizes += 1

    def entries(self) -> int:
        """Returns how many plans and compiled kernels are in our cache on disk."""
        return sum(1 for _ in Path(self.task.caches, "fusegraph").rglob("*.entry"))


# ---- graphs of the builder


def _graph(task: Task, case: Case, row: Row) -> Times:
    from fusegraph.engines import compile as compile_graph
    from fusegraph.engines.base import Executable
    from fusegraph.engines.sized import SizedExecutable
    from fusegraph.report.check import compare, random_inputs, rounding_of, run
    from fusegraph.sized_graphs import graph_at

    made: list[SizedExecutable] = []
    inputs: dict[str, Any] = {}

    def at(sizes: Mapping[str, int]) -> Executable:
        if not made:
            compiled = compile_graph(case.built(), task.engine)
            assert isinstance(compiled, SizedExecutable)
            made.append(compiled)
        return made[0].at(sizes)

    def call(number: int, sizes: Mapping[str, int]) -> Any:
        executable = at(sizes)
        inputs.clear()
        inputs.update(random_inputs(executable.graph, number))
        return run(executable, inputs)

    def error(number: int, sizes: Mapping[str, int], result: Any) -> float:
        executable = at(sizes)
        outputs = compare(executable.graph, inputs, result, rounding_of(executable))
        return max(o.rel_error if o.ok else 1.0 for o in outputs)

    _Calls(task, case, row).each(call, error)
    timed = [case.drawn(row.seed, number) for number in range(TIMED)] if task.engine == "cuda" and row.sizes else []
    every = [at(sizes) for sizes in timed]
    static = [compile_graph(graph_at(made[0].graph, sizes)[0], "cuda") for sizes in timed]
    return {OURS: lambda: _replays(every), STATIC: lambda: _replays(static)}


def _replays(executables: Sequence[Any]) -> list[float]:
    """Returns the microseconds of replays."""
    from fusegraph.report.check import operands, random_inputs
    from fusegraph.runtime.timing import ColdTimer

    timer, found = ColdTimer(), []
    for one in executables:
        replay = one.record(*operands(one.graph, random_inputs(one.graph), one.device))[1]
        found.append(round(timer.median(replay), 2))
    return found


# ---- models


def _model(task: Task, case: Case, row: Row) -> Times:
    import torch

    import fusegraph.torch

    dtype = DTYPES[task.engine]
    allow_tf32(dtype)
    torch.manual_seed(0)
    with torch.device(task.engine):
        module = MODELS[case.name].make(**case.changes).to(element(dtype)).requires_grad_(False)
    eager = called(module, list(case.operands))
    fusegraph.torch.report(clear=True)
    compiled = on_engine(OURS, eager, dynamic=True)
    inputs: list[Any] = []

    def call(number: int, sizes: Mapping[str, int]) -> Any:
        inputs[:] = inputs_of(case, sizes, task.engine, number)
        return _done(compiled(*inputs))

    def error(number: int, sizes: Mapping[str, int], result: Any) -> float:
        if not row.traced:
            row.traced = len(fusegraph.torch.report())
        return difference([eager(*inputs)], [result])

    with torch.no_grad():
        _Calls(task, case, row).each(call, error)
        reports = fusegraph.torch.report(clear=True)
        row.retraced, row.left = len(reports) - row.traced, sorted({op for r in reports for _, op, _ in r.left})
        if task.engine == "cuda" and row.sizes and not task.first:
            return _beside(case, row, eager, compiled)
    return {}


def inputs_of(case: Case, sizes: Mapping[str, int], device: str, seed: int, *, vary: bool = True) -> list[Any]:
    """Returns random inputs of a model at sizes; with ``vary`` the dimensions that do are marked for torch."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)

    def made(operand: Operand) -> Any:
        if operand.below:
            x = torch.randint(0, operand.below, operand.at(sizes), device=device, generator=generator)
        else:
            x = torch.randn(operand.at(sizes), device=device, generator=generator).to(element(DTYPES[device]))
        for axis, name in operand.varying.items() if vary else ():
            low, high = case.bounds[name]
            torch._dynamo.mark_dynamic(x, axis, min=low, max=high)
        return x

    return [made(operand) for operand in case.operands.values()]


def _done(result: Any) -> Any:
    """Waits for a result."""
    import torch

    if result.is_cuda:
        torch.cuda.synchronize()
    return result


def _beside(case: Case, row: Row, eager: Callable[..., Any], ours: Callable[..., Any]) -> Times:
    """Compiles for each of the sizes that are timed, and with inductor for all; counts what inductor compiles."""
    import torch

    def inputs(number: int, *, vary: bool = True) -> list[Any]:
        return inputs_of(case, case.drawn(row.seed, number), "cuda", number, vary=vary)

    def times(function: Callable[..., Any], *, vary: bool = True) -> list[float]:
        with torch.no_grad():
            return [_replay_us(function, inputs(number, vary=vary)) for number in range(TIMED)]

    torch._dynamo.config.recompile_limit = 2 * (TIMED + PEER)
    static, inductor = (on_engine(e, eager, dynamic=d, forget=False) for e, d in ((OURS, False), ("inductor", True)))
    found: Times = {OURS: lambda: times(ours)}
    with kept(row.why, STATIC, COMPILE_S):
        for number in range(TIMED):
            _done(static(*inputs(number, vary=False)))
        found[STATIC] = lambda: times(static, vary=False)
    with kept(row.why, "inductor", COMPILE_S):
        seconds, before = [], _compilations()
        for number in range(PEER):
            given, began = inputs(number), time.perf_counter()
            _done(inductor(*given))
            seconds.append(round(time.perf_counter() - began, 3))
        row.peer = {"compilations": _compilations() - before, "first_s": seconds[0], "slowest_s": max(seconds[1:])}
        found["inductor"] = lambda: times(inductor)
    gc.collect()
    torch.cuda.empty_cache()
    return found


def _compilations() -> int:
    """Returns how many graphs torch has had compiled."""
    import torch

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _replay_us(function: Callable[..., Any], inputs: Sequence[Any]) -> float:
    """Returns the median microseconds of a replay of a call's CUDA graph, with a cold L2 cache."""
    for _ in range(2):
        _done(function(*inputs))
    return replay_us(lambda: function(*inputs))
