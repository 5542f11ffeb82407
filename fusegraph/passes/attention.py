"""Recognising attention: products, pointwise nodes, a softmax over their last dimension and products with its result
become one node, so that one kernel (the attention family) computes them and no score is ever in memory.

Nothing is assumed of the pointwise nodes between the first products and the softmax: scales, masks, biases, caps, or
whatever else the graph has there.  A pattern that only looks like attention is left alone, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from codegen.declined import Declined
from fusegraph.dtypes import float64
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides
from fusegraph.lowering import attention as lowering
from fusegraph.lowering.base import Options
from fusegraph.lowering.choices import LEFT, MADE, Choice, Outweighed, speculate, weigh
from fusegraph.lowering.program import broadcasts_to, describe
from fusegraph.lowering.scores import readers
from fusegraph.lowering.views import divided, turned_back
from fusegraph.ops.attention_nodes import ATTENTION, Score
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.attention_pages import PAGES, TURNED_PAGES
from fusegraph.passes.attention_parts import Subgraph, chain_of, evaluated, linear, weight_of
from fusegraph.passes.attention_rows import zeros_kept
from fusegraph.passes.estimates import alone, cycles
from fusegraph.passes.partition import Decision
from fusegraph.passes.rewrite import Rewrite, Rewritten, same
from fusegraph.passes.speculation import ATTENTION as PASS
from fusegraph.pattern import Found, Pattern, made_of, only_consumer, op

#: How often a softmax in memory, and the products beside it, read or write the scores; how much slower one kernel must
#: be estimated to be than three, to be three; the most bytes of scores that are left in memory for that, and the fewest
#: queries: of what fewer ask for, memory is the limit, and one kernel reads the keys alone that masks leave.
SOFTMAX, CLEARLY, MOST_BYTES, LEAST_ROWS = 4, 1.1, 256 << 20, 64


@dataclass(frozen=True)
class _Match:
    """What an attention node stands for: the nodes from the product of queries and keys to the last one, ``out``.

    out     the product with the values (``second``), or a reshape of it.
    weight  what the values are multiplied with.
    chain   the nodes that make it: the one that divides exponentials by their sum, and what follows, without casts.
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
    choices: list[Choice] = []

    def left(node: Node, reason: Exception | str) -> None:
        first = graph.producer(node.inputs[0])
        assert first is not None
        text = f"looks like attention and is left as it is: {reason}"
        decisions.append(Decision(first.name, node.name, False, text))

    taken: set[Node] = set()
    for node in graph.nodes:
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
            lowering.check(made, graph, options)
            _weigh(graph, match, made, options, choices)
        except Declined as declined:
            left(node, declined)
            continue
        matches[match.out] = match, made
        taken |= match.members
    while matches and (found := _counted_along(graph, matches)) is not None:
        left(found[0], f"{found[1].name!r} counts along it and is needed elsewhere")
        taken -= matches.pop(found[0])[0].members
    if not matches:
        return replace(same(graph, decisions), choices=tuple(choices))
    for match, _ in matches.values():
        text = f"attention: {len(match.members)} nodes become one kernel, no score is in memory"
        decisions.append(Decision(match.product.name, match.out.name, True, text, 2 * match.score.nbytes))
    return replace(_rewritten(graph, matches, decisions), choices=tuple(choices))


def _weigh(graph: Graph, match: _Match, made: Node, options: Options, choices: list[Choice]) -> None:
    """Adds to ``choices`` whether attention is one kernel.  Raises Outweighed if it is not.

    Tensor cores may multiply float32 in parts, but not those of attention: two products and a softmax in memory can be
    faster than single threads' multiply-adds.
    """
    alike, target = str(match.score.type), options.target.planned
    one = lowering.by_threads(made, graph, options)
    if one is None or match.score.nbytes > MOST_BYTES or match.score.shape[-2] < LEAST_ROWS:
        speculate(PASS, match.out.name, options.settled, choices, alike)
        return
    apart = sum(cycles(alone(graph, n, {}), options) for n in (match.product, match.second))
    apart += 2 * target.launch_cycles + SOFTMAX * match.score.nbytes / target.bytes_per_cycle
    estimates = {MADE: one, LEFT: apart}
    preferred = LEFT if CLEARLY * apart < one else MADE
    choices.append(choice := weigh(PASS, match.out.name, estimates, preferred, options.settled, alike))
    if choice.taken == LEFT:
        times = f"{one / target.clock:.1f} us, two products and a softmax {apart / target.clock:.1f} us"
        raise Outweighed(f"as one kernel, by single threads, it is estimated to take {times}", choice)


def _counted_along(graph: Graph, matches: Mapping[Node, tuple[_Match, Node]]) -> tuple[Node, Node] | None:
    """Returns an attention, and a node still needed that takes the shape of one of its tensors; None without any."""
    members = {member: node for node, (match, _) in matches.items() for member in match.members}
    for node in _live(graph, matches):
        for t in set(node.inputs).difference(node.values):
            maker = graph.producer(t)
            if maker in members and t is not members[maker].output:
                return members[maker], node
    return None


def _live(graph: Graph, matches: Mapping[Node, tuple[_Match, Node]]) -> dict[Node, None]:
    """Returns the nodes that outputs depend on, with the last node of an attention for all of it."""
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
    rewrite = Rewrite(graph, {t: s for node in matches if (s := beside(graph, t := node.output)) is not None})
    live = _live(graph, matches)
    for node in graph.nodes:
        if node in matches:
            match, made = matches[node]
            rewrite.take_over(made)
            # The result stands for tensors in registers: they are as exact as it, or rounded on the way to it.
            for member in match.members:
                for t in member.outputs:
                    rewrite.new.setdefault(t, rewrite.new[node.output])
        elif node in live:
            rewrite.take_over(node)
    return rewrite.done(decisions)


def beside(graph: Graph, out: Tensor) -> tuple[int, ...] | None:
    """Returns the strides of a result whose heads are put beside each other: so they lie from the beginning.

    What else is made of it, element by element, takes it however it lies.
    """
    turns = [n for n in graph.consumers(out) if n.kind not in (Kind.POINTWISE, Kind.REDUCTION)]
    if out in graph.outputs or len(turns) != 1 or turns[0].op.role is not Role.TRANSPOSE:
        return None
    (turn,) = turns
    return turned_back(turn, packed_strides(turn.output.shape)) if turn.attributes["perm"][-1] == out.rank - 1 else None


def guarded(name: str, compared: float, instead: float) -> Pattern:
    """Returns a pattern of a named tensor, or of that tensor with ``instead`` where it equals ``compared``."""
    return op.binary_select(instead, name, op.cmp_eq(name, compared)) | name


_PRODUCT = op.matmul("weighed", "values")
_E = op.exp("power").named("e")
_SUM = op.reduction("e", mode="add").named("sum")
#: What looks like softmax: the factor of the values, which is linear in probabilities, and what these are made of.
_NORMAL = op.div(_E, "divisor").named("normal") | op.mul(_E, op.reciprocal("divisor")).named("normal")
_SOFTMAX = {
    "weighed": linear(_NORMAL),
    "divisor": guarded("whole", 0.0, 1.0),
    "whole": op.add(_SUM, op.exp("sunk")) | _SUM,
}
_ALONG_KEYS = op.reduction(keepdims=True).when(lambda _, n: n.attributes["axes"] == (n.inputs[0].rank - 1,))


class Matcher:
    """Follows the graph backwards from a product that may be the one with the values."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node
        self.members: set[Node] = {node}
        #: members that number positions along products, or are made of such, and take no value of products
        self.counted: set[Node] = set()

    def match(self) -> _Match | None:
        """Returns the attention that ends in the node; None if it does not look like one.  Raises Declined."""
        graph, node = self.graph, self.node
        last = next(_PRODUCT.of(Found(graph), node), None)
        found = None if last is None else last.where(**_SOFTMAX)
        if found is None:
            return None
        found = found.must("{sum} is not along the keys, which are the last dimension", sum=_ALONG_KEYS)
        found = found.must("{e} is not of scores less the largest of them", power=op.sub("score", "shift"))
        found = found.must("", shift=guarded("most", -inf, 0.0))
        sink = {"sunk": op.sub("sink", "shift"), "most": op.max("largest", "sink")}
        text = "what is added to the sum of {sum} is no sink"
        found = found.must(text, **(sink if "sunk" in found else {"most": "largest"}))
        text = "{shift}, which is taken from the scores, is not the largest of {score}"
        found = found.must(text, largest=op.reduction("score", mode="max"))
        found = found.must("{largest} is not along the keys, which are the last dimension", largest=_ALONG_KEYS)
        score, zero = found["score"], found["divisor"] is not found["whole"]
        if zero and found["shift"] is found["most"]:
            raise Declined("rows without keys are NaN in one place and 0 in another")
        self.members |= set(found.nodes)
        product = self.product_of(score)
        stats = self._stats(found, zero)
        values, normal, chain = found["values"], found["normal"], chain_of(found, "normal", 1)
        if not zero:
            zero, chain = zeros_kept(graph, chain, score, product)
        weight = chain[-1].output
        self._let_go()
        if not weight.shape == normal.shape == score.shape == product.output.shape:
            raise Declined(f"{score.name!r} {list(score.shape)} has not the shape of {product.name!r}")
        if not broadcasts_to(values.shape[:-2], score.shape[:-2]) or node.attributes["compute_dtype"] == "tf32":
            raise Declined(f"{values.name!r} has batches that the scores have not, or products are in tf32")
        out, members = self._joined(stats), frozenset(self.members)
        result = _Match(
            out, node, values, weight, chain, product, score, members, stats, found.tensors.get("sink"), zero
        )
        self._private(result)
        return result

    def product_of(self, score: Tensor) -> Node:
        """Returns the product of queries and keys that scores are made of; what depends on it becomes a member."""
        graph, whole = self.graph, op.matmul().when(lambda _, node: node.output.shape == score.shape)
        # An operand of which only the shape matters, as gen_index's, need not be followed.
        cone = made_of(graph, [score], lambda node: node.values if node.kind is Kind.POINTWISE else None)
        makers = {graph.producer(t) for t in (score, *(t for values in cone.values() for t in values))}
        products = [node for node in makers if node is not None and whole.fits(graph, node)]
        if len(products) != 1:
            raise Declined(f"{score.name!r} depends on {len(products)} products of its shape")
        (product,) = products
        if product.attributes["compute_dtype"] == "tf32":
            raise Declined(f"{product.name!r} is in tf32")
        after, dependent = {product}, {product}
        for node in graph.nodes:
            if node in cone and any(graph.producer(t) in after for t in node.inputs):
                after.add(node)
            if node in cone and any(graph.producer(t) in dependent for t in node.values):
                dependent.add(node)
        self.members |= after
        self.counted |= after - dependent
        return product

    def _stats(self, found: Found, zero: bool) -> Tensor | None:
        """Returns the logarithm of the sum of the exponentials, if there is one."""
        made = next(found.onwards("whole", op.add(op.log("whole"), "shift").named("stats"), 2), None)
        if made is None:
            return None
        if not zero:
            raise Declined(f"{made['stats'].name!r} needs the logarithm of sums that may be those of no key")
        self.members |= set(made.nodes)
        return made["stats"]

    def _joined(self, stats: Tensor | None) -> Node:
        """Returns the product with the values, or the reshape behind it that joins batch dimensions (grouped heads).

        The reshape has to be the only consumer of the product.
        """
        graph, node = self.graph, self.node
        joined = only_consumer(graph, node.output)
        if joined is None:
            return node
        shape, target = node.output.shape, joined.output.shape
        if not op.reshape().fits(graph, joined) or shape[-2:] != target[-2:] or divided(target, shape) is None:
            return node
        order = {n: k for k, n in enumerate(graph.nodes)}
        early = () if stats is None else graph.consumers(stats)  # they would come before what makes them
        if any(order[n] < order[joined] for n in early):
            return node
        self.members.add(joined)
        return joined

    def _let_go(self) -> None:
        """Removes from the members masks and positions that something else needs, such as the next layer's attention.

        They depend on no product, and each kernel computes them for itself.
        """
        for node in reversed(self.graph.nodes):
            if node in self.counted and any(map(self._needed_by, node.outputs)):
                self.members.discard(node)

    def _needed_by(self, tensor: Tensor) -> Node | None:
        """Returns a node that is no member and reads a tensor's values."""
        return next((n for n in readers(self.graph, tensor) if n not in self.members), None)

    def _private(self, match: _Match) -> None:
        """Raises Declined if something between is needed elsewhere."""
        kept = {match.out.output, match.stats}
        for node in match.members:
            for tensor in node.outputs:
                if tensor in kept:
                    continue
                if tensor in self.graph.outputs:
                    raise Declined(f"{tensor.name!r} is an output of the graph")
                if (other := self._needed_by(tensor)) is not None:
                    raise Declined(f"{tensor.name!r} is needed by {other.name!r} as well")


def _node(graph: Graph, match: _Match) -> Node:
    """Returns the attention node, with the tensors of the graph that is recognised."""
    product = match.product
    wide = any(t.dtype == float64 for t in (*product.inputs, match.values, match.score))
    compute = float64 if wide else graph.compute_dtype
    part = Subgraph(graph, "score", compute)
    part.begun(product)
    keys = PAGES if product.inputs[1] is match.values else TURNED_PAGES
    pages = [keys.match(graph, product.inputs[1]), PAGES.match(graph, match.values)]
    paged = None not in pages and product.output.rank in (4, 5)
    own = product.inputs[:1] if paged else (*product.inputs, match.values)
    containers = [p["container"] for p in pages if p is not None and paged]
    tables = [p["table"] for p in pages if p is not None and paged]
    lead = [*own, *containers, *tables, *(() if match.sink is None else (match.sink,))]
    if len(dict.fromkeys((*product.inputs, match.values, match.sink))) != 4:
        raise Declined("queries, keys and values are not three tensors")
    scored = evaluated(graph, match.members, match.score, product)
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
