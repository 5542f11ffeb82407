"""Divides a traced training step into forward and backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch.multiprocessing.reductions import StorageWeakRef

from fusegraph.frontends.torch.kept import keep_less
from fusegraph.frontends.torch.random import prepare_random_numbers
from fusegraph.frontends.torch.table import FREE, HANDLERS

#: The key in a node's ``meta`` that says that the forward pass may choose its strides.
ANY_STRIDES = "fusegraph_any_strides"
_ALIASES = ("aten.alias.default", "aten.detach.default")


def divide(joint: Any, inputs: Any, *, num_fwd_outputs: int, **how: Any) -> tuple[Any, Any]:
    """Returns the modules of forward and backward pass.

    What the forward pass keeps for kernels of the backward pass alone may have any strides.
    """
    prepare_random_numbers(joint.graph)
    keep_less(joint.graph)
    forward, backward = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **how)
    results = forward.graph.output_node().args[0]
    kept, read = results[num_fwd_outputs:], {n.name: n for n in backward.graph.nodes if n.op == "placeholder"}
    fixed = {_memory(x) for x in results[:num_fwd_outputs]}
    fixed |= {_memory(x) for x in kept if _memory(x) is not _unaliased(x)}  # a view's memory is as it says
    for x in kept:
        base, reader = _unaliased(x), read.get(getattr(x, "name", ""))  # a random generator's state has no such reader
        if base not in fixed and getattr(base, "op", "") == "call_function" and reader and _is_ours(reader):
            base.meta[ANY_STRIDES] = True
    return forward, backward


def _memory(node: Any) -> Any:
    """Returns the node in whose memory a view lies; the node itself if it is none."""
    while getattr(node, "op", "") == "call_function" and str(node.target) in FREE and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _unaliased(node: Any) -> Any:
    while getattr(node, "op", "") == "call_function" and str(node.target) in _ALIASES:
        node = node.args[0]
    return node


def _is_ours(node: Any) -> bool:
    """Tells whether only our kernels read a node, or views of it, by its elements' positions."""
    return all(
        str(n.target) in HANDLERS or (str(n.target) in FREE and "as_strided" not in str(n.target) and _is_ours(n))
        for n in node.users
    )


def chosen(graph: Any) -> set[Any]:
    """Returns the nodes of a forward pass whose strides it may choose."""
    return {node for node in graph.nodes if node.meta.get(ANY_STRIDES)}


def report_strides(graph: Any, strides: dict[Any, tuple[int, ...]]) -> None:
    """Tells AOTAutograd the strides of results that the forward pass has chosen."""
    context: Any = TracingContext.try_get()
    if strides and context is not None and context.output_strides is not None:
        context.output_strides += [strides.get(_unaliased(x)) for x in graph.output_node().args[0]]


def take_strides(graph: Any, inputs: Sequence[Any]) -> None:
    """Gives a backward pass's inputs the strides that the forward pass has chosen."""
    for node, value in zip((n for n in graph.nodes if n.op == "placeholder"), inputs):
        known = node.meta.get("val")
        if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor) and value.stride() != known.stride():
            node.meta["val"] = value


def donated_inputs(graph: Any) -> list[Any]:
    """Returns the inputs of a backward pass that torch keeps for it alone, and whose memory no other input shares."""
    context: Any = TracingContext.try_get()
    known = getattr(context.fw_metadata, "bw_donated_idxs", None) if context is not None else None
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    values = {n: n.meta["val"] for n in inputs if isinstance(n.meta.get("val"), torch.Tensor)}
    shared = Counter(StorageWeakRef(x.untyped_storage()) for x in values.values())
    return [n for n in (inputs[k] for k in known or ()) if shared[StorageWeakRef(values[n].untyped_storage())] == 1]
