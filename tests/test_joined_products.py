"""Products of one tensor with several parameters, joined: plain ones, and those stored in few bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import slow

import fusegraph as fg
from fusegraph.plan import plan
from fusegraph.report.check import check, random_inputs


def three(weights: str = "parameters") -> Any:
    """Returns a graph of queries, keys and values, of which one has no bias, as attention takes them."""
    graph, rng = fg.Graph("three"), np.random.default_rng(0)

    def weight(name: str, *shape: int) -> Any:
        if weights == "constants":
            return graph.constant(rng.normal(size=shape).astype(np.float32), name)
        return graph.tensor(name, shape, parameter=weights == "parameters")

    x = graph.tensor("x", (2, 16, 64))
    found = []
    for name, columns in (("q", 64), ("k", 32), ("v", 32)):
        made = graph.matmul(x, weight(f"w{name}", columns, 64).T)
        if name != "k":
            made = made + weight(f"b{name}", columns)
        found.append(made.reshape(2, 16, columns // 16, 16).transpose(0, 2, 1, 3))
    q, k, v = found
    k, v = (graph.concatenate(t, t, axis=1) for t in (k, v))
    graph.output(graph.sdpa(q, k, v, attn_scale=0.25), name="y")
    return graph


def test_products_of_one_tensor_are_joined() -> None:
    for weights, expected in (("parameters", 1), ("constants", 1), ("inputs", 3)):
        made = plan(three(weights))
        assert sum(n.op.name == "matmul" for n in made.simplified.nodes) == expected
        assert [t.shape for t in made.packed] == ([(64, 128), (128,)] if expected == 1 else [])


def coded(bits: int, *, scaled: str) -> Any:
    """Returns a graph of queries, keys and values whose weights are numbers of so many bits, with scales."""
    graph = fg.Graph("coded", "bfloat16")
    x, found = graph.tensor("x", (1, 256)), []
    for name, columns in (("q", 256), ("k", 64), ("v", 64)):
        codes = graph.tensor(f"{name} codes", (columns, 256 * bits // 8), "uint8", parameter=True)
        if bits == 4:
            both = [graph.bitwise_and(codes, 15), graph.shift_right(codes, 4)]
            codes = graph.concatenate(*(c.reshape(columns, 128, 1) for c in both), axis=2).reshape(columns, 256)
        weight = graph.cast(codes, "bfloat16") - 8
        groups = 1 if scaled == "rows" else 4
        scale = graph.tensor(f"{name} scale", (columns, groups), parameter=True)
        if scaled == "groups":
            weight = (weight.reshape(columns, 4, 64) * scale.reshape(columns, 4, 1)).reshape(columns, 256)
        y = graph.matmul(x, weight.T)
        if scaled == "rows":
            y = y * scale.reshape(columns) + graph.tensor(f"{name} bias", (columns,), parameter=True)
        found.append(y.reshape(1, 1, columns // 32, 32).transpose(0, 2, 1, 3))
    q, k, v = found
    k, v = (graph.concatenate(*[t] * 4, axis=1) for t in (k, v))
    graph.output(graph.sdpa(q, k, v, attn_scale=0.25), name="y")
    return graph


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "scaled"), [(4, "rows"), (8, "groups"), *slow((8, "rows"), (4, "groups"))])
def test_products_of_codes_are_joined(bits: int, scaled: str) -> None:
    """What is packed are codes and scales, one behind another: not the numbers that they stand for."""
    graph = coded(bits, scaled=scaled)
    made = plan(graph)
    assert sum(n.op.name == "matmul" for n in made.simplified.nodes) == 1
    scales = 384 * 2 * (1 if scaled == "rows" else 4) + (384 * 2 if scaled == "rows" else 0)
    assert made.packed_bytes == 384 * 256 * bits // 8 + scales
    result = check(graph, "cpu")
    assert result.ok, result


def test_codes_that_are_decoded_otherwise_are_not_joined() -> None:
    graph = fg.Graph("g", "bfloat16")
    x, found = graph.tensor("x", (1, 256)), []
    for name, zero in (("q", 8), ("k", 8), ("v", 7)):
        codes = graph.tensor(name, (64, 256), "uint8", parameter=True)
        found.append(graph.matmul(x, (graph.cast(codes, "bfloat16") - zero).T).reshape(1, 2, 1, 32))
    graph.output(graph.sdpa(*found, attn_scale=0.25), name="y")
    assert sum(n.op.name == "matmul" for n in plan(graph).simplified.nodes) == 2
    result = check(graph, "cpu")
    assert result.ok, result


def test_what_is_stored_at_one_position_is_one_kernel() -> None:
    """Keys, turned, and values of a token are parts of one product, and go to one position of two caches."""
    g = fg.Graph("caches")
    x, at = g.tensor("x", (1, 32)), g.tensor("at", (1,), "int64")
    keys, values = g.tensor("keys", (2, 12, 8)), g.tensor("values", (2, 12, 8))
    k, v = ((x @ g.tensor(name, (16, 32), parameter=True).T).reshape(2, 1, 8) for name in "kv")
    cos, sin = g.tensor("cos", (4,)), g.tensor("sin", (4,))
    a, b = k[:, :, :4], k[:, :, 4:]
    turned = g.exp(g.concatenate(a * cos - b * sin, b * cos + a * sin, axis=2))
    new = g.assign(keys[:, at], turned), g.assign(values[:, at], v)
    g.output(g.reduction(new[0] * new[1], mode="add", axes=(0, 2)), name="y")
    assert [k.group.family for k in plan(g).kernels] == ["contraction", "pointwise", "rows"]
    for place in (0, 11, 5, -1, 12):
        result = check(g, "cpu", {**random_inputs(g), "at": np.asarray([place])})
        assert result.ok, result
