"""Queries, keys or values that are computed while they are brought to shared memory.

Threads read the tensors that they are computed from, a vector of neighbouring elements at a time, and store the result
where a copy would have put it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from codegen.attention.spec import ComputedRows
from codegen.expr import Index, Operand, Pointer, TableRead
from codegen.iteration import coordinate, linear, long_enough, packed
from codegen.naming import Names, Writer
from codegen.pointwise.body import Elements, kept_type, packs, plus
from codegen.pointwise.schedule import aligned
from codegen.pointwise.tables import ahead
from codegen.sizes import below

#: Most bytes of a vector of results, and vectors that a thread has in flight.
MOST_BYTES, IN_FLIGHT = 16, 4
#: Most bytes, and most vectors, of results that a thread keeps in registers; bytes of a line of the L2 cache.
MOST_HELD, MOST_ROUNDS, LINE = 256, 16, 128


#: Writes the store of a vector, by its C expression, at (r, d).
Store: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class Rows:
    """A tile of rows.

    first    the C expression of its first row.
    last     the C expression of the last of all rows, which stands for those behind it; None if there are none.
    size     rows of the tile.
    padded   elements of its rows, 0 behind their own.
    thread   the C expression of a thread's number, out of ``threads``.
    batch    C expressions of the coordinates of the batch.
    itype    the C type of coordinates.
    element  the C type of what is stored.
    """

    first: str
    last: int | None
    size: int
    padded: int
    thread: str
    threads: int
    batch: Sequence[str]
    itype: str
    element: str

    def row(self, number: str) -> str:
        """Returns the C expression of a row by its number in the tile."""
        text = f"{self.first} + {number}"
        return text if self.last is None else f"min({self.itype}({text}), {self.itype}({self.last}))"


class RowsPrologue(Elements):
    """Writes the tiles of one operand.

    reads   the number of tensors that it is computed from: the first of its parameters.
    vector  elements that a thread makes at a time.
    """

    def __init__(self, w: Writer, rows: ComputedRows, names: Names) -> None:
        super().__init__(w, rows.program, names)
        self.reads = len(rows.program.loads) + len(rows.program.tables)
        self.dtype = rows.program.stores[0].operand.dtype
        self._sizes, self._depth = rows.elements, prod(rows.elements)
        last = self._sizes[-1]
        fits = [n for n in (16, 8, 4, 2, 1) if n * self.dtype.itemsize <= MOST_BYTES and self._depth % n == 0]
        # A vector is a part of the last dimension, or several times all of it.
        self.vector = next(n for n in fits if last % n == 0 or (n % last == 0 and self._sizes[-2] % (n // last) == 0))

    def fill(self, tile: Rows, store: Store) -> None:
        """Writes the code that computes a tile."""
        w = self.w
        w.line(f"#pragma unroll {IN_FLIGHT}")
        with w.block(f"for (int i = {tile.thread}; i < {tile.size * self._pieces(tile)}; i += {tile.threads})"):
            name = self._piece(tile)
            store(name)

    def hold(self, tile: Rows) -> str | None:
        """Writes the code that computes a thread's vectors of a tile and keeps them in registers.

        Returns their C name, or None, having written nothing, if there are too many.
        """
        w, count = self.w, self._rounds(tile)
        if count * self.vector * self.dtype.itemsize > MOST_HELD or count > MOST_ROUNDS:
            return None
        held = self.names.unique(self.program.stores[0].operand.name, "_held")
        w.line(f"Vector<{tile.element}, {self.vector}> {held}[{count}];")
        with w.unrolled(f"for (int u = 0; u < {count}; ++u)"):
            w.line(f"const int i = {tile.thread} + u * {tile.threads};")
            w.line(f"{held}[u] = {self._piece(tile)};")
        return held

    def put(self, tile: Rows, held: str, store: Store) -> None:
        """Writes the stores of the vectors that `hold` has computed."""
        w = self.w
        with w.unrolled(f"for (int u = 0; u < {self._rounds(tile)}; ++u)"):
            w.line(f"const int i = {tile.thread} + u * {tile.threads};")
            self._place(tile)
            store(f"{held}[u]")

    def prefetch(self, tile: Rows) -> None:
        """Writes prefetches into the L2 cache of the tensors a tile is computed from, where its rows are contiguous."""
        w = self.w
        for op, pointer, strides, start in self._read():
            steps = [step for text, step in zip((*tile.batch, "m"), strides) if text != "0"]
            if not all(steps) or not self._dense(strides) or not below(-1, start):
                continue
            each = LINE // op.dtype.itemsize
            lines = -(-self._depth // each)
            with w.block(f"for (int i = {tile.thread}; i < {tile.size * lines}; i += {tile.threads})"):
                w.line(f"const {tile.itype} m = {tile.row(f'i / {lines}' if lines > 1 else 'i')};")
                within = [(f"i % {lines}", each)] if lines > 1 else []
                w.line(f"prefetch({plus(pointer, linear([*zip((*tile.batch, 'm'), strides), *within], start))});")
            return

    def _read(self) -> Iterator[tuple[Operand, str, Sequence[int], int]]:
        """Yields what is read at places given by coordinates: operand, C name, strides over the space, first place."""
        program = self.program
        for n in self.varying_loads():
            yield program.loads[n], self.pointers.loads[n], program.loads[n].strides, 0
        for read in program.instructions:
            if isinstance(read, TableRead) and read.indexed and len(read.multiples) == 1:
                pointer, index = read.args[:2]
                assert isinstance(pointer, Pointer)
                assert isinstance(index, Index)
                table, name = program.tables[pointer.table], self.pointers.tables[pointer.table]
                yield table, name, program.indices[index.index], read.multiples[0]

    def _dense(self, strides: Sequence[int]) -> bool:
        """Tells whether the elements of a row are neighbours, as far as the strides tell them apart."""
        own = strides[len(strides) - len(self._sizes) :]
        return all(step in (0, whole) for step, whole in zip(own, packed(self._sizes)))

    def _pieces(self, tile: Rows) -> int:
        """Returns the number of vectors in a row."""
        return -(-tile.padded // self.vector)

    def _rounds(self, tile: Rows) -> int:
        """Returns the number of vectors that a thread computes."""
        rounds, left = divmod(tile.size * self._pieces(tile), tile.threads)
        assert not left
        return rounds

    def _place(self, tile: Rows) -> None:
        """Writes the row and the first element of the i-th vector."""
        count, pieces = self.vector, self._pieces(tile)
        self.w.line(f"const int r = i / {pieces}, d = i % {pieces}{f' * {count}' if count > 1 else ''};")

    def _piece(self, tile: Rows) -> str:
        """Writes the i-th vector; returns its C name."""
        w, count = self.w, self.vector
        name = self.names.unique(self.program.stores[0].operand.name, "_v")
        self._place(tile)
        w.line(f"const {tile.itype} m = {tile.row('r')};")
        partial = self._pieces(tile) * count != self._depth
        w.line(f"Vector<{tile.element}, {count}> {name}{' = {}' if partial else ''};")
        with w.block(f"if (d < {self._depth})", when=partial):
            self._vector(name, [*tile.batch, "m"], tile.element)
        return name

    def _vector(self, name: str, outer: Sequence[str], element: str) -> None:
        """Writes the elements from d on of a row with the coordinates ``outer``."""
        w, count, sizes = self.w, self.vector, self._sizes
        inner = []
        for k in range(len(sizes)):
            text = coordinate("d", sizes, k)
            if len(sizes) > 1:
                w.line(f"const int d{k} = {text};")
                text = f"d{k}"
            inner.append(text)

        def at(strides: Sequence[int]) -> str:
            elements = (long_enough(x, size, step) for x, size, step in zip(inner, sizes, strides[len(outer) :]))
            return linear(list(zip((*outer, *elements), strides)))

        def each(strides: Sequence[int]) -> str:
            return "" if count == 1 else self._along(strides)

        loaded: dict[int, str] = {}
        same: dict[int, str] = {}
        for n in self.varying_loads():
            op, pointer, register = self.program.loads[n], self.pointers.loads[n], self.register(n)
            place, step = at(op.strides), each(op.strides)
            if step and self._wide(op):
                load = "load_packed" if packs(op, count, True) else "load"
                w.line(f"const {kept_type(op, count, True)} {register} = {load}<{count}>({plus(pointer, place)});")
                loaded[n] = f"{register}[e]"
            elif step:
                loaded[n] = f"{pointer}[{' + '.join(t for t in (place, step) if t != '0')}]"
            else:
                w.line(f"const {op.dtype.ctype} {register} = {pointer}[{place}];")
                loaded[n] = same[n] = register
        positions = [at(strides) for strides in self.program.indices]
        done = ahead(self.program, sizes, count)
        if done.reads:
            self.ahead(done, count, same, positions, packed=True)
        steps = [each(strides) for strides in self.program.indices]
        indices = [" + ".join(t for t in pair if t not in ("", "0")) or "0" for pair in zip(positions, steps)]
        with w.unrolled(f"for (int e = 0; e < {count}; ++e)", when=count > 1):
            (text,) = self.element(loaded, indices)
            text = text if self.dtype.ctype == element else f"convert<{element}>({text})"
            w.line(f"{name}[{'e' if count > 1 else '0'}] = {text};")

    def _along(self, strides: Sequence[int]) -> str:
        """Returns how far the e-th element of a vector lies behind the first; "" if all lie at one place."""
        last = self._sizes[-1]
        if self.vector <= last or strides[-2] == strides[-1] * last:
            text = linear([(long_enough("e", self.vector, strides[-1]), strides[-1])])
        else:
            parts = zip((f"(e / {last})", f"e % {last}"), strides[-2:])
            text = linear([(long_enough(x, self.vector, n), n) for x, n in parts])
        return "" if text == "0" else text

    def _wide(self, op: Operand) -> bool:
        """Tells whether a vector's elements are one access."""
        outer = op.strides[:-1] if self.vector <= self._sizes[-1] else op.strides[:-2]
        width = min(16, self.vector * op.dtype.itemsize)
        return self._along(op.strides) == "e" and aligned(op, width, outer)
