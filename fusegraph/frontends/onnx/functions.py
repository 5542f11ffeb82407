"""What ONNX's own schemas define: an operator's inputs and attributes, and its body of other operators.

An operator that the table lacks is expanded if ONNX defines it as a function of others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import AttributeProto, FunctionProto, NodeProto, TypeProto

from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.schemas import CONTRIBUTED
from fusegraph.frontends.onnx.tensors import DTYPES
from fusegraph.graph import Tensor

#: The oldest operator set whose operators the table's functions support; they also support all newer ones.
OLDEST = 11
#: Operators of which older versions are supported too -> the oldest such version.
_SINCE = {
    "Constant": 1,
    "Dropout": 7,
    "GRU": 7,
    "If": 1,
    "LSTM": 7,
    "Loop": 1,
    "RNN": 7,
    "Scan": 8,
    "Scatter": 9,
    "Upsample": 7,
}
_ELEMENTS = {dtype: element for element, dtype in DTYPES.items()}


def domain_of(name: str) -> str:
    """Returns a domain's name; that of the default domain is empty."""
    return "" if name == "ai.onnx" else name


def schema_of(node: NodeProto, version: int) -> onnx.defs.OpSchema | None:
    """Returns the schema of an operator in a version of its operator set; None without one, or if it is deprecated."""
    if not 0 < version < 2**31:
        return None
    domain = domain_of(node.domain)
    try:
        schema = CONTRIBUTED.get((domain, node.op_type)) or onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        return None
    return None if schema.deprecated else schema


def same_since(schema: onnx.defs.OpSchema, node: NodeProto) -> bool:
    """Tells whether an operator of an older operator set is supported: unchanged in `OLDEST`, or listed in `_SINCE`."""
    if schema.since_version >= _SINCE.get(schema.name, OLDEST):
        return True
    later = schema_of(node, OLDEST)
    return later is not None and later.since_version == schema.since_version


def defaults(schema: onnx.defs.OpSchema) -> dict[str, AttributeProto]:
    """Returns the attributes that have default values."""
    every = {name: known.default_value for name, known in schema.attributes.items()}
    return {name: value for name, value in every.items() if value.type != AttributeProto.UNDEFINED}


def has_body(schema: onnx.defs.OpSchema) -> bool:
    """Tells whether an operator is defined as a function of others."""
    return bool(schema.has_function or schema.has_context_dependent_function)


def check_counts(node: NodeProto, schema: onnx.defs.OpSchema, wanted: int) -> None:
    """Raises ModelError for more or fewer inputs or outputs than the schema allows, and for missing required inputs."""
    given = len(node.input)
    if not schema.min_input <= given <= schema.max_input:
        raise ModelError(f"it has {schema.min_input} to {schema.max_input} inputs, got {given}")
    if wanted > schema.max_output:
        raise ModelError(f"it has at most {schema.max_output} outputs, got {wanted}")
    for number, formal in enumerate(schema.inputs):
        optional = formal.option != onnx.defs.OpSchema.FormalParameterOption.Single
        if not optional and (number >= given or not node.input[number]):
            raise ModelError(f"its input {formal.name!r} is left out")
    variadic = schema.inputs and schema.inputs[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic
    if variadic and not all(node.input[len(schema.inputs) - 1 :]):
        raise ModelError(f"one of its inputs {schema.inputs[-1].name!r} is left out")


def check_attributes(schema: onnx.defs.OpSchema, given: Mapping[str, AttributeProto]) -> None:
    """Raises ModelError for attributes that are unknown, of another type, or missing."""
    for name, attribute in given.items():
        if name not in schema.attributes:
            raise ModelError(f"it has no attribute {name[:80]!r} in version {schema.since_version}")
        wanted = schema.attributes[name].type
        if int(attribute.type) != int(wanted.value):
            raise ModelError(f"attribute {name!r} has type {attribute.type}, not {int(wanted.value)}")
    for name, known in schema.attributes.items():
        if known.required and name not in given:
            raise ModelError(f"its attribute {name!r} is missing")


def body_of(
    node: NodeProto, schema: onnx.defs.OpSchema, version: int, inputs: Sequence[Tensor | None]
) -> FunctionProto | None:
    """Returns the function body of an operator for inputs of these types; None if ONNX defines none."""
    if not has_body(schema):
        return None
    depends = schema.has_context_dependent_function
    versions = schema.context_dependent_function_opset_versions if depends else schema.function_opset_versions
    best = max((v for v in versions if v <= version), default=min(versions))
    if not depends:
        found = schema.get_function_with_opset_version(best)
        return FunctionProto.FromString(found if isinstance(found, bytes) else found.SerializeToString())
    types = [_type(tensor).SerializeToString() for tensor in inputs]
    try:
        text = schema.get_context_dependent_function_with_opset_version(best, node.SerializeToString(), types)
    except Exception:  # whatever ONNX's own builder of bodies finds wrong with the node
        return None
    body = FunctionProto.FromString(text)
    return body if body.node else None


def _type(tensor: Tensor | None) -> TypeProto:
    """Returns a tensor's type in ONNX; an empty type for an input that is left out."""
    if tensor is None:
        return TypeProto()
    return onnx.helper.make_tensor_type_proto(_ELEMENTS[tensor.dtype], tensor.shape)


def without_absent(body: FunctionProto, inputs: Sequence[Tensor | None]) -> list[NodeProto]:
    """Returns the nodes of a function; inputs of the function that are left out are also left out of its nodes."""
    absent = {name for number, name in enumerate(body.input) if number >= len(inputs) or inputs[number] is None}
    nodes = []
    for node in body.node:
        if absent.intersection(node.input):
            changed = NodeProto()
            changed.CopyFrom(node)
            changed.input[:] = ["" if name in absent else name for name in node.input]
            node = changed
        nodes.append(node)
    return nodes


def resolved(node: NodeProto, attributes: Mapping[str, AttributeProto]) -> NodeProto:
    """Returns a node of a function with its references to attributes of the function replaced by their values.

    References to attributes without a value are removed.
    """
    if not any(attribute.ref_attr_name for attribute in node.attribute):
        return node
    result = NodeProto()
    result.CopyFrom(node)
    del result.attribute[:]
    for attribute in node.attribute:
        value = attributes.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if value is not None:
            made = result.attribute.add()
            made.CopyFrom(value)
            made.name = attribute.name
    return result
