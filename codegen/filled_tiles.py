"""Tiles of the Hopper kernels that the producer's threads fill: operands that are computed, or converted, on the way.

Threads bring a tile as in the kernels of mma.sync (`codegen.tile_loader`); its rows of 128 bytes are swizzled in shared
memory as by TMA.  An operand that is multiplied as it lies in memory still comes by TMA if that can address it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod

from codegen.bf16x6 import ROW
from codegen.declined import Declined
from codegen.iteration import collapse
from codegen.operands import ROW_BYTES, MappedOperand, OperandTiles, ReductionPanels
from codegen.spec import ContractionSpec, Gather
from codegen.tile_path import TilePath, orders, product_types, tile_path_of
from codegen.tiles import check_across, check_element, check_limits, im2col, tiled


def filled(spec: ContractionSpec) -> OperandTiles:
    """Returns a contraction's operands of which threads fill at least one.  Raises Declined where this cannot be."""
    types = product_types(spec, widen=False)
    found, reason = [], Declined("")
    for order in orders(spec):
        try:
            found.append((_side(spec, 0, spec.m, order, types[0]), _side(spec, 1, spec.n, order, types[1])))
        except Declined as refusal:
            reason = refusal
    if not found:
        raise reason
    a, b = min(found, key=lambda sides: sum(side.effort for side in sides if isinstance(side, TilePath)))
    brought = [side for side in (a, b) if isinstance(side, TilePath)]
    lying = all(as_it_lies(*both) for both in zip((spec.a, spec.b), types))
    if lying and (len(brought) < 2 or types[0] != "tf32"):
        raise Declined("both operands are multiplied as they lie in memory")
    way = brought[0]
    row = ROW if way.parts > 1 else ROW_BYTES
    reduction = ReductionPanels((), prod(spec.k), row // way.itemsize, 1, row=row)
    if isinstance(a, MappedOperand) and a.im2col:
        reduction = _windowed(spec)
    return OperandTiles(spec.batch, prod(spec.m), prod(spec.n), reduction, a, b)


def as_it_lies(gather: Gather, product: str) -> bool:
    """Tells whether an operand is multiplied as it lies in memory."""
    name = gather.operand.dtype.name
    return gather.program is None and (name == product or (name, product) == ("float32", "tf32"))


def _side(
    spec: ContractionSpec, number: int, sizes: Sequence[int], order: Sequence[int], product: str
) -> TilePath | MappedOperand:
    """Returns one operand, with the reduction dimensions in the given order."""
    gather = (spec.a, spec.b)[number]
    way = replace(tile_path_of(spec, gather, sizes, order, product), held=True)
    side: TilePath | MappedOperand = way
    if as_it_lies(gather, product):
        with suppress(Declined):  # else threads bring it, too
            check_limits(spec)
            side = _copied(spec, number, sizes, order)
        if not side.along_k and way.itemsize != 2:
            side = way  # and transpose it
    check_across(way.itemsize, side.along_k)
    return side


def _copied(spec: ContractionSpec, number: int, sizes: Sequence[int], order: Sequence[int]) -> MappedOperand:
    """Returns an operand as TMA brings it.  Raises Declined if it cannot."""
    gather = (spec.a, spec.b)[number]
    check_element(gather)
    if gather.limits:
        reduction = _windowed(spec)
        if number or gather.image is None or gather.image.across or tuple(order) != (*range(1, len(spec.k)), 0):
            raise Declined(f"{gather.operand.name!r} is padded and no image whose taps are walked in order")
        if reduction.channels % reduction.panel:
            raise Declined(f"{gather.operand.name!r} has no whole rows of a tile in each tap")
        return im2col(spec, 0, reduction, prod(spec.batch))
    inner, along = collapse(spec.k, [gather.inner], order)
    outer, over = collapse(sizes, [gather.outer], range(len(sizes)))
    if len(inner) > 1 or len(outer) > 1:
        raise Declined(f"{gather.operand.name!r} does not lie at equal distances along the reduction, or across it")
    argument = 0 if number == 0 else len(spec.a.operands)
    return tiled(replace(gather, inner=along[0], outer=over[0]), argument, spec.batch, prod(sizes), inner, 0)


def _windowed(spec: ContractionSpec) -> ReductionPanels:
    """Returns the reduction over an image's windows: tap by tap, and through the channels of each."""
    return ReductionPanels(spec.k[1:], spec.k[0], ROW_BYTES // spec.a.operand.dtype.itemsize, 1)
