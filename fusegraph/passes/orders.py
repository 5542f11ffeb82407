"""Gathers of all elements along an axis in an order that is known: as views, if positions count digit by digit.

Programs shuffle channels, turn interleaved columns back, and put numbers of few bits in order (0, 4, 1, 5, 2, 6, 3, 7)
by an index that they compute of constants.  The digits of a position, in another order, are what the index says.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from codegen.sizes import varies
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops import TABLE
from fusegraph.ops.base import Array, Kind, Role
from fusegraph.ops.convert import from_reference, to_reference
from fusegraph.ops.evaluate import evaluate
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, replaced

#: The most elements of an index that is looked at, the most nodes that make one, and the most digits.
MOST_ELEMENTS, MOST_NODES, MOST_DIGITS = 1 << 16, 64, 6


@dataclass(frozen=True)
class _Order:
    """What a position along an axis is divided into, and in which order its digits then are."""

    sizes: tuple[int, ...]
    turned: tuple[int, ...]


def order_by_views(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Writes gathers of all elements along an axis, in an order that is known, as reshapes and a transpose."""
    return replaced(graph, lambda node: _found(graph, node), _write)


def _found(graph: Graph, node: Node) -> _Order | None:
    if node.op.role is not Role.GATHER or varies(node.output.shape):
        return None
    x, index = node.inputs
    size = x.shape[node.attributes["axis"]]
    if not 1 < index.size == size <= MOST_ELEMENTS or not node.output.size:
        return None
    known = _known(graph, index)
    return None if known is None else _order(known.reshape(-1).astype(np.int64))


def _known(graph: Graph, tensor: Tensor) -> Array | None:
    """Returns the value of a tensor that is made of constants, and of shapes, by a few nodes; None for others."""
    every: list[Node] = []
    stack, seen = [tensor], set[Tensor]()
    while stack:
        top = stack.pop()
        if top in seen or top.value is not None:
            continue
        seen.add(top)
        node = graph.producer(top)
        if node is None or node.kind not in (Kind.POINTWISE, Kind.MOVEMENT) or node.op.random:
            return None
        every.append(node)
        if len(every) > MOST_NODES or top.size > MOST_ELEMENTS or repr(node.attributes).count("Size"):
            return None
        stack += node.inputs
    values: dict[Tensor, Any] = {}
    place = {node: n for n, node in enumerate(graph.nodes)}
    for node in sorted(every, key=place.__getitem__):
        given = [values[t] if t in values else to_reference(np.asarray(t.value), t.dtype) for t in node.inputs]
        types = tuple(t.type for t in node.inputs)
        (value,) = evaluate(node.op, types, node.attributes, (node.output.dtype,), given, graph.compute_dtype)
        values[node.output] = np.broadcast_to(value, node.output.shape)
    found = values[tensor] if tensor in values else to_reference(np.asarray(tensor.value), tensor.dtype)
    return from_reference(found, tensor.dtype)


def _order(index: Array) -> _Order | None:
    """Returns the digits of an order; None if its positions do not count like this, or not all of them."""
    digits: list[tuple[int, int]] = []  # how many, and how far apart: the last digit first
    while len(index) > 1:
        step = int(index[1] - index[0])
        run = int(np.argmin(np.append(np.diff(index) == step, False))) + 1
        count = max(n for n in range(1, run + 1) if len(index) % n == 0)
        blocks = index.reshape(-1, count)
        if (
            count == 1
            or step < 1
            or len(digits) == MOST_DIGITS
            or (blocks - blocks[:, :1] != step * np.arange(count)).any()
        ):
            return None
        digits.append((count, step))
        index = blocks[:, 0]
    digits.reverse()
    order = sorted(range(len(digits)), key=lambda d: -digits[d][1])
    sizes = tuple(digits[d][0] for d in order)
    steps = [digits[d][1] for d in order]
    if index[0] or any(step != prod(sizes[n + 1 :]) for n, step in enumerate(steps)):
        return None
    return _Order(sizes, tuple(order.index(d) for d in range(len(digits))))


def _write(rewrite: Rewrite, node: Node, order: _Order) -> None:
    graph, out, axis = rewrite.graph, node.output, node.attributes["axis"]
    x = rewrite.new[node.inputs[0]]
    count = len(order.sizes)
    fine = (*x.shape[:axis], *order.sizes, *x.shape[axis + 1 :])
    turned = (*range(axis), *(axis + d for d in order.turned), *range(axis + count, len(fine)))
    x = named(graph.apply(TABLE["reshape"], (x,), {"shape": fine}), node.name, "digits")
    x = named(graph.apply(TABLE["transpose"], (x,), {"perm": turned}), node.name, "in order")
    graph.add_node(Node(TABLE["reshape"], (x,), {"shape": out.shape}, rewrite.result(out)))
