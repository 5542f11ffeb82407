"""The contraction family on Hopper: warpgroup matrix products (wgmma) on tiles that TMA brings to shared memory.

A block has one producer, a single thread that fills a ring of stages with tiles of both operands, and consumers, each a
warpgroup that multiplies 64 rows of the tile.  Blocks are persistent: while the consumers run the program (the
epilogue) on their sums the producer fills the ring for the next tile, and the results leave through shared memory by
asynchronous copies.  With split-K, the blocks of a cluster share one tile, each having part of the reduction, and add
up their sums through distributed shared memory in a fixed order.
"""

from __future__ import annotations

from itertools import count
from math import prod

from codegen.bf16x6 import BF16X6, PART, PRODUCTS
from codegen.buffers import every
from codegen.contraction.totals import Totals
from codegen.contraction.wgmma_block import Block
from codegen.contraction.wgmma_computed import OperandAWriter
from codegen.contraction.wgmma_consumer import Turns, consumer, main_loop
from codegen.contraction.wgmma_layout import GROUP, Layout, WgmmaSchedule
from codegen.contraction.wgmma_loads import GRID_CONSTANT, Loads, MappedWriter, OperandWriter, Parameter, SparseWriter
from codegen.contraction.wgmma_partials import WgmmaPartials
from codegen.contraction.wgmma_producer import FilledWriter, GatheredWriter, producer
from codegen.contraction.wgmma_scales import ScaledWriter
from codegen.contraction.wgmma_schedule import adds_up_stages, multiplied
from codegen.contraction.wgmma_staged import results
from codegen.epilogue import Epilogue
from codegen.kernel import UNTIL_HERE, Kernel, parameter, tile_at
from codegen.operands import STEP_BYTES, ComputedOperand, Gathered, MappedOperand
from codegen.pipeline import Signals
from codegen.prologue import Prologue
from codegen.scaled_tiles import ScaledOperand
from codegen.sizes import least, most, smaller
from codegen.spec import ContractionSpec, KernelSource
from codegen.tile_path import TilePath


def render(spec: ContractionSpec, schedule: WgmmaSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C.  Raises Declined if the spec cannot have this form."""
    return _Renderer(spec, schedule).render()


class _Renderer:
    def __init__(self, spec: ContractionSpec, schedule: WgmmaSchedule) -> None:
        self.spec, self.s = spec, schedule
        self.parts = schedule.operand_tiles(spec)
        self.types = multiplied(spec, schedule, self.parts)
        self.layout = layout = Layout(spec, self.parts, schedule)
        self.w = w = Kernel(spec.name)
        self.block = Block(w, layout)
        self.loads = Loads(self.block)
        self.prologues = self._prologue("a"), self._prologue("b")
        self.epilogue = Epilogue(w, layout.program, w.names, layout.over.space, spec.accumulate, spec.result)
        self.partials = WgmmaPartials(self.block)
        self.a, self.b = self._operand("a", self.prologues[0]), self._operand("b", self.prologues[1])
        self.turns = Turns(self.block) if schedule.pingpong else None
        self.totals = Totals(w, spec, GROUP, "shared.")
        self.results = results(self.block, self.epilogue, self.partials, self.totals)

    def _prologue(self, label: str) -> Prologue:
        """Returns the names of an operand, and the program it is computed by."""
        side, gather = (self.parts.a, self.spec.a) if label == "a" else (self.parts.b, self.spec.b)
        gather = side.gather if isinstance(side, TilePath | ComputedOperand | ScaledOperand) else gather
        others = self.spec.others if label == "b" else ()
        pairs = isinstance(side, ComputedOperand) and side.pairs
        return Prologue(self.w, gather, self.w.names, label, others, pairs=pairs)

    def _operand(self, label: str, prologue: Prologue) -> OperandWriter:
        """Returns what writes an operand."""
        side = self.parts.a if label == "a" else self.parts.b
        if isinstance(side, ComputedOperand):
            return OperandAWriter(self.loads, side, prologue)
        if isinstance(side, ScaledOperand):
            return ScaledWriter(self.loads, label, side, prologue.pointers, self.types[0])
        if label == "a" and isinstance(side, MappedOperand) and self.parts.metadata is not None:
            return SparseWriter(self.loads, side, prologue.name, self.types[0], self.parts.metadata)
        if isinstance(side, MappedOperand):
            return MappedWriter(self.loads, label, side, prologue.pointers, self.types[0])
        if isinstance(side, Gathered):
            return GatheredWriter(self.block, side, prologue, rounds=self.types[0] == "tf32")
        return FilledWriter(self.block, label, side, prologue)

    def render(self) -> KernelSource:
        w, s, block = self.w, self.s, self.block
        w.macros[f"FUSEGRAPH_WGMMA({block.columns})"] = None
        parameters = self._parameters()
        w.parameters += [declared for declared, _ in parameters]
        self._share()
        self._barriers()
        self._ahead()
        w.line(UNTIL_HERE)
        with w.block("if (group < 0)"):
            with w.role("producer"):
                producer(self.loads, self.a, self.b)
            if s.split_k > 1:
                w.line("cluster_sync();")
            w.otherwise()
            with w.role("consumer"):
                consumer(main_loop(block, self.types, self.a), self.turns, self.results)
        if s.split_k > 1:
            w.line("cluster_sync();  // a block's shared memory is there until all have read it")
        return w.source(
            self.layout.program,
            self._details(),
            blocks=block.count * s.split_k if s.split_k > 1 else smaller(block.count, s.blocks),
            threads=s.threads,
            barriers=True,
            blocks_per_sm=1,
            arguments=[argument for _, argument in parameters],
            cluster=s.split_k,
        )

    def _ahead(self) -> None:
        """Writes requests for a block's first tiles of the large operand to the L2 cache, if the other has one tile."""
        w, s, block, loads, k = self.w, self.s, self.block, self.loads, self.loads.k
        sides = [side for side in (self.parts.a, self.parts.b) if isinstance(side, MappedOperand) and not side.im2col]
        plain = block.batch == 1 and not (s.gather or s.producer_warpgroups or k.sparse or block.phased)
        rows, cols = block.m.tiles, block.n.tiles
        by_rows = (least(rows), most(rows)) <= (least(cols), most(cols))
        wide, few = (self.b, rows) if by_rows else (self.a, cols)
        if len(sides) < 2 or not plain or least(few) > 1:
            return
        w.line("// While the kernel before ends, these are on their way to the L2 cache.")
        with w.block(f"if ({every('threadIdx.x == 0', f'{few} == 1' if most(few) > 1 else '')})"):
            tile = "int(blockIdx.x)" if s.split_k == 1 else f"int(blockIdx.x) / {s.split_k}"
            w.line(f"const Tile at = {tile_at(tile, block.m.tiles, block.n.tiles, s.raster_group)};")
            first = f"n0 = at.col * {s.tile_n}" if wide is self.b else f"m0 = at.row * {s.tile_m}"
            w.line(f"const int {first};")
            begin, end = block.stages()
            ahead = -(-s.stages // 2)
            until = f"min({end}, {ahead})" if s.split_k == 1 else f"min({end}, {begin} + {ahead})"
            if isinstance(k.stages, int) and s.split_k == 1:
                until = str(min(k.stages, ahead))
            loads.ahead = True
            with w.block(f"for (int k = {begin}; k < {until}; ++k)"), loads.repeated("u", k.per_stage):
                if k.per_stage > 1:
                    w.line(f"const int item = k * {k.per_stage} + u;")
                loads.walk("item" if k.per_stage > 1 else "k")
                wide.load()
            loads.ahead = False

    # ---- heading, parameters and arguments

    def _details(self) -> list[str]:
        """Returns the lines of the kernel's heading."""
        s, spec, batch = self.s, self.spec, self.block.batch
        k = self.parts.reduction
        instruction = f"m64n{self.block.columns}k{STEP_BYTES * (1 + k.sparse) // k.itemsize}"
        sizes = f"{spec.products} times " if spec.products > 1 else ""
        sizes += f"{batch} x " if batch > 1 else ""
        adds_up = adds_up_stages(spec, s) and not s.scales
        split = self.types[0] == BF16X6
        cut = "truncate sums" if split else "keep 14 bits of sums of fp8 products"
        multiplied = f"float, each {PRODUCTS} of {PART}" if split else self.types[0]
        optional = (
            (k.sparse, f"{spec.a.operand.name} has two of every four terms: the others are not multiplied"),
            (s.computes, f"the consumers compute {spec.a.operand.name} in registers"),
            (adds_up, f"tensor cores {cut}: those of a stage are added up in float32"),
            (s.scales, "tensor cores multiply codes: the sums of a stage, times the factors, are added up in float32"),
            (s.pingpong, "ping-pong consumers: each computes every second tile of the block"),
            (s.doubled, "each consumer multiplies 128 rows"),
            (s.split_k > 1, f"the {s.split_k} blocks of a cluster share the reduction of a tile"),
        )
        return [
            f"{sizes}{self.parts.rows} x {self.parts.cols} sums of {prod(spec.k)} products of {multiplied}",
            f"tile {s.tile_m} x {s.tile_n} x {k.row // k.itemsize} a block, {s.stages} stages "
            f"filled by {self._bringers()}, "
            f"{s.groups} consumer warpgroup{'s' if s.groups > 1 else ''} ({instruction})",
            *(text for holds, text in optional if holds),
        ]

    def _bringers(self) -> str:
        """Returns what brings the tiles, in words."""
        if not self.s.producer_warpgroups:
            return "cp.async and TMA" if self.s.gather else "TMA"
        if self.s.scales:
            return "TMA"
        threads = f"{self.s.producer_warpgroups * GROUP} threads"
        return f"{threads} and TMA" if self.a.bytes + self.b.bytes else threads

    def _parameters(self) -> list[Parameter]:
        """Returns the kernel's parameters: their declarations and arguments."""
        layout, pointers, results = self.layout, self.epilogue.pointers, self.results
        number = count(len(self.spec.arguments))
        first = len(self.spec.arguments) - sum(len(total.operands) for total in self.spec.totals)
        totals: list[Parameter] = [(text, first + n) for n, text in enumerate(self.totals.parameters())]
        loads: list[Parameter] = [
            (parameter(op, p), next(number)) for op, p in zip(layout.program.loads, pointers.loads)
        ]
        for n, name in results.load_maps.items():
            loads[n] = GRID_CONSTANT + name, layout.operand_maps[n][1]
        named = zip(layout.stores, pointers.stores)
        stores: list[Parameter] = [(parameter(op, name, written=True), next(number)) for op, name in named]
        if layout.maps is not None:
            stores = [(GRID_CONSTANT + name, made) for name, made in zip(results.store_maps, layout.maps)]
        partials = [(declared, next(number)) for declared in self.partials.parameters()]
        return [*self.a.parameters, *self.b.parameters, *totals, *loads, *stores, *partials]

    # ---- shared memory and barriers

    def _share(self) -> None:
        """Declares the block's buffers, by the names that their writers use."""
        called = {f"out{n}": name for n, name in enumerate(self.results.staged)}
        called |= {f"left{n}": name for n, name in enumerate(self.partials.left)}
        tensors = {"a": self.prologues[0].name, "b": ", ".join(self.prologues[1].pointers)}
        if isinstance(self.a, OperandAWriter):
            called |= {f"in{n}": name for n, name in self.a.members.items()}
            tensors |= {f"in{n}": self.prologues[0].pointers[n] for n in self.a.members}
        named = ((x, called.get(x.name, x.name), x.note.format(**tensors)) for x in self.layout.arrays)
        self.w.share([*(x._replace(name=name, note=note) for x, name, note in named), *self.layout.barriers])
        first = f"int(threadIdx.x / {GROUP}) - {self.s.producers}"
        self.w.line(f"const int group = {first};  // a warpgroup: consumers count from 0")

    def _barriers(self) -> None:
        """Writes the initialisation of all barriers, while the tensor maps are fetched."""
        w = self.w
        with w.block("if (threadIdx.x == 0)"):
            for described in (p.removeprefix(GRID_CONSTANT) for p in w.parameters if p.startswith(GRID_CONSTANT)):
                w.line(f"tma_prefetch({described});")
            with w.block(f"for (int i = 0; i < {self.s.stages}; ++i)"):
                self.block.ring.init()
            for signals in w.trace.pipelines.values():
                if isinstance(signals, Signals):
                    signals.init()
            w.line("barrier_fence_init();")
        w.line("__syncthreads();")
        w.line()
