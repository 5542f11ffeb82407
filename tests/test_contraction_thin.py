"""Products of a large operand and a thin one: every tile, type, layout and epilogue on the CPU; NVRTC compiles them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graphs import check_on_gpu, leave_out_pass, share
from kernel_cases import Case, check_cases, executable
from test_contraction import epilogues, matmul, transposed

import codegen
import fusegraph as fg
from codegen.codes import HALVES, codes
from codegen.contraction.thin_pieces import Piece, piece_sizes, thin_paths
from codegen.contraction.thin_schedule import ThinSchedule, schedules
from codegen.declined import Declined
from codegen.expr import Index, Instruction, Literal, Load, Operand, Program, Result, Store
from codegen.kernel import UNTIL_HERE, in_sequence
from codegen.spec import ContractionSpec
from codegen.target import target as named
from fusegraph import dtypes as dt
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


@pytest.mark.slow
def test_every_schedule():
    cases = []
    for number, (tile, warps, pieces) in enumerate(itertools.product((16, 32, 48), (1, 2, 4, 8, 16), (1, 2, 4, 8))):
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


def test_pieces_that_do_not_exist_have_no_branches():
    """Loads behind branches would wait for each other; elements that are computed are not for nothing."""
    case = thin(1, 48, 1056, "bfloat16", schedule=fixed(16, 4, 4))
    check_cases([case], guard=True)
    source = executable(case).plan.kernels[0].source.code
    assert "inside ? load" in source
    assert "if (k + c *" not in source


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


@pytest.mark.slow
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


def weights(kind: str, few: int, size: int, depth: int, dtype: str = "bfloat16") -> fg.Graph:
    """Returns a product with weights of few bits: a scale for each row, or for each group of 32 along the reduction."""
    graph = fg.Graph(kind)
    x = graph.tensor("x", (few, depth), dtype)
    name, _, groups = kind.partition(" ")
    w = graph.cast(graph.tensor("w", (size, depth), name), dtype)
    if groups:
        scale = graph.tensor("scale", (size, depth // 32, 1), dtype)
        parts = graph.reshape(w, (size, depth // 32, 32))
        if groups == "zeros":
            parts = parts - graph.cast(graph.tensor("zero", (size, depth // 32, 1), "uint8"), dtype)
        w = graph.reshape(parts * scale, (size, depth))
    else:
        w = w * graph.tensor("scale", (size, 1), dtype)
    graph.output(graph.matmul(x, graph.transpose(w)), name="y")
    return graph


KINDS = ("int8", "uint8 zeros", "int4 groups", "float4_e2m1 groups")
MORE = ("uint8", "float8_e4m3", "float8_e5m2", "int8 groups", "float8_e4m3 groups", "int4", "uint4", "uint4 zeros")
FEW = ((1, 40, 256), (5, 33, 96), (16, 16, 512))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_weights_of_few_bits(kind, dtype):
    made = check_cases([Case(weights(kind, *sizes, dtype), schedule=first) for sizes in FEW], guard=True)
    products = [kernel for exe in made for kernel in exe.plan.kernels if kernel.group.family == "contraction"]
    assert len(products) == 3
    assert all("multiply_pieces<" in kernel.source.code for kernel in products)
    assert all("decoded<" in kernel.source.code for kernel in products)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_weights_of_few_bits_on_a_gpu(kind):
    sizes = (*FEW, (3, 64, 2048), (8, 4096, 1024))
    check_on_gpu([weights(kind, *each, dtype) for each in sizes for dtype in ("bfloat16", "float16")])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_code(dtype):
    cases = []
    for kind in (dt.int8, dt.uint8, dt.float8_e4m3, dt.float8_e5m2):
        graph = fg.Graph(kind.name)
        x, w = graph.tensor("x", (16, 256), dtype), graph.tensor("w", (16, 256), kind)
        graph.output(graph.matmul(x, graph.transpose(graph.cast(w, dtype) * 1.5)), name="y")
        bits = np.tile(np.arange(256, dtype=np.uint8), (16, 1))
        one = np.zeros((16, 256))
        for row in range(16):  # one product for each code: NaN is not added to others
            bits[row] = np.where(np.arange(256) % 16 == row, bits[row], 0)
            one[row, np.arange(256) // 16 == row] = 1
        given = {"w": bits.view(kind.numpy), "x": one.astype(dt.BY_NAME[dtype].numpy)}
        cases.append(Case(graph, schedule=first, inputs=given))
    check_cases(cases)


def four_bits(kind: dt.DType, bits: Any) -> Any:
    """Returns codes of 4 bits with the lower bits of some integers."""
    codes = (bits % 16).astype(np.uint8)
    if kind.name == "int4":
        return ((codes ^ 8).astype(np.int8) - 8).astype(kind.numpy)
    return codes.view(kind.numpy) if kind.is_float else codes.astype(kind.numpy)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("offset", [0, 8, -3, 121])
def test_every_code_of_four_bits(dtype, offset):
    """Every code at every place in a word: each product has one term."""
    cases = []
    for kind in (dt.int4, dt.uint4, dt.float4_e2m1):
        graph = fg.Graph(f"{kind.name} and {offset}")
        x, w = graph.tensor("x", (16, 512), dtype), graph.tensor("w", (32, 512), kind)
        numbers = graph.cast(w, dtype)
        numbers = (numbers + float(offset) if offset and not kind.is_float else numbers) * 1.5
        graph.output(graph.matmul(x, graph.transpose(numbers)), name="y")
        rows = np.arange(16)
        one = np.zeros((16, 512))
        one[rows, 34 * rows + rows // 8] = 1  # every place in a word
        given = {"w": four_bits(kind, np.add.outer(np.arange(32), np.arange(512)))}
        given["x"] = one.astype(dt.BY_NAME[dtype].numpy)
        cases.append(Case(graph, schedule=first, inputs=given))
    check_cases(cases)


@pytest.mark.slow
def test_the_order_of_terms():
    """Whatever else is read for a term comes in the order of the codes: sums of small integers are exact."""
    rng = np.random.default_rng(5)

    def case(kind: str, depth: int, few: int, change: Callable[[fg.Graph, Any, Any], tuple[Any, Any]]) -> Case:
        graph = fg.Graph(f"{kind} {depth} {few}")
        x, w = graph.tensor("x", (few, depth), "bfloat16"), graph.tensor("w", (24, depth), kind)
        x, w = change(graph, x, graph.cast(w, "bfloat16"))
        graph.output(graph.matmul(x, graph.transpose(w), dtype="float32"), name="y")
        given = {}
        for t in graph.inputs:
            numbers = rng.integers(0 if t.dtype.name == "uint8" else -3, 4, t.shape)
            few_bits = t.dtype.name in HALVES
            given[t.name] = four_bits(t.dtype, numbers) if few_bits else numbers.astype(t.dtype.numpy)
        return Case(
            graph, schedule=lambda spec: first(spec) if isinstance(spec, ContractionSpec) else None, inputs=given
        )

    def groups(size: int, scale: str = "bfloat16", zero: str = "") -> Callable[[fg.Graph, Any, Any], tuple[Any, Any]]:
        def change(graph: fg.Graph, x: Any, w: Any) -> tuple[Any, Any]:
            shape = (24, w.shape[1] // size, 1)
            parts = graph.reshape(w, (24, w.shape[1] // size, size))
            if zero:
                parts = parts - graph.cast(graph.tensor("zero", shape, zero), "bfloat16")
            parts = parts * graph.cast(graph.tensor("scale", shape, scale), "bfloat16")
            return x, graph.reshape(parts, w.shape)

        return change

    def each_term(dtype: str) -> Callable[[fg.Graph, Any, Any], tuple[Any, Any]]:
        return lambda graph, x, w: (x, w * graph.cast(graph.tensor("along", (w.shape[1],), dtype), "bfloat16"))

    def computed(graph: fg.Graph, x: Any, w: Any) -> tuple[Any, Any]:
        return graph.cast(graph.cast(x, "float32") * graph.tensor("gamma", (w.shape[1],), "float32"), "bfloat16"), w

    cases = [case(kind, 160, 3, groups(size)) for kind in HALVES for size in (4, 8, 16, 32)]
    cases += [case("float4_e2m1", 192, 1, groups(16, "float8_e4m3")), case("uint4", 96, 9, groups(16, zero="int8"))]
    cases += [case("int4", 64, 16, groups(64, zero="int8")), case("int4", 288, 2, groups(8, zero="int8"))]
    cases += [case("int4", 160, 5, each_term(dtype)) for dtype in ("bfloat16", "int8", "float8_e4m3")]
    cases += [case("uint4", 224, 4, computed), case("int8", 80, 4, groups(8)), case("uint8", 80, 4, each_term("int8"))]
    made = check_cases(cases, guard=True)
    assert are_thin([exe for exe in made if len(exe.plan.kernels) == 1])
    code = "".join(kernel.source.code for exe in made for kernel in exe.plan.kernels)
    for kind in ("Int4Codes", "Uint4Codes", "Float4Codes", "Int8Codes", "Float8Codes<float8_e4m3>"):
        assert f"decoded<bfloat16, {kind}, 4" in code


def test_codes_are_told_by_their_numbers():
    """However a program takes a byte apart, its numbers say what the codes are; others are computed in float."""

    def program(instructions: Sequence[tuple[str, tuple[Any, ...], str]], loads: int = 1) -> Program:
        made = tuple(Instruction(f"i{n}", *each) for n, each in enumerate(instructions))
        ops = tuple(Operand(f"w{n}", dt.uint8, (1,)) for n in range(loads))
        store = Store(Operand("y", dt.bfloat16, (1,)), Result(len(made) - 1))
        return Program(ops, instructions=made, stores=(store,))

    def seen(instructions: Sequence[tuple[str, tuple[Any, ...], str]], place: Any) -> dict[str, int]:
        elements = {Load(0): np.asarray(place), Index(0): np.arange(len(place)) % 2}
        return {c.kind: c.offset for c in codes(program(instructions), elements).values()}

    each, twice = range(8), np.arange(8) // 2
    number = ("convert<float>({0})", (Load(0),), "float")
    assert seen([number], each) == {"uint8": 0}
    assert seen([number, ("{0} - {1}", (Result(0), Literal(128.0, "float")), "float")], each) == {"uint8": -128}
    signed = ("convert<int8>({0})", (Load(0),), "int8")
    assert seen([signed, ("convert<float>({0})", (Result(0),), "float")], each) == {}  # 128 and more are no int8
    half = [("{0} & {1}", (Load(0), Literal(15, "uint8")), "uint8"), ("convert<float>({0})", (Result(0),), "float")]
    assert seen(half, twice) == {}  # always the lower half
    shifted = [
        ("{0} * {1}", (Index(0), Literal(4, "int32")), "int32"),
        ("math::shift_right({0}, {1})", (Load(0), Result(0)), "int32"),
        ("{0} & {1}", (Result(1), Literal(15, "int32")), "int32"),
        ("convert<float>({0})", (Result(2),), "float"),
        ("{0} - {1}", (Result(3), Literal(8.0, "float")), "float"),
    ]
    assert seen(shifted, twice) == {"uint4": -8}
    assert seen([number, ("math::sqrt({0})", (Result(0),), "float")], each) == {"uint8": 0}
    assert seen([number, ("{0} * {1}", (Result(0), Literal(0.5, "float")), "float")], each) == {}


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


@pytest.mark.slow
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
    # The next kernel would only be in the way before this one has read its operands.
    assert after.index("grid_dependency_launch") > after.index("multiply_pieces")
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


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_no_spills(arch):
    """The fullest schedules of each kind compile without spills."""
    graphs = [thin(16, 4096, 4096, "bfloat16").graph, thin(16, 4096, 4096, "float16", swapped=True).graph]
    kinds = ("int8", "uint8 zeros", "int4 groups", "float8_e4m3")
    graphs += share(arch, [weights(kind, few, 512, 1024) for kind in kinds for few in (1, 16)])
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
