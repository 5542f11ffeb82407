"""Recognising attention's gradients: around the exponentials of scores, the products that are made with them and with
the gradients by scores become kernels that compute the scores again, so that none of them is ever in memory.

One kernel is for every query (dQ), one for every key (dK and dV).  As in `passes.attention` nothing is assumed of the
pointwise nodes that make a score of a product, nor of those that its gradient is multiplied with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import networkx as nx

from codegen.declined import Declined
from fusegraph.dtypes import float64
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import attention_backward
from fusegraph.lowering.base import Options
from fusegraph.lowering.program import describe
from fusegraph.lowering.scores import constant, readers
from fusegraph.ops.attention_nodes import ATTENTION_BACKWARD, Score
from fusegraph.ops.base import Kind
from fusegraph.passes.attention import LINEAR, Matcher
from fusegraph.passes.attention_parts import Part, repeated, weight_of
from fusegraph.passes.decompose import NARROW
from fusegraph.passes.partition import Decision
from fusegraph.passes.rewrite import Rewrite, Rewritten, same
from fusegraph.passes.speculation import GRADIENTS

#: Elements of a key and a value whose sums for one key are made by one kernel.
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

    exponential: Node
    made: tuple[Node, ...]
    members: frozenset[Node]


def _narrows(node: Node) -> bool:
    """Whether a node rounds floats to another dtype."""
    if node.op is NARROW:
        return True
    before, after = node.inputs[0].dtype, node.output.dtype
    return node.op.name == "identity" and before.is_float and after.is_float and after.itemsize < before.itemsize


def recognise_backward(graph: Graph, options: Options) -> Rewritten:
    """Makes one node of what the gradients of an attention by queries, or by keys and values, are made of."""
    if options.strict:
        return same(graph)
    matches: list[_Match] = []
    decisions: list[Decision] = []
    for node in graph.nodes:
        if node.op.name != "exp":
            continue
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
        except Declined as declined:
            text = f"looks like the gradient of an attention and is left as it is: {declined}"
            decisions.append(Decision(node.inputs[0].name, node.name, False, text))
            continue
        matches.append(match)
        kinds = " and ".join(dict.fromkeys(made.attributes["over"] for made in match.made))
        text = f"gradients of attention: {len(match.members)} nodes become kernels over {kinds}, no score is in memory"
        decisions.append(Decision(node.inputs[0].name, match.made[-1].name, True, text, 2 * node.output.nbytes))
    if not matches:
        return same(graph, decisions)
    return _rewritten(graph, matches, decisions)


def _check_order(graph: Graph, made: Node) -> None:
    """Raises No if something that a node takes depends on one of its results."""
    makers = {graph.producer(t) for t in made.inputs}
    for tensor in made.outputs:
        if makers & nx.descendants(graph.network, graph.producer(tensor)):
            raise Declined(f"what {tensor.name!r} is made of besides depends on it")


def _rewritten(graph: Graph, matches: Sequence[_Match], decisions: Sequence[Decision]) -> Rewritten:
    rewrite = Rewrite(graph)
    makers = {t: made for match in matches for made in match.made for t in made.outputs}
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
    found = rewrite.done()  # what nothing else needs goes
    # What is in registers only is as exact as the result, or rounded on the way to it.
    inside = {t: last for match, last in lasts for n in match.members for t in n.outputs if t not in found.counterparts}
    return Rewritten(found.graph, {**inside, **found.counterparts}, tuple(decisions))


class _Gradients(Matcher):
    """Follows the graph from an exponential that may be that of scores less the logarithms of their sums."""

    def _turned(self, tensor: Tensor) -> Tensor | None:
        """What a tensor is with its last two dimensions exchanged."""
        node = self.made_by(tensor, "transpose")
        rank = tensor.rank
        if node is None or node.attributes["perm"] != (*range(rank - 2), rank - 1, rank - 2):
            return None
        return node.inputs[0]

    def _one(self, tensor: Tensor) -> Node | None:
        """The only node that takes a tensor."""
        takers = self.graph.consumers(tensor)
        return takers[0] if len(takers) == 1 and tensor not in self.graph.outputs else None

    def gradients(self) -> _Match | None:
        """The gradients around the exponential; None if it does not look like any.  Raises No."""
        graph, exponential = self.graph, self.node
        difference = self.made_by(exponential.inputs[0], "sub")
        if difference is None or exponential.output in graph.outputs:
            return None
        score, shift = difference.inputs
        space = exponential.output.shape
        if len(space) < 2 or score.shape != space or shift.shape != (*space[:-1], 1):
            return None
        p = exponential.output
        by_scores = [
            n
            for n in graph.consumers(p)
            if n.op.name == "mul" and n.inputs[0] is p and self.made_by(n.inputs[1], "sub") is not None
        ]
        if len(by_scores) != 1:
            return None
        (by_score,) = by_scores
        less = self.made_by(by_score.inputs[1], "sub")
        if less is None or by_score.output.shape != space or less.inputs[1].shape != shift.shape:
            return None
        chain = self.linear_from(less.inputs[0], lambda n: n.op.name == "matmul")
        if chain is None or chain[0].output.shape != space:
            return None
        with_loss = chain[0]
        self.members |= {difference, by_score, less, *chain}
        product = self.product_of(score)
        loss, values = with_loss.inputs[0], self._turned(with_loss.inputs[1])
        queries, keys = product.inputs[0], self._turned(product.inputs[1])
        if values is None or keys is None:
            raise Declined(f"{product.name!r} or {with_loss.name!r} is not of rows with rows")
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
        part = Part(graph, "score", float64 if wide else graph.compute_dtype)
        for tensor in product.inputs:
            if tensor.value is not None and tensor.size == 1:
                raise Declined(f"{tensor.name!r} is a constant")
            part.entered(tensor)
        part.copied(product, tuple(part.made[t] for t in product.inputs))
        nodes = {n for t in results for n in repeated(graph, members, t, product)}
        part.add(nodes)
        part.own.outputs = [part.made[t] for t in results]
        compute = float64 if wide else graph.compute_dtype
        weight, weighing = weight_of(graph, members, chain, less.inputs[0], compute)
        self._check_counted(weighing)
        notes = tuple(describe(n) for n in graph.nodes if n in members or n in nodes or n in weighing)
        made_score = Score(part.own, tuple(part.made[t] for t in part.operands), notes)
        stats, guarded = self._guard(shift, -inf, inf)
        lead = (*product.inputs, values, loss, stats, less.inputs[1])
        narrowed = [n.output for n in members if _narrows(n) and n.inputs[0].shape == space]
        common = {
            "origin": exponential.name,
            "score": made_score,
            "weight": weight[0] if weight else None,
            "factor": factor,
            "sloped": slope is not None,
            "rounded": tuple(t.name for t in narrowed),
            "guarded": guarded,
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
        return _Match(exponential, tuple(n for n in kernels if n is not None), members)

    def _weighed(self, p: Tensor, by_score: Node) -> Tensor:
        """What the loss is multiplied with: the probabilities, or what is linear in them."""
        tensor = p
        while True:
            takers = [n for n in readers(self.graph, tensor) if n is not by_score]
            if len(takers) != 1 or takers[0].op.name not in LINEAR or takers[0].output.shape != p.shape:
                return tensor
            tensor = takers[0].output

    def _check_alike(self, weighed: Tensor, chain: tuple[Node, ...]) -> None:
        """Raises No unless a tensor is made of probabilities as the end of a chain of its beginning."""
        own = self.linear_from(weighed, lambda n: n is self.node)
        alike = own is not None and len(own) == len(chain)
        if own is not None and alike:
            for a, before_a, b, before_b in zip(own[1:], own, chain[1:], chain):
                alike = alike and a.op is b.op and a.attributes == b.attributes and len(a.inputs) == len(b.inputs)
                for x, y in zip(a.inputs, b.inputs):
                    both = x is before_a.output and y is before_b.output
                    number = constant(x)
                    alike = alike and (both or x is y or (number is not None and number == constant(y)))
            self.members |= set(own)
        if not alike:
            raise Declined(
                f"{weighed.name!r} is not made of {self.node.name!r} as {chain[-1].name!r} of {chain[0].name!r}"
            )

    def _check_counted(self, weighing: set[Node]) -> None:
        """Raises No if what counts along something that will no longer exist is needed elsewhere."""
        counting = {n for n in weighing if any(self.graph.producer(t) in self.members for t in n.inputs)}
        for node in (n for n in self.graph.nodes if n in weighing and n not in self.members):
            if node in counting or any(self.graph.producer(t) in counting for t in node.inputs):
                counting.add(node)
                others = [n for n in self.graph.consumers(node.output) if n not in weighing and n not in self.members]
                if others or node.output in self.graph.outputs:
                    raise Declined(f"{node.name!r} counts along scores and is needed elsewhere")

    def _factors_of(self, by_score: Node) -> tuple[float, list[Tensor], Tensor]:
        """From the gradients by scores to those by products: a number and tensors that they are multiplied with, and
        the last of them, which is rounded.
        """
        graph, factor, slopes = self.graph, 1.0, []
        current = by_score.output
        while True:
            steps = [n for n in graph.consumers(current) if n.op.name == "mul" and n.output.shape == current.shape]
            if len(steps) != 1 or (current is not by_score.output and self._one(current) is None):
                break
            (step,) = steps
            other = step.inputs[1] if step.inputs[0] is current else step.inputs[0]
            if other is current:
                break
            number = constant(other)
            if number is not None:
                factor *= number
            else:
                slopes.append(other)
            self.members.add(step)
            current = step.output
        narrowing = [n for n in graph.consumers(current) if _narrows(n)]
        alone = current is by_score.output or self._one(current) is not None
        takers = graph.consumers(narrowing[0].output) if len(narrowing) == 1 and alone else []
        if any(n.op.name in ("matmul", "transpose") for n in takers):
            self.members.add(narrowing[0])
            current = narrowing[0].output
        return factor, slopes, current

    def _products(self, weights: Tensor) -> tuple[_Sum | None, _Sum | None]:
        """The sums of the gradients by products over keys, and over queries."""
        by_queries = None
        takers = [n for n in self.graph.consumers(weights) if n.op.name == "matmul" and n.inputs[0] is weights]
        if len(takers) > 1:
            raise Declined(f"{weights.name!r} is multiplied more than once")
        if takers:
            self._plain(takers[0])
            by_queries = _Sum(takers[0], takers[0].inputs[1], takers[0].output)
        _, by_keys = self._weighted([n for n in self.graph.consumers(weights) if n.op.name == "transpose"], weights)
        if by_queries is None and by_keys is None:
            raise Declined(f"nothing is multiplied with {weights.name!r}")
        return by_queries, by_keys

    def _plain(self, product: Node) -> None:
        if product.attributes["compute_dtype"] == "tf32":
            raise Declined(f"{product.name!r} is in tf32")
        self.members.add(product)

    def _weighted(self, takers: Sequence[Node], weights: Tensor) -> tuple[list[Node], _Sum | None]:
        """The sums over queries with weights, and what else takes these."""
        rest, found = [], None
        for node in takers:
            turn = node
            if _narrows(node) and (after := self._one(node.output)) is not None:
                turn = after
            product = self._one(turn.output) if turn.op.name == "transpose" else None
            ok = product is not None and product.op.name == "matmul" and product.inputs[0] is turn.output
            if not ok or self._turned(turn.output) is not turn.inputs[0] or found is not None:
                rest.append(node)
                continue
            assert product is not None
            self._plain(product)
            self.members |= {node, turn}
            found = _Sum(product, product.inputs[1], self._total(product))
        return rest, found

    def _total(self, product: Node) -> Tensor:
        """The sum of products over the last batch dimension, if there is one, as it is stored."""
        total = self._one(product.output)
        if total is None or total.op.name != "reduction" or total.attributes["mode"] != "add":
            return product.output
        if total.attributes["axes"] != (product.output.rank - 3,) or not total.attributes["keepdims"]:
            return product.output
        self.members.add(total)
        last = self._one(total.output)
        if last is not None and _narrows(last):
            self.members.add(last)
            return last.output
        return total.output

    def _slope(self, slopes: Sequence[Tensor]) -> Tensor | None:
        """What the gradients by scores are multiplied with; its nodes become members."""
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
