"""The passes between a graph as users build it and the graph whose nodes are fused, in the order in which they run.

A pass maps a graph and options, which have the target, to what it makes of it (`Rewritten`).  The driver below runs
them, follows the tensors of the users' graph through all of them, and checks what every pass made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from inspect import getdoc
from typing import Any

from fusegraph.errors import GraphError
from fusegraph.graph import Graph, Tensor
from fusegraph.lowering.base import DEFAULTS, LeftOut, Options
from fusegraph.lowering.choices import Choice
from fusegraph.passes import reduce_columns, reduce_results, shared_codes
from fusegraph.passes.algorithms import choose
from fusegraph.passes.assigned_products import divide_columns
from fusegraph.passes.assignments import place_values
from fusegraph.passes.attention import recognise
from fusegraph.passes.attention_backward import recognise_backward
from fusegraph.passes.attention_prologue import compute_prologues
from fusegraph.passes.batches import take_apart
from fusegraph.passes.bit_fields import join_fields
from fusegraph.passes.decompose import decompose_for_kernels
from fusegraph.passes.filter_gradients import sum_by_bands
from fusegraph.passes.fuse_gradients import fuse_gradients
from fusegraph.passes.image_layouts import lay_out_images
from fusegraph.passes.index_runs import take_runs
from fusegraph.passes.joined_products import join_products
from fusegraph.passes.joined_reductions import divide_reductions
from fusegraph.passes.joins import copy_parts
from fusegraph.passes.masked_keys import bound_keys
from fusegraph.passes.merged_groups import merge_groups
from fusegraph.passes.operand_layouts import lay_out
from fusegraph.passes.order_attention import order_attention
from fusegraph.passes.orders import order_by_views
from fusegraph.passes.packed_elements import unpack
from fusegraph.passes.packing import PACKING, split_packing
from fusegraph.passes.padded_channels import pad_channels
from fusegraph.passes.parameters import PARAMETERS, mark_parameters
from fusegraph.passes.partition import Decision, Partition
from fusegraph.passes.pools import reduce_pools
from fusegraph.passes.position_products import multiply_positions
from fusegraph.passes.positions import place
from fusegraph.passes.regions import assign_regions
from fusegraph.passes.reshapes import move_reshapes
from fusegraph.passes.result_layouts import lay_out_results
from fusegraph.passes.rewrite import Rewritten
from fusegraph.passes.row_scales import take_out_scales
from fusegraph.passes.shared_heads import share_heads
from fusegraph.passes.shared_positions import count_apart
from fusegraph.passes.simplify import remove_dead_nodes, simplify
from fusegraph.passes.single_elements import combine_single_elements
from fusegraph.passes.sparse_products import multiply_sparsely
from fusegraph.passes.speculation import (
    ASSIGNMENTS,
    ATTENTION,
    FUSED_GRADIENTS,
    GRADIENTS,
    PROLOGUE,
    REGIONS,
    SPARSE,
    NotAccepted,
)
from fusegraph.passes.split_attention import split_attention
from fusegraph.passes.split_contractions import split_contractions
from fusegraph.passes.split_products import split_products
from fusegraph.passes.split_reductions import split_reductions
from fusegraph.passes.split_sorts import split_sorts
from fusegraph.passes.stacked_results import stack_results
from fusegraph.passes.sum_logits import sum_logits
from fusegraph.passes.tap_products import multiply_taps
from fusegraph.passes.transposes import move_transposes
from fusegraph.passes.vector_products import sum_products
from fusegraph.passes.views import foresee_views
from fusegraph.phases import phase


class When(Enum):
    """When a pass runs."""

    ALWAYS = "always"
    FUSING = "with fusion"


@dataclass(frozen=True)
class Pass:
    """A pass: its name, what it makes of a graph, and when it runs.

    A pass that ``writes_out`` makes several nodes of one: reports follow the tensors between these, too.
    """

    name: str
    run: Callable[[Graph, Options], Rewritten]
    when: When = When.FUSING
    writes_out: bool = False


@cache
def summary(run: Callable[..., object]) -> str:
    """Returns the first paragraph of a pass's docstring, in one line: what it does."""
    return " ".join((getdoc(run) or "").partition("\n\n")[0].split())


PIPELINE: tuple[Pass, ...] = (
    Pass(PARAMETERS, mark_parameters),
    Pass(SPARSE, multiply_sparsely),
    Pass("packed elements", unpack, When.ALWAYS, writes_out=True),
    Pass(REGIONS, assign_regions, When.ALWAYS),
    Pass("sums of logits", sum_logits),
    Pass("decomposition", decompose_for_kernels, When.ALWAYS, writes_out=True),
    Pass("dead nodes", remove_dead_nodes, When.ALWAYS),
    Pass("orders", order_by_views),
    Pass("positions", place),
    Pass("simplification", simplify),
    Pass("runs of positions", take_runs),
    Pass("bit fields", join_fields),
    Pass("batches", take_apart),
    Pass("shared heads", share_heads),
    Pass(shared_codes.NAME, shared_codes.copy_codes),
    Pass("shared positions", count_apart),
    Pass("large pools", reduce_pools, When.ALWAYS),
    Pass(GRADIENTS, recognise_backward),
    Pass(ATTENTION, recognise),
    Pass("masked keys", bound_keys),
    Pass(PROLOGUE, compute_prologues),
    Pass(FUSED_GRADIENTS, fuse_gradients),
    Pass("single elements", combine_single_elements),
    Pass("stacked results", stack_results),
    Pass("products with vectors", sum_products),
    Pass("products in parts", split_products),
    Pass("attention in parts", split_attention),
    Pass("order of attention", order_attention),
    Pass("joined reductions", divide_reductions),
    Pass("reshapes", move_reshapes),
    Pass("image layouts", lay_out_images),
    Pass("transposes", move_transposes),
    Pass("views", foresee_views),
    Pass("joined products", join_products),
    Pass("scales of rows", take_out_scales),
    Pass("algorithms", choose, When.ALWAYS),
    Pass("products of taps", multiply_taps),
    Pass(reduce_results.NAME, reduce_results.reduce_results),
    Pass(reduce_columns.NAME, reduce_columns.reduce_columns),
    Pass("long reductions", split_reductions, When.ALWAYS),
    Pass("long sorts", split_sorts, When.ALWAYS),
    Pass("filter gradients", sum_by_bands, When.ALWAYS),
    Pass("products of positions", multiply_positions),
    Pass("merged groups", merge_groups),
    Pass("padded channels", pad_channels),
    Pass("result layouts", lay_out_results),
    Pass("operand layouts", lay_out),
    Pass("parts", copy_parts),
    Pass("long contractions", split_contractions, When.ALWAYS),
    Pass(PACKING, split_packing),
    Pass("assigned products", divide_columns),
    Pass(ASSIGNMENTS, place_values, When.ALWAYS),
)


@dataclass(frozen=True)
class Step:
    """A pass that ran: its name and what it does, the graph before it, and what it made."""

    name: str
    summary: str
    before: Graph
    rewritten: Rewritten
    writes_out: bool = False

    @property
    def changed(self) -> bool:
        return self.rewritten.graph is not self.before


@dataclass(frozen=True)
class Steps:
    """The passes that ran on a graph, in order, and the options that they had."""

    steps: tuple[Step, ...]
    options: Options = DEFAULTS

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def then(self, name: str, run: Callable[..., object], made: Rewritten) -> Steps:
        """Returns the steps with another one behind them, that ran by itself."""
        return replace(self, steps=(*self.steps, Step(name, summary(run), self.graph, made)))

    @property
    def graph(self) -> Graph:
        """The graph that the last one made."""
        return self.steps[-1].rewritten.graph

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(d for step in self for d in step.rewritten.decisions)

    @property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(c for step in self for c in step.rewritten.choices)

    def note(self, name: str) -> Mapping[Any, Any]:
        """Returns what a pass noted by this name; nothing if none did."""
        return next((step.rewritten.notes[name] for step in self if name in step.rewritten.notes), {})

    def counterparts(self) -> dict[Tensor, Tensor]:
        """Returns the last graph's tensor for each of the first graph, and for those inside what was written out.

        Tensors that have none any more are left out.
        """
        found: dict[Tensor, Tensor] = {t: t for t in self.graph.tensors.values()}
        for step in reversed(self.steps):
            if step.changed:
                pairs = step.rewritten.counterparts.items()
                before = {old: found[new] for old, new in pairs if new in found}
                found = found | before if step.writes_out else before
        return found

    def check(self, partition: Partition) -> None:
        """Raises NotAccepted if the partition does not bear out what a pass speculated on."""
        declined: dict[tuple[str, str], str] = {}
        for step in self:
            if step.rewritten.declined is not None:
                found = step.rewritten.declined(partition)
                declined |= {(step.name, name): reason for name, reason in found.items()}
        if declined:
            raise NotAccepted("; ".join(dict.fromkeys(declined.values())), declined)


class Pipeline:
    """The passes on a graph: called with what to leave out, it runs again those that this concerns."""

    def __init__(self, graph: Graph, options: Options, *, fusion: bool) -> None:
        self._graph, self._options = graph, options
        self._passes = [p for p in PIPELINE if fusion or p.when is When.ALWAYS]
        self._steps: list[Step] = []

    @phase("passes")
    def __call__(self, left_out: LeftOut) -> Steps:
        fresh = {name for name, _ in left_out.keys() - self._options.left_out.keys()}
        self._options = replace(self._options, left_out=left_out)
        names = [p.name for p in self._passes]
        # Fusion itself is behind all passes, and has laid tensors into each other's memory.
        first = min(map(names.index, fresh), default=0) if fresh.issubset(names) else 0
        del self._steps[first:]
        graph = self._steps[-1].rewritten.graph if self._steps else self._graph
        for done in self._passes[first:]:
            made = done.run(graph, self._options)
            self._steps.append(Step(done.name, summary(done.run), graph, made, done.writes_out))
            if made.graph is not graph:
                check(done.name, graph, made)
            graph = made.graph
        return Steps(tuple(self._steps), self._options)


def check(name: str, before: Graph, made: Rewritten) -> None:
    """Raises GraphError, naming the pass, if the graph that it made is wrong.

    It must have the same inputs, but for new packed tensors, and outputs, and every node must come after those whose
    results it takes.
    """
    for wrong in _wrong(before, made):
        raise GraphError(f"pass {name!r} made a wrong graph of {before.name!r}: {wrong}")


def _wrong(before: Graph, made: Rewritten) -> Iterator[str]:
    graph, tensors = made.graph, set(made.graph.tensors.values())
    given = graph.inputs[: len(before.inputs)] + [
        t for t in graph.inputs[len(before.inputs) :] if t not in graph.packed
    ]
    for what, old, new in (("inputs", before.inputs, given), ("outputs", before.outputs, graph.outputs)):
        if [t.name for t in old] != [t.name for t in new]:
            yield f"its {what} are {', '.join(t.name for t in new)}, not {', '.join(t.name for t in old)}"
    there = {t for t in tensors if graph.producer(t) is None}
    for node in graph.nodes:
        missing = next((t for t in node.inputs if t not in there), None)
        if missing is not None:
            yield f"{node.name!r} takes {missing.name!r}, which is not made before it"
        there.update(node.outputs)
    for tensor in graph.outputs:
        if tensor not in there:
            yield f"nothing makes its output {tensor.name!r}"
    for tensor, counterpart in made.counterparts.items():
        if counterpart not in tensors:
            yield f"what stands for {tensor.name!r} is no tensor of it"
