"""Matmul and convolution kernels of the contraction family, run on the CPU against the reference."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_cases import Case, check_cases

import fusegraph as fg
from codegen.contraction.simt_schedule import TILES, SimtSchedule
from codegen.dtypes import ALL
from codegen.spec import ContractionSpec
from fusegraph.lowering.base import Options
from fusegraph.lowering.choices import Settled
from fusegraph.passes import vector_products
from fusegraph.report.check import random_inputs

DTYPES = [d.name for d in ALL]
Epilogue = Callable[[fg.Graph, fg.Tensor], None]


def plain(graph: fg.Graph, y: fg.Tensor) -> None:
    graph.output(y, name="y")


def matmul(
    a: tuple[int, ...],
    b: tuple[int, ...],
    dtype: Any = "float32",
    second: Any = None,
    *,
    a_strides: Any = None,
    b_strides: Any = None,
    result: Any = None,
    epilogue: Epilogue = plain,
    compute: Any = "float32",
    **case: Any,
) -> Case:
    graph = fg.Graph("product", compute_dtype=compute)
    x = graph.tensor("a", a, dtype, strides=a_strides)
    y = graph.tensor("b", b, second or dtype, strides=b_strides)
    epilogue(graph, graph.matmul(x, y, dtype=result))
    return Case(graph, "contraction", **case)


def convolution(
    x: tuple[int, ...],
    w: tuple[int, ...],
    dtype: Any = "float32",
    second: Any = None,
    *,
    layout: str = "contiguous",
    filters: str = "contiguous",
    result: Any = None,
    epilogue: Epilogue = plain,
    case: dict[str, Any] | None = None,
    **attributes: Any,
) -> Case:
    graph = fg.Graph("convolved")
    image = graph.tensor("x", x, dtype, layout=layout)
    taps = graph.tensor("w", w, second or dtype, layout=filters)
    epilogue(graph, graph.conv_fprop(image, taps, dtype=result, **attributes))
    return Case(graph, "contraction", **(case or {}))


def random_windows(r: random.Random, sizes: Sequence[int], taps: Sequence[int]) -> dict[str, Any]:
    """Returns arguments of `convolution` for an image of these sizes: layouts, and where windows of taps lie."""
    dilation = [r.choice((1, 1, 1, 2)) for _ in sizes]
    reach = [(count - 1) * step + 1 for count, step in zip(taps, dilation)]
    return {
        "stride": [r.choice((1, 1, 2, 3, 4)) for _ in sizes],
        "dilation": dilation,
        "padding": [(r.randint(0, n), max(n - size, r.randint(0, n))) for n, size in zip(reach, sizes)],
        "mode": r.choice(("convolution", "cross_correlation")),
        **{name: r.choice(("channels_last", "contiguous")) for name in ("layout", "filters")},
    }


def transposed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns strides of a packed tensor whose last two dimensions lie the other way round."""
    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d], step = step, step * max(shape[d], 1)
    return tuple(strides)


def tiles(itype: str = "int32", wide: bool = False) -> list[Callable[[ContractionSpec], SimtSchedule]]:
    """Returns every tile as a schedule, whatever the problem."""
    return [lambda _, t=t: SimtSchedule(*t, itype) for t in TILES if not (wide and t[3] * t[4] > 32)]


# ---- matmul


@pytest.mark.parametrize(
    "sizes",
    [
        [(1, 1, 1), (7, 63, 65), (65, 129, 7), (129, 1, 63), (1, 65, 129), (63, 7, 1), (33, 32, 16), (64, 128, 8)],
        pytest.param(list(itertools.product((1, 7, 63, 65, 129), repeat=3)), marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_matmul_of_ragged_sizes_and_all_transpositions(sizes):
    cases = []
    tiled = Options(settled={(vector_products.NAME, "y"): Settled(vector_products.TILES)})  # not sums of rows
    for number, (m, n, k) in enumerate(sizes):
        over_a, over_b = divmod(number % 4, 2)
        cases.append(
            matmul(
                (m, k),
                (k, n),
                a_strides=transposed((m, k)) if over_a else None,
                b_strides=transposed((k, n)) if over_b else None,
                options=tiled,
            )
        )
    check_cases(cases, guard=True)


def test_matmul_batches_and_broadcasts_either_side():
    shapes = [
        ((3, 5, 7), (3, 7, 9)),
        ((3, 5, 7), (7, 9)),
        ((5, 7), (3, 7, 9)),
        ((1, 5, 7), (3, 7, 9)),
        ((3, 5, 7), (1, 7, 9)),
        ((2, 1, 5, 7), (3, 7, 9)),
        ((2, 3, 5, 7), (2, 1, 7, 9)),
        ((2, 3, 2, 5, 7), (3, 1, 7, 9)),
        ((1, 1, 5, 7), (1, 1, 7, 9)),
    ]
    cases = [matmul(a, b) for a, b in shapes]
    cases += [matmul(a, b, a_strides=transposed(a), b_strides=transposed(b)) for a, b in shapes[:3]]
    # A batch whose elements repeat in memory, and rows with gaps between them.
    cases += [matmul((3, 5, 7), (3, 7, 9), a_strides=(0, 7, 1), b_strides=(200, 20, 2))]
    check_cases(cases, guard=True)


def test_matmul_of_every_dtype():
    cases = [matmul((5, 19), (19, 6), dtype) for dtype in DTYPES]
    mixed = [
        ("bfloat16", "float32"),
        ("float16", "bfloat16"),
        ("int8", "uint8"),
        ("int8", "float16"),
        ("bool", "int32"),
    ]
    mixed += [("float64", "int32"), ("float8_e4m3", "float8_e5m2"), ("float8_e4m3", "bfloat16"), ("int64", "uint8")]
    cases += [matmul((5, 19), (19, 6), a, b) for a, b in mixed]
    results = [
        ("bfloat16", "float32"),
        ("float32", "float16"),
        ("int8", "int64"),
        ("int8", "float32"),
        ("int8", "int8"),
    ]
    results += [("float8_e4m3", "float8_e4m3"), ("float64", "float32"), ("uint8", "uint8"), ("int32", "float64")]
    cases += [matmul((5, 19), (19, 6), dtype, result=result) for dtype, result in results]
    graph = fg.Graph("wide", io_dtype="float32", compute_dtype="float64")
    graph.output(graph.tensor("a", (5, 300)) @ graph.tensor("b", (300, 4)))
    check_cases([*cases, graph])


def test_integers_wrap_around():
    rng = np.random.default_rng(0)
    inputs = {n: rng.integers(-(2**31), 2**31, s).astype(np.int32) for n, s in (("a", (9, 33)), ("b", (33, 5)))}
    wide = {n: rng.integers(-(2**62), 2**62, s) for n, s in (("a", (9, 33)), ("b", (33, 5)))}
    made = check_cases(
        [
            matmul((9, 33), (33, 5), "int32", inputs=inputs),
            matmul((9, 33), (33, 5), "int32", result="int64", inputs=inputs),
            matmul((9, 33), (33, 5), "int32", result="uint8", inputs=inputs),
            matmul((9, 33), (33, 5), "int32", result="float32", inputs=inputs),
            matmul((9, 33), (33, 5), "int64", inputs=wide),
            matmul((9, 33), (33, 5), "int64", result="int8", inputs=wide),
        ]
    )
    total = inputs["a"].astype(object) @ inputs["b"].astype(object)
    wrapped = np.array([[(int(v) + 2**31) % 2**32 - 2**31 for v in row] for row in total])
    np.testing.assert_array_equal(made[0](**inputs), wrapped)
    exact = np.array([[(int(v) + 2**63) % 2**64 - 2**63 for v in row] for row in total], np.int64)
    np.testing.assert_array_equal(made[1](**inputs), exact)
    np.testing.assert_array_equal(made[3](**inputs), wrapped.astype(np.float32))


def test_empty_and_single():
    def biased(graph: fg.Graph, y: fg.Tensor) -> None:
        graph.output(graph.relu(y + graph.tensor("c", (y.shape[-1],))), name="y")

    cases = [
        matmul((4, 0), (0, 5)),
        matmul((4, 0), (0, 5), epilogue=biased),
        matmul((3, 4, 0), (3, 0, 5), "int8"),
        matmul((0, 3), (3, 5)),
        matmul((4, 3), (3, 0), epilogue=biased),
        matmul((0, 4, 3), (0, 3, 5)),
        matmul((0, 4, 3), (3, 5)),
        matmul((1, 1), (1, 1), epilogue=biased),
        convolution((0, 5, 8, 8), (7, 5, 3, 3)),
        convolution((2, 0, 8, 8), (7, 0, 3, 3), groups=1),
        convolution((2, 5, 8, 8), (0, 5, 3, 3)),
        convolution((1, 5, 1, 1), (1, 5, 1, 1)),
        convolution((2, 5, 0, 4), (9, 5, 3, 1), padding=((2, 2), (0, 0))),
    ]
    made = check_cases(cases, guard=True)
    np.testing.assert_array_equal(made[0](np.ones((4, 0), np.float32), np.ones((0, 5), np.float32)), np.zeros((4, 5)))


# ---- the program on the result


def epilogues() -> dict[str, Epilogue]:
    """Pointwise DAGs on a result of shape (..., M, N), by name."""

    def operand(graph: fg.Graph, y: fg.Tensor, *keep: int, name: str = "t", dtype: Any = None) -> fg.Tensor:
        shape = [size if d - y.rank in keep else 1 for d, size in enumerate(y.shape)]
        return graph.tensor(name, shape, dtype or (y.dtype if y.dtype.is_float else "float32"))

    def everything(graph: fg.Graph, y: fg.Tensor) -> None:
        scale, bias = operand(graph, y, -1, name="scale"), operand(graph, y, -2, name="bias")
        residual = operand(graph, y, *range(-y.rank, 0), name="residual")
        graph.output(graph.gelu(y * scale + bias) + residual, name="y")

    def several(graph: fg.Graph, y: fg.Tensor) -> None:
        activated = graph.relu(y + operand(graph, y, -1))
        graph.output(y, name="result")
        graph.output(activated, name="activated")
        graph.output(graph.cast(activated > 0.0, "int8"), name="mask")
        graph.output(graph.cast(activated * 0.5, "float64"), name="half")

    def indexed(graph: fg.Graph, y: fg.Tensor) -> None:
        for axis in range(y.rank):
            y = y + graph.cast(graph.gen_index(y, axis=axis), "float32")
        graph.output(y, name="y")

    def masked(graph: fg.Graph, y: fg.Tensor) -> None:
        row, col = graph.gen_index(y, axis=y.rank - 2), graph.gen_index(y, axis=y.rank - 1)
        graph.output(graph.binary_select(y, operand(graph, y, name="fill"), col > row), name="y")

    def reused(graph: fg.Graph, y: fg.Tensor) -> None:
        graph.output(y * y + graph.sigmoid(y) * y, name="y")

    def backwards(graph: fg.Graph, y: fg.Tensor) -> None:
        strides, step = [], 1
        for size in y.shape:
            strides.append(step)
            step *= size
        graph.output(graph.relu(y), name="y", strides=strides)

    def gaps(graph: fg.Graph, y: fg.Tensor) -> None:
        strides, step = [], 3
        for size in reversed(y.shape):
            strides.insert(0, step)
            step = step * size + 5
        graph.output(y, name="y", strides=strides)
        graph.output(graph.relu(y), name="packed")

    def with_(*keep: int) -> Epilogue:
        return lambda graph, y: plain(graph, graph.tanh(y + operand(graph, y, *keep)))

    return {
        "row": with_(-2),
        "column": with_(-1),
        "scalar": with_(),
        "full": with_(-1, -2),
        "batch": with_(*range(-8, -2)),
        "everything": everything,
        "several": several,
        "indexed": indexed,
        "masked": masked,
        "reused": reused,
        "backwards": backwards,
        "gaps": gaps,
    }


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_epilogues_of_matmul(dtype):
    cases = []
    for name, epilogue in epilogues().items():
        for a, b in (((9, 5), (5, 12)), ((2, 3, 9, 5), (3, 5, 7))):
            if a == (9, 5) or name not in ("row", "column", "scalar", "full"):
                cases.append(matmul(a, b, dtype, epilogue=epilogue, label=f"{name} {a} {b} {dtype}"))
    made = check_cases(cases, guard=True)
    assert all(len(e.plan.kernels) == 1 for e in made)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_epilogues_of_convolution(layout):
    def spatial(graph: fg.Graph, y: fg.Tensor) -> None:
        bias = graph.tensor("bias", (y.shape[1], 1, 1), y.dtype)
        residual = graph.tensor("residual", y.shape, y.dtype, layout=layout)
        image = graph.tensor("image", (y.shape[0], 1, *y.shape[2:]), y.dtype)
        graph.output(graph.relu(y + bias + residual) * image, name="y")

    def across(graph: fg.Graph, y: fg.Tensor) -> None:
        other = "channels_last" if layout == "contiguous" else "contiguous"
        graph.output(y + graph.tensor("residual", y.shape, y.dtype, layout=other), name="y")
        graph.output(graph.relu(y), name="other", layout=other)

    chosen = {"spatial": spatial, "across": across, **epilogues()}
    cases = [
        convolution(
            (2, 10, 7, size), (12, 5, 3, 3), layout=layout, padding=1, epilogue=epilogue, case={"label": f"{n} {size}"}
        )
        for n, epilogue in chosen.items()
        for size in (8, 9)
        if n not in ("row", "column", "scalar", "batch", "full") and (size == 8) != (n == "gaps")
    ]
    made = check_cases(cases, guard=True)
    assert all(len(e.plan.kernels) == 1 for e in made)


def test_strict_rounds_every_intermediate():
    def chain(graph: fg.Graph, y: fg.Tensor) -> None:
        graph.output(graph.tanh(y * 0.3 + graph.tensor("c", (y.shape[-1],), y.dtype)) + 1.0, name="y")

    strict = Options(strict=True)
    cases = [matmul((9, 33), (33, 5), d, epilogue=chain, options=strict) for d in DTYPES[:6]]
    cases.append(convolution((1, 8, 5, 5), (6, 8, 3, 3), "bfloat16", epilogue=chain, case={"options": strict}))
    made = check_cases(cases)
    # Rounding in between must show: the same graph without strict gives other bits somewhere.
    loose = check_cases([replace(c, options=Options()) for c in cases[2:4]])
    for exact, other in zip(made[2:4], loose):
        given = random_inputs(exact.graph, 3)
        assert (exact(*given.values()).view(np.uint16) != other(*given.values()).view(np.uint16)).any()


# ---- convolution


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
def test_convolutions_of_every_rank_and_layout(every):
    cases = []
    for x, w, attributes in [
        ((2, 5, 19), (7, 5, 3), {"padding": 1}),
        ((1, 5, 40), (3, 5, 4), {"stride": 3, "dilation": 2, "padding": ((0, 5),)}),
        ((2, 5, 9, 11), (7, 5, 3, 3), {"padding": 1}),
        ((1, 35, 6, 6), (17, 35, 1, 1), {}),
        ((2, 8, 9, 8), (12, 8, 1, 1), {"stride": 2}),
        ((2, 8, 9, 8), (12, 8, 1, 1), {"padding": ((1, 2), (0, 1))}),
        (
            (2, 10, 9, 11),
            (4, 5, 3, 5),
            {"groups": 2, "stride": (2, 1), "dilation": (1, 2), "padding": ((2, 1), (0, 4))},
        ),
        ((2, 34, 5, 6), (18, 17, 2, 3), {"groups": 2, "padding": 1}),
        ((2, 5, 4, 5, 6), (9, 5, 3, 2, 3), {"padding": ((1, 1), (0, 1), (2, 0)), "stride": (1, 2, 1)}),
        ((1, 16, 3, 4, 4), (10, 8, 3, 3, 3), {"groups": 2, "padding": 1}),
        ((1, 8, 2, 3), (9, 8, 5, 7), {"padding": ((2, 2), (3, 4))}),  # a filter larger than the image
        ((3, 6, 1, 1), (9, 6, 3, 3), {"padding": 1}),
        ((1, 9, 5, 5), (9, 9, 3, 3), {"padding": 7, "stride": 4}),  # windows that lie in the padding alone
    ]:
        ways = [("cross_correlation", "contiguous"), ("convolution", "channels_last")]
        for mode, layout in ways if every else ways[len(cases) % 2 :][:1]:
            filters = layout if len(cases) % 3 else "contiguous"
            cases.append(convolution(x, w, layout=layout, filters=filters, mode=mode, **attributes))
    check_cases(cases, guard=True)


@pytest.mark.parametrize("channels", [pytest.param(c, marks=pytest.mark.slow) for c in (1, 3, 5, 8, 17, 35)])
def test_convolution_of_channel_counts(channels):
    cases = []
    for filters, groups, layout in itertools.product((1, 9, 24), (1, 3), ("contiguous", "channels_last")):
        for taps, padding in ((1, 0), (3, 1), (5, 2)):
            x, w = (2, channels * groups, 7, 9), (filters * groups, channels, taps, taps)
            made = convolution(x, w, layout=layout, padding=padding, groups=groups)
            made.family = None  # few channels are direct convolutions
            cases.append(made)
    check_cases(cases, guard=True)


def test_convolution_of_every_dtype():
    cases = [convolution((1, 9, 5, 6), (10, 9, 3, 3), d, padding=1, layout="channels_last") for d in DTYPES]
    for a, b in (("bfloat16", "float32"), ("uint8", "int8")):
        cases.append(convolution((1, 9, 5, 6), (10, 9, 3, 3), a, b, padding=1))
    cases.append(convolution((1, 9, 5, 6), (10, 9, 3, 3), "bfloat16", result="float32", padding=1))
    check_cases(cases)


# ---- values


def test_nan_and_infinity():
    """Zero padding meets infinite weights, and NaN and infinities meet everything: as IEEE and NumPy have it."""
    cases = [matmul((17, 9), (9, 33), dtype, special=0.05) for dtype in DTYPES[:6]]
    for dtype, layout in (("float32", "contiguous"), ("bfloat16", "channels_last"), ("float64", "channels_last")):
        cases.append(convolution((1, 9, 6, 6), (5, 9, 3, 3), dtype, padding=1, layout=layout, case={"special": 0.01}))
    check_cases(cases)


def test_padding_is_zero_times_the_weight():
    graph = fg.Graph("padded")
    y = graph.conv_fprop(graph.tensor("x", (1, 5, 2, 2)), graph.tensor("w", (8, 5, 3, 3)), padding=1)
    graph.output(y, name="y")
    weights = np.ones((8, 5, 3, 3), np.float32)
    weights[0, 0, 0, 0] = np.inf  # meets the padding at the upper left, data at the lower right
    inputs = {"x": np.ones((1, 5, 2, 2), np.float32), "w": weights}
    (made,) = check_cases([Case(graph, "contraction", inputs=inputs)])
    result = made(**inputs)
    assert np.isnan(result[0, 0, 0, 0])
    assert result[0, 0, 1, 1] == np.inf
    assert np.isfinite(result[0, 1:]).all()


def test_misaligned_pointers():
    cases = [
        matmul((8, 16), (16, 24), "bfloat16", epilogue=epilogues()["everything"]),
        convolution((2, 8, 6, 8), (16, 8, 3, 3), padding=1, epilogue=epilogues()["several"]),
    ]
    for exe, case in zip(check_cases(cases), cases):
        given = random_inputs(case.graph, 5)
        expected = exe(*given.values())
        expected = expected if isinstance(expected, tuple) else (expected,)
        for shifted in ("inputs", "outputs", "all"):
            inputs = [_shifted(a) if shifted != "outputs" else a for a in given.values()]
            outputs = [_shifted(a) if shifted != "inputs" else np.empty_like(a) for a in expected]
            for array in outputs:
                array[...] = 7
            exe(*inputs, out=outputs)
            for seen, wanted in zip(outputs, expected):
                np.testing.assert_array_equal(seen.astype(np.float64), wanted.astype(np.float64))


def _shifted(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns a copy whose address is a multiple of the element's size and no more."""
    base = np.empty(array.size + 1, array.dtype)
    start = 0 if base.ctypes.data % (2 * array.itemsize) else 1
    copy = base[start : start + array.size].reshape(array.shape)
    copy[...] = array
    assert copy.ctypes.data % 16 or array.itemsize >= 16
    return copy


def test_random_problems():
    """Shapes, layouts, attributes and dtypes drawn together."""
    check_cases([_random_case(random.Random(seed)) for seed in range(12)], guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 1200, 50))
def test_more_random_problems(start):
    check_cases([_random_case(random.Random(seed)) for seed in range(start, start + 50)], guard=True)


def _random_case(r: random.Random) -> Case:
    graph = fg.Graph("random")
    first = r.choice(DTYPES)
    second = first if r.random() < 0.7 or first == "uint64" else r.choice([d for d in DTYPES if d != "uint64"])

    def strides(shape: list[int]) -> tuple[int, ...] | None:
        if r.random() < 0.5:
            return None
        order = r.sample(range(len(shape)), len(shape))
        result, step = [0] * len(shape), 1
        for d in order:
            result[d], step = step, step * max(shape[d], 1) + (r.randint(1, 3) if r.random() < 0.2 else 0)
        return tuple(result)

    if r.random() < 0.5:
        batch = [r.choice([1, 2, 3]) for _ in range(r.choice([0, 0, 1, 2]))]
        m, n, k = (r.choice([1, 3, 4, 8, 16, 33, 64, 65]) for _ in range(3))
        a = [*(size if r.random() < 0.8 else 1 for size in batch), m, k]
        b = [*(size if r.random() < 0.8 else 1 for size in batch), k, n]
        y = graph.matmul(
            graph.tensor("a", a, first, strides=strides(a)), graph.tensor("b", b, second, strides=strides(b))
        )
    else:
        rank, groups = r.choice([1, 2, 2, 3]), r.choice([1, 1, 2, 3])
        channels, filters = r.choice([5, 8, 17, 35]), r.choice([1, 4, 9, 24])
        spatial = [r.choice([1, 2, 5, 8, 13] if rank < 3 else [1, 3, 5]) for _ in range(rank)]
        taps, dilation = ([r.choice([1, 1, 2, 3]) for _ in range(rank)] for _ in range(2))
        reach = [(t - 1) * d + 1 for t, d in zip(taps, dilation)]
        padding = [(r.randint(0, w), max(r.randint(0, w), w - size)) for w, size in zip(reach, spatial)]
        x, w = [r.choice([1, 2]), groups * channels, *spatial], [groups * filters, channels, *taps]
        y = graph.conv_fprop(
            graph.tensor("x", x, first, strides=strides(x)),
            graph.tensor("w", w, second, strides=strides(w)),
            stride=[r.choice([1, 1, 2, 3]) for _ in range(rank)],
            dilation=dilation,
            padding=padding,
            groups=groups,
            mode=r.choice(["convolution", "cross_correlation"]),
        )
    if y.dtype.is_float:
        shape = [size if r.random() < 0.6 else 1 for size in y.shape]
        y = graph.relu(y + graph.tensor("c", shape, y.dtype, strides=strides(shape)))
    graph.output(y, name="y", strides=strides(list(y.shape)))
    return Case(graph, "contraction", special=r.choice([0, 0, 0.02]), options=Options(strict=r.random() < 0.2))
