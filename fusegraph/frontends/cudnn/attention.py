"""Imports cudnn-frontend's sdpa and sdpa_fp8 nodes: as an op of the table, or as several nodes if no op suffices."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np

from fusegraph.dtypes import float32
from fusegraph.frontends.cudnn.attention_asked import FORWARD, Asked, asked_of
from fusegraph.frontends.cudnn.reading import Reading
from fusegraph.graph import Tensor
from fusegraph.ops import attention as ops
from fusegraph.ops import attention_fp8 as fp8
from fusegraph.ops import attention_paged as paged

PORTS = ("q", "k", "v", *FORWARD)
PORTS_FP8 = (*PORTS, *fp8.SCALES)
#: Outputs that the ops of the table do not have.
_MORE = frozenset({"score_max", "score_sum_exp", "rng_dump", "Amax_S"})


def sdpa(reading: Reading, node: Any) -> Mapping[str, Tensor]:
    """Returns O and, if the node has them, Stats, score_max, score_sum_exp and rng_dump."""
    asked, wanted = asked_of(reading, node), _wanted(reading, node)
    if asked.plain and not wanted & _MORE:
        stats = "Stats" in wanted
        found: Any = reading.graph.sdpa(
            **asked.operands,
            **asked.scoring,
            dropout_probability=asked.probability or 0.0,
            paged_attention_max_seq_len_kv=asked.longest,
            generate_stats=stats,
        )
        return {"O": found[0], "Stats": found[1]} if stats else {"O": found}
    weighing, q = _Weighing(reading, asked, wanted), asked.operands["q"]
    k, v = _in_order(reading, asked)
    made = ops.attended(
        reading.write,
        *(q, k, v),
        asked.given,
        dtype=q.dtype,
        weigh=weighing.weigh,
        modify=asked.modify,
        **asked.factors(reading),
    )
    return {"O": made.out, **_told(reading, made, wanted), **weighing.results}


def sdpa_fp8(reading: Reading, node: Any) -> Mapping[str, Tensor]:
    """Returns O and, if the node has them, Stats, score_max, score_sum_exp, rng_dump, Amax_S and Amax_O.

    Amax_S is the largest probability after dropout and before scaling; Amax_O is the largest magnitude of O before it
    is multiplied by scale_o.
    """
    asked, wanted = asked_of(reading, node, fp8.SCALES), _wanted(reading, node)
    graph, operands = reading.graph, asked.operands
    scale, amax = operands["scale_o"], "Amax_O" in wanted
    k, v = _in_order(reading, asked)
    if asked.plain and not asked.dropout and not wanted & _MORE:
        rest: dict[str, Any] = {key: t for key, t in operands.items() if key not in paged.TABLES} | {"k": k, "v": v}
        if amax:
            rest["scale_o"] = graph.constant(np.ones(scale.shape, np.float32))
        stats = "Stats" in wanted
        dtype = float32 if amax else reading.dtype(node, "O")
        found: Any = graph.sdpa_fp8(**rest, **asked.scoring, generate_stats=stats, dtype=dtype)
        out, *more = found if stats else (found,)
        results: dict[str, Tensor] = dict(zip(("Stats",), more))
        if not amax:
            return {"O": out, **results}
    else:
        weighing = _Weighing(reading, asked, wanted)
        scales = [operands[key] for key in fp8.SCALES]
        made, descale = fp8.attended(
            reading.write,
            *(operands["q"], k, v),
            scales,
            asked.given,
            weigh=weighing.weigh,
            modify=asked.modify,
            **asked.factors(reading),
        )
        out = graph.mul(made.out, descale)
        results = {**_told(reading, made, wanted), **weighing.results}
    if amax:
        results["Amax_O"] = graph.reduction(out, mode="amax")
    return {"O": graph.mul(out, scale), **results}


def _wanted(reading: Reading, node: Any) -> set[str]:
    """Returns the ports of the results that are used."""
    return {port for port, tensor in node.outputs.items() if tensor is not None and reading.is_wanted(tensor)}


def _in_order(reading: Reading, asked: Asked) -> tuple[Tensor, Tensor]:
    """Returns keys and values; paged ones are gathered into contiguous sequences."""
    k, v = asked.operands["k"], asked.operands["v"]
    return paged.written(reading.write, asked.operands, k, v, asked.longest)


def _told(reading: Reading, made: ops.Attended, wanted: set[str]) -> dict[str, Tensor]:
    """Returns the wanted statistics of each query."""
    found: dict[str, Tensor] = {}
    if "Stats" in wanted:
        found["Stats"] = made.stats(reading.write)
    if "score_max" in wanted:
        found["score_max"] = made.each(reading.write, "largest", made.softmax.largest, -inf)
    if "score_sum_exp" in wanted:
        found["score_sum_exp"] = made.each(reading.write, "sum", made.softmax.total, 0.0)
    return found


class _Weighing:
    """Applies dropout to the probabilities; ``results`` are the wanted outputs of that step."""

    def __init__(self, reading: Reading, asked: Asked, wanted: set[str]) -> None:
        self._reading, self._asked, self._wanted = reading, asked, wanted
        self.results: dict[str, Tensor] = {}

    def weigh(self, p: Tensor) -> Tensor:
        """Returns the probabilities after dropout, by which the values are multiplied, before they are scaled."""
        asked, write = self._asked, self._reading.write
        q = asked.operands["q"].shape
        if "rng_dump" in self._wanted:
            kept = asked.keep(self._reading, p) if asked.probability is not None else write("cmp_eq", "", p, p)
            kept = self._reading.cast(kept, float32)
            self.results["rng_dump"] = write("reshape", "", kept, shape=(*q[:3], p.shape[-1]))
        p = asked.dropped(self._reading, p)
        if "Amax_S" in self._wanted:
            amax = write("reduction", "", p, mode="amax", axes=None)
            self.results["Amax_S"] = write("reshape", "", amax, shape=(1, 1, 1, 1))
        return p
