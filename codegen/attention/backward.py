"""The family of attention's gradients, in the fastest form an architecture has.

joined  all gradients by one kernel, by warpgroups (Hopper, `codegen.attention.backward_joined`); asked for by the spec.
wgmma  all products by warpgroups, tiles brought by the copy engine (Hopper, `codegen.attention.backward_wgmma`).
mma    all products by warps, tiles brought by asynchronous copies, any strides (`codegen.attention.backward_mma`).
simt   multiply-adds of single threads, any dtype, any strides, everywhere (`codegen.attention.backward_simt`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from codegen.attention import backward_joined, forms
from codegen.attention import backward_mma as attention_backward_mma
from codegen.attention import backward_simt as attention_backward_simt
from codegen.attention import backward_wgmma as attention_backward_wgmma
from codegen.attention import backward_wgmma_schedule as attention_backward_wgmma_schedule
from codegen.attention.backward_joined import AttentionBackwardJoinedSchedule
from codegen.attention.backward_mma import AttentionBackwardMmaSchedule
from codegen.attention.backward_simt import AttentionBackwardSimtSchedule
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.backward_wgmma_schedule import AttentionBackwardWgmmaSchedule
from codegen.spec import KernelSource
from codegen.target import Target

AttentionBackwardSchedule: TypeAlias = (
    AttentionBackwardJoinedSchedule
    | AttentionBackwardWgmmaSchedule
    | AttentionBackwardMmaSchedule
    | AttentionBackwardSimtSchedule
)

_FASTEST: dict[str, Callable[[AttentionBackwardSpec, Target], tuple[AttentionBackwardSchedule, ...]]] = {
    "wgmma": attention_backward_wgmma_schedule.schedules,
    "mma": attention_backward_mma.schedules,
}


def schedules(spec: AttentionBackwardSpec, target: Target) -> tuple[AttentionBackwardSchedule, ...]:
    """The schedules worth trying, best guess first: those of the first form in the list above that takes the spec.

    Raises Declined if none does.  Only the joined form computes sums of queries and of keys together.
    """
    if spec.joined:
        return backward_joined.schedules(spec, target)
    found = forms.first(_FASTEST, spec, target)
    return attention_backward_simt.schedules(spec) if found is None else found


def declined(spec: AttentionBackwardSpec, target: Target) -> dict[str, str]:
    """Why the forms that are faster than the one taken do not take a spec, by form."""
    return {} if spec.joined else forms.declined(_FASTEST, spec, target)


def render(spec: AttentionBackwardSpec, schedule: AttentionBackwardSchedule) -> KernelSource:
    """The kernel of a spec as CUDA C."""
    if isinstance(schedule, AttentionBackwardJoinedSchedule):
        return backward_joined.render(spec, schedule)
    if isinstance(schedule, AttentionBackwardWgmmaSchedule):
        return attention_backward_wgmma.render(spec, schedule)
    if isinstance(schedule, AttentionBackwardMmaSchedule):
        return attention_backward_mma.render(spec, schedule)
    return attention_backward_simt.render(spec, schedule)
