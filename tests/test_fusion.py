"""Partitions: what becomes one kernel, what does not, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
from kernel_cases import check_cases
from partitions import check_decisions, groups, partition_of, quotient

import fusegraph as fg
from fusegraph.errors import GraphError
from fusegraph.passes.partition import Decision, Partition
from fusegraph.plan import plan


def decision(partition: Partition, producer: str, consumer: str) -> Decision:
    (found,) = [d for d in partition.decisions if (d.producer, d.consumer) == (producer, consumer)]
    return found


# ---- what is one kernel


def test_sigmoid_fma_is_one_kernel():
    graph = fg.Graph("sigmoid_fma")
    a, b, c = (graph.tensor(name, (256, 256)) for name in "abc")
    graph.output(graph.sigmoid(a + b * c), name="y")
    partition = partition_of(graph)
    assert groups(partition) == [["mul", "add", "y"]]
    assert partition.groups[0].family == "pointwise"
    assert [t.name for t in partition.groups[0].reads] == ["a", "b", "c"]
    assert partition.groups[0].bytes_saved == 4 * 256 * 256 * 4
    assert all(d.fused for d in partition.decisions)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_conv_bias_residual_relu_is_one_kernel(layout):
    graph = fg.Graph("block")
    x, r = graph.tensor("x", (2, 16, 8, 8), layout=layout), graph.tensor("r", (2, 32, 8, 8), layout=layout)
    y = graph.conv_fprop(x, graph.tensor("w", (32, 16, 3, 3), layout=layout), padding=1, name="conv")
    graph.output(graph.relu(y + graph.tensor("b", (32, 1, 1)) + r), name="y")
    partition = partition_of(graph)
    (group,) = partition.groups
    assert group.family == "contraction"
    assert [t.name for t in group.reads] == ["x", "w", "b", "r"] or {t.name for t in group.reads} == set("xwbr")
    assert [t.name for t in group.writes] == ["y"]
    assert decision(partition, "conv", group.nodes[1].name).reason.startswith("stays in registers")


def test_matmul_bias_gelu_is_one_kernel():
    graph = fg.Graph("dense", io_dtype="bf16")
    y = graph.tensor("a", (64, 96)) @ graph.tensor("b", (96, 32)) + graph.tensor("bias", (32,))
    graph.output(graph.gelu(y), name="y")
    (group,) = partition_of(graph).groups
    assert group.family == "contraction"
    assert len(group.nodes) == 3


def test_depthwise_with_activation_is_one_direct_convolution():
    graph = fg.Graph("depthwise")
    y = graph.conv_fprop(graph.tensor("x", (1, 32, 9, 9)), graph.tensor("w", (32, 1, 3, 3)), padding=1)
    graph.output(graph.swish(y), name="y")
    (group,) = partition_of(graph).groups
    assert group.family == "direct_convolution"


def test_conv_relu_conv_is_two_kernels_with_relu_in_the_first():
    graph = fg.Graph("two")
    y = graph.conv_fprop(graph.tensor("x", (1, 8, 8, 8)), graph.tensor("v", (8, 8, 3, 3)), padding=1, name="first")
    y = graph.relu(y, name="relu")
    graph.output(graph.conv_fprop(y, graph.tensor("w", (8, 8, 3, 3)), padding=1), name="second")
    partition = partition_of(graph)
    assert groups(partition) == [["first", "relu"], ["second"]]
    declined = decision(partition, "relu", "second")
    assert not declined.fused
    assert declined.reason == ("conv_fprop 'first' and conv_fprop 'second' are two kernels: one anchor each")


def test_several_outputs_and_a_tensor_needed_elsewhere():
    graph = fg.Graph("outputs")
    a, b = graph.tensor("a", (32, 32)), graph.tensor("b", (32, 32))
    total = graph.add(a, b, name="total")
    graph.output(graph.relu(total), name="positive")
    graph.output(graph.tanh(total), name="squashed")
    graph.output(total)
    partition = partition_of(graph)
    (group,) = partition.groups
    assert {t.name for t in group.writes} == {"total", "positive", "squashed"}
    kept = decision(partition, "total", "positive")
    assert kept.fused
    assert kept.reason == "consumer reads it from registers; it is still written, being needed elsewhere"
    assert kept.bytes_saved == 32 * 32 * 4
    # Needed by another kernel: written as well, and read by it.
    graph = fg.Graph("elsewhere")
    a = graph.relu(graph.tensor("a", (32, 32)), name="a_relu")
    graph.output(a @ graph.tensor("w", (32, 32)), name="product")
    graph.output(graph.tanh(a) + 1.0, name="other")
    partition = partition_of(graph)
    assert sorted(map(sorted, groups(partition))) == [["a_relu", "other", "tanh"], ["product"]]
    assert {t.name for t in partition.groups[0].writes} == {"a_relu", "other"}
    assert {t.name for t in partition.groups[1].reads} == {"a_relu", "w"}


def test_readers_of_one_tensor_are_fused_side_by_side():
    graph = fg.Graph("siblings")
    x = graph.tensor("x", (64, 64))
    for op in ("relu", "tanh", "exp"):
        graph.output(getattr(graph, op)(x), name=op)
    partition = partition_of(graph)
    assert len(partition.groups) == 1
    beside = [d for d in partition.decisions if d.shared_input is not None]
    assert len(beside) == 2
    for d in beside:
        assert d.fused
        assert d.shared_input == "x"
        assert d.bytes_saved == 64 * 64 * 4
        assert d.reason == "both read 'x' over the same space: one kernel reads it once"
    # Not when they run over different spaces, nor when what they share is a single number.
    graph = fg.Graph("strangers")
    x = graph.tensor("x", (1, 64))
    graph.output(x + graph.tensor("a", (32, 64)), name="tall")
    graph.output(x + graph.tensor("b", (16, 64)), name="short")
    number = graph.tensor("number", (1,))
    graph.output(graph.tensor("c", (8, 8)) * number, name="one")
    graph.output(graph.tensor("d", (8, 8)) * number, name="other")
    assert len(partition_of(graph).groups) == 4


# ---- what is not, and why


def test_a_diamond_that_would_make_a_cycle_is_split():
    graph = fg.Graph("diamond")
    p = graph.relu(graph.tensor("x", (16, 16)), name="p")
    q = graph.matmul(p, graph.tensor("w", (16, 16)), name="q")
    s = graph.matmul(q, graph.tensor("v", (16, 16)), name="s")
    graph.output(p * s, name="y")
    partition = partition_of(graph)
    assert groups(partition) == [["p"], ["q"], ["s", "y"]]
    declined = decision(partition, "p", "y")
    assert not declined.fused
    assert declined.reason == "would form a cycle: a path between them leaves through 'q'"
    check_cases([graph])


def test_a_diamond_of_pointwise_nodes_is_one_kernel():
    graph = fg.Graph("pointwise diamond")
    p = graph.relu(graph.tensor("x", (16, 16)))
    graph.output(graph.tanh(p) * graph.exp(p) + p, name="y")
    assert len(partition_of(graph).groups) == 1


def test_merges_that_are_legal_one_by_one_but_form_a_cycle_together():
    """a and d read x, b and c read z; a leads to b, and c to d.  One pair at most may be fused side by side."""

    def build(*pairs: str) -> fg.Graph:
        graph = fg.Graph("crossed")
        x, z = graph.tensor("x", (16, 16)), graph.tensor("z", (16, 16))
        row = graph.tensor("row", (1, 16))
        a = graph.output(graph.relu(x), name="a")
        c = graph.output(graph.tanh(z), name="c")
        if "ab" in pairs:
            graph.output(graph.matmul(row, a, name="m1") + z, name="b")
        if "cd" in pairs:
            graph.output(graph.matmul(row, c, name="m2") + x, name="d")
        return graph

    for pair in ("ab", "cd"):
        together = groups(partition_of(build(pair)))
        assert {"ab": ["c", "b"], "cd": ["a", "d"]}[pair] in together
    partition = partition_of(build("ab", "cd"))
    together = [g for g in groups(partition) if len(g) > 1]
    assert together in ([["c", "b"]], [["a", "d"]])
    assert nx.is_directed_acyclic_graph(quotient(partition))
    check_cases([build("ab", "cd")])


def test_different_spaces_are_declined():
    graph = fg.Graph("spaces")
    row = graph.exp(graph.tensor("row", (1, 64)), name="small")
    graph.output(row)
    graph.output(row + graph.tensor("x", (32, 64)), name="large")
    declined = decision(partition_of(graph), "small", "large")
    assert not declined.fused
    reason = "they run over different spaces: 'small' [1, 64] is needed in memory, as is 'large' [32, 64]"
    assert declined.reason == reason
    # When nobody else needs it, it is computed again for every row instead.
    graph = fg.Graph("recomputed")
    row = graph.exp(graph.tensor("row", (1, 64)))
    graph.output(row + graph.tensor("x", (32, 64)), name="large")
    assert len(partition_of(graph).groups) == 1


def test_a_result_that_is_broadcast_further_is_declined():
    graph = fg.Graph("wider")
    product = graph.matmul(graph.tensor("a", (1, 16)), graph.tensor("b", (16, 32)), name="product")
    graph.output(product + graph.tensor("c", (8, 32)), name="y")
    declined = decision(partition_of(graph), "product", "y")
    assert not declined.fused
    assert declined.reason == "'y' [8, 32] does not broadcast to the result of matmul 'product' [1, 32]"
    graph = fg.Graph("beside")
    product = graph.matmul(graph.tensor("a", (8, 16)), graph.tensor("b", (16, 32)), name="product")
    scale = graph.exp(graph.tensor("c", (32,)), name="scale")
    graph.output(scale)
    graph.output(product * scale, name="y")
    declined = decision(partition_of(graph), "scale", "y")
    assert declined.reason == "'scale' is written but does not depend on matmul 'product'"


@pytest.mark.slow
def test_kernels_do_not_grow_without_limit():
    graph = fg.Graph("many")
    total = graph.tensor("x0", (64,))
    for k in range(1, 60):
        total = total + graph.tensor(f"x{k}", (64,))
    graph.output(total, name="sum")
    partition = partition_of(graph)
    assert 2 < len(partition.groups) < 10
    assert any("tensors in flight, the limit is 28" in d.reason for d in partition.decisions)
    graph = fg.Graph("long")
    y = graph.tensor("x", (64,))
    for _ in range(400):
        y = graph.tanh(y) + 1.0
    graph.output(y, name="y")
    partition = partition_of(graph)
    assert 800 / 160 <= len(partition.groups) < 20
    assert any("nodes, the limit is 160" in d.reason for d in partition.decisions)


# ---- decisions


def example() -> fg.Graph:
    graph = fg.Graph("example")
    x = graph.tensor("x", (2, 8, 6, 6))
    before = graph.relu(x, name="before")
    graph.output(before)
    y = graph.conv_fprop(before, graph.tensor("w", (8, 8, 3, 3)), padding=1, name="conv")
    y = graph.add(y, graph.tensor("b", (8, 1, 1)), name="biased")
    y = graph.relu(y, name="after")
    graph.output(y)
    graph.output(graph.conv_fprop(y, graph.tensor("v", (8, 1, 3, 3)), groups=8, name="depthwise"))
    return graph


def test_every_edge_has_a_decision_with_fusion_or_without():
    for fusion in (True, False):
        partition = partition_of(example(), fusion=fusion)
        check_decisions(partition)
        assert len(partition.groups) == (3 if fusion else 5)
    assert all(not d.fused for d in partition.decisions)
    assert {d.reason for d in partition.decisions} == {"fusion is switched off"}


def test_simplified_nodes_have_no_decisions():
    graph = fg.Graph("simplified")
    x = graph.tensor("x", (8, 8))
    twice = graph.relu(graph.relu(x))
    graph.output(twice + graph.relu(x), name="y")
    partition = partition_of(graph)
    check_decisions(partition)
    assert len(partition.decisions) == 1


# ---- checks of partitions


def test_broken_partitions_are_seen():
    partition = partition_of(example())
    first, second, third = partition.groups
    partition.check()

    def broken(*groups: Any, graph: fg.Graph | None = None) -> str:
        with pytest.raises(GraphError) as seen:
            replace(partition, groups=groups, graph=graph or partition.graph).check()
        return str(seen.value)

    assert broken(first, second) == "node 'depthwise' is in no group"
    assert broken(first, replace(second, nodes=second.nodes[1:]), third) == "node 'conv' is in no group"
    assert broken(first, second, third, third) == "node 'depthwise' is in two groups"
    moved = replace(third, nodes=(*third.nodes, second.nodes[0]))
    assert broken(first, second, moved) == "node 'conv' is in two groups"
    assert broken(second, first, third) == "'conv' would run before 'before', whose result it takes"
    assert "would run before" in broken(first, third, second)
    unwritten = replace(first, lowered=replace(first.lowered, writes=()))
    assert broken(unwritten, second, third) == "tensor 'before' crosses kernels but is not written to memory"
    unwritten = replace(third, lowered=replace(third.lowered, writes=()))
    assert broken(first, second, unwritten) == "output 'depthwise' is written by no kernel"


def test_a_group_that_is_not_convex_is_seen():
    graph = fg.Graph("nonconvex")
    p = graph.relu(graph.tensor("x", (16, 16)), name="p")
    q = graph.matmul(p, graph.tensor("w", (16, 16)), name="q")
    graph.output(graph.matmul(q, graph.tensor("v", (16, 16)), name="s") * p, name="y")
    partition = partition_of(graph)
    p_group, q_group, y_group = partition.groups
    joined = replace(y_group, nodes=(*p_group.nodes, *y_group.nodes))
    joined = replace(joined, lowered=replace(joined.lowered, writes=(*p_group.writes, *y_group.writes)))
    for order in ((joined, q_group), (q_group, joined)):
        with pytest.raises(GraphError, match="would run before"):
            replace(partition, groups=order).check()


def test_a_wider_cast_is_made_where_it_is_read() -> None:
    """Statistics of a 16-bit convolution are computed of its result as stored: no float32 copy of it is written."""
    graph = fg.Graph("norm", io_dtype="bfloat16")
    x = graph.tensor("x", (4, 64, 28, 28), layout="NHWC")
    w = graph.tensor("w", (64, 64, 1, 1), layout="NHWC")
    scale, bias, mean, variance = (graph.tensor(name, (1, 64, 1, 1)) for name in ("scale", "bias", "mean", "variance"))
    for result in graph.batchnorm(graph.conv_fprop(x, w), scale, bias, mean, variance):
        graph.output(result)
    made = plan(graph)
    large = {t for kernel in made.kernels for t in kernel.group.writes if t.size == x.size}
    assert all(t.dtype.name == "bfloat16" for t in large), large
    assert len(large) == 2, "the convolution's result and the normal one"


def test_a_gradient_is_widened_where_it_is_read() -> None:
    """The gradient of a norm reads a 16-bit gradient of a convolution several times: the product stores it as it is."""
    g, shape = fg.Graph("gradient", io_dtype="bfloat16"), (8, 64, 14, 14)
    loss, w = g.tensor("loss", (8, 32, 14, 14), layout="NHWC"), g.tensor("w", (32, 64, 1, 1))
    x, kept = g.tensor("x", shape, layout="NHWC"), g.tensor("kept", shape, "bool", layout="NHWC")
    y = g.cast(g.conv_dgrad(loss, w, shape[2:]), "float32")
    y = g.cast(g.binary_select(y, y * 0.0, kept), "bfloat16")
    scale, mean, inverse = (g.tensor(name, (1, 64, 1, 1), "float32") for name in ("scale", "mean", "inverse"))
    for result in g.batchnorm_backward(y, x, scale, mean, inverse):
        g.output(result)
    made = plan(g)
    assert len(made.kernels) == 2
    assert all(t.dtype.name == "bfloat16" for k in made.kernels for t in k.group.writes if t.size == x.size)


def test_products_are_added_up_by_the_last_of_them() -> None:
    """Two are added by either; of more, each takes the sum so far, so that no other waits in memory."""

    def memory(count: int) -> tuple[int, list[int]]:
        g = fg.Graph("sum", io_dtype="bfloat16")
        total = None
        for n in range(count):
            product = g.tensor(f"a{n}", (512, 64)) @ g.tensor(f"b{n}", (64, 512))
            total = product if total is None else total + product
        assert total is not None
        g.output(total)
        made = plan(g)
        return made.memory.size, [len(k.group.nodes) for k in made.kernels]

    assert memory(6) == (2 * 2 * 512 * 512, [1, 2, 2, 2, 2, 2])
    assert sorted(memory(2)[1]) == [1, 2]


def test_gates_are_part_of_either_product() -> None:
    g = fg.Graph("gate", io_dtype="bfloat16")
    x = g.tensor("x", (512, 64))
    g.output(g.swish(x @ g.tensor("a", (64, 512))) * (x @ g.tensor("b", (64, 512))))
    assert len(plan(g).kernels) == 1
