"""The producers of the Hopper kernels, which fill the ring of stages with tiles of both operands.

Copying, one thread has TMA bring all.  Gathering, threads copy the windows of an image, 16 bytes at a time.  Filling,
they compute or convert the elements of an operand.  One of them has TMA bring the other operand.
"""

from __future__ import annotations

from math import prod

from codegen.buffers import every
from codegen.contraction.wgmma_block import Block, tidy
from codegen.contraction.wgmma_layout import GROUP, PIECES
from codegen.contraction.wgmma_loads import Loads, OperandWriter
from codegen.iteration import coordinate, coordinates, linear, long
from codegen.operands import Gathered
from codegen.prologue import Prologue
from codegen.tile_loader import TileLoader
from codegen.tile_path import TilePath

#: Stages that are in flight while one that was gathered is rounded, unless the ring is shorter.
LATE = 2


class Producer:
    """Writes the producer; ``a`` and ``b`` are the operands."""

    def __init__(self, loads: Loads, a: OperandWriter, b: OperandWriter) -> None:
        self.loads, self.a, self.b = loads, a, b
        self.block = block = loads.block
        self.w, self.s, self.ring = block.w, block.s, block.ring
        #: bytes that TMA brings to a stage
        self.bytes = a.bytes + b.bytes

    def write(self) -> None:
        """Writes the loop over a block's tiles and their stages."""

    def load(self) -> None:
        """Writes the loads of a panel of a stage."""
        self.a.load()
        self.b.load()


class CopyingProducer(Producer):
    """A thread that has TMA bring both operands, or what one of them is computed from."""

    def write(self) -> None:
        w, block, s, k = self.w, self.block, self.s, self.block.parts.reduction
        w.line(f"registers_decrease<{s.registers[0]}>();")
        with w.block("if (threadIdx.x == 0)"):
            w.line(f"Ring<{s.stages}> stage;")
            first, last = block.stages()
            with block.tiles():
                if block.batch > 1 and len(block.parts.batch) > 1:
                    coordinates(w, "int", "b", "at.batch", block.parts.batch, long(block.parts.batch))
                if block.phased:
                    first, last = block.stages_of_phase()
                self.a.locate()
                with w.loop(f"for (int k = {first}; k < {last}; ++k, ++stage)"):
                    w.line("Barrier& full = shared.full[stage.index];")
                    self.ring.acquire()
                    self.ring.expect(self.bytes, barrier="full")
                    with self.loads.repeated("u", k.per_stage):
                        if k.per_stage > 1:
                            w.line(f"const int item = k * {k.per_stage} + u;")
                        self.loads.walk("item" if k.per_stage > 1 else "k")
                        self.load()


class FilledWriter(OperandWriter):
    """An operand whose tiles threads fill."""

    def __init__(self, block: Block, label: str, side: TilePath, prologue: Prologue) -> None:
        first = 0 if label == "a" else len(block.spec.a.operands)
        super().__init__([(declared, n) for n, declared in enumerate(prologue.parameters(), first)])
        edge = block.m if label == "a" else block.n
        t = "int32" if side.reach < 2**30 else "int64"
        depth, inner, threads = prod(block.spec.k), block.parts.reduction.panel, block.s.producer_warpgroups * GROUP
        tile = edge.size, edge.size, edge.total
        self.loader = TileLoader(block.w, t, side, label, prologue, *tile, depth, inner, threads, f"{label}_tile")


class FillingProducer(Producer):
    """Threads that fill the tiles of the operands that are computed or converted."""

    def __init__(self, loads: Loads, a: OperandWriter, b: OperandWriter) -> None:
        super().__init__(loads, a, b)
        self.loaders = [x.loader for x in (a, b) if isinstance(x, FilledWriter)]

    def write(self) -> None:
        w, block, s = self.w, self.block, self.s
        w.line(f"registers_decrease<{s.registers[0]}>();")
        w.line("const int t = threadIdx.x;")
        for loader in self.loaders:
            loader.prologue.scalars()
        w.line(f"Ring<{s.stages}> stage;")
        first, last = block.stages()
        with block.tiles():
            self._begin_tile(first)
            with w.loop(f"for (int k = {first}; k < {last}; ++k, ++stage)"):
                w.line("Barrier& full = shared.full[stage.index];")
                self.ring.acquire()
                if self.bytes:
                    with w.block("if (t == 0)"):
                        self.ring.expect(self.bytes, barrier="full")
                        self.loads.walk("k")
                        self.load()
                self._fill(f"{last} - 1" if s.split_k > 1 else str(int(last) - 1))
                w.line("fence_async_shared();  // wgmma reads what ordinary stores wrote")
                w.line("__syncwarp();")
                self.ring.arrive(count=s.producer_warpgroups * GROUP // 32, condition="t % 32 == 0", barrier="full")

    def _begin_tile(self, first: str) -> None:
        """Writes where the tile's elements lie, and the first reads."""
        w, block = self.w, self.block
        if block.batch > 1:
            w.line("const int batch = at.batch;")
            if len(block.parts.batch) > 1 and len(self.loaders) == 1:
                coordinates(w, "int", "b", "batch", block.parts.batch)
        self.a.locate()
        for loader in self.loaders:
            loader.prepare()
        w.line()
        for loader in self.loaders:
            loader.registers()
        for loader in self.loaders:
            loader.fetch(first)

    def _fill(self, last: str) -> None:
        """Writes how a stage is filled with what has been read, and the reads for the next one."""
        # After the last stage it is brought once more: this costs a few loads, but saves a branch among them.
        self.w.line(f"const int next = min(k + 1, {last});")
        for loader in self.loaders:
            p = loader.label
            self.w.line(f"unsigned char* const {p}_tile = reinterpret_cast<unsigned char*>(shared.{p}[stage.index]);")
            loader.renew("next")


class GatheringProducer(Producer):
    """Threads that copy operand A, each the same piece of some rows of the tile; TMA brings operand B.

    image    C name of operand A; ``side`` says how it lies.
    rounds   whether elements are rounded to tf32 once they have landed: asynchronous copies do not round, and tensor
             cores truncate.
    """

    def __init__(
        self, loads: Loads, a: OperandWriter, b: OperandWriter, side: Gathered, image: str, rounds: bool
    ) -> None:
        super().__init__(loads, a, b)
        self.side, self._image, self._rounds = side, image, rounds
        self._threads = self.s.producers * GROUP
        #: rows from one of a thread's copies to the next, and how many it makes
        self._step = self._threads // PIECES
        self._count = self.s.tile_m // self._step

    def write(self) -> None:
        w, block, s = self.w, self.block, self.s
        w.line(f"registers_decrease<{s.registers[0]}>();")
        w.line("const int t = threadIdx.x;")
        w.line(f"const int piece = t % {PIECES}, row = t / {PIECES};  // of its copies: rows {self._step} apart")
        w.line(f"Ring<{s.stages}> stage;")
        late = min(LATE, s.stages - 2)  # consumers free a stage when they have the next one
        if self._rounds:
            w.line(f"Ring<{s.stages}> landed;  // the stage whose copies are waited for, to be rounded: {late} behind")
            w.line("int late = 0;")
        with block.tiles():
            self._windows()
            with w.loop(f"for (int k = 0; k < {block.parts.reduction.stages}; ++k, ++stage)"):
                self.ring.acquire()
                with w.block("if (t == 0)"):
                    w.line("Barrier& full = shared.full[stage.index];")
                    self.ring.expect(self.bytes, barrier="full")
                    w.line(f"const int c = k * {block.parts.reduction.panel};")
                    self.load()
                self._copies()
                if self._rounds:
                    w.line("copy_async_commit();")
                    with w.block(f"if (++late > {late})"):
                        w.line(f"copy_async_wait<{late}>();")
                        self._round_landed(self._threads)
                else:
                    self.ring.arrive(count=self._threads, call="copy_async_arrive")
        if self._rounds:
            w.line("copy_async_wait<0>();")
            with w.block("while (late > 0)"):
                self._round_landed(0)  # the trace has the arrivals of all stages above

    def _windows(self) -> None:
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

    def _copies(self) -> None:
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

    def _round_landed(self, arrivals: int) -> None:
        """Writes how a thread rounds what it has copied of a stage, and hands the stage over."""
        w = self.w
        with w.unrolled(f"for (int i = 0; i < {self._count}; ++i)"):
            self._place()
            w.line("round_to_tf32(reinterpret_cast<unsigned char*>(shared.a[landed.index]) + at);")
        self.ring.arrive("landed", count=arrivals)
        w.line("++landed;")
        w.line("--late;")


def producer(loads: Loads, a: OperandWriter, b: OperandWriter, image: str, types: tuple[str, str]) -> Producer:
    """Returns what fills the ring; ``image`` is the C name of an operand A that is gathered."""
    side = loads.block.parts.a
    if isinstance(side, Gathered):
        return GatheringProducer(loads, a, b, side, image, types[0] == "tf32")
    return (FillingProducer if loads.block.s.producer_warpgroups else CopyingProducer)(loads, a, b)
