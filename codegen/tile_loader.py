"""The tiles of one operand as threads bring them: from global memory to shared memory, and from there to fragments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

from codegen.buffers import where
from codegen.expr import Value
from codegen.iteration import coordinate, linear, split
from codegen.prologue import Source
from codegen.tile_path import ACROSS_BYTES, PERIOD
from codegen.tile_pieces import TilePieces

STEP = 32  # bytes of the reduction that one mma multiplies
WORDS = ACROSS_BYTES // 4  # elements of 32 bits of a row across the reduction


class TileLoader(TilePieces):
    """Writes how threads bring the tiles of an operand, and what multiplying warps read of them."""

    def prepare(self) -> None:
        """Writes what stays the same over the reduction: which pieces a thread brings, and from where."""
        w, way, p, gather, at = self.w, self.way, self.label, self.way.gather, self.base_at
        w.line()
        line = self._which()
        fixed = [source for source in self.prologue.sources if self._fixed(source)]
        many = self.bases > 1
        with w.scope():
            if many:
                w.line(f"{self.t} {', '.join(f'{name}[{self.bases}]' for name, _ in self.prologue.starts)};")
                for source in fixed:
                    w.line(f"{self._held(source)} {source.next}[{self.bases}];")
                if self.edge.ragged:
                    w.line(f"bool {p}_exists[{self.bases}];")
            counter = w.each(at[1:-1], self.bases)
            apart, last = (self.step, self.total - 1) if way.along_k else (way.vector, self.total - way.vector)
            start = (line, 1) if way.along_k else (f"{p}_piece", way.piece)
            axis = "m" if self.first else "n"
            place = linear([(f"{axis}0", 1), start, (counter, apart)])
            # Past the end nothing is read: if all blocks read the last row, they would wait for the part of the L2
            # cache that has it.  What is fixed of a row is, also by idle threads; nobody uses its results.
            if self.edge.ragged:
                w.line(f"{'' if many else 'const bool '}{p}_exists{at} = {self.edge.inside(place)};")
            if self.edge.ragged or (fixed and self.pieces < self.threads):
                place = f"min({place}, {self.t}({last}))"
            if many or len(way.outer) > 1 or gather.limits:
                axis = axis if many else f"{p}_{axis}"
                w.line(f"const {self.t} {axis} = {place};")
                place = axis
            outer = split(w, self.t, f"{place}_", place, way.outer, gather.steps()[1])
            batch = [coordinate("batch", way.batch, d) if prod(way.batch) > 1 else "0" for d in range(len(way.batch))]
            self.prologue.begin(self.t, at, batch, outer)
            for source in fixed:
                declared = "" if many else f"const {self._held(source)} "
                self._read(source, f"{declared}{source.next}{at}", [self.prologue.start(source, at)])

    def _which(self) -> str:
        """Writes which pieces a thread brings; returns the C variable of the first one's row or column."""
        w, way, p, width, pieces = self.w, self.way, self.label, self.row_bytes, self.row_pieces
        line, lines = (f"{p}_row", "rows ") if self.first else (f"{p}_col", "columns ")
        across = way.along_k and not way.threads_along_k
        if not way.along_k:
            line, lines = f"{p}_k", ""
        fast, slow, each = (line, f"{p}_piece", self.tile) if across else (f"{p}_piece", line, pieces)
        of = f"// this thread's pieces of a tile of {self.prologue.name}"
        if self.count > 1:
            of += f": {'' if across else lines}{self.step} apart{'' if way.along_k else ' along the sum'}"
        w.line(f"const int {fast} = t % {each}, {slow} = t / {each};  {of}")
        panel, within, each = "", f"{p}_piece", width // 16
        if pieces > each and not way.along_k:
            panel, within = f"{p}_piece / {each} * {self.inner * width} + ", f"{p}_piece % {each}"
        w.line(f"const int {p}_at = {panel}swizzle<{width}>({line} * {width} + {within} * 16);")
        return line

    # ---- global memory -> shared memory, or registers

    def registers(self) -> None:
        """Declares the registers of pieces in flight."""
        if self.way.copied:
            return
        parts = f"[{self.vectors}]" if self.vectors > 1 else ""
        of = f"[{self.products}]" if self.products > 1 else ""
        for source in self.prologue.sources:
            if not self._fixed(source) and not source.product:
                pieces = "" if self._common(source) else f"{of}[{self.count}]"
                self.w.line(f"{self._held(source)} {source.name}_next{pieces}{parts};")
        if self.guarded:
            self.w.line(f"bool {self.label}_kept[{self.count}]{parts};  // whether there are elements")

    def _read(self, source: Source, to: str, terms: Sequence[tuple[str, int]], inside: str = "") -> None:
        """Writes ``to = ...``: a vector from the place given by ``terms``, zero where ``inside`` does not hold."""
        w, vector, place = self.w, self.way.vector, linear(terms)
        if not source.pointer:
            w.line(f"{to} = int32({place});")
        elif self._single(source):
            w.line(f"{to} = {where(inside, f'{source.pointer}[{place}]', f'{self._held(source)}{{}}')};")
        elif self._wide(source):
            load = "load_packed" if self._packed(source) else "load"
            place = place if re.fullmatch(r"\w+|\([^()]*\)", place) else f"({place})"
            value = f"{load}<{vector}>({source.pointer} + {place})"
            w.line(f"{to} = {where(inside, value, f'{self._held(source)}{{}}')};")
        else:
            name = to.split()[-1]
            if name != to:  # a constant cannot be filled in
                w.line(f"{to.removeprefix('const ')};")
            element = f"{source.pointer}[{linear([*terms, ('e', self._apart(source))])}]"
            value = where(inside, element, f"{source.ctype}{{}}")
            w.unrolled_line(f"for (int e = 0; e < {vector}; ++e) {name}[e] = {value};")

    @contextmanager
    def _bringing(self) -> Iterator[None]:
        """Writes what the threads do that have pieces around what is written inside of the ``with`` statement."""
        with self.w.block(f"if (t < {self.pieces})" if self.pieces < self.threads else ""), self.w.scope():
            yield

    def fetch(self, k: str = "k") -> None:
        """Writes the copies of the thread's pieces of stage ``k``, to the ring or to registers."""
        w, way, p = self.w, self.way, self.label
        with self._bringing():
            common = self._uniform(k)
            if not way.along_k:
                i = w.each("i", self.count)
                coords, along = self._inner(k, [(f"{p}_k", 1), (i, self.step)], common)
                w.each("v", self.vectors)
                self._copy(coords, along, "0")
                return
            i = "0" if way.threads_along_k else w.each("i", self.count)
            piece = [(f"{p}_piece", way.piece), (i, self.step * way.piece)]
            # Places in which the coordinates of the reduction differ, and vectors that share these.
            places, each = way.piece // way.granule, way.granule // way.vector
            piece.append((w.each("v" if each == 1 else "c", places), way.granule))
            coords, along = self._inner(k, piece, common)
            apart = w.each("v" if places == 1 else "u", each)
            if apart == "u":
                w.line(f"const int v = c * {each} + u;")
            self._copy_common(coords, apart)
            if way.threads_along_k:
                w.each("i", self.count)
            self._copy(coords, along, apart)

    def _uniform(self, k: str) -> list[str]:
        """Writes the coordinates of the first place of stage ``k`` if the other places differ in the last one alone.

        They do in a stage within one run of the last dimension; its other coordinates are uniform.
        """
        if len(self.way.inner) == 1 or self.way.inner[-1] % self.inner:
            return []
        self.w.line(f"const {self.t} k0 = {k} * {self.inner};")
        return self._coordinates()

    def _inner(self, k: str, within: Sequence[tuple[str, int]], common: Sequence[str]) -> tuple[list[str], str]:
        """Writes the place in the reduction ``within`` stage ``k``; returns the operand's coordinates and offset there.

        ``common`` are the coordinates of the stage's first place if the others differ in the last one alone.
        """
        w, way, place = self.w, self.way, linear(within)
        if common:
            coords = [*common[:-1], f"({common[-1]} + {place})"]
        else:
            w.line(f"const {self.t} k0 = {k} * {self.inner} + {place};")
            coords = self._coordinates()
        offset = linear(list(zip(coords, way.gather.inner)))
        if len(coords) == 1:
            return coords, offset
        w.line(f"const {self.t} along = {offset};")
        return coords, "along"

    def _coordinates(self) -> list[str]:
        """Writes the operand's coordinates at place ``k0`` of the reduction."""
        return split(self.w, self.t, "k_", "k0", self.way.inner, self.way.gather.steps()[2])

    def _copy(self, coords: Sequence[str], along: str, counter: str) -> None:
        """Writes one copy, from the coordinates of the reduction whose offset is ``along``.

        ``counter`` is the C variable that counts the vectors of a piece that share these; "0" for none.
        """
        w, way, at = self.w, self.way, self.base_at
        exists = f"{self.label}_exists{at}" if self.edge.ragged else ""
        inside = w.inside(exists, self.terms.inside("k0"), *self.prologue.kept(self.t, at, coords))
        parts = f"[{self._number}]{'[v]' if self.vectors > 1 else ''}"
        for source in self.prologue.sources:
            if self._fixed(source) or self._common(source):
                continue
            place = self.prologue.place(source)
            terms = [(along, 1)] if source.place == 0 else list(zip(coords, place.inner))
            terms = [self.prologue.start(source, at), *terms, (counter, way.vector * place.inner[-1])]
            if not way.copied:
                self._read(source, f"{source.next}{parts}", terms, inside)
                continue
            size = way.vector * source.itemsize
            to = self._piece(source.product) + (f" + v * {size}" if self.vectors > 1 else "")
            valid = f", {inside} ? {size} : 0" if inside else ""
            w.line(f"copy_async<{size}>({to}, {source.pointer} + ({linear(terms)}){valid});")
        if self.guarded:
            w.line(f"{self.label}_kept{parts} = {inside};")

    def _copy_common(self, coords: Sequence[str], counter: str) -> None:
        """Writes the reads of what all of a thread's pieces share."""
        part = "[v]" if self.vectors > 1 else ""
        for source in self.prologue.sources:
            if self._common(source):
                place = self.prologue.place(source)
                along = (counter, self.way.vector * place.inner[-1])
                terms = [(str(place.start), 1), *zip(coords, place.inner), along]
                self._read(source, f"{source.next}{part}", terms, self.terms.inside("k0"))

    @property
    def _number(self) -> str:
        """The number of the piece that a thread is at."""
        return "i" if self.count > 1 else "0"

    def _piece(self, product: int) -> str:
        """Returns the C expression of where piece ``i`` of a thread lies in a stage."""
        p, way = self.label, self.way
        stage = self.target + (f" + {product * self.bytes}" if product else "")
        if self.count == 1:
            return f"{stage} + {p}_at"
        if way.along_k and not way.threads_along_k:  # the pieces' numbers have no bits in common with those of threads
            return f"{stage} + ({p}_at ^ i * {self.step * 16})"
        if self.step % PERIOD:  # nearer than the swizzle repeats: the numbers of pieces have no bits in common, either
            return f"{stage} + ({p}_at ^ i * {self.step} % {PERIOD} * 16) + i * {self.step * self.row_bytes}"
        return f"{stage} + {p}_at + i * {self.step * self.row_bytes}"

    def stash(self) -> None:
        """Writes the stores of what came to registers to shared memory, in the type that is multiplied."""
        if not self.way.copied:
            with self._bringing():
                self.w.each("i", self.count)
                self._put()

    def renew(self, k: str) -> None:
        """Writes the stores of what came to registers and, piece by piece, the reads of stage ``k`` in its place.

        Each piece is in flight while the others are computed.
        """
        w = self.w
        if self.vectors > 1:
            self.stash()
            self.fetch(k)
            return
        with self._bringing():
            if self.way.parts == 1 or self.computed or self.products > 1 or self._narrow:
                self._renew(k)
                return
            # What is rare lies apart: instructions that are jumped over cost time.
            name = self.prologue.sources[0].next
            w.line("float sum = 0;")
            w.unrolled_line(f"for (int i = 0; i < {self.count}; ++i) sum += magnitude({name}[{self._number}]);")
            with w.block("if (sum < 0x1p17f)"):
                self._renew(k, "split_rounded")
                w.otherwise()
                self._renew(k, "split_cut_off")

    @property
    def _narrow(self) -> bool:
        """Whether what is read are no floats."""
        return self.way.gather.operand.dtype.ctype != "float"

    def _renew(self, k: str, split: str = "split") -> None:
        """Writes the loop over the pieces."""
        w, way, p = self.w, self.way, self.label
        over_rows = way.along_k and way.threads_along_k
        common = self._uniform(k)
        if over_rows:
            coords, along = self._inner(k, [(f"{p}_piece", way.piece)], common)
            for source in self.prologue.sources:
                if self._common(source):
                    w.line(f"const auto {source.name}_now = {source.next};")
            self._copy_common(coords, "0")
        with w.scope():
            i = w.each("i", self.count)
            self._put(suffix="now", split=split)
            if not over_rows:
                step = (i, self.step * (way.piece if way.along_k else 1))
                first = (f"{p}_piece", way.piece) if way.along_k else (f"{p}_k", 1)
                coords, along = self._inner(k, [first, step], common)
            self._copy(coords, along, "0")

    def _put(self, suffix: str = "next", split: str = "split") -> None:
        """Writes the store of piece ``i`` to shared memory; names of what all pieces share end in ``suffix``."""
        w, way, several = self.w, self.way, self.vectors > 1
        as_it_is = self._stored and not self._rounds
        zeros = self.guarded and not several
        part = f"[e / {way.vector}]" if way.vector > 1 else "[e]"
        kept = f"{self.label}_kept[{self._number}]{part if several else ''}"
        for product in range(self.products):
            name = f"piece{product or ''}"
            to = f"reinterpret_cast<{way.element}*>({self._piece(product)})"
            if as_it_is and not several:
                w.line(f"store_shared({to}, {self.prologue.sources[product].next}[{self._number}]);")
                continue
            w.line(f"Vector<{way.value}, {way.piece}> {name};")
            loop, read = f"for (int e = 0; e < {way.piece}; ++e)", self._elements(product, suffix)
            if self.computed:
                with w.unrolled(loop):
                    text = self._multiplied(self.prologue.element(read))
                    w.line(f"{name}[e] = {f'kept({text}, {kept})' if self.guarded and several else text};")
            else:
                w.unrolled_line(f"{loop} {name}[e] = {self._multiplied(self.prologue.element(read))};")
            value = f"kept({name}, {kept})" if zeros else name
            if way.parts == 1:
                w.line(f"store_shared({to}, {value});")
                continue
            w.line(f"Vector<{way.element}, {way.piece}> {name}_parts[{way.parts}];")
            w.line(f"{split}({value}, {name}_parts);")
            each = self.products * self.bytes
            to = f"reinterpret_cast<{way.element}*>({self._piece(product)} + part * {each})"
            w.unrolled_line(f"for (int part = 0; part < {way.parts}; ++part) store_shared({to}, {name}_parts[part]);")

    @property
    def _rounds(self) -> bool:
        """Whether elements are rounded to tf32 here: tensor cores that read tiles themselves would truncate them."""
        return self.way.held and self.way.product == "tf32" and self.way.gather.operand.dtype.name == "float32"

    def _multiplied(self, value: str) -> str:
        """Returns the C expression of an element as it is multiplied."""
        if self.way.gather.operand.dtype.ctype != self.way.value:
            return f"convert<{self.way.value}>({value})"
        return f"bits_float(to_tf32({value}))" if self._rounds else value

    def _elements(self, product: int, suffix: str) -> dict[Value, str]:
        """Returns what has been read for element ``e`` of piece ``i``, as it lies in memory."""
        vector = self.way.vector
        part, number = (
            ("", "e") if self.vectors == 1 else ("[e]", "0") if vector == 1 else (f"[e / {vector}]", f"e % {vector}")
        )
        read = {}
        for source in self.prologue.sources:
            if source.product != product:
                continue
            if self._common(source):
                text = f"{source.name}_{suffix}{part}"
            elif self._fixed(source):
                text = source.next + ("" if self.bases == 1 else "[i]" if self.way.along_k else part)
            else:
                text = f"{source.next}[{self._number}]{part}"
            if not self._single(source):
                text += f"[{number}]"
            elif not source.pointer and self._apart(source):
                text = linear([(text, 1), (number, self._apart(source))])
            read[source.value] = text
        return read

    # ---- shared memory -> fragments

    @property
    def fragments(self) -> int:
        """Fragments of 16 rows or columns of a warp."""
        return self.of_warp // 16

    def lane(self) -> None:
        """Writes, for a lane, where the row of the warp's first fragment lies whose address it gives ldmatrix."""
        w, way, p, width = self.w, self.way, self.label, self.row_bytes
        start, lines = ("warp_row", "rows") if self.first else ("warp_col", "columns")
        # ldmatrix takes four matrices of 8 x 16 bytes.  Those of A: two below each other, two to the right of these;
        # those of B: two next to each other, two below these (`mma.cuh`).
        outer, half = ("lane % 16", "lane / 16") if self.first else ("lane % 8 + lane / 16 * 8", "lane / 8 % 2")
        w.line(f"// Which of the {lines} of the warp's first fragment a lane gives ldmatrix the address of.")
        if way.along_k:
            w.line(f"const int {p}_lane = swizzle<{width}>(({start} + {outer}) * {width} + {half} * 16);")
            return
        if way.words:
            panel = f"{start} / {WORDS} * {self.inner * width} + "
            place = f"lane % 4 * {2 * width} + ({start} % {WORDS} + lane / 4) * 4"
            w.line(f"const int {p}_lane = {panel}swizzle<{width}>({place});")
            return
        inner, half = ("(lane % 8 + lane / 16 * 8)", "lane / 8 % 2") if self.first else ("lane % 16", "lane / 16")
        across = width // way.itemsize
        panel = f"{start} / {across} * {self.inner * width} + " if self.tile > across else ""
        within = f"{start} % {across}" if self.tile > across else start
        place = f"{inner} * {width} + {within} * {way.itemsize} + {half} * 16"
        w.line(f"const int {p}_lane = {panel}swizzle<{width}>({place});")

    def parts(self) -> None:
        """Writes the loads of the fragments of step ``kk`` from ``stage``."""
        w, p, counter = self.w, self.label, "i" if self.first else "j"
        several, number = self.fragments > 1, counter if self.fragments > 1 else "0"
        if self.way.words:
            self._words(number)
            return
        name = "load_matrices" if self.way.along_k else "load_matrices_transposed"
        # Steps along a row of the tile only change bits that are 0 in every lane's place before the swizzle, which
        # keeps them.
        down, along = (number, "kk") if self.way.along_k else ("kk", number)
        lane = f"({p}_lane ^ {along} * {STEP})" if along != "0" else f"{p}_lane"
        for product in range(self.products):
            to = linear([(number, 1)], product * self.fragments)
            tile = f" + {product * self.bytes}" if product else ""
            tile += f" + {down} * {16 * self.row_bytes}" if down != "0" else ""
            if several:
                w.unrolled_line(f"for (int {counter} = 0; {counter} < {self.fragments}; ++{counter})")
            load = f"{name}({p}_part[kk % 2][{to}], shared.{p}[stage]{tile} + {lane});"
            w.line(f"    {load}" if several else load)

    def _words(self, number: str) -> None:
        """Writes the loads of fragments whose elements lie by themselves: two of them in a row of a panel."""
        w, p = self.w, self.label
        if self.fragments > 1:
            w.unrolled_line(f"for (int {number} = 0; {number} < {self.fragments}; ++{number})")
        lane = f"({p}_lane ^ {number} % 2 * 64)" if self.fragments > 1 else f"{p}_lane"
        panel = f" + {number} / 2 * {self.inner * self.row_bytes}" if self.fragments > 2 else ""
        for product in range(self.products):
            to = linear([(number, 1)], product * self.fragments)
            tile = f" + {product * self.bytes}" if product else ""
            tile += f" + kk * {STEP // 4 * self.row_bytes}{panel}"
            load = f"load_words({p}_part[kk % 2][{to}], shared.{p}[stage]{tile}, {lane});"
            w.line(f"    {load}" if self.fragments > 1 else load)

    def round(self) -> None:
        """Writes the rounding of the fragments of step ``kk`` to the type that the tensor cores read."""
        if self.way.gather.operand.dtype.name == "float32":
            counter = "i" if self.first else "j"
            self.w.unrolled_line(f"for (int {counter} = 0; {counter} < {self.products * self.fragments}; ++{counter})")
            self.w.line(f"    round_to_tf32({self.label}_part[kk % 2][{counter}]);")
