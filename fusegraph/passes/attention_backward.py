"""Recognising attention's gradients: around the exponentials of scores, the products that are made with them and with
the gradients by scores become kernels that compute the scores again, so that no score is ever in memory.

One kernel goes over the queries (dQ), one over the keys (dK and dV).  As in `passes.attention` nothing is assumed of
the pointwise nodes that make a score of a product, nor of those that its gradient is multiplied with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from codegen.declined import Declined
from fusegraph.dtypes import float64
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import attention_backward
from fusegraph.lowering.base import Options
from fusegraph.lowering.choices import Choice, speculate
from fusegraph.lowering.program import describe
from fusegraph.lowering.scores import readers
from fusegraph.ops.attention_nodes import ATTENTION_BACKWARD, Score
from fusegraph.ops.base import Kind
from fusegraph.passes.attention import Matcher, beside, guarded
from fusegraph.passes.attention_parts import Subgraph, chain_of, evaluated, linear, linear_step, turned, weight_of
from fusegraph.passes.decompose import NARROW
from fusegraph.passes.partition import Decision
from fusegraph.passes.rewrite import Rewrite, Rewritten, same
from fusegraph.passes.speculation import GRADIENTS
from fusegraph.pattern import Found, Is, Operand, Pattern, constant, followers, made_by, only_consumer, op

#: Up to so many elements of a key and a value together, one kernel makes both sums of a key.
MOST_TOGETHER = 256


@dataclass(frozen=True)
class _Sum:
    """Products with weights, along queries or keys: the matmul, what it multiplies, the tensor that it ends in."""

    product: Node
    factor: Tensor
    result: Tensor


@dataclass(frozen=True)
class _Match:
    """The nodes between the products of queries and keys and the gradients."""

    made: tuple[Node, ...]
    members: frozenset[Node]


def _smaller(_: Found, node: Node) -> bool:
    """Returns true if a cast rounds floats."""
    before, after = node.inputs[0].dtype, node.output.dtype
    return before.is_float and after.is_float and after.itemsize < before.itemsize


def rounded(x: Operand = ...) -> Pattern:
    """Returns a pattern of floats rounded to a smaller dtype."""
    return made_by((NARROW,), x) | op.identity(x).when(_smaller)


#: The exponentials of scores, and with them the gradients by scores.
_P = op.exp(op.sub("score", "lse")).named("p")
_BY_SCORE = op.mul("p", op.sub("dp", "row_dot")).named("ds")
_BY_KEYS = op.matmul(turned(rounded("weights") | "weights"), "factor")
_BY_QUERIES = op.matmul("weights", "factor")
_TIMES: Pattern = op.mul("x", "other").named("product").when(lambda found, node: node.output.shape == found["x"].shape)


def recognise_backward(graph: Graph, options: Options) -> Rewritten:
    """Makes one node of all nodes of an attention's gradients by queries, and of those by keys and values."""
    if options.strict:
        return same(graph)
    matches: list[_Match] = []
    decisions: list[Decision] = []
    choices: list[Choice] = []
    for node in graph.nodes:
        try:
            match = _Gradients(graph, node).gradients()
            if match is None:
                continue
            reason = options.left_out.get((GRADIENTS, node.name))
            if reason is not None:
                raise Declined(reason)
            for made in match.made:
                _check_order(graph, made)
                attention_backward.check(made, graph, options)
            speculate(GRADIENTS, node.name, options.settled, choices, str(node.output.type))
        except Declined as declined:
            text = f"looks like the gradient of an attention and is left as it is: {declined}"
            decisions.append(Decision(node.inputs[0].name, node.name, False, text))
            continue
        matches.append(match)
        kinds = " and ".join(dict.fromkeys(made.attributes["over"] for made in match.made))
        text = f"gradients of attention: {len(match.members)} nodes become kernels over {kinds}, no score is in memory"
        decisions.append(Decision(node.inputs[0].name, match.made[-1].name, True, text, 2 * node.output.nbytes))
    if not matches:
        return replace(same(graph, decisions), choices=tuple(choices))
    return replace(_rewritten(graph, matches, decisions), choices=tuple(choices))


def _check_order(graph: Graph, made: Node) -> None:
    """Raises Declined if something that a node takes depends on one of its results."""
    makers = {graph.producer(t) for t in made.inputs}
    for tensor in made.outputs:
        node = graph.producer(tensor)
        assert node is not None
        if not makers.isdisjoint(followers(graph, node)):
            raise Declined(f"what {tensor.name!r} is made of besides depends on it")


def _rewritten(graph: Graph, matches: Sequence[_Match], decisions: Sequence[Decision]) -> Rewritten:
    makers = {t: made for match in matches for made in match.made for t in made.outputs}
    rewrite = Rewrite(graph, {t: strides for t in makers if (strides := beside(graph, t)) is not None})
    done: set[Node] = set()
    for node in graph.nodes:
        stack = [makers.get(node.outputs[0], node)]
        while stack:
            node = stack[-1]
            missing = [t for t in node.inputs if t not in rewrite.new]
            if missing:
                stack += [makers.get(t) or graph._producer[t] for t in missing]
                continue
            stack.pop()
            if node not in done:
                rewrite.take_over(node)
                done.add(node)
    lasts = [(match, rewrite.new[match.made[-1].outputs[0]]) for match in matches]
    found = rewrite.done()  # removes what nothing else needs
    # The result stands for tensors in registers: they are as exact as it, or rounded on the way to it.
    inside = {t: last for match, last in lasts for n in match.members for t in n.outputs if t not in found.counterparts}
    return Rewritten(found.graph, {**inside, **found.counterparts}, tuple(decisions))


class _Gradients(Matcher):
    """Follows the graph from an exponential that may be that of scores less the logarithms of their sums."""

    def gradients(self) -> _Match | None:
        """Returns the gradients around the exponential; None if it does not look like any.  Raises Declined."""
        graph, exponential = self.graph, self.node
        found = next(_P.of(Found(graph), exponential), None)
        if found is None or exponential.output in graph.outputs:
            return None
        p, score, lse, space = found["p"], found["score"], found["lse"], found["p"].shape
        if len(space) < 2 or score.shape != space or lse.shape != (*space[:-1], 1):
            return None
        ways = list(found.onwards("p", _BY_SCORE, 1))
        if len(ways) != 1 or ways[0]["ds"].shape != space or ways[0]["row_dot"].shape != lse.shape:
            return None
        with_values = op.matmul("loss", "values").named("of loss").when(lambda _, node: node.output.shape == space)
        found = ways[0].where(dp=linear(with_values))
        if found is None:
            return None
        by_score, chain = graph._producer[found["ds"]], chain_of(found, "of loss", len(ways[0].nodes))
        self.members |= set(found.nodes)
        with_loss, loss, product = chain[0], found["loss"], self.product_of(score)
        queries = product.inputs[0]
        sides = [turned("rows").match(graph, n.inputs[1]) for n in (with_loss, product)]
        if None in sides:
            raise Declined(f"{product.name!r} or {with_loss.name!r} is not of rows with rows")
        values, keys = (side["rows"] for side in sides if side is not None)
        if product.output.shape != space or with_loss.attributes["compute_dtype"] == "tf32":
            raise Declined(f"{product.name!r} has not the shape of {score.name!r}, or products are in tf32")
        factor, slopes, weights = self._factors_of(by_score)
        by_queries, by_keys = self._products(weights)
        weighed = self._weighed(p, by_score)
        beside, by_values = self._weighted([n for n in readers(graph, weighed) if n is not by_score], weighed)
        if beside or weighed in graph.outputs:
            other = beside[0].name if beside else weighed.name
            raise Declined(f"{weighed.name!r} is needed by {other!r} as well")
        if by_values is not None:
            self._check_alike(weighed, chain)
        for total, wanted, what in (
            (by_queries, keys, "keys"),
            (by_keys, queries, "queries"),
            (by_values, loss, "loss"),
        ):
            if total is not None and total.factor is not wanted:
                raise Declined(f"{total.product.name!r} is not with the {what}")
        rest = [n for n in graph.consumers(by_score.output) if n not in self.members]
        kept = by_score.output in graph.outputs or bool(rest)
        if kept and slopes:
            raise Declined(f"{by_score.name!r} is needed besides what it is multiplied with")
        slope = self._slope(slopes)
        wide = any(t.dtype == float64 for t in (*product.inputs, values, loss, score))
        results = (score, *(() if slope is None else (slope,)))
        members = frozenset(self.members)
        part = Subgraph(graph, "score", float64 if wide else graph.compute_dtype)
        part.begun(product)
        nodes = {n for t in results for n in evaluated(graph, members, t, product)}
        part.add(nodes)
        part.own.outputs = [part.made[t] for t in results]
        compute = float64 if wide else graph.compute_dtype
        weight, weighing = weight_of(graph, members, chain, found["dp"], compute)
        self._check_counted(weighing)
        notes = tuple(describe(n) for n in graph.nodes if n in members or n in nodes or n in weighing)
        made_score = Score(part.own, tuple(part.made[t] for t in part.operands), notes)
        found = found.must("", lse=guarded("stats", -inf, inf))
        stats = found["stats"]
        lead = (*product.inputs, values, loss, stats, found["row_dot"])
        narrowed = [n.output for n in members if rounded().fits(graph, n) and n.inputs[0].shape == space]
        common = {
            "origin": exponential.name,
            "score": made_score,
            "weight": weight[0] if weight else None,
            "factor": factor,
            "sloped": slope is not None,
            "rounded": tuple(t.name for t in narrowed),
            "guarded": stats is not lse,
        }

        def node(over: str, *sums: tuple[str, _Sum | None, Tensor | None]) -> Node | None:
            every = {name: s.result if s is not None else t for name, s, t in sums}
            found = {name: t for name, t in every.items() if t is not None}
            if not found:
                return None
            attributes = {**common, "over": over, "results": tuple(found)}
            operands = (*lead, *part.operands[2:], *(weight[1] if weight else ()))
            return Node(ATTENTION_BACKWARD, operands, attributes, *found.values())

        together = keys.shape[-1] + values.shape[-1] <= MOST_TOGETHER
        first, second = ("first", by_keys, None), ("second", by_values, None)
        kernels = (
            node("queries", ("first", by_queries, None), ("by_scores", None, by_score.output if kept else None)),
            *((node("keys", first, second),) if together else (node("keys", first), node("keys", second))),
        )
        return _Match(tuple(n for n in kernels if n is not None), members)

    def _weighed(self, p: Tensor, by_score: Node) -> Tensor:
        """Returns what the loss is multiplied with: the probabilities, or something linear in them."""
        tensor = p
        while True:
            takers = [n for n in readers(self.graph, tensor) if n is not by_score]
            step = linear_step(Is(holds={tensor}.__contains__))
            if len(takers) != 1 or not step.fits(self.graph, takers[0]) or takers[0].output.shape != p.shape:
                return tensor
            tensor = takers[0].output

    def _check_alike(self, weighed: Tensor, chain: tuple[Node, ...]) -> None:
        """Raises Declined unless the probabilities become a tensor by the same steps as in a chain of nodes."""
        found = linear(_P.when(lambda _, node: node is self.node)).match(self.graph, weighed)
        own = () if found is None else chain_of(found, "p")
        alike = len(own) == len(chain)
        if found is not None and alike:
            for a, before_a, b, before_b in zip(own[1:], own, chain[1:], chain):
                alike = alike and a.op == b.op and a.attributes == b.attributes and len(a.inputs) == len(b.inputs)
                for x, y in zip(a.inputs, b.inputs):
                    both = x is before_a.output and y is before_b.output
                    number = constant(x)
                    alike = alike and (both or x is y or (number is not None and number == constant(y)))
            self.members |= set(found.nodes)
        if not alike:
            raise Declined(
                f"{weighed.name!r} is not made of {self.node.name!r} as {chain[-1].name!r} of {chain[0].name!r}"
            )

    def _check_counted(self, weighing: set[Node]) -> None:
        """Raises Declined if what counts along something that will no longer exist is needed elsewhere."""
        counting = {n for n in weighing if any(self.graph.producer(t) in self.members for t in n.inputs)}
        for node in (n for n in self.graph.nodes if n in weighing and n not in self.members):
            if node in counting or any(self.graph.producer(t) in counting for t in node.inputs):
                counting.add(node)
                others = [n for n in self.graph.consumers(node.output) if n not in weighing and n not in self.members]
                if others or node.output in self.graph.outputs:
                    raise Declined(f"{node.name!r} counts along scores and is needed elsewhere")

    def _factors_of(self, by_score: Node) -> tuple[float, list[Tensor], Tensor]:
        """Follows the gradients by scores to those by products.

        Returns a number and the tensors that they are multiplied with, and the gradients by products, rounded.
        """
        graph, factor, slopes = self.graph, 1.0, []
        current = by_score.output
        while current is by_score.output or only_consumer(graph, current) is not None:
            steps = list(Found(graph, {"x": current}).onwards("x", _TIMES, 1))
            if len(steps) != 1:
                break
            other = steps[0]["other"]
            number = constant(other)
            if number is not None:
                factor *= number
            else:
                slopes.append(other)
            self.members |= set(steps[0].nodes)
            current = steps[0]["product"]
        narrowing = [n for n in graph.consumers(current) if rounded().fits(graph, n)]
        alone = current is by_score.output or only_consumer(graph, current) is not None
        takers = graph.consumers(narrowing[0].output) if len(narrowing) == 1 and alone else []
        if any((op.matmul() | op.transpose()).fits(graph, n) for n in takers):
            self.members.add(narrowing[0])
            current = narrowing[0].output
        return factor, slopes, current

    def _products(self, weights: Tensor) -> tuple[_Sum | None, _Sum | None]:
        """Returns the sums of the gradients by products over keys, and over queries."""
        by_queries = None
        found = Found(self.graph, {"weights": weights})
        takers = list(found.onwards("weights", _BY_QUERIES, 1))
        if len(takers) > 1:
            raise Declined(f"{weights.name!r} is multiplied more than once")
        for taker in takers:
            (product,) = taker.nodes
            self._plain(product)
            by_queries = _Sum(product, taker["factor"], product.output)
        turns = [n for n in self.graph.consumers(weights) if op.transpose().fits(self.graph, n)]
        _, by_keys = self._weighted(turns, weights)
        if by_queries is None and by_keys is None:
            raise Declined(f"nothing is multiplied with {weights.name!r}")
        return by_queries, by_keys

    def _plain(self, product: Node) -> None:
        if product.attributes["compute_dtype"] == "tf32":
            raise Declined(f"{product.name!r} is in tf32")
        self.members.add(product)

    def _weighted(self, takers: Sequence[Node], weights: Tensor) -> tuple[list[Node], _Sum | None]:
        """Returns the takers that make no such sum, and the sum over queries of products with weights."""
        graph, rest, total = self.graph, list(takers), None
        for found in Found(graph, {"weights": weights}).onwards("weights", _BY_KEYS, 3):
            product, *path = found.nodes
            if total is None and path[-1] in rest and all(only_consumer(graph, n.output) for n in path):
                self._plain(product)
                self.members |= set(path)
                rest.remove(path[-1])
                total = _Sum(product, found["factor"], self._total(product))
        return rest, total

    def _total(self, product: Node) -> Tensor:
        """Returns the sum of products over the last batch dimension, or the products without one, as it is stored."""
        total = only_consumer(self.graph, product.output)
        added = op.reduction(mode="add", axes=(product.output.rank - 3,), keepdims=True)
        if total is None or not added.fits(self.graph, total):
            return product.output
        self.members.add(total)
        last = only_consumer(self.graph, total.output)
        if last is not None and rounded().fits(self.graph, last):
            self.members.add(last)
            return last.output
        return total.output

    def _slope(self, slopes: Sequence[Tensor]) -> Tensor | None:
        """Returns what the gradients by scores are multiplied with; its nodes become members."""
        if not slopes:
            return None
        if len(slopes) > 1:
            raise Declined(f"gradients are multiplied with {slopes[0].name!r} and with {slopes[1].name!r}")
        stack = [slopes[0]]
        while stack:
            node = self.graph.producer(stack.pop())
            if node is not None and node.kind is Kind.POINTWISE and node not in self.members:
                if any(self.graph.producer(t) in self.members for t in node.inputs):
                    self.members.add(node)
                stack += node.inputs
        return slopes[0]
