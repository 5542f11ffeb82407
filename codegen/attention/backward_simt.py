"""Attention's gradients by single threads: every dtype, any strides, everywhere; float32 as it is.

A warp has some rows (queries or keys), of which each lane computes the gradients of one column of a tile, then some
elements of the results.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.attention.backward_scores import BackwardScores, sums, without_places
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.scores import stored
from codegen.attention.simt import (
    LANES,
    MOST_SHARED,
    WARPS,
    add_products,
    columns_of_lane,
    multiply,
    rows_of_lanes,
    rows_of_warp,
)
from codegen.attention.tiles import Tiles, backward_sources
from codegen.buffers import VECTORS, Buffer, Buffers, Edge, guard
from codegen.declined import Declined
from codegen.expr import literal
from codegen.family import Schedule
from codegen.kernel import Kernel
from codegen.spec import KernelSource
from codegen.target import Target

THREADS = WARPS * LANES
#: Most elements of results of a thread.
MOST_ELEMENTS = 64


@dataclass(frozen=True)
class AttentionBackwardSimtSchedule(Schedule):
    """``rows`` of a warp; a block has four warps, a tile 32 columns."""

    rows: int

    @property
    def height(self) -> int:
        return WARPS * self.rows


def buffers(spec: AttentionBackwardSpec, s: AttentionBackwardSimtSchedule) -> Buffers:
    """Returns what a block has in shared memory."""
    real, a = spec.program.real, spec.attention
    held, brought = (("queries", "losses"), ("keys", "values"))[:: 1 if spec.queries else -1]
    sizes = (a.depth, a.width)
    factors = [name for name, x in (("by_scores", spec.first), ("by_weights", spec.second)) if x is not None]
    return Buffers(
        (
            *(Buffer(name, real, (s.height, n), align=VECTORS) for name, n in zip(held, sizes)),
            *(rows_of_lanes(name, real, n) for name, n in zip(brought, sizes)),
            *(Buffer(name, real, (s.height, LANES), align=VECTORS) for name in factors),
        )
    )


def schedules(spec: AttentionBackwardSpec, target: Target | None = None) -> tuple[AttentionBackwardSimtSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined if a tile does not fit."""
    if spec.fused:
        return ()
    a = spec.attention
    each = -(-a.depth // LANES) * (spec.first is not None) + -(-a.width // LANES) * (spec.second is not None)
    found = [AttentionBackwardSimtSchedule(n) for n in (4, 2, 1) if n * each <= MOST_ELEMENTS]
    found = [s for s in found if buffers(spec, s).bytes <= MOST_SHARED]
    if not found:
        raise Declined(f"32 keys of {a.depth} and values of {a.width} elements do not fit shared memory")
    return tuple(found)


def render(spec: AttentionBackwardSpec, schedule: AttentionBackwardSimtSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return _Renderer(without_places(spec), schedule).render()


class _Renderer:
    def __init__(self, spec: AttentionBackwardSpec, schedule: AttentionBackwardSimtSchedule) -> None:
        self.spec, self.s, self.a, self.real = spec, schedule, spec.attention, spec.program.real
        self.w = Kernel(spec.name)
        self.arguments = [self.w.names.unique(op.name) for op in spec.arguments]
        self.scores = BackwardScores(self.w, spec, schedule.height, LANES)
        self.written = [self.w.names.unique(op.name) for op in spec.written]
        self.sums = sums(spec, self.written)
        self.held, self.brought = backward_sources(spec, self.arguments)
        self.tiles = Tiles(self.w, self.scores, self.real)

    def render(self) -> KernelSource:
        w, s, spec, real, scores = self.w, self.s, self.spec, self.real, self.scores
        w.share(buffers(spec, s))
        w.line(f"const int t = threadIdx.x, lane = t % {LANES}, row = t / {LANES} * {s.rows};")
        scores.unit()
        w.line(f"const int r0 = blockIdx.x % {scores.tiles} * {s.height};")
        scores.coordinates(f"(blockIdx.x / {scores.tiles})", spec.batch)
        scores.scalars()
        for source in self.held:
            self.tiles.fill(source, "r0", THREADS)
        for x in self.sums:
            w.line(f"{real} {x.name}[{s.rows}][{-(-x.elements // LANES)}] = {{}};")
        if spec.queries:
            w.line(f"{real} lse[{s.rows}], row_dot[{s.rows}];")
            with w.unrolled(f"for (int r = 0; r < {s.rows}; ++r)"):
                self._numbers("lse[r]", "row_dot[r]", "r0 + row + r")
        scores.intervals()
        with scores.met(), w.block("for (int tile = first; tile < last; ++tile)"):
            w.line(f"const int c0 = tile * {LANES};")
            w.line("__syncthreads();  // the tile before has been used")
            for source in self.brought:
                self.tiles.fill(source, "c0", THREADS)
            w.line("__syncthreads();")
            self._tile()
        self._results()
        detail = f"for {s.height} {spec.over} a block, {s.rows} a warp, in tiles of {LANES} of the others"
        return scores.complete(self.arguments, self.written, detail, tiles=scores.tiles, threads=THREADS)

    def _numbers(self, lse: str, row_dot: str, query: str) -> None:
        """Writes the lse and row_dot of a query; one that does not exist has no probabilities."""
        w, scores, names = self.w, self.scores, self.arguments[4:]
        exists = Edge(self.a.rows, self.s.height if self.spec.queries else LANES).inside("x")
        w.line(f"const {scores.t} x = {query};")
        w.line(f"{lse} = {scores.lse_of(names[0], 'x', exists)};")
        w.line(f"{row_dot} = {scores.row_dot_of(names[1], 'x', exists)};")

    def _tile(self) -> None:
        w, s, spec, a, real, scores = self.w, self.s, self.spec, self.a, self.real, self.scores
        if not spec.queries:
            w.line(f"{real} lse, row_dot;")
            with w.block(""):
                self._numbers("lse", "row_dot", "c0 + lane")
        for name, held, other in zip("sd", self.held, self.brought):
            multiply(w, real, name, s.rows, held.tile, other.tile)
        with w.unrolled(f"for (int r = 0; r < {s.rows}; ++r)"):
            w.line(f"const {scores.t} m = r0 + row + r, n = c0 + lane;")
            scores.score("m", "n", "s[r]", inside=False, count=1)
            lse, row_dot = ("lse[r]", "row_dot[r]") if spec.queries else ("lse", "row_dot")
            w.line(f"s[r] = math::exp2(unit * score[0] - {lse});")
            if a.weight is not None:
                scores.weigh("m", "n", "d[r]", count=1)
                w.line(f"d[r] = s[r] * (weighted[0] - {row_dot});")
            else:
                w.line(f"d[r] = s[r] * (d[r] - {row_dot});")
            if spec.by_scores is not None:
                op = spec.by_scores
                place = f"{self.written[-1]}[{scores.offset(op, 'm', 'n')}]"
                w.line(f"{guard(scores.existing(scores.key_tiles))}{place} = {stored(op, 'd[r]', real)};")
            if spec.sloped:
                w.line("d[r] *= slope_of[0];")
            if a.weight is not None and spec.second is not None:
                with w.block(""):
                    scores.weigh("m", "n", "s[r]", count=1)
                    w.line("s[r] = weighted[0];")
        factors = {"d": "by_scores", "s": "by_weights"}
        for x in self.sums:
            put = f"shared.{factors[x.factors]}[row + r][lane] = {x.factors}[r];"
            w.unrolled_line(f"for (int r = 0; r < {s.rows}; ++r) {put}")
        add_products(w, real, s.rows, *((x.name, factors[x.factors], self.brought[x.tile].tile) for x in self.sums))

    def _results(self) -> None:
        """Writes the stores of the results."""
        w, spec, real, scores = self.w, self.spec, self.real, self.scores
        with rows_of_warp(w, scores, "r0", self.s.rows, Edge(spec.rows, self.s.height)):
            for x in self.sums:
                value = f"{x.name}[r][c]" if x.times == 1 else f"{literal(x.times, real)} * {x.name}[r][c]"
                with columns_of_lane(w, scores, Edge(x.elements, LANES)) as exists:
                    place = scores.offset(x.operand, "m", "n")
                    w.line(f"{guard(exists)}{x.written}[{place}] = {stored(x.operand, value, real)};")
