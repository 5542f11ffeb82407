"""Parts of a product's result that meet again are made by products of parts: SwiGLU with one weight is one kernel.

The columns of ``x @ w`` from i to j are ``x @ w[:, i:j]``, and of a convolution's result channels are filters.
Products that share operand A and meet in a pointwise node are one kernel (`lowering.contraction`), which needs
no room for the whole result; slices of operand B are views of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, same
from fusegraph.pattern import op

#: Parts that a kernel multiplies with one tile of operand A at most.
MOST_PARTS = 4
#: Parts begin at multiples of so many bytes, as TMA needs it.
PART_BYTES = 16
#: op -> (the axis of the result that is cut, that of operand B).
_AXES = {TABLE["matmul"]: (-1, -1), TABLE["conv_fprop"]: (1, 0)}


def split_products(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Makes slices of a product that meet again of products with slices of the second operand."""
    cut = {node: parts for node in graph.nodes if (parts := _parts(graph, node))}
    if not cut:
        return same(graph)
    whole = {part: node for node, parts in cut.items() for part in parts}
    rewrite = Rewrite(graph)
    for node in graph.nodes:
        if node in whole:
            product = whole[node]
            first, second = rewrite.inputs(product)
            inputs = first, _part(rewrite.graph, second, product, node)
            rewrite.take_over(Node(product.op, product.inputs, product.attributes, node.output), inputs)
            rewrite.new.setdefault(product.output, rewrite.new[node.output])
        elif node not in cut:
            rewrite.take_over(node)
    return rewrite.done()


def _parts(graph: Graph, node: Node) -> Sequence[Node]:
    """Returns the slices that are all that is taken of a product, if products of parts are better."""
    axes = _AXES.get(node.op)
    if axes is None or node.attributes.get("groups", 1) != 1 or node.output in graph.outputs:
        return ()
    tensor, axis = node.output, axes[0] % node.output.rank
    parts = graph.consumers(tensor)
    slices = all(op.slice().fits(graph, n) and n.output not in graph.outputs for n in parts)
    if not slices or not 2 <= len(parts) <= MOST_PARTS:
        return ()
    width = parts[0].output.shape[axis]
    starts = sorted(n.attributes["starts"][axis] for n in parts)
    alike = all(_cuts(n, axis, width) for n in parts) and all(b - a >= width for a, b in pairwise(starts))
    aligned = all(x * node.inputs[1].dtype.itemsize % PART_BYTES == 0 for x in (width, *starts))
    return parts if width and alike and aligned and meet(graph, parts) else ()


def _cuts(node: Node, axis: int, width: int) -> bool:
    """Returns true if a slice takes neighbours along one axis, and all of the others."""
    shape, source = node.output.shape, node.inputs[0].shape
    whole = all(a == b for d, (a, b) in enumerate(zip(shape, source)) if d != axis)
    steps = all(step == 1 for step, size in zip(node.attributes["steps"], shape) if size > 1)
    return whole and steps and shape[axis] == width


def meet(graph: Graph, parts: Sequence[Node]) -> bool:
    """Returns true if there is a pointwise node that depends on all parts by pointwise nodes of their shape."""
    shape = parts[0].output.shape
    found = []
    for part in parts:
        seen: set[Node] = set()
        stack = [part]
        while stack:
            for node in graph.network.successors(stack.pop()):
                if node not in seen and node.kind is Kind.POINTWISE and node.output.shape == shape:
                    seen.add(node)
                    stack.append(node)
        found.append(seen)
    return bool(set.intersection(*found))


def _part(graph: Graph, tensor: Tensor, product: Node, cut: Node) -> Tensor:
    """Returns the part of an operand B that a slice of the product follows from."""
    axis, own = (a % t.rank for a, t in zip(_AXES[product.op], (product.output, tensor)))
    starts: list[int | None] = [None] * tensor.rank
    stops: list[int | None] = [None] * tensor.rank
    starts[own] = cut.attributes["starts"][axis]
    stops[own] = cut.attributes["starts"][axis] + cut.output.shape[axis]
    made = graph.apply(TABLE["slice"], (tensor,), {"starts": starts, "stops": stops})
    return named(made, tensor.name[:130], f"for {cut.name[:40]}")
