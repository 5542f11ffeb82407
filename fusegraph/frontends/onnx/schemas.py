"""Schemas of operators that onnxruntime contributes to ONNX's, in its domain com.microsoft: onnx itself has none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onnx import AttributeProto, helper
from onnx.defs import OpSchema

MICROSOFT = "com.microsoft"
_FLOATS = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")
_INTEGER = OpSchema.AttrType.INT


def _inputs(required: Mapping[str, str], optional: Mapping[str, str]) -> list[OpSchema.FormalParameter]:
    """Returns the inputs of an operator, given as names and types."""
    option = OpSchema.FormalParameterOption
    made = [OpSchema.FormalParameter(name, kind, "") for name, kind in required.items()]
    return made + [
        OpSchema.FormalParameter(name, kind, "", param_option=option.Optional) for name, kind in optional.items()
    ]


def _number(name: str, default: int | None = None) -> OpSchema.Attribute:
    if default is None:
        return OpSchema.Attribute(name, _INTEGER, "", required=True)
    value: AttributeProto = helper.make_attribute(name, default)
    return OpSchema.Attribute(name, value, "")


def _types(**types: Iterable[str]) -> list[tuple[str, list[str], str]]:
    return [(name, list(allowed), "") for name, allowed in types.items()]


_KINDS = tuple(f"tensor({kind})" for kind in ("int8", "uint8", "int16", "uint16", "int32", "int4", "uint4"))
#: (domain, operator) -> schema.
CONTRIBUTED: Mapping[tuple[str, str], OpSchema] = {
    (schema.domain, schema.name): schema
    for schema in (
        OpSchema(
            "MatMulNBits",
            MICROSOFT,
            1,
            "",
            inputs=_inputs({"A": "T1", "B": "T2", "scales": "T1"}, {"zero_points": "T3", "g_idx": "T4", "bias": "T1"}),
            outputs=_inputs({"Y": "T1"}, {}),
            type_constraints=_types(
                T1=_FLOATS,
                T2=("tensor(uint8)",),
                T3=("tensor(uint8)", "tensor(int32)", *_FLOATS),
                T4=("tensor(int32)",),
            ),
            attributes=[
                *(_number(name) for name in ("K", "N", "block_size")),
                *(
                    _number(name, value)
                    for name, value in (("bits", 4), ("accuracy_level", 0), ("weight_prepacked", 0))
                ),
            ],
        ),
        OpSchema(
            "DequantizeLinear",
            MICROSOFT,
            1,
            "",
            inputs=_inputs({"x": "T1", "x_scale": "T2"}, {"x_zero_point": "T1"}),
            outputs=_inputs({"y": "T2"}, {}),
            type_constraints=_types(T1=_KINDS, T2=_FLOATS),
            attributes=[_number("axis", 1), _number("block_size", 0)],
        ),
    )
}
