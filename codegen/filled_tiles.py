"""Tiles of the Hopper kernels that the producer's threads fill: factors that are computed, or converted, on the way.

Threads bring a tile as those of a kernel of mma.sync do (`codegen.tile_loader`); its rows of 128 bytes lie in shared
memory swizzled as the copy engine would leave them.  A factor that is multiplied as it lies in memory still comes by
the copy engine if that can address it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod

from codegen.declined import Declined
from codegen.factors import ROW_BYTES, Factors, Reduction, Side
from codegen.iteration import collapse
from codegen.spec import ContractionSpec, Gather
from codegen.tiles import check_element, im2col, tiled
from codegen.ways import Way, orders, product_types, way_of


def filled(spec: ContractionSpec) -> Factors:
    """The factors of a contraction of which threads fill at least one.  Raises Declined where there is none."""
    types = product_types(spec, widen=False)
    if all(as_it_lies(gather, product) for gather, product in zip((spec.a, spec.b), types)):
        raise Declined("both factors are multiplied as they lie in memory")
    if spec.terms or spec.results or any(any(x) for x in (spec.a.image.shifts if spec.a.image else ())):
        raise Declined("phases of a strided convolution, or a filter turned around")
    best: tuple[float, Way | Side, Way | Side] | None = None
    reason = Declined("")
    for order in orders(spec):
        try:
            a = _side(spec, 0, spec.rows, order, types[0])
            b = _side(spec, 1, spec.cols, order, types[1])
        except Declined as refusal:
            reason = refusal
            continue
        effort = sum(side.effort for side in (a, b) if isinstance(side, Way))
        if best is None or effort < best[0]:
            best = effort, a, b
    if best is None:
        raise reason
    _, a, b = best
    itemsize = next(side.itemsize for side in (a, b) if isinstance(side, Way))
    reduction = Reduction((), prod(spec.inner), ROW_BYTES // itemsize, 1)
    if isinstance(a, Side) and a.im2col:
        reduction = _windowed(spec)
    return Factors(spec.batch, prod(spec.rows), prod(spec.cols), reduction, a, b)


def as_it_lies(gather: Gather, product: str) -> bool:
    """Whether a factor is multiplied as it lies in memory."""
    name = gather.operand.dtype.name
    return gather.program is None and (name == product or (name, product) == ("float32", "tf32"))


def _side(spec: ContractionSpec, number: int, sizes: Sequence[int], order: Sequence[int], product: str) -> Way | Side:
    """One factor, the reduction being walked in an order."""
    gather = (spec.a, spec.b)[number]
    way = replace(way_of(spec, gather, sizes, order, product), held=True)
    side: Way | Side = way
    if as_it_lies(gather, product):
        with suppress(Declined):  # else threads bring it as well
            side = _copied(spec, number, sizes, order)
        if not side.along_k and way.itemsize != 2:
            side = way  # and turn it
    if not side.along_k and way.itemsize != 2:
        raise Declined("only 16-bit factors may be stored across the reduction")
    return side


def _copied(spec: ContractionSpec, number: int, sizes: Sequence[int], order: Sequence[int]) -> Side:
    """A factor as the copy engine brings it."""
    gather = (spec.a, spec.b)[number]
    check_element(gather)
    if gather.limits:
        reduction = _windowed(spec)
        if number or gather.image is None or gather.image.across or tuple(order) != (*range(1, len(spec.inner)), 0):
            raise Declined(f"{gather.operand.name!r} is padded and no image whose taps are walked in order")
        if reduction.channels % reduction.panel:
            raise Declined(f"{gather.operand.name!r} has no whole rows of a tile in each tap")
        return im2col(spec, 0, reduction, prod(spec.batch))
    inner, along = collapse(spec.inner, [gather.inner], order)
    outer, over = collapse(sizes, [gather.outer], range(len(sizes)))
    if len(inner) > 1 or len(outer) > 1:
        raise Declined(f"{gather.operand.name!r} does not lie at equal distances along the reduction, or across it")
    argument = 0 if number == 0 else len(spec.a.operands)
    return tiled(replace(gather, inner=along[0], outer=over[0]), argument, spec.batch, prod(sizes), inner, 0)


def _windowed(spec: ContractionSpec) -> Reduction:
    """The reduction as the windows of an image are walked: tap by tap, and through the channels of each."""
    return Reduction(spec.inner[1:], spec.inner[0], ROW_BYTES // spec.a.operand.dtype.itemsize, 1)
