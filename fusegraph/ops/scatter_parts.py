"""What a scatter is written as: combining integers at places, and floats as integers that can be so combined.

These ops are not in the op table: users write `scatter`, `ops.scatter` writes these.  ``codegen/device/scatter.cuh``
says what the integers are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from codegen.combiners import COMBINERS, MOST
from fusegraph.dtypes import DType, int32, int64
from fusegraph.layout import broadcast
from fusegraph.ops.base import REQUIRED, Array, Attributes, Cost, Kind, Op, TensorType, Types


def _accumulated(types: Types, attributes: Attributes) -> TensorType:
    shape = list(types[1].shape)
    shape[attributes["axis"]] = attributes["size"]
    return TensorType(tuple(shape), types[1].dtype)


def _accumulate(index: Array, values: Array, size: int, axis: int, combine: str) -> Array:
    shape = list(values.shape)
    shape[axis] = size
    at = np.broadcast_to(index, values.shape)
    inside = (at >= 0) & (at < size)
    places = list(np.nonzero(inside))
    places[axis] = at[inside].astype(np.int64)
    combiner = COMBINERS[combine]
    kind = np.dtype(f"u{values.dtype.itemsize}") if combiner is MOST else values.dtype
    result = np.full(shape, combiner.start(kind), kind)
    combiner.ufunc.at(result, tuple(places), values.view(kind)[inside])
    return result.view(values.dtype)


ACCUMULATE = Op(
    name="accumulate",
    kind=Kind.SCATTER,
    operands=("index", "values"),
    attributes={"size": REQUIRED, "axis": REQUIRED, "combine": REQUIRED},
    integers=("index",),
    infer=_accumulated,
    reference=_accumulate,
    doc="""Values combined at the places along an axis, ``size`` of them, that an index says, which broadcasts to them;
    those outside are left out.  combine names a combiner: add and most of integers, or mul.""",
)


def _part(
    name: str,
    operands: tuple[str, ...],
    result: Callable[[TensorType], DType],
    reference: Callable[..., Array],
    cuda: Mapping[str, str | Callable[[Attributes], str]],
    attributes: Attributes,
    optional: int = 0,
) -> Op:
    """Returns a pointwise op of a number, whose type decides on the result's, and integers."""

    def infer(types: Types, _: Attributes) -> TensorType:
        return TensorType(broadcast([t.shape for t in types]), result(types[0]))

    return Op(
        name=name,
        kind=Kind.POINTWISE,
        cost=Cost.FUNCTION,
        operands=operands,
        integers=operands[1:],
        attributes=attributes,
        infer=infer,
        reference=reference,
        cuda=cuda,
        optional=optional,
        ulps=0,
    )


# ---- numbers in an order


def _order(x: Array, down: bool, wide: bool) -> Array:
    size = 8 if wide else 4
    signed, unsigned, sign = np.dtype(f"i{size}"), np.dtype(f"u{size}"), 1 << (8 * size - 1)
    if x.dtype.kind != "f":
        bits = x.astype(signed).view(unsigned) ^ unsigned.type(sign)
        return np.asarray(~bits if down else bits).view(signed)
    bits = (-x if down else x).astype(f"f{size}").view(unsigned)
    key = np.where(bits & unsigned.type(sign) != 0, ~bits, bits | unsigned.type(sign))
    return np.where(np.isnan(x), ~unsigned.type(0), key).view(signed)


def _ordered(x: Array, key: Array, down: bool, wide: bool) -> Array:
    size = 8 if wide else 4
    signed, unsigned, sign = np.dtype(f"i{size}"), np.dtype(f"u{size}"), 1 << (8 * size - 1)
    bits = np.ascontiguousarray(key).view(unsigned)
    combine = np.minimum if down else np.maximum
    if x.dtype.kind != "f":
        return np.asarray(combine(x, ((~bits if down else bits) ^ unsigned.type(sign)).view(signed)))
    found = np.where(bits & unsigned.type(sign) != 0, bits ^ unsigned.type(sign), ~bits).view(f"f{size}")
    found = np.where(bits == 0, -np.inf, found)
    return np.asarray(combine(x, -found if down else found))


def _key_dtype(x: TensorType) -> DType:
    return int64 if x.dtype.itemsize == 8 else int32


_DOWN = {"down": False, "wide": False}
ORDER = _part(
    "order",
    ("x",),
    _key_dtype,
    _order,
    dict.fromkeys(("float", "int"), lambda at: f"scatter::order{'_down' * at['down']}({{x}})"),
    _DOWN,
)


def _extreme(at: Attributes) -> str:
    combine, down = ("minimum", "_down") if at["down"] else ("maximum", "")
    return f"math::{combine}({{x}}, scatter::ordered{down}<{{compute}}>({{key}}))"


#: x, or the number that a key stands for if that is larger (``down``: smaller).
ORDERED = _part(
    "ordered",
    ("x", "key"),
    lambda x: x.dtype,
    _ordered,
    dict.fromkeys(("float", "int"), _extreme),
    _DOWN,
)

# ---- floats in units


def _format(wide: bool) -> tuple[int, int, int]:
    """Returns the bias of a float's exponent, less one, the exponent of infinities, and the least that is a scale."""
    return (1022, 2047, 64) if wide else (126, 255, 1)


def _exponent(x: Array, wide: bool) -> Array:
    bias, infinite, least = _format(wide)
    _, power = np.frexp(np.where(np.isfinite(x), x, 0.0))
    field = np.where(x == 0, least, np.maximum(power + bias, least))
    return np.where(np.isnan(x), infinite + 1, np.where(np.isinf(x), infinite, field)).astype(np.int32)


def _fixed(x: Array, scale: Array, places: int, rest: bool, wide: bool) -> Array:
    bias, infinite, _ = _format(wide)
    special = scale >= infinite
    known = np.where(special | ~np.isfinite(x), 0.0, x)
    whole = np.ldexp(known, np.where(special, 0, places + bias - scale))
    units = np.rint(np.ldexp(whole - np.rint(whole), places) if rest else whole).astype(np.int64)
    counted = np.where(np.isposinf(x), 1, np.where(np.isneginf(x), 1 << 32, 0))
    return np.where(special, np.where((scale > infinite) | rest, 0, counted), units)


def _floating(x: Array, scale: Array, total: Array, rest: Any = 0, *, places: int, wide: bool) -> Array:
    bias, infinite, least = _format(wide)
    units = total.astype(np.float64) + np.ldexp(np.asarray(rest, np.float64), -places)
    power = np.where(scale >= infinite, 0, np.maximum(scale, least) - bias - places)
    both = np.where(total & 0xFFFFFFFF != 0, np.inf, 0.0) - np.where(total >> 32 != 0, np.inf, 0.0)
    with np.errstate(all="ignore"):
        found = np.where(scale > infinite, np.nan, np.where(scale == infinite, both, np.ldexp(units, power)))
        return np.asarray(x + found)


#: The scale of one float.
EXPONENT = _part("exponent", ("x",), lambda x: int32, _exponent, {"float": "scatter::exponent({x})"}, {"wide": False})
#: A float in units of a scale, or what is left of it in finer units.
FIXED = _part(
    "fixed",
    ("x", "scale"),
    lambda x: int64,
    _fixed,
    {"float": lambda at: f"scatter::fixed{'_rest' * at['rest']}({{x}}, {{scale}}, {at['places']})"},
    {"places": REQUIRED, "rest": False, "wide": False},
)


def _plus(at: Attributes) -> str:
    rest = ", {rest}" if at["wide"] else ""
    return f"{{x}} + scatter::floating({{scale}}, {at['places']}, {{total}}{rest})"


#: x plus a sum in units of a scale.
FLOATING = _part(
    "floating",
    ("x", "scale", "total", "rest"),
    lambda x: x.dtype,
    _floating,
    {"float": _plus},
    {"places": REQUIRED, "wide": False},
    optional=1,
)
