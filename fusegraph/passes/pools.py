"""Pooling over large windows that lie side by side is a reduction of the image's dimensions divided into them.

A thread of a pool kernel folds whole windows, which suits windows of a few elements that overlap.  Rows kernels share
the elements of a large one among threads, and read what lies next to each other together.
"""

from __future__ import annotations

from math import prod

from codegen.sizes import least
from fusegraph.graph import Graph, Node
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops import TABLE
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, replaced_by
from fusegraph.pattern import Found, made_by

#: Elements of a window from which on it is reduced; and where there are fewer windows for each multiprocessor than
#: threads that keep it busy.
LEAST_ELEMENTS, LEAST_OF_FEW, BUSY_THREADS = 64, 16, 1024
#: How windows are folded -> the mode of a reduction that does the same.
FOLDS = {"mean": "avg", "max": "max"}


def reduce_pools(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Makes reductions of pools whose large windows lie side by side."""
    few = options.target.planned.sms * BUSY_THREADS
    pools = made_by(op for op in TABLE.values() if op.fold in FOLDS)
    return replaced_by(graph, ((pools.when(lambda _, node: _lie_side_by_side(node, few)), _reduce),))


def _lie_side_by_side(node: Node, few: int) -> bool:
    """Tells whether each element is in exactly one window, and the windows are large and alike.

    Where there are a ``few`` windows, smaller ones are large.
    """
    values, x = node.attributes, node.inputs[0]
    if any(least(node.output.shape[axis]) < 1 for axis in values["axes"]):
        return False
    each = [x.shape[axis] // node.output.shape[axis] for axis in values["axes"]]
    shared = all(x.shape[axis] == n * node.output.shape[axis] for axis, n in zip(values["axes"], each))
    if not shared or prod(each) < (LEAST_OF_FEW if node.output.size < few else LEAST_ELEMENTS):
        return False
    if "window" not in values:
        return True
    plain = not any(map(any, values["padding"])) and set(values.get("dilation", (1,))) == {1}
    return plain and [*values["window"]] == [*values["stride"]] == each


def _reduce(rewrite: Rewrite, node: Node, _: Found) -> None:
    """Writes a pool as the reduction of its windows' dimensions."""
    (x,), graph = rewrite.inputs(node), rewrite.graph
    shape: list[int] = []
    axes: list[int] = []
    for axis, size in enumerate(x.shape):
        out = node.output.shape[axis]
        shape.append(out)
        if axis in node.attributes["axes"]:
            axes.append(len(shape))
            shape.append(size // out)
    windows = named(graph.apply(TABLE["reshape"], (x,), {"shape": tuple(shape)}), node.name, "windows")
    attributes = {
        "mode": FOLDS[node.op.fold],
        "axes": tuple(axes),
        "keepdims": False,
        "dtype": None,
        "correction": 0.0,
    }
    rewrite.take_over(Node(TABLE["reduction"], (windows,), attributes, node.output), (windows,))
