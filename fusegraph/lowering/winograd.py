"""One of the transforms of Winograd's convolution, with a pointwise DAG on the result of the last -> `WinogradSpec`."""

from __future__ import annotations

from codegen.expr import Operand, Program
from codegen.winograd import WinogradSpec
from fusegraph.graph import Node, Tensor
from fusegraph.lowering.base import FamilyLowering, GroupView, Lowered, Options
from fusegraph.lowering.contraction import accept
from fusegraph.lowering.program import ProgramBuilder, broadcast_strides
from fusegraph.ops.base import Kind, Role
from fusegraph.ops.winograd import tiles

Strides = tuple[int, ...]


def lower(view: GroupView, options: Options, name: str) -> Lowered:
    """Returns the transform of a group that `accept` takes."""
    (anchor,) = view.anchors
    (source,) = anchor.inputs

    def strides(tensor: Tensor) -> Strides:
        """Returns a tensor's strides over (image, channel, tile row, tile column, row, column)."""
        if anchor.op.role is Role.WINOGRAD_OUTPUT:
            n, k, row, column = broadcast_strides(tensor, anchor.output.shape)
            return (n, k, tile * row, tile * column, row, column)
        return _places(tensor, grid, of_filter=anchor.op.role is Role.WINOGRAD_FILTER, at=anchor)

    tile = anchor.attributes["tile"]
    grid = _grid(anchor)
    program, reads, writes = ProgramBuilder(view, options, strides, anchor).build()
    spec = _spec(anchor, name, view.alignment(source, options), program)
    return Lowered("winograd", spec, (source, *reads), writes)


def _grid(anchor: Node) -> tuple[int, int]:
    """Returns the rows and columns of tiles of an image."""
    at = anchor.attributes
    results = at["results"] if "results" in at else at["shape"][2:] if "shape" in at else None
    return tiles(results, at["tile"]) if results else (1, 1)


def _places(tensor: Tensor, grid: tuple[int, int], *, of_filter: bool, at: Node) -> Strides:
    """Returns strides over (image or filter, channel, tile row, tile column, row, column).

    The tensor is (N^2, tiles of all images, channels), or for filters (N^2, channels, filters).
    """
    side = at.attributes["tile"] + 2
    place, second, third = tensor.strides
    if not of_filter:
        return (grid[0] * grid[1] * second, third, grid[1] * second, second, side * place, place)
    filters, channels = (second, third) if at.attributes["exchange"] else (third, second)
    return (filters, channels, 0, 0, side * place, place)


def _spec(anchor: Node, name: str, alignment: int, program: Program) -> WinogradSpec:
    at, (source,) = anchor.attributes, anchor.inputs
    role, tile, grid = anchor.op.role, at["tile"], _grid(anchor)
    assert role is not None
    start = 0
    window: tuple[tuple[int, int], tuple[int, int]] | None = None
    results: tuple[int, int] | None = None
    if role is Role.WINOGRAD_OUTPUT:
        images, channels = at["shape"][:2]
        results = at["shape"][2:]
        strides = _places(source, grid, of_filter=False, at=anchor)
    else:
        images, channels = source.shape[:2]
        n, c, row, column = source.strides
        if role is Role.WINOGRAD_INPUT:
            above, left = at["before"]
            window = ((above, source.shape[2]), (left, source.shape[3]))
            start = -above * row - left * column
            strides = (n, c, tile * row, tile * column, row, column)
        elif at["flip"]:
            start, strides = 2 * row + 2 * column, (n, c, 0, 0, -row, -column)
        else:
            strides = (n, c, 0, 0, row, column)
    operand = Operand(source.name, source.dtype, strides, alignment)
    return WinogradSpec(name, role.value, tile, images, channels, grid, operand, start, window, results, program)


LOWERING: FamilyLowering = FamilyLowering(
    lambda view: view.anchors and view.anchors[0].kind is Kind.TRANSFORM, accept, lower
)
