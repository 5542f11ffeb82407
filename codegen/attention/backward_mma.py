"""Attention's gradients by the tensor cores of a warp (mma.sync, sm_80 and newer).

A warp has 16 rows, queries or keys, of a tile that the block keeps in shared memory; the other side is copied there in
tiles (cp.async) while the tile before is multiplied.  Probabilities and gradients stay in registers: as the first
products leave them, they are the operands A of the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.attention.backward_fragments import BackwardFragments, random_registers
from codegen.attention.backward_scores import sums, without_places
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.fragments import check_types, padded
from codegen.attention.mma import PAD, SHARED_IN_L2
from codegen.attention.tiles import VectorTiles, backward_sources
from codegen.buffers import VECTORS, Buffer, Buffers, Edge
from codegen.declined import Declined
from codegen.family import Schedule
from codegen.iteration import linear
from codegen.kernel import Kernel
from codegen.products import MMA_16816, STAGES, add_products, multiply, place_warp, ring
from codegen.spec import KernelSource
from codegen.target import Target

#: Registers of a thread that scores, gradients, operands and sums may take.
HELD = 208


@dataclass(frozen=True)
class AttentionBackwardMmaSchedule(Schedule):
    """``warps`` of a block, of 16 rows each; ``cols`` of a tile, a multiple of 16; ``heads``, batches worked on
    together.
    """

    warps: int
    cols: int
    heads: int = 1

    @property
    def height(self) -> int:
        return MMA_16816.m * self.warps


def buffers(spec: AttentionBackwardSpec, s: AttentionBackwardMmaSchedule, element: str = "float16") -> Buffers:
    """Returns what a block has in shared memory, of elements of 16 bits."""
    sizes = padded(spec.attention.depth), padded(spec.attention.width)
    held, brought = (("queries", "losses"), ("keys", "values"))[:: 1 if spec.queries else -1]
    rows = [Buffer(name, element, (s.height, n), pad=PAD, align=VECTORS) for name, n in zip(held, sizes)]
    rows += [Buffer(name, element, (s.cols, n), STAGES, pad=PAD, align=VECTORS) for name, n in zip(brought, sizes)]
    numbers = () if spec.queries else ("lse", "row_dot")
    return Buffers((*rows, *(Buffer(name, "float", (s.cols,), STAGES, align=VECTORS) for name in numbers)))


def _registers(spec: AttentionBackwardSpec, cols: int) -> int:
    a = spec.attention
    first, second = spec.first is not None, spec.second is not None
    sums = padded(a.depth) // 2 * first + padded(a.width) // 2 * second
    return sums + cols // 2 * (2 + spec.sloped) + cols // 4 * (first + second) + random_registers(a, cols)


def schedules(spec: AttentionBackwardSpec, target: Target) -> tuple[AttentionBackwardMmaSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined with a reason."""
    if spec.fused:
        return ()
    if not target.arch.has_cp_async:
        raise Declined(f"{target.arch.name} has no asynchronous copies")
    a = spec.attention
    check_types(a)
    if spec.loss.dtype.name != a.q.dtype.name:
        raise Declined(f"tensor cores multiply {spec.loss.name} in {a.q.dtype.name}")
    if a.empty:
        raise Declined("there is nothing to multiply")
    preferred = [(4, 64), (8, 64), (4, 32), (8, 32), (4, 16), (2, 16)]
    if not spec.queries:
        preferred = [(4, 32), (8, 32), (4, 16), (8, 64), (2, 16)]
    if spec.rows <= 2 * MMA_16816.m:
        preferred = [(2, 32), (2, 16), *preferred]
    heads = spec.together(target.l2_share(SHARED_IN_L2))
    every = (AttentionBackwardMmaSchedule(n, min(cols, padded(spec.cols)), heads) for n, cols in preferred)
    found = [s for s in every if _registers(spec, s.cols) <= HELD]
    found = [s for s in found if buffers(spec, s).bytes <= target.arch.shared_bytes_per_block]
    if not found:
        raise Declined(f"the sums of {max(a.depth, a.width)} elements do not fit the registers of a warp")
    return tuple(dict.fromkeys(found))


def render(spec: AttentionBackwardSpec, schedule: AttentionBackwardMmaSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return _Renderer(without_places(spec), schedule).render()


class _Renderer:
    def __init__(self, spec: AttentionBackwardSpec, schedule: AttentionBackwardMmaSchedule) -> None:
        self.spec, self.s = spec, schedule
        self.w = Kernel(spec.name)
        self.arguments = [self.w.names.unique(op.name) for op in spec.arguments]
        top = linear([("r0", 1), ("warp", MMA_16816.m)])
        self.scores = BackwardFragments(self.w, spec, schedule.height, schedule.cols, top, MMA_16816.m)
        self.written = [self.w.names.unique(op.name) for op in spec.written]
        self.sums = sums(spec, self.written)
        self.held, self.brought = backward_sources(spec, self.arguments)
        self.element = self.scores.element_type
        self.tiles = VectorTiles(self.w, self.scores, self.element, "x")
        self.threads = 32 * schedule.warps

    def render(self) -> KernelSource:
        w, s, spec, scores = self.w, self.s, self.spec, self.scores
        w.share(buffers(spec, s, self.element))
        place_warp(w)
        scores.place("blockIdx.x", s.heads)
        scores.unit()
        scores.scalars()
        self._state()
        for source in self.held:
            self.tiles.fill(source, "r0", self.threads)
        scores.intervals()
        with scores.met():
            self._loop()
        for x in self.sums:
            scores.store(x.name, x.operand, x.written, x.elements, padded(x.elements), x.times)
        detail = f"for {s.height} {spec.over} a block, {MMA_16816.m} a warp, tiles of {s.cols} of the others"
        detail += f" in {STAGES} stages (cp.async)"
        return scores.complete(self.arguments, self.written, detail, tiles=scores.tiles, threads=self.threads)

    def _state(self) -> None:
        """Writes what a thread keeps in registers."""
        for x in self.sums:
            self.w.line(f"float {x.name}[{padded(x.elements) // 2}] = {{}};")
        self.scores.arrays(["factor"])
        if self.spec.queries:
            self.scores.row_numbers(*self.arguments[4:])

    def _loop(self) -> None:
        """Writes the loop over the tiles of one head."""
        spec, scores = self.spec, self.scores
        scores.define()
        self._fill()
        by_scores = self.written[-1] if spec.by_scores is not None else ""
        with ring(self.w):
            scores.draw("tile")
            self._multiply("s", 0)
            scores.probabilities("tile", "&shared.lse[stage][0]")
            self._add("by_p")
            if self.spec.with_loss:
                self._multiply("d", 1)
                scores.gradients("tile", "&shared.row_dot[stage][0]", by_scores, "factor")
            self._add("by_s")

    def _fill(self) -> None:
        """Writes the function that brings a tile of the other side, and what is known of queries."""
        w, s, spec, scores = self.w, self.s, self.spec, self.scores
        lse, row_dot = self.arguments[4:]
        with w.block("const auto fill = [&](int tile, int stage)", "};"):
            w.line(f"const int c0 = tile * {s.cols};")
            for source in self.brought:
                self.tiles.fill(source, "c0", self.threads)
            if spec.queries:
                return
            with w.block(f"for (int i = t; i < {s.cols}; i += {self.threads})"):
                w.line(f"const {scores.t} x = c0 + i;")
                exists = Edge(spec.cols, s.cols).inside("x")
                w.line(f"shared.lse[stage][i] = {scores.lse_of(lse, 'x', exists)};")
                if self.spec.with_loss:
                    w.line(f"shared.row_dot[stage][i] = {scores.row_dot_of(row_dot, 'x', exists)};")

    def _multiply(self, result: str, which: int) -> None:
        """Writes the products of the warp's rows with a tile."""
        multiply(self.w, self.element, result, self.held[which].tile, self.brought[which].tile)

    def _add(self, name: str) -> None:
        """Writes the products of the operands A in registers with a tile, if they are for a result."""
        for x in self.sums:
            if x.name == name:
                add_products(self.w, self.element, name, "factor", self.brought[x.tile].tile)
