"""The specification of attention: see `codegen.spec`."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.expr import Operand, Program
from codegen.spec import KernelSpec

#: Integers of 64 bits that bounds and ranges load are held between this and its negative: then no sum wraps around.
WIDEST = 1 << 50


@dataclass(frozen=True)
class Bound:
    """A condition on queries and keys that meet: row * i + key * j + start + sum of coefficient * load >= 0.

    i and j are the positions of query and key; ``key`` is 1, 0 or -1.  ``loads`` are pairs of a load of the program, an
    integer that does not depend on both i and j, and its coefficient.  One of 64 bits is the only load of its bound.
    """

    row: int
    key: int
    start: int
    loads: tuple[tuple[int, int], ...] = ()


def held(op: Operand, element: str) -> str:
    """Returns the C expression of an element of a load as an int64 to add up."""
    return (
        f"int64({element})"
        if op.dtype.itemsize < 8
        else f"min(max(int64({element}), -int64({WIDEST})), int64({WIDEST}))"
    )


@dataclass(frozen=True)
class Pages:
    """Where rows of keys or values lie: row j of a batch is row j % size of the block in the table for page j / size.

    table   strides over batch + (page,).
    size    rows of a page, which is a block.
    pages   of a batch.
    blocks  that there are; other numbers in the table are clamped.
    step    elements from one block to the next.
    """

    table: Operand
    size: int
    pages: int
    blocks: int
    step: int


@dataclass(frozen=True)
class ComputedRows:
    """Queries, keys or values that are computed from other tensors instead of being read.

    program   over the space batch + (row,) + elements; its one store, without memory, is an element of a row.
    elements  the sizes of the dimensions in which the elements of a row are counted.
    """

    program: Program
    elements: tuple[int, ...]


@dataclass(frozen=True)
class AttentionSpec(KernelSpec):
    """out[b, i] = sum over j of p[b, i, j] * v[b, j], p being the softmax over j of scale * program(q[b, i] . k[b, j]).

    batch, rows, keys  sizes of the batch dimensions, and the numbers of queries and of keys.
    depth, width       elements of a query or key, and of a value.
    q, k, v            strides over batch + (row or key, element).
    scale              a positive number.
    program            on the products, over the space batch + (rows, keys): its one store is the score, without
                       memory.  A score of minus infinity is no part of the softmax.
    bounds             where one is broken, the score is minus infinity.  Their loads depend on the batch alone.
    ranges             the same, with loads that depend on the query or on the key.
    inside             the program where no bound is broken, and for each of its loads which one of the program's it is.
    within             the same where no bound and no range is broken.
    out                strides over batch + (row, element of a value).
    epilogue           None, or a program on the results, over the space of ``out``, which is the operand of its first
                       store then.
    stats              the logarithm of the sum of the scores' exponentials, strides over batch + (row,); or None.
    sink               the score of one further key, whose value is 0; strides over batch.  Or None.
    zero               whether rows whose scores are all minus infinity are 0; else NaN.
    rounded            whether p may be rounded to the dtype of v.
    weight             None, or a program over the space of scores that is linear in its anchor, an element of p: its
                       one store, without memory, is multiplied with v instead.
    pages              of the keys and of the values, whose strides are then those within a block; or None.
    parts              if more than one, the size of the first batch dimension: each has a part of the keys' tiles.
    computed           for queries, keys and values how they are computed, their operands having no memory; or None.
    order              a counter of tiles of queries that blocks have taken, 4 bytes that are 0 when the kernel is
                       launched, its last argument; or None.  Not all forms use it.
    """

    batch: tuple[int, ...]
    rows: int
    keys: int
    depth: int
    width: int
    q: Operand
    k: Operand
    v: Operand
    scale: float
    program: Program
    bounds: tuple[Bound, ...]
    ranges: tuple[Bound, ...]
    inside: Program
    inside_loads: tuple[int, ...]
    within: Program
    within_loads: tuple[int, ...]
    out: Operand
    stats: Operand | None = None
    sink: Operand | None = None
    zero: bool = True
    rounded: bool = True
    weight: Program | None = None
    epilogue: Program | None = None
    pages: tuple[Pages, Pages] | None = None
    parts: int = 1
    computed: tuple[ComputedRows | None, ComputedRows | None, ComputedRows | None] = (None, None, None)
    order: Operand | None = None

    @property
    def growing(self) -> bool:
        """Whether later queries meet more of the later keys, so that the last queries may meet the most keys."""
        return any(b.key < 0 and b.row > 0 for b in (*self.bounds, *self.ranges))

    @property
    def some_meet_none(self) -> bool:
        """Whether there may be tiles of queries without a tile of keys."""
        return bool(self.bounds) or bool(self.ranges) or self.parts > 1

    @property
    def approximate(self) -> bool:
        """Whether approximate instructions make no visible difference: results are floats of 16 bits or fewer."""
        small = all(op.dtype.is_float and op.dtype.itemsize <= 2 for op in self.results)
        return not self.program.exact and small and self.stats is None

    @property
    def arguments(self) -> tuple[Operand, ...]:
        """Queries, keys, values, tables of pages and the sink: its first arguments, unless they are computed."""
        tables = () if self.pages is None else tuple(p.table for p in self.pages)
        return (self.q, self.k, self.v, *tables, *(() if self.sink is None else (self.sink,)))

    @property
    def read(self) -> tuple[int, ...]:
        """The numbers of those arguments that the kernel has: all that are not computed."""
        every = range(len(self.arguments))
        return tuple(n for n in every if n >= len(self.computed) or self.computed[n] is None)

    @property
    def loads(self) -> tuple[Operand, ...]:
        """What it reads behind these: the tensors that arguments are computed from, and the other programs' loads."""
        first = (op for c in self.computed if c is not None for op in (*c.program.loads, *c.program.tables))
        return (*first, *(op for p in (self.program, self.weight, self.epilogue) if p is not None for op in p.loads))

    @property
    def results(self) -> tuple[Operand, ...]:
        """The operands in which the results are stored."""
        return (self.out,) if self.epilogue is None else tuple(s.operand for s in self.epilogue.stores)

    @property
    def written(self) -> tuple[Operand, ...]:
        return (*self.results, *(() if self.stats is None else (self.stats,)))

    @property
    def empty(self) -> bool:
        """Whether there is nothing to multiply."""
        return 0 in (*self.space, self.depth, self.width)

    @property
    def space(self) -> tuple[int, ...]:
        """Sizes of the program's space."""
        return (*self.batch, self.rows, self.keys)
