"""Batched products with all their batch dimensions.

Programs join batches and heads to one dimension around a product, because their libraries want three dimensions.
Joining moves elements wherever heads are not beside the batch in memory; taken apart, the operands are views, and the
softmax between two products has the shape of its masks.
"""

from __future__ import annotations

from functools import partial
from math import prod

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.rewrite import Rewrite, Rewritten, replaced
from fusegraph.pattern import only_consumer

Shape = tuple[int, ...]


def take_apart(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Takes apart the batch dimensions that are joined around products and divided again behind them."""
    return replaced(graph, partial(_joined, graph), partial(_divide, graph))


def _joined(graph: Graph, node: Node) -> Node | None:
    """Returns the product whose batch a reshape divides again, if an operand's batch was joined before."""
    product = graph.producer(node.inputs[0]) if node.op.role is Role.RESHAPE else None
    if product is None or product.op.role is not Role.MATMUL or only_consumer(graph, product.output) is not node:
        return None
    out, batch = node.output.shape, node.output.shape[:-2]
    joined = product.output.shape
    if len(joined) != 3 or len(batch) < 2 or out[-2:] != joined[1:] or prod(batch) != joined[0]:
        return None
    alike = all(t.shape[0] == joined[0] and t.rank == 3 for t in product.inputs)
    return product if alike and any(_comes_apart(graph, t, batch) for t in product.inputs) else None


def _comes_apart(graph: Graph, tensor: Tensor, batch: Shape) -> bool:
    """Tells whether a tensor was made by joining batch dimensions."""
    maker = graph.producer(tensor)
    if maker is None:
        return False
    if maker.op.role is Role.RESHAPE:
        return maker.inputs[0].shape == (*batch, *tensor.shape[1:])
    steps = _turns(maker) or _scales(graph, maker)
    return steps and _comes_apart(graph, _main(maker), batch)


def _turns(node: Node) -> bool:
    return node.op.role is Role.TRANSPOSE and node.attributes["perm"] == (0, 2, 1)


def _scales(graph: Graph, node: Node) -> bool:
    """Tells whether a node works element by element on a tensor, and on numbers beside it, for one taker."""
    main = _main(node)
    rest = [t for t in node.inputs if t is not main]
    return (
        node.kind is Kind.POINTWISE
        and node.op.reads_values
        and main.shape == node.output.shape
        and all(t.size == 1 and t.rank <= 1 for t in rest)
        and only_consumer(graph, node.output) is not None
    )


def _main(node: Node) -> Tensor:
    return max(node.inputs, key=lambda t: t.size)


def _divide(graph: Graph, rewrite: Rewrite, node: Node, product: Node) -> None:
    batch = node.output.shape[:-2]
    operands = tuple(_divided(graph, rewrite, t, batch) for t in product.inputs)
    rewrite.graph.add_node(Node(product.op, operands, product.attributes, rewrite.result(node.output)))


def _divided(graph: Graph, rewrite: Rewrite, tensor: Tensor, batch: Shape) -> Tensor:
    """Returns a tensor with its first dimension divided into a batch's."""
    maker, shape = graph.producer(tensor), (*batch, *tensor.shape[1:])
    if maker is None or not _comes_apart(graph, tensor, batch):
        return rewrite.graph.apply(TABLE["reshape"], (rewrite.new[tensor],), {"shape": shape})
    main = _main(maker)
    if maker.op.role is Role.RESHAPE:
        return rewrite.new[main]
    inner = _divided(graph, rewrite, main, batch)
    if _turns(maker):
        rank = len(shape)
        return rewrite.graph.apply(TABLE["transpose"], (inner,), {"perm": (*range(rank - 2), rank - 1, rank - 2)})
    operands = [inner if t is main else rewrite.new[t] for t in maker.inputs]
    made = rewrite.graph._add_tensor(rewrite.graph._unique(tensor.name), shape, inner.strides, tensor.dtype)
    rewrite.graph._automatic.add(made)
    rewrite.graph.add_node(Node(maker.op, tuple(operands), maker.attributes, made))
    return made
