"""Attention whose tiles of queries take times that depend on data (packed sequences): each block takes the next tile
when it is done with one, by a counter in memory, instead of a fixed share of the tiles.
"""

from __future__ import annotations

from codegen.attention.wgmma_schedule import spanned
from fusegraph.dtypes import int32
from fusegraph.graph import Graph, Node
from fusegraph.layout import packed_strides
from fusegraph.lowering.attention import whole_spec
from fusegraph.lowering.base import Options
from fusegraph.ops.base import Kind
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, replaced


def order_attention(graph: Graph, options: Options) -> Rewritten:
    """Gives attention a counter of tiles where the time of a tile depends on data."""

    def depends(node: Node) -> bool:
        whole = node.kind is Kind.ATTENTION and node.attributes["parts"] == 1
        return whole and spanned(whole_spec(node, graph, options, "attention")[0])

    return replaced(graph, depends, _count)


def _count(rewrite: Rewrite, node: Node, _: bool) -> None:
    order = intermediate(rewrite.graph, node.name, "order", (1,), packed_strides((1,)), int32)
    results = (*map(rewrite.result, node.outputs), order)
    rewrite.graph.add_node(Node(node.op, rewrite.inputs(node), {**node.attributes, "order": True}, *results))
