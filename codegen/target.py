"""What kernels are planned for: an architecture, and a machine of it with its multiprocessors, caches and rates.

Cost models and passes take a `Target`; no other file knows a number of a machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from codegen import arch as archs
from codegen.arch import Arch

MIB = 1 << 20


#: The figures of a machine that are nowhere published: they are fits to the times of kernels (tools/fit_costs.py).
FITTED = ("launch_us", "memory_share", "l2_rate", "sm_rate")


@dataclass(frozen=True)
class Target:
    """An architecture and the figures of a machine.

    name         as users write it, ``"h200"``; the architecture's where that was given and no machine of it is listed.
    title        how the driver's name of such a device begins.
    arch         instructions, and limits of a block and of a multiprocessor.
    sms          multiprocessors.
    l2_bytes     size of the L2 cache.
    memory_rate  bytes that device memory moves in a microsecond, by its data sheet.
    clock        cycles of a multiprocessor in a microsecond; of the boost clock, unless measured or assumed.
    mma          multiply-adds of 16-bit elements that a multiprocessor does in a cycle by ``mma.sync``, added up in
                 float32; with ``wgmma`` those of warpgroups, 0 where there are none; with ``fma`` those of threads in
                 float32.  Published are operations a second without sparsity: 2 * mma * sms * boost clock.
    launch_us    microseconds that one more kernel takes.
    memory_share the share of ``memory_rate`` that kernels get which do nothing else.
    l2_rate      bytes that a multiprocessor gets from the L2 cache in a cycle.
    sm_rate      bytes that a multiprocessor gets from device memory in a cycle, if few ask for any.
    clusters     how many thread-block clusters of 1, 2, 3 ... blocks run at a time; if empty, as many as there are
                 multiprocessors for, though those of a cluster are neighbours.
    measured     the figures that were measured on such a machine; all others are published, as its entry says where.
    assumed      the figures that are another machine's, the nearest of which they are known.
    published    operations on 16 bits without sparsity in a microsecond, by its data sheet; 0 where that is not noted.
    planned_as   the target that graphs are planned for, if not this one: it decides on schedules alone.
    """

    name: str
    title: str
    arch: Arch
    sms: int
    l2_bytes: int
    memory_rate: float
    clock: float
    mma: float
    fma: float = 128
    wgmma: float = 0
    launch_us: float = 2.849
    memory_share: float = 0.875
    l2_rate: float = 70.0
    sm_rate: float = 50.0
    clusters: tuple[int, ...] = ()
    measured: tuple[str, ...] = ()
    assumed: tuple[str, ...] = FITTED
    published: float = 0
    planned_as: Target | None = None

    @property
    def bytes_per_cycle(self) -> float:
        """Bytes that device memory moves in a cycle."""
        return self.memory_rate / self.clock

    @property
    def launch_cycles(self) -> float:
        return self.launch_us * self.clock

    @property
    def planned(self) -> Target:
        """The target that graphs are planned for."""
        return self.planned_as or self

    @property
    def origins(self) -> str:
        """Where its figures are from."""
        known = (("measured", self.measured), ("of another machine", self.assumed))
        return "; ".join((*(f"{what}: {', '.join(names)}" for what, names in known if names), "published: all else"))

    def l2_share(self, share: float) -> int:
        """Returns how many bytes this share of the L2 cache has."""
        return round(share * self.l2_bytes)

    def clusters_of(self, blocks: int) -> int:
        """Returns how many clusters of ``blocks`` blocks run at a time."""
        return self.clusters[blocks - 1] if self.clusters else self.sms // blocks

    def __repr__(self) -> str:
        return self.name


# NVIDIA H200 data sheet: rate of memory, 1979 TFLOPS with sparsity.  OpenXLA's target_config/specs/h200.txtpb, read
# from a driver: multiprocessors.  What they do in a cycle, and the clock of those TFLOPS, 1830 MHz, are as on the H100.
_H200 = Target(
    "h200", "NVIDIA H200", archs.arch("sm_90a"), 132, 60 * MIB, 4.8e6, 1755, mma=1300, wgmma=2048,
    clusters=(132, 66, 39, 30, 22, 17, 15, 15), measured=("l2_bytes", "clock", "mma", *FITTED, "clusters"),
    assumed=(), published=989.4e6,
)  # fmt: skip
_FIGURES = ("sms", "l2_bytes", "memory_rate", "clock", "mma", "fma", "wgmma", *FITTED)
#: The machines whose figures are known, by name, under where they are published; the first stands for an architecture.
TARGETS: dict[str, Target] = {
    known.name: known
    for known in (
        # NVIDIA A100 data sheet, 80GB SXM: rate of memory, 312 TFLOPS.  NVIDIA A100 Tensor Core GPU Architecture
        # whitepaper: all else.
        Target("a100", "NVIDIA A100", archs.arch("sm_80"), 108, 40 * MIB, 2.039e6, 1410, mma=1024, fma=64,
               published=312e6),
        # NVIDIA L40S data sheet: rate of memory, cores, 733 TFLOPS with sparsity in bfloat16, whose sums are float32
        # (the 362.05 that it gives without are those of 2490 MHz).  CUDA's deviceQuery on an L40S: L2 cache, clock.
        Target("l40s", "NVIDIA L40S", archs.arch("sm_89"), 142, 96 * MIB, 0.864e6, 2520, mma=512),
        # NVIDIA Ada GPU Architecture whitepaper (v2.1), appendix A, table 2: all figures; 165.2 TFLOPS with sums in
        # float32, half of those with sums in float16.
        Target("rtx4090", "NVIDIA GeForce RTX 4090", archs.arch("sm_89"), 128, 72 * MIB, 1.008e6, 2520, mma=256),
        _H200,
        # NVIDIA H100 data sheet, SXM: rate of memory.  NVIDIA H100 Tensor Core GPU Architecture whitepaper, SXM5:
        # multiprocessors, L2 cache, fma, 989.4 TFLOPS at 1830 MHz.
        replace(_H200, name="h100", title="NVIDIA H100", l2_bytes=50 * MIB, memory_rate=3.35e6, measured=(),
                assumed=("clock", "mma", *FITTED, "clusters")),
        # NVIDIA Blackwell Architecture Technical Brief (V2.1), table 3, HGX B200: rate of memory (8 TB/s is a GB200's),
        # 75 TFLOPS in float32.  NVIDIA Blackwell Tuning Guide: L2 cache.  OpenXLA's target_config/specs/b200.txtpb,
        # read from a driver: multiprocessors, clock.  TFLOPS published for 16 bits are of tcgen05, not of mma.sync.
        Target("b200", "NVIDIA B200", archs.arch("sm_100a"), 148, 126 * MIB, 7.7e6, 1965, mma=1024,
               assumed=("mma", *FITTED)),
        # NVIDIA RTX Blackwell GPU Architecture whitepaper, table 3: 209.5 TFLOPS with sums in float32, half of those
        # with sums in float16, and all else but the L2 cache, which is as CUDA's deviceQuery tells on an RTX 5090.
        Target("rtx5090", "NVIDIA GeForce RTX 5090", archs.arch("sm_120a"), 170, 96 * MIB, 1.792e6, 2407, mma=256),
    )
}  # fmt: skip

#: Share by which the memory rate that a driver tells may differ from the published one of the same machine.
SAME_RATE = 0.06
#: The target of kernels that run on every machine, the CPU included.  It has what all architectures since Ampere have,
#: and schedules are made for as many multiprocessors; graphs are planned for the machine with the most measurements.
PORTABLE = replace(_H200, name="portable", title="any", arch=archs.arch("sm_80"), sms=108, mma=1024, planned_as=_H200)


def target(name: str) -> Target:
    """Returns the target of that name, or the listed one of an architecture ``sm_XX``.

    Without a listed machine, it gets the figures of the nearest older one, or of the oldest; if older than Ampere, none
    of the instructions that `Arch` lists.  Raises ValueError, with the known names, for other text.
    """
    if name in TARGETS:
        return TARGETS[name]
    arch, every = _arch(name), list(TARGETS.values())
    older = [t for t in every if t.arch.compute_capability <= arch.compute_capability] or every[:1]
    like = max(older, key=lambda t: (t.arch.compute_capability, t.arch == arch))  # the first among equals
    return like if like.arch == arch else replace(like, name=name, arch=arch, measured=(), assumed=_FIGURES)


def of_device(
    title: str, capability: tuple[int, int], sms: int, l2_bytes: int, clock: float, memory_rate: float
) -> Target:
    """Returns the target of a device: the listed one of its name and size, else one with the driver's figures.

    All others are those of its architecture's target.  Raises ValueError where kernels cannot run on such a device.
    """
    for known in TARGETS.values():
        # Cards of one name differ in their memory: an A100 of 40 GB moves three quarters of what one of 80 GB does.
        alike = abs(memory_rate - known.memory_rate) <= SAME_RATE * known.memory_rate
        if title.startswith(known.title) and sms == known.sms and alike:
            return known
    like = target(archs.from_compute_capability(*capability).name)
    read = ("sms", "l2_bytes", "clock", "memory_rate")
    return replace(
        like, name=like.arch.name, title=title, sms=sms, l2_bytes=l2_bytes, clock=clock, memory_rate=memory_rate,
        clusters=(), measured=read, assumed=tuple(name for name in _FIGURES if name not in read),
    )  # fmt: skip


def _arch(name: str) -> Arch:
    """Returns the architecture that schedules for ``sm_XX`` must respect; if not listed, the closest it contains."""
    if name in archs.KNOWN:
        return archs.KNOWN[name]
    found = re.fullmatch(r"sm_(\d{2,3})[af]?", name)
    number = int(found[1]) if found else 0
    if archs.OLDEST <= number < 80:
        return replace(
            PORTABLE.arch,
            name=name,
            major=number // 10,
            minor=number % 10,
            shared_bytes_per_block=64 * archs.KIB,
            shared_bytes_per_sm=64 * archs.KIB,
            max_threads_per_sm=1024,
            max_blocks_per_sm=16,
            has_cp_async=False,
        )
    try:
        return replace(archs.from_compute_capability(number // 10, number % 10), name=name)
    except ValueError:
        known = ", ".join((*TARGETS, *archs.KNOWN))
        raise ValueError(f"{name[:100]!r} is no target and no architecture; known: {known}") from None
