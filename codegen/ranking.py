"""The order in which schedules are tried: cost models rank them, but none sees everything."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import inf
from typing import TypeVar

S = TypeVar("S")


def in_order(
    ranked: Sequence[tuple[float, S]], kind: Callable[[S], Hashable], *, first: int = 0, hopeless: float = inf
) -> tuple[S, ...]:
    """Returns schedules in the order in which they are worth trying, each once.

    The ``first`` ones come first, then the best of every kind, unless it is estimated to take more than ``hopeless``
    times as long as the best of all, then the others.  ``ranked`` are estimated times and schedules, the least first.
    """
    leaders: dict[Hashable, S] = {}
    for time, schedule in ranked:
        if time <= hopeless * ranked[0][0]:
            leaders.setdefault(kind(schedule), schedule)
    every = [schedule for _, schedule in ranked]
    return tuple(dict.fromkeys([*every[:first], *leaders.values(), *every]))
