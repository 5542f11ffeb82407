"""What cuDNN takes and what it refuses, graph by graph, as its graph API was seen to answer (cuDNN 9.19 through
cudnn-frontend 1.32 on an H200): the cudnn engine gives the same answer, and where it is yes, the same numbers as the
cuda engine.  What the graphs become in cuDNN's words is looked at without a driver.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cudnn_rows import (
    ACCEPTED,
    REFUSED,
    ROWS,
    Build,
    chain,
    column_bias,
    conv,
    conv_of_line,
    ids,
    image,
    int8_conv,
    tensors,
)

import fusegraph as fg
from codegen.declined import Declined
from fusegraph.errors import NotSupportedError
from fusegraph.lowering import cudnn as lowering
from fusegraph.lowering.base import GroupView, Options
from fusegraph.passes.simplify import simplify
from fusegraph.report.check import check_executable, compare, random_inputs, rounding_of, run

# ---- without a driver: what cuDNN is told


def described(graph: fg.Graph) -> lowering.Described:
    pytest.importorskip("cudnn")
    simplified = simplify(graph).graph
    view = GroupView(simplified, simplified.nodes, {n: k for k, n in enumerate(simplified.nodes)})
    return lowering.build(lowering.lower(view, Options(), graph.name).spec)


def words(graph: lowering.Described) -> str:
    modes = (n.params.get("mode") for n in graph.pygraph.nodes)
    plain = (n.node_type.name.lower() for n in graph.pygraph.nodes)
    return " ".join(m if isinstance(m, str) else f"{p} {m.name}" if m else p for m, p in zip(modes, plain))


def named(graph: lowering.Described, name: str) -> Any:
    return next(t for t in graph.pygraph.tensors.values() if t.name == name)


@pytest.mark.parametrize("row", [row for row in ROWS if row.words], ids=ids)
def test_words(row):
    """One node each of the graph, in one rank, with the layouts and types of the tensors that cross its border."""
    graph = row.graph()
    result = described(graph)
    assert words(result) == row.words
    every = {t.uid: t for n in result.pygraph.nodes for t in (*n.inputs.values(), *n.outputs.values())}
    rank = {len(t.dim) for t in every.values() if t.dim}
    natural = max(t.rank for t in graph.tensors.values())
    norms = "norm" in row.words  # are of images: dimensions of size 1 stand behind the others
    behind = 4 - natural if norms else 0
    assert rank == {4 if norms else max(3, natural)}
    outside = {uid for uid, t in every.items() if not t.is_virtual}
    assert outside == {*result.uids.values(), *result.scalars}
    assert {t.name for t in result.uids} == {t.name for t in (*graph.inputs, *graph.outputs)}
    merged = lowering._leading_merge(graph.nodes)
    for tensor, uid in result.uids.items():
        told = every[uid]
        assert told.data_type == getattr(lowering.frontend().data_type, lowering.DATA_TYPES[tensor.dtype.name])
        assert np.prod(told.dim) == tensor.size
        if not merged:
            end = len(told.dim) - behind
            own = slice(end - tensor.rank, end)
            assert (tuple(told.dim)[own], tuple(told.stride)[own]) == (tensor.shape, tensor.strides)


NORMS = {
    "adalayernorm": "adalayernorm",
    "instancenorm": "instancenorm",
    "rmsnorm": "rmsnorm",
    "batchnorm": "batchnorm",
    "batchnorm_inference": "batchnorm_inference",
    "genstats": "genstats",
    "layernorm_backward": "layernorm_bwd",
    "adalayernorm_backward": "adalayernorm_bwd",
    "instancenorm_backward": "instancenorm_bwd",
    "batchnorm_backward": "batchnorm_bwd",
    "rmsnorm_backward": "rmsnorm_bwd",
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    """Each is one node of cuDNN's, with all its operands and results, and epsilon and momentum as numbers."""
    from test_norms import NORMS as MAKERS
    from test_norms import graph_of

    graph = graph_of(MAKERS[name], (2, 8, 4, 16), "bfloat16", layout="NHWC")
    result = described(graph)
    (node,) = result.pygraph.nodes
    assert words(result) == NORMS[name]
    (made,) = graph.nodes
    uids = {t.name: uid for t, uid in result.uids.items()}
    assert [t.uid for t in node.outputs.values()] == [uids[t.name] for t in graph.outputs]
    assert {uids[t.name] for t in graph.inputs} <= {t.uid for t in node.inputs.values()}
    numbers = {key: made.attributes[key] for key in ("epsilon", "momentum") if key in made.attributes}
    told = {key: result.scalars[node.inputs[key].uid].item() for key in numbers}
    assert told == {key: np.float32(value) for key, value in numbers.items()}
    if "norm_forward_phase" in made.attributes:
        assert node.params["norm_forward_phase"].name == "TRAINING"


def test_norms_along_other_axes_than_scale_has():
    graph = fg.Graph("axes")
    x = graph.tensor("x", (4, 8, 16))
    graph.output(graph.rmsnorm(x, graph.tensor("scale", (16,)), axes=(1, 2)), name="y")
    pytest.importorskip("cudnn")
    with pytest.raises(Declined, match="along the dimensions that scale has"):
        described(graph)


def test_reductions_that_cudnn_lacks():
    pytest.importorskip("cudnn")
    for mode in ("argmax", "any", "all", "var"):
        graph = fg.Graph("mode")
        graph.output(graph.reduction(graph.tensor("x", (4, 8)), mode, 1), name="y")
        with pytest.raises(Declined, match=f"has no mode {mode}"):
            described(graph)
    graph = fg.Graph("mode")
    graph.output(graph.reduction(graph.tensor("x", (4, 8)), "mul_no_zeros", 1), name="y")
    assert words(described(graph)) == "reduction MUL_NO_ZEROS"


def test_virtual_tensors_are_of_the_compute_type():
    cudnn = pytest.importorskip("cudnn")
    graph = fg.Graph("types", io_dtype="bfloat16")
    x = graph.tensor("x", (4, 8, 16))
    rounded = graph.cast(x * 2.0, "float16", name="rounded")
    graph.output(graph.cast(rounded, "float32", name="widened") + x, name="y", dtype="bfloat16")
    types = [next(iter(n.outputs.values())).data_type for n in described(graph).pygraph.nodes]
    kinds = cudnn.data_type
    assert types == [kinds.FLOAT, kinds.HALF, kinds.FLOAT, kinds.FLOAT, kinds.BFLOAT16]


def test_integers_are_summed_in_integers():
    cudnn = pytest.importorskip("cudnn")
    kinds = cudnn.data_type
    graph = fg.Graph("integers", io_dtype="int8")
    graph.output(int8_conv("straight")(graph), name="y")
    (node,) = described(graph).pygraph.nodes
    assert (node.compute_data_type, node.outputs["Y"].data_type) == (kinds.INT32, kinds.FLOAT)
    graph = fg.Graph("integers", io_dtype="int32")
    a, b = tensors(graph, "ab", (4, 8, 16))
    graph.output(graph.cast(a + b, "float32") * 0.5, name="y")
    graph.output(a + graph.tensor("wide", (4, 8, 16), "int64"), name="z")
    types = {n.name: n.compute_data_type for n in described(graph).pygraph.nodes}
    assert sorted(map(str, types.values())) == sorted(map(str, [kinds.INT32, kinds.FLOAT, kinds.FLOAT, kinds.INT64]))


def test_convolutions_attributes():
    pytest.importorskip("cudnn")
    graph = fg.Graph("attributes", io_dtype="float16")
    x, w = graph.tensor("x", (2, 8, 9, 8), layout="NHWC"), graph.tensor("w", (4, 8, 3, 2), layout="NHWC")
    how = {"padding": ((1, 0), (2, 1)), "stride": (2, 1), "dilation": (1, 3), "mode": "convolution"}
    graph.output(graph.conv_fprop(x, w, **how), name="y")
    (node,) = described(graph).pygraph.nodes
    assert (node.params["pre_padding"], node.params["post_padding"]) == ([1, 2], [0, 1])
    assert (node.params["stride"], node.params["dilation"]) == ([2, 1], [1, 3])
    assert str(node.params["convolution_mode"]).endswith(".CONVOLUTION")


def test_gradients_say_how_large_they_are():
    """Several sizes fit a stride: cuDNN is told which one, whether the gradient is stored or not."""
    pytest.importorskip("cudnn")
    graph = fg.Graph("gradients", io_dtype="float16")
    loss, w = graph.tensor("loss", (2, 4, 5, 4), layout="NHWC"), graph.tensor("w", (4, 8, 3, 2), layout="NHWC")
    how = {"padding": ((1, 0), (2, 1)), "stride": (2, 3), "dilation": (1, 2), "mode": "convolution"}
    inner = graph.conv_dgrad(loss, w, size=(11, 11), **how)
    graph.output(graph.relu(inner), name="dx")
    image = graph.tensor("image", (2, 8, 11, 11), layout="NHWC")
    graph.output(graph.conv_wgrad(image, loss, taps=(3, 2), **how), name="dw")
    nodes = {n.node_type.name: n for n in described(graph).pygraph.nodes}
    for kind, operands, (port, shape, strides) in (
        ("CONV_DGRAD", ["loss", "filter"], ("DX", inner.shape, inner.strides)),
        ("CONV_WGRAD", ["image", "loss"], ("DW", (4, 8, 3, 2), (48, 1, 16, 8))),
    ):
        node = nodes[kind]
        assert list(node.inputs) == operands
        assert (node.params["pre_padding"], node.params["post_padding"]) == ([1, 2], [0, 1])
        assert (node.params["stride"], node.params["dilation"]) == ([2, 3], [1, 2])
        assert str(node.params["convolution_mode"]).endswith(".CONVOLUTION")
        assert (tuple(node.outputs[port].dim), tuple(node.outputs[port].stride)) == (shape, strides)


@pytest.mark.parametrize(
    ("io", "given", "node", "exact"),
    [
        ("float32", "float32", None, True),
        ("float32", "tf32", None, False),
        ("float32", "tf32", "float32", True),
        ("float32", "float32", "tf32", False),
        ("bfloat16", "float32", None, False),
    ],
)
def test_tensor_cores_multiply_float32_where_it_was_asked_for(io, given, node, exact):
    graph = fg.Graph("asked", io_dtype=io, compute_dtype=given)
    a, b = graph.tensor("a", (8, 16)), graph.tensor("b", (16, 8))
    graph.output(graph.matmul(a, b, compute_dtype=node), name="y")
    view = GroupView(graph, graph.nodes, {n: k for k, n in enumerate(graph.nodes)})
    assert lowering.lower(view, Options(), graph.name).spec.multiplies_float32 is exact


def test_one_dimensional_convolutions_are_images_of_height_one():
    graph = fg.Graph("line", io_dtype="bfloat16")
    x, w = graph.tensor("x", (8, 64, 28), layout="NWC"), graph.tensor("w", (64, 64, 3), layout="NWC")
    y = graph.conv_fprop(x, w, padding=1, stride=2) + graph.tensor("bias", (64, 1))
    graph.output(y, name="y")
    result = described(graph)
    node = result.pygraph.nodes[0]
    assert (node.params["pre_padding"], node.params["stride"]) == ([0, 1], [1, 2])
    assert list(named(result, "x").dim) == [8, 64, 1, 28]
    assert list(named(result, "x").stride) == [64 * 28, 1, 64 * 28, 64]
    assert list(named(result, "bias").dim) == [1, 64, 1, 1]


def test_scalars_are_read_on_the_host():
    result = described(next(row for row in ROWS if row.name == "conv hardswish").graph())
    assert sorted(float(v[0]) for v in result.scalars.values()) == [np.float32(1 / 6), 3.0]
    relu = next(n for n in result.pygraph.nodes if n.params.get("mode") == "relu")
    assert relu.params["upper_clip"] == 6.0


def test_long_vectors_are_folded():
    graph = fg.Graph("vectors")
    a, b = tensors(graph, "ab", (3 << 20,))
    graph.output(a * b, name="y")
    assert list(named(described(graph), "a").dim) == [1, 384, 8192]


def test_vectors_that_know_their_positions_are_not_folded():
    graph = fg.Graph("positions")
    x = graph.tensor("x", (3 << 20,))
    graph.output(x + graph.gen_index(x, axis=0), name="y")
    result = described(graph)
    assert list(named(result, "x").dim) == [1, 1, 3 << 20]
    assert [n.params["axis"] for n in result.pygraph.nodes if "axis" in n.params] == [2]


def test_norms_of_lines():
    """Beside a convolution of lines, which have a height of 1 before their last dimension; and of samples alone."""
    graph = fg.Graph("line", io_dtype="bfloat16")
    x = conv_of_line(graph)
    channels = [graph.tensor(name, (1, 4, 1)) for name in ("scale", "bias")]
    graph.output(graph.batchnorm(x, *channels)[0], name="y")
    assert {len(t.dim) for t in described(graph).pygraph.tensors.values() if t.dim} == {4}
    graph = fg.Graph("samples")
    graph.output(graph.adalayernorm(graph.tensor("x", (33,)), 1.0, 0.0, axes=0), name="y")
    with pytest.raises(Declined, match="along the dimensions that scale has"):
        described(graph)


def test_what_cudnn_computes_wrongly_is_refused():
    graph = fg.Graph("column", io_dtype="bfloat16")
    graph.output(column_bias(graph), name="y")
    with pytest.raises(Declined, match=r"wrong values where a tensor \('bias' \[64, 1\]\) repeats along the first"):
        described(graph)
    merged = fg.Graph("row", io_dtype="bfloat16")
    merged.output(chain(merged), name="y")
    assert list(named(described(merged), "bias").dim) == [1, 1, 256]
    assert list(named(described(merged), "a").dim) == [1, 256, 256]


def test_booleans_are_bytes():
    """A number as a boolean is whether it is not 0: cuDNN would convert it to the byte in which that is stored."""
    graph = fg.Graph("truth")
    x = graph.tensor("x", (4, 8, 16))
    graph.output(x, name="y", dtype="bool")
    graph.output(x > 0, name="z")
    result = described(graph)
    assert words(result) == "cmp_neq cmp_gt"
    assert [v.item() for v in result.scalars.values()] == [0, 0]
    assert named(result, "y").data_type == lowering.frontend().data_type.UINT8


def test_tensors_of_other_ranks():
    """Dimensions in front of an image's would be taken for its images and channels."""
    pytest.importorskip("cudnn")

    def refused(build: Build, rank: int) -> str:
        graph = fg.Graph("ranks")
        graph.output(build(graph), name="y")
        graph.output(graph.neg(graph.tensor("other", (2,) * rank)), name="z")
        with pytest.raises(Declined) as refusal:
            described(graph)
        return str(refusal.value)

    reason = refused(conv_of_line, 4)
    assert "conv_fprop 'y' is of 3 dimensions, 'other' [2, 2, 2, 2] has 4" in reason
    assert "is of 4 dimensions" in refused(lambda g: conv(g, image(g)), 5)
    channels = (1, 8, 1, 1)

    def instances(g: fg.Graph) -> fg.Tensor:
        return g.instancenorm(g.tensor("x", (2, 8, 4, 4)), g.tensor("scale", channels), g.tensor("bias", channels))

    assert "instancenorm 'y' is of 4 dimensions" in refused(instances, 5)
    graph = fg.Graph("spaces")
    graph.output(graph.neg(graph.tensor("a", (2, 3, 4))), name="y")
    graph.output(graph.neg(graph.tensor("b", (5, 3, 4))), name="z")
    with pytest.raises(Declined, match=r"over one shape, these are over \[2, 3, 4\], \[5, 3, 4\]"):
        described(graph)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda g, x: g.expm1(x), "cuDNN's graph API has no expm1 ('y')"),
        (lambda g, x: g.clamp(g.cast(x, "int32"), 0, 3), "has clamp of floats only ('y' is int32)"),
        (lambda g, x: g.softplus(x, beta=2.0), "cuDNN's softplus has no beta ('y' has beta=2.0)"),
        (lambda g, x: x + g.tensor("none", (0, 1, 1)), "cuDNN takes no empty tensors ("),
    ],
)
def test_what_cudnn_has_no_word_for(make, reason):
    graph = fg.Graph("unknown")
    empty = "empty" in reason
    graph.output(make(graph, graph.tensor("x", (1, 1, 1) if empty else (4, 8, 16))), name="y")
    with pytest.raises(Declined) as refusal:
        described(graph)
    assert reason in str(refusal.value)


# ---- on a GPU: the answers


@pytest.fixture(scope="module")
def cudnn() -> Any:
    return pytest.importorskip("cudnn")


@pytest.mark.gpu
@pytest.mark.parametrize("row", ACCEPTED, ids=ids)
def test_accepted(row, cudnn):
    graph = row.graph()
    inputs = random_inputs(graph, 1)
    executable = graph.compile("cudnn")
    assert [p.name for p in executable.plans] != [""]
    outputs = run(executable, inputs)
    checks = compare(graph, inputs, outputs, rounding_of(executable), slack=row.slack)
    assert all(c.ok for c in checks), checks
    ours = check_executable(graph.compile("cuda"), inputs)
    assert ours.ok, ours


@pytest.mark.gpu
@pytest.mark.parametrize("row", REFUSED, ids=ids)
def test_refused(row, cudnn):
    graph = row.graph()
    with pytest.raises(NotSupportedError, match=row.refusal) as refusal:
        graph.compile("cudnn")
    assert all(f"{n.op.name} {n.name!r}" in str(refusal.value) for n in graph.nodes)
    inputs = random_inputs(graph, 1)
    ours = check_executable(graph.compile("cuda"), inputs)
    assert ours.ok, ours
    if row.pieces == 0:
        with pytest.raises(NotSupportedError, match="even in pieces"):
            graph.compile("cudnn", partition=True)
        return
    executable = graph.compile("cudnn", partition=True)
    assert row.pieces in (len(executable.plans), None)
    in_pieces = check_executable(executable, inputs)
    assert in_pieces.ok, in_pieces


@pytest.mark.gpu
def test_autotuned_plans_and_handles(cudnn):
    """Autotuning keeps a plan that is right; executables share the device's handle and may run in turns."""
    graph = next(row for row in ROWS if row.name == "conv bias relu NHWC").graph()
    first, second = graph.compile("cudnn"), graph.compile("cudnn", autotune=True)
    inputs = random_inputs(graph, 2)
    for executable in (first, second, first):
        result = check_executable(executable, inputs)
        assert result.ok, result
