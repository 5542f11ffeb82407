"""What all pointwise ops share: broadcasting, result dtypes, attribute checks; `pointwise` makes an entry."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from fusegraph.dtypes import ALL, DType, bool_, float32, float64, int32
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.layout import broadcast
from fusegraph.ops.base import Array, Attributes, Cost, Kind, Op, Role, TensorType, Types, register

#: (attribute name, value given, promoted operand dtype, result shape) -> value in canonical form.
Check: TypeAlias = Callable[[str, Any, DType, tuple[int, ...]], Any]
Template: TypeAlias = str | Callable[[Attributes], str]
ROUNDING, PAIR, SIMPLE, FUNCTION = Cost


# ---- checks of attribute values


def number(name: str, value: Any, dtype: DType, _: tuple[int, ...]) -> float | int:
    """Returns a finite number that the compute type of the operands' promoted dtype holds: a float or an integer."""
    if not math.isfinite(value):
        raise AttributeValueError(f"{name} is a finite number, got {value!r}")
    if dtype.is_float:
        limit = (float64 if dtype == float64 else float32).max
        if abs(float(value)) > limit:
            raise AttributeValueError(
                f"{name} = {value!r} does not fit in the compute type, whose largest is {limit:.6g}"
            )
        return float(value)
    if value != int(value) or not int(dtype.min) <= int(value) <= int(dtype.max):
        raise AttributeValueError(
            f"{name} = {value!r} is no {dtype}, an integer in [{dtype.min}, {dtype.max}]; cast the operand to a float"
        )
    return int(value)


def positive(name: str, value: Any, dtype: DType, shape: tuple[int, ...]) -> float | int:
    """Returns a finite number above zero."""
    result = number(name, value, dtype, shape)
    if result <= 0:
        raise AttributeValueError(f"{name} is positive, got {value!r}")
    return result


def optional_number(name: str, value: Any, dtype: DType, shape: tuple[int, ...]) -> float | int | None:
    """Returns None or a finite number."""
    return None if value is None else number(name, value, dtype, shape)


def unchecked(name: str, value: Any, _: DType, __: tuple[int, ...]) -> Any:
    """Returns any value of the attribute's kind (`ops.attributes`)."""
    return value


def axis(name: str, value: Any, _: DType, shape: tuple[int, ...]) -> int:
    """Returns an axis of the result, made non-negative."""
    if not -len(shape) <= value < len(shape):
        raise AttributeValueError(f"{name} {value} is not one of the {len(shape)} axes of {list(shape)}")
    if shape[value] > int32.max:
        raise ShapeError(f"{name} {value} of {list(shape)} is too long for an int32 index")
    return int(value) % len(shape)


# ---- entries


def accepted_kinds(op_name: str, dtype: DType, kinds: Sequence[str]) -> None:
    """Raises DTypeError, listing the dtypes an op takes, if it does not take this one."""
    if dtype.kind not in kinds:
        listed = ", ".join(d.name for kind in kinds for d in ALL if d.kind == kind)
        raise DTypeError(f"{op_name} does not take {dtype}; cast to one of {listed}")


def pointwise(
    name: str,
    reference: Callable[..., Array],
    doc: str,
    cost: Cost,
    role: Role | None = None,
    *,
    operands: Sequence[str] = ("a", "b"),
    attributes: Mapping[str, tuple[Any, Check]] | None = None,
    validate: Callable[[dict[str, Any], DType], None] | None = None,
    kinds: Sequence[str] = (),
    result: DType | None = None,
    ulps: float = 0.5,
    cudnn: bool = True,
    **rest: Any,
) -> Op:
    """Registers a pointwise op and returns it.

    attributes  name -> (default, check of one value); validate checks them together, given the promoted dtype.
    kinds       the operand classes the op accepts, where that is not the classes it has an expression for.
    result      dtype of the result; by default that of the attribute ``dtype`` if the op has one and it is given, else
                the promoted operand dtype.
    cudnn       whether cuDNN's graph API has a mode of this name.
    float, int, bool  expressions; by default, of these kinds or of floats alone, math::name of the operands and
                attributes.

    NumPy's floating-point warnings are off while the reference runs.  The other arguments are `Op`'s.
    """
    checks = {key: check for key, (_, check) in (attributes or {}).items()}
    cuda: Mapping[str, Template] = {kind: rest.pop(kind) for kind in ("float", "int", "bool") if kind in rest}
    kinds = kinds or tuple(cuda) or ("float",)
    if not cuda and "shapes" not in rest:
        cuda = dict.fromkeys(kinds, f"math::{name}({', '.join(f'{{{key}}}' for key in (*operands, *checks))})")

    def normalize(types: Types, values: Attributes) -> dict[str, Any]:
        dtype, shape = op.promoted(types), broadcast([t.shape for t in types])
        accepted_kinds(name, dtype, kinds)
        normal = {key: check(key, values[key], dtype, shape) for key, check in checks.items()}
        if validate is not None:
            validate(normal, dtype)
        return normal

    def infer(types: Types, values: Attributes) -> TensorType:
        return TensorType(broadcast([t.shape for t in types]), result or values.get("dtype") or op.promoted(types))

    def quiet_reference(*arrays: Array, **values: Any) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(reference(*arrays, **values))

    op = Op(
        name=name,
        kind=Kind.POINTWISE,
        role=role,
        cost=cost,
        operands=tuple(operands),
        infer=infer,
        reference=quiet_reference,
        attributes={key: default for key, (default, _) in (attributes or {}).items()},
        normalize=normalize,
        cuda=cuda,
        ulps=ulps,
        cudnn=name if cudnn else None,
        doc=doc,
        **rest,
    )
    return register(op)


#: Ops of one operand; gradients of activations, by that of the result and the activation's operand; ops that are bool.
unary = partial(pointwise, operands=("x",))
backward = partial(pointwise, operands=("loss", "input"))
predicate = partial(pointwise, result=bool_, ulps=0)
