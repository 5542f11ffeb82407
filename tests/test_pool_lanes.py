"""Pooling whose threads share windows: on the CPU against the reference, and where schedules are of this kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from graphs import check_on_gpu

import fusegraph as fg
from codegen import best_schedule
from codegen.pool.schedule import PoolSchedule, schedules, shares
from codegen.pool.space import normalize
from codegen.target import target
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, random_inputs

H200 = target("h200")


def uneven(shape: tuple[int, ...], dtype: str, size: Any, **layout: Any) -> fg.Graph:
    """Builds pooling with windows of different sizes, two reductions of each, and pointwise ops before and after."""
    g = fg.Graph(f"uneven {dtype} {shape}")
    x, b = g.tensor("x", shape, dtype, **layout), g.tensor("b", (1, shape[1], *(1 for _ in shape[2:])), dtype)
    before = g.relu(x + b)
    if x.dtype.is_float:
        g.output(g.adaptive_avg_pool(before, size) * b, name="mean")
    g.output(g.adaptive_max_pool(before, size) - b, name="max")
    return g


def sliding(shape: tuple[int, ...], dtype: str, how: dict[str, Any], **layout: Any) -> fg.Graph:
    g = fg.Graph(f"sliding {dtype} {shape}")
    x = g.tensor("x", shape, dtype, **layout)
    g.output(g.max_pool(x, **how), name="max")
    if "dilation" not in how:
        g.output(g.avg_pool(x, **how, count_include_pad=False), name="mean")
    return g


def run_in_lanes(monkeypatch: pytest.MonkeyPatch, cases: Sequence[tuple[fg.Graph, int, int]]) -> None:
    """Runs graphs of one kernel each with so many threads for a window, and neighbours per vector (0: as many as
    suit); with 64-bit offsets if vectors have one element.
    """
    made = []
    for graph, lanes, vector in cases:
        (kernel,) = plan(graph).kernels
        best = PoolSchedule(1, "int64") if vector == 1 else _alone(kernel.group.lowered.spec)
        forced = replace(best, rows=1, cols=1, down=1, planes=0, lanes=lanes)
        monkeypatch.setattr("fusegraph.plan.best_schedule", lambda *_, forced=forced: forced)
        made.append(CpuExecutable(graph, Options(), lazy=True))
    build_together(made)
    for executable in made:
        assert executable.plan is not None
        result = check_executable(executable, random_inputs(executable.graph, special=0.01))
        assert result.ok, f"{[k.choice.schedule for k in executable.plan.kernels]}: {result}"


def _alone(spec: Any) -> PoolSchedule:
    return next(s for s in schedules(spec, H200) if not s.planes)


NHWC: dict[str, Any] = {"layout": "NHWC"}


def test_windows_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        (uneven((2, 24, 13, 11), "bfloat16", (4, 3), **NHWC), 8, 0),
        (uneven((2, 3, 13, 11), "float32", (4, 3)), 16, 0),
        (sliding((1, 8, 14, 17), "float32", {"window": (7, 9), "stride": 3, "padding": 3}, **NHWC), 4, 0),
    ]
    run_in_lanes(monkeypatch, cases)


@pytest.mark.slow
def test_windows_of_every_kind_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = (((2, 16, 9, 16), (4, 7)), ((1, 5, 40, 11), (3, 9)), ((1, 1, 7, 5), 2), ((0, 8, 7, 5), 2))
    volume = fg.Graph("volume")
    volume.output(volume.adaptive_avg_pool(volume.tensor("x", (2, 3, 9, 8, 7), "float32"), (2, 3, 4)), name="mean")
    dilated = {"window": 5, "stride": 4, "dilation": (2, 1), "padding": 4}
    cases = [
        (uneven(shape, dtype, size, **layout), lanes, vector)
        for shape, size in shapes
        for dtype, lanes, vector in (("float32", 2, 0), ("bfloat16", 32, 0), ("float64", 4, 1), ("int32", 8, 0))
        for layout in ({}, NHWC)
    ]
    cases += [(sliding((1, 8, 24, 17), "float16", dilated, **layout), 8, 0) for layout in ({}, NHWC)]
    run_in_lanes(monkeypatch, [*cases, (volume, 16, 0), (uneven((3, 512, 9, 9), "float16", 2, **NHWC), 128, 0)])


@pytest.mark.gpu
def test_shared_windows_on_the_gpu() -> None:
    graphs = [uneven((3, 40, 56, 40), dtype, (5, 9), **NHWC) for dtype in ("float32", "bfloat16", "float64")]
    graphs += [uneven((1, 832, 99, 98), "float16", 6, **NHWC), uneven((1, 33, 97, 91), "bfloat16", 4, **NHWC)]
    check_on_gpu(graphs)


def test_few_large_windows_are_shared() -> None:
    def lanes(shape: tuple[int, ...], size: int, **how: Any) -> int:
        g = fg.Graph("g")
        x = g.tensor("x", shape, "bfloat16", **NHWC)
        g.output(g.adaptive_max_pool_index(x, size) if how else g.adaptive_avg_pool(x, size), name="y")
        best = best_schedule(plan(g).kernels[0].group.lowered.spec, H200)
        assert isinstance(best, PoolSchedule)
        return best.lanes

    assert lanes((1, 832, 224, 224), 6) >= 16
    assert lanes((32, 96, 56, 56), 6) >= 4
    assert lanes((64, 512, 7, 7), 6) == 1  # windows of four elements
    assert lanes((128, 1024, 28, 28), 5) == 1  # there are enough of them
    assert lanes((1, 832, 224, 224), 6, index=True) == 1  # the first of the largest


def test_threads_have_as_few_elements_as_possible() -> None:
    g = fg.Graph("g")
    g.output(g.adaptive_avg_pool(g.tensor("x", (1, 8, 57, 10), **NHWC), (3, 4)), name="y")
    space = normalize(plan(g).kernels[0].group.lowered.spec)
    assert [window.count for _, window in space.windows] == [19, 3]
    assert shares(space, 1) == (1, 1)
    assert shares(space, 4) == (4, 1)
    assert shares(space, 128) == (32, 4)
