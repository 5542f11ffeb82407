"""Attention in several variants, each one kernel in which no score is ever in memory.

`causal` and `window` are cuDNN's `sdpa` with a few of its words.  `documents` is written out, with a mask and a bias
that no list of masks has: fusegraph recognises the two products with the softmax between them, and evaluates what is
on the scores where they are.

    fusegraph run examples/attention.py --check
    fusegraph explain examples/attention.py
    python examples/attention.py            # checks the variants and shows the kernel of the last one
"""

from math import inf, sqrt

import fusegraph as fg
from fusegraph.report.check import check_executable

BATCH, HEADS, SHARED, LENGTH, DEPTH = 1, 4, 2, 192, 64


def operands(graph: fg.Graph, heads_of_keys: int) -> tuple[fg.Tensor, fg.Tensor, fg.Tensor]:
    """Returns queries, keys and values as projections leave them: batch, length, heads, elements in memory."""

    def tensor(name: str, heads: int) -> fg.Tensor:
        strides = (LENGTH * heads * DEPTH, DEPTH, heads * DEPTH, 1)
        return graph.tensor(name, (BATCH, heads, LENGTH, DEPTH), strides=strides)

    return tensor("q", HEADS), tensor("k", heads_of_keys), tensor("v", heads_of_keys)


def causal_attention() -> fg.Graph:
    """Two heads of queries share one of keys and values; the logarithms of the sums are what a gradient needs."""
    graph = fg.Graph("causal", io_dtype="bfloat16")
    out, stats = graph.sdpa(*operands(graph, SHARED), use_causal_mask=True, generate_stats=True)
    graph.output(out, name="o")
    graph.output(stats, name="stats")
    return graph


def window_attention() -> fg.Graph:
    """Returns every query meets the 48 keys up to its own: tiles of keys outside of that band are not even read."""
    graph = fg.Graph("window", io_dtype="bfloat16")
    out = graph.sdpa(*operands(graph, HEADS), use_causal_mask=True, diagonal_band_left_bound=48)
    graph.output(out, name="o")
    return graph


def document_attention() -> fg.Graph:
    """Queries meet earlier keys of their own document, and the less so the further away they are."""
    graph = fg.Graph("documents", io_dtype="bfloat16")
    q, k, v = operands(graph, HEADS)
    scores = graph.matmul(q, k.transpose(0, 1, 3, 2), dtype="float32") * (1 / sqrt(DEPTH))

    row, key = graph.gen_index(scores, axis=2), graph.gen_index(scores, axis=3)
    bias = graph.log1p(graph.cast(graph.abs(row - key), "float32")) * -0.5
    document = graph.tensor("document", (LENGTH,), dtype="int32")
    same = graph.cmp_eq(document.reshape(LENGTH, 1), document)
    scores = graph.binary_select(scores + bias, -inf, graph.logical_and(key <= row, same))

    probabilities = graph.cast(graph.softmax(scores), "bfloat16")
    graph.output(probabilities @ v, name="o")
    return graph


causal, window, documents = causal_attention(), window_attention(), document_attention()


def main() -> None:
    for graph in (causal, window, documents):
        executable = graph.compile()
        print(check_executable(executable))
        for decision in executable.plan.partition.decisions:
            if "attention" in decision.reason:
                print(f"  {decision.producer} -> {decision.consumer}: {decision.reason}")
    print(executable.plan.kernels[0].source.code)


if __name__ == "__main__":
    main()
