"""Where ranges meet, and what is left once enough were tried: kernels for all sizes, if not the fastest."""

from __future__ import annotations

import re
from math import prod

import numpy as np
import pytest
from dim_cases import build

import fusegraph as fg
from codegen.bf16x6 import LEAST_TERMS
from codegen.sizes import Size, at
from fusegraph import ranges
from fusegraph.lowering.base import Options
from fusegraph.ranges import SizedPlan, plan_ranges
from fusegraph.runtime import host_compiler, nvrtc
from fusegraph.runtime.cache import default_cache

SLOW = pytest.mark.slow


def few(patch: pytest.MonkeyPatch) -> None:
    """Lets hardly any ranges be tried."""
    for name, count in (("TRIES", 1), ("FEWEST", 1), ("MOST", 2), ("LEAST", 2)):
        patch.setattr(ranges, name, count)


def starts(planned: SizedPlan, name: str) -> set[int]:
    """Returns the sizes at which kernels' ranges begin."""
    return {v.range.bounds[name].min for p in planned.plans for _, vs in p.kernels for v in vs if v.range.varying}


@pytest.mark.parametrize(
    "name",
    [
        "transpose",
        *(pytest.param(n, marks=SLOW) for n in ("matmul vector", "pointwise shift_left", "depthwise stride 3")),
    ],
)
def test_no_size_is_left_without_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch)
    assert plan_ranges(build(name), Options()).by_size == []


@SLOW
def test_choices_are_settled_where_none_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large reductions are in parts, small ones are not: at all sizes they are one or the other then."""
    few(monkeypatch)
    graph = fg.Graph("sums")
    n, m = fg.Dim("n", min=2, max=512), fg.Dim("m", min=2, max=3000)
    graph.output(graph.reduction(graph.tensor("x", (n, 6, m)), mode="add", axes=(0, 2)), name="y")
    executable = graph.compile("cpu")
    (planned,) = executable.plans
    assert planned.by_size == []
    assert len([p for p in planned.plans if p.range.varying]) == 1
    monkeypatch.setattr(host_compiler, "build", None)  # nothing more is compiled
    for sizes in ((2, 2), (3, 701), (512, 5), (130, 88)):
        x = np.random.default_rng(prod(sizes)).standard_normal((sizes[0], 6, sizes[1])).astype(np.float32)
        expected = x.astype(np.float64).sum((0, 2))
        np.testing.assert_allclose(np.ravel(executable(x)), expected, rtol=1e-5, atol=1e-3)


def test_ranges_of_kernels_meet_where_their_code_changes() -> None:
    """A vector of four elements has parts of two rows at most, if these are as long."""
    graph = fg.Graph("rows")
    n, m = fg.Dim("n", min=2, max=512), fg.Dim("m", min=2, max=3000)
    graph.output(graph.tensor("x", (n, m)) * graph.tensor("b", (n, 1)), name="y")
    assert 4 in starts(plan_ranges(graph, Options()), "m")


@SLOW
def test_ranges_of_partitions_meet_where_these_change() -> None:
    """Tensor cores may take part in float32 products of so many terms; ranges meet near that."""
    graph = fg.Graph("vector")
    n, m = fg.Dim("n", min=2, max=3000), fg.Dim("m", min=2, max=500)
    graph.output(graph.tensor("x", (1, n)) @ graph.tensor("w", (n, m)), name="y")
    firsts = {p.range.bounds["n"].min for p in plan_ranges(graph, Options()).plans}
    assert any(0.95 * LEAST_TERMS < first < 1.05 * LEAST_TERMS for first in firsts)


def test_blocks_whose_threads_vary_compile_for_gpus() -> None:
    """Launch bounds are numbers: of the most threads that a block has."""
    graph = fg.Graph("flat")
    h, w = (fg.Dim(name, min=6, max=12) for name in "hw")
    x, f = graph.tensor("x", (5, 16, h, w)), graph.tensor("f", (16, 1, 3, 3))
    graph.output(graph.conv_fprop(x, f, padding=1, groups=16), name="y")
    sources = plan_ranges(graph, Options()).sources
    varying = [s for s in sources if isinstance(s.block[0], Size)]
    assert varying
    for source in sources:
        assert re.search(r"__launch_bounds__\(\d+(, \d+)?\)", source.code)
    nvrtc.compile_kernels(varying[:1], "sm_90a", cache=default_cache())


@pytest.mark.parametrize("padding", [0, 1, (0, 2), (2, 1)])
@pytest.mark.parametrize(("window", "stride"), [(3, 2), (2, 2), (2, 3), (5, 4), (3, 1)])
def test_windows_that_hang_over_are_counted_at_all_sizes(window: int, stride: int, padding: int | tuple) -> None:
    """There is one at every stride until one covers the padding behind; the last begins before the end."""
    before, after = padding if isinstance(padding, tuple) else (padding, padding)
    if max(before, after) >= window:
        pytest.skip("padding is less than a window")
    n = fg.Dim("n", min=6, max=40)
    graph = fg.Graph("pool")
    how = {"window": window, "stride": stride, "padding": [(before, after)], "ceil_mode": True}
    y = graph.max_pool(graph.tensor("x", (1, 1, n)), **how)
    for size in range(6, 41):
        starts = range(0, size + before, stride)
        covering = next((k for k, s in enumerate(starts) if s + window >= size + before + after), len(starts) - 1)
        assert at(y.shape[2], {"n": size}) == covering + 1


def scores(least: int, most: int) -> fg.Graph:
    """Returns attention's scores for heads of a size that varies: the scale is a number in the kernel."""
    graph = fg.Graph("scores")
    n, s = fg.Dim("n", min=least, max=most), fg.Dim("s", min=2, max=300)
    q, k = graph.tensor("q", (1, 2, s, n)), graph.tensor("k", (1, 2, s, n))
    graph.output(graph.sdpa(q, k, graph.tensor("v", (1, 2, s, n))), name="y")
    return graph


@pytest.mark.slow
def test_sizes_with_partitions_of_their_own_are_planned_by_themselves() -> None:
    planned = plan_ranges(scores(3, 6), Options())
    assert planned.by_size == []
    assert {p.range.bounds["n"] for p in planned.plans} == {(n, n) for n in range(3, 7)}
    sizes = {"n": 5, "s": 40}
    assert planned.known(sizes) is not None


def test_many_sizes_with_partitions_of_their_own_are_planned_when_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """No range of them has one partition, which shows at once: nothing is cut."""
    made: list[object] = []
    partitioned = ranges.partitioned
    monkeypatch.setattr(ranges, "partitioned", lambda *args, **how: made.append(args) or partitioned(*args, **how))
    planned = plan_ranges(scores(3, 300), Options())
    assert {range_.bounds["n"] for range_, _ in planned.by_size} == {(3, 300)}
    assert all("as for each size of 'n'" in reason for _, reason in planned.by_size)
    assert len(made) < 30
