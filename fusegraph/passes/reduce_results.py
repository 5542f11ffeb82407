"""Reductions of a contraction's results: split so that its kernel reduces parts of them while it still has them.

The kernel of a contraction has no row or column of its results as a whole, but each of its tiles has parts of some.
What is left to do is a reduction of those parts, which are a small share of the results.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from codegen.contraction import keeps_form
from codegen.spec import ContractionSpec
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import contraction, partials
from fusegraph.lowering.base import Options
from fusegraph.lowering.choices import MADE, whether
from fusegraph.ops.base import Kind
from fusegraph.passes.rewrite import Rewritten
from fusegraph.passes.split_reductions import Split, candidates, split_for, unjoined

#: The name of the pass.
NAME = "reductions of results"


def reduce_results(graph: Graph, options: Options) -> Rewritten:
    """Splits reductions of contractions' results.

    Those are declined whose parts no kernel of a contraction makes, or would be slowed down by.
    """
    found = {node: _split(graph, node) for node in candidates(graph, NAME, options)}
    splits = {node: how for node, how in found.items() if how is not None}
    choices = {n: whether(NAME, n.name, options.settled, str(n.inputs[0].type)) for n in splits}
    made = [{node: how} for node, how in splits.items() if choices[node].taken == MADE]

    def takes(spec: Any) -> bool:
        return isinstance(spec, ContractionSpec) and (not spec.partials or keeps_form(spec, options.target))

    reason = "its parts are not made in the kernel of the contraction, or would slow it down"
    return replace(split_for(graph, made, takes, reason), choices=tuple(choices.values()))


def _split(graph: Graph, node: Node) -> Split | None:
    """Returns how to split a reduction for the contraction that it follows from; None if it stays as it is."""
    x, axes = unjoined(graph, node)
    anchor, joined = _anchor(graph, x), None if x is node.inputs[0] else x
    found = partials.parts(contraction.product(anchor), anchor, axes) if anchor is not None else None
    if found is None or (joined is not None and (found[0] != axes or found[1] is None)):
        return None
    return Split(*found, joined)


def _anchor(graph: Graph, x: Tensor) -> Node | None:
    """Returns the contraction from whose result, of the same shape, a tensor follows element by element."""
    stack, seen = [x], set()
    while stack:
        producer = graph.producer(stack.pop())
        if producer is None or producer in seen or producer.output.shape != x.shape:
            continue
        seen.add(producer)
        if producer.kind is Kind.CONTRACTION:
            return producer
        if producer.kind is Kind.POINTWISE:
            stack += producer.inputs
    return None
