"""Imports cudnn-frontend's sdpa_fp8_backward node as several nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegraph.frontends.cudnn import attention_asked
from fusegraph.frontends.cudnn.attention_asked import asked_of
from fusegraph.frontends.cudnn.attention_gradients import by_heads, by_queries, gradients, summed_to
from fusegraph.frontends.cudnn.reading import Reading
from fusegraph.graph import Tensor

DESCALES = tuple(f"descale_{key}" for key in ("q", "k", "v", "o", "dO", "s", "dP"))
SCALES = tuple(f"scale_{key}" for key in ("s", "dQ", "dK", "dV", "dP"))
OPERANDS = ("o", "dO", "stats", *DESCALES, *SCALES)
PORTS = ("q", "k", "v", *OPERANDS, *attention_asked.PORTS)


def sdpa_fp8_backward(reading: Reading, node: Any) -> Mapping[str, Tensor]:
    """Returns dQ, dK, dV, their amax_dQ, amax_dK and amax_dV, amax_dP, and dSink_token if the node has it.

    Each amax is the largest magnitude before scaling; amax_dP is that of the gradient by the products of queries and
    keys.  Probabilities times scale_s are rounded to the dtype of q, gradients by products times scale_dP to that of
    dO.
    """
    asked, write = asked_of(reading, node, OPERANDS), reading.write
    x = asked.operands

    def times(*names: str) -> Tensor:
        first, second = (x[f"descale_{name}"] for name in names)
        return write("mul", "", first, second)

    parts = gradients(
        reading, asked, node, factor=times("q", "k"), of_loss=times("dO", "v"), of_result=times("o", "dO")
    )
    weights = reading.cast(write("mul", "", parts.weights, x["scale_s"]), x["q"].dtype)
    by_products = reading.cast(write("mul", "", parts.by_products, x["scale_dP"]), x["dO"].dtype)
    found = {
        "dQ": write("mul", "", by_queries(reading, asked, by_products), times("k", "dP")),
        "dK": write("mul", "", by_heads(reading, by_products, x["q"], asked.heads[0]), times("q", "dP")),
        "dV": write("mul", "", by_heads(reading, weights, x["dO"], asked.heads[1]), times("s", "dO")),
    }
    results = {name: write("mul", "", t, x[f"scale_{name}"]) for name, t in found.items()}
    for name, t in (*found.items(), ("dP", parts.by_products)):
        results[f"amax_{name}"] = write("reduction", "", t, mode="amax", axes=None)
    if node.outputs.get("dSink_token") is not None and parts.by_sink is not None:
        results["dSink_token"] = summed_to(reading, parts.by_sink, x["sink_token"])
    return results
