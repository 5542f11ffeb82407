"""Recognising attention: products, pointwise nodes, a softmax over their last dimension and products with its result
become one node, so that one kernel (the attention family) computes them and no score is ever in memory.

Nothing is assumed of the pointwise nodes between the first products and the softmax: scales, masks, biases, caps, or
whatever else the graph has there.  A pattern that only looks like attention is left alone, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from fusegraph.dtypes import float64
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import attention
from fusegraph.lowering.base import Options, Refusal
from fusegraph.lowering.program import broadcasts_to, describe
from fusegraph.ops.attention import ATTENTION, Score
from fusegraph.ops.base import Kind
from fusegraph.passes.decompose import NARROW
from fusegraph.passes.partition import Decision
from fusegraph.passes.rewrite import Rewrite, Simplified, same

#: Ops that are done again for every score rather than read; others only where they would be as many as the scores.
_CHEAP = frozenset(
    """
    identity narrow gen_index binary_select add sub mul max min neg abs cmp_eq cmp_neq cmp_gt cmp_ge cmp_lt cmp_le
    logical_and logical_or logical_not
    """.split()  # noqa: SIM905 - a list of quoted words is no easier to read
)


@dataclass(frozen=True)
class Recognised:
    """A graph with attention nodes; decisions say what became one and what did not."""

    simplified: Simplified
    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class _Match:
    """What an attention node stands for: nodes from the products of queries and keys to ``out``, the last one."""

    out: Node
    values: Tensor
    product: Node
    score: Tensor
    members: frozenset[Node]
    stats: Tensor | None
    sink: Tensor | None
    zero: bool


class _No(Exception):
    """It looks like attention and is none; the text is the reason."""


def recognise(graph: Graph, options: Options) -> Recognised:
    """Replaces what is attention by attention nodes."""
    if options.strict:  # scores and probabilities would have to be rounded as if they were stored
        return Recognised(same(graph), ())
    matches: dict[Node, tuple[_Match, Node]] = {}
    decisions: list[Decision] = []

    def left(node: Node, reason: Exception | str) -> None:
        first = graph.producer(node.inputs[0])
        assert first is not None
        text = f"looks like attention and is left as it is: {reason}"
        decisions.append(Decision(first.name, node.name, False, text))

    taken: set[Node] = set()
    for node in graph.nodes:
        if node.op.name != "matmul":
            continue
        try:
            match = _Matcher(graph, node).match()
            if match is None:
                continue
            if match.members & taken:
                raise _No("part of it belongs to another attention")
            made = _node(graph, match)
            attention.check(made, graph, options)
        except (_No, Refusal) as reason:
            left(node, reason)
            continue
        matches[node] = match, made
        taken |= match.members
    while matches and (found := _counted_along(graph, matches)) is not None:
        left(found[0], f"{found[1].name!r} counts along it and is needed elsewhere")
        taken -= matches.pop(found[0])[0].members
    if not matches:
        return Recognised(same(graph), tuple(decisions))
    for match, _ in matches.values():
        text = f"attention: {len(match.members)} nodes become one kernel, no score is in memory"
        decisions.append(Decision(match.product.name, match.out.name, True, text, 2 * match.score.nbytes))
    return Recognised(_rewritten(graph, matches, taken), tuple(decisions))


def _counted_along(graph: Graph, matches: Mapping[Node, tuple[_Match, Node]]) -> tuple[Node, Node] | None:
    """An attention, and a node that is still needed and takes the shape of something that will no longer exist."""
    members = {member: node for node, (match, _) in matches.items() for member in match.members}
    live: set[Node] = set()
    stack = list(graph.outputs)
    while stack:
        node = graph.producer(stack.pop())
        node = members.get(node, node) if node is not None else None
        if node is not None and node not in live:
            live.add(node)
            stack += (matches[node][1] if node in matches else node).inputs
            for key, t in zip(node.op.names(len(node.inputs)), node.inputs):
                maker = graph.producer(t)
                if key in node.op.shapes and maker in members and t is not members[maker].output:
                    return members[maker], node
    return None


def _rewritten(graph: Graph, matches: Mapping[Node, tuple[_Match, Node]], taken: set[Node]) -> Simplified:
    rewrite = Rewrite(graph)
    for node in graph.nodes:
        if node in matches:
            match, made = matches[node]
            rewrite.take_over(made)
            # What is in registers only is as exact as the result, or rounded on the way to it.
            for member in match.members:
                for t in member.outputs:
                    rewrite.new.setdefault(t, rewrite.new[node.output])
        elif node not in taken:
            rewrite.take_over(node)
    return rewrite.done()


class _Matcher:
    """Follows the graph backwards from a product that may be the one with the values."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node
        self.members: set[Node] = {node}

    def _made(self, tensor: Tensor, *names: str) -> Node | None:
        """The node that makes a tensor, if its op is one of these."""
        node = self.graph.producer(tensor)
        return node if node is not None and node.op.name in names else None

    def _cast(self, tensor: Tensor) -> Tensor:
        """What a tensor is a float of another dtype of; casts become members."""
        while (node := self._made(tensor, "identity", NARROW.name)) is not None and node.inputs[0].dtype.is_float:
            self.members.add(node)
            tensor = node.inputs[0]
        return tensor

    def _guard(self, tensor: Tensor, compared: float, instead: float) -> tuple[Tensor, bool]:
        """x, where a tensor is: ``instead`` where x equals ``compared``, else x; and whether it is."""
        node = self._made(tensor, "binary_select")
        if node is None:
            return tensor, False
        first, second, mask = node.inputs
        test = self._made(mask, "cmp_eq")
        if test is None or not _is(first, instead) or test.inputs[0] is not second or not _is(test.inputs[1], compared):
            return tensor, False
        self.members |= {node, test}
        return second, True

    def match(self) -> _Match | None:
        """The attention that ends in the node; None if it does not look like one.  Raises _No."""
        node = self.node
        weights = self._cast(node.inputs[0])
        normal = self._made(weights, "mul", "div")
        if normal is None:
            return None
        e, divisor = normal.inputs
        if normal.op.name == "mul":
            if self._made(e, "reciprocal") is not None:
                e, divisor = divisor, e
            inverse = self._made(divisor, "reciprocal")
            if inverse is None:
                return None
            self.members.add(inverse)
            divisor = inverse.inputs[0]
        exponential = self._made(e, "exp")
        if exponential is None:
            return None
        self.members |= {normal, exponential}
        total, zero = self._guard(divisor, 0.0, 1.0)
        whole = total
        sunk = None
        added = self._made(total, "add")
        if added is not None:
            total, other = added.inputs
            sunk = self._made(other, "exp")
            if sunk is None:
                return None
            self.members |= {added, sunk}
        summed = self._made(total, "reduction")
        if summed is None or summed.attributes["mode"] != "add" or summed.inputs[0] is not e:
            return None
        self._along_keys(summed)
        self.members.add(summed)
        difference = self._made(exponential.inputs[0], "sub")
        if difference is None:
            raise _No(f"{exponential.name!r} is not of scores less the largest of them")
        self.members.add(difference)
        score, shift = difference.inputs
        most, guarded = self._guard(shift, -inf, 0.0)
        sink = None
        if sunk is not None:
            moved, larger = self._made(sunk.inputs[0], "sub"), self._made(most, "max")
            if (
                moved is None
                or larger is None
                or moved.inputs[1] is not shift
                or larger.inputs[1] is not moved.inputs[0]
            ):
                raise _No(f"what is added to the sum of {summed.name!r} is no sink")
            self.members |= {moved, larger}
            most, sink = larger.inputs
        largest = self._made(most, "reduction")
        if largest is None or largest.attributes["mode"] != "max" or largest.inputs[0] is not score:
            raise _No(f"{shift.name!r}, which is taken from the scores, is not the largest of {score.name!r}")
        self._along_keys(largest)
        self.members.add(largest)
        if zero and not guarded:
            raise _No("rows without keys are NaN in one place and 0 in another")
        product = self._score(score)
        stats = self._stats(whole, shift, zero)
        values = node.inputs[1]
        if weights.shape != score.shape or score.shape != product.output.shape:
            raise _No(f"{score.name!r} {list(score.shape)} has not the shape of {product.name!r}")
        if not broadcasts_to(values.shape[:-2], score.shape[:-2]) or node.attributes["compute_dtype"] == "tf32":
            raise _No(f"{values.name!r} has batches that the scores have not, or products are in tf32")
        found = _Match(node, values, product, score, frozenset(self.members), stats, sink, zero)
        self._private(found)
        return found

    def _along_keys(self, node: Node) -> None:
        if node.attributes["axes"] != (node.inputs[0].rank - 1,) or not node.attributes["keepdims"]:
            raise _No(f"{node.name!r} is not along the keys, which are the last dimension")

    def _score(self, score: Tensor) -> Node:
        """The product of queries and keys that scores are made of; what depends on it becomes a member."""
        graph = self.graph
        order = {n: k for k, n in enumerate(graph.nodes)}
        cone: set[Node] = set()
        stack, products = [score], set()
        while stack:
            node = graph.producer(stack.pop())
            if node is None or node in cone:
                continue
            if node.op.name == "matmul" and node.output.shape == score.shape:
                products.add(node)
            elif node.kind is Kind.POINTWISE:
                cone.add(node)
                # The shape of what gen_index counts along is known without it.
                stack += [
                    t for key, t in zip(node.op.names(len(node.inputs)), node.inputs) if key not in node.op.shapes
                ]
        if len(products) != 1:
            raise _No(f"{score.name!r} depends on {len(products)} products of its shape")
        product = products.pop()
        if product.attributes["compute_dtype"] == "tf32":
            raise _No(f"{product.name!r} is in tf32")
        after = {product}
        for node in sorted(cone, key=order.__getitem__):
            if any(graph.producer(t) in after for t in node.inputs):
                after.add(node)
        self.members |= after
        return product

    def _stats(self, total: Tensor, shift: Tensor, zero: bool) -> Tensor | None:
        """The logarithm of the sum of the exponentials, if there is one."""
        for node in self.graph.consumers(total):
            if node.op.name == "log":
                for added in self.graph.consumers(node.output):
                    if added.op.name == "add" and added.inputs == (node.output, shift):
                        if not zero:
                            raise _No(f"{added.name!r} needs the logarithm of sums that may be those of no key")
                        self.members |= {node, added}
                        return added.output
        return None

    def _private(self, match: _Match) -> None:
        """Raises _No if something between is needed elsewhere."""
        kept = {match.out.output, match.stats}
        for node in match.members:
            for tensor in node.outputs:
                if tensor in kept:
                    continue
                if tensor in self.graph.outputs:
                    raise _No(f"{tensor.name!r} is an output of the graph")
                for other in self.graph.consumers(tensor):
                    shape_only = all(
                        key in other.op.shapes for key, t in zip(other.op.operands, other.inputs) if t is tensor
                    )
                    if other not in match.members and not shape_only:
                        raise _No(f"{tensor.name!r} is needed by {other.name!r} as well")


def _is(tensor: Tensor, number: float) -> bool:
    return tensor.value is not None and tensor.size == 1 and float(tensor.value.reshape(-1)[0]) == number


def _node(graph: Graph, match: _Match) -> Node:
    """The attention node, with the tensors of the graph that is recognised."""
    product = match.product
    wide = any(t.dtype == float64 for t in (*product.inputs, match.values, match.score))
    own = Graph("score", compute_dtype=float64 if wide else graph.compute_dtype)
    made: dict[Tensor, Tensor] = {}
    operands: list[Tensor] = []

    def entered(tensor: Tensor) -> Tensor:
        """A tensor of the graph as an input of the score's; numbers stay numbers."""
        if tensor not in made:
            number = tensor.value is not None and tensor.size == 1
            made[tensor] = own._add_tensor(
                tensor.name, tensor.shape, tensor.strides, tensor.dtype, tensor.value if number else None
            )
            if not number:
                own.inputs.append(made[tensor])
                operands.append(tensor)
        return made[tensor]

    def copied(node: Node, inputs: tuple[Tensor, ...]) -> None:
        t = node.output
        made[t] = own._add_tensor(t.name, t.shape, t.strides, t.dtype)
        own.add_node(Node(node.op, inputs, node.attributes, made[t]))

    for tensor in product.inputs:
        if tensor.value is not None and tensor.size == 1:
            raise _No(f"{tensor.name!r} is a constant")
        entered(tensor)
    copied(product, tuple(made[t] for t in product.inputs))
    lead = dict.fromkeys((*product.inputs, match.values, *(() if match.sink is None else (match.sink,))))
    if len(lead) != 3 + (match.sink is not None):
        raise _No("queries, keys and values are not three tensors")
    scored: list[Node] = []
    repeated = _repeated(graph, match)
    for node in graph.nodes:
        if node not in repeated:
            continue
        inputs = []
        for key, t in zip(node.op.names(len(node.inputs)), node.inputs):
            if key in node.op.shapes and t not in made:
                # Only its shape matters: any tensor that the graph has will do.
                stand_in = own._add_tensor(own._unique("shape"), t.shape, t.strides, t.dtype)
                inputs.append(stand_in)
            else:
                inputs.append(entered(t))
        copied(node, tuple(inputs))
        scored.append(node)
    own.outputs = [made[match.score]]
    rest = [t for t in operands if t not in lead]
    notes = tuple(describe(n) for n in graph.nodes if n in match.members or n in scored)
    score = Score(own, tuple(made[t] for t in (*product.inputs, *rest)), notes)
    weights, values = match.out.inputs
    attributes = {
        "score": score,
        "probabilities": weights.name,
        "sink": match.sink is not None,
        "zero": match.zero,
        "rounded": weights.dtype == values.dtype,
        "parts": 1,
    }
    outputs = (match.out.output, *(() if match.stats is None else (match.stats,)))
    return Node(ATTENTION, (*lead, *rest), attributes, *outputs)


def _repeated(graph: Graph, match: _Match) -> set[Node]:
    """The pointwise nodes that are evaluated for every score."""
    rows, keys = match.score.shape[-2:]
    found: set[Node] = set()
    stack = [match.score]
    while stack:
        node = graph.producer(stack.pop())
        if node is None or node in found or node is match.product or node.kind is not Kind.POINTWISE:
            continue
        shape = node.output.shape
        whole = len(shape) > 1 and np.prod(shape[-2:]) == rows * keys
        if node in match.members or whole or node.op.name in _CHEAP:
            found.add(node)
            stack += [t for key, t in zip(node.op.names(len(node.inputs)), node.inputs) if key not in node.op.shapes]
    return found
