"""The nodes that passes make of attention and its gradients, whoever wrote them: not in the op table."""

from __future__ import annotations

from typing import Any

from fusegraph.ops.base import REQUIRED, Attributes, Kind, Op, TensorType, Types


class Score:
    """The scores of an attention node as a graph of their own: the product of queries and keys, and pointwise nodes.

    graph     its inputs are the operands, its only output is the score.
    operands  the graph's inputs that stand for the node's inputs, in order, beginning with queries and keys.
    notes     the nodes that the attention stands for, as lines of text.
    """

    def __init__(self, graph: Any, operands: tuple[Any, ...], notes: tuple[str, ...]) -> None:
        self.graph, self.operands, self.notes = graph, operands, notes

    @property
    def anchor(self) -> Any:
        """The product of queries and keys."""
        return next(n for n in self.graph.nodes if n.kind is Kind.CONTRACTION)

    def __repr__(self) -> str:
        return f"{len(self.graph.nodes)} nodes"


class Weight:
    """What becomes of an attention node's probabilities before they are multiplied with the values.

    It is a graph of its own, of pointwise nodes that are linear in them.

    anchor    the node whose result stands for the probabilities.
    operands  the graph's inputs that stand for the node's inputs, in order, after those of the score.
    """

    def __init__(self, graph: Any, anchor: Any, operands: tuple[Any, ...]) -> None:
        self.graph, self.anchor, self.operands = graph, anchor, operands

    def __repr__(self) -> str:
        return f"{len(self.graph.nodes) - 1} nodes"


def _no_shape(types: Types, _: Attributes) -> TensorType:
    raise NotImplementedError("attention nodes are made by a pass")


#: (q, k turned, v[, tables of k and v][, sink], others of the score, those of the weight) -> the result, and the
#: logarithms of the sums of exponentials if they are wanted.  origin names what was recognised (`passes.speculation`),
#: probabilities the tensor that the values are multiplied with, rounded says whether it has their dtype.  If paged, k
#: and v are the containers, k as it is.  With parts, results have one dimension more, the first: each is the attention
#: to a part of the keys.  With order, the last result counts tiles of queries (`codegen.attention.spec.AttentionSpec`).
#: `passes.attention` makes it of products and softmax.
ATTENTION = Op(
    name="attention",
    kind=Kind.ATTENTION,
    operands=("operand",),
    variadic=True,
    attributes={
        "origin": REQUIRED,
        "score": REQUIRED,
        "probabilities": REQUIRED,
        "sink": False,
        "zero": False,
        "rounded": False,
        "weight": None,
        "paged": False,
        "parts": 1,
        "order": False,
    },
    infer=_no_shape,
    reference=_no_shape,
    results=("", "stats"),
)

#: (q, k turned, v, dO, lse, row_dot, others of the score, those of the weight) -> what is wanted of the gradients.
#: score's graph has a second output, the slope, if ``sloped``.  over is "queries" or "keys"; results are "first",
#: "second" and "by_scores" as in `codegen.attention.backward_spec`, as is ``guarded``; rounded are the names of the
#: tensors that are rounded before they are multiplied.  `passes.attention_backward` makes it of products and
#: exponentials.
ATTENTION_BACKWARD = Op(
    name="attention_backward",
    kind=Kind.ATTENTION_BACKWARD,
    operands=("operand",),
    variadic=True,
    attributes={
        "origin": REQUIRED,
        "score": REQUIRED,
        "weight": None,
        "factor": REQUIRED,
        "sloped": REQUIRED,
        "over": REQUIRED,
        "results": REQUIRED,
        "rounded": REQUIRED,
        "guarded": REQUIRED,
    },
    infer=_no_shape,
    reference=_no_shape,
    results=("", "second"),
)
