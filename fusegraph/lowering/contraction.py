"""A matmul or convolution with a pointwise DAG on its result -> a `ContractionSpec` (implicit GEMM)."""

from __future__ import annotations

from codegen.expr import Operand, compute_type
from codegen.spec import ContractionSpec, Gather
from fusegraph.graph import Node, Tensor
from fusegraph.lowering import convolution
from fusegraph.lowering.base import GroupView, Lowered, Options, Refusal
from fusegraph.lowering.convolution import Product
from fusegraph.lowering.pointwise import check_size
from fusegraph.lowering.program import ProgramBuilder, broadcast_strides, broadcasts_to
from fusegraph.ops.base import Kind


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


def matmul(node: Node, first: Operand, second: Operand) -> Product:
    """The product of a matmul."""
    a, b = node.inputs
    shape = node.output.shape
    batch, m, n, k = shape[:-2], shape[-2], shape[-1], a.shape[-1]
    over_a = broadcast_strides(a, (*batch, m, k))
    over_b = broadcast_strides(b, (*batch, k, n))
    rows_a, inner_a, inner_b = over_a[-2], over_a[-1], over_b[-2]

    def strides(tensor: Tensor) -> tuple[int, ...]:
        return broadcast_strides(tensor, shape)

    if not any(over_b[:-2]):
        # One second factor for the whole batch: the batch is more rows of one product.
        gather_a = Gather(first, (), over_a[:-1], (inner_a,))
        gather_b = Gather(second, (), (over_b[-1],), (inner_b,))
        return Product((), (*batch, m), (n,), (k,), gather_a, gather_b, strides)
    gather_a = Gather(first, over_a[:-2], (rows_a,), (inner_a,))
    gather_b = Gather(second, over_b[:-2], (over_b[-1],), (inner_b,))
    return Product(batch, (m,), (n,), (k,), gather_a, gather_b, strides)


_PRODUCTS = {
    "matmul": matmul,
    "conv_fprop": convolution.fprop,
    "conv_dgrad": convolution.dgrad,
    "conv_wgrad": convolution.wgrad,
}


def lower(view: GroupView, options: Options, name: str) -> Lowered:
    """The implicit GEMM of a group that `accept` takes."""
    anchor = view.contractions[0]
    first, second = (Operand(t.name, t.dtype, t.strides, view.alignment(t, options)) for t in anchor.inputs)
    product = _PRODUCTS[anchor.op.name](anchor, first, second)
    builder = ProgramBuilder(view, options, product.strides, anchor)
    program, reads, writes = builder.build()
    spec = ContractionSpec(
        name,
        product.batch,
        product.rows,
        product.cols,
        product.inner,
        product.a,
        product.b,
        accumulator(anchor, builder.real),
        compute_type(anchor.output.dtype, builder.real),
        program,
        anchor.attributes["compute_dtype"] == "tf32",
        product.terms,
        product.results,
    )
    return Lowered("contraction", spec, (*anchor.inputs, *reads), writes)
