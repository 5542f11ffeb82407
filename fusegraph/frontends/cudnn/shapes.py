"""Gives some tensors of a pygraph other shapes and strides, as ``execute`` may ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any

from fusegraph.errors import ArgumentError

#: uid -> (shape, strides); the tensor keeps its own strides if the two have different lengths.
Shapes = Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]


def told(uids: Any, shapes: Any, strides: Any) -> Shapes:
    """Combines ``execute``'s override_uids, override_shapes and override_strides.  Raises ArgumentError.

    Strides may have another rank than the shape: cuDNN accepts this, as for ragged tensors in three dimensions, and
    computes with the tensor's own strides.
    """
    lists = {"override_uids": uids, "override_shapes": shapes, "override_strides": strides}
    if any(not isinstance(given, Sequence) for given in lists.values()) or len(set(map(len, lists.values()))) != 1:
        raise ArgumentError(f"{', '.join(lists)} are three lists of one length, got {uids!r}, {shapes!r}, {strides!r}")
    try:
        every = [(int(uid), tuple(map(int, n)), tuple(map(int, s))) for uid, n, s in zip(uids, shapes, strides)]
    except (TypeError, ValueError):
        raise ArgumentError(f"shapes and strides are integers, got {shapes!r} and {strides!r}") from None
    return {uid: (shape, stride) for uid, shape, stride in every}


def reshaped(pygraph: Any, shapes: Shapes) -> Any:
    """Returns a copy of what is read of a pygraph, with other shapes and without inferred shapes of results.

    Raises ArgumentError for an unknown uid.
    """
    made: dict[int, Any] = {}

    def other(tensor: Any) -> Any:
        if tensor is None or tensor.uid in made:
            return tensor if tensor is None else made[tensor.uid]
        new = made[tensor.uid] = copy(tensor)
        shape, strides = shapes.get(tensor.uid, (tensor.dim, tensor.stride))
        strides = strides if len(strides) == len(shape) else tensor.stride
        if tensor.uid not in shapes and tensor.uid in results and not tensor.dim_assigned:
            shape = ()
        if tensor.uid not in shapes and tensor.uid in results and not tensor.stride_assigned:
            strides = ()
        known = tensor.uid in shapes
        changed = {"dim": shape, "stride": strides, "ragged_offset": other(tensor.ragged_offset)}
        changed |= {"dim_assigned": known or tensor.dim_assigned, "stride_assigned": known or tensor.stride_assigned}
        for name, value in changed.items():
            object.__setattr__(new, name, value)  # tensors of a pygraph that was built cannot be set otherwise
        return new

    results = {t.uid for n in pygraph.nodes for t in n.outputs.values() if t is not None}
    nodes = []
    for node in pygraph.nodes:
        nodes.append(copy(node))
        nodes[-1].inputs = {port: other(t) for port, t in node.inputs.items()}
        nodes[-1].outputs = {port: other(t) for port, t in node.outputs.items()}
    tensors = {name: other(t) for name, t in pygraph.tensors.items()}
    if (unknown := set(shapes) - set(made)) != set():
        raise ArgumentError(f"there is no tensor of uid {min(unknown)}, which override_uids names")
    return SimpleNamespace(
        nodes=nodes, tensors=tensors, context=pygraph.context, _data_bindings=getattr(pygraph, "_data_bindings", {})
    )
