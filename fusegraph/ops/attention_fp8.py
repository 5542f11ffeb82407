"""``sdpa_fp8``: attention of 8-bit floats with scales, after cuDNN's."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, prod
from typing import Any

import numpy as np

from fusegraph.dtypes import as_dtype, float8_e4m3, float8_e5m2
from fusegraph.errors import DTypeError, ShapeError
from fusegraph.ops.attention import LENGTHS, NEUTRAL, SCORES, infer, normalize, present, scored, scores_reference
from fusegraph.ops.base import Kind, Op, TensorType, register
from fusegraph.ops.composite import Writing

Array = np.ndarray[Any, Any]

SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
OPTIONAL = ("bias", "mask", *LENGTHS)
OPERANDS = ("q", "k", "v", *SCALES, *OPTIONAL)
_FIRST = 3 + len(SCALES)


def _plain(types: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """The types of the operands that sdpa has as well."""
    return (*types[:3], *types[_FIRST:])


def _normalize(types: tuple[TensorType, ...], values: Mapping[str, Any]) -> dict[str, Any]:
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


def _infer(types: tuple[TensorType, ...], values: Mapping[str, Any]) -> TensorType | tuple[TensorType, ...]:
    if len(types[0].shape) != 4:
        raise ShapeError("q, k and v have 4 dimensions: batch, heads, length, elements")
    made = infer(_plain(types), values)
    results = made if isinstance(made, tuple) else (made,)
    out = TensorType(results[0].shape, values["dtype"])
    return (out, *results[1:]) if values["generate_stats"] else out


def _expand(
    write: Writing, q: Any, k: Any, v: Any, *others: Any, generate_stats: bool, dtype: Any, **attributes: Any
) -> Any:
    by_q, by_k, by_v, by_s, scale_s, scale_o = others[: len(SCALES)]
    given = present(others[len(SCALES) :], OPTIONAL)
    batch, heads, rows, _ = q.shape
    made = scored(write, q, k, v, given, **attributes, factor=write("mul", "descale of products", by_q, by_k))
    most = write("reduction", "largest", made.scores, mode="max", axes=-1)
    shift = write("binary_select", "shift", 0.0, most, write("cmp_eq", "alone", most, -inf))
    e = write("exp", "exponentials", write("sub", "shifted", made.scores, shift))
    total = write("reduction", "sum", e, mode="add", axes=-1)
    divisor = write("binary_select", "divisor", 1.0, total, write("cmp_eq", "none", total, 0.0))
    p = write("mul", "probabilities", e, write("reciprocal", "inverse", divisor))
    p = write("narrow", "rounded", write("mul", "scaled probabilities", p, scale_s), dtype=v.dtype)
    out = write("matmul", "attended", p, made.v, dtype="float32")
    if made.q.shape != q.shape:
        out = write("reshape", "result", out, shape=(batch, heads, rows, v.shape[-1]))
    factor = write("mul", "scale of results", write("mul", "descale of values", by_s, by_v), scale_o)
    out = write("mul", "scaled results", out, factor)
    if not generate_stats:
        return out
    stats = write("add", "log sum", write("log", "log", total), shift)
    return out, stats if made.q.shape == q.shape else write("reshape", "stats", stats, shape=(batch, heads, rows, 1))


def _reference(*arrays: Array, **attributes: Any) -> Any:
    q, k, v, *others = (np.asarray(x) for x in arrays)
    by_q, by_k, by_v, by_s, scale_s, scale_o = (x.reshape(-1)[0] for x in others[: len(SCALES)])
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    with np.errstate(all="ignore"):
        scores, _ = scores_reference(q * by_q, k * by_k, dict(zip(OPTIONAL, others[len(SCALES) :])), attributes)
        most = scores.max(axis=-1, keepdims=True)
        shift = np.where(most == -inf, 0.0, most)
        e = np.exp(scores - shift)
        total = e.sum(axis=-1, keepdims=True)
        p = e / np.where(total == 0, 1.0, total) * scale_s
        out = np.matmul(p, v) * (by_s * by_v * scale_o)
        return (out, np.log(total) + shift) if attributes["generate_stats"] else out


register(
    Op(
        name="sdpa_fp8",
        kind=Kind.COMPOSITE,
        operands=OPERANDS,
        infer=_infer,
        reference=_reference,
        attributes={
            **SCORES,
            "generate_stats": False,
            "dtype": None,
        },
        normalize=_normalize,
        expand=_expand,
        results=("", "stats"),
        optional=len(OPTIONAL),
        neutral=NEUTRAL,
        as_stored=True,
        weighs=True,
        masks=("mask",),
        integers=(*SCALES, "bias", *LENGTHS),
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
