"""Scores and results as tensor cores leave them: what the wgmma and the mma form of attention do with their fragments.

C variables: ``s`` the scores of a tile, ``o`` the results, ``rows`` what is known of a thread's two rows, ``row`` the
first of them in the block's tile of queries, which begins at ``m0``, ``lane``, ``unit``, ``inverse``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from math import e, log, log2, prod

from codegen.attention.random import RandomWords, random_words
from codegen.attention.scores import Scores, stored
from codegen.attention.spec import AttentionSpec
from codegen.buffers import Edge
from codegen.declined import Declined
from codegen.epilogue import Epilogue, Run
from codegen.expr import Anchor, Index, Load, Program, Result, Value, literal, varying
from codegen.iteration import linear
from codegen.kernel import Kernel, tile_at
from codegen.sizes import most, smaller


def check_types(spec: AttentionSpec, *, small: bool = False) -> None:
    """Raises Declined with a reason if tensor cores cannot compute attention; ``small``: 8-bit floats are float16."""
    kind = spec.q.dtype.name
    floats = [op.dtype for op in (spec.q, spec.k, spec.v)]
    if small and all(d.is_float and d.itemsize == 1 for d in floats):
        kind = "float16"
    elif kind not in ("bfloat16", "float16") or any(op.dtype.name != kind for op in (spec.k, spec.v)):
        raise Declined("tensor cores multiply queries, keys and values that are all bfloat16 or all float16")
    if not spec.rounded:
        raise Declined(f"probabilities are not to be rounded to {kind}")
    if spec.program.real != "float":
        raise Declined("tensor cores do not add up in float64")


def padded(elements: int) -> int:
    """Returns how many elements, or columns, tensor cores multiply where there are so many."""
    return Edge(elements, 16).padded


#: The score that a thread has of the e-th of two neighbours.
SCORE = "s[j + f * 2 + e]"


def factored(program: Program) -> int | None:
    """Returns the instruction that multiplies every product by one number before all else is done with it; or None."""
    varies = varying(program, lambda v: not isinstance(v, Load) or any(program.loads[v.operand].strides))
    found = [k for k, i in enumerate(program.instructions) if Anchor() in i.args]
    if len(found) != 1 or any(s.value == Anchor() for s in program.stores):
        return None
    rest = [v for v in program.instructions[found[0]].args if v != Anchor()]
    if program.instructions[found[0]].template != "{0} * {1}" or len(rest) != 1:
        return None
    known = isinstance(rest[0], Load) and not any(program.loads[rest[0].operand].strides)
    known = known or (isinstance(rest[0], Result) and not varies[rest[0].instruction])
    return found[0] if known else None


class ScoreFragments(Scores):
    """Writes scores and results of a block's queries, so many ``rows``; tiles of so many ``heads`` follow each other.

    When a tile of ``keys`` is masked, the ``group`` of queries from ``top`` on (a C expression) is looked at together.
    What is ``known`` of ranges is told as to `Scores`.
    """

    def __init__(
        self, w: Kernel, spec: AttentionSpec, keys: int, top: str, group: int, rows: int, heads: int, **known: bool
    ) -> None:
        super().__init__(w, spec, keys, **known)
        self.top, self.group_rows, self.block_rows = top, group, rows
        self.row_tiles, self.heads = Edge(spec.rows, rows), smaller(prod(spec.batch), heads)
        self.tiles = self.row_tiles.tiles
        self.element = spec.q.dtype.ctype if spec.q.dtype.itemsize == 2 else "float16"
        #: exponentials are multiplied by 2^lift, so that more of them are normal numbers when they are rounded
        self.lift = 0
        #: whether, of each four keys, two are in the first half of a tile and two in the second
        self.quads = False
        #: what multiplies every product, where nothing else is done to products that no mask rules out
        self.factor = self._factor()
        #: the tile of which scores were made last
        self.made = ""

    def place(self, number: str, *, keys: bool = True, some: bool = False) -> None:
        """Writes where a tile of queries is and, with ``keys``, the tiles of keys it meets (``some``: at least one)."""
        self.begin(number)
        self.bound_numbers()
        if keys:
            self.keys_met("m0", self.block_rows, some=some)

    def begin(self, number: str) -> None:
        """Writes where the tile of queries of this number begins."""
        w, spec, tiles = self.w, self.spec, self.tiles
        w.line(f"const Tile at = {tile_at(number, prod(spec.batch), tiles, self.heads)};")
        # The last queries of a causal mask meet the most keys: they begin first.
        position = f"({tiles - 1} - at.col)" if spec.growing and most(tiles) > 1 else "at.col"
        w.line(f"const int m0 = {position} * {self.block_rows};")
        self.coordinates("at.row")

    def _factor(self) -> Value | None:
        first, inner = factored(self.edge.program), factored(self.inner.program)
        if first is None or inner is None or self.spec.sink is not None:
            return None
        if self.inner.program.stores[0].value != Result(inner):
            return None
        self.edge.known[Result(first)] = self.inner.known[Result(inner)] = SCORE
        (value,) = (v for v in self.edge.program.instructions[first].args if v != Anchor())
        return value

    @property
    def plain(self) -> bool:
        return self.factor is not None or super().plain

    def unit(self) -> None:
        if self.factor is None:
            super().unit()

    def scalars(self) -> None:
        super().scalars()
        if self.factor is None:
            return
        w, unit = self.w, literal(self.spec.scale * log2(e), "float")
        w.line(f"const float factor = {self.edge.constant(self.factor)};  // of every score")
        w.line("const bool positive = factor > 0.0f && factor < infinity<float>();  // products keep their order")
        w.line(f"const float unit = positive ? {unit} * factor : {unit};  // of a score, to base 2")

    def state(self, sink: str, width: int) -> None:
        """Writes the results and what is known of the rows, before the first tile."""
        w, spec = self.w, self.spec
        w.line(f"float o[{width // 2}] = {{}};")
        w.line("attention::Rows rows;")
        if spec.sink is not None:
            self.sunk(sink)
            w.line("rows.largest[0] = rows.largest[1] = sunk;")
            own = "lane % 4 == 0" if not self.lift else f"lane % 4 == 0 ? {2**self.lift}.0f : 0.0f"
            w.line(f"rows.total[0] = rows.total[1] = {own};  // one of the lanes that share a row has it")

    @property
    def first_key(self) -> str:
        """The first key of ``tile``."""
        return linear([("span.base", int(self.spanned)), ("tile", self.keys)])

    @property
    def trivial(self) -> bool:
        """Whether all products are scores."""
        return self.plain and not self.differ and self.factor is None

    @property
    def low(self) -> bool:
        """Whether scores may be the least floats: masks in memory often are."""
        return any(op.dtype.is_float and any(op.strides[-2:]) for op in self.spec.program.loads)

    def define(self) -> None:
        """Writes the function that computes scores from a tile's products."""
        if self.spanned:
            self._intervals()
        if not self.trivial:
            whole = ", bool whole" if self.listed else ""
            with self.w.block(f"const auto scores = [&](int tile{whole})", "};"):
                self._program()
        if self.weight is not None:
            with self.w.block("const auto weigh = [&](int tile)", "};"):
                self.w.line(f"const int n0 = {self.first_key};")
                random = random_words(self.weight.program)
                if random is None or self.quads or not random.together:
                    with self._elements():
                        self.weigh("m", "n", SCORE)
                        self.keep("s", "weighted")
                else:
                    self._weighted_at_random(self.weight, random)

    def _intervals(self) -> None:
        """Writes the intervals of keys that a thread's two rows meet."""
        w = self.w
        w.line("int begin[2], end[2];  // the keys that a row meets are those from begin to end - 1")
        with w.unrolled("for (int f = 0; f < 2; ++f)"):
            m = "m0 + row + f * 8"
            w.line(f"const int m = {self.row_tiles.held(m)};")
            self.interval("m")

    def _weighted_at_random(self, weight: Epilogue, random: RandomWords) -> None:
        """Writes the weight of a tile's exponentials, sixteen keys of a row at a time."""
        above, seed, offset = random.numbers(weight.program, weight.constant, (*self.batch, "", ""))
        weight.known[Result(random.compared)] = random.enough("words[h * 2 + e]")
        with self.neighbours("m = m0 + row + f * 8", 8):
            first = linear([*zip((*self.batch, "m"), random.steps), ("(n0 + j * 2)", 1)])
            self.w.line("uint32 words[4];")
            self.w.line(f"attention::random_words(uint32({first}), {above}, lane, {seed}, {offset}, words);")
            with self.w.unrolled("for (int h = 0; h < 2; ++h)"):
                self.w.line(f"const {self.t} n = n0 + j * 2 + h * 8 + lane % 4 * 2;")
                self.weigh("m", "n", "s[j + h * 4 + f * 2 + e]")
                self.keep("s", "weighted", "j + h * 4 + f * 2")

    def make(self, tile: str) -> None:
        """Writes the call that turns a tile's products into scores."""
        self.made = f"{tile} / 2" if self.listed else tile
        if not self.trivial:
            self.w.line(f"scores({f'{tile} / 2, {tile} % 2' if self.listed else tile});")

    def softmax(self, chains: int, rounded: str = "") -> None:
        """Writes the softmax of the scores made last; with a type, exponentials are ``rounded`` before summing."""
        low = f", {rounded or 'float'}, true" if self.low else f", {rounded}" if rounded else ""
        self._taken_in("softmax", f"{chains}{low}", "rescale")

    def largest(self, chains: int) -> None:
        """Writes the first half of `softmax`, which leaves scores as they are that are not the least floats."""
        low = ", true" if self.low else ""
        self.w.line("float shift[2];")
        self.w.line(f"attention::largest<{chains}{low}>(s, rows, unit, shift, rescale);")

    def exponentials(self, chains: int) -> None:
        """Writes the second half of `softmax`."""
        self._taken_in("exponentials", str(chains), "shift, rescale")

    def _taken_in(self, function: str, template: str, arguments: str) -> None:
        lift = f", {self.lift}.0f" if self.lift else ""
        self.w.line(f"attention::{function}<{template}>(s, rows, unit, {arguments}{lift});")
        if self.weight is not None:
            self.w.line(f"weigh({self.made});")

    def _program(self) -> None:
        w = self.w
        if self.factor is not None:
            with w.block("if (!positive)"):
                w.unrolled_line(f"for (int i = 0; i < {self.keys // 2}; ++i) s[i] *= factor;")
            if not self.differ:
                return
        w.line(f"const int n0 = {self.first_key};")
        self.by_tile(self._unbroken, self._tile)

    def _unbroken(self) -> str:
        """Returns the C condition under which neither a bound nor a range is broken in a tile."""
        if not self.spanned:
            return self.inside(self.top, self.group_rows, "n0", self.keys)
        meets = f"max(begin[0], begin[1]) <= n0 && n0 + {self.keys} <= min(end[0], end[1])"
        self.w.line(f"const bool meets = {meets};")
        return "__all_sync(0xffffffffu, meets)"

    def _positions(self, epilogue: Epilogue) -> None:
        """Writes positions that the program converts to float once: a conversion takes as long as an exponential."""
        program = epilogue.program
        every = {
            Result(k): program.indices[i.args[0].index][-2:]
            for k, i in enumerate(program.instructions)
            if i.template == "convert<float>({0})" and isinstance(i.args[0], Index)
        }
        rows = [r for r, steps in every.items() if steps == (1, 0)]
        keys = [r for r, steps in every.items() if steps == (0, 1)]
        if rows and self.spec.rows % self.block_rows == 0:
            self.w.line("const float m_real = convert<float>(m0 + row);")
            epilogue.known |= dict.fromkeys(rows, "(m_real + float(f * 8))")
        if keys:
            lane, step = self._key()
            self.w.line(f"const float n_real = convert<float>(n0 + {lane});")
            epilogue.known |= dict.fromkeys(keys, f"(n_real + float({step} + e))")

    def _key(self) -> tuple[str, str]:
        """Returns the number in the tile of a thread's first key from s[j] on: the part of the lane, and that of j."""
        if self.quads:
            return "lane % 4 * 4", f"j % {self.keys // 4} * 4 + j / {self.keys // 4} * 2"
        return "lane % 4 * 2", "j * 2"

    def _tile(self, inside: bool) -> None:
        self._positions(self.inner if inside or self.spanned else self.edge)
        with self._elements():
            self.score("m", "n", SCORE, inside=inside)
            self.keep("s", "score")

    def _elements(self) -> AbstractContextManager[None]:
        """Writes a loop over all scores of a tile, two neighbours at a time."""
        lane, step = self._key()
        return self.neighbours(f"m = m0 + row + f * 8, n = n0 + {step} + {lane}")

    def finish(self, stats: str) -> None:
        """Writes ``inverse``, by which the results are multiplied, and stores the logarithms of the sums."""
        w, spec = self.w, self.spec
        w.line("attention::finish(rows);")
        w.line("float inverse[2];")
        with w.unrolled("for (int f = 0; f < 2; ++f)"):
            w.line("const bool met = rows.total[f] != 0.0f;  // whether there is a key, if only one of NaN")
            none = "0.0f" if spec.zero else "quiet_nan<float>()"
            w.line(f"inverse[f] = met ? 1.0f / rows.total[f] : {none};")
            if spec.zero and not self.trivial:
                w.line("if (!met) attention::clear(o, f);  // zeros, whatever the values of the keys are")
            if spec.stats is not None:
                w.line(f"const {self.t} m = m0 + row + f * 8;")
                value = self.log_sum("rows.largest[f]", "rows.total[f]")
                text = stored(spec.stats, f"met ? {value} : -infinity<float>()", "float")
                w.line(f"if (lane % 4 == 0 && m < {spec.rows}) {stats}[{self.offset(spec.stats, 'm')}] = {text};")

    def log_sum(self, largest: str, total: str) -> str:
        """Returns the C expression of the logarithm of a row's sum, given those of its largest score and its total."""
        scale = literal(self.spec.scale, "float")
        scale = scale if self.factor is None else f"{scale} * (positive ? factor : 1.0f)"
        lifted = f" - {literal(self.lift * log(2), 'float')}" if self.lift else ""
        return f"{scale} * {largest} + math::log({total}){lifted}"

    def store(self, out: str, width: int) -> None:
        """Stores the results, or what the epilogue makes of them, from registers."""
        w, spec, columns = self.w, self.spec, Edge(self.spec.width, width)
        if self.epilogue is None:
            self.store_sums(out, spec.out, "m0", columns, lambda i: f"o[{i}] * inverse[i / 2 % 2]")
            return
        with w.unrolled(f"for (int i = 0; i < {width // 2}; i += 2)"):
            w.line(f"const {self.t} m = m0 + row + i / 2 % 2 * 8, n = i / 4 * 8 + lane % 4 * 2;")
            exists = self.existing(columns)
            with w.guarded(exists):
                missing = (lambda e: f"n + {e} >= {spec.width}") if spec.width % 2 else None
                run = Run(2, len(spec.batch) + 1, "e", missing)
                self.epilogue.results([*self.batch, "m", "n"], ["o[i + e] * inverse[i / 2 % 2]"], run)
