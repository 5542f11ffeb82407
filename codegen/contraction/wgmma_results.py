"""The results of the Hopper kernels: the program on a consumer's sums, and results that are written from registers.

Those that leave through shared memory are in `codegen.contraction.wgmma_staged`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from codegen.contraction.totals import Totals
from codegen.contraction.wgmma_block import Block
from codegen.contraction.wgmma_layout import GROUP
from codegen.contraction.wgmma_partials import WgmmaPartials
from codegen.epilogue import Epilogue, Run, placed
from codegen.iteration import coordinates, long
from codegen.partials import in_steps

#: Columns of which a thread loads operands together, the most that its part is a multiple of.
TOGETHER = 32, 16, 8
#: How far a thread's pairs of columns are right of fragments of 8.
PAIR = "lane % 4 * 2"


class Results:
    """Writes what a consumer does with the sums of a tile.

    staged      C names of the buffers of results on their way out, if there are any.
    store_maps  the same of the outputs' tensor maps; ``load_maps`` of those of operands, by their numbers.
    """

    def __init__(self, block: Block, epilogue: Epilogue, partials: WgmmaPartials, totals: Totals) -> None:
        self.block, self.epilogue, self.partials, self.totals = block, epilogue, partials, totals
        self.w, self.s, self.layout, self.parts = block.w, block.s, block.layout, block.parts
        self.t, self.n0 = block.t, block.n0
        self.staged: list[str] = []
        self.store_maps: list[str] = []
        self.load_maps: dict[int, str] = {}
        named = [f"b{d}" if len(self.layout.batch) > 1 else block.at_batch for d in range(len(self.layout.batch))]
        #: C expressions of the coordinates of a tile's batch
        self._batch = [name if size > 1 else "0" for name, size in zip(named, self.layout.batch)]
        #: conditions under which row m, or column n, of a tile does not exist
        self.beyond_m = [f"m >= {block.m.total}"] if block.m.ragged else []
        self.beyond_n = [f"n >= {block.n.total}"] if block.n.ragged else []
        self.chunks, self.column = self.s.part // self.layout.chunk, f"chunk * {self.layout.chunk} + j"
        #: the first column of pair f of the 16 columns from j on, and the number of its element e
        self.pair = f"{self.column} + f / 2 * 8 + {PAIR}"
        self.element = f"({self.column}) / 2 + f / 2 * 4 + f % 2 * 2 + e"

    def begin(self) -> None:
        """Writes what stays the same for all tiles."""

    def bring_operands(self) -> None:
        """Writes what is brought for a tile's results before its products."""

    def write(self) -> None:
        """Writes a tile's results, once its sums are there."""

    def end(self) -> None:
        """Writes what is awaited behind the last tile."""

    # ---- sums

    @contextmanager
    def sums_of_cluster(self) -> Iterator[None]:
        """Writes how the blocks of a cluster add up their sums: each a part of the columns, in a fixed order."""
        if self.s.split_k == 1:
            yield
            return
        w, s, register = self.w, self.s, self.block.register_type
        each, threads, count = s.part // 2, s.groups * GROUP, self.block.columns // 2
        w.line("// Every block adds up a part of the columns of the tile; the ring is free for the exchange.")
        w.line(f"{register}* const exchange = reinterpret_cast<{register}*>(memory);")
        w.line(f"const int mine = threadIdx.x - {s.producers * GROUP};")
        if s.groups > 1:
            w.line(f"named_barrier_sync({s.groups + 1}, {threads});")
        w.unrolled_line(f"for (int i = 0; i < {count}; ++i) exchange[i * {threads} + mine] = sum[i];")
        w.line("cluster_sync();")
        with w.guarded(self.block.writes):
            totals = each * self.block.spec.products
            place = "i" if totals == each else f"(i / {each} * {s.tile_n // 2} + i % {each})"
            w.line(f"{register} total[{totals}] = {{}};")
            with w.unrolled(f"for (int q = 0; q < {s.split_k}; ++q)"):
                w.line(f"const {register}* const theirs = cluster_map(exchange, q) + rank * {each * threads} + mine;")
                w.unrolled_line(f"for (int i = 0; i < {totals}; ++i) total[i] += theirs[{place} * {threads}];")
            w.line()
            yield

    def _sums(self, element: str) -> list[str]:
        """Returns the C expressions of the sums of a thread's element, one for each product."""
        name = "total" if self.s.split_k > 1 else self.block.sum
        starts = [number * self.s.part // 2 for number in range(self.block.spec.products)]
        texts = [f"{name}[{f'{start} + ' if start else ''}{element}]" for start in starts]
        texts = [f"uint32({text})" if self.block.spec.accumulate == "uint32" else text for text in texts]
        return [*texts, *self.totals.values]

    @contextmanager
    def _pieces(self) -> Iterator[None]:
        """Writes the loop over a consumer's 64 rows."""
        self.place()
        with self.block.pieces():
            self.partials.begin_tile()
            yield
            self.partials.finish_tile()

    # ---- where results are

    def place(self) -> None:
        """Writes where a tile's results go."""
        if not self.block.phased:
            self.batch_coordinates()

    def batch_coordinates(self) -> None:
        """Writes the coordinates of a tile's batch."""
        if self.block.batch > 1 and len(self.layout.batch) > 1:
            itype = "int" if self.t == "int32" else self.t
            coordinates(self.w, itype, "b", "at.batch", self.layout.batch, long(self.layout.batch))

    def _row(self, position: str, *, held: bool = False) -> tuple[list[str], list[str]]:
        """Writes the row m of a result, with ``held`` one that exists.

        Returns the C expressions of the coordinates of batch and row, and the conditions under which the row's results
        have no place.
        """
        w, layout, spec, m = self.w, self.layout, self.block.spec, self.block.m
        position = f"m0 + {self.block.rows} + {position}" if self.s.pieces > 1 else f"m0 + {position}"
        w.line(f"const {self.t} m = {m.held(position) if held else position};")
        batch, rows = self._batch, ["m"]
        if len(layout.rows) > 1:
            rows = coordinates(w, self.t, "m_", "m", layout.rows)
        absent: list[str] = []
        if spec.results:
            known = [*zip(batch, layout.batch)], [*zip(rows, layout.rows)]
            rows, absent = placed(w, self.t, spec.results, *known)
        return [*batch, *rows], absent

    def _column(self, position: str, right: str = PAIR, *, held: bool = False) -> None:
        """Writes the column n of a result, the first of two, with ``held`` one that exists."""
        total = self.block.n.total
        position = f"{self.n0} + {position} + {right}"
        last = total - (1 if total % 2 else 2)
        self.w.line(f"const {self.t} n = {f'min({position}, {last})' if held else position};")

    @property
    def _held_element(self) -> str:
        return f"min(n + e, {self.parts.cols - 1})"

    def _run(self, clamped: str | None = None, *, whole: bool = False) -> Run:
        """Returns the two neighbours of a row that a thread has: the second may not exist if they are not ``whole``."""
        missing = (lambda e: f"n + {e} >= {self.parts.cols}") if self.parts.cols % 2 and not whole else None
        return Run(2, len(self.layout.batch) + len(self.layout.rows), "e", missing, clamped)


class DirectResults(Results):
    """Results that are written from registers: the two rows of a thread, one after the other.

    Operands of several results are loaded together, without branches: else each load would wait for the result before.
    Where some columns of a tile may not exist, results that are reduced alone are computed, too.
    """

    def write(self) -> None:
        ragged = self.block.n.ragged
        reduced = ragged and not self.epilogue.program.stores
        with self._pieces(), self.w.unrolled("for (int i = 0; i < 2; ++i)"):
            place, absent = self._row("row + i * 8")
            self.w.leave(*self.beyond_m, *absent)
            if reduced:
                with self.w.block(f"if ({self.n0} + {self.s.part} <= {self.block.n.total})"):
                    self._pairs(place)
                with self.w.block("else"):
                    self.w.line(
                        f"const int right = anew({PAIR});  // what is known of columns is not kept for all rows"
                    )
                    self._pairs(place, "right")
            elif self.epilogue.differing:
                self._together(place)
            else:
                self._pairs(place, left_out=self.beyond_n)

    def _pairs(self, place: Sequence[str], right: str = PAIR, left_out: Sequence[str] = ()) -> None:
        """Writes the results of row ``place``: pairs of all columns, but for those ``left_out``.

        Columns may be outside of the result if ``right`` is another expression of how far pairs are right of fragments.
        """
        held = right != PAIR
        sinks = self.partials.sinks(f"j + {right}", outside=held, row="i", chunk="j")
        for step in [sinks] if self.epilogue.differing else in_steps(sinks):
            with self.w.unrolled(f"for (int j = 0; j < {self.s.part}; j += 8)"):
                self._column("j", right, held=held)
                self.w.leave(*left_out)
                run = self._run(self._held_element if held else None, whole=not held and not left_out)
                self.epilogue.results([*place, "n"], self._sums("j / 2 + i * 2 + e"), run, sinks=step)

    def _together(self, place: Sequence[str]) -> None:
        """Writes the results of row ``place``, a few pairs at a time, their operands first."""
        w, ragged = self.w, self.block.n.ragged
        side = next(side for side in TOGETHER if self.s.part % side == 0)
        with w.unrolled(f"for (int c = 0; c < {self.s.part}; c += {side})"):
            vectors = self.epilogue.declare(self._run(whole=not ragged), side // 8)
            with w.unrolled(f"for (int j = c; j < c + {side}; j += 8)"):
                self._column("j", held=ragged)
                brought = {n: f"{name}[(j - c) / 8]" for n, name in vectors.items()}
                run = self._run(self._held_element) if ragged else self._run(whole=True)
                self.epilogue.bring([*place, "n"], run, brought)
            with w.unrolled(f"for (int j = c; j < c + {side}; j += 8)"):
                self._column("j")
                w.leave(*self.beyond_n)
                sinks = self.partials.sinks(f"j + {PAIR}", outside=False, row="i", chunk="j")
                sums = self._sums("j / 2 + i * 2 + e")
                self.epilogue.results([*place, "n"], sums, self._run(whole=not ragged), sinks=sinks, given=brought)


class ChunkedResults(Results):
    """Results of 16 columns at a time, in chunks: written from registers where columns are reduced."""

    #: how the loop over chunks goes on to the next buffer
    step = ""

    def begin_chunk(self) -> None:
        self.block.synchronize("what the warps left has been read")

    def end_chunk(self) -> None:
        self.block.synchronize()

    def write(self) -> None:
        w = self.w
        with self._pieces(), w.unrolled(f"for (int chunk = 0; chunk < {self.chunks}; ++chunk{self.step})"):
            self.begin_chunk()
            self.partials.begin_columns()
            with w.unrolled(f"for (int j = 0; j < {self.layout.chunk}; j += 16)"):
                self.make()
            self.partials.leave_columns()
            self.end_chunk()
            self.partials.finish_columns()

    def make(self) -> None:
        """Writes how the 16 columns from j on are computed, and written."""
        with self.w.unrolled("for (int f = 0; f < 4; ++f)"):
            place, _ = self._row("row + f % 2 * 8")
            self._column(f"{self.column} + f / 2 * 8")
            self.w.leave(*self.beyond_m, *self.beyond_n)
            sinks = self.partials.sinks(self.pair, outside=False, chunk=self.column)
            self.epilogue.results([*place, "n"], self._sums(self.element), self._run(), sinks=sinks)
