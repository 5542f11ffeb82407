"""Drawing a token from logits: the likeliest, or any by its probability, among the k likeliest or in a nucleus.

Nothing is sorted.  What may be drawn are the elements that are not less than a threshold: the largest number for which
these are enough, counted (the k likeliest) or by their probabilities (the nucleus).  The bits of a float, as an integer
in the same order, are found from the first to the last, a few of them each time the elements are read.  The token is
where the largest sum of a logit and a random number with Gumbel's distribution, times the temperature, is, which is
each token with its probability.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from fusegraph.dtypes import DType, as_dtype, bfloat16, float16, float32, int32, int64
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.operations import Operations
from fusegraph.ops.attributes import of_kind
from fusegraph.ops.base import Role
from fusegraph.tensor import Tensor
from fusegraph.values import Kind, integer, number

#: Bits of a threshold that are found each time the elements are read.
BITS = 2
#: The first bits of a float32 that numbers of a dtype have: the others are 0.
LEADING = {bfloat16: 16, float16: 20}
#: Less than any random number but 0, whose logarithm is infinite.
LEAST = 2.0**-25
#: The likeliest is taken at lower temperatures; at higher ones all are alike.
COLD, WARM = 2.0**-126, 2.0**100


def sample(
    self: Operations,
    logits: Tensor,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    seed: Any = 0,
    offset: Any = 0,
    dtype: Any = int64,
    *,
    name: str | None = None,
) -> Tensor:
    """Draws the position of an element along the last axis with probability softmax(logits / temperature).

    top_k leaves the k largest logits alone, and those that equal the last of them; top_p, of what is left, the fewest
    of the largest whose probabilities reach it, and those that equal the last of them.  A temperature of 0 takes the
    largest logit, the first of several.  Where there is NaN, the first of these is drawn.  temperature, top_k and top_p
    are numbers, or tensors that broadcast to logits with a last axis of 1; in tensors a temperature or top_p that is
    not positive leaves the largest logits, and a top_k below 1 is 1.  seed and offset are those of `rng_uniform`: the
    same ones give the same tokens.  The result has the shape of logits without the last axis, and dtype int32 or int64.

    Raises AttributeValueError, DTypeError (logits that are no floats), ShapeError (no elements to draw from, or tensors
    of other shapes).
    """
    if not logits.dtype.is_float:
        raise DTypeError(f"{logits.name!r} holds logits, which are floats, got {logits.dtype}")
    if not logits.rank or not logits.shape[-1]:
        raise ShapeError(f"{logits.name!r} {list(logits.shape)} has no elements to draw from")
    temperature = _given("temperature", number, temperature, logits, lambda x: 0 <= x < inf)
    if top_k is not None:
        top_k = _given("top_k", integer, top_k, logits, lambda x: 1 <= x <= int32.max)
    if top_p is not None:
        top_p = _given("top_p", number, top_p, logits, lambda x: 0 < x <= 1)
    heat: Any
    if isinstance(temperature, Tensor):
        given = self.cast(temperature, float32)
        heat = self.binary_select(self.min(given, WARM), 0.0, self.cmp_ge(given, COLD))
    elif temperature < COLD:
        return _largest(self, logits, as_dtype(dtype), name)
    else:
        heat = min(float(temperature), WARM)
    x = self.cast(logits, float32)
    key, bits, kept = _ordered(self, x), LEADING.get(_origin(self, logits), 32), None
    if top_k is not None:
        top_k = self.max(top_k, 1) if isinstance(top_k, Tensor) else top_k
        kept = self.cmp_ge(key, _threshold(self, key, lambda mask: self.cast(mask, int32), top_k, bits))
    if top_p is not None:
        most = self.reduction(x, mode="max", axes=-1)
        e = self.exp(self.div(self.sub(x, most), self.max(heat, COLD) if isinstance(heat, Tensor) else heat))
        e = e if kept is None else self.binary_select(e, 0.0, kept)
        # The largest element weighs 1: at least it is left.
        target = self.max(self.mul(self.reduction(e, mode="add", axes=-1), top_p), 0.5)
        nucleus = self.cmp_ge(key, _threshold(self, key, lambda mask: self.binary_select(e, 0.0, mask), target, bits))
        kept = nucleus if kept is None else self.logical_and(kept, nucleus)
    random = self.max(self.rng_uniform(x, seed, offset), LEAST)
    score = self.sub(x, self.mul(self.log(self.neg(self.log(random))), heat))
    score = score if kept is None else self.binary_select(score, float("-inf"), kept)
    return _largest(self, score, as_dtype(dtype), name)


def _given(key: str, kind: Kind, value: Any, logits: Tensor, holds: Callable[[Any], bool]) -> Any:
    """Returns a number of a kind, or a tensor as it is.

    Raises AttributeValueError for numbers out of range, ShapeError for a tensor that is not one number a row.
    """
    if isinstance(value, Tensor):
        rows = (*logits.shape[:-1], 1)
        if value.rank > logits.rank or any(n not in (row, 1) for n, row in zip(value.shape[::-1], rows[::-1])):
            raise ShapeError(
                f"sample: {key} {value.name!r} {list(value.shape)} does not broadcast to {list(rows)}, a number for "
                f"each row of {logits.name!r}"
            )
        return value
    found = of_kind(f"sample: {key}", kind, value)
    if not holds(found):
        raise AttributeValueError(f"sample: {key} cannot be {found!r}")
    return found


def _largest(graph: Operations, x: Tensor, dtype: DType, name: str | None) -> Tensor:
    found: Tensor = graph.reduction(x, mode="argmax", axes=-1, keepdims=False, dtype=dtype, name=name)
    return found


def _origin(graph: Operations, x: Tensor) -> DType:
    """Returns the dtype from which a tensor was cast last."""
    node = graph.producer(x)
    return node.inputs[0].dtype if node is not None and node.op.role is Role.CAST else x.dtype


def _ordered(graph: Operations, x: Tensor) -> Tensor:
    """Returns integers in the order of floats; those of -0 and 0 are equal, that of NaN is the largest."""
    bits = graph.bitcast(graph.add(x, 0.0), dtype=int32)
    key = graph.bitwise_xor(bits, graph.bitwise_and(graph.shift_right(bits, 31), int32.max))
    return graph.binary_select(int32.max, key, graph.cmp_neq(x, x))


def _threshold(graph: Operations, key: Tensor, weigh: Callable[[Tensor], Tensor], target: Any, bits: int) -> Tensor:
    """Returns the largest integer for which the elements that are not less weigh at least so much together.

    ``weigh`` returns what the elements of a mask weigh.  All integers are considered whose last 32 - ``bits`` are 0.
    """
    found = graph.constant(int32.min, dtype=int32)
    for shift in range(32 - BITS, 31 - bits, -BITS):
        enough = []
        for digit in range(1, 1 << BITS):
            mask = graph.cmp_ge(key, graph.add(found, digit << shift))
            weight = graph.reduction(weigh(mask), mode="add", axes=-1)
            enough.append(graph.cast(graph.cmp_ge(weight, target), int32))
        for more in enough:  # one by one: their sum may be too large for an int32
            found = graph.add(found, graph.mul(more, 1 << shift))
    return found
