"""The producers of the Hopper kernels, which fill the ring of stages with tiles of both operands.

Copying, one thread has TMA bring all.  Gathering, threads copy the windows of an image, 16 bytes at a time.  Filling,
they compute or convert the elements of an operand, or bring the factors of codes.  One of them has TMA bring the other
operand, or the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from codegen.buffers import every
from codegen.contraction.wgmma_block import Block, tidy
from codegen.contraction.wgmma_layout import GROUP, PIECES
from codegen.contraction.wgmma_loads import Loads, OperandWriter
from codegen.contraction.wgmma_scales import ScaledWriter, ScaleLoader
from codegen.iteration import coordinate, coordinates, linear, long, signed_index_type
from codegen.kernel import FROM_HERE, parameter
from codegen.operands import Gathered
from codegen.prologue import Prologue
from codegen.tile_loader import TileLoader
from codegen.tile_path import TilePath

#: Stages that are in flight while one that was gathered is rounded, unless the ring is shorter.
LATE = 2


def producer(loads: Loads, a: OperandWriter, b: OperandWriter) -> None:
    """Writes what fills the ring with the tiles of both operands."""
    block = loads.block
    block.w.line(f"registers_decrease<{block.layout.registers[0]}>();")
    if isinstance(a, GatheredWriter):
        _gathering(loads, a, b)
    elif block.s.producer_warpgroups:
        _filling(loads, a, b)
    else:
        _copying(loads, a, b)


def _copying(loads: Loads, a: OperandWriter, b: OperandWriter) -> None:
    """Writes a thread that has TMA bring both operands, or what one of them is computed from."""
    w, block, k = loads.w, loads.block, loads.k
    with w.block("if (threadIdx.x == 0)"):
        w.line(f"Ring<{block.s.stages}> stage;")
        first, last = block.stages()
        with block.tiles():
            if block.batch > 1 and len(block.parts.batch) > 1:
                coordinates(w, "int", "b", "at.batch", block.parts.batch, long(block.parts.batch))
            if block.phased:
                first, last = block.stages_of_phase()
            a.locate()
            with w.loop(f"for (int k = {first}; k < {last}; ++k, ++stage)"):
                w.line("Barrier& full = shared.full[stage.index];")
                block.ring.acquire()
                block.ring.expect(a.bytes + b.bytes, barrier="full")
                with loads.repeated("u", k.per_stage):
                    if k.per_stage > 1:
                        w.line(f"const int item = k * {k.per_stage} + u;")
                    loads.walk("item" if k.per_stage > 1 else "k")
                    a.load()
                    b.load()
        w.line(FROM_HERE)


# ---- tiles that threads fill


class FilledWriter(OperandWriter):
    """An operand whose tiles threads fill."""

    def __init__(self, block: Block, label: str, side: TilePath, prologue: Prologue) -> None:
        first, edge = (0, block.m) if label == "a" else (len(block.spec.a.operands), block.n)
        super().__init__(block, [(declared, n) for n, declared in enumerate(prologue.parameters(), first)])
        t = signed_index_type(2 * side.reach)
        depth, inner, threads = prod(block.spec.k), block.parts.reduction.panel, block.s.producer_warpgroups * GROUP
        tile = edge.size, edge.size, edge.total
        self.loader = TileLoader(block.w, t, side, label, prologue, *tile, depth, inner, threads, f"{label}_tile")


def _filling(loads: Loads, a: OperandWriter, b: OperandWriter) -> None:
    """Writes threads that fill the tiles of the operands that are computed or converted."""
    w, block, ring, s = loads.w, loads.block, loads.block.ring, loads.block.s
    loaders = [x.loader for x in (a, b) if isinstance(x, FilledWriter | ScaledWriter) and x.loader is not None]
    w.line("const int t = threadIdx.x;")
    for loader in loaders:
        loader.prologue.scalars()
    w.line(f"Ring<{s.stages}> stage;")
    first, last = block.stages()
    with block.tiles():
        _begin_tile(block, a, b, loaders, first)
        with w.loop(f"for (int k = {first}; k < {last}; ++k, ++stage)"):
            w.line("Barrier& full = shared.full[stage.index];")
            ring.acquire()
            if a.bytes + b.bytes:
                with w.block("if (t == 0)"):
                    ring.expect(a.bytes + b.bytes, barrier="full")
                    loads.walk("k")
                    a.load()
                    b.load()
            # After the last stage it is brought once more: this costs a few loads, but saves a branch among them.
            w.line(f"const int next = min(k + 1, {int(last) - 1 if last.isdigit() else f'{last} - 1'});")
            for loader in loaders:
                if isinstance(loader, TileLoader):
                    at = f"shared.{loader.label}[stage.index]"
                    w.line(f"unsigned char* const {loader.label}_tile = reinterpret_cast<unsigned char*>({at});")
                loader.renew("next")
            if not s.scales:
                w.line("fence_async_shared();  // wgmma reads what ordinary stores wrote")
            w.line("__syncwarp();")
            ring.arrive(count=s.producer_warpgroups * GROUP // 32, condition="t % 32 == 0", barrier="full")
    w.line(FROM_HERE)


def _begin_tile(
    block: Block, a: OperandWriter, b: OperandWriter, loaders: Sequence[TileLoader | ScaleLoader], first: str
) -> None:
    """Writes where a tile's elements lie, and the first reads."""
    if block.batch > 1:
        itype = "int64" if any(loader.t == "int64" for loader in loaders) else "int"
        block.w.line(f"const {itype} batch = at.batch;")
        if len(block.parts.batch) > 1 and a.bytes + b.bytes:
            coordinates(block.w, itype, "b", "batch", block.parts.batch)
    a.locate()
    for loader in loaders:
        loader.prepare()
    block.w.line()
    for loader in loaders:
        loader.registers()
    for loader in loaders:
        loader.fetch(first)


# ---- windows that threads gather


def _gathering(loads: Loads, a: GatheredWriter, b: OperandWriter) -> None:
    """Writes threads that copy operand A, each the same piece of some rows of the tile; TMA brings operand B."""
    w, block, ring, k = loads.w, loads.block, loads.block.ring, loads.k
    late = min(LATE, block.s.stages - 2)  # consumers free a stage when they have the next one
    a.begin(late)
    with block.tiles():
        a.locate()
        with w.loop(f"for (int k = 0; k < {k.stages}; ++k, ++stage)"):
            ring.acquire()
            with w.block("if (t == 0)"):
                w.line("Barrier& full = shared.full[stage.index];")
                ring.expect(b.bytes, barrier="full")
                w.line(f"const int c = k * {k.panel};")
                b.load()
            a.copy()
            if a.rounds:
                w.line("copy_async_commit();")
                with w.block(f"if (++late > {late})"):
                    w.line(f"copy_async_wait<{late}>();")
                    a.hand_over(a.threads)
            else:
                ring.arrive(count=a.threads, call="copy_async_arrive")
    if a.rounds:
        w.line("copy_async_wait<0>();")
        with w.block("while (late > 0)"):
            a.hand_over(0)  # the trace has the arrivals of all stages above
    w.line(FROM_HERE)


class GatheredWriter(OperandWriter):
    """An operand A whose windows threads copy.  If it ``rounds``, they then round elements to tf32, which asynchronous
    copies do not: tensor cores would truncate.
    """

    def __init__(self, block: Block, side: Gathered, prologue: Prologue, *, rounds: bool) -> None:
        super().__init__(block, [(parameter(block.spec.a.operand, prologue.name), 0)])
        self.side, self._image, self.rounds = side, prologue.name, rounds
        self.threads = block.s.producers * GROUP
        #: rows from one of a thread's copies to the next, and how many it makes
        self._step = self.threads // PIECES
        self._count = block.s.tile_m // self._step

    def begin(self, late: int) -> None:
        """Writes what stays the same for all tiles."""
        w, stages = self.w, self.block.s.stages
        w.line("const int t = threadIdx.x;")
        w.line(f"const int piece = t % {PIECES}, row = t / {PIECES};  // of its copies: rows {self._step} apart")
        w.line(f"Ring<{stages}> stage;")
        if self.rounds:
            w.line(f"Ring<{stages}> landed;  // the stage whose copies are waited for, to be rounded: {late} behind")
            w.line("int late = 0;")

    def locate(self) -> None:
        """Writes where the windows of a thread's rows begin."""
        w, side, image = self.w, self.side, self.side.image
        starts = [f"o{d}[{self._count}]" for d in range(len(image.sizes))]
        w.line(f"int32 base[{self._count}];  // of a row's window")
        w.line(f"int16 {', '.join(starts)};")
        with w.unrolled(f"for (int i = 0; i < {self._count}; ++i)"):
            w.line(f"const int32 m = m0 + row + i * {self._step};")
            for d in range(len(image.sizes)):
                position = coordinate("m", side.rows, d + 1)
                position = position if " " not in position else f"({position})"
                position = tidy(f"{position} * {image.stride[d]} - {image.before[d]}")
                inside = self.block.m.inside("m") if d == 0 else ""
                w.line(f"o{d}[i] = {f'{inside} ? {position} : -32768' if inside else position};")
            batch = [("at.batch", side.steps[1])] if self.block.batch > 1 else []
            inner = [(f"o{d}[i]", step) for d, step in enumerate(image.steps)]
            w.line(f"base[i] = {linear([(coordinate('m', side.rows, 0), side.steps[0]), *batch, *inner])};")

    def copy(self) -> None:
        """Writes a thread's copies to a stage: a piece of a tap, in every row."""
        w, side, image, k = self.w, self.side, self.side.image, self.block.parts.reduction
        w.line(f"const int k0 = k * {k.panel} + piece * {16 // k.itemsize};")
        sizes = (*side.taps, side.channels)
        coordinates(w, "int", "t", "k0", sizes, long(side.taps))
        taps = [(f"t{d}" if size > 1 else "0", image.dilation[d]) for d, size in enumerate(side.taps)]
        reach = [(name, dilation * step) for (name, dilation), step in zip(taps, image.steps)]
        w.line(f"const int32 tap = {linear([*reach, (coordinate('k0', sizes, len(taps)), 1)])};")
        # Windows that overlap are copied more than once: they come from the L1 cache.
        overlap = any(size * dilation > step for size, dilation, step in zip(side.taps, image.dilation, image.stride))
        copy = "copy_async_cached" if overlap else "copy_async<16>"
        with w.unrolled(f"for (int i = 0; i < {self._count}; ++i)"):
            inside = [
                f"uint32({linear([(f'o{d}[i]', 1), tap])}) < {size}"
                for d, (size, tap) in enumerate(zip(image.sizes, taps))
            ]
            exists = f"k0 < {k.channels}" if k.channels % k.panel else ""
            w.line(f"const bool inside = {every(*inside, exists)};")
            self._place()
            w.line(f"{copy}(reinterpret_cast<unsigned char*>(shared.a[stage.index]) + at,")
            w.line(f"{' ' * len(copy)} {self._image} + (base[i] + tap), inside ? 16 : 0);")

    def _place(self) -> None:
        """Writes where in a tile a thread's copy lies."""
        self.w.line(f"const int at = swizzle<128>((row + i * {self._step}) * 128 + piece * 16);")

    def hand_over(self, arrivals: int) -> None:
        """Writes how a thread rounds what it has copied of a stage, and says that the stage is filled."""
        with self.w.unrolled(f"for (int i = 0; i < {self._count}; ++i)"):
            self._place()
            self.w.line("round_to_tf32(reinterpret_cast<unsigned char*>(shared.a[landed.index]) + at);")
        self.block.ring.arrive("landed", count=arrivals)
        self.w.line("++landed;")
        self.w.line("--late;")
