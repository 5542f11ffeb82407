"""Gradients of filters of few channels a group, run on the CPU against the reference, and when they are in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from choosing import always
from golden_files import check_golden
from graphs import share
from kernel_cases import Case, check_cases

import fusegraph as fg
from codegen import render, schedules, target
from codegen.filter_gradient.schedule import FilterGradientSchedule
from codegen.filter_gradient.spec import FilterGradientSpec
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.graph import Graph
from fusegraph.layout import packed_strides
from fusegraph.lowering.base import Options
from fusegraph.ops import TABLE
from fusegraph.ops.parts import BANDS
from fusegraph.passes import filter_gradients
from fusegraph.plan import plan
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache


def gradient(
    image: tuple[int, ...],
    filters: int,
    taps: int | tuple[int, ...],
    groups: int,
    dtype: str = "float32",
    layout: str = "NHWC",
    epilogue: bool = False,
    **how: Any,
) -> Graph:
    """Builds the gradient of a filter in groups."""
    rank = len(image) - 2

    def every(value: Any) -> tuple[int, ...]:
        return (value,) * rank if isinstance(value, int) else value

    graph = fg.Graph("gradient", io_dtype=dtype)
    steps = zip(
        image[2:], every(taps), *(every(how.get(n, v)) for n, v in (("padding", 0), ("stride", 1), ("dilation", 1)))
    )
    out = [(size + 2 * before - (count - 1) * apart - 1) // step + 1 for size, count, before, step, apart in steps]
    order = (0, *range(2, rank + 2), 1) if layout == "NHWC" else tuple(range(rank + 2))
    loss = (image[0], filters, *out)
    x, dy = (graph.tensor(n, s, strides=packed_strides(s, order)) for n, s in (("image", image), ("loss", loss)))
    y = graph.conv_wgrad(x, dy, taps=every(taps), groups=groups, name="dw", **how)
    graph.output(graph.cast(y * 0.5, "float32") + 1.0 if epilogue else y, name="result")
    return graph


#: image, filters, taps, groups, attributes
PROBLEMS: list[tuple[tuple[int, ...], int, Any, int, dict[str, Any]]] = [
    ((2, 16, 13, 11), 16, 3, 16, {"padding": 1}),
    ((1, 24, 19, 14), 24, (7, 5), 24, {"padding": (3, 2)}),
    ((2, 16, 18, 12), 16, 3, 16, {"padding": 1, "stride": 2}),
    ((1, 8, 19, 13), 8, (2, 3), 8, {"stride": (1, 3), "dilation": (3, 2), "padding": (3, 4)}),
    ((3, 8, 7, 9), 8, 1, 8, {"stride": (3, 2)}),
    ((2, 8, 3, 2), 8, (5, 7), 8, {"padding": (4, 6), "mode": "convolution"}),
    ((2, 12, 40), 12, 3, 12, {"padding": 1}),
    ((1, 3, 6, 5, 7), 3, (3, 2, 3), 3, {"padding": (2, 1, 0), "stride": (1, 2, 1), "dilation": (1, 1, 2)}),
    ((1, 8, 9, 8), 16, 3, 4, {"padding": 1}),
    ((2, 6, 8, 9), 12, 3, 6, {"padding": 2, "dilation": 2}),
    ((1, 32, 6, 6), 16, (1, 3), 4, {"padding": (0, 1), "mode": "convolution"}),
    ((1, 2, 17, 33), 2, (11, 9), 2, {"padding": 5}),
]


def problem(number: int, **more: Any) -> Graph:
    image, filters, taps, groups, how = PROBLEMS[number % len(PROBLEMS)]
    return gradient(image, filters, taps, groups, **how, **more)


@pytest.fixture
def in_bands(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sums up every gradient in so many parts."""

    def force(count: int) -> None:
        wgrad = TABLE["conv_wgrad"]
        monkeypatch.setattr(filter_gradients, "weighed", always(lambda node: count if node.op is wgrad else 0))

    return force


def every_schedule(graph: Graph) -> list[FilterGradientSchedule]:
    (kernel,) = plan(graph).kernels
    found = schedules(kernel.group.lowered.spec, target("h200"))
    assert all(isinstance(s, FilterGradientSchedule) for s in found)
    return [s for s in found if isinstance(s, FilterGradientSchedule)]


def given(s: FilterGradientSchedule) -> Callable[[Any], FilterGradientSchedule]:
    """Returns what gives every spec this schedule."""
    return lambda _: s


def one_kernel(made: CpuExecutable) -> None:
    assert made.plan is not None
    assert [k.group.family for k in made.plan.kernels] == ["filter_gradient"]


def test_equal_to_the_reference(in_bands: Any) -> None:
    """Every problem with another schedule: odd sizes, strides, dilation, padding, 1-D to 3-D, groups."""
    in_bands(1)
    cases = []
    for n in range(len(PROBLEMS)):
        graph = problem(
            n, layout=("NHWC", "NCHW")[n % 2], dtype=("float32", "bfloat16")[n // 2 % 2], epilogue=n % 3 == 0
        )
        best = every_schedule(graph)
        cases.append(Case(graph, "filter_gradient", schedule=given(best[n % len(best)]), check=one_kernel))
    check_cases(cases, guard=True)


@pytest.mark.slow
def test_schedules_of_every_problem(in_bands: Any) -> None:
    """Every second one of a layout, the even ones or the odd ones: together they have every value of every field."""
    in_bands(1)
    cases = []
    for n in range(len(PROBLEMS)):
        for k, layout in enumerate(("NHWC", "NCHW")):
            graph = problem(n, layout=layout, dtype=("float16", "float64", "float32")[n % 3])
            cases += [Case(graph, "filter_gradient", schedule=given(s)) for s in every_schedule(graph)[k::2]]
    check_cases(cases, guard=True)


def test_parts(in_bands: Any) -> None:
    in_bands(3)

    def two_kernels(made: CpuExecutable) -> None:
        assert made.plan is not None
        first, second = made.plan.kernels
        assert first.group.family == "filter_gradient"
        assert second.group.family in ("rows", "pointwise")  # which turns what it adds up

    check_cases(
        [Case(problem(n, dtype=d), check=two_kernels) for n, d in ((1, "bfloat16"), (7, "float32"))], guard=True
    )


def test_wide_offsets(in_bands: Any) -> None:
    """Offsets of 64 bits, as large images need them."""
    for n in (0, 1, 7, 8):
        in_bands(1 + n % 2 * 2)
        spec = plan(problem(n)).kernels[0].group.lowered.spec
        best = schedules(spec, target("h200"))[0]
        assert isinstance(best, FilterGradientSchedule)
        check_cases([Case(problem(n), schedule=given(replace(best, itype="int64")))], guard=True)


def test_reference_of_parts() -> None:
    rng = np.random.default_rng(1)
    for graph in (gradient((2, 4, 21, 5), 4, 3, 4, padding=1), gradient((1, 4, 30), 4, 3, 4), problem(7)):
        (node,) = (n for n in graph.nodes if n.op is TABLE["conv_wgrad"])
        x, dy = (rng.standard_normal(t.shape) for t in node.inputs)
        whole = node.op.reference(x, dy, **node.attributes)
        for parts in (3, 50):
            found = BANDS.reference(x, dy, parts=parts, band=4, **node.attributes)
            assert found.shape == (parts, *whole.shape)
            np.testing.assert_allclose(found.sum(0), whole)


def test_what_is_not_finite(in_bands: Any) -> None:
    """Infinities and NaN reach the taps that they meet, the padding included, and no others."""
    in_bands(1)
    check_cases([Case(problem(n), special=0.02) for n in (0, 2, 5, 7)])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_no_spills(arch: str) -> None:
    large = (
        gradient((8, 64, 28, 28), 64, 7, 64, "bfloat16", padding=3),
        gradient((8, 64, 28, 28), 64, 3, 64, "float32", "NCHW", padding=1),
        gradient((8, 64, 28, 28), 64, 3, 16, "float16", padding=1),
    )
    sources = []
    for number, graph in enumerate(large):
        spec = plan(graph, Options(target=target(arch))).kernels[0].group.lowered.spec
        assert isinstance(spec, FilterGradientSpec)
        made = [
            render(replace(spec, name=f"kernel{number}_{k}"), s) for k, s in enumerate(schedules(spec, target(arch)))
        ]
        sources += share(arch, made, number)
    for kernel in nvrtc.compile_kernels(sources, arch, cache=default_cache()):
        assert not kernel.spill_bytes, kernel.name


def test_golden_source() -> None:
    graph = gradient((16, 64, 14, 14), 64, 3, 64, "bfloat16", padding=1)
    kernel = plan(graph, Options(target=target("h200"))).kernels[0]
    check_golden("filter_gradient", kernel.source.code)
