"""Random numbers that depend on nothing but a seed, an offset and the element's position, and dropout.

They are Philox4x32-10's (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), as
``codegen/device/philox.cuh`` numbers them: element i of a tensor, in row-major order whatever its layout, takes word
i % 4 of those of counter (i / 4, offset) and key seed.  (Of tensors of 2^31 elements and more i counts within the last
dimensions whose sizes multiply to less, and the position before these is part of the counter.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from fusegraph.dtypes import int32
from fusegraph.errors import ShapeError
from fusegraph.ops.base import Array, Attributes, Cost, Kind, Op, TensorType, Types, register
from fusegraph.ops.composite import Writing, check_integers, composite
from fusegraph.ops.pointwise import accepted_kinds
from fusegraph.ops.reverse import Reverse, flat

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(counter: tuple[Array, ...], key: tuple[Array, Array]) -> tuple[Array, ...]:
    """Returns the four words of counters of four words and keys of two, all uint64 arrays of numbers below 2^32."""
    a, b, c, d = counter
    low, high = key
    for _ in range(10):
        first, second = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = (second >> _HALF) ^ b ^ low, second & _LOW, (first >> _HALF) ^ d ^ high, first & _LOW
        low, high = (low + _WEYL[0]) & _LOW, (high + _WEYL[1]) & _LOW
    return a, b, c, d


def inner_dims(shape: tuple[int, ...]) -> int:
    """Returns how many of the last dimensions are counted by an element's number: as many as fit an int32."""
    count = 0
    while count < len(shape) and prod(shape[len(shape) - count - 1 :]) <= int32.max:
        count += 1
    return count


def _words(shape: tuple[int, ...], seed: Array, offset: Array) -> tuple[Array, tuple[Array, ...]]:
    """Returns (each element's position among the four words of its counter, these four words) for a tensor."""
    inner = prod(shape[len(shape) - inner_dims(shape) :])
    position = np.arange(prod(shape), dtype=np.uint64).reshape(shape)
    element, above = position % np.uint64(inner or 1), position // np.uint64(inner or 1)
    key, more = (np.broadcast_to(np.asarray(n).astype(np.int64).astype(np.uint64), shape) for n in (seed, offset))
    counter = (element >> np.uint64(2), above, more & _LOW, more >> _HALF)
    return element & np.uint64(3), philox(counter, (key & _LOW, key >> _HALF))


def _fraction(word: Array) -> Array:
    return np.asarray((word >> np.uint64(8)).astype(np.float64) * 2.0**-24)


def uniform(x: Array, seed: Array, offset: Array, **_: Any) -> Array:
    place, four = _words(x.shape, seed, offset)
    return _fraction(np.choose(place.astype(np.intp), four))


def _pair(x: Array, seed: Array, offset: Array) -> tuple[Array, Array, Array]:
    """Returns (which of its pair an element is, the radius, the angle) of Box and Muller's method."""
    place, four = _words(x.shape, seed, offset)
    second = place >= 2
    first = _fraction(np.where(second, four[2], four[0])) + 2.0**-24
    angle = 2 * math.pi * _fraction(np.where(second, four[3], four[1]))
    return place & np.uint64(1), np.sqrt(-2 * np.log(first)), angle


def normal(x: Array, seed: Array, offset: Array, **_: Any) -> Array:
    odd, radius, angle = _pair(x, seed, offset)
    return np.asarray(radius * np.where(odd == 1, np.sin(angle), np.cos(angle)))


def _radius(x: Array, seed: Array, offset: Array, **_: Any) -> Array:
    # Close to an angle of a multiple of pi / 2 the rounding of a double's angle shows, as a part of the radius.
    return np.asarray(_pair(x, seed, offset)[1])


def _random(name: str, reference: Callable[..., Array], doc: str, **rest: Any) -> None:
    """Registers an op of random numbers."""

    def normalize(types: Types, values: Attributes) -> dict[str, Any]:
        accepted_kinds(name, types[0].dtype, ("float",))
        check_integers(op, types)
        accepted_kinds(name, values["dtype"] or types[0].dtype, ("float",))
        return dict(values)

    def infer(types: Types, values: Attributes) -> TensorType:
        shape = types[0].shape
        if any(n > int32.max for n in shape):
            raise ShapeError(f"a dimension of {list(shape)} is too long for an int32 index")
        return TensorType(shape, values["dtype"] or types[0].dtype)

    op = register(
        Op(
            name=name,
            kind=Kind.POINTWISE,
            cost=Cost.FUNCTION,
            operands=("x", "seed", "offset"),
            shapes=("x",),
            integers=("seed", "offset"),
            attributes={"dtype": None},
            normalize=normalize,
            infer=infer,
            reference=reference,
            random=True,
            gradient=flat,
            doc=doc,
            **rest,
        )
    )


_random(
    "rng_uniform",
    uniform,
    """Random numbers, multiples of 2^-24 uniform in [0, 1), by Philox4x32-10; x gives the shape and the dtype.

    seed and offset are integers, or tensors of one, so that a graph built once can be run with others.  The same ones
    give the same numbers on every engine, whatever x's layout and what the kernel does besides.""",
    cuda={"float": "philox::uniform<{compute}>({element}, {above}, {seed}, {offset})"},
    ulps=0,
)
_random(
    "rng_normal",
    normal,
    """Random numbers with the normal distribution of mean 0 and variance 1, by Box and Muller's method from the words
    of rng_uniform.  The same seed and offset give the same numbers, but for the last digits of sine and logarithm.""",
    cuda={"float": "philox::normal<{compute}>({element}, {above}, {seed}, {offset})"},
    ulps=6,
    scale=_radius,
)


# ---- dropout


def threshold(probability: float) -> float:
    """Returns the probability, rounded up to a multiple of 2^-24, as the random numbers are."""
    return math.ceil(probability * 2.0**24) * 2.0**-24


def kept_scale(probability: float) -> float:
    """Returns the factor of the elements that dropout keeps."""
    return 1 / (1 - probability) if probability < 1 else 0.0


def kept(write: Writing, p: Any, seed: Any, offset: Any, probability: float) -> Any:
    """Writes which of the probabilities, or of anything counted as they are, dropout keeps."""
    random = write("rng_uniform", "random", p, seed, offset)
    return write("cmp_ge", "keep", random, threshold(probability))


def drop(write: Writing, x: Any, keep: Any, probability: float, part: str = "dropped") -> Any:
    """Writes what dropout makes of probabilities, or of their gradients."""
    return write("binary_select", part, write("mul", f"{part} kept", x, kept_scale(probability)), 0.0, keep)


def _dropout_reference(x: Array, seed: Array, offset: Array, probability: float) -> Array:
    keep = uniform(x, seed, offset) >= threshold(probability)
    return np.where(keep, x * kept_scale(probability), 0.0)


def _dropout(write: Writing, x: Any, seed: Any, offset: Any, probability: float) -> Any:
    keep = write("cmp_ge", "keep", write("rng_uniform", "random", x, seed, offset), threshold(probability))
    return write("binary_select", "", write("mul", "scaled", x, kept_scale(probability)), 0.0, keep)


def _by_dropout(at: Reverse, x: Any, seed: Any, offset: Any, probability: float) -> Any:
    return at.graph.dropout_backward(at.loss, seed, offset, probability)


def _register_dropout(name: str, operand: str, doc: str) -> None:
    operands, attributes, integers = (operand, "seed", "offset"), {"probability": 0.5}, ("seed", "offset")
    composite(name, operands, attributes, _dropout_reference, _dropout, doc, integers=integers, gradient=_by_dropout)


_register_dropout(
    "dropout",
    "x",
    """x / (1 - probability) where the element of rng_uniform(x, seed, offset) is at least probability, else 0 (also for
    an x that is infinite or NaN).  Give every dropout of a run another seed or offset.""",
)
_register_dropout(
    "dropout_backward",
    "loss",
    """The gradient of dropout with that seed, offset and probability: the mask is computed again, not kept.""",
)
