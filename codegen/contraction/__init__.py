"""The contraction family: matrix products and convolutions, in the form that is fastest on an architecture.

wgmma  tiles multiplied by warpgroups, brought by the copy engine (Hopper, `codegen.contraction.wgmma`).
mma    tiles multiplied by warps, brought by asynchronous copies, any strides (`codegen.contraction.mma`).
simt   multiply-adds of single threads, any dtype, any strides, everywhere (`codegen.contraction.simt`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

from codegen.anonymous import anonymous
from codegen.contraction import mma as contraction_mma
from codegen.contraction import mma_schedule as contraction_mma_schedule
from codegen.contraction import simt as contraction_simt
from codegen.contraction import simt_schedule as contraction_simt_schedule
from codegen.contraction import wgmma as contraction_wgmma
from codegen.contraction import wgmma_schedule as contraction_wgmma_schedule
from codegen.contraction.mma_schedule import MmaSchedule
from codegen.contraction.simt_schedule import SimtSchedule
from codegen.contraction.wgmma_layout import WgmmaSchedule
from codegen.declined import Declined
from codegen.spec import ContractionSpec, KernelSource
from codegen.target import Target
from codegen.tiles import ROW_BYTES
from codegen.ways import product_types

#: How much faster than a form in front of it one must be estimated to be taken, and the cycles it must save: the
#: estimates are as good as that.
CLEARLY, LEAST_SAVED = 1.15, 3000.0
#: Schedules of the form that is taken, and of each other one, that come first; simt is another only where it is
#: estimated to take at most so many times as long.
FIRST, OTHERS, HOPELESS = 8, 2, 2.0

ContractionSchedule: TypeAlias = WgmmaSchedule | MmaSchedule | SimtSchedule


def schedules(spec: ContractionSpec, target: Target) -> tuple[ContractionSchedule, ...]:
    """The schedules worth trying, best guess first; among the first 12 are some of every form that takes the spec."""
    spec = anonymous(spec)
    estimates = _estimates(spec, target)
    taken = _taken(estimates)
    every: dict[str, tuple[ContractionSchedule, ...]] = {n: _FORMS[n].schedules(spec, target) for n in estimates}
    if taken == "simt" or contraction_simt_schedule.cycles(spec, target) <= HOPELESS * estimates[taken]:
        every["simt"] = contraction_simt_schedule.schedules(spec, target)
    first = every.pop(taken)
    others = tuple(s for form in every.values() for s in form[:OTHERS])
    rest = tuple(s for form in every.values() for s in form[OTHERS:])
    return (*first[:FIRST], *others, *first[FIRST:], *rest)


def cycles(spec: ContractionSpec, target: Target) -> float:
    """Cycles that the best schedule is estimated to take, by the form's cost model."""
    estimates = _estimates(anonymous(spec), target)
    taken = _taken(estimates)
    return contraction_simt_schedule.cycles(spec, target) if taken == "simt" else estimates[taken]


def form(spec: ContractionSpec, target: Target) -> str:
    """The form that a spec has untuned: the first in the list above that takes it, unless another is clearly faster."""
    return _taken(_estimates(anonymous(spec), target))


def _taken(estimates: Mapping[str, float]) -> str:
    """The form that is taken, of those with these estimates and simt."""
    first = next(iter(estimates), "simt")
    best = min(estimates, key=estimates.__getitem__, default=first)
    clearly = best != first and max(CLEARLY * estimates[best], estimates[best] + LEAST_SAVED) < estimates[first]
    return best if clearly else first


def declined(spec: ContractionSpec, target: Target) -> dict[str, str]:
    """Why the forms that are faster in general than the one taken are not taken, by form."""
    estimates = _estimates(anonymous(spec), target)
    taken, reasons = _taken(estimates), {}
    for name, candidate in _FORMS.items():
        if name == taken:
            break
        if name in estimates:
            reasons[name] = f"it is estimated to take {estimates[name] / estimates[taken]:.2f} times as long as {taken}"
            continue
        try:
            candidate.cycles(spec, target)
        except Declined as reason:
            reasons[name] = str(reason)
    return reasons


def keeps_form(spec: ContractionSpec, target: Target) -> bool:
    """Whether a spec that reduces parts of its results has the form that it would have without."""
    plain = replace(spec, partials=())
    return all(form(spec, x) == form(plain, x) for x in {target, target.planned})


@lru_cache(1024)
def _estimates(spec: ContractionSpec, target: Target) -> Mapping[str, float]:
    """Estimated cycles of the forms that use tensor cores, of those that take a spec; it is anonymous, so that layers
    that are alike are one.
    """
    found = {}
    for name, candidate in _FORMS.items():
        try:
            found[name] = candidate.cycles(spec, target)
        except Declined:
            continue
    return found


class _Form(Protocol):
    """A module with the schedules of a form."""

    def schedules(self, spec: ContractionSpec, target: Target) -> tuple[ContractionSchedule, ...]: ...

    def cycles(self, spec: ContractionSpec, target: Target) -> float: ...


_FORMS: dict[str, _Form] = {"wgmma": contraction_wgmma_schedule, "mma": contraction_mma_schedule}


def coarse_products(spec: ContractionSpec, schedule: Any) -> int | None:
    """How many fp8 products a kernel lets tensor cores add up in the 14 bits that some of them keep, before it adds up
    these sums in float32; 0 for all of them, None if there are no such sums.
    """
    if isinstance(schedule, WgmmaSchedule):
        types = contraction_wgmma_schedule.operand_types(spec, bool(schedule.fillers) or schedule.computes)
        if contraction_wgmma_schedule.adds_up_stages(spec, types):
            return ROW_BYTES
    elif isinstance(schedule, MmaSchedule):
        types = product_types(spec, schedule.widen)
    else:
        return None
    return 0 if types[0].startswith("float8") else None


def render(spec: ContractionSpec, schedule: ContractionSchedule) -> KernelSource:
    """The kernel of a spec as CUDA C."""
    if isinstance(schedule, WgmmaSchedule):
        return contraction_wgmma.render(spec, schedule)
    if isinstance(schedule, MmaSchedule):
        return contraction_mma.render(spec, schedule)
    return contraction_simt.render(spec, schedule)
