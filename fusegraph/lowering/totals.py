"""Totals of rows in the kernel of a product of few rows: sums over its reduction, which scale its results.

A norm in front of a product divides each row by a number that all of its elements make (`passes.row_scales`): the
blocks of a product with few rows find that number by themselves, while the weights are on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from codegen.combiners import ADD
from codegen.contraction.totals import MOST_ROWS
from codegen.declined import Declined
from codegen.expr import Operand
from codegen.iteration import collapse
from codegen.sizes import most
from codegen.spec import Gather
from fusegraph.dtypes import float32
from fusegraph.graph import Node, Tensor
from fusegraph.lowering import prologue
from fusegraph.lowering.base import GroupView, Options
from fusegraph.lowering.convolution import Product
from fusegraph.lowering.partials import mode_of
from fusegraph.lowering.program import broadcasts_to
from fusegraph.ops.base import Kind, Role

#: Most bytes of elements that a block reads for them.
MOST_BYTES = 256 << 10


def totals(view: GroupView) -> list[Node]:
    """Returns the nodes of a product's group that add up rows."""
    return [n for n in view.of(Kind.REDUCTION) if n.op.role is not Role.PARTIAL]


def check(view: GroupView, anchor: Node, found: Product | None) -> None:
    """Raises Declined, with the reason, unless the kernel of a group's product can add up its totals."""
    for node in totals(view):
        x, (a, *_) = node.inputs[0], anchor.inputs
        plain = anchor.op.role is Role.MATMUL and "parts" not in anchor.attributes and found is not None
        few = plain and not prod(found.batch) > 1 and most(prod(found.rows)) <= MOST_ROWS  # type: ignore[union-attr]
        along = node.attributes["axes"] == (x.rank - 1,) and x.shape == a.shape
        mode = mode_of(node)
        added = mode.combiner is ADD and mode.before is None and node.attributes["keepdims"]
        if not (added and few and along):
            raise Declined(f"{node.op.name} {node.name!r} is not pointwise")
        if {x.dtype, node.output.dtype, view.graph.compute_dtype} != {float32}:
            raise Declined(f"{node.name!r} adds up {x.dtype.name} to {node.output.dtype.name}: totals are of float32")
        if node.output in view.writes:
            raise Declined(f"{node.output.name!r} is needed in memory as well: a kernel of its own writes it there")
        own = view.before([x])
        for each in own:
            if each.kind is not Kind.POINTWISE or not broadcasts_to(each.output.shape, x.shape):
                raise Declined(f"{each.op.name} {each.name!r} comes before {node.name!r} and is not pointwise")
            if each.output in view.writes:
                raise Declined(f"{each.output.name!r} is needed in memory as well as by {node.name!r}")
        if anchor in own:
            raise Declined(f"{node.name!r} adds up results of {anchor.name!r}")
        read = {t for n in own for t in n.inputs} or {x}
        if sum(t.nbytes for t in read if view.graph.producer(t) not in own) > MOST_BYTES:
            raise Declined(f"{node.name!r} adds up more bytes than every block of {anchor.name!r} should read")


def lower(
    view: GroupView, options: Options, anchor: Node, moved: Callable[[Operand], Product]
) -> tuple[tuple[Gather, ...], list[tuple[Tensor, ...]]]:
    """Returns how the elements of a group's totals are computed, and the tensors that are read.

    ``moved`` returns the product of another operand A.
    """
    gathers: list[Gather] = []
    reads: list[tuple[Tensor, ...]] = []
    a = Operand(anchor.inputs[0].name, float32, anchor.inputs[0].strides)
    sizes = moved(a).rows
    for node in totals(view):
        x = node.inputs[0]
        operand = Operand(x.name, x.dtype, x.strides, view.alignment(x, options))
        gather = replace(moved(replace(a, strides=x.strides)).a, operand=operand)
        read: tuple[Tensor, ...] = (x,)
        if view.before([x]):
            gather, read = prologue.computed(view, options, x, gather, lambda s: moved(replace(a, strides=s)).a)
        batch, outer, inner = gather.steps()
        rows, over = collapse(sizes, outer, range(len(sizes)))
        if len(rows) > 1:
            raise Declined(f"the rows that {node.name!r} adds up are not at equal distances")
        gathers.append(gather.stepped(batch, over, inner))
        reads.append(read)
    return tuple(gathers), reads
