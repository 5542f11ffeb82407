"""Which products of float32 tensor cores may make."""

from __future__ import annotations

from codegen.bf16x6 import LEAST_TERMS
from codegen.sizes import varies
from fusegraph.dtypes import float32
from fusegraph.graph import Node
from fusegraph.lowering.base import Options
from fusegraph.lowering.choices import MADE, Choice, whether

#: What is chosen where the number of terms varies: a kernel for all sizes may have to do without.
CHOICE = "products of bfloat16"


def in_parts(anchor: Node, options: Options) -> bool:
    """Returns true if a contraction's float32 products may be made of products of bfloat16 (`codegen.bf16x6`).

    They may where sums are long enough to be bounded by no more than those of float32, unless the graph is strict, or
    asks for the products as they are.
    """
    if not _may_be(anchor, options):
        return False
    return all(choice.taken == MADE for choice in weighed(anchor, options))


def weighed(anchor: Node, options: Options) -> list[Choice]:
    """Returns the choice of whether such products are made of bfloat16, where they may and their terms vary."""
    if not _may_be(anchor, options) or not varies(_terms(anchor)):
        return []
    return [whether(CHOICE, anchor.name, options.settled)]


def _may_be(anchor: Node, options: Options) -> bool:
    types, attributes = tuple(t.type for t in anchor.inputs), anchor.attributes
    if options.strict or attributes.get("algorithm") == "direct" or attributes["compute_dtype"] is not None:
        return False
    return anchor.op.promoted(types) == float32 and _terms(anchor) >= LEAST_TERMS


def _terms(anchor: Node) -> int:
    assert anchor.op.products is not None
    types, attributes = tuple(t.type for t in anchor.inputs), {**anchor.attributes}
    terms: int = anchor.op.products(types, attributes) // attributes.get("parts", 1)
    return terms
