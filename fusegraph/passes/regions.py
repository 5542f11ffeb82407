"""Assignments of whole inputs that replace only some elements become assignments of these.

A functional graph says of a cache that is written at a position: the new cache is the old one with other elements there
(a scatter, a concatenation of parts of the old one around something new), and at last the input becomes that.
"""

from __future__ import annotations

from math import prod

from fusegraph.errors import GraphError
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.overwriting import assignments, overwritten_after, readers
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, same
from fusegraph.passes.speculation import REGIONS
from fusegraph.pattern import followers
from fusegraph.state import Region, assigned, region


def assign_regions(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Assigns only those elements of inputs that change; what is read of a whole new value is read of its makers."""
    if not graph.updates:
        return same(graph)
    found: dict[Node, tuple[Node, Region, Tensor]] = {}  # what makes a new value -> the assignment, what it replaces
    whole = (REGIONS, graph.name) in options.left_out
    for node in [] if whole else assignments(graph):
        if _is_whole(node) and (steps := _steps(graph, node)):
            found |= {maker: (node, where, values) for maker, where, values in steps}
    return _Assigning(graph, found).run()


def _is_whole(node: Node) -> bool:
    x, values, *index = node.inputs
    return not index and values.shape == x.shape and set(node.attributes["steps"]) <= {1}


def _steps(graph: Graph, node: Node) -> list[tuple[Node, Region, Tensor]]:
    """Returns the replacements that make the new value of an input of the old one, the last one first; none if
    something else makes it, or something that takes a value follows from what replaces it.
    """
    old, tensor = node.inputs
    result: list[tuple[Node, Region, Tensor]] = []
    while tensor is not old:
        maker = graph.producer(tensor)
        step = _replaced(graph, maker) if maker is not None and tensor not in graph.output_numbers else None
        if maker is None or step is None:
            return []
        result.append((maker, *step))
        tensor = step[0].of
    own = {node, *(maker for maker, _, _ in result)}
    for maker, where, _ in result:
        before = overwritten_after(graph, node) if where.of is old else readers(graph, where.of)
        if not ({*followers(graph, maker)} - own).isdisjoint(before):
            return []
    return result


def _replaced(graph: Graph, maker: Node) -> tuple[Region, Tensor] | None:
    """Returns the elements of a tensor that a node replaces, and by what; None if it does something else."""
    if maker.op.role is Role.PUT:
        x, index, values = maker.inputs
        axis = maker.attributes["axis"]
        while (node := graph.producer(index)) is not None and node.op.role is Role.BROADCAST:
            (index,) = node.inputs
        if maker.attributes["reduction"] != "none" or index.size != index.shape[axis - x.rank]:
            return None
        where = Region(x, [0] * x.rank, [1] * x.rank, list(values.shape), list(range(x.rank)), (axis,), index)
        return where, values
    if maker.op.role in (Role.TRANSPOSE, Role.RESHAPE):
        return _along_several(graph, maker)
    if maker.op.role is not Role.CONCATENATE:
        return None
    around = dict.fromkeys(p.of for t in maker.inputs if (p := _region(t)) is not None)
    every = (_between(graph, maker, region(x)) for x in around if x.shape == maker.output.shape)
    return next((found for found in every if found is not None), None)


def _along_several(graph: Graph, maker: Node) -> tuple[Region, Tensor] | None:
    """Returns what a scatter along axes that were moved to the front and joined replaces, once they are back."""
    rank = maker.output.rank
    turned = maker.op.role is Role.TRANSPOSE
    back = maker.attributes["perm"] if turned else tuple(range(rank))
    put = graph.producer(_before_reshapes(graph, maker.inputs[0] if turned else maker.output))
    if (
        put is None
        or put.op.role is not Role.PUT
        or (put.attributes["axis"], put.attributes["reduction"]) != (0, "none")
    ):
        return None
    (flat, index, values), order = put.inputs, tuple(back.index(d) for d in range(rank))
    x = _before_reshapes(graph, flat)
    if order != tuple(range(rank)):
        turn = graph.producer(x)
        if turn is None or turn.op.role is not Role.TRANSPOSE or turn.attributes["perm"] != order:
            return None
        x = turn.inputs[0]
    count = x.rank - flat.rank + 1
    if x.shape != maker.output.shape or count < 1 or index.size != index.shape[0]:
        return None
    if not list(flat.shape[1:]) == [x.shape[d] for d in order[count:]] == list(values.shape[1:]):
        return None
    axes, dims = order[:count], [order[0], *order[count:]]
    sizes = [values.shape[0] if d == axes[0] else 1 if d in axes else n for d, n in enumerate(x.shape)]
    return Region(x, [0] * x.rank, [1] * x.rank, sizes, list(dims), axes, index), values


def _before_reshapes(graph: Graph, tensor: Tensor) -> Tensor:
    while (node := graph.producer(tensor)) is not None and node.op.role is Role.RESHAPE:
        (tensor,) = node.inputs
    return tensor


def _between(graph: Graph, maker: Node, whole: Region) -> tuple[Region, Tensor] | None:
    """Returns what a concatenation puts between parts of a region that stay as they are; None if it does not."""
    axis = maker.attributes["axis"]
    dim = whole.dims[axis] if len(whole.dims) == maker.output.rank else None
    if dim is None:
        return None
    begin, fresh = 0, []
    for tensor in maker.inputs:
        place = _part(whole, dim, begin, tensor.shape[axis])
        begin += tensor.shape[axis]
        if not _same(_region(tensor), place):
            fresh.append((tensor, place))
    if len(fresh) != 1 or begin != whole.sizes[dim] or len(maker.inputs) < 2:
        return None
    ((tensor, place),) = fresh
    inner = graph.producer(tensor)
    deeper = inner is not None and inner.op.role is Role.CONCATENATE and graph.consumers(tensor) == [maker]
    return (_between(graph, inner, place) if deeper and inner is not None else None) or (place, tensor)


def _region(tensor: Tensor) -> Region | None:
    try:
        return region(tensor)
    except GraphError:
        return None


def _part(whole: Region, dim: int, begin: int, size: int) -> Region:
    starts, sizes = list(whole.starts), list(whole.sizes)
    starts[dim] += begin * whole.steps[dim]
    sizes[dim] = size
    return Region(whole.of, starts, list(whole.steps), sizes, list(whole.dims))


def _same(one: Region | None, other: Region) -> bool:
    """Returns true if two regions have the same elements in the same order."""
    if one is None or one.of is not other.of or one.index is not None or one.sizes != other.sizes:
        return False
    steps = all(n <= 1 or a == b for a, b, n in zip(one.steps, other.steps, one.sizes))
    return (
        steps
        and [d for d in one.dims if d is not None] == [d for d in other.dims if d is not None]
        and (0 in one.sizes or one.starts == other.starts)
    )


class _Assigning:
    """A graph in the making in which the nodes in ``found`` are assignments."""

    def __init__(self, graph: Graph, found: dict[Node, tuple[Node, Region, Tensor]]) -> None:
        self._graph, self._found = graph, found
        self._rewrite = Rewrite(graph)
        #: new value of a whole input -> what it is assigned, which whoever reads it takes
        self._values: dict[Tensor, Tensor] = {}
        self._alone: dict[tuple[Tensor, int], Tensor] = {}

    def run(self) -> Rewritten:
        rewrite, done = self._rewrite, {node for node, _, _ in self._found.values()}
        for node in self._graph.nodes:
            if node in self._found:
                self._assign(node)
            elif node in done:
                pass
            elif node.kind is Kind.ASSIGN:
                self._take_over(node)
            else:
                rewrite.take_over(node, [self._values.get(t, rewrite.new[t]) for t in node.inputs])
        return rewrite.done()

    def _assign(self, maker: Node) -> None:
        node, where, values = self._found[maker]
        graph, new = self._rewrite.graph, self._rewrite.new
        where = Region(new[where.of], where.starts, where.steps, where.sizes, where.dims, where.axes, where.index)
        if where.index is not None:
            where.index = self._index(graph.reshape(new[where.index], (where.index.size,)), where)
        made = assigned(where, new[values])
        new[maker.output] = named(made, maker.output.name, "assigned")
        if maker.output is node.inputs[1]:
            graph._rename(made, graph._unique(node.output.name))
            new[node.output] = made

    def _take_over(self, node: Node) -> None:
        """Takes over an assignment."""
        x, values, *index = self._rewrite.inputs(node)
        values = self._values.get(node.inputs[1], values)
        if _is_whole(node):
            self._values[node.output] = values
        if index:
            where = Region(x, [], [], [], [], node.attributes["axes"], index[0])
            index = [self._index(index[0], where)]
        self._rewrite.take_over(node, (x, values, *index))

    def _index(self, index: Tensor, where: Region) -> Tensor:
        """Returns an index in which a position that comes again later is -1, so that the last value for it stays."""
        size = prod(where.of.shape[d] for d in where.axes)
        if index.size < 2:
            return index
        if (index, size) not in self._alone:
            graph = self._rewrite.graph
            numbers = graph.gen_index(index, axis=0)
            none = graph.broadcast(graph.constant(-1, dtype="int32"), (size,))
            last = graph.scatter(none, index, numbers, 0, "max")
            stays = graph.cmp_eq(graph.gather(last, index, axis=0), numbers)
            self._alone[index, size] = named(graph.binary_select(index, -1, stays), index.name, "once")
        return self._alone[index, size]
