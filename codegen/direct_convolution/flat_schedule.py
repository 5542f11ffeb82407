"""Schedules of direct convolution's form with whole planes in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from codegen.arch import MAX_REGISTERS_PER_THREAD, SECTOR_BYTES, blocks_of_registers
from codegen.buffers import VECTORS, Buffer, Buffers, Edge
from codegen.direct_convolution.cost import Work, conflicts, cycles, finishing, in_pieces
from codegen.direct_convolution.slide_schedule import (
    MAX_REGISTERS,
    WEIGHT,
    columns,
    products,
    strips,
    walk,
    widths,
)
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.expr import Operand
from codegen.family import Schedule
from codegen.sizes import most
from codegen.target import Target

#: Most threads of a block, and the fewest that are tried where there is work for more.
MAX_THREADS, MIN_THREADS = 512, 64
#: Figures of the cost model, fitted to measured times.  Instructions of an element that is read, of 16 bytes that are
#: copied, and of a result that is written alone; the share of the issue slots that a warp of a scheduler fills; cycles
#: until planes arrive.
READ, COPY, SCATTERED, FILLED, LATENCY = 1.5, 4.6, 16.0, 0.37, 730.0
#: Registers that ptxas takes beyond those estimated, unless it spills: in any case, and for each tap times columns of
#: the input under the outputs.  The more code there is, the more of it ptxas moves ahead.
SPARE, SPARE_PRODUCT = 12, 0.036


@dataclass(frozen=True)
class FlatSchedule(Schedule):
    """A block has ``planes`` planes; a thread slides down over ``rows`` rows of ``cols`` columns of outputs of one."""

    rows: int
    cols: int
    planes: int
    itype: str


def units(spec: DirectConvolutionSpec, s: FlatSchedule) -> tuple[int, int, int, int]:
    """Returns a block's planes, depths, and threads along rows and columns."""
    return s.planes, spec.out[0], -(-spec.out[1] // s.rows), -(-spec.out[2] // s.cols)


def flat_threads(spec: DirectConvolutionSpec, s: FlatSchedule) -> int:
    """Returns the threads of a block: whole warps."""
    return Edge(prod(units(spec, s)), 32).padded


def flat_copy(spec: DirectConvolutionSpec, planes: int) -> tuple[int, bool]:
    """Returns how many elements an asynchronous copy of the input has, and whether copies begin in front of the planes.

    They do where planes do not begin at multiples of the least copy.  There are 0 elements if no copy is aligned.
    """
    size, (many, _) = spec.x.dtype.itemsize, spec.runs
    starts = (planes * prod(spec.sizes) * size, spec.x.strides[0] * size if many > 1 else 0)
    aligned = [w for w in (16, 8, 4) if w >= size and spec.x.alignment % w == 0]
    fitting = [w for w in aligned if all(start % w == 0 for start in starts)]
    return next(iter(fitting or aligned), 0) // size, not fitting


def flat_stored(spec: DirectConvolutionSpec, planes: int, operand: Operand) -> int:
    """Returns how many elements of an output that lies as it is computed are written at a time."""
    (many, total), size, plane = spec.runs, operand.dtype.itemsize, spec.filters * prod(spec.out)
    starts = (planes * plane, total * plane, operand.strides[0] if many > 1 else 0)
    fitting = [v for v in (16, 8, 4, 2) if v * size <= 16 and operand.alignment % (v * size) == 0]
    return max((v for v in fitting if all(start % v == 0 for start in starts)), default=1)


def flat_pitches(spec: DirectConvolutionSpec) -> list[int]:
    """Returns how far apart the planes of each output lie in shared memory, in elements.

    Where neighbouring threads write a pixel of neighbouring planes, these are an odd number of words apart: their
    elements are in different banks.
    """
    plane, found = spec.filters * prod(spec.out), []
    for store, across in zip(spec.program.stores, spec.across):
        size = store.operand.dtype.itemsize
        odd = (n for n in range(plane, plane + 8) if n * size % 8 == 4 or (size >= 4 and n % 2))
        found.append(next(odd) if across else plane)
    return found


def flat_buffers(spec: DirectConvolutionSpec, s: FlatSchedule) -> Buffers:
    """Returns what a block has in shared memory: planes of the input, and of every output."""
    count, early = flat_copy(spec, s.planes)
    tile = Edge(s.planes * prod(spec.sizes) + count - 1, count).padded if early else s.planes * prod(spec.sizes)
    made = [Buffer("tile", spec.x.dtype.ctype, (tile,), align=VECTORS, note="planes of the input")]
    for n, (store, pitch) in enumerate(zip(spec.program.stores, flat_pitches(spec))):
        made.append(Buffer(f"out{n}", store.operand.dtype.ctype, (s.planes * pitch,), align=VECTORS))
    return Buffers(made)


def _parts(spec: DirectConvolutionSpec, s: FlatSchedule, plane: int, row: int, col: int, size: int) -> float:
    """Returns in how many parts an access of a warp's threads to shared memory is done, one element each.

    ``plane``, ``row`` and ``col`` are the elements, of ``size`` bytes, from one plane, row and column to the next.
    """
    planes, depth, down, along = units(spec, s)
    steps = (along, s.cols * col), (down, s.rows * row), (depth, 0), (planes, plane)
    return conflicts(tuple([(n, step * size) for n, step in steps]), size)


def flat_registers(spec: DirectConvolutionSpec, s: FlatSchedule) -> int:
    """Returns the estimated registers of a thread."""
    live = min(s.rows, -(-((spec.taps[1] - 1) * spec.dilation[1] + 1) // spec.stride[1]))
    line = spec.taps[0] * len(columns(spec, s.cols))
    return 32 + spec.word // 4 * (spec.filters * (prod(spec.taps) + live * s.cols) + line)


def flat_blocks(spec: DirectConvolutionSpec, s: FlatSchedule) -> int:
    """Returns for how many blocks the registers of a multiprocessor suffice."""
    needed = round(flat_registers(spec, s) + SPARE + SPARE_PRODUCT * prod(spec.taps) * len(columns(spec, s.cols)))
    return blocks_of_registers(most(flat_threads(spec, s)), min(MAX_REGISTERS_PER_THREAD, needed))


def flat_candidates(spec: DirectConvolutionSpec, target: Target, itype: str) -> Iterator[FlatSchedule]:
    """Yields the schedules that fit; none for images that are not contiguous."""
    _, total = spec.runs
    if not (target.arch.has_cp_async and total):
        return
    counts = [n for k in range(10) if (n := 1 << k) < 2 * total]
    for cols, rows, planes in product(widths(spec), strips(spec), counts):
        s = FlatSchedule(rows, cols, planes, itype)
        threads = prod(units(spec, s))
        if threads > MAX_THREADS or (threads < MIN_THREADS and planes < total) or not flat_copy(spec, planes)[0]:
            continue
        if (
            2 * flat_buffers(spec, s).bytes <= target.arch.shared_bytes_per_sm
            and flat_registers(spec, s) <= MAX_REGISTERS
            and flat_blocks(spec, s)
        ):
            yield s


def flat_schedules(spec: DirectConvolutionSpec, target: Target, itype: str) -> list[FlatSchedule]:
    """Returns schedules, best first."""
    every = {s: flat_cycles(spec, s, target) for s in flat_candidates(spec, target, itype)}
    return sorted(every, key=lambda s: every[s])


def flat_cycles(spec: DirectConvolutionSpec, s: FlatSchedule, target: Target) -> float:
    """Returns the estimated cycles of a kernel: of instructions, device and shared memory, and latency."""
    return cycles(spec, _work(spec, s), target)


def _work(spec: DirectConvolutionSpec, s: FlatSchedule) -> Work:
    """Returns what blocks do."""
    size, program, taps = spec.x.dtype.itemsize, spec.program, prod(spec.taps)
    many, total = spec.runs
    threads, shared = flat_threads(spec, s), flat_buffers(spec, s).bytes
    rows = walk(spec, s.rows, s.cols * spec.filters)
    outputs = s.rows * s.cols * spec.filters
    reads = rows.under / spec.input_dilation[1] * spec.taps[0] * len(columns(spec, s.cols))
    moves = 0 if rows.whole else (rows.slots - 1) * outputs
    stores = [store.operand for store, across in zip(program.stores, spec.across) if not across]
    copies = s.planes * prod(spec.sizes) / flat_copy(spec, s.planes)[0]
    copies += sum(s.planes * spec.filters * prod(spec.out) / flat_stored(spec, s.planes, op) for op in stores)
    copies /= threads
    written = [store.operand.dtype.itemsize for store in program.stores]
    scattered = outputs * sum(spec.across)
    instructions = products(spec, rows, s.rows, s.cols * spec.filters) + READ * reads + moves
    instructions += outputs * finishing(spec) + WEIGHT * taps * spec.filters
    instructions += COPY * copies + SCATTERED * scattered + 100
    accesses = reads * _parts(spec, s, prod(spec.sizes), spec.sizes[2] * spec.stride[1], spec.stride[2], size)
    for each_size, pitch in zip(written, flat_pitches(spec)):
        accesses += outputs * _parts(spec, s, pitch, spec.out[2], 1, each_size)
    accesses += 8 * copies + 2 * scattered
    # Where channels are contiguous, a block writes so many bytes of each pixel.
    pieces = [s.planes * each_size for each_size, across in zip(written, spec.across) if across]
    return Work(
        blocks=many * -(-total // s.planes),
        threads=threads,
        registers=flat_registers(spec, s),
        shared=shared,
        instructions=instructions,
        filled=FILLED,
        accesses=accesses,
        fetched=spec.traffic[0],
        partial=in_pieces(spec, min(pieces, default=SECTOR_BYTES)),
        waits=LATENCY,
        code=instructions * rows.period / rows.under,
    )
