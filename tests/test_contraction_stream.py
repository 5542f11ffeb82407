"""Products that stream their large operand: every schedule, type, layout and epilogue on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from graphs import check_on_gpu, leave_out_pass
from kernel_cases import Case, check_cases
from test_contraction import DTYPES, convolution, epilogues, matmul, transposed

import fusegraph as fg
from codegen.contraction.stream import render
from codegen.contraction.stream_schedule import StreamSchedule, fits, schedules, streams
from codegen.declined import Declined
from codegen.spec import ContractionSpec
from codegen.target import target
from fusegraph.lowering.base import Options
from fusegraph.plan import plan


@pytest.fixture(autouse=True)
def as_given(monkeypatch: pytest.MonkeyPatch, contractions_in_one_piece: None) -> None:
    """Turns off copies of operands, which would give the cases another form."""
    leave_out_pass(monkeypatch, "operand layouts")


def every(limit: int = 1000, step: int = 1) -> Callable[[fg.Graph], list[Callable[[ContractionSpec], StreamSchedule]]]:
    """Returns what finds the schedules of a graph's product, or some of them."""

    def found(graph: fg.Graph) -> list[Callable[[ContractionSpec], StreamSchedule]]:
        each = schedules(spec_of(graph), target("h200"))[:limit:step]
        return [lambda _, s=s: s for s in each]

    return found


def spec_of(graph: fg.Graph) -> ContractionSpec:
    spec = plan(graph, Options(target=target("h200"))).kernels[-1].group.lowered.spec
    assert isinstance(spec, ContractionSpec)
    return spec


def check(cases: list[Case], pick: Any) -> list[Any]:
    """Checks cases with several schedules each."""
    made = [
        Case(
            case.graph,
            case.family,
            case.options,
            schedule,
            case.inputs,
            case.special,
            label=f"{case.label} {schedule(None)}",
        )
        for case in cases
        for schedule in pick(case.graph)
    ]
    return check_cases(made, guard=True)


@pytest.mark.slow
def test_every_schedule():
    check([matmul((7, 40), (40, 96)), matmul((100, 12), (12, 3), a_strides=(1, 100))], every())


@pytest.mark.slow
def test_results_of_few_columns_are_written_together():
    """Neighbouring columns, of which a thread has all: four at a time, in parts of a sum, too."""
    cases = [matmul((100, 20), (20, 12), a_strides=(1, 100)), matmul((2, 70, 56), (2, 56, 16), a_strides=(3920, 1, 70))]
    for exe in check(cases, every(40, 5)):
        (kernel,) = exe.plan.kernels
        assert ("store(y + " in kernel.source.code) == (kernel.choice.schedule.rows >= 4)


@pytest.mark.parametrize("sizes", [(5, 4, 6), (3, 40, 64)])
def test_schedules_found_for_other_sizes(sizes):
    """Whatever fits is right: more terms or warps than there is work for, and more rows."""
    few, depth, size = sizes
    numbers = itertools.product((1, 8, 16), (1, 2, 4), (4, 8), (1, 2, 8), (1, 4, 16))
    every = [StreamSchedule(*each) for each in numbers if each[3] <= each[2]]
    case = matmul((few, depth), (depth, size))
    found = streams(spec_of(case.graph))
    check([case], lambda _: [lambda _, s=s: s for s in every if fits(found, s)])
    with pytest.raises(Declined, match="none for these"):
        render(spec_of(matmul((few, depth), (depth, 33)).graph), StreamSchedule(4, 4, 8, 1, 8))


def test_ragged_sizes():
    sizes = [(2, 2, 2), (2, 3, 17), (2, 33, 25), (7, 300, 8), (16, 31, 3), (17, 130, 5), (40, 257, 9)]
    cases = [matmul((few, depth), (depth, size)) for few, size, depth in sizes]
    cases += [matmul((size, depth), (depth, few), a_strides=transposed((size, depth))) for few, size, depth in sizes]
    check(cases, every(40, 13))


@pytest.mark.parametrize(
    ("numbers", "message"), [((8, 4, 8, 16, 8), "share"), ((0, 4, 8, 1, 8), "1, 2, 4"), ((8, 3, 8, 1, 8), "1, 2, 4")]
)
def test_schedules_that_are_none(numbers, message):
    with pytest.raises(ValueError, match=message):
        StreamSchedule(*numbers)


def test_types():
    cases = [
        matmul((5, 24), (24, 40), dtype, compute="float64" if dtype == "float64" else "float32") for dtype in DTYPES
    ]
    cases += [matmul((5, 24), (24, 40), "bfloat16", "float32"), matmul((40, 24), (24, 5), "float32", "int8")]
    check(cases, every(30, 15))


def test_layouts():
    """Rows that lie along the reduction are read in pieces, others in vectors, or one by one."""
    cases = [
        matmul((5, 16), (16, 64), a_strides=a, b_strides=b)
        for a in ((16, 1), (1, 5), (0, 1), (100, 3))
        for b in ((64, 1), (1, 16), (65, 1), (1, 17), (128, 2), (0, 1), (1, 0))
    ]
    cases += [matmul((3, 5, 24), (3, 24, 64)), matmul((3, 5, 24), (24, 64)), matmul((2, 1, 5, 16), (3, 16, 24))]
    check(cases, every(60, 19))
    assert streams(spec_of(cases[1].graph)).run == 4
    assert streams(spec_of(cases[0].graph)).widest == 4


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_pointwise_convolutions(groups, layout):
    def spatial(graph: fg.Graph, y: fg.Tensor) -> None:
        bias = graph.tensor("bias", (y.shape[1], 1, 1), y.dtype)
        residual = graph.tensor("residual", y.shape, y.dtype, layout=layout)
        graph.output(graph.swish(y + bias) + residual, name="y")

    shapes = [((3, 24, 6, 10), (24, 24 // groups, 1, 1)), ((2, 28, 5, 7), (36, 28 // groups, 1, 1))]
    cases = [
        convolution(*shape, dtype, layout=layout, groups=groups, epilogue=spatial)
        for shape in shapes
        for dtype in ("float32", "bfloat16")
    ]
    check(cases, every(60, 17))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_epilogues(dtype):
    cases = [
        matmul(a, b, dtype, epilogue=epilogue, label=f"{name} {a} {b}")
        for name, epilogue in epilogues().items()
        for a, b in (((9, 5), (5, 12)), ((2, 3, 12, 5), (3, 5, 7)), ((40, 12), (12, 4)))
    ]
    check(cases, every(80, 31))


def test_computed_operands():
    """Where there is no term the elements that are computed of nothing are left out: the logarithm of 0, say."""
    cases = []
    for depth, size, number in itertools.product((10, 16), (24, 33), (0, 1)):
        graph = fg.Graph(f"{depth} {size} {number}")
        x, w = graph.tensor("x", (5, depth)), graph.tensor("w", (depth, size))
        scale, row = graph.tensor("scale", (depth, 1)), graph.tensor("row", (1, size))
        few = graph.log(graph.abs(x)) if number else x
        large = (
            w if number else graph.log(graph.abs(w)) * scale + row + graph.cast(graph.gen_index(w, axis=1), "float32")
        )
        graph.output(graph.matmul(few, large), name="y")
        cases.append(Case(graph))
    made = check(cases, every(60, 19))
    assert all(len(exe.plan.kernels) == 1 for exe in made)


def test_a_large_operand_of_positions():
    """It is read from no tensor."""
    graph = fg.Graph("positions")
    x, like = graph.tensor("x", (3, 20)), graph.tensor("like", (20, 40))
    graph.output(graph.matmul(x, graph.cast(graph.gen_index(like, axis=1), "float32")), name="y")
    check([Case(graph)], every(40, 9))


def in_rows(few: int, depth: int, size: int, dtype: str = "float32", **more: Any) -> Case:
    """A large operand whose rows lie along the sum, as torch's linear layers have it."""
    return matmul((few, depth), (depth, size), dtype, b_strides=(1, depth), **more)


@pytest.mark.slow
def test_every_schedule_of_lanes_that_share_a_sum():
    check([in_rows(3, 72, 40)], every())


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(x, marks=pytest.mark.slow) for x in ("bfloat16", "float64", "int8"))]
)
def test_lanes_share_a_sum(dtype):
    sizes = [(2, 256, 12), (3, 170, 33), (2, 301, 8), (16, 131, 66), (12, 200, 36)]
    cases = [in_rows(*size, dtype, compute="float64" if dtype == "float64" else "float32") for size in sizes]
    cases += [matmul((size, depth), (depth, few), dtype) for few, depth, size in sizes if dtype == "float32"]
    for exe in check(cases, every(1000, 31)):
        assert exe.plan.kernels[0].choice.schedule.lanes > 1


@pytest.mark.parametrize("along", [False, True])
def test_several_products(along):
    """A gated layer: two products of one operand."""
    cases = []
    for few, depth, size in ((1, 96, 40), (5, 75, 33), (16, 40, 24)):
        graph = fg.Graph(f"gated {few} {depth} {size}")
        x = graph.tensor("x", (few, depth))
        strides = (1, depth) if along else (size, 1)
        gate, up = (graph.tensor(name, (depth, size), strides=strides) for name in ("gate", "up"))
        bias = graph.tensor("bias", (size,))
        graph.output(graph.swish(graph.matmul(x, gate) + bias) * graph.matmul(x, up), name="y")
        cases.append(Case(graph))
    for exe in check(cases, every(1000, 23)):
        assert len(exe.plan.kernels) == 1
        assert (exe.plan.kernels[0].choice.schedule.lanes > 1) == (along and exe.graph.inputs[0].shape[1] > 32)


def test_special_values():
    check(
        [matmul((3, 40), (40, 64), dtype, special=0.03) for dtype in ("float32", "bfloat16", "float64")], every(20, 9)
    )


def test_what_it_is_not_for():
    def reason(graph: fg.Graph) -> str:
        with pytest.raises(Declined) as told:
            schedules(spec_of(graph), target("h200"))
        return str(told.value)

    assert "at most 256" in reason(matmul((300, 8), (8, 300)).graph)
    assert "limits" in reason(convolution((2, 16, 9, 9), (16, 16, 3, 3), padding=1).graph)
    assert "at most 16" in reason(matmul((17, 64), (64, 300), b_strides=(1, 64)).graph)
    assert "shared memory" in reason(matmul((3, 70000), (70000, 40), "float64", compute="float64").graph)


def product(few: int, depth: int, size: int, dtype: str, *, batch: tuple[int, ...] = ()) -> fg.Graph:
    return matmul((*batch, few, depth), (*batch, depth, size), dtype).graph


def streamed(graph: fg.Graph) -> bool:
    return type(plan(graph, Options(target=target("h200"))).kernels[0].choice.schedule) is StreamSchedule


def test_when_it_is_chosen():
    """Few rows beside a large operand that lies across the reduction, and sums of few terms."""
    image = ((16, 32, 128, 128), (32, 8, 1, 1))
    assert streamed(convolution(*image, groups=4).graph)
    assert streamed(matmul((125, 8), (8, 30522), b_strides=(1, 8)).graph)
    assert streamed(product(2, 1984, 2048, "float32", batch=(8,)))
    assert not streamed(product(128, 1024, 4096, "float32"))
    assert not streamed(product(16, 4096, 4096, "bfloat16"))


@pytest.mark.gpu
def test_on_a_gpu():
    graphs = [
        product(few, depth, size, dtype)
        for few, depth, size in ((2, 1984, 2048), (7, 100, 999), (16, 8, 5000))
        for dtype in ("float32", "bfloat16")
    ]
    graphs += [convolution((16, 32, 64, 64), (32, 8, 1, 1), dtype, groups=4).graph for dtype in ("float32", "float16")]
    graphs += [matmul((125, 8), (8, 30522), b_strides=(1, 8)).graph]
    check_on_gpu(graphs)
