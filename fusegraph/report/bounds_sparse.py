"""What products with 2:4 sparse matrices may be: sparse tensor cores leave out those with zeros, others do not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.base import Array, Role


def left_out(graph: Graph, node: Node, operands: Sequence[Array]) -> Array | None:
    """Returns where a matmul multiplies zeros of a sparse matrix by NaN or infinity: nobody knows what is there.

    None where it does not.
    """
    if node.op.role is not Role.MATMUL:
        return None
    found = None
    for number, tensor in enumerate(node.inputs):
        endless = ~np.isfinite(operands[1 - number])
        if not endless.any() or not _is_sparse(graph, tensor):
            continue
        pairs = [endless.astype(np.float64), endless.astype(np.float64)]
        pairs[number] = (operands[number] == 0).astype(np.float64)
        met = np.asarray(np.matmul(*pairs) > 0)
        found = met if found is None else found | met
    return found


def _is_sparse(graph: Graph, tensor: Tensor) -> bool:
    """Tells whether `sparse_2_4` made a tensor, or its transpose."""
    producer = graph.producer(tensor)
    if producer is not None and producer.op.role is Role.TRANSPOSE:
        producer = graph.producer(producer.inputs[0])
    return producer is not None and producer.op.role is Role.SPARSE
