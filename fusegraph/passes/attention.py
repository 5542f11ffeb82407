"""Recognising attention: products, pointwise nodes, a softmax over their last dimension and products with its result
become one node, so that one kernel (the attention family) computes them and no score is ever in memory.

Nothing is assumed of the pointwise nodes between the first products and the softmax: scales, masks, biases, caps, or
whatever else the graph has there.  A pattern that only looks like attention is left alone, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from codegen.declined import Declined
from fusegraph.dtypes import float64
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import attention
from fusegraph.lowering.base import Options
from fusegraph.lowering.program import broadcasts_to, describe
from fusegraph.lowering.views import divided
from fusegraph.ops.attention_nodes import ATTENTION, Score
from fusegraph.ops.base import Kind
from fusegraph.passes.attention_pages import pages_of
from fusegraph.passes.attention_parts import Part, repeated, weight_of
from fusegraph.passes.attention_rows import zeros_kept
from fusegraph.passes.decompose import NARROW
from fusegraph.passes.partition import Decision
from fusegraph.passes.rewrite import Rewrite, Rewritten, same
from fusegraph.passes.speculation import ATTENTION as PASS

#: Those that may be linear in an operand.
LINEAR = ("mul", "div", "binary_select")


@dataclass(frozen=True)
class _Match:
    """What an attention node stands for: nodes from the products of queries and keys to ``out``, the last one, which is
    the product with the values or a reshape of that.

    weight is what the values are multiplied with, chain the nodes that make it of probabilities, the first of which is
    the one that divides exponentials by what they add up to.
    """

    out: Node
    second: Node
    values: Tensor
    weight: Tensor
    chain: tuple[Node, ...]
    product: Node
    score: Tensor
    members: frozenset[Node]
    stats: Tensor | None
    sink: Tensor | None
    zero: bool


def recognise(graph: Graph, options: Options) -> Rewritten:
    """Makes one node of each softmax of products that is multiplied with values."""
    if options.strict:  # scores and probabilities would have to be rounded as if they were stored
        return same(graph)
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
            match = Matcher(graph, node).match()
            if match is None:
                continue
            if match.members & taken:
                raise Declined("part of it belongs to another attention")
            reason = options.left_out.get((PASS, match.out.name))
            if reason is not None:
                raise Declined(reason)
            made = _node(graph, match)
            attention.check(made, graph, options)
        except Declined as declined:
            left(node, declined)
            continue
        matches[match.out] = match, made
        taken |= match.members
    while matches and (found := _counted_along(graph, matches)) is not None:
        left(found[0], f"{found[1].name!r} counts along it and is needed elsewhere")
        taken -= matches.pop(found[0])[0].members
    if not matches:
        return same(graph, decisions)
    for match, _ in matches.values():
        text = f"attention: {len(match.members)} nodes become one kernel, no score is in memory"
        decisions.append(Decision(match.product.name, match.out.name, True, text, 2 * match.score.nbytes))
    return _rewritten(graph, matches, decisions)


def _counted_along(graph: Graph, matches: Mapping[Node, tuple[_Match, Node]]) -> tuple[Node, Node] | None:
    """An attention, and a node that is still needed and takes the shape of something that will no longer exist."""
    members = {member: node for node, (match, _) in matches.items() for member in match.members}
    for node in _live(graph, matches):
        for key, t in zip(node.op.names(len(node.inputs)), node.inputs):
            maker = graph.producer(t)
            if key in node.op.shapes and maker in members and t is not members[maker].output:
                return members[maker], node
    return None


def _live(graph: Graph, matches: Mapping[Node, tuple[_Match, Node]]) -> dict[Node, None]:
    """The nodes that are needed, the last one of each attention for all of it."""
    members = {member: node for node, (match, _) in matches.items() for member in match.members}
    live: dict[Node, None] = {}
    stack = list(graph.outputs)
    while stack:
        node = graph.producer(stack.pop())
        node = members.get(node, node) if node is not None else None
        if node is not None and node not in live:
            live[node] = None
            stack += (matches[node][1] if node in matches else node).inputs
    return live


def _rewritten(graph: Graph, matches: Mapping[Node, tuple[_Match, Node]], decisions: Sequence[Decision]) -> Rewritten:
    rewrite = Rewrite(graph)
    live = _live(graph, matches)
    for node in graph.nodes:
        if node in matches:
            match, made = matches[node]
            rewrite.take_over(made)
            # What is in registers only is as exact as the result, or rounded on the way to it.
            for member in match.members:
                for t in member.outputs:
                    rewrite.new.setdefault(t, rewrite.new[node.output])
        elif node in live:
            rewrite.take_over(node)
    return rewrite.done(decisions)


class Matcher:
    """Follows the graph backwards from a product that may be the one with the values."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node
        self.members: set[Node] = {node}
        #: those of them that count along products, or are made of such, and take no value of these
        self.counted: set[Node] = set()

    def made_by(self, tensor: Tensor, *names: str) -> Node | None:
        """The node that makes a tensor, if its op is one of these."""
        node = self.graph.producer(tensor)
        return node if node is not None and node.op.name in names else None

    def _cast(self, tensor: Tensor) -> Tensor:
        """What a tensor is a float of another dtype of; casts become members."""
        while (node := self.made_by(tensor, "identity", NARROW.name)) is not None and node.inputs[0].dtype.is_float:
            self.members.add(node)
            tensor = node.inputs[0]
        return tensor

    def _guard(self, tensor: Tensor, compared: float, instead: float) -> tuple[Tensor, bool]:
        """x, where a tensor is: ``instead`` where x equals ``compared``, else x; and whether it is."""
        node = self.made_by(tensor, "binary_select")
        if node is None:
            return tensor, False
        first, second, mask = node.inputs
        test = self.made_by(mask, "cmp_eq")
        if test is None or not _is(first, instead) or test.inputs[0] is not second or not _is(test.inputs[1], compared):
            return tensor, False
        self.members |= {node, test}
        return second, True

    def match(self) -> _Match | None:
        """The attention that ends in the node; None if it does not look like one.  Raises No."""
        node = self.node
        chain = self.linear_from(node.inputs[0], self._divides)
        if chain is None:
            return None
        normal = chain[0]
        e, divisor = normal.inputs
        if normal.op.name == "mul":
            if self.made_by(e, "reciprocal") is not None:
                e, divisor = divisor, e
            inverse = self.made_by(divisor, "reciprocal")
            if inverse is None:
                return None
            self.members.add(inverse)
            divisor = inverse.inputs[0]
        exponential = self.made_by(e, "exp")
        if exponential is None:
            return None
        self.members |= {*chain, exponential}
        total, zero = self._guard(divisor, 0.0, 1.0)
        whole = total
        sunk = None
        added = self.made_by(total, "add")
        if added is not None:
            total, other = added.inputs
            sunk = self.made_by(other, "exp")
            if sunk is None:
                return None
            self.members |= {added, sunk}
        summed = self.made_by(total, "reduction")
        if summed is None or summed.attributes["mode"] != "add" or summed.inputs[0] is not e:
            return None
        self._along_keys(summed)
        self.members.add(summed)
        difference = self.made_by(exponential.inputs[0], "sub")
        if difference is None:
            raise Declined(f"{exponential.name!r} is not of scores less the largest of them")
        self.members.add(difference)
        score, shift = difference.inputs
        most, guarded = self._guard(shift, -inf, 0.0)
        sink = None
        if sunk is not None:
            moved, larger = self.made_by(sunk.inputs[0], "sub"), self.made_by(most, "max")
            if (
                moved is None
                or larger is None
                or moved.inputs[1] is not shift
                or larger.inputs[1] is not moved.inputs[0]
            ):
                raise Declined(f"what is added to the sum of {summed.name!r} is no sink")
            self.members |= {moved, larger}
            most, sink = larger.inputs
        largest = self.made_by(most, "reduction")
        if largest is None or largest.attributes["mode"] != "max" or largest.inputs[0] is not score:
            raise Declined(f"{shift.name!r}, which is taken from the scores, is not the largest of {score.name!r}")
        self._along_keys(largest)
        self.members.add(largest)
        if zero and not guarded:
            raise Declined("rows without keys are NaN in one place and 0 in another")
        product = self.product_of(score)
        stats = self._stats(whole, shift, zero)
        values = node.inputs[1]
        weight = self._cast(node.inputs[0])
        if not zero:
            zero, left = zeros_kept(self.graph, chain, score, product)
            weight, chain = weight if left == chain else left[-1].output, left
        self._let_go()
        if not weight.shape == normal.output.shape == score.shape == product.output.shape:
            raise Declined(f"{score.name!r} {list(score.shape)} has not the shape of {product.name!r}")
        if not broadcasts_to(values.shape[:-2], score.shape[:-2]) or node.attributes["compute_dtype"] == "tf32":
            raise Declined(f"{values.name!r} has batches that the scores have not, or products are in tf32")
        found = _Match(
            self._joined(stats), node, values, weight, chain, product, score, frozenset(self.members), stats, sink, zero
        )
        self._private(found)
        return found

    def _divides(self, node: Node) -> bool:
        """Whether a node divides exponentials."""
        first, *rest = node.inputs
        if node.op.name == "div":
            return self.made_by(first, "exp") is not None
        return node.op.name == "mul" and any(self.made_by(t, "reciprocal", "exp") for t in (first, *rest))

    def linear_from(self, tensor: Tensor, begins: Callable[[Node], bool]) -> tuple[Node, ...] | None:
        """The node with which it begins, and those linear in its result that make a tensor of it; None if the tensor is
        no such thing.
        """
        tensor = self._cast(tensor)
        node = self.graph.producer(tensor)
        if node is None or begins(node):
            return None if node is None else (node,)
        if node.op.name not in LINEAR:
            return None
        first, second = node.inputs[:2]
        if node.op.name == "binary_select":
            linear = [t for t, other in ((first, second), (second, first)) if _is(other, 0.0)]
        else:
            linear = [t for t in node.inputs if t.shape == node.output.shape][: 1 if node.op.name == "div" else 2]
        for t in linear:
            before = set(self.members)
            chain = self.linear_from(t, begins)
            if chain is not None:
                return (*chain, node)
            self.members = before
        return None

    def _along_keys(self, node: Node) -> None:
        if node.attributes["axes"] != (node.inputs[0].rank - 1,) or not node.attributes["keepdims"]:
            raise Declined(f"{node.name!r} is not along the keys, which are the last dimension")

    def product_of(self, score: Tensor) -> Node:
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
            raise Declined(f"{score.name!r} depends on {len(products)} products of its shape")
        product = products.pop()
        if product.attributes["compute_dtype"] == "tf32":
            raise Declined(f"{product.name!r} is in tf32")
        after, dependent = {product}, {product}
        for node in sorted(cone, key=order.__getitem__):
            if any(graph.producer(t) in after for t in node.inputs):
                after.add(node)
            values = (t for key, t in zip(node.op.names(len(node.inputs)), node.inputs) if key not in node.op.shapes)
            if any(graph.producer(t) in dependent for t in values):
                dependent.add(node)
        self.members |= after
        self.counted |= after - dependent
        return product

    def _stats(self, total: Tensor, shift: Tensor, zero: bool) -> Tensor | None:
        """The logarithm of the sum of the exponentials, if there is one."""
        for node in self.graph.consumers(total):
            if node.op.name == "log":
                for added in self.graph.consumers(node.output):
                    if added.op.name == "add" and added.inputs == (node.output, shift):
                        if not zero:
                            raise Declined(f"{added.name!r} needs the logarithm of sums that may be those of no key")
                        self.members |= {node, added}
                        return added.output
        return None

    def _joined(self, stats: Tensor | None) -> Node:
        """The product with the values, or the reshape that joins its batch dimensions again, as grouped heads are, if
        it is for nothing else.
        """
        graph, node = self.graph, self.node
        if node.output in graph.outputs or len(others := graph.consumers(node.output)) != 1:
            return node
        (joined,) = others
        shape, target = node.output.shape, joined.output.shape
        if joined.op.name != "reshape" or shape[-2:] != target[-2:] or divided(target, shape) is None:
            return node
        order = {n: k for k, n in enumerate(graph.nodes)}
        early = () if stats is None else graph.consumers(stats)  # they would come before what makes them
        if any(order[n] < order[joined] for n in early):
            return node
        self.members.add(joined)
        return joined

    def _let_go(self) -> None:
        """Masks and positions that something else needs as well, as the next layer's attention does, are no members:
        they depend on no product, and each kernel computes them for itself.
        """
        for node in reversed(self.graph.nodes):
            if node in self.counted and any(map(self._needed_by, node.outputs)):
                self.members.discard(node)

    def _needed_by(self, tensor: Tensor) -> Node | None:
        """A node that is no member and reads a tensor's values."""
        for other in self.graph.consumers(tensor):
            keys = other.op.names(len(other.inputs))
            if other not in self.members and any(
                t is tensor and key not in other.op.shapes for key, t in zip(keys, other.inputs)
            ):
                return other
        return None

    def _private(self, match: _Match) -> None:
        """Raises No if something between is needed elsewhere."""
        kept = {match.out.output, match.stats}
        for node in match.members:
            for tensor in node.outputs:
                if tensor in kept:
                    continue
                if tensor in self.graph.outputs:
                    raise Declined(f"{tensor.name!r} is an output of the graph")
                if (other := self._needed_by(tensor)) is not None:
                    raise Declined(f"{tensor.name!r} is needed by {other.name!r} as well")


def _is(tensor: Tensor, number: float) -> bool:
    return tensor.value is not None and tensor.size == 1 and float(tensor.value.reshape(-1)[0]) == number


def _node(graph: Graph, match: _Match) -> Node:
    """The attention node, with the tensors of the graph that is recognised."""
    product = match.product
    wide = any(t.dtype == float64 for t in (*product.inputs, match.values, match.score))
    compute = float64 if wide else graph.compute_dtype
    part = Part(graph, "score", compute)
    for tensor in product.inputs:
        if tensor.value is not None and tensor.size == 1:
            raise Declined(f"{tensor.name!r} is a constant")
        part.entered(tensor)
    part.copied(product, tuple(part.made[t] for t in product.inputs))
    pages = [pages_of(graph, t, turned=t is not match.values) for t in (product.inputs[1], match.values)]
    paged = all(pages) and product.output.rank in (4, 5)
    own = product.inputs[:1] if paged else (*product.inputs, match.values)
    containers = [p.container for p in pages if p is not None and paged]
    tables = [p.table for p in pages if p is not None and paged]
    lead = [*own, *containers, *tables, *(() if match.sink is None else (match.sink,))]
    if len(dict.fromkeys((*product.inputs, match.values, match.sink))) != 4:
        raise Declined("queries, keys and values are not three tensors")
    scored = repeated(graph, match.members, match.score, product)
    part.add(scored)
    part.own.outputs = [part.made[match.score]]
    rest = [t for t in part.operands if t not in (*product.inputs, match.values, match.sink)]
    weight, weighed = weight_of(graph, match.members - {match.out}, match.chain, match.weight, compute)
    notes = tuple(describe(n) for n in graph.nodes if n in match.members or n in scored or n in weighed)
    score = Score(part.own, tuple(part.made[t] for t in (*product.inputs, *rest)), notes)
    weights, values = match.second.inputs
    attributes = {
        "origin": match.out.name,
        "score": score,
        "probabilities": weights.name,
        "sink": match.sink is not None,
        "zero": match.zero,
        "rounded": weights.dtype == values.dtype,
        "weight": weight[0] if weight else None,
        "paged": paged,
        "parts": 1,
        "order": False,
    }
    outputs = (match.out.output, *(() if match.stats is None else (match.stats,)))
    return Node(ATTENTION, (*lead, *rest, *(weight[1] if weight else ())), attributes, *outputs)
