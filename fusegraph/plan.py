"""From a graph to kernels: what every engine that runs kernels starts from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from codegen import KernelSpec, Schedule, best_schedule, render
from codegen.anonymous import anonymous
from codegen.declined import Declined
from codegen.kernel import from_the_end, in_sequence
from codegen.naming import Names
from codegen.pointwise import PointwiseSchedule
from codegen.rows.schedule import RowsSchedule
from codegen.spec import KernelSource
from codegen.target import PORTABLE, Target
from fusegraph.errors import GraphError
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import Options
from fusegraph.passes import algorithms, order
from fusegraph.passes.algorithms import Algorithm
from fusegraph.passes.attention import Recognised, recognise
from fusegraph.passes.attention_backward import recognise_backward
from fusegraph.passes.attention_front import compute_in_front
from fusegraph.passes.decompose import decompose
from fusegraph.passes.fuse import fuse
from fusegraph.passes.join_gradients import join_gradients
from fusegraph.passes.memory import MemoryPlan, plan_memory
from fusegraph.passes.operand_layouts import lay_out
from fusegraph.passes.order_attention import order_attention
from fusegraph.passes.packed_elements import unpacked
from fusegraph.passes.partition import Group, Partition
from fusegraph.passes.recompute import recompute
from fusegraph.passes.reduce_columns import Columns, reduce_columns
from fusegraph.passes.reduce_results import Halved, reduce_results
from fusegraph.passes.reshapes import move_reshapes
from fusegraph.passes.rewrite import Simplified, same
from fusegraph.passes.simplify import simplify
from fusegraph.passes.speculation import LeftOut, NoKernel
from fusegraph.passes.split_attention import split_attention
from fusegraph.passes.split_contractions import split_contractions
from fusegraph.passes.split_products import split_products
from fusegraph.passes.split_reductions import split_reductions
from fusegraph.passes.split_sorts import split_sorts
from fusegraph.passes.views import foresee_views


@dataclass(frozen=True)
class Choice:
    """A kernel's schedule, and why this one; ``us`` are the microseconds it took where it was measured."""

    schedule: Schedule
    reason: str = "cost model"
    us: float | None = None


#: Chooses the schedule of a kernel that computes a group.
Chooser: TypeAlias = Callable[[KernelSpec, Group], Choice]


def by_cost_model(target: Target = PORTABLE) -> Chooser:
    """Chooses the schedule that the cost model thinks is best on a target."""
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
        return self.group.reads + self.group.writes

    @property
    def name(self) -> str:
        return self.source.name


@dataclass(frozen=True)
class Plan:
    """A graph ready to be built: its simplified form, partition, kernels in order, and where intermediates lie.

    counterpart gives for each tensor of the graph, and for those between the nodes of its composites, the one of the
    simplified graph that stands for it; copies what else does, where several kernels compute the same.  algorithms
    tells what does each convolution, by name of the node.  namesakes has the names of nodes that are computed once: of
    the one that is, those of all.
    """

    graph: Graph
    simplified: Graph
    counterpart: Mapping[Tensor, Tensor]
    partition: Partition
    kernels: tuple[Kernel, ...]
    memory: MemoryPlan
    algorithms: Mapping[str, Algorithm] = field(default_factory=dict)
    copies: Mapping[Tensor, tuple[Tensor, ...]] = field(default_factory=dict)
    namesakes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """Constant arrays that are read from memory."""
        return tuple(dict.fromkeys(t.base for g in self.partition.groups for t in g.reads if t.base.is_constant))


def check_outputs(graph: Graph) -> None:
    """Raises GraphError if there is nothing to compute."""
    if not graph.outputs:
        raise GraphError(f"graph {graph.name!r} has no outputs; mark its results with graph.output(tensor)")


def namesakes(simplified: Simplified) -> dict[str, tuple[str, ...]]:
    """The names of the new graph's tensors that stand for one of another name, or for several, and whose."""
    found: dict[str, tuple[str, ...]] = {}
    for old, new in simplified.counterpart.items():
        found[new.name] = (*found.get(new.name, ()), old.name)
    return {new: every for new, every in found.items() if every != (new,)}


def _fused(graph: Graph, options: Options, enabled: bool, left_out: LeftOut) -> tuple[list[Simplified], Partition]:
    """Splits long sums and sorts, lays factors out and fuses what there is then; returns these steps and the partition.

    Reductions of a contraction's results, or of columns beside rows, are split only if its kernel takes the parts.
    """
    declined: set[str] = set()
    while True:
        halved = reduce_results(graph, declined) if enabled else Halved(same(graph), {})
        results = halved.simplified.graph
        columns = reduce_columns(results, options, declined) if enabled else Columns(same(results), {}, {})
        split = split_reductions(columns.simplified.graph, options)
        in_runs = split_sorts(split.graph)
        laid_out = lay_out(in_runs.graph, options) if enabled else same(in_runs.graph)
        cut = split_contractions(laid_out.graph, options)
        partition = fuse(cut.graph, options, enabled=enabled, left_out=left_out)
        refused = halved.refused(partition, options.target) | columns.refused(partition)
        if not refused:
            return [halved.simplified, columns.simplified, split, in_runs, laid_out, cut], partition
        declined |= refused


def plan(graph: Graph, options: Options | None = None, *, fusion: bool = True, choose: Chooser | None = None) -> Plan:
    """Decomposes, simplifies, chooses algorithms, splits long sums, lays factors out, partitions and renders a graph.

    With ``fusion=False`` every node is a kernel of its own.  ``choose`` decides on schedules (default: `by_cost_model`
    for the target).  A rewrite whose result no kernel takes is left out (`passes.speculation`).  Raises GraphError if
    the graph has no outputs.
    """
    check_outputs(graph)
    options = options or Options()
    left_out: LeftOut = {}
    while True:
        try:
            return _plan(graph, options, fusion, choose or by_cost_model(options.target), left_out)
        except NoKernel as refusal:
            more = refusal.undo(left_out)
            if not more:  # the kernel families take every node of the op table: a defect of fusegraph
                raise GraphError(f"graph {graph.name!r} has a node without a kernel: {refusal}") from None
            left_out = {**left_out, **more}


def _plan(graph: Graph, options: Options, fusion: bool, choose: Chooser, left_out: LeftOut) -> Plan:
    """`plan`, without the rewrites left out."""
    in_bytes = unpacked(graph)
    written_out = decompose(in_bytes.graph, scatters=True)
    simplified = simplify(written_out.graph, enabled=fusion)
    nothing = Recognised(same(simplified.graph), ())
    gradients = recognise_backward(simplified.graph, options, left_out) if fusion else nothing
    recognised = recognise(gradients.simplified.graph, options, left_out) if fusion else nothing
    computed = compute_in_front(recognised.simplified.graph, options, left_out) if fusion else nothing
    attended = computed.simplified
    joined = join_gradients(attended.graph, options, left_out) if fusion else Recognised(same(attended.graph), ())
    in_parts = split_products(joined.simplified.graph) if fusion else same(attended.graph)
    side_by_side = split_attention(in_parts.graph, options) if fusion else same(in_parts.graph)
    in_order = order_attention(side_by_side.graph, options) if fusion else same(side_by_side.graph)
    moved = move_reshapes(in_order.graph) if fusion else same(in_order.graph)
    if fusion:
        foresee_views(moved.graph)
    chosen = algorithms.choose(moved.graph, options)
    steps, partition = _fused(chosen.graph, options, fusion, left_out)
    counterpart = dict(simplified.counterpart)
    early = (
        gradients.simplified.counterpart,
        recognised.simplified.counterpart,
        attended.counterpart,
        joined.simplified.counterpart,
        in_parts.counterpart,
        side_by_side.counterpart,
        in_order.counterpart,
        moved.counterpart,
        chosen.counterpart,
    )
    for mapping in (*early, *(step.counterpart for step in steps)):
        counterpart = {old: mapping[new] for old, new in counterpart.items() if new in mapping}
    counterpart |= {old: counterpart[new] for old, new in written_out.counterpart.items() if new in counterpart}
    counterpart |= {old: counterpart[new] for old, new in in_bytes.counterpart.items() if new in counterpart}
    copies: Mapping[Tensor, tuple[Tensor, ...]] = {}
    if fusion:
        recomputed = recompute(partition, options, left_out)
        partition, copies = recomputed.partition, recomputed.copies
        alive = recomputed.counterpart
        counterpart = {old: alive[new] for old, new in counterpart.items() if new in alive}
    early_decisions = gradients.decisions + recognised.decisions + computed.decisions + joined.decisions
    partition = replace(partition, decisions=early_decisions + partition.decisions)
    turned = order.from_the_end(partition, options.target.planned) if fusion else frozenset()
    kernels = _rendered(partition, choose, turned, options.target.planned)
    memory = plan_memory(partition)
    alike = namesakes(simplified)
    return Plan(graph, partition.graph, counterpart, partition, kernels, memory, chosen.algorithms, copies, alike)


def _rendered(partition: Partition, choose: Chooser, turned: Set[Group], target: Target) -> tuple[Kernel, ...]:
    """The kernels of a partition's groups; those that are ``turned`` begin at the end of memory.

    Groups that compute the same of other tensors have one source, with the names of the first of them: layers of a
    network that are alike are compiled once.
    """
    groups = [g for g in partition.groups if g.family != "view"]
    names = Names()
    choices: dict[str, Choice] = {}
    sources: dict[tuple[str, bool, bool, bool, bool], KernelSource] = {}
    found = order.found_in_cache(partition, turned, target)
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
