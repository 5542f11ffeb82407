"""Rows without keys: softmax makes NaN of them, of which nothing is left where zeros are chosen instead."""

from __future__ import annotations

import numpy as np

from codegen.declined import Declined
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.base import Kind
from fusegraph.passes.decompose import NARROW

#: Those that make finite numbers of finite ones, as far as these are no larger than scores are.
_FINITE = frozenset("identity narrow gen_index add sub mul neg tanh min max clamp binary_select".split())  # noqa: SIM905


def zeros_kept(graph: Graph, chain: tuple[Node, ...], score: Tensor, product: Node) -> tuple[bool, tuple[Node, ...]]:
    """Whether rows without keys are zero rather than NaN by what becomes of their probabilities (all of ``chain`` but
    its first node), and what is left of the chain: they are where zeros are chosen for the very keys that the scores
    are masked for, whose probabilities are zeros in any other row.

    Zeros chosen for a whole row are chosen behind the product with the values, those chosen at random are not looked
    at: that they are chosen for all of a row.  Raises Declined where some other zeros may be chosen in such rows.
    """
    chosen = [n for n in chain[1:] if n.op.name == "binary_select" and n.inputs[2].shape[-1:] not in ((), (1,))]
    chosen = [n for n in chosen if not _random(graph, n.inputs[2])]
    if not chosen or _finite(graph, score, product):
        return False, chain
    masked = graph.producer(score)
    while masked is not None and masked.op.name in ("identity", NARROW.name):
        masked = graph.producer(masked.inputs[0])
    for node in chosen:
        kept = 1 if _is(node.inputs[0], 0.0) else 0
        if (
            masked is None
            or masked.op.name != "binary_select"
            or masked.inputs[2] is not node.inputs[2]
            or not _is(masked.inputs[1 - kept], -np.inf)
            or not _finite(graph, masked.inputs[kept], product)
        ):
            raise Declined(f"{node.name!r} chooses among probabilities, of which those of rows without keys are NaN")
    while chain[-1] in chosen:
        chain = chain[:-1]
    return True, chain


def _is(tensor: Tensor, number: float) -> bool:
    return tensor.value is not None and tensor.size == 1 and float(tensor.value.reshape(-1)[0]) == number


def _pointwise(graph: Graph, tensor: Tensor) -> tuple[set[Node], set[Tensor]]:
    """The pointwise nodes that make a tensor, and what they are given."""
    nodes: set[Node] = set()
    leaves: set[Tensor] = set()
    stack = [tensor]
    while stack:
        t = stack.pop()
        node = graph.producer(t)
        if node is None or node.kind is not Kind.POINTWISE:
            leaves.add(t)
        elif node not in nodes:
            nodes.add(node)
            # Which of two numbers is chosen makes neither infinite.
            values = node.inputs[:2] if node.op.name == "binary_select" else node.inputs
            stack += [t for key, t in zip(node.op.names(len(node.inputs)), values) if key not in node.op.shapes]
    return nodes, leaves


def _random(graph: Graph, tensor: Tensor) -> bool:
    """Whether pointwise nodes make a tensor of random numbers."""
    return any(node.op.name.startswith("rng_") for node in _pointwise(graph, tensor)[0])


def _finite(graph: Graph, score: Tensor, product: Node) -> bool:
    """Whether no score is minus infinity, the product of queries and keys being finite."""
    nodes, leaves = _pointwise(graph, score)
    return all(node.op.name in _FINITE for node in nodes) and all(
        t is product.output or (t.value is not None and bool(np.isfinite(t.value.astype(np.float64)).all()))
        for t in leaves
    )
