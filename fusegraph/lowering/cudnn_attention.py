"""Attention described to cuDNN: what its methods can express, what they are told; and sdpa."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import sqrt
from typing import Any

from codegen.declined import Declined
from fusegraph.dtypes import int32
from fusegraph.graph import Node, Tensor
from fusegraph.ops.attention import LENGTHS, NEUTRAL, NUMBERS, OPERANDS
from fusegraph.ops.attention_packed import OFFSETS
from fusegraph.ops.attention_paged import TABLES


def given(node: Node, operands: Sequence[str]) -> dict[str, int]:
    """Returns the optional operands that a node has -> their places among its inputs; ``operands`` names all."""

    def neutral(key: str, tensor: Tensor) -> bool:
        return tensor.value is not None and tensor.size == 1 and float(tensor.value.reshape(-1)[0]) == NEUTRAL[key]

    every = enumerate(zip(operands, node.inputs))
    return {key: n for n, (key, t) in every if key in NEUTRAL and key not in NUMBERS and not neutral(key, t)}


def check_scores(node: Node, has: Collection[str]) -> None:
    """Raises Declined for what no attention of cuDNN can be told."""
    name, at = f"cuDNN's {node.op.name}", node.attributes
    if at["soft_cap"] is not None:
        raise Declined(f"{name} has no soft_cap ({node.name!r})")
    if at.get("dropout_probability"):
        raise Declined(f"{name} draws other random numbers than rng_uniform for dropout ({node.name!r})")
    if OFFSETS[0] in has:
        raise Declined(f"{name} has packed batches of tensors that are padded by shape ({node.name!r})")
    if at["use_alibi_mask"] and at["diagonal_band_right_bound"] is None:
        raise Declined(f"{name} has alibi with a causal mask only ({node.name!r})")
    if len(present := [key for key in LENGTHS if key in has]) == 1:
        raise Declined(f"{name} takes lengths of queries and keys, or neither ({node.name!r} has {present[0]})")


def scores_told(node: Node, has: Mapping[str, int], operands: Sequence[Any]) -> dict[str, Any]:
    """Returns the keywords of every attention: the optional operands, and how scores are scaled."""
    keywords: dict[str, Any] = {key: operands[place] for key, place in has.items()}
    if LENGTHS[0] in has:
        keywords["use_padding_mask"] = True
    scale = node.attributes["attn_scale"]
    keywords["attn_scale"] = 1 / sqrt(node.inputs[0].shape[-1]) if scale is None else scale
    return keywords


def mask_told(node: Node, alignments: Any) -> dict[str, Any]:
    """Returns the keywords of alibi and of the band around the diagonal."""
    at = node.attributes
    bounds = {key: at[key] for key in ("diagonal_band_left_bound", "diagonal_band_right_bound") if at[key] is not None}
    alignment = getattr(alignments, at["diagonal_alignment"])
    return {"use_alibi_mask": at["use_alibi_mask"], "diagonal_alignment": alignment, **bounds}


def check(node: Node) -> None:
    """Raises Declined for what cuDNN's sdpa cannot be told."""
    has = given(node, OPERANDS)
    check_scores(node, has)
    if "mask" in has:
        raise Declined(f"cuDNN's sdpa has no mask of booleans ({node.name!r}); a bias of 0 and -inf is one")
    if "sink_token" in has:
        raise Declined(f"cuDNN's sdpa has a sink in training of some dtypes only ({node.name!r})")
    if TABLES[0] in has:
        tables = [node.inputs[has[key]] for key in TABLES]
        if any(t.rank != 4 or t.dtype != int32 for t in tables):
            raise Declined(
                f"cuDNN's sdpa has tables of pages of the shape (batches, 1, pages, 1) in int32 ({node.name!r})"
            )
        if any(key not in has for key in LENGTHS):
            raise Declined(f"cuDNN's sdpa has pages with lengths of queries and keys only ({node.name!r})")


def describe(
    node: Node, method: Callable[..., Any], operands: list[Any], alignments: Any, **how: Any
) -> tuple[Any, ...]:
    """Adds the node by cuDNN's method for it; returns its results."""
    has, at = given(node, OPERANDS), node.attributes
    q, k, v = operands[:3]
    keywords = scores_told(node, has, operands) | mask_told(node, alignments)
    if TABLES[0] in has:
        for key, word in zip(TABLES, ("paged_attention_k_table", "paged_attention_v_table")):
            keywords[word] = keywords.pop(key)
        longest = at["paged_attention_max_seq_len_kv"]
        table, container = node.inputs[has[TABLES[0]]], node.inputs[1]
        keywords["paged_attention_max_seq_len_kv"] = longest or table.shape[2] * container.shape[2]
    found = method(q=q, k=k, v=v, generate_stats=at["generate_stats"], **keywords, **how)
    return tuple(result for result in found if result is not None)
