"""Padded channels: a filter's gradient of an odd number of channels is one of more, the rest of them zeros.

Tensor cores take 16 channels of a position together, and asynchronous copies 8.  Where an image has other numbers,
a copy of it with a few more channels costs less than bringing its elements one by one to every tap.
"""

from __future__ import annotations

from math import prod

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import layout_strides, packed_strides, stride_order
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.choices import Choice, weigh
from fusegraph.ops import TABLE
from fusegraph.ops.base import Role
from fusegraph.passes.estimates import alone
from fusegraph.passes.operand_layouts import estimated
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, named, replaced_where_chosen
from fusegraph.passes.split_contractions import STREAMED

#: Channels to whose multiples images are padded, and the least bytes of an image whose copy could be worthwhile.
UNITS, LEAST_BYTES = (16, 32, 64), 1 << 18
#: What is chosen.
NAME, AS_IT_IS, PADDED = "channels of a filter's gradient", "as they are", "padded"
#: How much faster the gradient must be estimated to be, with the kernels around it.
MARGIN = 1.2


def pad_channels(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Pads the channels of images of which filters' gradients are computed, where that makes them faster."""
    return replaced_where_chosen(graph, lambda node: weighed(node, graph, options), _write)


def weighed(node: Node, graph: Graph, options: Options) -> tuple[Choice, int] | None:
    """Returns the choice of padding an image, and to how many channels, 0 if it stays; None where there is none."""
    estimates = padded(node, graph, options)
    if not estimates:
        return None
    before = estimated(node, graph, options)
    best = min(estimates, key=estimates.__getitem__)
    preferred = PADDED if MARGIN * estimates[best] < before else AS_IT_IS
    alike = f"{[t.type for t in node.inputs]} {dict(node.attributes)}"
    choice = weigh(NAME, node.name, {AS_IT_IS: before, PADDED: estimates[best]}, preferred, options.settled, alike)
    return choice, best if choice.taken == PADDED else 0


def padded(node: Node, graph: Graph, options: Options) -> dict[int, float]:
    """Returns the cycles that a filter's gradient takes with the image padded to so many channels, with the copy."""
    if node.op.role is not Role.WGRAD or "parts" in node.attributes or node.attributes["groups"] > 1:
        return {}
    image, loss = node.inputs
    common = node.op.operand_dtypes((image.type, loss.type))[0]
    channels = image.shape[1]
    if not common.is_float or common.itemsize != 2 or not (image.dtype == loss.dtype == common):
        return {}
    if channels % UNITS[0] == 0 or prod(node.attributes["taps"]) == 1 or image.nbytes < LEAST_BYTES:
        return {}
    target = options.target.planned
    estimates = {}
    for count in sorted({-(-channels // unit) * unit for unit in UNITS}):
        moved = image.nbytes + 2 * image.nbytes * count / channels  # written, and read again in place of the image
        copies = 2 * target.launch_cycles + (moved - image.nbytes) / (STREAMED * target.bytes_per_cycle)
        own = alone(graph, node, _widened(node, count))
        estimates[count] = copies + estimated(own.nodes[0], own, options)
    return estimates


def _widened(node: Node, channels: int) -> dict[Tensor, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the shapes and strides of image and filter with so many channels; the filter lies as before."""
    (image, _), out = node.inputs, node.output
    wide, filters = ((t.shape[0], channels, *t.shape[2:]) for t in (image, out))
    return {
        image: (wide, layout_strides(wide, "channels_last")),
        out: (filters, packed_strides(filters, stride_order(out.shape, out.strides))),
    }


def _write(rewrite: Rewrite, node: Node, channels: int) -> None:
    graph, (image, loss) = rewrite.graph, rewrite.inputs(node)
    (_, strides), lying = _widened(node, channels).values()
    none = ((0, 0),) * (image.rank - 2)
    wide = graph.apply(TABLE["pad"], (image,), {"padding": ((0, 0), (0, channels - image.shape[1]), *none)})
    wide.strides = strides
    named(wide, image.name, "padded")
    made = intermediate(graph, node.output.name, "padded", *lying, node.output.dtype)
    graph.add_node(Node(node.op, (wide, loss), node.attributes, made))
    output, rank = rewrite.result(node.output), node.output.rank
    bounds = {"starts": (0,) * rank, "stops": output.shape, "steps": (1,) * rank}
    graph.add_node(Node(TABLE["slice"], (made,), bounds, output))
