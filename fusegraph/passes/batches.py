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
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, replaced
from fusegraph.pattern import only_consumer

Shape = tuple[int, ...]


def take_apart(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Takes apart the batch dimensions that are joined around products."""
    return replaced(graph, partial(_found, graph), partial(_divide, graph))


def _found(graph: Graph, node: Node) -> tuple[Node, Shape] | None:
    """Returns the product that a node is, or whose batch a reshape divides, and the dimensions of its batch that were
    joined before: by a reshape of an operand, or of both if none divides the result.
    """
    if node.op.role is Role.MATMUL:
        batches = {_batch(graph, t) for t in node.inputs}
        batch = batches.pop()
        return (node, batch) if not batches and batch is not None and node.output.rank == 3 else None
    product = graph.producer(node.inputs[0]) if node.op.role is Role.RESHAPE else None
    if product is None or product.op.role is not Role.MATMUL or only_consumer(graph, product.output) is not node:
        return None
    out, batch = node.output.shape, node.output.shape[:-2]
    joined = product.output.shape
    if len(joined) != 3 or len(batch) < 2 or out[-2:] != joined[1:] or prod(batch) != joined[0]:
        return None
    alike = all(t.shape[0] == joined[0] and t.rank == 3 for t in product.inputs)
    return (product, batch) if alike and any(_comes_apart(graph, t, batch) for t in product.inputs) else None


def _batch(graph: Graph, tensor: Tensor) -> Shape | None:
    """Returns the dimensions that were joined to a tensor's first one; None if none were."""
    maker = graph.producer(tensor)
    if maker is None or tensor.rank != 3:
        return None
    if maker.op.role is Role.RESHAPE:
        batch = maker.inputs[0].shape[:-2]
        return batch if len(batch) > 1 and _comes_apart(graph, tensor, batch) else None
    return _batch(graph, _main(maker)) if _turns(maker) or _scales(graph, maker) else None


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


def _divide(graph: Graph, rewrite: Rewrite, node: Node, found: tuple[Node, Shape]) -> None:
    product, batch = found
    operands = tuple(_divided(graph, rewrite, t, batch) for t in product.inputs)
    if node is not product:
        rewrite.graph.add_node(Node(product.op, operands, product.attributes, rewrite.result(node.output)))
        return
    made = named(rewrite.graph.apply(product.op, operands, dict(product.attributes)), node.name, "divided")
    joined = rewrite.result(node.output)
    rewrite.graph.add_node(Node(TABLE["reshape"], (made,), {"shape": joined.shape}, joined))


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
