"""A running sum and pointwise nodes around it -> a `ScanSpec`."""

from __future__ import annotations

from codegen.declined import Declined
from codegen.expr import Reduced, Reduction, Value, compute_type
from codegen.scan import ScanSpec
from codegen.spec import PointwiseSpec
from fusegraph.graph import Node, Tensor
from fusegraph.lowering.base import FamilyLowering, GroupView, Lowered, Options
from fusegraph.lowering.pointwise import check_size
from fusegraph.lowering.program import ProgramBuilder, broadcast_strides, check_broadcasts
from fusegraph.ops.base import Kind
from fusegraph.ops.modes import accumulator


def accept(view: GroupView, options: Options) -> None:
    """Raises Declined with the reason unless the group is one running sum and pointwise nodes over its space."""
    first, *others = view.of(Kind.SCAN)
    if others:
        raise Declined(f"{first.op.name} {first.name!r} and {others[0].op.name} {others[0].name!r} are two kernels")
    shape = first.output.shape
    for node in view.nodes:
        if node.kind not in (Kind.POINTWISE, Kind.SCAN):
            raise Declined(f"{node.op.name} {node.name!r} and {first.op.name} {first.name!r} are two kernels")
        check_broadcasts(node, shape)
    for tensor in view.writes:
        if tensor.shape != shape:
            raise Declined(f"{tensor.name!r} {list(tensor.shape)} is needed in memory: it is not all of {list(shape)}")
    check_size(view)


class _Builder(ProgramBuilder):
    """The program of a group with a running sum."""

    def _apply(self, node: Node) -> Value:
        if node.kind is not Kind.SCAN:
            return super()._apply(node)
        source, result = node.inputs[0], node.output
        value, wanted = self._value(source), compute_type(result.dtype, self.real)
        own, combiner = compute_type(source.dtype, self.real), node.op.combiner
        assert combiner is not None
        total = compute_type(accumulator(combiner, source.dtype, result.dtype), self.real)
        value = self._typed(source.name, value, own, total)
        self._reductions.append(Reduction(node.name, combiner, value, total))
        found = Reduced(len(self._reductions) - 1)
        return self._rounded(result, self._typed(node.name, found, total, wanted))


def lower(view: GroupView, options: Options, name: str) -> Lowered:
    """Returns the kernel of a group that `accept` takes."""
    (node,) = view.of(Kind.SCAN)
    shape, axis = node.output.shape, node.attributes["axis"]
    outer = tuple(d for d in range(len(shape)) if d != axis)

    def strides(tensor: Tensor) -> tuple[int, ...]:
        full = broadcast_strides(tensor, shape)
        return (*(full[d] for d in outer), full[axis])

    program, reads, writes = _Builder(view, options, strides).build()
    if not program.reductions:  # nothing but the shape of the sum was asked for
        space = (*(shape[d] for d in outer), shape[axis])
        return Lowered("pointwise", PointwiseSpec(name, space, program), reads, writes)
    sizes, reverse = tuple(shape[d] for d in outer), node.attributes["reverse"]
    return Lowered("scan", ScanSpec(name, sizes, shape[axis], program, reverse), reads, writes)


LOWERING: FamilyLowering = FamilyLowering(lambda view: view.of(Kind.SCAN), accept, lower)
