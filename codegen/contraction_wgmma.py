"""The contraction family on Hopper: warpgroup matrix products (wgmma) on tiles that TMA brings to shared memory.

A block has one producer, a single thread that fills a ring of stages with tiles of both factors, and consumers, each a
warpgroup that multiplies 64 rows of the tile.  Blocks are persistent: while the consumers run the program (the
epilogue) on their sums the producer fills the ring for the next tile, and the results leave through shared memory by
asynchronous copies.  With a split, the blocks of a cluster share one tile, each having part of the reduction, and add
up their sums through distributed shared memory in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from codegen.arch import Arch
from codegen.epilogue import Epilogue, Run
from codegen.expr import Operand, Program, Store
from codegen.iteration import collapse, coordinate, extent, index_type, linear
from codegen.kernel import headers, heading, parameter, signature
from codegen.naming import Names, Writer
from codegen.spec import ContractionSpec, KernelSource, TensorMap
from codegen.tiles import ROW_BYTES, Factors, Gathered, Side, Unsupported, factors, gathered

GROUP = 128  # threads of a warpgroup
GROUP_ROWS = 64  # rows of a wgmma
CHUNK_BYTES = 128  # a row of the staging buffers
BAND = 8  # rows of tiles that share the L2 cache: more of them push each other out
STAGING = 2  # buffers of each consumer and output
#: Registers of a producer's and a consumer's thread, by the number of consumers: together no more than 64 Ki a block.
REGISTERS = {1: (40, 216), 2: (40, 232), 3: (32, 160)}
GATHER_REGISTERS = {1: (96, 232), 2: (80, 176), 3: (72, 112)}
PIECES = ROW_BYTES // 16  # 16-byte pieces of a row of a tile


@dataclass(frozen=True)
class WgmmaSchedule:
    """A tile of groups * 64 rows and ``cols`` columns a block.

    groups  consumer warpgroups of a block, 1 to 3; cols: a multiple of 16 up to 256.
    gather  whether the producer's threads gather the first factor rather than the copy engine.
    stages  of the ring, each 128 bytes along the reduction.
    split   blocks (a cluster) that share the reduction of a tile.
    band    rows of tiles that blocks at work at the same time go through together.
    blocks  of the grid: as many as the device has multiprocessors.
    """

    groups: int
    cols: int
    stages: int
    split: int
    band: int
    blocks: int
    gather: bool = False

    def factors(self, spec: ContractionSpec) -> Factors:
        """How the tiles of a spec come to shared memory."""
        return gathered(spec) if self.gather else factors(spec)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producer and of a consumer."""
        return (GATHER_REGISTERS if self.gather else REGISTERS)[self.groups]

    @property
    def rows(self) -> int:
        return self.groups * GROUP_ROWS

    @property
    def producers(self) -> int:
        """Warpgroups of the producer: gathering takes more threads than telling the copy engine what to do."""
        return 2 if self.gather else 1

    @property
    def threads(self) -> int:
        return (self.producers + self.groups) * GROUP

    @property
    def part(self) -> int:
        """Columns of a tile that a block writes, with a split a multiple of 16; the last blocks may have none."""
        if self.split == 1:
            return self.cols
        return next(p for p in range(16, self.cols + 1, 16) if p * self.split >= self.cols and self.cols % p == 0)


def operand_types(spec: ContractionSpec) -> tuple[str, str]:
    """How wgmma sees the factors' elements.  Raises Unsupported for those it cannot multiply."""
    a, b = (gather.operand.dtype.name for gather in (spec.a, spec.b))
    if a == b == "float32":
        if not spec.tf32:
            raise Unsupported("float32 products are exact unless the graph asks for tf32")
        return "tf32", "tf32"
    if a == b and a in ("bfloat16", "float16"):
        return a, b
    if {a, b} <= {"float8_e4m3", "float8_e5m2"} or {a, b} <= {"int8", "uint8"}:
        return a, b
    raise Unsupported(f"tensor cores do not multiply {a} with {b}")


def schedules(spec: ContractionSpec, arch: Arch) -> tuple[WgmmaSchedule, ...]:
    """Schedules worth trying, the one with the least estimated time first.  Raises Unsupported with a reason."""
    if not arch.has_wgmma:
        raise Unsupported(f"{arch} has no warpgroup matrix products")
    operand_types(spec)
    if spec.accumulate not in ("float", "uint32"):
        raise Unsupported(f"tensor cores do not add up in {spec.accumulate}")
    if not prod(spec.inner) or not prod(spec.rows) or not prod(spec.cols) or not prod(spec.batch):
        raise Unsupported("there is nothing to multiply")
    ranked: list[tuple[float, WgmmaSchedule]] = []
    reason = Unsupported("no tile fits the shared memory of a block")
    for gather in (False, True):
        try:
            parts = (gathered if gather else factors)(spec)
        except Unsupported as refusal:
            reason = reason if gather else refusal
            continue
        ranked += [(_cost(spec, parts, s), s) for s in _candidates(spec, parts, arch, gather)]
    if not ranked:
        raise reason
    return tuple(s for _, s in sorted(ranked, key=lambda entry: entry[0]))


def _candidates(spec: ContractionSpec, parts: Factors, arch: Arch, gather: bool) -> Iterator[WgmmaSchedule]:
    sms = arch.sm_count_hint
    unit = 16 if parts.b.along_k else 64
    for groups in (2, 3, 1):
        for cols in (256, 192, 128, 96, 64, 32, 16):
            if cols % unit or (cols > unit and cols >= 2 * _round_up(parts.cols, unit)):
                continue
            if cols > _most_cols(groups, gather):
                continue
            tiles = prod(parts.batch) * -(-parts.rows // (groups * GROUP_ROWS)) * -(-parts.cols // cols)
            for split in range(1, 9):
                if split > 1 and (
                    gather or tiles * split > 2 * sms or parts.reduction.stages < 4 * split or cols < 16 * split
                ):
                    continue
                s = WgmmaSchedule(groups, cols, 2, split, BAND, sms, gather)
                stages = _most_stages(spec, parts, s, arch)
                if stages >= 2:
                    yield replace(s, stages=stages)


def _most_cols(groups: int, gather: bool) -> int:
    """Columns whose sums fit the registers that a thread of such a block starts with."""
    if gather:
        return {1: 256, 2: 192, 3: 128}[groups]
    return 192 if groups == 3 else 256


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _most_stages(spec: ContractionSpec, parts: Factors, s: WgmmaSchedule, arch: Arch) -> int:
    stage = ROW_BYTES * (s.rows + s.cols)
    layout = _Layout(spec, parts, s)
    room = arch.shared_bytes_per_block - layout.staging_bytes - 1024
    tiles = prod(parts.batch) * -(-parts.rows // s.rows) * -(-parts.cols // s.cols)
    useful = parts.reduction.stages * -(-tiles // s.blocks)  # the ring is filled for the next tile meanwhile
    stages = min(8, max(room // (stage + 16), 0), max(2, useful))
    return stages if max(stages * stage, layout.sums_bytes) <= room else 0


#: Multiply-adds a multiprocessor does in a cycle, by bytes of an element, and the share of them that remains.
RATE, SHARE = {1: 4096, 2: 2048, 4: 1024}, 0.9
#: Bytes a multiprocessor gets from the L2 cache in a cycle, and cycles until the first arrive.
L2_RATE, LATENCY = 70.0, 1500.0
#: Cycles of a warp's copy of 32 pieces, and of the copy engine's of a row of a panel.
GATHER, PANEL_ROW = 16.0, 2.0
#: Cycles of the epilogue for each 8 columns of a consumer, those that a cluster needs to add up, and the bytes of sums
#: that it exchanges in a cycle.
EPILOGUE, EXCHANGE, EXCHANGE_RATE = 60.0, 6000.0, 30.0
#: Clusters of a size that 132 multiprocessors hold at a time: those of a cluster are neighbours.
CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}


def _cost(spec: ContractionSpec, parts: Factors, s: WgmmaSchedule) -> float:
    """Estimated cycles: rounds of tiles, each bound by the tensor cores or by what brings its factors; the epilogue.

    The constants are fits to measurements on an H200.
    """
    itemsize = spec.a.operand.dtype.itemsize
    tiles = prod(parts.batch) * -(-parts.rows // s.rows) * -(-parts.cols // s.cols)
    depth = -(-parts.reduction.stages // s.split)
    # A wgmma spends as long as 16 columns take to get at the rows, and more if there are few columns to hide that.
    products = s.rows * (s.cols + 16 + max(0, 128 - s.cols) / 4) * (ROW_BYTES // itemsize) / RATE[itemsize] / SHARE
    loads = ROW_BYTES * (s.rows + s.cols) / L2_RATE
    if s.gather:
        loads += s.rows * PIECES / 32 * GATHER
    else:  # the copy engine takes as long for a short row as for one of 128 bytes
        loads = max(loads, (s.rows + s.cols) * parts.reduction.per_stage * PANEL_ROW)
    epilogue = EPILOGUE * s.part / 8 * max(1, len(spec.program.operands)) + 800
    rounds = -(-tiles // max(1, CLUSTERS[s.split] * s.blocks // 132))
    exchange = EXCHANGE + s.rows * s.cols * 4 / EXCHANGE_RATE if s.split > 1 else 0.0
    return LATENCY + rounds * (depth * (max(products, loads) + 0.05 * loads) + epilogue + exchange)


class _Layout:
    """The program over (batch, rows, cols) as the tiles see them, and how its outputs leave the block."""

    def __init__(self, spec: ContractionSpec, parts: Factors, s: WgmmaSchedule) -> None:
        self.spec, self.parts, self.s = spec, parts, s
        lead = len(spec.batch)
        program = spec.program
        # With rows split into batches (`factors`), the program's leading row dimensions are batches too.
        extra = 0
        while prod(spec.batch) * prod(spec.rows[:extra]) != prod(parts.batch):
            extra += 1
        batch, rows = (*spec.batch, *spec.rows[:extra]), spec.rows[extra:]
        lead += extra
        every = [op.strides for op in program.operands] + list(program.indices)
        self.batch, over_batch = collapse(batch, [x[:lead] for x in every], range(lead))
        self.rows, over_rows = collapse(rows, [x[lead : lead + len(rows)] for x in every], range(len(rows)))
        self.cols, over_cols = collapse(spec.cols, [x[lead + len(rows) :] for x in every], range(len(spec.cols)))
        new = [a + b + c for a, b, c in zip(over_batch, over_rows, over_cols)]
        n, m = len(program.loads), len(program.stores)
        self.program: Program = replace(
            program,
            loads=tuple(replace(op, strides=x) for op, x in zip(program.loads, new)),
            stores=tuple(Store(replace(st.operand, strides=x), st.value) for st, x in zip(program.stores, new[n:])),
            indices=tuple(new[n + m :]),
        )
        self.stores = tuple(st.operand for st in self.program.stores)
        #: whether results are contiguous along rows: they are turned on their way through shared memory
        self.turned = all(
            op.strides[-2] == 1 and (op.strides[-1] != 1 or parts.rows > 1) and op.dtype.itemsize <= 2
            for op in self.stores
        ) and not all(op.strides[-1] == 1 for op in self.stores)
        self.chunk = CHUNK_BYTES // max(op.dtype.itemsize for op in self.stores)
        while s.part % self.chunk:
            self.chunk //= 2

    @cached_property
    def maps(self) -> tuple[TensorMap, ...] | None:
        """The outputs' tensor maps, None if they are written from registers: one cannot have a map."""
        found = []
        first = 2 + len(self.program.loads)
        for n, op in enumerate(self.stores):
            made = self._map(op, first + n)
            if made is None:
                return None
            found.append(made)
        return tuple(found)

    def _map(self, op: Operand, argument: int) -> TensorMap | None:
        *batch, row, col = op.strides
        itemsize = op.dtype.itemsize
        if len(self.rows) > 1 or len(self.cols) > 1 or len(self.batch) > 3 or self.parts.cols % 2:
            return None
        if op.alignment % 16 or self.chunk * itemsize < 16:
            return None
        sizes, strides = [self.parts.cols, self.parts.rows], [row * itemsize]
        box, contiguous = [self.chunk, GROUP_ROWS], col == 1 or self.parts.cols == 1
        if self.turned:
            sizes, strides = [self.parts.rows, self.parts.cols], [col * itemsize]
            box, contiguous = [GROUP_ROWS, self.chunk], True
        if not contiguous:
            return None
        for size, stride in zip(reversed(self.batch), reversed(batch)):
            if size > 1:
                sizes.append(size)
                strides.append(stride * itemsize)
        strides = [max(16, x) if size == 1 else x for size, x in zip(sizes[1:], strides)]
        if any(x % 16 or not x for x in strides):
            return None
        box += [1 for _ in sizes[2:]]
        width = box[0] * itemsize
        return TensorMap(
            argument,
            op.dtype.ctype,
            tuple(sizes),
            tuple(strides),
            tuple(box),
            (1,) * len(sizes),
            width if width >= 32 else 0,
        )

    @property
    def staging_bytes(self) -> int:
        if self.maps is None:
            return 0
        each = GROUP_ROWS * self.chunk * sum(op.dtype.itemsize for op in self.stores)
        return self.s.groups * STAGING * _round_up(each, 1024)

    @property
    def sums_bytes(self) -> int:
        """Shared memory in which the blocks of a cluster exchange sums; it takes the place of the ring."""
        return self.s.rows * self.s.cols * 4 if self.s.split > 1 else 0


def render(spec: ContractionSpec, schedule: WgmmaSchedule) -> KernelSource:
    """The kernel of a spec as CUDA C.  Raises Unsupported if the spec cannot have this form."""
    return _Renderer(spec, schedule).render()


#: What the kernel's own variables, and the types it uses, are called.
TAKEN = frozenset(
    """
    Barrier Ring Shared Tile TensorMap at base buffer c channel chunk e empty exchange f first full group i inside item
    j k k0 kk lane last m m0 memory mine n n0 panel piece previous q rank row shared stage sum t tap theirs tile total u
    """.split()  # noqa: SIM905 - a list of quoted words is no easier to read
)


class _Renderer:
    def __init__(self, spec: ContractionSpec, schedule: WgmmaSchedule) -> None:
        self.spec, self.s = spec, schedule
        self.parts = schedule.factors(spec)
        self.types = operand_types(spec)
        self.layout = _Layout(spec, self.parts, schedule)
        rank = range(8)
        taken = [spec.name, *TAKEN, *(f"{x}{d}" for x in "tobmp" for d in rank)]
        self.names, self.w = Names(taken), Writer()
        self.a, self.b = (self.names.unique(g.operand.name) for g in (spec.a, spec.b))
        layout = self.layout
        space = (*layout.batch, *layout.rows, *layout.cols)
        self.epilogue = Epilogue(self.w, layout.program, self.names, space, spec.accumulate, spec.result)
        self.itemsize = spec.a.operand.dtype.itemsize
        self.tiles_m = -(-self.parts.rows // schedule.rows)
        self.tiles_n = -(-self.parts.cols // schedule.cols)
        self.batch = prod(self.parts.batch)
        self.work = self.batch * self.tiles_m * self.tiles_n
        self.t = self._index_type()

    @property
    def register_type(self) -> str:
        """C type of the sums as wgmma has them."""
        return "int32" if self.spec.accumulate == "uint32" else "float"

    def _index_type(self) -> str:
        layout = self.layout
        space = (*layout.batch, *layout.rows, *layout.cols)
        reach = [prod(space)] + [extent(space, op.strides) for op in layout.program.operands]
        return "int32" if index_type(*(2 * r for r in reach)) == "uint32" else "int64"

    # ---- the whole

    def render(self) -> KernelSource:
        w, s, spec, layout = self.w, self.s, self.spec, self.layout
        program = layout.program
        k = self.parts.reduction
        plural = "nodes in one kernel" if len(program.notes) != 1 else "node"
        sizes = f"{self.batch} x " if self.batch > 1 else ""
        instruction = f"m64n{s.cols}k{32 // self.itemsize}"
        details = [
            f"{sizes}{self.parts.rows} x {self.parts.cols} sums of {prod(spec.inner)} products of {self.types[0]}",
            f"tile {s.rows} x {s.cols} x {ROW_BYTES // self.itemsize} a block, {s.stages} stages filled by "
            f"{'cp.async and ' if s.gather else ''}TMA, "
            f"{s.groups} consumer warpgroup{'s' if s.groups > 1 else ''} ({instruction})",
        ]
        if s.split > 1:
            details.append(f"the {s.split} blocks of a cluster share the reduction of a tile")
        more = ["memory.cuh", "shared.cuh", "mbarrier.cuh", "tma.cuh", "warpgroup.cuh", "wgmma.cuh", "pipeline.cuh"]
        if s.split > 1:
            more.append("cluster.cuh")
        if s.gather:
            more.insert(-1, "async_copy.cuh")
        heading(w, f"{spec.name}: {len(program.notes)} {plural}", program, headers(program, *more), details)
        w.line(f"FUSEGRAPH_WGMMA({s.cols})")
        w.line()
        names = self.epilogue.pointers
        maps = layout.maps
        store_maps = [self.names.unique(op.name, "_map") for op in layout.stores]
        a_map, b_map = (self.names.unique(name, "_map") for name in (self.a, self.b))
        grid_constant = "const __grid_constant__ TensorMap "
        first = parameter(spec.a.operand, self.a) if s.gather else grid_constant + a_map
        parameters = [first, grid_constant + b_map]
        parameters += [parameter(op, name) for op, name in zip(program.loads, names.loads)]
        if maps is None:
            parameters += [parameter(op, name, written=True) for op, name in zip(layout.stores, names.stores)]
        else:
            parameters += [grid_constant + name for name in store_maps]
        self.a_map, self.b_map, self.store_maps = a_map, b_map, store_maps
        signature(w, spec.name, s.threads, parameters, 1)
        self._shared()
        self._barriers()
        w.open("if (group < 0)")
        if isinstance(self.parts.a, Gathered):
            self._gathering_producer(self.parts.a, k.stages)
        else:
            self._producer(self.parts.a, k.stages)
        if s.split > 1:
            w.line("cluster_sync();")
        w.close("} else {")
        w.depth += 1
        self._consumers(k.stages)
        w.close()
        if s.split > 1:
            w.line("cluster_sync();  // a block's shared memory is there until all have read it")
        w.close()
        loads = range(2, 2 + len(program.loads))
        written: tuple[int | TensorMap, ...] = maps or tuple(range(loads.stop, loads.stop + len(layout.stores)))
        side = self.side_a
        boxes = (0 if side is None else self._boxed(side, s.rows), self._boxed(self.parts.b, s.cols))
        blocks = self.work * s.split if s.split > 1 else min(self.work, s.blocks)
        return KernelSource(
            spec.name,
            w.text(),
            (blocks, 1, 1),
            (s.threads, 1, 1),
            self._shared_bytes(),
            uses_barriers=True,
            parameters=(*boxes, *loads, *written),
            cluster=(s.split, 1, 1),
        )

    def _boxed(self, side: Side, extent_: int) -> TensorMap:
        """The map of a factor with the box that one load brings."""
        k = self.parts.reduction
        if side.im2col:
            box: tuple[int, ...] = (k.panel, extent_) if side.along_k else (ROW_BYTES // self.itemsize, k.panel)
        else:
            first, second = (k.panel, min(extent_, 256)) if side.along_k else (ROW_BYTES // self.itemsize, k.panel)
            box = tuple(
                first if n == 0 else second if "{o}" in term or "{c}" in term else 1
                for n, term in enumerate(side.terms)
            )
        width = box[0] * self.itemsize
        return replace(side.map, box=box, swizzle=width if width >= 32 else 0)

    def _ring_bytes(self) -> int:
        return self.s.stages * ROW_BYTES * (self.s.rows + self.s.cols)

    def _shared_bytes(self) -> int:
        ring = max(self._ring_bytes(), self.layout.sums_bytes)
        return ring + self.layout.staging_bytes + _round_up(16 * self.s.stages, 1024)

    # ---- shared memory and barriers

    @property
    def side_a(self) -> Side | None:
        """The first factor, None if it is gathered."""
        return self.parts.a if isinstance(self.parts.a, Side) else None

    def _tile_type(self, side: Side | None, size: int) -> str:
        """The dimensions of one stage of a factor's tile."""
        k = self.parts.reduction
        if side is None or side.along_k:
            lead = f"[{k.per_stage}]" if k.per_stage > 1 else ""
            return f"{lead}[{size}][{k.panel}]"
        across = ROW_BYTES // self.itemsize
        return f"[{size // across}][{k.panel}][{across}]"

    def _shared(self) -> None:
        w, s, layout = self.w, self.s, self.layout
        w.open("struct Shared")
        for name, side, gather, size in (
            ("a", self.side_a, self.spec.a, s.rows),
            ("b", self.parts.b, self.spec.b, s.cols),
        ):
            tile = self._tile_type(side, size)
            text = f"alignas(1024) {gather.operand.dtype.ctype} {name}[{s.stages}]{tile};"
            w.line(text + (f"  // tiles of {self.a}: stages first, rows swizzled" if name == "a" else ""))
        if layout.maps is not None:
            self.staged = [self.names.unique(op.name, "_out") for op in layout.stores]
            for name, op in zip(self.staged, layout.stores):
                panel = (layout.chunk, GROUP_ROWS) if layout.turned else (GROUP_ROWS, layout.chunk)
                dims = f"[{s.groups}][{STAGING}][{panel[0]}][{panel[1]}]"
                w.line(f"alignas(1024) {op.dtype.ctype} {name}{dims};  // results on their way out")
        w.line(f"Barrier full[{s.stages}], empty[{s.stages}];")
        w.close("};")
        w.line("FUSEGRAPH_DYNAMIC_SHARED(memory);")
        w.line("Shared& shared = *reinterpret_cast<Shared*>(memory);")
        w.line(f"const int group = int(threadIdx.x / {GROUP}) - {s.producers};  // a warpgroup: consumers count from 0")

    def _barriers(self) -> None:
        w, s = self.w, self.s
        w.open("if (threadIdx.x == 0)")
        w.open(f"for (int i = 0; i < {s.stages}; ++i)")
        gathering = s.producers * GROUP if s.gather else 0
        w.line(f"barrier_init(shared.full[i], {1 + gathering});")
        w.line(f"barrier_init(shared.empty[i], {s.groups});")
        w.close()
        w.line("barrier_fence_init();")
        w.close()
        w.line("__syncthreads();")
        w.line()

    def _tiles(self) -> None:
        """Opens the loop over a block's tiles and says where each is."""
        w, s = self.w, self.s
        if s.split > 1:
            w.line(f"const int tile = blockIdx.x / {s.split};")
        elif self.work > s.blocks:
            w.open(f"for (int tile = blockIdx.x; tile < {self.work}; tile += gridDim.x)")
        else:
            w.line("const int tile = blockIdx.x;")
        w.line(f"const Tile at = tile_at<{self.tiles_m}, {self.tiles_n}, {s.band}>(tile);")
        w.line(f"const int m0 = at.row * {s.rows}, n0 = at.col * {s.cols};")

    def _end_tiles(self) -> None:
        if self.s.split == 1 and self.work > self.s.blocks:
            self.w.close()

    def _stage_range(self, stages: int) -> tuple[str, str]:
        """The stages of the reduction that a block has."""
        if self.s.split == 1:
            return "0", str(stages)
        self.w.line("const int rank = cluster_rank();")
        split = self.s.split
        self.w.line(f"const int first = rank * {stages} / {split}, last = (rank + 1) * {stages} / {split};")
        return "first", "last"

    # ---- the producer

    def _producer(self, side: Side, stages: int) -> None:
        w, s = self.w, self.s
        k = self.parts.reduction
        w.line(f"registers_decrease<{s.registers[0]}>();")
        w.open("if (threadIdx.x == 0)")
        w.line(f"Ring<{s.stages}> stage;")
        first, last = self._stage_range(stages)
        self._tiles()
        if self.batch > 1 and len(self.parts.batch) > 1:
            for d in range(len(self.parts.batch)):
                w.line(f"const int b{d} = {coordinate('at.batch', self.parts.batch, d)};")
        if side.im2col and side.along_k:
            for d in range(len(self.spec.rows)):
                w.line(f"const int m_{d} = {coordinate('m0', self.spec.rows, d)};")
        w.open(f"for (int k = {first}; k < {last}; ++k, ++stage)")
        w.line("Barrier& full = shared.full[stage.index];")
        w.line("barrier_wait(shared.empty[stage.index], stage.parity ^ 1);")
        w.line(f"barrier_expect(full, {ROW_BYTES * (s.rows + s.cols)});")
        item = "k"
        if k.per_stage > 1:
            w.line("#pragma unroll")
            w.open(f"for (int u = 0; u < {k.per_stage}; ++u)")
            w.line(f"const int item = k * {k.per_stage} + u;")
            item = "item"
        self._walk(item)
        for d in range(len(side.pixels)):
            w.line(f"const int p{d} = {coordinate('c', side.pixels, d)};")
        self._load(side, "a", self.a_map, "m0", s.rows)
        self._load(self.parts.b, "b", self.b_map, "n0", s.cols)
        if k.per_stage > 1:
            w.close()
        w.close()
        self._end_tiles()
        w.close()

    def _gathering_producer(self, a: Gathered, stages: int) -> None:
        """Threads copy 16 bytes at a time, each the same piece of some rows of the tile."""
        w, s, image = self.w, self.s, a.image
        rank, t = len(image.sizes), "int32"
        step = s.producers * GROUP // PIECES
        count = s.rows // step
        w.line(f"registers_decrease<{s.registers[0]}>();")
        w.line("const int t = threadIdx.x;")
        w.line(f"const int piece = t % {PIECES}, row = t / {PIECES};  // of its copies: rows {step} apart")
        w.line(f"Ring<{s.stages}> stage;")
        self._tiles()
        w.line(f"{t} base[{count}];  // of a row's window")
        w.line(f"int16 {', '.join(f'o{d}[{count}]' for d in range(rank))};")
        w.line("#pragma unroll")
        w.open(f"for (int i = 0; i < {count}; ++i)")
        w.line(f"const {t} m = m0 + row + i * {step};")
        for d in range(rank):
            position = coordinate("m", a.rows, d + 1)
            position = _tidy(
                f"{position if ' ' not in position else f'({position})'} * {image.stride[d]} - {image.before[d]}"
            )
            if d == 0 and self.parts.rows % s.rows:
                position = f"m < {self.parts.rows} ? {position} : -32768"
            w.line(f"o{d}[i] = {position};")
        batch = [("at.batch", a.steps[1])] if self.batch > 1 else []
        terms = [(coordinate("m", a.rows, 0), a.steps[0]), *batch, *((f"o{d}[i]", image.steps[d]) for d in range(rank))]
        w.line(f"base[i] = {linear(terms)};")
        w.close()
        w.open(f"for (int k = 0; k < {stages}; ++k, ++stage)")
        w.line("barrier_wait(shared.empty[stage.index], stage.parity ^ 1);")
        w.open("if (t == 0)")
        w.line("Barrier& full = shared.full[stage.index];")
        w.line(f"barrier_expect(full, {ROW_BYTES * s.cols});")
        w.line(f"const int c = k * {self.parts.reduction.panel};")
        self._load(self.parts.b, "b", self.b_map, "n0", s.cols)
        w.close()
        each = 16 // self.itemsize
        w.line(f"const int k0 = k * {self.parts.reduction.panel} + piece * {each};")
        sizes = (*a.taps, a.channels)
        taps = []
        for d, size in enumerate(a.taps):
            if size > 1:
                w.line(f"const int t{d} = {coordinate('k0', sizes, d)};")
            taps.append((f"t{d}" if size > 1 else "0", image.dilation[d]))
        channel = coordinate("k0", sizes, rank)
        reach = [(name, dilation * image.steps[d]) for d, (name, dilation) in enumerate(taps)]
        w.line(f"const {t} tap = {linear([*reach, (channel, 1)])};")
        w.line("#pragma unroll")
        w.open(f"for (int i = 0; i < {count}; ++i)")
        conditions = [
            f"uint32({linear([(f'o{d}[i]', 1), tap])}) < {size}" for d, (size, tap) in enumerate(zip(image.sizes, taps))
        ]
        if self.parts.reduction.channels % self.parts.reduction.panel:
            conditions.append(f"k0 < {self.parts.reduction.channels}")
        w.line(f"const bool inside = {' && '.join(conditions)};")
        w.line(f"const int at = swizzle<128>((row + i * {step}) * 128 + piece * 16);")
        tile = "reinterpret_cast<unsigned char*>(shared.a[stage.index]) + at"
        # Windows that overlap are copied again: from the L1 cache.
        overlap = any(size * dilation > step for size, dilation, step in zip(a.taps, image.dilation, image.stride))
        copy = "copy_async_cached" if overlap else "copy_async<16>"
        w.line(f"{copy}({tile},")
        w.line(f"{' ' * len(copy)} {self.a} + (base[i] + tap), inside ? 16 : 0);")
        w.close()
        w.line("copy_async_arrive(shared.full[stage.index]);")
        w.close()
        self._end_tiles()

    def _walk(self, item: str) -> None:
        """Writes the channel and the taps of panel number ``item``."""
        w, k = self.w, self.parts.reduction
        sizes = (*k.taps, k.chunks)
        for d, size in enumerate(k.taps):
            if size > 1:
                w.line(f"const int t{d} = {coordinate(item, sizes, d)};")
        chunk = coordinate(item, sizes, len(sizes) - 1)
        channel = f"{chunk} * {k.panel}" if k.chunks > 1 else "0"
        if k.panels % k.per_stage:
            # Past the last panel both factors are read beyond their channels, where they are zero.
            channel = f"{item} < {k.panels} ? {channel} : {k.channels}"
        w.line(f"const int c = {channel};")

    def _load(self, side: Side, name: str, tensor_map: str, origin: str, size: int) -> None:
        w, k = self.w, self.parts.reduction
        values = {"c": "c", "o": origin}
        for d, tap in enumerate(k.taps):
            values[f"t{d}"] = f"t{d}" if tap > 1 else "0"
        for d, extent_ in enumerate(self.parts.batch):
            values[f"b{d}"] = "0" if extent_ == 1 else "at.batch" if self.batch == extent_ else f"b{d}"
        if side.im2col:
            values |= {f"o{d}": f"m_{d}" for d in range(len(self.spec.rows))}
            values |= {f"p{d}": f"p{d}" for d in range(len(side.pixels))}

        def text(term: str) -> str:
            return _tidy(term.format(**values))

        at = f"shared.{name}[stage.index]"
        if side.im2col and not side.along_k:
            self._load_windows_across(side, name, tensor_map, size, values)
            return
        if side.im2col:
            coordinates = ", ".join(text(term) for term in side.terms)
            offsets = ", ".join(f"uint16({text(term)})" for term in side.offsets)
            target = f"{at}[u]" if k.per_stage > 1 else at
            w.line(f"tma_load_im2col({target}, {tensor_map}, full,")
            w.line(f"                {coordinates}, {offsets});")
            return
        if side.along_k:
            target = f"{at}[u]" if k.per_stage > 1 else at
            coordinates = ", ".join(text(term) for term in side.terms)
            w.line(f"tma_load({target}, {tensor_map}, full, {coordinates});")
            return
        across = ROW_BYTES // self.itemsize
        several = size > across
        if several:
            w.line("#pragma unroll")
            w.open(f"for (int i = 0; i < {size // across}; ++i)")
            values["o"] = f"{origin} + i * {across}"
        coordinates = ", ".join(text(term) for term in side.terms)
        w.line(f"tma_load({at}[{'i' if several else 0}], {tensor_map}, full, {coordinates});")
        if several:
            w.close()

    def _load_windows_across(self, side: Side, name: str, tensor_map: str, size: int, values: dict[str, str]) -> None:
        """Panels of rows, each some channels of one tap, for the pixels of a stage."""
        w, across = self.w, ROW_BYTES // self.itemsize
        w.line("#pragma unroll")
        w.open(f"for (int i = 0; i < {size // across}; ++i)")
        w.line(f"const int panel = m0 / {across} + i;")
        for d, tap in enumerate(side.taps[:-1]):
            # Past the last row every tap is in range; the channel is not.
            place = f"panel / {prod(side.taps[d + 1 :])} % {tap}" if prod(side.taps[d + 1 :]) > 1 else f"panel % {tap}"
            w.line(f"const int t{d} = {place};") if tap > 1 else None
            values[f"t{d}"] = f"t{d}" if tap > 1 else "0"
        channels = side.taps[-1] * across
        w.line(
            f"const int channel = panel < {prod(side.taps)} ? panel % {side.taps[-1]} * {across} : "
            f"{side.map.sizes[0] if self.batch > 1 else channels};"
        )
        values["c"] = "channel"
        coordinates = ", ".join(_tidy(term.format(**values)) for term in side.terms)
        offsets = ", ".join(f"uint16({_tidy(term.format(**values))})" for term in side.offsets)
        w.line(f"tma_load_im2col(shared.{name}[stage.index][i], {tensor_map}, full,")
        w.line(f"                {coordinates}, {offsets});")
        w.close()

    # ---- the consumers

    def _descriptor(self, side: Side | None, name: str, size: int, offset: str) -> str:
        """The matrix descriptor of the part of a tile that k-step kk of a wgmma multiplies."""
        k = self.parts.reduction
        at = f"shared.{name}[stage.index]"
        step = 32 // self.itemsize
        if side is not None and not side.along_k:
            part = offset or "0"
            return f"matrix_descriptor<128>({at}[{part}][kk * {step}], {k.panel * ROW_BYTES}, 1024)"
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
        rows = f"group * {GROUP_ROWS}" if s.groups > 1 else "0"
        first_row = linear([(rows, 1), ("t / 32 * 16", 1), ("lane / 4", 1)])
        w.line(f"const int row = {first_row};  // of a thread's first result in the tile")
        w.line(f"Ring<{s.stages}> stage;")
        self.epilogue.scalars()
        if self.layout.maps is not None and len(self.staged):
            w.line("int buffer = 0;")
        first, last = self._stage_range(stages)
        self._tiles()
        w.line(f"{self.register_type} sum[{s.cols // 2}];")
        w.line("int previous = 0;")
        w.open(f"for (int k = {first}; k < {last}; ++k, ++stage)")
        w.line("barrier_wait(shared.full[stage.index], stage.parity);")
        if s.gather:
            w.line("fence_async_shared();  // the producer's copies are ordinary writes")
        w.line("wgmma_fence();")
        w.line("#pragma unroll")
        w.open("for (int kk = 0; kk < 4; ++kk)")
        side = self.side_a
        across = side is not None and not side.along_k
        transposed = ["1" if across else "0", "0" if self.parts.b.along_k else "1"]
        flags = f", {', '.join(transposed)}" if "1" in transposed else ""
        a_part = ("group" if s.groups > 1 else "0") if across else (rows if s.groups > 1 else "")
        w.line(f"wgmma<{self.types[0]}, {self.types[1]}, {s.cols}{flags}>(")
        w.line(f"    sum, {self._descriptor(side, 'a', s.rows, a_part)},")
        w.line(f"    {self._descriptor(self.parts.b, 'b', s.cols, '')}, k > {first} || kk > 0);")
        w.close()
        w.line("wgmma_commit();")
        w.open(f"if (k > {first})")
        w.line("wgmma_wait<1>();  // the products of the previous stage are done")
        w.line("if (t == 0) barrier_arrive(shared.empty[previous]);")
        w.close()
        w.line("previous = stage.index;")
        w.close()
        w.line("wgmma_wait<0>();")
        if s.split == 1:
            w.line("if (t == 0) barrier_arrive(shared.empty[previous]);")
        w.line()
        idle = s.part * s.split > s.cols
        if s.split > 1:
            self._publish()
            if idle:
                w.open(f"if (rank < {s.cols // s.part})")
            self._add_up()
        if self.layout.maps is None:
            self._direct()
        else:
            self._staged()
        if idle:
            w.close()
        self._end_tiles()
        if self.layout.maps is not None:
            w.line("if (t == 0) tma_wait_read<0>();  // shared memory must outlive the copies out of it")

    def _publish(self) -> None:
        """Shows the sums of a block to the others of its cluster."""
        w, s = self.w, self.s
        threads = s.groups * GROUP
        w.line("// Every block adds up a part of the columns of the tile; the ring is free for the exchange.")
        w.line(f"{self.register_type}* const exchange = reinterpret_cast<{self.register_type}*>(memory);")
        w.line(f"const int mine = threadIdx.x - {s.producers * GROUP};")
        if s.groups > 1:
            w.line(f"named_barrier_sync({s.groups + 1}, {threads});")
        w.line("#pragma unroll")
        w.line(f"for (int i = 0; i < {s.cols // 2}; ++i) exchange[i * {threads} + mine] = sum[i];")
        w.line("cluster_sync();")

    def _add_up(self) -> None:
        """A block adds up its part of the columns, always in the same order."""
        w, s = self.w, self.s
        each, threads = s.part // 2, s.groups * GROUP
        w.line(f"{self.register_type} total[{each}] = {{}};")
        w.line("#pragma unroll")
        w.open(f"for (int q = 0; q < {s.split}; ++q)")
        w.line(f"const {self.register_type}* const theirs = cluster_map(exchange, q) + rank * {each * threads} + mine;")
        w.line("#pragma unroll")
        w.line(f"for (int i = 0; i < {each}; ++i) total[i] += theirs[i * {threads}];")
        w.close()
        w.line()

    # ---- the epilogue

    def _position(self, ragged_m: bool, ragged_n: bool, clamp: bool) -> list[str]:
        """Writes m and n of a fragment's first result; returns the C expressions of its coordinates."""
        w, layout = self.w, self.layout
        m = "m0 + row + f % 2 * 8"
        if ragged_m and clamp:
            m = f"min({m}, {self.parts.rows - 1})"
        w.line(f"const {self.t} m = {m};")
        n = f"{self._n0} + {self._column} + f / 2 * 8 + lane % 4 * 2"
        if ragged_n and clamp:
            n = f"min({n}, {self.parts.cols - 2})"
        w.line(f"const {self.t} n = {n};")
        batch = ["0"] * len(layout.batch)
        if self.batch > 1:
            batch = ["at.batch"] if len(layout.batch) == 1 else [f"b{d}" for d in range(len(layout.batch))]
        rows, cols = ["m"], ["n"]
        if len(layout.rows) > 1:
            rows = [f"m{d}" for d in range(len(layout.rows))]
            for d, name in enumerate(rows):
                w.line(f"const {self.t} {name} = {coordinate('m', layout.rows, d)};")
        if len(layout.cols) > 1:
            raise Unsupported("an epilogue over columns in several dimensions")
        return [*batch, *rows, *cols]

    def _batch_coordinates(self) -> None:
        if self.batch > 1 and len(self.layout.batch) > 1:
            for d in range(len(self.layout.batch)):
                self.w.line(f"const int b{d} = {coordinate('at.batch', self.layout.batch, d)};")

    @property
    def _n0(self) -> str:
        """The first column of the tile that a block writes."""
        return f"n0 + rank * {self.s.part}" if self.s.split > 1 else "n0"

    @property
    def _barrier(self) -> str:
        """The named barrier of a consumer's threads (0 is that of __syncthreads)."""
        return "group + 1" if self.s.groups > 1 else "1"

    def _sum(self, first: str) -> str:
        name = "total" if self.s.split > 1 else "sum"
        text = f"{name}[{first} + f / 2 * 4 + f % 2 * 2 + e]"
        return f"uint32({text})" if self.spec.accumulate == "uint32" else text

    def _staged(self) -> None:
        """Results through shared memory: a consumer writes a chunk of columns, TMA copies it out meanwhile."""
        w, s, layout = self.w, self.s, self.layout
        self._batch_coordinates()
        chunks = s.part // layout.chunk
        ragged_m, ragged_n = bool(self.parts.rows % s.rows), bool(self.parts.cols % s.cols)
        w.line("#pragma unroll")
        w.open(f"for (int chunk = 0; chunk < {chunks}; ++chunk, buffer ^= 1)")
        if ragged_n:
            w.line(f"if ({self._n0} + chunk * {layout.chunk} >= {self.parts.cols}) break;")
        w.line(f"if (t == 0) tma_wait_read<{STAGING - 1}>();  // the copies out of this buffer have read it")
        w.line(f"named_barrier_sync({self._barrier}, {GROUP});")
        group = "group" if s.groups > 1 else "0"
        w.line("#pragma unroll")
        w.open(f"for (int j = 0; j < {layout.chunk}; j += 16)")
        values = [self.names.unique(op.name, "_v") for op in layout.stores]
        for name, op in zip(values, layout.stores):
            w.line(f"Vector<{op.dtype.ctype}, 2> {name}[4];")
        w.line("#pragma unroll")
        w.open("for (int f = 0; f < 4; ++f)")
        self._column = f"chunk * {layout.chunk} + j"
        position = self._position(ragged_m, ragged_n, clamp=True)
        run = Run(2, len(layout.batch) + len(layout.rows), "e")
        self.epilogue.results(
            position, self._sum(f"(chunk * {layout.chunk} + j) / 2"), run, staged=[f"{v}[f]" for v in values]
        )
        w.close()
        for name, value in zip(self.staged, values):
            tile = f"&shared.{name}[{group}][buffer][0][0]"
            if layout.turned:
                w.line(f"store_fragments_turned<{GROUP_ROWS}>({tile}, t / 32 * 16, j, {value});")
            else:
                w.line(f"store_fragments<{layout.chunk}>({tile}, t / 32 * 16, j, {value});")
        w.close()
        w.line("fence_async_shared();")
        w.line(f"named_barrier_sync({self._barrier}, {GROUP});")
        rows = "m0 + group * 64" if s.groups > 1 else "m0"
        w.open("if (t == 0)")
        # A consumer whose rows lie outside commits an empty group: tma_wait_read counts groups.
        inside = f"if ({rows} < {self.parts.rows}) " if ragged_m and s.groups > 1 else ""
        batch: list[str] = []
        if self.batch > 1:
            several = len(layout.batch) > 1
            batch = [f"b{d}" if several else "at.batch" for d, size in enumerate(layout.batch) if size > 1]
        place = [f"{self._n0} + chunk * {layout.chunk}", rows]
        where = ", ".join([*(reversed(place) if layout.turned else place), *reversed(batch)])
        for name, tensor_map in zip(self.staged, self.store_maps):
            w.line(f"{inside}tma_store({tensor_map}, shared.{name}[{group}][buffer], {where});")
        w.line("tma_commit();")
        w.close()
        w.close()

    def _direct(self) -> None:
        """Results from registers: outputs that no tensor map describes."""
        w, s, layout = self.w, self.s, self.layout
        self._batch_coordinates()
        ragged_m, ragged_n = bool(self.parts.rows % s.rows), bool(self.parts.cols % s.cols)
        w.line("#pragma unroll")
        w.open(f"for (int j = 0; j < {s.part}; j += 16)")
        w.line("#pragma unroll")
        w.open("for (int f = 0; f < 4; ++f)")
        self._column = "j"
        position = self._position(ragged_m, ragged_n, clamp=False)
        outside = [f"m >= {self.parts.rows}"] if ragged_m else []
        odd = self.parts.cols % 2 != 0
        if ragged_n:
            outside.append(f"n >= {self.parts.cols}")
        if outside:
            w.line(f"if ({' || '.join(outside)}) continue;")
        missing = (lambda e: f"n + {e} >= {self.parts.cols}") if odd else None
        run = Run(2, len(layout.batch) + len(layout.rows), "e", missing)
        self.epilogue.results(position, self._sum("j / 2"), run)
        w.close()
        w.close()


def _tidy(text: str) -> str:
    """``0 * 3`` is 0, ``x * 1`` is x, ``x - 0`` is x."""
    for before, after in ((" * 1", ""), (" - 0", ""), ("0 * ", "0 * ")):
        if text.endswith(before):
            text = text[: -len(before)] + after
    text = text.replace(" * 1 ", " ")
    return "0" if text.startswith("0 * ") and "-" not in text and "+" not in text else text
