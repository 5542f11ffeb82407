"""Contractions on mma.sync: every tile, type, layout and epilogue on the CPU; NVRTC compiles them without spills."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graphs import leave_out_pass
from kernel_cases import Case, check_cases, executable
from test_contraction import convolution, epilogues, matmul, transposed

import codegen
import fusegraph as fg
from codegen.contraction.mma_schedule import TILES, MmaSchedule, schedules
from codegen.spec import ContractionSpec
from codegen.target import target as named
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.report.check import random_inputs

pytestmark = pytest.mark.slow

FLOATS = ("bfloat16", "float16", "float8_e4m3", "float8_e5m2")
INTEGERS = ("int8", "uint8", "bool")
Chooser = Callable[[ContractionSpec], MmaSchedule]


@pytest.fixture(autouse=True)
def as_given(monkeypatch: pytest.MonkeyPatch, contractions_in_one_piece: None) -> None:
    """Turns off copies of operands, which would give the cases another form."""
    leave_out_pass(monkeypatch, "operand layouts")


def best(arch: str = "sm_80", **wanted: Any) -> Chooser:
    """Returns the first schedule that has all the fields given."""

    def choose(spec: ContractionSpec) -> MmaSchedule:
        every = schedules(spec, named(arch))
        return next(s for s in every if all(getattr(s, name) == value for name, value in wanted.items()))

    return choose


def in_mma(cases: Sequence[Case]) -> list[Case]:
    """Returns the cases with the best schedule of this form where they have none."""
    return [replace(case, schedule=case.schedule or best("sm_90a")) for case in cases]


def spec_of(graph: fg.Graph) -> ContractionSpec:
    (kernel,) = plan(graph).kernels
    spec = kernel.group.lowered.spec
    assert isinstance(spec, ContractionSpec)
    return replace(spec, name=kernel.name)


def code(case: Case) -> str:
    (kernel,) = executable(case).plan.kernels
    return kernel.source.code


def takes_mma(made: Sequence[Any]) -> bool:
    return all("mma<" in kernel.source.code for exe in made for kernel in exe.plan.kernels)


# ---- tiles


def tiles(every: bool) -> list[Case]:
    cases = []
    for number, (rows, cols, warps_m, warps_n) in enumerate(TILES):
        for k, row_bytes in enumerate((128, 64)):
            for stages in (2, 3, 4):
                if row_bytes == 128 and warps_m * warps_n == 1:
                    continue  # too few threads
                if not every and (number + k + stages) % (6 if rows * cols <= 64 * 128 else 12):
                    continue
                s = MmaSchedule(rows, cols, row_bytes // 2, warps_m, warps_n, stages)
                over_a, over_b = divmod((number + stages) % 4 if s.threads >= max(rows, cols) else 1, 2)
                m, n, depth = (rows + 10, cols + 2, 216) if rows * cols <= 64 * 128 else (rows - 6, cols - 2, 88)
                case = matmul(
                    (m, depth),
                    (depth, n),
                    "bfloat16",
                    a_strides=transposed((m + -m % 8, depth)) if over_a else None,
                    b_strides=transposed((depth, n)) if over_b else None,
                    schedule=lambda _, s=s: s,
                    label=str(s),
                )
                cases.append(case)
    return cases


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
def test_every_tile(every):
    assert takes_mma(check_cases(tiles(every)))


@pytest.mark.parametrize(
    "sizes",
    [
        [(1, 1, 2), (7, 63, 65), (65, 129, 7), (129, 1, 63), (1, 65, 509), (63, 7, 2), (33, 32, 16), (64, 130, 8)],
        pytest.param(
            [(m, n, k + (k == 1)) for m, n, k in itertools.product((1, 7, 63, 65, 128), repeat=3)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["some", "all"],
)
def test_ragged_sizes_and_all_transpositions(sizes):
    cases = []
    for number, (m, n, k) in enumerate(sizes):
        over_a, over_b = divmod(number % 4, 2)
        a_strides = transposed((m, k)) if over_a else None
        b_strides = transposed((k, n)) if over_b else None
        dtype = ("float16", "int8")[number // 4 % 2]
        cases.append(matmul((m, k), (k, n), dtype, a_strides=a_strides, b_strides=b_strides))
    assert takes_mma(check_cases(in_mma(cases), guard=True))


def test_what_goes_through_registers_is_there_in_time():
    """Single elements of odd rows: with stages to spare they stay in registers while a stage is multiplied."""
    found = []
    for tile_k, stages in itertools.product((32, 64), (2, 3, 4)):
        s = MmaSchedule(32, 64, tile_k, 2, 2, stages)
        found.append((stages, matmul((35, 167), (167, 67), "bfloat16", schedule=lambda _, s=s: s)))
    check_cases([case for _, case in found], guard=True)
    for stages, case in found:
        assert ("stash(held)" in code(case)) == (stages > 2)


def test_rows_past_the_end_are_not_read():
    s = MmaSchedule(64, 128, 32, 2, 2, 4)
    case = matmul((40, 64), (64, 152), "bfloat16", b_strides=(1, 64), schedule=lambda _: s)
    check_cases([case], guard=True)
    made = code(case)
    assert "b_exists[i] ? 16 : 0" in made
    assert "a_exists[i] ? 16 : 0" in made


def test_split_reductions_add_up_the_blocks_of_a_cluster():
    shapes = [(70, 100, 1000, 2), (128, 64, 1024, 4), (64, 64, 777, 2)]
    cases = [
        matmul((m, k), (k, n), dtype, schedule=best("sm_90a", split_k=split_k), label=f"{m} {n} {k} {split_k} {dtype}")
        for (m, n, k, split_k), dtype in itertools.product(shapes, ("bfloat16", "int8"))
    ]
    made = check_cases(cases)
    assert takes_mma(made)
    assert [e.plan.kernels[0].source.cluster[0] for e in made] == [2, 2, 4, 4, 2, 2]
    with pytest.raises(StopIteration):  # before Hopper no blocks share a tile
        best("sm_80", split_k=2)(spec_of(cases[0].graph))


# ---- types


def layouts(a: str, b: str) -> list[Case]:
    """Returns a product in the layouts that come to shared memory in different ways."""
    cases = []
    for m, n, k in ((40, 24, 80), (19, 10, 37)):
        for over_a, over_b in itertools.product((None, transposed, "apart"), repeat=2):
            strides = []
            for over, shape in ((over_a, (m, k)), (over_b, (k, n))):
                strides.append((3 * shape[1], 3) if over == "apart" else over(shape) if over else None)  # type: ignore[operator]
            cases.append(matmul((m, k), (k, n), a, b, a_strides=strides[0], b_strides=strides[1]))
    return cases


PAIRS = [
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float8_e4m3", "float8_e5m2"),
    ("int8", "uint8"),
    ("bfloat16", "int8"),
    ("float16", "bfloat16"),
]


@pytest.mark.parametrize(
    "pairs",
    [PAIRS, pytest.param(list(itertools.product(FLOATS + INTEGERS, repeat=2)), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_types_and_layouts(pairs):
    every = [layouts(a, b) for a, b in pairs]
    cases = [
        case for n, each in enumerate(every) for case in (each[n % 6 :: 6] if len(pairs) < 10 else each[n % 5 :: 5])
    ]
    assert takes_mma(check_cases(cases, guard=len(pairs) < 10))


def test_types_with_instructions_of_their_own():
    """8-bit floats are multiplied as they are where the architecture can and may, as float16 elsewhere."""
    types, strides = ("float8_e4m3", "float8_e5m2"), {"b_strides": transposed((96, 40))}
    case = matmul((40, 96), (96, 40), *types, compute="fast_float_for_fp8", arch="sm_120", **strides)
    check_cases([case])
    assert "mma<float8_e4m3, float8_e5m2>" in code(case)
    assert "mma<float16, float16>" in code(replace(case, arch="sm_80"))
    assert "mma<float16, float16>" in code(matmul((40, 96), (96, 40), *types, arch="sm_120", **strides))
    assert "mma<uint8, int8>" in code(matmul((8, 32), (32, 8), "bool", "int8"))
    assert "mma<bfloat16, bfloat16>" in code(matmul((8, 32), (32, 8), "float8_e4m3", "bfloat16"))


def test_special_values():
    cases = [matmul((20, 70), (70, 12), dtype, special=0.03) for dtype in FLOATS]
    cases.append(convolution((2, 8, 9, 9), (8, 8, 3, 3), "float16", padding=1, case={"special": 0.01}))
    check_cases(cases)


def tf32(m: int, n: int, k: int, second: str = "float32", **strides: Any) -> fg.Graph:
    graph = fg.Graph("product", compute_dtype="tf32")
    x = graph.tensor("a", (m, k), "float32", strides=strides.get("a"))
    y = graph.matmul(x, graph.tensor("b", (k, n), second, strides=strides.get("b")))
    graph.output(graph.relu(y), name="y")
    return graph


def test_tf32():
    graphs = [
        tf32(40, 24, 36),
        tf32(40, 24, 36, a=(1, 40), b=(1, 36)),
        tf32(19, 10, 37),
        tf32(19, 10, 37, a=(111, 3), b=(1, 37)),
        tf32(19, 24, 32, "bfloat16"),
        tf32(19, 24, 32, "float16", b=(1, 32)),
    ]
    made = check_cases(in_mma([Case(g, "contraction") for g in graphs]), guard=True)
    assert takes_mma(made)
    assert all("round_to_tf32(a_part" in e.plan.kernels[0].source.code for e in made)
    # What is exact in tf32 is not rounded.
    assert "round_to_tf32(b_part" not in made[4].plan.kernels[0].source.code
    image = fg.Graph("image", compute_dtype="tf32")
    x = image.tensor("x", (2, 6, 9, 8), "float32", layout="channels_last")
    image.output(image.conv_fprop(x, image.tensor("w", (8, 6, 3, 3), "float32"), padding=1), name="y")
    assert takes_mma(check_cases([Case(image, "contraction")], guard=True))


# ---- addresses


def test_batches_broadcasts_and_gaps():
    shapes = [
        ((3, 20, 40), (3, 40, 24)),
        ((3, 20, 40), (40, 24)),
        ((20, 40), (3, 40, 24)),
        ((2, 1, 5, 7), (3, 7, 9)),
        ((2, 3, 2, 5, 8), (3, 1, 8, 16)),
        ((2, 3, 20, 16), (2, 1, 16, 8)),
    ]
    cases = [matmul(a, b, "bfloat16") for a, b in shapes]
    cases += [matmul(a, b, "float16", a_strides=transposed(a), b_strides=transposed(b)) for a, b in shapes[:4]]
    # A batch whose elements repeat in memory, rows with gaps, and rows so far apart that copies stay aligned.
    cases += [matmul((3, 5, 7), (3, 7, 9), "bfloat16", a_strides=(0, 7, 1), b_strides=(200, 20, 2))]
    cases += [matmul((30, 40), (40, 24), "bfloat16", a_strides=(48, 1), b_strides=(32, 1))]
    cases += [matmul((30, 40), (40, 24), "bfloat16", a_strides=(44, 1), b_strides=(26, 1))]
    assert takes_mma(check_cases(in_mma(cases), guard=True))


def test_copies_are_as_wide_as_addresses_allow():
    def copies(a: tuple[int, ...], dtype: str = "bfloat16", alignment: int = 16, **case: Any) -> set[str]:
        made = code(matmul((64, 64), (64, 64), dtype, a_strides=a, options=Options(alignment=alignment), **case))
        return {
            text.split("(")[0] for text in made.split() if text.startswith(("copy_async<", "load<", "load_packed<"))
        }

    assert copies((64, 1)) == {"copy_async<16>"}
    assert copies((68, 1)) == {"copy_async<16>", "copy_async<8>"}
    assert copies((66, 1)) == {"copy_async<16>", "copy_async<4>"}
    assert copies((65, 1)) == {"copy_async<16>", "load<1>"}
    assert copies((1, 66)) == {"copy_async<16>", "copy_async<4>"}
    assert copies((64, 1), alignment=4) == {"copy_async<4>"}
    assert copies((64, 1), alignment=1) == {"load<1>"}
    assert copies((64, 1), "int8", b_strides=(1, 64)) == {"copy_async<16>"}
    assert copies((64, 1), second="int8") == {"copy_async<16>", "load_packed<8>"}
    cases = [
        matmul((20, 64), (64, 24), "bfloat16", a_strides=(step, 1), b_strides=(step, 1), options=Options(alignment=n))
        for step, n in ((68, 16), (66, 16), (65, 16), (64, 8), (64, 1))
    ]
    check_cases(cases, guard=True)


def test_far_apart():
    """Offsets beyond 32 bits, for real: what lies in between is never touched."""
    far = 2**31 + 8
    graph = fg.Graph("far")
    x = graph.tensor("a", (2, 16, 32), "bfloat16", strides=(far, 32, 1))
    graph.output(x @ graph.tensor("b", (2, 32, 16), "bfloat16"), name="y")
    source = code(Case(graph, "contraction"))
    assert "int64 a_base" in source
    case = Case(graph, "contraction")
    base = np.zeros(far + 16 * 32, np.uint16)  # untouched pages cost nothing
    given = random_inputs(replace_strides(graph), 0)
    a = np.lib.stride_tricks.as_strided(base, (2, 16, 32), (far * 2, 64, 2))
    a[...] = given["a"].view(np.uint16)
    exe = executable(case)
    result = exe(a.view(given["a"].dtype), given["b"]).astype(np.float64)
    expected = given["a"].astype(np.float64) @ given["b"].astype(np.float64)
    np.testing.assert_allclose(result, expected, rtol=1e-2, atol=1e-1)


def replace_strides(graph: fg.Graph) -> fg.Graph:
    """Returns the same inputs, packed."""
    packed = fg.Graph("packed")
    for tensor in graph.inputs:
        packed.tensor(tensor.name, tensor.shape, tensor.dtype)
    packed.output(packed.inputs[0] @ packed.inputs[1], name="y")
    return packed


# ---- convolutions


def convolutions() -> list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]]:
    return [
        ((2, 16, 9, 11), (24, 16, 3, 3), {"padding": 1}),
        ((1, 3, 17, 17), (16, 3, 3, 3), {"padding": 1}),
        ((1, 5, 12, 9), (7, 5, 3, 2), {"padding": ((0, 2), (1, 0)), "stride": (2, 1), "dilation": (1, 2)}),
        ((1, 64, 6, 6), (16, 64, 3, 3), {"padding": 1, "mode": "convolution"}),
        ((2, 16, 8, 8), (12, 16, 1, 1), {"stride": 2}),
        ((1, 24, 7, 7), (18, 8, 3, 3), {"padding": 1, "groups": 3}),
        ((2, 10, 9, 9), (6, 5, 3, 3), {"groups": 2, "padding": 2, "dilation": 2}),
        ((2, 8, 40), (9, 8, 5), {"padding": 2, "stride": 3}),
        ((1, 12, 5, 6, 7), (10, 12, 3, 1, 3), {"padding": 1}),
        ((1, 8, 4, 4), (8, 8, 3, 3), {"padding": 3, "dilation": 3}),
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("int8", marks=pytest.mark.slow), "float8_e5m2"])
def test_convolutions(dtype):
    cases = []
    for number, (x, w, attributes) in enumerate(convolutions()):
        for layout, filters in itertools.product(("contiguous", "channels_last"), repeat=2):
            if (number + (layout == filters)) % (2 if dtype == "bfloat16" else 3) == 0:
                cases.append(convolution(x, w, dtype, layout=layout, filters=filters, **attributes))
    assert takes_mma(check_cases(in_mma(cases), guard=dtype != "bfloat16"))


@pytest.mark.usefixtures("tiled_gradients")
def test_gradients_of_convolutions():
    cases = []
    for number, (layout, stride, groups) in enumerate(
        [("channels_last", 1, 1), ("contiguous", 1, 2), ("channels_last", 2, 1), ("contiguous", 3, 1)]
    ):
        for op in ("conv_dgrad", "conv_wgrad"):
            graph = fg.Graph(op)
            size, taps, padding = 11, 3, 1
            out = (size + 2 * padding - taps) // stride + 1
            loss = graph.tensor("loss", (2, 8 * groups, out, out), "bfloat16", layout=layout)
            attributes = {"stride": stride, "padding": padding, "groups": groups}
            if op == "conv_dgrad":
                w = graph.tensor("w", (8 * groups, 6, taps, taps), "bfloat16", layout=layout)
                y = graph.conv_dgrad(loss, w, size=(size, size), **attributes)
            else:
                x = graph.tensor("x", (2, 6 * groups, size, size), "bfloat16", layout=layout)
                y = graph.conv_wgrad(x, loss, taps=(taps, taps), **attributes)
            graph.output(graph.relu(y), name="y")
            cases.append(Case(graph, "contraction", label=f"{op} {number}"))
    assert takes_mma(check_cases(cases, guard=True))


# ---- results


@pytest.mark.parametrize("staged", [True, False])
def test_epilogues(staged):
    """Through shared memory by rows and by columns, and straight from registers."""
    wanted = {"tile_m": 64, "tile_n": 64} if staged else {"tile_m": 16, "tile_n": 32}
    cases = []
    for number, (name, epilogue) in enumerate(epilogues().items()):
        for a, b in (((40, 16), (16, 48)), ((2, 33, 8), (2, 8, 35))):
            if (a == (40, 16) or name in ("batch", "several", "backwards", "gaps", "indexed")) and (
                len(a) == 3 or name != "batch"
            ):
                s = best(stages=2, tile_k=64 if number % 2 else 32, **wanted)
                cases.append(matmul(a, b, "bfloat16", epilogue=epilogue, schedule=s, label=f"{name} {a} {wanted}"))
    made = check_cases(cases, guard=True)
    assert takes_mma(made)
    assert all(("auto& staged" in e.plan.kernels[0].source.code) == staged for e in made)


def test_results_of_columns_are_staged_by_columns():
    made = check_cases(
        [
            convolution((1, 32, 8, 16), (64, 32, 1, 1), "bfloat16", case={"schedule": best(tile_m=64, tile_n=64)}),
            convolution(
                (2, 16, 5, 5), (64, 16, 3, 3), "float16", padding=1, case={"schedule": best(tile_m=64, tile_n=64)}
            ),
        ],
        guard=True,
    )
    wide, narrow = (e.plan.kernels[0].source.code for e in made)
    assert "staged[col + e][row]" in wide
    assert "load_shared<8>" in wide
    assert "store(y + " in wide
    assert "staged[col + e][row]" in narrow
    assert "load_shared<" not in narrow


def test_integers_wrap_around_and_strict_rounds():
    rng = np.random.default_rng(0)
    inputs = {n: rng.integers(-128, 128, s).astype(np.int8) for n, s in (("a", (9, 333)), ("b", (333, 5)))}
    check_cases(
        [
            matmul((9, 333), (333, 5), "int8", inputs=inputs),
            matmul((9, 333), (333, 5), "int8", result="uint8", inputs=inputs),
            matmul((9, 33), (33, 5), "bfloat16", epilogue=epilogues()["reused"], options=Options(strict=True)),
        ]
    )


def test_random_problems_and_schedules():
    check_cases(drawn(range(8)), guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 1120, 40))
def test_more_random_problems_and_schedules(start):
    check_cases(drawn(range(start, start + 40)), guard=True)


def drawn(seeds: Sequence[int]) -> list[Case]:
    """Returns convolutions with any of their schedules."""
    cases = []
    for seed in seeds:
        r = random.Random(seed)
        rank, groups = r.choice([1, 2, 2, 3]), r.choice([1, 1, 2])
        channels, filters = r.choice([3, 8, 16, 20]), r.choice([4, 9, 24])
        size = [r.choice([4, 5, 8, 13] if rank < 3 else [3, 5]) for _ in range(rank)]
        taps = [r.choice([1, 2, 3]) for _ in range(rank)]

        def choose(spec: Any, r: random.Random = r) -> codegen.Schedule:
            if not isinstance(spec, ContractionSpec):
                return codegen.best_schedule(spec)
            every = schedules(spec, named(r.choice(["sm_80", "sm_90a"])))
            return r.choice([s for s in every if s.tile_m * s.tile_n <= 64 * 64])

        cases.append(
            convolution(
                (r.choice([1, 2]), groups * channels, *size),
                (groups * filters, channels, *taps),
                r.choice(FLOATS + INTEGERS),
                r.choice(FLOATS + INTEGERS),
                layout=r.choice(["contiguous", "channels_last"]),
                filters=r.choice(["contiguous", "channels_last"]),
                padding=r.choice([0, 1, 2]),
                stride=r.choice([1, 1, 2]),
                groups=groups,
                case={"schedule": choose, "label": f"seed {seed}"},
            )
        )
    return [replace(case, family=None) for case in cases]  # some are direct convolutions
