"""Patterns to look for in a graph, written as the expressions that they match.

    swish = op.mul("x", op.sigmoid("x"))
    found = swish.match(graph, tensor)  # None, or found["x"], and the nodes between as found.nodes

A pattern is matched from the tensor that it stands for towards the inputs.  A string in it is a name for a tensor, the
same tensor wherever the name occurs; a number is a constant of one element; ``...`` matches any tensor.  The operands
of an op that commutes match in either order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import Any, TypeAlias

from codegen.declined import Declined
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops import TABLE
from fusegraph.ops.base import Op

#: What stands for a tensor in a pattern: a pattern, a name, a number, or ``...`` for any tensor.
Operand: TypeAlias = "Pattern | str | float | EllipsisType"


def constant(tensor: Tensor) -> float | None:
    """Returns the value of a constant of one element; None for any other tensor."""
    return float(tensor.value.reshape(-1)[0]) if tensor.value is not None and tensor.size == 1 else None


def only_consumer(graph: Graph, tensor: Tensor) -> Node | None:
    """Returns the only node that takes a tensor; None if there are more, or none, or it is an output of the graph."""
    takers = graph.consumers(tensor)
    return takers[0] if len(takers) == 1 and tensor not in graph.outputs else None


def followers(graph: Graph, node: Node) -> Iterator[Node]:
    """Yields the nodes that take what a node makes, and those that take what these make, each once, near ones first."""
    found = {node: None}
    queue = [node]
    for each in queue:
        for tensor in each.outputs:
            for taker in graph.readers.get(tensor, ()):
                if taker not in found:
                    found[taker] = None
                    queue.append(taker)
                    yield taker


def made_of(
    graph: Graph,
    tensors: Iterable[Tensor],
    operands: Callable[[Node], Sequence[Tensor] | None] = lambda node: node.inputs,
) -> dict[Node, Sequence[Tensor]]:
    """Returns the nodes that make tensors, each with its operands that were followed further.

    ``operands`` says which these are; nodes for which it gives None are left out, and the search ends there.
    """
    found: dict[Node, Sequence[Tensor]] = {}
    stack = list(tensors)
    while stack:
        node = graph.producer(stack.pop())
        followed = None if node is None or node in found else operands(node)
        if node is not None and followed is not None:
            found[node] = followed
            stack += followed
    return found


@dataclass(frozen=True)
class Found:
    """A match: the tensors that the pattern names, and the nodes that it went through, from the result backwards."""

    graph: Graph
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def named(self, name: str, tensor: Tensor) -> Iterator[Found]:
        """Yields this with a name for a tensor, unless another tensor has the name; an empty name changes nothing."""
        if not name or self.tensors.get(name) is tensor:
            yield self
        elif name not in self.tensors:
            yield Found(self.graph, {**self.tensors, name: tensor}, self.nodes)

    def where(self, **patterns: Operand) -> Found | None:
        """Returns this, extended by matching named tensors one after the other; None if one of them does not match."""
        return next(_all(self, [(pattern, name) for name, pattern in patterns.items()]), None)

    def must(self, reason: str, **patterns: Operand) -> Found:
        """Returns the same as `where`.  Raises Declined if a tensor does not match: {name} in reason is a tensor's."""
        found = self.where(**patterns)
        if found is None:
            raise Declined(reason.format(**{name: repr(t.name) for name, t in self.tensors.items()}))
        return found

    def onwards(self, name: str, pattern: Pattern, steps: int) -> Iterator[Found]:
        """Yields matches of a pattern by tensors that at most ``steps`` nodes make of a named one, nearest first."""
        level = [self[name]]
        for _ in range(steps):
            level = list(dict.fromkeys(n.output for t in level for n in self.graph.consumers(t)))
            for tensor in level:
                yield from pattern.ways(self, tensor)


class Pattern:
    """A description that a tensor may match."""

    def match(self, graph: Graph, tensor: Tensor) -> Found | None:
        """Returns the first way in which a tensor of a graph matches; None if there is none."""
        return next(self.ways(Found(graph), tensor), None)

    def ways(self, found: Found, tensor: Tensor) -> Iterator[Found]:
        """Returns all ways to match a tensor, given what was found so far."""
        node = found.graph.producer(tensor)
        return iter(()) if node is None else self.of(found, node)

    def of(self, found: Found, node: Node) -> Iterator[Found]:
        """Returns all ways to match the result of a node, which need not be in the graph."""
        raise NotImplementedError

    def fits(self, graph: Graph, node: Node) -> bool:
        """Returns true if the result of a node matches."""
        return any(self.of(Found(graph), node))

    def __or__(self, other: Operand) -> Either:
        return Either(self, other)


class Is(Pattern):
    """A tensor for which a condition holds; an empty name gives it none."""

    def __init__(self, name: str = "", holds: Callable[[Tensor], bool] = lambda _: True) -> None:
        self.name, self.holds = name, holds

    def ways(self, found: Found, tensor: Tensor) -> Iterator[Found]:
        return found.named(self.name, tensor) if self.holds(tensor) else iter(())


class Either(Pattern):
    """One of several patterns, tried in their order."""

    def __init__(self, *patterns: Operand) -> None:
        self.patterns = [_pattern(p) for p in patterns]

    def ways(self, found: Found, tensor: Tensor) -> Iterator[Found]:
        for pattern in self.patterns:
            yield from pattern.ways(found, tensor)

    def of(self, found: Found, node: Node) -> Iterator[Found]:
        for pattern in self.patterns:
            yield from pattern.of(found, node)


def repeated(inner: Operand, *steps: Callable[[Pattern], Pattern]) -> Pattern:
    """Returns a pattern of inner, or of any of the steps applied to inner, or to that, and so on."""
    result = Either(inner)
    result.patterns += [step(result) for step in steps]
    return result


@dataclass(frozen=True)
class Made(Pattern):
    """The result of one of several ops, with the given operands (any, if None) and attributes."""

    ops: frozenset[Op]
    operands: tuple[Pattern, ...] | None
    attributes: Mapping[str, Any]
    name: str = ""
    by: Callable[[Found, Node], bool] = lambda _, __: True

    def named(self, name: str) -> Made:
        """Returns the same, with a name for the result."""
        return replace(self, name=name)

    def when(self, by: Callable[[Found, Node], bool]) -> Made:
        """Returns the same, restricted to nodes for which ``by`` holds, given what was found so far."""
        return replace(self, by=by)

    def built(self, found: Found, *outputs: Tensor) -> Node:
        """Returns a node of the pattern's only op, with the tensors that its operands name, and these outputs."""
        ((entry,), operands) = self.ops, tuple(found[o.name] for o in self.operands or () if isinstance(o, Is))
        return Node(entry, operands, self.attributes, *outputs)

    def of(self, found: Found, node: Node) -> Iterator[Found]:
        operands = (Is(),) * len(node.inputs) if self.operands is None else self.operands
        alike = node.op in self.ops and len(operands) == len(node.inputs)
        if not alike or any(node.attributes[key] != value for key, value in self.attributes.items()):
            return
        if not self.by(found, node):
            return
        for known in found.named(self.name, node.output):
            through = Found(known.graph, known.tensors, (*known.nodes, node))
            yield from _all(through, list(zip(operands, node.inputs)))
            if node.op.commutes and self.operands is not None:
                yield from _all(through, list(zip(operands, node.inputs[::-1])))


def made_by(ops: Iterable[Op], *operands: Operand, **attributes: Any) -> Made:
    """Returns a pattern of the result of one of several ops, with these operands (none: any operands)."""
    return Made(frozenset(ops), tuple(map(_pattern, operands)) or None, attributes)


class _Table:
    """Patterns by the ops of the table: ``op.add("x", 1.0)``, ``op.add()`` for any operands."""

    def __getattr__(self, name: str) -> Callable[..., Made]:
        return lambda *operands, **attributes: made_by((TABLE[name],), *operands, **attributes)


op: _Table = _Table()


def _pattern(operand: Operand) -> Pattern:
    if isinstance(operand, Pattern):
        return operand
    if isinstance(operand, str):
        return Is(operand)
    return Is() if operand is ... else Is(holds=lambda tensor: constant(tensor) == operand)


def _all(found: Found, pairs: Sequence[tuple[Operand, Tensor | str]]) -> Iterator[Found]:
    """Yields all ways to match every pattern with its tensor, given as such or by name."""
    if not pairs:
        yield found
        return
    (pattern, tensor), *rest = pairs
    for each in _pattern(pattern).ways(found, found[tensor] if isinstance(tensor, str) else tensor):
        yield from _all(each, rest)
