"""Gradients of filters with one tap as matrix products whose sums are cut anywhere, not only between images.

Where images and positions are one dimension in memory, the gradient is the losses, turned around, times the image.
`passes.split_contractions` cuts a convolution's gradient between images: of few large ones, most multiprocessors would
have nothing to do.
"""

from __future__ import annotations

from math import inf

from codegen.iteration import collapse
from codegen.sizes import Size
from codegen.target import Target
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.choices import Choice, weigh
from fusegraph.lowering.convolution import is_product
from fusegraph.ops import TABLE
from fusegraph.ops.base import Role
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, replaced_where_chosen
from fusegraph.passes.split_contractions import best_cut
from fusegraph.passes.views import foresee_views

#: What is chosen.
NAME, IMAGES, POSITIONS = "sums of a filter's gradient", "cut between images", "cut between positions"
#: How much faster the matrix product must be estimated to be.
MARGIN = 1.15


def multiply_positions(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Makes gradients of filters with one tap matrix products where that is faster."""

    def weighed(node: Node) -> tuple[Choice, bool] | None:
        target = options.target.planned
        product = as_product(node, graph, target)
        if product == inf:
            return None
        cycles = {IMAGES: best_cut(node, graph, target)[1], POSITIONS: product}
        preferred = POSITIONS if cycles[IMAGES] > MARGIN * product else IMAGES
        alike = f"{[(t.type, t.strides) for t in node.inputs]} {dict(node.attributes)}"
        choice = weigh(NAME, node.name, cycles, preferred, options.settled, alike)
        return choice, choice.taken == POSITIONS

    made = replaced_where_chosen(graph, weighed, _write)
    foresee_views(made.graph)
    return made


def as_product(node: Node, graph: Graph, target: Target) -> float:
    """Returns the cycles that a filter's gradient is estimated to take as a matrix product; infinite for all others."""
    if node.op.role is not Role.WGRAD or "parts" in node.attributes or not is_product(node):
        return inf
    x, loss = node.inputs
    if any(isinstance(n, Size) for n in (*x.shape, *loss.shape)) or node.attributes["groups"] > 1:
        return inf
    sizes = (x.shape[0], *loss.shape[2:])
    steps = [(t.strides[0], *t.strides[2:]) for t in (x, loss)]
    merged, (along, beside) = collapse(sizes, steps, range(len(sizes)))
    if len(merged) > 1 or not x.size * loss.size:
        return inf
    made = Graph("product", graph.io_dtype, graph.compute_dtype)
    a = made._add_tensor("loss", (loss.shape[1], merged[0]), (loss.strides[1], beside[0]), loss.dtype)
    b = made._add_tensor("x", (merged[0], x.shape[1]), (along[0], x.strides[1]), x.dtype)
    product = made.apply(TABLE["matmul"], (a, b), _how(node))
    (maker,) = made.nodes
    made.outputs = [product]
    return best_cut(maker, made, target)[1]


def _how(node: Node) -> dict[str, object]:
    return {"compute_dtype": node.attributes["compute_dtype"], "dtype": node.output.dtype}


def _write(rewrite: Rewrite, node: Node, _: bool) -> None:
    graph, apply, (x, loss) = rewrite.graph, rewrite.graph.apply, rewrite.inputs(node)
    last = (0, *range(2, x.rank), 1)

    def flat(t: Tensor) -> Tensor:
        return apply(TABLE["reshape"], (apply(TABLE["transpose"], (t,), {"perm": last}),), {"shape": (-1, t.shape[1])})

    turned = apply(TABLE["transpose"], (flat(loss),), {"perm": (1, 0)})
    product = named(apply(TABLE["matmul"], (turned, flat(x)), _how(node)), node.name, "product")
    output = rewrite.result(node.output)
    graph.add_node(Node(TABLE["reshape"], (product,), {"shape": output.shape}, output))
