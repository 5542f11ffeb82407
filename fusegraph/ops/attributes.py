"""What the attributes of ops are: every op gets them as plain Python values of these kinds, whoever gave them.

An attribute is of the same kind in every op that has it.  Which values of the kind an op takes, its ``normalize`` says.
"""

from __future__ import annotations

from typing import Any

from fusegraph.errors import AttributeValueError, shown
from fusegraph.ops.base import Attributes
from fusegraph.values import (
    Kind,
    Unfit,
    any_number,
    dtype,
    flag,
    integer,
    number,
    one_or_several,
    optional,
    plain,
    position,
    several,
    word,
)

_INTEGERS = one_or_several(integer)

KINDS: dict[str, Kind] = {
    **dict.fromkeys(("axis", "ignore_index", "rope_dim"), integer),
    **dict.fromkeys(("groups", "paged_attention_max_seq_len_kv"), optional(integer)),
    **dict.fromkeys(("diagonal_band_left_bound", "diagonal_band_right_bound"), optional(integer)),
    **dict.fromkeys(("dilation", "window"), _INTEGERS),
    **dict.fromkeys(("axes", "size", "stride", "taps"), optional(_INTEGERS)),
    **dict.fromkeys(("starts", "steps", "stops"), optional(several(optional(position)))),
    "padding": one_or_several(one_or_several(integer)),
    "perm": optional(several(integer)),
    "shape": several(integer),
    **dict.fromkeys(("alpha", "beta", "correction", "dropout_probability", "epsilon", "k", "lower_clip"), number),
    **dict.fromkeys(("momentum", "label_smoothing", "negative_slope", "output_scale", "probability"), number),
    **dict.fromkeys(("attn_scale", "max", "min", "soft_cap", "upper_clip"), optional(number)),
    "value": any_number,
    **dict.fromkeys(("ceil_mode", "count_include_pad", "descending", "generate_stats", "include_self", "placed"), flag),
    **dict.fromkeys(("keepdims", "largest", "reverse", "saturate", "use_alibi_mask", "use_causal_mask"), flag),
    **dict.fromkeys(("diagonal_alignment", "mode", "norm_forward_phase", "reduction"), word),
    **dict.fromkeys(("algorithm", "compute_dtype"), optional(word)),
    **dict.fromkeys(("dtype", "source"), optional(dtype)),
}


def of_kind(name: str, kind: Kind, value: Any) -> Any:
    """Returns a value as a plain one of a kind.  Raises AttributeValueError, with the name, or DTypeError."""
    try:
        return kind(value)
    except Unfit as wanted:
        raise AttributeValueError(f"{name} is {wanted}, got {shown(value)}") from None


def checked(attributes: Attributes) -> dict[str, Any]:
    """Returns attributes of an op as plain values.  Raises AttributeValueError or DTypeError."""
    return {name: of_kind(name, KINDS.get(name, plain), value) for name, value in attributes.items()}
