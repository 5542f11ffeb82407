"""Tiles of rows that threads bring to shared memory: as they are, converted, or computed on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.computed import Rows, RowsPrologue
from codegen.attention.scores import Scores
from codegen.attention.spec import Pages
from codegen.buffers import SIZES, VECTORS, Edge, every, where
from codegen.expr import Operand
from codegen.iteration import linear, long_enough
from codegen.kernel import Kernel, converted

#: Elements of 16 bytes, if they have 16 bits.
VECTOR = 8
#: The most that a thread reads of a tile at once.
AT_ONCE = 8


@dataclass(frozen=True)
class Source:
    """What the tiles of a buffer, ``tile``, are brought from: ``total`` rows of ``elements`` elements of an operand.

    name      its C name.
    computed  what computes the rows, if they have no memory.
    pages     that the rows lie in, if they do, and the C name of their table.
    """

    tile: str
    operand: Operand
    name: str
    total: int
    elements: int
    computed: RowsPrologue | None = None
    pages: tuple[Pages, str] | None = None


def forward_sources(scores: Scores, names: Sequence[str]) -> tuple[Source, ...]:
    """Returns those of queries, keys and values, given the C names of the arguments."""
    spec = scores.spec
    pages = (None, None, None) if spec.pages is None else (None, *zip(spec.pages, names[3:]))
    totals, elements = (spec.rows, spec.keys, spec.keys), (spec.depth, spec.depth, spec.width)
    each = zip(("queries", "keys", "values"), spec.arguments, names, totals, elements, scores.computed, pages)
    return tuple(Source(*one) for one in each)


def backward_sources(spec: AttentionBackwardSpec, names: Sequence[str]) -> tuple[tuple[Source, Source], ...]:
    """Returns those of what a block holds and of what is brought to it, given the C names of the arguments."""
    a = spec.attention
    totals, elements = (a.rows, a.keys, a.keys, a.rows), (a.depth, a.depth, a.width, a.width)
    each = zip(("queries", "keys", "values", "losses"), spec.arguments, names, totals, elements)
    queries, keys, values, losses = (Source(*one) for one in each)
    sides = (queries, losses), (keys, values)
    return sides if spec.queries else sides[::-1]


def of_vectors(op: Operand, sizes: Sequence[int], elements: int, count: int, page: int = 0) -> bool:
    """Tells whether rows of so many elements are vectors of ``count``; sizes: of the batch and of rows, or pages."""
    steps = [step for n, step in zip(sizes, op.strides) if n > 1]
    aligned = op.strides[-1] == 1 and op.alignment % (count * op.dtype.itemsize) == 0
    return aligned and not any(n % count for n in (elements, *steps, page))


class Tiles:
    """Writes what brings tiles, in vectors of 16 bytes where possible, as elements of a C type."""

    def __init__(self, k: Kernel, scores: Scores, element: str) -> None:
        self.k, self.scores, self.element = k, scores, element

    def fill(self, source: Source, first: str, threads: int, thread: str = "t") -> None:
        """Writes what brings the rows from ``first`` on, by so many threads; what does not exist becomes 0."""
        buffer = self.k.buffers[source.tile]
        to, (size, padded) = f"shared.{source.tile}{'[stage]' if buffer.stages else ''}", buffer.shape
        edge = Edge(source.total, size)
        if source.computed is not None:
            # What becomes of keys that do not exist does not matter.
            exists = edge.inside(f"{first} + r") if source.tile == "values" else ""
            last = source.total - 1 if edge.ragged else None
            where = self.scores.batch, self.scores.t
            rows = Rows(first, last, size, padded, thread, threads, *where, self.element)
            count = source.computed.vector
            source.computed.fill(rows, lambda vector: self._store(to, vector, count, exists))
        elif padded:
            each = self._together(source)
            loop, count = f"for (int i = {thread}; i < {size * padded // each}; i += {threads})", size * padded // each
            # All reads of a thread are to be on their way before the first one arrives.
            opened = self.k.unrolled(loop) if count <= AT_ONCE * threads else self.k.block(loop)
            with opened:
                self._copy(source, to, first, edge, padded, each)

    def _store(self, to: str, vector: str, count: int, exists: str) -> None:
        """Writes the store of ``count`` elements that are computed, zeros where the C condition does not hold."""
        value = where(exists, f"{vector}[e]", f"{self.element}(0)")
        self.k.unrolled_line(f"for (int e = 0; e < {count}; ++e) {to}[r][d + e] = {value};")

    def _together(self, source: Source) -> int:
        """Returns how many neighbours a thread brings at once."""
        size = max(source.operand.dtype.itemsize, SIZES[self.element])
        return self._vector(source, VECTORS // size)

    def _vector(self, source: Source, count: int) -> int:
        """Returns how many neighbours are read at once: so many if rows consist of such vectors, or 1."""
        sizes = (*self.scores.spec.batch, source.total)
        page = 0 if source.pages is None else source.pages[0].step
        return count if of_vectors(source.operand, sizes, source.elements, count, page) else 1

    def _copy(self, source: Source, to: str, first: str, edge: Edge, padded: int, each: int) -> None:
        """Writes the copy of what a thread brings as its ``i``-th."""
        k, pieces, exists = self.k, padded // each, edge.inside("r")
        k.line(f"const {self.scores.t} r = {first} + i / {pieces}, d = i % {pieces}{f' * {each}' if each > 1 else ''};")
        if each == 1:
            value = converted(source.operand, f"{source.name}[{self._place(source, 'r', 'd')}]", self.element)
            k.line(f"{to}[i / {pieces}][d] = {where(exists, value, f'{self.element}(0)')};")
            return
        k.line(f"Vector<{self.element}, {each}> v = {{}};")
        with k.guarded(exists):
            k.line(f"const auto x = load<{each}>({source.name} + {self._place(source, 'r', 'd')});")
            k.unrolled_line(
                f"for (int e = 0; e < {each}; ++e) v[e] = {converted(source.operand, 'x[e]', self.element)};"
            )
        k.line(f"store_shared(&{to}[i / {pieces}][d], v);")

    def _place(self, source: Source, row: str, column: str) -> str:
        """Returns the C expression of an element's place; if rows lie in pages, writes which one this is."""
        terms = self.scores.row_terms(source.operand, source.pages, row, source.total)
        return linear([*terms, (column, source.operand.strides[-1])])


class VectorTiles(Tiles):
    """Writes what brings tiles of elements of 16 bits, 16 bytes at a time where possible, by cp.async.

    ``column`` is the C variable of an element in a row.
    """

    def __init__(self, k: Kernel, scores: Scores, element: str, column: str = "d") -> None:
        super().__init__(k, scores, element)
        self.column = column

    def _store(self, to: str, vector: str, count: int, exists: str) -> None:
        value = f"kept({vector}, {exists})" if exists else vector
        self.k.line(f"store_shared(&{to}[r][d], {value});")

    def _together(self, source: Source) -> int:
        return self._vector(source, VECTOR)

    def _copy(self, source: Source, to: str, first: str, edge: Edge, padded: int, each: int) -> None:
        k, t, d = self.k, self.scores.t, self.column
        pieces, stored = padded // each, source.operand.dtype.ctype
        k.line(f"const int r = i / {pieces}, {d} = i % {pieces}{f' * {each}' if each > 1 else ''};")
        exists = every(edge.inside(f"{first} + r"), Edge(source.elements, padded).inside(d))
        place = self._place(source, f"{t}({first} + r)", long_enough(d, padded, source.operand.strides[-1]))
        to = f"{to}[r][{d}]"
        if stored != self.element:
            k.line(f"Vector<{self.element}, {each}> v = {{}};")
            with k.guarded(exists):
                k.line(f"const auto x = load<{each}>({source.name} + {place});")
                k.unrolled_line(f"for (int e = 0; e < {each}; ++e) v[e] = convert<{self.element}>(x[e]);")
            k.line(f"store_shared(&{to}, v);")
        elif each == 1:
            k.line(f"{to} = {where(exists, f'{source.name}[{place}]', f'{stored}{{}}')};")
        elif exists:
            k.line(f"const bool exists = {exists};")
            k.line(f"copy_async<16>(&{to}, {source.name} + (exists ? {place} : 0), exists ? 16 : 0);")
        else:
            k.line(f"copy_async<16>(&{to}, {source.name} + {place});")
