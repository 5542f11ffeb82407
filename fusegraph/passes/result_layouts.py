"""Layouts of results: an image's gradient by phases is written with its channels last, and turned by a kernel behind.

With a stride neighbours of an image's row belong to different phases, which tiles of their own compute.  Where channels
come first, each phase would write every second element, or fewer, of what memory moves together.
"""

from __future__ import annotations

from fusegraph.graph import Graph, Node
from fusegraph.layout import layout_strides
from fusegraph.lowering import direct_convolution
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.convolution import turned_behind
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, replaced


def lay_out_results(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Has gradients of images by phases write channels last, where turning the result behind takes less time."""
    found = {node.output for node in graph.nodes if _is_turned(node, graph, options)}
    # What leaves the graph lies as its user says; what does not is turned by what follows.
    placed = {t: layout_strides(t.shape, "channels_last") for t in found if t not in graph.output_numbers}
    return replaced(graph, lambda node: node.output in found and node.output not in placed, _turn, placed)


def _is_turned(node: Node, graph: Graph, options: Options) -> bool:
    """Returns true if another layout of a node's result is better, and nothing takes the present one for a view."""
    if not turned_behind(node, node.output, options.target.planned) or direct_convolution.suits(node, graph) is None:
        return False
    plain = (Kind.POINTWISE, Kind.CONTRACTION, Kind.REDUCTION)
    return node.output in graph.output_numbers or all(n.kind in plain for n in graph.consumers(node.output))


def _turn(rewrite: Rewrite, node: Node, _: bool) -> None:
    output = rewrite.result(node.output)
    strides = layout_strides(output.shape, "channels_last")
    made = intermediate(rewrite.graph, node.name, "by phases", output.shape, strides, output.dtype)
    rewrite.graph.add_node(Node(node.op, rewrite.inputs(node), node.attributes, made))
    identity = TABLE["identity"]
    rewrite.graph.add_node(Node(identity, (made,), {**identity.attributes, "dtype": output.dtype}, output))
