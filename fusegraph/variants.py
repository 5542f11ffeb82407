"""The kernels of a group for a range of sizes: a few schedules, of which one is about as fast as the best at each size.

A schedule serves a range if the CUDA C of its kernel is the same at both ends.  So whatever Python made of a size's
value shows as a difference between two ends, never as a wrong kernel between them.  Which schedules a range needs, the
cost models tell at some sizes in it; where a few do not suffice, or have no model, the range is cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, isqrt

from codegen import Schedule, Target, best_schedule, distance, estimated, schedules
from codegen.declined import Declined
from codegen.naming import Identifiers
from codegen.sizes import Bounds, at, has_sums
from codegen.spec import KernelSource, KernelSpec
from fusegraph.dims import corner, generic
from fusegraph.passes.partition import Group
from fusegraph.plan import Choice, Chooser, Place, source_of

#: Where the ends of a range are at most so many times apart, one schedule may serve it that is not the best; and it is
#: not cut again.
NEAR, NARROW = 2.0, 1.05
#: A schedule serves a size if it is estimated to take at most so many times as long as the best.
TOLERANCE = 1.05
#: Without a cost model it serves those whose best schedule is nearer than that (`codegen.distance`).
NEARBY = 1.0
#: Schedules of a range at most, and sizes between its ends at which they are compared.
FEW, POINTS = 8, 32
#: Variants of a kernel at most.
MOST = 48


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

    def halves(self, among: Sequence[str] = ()) -> tuple[Range, Range] | None:
        """Returns it cut in two at the middle of its longest dimension, or of ``among`` some; None if it is narrow."""
        if not self.varying:
            return None
        name = max(among or self.varying, key=lambda n: self.bounds[n].max / max(self.bounds[n].min, 1))
        low, high = self.bounds[name]
        if high <= NARROW * max(low, 1):
            return self.halves() if among else None
        middle = max(isqrt(max(low, 1) * high), low)
        first, second = (Range({**self.bounds, name: Bounds(*part)}) for part in ((low, middle), (middle + 1, high)))
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


@dataclass(frozen=True)
class Variant:
    """A kernel for a range of sizes."""

    range: Range
    choice: Choice
    source: KernelSource


def fastest(variants: Sequence[Variant], spec: KernelSpec, sizes: Mapping[str, int], target: Target) -> Variant:
    """Returns the one of a specification's variants that is estimated to be the fastest at some sizes.

    Without a cost model this is the one nearest to the best schedule.
    """
    found = [v for v in variants if sizes in v.range]
    if len(found) == 1:
        return found[0]
    known = at(spec, sizes)
    cycles = [estimated(known, v.choice.schedule, target) for v in found]
    if all(c is None for c in cycles):
        best = best_schedule(known, target)
        return min(found, key=lambda v: distance(v.choice.schedule, best))
    return found[min(range(len(found)), key=lambda n: _or_inf(cycles[n]))]


def _or_inf(cycles: float | None) -> float:
    return inf if cycles is None else cycles


class Names:
    """Gives every kernel of a graph a name of its own; what is the same but for the name is the same kernel."""

    def __init__(self) -> None:
        self._known: dict[str, KernelSource] = {}
        self._names = Identifiers()

    def __call__(self, source: KernelSource) -> KernelSource:
        def named(name: str) -> KernelSource:
            return replace(source, name=name, code=re.sub(rf"\b{source.name}\b", name, source.code))

        key = repr(named(""))
        if key not in self._known:
            self._known[key] = named(self._names.unique(source.name))
        return self._known[key]


@dataclass(frozen=True)
class _Point:
    """A specification at one choice of sizes, and its best schedule there."""

    spec: KernelSpec
    best: Choice
    cycles: float | None


class Variants:
    """Finds the variants of a kernel.

    without  ranges for which there are none, and why.
    """

    def __init__(self, group: Group, choose: Chooser, place: Place, names: Names, target: Target) -> None:
        self._spec, self._group, self._choose, self._place = group.lowered.spec, group, choose, place
        self._named, self._target = names, target
        self._sums = has_sums(self._spec)
        self._points: dict[tuple[int, ...], _Point] = {}
        self._count = 0
        self.without: list[tuple[Range, str]] = []

    def of(self, range_: Range) -> tuple[Variant, ...]:
        """Returns variants for a range; sizes that none is for are in ``without``."""
        low, high = range_.end("min"), range_.end("max")
        sides = {name: low | {name: high[name]} for name in range_.varying}
        try:
            ends = [self._point(high, range_), self._point(low, range_)]
            others = {n: self._point(s, range_) for n, s in sides.items()}
            between = [] if range_.spread <= NEAR else [self._point(s, range_) for s in range_.between(POINTS)]
        except Declined as reason:
            self.without.append((range_, f"kernel {self._spec.name!r}: {reason}"))
            return ()
        found = self._few(range_, [*ends, *others.values(), *between])
        apart = [n for n, point in others.items() if self._regret(point, ends[1].best.schedule) > TOLERANCE]
        halves = range_.halves(apart)
        if not found and halves is None:
            found = self._any(range_, ends)
        if found or halves is None or self._count >= MOST:
            self._count += len(found)
            self.without += [] if found else [(range_, f"no schedule of kernel {self._spec.name!r} is for all of it")]
            return found
        return _joined([*self.of(halves[0]), *self.of(halves[1])])

    def _point(self, sizes: Mapping[str, int], range_: Range) -> _Point:
        """Returns the point at sizes that are divided by nothing; where n + 1 is a size, too, it may be beside them."""
        key = tuple(sizes.values())
        if key not in self._points:
            beside = [sizes]
            if self._sums:
                steps = product((0, 1), repeat=len(sizes))
                beside = [{name: n + step for (name, n), step in zip(sizes.items(), each)} for each in steps]
            points = [self._at(each) for each in beside if each in range_]
            self._points[key] = min(points, key=lambda point: getattr(point.best.schedule, "vector", 1))
        return self._points[key]

    def _at(self, sizes: Mapping[str, int]) -> _Point:
        spec = at(self._spec, sizes)
        best = self._choose(spec, self._group)
        return _Point(spec, best, estimated(spec, best.schedule, self._target))

    def _regret(self, point: _Point, schedule: Schedule) -> float:
        """Returns how many times as long as the best a schedule is estimated to take."""
        if schedule == point.best.schedule:
            return 1.0
        if point.cycles is None:
            return 1.0 if distance(schedule, point.best.schedule) < NEARBY else inf
        return _or_inf(estimated(point.spec, schedule, self._target)) / point.cycles

    def _few(self, range_: Range, points: Sequence[_Point]) -> tuple[Variant, ...]:
        """Returns variants of which one serves each point; none if there are no such."""
        candidates = {point.best.schedule: point.best for point in points}
        regrets = {s: [self._regret(point, s) for point in points] for s in candidates}
        left, found = set(range(len(points))), list[Variant]()
        while left and candidates and len(found) < FEW:
            serves = {s: {n for n in left if regrets[s][n] <= TOLERANCE} for s in candidates}
            schedule = max(serves, key=lambda s: len(serves[s]))
            choice = candidates.pop(schedule)
            if (source := self._source(range_, schedule)) is not None:
                found.append(Variant(range_, choice, source))
                left -= serves[schedule]
        if not left or range_.spread <= NEAR:
            return tuple(found)
        some = all(min(regrets[v.choice.schedule][n] for v in found) < inf for n in left) if found else False
        return tuple(found) if some and len(found) == FEW else ()

    def _any(self, range_: Range, ends: Sequence[_Point]) -> tuple[Variant, ...]:
        """Returns a variant whose schedule is worth trying at both ends of a narrow range."""
        high, low = (schedules(point.spec, self._target) for point in ends)
        for schedule in [s for s in high if s in frozenset(low)][:MOST]:
            if (source := self._source(range_, schedule)) is not None:
                return (Variant(range_, Choice(schedule), source),)
        return ()

    def _source(self, range_: Range, schedule: Schedule) -> KernelSource | None:
        """Returns the source of the kernel with a schedule if it is the same at both ends of a range, else None."""
        ends = (at(self._spec, range_.end(which), vary=True, within=range_.bounds) for which in ("min", "max"))
        try:
            low, high = (source_of(self._group, spec, schedule, self._place) for spec in ends)
        except (Declined, ValueError, ArithmeticError, LookupError, AssertionError):
            return None  # it is none for these sizes
        return self._named(high) if low.code == high.code and repr(low) == repr(high) else None


def _joined(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Returns variants in which neighbours of one kernel are one."""
    made: list[Variant] = []
    for variant in variants:
        for number, other in enumerate(made):
            both = other.range.joined(variant.range) if other.source is variant.source else None
            if both is not None:
                made[number] = replace(other, range=both)
                break
        else:
            made.append(variant)
    return tuple(made)
