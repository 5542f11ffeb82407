"""Rewriting a graph: what every pass does that replaces some nodes and takes over the others as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np

from fusegraph.dtypes import DType
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.choices import Choice
from fusegraph.ops import TABLE
from fusegraph.passes.partition import Decision, Partition
from fusegraph.pattern import Found, Pattern, made_of

T = TypeVar("T")


@dataclass(frozen=True)
class Rewritten:
    """What a pass makes of a graph: an equivalent graph with the same inputs and outputs.

    counterparts  the new graph's tensor for each tensor of the old graph whose value it has, if there is one.
    decisions     what was rewritten, what was not, and why.
    choices       what was weighed.
    notes         what else reports and the code behind the pass ask for, by name.
    declined      of a pass that speculates: the names of the rewrites that a partition of the graph does not accept,
                  and why it does not.
    """

    graph: Graph
    counterparts: Mapping[Tensor, Tensor]
    decisions: tuple[Decision, ...] = ()
    choices: tuple[Choice, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    declined: Callable[[Partition], Mapping[str, str]] | None = None


def same(graph: Graph, decisions: Sequence[Decision] = ()) -> Rewritten:
    """Returns the graph itself."""
    return Rewritten(graph, {t: t for t in graph.tensors.values()}, tuple(decisions))


class Rewrite:
    """A new graph in the making: its inputs and constants are there, nodes are added in the order of the old one's.

    graph  the new graph.
    new    the new graph's tensor for each of the old one that has one by now.
    """

    def __init__(self, old: Graph, strides: Mapping[Tensor, tuple[int, ...]] | None = None) -> None:
        """strides: those of the old graph's tensors that lie otherwise in the new one."""
        self._old, self._strides = old, strides or {}
        self.graph = Graph(old.name, old.io_dtype, old.compute_dtype)
        self.new: dict[Tensor, Tensor] = {}
        for tensor in old.tensors.values():
            if old.producer(tensor) is None:
                self.result(tensor)
        self.graph.inputs = [self.new[t] for t in old.inputs]
        self.graph.parameters = {self.new[t] for t in old.parameters}
        self.graph.donated = {self.new[t] for t in old.donated if t in self.new}
        self.graph.packed = {self.new[t]: names for t, names in old.packed.items()}

    def inputs(self, node: Node) -> tuple[Tensor, ...]:
        """Returns the new graph's operands of a node."""
        return tuple(self.new[t] for t in node.inputs)

    def result(self, old: Tensor) -> Tensor:
        """Returns the new graph's tensor for one of the old graph's; adds it, with the same name, shape and dtype."""
        if old not in self.new:
            strides = self._strides.get(old, old.strides)
            made = self.new[old] = self.graph._add_tensor(old.name, old.shape, strides, old.dtype, old.value)
            if old in self._old._automatic:
                self.graph._automatic.add(made)
        return self.new[old]

    def take_over(self, node: Node, inputs: Sequence[Tensor] | None = None) -> None:
        """Adds a node as it is, or with other operands."""
        operands = self.inputs(node) if inputs is None else tuple(inputs)
        self.graph.add_node(Node(node.op, operands, node.attributes, *map(self.result, node.outputs)))

    def done(self, decisions: Sequence[Decision] = ()) -> Rewritten:
        """Returns the new graph, all nodes being there; those that no output depends on are removed again."""
        self.graph.outputs = [self.new[t] for t in self._old.outputs]
        self.graph.updates = {self.new[t]: self.new[x] for t, x in self._old.updates.items()}
        remove_dead(self.graph)
        alive = set(self.graph.tensors.values())
        return Rewritten(self.graph, {old: new for old, new in self.new.items() if new in alive}, tuple(decisions))


#: A pattern, and what writes in the new graph what replaces a node that it matches.
Rule: TypeAlias = tuple[Pattern, Callable[[Rewrite, Node, Found], None]]


def as_given(graph: Graph) -> Graph:
    """Returns a graph of the same nodes, whose tensors lie as they did before views of them were made."""
    rewrite = Rewrite(graph, {t: t.own_strides for t in graph.tensors.values() if t.own_strides is not None})
    for node in graph.nodes:
        rewrite.take_over(node)
    return rewrite.done().graph


def replaced(
    graph: Graph,
    find: Callable[[Node], T | None],
    write: Callable[[Rewrite, Node, T], None],
    strides: Mapping[Tensor, tuple[int, ...]] | None = None,
) -> Rewritten:
    """Returns a graph in which some nodes are written otherwise; the graph itself if there is nothing to change.

    find     returns what is found of a node, all of them before any is written; nothing (None, 0) if it stays.
    write    adds to the new graph what replaces a node, given what was found.
    strides  those of tensors that lie otherwise in the new graph.
    """
    found = {node: what for node in graph.nodes if (what := find(node))}
    if not found and all(t.strides == moved for t, moved in (strides or {}).items()):
        return same(graph)
    rewrite = Rewrite(graph, strides)
    for node in graph.nodes:
        if node in found:
            write(rewrite, node, found[node])
        else:
            rewrite.take_over(node)
    return rewrite.done()


def replaced_where_chosen(
    graph: Graph, weighed: Callable[[Node], tuple[Choice, T] | None], write: Callable[[Rewrite, Node, T], None]
) -> Rewritten:
    """Returns a graph in which nodes are written as was chosen for them, and the choices.

    ``weighed`` returns for a node a choice, and what ``write`` takes beside the node: false if the node stays as it is.
    None is for nodes about which nothing is chosen.
    """
    found = {node: chosen for node in graph.nodes if (chosen := weighed(node)) is not None}
    made = replaced(graph, lambda node: found[node][1] if node in found else None, write)
    return replace(made, choices=tuple(choice for choice, _ in found.values()))


def replaced_by(graph: Graph, rules: Sequence[Rule]) -> Rewritten:
    """Returns a graph in which each node that a pattern matches is written by its rule, the first that applies."""

    def find(node: Node) -> tuple[Callable[[Rewrite, Node, Found], None], Found] | None:
        return next(((write, match) for pattern, write in rules for match in pattern.of(Found(graph), node)), None)

    return replaced(graph, find, lambda rewrite, node, found: found[0](rewrite, node, found[1]))


def named(tensor: Tensor, after: str, part: str) -> Tensor:
    """Returns the tensor, named after another one; a name that gives way to one of the user's."""
    graph = tensor.graph
    graph._rename(tensor, graph._unique(f"{after[:180]} {part}"))
    graph._automatic.add(tensor)
    return tensor


def intermediate(
    graph: Graph,
    after: str,
    part: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: DType,
    value: np.ndarray[Any, Any] | None = None,
) -> Tensor:
    """Returns a new tensor, named after ``after`` and ``part``: for the result of a node, or a constant."""
    made = graph._add_tensor(graph._unique(f"{after[:180]} {part}"), shape, strides, dtype, value)
    graph._automatic.add(made)
    return made


def copied(graph: Graph, tensor: Tensor, part: str, strides: tuple[int, ...]) -> Tensor:
    """Returns a copy of a tensor that lies otherwise in memory."""
    made = graph.apply(TABLE["identity"], (tensor,), {})
    made.strides = strides
    return named(made, tensor.name, part)


def remove_dead(graph: Graph) -> None:
    """Removes the nodes that no output depends on, and the constants that no node takes."""
    live = made_of(graph, graph.outputs)
    for node in reversed(graph.nodes):
        if node not in live:
            graph.remove_node(node)
    taken = {t for node in live for t in node.inputs}
    for tensor in [t for t in graph.tensors.values() if t.is_constant and t not in taken]:
        del graph.tensors[tensor.name]
