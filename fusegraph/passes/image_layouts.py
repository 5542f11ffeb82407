"""Layouts of images: between convolutions, images lie with their channels last.

Tensor cores read the channels of a position together, and so do vectors of pools and of depthwise convolutions; a
kernel that reads channels first has to turn every tile.  What comes from outside, and what leaves the graph, lies as
its user says: the first kernel that reads it, and the last one that writes it, change the layout on the way.  That is
weighed where all convolutions are direct ones: these read images as they lie, and most write them so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import layout_strides
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.choices import LEFT, MADE, weigh
from fusegraph.lowering.views import view
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.estimates import alone, direct_cycles
from fusegraph.passes.rewrite import Rewrite, Rewritten, replaced, same

#: What is chosen, for all images of a graph.
NAME = "images with channels last"
#: How many times as long images that are left must be estimated to take to be made: what turns others is not counted.
CLEARLY = 1.3
#: Convolutions, and movement whose operands and result have one kind of axes.
_CONVOLUTIONS = (Role.FPROP, Role.DGRAD, Role.WGRAD)
_KEEP_AXES = (Role.SLICE, Role.PAD, Role.CONCATENATE)
#: Bytes of the channels of a position below which they are no vector: such images stay as they are.
LEAST_BYTES = 16


def lay_out_images(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Gives the images between convolutions, pools and what is around them the layout with channels last.

    Those are the operands and results of convolutions, and whatever is connected with them through nodes whose operands
    and results lie alike.
    """
    placed = {t: strides for t, strides in channels_last(graph).items() if t not in graph.output_numbers}
    if all(t.strides == strides for t, strides in placed.items()):
        return same(graph)
    convolutions = [n for n in graph.nodes if n.op.role in _CONVOLUTIONS]
    made, left = (_cycles(graph, convolutions, lying, options) for lying in (placed, {}))
    preferred = LEFT if made is not None and left is not None and left < CLEARLY * made else MADE
    choice = weigh(NAME, convolutions[0].name, {MADE: made, LEFT: left}, preferred, options.settled)
    rewritten = same(graph) if choice.taken == LEFT else replaced(graph, lambda _: None, Rewrite.take_over, placed)
    return replace(rewritten, choices=(choice,))


def _cycles(
    graph: Graph, convolutions: Sequence[Node], placed: Mapping[Tensor, tuple[int, ...]], options: Options
) -> float | None:
    """Returns the cycles that convolutions are estimated to take with some strides; None if one is no direct one."""
    total = 0.0
    for node in convolutions:
        written = _written(graph, node.output)
        lying = {
            t: (t.shape, placed.get(at, at.strides))
            for t, at in ((node.inputs[0], node.inputs[0]), (node.output, written))
        }
        found = direct_cycles(alone(graph, node, lying), options)
        if found is None:
            return None
        total += found
    return total


def _written(graph: Graph, result: Tensor) -> Tensor:
    """Returns what the kernel of a result probably writes: behind pointwise nodes that only it goes through."""
    while result not in graph.output_numbers:
        readers = graph.consumers(result)
        if len(readers) != 1 or readers[0].kind is not Kind.POINTWISE or readers[0].output.shape != result.shape:
            break
        result = readers[0].output
    return result


def channels_last(graph: Graph) -> dict[Tensor, tuple[int, ...]]:
    """Returns the images that had better have their channels last, results among them, with these strides."""
    images = _images(graph)
    return {t: layout_strides(t.shape, "channels_last") for t in images if _may_move(graph, t, images)}


def _images(graph: Graph) -> set[Tensor]:
    """Returns the images of convolutions, and the tensors that are connected with them."""
    beside: dict[Tensor, list[Tensor]] = {}
    stack: list[Tensor] = []
    for node in graph.nodes:
        alike = list(_alike(node))
        for tensor in alike:
            beside.setdefault(tensor, []).extend(alike)
        if node.op.role in _CONVOLUTIONS:
            stack += alike
    found: set[Tensor] = set()
    while stack:
        tensor = stack.pop()
        if tensor not in found:
            found.add(tensor)
            stack += beside.get(tensor, ())
    return found


def _alike(node: Node) -> Iterator[Tensor]:
    """Yields the operands and results of a node that had better lie alike, if any."""
    result = node.output
    if not 3 <= result.rank <= 5:
        return
    if node.op.role is Role.WGRAD:
        yield from node.inputs
    elif node.op.role in _CONVOLUTIONS:
        yield from (node.inputs[0], result)
    elif node.kind is Kind.POINTWISE:
        yield from (t for t in (*node.inputs, result) if t.shape == result.shape)
    elif node.kind is Kind.POOLING or node.op.role in _KEEP_AXES:
        yield from (t for t in (*node.inputs, *node.outputs) if t.rank == result.rank)


def _may_move(graph: Graph, tensor: Tensor, images: set[Tensor]) -> bool:
    """Returns true for an image that our kernels make, unless its readers read it as a view of its present layout."""
    producer = graph.producer(tensor)
    if producer is None or tensor.shape[1] * tensor.dtype.itemsize < LEAST_BYTES:
        return False
    strides = layout_strides(tensor.shape, "channels_last")
    readers = graph.consumers(tensor)
    return any(
        n.kind is not Kind.MOVEMENT
        or any(t in images for t in n.outputs)
        or view(n, strides) is not None
        or view(n, tensor.strides) is None
        for n in readers
    )
