"""Attention's gradients by one kernel, where there would be one over queries and one over keys (`attention_backward`).

Both compute the products of queries with keys and of the loss with values.  Together they compute them once, and the
sums of queries are added up in memory, in float32, from where another kernel rounds them.  Which architectures have
such a kernel, and for what, is found when schedules are chosen.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from codegen.declined import Declined
from fusegraph.dtypes import float32, int32
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides
from fusegraph.lowering.base import Options
from fusegraph.lowering.choices import Choice, speculate
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind
from fusegraph.passes.decompose import NARROW
from fusegraph.passes.partition import Decision
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, same
from fusegraph.passes.speculation import FUSED_GRADIENTS

#: Queries of the smallest tile; at each tile blocks take turns.
LEAST_QUERIES = 16
#: With fewer keys, computing twice takes no longer than moving sums through memory.
LEAST_KEYS = 256


def fuse_gradients(graph: Graph, options: Options) -> Rewritten:
    """Makes one node of the gradients of an attention by queries and of those by keys and values."""
    pairs: dict[Node, Node] = {}
    decisions = []
    choices: list[Choice] = []
    nodes = [n for n in graph.nodes if n.kind is Kind.ATTENTION_BACKWARD]
    for queries in nodes:
        keys = next((n for n in nodes if _together(queries, n)), None)
        if keys is None or queries.output.size * float32.itemsize > options.workspace:
            continue
        origin = keys.attributes["origin"]
        reason = options.left_out.get((FUSED_GRADIENTS, origin))
        try:
            if reason is None:
                speculate(FUSED_GRADIENTS, origin, options.settled, choices, str([t.type for t in keys.inputs]))
        except Declined as measured:
            reason = str(measured)
        text = f"two kernels, over queries and over keys: {reason}"
        if reason is None:
            pairs[queries] = keys
            text = "one kernel: what both need is computed once, sums of queries are added up in memory"
        decisions.append(Decision(queries.output.name, keys.outputs[0].name, reason is None, text))
    if not pairs:
        return replace(same(graph, decisions), choices=tuple(choices))
    rewrite = Rewrite(graph)
    first = {n: pair for pair in pairs.items() for n in pair}
    done = set()
    for node in graph.nodes:
        if node not in first:
            rewrite.take_over(node)
        elif first[node] not in done:
            done.add(first[node])
            _join(rewrite, *first[node])
    return replace(rewrite.done(decisions), choices=tuple(choices))


def _together(queries: Node, keys: Node) -> bool:
    """Returns true if these are the gradients of one attention, by queries alone, and by keys and values."""
    a, b = queries.attributes, keys.attributes
    return (
        a["over"] == "queries"
        and a["results"] == ("first",)
        and b["results"] == ("first", "second")
        and queries.inputs == keys.inputs
        and a["score"] is b["score"]
        and not a["sloped"]
        and queries.output.dtype.itemsize == 2
        and a["score"].anchor.output.shape[-1] >= LEAST_KEYS
        and queries.output.size > 0
    )


def _join(rewrite: Rewrite, queries: Node, keys: Node) -> None:
    graph, old = rewrite.graph, queries.output
    out = rewrite.result(old)
    *batch, rows, _ = old.shape

    def tensor(part: str, shape: tuple[int, ...], dtype: Any) -> Tensor:
        return intermediate(graph, queries.name, part, shape, packed_strides(shape), dtype)

    sums = tensor("sums", old.shape, float32)
    order = tensor("order", (1 + prod(batch) * -(-rows // LEAST_QUERIES),), int32)
    attributes = {**keys.attributes, "results": ("first", "second", "by_queries", "order")}
    results = (*map(rewrite.result, keys.outputs), sums, order)
    graph.add_node(Node(keys.op, rewrite.inputs(keys), attributes, *results))
    factor = queries.attributes["factor"]
    value = sums if factor == 1 else graph.apply(TABLE["mul"], (sums, factor), {})
    graph.add_node(Node(NARROW, (value,), {"dtype": out.dtype}, out))
