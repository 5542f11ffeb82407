"""Reductions of parts of a contraction's results: which ones its kernel can make, and where it stores them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod

from codegen.declined import Declined
from codegen.expr import Reduced, Reduction, Store
from codegen.spec import Partial
from fusegraph.graph import Node, Tensor
from fusegraph.lowering.base import GroupView
from fusegraph.lowering.convolution import Product
from fusegraph.ops.base import Role
from fusegraph.ops.modes import COMBINED, PARTS, Combined

#: Most reductions of parts in one kernel; most products beside them, by the C type of their sums.
MOST_PARTIALS = 4
MOST_REDUCED = {"float": 2, "uint32": 2, "double": 1, "uint64": 1}
#: Rows of a part, and the most columns of one.
ROWS, COLS = 64, 32


def mode_of(node: Node) -> Combined:
    """Returns the mode of a reduction, or of the parts of one."""
    return {**COMBINED, **PARTS}[node.attributes["mode"]]


def steps(node: Node) -> tuple[int, tuple[int, ...]]:
    """Returns the strides of a reduction of parts: from part to part, and over the dimensions of what is reduced."""
    axes, keepdims = node.attributes["axes"], node.attributes["keepdims"]
    there = [d for d in range(node.inputs[0].rank) if keepdims or d == min(axes) or d not in axes]
    over = dict(zip(there, node.output.strides))
    return over[min(axes)], tuple(0 if d in axes else over[d] for d in range(node.inputs[0].rank))


def parts(product: Product, anchor: Node, axes: Sequence[int]) -> tuple[tuple[int, ...], int] | None:
    """Returns how the kernel of a contraction can reduce its result, or what is as large, along axes.

    That is (those of the axes along which it reduces parts, the elements of a part); None if it cannot.  All the rows
    or all the columns of its tiles are reduced, or the last dimensions of the rows, if chunks of rows do not reach past
    them.
    """
    shape = anchor.output.shape
    if product.results or not anchor.output.size:
        return None
    nb, last = len(product.batch), len(product.batch) + len(product.rows)
    space = (*product.batch, *product.rows, *product.cols)
    rows: list[int] = []
    cols: list[int] = []
    single = [d for d in axes if shape[d] == 1]
    for d in axes:
        found = {k for k, (size, step) in enumerate(zip(space, _along(product, anchor, [d]))) if size > 1 and step}
        if found and min(found) >= last:
            cols.append(d)
        elif found and nb <= min(found) and max(found) < last:
            rows.append(d)
    if rows:
        length = prod(shape[d] for d in rows)
        kept = _kept_rows(product, anchor, rows)
        return None if kept is None or (kept and length % ROWS) else (tuple(sorted(rows + single)), ROWS)
    if cols and prod(shape[d] for d in cols) == prod(product.cols):
        return tuple(sorted(cols + single)), min(COLS, max(16, 1 << (prod(product.cols) - 1).bit_length()))
    return None


def _along(product: Product, anchor: Node, axes: Sequence[int]) -> tuple[int, ...]:
    """Returns strides over the product's space that are not 0 just where one of some axes of the result steps."""
    result = anchor.output
    unit = tuple(int(d in axes) for d in range(result.rank))
    return product.strides(Tensor(result.graph, result.name, result.shape, unit, result.dtype))


def _kept_rows(product: Product, anchor: Node, axes: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the sizes of the row dimensions that stay if axes are reduced; None if one follows a reduced one."""
    nb = len(product.batch)
    reduced = [bool(step) for step in _along(product, anchor, axes)[nb : nb + len(product.rows)]]
    sizes = [(size, gone) for size, gone in zip(product.rows, reduced) if size > 1]
    first = next((k for k, (_, gone) in enumerate(sizes) if gone), len(sizes))
    if not all(gone for _, gone in sizes[first:]):
        return None
    return tuple(size for size, _ in sizes[:first])


def check(view: GroupView, node: Node, product: Product | None, total: str, after: Collection[Node]) -> None:
    """Raises Declined unless a reduction of parts can be made of results as they come.

    product is that of the group's contractions, None if they are none; total is the C type of its sums, and ``after``
    are nodes that follow from them.
    """
    anchors = view.anchors
    anchor = anchors[0]
    for other in view.nodes:
        if node.output in other.inputs:
            raise Declined(f"{other.name!r} needs all parts of {node.name!r}, which several blocks make")
    if product is None:
        raise Declined(f"{node.name!r} would be made of the results of {anchor.op.name} {anchor.name!r}")
    if len(anchors) > (most := MOST_REDUCED[total]):
        raise Declined(f"{node.name!r} is reduced with the results of {len(anchors)} products: of at most {most}")
    if sum(n.op.role is Role.PARTIAL for n in view.nodes) > MOST_PARTIALS:
        raise Declined(f"{node.name!r} is one more than the {MOST_PARTIALS} reductions that one kernel makes parts of")
    (x,) = node.inputs
    of = f"{anchor.op.name} {anchor.name!r} {list(anchor.output.shape)}"
    if x.shape != anchor.output.shape or view.graph.producer(x) not in after:
        raise Declined(f"{node.name!r} reduces {x.name!r} {list(x.shape)}, which does not follow from {of}")
    if mode_of(node).looks_twice:
        raise Declined(f"{node.name!r} looks at each part twice ({node.attributes['mode']})")
    if parts(product, anchor, node.attributes["axes"]) != (node.attributes["axes"], node.attributes["chunk"]):
        raise Declined(
            f"{node.name!r} reduces {node.attributes['chunk']} elements along {list(node.attributes['axes'])}: "
            f"not what lies in one tile of {of}"
        )


def partial(node: Node, store: Store, product: Product, reductions: Sequence[Reduction]) -> Partial:
    """Returns where the parts of a reduction that `check` takes are stored."""
    assert isinstance(store.value, Reduced)
    x, axes, chunk = node.inputs[0], node.attributes["axes"], node.attributes["chunk"]
    part, strides = steps(node)
    nb, last = len(product.batch), len(product.batch) + len(product.rows)
    over = product.strides(Tensor(x.graph, x.name, x.shape, strides, x.dtype))
    reduced = product.strides(Tensor(x.graph, x.name, x.shape, tuple(int(d in axes) for d in range(x.rank)), x.dtype))
    rows = any(reduced[nb:last])
    if rows:
        whole = [(size, step) for size, step, gone in zip(product.rows, over[nb:last], reduced[nb:last]) if not gone]
        length = prod(x.shape[d] for d in axes)
        places = (*(size for size, _ in whole), -(-length // chunk))
        operand = replace(store.operand, strides=(*over[:nb], *(step for _, step in whole), part, *over[last:]))
    else:
        places, operand = product.rows, replace(store.operand, strides=(*over[:last], part))
    return Partial(reductions[store.value.reduction], rows, chunk, places, operand)
