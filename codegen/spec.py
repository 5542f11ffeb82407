"""Kernel specifications: what a kernel computes, independent of graphs and of how it is scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from codegen.expr import Operand, Program, Reduction
from codegen.iteration import extent
from codegen.records import changed
from codegen.windows import Window

Strides = tuple[int, ...]


@dataclass(frozen=True)
class KernelSpec:
    """What a kernel computes.  Each kernel family has a class of its own."""

    name: str

    @property
    def own_points(self) -> tuple[tuple[int, ...], int] | None:
        """(space, argument of the first load) if threads read loads only at points whose results they write."""
        return None


@dataclass(frozen=True)
class TensorMap:
    """A kernel parameter that describes a tensor to TMA: ``const __grid_constant__ TensorMap``.

    argument   the kernel's argument (the n-th tensor it reads or writes) whose address the map holds.
    offset     bytes from that address to the first element of the map.
    element    C type of an element, as in ``codegen.dtypes``; or "tf32": floats that loads round to tf32.
    sizes      of the dimensions, innermost first, 2 to 5 of them.
    strides    bytes from one index to the next, multiples of 16, of all dimensions but the innermost.
    box        elements of each dimension that one load brings; for im2col, (channels, pixels).
    steps      every ``steps[d]``-th element is taken: the stride of a convolution; 1 for all else.
    swizzle    bytes of the shared-memory swizzle: 0, 32, 64 or 128.
    lower, upper  corners of the box of filter origins over the spatial dimensions, innermost first, for im2col: upper
               is relative to the last element.  None for tiled maps.
    """

    argument: int
    element: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: int
    offset: int = 0
    lower: tuple[int, ...] | None = None
    upper: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Scalar:
    """A kernel parameter that is a number of a C type of integers: a `codegen.sizes.Size` in a kernel for all sizes."""

    ctype: str
    value: int


@dataclass(frozen=True)
class KernelSource:
    """One rendered kernel: CUDA C, and how to launch it.

    name                  the ``extern "C"`` symbol, a C identifier.
    code                  the whole translation unit; includes headers of ``codegen/device`` by name (``#include
                          "types.cuh"``).
    grid, block           launch dimensions (x, y, z).  A grid with a zero means there is nothing to launch.
    dynamic_shared_bytes  dynamic shared memory of a block, in bytes.
    uses_barriers         whether threads of a block depend on each other (barriers, shuffles): CPUs then need fibers.
    parameters            the kernel's parameters: a tensor map, a number, or n for the address of the n-th argument.
                          None: the addresses of all arguments in order.
    cluster               blocks of a cluster (x, y, z); the grid is a multiple of it.
    dependent             whether it may be launched before the previous kernel is done: it waits for that itself.
    zeroed                arguments, and bytes of each from its first on, that the launcher sets to zero before.
    """

    name: str
    code: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared_bytes: int = 0
    uses_barriers: bool = False
    parameters: tuple[int | TensorMap | Scalar, ...] | None = None
    cluster: tuple[int, int, int] = (1, 1, 1)
    dependent: bool = False
    zeroed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class PointwiseSpec(KernelSpec):
    """A program evaluated at every point of a space with sizes ``shape``: operands have a stride for each dimension."""

    shape: tuple[int, ...]
    program: Program

    @property
    def own_points(self) -> tuple[tuple[int, ...], int] | None:
        return self.shape, 0


@dataclass(frozen=True)
class MembersSpec(KernelSpec):
    """A program over several tensors of one dimension each, the members, with ``sizes``: operands have one stride.

    Arguments are, for each operand of the program, those of all members, or one if it is ``shared``.  In a program with
    reductions, these are of parts of ``chunks`` elements of each member, and operands have strides over parts and
    elements: stores (1, 0) for a result of each part, or (0, 1) for one of each element.
    """

    sizes: tuple[int, ...]
    program: Program
    shared: tuple[bool, ...]
    chunks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Walk:
    """Rows that a block walks one after the other, combining their columns meanwhile.

    dims   how many of the last outer dimensions are walked: columns are combined along them.
    chunk  the most rows of a part; there are as few parts as possible.  Which rows belong to a part is up to the
           kernel, so that only what all parts make together may depend on it.
    sums   (n, step): the program's n-th store takes a part of the columns' reduction that is its value, and that
           nothing else uses.  Its strides along the walked dimensions are 0, from part to part ``step`` elements.
    """

    dims: int
    chunk: int
    sums: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Segments:
    """Parts of a row, called segments, that are reduced by themselves as well.

    dims  how many of the last dimensions of a row a segment has.
    sums  the program's stores that take a segment's reduction, which is used for nothing else: their strides along the
          segment's dimensions are 0.
    """

    dims: int
    sums: tuple[int, ...]


@dataclass(frozen=True)
class RowsSpec(KernelSpec):
    """A program with reductions over rows: each is read once if it fits on the chip, and what depends on it is written.

    outer, row  sizes of the dimensions that are kept and of those that are reduced: the program's space is outer + row.
    program     operands that do not vary along a row have strides of 0 there; such a store is done once a row.
    chunk       None, or every ``chunk`` neighbouring elements are a row of their own, the last one what is left: the
                first outer dimension is the part, over which what varies along the row has strides of 0.
    walk        None, or columns are combined as well, in rows that are whole.
    segments    None, or parts of rows are reduced as well, of rows that are whole and not walked.
    """

    outer: tuple[int, ...]
    row: tuple[int, ...]
    program: Program
    chunk: int | None = None
    walk: Walk | None = None
    segments: Segments | None = None

    @property
    def own_points(self) -> tuple[tuple[int, ...], int] | None:
        return ((*self.outer, *self.row), 0) if self.walk is None and self.segments is None else None


@dataclass(frozen=True)
class PoolSpec(KernelSpec):
    """A program with reductions over windows: every window is folded, and what depends on it is written.

    outer    sizes of the result's dimensions: an element for each window.
    windows  (dimension, window): which elements a window holds along a dimension; they are folded in row-major order.
    program  its space is outer, then the elements along each window.  Operands read for every element of a window have
             strides over these, and of 0 along the window's own dimension unless each window reads elements of its own.
    """

    outer: tuple[int, ...]
    windows: tuple[tuple[int, Window], ...]
    program: Program


@dataclass(frozen=True)
class Limit:
    """A number that depends on coordinates, and a bound: 0 <= b . batch + o . outer + i . inner + start < size.

    It has one step for each batch, outer (row or column) and reduction dimension; none for those it cannot depend on.
    """

    batch: tuple[int, ...]
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    start: int
    size: int

    def ends(self, batch: Sequence[int], outer: Sequence[int], inner: Sequence[int]) -> tuple[int, int]:
        """Returns the least and the largest value of the number over dimensions of these sizes, none of them 0."""
        every = [*zip(self.batch, batch), *zip(self.outer, outer), *zip(self.inner, inner)]
        reach = [step * (size - 1) for step, size in every]
        return self.start + sum(min(r, 0) for r in reach), self.start + sum(max(r, 0) for r in reach)


@dataclass(frozen=True)
class Image:
    """A contraction's operand A in terms of a convolution: windows that slide over an image.

    Rows are (image, *positions), the reduction is (channels, *taps); ``across`` has them the other way round: rows are
    (*taps, channels), the reduction is (images, *positions).  Tap t of the window at position p lies at p * stride + t
    * dilation - before + b . shifts, b being the batch coordinates, and is 0 outside of the image.

    sizes, steps              of the image's spatial dimensions: elements, and elements from one to the next.
    stride, dilation, before  of the window in each; before is the padding in front, negative if it starts inside.
    shifts                    for each spatial dimension how far every batch dimension moves the window; () for not.
    """

    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    shifts: tuple[tuple[int, ...], ...] = ()
    across: bool = False


@dataclass(frozen=True)
class Gather:
    """How a contraction reads one of its two operands.

    The element for batch b, outer coordinates o (rows for operand A, columns for operand B) and reduction coordinates i
    lies at ``b . batch + o . outer + i . inner + start`` (elements), and is 0 where a limit is broken.  ``image``
    describes a convolution's input in its own terms.

    With a ``program`` (the prologue) an element is not read but computed, where no limit is broken: the program's one
    store is to ``operand``, which has the dtype in which the element is multiplied and no memory.  The program's space
    is (batch, outer, inner); ``starts`` are the starts of its loads, then of its indices.  The operand's own steps are
    then those of the largest tensor that is read.
    """

    operand: Operand
    batch: tuple[int, ...]
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    start: int = 0
    limits: tuple[Limit, ...] = ()
    image: Image | None = None
    program: Program | None = None
    starts: tuple[int, ...] = ()

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors that are read."""
        return (self.operand,) if self.program is None else self.program.loads

    def steps(self) -> tuple[list[Strides], list[Strides], list[Strides]]:
        """Returns steps over batch, outer and inner dimensions: the operand's own, the program's, and the limits'."""
        nb, no = len(self.batch), len(self.outer)
        every = [] if self.program is None else [*(op.strides for op in self.program.loads), *self.program.indices]
        return (
            [self.batch, *(s[:nb] for s in every), *(x.batch for x in self.limits)],
            [self.outer, *(s[nb : nb + no] for s in every), *(x.outer for x in self.limits)],
            [self.inner, *(s[nb + no :] for s in every), *(x.inner for x in self.limits)],
        )

    def reaches(self, batch: Strides, outer: Strides, inner: Strides) -> list[int]:
        """Returns a bound on the offsets of every tensor that is read, over dimensions of these sizes."""
        every = zip(*self.steps(), (self.start, *self.starts))
        return [extent((*batch, *outer, *inner), (*b, *o, *i)) + abs(start) for b, o, i, start in every]

    def stepped(self, batch: Sequence[Strides], outer: Sequence[Strides], inner: Sequence[Strides]) -> Gather:
        """Returns the same gather over other dimensions, whose steps are given in the order of `steps`."""
        count, program = len(self.starts), self.program
        if program is not None:
            new = [x + y + z for x, y, z in zip(batch[1:], outer[1:], inner[1:])]
            loads = tuple(changed(op, strides=s) for op, s in zip(program.loads, new))
            program = changed(program, loads=loads, indices=tuple(new[len(loads) : count]))
        bounds = zip(self.limits, batch[1 + count :], outer[1 + count :], inner[1 + count :])
        limits = tuple(changed(x, batch=b, outer=o, inner=i) for x, b, o, i in bounds)
        return changed(self, batch=batch[0], outer=outer[0], inner=inner[0], limits=limits, program=program)


@dataclass(frozen=True)
class Partial:
    """A reduction of parts of a contraction's results, besides the program's outputs: every ``chunk`` neighbouring rows
    (or columns) are combined, the last chunk having what is left.

    reduction  how values are combined, and which value of the program.
    rows       whether rows are combined, else columns.
    chunk      how many: a multiple of 16; tiles are multiples of it.
    places     sizes of the dimensions in which the chunks of rows lie, or the rows if columns are combined.
    operand    where they are stored: strides over batch + places + columns, or chunks of columns.
    """

    reduction: Reduction
    rows: bool
    chunk: int
    places: tuple[int, ...]
    operand: Operand


@dataclass(frozen=True)
class ContractionSpec(KernelSpec):
    """A sum of products: result[b, m, n] = sum over k of a[b, m, k] * b[b, n, k], then a program on every result.

    batch, m, n, k  sizes of the batch, row, column and reduction dimensions.
    others                    of further operands B what stands for each tensor that b is read from, or computed of, and
                              lies as that does: each B makes a result of its own with a, and the program sees them
                              all (``Anchor(0)`` is that of b).
    accumulate                C type of the sum: float, double, uint32 or uint64 (integers wrap around).
    result                    C type in which the program sees the sum (its anchor value).
    program                   over the space batch + rows + cols.
    tf32                      whether float32 operands may be rounded to tf32 (11 significant bits) for tensor cores.
    bf16x6                    whether float32 products may be made of six products of bfloat16 on tensor cores.
    fast_fp8                  whether sums of fp8 products may have the precision of tensor cores, below float32.
    factored                  whether operands that are 8-bit floats times factors may be multiplied as these, and sums
                              by the factors: the operands are then not rounded to their dtypes.
    terms                     limits on batch and reduction: where one is broken, operands have no elements.
    partials                  reductions of parts of the results.
    metadata                  None, or operand A has two of every four neighbours along k, which are stored one after
                              another: a's steps are those of the values that are stored.  The metadata are words of 32
                              bits (stages of 64 terms, blocks of 64 rows, 128 threads) as wgmma takes them.
    totals                    sums over k, in float32, of elements that are computed of each row as those of a are: the
                              program sees a row's behind its sums of products (``Anchor(products)`` on).  They are over
                              two dimensions: all rows, and all of k.
    results                   () if the program's row coordinates are the rows' own; else one for each, a limit on batch
                              and rows: the number is the coordinate, and where one is broken there is no result.
    """

    batch: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    a: Gather
    b: Gather
    accumulate: str
    result: str
    program: Program
    tf32: bool = False
    bf16x6: bool = False
    fast_fp8: bool = False
    factored: bool = False
    terms: tuple[Limit, ...] = ()
    results: tuple[Limit, ...] = ()
    others: tuple[Operand, ...] = ()
    totals: tuple[Gather, ...] = ()
    partials: tuple[Partial, ...] = ()
    metadata: Operand | None = None

    @property
    def row_chunk(self) -> int:
        """What the rows of a tile must be a multiple of, for chunks of rows to lie in one tile."""
        return max((x.chunk for x in self.partials if x.rows), default=1)

    @property
    def col_chunk(self) -> int:
        """What the columns of a tile must be a multiple of, for chunks of columns to lie in one tile."""
        return max((x.chunk for x in self.partials if not x.rows), default=1)

    @property
    def arguments(self) -> tuple[Operand, ...]:
        """What the operands are read or computed from: the kernel's first arguments."""
        last = () if self.metadata is None else (self.metadata,)
        totals = [op for total in self.totals for op in total.operands]
        return (*self.a.operands, *self.b.operands, *self.others, *last, *totals)

    @property
    def products(self) -> int:
        """How many products share operand A: results at each place, each with an operand B of its own."""
        return 1 + len(self.others) // len(self.b.operands) if self.others else 1

    @property
    def sums(self) -> str:
        """What the heading of a kernel says of the results: how many, and of how many products."""
        batch, m, n, k = (prod(sizes) for sizes in (self.batch, self.m, self.n, self.k))
        times = f"{self.products} times " if self.products > 1 else ""
        return f"{times}{f'{batch} x ' if batch > 1 else ''}{m} x {n} sums of {k} products"

    @property
    def space(self) -> tuple[int, ...]:
        """Sizes of the program's space."""
        rows = tuple(x.size for x in self.results) or self.m
        return (*self.batch, *rows, *self.n)

    @property
    def own_points(self) -> tuple[tuple[int, ...], int] | None:
        return None if self.partials else (self.space, len(self.arguments))
