"""Pooling and what is fused with it: on the CPU against the reference, and compiled for GPUs.

The references are compared with loops over the definition, element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import check_all, check_on_gpu, compile_for, undecided_share

import fusegraph as fg
from codegen import PORTABLE, best_schedule, schedules
from codegen.pool.schedule import PoolSchedule
from codegen.pool.schedule import schedules as pool_schedules
from codegen.pool.space import normalize
from codegen.spec import PoolSpec
from codegen.windows import Covering, Sliding
from fusegraph import dtypes as dt
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.errors import AttributeValueError, DTypeError, GraphError, ShapeError
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, random_inputs

Array = np.ndarray[Any, Any]
SHAPE = (2, 8, 9, 12)

#: Windows of every kind: overlapping or with gaps, padded on either side, hanging over, dilated.
WINDOWS: tuple[dict[str, Any], ...] = (
    {"window": 3, "stride": 2, "padding": 1},
    {"window": 2},
    {"window": (3, 2), "stride": 1, "padding": ((0, 1), (2, 0))},
    {"window": 3, "stride": 3, "padding": 1, "ceil_mode": True},
    {"window": (2, 3), "stride": (3, 1), "padding": ((2, 0), (0, 2)), "ceil_mode": True},
    {"window": 3, "stride": 2, "dilation": (2, 3)},
)


def forward(shape: tuple[int, ...], dtype: str, how: Mapping[str, Any], **layout: Any) -> fg.Graph:
    """Builds all pooling ops on the same windows."""
    g = fg.Graph(f"pool {dtype} {how}".replace("{", "(").replace("}", ")").replace("'", ""))
    x = g.tensor("x", shape, dtype, **layout)
    g.output(g.max_pool(x, **how), name="max")
    g.output(g.max_pool_index(x, **how), name="index")
    if x.dtype.is_float and "dilation" not in how:
        g.output(g.avg_pool(x, **how), name="mean")
        g.output(g.avg_pool(x, **how, count_include_pad=False), name="mean of the inside")
    return g


def backward(shape: tuple[int, ...], dtype: str, how: Mapping[str, Any], **layout: Any) -> fg.Graph:
    g = fg.Graph(f"backward {dtype}")
    x = g.tensor("x", shape, dtype, **layout)
    size = shape[2:] if "axes" not in how else tuple(shape[a] for a in how["axes"])
    y, index = g.max_pool(x, **how), g.max_pool_index(x, **how)
    loss = g.tensor("loss", y.shape, dtype, strides=y.strides)
    g.output(g.max_pool_backward_index(loss, index, size, **how), name="from the index")
    g.output(g.max_pool_backward(loss, x, **how), name="from x")
    if "dilation" not in how:
        for include in (True, False):
            g.output(g.avg_pool_backward(loss, size, **how, count_include_pad=include), name=f"mean {include}")
    return g


def adaptive(shape: tuple[int, ...], dtype: str, size: Any, **layout: Any) -> fg.Graph:
    g = fg.Graph(f"adaptive {dtype}")
    x = g.tensor("x", shape, dtype, **layout)
    y, index = g.adaptive_max_pool(x, size), g.adaptive_max_pool_index(x, size, dtype="int64")
    loss = g.tensor("loss", y.shape, dtype, strides=y.strides)
    g.output(y, name="max")
    g.output(index, name="index")
    g.output(g.adaptive_avg_pool(x, size), name="mean")
    g.output(g.adaptive_max_pool_backward_index(loss, index, shape[2:]), name="from the index")
    g.output(g.adaptive_max_pool_backward(loss, x), name="from x")
    g.output(g.adaptive_avg_pool_backward(loss, shape[2:]), name="mean backward")
    return g


def local(shape: tuple[int, ...], dtype: str, **layout: Any) -> fg.Graph:
    g = fg.Graph(f"local {dtype}")
    x = g.tensor("x", shape, dtype, **layout)
    g.output(g.local_response_norm(x, 5, alpha=0.5), name="response")
    g.output(g.local_contrast_norm(x, 3, epsilon=0.1), name="contrast")
    loss = g.tensor("loss", shape, dtype, **layout)
    g.output(g.local_response_norm_backward(loss, x, 4, alpha=0.5), name="by response")
    g.output(g.local_contrast_norm_backward(loss, x, (2, 3), epsilon=0.1), name="by contrast")
    g.output(g.global_avg_pool(x), name="mean")
    g.output(g.global_max_pool(x), name="max")
    return g


LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"layout": "NHWC"})


def test_some_windows() -> None:
    graphs = [forward(SHAPE, "float32", WINDOWS[k], **layout) for k, layout in zip((0, 3, 4, 5), LAYOUTS * 2)]
    graphs.append(backward(SHAPE, "float32", WINDOWS[0]))
    results = check_all(graphs)
    assert undecided_share(results, graphs) == 0


@pytest.mark.slow
def test_every_window() -> None:
    graphs = [
        make(SHAPE, "bfloat16", how, **layout) for make in (forward, backward) for how in WINDOWS for layout in LAYOUTS
    ]
    results = check_all(graphs)
    assert undecided_share(results, graphs) == 0


@pytest.mark.slow
def test_adaptive_windows_and_local_norms() -> None:
    sizes = (1, (2, 5), (9, 3), (13, 24), (4, 12))
    graphs = [adaptive(SHAPE, "float32", s, **k) for s, k in zip(sizes, LAYOUTS * 3)]
    graphs += [local(SHAPE, d, **k) for d, k in zip(("float32", "float16", "float64"), LAYOUTS * 2)]
    results = check_all(graphs)
    assert undecided_share(results, graphs) == 0


@pytest.mark.slow
def test_every_dtype() -> None:
    graphs = []
    for dtype in dt.ALL:
        if not dtype.is_bool:
            graphs += [forward(SHAPE, dtype.name, how, **k) for how, k in zip(WINDOWS[::2], LAYOUTS * 2)]
        if dtype.is_float:
            graphs.append(backward(SHAPE, dtype.name, WINDOWS[0], layout="NHWC"))
    for graph in graphs:
        graph.name = f"{graph.name} {len(graph.outputs)}"
    check_all(graphs, inputs=extremes)


def extremes(graph: fg.Graph) -> dict[str, Array]:
    """Returns random values, with NaN, infinities, zeros of both signs and the largest numbers among them."""
    inputs = random_inputs(graph, seed=1, special=0.05)
    rng = np.random.default_rng(2)
    for array in inputs.values():
        if array.dtype.kind in "iu":
            info = np.iinfo(array.dtype)
            array[...] = np.where(rng.random(array.shape) < 0.3, rng.choice([info.min, info.max], array.shape), array)
    return inputs


def strided(shape: tuple[int, ...], strides: tuple[int, ...], **how: Any) -> fg.Graph:
    return forward(shape, "float32", how, strides=strides)


@pytest.mark.slow
def test_ranks_axes_and_strides() -> None:
    """Windows in one to three dimensions, along channels or rows; gaps, repeated and transposed elements."""
    graphs = [
        forward((3, 5, 40), "float32", {"window": 3, "stride": 2, "padding": (1,)}),
        forward((3, 8, 40), "bfloat16", {"window": 4}, layout="NWC"),
        forward((2, 4, 5, 6, 7), "float32", {"window": (2, 3, 2), "stride": (1, 2, 2), "padding": 1}),
        forward((2, 8, 5, 6, 7), "float16", {"window": 3, "stride": 2, "padding": 1}, layout="NDHWC"),
        forward((6, 16), "float32", {"window": 3, "stride": 1, "padding": 1, "axes": -1}),
        forward((6, 16), "float32", {"window": 2, "axes": 0}),
        forward((2, 9, 4, 8), "float32", {"window": 4, "stride": 1, "axes": 1}),
        forward((2, 3, 4, 8), "float32", {"window": (2, 3), "stride": 1, "axes": (0, 3)}, layout="NHWC"),
        forward((1, 1, 1, 1), "float32", {"window": 3, "padding": 1}),
        forward((1, 1, 7, 1), "float32", {"window": (3, 1), "stride": 1}),
        forward((2, 3, 40, 40), "float32", {"window": 21, "stride": 9, "padding": 10}),
        strided((2, 4, 6, 8), (256, 1, 40, 5), window=3, stride=2, padding=1),
        strided((2, 4, 6, 8), (1, 2, 8, 48), window=3, stride=1, padding=1),
        strided((2, 4, 6, 8), (192, 48, 0, 1), window=2),
        strided((2, 4, 6, 8), (0, 0, 8, 1), window=2),
        strided((2, 4, 6, 8), (400, 1, 64, 8), window=3, stride=2, padding=1),
        backward((3, 5, 40), "float32", {"window": 3, "stride": 2, "padding": 1}),
        backward((2, 4, 5, 6, 7), "float32", {"window": 2, "stride": (1, 2, 2), "padding": 1}, layout="NDHWC"),
        backward((6, 16), "float32", {"window": 3, "stride": 1, "padding": 1, "axes": (0,)}),
    ]
    check_all(graphs)


def test_no_elements_and_positions() -> None:
    """An empty batch; the position of each of the elements is what gen_index counts."""
    g = fg.Graph("empty")
    x = g.tensor("x", (0, 4, 6, 6))
    g.output(g.max_pool(x, 2) + 1.0, name="y")
    g.output(g.max_pool_backward(g.tensor("loss", (0, 4, 3, 3)), x, 2), name="dx")
    h = fg.Graph("positions")
    image = h.tensor("image", (2, 3, 6, 8))
    h.output(h.max_pool(h.gen_index(image, axis=3), 3, 2, 1), name="last columns")
    h.output(h.max_pool_index(h.gen_index(image, axis=2), 3, 2, 1), name="last rows")
    h.output(h.avg_pool(image, 2) + h.cast(h.gen_index(h.avg_pool(image, 2), axis=2), "float32"), name="rows")
    results = check_all([g, h, *(local(shape, "float32") for shape in ((0, 4, 6, 6), (2, 0, 6, 6)))])
    assert len(results) == 4


# ---- fusion


def normalized(g: fg.Graph) -> None:
    """Pooling with batch norm and relu before and a residual after."""
    x, scale, bias = g.tensor("x", (2, 16, 12, 12), layout="NHWC"), *(g.tensor(n, (16, 1, 1)) for n in ("s", "b"))
    residual = g.tensor("residual", (2, 16, 6, 6), layout="NHWC")
    g.output(g.gelu(g.max_pool(g.relu(x * scale + bias), 3, 2, 1) + residual), name="y")


def side_by_side(g: fg.Graph) -> None:
    """Maximum, its index, and means of the same windows."""
    x = g.tensor("x", (2, 3, 16, 16))
    for op in (g.max_pool, g.max_pool_index, g.avg_pool):
        g.output(op(x, 3, 2, 1), name=op.__name__)


def response(g: fg.Graph) -> None:
    """Local response norm: a function of the window around each element and of the element itself."""
    g.output(g.local_response_norm(g.tensor("x", (2, 16, 6, 6), layout="NHWC"), alpha=0.1), name="y")


def both(g: fg.Graph) -> None:
    """Pooling of a computed image that is also an output: it is computed for elements and for windows."""
    x = g.tensor("x", (2, 4, 8, 8))
    y = g.output(g.relu(x), name="y")
    g.output(y - g.avg_pool(y, 3, 1, 1), name="z")


def different(g: fg.Graph) -> None:
    """Two forms of windows, one after the other and side by side."""
    x = g.tensor("x", (2, 4, 16, 16))
    y = g.max_pool(x, 2)
    g.output(g.avg_pool(y, 3, 2, 1), name="y")
    g.output(g.avg_pool(x, 3, 2, 1) * 2.0, name="z")


def costly(g: fg.Graph) -> None:
    """Pooling of a costly function that windows share, of so few elements that another kernel would take longer."""
    g.output(g.avg_pool(g.gelu(g.tensor("x", (2, 4, 16, 16))), 3, 1, 1), name="y")


def expensive_once(g: fg.Graph) -> None:
    """Pooling of a costly function where every element is in one window."""
    g.output(g.avg_pool(g.gelu(g.tensor("x", (2, 4, 16, 16))), 2), name="y")


def shared(g: fg.Graph) -> None:
    """A cheap op before windows of two forms: each kernel computes it again."""
    y = g.relu(g.tensor("x", (2, 4, 16, 16)))
    g.output(g.max_pool(y, 2), name="y")
    g.output(g.avg_pool(y, 3, 2, 1), name="z")


def reduced(g: fg.Graph) -> None:
    """A reduction of a pooling result, with a convolution before."""
    x, w = g.tensor("x", (2, 4, 16, 16)), g.tensor("w", (8, 4, 3, 3))
    y = g.max_pool(g.relu(g.conv_fprop(x, w, padding=1)), 2)
    g.output(g.reduction(y, "avg", (2, 3)), name="y")


FUSED: dict[Callable[[fg.Graph], None], int] = {
    normalized: 1, side_by_side: 1, response: 1, both: 1, different: 3, costly: 1, expensive_once: 1, shared: 2,
    reduced: 3,
}  # fmt: skip


def built(make: Callable[[fg.Graph], None], io: str = "float32") -> fg.Graph:
    g = fg.Graph(make.__name__, io_dtype=io)
    make(g)
    return g


def test_what_is_fused() -> None:
    graphs = [built(make) for make in FUSED]
    assert [len(plan(g).kernels) for g in graphs] == list(FUSED.values())
    reasons = {d.reason for g in graphs for d in plan(g).partition.decisions if not d.fused}
    assert any("have different windows" in r or "comes before windows" in r for r in reasons)
    check_all(graphs)


def test_a_costly_function_of_many_elements_is_a_kernel_of_its_own() -> None:
    graph = fg.Graph("large")
    graph.output(graph.avg_pool(graph.gelu(graph.tensor("x", (16, 32, 64, 64))), 5, 1, 2), name="y")
    assert len(plan(graph).kernels) == 2
    assert any("'gelu' would be computed 10 times" in d.reason for d in plan(graph).partition.decisions)


@pytest.mark.slow
def test_what_is_fused_in_other_ways() -> None:
    check_all([built(make, "bfloat16") for make in FUSED])
    check_all([built(make) for make in FUSED], strict=True)
    check_all([built(make) for make in FUSED], fusion=False)


def test_every_element_is_read_once() -> None:
    (kernel,) = plan(built(normalized)).kernels
    assert sum(t.nbytes for t in kernel.arguments) == 4 * (2 * 16 * 144 + 2 * 16 + 2 * 2 * 16 * 36)


@pytest.mark.slow
def test_every_schedule_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [
        forward((2, 8, 9, 12), "bfloat16", {"window": 3, "stride": 2, "padding": 1}, layout="NHWC"),
        forward((2, 3, 9, 16), "bfloat16", {"window": 3, "stride": 2, "padding": 1}),
        forward((2, 3, 9, 16), "float32", {"window": 3, "stride": 1, "padding": 1}),
        forward((2, 3, 9, 16), "float32", {"window": (2, 3), "stride": 1, "dilation": 2}),
        backward((2, 8, 9, 12), "float32", {"window": 3, "stride": 2, "padding": 1}, layout="NHWC"),
        built(normalized),
        built(response),
    ]
    seen, made = set(), []
    for graph in graphs:
        specs = [k.group.lowered.spec for k in plan(graph).kernels]
        for spec in specs:
            assert isinstance(spec, PoolSpec)
            alone = tuple(pool_schedules(spec, PORTABLE))  # of threads that fold their windows alone
            seen.update((s.vector > 1, s.rows, s.cols, s.down) for s in alone)
            for schedule in dict.fromkeys((*schedules(spec), *alone, *_others(spec, alone[0]))):

                def chosen(other: Any, *_: Any, spec: Any = spec, schedule: Any = schedule) -> Any:
                    return schedule if other == spec else best_schedule(other)

                monkeypatch.setattr("fusegraph.plan.best_schedule", chosen)
                made.append(CpuExecutable(graph, Options(), lazy=True))
    build_together(made)
    for executable in made:
        result = check_executable(executable, random_inputs(executable.graph))
        assert result.ok, f"{[k.choice.schedule for k in executable.plan.kernels]}: {result}"
    assert {s[1:3] for s in seen} >= {(1, 1), (2, 1), (1, 2), (1, 8)}
    assert {s[3] for s in seen} >= {1, 2, 4}


def _others(spec: PoolSpec, best: PoolSchedule) -> list[PoolSchedule]:
    """Returns schedules that the cost model would not choose here, with 64-bit offsets among them."""
    single = replace(best, vector=1, rows=1, cols=1, down=1)
    found = [single, replace(single, itype="int64")]
    if all(isinstance(window, Sliding) for _, window in normalize(spec).windows):
        found += [replace(single, cols=8), replace(best, rows=1, cols=2)]
    return found


def test_a_window_of_all_elements_is_a_row() -> None:
    """One window is folded by as many threads as a row is reduced by, unless where its maximum is matters."""
    g = fg.Graph("whole")
    x = g.tensor("x", (2, 3, 9, 10), layout="NHWC")
    g.output(g.adaptive_avg_pool(g.relu(x), 1), name="mean")
    g.output(g.max_pool(x, (11, 12), 3, padding=((2, 0), (1, 1))) * 2.0, name="max")
    g.output(g.avg_pool(x, (12, 11), 3, padding=((2, 1), (1, 0))), name="padded")
    h = fg.Graph("where")
    h.output(h.adaptive_max_pool_index(h.tensor("x", (2, 3, 9, 10)), 1), name="index")
    assert {k.group.family for k in plan(g).kernels} == {"rows"}
    assert [k.group.family for k in plan(h).kernels] == ["pool"]
    check_all([g, h])


def test_the_image_says_how_channels_lie() -> None:
    """Channels are folded in vectors whatever else is read for every window, and whichever comes first."""
    for names in (("x", "y"), ("y", "x")):
        g = fg.Graph("residual", io_dtype="bfloat16")
        t = {n: g.tensor(n, (2, 16, 8, 8) if n == "x" else (2, 16, 4, 4), layout="NHWC") for n in names}
        g.output(t["y"] + g.max_pool(t["x"], 2), name="z")
        (kernel,) = plan(g).kernels
        assert normalize(kernel.group.lowered.spec).outer[-1] == 16


def test_windows_in_simpler_words() -> None:
    """Windows that share elements out evenly slide; those of one element are no windows."""

    def windows(g: fg.Graph) -> list[Any]:
        (kernel,) = plan(g).kernels
        return [window for _, window in normalize(kernel.group.lowered.spec).windows]

    g = fg.Graph("even")
    g.output(g.adaptive_avg_pool(g.tensor("x", (2, 3, 8, 9)), (4, 9)), name="y")
    assert windows(g) == [Sliding(8, 2, 2, 1, 0)]
    h = fg.Graph("gradient")
    h.output(h.adaptive_avg_pool_backward(h.tensor("x", (2, 3, 4, 9)), (8, 9)), name="y")
    assert windows(h) == [Covering(4, 2, 2, 1, 0)]


# ---- what is refused


X, N, M = (1, 2, 8, 8), (4, 4), (1, 2, 4, 4)


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda g, x, b: g.max_pool(x), GraphError, "window"),
        (lambda g, x, b: g.max_pool(x, 0), AttributeValueError, "window is an integer of at least 1, or 2 of them"),
        (lambda g, x, b: g.max_pool(x, 2, 0), AttributeValueError, "stride is an integer of at least 1"),
        (lambda g, x, b: g.max_pool(x, 2, padding=-1), AttributeValueError, "padding is an integer of at least 0"),
        (lambda g, x, b: g.max_pool(x, (2, 2, 2)), AttributeValueError, "or 2 of them"),
        (lambda g, x, b: g.max_pool(x, 2, ceil_mode=1), AttributeValueError, "ceil_mode is True or False"),
        (lambda g, x, b: g.max_pool(x, 9), ShapeError, "a window that reaches over 9 elements does not fit 8"),
        (lambda g, x, b: g.max_pool(x, 2, axes=()), AttributeValueError, "at least one axis"),
        (lambda g, x, b: g.max_pool(x, 2, axes=4), AttributeValueError, "axis 4 is not one of the 4 axes"),
        (lambda g, x, b: g.max_pool(g.tensor("m", N), 2), ShapeError, "of others name the axes"),
        (lambda g, x, b: g.max_pool(g.tensor("m", (1, 1, 0, 4)), 2), ShapeError, "axis 2 has no elements to pool"),
        (lambda g, x, b: g.max_pool(b, 2), DTypeError, "does not take bool"),
        (lambda g, x, b: g.avg_pool(g.cast(x, "int8"), 2), DTypeError, "avg_pool of int8 is not exact"),
        (lambda g, x, b: g.avg_pool(x, 2, dilation=2), GraphError, "dilation"),
        (lambda g, x, b: g.max_pool_index(x, 2, dtype="int8"), DTypeError, "positions are int32 or int64"),
        (lambda g, x, b: g.adaptive_avg_pool(x, 0), AttributeValueError, "size is an integer of at least 1"),
        (lambda g, x, b: g.avg_pool_backward(x, 5, 2), ShapeError, r"the loss of an image \[1, 2, 5, 5\] is"),
        (lambda g, x, b: g.max_pool_backward_index(x, x, 16, 2), DTypeError, "takes positions of integers"),
        (lambda g, x, b: g.max_pool_backward(x, x, 2), ShapeError, r"is \[1, 2, 4, 4\], got \[1, 2, 8, 8\]"),
        (lambda g, x, b: g.max_pool_backward_index(x, g.tensor("i", M, "int8"), 16, 2), ShapeError, "an index for"),
        (lambda g, x, b: g.max_pool_index(g.tensor("h", (1, 1, 2**16, 2**16)), 2), ShapeError, "positions at most"),
        (lambda g, x, b: g.local_contrast_norm(x, 3, epsilon=0), AttributeValueError, "epsilon is positive"),
        (lambda g, x, b: g.local_response_norm(x, axis=7), AttributeValueError, "axis 7"),
        (lambda g, x, b: g.global_avg_pool(g.cast(x, "int32")), DTypeError, "does not take int32"),
    ],
)  # fmt: skip
def test_refused(build: Callable[..., Any], error: type[Exception], text: str) -> None:
    g = fg.Graph("refused")
    with pytest.raises(error, match=text):
        build(g, g.tensor("x", X), g.tensor("b", X, "bool"))


def test_cudnn_has_no_pooling() -> None:
    from fusegraph.lowering import cudnn
    from fusegraph.lowering.base import Declined, GroupView

    g = fg.Graph("cudnn")
    g.output(g.max_pool(g.tensor("x", X), 2), name="y")
    with pytest.raises(Declined, match="cuDNN's Python API has no pooling"):
        cudnn.accept(GroupView(g, g.nodes, {n: k for k, n in enumerate(g.nodes)}), Options())


# ---- sources


def golden_graphs(images: int = 64) -> dict[str, fg.Graph]:
    channels = fg.Graph("maxpool", io_dtype="bfloat16")
    x = channels.tensor("x", (images, 256, 56, 56), layout="NHWC")
    channels.output(channels.max_pool(x, 3, 2, 1), name="y")
    planes = fg.Graph("maxpool_index", io_dtype="float32")
    x = planes.tensor("x", (images, 256, 56, 56))
    planes.output(planes.max_pool(planes.relu(x), 3, 2, 1), name="y")
    planes.output(planes.max_pool_index(planes.relu(x), 3, 2, 1), name="index")
    gradient = fg.Graph("avgpool_backward", io_dtype="bfloat16")
    loss = gradient.tensor("loss", (images, 256, 28, 28), layout="NHWC")
    gradient.output(gradient.avg_pool_backward(loss, 56, 3, 2, 1, count_include_pad=False), name="y")
    shared = fg.Graph("adaptive_avgpool", io_dtype="float32")
    shared.output(shared.adaptive_avg_pool(shared.tensor("x", (8, 64, 28, 28)), 13), name="y")
    return {"maxpool": channels, "maxpool_index": planes, "avgpool_backward": gradient, "adaptive_avgpool": shared}


@pytest.mark.parametrize("name", list(golden_graphs()))
def test_golden_source(name: str) -> None:
    (kernel,) = plan(golden_graphs()[name]).kernels
    check_golden(name, kernel.source.code)


def gpu_graphs() -> list[fg.Graph]:
    graphs = [
        make((8, c, 30, 32), d, how, **layout)
        for make in (forward, backward)
        for how in (WINDOWS[0], WINDOWS[2], WINDOWS[5])
        for c, layout in ((16, {"layout": "NHWC"}), (3, {}))
        for d in ("float32", "bfloat16")
    ]
    graphs += [adaptive((4, 16, 14, 14), d, (5, 7), **k) for d in ("float32", "float16") for k in LAYOUTS]
    graphs += [local((4, 16, 14, 14), "bfloat16", **k) for k in LAYOUTS]
    for number, graph in enumerate(graphs):
        graph.name = f"pool{number}"
    return graphs + [built(make, "bfloat16") for make in FUSED] + list(golden_graphs(2).values())


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_compiles_for_gpus(arch: str) -> None:
    graphs = [*golden_graphs().values(), built(normalized, "bfloat16"), built(side_by_side), local(SHAPE, "float16")]
    graphs += [backward(SHAPE, "bfloat16", WINDOWS[0], layout="NHWC"), forward(SHAPE, "float64", WINDOWS[2])]
    assert [k.name for k in compile_for(arch, graphs) if k.spill_bytes] == []


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    check_on_gpu(gpu_graphs())
