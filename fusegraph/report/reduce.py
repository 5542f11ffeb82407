"""Makes a failing graph smaller: fewer nodes, then smaller sizes, as long as it fails in the same way.

Any set of a graph's nodes is a graph (`report.parts.part`), whose inputs have the values that the reference gives them;
so nodes are taken away by delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input",
2002), which ends where no single node can be taken away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fusegraph.engines.reference import evaluate
from fusegraph.errors import GraphError
from fusegraph.graph import Graph, Tensor
from fusegraph.ops.base import Array
from fusegraph.ops.convert import from_reference
from fusegraph.report.parts import note_updates, part

T = TypeVar("T")

#: Whether a graph fails on inputs as the first one does.
Fails = Callable[[Graph, Mapping[str, Array]], bool]


@dataclass(frozen=True)
class Reduced:
    """A graph that fails, its inputs, and how many graphs were tried."""

    graph: Graph
    inputs: Mapping[str, Array]
    tried: int


def reduced(
    graph: Graph, inputs: Mapping[str, Array], fails: Fails, *, progress: Callable[[str], object] = lambda _: None
) -> Reduced:
    """Returns the smallest graph found that still fails.

    Without one of its nodes, or with a dimension's size halved or 1, it does not fail.  Graphs that cannot be built do
    not fail.  Raises GraphError if the graph does not fail to begin with.
    """
    if not fails(graph, inputs):
        raise GraphError(f"graph {graph.name!r} does not fail; there is nothing to reduce")
    tried = 1
    values = {t.name: from_reference(v, t.dtype) for t, v in evaluate(graph, inputs).items()} | dict(inputs)

    def fails_still(made: Graph, given: Mapping[str, Array]) -> bool:
        nonlocal tried
        tried += 1
        progress(f"{made.node_count} nodes, {tried} graphs tried")
        return fails(made, given)

    def of(nodes: Sequence[Any]) -> tuple[Graph, dict[str, Array]]:
        made = part(graph, nodes)
        return made, {t.name: values[t.name] for t in made.inputs}

    arrays: Mapping[str, Array]
    found, arrays = of(fewest(graph.nodes, lambda nodes: fails_still(*of(nodes))))
    if not fails(found, arrays):  # it needs more than its nodes, such as fewer outputs
        found, arrays = graph, inputs
    while (smaller := _smaller(found, arrays, fails_still)) is not None:
        found, arrays = smaller
    return Reduced(found, arrays, tried)


def fewest(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Returns some of the items, in their order, that fail together, none of which can be left out.

    All of them fail.  Ever shorter runs of them are left out where the rest fails without.
    """
    left, size = list(items), len(items) // 2
    while size:
        start, before = 0, len(left)
        while start < len(left):
            fewer = left[:start] + left[start + size :]
            if fewer and fails(fewer):
                left = fewer
            else:
                start += size
        size = size // 2 if size > 1 or len(left) == before else 1
    return left


# --- sizes


def _smaller(graph: Graph, inputs: Mapping[str, Array], fails: Fails) -> tuple[Graph, Mapping[str, Array]] | None:
    """Returns a graph that fails with one size smaller than in this one, the largest that can be; None without any."""
    for size in sorted({n for t in graph.tensors.values() for n in t.shape if n > 1}, reverse=True):
        for smaller in dict.fromkeys((1, size // 2, size - 1)):
            made = _resized(graph, inputs, size, smaller)
            if made is not None and fails(*made):
                return made
    return None


def _resized(
    graph: Graph, inputs: Mapping[str, Array], size: int, smaller: int
) -> tuple[Graph, dict[str, Array]] | None:
    """Returns a graph in which ``smaller`` stands for a size wherever it is one; None if there is no such graph."""
    made = Graph(graph.name, graph.io_dtype, graph.compute_dtype)
    new: dict[Tensor, Tensor] = {}
    arrays: dict[str, Array] = {}

    def cut(array: Array) -> Array:
        return array[tuple(slice(smaller) if n == size else slice(None) for n in array.shape)]

    try:
        for tensor in graph.tensors.values():
            if tensor.value is not None:
                new[tensor] = made.constant(cut(tensor.value), tensor.name)
            elif tensor in graph.input_numbers:
                arrays[tensor.name] = np.ascontiguousarray(cut(np.asarray(inputs[tensor.name])))
                shape = arrays[tensor.name].shape
                new[tensor] = made.tensor(tensor.name, shape, tensor.dtype, parameter=tensor in graph.parameters)
        for node in graph.nodes:
            attributes = {key: _with(value, size, smaller) for key, value in node.attributes.items()}
            copy = made.apply_node(node.op, [new[t] for t in node.inputs], attributes, node.name)
            new |= zip(node.outputs, copy.outputs)
        note_updates(made)
        for tensor in graph.outputs:
            if new[tensor] not in made.outputs:
                made.output(new[tensor])
    except (GraphError, KeyError, IndexError):
        return None
    return made, arrays


def _with(value: Any, size: int, smaller: int) -> Any:
    """Returns an attribute with another size in the place of one: of tuples such as shapes, not of lone numbers."""
    if not isinstance(value, tuple):
        return value
    return tuple(smaller if isinstance(n, int) and not isinstance(n, bool) and n == size else n for n in value)
