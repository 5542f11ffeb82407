"""Imports cudnn-frontend's moe_grouped_matmul and its gradient: groups of consecutive rows, one per expert's weights.

The lengths of the groups are known only when the graph runs.  So every token is multiplied by every expert's weights,
and all results but that of its own expert are dropped.  This costs as many products as there are experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusegraph.dtypes import float32
from fusegraph.errors import NotSupportedError, ShapeError
from fusegraph.frontends.cudnn.reading import Reading
from fusegraph.graph import Tensor

PORTS = ("token", "weight", "first_token_offset", "token_index")
PARAMS = ("mode", "top_k")
PORTS_BACKWARD = ("doutput", "token", "first_token_offset")


def moe_grouped_matmul(reading: Reading, node: Any) -> Mapping[str, Tensor]:
    """Returns tokens (1, T, H), or those given by token_index, each times its expert's matrix of weights (E, H, N)."""
    graph, mode = reading.graph, getattr(node.params.get("mode"), "name", "NONE")
    if mode not in ("NONE", "GATHER"):
        raise NotSupportedError(f"mode {mode}")
    token, weight = reading.operand(node, "token"), reading.operand(node, "weight")
    _check_ranks(token, weight)
    if mode == "GATHER":
        rows = reading.operand(node, "token_index")
        token = graph.gather(token, graph.reshape(rows, shape=(rows.size,)), axis=1)
    experts, wanted = weight.shape[0], reading.dtype(node, "OUT_0")
    if not (token.dtype.is_float and weight.dtype.is_float):
        wanted = float32 if wanted.is_float else wanted
    own = _membership(reading, node, experts, token.shape[1])
    every = graph.matmul(token, weight, dtype=wanted)
    # The sum is exact: it adds one expert's result and zeros.
    return {"OUT_0": graph.reduction(_owned(reading, every, own), mode="add", axes=(0,), dtype=every.dtype)}


def moe_grouped_matmul_bwd(reading: Reading, node: Any) -> Mapping[str, Tensor]:
    """Returns the gradient by weights (E, H, N): each expert's tokens (1, T, H) transposed times its loss (1, T, N)."""
    graph = reading.graph
    loss, token = reading.operand(node, "doutput"), reading.operand(node, "token")
    _check_ranks(loss, token)
    shape = reading.shape(node, "dweight")
    boundaries = reading.operand(node, "first_token_offset").size
    own = _membership(reading, node, shape[0] if shape else boundaries, token.shape[1])
    token, loss = (_owned(reading, t, own) for t in (token, loss))  # both, as infinity times 0 is not 0
    turned = graph.transpose(token, perm=(0, 2, 1))
    return {"dweight": graph.matmul(turned, loss, dtype=reading.dtype(node, "dweight"))}


def _owned(reading: Reading, x: Tensor, own: Tensor) -> Tensor:
    """Returns a tensor for every expert, with zeros in the rows that are not its own."""
    return reading.graph.binary_select(x, reading.graph.constant(np.zeros((1, 1, 1)), dtype=x.dtype), own)


def _check_ranks(*operands: Tensor) -> None:
    for t in operands:
        if t.rank != 3:
            raise ShapeError(f"{t.name!r} {list(t.shape)} has three dimensions: experts or 1, rows, columns")


def _membership(reading: Reading, node: Any, experts: int, rows: int) -> Tensor:
    """Returns the mask (E, T, 1) of each expert's rows, from its offset to the next.

    There are E offsets, or E + 1 with the end of the last expert's rows.
    """
    graph, offsets = reading.graph, reading.operand(node, "first_token_offset")
    if offsets.size not in (experts, experts + 1):
        raise NotSupportedError(f"first_token_offset {list(offsets.shape)} for {experts} experts")
    flat = graph.reshape(offsets, shape=(offsets.size, 1, 1))
    if offsets.size == experts:
        flat = graph.concatenate([flat, graph.constant(np.full((1, 1, 1), rows), dtype=flat.dtype)], axis=0)
    first, end = (graph.slice(flat, (n, 0, 0), (n + experts, 1, 1)) for n in (0, 1))
    one = graph.constant(np.zeros((1, 1, 1)), dtype=float32)
    row = graph.gen_index(graph.broadcast(one, shape=(1, rows, 1)), axis=1)
    found: Tensor = graph.logical_and(graph.cmp_ge(row, first), graph.cmp_lt(row, end))
    return found
