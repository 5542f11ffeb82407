"""Products of one tensor with several parameters become one: queries, keys and values are slices of a joined product.

``x @ a`` and ``x @ b`` are columns of ``x @ concatenate(a, b)``.  The joined matrix is packed when the parameters
change (`passes.packing`), or the codes and scales that it is decoded from (`passes.made_alike`); a call reads x once,
with one kernel that fills the machine instead of several that may not.  Products that an epilogue would go on with, but
for a bias or a scale for each column, stay as they are.  What is an output, or is written into an input like a cache,
is copied there from a joined product, which counts as a kernel more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from codegen.declined import Declined
from fusegraph.dtypes import DType
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.choices import Choice, weigh
from fusegraph.lowering.divided import made_of_less
from fusegraph.lowering.views import view
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Role
from fusegraph.passes import made_alike
from fusegraph.passes.estimates import cycles
from fusegraph.passes.made_alike import Joined
from fusegraph.passes.overwriting import written_in_place
from fusegraph.passes.parameters import fixed
from fusegraph.passes.partition import Decision
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, named, same
from fusegraph.passes.split_products import PART_BYTES
from fusegraph.passes.views import foresee_views
from fusegraph.pattern import only_consumer

#: What is chosen.
NAME, APART, JOINED = "products with parameters", "apart", "joined"
#: The note that has the names of the results that are parts of a joined one, by its name.
NOTE = "joined"
#: How many times longer than the joined product the others must be estimated to take.
MARGIN = 1.05


#: What may follow a product for each of its columns, and the number that changes nothing.
_NEUTRAL: Mapping[Role | None, float] = {Role.SUM: 0.0, Role.PRODUCT: 1.0}


@dataclass(frozen=True)
class _Branch:
    """A product with a parameter, what makes that of fewer bytes, and pointwise nodes behind it.

    behind  nodes that add to the results, or multiply them by, a row of fixed numbers: each with the row.
    """

    product: Node
    made: tuple[Node, ...] = ()
    behind: tuple[tuple[Node, Tensor], ...] = ()

    @property
    def x(self) -> Tensor:
        return self.product.inputs[0]

    @property
    def weight(self) -> Tensor:
        return self.product.inputs[1]

    @property
    def result(self) -> Tensor:
        return self.behind[-1][0].output if self.behind else self.product.output

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.product, *(node for node, _ in self.behind))


@dataclass(frozen=True)
class _Branches:
    """Products of one tensor with parameters that are made alike, and their joined parameter.

    copied  the results that belong into outputs or inputs of the graph: parts of a joined result are copied there.
    """

    branches: tuple[_Branch, ...]
    weight: Joined
    copied: tuple[Tensor, ...]

    @property
    def longest(self) -> _Branch:
        """The branch with the most nodes behind its product."""
        return max(self.branches, key=lambda b: len(b.behind))


def join_products(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Joins the parameters that one tensor is multiplied by, where slices of the whole product serve as well."""
    known = fixed(graph, options)
    weighed = [(found, _choice(graph, found, options)) for found in _alike(graph, known)]
    choices = tuple(choice for _, choice in weighed if choice is not None)
    joined = [found for found, choice in weighed if choice is not None and choice.taken == JOINED]
    if not joined:
        return replace(same(graph), choices=choices)
    rewrite = Rewrite(graph)
    first = {found.branches[0].product: found for found in joined}
    gone = {node for found in joined for b in found.branches for node in b.nodes}
    names: dict[str, tuple[str, ...]] = {}
    # What is made of parameters comes first: the joined product takes those of later products.
    for node in sorted(graph.nodes, key=lambda n: not known.issuperset(n.inputs)):
        if node in first:
            _write(rewrite, first[node], names)
        elif node not in gone:
            rewrite.take_over(node)
    reason = "both multiply {!r} by parameters, which are joined: one product"
    decisions = [
        Decision(a.product.name, b.product.name, True, reason.format(a.x.name), a.x.nbytes, a.x.name)
        for a, *others in (found.branches for found in joined)
        for b in others
    ]
    made = replace(rewrite.done(decisions), choices=choices, notes={NOTE: names})
    foresee_views(made.graph)
    return made


def _alike(graph: Graph, known: Container[Tensor]) -> Iterator[_Branches]:
    """Yields products of the same tensor with parameters, with like attributes and dtypes, in the graph's order."""
    found: dict[object, list[list[_Branch]]] = defaultdict(list)
    for node in graph.nodes:
        branch = _branch(graph, node, known) if node.op.role is Role.MATMUL else None
        if branch is None:
            continue
        dtypes = branch.weight.dtype, node.output.dtype, branch.result.dtype
        classes = found[branch.x, node.op, repr(dict(node.attributes)), dtypes]
        of = next((each for each in classes if _joins(graph, (each[0], branch)) is not None), None)
        if of is None:
            classes.append([branch])
        else:
            of.append(branch)
    stored = written_in_place(graph) | graph.output_numbers.keys()
    for branches in (each for classes in found.values() for each in classes if len(each) > 1):
        weight = _joins(graph, branches)
        if weight is not None:
            copied = tuple(b.result for b in branches if not stored.isdisjoint(_views(graph, b.result)))
            yield _Branches(tuple(branches), weight, copied)


def _views(graph: Graph, tensor: Tensor) -> Iterator[Tensor]:
    """Yields a tensor and what only shows its elements otherwise."""
    yield tensor
    for node in graph.consumers(tensor):
        if view(node, tensor.strides) is not None:
            yield from _views(graph, node.output)


def _joins(graph: Graph, branches: Sequence[_Branch]) -> Joined | None:
    """Returns the joined parameter of products; None if they, or what follows them, are not alike."""
    steps = [[(n.op, repr(dict(n.attributes)), n.output.dtype, row.dtype) for n, row in b.behind] for b in branches]
    longest = max(steps, key=len)
    if any(each != longest[: len(each)] for each in steps):
        return None
    nodes = {node for b in branches for node in b.made}
    return made_alike.joined(graph, [b.weight for b in branches], 1, nodes)


def _branch(graph: Graph, node: Node, known: Container[Tensor]) -> _Branch | None:
    """Returns a product with a parameter whose result, with what follows for each column, is taken as it lies."""
    x, weight = node.inputs
    if weight not in known or x in known or weight.rank != 2 or "parts" in node.attributes:
        return None
    behind: list[tuple[Node, Tensor]] = []
    result = node.output
    while (follows := only_consumer(graph, result)) is not None:
        row = _row(follows, result, known)
        if row is None:
            break
        behind.append((follows, row))
        result = follows.output
    takers = graph.consumers(result)
    apart = packed_strides((*result.shape[:-1], 2 * result.shape[-1]))  # as rows of a slice are
    viewed = all(n.kind in (Kind.ATTENTION, Kind.ASSIGN) or view(n, apart) is not None for n in takers)
    inner = result not in graph.output_numbers and result.strides == packed_strides(result.shape)
    if not takers or not viewed or not inner:
        return None
    if weight.shape[-1] * result.dtype.itemsize % PART_BYTES or not result.size:
        return None
    return _Branch(node, made_of_less(graph, weight, node), tuple(behind))


def _row(node: Node, result: Tensor, known: Container[Tensor]) -> Tensor | None:
    """Returns the row of fixed numbers that a node adds to, or multiplies, each row of a product; None if it does not.

    Other results of the node than the product's shape, such as those of wider rows, are none.
    """
    if node.op.role not in _NEUTRAL or len(node.inputs) != 2 or node.output.shape != result.shape:
        return None
    row, width = node.inputs[node.inputs[0] is result], result.shape[-1]
    return row if row in known and row.size == width and row.shape[-1:] == (width,) else None


def _choice(graph: Graph, found: _Branches, options: Options) -> Choice | None:
    """Returns the choice of joining products, by what these and the joined one take; None if no kernel takes that."""
    target = options.target.planned
    product, x = found.branches[0].product, found.branches[0].x
    try:
        each = [(b, made_alike.joined(graph, [b.weight], 1, b.made)) for b in found.branches]
        apart = sum(cycles(_estimated(graph, b.product, w), options) + target.launch_cycles for b, w in each if w)
        joined = cycles(_estimated(graph, product, found.weight), options) + target.launch_cycles
    except Declined:
        return None
    if found.copied:
        joined += target.launch_cycles + 2 * sum(t.nbytes for t in found.copied) / target.bytes_per_cycle
    preferred = JOINED if MARGIN * joined < apart else APART
    alike = f"{x.type} {x.strides} {[b.weight.type for b in found.branches]}"
    return weigh(NAME, product.name, {APART: apart, JOINED: joined}, preferred, options.settled, alike)


def _estimated(graph: Graph, product: Node, weight: Joined) -> Graph:
    """Returns a graph of a product alone with a parameter, and of the nodes that make this."""
    x = product.inputs[0]
    made = Graph("joined", graph.io_dtype, graph.compute_dtype)

    def leaf(each: Joined) -> Tensor:
        if each.axis is None and each.tensors[0].is_constant:
            return made.constant(each.tensors[0].value, dtype=each.tensors[0].dtype)
        tensor = intermediate(made, each.tensors[0].name, "joined", each.shape, each.strides, each.tensors[0].dtype)
        made.inputs.append(tensor)
        return tensor

    made.inputs = [made._add_tensor("x", x.shape, x.strides, x.dtype)]
    inputs = (made.inputs[0], made_alike.write(made, weight, leaf))
    shape = (*product.output.shape[:-1], weight.shape[1])
    result = made._add_tensor("result", shape, packed_strides(shape), product.output.dtype)
    made.add_node(Node(product.op, inputs, product.attributes, result))
    made.outputs = [result]
    return made


def _write(rewrite: Rewrite, found: _Branches, names: dict[str, tuple[str, ...]]) -> None:
    """Writes the joined product, with what follows for each column, and slices of it with the names of the results.

    Adds the results that are joined to ``names``.
    """
    graph, first = rewrite.graph, found.branches[0]

    def leaf(each: Joined) -> Tensor:
        if each.axis is None:
            return rewrite.new[each.tensors[0]]
        tensors = tuple([rewrite.new[t] for t in each.tensors])
        whole = named(graph.apply(TABLE["concatenate"], tensors, {"axis": each.axis}), each.tensors[0].name, "joined")
        whole.strides = each.strides
        return whole

    weight = made_alike.write(graph, found.weight, leaf, names)
    whole = _node(graph, first.product, (rewrite.new[first.x], weight), weight.shape[1])
    names[whole.name] = tuple([b.product.output.name for b in found.branches])
    for number, (node, like) in enumerate(found.longest.behind):
        rows = [_rows(rewrite, b, number, node, like.dtype) for b in found.branches]
        row = named(graph.apply(TABLE["concatenate"], rows, {"axis": 0}), node.name, "joined row")
        whole = _node(graph, node, (whole, row), weight.shape[1])
        names[whole.name] = tuple([b.behind[number][0].output.name for b in found.branches if number < len(b.behind)])
    start = 0
    for b in found.branches:
        result = rewrite.result(b.result)
        bounds = {
            "starts": (*(0 for _ in result.shape[1:]), start),
            "stops": (*result.shape[:-1], start + b.width),
            "steps": (1,) * result.rank,
        }
        graph.add_node(Node(TABLE["slice"], (whole,), bounds, result))
        start += b.width


def _node(graph: Graph, like: Node, inputs: tuple[Tensor, ...], width: int) -> Tensor:
    """Returns the result of a node like another one, of so many columns."""
    shape = (*like.output.shape[:-1], width)
    made = intermediate(graph, like.name, "joined", shape, packed_strides(shape), like.output.dtype)
    return graph.add_node(Node(like.op, inputs, like.attributes, made)).output


def _rows(rewrite: Rewrite, branch: _Branch, number: int, node: Node, dtype: DType) -> Tensor:
    """Returns the row that a branch has in the place of a node behind its product, in one dimension; numbers of this
    dtype that change nothing if it has none.
    """
    if number >= len(branch.behind):
        values = np.full(branch.width, _NEUTRAL[node.op.role], np.float32)
        return rewrite.graph.constant(values, dtype=dtype)
    row = rewrite.new[branch.behind[number][1]]
    return row if row.rank == 1 else rewrite.graph.apply(TABLE["reshape"], (row,), {"shape": (branch.width,)})
