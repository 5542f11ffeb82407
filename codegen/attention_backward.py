"""The family of attention's gradients, in the fastest form an architecture has.

simt   multiply-adds of single threads, any dtype, any strides, everywhere (`codegen.attention_backward_simt`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from codegen import attention_backward_simt
from codegen.arch import Arch
from codegen.attention_backward_simt import AttentionBackwardSimtSchedule
from codegen.attention_backward_spec import AttentionBackwardSpec
from codegen.spec import KernelSource
from codegen.tiles import Unsupported

AttentionBackwardSchedule: TypeAlias = AttentionBackwardSimtSchedule

_FASTEST: dict[str, Callable[[AttentionBackwardSpec, Arch], tuple[AttentionBackwardSchedule, ...]]] = {}


def schedules(spec: AttentionBackwardSpec, arch: Arch) -> tuple[AttentionBackwardSchedule, ...]:
    """The schedules worth trying, best guess first: those of the first form in the list above that takes the spec.

    Raises Unsupported if none does.
    """
    for form in _FASTEST.values():
        try:
            return form(spec, arch)
        except Unsupported:
            continue
    return attention_backward_simt.schedules(spec)


def declined(spec: AttentionBackwardSpec, arch: Arch) -> dict[str, str]:
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


def render(spec: AttentionBackwardSpec, schedule: AttentionBackwardSchedule) -> KernelSource:
    """The kernel of a spec as CUDA C."""
    return attention_backward_simt.render(spec, schedule)
