"""2:4 structured sparsity: of every four neighbours along the last axis two are kept.

That is what sparse tensor cores take: half of the elements, the values, and the place of each in its four, the
metadata (Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np

from fusegraph.dtypes import bool_, float32, float64, int32, uint2, uint8
from fusegraph.errors import DTypeError, ShapeError
from fusegraph.ops.base import Array, Attributes, Kind, Op, Role, TensorType, Types, register
from fusegraph.ops.composite import Writing
from fusegraph.ops.reverse import Reverse, flat

#: Neighbours of which some are kept, and how many are.
FOUR, KEPT = 4, 2


# ---- shapes and dtypes


def _checked(name: str, x: TensorType, unit: int) -> None:
    """Raises DTypeError or ShapeError unless a tensor holds whole groups of ``unit`` elements that can be kept."""
    if not x.dtype.is_float and (x.dtype.is_bool or x.dtype.bits > 8):
        raise DTypeError(f"{name} takes floats and integers of 8 bits, got {x.dtype}")
    if x.dtype.is_packed:
        raise DTypeError(f"{name} does not take {x.dtype}, which is for storage; cast to float16 or int8")
    if not x.shape or x.shape[-1] % unit:
        last = f"{x.shape[-1]} elements" if x.shape else "no axis"
        what = "fours" if unit == FOUR else "pairs"
        raise ShapeError(f"{name} is of whole {what}: the last axis has a multiple of {unit} elements, got {last}")


def _normalize_dense(name: str) -> Callable[[Types, Attributes], dict[str, Any]]:
    def normalize(types: Types, attributes: Attributes) -> dict[str, Any]:
        _checked(name, types[0], FOUR)
        return dict(attributes)

    return normalize


def _normalize(types: Types, attributes: Attributes) -> dict[str, Any]:
    if len(types) == 1:
        return _normalize_dense("sparse_2_4")(types, attributes)
    values, metadata = types
    _checked("sparse_2_4 with metadata", values, KEPT)
    if not metadata.dtype.is_int:
        raise DTypeError(f"metadata are places in a four, integers from 0 to 3, got {metadata.dtype}")
    if metadata.shape != values.shape:
        raise ShapeError(f"metadata {list(metadata.shape)} has not one place for each of the values {values.shape}")
    return dict(attributes)


def _infer(types: Types, _: Attributes) -> TensorType:
    values = types[0]
    return values if len(types) == 1 else TensorType((*values.shape[:-1], values.shape[-1] * 2), values.dtype)


def _infer_halves(types: Types, _: Attributes) -> Types:
    half = (*types[0].shape[:-1], types[0].shape[-1] // 2)
    return TensorType(half, types[0].dtype), TensorType(half, uint2)


# ---- meanings


def _mask_reference(x: Array) -> Array:
    magnitude = np.abs(x.astype(np.float64) if x.dtype.kind != "f" else x)
    fours = np.where(np.isnan(magnitude), inf, magnitude).reshape(*x.shape[:-1], x.shape[-1] // FOUR, FOUR)
    order = np.argsort(-fours, axis=-1, kind="stable")
    mask = np.zeros(fours.shape, np.bool_)
    np.put_along_axis(mask, order[..., :KEPT], True, axis=-1)
    return mask.reshape(x.shape)


def _reference(x: Array, metadata: Array | None = None) -> Array:
    if metadata is None:
        return np.asarray(np.where(_mask_reference(x), x, np.zeros((), x.dtype)))
    pairs = (*x.shape[:-1], x.shape[-1] // KEPT, KEPT)
    values, places = x.reshape(pairs), metadata.astype(np.int64).reshape(pairs)
    fours = np.zeros((*pairs[:-1], FOUR), x.dtype)
    for n in reversed(range(KEPT)):
        fours = np.where(places[..., n : n + 1] == np.arange(FOUR), values[..., n : n + 1], fours)
    return fours.reshape(*x.shape[:-1], x.shape[-1] * 2)


def _compress_reference(x: Array) -> tuple[Array, Array]:
    fours = (*x.shape[:-1], x.shape[-1] // FOUR, FOUR)
    mask, half = _mask_reference(x).reshape(fours), (*x.shape[:-1], x.shape[-1] // 2)
    places = np.argsort(~mask, axis=-1, kind="stable")[..., :KEPT]
    values = np.take_along_axis(x.reshape(fours), places, axis=-1)
    return values.reshape(half), places.astype(np.uint8).reshape(half)


# ---- what they are written as


def _part(write: Writing, name: str, x: Any, n: int) -> Any:
    """Writes the n-th elements along the last axis."""
    starts, stops = (*(0 for _ in x.shape[:-1]), n), (*x.shape[:-1], n + 1)
    return write("slice", f"{name} {n}", x, starts=starts, stops=stops)


def in_groups(write: Writing, name: str, x: Any, size: int) -> Any:
    """Writes the groups of so many neighbours along the last axis, which become an axis."""
    return write("reshape", name, x, shape=(*x.shape[:-1], x.shape[-1] // size, size))


def _magnitudes(write: Writing, x: Any) -> Any:
    """Writes what elements are compared by: magnitudes, where NaN counts as infinite."""
    wide = x if x.dtype in (float32, float64) else write("identity", "wide", x, dtype=float32)
    magnitude = write("abs", "magnitude", wide)
    return write("binary_select", "key", magnitude, inf, write("cmp_le", "number", magnitude, inf))


def _kept(write: Writing, fours: Any) -> Any:
    """Writes which elements of fours are kept: those that fewer than two others are to be preferred to.

    An element is preferred to a smaller one, and of two that are alike the first.
    """
    place = write("gen_index", "place", fours, axis=fours.rank - 1)
    own, better = _magnitudes(write, fours), []
    for n in range(FOUR):
        other = _magnitudes(write, _part(write, "element", fours, n))
        first = write("logical_and", "first", write("cmp_eq", "alike", other, own), write("cmp_gt", "behind", place, n))
        better.append(write("logical_or", f"better {n}", write("cmp_gt", "larger", other, own), first))
    # Whether none of them is, or one.
    none, one = write("logical_not", "none", better[0]), None
    for beats in better[1:]:
        not_this = write("logical_not", "not this", beats)
        more = write("logical_and", "still none", none, not_this)
        exactly = write("logical_and", "the first", none, beats)
        if one is None:  # of the first element alone
            one = write("logical_and", "only the first", better[0], not_this)
        else:
            one = write("logical_and", "still one", one, not_this)
        one, none = write("logical_or", "one", one, exactly), more
    return write("logical_or", "kept", none, one)


def _expand_mask(write: Writing, x: Any) -> Any:
    return write("reshape", "", _kept(write, in_groups(write, "fours", x, FOUR)), shape=x.shape)


def _expand(write: Writing, x: Any, metadata: Any = None) -> Any:
    if metadata is None:
        fours = in_groups(write, "fours", x, FOUR)
        pruned = write("binary_select", "pruned", fours, 0, _kept(write, fours))
        return write("reshape", "", pruned, shape=x.shape)
    values = in_groups(write, "pairs", x, KEPT)
    wide = write("identity", "wide places", metadata, dtype=int32)
    places = in_groups(write, "places", wide, KEPT)
    shape = (*values.shape[:-1], FOUR)
    like = write("broadcast", "fours", _part(write, "value", values, 0), shape=shape)
    place, result = write("gen_index", "place", like, axis=len(shape) - 1), 0
    for n in reversed(range(KEPT)):
        here = write("cmp_eq", f"here {n}", _part(write, "place", places, n), place)
        result = write("binary_select", f"with {n}", _part(write, "value", values, n), result, here)
    return write("reshape", "", result, shape=(*x.shape[:-1], x.shape[-1] * 2))


def _expand_compress(write: Writing, x: Any) -> tuple[Any, Any]:
    fours = in_groups(write, "fours", x, FOUR)
    kept = _kept(write, fours)
    keeps = [_part(write, "keeps", kept, n) for n in range(FOUR)]
    pairs = write("broadcast", "pairs", keeps[0], shape=(*fours.shape[:-1], KEPT))
    # The first that is kept, and the last.
    low = write("binary_select", "second", 1, 2, keeps[1])
    high = write("binary_select", "third", 2, 1, keeps[2])
    first = write("cmp_eq", "first", write("gen_index", "number", pairs, axis=fours.rank - 1), 0)
    inner = write("binary_select", "inner", low, high, first)
    outer = write("binary_select", "outer", 0, 3, first)
    ends = write("binary_select", "ends", keeps[0], keeps[FOUR - 1], first)
    places = write("binary_select", "places", outer, inner, ends)
    values = _part(write, "element", fours, FOUR - 1)
    for n in range(FOUR - 1):
        here = write("cmp_eq", f"is {n}", places, n)
        values = write("binary_select", f"at {n}", _part(write, "element", fours, n), values, here)
    half = (*x.shape[:-1], x.shape[-1] // 2)
    narrow = write("identity", "narrow", write("reshape", "metadata", places, shape=half), dtype=uint8)
    return write("reshape", "", values, shape=half), narrow


# ---- gradients


def _by_elements(at: Reverse, x: Any, metadata: Any = None) -> Any:
    """The loss where elements are kept; of values, that at their places."""
    g = at.graph
    if metadata is None:
        return g.binary_select(at.loss, 0, g.sparse_2_4_mask(x))

    def write(op: str | Op, part: str, *operands: Any, **attributes: Any) -> Any:
        return getattr(g, str(op))(*operands, **attributes)

    fours = in_groups(write, "", at.loss, FOUR)
    places = in_groups(write, "", g.cast(metadata, int32), KEPT)
    found = 0
    for n in range(FOUR):
        found = g.binary_select(_part(write, "", fours, n), found, g.cmp_eq(places, n))
    return g.reshape(found, x.shape), None


_DEFINED = """A four keeps its elements of the largest magnitude; of elements that are alike, the first.  NaN counts as
    infinite."""

register(
    Op(
        name="sparse_2_4",
        kind=Kind.COMPOSITE,
        role=Role.SPARSE,
        operands=("x", "metadata"),
        optional=1,
        integers=("metadata",),
        infer=_infer,
        normalize=_normalize,
        reference=_reference,
        expand=_expand,
        as_stored=True,
        gradient=_by_elements,
        doc=f"""x with two of every four neighbours along the last axis, the others being 0.  {_DEFINED}

        With metadata, x (..., K / 2) has only the two elements of each four that are kept, in order; metadata has
        the place from 0 to 3 of each, integers of any dtype, mostly uint2; those of a four ascend, which nothing
        checks: results are undefined for others.  The result is then (..., K), with zeros between.  x has floats or
        integers of 8 bits.  Raises ShapeError where the last axis has no whole fours, and for metadata of another shape
        than x; DTypeError.

        Products of 16-bit floats with such a parameter or constant run on the sparse tensor cores of Hopper, which
        leave out products with the zeros: NaN and infinity there do not make the sum NaN.""",
    )
)
register(
    Op(
        name="sparse_2_4_mask",
        kind=Kind.COMPOSITE,
        operands=("x",),
        infer=lambda types, _: TensorType(types[0].shape, bool_),
        normalize=_normalize_dense("sparse_2_4_mask"),
        reference=_mask_reference,
        expand=_expand_mask,
        as_stored=True,
        gradient=flat,
        doc=f"""Which elements sparse_2_4 keeps: true for two of every four neighbours along the last axis.  {_DEFINED}
        Raises ShapeError and DTypeError as sparse_2_4 does.""",
    )
)
register(
    Op(
        name="sparse_2_4_compress",
        kind=Kind.COMPOSITE,
        role=Role.SPARSE,
        operands=("x",),
        results=("values", "metadata"),
        infer=_infer_halves,
        normalize=_normalize_dense("sparse_2_4_compress"),
        reference=_compress_reference,
        expand=_expand_compress,
        as_stored=True,
        gradient="prune with sparse_2_4, whose gradient is that of the elements kept",
        doc="""(values, metadata) of what sparse_2_4 makes of x (..., K), as sparse_2_4 takes them: the two elements of
        each four that are kept, in order, (..., K / 2), and their places, of uint2.  Raises ShapeError and DTypeError
        as sparse_2_4 does.""",
    )
)
