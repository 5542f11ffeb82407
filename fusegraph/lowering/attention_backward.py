"""A node of attention's gradients (`ops.attention_nodes.ATTENTION_BACKWARD`) -> an `AttentionBackwardSpec`."""

from __future__ import annotations

from dataclasses import replace

from codegen.attention import backward_simt as attention_backward_simt
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.declined import Declined
from codegen.expr import Operand
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import attention
from fusegraph.lowering.base import FamilyLowering, GroupView, Lowered, Options
from fusegraph.lowering.base import alignment as aligned
from fusegraph.lowering.program import broadcast_strides
from fusegraph.ops.attention_nodes import ATTENTION, Score
from fusegraph.ops.base import Kind


def accept(view: GroupView, options: Options) -> None:
    """Raises Declined, with the reason, unless the group is one node of attention's gradients."""
    node = view.of(Kind.ATTENTION_BACKWARD)[0]
    for other in view.nodes:
        if other is not node:
            raise Declined(f"{node.name!r} is a kernel of its own, without {other.op.name} {other.name!r}")


def check(node: Node, graph: Graph, options: Options) -> None:
    """Raises Declined, with the reason, if there is no kernel for a node, whose tensors are those of a graph."""
    attention_backward_simt.schedules(_spec(node, graph, options, "gradients")[0])


def lower(view: GroupView, options: Options, name: str) -> Lowered:
    """Returns the kernel of a group that `accept` takes."""
    node = view.of(Kind.ATTENTION_BACKWARD)[0]
    spec, reads = _spec(node, view.graph, options, name)
    return Lowered("attention_backward", spec, reads, node.outputs)


def _spec(node: Node, graph: Graph, options: Options, name: str) -> tuple[AttentionBackwardSpec, tuple[Tensor, ...]]:
    score: Score = node.attributes["score"]
    q, k, v, loss, lse, row_dot, *others = node.inputs
    space: tuple[int, ...] = score.anchor.output.shape
    batch, (rows, keys) = space[:-2], space[-2:]
    forward = {
        "origin": node.attributes["origin"],
        "score": score,
        "probabilities": "",
        "sink": False,
        "zero": True,
        "rounded": True,
        "weight": node.attributes["weight"],
        "paged": False,
        "parts": 1,
        "order": False,
    }
    spec, reads = attention.whole_spec(Node(ATTENTION, (q, k, v, *others), forward, loss), graph, options, name)
    halves = {t.dtype.itemsize for t in (q, k, v, loss)} == {2}
    spec = replace(spec, rounded=halves and len(node.attributes["rounded"]) > 0)
    if (score_shape := loss.shape) != (*batch, rows, spec.width):
        raise Declined(f"{loss.name!r} {list(score_shape)} has not the batches of the scores")

    def over(tensor: Tensor, *sizes: int) -> Operand:
        strides = broadcast_strides(tensor, (*batch, *sizes))
        return Operand(tensor.name, tensor.dtype, strides, aligned(graph, tensor, options))

    def number(tensor: Tensor) -> Operand:
        found = over(tensor, rows, 1)
        return replace(found, strides=found.strides[:-1])

    queries = node.attributes["over"] == "queries"
    made = dict(zip(node.attributes["results"], node.outputs))
    count = rows if queries else keys
    sums = {key: t for key, t in made.items() if key in ("first", "second")}
    shared = _shared(node, sums, batch) if not queries else False
    results = AttentionBackwardSpec(
        name,
        spec,
        node.attributes["over"],
        number(lse),
        number(row_dot),
        node.attributes["factor"],
        over(made["first"], count, spec.depth) if "first" in made else None,
        over(made["second"], count, spec.width) if "second" in made else None,
        over(made["by_scores"], rows, keys) if "by_scores" in made else None,
        shared,
        node.attributes["guarded"],
        over(made["by_queries"], rows, spec.depth) if "by_queries" in made else None,
        over(made["order"], 1, 1) if "order" in made else None,
    )
    if results.by_scores is not None:  # all gradients by scores are written, also where no query meets a key
        every = tuple(range(len(spec.program.loads)))
        spec = replace(spec, bounds=(), inside=spec.program, inside_loads=every)
        spec = replace(spec, ranges=(), within=spec.program, within_loads=every)
        results = replace(results, attention=spec)
    return results, (*node.inputs[:6], *reads[3:])


def _shared(node: Node, made: dict[str, Tensor], batch: tuple[int, ...]) -> bool:
    """Returns true if the results of keys are sums over the last batch dimension.  Raises Declined if over others."""
    found = set()
    for tensor in made.values():
        own = tensor.shape[:-2]
        summed = [d for d, (n, m) in enumerate(zip(batch, own)) if n != m]
        if len(own) != len(batch) or (summed and summed != [len(batch) - 1]):
            raise Declined(f"{tensor.name!r} {list(tensor.shape)} is summed up over batches {list(batch)}")
        found.add(bool(summed))
    if len(found) > 1:
        raise Declined(f"some results of {node.name!r} are summed up over heads, others not")
    return found.pop()


LOWERING: FamilyLowering = FamilyLowering(lambda view: view.of(Kind.ATTENTION_BACKWARD), accept, lower)
