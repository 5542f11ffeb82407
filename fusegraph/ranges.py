"""Plans for graphs whose sizes vary: a partition, and a few variants of each of its kernels, for a range of sizes.

The passes run at both ends of a range.  If the kernels that they make differ in nothing but the sizes, and these follow
from the dimensions alone, the partition holds for the range; else it is cut in two.  `fusegraph.variants` finds the
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import isqrt, prod
from typing import Any, TypeAlias

from codegen import Schedule, Target, estimated
from codegen.sizes import Bounds, Size, at, in_units, sizes_in, values
from codegen.spec import KernelSource, KernelSpec
from fusegraph.dims import bounds_of, corner, generic
from fusegraph.errors import GraphError, ShapeError
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import Options
from fusegraph.lowering.choices import Settled, Settling
from fusegraph.ops.base import TensorType
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
from fusegraph.tensor import Position
from fusegraph.variants import NEAR, TOLERANCE, Names, Range, Variant, Variants, fastest

#: Sizes by the names of symbols (`codegen.sizes.Size`).
Sizes: TypeAlias = Mapping[str, int]
#: What `partitioned` returns.
_Partitioned: TypeAlias = tuple[Steps, Partition, Sequence[Chosen]]
#: Elements of the largest tensor of graphs that are planned ahead.
LARGE = 2**29
#: Multiples of so many elements of 16 bits are rows of whole vectors, or of whole words.
UNITS = (8, 2)
#: Partitions that are tried for a graph of a few nodes, and at least for those of more, in inverse proportion; ranges
#: that are left then get choices that are not the best.
MOST, NODES, LEAST = 192, 16, 48
#: Ranges that are tried for a kernel of a few, and at least for one of more, in inverse proportion: where cuts bring
#: nothing, further ones do not.
TRIES, KERNELS, FEWEST = 32, 12, 8
#: How near to the size at which another partition begins ranges are cut, and ways to choose otherwise that are tried.
CLOSE, WAYS = 1.02, 4
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
        return _instance(self.graph, mine, sizes, self.options.target)


def plan_ranges(
    graph: Graph, options: Options | None = None, *, fusion: bool = True, choose: Chooser | None = None
) -> SizedPlan:
    """Returns plans of a graph for all sizes that its Dims allow.  Raises what `fusegraph.plan.plan` does."""
    options = options or Options()
    return _Planner(graph, options, fusion, choose or by_cost_model(options.target)).run()


class _Planner:
    """Plans a graph for its ranges; one with ``spare`` plans only those for which there are fast kernels."""

    def __init__(self, graph: Graph, options: Options, fusion: bool, choose: Chooser, *, spare: bool = False) -> None:
        self._graph, self._how = graph, (options, fusion, choose)
        self._options, self._fusion, self.choose = self._how
        self.made = SizedPlan(graph, options, fusion, choose)
        self.named, self.spare = Names(), spare
        self.left = max(LEAST, min(MOST, MOST * NODES // max(len(graph.nodes), 1)))
        self.bounds = ahead(graph)
        self._known: dict[tuple[Any, ...], _Partitioned] = {}
        for which in ("min", "max"):
            check_shapes(graph, corner(self.bounds, which))

    def run(self) -> SizedPlan:
        self.plan(_first_ranges(self.bounds))
        for units in self.units():
            counted = _Planner(_mapped(self._graph, partial(in_units, units=units))[0], *self._how, spare=True)
            counted.named, counted.left = self.named, self.left
            # Sizes of 0 and 1 are left to the other plans.
            least = {n: Bounds(max(b.min, 2), b.max) if n in self.bounds else b for n, b in counted.bounds.items()}
            if all(b.min <= b.max for b in least.values()):
                counted.plan([Range(least)])
                self.left = counted.left
            self.made.aligned.append((units, counted.made))
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

    def _plan(self, range_: Range) -> tuple[Range, ...]:
        """Plans a range, or returns its parts; after as many partitions as are tried it has none."""
        if not range_.varying:
            self.made.plans.append(self._single(range_))
            return ()
        low, high = (self._partitioned(range_.end(which), range_) for which in ("min", "max"))
        reason = self._difference(low, high)
        if reason and (range_.spread <= NEAR or (self.left <= 0 and not self.spare)):
            reason, high = self._settled(range_, low, high, reason)
        if not reason:
            kernels = self._kernels(range_, high[1], high[2])
            self.made.plans.append(RangePlan(range_, high[0], high[1], kernels, self._packing(high[0])))
            return ()
        parts = self._parts(range_, high) if self.left > 0 else None
        if parts is None:
            self.made.by_size.append((range_, reason))
        return parts or ()

    def _parts(self, range_: Range, high: _Partitioned) -> tuple[Range, Range] | None:
        """Returns a range in two parts, None if it is one size.

        They meet where the partition begins to be that of the largest sizes, along one dimension; in the middle if
        that is nowhere, or there are so many nodes that something is different everywhere.
        """
        if len(self._graph.nodes) > NODES:
            return range_.halves()
        found = {name: first for name in range_.varying if (first := self._first(range_, name, high)) is not None}
        if not found:
            return range_.halves()
        name = max(found, key=lambda n: range_.bounds[n].max / max(range_.bounds[n].min, 1))
        return range_.cut(name, found[name] - 1)

    def _first(self, range_: Range, name: str, high: _Partitioned) -> int | None:
        """Returns about the least size of a symbol from which on a range has the partition of its largest sizes.

        None if all of them, or hardly any, have it.
        """
        (least, largest), ends = range_.bounds[name], range_.end("max")

        def alike(size: int) -> bool:
            return not self._difference(self._partitioned({**ends, name: size}, range_), high)

        if least * NEAR > largest or alike(generic(least, least, largest)):
            return None
        least, first = max(least, 1), largest
        while first > least * CLOSE and first - least > 1:
            middle = isqrt(least * first)
            if alike(generic(middle, least, largest)):
                first = middle
            else:
                least = max(middle, least + 1)
        return first if largest >= NEAR * first else None

    def _settled(self, range_: Range, low: _Partitioned, high: _Partitioned, reason: str) -> tuple[str, _Partitioned]:
        """Returns a partition of the largest sizes that the smallest ones have too, by choices that are not the best.

        They are those of one end, or what is weighed at one end alone is chosen otherwise.  If there is none, the
        partition and the reason are as they were.
        """
        small, large = ({c.key: c for c in (*each[0].choices, *each[1].choices)} for each in (low, high))
        of_high, of_low = ({k: Settled(c.taken) for k, c in both.items()} for both in (small | large, large | small))
        single = [c for key, c in (small | large).items() if c.others and not (key in small and key in large)]
        tried = [of_high, of_low]
        for kinds in [{c.what for c in single}, *({what} for what in dict.fromkeys(c.what for c in single))][:WAYS]:
            otherwise = {c.key: Settled(c.others[0]) for c in single if c.what in kinds}
            tried += [of_high | otherwise] if otherwise else []
        for settled in tried:
            again = [self._partitioned(range_.end(which), range_, settled) for which in ("min", "max")]
            if not self._difference(again[0], again[1]):
                return "", again[1]
        return reason, high

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
        placed = places(chosen, *in_order(partition, self._options, fusion=self._fusion))
        for (group, alike, _), each in zip(chosen, placed):
            place = each._replace(first=False)  # the first one may wait, too: what else is alike shares its kernels
            key = alike, place, group if place.over else None
            if key not in made:
                variants = Variants(partition.graph, group, self.choose, place, self.named, self._options.target)
                made[key] = variants.of(range_, tries)
                self.made.by_size += variants.without
            found.append((group, made[key]))
        return tuple(found)


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
) -> tuple[Graph, Callable[[Tensor], Tensor]]:
    """Returns a graph at sizes by symbol, and a function that returns its tensor for one of the old graph.

    With ``vary`` sizes are still Sizes, but for those of the symbols in ``fixed``.
    """
    if isinstance(graph, OpenGraph):
        return graph.known(sizes), lambda tensor: tensor
    return _mapped(graph, lambda part: at(part, sizes, vary=vary, fixed=fixed))


class OpenGraph(Graph):
    """The inputs of a graph that is known when its sizes are, as its nodes do not follow from Dims.

    known   makes the graph of sizes by symbol.
    reason  why it does not follow.
    """

    def __init__(self, name: str, known: Callable[[Sizes], Graph], reason: str) -> None:
        super().__init__(name)
        self.known, self.reason = known, reason


def _mapped(graph: Graph, changed: Callable[[Any], Any]) -> tuple[Graph, Callable[[Tensor], Tensor]]:
    """Returns a graph with other sizes, and a function that returns its tensor for one of the old graph.

    That makes tensors for views, too, which lowerings took of tensors of the graph.
    """
    made, new = Graph(graph.name, graph.io_dtype, graph.compute_dtype), dict[Tensor, Tensor]()

    def moved(old: Tensor) -> Tensor:
        if old not in new:
            tensor = new[old] = Tensor(made, old.name, changed(old.shape), changed(old.strides), old.dtype, old.value)
            tensor.base, tensor.start, tensor.own_strides = (
                moved(old.base),
                changed(old.start),
                changed(old.own_strides),
            )
            if (place := old.position) is not None:
                tensor.position = Position(moved(place.index), changed(place.step), changed(place.size))
        return new[old]

    made.tensors = {name: moved(tensor) for name, tensor in graph.tensors.items()}
    made._automatic, made._returned = set(map(moved, graph._automatic)), set(map(moved, graph._returned))
    made.inputs, made.parameters = list(map(moved, graph.inputs)), set(map(moved, graph.parameters))
    made.donated = set(map(moved, graph.donated.intersection(graph.inputs)))
    made.packed = {moved(t): names for t, names in graph.packed.items()}
    for node in graph.nodes:
        attributes = changed(dict(node.attributes))
        made.add_node(Node(node.op, tuple(map(moved, node.inputs)), attributes, *map(moved, node.outputs)))
    made.outputs = list(map(moved, graph.outputs))
    made.updates = {moved(t): moved(x) for t, x in graph.updates.items()}
    return made, moved


def ahead(graph: Graph) -> dict[str, Bounds]:
    """Returns bounds of the symbols of a graph's sizes, narrowed until no tensor has more than `LARGE` elements.

    Sizes beyond are planned by size: positions of 64 bits make other kernels.
    """
    bounds = bounds_in(graph)
    sizes = {prod(t.shape) for t in graph.tensors.values()}
    while max(map(int, at(tuple(sizes), {n: b.max for n, b in bounds.items()})), default=0) > LARGE:
        name = max(bounds, key=lambda n: bounds[n].max / max(bounds[n].min, 1))
        low, high = bounds[name]
        if high <= 2 * max(low, 1):
            break
        bounds[name] = Bounds(low, high // 2)
    return bounds


def bounds_in(graph: Graph) -> dict[str, Bounds]:
    """Returns bounds of the symbols of a graph's shapes, strides and attributes."""
    every = [(t.shape, t.strides) for t in graph.tensors.values()]
    return bounds_of(sizes_in([*every, *(dict(node.attributes) for node in graph.nodes)]))


def varies(graph: Graph) -> bool:
    """Tells whether a graph's sizes vary."""
    return any(isinstance(size, Size) for tensor in graph.inputs for size in (*tensor.shape, *tensor.strides))


def check_shapes(graph: Graph, sizes: Sizes) -> None:
    """Raises GraphError for a node whose results have other shapes at some sizes than its operands make there.

    Raises ShapeError for a node whose operands do not go together there.
    """
    where = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    for node in graph.nodes:
        types = tuple(TensorType(at(t.shape, sizes), t.dtype) for t in node.inputs)
        try:
            inferred = node.op.infer(types, at(dict(node.attributes), sizes))
        except ShapeError as error:
            raise ShapeError(f"{node.name!r}, at {where}: {error}") from None
        for made, tensor in zip(inferred if isinstance(inferred, tuple) else (inferred,), node.outputs):
            if tuple(made.shape) != at(tensor.shape, sizes):
                raise GraphError(
                    f"the shape of {tensor.name!r} does not follow the sizes that vary: {list(tensor.shape)} would be "
                    f"{list(at(tensor.shape, sizes))} at {where}, {node.op.name} makes {list(made.shape)}"
                )


def _instance(graph: Graph, planned: RangePlan, sizes: Sizes, target: Target) -> Plan:
    """Returns the plan of one size: kernels that are compiled, with the numbers that they take."""
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
    return Plan(
        graph_at(graph, sizes)[0], planned.steps, partition, tuple(kernels), plan_memory(partition), planned.packing
    )
