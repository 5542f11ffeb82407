"""Masks that are added to attention's scores, as selections: what they rule out is then known as from other masks.

They are floats, 0 (or a bias) where a query meets a key, and elsewhere minus infinity or a number so low that nothing
is left of a probability.  With such a number a query that meets no key has probabilities all the same, equal ones; so
it counts as minus infinity only where it follows from positions that each query meets a key.  Elsewhere it is a number
that may be multiplied by log2(e) and stays finite.
"""

from __future__ import annotations

from math import inf

import numpy as np

from fusegraph.dtypes import float32
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.scores import CAST, KEY, ONE, ROW, Condition, masked_by, rebuilt, split
from fusegraph.ops import TABLE
from fusegraph.pattern import Found, Is, constant, op, repeated

#: No score is as low, and what is added to such a number changes nothing; the number in its place.
LOW, LOWEST = -1e32, -1e38


def _is_low(tensor: Tensor) -> bool:
    value = constant(tensor)
    return value is not None and value <= LOW


_CHOICE = op.binary_select("other", Is("low", _is_low), "kept") | op.binary_select(Is("low", _is_low), "other", "gone")
_ADDED = op.add("x", repeated(_CHOICE, lambda x: op.identity(x)))


def selected(graph: Graph) -> Graph:
    """Returns a graph of scores in which masks that are added are selections."""
    replaced: dict[Tensor, Tensor] = {}
    added: dict[Node, tuple[Node, ...]] = {}
    tensor = graph.outputs[0]
    while (node := graph.producer(tensor)) is not None:
        if (masked := masked_by(graph, node)) is not None:
            tensor = masked[0]
        elif CAST.fits(graph, node) and node.inputs[0].dtype.is_float and node.output.dtype.is_float:
            tensor = node.inputs[0]
        elif (found := _found(graph, node)) is not None:
            made = _written(graph, node, found)
            added[node], replaced[tensor] = made, made[-1].output
            tensor = found["x"]
        else:
            break
    return rebuilt(graph, replaced, added) if added else graph


def _found(graph: Graph, node: Node) -> Found | None:
    """Returns the scores x, what is added to those that are kept ("other"), and the condition."""
    shape = node.output.shape
    for found in _ADDED.of(Found(graph), node):
        if found["x"].shape == shape:
            return found
    for found in _CHOICE.of(Found(graph), node):
        if found["other"].shape == shape:
            return Found(graph, {**found.tensors, "x": found["other"]})
    return None


def _each_meets_one(graph: Graph, found: Found, shape: tuple[int, ...]) -> bool:
    """Tells whether each query meets a key, as far as positions say."""
    conditions: list[Condition] = []
    kept, sizes = "kept" in found, shape[-2:]
    if not split(graph, found["kept" if kept else "gone"], kept, len(shape), False, conditions, {}):
        return False
    row, first, last = np.arange(sizes[0]), np.zeros(sizes[0], np.int64), np.full(sizes[0], sizes[1] - 1)
    for condition in conditions:
        terms = dict(condition.terms)
        if not terms.keys() <= {ROW, KEY, ONE}:
            return False
        rest, key = terms.get(ROW, 0) * row + terms.get(ONE, 0), terms.get(KEY, 0)
        if key > 0:
            first = np.maximum(first, -rest)
        else:
            last = np.minimum(last, rest if key else np.where(rest < 0, -1, last))
    return bool((first <= last).all())


def _written(graph: Graph, node: Node, found: Found) -> tuple[Node, ...]:
    """Returns nodes that select a number where the mask does: minus infinity if that makes no difference."""
    out, x, other = node.output, found["x"], found["other"]
    value = -inf if constant(found["low"]) == -inf or _each_meets_one(graph, found, out.shape) else LOWEST
    made: list[Node] = []
    if other is not x and constant(other) != 0:
        biased = Tensor(graph, f"{node.name[:180]} kept", out.shape, out.strides, out.dtype)
        made.append(Node(TABLE["add"], (x, other), {}, biased))
        x = biased
    lowest = Tensor(graph, f"{node.name[:180]} low", (), (), float32, np.array(value, np.float32))
    result = Tensor(graph, f"{node.name[:180]} masked", out.shape, out.strides, out.dtype)
    operands = (x, lowest, found["kept"]) if "kept" in found else (lowest, x, found["gone"])
    return (*made, Node(TABLE["binary_select"], operands, {}, result))
