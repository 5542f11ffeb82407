"""What the attributes of ops are: every op gets them as plain Python values of these kinds, whoever gave them.

An attribute is of the same kind in every op that has it.  What of the kind an op takes is for its ``normalize`` to say.
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
_BOUNDS = optional(several(optional(position)))

KINDS: dict[str, Kind] = {
    "algorithm": optional(word),
    "alpha": number,
    "attn_scale": optional(number),
    "axes": optional(_INTEGERS),
    "axis": integer,
    "beta": number,
    "ceil_mode": flag,
    "compute_dtype": optional(word),
    "correction": number,
    "count_include_pad": flag,
    "descending": flag,
    "diagonal_alignment": word,
    "diagonal_band_left_bound": optional(integer),
    "diagonal_band_right_bound": optional(integer),
    "dilation": _INTEGERS,
    "dropout_probability": number,
    "dtype": optional(dtype),
    "epsilon": number,
    "generate_stats": flag,
    "groups": optional(integer),
    "include_self": flag,
    "k": number,
    "keepdims": flag,
    "largest": flag,
    "lower_clip": number,
    "max": optional(number),
    "min": optional(number),
    "mode": word,
    "momentum": number,
    "negative_slope": number,
    "norm_forward_phase": word,
    "output_scale": number,
    "padding": one_or_several(one_or_several(integer)),
    "paged_attention_max_seq_len_kv": optional(integer),
    "perm": optional(several(integer)),
    "probability": number,
    "reduction": word,
    "reverse": flag,
    "rope_dim": integer,
    "saturate": flag,
    "shape": several(integer),
    "size": optional(_INTEGERS),
    "soft_cap": optional(number),
    "source": optional(dtype),
    "starts": _BOUNDS,
    "steps": _BOUNDS,
    "stops": _BOUNDS,
    "stride": optional(_INTEGERS),
    "taps": optional(_INTEGERS),
    "upper_clip": optional(number),
    "use_alibi_mask": flag,
    "use_causal_mask": flag,
    "value": any_number,
    "window": _INTEGERS,
}


def of_kind(name: str, kind: Kind, value: Any) -> Any:
    """A value as a plain one of a kind.  Raises AttributeValueError, which names it, or DTypeError."""
    try:
        return kind(value)
    except Unfit as wanted:
        raise AttributeValueError(f"{name} is {wanted}, got {shown(value)}") from None


def checked(attributes: Attributes) -> dict[str, Any]:
    """Attributes of an op as plain values.  Raises AttributeValueError or DTypeError."""
    return {name: of_kind(name, KINDS.get(name, plain), value) for name, value in attributes.items()}
