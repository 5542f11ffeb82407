"""What a contraction on tensor cores multiplies, and how threads bring its operands to shared memory.

A tile of an operand lies in shared memory in pieces of 16 bytes, in rows that run along the reduction or, for elements
of 16 bits, across it (ldmatrix transposes those).  A thread brings whole pieces: by asynchronous copies of 16, 8 or 4
bytes where the elements are neighbours and need no conversion, else through registers, converted on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from codegen.arch import LINE_BYTES, SECTOR_BYTES
from codegen.bf16x6 import BF16X6, PART, PARTS
from codegen.buffers import Buffer, Edge
from codegen.declined import Declined
from codegen.iteration import collapse
from codegen.records import changed, once
from codegen.sizes import aligned, dividing
from codegen.spec import ContractionSpec, Gather, Limit
from codegen.target import Target

PIECE = 16  # bytes
PERIOD = 8  # rows after which the swizzle of a tile repeats
#: Instructions that an access takes as long as of a lane that reads a line of its own,
#: and one of at most 4 bytes: a warp's takes 27 cycles as a copy of images with channels first in float32,
#: 23 as loads of rows of 1001 elements of 16 bits, but 10 as loads of positions of images with channels first; copies
#: along the reduction take 8, all measured.
SCATTERED, WORD, WORD_ALONG, LOADED = 64.0, 100.0, 25.0, 40.0
ACROSS_BYTES = 128  # most bytes of a row of a tile that lies across the reduction


# ---- what is multiplied

_INTEGERS = {"int8": "int8", "uint8": "uint8", "bool": "uint8"}
_NARROW = frozenset(("float8_e4m3", "float8_e5m2"))
_REAL = frozenset(("float32", "float16", "bfloat16", *_NARROW, *_INTEGERS))
#: C type of an element in shared memory, and its bytes, by the type that the tensor cores multiply.
ELEMENTS = {
    "tf32": ("float", 4),
    BF16X6: (PART, 2),
    "bfloat16": ("bfloat16", 2),
    "float16": ("float16", 2),
    "float8_e4m3": ("float8_e4m3", 1),
    "float8_e5m2": ("float8_e5m2", 1),
    "int8": ("int8", 1),
    "uint8": ("uint8", 1),
}


def product_types(spec: ContractionSpec, widen: bool) -> tuple[str, str]:
    """Returns the types in which the operands are multiplied: the narrowest that hold both exactly (except for tf32).

    bfloat16 and float16 together fit tf32: 8 bits of exponent and 11 of mantissa.  8-bit integers fit bfloat16, 8-bit
    floats both.  Raises Declined for what tensor cores do not multiply exactly.
    """
    a, b = (gather.operand.dtype.name for gather in (spec.a, spec.b))
    both = {a, b}
    if both <= set(_INTEGERS):
        if spec.accumulate != "uint32":
            raise Declined(f"tensor cores do not add up {a} products in {spec.accumulate}")
        return _INTEGERS[a], _INTEGERS[b]
    if not both <= _REAL:
        raise Declined(f"tensor cores do not multiply {a} with {b}")
    if spec.accumulate != "float":
        raise Declined(f"tensor cores do not add up in {spec.accumulate}")
    if "float32" in both:
        if spec.tf32:
            return "tf32", "tf32"
        if not spec.bf16x6:
            raise Declined("float32 products are exact unless the graph asks for tf32")
        return BF16X6, BF16X6
    if both == {"float16", "bfloat16"}:
        return "tf32", "tf32"
    if both <= _NARROW and not widen:
        return a, b
    return ("bfloat16", "bfloat16") if "bfloat16" in both else ("float16", "float16")


# ---- the paths of the operands to shared memory


@dataclass(frozen=True)
class TilePath:
    """How an operand comes to shared memory.

    gather    the operand over dimensions merged as far as its strides and limits allow.
    batch, outer, inner  sizes of these; ``inner`` in the order in which the reduction is walked.
    product   the type in which it is multiplied.
    along_k   whether rows of the tile run along the reduction (else along rows or columns of the result).
    vector    elements that one copy brings, neighbours in memory and in a piece.
    threads_along_k  whether neighbouring threads bring neighbouring pieces along the reduction; only if along_k.
    held      whether elements go through registers even where asynchronous copies could bring them.
    """

    gather: Gather
    batch: tuple[int, ...]
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    product: str
    along_k: bool
    vector: int
    threads_along_k: bool
    held: bool = False

    @property
    def element(self) -> str:
        """C type of an element in shared memory."""
        return ELEMENTS[self.product][0]

    @once
    def itemsize(self) -> int:
        """Bytes of an element in shared memory, or of each of its parts."""
        return ELEMENTS[self.product][1]

    @once
    def parts(self) -> int:
        """Into how many parts an element is split, each in a tile of its own."""
        return PARTS if self.product == BF16X6 else 1

    @once
    def value(self) -> str:
        """C type of an element before it is split."""
        return "float" if self.parts > 1 else self.element

    @once
    def piece(self) -> int:
        """Elements of a piece."""
        return PIECE // self.itemsize

    @once
    def copied(self) -> bool:
        """Whether copies are asynchronous: the elements need no conversion and lie in words."""
        dtype = self.gather.operand.dtype
        as_it_lies = self.gather.program is None and dtype.ctype == self.value
        return as_it_lies and not self.held and self.vector * dtype.itemsize >= 4

    @property
    def reach(self) -> int:
        """A bound on the offsets of elements, and on the numbers that limits bound."""
        g, sizes = self.gather, (self.batch, self.outer, self.inner)
        found = [prod(self.outer), prod(self.inner), *g.reaches(*sizes)]
        return max([*found, *(abs(x.start) + sum(x.ends(*sizes), x.size) for x in g.limits)])

    @property
    def searched(self) -> bool:
        """Whether a thread works out for each of its pieces where several parts of it lie."""
        return self.along_k and not self.threads_along_k and self.granule < self.piece

    @once
    def granule(self) -> int:
        """How many elements of a piece share all coordinates of the reduction but the last, and lie all inside or all
        outside of the limits.
        """
        if not self.along_k:
            return 1
        if any(limit.inner[-1] for limit in self.gather.limits):
            return self.vector
        size = self.inner[-1]
        return dividing(size, self.piece)

    @once
    def effort(self) -> float:
        """Instructions that a piece takes, roughly."""
        loads = self.piece / self.vector
        places = self.piece / self.granule if self.along_k else 1.0
        walk = 2.0 + (4.0 * len(self.inner) if len(self.inner) > 1 else 0.0) + 2.0 * len(self.gather.limits)
        loads *= len(self.gather.operands)
        lines = loads * SCATTERED * min(1.0, self._apart / LINE_BYTES)
        if self.copied:
            return loads * 2.0 + lines + places * walk
        work = 1 if self.gather.program is None else 2 + len(self.gather.program.instructions)
        return loads * 3.0 + lines + places * walk + self.piece * work

    @once
    def busy(self) -> float:
        """Instructions that a piece takes as long as: where it comes in words of rows far apart, more than it has."""
        itemsize, several = self.gather.operand.dtype.itemsize, len(self.inner) > 1
        width, word = self.vector * itemsize, 0.0
        if self.copied and self.along_k:
            word = WORD_ALONG if width <= 4 or (width == 8 and not several) else 0.0
        elif width <= 4 and (self.copied or abs(self.gather.outer[-1]) * itemsize >= LINE_BYTES):
            word = LOADED if several and not self.copied else WORD
        return self.effort + self.piece / self.vector * word

    @property
    def _apart(self) -> int:
        """Bytes from what a lane reads to what the next one reads at the same time, 0 if they are neighbours."""
        along = self.along_k and self.threads_along_k
        step = abs((self.gather.inner if along else self.gather.outer)[-1])
        return step * (self.piece if along else 1) * self.gather.operand.dtype.itemsize if step > 1 else 0

    @once
    def beside(self) -> int:
        """The bytes of sectors beside a run of a tile, on average: one of a matrix begins wherever its rows do."""
        lying, other = self.gather.inner, self.gather.outer
        if not self.along_k:
            lying, other = other, lying
        if len(self.inner) > 1 or lying[-1:] != (1,) or self.gather.program is not None:
            return 0
        size = self.gather.operand.dtype.itemsize
        return SECTOR_BYTES - aligned(
            SECTOR_BYTES, *(step * size for step in (*self.gather.batch, *lying[:-1], *other) if step)
        )

    def pieces_of_row(self, size: int, inner: int) -> int:
        """Returns how many pieces a row of a tile has: of ``size`` rows or columns and ``inner`` terms of a sum."""
        return (inner if self.along_k else size) // self.piece

    def count(self, size: int, inner: int, threads: int) -> int:
        """Returns how many pieces of a tile a thread brings."""
        return max(1, size * inner // self.piece // threads)

    def step(self, size: int, inner: int, threads: int) -> int:
        """Returns the distance between a thread's pieces: rows of the tile, or else pieces of its row."""
        if self.along_k and not self.threads_along_k:
            return threads // size
        return threads // self.pieces_of_row(size, inner)

    @once
    def words(self) -> bool:
        """Whether elements of 32 bits lie across the reduction: lanes read each of them by itself."""
        return not self.along_k and self.itemsize == 4

    def fills(self, size: int, inner: int, threads: int) -> bool:
        """Tells whether ``threads`` threads can fill such a tile: all have as many pieces, as far apart as the swizzle
        allows.
        """
        step, pieces = self.step(size, inner, threads), size * inner // self.piece
        along = self.along_k and not self.threads_along_k
        if step < 1 or threads % (size if along else self.pieces_of_row(size, inner)):
            return False
        if pieces > threads and pieces % threads:
            return False
        if self.words:
            return size * self.itemsize % ACROSS_BYTES == 0 and (step % PERIOD == 0 or PERIOD % step == 0)
        return along or step % PERIOD == 0 or pieces <= threads

    def buffer(self, label: str, size: int, inner: int, stages: int, products: int = 1) -> Buffer:
        """Returns the ring of tiles of ``size`` rows (of operand "a") or columns (of "b") in shared memory."""
        lines = f"{size} {'rows' if label == 'a' else 'columns'}"
        note = f"stages of {f'{lines} of {inner}' if self.along_k else f'{inner} x {lines} of'} {self.element}"
        if not self.along_k and size * self.itemsize > ACROSS_BYTES:
            note += f", in panels of {ACROSS_BYTES // self.itemsize}"
        note += f"; of {products} operands; swizzled" if products > 1 else "; swizzled"
        shape = (products * size * inner * self.itemsize,)
        return Buffer(label, "unsigned char", shape, stages, align=ACROSS_BYTES, note=note)


@dataclass(frozen=True)
class TilePaths:
    """The operands of a contraction with ``batch`` times ``rows`` x ``cols`` results of ``depth`` terms.

    products  the number of operands B: there are so many results at each place.
    """

    batch: int
    rows: int
    cols: int
    depth: int
    a: TilePath
    b: TilePath
    products: int = 1

    def stages(self, inner: int) -> int:
        """Returns how many stages the reduction takes."""
        return Edge(self.depth, inner).tiles


def tile_paths(spec: ContractionSpec, widen: bool = False) -> TilePaths:
    """Returns the cheapest paths of both operands.  Raises Declined if tensor cores cannot multiply them."""
    products = product_types(spec, widen)
    batch, rows, cols, depth = (prod(sizes) for sizes in (spec.batch, spec.m, spec.n, spec.k))
    if not batch * rows * cols * depth:
        raise Declined("there is nothing to multiply")
    if batch * rows * cols >= 2**40 or max(rows, cols, depth) >= 2**31 - 2**16:
        raise Declined("more results than the tiles of a grid")
    found = []
    for order in orders(spec):
        for across in (False, True):
            a = tile_path_of(spec, spec.a, spec.m, order, products[0], across=across)
            b = tile_path_of(spec, spec.b, spec.n, order, products[1], across=across)
            if a.words == b.words:  # which terms of a sum lanes multiply at a time is another order
                found.append(TilePaths(batch, rows, cols, depth, a, b, spec.products))
    return min(found, key=lambda paths: paths.a.effort + paths.b.effort)


def orders(spec: ContractionSpec) -> list[tuple[int, ...]]:
    """Returns orders of the reduction dimensions: as either operand lies in memory, or the first dimension fastest."""
    dims = range(len(spec.k))
    orders = [tuple(sorted(dims, key=lambda d: (-abs(g.inner[d]), d))) for g in (spec.a, spec.b)]
    return list(dict.fromkeys([*orders, (*dims[1:], *dims[:1])]))


def merged_gather(
    spec: ContractionSpec, gather: Gather, outer: Sequence[int], order: Sequence[int]
) -> tuple[Gather, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns an operand over merged dimensions, and their sizes: batch, outer, and inner ones in the given order."""
    # A limit on the terms of the sum holds for either operand: a term that is zero in one makes no product.
    terms = tuple(Limit(x.batch, (0,) * len(outer), x.inner, x.start, x.size) for x in spec.terms)
    limits = (*gather.limits, *terms)
    # Limits take part like operands: dimensions merge only if no limit tells them apart.
    every = changed(gather, limits=limits)
    over = every.steps()
    batch, over_batch = collapse(spec.batch, over[0], range(len(spec.batch)))
    outer, over_outer = collapse(outer, over[1], range(len(outer)))
    inner, over_inner = collapse(spec.k, over[2], order)
    return every.stepped(over_batch, over_outer, over_inner), batch, outer, inner


def tile_path_of(
    spec: ContractionSpec,
    gather: Gather,
    outer: Sequence[int],
    order: Sequence[int],
    product: str,
    *,
    across: bool = False,
) -> TilePath:
    """Returns the cheapest path of one operand, with the reduction dimensions in the given order.

    With ``across``, tf32 may lie across the reduction, where asynchronous copies bring several elements together.
    """
    merged, batch, outer, inner = merged_gather(spec, gather, outer, order)
    itemsize = ELEMENTS[product][1]
    whole = product == BF16X6
    along, beside = (_vector(merged, outer, inner, itemsize, along_k=k, whole=whole) for k in (True, False))
    # The nearer their elements lie, the fewer lines of the cache the threads of a warp touch.
    near, far = ((abs(g[-1]), -sizes[-1]) for g, sizes in ((merged.inner, inner), (merged.outer, outer)))
    near_k = prod(outer) == 1 or (prod(inner) > 1 and near <= far)
    found = [TilePath(merged, batch, outer, inner, product, True, along, along > 1 or near_k)]
    lying = TilePath(merged, batch, outer, inner, product, False, beside, False)
    if beside > 1 and (itemsize == 2 or (across and product == "tf32" and lying.copied)):
        found.append(lying)
    return min(found, key=lambda way: way.effort)


def _vector(
    gather: Gather, outer: Sequence[int], inner: Sequence[int], itemsize: int, *, along_k: bool, whole: bool
) -> int:
    """Returns how many elements of a piece are always neighbours in memory, aligned to as many.

    ``whole`` pieces are brought together even where this takes several accesses of 16 bytes.
    """
    size, stride = (inner[-1], gather.inner[-1]) if along_k else (outer[-1], gather.outer[-1])
    bounded = any((x.inner if along_k else x.outer)[-1] for x in gather.limits)
    if stride != 1 or bounded:
        return 1
    steps = [*gather.batch, *gather.outer, *gather.inner, gather.start]
    steps.remove(1)  # the one along the vector
    if gather.program is not None:  # each tensor that is read may have another alignment
        vector = PIECE // itemsize
        return dividing(size, vector)
    own = gather.operand.dtype.itemsize
    vector = PIECE // (itemsize if whole else max(itemsize, own))

    def unaligned(vector: int) -> bool:  # more than 16 bytes are several accesses
        elements = min(vector, PIECE // own)
        return bool(gather.operand.alignment % (elements * own)) or any(s % elements for s in steps)

    while vector > 1 and (size % vector or unaligned(vector)):
        vector //= 2
    return vector


# ---- registers of threads that bring tiles


def held_registers(way: TilePath, size: int, inner: int, threads: int, products: int = 1) -> int:
    """Returns how many registers hold a thread's places of a tile's pieces, and the data in flight."""
    count = way.count(size, inner, threads)
    kept = (count if way.threads_along_k else 1) * (1 + len(way.gather.limits))
    places = way.piece // way.granule if way.along_k else 1
    if places > 1:
        kept += 4 + places * (1 + len(way.gather.limits))
    if way.gather.program is not None:
        kept += _sources_registers(way, count) + way.piece
    if not way.copied:  # in flight from global memory; single elements take a register each
        count *= products
        kept += count * (way.piece if way.vector == 1 or way.parts > 1 else 4)
        if places == way.piece:  # and more of them, the more places are to be worked out
            kept += max(0, count * places - 32) // 2
    return kept


def convert_registers(way: TilePath, target: Target) -> int:
    """Returns how many registers conversions of 8-bit floats take: none where an instruction does them."""
    dtype = way.gather.operand.dtype
    emulated = not way.copied and dtype.is_float and dtype.itemsize == 1 and not target.arch.has_fp8_convert
    return 36 if emulated else 0


def _sources_registers(way: TilePath, count: int) -> int:
    """Returns how many registers the sources of elements take, beyond those of one tensor as large as the operand."""
    program, registers, first = way.gather.program, 0, True
    assert program is not None
    batch, outer, inner = way.gather.steps()
    for op, b, o, i in zip(program.loads, batch[1:], outer[1:], inner[1:]):
        words = max(1, way.piece * min(4, op.dtype.itemsize) // 4) if way.vector > 1 else way.piece
        along = (i if way.along_k else o)[-1]
        each = words if along else max(1, way.piece // way.vector)
        per_piece = any(i) and (any(o) or any(b) or not way.threads_along_k)
        if per_piece and any(o) and first:
            registers, first = registers + count * max(0, each - 4), False
        elif any((*b, *o, *i)):
            registers += each * (count if per_piece or (any(o) and way.threads_along_k) else 1)
    return registers
