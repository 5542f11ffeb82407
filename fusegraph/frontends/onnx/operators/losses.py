"""Losses of logits that a product makes for them alone: one op, which keeps no logits.

Other losses are written as ONNX defines them, by other operators.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.graph import Node, Tensor
from fusegraph.ops.linear_cross_entropy import LEAST_LOGITS_BYTES


@dataclass(frozen=True)
class _Found:
    """What makes scores.

    product  the matmul [..., D] x [D, V] of the logits.
    bias     what is added to them, V elements; None if nothing is.
    nodes    all nodes from the scores back to the product.
    """

    product: Node
    bias: Tensor | None
    nodes: list[Node]


@operator("SoftmaxCrossEntropyLoss")
def cross_entropy(call: Call, scores: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    return _loss(call, scores, target, weights, normalised=True)


@operator("NegativeLogLikelihoodLoss")
def log_likelihood(call: Call, scores: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    return _loss(call, scores, target, weights, normalised=False)


def _loss(call: Call, scores: Tensor, target: Tensor, weights: Tensor | None, *, normalised: bool) -> Tensor:
    """Returns the loss of scores [N, V, ...], logits or (unless ``normalised``) their log_softmax.

    Raises Declined for class weights, log_softmax as a second result, and scores that are small, vary in size, have
    another use or are not those of a linear layer.
    """
    shape = scores.shape
    plain = weights is None and call.wanted == 1 and all(type(n) is int for n in shape) and scores.rank > 1
    if not plain or target.shape != shape[:1] + shape[2:] or 4 * scores.size < LEAST_LOGITS_BYTES:
        raise call.refuse("logits in memory")
    found = _found(call, scores, normalised)
    if found is None:
        raise call.refuse("scores that no layer makes for it alone")
    graph = call.graph
    x, w = found.product.inputs
    for node in reversed(found.nodes):
        if node.op.name == "reshape":
            x = graph.reshape(x, [*node.output.shape[:-1], x.shape[-1]])
        elif node.op.name == "transpose":
            x = graph.transpose(x, node.attributes["perm"])
        elif node.op.name == "slice":
            how = node.attributes
            stops = [stop if n == v else n for stop, n, v in zip(how["stops"], x.shape, node.inputs[0].shape)]
            x = graph.slice(x, how["starts"], stops, how["steps"])
    if x.rank > 2:
        x = graph.transpose(x, [0, *range(2, x.rank), 1])
    loss, _ = graph.linear_cross_entropy(
        x,
        graph.transpose(w),
        target,
        None if found.bias is None else graph.reshape(found.bias, [-1]),
        ignore_index=-1 if call["ignore_index"] is None else call["ignore_index"],
        reduction=call.word("reduction", "none", "sum", "mean"),
        compute_dtype=found.product.attributes["compute_dtype"],
    )
    for node in found.nodes:
        graph.remove_node(node)
    return loss if loss.dtype == scores.dtype else graph.cast(loss, scores.dtype)


def _found(call: Call, scores: Tensor, normalised: bool) -> _Found | None:
    """Returns the layer that makes scores, if nothing else uses what is between them."""
    tensor, axis, bias, nodes = scores, 1, None, list[Node]()
    while True:
        node = call.graph.producer(tensor)
        if node is None or call.graph.consumers(tensor) != nodes[-1:] or not call.once(tensor):
            return None
        name, last, source = node.op.name, axis == tensor.rank - 1, node.inputs[0]
        nodes.append(node)
        if name == "matmul":
            fits = normalised and last and all(t.dtype.is_float and t.dtype.itemsize > 1 for t in node.inputs)
            return _Found(node, bias, nodes) if fits and node.inputs[1].rank == 2 else None
        if name == "log_softmax" and not normalised and node.attributes["axis"] == axis:
            normalised = True
        elif name == "add" and last and bias is None and (added := _sum_with_bias(call, node)) is not None:
            source, bias = added
        elif name == "reshape" and last and source.shape[-1:] == tensor.shape[-1:]:
            axis = source.rank - 1
        elif name == "transpose":
            axis = node.attributes["perm"][axis]
        elif name == "slice":
            if source.shape[axis] != tensor.shape[axis] or min(node.attributes["steps"]) < 0:
                return None
        elif name != "identity" or not source.dtype.is_float or source.shape != tensor.shape:
            return None
        tensor = source


def _sum_with_bias(call: Call, node: Node) -> tuple[Tensor, Tensor] | None:
    """Returns the logits and the bias that a node adds, in either order; None if it is no such sum."""
    shape = node.output.shape
    for logits, bias in (node.inputs, node.inputs[::-1]):
        made = call.graph.producer(logits) is not None
        if made and logits.shape == shape and bias.shape[-1:] == shape[-1:] and bias.size == shape[-1]:
            return logits, bias
    return None
