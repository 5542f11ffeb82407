"""sdpa_fp8 in cuDNN's words."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

from fusegraph.graph import Node
from fusegraph.lowering.base import Refusal
from fusegraph.ops.attention import LENGTHS, NEUTRAL
from fusegraph.ops.attention_fp8 import OPERANDS, OPTIONAL, SCALES

NAME = "sdpa_fp8"
_FIRST = OPERANDS.index(OPTIONAL[0])


def given(node: Node) -> dict[str, int]:
    """The optional operands that a node has, and their places among its inputs."""
    found = {}
    for place, (key, tensor) in enumerate(zip(OPTIONAL, node.inputs[_FIRST:]), _FIRST):
        if tensor.value is None or tensor.size != 1 or float(tensor.value.reshape(-1)[0]) != NEUTRAL[key]:
            found[key] = place
    return found


def check(node: Node) -> None:
    """Raises Refusal for what cuDNN's sdpa_fp8 cannot be told."""
    has, at = given(node), node.attributes
    if at["soft_cap"] is not None:
        raise Refusal(f"cuDNN's sdpa_fp8 has no soft_cap ({node.name!r})")
    for key in ("bias", "mask"):
        if key in has:
            raise Refusal(f"cuDNN's sdpa_fp8 has no {key} ({node.name!r})")
    if at["use_alibi_mask"]:
        raise Refusal(f"cuDNN's sdpa_fp8 has no alibi ({node.name!r})")
    if at["diagonal_band_left_bound"] is not None or at["diagonal_band_right_bound"] not in (None, 0):
        raise Refusal(f"cuDNN's sdpa_fp8 has no band but the causal mask ({node.name!r})")
    if len(alone := [key for key in LENGTHS if key in has]) == 1:
        raise Refusal(f"cuDNN's sdpa_fp8 takes lengths of queries and keys, or neither ({node.name!r} has {alone[0]})")


def describe(node: Node, method: Callable[..., Any], operands: list[Any], **how: Any) -> tuple[Any, ...]:
    """Adds the node by cuDNN's method for it; returns its results."""
    has, at = given(node), node.attributes
    keywords: dict[str, Any] = dict(zip(("q", "k", "v", *SCALES), operands))
    keywords |= {key: operands[place] for key, place in has.items()}
    if "seq_len_q" in has:
        keywords["use_padding_mask"] = True
    scale = at["attn_scale"]
    keywords["attn_scale"] = 1 / sqrt(node.inputs[0].shape[-1]) if scale is None else scale
    if at["diagonal_band_right_bound"] == 0:
        bottom = at["diagonal_alignment"] == "BOTTOM_RIGHT"
        keywords["use_causal_mask_bottom_right" if bottom else "use_causal_mask"] = True
    out, stats, *_ = method(generate_stats=at["generate_stats"], **keywords, **how)
    return (out, stats) if at["generate_stats"] else (out,)
