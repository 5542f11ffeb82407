"""The kernels of a group for a range of sizes: a few schedules, of which one is about as fast as the best at each size.

A schedule serves a range if the CUDA C of its kernel is the same at its bounds, and at sizes near them that no number
divides.  So whatever Python made of a size's value shows as a difference between these, never as a wrong kernel.  The
cost models tell at some sizes which schedules a range needs; where a few do not suffice, or have no model, it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from math import gcd, inf, isqrt, prod

from codegen import Schedule, Target, best_schedule, distance, estimated, schedules
from codegen.arch import MAX_THREADS_PER_BLOCK
from codegen.declined import Declined
from codegen.families import family_of
from codegen.naming import Identifiers
from codegen.size_expressions import value
from codegen.sizes import MARK, PREFIX, Bounds, at, has_sums, most, moving, sizes_in
from codegen.spec import KernelSource, KernelSpec
from fusegraph.graph import Graph
from fusegraph.passes.crossing import check_overwriting
from fusegraph.passes.partition import Group
from fusegraph.passes.speculation import NotAccepted
from fusegraph.plan import Choice, Chooser, Place, source_of
from fusegraph.size_ranges import Range

#: Where the ends of a range are at most so many times apart, one schedule may serve it that is not the best; and any
#: that is worth trying.
NEAR, NARROW = 2.0, 1.05
#: A schedule serves a size if it is estimated to take at most so many times as long as the best.
TOLERANCE = 1.05
#: One that takes so many times as long serves nothing.
LOST = 4.0
#: Without a cost model it serves those whose best schedule is nearer than that (`codegen.distance`), and for every unit
#: of a larger distance it is taken to lose so much.
NEARBY, DOUBLING = 1.0, 0.06
#: What a kernel has to save of the time that all sizes take, sizes that no schedule serves well counted alone; one with
#: a schedule that the graph has kernels of may be such a kernel, and a fraction of that is enough.
GAIN, KNOWN = 0.004, 0.25
#: Sizes between the ends of a range at which schedules are compared; those of them at which the best `TOP` are looked
#: for, where there is a cost model.
POINTS, ANCHORS, TOP = 32, 12, 3
#: Powers of two that divide sizes make vectors; the widest one that matters.
WIDEST = 16
#: Variants of a kernel at most, and schedules worth trying of which any may serve a narrow range.
MOST, ANY = 12, 48
#: Points of parts of a range, of those that a whole one has.
FEWER = 4
#: What a kernel that is none for some sizes raises.
_NONE = (Declined, NotAccepted, ValueError, ArithmeticError, LookupError, AssertionError)


@dataclass(frozen=True)
class Variant:
    """A kernel for a range of sizes."""

    range: Range
    choice: Choice
    source: KernelSource


def fastest(variants: Sequence[Variant], spec: KernelSpec, sizes: Mapping[str, int], target: Target) -> Variant:
    """Returns the one of a specification's variants that is estimated to be the fastest at some sizes.

    Where the best schedule has no cost model this is the one nearest to it.
    """
    found = [v for v in variants if sizes in v.range]
    if len(found) == 1:
        return found[0]
    known = at(spec, sizes)
    cycles = [estimated(known, v.choice.schedule, target) for v in found]
    if None in cycles:
        best = best_schedule(known, target)
        if estimated(known, best, target) is None or all(c is None for c in cycles):
            return min(found, key=lambda v: distance(v.choice.schedule, best))
    return found[min(range(len(found)), key=lambda n: _or_inf(cycles[n]))]


def _or_inf(cycles: float | None) -> float:
    return inf if cycles is None else cycles


class Names:
    """Gives every kernel of a graph a name of its own.

    What is the same but for names is the same kernel: for other expressions of its sizes it is launched otherwise.

    schedules  those of kernels so far, by the class of their specifications.
    """

    def __init__(self) -> None:
        self.schedules: dict[type[KernelSpec], dict[Schedule, Choice]] = {}
        self._known: dict[str, KernelSource] = {}
        self._shared: dict[str, KernelSource] = {}
        self._names = Identifiers()

    def __call__(self, source: KernelSource) -> KernelSource:
        code = re.sub(rf"\b{source.name}\b", "", source.code)
        key = repr(replace(source, name="", code=code))
        if key not in self._known:
            sizes = {name: f"{PREFIX}{n}" for n, name in enumerate(dict.fromkeys(MARK.findall(code)))}
            alike = MARK.sub(lambda found: sizes[found[0]], code)
            launched = replace(source, code=alike, name="", grid=(1, 1, 1), parameters=None)
            same = self._shared.get(repr(launched))
            if same is None:
                name = self._names.unique(source.name)
                same = replace(source, name=name, code=re.sub(rf"\b{source.name}\b", name, source.code))
                self._shared[repr(launched)] = same
            self._known[key] = replace(source, name=same.name, code=same.code)
        return self._known[key]


class _Point:
    """A specification at one choice of sizes, and what schedules are estimated to take there."""

    def __init__(self, sizes: Mapping[str, int], spec: KernelSpec, target: Target) -> None:
        self.sizes, self.spec, self._target = sizes, spec, target
        self._known: dict[Schedule, float | None] = {}

    def cycles(self, schedule: Schedule) -> float | None:
        if schedule not in self._known:
            self._known[schedule] = estimated(self.spec, schedule, self._target)
        return self._known[schedule]

    def regrets(self, some: Sequence[Schedule]) -> list[float]:
        """Returns how many times as long as the best of some schedules each is estimated to take, at most `LOST`."""
        cycles = [_or_inf(self.cycles(s)) for s in some]
        least = min(cycles)
        return [min(c / least, LOST) if c < inf else LOST for c in cycles]


class _Best(_Point):
    """A point at which the best schedule was looked for."""

    def __init__(self, sizes: Mapping[str, int], spec: KernelSpec, target: Target, best: Choice) -> None:
        super().__init__(sizes, spec, target)
        self.best = best

    @property
    def modelled(self) -> bool:
        """Whether there is a cost model."""
        return self.cycles(self.best.schedule) is not None

    def regrets(self, some: Sequence[Schedule]) -> list[float]:
        best = self.best.schedule
        if self.modelled:
            _, *found = super().regrets([best, *some])
            return [1.0 if s == best else regret for s, regret in zip(some, found)]
        return [1.0 if (apart := distance(s, best)) < NEARBY else min(1 + apart * DOUBLING, LOST) for s in some]

    def worth_trying(self) -> dict[Schedule, Choice]:
        """Returns the best schedule, and with a cost model those behind it."""
        more = islice(family_of(self.spec).schedules(self.spec, self._target), TOP) if self.modelled else ()
        return {self.best.schedule: self.best} | {s: Choice(s) for s in more if s != self.best.schedule}


@dataclass
class _Part:
    """A range, the variants that serve it, which those around it may have found, and points at its ends and in it.

    lost       by how much its sizes take longer than with the best schedules, at most `LOST`, on average.
    differing  the best schedule that others would be better with, if its code were the same in all of the range.
    apart      the symbols along which other schedules are the best.
    """

    range: Range
    variants: list[Variant]
    points: list[_Point]
    ends: list[_Best]
    lost: float = LOST
    differing: Schedule | None = None
    apart: Sequence[str] = ()


class Variants:
    """Finds the variants of a kernel, for parts of sizes between some bounds that come so ``often``.

    without  ranges for which there are none, and why.
    """

    def __init__(
        self,
        graph: Graph,
        group: Group,
        choose: Chooser,
        place: Place,
        names: Names,
        target: Target,
        bounds: Mapping[str, Bounds],
        often: float,
    ) -> None:
        self._graph, self._spec, self._group = graph, group.lowered.spec, group
        self._choose, self._place = choose, place
        self._named, self._target, self._bounds, self._often = names, target, bounds, often
        self._spec_at = moving(self._spec)
        self._sums, self._sizes = has_sums(self._spec), list(dict.fromkeys(sizes_in(self._spec)))
        self._points: dict[tuple[int, ...], _Best] = {}
        self.without: list[tuple[Range, str]] = []

    def of(self, range_: Range, tries: int) -> tuple[Variant, ...]:
        """Returns variants for a range; sizes that none is for are in ``without``.

        A range for which there is none is cut, and one in a part of which another schedule would save enough: those
        that lose the most first, as long as there are ``tries``.  Parts have the variants of the whole, too.
        """
        made: list[Variant] = []
        left = self._served([(range_, None)], made)
        for _ in range(tries):
            part = max(left, key=self._loss, default=None)
            if part is None or self._loss(part) < GAIN:
                break
            left.remove(part)
            differing = part.differing or part.ends[0].best.schedule
            halves = self._parts(part.range, differing, part.apart)
            if halves is not None and (part.range.spread > NARROW or part.variants):
                left += self._served([(half, part) for half in halves], made)
            elif not part.variants:
                self._last(part, made)
        for part in left:
            if not part.variants:
                self._last(part, made)
        return _joined(made)

    def _loss(self, part: _Part) -> float:
        """Returns what further kernels may save in parts of a range, of the time that all sizes take."""
        if not part.variants:
            return inf
        return part.lost * self._share(part.range) if part.differing is not None else 0.0

    def _share(self, range_: Range) -> float:
        """Returns how often sizes of a range come, in comparison with others."""
        return self._often * range_.share(self._bounds)

    def _last(self, part: _Part, made: list[Variant]) -> None:
        """Adds a variant for a range that none of the best schedules is for."""
        found = self._any(part.range, part.ends)
        made += found
        if not found:
            self.without.append((part.range, f"no schedule of kernel {self._spec.name!r} is for all of it"))

    def _served(self, ranges: Sequence[tuple[Range, _Part | None]], made: list[Variant]) -> list[_Part]:
        """Returns ranges, parts of others, with variants, and adds the new ones of these; not those without points."""
        found = []
        for range_, whole in ranges:
            try:
                part = self._part(range_, whole)
            except Declined as reason:
                self.without.append((range_, f"kernel {self._spec.name!r}: {reason}"))
            else:
                before = len(part.variants)
                self._serve(part, MOST - len({v.source.name for v in made}))
                made += part.variants[before:]
                found.append(part)
        return found

    def _part(self, range_: Range, whole: _Part | None) -> _Part:
        """Returns a range, which is a part of another one perhaps, with its points: first those at its ends."""
        low, high = range_.end("min"), range_.end("max")
        sides = {name: low | {name: high[name]} for name in range_.varying}
        ends = [self._point(high, range_), self._point(low, range_)]
        others = {n: self._point(s, range_) for n, s in sides.items()}
        between = [] if range_.spread <= NEAR else self._between(range_, 1 if whole is None else FEWER)
        least = ends[1].best.schedule
        apart = [n for n, point in others.items() if point.regrets([least])[0] > TOLERANCE]
        known = [] if whole is None else [p for p in whole.points if p.sizes in range_]
        points = list(dict.fromkeys([*ends, *others.values(), *between, *known]))
        return _Part(range_, [] if whole is None else [*whole.variants], points, ends, apart=apart)

    def _parts(self, range_: Range, schedule: Schedule, apart: Sequence[str]) -> tuple[Range, Range] | None:
        """Returns a range in two parts, None if it is one size.

        They meet where the code of a schedule's kernel begins to be that of large sizes; if that is nowhere, in the
        middle: of sizes that other schedules are ``apart`` along, or else other code.
        """
        differs = self._apart(range_, schedule)
        for name in range_.longest(differs):
            if (first := self._first(range_, name, schedule)) is not None:
                return range_.cut(name, first - 1)
        return range_.halves(apart or differs)

    def _first(self, range_: Range, name: str, schedule: Schedule) -> int | None:
        """Returns the least size of a symbol from which on a kernel's code is the same; None if hardly any has it."""
        (least, largest), least_of = range_.bounds[name], {n: Bounds(b.min, b.min) for n, b in range_.bounds.items()}
        first = largest
        while least < first:
            middle = max(min(isqrt(max(least, 1) * first), first - 1), least)
            if self._common(Range({**least_of, name: Bounds(middle, largest)}), schedule, False) is not None:
                first = middle
            else:
                least = middle + 1
        return first if largest >= NEAR * max(first, 1) else None

    def _between(self, range_: Range, fewer: int) -> list[_Point]:
        """Returns points between the ends; where there is a cost model, the best schedule is looked for at few."""
        sizes, anchors = range_.between(POINTS // fewer), ANCHORS // fewer
        found = [self._point(s, range_) for s in sizes[:anchors]]
        if all(point.modelled for point in found):
            return [*found, *(_Point(s, self._spec_at(s), self._target) for s in sizes[anchors:])]
        return [*found, *(self._point(s, range_) for s in sizes[anchors:])]

    def _point(self, sizes: Mapping[str, int], range_: Range) -> _Best:
        """Returns the point at sizes that are divided by nothing; where n + 1 is a size, too, it may be beside them."""
        key = tuple(sizes.values())
        if key not in self._points:
            beside = [sizes]
            if self._sums:
                steps = product((0, 1), repeat=len(sizes))
                beside = [{name: n + step for (name, n), step in zip(sizes.items(), each)} for each in steps]
            self._points[key] = self._at(min((each for each in beside if each in range_), key=self._divided))
        return self._points[key]

    def _divided(self, sizes: Mapping[str, int]) -> int:
        """Returns by how much powers of two divide the specification's sizes, at sizes by symbol."""
        return sum(gcd(value(size.expression, sizes), WIDEST) for size in self._sizes)

    def _at(self, sizes: Mapping[str, int]) -> _Best:
        spec = self._spec_at(sizes)
        best = self._choose(spec, self._group)
        if self._sums and self._rendered(sizes, best.schedule) is None:
            # Sums may be whole vectors here, but are not at all sizes.
            for each in (spec, self._spec_at(sizes, vary=True)):
                found = islice(family_of(each).schedules(each, self._target), MOST)
                schedule = next((s for s in found if self._rendered(sizes, s) is not None), None)
                if schedule is not None:
                    best = Choice(schedule)
                    break
        return _Best(sizes, spec, self._target, best)

    def _rendered(self, sizes: Mapping[str, int], schedule: Schedule) -> KernelSource | None:
        """Returns the kernel with a schedule where sizes have these values, and vary; None if it is none for them."""
        try:
            return source_of(self._group, self._spec_at(sizes, vary=True), schedule, self._place)
        except _NONE:
            return None

    def _serve(self, part: _Part, most: int) -> None:
        """Adds variants to those of a range while each saves enough, at most so many, but one at least."""
        known = self._named.schedules.setdefault(type(self._spec), {})
        candidates = dict(known)
        for point in part.points:
            candidates = (point.worth_trying() if isinstance(point, _Best) else {}) | candidates
        there = {v.choice.schedule for v in part.variants}
        every = list(candidates | dict.fromkeys(there))
        regrets = dict(zip(every, zip(*(point.regrets(every) for point in part.points))))
        least = [min((regrets[s][n] for s in there), default=LOST) for n in range(len(part.points))]
        share, part.differing = self._share(part.range) / len(part.points), None
        candidates = {s: choice for s, choice in candidates.items() if s not in there}

        def saved(schedule: Schedule) -> float:
            """Returns what a schedule saves of the time of all sizes, less what it should save."""
            found: float = sum(max(n - other, 0.0) for n, other in zip(least, regrets[schedule]) if n > TOLERANCE)
            return share * found - GAIN * (KNOWN if schedule in known else 1.0)

        while candidates and max(least) > TOLERANCE:
            schedule = max(candidates, key=saved)
            choice = candidates.pop(schedule)
            if part.variants and (saved(schedule) < 0 or most <= 0):
                break
            if (source := self._source(part.range, schedule)) is not None:
                most -= source.name not in {v.source.name for v in part.variants}
                part.variants.append(Variant(part.range, choice, source))
                known.setdefault(schedule, choice)
                least = list(map(min, least, regrets[schedule]))
            else:
                part.differing = part.differing or schedule
        part.lost = sum(n - 1 for n in least if n > TOLERANCE) / len(least)

    def _apart(self, range_: Range, schedule: Schedule) -> list[str]:
        """Returns the symbols on whose sizes in a range the kernel with a schedule depends, beside its parameters."""
        low = {name: Bounds(b.min, b.min) for name, b in range_.bounds.items()}
        return [n for n, b in range_.varying.items() if self._common(Range({**low, n: b}), schedule, False) is None]

    def _any(self, range_: Range, ends: Sequence[_Point]) -> tuple[Variant, ...]:
        """Returns a variant whose schedule is worth trying at both ends of a range, or else where sizes vary."""
        high, low = (schedules(point.spec, self._target) for point in ends)
        both = [s for s in high if s in frozenset(low)][:ANY]
        at_all = self._spec_at(range_.end("max"), vary=True, within=range_.bounds)
        for schedule in chain(both, islice(family_of(at_all).schedules(at_all, self._target), ANY)):
            if (source := self._source(range_, schedule)) is not None:
                return (Variant(range_, Choice(schedule), source),)
        return ()

    def _source(self, range_: Range, schedule: Schedule) -> KernelSource | None:
        """Returns the source of the kernel with a schedule, with a name of its own, if it has one for a range."""
        found = self._common(range_, schedule, self._sums)
        return None if found is None else self._named(found)

    def _common(self, range_: Range, schedule: Schedule, probes: bool) -> KernelSource | None:
        """Returns the source of the kernel with a schedule if it is the same at all ends of a range, else None.

        Ends are those of the range alone, or also its ``probes``.
        """
        vary = bool(range_.varying)
        try:
            check_overwriting(self._graph, [(self._group, schedule)])
            every = (
                source_of(self._group, self._spec_at(end, vary=vary, within=range_.bounds), schedule, self._place)
                for end in (*range_.ends, *(range_.probes if probes else ()))
            )
            first = next(every)
            text = repr(first)
            if any(repr(other) != text for other in every):
                return None
        except _NONE:
            return None
        if first.dynamic_shared_bytes > self._target.arch.shared_bytes_per_block:
            return None  # the largest does not fit
        if most(prod(first.block)) > MAX_THREADS_PER_BLOCK:
            return None
        return first


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
