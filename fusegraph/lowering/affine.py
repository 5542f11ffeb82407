"""Coordinates that are affine functions of a kernel's, and where a dimension of its space is split for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Affine:
    """A coordinate of a tensor as a function of the kernel's: start plus a step for each dimension of its space."""

    steps: tuple[int, ...]
    start: int = 0

    def ends(self, space: Sequence[int]) -> tuple[int, int]:
        """Returns the least and the largest that it is in a space."""
        reach = [step * (size - 1) for step, size in zip(self.steps, space)]
        return self.start + sum(min(r, 0) for r in reach), self.start + sum(max(r, 0) for r in reach)


def total(terms: Sequence[tuple[Affine, int]], rank: int, start: int = 0) -> Affine:
    """Returns the sum of coordinates times numbers, in a space of so many dimensions."""
    columns = zip(*([step * factor for step in c.steps] for c, factor in terms))
    steps = tuple(sum(column) for column in columns) if terms else (0,) * rank
    return Affine(steps, start + sum(c.start * factor for c, factor in terms))


class Split(Exception):
    """Raised where a coordinate becomes affine if a dimension of the space is split in two; the inner has ``size``."""

    def __init__(self, dim: int, size: int) -> None:
        self.dim, self.size = dim, size

    def place(self, parts: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Returns what is split: the dimension of the written tensors, and the part of that."""
        return [(d, k) for d, sizes in enumerate(parts) for k in range(len(sizes))][self.dim]

    def split(self, parts: list[list[int]]) -> None:
        """Splits a part in two."""
        d, k = self.place(parts)
        parts[d][k : k + 1] = [parts[d][k] // self.size, self.size]
