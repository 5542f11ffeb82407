"""Products of a matrix and one vector in float32, also where tf32 would do, as sums along the matrix's rows or columns:
kernels of those read it once, as fast as memory is.
"""

from __future__ import annotations

from math import prod

from codegen.sizes import Size
from fusegraph.dtypes import float32
from fusegraph.graph import Graph, Node
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.choices import Choice, weigh
from fusegraph.lowering.divided import made_of_less
from fusegraph.ops import TABLE
from fusegraph.ops.base import Role
from fusegraph.passes import estimates
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, replaced_where_chosen

#: What is chosen, between a kernel of products and one of sums.
NAME, TILES, SUMS = "product with a vector", "tiles of products", "sums of rows"


def sum_products(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Makes products of a float32 matrix and one vector sums of its rows where that is estimated to be faster."""

    def weighed(node: Node) -> tuple[Choice, bool] | None:
        if not _multiplies_vector(graph, node):
            return None
        target = options.target.planned
        # A matrix that several vectors share is read for each of them.
        a, b = node.inputs
        vector, matrix = (a, b) if a.shape[-2] == 1 else (b, a)
        times = prod(node.output.shape[:-2]) / max(prod(matrix.shape[:-2]), 1)
        moved = times * matrix.nbytes + vector.nbytes + node.output.nbytes
        cycles = {
            TILES: estimates.cycles(estimates.alone(graph, node, {}), options),
            SUMS: target.launch_cycles + moved / (target.memory_share * target.bytes_per_cycle),
        }
        preferred = min(cycles, key=cycles.__getitem__)
        choice = weigh(NAME, node.name, cycles, preferred, options.settled, str([t.type for t in node.inputs]))
        return choice, choice.taken == SUMS

    return replaced_where_chosen(graph, weighed, _write)


def _multiplies_vector(graph: Graph, node: Node) -> bool:
    if node.op.role is not Role.MATMUL or graph.compute_dtype != float32:
        return False
    a, b = node.inputs
    sizes = (*a.shape, *b.shape)
    if any(isinstance(n, Size) for n in sizes) or 0 in sizes or {a.dtype, b.dtype} != {float32}:
        return False
    if any(made_of_less(graph, t, node) for t in (a, b)):
        return False  # products compute it on the way, from weights of few bits
    return 1 in (a.shape[-2], b.shape[-1])


def _write(rewrite: Rewrite, node: Node, _: bool) -> None:
    graph, (a, b) = rewrite.graph, rewrite.inputs(node)
    row = a.shape[-2] == 1  # a row times a matrix, else a matrix times a column
    vector, matrix = (a, b) if row else (b, a)
    turned = graph.apply(TABLE["reshape"], (vector,), {"shape": (*vector.shape[:-2], *vector.shape[:-3:-1])})
    products = named(graph.apply(TABLE["mul"], (matrix, turned), {}), node.name, "products")
    entry = TABLE["reduction"]
    axis = products.rank - (2 if row else 1)
    how = {**entry.attributes, "mode": "add", "axes": (axis,), "keepdims": True, "dtype": node.output.dtype}
    graph.add_node(Node(entry, (products,), how, rewrite.result(node.output)))
