"""A matmul or convolution with a pointwise DAG on its result -> a `ContractionSpec` (implicit GEMM)."""

from __future__ import annotations

from typing import TypeAlias

from codegen.expr import Operand, compute_type
from codegen.spec import ContractionSpec, Gather, Image, Limit
from fusegraph.graph import Node, Tensor
from fusegraph.lowering.base import GroupView, Lowered, Options, Refusal
from fusegraph.lowering.pointwise import check_size
from fusegraph.lowering.program import ProgramBuilder, StridesOf, broadcast_strides, broadcasts_to
from fusegraph.ops.base import Kind

#: Sizes of the batch, row, column and reduction dimensions.
Space: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
#: A spec with the tensors its program reads and writes.
Built: TypeAlias = tuple[ContractionSpec, tuple[Tensor, ...], tuple[Tensor, ...]]


def accept(view: GroupView, options: Options) -> None:
    """Raises Refusal with the reason unless the group is one contraction with pointwise nodes on its result."""
    anchors = view.contractions
    if len(anchors) > 1:
        first, second = anchors[:2]
        raise Refusal(
            f"{first.op.name} {first.name!r} and {second.op.name} {second.name!r} are two kernels: one anchor each"
        )
    anchor = anchors[0]
    before = _before(view, anchor)
    if before:
        node = min(before, key=view.nodes.index)
        raise Refusal(
            f"{node.op.name} {node.name!r} comes before {anchor.op.name} {anchor.name!r}: "
            "its operands are read as they lie in memory"
        )
    shape = anchor.output.shape
    after = {anchor}
    for node in view.nodes:
        if node is anchor:
            continue
        if node.kind is not Kind.POINTWISE:
            raise Refusal(f"{node.op.name} {node.name!r} is not pointwise")
        if not broadcasts_to(node.output.shape, shape):
            raise Refusal(
                f"{node.name!r} {list(node.output.shape)} does not broadcast to the result of "
                f"{anchor.op.name} {anchor.name!r} {list(shape)}"
            )
        if any(view.graph.producer(t) in after for t in node.inputs):
            after.add(node)
    for tensor in view.writes:
        if view.graph.producer(tensor) not in after:
            raise Refusal(f"{tensor.name!r} is written but does not depend on {anchor.op.name} {anchor.name!r}")
        if tensor.shape != shape:
            raise Refusal(
                f"{tensor.name!r} {list(tensor.shape)} is needed in memory but is smaller than the result {list(shape)}"
            )
    check_size(view)


def _before(view: GroupView, anchor: Node) -> set[Node]:
    """Nodes of the group that the anchor depends on (within it: groups are convex)."""
    found: set[Node] = set()
    stack = [anchor]
    while stack:
        for tensor in stack.pop().inputs:
            producer = view.graph.producer(tensor)
            if producer in view.members and producer not in found:
                found.add(producer)
                stack.append(producer)
    return found


def accumulator(node: Node, real: str) -> str:
    """C type of the sum of products: the floats' compute type, uint32 or uint64 for integers (which wrap around)."""
    common = node.op.operand_dtypes(tuple(t.type for t in node.inputs))[0]
    if common.is_float:
        return compute_type(common, real)
    return "uint64" if "int64" in (common.name, node.output.dtype.name) else "uint32"


def factor(view: GroupView, options: Options, tensor: Tensor) -> Operand:
    """A factor as an operand whose strides are the tensor's own."""
    return Operand(tensor.name, tensor.dtype, tensor.strides, view.alignment(tensor, options))


def lower(view: GroupView, options: Options, name: str) -> Lowered:
    """The implicit GEMM of a group that `accept` takes."""
    anchor = view.contractions[0]
    build = _convolution if anchor.op.name == "conv_fprop" else _matmul
    spec, reads, writes = build(view, options, name, anchor)
    return Lowered("contraction", spec, (anchor.inputs[0], anchor.inputs[1], *reads), writes)


def _finish(
    view: GroupView,
    options: Options,
    name: str,
    anchor: Node,
    space: Space,
    a: Gather,
    b: Gather,
    strides: StridesOf,
) -> Built:
    builder = ProgramBuilder(view, options, strides, anchor)
    program, reads, writes = builder.build()
    batch, rows, cols, inner = space
    spec = ContractionSpec(
        name,
        batch,
        rows,
        cols,
        inner,
        a,
        b,
        accumulator(anchor, builder.real),
        compute_type(anchor.output.dtype, builder.real),
        program,
    )
    return spec, reads, writes


def _matmul(view: GroupView, options: Options, name: str, anchor: Node) -> Built:
    a, b = anchor.inputs
    shape = anchor.output.shape
    batch, m, n, k = shape[:-2], shape[-2], shape[-1], a.shape[-1]
    over_a = broadcast_strides(a, (*batch, m, k))
    over_b = broadcast_strides(b, (*batch, k, n))
    first = factor(view, options, a)
    second = factor(view, options, b)
    rows_a, inner_a, inner_b = over_a[-2], over_a[-1], over_b[-2]
    if not any(over_b[:-2]):
        # One second factor for the whole batch: the batch is more rows of one product.
        space: Space = ((), (*batch, m), (n,), (k,))
        gather_a = Gather(first, (), over_a[:-1], (inner_a,))
        gather_b = Gather(second, (), (over_b[-1],), (inner_b,))
    else:
        space = (batch, (m,), (n,), (k,))
        gather_a = Gather(first, over_a[:-2], (rows_a,), (inner_a,))
        gather_b = Gather(second, over_b[:-2], (over_b[-1],), (inner_b,))
    return _finish(
        view, options, name, anchor, space, gather_a, gather_b, lambda tensor: broadcast_strides(tensor, shape)
    )


def _convolution(view: GroupView, options: Options, name: str, anchor: Node) -> Built:
    x, w = anchor.inputs
    shape = anchor.output.shape
    attributes = anchor.attributes
    groups, rank = attributes["groups"], x.rank - 2
    filters, channels, taps = w.shape[0] // groups, w.shape[1], w.shape[2:]
    stride, dilation, padding = attributes["stride"], attributes["dilation"], attributes["padding"]
    flip = attributes["mode"] == "convolution"
    limits = []
    for d in range(rank):
        before = padding[d][0]
        last = (shape[2 + d] - 1) * stride[d] + (taps[d] - 1) * dilation[d] - before
        if before or last >= x.shape[2 + d]:
            limits.append(Limit(1 + d, stride[d], 1 + d, dilation[d], -before, x.shape[2 + d]))
    steps = x.strides[2:]
    gather_x = Gather(
        factor(view, options, x),
        (channels * x.strides[1],),
        (x.strides[0], *(stride[d] * steps[d] for d in range(rank))),
        (x.strides[1], *(dilation[d] * steps[d] for d in range(rank))),
        -sum(padding[d][0] * steps[d] for d in range(rank)),
        tuple(limits),
        Image(x.shape[2:], steps, stride, dilation, tuple(before for before, _ in padding)),
    )
    along = w.strides[2:]
    gather_w = Gather(
        factor(view, options, w),
        (filters * w.strides[0],),
        (w.strides[0],),
        (w.strides[1], *((-s if flip else s) for s in along)),
        sum((taps[d] - 1) * along[d] for d in range(rank)) if flip else 0,
    )

    def strides(tensor: Tensor) -> tuple[int, ...]:
        n, k, *spatial = broadcast_strides(tensor, shape)
        return (filters * k, n, *spatial, k)

    space = ((groups,), (x.shape[0], *shape[2:]), (filters,), (channels, *taps))
    return _finish(view, options, name, anchor, space, gather_x, gather_w, strides)
