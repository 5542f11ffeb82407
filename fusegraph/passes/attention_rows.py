"""Rows without keys: softmax gives NaN for them, which is gone where zeros are chosen instead."""

from __future__ import annotations

import numpy as np

from codegen.declined import Declined
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.base import Kind
from fusegraph.passes.attention_parts import casts
from fusegraph.pattern import Found, made_of, op

#: A choice that is not the same for a whole row.
_CHOSEN = op.binary_select().when(lambda _, node: node.inputs[2].shape[-1:] not in ((), (1,)))
#: Pairs of patterns: zeros where a mask has a value, and scores that are minus infinity where it has the same value.
_ALIKE = (
    (op.binary_select(..., 0.0, "mask"), casts(op.binary_select("kept", -np.inf, "mask"))),
    (op.binary_select(0.0, ..., "mask"), casts(op.binary_select(-np.inf, "kept", "mask"))),
)


def zeros_kept(graph: Graph, chain: tuple[Node, ...], score: Tensor, product: Node) -> tuple[bool, tuple[Node, ...]]:
    """Returns whether rows without keys become 0 rather than NaN, and the chain without the nodes that do it.

    ``chain`` begins with the probabilities; its other nodes say what becomes of them.  Rows without keys become 0 where
    zeros are chosen for the very keys for which scores are masked; in other rows such keys have probability 0 already.

    Zeros for a whole row are chosen behind the product with the values.  Random choices (dropout) are left aside: that
    they take a whole row is not considered.  Raises Declined where other zeros may be chosen in rows without keys.
    """
    chosen = [n for n in chain[1:] if _CHOSEN.fits(graph, n) and not _random(graph, n.inputs[2])]
    if not chosen or _finite(graph, score, product):
        return False, chain
    for node in chosen:
        masked = (m for zero, masks in _ALIKE for z in zero.of(Found(graph), node) for m in masks.ways(z, score))
        if not any(_finite(graph, m["kept"], product) for m in masked):
            raise Declined(f"{node.name!r} chooses among probabilities, of which those of rows without keys are NaN")
    while chain[-1] in chosen:
        chain = chain[:-1]
    return True, chain


def _pointwise(node: Node) -> list[Tensor] | None:
    """Returns the operands of a pointwise node that may make its result infinite: all but masks and shapes."""
    pairs = zip(node.op.names(len(node.inputs)), node.inputs)
    hidden = (*node.op.masks, *node.op.shapes)
    return [t for key, t in pairs if key not in hidden] if node.kind is Kind.POINTWISE else None


def _random(graph: Graph, tensor: Tensor) -> bool:
    """Returns true if pointwise nodes make a tensor of random numbers."""
    return any(node.op.random for node in made_of(graph, [tensor], _pointwise))


def _finite(graph: Graph, score: Tensor, product: Node) -> bool:
    """Returns true if no score is minus infinity, the product of queries and keys being finite."""
    nodes = made_of(graph, [score], _pointwise)
    leaves = {score, *(t for operands in nodes.values() for t in operands)} - {node.output for node in nodes}
    return all(node.op.finite for node in nodes) and all(
        t is product.output or (t.value is not None and bool(np.isfinite(t.value.astype(np.float64)).all()))
        for t in leaves
    )
