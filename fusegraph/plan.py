"""From a graph to kernels: what every engine that runs kernels starts from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

from codegen import KernelSpec, Schedule, best_schedule, render
from codegen.canonical import canonical
from codegen.declined import Declined
from codegen.kernel import from_the_end, in_sequence, sharing
from codegen.l2_policy import without_evict_last
from codegen.naming import Identifiers
from codegen.spec import KernelSource
from codegen.target import PORTABLE, Target
from fusegraph.errors import GraphError
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import choices
from fusegraph.lowering.base import Options
from fusegraph.passes import order
from fusegraph.passes.algorithms import Algorithm
from fusegraph.passes.crossing import check_overwriting, moved_to, positions, writes_over, written_over
from fusegraph.passes.fuse import fuse
from fusegraph.passes.joined_products import NOTE as JOINED
from fusegraph.passes.launched_together import launch_together
from fusegraph.passes.memory import MemoryPlan, plan_memory
from fusegraph.passes.packing import PACKING
from fusegraph.passes.parameters import memory
from fusegraph.passes.partition import Group, Partition
from fusegraph.passes.pipeline import Pipeline, Steps
from fusegraph.passes.recompute import SAVED, recompute
from fusegraph.passes.row_scales import NOTE as UNSCALED
from fusegraph.passes.saved import Saved, forward_of
from fusegraph.passes.speculation import NoKernel, NotAccepted, attempt
from fusegraph.phases import phase


@dataclass(frozen=True)
class Choice:
    """A kernel's schedule, and why this one; ``us`` is its measured time in microseconds, None if not measured."""

    schedule: Schedule
    reason: str = "cost model"
    us: float | None = None


#: Chooses the schedule of a kernel that computes a group.
Chooser: TypeAlias = Callable[[KernelSpec, Group], Choice]


def by_cost_model(target: Target = PORTABLE) -> Chooser:
    """Returns a chooser of the schedule that the cost model estimates to be fastest on a target."""
    return lambda spec, _: Choice(best_schedule(spec, target))


@dataclass(frozen=True)
class Kernel:
    """A group with its rendered source; arguments are the tensors whose pointers it takes, in order.

    Kernels that compute the same have one source, and so one name.
    """

    group: Group
    source: KernelSource
    choice: Choice

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return self.group.reads + self.group.writes + self.group.positions

    @property
    def name(self) -> str:
        return self.source.name


@dataclass(frozen=True)
class Plan:
    """A graph ready to be built.

    It has the passes that ran, the partition of what they made, the kernels in order, and where intermediates lie.
    """

    graph: Graph
    steps: Steps
    partition: Partition
    kernels: tuple[Kernel, ...]
    memory: MemoryPlan
    #: Makes the packed tensors, which are further inputs of the partitioned graph, of parameters and constants.
    packing: Plan | None = None

    @property
    def simplified(self) -> Graph:
        """The graph that was partitioned."""
        return self.partition.graph

    @cached_property
    def counterparts(self) -> Mapping[Tensor, Tensor]:
        """The partitioned graph's tensor for each one of the graph, and for those inside its composites."""
        return self.steps.counterparts()

    @property
    def copies(self) -> Mapping[Tensor, tuple[Tensor, ...]]:
        """The tensors that are copies of a tensor, where several kernels compute the same."""
        return self.steps.note("copies")

    @property
    def saved(self) -> tuple[Saved, ...]:
        """What is kept in memory for a backward pass, the largest first."""
        return tuple(self.steps.note(SAVED))

    @property
    def choices(self) -> tuple[choices.Choice, ...]:
        """What was weighed, by passes and by fusion."""
        return choices.unique((*self.steps.choices, *self.partition.choices))

    @property
    def algorithms(self) -> Mapping[str, Algorithm]:
        """The algorithm of each convolution, by the name of its node."""
        return self.steps.note("algorithms")

    @property
    def pruned(self) -> Mapping[str, float | None]:
        """The share of its operand's norm that each node of 2:4 sparsity prunes away; None where that is not known."""
        return self.steps.note("pruned")

    @property
    def namesakes(self) -> Mapping[str, tuple[str, ...]]:
        """The names of nodes that were merged, as they compute the same, by the name of the one that is left."""
        return self.steps.note("namesakes")

    @property
    def joined(self) -> Mapping[str, tuple[str, ...]]:
        """The names of results that are parts of a joined one, by its name."""
        return self.steps.note(JOINED)

    @property
    def unscaled(self) -> Collection[str]:
        """The names of operands of products that are rounded before their rows are scaled."""
        return self.steps.note(UNSCALED)

    @property
    def packed(self) -> Mapping[Tensor, tuple[str, ...]]:
        """The packed tensors, and the names of the parameters that each is made of."""
        return self.simplified.packed

    @property
    def packed_bytes(self) -> int:
        """Bytes of memory that packed tensors take."""
        return sum(map(memory, self.packed))

    @property
    def every_kernel(self) -> tuple[Kernel, ...]:
        """The kernels of a call, and behind them those that make packed tensors."""
        return self.kernels + (self.packing.kernels if self.packing is not None else ())

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """Constant arrays that are read from memory."""
        return tuple(dict.fromkeys(t.base for g in self.partition.groups for t in g.reads if t.base.is_constant))


def check_outputs(graph: Graph) -> None:
    """Raises GraphError if there is nothing to compute."""
    if not graph.outputs:
        raise GraphError(f"graph {graph.name!r} has no outputs; mark its results with graph.output(tensor)")


def plan(graph: Graph, options: Options | None = None, *, fusion: bool = True, choose: Chooser | None = None) -> Plan:
    """Returns a graph's kernels: runs the passes (`passes.pipeline`), partitions and renders what they made.

    With ``fusion=False`` every node is a kernel of its own.  ``choose`` decides on schedules (default: `by_cost_model`
    for the target).  Rewrites whose results no kernel takes are left out (`passes.speculation`).  Raises GraphError if
    the graph has no outputs.
    """
    options = options or Options()
    choose = choose or by_cost_model(options.target)
    steps, partition, chosen = partitioned(graph, options, fusion=fusion, choose=choose)
    if fusion and (together := launch_together(partition)) is not partition:
        known = {group: choice for group, _, choice in chosen}
        chosen = _chosen(together, lambda spec, group: known.get(group) or choose(spec, group))
        partition = together
    over = written_over(partition, [(group, choice.schedule) for group, _, choice in chosen]) if fusion else {}
    ahead = order.read_early(partition.graph, {group: c.schedule for group, _, c in chosen}, options.target.planned)
    kernels = rendered(chosen, *in_order(partition, options, fusion=fusion), over, ahead)
    partition = replace(partition, decisions=steps.decisions + partition.decisions)
    packing = steps.note(PACKING).get(PACKING)
    aside = plan(packing, replace(options, prepack=0), choose=choose) if packing else None
    return Plan(graph, steps, partition, kernels, plan_memory(partition, over), aside)


def partitioned(
    graph: Graph, options: Options, *, fusion: bool, choose: Chooser
) -> tuple[Steps, Partition, Sequence[Chosen]]:
    """Returns the passes that ran, the partition of what they made, and its kernels with their schedules.

    Raises GraphError if the graph has no outputs.
    """
    check_outputs(graph)

    def accepted(steps: Steps) -> tuple[Steps, Partition, list[Chosen]]:
        with phase("fusion"):
            partition = fuse(steps.graph, steps.options, enabled=fusion)
            steps.check(partition)
            if fusion:
                forward = forward_of(graph, steps.graph, steps.counterparts()) if graph.losses else frozenset()
                again, partition = recompute(partition, steps.options, forward)
                steps = steps.then("recomputation", recompute, again)
        chosen = _chosen(partition, choose)
        check_overwriting(partition.graph, [(group, choice.schedule) for group, _, choice in chosen])
        return steps, partition, chosen

    try:
        _, found = attempt(Pipeline(graph, options, fusion=fusion), accepted_by=accepted)
    except NotAccepted as refusal:  # the kernel families take every node of the op table: a defect of fusegraph
        raise GraphError(f"graph {graph.name!r} has a node without a kernel: {refusal}") from None
    return found


def in_order(partition: Partition, options: Options, *, fusion: bool) -> tuple[Set[Group], Set[Group]]:
    """Returns the groups whose kernels walk memory from the end, and those that leave their results in the cache."""
    turned = order.from_the_end(partition, options.target.planned) if fusion else frozenset()
    return turned, order.found_in_cache(partition, turned, options.target.planned)


#: A group that is a kernel, a key that groups share if they compute the same of other tensors, and its schedule.
Chosen: TypeAlias = tuple[Group, str, Choice]


@phase("schedules")
def _chosen(partition: Partition, choose: Chooser) -> list[Chosen]:
    """Returns a partition's groups with their schedules, in order.  Raises NoKernel if some of them have none."""
    schedules: dict[str, Choice] = {}
    without: list[tuple[Sequence[Node], str]] = []
    found: list[Chosen] = []
    for group in partition.groups:
        if group.family == "view":
            continue
        alike = repr(canonical(group.lowered.spec))
        try:
            schedules[alike] = schedules.get(alike) or choose(group.lowered.spec, group)
        except Declined as reason:
            without.append((group.nodes, str(reason)))
        else:
            found.append((group, alike, schedules[alike]))
    if without:
        raise NoKernel(without)
    return found


class Place(NamedTuple):
    """What a kernel's code depends on besides its specification and schedule: where it is among the others.

    turned  it walks memory from the end.
    first   none comes before it.
    early   the next one may begin before it ends.
    cached  it finds operands in the L2 cache.
    over    it writes memory that it reads.
    moved   what is known of the positions at which it writes.
    known   it reads operands before those in front of it end, as these do not write them.
    """

    turned: bool
    first: bool
    early: bool
    cached: bool
    over: bool
    moved: tuple[object, ...]
    known: bool = False


def places(
    chosen: Sequence[Chosen],
    turned: Set[Group],
    cached: Set[Group],
    over: Mapping[Tensor, Tensor],
    known: Set[Group] = frozenset(),
) -> list[Place]:
    """Returns the places of groups whose kernels run one after the other; the sets are those of `in_order`, and the
    groups that may read operands before those in front of them end.

    Results that are written ``over`` others: `fusegraph.passes.crossing.written_over`.
    """
    groups = [group for group, _, _ in chosen]
    early = [*(order.may_come_in_early(group, choice.schedule) for group, _, choice in chosen[1:]), False]
    return [
        Place(g in turned, n == 0, early[n], g in cached, writes_over(g, over), positions(g), n > 0 and g in known)
        for n, g in enumerate(groups)
    ]


def source_of(group: Group, spec: KernelSpec, schedule: Schedule, place: Place) -> KernelSource:
    """Returns the kernel of a group at a place, whose specification has other sizes or another name perhaps."""
    source = render(spec, without_evict_last(schedule) if place.cached else schedule)
    source = from_the_end(source) if place.turned else source
    source = sharing(source) if place.over else source
    source = in_sequence(source, first=place.first, early=place.early, known=place.known)
    return moved_to(source, group)


class _Sources:
    """Sources of kernels, by what they compute, how and where, and their names."""

    def __init__(self) -> None:
        self.names = Identifiers()
        self.found: dict[tuple[str, Schedule, Place], KernelSource] = {}


_SHARED: ContextVar[_Sources | None] = ContextVar("shared kernels", default=None)


@contextmanager
def shared_kernels() -> Iterator[None]:
    """Lets all graphs that are planned in a block, as the pieces of a program, share kernels that compute the same."""
    token = _SHARED.set(_Sources())
    try:
        yield
    finally:
        _SHARED.reset(token)


@phase("rendering")
def rendered(
    chosen: Sequence[Chosen],
    turned: Set[Group],
    cached: Set[Group],
    over: Mapping[Tensor, Tensor],
    known: Mapping[Group, Schedule],
) -> tuple[Kernel, ...]:
    """Returns the kernels of groups; what else is given is that of `places`, with the schedules of groups that read
    operands early.

    Groups that compute the same of other tensors have one source, with the names of the first of them: layers of a
    network that are alike are compiled once, also where they are graphs of their own (`shared_kernels`).
    """
    sources = _SHARED.get() or _Sources()
    kernels = []
    for (group, alike, choice), place in zip(chosen, places(chosen, turned, cached, over, known.keys())):
        if place.cached:
            choice = replace(choice, schedule=without_evict_last(choice.schedule))
        if place.known:
            choice = replace(choice, schedule=known[group])
        key = alike, choice.schedule, place
        if key not in sources.found:
            spec = replace(group.lowered.spec, name=sources.names.unique(group.lowered.spec.name))
            sources.found[key] = source_of(group, spec, choice.schedule, place)
        kernels.append(Kernel(group, sources.found[key], choice))
    return tuple(kernels)
