"""A convolution of few channels with a pointwise DAG on its result -> a `DirectConvolutionSpec` (halo tiles).

The gradient of a convolution's input is one too: of the loss, with zeros between its elements where the convolution has
strides, and with the filter turned around and its two channel dimensions exchanged.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod

from codegen.contraction import halo_schedule
from codegen.declined import Declined
from codegen.direct_convolution.schedule import fits
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.expr import Operand, Program, compute_type
from codegen.spec import ContractionSpec
from codegen.target import PORTABLE
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import contraction
from fusegraph.lowering.base import FamilyLowering, GroupView, Lowered, Options
from fusegraph.lowering.program import ProgramBuilder, broadcast_strides
from fusegraph.ops.base import Role
from fusegraph.ops.contraction import TF32

#: Products a result sums up over channels and taps; with more, a tiled matrix product is the better kernel, unless a
#: group has one channel and one filter.
MAX_PRODUCTS = 256
MAX_CHANNELS = 4
MAX_FILTERS = 8


def suits(node: Node, graph: Graph) -> str | None:
    """Returns why a contraction is no direct convolution with few channels; None if it is one."""
    if node.op.role not in (Role.FPROP, Role.DGRAD) or "parts" in node.attributes:
        return "not a convolution"
    if node.op.role is Role.DGRAD and min(_before(node)) < 0:
        return "the gradient of a convolution with more padding than its filter reaches over"
    x, w = node.inputs
    channels, filters, _ = _channels(node)
    products = channels * prod(w.shape[2:])
    if channels > MAX_CHANNELS or filters > MAX_FILTERS:
        return f"{channels} channels and {filters} filters a group are a matrix product"
    if products > MAX_PRODUCTS and channels * filters > 1:
        return f"{products} products a result are a matrix product"
    if node.output.size == 0 or x.size == 0:
        return "empty"
    if _on_tensor_cores(node, graph):
        return f"groups of {channels} channels are multiplied on tensor cores"
    return fits(_geometry(node, graph))


def _on_tensor_cores(node: Node, graph: Graph) -> bool:
    """Tells whether there is a form of contractions for groups of so few channels."""
    if node.attributes["groups"] == 1:
        return False
    found = contraction.product(node)
    real = compute_type(graph.compute_dtype)
    spec = ContractionSpec(
        "",
        found.batch,
        found.rows,
        found.cols,
        found.inner,
        found.a,
        found.b,
        contraction.accumulator(node, real),
        real,
        Program(),
        tf32=node.attributes["compute_dtype"] == TF32,
    )
    try:
        return bool(halo_schedule.schedules(spec, PORTABLE))
    except Declined:
        return False


def _channels(node: Node) -> tuple[int, int, tuple[int, int, int]]:
    """Returns the channels and filters of a group, and the filter's strides over (group, filter, channel)."""
    w = node.inputs[1]
    outer, inner = w.strides[:2]
    each = w.shape[0] // node.attributes["groups"]
    if node.op.role is Role.DGRAD:
        return each, w.shape[1], (each * outer, inner, outer)
    return w.shape[1], each, (each * outer, outer, inner)


def _before(node: Node) -> tuple[int, ...]:
    """Returns the padding in front."""
    padding = tuple(p[0] for p in node.attributes["padding"])
    if node.op.role is not Role.DGRAD:
        return padding
    taps, dilation = node.inputs[1].shape[2:], node.attributes["dilation"]
    return tuple((count - 1) * step - p for count, step, p in zip(taps, dilation, padding))


def _geometry(node: Node, graph: Graph) -> DirectConvolutionSpec:
    """Returns the spec without its epilogue's program and names: enough to judge sizes."""
    x, w = node.inputs
    attributes = node.attributes
    groups, rank = attributes["groups"], x.rank - 2
    pad = 3 - rank

    def three(values: tuple[int, ...], fill: int) -> tuple[int, int, int]:
        a, b, c = (fill,) * pad + tuple(values)
        return a, b, c

    def strides(tensor: Tensor, inner: int) -> tuple[int, ...]:
        outer, channel, *spatial = tensor.strides
        return (outer, inner * channel, channel, *three(tuple(spatial), 0))

    channels, filters, w_strides = _channels(node)
    x_strides = strides(x, channels)
    turned = node.op.role is Role.DGRAD
    real = "double" if graph.compute_dtype.name == "float64" else "float"
    return DirectConvolutionSpec(
        name="direct_convolution",
        images=x.shape[0],
        groups=groups,
        in_channels=channels,
        filters=filters,
        sizes=three(x.shape[2:], 1),
        out=three(node.output.shape[2:], 1),
        taps=three(w.shape[2:], 1),
        stride=(1, 1, 1) if turned else three(attributes["stride"], 1),
        dilation=three(attributes["dilation"], 1),
        before=three(_before(node), 0),
        flip=(attributes["mode"] == "convolution") != turned,
        x=Operand(x.name, x.dtype, x_strides),
        w=Operand(w.name, w.dtype, (*w_strides, *three(w.strides[2:], 0))),
        accumulate=contraction.accumulator(node, real),
        result=compute_type(node.output.dtype, real),
        program=Program(),
        input_dilation=three(attributes["stride"], 1) if turned else (1, 1, 1),
    )


def lower(view: GroupView, options: Options, name: str) -> Lowered:
    """Returns the direct convolution of a group that `accept` takes."""
    anchor = view.contractions[0]
    shape = anchor.output.shape
    spec = _geometry(anchor, view.graph)

    def strides(tensor: Tensor) -> tuple[int, ...]:
        n, k, *spatial = broadcast_strides(tensor, shape)
        return (n, spec.filters * k, k, *(0,) * (3 - len(spatial)), *spatial)

    program, reads, writes = ProgramBuilder(view, options, strides, anchor).build()
    x, w = anchor.inputs
    spec = replace(
        spec,
        name=name,
        program=program,
        x=replace(spec.x, alignment=view.alignment(x, options)),
        w=replace(spec.w, alignment=view.alignment(w, options)),
    )
    return Lowered("direct_convolution", spec, (x, w, *reads), writes)


LOWERING: FamilyLowering = FamilyLowering(
    lambda view: view.anchors and suits(view.anchors[0], view.graph) is None,
    partial(contraction.accept_alone, "direct convolution"),
    lower,
)
