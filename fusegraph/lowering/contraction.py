"""Matmuls or convolutions with a pointwise DAG on their results -> a `ContractionSpec` (implicit GEMM)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from codegen.expr import Operand, compute_type
from codegen.spec import ContractionSpec, Gather
from fusegraph.graph import Node, Tensor
from fusegraph.lowering import convolution
from fusegraph.lowering.base import GroupView, Lowered, Options, Refusal
from fusegraph.lowering.convolution import Product
from fusegraph.lowering.pointwise import check_size
from fusegraph.lowering.program import ProgramBuilder, broadcast_strides, broadcasts_to
from fusegraph.ops.base import Kind

#: Most products of one kernel, by the C type of their sums, which lie in registers.
MOST_PRODUCTS = {"float": 4, "uint32": 4, "double": 3, "uint64": 3}


def accept(view: GroupView, options: Options) -> None:
    """Raises Refusal with the reason unless the group is one contraction with pointwise nodes on its result, or some
    that share their first factor and meet in a pointwise node.
    """
    anchors = view.anchors
    anchor = anchors[0]
    _check_products(view, anchors)
    before = {node for each in anchors for node in _before(view, each)}
    if before:
        node = min(before, key=view.nodes.index)
        raise Refusal(
            f"{node.op.name} {node.name!r} comes before {anchor.op.name} {anchor.name!r}: "
            "its operands are read as they lie in memory"
        )
    shape = anchor.output.shape
    after = set(anchors)
    for node in view.nodes:
        if node in anchors:
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


def _check_products(view: GroupView, anchors: Sequence[Node]) -> None:
    """Raises Refusal unless contractions can share their first factor's tiles and the kernel of a result."""
    first = anchors[0]
    for other in anchors[1:]:
        both = f"{first.op.name} {first.name!r} and {other.op.name} {other.name!r}"
        alone = first.kind is Kind.TRANSFORM or first.op is not other.op
        if alone or first.inputs[0] is not other.inputs[0] or first in _before(view, other):
            raise Refusal(f"{both} are two kernels: one anchor each")
        a, b = first.inputs[1], other.inputs[1]
        alike = (a.shape, a.strides, a.dtype) == (b.shape, b.strides, b.dtype)
        if not alike or first.output.dtype != other.output.dtype or first.attributes != other.attributes:
            raise Refusal(
                f"{both} share {first.inputs[0].name!r}, but {a.name!r} {list(a.shape)} and {b.name!r} "
                f"{list(b.shape)} differ in shape, strides, dtype or in what is done with them"
            )
    most = MOST_PRODUCTS[accumulator(first, compute_type(view.graph.compute_dtype))]
    if len(anchors) > most:
        raise Refusal(f"{len(anchors)} products of {first.inputs[0].name!r}: one kernel makes at most {most}")
    # Without a node that takes them both, two products are as well off as two kernels.
    together: list[set[Node]] = [{anchor} for anchor in anchors]
    for node in view.nodes:
        if len(found := set(anchors) & _before(view, node)) > 1:
            meeting = [part for part in together if part & found]
            together = [part for part in together if not part & found] + [set().union(*meeting)]
    if len(together) > 1:
        one, two = (min(part, key=anchors.index) for part in together[:2])
        raise Refusal(f"{one.name!r} and {two.name!r} share {first.inputs[0].name!r}, but their results do not meet")


def _before(view: GroupView, node: Node) -> set[Node]:
    """Nodes of the group that a node depends on (within it: groups are convex)."""
    found: set[Node] = set()
    stack = [node]
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
    anchors = view.contractions
    anchor, factors = anchors[0], (anchors[0].inputs[0], *(node.inputs[1] for node in anchors))
    first, second, *others = (Operand(t.name, t.dtype, t.strides, view.alignment(t, options)) for t in factors)
    least = min(op.alignment for op in (second, *others))
    second = replace(second, alignment=least)
    product = _PRODUCTS[anchor.op.name](anchor, first, second)
    builder = ProgramBuilder(view, options, product.strides, *anchors)
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
        tuple(replace(op, alignment=least) for op in others),
    )
    return Lowered("contraction", spec, (*factors, *reads), writes)
