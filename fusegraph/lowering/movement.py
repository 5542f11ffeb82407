"""Pointwise and movement nodes over one space -> a `PointwiseSpec`."""

from __future__ import annotations

from codegen.declined import Declined
from codegen.expr import Program, TableRead
from codegen.spec import PointwiseSpec
from fusegraph.graph import Node, Tensor
from fusegraph.lowering.affine import Split
from fusegraph.lowering.base import FamilyLowering, GroupView, Lowered, Options, TooLarge, check_program
from fusegraph.lowering.divided import moves
from fusegraph.lowering.gathered import takes_rows
from fusegraph.lowering.moved import CoordinateBuilder
from fusegraph.lowering.views import WRITTEN_THROUGH, is_assigned, joins_in_place, view
from fusegraph.ops.base import Kind, Role

#: What an element needs is followed back through at most so many nodes.
MOST_NODES = 80
#: Tensors that a kernel takes at most, however few of them an element needs: each is a parameter.
MOST_READS = 136


#: Kinds of nodes with kernels of their own, which move nothing.
_OTHERS = (Kind.POOLING, Kind.REDUCTION, Kind.SCAN, Kind.SORT)


def accept(group: GroupView, options: Options) -> None:
    """Raises Declined with the reason unless the group is movement and pointwise nodes that make one kernel."""
    moved, apart = group.of(Kind.MOVEMENT)[0], [*group.anchors, *(n for kind in _OTHERS for n in group.of(kind))]
    if apart:
        raise Declined(
            f"{moved.op.name} {moved.name!r} and {apart[0].op.name} {apart[0].name!r} are not one kernel: "
            "elements are moved by kernels of pointwise ops, or read where they lie"
        )
    first, *others = group.writes
    for tensor in others:
        if tensor.shape != first.shape:
            raise Declined(
                f"they run over different spaces: {tensor.name!r} {list(tensor.shape)} is needed in memory, as is "
                f"{first.name!r} {list(first.shape)}"
            )
    if len(group.nodes) == 1:
        return
    if len(group.nodes) > MOST_NODES:
        raise TooLarge(f"one kernel would move elements through {len(group.nodes)} nodes, the limit is {MOST_NODES}")
    if len(group.reads) > MOST_READS:
        raise TooLarge(f"one kernel would take {len(group.reads)} tensors, the limit is {MOST_READS}")
    for node in group.nodes:
        if node.output in group.writes:
            _check_written(group, node)
    _, program, _, _ = _program(group, options)
    tables = {i.args[0] for i in program.instructions if isinstance(i, TableRead)}  # a choice of several is one read
    check_program(len(program.operands) + len(tables), len(program.instructions), "element")


def _check_written(group: GroupView, node: Node) -> None:
    """Raises Declined for a result that is better left where it is, or written there in the first place."""
    graph, source = group.graph, node.output
    maker: Node | None = node
    turned = True  # the source's maker could write it where the result lies
    while maker is not None and view(maker, maker.inputs[0].strides) is not None:
        source = maker.inputs[0]
        turned = turned and maker.op.role in WRITTEN_THROUGH
        maker = graph.producer(source) if graph.producer(source) in group.members else None
    stays = node.output in graph.output_numbers or (not turned and is_assigned(graph, node.output))
    inner = source is not node.output and not stays
    if inner and (maker is None or node.output.size >= source.size):
        raise Declined(f"{node.name!r} is a view of {source.name!r}, which its readers read where it lies")
    if node.op.role is Role.CONCATENATE and joins_in_place(node):
        made = next((t for t in node.inputs if not _is_pointwise(t)), None)
        if made is not None:
            raise Declined(f"{made.name!r} and the other parts of {node.name!r} are written in their places in it")


def _is_pointwise(tensor: Tensor) -> bool:
    """Returns true if a tensor is computed of a graph's inputs by pointwise ops and movement alone."""
    seen, stack = set(), [tensor]
    while stack:
        node = tensor.graph.producer(stack.pop())
        if node is not None and node not in seen:
            if node.kind not in (Kind.POINTWISE, Kind.MOVEMENT):
                return False
            seen.add(node)
            stack += node.inputs
    return True


def lower(group: GroupView, options: Options, name: str) -> Lowered:
    """Returns the kernel of a group that `accept` takes."""
    space, program, reads, writes = _program(group, options)
    return Lowered("pointwise", PointwiseSpec(name, space, program), reads, writes)


def _program(
    group: GroupView, options: Options
) -> tuple[tuple[int, ...], Program, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns the space, the program over it, and the tensors read and written; see `ProgramBuilder.build`."""
    parts = [[size] for size in group.writes[0].shape]
    while True:
        builder = CoordinateBuilder(group, options, parts)
        try:
            return builder.space, *builder.build()
        except Split as split:
            split.split(parts)


def _about(view: GroupView) -> bool:
    return bool(view.of(Kind.MOVEMENT)) and not takes_rows(view) and not moves(view)


LOWERING: FamilyLowering = FamilyLowering(_about, accept, lower)
