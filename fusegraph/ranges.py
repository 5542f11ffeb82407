"""Plans for graphs whose sizes vary: a partition, and a few variants of each of its kernels, for a range of sizes.

The passes run at both ends of a range.  If the kernels that they make differ in nothing but the sizes, and these follow
from the dimensions alone, the partition holds for the range; else it is cut in two.  `fusegraph.variants` finds the
kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import inf, isqrt
from typing import Any, TypeAlias

from codegen import Schedule, Target, estimated
from codegen.size_expressions import value
from codegen.sizes import Bounds, Size, at, in_units, most, sizes_in, values
from codegen.spec import KernelSource, KernelSpec
from fusegraph.dims import corner, generic
from fusegraph.graph import Graph
from fusegraph.lowering.base import Options
from fusegraph.lowering.choices import Choice as Weighed
from fusegraph.lowering.choices import Settled, Settling
from fusegraph.passes.memory import plan_memory
from fusegraph.passes.packing import PACKING
from fusegraph.passes.partition import Group, Partition
from fusegraph.passes.pipeline import Steps
from fusegraph.plan import (
    Choice,
    Chooser,
    Chosen,
    Kernel,
    Place,
    Plan,
    by_cost_model,
    in_order,
    partitioned,
    places,
    plan,
)
from fusegraph.size_ranges import RESIDUES, Range
from fusegraph.sized_graphs import Sizes, ahead, check_shapes, graph_at, mapped
from fusegraph.variants import NEAR, TOLERANCE, Names, Variant, Variants, fastest

#: What `partitioned` returns.
_Partitioned: TypeAlias = tuple[Steps, Partition, Sequence[Chosen]]
#: Multiples of so many elements of 16 bits are rows of whole vectors, or of whole words.
UNITS = (8, 2)
#: Partitions that are tried for a graph of a few nodes, and at least for those of more, in inverse proportion; ranges
#: that are left then get choices that are not the best.  So many more are tried where these do not make one partition.
MOST, NODES, LEAST, RESERVE = 128, 16, 32, 192
#: Ranges that are tried for a kernel of a few, and at least for one of more, in inverse proportion: where cuts bring
#: nothing, further ones do not.
TRIES, KERNELS, FEWEST = 32, 12, 8
#: A range is cut if choices that are not the best would take more of the time of all sizes, by the average of its ends
#: and of so many sizes between.  What a size is taken to lose at most, and by a choice of which there is no estimate.
WORTH, BETWEEN, LOST, UNKNOWN = 0.02, 3, 20.0, 0.1
#: How often other multiples come than sizes that are multiples of 8 in all dimensions where that matters.
OTHERS = 0.25
#: How near to the size at which another partition begins ranges are cut, and ways to choose otherwise that are tried.
CLOSE, WAYS = 1.04, 4
#: Sizes of a symbol at most that are planned each by itself, where each has a partition of its own.
EACH = 16
#: Partitions that are kept in case that they are asked for again, as those at the ends of a range's parts are.
KEPT = 32


@dataclass(frozen=True)
class RangePlan:
    """A partition for a range of sizes, and for each of its kernels the variants that serve the range.

    ``packing`` makes packed tensors of parameters, whose sizes do not vary (`Plan.packing`).
    """

    range: Range
    steps: Steps
    partition: Partition
    kernels: tuple[tuple[Group, tuple[Variant, ...]], ...]
    packing: Plan | None


@dataclass
class SizedPlan:
    """Plans of a graph for all of its sizes.

    by_size  ranges without kernels of their own, which are planned for each size when it comes, and why.
    aligned  faster plans where sizes are multiples of units: these by symbol, and the plan of sizes counted in them.
             What is by size there is left to the plans of all sizes.
    """

    graph: Graph
    options: Options
    fusion: bool
    choose: Chooser
    plans: list[RangePlan] = field(default_factory=list)
    by_size: list[tuple[Range, str]] = field(default_factory=list)
    aligned: list[tuple[Mapping[str, int], SizedPlan]] = field(default_factory=list)

    @property
    def sources(self) -> list[KernelSource]:
        """All kernels, each once."""
        own = [v.source for p in self.plans for _, variants in p.kernels for v in variants]
        own += [k.source for p in self.plans if p.packing is not None for k in p.packing.kernels]
        every = [*own, *(source for _, other in self.aligned for source in other.sources)]
        return list({source.code: source for source in every}.values())

    def at(self, sizes: Sizes, graph: Graph | None = None) -> Plan:
        """Returns the plan for sizes by symbol; ``graph`` is that of these sizes, if it is there already."""
        graph = graph or graph_at(self.graph, sizes)[0]
        return self.known(sizes, graph) or plan(graph, self.options, fusion=self.fusion, choose=self.choose)

    def known(self, sizes: Sizes, graph: Graph | None = None) -> Plan | None:
        """Does the same as `at`; returns None for sizes that are planned one by one."""
        for units, other in self.aligned:
            if all(sizes[name] % unit == 0 for name, unit in units.items()):
                counted = {f"{n}_by_{units[n]}" if n in units else n: s // units.get(n, 1) for n, s in sizes.items()}
                if (found := other.known(counted, graph)) is not None:
                    return found
        mine = next((p for p in self.plans if sizes in p.range), None)
        if mine is None or any(sizes in range_ for range_, _ in self.by_size):
            return None
        return _instance(graph or graph_at(self.graph, sizes)[0], mine, sizes, self.options.target)


def plan_ranges(
    graph: Graph, options: Options | None = None, *, fusion: bool = True, choose: Chooser | None = None
) -> SizedPlan:
    """Returns plans of a graph for all sizes that its Dims allow.  Raises what `fusegraph.plan.plan` does."""
    options = options or Options()
    return _Planner(graph, options, fusion, choose or by_cost_model(options.target)).run()


class _Planner:
    """Plans a graph for its ranges; one whose symbols are ``counted`` in units only where there are fast kernels.

    ``often`` tells how often its sizes come, in comparison with others.
    """

    def __init__(
        self,
        graph: Graph,
        options: Options,
        fusion: bool,
        choose: Chooser,
        *,
        counted: Collection[str] = (),
        often: float = 1.0,
    ) -> None:
        self._graph, self._how = graph, (options, fusion, choose)
        self._options, self._fusion, self.choose = self._how
        self.made = SizedPlan(graph, options, fusion, choose)
        self.named, self.counted, self.often = Names(), counted, often
        self.left = max(LEAST, min(MOST, MOST * NODES // max(len(graph.nodes), 1)))
        self.bounds = ahead(graph)
        #: the way of choosing otherwise that the last partition was found in
        self._way = 0
        self._known: dict[tuple[Any, ...], _Partitioned] = {}
        #: symbols of which each size has a partition of its own, and those of which two neighbouring ones share one
        self.apart: set[str] = set()
        self.alike: set[str] = set()
        for which in ("min", "max"):
            check_shapes(graph, corner(self.bounds, which))

    def run(self) -> SizedPlan:
        units = self.units()
        often, tries = [self.often, *(OTHERS if number else 1.0 for number in range(len(units)))], self.left
        self.left = round(tries * often[0] / sum(often))
        tries -= self.left
        self.plan(_first_ranges(self.bounds))
        for number, each in enumerate(units, 1):
            names = {name: f"{name}_by_{unit}" for name, unit in each.items()}
            in_these = mapped(self._graph, partial(in_units, units=each))[0]
            counted = _Planner(in_these, *self._how, counted=[*names.values()], often=often[number])
            counted.named, counted.left = self.named, round(tries * often[number] / sum(often[number:]))
            tries -= counted.left
            counted.apart |= {names.get(name, name) for name in self.apart}
            counted.alike |= {names.get(name, name) for name in self.alike}
            # Sizes of 0 and 1 are left to the other plans.
            least = {n: Bounds(max(b.min, 2), b.max) if n in self.bounds else b for n, b in counted.bounds.items()}
            if all(b.min <= b.max for b in least.values()):
                counted.plan([Range(least)])
            tries += max(counted.left, 0)
            self.made.aligned.append((each, counted.made))
        return self.made

    def plan(self, ranges: Iterable[Range]) -> None:
        """Plans ranges, and their parts where one partition is not for all of a range, the widest first."""
        left = [*ranges]
        while left:
            left.sort(key=lambda each: each.spread)
            left += self._plan(left.pop())

    def units(self) -> list[dict[str, int]]:
        """Returns in which units sizes are counted where other kernels are faster then: all that matter, and each."""
        every = [name for name, (low, high) in self.bounds.items() if high // UNITS[0] > max(low // UNITS[0], 1)]
        if not every or not self._matter(every):
            return []
        matter = [name for name in every if len(every) == 1 or self._matter([name])] or every
        each = [{name: UNITS[0]} for name in matter] if len(matter) > 1 else []
        return [dict.fromkeys(matter, UNITS[0]), *each, dict.fromkeys(matter, UNITS[1])]

    def _matter(self, names: Sequence[str]) -> bool:
        """Tells whether kernels are faster where sizes are multiples of a unit: faster than for one element less."""
        whole = corner(self.bounds, "max")
        sizes = {name: self.bounds[name].max // UNITS[0] * UNITS[0] for name in names}
        plain, counted = (self._estimates({**whole, **{n: s - less for n, s in sizes.items()}}) for less in (1, 0))
        return len(plain) != len(counted) or any(
            schedule != other and (cycles is None or fewer is None or cycles > TOLERANCE * fewer)
            for (schedule, cycles), (other, fewer) in zip(plain, counted)
        )

    def _estimates(self, sizes: Sizes) -> list[tuple[Schedule, float | None]]:
        """Returns the schedules of a graph at sizes by symbol, and their estimated cycles if there is a model."""
        graph, target = graph_at(self._graph, sizes)[0], self._options.target
        _, _, chosen = partitioned(graph, self._options, fusion=self._fusion, choose=self.choose)
        return [(c.schedule, estimated(group.lowered.spec, c.schedule, target)) for group, _, c in chosen]

    def _plan(self, range_: Range) -> Sequence[Range]:
        """Plans a range, or returns its parts; after as many partitions as are tried it has none."""
        if not range_.varying:
            self.made.plans.append(self._single(range_))
            return ()
        ends = range_.end("min"), range_.end("max")
        low, high = (self._partitioned(end, range_) for end in ends)
        reason = self._difference(low, high)
        if reason and self.apart.isdisjoint(range_.varying):
            most = WORTH / (self.often * range_.share(self.bounds))
            anyhow = range_.spread <= NEAR or (self.left <= 0 and self.often == 1)
            tries = anyhow or (self.left > 0 and self._everywhere(range_) is None)
            settled = self._settled(range_, ends, most, anyhow) if tries else None
            reason, high = (reason, high) if settled is None else ("", settled)
        parts: Sequence[Range] = ()
        cuts = self.left > (0 if self.counted else -RESERVE)
        if not reason and (size := _single_at_ends(range_, high[1].graph)) is not None:
            reason = f"{size.written} is less than 2 for the smallest and the largest sizes, not for all"
            parts = (range_.halves([n for n in range_.varying if n in size.dims]) if cuts else None) or ()
        elif not reason:
            kernels = self._kernels(range_, high[1], high[2])
            self.made.plans.append(RangePlan(range_, high[0], high[1], kernels, self._packing(high[0])))
            return ()
        elif cuts and (name := self._everywhere(range_)) is not None:
            low_size, high_size = range_.bounds[name]
            reason = f"{reason}, as for each size of {name!r}"
            others = range_.varying.keys() - {name}  # without any, the plans of all sizes have these
            if high_size - low_size < EACH and not (self.counted and others.isdisjoint(self.counted)):
                parts = [Range({**range_.bounds, name: Bounds(n, n)}) for n in range(low_size, high_size + 1)]
        elif cuts:
            parts = self._parts(range_, high) or ()
        if not parts:
            self.made.by_size.append((range_, reason))
        return parts

    def _everywhere(self, range_: Range) -> str | None:
        """Returns a symbol of which each size has a partition of its own: to cut a range does not help then.

        That is so if a kernel has a number in it that follows from a size, as the scale of attention does from the size
        of its heads: neighbouring sizes differ at both ends and in the middle, whatever is settled.
        """
        if (known := next((name for name in range_.varying if name in self.apart), None)) is not None:
            return known
        for name, (low, high) in range_.varying.items():
            # In few sizes that are counted in units any two may differ for other reasons.
            if name in self.alike or (self.counted and high - low < EACH):
                continue
            reason = ""
            for place in (range_.end("max"), range_.end("min"), *range_.between(1)):
                sizes = self._neighbours(range_, name, place)
                reason = self._difference(*(self._partitioned(each, range_) for each in sizes))
                if not reason:
                    break
            if reason and self._settled(range_, sizes, inf, True) is None:
                self.apart.add(name)
                return name
            self.alike.add(name)
        return None

    def _neighbours(self, range_: Range, name: str, sizes: Sizes) -> tuple[Sizes, Sizes]:
        """Returns sizes with one near that of a symbol, the smaller ones first.

        Where there are many sizes what divides the two is the same.
        """
        size, (low, high) = sizes[name], range_.bounds[name]
        steps = (RESIDUES,) if high - low >= RESIDUES**2 else (2, 1)
        other = next(n for step in steps for n in (size - step, size + step) if low <= n <= high)
        return {**sizes, name: min(size, other)}, {**sizes, name: max(size, other)}

    def _parts(self, range_: Range, high: _Partitioned) -> tuple[Range, Range] | None:
        """Returns a range in two parts, None if it is one size.

        They meet where the partition begins to be that of the largest sizes, along one dimension; in the middle if
        that is nowhere, or there are so many nodes that something is different everywhere.
        """
        if len(self._graph.nodes) > NODES or self.left <= 0:
            return range_.halves()
        for name in range_.longest(range_.varying):
            if (first := self._first(range_, name, high)) is not None:
                return range_.cut(name, first - 1)
        return range_.halves()

    def _first(self, range_: Range, name: str, high: _Partitioned) -> int | None:
        """Returns about the least size of a symbol from which on a range has the partition of its largest sizes.

        None if all of them, or hardly any, have it.
        """
        (least, largest), ends = range_.bounds[name], range_.end("max")

        def alike(size: int) -> bool:
            return not self._difference(self._partitioned({**ends, name: size}, range_), high)

        if least * NEAR > largest or alike(generic(least, least, largest)):
            return None
        least, first = max(least, 1), int(largest / NEAR)
        if not alike(generic(first, least, largest)):
            return None
        while first > least * CLOSE and first - least > 1:
            middle = isqrt(least * first)
            if alike(generic(middle, least, largest)):
                first = middle
            else:
                least = max(middle, least + 1)
        return first

    def _settled(self, range_: Range, ends: tuple[Sizes, Sizes], most: float, anyhow: bool) -> _Partitioned | None:
        """Returns a partition of the larger of two sizes that the smaller has too, by choices that are not the best.

        They are those of one end, or those that take the least at both, or what is weighed at one end alone is chosen
        otherwise.  The first one is taken by which the range is estimated to lose at ``most`` a share of its time; if
        there is none and it has to be settled ``anyhow``, the one by which it loses the least.
        """
        low, high = (self._partitioned(end, range_) for end in ends)
        small, large = ({c.key: c for c in (*each[0].choices, *each[1].choices)} for each in (low, high))
        of_high, of_low = ({k: Settled(c.taken) for k, c in both.items()} for both in (small | large, large | small))
        both = {key: name for key in small.keys() & large.keys() if (name := _balanced(small[key], large[key]))}
        single = [c for key, c in (small | large).items() if c.others and not (key in small and key in large)]
        tried = [of_high, of_low, of_high | {key: Settled(name) for key, name in both.items()}]
        for kinds in [{c.what for c in single}, *({what} for what in dict.fromkeys(c.what for c in single))][:WAYS]:
            otherwise = {c.key: Settled(c.others[0]) for c in single if c.what in kinds}
            tried += [of_high | otherwise] if otherwise else []
        best, found = inf, None
        for number in sorted(range(len(tried)), key=lambda n: n != self._way):
            settled = tried[number]
            if settled in tried[:number]:
                continue
            again = [self._partitioned(end, range_, settled) for end in ends]
            if self._difference(again[0], again[1]):
                continue
            between = [] if most == inf else range_.between(BETWEEN)
            losses = [min(_lost(each), LOST) for each in again]
            losses += [min(_lost(self._partitioned(sizes, range_, settled)), LOST) for sizes in between]
            lost = sum(losses) / len(losses)
            if lost < best and (anyhow or lost <= most):
                best, found, self._way = lost, again[1], number
            if best <= most:
                break
        return found

    def _single(self, range_: Range) -> RangePlan:
        """Returns the plan of a range of one size."""
        sizes = {name: low for name, (low, _) in range_.bounds.items()}
        found = plan(graph_at(self._graph, sizes)[0], self._options, fusion=self._fusion, choose=self.choose)
        kernels = tuple((k.group, (Variant(range_, k.choice, self.named(k.source)),)) for k in found.kernels)
        return RangePlan(range_, found.steps, found.partition, kernels, self._packing(found.steps))

    def _packing(self, steps: Steps) -> Plan | None:
        """Returns the plan of what passes have packed, of which no size varies (`passes.parameters.fixed`)."""
        graph = steps.note(PACKING).get(PACKING)
        if graph is None:
            return None
        made = plan(graph, replace(self._options, prepack=0), choose=self.choose)
        return replace(made, kernels=tuple(replace(k, source=self.named(k.source)) for k in made.kernels))

    def _difference(self, low: _Partitioned, high: _Partitioned) -> str:
        """Returns in which kernel two partitions differ, but for the sizes; empty if in none."""
        if len(low[2]) != len(high[2]):
            return f"{len(low[2])} kernels for the smallest sizes, {len(high[2])} for the largest"
        for (small, alike, _), (large, other, _) in zip(low[2], high[2]):
            if alike != other or _memory(small) != _memory(large):
                return f"kernel {large.lowered.spec.name!r} is another one for the smallest sizes"
        packings = [self._packing(steps) for steps, _, _ in (low, high)]
        kernels = [[(k.source, [t.name for t in k.arguments]) for k in p.kernels] if p else [] for p in packings]
        return "" if kernels[0] == kernels[1] else "other tensors are packed for the smallest sizes"

    def _partitioned(self, sizes: Sizes, range_: Range, settled: Settling | None = None) -> _Partitioned:
        fixed = frozenset(range_.bounds) - frozenset(range_.varying)
        key = tuple(sizes.items()), fixed
        if settled is None and key in self._known:
            return self._known[key]
        self.left -= 1
        graph, _ = graph_at(self._graph, sizes, vary=True, fixed=fixed)
        options = self._options if settled is None else replace(self._options, settled=settled)
        found = partitioned(graph, options, fusion=self._fusion, choose=self._chosen)
        if settled is None:
            self._known = {**dict([*self._known.items()][1 - KEPT :]), key: found}
        return found

    def _chosen(self, spec: KernelSpec, group: Group) -> Choice:
        """Returns the choice for a specification at the sizes that it has."""
        return self.choose(values(spec), group)

    def _kernels(
        self, range_: Range, partition: Partition, chosen: Sequence[Chosen]
    ) -> tuple[tuple[Group, tuple[Variant, ...]], ...]:
        """Returns the variants of every kernel."""
        made: dict[tuple[str, Place, Group | None], tuple[Variant, ...]] = {}
        found = []
        tries = max(FEWEST, min(TRIES, TRIES * KERNELS // max(len(chosen), 1)))
        placed = places(chosen, *in_order(partition, self._options, fusion=self._fusion), {})
        for (group, alike, _), place in zip(chosen, placed):
            key = alike, place, group if place.over else None
            if key not in made:
                known = self.named, self._options.target, self.bounds, self.often
                variants = Variants(partition.graph, group, self.choose, place, *known)
                made[key] = variants.of(range_, tries)
                self.made.by_size += variants.without
            found.append((group, made[key]))
        return tuple(found)


def _balanced(small: Weighed, large: Weighed) -> str:
    """Returns the alternative of both choices that takes the least beside the best one; empty without estimates."""
    if None in (*small.cycles.values(), *large.cycles.values()):
        return ""
    every = [{name: cycles or 0.0 for name, cycles in c.cycles.items()} for c in (small, large)]
    found = {n: sum(c[n] / max(min(c.values()), 1.0) for c in every) for n in every[0] if n in every[1]}
    return min(found, key=found.__getitem__, default="")


def _lost(made: _Partitioned) -> float:
    """Returns the share of its time that a partition is estimated to lose by choices that are not the best."""
    every = [*made[0].choices, *made[1].choices]
    known = [c for c in every if None not in c.cycles.values()]
    taken, best = (sum(c.cycles[getattr(c, which)] or 0.0 for c in known) for which in ("taken", "preferred"))
    others = sum(c.taken != c.preferred for c in every) - sum(c.taken != c.preferred for c in known)
    return (max(taken / best - 1, 0.0) if best else 0.0) + UNKNOWN * others


def _memory(group: Group) -> list[tuple[str, bytes | None]]:
    """Returns what a group's kernel reads and writes and where that lies, as texts of sizes, and what is constant."""
    tensors = [*group.reads, *group.writes, *group.positions]
    return [
        (
            f"{t.name} {t.dtype} {t.shape} {t.strides} {t.base.name} {t.base.shape} {t.start} {t.position}",
            None if t.value is None else t.value.tobytes(),
        )
        for t in tensors
    ]


def _single_at_ends(range_: Range, graph: Graph) -> Size | None:
    """Returns a size that is less than 2 at both ends of a range, but perhaps not between; None if there is none.

    Such is n - 2 * ((n + 2) // 3), the last of three parts of n.  What is made of one element is not right for more.
    """
    ends = range_.end("min"), range_.end("max")
    for size in dict.fromkeys(sizes_in([t.shape for t in graph.tensors.values()])):
        if all(value(size.expression, end) < 2 for end in ends):
            try:
                largest = most(at(size, ends[0], vary=True, within=range_.bounds))
            except ArithmeticError:  # it divides by what may be 0
                largest = 2
            if largest > 1:
                return size
    return None


def _first_ranges(bounds: Mapping[str, Bounds]) -> Iterator[Range]:
    """Yields ranges that are some bounds together: sizes of 0 and 1, for which much is different, by themselves."""
    parts = []
    for low, high in bounds.values():
        alone = [Bounds(n, n) for n in (0, 1) if low <= n <= high]
        parts.append([*alone, *([Bounds(max(low, 2), high)] if high >= 2 else [])])
    for each in product(*parts):
        yield Range(dict(zip(bounds, each)))


def _instance(graph: Graph, planned: RangePlan, sizes: Sizes, target: Target) -> Plan:
    """Returns the plan of one size, at which the graph is ``graph``: compiled kernels, with the numbers they take."""
    simplified, moved = graph_at(planned.partition.graph, sizes)
    groups: dict[Group, Group] = {}
    for group in planned.partition.groups:
        reads, writes = (tuple(map(moved, tensors)) for tensors in (group.reads, group.writes))
        groups[group] = Group(group.nodes, replace(group.lowered, reads=reads, writes=writes))
    partition = replace(planned.partition, graph=simplified, groups=tuple(groups.values()))
    kernels = []
    made: dict[int, tuple[KernelSource, Choice]] = {}  # by variants, which kernels that are alike share
    for group, variants in planned.kernels:
        if id(variants) not in made:
            found = fastest(variants, group.lowered.spec, sizes, target)
            made[id(variants)] = at(found.source, sizes), found.choice
        kernels.append(Kernel(groups[group], *made[id(variants)]))
    return Plan(graph, planned.steps, partition, tuple(kernels), plan_memory(partition), planned.packing)
