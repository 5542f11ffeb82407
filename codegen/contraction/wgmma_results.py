"""The results of the Hopper kernels: the program on a consumer's sums, written from registers.

Results that leave through shared memory are in `codegen.contraction.wgmma_staging`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType

from codegen.contraction.wgmma_block import Block
from codegen.contraction.wgmma_layout import GROUP
from codegen.contraction.wgmma_partials import WgmmaPartials
from codegen.epilogue import Epilogue, Run, placed
from codegen.iteration import coordinates, long


class Results:
    """Writes what a consumer does with the sums of a tile.

    staged      C names of the buffers of results on their way out, if there are any.
    store_maps  the same of the outputs' tensor maps; ``load_maps`` of those of operands, by their numbers.
    """

    staged: Sequence[str] = ()
    store_maps: Sequence[str] = ()
    load_maps: Mapping[int, str] = MappingProxyType({})

    def __init__(self, block: Block, epilogue: Epilogue, partials: WgmmaPartials) -> None:
        self.block, self.epilogue, self.partials = block, epilogue, partials
        self.w, self.s, self.layout, self.parts = block.w, block.s, block.layout, block.parts
        self.t, self.n0 = block.t, block.n0
        #: conditions under which row m, or column n, of a tile does not exist
        self.beyond_m = [f"m >= {block.m.total}"] if block.m.ragged else []
        self.beyond_n = [f"n >= {block.n.total}"] if block.n.ragged else []

    def init(self) -> None:
        """Writes the initialisation of barriers."""

    def begin(self) -> None:
        """Writes what stays the same for all tiles."""

    def bring_operands(self) -> None:
        """Writes what is brought for a tile's results before its products."""

    def write_tile(self) -> None:
        """Writes a tile's results, once its sums are there."""
        with self._sums_of_cluster() if self.s.split_k > 1 else nullcontext():
            self.write()

    def write(self) -> None:
        """Writes the results."""
        raise NotImplementedError

    def end(self) -> None:
        """Writes what is awaited behind the last tile."""

    # ---- sums

    @contextmanager
    def _sums_of_cluster(self) -> Iterator[None]:
        """Writes how the blocks of a cluster add up their sums: each a part of the columns, in a fixed order."""
        w, s, register = self.w, self.s, self.block.register_type
        each, threads, count = s.part // 2, s.groups * GROUP, self.block.columns // 2
        w.line("// Every block adds up a part of the columns of the tile; the ring is free for the exchange.")
        w.line(f"{register}* const exchange = reinterpret_cast<{register}*>(memory);")
        w.line(f"const int mine = threadIdx.x - {s.producers * GROUP};")
        if s.groups > 1:
            w.line(f"named_barrier_sync({s.groups + 1}, {threads});")
        w.unrolled_line(f"for (int i = 0; i < {count}; ++i) exchange[i * {threads} + mine] = sum[i];")
        w.line("cluster_sync();")
        with w.block(f"if ({self.block.writes})", when=self.block.idle):
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
        return [f"uint32({text})" if self.block.spec.accumulate == "uint32" else text for text in texts]

    # ---- where results are

    def batch_coordinates(self) -> None:
        """Writes the coordinates of a tile's batch."""
        if self.block.batch > 1 and len(self.layout.batch) > 1:
            coordinates(self.w, "int", "b", "at.batch", self.layout.batch, long(self.layout.batch))

    def _row(self, position: str, *, held: bool = False) -> tuple[list[str], list[str]]:
        """Writes the row m of a result, with ``held`` one that exists.

        Returns the C expressions of the coordinates of batch and row, and the conditions under which the row's results
        have no place.
        """
        w, layout, spec, m = self.w, self.layout, self.block.spec, self.block.m
        position = f"m0 + {self.block.rows} + {position}" if self.s.pingpong else f"m0 + {position}"
        w.line(f"const {self.t} m = {m.held(position) if held else position};")
        batch = ["0"] * len(layout.batch)
        if self.block.batch > 1:
            several = len(layout.batch) > 1
            batch = [f"b{d}" if size > 1 else "0" for d, size in enumerate(layout.batch)] if several else ["at.batch"]
        rows = coordinates(w, self.t, "m_", "m", layout.rows) if len(layout.rows) > 1 else ["m"]
        absent: list[str] = []
        if spec.results:
            known = [*zip(batch, layout.batch)], [*zip(rows, layout.rows)]
            rows, absent = placed(w, self.t, spec.results, *known)
        return [*batch, *rows], absent

    def _column(self, position: str, *, held: bool = False) -> None:
        """Writes the column n of a result, the first of two, with ``held`` one that exists."""
        total = self.block.n.total
        position = f"{self.n0} + {position} + lane % 4 * 2"
        last = total - (1 if total % 2 else 2)
        self.w.line(f"const {self.t} n = {f'min({position}, {last})' if held else position};")

    def _skip(self, outside: Sequence[str]) -> None:
        """Writes that there is nothing to do under some conditions."""
        if outside:
            self.w.line(f"if ({' || '.join(outside)}) continue;")

    def _run(self, clamped: str | None = None) -> Run:
        """Returns the two neighbours of a row that a thread has."""
        return Run(2, len(self.layout.batch) + len(self.layout.rows), "e", self._missing, clamped)

    @property
    def _missing(self) -> Callable[[str], str] | None:
        """The C condition that one of two columns does not exist; None where all exist."""
        cols = self.parts.cols
        return (lambda e: f"n + {e} >= {cols}") if cols % 2 else None


class DirectResults(Results):
    """Results that are written from registers: those of outputs that no tensor map describes."""

    def write(self) -> None:
        if not self.block.phased:
            self.batch_coordinates()
        with self.block.pieces():
            self.partials.begin_tile()
            if self.partials.rows:
                self._by_columns()
            else:
                self._by_rows()
            self.partials.finish_tile()

    def _by_rows(self) -> None:
        """Writes the two rows of a thread, one after the other."""
        w, s = self.w, self.s
        with w.unrolled("for (int i = 0; i < 2; ++i)"):
            place, absent = self._row("row + i * 8")
            self._skip([*self.beyond_m, *absent])
            with w.unrolled(f"for (int j = 0; j < {s.part}; j += 8)"):
                self._column("j")
                self._skip(self.beyond_n)
                sinks = self.partials.sinks("j", outside=False, row="i")
                self.epilogue.results([*place, "n"], self._sums("j / 2 + i * 2 + e"), self._run(), sinks=sinks)

    def _by_columns(self) -> None:
        """Writes the same, 16 columns at a time, where columns are reduced."""
        w, s, length = self.w, self.s, self.layout.chunk
        column = f"chunk * {length} + j"
        with w.unrolled(f"for (int chunk = 0; chunk < {s.part // length}; ++chunk)"):
            self.block.synchronize("what the warps left has been read")
            with w.unrolled(f"for (int j = 0; j < {length}; j += 16)"):
                self.partials.begin_columns()
                with w.unrolled("for (int f = 0; f < 4; ++f)"):
                    place, _ = self._row("row + f % 2 * 8")
                    self._column(f"{column} + f / 2 * 8")
                    self._skip([*self.beyond_m, *self.beyond_n])
                    sums = self._sums(f"({column}) / 2 + f / 2 * 4 + f % 2 * 2 + e")
                    sinks = self.partials.sinks(column, outside=False)
                    self.epilogue.results([*place, "n"], sums, self._run(), sinks=sinks)
                self.partials.leave_columns()
            self.block.synchronize()
            self.partials.finish_columns()
