"""Factors of rows come out of products of few rows: ``(x * s) @ w`` is ``(x @ w) * s`` if s is a number for each row.

A norm without a mean, as decoders have in front of their products, is such a factor: one over the root of the mean of
squares.  What is left in front of the product is pointwise, so that the kernel before writes it; and the kernel of the
product finds the factor by itself (`lowering.totals`).  One that had to wait for a kernel of the norm would let memory
idle meanwhile.  In bfloat16 and float32 the unscaled elements are in range wherever x is; in float16 they may not be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from codegen.contraction.totals import MOST_ROWS
from codegen.sizes import most
from fusegraph.dtypes import bfloat16, float32
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Role
from fusegraph.ops.contraction import TF32
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, same
from fusegraph.pattern import made_of

#: The note that has the names of operands that are rounded before their rows are scaled.
NOTE = "unscaled"


@dataclass(frozen=True)
class _Scaled:
    """An operand of products: factors that are elements of it, and those that its rows have."""

    elements: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]


def take_out_scales(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Multiplies results of products of few rows by what scales these rows, instead of the rows."""
    if options.strict or not options.target.arch.has_cp_async:
        return same(graph)
    operands = dict.fromkeys(n.inputs[0] for n in graph.nodes if n.op.role is Role.MATMUL)
    found = {x: scaled for x in operands if (scaled := _scaled(graph, x)) is not None}
    if not found:
        return same(graph)
    rewrite = Rewrite(graph)
    made: dict[Tensor, Tensor] = {}
    for node in graph.nodes:
        if node.op.role is Role.MATMUL and node.inputs[0] in found:
            _write(rewrite, node, found[node.inputs[0]], made)
        else:
            rewrite.take_over(node)
    return replace(rewrite.done(), notes={NOTE: {x.name: y.name for x, y in made.items()}})


def _scaled(graph: Graph, x: Tensor) -> _Scaled | None:
    """Returns the factors of an operand that only products of few rows take, if reductions scale its rows."""
    takers = graph.consumers(x)
    if x in graph.outputs or x.dtype not in (bfloat16, float32) or any(not _is_product(n, x) for n in takers):
        return None
    if x.rank < 2 or most(prod(x.shape[:-1])) > MOST_ROWS or x.shape[-1] == 1:
        return None
    factors = _factors(graph, x, x)
    rows = tuple(t for t in factors if t.rank and t.shape[-1] == 1 and t.size > 0 and _is_reduced(graph, t))
    elements = tuple(t for t in factors if t not in rows)
    whole = any(t.shape == x.shape and t.dtype == x.dtype for t in elements)
    return _Scaled(elements, rows) if rows and whole and len(elements) <= 2 else None


def _is_product(node: Node, x: Tensor) -> bool:
    """Tells whether tensor cores multiply x by a matrix that the whole batch shares."""
    if node.op.role is not Role.MATMUL or node.inputs[1] is x or "parts" in node.attributes:
        return False
    exact = x.dtype == float32 and node.attributes["compute_dtype"] != TF32
    return not exact and prod(node.inputs[1].shape[:-2]) == 1


def _factors(graph: Graph, x: Tensor, whole: Tensor) -> list[Tensor]:
    """Returns the tensors whose product x is, rounded or not, through nodes that nothing else takes."""
    node = graph.producer(x)
    if node is not None and node.op.role is Role.CAST and node.inputs[0].dtype.is_float:
        return _factors(graph, node.inputs[0], whole)
    shared = x is not whole and (len(graph.consumers(x)) > 1 or x in graph.outputs)
    if node is not None and node.op.role is Role.PRODUCT and not shared:
        return [factor for t in node.inputs for factor in _factors(graph, t, whole)]
    return [x]


def _is_reduced(graph: Graph, t: Tensor) -> bool:
    """Tells whether a number for each row is made of a reduction of the row."""
    nodes = made_of(graph, [t], lambda n: n.inputs if n.kind is Kind.POINTWISE and n.output.shape == t.shape else None)
    makers = [graph.producer(x) for n in nodes for x in n.inputs]
    return any(n is not None and n.kind is Kind.REDUCTION for n in makers)


def _write(rewrite: Rewrite, node: Node, found: _Scaled, made: dict[Tensor, Tensor]) -> None:
    graph, x, mul, cast = rewrite.graph, node.inputs[0], TABLE["mul"], TABLE["identity"]

    def product(tensors: list[Tensor], part: str) -> Tensor:
        result, *others = tensors
        for other in others:
            result = named(graph.apply(mul, (result, other), {}), node.name, part)
        return result

    if x not in made:
        whole = product([rewrite.new[t] for t in found.elements], "unscaled")
        if whole.dtype != x.dtype:
            whole = named(graph.apply(cast, (whole,), {"dtype": x.dtype}), node.name, "unscaled rounded")
        made[x] = whole
    result = graph.apply(node.op, (made[x], *rewrite.inputs(node)[1:]), dict(node.attributes))
    result = named(result, node.name, "unscaled product")
    scaled = product([result, *(rewrite.new[t] for t in found.rows)], "scaled")
    out = rewrite.result(node.output)
    graph.add_node(Node(cast, (scaled,), {**cast.attributes, "dtype": out.dtype}, out))
