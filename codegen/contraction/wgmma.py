"""The contraction family on Hopper: warpgroup matrix products (wgmma) on tiles that TMA brings to shared memory.

A block has one producer, a single thread that fills a ring of stages with tiles of both operands, and consumers, each a
warpgroup that multiplies 64 rows of the tile.  Blocks are persistent: while the consumers run the program (the
epilogue) on their sums the producer fills the ring for the next tile, and the results leave through shared memory by
asynchronous copies.  With split-K, the blocks of a cluster share one tile, each having part of the reduction, and add
up their sums through distributed shared memory in a fixed order.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from codegen.contraction.wgmma_computed import GRID_CONSTANT, OperandAWriter
from codegen.contraction.wgmma_layout import (
    GROUP,
    GROUP_ROWS,
    TAIL,
    Layout,
    WgmmaSchedule,
    brought,
    panel_size,
    ring_bytes,
    round_up,
    row_bytes,
)
from codegen.contraction.wgmma_partials import WgmmaPartials
from codegen.contraction.wgmma_producer import Producer
from codegen.contraction.wgmma_results import ContractionResults
from codegen.contraction.wgmma_schedule import adds_up_stages, element_bytes, operand_types
from codegen.epilogue import Epilogue
from codegen.iteration import extent, linear, signed_index_type
from codegen.kernel import Kernel, parameter, shared_memory
from codegen.operands import ROW_BYTES, ComputedOperand, Gathered, MappedOperand
from codegen.prologue import Prologue
from codegen.spec import ContractionSpec, KernelSource, TensorMap
from codegen.tile_loader import TileLoader
from codegen.tile_path import TilePath


def render(spec: ContractionSpec, schedule: WgmmaSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C.  Raises Declined if the spec cannot have this form."""
    return _Renderer(spec, schedule).render()


class _Renderer(Producer, ContractionResults):
    def __init__(self, spec: ContractionSpec, schedule: WgmmaSchedule) -> None:
        self.spec, self.s = spec, schedule
        self.parts = schedule.operand_tiles(spec)
        self.types = operand_types(spec, bool(schedule.producer_warpgroups) or schedule.computes)
        #: whether the sums of each stage are added up in float32
        self.adds_up = adds_up_stages(spec, self.types)
        self.layout = Layout(spec, self.parts, schedule)
        self.w = Kernel(spec.name)
        self.names = self.w.names
        self.itemsize = element_bytes(self.types)
        self.t = self._index_type()
        a, b = (
            Prologue(
                self.w,
                side.gather if isinstance(side, TilePath | ComputedOperand) else gather,
                self.names,
                p,
                others,
                pairs=isinstance(side, ComputedOperand) and side.pairs,
            )
            for p, side, gather, others in (
                ("a", self.parts.a, spec.a, ()),
                ("b", self.parts.b, spec.b, spec.others),
            )
        )
        self.a, self.seconds = a.name, b.pointers
        #: columns that a wgmma multiplies: those of all operands B, one after another
        self.columns = schedule.tile_n * spec.products
        layout = self.layout
        self.epilogue = Epilogue(self.w, layout.program, self.names, layout.space, spec.accumulate, spec.result)
        self.tiles_m = -(-self.parts.rows // schedule.tile_m)
        self.tiles_n = -(-self.parts.cols // schedule.tile_n)
        self.batch = prod(self.parts.batch)
        self.work = self.batch * self.tiles_m * self.tiles_n
        self.partials = WgmmaPartials(self.w, spec, schedule, self.parts, self.names, self.t)
        self.computed = (
            OperandAWriter(self.w, self.parts.a, a, self.names, schedule, self.parts, self.t)
            if isinstance(self.parts.a, ComputedOperand)
            else None
        )
        self.brought = self.computed.brought if self.computed is not None else []
        self.loaders = (
            self._loader(self.parts.a, "a", a, schedule.tile_m, self.parts.rows),
            self._loader(self.parts.b, "b", b, schedule.tile_n, self.parts.cols),
        )

    def _loader(
        self,
        side: MappedOperand | Gathered | TilePath | ComputedOperand,
        label: str,
        prologue: Prologue,
        size: int,
        total: int,
    ) -> TileLoader | None:
        """Returns the loader that fills the tiles of an operand; None if they come otherwise."""
        if not isinstance(side, TilePath):
            return None
        inner, threads = ROW_BYTES // self.itemsize, self.s.producer_warpgroups * GROUP
        depth = prod(self.spec.k)
        t = "int32" if side.reach < 2**30 else "int64"
        return TileLoader(self.w, t, side, label, prologue, size, size, total, depth, inner, threads, f"{label}_tile")

    def _index_type(self) -> str:
        layout = self.layout
        space = layout.space
        reach = [prod(space)] + [extent(space, op.strides) for op in layout.program.operands]
        return signed_index_type(*reach)

    # ---- the whole

    def render(self) -> KernelSource:
        w, s, spec, layout = self.w, self.s, self.spec, self.layout
        program, k = layout.program, self.parts.reduction
        sizes = f"{self.batch} x " if self.batch > 1 else ""
        instruction = f"m64n{self.columns}k{32 // self.itemsize}"
        sizes = f"{spec.products} times {sizes}" if spec.products > 1 else sizes
        details = [
            f"{sizes}{self.parts.rows} x {self.parts.cols} sums of {prod(spec.k)} products of {self.types[0]}",
            f"tile {s.tile_m} x {s.tile_n} x {ROW_BYTES // self.itemsize} a block, {s.stages} stages filled by "
            f"{self._bringers()}, "
            f"{s.groups} consumer warpgroup{'s' if s.groups > 1 else ''} ({instruction})",
        ]
        if s.computes:
            details.append(f"the consumers compute {spec.a.operand.name} in registers")
        if self.adds_up:
            details.append(
                "tensor cores keep 14 bits of sums of fp8 products: those of a stage are added up in float32"
            )
        if s.pingpong:
            details.append("ping-pong consumers: each computes every second tile of the block")
        if s.split_k > 1:
            details.append(f"the {s.split_k} blocks of a cluster share the reduction of a tile")
        w.macros[f"FUSEGRAPH_WGMMA({self.columns})"] = None
        names, maps = self.epilogue.pointers, layout.maps
        store_maps = [self.names.unique(op.name, "_map") for op in layout.stores]
        a_map, *b_maps = (self.names.unique(name, "_map") for name in (self.a, *self.seconds))
        parameters = []
        for side, loader, maps_ in ((self.parts.a, self.loaders[0], [a_map]), (self.parts.b, self.loaders[1], b_maps)):
            if loader is not None:
                parameters += loader.prologue.parameters()
            elif isinstance(side, ComputedOperand):
                assert self.computed is not None
                parameters += self.computed.parameters()
            elif isinstance(side, Gathered):
                parameters.append(parameter(spec.a.operand, self.a))
            else:
                parameters += [GRID_CONSTANT + name for name in maps_]
        self.operand_maps = {n: self.names.unique(program.loads[n].name, "_map") for n in layout.operand_maps}
        loads = [parameter(op, name) for op, name in zip(program.loads, names.loads)]
        for n, name in self.operand_maps.items():
            loads[n] = GRID_CONSTANT + name
        parameters += loads
        if maps is None:
            parameters += [parameter(op, name, written=True) for op, name in zip(layout.stores, names.stores)]
        else:
            parameters += [GRID_CONSTANT + name for name in store_maps]
        parameters += self.partials.parameters()
        self.a_map, self.b_maps, self.store_maps = a_map, b_maps, store_maps
        w.parameters += parameters
        self._shared()
        self._barriers()
        w.open("if (group < 0)")
        if isinstance(self.parts.a, Gathered):
            self.gathering_producer(self.parts.a, k.stages)
        elif s.producer_warpgroups:
            self.filling_producer(k.stages)
        else:
            self.copying_producer(k.stages)
        if s.split_k > 1:
            w.line("cluster_sync();")
        w.otherwise()
        self._consumers(k.stages)
        w.close()
        if s.split_k > 1:
            w.line("cluster_sync();  // a block's shared memory is there until all have read it")
        numbers = iter(range(len(spec.arguments)))
        arguments: list[int | TensorMap] = []
        for side, operands, size in (
            (self.parts.a, spec.a.operands, s.tile_m),
            (self.parts.b, spec.arguments[len(spec.a.operands) :], s.tile_n),
        ):
            if isinstance(side, ComputedOperand):
                assert self.computed is not None
                arguments += [argument for argument, _ in zip(self.computed.arguments(), numbers)]
                continue
            for _, number in zip(operands, numbers):
                arguments.append(
                    replace(self._boxed(side, size), argument=number) if isinstance(side, MappedOperand) else number
                )
        first, stop = len(arguments), len(arguments) + len(program.loads)
        read = [layout.operand_maps[n - first][1] if n - first in self.operand_maps else n for n in range(first, stop)]
        outputs = range(stop, stop + len(layout.stores))
        written: tuple[int | TensorMap, ...] = maps or tuple(outputs)
        written += tuple(range(outputs.stop, outputs.stop + len(spec.partials)))
        blocks = self.work * s.split_k if s.split_k > 1 else min(self.work, s.blocks)
        return w.source(
            program,
            details,
            blocks=blocks,
            threads=s.threads,
            barriers=True,
            blocks_per_sm=1,
            shared_bytes=self._shared_bytes(),
            arguments=(*arguments, *read, *written),
            cluster=s.split_k,
        )

    def _bringers(self) -> str:
        """Returns what brings the tiles, in words."""
        if not self.s.producer_warpgroups:
            return "cp.async and TMA" if self.s.gather else "TMA"
        threads = f"{self.s.producer_warpgroups * GROUP} threads"
        copied = any(isinstance(side, MappedOperand) for side in (self.parts.a, self.parts.b))
        return f"{threads} and TMA" if copied else threads

    def _boxed(self, side: MappedOperand, extent_: int) -> TensorMap:
        """Returns the tensor map of an operand, with the box that one load brings."""
        k = self.parts.reduction
        extent_ = brought(side, extent_, self.parts.rows if side is self.parts.a else self.parts.cols)
        if side.im2col:
            box: tuple[int, ...] = (k.panel, extent_) if side.along_k else (ROW_BYTES // self.itemsize, k.panel)
        else:
            across = panel_size(extent_, self.itemsize)
            first, second = (k.panel, min(extent_, 256)) if side.along_k else (across, k.panel)
            box = tuple(
                first if n == 0 else second if "{o}" in term or "{c}" in term else 1
                for n, term in enumerate(side.terms)
            )
        width = box[0] * self.itemsize
        # Tensor cores truncate floats to tf32; that TMA rounds them costs nothing.
        element = "tf32" if self.types[0] == "tf32" else side.map.element
        return replace(side.map, element=element, box=box, swizzle=width if width >= 32 else 0)

    def _ring_bytes(self) -> int:
        return self.s.stages * ring_bytes(self.parts, self.s, self.spec.products)

    def _shared_bytes(self) -> int:
        ring = max(self._ring_bytes(), self.layout.sums_bytes)
        barriers = 16 * (self.s.stages + (3 if self.layout.operand_maps else 1))
        tail = barriers + self.layout.exchange_bytes + self.s.stages * row_bytes(self.parts)
        return ring + self.layout.staging_bytes + round_up(tail, TAIL)

    # ---- shared memory and barriers

    def _tile_type(self, side: MappedOperand | Gathered | TilePath, size: int) -> str:
        """Returns the C dimensions of one stage of an operand's tile."""
        k = self.parts.reduction
        if side.along_k:
            lead = f"[{k.per_stage}]" if k.per_stage > 1 else ""
            return f"{lead}[{size}][{k.panel}]"
        across = panel_size(size, self.itemsize)
        return f"[{size // across}][{k.panel}][{across}]"

    def _shared(self) -> None:
        w, s, layout = self.w, self.s, self.layout
        with shared_memory(w):
            for name, side, gather, size in (
                ("a", self.parts.a, self.spec.a, s.tile_m),
                ("b", self.parts.b, self.spec.b, self.columns),
            ):
                if isinstance(side, ComputedOperand):
                    assert self.computed is not None
                    self.computed.members(rows=False)
                    continue
                tile = self._tile_type(side, size)
                ctype = side.element if isinstance(side, TilePath) else gather.operand.dtype.ctype
                text = f"alignas(1024) {ctype} {name}[{s.stages}]{tile};"
                note = f"  // tiles of {self.a}: stages first, rows swizzled" if name == "a" else ""
                if name == "b" and self.spec.products > 1:
                    note = f"  // {s.tile_n} columns of each of {', '.join(self.seconds)}"
                w.line(text + note)
            if layout.maps is not None or layout.carried:
                self.staged = [self.names.unique(op.name, "_out") for op in layout.stores]
                for name, op in zip(self.staged, layout.stores):
                    panel = (layout.chunk, GROUP_ROWS) if layout.turned else (GROUP_ROWS, layout.chunk)
                    buffers = "" if layout.by_warps else f"[{layout.buffers}]"
                    dims = f"[{s.groups}]{buffers}[{panel[0]}][{panel[1]}]"
                    w.line(f"alignas(1024) {op.dtype.ctype} {name}{dims};  // results on their way out")
            if self.computed is not None:
                self.computed.members(rows=True)
            self.partials.members(layout.chunk)
            turn = ", turn[2]" if s.pingpong else ""
            turn += f", operands[{s.groups}]" if layout.operand_maps else ""
            w.line(f"Barrier full[{s.stages}], empty[{s.stages}]{turn};")
        w.line(f"const int group = int(threadIdx.x / {GROUP}) - {s.producers};  // a warpgroup: consumers count from 0")

    def _barriers(self) -> None:
        w, s = self.w, self.s
        with w.block("if (threadIdx.x == 0)"):
            for described in (p.removeprefix(GRID_CONSTANT) for p in w.parameters if p.startswith(GRID_CONSTANT)):
                w.line(f"tma_prefetch({described});")
            with w.block(f"for (int i = 0; i < {s.stages}; ++i)"):
                copied = int(
                    any(isinstance(side, MappedOperand | ComputedOperand) for side in (self.parts.a, self.parts.b))
                )
                arrivals = s.producers * GROUP if s.gather else s.producer_warpgroups * GROUP // 32
                w.line(f"barrier_init(shared.full[i], {copied + arrivals});")
                w.line(f"barrier_init(shared.empty[i], {1 if s.pingpong else s.groups});")
            if s.pingpong:
                w.line("for (int i = 0; i < 2; ++i) barrier_init(shared.turn[i], 1);")
            if self.operand_maps:
                w.line(f"for (int i = 0; i < {s.groups}; ++i) barrier_init(shared.operands[i], 1);")
            w.line("barrier_fence_init();")
        w.line("__syncthreads();")
        w.line()

    # ---- the consumers

    def _descriptor(self, side: MappedOperand | Gathered | TilePath, name: str, size: int, offset: str) -> str:
        """Returns the matrix descriptor of the part of a tile that k-step kk of a wgmma multiplies."""
        k = self.parts.reduction
        at = f"shared.{name}[stage.index]"
        step = 32 // self.itemsize
        if not side.along_k:
            part, width = offset or "0", panel_size(size, self.itemsize) * self.itemsize
            return f"matrix_descriptor<{width}>({at}[{part}][kk * {step}], {k.panel * width}, {8 * width})"
        width = k.panel * self.itemsize
        row = f"[{offset}]" if offset else "[0]"
        if k.per_stage == 1:
            return f"matrix_descriptor<128>(&{at}{row}[kk * {step}], 16, 1024)"
        if width == 16:
            return f"matrix_descriptor<0>({at}[kk * 2]{row}, {size * 16}, 128)"
        steps = width // 32
        part, inside = (f"[kk / {steps}]", f"[kk % {steps} * {step}]") if steps > 1 else ("[kk]", "[0]")
        return f"matrix_descriptor<{width}>(&{at}{part}{row}{inside}, 16, {width * 8})"

    def _consumers(self, stages: int) -> None:
        w, s = self.w, self.s
        w.line(f"registers_increase<{s.registers[1]}>();")
        w.line(f"const int t = threadIdx.x % {GROUP}, lane = t % 32;")
        first_row = linear([("0" if s.pingpong else self.rows, 1), ("t / 32 * 16", 1), ("lane / 4", 1)])
        place = f"of {GROUP_ROWS} rows" if s.pingpong else "in the tile"
        w.line(f"const int row = {first_row};  // of a thread's first result {place}")
        w.line(f"Ring<{s.stages}> stage;")
        self.epilogue.scalars()
        if self.computed is not None:
            self.computed.begin()
        self.begin_buffers()
        first, last = self.stage_range(stages)
        if s.pingpong:
            w.line("uint32 turn = 1 - group;  // consumer 0 begins: the phase before the first counts as completed")
        self.tiles(consumer=True)
        phased = bool(self.parts.reduction.skips)
        if phased:
            self._batch_coordinates()
            first, last = self.phase_range()
        self.bring_operands()
        pieces = f"[{s.pieces}]" if s.pieces > 1 else ""
        count = self.columns // 2
        if self.adds_up:
            w.line(f"float sum[{count}] = {{}}, part[{count}];  // of a tile, and of one stage of it")
        else:
            w.line(f"{self.register_type} sum{pieces}[{count}]{' = {}' if phased else ''};")
            w.line("int previous = 0;")
        if self.computed is not None:
            self.computed.begin_tile()
        if s.pingpong:
            w.line("barrier_wait(shared.turn[group], turn);")
            w.line("turn ^= 1;")
        if self.computed is None and (s.groups > 1 or self.columns > GROUP_ROWS):
            # Unrolling it makes compilation a fifth longer; only products of few columns are too short to hide the
            # loop.
            w.line("#pragma unroll 1")
        with w.block(f"for (int k = {first}; k < {last}; ++k, ++stage)"):
            w.line("barrier_wait(shared.full[stage.index], stage.parity);")
            if self.computed is not None:
                self._computed_stage(self.computed, first)
            else:
                self._stage(first)
        self._end_consumers(phased)

    def _stage(self, first: str) -> None:
        """Writes the products of a stage."""
        w, s, side = self.w, self.s, self.parts.a
        assert not isinstance(side, ComputedOperand)
        if s.gather:
            w.line("fence_async_shared();  // the producer's copies are ordinary writes")
        w.line("wgmma_fence();")
        with w.unrolled("for (int kk = 0; kk < 4; ++kk)"):
            across = not side.along_k
            transposed = ["1" if across else "0", "0" if self.parts.b.along_k else "1"]
            flags = f", {', '.join(transposed)}" if "1" in transposed else ""
            a_part = self.rows.removesuffix(f" * {GROUP_ROWS}") if across else self.rows.removeprefix("0")
            with self.pieces():
                w.line(f"wgmma<{self.types[0]}, {self.types[1]}, {self.columns}{flags}>(")
                w.line(f"    {'part' if self.adds_up else self.sum}, {self._descriptor(side, 'a', s.tile_m, a_part)},")
                begun = "kk > 0" if self.adds_up else f"k > {first} || kk > 0"
                w.line(f"    {self._descriptor(self.parts.b, 'b', self.columns, '')}, {begun});")
        w.line("wgmma_commit();")
        if self.adds_up:
            self._add_stage()
        else:
            self._release_stage(first)

    def _add_stage(self) -> None:
        """Writes the addition of a stage's sums to the tile's, while the other consumers multiply."""
        w = self.w
        w.line("wgmma_wait<0>();")
        w.line("wgmma_hold(part);")
        w.line("if (t == 0) barrier_arrive(shared.empty[stage.index]);")
        w.unrolled_line(f"for (int i = 0; i < {self.columns // 2}; ++i) sum[i] += part[i];")

    def _release_stage(self, first: str) -> None:
        """Writes how the producer may fill a stage again, while the next one is multiplied."""
        w = self.w
        with w.block(f"if (k > {first})"):
            w.line("wgmma_wait<1>();  // the products of the previous stage are done")
            w.line("if (t == 0) barrier_arrive(shared.empty[previous]);")
        w.line("previous = stage.index;")

    def _computed_stage(self, operand_a: OperandAWriter, first: str) -> None:
        """Writes the products of a stage whose operand A is computed: each fragment while the one before is
        multiplied.
        """
        w = self.w
        operand_a.begin_stage()
        with w.unrolled("for (int kk = 0; kk < 4; ++kk)"):
            operand_a.fragment()
            w.line("wgmma_fence();")
            flags = "" if self.parts.b.along_k else ", 1"
            w.line(f"wgmma<{self.types[0]}, {self.types[1]}, {self.columns}{flags}>(")
            w.line(f"    sum, part[kk % 2], {self._descriptor(self.parts.b, 'b', self.columns, '')},")
            w.line(f"    k > {first} || kk > 0);")
            w.line("wgmma_commit();")
            w.line("wgmma_wait<1>();  // the product before is done: its fragment, and at first its stage, are free")
            w.line(f"if (kk == 0 && k > {first} && t == 0) barrier_arrive(shared.empty[previous]);")
        w.line("previous = stage.index;")

    def _end_consumers(self, phased: bool) -> None:
        """Writes the wait for the sums of a tile, and the results made from them."""
        w, s = self.w, self.s
        if s.pingpong:
            w.line("if (t == 0) barrier_arrive(shared.turn[1 - group]);  // the stages that follow are the other's")
        if not self.adds_up:
            w.line("wgmma_wait<0>();")
        if s.split_k == 1 and not self.adds_up:
            some = "last > 0 && " if phased else ""
            w.line(f"if ({some}t == 0) barrier_arrive(shared.empty[previous]);")
        w.line()
        if s.split_k > 1:
            self.publish()
        with w.block(f"if (rank < {s.tile_n // s.part})", when=s.part * s.split_k > s.tile_n):
            if s.split_k > 1:
                self.add_up()
            if self.layout.maps is not None or self.layout.carried:
                self.through_shared_memory()
            else:
                self.direct()
        self.end_tiles()
        if self.layout.maps is not None:
            w.line("if (t == 0) tma_wait_read<0>();  // shared memory must outlive the copies out of it")
