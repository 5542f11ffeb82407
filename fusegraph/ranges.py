"""Plans for graphs whose sizes vary: one partition and a few schedules, each for a range of sizes.

The passes run at both ends of a range.  If the kernels that they make differ in nothing but the sizes, and these follow
from the dimensions alone, the partition holds for the range; else it is cut in two.  A kernel's schedule is chosen in
the same way: one that is best at both ends, and whose CUDA C is the same at both, is that of the range.  So whatever
Python made of a size's value shows as a difference between two ends, never as a wrong kernel between them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import isqrt, prod
from typing import Any, NamedTuple, TypeAlias

from codegen import Schedule, Target, render, schedules
from codegen.declined import Declined
from codegen.kernel import from_the_end, in_sequence
from codegen.l2_policy import without_evict_last
from codegen.naming import Identifiers
from codegen.sizes import Bounds, Size, at, in_units, values
from codegen.spec import KernelSource, KernelSpec
from fusegraph.dims import bounds_of, corner
from fusegraph.errors import GraphError
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import Options
from fusegraph.ops.base import TensorType
from fusegraph.passes import order
from fusegraph.passes.memory import plan_memory
from fusegraph.passes.partition import Group, Partition
from fusegraph.passes.pipeline import Steps
from fusegraph.plan import Choice, Chooser, Chosen, Kernel, Plan, by_cost_model, in_order, partitioned, plan
from fusegraph.tensor import Position

#: Sizes by the names of symbols (`codegen.sizes.Size`).
Sizes: TypeAlias = Mapping[str, int]
#: Where the ends of a range are at most so many times apart it need not have the schedule that is best at both; and it
#: is not cut again: what is not the same there is planned by size.
NEAR, NARROW = 2.0, 1.05
#: Elements of the largest tensor of graphs that are planned ahead.
LARGE = 2**29
#: Multiples of so many elements are rows of whole vectors in the dtypes of tensor cores.
UNIT = 8
#: Ranges of a graph or a kernel at most; what is left is planned by size.
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

    @property
    def spread(self) -> float:
        """How many times its largest size is its smallest one, in the dimension where that is most."""
        return max((b.max / max(b.min, 1) for b in self.varying.values()), default=1.0)

    def halves(self) -> tuple[Range, Range] | None:
        """Returns it cut in two at the middle of its longest dimension; None if it is narrow."""
        if not self.varying:
            return None
        name = max(self.varying, key=lambda n: self.bounds[n].max / max(self.bounds[n].min, 1))
        low, high = self.bounds[name]
        if high <= NARROW * max(low, 1):
            return None
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


@dataclass(frozen=True)
class RangePlan:
    """A partition for a range of sizes, and for each of its kernels variants that share the range.

    ``by_size`` tells for each part of the range that has no kernels why it is planned by size.
    """

    range: Range
    steps: Steps
    partition: Partition
    kernels: tuple[tuple[Group, tuple[Variant, ...]], ...]


@dataclass
class SizedPlan:
    """Plans of a graph for all of its sizes.

    by_size  ranges without kernels of their own, which are planned for each size when it comes, and why.
    aligned  faster plans where sizes are multiples of units: these by symbol, and the plan of sizes counted in them.
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
        every = [*own, *(source for _, other in self.aligned for source in other.sources)]
        return list({source.code: source for source in every}.values())

    def at(self, sizes: Sizes) -> Plan:
        """Returns the plan for sizes by symbol."""
        return self.known(sizes) or plan(
            graph_at(self.graph, sizes)[0], self.options, fusion=self.fusion, choose=self.choose
        )

    def known(self, sizes: Sizes) -> Plan | None:
        """Returns the plan for sizes by symbol; None for those that are planned by size."""
        for units, other in self.aligned:
            if all(sizes[name] % unit == 0 for name, unit in units.items()):
                counted = {f"{n}_by_{units[n]}" if n in units else n: s // units.get(n, 1) for n, s in sizes.items()}
                if (found := other.known(counted)) is not None:
                    return found
        mine = next((p for p in self.plans if sizes in p.range), None)
        if mine is None or any(sizes in range_ for range_, _ in self.by_size):
            return None
        return _instance(self.graph, mine, sizes)


def plan_ranges(
    graph: Graph, options: Options | None = None, *, fusion: bool = True, choose: Chooser | None = None
) -> SizedPlan:
    """Returns plans of a graph for all sizes that its Dims allow.  Raises what `fusegraph.plan.plan` does."""
    options = replace(options or Options(), prepack=0)  # sizes share plans; nothing is packed
    planner = _Planner(graph, options, fusion, choose or by_cost_model(options.target))
    planner.plan(_first_ranges(planner.bounds))
    for units in planner.units():
        counted = _Planner(_mapped(graph, partial(in_units, units=units))[0], options, fusion, planner.choose)
        counted.named = planner.named
        counted.plan([Range(counted.bounds)])
        planner.made.aligned.append((units, counted.made))
    return planner.made


class _Planner:
    def __init__(self, graph: Graph, options: Options, fusion: bool, choose: Chooser) -> None:
        self._graph, self._options, self._fusion, self.choose = graph, options, fusion, choose
        self.made = SizedPlan(graph, options, fusion, choose)
        self.named = _Names()
        self.bounds = ahead(graph)
        for which in ("min", "max"):
            check_shapes(graph, corner(self.bounds, which))

    def plan(self, ranges: Iterable[Range]) -> None:
        for each in ranges:
            self._plan(each)

    def units(self) -> list[dict[str, int]]:
        """Returns in which units sizes are counted where other kernels are best then: all that matter, and each."""
        whole = corner(self.bounds, "max")
        plain = self._schedules(whole)
        matter = {}
        for name, (low, high) in self.bounds.items():
            rounded = whole[name] // UNIT * UNIT
            if max(low, 2 * UNIT) <= rounded <= high and self._schedules({**whole, name: rounded}) != plain:
                matter[name] = UNIT
        each = [{name: UNIT} for name in matter] if len(matter) > 1 else []
        return [matter, *each] if matter else []

    def _schedules(self, sizes: Sizes) -> list[Schedule]:
        found = partitioned(graph_at(self._graph, sizes)[0], self._options, fusion=self._fusion, choose=self.choose)
        return [choice.schedule for _, _, choice in found[2]]

    def _plan(self, range_: Range) -> None:
        if not range_.varying:
            self.made.plans.append(self._single(range_))
            return
        reason = "there are more ranges than are planned ahead"
        if len(self.made.plans) < MOST:
            low, high = (self._partitioned(range_.end(which), range_) for which in ("min", "max"))
            reason = _difference(low[2], high[2])
            if not reason:
                kernels = self._kernels(range_, high[1], high[2])
                self.made.plans.append(RangePlan(range_, high[0], high[1], kernels))
                return
            halves = range_.halves()
            if halves is not None:
                for half in halves:
                    self._plan(half)
                return
        self.made.by_size.append((range_, reason))

    def _single(self, range_: Range) -> RangePlan:
        """Returns the plan of a range of one size."""
        sizes = {name: low for name, (low, _) in range_.bounds.items()}
        found = plan(graph_at(self._graph, sizes)[0], self._options, fusion=self._fusion, choose=self.choose)
        kernels = tuple((k.group, (Variant(range_, k.choice, self.named(k.source)),)) for k in found.kernels)
        return RangePlan(range_, found.steps, found.partition, kernels)

    def _partitioned(self, sizes: Sizes, range_: Range) -> tuple[Steps, Partition, Sequence[Chosen]]:
        fixed = frozenset(range_.bounds) - frozenset(range_.varying)
        graph, _ = graph_at(self._graph, sizes, vary=True, fixed=fixed)
        return partitioned(graph, self._options, fusion=self._fusion, choose=self._chosen)

    def _chosen(self, spec: KernelSpec, group: Group) -> Choice:
        """Returns the choice for a specification at the sizes that it has."""
        return self.choose(values(spec), group)

    def _kernels(
        self, range_: Range, partition: Partition, chosen: Sequence[Chosen]
    ) -> tuple[tuple[Group, tuple[Variant, ...]], ...]:
        """Returns the variants of every kernel."""
        turned, cached = in_order(partition, self._options, fusion=self._fusion)
        made: dict[tuple[str, Place], tuple[Variant, ...]] = {}
        found = []
        for number, (group, alike, _) in enumerate(chosen):
            early = number + 1 < len(chosen) and order.may_come_in_early(chosen[number + 1][0])
            place = Place(group in turned, number == 0, early, group in cached)
            if (alike, place) not in made:
                variants = _Variants(group, self._chosen, place, self.named, self._options.target)
                made[alike, place] = variants.of(range_)
                self.made.by_size += variants.without
            found.append((group, made[alike, place]))
        return tuple(found)


class Place(NamedTuple):
    """What a kernel's code depends on besides its specification and schedule: where it is among the others."""

    turned: bool
    first: bool
    early: bool
    cached: bool


class _Names:
    """Gives every kernel of a graph a name of its own; what is the same text is the same kernel."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], KernelSource] = {}
        self._names = Identifiers()

    def __call__(self, source: KernelSource) -> KernelSource:
        key = source.code, repr(replace(source, code=""))
        if key not in self._known:
            name = self._names.unique(source.name)
            self._known[key] = replace(source, name=name, code=re.sub(rf"\b{source.name}\b", name, source.code))
        return self._known[key]


class _Variants:
    """Finds the variants of a kernel."""

    def __init__(self, group: Group, choose: Chooser, place: Place, names: _Names, target: Target) -> None:
        self._spec, self._group, self._choose, self._place = group.lowered.spec, group, choose, place
        self._named, self._target = names, target
        self._choices: dict[Schedule, Choice] = {}
        self.without: list[tuple[Range, str]] = []

    def of(self, range_: Range) -> tuple[Variant, ...]:
        """Returns variants for a range; sizes that none is for are in ``without``."""
        ends = [at(self._spec, range_.end(which), vary=True, within=range_.bounds) for which in ("min", "max")]
        try:
            best = [self._choose(spec, self._group) for spec in ends]
        except Declined as reason:
            self.without.append((range_, f"kernel {self._spec.name!r}: {reason}"))
            return ()
        self._choices |= {choice.schedule: choice for choice in best}
        wanted = [best[1]] if best[0].schedule == best[1].schedule else []
        if range_.spread <= NEAR:  # what is for all of it may be what is best beside it
            low, high = (tuple(self._worth(spec)) for spec in ends)
            both = [schedule for schedule in high if schedule in frozenset(low)]
            wanted += [best[1], best[0], *(c for c in self._choices.values() if c.schedule in both)]
            wanted += [Choice(schedule) for schedule in both[:MOST]] if range_.halves() is None else []
        for choice in wanted:
            source = self._source(ends, choice.schedule)
            if source is not None:
                return (Variant(range_, choice, source),)
        halves = range_.halves()
        if halves is None or len(self._choices) > MOST:
            self.without.append((range_, f"no schedule of kernel {self._spec.name!r} is for all of {range_}"))
            return ()
        return _joined([*self.of(halves[0]), *self.of(halves[1])])

    def _worth(self, spec: KernelSpec) -> Iterator[Schedule]:
        """Yields the schedules that are worth trying for a specification."""
        try:
            yield from schedules(values(spec), self._target)
        except Declined:
            return

    def _source(self, ends: Sequence[KernelSpec], schedule: Schedule) -> KernelSource | None:
        """Returns the source of the kernel with a schedule if it is the same at both ends of a range, else None."""
        used = without_evict_last(schedule) if self._place.cached else schedule
        try:
            low, high = (self._placed(render(spec, used)) for spec in ends)
        except (Declined, ValueError, ArithmeticError, LookupError, AssertionError):
            return None  # it is none for these sizes
        return self._named(high) if low.code == high.code and repr(low) == repr(high) else None

    def _placed(self, source: KernelSource) -> KernelSource:
        source = from_the_end(source) if self._place.turned else source
        return in_sequence(source, first=self._place.first, early=self._place.early)


def _joined(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Returns variants in which neighbours of one schedule are one."""
    made: list[Variant] = []
    for variant in variants:
        both = made[-1].range.joined(variant.range) if made and made[-1].source is variant.source else None
        if both is None:
            made.append(variant)
        else:
            made[-1] = replace(made[-1], range=both)
    return tuple(made)


def _difference(low: Sequence[Chosen], high: Sequence[Chosen]) -> str:
    """Returns in which kernel two partitions differ, but for the sizes; empty if in none."""
    if len(low) != len(high):
        return f"{len(low)} kernels for the smallest sizes, {len(high)} for the largest"
    for (small, alike, _), (large, other, _) in zip(low, high):
        tensors = [[t.name for t in (*g.reads, *g.writes)] for g in (small, large)]
        if alike != other or tensors[0] != tensors[1]:
            return f"kernel {large.lowered.spec.name!r} is another one for the smallest sizes"
    return ""


def _first_ranges(bounds: Mapping[str, Bounds]) -> Iterator[Range]:
    """Yields ranges that are some bounds together: sizes of 0 and 1, for which much is different, by themselves."""
    parts = []
    for low, high in bounds.values():
        alone = [Bounds(n, n) for n in (0, 1) if low <= n <= high]
        parts.append([*alone, *([Bounds(max(low, 2), high)] if high >= 2 else [])])
    for each in product(*parts):
        yield Range(dict(zip(bounds, each)))


# ---- graphs at other sizes


def graph_at(
    graph: Graph, sizes: Sizes, *, vary: bool = False, fixed: frozenset[str] = frozenset()
) -> tuple[Graph, dict[Tensor, Tensor]]:
    """Returns a graph at sizes by symbol, and its tensor for each of the old one.

    With ``vary`` sizes are still Sizes, but for those of the symbols in ``fixed``.
    """

    if isinstance(graph, OpenGraph):
        return graph.known(sizes), {}
    return _mapped(graph, lambda part: at(part, sizes, vary=vary, fixed=fixed))


class OpenGraph(Graph):
    """The inputs of a graph that is known when its sizes are, as its nodes do not follow from Dims.

    known   makes the graph of sizes by symbol.
    reason  why it does not follow.
    """

    def __init__(self, name: str, known: Callable[[Sizes], Graph], reason: str) -> None:
        super().__init__(name)
        self.known, self.reason = known, reason


def _mapped(graph: Graph, changed: Callable[[Any], Any]) -> tuple[Graph, dict[Tensor, Tensor]]:
    """Returns a graph with other sizes, and its tensor for each of the old one."""
    made = Graph(graph.name, graph.io_dtype, graph.compute_dtype)
    new: dict[Tensor, Tensor] = {}
    for old in graph.tensors.values():
        tensor = made._add_tensor(old.name, changed(old.shape), changed(old.strides), old.dtype, old.value)
        new[old] = tensor
        if old in graph._automatic:
            made._automatic.add(tensor)
    for old, tensor in new.items():
        tensor.base, tensor.start, tensor.own_strides = new[old.base], changed(old.start), changed(old.own_strides)
        if old.position is not None:
            place = old.position
            tensor.position = Position(new[place.index], changed(place.step), changed(place.size))
    made.inputs = [new[t] for t in graph.inputs]
    for node in graph.nodes:
        attributes = changed(dict(node.attributes))
        made.add_node(Node(node.op, tuple(new[t] for t in node.inputs), attributes, *(new[t] for t in node.outputs)))
    made.outputs = [new[t] for t in graph.outputs]
    made.updates = {new[t]: new[x] for t, x in graph.updates.items()}
    made._returned = {new[t] for t in graph._returned}
    return made, new


def ahead(graph: Graph) -> dict[str, Bounds]:
    """Returns bounds of the symbols of a graph's sizes, narrowed until no tensor has more than `LARGE` elements.

    Sizes beyond are planned by size: positions of 64 bits make other kernels.
    """
    bounds = bounds_of(s for t in graph.tensors.values() for s in (*t.shape, *t.strides))
    sizes = {prod(t.shape) for t in graph.tensors.values()}
    while max(map(int, at(tuple(sizes), {n: b.max for n, b in bounds.items()})), default=0) > LARGE:
        name = max(bounds, key=lambda n: bounds[n].max / max(bounds[n].min, 1))
        low, high = bounds[name]
        if high <= 2 * max(low, 1):
            break
        bounds[name] = Bounds(low, high // 2)
    return bounds


def varies(graph: Graph) -> bool:
    """Tells whether a graph's sizes vary."""
    return any(isinstance(size, Size) for tensor in graph.inputs for size in (*tensor.shape, *tensor.strides))


def check_shapes(graph: Graph, sizes: Sizes) -> None:
    """Raises GraphError for a node whose results have other shapes at some sizes than its operands make there."""
    for node in graph.nodes:
        types = tuple(TensorType(at(t.shape, sizes), t.dtype) for t in node.inputs)
        inferred = node.op.infer(types, at(dict(node.attributes), sizes))
        for made, tensor in zip(inferred if isinstance(inferred, tuple) else (inferred,), node.outputs):
            if tuple(made.shape) != at(tensor.shape, sizes):
                where = ", ".join(f"{name} = {size}" for name, size in sizes.items())
                raise GraphError(
                    f"the shape of {tensor.name!r} does not follow the sizes that vary: {list(tensor.shape)} would be "
                    f"{list(at(tensor.shape, sizes))} at {where}, {node.op.name} makes {list(made.shape)}"
                )


def _instance(graph: Graph, planned: RangePlan, sizes: Sizes) -> Plan:
    """Returns the plan of one size: kernels that are compiled, with the numbers that they take."""
    whole, _ = graph_at(graph, sizes)
    simplified, new = graph_at(planned.partition.graph, sizes)

    def moved(tensor: Tensor) -> Tensor:
        if tensor not in new:  # of a view that was taken by a lowering
            other = Tensor(simplified, tensor.name, at(tensor.shape, sizes), at(tensor.strides, sizes), tensor.dtype)
            other.base, other.start = (
                moved(tensor.base) if tensor.base is not tensor else other,
                at(tensor.start, sizes),
            )
            new[tensor] = other
        return new[tensor]

    groups: dict[Group, Group] = {}
    for group in planned.partition.groups:
        reads, writes = (tuple(map(moved, tensors)) for tensors in (group.reads, group.writes))
        groups[group] = Group(group.nodes, replace(group.lowered, reads=reads, writes=writes))
    partition = Partition(simplified, tuple(groups.values()), planned.partition.decisions, planned.partition.choices)
    kernels = []
    for group, variants in planned.kernels:
        variant = next(v for v in variants if sizes in v.range)
        kernels.append(Kernel(groups[group], at(variant.source, sizes), variant.choice))
    return Plan(whole, planned.steps, partition, tuple(kernels), plan_memory(partition))
