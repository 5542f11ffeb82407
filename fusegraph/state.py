"""Assignments: which elements of a graph's input a target names, and the values that they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fusegraph.errors import GraphError
from fusegraph.ops.assign import ASSIGN
from fusegraph.ops.base import Kind, Role
from fusegraph.tensor import Node, Tensor


@dataclass
class Region:
    """Elements of a tensor: from ``starts`` on every ``steps``-th, ``sizes`` of them, in each of its dimensions.

    of          the tensor.
    axes, index the dimensions along which a tensor says the positions, numbered in row-major order, and that tensor.
    dims        of the region as the program sees it: the tensor's dimension that each of them walks, None for one of
                size 1 that was added.
    """

    of: Tensor
    starts: list[int]
    steps: list[int]
    sizes: list[int]
    dims: list[int | None]
    axes: tuple[int, ...] = ()
    index: Tensor | None = None


def region(target: Tensor) -> Region:
    """Returns the elements that a target names: those of a tensor, or of a slice or gather of one.

    Raises GraphError if it is something else.
    """
    graph, steps, tensor = target.graph, [], target
    while (node := graph.producer(tensor)) is not None and node.op.role in _STEPS:
        steps.append(node)
        tensor = node.inputs[0]
    rank = tensor.rank
    found = Region(tensor, [0] * rank, [1] * rank, list(tensor.shape), list(range(rank)))
    for node in reversed(steps):
        assert node.op.role is not None
        _STEPS[node.op.role](found, node)
    return found


def _sliced(found: Region, node: Node) -> None:
    starts, steps = node.attributes["starts"], node.attributes["steps"]
    for dim, start, step, before, size in zip(found.dims, starts, steps, node.inputs[0].shape, node.output.shape):
        if (start, step, size) == (0, 1, before):
            continue
        if dim is None or dim in found.axes:
            raise GraphError(f"{node.name!r} is a slice along an axis that has an index; slice the index")
        found.starts[dim] += start * found.steps[dim] if size else 0
        found.steps[dim] *= step if size > 1 else 1
        found.sizes[dim] = size


def _gathered(found: Region, node: Node) -> None:
    index, at = node.inputs[1], node.attributes["axis"]
    dim = found.dims[at]
    if dim is None or found.index is not None or index.rank > 1:
        raise GraphError(
            f"{node.name!r} is no region that can be assigned to: one axis may have one index of rank 0, 1"
        )
    if (found.starts[dim], found.steps[dim], found.sizes[dim]) != (0, 1, found.of.shape[dim]):
        raise GraphError(f"{node.name!r} is a gather along an axis that is sliced: an index counts from its beginning")
    found.axes, found.index, found.sizes[dim] = (dim,), index, index.size
    found.dims[at : at + 1] = [dim][: index.rank]


def _reshaped(found: Region, node: Node) -> None:
    before, after = (list(t.shape) for t in (node.inputs[0], node.output))
    walked = iter([dim for dim, size in zip(found.dims, before) if size != 1])
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        raise GraphError(f"{node.name!r} is a reshape; assign to the tensor in its own shape")
    found.dims = [next(walked) if size != 1 else None for size in after]


def _transposed(found: Region, node: Node) -> None:
    found.dims = [found.dims[d] for d in node.attributes["perm"]]


_STEPS: dict[Role, Callable[[Region, Node], None]] = {
    Role.SLICE: _sliced,
    Role.GATHER: _gathered,
    Role.RESHAPE: _reshaped,
    Role.TRANSPOSE: _transposed,
}


def assigned(found: Region, values: Tensor, name: str | None = None) -> Tensor:
    """Returns the tensor with a region replaced by values of the region's ``dims``; it lies as the tensor does.

    Raises ShapeError, DTypeError.
    """
    graph: Any = values.graph
    walked = [dim for dim in found.dims if dim is not None]
    if walked != sorted(walked):
        order = sorted(range(len(found.dims)), key=lambda d: -1 if (dim := found.dims[d]) is None else dim)
        values = graph.transpose(values, order)
    if values.shape != tuple(found.sizes):
        values = graph.reshape(values, found.sizes)
    back = [slice(None, None, -1 if step < 0 else 1) for step in found.steps]
    if any(step < 0 for step in found.steps):
        values = values[tuple(back)]
    ends = zip(found.starts, found.steps, found.sizes)
    attributes: dict[str, Any] = {
        "starts": tuple(start + min(step, 0) * (n - 1) if n else 0 for start, step, n in ends),
        "steps": tuple(abs(step) for step in found.steps),
    }
    operands = [found.of, values]
    if found.index is not None:
        attributes["axes"] = found.axes
        operands.append(found.index if found.index.rank else graph.reshape(found.index, (1,)))
    made: Tensor = graph.apply(ASSIGN, operands, attributes, name)
    made.strides = found.of.strides
    return made


def origin(tensor: Tensor) -> Tensor:
    """Returns the tensor in whose memory the result of assignments lies: itself if it is none."""
    while (node := tensor.graph.producer(tensor)) is not None and node.kind is Kind.ASSIGN:
        tensor = node.inputs[0]
    return tensor
