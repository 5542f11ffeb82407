"""Graphs as ONNX models, where ONNX has operators for their ops.

Composites are written out first (`passes.decompose`), so what remains are products, reductions, pointwise functions and
movement, each of which is one operator of ONNX or a few.  Types are made equal by casts, as ONNX promotes none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from fusegraph.dtypes import DType, bool_, int64
from fusegraph.engines.reference import apply_all
from fusegraph.errors import NotSupportedError
from fusegraph.frontends.onnx.tensors import DTYPES
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.base import Array, Kind, Role
from fusegraph.ops.convert import from_reference, to_reference
from fusegraph.passes.decompose import decompose

OPSET = 20
_ELEMENTS = {dtype: element for element, dtype in reversed(DTYPES.items())}

#: Ops that are the operator of their name in ONNX, but for capitals.
_NAMESAKES = """sigmoid tanh mish neg abs sign reciprocal sqrt ceil floor round exp log asin acos atan sinh cosh asinh
    acosh atanh erf sin cos tan gelu add sub mul div max min pow"""
#: Op -> the operator of ONNX that is the same function of the same operands, and its attributes.
_SAME: Mapping[str, tuple[str, dict[str, Any]]] = {
    **{word: (word.capitalize(), {}) for word in _NAMESAKES.split()},
    "isnan": ("IsNaN", {}), "logical_not": ("Not", {}), "logical_and": ("And", {}), "logical_or": ("Or", {}),
    "bitwise_not": ("BitwiseNot", {}), "bitwise_and": ("BitwiseAnd", {}), "bitwise_or": ("BitwiseOr", {}),
    "bitwise_xor": ("BitwiseXor", {}), "bias": ("Add", {}), "scale": ("Mul", {}), "mod": ("Mod", {"fmod": 1}),
    "cmp_eq": ("Equal", {}), "cmp_gt": ("Greater", {}), "cmp_ge": ("GreaterOrEqual", {}), "cmp_lt": ("Less", {}),
    "cmp_le": ("LessOrEqual", {}), "gelu_approx_tanh": ("Gelu", {"approximate": "tanh"}),
    "hardsigmoid": ("HardSigmoid", {"alpha": 1 / 6, "beta": 0.5}), "hardswish": ("HardSwish", {}),
}  # fmt: skip
#: Ops whose operator takes and gives bool, and those whose operator gives bool of numbers.
_LOGICAL = ("logical_not", "logical_and", "logical_or")
_TESTS = ("isnan", "cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le")
_REDUCTIONS = {
    "add": "ReduceSum", "mul": "ReduceProd", "min": "ReduceMin", "max": "ReduceMax", "avg": "ReduceMean",
    "norm1": "ReduceL1", "norm2": "ReduceL2", "logaddexp": "ReduceLogSumExp", "amax": "ReduceMax",
}  # fmt: skip
_PADS = {"constant": "constant", "replicate": "edge", "reflect": "reflect"}


def to_onnx(graph: Graph, file: Any = None) -> onnx.ModelProto:
    """Returns the graph as an ONNX model, and writes it to ``file`` if that is given.

    Names of inputs and outputs are those of tensors; constants are initializers.  Layouts are not part of ONNX.  Raises
    NotSupportedError for assignments, for sizes that vary, and for ops and dtypes that ONNX has not, by name.
    """
    if graph.updates:
        raise NotSupportedError(f"graph {graph.name!r} assigns to inputs, which ONNX models cannot")
    model = _Exporter(decompose(graph).graph).model()
    if file is not None:
        onnx.save(model, file)
    return model


class _Exporter:
    """Writes the nodes of a graph without composites."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._nodes, self._initializers = graph, list[Any](), dict[str, Any]()
        self._known: dict[Tensor, Array] = {}  # reference values of what follows from constants alone
        self._names = set(graph.tensors)

    def model(self) -> onnx.ModelProto:
        for tensor in self._graph.tensors.values():
            if tensor.value is not None:
                self._known[tensor] = to_reference(tensor.value, tensor.dtype)
        for node in self._graph.nodes:
            if all(t in self._known or name in node.op.shapes for t, name in zip(node.inputs, node.op.operands)):
                blank = [self._known.get(t, np.zeros(t.shape)) for t in node.inputs]
                self._known |= zip(node.outputs, apply_all(node, blank))
            else:
                self._node(node)
        for tensor in self._graph.outputs:
            if tensor in self._known:
                self._write("Identity", [self._operand(tensor, tensor.dtype)], tensor)
        ends = [[self._info(t) for t in tensors] for tensors in (self._graph.inputs, self._graph.outputs)]
        made = helper.make_graph(self._nodes, self._graph.name, *ends, list(self._initializers.values()))
        model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="fusegraph")
        model.ir_version = min(model.ir_version, 10)
        onnx.checker.check_model(model)
        return model

    # ---- names and types

    def _info(self, tensor: Tensor) -> Any:
        return helper.make_tensor_value_info(tensor.name, self._element(tensor.dtype), self._sizes(tensor.shape))

    def _sizes(self, shape: Sequence[int]) -> list[int]:
        if any(type(n) is not int for n in shape):
            raise NotSupportedError(f"graph {self._graph.name!r} has sizes that vary; give them first")
        return list(shape)

    def _element(self, dtype: DType) -> int:
        if dtype not in _ELEMENTS:
            raise NotSupportedError(f"ONNX has no type {dtype}")
        return _ELEMENTS[dtype]

    def _new(self, stem: str) -> str:
        number = 1
        while (name := f"{stem} {number}") in self._names:
            number += 1
        self._names.add(name)
        return name

    def constant(self, value: Array, dtype: DType, stem: str = "constant") -> str:
        """Returns the name of an initializer."""
        name = self._new(stem)
        stored = np.array(from_reference(value, dtype), order="C")
        made = helper.make_tensor(name, self._element(dtype), stored.shape, stored.tobytes(), raw=True)
        self._initializers[name] = made
        return name

    def integers(self, values: Sequence[int]) -> str:
        """Returns the name of an initializer of int64."""
        name = self._new("integers")
        self._initializers[name] = numpy_helper.from_array(np.array(values, np.int64), name)
        return name

    def _operand(self, tensor: Tensor, dtype: DType) -> str:
        """Returns the name of a tensor's value in a dtype."""
        if tensor in self._known:
            value = self._known[tensor]
            real = value if dtype.is_float or tensor.dtype.is_float else value.astype(dtype.numpy)
            return self.constant(np.asarray(real, np.float64) if dtype.is_float else real, dtype, tensor.name)
        return tensor.name if tensor.dtype == dtype else self.add("Cast", tensor.name, to=self._element(dtype))

    # ---- nodes

    def add(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Adds a node and returns the name of its (first) result."""
        names = [self._new(operator) for _ in range(outputs)]
        self._nodes.append(helper.make_node(operator, list(inputs), names, **attributes))
        return names[0]

    def _write(self, operator: str, inputs: Sequence[str], tensor: Tensor, **attributes: Any) -> None:
        self._nodes.append(helper.make_node(operator, list(inputs), [tensor.name], **attributes))

    def _node(self, node: Node) -> None:
        common = self._common(node)
        masked = node.op.role is Role.SELECT
        inputs = [
            self._operand(t, bool_ if masked and n == 2 else common or t.dtype) for n, t in enumerate(node.inputs)
        ]
        rule = _RULES.get(node.op.name) or _KINDS.get(node.kind)
        if node.op.name in _SAME:
            operator, attributes = _SAME[node.op.name]
            found = self.add(operator, *inputs, **attributes)
        elif rule is not None:
            found = rule(self, node, inputs)
        else:
            raise NotSupportedError(f"ONNX has no operator for {node.op.name} {node.name!r}")
        made = bool_ if node.op.name in (*_LOGICAL, *_TESTS) else common or node.inputs[0].dtype
        last: Any = self._nodes[-1].output if self._nodes else []
        if made == node.output.dtype and found in last:
            last[list(last).index(found)] = node.output.name
        elif made == node.output.dtype:
            self._write("Identity", [found], node.output)
        else:
            self._write("Cast", [self._bounded(found, made, node.output.dtype)], node.output,
                        to=self._element(node.output.dtype))  # fmt: skip

    def _bounded(self, name: str, source: DType, target: DType) -> str:
        """Returns floats within the range of integers that they are cast to: what others become, ONNX leaves open."""
        if not source.is_float or target.is_float or target.is_bool:
            return name
        low, high = float(target.min), float(target.max)
        if from_reference(np.asarray(high), source).astype(np.float64) > target.max:  # rounded up
            high = float(np.nextafter(source.numpy.type(high), source.numpy.type(0)))
        zero, least, most = (self.constant(np.asarray(value), source) for value in (0.0, low, high))
        return self.add("Clip", self.add("Where", self.add("IsNaN", name), zero, name), least, most)

    def _common(self, node: Node) -> DType | None:
        """Returns the type in which a node computes; None if its operands keep theirs."""
        types = tuple(t.type for t in node.inputs)
        if node.op.name in _LOGICAL:
            return bool_
        if node.kind is Kind.CONTRACTION:
            return node.output.dtype if node.output.dtype.is_float else node.op.promoted(types)
        if node.kind is not Kind.POINTWISE or node.op.role in (Role.CAST, Role.NARROW):
            return None
        if node.op.role is Role.SELECT:
            return node.output.dtype
        return node.op.promoted(types)


# --- rules: (exporter, node, names of its operands) -> the name of the result, in the type of the operands

_Rule = Callable[[_Exporter, Node, Sequence[str]], str]


def _number(e: _Exporter, node: Node, value: float) -> str:
    return e.constant(np.asarray(value), node.inputs[0].dtype)


def _relu(e: _Exporter, node: Node, x: Sequence[str]) -> str:
    slope, low, high = (node.attributes[key] for key in ("negative_slope", "lower_clip", "upper_clip"))
    if not slope and not low and high is None:
        return e.add("Relu", *x)
    if slope:
        low_ = _number(e, node, low)
        below = e.add("Mul", e.add("Sub", x[0], low_), _number(e, node, slope))
        inner = e.add("Where", e.add("Greater", x[0], low_), x[0], e.add("Add", below, low_))
    else:
        inner = e.add("Max", x[0], _number(e, node, low))
    return inner if high is None else e.add("Min", inner, _number(e, node, high))


def _clamp(e: _Exporter, node: Node, x: Sequence[str]) -> str:
    bounds = [node.attributes[key] for key in ("min", "max")]
    return e.add("Clip", x[0], *("" if b is None else _number(e, node, b) for b in bounds))


def _softplus(e: _Exporter, node: Node, x: Sequence[str]) -> str:
    beta = _number(e, node, node.attributes["beta"])
    return e.add("Div", e.add("Softplus", e.add("Mul", x[0], beta)), beta)


def _swish(e: _Exporter, node: Node, x: Sequence[str]) -> str:
    return e.add("Mul", x[0], e.add("Sigmoid", e.add("Mul", x[0], _number(e, node, node.attributes["beta"]))))


def _convolution(e: _Exporter, node: Node, x: Sequence[str]) -> str:
    at = node.attributes
    if at["mode"] != "cross_correlation":
        raise NotSupportedError(f"ONNX has no convolution with turned filters: {node.name!r}")
    pads = [before for before, _ in at["padding"]] + [after for _, after in at["padding"]]
    steps: dict[str, Any] = {"strides": list(at["stride"]), "dilations": list(at["dilation"])}
    return e.add("Conv", *x, pads=pads, group=at["groups"], **steps)


def _reduction(e: _Exporter, node: Node, x: Sequence[str]) -> str:
    mode, keepdims = node.attributes["mode"], int(node.attributes["keepdims"])
    if mode not in _REDUCTIONS:
        raise NotSupportedError(f"ONNX has no reduction {mode!r}: {node.name!r}")
    inner = e.add("Abs", *x) if mode == "amax" else x[0]
    return e.add(_REDUCTIONS[mode], inner, e.integers(node.attributes["axes"]), keepdims=keepdims)


def _slice(e: _Exporter, node: Node, x: Sequence[str]) -> str:
    starts, steps, shape = node.attributes["starts"], node.attributes["steps"], node.output.shape
    ends = [start + count * step for start, count, step in zip(starts, shape, steps)]
    ends = [end if end >= 0 else int(int64.min) for end in ends]
    axes = range(len(shape))
    return e.add("Slice", *x, e.integers(starts), e.integers(ends), e.integers(axes), e.integers(steps))


def _gather(e: _Exporter, node: Node, x: Sequence[str]) -> str:
    """Returns elements at positions; those outside are the nearest inside, of which ONNX knows nothing."""
    axis, index = node.attributes["axis"], node.inputs[1]
    size = node.inputs[0].shape[axis]
    ends = [e.constant(np.asarray(n, index.dtype.numpy), index.dtype) for n in (0, max(size - 1, 0))]
    return e.add("Gather", x[0], e.add("Clip", x[1], *ends), axis=axis)


def _pad(e: _Exporter, node: Node, x: Sequence[str]) -> str:
    at = node.attributes
    if at["mode"] not in _PADS:
        raise NotSupportedError(f"ONNX has no padding {at['mode']!r}: {node.name!r}")
    pads = e.integers([before for before, _ in at["padding"]] + [after for _, after in at["padding"]])
    value = [_number(e, node, at["value"])] if at["mode"] == "constant" else []
    return e.add("Pad", *x, pads, *value, mode=_PADS[at["mode"]])


def _pool(e: _Exporter, node: Node, x: Sequence[str]) -> str:
    at, rank = node.attributes, node.inputs[0].rank
    if at["axes"] not in (None, tuple(range(2, rank))):
        raise NotSupportedError(f"ONNX pools images over all but two dimensions: {node.name!r}")
    pads = [before for before, _ in at["padding"]] + [after for _, after in at["padding"]]
    how: dict[str, Any] = {"kernel_shape": list(at["window"]), "strides": list(at["stride"]), "pads": pads}
    how |= {"ceil_mode": int(at["ceil_mode"])}
    if node.op.name == "max_pool":
        return e.add("MaxPool", *x, dilations=list(at["dilation"]), **how)
    return e.add("AveragePool", *x, count_include_pad=int(at["count_include_pad"]), **how)


def _sorted(e: _Exporter, node: Node, x: Sequence[str]) -> str:
    at, axis = node.attributes, node.attributes["axis"]
    count, largest = at.get("k", node.inputs[0].shape[axis]), at.get("largest", at.get("descending", False))
    return e.add("TopK", x[0], e.integers([count]), outputs=2, axis=axis, largest=int(largest))


_RULES: Mapping[str, _Rule] = {
    "relu": _relu,
    "clamp": _clamp,
    "softplus": _softplus,
    "swish": _swish,
    "leaky_relu": lambda e, n, x: e.add("LeakyRelu", *x, alpha=float(n.attributes["negative_slope"])),
    "elu": lambda e, n, x: e.add("Elu", *x, alpha=float(n.attributes["alpha"])),
    "rsqrt": lambda e, n, x: e.add("Reciprocal", e.add("Sqrt", *x)),
    "exp2": lambda e, n, x: e.add("Pow", _number(e, n, 2.0), *x),
    "log2": lambda e, n, x: e.add("Div", e.add("Log", *x), _number(e, n, float(np.log(2)))),
    "trunc": lambda e, n, x: e.add("Mul", e.add("Sign", *x), e.add("Floor", e.add("Abs", *x))),
    "add_square": lambda e, n, x: e.add("Add", x[0], e.add("Mul", x[1], x[1])),
    "cmp_neq": lambda e, n, x: e.add("Not", e.add("Equal", *x)),
    "binary_select": lambda e, n, x: e.add("Where", x[2], x[0], x[1]),
    "identity": lambda e, n, x: x[0],
    "narrow": lambda e, n, x: x[0],
    "matmul": lambda e, n, x: e.add("MatMul", *x),
    "conv_fprop": _convolution,
    "transpose": lambda e, n, x: e.add("Transpose", *x, perm=list(n.attributes["perm"])),
    "reshape": lambda e, n, x: e.add("Reshape", *x, e.integers(n.output.shape), allowzero=1),
    "broadcast": lambda e, n, x: e.add("Expand", *x, e.integers(n.output.shape)),
    "slice": _slice,
    "pad": _pad,
    "concatenate": lambda e, n, x: e.add("Concat", *x, axis=n.attributes["axis"]),
    "gather": _gather,
    "max_pool": _pool,
    "avg_pool": _pool,
    "cumsum": lambda e, n, x: e.add(
        "CumSum", *x, e.integers([n.attributes["axis"]]), reverse=int(n.attributes["reverse"])
    ),
    "sort": _sorted,
    "topk": _sorted,
}
_KINDS: Mapping[Kind, _Rule] = {Kind.REDUCTION: _reduction}
