"""Norms, their statistics and gradients: right against float64 and against finite differences, in as few kernels as can
be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import check_all, check_on_gpu, compile_for, executables, share
from test_composite import MADE

import fusegraph as fg
from codegen.rows.schedule import RowsSchedule
from fusegraph.engines.reference import evaluate
from fusegraph.errors import AttributeValueError, DTypeError, GraphError, ShapeError
from fusegraph.lowering.views import divided
from fusegraph.ops import TABLE, Kind
from fusegraph.passes.decompose import decompose
from fusegraph.plan import plan
from fusegraph.report.check import random_inputs, run

Results = tuple[fg.Tensor, ...]
Make = Callable[[fg.Graph, fg.Tensor], Results]


def weights(g: fg.Graph, x: fg.Tensor, axes: tuple[int, ...], names: str = "scale bias") -> list[fg.Tensor]:
    """Adds inputs that vary along axes only, as a norm's scale and bias do."""
    shape = tuple(n if d in axes else 1 for d, n in enumerate(x.shape))
    return [g.tensor(name, shape) for name in names.split()]


def statistics(g: fg.Graph, x: fg.Tensor, axes: tuple[int, ...], names: str) -> list[fg.Tensor]:
    """Adds inputs that are constant along axes, as a norm's statistics are."""
    shape = tuple(1 if d in axes else n for d, n in enumerate(x.shape))
    dtype = "float64" if x.dtype.name == "float64" else "float32"
    return [g.tensor(name, shape, dtype) for name in names.split()]


def last(x: fg.Tensor) -> tuple[int, ...]:
    return (x.rank - 1,)


def batch(x: fg.Tensor) -> tuple[int, ...]:
    return tuple(d for d in range(x.rank) if d != 1)


def spatial(x: fg.Tensor) -> tuple[int, ...]:
    return tuple(range(2, x.rank))


def forward(name: str, axes: Any, weighted: Any, names: str = "scale bias") -> Make:
    def make(g: fg.Graph, x: fg.Tensor) -> Results:
        how = {} if name == "instancenorm" else {"axes": axes(x)}
        return getattr(g, name)(x, *weights(g, x, weighted(x), names), norm_forward_phase="training", **how)

    return make


def backward(name: str, axes: Any, weighted: Any, names: str = "mean inv_variance") -> Make:
    def make(g: fg.Graph, x: fg.Tensor) -> Results:
        loss = g.tensor("loss", x.shape, strides=x.strides)
        how = {"axes": axes(x)} if "axes" in TABLE[name].attributes else {}
        scale = weights(g, x, weighted(x), "scale")
        return getattr(g, name)(loss, x, *scale, *statistics(g, x, axes(x), names), **how)

    return make


def batchnorm(g: fg.Graph, x: fg.Tensor) -> Results:
    running = statistics(g, x, batch(x), "running_mean running_var")
    return g.batchnorm(x, *weights(g, x, (1,)), *running, momentum=0.3)


def batchnorm_inference(g: fg.Graph, x: fg.Tensor) -> Results:
    return (g.batchnorm_inference(x, *statistics(g, x, batch(x), "mean inv_variance"), *weights(g, x, (1,))),)


def softmax_backward(name: str) -> Make:
    return lambda g, x: (getattr(g, name)(g.tensor("loss", x.shape, strides=x.strides), x),)


def groupnorm(g: fg.Graph, x: fg.Tensor) -> Results:
    return g.groupnorm(x, *weights(g, x, (1,)), groups=groups_of(x), norm_forward_phase="training")


def groups_of(x: fg.Tensor) -> int:
    return next(k for k in (4, 3, 2, 1) if x.shape[1] % k == 0)


def groupnorm_backward(g: fg.Graph, x: fg.Tensor) -> Results:
    loss, groups = g.tensor("loss", x.shape, strides=x.strides), groups_of(x)
    dtype = "float64" if x.dtype.name == "float64" else "float32"
    kept = [g.tensor(name, (x.shape[0], groups, 1, 1), dtype) for name in ("mean", "inv_variance")]
    return g.groupnorm_backward(loss, x, *weights(g, x, (1,), "scale"), *kept, groups=groups)


def channel(_: fg.Tensor) -> tuple[int, ...]:
    return (1,)


#: For an x of [N, C, H, W]; all but those of softmax are of it.
NORMS: dict[str, Make] = {
    "layernorm": forward("layernorm", last, last),
    "adalayernorm": forward("adalayernorm", last, lambda x: (0, 3)),
    "instancenorm": forward("instancenorm", spatial, channel),
    "rmsnorm": forward("rmsnorm", last, last, "scale"),
    "batchnorm": batchnorm,
    "batchnorm_inference": batchnorm_inference,
    "genstats": lambda g, x: g.genstats(x),
    "softmax_backward": softmax_backward("softmax_backward"),
    "log_softmax_backward": softmax_backward("log_softmax_backward"),
    "layernorm_backward": backward("layernorm_backward", last, last),
    "adalayernorm_backward": backward("adalayernorm_backward", last, lambda x: (0, 3)),
    "instancenorm_backward": backward("instancenorm_backward", spatial, channel),
    "batchnorm_backward": backward("batchnorm_backward", batch, channel),
    "groupnorm": groupnorm,
    "groupnorm_backward": groupnorm_backward,
    "rmsnorm_backward": backward("rmsnorm_backward", last, last, "inv_variance"),
}
#: Kernels of each: sums along other axes than the norm's, as those by weights are, are another one.
KERNELS = dict.fromkeys(NORMS, 1) | {
    "layernorm_backward": 2,
    "adalayernorm_backward": 2,
    "instancenorm_backward": 2,
    "rmsnorm_backward": 2,
    "groupnorm_backward": 2,
}


def graph_of(make: Make, shape: tuple[int, ...], dtype: str = "float32", **how: Any) -> fg.Graph:
    g = fg.Graph("norm", io_dtype=dtype)
    for number, tensor in enumerate(make(g, g.tensor("x", shape, **how))):
        g.output(tensor, name=f"y{number}")
    return g


def test_every_composite_has_a_case() -> None:
    """Those of pooling and of random numbers have theirs in the files named so."""
    here = {f"fusegraph.ops.{name}" for name in ("composite", "norm", "norm_backward")}
    composites = {op.name for op in TABLE.values() if op.kind is Kind.COMPOSITE and op.expand.__module__ in here}
    assert {name.split()[0] for name in MADE} | set(NORMS) == composites


QUICK = ("layernorm", "batchnorm", "layernorm_backward", "groupnorm", "softmax_backward")


@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(NORMS), marks=pytest.mark.slow)], ids=["quick", "all"])
def test_shapes(names: tuple[str, ...]) -> None:
    graphs = {name: graph_of(NORMS[name], (2, 3, 4, 5)) for name in names}
    for name, g in graphs.items():
        assert len(plan(g).kernels) <= KERNELS[name], name
    if names != QUICK:
        graphs |= {f"{name} of one": graph_of(NORMS[name], (1, 2, 1, 1)) for name in names}
    check_all(list(graphs.values()))


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 1000, 65537])
def test_rows_of(length: int) -> None:
    check_all([graph_of(make, (1 if length > 5000 else 3, 2, 1, length)) for make in NORMS.values()])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "float8_e4m3"])
def test_dtypes(dtype: str) -> None:
    graphs = [graph_of(make, (3, 5, 4, 16), dtype) for make in NORMS.values()]
    check_all(graphs)
    check_all(graphs, strict=True)


@pytest.mark.slow
def test_layouts_and_single_kernels() -> None:
    graphs = [graph_of(make, (3, 16, 6, 8), layout="NHWC") for make in NORMS.values()]
    check_all(graphs)
    check_all(graphs, fusion=False)
    for g in graphs:
        if g.outputs[0].shape == g.inputs[0].shape:
            assert g.outputs[0].strides == (768, 1, 128, 16)


@pytest.mark.slow
def test_no_elements() -> None:
    check_all([graph_of(make, (0, 3, 4, 8)) for make in NORMS.values()])
    check_all([graph_of(NORMS[name], (2, 3, 4, 0)) for name in ("layernorm", "batchnorm_backward", "genstats")])


def test_half_as_many_reads() -> None:
    """In bfloat16 nothing but operands and results is in memory: no float32 copy of x goes from kernel to kernel."""
    for name, make in NORMS.items():
        made = plan(graph_of(make, (8, 32, 8, 64), "bfloat16"))
        large = [t for k in made.kernels for t in k.group.writes if t.size == 8 * 32 * 8 * 64]
        assert {t.dtype.name for t in large} <= {"bfloat16"}, name
        assert len(large) <= 1, name


def test_sums_by_weights_are_read_across_rows() -> None:
    """Though the statistics lie along the columns that are summed: they are few."""
    _, sums = plan(graph_of(NORMS["layernorm_backward"], (1, 1, 2048, 512))).kernels
    assert isinstance(sums.choice.schedule, RowsSchedule)
    assert sums.choice.schedule.across


def test_the_reference_is_what_the_nodes_compute() -> None:
    for make in NORMS.values():
        g = graph_of(make, (2, 3, 4, 10), "float64")
        inputs = random_inputs(g, 1)
        parts = decompose(g)
        whole, made = evaluate(g, inputs), evaluate(parts.graph, inputs)
        for a, b in zip(g.outputs, parts.graph.outputs, strict=True):
            np.testing.assert_allclose(made[b], whole[a], rtol=1e-12, atol=1e-12)


# ---- gradients


def result(make: Callable[[fg.Graph], Any], inputs: dict[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Evaluates a graph of float64 by the reference."""
    g = fg.Graph("result", io_dtype="float64")
    found = make(g)
    return [np.asarray(evaluate(g, inputs)[t]) for t in (found if isinstance(found, tuple) else (found,))]


GRADIENTS = {
    "layernorm": (3,),
    "adalayernorm": (3,),
    "instancenorm": (2, 3),
    "batchnorm": (0, 2, 3),
    "groupnorm": (2, 3),
    "rmsnorm": (3,),
    "softmax": (),
    "log_softmax": (),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_the_result(name: str) -> None:
    """Against central differences of sum(loss * result), element by element."""
    shape, rng = (2, 4, 2, 3), np.random.default_rng(0)
    channels = dict.fromkeys(("instancenorm", "batchnorm", "groupnorm"), (1, 4, 1, 1))
    own = {"adalayernorm": (2, 1, 1, 3), **channels}.get(name, (3,))
    sizes = {"x": shape, **({"scale": own, "bias": own} if GRADIENTS[name] else {})}
    if name == "rmsnorm":
        del sizes["bias"]
    values = {key: rng.standard_normal(size) for key, size in sizes.items()}
    loss = rng.standard_normal(shape)
    phase = {"norm_forward_phase": "training"} if "norm_forward_phase" in TABLE[name].attributes else {}
    groups = {"groups": 2} if name == "groupnorm" else {}

    def forward_of(g: fg.Graph) -> Any:
        return getattr(g, name)(*(g.tensor(key, size) for key, size in sizes.items()), **phase, **groups)

    kept = result(forward_of, values)
    if GRADIENTS[name]:
        keys = ["scale", *("mean", "inv_variance")[-len(kept[1:3]) :]]
        taken = {"loss": loss, "x": values["x"], "scale": values["scale"], **dict(zip(keys[1:], kept[1:]))}
    else:
        taken = {"loss": loss, "y": kept[0]}
    found = result(
        lambda g: getattr(g, f"{name}_backward")(*(g.tensor(k, v.shape) for k, v in taken.items()), **groups), taken
    )
    for key, gradient in zip(sizes, found, strict=True):
        numeric, step = np.zeros(sizes[key]), 1e-5
        for place in np.ndindex(*sizes[key]):
            ends = []
            for move in (step, -step):
                moved = values[key].copy()
                moved[place] += move
                ends.append((result(forward_of, {**values, key: moved})[0] * loss).sum())
            numeric[place] = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-7, err_msg=key)


def test_running_statistics() -> None:
    """As torch: the variance that is kept is n / (n - 1) times that of the batch."""
    g = graph_of(batchnorm, (4, 2, 3, 5))
    (made,) = executables([g])
    inputs = random_inputs(g, 3)
    y = run(made, inputs)
    x = inputs["x"].astype(np.float64)
    mean, var = (f(x, axis=(0, 2, 3), keepdims=True) for f in (np.mean, np.var))
    fresh = np.var(x, axis=(0, 2, 3), keepdims=True, ddof=1)
    np.testing.assert_allclose(y["y1"], mean, atol=1e-6)
    np.testing.assert_allclose(y["y2"], 1 / np.sqrt(var + 1e-5), rtol=1e-5)
    np.testing.assert_allclose(y["y3"], 0.7 * inputs["running_mean"] + 0.3 * mean, atol=1e-6)
    np.testing.assert_allclose(y["y4"], 0.7 * inputs["running_var"] + 0.3 * fresh, atol=1e-6)


def test_large_offsets() -> None:
    """Statistics of numbers of mean 1e4 and spread 1."""
    names = ("layernorm", "batchnorm", "instancenorm")
    made = executables([graph_of(NORMS[name], (2, 4, 1, 3000)) for name in names])
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((2, 4, 1, 3000)) + 1e4).astype(np.float32)
    for executable, axes in zip(made, ((3,), (0, 2, 3), (2, 3))):
        y = run(executable, {**random_inputs(executable.graph), "x": x})
        exact = 1 / np.sqrt(x.astype(np.float64).var(axis=axes, keepdims=True) + 1e-5)
        assert np.abs(y["y2"] / exact - 1).max() < 1e-5


@pytest.mark.slow
def test_special_values() -> None:
    names = ("layernorm", "batchnorm", "softmax_backward", "layernorm_backward")
    check_all([graph_of(NORMS[n], (4, 8, 3, 9)) for n in names], inputs=lambda g: random_inputs(g, 2, special=0.01))


def test_results_that_nobody_takes_cost_nothing() -> None:
    g = fg.Graph("relu_norm", io_dtype="bfloat16")
    x = g.tensor("x", (8, 16, 6, 6), layout="NHWC")
    y, *_ = g.batchnorm(x, *weights(g, x, (1,)))
    g.output(g.relu(y), name="y")
    (kernel,) = plan(g).kernels
    assert [t.name for t in kernel.group.writes] == ["y"]
    check_all([g])


def test_residual_add_and_rmsnorm() -> None:
    """Both results of a transformer's block, and the statistic: one kernel."""
    g = fg.Graph("residual_rmsnorm", io_dtype="bfloat16")
    x, residual, scale = g.tensor("x", (6, 96)), g.tensor("residual", (6, 96)), g.tensor("scale", (96,))
    h = g.output(x + residual, name="h")
    for number, tensor in enumerate(g.rmsnorm(h, scale, norm_forward_phase="training", name="y")):
        g.output(tensor, name=f"y{number}")
    assert len(plan(g).kernels) == 1
    check_all([g])


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_groupnorm_and_what_surrounds_it_are_one_kernel(layout: str) -> None:
    """The channels are divided in the kernel's space alone: no tensor is copied into another shape."""
    graphs = []
    for dtype in ("float32", "bfloat16"):
        g = fg.Graph("groupnorm_block", io_dtype=dtype)
        x, residual = (g.tensor(name, (2, 8, 4, 6), layout=layout) for name in ("x", "residual"))
        h = g.output(x + residual, name="h")
        y = g.groupnorm(h, *weights(g, x, (1,)), groups=4)
        g.output(g.swish(y) * g.tensor("gate", (2, 8, 1, 1)) + h, name="y")
        graphs.append(g)
        assert len(plan(g).kernels) == 1
        assert g.outputs[1].strides == x.strides
    check_all(graphs)


def test_groupnorm_after_a_convolution() -> None:
    """What is fused with the convolution stays with it."""
    g = fg.Graph("conv_groupnorm")
    x, w = g.tensor("x", (2, 4, 6, 6), layout="NHWC"), g.tensor("w", (8, 4, 3, 3))
    y = g.groupnorm(
        g.conv_fprop(x, w, padding=1) + g.tensor("b", (8, 1, 1)),
        *weights(g, g.tensor("like", (1, 8, 1, 1)), (1,)),
        groups=2,
    )
    g.output(g.relu(y), name="y")
    kernels = plan(g).kernels
    assert [k.group.family for k in kernels][-1] == "rows"
    assert len(kernels) == 2
    check_all([g])


def test_a_norm_of_rows_behind_one_of_groups_is_one_kernel() -> None:
    """Its kernel is one of rows as they are, not of divided ones."""
    graph = fg.Graph("test")
    x = graph.tensor("x", (2, 6, 9))
    y, *_ = graph.groupnorm(x, *weights(graph, x, (1,)), groups=3, norm_forward_phase="training")
    z, *_ = graph.layernorm(graph.swish(y), *weights(graph, x, (2,), "factor term"), norm_forward_phase="training")
    graph.output(graph.softmax(z), name="z")
    assert len(plan(graph).kernels) == 2
    check_all([graph])


def test_dimensions_that_are_divided() -> None:
    assert divided((2, 8, 5), (2, 4, 2, 5)) == ((2,), (4, 2), (5,))
    assert divided((6,), (1, 2, 3, 1)) == ((1, 2, 3, 1),)
    assert divided((2, 8), (4, 2, 2)) is None
    assert divided((2, 8), (16,)) is None
    assert divided((0, 8), (0, 2, 4)) is None


def test_cross_entropy_is_one_kernel() -> None:
    """-log(softmax(x))[target]: the logits are read once."""
    graphs = []
    for dtype in ("float32", "bfloat16"):
        g = fg.Graph("cross_entropy", io_dtype=dtype)
        x, target = g.tensor("x", (12, 300)), g.tensor("target", (12, 1), "int32")
        chosen = g.binary_select(x, 0.0, g.cmp_eq(g.gen_index(x, axis=1), target))
        loss = g.logsumexp(x, 1) - g.reduction(chosen, "add", 1)
        g.output(loss, name="loss", dtype="float32")
        graphs.append(g)
        (kernel,) = plan(g).kernels
        assert sum(t.nbytes for t in kernel.arguments) < x.nbytes * 1.1
    check_all(graphs)


def test_names_of_results() -> None:
    g = fg.Graph("names")
    x = g.tensor("x", (2, 3, 4))
    y, mean, inverse = g.batchnorm(x, *weights(g, x, (1,)), name="norm")
    assert (y.name, mean.name, inverse.name) == ("norm", "norm mean", "norm inv_variance")
    node = g.producer(mean)
    assert node is not None
    assert node is g.producer(y)
    assert node.outputs == (y, mean, inverse)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda g, x: g.batchnorm(x, x, x, x), ShapeError, "go together"),
        (lambda g, x: g.batchnorm(x, x, x, x, x), ShapeError, "in_running_mean has one element a channel"),
        (lambda g, x: g.batchnorm(x, x), GraphError, "missing a required argument: 'bias'"),
        (lambda g, x: g.batchnorm(x, x, x, momentum=2.0), AttributeValueError, "momentum is between 0 and 1"),
        (
            lambda g, x: g.layernorm(x, x, x, norm_forward_phase="test"),
            AttributeValueError,
            "'inference' or 'training'",
        ),
        (lambda g, x: g.instancenorm(x, x, x), ShapeError, "images, channels and positions"),
        (lambda g, x: g.groupnorm(x, x, x, groups=3), ShapeError, "8 channels are not 3 groups"),
        (lambda g, x: g.groupnorm(x, x, x, groups=0), AttributeValueError, "groups is a number of groups"),
        (lambda g, x: g.groupnorm_backward(x, x, x, x, x, groups=2), ShapeError, "mean has one element a group"),
        (lambda g, x: g.genstats(g.tensor("v", (3,))), ShapeError, "images and channels"),
        (lambda g, x: g.softmax_backward(x, g.tensor("y", (1, 8))), ShapeError, "y .* has not the shape of loss"),
        (lambda g, x: g.rmsnorm_backward(x, x, g.cast(x, "int8"), x), DTypeError, "does not take int8"),
        (lambda g, x: g.genstats(g.cast(x, "int32")), DTypeError, "genstats does not take int32"),
    ],
)
def test_refused(make: Any, error: type[GraphError], text: str) -> None:
    g = fg.Graph("refused")
    with pytest.raises(error, match=text):
        make(g, g.tensor("x", (4, 8)))


# ---- GPUs


def gpu_graphs() -> list[fg.Graph]:
    graphs = [graph_of(make, (4, 64, 28, 32), d) for make in NORMS.values() for d in ("float32", "bfloat16")]
    return graphs + [graph_of(make, (4, 64, 28, 32), "bfloat16", layout="NHWC") for make in NORMS.values()]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_compiles_for_gpus(arch: str) -> None:
    assert [k.name for k in compile_for(arch, share(arch, gpu_graphs())) if k.spill_bytes] == []


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    check_on_gpu(gpu_graphs())
