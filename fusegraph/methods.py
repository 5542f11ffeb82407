"""The methods of a graph: one for each op of the table, and those that are written with these."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from fusegraph import block_scales, composed, gradients, meanings, rearranging, resampling, sampling
from fusegraph.calls import means
from fusegraph.dtypes import as_dtype
from fusegraph.errors import GraphError
from fusegraph.operations import Operations
from fusegraph.ops import TABLE
from fusegraph.ops.attributes import of_kind
from fusegraph.ops.base import REQUIRED, Op
from fusegraph.tensor import Tensor
from fusegraph.values import Kind, array, dtype, flag, integer, number, one_or_several, optional, word


def _method(op: Op) -> Callable[..., Any]:
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    one = inspect.Parameter.VAR_POSITIONAL if op.variadic else inspect.Parameter.POSITIONAL_OR_KEYWORD
    least = len(op.operands) - op.optional
    parameters += [
        inspect.Parameter(n, one, annotation=Tensor, default=None if k >= least else inspect.Parameter.empty)
        for k, n in enumerate(op.operands)
    ]
    how = inspect.Parameter.KEYWORD_ONLY if op.variadic else inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters += [
        inspect.Parameter(key, how, default=inspect.Parameter.empty if default is REQUIRED else default)
        for key, default in sorted(op.attributes.items(), key=lambda item: item[1] is not REQUIRED)
    ]
    parameters.append(inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, default=None))
    several = len(op.results) > 1
    signature = inspect.Signature(parameters, return_annotation=tuple[Tensor, ...] if several else Tensor)

    def method(self: Operations, *args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            if (key := next((key for key in kwargs if key in op.absent), None)) is not None:
                raise GraphError(f"{op.name} has no {key}: {op.absent[key]}") from None
            raise GraphError(f"{op.name}{str(signature).replace('self, ', '')}: {error}") from None
        given = dict(bound.arguments)
        del given["self"]
        name = given.pop("name", None)
        operands = [given.pop(key, None) for key in op.operands]
        if op.variadic:
            operands = list(operands[0] or ())
            if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
                (operands,) = operands
        while op.optional and len(operands) > least and operands[-1] is None:
            operands.pop()
        named = enumerate(zip(op.names(len(operands)), operands))
        operands = [op.neutral.get(n) if x is None and k >= least else x for k, (n, x) in named]
        outputs = self.apply_node(op, operands, given, name).outputs
        return outputs[0] if len(outputs) == 1 else outputs

    method.__name__ = op.name
    method.__qualname__ = f"Graph.{op.name}"
    method.__doc__ = op.doc
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method


#: Annotation of a parameter, or its name where that is Any -> the kind of its values.
_INTEGERS = one_or_several(integer)
_KINDS: dict[str, Kind] = {
    "int": integer,
    "float": number,
    "bool": flag,
    **dict.fromkeys(("str", "Mode", "Beyond", "Reduction"), word),
    "int | Sequence[int]": _INTEGERS,
    "int | Sequence[int] | None": optional(_INTEGERS),
    "size": _INTEGERS,
    "dtype": optional(dtype),
    "index": array,
    "weights": optional(array),
}


def _composed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function as a method, which checks that tensors are the graph's and makes other arguments plain."""
    signature = inspect.signature(function)
    label = function.__name__.strip("_")

    @functools.wraps(function)
    def method(self: Operations, *args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise GraphError(f"{label}{str(signature).replace('self: Operations, ', '')}: {error}") from None
        for key, value in bound.arguments.items():
            parameter = signature.parameters[key]
            if parameter.annotation == "Tensor" or (parameter.annotation == "Tensor | None" and value is not None):
                several = parameter.kind is inspect.Parameter.VAR_POSITIONAL
                for tensor in value if several else (value,):
                    self._own(tensor, f"{label}, operand {key!r}")
            elif (kind := _KINDS.get(key if parameter.annotation == "Any" else parameter.annotation)) is not None:
                bound.arguments[key] = of_kind(f"{label}: {key}", kind, value)
        return function(*bound.args, **bound.kwargs)

    return method


def _cast(self: Operations, x: Tensor, dtype: Any, *, saturate: bool = True, name: str | None = None) -> Tensor:
    """Returns the tensor in another dtype: floats round to nearest even, or truncate and saturate to integers.

    NaN becomes the integer 0.  What an 8-bit float does not hold, infinity included, becomes its largest number, or
    with saturate=False infinity (NaN where the dtype has no infinity).
    """
    return self.apply(TABLE["identity"], (x,), {"dtype": as_dtype(dtype), "saturate": saturate}, name)


_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    means(meanings.split)(rearranging.split),
    means(meanings.flip)(rearranging.flip),
    means(meanings.reshaped)(rearranging.squeeze),
    means(meanings.reshaped)(rearranging.unsqueeze),
    means(meanings.space_to_depth)(rearranging.space_to_depth),
    means(meanings.depth_to_space)(rearranging.depth_to_space),
    *(
        means(getattr(meanings, f.__name__), weighs=f is composed.einsum, gradient=composed.GRADIENTS.get(f.__name__))(
            f
        )
        for f in composed.FUNCTIONS
    ),
    means(meanings.block_scale_dequantize)(block_scales.block_scale_dequantize),
    means(meanings.dequantize)(block_scales.dequantize),
    means(meanings.resample, weighs=True)(resampling.resample),
    means(meanings.interpolate, weighs=True)(resampling.interpolate),
    means(meanings.grid_sample, weighs=True)(resampling.grid_sample),
    means(meanings.sample)(sampling.sample),
)
#: Method of `Graph` -> what it is.
METHODS: dict[str, Callable[..., Any]] = {
    **{op.name: _method(op) for op in TABLE.values()},
    **{function.__name__: _composed(function) for function in _FUNCTIONS},
    "cast": _composed(_cast),
    "gradients": _composed(gradients.gradients),
}
