"""Simplification: what is removed, what must not be, and that results stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import check_all, executables, seeded

import fusegraph as fg
from fusegraph.engines.reference import evaluate
from fusegraph.passes.simplify import MAX_FOLDED_BYTES, remove_dead_nodes, simplify
from fusegraph.plan import plan
from fusegraph.report.check import random_inputs

Body = Callable[[fg.Graph, fg.Tensor], Any]


def simplified(body: Body, dtype: str = "float32", shape: tuple[int, ...] = (4, 5)) -> tuple[list[str], fg.Graph]:
    """Returns the ops that simplification leaves of an output of one input, and the graph before it."""
    g = fg.Graph("test", io_dtype=dtype)
    g.output(body(g, g.tensor("x", shape)), name="y")
    return [n.op.name for n in simplify(g).graph.nodes], g


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (lambda g, x: g.exp(x * 1), ["exp"]),
        (lambda g, x: g.exp(1.0 * x), ["exp"]),
        (lambda g, x: g.exp(g.scale(x, 1)), ["exp"]),
        (lambda g, x: g.exp(x / 1), ["exp"]),
        (lambda g, x: g.exp(x - 0), ["exp"]),
        (lambda g, x: g.exp(x**1), ["exp"]),
        (lambda g, x: g.tanh(x**2), ["mul", "tanh"]),
        (lambda g, x: g.tanh(x ** g.constant([-1.0])), ["reciprocal", "tanh"]),
        (lambda g, x: g.tanh(x**3), ["pow", "tanh"]),
        (lambda g, x: g.exp(g.neg(g.neg(x))), ["exp"]),
        (lambda g, x: g.exp(g.neg(g.neg(g.neg(x)))), ["neg", "exp"]),
        (lambda g, x: g.exp(abs(abs(x))), ["abs", "exp"]),
        (lambda g, x: g.exp(g.relu(g.relu(x))), ["relu", "exp"]),
        (lambda g, x: g.exp(g.floor(g.floor(x))), ["floor", "exp"]),
        (lambda g, x: g.exp(g.ceil(g.ceil(x))), ["ceil", "exp"]),
        (lambda g, x: g.exp(g.identity(x)), ["exp"]),
        (lambda g, x: g.exp(g.cast(x, "float32")), ["exp"]),
        (lambda g, x: g.exp((x * 1 - 0) / 1), ["exp"]),
        (lambda g, x: g.exp(x * g.constant([[1.0]])), ["exp"]),
        (lambda g, x: g.cast(~~(x > 0), "int8"), ["cmp_gt", "identity"]),
    ],
)
def test_identities_that_always_hold(body: Body, left: list[str]) -> None:
    ops, graph = simplified(body)
    assert ops == left
    check_all([graph], inputs=lambda g: random_inputs(g, special=0.5))


@pytest.mark.parametrize(
    "body",
    [
        lambda g, x: g.exp(x + 0),  # -0 + 0 is 0
        lambda g, x: g.exp(x - -0.0),  # the same
        lambda g, x: g.exp(0 - x),
        lambda g, x: g.exp(1 / x),
        lambda g, x: g.exp(x * 0),  # NaN and infinity
        lambda g, x: g.exp(g.relu(x, upper_clip=3.0) - 1),
        lambda g, x: g.exp(g.relu(g.relu(x), upper_clip=3.0)),
        lambda g, x: g.exp(g.relu(g.relu(x, negative_slope=0.5), negative_slope=0.5)),
        lambda g, x: g.exp(g.floor(g.ceil(x * 1.5))),
        lambda g, x: g.exp(x * g.constant(np.ones((3, 1, 1), np.float32))),  # has another shape
        lambda g, x: g.exp(x * g.constant(np.float64(1))),  # and dtype
        lambda g, x: g.exp(g.cast(g.cast(x, "fp16"), "float32")),  # rounds
        lambda g, x: g.cast(g.logical_not(g.logical_not(x)), "float32"),  # 0 or 1
    ],
)
def test_what_only_seems_to_hold_stays(body: Body) -> None:
    ops, graph = simplified(body)
    assert len(ops) == len(graph.nodes)
    check_all([graph], inputs=lambda g: random_inputs(g, special=0.5))


def test_outputs_keep_their_names_layouts_and_nodes() -> None:
    g = fg.Graph("test")
    x = g.tensor("x", (4, 6))
    g.output(x * 1, name="same", strides=(1, 4))
    g.output(g.exp(x), name="first")
    g.output(g.exp(x), name="second", strides=(8, 1))
    g.output(g.neg(g.neg(x)), name="third")
    result = simplify(g).graph
    assert [(t.name, t.strides) for t in result.outputs] == [(t.name, t.strides) for t in g.outputs]
    assert [t.name for t in result.inputs] == ["x"]
    check_all([g])


def test_dead_nodes_are_removed() -> None:
    g = fg.Graph("test")
    x, unused = g.tensor("x", (4,)), g.tensor("unused", (7,))
    g.exp(g.relu(unused))
    g.output(-x, name="y")
    for run in (simplify, remove_dead_nodes):
        result = run(g).graph
        assert [n.name for n in result.nodes] == ["y"]
        assert [t.name for t in result.inputs] == ["x", "unused"]
    (executable,) = executables([g])
    np.testing.assert_array_equal(executable(np.ones(4, np.float32), np.ones(7, np.float32)), -np.ones(4))


def test_nodes_left_without_consumers_are_removed_too() -> None:
    ops, _ = simplified(lambda g, x: g.exp(g.neg(g.neg(g.abs(g.abs(x))))))
    assert ops == ["abs", "exp"]
    g = fg.Graph("test")
    x = g.tensor("x", (4,))
    inner = -x
    g.output(g.exp(-inner), name="y")
    assert [n.op.name for n in simplify(g).graph.nodes] == ["exp"]
    assert "neg" not in simplify(g).graph.tensors


def test_common_subexpressions() -> None:
    ops, graph = simplified(lambda g, x: (g.exp(x + 0.5) * g.exp(x + 0.5)) / (x + 0.5))
    assert ops == ["add", "exp", "mul", "div"]
    check_all([graph])
    ops, _ = simplified(lambda g, x: g.relu(x) + g.relu(x, upper_clip=1.0) + g.relu(x, lower_clip=0.0))
    assert ops == ["relu", "relu", "add", "add"]
    ops, _ = simplified(lambda g, x: (x - 1) + (1 - x))
    assert ops == ["sub", "sub", "add"]
    ops, _ = simplified(lambda g, x: g.cast(x, "int8") + g.cast(x, "int32"))
    assert ops == ["identity", "identity", "add"]
    ops, graph = simplified(lambda g, x: g.leaky_relu(x, negative_slope=0.0) / g.leaky_relu(x, negative_slope=-0.0))
    assert ops == ["leaky_relu", "leaky_relu", "div"]
    ops, _ = simplified(lambda g, x: (x @ x) + (x @ x), shape=(4, 4))
    assert ops == ["matmul", "add"]


def test_constants_are_folded() -> None:
    g = fg.Graph("test", io_dtype="bf16")
    x = g.tensor("x", (3, 3), "float32")
    third = g.constant(1) / g.constant(3)
    table = g.cast(g.constant(np.arange(3, dtype=np.int32)) * 2 + 1, "float32")
    g.output(x * g.sqrt(third) + table, name="y")
    result = simplify(g).graph
    assert [n.op.name for n in result.nodes] == ["mul", "add"]
    values = {t.name: t.value for t in result.tensors.values() if t.is_constant}
    np.testing.assert_array_equal(values["identity"], np.array([1, 3, 5], np.float32))
    assert values["sqrt"].dtype == fg.bfloat16.numpy
    assert "0.578125f" in plan(g).kernels[0].source.code  # the root of 1/3 as a bfloat16 holds it
    check_all([g])


def test_large_constants_are_not_made() -> None:
    side = int((MAX_FOLDED_BYTES / 4) ** 0.5) + 1
    g = fg.Graph("test")
    row, column = g.constant(np.ones((1, side), np.float32)), g.constant(np.ones((side, 1), np.float32))
    g.output(row * column, name="product")
    g.output(g.tensor("x", (side,)) + g.exp(row - column), name="y")
    assert [n.op.name for n in simplify(g).graph.nodes] == ["mul", "sub", "exp", "add"]


def test_folding_wraps_and_saturates_as_kernels_do() -> None:
    g = fg.Graph("test", io_dtype="int8")
    x = g.tensor("x", (2,))
    c = g.constant([100, -128])
    for value in (c + c, -c, abs(c), g.cast(g.constant([300.0, np.nan], dtype="float32"), "int8")):
        g.output(x * 0 + value)
    inputs = random_inputs(g)
    folded, unfolded = executables([g])[0], executables([g], fusion=False)[0]
    for a, b in zip(folded(**inputs), unfolded(**inputs)):
        np.testing.assert_array_equal(a, b)
    check_all([g])


def test_only_the_shape_of_an_index_matters() -> None:
    """gen_index does not read its operand, so that equal ones are merged, and nothing is folded into a table."""
    g = fg.Graph("test")
    x, w = g.tensor("x", (5, 7)), g.tensor("w", (7, 6))
    product = x @ w
    table = g.constant(np.zeros((5, 6), np.float32))
    g.output(g.gen_index(g.exp(product), axis=1) + g.gen_index(product, axis=-1) - g.gen_index(table, axis=1), name="y")
    for fusion in (True, False):
        (executable,) = executables([g], fusion=fusion)
        indices = [n for n in executable.plan.simplified.nodes if n.op.name == "gen_index"]
        assert len(indices) == (1 if fusion else 3)
        y = executable(**random_inputs(g))
        np.testing.assert_array_equal(y, np.broadcast_to(np.arange(6), (5, 6)))


@pytest.mark.parametrize(
    ("shape", "joined", "perm", "divided", "left"),
    [
        ((7, 2, 12), (7, 8, 3), (1, 0, 2), (2, 4, 7, 3), ["reshape", "transpose"]),
        ((7, 2, 4, 3), (7, 8, 3), (1, 0, 2), (2, 4, 7, 3), ["transpose"]),
        ((7, 2, 4, 3), (7, 1, 24), (2, 0, 1), (2, 12, 1, 7), ["reshape", "transpose", "reshape"]),
        ((7, 2, 4, 3), (7, 24, 1), (1, 0, 2), (2, 1, 4, 3, 7), ["transpose", "reshape"]),
        ((4, 6), (3, 8), (1, 0), (4, 6), ["reshape", "transpose", "reshape"]),
        ((4, 6), (2, 2, 6), (1, 0, 2), (4, 6), ["reshape", "transpose", "reshape"]),
        ((0, 2, 6), (0, 12), (1, 0), (2, 6, 0), ["reshape", "transpose", "reshape"]),
    ],
)
def test_dimensions_that_are_joined_and_divided_again(
    shape: tuple[int, ...], joined: tuple[int, ...], perm: tuple[int, ...], divided: tuple[int, ...], left: list[str]
) -> None:
    """As heads are by attention: they are turned where they are, and nothing is copied."""
    graph = fg.Graph("test")
    x = graph.exp(graph.tensor("x", shape))
    graph.output(graph.neg(x.reshape(joined).transpose(perm).reshape(divided)), name="y")
    graph.output(graph.tanh(x), name="z")
    result = simplify(graph)
    assert [n.op.name for n in result.graph.nodes if n.kind.name == "MOVEMENT"] == left
    inputs = random_inputs(graph)
    old, new = evaluate(graph, inputs), evaluate(result.graph, inputs)
    np.testing.assert_array_equal(new[result.graph.outputs[0]], old[graph.outputs[0]])


@pytest.mark.slow
def test_heads_of_a_part_are_no_copy() -> None:
    """Queries, keys and values in one product, batches inside of rows, as torch.nn.MultiheadAttention has them."""
    graph = fg.Graph("test")
    x, w = graph.tensor("x", (9, 2, 16)), graph.tensor("w", (16, 48))
    q, k, v = graph.split(x @ w, 3, axis=-1)
    q, k, v = (t.reshape((9, 8, 4)).transpose((1, 0, 2)).reshape((2, 4, 9, 4)) for t in (q, k, v))
    graph.output(graph.sdpa(q, k, v), name="y")
    assert len(plan(graph).kernels) == 2
    check_all([graph])


def test_counterparts_have_the_same_values() -> None:
    """Every tensor's counterpart has its value, on random graphs in float64, where nothing is rounded on the way."""
    for seed in range(40):
        recipe = seeded(seed)
        graph = recipe.build()
        result = simplify(graph)
        inputs = random_inputs(graph, seed)
        old, new = evaluate(graph, inputs), evaluate(result.graph, inputs)
        for tensor, other in result.counterparts.items():
            folded = other.is_constant and not tensor.is_constant
            if other in new and not folded and not any(t.is_constant for t in result.graph.tensors.values()):
                np.testing.assert_array_equal(old[tensor], new[other], err_msg=f"{tensor.name}\n{recipe}")
        assert len(result.graph.nodes) <= len(graph.nodes)
