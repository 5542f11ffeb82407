"""Gradients by reverse mode: each node's by the rule of its op, written with ops of the table (`ops.reverse`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fusegraph.dtypes import float64
from fusegraph.errors import DTypeError, GradientError, GraphError, ShapeError, shown
from fusegraph.operations import Operations
from fusegraph.ops import TABLE
from fusegraph.ops.base import Op, Role
from fusegraph.ops.evaluate import compute_dtype
from fusegraph.tensor import Node, Tensor
from fusegraph.values import MOST_ENTRIES

#: Tensor -> the gradient of the loss by it, as far as it is known.
Gradients = dict[Tensor, Tensor]


def gradients(self: Operations, loss: Tensor, wrt: Tensor | Sequence[Tensor], seed: Any = None) -> list[Tensor]:
    """Adds the gradients of a loss to the graph, and returns them: one for each tensor of ``wrt``, of its type.

    loss is a tensor of floats of one element.  Any other needs a seed: a tensor or array of its shape, or a number, by
    which its elements are weighted.  wrt holds tensors of floats, inputs of the graph or not.  The gradient by a tensor
    is zeros if the loss does not depend on it, or only in jumps (by rounding, comparisons, positions).  Gradients are
    tensors like others, named "d x": fused with what is around them, and differentiable as far as their ops are.

    Gradients have the tensor's dtype, and losses of products that of the operands where it has 16 bits.  Raises
    GradientError (an op without a gradient), ShapeError (no seed, or one of another shape), DTypeError (no floats),
    GraphError (tensors of another graph).
    """
    try:
        wrt = [wrt] if isinstance(wrt, Tensor) else list(islice(iter(wrt), MOST_ENTRIES + 1))
    except Exception:  # Python asks an object for its elements
        raise GraphError(f"gradients: wrt is a tensor or several, got {shown(wrt)}") from None
    if len(wrt) > MOST_ENTRIES:
        raise GraphError(f"gradients: wrt has more than {MOST_ENTRIES} tensors")
    for tensor in wrt:
        self._own(tensor, "gradients, wrt")
        if not tensor.dtype.is_float:
            raise DTypeError(f"gradients: {tensor.name!r} is {tensor.dtype}; gradients are by tensors of floats")
    known = {loss: _seed(self, loss, seed)}
    self.losses.append(loss)
    taken = set(self.tensors.values())
    found = propagated(self, self.nodes, known, wrt)
    result = []
    for tensor in wrt:
        gradient = found.get(tensor)
        if gradient is None:
            gradient = self.broadcast(self.constant(0, dtype=tensor.dtype), tensor.shape)
        if gradient in taken:
            gradient = self.identity(gradient)
        self._rename(gradient, self._unique(f"d {tensor.name[:180]}"))
        self._automatic.add(gradient)
        taken.add(gradient)
        result.append(gradient)
    return result


def _seed(graph: Operations, loss: Tensor, seed: Any) -> Tensor:
    """Returns the gradient of the loss by itself."""
    if not loss.dtype.is_float:
        raise DTypeError(f"gradients: the loss {loss.name!r} is {loss.dtype}; a loss is of floats")
    if seed is None:
        if loss.size != 1:
            raise ShapeError(
                f"gradients: the loss {loss.name!r} {list(loss.shape)} is not one number; sum it up, or give a seed of "
                "its shape"
            )
        seed = 1.0
    given = seed if isinstance(seed, Tensor) else graph.constant(seed, dtype=loss.dtype)
    graph._own(given, "gradients, seed")
    if given.rank and given.shape != loss.shape:
        raise ShapeError(f"gradients: the seed is {list(given.shape)}, the loss {loss.name!r} {list(loss.shape)}")
    return _fitting(graph, given, loss)


def propagated(graph: Operations, nodes: Sequence[Node], known: Gradients, wrt: Iterable[Tensor]) -> Gradients:
    """Returns the gradients by tensors, from those by results of nodes, which are in order.

    Raises GradientError where one would pass an op that has none.
    """
    depends = set(wrt)
    for node in nodes:
        if not depends.isdisjoint(node.values):
            depends.update(t for t in node.outputs if t.dtype.is_float)
    found = {t: gradient for t, gradient in known.items() if t in depends}
    cuts: dict[Tensor, list[Node]] = {}  # the slices of a tensor, whose gradients are written together

    def add(x: Tensor, gradient: Tensor) -> None:
        fit = _fitting(graph, gradient, x)
        found[x] = graph.add(found[x], fit) if x in found else fit

    def join(x: Tensor) -> None:
        for gradient in _joined(graph, x, cuts.pop(x, []), found):
            add(x, gradient)

    for node in reversed(nodes):
        for tensor in node.outputs:
            join(tensor)
        if all(t not in found for t in node.outputs) or depends.isdisjoint(node.values):
            continue
        if node.op.role is Role.SLICE:
            cuts.setdefault(node.inputs[0], []).append(node)
            continue
        for x, gradient in _by_operands(graph, node, found, depends):
            add(x, gradient)
    for tensor in list(cuts):
        join(tensor)
    return found


def _joined(graph: Operations, x: Tensor, cuts: Sequence[Node], found: Gradients) -> Iterator[Tensor]:
    """Yields the gradients by a tensor of its slices: one concatenation if they are parts along an axis."""
    axis = _axis_of_parts(x, cuts)
    if axis is None:
        for node in cuts:
            yield from (gradient for _, gradient in _by_operands(graph, node, found, {x}))
        return
    parts, end = [], 0
    for node in sorted(cuts, key=lambda n: n.attributes["starts"][axis]):
        start = node.attributes["starts"][axis]
        parts += [_zeros(graph, x, axis, start - end)] if start > end else []
        parts.append(found[node.output])
        end = start + node.output.shape[axis]
    left = x.shape[axis] - end
    yield graph.concatenate([*parts, _zeros(graph, x, axis, left)] if left else parts, axis=axis)


def _axis_of_parts(x: Tensor, cuts: Sequence[Node]) -> int | None:
    """Returns the axis along which several slices are parts of a tensor that do not overlap; None if they are not."""
    places = [list(zip(n.attributes["starts"], n.attributes["steps"], n.output.shape)) for n in cuts]
    axes = {d for place in places for d, at in enumerate(place) if at != (0, 1, x.shape[d])}
    if len(cuts) < 2 or len(axes) != 1:
        return None
    (axis,) = axes
    ends = 0
    for start, step, count in sorted(place[axis] for place in places):
        if start < ends or step != 1:
            return None
        ends = start + count
    return axis


def _zeros(graph: Operations, x: Tensor, axis: int, count: int) -> Tensor:
    """Returns zeros of a tensor's shape but along an axis."""
    return graph.broadcast(graph.constant(0, dtype=x.dtype), [count if d == axis else n for d, n in enumerate(x.shape)])


@dataclass(frozen=True)
class _Passed:
    """A node with the gradients by its results: `ops.reverse.Reverse`."""

    graph: Any
    name: str
    results: tuple[Tensor, ...]
    losses: tuple[Tensor | None, ...]
    wanted: tuple[bool, ...]

    def wants(self, operand: int) -> bool:
        return self.wanted[operand]

    @property
    def y(self) -> Tensor:
        return self.results[0]

    @property
    def loss(self) -> Tensor:
        first, y = self.losses[0], self.y
        if first is not None:
            return first
        zeros: Tensor = self.graph.broadcast(self.graph.constant(0, dtype=y.dtype), y.shape)
        return zeros


def _by_operands(
    graph: Operations, node: Node, found: Gradients, depends: set[Tensor]
) -> Iterable[tuple[Tensor, Tensor]]:
    """Yields operands that depend on what gradients are asked by, and the gradients by them."""
    op, losses, operands = node.op, tuple(found.get(t) for t in node.outputs), node.inputs
    at = _Passed(graph, op.name, node.outputs, losses, tuple(x in depends for x in node.inputs))
    entries: Any = NotImplemented
    if (call := graph.calls.get(node.output)) is not None and call.gradient is not None:
        operands, entries = call.operands, call.gradient(at, *call.arguments, **call.keywords)
    elif callable(op.gradient) and not any(loss is not None for loss in losses[1:]):
        entries = op.gradient(at, *operands, **node.attributes)
    if entries is NotImplemented:
        entries = _through_what_it_is(graph, node, losses, depends)
    for x, entry in zip(operands, entries if isinstance(entries, tuple) else (entries,)):
        if x in depends and (gradient := entry() if callable(entry) else entry) is not None:
            yield x, gradient


def _through_what_it_is(
    graph: Operations, node: Node, losses: Sequence[Tensor | None], depends: set[Tensor]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients by a composite's operands through the nodes that it is written as, which are added."""
    op = node.op
    if isinstance(op.gradient, str) or op.expand is None or not op.is_composite(node.attributes):
        reason = op.gradient if isinstance(op.gradient, str) else "it has no rule for this"
        raise GradientError(
            f"gradients: there is none through {node.name!r}, which is {op.name}: {reason}; take gradients by tensors "
            "behind it, or write it with other ops"
        )
    operands = node.inputs
    if not op.as_stored:
        real = float64 if node.output.dtype == float64 else graph.compute_dtype
        wide = (compute_dtype(t.dtype, real) for t in operands)
        operands = tuple(t if t.dtype == d else graph.cast(t, d) for t, d in zip(operands, wide))
    written: list[Node] = []
    made = op.expand(_writer(graph, written), *operands, **node.attributes)
    known: Gradients = {}
    for tensor, loss in zip(made if isinstance(made, tuple) else (made,), losses):
        if loss is not None:
            fit = _fitting(graph, loss, tensor)
            known[tensor] = graph.add(known[tensor], fit) if tensor in known else fit
    wanted = [x for x, own in zip(operands, node.inputs) if own in depends]
    found = propagated(graph, written, known, wanted)
    return tuple(found.pop(x, None) for x in operands)  # a tensor that is several operands has one gradient


def _writer(graph: Operations, written: list[Node]) -> Callable[..., Tensor]:
    """Returns the function with which a composite writes its nodes."""

    def write(op: str | Op, _: str, *operands: Any, **attributes: Any) -> Tensor:
        found = op if isinstance(op, Op) else TABLE[op]
        node = graph.apply_node(found, operands, attributes)
        written.append(node)
        return node.output

    return write


def _fitting(graph: Operations, gradient: Tensor, x: Tensor) -> Tensor:
    """Returns a gradient in the type of x: summed up where broadcasting repeated x, or repeated, and cast."""
    ahead = gradient.rank - x.rank
    axes = [d for d, n in enumerate(gradient.shape) if d < ahead or (x.shape[d - ahead] == 1 and n != 1)]
    if axes:
        gradient = graph.reduction(gradient, "add", axes, dtype=x.dtype)
    if gradient.dtype != x.dtype:
        narrower = gradient.dtype.is_float and x.dtype.is_float and x.dtype.itemsize == 2
        gradient = (graph.narrow if narrower else graph.cast)(gradient, x.dtype)
    if gradient.shape != x.shape:
        repeat = ahead < 0 or any(n != m for n, m in zip(gradient.shape[max(ahead, 0) :], x.shape))
        gradient = graph.broadcast(gradient, x.shape) if repeat else graph.reshape(gradient, x.shape)
    return gradient
