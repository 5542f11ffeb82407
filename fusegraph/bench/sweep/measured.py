"""Measures cases of a sweep, in a process of their own: first compiled, then timed while all others wait."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from statistics import median
from typing import Any

from fusegraph.bench.measure import Bench
from fusegraph.bench.precision import allow_tf32
from fusegraph.bench.sweep import choices
from fusegraph.bench.sweep.cases import case
from fusegraph.bench.sweep.draw import Case, Operand
from fusegraph.bench.sweep.rows import SLOW, Row
from fusegraph.bench.torch_engines import ENGINES, OURS, difference, kept, on_engine
from fusegraph.bench.torch_timing import kernels_of_call
from fusegraph.bench.traced import graphs_of
from fusegraph.engines import compile as compile_graph
from fusegraph.engines.scratch import random_array
from fusegraph.plan import Plan
from fusegraph.report.estimates import plan_us
from fusegraph.runtime.targets import present

#: Runs that count, and that do not; seconds in which a case must be compiled, or timed, by an engine.
REPEATS, WARMUP, LIMIT_S = 9, 3, 90.0


@dataclass(frozen=True)
class Settings:
    """Which cases a sweep has: of a seed, and of some kinds and dtypes; with ``cudnn``, also timed there if it can."""

    seed: int
    kinds: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    cudnn: bool = False

    def case(self, number: int) -> Case:
        return case(self.seed, number, self.kinds, self.dtypes)


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


@dataclass
class _Compiled:
    """A case that engines have compiled; ``more`` runs are no engine's: cuDNN's, and of a slow case the autotuned."""

    drawn: Case
    row: Row
    functions: dict[str, Callable[..., Any]]
    more: dict[str, Callable[[], Any]]
    plans: list[Plan]

    def runs(self, arguments: Sequence[Any]) -> dict[str, Callable[[], Any]]:
        runs = {engine: partial(function, *arguments) for engine, function in self.functions.items()}
        return {**runs, **self.more}


class Measured:
    """Cases that are measured in this process, in rounds: compiled one by one, then timed.

    A slow one is looked at in the next round: what its kernels take, what the autotuner finds, and what other choices
    of the partition take.  Only `time` needs the device for itself.
    """

    def __init__(self, settings: Settings) -> None:
        import torch

        self._settings = settings
        self._new: list[_Compiled] = []
        self._slow: list[_Compiled] = []
        torch.backends.cudnn.benchmark = True
        for limit in ("recompile_limit", "accumulated_recompile_limit"):
            setattr(torch._dynamo.config, limit, 1 << 20)  # cases of a kind are closures of one code object

    @cached_property
    def _bench(self) -> Bench:
        return Bench()

    def compile(self, number: int) -> None:
        """Compiles a case by all engines and compares their results.  Raises what the device does after a crash."""
        drawn = self._settings.case(number)
        self._new.append(self._compiled(drawn, Row(number, drawn.name, drawn.kind, drawn.dtype)))

    def examine(self) -> None:
        """Tunes the cases that were slow in the last round, so that they can be timed again."""
        import torch

        for slow in self._slow:
            again = self._compiled(slow.drawn, slow.row)
            slow.functions, slow.plans = again.functions, again.plans
            with torch.no_grad(), kept({}, "tuned", LIMIT_S):
                arguments = operands(slow.drawn)
                tuned = on_engine(OURS, slow.drawn.function, "max-autotune", forget=False)
                tuned(*arguments)
                slow.functions["tuned"] = tuned
                choices.timed(slow.plans)  # compiled now, timed later
            _let_go()

    def time(self) -> list[Row]:
        """Times what was compiled, and returns its rows; those of slow cases come again after the next round."""
        import torch

        done, self._slow, cases = self._slow, [], self._new
        with torch.no_grad():
            for each in done:
                self._time_again(each)
            for each in cases:
                self._time(each)
                if each.row.ratio is not None and each.row.ratio < SLOW:
                    self._slow.append(each)
        self._new = []
        torch._dynamo.reset()
        _let_go()
        return [each.row for each in (*done, *cases)]

    def _compiled(self, drawn: Case, row: Row) -> _Compiled:
        import torch

        import fusegraph.torch

        allow_tf32(drawn.dtype)
        made, results, pieces = _Compiled(drawn, row, {}, {}, []), dict[str, Any](), list[Any]()
        with torch.no_grad():
            arguments = operands(drawn)
            for engine in ENGINES:
                fusegraph.torch.report(clear=True)
                with kept(row.why, engine, LIMIT_S):
                    function = on_engine(engine, drawn.function, forget=False)
                    results[engine] = function(*arguments)
                    torch.cuda.synchronize()
                    made.functions[engine] = function
                if engine == OURS and engine in made.functions:
                    reports = fusegraph.torch.report(clear=True)
                    row.left = sorted({op for f in reports for _, op, _ in f.left})
                    pieces = [piece for f in reports for piece in f.pieces]
            plans = [piece.planned() for piece in pieces]
            made.plans = [plan for plan in plans if plan is not None]
            if plans and len(plans) == len(made.plans):
                row.predicted_us = round(sum(plan_us(plan, present()) for plan in plans), 2)
            row.error = _difference(results)
            if self._settings.cudnn:
                with kept(row.why, "cudnn", LIMIT_S):
                    made.more["cudnn"] = _on_cudnn(drawn)
            torch.cuda.synchronize()
        results.clear()
        arguments.clear()
        _let_go()
        return made

    def _time(self, made: _Compiled) -> None:
        allow_tf32(made.drawn.dtype)
        runs, row, timer = made.runs(operands(made.drawn)), made.row, self._bench.timer
        times: dict[str, list[float]] = {engine: [] for engine in runs}
        timer.reset()
        for repeat in range(WARMUP + REPEATS):
            for engine, run in runs.items():
                if engine in row.why:
                    continue
                with kept(row.why, engine, LIMIT_S):
                    us = timer.once(run)
                    times[engine] += [us] if repeat >= WARMUP else []
        row.us = {engine: round(median(every), 2) for engine, every in times.items() if every and engine not in row.why}
        row.floor_us = _floor(made.drawn, self._bench)

    def _time_again(self, slow: _Compiled) -> None:
        """Finds what a slow row's time goes to, and what the fastest schedules and other choices take."""
        allow_tf32(slow.drawn.dtype)
        runs, row = slow.runs(operands(slow.drawn)), slow.row
        with kept({}, "slow", LIMIT_S):
            for engine in (OURS, row.peer or ""):
                row.kernels[engine] = [(name[:120], round(us, 2)) for name, us in kernels_of_call(runs[engine])]
            if "tuned" in runs:
                row.tuned_us = round(self._bench.timer.median(runs["tuned"], REPEATS), 2)
            row.choices = choices.timed(slow.plans)


def _let_go() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _on_cudnn(drawn: Case) -> Callable[[], Any]:
    """Returns a run of cuDNN's, on random arrays.  Raises NotSupportedError where cuDNN refuses the case."""
    (graph,) = graphs_of(drawn.function, operands(drawn, "meta"), drawn.dtype, "cuda:0")
    executable = compile_graph(graph, "cudnn", autotune=True)
    arrays = [random_array(t.shape, t.strides, t.dtype, seed=number) for number, t in enumerate(graph.inputs)]
    out = executable(*arrays)
    return lambda: executable(*arrays, out=out)


def _difference(results: Mapping[str, Any]) -> float | None:
    """Returns the largest difference of ours to eager torch's results; None if one of them is missing."""
    if "eager" not in results or "fusegraph" not in results:
        return None
    return difference(*map(_listed, (results["eager"], results["fusegraph"])))


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def _floor(drawn: Case, bench: Bench) -> float:
    each = 2 if "16" in drawn.dtype else 4
    floor = bench.copy_us(sum(prod(o.shape) * (8 if o.below else each) for o in drawn.operands))
    unit = {"tf32": "tf32", "float32": "fp32"}.get(drawn.dtype, "bf16")
    if drawn.operations and (rate := bench.flops_per_us(unit)):
        floor = max(floor, drawn.operations / rate)
    allow_tf32(drawn.dtype)
    return round(float(floor), 2)
