"""Group -> kernel specification, one module for each kernel family."""

from __future__ import annotations

from dataclasses import replace

from codegen.naming import identifier
from fusegraph.lowering import (
    attention,
    attention_backward,
    contraction,
    direct_convolution,
    filter_gradient,
    movement,
    pointwise,
    pool,
    rows,
    scan,
    scatter,
    sort,
    winograd,
)
from fusegraph.lowering.base import FamilyLowering, GroupView, Lowered, Lowering, Options

__all__ = ["FAMILIES", "KERNELS", "GroupView", "Lowered", "Lowering", "Options", "kernel_name"]

#: The families.  A group belongs to the first one whose kernels are about something in it; that takes or declines it.
FAMILIES: tuple[FamilyLowering, ...] = (
    attention.LOWERING,
    attention_backward.LOWERING,
    scatter.LOWERING,
    movement.LOWERING,
    sort.LOWERING,
    scan.LOWERING,
    winograd.LOWERING,
    direct_convolution.LOWERING,
    filter_gradient.LOWERING,
    contraction.LOWERING,
    pool.LOWERING,
    rows.LOWERING,
    pointwise.LOWERING,
)


def kernel_name(view: GroupView) -> str:
    """Returns a kernel's name: the graph's, followed, if that has several kernels, by the last tensor that it writes.

    The ending keeps it apart from the C library's functions, which share the name space of ``extern "C"`` kernels.
    """
    alone = len(view.nodes) == view.graph.node_count
    return identifier(view.graph.name if alone else f"{view.graph.name} {view.writes[-1].name}").rstrip("_") + "_kernel"


class _Kernels:
    """The kernel families as what groups are lowered to."""

    def accept(self, view: GroupView, options: Options) -> None:
        """Raises Declined, whose text is the reason, if no family takes the group as one kernel."""
        _family(view).accept(view, options)

    def lower(self, view: GroupView, options: Options) -> Lowered:
        """Returns the kernel of a group.  Raises Declined if no family takes it."""
        family = _family(view)
        choices = family.accept(view, options)
        lowered = family.lower(view, options, kernel_name(view))
        return replace(lowered, choices=tuple(choices)) if choices else lowered


def _family(view: GroupView) -> FamilyLowering:
    return next(family for family in FAMILIES if family.about(view))


KERNELS: Lowering = _Kernels()
