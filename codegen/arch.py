"""What an ``sm_XX`` has: the limits schedules must respect and the instructions renderers may use.

Limits are those of the CUDA C++ Programming Guide (CUDA 13), table 27, "Technical Specifications per Compute
Capability"; of 10.3 and 12.1, which it does not list, those of ``cuda/__device/arch_traits.h`` in NVIDIA's CCCL.  How
registers and shared memory are given out is in ``cuda_occupancy.h`` of the CUDA toolkit.  Instruction availability
follows the PTX ISA's target notes.  An ``a`` suffix names an architecture-specific target: its cubin runs on that
compute capability only, and it alone has the instructions that NVIDIA does not carry forward (wgmma, tcgen05).
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024

WARP = 32
SECTOR_BYTES = 32  # that memory and the L2 cache move at least
LINE_BYTES = 128  # of a line of the caches
MAX_THREADS_PER_BLOCK = 1024
MAX_REGISTERS_PER_THREAD = 255
REGISTERS_PER_SM = 64 << 10
DEFAULT_SHARED_BYTES_PER_BLOCK = 48 * KIB
RESERVED_SHARED_BYTES_PER_BLOCK = 1 * KIB

_REGISTER_UNIT = 256
_SHARED_UNIT = 128
_PARTITIONS = 4


@dataclass(frozen=True)
class Arch:
    """One compilation target.

    name                    as NVRTC's ``--gpu-architecture`` takes it, ``"sm_90a"``.
    major, minor            the compute capability.
    shared_bytes_per_block  most shared memory of one block, in bytes, static and dynamic together, after opting in;
                            without opting in a kernel has ``DEFAULT_SHARED_BYTES_PER_BLOCK``.
    shared_bytes_per_sm     shared memory of one SM, in bytes; each resident block takes
                            ``RESERVED_SHARED_BYTES_PER_BLOCK`` of it beyond what it asks for.
    max_threads_per_sm      resident threads of one SM.
    max_blocks_per_sm       resident blocks of one SM.
    registers_per_sm        32-bit registers of one SM.
    has_cp_async            asynchronous copies global to shared of 4, 8 or 16 bytes (``cp.async``).
    has_fp8_convert         conversions between float and e4m3/e5m2 as instructions (``cvt.rn.satfinite.e4m3x2.f32``).
    has_fp8_mma             ``mma.sync`` on e4m3/e5m2 operands.
    has_clusters            thread-block clusters and distributed shared memory.
    has_pdl                 programmatic dependent launch (``griddepcontrol``).
    has_wgmma               warpgroup matrix multiply (``wgmma.mma_async``) and ``setmaxnreg``.
    """

    name: str
    major: int
    minor: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    registers_per_sm: int
    has_cp_async: bool
    has_fp8_convert: bool
    has_fp8_mma: bool
    has_clusters: bool
    has_pdl: bool
    has_wgmma: bool

    @property
    def compute_capability(self) -> tuple[int, int]:
        return (self.major, self.minor)

    @property
    def max_warps_per_sm(self) -> int:
        return self.max_threads_per_sm // WARP

    def blocks_per_sm(self, threads: int, registers: int, shared_bytes: int = 0) -> int:
        """Returns how many blocks are resident on one SM, 0 where not even one fits.

        ``threads`` and ``shared_bytes`` (static and dynamic) are those of a block, ``registers`` those of a thread.
        The rule is the CUDA occupancy calculator's: registers are given to warps in units of 256 from one of four
        partitions, shared memory to blocks in units of 128 bytes.  Raises ValueError for negative counts or no threads.
        """
        if threads < 1 or registers < 0 or shared_bytes < 0:
            raise ValueError(f"no such block: {threads} threads, {registers} registers, {shared_bytes} shared bytes")
        if threads > MAX_THREADS_PER_BLOCK or registers > MAX_REGISTERS_PER_THREAD:
            return 0
        if shared_bytes > self.shared_bytes_per_block:
            return 0
        block_shared = _round_up(shared_bytes + RESERVED_SHARED_BYTES_PER_BLOCK, _SHARED_UNIT)
        return min(
            self.max_blocks_per_sm,
            self.max_warps_per_sm // -(-threads // WARP),
            blocks_of_registers(threads, registers),
            self.shared_bytes_per_sm // block_shared,
        )

    def least_shared_bytes(self, blocks: int) -> int:
        """Returns the least shared bytes of a block, static and dynamic, of which one SM holds no more than so many."""
        units = self.shared_bytes_per_sm // (blocks + 1) // _SHARED_UNIT + 1
        return units * _SHARED_UNIT - RESERVED_SHARED_BYTES_PER_BLOCK

    def registers_at_launch(self, threads: int, blocks: int = 1) -> int:
        """Returns how many registers of a block its warpgroups may pass on (setmaxnreg), ``blocks`` blocks to an SM.

        The compiler gives every thread as many as fit, a multiple of 8.  There are never more: a warpgroup that asks
        for more than the others have given up waits forever.
        """
        return threads * min(self.registers_per_sm // (threads * blocks) // 8 * 8, 256)

    def __repr__(self) -> str:
        return self.name


def blocks_of_registers(threads: int, registers: int) -> int:
    """Returns for how many blocks of so many threads the registers of an SM suffice, on any architecture."""
    warp_registers = _round_up(max(registers, 1) * WARP, _REGISTER_UNIT)
    return REGISTERS_PER_SM // _PARTITIONS // warp_registers * _PARTITIONS // -(-threads // WARP)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _arch(name: str, *, shared_kib: int, threads: int, blocks: int) -> Arch:
    digits = name.removeprefix("sm_")
    specific = digits.endswith("a")
    number = int(digits.removesuffix("a"))
    return Arch(
        name=name,
        major=number // 10,
        minor=number % 10,
        shared_bytes_per_block=shared_kib * KIB - RESERVED_SHARED_BYTES_PER_BLOCK,
        shared_bytes_per_sm=shared_kib * KIB,
        max_threads_per_sm=threads,
        max_blocks_per_sm=blocks,
        registers_per_sm=REGISTERS_PER_SM,
        has_cp_async=number >= 80,
        has_fp8_convert=number >= 89,
        has_fp8_mma=number >= 89,
        has_clusters=number >= 90,
        has_pdl=number >= 90,
        has_wgmma=specific and number == 90,
    )


#: The oldest architecture that kernels are written for, and CUDA 13 supports, as compute capability times ten.
OLDEST = 75
KNOWN: dict[str, Arch] = {
    known.name: known
    for known in (
        _arch("sm_80", shared_kib=164, threads=2048, blocks=32),
        _arch("sm_86", shared_kib=100, threads=1536, blocks=16),
        _arch("sm_87", shared_kib=164, threads=1536, blocks=16),
        _arch("sm_89", shared_kib=100, threads=1536, blocks=24),
        _arch("sm_90", shared_kib=228, threads=2048, blocks=32),
        _arch("sm_90a", shared_kib=228, threads=2048, blocks=32),
        _arch("sm_100", shared_kib=228, threads=2048, blocks=32),
        _arch("sm_100a", shared_kib=228, threads=2048, blocks=32),
        _arch("sm_103", shared_kib=228, threads=2048, blocks=32),
        _arch("sm_103a", shared_kib=228, threads=2048, blocks=32),
        _arch("sm_110", shared_kib=228, threads=1536, blocks=24),
        _arch("sm_110a", shared_kib=228, threads=1536, blocks=24),
        _arch("sm_120", shared_kib=100, threads=1536, blocks=24),
        _arch("sm_120a", shared_kib=100, threads=1536, blocks=24),
        _arch("sm_121", shared_kib=100, threads=1536, blocks=24),
        _arch("sm_121a", shared_kib=100, threads=1536, blocks=24),
    )
}


def arch(name: str) -> Arch:
    """Returns the architecture of that name.  Raises ValueError, listing the known names, for any other."""
    try:
        return KNOWN[name]
    except KeyError:
        raise ValueError(f"unknown architecture {name!r}; known: {', '.join(KNOWN)}") from None


def from_compute_capability(major: int, minor: int) -> Arch:
    """Returns the target to compile for on a device of that compute capability.

    9.0 is ``sm_90a``, 12.0 ``sm_120a``: code for such a device may use what NVIDIA does not carry forward.  A minor
    version not listed gets an architecture of the same major version and a lower minor one, whose cubins the device
    runs; among those, the one with the least shared memory, so that no schedule asks for more than the device has.
    Raises ValueError where there is none: cubins do not run across major versions.
    """
    for name in (f"sm_{major}{minor}a", f"sm_{major}{minor}"):
        if name in KNOWN:
            return KNOWN[name]
    portable = [known for known in KNOWN.values() if known.major == major and not known.name.endswith("a")]
    older = [known for known in portable if known.minor < minor]
    if not older:
        raise ValueError(f"no architecture for compute capability {major}.{minor}; known: {', '.join(KNOWN)}")
    return min(older, key=lambda known: (known.shared_bytes_per_sm, known.max_threads_per_sm, known.minor))
