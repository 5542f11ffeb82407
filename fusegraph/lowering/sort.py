"""Sorted rows and pointwise nodes around them -> a `SortSpec`."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.combiners import MIN
from codegen.declined import Declined
from codegen.expr import Operand, Reduced, Reduction, Value, compute_type
from codegen.sort import SortSpec, longest
from codegen.spec import PointwiseSpec
from fusegraph.dtypes import DType, int32
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import FamilyLowering, GroupView, Lowered, Options
from fusegraph.lowering.pointwise import check_size
from fusegraph.lowering.program import ProgramBuilder, broadcast_strides, check_broadcasts
from fusegraph.ops.base import Kind, Role
from fusegraph.ops.evaluate import compute_dtype
from fusegraph.ops.sort import order_of
from fusegraph.ops.sort_runs import entries


def longest_row(dtype: DType, graph: Graph) -> int:
    """Returns the most elements of a dtype that one block of threads sorts."""
    return longest(compute_dtype(dtype, graph.compute_dtype).compute)


@dataclass(frozen=True)
class _Way:
    """What a node sorts and how: the operands, the axis, and what a `SortSpec` says of it."""

    inputs: tuple[Tensor, ...]
    axis: int
    descending: bool
    count: int
    run: int
    keep: int
    merged: bool


def _way(node: Node) -> _Way:
    x, at = node.inputs[0], node.attributes
    if not _is_step(node):
        axis, descending, keep = order_of(x.type, at)
        return _Way((x,), axis, descending, x.shape[axis], x.shape[axis], keep, False)
    axis, count = at["axis"], entries(tuple(t.type for t in node.inputs), at["axis"])
    return _Way(node.inputs, axis, at["descending"], count, at["run"], at["keep"], node.op.role is Role.MERGE)


def _is_step(node: Node) -> bool:
    """Returns true if a node is a step of sorting long rows."""
    return node.op.role in (Role.RUNS, Role.MERGE)


def accept(view: GroupView, options: Options) -> None:
    """Raises Declined unless the group sorts one tensor in one way, with pointwise nodes around that."""
    nodes = view.of(Kind.SORT)
    first = nodes[0]
    x, way = first.inputs[0], _way(first)
    for node in view.nodes:
        if node.kind not in (Kind.POINTWISE, Kind.SORT) or (node.kind is Kind.SORT and _way(node) != way):
            raise Declined(f"{node.op.name} {node.name!r} and {first.op.name} {first.name!r} are two kernels")
    if not _is_step(first) and way.count > longest_row(x.dtype, view.graph):
        raise Declined(f"{first.name!r} sorts rows of {way.count} elements, too long for a block of threads")
    before, after = _parts(view, x)
    if before and _is_step(first):
        raise Declined(f"{first.name!r} is one of several steps that sort long rows: they read {x.name!r} from memory")
    shape = first.output.shape
    for found, space, what in ((before, x.shape, "what is sorted"), (after, shape, "what becomes of that")):
        for node in found:
            check_broadcasts(node, space, what)
    for tensor in view.writes:
        if tensor.shape != shape:
            raise Declined(f"{tensor.name!r} {list(tensor.shape)} is needed in memory: it is not all of {list(shape)}")
    check_size(view)


def _parts(view: GroupView, x: Tensor) -> tuple[set[Node], set[Node]]:
    """Returns the pointwise nodes that compute x, and those that compute what is written from what is sorted."""
    return view.before([x], view.of(Kind.SORT)), view.before(view.writes, view.of(Kind.SORT))


class _Builder(ProgramBuilder):
    """The program of a group that sorts: its reductions are the sorted value and the position it comes from."""

    def _apply(self, node: Node) -> Value:
        if node.kind is not Kind.SORT:
            return super()._apply(node)
        x, result = node.inputs[0], node.output
        if not self._reductions:
            value, own = self._value(x), compute_type(x.dtype, self.real)
            self._reductions += [
                Reduction(node.name, MIN, value, own),
                Reduction(node.name, MIN, value, "int32", value),
            ]
        if node.attributes.get("dtype") is None:
            return self._rounded(result, Reduced(0))
        if result.dtype == int32:
            return Reduced(1)
        wanted = result.dtype.compute
        return self._emit(node.name, f"convert<{wanted}>({{0}})", [Reduced(1)], wanted)


def lower(view: GroupView, options: Options, name: str) -> Lowered:
    """Returns the kernel of a group that `accept` takes."""
    node = view.of(Kind.SORT)[0]
    x, way = node.inputs[0], _way(node)
    axis, outer = way.axis, tuple(d for d in range(x.rank) if d != way.axis)
    sizes = tuple(x.shape[d] for d in outer)

    def strides(tensor: Tensor) -> tuple[int, ...]:
        # Along the axis some tensors have the elements that are sorted, others those that are kept.
        own = tensor.shape[axis - x.rank] if tensor.rank >= x.rank - axis else 1
        full = broadcast_strides(tensor, (*x.shape[:axis], own, *x.shape[axis + 1 :]))
        return (*(full[d] for d in outer), full[axis])

    program, reads, writes = _Builder(view, options, strides).build()
    if not program.reductions:  # nothing but the shape of the result was asked for
        kept = node.output.shape[axis]
        return Lowered("pointwise", PointwiseSpec(name, (*sizes, kept), program), reads, writes)
    order = None
    for indices in way.inputs[1:]:
        order = Operand(indices.name, indices.dtype, strides(indices), view.alignment(indices, options))
        reads = (*reads, indices)
    how = (way.count, way.run, way.keep, way.descending)
    return Lowered("sort", SortSpec(name, sizes, x.shape[axis], *how, program, way.merged, order), reads, writes)


LOWERING: FamilyLowering = FamilyLowering(lambda view: view.of(Kind.SORT), accept, lower)
