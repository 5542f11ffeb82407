"""The contraction family: matrix products and convolutions, in the fastest form that an architecture has for them.

wgmma  tiles multiplied by warpgroups, brought by the copy engine (Hopper, `codegen.contraction_wgmma`).
mma    tiles multiplied by warps, brought by asynchronous copies, any strides (`codegen.contraction_mma`).
simt   multiply-adds of single threads, any dtype, any strides, everywhere (`codegen.contraction_simt`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from codegen import (
    contraction_mma,
    contraction_mma_schedule,
    contraction_simt,
    contraction_simt_schedule,
    contraction_wgmma,
    contraction_wgmma_schedule,
)
from codegen.arch import Arch, arch
from codegen.contraction_mma_schedule import MmaSchedule
from codegen.contraction_simt_schedule import SimtSchedule
from codegen.contraction_wgmma_layout import WgmmaSchedule
from codegen.spec import ContractionSpec, KernelSource
from codegen.tiles import ROW_BYTES, Unsupported

ContractionSchedule: TypeAlias = WgmmaSchedule | MmaSchedule | SimtSchedule


def schedules(spec: ContractionSpec, arch: Arch) -> tuple[ContractionSchedule, ...]:
    """The schedules worth trying, best guess first: those of the first form in the list above that takes the spec."""
    for form in _FASTEST.values():
        try:
            return form(spec, arch)
        except Unsupported:
            continue
    return contraction_simt_schedule.schedules(spec)


def cycles(spec: ContractionSpec, arch: Arch) -> float:
    """Cycles that the best schedule is estimated to take: what the form's cost model says, which is for an H200."""
    for estimate in (contraction_wgmma_schedule.cycles, contraction_mma_schedule.cycles):
        try:
            return estimate(spec, arch)
        except Unsupported:
            continue
    return contraction_simt_schedule.cycles(spec)


def declined(spec: ContractionSpec, arch: Arch) -> dict[str, str]:
    """Why the forms that are faster than the one taken do not take a spec, by form."""
    reasons = {}
    for name, form in _FASTEST.items():
        try:
            form(spec, arch)
        except Unsupported as reason:
            reasons[name] = str(reason)
        else:
            break
    return reasons


def coarse_products(spec: ContractionSpec, schedule: Any) -> int | None:
    """How many fp8 products a kernel lets tensor cores add up in the 14 bits that some of them keep, before it adds up
    these sums in float32; 0 for all of them, None if there are no such sums.
    """
    if isinstance(schedule, WgmmaSchedule):
        types = contraction_wgmma_schedule.operand_types(spec, bool(schedule.fillers) or schedule.computes)
        if contraction_wgmma_schedule.adds_up_stages(spec, types):
            return ROW_BYTES
    elif isinstance(schedule, MmaSchedule):
        types = contraction_mma_schedule.product_types(spec, schedule.widen)
    else:
        return None
    return 0 if types[0].startswith("float8") else None


def keeps_form(spec: ContractionSpec) -> bool:
    """Whether a spec that reduces parts of its results has the form that it would have without, on all
    architectures.
    """
    plain = replace(spec, partials=())
    return all(len(declined(spec, x)) == len(declined(plain, x)) for x in (arch("sm_80"), arch("sm_90a")))


_FASTEST: dict[str, Callable[[ContractionSpec, Arch], tuple[ContractionSchedule, ...]]] = {
    "wgmma": contraction_wgmma_schedule.schedules,
    "mma": contraction_mma_schedule.schedules,
}


def render(spec: ContractionSpec, schedule: ContractionSchedule) -> KernelSource:
    """The kernel of a spec as CUDA C."""
    if isinstance(schedule, WgmmaSchedule):
        return contraction_wgmma.render(spec, schedule)
    if isinstance(schedule, MmaSchedule):
        return contraction_mma.render(spec, schedule)
    return contraction_simt.render(spec, schedule)
