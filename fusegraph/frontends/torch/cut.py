"""Cuts an FX graph into pieces that fusegraph compiles; between them torch computes.

Every node that the table supports has a level: the number of times that values on the way to it went through torch and
back.  The nodes of one level and device form a piece.  A path that leaves a piece ends in higher levels, so each piece
is convex, and there are no more levels than the longest path has changes between fusegraph and torch.  Views and
constants belong to no piece: each piece makes those that it needs, so that tensors that are passed between pieces have
torch's strides, and views of them stay views.

What a piece computes may be copied into an input of the graph at the end: then it assigns to that input, provided that
nothing reads the input after that piece.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fusegraph.frontends.torch.forms import Forms, is_projection
from fusegraph.frontends.torch.table import FREE, HANDLERS, IGNORED, Form

#: Copies a result into an input, at the end of a graph.
COPY = "aten.copy_.default"


@dataclass(frozen=True)
class Piece:
    """The nodes of one level on one device, in the graph's order.

    Inputs are the nodes that it takes from outside, outputs those of its nodes that are needed elsewhere; none of these
    is a view or constant.
    """

    level: int
    device: str
    nodes: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


@dataclass(frozen=True)
class Cut:
    """A graph in pieces.

    levels  the level of every node that torch or a piece computes.
    left    the nodes that torch computes -> reasons.
    """

    pieces: tuple[Piece, ...]
    levels: Mapping[Any, int]
    left: Mapping[Any, str]


class Analysis:
    """Finds out which nodes of a graph a piece can compute, and which are views and constants."""

    def __init__(
        self,
        graph: Any,
        forms: Forms,
        parameters: Iterable[Any] = (),
        donated: Collection[Any] = (),
        movable: Collection[Any] = (),
    ) -> None:
        """``parameters`` are inputs that are a model's parameters and buffers, ``donated`` ones not read afterwards.

        ``movable`` nodes are results that may have other strides than in torch.
        """
        self.graph = graph
        self.forms = forms
        changed = {n.args[0] for n in graph.nodes if str(n.target) == COPY}
        #: Those that the graph does not change, and tensors that the program wrote into its text.
        self.parameters = frozenset(parameters) - changed | {n for n in graph.nodes if n.op == "get_attr"}
        self.donated = donated
        self.movable = movable
        #: The strides that were chosen for results.
        self.strides: dict[Any, tuple[int, ...]] = {}
        self._roots: dict[Any, tuple[Any, ...]] = {}
        #: Nodes that torch computes.
        self.torchs: set[Any] = set()

    def is_free(self, node: Any) -> bool:
        """Tells whether a node is a view or a constant that a piece can make."""
        if is_projection(node):
            return self.is_free(node.args[0])
        if node.op != "call_function" or str(node.target) not in FREE:
            return False
        sources = (n for n in node.all_input_nodes if n not in self.forms.numbers)
        return all(self._is_known(n) for n in (node, *sources))

    def _is_known(self, node: Any) -> bool:
        """Tells whether a node's results are tensors of dtypes that fusegraph has."""
        forms = self.forms.forms.get(node)
        return forms is not None and all(f is not None and f.dtype is not None for f in forms)

    def roots(self, node: Any) -> tuple[Any, ...]:
        """Returns the nodes that a node is a view of: itself if it is not one, none if it is a constant."""
        if node in self.forms.numbers:
            return ()
        if not self.is_free(node):
            return (node,)
        if node not in self._roots:
            self._roots[node] = tuple(dict.fromkeys(r for n in node.all_input_nodes for r in self.roots(n)))
        return self._roots[node]

    def needs(self, node: Any) -> tuple[Any, ...]:
        """Returns the roots of a node's arguments."""
        return tuple(dict.fromkeys(r for n in self.sources(node) for r in self.roots(n)))

    def sources(self, node: Any) -> tuple[Any, ...]:
        """Returns the arguments that a node's handler reads; all of them if torch computes it."""
        skipped = IGNORED.get(str(node.target), ()) if node not in self.torchs else ()
        if not skipped:
            return tuple(node.all_input_nodes)
        beside = {a for n, a in enumerate(node.args) if n not in skipped}
        unread = {a for n, a in enumerate(node.args) if n in skipped} - beside
        return tuple(n for n in node.all_input_nodes if n not in unread)

    def refusal(self, node: Any) -> str | None:
        """Returns why torch has to compute a node; None if a piece can."""
        if node.op != "call_function":
            return f"{node.op} of {node.target}"
        name = str(node.target)
        if name == COPY and node.args[0].op != "placeholder":
            return "it writes to an input"
        if name not in HANDLERS and name != COPY:
            return "not in the table" if name not in FREE else "of a dtype, or of sizes, that fusegraph has not"
        known = self.forms.forms.get(node)
        if known is None:
            return "its sizes depend on data"
        used = self._used(node, known)
        if not used or any(form is None for form in used):
            return "its results are no tensors with strides"
        places = {form.device for form in used if form is not None}
        for source in self.sources(node):
            if source in self.forms.numbers:
                continue
            inputs = self.forms.forms.get(source)
            if inputs is None or any(form is None for form in inputs):
                return f"{source.name} is no tensor with strides"
            used += inputs
            places |= {form.device for form in inputs if form is not None}
        if len(places) > 1:
            return f"its tensors are on several devices: {', '.join(sorted(places))}"
        if next(iter(places)).partition(":")[0] not in ("cpu", "cuda"):
            return f"its tensors are on {next(iter(places))}"
        if any(form is not None and form.dtype is None for form in used):
            return "a tensor has a dtype that fusegraph has not"
        return None

    def _used(self, node: Any, known: tuple[Form | None, ...]) -> tuple[Form | None, ...]:
        """Returns the forms of those of a node's results that are used."""
        users = list(node.users)
        if not (users and all(is_projection(user) for user in users)):
            return known
        return tuple(known[user.args[1]] for user in users if user.args[1] < len(known))

    def readers(self, division: Cut) -> Counter[Any]:
        """Returns how many pieces, and nodes that torch computes, read each node."""
        found = Counter(node for piece in division.pieces for node in piece.inputs)
        found.update(root for node in division.left for root in self.needs(node))
        return found

    def device(self, node: Any) -> str:
        """Returns the device of a node's results."""
        return next(form.device for form in self.forms.forms[node] or () if form is not None)

    def traffic(self, piece: Piece) -> int:
        """Returns how many bytes one kernel for each of a piece's operators would read and write."""
        return sum(self.nbytes(n) for node in piece.nodes for n in (node, *node.all_input_nodes))

    def nbytes(self, node: Any) -> int:
        """Returns the size of a node's results in bytes."""
        forms = self.forms.forms.get(node) or ()
        return sum(prod(f.shape) * f.dtype.itemsize for f in forms if f is not None and f.dtype is not None)


def cut(analysis: Analysis, refused: Mapping[Any, str]) -> Cut:
    """Cuts a graph; nodes in ``refused`` are also left to torch."""
    graph = analysis.graph
    left: dict[Any, str] = {}
    ours: dict[Any, Any] = {}  # a node, or a projection of it -> the node that a piece computes
    levels: dict[Any, int] = {}
    drawn = 0  # the level of the last random numbers: torch draws them in the program's order
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node in analysis.forms.numbers or analysis.is_free(node):
            continue
        if is_projection(node):
            source = node.args[0]
            if source in ours:
                ours[node] = source
            elif source in levels:
                levels[node] = levels[source]
            continue
        if node.op == "get_attr":
            continue
        analysis.torchs.discard(node)
        reason = refused.get(node) or analysis.refusal(node)
        if str(node.target) == COPY and not _is_ours(analysis.roots(node.args[1]), ours):
            reason = reason or "it writes to an input what no piece computes"
        if reason is not None:
            analysis.torchs.add(node)
        level = 0
        for root in analysis.needs(node):
            if root in ours:
                level = max(level, levels[ours[root]] + (reason is not None))
            elif root in levels:
                level = max(level, levels[root])
        if reason is not None and _may_draw(node):
            level = drawn = max(level, drawn)
        levels[node] = level
        if reason is None:
            ours[node] = node
        else:
            left[node] = reason
    _delay(analysis, levels, ours)
    if late := _overwritten_early(analysis, levels, ours):
        return cut(analysis, {**refused, **dict.fromkeys(late, "it writes to an input that is read later")})
    return Cut(tuple(_pieces(analysis, levels, ours)), levels, left)


def _is_ours(roots: Sequence[Any], ours: Mapping[Any, Any]) -> bool:
    return bool(roots) and all(root in ours for root in roots)


def _overwritten_early(analysis: Analysis, levels: Mapping[Any, int], ours: Mapping[Any, Any]) -> list[Any]:
    """Returns the copies into inputs that are to be part of a piece, though what the inputs held is read after it."""
    copies = {n.args[0]: n for n in ours if str(n.target) == COPY}
    late = []
    for node in analysis.graph.nodes if copies else ():
        if node not in levels and node.op != "output":
            continue
        for copy in (copies[root] for root in analysis.needs(node) if root in copies):
            level = levels.get(node, -1)
            before = level < levels[copy] or (node not in ours and level == levels[copy])
            beside = node in ours and (level, analysis.device(node)) == (levels[copy], analysis.device(copy))
            if node.op == "output" or not (before or beside):
                late.append(copy)
    return late


def _may_draw(node: Any) -> bool:
    """Tells whether an operator draws random numbers, or calls functions that may."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _delay(analysis: Analysis, levels: dict[Any, int], ours: Mapping[Any, Any]) -> None:
    """Moves nodes to the piece that takes their results if fewer bytes then pass between pieces.

    For example, a cast of a weight belongs in the piece of the product.
    """
    takers: dict[Any, list[Any]] = defaultdict(list)
    for node in analysis.graph.nodes:
        if node in levels or node.op == "output":
            for root in analysis.needs(node):
                takers[ours.get(root, root)].append(node)
    for node in reversed([n for n, owner in ours.items() if n is owner]):
        if not takers[node] or any(t.op == "output" for t in takers[node]):
            continue
        # A node that torch computes takes results of pieces of earlier levels only.
        latest = min(levels[t] if t in ours else levels[t] - 1 for t in takers[node])
        if latest <= levels[node]:
            continue
        fresh = sum(
            analysis.nbytes(ours[r])
            for r in analysis.needs(node)
            if r in ours and all(levels.get(t, latest) <= levels[ours[r]] for t in takers[ours[r]] if t is not node)
        )
        if fresh <= analysis.nbytes(node):
            levels[node] = latest


def _pieces(analysis: Analysis, levels: Mapping[Any, int], ours: Mapping[Any, Any]) -> Iterator[Piece]:
    members: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for node, owner in ours.items():
        if node is owner:
            members[levels[node], analysis.device(node)].append(node)
    home = {node: key for key, nodes in members.items() for node in nodes}
    wanted: dict[Any, None] = {}  # nodes of pieces that are needed outside their piece
    for node in analysis.graph.nodes:
        if node in levels or node.op == "output":
            for root in analysis.needs(node):
                if root in ours and home.get(ours[root]) != home.get(node):
                    wanted[root] = None
    for (level, device), nodes in sorted(members.items()):
        inputs = dict.fromkeys(
            r for n in nodes for r in analysis.needs(n) if r not in ours or home[ours[r]] != (level, device)
        )
        outputs = [root for root in wanted if home[ours[root]] == (level, device)]
        if outputs or any(str(n.target) == COPY for n in nodes):
            yield Piece(level, device, tuple(nodes), tuple(inputs), tuple(outputs))
