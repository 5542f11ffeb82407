"""sdpa_fp8 described to cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from codegen.declined import Declined
from fusegraph.graph import Node
from fusegraph.lowering.cudnn_attention import check_scores, given, scores_told
from fusegraph.ops.attention_fp8 import OPERANDS, SCALES


def check(node: Node) -> None:
    """Raises Declined for what cuDNN's sdpa_fp8 cannot be told."""
    has, at = given(node, OPERANDS), node.attributes
    for key in ("bias", "mask", "sink_token"):
        if key in has:
            raise Declined(f"cuDNN's sdpa_fp8 has no {key} ({node.name!r})")
    if at["use_alibi_mask"]:
        raise Declined(f"cuDNN's sdpa_fp8 has no alibi ({node.name!r})")
    if at["diagonal_band_left_bound"] is not None or at["diagonal_band_right_bound"] not in (None, 0):
        raise Declined(f"cuDNN's sdpa_fp8 has no band but the causal mask ({node.name!r})")
    check_scores(node, has)


def describe(
    node: Node, method: Callable[..., Any], operands: list[Any], alignments: Any, **how: Any
) -> tuple[Any, ...]:
    """Adds the node by cuDNN's method for it; returns its results."""
    at = node.attributes
    keywords = dict(zip(("q", "k", "v", *SCALES), operands)) | scores_told(node, given(node, OPERANDS), operands)
    if at["diagonal_band_right_bound"] == 0:
        bottom = at["diagonal_alignment"] == "BOTTOM_RIGHT"
        keywords["use_causal_mask_bottom_right" if bottom else "use_causal_mask"] = True
    out, stats, *_ = method(generate_stats=at["generate_stats"], **keywords, **how)
    return (out, stats) if at["generate_stats"] else (out,)
