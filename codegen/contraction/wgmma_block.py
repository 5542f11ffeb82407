"""What the roles of a block of the Hopper kernels have in common: its tiles, their stages, and the loops over both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod

from codegen.buffers import Edge
from codegen.contraction.wgmma_layout import GROUP, GROUP_ROWS, Layout
from codegen.iteration import extent, signed_index_type
from codegen.kernel import Kernel, tile_at
from codegen.operands import ComputedOperand, MappedOperand
from codegen.pipeline import Pipeline
from codegen.sizes import least, most


class Block:
    """A block: what it has and works on.

    ring        the stages with tiles of both operands.
    m, n        rows and columns of the result in tiles; ``batch`` products, ``count`` tiles in all.
    columns     that a wgmma multiplies: those of all operands B, one after another.
    persistent  whether a block may have several tiles; ``phased`` whether a batch is a phase, with taps of its own.
    t           C type of positions; ``register_type`` that of the sums as wgmma leaves them.
    group       C expression of a consumer's number; ``rows`` of where the 64 rows begin in the tile that it multiplies;
                ``sum`` of their sums.
    n0          C expression of the first column of a tile that a block writes.  A block of a cluster has columns to
                write if ``writes`` holds, unless that is empty.
    """

    def __init__(self, w: Kernel, layout: Layout) -> None:
        self.w, self.layout = w, layout
        self.spec, self.parts, self.s = spec, parts, s = layout.spec, layout.parts, layout.s
        self.m, self.n = Edge(parts.rows, s.tile_m), Edge(parts.cols, s.tile_n)
        self.batch = prod(parts.batch)
        self.count = s.tiles(parts)
        self.columns = s.tile_n * spec.products
        self.persistent = s.split_k == 1 and (s.pingpong or most(self.count) > s.blocks)
        self.phased = bool(parts.reduction.skips)
        self.t = signed_index_type(
            prod(layout.over.space), *(extent(layout.over.space, op.strides) for op in layout.program.operands)
        )
        self.register_type = "int32" if spec.accumulate == "uint32" else "float"
        self.group = "group" if s.groups > 1 else "0"
        piece = "p" if s.pingpong else f"(group * {s.pieces} + p)" if s.doubled else "group" if s.groups > 1 else ""
        self.rows = f"{piece} * {GROUP_ROWS}" if piece else "0"
        self.sum = "sum[p]" if s.pieces > 1 else "sum"
        self.n0 = f"n0 + rank * {s.part}" if s.split_k > 1 else "n0"
        self.writes = f"rank < {s.tile_n // s.part}" if s.part * s.split_k > s.tile_n else ""
        copied = any(isinstance(side, MappedOperand | ComputedOperand) for side in (parts.a, parts.b))
        arrivals = s.producers * GROUP if s.gather else s.producer_warpgroups * GROUP // 32
        self.ring = Pipeline(w, "", s.stages, fills=copied + arrivals, releases=1 if s.pingpong else s.groups)

    @property
    def at_batch(self) -> str:
        """The C expression of a tile's batch, in a type that offsets of results fit."""
        return "at.batch" if self.t == "int32" else f"{self.t}(at.batch)"

    # ---- loops

    @contextmanager
    def tiles(self, *, in_turn: bool = False) -> Iterator[None]:
        """Writes the loop over a block's tiles, or those of one of two consumers in turn, and where each is."""
        w, s = self.w, self.s
        loop = f"for (int tile = blockIdx.x; tile < {self.count}; tile += gridDim.x)"
        if in_turn:
            stages = f"stage += {self.parts.reduction.stages}"
            w.line(f"if (group == 1) {stages};  // the stages of the other's first tile")
            step = f"tile += 2 * gridDim.x, {stages}"
            loop = f"for (int tile = blockIdx.x + group * gridDim.x; tile < {self.count}; {step})"
        elif not self.persistent:
            w.line(f"const int tile = blockIdx.x{f' / {s.split_k}' if s.split_k > 1 else ''};")
        with w.loop(loop) if self.persistent else nullcontext():
            w.line(f"const Tile at = {tile_at('tile', self.m.tiles, self.n.tiles, s.raster_group)};")
            w.line(f"const int m0 = at.row * {s.tile_m}, n0 = at.col * {s.tile_n};")
            yield

    @property
    def idle(self) -> bool:
        """Whether some block of a cluster may have no stage of a reduction whose size varies."""
        return least(self.parts.reduction.stages) < self.s.split_k

    def stages(self) -> tuple[str, str]:
        """Returns the first stage of a tile's reduction that a block has, and the one behind its last."""
        stages, split_k = self.parts.reduction.stages, self.s.split_k
        if split_k == 1:
            return "0", str(stages)
        self.w.line("const int rank = cluster_rank();")
        self.w.line(f"const int first = rank * {stages} / {split_k}, last = (rank + 1) * {stages} / {split_k};")
        return "first", "last"

    def stages_of_phase(self) -> tuple[str, str]:
        """Returns the same for a tile whose batch is a phase, once its coordinates are written."""
        w, k = self.w, self.parts.reduction
        for d, skip in enumerate(k.skips):
            if skip != "0":
                first = skip.format(**self.batch_values())
                w.line(f"const int skip{d} = {first};  // first taps that the phase does not have")
        counts = [str(n) if skip == "0" else f"({n} - skip{d})" for d, (n, skip) in enumerate(zip(k.taps, k.skips))]
        counts = [count for count in (*counts, str(k.chunks)) if count != "1"]
        nothing = f"{k.idle.format(**self.batch_values())} ? 0 : " if k.idle else ""
        w.line(f"const int last = {nothing}{' * '.join(counts) or '1'};")
        return "0", "last"

    def batch_values(self) -> dict[str, str]:
        """Returns the C expressions of a tile's batch coordinates, by name."""
        return {
            f"b{d}": "0" if size == 1 else "at.batch" if self.batch == size else f"b{d}"
            for d, size in enumerate(self.parts.batch)
        }

    def pieces(self) -> AbstractContextManager[None]:
        """Writes the loop over a consumer's products of 64 rows."""
        return self.w.unrolled(f"for (int p = 0; p < {self.s.pieces}; ++p)", when=self.s.pieces > 1)

    def synchronize(self, note: str = "") -> None:
        """Writes a barrier of a consumer's threads (the named barrier 0 is that of __syncthreads)."""
        number = "group + 1" if self.s.groups > 1 else "1"
        self.w.line(f"named_barrier_sync({number}, {GROUP});{f'  // {note}' if note else ''}")


def tidy(text: str) -> str:
    """Returns a C term simplified: ``0 * 3`` is 0, ``x * 1`` is x, ``x - 0`` is x."""
    for end in (" * 1", " - 0"):
        text = text.removesuffix(end)
    text = text.replace(" * 1 ", " ")
    return "0" if text.startswith("0 * ") and "-" not in text and "+" not in text else text
