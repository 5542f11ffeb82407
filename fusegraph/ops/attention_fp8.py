"""``sdpa_fp8``: attention of 8-bit floats with scales, after cuDNN's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from fusegraph.dtypes import as_dtype, float8_e4m3, float8_e5m2
from fusegraph.errors import DTypeError, ShapeError
from fusegraph.ops import attention as wide
from fusegraph.ops import attention_softmax as softmaxes
from fusegraph.ops.attention import LENGTHS, NEUTRAL, SCORES, infer, normalize, present, scores_reference
from fusegraph.ops.base import Array, Attributes, Kind, Op, TensorType, Types, register
from fusegraph.ops.composite import Writing

SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
OPTIONAL = ("bias", "mask", *LENGTHS, "sink_token")
OPERANDS = ("q", "k", "v", *SCALES, *OPTIONAL)
_FIRST = 3 + len(SCALES)


def _plain(types: Types) -> Types:
    """Returns the types of the operands that sdpa has as well."""
    return (*types[:3], *types[_FIRST:])


def _normalize(types: Types, values: Attributes) -> dict[str, Any]:
    for key, t in zip(OPERANDS, types[:_FIRST]):
        if key in SCALES and (not t.dtype.is_float or t.dtype.itemsize < 4 or prod(t.shape) != 1 or len(t.shape) > 4):
            raise DTypeError(f"{key} is one number in float32, got {list(t.shape)} of {t.dtype}")
        if key not in SCALES and t.dtype not in (float8_e4m3, float8_e5m2):
            raise DTypeError(f"{key} is of 8-bit floats, got {t.dtype}")
    result = normalize(_plain(types), values)
    dtype = as_dtype(values["dtype"]) if values["dtype"] is not None else types[0].dtype
    if not dtype.is_float:
        raise DTypeError(f"the result is of floats, not of {dtype}")
    return {**result, "dtype": dtype}


def _infer(types: Types, values: Attributes) -> TensorType | Types:
    if len(types[0].shape) != 4:
        raise ShapeError("q, k and v have 4 dimensions: batch, heads, length, elements")
    made = infer(_plain(types), values)
    results = made if isinstance(made, tuple) else (made,)
    out = TensorType(results[0].shape, values["dtype"])
    return (out, *results[1:]) if values["generate_stats"] else out


def attended(
    write: Writing,
    q: Any,
    k: Any,
    v: Any,
    scales: Sequence[Any],
    given: Mapping[str, Any],
    *,
    weigh: Callable[[Any], Any] | None = None,
    **scoring: Any,
) -> tuple[wide.Attended, Any]:
    """Writes attention as `attention.attended` does, and its result before it is multiplied with scale_o."""
    by_q, by_k, by_v, by_s, scale_s, _ = scales

    def weighed(p: Any) -> Any:
        return write("mul", "scaled probabilities", p if weigh is None else weigh(p), scale_s)

    factor = write("mul", "descale of products", by_q, by_k)
    found = wide.attended(write, q, k, v, given, dtype="float32", weigh=weighed, factor=factor, **scoring)
    return found, write("mul", "descale of values", by_s, by_v)


def _expand(
    write: Writing, q: Any, k: Any, v: Any, *others: Any, generate_stats: bool, dtype: Any, **attributes: Any
) -> Any:
    scales, given = others[: len(SCALES)], present(others[len(SCALES) :], OPTIONAL)
    found, descale = attended(write, q, k, v, scales, given, **attributes)
    factor = write("mul", "scale of results", descale, scales[-1])
    out = write("mul", "scaled results", found.out, factor)
    return (out, found.stats(write)) if generate_stats else out


def _reference(*arrays: Array, **attributes: Any) -> Any:
    q, k, v, *others = (np.asarray(x) for x in arrays)
    by_q, by_k, by_v, by_s, scale_s, scale_o = (x.reshape(-1)[0] for x in others[: len(SCALES)])
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    with np.errstate(all="ignore"):
        given = dict(zip(OPTIONAL, others[len(SCALES) :]))
        scores, _, exists = scores_reference(q * by_q, k * by_k, given, attributes)
        p, stats = softmaxes.reference(scores, given.get("sink_token"), exists)
        out = np.matmul(p * scale_s, v) * (by_s * by_v * scale_o)
        return (out, stats) if attributes["generate_stats"] else out


register(
    Op(
        name="sdpa_fp8",
        kind=Kind.COMPOSITE,
        operands=OPERANDS,
        infer=_infer,
        reference=_reference,
        attributes={**SCORES, "generate_stats": False, "dtype": None},
        words=wide.WORDS,
        normalize=_normalize,
        expand=_expand,
        gradient="attention of 8-bit floats is for inference",
        results=("", "stats"),
        optional=len(OPTIONAL),
        neutral=NEUTRAL,
        as_stored=True,
        weighs=True,
        masks=("mask",),
        integers=(*SCALES, "bias", "sink_token", *LENGTHS),
        keeps_layout=True,
        cudnn="sdpa_fp8",
        doc="""sdpa of queries, keys and values in 8-bit floats, with scales; shapes and other attributes as sdpa's.

        descale_q, descale_k, descale_v, descale_s, scale_s and scale_o are one float32 each: products of queries and
        keys are multiplied with descale_q * descale_k, probabilities with scale_s before they are rounded to v's dtype
        (at most its largest number), the result with descale_s * descale_v * scale_o before it is rounded to dtype
        (default: that of q).  In kernels the probabilities are rounded before they are divided by their sum, or kept in
        more bits.""",
    )
)
