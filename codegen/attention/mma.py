"""Attention by the tensor cores of a warp (mma.sync, sm_80 and newer), as in FlashAttention-2 (Dao, 2023).

A warp has 16 queries.  Tiles of keys and values are copied to shared memory (cp.async) while the tile before is
multiplied; rows there are padded by 16 bytes, so that eight of them begin in different banks.  The probabilities stay
in registers: as the first product leaves them, they are the fragments of the second.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.attention.fragments import ScoreFragments, check_types, padded
from codegen.attention.scores import argument_names, merged
from codegen.attention.spec import AttentionSpec
from codegen.attention.tiles import VectorTiles, forward_sources
from codegen.buffers import VECTORS, Buffer, Buffers
from codegen.declined import Declined
from codegen.family import Schedule
from codegen.iteration import linear
from codegen.kernel import Kernel
from codegen.products import MMA_16816, STAGES, add_products, multiply, place_warp, ring
from codegen.sizes import most
from codegen.spec import KernelSource
from codegen.target import Target

PAD = 8  # elements behind each row
#: Registers of a thread that scores, probabilities and results may take.
HELD = 200
CHAINS = 2  # of maxima and sums
PRODUCER_WARPS = 7  # warps that compute keys or values
#: Share of the L2 cache that may hold the keys and values which blocks running at the same time share.
SHARED_IN_L2 = 4 / 15


@dataclass(frozen=True)
class AttentionMmaSchedule(Schedule):
    """``warps`` of a block, of 16 queries each; ``keys`` of a tile, a multiple of 16; ``heads``, batches worked on
    together.

    producer_warps  further warps, which bring the tiles of keys and values while the others multiply; 0: all do both.
    """

    warps: int
    keys: int
    heads: int = 1
    producer_warps: int = 0

    @property
    def rows(self) -> int:
        return MMA_16816.m * self.warps


def buffers(spec: AttentionSpec, s: AttentionMmaSchedule, element: str = "float16") -> Buffers:
    """Returns what a block has in shared memory, of elements of 16 bits."""
    deep, wide = padded(spec.depth), padded(spec.width)
    return Buffers(
        (
            Buffer("queries", element, (s.rows, deep), pad=PAD, align=VECTORS),
            Buffer("keys", element, (s.keys, deep), STAGES, pad=PAD, align=VECTORS),
            Buffer("values", element, (s.keys, wide), STAGES, pad=PAD, align=VECTORS),
        )
    )


def schedules(spec: AttentionSpec, target: Target) -> tuple[AttentionMmaSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined with a reason."""
    if not target.arch.has_cp_async:
        raise Declined(f"{target.arch.name} has no asynchronous copies")
    check_types(spec, small=True)
    if spec.empty:
        raise Declined("there is nothing to multiply")
    tall = max(spec.depth, spec.width)
    preferred = [(4, 64), (8, 64), (4, 32), (8, 32), (4, 16)] if tall <= 128 else [(4, 32), (8, 32), (4, 16)]
    if spec.rows <= 16:
        preferred = [(1, 64), (1, 32), (1, 16), *preferred]
    elif spec.rows <= 32:
        preferred = [(2, 32), (2, 64), (2, 16), *preferred]
    producer_warps = 0
    if any(spec.computed[1:]):  # nothing is in flight while keys or values are computed: other warps multiply meanwhile
        warps = next((n for n in (1, 2, 4) if MMA_16816.m * n >= spec.rows), 8)
        preferred, producer_warps = [(warps, 64), (warps, 32), (warps, 16), (4, 16)], min(PRODUCER_WARPS, 12 - warps)
    each = max(1, spec.keys * (spec.depth + spec.width) * 2)
    heads = max(1, target.l2_share(SHARED_IN_L2) // each)
    every = (AttentionMmaSchedule(n, min(keys, padded(spec.keys)), heads, producer_warps) for n, keys in preferred)
    found = [s for s in every if s.keys // 2 + s.keys // 4 + padded(spec.width) // 2 <= HELD]
    found = [s for s in found if buffers(spec, s).bytes <= target.arch.shared_bytes_per_block]
    if not found:
        raise Declined(f"the sums of {tall} elements do not fit the registers of a warp")
    return tuple(dict.fromkeys(found))


def render(spec: AttentionSpec, schedule: AttentionMmaSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return _Renderer(merged(spec), schedule).render()


class _Renderer:
    def __init__(self, spec: AttentionSpec, schedule: AttentionMmaSchedule) -> None:
        self.spec, self.s = spec, schedule
        self.w = Kernel(spec.name)
        self.arguments = argument_names(spec, self.w.names)
        top = linear([("m0", 1), ("warp", MMA_16816.m if schedule.warps > 1 else 0)])
        self.scores = ScoreFragments(self.w, spec, schedule.keys, top, MMA_16816.m, schedule.rows, schedule.heads)
        self.written = self.scores.written()
        self.element = self.scores.element
        self.tiles = VectorTiles(self.w, self.scores, self.element)
        self.queries, *self.brought = forward_sources(self.scores, self.arguments)
        self.threads = 32 * (schedule.warps + schedule.producer_warps)

    def render(self) -> KernelSource:
        w, s, spec, scores = self.w, self.s, self.spec, self.scores
        w.share(buffers(spec, s, self.element))
        wide = w.buffers["values"].shape[-1]
        place_warp(w)
        scores.place("blockIdx.x")
        scores.unit()
        scores.scalars()
        scores.state(self.arguments[-1] if spec.sink is not None else "", wide)
        w.line(f"float s[{s.keys // 2}], rescale[2];")
        w.line(f"uint32 probability[{s.keys // MMA_16816.k}][4];")
        scores.define()
        self._fill()
        self.tiles.fill(self.queries, "m0", self.threads)
        producers = f"warp >= {s.warps}" if s.producer_warps else ""
        with ring(w, backwards=True, some=not spec.some_meet_none, producers=producers):
            multiply(w, self.element, "s", "queries", "keys")
            scores.make("tile")
            # With many keys the errors of rounding even out in the sum; with few, the divisor is the sum of the rounded
            # exponentials, which are what is multiplied.  Statistics are of the unrounded exponentials.
            few = most(spec.keys) <= s.keys and spec.stats is None
            scores.softmax(CHAINS, self.element if few else "")
            w.line("attention::scale(o, rescale);")
            w.line(f"attention::round_to_fragments<{self.element}>(s, probability);")
            add_products(w, self.element, "o", "probability", "values")
        scores.finish(self.written[-1] if spec.stats is not None else "")
        scores.store(self.written[0], wide)
        detail = f"{s.rows} queries a block, {MMA_16816.m} a warp, tiles of {s.keys} keys in {STAGES} stages (cp.async)"
        return scores.complete(self.arguments, self.written, detail, tiles=scores.tiles, threads=self.threads)

    def _fill(self) -> None:
        """Writes the function that brings a tile of keys and values."""
        w, s = self.w, self.s
        first = 32 * s.warps if s.producer_warps else 0
        thread = f"t - {first}" if first else "t"
        with w.block("const auto fill = [&](int tile, int stage)", "};"):
            w.line(f"const int n0 = tile * {s.keys};")
            for source in self.brought if self.spec.computed[1] is None else self.brought[::-1]:  # copies first
                self.tiles.fill(source, "n0", self.threads - first, thread)
