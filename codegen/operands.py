"""The operands of a contraction as the Hopper kernels see them, tile by tile: what brings each, and from where."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from codegen.buffers import SIZES, SWIZZLED, Buffer
from codegen.records import changed
from codegen.sizes import smaller
from codegen.spec import Gather, Image, TensorMap
from codegen.tensor_map import ELEMENT_BYTES
from codegen.tile_path import ELEMENTS, TilePath

ROW_BYTES = 128
LEAST_SWIZZLE = 32  # bytes of a row
#: The share of the full load rate that a panel of so many bytes reaches.
PANEL_RATE = {128: 1.0, 64: 0.9, 32: 0.7, 16: 0.4}
#: Bytes of a row that a wgmma multiplies.
STEP_BYTES = 32
#: Elements of the reduction in a stage, and in a fragment.
PANEL, STEP = 64, 16


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def panel_size(size: int, itemsize: int) -> int:
    """Returns how many rows or columns a panel across the reduction has: their 128, 64 or 32 bytes are neighbours."""
    return gcd(size, ROW_BYTES // itemsize)


def tile_of(
    name: str, ctype: str, along_k: bool, size: int, panels: int, panel: int, stages: int, width: int = 0
) -> Buffer:
    """Returns the stages of a tile of so many rows or columns, in panels along the reduction or across it.

    Those across have ``width`` rows or columns, or if that is 0 as many as fit.
    """
    across = width or panel_size(size, SIZES[ctype])
    along = (panels, size, panel) if panels > 1 else (size, panel)
    shape = along if along_k else (size // across, panel, across)
    return Buffer(name, ctype, shape, stages, align=SWIZZLED, note=f"tiles of {{{name}}}: stages first, rows swizzled")


@dataclass(frozen=True)
class ReductionPanels:
    """How the reduction is walked.

    taps      sizes of its dimensions except the channels, outermost first.
    channels  size of the dimension in which panels lie.
    panel     channels of a panel; ``per_stage`` panels of a stage.
    skips     where a batch is a phase with taps of its own: for every dimension of taps how many of the first ones it
              does not have, a C expression with the placeholders {b0}, ... (its coordinates).  Else ().
    share     the share of the taps that a batch has on average.
    step      where batches are parts of one reduction: channels from one to the next.
    idle      the C condition, with the same placeholders, under which a phase has no taps at all; empty if all have.
    row       bytes of a row of a stage, of each part of its elements.
    sparse    whether operand A has two of every four terms: a stage of it has half of the elements.
    """

    taps: tuple[int, ...]
    channels: int
    panel: int
    per_stage: int
    skips: tuple[str, ...] = ()
    share: float = 1.0
    step: int = 0
    idle: str = ""
    row: int = ROW_BYTES
    sparse: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a tile, or of each of its parts."""
        return self.row // (self.panel * self.per_stage)

    @property
    def steps(self) -> int:
        """How many wgmma it takes to multiply a stage."""
        return self.row // (STEP_BYTES * (1 + self.sparse))

    @property
    def chunks(self) -> int:
        """How many panels a tap has."""
        return -(-self.channels // self.panel)

    @property
    def panels(self) -> int:
        return prod(self.taps) * self.chunks

    @property
    def stages(self) -> int:
        """How many stages the whole reduction takes."""
        return -(-self.panels // self.per_stage)


@dataclass(frozen=True)
class MappedOperand:
    """One operand: its tensor map (box and swizzle still to be filled in) and the coordinates of a tile.

    along_k   whether a row of the tile in shared memory runs along the reduction (else along rows or columns of the
              result: the transposed layout of wgmma).
    terms     one C expression for each dimension of the map, innermost first, with the placeholders {c} (channel),
              {t0}, {t1}, ... (taps), {o} (row or column) and {b0}, ... (batch).
    offsets   for im2col: the C expressions of the tap's offsets, innermost first.
    pixels    for im2col stored across the reduction (backward to the filter): sizes of (images, *output positions),
              whose coordinates are {p0}, {p1}, ...; the taps are then those of a panel of rows.
    taps      for the same: the sizes of (*taps, panels of channels), over which panels of rows are numbered.
    width     for the same: the channels of a panel; 0 for what is no image across the reduction.
    """

    map: TensorMap
    along_k: bool
    terms: tuple[str, ...]
    offsets: tuple[str, ...] = ()
    pixels: tuple[int, ...] = ()
    taps: tuple[int, ...] = ()
    width: int = 0

    @property
    def im2col(self) -> bool:
        return self.map.lower is not None

    def lines(self, size: int, total: int) -> int:
        """Returns how many rows or columns a copy brings of a tile of ``size``, if there are ``total``.

        Those beyond the last are not written, in units of 8, after which the swizzle repeats: of a product with few
        rows that is most of a tile of 64.  They only make sums that nobody reads.
        """
        return smaller(size, round_up(total, 8)) if self.along_k else size

    def boxed(self, inner: int, outer: int, element: str = "") -> TensorMap:
        """Returns the tensor map with the box of a load: ``inner`` elements along its first dimension, and ``outer``
        rows, columns, channels or pixels.  They may be brought as another ``element``.
        """
        others = [outer] if self.im2col else [outer if "{o}" in x or "{c}" in x else 1 for x in self.terms[1:]]
        width = inner * ELEMENT_BYTES[self.map.element]
        swizzle = width if width >= LEAST_SWIZZLE else 0
        return changed(self.map, element=element or self.map.element, box=(inner, *others), swizzle=swizzle)


@dataclass(frozen=True)
class Gathered:
    """The windows of an image, fetched 16 bytes at a time by the producer's threads.

    The reduction is flat, (*taps, channels), so that few channels do not waste the rows of a tile.

    rows, taps, channels  sizes of (image, *output positions), of the filter, and channels of a group.
    image                 the image; ``steps`` elements from one image, and from one group, to the next.
    """

    rows: tuple[int, ...]
    taps: tuple[int, ...]
    channels: int
    image: Image
    steps: tuple[int, int]

    @property
    def along_k(self) -> bool:
        """As in `MappedOperand`."""
        return True


@dataclass(frozen=True)
class Brought:
    """A tensor of which TMA brings one tile per stage, or with ``row`` one row for all rows of the operand.

    load   its number among those that the operand is computed from.
    ctype  C type of its elements.
    """

    load: int
    side: MappedOperand
    ctype: str
    row: bool

    @property
    def itemsize(self) -> int:
        return SIZES[self.ctype]

    @property
    def panel(self) -> int:
        """Elements of a row of the tile in shared memory."""
        return PANEL if self.row else min(PANEL, ROW_BYTES // self.itemsize)

    @property
    def panels(self) -> int:
        """How many parts a stage's elements come in."""
        return 1 if not self.side.along_k else PANEL // self.panel

    @property
    def width(self) -> int:
        """Bytes of a row of the tile in shared memory; its swizzle is as wide."""
        return self.panel * self.itemsize

    def bytes(self, rows: int) -> int:
        """Returns how many bytes TMA brings to a stage."""
        return PANEL * self.itemsize * (1 if self.row else rows)

    def tile(self, rows: int, stages: int) -> Buffer:
        """Returns its stages in shared memory."""
        name = f"in{self.load}"
        if not self.row:
            return tile_of(name, self.ctype, self.side.along_k, rows, self.panels, self.panel, stages)
        shape = (max(PANEL, ROW_BYTES // self.itemsize),)
        return Buffer(name, self.ctype, shape, stages, align=ROW_BYTES, note=f"of {{{name}}}: one for all rows")

    def boxed(self, rows: int) -> TensorMap:
        """Returns the tensor map with the box that one load brings."""
        along = (self.panel, rows) if self.side.along_k else (ROW_BYTES // self.itemsize, PANEL)
        made = changed(self.side.boxed(*along), argument=self.load)
        return changed(made, swizzle=0) if self.row else made


@dataclass(frozen=True)
class ComputedOperand:
    """An operand that is computed in registers: ``gather`` over the dimensions that tiles see, always with a program.

    product             the type in which it is multiplied.
    batch, rows, inner  sizes of gather's dimensions.
    brought             what TMA brings.  Every other tensor has one element per row, or one for all.
    pairs               whether the program is one on pairs of elements (`codegen.packed`).
    """

    gather: Gather
    product: str
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    inner: tuple[int, ...]
    brought: tuple[Brought, ...]
    pairs: bool

    @property
    def element(self) -> str:
        """C type of an element as it is multiplied."""
        return ELEMENTS[self.product][0]


@dataclass(frozen=True)
class OperandTiles:
    """Both operands of a contraction, tile by tile: ``batch``, rows and cols are the spec's as the tiles see them.

    Threads fill the tiles of a `TilePath` (`codegen.filled_tiles`); consumers compute a `ComputedOperand`.  metadata
    are the words of a sparse operand A, 128 for 64 rows of a stage.
    """

    batch: tuple[int, ...]
    rows: int
    cols: int
    reduction: ReductionPanels
    a: MappedOperand | Gathered | TilePath | ComputedOperand
    b: MappedOperand | TilePath
    metadata: MappedOperand | None = None
