"""Computing queries, keys and values in the kernel of their attention: rotary embeddings, scales, biases, conversions.

A tile of queries is brought to shared memory once, and so is a tile of keys or values where all queries that meet it
are one tile (decoding).  Their prologues are computed on the way, instead of being written to memory and read again.
A prologue has only simple ops and movement: functions take as long as moving their results, and those of angles, the
same for all heads, are better tabulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from codegen.declined import Declined
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.attention import times_read
from fusegraph.lowering.attention_prologue import PrologueGraph, computed_rows
from fusegraph.lowering.base import Options
from fusegraph.lowering.choices import Choice, speculate
from fusegraph.lowering.program import describe
from fusegraph.lowering.views import view
from fusegraph.ops.attention_nodes import ATTENTION
from fusegraph.ops.base import Kind
from fusegraph.passes.attention_parts import Subgraph
from fusegraph.passes.partition import Decision
from fusegraph.passes.rewrite import Rewrite, Rewritten, same
from fusegraph.passes.speculation import PROLOGUE
from fusegraph.passes.split_attention import best_parts

OPERANDS = ("queries", "keys", "values")
#: Nodes that are followed back from an operand.
MOST_NODES = 40
#: More keys than this are better copied to shared memory, while tensor cores multiply others, than computed.
MOST_KEYS = 512
#: A tensor with at least 1 / LARGE of an operand's elements is one that it is mainly made of.
LARGE = 2


def compute_prologues(graph: Graph, options: Options) -> Rewritten:
    """Lets attention compute its operands on their way to shared memory, where that is worth it."""
    choices: list[Choice] = []
    found = {node: _prologues(graph, node, options, choices) for node in graph.nodes if node.kind is Kind.ATTENTION}
    if not any(x is not None for each in found.values() for x in each):
        return same(graph)
    decisions = []
    rewrite = Rewrite(graph)
    gone = {n for each in found.values() for x in each if isinstance(x, _Found) for n in x.members}
    for node in graph.nodes:
        if node in gone:
            continue
        if node not in found:
            rewrite.take_over(node)
            continue
        inputs = [rewrite.new.get(t, t) for t in node.inputs]
        for number, prologue in enumerate(found[node]):
            if isinstance(prologue, _Found):
                more = [rewrite.new[t] for t in prologue.reads]
                inputs = [*inputs[:number], max(more, key=lambda t: t.nbytes), *inputs[number + 1 :], *more]
                tensor = node.inputs[number]
                count = len(prologue.members)
                last = [n for n in graph.nodes if n in prologue.members and not _is_view(n)][-1]
                reason = (
                    f"attention {node.name!r} computes its {OPERANDS[number]} on their way to shared memory: "
                    f"{count} node{'s' * (count > 1)}, neither written nor read back"
                )
                decisions.append(Decision(last.name, node.name, True, reason, 2 * tensor.nbytes))
        attributes = {
            **node.attributes,
            "prologues": tuple(x.prologue if isinstance(x, _Found) else None for x in found[node]),
            "left": tuple(x if isinstance(x, str) else "" for x in found[node]),
        }
        rewrite.graph.add_node(Node(ATTENTION, tuple(inputs), attributes, *map(rewrite.result, node.outputs)))
    return replace(rewrite.done(decisions), choices=tuple(choices))


@dataclass(frozen=True)
class _Found:
    """What computes an operand, and the tensors of the graph that it reads."""

    members: frozenset[Node]
    prologue: PrologueGraph
    reads: tuple[Tensor, ...]


def _prologues(graph: Graph, node: Node, options: Options, choices: list[Choice]) -> list[_Found | str | None]:
    """Returns for each operand its prologue, or why that stays a kernel of its own, or None where there is nothing.

    Adds to ``choices`` what may be one or the other.
    """
    result: list[_Found | str | None] = []
    for number in range(len(OPERANDS)):
        try:
            prologue = _prologue(graph, node, number, options)
            reason = options.left_out.get((PROLOGUE, node.attributes["origin"]))
            if prologue is not None and reason is not None:
                raise Declined(reason)
            if prologue is not None:
                operand = node.inputs[number]
                speculate(PROLOGUE, operand.name, options.settled, choices, f"{number} {operand.type}")
            result.append(prologue)
        except Declined as declined:
            result.append(str(declined))
    return result


def _prologue(graph: Graph, node: Node, number: int, options: Options) -> _Found | None:
    """Returns what computes an operand.  Raises Declined with the reason if it stays where it is."""
    tensor = node.inputs[number]
    last = graph.producer(tensor)
    if last is None or (number and node.attributes["paged"]):
        return None
    if not _is_computed(graph, tensor):
        return None
    if node.inputs.count(tensor) > 1 or tensor in graph.outputs or graph.consumers(tensor) != [node]:
        raise Declined(f"{tensor.name!r} is needed in memory as well")
    if last.kind is Kind.POINTWISE and not _cheap(last):
        raise Declined(f"{last.op.name} takes many instructions")
    members = _closure(graph, node, tensor)
    if not any(n.kind is Kind.POINTWISE for n in members):
        return None  # a kernel in front computes it
    # Every part of the keys computes all queries: they are few, but each block waits for what they are computed of.
    times = times_read(node, number) * (best_parts(node, options.target.planned) if number == 0 else 1)
    if times > 1:
        raise Declined(f"would compute each element {times} times")
    keys = node.attributes["score"].anchor.output.shape[-1]
    if number and keys > MOST_KEYS and tensor.dtype.itemsize < 4:
        raise Declined(f"copies of {keys} keys are on their way while others are multiplied, what is computed is not")
    part = Subgraph(graph, "prologue", node.attributes["score"].graph.compute_dtype)
    part.add(members)
    part.own.outputs = [part.made[tensor]]
    notes = tuple(describe(n) for n in graph.nodes if n in members)
    prologue = PrologueGraph(part.own, tuple(part.made[t] for t in part.operands), tensor.name, notes)
    reads = tuple(part.operands)
    if not reads:
        raise Declined(f"{tensor.name!r} is computed of numbers alone")
    rank = node.attributes["score"].anchor.output.rank - 2
    computed_rows(prologue, reads, number == 1, rank, graph, options)
    return _Found(frozenset(members), prologue, reads)


def _cheap(node: Node) -> bool:
    return node.kind is Kind.MOVEMENT or node.op.cheap


def _is_computed(graph: Graph, tensor: Tensor) -> bool:
    """Returns whether pointwise nodes, or movement, compute a tensor: it is no view of what something else makes."""
    while (node := graph.producer(tensor)) is not None and node.kind is Kind.MOVEMENT:
        if view(node, node.inputs[0].strides) is None:
            return True
        tensor = node.inputs[0]
    return node is not None and node.kind is Kind.POINTWISE


def _behind_another(graph: Graph, tensor: Tensor) -> bool:
    """Tells whether pointwise nodes compute a tensor from what a kernel of another family makes for them alone."""
    while (node := graph.producer(tensor)) is not None and (node.kind is Kind.POINTWISE or _is_view(node)):
        own = (t for t in node.inputs if t.size == node.output.size and graph.consumers(t) == [node])
        following = next((t for t in own if graph.producer(t) is not None), None)
        if following is None:
            return False
        tensor = following
    return node is not None and node.kind is not Kind.MOVEMENT


def _closure(graph: Graph, node: Node, tensor: Tensor) -> set[Node]:
    """Returns the nodes that do nothing but compute an operand, without those in the epilogue of a kernel in front.

    Raises Declined if a kernel in front does all of it.
    """
    members = _alone(graph, node, tensor, lambda n: _cheap(n) and not any(t in graph.outputs for t in n.outputs))
    while True:
        for large in _large(graph, members, tensor):
            takers, maker = graph.consumers(large), graph.producer(large)
            if maker is None or large in graph.outputs or not all(n in members for n in takers):
                continue  # it is in memory
            if len(takers) == 1 and (takers[0].kind is Kind.POINTWISE or _is_view(takers[0])):
                members = _alone(graph, node, tensor, (members - {takers[0]}).__contains__)
                break
            if _is_computed(graph, large) and not _behind_another(graph, large):
                raise Declined(f"{large.name!r} is computed by a kernel in front, which does the rest as well")
        else:
            return members


def _alone(graph: Graph, node: Node, tensor: Tensor, may: Callable[[Node], bool]) -> set[Node]:
    """Returns the nodes that ``may`` accepts and whose results lead to an operand of an attention alone."""
    found: set[Node] = set()
    pending = deque([tensor])
    while pending and len(found) < MOST_NODES:
        other = graph.producer(pending.popleft())
        if other is None or other in found or not may(other):
            continue
        takers = [n for t in other.outputs for n in graph.consumers(t)]
        if all(n in found or (n is node and other.outputs == (tensor,)) for n in takers):
            found.add(other)
            pending += other.inputs
    return found


def _is_view(node: Node) -> bool:
    return node.kind is Kind.MOVEMENT and view(node, node.inputs[0].strides) is not None


def _large(graph: Graph, members: Set[Node], tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that an operand is mainly computed of."""
    made = {t for n in members for t in n.outputs}
    every = dict.fromkeys(t for n in graph.nodes if n in members for t in n.inputs)
    return [t for t in every if t not in made and LARGE * t.size >= tensor.size]
