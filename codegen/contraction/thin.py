"""The contraction family's form for a large operand and a thin one: products at the speed of reading memory once.

A block has some rows of the large operand (or columns: whichever it lies in).  Every lane reads 16 bytes or more of a
row, straight to registers, and the same terms of the thin operand: a sum does not depend on the order of its terms, so
that what lies side by side in a lane's registers may be any terms that both operands agree on.  There is no tile in
shared memory, and nothing to wait for but memory.  The warps of a block share the reduction, and add up their sums in a
fixed order.

Where the kernel is launched while the one before ends, its part of the large operand is on the way to the L2 cache
before it waits (`codegen.kernel.in_sequence`).  If no earlier kernel writes that operand, as where it is a weight, the
lanes' own pieces are on their way to shared memory instead: registers would not keep them over a wait.
"""

from __future__ import annotations

from collections.abc import Callable

from codegen.buffers import VECTORS, Buffer, Edge, guard
from codegen.contraction.thin_operand import WORDS, ThinOperand
from codegen.contraction.thin_pieces import LANES, THIN, WIDE, in_pairs, thin_paths
from codegen.contraction.thin_schedule import ThinSchedule, blocks_of_registers, rows_of_lane, thin_pieces
from codegen.contraction.totals import Totals
from codegen.declined import Declined
from codegen.fragments import ResultFragments, space, staging
from codegen.iteration import linear, signed_index_type, unsigned
from codegen.kernel import FROM_HERE, UNTIL_HERE, UNTIL_HERE_BUT_KNOWN, Kernel, locate
from codegen.prologue import Prologue
from codegen.sizes import most
from codegen.spec import ContractionSpec, KernelSource


def render(spec: ContractionSpec, schedule: ThinSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C.  Raises Declined if the spec cannot have this form."""
    return _Renderer(spec, schedule).render()


class _Renderer:
    def __init__(self, spec: ContractionSpec, schedule: ThinSchedule) -> None:
        self.spec, self.s, self.paths = spec, schedule, thin_paths(spec)
        s, paths = schedule, self.paths
        self.w = Kernel(spec.name)
        names = self.w.names
        self.at = space(spec)
        pairs = [in_pairs(way, paths.piece) for way in (paths.wide, paths.thin)]
        ways, codes = zip(*(p or (way, None) for p, way in zip(pairs, (paths.wide, paths.thin))))
        apart = max(p.apart if p else 1 for p in pairs)
        a, b = zip(ways, codes) if paths.first else zip(ways[::-1], codes[::-1])
        self.prologues = (
            Prologue(self.w, a[0].gather, names, "a", pairs=a[1] is not None),
            Prologue(self.w, b[0].gather, names, "b", spec.others, pairs=b[1] is not None),
        )
        wide, thin = self.prologues if paths.first else self.prologues[::-1]
        t = signed_index_type(paths.size, paths.few, paths.depth, paths.wide.reach, paths.thin.reach)
        self.t = t
        lines = rows_of_lane(s)
        slots = 1 if s.ring else s.pieces, thin_pieces(self.paths, s)
        rows = (lines, paths.size), (paths.columns, paths.few)
        self.wide, self.thin = (
            ThinOperand(self.w, t, way, prologue, code, apart, s.pieces, slot, paths.piece, *each)
            for way, prologue, code, slot, each in zip(ways, (wide, thin), codes, slots, rows)
        )
        tile = (s.tile, paths.columns * THIN)
        total = (paths.size, paths.few)
        if not paths.first:
            tile, total = tile[::-1], total[::-1]
        self.fragments = ResultFragments(
            self.w, self.at, names, spec, (Edge(total[0], tile[0]), Edge(total[1], tile[1]))
        )
        self.totals = Totals(self.w, spec, s.threads)
        self.fragments.beside = self.totals.values
        self.staging = staging(self.at, *tile, spec.products)
        self.tiles = Edge(paths.size, s.tile).tiles
        if paths.batch * self.tiles >= 2**31:
            raise Declined(f"{paths.batch * self.tiles} tiles are more than a grid has blocks")
        self.first = "first" if most(self.tiles) > 1 else "0"

    def render(self) -> KernelSource:
        w, s, spec, paths = self.w, self.s, self.spec, self.paths
        types = " and ".join(dict.fromkeys((paths.wide.product, paths.thin.product)))
        what = "rows" if paths.first else "columns"
        details = [
            f"{spec.sums} of {types}",
            f"{s.tile} {what} a block, whose {s.warps} warps share the reduction; "
            f"a lane has {s.pieces} pieces of {paths.piece} terms of a row in flight",
        ]
        w.parameters += [text for side in self.prologues for text in side.parameters()]
        w.parameters += self.totals.parameters()
        w.parameters += self.fragments.epilogue.pointers.parameters()
        w.line("const int t = threadIdx.x, lane = t % 32, warp = t / 32;")
        t = "int64" if "int64" in (self.t, self.fragments.t) else "int32"
        blocks = locate(w, t, [("batch", paths.batch, 1), ("first", self.tiles, s.tile)])
        lane = f"lane / {LANES}"
        if s.ring:
            w.share(self.wide.rings(s.threads))
        else:
            self.wide.ahead(s.tile, self.first, s.threads)
        w.line(UNTIL_HERE)
        self.wide.prologue.scalars()
        self.wide.prepare(lane if self.first == "0" else f"{self.first} + {lane}")
        self._begin()
        if s.ring:
            w.line(UNTIL_HERE_BUT_KNOWN)
        self.thin.prologue.scalars()
        self.thin.prepare(lane)
        self.totals.declare()
        self._mainloop()
        if not s.ring:  # what the next kernel asks for is not in the way of what is on its way already
            w.line(FROM_HERE)
        self._results()
        return w.source(
            self.at.program,
            details,
            blocks=blocks,
            threads=s.threads,
            barriers=True,
            blocks_per_sm=min(max(1, blocks_of_registers(paths, s)), 1024 // s.threads),
        )

    # ---- multiply

    def _missing(self) -> tuple[bool, bool]:
        """Returns whether pieces of a round may not exist for some lanes, or for the whole warp."""
        s, paths = self.s, self.paths
        span, one, depth = paths.span(s.pieces), paths.span(1), paths.depth
        # Pieces are whole.  Branches of warps save computing what does not exist, but have loads wait for each other.
        computed = any(side.way.gather.program is not None for side in (self.wide, self.thin))
        missing = depth % span != 0 or s.warps * span > depth
        lanes = depth % one != 0 or (missing and not computed)
        return lanes, missing and not lanes

    @property
    def _first_term(self) -> str:
        """The C expression of the first term of a warp."""
        return linear([("warp", self.paths.span(self.s.pieces))]) if self.s.warps > 1 else "0"

    def _exists(self, k: str, c: str) -> str:
        """Returns the C condition that piece ``c`` from term ``k`` on exists, if it does for all lanes or for none."""
        step = self.paths.span(1) if self._missing()[1] else 0
        return f"{linear([(k, 1), (c, step)])} < {self.paths.depth}"

    def _bringing(self, name: str, bring: Callable[[str], None]) -> None:
        """Writes the function of this name that brings piece ``c`` from term ``k`` on."""
        w, lanes = self.w, self._missing()[0]
        with w.block(f"const auto {name} = [&](int c, {self.t} k)", "};"):
            w.line(f"const {unsigned(self.t)} k0 = {self._place('c')};")
            if lanes:
                w.line(f"const bool inside = k0 < {self.paths.depth};")
            bring("inside" if lanes else "")

    def _bring(self, name: str, count: int, then: str = "") -> None:
        """Writes the calls of that function for the first pieces."""
        w, begin = self.w, self._first_term
        with w.scope():
            c = w.each("c", count)
            w.line(f"{guard(self._exists(begin, c) if self._missing()[1] else '')}{name}({c}, {begin});")
            if then:
                w.line(then)

    def _begin(self) -> None:
        """Writes the first reads of the large operand."""
        w, s = self.w, self.s
        w.line()
        with w.block("struct Pieces", "};"):
            self.wide.declare()
            self.thin.declare()
        w.line("Pieces read;")
        self._bringing("fetch_large", self.wide.copy if s.ring else self.wide.fetch)
        self._bring("fetch_large", s.pieces, "copy_async_commit();" if s.ring else "")

    def _mainloop(self) -> None:
        w, s, paths = self.w, self.s, self.paths
        depth, step = paths.depth, s.warps * paths.span(s.pieces)
        lanes, whole = self._missing()
        computed = any(side.way.gather.program is not None for side in (self.wide, self.thin))
        exists = self._exists
        self._bringing("fetch_thin", self.thin.fetch)
        tiles, columns = s.tile // WIDE, paths.columns
        w.line(f"{self.fragments.total} sum[{paths.products}][{tiles}][{columns}][4] = {{}};")
        slots = thin_pieces(self.paths, s)
        self._bring("fetch_thin", slots)
        self.totals.add_up()
        with w.block(f"for ({self.t} k = {self._first_term}; k < {depth}; k += {step})"), w.scope():
            c = w.each("c", s.pieces)
            if s.ring:
                w.line(f"copy_async_wait<{s.pieces - 1}>();")
            with w.block(f"if ({exists('k', c)})", when=whole and c != "0"):
                if s.ring:
                    self.wide.take(c)
                kept = "inside" if lanes and computed else ""
                if kept:
                    w.line(f"const bool inside = {self._place(c)} < {depth};")
                self._multiply(kept)
            w.line(f"if ({exists(f'k + {step}', c)}) fetch_large({c}, k + {step});")
            if s.ring:
                w.line("copy_async_commit();")
            if slots == s.pieces:
                w.line(f"if ({exists(f'k + {step}', c)}) fetch_thin({c}, k + {step});")
                return
            w.line(f"const int later = (c + {slots}) % {s.pieces};")
            w.line(f"const {self.t} next = later < c ? k + {step} : k;")
            w.line(f"if ({exists('next', 'later')}) fetch_thin(later, next);")

    def _place(self, c: str) -> str:
        """Returns the C expression of the term at which a lane's piece begins."""
        return linear([("k", 1), (f"lane % {LANES}", self.paths.piece), (c, self.paths.span(1))])

    def _multiply(self, kept: str) -> None:
        """Writes the products of piece ``c`` of all rows."""
        w, paths = self.w, self.paths
        types = f"{paths.wide.product}, {paths.thin.product}"
        with w.unrolled(f"for (int q = 0; q < {paths.words}; q += {WORDS})", when=paths.words > WORDS):
            self._multiply_words(types, kept)

    def _multiply_words(self, types: str, kept: str) -> None:
        w, paths = self.w, self.paths
        self.thin.words("thin", 0, kept)
        for product in range(paths.products):
            name = f"wide{product or ''}"
            self.wide.words(name, product, kept)
            w.line(f"multiply_pieces<{types}>(sum[{product}], {name}, thin);")

    # ---- results

    def _results(self) -> None:
        w, s, paths, fragments = self.w, self.s, self.paths, self.fragments
        tiles, columns = s.tile // WIDE, paths.columns
        count, total = paths.products * tiles * columns, fragments.total
        w.line()
        w.line("// All warps have sums of the same results.")
        w.line(Buffer("parts", total, (s.warps, count, 32, 4), align=VECTORS).static)
        staged = self.staging
        rows, length = (int(n) for n in staged.dims[1:-1].split("]["))
        w.line(Buffer("sums", total, (paths.products, rows, length), align=VECTORS).static)
        with w.scope():
            p, i, j = w.each("p", paths.products), w.each("i", tiles), w.each("j", columns)
            block = linear([(p, tiles * columns), (i, columns), (j, 1)])
            own = ", ".join(f"sum[{p}][{i}][{j}][{e}]" for e in range(4))
            w.line(f"store_shared(parts[warp][{block}][lane], Vector<{total}, 4>{{{{{own}}}}});")
        w.line("__syncthreads();")
        with w.block(f"for (int i = t; i < {count * 32}; i += {s.threads})"):
            w.line("const int l = i % 32, block = i / 32;")
            w.line(f"Vector<{total}, 4> whole = load_shared<4>(parts[0][block][l]);")
            if s.warps > 1:
                with w.unrolled(f"for (int n = 1; n < {s.warps}; ++n)"):
                    w.line("const auto part = load_shared<4>(parts[n][block][l]);")
                    w.unrolled_line("for (int e = 0; e < 4; ++e) whole[e] += part[e];")
            with w.unrolled("for (int e = 0; e < 4; ++e)"):
                tile = f"block / {columns} % {tiles} * {WIDE} + " if tiles > 1 else ""
                column = f"block % {columns} * {THIN} + " if columns > 1 else ""
                w.line(f"const int large = {tile}l / {LANES} + e / 2 * 8, few = {column}l % {LANES} * 2 + e % 2;")
                place = "[large][few]" if staged.by_rows == paths.first else "[few][large]"
                product = f"block / {tiles * columns}" if paths.products > 1 else "0"
                w.line(f"sums[{product}]{place} = whole[e];")
        self.totals.finish()
        w.line("__syncthreads();")
        for number in range(paths.products):
            w.line(f"auto& {staged.name(number)} = sums[{number}];")
        fragments.batch()
        fragments.epilogue.scalars()
        m, n = "{r}", "{c}"
        if self.first != "0":
            m, n = (f"{self.first} + {m}", n) if paths.first else (m, f"{self.first} + {n}")
        fragments.take(staged, s.threads, m, n)
