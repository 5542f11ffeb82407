"""Schedules of direct convolution's form with whole planes in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from codegen.buffers import VECTORS, Buffer, Buffers, Edge
from codegen.direct_convolution.slide_schedule import MAX_REGISTERS, columns, strips, walk, widths
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.expr import Operand
from codegen.family import Schedule
from codegen.iteration import packed
from codegen.target import Target

#: Most threads of a block, and the fewest that are tried where there is work for more.
MAX_THREADS, MIN_THREADS = 512, 64
#: Least bytes of neighbouring channels that a block writes where channels are contiguous.
RUN_BYTES = 64


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


def contiguous(operand: Operand, sizes: tuple[int, ...], first: int = 0) -> bool:
    """Tells whether an operand lies without gaps, in the order of its dimensions from the ``first`` one on."""
    return all(a == b for a, b, n in zip(operand.strides[first:], packed(sizes[first:]), sizes[first:]) if n > 1)


def runs(spec: DirectConvolutionSpec) -> tuple[int, int]:
    """Returns in how many runs the planes lie in memory, and the planes of each: those of an image, or all there are.

    There are none where the planes of an image do not lie one behind the other.
    """
    sizes, results = (spec.images, spec.groups, 1, *spec.sizes), (spec.images, spec.groups, spec.filters, *spec.out)
    every = [(spec.x, sizes), *((store.operand, results) for store in spec.program.stores)]
    if spec.in_channels > 1 or not contiguous(*every[0], 1):
        return 0, 0
    joined = all(contiguous(op, space) or not contiguous(op, space, 1) for op, space in every)
    return (1, spec.images * spec.groups) if joined else (spec.images, spec.groups)


def flat_copy(spec: DirectConvolutionSpec, planes: int) -> int:
    """Returns how many elements an asynchronous copy of the input has; 0 if none is of at least 4 bytes."""
    size, (many, _) = spec.x.dtype.itemsize, runs(spec)
    starts = (spec.x.alignment, planes * prod(spec.sizes) * size, spec.x.strides[0] * size if many > 1 else 0)
    fitting = (w for w in (16, 8, 4) if w >= size and all(start % w == 0 for start in starts))
    return next(fitting, 0) // size


def flat_buffers(spec: DirectConvolutionSpec, s: FlatSchedule) -> Buffers:
    """Returns what a block has in shared memory: planes of the input, and of every output."""
    ctypes = [store.operand.dtype.ctype for store in spec.program.stores] or [spec.x.dtype.ctype]
    plane, results = s.planes * prod(spec.sizes), s.planes * spec.filters * prod(spec.out)
    made = [Buffer("tile", spec.x.dtype.ctype, (plane,), align=VECTORS, note="planes of the input")]
    made += [Buffer(f"out{n}", ctype, (results,), align=VECTORS) for n, ctype in enumerate(ctypes)]
    return Buffers(made)


def flat_registers(spec: DirectConvolutionSpec, s: FlatSchedule) -> int:
    """Returns the estimated registers of a thread."""
    live = min(s.rows, -(-((spec.taps[1] - 1) * spec.dilation[1] + 1) // spec.stride[1]))
    line = spec.taps[0] * len(columns(spec, s.cols))
    return 32 + spec.word // 4 * (spec.filters * (prod(spec.taps) + live * s.cols) + line)


def flat_candidates(spec: DirectConvolutionSpec, target: Target, itype: str) -> Iterator[FlatSchedule]:
    """Yields the schedules that fit; none for images that are not contiguous."""
    _, total = runs(spec)
    if not (target.arch.has_cp_async and total):
        return
    counts = [n for k in range(10) if (n := 1 << k) < 2 * total]
    for cols, rows, planes in product(widths(spec), strips(spec), counts):
        s = FlatSchedule(rows, cols, planes, itype)
        threads = prod(units(spec, s))
        if threads > MAX_THREADS or (threads < MIN_THREADS and planes < total) or not flat_copy(spec, planes):
            continue
        if (
            2 * flat_buffers(spec, s).bytes <= target.arch.shared_bytes_per_sm
            and flat_registers(spec, s) <= MAX_REGISTERS
        ):
            yield s


def flat_schedules(spec: DirectConvolutionSpec, target: Target, itype: str) -> list[FlatSchedule]:
    """Returns schedules, best first."""
    every = {s: flat_cycles(spec, s, target) for s in flat_candidates(spec, target, itype)}
    return sorted(every, key=lambda s: every[s])


def flat_cycles(spec: DirectConvolutionSpec, s: FlatSchedule, target: Target) -> float:
    """Returns the estimated cycles of a kernel: the slowest of instructions, device memory and latency counts."""
    size, sms, program = spec.x.dtype.itemsize, target.sms, spec.program
    threads, taps = flat_threads(spec, s), prod(spec.taps)
    many, each_run = runs(spec)
    blocks = many * -(-each_run // s.planes)
    shared = flat_buffers(spec, s).bytes
    resident = target.arch.blocks_per_sm(threads, min(255, flat_registers(spec, s)), shared)
    if not resident:
        return float("inf")
    each = -(-blocks // sms)
    waves = -(-each // resident)
    rows = walk(spec, s.rows, s.cols * spec.filters)
    outputs = s.rows * s.cols * spec.filters
    reads = rows.under * spec.taps[0] * len(columns(spec, s.cols)) * 3
    stores = outputs * (3 + 1.5 * len(program.instructions)) + 4 * s.rows
    copies = shared / 16 / threads * 6
    instructions = outputs * taps * spec.word // 4 + reads + stores + 3 * taps * spec.filters + copies + 100
    warps = threads / 32
    active = min(resident, each) * warps
    issue = each * warps * instructions / (4 * min(0.8, 0.25 * active / 4))
    written = sum(store.operand.dtype.itemsize for store in program.stores) or size
    beside = sum(op.dtype.itemsize for op in program.loads if op.strides[1] and op.strides[5])
    planes = spec.images * spec.groups
    moved = planes * (prod(spec.sizes) * size + prod(spec.out) * spec.filters * (written + beside))
    memory = moved / (0.77 * target.bytes_per_cycle)
    latency = waves * 3000.0
    # Where channels are contiguous, a block writes so many bytes of each pixel.
    written_runs = (s.planes * st.operand.dtype.itemsize for st in program.stores if st.operand.strides[1] == 1)
    channels = min(written_runs, default=RUN_BYTES)
    scattered = max(1.0, RUN_BYTES / channels)
    worst: float = (issue**4 + (memory * scattered) ** 4 + latency**4) ** 0.25
    return worst
