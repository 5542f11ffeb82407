"""Operands of contractions laid out for tensor cores: which graphs get copies, and that they compute the same."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest
from graphs import check_all, check_on_gpu

import fusegraph as fg
from codegen import target
from codegen.contraction.mma_schedule import MmaSchedule
from codegen.contraction.wgmma_layout import WgmmaSchedule
from fusegraph.lowering.base import Options
from fusegraph.lowering.choices import Choice, Settled
from fusegraph.passes import operand_layouts
from fusegraph.passes.operand_layouts import AS_THEY_LIE, LAID_OUT, NAME
from fusegraph.plan import Plan, by_cost_model, plan

HOPPER = by_cost_model(target("sm_90a"))


def copies_pay(monkeypatch):
    """Estimates come in pairs, of operands as they are and laid out: the latter take no time."""
    estimates = cycle((1e9, 0.0))
    monkeypatch.setattr(operand_layouts, "_fastest", lambda *_: next(estimates))


def matmul(m, n, k, dtype="bfloat16", b_strides=None, a_strides=None, **more):
    graph = fg.Graph("product", io_dtype=dtype, **more)
    a, b = graph.tensor("a", (m, k), strides=a_strides), graph.tensor("b", (k, n), strides=b_strides)
    graph.output(graph.relu(graph.matmul(a, b)), name="y")
    return graph


def convolution(x, w, layout="NHWC", filters="NHWC", dtype="bfloat16", **attributes):
    graph = fg.Graph("convolution", io_dtype=dtype)
    y = graph.conv_fprop(graph.tensor("x", x, layout=layout), graph.tensor("w", w, layout=filters), **attributes)
    graph.output(graph.relu(y), name="y")
    return graph


def gradient(loss, w, dtype="bfloat16", **attributes):
    graph = fg.Graph("gradient", io_dtype=dtype)
    y = graph.conv_dgrad(graph.tensor("x", loss, layout="NHWC"), graph.tensor("w", w, layout="NHWC"), **attributes)
    graph.output(graph.relu(y), name="y")
    return graph


def block(channels, layout="NHWC", size=(8, 8)):
    """Returns two convolutions in a row."""
    graph = fg.Graph("block", io_dtype="bfloat16")
    x = graph.tensor("x", (2, channels, *size), layout=layout)
    v, w = (graph.tensor(name, (channels, channels, 3, 3), layout="NHWC") for name in "vw")
    hidden = graph.relu(graph.conv_fprop(x, v, padding=1))
    graph.output(graph.conv_fprop(hidden, w, padding=1), name="y")
    return graph


def copies(made: Plan) -> list[str]:
    return [n.output.name for n in made.simplified.nodes if n.op.name == "identity"]


def form(made: Plan) -> type:
    (only,) = (k for k in made.kernels if k.group.family == "contraction")
    return type(only.choice.schedule)


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (matmul(32576, 509, 509, b_strides=(1, 509)), ["a aligned", "b aligned"]),
        (matmul(512, 509, 8191, b_strides=(1, 8191)), ["a aligned", "b aligned"]),  # a long way, one element at a time
        (matmul(40, 509, 1021, b_strides=(1, 1021)), ["a aligned", "b aligned"]),  # by two warps of a multiprocessor
        (matmul(4096, 4096, 4096, b_strides=(1, 4096)), []),
        (matmul(4096, 4096, 4096, a_strides=(1, 4096)), []),
        (matmul(4096, 4096, 4096, "float8_e4m3"), ["b aligned"]),
        (matmul(520, 513, 4100, "float32", compute_dtype="tf32"), ["b aligned"]),
        (matmul(4096, 4096, 4096, "float32", compute_dtype="tf32", b_strides=(1, 4096)), []),
        (convolution((64, 100, 29, 29), (100, 100, 5, 5), padding=2), ["x aligned", "w aligned"]),
        (convolution((64, 64, 56, 56), (64, 64, 3, 3), "NCHW", "contiguous"), ["x aligned", "w aligned"]),
        (convolution((64, 64, 56, 56), (64, 64, 3, 3)), []),
        (gradient((64, 32, 56, 56), (32, 128, 3, 3), padding=1), ["w aligned"]),  # else half of each tile were empty
        (gradient((64, 96, 35, 35), (96, 96, 3, 3), padding=1), ["w aligned"]),
        (gradient((64, 64, 56, 56), (64, 128, 3, 3), padding=1), []),
    ],
)
def test_copies_that_pay(graph, expected):
    made = plan(graph, choose=HOPPER)
    assert copies(made) == expected
    assert form(made) is WgmmaSchedule
    names = [k.group.family for k in made.kernels]
    assert names == ["pointwise"] * len(expected) + ["contraction"]


@pytest.mark.parametrize(
    "graph",
    [
        matmul(7, 509, 201, b_strides=(1, 201)),  # a launch would cost more
        matmul(32576, 509, 509, "float32"),  # exact
        matmul(32576, 509, 509, "float64"),
        matmul(32576, 509, 509, "int32"),
        matmul(32576, 509, 509, a_strides=(0, 1)),  # repeated
        convolution((64, 3, 224, 224), (64, 3, 3, 3)),  # so few channels would be mostly padding
        convolution((64, 256, 56, 56), (256, 1, 3, 3), groups=256),  # depthwise: no tensor cores
        matmul(0, 509, 509),
    ],
)
def test_no_copies(graph):
    assert copies(plan(graph, choose=HOPPER)) == []


def weights(dtype="bfloat16"):
    """Returns a product and a convolution with constant weights, laid out as models store them."""
    rng = np.random.default_rng(1)
    graph = fg.Graph("weights", io_dtype=dtype)
    x, a = graph.tensor("x", (2, 64, 9, 9)), graph.tensor("a", (40, 96))
    w, b = (graph.constant(rng.integers(-4, 5, shape), dtype=dtype) for shape in ((32, 64, 3, 3), (96, 48)))
    graph.rename(w, "w")
    graph.rename(b, "b")
    graph.output(graph.conv_fprop(x, w, padding=1), name="y")
    graph.output(graph.matmul(a, b), name="z")
    return graph


def test_constants_are_laid_out_without_a_kernel(monkeypatch):
    monkeypatch.setattr(operand_layouts, "MARGIN", -1.0)  # wherever it is possible
    for dtype, expected in (("bfloat16", {"w aligned", "b"}), ("int8", {"w aligned", "b aligned"})):
        made = plan(weights(dtype), choose=HOPPER)
        assert [name for name in copies(made) if not name.startswith("x")] == []
        assert {t.name for t in (*made.constants, *made.packed)} == expected
        assert next(t.strides for t in made.packed if t.name == "w aligned") == (576, 1, 192, 64)


@pytest.mark.slow
def test_constants_that_are_laid_out_equal_the_reference(monkeypatch):
    monkeypatch.setattr(operand_layouts, "MARGIN", -1.0)
    check_all([weights(), weights("int8")], arch="sm_90a")


@pytest.mark.gpu
def test_constants_that_are_laid_out_on_a_gpu(monkeypatch):
    monkeypatch.setattr(operand_layouts, "MARGIN", -1.0)
    check_on_gpu([weights(), weights("int8")])


def test_only_with_fusion():
    assert copies(plan(matmul(32576, 509, 509), fusion=False)) == []


def test_what_begins_anywhere_is_copied_too():
    made = plan(matmul(4096, 4096, 4096, b_strides=(1, 4096)), Options(alignment=2), choose=HOPPER)
    assert copies(made) == ["a aligned", "b aligned"]
    assert form(made) is WgmmaSchedule


def test_intermediates_are_laid_out_where_they_are_made():
    made = plan(block(101, size=(256, 256)), choose=HOPPER)
    hidden = made.kernels[2].group.writes[0]
    assert copies(made) == ["x aligned", "v aligned", "w aligned"]
    assert hidden.strides == (256 * 256 * 128, 1, 256 * 128, 128)
    assert made.memory.size >= 2 * 256 * 256 * 128 * 2


def test_an_operand_of_two_is_copied_once():
    graph = fg.Graph("two", io_dtype="bfloat16")
    x = graph.tensor("x", (32576, 509))
    for name in "vw":
        graph.output(x @ graph.tensor(name, (509, 509)), name=f"y_{name}")
    assert copies(plan(graph, choose=HOPPER)) == ["x aligned", "v aligned", "w aligned"]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_equal_to_the_reference(arch, monkeypatch):
    """Whatever the layout was: with copies that cost nothing every operand gets one."""
    copies_pay(monkeypatch)
    graphs = [
        matmul(65, 33, 77, b_strides=(1, 77)),
        matmul(30, 41, 50, "float16", a_strides=(1, 31)),
        matmul(20, 41, 50, "float32", compute_dtype="tf32"),
        matmul(20, 41, 50, "int8"),
        convolution((2, 60, 9, 7), (28, 60, 3, 3), "NCHW", "contiguous", padding=1),
        convolution((2, 20, 9, 7), (12, 20, 3, 3), dtype="float16", stride=2),
        gradient((2, 40, 9, 7), (40, 24, 3, 3), padding=1),
        gradient((2, 24, 5, 4), (24, 48, 3, 3), "float16", stride=2),
        block(20),
        block(12, "NCHW", (5, 7)),
    ]
    expected = (WgmmaSchedule, MmaSchedule) if arch == "sm_90a" else (MmaSchedule,)  # small ones may have either
    for graph in graphs[:6]:
        made = plan(graph, choose=by_cost_model(target(arch)))
        assert copies(made), graph.name
        assert form(made) in expected
    check_all(graphs, arch=arch)


def test_nothing_leaks_from_the_gaps(monkeypatch):
    """Between the rows of a copy lie bytes that nobody writes: NaN on the cpu engine."""
    copies_pay(monkeypatch)
    graph = matmul(65, 33, 77, b_strides=(1, 77))
    executable = graph.compile("cpu", target="sm_90a")
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((65, 77), (33, 77)))
    bf16 = fg.dtypes.bfloat16.numpy
    y = executable(a.astype(bf16), b.astype(bf16).T).astype(np.float32)
    exact = np.maximum(a @ b.T, 0)
    np.testing.assert_allclose(y, exact, rtol=2**-8)


def test_copies_of_parameters_are_weighed_without_their_cost() -> None:
    def made(parameter: bool, taken: str = "") -> tuple[Choice, Plan]:
        graph = fg.Graph("misaligned", io_dtype="float16")
        x, w = graph.tensor("x", (256, 4096)), graph.tensor("w", (4096, 1023), parameter=parameter)
        graph.output(graph.matmul(x, w, name="y"))
        found = plan(graph, Options(target=target("h200"), settled={(NAME, "y"): Settled(taken)}))
        (choice,) = (c for c in found.choices if c.what == NAME)
        return choice, found

    (of_input, _), (of_parameter, packed) = made(False), made(True)
    assert (of_input.preferred, of_parameter.preferred) == (AS_THEY_LIE, LAID_OUT)
    assert of_input.cycles[AS_THEY_LIE] == of_parameter.cycles[AS_THEY_LIE]
    copied, free = of_input.cycles[LAID_OUT], of_parameter.cycles[LAID_OUT]
    assert copied is not None
    assert free is not None
    assert free < copied
    assert (len(packed.kernels), len(packed.packed)) == (1, 1)
    for parameter, taken, kernels, packs in (
        (True, AS_THEY_LIE, 1, 0),
        (False, LAID_OUT, 2, 0),
        (False, AS_THEY_LIE, 1, 0),
    ):
        choice, found = made(parameter, taken)
        assert choice.taken == taken
        assert (len(found.kernels), len(found.packed)) == (kernels, packs)


def test_filters_whose_channels_are_far_apart_are_laid_out_for_float32() -> None:
    """Threads that read such elements one by one wait for the L2 cache, which sends a sector for each."""
    for x, w, stride in (((64, 64, 56, 56), (64, 64, 3, 3), 1), ((64, 512, 14, 14), (512, 512, 3, 3), 2)):
        graph = convolution(x, w, filters="NCHW", dtype="float32", padding=1, stride=stride)
        assert copies(plan(graph, Options(target=target("sm_90a")))) == ["w aligned"]
