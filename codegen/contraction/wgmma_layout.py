"""What a block of the Hopper form of the contraction family holds: its schedule, and how results leave it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

from codegen.arch import KNOWN
from codegen.computed_tiles import computed
from codegen.expr import Operand
from codegen.family import Schedule
from codegen.filled_tiles import filled
from codegen.iteration import collapse, restrided
from codegen.operands import ROW_BYTES, ComputedOperand, MappedOperand, OperandTiles
from codegen.spec import ContractionSpec, TensorMap
from codegen.tiles import gathered, operand_tiles

GROUP = 128  # threads of a warpgroup
GROUP_ROWS = 64  # rows of a wgmma
CHUNK_BYTES = 128  # a row of the staging buffers
TAIL = 128  # a block's shared memory behind the buffers is counted in units of so many bytes
RASTER_GROUP = 8  # rows of tiles that share the L2 cache: more would evict each other
CARRIED_BYTES = 384  # most bytes of that row where warps carry out rows of their own: longer rows have fewer ends
STAGING = 2  # buffers of each consumer and output, unless they are a warp's own or hold operands
LEAST_STAGES = 3  # of the ring, besides buffers that hold operands
#: Registers of a producer's and a consumer's thread, by the number of consumers: together no more than 64 Ki a block.
REGISTERS = {1: (40, 216), 2: (40, 232), 3: (32, 160)}
#: The same by the number of the producer's warpgroups that fill tiles, then that of the consumers.
FILL_REGISTERS = {
    1: {1: (200, 232), 2: (120, 192), 3: (104, 136)},
    2: {1: (128, 232), 2: (96, 160), 3: (72, 112)},
}
GATHER_REGISTERS = {1: (96, 232), 2: (80, 176), 3: (72, 112)}
PIECES = ROW_BYTES // 16  # 16-byte pieces of a row of a tile


@dataclass(frozen=True)
class WgmmaSchedule(Schedule):
    """A tile of groups * 64 rows and ``tile_n`` columns a block.

    groups        consumer warpgroups of a block, 1 to 3.
    pingpong      whether each of two consumers computes a tile of 128 rows by itself: while one runs the program on its
                  sums, the other multiplies.  Else they share a tile.
    tile_n        a multiple of 16; times the number of operands B at most 256.
    gather        whether the producer's threads, rather than TMA, gather operand A.
    producer_warpgroups  those that fill tiles of an operand that is computed or converted; 0 for none.
    computes      whether the consumers compute operand A in registers.
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

    def operand_tiles(self, spec: ContractionSpec) -> OperandTiles:
        """Returns how the tiles of a spec come to shared memory."""
        if self.computes:
            return computed(spec)
        return filled(spec) if self.producer_warpgroups else gathered(spec) if self.gather else operand_tiles(spec)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producer and of a consumer."""
        if self.producer_warpgroups:
            return FILL_REGISTERS[self.producer_warpgroups][self.groups]
        return (GATHER_REGISTERS if self.gather else REGISTERS)[self.groups]

    @property
    def pieces(self) -> int:
        """How many products of 64 rows cover a consumer's rows of a tile."""
        return 2 if self.pingpong else 1

    @property
    def tile_m(self) -> int:
        return GROUP_ROWS * (self.pieces if self.pingpong else self.groups)

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


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def panel_size(size: int, itemsize: int) -> int:
    """Returns how many rows or columns a panel of a tile has that lies across the reduction.

    A row of it has 128, 64 or 32 bytes.
    """
    return gcd(size, ROW_BYTES // itemsize)


def brought(side: object, size: int, total: int) -> int:
    """Returns how many rows or columns a copy brings of a tile of ``size``, if there are ``total``.

    Those beyond the last are not written, in units of 8, after which the swizzle repeats: of a product with few rows
    that is most of a tile of 64.  They only make sums that nobody reads.
    """
    return min(size, round_up(total, 8)) if isinstance(side, MappedOperand) and side.along_k else size


def ring_bytes(parts: OperandTiles, s: WgmmaSchedule, products: int) -> int:
    """Returns how many bytes of shared memory a stage's tiles take."""
    first = (
        sum(b.bytes(s.tile_m) for b in parts.a.brought if not b.row) if isinstance(parts.a, ComputedOperand) else None
    )
    return (ROW_BYTES * s.tile_m if first is None else first) + ROW_BYTES * s.tile_n * products


def row_bytes(parts: OperandTiles) -> int:
    """Returns how many bytes of shared memory the tensors take of which a stage has one row for all rows."""
    rows = [b for b in parts.a.brought if b.row] if isinstance(parts.a, ComputedOperand) else []
    return sum(round_up(b.bytes(1), ROW_BYTES) for b in rows)


class Layout:
    """The program over (batch, rows, cols) as the tiles see them, and how its outputs leave the block."""

    def __init__(self, spec: ContractionSpec, parts: OperandTiles, s: WgmmaSchedule) -> None:
        self.spec, self.parts, self.s = spec, parts, s
        lead = len(spec.batch)
        program = spec.program
        # With rows split into batches (`operand_tiles`), the program's leading row dimensions are batches, too.
        extra = 0
        while prod(spec.batch) * prod(spec.m[:extra]) != prod(parts.batch):
            extra += 1
        batch, rows = (*spec.batch, *spec.m[:extra]), spec.m[extra:]
        lead += extra
        every = program.strides
        self.batch, over_batch = collapse(batch, [x[:lead] for x in every], range(lead))
        self.rows, over_rows = collapse(rows, [x[lead : lead + len(rows)] for x in every], range(len(rows)))
        if spec.results:  # the program's rows depend on the coordinates of all batches and rows
            self.batch, over_batch = batch, [x[:lead] for x in every]
            self.rows, over_rows = rows, [x[lead : lead + len(rows)] for x in every]
        self.cols, over_cols = collapse(spec.n, [x[lead + len(rows) :] for x in every], range(len(spec.n)))
        new = [a + b + c for a, b, c in zip(over_batch, over_rows, over_cols)]
        self.program = restrided(program, new)
        self.stores = tuple(st.operand for st in self.program.stores)
        #: whether results are contiguous along rows: they are transposed on their way through shared memory
        self.turned = (
            bool(self.stores)
            and all(
                op.strides[-2] == 1 and (op.strides[-1] != 1 or parts.rows > 1) and op.dtype.itemsize <= 2
                for op in self.stores
            )
            and not all(op.strides[-1] == 1 for op in self.stores)
        )
        widest = max((op.dtype.itemsize for op in self.stores), default=2)
        #: columns of a row of the staging buffers
        self.chunk = CHUNK_BYTES // widest
        while s.part % self.chunk:
            self.chunk //= 2
        if self.by_warps:  # no swizzle of TMA's: any length will do
            self.chunk = max(c for c in range(16, s.part + 1, 16) if s.part % c == 0 and c * widest <= CARRIED_BYTES)

    @cached_property
    def by_warps(self) -> bool:
        """Whether each warp carries its own rows out, so that it need not wait for the others."""
        return self.carried and not self.turned and not any(x.rows for x in self.spec.partials)

    @property
    def buffers(self) -> int:
        """Staging buffers of each consumer and output."""
        return 1 if self.by_warps else self.chunks if self.operand_maps else STAGING

    @property
    def chunks(self) -> int:
        """How many chunks of results a consumer makes of a tile."""
        return self.s.pieces * (self.s.part // self.chunk)

    @cached_property
    def operand_maps(self) -> dict[int, tuple[int, TensorMap]]:
        """Operands as large as the results that TMA brings while products run.

        By the operand's number: the output in whose buffers it lies, one for every chunk of a tile, and its tensor
        map.  The results take the place of what they were computed from, and leave in the same boxes.
        """
        if self.maps is None or self.turned or self.parts.reduction.skips:
            return {}
        each = round_up(GROUP_ROWS * self.chunk * sum(op.dtype.itemsize for op in self.stores), 1024)
        stage = ring_bytes(self.parts, self.s, self.spec.products) + row_bytes(self.parts)
        room = KNOWN["sm_90a"].shared_bytes_per_block - self.exchange_bytes - 3 * TAIL
        if self.s.groups * self.chunks * each + LEAST_STAGES * stage > room:
            return {}
        found: dict[int, tuple[int, TensorMap]] = {}
        for n, op in enumerate(self.program.loads):
            taken = [k for k, _ in found.values()]
            free = [k for k, x in enumerate(self.stores) if x.dtype == op.dtype and k not in taken]
            made = self._map(op, len(self.spec.arguments) + n) if free and any(op.strides[:-1]) else None
            if made is not None:
                found[n] = free[0], made
        return found

    @cached_property
    def maps(self) -> tuple[TensorMap, ...] | None:
        """The outputs' tensor maps; None if one cannot have a map: then threads write all of them."""
        found = []
        if self.spec.results:
            return None
        first = len(self.spec.arguments) + len(self.program.loads)
        for n, op in enumerate(self.stores):
            made = self._map(op, first + n)
            if made is None:
                return None
            found.append(made)
        return tuple(found) or None

    @cached_property
    def carried(self) -> bool:
        """Whether threads carry the results out of shared memory: they have no maps, but are neighbours in memory."""
        if self.maps is not None or not self.stores or len(self.cols) > 1:
            return False
        if self.turned:
            return not self.spec.results
        return all(op.strides[-1] == 1 or self.parts.cols == 1 for op in self.stores)

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
    def space(self) -> tuple[int, ...]:
        """Sizes of the program's space."""
        rows = tuple(x.size for x in self.spec.results) or self.rows
        return (*self.batch, *rows, *self.cols)

    @property
    def staging_bytes(self) -> int:
        if self.maps is None and not self.carried:
            return 0
        each = GROUP_ROWS * self.chunk * sum(op.dtype.itemsize for op in self.stores)
        return self.s.groups * self.buffers * round_up(each, 1024)

    @property
    def exchange_bytes(self) -> int:
        """Bytes of shared memory in which the warps of a consumer leave their values of columns that are reduced."""
        each = [8 if x.reduction.ctype in ("double", "int64", "uint64") else 4 for x in self.spec.partials if x.rows]
        return self.s.groups * 4 * self.chunk * sum(each)

    @property
    def sums_bytes(self) -> int:
        """Bytes of shared memory in which the blocks of a cluster exchange sums; it takes the place of the ring."""
        return self.s.tile_m * self.s.tile_n * self.spec.products * 4 if self.s.split_k > 1 else 0
