"""Gradients of filters of few channels a group become sums over bands of positions (`ops.parts`), which have kernels of
their own (`lowering.filter_gradient`), where these are faster than a tiled product.
"""

from __future__ import annotations

from math import inf, prod

from codegen.filter_gradient.schedule import cycles
from fusegraph.graph import Graph, Node
from fusegraph.lowering import filter_gradient
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.choices import Choice, weigh
from fusegraph.ops.parts import BANDS
from fusegraph.passes.merged_groups import merged
from fusegraph.passes.operand_layouts import estimated
from fusegraph.passes.padded_channels import padded
from fusegraph.passes.position_products import as_product
from fusegraph.passes.rewrite import Rewrite, Rewritten, replaced_where_chosen
from fusegraph.passes.split_contractions import START, STREAMED, add_in_parts

#: What is chosen.
NAME, BY_BANDS, PRODUCT = "gradient of a filter", "sums over bands", "a tiled product"
#: How much faster than a tiled product they must be estimated to be.
MARGIN = 1.15
#: Most parts; most pairs of a channel and a filter of a group for which a tiled product would be mostly empty.
MOST_PARTS, NARROW = 1024, 16


def sum_by_bands(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Sums up gradients of filters of few channels a group by bands of positions, where that is faster."""
    return replaced_where_chosen(graph, lambda node: weighed(node, graph, options), _write)


def weighed(node: Node, graph: Graph, options: Options) -> tuple[Choice, int] | None:
    """Returns the choice of a gradient's kernel, and the parts of bands, 0 for a tiled product.

    None is for what cannot be a sum over bands, or is so at once much slower.
    """
    if filter_gradient.unsuitable(node) is not None:
        return None
    target = options.target.planned
    x, loss = node.inputs
    groups = node.attributes["groups"]
    band, rate = filter_gradient.band_of(node), STREAMED * target.bytes_per_cycle
    total = filter_gradient.spec_of(node, graph, 1, band).bands.total
    powers = [1 << k for k in range(MOST_PARTS.bit_length())]
    found = options.settled.get((NAME, node.name))
    # Estimates may not think of what is settled.
    settled = next((n for n in powers if found and found.taken == _in(n)), None)
    narrow = groups > 1 and x.shape[1] * loss.shape[1] <= NARROW * groups**2
    tiled = inf if narrow else min(merged(node, graph, target).cycles, as_product(node, graph, target))
    limit = (tiled - START * target.launch_cycles) / MARGIN
    slow = loss.size * prod(node.output.shape[1:]) / (target.fma * target.sms) >= limit
    if slow and settled is None:
        return None
    estimates: dict[int, float] = {}
    for count in sorted({min(total, n) for n in powers}) if settled is None else [settled]:
        spec = filter_gradient.spec_of(node, graph, count, band)
        more = target.launch_cycles + 2 * 4 * spec.words * prod(spec.space) / rate if count > 1 else 0.0
        estimates[count] = cycles(spec, target) + more
    best = min(estimates, key=estimates.__getitem__)
    if estimates[best] < limit < inf:
        limit = min(limit, *(each / MARGIN for each in _tiled(node, graph, options)))
    alternatives = {_in(best): estimates[best], PRODUCT: None if narrow else limit * MARGIN}
    preferred = _in(best) if estimates[best] < limit else PRODUCT
    alike = f"{[t.type for t in node.inputs]} {dict(node.attributes)}"
    choice = weigh(NAME, node.name, alternatives, preferred, options.settled, alike)
    return choice, 0 if choice.taken == PRODUCT else best


def _tiled(node: Node, graph: Graph, options: Options) -> list[float]:
    """Returns the cycles of a tiled product with operands as other passes would lay them out."""
    return [estimated(node, graph, options), *padded(node, graph, options).values()]


def _in(parts: int) -> str:
    return f"{BY_BANDS}, {parts} parts"


def _write(rewrite: Rewrite, node: Node, parts: int) -> None:
    how = {"parts": parts, "band": filter_gradient.band_of(node)}
    if parts > 1:
        add_in_parts(rewrite, node, BANDS, how)
    else:
        rewrite.graph.add_node(
            Node(BANDS, rewrite.inputs(node), {**node.attributes, **how}, rewrite.result(node.output))
        )
