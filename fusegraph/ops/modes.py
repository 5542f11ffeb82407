"""The modes of reductions: what is done to each element, how two are combined, and what is done to the result.

An entry is all that shapes, NumPy, kernels, split reductions and error bounds know of a mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from codegen.combiners import ADD, LOGADDEXP, MAX, MIN, MUL, Combiner
from codegen.expr import literal
from codegen.sizes import Size
from fusegraph.dtypes import BY_NUMPY, DType, int32, int64, sum_dtype
from fusegraph.ops.base import Array

#: (`ops.reverse.Reverse`, x, the gradient by the result, the result, axes) -> the gradient by x; the two have all of
#: x's dimensions.
Slope = Callable[[Any, Any, Any, Any, tuple[int, ...]], Any]
Axes = tuple[int, ...]


def accumulator(combiner: Combiner, source: DType, result: DType) -> DType:
    """Returns the dtype in which integers are combined to a result; a float dtype is returned as it is."""
    return sum_dtype(source, result) if source.is_int and combiner.widens else source


def reduced_shape(shape: tuple[int, ...], axes: Axes, keepdims: bool) -> tuple[int, ...]:
    """Returns a shape reduced along axes, which are kept as size 1 or dropped."""
    return tuple(1 if d in axes else n for d, n in enumerate(shape) if keepdims or d not in axes)


def as_rows(x: Array, axes: Axes) -> Array:
    """Returns the elements along axes in one dimension, the last, in row-major order."""
    kept = [d for d in range(x.ndim) if d not in axes]
    return x.transpose([*kept, *axes]).reshape([*(x.shape[d] for d in kept), prod(x.shape[d] for d in axes)])


@dataclass(frozen=True)
class Before:
    """What is done to each element.

    numpy     the function of the elements, whose last axis is that of a part.
    floats    its CUDA expression of {0}; integers: that of integers in the type in which they are combined.
    centred   whether the part's own mean is subtracted first.
    moves     (magnitude, error of an element) -> the error of what is made of it.
    """

    name: str
    numpy: Callable[[Array], Array]
    floats: str
    integers: str = ""
    centred: bool = False
    moves: Callable[[Array, Array], Array] = lambda x, e: e


@dataclass(frozen=True)
class After:
    """What is done to the result: the graph's op for it, which takes the result and maybe the number of elements.

    numpy   of the result and that number; cuda: (that number, compute type) -> the expression of {0}.
    error   (error of the result, its magnitude, value, number of elements, unit roundoff, smallest normal number) ->
            the error of the value.
    """

    op: str
    numpy: Callable[[Array, int], Array]
    cuda: Callable[[int, str], str]
    error: Callable[[Array, Array, Array, int, float, float], Array]


def _mean_error(error: Array, total: Array, value: Array, count: int, unit: float, tiny: float) -> Array:
    return np.asarray(error / count + unit * (np.abs(value) + error / count) + tiny)


def _root_error(error: Array, total: Array, value: Array, count: int, unit: float, tiny: float) -> Array:
    square = total * (1 + 2.0**-50)
    upper = np.sqrt(square + error) - np.sqrt(square)
    lower = np.sqrt(square) - np.sqrt(np.maximum(square - error, 0.0))
    return np.asarray(np.maximum(upper, lower) * (1 + 2.0**-20) + 4 * unit * np.sqrt(square + error) + tiny)


ABS = Before("abs", np.abs, "math::abs({0})", "math::wrapping_abs({0})")
SQUARE = Before("square", np.square, "{0} * {0}", moves=lambda x, e: (2 * x + e) * e)
#: The variance of the whole is made of such parts without cancellation (Chan, Golub and LeVeque, "Updating Formulae and
#: a Pairwise Algorithm for Computing Sample Variances", 1979).
DEVIATION = Before("square", lambda x: np.square(x - x.mean(axis=-1, keepdims=True)), "{0} * {0}", centred=True)
MEAN = After(
    "div",
    lambda total, count: np.asarray(total / np.float64(count)),
    lambda count, ctype: f"{{0}} / {literal(count, ctype if ctype == 'float' else 'double')}",
    _mean_error,
)
ROOT = After("sqrt", lambda total, _: np.sqrt(total), lambda *_: "math::sqrt({0})", _root_error)


@dataclass(frozen=True)
class Combined:
    """A mode that combines elements two by two."""

    name: str
    combiner: Combiner
    before: Before | None = None
    after: After | None = None
    cudnn: bool = True
    slope: Slope | None = None
    position = truth = corrects = False

    @property
    def floats(self) -> bool:
        """Whether it takes floats alone."""
        return self.after is not None or self.combiner.floats

    @property
    def selects(self) -> bool:
        """Whether the result is one of the elements, or its absolute value."""
        return self.combiner.selects

    @property
    def looks_twice(self) -> bool:
        """Whether all elements are needed before anything is done to each."""
        return self.before is not None and self.before.centred

    @property
    def part(self) -> Combined:
        """The mode of parts, whose results ``combiner`` combines."""
        return next(m for m in PARTS.values() if (m.combiner, m.before) == (self.combiner, self.before))

    def combine(self, x: Array, axes: Axes, *, keepdims: bool = False) -> Array:
        """Returns the elements along axes combined, without what is done to the result."""
        each = x if self.before is None else self.before.numpy(x)
        return np.asarray(self.combiner.ufunc.reduce(each, axis=axes, keepdims=keepdims))

    def reference(self, x: Array, axes: Axes, keepdims: bool, dtype: DType | None, _: float = 0.0) -> Array:
        """Returns the mode's meaning; integers are combined in 64 bits."""
        integers = x.dtype.kind in "iu" and not self.selects
        total = self.combine(x.astype(f"{x.dtype.kind}8") if integers else x, axes, keepdims=keepdims)
        if self.after is not None:
            total = np.asarray(self.after.numpy(total, prod(x.shape[d] for d in axes)))
        if not integers:
            return total
        source = BY_NUMPY[x.dtype]
        return total.astype(sum_dtype(source, dtype or source).numpy)


@dataclass(frozen=True)
class Composed:
    """A mode that is written out as reductions of others and pointwise ops.

    reference  (x, axes, keepdims, dtype, correction) -> the result.
    expand     (write, reduce, x, axes, keepdims, dtype, correction) -> the result of nodes that ``write`` adds;
               ``reduce(part, operand, mode, keepdims=True, dtype=None)`` is a reduction along the same axes.
    floats     whether it takes floats alone.
    position   whether the result says where an element is; truth: whether it is True or False.
    corrects   whether it takes a correction.
    slope      its gradient; None where that goes through the nodes that it is written out as.
    cudnn      whether cuDNN's reduction has it.
    """

    name: str
    reference: Callable[[Array, Axes, bool, DType | None, float], Array]
    expand: Callable[..., Any]
    floats: bool = False
    position: bool = False
    truth: bool = False
    corrects: bool = False
    cudnn: bool = False
    slope: Slope | None = None
    selects = False


Mode = Combined | Composed


def _by_product(at: Any, x: Any, loss: Any, y: Any, axes: Axes) -> Any:
    """The product of all other elements: 0 where another one is 0."""
    g = at.graph
    none = g.cmp_eq(x, 0)
    zeros = g.reduction(g.cast(none, int32), "add", axes)
    return loss * product_slope(at, x, g.reduction(x, "mul_no_zeros", axes, dtype=loss.dtype), zeros)


def product_slope(at: Any, x: Any, others: Any, zeros: Any) -> Any:
    """Returns the derivative by each factor of a product: the product of all other factors.

    others is the product of all factors that are not 0, zeros is the number of the rest.
    """
    g = at.graph
    only = g.binary_select(others, 0.0, g.cmp_eq(zeros, 1))
    return g.binary_select(only, g.binary_select(0.0, others / x, g.cmp_gt(zeros, 0)), g.cmp_eq(x, 0))


def _by_extreme(at: Any, x: Any, loss: Any, y: Any, axes: Axes) -> Any:
    """Elements that equal the extreme share its gradient evenly."""
    g = at.graph
    found = g.cmp_eq(x, y)
    return g.binary_select(loss / g.cast(g.reduction(g.cast(found, int32), "add", axes), loss.dtype), 0.0, found)


def _by_magnitude(at: Any, x: Any, loss: Any, y: Any, axes: Axes) -> Any:
    return _by_extreme(at, at.graph.abs(x), loss, y, axes) * at.graph.sign(x)


def _by_length(at: Any, x: Any, loss: Any, y: Any, axes: Axes) -> Any:
    """Where the norm is 0, so is the gradient."""
    return at.graph.binary_select(0.0, loss * (x / y), at.graph.cmp_eq(y, 0))


def _by_elements(at: Any, x: Any, loss: Any, y: Any, axes: Axes) -> Any:
    return loss


SUM = Combined("add", ADD, slope=_by_elements)
AVERAGE = Combined(
    "avg", ADD, after=MEAN, slope=lambda at, x, loss, y, axes: loss / as_number(prod(x.shape[d] for d in axes))
)
COMBINED = {
    mode.name: mode
    for mode in (
        SUM,
        Combined("mul", MUL, slope=_by_product),
        Combined("min", MIN, slope=_by_extreme),
        Combined("max", MAX, slope=_by_extreme),
        Combined("amax", MAX, ABS, slope=_by_magnitude),
        AVERAGE,
        Combined("norm1", ADD, ABS, slope=lambda at, x, loss, y, axes: loss * at.graph.sign(x)),
        Combined("norm2", ADD, SQUARE, ROOT, slope=_by_length),
        Combined("logaddexp", LOGADDEXP, cudnn=False, slope=lambda at, x, loss, y, axes: loss * at.graph.exp(x - y)),
    )
}
#: Modes of parts, which are those that do nothing to the result: those of `passes.split_reductions` among them.
PARTS = {
    **{mode.name: mode for mode in COMBINED.values() if mode.after is None},
    "squares": Combined("squares", ADD, SQUARE),
    "squared_deviation": Combined("squared_deviation", ADD, DEVIATION),
}


# ---- modes made of others


def _no_zeros(x: Array, axes: Axes, keepdims: bool, dtype: DType | None, _: float) -> Array:
    return COMBINED["mul"].reference(np.where(x == 0, np.ones_like(x), x), axes, keepdims, dtype)


def _expand_no_zeros(write: Any, reduce: Any, x: Any, axes: Axes, keepdims: bool, dtype: Any, _: float) -> Any:
    factor = write("binary_select", "factor", x, 1, write("cmp_neq", "not zero", x, 0))
    return reduce("", factor, "mul", keepdims, dtype=dtype)


def _truth(name: str, function: Callable[..., Any], is_found: str, is_true: str) -> Composed:
    """Returns a mode that asks whether any element is true, or is false: by the maximum of 0 and 1, 0 for none."""

    def expand(write: Any, reduce: Any, x: Any, axes: Axes, keepdims: bool, *_: Any) -> Any:
        number = write("identity", "number", write(is_found, "found", x, 0), dtype=int32)
        most = reduce("most", number, "max" if all(x.shape[d] for d in axes) else "add", keepdims)
        return write(is_true, "", most, 0)

    def reference(x: Array, axes: Axes, keepdims: bool, *_: Any) -> Array:
        return np.asarray(function(x != 0, axis=axes, keepdims=keepdims))

    return Composed(name, reference, expand, truth=True)


def _position(name: str, function: Callable[..., Any], extreme: str) -> Composed:
    """Returns a mode for the position of the first element that equals the extreme; NaN counts as the extreme."""

    def expand(write: Any, reduce: Any, x: Any, axes: Axes, keepdims: bool, dtype: Any, _: float) -> Any:
        equal = write("cmp_eq", "equal", x, reduce(extreme, x, extreme))
        if x.dtype.is_float:
            equal = write("logical_or", "or nan", equal, write("isnan", "nan", x))
        position, count = _positions(write, x, axes), prod(x.shape[d] for d in axes)
        first = reduce("first", write("binary_select", "candidate", position, count, equal), "min", keepdims)
        wanted = dtype or int64
        return first if first.dtype == wanted else write("identity", "", first, dtype=wanted)

    def reference(x: Array, axes: Axes, keepdims: bool, *_: Any) -> Array:
        return np.asarray(function(as_rows(x, axes), axis=-1)).reshape(reduced_shape(x.shape, axes, keepdims))

    return Composed(name, reference, expand, position=True)


def _positions(write: Any, x: Any, axes: Axes) -> Any:
    """Returns each element's position along axes, in row-major order."""
    position = None
    large = prod(x.shape[d] for d in axes) > int32.max
    for d in axes:
        own = write("gen_index", f"index {d}", x, axis=d)
        own = write("identity", f"wide {d}", own, dtype=int64) if large else own
        if position is not None:
            own = write("add", f"position {d}", write("mul", f"row {d}", position, x.shape[d]), own)
        position = own
    return position


def _variance(x: Array, axes: Axes, keepdims: bool, _: DType | None, correction: float) -> Array:
    centred = x - x.mean(axis=axes, keepdims=True)
    total = (centred * centred).sum(axis=axes, keepdims=keepdims)
    return np.asarray(total / np.float64(max(prod(x.shape[d] for d in axes) - correction, 0.0)))


def _expand_variance(write: Any, reduce: Any, x: Any, axes: Axes, keepdims: bool, _: Any, correction: float) -> Any:
    centred = write("sub", "centred", x, reduce("mean", x, "avg"))
    total = reduce("total", write("mul", "square", centred, centred), "add", keepdims)
    return write("div", "", total, as_number(max(prod(x.shape[d] for d in axes) - _whole(correction), 0)))


def as_number(count: float) -> float:
    """Returns a number of elements as a float, but a Size as it is, whose value is known when the graph runs."""
    return count if isinstance(count, Size) else float(count)


def _whole(number: float) -> float:
    """Returns a float as an integer if it is one: less an integer, a Size is still a Size."""
    return int(number) if number.is_integer() else number


COMPOSED = {
    mode.name: mode
    for mode in (
        Composed("mul_no_zeros", _no_zeros, _expand_no_zeros, cudnn=True),
        _truth("any", np.any, "cmp_neq", "cmp_gt"),
        _truth("all", np.all, "cmp_eq", "cmp_eq"),
        _position("argmin", np.argmin, "min"),
        _position("argmax", np.argmax, "max"),
        Composed("var", _variance, _expand_variance, floats=True, corrects=True),
    )
}
#: Every mode of `reduction`.
MODES: dict[str, Mode] = {**COMBINED, **COMPOSED}
