"""Probabilities and gradients as tensor cores leave them: what the forms of attention's gradients do with fragments.

C variables: ``s`` the scores of a tile, then the probabilities; ``d`` the products with the loss, then the gradients;
``slope``; ``kept``, one bit per element, whether its random number is large enough; ``factor`` and ``g_factor``, the
operands A; ``row`` the thread's first row in the block's tile, which begins at ``r0``; ``lane``; ``unit``; lse and
row_dot, numbers of the thread's rows if those are queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from codegen.attention.backward_scores import BackwardScores
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.fragments import SCORE
from codegen.attention.random import RandomWords, random_words
from codegen.attention.spec import AttentionSpec
from codegen.buffers import Edge
from codegen.expr import Index, Operand, Result, literal
from codegen.iteration import linear
from codegen.kernel import Kernel

#: Bits of a word; registers for the keys of Philox's ten rounds, which are computed before the loop over tiles.
BITS, KEYS = 32, 20


def random_registers(a: AttentionSpec, cols: int) -> int:
    """Returns how many registers a thread needs to draw random numbers, and to hold a bit for each element kept."""
    return -(-cols // 2 // BITS) + KEYS if a.weight is not None and random_words(a.weight) is not None else 0


class BackwardFragments(BackwardScores):
    """Tiles of ``height`` rows, of which ``group`` from ``top`` on are looked at together, and ``width`` columns."""

    def __init__(self, w: Kernel, spec: AttentionBackwardSpec, height: int, width: int, top: str, group: int) -> None:
        super().__init__(w, spec, height, width)
        self.top, self.group, self.element_type = top, group, spec.attention.q.dtype.ctype
        #: the random numbers of the weight, which probabilities and products with the loss share
        self.random = None if self.weight is None else random_words(self.weight.program)
        if self.weight is not None and self.random is not None:
            bit = f"kept[(j + f * 2 + e) / {BITS}] >> (j + f * 2 + e) % {BITS} & 1"
            self.weight.known[Result(self.random.compared)] = bit

    def row_numbers(self, lse: str, row_dot: str) -> None:
        """Writes lse and row_dot of the thread's rows, which are queries."""
        w = self.w
        w.line("float lse[2], row_dot[2];")
        with w.unrolled("for (int f = 0; f < 2; ++f)"):
            w.line(f"const {self.t} m = r0 + row + f * 8;")
            exists = self.row_tiles.inside("m")
            w.line(f"lse[f] = {self.lse_of(lse, 'm', exists)};")
            w.line(f"row_dot[f] = {self.row_dot_of(row_dot, 'm', exists)};")

    @property
    def trivial(self) -> bool:
        """Whether all products are scores."""
        return self.plain and not self.differ

    def define(self) -> None:
        """Writes the functions that compute scores and slopes from a tile's products, and that draw random numbers."""
        w = self.w
        if self.random is not None:
            with w.block("const auto draw = [&](int tile)", "};"):
                self._draw(self.random)
        if self.trivial:
            return
        with w.block("const auto scores = [&](int tile)", "};"):
            w.line(f"const int c0 = tile * {self.width};")
            self.by_tile(lambda: self.unbroken(self.top, self.group), self._tile)

    def _tile(self, inside: bool) -> None:
        with self.neighbours("m = r0 + row + f * 8, n = c0 + j * 2 + lane % 4 * 2"):
            self.score("m", "n", SCORE, inside=inside)
            self.keep("s", "score")
            if self.whole.sloped:
                self.keep("slope", "slope_of")

    def arrays(self, operands: Iterable[str], *more: str) -> None:
        """Declares the products with a tile of columns, ``more`` floats, operands A, and which elements are kept."""
        names = ["s", *["d"] * self.whole.with_loss, *["slope"] * self.whole.sloped]
        self.w.line(f"float {', '.join([*(f'{name}[{self.width // 2}]' for name in names), *more])};")
        self.w.line(f"uint32 {', '.join(f'{name}[{self.width // 16}][4]' for name in operands)};")
        if self.random is not None:
            self.w.line(f"uint32 kept[{-(-self.width // 2 // BITS)}];  // a bit an element of a tile")

    def draw(self, tile: str) -> None:
        if self.random is not None:
            self.w.line(f"draw({tile});")

    def _draw(self, random: RandomWords) -> None:
        """Writes what draws the bits of a tile; where possible, sixteen neighbouring keys share four counters."""
        w, queries = self.w, self.whole.queries
        assert self.weight is not None
        program, constant = self.weight.program, self.weight.constant
        above, seed, offset = random.numbers(program, constant, (*self.batch, "", ""))
        w.line(f"const int c0 = tile * {self.width};")
        half = self.width // 2
        count = -(-half // BITS)
        last = f"{BITS}" if half % BITS == 0 else f"min({BITS}, {half} - word * {BITS})"
        rows = queries or not random.together  # whether a thread's two rows are apart
        along = f"c0 + word * {2 * BITS} + j * 2" if count > 1 else "c0 + j * 2"
        row = "(r0 + row + f * 8)" if rows else "(r0 + row - lane / 4)"
        col = f"({along})" if random.together else f"({along} + lane % 4 * 2 + e)"
        m, n = (row, col) if queries else (col, row)
        element = f"uint32({linear([(text, step) for text, step in zip((*self.batch, m, n), random.steps)])})"
        with w.unrolled(f"for (int word = 0; word < {count}; ++word)"):
            w.line("uint32 bits = 0;")
            w.line("#pragma unroll 1  // while products are made few registers are free")
            with (
                w.block(f"for (int j = 0; j < {last}; j += {8 if random.together and queries else 4})"),
                w.unrolled("for (int f = 0; f < 2; ++f)", when=rows),
            ):
                if random.together:
                    w.line("uint32 words[4];")
                    function, step = "random_words", ""
                    if not queries:
                        function, step = "random_words_of_columns", f"{random.steps[-2]}, "
                    w.line(f"attention::{function}({element}, {step}{above}, lane, {seed}, {offset}, words);")
                    with w.unrolled("for (int i = 0; i < 4; ++i)"):
                        place = "j + f * 2 + i / 2 * 4 + i % 2" if queries else "j + i"
                        w.line(f"bits |= uint32({random.enough('words[i]')}) << ({place});")
                else:
                    with w.unrolled("for (int e = 0; e < 2; ++e)"):
                        value = f"philox::at_least({element}, {above}, {seed}, {offset}, {random.least >> 8})"
                        w.line(f"bits |= uint32({value}) << (j + f * 2 + e);")
            w.line("kept[word] = bits;")

    @contextmanager
    def _weighted(self, tile: str, values: str) -> Iterator[None]:
        """Writes the weight of a tile's ``values``, two at a time, around what uses the vector ``weighted``."""
        assert self.weight is not None
        program = self.weight.program
        drawn = None if self.random is None else self.random.compared
        others = [v for k, i in enumerate(program.instructions) if k != drawn for v in i.args]
        placed = any(any(op.strides) for op in program.loads) or any(isinstance(v, Index) for v in others)
        place = f"m = r0 + row + f * 8, n = {tile} * {self.width} + j * 2 + lane % 4 * 2"
        with self.neighbours(place if placed else ""):
            self.weigh("m", "n", f"{values}[j + f * 2 + e]")
            yield

    def _by_query(self, numbers: str, pointer: str, statement: Callable[[str, str], str]) -> None:
        """Writes a statement for each element, given its index and its query's number (of ``pointer`` for columns)."""
        w, count = self.w, self.width // 2
        if self.whole.queries:
            w.unrolled_line(f"for (int i = 0; i < {count}; ++i) {statement('i', f'{numbers}[i / 2 % 2]')}")
            return
        with w.unrolled(f"for (int j = 0; j < {count}; j += 4)"):
            w.line(f"const auto x = load_shared<2>({pointer} + j * 2 + lane % 4 * 2);")
            w.unrolled_line(f"for (int i = 0; i < 4; ++i) {statement('j + i', 'x[i % 2]')}")

    def probabilities(self, tile: str, lse: str) -> None:
        """Writes a tile's probabilities; where columns are queries, ``lse`` points to the tile's numbers."""
        w, element = self.w, self.element_type
        if not self.trivial:
            w.line(f"scores({tile});")
        self._by_query("lse", lse, lambda i, x: f"s[{i}] = math::fast_exp2(unit * s[{i}] - {x});")
        if self.whole.second is None:
            return
        if self.weight is None:
            w.line(f"attention::round_to_fragments<{element}>(s, factor);")
            return
        with self._weighted(tile, "s"):
            w.line(f"factor[j / 8][j / 2 % 4 + f] = attention::pair<{element}>(weighted[0], weighted[1]);")

    def gradients(
        self, tile: str, row_dot: str, by_scores: str, factor: str, ready: Callable[[], None] = lambda: None
    ) -> None:
        """Writes the gradients of the products with the loss, then, behind what ``ready`` writes, operands A."""
        w, spec = self.w, self.whole
        if self.weight is not None:
            with self._weighted(tile, "d"):
                self.keep("d", "weighted")
        self._by_query("row_dot", row_dot, lambda i, x: f"d[{i}] = s[{i}] * (d[{i}] - {x});")
        if spec.by_scores is not None:
            self.store_sums(by_scores, spec.by_scores, "r0", self.key_tiles, lambda i: f"d[{i}]", tile)
        if spec.sloped:
            w.unrolled_line(f"for (int i = 0; i < {self.width // 2}; ++i) d[i] *= slope[i];")
        if spec.first is not None:
            ready()
            w.line(f"attention::round_to_fragments<{self.element_type}>(d, {factor});")

    def store(self, sums: str, op: Operand, name: str, elements: int, width: int, factor: float) -> None:
        """Writes the store of sums from registers."""
        times = "" if factor == 1 else f"{literal(factor, 'float')} * "
        self.store_sums(name, op, "r0", Edge(elements, width), lambda i: f"{times}{sums}[{i}]")
