"""Which node of a graph makes a NaN where no operand has one, or an infinity of finite numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from fusegraph.graph import Graph, Node
from fusegraph.ops.base import Array, Kind


def new_in(value: Array, before: Iterable[Array]) -> str:
    """Returns what an array has of NaN or infinities and none of those before has, in words; "" if nothing."""
    now, seen = _holds(value), {_holds(x) for x in before}
    if now == "" or "NaN" in seen or (now == "infinity" and "infinity" in seen):
        return ""
    wide = value.astype(np.float64)
    bad = ~np.isfinite(wide)
    place = [int(k) for k in np.argwhere(bad)[0]]
    return f"{int(bad.sum())} of {bad.size} elements are not finite, the one at {place} is {wide[bad].flat[0]}"


def _holds(value: Array) -> str:
    """Returns "NaN" if an array has one, else "infinity" if it has one, else ""."""
    if value.dtype.kind in "iub":
        return ""
    with np.errstate(all="ignore"):
        wide = value.astype(np.float64)
    return "NaN" if np.isnan(wide).any() else "infinity" if np.isinf(wide).any() else ""


def first_new(graph: Graph, values: Mapping[str, Array]) -> tuple[str, str] | None:
    """Returns the first tensor with a NaN or an infinity that no operand has, and what is wrong, in words.

    ``values`` are those of a graph's tensors, by name, as stored; None if there is no such tensor among them.
    """
    known = {t.name: t.value for t in graph.tensors.values() if t.value is not None} | dict(values)
    for node in graph.nodes:
        operands = {t.name: known[t.name] for t in node.inputs if t.name in known}
        for tensor in node.outputs:
            said = new_in(known[tensor.name], operands.values()) if tensor.name in known else ""
            if said:
                return tensor.name, said + _operands_at(node, operands, known[tensor.name])
    return None


def _operands_at(node: Node, operands: Mapping[str, Array], value: Array) -> str:
    """Returns what pointwise operands are where the result is not finite, as the end of a sentence."""
    if node.kind is not Kind.POINTWISE:
        return ""
    place = tuple(np.argwhere(~np.isfinite(value.astype(np.float64)))[0])
    shown = (f"{name} = {np.broadcast_to(x, value.shape)[place]}" for name, x in operands.items())
    return f", of {', '.join(shown)}"
