"""Matmuls or convolutions with pointwise DAGs on their results and operands -> a `ContractionSpec` (implicit GEMM)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import prod

from codegen import best_schedule
from codegen.canonical import canonical
from codegen.contraction import FAMILY
from codegen.contraction.merge import exchanged
from codegen.declined import Declined
from codegen.expr import Operand, compute_type
from codegen.spec import ContractionSpec, Gather, Limit, Strides
from fusegraph.graph import Node, Tensor
from fusegraph.lowering import convolution, partials, prologue, totals
from fusegraph.lowering.base import FamilyLowering, GroupView, Lowered, Options
from fusegraph.lowering.choices import Choice, speculate
from fusegraph.lowering.convolution import Product
from fusegraph.lowering.divided import Divided, divided
from fusegraph.lowering.pointwise import check_size
from fusegraph.lowering.precision import in_parts, weighed
from fusegraph.lowering.program import broadcast_strides, broadcasts_to, describe
from fusegraph.lowering.rows import RowsBuilder
from fusegraph.lowering.views import strides_over
from fusegraph.ops.base import Kind, Role
from fusegraph.ops.contraction import FAST_FP8, TF32
from fusegraph.ops.parts import part_length

#: What is chosen: products that share operand A, and whose results meet, are one kernel.
NAME = "products of one operand"
#: Up to so many rows fit one tile: nothing is computed repeatedly whichever side it is on, and estimates decide.
FEW_ROWS = 64
#: Most products of one kernel, by the C type of their sums, which lie in registers.
MOST_PRODUCTS = {
    "float": 4,
    "uint32": 4,
    "double": 3,
    "uint64": 3,
}


def accept(view: GroupView, options: Options) -> list[Choice]:
    """Raises Declined with the reason unless the group is one contraction, or a transform, with pointwise nodes.

    The pointwise nodes are on its result and in front of it.  There may be several contractions that share operand A
    and meet in a pointwise node, and reductions of parts of what follows.  Returns choices of products and prologues.
    """
    anchors = view.anchors
    anchor = anchors[0]
    choices = _check_products(view, anchors, options)
    _check_sparse(view, anchors)
    shape = anchor.output.shape
    scaled = totals.totals(view)
    behind = prologue.behind(view, [*anchors, *scaled])
    found = product(anchor) if anchor.op.role in _PRODUCTS and "parts" not in anchor.attributes else None
    totals.check(view, anchor, found)
    after = set(anchors)
    for node in view.nodes:
        if node in anchors:
            continue
        if node.op.role is Role.PARTIAL:
            total = accumulator(anchor, compute_type(view.graph.compute_dtype)) if found is not None else ""
            partials.check(view, node, found, total, after)
            continue
        if node in scaled or (node.kind is Kind.MOVEMENT and node not in behind):
            continue
        if node.kind is not Kind.POINTWISE:
            raise Declined(f"{node.op.name} {node.name!r} is not pointwise")
        if node in behind and not broadcasts_to(node.output.shape, shape):
            raise Declined(
                f"{node.name!r} {list(node.output.shape)} does not broadcast to the result of "
                f"{anchor.op.name} {anchor.name!r} {list(shape)}"
            )
        if any(view.graph.producer(t) in after for t in node.inputs):
            after.add(node)
    choices += prologue.accept(view, options, anchors, product)
    split = divided(view, options, anchor, partial(_whole, anchor))
    if split is not None and any(n.op.role is Role.PARTIAL for n in view.nodes):
        raise Declined(f"the operands of {anchor.name!r} are computed over split dimensions: no parts are reduced")
    for tensor in view.writes:
        producer = view.graph.producer(tensor)
        if producer is not None and producer.op.role is Role.PARTIAL:
            continue
        if producer not in after:
            raise Declined(f"{tensor.name!r} is written but does not depend on {anchor.op.name} {anchor.name!r}")
        if tensor.shape != shape:
            raise Declined(
                f"{tensor.name!r} {list(tensor.shape)} is needed in memory but is smaller than the result {list(shape)}"
            )
    whole = [t for t in (*view.writes, *view.reads) if t.shape == shape and t not in anchor.inputs]
    if not convolution.turned_behind(anchor, anchor.output, options.target.planned):
        for tensor in whole:
            if convolution.turned_behind(anchor, tensor, options.target.planned):
                raise Declined(f"{anchor.name!r} has neighbours in other tiles: another kernel turns {tensor.name!r}")
    check_size(view)
    if scaled or any(view.before([a.inputs[1]]) for a in anchors[1:]):
        try:
            best_schedule(_spec(options, view), options.target.planned)
        except Declined as reason:
            one, two = [*anchors, *scaled][:2]
            raise Declined(f"{one.name!r} and {two.name!r} are two kernels: {reason}") from None
    products = [choice for a in anchors if a.op.role in _PRODUCTS for choice in weighed(a, options)]
    confirmed = partial(prologue.confirmed, view, options)
    spec = partial(_spec, options)
    return [*products, *(c if c.what == NAME else confirmed(c, spec) for c in choices)]


def _spec(options: Options, view: GroupView) -> ContractionSpec:
    spec: ContractionSpec = lower(view, options, "estimated").spec
    return spec


def accept_alone(what: str, view: GroupView, options: Options) -> None:
    """Raises Declined with the reason unless the group is one ``what``, a sum over few channels whose operands are read
    as they lie in memory, with pointwise nodes on its result.
    """
    accept(view, options)
    anchor, *others = view.anchors
    if any(n.op.role is Role.PARTIAL for n in view.nodes):
        raise Declined(f"{anchor.name!r} is a {what}: its results are not reduced in parts")
    if others:
        raise Declined(f"{anchor.name!r} and {others[0].name!r} have few channels: two {what}s")
    if view.before(anchor.inputs):
        raise Declined(
            f"{anchor.op.name} {anchor.name!r} has so few channels that it is a {what}: its operands are read as they "
            "lie in memory"
        )


def _check_products(view: GroupView, anchors: Sequence[Node], options: Options) -> list[Choice]:
    """Raises Declined unless contractions can share operand A's tiles, and their results one kernel.

    Returns the choice that they do, if there are several.
    """
    first = anchors[0]
    for other in anchors[1:]:
        both = f"{first.op.name} {first.name!r} and {other.op.name} {other.name!r}"
        alone = first.kind is Kind.TRANSFORM or first.op is not other.op
        if alone or first.inputs[0] is not other.inputs[0] or first in view.before(other.inputs):
            raise Declined(f"{both} are two kernels: one anchor each")
        a, b = first.inputs[1], other.inputs[1]
        alike = (a.shape, a.strides, a.dtype) == (b.shape, b.strides, b.dtype)
        if not alike or first.output.dtype != other.output.dtype or first.attributes != other.attributes:
            raise Declined(
                f"{both} share {first.inputs[0].name!r}, but {a.name!r} {list(a.shape)} and {b.name!r} "
                f"{list(b.shape)} differ in shape, strides, dtype or in what is done with them"
            )
    most = MOST_PRODUCTS[accumulator(first, compute_type(view.graph.compute_dtype))]
    if len(anchors) > most:
        raise Declined(f"{len(anchors)} products of {first.inputs[0].name!r}: one kernel makes at most {most}")
    if len(anchors) == 1:
        return []
    # Without a node that takes them both, two products are as well off as two kernels.
    together: list[set[Node]] = [{anchor} for anchor in anchors]
    for node in view.nodes:
        if len(found := set(anchors) & view.before(node.inputs)) > 1:
            meeting = [part for part in together if part & found]
            together = [part for part in together if not part & found] + [set().union(*meeting)]
    if len(together) > 1:
        one, two = (min(part, key=anchors.index) for part in together[:2])
        raise Declined(f"{one.name!r} and {two.name!r} share {first.inputs[0].name!r}, but their results do not meet")
    choices: list[Choice] = []
    speculate(NAME, first.name, options.settled, choices, f"{first.op.name} {[t.type for t in first.inputs]}")
    return choices


def _check_sparse(view: GroupView, anchors: Sequence[Node]) -> None:
    """Raises Declined for what is not fused with a product of which an operand is half stored."""
    anchor = next((n for n in anchors if n.op.role is Role.SPARSE_MATMUL), None)
    if anchor is None:
        return
    if len(anchors) > 1:
        raise Declined(f"{anchor.name!r} is on sparse tensor cores: one product a kernel")
    if view.before(anchor.inputs):
        raise Declined(f"{anchor.name!r} is on sparse tensor cores, which read operands as they lie in memory")
    if any(n.op.role is Role.PARTIAL for n in view.nodes):
        raise Declined(f"{anchor.name!r} is on sparse tensor cores: its results are not reduced in parts")


def accumulator(node: Node, real: str) -> str:
    """Returns the C type of the sum of products: the floats' compute type, or uint32 or uint64, which wrap around."""
    common = node.op.operand_dtypes(tuple(t.type for t in node.inputs))[0]
    if common.is_float:
        return compute_type(common, real)
    return "uint64" if 64 in (common.bits, node.output.dtype.bits) else "uint32"


def matmul(node: Node, first: Operand, second: Operand) -> Product:
    """Returns the product of a matmul."""
    a, b = node.inputs
    shape = node.output.shape
    batch, m, n, k = shape[:-2], shape[-2], shape[-1], a.shape[-1]
    over_a = strides_over(a.shape, first.strides, (*batch, m, k))
    over_b = strides_over(b.shape, second.strides, (*batch, k, n))
    rows_a, inner_a, inner_b = over_a[-2], over_a[-1], over_b[-2]

    def strides(tensor: Tensor) -> tuple[int, ...]:
        return broadcast_strides(tensor, shape)

    if not any(broadcast_strides(b, (*batch, k, n))[:-2]):
        # One operand B for the whole batch: the batch is more rows of one product.
        gather_a = Gather(first, (), over_a[:-1], (inner_a,))
        gather_b = Gather(second, (), (over_b[-1],), (inner_b,))
        return Product((), (*batch, m), (n,), (k,), gather_a, gather_b, strides)
    gather_a = Gather(first, over_a[:-2], (rows_a,), (inner_a,))
    gather_b = Gather(second, over_b[:-2], (over_b[-1],), (inner_b,))
    return Product(batch, (m,), (n,), (k,), gather_a, gather_b, strides)


def sparse_matmul(node: Node, first: Operand, second: Operand) -> Product:
    """Returns the product of a matrix of which half is stored, whose rows may be columns of the result."""
    values, x, _ = node.inputs
    *lead, terms = x.shape

    def strides(tensor: Tensor) -> tuple[int, ...]:
        found = broadcast_strides(tensor, node.output.shape)
        return found if node.attributes["first"] else (*found[-1:], *found[:-1])

    a = Gather(first, (), first.strides[:1], first.strides[1:])
    b = Gather(second, (), second.strides[:-1], second.strides[-1:])
    return Product((), values.shape[:1], tuple(lead), (terms,), a, b, strides)


_PRODUCTS: dict[Role | None, Callable[[Node, Operand, Operand], Product]] = {
    Role.MATMUL: matmul,
    Role.SPARSE_MATMUL: sparse_matmul,
    Role.FPROP: convolution.fprop,
    Role.DGRAD: convolution.dgrad,
    Role.WGRAD: convolution.wgrad,
}


def product(anchor: Node, first: Operand | None = None, second: Operand | None = None) -> Product:
    """Returns the product that a contraction is, of its operands as they lie in memory or of other operands.

    For a contraction in parts (`ops.parts`) it is the product of a part, the parts being its first batch dimension.
    """
    a, b = (Operand(t.name, t.dtype, t.strides) for t in anchor.inputs[:2])
    whole = _whole(anchor, first or a, second or b)
    if "parts" not in anchor.attributes:
        return whole
    count = anchor.attributes["parts"]
    size, *others = whole.inner
    each = part_length(size, count)
    end = Limit((each, *(0 for _ in whole.batch)), (), (1, *(0 for _ in others)), 0, size)
    ends = (end,) if size % count else ()  # the last part has less

    def limited(limits: Iterable[Limit]) -> tuple[Limit, ...]:
        return tuple(replace(x, batch=(each * x.inner[0] if x.inner else 0, *x.batch)) for x in limits)

    def gathered(gather: Gather) -> Gather:
        image = gather.image and replace(gather.image, shifts=tuple((0, *x) for x in gather.image.shifts))
        batch = (each * gather.inner[0], *gather.batch)
        return replace(gather, batch=batch, limits=limited(gather.limits), image=image)

    def strides(tensor: Tensor) -> tuple[int, ...]:
        return (tensor.strides[0], *whole.strides(_part(tensor)))

    return Product(
        (count, *whole.batch),
        whole.rows,
        whole.cols,
        (each, *others),
        gathered(whole.a),
        gathered(whole.b),
        strides,
        (*limited(whole.terms), *ends),
        limited(whole.results),
    )


def _whole(anchor: Node, first: Operand, second: Operand) -> Product:
    """Returns the product of which a contraction makes the sum, or parts of it."""
    output = _part(anchor.output) if "parts" in anchor.attributes else anchor.output
    return _PRODUCTS[anchor.op.role](Node(anchor.op, anchor.inputs, anchor.attributes, output), first, second)


def _part(tensor: Tensor) -> Tensor:
    """Returns one part of a tensor of parts."""
    return Tensor(tensor.graph, tensor.name, tensor.shape[1:], tensor.strides[1:], tensor.dtype)


def lower(view: GroupView, options: Options, name: str) -> Lowered:
    """Returns the implicit GEMM of a group that `accept` takes."""
    anchors = view.contractions
    anchor, *more = anchors
    a, b = (Operand(t.name, t.dtype, t.strides, view.alignment(t, options)) for t in anchor.inputs[:2])
    whole = divided(view, options, anchor, partial(_whole, anchor))
    found = product(anchor, a, b) if whole is None else whole.product(_whole(anchor, a, b), _part)
    first, read = _operand(view, options, anchor, 0, found, whole)
    seconds = [_operand(view, options, node, 1, found, whole if node is anchor else None) for node in anchors]
    least = [min(op.alignment for op in each) for each in zip(*(gather.operands for gather, _ in seconds))]
    second, *further = [_aligned(gather, least) for gather, _ in seconds]
    for node, gather in zip(more, further):
        if repr(canonical(gather)) != repr(canonical(second)):
            raise Declined(f"{anchor.inputs[1].name!r} and {node.inputs[1].name!r} are computed in different ways")
    operands = [first, second]
    others = [op for gather in further for op in gather.operands]
    reads = [read, *(tensors for _, tensors in seconds), anchor.inputs[2:]]
    words = [Operand(t.name, t.dtype, t.strides, view.alignment(t, options)) for t in anchor.inputs[2:]]
    halves = {node.output: node for node in view.nodes if node.op.role is Role.PARTIAL}
    scaled = totals.totals(view)
    gathers, added = totals.lower(view, options, anchor, lambda op: product(anchor, op, b)) if scaled else ((), [])
    own_view = prologue.epilogue_view(view, [*anchors, *scaled])
    builder = RowsBuilder(own_view, options, lambda t: () if t in halves else found.strides(t), *anchors, *scaled)
    program, own, writes = builder.build()
    parts = [
        partials.partial(halves[tensor], store, found, program.reductions)
        for tensor, store in zip(writes, program.stores)
        if tensor in halves
    ]
    stores = tuple(store for tensor, store in zip(writes, program.stores) if tensor not in halves)
    program = replace(program, stores=stores, reductions=tuple(x.reduction for x in parts))
    # One kernel has one kind of arithmetic: approximate if neither operands nor results could show it.
    exact = program.exact or bool(parts) or any(f.program is not None and not f.program.approximate for f in operands)
    spec = ContractionSpec(
        name,
        found.batch,
        found.rows,
        found.cols,
        found.inner,
        operands[0],
        operands[1],
        accumulator(anchor, builder.real),
        compute_type(anchor.output.dtype, builder.real),
        replace(program, exact=exact, notes=tuple(describe(n) for n in view.nodes)),
        tf32=anchor.attributes["compute_dtype"] == TF32,
        bf16x6=in_parts(anchor, options),
        fast_fp8=anchor.attributes["compute_dtype"] == FAST_FP8,
        factored=_factored(anchor, operands, options),
        terms=found.terms,
        results=found.results,
        others=tuple(others),
        totals=gathers,
        partials=tuple(parts),
        metadata=words[0] if words else None,
    )
    writes = (*(t for t in writes if t not in halves), *(t for t in writes if t in halves))
    if not parts and _converted(anchor, operands, 1) and not _converted(anchor, operands, 0):
        # Tiles have more columns than rows: what is computed repeatedly had better be the rows.
        turned, few, target = exchanged(spec), prod(found.rows) <= FEW_ROWS, options.target.planned
        if turned is not None and (not few or FAMILY.cycles(turned, target) < FAMILY.cycles(spec, target)):
            spec, reads[:2] = turned, reads[1::-1]
    reads += added
    return Lowered("contraction", spec, (*(t for each in reads for t in each), *own), writes)


def _operand(
    view: GroupView, options: Options, anchor: Node, number: int, found: Product, whole: Divided | None
) -> tuple[Gather, tuple[Tensor, ...]]:
    """Returns how an operand of a contraction is read, or computed, and the tensors that are read.

    ``found`` is the product as its operands would be read, over dimensions that ``whole`` has split.
    """
    tensor = anchor.inputs[number]
    plain = (found.a, found.b)[number]
    plain = replace(plain, operand=Operand(tensor.name, tensor.dtype, tensor.strides, view.alignment(tensor, options)))
    if not prologue.before(view, tensor):
        return plain, (tensor,)
    a, b = (Operand(t.name, t.dtype, t.strides) for t in anchor.inputs[:2])
    whole = whole or divided(view, options, anchor, partial(_whole, anchor))
    if whole is not None:
        return whole.computed(number, plain, _whole(anchor, a, b))

    def gather_of(strides: Strides) -> Gather:
        moved = product(anchor, *(replace(op, strides=strides) if k == number else op for k, op in enumerate((a, b))))
        return (moved.a, moved.b)[number]

    return prologue.computed(view, options, tensor, plain, gather_of)


def _aligned(gather: Gather, least: Sequence[int]) -> Gather:
    """Returns an operand whose tensors are aligned as little as these."""
    operands = tuple(replace(op, alignment=each) for op, each in zip(gather.operands, least))
    if gather.program is None:
        return replace(gather, operand=operands[0])
    return replace(gather, program=replace(gather.program, loads=operands))


def _factored(anchor: Node, operands: Sequence[Gather], options: Options) -> bool:
    """Returns true if operands that are computed need not be rounded to their dtypes: those may be narrower than sums
    of 8-bit floats are precise.
    """
    narrow = all(t.dtype.is_float and t.dtype.itemsize <= 2 for t in anchor.inputs)
    computed = any(gather.program is not None for gather in operands)
    return computed and not options.strict and (narrow or anchor.attributes["compute_dtype"] == TF32)


def _converted(anchor: Node, operands: Sequence[Gather], number: int) -> bool:
    """Returns true if an operand is computed, or has another dtype than the product."""
    common = anchor.op.promoted(tuple(t.type for t in anchor.inputs))
    return operands[number].program is not None or anchor.inputs[number].dtype != common


LOWERING: FamilyLowering = FamilyLowering(lambda view: view.anchors, accept, lower)
