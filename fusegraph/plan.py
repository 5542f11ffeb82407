"""From a graph to kernels: what every engine that runs kernels starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from codegen import PORTABLE, KernelSpec, Schedule, best_schedule, render
from codegen.anonymous import anonymous
from codegen.arch import Arch
from codegen.declined import Declined
from codegen.kernel import from_the_end, in_sequence
from codegen.naming import Names
from codegen.pointwise import PointwiseSchedule
from codegen.rows.schedule import RowsSchedule
from codegen.spec import KernelSource
from fusegraph.errors import GraphError
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import Options
from fusegraph.passes import order
from fusegraph.passes.algorithms import Algorithm
from fusegraph.passes.fuse import fuse
from fusegraph.passes.memory import MemoryPlan, plan_memory
from fusegraph.passes.partition import Group, Partition
from fusegraph.passes.pipeline import Pipeline, Steps
from fusegraph.passes.recompute import recompute
from fusegraph.passes.speculation import NoKernel, NotAccepted, attempt


@dataclass(frozen=True)
class Choice:
    """A kernel's schedule, and why this one; ``us`` are the microseconds it took where it was measured."""

    schedule: Schedule
    reason: str = "cost model"
    us: float | None = None


#: Chooses the schedule of a kernel that computes a group.
Chooser: TypeAlias = Callable[[KernelSpec, Group], Choice]


def by_cost_model(arch: Arch = PORTABLE) -> Chooser:
    """Chooses the schedule that the cost model thinks is best on an architecture; by default on all of them."""
    return lambda spec, _: Choice(best_schedule(spec, arch))


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
        return self.group.reads + self.group.writes

    @property
    def name(self) -> str:
        return self.source.name


@dataclass(frozen=True)
class Plan:
    """A graph ready to be built: the passes that ran on it, the partition of what they made, its kernels in order, and
    where intermediates lie.
    """

    graph: Graph
    steps: Steps
    partition: Partition
    kernels: tuple[Kernel, ...]
    memory: MemoryPlan

    @property
    def simplified(self) -> Graph:
        """The graph that was partitioned."""
        return self.partition.graph

    @cached_property
    def counterparts(self) -> Mapping[Tensor, Tensor]:
        """The partitioned graph's tensor for each of the graph and those between the nodes of its composites."""
        return self.steps.counterparts()

    @property
    def copies(self) -> Mapping[Tensor, tuple[Tensor, ...]]:
        """What else stands for a tensor, where several kernels compute the same."""
        return self.steps.note("copies")

    @property
    def algorithms(self) -> Mapping[str, Algorithm]:
        """What does each convolution, by the name of its node."""
        return self.steps.note("algorithms")

    @property
    def namesakes(self) -> Mapping[str, tuple[str, ...]]:
        """The names of all nodes that are computed once, by the name of the one that is."""
        return self.steps.note("namesakes")

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

    With ``fusion=False`` every node is a kernel of its own.  ``choose`` decides on schedules (default:
    `by_cost_model`).  Rewrites whose results no kernel takes are left out (`passes.speculation`).  Raises GraphError if
    the graph has no outputs.
    """
    check_outputs(graph)
    options = options or Options()
    choose = choose or by_cost_model()

    def accepted(steps: Steps) -> tuple[Steps, Partition, tuple[Kernel, ...]]:
        partition = fuse(steps.graph, steps.options, enabled=fusion)
        steps.check(partition)
        if fusion:
            again, partition = recompute(partition, steps.options)
            steps = steps.then("recomputation", recompute, again)
        turned = order.from_the_end(partition) if fusion else frozenset()
        return steps, partition, _rendered(partition, choose, turned)

    try:
        _, (steps, partition, kernels) = attempt(Pipeline(graph, options, fusion=fusion), accepted_by=accepted)
    except NotAccepted as refusal:  # the kernel families take every node of the op table: a defect of fusegraph
        raise GraphError(f"graph {graph.name!r} has a node without a kernel: {refusal}") from None
    partition = replace(partition, decisions=steps.decisions + partition.decisions)
    return Plan(graph, steps, partition, kernels, plan_memory(partition))


def _rendered(partition: Partition, choose: Chooser, turned: Set[Group]) -> tuple[Kernel, ...]:
    """The kernels of a partition's groups; those that are ``turned`` begin at the end of memory.

    Groups that compute the same of other tensors have one source, with the names of the first of them: layers of a
    network that are alike are compiled once.
    """
    groups = [g for g in partition.groups if g.family != "view"]
    names = Names()
    choices: dict[str, Choice] = {}
    sources: dict[tuple[str, bool, bool, bool, bool], KernelSource] = {}
    found = order.found_in_cache(partition, turned)
    refused: list[tuple[Sequence[Node], str]] = []
    kernels = []
    for number, group in enumerate(groups):
        spec = group.lowered.spec
        alike = repr(anonymous(spec))
        if alike not in choices:
            try:
                choices[alike] = choose(spec, group)
            except Declined as reason:
                refused.append((group.nodes, str(reason)))
                continue
        choice = choices[alike]
        if group in found and isinstance(choice.schedule, (PointwiseSchedule, RowsSchedule)):
            choice = replace(choice, schedule=replace(choice.schedule, lasting=False))
        early = number + 1 < len(groups) and order.may_come_in_early(groups[number + 1])
        key = alike, group in turned, number == 0, early, group in found
        if key not in sources:
            source = render(replace(spec, name=names.unique(spec.name)), choice.schedule)
            source = from_the_end(source) if group in turned else source
            sources[key] = in_sequence(source, first=number == 0, early=early)
        kernels.append(Kernel(group, sources[key], choice))
    if refused:
        raise NoKernel(refused)
    return tuple(kernels)
