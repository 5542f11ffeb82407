"""Calls what is compiled once at one random size after another; each case in a process of its own.

On a GPU all cases are at work at once, but for the times of replays.  A run goes on where the last one stopped: rows
are saved as they come, beside a folder with the caches.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
TIMED, PEER = 5, 50
#: On a GPU the results of one in so many calls are compared: the references of large ones take seconds.
CHECKED = 16
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
    error      the largest difference to the reference, relative to the largest result: on a GPU of one size in
               `CHECKED`.
    configuration  of the model, where it is not the zoo's.
    peer       inductor with dynamic=True at `PEER` of the sizes: compilations, first_s, slowest_s.
    replay_us  of replays by engine, at `TIMED` of the sizes: ours for all sizes, "static" ours for that size alone,
               inductor's for all sizes.
    why        what failed: phase -> reason.  Sizes that come after a call that failed are left to another run.
    commit     that was measured last.
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
    commit: str | None = None

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
        """Calls each case until it has so many sizes, then times replays; yields their rows.

        On a GPU all cases are at work at once, and calls have a third of the time; else one after the other is, all for
        about as long.
        """
        left = [name for name in self.wanted if name not in self.rows or self.rows[name].sizes < count]
        together = len(left) if self.engine == "cuda" else 1
        for number in range(0, len(left), max(together, 1)):
            seconds = (end - time.perf_counter()) / (3 if self.engine == "cuda" else len(left) - number)
            tasks = [self._task(name, count, seconds) for name in left[number : number + together]]
            before = {task: self.rows.get(task.case, Row(task.case, self.engine, self.seed)) for task in tasks}
            for task, row in before.items():
                row.why.pop("run", None)
                self.rows[task.case] = _failed(row, "the time was over")
            for task, result in each(measured, tasks, together, seconds + COMPILE_S, end + COMPILE_S):
                row = before.pop(task)
                if isinstance(result, Failure):
                    self.rows[task.case] = _failed(row, result.reason)
                else:
                    self.rows[task.case] = result.after(row) if row.sizes else result
                self.rows[task.case].commit = self.facts.get("commit")
                self._save(count)
                yield self.rows[task.case]
            self._save(count)
            yield from (self.rows[task.case] for task in before)
        if self.engine == "cuda":
            yield from self._beside(count, end)

    def _task(self, name: str, count: int, seconds: float) -> Task:
        done = self.rows[name].sizes if name in self.rows else 0
        return Task(name, self.engine, self.seed, done, count, seconds, str(self.caches / artifacts.safe_name(name)))

    def _beside(self, count: int, end: float) -> Iterator[Row]:
        """Times replays of those cases that have none; yields their rows."""
        names = [name for name in self.wanted if self.rows[name].sizes and not self.rows[name].replay_us]
        for name in names:
            self.rows[name].why["replays"] = "the time was over"
        tasks = [self._task(name, count, 0.0) for name in names]
        for task, result in each(beside, tasks, len(tasks), 2 * COMPILE_S + TIME_S * len(tasks), end):
            row = self.rows[task.case]
            row.why.pop("replays")
            if isinstance(result, Failure):
                row.why["replays"] = result.reason
            else:
                row.peer, row.replay_us, row.commit = result.peer, result.replay_us, self.facts.get("commit")
                row.why |= result.why
            self._save(count)
            yield row

    def _save(self, count: int) -> None:
        self.save(complete=all(n in self.rows and self.rows[n].sizes >= count for n in self.wanted))


def _failed(row: Row, reason: str) -> Row:
    return replace(row, why={**row.why, "run": reason})


# ---- in a process of its own


def measured(task: Task) -> Row:
    """Calls a case at its sizes."""
    row, subject = _begun(task)
    calls = _Calls(task, subject.case, row)
    with subject.context():
        calls.each(subject.call, subject.error)
    row.traced, row.retraced, row.left = subject.traced()
    return row


def beside(task: Task) -> Row:
    """Times replays beside other engines', while no other process works."""
    row, subject = _begun(task)
    with subject.context():
        with alone(task.caches, compiles=True):
            times = subject.times(row)
        with alone(task.caches):
            for engine, replay_times in times.items():
                with kept(row.why, engine, TIME_S):
                    row.replay_us[engine] = replay_times()
    return row


def _begun(task: Task) -> tuple[Row, _Graph | _Model]:
    """Returns the row of a task, which is empty, and what is called."""
    use_caches(task.caches)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    case = next(iter(cases(lambda name: name == task.case, small=task.engine == "cpu")))
    row = Row(task.case, task.engine, task.seed, configuration=dict(case.changes))
    return row, (_Model if case.graph is None else _Graph)(task, case)


#: By engine, what tells the times of its replays at `TIMED` of a case's sizes: called when nothing else runs.
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
        if self.task.engine == "cpu" or (number - self.task.first) % CHECKED == 0:
            found = error(number, sizes, result)
            row.error = max(row.error, found)
            if not found <= WRONG:
                row.wrong.append(sizes)
        row.sizes += 1

    def entries(self) -> int:
        """Returns how many plans and compiled kernels are in our cache on disk."""
        return sum(1 for _ in Path(self.task.caches, "fusegraph").rglob("*.entry"))


# ---- graphs of the builder


class _Graph:
    """A graph of the builder, compiled for all sizes at its first call."""

    def __init__(self, task: Task, case: Case) -> None:
        self.task, self.case = task, case
        self._made: Any = None
        self._inputs: dict[str, Any] = {}

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def at(self, sizes: Mapping[str, int]) -> Any:
        """Returns the executable for some sizes."""
        from fusegraph.engines import compile as compile_graph

        if self._made is None:
            self._made = compile_graph(self.case.built(), self.task.engine)
        return self._made.at(sizes)

    def call(self, number: int, sizes: Mapping[str, int]) -> Any:
        from fusegraph.report.check import random_inputs, run

        executable = self.at(sizes)
        self._inputs = random_inputs(executable.graph, number)
        return run(executable, self._inputs)

    def error(self, _: int, sizes: Mapping[str, int], result: Any) -> float:
        from fusegraph.report.check import compare, rounding_of

        executable = self.at(sizes)
        outputs = compare(executable.graph, self._inputs, result, rounding_of(executable))
        return max(o.rel_error if o.ok else 1.0 for o in outputs)

    def traced(self) -> tuple[int, int, list[str]]:
        """Returns `Row.traced`, `Row.retraced` and `Row.left`."""
        return 0, 0, []

    def times(self, row: Row) -> Times:
        """Compiles for each of the sizes that are timed."""
        from fusegraph.engines import compile as compile_graph
        from fusegraph.sized_graphs import graph_at

        sizes = [self.case.drawn(row.seed, number) for number in range(TIMED)]
        ours = list(map(self.at, sizes))
        static = [compile_graph(graph_at(self._made.graph, each)[0], "cuda") for each in sizes]
        return {OURS: lambda: _replays(ours), STATIC: lambda: _replays(static)}


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


class _Model:
    """A model of the zoo, which torch.compile traces at its first call."""

    def __init__(self, task: Task, case: Case) -> None:
        import torch

        import fusegraph.torch

        self.task, self.case = task, case
        dtype = DTYPES[task.engine]
        allow_tf32(dtype)
        torch.manual_seed(0)
        with torch.device(task.engine):
            module = MODELS[case.name].make(**case.changes).to(element(dtype)).requires_grad_(False)
        self._eager = called(module, list(case.operands))
        fusegraph.torch.report(clear=True)
        self._ours = on_engine(OURS, self._eager, dynamic=True)
        self._inputs: list[Any] = []
        self._traced = 0

    def context(self) -> AbstractContextManager[Any]:
        import torch

        context: AbstractContextManager[Any] = torch.no_grad()
        return context

    def call(self, number: int, sizes: Mapping[str, int]) -> Any:
        self._inputs = inputs_of(self.case, sizes, self.task.engine, number)
        return _done(self._ours(*self._inputs))

    def error(self, _: int, __: Mapping[str, int], result: Any) -> float:
        import fusegraph.torch

        self._traced = self._traced or len(fusegraph.torch.report())
        return difference([self._eager(*self._inputs)], [result])

    def traced(self) -> tuple[int, int, list[str]]:
        """Returns `Row.traced`, `Row.retraced` and `Row.left`."""
        import fusegraph.torch

        reports = fusegraph.torch.report(clear=True)
        return self._traced, len(reports) - self._traced, sorted({op for r in reports for _, op, _ in r.left})

    def times(self, row: Row) -> Times:
        """Compiles for each of the sizes that are timed, and with inductor for all; counts what inductor compiles."""
        import torch

        def inputs(number: int, *, vary: bool = True) -> list[Any]:
            return inputs_of(self.case, self.case.drawn(row.seed, number), "cuda", number, vary=vary)

        def times(function: Callable[..., Any], *, vary: bool = True) -> list[float]:
            return [_replay_us(function, inputs(number, vary=vary)) for number in range(TIMED)]

        torch._dynamo.config.recompile_limit = 2 * (TIMED + PEER)
        static = on_engine(OURS, self._eager, forget=False)
        inductor = on_engine("inductor", self._eager, dynamic=True, forget=False)
        found: Times = {}
        with kept(row.why, OURS, COMPILE_S):
            _done(self._ours(*inputs(0)))
            found[OURS] = lambda: times(self._ours)
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


def _compilations() -> int:
    """Returns how many graphs torch has had compiled."""
    import torch

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _replay_us(function: Callable[..., Any], inputs: Sequence[Any]) -> float:
    """Returns the median microseconds of a replay of a call's CUDA graph, with a cold L2 cache."""
    for _ in range(2):
        _done(function(*inputs))
    return replay_us(lambda: function(*inputs))
