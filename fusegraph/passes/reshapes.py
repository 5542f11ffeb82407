"""Reshapes around reductions give way: pointwise nodes next to one that only divides dimensions, or joins them again,
are computed in the shape with more dimensions.

A norm over groups of channels reduces [N, G, C / G, H, W], what surrounds it is [N, C, H, W]; one kernel has one space.
Dividing a dimension commutes with every op that goes element by element, so the reshapes move outwards, to where
tensors are in memory: there they are views.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.views import divided, reshaped
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, named, replaced_by, same
from fusegraph.pattern import Found, made_by, op

Shape = tuple[int, ...]
#: What is fused with other kernels, whose results are better left as they are.
_ANCHORS = frozenset({Kind.CONTRACTION, Kind.POOLING, Kind.TRANSFORM})


def move_reshapes(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Moves reshapes around reductions outwards, to where tensors are in memory, by two rules.

    ``f(x, y)`` becomes ``join(f(divide(x), divide(y)))``, and ``divide(join(x))`` becomes x.
    """
    finer: dict[Tensor, Shape] = {}
    for tensor, shape in _seeds(graph):
        finer |= dict.fromkeys(_region(graph, tensor, finer), shape)
    if not finer:
        return same(graph)
    fine: dict[Tensor, Tensor] = {}

    def join(rewrite: Rewrite, node: Node, _: Found) -> None:
        fine[node.output] = _join(rewrite, node, finer[node.output])

    def keep(rewrite: Rewrite, node: Node, found: Found) -> None:
        fine[node.output] = rewrite.new[node.output] = fine[found["x"]]

    def divides(_: Found, node: Node) -> bool:
        return node.output.shape == finer.get(node.inputs[0]) and node.output not in graph.outputs

    element_by_element = made_by(n.op for n in graph.nodes if n.output in finer)
    rules = (
        (element_by_element.when(lambda _, node: node.output in finer), join),
        (op.reshape("x").when(divides), keep),
    )
    made = replaced_by(graph, rules)
    # What is computed in a finer shape stands for a tensor, not the view of it that has its own shape.
    alive = set(made.graph.tensors.values())
    return replace(made, counterparts={**made.counterparts, **{old: new for old, new in fine.items() if new in alive}})


def _seeds(graph: Graph) -> Iterator[tuple[Tensor, Shape]]:
    """Yields the tensors of fewer dimensions of reshapes to move, and the shapes with more."""
    for node in graph.nodes:
        if not op.reshape().fits(graph, node):
            continue
        x, y = node.inputs[0], node.output
        if divided(x.shape, y.shape) and y not in graph.outputs and _meets_reduction(graph, y):
            yield x, y.shape
        elif divided(y.shape, x.shape) and _meets_reduction(graph, x):
            yield y, x.shape


def _meets_reduction(graph: Graph, tensor: Tensor) -> bool:
    """Returns true if a tensor is next to a reduction, or pointwise nodes lead from it to one, forth or back."""
    stack, seen = [tensor], {tensor}
    while stack:
        current = stack.pop()
        for node in _neighbours(graph, current):
            if node.kind is Kind.REDUCTION:
                return True
            if node.kind is Kind.POINTWISE:
                fresh = {*node.outputs, *node.inputs} - seen
                seen |= fresh
                stack += fresh
    return False


def _neighbours(graph: Graph, tensor: Tensor) -> list[Node]:
    """Returns the nodes that take a tensor, and the one that makes it."""
    producer = graph.producer(tensor)
    return [*graph.consumers(tensor), *([producer] if producer is not None else [])]


def _reduces_rows(node: Node) -> bool:
    """Returns true if a node reduces the last dimensions, and not all."""
    if node.kind is not Kind.REDUCTION:
        return False
    shape = node.inputs[0].shape
    axes = [d for d in node.attributes["axes"] if shape[d] != 1]
    real = [d for d in range(len(shape)) if shape[d] != 1]
    return 0 < len(axes) < len(real) and axes == real[-len(axes) :]


def _region(graph: Graph, tensor: Tensor, taken: Container[Tensor]) -> set[Tensor]:
    """Returns what is computed element by element over a tensor's shape, next to the tensor or to more of them.

    It is nothing if one of them leads to a row's reduction in that shape, as a norm behind another does: they belong
    with that one.
    """
    found: set[Tensor] = set()
    stack, seen = [tensor], {tensor}
    while stack:
        current = stack.pop()
        for node in _neighbours(graph, current):
            if current in node.inputs and _reduces_rows(node):
                return set()
            if node.output not in taken and node.output not in found and _movable(graph, node, tensor.shape):
                found.add(node.output)
                fresh = {t for t in (node.output, *node.inputs) if t.shape == tensor.shape} - seen
                seen |= fresh
                stack += fresh
    return found


def _movable(graph: Graph, node: Node, shape: Shape) -> bool:
    """Returns true if a node goes element by element over a shape, by itself and not as a part of another kernel."""
    if node.kind is not Kind.POINTWISE or node.op.shapes or node.output.shape != shape:
        return False
    producers = map(graph.producer, node.inputs)
    return not any(p is not None and p.kind in _ANCHORS for p in producers)


def _join(rewrite: Rewrite, node: Node, shape: Shape) -> Tensor:
    """Writes ``f(x, y)`` as ``join(f(divide(x), divide(y)))``; returns what is computed in a finer shape."""
    graph, tensor = rewrite.graph, node.output
    inputs = tuple(_divide(graph, t, tensor.shape, shape) for t in rewrite.inputs(node))
    strides = reshaped(tensor.shape, tensor.strides, shape) or packed_strides(shape)
    result = intermediate(graph, tensor.name, "divided", shape, strides, tensor.dtype)
    fine = graph.add_node(Node(node.op, inputs, node.attributes, result)).output
    rewrite.take_over(Node(TABLE["reshape"], (fine,), {"shape": tensor.shape}, tensor), (fine,))
    return fine


def _divide(graph: Graph, tensor: Tensor, space: Shape, shape: Shape) -> Tensor:
    """Returns a tensor that broadcasts to a space, in the finer shape of that space: ``divide(join(x))`` is x."""
    if tensor.is_constant and tensor.size == 1:
        return tensor
    parts = divided(space, shape)
    assert parts is not None
    padded = (1,) * (len(space) - tensor.rank) + tensor.shape
    own = tuple(n for size, part in zip(padded, parts) for n in (part if size != 1 else (1,) * len(part)))
    joined = op.reshape("x").match(graph, tensor)
    if joined is not None and joined["x"].shape == own:
        return joined["x"]
    there = (n.output for n in graph.consumers(tensor) if op.reshape().fits(graph, n) and n.output.shape == own)
    known = next(there, None)
    if known is not None:
        return known
    return named(graph.apply(TABLE["reshape"], (tensor,), {"shape": own}), tensor.name, "divided")
