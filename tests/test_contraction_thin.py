"""Products of a large operand and a thin one: every tile, type, layout and epilogue on the CPU; NVRTC compiles them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graphs import leave_out_pass
from kernel_cases import Case, check_cases
from test_contraction import epilogues, matmul, transposed

import codegen
import fusegraph as fg
from codegen.contraction.thin_schedule import Piece, ThinSchedule, piece_sizes, schedules, thin_paths
from codegen.declined import Declined
from codegen.kernel import UNTIL_HERE, in_sequence
from codegen.spec import ContractionSpec
from codegen.target import target as named
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache

FLOATS = ("bfloat16", "float16", "float8_e4m3", "float8_e5m2")


@pytest.fixture(autouse=True)
def as_given(monkeypatch: pytest.MonkeyPatch, contractions_in_one_piece: None) -> None:
    """Turns off copies of operands, which would give the cases another form."""
    leave_out_pass(monkeypatch, "operand layouts")


def fixed(tile: int, warps: int, pieces: int) -> Callable[[ContractionSpec], ThinSchedule]:
    return lambda _: ThinSchedule(tile, warps, pieces)


def first(spec: ContractionSpec) -> ThinSchedule:
    return schedules(spec, named("sm_90a"))[0]


def thin(few: int, size: int, depth: int, *types: Any, swapped: bool = False, **case: Any) -> Case:
    """Returns a product whose large operand lies along the reduction: the second operand, or the first one."""
    case = {"schedule": first, **case}
    if swapped:
        return matmul((size, depth), (depth, few), *types, b_strides=transposed((depth, few)), **case)
    return matmul((few, depth), (depth, size), *types, b_strides=transposed((depth, size)), **case)


def spec_of(graph: fg.Graph, arch: str = "sm_90a") -> ContractionSpec:
    kernel = plan(graph, Options(target=named(arch))).kernels[-1]
    spec = kernel.group.lowered.spec
    assert isinstance(spec, ContractionSpec)
    return replace(spec, name=kernel.name)


def are_thin(made: Sequence[Any]) -> bool:
    return all("multiply_pieces<" in kernel.source.code for exe in made for kernel in exe.plan.kernels)


# ---- schedules


def test_every_schedule():
    cases = []
    for number, (tile, warps, pieces) in enumerate(itertools.product((16, 32, 48), (1, 2, 4, 8, 16), (1, 2, 4))):
        few, size, depth = (1, 3, 8, 9, 16)[number % 5], tile + number % 3 * 7, (256, 264, 1000, 72)[number % 4]
        cases.append(thin(few, size, depth, "bfloat16", swapped=number % 2 == 1, schedule=fixed(tile, warps, pieces)))
    assert are_thin(check_cases(cases, guard=True))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [((8, 4, 1), "multiple of 16"), ((24, 4, 1), "multiple of 16"), ((16, 3, 1), "warps"), ((16, 4, 0), "pieces")],
)
def test_schedules_that_are_none(numbers, message):
    with pytest.raises(ValueError, match=message):
        ThinSchedule(*numbers)


def test_ragged_sizes():
    sizes = [(1, 1, 8), (1, 17, 16), (2, 33, 24), (7, 16, 8), (8, 15, 136), (9, 100, 40), (15, 31, 72), (16, 16, 520)]
    cases = [thin(*each, dtype, swapped=s) for each in sizes for s, dtype in ((False, "float16"), (True, "bfloat16"))]
    assert are_thin(check_cases(cases, guard=True))


def test_what_it_is_not_for():
    def reason(graph: fg.Graph) -> str:
        with pytest.raises(Declined) as told:
            thin_paths(spec_of(graph))
        return str(told.value)

    assert "at most 16" in reason(thin(17, 40, 64, "bfloat16").graph)
    assert "along the reduction" in reason(matmul((4, 64), (64, 40), "bfloat16").graph)
    assert "whole pieces" in reason(thin(4, 40, 60, "bfloat16").graph)
    assert "tensor cores" in reason(thin(4, 40, 64, "float64").graph)
    # Past Ampere it is what such products get, and before they have no tensor cores for them.
    long = thin(4, 512, 2048, "bfloat16").graph
    assert isinstance(plan(long).kernels[0].choice.schedule, ThinSchedule)
    with pytest.raises(Declined, match="no tensor cores"):
        schedules(spec_of(long), named("sm_75"))


# ---- types


def test_types():
    pairs = [*itertools.product((*FLOATS, "int8"), repeat=2), ("uint8", "int8"), ("bool", "uint8")]
    cases = [thin(5, 24, 192, a, b, swapped=number % 2 == 1) for number, (a, b) in enumerate(pairs)]
    assert are_thin(check_cases(cases, guard=True))


def test_tf32():
    cases = []
    for second, swapped in itertools.product(("float32", "bfloat16", "float16"), (False, True)):
        cases.append(thin(6, 40, 68 if second == "float32" else 72, "float32", second, swapped=swapped, compute="tf32"))
    assert are_thin(check_cases(cases, guard=True))


def test_special_values():
    check_cases([thin(3, 40, 128, dtype, special=0.03, swapped=s) for dtype in FLOATS for s in (False, True)])


def test_the_thin_operand_lies_as_it_likes():
    cases = [
        matmul((m, 64), (64, 40), "bfloat16", a_strides=strides, b_strides=(1, 64), schedule=first)
        for m, strides in ((1, (64, 1)), (5, (1, 5)), (5, (200, 3)), (9, (0, 1)), (4, (65, 1)))
    ]
    cases += [matmul((2, 3, 64), (64, 40), "bfloat16", b_strides=(1, 64), schedule=first)]
    # Rows of the large operand with gaps, and two dimensions of a reduction that do not merge.
    cases += [matmul((5, 64), (64, 40), "float16", b_strides=(1, 80), schedule=first)]
    assert are_thin(check_cases(cases, guard=True))


def test_batches():
    shapes = [((3, 5, 64), (3, 64, 40)), ((3, 5, 64), (64, 40)), ((2, 1, 5, 16), (3, 16, 24))]
    cases = [matmul(a, b, "bfloat16", b_strides=transposed(b), schedule=first) for a, b in shapes]
    assert are_thin(check_cases(cases, guard=True))


# ---- computed operands


def weights(kind: str, few: int, size: int, depth: int) -> fg.Graph:
    """Returns a product with weights of few bits: a scale for each row, or for each group of 32 along the reduction."""
    graph = fg.Graph(kind)
    x = graph.tensor("x", (few, depth), "bfloat16")
    name, _, groups = kind.partition(" ")
    w = graph.cast(graph.tensor("w", (size, depth), name), "bfloat16")
    if groups:
        scale = graph.tensor("scale", (size, depth // 32, 1), "bfloat16")
        parts = graph.reshape(w, (size, depth // 32, 32))
        if groups == "zeros":
            parts = parts - graph.cast(graph.tensor("zero", (size, depth // 32, 1), "uint8"), "bfloat16")
        w = graph.reshape(parts * scale, (size, depth))
    else:
        w = w * graph.tensor("scale", (size, 1), "bfloat16")
    graph.output(graph.matmul(x, graph.transpose(w)), name="y")
    return graph


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3", "int8 groups", "uint8 zeros"])
def test_weights_of_few_bits(kind):
    made = check_cases(
        [Case(weights(kind, *sizes), schedule=first) for sizes in ((1, 40, 256), (5, 33, 96), (16, 16, 512))],
        guard=True,
    )
    products = [kernel for exe in made for kernel in exe.plan.kernels if kernel.group.family == "contraction"]
    assert len(products) == 3
    assert all("multiply_pieces<" in kernel.source.code for kernel in products)


def test_both_operands_computed():
    graph = fg.Graph("both")
    x = graph.relu(graph.tensor("x", (6, 96), "float16") * graph.tensor("gamma", (96,), "float16"))
    w = graph.cast(graph.tensor("w", (40, 96), "int8"), "float16") + 1.0
    graph.output(graph.matmul(x, graph.transpose(w)), name="y")
    with_rules = Case(graph, schedule=lambda spec: first(spec) if isinstance(spec, ContractionSpec) else None)
    check_cases([with_rules], guard=True)


# ---- results


@pytest.mark.parametrize("swapped", [False, True])
def test_epilogues(swapped):
    cases = [
        thin(9, 48, 64, "bfloat16", swapped=swapped, epilogue=epilogue, label=name)
        for name, epilogue in epilogues().items()
        if name != "batch"
    ]
    assert are_thin(check_cases(cases, guard=True))


def test_operands_that_share_the_thin_one():
    graph = fg.Graph("gated")
    x = graph.tensor("x", (3, 128), "bfloat16")
    gate, up = (graph.tensor(name, (40, 128), "bfloat16") for name in ("gate", "up"))
    left, right = (graph.matmul(x, graph.transpose(w)) for w in (gate, up))
    graph.output(graph.swish(left) * right, name="y")
    (made,) = check_cases([Case(graph)], guard=True)
    assert len(made.plan.kernels) == 1


def test_integers_wrap_around():
    rng = np.random.default_rng(0)
    inputs = {"a": rng.integers(-128, 128, (9, 336)).astype(np.int8)}
    inputs["b"] = rng.integers(-128, 128, (24, 336)).astype(np.int8).T
    cases = [thin(9, 24, 336, "int8", inputs=inputs), thin(9, 24, 336, "int8", result="uint8", inputs=inputs)]
    assert are_thin(check_cases(cases))


def test_one_kernel_for_all_sizes():
    rows, width = fg.Dim("rows", max=16), fg.Dim("width", max=4096, multiple_of=8)
    graph = fg.Graph("sizes")
    x, w = graph.tensor("x", (rows, width), "bfloat16"), graph.tensor("w", (300, width), "bfloat16")
    graph.output(graph.relu(graph.matmul(x, graph.transpose(w))), name="y")
    exe = fg.compile(graph, engine="cpu")
    rng = np.random.default_rng(1)
    for m, k in ((1, 8), (16, 4096), (7, 520), (9, 1000)):
        x, w = (rng.standard_normal(s).astype(graph.inputs[0].dtype.numpy) for s in ((m, k), (300, k)))
        expected = np.maximum(x.astype(np.float64) @ w.astype(np.float64).T, 0)
        np.testing.assert_allclose(exe(x, w).astype(np.float64), expected, rtol=1e-2, atol=2e-2 * k**0.5)


# ---- memory


def test_memory_is_asked_for_before_the_kernel_waits():
    """What goes to the L2 cache early is within the large operand; everything else is read after the wait."""
    spec = spec_of(thin(1, 2048, 2048, "bfloat16").graph)
    code = in_sequence(codegen.render(spec, first(spec)), first=False, early=True).code
    before, _, after = code.partition("grid_dependency_wait();")
    assert before.count("prefetch(") == 1
    assert UNTIL_HERE in after
    assert "load" not in before.partition("{\n")[2]
    assert before.index("grid_dependency_launch") < before.index("prefetch(")
    for size, depth in ((40, 64), (2048, 24), (100, 4096)):
        (case,) = check_cases([thin(4, size, depth, "bfloat16")], guard=True)
        assert case.plan.kernels[0].source.code.count("prefetch(") == (depth >= 64)


@pytest.mark.parametrize(
    ("inner", "count", "sizes"),
    [((64,), 8, (8,)), ((6, 2), 8, None), ((12, 2), 8, (4, 2)), ((8, 4, 2), 16, (2, 4, 2)), ((3, 5), 8, None)],
)
def test_pieces(inner, count, sizes):
    assert piece_sizes(inner, count) == sizes


def test_where_elements_of_a_piece_lie():
    rng = np.random.default_rng(2)
    for _ in range(50):
        sizes = tuple(int(n) for n in rng.choice([1, 2, 4], rng.integers(1, 4)))
        steps = tuple(int(n) for n in rng.integers(0, 9, len(sizes)))
        piece = Piece(sizes, steps)
        places = [sum(i * s for i, s in zip(at, steps)) for at in np.ndindex(sizes)]
        text = piece.offset("e").replace("/", "//")
        assert [eval(text, {"e": e}) for e in range(len(places))] == places
        assert piece.reach == max(places) + 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_no_spills(arch):
    """The fullest schedules of each kind compile without spills."""
    graphs = [thin(16, 4096, 4096, "bfloat16").graph, thin(16, 4096, 4096, "float16", swapped=True).graph]
    graphs += [weights(kind, few, 512, 1024) for kind in ("int8", "uint8 zeros") for few in (1, 16)]
    sources = []
    for number, graph in enumerate(graphs):
        spec = spec_of(graph, arch)
        every = schedules(spec, named(arch))
        largest = max(every, key=lambda s: (s.tile * s.pieces, s.warps))
        sources += [
            codegen.render(replace(spec, name=f"thin_{number}_{k}"), s) for k, s in enumerate((every[0], largest))
        ]
    for kernel in nvrtc.compile_kernels(sources, arch, cache=default_cache()):
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), kernel.name
