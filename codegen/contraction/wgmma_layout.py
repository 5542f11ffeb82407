"""What a block of the Hopper form of the contraction family holds: its schedule, its shared memory, and how results
leave it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from codegen.arch import KNOWN, SECTOR_BYTES
from codegen.buffers import SWIZZLED, VECTORS, Buffer, Buffers
from codegen.computed_tiles import computed
from codegen.contraction.totals import totals_of
from codegen.declined import Declined
from codegen.expr import Operand, Program
from codegen.family import Schedule
from codegen.filled_tiles import filled
from codegen.iteration import collapse, restrided
from codegen.operands import ROW_BYTES, ComputedOperand, Gathered, MappedOperand, OperandTiles, round_up, tile_of
from codegen.pipeline import barriers
from codegen.records import once
from codegen.scaled_tiles import ScaledOperand, scaled
from codegen.sparse_tiles import BLOCK_ROWS, BLOCK_WORDS, sparse_tiles
from codegen.spec import ContractionSpec, Gather, TensorMap
from codegen.tile_path import TilePath
from codegen.tiles import gathered, operand_tiles, tiled

GROUP = 128  # threads of a warpgroup
GROUP_ROWS = 64  # rows of a wgmma
CHUNK_BYTES = 128  # a row of the staging buffers
#: Bytes of shared memory that no buffer is given: for barriers besides those of the ring, and for alignment.
RESERVE = 256
RASTER_GROUP = 8  # rows of tiles that share the L2 cache: more would evict each other
CARRIED_BYTES = 384  # the same, at most, where warps carry out their own rows: longer chunks have fewer ends of rows
STAGING = 2  # buffers of each consumer and output, unless they are a warp's own or hold operands
LEAST_STAGES = 3  # of the ring, besides buffers that hold operands
RESERVE_WITH_OPERANDS = RESERVE + 128  # and for the barriers of that ring
#: Registers of a producer's and a consumer's thread, by the number of consumers: together no more than 64 Ki a block.
REGISTERS = {1: (40, 216), 2: (40, 232), 3: (32, 160)}
#: The same by the number of the producer's warpgroups that fill tiles, then that of the consumers.
FILL_REGISTERS = {
    1: {1: (200, 232), 2: (120, 192), 3: (104, 136)},
    2: {1: (128, 232), 2: (96, 160), 3: (72, 112)},
}
#: The same of two each where elements come in parts: a consumer has fragments of these besides the sums of a stage.
PARTS_REGISTERS = (88, 168)
#: The same where the producer's threads bring factors.
SCALE_REGISTERS = {1: (56, 224), 2: (56, 224), 3: (56, 152)}
GATHER_REGISTERS = {1: (96, 232), 2: (80, 176), 3: (72, 112)}
PIECES = ROW_BYTES // 16  # 16-byte pieces of a row of a tile
BARRIER_BYTES = Buffers(barriers("", 1)).stage_bytes  # of a stage


@dataclass(frozen=True)
class WgmmaSchedule(Schedule):
    """A tile of groups * 64 rows, or twice as many, and ``tile_n`` columns a block.

    groups        consumer warpgroups of a block, 1 to 3.
    pingpong      whether each of two consumers computes a tile of 128 rows by itself: while one runs the program on its
                  sums, the other multiplies.  Else they share a tile.
    tile_n        a multiple of 16; times the number of operands B at most 256.
    gather        whether the producer's threads, rather than TMA, gather operand A.
    producer_warpgroups  those that fill tiles of an operand that is computed or converted, or bring factors; 0 for
                  none.
    computes      whether the consumers compute operand A in registers.
    scales        whether operands are codes, and the sums of stages are multiplied by their factors.
    doubled       whether each of the consumers that share a tile multiplies 128 rows of it, of a sparse operand A.
    stages        of the ring, each 128 bytes along the reduction.
    blocks        of the grid: as many as the device has multiprocessors.
    split_k       blocks (a cluster) that share the reduction of a tile.
    raster_group  rows of tiles that concurrent blocks go through together.
    """

    groups: int
    tile_n: int
    stages: int
    blocks: int
    split_k: int = 1
    raster_group: int = RASTER_GROUP
    gather: bool = False
    pingpong: bool = False
    producer_warpgroups: int = 0
    computes: bool = False
    scales: bool = False
    doubled: bool = False

    def operand_tiles(self, spec: ContractionSpec) -> OperandTiles:
        """Returns how the tiles of a spec come to shared memory."""
        return self.form(spec)(spec)

    def form(self, spec: ContractionSpec) -> Callable[[ContractionSpec], OperandTiles]:
        """Returns the function that tells how the tiles of a spec come to shared memory."""
        if self.computes or self.scales:
            return computed if self.computes else scaled
        if spec.metadata is not None:
            return sparse_tiles
        return filled if self.producer_warpgroups else gathered if self.gather else operand_tiles

    def tiles(self, parts: OperandTiles) -> int:
        """Returns into how many tiles it cuts the results."""
        return prod(parts.batch) * -(-parts.rows // self.tile_m) * -(-parts.cols // self.tile_n)

    @property
    def converts(self) -> bool:
        """Whether elements may be converted on their way to the tensor cores."""
        return self.computes or (self.producer_warpgroups > 0 and not self.scales)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producer and of a consumer."""
        if self.scales:
            return SCALE_REGISTERS[self.groups]
        if self.producer_warpgroups:
            return FILL_REGISTERS[self.producer_warpgroups][self.groups]
        return (GATHER_REGISTERS if self.gather else REGISTERS)[self.groups]

    @property
    def pieces(self) -> int:
        """How many products of 64 rows cover a consumer's rows of a tile."""
        return 2 if self.pingpong or self.doubled else 1

    @property
    def tile_m(self) -> int:
        return GROUP_ROWS * self.pieces * (1 if self.pingpong else self.groups)

    @property
    def producers(self) -> int:
        """Warpgroups of the producer: gathering takes more threads than issuing TMA loads."""
        return self.producer_warpgroups or (2 if self.gather else 1)

    @property
    def threads(self) -> int:
        return (self.producers + self.groups) * GROUP

    @property
    def part(self) -> int:
        """Columns of a tile that a block writes, with split-K a multiple of 16; the last blocks may have none."""
        if self.split_k == 1:
            return self.tile_n
        return next(
            p for p in range(16, self.tile_n + 1, 16) if p * self.split_k >= self.tile_n and self.tile_n % p == 0
        )


@dataclass(frozen=True)
class ResultSpace:
    """The program over (batch, rows, cols) as the tiles see them: sizes of these, merged as far as possible.

    What follows from them alone is the same for all schedules.
    """

    spec: ContractionSpec
    parts: OperandTiles
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    program: Program

    @classmethod
    def of(cls, spec: ContractionSpec, parts: OperandTiles) -> ResultSpace:
        lead, every = len(spec.batch), spec.program.strides
        # With rows split into batches (`operand_tiles`), the program's leading row dimensions are batches, too.
        while prod((*spec.batch, *spec.m)[:lead]) != prod(parts.batch):
            lead += 1
        batch, rows, end = (*spec.batch, *spec.m)[:lead], (*spec.batch, *spec.m)[lead:], len(spec.batch) + len(spec.m)
        over_batch, over_rows = [x[:lead] for x in every], [x[lead:end] for x in every]
        if not spec.results:  # else the program's rows depend on the coordinates of all batches and rows
            batch, over_batch = collapse(batch, over_batch, range(lead))
            rows, over_rows = collapse(rows, over_rows, range(len(rows)))
        cols, over_cols = collapse(spec.n, [x[end:] for x in every], range(len(spec.n)))
        new = [a + b + c for a, b, c in zip(over_batch, over_rows, over_cols)]
        return cls(spec, parts, batch, rows, cols, restrided(spec.program, new))

    @once
    def stores(self) -> tuple[Operand, ...]:
        return tuple(st.operand for st in self.program.stores)

    @once
    def turned(self) -> bool:
        """Whether results are contiguous along rows: they are transposed on their way through shared memory.

        Those of 4 bytes need not be where the 8 rows that a warp writes at once are whole sectors.
        """
        turnable = [op.strides[-2] == 1 and (op.strides[-1] != 1 or self.parts.rows > 1) for op in self.stores]
        if not all(turnable) or all(op.strides[-1] == 1 for op in self.stores):
            return False
        if self.widest <= 2:
            return True
        direct = self.spec.results or len(self.cols) > 1 or all(map(self._begins_sectors, self.stores))
        return self.widest == 4 and not direct

    def _begins_sectors(self, op: Operand) -> bool:
        """Tells whether a tensor's runs along rows begin where sectors of memory do."""
        steps = [step for step, size in zip(op.strides, self.space) if size > 1 and step != 1]
        return not any(step * op.dtype.itemsize % SECTOR_BYTES for step in steps)

    @once
    def widest(self) -> int:
        """Bytes of an element of the output that has the widest."""
        return max((op.dtype.itemsize for op in self.stores), default=2)

    @once
    def sides(self) -> tuple[MappedOperand | None, ...]:
        """The program's operands, outputs last, as TMA moves them; None for those that it cannot."""
        first = len(self.spec.arguments)
        return tuple([self._side(op, first + n) for n, op in enumerate((*self.program.loads, *self.stores))])

    @property
    def space(self) -> tuple[int, ...]:
        """Sizes of the program's space."""
        rows = tuple(x.size for x in self.spec.results) or self.rows
        return (*self.batch, *rows, *self.cols)

    def by_row(self, op: Operand) -> bool:
        """Tells whether an operand of the program differs from row to row."""
        return any(step and size != 1 for step, size in zip(op.strides[:-1], self.space))

    @once
    def large(self) -> tuple[int, ...]:
        """The numbers of the program's loads that differ from row to row, and that TMA can bring."""
        return tuple([n for n, op in enumerate(self.program.loads) if self.by_row(op) and self.sides[n]])

    @once
    def fresh(self) -> int:
        """Bytes that TMA brings of the operands, counted once."""
        sides = [(side, n) for side, n in ((self.parts.a, 1), (self.parts.b, self.spec.products))]
        mapped = [n * prod(side.map.sizes) for side, n in sides if isinstance(side, MappedOperand)]
        return sum(mapped) * self.parts.reduction.itemsize

    @once
    def rings(self) -> dict[tuple[int, int, int], Buffers]:
        """The rings of tiles of so many rows and columns, with so many stages, as far as they were asked for."""
        return {}

    @once
    def _boxed(self) -> dict[tuple[int, int], TensorMap | None]:
        return {}

    def map(self, number: int, chunk: int) -> TensorMap | None:
        """Returns the tensor map of an operand of the program, outputs last, in boxes of so many columns; None if there
        can be none.
        """
        key = number, chunk
        if key not in self._boxed:
            side, first = self.sides[number], len(self.program.loads)
            op = self.program.loads[number] if number < first else self.stores[number - first]
            box = (GROUP_ROWS, chunk) if self.turned else (chunk, GROUP_ROWS)
            self._boxed[key] = None if side is None or chunk * op.dtype.itemsize < 16 else side.boxed(*box)
        return self._boxed[key]

    def _side(self, op: Operand, argument: int) -> MappedOperand | None:
        *batch, row, col = op.strides
        rows, cols = self.parts.rows, self.parts.cols
        if len(self.rows) > 1 or len(self.cols) > 1 or len(self.batch) > 3 or cols % 2:
            return None
        repeated = any(size > 1 and not step for size, step in zip((*self.batch, rows, cols), op.strides))
        too_long = self.turned and self.widest > 2  # rows of TMA's swizzle have 128 bytes
        if op.alignment % 16 or repeated or too_long:
            return None
        try:
            side = tiled(Gather(op, tuple(batch), (row,), (col,)), argument, self.batch, rows, (cols,), 0)
        except Declined:
            return None
        return side if side.along_k != self.turned else None


class Layout:
    """What a block has in shared memory, and how its outputs leave it."""

    def __init__(
        self, spec: ContractionSpec, parts: OperandTiles, s: WgmmaSchedule, over: ResultSpace | None = None
    ) -> None:
        self.spec, self.parts, self.s = spec, parts, s
        self.over = over = over or ResultSpace.of(spec, parts)
        self.batch, self.rows, self.cols, self.program = over.batch, over.rows, over.cols, over.program
        self.stores, self.turned = over.stores, over.turned
        #: columns of a row of the staging buffers
        self.chunk = CHUNK_BYTES // over.widest
        while s.part % self.chunk:
            self.chunk //= 2
        if self.by_warps:  # no swizzle of TMA's: any length will do
            fitting = (c for c in range(16, s.part + 1, 16) if s.part % c == 0 and c * over.widest <= CARRIED_BYTES)
            self.chunk = max(fitting)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producer and of a consumer."""
        brought = [side for side in (self.parts.a, self.parts.b) if isinstance(side, TilePath)]
        in_parts = any(side.parts > 1 for side in brought) and not any(side.searched for side in brought)
        return PARTS_REGISTERS if in_parts and self.s.groups == self.s.producer_warpgroups == 2 else self.s.registers

    @once
    def by_warps(self) -> bool:
        """Whether each warp carries its own rows out, so that it need not wait for the others."""
        return self.carried and not self.turned and not any(x.rows for x in self.spec.partials)

    @property
    def chunks(self) -> int:
        """How many chunks of results a consumer makes of a tile."""
        return self.s.pieces * (self.s.part // self.chunk)

    @once
    def operand_maps(self) -> dict[int, tuple[int, TensorMap]]:
        """Operands as large as the results that TMA brings while products run.

        By the operand's number: the output in whose buffers it lies, one for every chunk of a tile, and its tensor
        map.  The results take the place of what they were computed from, and leave in the same boxes.
        """
        if not self.over.large or self.maps is None or self.parts.reduction.skips:
            return {}
        stages = LEAST_STAGES * (self.ring.stage_bytes + self.single_rows.stage_bytes)
        room = KNOWN["sm_90a"].shared_bytes_per_block - self.left_by_warps.bytes - RESERVE_WITH_OPERANDS
        if self.staged(self.chunks).bytes + stages > room:
            return {}
        found: dict[int, tuple[int, TensorMap]] = {}
        for n in self.over.large:
            taken = [k for k, _ in found.values()]
            dtype = self.program.loads[n].dtype
            free = [k for k, x in enumerate(self.stores) if x.dtype == dtype and k not in taken]
            made = self.over.map(n, self.chunk) if free else None
            if made is not None:
                found[n] = free[0], made
        return found

    @once
    def maps(self) -> tuple[TensorMap, ...] | None:
        """The outputs' tensor maps; None if one cannot have a map: then all are written from registers or by
        threads.
        """
        first = len(self.program.loads)
        found = [self.over.map(first + n, self.chunk) for n in range(0 if self.spec.results else len(self.stores))]
        made = tuple(x for x in found if x is not None)
        return made if made and len(made) == len(found) else None

    @once
    def carried(self) -> bool:
        """Whether threads carry the results out of shared memory: they have no maps, but are neighbours in memory."""
        if self.maps is not None or not self.stores or len(self.cols) > 1:
            return False
        if self.turned:
            return not self.spec.results
        return all(op.strides[-1] == 1 or self.parts.cols == 1 for op in self.stores)

    # ---- shared memory

    @once
    def arrays(self) -> Buffers:
        """What a block has in shared memory.  Notes have buffers' names, in braces, for those of their tensors."""
        return Buffers((*self.ring, *self.out, *self.single_rows, *self.factors, *self.left_by_warps, *self.totals))

    @property
    def totals(self) -> Buffers:
        """The totals of rows, and the parts of them."""
        return Buffers(totals_of(self.spec, GROUP // 32))

    @once
    def out(self) -> Buffers:
        """What the results leave from, unless threads write them from registers."""
        if self.maps is None and not self.carried:
            return Buffers()
        return self.staged(self.chunks if self.operand_maps else STAGING)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage of all that have stages, barriers among them."""
        return sum(x.stage_bytes for x in (self.ring, self.single_rows, self.factors)) + BARRIER_BYTES

    @property
    def barriers(self) -> Buffers:
        """The barriers behind these."""
        turn = [Buffer("turn", "Barrier", (2,))] if self.s.pingpong else []
        operands = [Buffer("operands", "Barrier", (self.s.groups,))] if self.operand_maps else []
        return Buffers((*barriers("", self.s.stages), *turn, *operands))

    @once
    def ring(self) -> Buffers:
        """The tiles of both operands; those of tensors that operand A is computed from are ``in0``, ``in1``, ..."""
        known, key = self.over.rings, (self.s.tile_m, self.s.tile_n, self.s.stages)
        if key not in known:
            known[key] = self._ring()
        return known[key]

    def _ring(self) -> Buffers:
        s, a, b = self.s, self.parts.a, self.parts.b
        count = self.spec.products
        second = self._tile("b", b, self.spec.b, s.tile_n * count)
        second = second._replace(note=f"{s.tile_n} columns of each of {{b}}" if count > 1 else "")
        if isinstance(a, ComputedOperand):
            return Buffers((*(x.tile(s.tile_m, s.stages) for x in a.brought if not x.row), second))
        first = self._tile("a", a, self.spec.a, s.tile_m)
        if self.parts.metadata is None:
            return Buffers((first, second))
        half = first._replace(shape=(s.tile_m, self.parts.reduction.panel // 2))
        blocks = (s.tile_m // BLOCK_ROWS, BLOCK_WORDS)
        words = Buffer("metadata", "uint32", blocks, s.stages, align=CHUNK_BYTES, note="which terms {a} has")
        return Buffers((half, second, words))

    def _tile(self, name: str, side: MappedOperand | Gathered | TilePath, gather: Gather, size: int) -> Buffer:
        k = self.parts.reduction
        if not isinstance(side, TilePath):
            width, ctype = 0, gather.operand.dtype.ctype
            if isinstance(side, MappedOperand):
                width, ctype = side.width, side.map.element
            return tile_of(name, ctype, side.along_k, size, k.per_stage, k.panel, self.s.stages, width)
        tile = tile_of(name, side.element, side.along_k, size, k.per_stage, k.panel, self.s.stages)
        return tile._replace(shape=(side.parts, *tile.shape)) if side.parts > 1 else tile

    @once
    def single_rows(self) -> Buffers:
        """The tensors of which a stage has one row for all rows of operand A."""
        every = self.parts.a.brought if isinstance(self.parts.a, ComputedOperand) else ()
        return Buffers(x.tile(self.s.tile_m, self.s.stages) for x in every if x.row)

    @once
    def factors(self) -> Buffers:
        """The factors of a tile's rows and columns, one for those that have it in common: ``a_scale``, ``b_scale``.

        Threads of one warpgroup bring them, each as many.
        """
        found = []
        for label, side, size in (("a", self.parts.a, self.s.tile_m), ("b", self.parts.b, self.s.tile_n)):
            if isinstance(side, ScaledOperand) and side.factors is not None:
                count = size // (side.factors.together(size) if label == "b" else 1)
                count = count if count < GROUP else round_up(count, GROUP)
                found.append(Buffer(f"{label}_scale", "float", (count,), self.s.stages, align=VECTORS))
        return Buffers(found)

    def staged(self, count: int) -> Buffers:
        """Returns so many buffers of each consumer for a chunk of results: of output n ``out{n}``."""
        panel = (self.chunk, GROUP_ROWS) if self.turned else (GROUP_ROWS, self.chunk)
        shape = (self.s.groups, *(() if self.by_warps else (count,)), *panel)
        note = "results on their way out"
        return Buffers(
            Buffer(f"out{n}", op.dtype.ctype, shape, align=SWIZZLED, note=note) for n, op in enumerate(self.stores)
        )

    @once
    def left_by_warps(self) -> Buffers:
        """What the warps of a consumer leave of columns that are reduced: ``left0``, ``left1``, ..."""
        shape, note = (self.s.groups, 4, self.chunk), "what each warp has of a chunk of columns"
        reduced = [x.reduction for x in self.spec.partials if x.rows]
        return Buffers(Buffer(f"left{n}", x.ctype, shape, note=note) for n, x in enumerate(reduced))
