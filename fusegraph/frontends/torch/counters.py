"""Integers that differ between calls and say no size, such as how many tokens a cache holds: inputs like tensors.

torch's tracer gives them symbols, as it does sizes.  A graph that only adds them to tensors, multiplies or compares, is
compiled once for all their values: it takes them as tensors of one element.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fusegraph.frontends.torch.forms import COUNTER, measures

_NAMES = "add", "sub", "mul", "eq", "ne", "gt", "ge", "lt", "le"
#: Operators of a tensor and a number, and those that take a tensor of one element instead.
_OPERATORS = {
    overload: getattr(torch.ops.aten, name).Tensor
    for name in _NAMES
    for overload in (getattr(torch.ops.aten, name).Tensor, getattr(torch.ops.aten, name).Scalar)
}

#: Makes a tensor of an integer.
number: Any = torch.library.custom_op(
    "fusegraph::number",
    lambda value, device: torch.full((), value, dtype=torch.int64, device=device),
    mutates_args=(),
    schema="(SymInt value, Device device) -> Tensor",
)
number.register_fake(lambda value, device: torch.empty((), dtype=torch.int64, device=device))


def take_counters(graph: Any) -> None:
    """Makes tensors of a traced graph's symbolic integers that say no size, and marks their nodes with `COUNTER`."""
    integers = [n for n in graph.nodes if isinstance(n.meta.get("val"), torch.SymInt)]
    if not integers:
        return
    sizes = {s for n in graph.nodes for s in _symbols_of_sizes(n.meta.get("val"))}
    for node in integers:
        if not all(_counts(user, node) for user in node.users):
            sizes |= _symbols(node.meta["val"])
    for node in integers:
        if not sizes & _symbols(node.meta["val"]):
            node.meta[COUNTER] = True
            _replace(graph, node)


def makes_counter(node: Any) -> bool:
    """Tells whether a node is such an integer, or a tensor of one."""
    return COUNTER in node.meta or node.target is torch.ops.fusegraph.number.default


def _symbols(value: Any) -> set[Any]:
    return set(value.node.expr.free_symbols)


def _symbols_of_sizes(value: Any) -> Iterator[Any]:
    for part in value if isinstance(value, tuple | list) else (value,):
        if isinstance(part, torch.Tensor):
            sizes = (*measures(part), part.storage_offset() if part.layout is torch.strided else 0)
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    yield from _symbols(size)


def _counts(user: Any, node: Any) -> bool:
    """Tells whether a node takes a number as it would take a tensor of one element."""
    if user.op == "output" or isinstance(user.meta.get("val"), torch.SymInt):
        return True
    if user.target not in _OPERATORS or len(user.args) != 2 or user.kwargs or user.args[1] is not node:
        return False
    x = getattr(user.args[0], "meta", {}).get("val")
    # Tensors of rank 0 are promoted as tensors, not as numbers are.
    return isinstance(x, torch.Tensor) and (x.ndim > 0 or x.dtype == torch.int64) and x.dtype != torch.bool


def _replace(graph: Any, node: Any) -> None:
    """Gives a tensor to the operators that take a number."""
    made: dict[torch.device, Any] = {}
    for user in [*node.users]:
        if user.target not in _OPERATORS or isinstance(user.meta.get("val"), torch.SymInt):
            continue
        x = user.args[0].meta["val"]
        if x.device not in made:
            with graph.inserting_before(user):
                made[x.device] = graph.call_function(torch.ops.fusegraph.number.default, (node, x.device))
            made[x.device].meta["val"] = x.new_empty((), dtype=torch.int64)
        user.target, user.args = _OPERATORS[user.target], (user.args[0], made[x.device])
