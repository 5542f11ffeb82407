"""cudnn-frontend's sdpa_backward node as the op of the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegraph.errors import AttributeValueError
from fusegraph.frontends.cudnn.attention import band
from fusegraph.frontends.cudnn.reading import Reading
from fusegraph.graph import Tensor

PORTS = ("q", "k", "v", "o", "dO", "stats", "bias", "seq_len_q", "seq_len_kv", "sink_token", "attn_scale")
RESULTS = ("dQ", "dK", "dV", "dBias", "dSink_token")
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
    "use_deterministic_algorithm",  # they always are
)


def sdpa_backward(reading: Reading, node: Any) -> Mapping[str, Tensor]:
    """dQ, dK, dV and, if the node has them, dBias and dSink_token.  stats know what else is needed of a sink_token."""
    given = node.params
    sunk = node.outputs.get("dSink_token") is not None
    padded = bool(given.get("use_padding_mask"))
    operands = {
        port: reading.operand(node, port)
        for port in node.inputs
        if port != "attn_scale" and (sunk or port != "sink_token") and (padded or not port.startswith("seq_len"))
    }
    values: dict[str, Any] = {**band(given), "use_alibi_mask": bool(given.get("use_alibi_mask"))}
    scale = reading.number(node, "attn_scale") if "attn_scale" in node.inputs else given.get("attn_scale")
    if isinstance(scale, Tensor):
        raise AttributeValueError(
            f"attn_scale is a number that is known when the graph is read: give {scale.name!r} in values="
        )
    values["attn_scale"] = 1.0 if scale is None else float(scale)
    found = dict(zip(RESULTS, reading.graph.sdpa_backward(**operands, **values)))
    return {name: t for name, t in found.items() if node.outputs.get(name) is not None}
