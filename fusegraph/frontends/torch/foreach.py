"""Operators of lists of tensors, of which optimisers are made: one operator for each tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_PREFIX = "_foreach_"
#: Where the operator of one tensor has another name, or takes fewer kinds of numbers.
_ALONE: dict[str, Callable[..., Any]] = {
    "copy": torch.ops.aten.copy,
    "maximum": torch.clamp_min,
    "minimum": torch.clamp_max,
    "norm": torch.linalg.vector_norm,
    "zero": torch.zeros_like,
}
#: Numbers that vary from tensor to tensor and are keywords of the operator of one tensor.
_KEYWORDS = {"addcdiv": "value", "addcmul": "value"}


def rules() -> dict[Any, Callable[..., Any]]:
    """Returns the rules by which AOTAutograd decomposes the operators of lists."""
    aten = torch.ops.aten
    found: dict[Any, Callable[..., Any]] = {}
    for whole in dir(torch):
        name = whole.removeprefix(_PREFIX).removesuffix("_")
        alone = _ALONE.get(name) or getattr(torch, name, None)
        if not whole.startswith(_PREFIX) or alone is None:
            continue
        packet = getattr(aten, _PREFIX + name)
        for overload in packet.overloads():
            operator = getattr(packet, overload)
            if not overload.endswith("out") and not _reads_numbers(operator):
                found[operator] = partial(_each, alone, _KEYWORDS.get(name))
    return found


def _reads_numbers(operator: Any) -> bool:
    """Tells whether an operator takes its numbers from a tensor."""
    return any(a.name == "scalars" and str(a.type) == "Tensor" for a in operator._schema.arguments)


def _each(alone: Callable[..., Any], keyword: str | None, *args: Any, **kwargs: Any) -> list[Any]:
    """Calls the operator of one tensor for each of a list, with what belongs to it of other lists."""
    lists = [isinstance(a, list | tuple) for a in args]
    count = next(len(a) for a, several in zip(args, lists) if several)
    results = []
    for n in range(count):
        own = [a[n] if several else a for a, several in zip(args, lists)]
        if keyword is not None and len(own) > 3:
            kwargs = {**kwargs, keyword: own.pop()}
        results.append(alone(*own, **kwargs))
    return results
