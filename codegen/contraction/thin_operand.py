"""An operand of a product with a thin one: how lanes read pieces of it, and the words that they multiply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from codegen.buffers import VECTORS, Buffer, Edge
from codegen.codes import Code
from codegen.contraction.thin_pieces import RUN, Piece, aligned, piece_sizes, runs
from codegen.declined import Declined
from codegen.dtypes import ALL
from codegen.expr import Value
from codegen.iteration import collapse, coordinate, linear, split
from codegen.kernel import Kernel
from codegen.prologue import Prologue, Source
from codegen.sizes import most
from codegen.tile_path import PIECE, TilePath

#: The C types of codes (`codegen/device/codes.cuh`).
_CODES = {"int8": "Int8Codes", "uint8": "Uint8Codes", "int4": "Int4Codes", "uint4": "Uint4Codes"}
_CODES |= {"float4_e2m1": "Float4Codes"} | {
    t.name: f"Float8Codes<{t.ctype}>" for t in ALL if t.name.startswith("float8")
}
#: Words of a row that are multiplied at a time: a run of terms, however these are ordered.
WORDS = 4
#: Bytes of the large operand that a block asks the L2 cache for before it begins, and those of a line.
AHEAD, LINE = 48 << 10, 128


class ThinOperand:
    """Writes how lanes read pieces of an operand, and what they make of them.

    codes  by load what is decoded from vectors of bytes, where the program computes pairs; None where it does not.
    apart  how far apart the elements of a pair are: the order of terms in a piece, on which both operands agree.
    slots  of how many of a lane's pieces there is room for what is read at a time.
    lines  rows (or columns) that a lane reads, 8 apart.
    total  all of them.
    """

    def __init__(
        self,
        w: Kernel,
        t: str,
        way: TilePath,
        prologue: Prologue,
        codes: Mapping[int, Code] | None,
        apart: int,
        pieces: int,
        slots: int,
        piece: int,
        lines: int,
        total: int,
    ) -> None:
        self.w, self.t, self.way, self.prologue, self.codes = w, t, way, prologue, codes
        self.piece, self.lines, self.total, self.label = piece, lines, total, prologue.label
        self.apart, self.pieces, self.slots = apart, pieces, slots
        sizes = piece_sizes(way.inner, piece)
        assert sizes is not None
        self.sizes = sizes
        self.at = "[i]" if lines > 1 else ""

    # ---- what is read

    def geometry(self, source: Source) -> Piece:
        """Returns where the elements of a piece lie in a source."""
        inner = self.prologue.place(source).inner
        return Piece(self.sizes, inner[len(inner) - len(self.sizes) :])

    def fixed(self, source: Source) -> bool:
        """Tells whether a source stays the same over the reduction."""
        return self.way.gather.program is not None and not any(self.prologue.place(source).inner)

    def single(self, source: Source) -> bool:
        """Tells whether the elements of a piece are all one, or follow from one position."""
        return not source.pointer or not any(self.geometry(source).steps)

    def wide(self, source: Source) -> bool:
        """Tells whether a piece is a vector in memory."""
        piece = self.geometry(source)
        return piece.dense and bool(source.pointer) and aligned(self.way, self._number(source), piece)

    def _number(self, source: Source) -> int:
        """Returns the number of a source among the tensors that are read."""
        return 0 if self.way.gather.program is None else source.value.operand  # type: ignore[union-attr]

    def held(self, source: Source) -> str:
        """Returns the C type of what is read for a piece."""
        if self.single(source):
            return source.ctype
        count = self.geometry(source).reach if self.wide(source) else self.piece
        packed = self.wide(source) and source.itemsize <= 2 and source.itemsize * count >= 4
        return f"{'Packed' if packed else 'Vector'}<{source.ctype}, {count}>"

    def known(self, source: Source) -> bool:
        """Tells whether a source is a position within a piece, the same in all pieces."""
        place, covered = self.prologue.place(source), len(self.sizes) - 1
        others = (*place.batch, *place.outer, *place.inner[: len(place.inner) - covered])
        return not source.pointer and not any(others)

    @property
    def flying(self) -> list[Source]:
        """The sources that are read along the reduction."""
        return [source for source in self.prologue.sources if not self.fixed(source) and not self.known(source)]

    def _piece(self, source: Source, i: str) -> str:
        """Returns the C expression of piece ``c`` of row ``i`` of a source, of those that a lane has."""
        whole = "c" if self.slots == self.pieces else f"c % {self.slots}"
        return f"read.{source.name}{source.of}[{i}][{whole if self.slots > 1 else '0'}]"

    def prepare(self, first: str) -> None:
        """Writes where the lane's rows begin, and what stays the same over the reduction."""
        w, p, many = self.w, self.label, self.lines > 1
        fixed = [source for source in self.prologue.sources if self.fixed(source) and not self.known(source)]
        with w.scope():
            if many:
                w.line(f"{self.t} {', '.join(f'{name}[{self.lines}]' for name, _ in self.prologue.starts)};")
                for source in fixed:
                    w.line(f"{source.ctype} {source.next}[{self.lines}];")
            place = linear([(first, 1), (w.each("i", self.lines), 8)])
            if Edge(self.total, 8 * self.lines).ragged:  # past the end the last one is read again
                place = f"min({self.t}({place}), {self.t}({self.total - 1}))"
            name = "line" if many else f"{p}_line"
            w.line(f"const {self.t} {name} = {place};")
            outer = split(w, self.t, f"{name}_", name, self.way.outer, self.way.gather.steps()[1])
            sizes = self.way.batch
            coords = [coordinate("batch", sizes, d) if prod(sizes) > 1 else "0" for d in range(len(sizes))]
            self.prologue.begin(self.t, self.at, coords, outer)
            for source in fixed:
                start, _ = self.prologue.start(source, self.at)
                text = f"{source.pointer}[{start}]" if source.pointer else f"int32({start})"
                w.line(f"{'' if many else f'const {source.ctype} '}{source.next}{self.at} = {text};")

    def declare(self) -> None:
        """Declares what a lane has read of its pieces."""
        for source in self.flying:
            if not source.of or not source.product:
                of = f"[{self.prologue.products}]" if source.of else ""
                self.w.line(f"{self.held(source)} {source.name}{of}[{self.lines}][{self.slots}];")

    def fetch(self, inside: str) -> None:
        """Writes the reads of piece ``c`` of all rows, from term ``k0`` on; zeros unless it is ``inside``."""
        w = self.w
        with w.scope():
            i = w.each("i", self.lines)
            for source in self.flying:
                self._read(source, self._piece(source, i), self._terms(source), inside)

    def _terms(self, source: Source) -> list[tuple[str, int]]:
        """Returns where a piece from term ``k0`` on lies, as C expressions with their factors."""
        covered = len(self.sizes) - 1  # dimensions that a piece has all of: it begins at their first element
        inner = self.prologue.place(source).inner
        along = (*inner[: len(inner) - covered], *(0,) * covered)
        sizes, (steps,) = collapse(self.way.inner, [along], range(len(along)))
        terms = [(f"{self.t}({coordinate('k0', sizes, d)})", step) for d, step in enumerate(steps) if step]
        return [self.prologue.start(source, self.at), *terms]

    def _read(self, source: Source, to: str, terms: Sequence[tuple[str, int]], inside: str) -> None:
        w, at = self.w, linear(terms)
        if not source.pointer:
            w.line(f"{to} = int32({at});")
            return
        zeros = f"{self.held(source)}{{}}"
        if self.single(source):
            value = f"{source.pointer}[{at}]"
        elif self.wide(source):
            load = "load_packed" if self.held(source).startswith("Packed") else "load"
            value = f"{load}<{self.geometry(source).reach}>({source.pointer} + ({at}))"
        else:
            element = linear([*terms, (f"({self.geometry(source).offset('e')})", 1)])
            value = f"{source.pointer}[{element}]"
            value = f"{inside} ? {value} : {source.ctype}{{}}" if inside else value
            w.unrolled_line(f"for (int e = 0; e < {self.piece}; ++e) {to}[e] = {value};")
            return
        w.line(f"{to} = {f'{inside} ? {value} : {zeros}' if inside else value};")

    # ---- by way of shared memory

    def rings(self, threads: int) -> list[Buffer]:
        """Returns what a block has in shared memory of pieces on their way: what a thread copies is for it alone.

        Raises Declined unless pieces are whole copies.
        """
        found = []
        for number, source in enumerate(self.flying):
            reach = self.geometry(source).reach
            if not self.wide(source) or reach * source.itemsize % VECTORS:
                raise Declined(f"pieces of {source.name} are no whole copies of {VECTORS} bytes")
            shape = (self.pieces, self.lines, threads * reach)
            found.append(Buffer(f"ring{number}", source.ctype, shape, align=VECTORS))
        return found

    def copy(self, inside: str) -> None:
        """Writes the copies of piece ``c`` of all rows, from term ``k0`` on; zeros unless it is ``inside``."""
        w = self.w
        with w.scope():
            i = w.each("i", self.lines)
            for number, source in enumerate(self.flying):
                reach, each = self.geometry(source).reach, VECTORS // source.itemsize
                at = linear(self._terms(source))
                at = f"({inside} ? {at} : 0)" if inside else at
                for part in range(0, reach, each):
                    to = f"&shared.ring{number}[c][{i}][{linear([('t', reach)], part)}]"
                    valid = f", {inside} ? {VECTORS} : 0" if inside else ""
                    w.line(f"copy_async<{VECTORS}>({to}, {source.pointer} + {linear([(at, 1)], part)}{valid});")

    def take(self, c: str) -> None:
        """Writes how what has been copied of piece ``c`` gets to registers."""
        with self.w.scope():
            i = self.w.each("i", self.lines)
            for number, source in enumerate(self.flying):
                reach = self.geometry(source).reach
                text = f"load_shared<{reach}>(&shared.ring{number}[{c}][{i}][{linear([('t', reach)])}])"
                self.w.line(f"{self._piece(source, i)} = {text};")

    # ---- what is multiplied

    @property
    def plain(self) -> bool:
        """Whether pieces are multiplied as they lie in memory, in the order of the sum."""
        gather = self.way.gather
        same = gather.program is None and gather.operand.dtype.ctype == self.way.element
        source = self.prologue.sources[0]
        return same and self.geometry(source).in_order and self.way.product != "tf32" and self.wide(source)

    def words(self, name: str, product: int, kept: str) -> None:
        """Writes words of piece ``c`` of every row, from ``q`` on, as they are multiplied, to the array ``name``."""
        w, way = self.w, self.way
        w.line(f"uint32 {name}[{self.lines}][{WORDS}];")
        with w.scope():
            i = w.each("i", self.lines)
            if self.plain:
                source = next(source for source in self.flying if source.product == product)
                self._each_word(f"{name}[{i}]", self._piece(source, i), self._word)
                return
            if self.codes is not None:
                with w.unrolled(f"for (int r = 0; r < {WORDS}; ++r)"):
                    pair = f"({self.prologue.element(self._pairs(product, i), product)}).bits"
                    w.line(f"{name}[{i}][r] = {f'{kept} ? {pair} : 0' if kept else pair};")
                return
            terms = PIECE // way.itemsize
            w.line(f"Vector<{way.element}, {terms}> piece;")
            with w.unrolled(f"for (int n = 0; n < {terms}; ++n)"):
                w.line(f"const int e = {linear([(self._q, terms // WORDS), ('n', 1)])};")
                w.line(f"piece[n] = {self._multiplied(self.prologue.element(self._elements(product, i), product))};")
            whole = f"kept(piece, {kept})" if kept and way.gather.program is not None else "piece"
            if self.apart == 1:
                w.line(f"words_of({whole}, {name}[{i}]);")
                return
            w.line(f"const Packed<{way.element}, {terms}> words = {whole};")
            self._each_word(f"{name}[{i}]", "words", "r")

    def _each_word(self, to: str, piece: str, word: str) -> None:
        self.w.unrolled_line(f"for (int r = 0; r < {WORDS}; ++r) {to}[r] = {self._ordered(piece, word)};")

    @property
    def _q(self) -> str:
        """The word of the piece at which those begin that are multiplied."""
        return "q" if self.piece * self.way.itemsize > PIECE else "0"

    @property
    def _word(self) -> str:
        """The word of the piece that is written as number ``r``."""
        return linear([(self._q, 1), ("r", 1)])

    def _ordered(self, piece: str, r: str) -> str:
        """Returns the C expression of a word of elements that lie side by side."""
        return f"ordered<{self.apart}>({piece}, {r})"

    def _pairs(self, product: int, i: str) -> dict[Value, str]:
        """Returns the C expressions of pair ``q + r`` of what has been read for piece ``c`` of row ``i``."""
        codes, t, read = self.codes, self.way.element, {}
        assert codes is not None
        for source in self.prologue.sources_of(product):
            number, text = self._number(source), self._piece(source, i)
            text = source.next + self.at if self.fixed(source) else text
            if number in codes:
                code = codes[number]
                how = f"{t}, {_CODES[code.kind]}, {self.apart}" + (f", {code.offset}" if code.offset else "")
                value = f"decoded<{how}>({text}, {self._word})"
            elif self.single(source) or runs(self.geometry(source)):
                if not self.single(source):
                    text += f"[{self.geometry(source).offset(f'(({self._word}) / {RUN // 2} * {RUN})')}]"
                value = text if source.ctype == t else f"convert<{t}>({text})"
            else:
                value = self._ordered(text, self._word)
            self.w.line(f"const Pair<{t}> {source.element}({value});")
            read[source.value] = source.element
        return read

    def _multiplied(self, value: str) -> str:
        """Returns the C expression of an element as it is multiplied."""
        dtype = self.way.gather.operand.dtype
        if dtype.ctype != self.way.element:
            value = f"convert<{self.way.element}>({value})"
        return f"bits_float(to_tf32({value}))" if self.way.product == "tf32" and dtype.name == "float32" else value

    def _elements(self, product: int, i: str) -> dict[Value, str]:
        """Returns what has been read for element ``e`` of piece ``c`` of row ``i``, as it lies in memory."""
        read = {}
        for source in self.prologue.sources_of(product):
            piece = self.geometry(source)
            if self.known(source):
                at = linear([(f"({piece.offset('e')})", 1)], self.prologue.place(source).start)
                read[source.value] = f"int32({at})"
                continue
            if self.fixed(source):
                read[source.value] = source.next + self.at
                continue
            text = self._piece(source, i)
            if not source.pointer:
                offset = piece.offset("e")
                text = text if offset == "0" else f"({text} + {offset})"
            elif not self.single(source):
                text += f"[{piece.offset('e') if self.wide(source) else 'e'}]"
            read[source.value] = text
        return read

    # ---- before the kernel begins

    def ahead(self, tile: int, first: str, threads: int) -> None:
        """Writes requests for the tile's first bytes to the L2 cache, if rows are runs of memory."""
        w, way = self.w, self.way
        sources = [source for source in self.flying if source.pointer and self.wide(source) and not source.product]
        if not sources or len(way.outer) > 1 or len(way.batch) > 1:
            return
        source = max(sources, key=lambda source: source.itemsize * self.geometry(source).reach)
        place = self.prologue.place(source)
        if len([step for step in place.inner if step]) > 1 or not any(place.outer):
            return
        run = next(size for size, step in zip(way.inner, place.inner) if step) * source.itemsize
        products = [other for other in self.prologue.sources if other.value == source.value]
        lines = min(most(run) // LINE, AHEAD // (LINE * tile * len(products)))
        if lines < 1 or run < lines * LINE:
            return
        line = f"min({self.t}({first} + i / {lines}), {self.t}({self.total - 1}))"
        at = linear([("batch" if prod(way.batch) > 1 else "0", place.batch[0]), (line, place.outer[0])], place.start)
        w.line("// While the kernel before ends, these are on their way to the L2 cache.")
        with w.block(f"for (int i = threadIdx.x; i < {tile * lines}; i += {threads})"):
            for other in products:
                w.line(f"prefetch({other.pointer} + ({at} + i % {lines} * {LINE // source.itemsize}));")
