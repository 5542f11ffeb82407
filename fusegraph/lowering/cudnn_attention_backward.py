"""sdpa_backward in cuDNN's words: what its method has a word for, and what it is told."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

from fusegraph.graph import Node
from fusegraph.lowering.base import Refusal
from fusegraph.ops.attention import LENGTHS, NEUTRAL, NUMBERS
from fusegraph.ops.attention_backward import FIRST, OPERANDS
from fusegraph.ops.attention_packed import OFFSETS

NAME = "sdpa_backward"


def given(node: Node) -> dict[str, int]:
    """The optional operands that a node has, and their places among its inputs."""
    found = {}
    for n, (key, t) in enumerate(zip(OPERANDS[FIRST:], node.inputs[FIRST:])):
        neutral = t.value is not None and t.size == 1 and float(t.value.reshape(-1)[0]) == NEUTRAL[key]
        if not neutral and key not in NUMBERS:
            found[key] = FIRST + n
    return found


def check(node: Node) -> None:
    """Raises Refusal for what cuDNN's sdpa_backward cannot be told."""
    has, at = given(node), node.attributes
    if at["soft_cap"] is not None:
        raise Refusal(f"cuDNN's sdpa_backward has no soft_cap ({node.name!r})")
    if at["dropout_probability"]:
        raise Refusal(f"cuDNN's sdpa_backward draws other random numbers than rng_uniform for dropout ({node.name!r})")
    if OFFSETS[0] in has:
        raise Refusal(f"cuDNN's sdpa_backward has packed batches of tensors that are padded by shape ({node.name!r})")
    if "sink_token" in has:
        raise Refusal(f"cuDNN's sdpa_backward has a sink in some dtypes only ({node.name!r})")
    if "mask" in has:
        raise Refusal(f"cuDNN's sdpa_backward has no mask of booleans ({node.name!r})")
    if len(node.outputs) > 3:
        raise Refusal(f"cuDNN's sdpa_backward adds to the gradient by a bias in an order of its own ({node.name!r})")
    if at["use_alibi_mask"] and at["diagonal_band_right_bound"] is None:
        raise Refusal(f"cuDNN's sdpa_backward has alibi with a causal mask only ({node.name!r})")
    if len(present := [key for key in LENGTHS if key in has]) == 1:
        raise Refusal(f"cuDNN's sdpa_backward takes lengths of queries and keys, or neither ({node.name!r})")
    if present and len(node.inputs[has[present[0]]].shape) != 4:
        raise Refusal(f"cuDNN's sdpa_backward takes lengths of the shape (batches, 1, 1, 1) ({node.name!r})")
    if any(t.shape[-1] % 8 for t in node.inputs[1:3]):
        raise Refusal(f"cuDNN's sdpa_backward takes multiples of 8 elements ({node.name!r})")


def describe(
    node: Node, method: Callable[..., Any], operands: list[Any], alignments: Any, **how: Any
) -> tuple[Any, ...]:
    """Adds the node by cuDNN's method for it; returns its results."""
    has, at = given(node), node.attributes
    keywords: dict[str, Any] = {key: operands[place] for key, place in has.items()}
    if has:
        keywords["use_padding_mask"] = True
    scale = at["attn_scale"]
    keywords["attn_scale"] = 1 / sqrt(node.inputs[0].shape[-1]) if scale is None else scale
    keywords["use_alibi_mask"] = at["use_alibi_mask"]
    keywords["diagonal_alignment"] = getattr(alignments, at["diagonal_alignment"])
    for key in ("diagonal_band_left_bound", "diagonal_band_right_bound"):
        if at[key] is not None:
            keywords[key] = at[key]
    return tuple(method(**dict(zip(OPERANDS[:FIRST], operands)), **keywords, **how))
