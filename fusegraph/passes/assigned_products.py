"""Products whose results are assigned to inputs that divide the columns: rows of a cache that has them by heads."""

from __future__ import annotations

from math import prod

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.views import Strides, assigned_region, reshaped, turned_back
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.overwriting import assignments
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, replaced


def divide_columns(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Makes a product one of a batch if its kernel can only then write it where it is assigned to.

    The results' columns are heads, say, which lie apart in a cache: operand B has then a part for each of them.
    """
    found: dict[Node, tuple[Node, int]] = {}  # a product, and the reshape that divides it -> (the other one, heads)
    for node in assignments(graph) if graph.updates else ():
        if (pair := _divided(graph, node)) is not None:
            product, reshape, heads = pair
            found |= {product: (reshape, heads), reshape: (product, heads)}

    def write(rewrite: Rewrite, node: Node, pair: tuple[Node, int]) -> None:
        other, heads = pair
        if node.kind is Kind.CONTRACTION:
            return  # written with its reshape
        a, b = (rewrite.new[t] for t in other.inputs)
        made, columns = rewrite.graph, b.shape[-1] // heads
        if a.rank > 2:
            a = made.apply(TABLE["reshape"], (a,), {"shape": (a.size // a.shape[-1], a.shape[-1])})
        parts = made.apply(TABLE["reshape"], (b,), {"shape": (b.shape[-2], heads, columns)})
        parts = made.apply(TABLE["transpose"], (parts,), {"perm": (1, 0, 2)})
        attributes = dict(other.attributes)
        result = named(made.apply(other.op, (a, parts), attributes), other.name, "by parts")
        turned = made.apply(TABLE["transpose"], (result,), {"perm": (1, 0, 2)})
        rewrite.new[node.output] = named(
            made.apply(TABLE["reshape"], (turned,), {"shape": node.output.shape}), node.name, "of parts"
        )

    return replaced(graph, found.get, write)


def _divided(graph: Graph, node: Node) -> tuple[Node, Node, int] | None:
    """Returns a product that is assigned by way of movement, the reshape that divides its columns, and into how many
    parts; None if the product is something else, or can be written where it belongs as it is.
    """
    tensor: Tensor = node.inputs[1]
    strides: Strides = assigned_region(node).strides
    while True:
        maker = graph.producer(tensor)
        if maker is None or len(graph.consumers(tensor)) > 1 or tensor in graph.output_numbers:
            return None
        through = turned_back(maker, strides)
        if through is None:
            return _parts(graph, maker, strides)
        tensor, strides = maker.inputs[0], through


def _parts(graph: Graph, reshape: Node, strides: Strides) -> tuple[Node, Node, int] | None:
    product, shape = graph.producer(reshape.inputs[0]), reshape.output.shape
    if reshape.op.role is not Role.RESHAPE or product is None or product.op.role is not Role.MATMUL or 0 in shape:
        return None
    b, result = product.inputs[1], product.output
    inner = next((d for d in reversed(range(len(shape))) if prod(shape[d:]) == result.shape[-1] != shape[-1]), None)
    alone = graph.consumers(result) == [reshape] and result not in graph.output_numbers
    plain = b.rank == 2 and not _is_computed(graph, b)
    if inner is None or not (alone and plain) or "parts" in product.attributes:
        return None
    heads, rows = prod(shape[inner:-1]), prod(shape[:inner])
    if reshaped(shape, strides, (rows, heads, shape[-1])) is None:
        return None
    return product, reshape, heads


def _is_computed(graph: Graph, tensor: Tensor) -> bool:
    """Returns true if a tensor is no view of an input or a constant: a kernel would compute it as it reads it."""
    while (node := graph.producer(tensor)) is not None and node.op.role in (Role.TRANSPOSE, Role.RESHAPE, Role.SLICE):
        tensor = node.inputs[0]
    return node is not None
