"""Group -> kernel specification, one module a kernel family."""

from __future__ import annotations

from codegen.declined import Declined
from codegen.naming import identifier
from fusegraph.lowering import (
    attention,
    attention_backward,
    contraction,
    movement,
    pointwise,
    pool,
    rows,
    scan,
    scatter,
    sort,
    window,
    winograd,
)
from fusegraph.lowering.base import GroupView, Lowered, Lowering, Options
from fusegraph.ops.base import Kind
from fusegraph.ops.partial import PARTIAL

__all__ = ["KERNELS", "GroupView", "Lowered", "Lowering", "Options", "accept", "kernel_name", "lower"]


def kernel_name(view: GroupView) -> str:
    """A kernel's name: the graph's, and where the graph needs several kernels that of the last tensor it writes.

    The ending keeps it apart from the C library's functions, which share the name space of ``extern "C"`` kernels.
    """
    alone = len(view.nodes) == len(view.graph.network)
    return identifier(view.graph.name if alone else f"{view.graph.name} {view.writes[-1].name}").rstrip("_") + "_kernel"


def accept(view: GroupView, options: Options) -> None:
    """Raises Declined, whose text is the reason, if no family takes the group as one kernel."""
    if attention.attentions(view):
        attention.accept(view, options)
        return
    if attention_backward.gradients(view):
        attention_backward.accept(view, options)
        return
    if scatter.scatters(view):
        scatter.accept(view, options)
        return
    anchors = [*view.anchors, *pool.pools(view), *rows.reductions(view), *scan.scans(view), *sort.sorts(view)]
    moved = next(iter(view.of(Kind.MOVEMENT)), None)
    if moved is not None and anchors:
        raise Declined(
            f"{moved.op.name} {moved.name!r} and {anchors[0].op.name} {anchors[0].name!r} are not one kernel: "
            "elements are moved by kernels of pointwise ops, or read where they lie"
        )
    if moved is not None:
        movement.accept(view, options)
    elif sort.sorts(view):
        sort.accept(view, options)
    elif scan.scans(view):
        scan.accept(view, options)
    elif view.anchors:
        contraction.accept(view, options)
        first, *others = view.anchors
        halves = [n for n in view.nodes if n.op is PARTIAL]
        if halves and window.suits(first, view.graph) is None:
            raise Declined(f"{first.name!r} is a direct convolution: its results are not reduced in parts")
        if others and window.suits(first, view.graph) is None:
            raise Declined(f"{first.name!r} and {others[0].name!r} have few channels: two direct convolutions")
        window.accept(view)
    elif pool.pools(view):
        pool.accept(view, options)
    elif rows.reductions(view):
        rows.accept(view, options)
    else:
        pointwise.accept(view, options)


def lower(view: GroupView, options: Options) -> Lowered:
    """The kernel of a group.  Raises Declined if no family takes it."""
    accept(view, options)
    name = kernel_name(view)
    if attention.attentions(view):
        return attention.lower(view, options, name)
    if attention_backward.gradients(view):
        return attention_backward.lower(view, options, name)
    if scatter.scatters(view):
        return scatter.lower(view, options, name)
    if movement.moves(view):
        return movement.lower(view, options, name)
    if sort.sorts(view):
        return sort.lower(view, options, name)
    if scan.scans(view):
        return scan.lower(view, options, name)
    if not view.anchors and pool.pools(view):
        return pool.lower(view, options, name)
    if not view.anchors and rows.reductions(view):
        return rows.lower(view, options, name)
    if not view.anchors:
        return pointwise.lower(view, options, name)
    if view.anchors[0].kind is Kind.TRANSFORM:
        return winograd.lower(view, options, name)
    if window.suits(view.contractions[0], view.graph) is None:
        return window.lower(view, options, name)
    return contraction.lower(view, options, name)


class _Kernels:
    """The kernel families as a target of fusion."""

    def accept(self, view: GroupView, options: Options) -> None:
        accept(view, options)

    def lower(self, view: GroupView, options: Options) -> Lowered:
        return lower(view, options)


KERNELS: Lowering = _Kernels()
