"""`from_cudnn`: graphs of cudnn-frontend's Python API, as users write them and as our own lowering does, mean the same
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from graphs import quick, seeded
from test_cudnn_answers import ROWS, described
from test_norms import NORMS, graph_of

import fusegraph as fg
from codegen import target
from codegen.declined import Declined
from fusegraph.errors import (
    ArgumentError,
    DTypeError,
    GraphError,
    NotSupportedError,
    ShapeError,
)
from fusegraph.frontends.cudnn import CudnnGraph, from_cudnn
from fusegraph.ops import TABLE, Kind
from fusegraph.plan import by_cost_model, plan
from fusegraph.report.check import laid_out, random_inputs, run
from fusegraph.runtime.arrays import CPU, allocator

cudnn = pytest.importorskip("cudnn")
DATA = cudnn.data_type


def pygraph(io: Any = DATA.FLOAT, **how: Any) -> Any:
    return cudnn.pygraph(
        name="users", io_data_type=io, intermediate_data_type=DATA.FLOAT, compute_data_type=DATA.FLOAT, **how
    )


def nhwc(n: int, c: int, h: int, w: int) -> list[int]:
    return [h * w * c, 1, w * c, c]


def empty(tensor: fg.Tensor) -> np.ndarray[Any, Any]:
    made: np.ndarray[Any, Any] = allocator("numpy", tensor.shape, tensor.strides, tensor.dtype, CPU)()
    return made


def execute(graph: CudnnGraph, pack: Mapping[Any, Any], engine: str = "reference") -> list[np.ndarray[Any, Any]]:
    """Runs a graph on its inputs and returns the outputs, in order."""
    outs = {t: empty(t) for t in graph.outputs}
    graph.build(engine=engine)
    graph.execute({**pack, **outs})
    return list(outs.values())


def normal(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def fma(**how: Any) -> tuple[Any, list[Any]]:
    g = pygraph(**how)
    x, w, b = g.tensor([1, 6, 8], name="x", uid=7), g.tensor([1, 8, 4], name="w"), g.tensor([1, 1, 4], name="b")
    y = g.relu(g.add(g.matmul(x, w), b)).set_output(True).set_uid(40).set_name("y")
    return g, [x, w, b, y]


# ---- what our lowering tells cuDNN comes back


def returned(graph: fg.Graph) -> None:
    """Checks that a graph lowered to cuDNN and read back gives the same outputs on the reference engine."""
    told = described(graph)
    read = from_cudnn(told.pygraph, told.scalars)
    inputs = random_inputs(graph, 0)
    expected = run(graph.compile("reference"), inputs)
    pack: dict[int, Any] = {}
    for tensor, uid in told.uids.items():
        x = inputs.get(tensor.name, tensor.value)
        told_here = read.uids[uid]
        pack[uid] = empty(told_here)
        if x is not None:
            pack[uid] = laid_out(x.astype(told_here.dtype.numpy).reshape(told_here.shape), told_here)
    read.build(engine="reference")
    read.execute(pack)
    # What is multiplied is rounded to the other operand's dtype: one step of the largest products.
    rounded = [n for n in graph.nodes if n.kind is Kind.CONTRACTION and any(map(graph.producer, n.inputs))]
    for tensor, uid in told.uids.items():
        assert read.uids[uid].name == tensor.name
        if tensor.name in expected:
            found, wanted = (np.asarray(x).astype(np.float64) for x in (pack[uid], expected[tensor.name]))
            # An output that is read again is rounded on the way: one step of its dtype.
            step = 2 * tensor.dtype.unit_roundoff + 1e-6
            atol = step * max(np.abs(wanted[np.isfinite(wanted)]).max(initial=1), 1) if rounded else step
            np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=step, atol=atol)


def come_back() -> list[Any]:
    """Returns cuDNN's rows as parameters; those with convolutions are slow on the reference."""
    slow = [[pytest.mark.slow] if "conv" in row.words else [] for row in ROWS]
    rows = [pytest.param(row, marks=m, id=row.name.replace(" ", "_")) for row, m in zip(ROWS, slow)]
    return [param for param, row in zip(rows, ROWS) if row.words]


@pytest.mark.parametrize("row", come_back())
def test_graphs_come_back(row):
    returned(row.graph())


@pytest.mark.parametrize("name", [name for name in NORMS if TABLE[name].cudnn])
def test_norms_come_back(name):
    returned(graph_of(NORMS[name], (2, 8, 4, 16), "bfloat16", layout="NHWC"))
    returned(graph_of(NORMS[name], (2, 8, 3, 5), "float32"))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", quick(range(165), range(165, 330)), ids=str)
def test_random_graphs_come_back(seeds):
    """Those that our lowering has words for.  Left out: results that are rounded to few bits and read again, of which
    only their own bits say how many are right."""
    found = 0
    for seed in seeds:
        graph = seeded(seed).build()
        narrow = [t for t in graph.outputs if t.dtype.is_float and t.dtype.itemsize < 4]
        if any(graph.consumers(t) for t in narrow):
            continue
        try:
            described(graph)
        except Declined:
            continue
        returned(graph)
        found += 1
    assert found > 20


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_other_dtypes_come_back(dtype):
    graph = fg.Graph("dtypes", io_dtype=dtype)
    a, b = graph.tensor("a", (2, 3, 5)), graph.tensor("b", (3, 1))
    graph.output(graph.binary_select(a * b, a - b, a > b), name="y")
    graph.output(graph.reduction(a + b, "max", axes=(0, 2)), name="z")
    returned(graph)


# ---- as users write them: every pointwise mode


POINTWISE = [op.name for op in TABLE.values() if op.kind is Kind.POINTWISE and op.cudnn]
EXTRA: dict[str, dict[str, Any]] = {
    "relu": {"negative_slope": 0.1, "lower_clip": 0.25, "upper_clip": 1.5},
    "relu_backward": {"lower_clip": 0.25, "upper_clip": 1.5},
    "leaky_relu": {"negative_slope": 0.1},
    "leaky_relu_backward": {"negative_slope": 0.1},
    "swish": {"swish_beta": 1.5},
    "swish_backward": {"swish_beta": 1.5},
    "gen_index": {"axis": 1},
}


@pytest.mark.parametrize("mode", POINTWISE)
def test_every_pointwise_mode(mode):
    op = TABLE[mode]
    how = EXTRA.get(mode, {})
    theirs, ours = pygraph(), fg.Graph("ours")
    shapes = [(2, 3, 5), (1, 3, 1), (2, 3, 5)][: len(op.operands)]
    told = [theirs.tensor(list(s), name=n) for n, s in zip(op.operands, shapes)]
    getattr(theirs, mode)(*told, **how, name="made").set_output(True).set_data_type(DATA.FLOAT)
    here = [ours.tensor(n, s) for n, s in zip(op.operands, shapes)]
    values = {"beta" if k == "swish_beta" else k: v for k, v in how.items()}
    ours.output(ours.cast(ours.apply(op, here, values), "float32"), name="y")
    arrays = {t.name: np.abs(normal(t.shape)) + 0.5 for t in here}
    (found,) = execute(from_cudnn(theirs), arrays)
    wanted = run(ours.compile("reference"), arrays)["y"]
    np.testing.assert_array_equal(found, wanted)


def test_every_mode_of_a_reduction():
    for mode in ("ADD", "MUL", "MIN", "MAX", "AMAX", "AVG", "NORM1", "NORM2", "MUL_NO_ZEROS"):
        g = pygraph(DATA.HALF)
        x = g.tensor([4, 6, 5], name="x")
        y = g.reduction(x, mode=getattr(cudnn.reduction_mode, mode))
        y.set_dim([4, 1, 5]).set_stride([5, 5, 1]).set_output(True).set_data_type(DATA.FLOAT).set_uid(9)
        array = normal((4, 6, 5), np.float16)
        array[0, 2] = 0
        (found,) = execute(from_cudnn(g), {"x": array})
        ours = fg.Graph("ours")
        ours.output(ours.reduction(ours.cast(ours.tensor("x", (4, 6, 5), "float16"), "float32"), mode.lower(), axes=1))
        np.testing.assert_array_equal(found, next(iter(run(ours.compile("reference"), {"x": array}).values())))


# ---- layouts


def test_results_lie_where_cudnn_would_put_them():
    g = pygraph(DATA.HALF)
    x, w = g.tensor([2, 8, 5, 7], name="x"), g.tensor([4, 8, 3, 3], name="w")
    y = g.conv_fprop(x, w, padding=[1, 1], stride=[1, 2], dilation=[1, 1])
    z = g.relu(y)
    total = g.reduction(z, mode=cudnn.reduction_mode.ADD).set_dim([1, 4, 1, 1])
    turned = g.transpose(x, permutation=[0, 2, 3, 1])
    cut = g.slice(x, slices=[slice(0, 2), slice(2, 6), slice(0, 5), slice(1, 7, 2)])
    joined = g.concatenate(inputs=[cut, cut], axis=1)
    product = g.matmul(g.tensor([2, 3, 4], [12, 1, 3], name="a"), g.tensor([1, 4, 5], name="b"))
    for t in (y, z, total, turned, cut, joined, product):
        t.set_output(True)
    graph = from_cudnn(g)
    strides = [graph.uids[t.uid].strides for t in (y, z, total, turned, cut, joined, product)]
    assert strides == [
        (80, 1, 16, 4),  # channels last, though x is not
        (80, 1, 16, 4),  # as its operand
        (4, 1, 4, 4),
        (280, 7, 1, 35),  # those of x, permuted
        (280, 35, 7, 1),  # those of x
        (8 * 5 * 3, 15, 3, 1),
        (15, 5, 1),
    ]
    assert graph.uids[turned.uid].shape == (2, 5, 7, 8)
    assert graph.uids[cut.uid].shape == (2, 4, 5, 3)
    assert [t.name for t in graph.inputs] == ["x", "w", "a", "b"]
    a, image = normal((2, 8, 5, 7), np.float16), normal((4, 8, 3, 3), np.float16)
    outs = execute(graph, {"x": a, "w": image, "a": empty(graph.tensors["a"]) * 0, "b": normal((1, 4, 5), np.float16)})
    np.testing.assert_array_equal(outs[3], a.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(outs[4], a[:, 2:6, :, 1::2])
    np.testing.assert_array_equal(outs[5], np.concatenate([a[:, 2:6, :, 1::2]] * 2, 1))


def test_reshapes_keep_the_memory_or_the_order():
    array = normal((2, 6, 4))
    g = pygraph()
    x = g.tensor([2, 6, 4], [24, 1, 6], name="x")  # columns first
    view = g.reshape(x).set_dim([2, 4, 3, 2]).set_stride([24, 6, 1, 3]).set_output(True)
    order = g.reshape(x, reshape_mode=cudnn.reshape_mode.LOGICAL).set_dim([4, 12]).set_output(True)
    graph = from_cudnn(g)
    assert graph.uids[order.uid].strides == (12, 1)
    laid = empty(graph.tensors["x"])
    laid[...] = array
    found, ordered = execute(graph, {"x": laid})
    memory = array.transpose(0, 2, 1).ravel()
    expected = np.lib.stride_tricks.as_strided(memory, (2, 4, 3, 2), [4 * s for s in (24, 6, 1, 3)])
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(ordered, array.reshape(4, 12))
    assert graph.uids[view.uid].strides == (24, 6, 1, 3)

    g = pygraph()
    g.reshape(g.tensor([2, 3], [4, 1])).set_dim([6]).set_stride([1]).set_output(True)
    with pytest.raises(ShapeError, match=r"reshape 'reshape\.0': the strides \[4, 1\] of the operand \[2, 3\] leave"):
        from_cudnn(g)


def test_gradients_of_convolutions():
    g = pygraph(DATA.HALF)
    loss, w, x = (
        g.tensor(s, nhwc(*s), name=n) for n, s in (("l", (2, 4, 5, 4)), ("w", (4, 4, 3, 2)), ("x", (2, 8, 11, 11)))
    )
    how: dict[str, Any] = {"pre_padding": [1, 2], "post_padding": [0, 1], "stride": [2, 3], "dilation": [1, 2]}
    how["convolution_mode"] = cudnn._compiled_module.convolution_mode.CONVOLUTION
    g.conv_dgrad(loss, w, **how).set_dim([2, 8, 11, 11]).set_output(True).set_name("dx")
    g.conv_wgrad(x, loss, **how).set_dim([4, 4, 3, 2]).set_output(True).set_name("dw")
    graph = from_cudnn(g)
    ours = fg.Graph("ours", io_dtype="float16")
    dy, v, i = (ours.tensor(t.name, t.shape, strides=t.strides) for t in graph.inputs)
    at: dict[str, Any] = {"padding": ((1, 0), (2, 1)), "stride": (2, 3), "dilation": (1, 2), "mode": "convolution"}
    ours.output(ours.conv_dgrad(dy, v, size=(11, 11), groups=2, **at), name="dx")
    ours.output(ours.conv_wgrad(i, dy, taps=(3, 2), groups=2, **at), name="dw")
    inputs = random_inputs(ours, 0)
    wanted = run(ours.compile("reference"), inputs)
    for found, name in zip(execute(graph, inputs), ("dx", "dw")):
        np.testing.assert_array_equal(found, wanted[name])
    assert [(t.name, t.strides) for t in graph.outputs] == [("dx", (968, 1, 88, 8)), ("dw", (24, 1, 8, 4))]


# ---- scalars by value


def norm_of(g: Any, epsilon: Any) -> None:
    x = g.tensor([3, 1, 64], name="x", uid=1)
    scale, bias = (g.tensor([1, 1, 64], name=n, data_type=DATA.FLOAT) for n in ("scale", "bias"))
    phase = cudnn.norm_forward_phase.TRAINING
    y, mean, inverse = g.layernorm(input=x, scale=scale, bias=bias, epsilon=epsilon, norm_forward_phase=phase)
    for t in (y, mean, inverse):
        t.set_output(True)
    mean.set_data_type(DATA.FLOAT)
    inverse.set_data_type(DATA.FLOAT)


@pytest.mark.parametrize("how", ["values", "scalar", "array", "run"])
def test_epsilon(how):
    """A number that is part of the graph, or one that comes with every call."""
    g = pygraph(DATA.BFLOAT16)
    if how == "scalar":
        epsilon = g.tensor_scalar(0.25, cudnn._compiled_module.scalar_type.COMPILE_TIME_CONST)
    elif how == "array":
        epsilon = np.full((1, 1, 1), 0.25, np.float32)
        epsilon = g._ensure_tensor(epsilon)
        epsilon.set_is_pass_by_value(True)
    else:
        epsilon = g.tensor([1, 1, 1], data_type=DATA.FLOAT, is_pass_by_value=True, name="epsilon")
    norm_of(g, epsilon)
    graph = from_cudnn(g, {epsilon: 0.25} if how == "values" else None)
    assert (graph.nodes[0].op.name == "layernorm") is (how != "run")
    x, scale, bias = normal((3, 1, 64), ml_dtypes.bfloat16), normal((1, 1, 64)), normal((1, 1, 64), seed=1)
    pack: dict[Any, Any] = {"x": x, "scale": scale, "bias": bias}
    if how != "scalar" and how != "array":
        pack[epsilon] = np.full((1, 1, 1), 0.25, np.float32)
    y, mean, inverse = execute(graph, pack)
    wide = x.astype(np.float64)
    variance = wide.var(-1, keepdims=True)
    np.testing.assert_allclose(mean, wide.mean(-1, keepdims=True), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(inverse, 1 / np.sqrt(variance + 0.25), rtol=1e-5)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(variance + 0.25) * scale + bias
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=2**-7, atol=2**-8)
    if how == "run":
        other = execute(graph, {**pack, epsilon: 4.0})[2]
        np.testing.assert_allclose(other, 1 / np.sqrt(variance + 4), rtol=1e-5)
    if how == "values":
        with pytest.raises(ArgumentError, match=r"'epsilon' is 0\.25 in graph 'users', got 4\.0"):
            execute(graph, {**pack, epsilon: 4.0})


def test_norms_without_weights_and_with_more():
    g = pygraph()
    x = g.tensor([4, 1, 32], name="x")
    epsilon = g.tensor_scalar(0.5, cudnn._compiled_module.scalar_type.RUNTIME_PARAM)
    bias = g.tensor([1, 1, 32], name="bias")
    scale = g.tensor([1, 1, 32], name="scale")
    phase = cudnn.norm_forward_phase.TRAINING
    y, inverse = g.rmsnorm(input=x, scale=scale, bias=bias, epsilon=epsilon, norm_forward_phase=phase)
    z, _ = g.rmsnorm(input=x, epsilon=epsilon, norm_forward_phase=phase)
    dx, dscale, dbias = g.rmsnorm_backward(grad=y, input=x, scale=scale, inv_variance=inverse, has_dbias=True)
    for t in (y, z, inverse, dx, dscale, dbias):
        t.set_output(True)
    a, b, s = normal((4, 1, 32)), normal((1, 1, 32), seed=1), normal((1, 1, 32), seed=2)
    found = execute(from_cudnn(g), {"x": a, "bias": b, "scale": s})
    plain = a / np.sqrt((a * a).mean(-1, keepdims=True) + 0.5)
    np.testing.assert_allclose(found[0], plain * s + b, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[2], plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[5], (plain * s + b).sum(0, keepdims=True), rtol=1e-5, atol=1e-5)


# ---- types


def test_results_have_the_types_they_were_told():
    """Virtual results of float32 are not rounded to their operands' bfloat16; virtual ones of half precision are."""
    g = pygraph(DATA.BFLOAT16)
    a, b = (g.tensor([2, 4, 8], name=n) for n in "ab")
    wide = g.add(a, b)
    narrow = g.mul(wide, b).set_data_type(DATA.HALF)
    g.sub(narrow, wide, name="y").set_output(True).set_data_type(DATA.FLOAT)
    graph = from_cudnn(g)
    assert [graph.uids[t.uid].dtype.name for t in (wide, narrow)] == ["float32", "float16"]
    x, y = normal((2, 4, 8), ml_dtypes.bfloat16), normal((2, 4, 8), ml_dtypes.bfloat16, 1)
    total = x.astype(np.float32) + y.astype(np.float32)
    (found,) = execute(graph, {"a": x, "b": y})
    np.testing.assert_array_equal(found, (total * y.astype(np.float32)).astype(np.float16).astype(np.float32) - total)


@pytest.mark.parametrize(
    ("virtual", "other", "meant"),
    [
        ("FLOAT", "HALF", "float16"),
        ("FLOAT", "BFLOAT16", "bfloat16"),
        ("FLOAT", "FLOAT", "float32"),
        ("FLOAT", "FP8_E4M3", "float32"),
        (None, "HALF", "float32"),
    ],
)
def test_the_prologue_of_a_product_is_rounded_for_tensor_cores(virtual, other, meant):
    """To the 16 bits of the other operand; a float32 in memory is multiplied as it is."""
    g = pygraph()
    a = g.tensor([1, 8, 16], name="a")
    a = a if virtual is None else g.relu(a).set_data_type(getattr(DATA, virtual))
    g.matmul(a, g.tensor([1, 16, 8], name="b", data_type=getattr(DATA, other))).set_output(True)
    graph = from_cudnn(g)
    (product,) = (n for n in graph.nodes if n.op.name == "matmul")
    assert product.inputs[0].dtype.name == meant
    assert graph.uids[a.uid].dtype.name == "float32"


@pytest.mark.parametrize("name", ["scale bias relu conv", "relu matmul", "conv bias residual relu", "layernorm gelu"])
def test_kernels_are_those_of_the_graph_that_was_told(name):
    graph = next(row for row in ROWS if row.name == name).graph()
    told = described(graph)
    made = [plan(g, choose=by_cost_model(target("sm_90a"))) for g in (graph, from_cudnn(told.pygraph, told.scalars))]
    ours, read = ([(k.group.family, type(k.choice.schedule)) for k in p.kernels] for p in made)
    assert ours == read


def test_integers_are_computed_as_the_node_says():
    g = pygraph(DATA.INT8)
    a, b = (g.tensor([1, 1, 4], name=n) for n in "ab")
    g.add(a, b, name="floats").set_output(True).set_data_type(DATA.FLOAT)
    g.add(a, b, name="ints", compute_data_type=DATA.INT32).set_output(True).set_data_type(DATA.INT32)
    g.cmp_gt(a, b, name="greater").set_output(True).set_data_type(DATA.BOOLEAN)
    graph = from_cudnn(g)
    x, y = np.array([[[100, -100, 3, 4]]], np.int8), np.array([[[100, -100, 4, 3]]], np.int8)
    floats, ints, greater = execute(graph, {"a": x, "b": y})
    assert floats.ravel().tolist() == [200, -200, 7, 7]
    assert ints.ravel().tolist() == [200, -200, 7, 7]
    assert greater.dtype == bool
    assert greater.ravel().tolist() == [False, False, False, True]


# ---- what cannot be read


def test_everything_that_is_lacking_is_said_at_once():
    g = pygraph(DATA.HALF)
    q, k = (g.tensor([2, 4, 64, 32], name=n) for n in "qk")
    o, _ = g.block_scale_quantize(q, block_size=16, axis=3, transpose=False, name="pack")
    four = g.tensor([2, 4, 64, 32], name="four", data_type=DATA.FP8_E5M3)
    ragged = g.tensor([3, 1, 1, 1], name="offsets", data_type=DATA.INT32)
    g.relu(g.add(four, o, name="sum").set_ragged_offset(ragged), name="relu").set_output(True)
    g.reduction(k, g.tensor([4, 1, 1, 1], name="groups"), mode=cudnn.reduction_mode.ADD, name="total")
    with pytest.raises(NotSupportedError) as refusal:
        from_cudnn(g)
    for part in (
        "pygraph 'users' cannot be read: there is no op for block_scale_quantize 'pack'",
        "'four' (uid 5): data type FP8_E5M3, which fusegraph does not have",
        "tensor 'sum::OUT_0' (uid 7): ragged_offset",
        "reduction 'total': group_offset",
    ):
        assert part in str(refusal.value)


Wrong = Callable[[Any], Any]
MISTAKES: list[tuple[Wrong, type[Exception], str]] = [
    (lambda g: g.relu(g.tensor([2, 3])), GraphError, "pygraph 'users' has no output; mark one with set_output"),
    (lambda g: g.tensor([2, 3]), GraphError, "pygraph 'users' has no nodes"),
    (
        lambda g: g.add(g.tensor([2, 3]), g.tensor([2, 4]), name="sum").set_output(True),
        ShapeError,
        r"pygraph 'users', add 'sum': add: shapes \[2, 3\] and \[2, 4\] do not broadcast",
    ),
    (
        lambda g: g.reduction(g.tensor([2, 3]), mode=cudnn.reduction_mode.ADD).set_output(True),
        ShapeError,
        r"reduction 'reduction\.0': which dimensions are reduced is not known; use set_dim",
    ),
    (
        lambda g: g.conv_wgrad(g.tensor([2, 3, 4, 4]), g.tensor([2, 3, 4, 4]), padding=[1, 1]).set_output(True),
        ShapeError,
        "the size of a filter's gradient is not known",
    ),
    (
        lambda g: g.relu(g.tensor([2, 3])).set_output(True).set_dim([2, 4]),
        ShapeError,
        r"OUT_0 was set to \[2, 4\], but is \[2, 3\]",
    ),
    (
        lambda g: g.relu(g.tensor([2, 3])).set_output(True).set_stride([1, 1]),
        GraphError,
        "make elements share an address",
    ),
    (
        lambda g: g.relu(g.tensor([2, "x"], name="t", stride=[2.5, 1])).set_output(True),
        NotSupportedError,
        r"tensor 't' \(uid 1\): its dim \[2, 'x'\] is no list of integers",
    ),
    (
        lambda g: g.relu(g.tensor([2, 3], name="t", stride=[1])).set_output(True),
        NotSupportedError,
        r"tensor 't' \(uid 1\): its stride \[1\] has not as many numbers as its dim",
    ),
    (
        lambda g: g.transpose(g.tensor([2, 3]), permutation=[None, 0]).set_output(True),
        GraphError,
        "transpose 'transpose.0': ",
    ),
]


@pytest.mark.parametrize(("make", "error", "reason"), MISTAKES)
def test_mistakes(make, error, reason):
    g = pygraph()
    make(g)
    with pytest.raises(error, match=reason):
        from_cudnn(g)


def test_what_is_no_pygraph():
    with pytest.raises(GraphError, match=r"takes a cudnn\.pygraph, got builtins\.dict"):
        from_cudnn({})
    g, (x, *_) = fma()
    for key, reason in (
        ("nothing", "which 0 tensors"),
        (99, "is no tensor that a node"),
        (x, "is not passed by value"),
    ):
        with pytest.raises(GraphError, match=reason):
            from_cudnn(g, {key: 1.0})
    g = cudnn.pygraph(name="typeless")
    g.relu(g.tensor([2, 3], name="x")).set_output(True)
    with pytest.raises(DTypeError, match=r"relu 'relu\.0': input 'x' \(uid 1\) has no data type"):
        from_cudnn(g)
