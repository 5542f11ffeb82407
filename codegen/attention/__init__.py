"""The attention family: softmax(scores of queries and keys) times values, in the fastest form an architecture has.

wgmma  both products by warpgroups, tiles brought by the copy engine (Hopper, `codegen.attention.wgmma`).
mma    both products by warps, tiles brought by asynchronous copies, any strides (`codegen.attention.mma`).
simt   multiply-adds of single threads, any dtype, any strides, everywhere (`codegen.attention.simt`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from codegen.attention import forms
from codegen.attention import mma as attention_mma
from codegen.attention import simt as attention_simt
from codegen.attention import wgmma as attention_wgmma
from codegen.attention import wgmma_schedule as attention_wgmma_schedule
from codegen.attention.mma import AttentionMmaSchedule
from codegen.attention.simt import AttentionSimtSchedule
from codegen.attention.wgmma_schedule import AttentionWgmmaSchedule
from codegen.spec import AttentionSpec, KernelSource
from codegen.target import Target

AttentionSchedule: TypeAlias = AttentionWgmmaSchedule | AttentionMmaSchedule | AttentionSimtSchedule

_FASTEST: dict[str, Callable[[AttentionSpec, Target], tuple[AttentionSchedule, ...]]] = {
    "wgmma": attention_wgmma_schedule.schedules,
    "mma": attention_mma.schedules,
}


def schedules(spec: AttentionSpec, target: Target) -> tuple[AttentionSchedule, ...]:
    """The schedules worth trying, best guess first: those of the first form in the list above that takes the spec.

    Raises Declined if none does.
    """
    found = forms.first(_FASTEST, spec, target)
    return attention_simt.schedules(spec) if found is None else found


def declined(spec: AttentionSpec, target: Target) -> dict[str, str]:
    """Why the forms that are faster than the one taken do not take a spec, by form."""
    return forms.declined(_FASTEST, spec, target)


def coarse_products(spec: AttentionSpec, schedule: Any) -> int | None:
    """The most products of 8-bit floats that tensor cores add up, in fewer bits than float32; None if it has all."""
    if not isinstance(schedule, AttentionWgmmaSchedule) or not attention_wgmma_schedule.narrow(spec):
        return None
    return max(schedule.keys, spec.depth)


def render(spec: AttentionSpec, schedule: AttentionSchedule) -> KernelSource:
    """The kernel of a spec as CUDA C."""
    if isinstance(schedule, AttentionWgmmaSchedule):
        return attention_wgmma.render(spec, schedule)
    if isinstance(schedule, AttentionMmaSchedule):
        source = attention_mma.render(spec, schedule)
    else:
        source = attention_simt.render(spec, schedule)
    if spec.order is None:
        return source
    return replace(source, parameters=tuple(range(len(spec.read) + len(spec.loads) + len(spec.written))))
