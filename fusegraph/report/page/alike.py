"""Layers that are alike: stretches of kernels that come several times in a row."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

#: The longest layer that is looked for, in kernels, and how many kernels a page must get shorter by folding layers.
LONGEST, LEAST_FOLDED = 80, 3


@dataclass(frozen=True)
class Repeat:
    """Kernels from ``first`` on: ``count`` layers of ``length`` kernels each."""

    first: int
    length: int
    count: int


def repeats(keys: Sequence[Hashable]) -> list[Repeat]:
    """Returns the stretches of a sequence of kernels, of which equal ones have equal keys, in their order."""
    found: list[Repeat] = []
    at = 0
    while at < len(keys):
        best = max((_from(keys, at, length) for length in range(1, LONGEST + 1)), key=_folded)
        if _folded(best) >= LEAST_FOLDED:
            found.append(best)
            at += best.length * best.count
        else:
            at += 1
    return found


def _folded(repeat: Repeat) -> int:
    return repeat.length * (repeat.count - 1)


def _from(keys: Sequence[Hashable], first: int, length: int) -> Repeat:
    """Returns how often the kernels from ``first`` on come again, if a layer has this length."""
    at = first + length
    while (
        at + length <= len(keys) and keys[at] == keys[first] and keys[at : at + length] == keys[first : first + length]
    ):
        at += length
    return Repeat(first, length, (at - first) // length)
