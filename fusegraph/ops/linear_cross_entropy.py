"""``linear_cross_entropy`` and its gradients: a linear layer and the cross entropy of its results, the logits.

There may be far more logits than anything else in memory.  They are not kept: forward, the kernel of their product
leaves parts of the logarithms of the sums of their exponentials; backward, they are computed again, some columns at a
time.  (Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024; Hsu et al., "Liger Kernel", 2024.)
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from fusegraph.dtypes import DType, float32, float64, int32, promote
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.ops.base import Array, Attributes, Kind, Op, TensorType, Types, register
from fusegraph.ops.composite import Writing
from fusegraph.ops.contraction import PRECISIONS, operand_precision
from fusegraph.ops.reverse import Reverse

ATTRIBUTES = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean", "compute_dtype": None}
WORDS = {"reduction": ("mean", "sum", "none"), "compute_dtype": PRECISIONS}
#: Gradients by logits that are in memory at once: with the sums so far they are this share of all of them, but no fewer
#: columns than the last of `STEPS`, nor fewer bytes than `LEAST_BYTES` or the other share.
SHARE, LEAST_SHARE, LEAST_BYTES = 10, 32, 16 << 20
#: Columns are multiples of the first of these that they reach: with 11 rows of tiles, gradients by classes have whole
#: waves of tiles on 132 multiprocessors.
STEPS = (11 * 128, 128)
#: Programs that write the loss out take this op if their logits have as many bytes, as float32; fewer are no burden.
LEAST_LOGITS_BYTES = 32 << 20
#: Rows of these begin at multiples of so many elements, as tensor cores want them.
ROW = 64


def _wide(*types: TensorType) -> DType:
    """Returns the dtype of losses."""
    return float64 if any(t.dtype == float64 for t in types) else float32


def _normalize(types: Types, values: Attributes) -> dict[str, Any]:
    """Takes the types of x, w, target and, if there is one, bias."""
    smoothing = values["label_smoothing"]
    if not 0 <= smoothing <= 1:
        raise AttributeValueError(f"label_smoothing is between 0 and 1, got {smoothing!r}")
    return {
        **values,
        "label_smoothing": float(smoothing),
        "compute_dtype": operand_precision(types[:2], values["compute_dtype"]),
    }


def _check(types: Types) -> None:
    """Raises DTypeError or ShapeError unless types are those of x, w, target and bias."""
    x, w, target, *rest = types
    for key, t in zip(("x", "w", "bias"), (x, w, *rest)):
        if not t.dtype.is_float or t.dtype.itemsize == 1:
            raise DTypeError(f"{key} is of floats of 16 bits or more, got {t.dtype}")
    if not target.dtype.is_int:
        raise DTypeError(f"target holds integers, got {target.dtype}")
    if not x.shape or len(w.shape) != 2 or w.shape[1] != x.shape[-1]:
        raise ShapeError(f"x is [..., D] and w [V, D], got {list(x.shape)} and {list(w.shape)}")
    if w.shape[0] == 0:
        raise ShapeError("there are no classes")
    if target.shape != x.shape[:-1]:
        raise ShapeError(f"target has one class for each row of x, {list(x.shape[:-1])}, got {list(target.shape)}")
    if rest and rest[0].shape != w.shape[:1]:
        raise ShapeError(f"bias has one element for each class, {list(w.shape[:1])}, got {list(rest[0].shape)}")


# ---- forward


def _infer(types: Types, values: Attributes) -> Types:
    _check(types)
    wide = _wide(*types)
    rows = types[2].shape
    return TensorType(rows if values["reduction"] == "none" else (), wide), TensorType(rows, wide)


def _logits(x: Array, w: Array, bias: tuple[Array, ...]) -> Array:
    """Returns the logits of all rows of x, [rows, V]."""
    logits = x.reshape(-1, x.shape[-1]) @ w.T
    return np.asarray(logits + bias[0] if bias else logits)


def _targets(target: Array, classes: int, ignore_index: int, label_smoothing: float) -> tuple[Array, Array]:
    """Returns which rows count, [rows, 1], and the weight of each class in the loss of each row, [rows, V]."""
    flat = target.reshape(-1, 1)
    hit = flat == np.arange(classes)
    return flat != ignore_index, np.where(hit, 1 - label_smoothing, 0.0) + label_smoothing / classes


@np.errstate(all="ignore")
def _reference(
    x: Array, w: Array, target: Array, *bias: Array, ignore_index: int, label_smoothing: float, reduction: str, **_: Any
) -> tuple[Array, Array]:
    logits = _logits(x, w, bias)
    lse = np.logaddexp.reduce(logits, axis=1, keepdims=True)
    counts, weights = _targets(target, len(w), ignore_index, label_smoothing)
    losses = np.where(counts, lse - np.where(weights == 0, 0, weights * logits).sum(1, keepdims=True), 0)
    if reduction == "none":
        return losses.reshape(target.shape), lse.reshape(target.shape)
    total = losses.sum()
    return np.asarray(total / np.float64(counts.sum()) if reduction == "mean" else total), lse.reshape(target.shape)


class _Head:
    """Writes what the loss and its gradients have in common; tensors have a row for each row of x."""

    def __init__(
        self, write: Writing, x: Any, w: Any, target: Any, bias: tuple[Any, ...], attributes: Attributes
    ) -> None:
        self.write, self.w, self.attributes = write, w, attributes
        self.bias = bias[0] if bias else None
        self.wide = _wide(*(t.type for t in (x, w, *bias)))
        self.count, self.classes = prod(x.shape[:-1]), w.shape[0]
        self.x = write("reshape", "rows", x, shape=(self.count, x.shape[-1]))
        number = target if target.dtype == int32 else write("identity", "class", target, dtype=int32)
        number = write("reshape", "classes", number, shape=(self.count, 1))
        ignored = attributes["ignore_index"]
        self.counts = write("cmp_neq", "counts", number, ignored if int32.min <= ignored <= int32.max else -1)
        self.number = write("binary_select", "counted class", number, -1, self.counts)

    def widened(self, part: str, x: Any) -> Any:
        return x if x.dtype == self.wide else self.write("identity", part, x, dtype=self.wide)

    def sum(self, part: str, x: Any, axes: Any) -> Any:
        return self.write("reduction", part, x, mode="add", axes=axes, keepdims=True, dtype=self.wide)

    def product(self, part: str, a: Any, b: Any) -> Any:
        how = {"dtype": self.wide, "compute_dtype": self.attributes["compute_dtype"]}
        return self.write("matmul", part, a, b, **how)

    def turned(self, part: str, x: Any) -> Any:
        return self.write("transpose", part, x, perm=(1, 0))

    def columns(self, x: Any, part: str, first: int, stop: int) -> Any:
        """Returns elements of a tensor along its first dimension."""
        if stop - first == x.shape[0]:
            return x
        return self.write("slice", part, x, starts=(first, *[0] * (x.rank - 1)), stops=(stop, *x.shape[1:]))

    def logits(self, part: str, first: int, stop: int) -> tuple[Any, Any]:
        """Returns those of the classes from ``first`` to ``stop``, and their rows of w."""
        w = self.columns(self.w, f"w{part}", first, stop)
        logits = self.product(f"logits{part}", self.x, self.turned(f"w turned{part}", w))
        if self.bias is not None:
            bias = self.columns(self.bias, f"bias{part}", first, stop)
            logits = self.write("add", f"biased{part}", logits, self.widened(f"wide bias{part}", bias))
        return logits, w

    def total(self) -> Any:
        """Returns how many rows count."""
        return self.sum("rows that count", self.write("identity", "one", self.counts, dtype=self.wide), (0, 1))


def _expand(write: Writing, x: Any, w: Any, target: Any, *bias: Any, **attributes: Any) -> tuple[Any, Any]:
    head = _Head(write, x, w, target, bias, attributes)
    lse = write("reduction", "log sums", head.logits("", 0, head.classes)[0], mode="logaddexp", axes=1)
    smoothing = attributes["label_smoothing"]
    wide_x = head.widened("wide x", head.x)

    def dot(part: str, rows: Any, biases: Any) -> Any:
        products = write("mul", f"{part} products", wide_x, head.widened(f"wide {part}", rows))
        found = head.sum(part, products, 1)
        return found if biases is None else write("add", f"{part} biased", found, biases)

    own = write("reshape", "class of row", head.number, shape=(head.count,))
    added = None
    if head.bias is not None:
        added = write("reshape", "its bias", write("gather", "bias of row", head.bias, own), shape=(head.count, 1))
        added = head.widened("its wide bias", added)
    taken = dot("logit", write("gather", "w of row", w, own), added)
    if smoothing:
        added = None if head.bias is None else head.sum("sum of bias", head.widened("wide bias", head.bias), 0)
        every = dot("sum of logits", head.sum("sum of w", head.widened("wide w", w), 0), added)
        taken = write(
            "add",
            "smoothed",
            write("mul", "share of class", taken, 1 - smoothing),
            write("mul", "share of each", every, smoothing / head.classes),
        )
    losses = write("binary_select", "losses", write("sub", "surprise", lse, taken), 0.0, head.counts)
    lse = write("reshape", "logsumexp", lse, shape=target.shape)
    if attributes["reduction"] == "none":
        return write("reshape", "", losses, shape=target.shape), lse
    loss = head.sum("sum", losses, (0, 1))
    if attributes["reduction"] == "mean":
        loss = write("div", "mean", loss, head.total())
    return write("reshape", "", loss, shape=()), lse


def _gradient(at: Reverse, x: Any, w: Any, target: Any, *bias: Any, **attributes: Any) -> tuple[Any, ...]:
    """Returns the gradients by the loss; one by logsumexp goes through what the op is written as."""
    lse = at.results[1]
    dx, dw, *rest = at.graph.linear_cross_entropy_backward(at.loss, x, w, target, lse, *bias, **attributes)
    return dx, dw, None, *rest


_OPERANDS = """x [..., D] are rows of features, w [V, D] and bias [V] a linear layer, target [...] the class of each
        row, from 0 to V - 1, or ignore_index for rows that do not count."""

register(
    Op(
        name="linear_cross_entropy",
        kind=Kind.COMPOSITE,
        operands=("x", "w", "target", "bias"),
        infer=_infer,
        reference=_reference,
        attributes=ATTRIBUTES,
        words=WORDS,
        normalize=_normalize,
        multiplications=lambda types, _: prod(types[0].shape) * types[1].shape[0],
        expand=_expand,
        gradient=_gradient,
        results=("", "logsumexp"),
        optional=1,
        as_stored=True,
        weighs=True,
        integers=("target",),
        doc=f"""The cross entropy of the logits x w^T + bias, and the logsumexp of each row of these; the logits are not
        kept in memory.

        {_OPERANDS}
        The loss of a row is logsumexp(logits) - logits[target]; with label_smoothing, the second term is (1 -
        label_smoothing) * logits[target] + label_smoothing * mean(logits).  It is 0 where a row does not count.
        reduction: "mean" over the rows that count (NaN if there are none), "sum", or "none", which gives one for each
        row.  Both results are float32, or float64 if an operand is; logsumexp is what the gradients need.  The loss of
        a row whose target is out of range is that of some other class.  compute_dtype as in `matmul`.

        Raises ShapeError (other shapes; no classes), DTypeError (x, w or bias not floats of 16 bits or more, target not
        integers), AttributeValueError (label_smoothing not between 0 and 1).""",
    )
)


# ---- backward


def _infer_backward(types: Types, values: Attributes) -> Types:
    loss, x, w, target, lse, *bias = types
    _check((x, w, target, *bias))
    wanted = target.shape if values["reduction"] == "none" else ()
    for key, t, shape in (("loss", loss, wanted), ("logsumexp", lse, target.shape)):
        if not t.dtype.is_float:
            raise DTypeError(f"{key} is of floats, got {t.dtype}")
        if t.shape != shape:
            raise ShapeError(f"{key} is {list(shape)}, got {list(t.shape)}")
    return (x, w, *bias)


@np.errstate(all="ignore")
def _reference_backward(
    loss: Array,
    x: Array,
    w: Array,
    target: Array,
    lse: Array,
    *bias: Array,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    **_: Any,
) -> tuple[Array, ...]:
    counts, weights = _targets(target, len(w), ignore_index, label_smoothing)
    scale = loss.reshape(-1, 1)
    if reduction == "mean":
        scale = scale / np.float64(counts.sum()) if counts.any() else np.zeros_like(scale)
    by_logits = np.where(counts, np.exp(_logits(x, w, bias) - lse.reshape(-1, 1)) - weights, 0) * scale
    rows = x.reshape(-1, x.shape[-1])
    return (by_logits @ w).reshape(x.shape), by_logits.T @ rows, *(by_logits.sum(0) for _ in bias)


def columns_at_once(rows: int, depth: int, classes: int, itemsize: int) -> int:
    """Returns how many columns of gradients by logits are to be in memory at once."""
    whole = rows * classes * itemsize
    wanted = max(whole // SHARE - rows * depth * float32.itemsize, whole // LEAST_SHARE, LEAST_BYTES)
    if whole <= 2 * wanted:
        return classes
    columns = max(wanted // (rows * itemsize), STEPS[-1])
    return next(columns // step * step for step in STEPS if columns >= step)


def _expand_backward(
    write: Writing, loss: Any, x: Any, w: Any, target: Any, lse: Any, *bias: Any, **attributes: Any
) -> tuple[Any, ...]:
    head = _Head(write, x, w, target, bias, attributes)
    scale = head.widened("wide loss", loss)
    scale = write("reshape", "scale", scale, shape=(-1 if attributes["reduction"] == "none" else 1, 1))
    if attributes["reduction"] == "mean":
        total = head.total()
        mean = write("div", "scale of rows", scale, total)
        scale = write("binary_select", "scale if rows count", mean, 0.0, write("cmp_gt", "some count", total, 0.0))
    lse = write("reshape", "log sums", head.widened("wide log sums", lse), shape=(head.count, 1))
    common = promote(x.dtype, w.dtype)
    share = attributes["label_smoothing"] / head.classes
    on, off = (np.array(weight, head.wide.numpy) for weight in (1 - attributes["label_smoothing"] + share, share))

    def by_logits(part: str, logits: Any, first: int) -> Any:
        """Returns the gradients by logits, but for a scale that all rows share."""
        p = write("exp", f"probabilities{part}", write("sub", f"shifted{part}", logits, lse))
        column = write("broadcast", f"columns{part}", 0, shape=(1, logits.shape[1]))
        own = write("sub", f"class from {first}", head.number, first) if first else head.number
        hit = write("cmp_eq", f"hit{part}", write("gen_index", f"column{part}", column, axis=1), own)
        found = write("sub", f"by logits{part}", p, write("binary_select", f"weight{part}", on, off, hit))
        found = write("binary_select", f"counted{part}", found, 0.0, head.counts)
        return write("mul", f"scaled{part}", found, scale) if attributes["reduction"] == "none" else found

    def scaled(part: str, total: Any, like: Any) -> Any:
        if attributes["reduction"] != "none":
            total = write("mul", f"{part} scaled", total, scale)
        return total if total.dtype == like.dtype else write("narrow", part, total, dtype=like.dtype)

    size = columns_at_once(head.count, x.shape[-1], head.classes, common.itemsize)
    by_x, by_w, by_bias = None, [], []
    for first in range(0, head.classes, size):
        stop = min(first + size, head.classes)
        part = f" {first}" if size < head.classes else ""
        logits, own = head.logits(part, first, stop)
        exact = by_logits(part, logits, first)
        rounded = exact if exact.dtype == common else write("narrow", f"rounded{part}", exact, dtype=common)
        rounded.strides = (-(-rounded.shape[1] // ROW) * ROW, 1)
        product = head.product(f"by rows{part}", rounded, own)
        by_x = product if by_x is None else write("add", f"by x{part}", by_x, product)
        turned = head.turned(f"by logits turned{part}", rounded)
        by_w.append(scaled(f"by w{part}", head.product(f"by classes{part}", turned, head.x), w))
        if bias:
            total = write("reshape", f"by class{part}", head.sum(f"sums{part}", exact, 0), shape=(1, stop - first))
            own_bias = scaled(f"by bias{part}", total, bias[0])
            by_bias.append(write("reshape", f"of bias{part}", own_bias, shape=(stop - first,)))
    results = [write("reshape", "by x", scaled("by rows", by_x, x), shape=x.shape)]
    for part, found in (("dw", by_w), ("dbias", by_bias)):
        if found:
            results.append(found[0] if len(found) == 1 else write("concatenate", part, *found, axis=0))
    return tuple(results)


register(
    Op(
        name="linear_cross_entropy_backward",
        kind=Kind.COMPOSITE,
        operands=("loss", "x", "w", "target", "logsumexp", "bias"),
        infer=_infer_backward,
        reference=_reference_backward,
        attributes=ATTRIBUTES,
        words=WORDS,
        normalize=lambda types, values: _normalize(types[1:], values),
        multiplications=lambda types, _: 3 * prod(types[1].shape) * types[2].shape[0],
        expand=_expand_backward,
        gradient="second derivatives would need all logits in memory; write the loss with matmul and logsumexp",
        results=("", "dw", "dbias"),
        optional=1,
        as_stored=True,
        weighs=True,
        integers=("loss", "target", "logsumexp", "bias"),
        doc=f"""The gradients of linear_cross_entropy by x, w and, if it is given, bias; all logits are never in memory.

        {_OPERANDS}
        loss is the gradient by the loss, of its shape: one number, or one for each row with reduction "none".
        logsumexp is what the op gave for the same operands and attributes.  The results have the shapes and dtypes of
        x, w and bias.  Rows that do not count, and rows whose target is out of range as to their class, add nothing.

        The logits are computed again, in some columns at a time if there are many; their gradients, before a scale that
        all rows share, are rounded to the promoted dtype of x and w before they are multiplied.  Deterministic.
        Raises ShapeError, DTypeError and AttributeValueError, as linear_cross_entropy does.""",
    )
)
