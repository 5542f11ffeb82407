"""Parts of a product's result that meet again are made by products of parts: SwiGLU with one weight is one kernel.

The columns of ``a @ b`` from i to j are ``a @ b[:, i:j]``, and of a convolution's result channels are filters.
Products that share operand A and meet in a pointwise node are one kernel (`lowering.contraction`), which needs
no room for the whole result; slices of operand B are views of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from fusegraph.graph import Graph, Node
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.choices import MADE, whether
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, replaced
from fusegraph.pattern import Found, op

#: What is chosen.
NAME = "products of parts"
#: Parts that a kernel multiplies with one tile of operand A at most.
MOST_PARTS = 4
#: Parts begin at multiples of so many bytes, as TMA needs it.
PART_BYTES = 16
#: op -> (the axis of the result that is cut, that of operand B).
_AXES = {TABLE["matmul"]: (-1, -1), TABLE["conv_fprop"]: (1, 0)}


def split_products(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Makes slices of a product that meet again of products with slices of the second operand."""
    found = Found(graph)
    products = [n for n in graph.nodes if _AXES.get(n.op) is not None and _meets_in_parts(found, n)]
    choices = [whether(NAME, n.name, options.settled, str([t.type for t in n.inputs])) for n in products]
    split = {n for n, choice in zip(products, choices) if choice.taken == MADE}
    parts = {part: n for n in split for part in graph.consumers(n.output)}
    return replace(replaced(graph, parts.get, _multiply_by_part), choices=tuple(choices))


def _multiply_by_part(rewrite: Rewrite, part: Node, product: Node) -> None:
    """Writes the product with the part of operand B that a slice of the whole product follows from."""
    a, b = rewrite.inputs(product)
    axis, own = (x % t.rank for x, t in zip(_AXES[product.op], (product.output, b)))
    starts: list[int | None] = [None] * b.rank
    stops: list[int | None] = [None] * b.rank
    starts[own] = part.attributes["starts"][axis]
    stops[own] = part.attributes["starts"][axis] + part.output.shape[axis]
    cut = rewrite.graph.apply(TABLE["slice"], (b,), {"starts": starts, "stops": stops})
    cut = named(cut, b.name[:130], f"for {part.name[:40]}")
    rewrite.take_over(Node(product.op, product.inputs, product.attributes, part.output), (a, cut))


def _meets_in_parts(found: Found, node: Node) -> bool:
    """Returns true if slices are all that is taken of a product, and products of parts are better."""
    graph, axis = found.graph, _AXES[node.op][0] % node.output.rank
    if node.attributes.get("groups", 1) != 1 or node.output in graph.outputs:
        return False
    parts = graph.consumers(node.output)
    slices = all(op.slice().fits(graph, n) and n.output not in graph.outputs for n in parts)
    if not slices or not 2 <= len(parts) <= MOST_PARTS:
        return False
    width = parts[0].output.shape[axis]
    starts = sorted(n.attributes["starts"][axis] for n in parts)
    alike = all(_cuts(n, axis, width) for n in parts) and all(b - a >= width for a, b in pairwise(starts))
    aligned = all(x * node.inputs[1].dtype.itemsize % PART_BYTES == 0 for x in (width, *starts))
    return bool(width) and alike and aligned and meet(graph, parts)


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
            for node in (n for t in stack.pop().outputs for n in graph.consumers(t)):
                if node not in seen and node.kind is Kind.POINTWISE and node.output.shape == shape:
                    seen.add(node)
                    stack.append(node)
        found.append(seen)
    return bool(set.intersection(*found))
