"""Transposes of products give way to what is computed element by element behind them.

A network that keeps its channels first computes ``residual + scale * transpose(x @ w)``.  The transpose is a view, but
an epilogue works in the product's own space: so the work moves in front of the transpose, where the product's kernel
takes it in, and the other operands are views in that space.
"""

from __future__ import annotations

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides, stride_order
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, named, same
from fusegraph.pattern import followers

Perm = tuple[int, ...]


def move_transposes(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Moves transposes of products behind pointwise nodes: ``f(transpose(x), y)`` is ``transpose(f(x, turned(y)))``.

    That is for operands and results that then lie in memory as the product's result does.
    """
    perms = _perms(graph)
    if not any(node.kind is Kind.POINTWISE for node in map(graph.producer, perms) if node is not None):
        return same(graph)
    rewrite = Rewrite(graph)
    inner: dict[Tensor, Tensor] = {}  # what is transposed, for each of these tensors
    for node in graph.nodes:
        perm = perms.get(node.output)
        if perm is None or node.kind is Kind.MOVEMENT:
            rewrite.take_over(node)
            if perm is not None:
                inner[node.output] = rewrite.new[node.inputs[0]]
        else:
            operands = tuple(inner[t] if t in inner else _turned(rewrite, t, perm) for t in node.inputs)
            shape, strides = _turned_back(node.output.shape, perm), _turned_back(node.output.strides, perm)
            if node.output not in graph.output_numbers:
                first = next(inner[t] for t in node.inputs if t in inner)
                strides = packed_strides(shape, stride_order(shape, first.strides))
            made = intermediate(rewrite.graph, node.output.name, "turned", shape, strides, node.output.dtype)
            inner[node.output] = rewrite.graph.add_node(Node(node.op, operands, node.attributes, made)).output
            transpose = Node(TABLE["transpose"], (made,), {"perm": perm}, node.output)
            rewrite.take_over(transpose, (made,))
    return rewrite.done()


def _perms(graph: Graph) -> dict[Tensor, Perm]:
    """Returns the permutation of each transpose of a product's result, and of what can be computed in front of it.

    A transpose that is a result of the graph stays; so does one in front of a norm.
    """
    found: dict[Tensor, Perm] = {}
    orders: dict[Tensor, tuple[int, ...]] = {}  # of the dimensions in memory, before the transpose
    products: set[Tensor] = set()
    for node in graph.nodes:
        result = node.output
        if node.kind is Kind.CONTRACTION:
            products.add(result)
        elif node.op.role is Role.TRANSPOSE and node.inputs[0] in products and result not in graph.output_numbers:
            if _is_normalised(graph, result):
                continue
            found[result] = tuple(node.attributes["perm"])
            orders[result] = stride_order(node.inputs[0].shape, node.inputs[0].strides)
        elif node.kind is Kind.POINTWISE:
            if any(t in products and t.shape == result.shape for t in node.inputs):
                products.add(result)
            source = next((t for t in node.inputs if t in found and t.shape == result.shape), None)
            if source is not None and not node.op.shapes and _fits(graph, node, found, orders, source):
                found[result], orders[result] = found[source], orders[source]
    return found


def _is_normalised(graph: Graph, tensor: Tensor) -> bool:
    """Returns true if reductions of a tensor, or of what is made of it element by element, come back to that.

    A norm is one kernel, which reads the transpose as a view.
    """
    behind: set[Node] = set()
    reductions: set[Node] = set()
    stack = [tensor]
    while stack:
        for node in graph.consumers(stack.pop()):
            if node.kind is Kind.REDUCTION:
                reductions.add(node)
            elif node.kind is Kind.POINTWISE and node.output.shape == tensor.shape and node not in behind:
                behind.add(node)
                stack.append(node.output)
    return any(not behind.isdisjoint(followers(graph, node)) for node in reductions)


def _fits(
    graph: Graph, node: Node, found: dict[Tensor, Perm], orders: dict[Tensor, tuple[int, ...]], source: Tensor
) -> bool:
    """Returns true if all that a node takes and makes lies as the product's result, once it is turned back."""
    perm = found[source]
    beside = [t for t in node.inputs if t.shape == node.output.shape and t not in found]
    beside += [node.output] * (node.output in graph.output_numbers)
    alike = all(
        stride_order(_turned_back(t.shape, perm), _turned_back(t.strides, perm)) == orders[source] for t in beside
    )
    return alike and all(found.get(t, perm) == perm for t in node.inputs)


def _turned_back(along: tuple[int, ...], perm: Perm) -> tuple[int, ...]:
    """Returns sizes or strides of a transpose's result in the order of its operand's dimensions."""
    places = dict(zip(perm, along))
    return tuple(places[d] for d in range(len(perm)))


def _turned(rewrite: Rewrite, tensor: Tensor, perm: Perm) -> Tensor:
    """Returns the view of an operand that broadcasts to the space in front of a transpose."""
    new, rank = rewrite.new[tensor], len(perm)
    if tensor.size == 1:
        return new
    if tensor.rank < rank:
        padded = (1,) * (rank - tensor.rank) + tensor.shape
        new = named(rewrite.graph.apply(TABLE["reshape"], (new,), {"shape": padded}), tensor.name, "padded")
    inverse = tuple(perm.index(d) for d in range(rank))
    return named(rewrite.graph.apply(TABLE["transpose"], (new,), {"perm": inverse}), tensor.name, "turned")
