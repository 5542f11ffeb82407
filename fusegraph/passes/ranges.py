"""What is known of tensors before a graph runs: of integers and bools their ranges, and how they follow from an
element's position; of floats whether they are one number.

Positions (`gen_index`), constants and sums of them are linear in the position; movement of what is linear is linear,
as addresses are.  A comparison of two such integers either always holds, or says on which side of a line a position is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from codegen import sizes
from codegen.combiners import ADD
from fusegraph.dtypes import DType
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.views import strides_over, view
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Op, Role, TensorType
from fusegraph.ops.convert import from_reference, to_reference
from fusegraph.ops.evaluate import evaluate
from fusegraph.ops.modes import MODES, Combined
from fusegraph.passes.known import EITHER, FALSE, TRUE, Known, Linear, constant, fitting, limits

#: The largest constant that is looked at.
MOST_ELEMENTS = 1 << 16
#: Movement whose result has no elements but those of its operand.
_PLAIN = (Role.TRANSPOSE, Role.BROADCAST, Role.RESHAPE, Role.SLICE)
#: Comparisons -> signs of the difference, and what is added, for every number that is not negative if they hold.
_COMPARED: Mapping[Role | None, tuple[tuple[int, int], ...]] = {
    Role.GE: ((1, 0),),
    Role.GT: ((1, -1),),
    Role.LE: ((-1, 0),),
    Role.LT: ((-1, -1),),
    Role.EQ: ((1, 0), (-1, 0)),
}


def ranges(graph: Graph) -> dict[Tensor, Known]:
    """Returns what is known of tensors that are not empty: of all integers and bools, and of floats of one number."""
    found: dict[Tensor, Known] = {}
    for tensor in graph.tensors.values():
        if graph.producer(tensor) is None and _counts(tensor):
            found[tensor] = _of_source(tensor)
        elif tensor.value is not None and (number := _repeated(tensor)) is not None:
            found[tensor] = number
    for node in graph.nodes:
        number = _of_numbers(node, found, graph.compute_dtype)
        for tensor in node.outputs:
            if _counts(tensor):
                known = _of_node(node, found) if number is None and len(node.outputs) == 1 else number
                found[tensor] = fitting(known, tensor)
            elif number is not None:
                found[tensor] = number
    return found


def _repeated(tensor: Tensor) -> Known | None:
    """Returns the number that a constant of floats consists of."""
    value = np.asarray(tensor.value).reshape(-1)
    if not tensor.dtype.is_float or not tensor.size or tensor.size > MOST_ELEMENTS or not (value == value[0]).all():
        return None
    return Known(float(value[0]), float(value[0]))


def _of_numbers(node: Node, found: Mapping[Tensor, Known], compute: DType) -> Known | None:
    """Returns what a node makes of operands that are one number each."""
    values = [found[t].value if t in found else None for t in node.inputs]
    varies = any(v is None or isinstance(v, sizes.Size) for v in values)
    if varies or len(node.outputs) > 1 or not node.output.size or not node.op.reads_values:
        return None
    if node.kind is Kind.MOVEMENT and len(values) == 1 and node.op.role in _PLAIN:
        return Known(values[0], values[0])
    if node.kind is not Kind.POINTWISE or node.op.random:
        return None
    types = tuple(TensorType((), t.dtype) for t in node.inputs)
    operands = [to_reference(np.array(v, t.dtype.numpy), t.dtype) for v, t in zip(values, node.inputs)]
    (result,) = evaluate(node.op, types, node.attributes, (node.output.dtype,), operands, compute)
    stored = from_reference(result, node.output.dtype).reshape(())
    number = float(stored) if node.output.dtype.is_float else int(stored)
    return Known(number, number) if number == number else None


def _counts(tensor: Tensor) -> bool:
    return (tensor.dtype.is_int or tensor.dtype.is_bool) and tensor.size > 0


def _of_source(tensor: Tensor) -> Known:
    if tensor.value is None or tensor.size > MOST_ELEMENTS:
        return fitting(None, tensor)
    value = np.asarray(tensor.value).reshape(tensor.shape).astype(object)
    start = int(value[(0,) * tensor.rank])
    ends = (tuple(int(d == n) for n in range(tensor.rank)) for d in range(tensor.rank))
    steps = tuple(int(value[end]) - start if size > 1 else 0 for end, size in zip(ends, tensor.shape))
    line = np.full(tensor.shape, start, object)
    for d, step in enumerate(steps):
        line += step * np.arange(tensor.shape[d]).reshape(-1, *[1] * (tensor.rank - d - 1))
    in_order = all(abs(step) <= 1 for step in steps) and bool((line == value).all())
    linear = Linear(start, steps) if in_order else None
    return fitting(Known(int(value.min()), int(value.max()), linear), tensor)


def _of_node(node: Node, found: Mapping[Tensor, Known]) -> Known | None:
    if node.kind is Kind.MOVEMENT:
        return _moved(node, found)
    if node.kind is Kind.POINTWISE:
        return _pointwise(node, found)
    x, scanned = found.get(node.inputs[0]), _SCANS.get(node.op)
    if scanned is not None:
        return None if x is None else scanned(node, x)
    return _reduced(node, x) if node.kind is Kind.REDUCTION and node.op.role is Role.REDUCE else None


# ---- movement


def _moved(node: Node, found: Mapping[Tensor, Known]) -> Known | None:
    role, shape = node.op.role, node.output.shape
    if any(t not in found for t in node.inputs):
        return None
    x, *others = (found[t] for t in node.inputs)
    if role is Role.CONCATENATE:
        least, most = min(k.least for k in (x, *others)), max(k.most for k in (x, *others))
        return Known(least, most, _joined(node, [x, *others]))
    if role is Role.GATHER:
        return Known(x.least, x.most, _gathered(node, x, others[0]))
    if role not in _PLAIN:
        return None

    def moved(linear: Linear) -> Linear | None:
        made = view(node, linear.steps)
        if made is None:
            return None
        return Linear(linear.start + made[1], tuple(s if n > 1 else 0 for s, n in zip(made[0], shape)))

    conditions = None if x.conditions is None else [moved(c) for c in x.conditions]
    known = None if conditions is None else tuple(c for c in conditions if c is not None)
    whole = known if known is not None and conditions is not None and len(known) == len(conditions) else None
    return Known(x.least, x.most, None if x.linear is None else moved(x.linear), whole)


def _joined(node: Node, parts: Sequence[Known]) -> Linear | None:
    """Returns the line on which all parts of a concatenation lie."""
    axis, lines = node.attributes["axis"], [k.linear for k in parts]
    axis %= node.output.rank
    lengths = [t.shape[axis] for t in node.inputs]
    starts = list(accumulate(lengths[:-1], initial=0))
    first = lines[0]
    if first is None:
        return None
    step = next((x.steps[axis] for x, n in zip(lines, lengths) if x is not None and n > 1), None)
    if step is None:
        step = lines[1].start - first.start if len(lines) > 1 and lines[1] is not None else 0
    for line, size, start in zip(lines, lengths, starts):
        if line is None or line.start != first.start + step * start or (size > 1 and line.steps[axis] != step):
            return None
        if any(a != b for d, (a, b) in enumerate(zip(line.steps, first.steps)) if d != axis):
            return None
    return Linear(first.start, tuple(step if d == axis else s for d, s in enumerate(first.steps)))


def _gathered(node: Node, x: Known, index: Known) -> Linear | None:
    axis = node.attributes["axis"] % node.inputs[0].rank
    if x.linear is None or not within(index, node.inputs[1].shape, node.inputs[0].shape[axis]):
        return None
    assert index.linear is not None
    step = x.linear.steps[axis]
    line = index.linear.times(step, x.linear.start)
    return Linear(line.start, (*x.linear.steps[:axis], *line.steps, *x.linear.steps[axis + 1 :]))


def within(index: Known, shape: Sequence[int], size: int) -> bool:
    """Tells whether integers of a shape that follow from the position are in [0, size)."""
    return index.linear is not None and index.least >= 0 <= index.linear.times(-1, size - 1).extremes(shape)[0]


# ---- sums along axes


def _summed(node: Node, x: Known) -> Known | None:
    """Returns what is known of the sums of all elements up to each."""
    axis, shape = node.attributes["axis"] % node.output.rank, node.output.shape
    size = shape[axis]
    if x.value is None:
        return Known(min(x.least, x.least * sizes.most(size)), max(x.most, x.most * sizes.most(size)))
    start, step = (size * x.value, -x.value) if node.attributes["reverse"] else (x.value, x.value)
    return Known(0, 0, Linear(start, tuple(step if d == axis and n > 1 else 0 for d, n in enumerate(shape))))


_SCANS: Mapping[Op, Callable[[Node, Known], Known | None]] = {TABLE["cumsum"]: _summed}


def _reduced(node: Node, x: Known | None) -> Known | None:
    mode = MODES[node.attributes["mode"]]
    count = node.inputs[0].size // node.output.size
    few, many = sizes.limits(count)
    if mode.position:
        return Known(0, max(0, many - 1))
    if x is None or not few:
        return None
    if mode.truth:
        return EITHER if x.truth is None else TRUE if x.truth else FALSE
    if not isinstance(mode, Combined) or mode.before is not None or mode.after is not None:
        return None
    if mode.selects:
        return Known(x.least, x.most)
    if mode.combiner is not ADD:
        return None
    return Known(min(x.least * few, x.least * many), max(x.most * few, x.most * many))


# ---- pointwise


def _pointwise(node: Node, found: Mapping[Tensor, Known]) -> Known | None:
    role, shape = node.op.role, node.output.shape
    if role is Role.INDEX:
        axis = node.attributes["axis"] % len(shape)
        return Known(0, 0, Linear(0, tuple(int(d == axis and n > 1) for d, n in enumerate(shape))))
    if role is Role.SIZE:
        return Known(0, 0, constant(node.attributes["number"], len(shape)))
    operands = [found.get(t) for t in node.inputs]
    if role is Role.SELECT and (choice := operands[2]) is not None and choice.truth is not None:
        chosen = 0 if choice.truth else 1
        known = operands[chosen]
        return None if known is None else _spread(known, node.inputs[chosen], shape)
    every = [_spread(k, t, shape) for k, t in zip(operands, node.inputs) if k is not None]
    if len(every) < len(operands) or not _wraps_nowhere(node, every):
        return None
    rule = _BY_ROLE.get(role) or _BY_OP.get(node.op)
    if rule is not None:
        return rule(node, every)
    return _compared(role, *every) if role in _COMPARED or role is Role.NE else None


def _wraps_nowhere(node: Node, known: Sequence[Known]) -> bool:
    """Tells whether operands keep their values where they are converted to their common dtype."""
    common = node.op.promoted(tuple(t.type for t in node.inputs))
    if not (common.is_int or common.is_bool):
        return False
    least, most = limits(common)
    keys = node.op.names(len(node.inputs))
    return common.is_bool or all(
        key in node.op.masks or (least <= k.least and k.most <= most) for key, k in zip(keys, known)
    )


def _spread(known: Known, tensor: Tensor, shape: Sequence[int]) -> Known:
    """Returns what is known of a tensor broadcast to a shape."""

    def over(linear: Linear) -> Linear:
        return Linear(linear.start, strides_over(tensor.shape, linear.steps, shape))

    return Known(
        known.least,
        known.most,
        None if known.linear is None else over(known.linear),
        None if known.conditions is None else tuple(map(over, known.conditions)),
    )


def _both(a: Known, b: Known, sign: int) -> Linear | None:
    return None if a.linear is None or b.linear is None else a.linear.plus(b.linear, sign)


def _sum(_: Node, x: Sequence[Known]) -> Known:
    a, b = x
    return Known(a.least + b.least, a.most + b.most, _both(a, b, 1))


def _difference(_: Node, x: Sequence[Known]) -> Known:
    a, b = x
    return Known(a.least - b.most, a.most - b.least, _both(a, b, -1))


def _product(_: Node, x: Sequence[Known]) -> Known:
    a, b = x
    ends = [m * n for m in (a.least, a.most) for n in (b.least, b.most)]
    lines = (k.linear.times(f.value) for k, f in ((a, b), (b, a)) if k.linear is not None and f.value is not None)
    return Known(min(ends), max(ends), next(lines, None))


def _extreme(least: Callable[..., int]) -> Callable[[Node, Sequence[Known]], Known]:
    def rule(_: Node, x: Sequence[Known]) -> Known:
        a, b = x
        known = Known(least(a.least, b.least), least(a.most, b.most))
        same = next((k for k in x if (k.least, k.most) == (known.least, known.most)), None)
        apart = a.most <= b.least or b.most <= a.least
        return same if apart and same is not None else known

    return rule


def _cast(node: Node, x: Sequence[Known]) -> Known:
    (a,) = x
    if node.output.dtype.is_bool and not node.inputs[0].dtype.is_bool:
        return EITHER if a.truth is None else TRUE if a.truth else FALSE
    return a


def _and(_: Node, x: Sequence[Known]) -> Known:
    if any(k.truth is False for k in x):
        return FALSE
    rest = [k for k in x if k.truth is None]
    if any(k.conditions is None for k in rest):
        return EITHER
    return Known(0, 1, None, tuple(c for k in rest for c in k.conditions or ())) if rest else TRUE


def _or(_: Node, x: Sequence[Known]) -> Known:
    if any(k.truth for k in x):
        return TRUE
    rest = [k for k in x if k.truth is None]
    if len(rest) != 1:
        return EITHER if rest else FALSE
    return Known(0, 1, None, rest[0].conditions)


def _not(_: Node, x: Sequence[Known]) -> Known:
    (a,) = x
    if a.truth is not None:
        return FALSE if a.truth else TRUE
    once = a.conditions if a.conditions is not None and len(a.conditions) == 1 else None
    return Known(0, 1, None, None if once is None else (once[0].times(-1, -1),))


def _select(node: Node, x: Sequence[Known]) -> Known:
    a, b, choice = x
    if node.output.dtype.is_bool and a.truth is not None and b.truth is not None and a.truth != b.truth:
        return _and(node, [choice]) if a.truth else _not(node, [choice])
    if node.output.dtype.is_bool and b.truth is False:
        return _and(node, [choice, a])
    return Known(min(a.least, b.least), max(a.most, b.most), a.linear if a.linear == b.linear else None)


def _negative(_: Node, x: Sequence[Known]) -> Known:
    (a,) = x
    return Known(-a.most, -a.least, None if a.linear is None else a.linear.times(-1))


def _absolute(node: Node, x: Sequence[Known]) -> Known:
    (a,) = x
    if a.least >= 0:
        return a
    return _negative(node, x) if a.most <= 0 else Known(0, max(-a.least, a.most))


def _clamped(node: Node, x: Sequence[Known]) -> Known:
    (a,) = x
    least, most = (node.attributes[key] for key in ("min", "max"))
    inside = (least is None or a.least >= least) and (most is None or a.most <= most)
    if inside:
        return a
    ends = [
        min(max(n, n if least is None else int(least)), n if most is None else int(most)) for n in (a.least, a.most)
    ]
    return Known(min(ends), max(ends))


def _remainder(_: Node, x: Sequence[Known]) -> Known:
    a, b = x
    if b.value is None or b.least <= 0 or a.least < 0:
        return Known(min(a.least, 0), max(a.most, 0))
    return a if a.most < b.least else Known(0, b.most - 1)


def _quotient(_: Node, x: Sequence[Known]) -> Known:
    a, b = x
    if b.value is None or b.least <= 0 or a.least < 0:
        most = max(abs(a.least), abs(a.most))
        return Known(-most, most)
    return Known(a.least // b.most, a.most // b.least)


_BY_ROLE: Mapping[Role | None, Callable[[Node, Sequence[Known]], Known]] = {
    Role.SUM: _sum,
    Role.DIFFERENCE: _difference,
    Role.PRODUCT: _product,
    Role.MAX: _extreme(max),
    Role.MIN: _extreme(min),
    Role.CAST: _cast,
    Role.AND: _and,
    Role.OR: _or,
    Role.NOT: _not,
    Role.SELECT: _select,
}
_BY_OP: Mapping[Op, Callable[[Node, Sequence[Known]], Known]] = {
    TABLE["neg"]: _negative,
    TABLE["abs"]: _absolute,
    TABLE["clamp"]: _clamped,
    TABLE["mod"]: _remainder,
    TABLE["quotient"]: _quotient,
}


def _compared(role: Role | None, a: Known, b: Known) -> Known:
    """Returns what is known of a comparison."""
    line = _both(a, b, -1)
    apart = a.least > b.most or a.most < b.least
    if role is Role.NE:
        equal = _compared(Role.EQ, a, b)
        return EITHER if equal.truth is None and not apart else FALSE if equal.truth else TRUE if apart else EITHER
    sums = _COMPARED[role]
    ends = [(a.least - b.most, a.most - b.least), (b.least - a.most, b.most - a.least)]
    found = [tuple(end + more for end in ends[0 if sign > 0 else 1]) for sign, more in sums]
    if any(most < 0 for _, most in found):
        return FALSE
    if all(least >= 0 for least, _ in found):
        return TRUE
    return EITHER if line is None else Known(0, 1, None, tuple(line.times(sign, more) for sign, more in sums))
