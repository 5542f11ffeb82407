"""Simplification: removes what cannot be seen in the results.

Dead nodes, common subexpressions, nodes of constants only, and identities that hold in floating point for every input,
NaN, infinity and the sign of zero included: x * 1, x / 1, x - 0, -(-x), abs(abs(x)), relu(relu(x)), not(not(x)), a cast
to the same dtype, movement to the same places, dimensions joined and divided again; x to the power of 2, 1 or -1 as a
product, itself or a reciprocal.
(x + 0 is not x: it turns -0 into +0.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

import numpy as np

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.views import divided
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind
from fusegraph.ops.convert import from_reference, to_reference
from fusegraph.ops.evaluate import evaluate
from fusegraph.passes.rewrite import Rewrite, Rewritten, live_nodes, named

#: Constants are folded only if the result is at most this large: source code and memory are not for tables.
MAX_FOLDED_BYTES = 1 << 20


def remove_dead_nodes(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Removes the nodes that no output depends on."""
    live = live_nodes(graph)
    rewrite = Rewrite(graph)
    for node in graph.nodes:
        if node in live:
            rewrite.take_over(node)
    return rewrite.done()


def simplify(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Removes what cannot be seen in the results.

    The note "namesakes" has the names of all nodes that are computed once, by the name of the one that is.
    """
    rewrite = Rewrite(graph)
    outputs = set(graph.outputs)
    seen: dict[Any, Tensor] = {}
    for node in graph.nodes:
        node, inputs = _plain_power(node, rewrite.inputs(node))
        if len(node.outputs) == 1 and node.output not in outputs:
            replacement = _replacement(node, inputs)
            if replacement is None:
                replacement = seen.get(_key(node, inputs))
            if replacement is None:
                replacement = _folded(rewrite.graph, node, inputs)
            if replacement is None:
                replacement = _divided_and_turned(node, inputs)
            if replacement is not None:
                rewrite.new[node.output] = replacement
                continue
        rewrite.take_over(node, inputs)
        if node.output not in outputs or _key(node, inputs) not in seen:
            seen[_key(node, inputs)] = rewrite.new[node.output]
    made = rewrite.done()
    return replace(made, notes={"namesakes": _namesakes(made.counterparts)})


def _namesakes(counterparts: Mapping[Tensor, Tensor]) -> dict[str, tuple[str, ...]]:
    """The names of the new graph's tensors that stand for one of another name, or for several, and whose."""
    found: dict[str, tuple[str, ...]] = {}
    for old, new in counterparts.items():
        found[new.name] = (*found.get(new.name, ()), old.name)
    return {new: every for new, every in found.items() if every != (new,)}


def _key(node: Node, inputs: tuple[Tensor, ...]) -> Any:
    def identity(key: str, t: Tensor) -> Any:
        if key in node.op.shapes:
            return t.shape
        return (t.dtype, t.shape, t.value.tobytes()) if t.value is not None and t.value.nbytes <= 64 else t

    operands = tuple(map(identity, node.op.names(len(inputs)), inputs))
    attributes = sorted((key, repr(value)) for key, value in node.attributes.items())  # repr tells -0.0 from 0.0
    return (node.op.name, operands, tuple(attributes), node.output.dtype)


def _is(tensor: Tensor, number: float) -> bool:
    """Whether a tensor is a constant of one element that is this number, the sign of zero included."""
    if tensor.value is None or tensor.size != 1:
        return False
    value = float(tensor.value.reshape(-1)[0])
    return value == number and math.copysign(1, value) == math.copysign(1, number)


def _replacement(node: Node, inputs: tuple[Tensor, ...]) -> Tensor | None:
    """An operand the node's result always equals, if there is one."""
    name, result = node.op.name, node.output
    rule = _RULES.get(name)
    candidate = rule(node, inputs) if rule is not None else None
    if candidate is not None and candidate.shape == result.shape and candidate.dtype == result.dtype:
        return candidate
    return None


def _plain_power(node: Node, inputs: tuple[Tensor, ...]) -> tuple[Node, tuple[Tensor, ...]]:
    """A square or reciprocal that is written as a power, as what it is."""
    if node.op.name != "pow" or inputs[0].type != node.output.type:
        return node, inputs
    x, exponent = inputs
    if _is(exponent, 2.0):
        return Node(TABLE["mul"], (x, x), {}, *node.outputs), (x, x)
    if _is(exponent, -1.0):
        return Node(TABLE["reciprocal"], (x,), {}, *node.outputs), (x,)
    return node, inputs


def _neutral(number: float, *, left: bool) -> Callable[[Node, tuple[Tensor, ...]], Tensor | None]:
    def rule(_: Node, inputs: tuple[Tensor, ...]) -> Tensor | None:
        a, b = inputs
        if _is(b, number):
            return a
        return b if left and _is(a, number) else None

    return rule


def _twice(node: Node, inputs: tuple[Tensor, ...]) -> Tensor | None:
    """f(f(x)) where f undoes itself: x."""
    inner = inputs[0].graph.producer(inputs[0])
    return inner.inputs[0] if inner is not None and inner.op is node.op else None


def _idempotent(node: Node, inputs: tuple[Tensor, ...]) -> Tensor | None:
    """f(f(x)) = f(x)."""
    inner = inputs[0].graph.producer(inputs[0])
    same = inner is not None and inner.op is node.op and inner.attributes == node.attributes
    return inputs[0] if same else None


def _plain_relu(node: Node, inputs: tuple[Tensor, ...]) -> Tensor | None:
    slope = node.attributes.get("negative_slope") or 0
    return _idempotent(node, inputs) if slope == 0 else None


def _same(_: Node, inputs: tuple[Tensor, ...]) -> Tensor | None:
    return inputs[0]


def _in_order(node: Node, inputs: tuple[Tensor, ...]) -> Tensor | None:
    """A transpose that leaves the order of all dimensions of more than one element."""
    moved = [d for d in node.attributes["perm"] if inputs[0].shape[d] != 1]
    return inputs[0] if moved == sorted(moved) else None


def _forwards(node: Node, inputs: tuple[Tensor, ...]) -> Tensor | None:
    """A slice of everything."""
    every = zip(node.attributes["steps"], node.output.shape)
    return inputs[0] if all(step == 1 or size <= 1 for step, size in every) else None


def _only(_: Node, inputs: tuple[Tensor, ...]) -> Tensor | None:
    return inputs[0] if len(inputs) == 1 else None


_RULES: dict[str, Callable[[Node, tuple[Tensor, ...]], Tensor | None]] = {
    "mul": _neutral(1.0, left=True),
    "scale": _neutral(1.0, left=True),
    "div": _neutral(1.0, left=False),
    "pow": _neutral(1.0, left=False),
    "sub": _neutral(0.0, left=False),
    "neg": _twice,
    "logical_not": _twice,
    "abs": _idempotent,
    "relu": _plain_relu,
    "floor": _idempotent,
    "ceil": _idempotent,
    "identity": _same,
    "transpose": _in_order,
    "reshape": _same,
    "broadcast": _same,
    "slice": _forwards,
    "pad": _same,
    "concatenate": _only,
}


def _divided_and_turned(node: Node, inputs: tuple[Tensor, ...]) -> Tensor | None:
    """A reshape of a transpose of a reshape that joins dimensions, if what it joins is divided again: the dimensions in
    another order, which is a view however x lies in memory.  Heads are joined with the batch like this, and divided.
    """
    graph = inputs[0].graph
    turn = graph.producer(inputs[0])
    first = graph.producer(turn.inputs[0]) if turn is not None and turn.op.name == "transpose" else None
    if node.op.name != "reshape" or turn is None or first is None or first.op.name != "reshape":
        return None
    x, joined = first.inputs[0], first.output
    fine = _refined(x.shape, joined.shape)
    parts = None if fine is None or fine == joined.shape else divided(joined.shape, fine)
    if fine is None or parts is None:
        return None
    starts = [0, *accumulate(map(len, parts))]
    order = tuple(d for at in turn.attributes["perm"] for d in range(starts[at], starts[at + 1]))
    turned = tuple(fine[d] for d in order)
    if [n for n in turned if n != 1] != [n for n in node.output.shape if n != 1]:
        return None
    result = x if x.shape == fine else graph.apply(TABLE["reshape"], (x,), {"shape": fine})
    result = graph.apply(TABLE["transpose"], (result,), {"perm": order})
    if turned != node.output.shape:
        result = graph.apply(TABLE["reshape"], (result,), {"shape": node.output.shape})
    return named(result, node.name, "turned")


def _refined(shape: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of fewest dimensions of which the dimensions of both shapes are made, None if there is none."""
    if 0 in shape:
        return None
    steps = sorted({*accumulate(reversed(shape), mul), *accumulate(reversed(other), mul), 1})
    if any(after % before for before, after in pairwise(steps)):
        return None
    return tuple(after // before for before, after in pairwise(steps))[::-1]


def _folded(result: Graph, node: Node, inputs: tuple[Tensor, ...]) -> Tensor | None:
    """The value of a pointwise or movement node of constants as a constant, if it is small."""
    kinds = (Kind.POINTWISE, Kind.MOVEMENT)
    foldable = node.kind in kinds and node.op.reads_values and all(t.is_constant for t in inputs)
    if not foldable or node.output.nbytes > MAX_FOLDED_BYTES:
        return None
    types = tuple(t.type for t in inputs)
    operands = [to_reference(np.asarray(t.value), t.dtype) for t in inputs]
    value = evaluate(node.op, types, node.attributes, node.output.dtype, operands, result.compute_dtype)
    stored = from_reference(value, node.output.dtype)
    stored = np.array(np.broadcast_to(stored, node.output.shape), order="C")
    stored.setflags(write=False)
    return result._add_tensor(
        node.name, node.output.shape, packed_strides(node.output.shape), node.output.dtype, stored
    )
