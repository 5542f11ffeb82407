"""Attention by single threads: every dtype, any strides, everywhere; float32 as it is.

A warp has some queries, of which each lane computes the scores of one key of a tile, then some elements of the results.
Multiply-adds wait for shared memory, from which a warp gets 128 bytes a cycle: what all lanes read is read in vectors,
and what one has read serves all queries of its warp.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from codegen.attention.scores import Scores, argument_names, merged, stored
from codegen.attention.spec import AttentionSpec
from codegen.attention.tiles import Tiles, forward_sources
from codegen.buffers import SIZES, VECTORS, Buffer, Buffers, Edge, guard, where
from codegen.declined import Declined
from codegen.expr import literal
from codegen.family import Schedule
from codegen.kernel import Kernel
from codegen.spec import KernelSource
from codegen.target import Target

WARPS, LANES = 4, 32
#: Most bytes of shared memory of a block: an architecture has 99 KB.
MOST_SHARED = 98 << 10
#: Queries of a warp, and most sums of results that a thread has in registers.
QUERIES, MOST_SUMS = (8, 4, 2, 1), 32
#: Of a query and a tile of keys, for a warp: exchanges between lanes, and instructions beside multiply-adds.
EXCHANGES, INSTRUCTIONS = 5, 30
#: The share of the time in which a multiprocessor has warps that need not wait, and the cycles of a tile in which a
#: block waits for memory, unless others have its place.
BUSY, WAITING = 0.6, 3500.0


@dataclass(frozen=True)
class AttentionSimtSchedule(Schedule):
    """``queries`` of a warp; a block has four warps, a tile 32 keys."""

    queries: int

    @property
    def rows(self) -> int:
        return WARPS * self.queries


def rows_of_lanes(name: str, real: str, elements: int) -> Buffer:
    """Returns a buffer of which each lane reads a row, in vectors if these divide it."""
    size = vector(real, elements)
    pad = 0 if elements // size % 2 else size
    return Buffer(name, real, (LANES, elements), pad=pad, align=VECTORS, note="a column is spread over all banks")


def vector(real: str, elements: int) -> int:
    """Returns how many neighbours in a row of so many elements are read at once."""
    size = VECTORS // SIZES[real]
    return size if elements % size == 0 else 1


def buffers(spec: AttentionSpec, s: AttentionSimtSchedule) -> Buffers:
    """Returns what a block has in shared memory."""
    real = spec.program.real
    return Buffers(
        (
            Buffer("queries", real, (s.rows, spec.depth), align=VECTORS),
            rows_of_lanes("keys", real, spec.depth),
            Buffer("values", real, (LANES, spec.width), align=VECTORS),
            Buffer("weights", real, (s.rows, LANES), align=VECTORS),
        )
    )


def schedules(spec: AttentionSpec, target: Target) -> tuple[AttentionSimtSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined if a tile does not fit."""
    found = [AttentionSimtSchedule(n) for n in _queries(spec.width)]
    found = [s for s in found if buffers(spec, s).bytes <= MOST_SHARED]
    if not found:
        raise Declined(f"32 keys of {spec.depth} and values of {spec.width} elements do not fit shared memory")
    return tuple(sorted(found, key=lambda s: cost(spec, s, target)))


class Sizes(NamedTuple):
    """What the time of attention follows from: ``batch`` counts ``parts`` of the keys, ``real`` is the type in C."""

    depth: int
    width: int
    real: str
    batch: int
    rows: int
    keys: int
    parts: int


def cost(spec: AttentionSpec, s: AttentionSimtSchedule, target: Target) -> float:
    """Returns the cycles that a schedule is estimated to take."""
    batch, real = prod(spec.batch), spec.program.real
    return _cycles(Sizes(spec.depth, spec.width, real, batch, spec.rows, spec.keys, spec.parts), s.queries, target)


def least_cycles(sizes: Sizes, target: Target) -> float:
    """Returns the cycles that attention is estimated to take with the best number of queries a warp."""
    return min(_cycles(sizes, n, target) for n in _queries(sizes.width) or [1])


def _queries(width: int) -> list[int]:
    """Returns how many queries a warp may have whose threads have sums of values of ``width`` elements."""
    return [n for n in QUERIES if n * -(-width // LANES) <= MOST_SUMS]


def _cycles(sizes: Sizes, n: int, target: Target) -> float:
    """Returns the estimated cycles of ``n`` queries a warp, from those that shared memory and multiply-adds take for a
    tile of keys, of which all are met.
    """
    depth, width, real, batch, rows, keys, parts = sizes
    words, size, columns = SIZES[real] // 4, vector(real, depth), Edge(width, LANES).tiles
    shared = depth * words + n * depth / size  # a row of keys for each lane, and queries for all of them
    shared += LANES * columns * words + n * LANES * SIZES[real] / VECTORS + n * (EXCHANGES + words)
    shared += (depth + width) * words * LANES / (WARPS * LANES)
    issued = n * (words * (depth + LANES * columns) + INSTRUCTIONS)
    # Of the warps of a block each has its turn at shared memory; four are issued at a time.
    tile = max(WARPS * shared, issued) / BUSY
    blocks, tiles = batch * Edge(rows, WARPS * n).tiles, Edge(Edge(keys, LANES).tiles, parts).tiles
    return tiles * max(blocks * tile / target.sms, tile + WAITING)


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
            w.unrolled_line(f"for (int r = 0; r < {s.queries}; ++r) shared.weights[row + r][lane] = s[r];")
            add_products(w, real, s.queries, ("o", "weights", "values"))

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
    depth = k.buffers[a].shape[-1]
    if not depth:
        return
    size = vector(real, depth)
    with k.block(f"for (int i = 0; i < {depth}; i += {size})"):
        k.line(f"const auto {b}_i = load_shared<{size}>(&shared.{b}[lane][i]);")
        with k.unrolled(f"for (int r = 0; r < {rows}; ++r)"):
            k.line(f"const auto {a}_i = load_shared<{size}>(&shared.{a}[row + r][i]);")
            k.unrolled_line(f"for (int e = 0; e < {size}; ++e) {sums}[r] += {a}_i[e] * {b}_i[e];")


def add_products(k: Kernel, real: str, rows: int, *products: tuple[str, str, str]) -> None:
    """Writes products (sums, buffer A, buffer B) of a warp's rows of A, which it has written, with tiles of which a
    lane has columns.
    """
    size = VECTORS // SIZES[real]
    k.line("__syncwarp();")
    with k.block(f"for (int j = 0; j < {LANES}; j += {size})"):
        for sums, a, b in products:
            columns = Edge(k.buffers[b].shape[-1], LANES)
            exists = columns.inside(f"c * {LANES} + lane")
            k.line(f"{real} {b}_j[{size}][{columns.tiles}];")
            with k.unrolled(f"for (int e = 0; e < {size}; ++e)"):
                value = where(exists, f"shared.{b}[j + e][c * {LANES} + lane]", f"{real}(0)")
                k.unrolled_line(f"for (int c = 0; c < {columns.tiles}; ++c) {b}_j[e][c] = {value};")
            with k.unrolled(f"for (int r = 0; r < {rows}; ++r)"):
                k.line(f"const auto {a}_j = load_shared<{size}>(&shared.{a}[row + r][j]);")
                with k.unrolled(f"for (int e = 0; e < {size}; ++e)"):
                    add = f"{sums}[r][c] += {a}_j[e] * {b}_j[e][c];"
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
