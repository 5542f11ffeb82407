"""The cost model of direct convolution: what a kernel's work takes, in which all forms share how it overlaps.

A form counts what its threads do, `Work`; `cycles` says how long that takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, hypot, prod

from codegen.arch import SECTOR_BYTES
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.epilogue import one_access
from codegen.expr import Operand
from codegen.target import Target

#: Figures fitted to measured times: share of the bandwidth of memory; bytes that a multiprocessor gets from the L2
#: cache in a cycle; its cycles for a sector that is written in part, and for one that is read beside the input and used
#: in part; cycles of an instruction that is fetched for the first time, and of a kernel beyond those of its launch.
MEMORY_SHARE, CACHE_RATE, WRITTEN, READ, FETCHED, START = 0.85, 52.0, 3.6, 3.2, 2.8, 1750.0
#: Instructions of a result that is written, and of an operation of the program on it.
RESULT, OPERATION = 1.7, 3.2

#: How many neighbouring threads there are, and by how much one is ahead of the one before in the program's space.
Digit = tuple[int, Mapping[int, int]]
#: The same with the bytes in memory by which it is ahead.
Steps = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Work:
    """What the blocks of a kernel do.

    instructions  of a thread.
    filled        share of the issue slots that a warp of a scheduler fills.
    accesses      parts of a warp's accesses to shared memory: a multiprocessor does one in a cycle.
    fetched       bytes of the input that all blocks read, from the cache where others have read them.
    partial       cycles of all multiprocessors for sectors that accesses use in part.
    waits         cycles in which a block waits for memory, whatever others do.
    code          instructions that are written out: each has to be fetched once.
    """

    blocks: int
    threads: int
    registers: int
    shared: int
    instructions: float
    filled: float
    accesses: float
    fetched: float
    partial: float
    waits: float
    code: float


def cycles(spec: DirectConvolutionSpec, work: Work, target: Target) -> float:
    """Returns the estimated cycles: of instructions, memory, caches and latency, which overlap."""
    sms = target.sms
    resident = target.arch.blocks_per_sm(work.threads, min(255, work.registers), work.shared)
    if not resident:
        return float("inf")
    each, warps = -(-work.blocks // sms), work.threads / 32
    # The mean of a multiprocessor's blocks and of those of the busiest one.
    done = (each + work.blocks / sms) / 2 * warps
    issue = done * work.instructions / (4 * (1 - exp(-work.filled * min(resident, each) * warps / 4)))
    read, moved = spec.traffic
    memory = moved / (MEMORY_SHARE * target.bytes_per_cycle)
    cache = (moved - read + max(read, work.fetched)) / (CACHE_RATE * sms)
    latency = -(-each // resident) * work.waits + FETCHED * work.code
    return hypot(issue, memory, cache, done * work.accesses, work.partial / sms, latency) + START


def finishing(spec: DirectConvolutionSpec) -> float:
    """Returns the instructions of a result behind its sum."""
    return RESULT + OPERATION * len(spec.program.instructions)


def partial(spec: DirectConvolutionSpec, digits: Sequence[Digit], count: int, along: int, whole: bool = True) -> float:
    """Returns the cycles of all multiprocessors for the sectors of the program's accesses beyond those of their bytes.

    ``digits`` are a block's threads, neighbours first; a thread has ``count`` results along a dimension, together in
    accesses as wide as possible if they are ``whole``.
    """
    results, found = spec.images * spec.groups * spec.filters * prod(spec.out), 0.0
    images = [op for op in spec.program.loads if op.strides[1] and (op.strides[4] or op.strides[5])]
    for op, each in (
        *((op, READ) for op in images),
        *((store.operand, WRITTEN) for store in spec.program.stores),
    ):
        wide = count if whole and one_access(op, spec.space, count, along) else 1
        width = min(16, wide * op.dtype.itemsize)
        beyond = sectors(_steps(op, digits), width) - 32 * width / SECTOR_BYTES
        found += each * results * op.dtype.itemsize / width / 32 * max(0.0, beyond)
    return found


def in_pieces(spec: DirectConvolutionSpec, size: int) -> float:
    """Returns the same for results that are written in pieces of so many bytes."""
    read, moved = spec.traffic
    return WRITTEN * (moved - read) / size if size < SECTOR_BYTES else 0


def _steps(op: Operand, digits: Sequence[Digit]) -> Steps:
    """Returns how many neighbours there are, and the bytes between two of them in an operand."""
    size = op.dtype.itemsize
    return tuple([(n, size * sum(op.strides[d] * step for d, step in steps.items())) for n, steps in digits])


def sectors(digits: Steps, width: int) -> int:
    """Returns how many sectors an access of a warp touches, of so many bytes a thread."""
    return _sectors(_warp(digits), width)


def conflicts(digits: Steps, width: int) -> int:
    """Returns in how many parts a warp's access to shared memory is done, of so many bytes a thread."""
    return _conflicts(_warp(digits), width)


@lru_cache(1 << 14)
def _sectors(digits: Steps, width: int) -> int:
    return len(
        {at // SECTOR_BYTES for at in _addresses(digits)}
        | {(at + width - 1) // SECTOR_BYTES for at in _addresses(digits)}
    )


@lru_cache(1 << 14)
def _conflicts(digits: Steps, width: int) -> int:
    banks: dict[int, set[int]] = {}
    for at in _addresses(digits):
        for word in range(at // 4, (at + max(4, width) - 1) // 4 + 1):
            banks.setdefault(word % 32, set()).add(word)
    return max(len(words) for words in banks.values())


def _warp(digits: Steps) -> Steps:
    """Returns the digits that differ within a warp."""
    found, threads = [], 1
    for n, step in digits:
        if n > 1 and threads < 32:
            found.append((n if threads * n < 32 else -(-32 // threads), step))
        threads *= n
    return tuple(found)


def _addresses(digits: Steps) -> list[int]:
    """Returns where the threads of a warp are, in bytes."""
    found = [0]
    for n, step in digits:
        found = [at + k * step for k in range(n) for at in found]
    return found[:32]
