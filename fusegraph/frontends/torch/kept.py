"""Rewrites a traced training step so that its gradients need less memory of the forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Set
from math import prod
from operator import getitem
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from fusegraph.frontends.torch.table import FREE, pair

aten = torch.ops.aten

#: Batch normalization -> the position of the argument that says whether it is by the batch's statistics.
_NORMS = {"aten._native_batch_norm_legit_functional.default": 5, "aten._native_batch_norm_legit.no_stats": 3}
#: Max pooling -> its gradient, and along how many axes its windows are.
_POOLS = {
    aten.max_pool2d_with_indices.default: (aten.max_pool2d_with_indices_backward.default, 2),
    aten.max_pool3d_with_indices.default: (aten.max_pool3d_with_indices_backward.default, 3),
}
#: Products whose kernels compute operands from what is stored.
_PRODUCTS = ("aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default")
#: What weights are unpacked by, beside functions of elements and views.
_MOVES = ("aten.cat.default", "aten.slice_scatter.default", "aten._to_copy.default", "aten.clone.default")


def keep_less(graph: Any) -> None:
    """Rewrites the graph of a step, forward and backward, before it is divided."""
    _take_undetached(graph)
    _normalize_by_statistics(graph)
    _narrow_positions(graph)
    _unpack_again(graph)
    _make_masks_again(graph)


def _make_masks_again(graph: Any) -> None:
    """Has the backward pass make again what is made of integers that take less memory, or of positions alone.

    Attention's masks are such: a kernel that sees how one is made needs no memory of it, and skips what it hides.
    """
    leaves: dict[Any, frozenset[Any]] = {}  # the inputs of tensors that are made of integers alone
    for node in graph.nodes:
        value, target = node.meta.get("val"), node.target
        if not isinstance(value, torch.Tensor):
            if isinstance(value, torch.SymInt):
                leaves[node] = frozenset()
        elif _bytes(value) is None:
            continue
        elif node.op == "placeholder":
            if not (value.is_floating_point() or value.is_complex()):
                leaves[node] = frozenset([node])
        elif isinstance(target, torch._ops.OpOverload) and all(n in leaves for n in node.all_input_nodes):
            if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
                continue
            found = frozenset[Any]().union(*(leaves[n] for n in node.all_input_nodes))
            leaves[node] = found
            if (_bytes(value) or 0) > sum(_bytes(n.meta["val"]) or 0 for n in found):
                for each in _ancestors(node, found):
                    _again(each)


def _bytes(value: Any) -> int | None:
    """Returns the bytes of a tensor's elements, sizes that vary as they were seen; None if a size hangs on data."""
    seen = [n.node.hint if isinstance(n, torch.SymInt) else n for n in value.shape]
    return None if None in seen else prod(seen) * value.element_size()


def _ancestors(node: Any, leaves: Set[Any]) -> Iterator[Any]:
    """Yields a node and all that it is made of but leaves, less those that are computed again already."""
    stack = [node]
    while stack:
        each = stack.pop()
        if each not in leaves and "recompute" not in each.meta and isinstance(each.meta["val"], torch.Tensor):
            yield each
            stack += each.all_input_nodes


def _unpack_again(graph: Any) -> None:
    """Has the backward pass unpack weights of few bits again: products take them as they are stored."""
    for node in graph.nodes:
        for operand in node.all_input_nodes if str(node.target) in _PRODUCTS else ():
            made, leaves = _made_of(operand)
            sizes = [[*n.meta["val"].shape] for n in (operand, *leaves)]
            if not leaves or any(type(size) is not int for shape in sizes for size in shape):
                continue
            whole, *stored = (prod(s) * n.meta["val"].element_size() for s, n in zip(sizes, (operand, *leaves)))
            if sum(stored) < whole:
                for each in made:
                    if "recompute" not in each.meta:
                        _again(each)


def _made_of(tensor: Any) -> tuple[set[Any], list[Any]]:
    """Returns what makes a tensor by movement and functions of elements alone, and the graph's inputs that it is of.

    There are none if anything else does.
    """
    made: set[Any] = set()
    leaves: dict[Any, None] = {}
    stack = [tensor]
    while stack:
        node = stack.pop()
        if node in made or node in leaves:
            continue
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            leaves[node] = None
            continue
        name, tags = str(node.target), getattr(node.target, "tags", ())
        simple = torch.Tag.pointwise in tags or name in FREE or name in _MOVES
        if node.op != "call_function" or not simple or torch.Tag.nondeterministic_seeded in tags:
            return set(), []
        made.add(node)
        stack += node.all_input_nodes
    return made, [*leaves]


def _take_undetached(graph: Any) -> None:
    """Has operators take what they take detached: torch's cut does not compute again what is detached."""
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output")


def _normalize_by_statistics(graph: Any) -> None:
    """Computes what batch normalization returns by operators of elements, which can be computed again, too.

    Its gradient keeps the operand and the statistics; with these the result need not be kept.
    """
    for node in [n for n in graph.nodes if str(n.target) in _NORMS and n.args[_NORMS[str(n.target)]]]:
        parts = _parts(node)
        if not {0, 1, 2} <= parts.keys():
            continue
        x, scale, bias = node.args[:3]
        channels = [1, -1, *[1] * (x.meta["val"].dim() - 2)]
        with graph.inserting_before(parts[0]):
            mean, inverse = (graph.call_function(getitem, (node, k)) for k in (1, 2))
            mean.meta, inverse.meta = parts[1].meta, parts[2].meta

            wide = mean.meta["val"].dtype
            found = _apply(graph, x, aten._to_copy.default, x, dtype=wide)
            for operator, vector in (
                (aten.sub.Tensor, mean),
                (aten.mul.Tensor, inverse),
                (aten.mul.Tensor, scale),
                (aten.add.Tensor, bias),
            ):
                if vector is not None:
                    vector = _apply(graph, vector, aten.view.default, vector, channels)
                    found = _apply(graph, found, operator, found, vector)
            found = _apply(graph, found, aten._to_copy.default, found, dtype=x.meta["val"].dtype)
        parts[0].replace_all_uses_with(found)
        for number, part in ((1, mean), (2, inverse)):
            parts[number].replace_all_uses_with(part)
            graph.erase_node(parts[number])
        graph.erase_node(parts[0])


def _narrow_positions(graph: Any) -> None:
    """Keeps where the maxima of windows are as distances from the windows' starts, in few bits, and not the operand.

    Of the operand the gradient takes only the shape.
    """
    for node in [n for n in graph.nodes if n.target in _POOLS]:
        gradient, count = _POOLS[node.target]
        parts, x = _parts(node), node.args[0].meta["val"]
        if 1 not in parts or any(type(n) is not int for n in x.shape):
            continue
        index, users = parts[1], [*parts[1].users]
        if not users or any(u.target is not gradient for u in users):
            continue
        with graph.inserting_before(index.next):
            start, reach = _starts(graph, index, count)
            distance = _apply(graph, index, aten._to_copy.default, index, dtype=torch.int32)
            distance = _apply(graph, index, aten.sub.Tensor, distance, start)
            narrow = next(t for t in (torch.uint8, torch.int16, torch.int32) if reach <= torch.iinfo(t).max)
            distance = _apply(graph, index, aten._to_copy.default, distance, dtype=narrow)
        for user in users:
            with graph.inserting_before(user):
                found = _again(_apply(graph, index, aten._to_copy.default, distance, dtype=torch.int32))
                found = _again(_apply(graph, index, aten.add.Tensor, found, start))
                found = _again(_apply(graph, index, aten._to_copy.default, found, dtype=torch.int64))
                how = {"dtype": x.dtype, "device": x.device}
                shape = _apply(graph, node.args[0], aten.empty_strided.default, [*x.shape], [*x.stride()], **how)
            user.args = (user.args[0], shape, *user.args[2:-1], found)


def _starts(graph: Any, index: Any, count: int) -> tuple[Any, int]:
    """Returns where the windows of a pool start, flattened over their axes, and the longest distance from there."""
    x, window, *given = index.args[0].args
    stride, padding, dilation = (*given, *([], 0, 1)[len(given) :])[:3]
    forms = zip(*(pair(v, count) for v in (window, stride or window, padding, dilation)))
    sizes, positions = (t.meta["val"].shape[-count:] for t in (x, index))
    found, reach = None, 0
    for axis, (taps, step, before, apart) in enumerate(forms):
        inner, here = prod(sizes[axis + 1 :]), positions[axis]
        reach += (taps - 1) * apart * inner
        bounds = -before * inner, (here * step - before) * inner, step * inner
        how = {"dtype": torch.int32, "device": x.meta["val"].device}
        start = _apply(graph, index, aten.arange.start_step, *bounds, **how)
        start = _apply(graph, index, aten.view.default, start, [here, *[1] * (count - 1 - axis)])
        found = start if found is None else _apply(graph, index, aten.add.Tensor, found, start)
    return found, reach


def _parts(node: Any) -> dict[int, Any]:
    """Returns the results of an operator that has several, by their numbers."""
    return {user.args[1]: user for user in node.users}


def _again(node: Any) -> Any:
    """Marks what the backward pass computes again."""
    node.meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 0}
    return node


def _apply(graph: Any, like: Any, operator: Any, *args: Any, **how: Any) -> Any:
    """Adds a node to a traced graph, with what is known of the node ``like``, of a tensor."""
    made = graph.call_function(operator, args, how)
    values = [a.meta["val"] if hasattr(a, "meta") else a for a in args]
    with like.meta["val"].fake_mode:
        made.meta = {**like.meta, "val": operator(*values, **how)}
    return made
