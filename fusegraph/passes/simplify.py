"""Simplification: removes what cannot be seen in the results.

Dead nodes, common subexpressions, nodes of constants only, and identities that hold in floating point for every input,
NaN, infinity and the sign of zero included: x * 1, x / 1, x - 0, -(-x), abs(abs(x)), relu(relu(x)), not(not(x)), a cast to the
same dtype.  (x + 0 is not x: it turns -0 into +0.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.base import Kind
from fusegraph.ops.convert import convert, from_reference, to_reference

#: Constants are folded only if the result is at most this large: source code and memory are not for tables.
MAX_FOLDED_BYTES = 1 << 20


def simplify(graph: Graph, *, enabled: bool = True) -> Graph:
    """An equivalent graph with the same inputs and outputs.  With ``enabled=False`` only dead nodes are removed."""
    live = _live(graph)
    result = Graph(graph.name, graph.io_dtype, graph.compute_dtype)
    new: dict[Tensor, Tensor] = {}
    for tensor in graph.inputs:
        new[tensor] = result.tensor(tensor.name, tensor.shape, tensor.dtype, strides=tensor.strides)
    outputs = set(graph.outputs)
    seen: dict[Any, Tensor] = {}
    for node in graph.nodes:
        if node not in live:
            continue
        inputs = tuple(_taken(result, new, t) for t in node.inputs)
        if enabled and node.output not in outputs:
            replacement = _replacement(node, inputs)
            if replacement is None:
                replacement = seen.get(_key(node, inputs))
            if replacement is None and node.kind is Kind.POINTWISE and all(t.is_constant for t in inputs):
                replacement = _folded(result, node, inputs)
            if replacement is not None:
                new[node.output] = replacement
                continue
        output = result._add_tensor(node.name, node.output.shape, node.output.strides, node.output.dtype)
        result.add_node(Node(node.op, inputs, node.attributes, output))
        new[node.output] = output
        if node.output not in outputs or _key(node, inputs) not in seen:
            seen[_key(node, inputs)] = output
    result.outputs = [new[t] for t in graph.outputs]
    return result


def _live(graph: Graph) -> set[Node]:
    """Nodes some output depends on."""
    live: set[Node] = set()
    stack = [n for n in map(graph.producer, graph.outputs) if n is not None]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack += [n for n in map(graph.producer, node.inputs) if n is not None]
    return live


def _taken(result: Graph, new: dict[Tensor, Tensor], tensor: Tensor) -> Tensor:
    """The new graph's counterpart of a tensor; constants come over when they are first used."""
    if tensor not in new:
        assert tensor.value is not None
        new[tensor] = result._add_tensor(tensor.name, tensor.shape, tensor.strides, tensor.dtype, tensor.value)
    return new[tensor]


def _key(node: Node, inputs: tuple[Tensor, ...]) -> Any:
    operands = tuple(
        (t.dtype, t.shape, t.value.tobytes()) if t.value is not None and t.value.nbytes <= 64 else t for t in inputs
    )
    return (node.op.name, operands, tuple(sorted(node.attributes.items(), key=lambda kv: kv[0])), node.output.dtype)


def _number(tensor: Tensor) -> float | None:
    """The value of a constant that is one number."""
    if tensor.value is None or tensor.size != 1:
        return None
    return float(tensor.value.reshape(-1)[0])


def _replacement(node: Node, inputs: tuple[Tensor, ...]) -> Tensor | None:
    """An operand the node's result always equals, if there is one."""
    name, result = node.op.name, node.output
    rule = _RULES.get(name)
    candidate = rule(node, inputs) if rule is not None else None
    if candidate is not None and candidate.shape == result.shape and candidate.dtype == result.dtype:
        return candidate
    return None


def _neutral(number: float, *, left: bool) -> Callable[[Node, tuple[Tensor, ...]], Tensor | None]:
    def rule(_: Node, inputs: tuple[Tensor, ...]) -> Tensor | None:
        a, b = inputs
        if _number(b) == number and not (number == 0 and np.signbit(_number(b))):
            return a
        return b if left and _number(a) == number else None

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


_RULES: dict[str, Callable[[Node, tuple[Tensor, ...]], Tensor | None]] = {
    "mul": _neutral(1.0, left=True),
    "scale": _neutral(1.0, left=True),
    "div": _neutral(1.0, left=False),
    "sub": _neutral(0.0, left=False),
    "neg": _twice,
    "abs": _idempotent,
    "relu": _plain_relu,
    "floor": _idempotent,
    "ceil": _idempotent,
    "identity": _same,
}


def _folded(result: Graph, node: Node, inputs: tuple[Tensor, ...]) -> Tensor | None:
    """The node's value as a constant, if it is small."""
    if node.output.nbytes > MAX_FOLDED_BYTES:
        return None
    dtypes = node.op.operand_dtypes(tuple(t.type for t in inputs))
    operands = [
        convert(to_reference(t.value, t.dtype), t.dtype, d)
        if t.value is not None and t.dtype != d
        else to_reference(np.asarray(t.value), t.dtype)
        for t, d in zip(inputs, dtypes)
    ]
    value = node.op.reference(*operands, **node.attributes)
    common = node.op.promoted(tuple(t.type for t in inputs))
    source = common if node.op.name == "identity" else node.output.dtype
    stored = from_reference(convert(value, source, node.output.dtype), node.output.dtype)
    stored = np.array(np.broadcast_to(stored, node.output.shape), order="C")
    stored.setflags(write=False)
    from fusegraph.layout import packed_strides

    return result._add_tensor(
        node.name, node.output.shape, packed_strides(node.output.shape), node.output.dtype, stored
    )
