"""An attention node (`ops.attention_nodes.ATTENTION`) -> an `AttentionSpec`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from codegen import best_schedule
from codegen.attention import simt as attention_simt
from codegen.attention.simt import AttentionSimtSchedule
from codegen.attention.spec import AttentionSpec, Pages
from codegen.declined import Declined
from codegen.expr import Anchor, Index, Load, Operand, Program, Result, Store, Value
from codegen.iteration import Strides, restrided
from codegen.target import Target
from fusegraph.dtypes import float32, float64
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.added_masks import selected
from fusegraph.lowering.attention_prologue import behind, computed_rows, multiplied, prologues_of
from fusegraph.lowering.base import FamilyLowering, GroupView, Lowered, Options
from fusegraph.lowering.base import alignment as aligned
from fusegraph.lowering.pointwise import check_size
from fusegraph.lowering.program import ProgramBuilder, broadcast_strides, check_broadcasts, describe
from fusegraph.lowering.scores import bounded, unscaled, with_real_positions
from fusegraph.lowering.views import alias, divided_strides
from fusegraph.ops.attention_nodes import Score, Weight
from fusegraph.ops.base import Kind, Role

#: Queries of a tile; the share that attention has of the tensor cores' fastest rate.
TILE_ROWS, TENSOR_SHARE = 128, 0.70822


def accept(view: GroupView, options: Options) -> None:
    """Raises Declined, with the reason, unless the group is one attention node."""
    node, *more = view.of(Kind.ATTENTION)
    if more:
        raise Declined(f"attention {node.name!r} and {more[0].name!r} are two kernels")
    rest = [other for other in view.nodes if other is not node]
    if not rest:
        return
    out, *stats = node.outputs
    if node.attributes["parts"] > 1:
        raise Declined(f"attention {node.name!r} is of parts of the keys, which {rest[0].name!r} needs combined")
    made = next((t for t in node.inputs if view.graph.producer(t) in view.members), None)
    if made is not None:
        raise Declined(from_memory(node, made, made, options.target.planned))
    after: set[Node] = {node}
    for other in rest:
        what = f"{other.op.name} {other.name!r}"
        if other.kind is not Kind.POINTWISE:
            raise Declined(f"{what} is not pointwise")
        check_broadcasts(other, out.shape, f"the result of attention {node.name!r}")
        if any(t in stats for t in other.inputs):
            raise Declined(f"{what} takes the sums of attention {node.name!r}, which are known when all else is done")
        if any(view.graph.producer(t) in after for t in other.inputs):
            after.add(other)
    for tensor in view.writes:
        if tensor not in stats and (view.graph.producer(tensor) not in after or tensor.shape != out.shape):
            raise Declined(f"{tensor.name!r} is written and is no result of attention {node.name!r}")
    check_size(view)


def times_read(node: Node, number: int) -> int:
    """Returns how often an attention's kernel reads each of its queries (0), keys (1) or values (2), masks aside."""
    operand = multiplied(node)[number]
    space: tuple[int, ...] = node.attributes["score"].anchor.output.shape
    *batch, rows, keys = space
    if rows == 1 and batch and shares_keys(node):
        rows = batch.pop()
    tiles = prod(batch) * -(-rows // TILE_ROWS)  # each reads all keys and values
    width = multiplied(node)[2].shape[-1] if number == 2 else multiplied(node)[0].shape[-1]
    reads = rows * prod(batch) * width if number == 0 else tiles * keys * width
    return max(1, round(reads / max(1, operand.size)))


def from_memory(node: Node, operand: Tensor, made: Tensor, target: Target) -> str:
    """Returns why the nodes that make an operand of an attention are not part of its kernel.

    ``made`` is what they make; the operand may be a view of it.  The reason says what their fusion would save and cost,
    without the work that masks save, which is not known here.
    """
    position = node.inputs.index(operand)
    prologue = next((n for n in range(3) if operand in behind(node, n)), None)
    if prologue is not None:
        what = ("queries", "keys", "values")[prologue]
        return f"attention {node.name!r} computes its {what} of {made.name!r}, which it reads from memory"
    if position > 2:
        return f"attention {node.name!r} computes nothing in front of its operands, and {made.name!r} is one"
    q, k, v = multiplied(node)
    *batch, rows, keys = node.attributes["score"].anchor.output.shape
    operations = TENSOR_SHARE * 2 * max(target.mma, target.wgmma) * target.sms / target.bytes_per_cycle
    products = 2 * rows * prod(batch) * keys * (q.shape[-1] + v.shape[-1]) / operations
    whole = max(products, q.nbytes + k.nbytes + v.nbytes + node.outputs[0].nbytes)
    times = times_read(node, position)
    left = (
        node.attributes.get("left", ("", "", ""))[position]
        if times == 1
        else f"would compute each element {times} times"
    )
    what, saved = ("queries", "keys", "values")[position], f"{2 * operand.nbytes / 1e3:,.0f} kB"
    return (
        f"attention {node.name!r} reads tiles of its {what} as they lie in memory: to compute {made.name!r} in its "
        f"kernel, which takes as long as moving {whole / 1e3:,.0f} kB, would save moving {saved}"
        f"{f', but {left}' if left else ''}"
    )


def check(node: Node, graph: Graph, options: Options) -> None:
    """Raises Declined, with the reason, if there is no kernel for a node, whose tensors are those of a graph."""
    attention_simt.schedules(_spec(node, graph, options, "attention")[0], options.target.planned)


def by_threads(node: Node, graph: Graph, options: Options) -> float | None:
    """Returns the cycles that the kernel of a node is estimated to take if it is one of single threads' multiply-adds;
    None if tensor cores multiply.
    """
    spec, target = _spec(node, graph, options, "attention")[0], options.target.planned
    schedule = best_schedule(spec, target)
    return attention_simt.cost(spec, schedule, target) if isinstance(schedule, AttentionSimtSchedule) else None


def lower(view: GroupView, options: Options, name: str) -> Lowered:
    """Returns the kernel of a group that `accept` takes."""
    node = view.of(Kind.ATTENTION)[0]
    out, *stats = node.outputs
    if len(view.nodes) == 1:
        spec, reads = _spec(node, view.graph, options, name)
        return Lowered("attention", spec, reads, node.outputs)
    batch = node.attributes["score"].anchor.output.shape[:-2]
    space = (*batch, *out.shape[-2:])

    def strides(tensor: Tensor) -> tuple[int, ...]:
        """Returns a tensor's strides over the batch of the scores, in which heads may have two dimensions."""
        found = divided_strides(out.shape, broadcast_strides(tensor, out.shape), space)
        assert found is not None
        return found

    own = _Whole(view.graph, view.nodes, [t for t in view.writes if t not in stats])
    program, more, writes = ProgramBuilder(own, options, strides, node).build()
    program = replace(program, notes=tuple(describe(n) for n in view.nodes if n is not node))
    spec, reads = _spec(node, view.graph, options, name, program)
    return Lowered("attention", spec, (*reads, *more), (*writes, *stats))


def whole_spec(node: Node, graph: Graph, options: Options, name: str) -> tuple[AttentionSpec, tuple[Tensor, ...]]:
    """Returns the kernel of an attention node as it is, and the tensors that it reads."""
    score: Score = node.attributes["score"]
    q, k, v = multiplied(node)
    space = score.anchor.output.shape
    batch, (rows, keys) = space[:-2], space[-2:]
    paged, parts, ordered = (node.attributes[key] for key in ("paged", "parts", "order"))
    stats = node.outputs[1 : len(node.outputs) - ordered]
    first = 3 + 2 * paged + node.attributes["sink"]
    weight: Weight | None = node.attributes["weight"]
    rest = len(score.operands) - 2
    own = dict(zip(score.operands, (q, k, *node.inputs[first:])))
    if weight is not None:
        own |= dict(zip(weight.operands, node.inputs[first + rest :]))

    def operand(tensor: Tensor, strides: tuple[int, ...]) -> Operand:
        return Operand(tensor.name, tensor.dtype, strides, aligned(graph, tensor, options))

    def over(tensor: Tensor, *sizes: int) -> Operand:
        return operand(tensor, broadcast_strides(tensor, (*batch, *sizes)))

    def part(tensor: Tensor) -> Tensor:
        """Returns the first part of an output."""
        if parts == 1:
            return tensor
        return alias(tensor, tensor.name, tensor.shape[1:], tensor.strides[1:], 0)

    def program(of: Graph, anchor: Node = score.anchor) -> tuple[Program, tuple[Tensor, ...]]:
        view = _Whole(of, of.nodes, of.outputs)
        builder = ProgramBuilder(view, options, lambda t: broadcast_strides(own.get(t, t), space), anchor)
        made, reads, _ = builder.build()
        loads = tuple(operand(own[t], op.strides) for t, op in zip(reads, made.loads))
        real = float64 if made.real == "double" else float32
        stores = tuple(Store(Operand(s.operand.name, real, s.operand.strides), s.value) for s in made.stores)
        return replace(made, loads=loads, stores=stores, notes=score.notes), reads

    scale, left = unscaled(with_real_positions(selected(score.graph)))
    static, inner = bounded(left, varying=False)
    every, innermost = bounded(left, varying=True)
    ranges = tuple(c for c in every if c.varies)
    whole, reads = program(left)
    inside, inside_reads = program(inner)
    within, within_reads = program(innermost)
    weighed, weight_reads = (None, ()) if weight is None else program(weight.graph, weight.anchor)
    numbers = {t: n for n, t in enumerate(reads)}
    depth, sink = q.shape[-1], node.inputs[first - 1]
    pages = None
    if paged:
        k_op, v_op = (operand(t, (*container_strides(t, len(batch)), *t.strides[-2:])) for t in (k, v))
        k_pages, v_pages = (
            Pages(operand(t, _table_strides(t, len(batch))), x.shape[2], t.shape[1], x.shape[0], x.strides[0])
            for t, x in zip(node.inputs[3:5], (k, v))
        )
        pages = k_pages, v_pages
    else:
        turned = over(k, k.shape[-2], keys)
        k_op = replace(turned, strides=(*turned.strides[:-2], turned.strides[-1], turned.strides[-2]))
        v_op = over(v, keys, v.shape[-1])
    prologues = prologues_of(node)
    computed = [
        None if f is None else computed_rows(f, behind(node, n), n == 1, len(batch), graph, options)
        for n, f in enumerate(prologues)
    ]
    q_rows, k_rows, v_rows = (None if c is None else c[0] for c in computed)
    made_of = [t for c in computed if c is not None for t in c[1]]
    lead = [t for n, t in enumerate(node.inputs[:first]) if n > 2 or prologues[n] is None]
    whole = replace(whole, notes=(*(note for f in prologues if f is not None for note in f.notes), *whole.notes))
    spec = AttentionSpec(
        name,
        batch,
        rows,
        keys,
        depth,
        v.shape[-1],
        over(q, rows, depth),
        k_op,
        v_op,
        scale,
        whole,
        tuple(c.bound(numbers) for c in static),
        tuple(c.bound(numbers) for c in ranges),
        inside,
        tuple(numbers[t] for t in inside_reads),
        within,
        tuple(numbers[t] for t in within_reads),
        over(_spread(part(node.outputs[0]), (*batch, rows, v.shape[-1])), rows, v.shape[-1]),
        _stats(part(stats[0]), over, rows) if stats else None,
        operand(sink, broadcast_strides(sink, (*batch, 1, 1))[:-2]) if node.attributes["sink"] else None,
        node.attributes["zero"],
        node.attributes["rounded"],
        weighed,
        pages=pages,
        computed=(q_rows, k_rows, v_rows),
        order=operand(node.outputs[-1], (0,)) if ordered else None,
    )
    return spec, (*lead, *made_of, *(own[t] for t in (*reads, *weight_reads)))


def _spec(
    node: Node, graph: Graph, options: Options, name: str, epilogue: Program | None = None
) -> tuple[AttentionSpec, tuple[Tensor, ...]]:
    spec, reads = whole_spec(node, graph, options, name)
    parts, weight = node.attributes["parts"], spec.weight
    if weight is not None and parts == 1 and _belongs_behind(node, weight):
        epilogue, spec = _behind(weight, epilogue, spec.out), replace(spec, weight=None)
    if epilogue is not None:
        notes = (*spec.program.notes, *epilogue.notes)
        out = epilogue.stores[0].operand
        spec = replace(spec, epilogue=epilogue, out=out, program=replace(spec.program, notes=notes))
    spec = _one_tile(spec)
    if parts > 1:
        spec = _in_parts(spec, parts, tuple(t.strides[0] for t in node.outputs))
    return spec, reads


def _belongs_behind(node: Node, weight: Program) -> bool:
    """Returns true if a weight is applied to the results: one number for all probabilities, or zeros for whole rows.

    In rows without keys only the result is NaN, not what is added up: zeros have to be chosen there.
    """
    chosen = any(n.op.role is Role.SELECT for n in node.attributes["weight"].graph.nodes)
    steps = (*weight.indices, *(op.strides for op in weight.loads))
    return not any(x[-1] if chosen else any(x) for x in steps)


def _behind(weight: Program, epilogue: Program | None, out: Operand) -> Program:
    """Returns an epilogue that first does to a query's results what the weight does to its probabilities."""
    if epilogue is None:
        epilogue = Program(stores=(Store(out, Anchor()),), real=weight.real, exact=weight.exact)
    loads, indices, instructions = len(weight.loads), len(weight.indices), len(weight.instructions)

    def moved(value: Value) -> Value:
        if isinstance(value, Anchor):
            return weight.stores[0].value
        if isinstance(value, Load):
            return Load(value.operand + loads)
        if isinstance(value, Index):
            return Index(value.index + indices)
        return Result(value.instruction + instructions) if isinstance(value, Result) else value

    after = (replace(i, args=tuple(moved(v) for v in i.args)) for i in epilogue.instructions)
    return replace(
        epilogue,
        loads=(*weight.loads, *epilogue.loads),
        indices=(*weight.indices, *epilogue.indices),
        instructions=(*weight.instructions, *after),
        stores=tuple(Store(s.operand, moved(s.value)) for s in epilogue.stores),
    )


def _spread(out: Tensor, space: tuple[int, ...]) -> Tensor:
    """Returns the result with the batch of the scores, in which heads may have two dimensions."""
    strides = divided_strides(out.shape, out.strides, space)
    assert strides is not None
    return alias(out, out.name, space, strides, 0)


def _stats(tensor: Tensor, over: Any, rows: int) -> Operand:
    found: Operand = over(tensor, rows, 1)
    return replace(found, strides=found.strides[:-1])


def shares_keys(node: Node) -> bool:
    """Returns true if the queries of the last batch dimension of an attention share their keys and values."""
    batch = node.attributes["score"].anchor.output.shape[:-2]
    if node.attributes["paged"]:
        return all(container_strides(t, len(batch))[-1] == 0 for t in node.inputs[1:3])
    return all(broadcast_strides(t, (*batch, 1, 1))[-3] == 0 for t in multiplied(node)[1:])


def _table_strides(table: Tensor, rank: int) -> tuple[int, ...]:
    """Returns the strides of a table of pages over ``rank`` batch dimensions, and over pages."""
    batches = table.strides[0] if table.shape[0] > 1 else 0
    return (batches, *(0,) * (rank - 1), table.strides[1])


def container_strides(container: Tensor, rank: int) -> tuple[int, ...]:
    """Returns the strides of a container of pages over ``rank`` of: batches, heads, heads of q that share a head."""
    heads = container.strides[1] if container.shape[1] > 1 else 0
    return (0, heads, 0)[:rank]


def _one_tile(spec: AttentionSpec) -> AttentionSpec:
    """Makes the single queries of heads that share their keys (grouped heads, in decoding) rows of one tile."""
    last = len(spec.batch) - 1
    if spec.rows != 1 or last < 0 or spec.k.strides[last] or spec.v.strides[last] or spec.sink is not None:
        return spec
    spec = _restrided(spec, lambda s: (*s[: last + 1], *s[last + 2 :]), lambda s: (*s[:last], *s[last + 1 :]))
    return replace(
        spec,
        batch=spec.batch[:last],
        rows=spec.batch[last],
        bounds=tuple(replace(b, row=0) for b in spec.bounds),
        ranges=tuple(replace(b, row=0) for b in spec.ranges),
    )


def _in_parts(spec: AttentionSpec, parts: int, steps: tuple[int, ...]) -> AttentionSpec:
    """Returns the same with parts of the keys as the first batch dimension; steps are the outputs' strides over it."""
    assert spec.stats is not None
    out, stats = (replace(op, strides=(n, *op.strides)) for n, op in zip(steps, (spec.out, spec.stats)))
    spec = _restrided(spec, lambda s: (0, *s), lambda s: (0, *s))
    return replace(spec, batch=(parts, *spec.batch), out=out, stats=stats, parts=parts)


def _restrided(
    spec: AttentionSpec, rows: Callable[[Strides], Strides], keys: Callable[[Strides], Strides]
) -> AttentionSpec:
    """Returns the same with other strides: ``keys`` changes those of keys and values, ``rows`` all others."""

    def queried(op: Operand) -> Operand:
        return replace(op, strides=rows(op.strides))

    def keyed(op: Operand) -> Operand:
        return replace(op, strides=keys(op.strides))

    def scored(program: Program, change: Callable[[Strides], Strides] = rows) -> Program:
        return restrided(program, [change(s) for s in program.strides])

    q_rows, k_rows, v_rows = (
        None if c is None else replace(c, program=scored(c.program, change))
        for c, change in zip(spec.computed, (rows, keys, keys))
    )
    pages = spec.pages
    if pages is not None:
        pages = replace(pages[0], table=keyed(pages[0].table)), replace(pages[1], table=keyed(pages[1].table))
    return replace(
        spec,
        q=queried(spec.q),
        k=keyed(spec.k),
        pages=pages,
        v=keyed(spec.v),
        program=scored(spec.program),
        inside=scored(spec.inside),
        within=scored(spec.within),
        weight=None if spec.weight is None else scored(spec.weight),
        epilogue=None if spec.epilogue is None else scored(spec.epilogue),
        out=queried(spec.out),
        stats=None if spec.stats is None else queried(spec.stats),
        computed=(q_rows, k_rows, v_rows),
    )


class _Whole(GroupView):
    """Nodes of a graph in their order, and what is written of them."""

    def __init__(self, graph: Graph, nodes: Sequence[Node], writes: Sequence[Tensor]) -> None:
        super().__init__(graph, nodes, {n: k for k, n in enumerate(nodes)})
        self.writes = tuple(writes)


LOWERING: FamilyLowering = FamilyLowering(lambda view: view.of(Kind.ATTENTION), accept, lower)
