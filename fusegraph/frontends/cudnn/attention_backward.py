"""Imports cudnn-frontend's sdpa_backward node: as the op of the table, or as several nodes if it does not suffice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegraph.frontends.cudnn import attention_asked
from fusegraph.frontends.cudnn.attention_asked import asked_of
from fusegraph.frontends.cudnn.attention_gradients import by_heads, by_queries, gradients, summed_to
from fusegraph.frontends.cudnn.reading import Reading
from fusegraph.graph import Tensor

PORTS = ("q", "k", "v", "o", "dO", "stats", *attention_asked.PORTS)
RESULTS = ("dQ", "dK", "dV", "dBias", "dSink_token")


def sdpa_backward(reading: Reading, node: Any) -> Mapping[str, Tensor]:
    """Returns dQ, dK, dV and, if the node has them, dBias, dSink_token and rng_dump.

    A sink_token is needed only for dSink_token: its effect on the other gradients is contained in stats.
    """
    asked = asked_of(reading, node, ("o", "dO", "stats"))
    operands, dumped = asked.operands, node.outputs.get("rng_dump") is not None
    if asked.plain and asked.heads[0] == asked.heads[1] and not dumped:
        sunk = node.outputs.get("dSink_token") is not None
        told: dict[str, Any] = {key: t for key, t in operands.items() if sunk or key != "sink_token"}
        made = reading.graph.sdpa_backward(**told, **asked.scoring, dropout_probability=asked.probability or 0.0)
        found = dict(zip(RESULTS, made))
        return {name: t for name, t in found.items() if node.outputs.get(name) is not None}
    parts = gradients(reading, asked, node)
    q, loss = operands["q"], operands["dO"]
    by_products, weights = reading.cast(parts.by_products, q.dtype), reading.cast(parts.weights, loss.dtype)
    results = {
        "dQ": by_queries(reading, asked, by_products),
        "dK": by_heads(reading, by_products, q, asked.heads[0]),
        "dV": by_heads(reading, weights, loss, asked.heads[1]),
    }
    if node.outputs.get("dBias") is not None:
        results["dBias"] = summed_to(reading, parts.by_scores, operands["bias"])
    if node.outputs.get("dSink_token") is not None and parts.by_sink is not None:
        results["dSink_token"] = summed_to(reading, parts.by_sink, operands["sink_token"])
    if dumped and asked.probability is not None:
        results["rng_dump"] = reading.cast(asked.keep(reading, parts.weights), reading.dtype(node, "rng_dump"))
    return results
