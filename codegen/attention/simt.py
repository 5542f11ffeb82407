"""Attention by single threads: every dtype, any strides, everywhere; float32 as it is.

A warp has some queries, of which each lane computes the scores of one key of a tile, then some elements of the results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from codegen.attention.scores import Scores, argument_names, merged, stored
from codegen.attention.spec import AttentionSpec
from codegen.attention.tiles import Tiles, forward_sources
from codegen.buffers import Buffer, Buffers, Edge, guard
from codegen.declined import Declined
from codegen.expr import literal
from codegen.family import Schedule
from codegen.kernel import Kernel
from codegen.spec import KernelSource
from codegen.target import Target

WARPS, LANES = 4, 32
#: Most bytes of shared memory for a block's elements of queries, keys and values.
MOST_SHARED = 96 << 10


@dataclass(frozen=True)
class AttentionSimtSchedule(Schedule):
    """``queries`` of a warp; a block has four warps, a tile 32 keys."""

    queries: int

    @property
    def rows(self) -> int:
        return WARPS * self.queries


def buffers(spec: AttentionSpec, s: AttentionSimtSchedule) -> Buffers:
    """Returns what a block has in shared memory."""
    real = spec.program.real
    return Buffers(
        (
            Buffer("queries", real, (s.rows, spec.depth)),
            Buffer("keys", real, (LANES, spec.depth), pad=1, note="a column is spread over all banks"),
            Buffer("values", real, (LANES, spec.width)),
        )
    )


def schedules(spec: AttentionSpec, target: Target | None = None) -> tuple[AttentionSimtSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined if a tile does not fit."""
    found = [AttentionSimtSchedule(n) for n in (4, 2, 1) if n * -(-spec.width // LANES) <= 32]
    found = [s for s in found if buffers(spec, s).bytes <= MOST_SHARED]
    if not found:
        raise Declined(f"32 keys of {spec.depth} and values of {spec.width} elements do not fit shared memory")
    return tuple(found)


def render(spec: AttentionSpec, schedule: AttentionSimtSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return _Renderer(merged(spec), schedule).render()


class _Renderer:
    def __init__(self, spec: AttentionSpec, schedule: AttentionSimtSchedule) -> None:
        self.spec, self.s = spec, schedule
        self.w = Kernel(spec.name)
        self.arguments = argument_names(spec, self.w.names)
        self.scores = Scores(self.w, spec, LANES)
        self.written = self.scores.written()
        self.real = spec.program.real
        self.tiles = Tiles(self.w, self.scores, self.real)
        self.width = Edge(spec.width, LANES)

    def render(self) -> KernelSource:
        w, s, spec, scores = self.w, self.s, self.spec, self.scores
        w.share(buffers(spec, s))
        w.line(f"const int t = threadIdx.x, lane = t % {LANES}, row = t / {LANES} * {s.queries};")
        scores.unit()
        tiles, threads = Edge(spec.rows, s.rows).tiles, WARPS * LANES
        w.line(f"const int m0 = blockIdx.x % {tiles} * {s.rows};")
        scores.coordinates(f"(blockIdx.x / {tiles})")
        scores.bound_numbers()
        scores.scalars()
        scores.keys_met("m0", s.rows)
        queries, *brought = forward_sources(scores, self.arguments)
        self.tiles.fill(queries, "m0", threads)
        self._state()
        with w.block("for (int tile = first; tile < last; ++tile)"):
            w.line(f"const int n0 = tile * {LANES};")
            w.line("__syncthreads();  // the tile before has been used")
            for source in brought:
                self.tiles.fill(source, "n0", threads)
            w.line("__syncthreads();")
            self._tile()
        self._results()
        detail = f"{s.rows} queries a block, {s.queries} a warp, tiles of {LANES} keys"
        return scores.complete(self.arguments, self.written, detail, tiles=tiles, threads=threads)

    def _state(self) -> None:
        """Writes what a thread keeps of the rows of its warp."""
        w, n, real, spec = self.w, self.s.queries, self.real, self.spec
        o = f"o[{n}][{self.width.tiles}] = {{}}, " if spec.width else ""
        w.line(f"{real} {o}largest[{n}], total[{n}];")
        start, have = f"-infinity<{real}>()", "0"
        if spec.sink is not None:
            self.scores.sunk(self.arguments[-1])
            start, have = "sunk", "lane == 0"
        with w.unrolled(f"for (int r = 0; r < {n}; ++r)"):
            w.line(f"largest[r] = {start};")
            w.line(f"total[r] = {have};  // the lane's share")

    def _tile(self) -> None:
        """Writes what becomes of a tile of keys and values."""
        w, s, spec, real, scores = self.w, self.s, self.spec, self.real, self.scores
        multiply(w, real, "s", s.queries, "queries", "keys")
        with w.unrolled(f"for (int r = 0; r < {s.queries}; ++r)"):
            m = Edge(spec.rows, s.rows).held("m0 + row + r")
            w.line(f"const {scores.t} m = {m}, n = n0 + lane;")
            scores.score("m", "n", "s[r]", inside=False, count=1)
            w.line(f"const {real} most = max(largest[r], reduce::lanes<reduce::Max, {LANES}>(score[0]));")
            # In other units the least number, which masks often are, would overflow: so it is subtracted first.
            w.line(f"const {real} shift = most == -infinity<{real}>() ? {real}(0) : most;")
            w.line(f"const {real} rescale = math::exp2(unit * (largest[r] - shift));")
            w.line("largest[r] = most;")
            w.line("s[r] = math::exp2(unit * (score[0] - shift));")
            w.line("total[r] = total[r] * rescale + s[r];")
            if scores.weight is not None:
                scores.evaluate(scores.weight, {"weighted": ""}, "m", "n", "s[r]", guarded=scores.ragged, count=1)
                w.line("s[r] = weighted[0];")
            if spec.width:
                w.unrolled_line(f"for (int c = 0; c < {self.width.tiles}; ++c) o[r][c] *= rescale;")
        if spec.width:
            add_products(w, real, s.queries, ("o", "s", "values"))

    def _store(self) -> None:
        """Writes the stores of a row of the results."""
        w, spec, real, scores = self.w, self.spec, self.real, self.scores
        none = f"sum == 0 ? {real}(0) : " if spec.zero else ""
        w.line(f"const {real} inverse = {none}1 / sum;")
        with columns_of_lane(w, scores, self.width) as exists:
            if spec.zero:
                w.line("if (sum == 0) o[r][c] = 0;  // no key is met, whatever the values are")
            if scores.epilogue is None:
                value = stored(spec.out, "o[r][c] * inverse", real)
                w.line(f"{guard(exists)}{self.written[0]}[{scores.offset(spec.out, 'm', 'n')}] = {value};")
                return
            with w.guarded(exists):
                scores.epilogue.results([*scores.batch, "m", "n"], ["o[r][c] * inverse"])

    def _results(self) -> None:
        """Writes the stores of the results and of the logarithms of the sums."""
        w, spec, real, scores = self.w, self.spec, self.real, self.scores
        with rows_of_warp(w, scores, "m0", self.s.queries, Edge(spec.rows, self.s.rows)):
            w.line(f"const {real} sum = reduce::lanes<reduce::Add, {LANES}>(total[r]);")
            if spec.width:
                self._store()
            if spec.stats is not None:
                place = scores.offset(spec.stats, "m")
                value = f"{literal(spec.scale, real)} * largest[r] + math::log(sum)"
                text = f"(sum == 0 ? -infinity<{real}>() : {value})"
                w.line(f"if (lane == 0) {self.written[-1]}[{place}] = {stored(spec.stats, text, real)};")


def multiply(k: Kernel, real: str, sums: str, rows: int, a: str, b: str) -> None:
    """Writes the products of a warp's rows of the buffer ``a`` with the lane's row of the buffer ``b``."""
    k.line(f"{real} {sums}[{rows}] = {{}};")
    if depth := k.buffers[a].shape[-1]:
        with k.block(f"for (int i = 0; i < {depth}; ++i)"):
            product = f"shared.{a}[row + r][i] * shared.{b}[lane][i]"
            k.unrolled_line(f"for (int r = 0; r < {rows}; ++r) {sums}[r] += {product};")


def add_products(k: Kernel, real: str, rows: int, *products: tuple[str, str, str]) -> None:
    """Writes products (sums, A, buffer B) of a warp's rows, of which a lane has a column, with tiles."""
    with k.block(f"for (int j = 0; j < {LANES}; ++j)"), k.unrolled(f"for (int r = 0; r < {rows}; ++r)"):
        for sums, a, b in products:
            column, columns = f"c * {LANES} + lane", Edge(k.buffers[b].shape[-1], LANES)
            k.line(f"const {real} {a}_j = __shfl_sync(0xffffffffu, {a}[r], j);")
            add = f"{guard(columns.inside(column))}{sums}[r][c] += {a}_j * shared.{b}[j][{column}];"
            k.unrolled_line(f"for (int c = 0; c < {columns.tiles}; ++c) {add}")


@contextmanager
def rows_of_warp(k: Kernel, scores: Scores, first: str, rows: int, edge: Edge) -> Iterator[None]:
    """Writes a loop over a warp's rows that exist, called ``m``, in the tile that begins at ``first``."""
    with k.unrolled(f"for (int r = 0; r < {rows}; ++r)"):
        k.line(f"const {scores.t} m = {first} + row + r;")
        if edge.ragged:
            k.line(f"if (m >= {edge.total}) break;")
        yield


@contextmanager
def columns_of_lane(k: Kernel, scores: Scores, columns: Edge) -> Iterator[str]:
    """Writes a loop over a lane's columns, called ``n``; yields the C condition that there is one."""
    with k.unrolled(f"for (int c = 0; c < {columns.tiles}; ++c)"):
        k.line(f"const {scores.t} n = c * {LANES} + lane;")
        yield columns.inside("n")
