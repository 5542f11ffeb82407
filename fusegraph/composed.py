"""Functions written with ops of the table: selections, triangles, elements by index, binary search, einsum."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from typing import Any

from codegen.sizes import Size
from fusegraph.dtypes import DType, as_dtype, float32, float64, int32, int64, promote
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.layout import check_shape
from fusegraph.operations import Operations
from fusegraph.ops.reduction import normal_axes
from fusegraph.ops.reverse import Reverse, Rule
from fusegraph.ops.scatter import Reduction
from fusegraph.tensor import Tensor

#: float32 holds all integers up to this one.
EXACT = 1 << 24


def where(self: Operations, mask: Tensor, x: Any, y: Any, *, name: str | None = None) -> Tensor:
    """Returns x where mask is true (not 0), y elsewhere; all broadcast."""
    return self.binary_select(x, y, mask, name=name)


def arange(
    self: Operations, count: int, start: float = 0, step: float = 1, dtype: Any = int64, *, name: str | None = None
) -> Tensor:
    """Returns ``count`` numbers: start, start + step, ...  They are computed where they are used, and take no memory.

    For an integer dtype, start and step must be integers that it holds.  Raises AttributeValueError if they are not.
    """
    kind = as_dtype(dtype)
    for key, value in (("start", start), ("step", step)):
        if kind.is_int and not (kind.min <= value <= kind.max and (isinstance(value, Size) or value == int(value))):
            raise AttributeValueError(f"{key} is an integer that {kind} holds, got {value!r}")
    wide = kind if not kind.is_float else float64 if kind == float64 or count > EXACT else float32
    line = self.broadcast(self.constant(0, dtype=wide), check_shape([count]))
    if not count:
        return self.identity(line, dtype=kind, name=name)
    index = self.cast(self.gen_index(line, 0), wide)
    scaled = index if step == 1 else self.mul(index, step)
    return self.identity(scaled if start == 0 else self.add(scaled, start), dtype=kind, name=name)


# ---- triangles


def tril(self: Operations, x: Tensor, diagonal: int = 0, *, name: str | None = None) -> Tensor:
    """Returns x with 0 above a diagonal of its last two dimensions: 0 is the main one, positive ones are above it."""
    return _triangle(self, x, "cmp_le", diagonal, name)


def triu(self: Operations, x: Tensor, diagonal: int = 0, *, name: str | None = None) -> Tensor:
    """Returns x with 0 below a diagonal of its last two dimensions: 0 is the main one, positive ones are above it."""
    return _triangle(self, x, "cmp_ge", diagonal, name)


def _triangle(graph: Operations, x: Tensor, kept: str, diagonal: int, name: str | None) -> Tensor:
    if x.rank < 2:
        raise ShapeError(f"{x.name!r} {list(x.shape)} has no rows and columns")
    if 0 in x.shape:
        return x if name is None else graph.identity(x, name=name)
    limit = max(min(diagonal, x.shape[-1]), -x.shape[-2])
    offset = graph.sub(graph.gen_index(x, -1), graph.gen_index(x, -2))
    mask = getattr(graph, kept)(offset, limit)
    return graph.binary_select(x, graph.constant(0, dtype=x.dtype), mask, name=name)


# ---- elements by index


def one_hot(
    self: Operations,
    index: Tensor,
    depth: int,
    axis: int = -1,
    on: Any = 1,
    off: Any = 0,
    dtype: Any = None,
    *,
    name: str | None = None,
) -> Tensor:
    """Returns ``on`` at the positions in ``index``, ``off`` elsewhere, along a new axis of ``depth`` elements.

    index holds integers, of any shape; the result has its shape with the new axis inserted at ``axis``.  on and off are
    numbers, or tensors of one element; dtype is that of the result (default: index's).  An index out of range gives
    ``off`` everywhere.  Raises DTypeError (index not of integers), AttributeValueError (no such axis).
    """
    _check_integers(index)
    (axis,) = normal_axes(axis, index.rank + 1)
    kind = index.dtype if dtype is None else as_dtype(dtype)
    shape = [1] * (index.rank + 1)
    shape[axis] = depth
    positions = self.reshape(arange(self, depth, dtype=promote(index.dtype, int32)), shape)
    hit = self.cmp_eq(self.unsqueeze(index, axis), positions)
    on, off = (self.constant(v, dtype=kind) if isinstance(v, (bool, int, float)) else v for v in (on, off))
    return self.binary_select(on, off, hit, name=name)


def take_along_axis(self: Operations, x: Tensor, index: Tensor, axis: int = -1, *, name: str | None = None) -> Tensor:
    """Returns elements of x along an axis by index: for axis 1, [i, j, k] is x[i, index[i, j, k], k].

    That is NumPy's take_along_axis and torch's gather.  x has any dtype, index holds integers.  The result has index's
    shape, which has x's rank and, except along ``axis``, is no larger than x's.  Positions outside of the axis are
    clamped to its ends.  Raises DTypeError, ShapeError.
    """
    (axis,) = normal_axes(axis, x.rank)
    _check_integers(index)
    if index.rank != x.rank or any(a > b for d, (a, b) in enumerate(zip(index.shape, x.shape)) if d != axis):
        raise ShapeError(f"index {list(index.shape)} does not fit {list(x.shape)} along axis {axis}")
    if not index.size:
        return self.broadcast(self.constant(0, dtype=x.dtype), index.shape, name=name)
    position = _clamped(self, index, x.shape[axis], x.size)
    steps = [prod(x.shape[d + 1 :]) for d in range(x.rank)]
    position = self.mul(position, steps[axis])
    for d in range(x.rank):
        if d != axis and index.shape[d] > 1:
            own = self.cast(self.gen_index(index, d), position.dtype)
            position = self.add(position, self.mul(own, steps[d]))
    return self.gather(self.reshape(x, [-1]), position, name=name)


def searchsorted(
    self: Operations,
    sequence: Tensor,
    values: Tensor,
    right: bool = False,
    dtype: Any = int32,
    *,
    name: str | None = None,
) -> Tensor:
    """Counts, for each value, the elements of a sorted sequence that are less (``right``: less or equal).

    sequence has rows in ascending order along its last axis, NaN last: one row for all values, or as many as values
    have, (..., n) for values (..., m).  The result has the shape of values, and is int32 or int64; comparisons are in
    the promoted dtype.  NumPy's searchsorted gives the same, with side left or right.  For rows that are not sorted,
    the result is some number from 0 to n.  Raises ShapeError (other dimensions), DTypeError.
    """
    kind = as_dtype(dtype)
    if kind not in (int32, int64):
        raise DTypeError(f"positions are int32 or int64, not {kind}")
    shared = sequence.rank == 1
    if not sequence.rank or not (shared or sequence.shape[:-1] == values.shape[:-1]):
        raise ShapeError(f"rows of {list(sequence.shape)} are neither one nor those of values {list(values.shape)}")
    count = sequence.shape[-1]
    if not count or not values.size:
        return self.broadcast(self.constant(0, dtype=kind), values.shape, name=name)
    place = int64 if sequence.size > int32.max else int32
    position = self.broadcast(self.constant(0, dtype=place), values.shape)
    before: Any = -1  # the position in front of a row's first element
    if not shared:
        rows = self.cast(self.reshape(self.arange(prod(values.shape[:-1])), [*values.shape[:-1], 1]), place)
        before = self.sub(self.mul(rows, count), 1)
    flat = self.reshape(sequence, [-1])
    missing = self.isnan(values) if values.dtype.is_float else None
    first = step = 1 << (count.bit_length() - 1)
    while step:
        probe = self.add(position, step)
        element = self.gather(flat, self.add(probe, before))
        passed = self.cmp_le(element, values) if right else self.cmp_lt(element, values)
        if missing is not None:  # NaN is sorted behind all elements that are not NaN
            alike = self.isnan(element) if element.dtype.is_float and not right else None
            behind = missing if alike is None else self.logical_and(missing, self.logical_not(alike))
            passed = self.logical_or(passed, behind)
        # As many elements are left whichever side the first step takes: no later step goes beyond the end.
        position = self.binary_select(count - step + 1 if step == first else probe, position, passed)
        step //= 2
    return self.identity(position, dtype=kind, name=name)


def _check_integers(index: Tensor) -> None:
    if not index.dtype.is_int:
        raise DTypeError(f"index holds integers, {index.name!r} is {index.dtype}")


def _clamped(graph: Operations, index: Tensor, size: int, elements: int) -> Tensor:
    """Returns an index clamped to an axis of ``size``, in an integer type for positions among ``elements``.

    Raises ShapeError for an axis without elements.
    """
    if size == 0:
        raise ShapeError("an axis has no elements to take")
    wide = index if index.dtype.itemsize > 1 else graph.cast(index, int32)
    inside = graph.clamp(wide, 0, min(size - 1, int(wide.dtype.max)))
    return graph.cast(inside, int64 if elements > int32.max else int32)


def gather_nd(self: Operations, x: Tensor, index: Tensor, batch: int = 0, *, name: str | None = None) -> Tensor:
    """Returns slices x[b..., *index[b..., i..., :]], as ONNX's GatherND.

    x (B..., D1, ..., Dk, R...) of any dtype, index (B..., I..., k) of integers -> (B..., I..., R...).  The first
    ``batch`` dimensions, B..., are common to both; the last one of index has positions along the next k dimensions of
    x.  Positions outside of a dimension are clamped to its ends.  Raises DTypeError, ShapeError.
    """
    _check_integers(index)
    if index.rank < batch + 1 or index.shape[:batch] != x.shape[:batch]:
        raise ShapeError(f"x {list(x.shape)} and index {list(index.shape)} have not {batch} batch dimensions in common")
    count = index.shape[-1]
    sizes, rest = x.shape[batch : batch + count], x.shape[batch + count :]
    if len(sizes) != count:
        raise ShapeError(f"index has positions along {count} dimensions, x {list(x.shape)} has {x.rank - batch}")
    if not index.size or not x.size:
        shape = [*index.shape[:-1], *rest]
        return self.broadcast(self.constant(0, dtype=x.dtype), shape, name=name)
    position = linear_index(self, index, sizes)
    if batch:
        each = prod(sizes)
        for d in range(batch):
            own = self.cast(self.gen_index(position, d), position.dtype)
            position = self.add(position, self.mul(own, each * prod(x.shape[d + 1 : batch])))
    return self.gather(self.reshape(x, [-1, *rest]), position, name=name)


def linear_index(graph: Operations, index: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns row-major positions, from those along each dimension in the last axis of index; these are clamped."""
    total = None
    for d, size in enumerate(sizes):
        own = _clamped(graph, index[..., d], size, prod(sizes))
        total = own if total is None else graph.add(graph.mul(total, size), own)
    if total is None:
        raise ShapeError("index has positions along no dimension")
    return total


def scatter_nd(
    self: Operations,
    x: Tensor,
    index: Tensor,
    updates: Tensor,
    reduction: Reduction = "none",
    *,
    name: str | None = None,
) -> Tensor:
    """Returns x with slices replaced, or combined as `scatter` does, as ONNX's ScatterND.

    x (D1, ..., Dk, R...), index (I..., k) of integers, updates (I..., R...) of x's dtype -> as x.  The last dimension
    of index has positions along the first k dimensions of x.  Updates at a position outside of a dimension are left
    out.  Raises DTypeError, ShapeError, AttributeValueError.
    """
    _check_integers(index)
    if not index.rank or not 0 < index.shape[-1] <= x.rank:
        raise ShapeError(f"index {list(index.shape)} has no positions along the dimensions of {list(x.shape)}")
    count = index.shape[-1]
    rest = x.shape[count:]
    if updates.shape != (*index.shape[:-1], *rest):
        raise ShapeError(f"updates are {[*index.shape[:-1], *rest]}, got {list(updates.shape)}")
    if not x.size or not updates.size:
        return x if name is None else self.identity(x, name=name)
    places = position_inside(self, [index[..., d] for d in range(count)], x.shape[:count])
    rows, values = self.reshape(places, [-1, *(1 for _ in rest)]), self.reshape(updates, [-1, *rest])
    y = self.scatter(self.reshape(x, [-1, *rest]), rows, values, 0, reduction)
    return self.reshape(y, x.shape, name=name)


def position_inside(graph: Operations, positions: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Returns row-major positions, from those along each dimension, which broadcast; -1 where one is outside."""
    wide = int64 if prod(sizes) > int32.max or any(p.dtype.max > int32.max for p in positions) else int32
    total = inside = None
    for position, size in zip(positions, sizes):
        own = position if position.dtype == wide else graph.cast(position, wide)
        fits = graph.logical_and(graph.cmp_ge(own, 0), graph.cmp_lt(own, size))
        inside = fits if inside is None else graph.logical_and(inside, fits)
        total = own if total is None else graph.add(graph.mul(total, size), own)
    if total is None or inside is None:
        raise ShapeError("index has positions along no dimension")
    return graph.binary_select(total, -1, inside)


# ---- Einstein's convention


def einsum(self: Operations, equation: str, *operands: Tensor, name: str | None = None) -> Tensor:
    """Returns sums of products by Einstein's convention, as NumPy's einsum: "bij,bjk->bik" is a batched matmul.

    Operands are combined from left to right, each step a matrix product where something is summed.  "..." stands for
    dimensions that broadcast.  The result and all intermediate sums and products have the promoted dtype.  Raises
    AttributeValueError, ShapeError.
    """
    terms, output = _terms(equation, [x.rank for x in operands])
    dtype = reduce(promote, (x.dtype for x in operands))
    sizes: dict[str, int] = {}
    for x, term in zip(operands, terms):
        for letter, size in zip(term, x.shape):
            known = sizes.get(letter, 1)
            if size != known and 1 not in (size, known):
                raise ShapeError(f"einsum {equation!r}: {letter!r} has sizes {known} and {size}")
            sizes[letter] = size if known == 1 else known
    if unknown := [letter for letter in output if letter not in sizes]:
        raise AttributeValueError(f"einsum {equation!r}: {unknown[0]!r} of the result is in no operand")
    total: Tensor | None = None
    labels = ""
    for number, (x, term) in enumerate(zip(operands, terms)):
        later = {letter for other in terms[number + 1 :] for letter in other} | set(output)
        x, term = _diagonals(self, x, term)
        if not (x.dtype.is_float and dtype.is_float) and x.dtype != dtype:
            x = self.cast(x, dtype)
        if total is None:
            total, labels = _summed(self, x, term, later, dtype)
        else:
            right = _summed(self, x, term, later | set(labels), dtype)
            total, labels = _product(self, (total, labels), right, later, sizes, dtype)
    assert total is not None
    total, labels = _summed(self, total, labels, set(output), dtype)
    # Products have broadcast all sizes of 1 that another operand makes larger; the rest is broadcast here.
    moved = self.transpose(total, [labels.index(letter) for letter in output])
    shape = [sizes[letter] for letter in output]
    wide = moved if moved.shape == tuple(shape) else self.broadcast(moved, shape)
    return self.identity(wide, dtype=dtype, name=name)


def _terms(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Returns the letters of every operand's and of the result's dimensions; those of "..." are Greek capitals."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not all(re.fullmatch(r"[A-Za-z]*(\.\.\.[A-Za-z]*)?", term) for term in (*left.split(","), right)):
        raise AttributeValueError(f"einsum takes an equation as 'ij,jk->ik', got {equation[:100]!r}")
    given = left.split(",")
    if len(given) != len(ranks):
        raise AttributeValueError(f"einsum {equation[:100]!r} has {len(given)} operands, got {len(ranks)}")
    most = 0
    for term, rank in zip(given, ranks):
        dots = rank - len(term.replace("...", ""))
        if dots < 0 or (dots and "..." not in term):
            raise ShapeError(
                f"einsum {equation[:100]!r}: {term!r} is for another operand than one of {rank} dimensions"
            )
        most = max(most, dots)
    if most > 24:
        raise ShapeError(f"einsum {equation[:100]!r}: '...' stands for {most} dimensions; at most 24 are possible")
    ellipsis = "".join(chr(0x391 + d + (d > 16)) for d in range(most))

    def written(term: str, rank: int) -> str:
        return term.replace("...", ellipsis[most - (rank - len(term.replace("...", ""))) :])

    terms = [written(term, rank) for term, rank in zip(given, ranks)]
    if not arrow:
        counts = Counter(letter for term in terms for letter in term if letter not in ellipsis)
        return terms, ellipsis + "".join(sorted(letter for letter, n in counts.items() if n == 1))
    output = right.replace("...", ellipsis)
    if len(set(output)) < len(output):
        raise AttributeValueError(f"einsum {equation[:100]!r}: the result has a letter twice")
    return terms, output


def _diagonals(graph: Operations, x: Tensor, term: str) -> tuple[Tensor, str]:
    """Replaces two dimensions of one letter by their diagonal: every (n + 1)-th of their n * n elements."""
    while len(set(term)) < len(term):
        letter = next(c for c in term if term.count(c) > 1)
        first, second = (d for d, c in enumerate(term) if c == letter and term[:d].count(letter) < 2)
        n = x.shape[first]
        if x.shape[second] != n:
            raise ShapeError(f"einsum: dimensions {first} and {second} of {x.name!r} {list(x.shape)} share a letter")
        rest = [d for d in range(x.rank) if d not in (first, second)]
        both = graph.reshape(graph.transpose(x, [*rest, first, second]), [*(x.shape[d] for d in rest), n * n])
        x = both[..., :: n + 1]
        term = "".join(term[d] for d in rest) + letter
    return x, term


def _summed(graph: Operations, x: Tensor, term: str, needed: set[str], dtype: DType) -> tuple[Tensor, str]:
    """Sums the dimensions that nothing needs, in a dtype; returns the sums and the letters that are left."""
    axes = [d for d, letter in enumerate(term) if letter not in needed]
    if not axes:
        return x, term
    return graph.reduction(x, "add", axes, keepdims=False, dtype=dtype), "".join(c for c in term if c in needed)


def _product(
    graph: Operations,
    left: tuple[Tensor, str],
    right: tuple[Tensor, str],
    needed: set[str],
    sizes: dict[str, int],
    dtype: DType,
) -> tuple[Tensor, str]:
    """Returns the product of two operands in a dtype, summed over the letters of both that nothing needs later."""
    (a, first), (b, second) = left, right
    common = [c for c in first if c in second]
    summed = [c for c in common if c not in needed]
    batch = [c for c in common if c in needed]
    rows, columns = ([c for c in term if c not in common] for term in (first, second))

    def laid_out(x: Tensor, term: str, order: Sequence[str]) -> Tensor:
        moved = graph.transpose(x, [term.index(c) for c in order if c in term])
        return graph.reshape(moved, [x.shape[term.index(c)] if c in term else 1 for c in order])

    if not summed:
        order = [*batch, *rows, *columns]
        factor = laid_out(a, first, order)
        if dtype not in (a.dtype, b.dtype):
            factor = graph.cast(factor, dtype)
        return graph.mul(factor, laid_out(b, second, order)), "".join(order)

    def matrix(x: Tensor, term: str, inner: Sequence[str], outer: Sequence[str]) -> Tensor:
        full = laid_out(x, term, [*batch, *inner, *outer])
        whole = [*full.shape[: len(batch)], *(sizes[c] for c in (*inner, *outer))]
        full = full if full.shape == tuple(whole) else graph.broadcast(full, whole)
        shape = [*whole[: len(batch)], prod(sizes[c] for c in inner), prod(sizes[c] for c in outer)]
        return graph.reshape(full, shape)

    y = graph.matmul(matrix(a, first, rows, summed), matrix(b, second, summed, columns), dtype=dtype)
    shape = [*y.shape[: len(batch)], *(sizes[c] for c in (*rows, *columns))]
    return graph.reshape(y, shape), "".join([*batch, *rows, *columns])


def _by_taken_along_axis(at: Reverse, x: Tensor, index: Tensor, axis: int = -1) -> Tensor:
    """The gradient along the axis itself, instead of along all elements in one line."""
    zeros = at.graph.broadcast(at.graph.constant(0, dtype=at.loss.dtype), x.shape)
    places = _clamped(at.graph, index, x.shape[axis], x.size) if index.size else index
    found: Tensor = at.graph.scatter(zeros, places, at.loss, axis, "add")
    return found


#: Function -> its gradient, where there is a better one than that of its nodes.
GRADIENTS: dict[str, Rule] = {"take_along_axis": _by_taken_along_axis}
FUNCTIONS: tuple[Callable[..., Any], ...] = (
    where, arange, tril, triu, one_hot, take_along_axis, searchsorted, gather_nd, scatter_nd, einsum
)  # fmt: skip
