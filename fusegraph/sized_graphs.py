"""Graphs whose sizes vary: their Dims, and the same graphs at other sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, TypeAlias

from codegen.sizes import Bounds, Size, at, sizes_in
from fusegraph.dims import bounds_of
from fusegraph.errors import GraphError, ShapeError
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.base import TensorType
from fusegraph.tensor import Position

#: Sizes by the names of symbols (`codegen.sizes.Size`).
Sizes: TypeAlias = Mapping[str, int]
#: Elements of the largest tensor of graphs that are planned ahead.
LARGE = 2**29


def graph_at(
    graph: Graph, sizes: Sizes, *, vary: bool = False, fixed: frozenset[str] = frozenset()
) -> tuple[Graph, Callable[[Tensor], Tensor]]:
    """Returns a graph at sizes by symbol, and a function that returns its tensor for one of the old graph.

    With ``vary`` sizes are still Sizes, but for those of the symbols in ``fixed``.
    """
    if isinstance(graph, OpenGraph):
        return graph.known(sizes), lambda tensor: tensor
    return mapped(graph, lambda part: at(part, sizes, vary=vary, fixed=fixed))


class OpenGraph(Graph):
    """The inputs of a graph that is known when its sizes are, as its nodes do not follow from Dims.

    known   makes the graph of sizes by symbol.
    reason  why it does not follow.
    """

    def __init__(self, name: str, known: Callable[[Sizes], Graph], reason: str) -> None:
        super().__init__(name)
        self.known, self.reason = known, reason


def mapped(graph: Graph, changed: Callable[[Any], Any]) -> tuple[Graph, Callable[[Tensor], Tensor]]:
    """Returns a graph with other sizes, and a function that returns its tensor for one of the old graph.

    That makes tensors for views, too, which lowerings took of tensors of the graph.
    """
    made, new = Graph(graph.name, graph.io_dtype, graph.compute_dtype), dict[Tensor, Tensor]()

    def moved(old: Tensor) -> Tensor:
        if old not in new:
            tensor = new[old] = Tensor(made, old.name, changed(old.shape), changed(old.strides), old.dtype, old.value)
            tensor.base, tensor.start, tensor.own_strides = (
                moved(old.base),
                changed(old.start),
                changed(old.own_strides),
            )
            if (place := old.position) is not None:
                tensor.position = Position(moved(place.index), changed(place.step), changed(place.size))
        return new[old]

    made.tensors = {name: moved(tensor) for name, tensor in graph.tensors.items()}
    made._automatic, made._returned = set(map(moved, graph._automatic)), set(map(moved, graph._returned))
    made.inputs, made.parameters = list(map(moved, graph.inputs)), set(map(moved, graph.parameters))
    made.donated = set(map(moved, graph.donated.intersection(graph.inputs)))
    made.packed = {moved(t): names for t, names in graph.packed.items()}
    for node in graph.nodes:
        attributes = changed(dict(node.attributes))
        made.add_node(Node(node.op, tuple(map(moved, node.inputs)), attributes, *map(moved, node.outputs)))
    made.outputs = list(map(moved, graph.outputs))
    made.updates = {moved(t): moved(x) for t, x in graph.updates.items()}
    return made, moved


def ahead(graph: Graph) -> dict[str, Bounds]:
    """Returns bounds of the symbols of a graph's sizes, narrowed until no tensor has more than `LARGE` elements.

    Sizes beyond are planned by size: positions of 64 bits make other kernels.  Those that are too small for a
    window are left out.
    """
    bounds = _fitting(graph, bounds_in(graph))
    sizes = {prod(t.shape) for t in graph.tensors.values()}
    while max(map(int, at(tuple(sizes), {n: b.max for n, b in bounds.items()})), default=0) > LARGE:
        name = max(bounds, key=lambda n: bounds[n].max / max(bounds[n].min, 1))
        low, high = bounds[name]
        if high <= 2 * max(low, 1):
            break
        bounds[name] = Bounds(low, high // 2)
    return bounds


def _fitting(graph: Graph, bounds: dict[str, Bounds]) -> dict[str, Bounds]:
    """Returns bounds without the least sizes of each symbol, as far as no others make the operands of nodes fit."""

    def fits(sizes: Sizes) -> bool:
        try:
            check_shapes(graph, sizes)
        except ShapeError:
            return False
        except GraphError:  # a shape that does not follow, which no bounds mend
            return True
        return True

    for others in ("max", "min"):
        for name in bounds:
            rest = {n: getattr(b, others) for n, b in bounds.items()}
            low, high = bounds[name]
            if fits(rest | {name: low}) or not fits(rest | {name: high}):
                continue
            while low + 1 < high:  # the least one does not fit, the largest does
                middle = (low + high) // 2
                low, high = (low, middle) if fits(rest | {name: middle}) else (middle, high)
            bounds[name] = Bounds(high, bounds[name].max)
    return bounds


def bounds_in(graph: Graph) -> dict[str, Bounds]:
    """Returns bounds of the symbols of a graph's shapes, strides and attributes."""
    every = [(t.shape, t.strides) for t in graph.tensors.values()]
    return bounds_of(sizes_in([*every, *(dict(node.attributes) for node in graph.nodes)]))


def varies(graph: Graph) -> bool:
    """Tells whether a graph's sizes vary."""
    return any(isinstance(n, Size) for tensor in graph.tensors.values() for n in (*tensor.shape, *tensor.strides))


def check_shapes(graph: Graph, sizes: Sizes) -> None:
    """Raises GraphError for a node whose results have other shapes at some sizes than its operands make there.

    Raises ShapeError for a node whose operands do not go together there.
    """
    where = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    for node in graph.nodes:
        types = tuple(TensorType(at(t.shape, sizes), t.dtype) for t in node.inputs)
        try:
            inferred = node.op.infer(types, at(dict(node.attributes), sizes))
        except ShapeError as error:
            raise ShapeError(f"{node.name!r}, at {where}: {error}") from None
        for made, tensor in zip(inferred if isinstance(inferred, tuple) else (inferred,), node.outputs):
            if tuple(made.shape) != at(tensor.shape, sizes):
                raise GraphError(
                    f"the shape of {tensor.name!r} does not follow the sizes that vary: {list(tensor.shape)} would be "
                    f"{list(at(tensor.shape, sizes))} at {where}, {node.op.name} makes {list(made.shape)}"
                )
