"""The tiles of one factor in a kernel of mma.sync: from global memory to shared memory, and from there to fragments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from codegen.contraction_mma_schedule import ACROSS_BYTES, Way
from codegen.iteration import coordinate, linear, unsigned
from codegen.naming import Writer

STEP = 32  # bytes of the reduction that one mma multiplies


@dataclass(frozen=True)
class TileLoader:
    """Writes what brings the tiles of a factor.

    w, t     where it is written, and the type of positions and places.
    way      how the elements come to shared memory.
    label    "a" or "b", with which the kernel's variables begin; pointers: of the factor itself, or of all second
             factors: a stage holds a tile of each, brought from the same places of each.
    tile     rows (of the first factor) or columns (of the second) of a tile; of_warp: those of a warp.
    total    rows or columns altogether; depth: terms of a sum.
    inner    terms of a stage.
    threads  of a block.
    """

    w: Writer
    t: str
    way: Way
    label: str
    pointers: tuple[str, ...]
    tile: int
    of_warp: int
    total: int
    depth: int
    inner: int
    threads: int

    # ---- the tile

    @property
    def first(self) -> bool:
        return self.label == "a"

    @property
    def row_bytes(self) -> int:
        """Of a row of the tile as it lies in shared memory."""
        way = self.way
        return self.inner * way.itemsize if way.along_k else min(ACROSS_BYTES, self.tile * way.itemsize)

    @property
    def bytes(self) -> int:
        """Of a tile."""
        return self.tile * self.inner * self.way.itemsize

    @property
    def products(self) -> int:
        return len(self.pointers)

    @property
    def pieces(self) -> int:
        return self.tile * self.inner // self.way.piece

    @property
    def ragged(self) -> bool:
        """Whether tiles reach past the last row or column."""
        return self.total % self.tile != 0

    def member(self, stages: int) -> str:
        """The declaration of the ring's tiles."""
        way = self.way
        lines = f"{self.tile} {'rows' if self.first else 'columns'}"
        lies = f"{lines} of {self.inner}" if way.along_k else f"{self.inner} x {lines} of"
        note = f"stages of {lies} {way.element}"
        if not way.along_k and self.tile * way.itemsize > ACROSS_BYTES:
            note += f", in panels of {ACROSS_BYTES // way.itemsize}"
        size = f"{self.products} * {self.bytes}" if self.products > 1 else f"{self.bytes}"
        note = f"{note}; of {self.products} factors" if self.products > 1 else note
        return f"alignas(128) unsigned char {self.label}[{stages}][{size}];  // {note}; swizzled"

    # ---- what a thread brings

    @property
    def row_pieces(self) -> int:
        return self.way.pieces_of_row(self.tile, self.inner)

    @property
    def count(self) -> int:
        """Pieces of a thread."""
        return self.way.count(self.tile, self.inner, self.threads)

    @property
    def step(self) -> int:
        """From one of them to the next: rows of the tile, or pieces of one row."""
        return self.way.step(self.tile, self.inner, self.threads)

    @property
    def vectors(self) -> int:
        """Copies of a piece."""
        return self.way.piece // self.way.vector

    @property
    def bases(self) -> int:
        """Places along rows or columns that a thread brings pieces from."""
        if not self.way.along_k:
            return self.vectors
        return self.count if self.way.threads_along_k else 1

    @property
    def base_at(self) -> str:
        """The subscript of what a thread keeps for each of them: piece ``i``, or vector ``v`` of a piece."""
        return "" if self.bases == 1 else "[i]" if self.way.along_k else "[v]"

    def prepare(self) -> None:
        """What stays the same over the reduction: which pieces a thread brings, and from where."""
        w, way, p, gather = self.w, self.way, self.label, self.way.gather
        w.line()
        line = self._which()
        kept = [f"{p}_base", *(f"{p}_start{n}" for n in range(len(gather.limits)))]
        many = self.bases > 1
        counter = self.base_at[1:-1]
        if many:
            w.line(f"{self.t} {', '.join(f'{name}[{self.bases}]' for name in kept)};")
            self._loop(counter, self.bases)
        apart, last = (self.step, self.total - 1) if way.along_k else (way.vector, self.total - way.vector)
        start = (line, 1) if way.along_k else (f"{p}_piece", way.piece)
        axis = "m" if self.first else "n"
        place = linear([(f"{axis}0", 1), start, (counter or "0", apart)])
        if self.ragged:  # past the end the last one is read again: it makes results that nobody wants
            place = f"min({place}, {self.t}({last}))"
        if many or len(way.outer) > 1 or gather.limits:
            axis = axis if many else f"{p}_{axis}"
            w.line(f"const {self.t} {axis} = {place};")
            place = axis
        outer = [place]
        if len(way.outer) > 1:
            outer = [f"{place}_{d}" for d in range(len(way.outer))]
            for d, name in enumerate(outer):
                if gather.outer[d] or any(x.outer[d] for x in gather.limits):
                    w.line(f"const {self.t} {name} = {coordinate(place, way.outer, d)};")
        declared = "" if many else f"const {self.t} "
        batch = [coordinate("batch", way.batch, d) if prod(way.batch) > 1 else "0" for d in range(len(way.batch))]
        terms = [*zip(batch, gather.batch), *zip(outer, gather.outer)]
        w.line(f"{declared}{p}_base{self.base_at} = {linear(terms, gather.start)};")
        for n, x in enumerate(gather.limits):
            place = linear([*zip(batch, x.batch), *zip(outer, x.outer)], x.start)
            w.line(f"{declared}{p}_start{n}{self.base_at} = {place};")
        if many:
            w.close()

    def _which(self) -> str:
        """Writes which pieces a thread brings; returns the C variable of the first one's row or column."""
        w, way, p, width, pieces = self.w, self.way, self.label, self.row_bytes, self.row_pieces
        of = f"// this thread's pieces of a tile of {' and of '.join(self.pointers)}"
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
        """Declares the registers of pieces on their way."""
        if not self.way.copied:
            parts = f"[{self.vectors}]" if self.vectors > 1 else ""
            of = f"[{self.products}]" if self.products > 1 else ""
            ctype = self.way.gather.operand.dtype.ctype
            self.w.line(f"Vector<{ctype}, {self.way.vector}> {self.label}_next{of}[{self.count}]{parts};")

    def fetch(self) -> None:
        """Brings the thread's pieces of stage ``k``, to ``stage`` of the ring or to registers."""
        w, way, p = self.w, self.way, self.label
        depth = w.depth
        w.open(f"if (t < {self.pieces})" if self.pieces < self.threads else "")
        # A stage within one run of the last dimension has the other coordinates in common: they are uniform.
        common: list[str] = []
        if len(way.inner) > 1 and way.inner[-1] % self.inner == 0:
            w.line(f"const {self.t} k0 = k * {self.inner};")
            common = self._coordinates()
        several, vectors = self.count > 1, self.vectors > 1
        if not way.along_k:
            if several:
                self._loop("i", self.count)
            coords, along = self._inner([(f"{p}_k", 1), ("i" if several else "0", self.step)], common)
            if vectors:
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
            coords, along = self._inner(piece, common)
            apart = ""
            if each > 1:
                apart = "v" if places == 1 else "u"
                self._loop(apart, each)
                if places > 1:
                    w.line(f"const int v = c * {each} + u;")
            if several and way.threads_along_k:
                self._loop("i", self.count)
            self._copy(coords, along, apart)
        while w.depth > depth:
            w.close()

    def _inner(self, within: Sequence[tuple[str, int]], common: Sequence[str]) -> tuple[list[str], str]:
        """Writes the place in the reduction ``within`` the stage; returns the factor's coordinates and offset there.

        ``common`` are the coordinates of the stage's first place if the others differ in the last one alone.
        """
        w, way, place = self.w, self.way, linear(within)
        if common:
            coords = [*common[:-1], f"({common[-1]} + {place})"]
        else:
            w.line(f"const {self.t} k0 = k * {self.inner} + {place};")
            coords = self._coordinates()
        offset = linear(list(zip(coords, way.gather.inner)))
        if len(coords) == 1:
            return coords, offset
        w.line(f"const {self.t} along = {offset};")
        return coords, "along"

    def _coordinates(self) -> list[str]:
        """Writes the factor's coordinates at place ``k0`` of the reduction."""
        way = self.way
        if len(way.inner) == 1:
            return ["k0"]
        names = [f"k_{d}" for d in range(len(way.inner))]
        for d, name in enumerate(names):
            if way.gather.inner[d] or any(x.inner[d] for x in way.gather.limits):
                self.w.line(f"const {self.t} {name} = {coordinate('k0', way.inner, d)};")
        return names

    def _copy(self, coords: Sequence[str], along: str, counter: str) -> None:
        """One copy, from the coordinates of the reduction whose offset is ``along``.

        ``counter`` counts the vectors of a piece that share these.
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
        for product, pointer in enumerate(self.pointers):
            place = f"{pointer} + ({linear(terms)})"
            if way.copied:
                size = way.vector * source.itemsize
                to = self._piece(product) + (f" + v * {size}" if self.vectors > 1 else "")
                valid = f", {inside} ? {size} : 0" if inside else ""
                w.line(f"copy_async<{size}>({to}, {place}{valid});")
                continue
            to = self._next(product) + ("[v]" if self.vectors > 1 else "")
            value = f"load<{way.vector}>({place})"
            w.line(f"{to} = {f'{inside} ? {value} : Vector<{source.ctype}, {way.vector}>{{}}' if inside else value};")

    def _next(self, product: int) -> str:
        """The registers of piece ``i``."""
        of = f"[{product}]" if self.products > 1 else ""
        return f"{self.label}_next{of}[{'i' if self.count > 1 else '0'}]"

    def _piece(self, product: int) -> str:
        """Where piece ``i`` of a thread lies in a stage."""
        p, way = self.label, self.way
        stage = f"shared.{p}[stage]" + (f" + {product * self.bytes}" if product else "")
        if self.count == 1:
            return f"{stage} + {p}_at"
        if way.along_k and not way.threads_along_k:  # the pieces' numbers have no bits in common with those of threads
            return f"{stage} + ({p}_at ^ i * {self.step * 16})"
        return f"{stage} + {p}_at + i * {self.step * self.row_bytes}"

    def stash(self) -> None:
        """Writes what came to registers to shared memory, in the type that is multiplied."""
        w, way = self.w, self.way
        if way.copied:
            return
        depth = w.depth
        w.open(f"if (t < {self.pieces})" if self.pieces < self.threads else "")
        if self.count > 1:
            self._loop("i", self.count)
        for product in range(self.products):
            self._stash(product)
        while w.depth > depth:
            w.close()

    def _stash(self, product: int) -> None:
        w, way = self.w, self.way
        same = way.gather.operand.dtype.ctype == way.element
        to, pieces = f"reinterpret_cast<{way.element}*>({self._piece(product)})", self._next(product)
        if same and self.vectors == 1:
            w.line(f"store_shared({to}, {pieces});")
            return
        at = "[e]" if self.vectors == 1 else "[e][0]" if way.vector == 1 else f"[e / {way.vector}][e % {way.vector}]"
        value = f"{pieces}{at}" if same else f"convert<{way.element}>({pieces}{at})"
        name = f"piece{product or ''}"
        w.line(f"Vector<{way.element}, {way.piece}> {name};")
        w.line("#pragma unroll")
        w.line(f"for (int e = 0; e < {way.piece}; ++e) {name}[e] = {value};")
        w.line(f"store_shared({to}, {name});")

    def _loop(self, counter: str, count: int) -> None:
        self.w.line("#pragma unroll")
        self.w.open(f"for (int {counter} = 0; {counter} < {count}; ++{counter})")

    # ---- shared memory -> fragments

    @property
    def fragments(self) -> int:
        """Fragments of 16 rows or columns of a warp."""
        return self.of_warp // 16

    def lane(self) -> None:
        """Where the row of the warp's first fragment lies of which a lane gives ldmatrix the address."""
        w, way, p, width = self.w, self.way, self.label, self.row_bytes
        start, lines = ("warp_row", "rows") if self.first else ("warp_col", "columns")
        # ldmatrix takes four matrices of 8 x 16 bytes.  Those of A: two below each other, two to the right of them;
        # those of B: two to the right of each other, two below them (`mma.cuh`).
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
        """Loads the fragments of step ``kk`` from ``stage``."""
        for product in range(self.products):
            self._parts(product)

    def _parts(self, product: int) -> None:
        w, p, several = self.w, self.label, self.fragments > 1
        counter = "i" if self.first else "j"
        if several:
            w.line("#pragma unroll")
            w.line(f"for (int {counter} = 0; {counter} < {self.fragments}; ++{counter})")
        number = counter if several else "0"
        to = linear([(number, 1)], product * self.fragments)
        # Steps along a row of the tile change bits that no lane's place has before the swizzle: it keeps them.
        down, along = (number, "kk") if self.way.along_k else ("kk", number)
        rows = f" + {product * self.bytes}" if product else ""
        rows += f" + {down} * {16 * self.row_bytes}" if down != "0" else ""
        lane = f"({p}_lane ^ {along} * {STEP})" if along != "0" else f"{p}_lane"
        name = "load_matrices" if self.way.along_k else "load_matrices_transposed"
        indent = "    " if several else ""
        w.line(f"{indent}{name}({p}_part[kk % 2][{to}], shared.{p}[stage]{rows} + {lane});")

    def round(self) -> None:
        """Rounds the fragments of step ``kk`` to what the tensor cores read of them."""
        if self.way.gather.operand.dtype.name == "float32":
            counter = "i" if self.first else "j"
            self.w.line("#pragma unroll")
            self.w.line(f"for (int {counter} = 0; {counter} < {self.products * self.fragments}; ++{counter})")
            self.w.line(f"    round_to_tf32({self.label}_part[kk % 2][{counter}]);")
