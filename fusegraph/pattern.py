"""Patterns: what is looked for in a graph, written as the expression that it is.

    swish = op.mul("x", op.sigmoid("x"))
    found = swish.match(graph, tensor)  # None, or found["x"], and the nodes between as found.nodes

A pattern is matched from the tensor that it stands for towards the inputs.  A string in it is a name for a tensor, the
same one wherever the name is; a number is a constant of one element; ``...`` is anything.  The operands of an op that
commutes match in either order.
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

#: What stands for a tensor: a pattern, a name, a number or anything.
Operand: TypeAlias = "Pattern | str | float | EllipsisType"


def constant(tensor: Tensor) -> float | None:
    """Returns the number that a tensor is, None if it is not a constant of one element."""
    return float(tensor.value.reshape(-1)[0]) if tensor.value is not None and tensor.size == 1 else None


def only_consumer(graph: Graph, tensor: Tensor) -> Node | None:
    """Returns the only node that takes a tensor; None if there are more, or none, or it is an output of the graph."""
    takers = graph.consumers(tensor)
    return takers[0] if len(takers) == 1 and tensor not in graph.outputs else None


def made_of(
    graph: Graph, tensor: Tensor, operands: Callable[[Node], Sequence[Tensor] | None]
) -> dict[Node, Sequence[Tensor]]:
    """Returns the nodes that a tensor is made by, each with its operands from which this is followed; to those
    without any.
    """
    found: dict[Node, Sequence[Tensor]] = {}
    stack = [tensor]
    while stack:
        node = graph.producer(stack.pop())
        followed = None if node is None or node in found else operands(node)
        if node is not None and followed is not None:
            found[node] = followed
            stack += followed
    return found


@dataclass(frozen=True)
class Found:
    """The tensors that a pattern has names for, and the nodes that it went through, beginning with the last one."""

    graph: Graph
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def named(self, name: str, tensor: Tensor) -> Iterator[Found]:
        """With a name for a tensor, unless it is another one's; an empty name changes nothing."""
        if not name or self.tensors.get(name) is tensor:
            yield self
        elif name not in self.tensors:
            yield replace(self, tensors={**self.tensors, name: tensor})

    def where(self, **patterns: Operand) -> Found | None:
        """With what is found of tensors that have names, one after the other; None if one of them does not match."""
        return next(_all(self, [(pattern, name) for name, pattern in patterns.items()]), None)

    def must(self, reason: str, **patterns: Operand) -> Found:
        """Returns the same.  Raises Declined with the reason, in which names stand for tensors, if one of them does
        not.
        """
        found = self.where(**patterns)
        if found is None:
            raise Declined(reason.format(**{name: repr(t.name) for name, t in self.tensors.items()}))
        return found

    def onwards(self, name: str, pattern: Pattern, steps: int) -> Iterator[Found]:
        """Yields what matches a pattern among what at most so many nodes make of a tensor, the nearest first."""
        level = [self[name]]
        for _ in range(steps):
            level = list(dict.fromkeys(n.output for t in level for n in self.graph.consumers(t)))
            for tensor in level:
                yield from pattern.ways(self, tensor)


class Pattern:
    """Something that a tensor may be."""

    def match(self, graph: Graph, tensor: Tensor) -> Found | None:
        """Returns what a tensor of a graph is by the pattern, the first way to match it; None if there is none."""
        return next(self.ways(Found(graph), tensor), None)

    def ways(self, found: Found, tensor: Tensor) -> Iterator[Found]:
        """Returns all ways to match a tensor, given what is found by now."""
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
    """A tensor of which something holds, with a name unless this is empty."""

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
    """Returns a pattern, or steps of it, or steps of those, and so on."""
    result = Either(inner)
    result.patterns += [step(result) for step in steps]
    return result


@dataclass(frozen=True)
class Made(Pattern):
    """The result of an op, one of some, of such operands (of any, if None) with such attributes."""

    ops: frozenset[Op]
    operands: tuple[Pattern, ...] | None
    attributes: Mapping[str, Any]
    name: str = ""
    by: Callable[[Found, Node], bool] = lambda _, __: True

    def named(self, name: str) -> Made:
        """Returns the same, with a name for the result."""
        return replace(self, name=name)

    def when(self, by: Callable[[Found, Node], bool]) -> Made:
        """Returns the same, where this holds of the node, given what is found by now."""
        return replace(self, by=by)

    def once(self) -> Made:
        """Returns the same, where the result has one consumer and is no output of the graph."""
        return self.when(lambda found, node: only_consumer(found.graph, node.output) is not None)

    def built(self, found: Found, *outputs: Tensor) -> Node:
        """Returns the node of the op that has the tensors that its operands name, and such results."""
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
            through = replace(known, nodes=(*known.nodes, node))
            yield from _all(through, list(zip(operands, node.inputs)))
            if node.op.commutes and self.operands is not None:
                yield from _all(through, list(zip(operands, node.inputs[::-1])))


def made_by(ops: Iterable[Op], *operands: Operand, **attributes: Any) -> Made:
    """Returns the result of one of some ops, of such operands (none: of any)."""
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
    """Yields all ways to match all of some tensors, or of those with names."""
    if not pairs:
        yield found
        return
    (pattern, tensor), *rest = pairs
    for each in _pattern(pattern).ways(found, found[tensor] if isinstance(tensor, str) else tensor):
        yield from _all(each, rest)
