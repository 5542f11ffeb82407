"""The tiles of one operand as threads bring them: from global memory to shared memory, and from there to fragments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from codegen.iteration import coordinate, linear, unsigned
from codegen.prologue import Source
from codegen.tile_path import ACROSS_BYTES
from codegen.tile_pieces import TilePieces

STEP = 32  # bytes of the reduction that one mma multiplies


class TileLoader(TilePieces):
    """Writes how threads bring the tiles of an operand, and what multiplying warps read of them."""

    def member(self, stages: int) -> str:
        """Returns the C declaration of the ring's tiles."""
        way = self.way
        lines = f"{self.tile} {'rows' if self.first else 'columns'}"
        lies = f"{lines} of {self.inner}" if way.along_k else f"{self.inner} x {lines} of"
        note = f"stages of {lies} {way.element}"
        if not way.along_k and self.tile * way.itemsize > ACROSS_BYTES:
            note += f", in panels of {ACROSS_BYTES // way.itemsize}"
        size = f"{self.products} * {self.bytes}" if self.products > 1 else f"{self.bytes}"
        note = f"{note}; of {self.products} operands" if self.products > 1 else note
        return f"alignas(128) unsigned char {self.label}[{stages}][{size}];  // {note}; swizzled"

    def prepare(self) -> None:
        """Writes what stays the same over the reduction: which pieces a thread brings, and from where."""
        w, way, p, gather = self.w, self.way, self.label, self.way.gather
        w.line()
        line = self._which()
        bases = [(n, place) for n, place in enumerate(self.prologue.places) if n == 0 or place.moves]
        kept = [self._base(n) for n, _ in bases] + [f"{p}_start{n}" for n in range(len(gather.limits))]
        fixed = [source for source in self.prologue.sources if self._fixed(source)]
        many = self.bases > 1
        counter = self.base_at[1:-1]
        if many:
            w.line(f"{self.t} {', '.join(f'{name}[{self.bases}]' for name in kept)};")
            for source in fixed:
                w.line(f"{self._held(source)} {source.name}_next[{self.bases}];")
            self._loop(counter, self.bases)
        apart, last = (self.step, self.total - 1) if way.along_k else (way.vector, self.total - way.vector)
        start = (line, 1) if way.along_k else (f"{p}_piece", way.piece)
        axis = "m" if self.first else "n"
        place = linear([(f"{axis}0", 1), start, (counter or "0", apart)])
        # Past the end, where idle threads are too, the last row is read again: nobody uses its results.
        if self.ragged or (fixed and self.pieces < self.threads):
            place = f"min({place}, {self.t}({last}))"
        if many or len(way.outer) > 1 or gather.limits:
            axis = axis if many else f"{p}_{axis}"
            w.line(f"const {self.t} {axis} = {place};")
            place = axis
        outer = [place]
        if len(way.outer) > 1:
            outer = [f"{place}_{d}" for d in range(len(way.outer))]
            for d, name in enumerate(outer):
                if any(x[d] for x in gather.steps()[1]):
                    w.line(f"const {self.t} {name} = {coordinate(place, way.outer, d)};")
        declared = "" if many else f"const {self.t} "
        batch = [coordinate("batch", way.batch, d) if prod(way.batch) > 1 else "0" for d in range(len(way.batch))]
        for n, at in bases:
            terms = [*zip(batch, at.batch), *zip(outer, at.outer)]
            w.line(f"{declared}{self._base(n)}{self.base_at} = {linear(terms, at.start)};")
        for n, x in enumerate(gather.limits):
            place = linear([*zip(batch, x.batch), *zip(outer, x.outer)], x.start)
            w.line(f"{declared}{p}_start{n}{self.base_at} = {place};")
        for source in fixed:
            declared = "" if many else f"const {self._held(source)} "
            self._read(source, f"{declared}{source.name}_next{self.base_at}", self._start(source), "")
        if many:
            w.close()

    def _which(self) -> str:
        """Writes which pieces a thread brings; returns the C variable of the first one's row or column."""
        w, way, p, width, pieces = self.w, self.way, self.label, self.row_bytes, self.row_pieces
        of = f"// this thread's pieces of a tile of {self.prologue.name}"
        if not way.along_k:
            apart = f": {self.step} apart along the sum" if self.count > 1 else ""
            w.line(f"const int {p}_piece = t % {pieces}, {p}_k = t / {pieces};  {of}{apart}")
            each = width // 16
            panel = f"{p}_piece / {each} * {self.inner * width} + " if pieces > each else ""
            within = f"{p}_piece % {each}" if pieces > each else f"{p}_piece"
            w.line(f"const int {p}_at = {panel}swizzle<{width}>({p}_k * {width} + {within} * 16);")
            return f"{p}_k"
        line, lines = (f"{p}_row", "rows") if self.first else (f"{p}_col", "columns")
        if way.threads_along_k:
            apart = f": {lines} {self.step} apart" if self.count > 1 else ""
            w.line(f"const int {p}_piece = t % {pieces}, {line} = t / {pieces};  {of}{apart}")
        else:
            apart = f": {self.step} apart" if self.count > 1 else ""
            w.line(f"const int {line} = t % {self.tile}, {p}_piece = t / {self.tile};  {of}{apart}")
        w.line(f"const int {p}_at = swizzle<{width}>({line} * {width} + {p}_piece * 16);")
        return line

    # ---- global memory -> shared memory, or registers

    def registers(self) -> None:
        """Declares the registers of pieces in flight."""
        if self.way.copied:
            return
        parts = f"[{self.vectors}]" if self.vectors > 1 else ""
        of = f"[{self.products}]" if self.products > 1 else ""
        for source in self.prologue.sources:
            if not self._fixed(source):
                pieces = "" if self._common(source) else f"{of}[{self.count}]"
                self.w.line(f"{self._held(source)} {source.name}_next{pieces}{parts};")
        if self.guarded:
            self.w.line(f"bool {self.label}_kept[{self.count}]{parts};  // whether there are elements")

    def _read(self, source: Source, to: str, *terms: tuple[str, int] | str) -> None:
        """Writes ``to = ...``: a vector from the place given by ``terms``.

        It is zero unless the last of them, a C condition ("" for none), holds.
        """
        w, vector = self.w, self.way.vector
        place, inside = linear([t for t in terms if not isinstance(t, str)]), terms[-1]
        if not source.pointer:
            w.line(f"{to} = int32({place});")
            return
        guard, zero = f"{inside} ? " if inside else "", f" : {self._held(source)}{{}}" if inside else ""
        if self._single(source):
            w.line(f"{to} = {guard}{source.pointer}[{place}]{zero};")
        elif self._wide(source):
            load = "load_packed" if self._packed(source) else "load"
            place = place if re.fullmatch(r"\w+|\([^()]*\)", place) else f"({place})"
            w.line(f"{to} = {guard}{load}<{vector}>({source.pointer} + {place}){zero};")
        else:
            name = to.split()[-1]
            if name != to:  # a constant cannot be filled in
                w.line(f"{to.removeprefix('const ')};")
            element = linear([*(t for t in terms if not isinstance(t, str)), ("e", self._apart(source))])
            zero = f" : {source.ctype}{{}}" if inside else ""
            w.unrolled_line(f"for (int e = 0; e < {vector}; ++e) {name}[e] = {guard}{source.pointer}[{element}]{zero};")

    def fetch(self, k: str = "k") -> None:
        """Writes the copies of the thread's pieces of stage ``k``, to the ring or to registers."""
        w, way, p = self.w, self.way, self.label
        with w.scope():
            w.open(f"if (t < {self.pieces})" if self.pieces < self.threads else "")
            common = self._uniform(k)
            several = self.count > 1
            if not way.along_k:
                self._loop("i", self.count)
                coords, along = self._inner(k, [(f"{p}_k", 1), ("i" if several else "0", self.step)], common)
                self._loop("v", self.vectors)
                self._copy(coords, along, "")
            else:
                over_k = several and not way.threads_along_k
                if over_k:
                    self._loop("i", self.count)
                piece = [(f"{p}_piece", way.piece), ("i" if over_k else "0", self.step * way.piece)]
                places, each = way.piece // way.granule, way.granule // way.vector
                if places > 1:  # in which the coordinates of the reduction differ
                    counter = "v" if each == 1 else "c"
                    self._loop(counter, places)
                    piece.append((counter, way.granule))
                coords, along = self._inner(k, piece, common)
                apart = ""
                if each > 1:
                    apart = "v" if places == 1 else "u"
                    self._loop(apart, each)
                    if places > 1:
                        w.line(f"const int v = c * {each} + u;")
                self._copy_common(coords, apart)
                if several and way.threads_along_k:
                    self._loop("i", self.count)
                self._copy(coords, along, apart)

    def _uniform(self, k: str) -> list[str]:
        """Writes the coordinates of the first place of stage ``k`` if the other places differ in the last coordinate
        alone.

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
        way = self.way
        if len(way.inner) == 1:
            return ["k0"]
        names = [f"k_{d}" for d in range(len(way.inner))]
        for d, name in enumerate(names):
            if any(x[d] for x in way.gather.steps()[2]):
                self.w.line(f"const {self.t} {name} = {coordinate('k0', way.inner, d)};")
        return names

    def _copy(self, coords: Sequence[str], along: str, counter: str) -> None:
        """Writes one copy, from the coordinates of the reduction whose offset is ``along``.

        ``counter`` is the C variable that counts the vectors of a piece that share these.
        """
        w, way, p, gather = self.w, self.way, self.label, self.way.gather
        source = gather.operand.dtype
        conditions = []
        if self.depth % self.inner:
            conditions.append(f"k0 < {self.depth}")
        for n, x in enumerate(gather.limits):
            text = linear([(f"{p}_start{n}{self.base_at}", 1), *zip(coords, x.inner)])
            conditions.append(f"{unsigned(self.t)}({text}) < {x.size}")
        inside = conditions[0] if conditions else ""
        if len(conditions) > 1:
            w.line(f"const bool inside = {' && '.join(conditions)};")
            inside = "inside"
        terms = [(f"{p}_base{self.base_at}", 1), (along, 1)]
        if counter:
            terms.append((counter, way.vector * gather.inner[-1]))
        if gather.program is not None:
            self._sources(coords, along, counter, inside)
            return
        for product, pointer in enumerate(self.prologue.pointers):
            place = f"{pointer} + ({linear(terms)})"
            if way.copied:
                size = way.vector * source.itemsize
                to = self._piece(product) + (f" + v * {size}" if self.vectors > 1 else "")
                valid = f", {inside} ? {size} : 0" if inside else ""
                w.line(f"copy_async<{size}>({to}, {place}{valid});")
                continue
            to = self._next(product) + ("[v]" if self.vectors > 1 else "")
            own = self.prologue.sources[0]
            value = f"{'load_packed' if self._packed(own) else 'load'}<{way.vector}>({place})"
            w.line(f"{to} = {f'{inside} ? {value} : {self._held(own)}{{}}' if inside else value};")

    def _sources(self, coords: Sequence[str], along: str, counter: str, inside: str) -> None:
        """Writes the reads of what the elements of a vector are computed from."""
        way = self.way
        parts = f"{'[i]' if self.count > 1 else '[0]'}{'[v]' if self.vectors > 1 else ''}"
        for source in self.prologue.sources:
            if self._fixed(source) or self._common(source):
                continue
            place = self.prologue.place(source)
            terms = [(along, 1)] if source.place == 0 else list(zip(coords, place.inner))
            if counter:
                terms.append((counter, way.vector * place.inner[-1]))
            self._read(source, f"{source.name}_next{parts}", self._start(source), *terms, inside)
        if self.guarded:
            self.w.line(f"{self.label}_kept{parts} = {inside};")

    def _copy_common(self, coords: Sequence[str], counter: str) -> None:
        """Writes the reads of what all of a thread's pieces share."""
        inside = f"k0 < {self.depth}" if self.depth % self.inner else ""
        for source in self.prologue.sources:
            if self._common(source):
                place = self.prologue.place(source)
                terms = list(zip(coords, place.inner))
                if counter:
                    terms.append((counter, self.way.vector * place.inner[-1]))
                part = "[v]" if self.vectors > 1 else ""
                self._read(source, f"{source.name}_next{part}", *terms, inside)

    def _next(self, product: int) -> str:
        """Returns the C expression of the registers of piece ``i``."""
        of = f"[{product}]" if self.products > 1 else ""
        return f"{self.label}_next{of}[{'i' if self.count > 1 else '0'}]"

    def _piece(self, product: int) -> str:
        """Returns the C expression of where piece ``i`` of a thread lies in a stage."""
        p, way = self.label, self.way
        stage = self.target + (f" + {product * self.bytes}" if product else "")
        if self.count == 1:
            return f"{stage} + {p}_at"
        if way.along_k and not way.threads_along_k:  # the pieces' numbers have no bits in common with those of threads
            return f"{stage} + ({p}_at ^ i * {self.step * 16})"
        return f"{stage} + {p}_at + i * {self.step * self.row_bytes}"

    def stash(self) -> None:
        """Writes the stores of what came to registers to shared memory, in the type that is multiplied."""
        if self.way.copied:
            return
        with self.w.scope():
            self.w.open(f"if (t < {self.pieces})" if self.pieces < self.threads else "")
            self._loop("i", self.count)
            self._put()

    def renew(self, k: str) -> None:
        """Writes the stores of what came to registers and, piece by piece, the reads of stage ``k`` in its place.

        Each piece is in flight while the others are computed.
        """
        w, way, p = self.w, self.way, self.label
        if self.vectors > 1:
            self.stash()
            self.fetch(k)
            return
        with w.scope():
            w.open(f"if (t < {self.pieces})" if self.pieces < self.threads else "")
            over_rows, common = way.along_k and way.threads_along_k, self._uniform(k)
            if over_rows:
                coords, along = self._inner(k, [(f"{p}_piece", way.piece)], common)
                for source in self.prologue.sources:
                    if self._common(source):
                        w.line(f"const auto {source.name}_now = {source.name}_next;")
                self._copy_common(coords, "")
            self._loop("i", self.count)
            self._put(suffix="now")
            if not over_rows:
                step = ("i" if self.count > 1 else "0", self.step * (way.piece if way.along_k else 1))
                first = (f"{p}_piece", way.piece) if way.along_k else (f"{p}_k", 1)
                coords, along = self._inner(k, [first, step], common)
            self._copy(coords, along, "")

    def _put(self, suffix: str = "next") -> None:
        """Writes the store of piece ``i`` to shared memory; names of what all pieces share end in ``suffix``."""
        w, way = self.w, self.way
        if self.computed:
            self._compute(f"reinterpret_cast<{way.element}*>({self._piece(0)})", suffix)
            return
        same = way.gather.operand.dtype.ctype == way.element
        for product in range(self.products):
            to, pieces = f"reinterpret_cast<{way.element}*>({self._piece(product)})", self._next(product)
            if same and self.vectors == 1 and not self._rounds:
                w.line(f"store_shared({to}, {pieces});")
                continue
            value = f"{pieces}{self._element}"
            value = self._multiplied(value)
            name = f"piece{product or ''}"
            w.line(f"Vector<{way.element}, {way.piece}> {name};")
            w.unrolled_line(f"for (int e = 0; e < {way.piece}; ++e) {name}[e] = {value};")
            w.line(f"store_shared({to}, {name});")

    @property
    def _rounds(self) -> bool:
        """Whether elements are rounded to tf32 here: tensor cores that read tiles themselves would truncate them."""
        return self.way.held and self.way.product == "tf32" and self.way.gather.operand.dtype.name == "float32"

    def _multiplied(self, value: str) -> str:
        """Returns the C expression of an element as it is multiplied."""
        if self.way.gather.operand.dtype.ctype != self.way.element:
            return f"convert<{self.way.element}>({value})"
        return f"bits_float(to_tf32({value}))" if self._rounds else value

    @property
    def _element(self) -> str:
        """The subscript of element ``e`` of a piece in its vectors."""
        vector = self.way.vector
        return "[e]" if self.vectors == 1 else "[e][0]" if vector == 1 else f"[e / {vector}][e % {vector}]"

    def _compute(self, to: str, suffix: str) -> None:
        """Writes the computation of piece ``i``, and its store to shared memory."""
        w, way = self.w, self.way
        vector, several = way.vector, self.vectors > 1
        piece = "[i]" if self.count > 1 else "[0]"
        part = "" if not several else "[e]" if vector == 1 else f"[e / {vector}]"
        w.line(f"Vector<{way.element}, {way.piece}> piece;")
        with w.unrolled(f"for (int e = 0; e < {way.piece}; ++e)"):
            read = {}
            for source in self.prologue.sources:
                if self._fixed(source):
                    at = "" if self.bases == 1 else "[i]" if way.along_k else part
                else:
                    at = part if self._common(source) else piece + part
                text = f"{source.name}_{suffix if self._common(source) else 'next'}{at}"
                number = "e" if not several else "0" if vector == 1 else f"e % {vector}"
                if not self._single(source):
                    text += f"[{number}]"
                elif not source.pointer and self._apart(source) and number != "0":
                    text = linear([(text, 1), (number, self._apart(source))])
                read[source.value] = text
            text = self._multiplied(self.prologue.element(read))
            if self.guarded and several:
                text = f"kept({text}, {self.label}_kept{piece}{part})"
            w.line(f"piece[e] = {text};")
        value = f"kept(piece, {self.label}_kept{piece})" if self.guarded and not several else "piece"
        w.line(f"store_shared({to}, {value});")

    def _loop(self, counter: str, count: int) -> None:
        """Opens a loop, unless it runs once."""
        if count > 1:
            self.w.line("#pragma unroll")
            self.w.open(f"for (int {counter} = 0; {counter} < {count}; ++{counter})")

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
        inner, half = ("(lane % 8 + lane / 16 * 8)", "lane / 8 % 2") if self.first else ("lane % 16", "lane / 16")
        across = width // way.itemsize
        panel = f"{start} / {across} * {self.inner * width} + " if self.tile > across else ""
        within = f"{start} % {across}" if self.tile > across else start
        place = f"{inner} * {width} + {within} * {way.itemsize} + {half} * 16"
        w.line(f"const int {p}_lane = {panel}swizzle<{width}>({place});")

    def parts(self) -> None:
        """Writes the loads of the fragments of step ``kk`` from ``stage``."""
        for product in range(self.products):
            self._parts(product)

    def _parts(self, product: int) -> None:
        w, p, several = self.w, self.label, self.fragments > 1
        counter = "i" if self.first else "j"
        if several:
            w.unrolled_line(f"for (int {counter} = 0; {counter} < {self.fragments}; ++{counter})")
        number = counter if several else "0"
        to = linear([(number, 1)], product * self.fragments)
        # Steps along a row of the tile only change bits that are 0 in every lane's place before the swizzle, which
        # keeps them.
        down, along = (number, "kk") if self.way.along_k else ("kk", number)
        rows = f" + {product * self.bytes}" if product else ""
        rows += f" + {down} * {16 * self.row_bytes}" if down != "0" else ""
        lane = f"({p}_lane ^ {along} * {STEP})" if along != "0" else f"{p}_lane"
        name = "load_matrices" if self.way.along_k else "load_matrices_transposed"
        indent = "    " if several else ""
        w.line(f"{indent}{name}({p}_part[kk % 2][{to}], shared.{p}[stage]{rows} + {lane});")

    def round(self) -> None:
        """Writes the rounding of the fragments of step ``kk`` to the type that the tensor cores read."""
        if self.way.gather.operand.dtype.name == "float32":
            counter = "i" if self.first else "j"
            self.w.unrolled_line(f"for (int {counter} = 0; {counter} < {self.products * self.fragments}; ++{counter})")
            self.w.line(f"    round_to_tf32({self.label}_part[kk % 2][{counter}]);")
