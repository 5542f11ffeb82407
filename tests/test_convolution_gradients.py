"""conv_dgrad and conv_wgrad: what the ops mean, and their kernels on the CPU against the reference."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import check_on_gpu
from kernel_cases import Case, check_cases, families
from test_contraction import epilogues, tiles

import fusegraph as fg
from codegen.dtypes import ALL
from fusegraph.dtypes import float64, int8, int32
from fusegraph.errors import AttributeValueError, GraphError, ShapeError
from fusegraph.lowering import convolution as lowering
from fusegraph.lowering.base import Options
from fusegraph.ops import TABLE, TensorType
from fusegraph.report.compare import compare_engines

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, Any]
Epilogue = Callable[[fg.Graph, fg.Tensor], None]
FPROP, DGRAD, WGRAD = (TABLE[name] for name in ("conv_fprop", "conv_dgrad", "conv_wgrad"))


# ---- the ops


def plain(attributes: dict[str, Any]) -> dict[str, Any]:
    return {"stride": 1, "padding": 0, "dilation": 1, "mode": "cross_correlation", "groups": 1, **attributes}


def canonical(op: Any, types: tuple[TensorType, ...], attributes: dict[str, Any]) -> dict[str, Any]:
    return dict(op.normalize(types, {**op.attributes, **plain(attributes)}))


def test_both_are_adjoint_to_the_convolution():
    """A convolution is linear in its input and in its filter: <conv(x, w), l> = <x, dgrad(l, w)> = <w, wgrad(x, l)>."""
    r, rng, count = random.Random(0), np.random.default_rng(0), 0
    while count < 120:
        found = _drawn(r)
        if found is None:
            continue
        count += 1
        x_shape, w_shape, y_shape, how = found
        x, w, y = (rng.standard_normal(s) for s in (x_shape, w_shape, y_shape))
        types = [TensorType(s, float64) for s in (x_shape, w_shape, y_shape)]
        forward = canonical(FPROP, (types[0], types[1]), how)
        to_image = canonical(DGRAD, (types[2], types[1]), {**how, "size": x_shape[2:]})
        to_filter = canonical(WGRAD, (types[0], types[2]), {**how, "taps": w_shape[2:]})
        assert DGRAD.infer((types[2], types[1]), to_image).shape == x_shape
        assert WGRAD.infer((types[0], types[2]), to_filter).shape == w_shape
        expected = (FPROP.reference(x, w, **forward) * y).sum()
        results = (x * DGRAD.reference(y, w, **to_image)).sum(), (w * WGRAD.reference(x, y, **to_filter)).sum()
        np.testing.assert_allclose(results, expected, rtol=1e-9, atol=1e-9, err_msg=str(found))


def _drawn(r: random.Random, most: int = 9) -> tuple[Any, Any, Any, dict[str, Any]] | None:
    """Draws the shapes of image, filter and loss, and the attributes; None if the filter does not fit."""
    rank = r.choice((1, 1, 2, 2, 3))
    groups = r.choice((1, 1, 2, 3))
    channels, filters = groups * r.choice((1, 2, 5)), groups * r.choice((1, 3, 4))
    how = {
        "stride": tuple(r.choice((1, 1, 2, 2, 3, 4, 6)) for _ in range(rank)),
        "dilation": tuple(r.choice((1, 1, 2, 3, 4, 6)) for _ in range(rank)),
        "padding": tuple((r.randint(0, 4), r.randint(0, 4)) for _ in range(rank)),
        "groups": groups,
        "mode": r.choice(("cross_correlation", "convolution")),
    }
    x = (r.randint(1, 3), channels, *(r.randint(1, most + (5 if rank < 3 else 0)) for _ in range(rank)))
    w = (filters, channels // groups, *(r.randint(1, 5) for _ in range(rank)))
    types = TensorType(x, float64), TensorType(w, float64)
    try:
        return x, w, FPROP.infer(types, canonical(FPROP, types, how)).shape, how
    except ShapeError:
        return None


def test_sizes_that_are_not_given():
    g = fg.Graph("sizes")
    loss, w = g.tensor("loss", (2, 4, 5, 7)), g.tensor("w", (4, 3, 3, 2))
    assert g.conv_dgrad(loss, w).shape == (2, 3, 7, 8)
    assert g.conv_dgrad(loss, w, stride=2, padding=1).shape == (2, 3, 9, 12)
    assert g.conv_dgrad(loss, w, size=(10, 13), stride=2, padding=1).shape == (2, 3, 10, 13)
    assert g.conv_dgrad(loss, w, groups=2, dilation=(1, 3)).shape == (2, 6, 7, 10)
    assert g.conv_dgrad(g.tensor("one", (1, 4, 1)), g.tensor("wide", (4, 3, 1)), padding=1, stride=3).shape == (1, 3, 0)
    image = g.tensor("image", (2, 6, 7, 8))
    assert g.conv_wgrad(image, loss).shape == (4, 6, 3, 2)
    assert g.conv_wgrad(image, loss, padding=((1, 0), (0, 1)), dilation=(1, 2)).shape == (4, 6, 4, 2)
    assert g.conv_wgrad(image, loss, groups=2).shape == (4, 3, 3, 2)
    small = g.tensor("small", (2, 4, 3, 4))
    assert g.conv_wgrad(image, small, taps=(3, 2), stride=2).shape == (4, 6, 3, 2)
    assert g.conv_wgrad(image, small, taps=(2, 2), stride=2).shape == (4, 6, 2, 2)


def test_results_lie_as_the_first_operand_does():
    g = fg.Graph("layouts", io_dtype="bfloat16")
    loss, w = g.tensor("loss", (2, 4, 5, 7), layout="NHWC"), g.tensor("w", (4, 8, 3, 3))
    dx = g.conv_dgrad(loss, w)
    assert (dx.strides, dx.dtype.name) == ((7 * 9 * 8, 1, 9 * 8, 8), "bfloat16")
    assert g.conv_wgrad(dx, loss).strides == (9 * 8, 1, 3 * 8, 8)
    eighth = g.tensor("eighth", (1, 4, 5), int8)
    assert g.conv_dgrad(eighth, g.tensor("filter", (4, 2, 3), int8)).dtype == int32
    assert g.conv_dgrad(eighth, g.tensor("other", (4, 2, 3), int8), dtype="float32").dtype.name == "float32"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda g, x, w: g.conv_dgrad(x, [w]), GraphError, "operand 'filter' is a list"),
        (lambda g, x, w: g.conv_dgrad(x, g.tensor("v", (4, 3, 3))), ShapeError, "got 4 and 3"),
        (lambda g, x, w: g.conv_dgrad(x, g.tensor("v", (5, 3, 3, 3))), ShapeError, "6 channels, one for each filter"),
        (lambda g, x, w: g.conv_dgrad(x, g.tensor("v", (6, 3, 3, 3)), groups=4), ShapeError, "6 filters do not split"),
        (lambda g, x, w: g.conv_dgrad(x, w, groups=None), AttributeValueError, "groups is a positive integer"),
        (lambda g, x, w: g.conv_dgrad(x, w, size=(9, 9, 9)), AttributeValueError, "size is an integer of at least 0"),
        (lambda g, x, w: g.conv_dgrad(x, w, mode="same"), AttributeValueError, "mode is 'cross_correlation' or"),
        (
            lambda g, x, w: g.conv_dgrad(x, w, size=13, stride=2),
            ShapeError,
            "dimension 0: a convolution of size 13 has 6 positions, the loss 5; sizes that fit are 11 to 12 "
            r"(loss = 'x' float32 [2, 6, 5, 7], filter = 'w' float32 [6, 3, 3, 3])",
        ),
        (lambda g, x, w: g.conv_dgrad(x, w, padding=6), ShapeError, "more than 5 positions over padding 6 + 6 alone"),
        (lambda g, x, w: g.conv_dgrad(g.tensor("v", (2, 6)), w), ShapeError, "loss (N, K, positions...) has 3, 4 or 5"),
        (lambda g, x, w: g.conv_dgrad(g.tensor("v", (2, 6, 0, 1)), w), ShapeError, "3 taps and 0 positions"),
        (lambda g, x, w: g.conv_wgrad(x, g.tensor("v", (3, 6, 5, 7))), ShapeError, "image has 2 images, loss 3"),
        (lambda g, x, w: g.conv_wgrad(x, x, groups=4), ShapeError, "6 channels of the image do not split into 4"),
        (lambda g, x, w: g.conv_wgrad(x, g.tensor("v", (2, 9, 5, 7)), groups=2), ShapeError, "9 channels of the loss"),
        (lambda g, x, w: g.conv_wgrad(x, g.tensor("v", (2, 6, 5, 3)), stride=2), ShapeError, "no filter has 5 pos"),
        (
            lambda g, x, w: g.conv_wgrad(x, g.tensor("v", (2, 6, 2, 3)), stride=2),
            AttributeValueError,
            "dimension 0: filters of 2 to 3 taps fit; say which with taps",
        ),
        (
            lambda g, x, w: g.conv_wgrad(x, g.tensor("v", (2, 6, 2, 3)), taps=(4, 3), stride=2),
            ShapeError,
            "a filter of 4 taps has not the 2 positions of the loss over size 5; 2 to 3 taps fit",
        ),
        (lambda g, x, w: g.conv_wgrad(x, x, taps=0), AttributeValueError, "taps is an integer of at least 1"),
        (lambda g, x, w: g.conv_wgrad(x, x, dtype="int32"), GraphError, "a sum of float32 products cannot be stored"),
        (lambda g, x, w: g.conv_wgrad(x, x, compute_dtype="half"), AttributeValueError, "or 'fast_float_for_fp8'"),
    ],
)  # fmt: skip
def test_what_does_not_fit(make, error, text):
    g = fg.Graph("wrong")
    with pytest.raises(error) as caught:
        make(g, g.tensor("x", (2, 6, 5, 7)), g.tensor("w", (6, 3, 3, 3)))
    assert text in str(caught.value)


def test_integers_wrap_around():
    rng = np.random.default_rng(3)
    graphs, inputs = [], []
    for dtype in ("int32", "int64"):
        g = fg.Graph("wrap", io_dtype=dtype)
        image, loss, w = g.tensor("x", (2, 2, 6)), g.tensor("loss", (2, 3, 3)), g.tensor("w", (3, 2, 3))
        g.output(g.conv_dgrad(loss, w, size=6, stride=2, padding=1), name="dx")
        g.output(g.conv_wgrad(image, loss, taps=3, stride=2, padding=1), name="dw")
        info = np.iinfo(dtype)
        graphs.append(g)
        inputs.append({t.name: rng.integers(info.min, info.max, t.shape, t.dtype.numpy) for t in g.inputs})
    check_cases([Case(g, inputs=values) for g, values in zip(graphs, inputs)])


def test_what_is_not_there_is_not_multiplied():
    """Infinite taps give NaN only where zero meets them: on the grid of their own phase."""
    g = fg.Graph("infinite")
    loss, w = g.tensor("loss", (1, 1, 3)), g.tensor("w", (1, 1, 3))
    g.output(g.conv_dgrad(loss, w, size=6, stride=2, padding=1), name="dx")
    filled = {"loss": np.ones((1, 1, 3), np.float32), "w": np.array([[[1, np.inf, 2]]], np.float32)}
    (made,) = check_cases([Case(g, inputs=filled)])
    # Elements 0, 2 and 4 lie under the middle tap; 1, 3 and 5 under the first and last, 5 once beyond the positions.
    np.testing.assert_array_equal(made(filled["loss"], filled["w"])[0, 0], [np.inf, 3, np.inf, 3, np.inf, 2])
    filled["loss"][0, 0, 1] = np.inf
    filled["w"][0, 0, 1] = 0
    dx = made(filled["loss"], filled["w"])[0, 0]
    np.testing.assert_array_equal(dx, [0, np.inf, np.nan, np.inf, 0, 2])


# ---- phases of a stride


def test_phases_cover_every_element_once_with_its_taps():
    """Against the definition: which taps lie over which elements at which position, for all that is small."""
    linear = 0
    for stride, dilation, taps, before, size in itertools.product(
        range(1, 7), (1, 2, 3, 4, 6), (1, 2, 3, 5), range(5), (1, 2, 7, 12)
    ):
        p = lowering.phases(size, taps, stride, dilation, before)
        seen: dict[int, set[tuple[int, int]]] = {}
        for b in itertools.product(*map(range, p.sizes)):
            dot = lambda steps, b=b: sum(x * y for x, y in zip(b, steps))  # noqa: E731
            for u in range(p.rows):
                element = u * p.stride + dot(p.onto) + p.first
                if not 0 <= element < size:
                    continue
                assert element not in seen
                found = {
                    (u - j * p.dilation + dot(p.shifts) + p.shift, j * p.apart + dot(p.taps) + p.tap)
                    for j in range(p.count)
                }
                exists = dot(p.idles) + p.idle == 0
                seen[element] = {(position, tap) for position, tap in found if tap < taps and exists}
                assert all(tap >= 0 for _, tap in found)
        expected: dict[int, set[tuple[int, int]]] = {h: set() for h in range(size)}
        for h, tap in itertools.product(range(size), range(taps)):
            if (h + before - tap * dilation) % stride == 0:
                expected[h].add(((h + before - tap * dilation) // stride, tap))
        assert seen == expected, (stride, dilation, taps, before, size)
        if len(p.sizes) <= 1 and p.first == 0 and p.rows == -(-size // stride):
            linear += 1
        else:
            assert stride > 2, "two phases are always linear in their number"
    assert linear > 1000  # 800 of them with strides of 1 and 2


# ---- kernels


def gradient(
    kind: str,
    image: tuple[int, ...],
    filters: tuple[int, ...],
    dtype: Any = "float32",
    second: Any = None,
    *,
    layout: str = "contiguous",
    other: str = "contiguous",
    result: Any = None,
    epilogue: Epilogue | None = None,
    case: dict[str, Any] | None = None,
    **how: Any,
) -> Case:
    """Returns the gradient ("dgrad" or "wgrad") of a convolution of an image with a filter, by their shapes."""
    ghost = fg.Graph("forward")
    loss_shape = ghost.conv_fprop(ghost.tensor("x", image), ghost.tensor("w", filters), **how).shape
    g = fg.Graph(kind)
    if kind == "dgrad":
        loss = g.tensor("loss", loss_shape, dtype, layout=layout)
        w = g.tensor("w", filters, second or dtype, layout=other)
        y = g.conv_dgrad(loss, w, size=image[2:], dtype=result, **how)
    else:
        x = g.tensor("image", image, dtype, layout=layout)
        loss = g.tensor("loss", loss_shape, second or dtype, layout=other)
        y = g.conv_wgrad(x, loss, taps=filters[2:], dtype=result, **how)
    (epilogue or (lambda graph, t: graph.output(t, name="y")))(g, y)
    return Case(g, **(case or {}))


KINDS = ("dgrad", "wgrad")
LAYOUTS = ("contiguous", "channels_last")
PROBLEMS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 5, 17), (7, 5, 3), {"padding": 1}),
    ((1, 4, 33), (6, 2, 4), {"stride": 2, "padding": ((2, 1),), "groups": 2}),
    ((1, 3, 20), (2, 3, 8), {"stride": 5, "padding": 2}),
    ((2, 5, 9, 10), (7, 5, 3, 3), {"padding": 1}),
    ((2, 6, 9, 10), (4, 3, 3, 2), {"stride": (2, 1), "padding": ((1, 0), (2, 1)), "groups": 2}),
    ((1, 5, 14, 14), (3, 5, 3, 3), {"stride": 2, "padding": 1}),
    ((1, 4, 9, 8), (9, 4, 1, 1), {"stride": 2}),
    ((1, 3, 8, 8), (5, 3, 2, 2), {"stride": 2}),
    ((1, 3, 11, 12), (5, 3, 3, 2), {"stride": (3, 4), "dilation": (2, 2), "padding": (1, 2)}),
    ((1, 3, 9, 12), (5, 3, 3, 3), {"stride": (2, 6), "dilation": (4, 4), "padding": (2, 1), "mode": "convolution"}),
    ((1, 3, 5, 5), (4, 3, 3, 3), {"padding": ((4, 3), (3, 4))}),
    ((2, 4, 5, 6, 7), (6, 2, 2, 3, 3), {"stride": (2, 1, 2), "padding": (0, 1, 1), "groups": 2}),
    ((1, 2, 4, 5, 3), (4, 2, 3, 1, 2), {"dilation": (1, 2, 2), "padding": 1, "mode": "convolution"}),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
def test_every_rank_stride_and_layout(kind, every):
    cases = []
    for number, (image, filters, how) in enumerate(PROBLEMS):
        pairs = list(itertools.product(LAYOUTS, LAYOUTS))
        for layout, other in pairs if every else [pairs[number % 4]]:
            cases.append(gradient(kind, image, filters, layout=layout, other=other, **how))
            if every:
                cases.append(gradient(kind, image, filters, "bfloat16", layout=layout, other=other, **how))
    check_cases(cases, guard=True)


@pytest.mark.parametrize("kind", ["wgrad", pytest.param("dgrad", marks=pytest.mark.slow)])
def test_ragged_channels_and_tiles(kind):
    """Sizes around those of tiles and vectors; the last few products of a reduction."""
    sizes = [(1, 1), (7, 3), (33, 9), (65, 1), (3, 63), (16, 32)]
    cases = [
        gradient(kind, (2, c, 5, 6), (k, c, 2, 3), dtype, layout="channels_last", other=other, padding=1, stride=(1, s))
        for number, (c, k) in enumerate(sizes)
        for dtype, other, s in (("float32", LAYOUTS[number % 2], 1 + number % 2), ("bfloat16", "channels_last", 1))
    ]
    check_cases(cases, guard=True)


@pytest.mark.parametrize("kind", ["dgrad", pytest.param("wgrad", marks=pytest.mark.slow)])
def test_every_dtype(kind):
    cases = [
        gradient(kind, (1, 4, 7, 8), (6, 2, 3, 2), d.name, padding=1, stride=2, groups=2, layout=LAYOUTS[n % 2])
        for n, d in enumerate(ALL)
    ]
    mixed = [("bfloat16", "float32", None), ("int8", "uint8", "int64"), ("float8_e4m3", "float8_e5m2", "bfloat16"),
             ("int8", "float16", None), ("float16", "bfloat16", "float32")]  # fmt: skip
    cases += [gradient(kind, (1, 3, 8), (5, 3, 3), a, b, result=c, padding=1) for a, b, c in mixed]
    check_cases(cases)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"padding": 1}, marks=pytest.mark.slow),
        {"padding": 1, "stride": 2},
        pytest.param({"stride": (1, 2), "mode": "convolution"}, marks=pytest.mark.slow),
    ],
)
def test_epilogues(how):
    def across(graph: fg.Graph, y: fg.Tensor) -> None:
        graph.output(y + graph.tensor("residual", y.shape, layout="channels_last"), name="y")
        graph.output(graph.relu(y * graph.tensor("scale", (y.shape[1], 1, 1))), name="other", layout="channels_last")

    chosen = {"across": across, **epilogues()}
    cases = []
    for number, (name, epilogue) in enumerate(chosen.items()):
        layout = LAYOUTS[number % 2]
        label = {"label": f"{name} {how}"}
        cases.append(
            gradient(
                "dgrad", (2, 10, 8, 7), (6, 5, 3, 3), layout=layout, groups=2, epilogue=epilogue, case=label, **how
            )
        )
        if number % 2:
            cases.append(gradient("wgrad", (2, 6, 8, 7), (10, 3, 3, 3), layout=layout, groups=2, epilogue=epilogue,
                                  case=label, **how))  # fmt: skip
    made = check_cases(cases, guard=True)
    assert all(len(e.plan.kernels) == 1 for e in made)


def test_strict_rounds_every_intermediate():
    def chain(graph: fg.Graph, y: fg.Tensor) -> None:
        graph.output(graph.tanh(y * 0.37) * y, name="y")

    strict = {"options": Options(strict=True)}
    check_cases(
        gradient(kind, (1, 5, 8, 9), (6, 5, 3, 3), "bfloat16", stride=2, padding=1, epilogue=chain, case=strict)
        for kind in KINDS
    )


@pytest.mark.parametrize("kind", ["dgrad", pytest.param("wgrad", marks=pytest.mark.slow)])
def test_special_values(kind):
    check_cases(
        gradient(kind, image, filters, dtype, case={"special": 0.02}, **how)
        for (image, filters, how), dtype in zip(PROBLEMS, itertools.cycle(("float32", "bfloat16", "float64")))
    )


def test_empty_tensors():
    cases = []
    for image, filters in (((0, 3, 5), (4, 3, 3)), ((2, 0, 5), (4, 0, 3)), ((2, 3, 5), (0, 3, 3))):
        for kind, stride in itertools.product(KINDS, (1, 2)):
            cases.append(gradient(kind, image, filters, padding=1, stride=stride, groups=1))
    g = fg.Graph("nothing")
    g.output(g.conv_dgrad(g.tensor("loss", (1, 4, 1)), g.tensor("w", (4, 3, 1)), stride=3, padding=1), name="y")
    check_cases([*cases, g])


@pytest.mark.usefixtures("tiled_gradients")
@pytest.mark.slow
@pytest.mark.parametrize("itype", ["int32", "int64"])
def test_every_tile_of_the_simt_form(itype):
    cases = []
    for schedule in tiles(itype):
        for kind, (image, filters, how) in itertools.product(KINDS, (PROBLEMS[4], PROBLEMS[8], PROBLEMS[11])):
            cases.append(gradient(kind, image, filters, layout="channels_last", case={"schedule": schedule}, **how))
    check_cases(cases, guard=True)


@pytest.mark.parametrize(("start", "count"), [(0, 14), *(pytest.param(k, 60, marks=pytest.mark.slow) for k in (1, 2))])
def test_random_problems(start, count):
    r, cases = random.Random(start), []
    while len(cases) < count:
        found = _drawn(r)
        if found is None:
            continue
        image, filters, _, how = found
        if r.random() < 0.3:
            how["stride"] = 1
            try:
                cases.append(_random_case(r, image, filters, how))
            except ShapeError:
                continue
        else:
            cases.append(_random_case(r, image, filters, how))
    check_cases(cases, guard=start > 0)


def _random_case(r: random.Random, image: Any, filters: Any, how: dict[str, Any]) -> Case:
    def finish(graph: fg.Graph, y: fg.Tensor) -> None:
        if r.random() < 0.5:
            y = graph.relu(y * 0.5 + graph.tensor("bias", (y.shape[1], *(1 for _ in y.shape[2:]))))
        graph.output(y, name="y", layout=r.choice((None, *LAYOUTS)))

    layouts = {"layout": r.choice(LAYOUTS), "other": r.choice(LAYOUTS)}
    dtype = r.choice(("float32", "float32", "bfloat16", "float16"))
    return gradient(r.choice(KINDS), image, filters, dtype, epilogue=finish, **layouts, **how)


def test_few_channels_go_to_direct_convolution():
    """The gradient of a depthwise convolution is one, too, also with a stride."""
    cases = [
        gradient("dgrad", (2, 8, 20, 21), (8, 1, 3, 3), dtype, groups=8, padding=1, layout=layout, mode=mode,
                 case={"family": "direct_convolution"})
        for dtype, layout, mode in (
            ("float32", "contiguous", "convolution"),
            ("bfloat16", "channels_last", "convolution"),
            ("float32", "channels_last", "cross_correlation"),
        )
    ]  # fmt: skip
    cases.append(gradient("dgrad", (1, 1, 30, 40), (3, 1, 5, 4), padding=((1, 3), (0, 2)), dilation=(1, 2)))
    cases.append(gradient("dgrad", (1, 6, 9), (12, 2, 3), groups=3, padding=2))
    strided = gradient("dgrad", (2, 8, 20, 21), (8, 1, 3, 3), groups=8, padding=1, stride=2)
    beyond = gradient("dgrad", (2, 8, 20, 21), (8, 1, 3, 3), groups=8, padding=3)
    made = check_cases([*cases, strided, beyond], guard=True)
    assert [families(e) for e in made] == [["direct_convolution"]] * 6 + [["contraction"]]


def test_torch_agrees():
    torch = pytest.importorskip("torch")
    # Without a library for it, torch adds up sums of bfloat16 in bfloat16.
    dtypes = ("float32", "bfloat16") if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ("float32",)
    for kind, dtype in itertools.product(KINDS, dtypes):
        for number, (image, filters, how) in enumerate(PROBLEMS):
            layouts = {"layout": LAYOUTS[number % 2], "other": LAYOUTS[number // 2 % 2]}
            case = gradient(kind, image, filters, dtype, **layouts, **how)
            (result,) = compare_engines(case.graph, ["torch"]).engines
            assert (result.status, result.ok) == ("ran", True), (kind, image, filters, how, result)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_on_the_gpu(dtype):
    graphs = [
        gradient(kind, image, filters, dtype, layout=layout, other=other, **how).graph
        for kind in KINDS
        for image, filters, how in PROBLEMS
        for layout, other in itertools.product(LAYOUTS, LAYOUTS)
    ]
    check_on_gpu(graphs)


@pytest.mark.gpu
def test_on_the_gpu_with_epilogues():
    graphs = []
    for epilogue, stride in itertools.product(epilogues().values(), (1, 2)):
        for kind, dtype in itertools.product(KINDS, ("float32", "bfloat16")):
            case = gradient(kind, (4, 64, 28, 27), (96, 64, 3, 3), dtype, layout="channels_last",
                            other="channels_last", padding=1, stride=stride, epilogue=epilogue)  # fmt: skip
            graphs.append(case.graph)
    check_on_gpu(graphs)
