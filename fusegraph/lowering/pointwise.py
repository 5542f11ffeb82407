"""Pointwise nodes over one space -> a `PointwiseSpec`."""

from __future__ import annotations

from math import prod

from codegen.declined import Declined
from codegen.spec import PointwiseSpec
from fusegraph.graph import Tensor
from fusegraph.lowering.base import MAX_NODES, MAX_OPERANDS, FamilyLowering, GroupView, Lowered, Options, TooLarge
from fusegraph.lowering.program import ProgramBuilder, broadcast_strides, check_broadcasts


def space(view: GroupView) -> tuple[int, ...]:
    """Returns the iteration space: the shape of all written tensors, to which every node's result broadcasts.

    Raises Declined if there is none.
    """
    shape = max((n.output.shape for n in view.nodes), key=lambda s: (len(s), prod(s)))
    for tensor in view.writes:
        if tensor.shape != view.writes[0].shape:
            a, b = sorted((tensor, view.writes[0]), key=lambda t: t.size)
            raise Declined(
                f"they run over different spaces: {a.name!r} {list(a.shape)} is needed in memory, "
                f"as is {b.name!r} {list(b.shape)}"
            )
    for node in view.nodes:
        check_broadcasts(node, shape)
    if view.writes[0].shape != shape:
        raise Declined(f"{view.writes[0].name!r} {list(view.writes[0].shape)} is smaller than the space {list(shape)}")
    return shape


def accept(view: GroupView, options: Options) -> None:
    """Raises Declined with the reason if the nodes cannot be one pointwise kernel."""
    space(view)
    check_size(view)


def check_size(view: GroupView) -> None:
    """Raises Declined if one kernel would hold too much at once."""
    numbers = sum(t.is_constant and t.size == 1 for t in view.reads)  # part of the code
    operands = len(view.reads) - numbers + len(view.writes)
    if operands > MAX_OPERANDS:
        raise TooLarge(f"one kernel would have {operands} tensors in flight, the limit is {MAX_OPERANDS}")
    if len(view.nodes) > MAX_NODES:
        raise TooLarge(f"one kernel would have {len(view.nodes)} nodes, the limit is {MAX_NODES}")


def lower(view: GroupView, options: Options, name: str) -> Lowered:
    """Returns the kernel of a group that `accept` takes."""
    shape = space(view)

    def strides(tensor: Tensor) -> tuple[int, ...]:
        return broadcast_strides(tensor, shape)

    program, reads, writes = ProgramBuilder(view, options, strides).build()
    return Lowered("pointwise", PointwiseSpec(name, shape, program), reads, writes)


LOWERING: FamilyLowering = FamilyLowering(lambda view: view.nodes, accept, lower)
