"""sdpa_backward described to cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from codegen.declined import Declined
from fusegraph.graph import Node
from fusegraph.lowering.cudnn_attention import check_scores, given, mask_told, scores_told
from fusegraph.ops.attention import LENGTHS
from fusegraph.ops.attention_backward import FIRST, OPERANDS


def check(node: Node) -> None:
    """Raises Declined for what cuDNN's sdpa_backward cannot be told."""
    has = given(node, OPERANDS)
    check_scores(node, has)
    if "sink_token" in has:
        raise Declined(f"cuDNN's sdpa_backward has a sink in some dtypes only ({node.name!r})")
    if "mask" in has:
        raise Declined(f"cuDNN's sdpa_backward has no mask of booleans ({node.name!r})")
    if len(node.outputs) > 3:
        raise Declined(f"cuDNN's sdpa_backward adds to the gradient by a bias in an order of its own ({node.name!r})")
    if LENGTHS[0] in has and len(node.inputs[has[LENGTHS[0]]].shape) != 4:
        raise Declined(f"cuDNN's sdpa_backward takes lengths of the shape (batches, 1, 1, 1) ({node.name!r})")
    if any(t.shape[-1] % 8 for t in node.inputs[1:3]):
        raise Declined(f"cuDNN's sdpa_backward takes multiples of 8 elements ({node.name!r})")


def describe(
    node: Node, method: Callable[..., Any], operands: list[Any], alignments: Any, **how: Any
) -> tuple[Any, ...]:
    """Adds the node by cuDNN's method for it; returns its results."""
    keywords = scores_told(node, given(node, OPERANDS), operands) | mask_told(node, alignments)
    return tuple(method(**dict(zip(OPERANDS[:FIRST], operands)), **keywords, **how))
