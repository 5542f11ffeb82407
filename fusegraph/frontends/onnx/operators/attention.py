"""Attention as the op sdpa.  What sdpa lacks is left to ONNX's definition of Attention as a function."""

from __future__ import annotations

from math import inf
from typing import Any

from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.graph import Tensor


@operator("Attention")
def attention(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    lengths: Tensor | None = None,
) -> list[Tensor]:
    graph = call.graph
    if call.wanted > 3:
        raise call.refuse("the products of queries and keys")
    if call["softmax_precision"] == 11 or (call["softcap"] and call.version < 24):
        raise call.refuse("softmax_precision or softcap as it was")
    flat = q.rank == 3
    if flat:
        q, k, v = (_heads(call, x, n) for x, n in ((q, "q_num_heads"), (k, "kv_num_heads"), (v, "kv_num_heads")))
    fresh = k.shape[2]
    if past_key is not None and past_value is not None:
        k, v = graph.concatenate(past_key, k, axis=2), graph.concatenate(past_value, v, axis=2)
    given: dict[str, Any] = {} if lengths is None else {"seq_len_kv": lengths}
    if mask is not None:
        missing = k.shape[2] - mask.shape[-1] if mask.rank else 0
        if mask.rank > 4 or missing < 0:
            raise ModelError(f"a mask {list(mask.shape)} is not one of {k.shape[2]} keys")
        if missing:  # keys beyond the mask are masked
            padding = [(0, 0)] * (mask.rank - 1) + [(0, missing)]
            mask = graph.pad(mask, padding, value=False if mask.dtype.is_bool else -inf)
        given["mask" if mask.dtype.is_bool else "bias"] = mask
    # Positions of queries count after the past, which aligns the last query with the last key.
    right = 0 if call["is_causal"] else _bound(call, "right_window_size")
    left = _bound(call, "left_window_size")
    last = lengths is not None or k.shape[2] > fresh
    if last and lengths is None and fresh != q.shape[2] and (left, right) != (None, None):
        raise call.refuse("a band of a past and other keys than queries")
    y = graph.sdpa(
        q,
        k,
        v,
        **given,
        diagonal_band_left_bound=None if left is None else left + 1,
        diagonal_band_right_bound=right,
        attn_scale=call["scale"],
        soft_cap=call["softcap"] or None,
        diagonal_alignment="BOTTOM_RIGHT" if last else "TOP_LEFT",
    )
    if flat:
        batch, heads, rows, depth = y.shape
        y = graph.reshape(graph.transpose(y, [0, 2, 1, 3]), [batch, rows, heads * depth])
    return [y, k, v]


def _heads(call: Call, x: Tensor, name: str) -> Tensor:
    """Reshapes (batch, length, heads * elements) to (batch, heads, length, elements).  Raises ModelError."""
    heads = call[name]
    if not heads or x.rank != 3 or heads < 1 or x.shape[2] % heads:
        raise ModelError(f"{name} {heads} does not divide the last dimension of {list(x.shape)}")
    parts = call.graph.reshape(x, [*x.shape[:2], heads, x.shape[2] // heads])
    return call.graph.transpose(parts, [0, 2, 1, 3])


def _bound(call: Call, name: str) -> int | None:
    """Returns the size of a window; None if it is unbounded."""
    size = call[name]
    return size if size is not None and size >= 0 else None
