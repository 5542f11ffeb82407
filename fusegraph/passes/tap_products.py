"""Convolutions as one product of every position's channels with all taps of the filters, whose results are then added
up where they lie over the image that is made (`ops.columns`), where that is faster than a tiled sum of taps.

The phases of a strided convolution's gradient by its input have different taps: a tiled sum multiplies zeros for those
that a phase lacks.  And if few channels are made, most of its tiles are empty.  The product has neither, but its
results go through memory.  A convolution whose stride is 1 is such a gradient, of filters turned around.
"""

from __future__ import annotations

from math import prod

from codegen.sizes import Size
from fusegraph.dtypes import bfloat16, float16, float32
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import direct_convolution
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.choices import Choice, weigh
from fusegraph.ops import TABLE
from fusegraph.ops.base import Role
from fusegraph.ops.columns import COL2IM
from fusegraph.passes.operand_layouts import estimated
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, replaced_where_chosen
from fusegraph.passes.split_contractions import STREAMED
from fusegraph.passes.views import foresee_views

#: What is chosen.
NAME, SUM, PRODUCT = "products of taps", "a sum over taps", "a product of all taps"
#: How much faster than a tiled sum the product must be estimated to be, with the kernel that adds up; the windows of
#: convolutions themselves are estimated worse than those of gradients.
MARGIN = {Role.DGRAD: 1.1, Role.FPROP: 1.6}
#: How much longer than a copy adding up takes.
ADDED = 1.3
#: So many channels fill tiles well; only float32 without tf32 has phases whose zeros are multiplied.
NARROW = 64


def multiply_taps(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Makes convolutions, and gradients by their inputs, products of all taps that are then added up, where that is
    faster.
    """
    made = replaced_where_chosen(graph, lambda node: _weighed(node, graph, options), _write)
    foresee_views(made.graph)
    return made


def _weighed(node: Node, graph: Graph, options: Options) -> tuple[Choice, bool] | None:
    """Returns the choice of a convolution's kernels, and whether it becomes a product; None for what cannot be one."""
    if not _may_be(node, graph):
        return None
    made = Graph("product", graph.io_dtype, graph.compute_dtype)
    image, w = (made._add_tensor(n, t.shape, t.strides, t.dtype) for n, t in zip(("image", "w"), node.inputs))
    product = _product(made, node, image, w)
    if product.nbytes > options.workspace:
        return None
    target, maker, role = options.target.planned, made.producer(product), node.op.role
    assert maker is not None
    assert role is not None
    for tensor, strides in zip(maker.inputs, _strides(node)):
        tensor.strides = strides
    launches = 1 if _lies(node) else 2
    moved = product.nbytes + node.output.nbytes
    added = launches * target.launch_cycles + ADDED * moved / (STREAMED * target.bytes_per_cycle)
    cycles = {SUM: estimated(node, graph, options), PRODUCT: estimated(maker, made, options) + added}
    preferred = PRODUCT if cycles[SUM] > MARGIN[role] * cycles[PRODUCT] else SUM
    alike = f"{node.op.name} {[(t.type, t.strides) for t in node.inputs]} {dict(node.attributes)}"
    choice = weigh(NAME, node.name, cycles, preferred, options.settled, alike)
    return choice, choice.taken == PRODUCT


def _may_be(node: Node, graph: Graph) -> bool:
    if node.op.role not in (Role.FPROP, Role.DGRAD) or "parts" in node.attributes:
        return False
    (image, w), at = node.inputs, node.attributes
    if image.dtype != w.dtype or image.dtype not in (float32, float16, bfloat16) or graph.compute_dtype != float32:
        return False
    if any(isinstance(n, Size) for n in (*image.shape, *w.shape, *node.output.shape)):
        return False
    steps = (*w.shape[2:], *at["stride"])
    if not image.size * w.size * node.output.size or prod(steps) == 1 or at["groups"] > 1:
        return False
    if set(at["dilation"]) != {1} or at.get("algorithm") == "direct" or min(_before(node))[0] < 0:
        return False
    if node.op.role is Role.FPROP and max(at["stride"]) > 1:
        return False
    phased = image.dtype == float32 and at["compute_dtype"] is None and max(at["stride"]) > 1
    if node.output.shape[1] > NARROW and not phased:
        return False
    return direct_convolution.suits(node, graph) is not None


def _before(node: Node) -> tuple[tuple[int, int], ...]:
    """Returns the padding of the convolution whose gradient by the input a node is."""
    padding = node.attributes["padding"]
    if node.op.role is Role.DGRAD:
        return tuple(padding)
    return tuple((k - 1 - before, 0) for k, (before, _) in zip(node.inputs[1].shape[2:], padding))


def _last(node: Node) -> bool:
    """Tells whether channels of the result are neighbours in memory."""
    return node.output.strides[1] == 1 and node.output.shape[1] > 1


def _taps(graph: Graph, node: Node, w: Tensor) -> Tensor:
    """Returns the filters as (channels that are summed up, channels that are made, *taps of the gradient)."""
    forward, rank = node.op.role is Role.FPROP, w.rank - 2
    if forward:
        w = graph.apply(TABLE["transpose"], (w,), {"perm": (1, 0, *range(2, w.rank))})
    if forward == (node.attributes["mode"] == "convolution") or prod(w.shape[2:]) == 1:
        return w
    ends = {"starts": (None,) * w.rank, "stops": (None,) * w.rank, "steps": (1, 1, *[-1] * rank)}
    return graph.apply(TABLE["slice"], (w,), ends)


def _product(graph: Graph, node: Node, image: Tensor, w: Tensor) -> Tensor:
    """Adds the product of all positions with all taps; returns it: its channels are neighbours in memory, or its
    positions, as those of the result are.
    """
    apply, rank, (images, channels) = graph.apply, image.rank - 2, image.shape[:2]
    last, taps = (0, *range(2, rank + 2), 1), _taps(graph, node, w)
    if _last(node):
        rows = (-1, channels) if image.strides[1] == 1 else (images, -1, channels)
        a = apply(TABLE["transpose"], (image,), {"perm": last})
        operands = [(a, rows), (apply(TABLE["transpose"], (taps,), {"perm": last}), (channels, -1))]
    else:
        a = apply(TABLE["transpose"], (taps,), {"perm": (*range(1, rank + 2), 0)})
        operands = [(a, (-1, channels)), (image, (images, channels, -1))]
    flat = tuple(apply(TABLE["reshape"], (t,), {"shape": shape}) for t, shape in operands)
    return apply(TABLE["matmul"], flat, {"compute_dtype": node.attributes["compute_dtype"], "dtype": float32})


def _lies(node: Node) -> bool:
    """Tells whether the filters need no copy in front of the product."""
    w = node.inputs[1]
    taps = w.size // w.shape[0]
    turned = node.op.role is Role.FPROP or node.attributes["mode"] == "convolution"
    return not turned and (w.strides[1] if _last(node) else w.strides[-1]) == 1 and w.strides[0] == taps


def _strides(node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns how the product's operands lie, the taps of the filters being copied where they must."""
    image, w = node.inputs
    channels = image.shape[1]
    taps = w.size // channels
    outer, inner, position = image.strides[0], image.strides[1], image.strides[-1]
    if _last(node):
        return (position, 1) if inner == 1 else (outer, position, inner), (taps, 1)
    return (1, taps) if _lies(node) else (channels, 1), (outer, inner, position)


def _write(rewrite: Rewrite, node: Node, _: bool) -> None:
    graph, (image, w), old = rewrite.graph, rewrite.inputs(node), node.output
    product, rank = named(_product(graph, node, image, w), node.name, "products"), image.rank - 2
    images, channels, taps, positions = image.shape[0], old.shape[1], w.shape[2:], image.shape[2:]
    if _last(node):
        order = (0, 2 * rank + 1, *range(rank + 1, 2 * rank + 1), *range(1, rank + 1))
        lying = graph.apply(TABLE["reshape"], (product,), {"shape": (images, *positions, *taps, channels)})
        columns = graph.apply(TABLE["transpose"], (lying,), {"perm": order})
    else:
        columns = graph.apply(TABLE["reshape"], (product,), {"shape": (images, channels, *taps, *positions)})
    how = {"size": old.shape[2:], "stride": node.attributes["stride"], "padding": _before(node), "dtype": old.dtype}
    graph.add_node(Node(COL2IM, (columns,), how, rewrite.result(old)))
