"""The order in which schedules are tried: cost models rank them, but none sees everything."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from math import inf
from operator import itemgetter
from typing import TypeVar

C = TypeVar("C")
S = TypeVar("S")
#: Sums in another order may be so much larger.
ROUNDED = 1 - 1e-9


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


def least(
    candidates: Iterable[tuple[float, C]], estimated: Callable[[C], tuple[float, S] | None]
) -> tuple[float, S] | None:
    """Returns the least estimated time of candidates, and the schedule, the first of equals; None if none has one.

    ``candidates`` are times below which no estimate is, about, and what ``estimated`` takes.  Those that cannot be the
    least are not estimated.
    """
    best: tuple[float, int, S] | None = None
    for bound, number, candidate in sorted(((b * ROUNDED, n, c) for n, (b, c) in enumerate(candidates)), key=_FIRST):
        if best is not None and bound > best[0]:
            break
        found = estimated(candidate)
        if found is not None and (best is None or (found[0], number) < best[:2]):
            best = found[0], number, found[1]
    return None if best is None else (best[0], best[2])


_FIRST = itemgetter(0)
