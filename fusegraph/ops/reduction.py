"""Reductions along axes: sums, products, extremes and norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite, prod
from typing import Any

import numpy as np

from fusegraph.dtypes import BY_NUMPY, DType, bool_, float32, int32, int64, sum_dtype
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.ops.base import Kind, Op, Role, TensorType, register

Array = np.ndarray[Any, Any]

#: mode -> (what is done to each element, how they are combined, what is done to the result).
MODES: dict[str, tuple[str, str, str]] = {
    "add": ("", "add", ""),
    "mul": ("", "mul", ""),
    "min": ("", "min", ""),
    "max": ("", "max", ""),
    "amax": ("abs", "max", ""),
    "avg": ("", "add", "mean"),
    "norm1": ("abs", "add", ""),
    "norm2": ("square", "add", "sqrt"),
}
#: Modes that are written out as reductions of those above and pointwise ops.
COMPOSED = ("mul_no_zeros", "any", "all", "argmin", "argmax", "var")
#: Those of them that say where an element is, and those that are True or False.
POSITIONS = frozenset({"argmin", "argmax"})
TRUTHS = frozenset({"any", "all"})
#: Modes whose result is one of the elements, or its absolute value.
EXTREMES = frozenset({"min", "max", "amax"})


def normal_axes(axes: Any, rank: int) -> tuple[int, ...]:
    """Axes as sorted non-negative numbers; None is all of them.  Raises AttributeValueError."""
    if axes is None:
        return tuple(range(rank))
    given = (axes,) if isinstance(axes, (int, np.integer)) else axes
    if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
        raise AttributeValueError(f"axes are None, an integer or several, got {axes!r}")
    result = []
    for axis in given:
        if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
            raise AttributeValueError(f"an axis is an integer, got {axis!r}")
        if not -rank <= axis < rank:
            raise AttributeValueError(f"axis {axis} is not one of the {rank} axes")
        result.append(int(axis) % rank)
    if len(set(result)) < len(result):
        raise AttributeValueError(f"axes {axes!r} name an axis twice")
    return tuple(sorted(result))


def _normalize(types: tuple[TensorType, ...], attributes: Mapping[str, Any]) -> dict[str, Any]:
    x = types[0]
    mode = attributes["mode"]
    if mode not in MODES and mode not in COMPOSED:
        raise AttributeValueError(f"mode is one of {', '.join((*MODES, *COMPOSED))}, got {mode!r}")
    correction = attributes["correction"]
    if not isfinite(correction):
        raise AttributeValueError(f"correction is a finite number, got {correction!r}")
    if correction and mode != "var":
        raise AttributeValueError(f"correction is for mode var, this is {mode}")
    axes = normal_axes(attributes["axes"], len(x.shape))
    if mode in POSITIONS and not axes:
        raise AttributeValueError(f"{mode} needs an axis")
    return {
        "mode": mode,
        "axes": axes,
        "keepdims": attributes["keepdims"],
        "dtype": attributes["dtype"],
        "correction": float(correction),
    }


def result_dtype(x: TensorType, mode: str, dtype: DType | None) -> DType:
    """The dtype of a result: the operand's, or that of the sum for floats of 8 bits and integers of 8 and 16, which
    would rarely hold it.
    """
    if mode in TRUTHS:
        if dtype not in (None, bool_):
            raise DTypeError(f"{mode} is True or False; cast the result to {dtype}")
        return bool_
    if x.dtype.is_bool:
        raise DTypeError(f"{mode} does not take bool; cast to int32 to count")
    if mode in POSITIONS:
        if dtype not in (None, int32, int64):
            raise DTypeError(f"{mode} is an int32 or int64; cast the result to {dtype}")
        return dtype or int64
    if x.dtype.is_int and mode in ("avg", "norm2", "var"):
        raise DTypeError(f"{mode} of {x.dtype} is not exact; cast to a float")
    if dtype is not None:
        if x.dtype.is_float != dtype.is_float or dtype.is_bool:
            raise DTypeError(f"{mode} of {x.dtype} cannot be stored as {dtype}; cast the result")
        if x.dtype.is_int and mode in EXTREMES and dtype != x.dtype:
            raise DTypeError(f"{mode} of {x.dtype} is {x.dtype}; cast the result to {dtype}")
        if dtype.is_int and dtype.itemsize < 4 and mode not in EXTREMES:
            raise DTypeError(f"{mode} of integers is summed in 32 or 64 bits; cast the result to {dtype}")
        return dtype
    if mode in EXTREMES:
        return x.dtype
    return summed(x.dtype)


def summed(dtype: DType) -> DType:
    """The dtype of sums of a dtype that say no other: float32 for floats of 8 bits, int32 for integers of 8 and 16."""
    if dtype.is_float:
        return dtype if dtype.bits > 8 else float32
    return dtype if dtype.bits >= 32 else int32


def _infer(types: tuple[TensorType, ...], attributes: Mapping[str, Any]) -> TensorType:
    x, normal = types[0], _normalize(types, attributes)
    axes, mode = normal["axes"], normal["mode"]
    if mode in EXTREMES | POSITIONS and any(x.shape[d] == 0 for d in axes):
        raise ShapeError(f"{mode} of no elements: axis {next(d for d in axes if x.shape[d] == 0)} has size 0")
    kept = (1 if d in axes else size for d, size in enumerate(x.shape))
    dropped = (size for d, size in enumerate(x.shape) if d not in axes)
    return TensorType(tuple(kept if normal["keepdims"] else dropped), result_dtype(x, mode, normal["dtype"]))


_COMBINE: dict[str, Callable[..., Array]] = {"add": np.sum, "mul": np.prod, "min": np.min, "max": np.max}


def _last(x: Array, axes: tuple[int, ...]) -> Array:
    """The axes as the last one, in row-major order."""
    kept = [d for d in range(x.ndim) if d not in axes]
    moved = x.transpose([*kept, *axes])
    return moved.reshape([*moved.shape[: len(kept)], prod(moved.shape[len(kept) :])])


def _composed_reference(x: Array, mode: str, axes: tuple[int, ...], keepdims: bool, correction: float) -> Array:
    if mode in TRUTHS:
        return np.asarray((np.any if mode == "any" else np.all)(x != 0, axis=axes, keepdims=keepdims))
    if mode in POSITIONS:
        found = (np.argmin if mode == "argmin" else np.argmax)(_last(x, axes), axis=-1)
        shape = [1 if d in axes else n for d, n in enumerate(x.shape)]
        return np.asarray(found).reshape(shape) if keepdims else np.asarray(found)
    centred = x - x.mean(axis=axes, keepdims=True)
    total = (centred * centred).sum(axis=axes, keepdims=keepdims)
    return np.asarray(total / np.float64(max(prod(x.shape[d] for d in axes) - correction, 0.0)))


def _reference(
    x: Array, mode: str, axes: tuple[int, ...], keepdims: bool, dtype: DType | None, correction: float = 0.0
) -> Array:
    if mode == "mul_no_zeros":
        return _reference(np.where(x == 0, np.ones_like(x), x), "mul", axes, keepdims, dtype)
    if mode in COMPOSED:
        with np.errstate(all="ignore"):
            return _composed_reference(x, mode, axes, keepdims, correction)
    before, combine, after = MODES[mode]
    with np.errstate(all="ignore"):
        integers = x.dtype.kind in "iu" and mode not in EXTREMES
        exact = x.astype(f"{x.dtype.kind}8") if integers else x
        each = np.abs(exact) if before == "abs" else exact * exact if before == "square" else exact
        total = np.asarray(_COMBINE[combine](each, axis=axes, keepdims=keepdims))
        if after == "mean":
            total = total / np.float64(prod(x.shape[d] for d in axes))
        elif after == "sqrt":
            total = np.sqrt(total)
        if integers:
            source = BY_NUMPY[x.dtype]
            total = np.asarray(total).astype(sum_dtype(source, dtype or source).numpy)
    return np.asarray(total)


def _position(write: Any, x: Any, axes: Sequence[int]) -> Any:
    """Each element's position along axes, in row-major order."""
    position = None
    large = prod(x.shape[d] for d in axes) > int32.max
    for d in axes:
        own = write("gen_index", f"index {d}", x, axis=d)
        own = write("identity", f"wide {d}", own, dtype=int64) if large else own
        if position is not None:
            own = write("add", f"position {d}", write("mul", f"row {d}", position, x.shape[d]), own)
        position = own
    return position


def _expand(
    write: Any, x: Any, mode: str, axes: tuple[int, ...], keepdims: bool, dtype: DType | None, correction: float
) -> Any:
    """The modes of `COMPOSED` as others."""

    def reduce(part: str, operand: Any, how: str, keep: bool = True, **more: Any) -> Any:
        return write("reduction", part, operand, mode=how, axes=axes, keepdims=keep, **more)

    count = prod(x.shape[d] for d in axes)
    if mode == "mul_no_zeros":
        return reduce(
            "", write("binary_select", "factor", x, 1, write("cmp_neq", "not zero", x, 0)), "mul", keepdims, dtype=dtype
        )
    if mode in TRUTHS:
        # Whether there is one that is true, or that is false: the largest of 0 and 1, of which no elements have none.
        found = write("cmp_eq" if mode == "all" else "cmp_neq", "found", x, 0)
        most = reduce("most", write("identity", "number", found, dtype=int32), "max" if count else "add", keepdims)
        return write("cmp_eq" if mode == "all" else "cmp_gt", "", most, 0)
    if mode in POSITIONS:
        # The first of those that equal the extreme; NaN is one, and then the only one.
        extreme = mode.removeprefix("arg")
        equal = write("cmp_eq", "equal", x, reduce(extreme, x, extreme))
        if x.dtype.is_float:
            equal = write("logical_or", "or nan", equal, write("isnan", "nan", x))
        position = _position(write, x, axes)
        first = reduce("first", write("binary_select", "candidate", position, count, equal), "min", keepdims)
        wanted = dtype or int64
        return first if first.dtype == wanted else write("identity", "", first, dtype=wanted)
    centred = write("sub", "centred", x, reduce("mean", x, "avg"))
    total = reduce("total", write("mul", "square", centred, centred), "add", keepdims)
    return write("div", "", total, float(max(count - correction, 0.0)))


register(
    Op(
        name="reduction",
        kind=Kind.REDUCTION,
        role=Role.REDUCE,
        operands=("x",),
        attributes={"mode": "add", "axes": None, "keepdims": True, "dtype": None, "correction": 0},
        composite=lambda attributes: attributes["mode"] in COMPOSED,
        expand=_expand,
        normalize=_normalize,
        infer=_infer,
        reference=_reference,
        cudnn="reduction",
        doc="""Combines all elements along axes (None: along all of them), which stay as dimensions of size 1 or, with
        keepdims=False, go.

        mode is add, mul, mul_no_zeros (of those that are not 0), min, max, amax (the largest absolute value), avg,
        norm1 (sum of absolute values), norm2 (square root of the sum of squares), var (mean of squared differences
        from the mean; their sum is divided by the number of elements less correction), argmin or argmax (where the
        first smallest or largest is, NaN being both: along several axes counted in row-major order), any or all
        (whether one is, or all are, not 0).  Of no elements: add, norm1 and norm2 are 0, mul and mul_no_zeros are 1,
        any is False, all is True, avg and var are NaN; the others raise ShapeError, as NumPy does.  NaN where an
        element is NaN.

        Floats are summed in float32, or float64 for float64 and graphs that compute in it.  Integers are exact: min,
        max and amax (where -128 of int8 stays -128) in their own dtype; sums and products in 32 bits, or 64 if the
        operand or dtype has as many, wrapping around; avg, norm2 and var take floats only.  dtype is that of the
        result: by default the operand's, but int32 for sums of integers of 8 and 16 bits and float32 for those of fp8;
        int64 for argmin and argmax, which may be int32; bool for any and all, which alone take bool.""",
    )
)
