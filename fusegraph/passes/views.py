"""Views: results of movement that need no kernel, being elements of memory that is there already.

Three ways to be one, for a movement node that no kernel has taken in:

- its result is a strided view of its operand: readers read it where it lies;
- its operand can be written where the result's elements belong (a transpose whose result leaves the graph): whoever
  makes the operand writes it there;
- it joins tensors (a concatenation) that are all written where they belong in the result, or that lie one behind the
  other already, in the memory of a larger concatenation.

The values of an assignment that is placed (`passes.assignments`) are written where they belong in the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import extent, overlaps, packed_strides, stride_order
from fusegraph.lowering.base import DEFAULTS, GroupView, Options
from fusegraph.lowering.views import assigned_region, joins_in_place, turned_back, view
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.overwriting import assignments, placed
from fusegraph.passes.rewrite import Rewritten, same
from fusegraph.passes.speculation import ASSIGNMENTS, NotAccepted
from fusegraph.tensor import Position

#: A result that is copied after all takes at most so many times the memory of its elements.
MOST_GROWTH = 2


def foresee_views(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Gives results of movement the strides that they have if they become views, for passes that judge layouts before
    that is decided: without repeated elements and with few gaps, in case they do not.
    """
    for node in graph.nodes:
        if node.kind is Kind.MOVEMENT and node.output not in graph.outputs and node.output.size:
            seen = view(node, node.inputs[0].strides)
            shape, size = node.output.shape, node.output.size
            if seen is not None and not overlaps(shape, seen[0]):
                few = extent(shape, seen[0]) <= MOST_GROWTH * size
                node.output.strides = seen[0] if few else packed_strides(shape, stride_order(shape, seen[0]))
    return same(graph)


def place_views(
    graph: Graph, groups: Sequence[GroupView], taken: Callable[[GroupView], bool], *, moving: bool = True
) -> frozenset[Node]:
    """Decides where the results of movement lie, by the tensors' ``base``, ``start`` and ``strides``.

    groups are those of a partition, in the order in which they run.  taken says whether a group is still one kernel
    with its tensors where they then lie; around one that is not, nothing becomes a view.  Unless ``moving``, no
    movement does.  Returns the nodes that need no kernel.  Raises NotAccepted for assignments whose values have to be
    copied.
    """
    kept: set[Node] = set() if moving else {n for g in groups for n in g.nodes if n.kind is Kind.MOVEMENT}
    while True:
        free = _placed(graph, groups, kept)
        moved = [g for g in groups if g.nodes[0] not in free and is_moved(g)]
        around = {t for g in moved if not taken(g) for t in (*g.reads, *g.writes) if t.own_strides}
        found = {n for n in free if around.intersection((*n.inputs, n.output))}
        if not found:
            return free
        if found <= kept | placed(graph):
            texts = {n: f"no kernel writes the values of {n.name!r} into {n.inputs[0].base.name!r}" for n in found}
            raise NotAccepted(next(iter(texts.values())), {(ASSIGNMENTS, n.name): text for n, text in texts.items()})
        kept |= {n for n in found if n.kind is Kind.MOVEMENT}


def is_moved(group: GroupView) -> bool:
    """Tells whether tensors that a group reads or writes lie elsewhere than they would by themselves."""
    return any(t.own_strides for t in (*group.reads, *group.writes))


def _placed(graph: Graph, groups: Sequence[GroupView], kept: set[Node]) -> frozenset[Node]:
    """Returns the nodes that need no kernel, of all but those to be kept; places their tensors."""
    for tensor in graph.tensors.values():
        tensor.base, tensor.start, tensor.position = tensor, 0, None
        tensor.strides, tensor.own_strides = tensor.own_strides or tensor.strides, None
    single = [g.nodes[0] for g in groups if len(g.nodes) == 1]
    alone = [n for n in single if n.kind is Kind.MOVEMENT and n not in kept]
    outputs = set(graph.outputs)
    free: set[Node] = set()
    for node in assignments(graph):
        _assign(node)
        if node.attributes["placed"]:
            free.add(node)

    def movable(tensor: Tensor) -> bool:
        """Returns true if we may say where a tensor is written."""
        return graph.producer(tensor) is not None and tensor not in outputs and tensor.base is tensor

    for node in reversed(alone):
        result = node.output
        if node.op.role is Role.CONCATENATE:
            if joins_in_place(node) and all(movable(t) for t in node.inputs):
                _join(node)
                free.add(node)
            elif movable(result) and _is_joined(node):
                first = node.inputs[0]
                _lay(result, first.base, first.strides, first.start)
                free.add(node)
        elif (result in outputs or result.base is not result) and movable(node.inputs[0]):
            strides = turned_back(node, result.strides)
            if strides is not None:
                _lay(node.inputs[0], result, strides, 0)
                free.add(node)
    for node in alone:
        result, operand = node.output, node.inputs[0]
        if node not in free and result not in outputs and result.base is result:
            seen = view(node, operand.strides)
            if seen is not None:
                _lay(result, operand, *seen)
                free.add(node)
    return frozenset(free)


def _assign(node: Node) -> None:
    """Puts the result of an assignment into the memory of the input, and what it assigns if that is ``placed``."""
    x, values, *index = node.inputs
    _lay(node.output, x, x.strides, 0)
    if node.attributes["placed"]:
        region = assigned_region(node)
        _lay(values, x, region.strides, region.start)
        if index:
            (axis,) = node.attributes["axes"]
            values.position = Position(index[0], x.strides[axis], x.shape[axis])


def _join(node: Node) -> None:
    result, axis, place = node.output, node.attributes["axis"], 0
    for tensor in node.inputs:
        _lay(tensor, result, result.strides, place * result.strides[axis])
        place += tensor.shape[axis]


def _is_joined(node: Node) -> bool:
    """Returns true if the operands of a concatenation lie one behind the other in memory."""
    axis, first = node.attributes["axis"], node.inputs[0]
    place = first.start
    for tensor in node.inputs:
        if tensor.base is not first.base or tensor.start != place or tensor.strides != first.strides:
            return False
        place += tensor.shape[axis] * first.strides[axis]
    return first.base is not first


def _lay(tensor: Tensor, onto: Tensor, strides: tuple[int, ...], start: int) -> None:
    """Puts a tensor into the memory of another, ``start`` elements after its first."""
    tensor.own_strides = tensor.strides
    tensor.base, tensor.start, tensor.strides = onto.base, onto.start + start, strides
    tensor.position = onto.position
