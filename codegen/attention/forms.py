"""Which form of a family takes a spec: attention's and its gradients' choose alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from codegen.declined import Declined
from codegen.target import Target

Spec = TypeVar("Spec")
Schedule = TypeVar("Schedule")


def first(
    forms: Mapping[str, Callable[[Spec, Target], tuple[Schedule, ...]]], spec: Spec, target: Target
) -> tuple[Schedule, ...] | None:
    """The schedules of the first form that takes a spec, None if none does (each raises Declined)."""
    for schedules in forms.values():
        try:
            return schedules(spec, target)
        except Declined:
            continue
    return None


def declined(
    forms: Mapping[str, Callable[[Spec, Target], tuple[Schedule, ...]]], spec: Spec, target: Target
) -> dict[str, str]:
    """Why the forms in front of the first one that takes a spec do not, by form."""
    reasons = {}
    for name, schedules in forms.items():
        try:
            schedules(spec, target)
        except Declined as reason:
            reasons[name] = str(reason)
        else:
            break
    return reasons
