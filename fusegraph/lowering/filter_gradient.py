"""The gradient of a filter of few channels a group, with a pointwise DAG on its result -> a `FilterGradientSpec`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from codegen.expr import Operand, Program, compute_type
from codegen.filter_gradient.spec import FilterGradientSpec
from codegen.sizes import most
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import contraction
from fusegraph.lowering.base import FamilyLowering, GroupView, Lowered, Options
from fusegraph.lowering.program import ProgramBuilder, broadcast_strides
from fusegraph.ops.base import Role

#: Rows of positions of a band, in planes of more.
BAND, WHOLE = 8, 16


def unsuitable(node: Node) -> str | None:
    """Returns why a node is no gradient of a filter that these kernels compute; None if it is one."""
    if node.op.role is not Role.WGRAD or "parts" in node.attributes:
        return "no gradient of a filter"
    x, loss = node.inputs
    if node.output.size == 0 or x.size == 0 or loss.size == 0:
        return "empty"
    common = node.op.operand_dtypes(tuple(t.type for t in node.inputs))[0]
    if not common.is_float or common.itemsize == 1 or any(t.dtype != common for t in node.inputs):
        return f"operands of {x.dtype} and {loss.dtype}"
    return None


def band_of(node: Node) -> int:
    """Returns how many rows of positions a band has: whole planes that have few, or of which there are many."""
    high = _three(node.inputs[1].shape[2:], 1)[1]
    return high if most(high) <= WHOLE else BAND


def _three(values: tuple[int, ...], fill: int) -> tuple[int, int, int]:
    """Returns spatial sizes as those of three dimensions: the only one of a sequence is its rows."""
    a, b, c = (fill, *values, fill) if len(values) == 1 else (fill,) * (3 - len(values)) + tuple(values)
    return a, b, c


def spec_of(node: Node, graph: Graph, parts: int, band: int) -> FilterGradientSpec:
    """Returns the spec without its epilogue's program and names: enough to estimate its time."""
    x, loss = node.inputs
    attributes = node.attributes
    groups = attributes["groups"]
    channels, filters = x.shape[1] // groups, loss.shape[1] // groups
    real = "double" if graph.compute_dtype.name == "float64" else "float"

    def strides(tensor: Tensor, each: int) -> tuple[int, ...]:
        outer, channel, *spatial = tensor.strides
        return (outer, each * channel, channel, *_three(tuple(spatial), 0))

    return FilterGradientSpec(
        name="filter_gradient",
        parts=parts,
        band=band,
        images=x.shape[0],
        groups=groups,
        channels=channels,
        filters=filters,
        sizes=_three(x.shape[2:], 1),
        out=_three(loss.shape[2:], 1),
        taps=_three(tuple(attributes["taps"]), 1),
        stride=_three(attributes["stride"], 1),
        dilation=_three(attributes["dilation"], 1),
        before=_three(tuple(p[0] for p in attributes["padding"]), 0),
        flip=attributes["mode"] == "convolution",
        x=Operand(x.name, x.dtype, strides(x, channels)),
        loss=Operand(loss.name, loss.dtype, strides(loss, filters)),
        accumulate=contraction.accumulator(node, real),
        result=compute_type(node.output.dtype, real),
        program=Program(),
    )


def lower(view: GroupView, options: Options, name: str) -> Lowered:
    """Returns the kernel of a group that `accept` takes."""
    anchor = view.contractions[0]
    shape, groups = anchor.output.shape, anchor.attributes["groups"]
    parts = anchor.attributes["parts"]
    spec = spec_of(anchor, view.graph, parts, anchor.attributes["band"])

    def strides(tensor: Tensor) -> tuple[int, ...]:
        over = broadcast_strides(tensor, shape)
        part, k, c, *spatial = over if parts > 1 else (0, *over)
        return (part, shape[parts > 1] // groups * k, k, c, *_three(tuple(spatial), 0))

    program, reads, writes = ProgramBuilder(view, options, strides, anchor).build()
    x, loss = anchor.inputs
    spec = replace(
        spec,
        name=name,
        program=program,
        x=replace(spec.x, alignment=view.alignment(x, options)),
        loss=replace(spec.loss, alignment=view.alignment(loss, options)),
    )
    return Lowered("filter_gradient", spec, (x, loss, *reads), writes)


LOWERING: FamilyLowering = FamilyLowering(
    lambda view: view.anchors and "band" in view.anchors[0].attributes,
    partial(contraction.accept_alone, "filter gradient"),
    lower,
)
