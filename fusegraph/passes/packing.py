"""Packing: what depends on parameters and constants alone is computed when these change, not in every call.

Passes lay filters out for tensor cores, pad rows, join matrices, make a normalization a factor and a term.  Where the
operands are parameters, the nodes that do this form a graph of their own, the packing, from parameters to packed
tensors; the graph that runs in every call takes these as inputs.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.divided import made_of_less
from fusegraph.lowering.views import view
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.parameters import fixed, memory, most_bytes
from fusegraph.passes.partition import Decision, Partition
from fusegraph.passes.rewrite import Rewrite, Rewritten, same
from fusegraph.pattern import made_of

#: A packed copy may be so much larger than what it is made of, or have so few bytes.
MOST_GROWTH, SMALL_BYTES = 1.5, 1 << 16
#: The name of the pass, and of its note.
PACKING = "packing"


def split_packing(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Takes what depends on parameters and constants alone out of a graph, where reading it is better.

    The note "packing" has the graph that computes it, whose results are inputs of the other one.  What turns out to be
    a kernel of its own is taken out as well.
    """
    alone = {name for pass_name, name in options.left_out if pass_name == PACKING}
    kept, packed = _parts(graph, fixed(graph, options), alone)

    def declined(partition: Partition) -> Mapping[str, str]:
        found = _alone(partition, options)
        return {name: "its kernel would run in every call" for name in found - alone if name in graph.tensors}

    if not packed:
        return replace(same(graph), declined=declined)
    rewrite = Rewrite(graph)
    inputs = {t: rewrite.result(t) for t in packed}
    for node in graph.nodes:
        if node in kept:
            rewrite.take_over(node)
    made = rewrite.done()
    packing, sources = _packing(graph, packed)
    made.graph.packed = {new: sources[old] for old, new in inputs.items()}
    made.graph.inputs += made.graph.packed
    reason = "it depends on parameters alone: computed when they change, not in every call"
    takers = [(t, n) for t in packed for n in graph.consumers(t) if n in kept]
    decisions = [Decision(t.name, n.name, False, reason) for t, n in takers]
    return replace(made, notes={PACKING: {PACKING: packing}}, decisions=tuple(decisions), declined=declined)


def _alone(partition: Partition, options: Options) -> set[str]:
    """Returns the names of tensors that kernels make of fixed ones alone, for other kernels."""
    graph, limit = partition.graph, most_bytes(partition.graph, options)
    known = fixed(graph, options)
    inner = {t for t in known if t.base is t and t not in graph.outputs and memory(t) <= limit}
    groups = (g for g in partition.groups if known.issuperset(t.base for t in g.reads) and inner.issuperset(g.writes))
    return {t.name for group in groups for t in group.writes}


def _parts(graph: Graph, known: set[Tensor], alone: Container[str]) -> tuple[set[Node], list[Tensor]]:
    """Returns the nodes that every call computes, and the packed tensors, of the known ones, that these take.

    Those whose names are in ``alone`` are packed whatever they cost: kernels wrote them.  Of the others views, which
    cost nothing, are not, nor is what makes operands of products of fewer bytes.
    """
    kept = {node for node in graph.nodes if not known.issuperset(node.outputs)}
    kept.update(
        made_of(graph, [t for t in graph.outputs if t in known])
    )  # what leaves the graph is written by every call
    stored = _stored(graph)
    packed: dict[Tensor, None] = {}
    stack = [t for node in kept for t in node.inputs if t in known]
    while stack:
        tensor = stack.pop()
        node = graph.producer(tensor)
        if node is None or node in kept:
            continue
        worthwhile = node not in stored and not _is_view(node) and _is_worthwhile(graph, node)
        if tensor.name in alone or worthwhile:
            packed[tensor] = None
        else:
            kept.add(node)
            stack += node.inputs
    order = {t: n for n, t in enumerate(graph.tensors.values())}
    return kept, sorted((t for t in packed if graph.producer(t) not in kept), key=order.__getitem__)


def _stored(graph: Graph) -> set[Node]:
    """Returns the nodes that make operands of matrix products of fewer bytes: a packed copy would undo that."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op.role is Role.MATMUL:
            found |= {n for operand in node.inputs for n in made_of_less(graph, operand, node)}
    return found


def _is_view(node: Node) -> bool:
    return view(node, node.inputs[0].strides) is not None if node.inputs else False


def _is_worthwhile(graph: Graph, node: Node) -> bool:
    """Returns true if a node's results had better be read than computed again in every call.

    That is not so for pointwise work that makes more bytes of fewer: a kernel does that as it reads them.
    """
    behind = made_of(graph, node.outputs)
    sources = {t for n in behind for t in n.inputs if graph.producer(t) is None}
    if not sources:
        return False
    if any(n.kind not in (Kind.POINTWISE, Kind.MOVEMENT) for n in behind):
        return True
    made, read = sum(map(memory, node.outputs)), sum(map(memory, sources))
    widens = all(n.op.role is Role.CAST or _is_view(n) for n in behind)
    return made <= MOST_GROWTH * read or (made <= SMALL_BYTES and not widens)


def _packing(graph: Graph, packed: Sequence[Tensor]) -> tuple[Graph, dict[Tensor, tuple[str, ...]]]:
    """Returns the graph that makes packed tensors, and the names of the parameters that each is made of."""
    behind = made_of(graph, packed)
    rewrite = Rewrite(graph)
    made = rewrite.graph
    for node in graph.nodes:
        if node in behind:
            rewrite.take_over(node)
    read = {t for node in behind for t in node.inputs}
    for tensor in [t for t in made.tensors.values() if made.producer(t) is None]:
        old = graph.tensors[tensor.name]
        if old not in read:
            del made.tensors[tensor.name]
    made.name = f"{graph.name[:180]} packing"
    made.inputs = [rewrite.new[t] for t in graph.inputs if t in read]
    made.outputs = [rewrite.new[t] for t in packed]
    made.parameters = set()
    sources = {}
    for tensor in packed:
        taken = {t for node in made_of(graph, [tensor]) for t in node.inputs}
        sources[tensor] = tuple(t.name for t in graph.inputs if t in taken)
    return made, sources
