"""What was planned once is read from the cache: the same kernels, arguments and memory, for the caller's own graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graphs import quick
from recipes import seeded

import fusegraph as fg
from codegen.target import target
from fusegraph.engines import cpu, plans
from fusegraph.graph import Graph
from fusegraph.lowering.base import Options
from fusegraph.plan import Plan
from fusegraph.report.explain import describe
from fusegraph.runtime.cache import DiskCache

H200 = Options(target=target("h200"))


@pytest.fixture
def cache(tmp_path: Any) -> DiskCache:
    return DiskCache(tmp_path / "cache")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the graphs that were planned."""
    names: list[str] = []
    plan = plans.plan

    def counting(graph: Graph, *args: Any, **how: Any) -> Plan:
        names.append(graph.name)
        return plan(graph, *args, **how)

    monkeypatch.setattr(plans, "plan", counting)
    return names


def _facts(found: Plan) -> Any:
    arguments = [
        [(t.name, t.base.name, t.start, t.strides, t.shape, t.dtype.name) for t in k.arguments] for k in found.kernels
    ]
    offsets = {t.name: at for t, at in found.memory.offsets.items()}
    texts = [repr(k.source) for k in found.kernels]
    constants = [np.asarray(t.value).tobytes() for t in found.constants]
    return repr(describe(found)), arguments, offsets, texts, constants, found.memory.size


def _model(name: str = "model", width: int = 16, value: float = 2.0) -> Graph:
    graph = fg.Graph(name, io_dtype="bfloat16")
    x = graph.tensor("x", (2, width, 8, 8))
    w = graph.tensor("w", (width, width, 3, 3))
    q = graph.reshape(graph.relu(graph.conv_fprop(x, w, padding=1)), (2, 1, width, 64))
    s = graph.sdpa(q, q, q, attn_scale=0.5)
    graph.output(graph.mul(s, graph.constant(np.full((64,), value, np.float32))))
    return graph


def test_a_graph_is_planned_once(cache, made):
    first, second = _model(), _model()
    plan = plans.planner(True, None, cache)
    expected, found = plan(first, H200), plan(second, H200)
    assert made == ["model"]
    assert _facts(found) == _facts(expected)
    assert found.graph is second
    assert all(t in found.counterparts for t in second.outputs)


@pytest.mark.parametrize(
    "other",
    [
        lambda: (_model(width=32), H200, ""),
        lambda: (_model("other"), H200, ""),
        lambda: (_model(value=3.0), H200, ""),
        lambda: (_model(), replace(H200, strict=True), ""),
        lambda: (_model(), Options(target=target("a100")), ""),
        lambda: (_model(), H200, "tuned since"),
    ],
)
def test_whatever_a_plan_depends_on_is_in_its_key(cache, made, other):
    plans.planner(True, None, cache)(_model(), H200)
    graph, options, chosen = other()
    plans.planner(True, None, cache, chosen)(graph, options)
    assert len(made) == 2


def test_fusion_is_in_the_key(cache, made):
    for fusion in (True, False):
        plans.planner(fusion, None, cache)(_model(), H200)
    assert len(made) == 2


def test_an_entry_that_cannot_be_read_is_made_anew(cache, made, monkeypatch):
    plan = plans.planner(True, None, cache)
    plan(_model(), H200)
    monkeypatch.setattr(cache, "get", lambda _: b"\x80\x05nonsense")
    plan(_model(), H200)
    assert len(made) == 2


@pytest.mark.parametrize("seeds", quick(range(30), range(30, 60)), ids=str)
def test_random_graphs(cache, made, seeds):
    recipes = [seeded(seed) for seed in seeds]
    plan = plans.planner(True, None, cache)
    expected = [_facts(plan(r.build(), H200)) for r in recipes]
    planned = len(made)
    found = [_facts(plan(r.build(), H200)) for r in recipes]
    assert len(made) - planned <= 3  # most can be kept
    for recipe, a, b in zip(recipes, found, expected):
        assert a == b, recipe


def test_kernels_of_a_cached_plan_compute_the_same(cache, made, monkeypatch):
    monkeypatch.setattr(cpu, "cached_planner", lambda fusion, choose: plans.planner(fusion, choose, cache))
    fed = {
        name: np.random.default_rng(1).standard_normal(s) for name, s in (("x", (2, 16, 8, 8)), ("w", (16, 16, 3, 3)))
    }
    import ml_dtypes

    fed = {name: value.astype(ml_dtypes.bfloat16) for name, value in fed.items()}
    results = [np.asarray(fg.compile(_model(), engine="cpu")(**fed)).tobytes() for _ in range(2)]
    assert made == ["model"]
    assert results[0] == results[1]


def _varying(most: int = 300) -> Graph:
    graph = fg.Graph("varying", io_dtype="float16")
    n, m = fg.Dim("n", max=most), fg.Dim("E", max=64)
    x, past = graph.tensor("x", (n, 64)), graph.tensor("past", (m, 64))
    both = graph.concatenate(past, x, axis=0)
    graph.output(graph.softmax(graph.matmul(both, graph.tensor("w", (64, 48))), axis=-1), name="y")
    return graph


@pytest.mark.slow
def test_plans_of_all_sizes_are_kept(cache, monkeypatch):
    plan_ranges, made = plans.plan_ranges, []
    monkeypatch.setattr(plans, "plan_ranges", lambda g, *a, **k: made.append(g.name) or plan_ranges(g, *a, **k))
    expected = plans.sized_planner(True, None, cache)(_varying(), H200)
    graph = _varying()
    found = plans.sized_planner(True, None, cache)(graph, H200)
    assert made == ["varying"]
    assert found.graph is graph
    assert [repr(s) for s in found.sources] == [repr(s) for s in expected.sources]
    for sizes in ({"n": 1, "E": 2}, {"n": 7, "E": 9}, {"n": 64, "E": 32}):
        a, b = (p.at(sizes) for p in (found, expected))
        assert [repr(k.source) for k in a.kernels] == [repr(k.source) for k in b.kernels]
        assert a.memory.size == b.memory.size
    plans.sized_planner(True, None, cache)(_varying(200), H200)
    plans.sized_planner(True, None, cache)(_varying(), replace(H200, strict=True))
    plans.sized_planner(False, None, cache)(_varying(), H200)
    assert len(made) == 4
