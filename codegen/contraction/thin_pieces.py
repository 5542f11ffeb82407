"""The operands of a product of a large operand with a thin one: pieces of rows that lanes bring, and pairs of codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from codegen.bf16x6 import BF16X6
from codegen.buffers import Edge
from codegen.codes import FREE_OFFSET, HALVES, Code, codes
from codegen.declined import Declined
from codegen.expr import Index, Load, Value
from codegen.packed import packed
from codegen.sizes import Size, most
from codegen.spec import ContractionSpec, Gather, Strides
from codegen.tile_path import PIECE, TilePath, merged_gather, orders, product_types

#: Most rows (or columns) of the thin operand: two products of 8 columns for each part of the large one.
MOST_THIN = 16
#: Rows (or columns) of the large operand that a product takes, and of the thin one.
WIDE, THIN = 16, 8
#: Lanes that share a row.
LANES = 4
#: Most terms of a piece whose elements are computed one by one.
MOST_EACH = 16


class ThinPaths(NamedTuple):
    """The operands of a product, and what a lane brings of them at a time.

    wide, thin  how each lies in memory: the large operand and the other one.
    first       whether the large one is operand A.
    size, few   rows (or columns) of each.
    depth       terms of a sum; batch, products as in `codegen.tile_path.TilePaths`.
    piece       terms that a lane has of a row: neighbours, at least 16 bytes of them in memory or as they are
                multiplied.
    """

    wide: TilePath
    thin: TilePath
    first: bool
    batch: int
    size: int
    few: int
    depth: int
    products: int
    piece: int

    @property
    def columns(self) -> int:
        """Products of 8 columns that the thin operand takes."""
        return Edge(most(self.few), THIN).tiles

    @property
    def words(self) -> int:
        """Registers of a piece as it is multiplied."""
        return self.piece * self.wide.itemsize // 4

    def span(self, pieces: int) -> int:
        """Returns the terms that the lanes of a row have in so many pieces each."""
        return LANES * self.piece * pieces


# ---- pieces


@dataclass(frozen=True)
class Piece:
    """Where the elements of a piece lie: coordinates of its elements, and a tensor's steps along them.

    sizes  of the piece along the last dimensions of the reduction.
    steps  of the tensor along these.
    """

    sizes: tuple[int, ...]
    steps: Strides

    @property
    def reach(self) -> int:
        """Elements from the first one to the last one."""
        return 1 + sum((size - 1) * step for size, step in zip(self.sizes, self.steps))

    @property
    def dense(self) -> bool:
        """Whether all elements lie within one vector of at most as many."""
        return min(self.steps) >= 0 and self.reach <= prod(self.sizes) and self.reach & (self.reach - 1) == 0

    @property
    def in_order(self) -> bool:
        """Whether elements lie one behind the other, in the order of the sum."""
        below = [prod(self.sizes[d + 1 :]) for d in range(len(self.sizes))]
        return all(step == each for size, step, each in zip(self.sizes, self.steps, below) if size > 1)

    def offset(self, element: str) -> str:
        """Returns the C expression of an element's place, given its number."""
        terms, below = [], 1
        for size, step in reversed(list(zip(self.sizes, self.steps))):
            if step and size > 1:
                coordinate = element if below == 1 else f"{element} / {below}"
                if below * size < prod(self.sizes):
                    coordinate = f"{coordinate} % {size}"
                terms.append(coordinate if step == 1 else f"{coordinate} * {step}")
            below *= size
        return " + ".join(reversed(terms)) or "0"


def piece_sizes(inner: Sequence[int], count: int) -> tuple[int, ...] | None:
    """Returns the sizes of a piece along the last dimensions, as many as it has; None if pieces do not divide them."""
    sizes: list[int] = []
    for size in reversed(inner):
        if size % count == 0:
            return (count, *sizes)
        if type(size) is int and count % size == 0:
            sizes.insert(0, size)
            count //= size
        else:
            return None
    return None


def thin_paths(spec: ContractionSpec) -> ThinPaths:
    """Returns how the operands come to registers.  Raises Declined unless one is thin, and the other lies along k."""
    products = product_types(spec, widen=True)
    if products[0] == BF16X6:
        raise Declined("float32 is multiplied in parts by warpgroups only")
    batch, rows, cols, depth = (prod(sizes) for sizes in (spec.batch, spec.m, spec.n, spec.k))
    if not batch * rows * cols * depth:
        raise Declined("there is nothing to multiply")
    if spec.partials or spec.terms or spec.a.limits or spec.b.limits:
        raise Declined("thin products have operands without limits, and whole results")
    if most(rows) > MOST_THIN and (most(cols) > MOST_THIN or spec.others):
        raise Declined(f"neither operand has at most {MOST_THIN} rows or columns")
    first = most(rows) > MOST_THIN
    sides = [(spec.a, spec.m, products[0]), (spec.b, spec.n, products[1])]
    wide, thin = sides if first else sides[::-1]
    reason = Declined("the large operand does not lie along the reduction")
    for order in orders(spec):
        a, b = _path(spec, *wide, order), _path(spec, *thin, order)
        piece = _piece(a, b)
        if piece:
            size, few = (rows, cols) if first else (cols, rows)
            return ThinPaths(a, b, first, batch, size, few, depth, spec.products, piece)
        reason = Declined("the large operand does not lie along the reduction, in whole pieces of 16 bytes")
    raise reason


def _path(
    spec: ContractionSpec, gather: Gather, outer: tuple[int, ...], product: str, order: Sequence[int]
) -> TilePath:
    merged, batch, outer, inner = merged_gather(spec, gather, outer, order)
    return TilePath(merged, batch, outer, inner, product, True, 1, True)


def _piece(wide: TilePath, thin: TilePath) -> int:
    """Returns the terms of a piece; 0 if the large operand does not lie so."""
    least = PIECE // wide.itemsize
    count = max(least, min(_whole(wide), 4 * least))
    while count >= least:
        sizes = [piece_sizes(way.inner, count) for way in (wide, thin)]
        # Elements that are computed one by one take long: short pieces leave some to more warps.
        long = count > MOST_EACH and wide.gather.program is not None and in_pairs(wide, count) is None
        if not long and all(sizes) and all(suits(wide, n, count) for n in range(len(wide.gather.operands))):
            return count
        count //= 2
    return 0


def _whole(way: TilePath) -> int:
    """Returns the terms of which each tensor has at most 16 bytes: one of 4 bits has two of them in a byte."""
    found = []
    for n, op in enumerate(way.gather.operands):
        steps = source_steps(way, n)[2]
        if any(steps):
            found.append(
                PIECE * prod(most(size) for size, step in zip(way.inner, steps) if not step) // op.dtype.itemsize
            )
    whole = min(found, default=PIECE // 4)
    return 1 << whole.bit_length() - 1


def source_steps(way: TilePath, n: int) -> tuple[Strides, Strides, Strides, int]:
    """Returns the steps of tensor n along batch, outer and inner dimensions, and where it starts."""
    gather = way.gather
    if gather.program is None:
        return gather.batch, gather.outer, gather.inner, gather.start
    batch, outer, inner = gather.steps()
    return batch[n + 1], outer[n + 1], inner[n + 1], gather.starts[n]


def suits(way: TilePath, n: int, count: int) -> bool:
    """Tells whether lanes read pieces of a tensor in vectors, or one element for each."""
    inner = source_steps(way, n)[2]
    if not any(inner):
        return True
    sizes = piece_sizes(way.inner, count)
    assert sizes is not None
    piece = Piece(sizes, inner[len(inner) - len(sizes) :])
    if not any(piece.steps):
        return True
    return piece.dense and aligned(way, n, piece)


def aligned(way: TilePath, n: int, piece: Piece) -> bool:
    """Tells whether every piece of a tensor is as aligned as its vectors are."""
    batch, outer, inner, start = source_steps(way, n)
    op = way.gather.operands[n]
    width = min(16, piece.reach * op.dtype.itemsize)
    # From piece to piece the innermost of its dimensions goes on where the last one ended.
    along = (*inner[: len(inner) - len(piece.sizes)], piece.steps[0] * piece.sizes[0])
    steps = (*batch, *outer, *along, start)
    return all(step * op.dtype.itemsize % width == 0 for step in steps) and op.alignment % width == 0


# ---- codes


#: Neighbours among which pairs are made, in any order of terms.
RUN = 8


class Pairs(NamedTuple):
    """An operand whose program computes pairs of 16-bit floats.

    way    the operand, with that program.
    codes  by load what is decoded from vectors of bytes.
    """

    way: TilePath
    codes: Mapping[int, Code]

    @property
    def apart(self) -> int:
        """How far apart the elements of a pair are, as its codes are decoded."""
        return max((code.apart for code in self.codes.values()), default=1)


@lru_cache(256)
def in_pairs(way: TilePath, piece: int) -> Pairs | None:
    """Returns an operand whose program computes pairs; None if it is not computed, or not in pairs."""
    program, sizes = way.gather.program, piece_sizes(way.inner, piece)
    if program is None or sizes is None or way.itemsize != 2:
        return None
    elements: dict[Value, Any] = {}
    vectors: dict[int, Any] = {}  # by load, of which element of a vector each element of a piece is made
    coords = np.unravel_index(np.arange(piece), sizes)
    for n in range(len(program.loads) + len(program.indices)):
        batch, outer, inner, start = source_steps(way, n)
        lead, steps = inner[: len(inner) - len(sizes) + 1], inner[len(inner) - len(sizes) :]
        if any(isinstance(step, Size) for step in (*batch, *outer, *inner)):
            return None
        places = sum((c * step for c, step in zip(coords, steps)), np.zeros(piece, np.int64))
        if n >= len(program.loads):
            if not any((*batch, *outer, *lead[:-1], *(steps[:1] if sizes[0] != way.inner[len(lead) - 1] else ()))):
                elements[Index(n - len(program.loads))] = places + start
        elif any(steps) and not (aligned(way, n, Piece(sizes, steps)) and Piece(sizes, steps).dense):
            return None
        elif runs(Piece(sizes, steps)):  # both elements of a pair are the same one
            elements[Load(n)] = np.zeros_like(places)
        else:
            elements[Load(n)] = vectors[n] = places
    found = codes(program, elements)
    # Where vectors are decoded, offsets are added at no cost.
    free = {v: c for v, c in found.items() if c.load in vectors and abs(c.offset) <= FREE_OFFSET}
    pairs = packed(program, {v: replace(c, offset=0) if v in free else c for v, c in found.items()})
    if pairs is None:
        return None
    decoded = {c.load: c if v in free else replace(c, offset=0) for v, c in found.items() if c.load in vectors}
    for n, places in vectors.items():
        each = 2 if n in decoded and decoded[n].kind in HALVES else 1
        if not np.array_equal(places, np.arange(piece) // each):
            return None
        if program.loads[n].dtype.itemsize == 1 and (n not in decoded or piece // each % 4):
            return None
    gather = replace(way.gather, program=pairs, starts=way.gather.starts[: len(pairs.loads)])
    return Pairs(replace(way, gather=gather), decoded)


def runs(piece: Piece) -> bool:
    """Tells whether a tensor has one element for each run of neighbours."""
    below = 1
    for size, step in reversed(list(zip(piece.sizes, piece.steps))):
        if step and size > 1:
            return below % RUN == 0
        below *= size
    return True
