"""The Hopper form of the contraction family: its kernels run on the CPU, wgmma, TMA and clusters included."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kernel_cases import Case, check_cases, executable
from test_contraction import convolution, matmul, plain, transposed

import fusegraph as fg
from codegen import render, schedules, target
from codegen.contraction import wgmma_schedule as contraction_wgmma_schedule
from codegen.contraction.wgmma_layout import Layout, WgmmaSchedule
from codegen.declined import Declined
from codegen.tiles import gathered, operand_tiles
from fusegraph.lowering.base import Options
from fusegraph.plan import by_cost_model, plan
from fusegraph.runtime import nvrtc

HOPPER = target("sm_90a")
Pick = Callable[[WgmmaSchedule], bool]


def hopper(case: Case, pick: Pick | None = None, pick_any: random.Random | None = None, **fields: Any) -> Case:
    """Returns the case with the first wgmma schedule that a predicate accepts, or a random one, with some fields
    changed.
    """

    def schedule(spec: Any) -> WgmmaSchedule:
        every = contraction_wgmma_schedule.schedules(spec, HOPPER)
        fitting = [s for s in every if pick is None or pick(s)]
        assert fitting, f"none of {every[:4]}"
        return replace(pick_any.choice(fitting) if pick_any else fitting[0], **fields)

    return replace(case, schedule=schedule, arch="sm_90a")


def shape(groups: int = 0, cols: int = 0, split_k: int = 0, gather: bool | None = None) -> Pick:
    """Returns a predicate for schedules with the given fields (0 and None: any)."""
    return lambda s: (
        groups in (0, s.groups) and cols in (0, s.tile_n) and split_k in (0, s.split_k) and gather in (None, s.gather)
    )


def in_pingpong(cols: int = 0) -> Pick:
    """Returns a predicate for schedules whose consumers can also run in ping-pong."""
    return lambda s: s.groups == 2 and s.split_k == 1 and not s.gather and s.tile_n <= 160 and cols in (0, s.tile_n)


def bias(graph: fg.Graph, y: fg.Tensor) -> None:
    graph.output(graph.relu(y + graph.tensor("bias", (y.shape[-1],))), name="y")


def channel_bias(graph: fg.Graph, y: fg.Tensor) -> None:
    b = graph.tensor("bias", (1, y.shape[1], *(1 for _ in y.shape[2:])), y.dtype)
    graph.output(graph.relu(y + b), name="y")


def image(x: tuple[int, ...], w: tuple[int, ...], dtype: Any = "bfloat16", second: Any = None, **more: Any) -> Case:
    """Returns a convolution with both operands in channels last."""
    return convolution(x, w, dtype, second, layout="channels_last", filters="channels_last", **more)


def everything(graph: fg.Graph, y: fg.Tensor) -> None:
    """An epilogue with outputs of several dtypes, operands broadcast along every axis, and an index."""
    full = graph.tensor("full", y.shape, y.dtype)
    column = graph.tensor("column", (*y.shape[:-1], 1), "float32")
    row = graph.tensor("row", (y.shape[-1],), "bfloat16")
    scalar = graph.tensor("scalar", (1,), "float32")
    z = y * scalar + full * column
    graph.output(graph.gelu(z + row), name="first", dtype="float32")
    graph.output(graph.cast(graph.max(z, 0.0) + graph.gen_index(y, axis=-1), "bfloat16"), name="second")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_layouts(dtype):
    cases = []
    for a_across in (False, True):
        for b_along in (False, True):
            m, n, k = 136, 72, 80
            cases.append(
                hopper(
                    matmul(
                        (m, k),
                        (k, n),
                        dtype,
                        a_strides=transposed((m, k)) if a_across else None,
                        b_strides=transposed((k, n)) if b_along else None,
                        epilogue=bias,
                    )
                )
            )
    check_cases(cases)


@pytest.mark.slow
def test_ragged():
    cases = []
    for m, n, k in ((1, 8, 8), (7, 16, 24), (63, 24, 72), (65, 136, 64), (130, 200, 264), (200, 40, 520)):
        cases.append(hopper(matmul((m, k), (k, n), "bfloat16", epilogue=bias)))
    for m, n, k in ((65, 7, 64), (64, 33, 72), (70, 9, 16)):  # rows of the result that no tensor map describes
        cases.append(hopper(matmul((m, k), (k, n), "float16", b_strides=(1, k), epilogue=bias)))
    check_cases(cases, guard=True)


@pytest.mark.slow
def test_tiles():
    cases = []
    for groups in (1, 2, 3):
        for cols in (16, 32, 64, 96, 128, 192, 256):
            if groups == 3 and cols == 256:
                continue
            product = matmul((groups * 64 + 8, 72), (72, cols * 2 - 8), "bfloat16", b_strides=(1, 72), epilogue=bias)
            cases.append(hopper(product, shape(groups, cols)))
    for cols in (16, 32, 96, 160):  # in panels that are narrower than 128 bytes
        product = matmul((72, 72), (72, cols * 2 - 8), "bfloat16", epilogue=bias)
        cases.append(hopper(product, shape(1, cols)))
    check_cases(cases)


@pytest.mark.slow
def test_blocks_go_through_several_tiles():
    """The ring and the buffers of results go on from tile to tile."""
    cases = [
        hopper(matmul((64 * groups * 5 + 8, k), (k, 200), "bfloat16", epilogue=bias), shape(groups, 64), blocks=3)
        for groups in (1, 2, 3)
        for k in (64, 200)
    ]
    cases.append(hopper(image((3, 64, 14, 14), (128, 64, 1, 1), epilogue=channel_bias), shape(2, 128), blocks=1))
    cases.append(
        hopper(
            image((3, 8, 14, 14), (64, 8, 5, 5), padding=2, epilogue=channel_bias),
            shape(1, 64, gather=True),
            blocks=2,
        )
    )
    check_cases(cases)


def test_sums_of_a_cluster_fit_its_ring():
    """They would else lie where results of the blocks that are done with theirs are."""

    def three(graph: fg.Graph, y: fg.Tensor) -> None:
        for n in range(3):
            graph.output(y * float(n + 2), name=f"y{n}")

    made = plan(matmul((256, 8192), (8192, 256), "bfloat16", epilogue=three).graph, choose=by_cost_model(HOPPER))
    spec = next(k for k in made.kernels if k.group.family == "contraction").group.lowered.spec
    shared = [s for s in contraction_wgmma_schedule.schedules(spec, HOPPER) if s.split_k > 1]
    assert shared
    for s in shared:
        ring = Layout(spec, s.operand_tiles(spec), s).ring
        assert s.tile_m * s.tile_n * spec.products * 4 <= s.stages * ring.stage_bytes


@pytest.mark.slow
def test_consumers_take_turns():
    """Each multiplies while the other runs the epilogue; the last turns may have no tile."""
    pingpong: dict[str, Any] = {"pingpong": True}
    ragged = matmul((300, 200), (200, 200), "bfloat16", epilogue=everything)
    cases = [hopper(ragged, in_pingpong(64), blocks=blocks, **pingpong) for blocks in (1, 3, 11, 12)]
    cases += [
        hopper(matmul((520, k), (k, 72), "float16", epilogue=bias), in_pingpong(), blocks=2, **pingpong)
        for k in (8, 64)
    ]
    cases += [
        hopper(case, in_pingpong(), blocks=blocks, **pingpong)
        for case, blocks in (
            (matmul((264, 72), (72, 136), "bfloat16", a_strides=(1, 264), b_strides=(1, 72), epilogue=bias), 2),
            (matmul((3, 136, 72), (3, 72, 40), "bfloat16"), 2),
            (matmul((200, 80), (80, 33), "float16", b_strides=(1, 80), epilogue=bias), 1),
            (image((3, 64, 14, 14), (72, 64, 3, 3), padding=1, epilogue=channel_bias), 2),
            (image((2, 64, 15, 15), (40, 64, 3, 3), stride=2, epilogue=nchw), 1),
            (dgrad((2, 40, 12, 11), 64, (3, 3), padding=1), 1),
            (wgrad((2, 64, 12, 11), 40, (3, 3), "channels_last", padding=1), 2),
            (matmul((300, 96), (96, 48), "int8", b_strides=(1, 96)), 1),
        )
    ]
    check_cases(cases, guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("split_k", [2, 3, 5, 8])
def test_clusters_share_the_reduction(split_k):
    deep = matmul((100, 64 * 4 * split_k + 24), (64 * 4 * split_k + 24, 128), "bfloat16", epilogue=bias)
    filtered = image((2, 64, 9, 9), (128, 64, 3, 3), padding=1, epilogue=channel_bias)
    cases = [hopper(deep, shape(split_k=split_k))]
    if split_k == 2:
        cases += [hopper(filtered, shape(split_k=split_k)), hopper(deep, shape(split_k=split_k, groups=1))]
    check_cases(cases)


@pytest.mark.slow
def test_batches():
    cases = [
        matmul((3, 70, 64), (3, 64, 48), "bfloat16"),
        matmul((2, 3, 40, 64), (1, 3, 64, 48), "bfloat16"),
        matmul((2, 3, 40, 64), (64, 48), "bfloat16"),
        matmul((2, 40, 64), (64, 48), "bfloat16", a_strides=(64, 256, 1)),
        matmul((64, 64), (5, 64, 48), "float16"),
        matmul((2, 3, 40, 64), (2, 3, 64, 48), "bfloat16", a_strides=(64 * 120, 64, 3 * 64, 1)),
    ]
    check_cases([hopper(case) for case in cases])


@pytest.mark.slow
def test_epilogues():
    cases = [
        matmul((130, 72), (72, 144), "bfloat16", epilogue=everything),
        matmul((130, 72), (72, 144), "bfloat16", epilogue=everything, options=Options(strict=True)),
        matmul((2, 70, 72), (2, 72, 40), "float16", epilogue=everything),
        matmul((66, 72), (72, 144), "bfloat16", result="float32", epilogue=plain),
        convolution(
            (2, 64, 10, 11),
            (40, 64, 3, 3),
            "bfloat16",
            layout="channels_last",
            filters="channels_last",
            padding=1,
            epilogue=nchw,
        ),
    ]
    check_cases([hopper(case) for case in cases])


def nchw(graph: fg.Graph, y: fg.Tensor) -> None:
    """One output as the convolution lies, another with its columns the other way round."""
    graph.output(graph.identity(y, dtype="float32"), name="y", layout="contiguous")


def dgrad(shape: tuple[int, ...], filters: int, taps: tuple[int, ...], **attributes: Any) -> Case:
    graph = fg.Graph("dgrad", io_dtype="bfloat16")
    forward = fg.Graph("forward")
    weights = (filters, shape[1] // attributes.get("groups", 1), *taps)
    y = forward.conv_fprop(forward.tensor("x", shape), forward.tensor("w", weights), **attributes)
    loss = graph.tensor("loss", y.shape, layout="channels_last")
    w = graph.tensor("w", weights, layout="channels_last")
    graph.output(graph.relu(graph.conv_dgrad(loss, w, size=shape[2:], **attributes)), name="dx", layout="channels_last")
    return Case(graph, "contraction")


def wgrad(shape: tuple[int, ...], filters: int, taps: tuple[int, ...], layout: str, **attributes: Any) -> Case:
    graph = fg.Graph("wgrad", io_dtype="bfloat16")
    forward = fg.Graph("forward")
    weights = (filters, shape[1] // attributes.get("groups", 1), *taps)
    y = forward.conv_fprop(forward.tensor("x", shape), forward.tensor("w", weights), **attributes)
    x = graph.tensor("x", shape, layout="channels_last")
    loss = graph.tensor("loss", y.shape, layout="channels_last")
    graph.output(graph.conv_wgrad(x, loss, taps, **attributes) * 2.0, name="dw", layout=layout)
    return Case(graph, "contraction")


@pytest.mark.slow
def test_backward_to_the_image():
    cases = [
        dgrad((2, 40, 12, 11), 64, (3, 3), padding=1),
        dgrad((1, 64, 9, 9), 32, (1, 1)),
        dgrad((2, 24, 10, 10), 24, (5, 5), padding=2),
        dgrad((1, 16, 13, 12), 64, (3, 3), padding=((0, 1), (2, 0)), dilation=2),
        dgrad((2, 32, 30), 64, (3,), padding=4),
        dgrad((1, 128, 8, 8), 128, (3, 3), padding=1, groups=2),
    ]
    check_cases(hopper(case) for case in cases)


@pytest.mark.slow
def test_backward_to_the_filter():
    cases = [
        wgrad((2, 64, 12, 11), 40, (3, 3), "channels_last", padding=1),
        wgrad((2, 128, 9, 9), 64, (3, 3), "channels_last", padding=1, stride=2),
        wgrad((1, 64, 8, 9), 32, (1, 1), "channels_last"),
        wgrad((1, 64, 7, 8), 24, (3, 3), "contiguous", dilation=2, padding=2),
        wgrad((2, 64, 40), 16, (5,), "channels_last", stride=3),
        wgrad((1, 128, 8, 8), 64, (3, 3), "channels_last", padding=1, groups=2),
        wgrad((8, 64, 16, 16), 64, (3, 3), "channels_last", padding=1),
    ]
    others = [hopper(cases[-1], shape(split_k=2)), hopper(cases[0], shape(groups=3))]
    check_cases([*(hopper(case) for case in cases), *others])


def test_panels_of_fewer_channels():
    """Backward to the filter, a panel of rows has channels of one tap: 64, 32 or 16."""
    narrow = (
        wgrad((2, 32, 10, 9), 40, (3, 3), "channels_last", padding=1),
        wgrad((1, 96, 9, 9), 24, (3, 2), "channels_last", padding=1, stride=2),
        wgrad((1, 16, 8, 9), 32, (5, 5), "channels_last", padding=2),
        wgrad((1, 48, 12, 8), 144, (1, 3), "contiguous", dilation=2, padding=2),
        wgrad((2, 64, 9, 9), 64, (3, 3), "channels_last", padding=1, groups=2),
    )
    cases = [hopper(case, shape(groups=1 + n % 3)) for n, case in enumerate(narrow)]
    check_cases([*cases, hopper(narrow[0], in_pingpong(), blocks=2, pingpong=True)], guard=True)


CONVOLUTIONS: list[tuple[Any, Any, dict[str, Any]]] = [
    ((2, 64, 14, 14), (64, 64, 3, 3), {"padding": 1}),
    ((2, 128, 9, 11), (40, 128, 3, 3), {"stride": 2, "padding": 1}),
    ((3, 32, 15, 12), (40, 32, 3, 3), {}),
    ((1, 64, 12, 12), (64, 64, 1, 1), {"stride": 2}),
    ((2, 64, 12, 12), (64, 64, 1, 1), {}),
    ((1, 24, 12, 10), (64, 24, 5, 5), {"padding": 2}),
    ((2, 16, 13, 13), (48, 16, 3, 3), {"padding": ((0, 2), (1, 3)), "dilation": 2}),
    ((1, 96, 9, 9), (32, 96, 3, 3), {"padding": 1, "mode": "convolution"}),
    ((2, 64, 60), (48, 64, 5), {"padding": 2, "stride": 3}),
    ((1, 32, 5, 6, 7), (40, 32, 3, 3, 3), {"padding": 1}),
    ((2, 128, 8, 8), (128, 64, 3, 3), {"padding": 1}),  # two groups
]


@pytest.mark.slow
def test_convolutions():
    check_cases(
        hopper(
            image(x, w, epilogue=channel_bias, **attributes),
            shape(gather=False),
        )
        for x, w, attributes in CONVOLUTIONS
    )


@pytest.mark.slow
def test_gathered():
    cases = [
        ((2, 8, 14, 15), (64, 8, 7, 7), {"stride": 2, "padding": 3}),
        ((1, 24, 12, 10), (40, 24, 5, 5), {"padding": 2}),
        ((2, 16, 9, 9), (32, 8, 3, 3), {"padding": 1}),  # two groups
        ((2, 8, 50), (16, 8, 5), {"dilation": 2}),
        ((1, 8, 4, 5, 6), (16, 8, 3, 3, 3), {"padding": 1}),
    ]
    check_cases(
        hopper(
            image(x, w, epilogue=channel_bias, **attributes),
            shape(groups=groups, gather=True),
        )
        for groups in (1, 3)
        for x, w, attributes in cases
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "types",
    [("float8_e4m3", "float8_e4m3"), ("float8_e4m3", "float8_e5m2"), ("int8", "int8"), ("uint8", "int8")],
    ids="-".join,
)
def test_bytes(types):
    first, second = types
    cases = [
        matmul((70, 96), (96, 48), first, second, b_strides=(1, 96)),
        convolution(
            (1, 32, 9, 9), (32, 32, 3, 3), first, second, layout="channels_last", filters="channels_last", padding=1
        ),
    ]
    fast = matmul((70, 96), (96, 48), first, second, b_strides=(1, 96), compute="fast_float_for_fp8")
    check_cases([hopper(case) for case in (*cases, fast)])


@pytest.mark.slow
def test_infinities_and_nan_stay_where_they_belong():
    """What lies beyond the channels or the rows must not leak in."""
    cases = [
        hopper(matmul((65, 72), (72, 40), "bfloat16", special=0.002)),
        hopper(
            convolution(
                (1, 24, 9, 9),
                (32, 24, 3, 3),
                "bfloat16",
                layout="NHWC",
                filters="NHWC",
                padding=1,
                case={"special": 0.0005},
            ),
            shape(gather=False),
        ),
    ]
    check_cases(cases)


def anything(r: random.Random) -> Case:
    """Returns a random problem that wgmma takes, with a random schedule."""
    kind, eight = r.choice(["matmul", "image", "image", "dgrad", "wgrad"]), lambda most: 8 * r.randint(1, most)
    dtype, then = r.choice(["bfloat16", "float16"]), r.choice([plain, channel_bias])
    taps, dilation = r.choice([1, 2, 3]), r.choice([1, 1, 2])
    height = r.randint((taps - 1) * dilation + 1, 16)
    more: dict[str, Any] = {"padding": r.choice([0, 1, ((0, 1), (2, 0))]), "dilation": dilation}
    if kind == "matmul":
        m, n, k = r.choice([1, 7, 64, 65, 130, 200]), r.choice([eight(30), r.randint(1, 90)]), eight(40)
        lead = r.choice([(), (), (3,), (2, 2)])
        a_strides = transposed((*lead, m, k)) if m % 8 == 0 and r.random() < 0.4 else None
        b_strides = transposed((*lead, k, n)) if n % 8 or r.random() < 0.5 else None
        case = matmul(
            (*lead, m, k),
            r.choice([(*lead, k, n), (k, n)]) if b_strides is None else (*lead, k, n),
            dtype,
            a_strides=a_strides,
            b_strides=b_strides,
            epilogue=r.choice([plain, bias, everything]),
        )
    elif kind == "image":
        shape_x = (r.randint(1, 3), r.choice([8, 16, 24, 64, 128]), height, r.randint(5, 16))
        more["stride"] = r.choice([1, 1, 2])
        case = image(shape_x, (eight(16), shape_x[1], taps, taps), dtype, epilogue=then, **more)
    elif kind == "dgrad":
        case = dgrad((r.randint(1, 2), eight(10), height + 4, height + 4), eight(10), (taps, taps), **more)
    else:
        more["stride"] = r.choice([1, 2])
        where = r.choice(["channels_last", "contiguous"])
        case = wgrad(
            (r.randint(1, 3), 16 * r.randint(1, 8), height + 4, height + 4), eight(10), (taps, taps), where, **more
        )
    blocks = r.choice([1, 2, 3, 132])
    if r.random() < 0.2:
        return hopper(case, in_pingpong(), blocks=blocks, pick_any=r, pingpong=True)
    return hopper(case, blocks=blocks, pick_any=r)


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 12, 24])
def test_random_problems_and_schedules(start):
    check_cases(anything(random.Random(seed)) for seed in range(start, start + 12))


def spec(case: Case) -> Any:
    made = executable(case)
    assert made.plan is not None
    return made.plan.kernels[0].group.lowered.spec


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (matmul((64, 64), (64, 64), "float32", options=Options(strict=True)), "tf32"),
        (matmul((64, 64), (64, 64), "int32"), "tensor cores do not multiply"),
        (matmul((64, 64), (64, 64), "bfloat16", "float64"), "tensor cores do not multiply"),
        (matmul((64, 65), (65, 64), "bfloat16"), "multiples of 16 bytes"),
        (matmul((64, 64), (64, 64), "bfloat16", a_strides=(128, 2)), "contiguous neither"),
        (matmul((64, 64), (64, 64), "int8"), "only 16-bit operands"),
        (matmul((64, 64), (64, 64), "bfloat16", options=Options(alignment=2)), "multiple of 16 bytes"),
        (convolution((1, 64, 9, 9), (64, 64, 3, 3), "bfloat16"), "contiguous neither|multiples of 16 bytes"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refusals_say_why(case, reason):
    with pytest.raises(Declined, match=reason):
        contraction_wgmma_schedule.schedules(spec(case), HOPPER)


def test_only_on_hopper():
    with pytest.raises(Declined, match="sm_80"):
        contraction_wgmma_schedule.schedules(spec(matmul((64, 64), (64, 64), "bfloat16")), target("sm_80"))


def test_few_channels_share_a_stage():
    few = image((1, 8, 9, 9), (64, 8, 3, 3))
    reduction = operand_tiles(spec(few)).reduction
    assert (reduction.panel, reduction.per_stage, reduction.stages) == (8, 8, 2)
    assert gathered(spec(few)).reduction.channels == 72


@pytest.mark.slow
def test_compiles_without_spills():
    cases = [
        matmul((8192, 8192), (8192, 8192), "bfloat16", epilogue=bias),
        matmul((128, 8192), (8192, 8192), "bfloat16", b_strides=(1, 8192), epilogue=everything),
        matmul((512, 512), (512, 512), "float8_e4m3", b_strides=(1, 512)),
        convolution(
            (8, 64, 56, 56),
            (64, 64, 3, 3),
            "float16",
            layout="channels_last",
            filters="channels_last",
            epilogue=channel_bias,
        ),
        convolution(
            (8, 8, 99, 99),
            (64, 8, 7, 7),
            "bfloat16",
            layout="channels_last",
            filters="channels_last",
            stride=2,
            padding=3,
        ),
    ]
    sources = []
    for number, case in enumerate(cases):
        made = spec(case)
        every = schedules(made, HOPPER)
        with_pingpong = [s for s in every if isinstance(s, WgmmaSchedule) and s.pingpong]
        for n, s in enumerate([*every[:4], *with_pingpong[:2]]):
            sources.append(render(replace(made, name=f"case{number}_{n}_kernel"), s))
    for compiled in nvrtc.compile_kernels(sources, "sm_90a", jobs=2):
        assert compiled.spill_bytes == 0, compiled
        assert not re.search(r"C75\d\d", compiled.log), compiled.log
