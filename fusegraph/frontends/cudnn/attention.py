"""cudnn-frontend's sdpa and sdpa_fp8 nodes as the ops of the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusegraph.dtypes import float32
from fusegraph.errors import AttributeValueError, NotSupportedError
from fusegraph.frontends.cudnn.reading import Reading
from fusegraph.graph import Tensor
from fusegraph.ops.attention_fp8 import SCALES
from fusegraph.ops.attention_paged import TABLES

#: cuDNN's words for the tables of pages -> ours.
_TABLES = dict(zip(("paged_attention_k_table", "paged_attention_v_table"), TABLES))
PORTS = ("q", "k", "v", "bias", "seq_len_q", "seq_len_kv", "sink_token", "attn_scale", *_TABLES)
PORTS_FP8 = (*PORTS[: -len(_TABLES)], *SCALES)
#: Those that say nothing about the result: which of cuDNN's kernels is meant, whether there are stats.
_INDIFFERENT = ("implementation", "is_inference", "softmax_precision")
PARAMS = (
    "attn_scale",
    "use_alibi_mask",
    "use_padding_mask",
    "use_causal_mask",
    "use_causal_mask_bottom_right",
    "sliding_window_length",
    "diagonal_alignment",
    "diagonal_band_left_bound",
    "diagonal_band_right_bound",
    "generate_stats",
    "paged_attention_max_seq_len_kv",
    *_INDIFFERENT,
)


def sdpa(reading: Reading, node: Any) -> Mapping[str, Tensor]:
    """O and, if the node has them, Stats."""
    operands, values = _told(reading, node)
    values["paged_attention_max_seq_len_kv"] = node.params.get("paged_attention_max_seq_len_kv")
    stats = node.outputs.get("Stats") is not None
    found: Any = reading.graph.sdpa(**operands, **values, generate_stats=stats)
    return {"O": found[0], "Stats": found[1]} if stats else {"O": found}


def sdpa_fp8(reading: Reading, node: Any) -> Mapping[str, Tensor]:
    """O, Stats if the node has them, and Amax_O, the largest magnitude of O before it is multiplied with scale_o."""
    operands, values = _told(reading, node)
    graph, scale = reading.graph, operands["scale_o"]
    wanted = {port for port, tensor in node.outputs.items() if tensor is not None and reading.is_wanted(tensor)}
    if "Amax_S" in wanted:
        raise NotSupportedError("Amax_S: no op has the largest of attention's probabilities")
    stats, amax = "Stats" in wanted, "Amax_O" in wanted
    if amax:
        operands["scale_o"] = graph.constant(np.ones(scale.shape, np.float32))
    dtype = float32 if amax else reading.dtype(node, "O")
    found: Any = graph.sdpa_fp8(**operands, **values, generate_stats=stats, dtype=dtype)
    out, *rest = found if stats else (found,)
    results = dict(zip(("Stats",), rest))
    if amax:
        results["Amax_O"] = graph.reduction(out, mode="amax")
        out = graph.mul(out, scale)
    return {"O": out, **results}


def _told(reading: Reading, node: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The operands of attention by our names, and what its scores are told; lengths only where they count."""
    given = node.params
    padded = bool(given.get("use_padding_mask"))
    operands = {
        _TABLES.get(port, port): reading.operand(node, port)
        for port in node.inputs
        if port != "attn_scale" and (padded or not port.startswith("seq_len"))
    }
    values: dict[str, Any] = {**band(given), "use_alibi_mask": bool(given.get("use_alibi_mask"))}
    scale = reading.number(node, "attn_scale") if "attn_scale" in node.inputs else given.get("attn_scale")
    if isinstance(scale, Tensor):
        raise AttributeValueError(
            f"attn_scale is a number that is known when the graph is read: give {scale.name!r} in values="
        )
    values["attn_scale"] = 1.0 if scale is None else float(scale)
    return operands, values


def band(given: Mapping[str, Any]) -> dict[str, Any]:
    """Which keys a query meets.  cuDNN's flags of causal masks come before its alignment and bounds."""
    bottom = bool(given.get("use_causal_mask_bottom_right"))
    causal = bottom or bool(given.get("use_causal_mask"))
    alignment = getattr(given.get("diagonal_alignment"), "name", "TOP_LEFT")
    left = given.get("diagonal_band_left_bound")
    return {
        "diagonal_alignment": ("BOTTOM_RIGHT" if bottom else "TOP_LEFT") if causal else alignment,
        "diagonal_band_left_bound": given.get("sliding_window_length") if left is None else left,
        "diagonal_band_right_bound": 0 if causal else given.get("diagonal_band_right_bound"),
    }
