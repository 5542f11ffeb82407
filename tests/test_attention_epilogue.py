"""Pointwise ops on attention's results, in its kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from graphs import check_all, check_on_gpu
from test_attention import BOTTOM, CAUSAL, FORMS

import fusegraph as fg
from fusegraph.plan import plan

After = Callable[[fg.Graph, fg.Tensor], list[fg.Tensor]]


def gated(g: fg.Graph, o: fg.Tensor) -> list[fg.Tensor]:
    """Applies a gate stored with the heads as the last dimension but one, and a residual."""
    _, h, s, d = o.shape
    gate = g.tensor("gate", o.shape, strides=(s * h * d, d, h * d, 1))
    return [o * g.sigmoid(gate) + g.tensor("residual", (d,))]


def two(g: fg.Graph, o: fg.Tensor) -> list[fg.Tensor]:
    return [o, g.cast(o * g.tensor("scale", (o.shape[1], 1, 1), "float32"), "float32")]


def cast(g: fg.Graph, o: fg.Tensor) -> list[fg.Tensor]:
    return [g.cast(o, "float8_e4m3")]


def places(g: fg.Graph, o: fg.Tensor) -> list[fg.Tensor]:
    return [g.relu(o) + g.cast(g.gen_index(o, axis=2) * g.gen_index(o, axis=1), "bfloat16")]


def built(name: str, after: After, heads: int = 2, shared: int = 2, rows: int = 65, keys: int = 67, depth: int = 32,
          dtype: str = "bfloat16", **how: Any) -> fg.Graph:  # fmt: skip
    g = fg.Graph(name, io_dtype=dtype)
    q = g.tensor("q", (2, heads, rows, depth))
    k, v = (g.tensor(x, (2, shared, keys, depth)) for x in "kv")
    found: Any = g.sdpa(q, k, v, **how)
    o, *stats = found if isinstance(found, tuple) else (found,)
    for n, t in enumerate([*after(g, o), *stats]):
        g.output(t, name=f"out{n}")
    return g


def cases() -> list[fg.Graph]:
    return [
        built("gated", gated, **CAUSAL),
        built("grouped", gated, heads=4, generate_stats=True, **BOTTOM),
        built("two", two, heads=4, depth=40),
        built("cast", cast, depth=64, rows=17),
        built("odd", gated, depth=37),
        built("places", places),
        built("tokens of groups", two, heads=4, rows=1),
        built("simt", two, dtype="float32", generate_stats=True, rows=9),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_results_are_one_kernel(arch: str) -> None:
    graphs = cases()
    for g in graphs:
        assert [x.family for x in plan(g).partition.groups if x.family != "view"] == ["attention"], g.name
    check_all(graphs, arch=arch)


@pytest.mark.slow
def test_what_is_left_behind() -> None:
    def families(g: fg.Graph) -> list[str]:
        return [x.family for x in plan(g).partition.groups if x.family != "view"]

    small = built("small", lambda g, o: [o, g.sigmoid(g.tensor("gate", (32,))) + 1], depth=32)
    assert sorted(families(small)) == ["attention", "pointwise"]
    q = fg.Graph("its own queries", io_dtype="bfloat16")
    x = q.tensor("x", (1, 2, 33, 32))
    q.output(q.sdpa(q.exp(x), x, q.tensor("v", x.shape)) + x, name="o")
    assert families(q) == ["pointwise", "attention"]
    split = built("split", gated, rows=1, keys=4096, depth=160)
    assert families(split) == ["attention", "rows"]  # with what combines the parts
    check_all([split], arch="sm_80")


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_on_gpu(cases())
