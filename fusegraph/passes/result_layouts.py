"""Layouts of results: gradients are written with their channels last, and turned by a kernel behind.

With a stride neighbours of an image's row belong to different phases, which tiles of their own compute.  Where channels
come first, each phase would write every second element, or fewer, of what memory moves together.  So it is with the
taps of a filter's gradient, if it is not added up from parts: what adds them up writes it in any layout.
"""

from __future__ import annotations

from dataclasses import replace

from fusegraph.graph import Graph, Node
from fusegraph.layout import layout_strides
from fusegraph.lowering import direct_convolution
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.choices import Choice, weigh
from fusegraph.lowering.convolution import of_layouts
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, replaced
from fusegraph.passes.split_contractions import best_cut

#: What is chosen.
NAME, AS_IT_IS, TURNED = "layout of a gradient", "as it is", "turned"


def lay_out_results(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Has gradients write channels last, where turning the result behind takes less time."""
    chosen = {node.output: choice for node in graph.nodes if (choice := weighed(node, graph, options)) is not None}
    found = {t for t, choice in chosen.items() if choice.taken == TURNED}
    # What leaves the graph lies as its user says; what does not is turned by what follows.
    placed = {t: layout_strides(t.shape, "channels_last") for t in found if t not in graph.output_numbers}
    made = replaced(graph, lambda node: node.output in found and node.output not in placed, _turn, placed)
    return replace(made, choices=tuple(chosen.values()))


def weighed(node: Node, graph: Graph, options: Options) -> Choice | None:
    """Returns the choice of another layout of a node's result; None where nothing is chosen.

    There is no other one where something takes the present one for a view.
    """
    plain = (Kind.POINTWISE, Kind.CONTRACTION, Kind.REDUCTION)
    if not (node.output in graph.output_numbers or all(n.kind in plain for n in graph.consumers(node.output))):
        return None
    cycles = of_layouts(node, node.output, options.target.planned)
    if cycles is None or direct_convolution.suits(node, graph) is None or "parts" in node.attributes:
        return None
    if node.op.role is Role.WGRAD and best_cut(node, graph, options.target.planned)[0] > 1:
        return None
    alternatives = dict(zip((AS_IT_IS, TURNED), cycles))
    preferred = TURNED if cycles[0] > cycles[1] else AS_IT_IS
    return weigh(NAME, node.name, alternatives, preferred, options.settled, str([t.type for t in node.inputs]))


def _turn(rewrite: Rewrite, node: Node, _: bool) -> None:
    output = rewrite.result(node.output)
    strides = layout_strides(output.shape, "channels_last")
    made = intermediate(rewrite.graph, node.name, "channels last", output.shape, strides, output.dtype)
    rewrite.graph.add_node(Node(node.op, rewrite.inputs(node), node.attributes, made))
    identity = TABLE["identity"]
    rewrite.graph.add_node(Node(identity, (made,), {**identity.attributes, "dtype": output.dtype}, output))
