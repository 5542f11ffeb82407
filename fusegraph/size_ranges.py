"""Ranges of the sizes of symbols: their ends, sizes in between that tell what all have in common, and their parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, log, prod

from codegen.sizes import Bounds
from fusegraph.dims import corner, generic

#: Remainders of sizes that a decision may depend on unseen: strides and units are rarely more.
RESIDUES = 8


@dataclass(frozen=True)
class Range:
    """Sizes between bounds, both included, by the names of symbols."""

    bounds: Mapping[str, Bounds]

    def __contains__(self, sizes: object) -> bool:
        assert isinstance(sizes, Mapping)
        return all(low <= sizes[name] <= high for name, (low, high) in self.bounds.items())

    @property
    def varying(self) -> dict[str, Bounds]:
        """Its bounds where they differ."""
        return {name: bounds for name, bounds in self.bounds.items() if bounds.min < bounds.max}

    def end(self, which: str) -> dict[str, int]:
        """Returns sizes at its end "min" or "max", or near it where they are divided by less."""
        return {name: low for name, (low, _) in self.bounds.items()} | corner(self.varying, which)

    @property
    def ends(self) -> list[dict[str, int]]:
        """Sizes at both ends, and those near them that are divided by less."""
        found = [{name: bounds[which] for name, bounds in self.bounds.items()} for which in (0, 1)]
        return [*found, *(near for near in map(self.end, ("min", "max")) if near not in found)]

    @property
    def probes(self) -> list[dict[str, int]]:
        """Sizes at which what holds at its ends might not: one small and another large, and `RESIDUES` in a row."""
        found = []
        for here, others in ((0, 1), (1, 0)):
            rest = {name: bounds[others] for name, bounds in self.bounds.items()}
            found += [rest, *(rest | {name: bounds[here]} for name, bounds in self.varying.items())]
        for n in range(RESIDUES):
            steps = {name: (2 * axis + 1) * n % RESIDUES for axis, name in enumerate(self.bounds)}
            found.append({name: (low + high) // 2 for name, (low, high) in self.bounds.items()})
            for name, (low, high) in self.varying.items():
                found[-1][name] = low + ((high - low) // 2 + steps[name]) % (high - low + 1)
        return [sizes for n, sizes in enumerate(found) if sizes not in found[:n]]

    def between(self, count: int) -> list[dict[str, int]]:
        """Returns sizes that are spread evenly over it, in logarithms, and are divided by little."""
        varying = self.varying
        root = 2.0
        for _ in range(30):  # the root of x ** (d + 1) = x + 1: multiples of its powers fill the d dimensions evenly
            root = (1 + root) ** (1 / (len(varying) + 1))
        made = []
        for number in range(1, count + 1):
            sizes = {name: low for name, (low, _) in self.bounds.items()}
            for axis, (name, (low, high)) in enumerate(varying.items(), 1):
                part = number / root**axis % 1
                sizes[name] = generic(round(max(low, 1) * (high / max(low, 1)) ** part), low, high)
            made.append(sizes)
        return made

    @property
    def spread(self) -> float:
        """How many times its largest size is its smallest one, in the dimension where that is most."""
        return max((b.max / max(b.min, 1) for b in self.varying.values()), default=1.0)

    def share(self, bounds: Mapping[str, Bounds]) -> float:
        """Returns the share of sizes between some bounds, in logarithms, that are in it."""
        spans = [log((b.max + 1) / max(b.min, 0.5)) for b in (*self.bounds.values(), *bounds.values())]
        return prod(spans[: len(self.bounds)]) / prod(spans[len(self.bounds) :])

    def longest(self, among: Iterable[str]) -> list[str]:
        """Returns symbols, those first whose largest size is the most times their smallest one."""
        return sorted(among, key=lambda n: self.bounds[n].max / max(self.bounds[n].min, 1), reverse=True)

    def halves(self, among: Sequence[str] = ()) -> tuple[Range, Range] | None:
        """Returns it cut at the middle of its longest dimension, or of ``among`` some; None if it is one size."""
        if not self.varying:
            return None
        name, *_ = self.longest(among or self.varying)
        low, high = self.bounds[name]
        return self.cut(name, max(isqrt(max(low, 1) * high), low))

    def cut(self, name: str, last: int) -> tuple[Range, Range]:
        """Returns it in two, the first of them up to a ``last`` size of a symbol."""
        low, high = self.bounds[name]
        first, second = (Range({**self.bounds, name: Bounds(*part)}) for part in ((low, last), (last + 1, high)))
        return first, second

    def joined(self, other: Range) -> Range | None:
        """Returns the range of both where this one ends as the other begins, and nothing else is different."""
        apart = [name for name in self.bounds if self.bounds[name] != other.bounds[name]]
        if len(apart) != 1 or self.bounds[apart[0]].max + 1 != other.bounds[apart[0]].min:
            return None
        return Range({**self.bounds, apart[0]: Bounds(self.bounds[apart[0]].min, other.bounds[apart[0]].max)})

    def __str__(self) -> str:
        return ", ".join(
            f"{name} = {b.min}" if b.min == b.max else f"{name} {b.min} to {b.max}" for name, b in self.bounds.items()
        )
