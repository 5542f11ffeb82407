"""Operands A that the consumers of the Hopper kernels compute in registers.

TMA brings tiles of the tensors that an operand is computed from, as they lie in memory.  A consumer reads its fragments
of them, evaluates the program, and multiplies the resulting fragment from its registers, for which `wgmma` has a form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from codegen.declined import Declined
from codegen.dtypes import ALL
from codegen.expr import Load, Program, Store
from codegen.filled_tiles import as_it_lies
from codegen.iteration import collapse
from codegen.operands import PANEL, Brought, ComputedOperand, OperandTiles, ReductionPanels
from codegen.packed import packed
from codegen.spec import ContractionSpec, Gather, Image
from codegen.tile_path import ELEMENTS, orders, product_types
from codegen.tiles import check_element, im2col, tiled

#: Bytes of an element of the tensors whose tiles TMA may bring.
SIZES = (1, 2, 4)


def computed(spec: ContractionSpec) -> OperandTiles:
    """Returns the operands of a contraction whose operand A is computed in registers.  Raises Declined if not."""
    types = product_types(spec, widen=False)
    name = spec.a.operand.name
    if as_it_lies(spec.a, types[0]):
        raise Declined(f"{name!r} is multiplied as it lies in memory")
    if not as_it_lies(spec.b, types[1]):
        raise Declined(f"{spec.b.operand.name!r} is computed or converted: it is not in memory")
    if types[0] not in ("bfloat16", "float16"):
        raise Declined(f"{name!r} is multiplied as {types[0]}: fragments are computed of 16-bit elements only")
    image = spec.a.image
    if spec.terms or spec.results or (image is not None and (image.across or any(any(x) for x in image.shifts))):
        raise Declined("phases of a strided convolution, a filter turned around, or its gradient")
    program = spec.a.program
    if program is not None and (program.tables or program.itype != "int32" or (program.indices and spec.a.limits)):
        raise Declined(f"{name!r} is computed of positions in an image, or of elements at computed positions")
    reason = Declined("")
    for order in orders(spec):
        try:
            return _operand_tiles(spec, order, types[0])
        except Declined as refusal:
            reason = refusal
    raise reason


def _operand_tiles(spec: ContractionSpec, order: Sequence[int], product: str) -> OperandTiles:
    """Returns the operands, with the reduction dimensions in the given order."""
    gather, second = _with_program(spec.a, product), spec.b
    windows = bool(gather.limits)
    if not windows:
        # Dimensions that all tensors step over alike are merged.
        over = gather.steps()
        rows, over_rows = collapse(spec.m, over[1], range(len(spec.m)))
        inner, over_inner = collapse(spec.k, [*over[2], second.inner], order)
        windows = len(rows) > 1 and gather.image is not None
        if windows and program_of(gather).indices:
            raise Declined(f"{gather.operand.name!r} is computed of positions in an image")
    if windows:
        if gather.image is None:
            raise Declined(f"{gather.operand.name!r} is padded and no image")
        if tuple(order) != (*range(1, len(spec.k)), 0):
            raise Declined(f"{gather.operand.name!r} is an image whose taps are not walked in order")
        rows, inner, batch, channel = spec.m, spec.k, spec.batch, 0
    else:
        gather = gather.stepped(over[0], over_rows, over_inner[:-1])
        second, batch, channel = replace(second, inner=over_inner[-1]), spec.batch, len(inner) - 1
        if len(rows) > 1:  # the first dimension of rows as a batch dimension: operand B repeats
            if any(second.batch) and batch:
                raise Declined("rows of a batched product that do not lie at equal distances")
            lead = len(rows) - 1
            every = gather.steps()
            gather = gather.stepped(
                [(*b, *o[:lead]) for b, o in zip(*every[:2])], [o[lead:] for o in every[1]], every[2]
            )
            second = replace(second, batch=(*second.batch, *(0 for _ in range(lead))))
            batch, rows = (*batch, *rows[:lead]), rows[lead:]
    taps = tuple(size for d, size in enumerate(inner) if d != channel)
    reduction = ReductionPanels(taps, inner[channel], PANEL, 1)
    cols, (over_cols,) = collapse(spec.n, [second.outer], range(len(spec.n)))
    if len(cols) > 1 or second.limits:
        raise Declined(f"the columns of {second.operand.name!r} do not lie at equal distances")
    check_element(second)
    number = len(gather.operands)
    b = tiled(replace(second, outer=over_cols), number, batch, prod(cols), inner, channel)
    a = ComputedOperand(gather, product, tuple(batch), tuple(rows), tuple(inner), (), pairs=False)
    a = replace(a, brought=_brought(spec, a, reduction, channel, windows))
    pairs = packed(program_of(gather)) if inner[channel] % 2 == 0 else None
    if pairs is not None:
        a = replace(a, gather=replace(gather, program=pairs), pairs=True)
    return OperandTiles(tuple(batch), prod(rows), prod(cols), reduction, a, b)


def _with_program(gather: Gather, product: str) -> Gather:
    """Returns an operand with a program: one that is only converted gets a program that does this."""
    if gather.program is not None:
        return gather
    ctype = ELEMENTS[product][0]
    source = replace(gather.operand, strides=(*gather.batch, *gather.outer, *gather.inner))
    target = replace(gather.operand, dtype=next(d for d in ALL if d.ctype == ctype), strides=())
    program = Program((source,), stores=(Store(target, Load(0)),))
    return replace(gather, operand=target, program=program, starts=(gather.start,))


def program_of(gather: Gather) -> Program:
    """Returns the program of an operand that is computed."""
    assert gather.program is not None
    return gather.program


def _brought(
    spec: ContractionSpec, a: ComputedOperand, reduction: ReductionPanels, channel: int, windows: bool
) -> tuple[Brought, ...]:
    """Returns the tiles that TMA brings of the tensors which an operand is computed from."""
    gather, batch, inner = a.gather, a.batch, a.inner
    found = []
    over_batch, over_rows, over_inner = gather.steps()
    for n, (op, start) in enumerate(zip(program_of(gather).loads, gather.starts)):
        at = Gather(op, over_batch[1 + n], over_rows[1 + n], over_inner[1 + n], start)
        if not any(at.inner):
            continue
        itemsize = op.dtype.itemsize
        check_element(at)
        if not any(at.outer):
            others = [x for d, x in enumerate(zip(inner, at.inner)) if d != channel]
            taps = [(f"{{t{k}}}", size, step) for k, (size, step) in enumerate(others)]
            side = tiled(at, n, batch, 1, inner, channel, [tap for tap in taps if tap[1] > 1 and tap[2]])
            if at.inner[channel] != 1 and inner[channel] > 1:
                raise Declined(f"{op.name!r} is not contiguous along the reduction")
            if PANEL * itemsize > 512:
                raise Declined(f"{op.name!r} has elements of {itemsize} bytes")
            side = replace(side, terms=tuple("0" if term == "{o}" else term for term in side.terms))
            found.append(Brought(n, side, op.dtype.ctype, row=True))
            continue
        if itemsize not in SIZES:
            raise Declined(f"{op.name!r} has elements of {itemsize} bytes")
        if windows:
            assert gather.image is not None
            own = replace(at, image=_image(gather.image, at), limits=gather.limits)
            side = im2col(replace(spec, a=own), channel, reduction, prod(spec.batch))
        else:
            side = tiled(at, n, batch, prod(a.rows), inner, channel)
        if not side.along_k and itemsize != 2:
            raise Declined(f"{op.name!r} is stored across the reduction and has elements of {itemsize} bytes")
        found.append(Brought(n, side, op.dtype.ctype, row=False))
    if not any(not b.row for b in found):
        raise Declined(f"{gather.operand.name!r} is computed of rows and columns alone")
    return tuple(found)


def _image(image: Image, at: Gather) -> Image:
    """Returns a convolution's windows in a tensor with strides of its own.  Raises Declined if there are none."""
    steps = tuple(step // dilation for step, dilation in zip(at.inner[1:], image.dilation))
    if at.start != -sum(before * step for before, step in zip(image.before, steps)):
        raise Declined(f"{at.operand.name!r} does not begin where the image does")
    if any(o != stride * s for o, stride, s in zip(at.outer[1:], image.stride, steps)) or not all(steps):
        raise Declined(f"{at.operand.name!r} repeats elements along the image")
    return replace(image, steps=steps)
