"""Gradients by a convolution's input as one product of every loss with all taps of the filters, which are then added up
where they lie over the image (`ops.columns`), where that is faster than a tiled sum of the taps over each element.

The stride's phases have different taps: a tiled sum multiplies zeros for those that a phase lacks, and its tiles are
empty where the image has few channels.  The product has neither, but its results go through memory.
"""

from __future__ import annotations

from math import prod

from codegen.sizes import Size
from fusegraph.dtypes import float32
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

#: What is chosen.
NAME, SUM, PRODUCT = "gradient of an image", "a sum over taps", "a product of all taps"
#: How much faster than a tiled sum the product must be estimated to be, with the kernel that adds up.
MARGIN = 1.2


def multiply_taps(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Makes gradients by the input products of all taps, which are then added up, where that is faster."""
    return replaced_where_chosen(graph, lambda node: _weighed(node, graph, options), _write)


def _weighed(node: Node, graph: Graph, options: Options) -> tuple[Choice, bool] | None:
    """Returns the choice of a gradient's kernels, and whether it becomes a product; None for what cannot be one."""
    if not _may_be(node, graph):
        return None
    loss, w = node.inputs
    made = Graph("product", graph.io_dtype, graph.compute_dtype)
    given = [made._add_tensor(name, t.shape, t.strides, t.dtype) for name, t in (("loss", loss), ("w", w))]
    product = _product(made, node, given[0], given[1])
    if product.nbytes > options.workspace:
        return None
    target = options.target.planned
    maker = made.producer(product)
    assert maker is not None
    for tensor, strides in zip(maker.inputs, _strides(node)):
        tensor.strides = strides
    added = target.launch_cycles + (product.nbytes + node.output.nbytes) / (STREAMED * target.bytes_per_cycle)
    cycles = {SUM: estimated(node, graph, options), PRODUCT: estimated(maker, made, options) + added}
    preferred = PRODUCT if cycles[SUM] > MARGIN * cycles[PRODUCT] else SUM
    alike = f"{[t.type for t in node.inputs]} {[t.strides for t in node.inputs]} {dict(node.attributes)}"
    choice = weigh(NAME, node.name, cycles, preferred, options.settled, alike)
    return choice, choice.taken == PRODUCT


def _may_be(node: Node, graph: Graph) -> bool:
    if node.op.role is not Role.DGRAD or "parts" in node.attributes:
        return False
    (loss, w), at = node.inputs, node.attributes
    if {loss.dtype, w.dtype, node.output.dtype, graph.compute_dtype} != {float32}:
        return False
    if any(isinstance(n, Size) for n in (*loss.shape, *w.shape, *node.output.shape)):
        return False
    if not loss.size * w.size * node.output.size or prod(w.shape[2:]) == 1 or at["groups"] > 1:
        return False
    if set(at["dilation"]) != {1} or at["mode"] == "convolution" or at.get("algorithm") == "direct":
        return False
    return direct_convolution.suits(node, graph) is not None


def _last(node: Node) -> bool:
    """Tells whether channels of the losses are neighbours in memory."""
    loss = node.inputs[0]
    return loss.strides[1] == 1 or loss.shape[1] == 1


def _product(graph: Graph, node: Node, loss: Tensor, w: Tensor) -> Tensor:
    """Adds the product of all losses with all taps; returns it: channels of the result are neighbours in memory, or
    positions, as channels or positions are in the losses.
    """
    apply, rank, filters = graph.apply, loss.rank - 2, loss.shape[1]
    if _last(node):
        a = apply(TABLE["transpose"], (loss,), {"perm": (0, *range(2, rank + 2), 1)})
        b = apply(TABLE["transpose"], (w,), {"perm": (0, *range(2, rank + 2), 1)})
        operands = [(a, (-1, filters)), (b, (filters, -1))]
    else:
        a = apply(TABLE["transpose"], (w,), {"perm": (*range(1, rank + 2), 0)})
        operands = [(a, (-1, filters)), (loss, (loss.shape[0], filters, -1))]
    flat = tuple(apply(TABLE["reshape"], (t,), {"shape": shape}) for t, shape in operands)
    return apply(TABLE["matmul"], flat, {"compute_dtype": node.attributes["compute_dtype"]})


def _strides(node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns how the product's operands lie, the taps of the filters being copied where they must."""
    (loss, w), last = node.inputs, _last(node)
    filters, taps = w.shape[0], prod(w.shape[1:])
    if last:
        return (loss.strides[-1], 1), (taps, 1)
    return (filters, 1) if w.strides[0] == 1 else (1, taps), (loss.strides[0], loss.strides[1], loss.strides[-1])


def _write(rewrite: Rewrite, node: Node, _: bool) -> None:
    graph, (loss, w), old = rewrite.graph, rewrite.inputs(node), node.output
    product, rank = named(_product(graph, node, loss, w), node.name, "products"), loss.rank - 2
    taps, positions, channels = w.shape[2:], loss.shape[2:], w.shape[1]
    if _last(node):
        shape = (loss.shape[0], *positions, *taps, channels)
        order = (0, 2 * rank + 1, *range(rank + 1, 2 * rank + 1), *range(1, rank + 1))
        lying = graph.apply(TABLE["reshape"], (product,), {"shape": shape})
        columns = graph.apply(TABLE["transpose"], (lying,), {"perm": order})
    else:
        columns = graph.apply(
            TABLE["reshape"], (product,), {"shape": (loss.shape[0], channels, *taps, *positions)}
        )
    at = node.attributes
    how = {"size": old.shape[2:], "stride": at["stride"], "padding": at["padding"], "dtype": old.dtype}
    graph.add_node(Node(COL2IM, (columns,), how, rewrite.result(old)))
