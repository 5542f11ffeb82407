"""Reductions, running sums and pools of one element, and sums of one product, are pointwise work and views.

As such they are fused like any, and need no kernel that looks for something to share among threads.  A composite of
reductions (a softmax, a norm, an argmax) is of such parts by now; attention to one key is attention.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from codegen.windows import Adaptive, Sliding
from fusegraph.dtypes import DType
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Role
from fusegraph.ops.modes import COMBINED
from fusegraph.passes.pools import FOLDS
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, replaced

#: What writes the element, or the product, that the result of a node is; it may have another shape and dtype.
Write = Callable[[Graph, Node, tuple[Tensor, ...]], Tensor]


def combine_single_elements(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Makes pointwise work of what combines one element, or sums up one product, for each result."""
    return replaced(graph, _single, _rewrite)


def _single(node: Node) -> Write | None:
    """Returns what writes the result of a node that combines one element for each; None for other nodes."""
    if not node.inputs or 0 in node.inputs[0].shape:
        return None
    if node.op.role is Role.REDUCE:
        return _reduced if all(node.inputs[0].shape[d] == 1 for d in node.attributes["axes"]) else None
    if node.kind is Kind.SCAN:
        return _alone if node.inputs[0].shape[node.attributes["axis"]] == 1 else None
    if node.kind is Kind.POOLING:
        return _taken if _steps(node) is not None else None
    if node.kind is Kind.CONTRACTION and node.op.products is not None and node.op.role is not Role.SPARSE_MATMUL:
        types = tuple(t.type for t in node.inputs)
        return _multiplied if _one_product(node) and node.op.products(types, node.attributes) == 1 else None
    return None


def _rewrite(rewrite: Rewrite, node: Node, write: Write) -> None:
    result, graph = node.output, rewrite.graph
    found = write(graph, node, rewrite.inputs(node))
    if found.dtype != result.dtype:
        found = _cast(found, result.dtype, result.name)
    if found.shape != result.shape:
        rewrite.take_over(Node(TABLE["reshape"], (found,), {"shape": result.shape}, result), (found,))
    elif result in node.inputs[0].graph.outputs:
        rewrite.take_over(Node(TABLE["identity"], (found,), {"dtype": None}, result), (found,))
    else:
        rewrite.new[result] = found


def _apply(name: str, *operands: Tensor, after: str, part: str, **attributes: object) -> Tensor:
    return named(operands[0].graph.apply(TABLE[name], operands, attributes), after, part)


def _cast(tensor: Tensor, dtype: DType, after: str) -> Tensor:
    return _apply("identity", tensor, after=after, part="cast", dtype=dtype)


def _widened(tensor: Tensor, node: Node) -> Tensor:
    """Returns a tensor in the dtype of a node's result, if that is wider: what is made of elements is made in it."""
    wider = node.output.dtype.bits > tensor.dtype.bits
    return _cast(tensor, node.output.dtype, node.name) if wider else tensor


def _alone(_: Graph, __: Node, inputs: tuple[Tensor, ...]) -> Tensor:
    return inputs[0]


def _reduced(_: Graph, node: Node, inputs: tuple[Tensor, ...]) -> Tensor:
    """Returns the element, or its absolute value, which is the root of its square, too."""
    before = COMBINED[node.attributes["mode"]].before
    if before is None:
        return inputs[0]
    return _apply("abs", _widened(inputs[0], node), after=node.name, part="absolute")


# ---- windows of one element


def _steps(node: Node) -> tuple[int, ...] | None:
    """Returns how far the elements that windows hold are apart in each dimension; None for windows of more."""
    if node.op.fold not in FOLDS or node.op.windows is None:
        return None
    (x,) = node.inputs
    steps = [1] * x.rank
    windows, shape = node.op.windows((x.type,), node.attributes)
    for axis, window in windows.items():
        if isinstance(window, Sliding):
            steps[axis] = window.stride
            single = window.taps == 1 and not window.before and (shape[axis] - 1) * window.stride < window.size
        else:
            single = isinstance(window, Adaptive) and window.size == window.positions
        if not single:
            return None
    return tuple(steps)


def _taken(_: Graph, node: Node, inputs: tuple[Tensor, ...]) -> Tensor:
    (x,), steps = inputs, _steps(node)
    assert steps is not None
    return _sliced(x, node, steps, node.output.shape)


def _sliced(x: Tensor, node: Node, steps: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Returns every so many-th element of a tensor, so that it has a shape."""
    if all(step == 1 for step in steps) and x.shape == shape:
        return x
    stops = tuple((n - 1) * step + 1 for n, step in zip(shape, steps))
    return _apply("slice", x, after=node.name, part="taken", starts=(0,) * x.rank, stops=stops, steps=steps)


# ---- sums of one product


def _one_product(node: Node) -> bool:
    """Tells whether the operands of a contraction broadcast to what it multiplies, if it sums up one product."""
    if node.op.role is Role.MATMUL:
        return True
    values, (x, w) = node.attributes, node.inputs
    if node.op.role not in (Role.FPROP, Role.DGRAD) or prod(w.shape[2:]) != 1 or any(map(any, values["padding"])):
        return False
    alike = values["groups"] == 1 or x.shape[1] == node.output.shape[1]
    return alike and (node.op.role is Role.FPROP or x.shape[2:] == node.output.shape[2:])


def _multiplied(_: Graph, node: Node, inputs: tuple[Tensor, ...]) -> Tensor:
    a, b = inputs
    if node.op.role is not Role.MATMUL:
        channels = (1, node.output.shape[1], *(1 for _ in a.shape[2:]))
        b = b if b.shape == channels else _apply("reshape", b, after=node.name, part="factors", shape=channels)
        if node.op.role is Role.FPROP:
            steps = (1, 1, *node.attributes["stride"])
            a = _sliced(a, node, steps, (*a.shape[:2], *node.output.shape[2:]))
    return _apply("mul", _widened(a, node), _widened(b, node), after=node.name, part="product")
