"""How each type of cudnn-frontend's nodes is written with the ops of the table.

A rule makes a node's results.  It also lists the ports and parameters of a node that it supports, so that `importer`
can report everything unsupported before it builds anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fusegraph.dtypes import DType, bfloat16, float16, float32, promote
from fusegraph.errors import NotSupportedError, ShapeError
from fusegraph.frontends.cudnn import attention, attention_backward, attention_backward_fp8, experts
from fusegraph.frontends.cudnn.attention_asked import PARAMS
from fusegraph.frontends.cudnn.layouts import is_logical
from fusegraph.frontends.cudnn.reading import Reading
from fusegraph.graph import Tensor
from fusegraph.layout import packed_strides, stride_order
from fusegraph.lowering.cudnn import CONVOLUTIONS, KEYWORDS
from fusegraph.lowering.cudnn_norms import OPERANDS
from fusegraph.ops import TABLE
from fusegraph.ops.base import Op
from fusegraph.ops.modes import MODES

Results = Mapping[str, Tensor]


@dataclass(frozen=True)
class Rule:
    """How nodes of a type are imported.

    make    (reading, node) -> results by port.
    ports   those that a node may have; ``inputs_*`` stands for inputs_0, inputs_1, ...
    params  those that may be set.
    ragged  whether tensors may be ragged.
    """

    make: Callable[[Reading, Any], Results]
    ports: tuple[str, ...]
    params: tuple[str, ...] = ()
    ragged: bool = False


# ---- pointwise

#: Modes whose results do not depend on the type that they are computed in: integers stay integers.
_EXACT = frozenset(
    [op.name for op in TABLE.values() if op.name.startswith(("cmp_", "logical_"))]
    + ["binary_select", "gen_index", "max", "min", "abs", "neg", "ceil", "floor"]
)


def pointwise_op(node: Any) -> Op | None:
    """Returns the op of a pointwise node; None if the table has none of that name."""
    op = TABLE.get(str(node.params.get("mode")))
    return op if op is not None and op.cudnn == op.name else None


def _pointwise(reading: Reading, node: Any) -> Results:
    op = pointwise_op(node)
    assert op is not None
    operands = [reading.operand(node, port) for port in node.inputs]
    wanted = reading.dtype(node, "OUT_0")
    if op.name == "identity":
        return {"OUT_0": reading.graph.apply(op, operands, {"dtype": wanted if wanted != operands[0].dtype else None})}
    words = KEYWORDS.get(op.name, {})
    values = {key: node.params[word] for key, word in words.items() if word in node.params}
    if op.name == "gen_index":
        values["axis"] = node.params["axis"]
    elif (wide := _wider(op, operands, wanted, reading.computes_in(node))) is not None:
        # If one operand is wider, the op converts the others to its dtype, which then suffices for the result.
        first = next(k for k, name in enumerate(op.names(len(operands))) if name not in op.masks)
        operands[first] = reading.cast(operands[first], wide)
        if not operands[first].dtype.is_float or any(t.dtype.is_int for t in operands):
            operands = [t if n in op.masks else reading.cast(t, wide) for n, t in zip(op.operands, operands)]
    return {"OUT_0": reading.graph.apply(op, operands, values)}


def _wider(op: Op, operands: list[Tensor], wanted: DType, compute: DType) -> DType | None:
    """Returns the dtype to which operands are converted first; None if they are not.

    It is the result's dtype if that is wider than theirs, so that the result is not rounded to theirs.  For arithmetic
    on integers that is done in floats, it is the dtype of the computation.
    """
    common = op.promoted(tuple(t.type for t in operands))
    if common.is_float:
        return wanted if wanted.is_float and wanted != common and promote(wanted, common) == wanted else None
    return compute if compute != common and op.name not in _EXACT else None


# ---- contractions


def _operands(reading: Reading, node: Any, ports: tuple[str, ...]) -> list[Tensor]:
    """Returns the operands of a product.

    A virtual FLOAT operand is rounded to the dtype of the other if that has 16 bits: tensor cores multiply two operands
    of one type.  If blocks of both are scaled, they are bfloat16, which holds what that makes of 8-bit floats.
    """
    operands = [reading.operand(node, port) for port in ports]
    virtual = all(node.inputs[port].is_virtual for port in ports)
    if virtual and all(t.dtype == float32 and _holds_few_bits(reading, t) for t in operands):
        operands = [reading.cast(t, bfloat16) for t in operands]
    for here, other in ((0, 1), (1, 0)):
        mine, beside = operands[here].dtype, operands[other].dtype
        if mine == float32 and node.inputs[ports[here]].is_virtual and beside in (float16, bfloat16):
            operands[here] = reading.cast(operands[here], beside)
    return operands


def _holds_few_bits(reading: Reading, tensor: Tensor) -> bool:
    """Returns true for scaled blocks of which bfloat16 holds all digits: those of an element and of a scale are 8."""
    call = reading.graph.calls.get(tensor)
    if call is None or call.name != "block_scale_dequantize":
        return False
    return all(t.dtype.is_float and t.dtype.bits <= 8 for t in call.operands)


def _product(reading: Reading, name: str, node: Any, ports: tuple[str, ...], out: str, **values: Any) -> Results:
    operands = _operands(reading, node, ports)
    wanted = reading.dtype(node, out)
    floats = promote(operands[0].dtype, operands[1].dtype).is_float
    dtype = wanted if wanted.is_float or not floats else None
    return {out: reading.graph.apply(TABLE[name], operands, {**values, "dtype": dtype})}


def _matmul(reading: Reading, node: Any) -> Results:
    return _product(reading, "matmul", node, ("A", "B"), "C")


def _convolution(name: str, out: str) -> Rule:
    ports = CONVOLUTIONS[name]
    params = ("padding", "pre_padding", "post_padding", "stride", "dilation", "convolution_mode")

    def make(reading: Reading, node: Any) -> Results:
        given = node.params
        spatial = len(node.inputs[ports[0]].dim) - 2
        same = given.get("padding") or [0] * spatial
        before, after = (given.get(key) or same for key in ("pre_padding", "post_padding"))
        values: dict[str, Any] = {
            "padding": tuple(zip(map(int, before), map(int, after))),
            "stride": tuple(map(int, given.get("stride") or [1] * spatial)),
            "dilation": tuple(map(int, given.get("dilation") or [1] * spatial)),
            "mode": _mode(given.get("convolution_mode")),
        }
        first, second = (reading.operand(node, port).shape for port in ports)
        size = reading.shape(node, out)
        if name == "conv_fprop":
            values["groups"] = max(first[1] // max(second[1], 1), 1)
        elif name == "conv_dgrad":
            values["size"] = size[2:] if size else None
            values["groups"] = max(size[1] // max(second[1], 1), 1) if size else 1
        else:
            if size is None:
                raise ShapeError("the size of a filter's gradient is not known from its operands; use set_dim")
            values |= {"taps": size[2:], "groups": max(first[1] // max(size[1], 1), 1)}
        return _product(reading, name, node, ports, out, **values)

    return Rule(make, ports, params)


def _mode(mode: Any) -> str:
    return "convolution" if getattr(mode, "name", "") == "CONVOLUTION" else "cross_correlation"


def _block_scale_dequantize(reading: Reading, node: Any) -> Results:
    if node.params.get("is_negative_scale"):
        raise NotSupportedError("is_negative_scale")
    x, scale = reading.operand(node, "input"), reading.operand(node, "descale")
    block = [int(n) for n in node.params.get("block_size") or ()]
    return {"OUT_0": reading.graph.block_scale_dequantize(x, scale, block, reading.dtype(node, "OUT_0"))}


# ---- reductions


def _reduction(reading: Reading, node: Any) -> Results:
    x, shape, wanted = reading.operand(node, "input"), reading.shape(node, "OUT_0"), reading.dtype(node, "OUT_0")
    if shape is None:
        raise ShapeError("which dimensions are reduced is not known; use set_dim on the result")
    if len(shape) != x.rank or any(n not in (1, size) for n, size in zip(shape, x.shape)):
        raise ShapeError(f"the result {list(shape)} is no reduction of {list(x.shape)}")
    compute = reading.computes_in(node)
    x = reading.cast(x, compute) if not x.dtype.is_float and compute != x.dtype else x
    mode = node.params["mode"].name.lower()
    axes = tuple(d for d, (n, size) in enumerate(zip(shape, x.shape)) if n != size)
    exact = x.dtype.is_int and ((mode in MODES and MODES[mode].selects) or wanted.name not in ("int32", "int64"))
    dtype = wanted if wanted.is_float == x.dtype.is_float and not wanted.is_bool and not exact else None
    return {"OUT_0": reading.graph.reduction(x, mode=mode, axes=axes, dtype=dtype)}


# ---- norms


def _norm(name: str, *outs: str) -> Rule:
    """Returns the rule of a norm or of the gradient of one; ``outs`` are the ports of its results."""
    op, ports = TABLE[name], OPERANDS[name]
    numbers = tuple(key for key in ("epsilon", "momentum") if key in op.attributes)
    params = tuple(key for key in ("norm_forward_phase",) if key in op.attributes)
    more = ("bias",) if name == "rmsnorm" else ()

    def make(reading: Reading, node: Any) -> Results:
        wanted = reading.dtype(node, outs[0])
        x = reading.operand(node, "input")
        wide = wanted if promote(wanted, x.dtype) == wanted else x.dtype
        values: dict[str, Any] = {}
        if "axes" in op.attributes:
            values["axes"] = _axes(reading, node, 1 if name.startswith("ada") else 0)
        if params:
            values["norm_forward_phase"] = node.params["norm_forward_phase"].name.lower()
        values |= {key: reading.number(node, key) for key in numbers}
        operands: list[Any] = []
        for port in ports:
            if port in node.inputs:
                given = reading.operand(node, port)
                operands.append(reading.cast(given, wide) if port == "input" else given)
            elif port in ("scale", "bias"):
                operands.append(reading.number_tensor(1.0 if port == "scale" else 0.0, x.rank))
        results = reading.composite(op, operands, values)
        found = dict(zip(outs, results))
        if "bias" in more and "bias" in node.inputs:
            found[outs[0]] = reading.graph.add(found[outs[0]], reading.operand(node, "bias"))
        if name == "rmsnorm_backward" and "DBias" in node.outputs:
            found["DBias"] = _sum_to(reading, node)
        return found

    return Rule(make, (*ports, *numbers, *more), (*params, *(("has_dbias",) if name == "rmsnorm_backward" else ())))


def _axes(reading: Reading, node: Any, first: int) -> tuple[int, ...]:
    """Returns the normalized dimensions: those in which scale is not 1, or all but the first without a scale.

    Raises ShapeError if there are none.
    """
    shape = reading.operand(node, "input").shape
    if "scale" not in node.inputs:
        return tuple(range(1, len(shape)))
    scale = reading.operand(node, "scale").shape
    axes = tuple(d for d in range(first, len(shape)) if d < len(scale) and scale[d] != 1)
    axes = axes or tuple(d for d in range(1, len(shape)) if shape[d] == 1)
    if not axes:
        raise ShapeError(f"scale {list(scale)} has no dimension along which {list(shape)} would be normalized")
    return axes


def _sum_to(reading: Reading, node: Any) -> Tensor:
    """Returns the gradient by the bias: the loss summed over the dimensions along which the bias is broadcast."""
    loss, scale = reading.operand(node, "grad"), reading.operand(node, "scale")
    shared = tuple(d for d, n in enumerate(scale.shape) if n == 1 and loss.shape[d] != 1)
    total: Tensor = reading.graph.reduction(loss, mode="add", axes=shared, dtype=reading.dtype(node, "DBias"))
    return total


# ---- movement


def _reshape(reading: Reading, node: Any) -> Results:
    """Makes a reshape: LOGICAL keeps the row-major order of elements, VIEW_ONLY their places in memory."""
    x, shape, graph = reading.operand(node, "input"), reading.shape(node, "OUT_0"), reading.graph
    if shape is None:
        raise ShapeError("the shape of a reshape's result is not known; use set_dim")
    if is_logical(node.params):
        return {"OUT_0": graph.reshape(x, shape=shape)}
    source, target = reading.strides(node.inputs["input"]), reading.strides(node.outputs["OUT_0"])
    order, other = stride_order(x.shape, source), stride_order(shape, target)
    for what, sizes, strides, dims in (("operand", x.shape, source, order), ("result", shape, target, other)):
        packed = packed_strides(sizes, dims)
        if any(n > 1 and a != b for n, a, b in zip(sizes, strides, packed)):
            raise ShapeError(
                f"the strides {list(strides)} of the {what} {list(sizes)} leave gaps: no view of all of it"
            )
    flat = graph.transpose(x, perm=order) if order != tuple(range(x.rank)) else x
    laid = graph.reshape(flat, shape=tuple(shape[d] for d in other))
    back = tuple(other.index(d) for d in range(len(shape)))
    return {"OUT_0": graph.transpose(laid, perm=back) if back != tuple(range(len(shape))) else laid}


def _transpose(reading: Reading, node: Any) -> Results:
    return {"OUT_0": reading.graph.transpose(reading.operand(node, "input"), perm=node.params["permutation"])}


def _slice(reading: Reading, node: Any) -> Results:
    x = reading.operand(node, "input")
    bounds = [s.indices(n) for s, n in zip(node.params["slices"], x.shape)]
    starts, stops, steps = (tuple(each) for each in zip(*bounds))
    return {"OUT_0": reading.graph.slice(x, starts, stops, steps)}


def _concatenate(reading: Reading, node: Any) -> Results:
    parts = [reading.operand(node, port) for port in node.inputs]
    return {"OUT_0": reading.graph.concatenate(parts, axis=int(node.params["axis"]))}


def _rope(name: str, port: str, out: str) -> Rule:
    """Returns the rule of a rotary position embedding or of its gradient."""

    def make(reading: Reading, node: Any) -> Results:
        given = {key: value for key in ("rope_dim", "output_scale") if (value := node.params.get(key)) is not None}
        x, freqs = (reading.operand(node, p) for p in (port, "freqs"))
        return {out: reading.composite(TABLE[name], (x, freqs), {**TABLE[name].attributes, **given})[0]}

    return Rule(make, (port, "freqs"), ("rope_dim", "output_scale"))


_FORWARD = ("Y", "mean", "inv_var")
_BACKWARD = ("DX", "DScale", "DBias")

#: Node type -> its rule.
RULES: dict[str, Rule] = {
    "POINTWISE": Rule(
        _pointwise, ("IN_0", "IN_1", "IN_2"), ("mode", "axis", *(w for k in KEYWORDS.values() for w in k.values()))
    ),
    "MATMUL": Rule(_matmul, ("A", "B"), ("padding",)),
    "CONV_FPROP": _convolution("conv_fprop", "Y"),
    "CONV_DGRAD": _convolution("conv_dgrad", "DX"),
    "CONV_WGRAD": _convolution("conv_wgrad", "DW"),
    "BLOCK_SCALE_DEQUANTIZE": Rule(_block_scale_dequantize, ("input", "descale"), ("block_size", "is_negative_scale")),
    "REDUCTION": Rule(_reduction, ("input",), ("mode",)),
    "LAYERNORM": _norm("layernorm", *_FORWARD),
    "ADALAYERNORM": _norm("adalayernorm", *_FORWARD),
    "INSTANCENORM": _norm("instancenorm", *_FORWARD),
    "RMSNORM": _norm("rmsnorm", "Y", "inv_var"),
    "BATCHNORM": _norm("batchnorm", *_FORWARD, "next_running_mean", "next_running_var"),
    "BATCHNORM_INFERENCE": _norm("batchnorm_inference", "Y"),
    "LAYERNORM_BWD": _norm("layernorm_backward", *_BACKWARD),
    "ADALAYERNORM_BWD": _norm("adalayernorm_backward", *_BACKWARD),
    "INSTANCENORM_BWD": _norm("instancenorm_backward", *_BACKWARD),
    "BATCHNORM_BWD": _norm("batchnorm_backward", *_BACKWARD),
    "RMSNORM_BWD": _norm("rmsnorm_backward", "DX", "DScale"),
    "GENSTATS": _norm("genstats", "SUM", "SQ_SUM"),
    "ROPE": _rope("rope", "input", "OUT_0"),
    "ROPE_BWD": _rope("rope_backward", "dY", "OUT_0"),
    "RESHAPE": Rule(_reshape, ("input",), ("reshape_mode",)),
    "TRANSPOSE": Rule(_transpose, ("input",), ("permutation",)),
    "SLICE": Rule(_slice, ("input",), ("slices",)),
    "SDPA": Rule(attention.sdpa, attention.PORTS, PARAMS, ragged=True),
    "SDPA_FP8": Rule(attention.sdpa_fp8, attention.PORTS_FP8, PARAMS, ragged=True),
    "SDPA_BWD": Rule(attention_backward.sdpa_backward, attention_backward.PORTS, PARAMS, ragged=True),
    "SDPA_FP8_BWD": Rule(attention_backward_fp8.sdpa_fp8_backward, attention_backward_fp8.PORTS, PARAMS, ragged=True),
    "MOE_GROUPED_MATMUL": Rule(experts.moe_grouped_matmul, experts.PORTS, experts.PARAMS),
    "MOE_GROUPED_MATMUL_BWD": Rule(experts.moe_grouped_matmul_bwd, experts.PORTS_BACKWARD),
    "CONCATENATE": Rule(_concatenate, ("inputs_*",), ("axis", "in_place_index", "_n_inputs")),
}
