"""Which products of float32 tensor cores may make."""

from __future__ import annotations

from codegen.bf16x6 import LEAST_TERMS
from fusegraph.dtypes import float32
from fusegraph.graph import Node
from fusegraph.lowering.base import Options


def in_parts(anchor: Node, options: Options) -> bool:
    """Returns true if a contraction's float32 products may be made of products of bfloat16 (`codegen.bf16x6`).

    They may where sums are long enough to be bounded by no more than those of float32, unless the graph is strict, or
    asks for the products as they are.
    """
    types, attributes = tuple(t.type for t in anchor.inputs), {**anchor.attributes}
    if options.strict or attributes.get("algorithm") == "direct" or attributes["compute_dtype"] is not None:
        return False
    assert anchor.op.products is not None
    terms = anchor.op.products(types, attributes) // attributes.get("parts", 1)
    return anchor.op.promoted(types) == float32 and terms >= LEAST_TERMS
