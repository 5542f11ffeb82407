"""Pooling of uneven windows by planes: a block folds the columns of a few planes first, then their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from graphs import check_on_gpu

import fusegraph as fg
from codegen import best_schedule
from codegen.pool.schedule import PoolSchedule
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, random_inputs


def uneven(shape: tuple[int, ...], dtype: str, size: Any) -> fg.Graph:
    """Builds pooling with windows of different sizes, two reductions of each, and pointwise ops before and after."""
    g = fg.Graph(f"uneven {dtype} {shape}")
    x, b = g.tensor("x", shape, dtype), g.tensor("b", (*shape[:2], 1, 1), dtype)
    after = g.tensor("after", (*shape[:2], *size), dtype)
    before = g.relu(x + b)
    g.output(g.adaptive_avg_pool(before, size) * after, name="mean")
    g.output(g.adaptive_max_pool(before, size) - b, name="max")
    return g


def run_in_planes(monkeypatch: pytest.MonkeyPatch, cases: Sequence[tuple[fg.Graph, int, int]]) -> None:
    """Runs graphs of one kernel each with so many planes per block and neighbors per vector (0: as many as suit); with
    64-bit offsets if vectors have one element.
    """
    monkeypatch.setattr("codegen.pool.steps.LEAST_ELEMENTS", 0)
    made = []
    for graph, planes, vector in cases:
        (kernel,) = plan(graph).kernels
        spec = kernel.group.lowered.spec
        best = best_schedule(spec)
        assert isinstance(best, PoolSchedule)
        assert best.planes
        itype = "int64" if vector == 1 else best.itype
        forced = replace(best, planes=planes, vector=vector or best.vector, itype=itype)
        monkeypatch.setattr("fusegraph.plan.best_schedule", lambda *_, forced=forced: forced)
        made.append(CpuExecutable(graph, Options(), lazy=True))
    build_together(made)
    for executable in made:
        result = check_executable(executable, random_inputs(executable.graph, special=0.01))
        assert result.ok, f"{[k.choice.schedule for k in executable.plan.kernels]}: {result}"


def test_planes_in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also planes that begin anywhere: rows of the first are aligned, those of the second are not."""
    apart = fg.Graph("planes apart")
    apart.output(apart.adaptive_avg_pool(apart.tensor("planes", (1, 3, 5, 16), strides=(0, 81, 16, 1)), 3), name="y")
    cases = [(uneven((2, 3, 9, 16), "bfloat16", (4, 7)), 4, 0), (apart, 1, 0), (apart, 2, 0)]
    run_in_planes(monkeypatch, cases)


@pytest.mark.slow
def test_planes_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = (((2, 3, 9, 16), (4, 7)), ((1, 5, 40, 11), (3, 9)), ((1, 4, 8, 50), (4, 3)), ((7, 1, 5, 12), (8, 24)))
    run_in_planes(
        monkeypatch,
        [
            (uneven(shape, dtype, size), planes, 0 if planes != 2 else 1)
            for shape, size in shapes
            for dtype, planes in (("float32", 4), ("bfloat16", 2), ("float64", 1))
        ],
    )


@pytest.mark.gpu
def test_planes_on_the_gpu() -> None:
    graphs = [uneven((3, 5, 56, 40), dtype, (13, 9)) for dtype in ("float32", "bfloat16", "float64")]
    graphs += [uneven((40, 150, 33, 48), "float16", (5, 7)), uneven((1, 3, 37, 51), "bfloat16", (12, 50))]
    for graph in graphs:
        best = best_schedule(plan(graph).kernels[0].group.lowered.spec)
        assert isinstance(best, PoolSchedule)
        assert best.planes
    check_on_gpu(graphs)


def test_planes_are_for_what_can_be_folded_in_turn() -> None:
    def planes(make: Callable[[fg.Graph, fg.Tensor], fg.Tensor], size: int = 56, **how: Any) -> int:
        g = fg.Graph("g")
        g.output(make(g, g.tensor("x", (64, 32, size, size), **how)), name="y")
        best = best_schedule(plan(g).kernels[0].group.lowered.spec)
        return best.planes if isinstance(best, PoolSchedule) else 0

    assert planes(lambda g, x: g.adaptive_avg_pool(x, 5)) == 3
    assert planes(lambda g, x: g.adaptive_avg_pool(x, 5), dtype="float64") == 1
    assert planes(lambda g, x: g.adaptive_avg_pool(x, 5), layout="NHWC") == 0  # neighbours in memory are channels
    assert planes(lambda g, x: g.adaptive_avg_pool(x, 14)) == 0  # windows of one size
    assert planes(lambda g, x: g.adaptive_max_pool_index(x, 5)) == 0  # the first of the largest
    assert planes(lambda g, x: g.adaptive_max_pool(x, 5), strides=(2 * 32 * 3136, 3136, 56, 1)) == 0  # no even planes
    assert planes(lambda g, x: g.adaptive_avg_pool(x, 5), 14) == 0  # a barrier takes longer
    assert planes(lambda g, x: g.adaptive_avg_pool(x, 300), 512) == 0  # no room for what columns are folded to
