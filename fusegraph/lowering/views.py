"""Strided views: where the elements of a movement op's result lie in the memory of its operand."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import prod

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides
from fusegraph.ops.base import Kind, Role

Strides = tuple[int, ...]

#: Movement whose operand may be written in its result.
WRITTEN_THROUGH = frozenset({Role.TRANSPOSE, Role.RESHAPE, Role.BROADCAST, Role.CONCATENATE})


def strides_over(shape: Sequence[int], strides: Sequence[int], target: Sequence[int]) -> Strides:
    """Returns the strides of a tensor of this shape over one that it broadcasts to."""
    own = (stride if size != 1 else 0 for size, stride in zip(shape, strides))
    return (0,) * (len(target) - len(shape)) + tuple(own)


def view(node: Node, strides: Sequence[int]) -> tuple[Strides, int] | None:
    """Returns (strides, start) of a node's result in the memory of its operand, which has these strides.

    start counts elements from the operand's first.  None if the result is no view, or one with negative strides.
    """
    if node.kind is not Kind.MOVEMENT or len(node.inputs) > 1:
        return None
    shape, at = node.inputs[0].shape, node.attributes
    if node.op.role is Role.TRANSPOSE:
        return tuple(strides[d] for d in at["perm"]), 0
    if node.op.role is Role.BROADCAST:
        return strides_over(shape, strides, at["shape"]), 0
    if node.op.role is Role.RESHAPE:
        steps = reshaped(shape, strides, at["shape"])
        return None if steps is None else (steps, 0)
    if node.op.role is Role.SLICE:
        steps = tuple(s * step if n > 1 else s for s, step, n in zip(strides, at["steps"], node.output.shape))
        if any(step < 0 for step in steps):
            return None
        return steps, sum(first * s for first, s in zip(at["starts"], strides)) if node.output.size else 0
    return None


def turned_back(node: Node, strides: Sequence[int]) -> Strides | None:
    """Returns the strides of a node's operand if each of its elements lies where the result, of these strides, has it.

    None if the result has other elements, or such strides do not exist.
    """
    operand = node.inputs[0]
    if node.op.role is Role.TRANSPOSE:
        places = dict(zip(node.attributes["perm"], strides))
        return tuple(places[d] for d in range(operand.rank))
    if node.op.role is Role.RESHAPE:
        return reshaped(node.output.shape, strides, operand.shape)
    if node.op.role is Role.BROADCAST and operand.size == node.output.size:
        return tuple(strides[len(strides) - operand.rank :])
    return None


def joins_in_place(node: Node) -> bool:
    """Returns true if the operands of a concatenation may be written in its result by what makes them."""
    graph = node.output.graph
    made = all(graph.producer(t) is not None and t not in graph.outputs for t in node.inputs)
    return made and len(set(node.inputs)) == len(node.inputs)


def merged(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], Strides]:
    """Returns shape and strides with dimensions merged that follow each other in memory, without those of size 1."""
    sizes: list[int] = []
    steps: list[int] = []
    for size, step in zip(shape, strides):
        if size == 1:
            continue
        if sizes and steps[-1] == step * size:
            sizes[-1] *= size
            steps[-1] = step
        else:
            sizes.append(size)
            steps.append(step)
    return tuple(sizes), tuple(steps)


def reshaped(shape: Sequence[int], strides: Sequence[int], target: Sequence[int]) -> Strides | None:
    """Returns the strides of a tensor in another shape of as many elements; None if that takes a copy."""
    if 0 in target:
        return packed_strides(target)
    sizes, steps = merged(shape, strides)
    result = [0] * len(target)
    number, left = len(sizes), 1
    step = 1
    for d in reversed(range(len(target))):
        if target[d] == 1:
            result[d] = step
            continue
        if left == 1:
            number -= 1
            left, step = sizes[number], steps[number]
        if left % target[d]:
            return None
        result[d] = step
        left //= target[d]
        step *= target[d]
    return tuple(result)


def alias(tensor: Tensor, name: str, shape: Sequence[int], strides: Sequence[int], start: int) -> Tensor:
    """Returns a tensor in the memory of another, ``start`` elements after its first."""
    result = Tensor(tensor.graph, name, tuple(shape), tuple(strides), tensor.dtype)
    result.base, result.start = tensor.base, tensor.start + start
    return result


def is_assigned(graph: Graph, tensor: Tensor) -> bool:
    """Returns true if a tensor is written in the memory that an assignment changes, by what makes it."""
    takers = graph.consumers(tensor)
    placed = any(n.kind is Kind.ASSIGN and n.attributes["placed"] for n in takers)
    return placed or any(n.op.role in WRITTEN_THROUGH and is_assigned(graph, n.output) for n in takers)


def assigned_region(node: Node) -> Tensor:
    """Returns the elements that an assignment overwrites where they lie, those at position 0 if it has an index."""
    x, values = node.inputs[:2]
    at, rank = node.attributes, range(x.rank)
    strides = [x.strides[d] * (at["steps"][d] if values.shape[d] > 1 else 1) for d in rank]
    start = sum(at["starts"][d] * x.strides[d] for d in rank) if values.size else 0
    return alias(x, node.name, values.shape, strides, start)


def source(
    graph: Graph, members: Container[Node], tensor: Tensor, known: Mapping[Tensor, Tensor] | None = None
) -> Tensor | None:
    """Returns where a tensor's elements lie in memory if ``members`` make nothing: itself, or a view of another.

    ``known`` are tensors that stand for some.  None if it is computed.
    """
    node = graph.producer(tensor)
    if known and tensor in known:
        return known[tensor]
    if node is None or node not in members:
        return tensor
    behind = source(graph, members, node.inputs[0], known) if node.kind is Kind.MOVEMENT else None
    seen = view(node, behind.strides) if behind is not None else None
    if behind is None or seen is None:
        return None
    return alias(behind, behind.name if tensor.size == behind.size else tensor.name, tensor.shape, *seen)


def regrouped(shape: Sequence[int], target: Sequence[int]) -> list[tuple[range, range]]:
    """Returns the dimensions of two shapes of equal size, in the smallest groups that have equal sizes in both.

    Every dimension is in a group.  A group may have no dimension of one shape if its sizes in the other are 1.
    """
    groups = []
    i = j = 0
    while i < len(shape) or j < len(target):
        first, second = i, j
        left = right = 1
        i, left = (i + 1, left * shape[i]) if i < len(shape) else (i, left)
        while left != right:
            if right < left:
                right *= target[j]
                j += 1
            else:
                left *= shape[i]
                i += 1
        while i == len(shape) and j < len(target):
            right *= target[j]
            j += 1
        groups.append((range(first, i), range(second, j)))
    assert prod(shape) == prod(target)
    return groups


def divided(coarse: Sequence[int], fine: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """Returns for each dimension of a shape the sizes that it is divided into in a finer one; None if it is not."""
    if len(fine) <= len(coarse) or 0 in coarse:
        return None
    left, result = list(fine), []
    for size in coarse:
        part: list[int] = []
        while left and (not part or prod(part) < size):
            part.append(left.pop(0))
        if prod(part) != size:
            return None
        result.append(tuple(part))
    if any(n != 1 for n in left) or not result:
        return None
    return (*result[:-1], (*result[-1], *left))


def divided_strides(shape: Sequence[int], strides: Sequence[int], target: Sequence[int]) -> tuple[int, ...] | None:
    """Returns strides (0 among them) over a finer shape, given those over a shape; None if it is not finer."""
    if tuple(shape) == tuple(target):
        return tuple(strides)
    parts = divided(shape, target)
    if parts is None:
        return None
    found: list[int] = []
    for sizes, step in zip(parts, strides):
        found += [step * prod(sizes[d + 1 :]) for d in range(len(sizes))]
    return tuple(found)
