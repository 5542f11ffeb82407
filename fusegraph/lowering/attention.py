"""An attention node (`ops.attention.ATTENTION`) -> an `AttentionSpec`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from codegen import attention_simt
from codegen.expr import Operand, Program, Store
from codegen.spec import AttentionSpec
from codegen.tiles import Unsupported
from fusegraph.dtypes import float32, float64
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import GroupView, Lowered, Options, Refusal
from fusegraph.lowering.base import alignment as aligned
from fusegraph.lowering.program import ProgramBuilder, broadcast_strides
from fusegraph.lowering.scores import bounded, unscaled
from fusegraph.ops.attention import Score
from fusegraph.ops.base import Kind


def attentions(view: GroupView) -> list[Node]:
    return [n for n in view.nodes if n.kind is Kind.ATTENTION]


def accept(view: GroupView, options: Options) -> None:
    """Raises Refusal, with the reason, unless the group is one attention node."""
    node = attentions(view)[0]
    for other in view.nodes:
        if other is not node:
            raise Refusal(f"attention {node.name!r} is a kernel of its own, without {other.op.name} {other.name!r}")


def check(node: Node, graph: Graph, options: Options) -> None:
    """Raises Refusal, with the reason, if there is no kernel for a node, whose tensors are those of a graph."""
    try:
        attention_simt.schedules(_spec(node, graph, options, "attention")[0])
    except Unsupported as reason:
        raise Refusal(str(reason)) from None


def lower(view: GroupView, options: Options, name: str) -> Lowered:
    """The kernel of a group that `accept` takes."""
    node = attentions(view)[0]
    spec, reads = _spec(node, view.graph, options, name)
    return Lowered("attention", spec, reads, node.outputs)


def _spec(node: Node, graph: Graph, options: Options, name: str) -> tuple[AttentionSpec, tuple[Tensor, ...]]:
    score: Score = node.attributes["score"]
    q, k, v = node.inputs[:3]
    space = score.anchor.output.shape
    batch, (rows, keys) = space[:-2], space[-2:]
    first = 3 + node.attributes["sink"]
    own = dict(zip(score.operands, (q, k, *node.inputs[first:])))

    def operand(tensor: Tensor, strides: tuple[int, ...]) -> Operand:
        return Operand(tensor.name, tensor.dtype, strides, aligned(graph, tensor, options))

    def over(tensor: Tensor, *sizes: int) -> Operand:
        return operand(tensor, broadcast_strides(tensor, (*batch, *sizes)))

    def program(of: Graph) -> tuple[Program, tuple[Tensor, ...]]:
        view = _Whole(of)
        builder = ProgramBuilder(view, options, lambda t: broadcast_strides(own.get(t, t), space), score.anchor)
        made, reads, _ = builder.build()
        loads = tuple(operand(own[t], op.strides) for t, op in zip(reads, made.loads))
        real = float64 if made.real == "double" else float32
        stores = tuple(Store(Operand(s.operand.name, real, s.operand.strides), s.value) for s in made.stores)
        return replace(made, loads=loads, stores=stores, notes=score.notes), reads

    scale, left = unscaled(score.graph)
    static, inner = bounded(left, varying=False)
    every, innermost = bounded(left, varying=True)
    ranges = tuple(c for c in every if c.varies)
    whole, reads = program(left)
    inside, inside_reads = program(inner)
    within, within_reads = program(innermost)
    numbers = {t: n for n, t in enumerate(reads)}
    turned = over(k, k.shape[-2], keys)
    depth = k.shape[-2]
    spec = AttentionSpec(
        name,
        batch,
        rows,
        keys,
        depth,
        v.shape[-1],
        over(q, rows, depth),
        replace(turned, strides=(*turned.strides[:-2], turned.strides[-1], turned.strides[-2])),
        over(v, keys, v.shape[-1]),
        scale,
        whole,
        tuple(c.bound(numbers) for c in static),
        tuple(c.bound(numbers) for c in ranges),
        inside,
        tuple(numbers[t] for t in inside_reads),
        within,
        tuple(numbers[t] for t in within_reads),
        over(node.outputs[0], rows, v.shape[-1]),
        _stats(node, over, rows),
        operand(node.inputs[3], broadcast_strides(node.inputs[3], (*batch, 1, 1))[:-2]) if first == 4 else None,
        node.attributes["zero"],
        node.attributes["rounded"],
    )
    return spec, (*node.inputs[:first], *(own[t] for t in reads))


def _stats(node: Node, over: Any, rows: int) -> Operand | None:
    if len(node.outputs) == 1:
        return None
    found: Operand = over(node.outputs[1], rows, 1)
    return replace(found, strides=found.strides[:-1])


class _Whole(GroupView):
    """All nodes of a graph of scores."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph, graph.nodes, {n: k for k, n in enumerate(graph.nodes)})
        self.writes = tuple(graph.outputs)
