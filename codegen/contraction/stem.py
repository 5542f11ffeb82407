"""Convolutions of few channels, such as the first ones of networks, by mma.sync on a part of the image.

As in `codegen.contraction.halo`, a block brings the parts of the image under its tiles of results to shared memory one
after the other.  Threads bring vectors along rows of the image, in either layout, and write them channel by channel, so
that the taps of a row of a window lie next to each other.  The reduction has four bytes of these at a time: a lane
reads its words where they lie, and nothing but the end of a row of taps is padding.  Where the channels of windows
would begin within a word they get another one, of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import gcd
from operator import mul
from textwrap import wrap

from codegen.bf16x6 import LARGE, SMALL
from codegen.buffers import VECTORS, every
from codegen.contraction.halo import Renderer
from codegen.contraction.halo_schedule import STEP
from codegen.contraction.halo_windows import CHUNK, DIMS, FRAGMENT_COLS, Phase
from codegen.contraction.stem_schedule import TOGETHER, WORD, WORDS, StemSchedule, StemTile
from codegen.iteration import coordinate, linear, unsigned
from codegen.spec import ContractionSpec, KernelSource


def render(spec: ContractionSpec, schedule: StemSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C.  Raises Declined if the spec cannot have this form."""
    return _Stem(spec, schedule).render()


class _Stem(Renderer):
    x: StemTile

    def __init__(self, spec: ContractionSpec, schedule: StemSchedule) -> None:
        super().__init__(spec, schedule, StemTile)
        self.whole, self.rounds = True, False

    def _walk(self) -> None:
        w, s, x, at = self.w, self.s, self.x, self.at
        vectors = f"Vector<{self.spec.a.operand.dtype.ctype}, {x.each}>"
        each = f"for (int n = 0; n < {x.brought}; ++n)"
        if s.stages > 1:
            w.line(
                f"{vectors} next[{x.brought}][{at.channels}];  // what a thread brings of the next part of the image"
            )
            w.unrolled_line(f"{each} read(tile, t + n * {s.threads}, next[n]);")
        w.open(f"for (; tile < {x.tiles}; tile += {s.workers})")
        w.line("__syncthreads();  // the part of the image before has been used")
        if s.stages > 1:
            w.unrolled_line(f"{each} put(t + n * {s.threads}, next[n]);")
        else:
            w.line("#pragma unroll 1")
            with w.block(f"for (int i = t; i < {x.rows * x.pieces}; i += {s.threads})"):
                w.line(f"{vectors} in[{at.channels}];")
                w.line("read(tile, i, in);")
                w.line("put(i, in);")
        if s.wgmma:
            w.line("fence_async_shared();  // wgmma reads the filters")
        w.line("__syncthreads();  // this part of the image is there")
        if s.stages > 1:
            with w.block(f"if (tile + {s.workers} < {x.tiles})"):
                w.unrolled_line(f"{each} read(tile + {s.workers}, t + n * {s.threads}, next[n]);")

    # ---- operands

    def _table(self, ctype: str, name: str, values: list[str]) -> None:
        """Writes a table of constants."""
        w = self.w
        with w.block(f"static const {ctype} {name}[] =", "};"):
            for text in wrap(", ".join(values), 110 - 4 * w.depth):
                w.line(text)

    def _bring_filters(self) -> None:
        """Writes the copies of the filters, each as one row of words or as wgmma reads it, and of the words' places."""
        w, x, gather = self.w, self.x, self.spec.b
        per, count = WORD // x.itemsize, x.steps * WORDS
        every_word = [*x.words, *[None] * (count - len(x.words))]
        self._table("int", "reaches", [str(word.row * x.reads[0] + word.place if word else 0) for word in every_word])
        w.line(f"for (int i = t; i < {count}; i += {self.s.threads}) shared.reach[i] = reaches[i];")
        rest = every_word[x.clean * WORDS :]
        if rest:
            self._table("uint32", "bits", [f"0x{word.mask if word else 0:x}" for word in rest])
            w.line(f"for (int i = t; i < {len(rest)}; i += {self.s.threads}) shared.kept[i] = bits[i];")
        terms = [term for word in every_word for term in (word.terms if word else (None,) * per)]
        channel, *taps = gather.inner
        steps = (channel, *(0 for _ in range(DIMS - len(taps))), *taps)
        places = [-1 if term is None else gather.start + sum(map(mul, term, steps)) for term in terms]
        self._table("int", "terms", [str(place) for place in places])
        w.line("#pragma unroll 4")
        with w.block(f"for (int i = t; i < {x.cols * count}; i += {self.s.threads})"):
            w.line(f"const int f = i / {count}, word = i % {count};")
            ctype = gather.operand.dtype.ctype
            w.line(f"Vector<{ctype}, {per}> value = {{}};")
            with w.unrolled(f"for (int e = 0; e < {per}; ++e)"):
                w.line(f"const int term = terms[{linear([('word', per), ('e', 1)])}];")
                w.line(f"if (term >= 0) value[e] = {self.filters}[{linear([('f', gather.outer[0]), ('term', 1)])}];")
            self._store("value", per, self._place_of_filter)

    _bring_matrix = _bring_filters

    def _place_of_filter(self, part: str) -> str:
        """Returns where a part of filter ``f``'s word lies."""
        x = self.x
        row = "f"
        if x.run == 4:  # two fragments share 16 filters so that a thread has 4 neighbours
            row = "(f / 16 * 16 + f % 4 / 2 * 8 + f % 16 / 4 * 2 + f % 2)"
        if self.s.wgmma:
            line = linear([(part, 2 * x.steps), (f"word / {WORDS}", 2), ("word % 2", 1)])
            return f"shared.filters[{line}][{row} * 16 + word % {WORDS} / 2 * {WORD}]"
        return f"shared.filters[{linear([(part, x.cols), (row, 1)])}][word * {WORD}]"

    def _store(self, vector: str, count: int, place: Callable[[str], str]) -> None:
        """Writes how so many elements go to shared memory, rounded to tf32 or in parts; ``place`` is a part's place."""
        w, x = self.w, self.x
        if self.at.types[0] == "tf32":
            w.each_element(count, f"{vector}[e] = bits_float(to_tf32({vector}[e]));")
        if x.parts == 1:
            w.line(f"store_shared(reinterpret_cast<{x.element}*>(&{place('0')}), {vector});")
            return
        w.line(f"Vector<{x.element}, {count}> parts[{x.parts}];")
        w.line(f"split({vector}, parts);")
        with w.unrolled(f"for (int part = 0; part < {x.parts}; ++part)"):
            w.line(f"store_shared(reinterpret_cast<{x.element}*>(&{place('part')}), parts[part]);")

    def _bring_image(self) -> None:
        """Writes the functions that read a thread's i-th piece of what lies under a tile, and put it to its place.

        What is outside of the image is zero.
        """
        w, x, at, gather, t = self.w, self.x, self.at, self.spec.a, self.t
        vectors = f"Vector<{gather.operand.dtype.ctype}, {x.each}>"
        ragged = self.s.stages > 1 and x.rows * x.pieces % self.s.threads > 0
        with w.block(f"const auto read = [&](int tile, int i, {vectors} (&in)[{at.channels}])", "};"):
            w.unrolled_line(f"for (int c = 0; c < {at.channels}; ++c) in[c] = {{}};")
            places = self._locate()
            w.line(f"const int row = i / {x.pieces}, piece = i % {x.pieces};")
            conditions, terms = self._under(places, "row", x.under[:3])
            exists, offset = every(f"i < {x.rows * x.pieces}" if ragged else "", *conditions), linear(terms)
            column = linear([(places[3], at.stride[2]), ("piece", x.each)], -at.before[2] - x.lead)
            w.line(f"const {t} column = {column};")
            if x.vector:
                inside = every(exists, f"{unsigned(t)}(column) < {at.sizes[2]}")
                apart = x.each if x.interleaved else gather.inner[0]
                offset = linear([(offset, 1), ("column", at.steps[2])])
                with w.block(f"if ({inside})"), w.unrolled(f"for (int c = 0; c < {at.channels}; ++c)"):
                    w.line(f"in[c] = load<{x.each}>({self.image} + {linear([(f'({offset})', 1), ('c', apart)])});")
            else:
                loops = f"for (int e = 0; e < {x.each}; ++e)", f"for (int c = 0; c < {at.channels}; ++c)"
                with w.block(f"if ({exists})", when=bool(exists)), w.unrolled(*loops):
                    w.line(f"if ({unsigned(t)}(column + e) >= {at.sizes[2]}) continue;")
                    place = linear([(f"({offset})", 1), ("(column + e)", at.steps[2]), ("c", gather.inner[0])])
                    w.line(f"in[c][e] = {self.image}[{place}];")
        with w.block(f"const auto put = [&](int i, const {vectors} (&in)[{at.channels}])", "};"):
            if ragged:
                w.line(f"if (i >= {x.rows * x.pieces}) return;")
            w.line(f"const int row = i / {x.pieces}, piece = i % {x.pieces};")
            self._interleave()

    def _interleave(self) -> None:
        """Writes how a thread's columns go to shared memory, channel by channel."""
        w, x, at = self.w, self.x, self.at
        bytes_, ctype = x.each * x.channels * x.itemsize, self.spec.a.operand.dtype.ctype
        count = gcd(bytes_, VECTORS) // x.itemsize  # elements of a store
        n = f"(j * {count} + e)"
        if x.interleaved:  # as they lie: all channels of a column
            flat = f"({n} / {x.channels} * {at.channels} + {n} % {x.channels})"
            element = f"in[{flat} / {x.each}][{flat} % {x.each}]"
        else:
            element = f"in[{n} % {x.channels}][{n} / {x.channels}]"
        if x.channels > at.channels:
            element = f"{n} % {x.channels} < {at.channels} ? {element} : {ctype}{{}}"
        with w.unrolled(f"for (int j = 0; j < {bytes_ // x.itemsize // count}; ++j)"):
            w.line(f"Vector<{ctype}, {count}> out;")
            w.each_element(count, f"out[e] = {element};")
            to = linear([("piece", bytes_), ("j", count * x.itemsize)])
            self._store("out", count, lambda part: f"shared.image[0][{linear([(part, x.rows), ('row', 1)])}][{to}]")

    # ---- products

    def _windows(self, ctype: str = "const unsigned char*") -> None:
        super()._windows(ctype)

    def _window(self) -> str:
        tile, steps = self.s.tile, self.x.strides(self.x.reads[0])
        terms = [(f"({coordinate('r', tile, d)})", steps[d]) for d, size in enumerate(tile) if size > 1]
        return linear([("shared.image[0][0]", 1), *terms])

    def _reach(self, phase: Phase) -> None:
        """Writes nothing: places are read from a table."""

    def _step(self, phase: Phase) -> None:
        w, x = self.w, self.x
        w.line(f"const auto reach = load_shared<2>(&shared.reach[kk * {WORDS} + lane % 4 * 2]);")
        if x.clean < x.steps:
            w.line("Vector<uint32, 2> kept = {};")
            kept = f"load_shared<2>(&shared.kept[(kk - {x.clean}) * {WORDS} + lane % 4 * 2])"
            w.line(f"if (kk >= {x.clean}) kept = {kept};")

    def _load_fragment(self, name: str, phase: Phase, part: str = "0") -> None:
        w, x = self.w, self.x
        rows = (linear([(f"window[i][{half}]", 1), (part, x.part_bytes)]) for half in range(2))
        w.line(f"load_words({name}, {', '.join(rows)}, reach);")
        if x.clean < x.steps:
            w.line(f"if (kk >= {x.clean}) keep_bits({name}, kept);")

    def _multiply(self, phase: Phase) -> None:
        if self.x.parts == 1:
            super()._multiply(phase)
            return
        w, x, at = self.w, self.x, self.at
        each = f"for (int i = 0; i < {x.own}; ++i)"
        w.line(f"float sum[1][{x.own}][{at.fragments}][4] = {{}};")
        with self._terms(phase), w.unrolled(f"for (int j = 0; j < {at.fragments}; ++j)"):
            number = linear([("j", FRAGMENT_COLS), ("lane / 4", 1)])
            if at.filters % FRAGMENT_COLS:
                number = f"min({number}, {at.filters - 1})"
            w.line(f"uint32 b[{TOGETHER}][{x.parts}][2];")
            with w.unrolled(f"for (int k = 0; k < {TOGETHER}; ++k)", f"for (int part = 0; part < {x.parts}; ++part)"):
                place = f"[{linear([('part', x.cols), (number, 1)])}][(k0 + k) * {STEP} + lane % 4 * {CHUNK}]"
                w.line(f"load_chunks(b[k][part], &shared.filters{place});")
            w.line(f"float some[{x.own}][4] = {{}};")
            for p, q in SMALL + LARGE:
                w.unrolled_line(f"for (int k = 0; k < {TOGETHER}; ++k)")
                w.line(f"    {each} mma<bfloat16, bfloat16>(some[i], a[k][{p}][i], b[k][{q}]);")
            with w.unrolled(each):
                w.each_element(4, "sum[0][i][j][e] += some[i][e];")

    def _multiply_together(self, phase: Phase) -> None:
        w, x, columns = self.w, self.x, self.at.filters
        w.macros[f"FUSEGRAPH_WGMMA({columns})"] = None
        w.line(f"float sum[1][{x.own}][{columns // 2}] = {{}};")
        with self._terms(phase), w.unrolled(f"for (int i = 0; i < {x.own}; ++i)"):
            w.line(f"float some[{columns // 2}] = {{}};")
            w.line("wgmma_fence();")
            for p, q in SMALL + LARGE:
                with w.unrolled(f"for (int k = 0; k < {TOGETHER}; ++k)"):
                    w.line(f"wgmma<bfloat16, bfloat16, {columns}>(some, a[k][{p}][i],")
                    row = linear([("(k0 + k)", 2)], q * 2 * x.steps)
                    w.line(f"    matrix_descriptor<0>(shared.filters[{row}], {x.cols * 16}, 128), true);")
            w.line("wgmma_commit();")
            w.line("wgmma_wait<0>();")
            w.line("wgmma_hold(some);")
            w.each_element(columns // 2, "sum[0][i][e] += some[e];")

    @contextmanager
    def _terms(self, phase: Phase) -> Iterator[None]:
        """Writes the loop over as many terms as are added up by tensor cores alone, and the loads of their fragments.

        What is written inside adds what it makes of them to the sums, in float32.
        """
        w, x = self.w, self.x
        w.line("#pragma unroll 1")
        with w.block(f"for (int k0 = 0; k0 < {x.steps}; k0 += {TOGETHER})"):
            w.line(f"uint32 a[{TOGETHER}][{x.parts}][{x.own}][4];")
            with w.unrolled(f"for (int k = 0; k < {TOGETHER}; ++k)"):
                w.line("const int kk = k0 + k;")
                self._step(phase)
                with w.unrolled(f"for (int part = 0; part < {x.parts}; ++part)", f"for (int i = 0; i < {x.own}; ++i)"):
                    self._load_fragment("a[k][part][i]", phase, "part")
            yield
