"""Chooses the algorithm of each convolution, and writes out Winograd's as the nodes that it is made of.

The choice follows from shapes, layouts, dtypes and the target alone, by an estimate: it is the same on every machine
that runs what was planned for one, and so are the results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from codegen.target import Target
from fusegraph.dtypes import float32
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import layout_strides, packed_strides
from fusegraph.lowering import direct_convolution
from fusegraph.lowering.base import Options
from fusegraph.lowering.choices import Choice, weigh
from fusegraph.lowering.convolution import is_product
from fusegraph.ops import TABLE
from fusegraph.ops import winograd as w
from fusegraph.ops.base import Role
from fusegraph.passes import estimates
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, replaced
from fusegraph.passes.split_contractions import START, STREAMED, best_cut

#: How much faster than the direct sum Winograd's algorithm must be estimated to be, to be taken.
MARGIN = 1.2

DIRECT, PRODUCT, IMPLICIT = "direct", "matrix product", "implicit GEMM"
#: What is chosen: the direct sum, or Winograd's.
NAME, WINOGRAD = "algorithm", "winograd"
_CONVOLUTIONS = (Role.FPROP, Role.DGRAD, Role.WGRAD)


@dataclass(frozen=True)
class Algorithm:
    """The algorithm of a convolution: its name, why this one, and for Winograd's the side of a tile of results.

    ``choice`` is there if it was weighed.
    """

    name: str
    reason: str
    tile: int | None = None
    choice: Choice | None = None


def choose(graph: Graph, options: Options) -> Rewritten:
    """Decides on the algorithm of every convolution, and writes out those that are Winograd's.

    The note "algorithms" has the algorithm of each convolution, by the name of its node.
    """
    algorithms = {n.name: algorithm(n, graph, options) for n in graph.nodes if n.op.role in _CONVOLUTIONS}
    choices = tuple(a.choice for a in algorithms.values() if a.choice is not None)
    tiles = {name: found.tile for name, found in algorithms.items()}
    made = replaced(graph, lambda node: tiles.get(node.name), _Parts().write)
    return replace(made, notes={"algorithms": algorithms}, choices=choices)


# ---- the choice


def algorithm(node: Node, graph: Graph, options: Options) -> Algorithm:
    """Returns the algorithm of a conv_fprop, conv_dgrad or conv_wgrad, and why."""
    asked, choice = node.attributes.get("algorithm"), None
    no = w.unsuitable(node.op.role, tuple(t.type for t in node.inputs), node.attributes)
    if no is None and not (node.output.size and node.inputs[0].size):
        no = "there is nothing to multiply"
    if no is None and graph.compute_dtype != float32:
        no = f"the graph computes in {graph.compute_dtype}"
    if no is None and asked in w.TILES:
        return _winograd(node, w.TILES[asked], "asked for")
    if direct_convolution.suits(node, graph) is None:
        return Algorithm(DIRECT, "few channels and filters a group: every element of the input is read once")
    if no is None and asked == "direct":
        no = "'direct' was asked for"
    if no is None and options.strict:
        no = "the graph is strict"
    if no is None:
        target = options.target.planned
        times = {tile: cycles(node, graph, target, tile) for tile in w.TILES.values()}
        best, direct = min(times, key=times.__getitem__), cycles(node, graph, target)
        factor, workspace = direct / times[best], _workspace(node, best)
        if workspace > options.workspace:
            no = f"its intermediates take {workspace} bytes, more than {options.workspace}"
        else:
            preferred = WINOGRAD if factor >= MARGIN else DIRECT
            alike = f"{node.op.name} {[t.type for t in node.inputs]} {dict(node.attributes)}"
            choice = weigh(NAME, node.name, {DIRECT: direct, WINOGRAD: times[best]}, preferred, options.settled, alike)
            takes = f"estimated to take {1 / factor:.2f} of the time of the direct sum"
            if choice.taken == WINOGRAD:
                return replace(_winograd(node, best, takes), choice=choice)
            no = f"with its transforms it is {takes}"
    if is_product(node):
        return Algorithm(PRODUCT, "1x1 filters: channels of every position times filters, as they lie in memory")
    return Algorithm(IMPLICIT, f"no Winograd: {no}", choice=choice)


def _winograd(node: Node, tile: int, why: str) -> Algorithm:
    shape, side = node.output.shape, tile + 2
    rows, columns = w.tiles((shape[2], shape[3]), tile)
    fewer = 9 * shape[2] * shape[3] / (side * side * rows * columns)
    between = f"{_workspace(node, tile) / 1e6:.1f} MB between its kernels"
    spread = f"what is NaN or infinite may spread over {tile}x{tile} results"
    reason = f"{why}; {fewer:.3g} times fewer products, {between}; {spread}"
    return Algorithm(f"winograd F({tile}x{tile},3x3)", reason, tile)


def _sizes(node: Node, tile: int) -> tuple[int, int, int, int]:
    """Returns (products, rows, columns, terms) of the batched matrix product; for the direct sum, tile is 1."""
    shape, channels = node.output.shape, node.inputs[0].shape[1]
    rows, columns = w.tiles((shape[2], shape[3]), tile)
    return (tile + 2) ** 2, shape[0] * rows * columns, shape[1], channels


def _workspace(node: Node, tile: int) -> int:
    """Returns the bytes of the transformed filter and input and of the products."""
    places, rows, columns, terms = _sizes(node, tile)
    return 4 * places * (terms * columns + rows * terms + rows * columns)


def cycles(node: Node, graph: Graph, target: Target, tile: int | None = None) -> float:
    """Estimates the cycles of a convolution: as Winograd's with a tile, else as the direct sum, in parts if better."""
    x, taps = node.inputs
    if tile is None:
        as_it_lies = best_cut(node, graph, target)[1]
        if node.op.role is not Role.FPROP or taps.strides[1] == 1:
            return as_it_lies
        # `operand_layouts` may lay the channels of the filters side by side.
        laid = estimates.alone(graph, node, {taps: (taps.shape, layout_strides(taps.shape, "channels_last"))})
        copied = 2 * taps.nbytes / (STREAMED * target.bytes_per_cycle)
        return min(as_it_lies, best_cut(laid.nodes[0], laid, target)[1] + copied)
    moved = 2 * _workspace(node, tile) + x.nbytes + taps.nbytes  # one kernel writes them, another reads them
    product = estimates.cycles(_products(*_sizes(node, tile)), Options(target=target))
    return (START + 2) * target.launch_cycles + product + moved / (STREAMED * target.bytes_per_cycle)


def _products(places: int, rows: int, columns: int, terms: int) -> Graph:
    """Returns a graph of the batched matrix product alone."""
    graph = Graph("products", float32)
    inputs = graph.tensor("inputs", (places, rows, terms))
    graph.output(graph.apply(TABLE["matmul"], (inputs, graph.tensor("filters", (places, terms, columns))), {}))
    return graph


# ---- the nodes


class _Parts:
    """Writes Winograd's convolutions; those with an operand in common share its transform."""

    def __init__(self) -> None:
        self._made: dict[Any, Tensor] = {}

    def write(self, rewrite: Rewrite, node: Node, tile: int) -> None:
        """Adds the result of a convolution, with its name, layout and dtype.

        Places of a tile come first, then tiles, channels or filters: what is contiguous in memory is so in the image
        that is read or written.
        """
        old, graph = node.output, rewrite.graph
        of_filter, of_input, of_output = w.transforms(node.op.role, node.attributes, old.shape, tile)
        x, taps = rewrite.inputs(node)
        u = self._once(graph, "filter", node, w.FILTER, taps, of_filter, (0, 2, 1))
        v = self._once(graph, "input", node, w.INPUT, x, of_input, _order(x))
        m = graph.apply(TABLE["matmul"], (v, u), {})
        m.strides = packed_strides(m.shape, _order(old))
        named(m, node.name, "products")
        y = graph.apply(w.OUTPUT, (m,), {**of_output, "dtype": old.dtype})
        y.strides = old.strides
        graph._rename(y, old.name)
        rewrite.new[old] = y

    def _once(
        self, graph: Graph, part: str, node: Node, op: Any, operand: Tensor, attributes: dict[str, Any],
        order: tuple[int, ...],
    ) -> Tensor:  # fmt: skip
        key = op, operand, tuple(attributes.items())
        if key not in self._made:
            made = graph.apply(op, (operand,), attributes)
            made.strides = packed_strides(made.shape, order)
            self._made[key] = named(made, node.name, part)
        return self._made[key]


def _order(image: Tensor) -> tuple[int, ...]:
    """Returns the memory order of (places, tiles, channels): channels last if they are neighbours in an image."""
    return (0, 1, 2) if image.strides[1] <= image.strides[3] or image.shape[3] == 1 else (0, 2, 1)
