"""Products of one tensor with several parameters become one: queries, keys and values are slices of a joined product.

``x @ a`` and ``x @ b`` are columns of ``x @ concatenate(a, b)``.  The joined matrix is packed when the parameters
change (`passes.packing`); a call reads x once, with one kernel that fills the machine instead of several that may not.
Products that an epilogue would go on with, but for adding a bias, stay as they are, and so do those that are written
into an input, such as the values of a cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from codegen.declined import Declined
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides, stride_order
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.choices import Choice, weigh
from fusegraph.lowering.divided import made_of_less
from fusegraph.lowering.views import view
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.estimates import alone, cycles
from fusegraph.passes.overwriting import written_in_place
from fusegraph.passes.parameters import fixed
from fusegraph.passes.partition import Decision
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, named, same
from fusegraph.passes.split_products import PART_BYTES
from fusegraph.passes.views import foresee_views
from fusegraph.pattern import only_consumer

#: What is chosen.
NAME, APART, JOINED = "products with parameters", "apart", "joined"
#: How many times longer than the joined product the others must be estimated to take.
MARGIN = 1.05


@dataclass(frozen=True)
class _Branch:
    """A product with a parameter, and the addition of a bias behind it, if there is one."""

    product: Node
    add: Node | None = None
    bias: Tensor | None = None

    @property
    def x(self) -> Tensor:
        return self.product.inputs[0]

    @property
    def weight(self) -> Tensor:
        return self.product.inputs[1]

    @property
    def result(self) -> Tensor:
        return self.product.output if self.add is None else self.add.output


def join_products(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Joins the parameters that one tensor is multiplied by, where slices of the whole product serve as well."""
    known = fixed(graph, options)
    weighed = [(found, _choice(graph, found, options)) for found in _alike(graph, known) if len(found) > 1]
    choices = tuple(choice for _, choice in weighed if choice is not None)
    joined = [found for found, choice in weighed if choice is not None and choice.taken == JOINED]
    if not joined:
        return replace(same(graph), choices=choices)
    rewrite = Rewrite(graph)
    first = {found[0].product: found for found in joined}
    gone = {node for found in joined for b in found for node in (b.product, b.add)}
    # What is made of parameters comes first: the joined product takes those of later products.
    for node in sorted(graph.nodes, key=lambda n: not known.issuperset(n.inputs)):
        if node in first:
            _write(rewrite, first[node])
        elif node not in gone:
            rewrite.take_over(node)
    reason = "both multiply {!r} by parameters, which are joined: one product"
    decisions = [
        Decision(a.product.name, b.product.name, True, reason.format(a.x.name), a.x.nbytes, a.x.name)
        for a, *others in joined
        for b in others
    ]
    made = replace(rewrite.done(decisions), choices=choices)
    foresee_views(made.graph)
    return made


def _alike(graph: Graph, known: Container[Tensor]) -> Iterator[list[_Branch]]:
    """Yields products of the same tensor with parameters, with like attributes and dtypes, in the graph's order."""
    found: dict[object, list[_Branch]] = defaultdict(list)
    stored = written_in_place(graph)
    for node in graph.nodes:
        branch = _branch(graph, node, known) if node.op.role is Role.MATMUL else None
        if branch is not None and branch.result not in stored:
            how = [None if n is None else (n.op.name, repr(dict(n.attributes))) for n in (branch.product, branch.add)]
            dtypes = branch.weight.dtype, branch.product.output.dtype, branch.result.dtype
            found[branch.x, how[0], dtypes].append(branch)
    for branches in found.values():
        if len({repr(dict(b.add.attributes)) for b in branches if b.add is not None}) <= 1:
            yield branches


def _branch(graph: Graph, node: Node, known: Container[Tensor]) -> _Branch | None:
    """Returns a product with a parameter whose result, with a bias or without, is taken as it lies in memory."""
    x, weight = node.inputs
    if weight not in known or x in known or weight.rank != 2 or "parts" in node.attributes:
        return None
    if made_of_less(graph, weight, node):  # joined they would be a copy of more bytes
        return None
    branch, add = _Branch(node), only_consumer(graph, node.output)
    if add is not None and add.op.role is Role.SUM and len(add.inputs) == 2:
        bias = add.inputs[add.inputs[0] is node.output]
        width = weight.shape[-1]
        is_row = bias.size == width and bias.shape[-1:] == (width,)
        if bias in known and is_row and add.output.shape == node.output.shape:
            branch = _Branch(node, add, bias)
    result = branch.result
    takers = graph.consumers(result)
    apart = packed_strides((*result.shape[:-1], 2 * result.shape[-1]))  # as rows of a slice are
    viewed = all(n.kind is Kind.ATTENTION or view(n, apart) is not None for n in takers)
    inner = result not in graph.output_numbers and result.strides == packed_strides(result.shape)
    if not takers or not viewed or not inner:
        return None
    return branch if weight.shape[-1] * result.dtype.itemsize % PART_BYTES == 0 and result.size else None


def _choice(graph: Graph, branches: Sequence[_Branch], options: Options) -> Choice | None:
    """Returns the choice of joining products, by what these and the joined one take; None if no kernel takes that."""
    target = options.target.planned
    made = Graph("joined", graph.io_dtype, graph.compute_dtype)
    product, x = branches[0].product, branches[0].x
    inner = made._add_tensor("x", x.shape, x.strides, x.dtype)
    shape, strides = _joined_form(branches)
    weight = made._add_tensor("weight", shape, strides, branches[0].weight.dtype)
    out = (*product.output.shape[:-1], shape[-1])
    result = made._add_tensor("result", out, packed_strides(out), product.output.dtype)
    made.add_node(Node(product.op, (inner, weight), product.attributes, result))
    made.inputs, made.outputs = [inner, weight], [result]
    try:
        apart = sum(cycles(alone(graph, b.product, {}), options) + target.launch_cycles for b in branches)
        joined = cycles(made, options) + target.launch_cycles
    except Declined:
        return None
    preferred = JOINED if MARGIN * joined < apart else APART
    alike = f"{x.type} {x.strides} {[b.weight.type for b in branches]}"
    return weigh(NAME, product.name, {APART: apart, JOINED: joined}, preferred, options.settled, alike)


def _joined_form(branches: Sequence[_Branch]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns shape and strides of the joined parameters, which lie in memory as the first of them does."""
    weight = branches[0].weight
    shape = weight.shape[0], sum(b.weight.shape[1] for b in branches)
    return shape, packed_strides(shape, stride_order(weight.shape, weight.strides))


def _write(rewrite: Rewrite, branches: Sequence[_Branch]) -> None:
    """Writes the joined product, with the bias, and slices of it with the names of the results."""
    graph, first = rewrite.graph, branches[0]
    weights = tuple(rewrite.new[b.weight] for b in branches)
    weight = named(graph.apply(TABLE["concatenate"], weights, {"axis": 1}), first.weight.name, "joined")
    weight.strides = _joined_form(branches)[1]
    whole = _node(graph, first.product, (rewrite.new[first.x], weight), weight.shape[1])
    adds = [b.add for b in branches if b.add is not None]
    if adds:
        dtype = next(b.bias.dtype for b in branches if b.bias is not None)
        biases = [_bias(rewrite, b, dtype) for b in branches]
        bias = named(graph.apply(TABLE["concatenate"], biases, {"axis": 0}), adds[0].name, "joined bias")
        whole = _node(graph, adds[0], (whole, bias), weight.shape[1])
    start = 0
    for b in branches:
        result = rewrite.result(b.result)
        stop = start + b.weight.shape[1]
        bounds = {
            "starts": (*(0 for _ in result.shape[1:]), start),
            "stops": (*result.shape[:-1], stop),
            "steps": (1,) * result.rank,
        }
        graph.add_node(Node(TABLE["slice"], (whole,), bounds, result))
        start = stop


def _node(graph: Graph, like: Node, inputs: tuple[Tensor, ...], width: int) -> Tensor:
    """Returns the result of a node like another one, of so many columns."""
    shape = (*like.output.shape[:-1], width)
    made = intermediate(graph, like.name, "joined", shape, packed_strides(shape), like.output.dtype)
    return graph.add_node(Node(like.op, inputs, like.attributes, made)).output


def _bias(rewrite: Rewrite, branch: _Branch, dtype: object) -> Tensor:
    """Returns the bias of a branch, in one dimension; zeros if it has none."""
    width = branch.weight.shape[1]
    if branch.bias is None:
        return rewrite.graph.constant(np.zeros(width, np.float32), dtype=dtype)
    bias = rewrite.new[branch.bias]
    return bias if bias.rank == 1 else rewrite.graph.apply(TABLE["reshape"], (bias,), {"shape": (width,)})
