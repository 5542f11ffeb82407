"""The producers of the Hopper kernels, which fill the ring of stages with tiles of both operands.

Copying, one thread has TMA bring all.  Filling, threads compute or convert the elements of an operand, and one of them
has TMA bring the other.  Gathering is in `codegen.contraction.wgmma_gather`.
"""

from __future__ import annotations

from codegen.contraction.wgmma_block import Block
from codegen.contraction.wgmma_layout import GROUP
from codegen.contraction.wgmma_loads import Loads, OperandWriter
from codegen.iteration import coordinates, long
from codegen.tile_loader import TileLoader


class Producer:
    """Writes the producer; ``a`` and ``b`` are the operands."""

    def __init__(self, block: Block, loads: Loads, a: OperandWriter, b: OperandWriter) -> None:
        self.block, self.loads, self.a, self.b = block, loads, a, b
        self.w, self.s, self.ring = block.w, block.s, block.ring
        #: bytes that TMA brings to a stage
        self.bytes = a.bytes + b.bytes

    def write(self) -> None:
        """Writes the loop over a block's tiles and their stages."""
        raise NotImplementedError

    def begin(self) -> None:
        """Writes what the producer's warpgroups do first: they give registers to the consumers."""
        self.w.line(f"registers_decrease<{self.s.registers[0]}>();")

    def load(self) -> None:
        """Writes the loads of a panel of a stage."""
        self.a.load()
        self.b.load()


class CopyingProducer(Producer):
    """A thread that has TMA bring both operands, or what one of them is computed from."""

    def write(self) -> None:
        w, block, s, k = self.w, self.block, self.s, self.block.parts.reduction
        self.begin()
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

    def __init__(self, loader: TileLoader) -> None:
        super().__init__(loader.prologue.parameters())
        self.loader = loader


class FillingProducer(Producer):
    """Threads that fill the tiles of the operands that are computed or converted."""

    def __init__(self, block: Block, loads: Loads, a: OperandWriter, b: OperandWriter) -> None:
        super().__init__(block, loads, a, b)
        self.loaders = [x.loader for x in (a, b) if isinstance(x, FilledWriter)]

    def write(self) -> None:
        w, block, s = self.w, self.block, self.s
        self.begin()
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
