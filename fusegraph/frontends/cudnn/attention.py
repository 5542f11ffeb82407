"""cudnn-frontend's sdpa node as the op of the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegraph.errors import AttributeValueError
from fusegraph.frontends.cudnn.reading import Reading
from fusegraph.graph import Tensor
from fusegraph.ops.attention_paged import TABLES

#: cuDNN's words for the tables of pages -> ours.
_TABLES = dict(zip(("paged_attention_k_table", "paged_attention_v_table"), TABLES))
PORTS = ("q", "k", "v", "bias", "seq_len_q", "seq_len_kv", "sink_token", "attn_scale", *_TABLES)
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
    values["paged_attention_max_seq_len_kv"] = given.get("paged_attention_max_seq_len_kv")
    values["attn_scale"] = 1.0 if scale is None else float(scale)
    stats = node.outputs.get("Stats") is not None
    found: Any = reading.graph.sdpa(**operands, **values, generate_stats=stats)
    return {"O": found[0], "Stats": found[1]} if stats else {"O": found}


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
