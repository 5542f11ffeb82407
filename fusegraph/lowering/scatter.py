"""A scatter, or an assignment at an index, and what computes its updates and their places -> a `ScatterSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from codegen.combiners import COMBINERS
from codegen.declined import Declined
from codegen.dtypes import DType, int32, int64
from codegen.expr import Operand, Program, Store, Value
from codegen.scatter import ScatterSpec
from fusegraph.graph import Node, Tensor
from fusegraph.layout import extent
from fusegraph.lowering.affine import Split
from fusegraph.lowering.base import FamilyLowering, GroupView, Lowered, Options, TooLarge, check_program
from fusegraph.lowering.moved import CoordinateBuilder
from fusegraph.lowering.movement import MOST_NODES
from fusegraph.lowering.views import assigned_region
from fusegraph.ops.base import Kind


def _scatters(view: GroupView) -> list[Node]:
    """Returns its nodes that put updates to places."""
    return [*view.of(Kind.SCATTER), *view.of(Kind.ASSIGN)]


def accept(view: GroupView, options: Options) -> None:
    """Raises Declined with the reason unless the group is one scatter and what computes its operands."""
    first, *others = _scatters(view)
    if others:
        raise Declined(f"{first.name!r} and {others[0].name!r} are two kernels: a scatter each")
    for node in view.nodes:
        if node is not first and node.kind not in (Kind.POINTWISE, Kind.MOVEMENT):
            raise Declined(f"{node.op.name} {node.name!r} and {first.op.name} {first.name!r} are two kernels")
        if first.output in node.inputs or (first.kind is Kind.ASSIGN and first.inputs[0] in node.outputs):
            raise Declined(f"{first.name!r} is known when all its updates are: {node.name!r} waits for that")
    for tensor in view.writes:
        if tensor is not first.output:
            raise Declined(f"{tensor.name!r} is needed in memory, beside {first.name!r} {list(first.output.shape)}")
    if len(view.nodes) == 1:
        return
    if len(view.nodes) > MOST_NODES:
        raise TooLarge(f"one kernel would move elements through {len(view.nodes)} nodes, the limit is {MOST_NODES}")
    _, program, _ = _program(view, options)
    check_program(len(program.operands) + len(program.tables), len(program.instructions), "update")


class _Builder(CoordinateBuilder):
    """The program of the updates of a scatter, over their space."""

    def __init__(self, view: GroupView, options: Options, parts: list[list[int]]) -> None:
        super().__init__(view, options, parts)
        (self._node,) = _scatters(view)

    def build(self) -> tuple[Program, tuple[Tensor, ...], tuple[Tensor, ...]]:
        index, values, result, axes = _operands(self._node)
        steps = [0 if d in axes else step for d, step in enumerate(result.strides)]
        to = Operand(
            result.name,
            result.dtype,
            self._sum(list(zip(self._identity, steps))).steps,
            self._view.alignment(result, self._options),
        )
        along = (self._identity[axes[0]],) if index.rank < values.rank else self._identity
        place, dtype = self._at(index, along, None), index.dtype
        if len(axes) > 1:
            place, dtype = self._offset(self._node.output, axes, place)
        stores = [
            Store(to, self._at(values, self._identity, None)),
            Store(Operand(index.name, dtype, self._zero.steps), place),
        ]
        return self._finished(stores)

    def _offset(self, result: Tensor, axes: Sequence[int], place: Value) -> tuple[Value, DType]:
        """Returns how many elements a position along several axes is from the first; -1 where there is none."""
        dtype = int64 if extent(result.shape, result.strides) > int32.max else int32
        terms, inner, total = [], 1, prod(result.shape[d] for d in axes)
        for d in reversed(axes):
            own = f"{{0}} / {inner}" if inner > 1 else "{0}"
            inner *= result.shape[d]
            own = f"({own}) % {result.shape[d]}" if inner < total else f"({own})"
            terms.append(f"{dtype.ctype}({own}) * {result.strides[d]}")
        text = f"{{0}} < 0 || {{0}} >= {total} ? -1 : {' + '.join(reversed(terms))}"
        return self._integer("offset", text, [place], dtype.ctype), dtype


def _program(view: GroupView, options: Options) -> tuple[list[list[int]], Program, tuple[Tensor, ...]]:
    """Returns each dimension of the updates as its parts in the space, the program over it, and the tensors read."""
    (node,) = _scatters(view)
    parts = [[size] for size in node.inputs[1].shape]
    while True:
        try:
            program, reads, _ = _Builder(view, options, parts).build()
            return parts, program, reads
        except Split as split:
            split.split(parts)


def lower(view: GroupView, options: Options, name: str) -> Lowered:
    """Returns the kernel of a group that `accept` takes."""
    (node,) = _scatters(view)
    parts, program, reads = _program(view, options)
    _, _, result, axes = _operands(node)
    combine, reach = node.attributes.get("combine"), extent(node.output.shape, node.output.strides)
    one = len(axes) == 1
    owners = [d for d, sizes in enumerate(parts) for _ in sizes]
    spec = ScatterSpec(
        name,
        tuple(size for sizes in parts for size in sizes),
        tuple(k for k, d in enumerate(owners) if d in axes),
        program,
        node.output.shape[axes[0]] if one else reach,
        node.output.strides[axes[0]] if one else 1,
        reach,
        COMBINERS[combine] if combine is not None else None,
    )
    return Lowered("scatter", spec, reads, (result,))


def _operands(node: Node) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Returns the index, the updates, what is written, which may be a region of the result, and the axes."""
    if node.kind is Kind.SCATTER:
        index, values = node.inputs
        return index, values, node.output, (node.attributes["axis"],)
    _, values, index = node.inputs
    return index, values, assigned_region(node), node.attributes["axes"]


LOWERING: FamilyLowering = FamilyLowering(_scatters, accept, lower)
