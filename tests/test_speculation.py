"""What passes speculate on and no kernel takes is undone: the graph compiles without it, and its decisions tell why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import check_all, quick

import fusegraph as fg
from codegen import best_schedule
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.spec import AttentionSpec
from codegen.declined import Declined
from codegen.spec import ContractionSpec
from fusegraph import lowering
from fusegraph.errors import GraphError
from fusegraph.lowering.attention_prologue import prologues_of
from fusegraph.lowering.base import Lowered
from fusegraph.plan import plan

Refuses = Callable[[Any], bool]
REASON = "refused by the test"


def _attention(rope: bool = False) -> fg.Graph:
    graph = fg.Graph("attention", io_dtype="float16")
    q, k, v = (graph.tensor(name, (1, 2, 12, 16)) for name in "qkv")
    if rope:
        q = q * graph.tensor("scale", (1, 2, 12, 1))
    o = graph.sdpa(q, k, v, use_causal_mask=True)
    graph.output(graph.relu(o), name="o")
    return graph


def _gradients(keys: int = 12) -> fg.Graph:
    graph = fg.Graph("gradients", io_dtype="float16")
    q, o, loss = (graph.tensor(name, (1, 2, 12, 16)) for name in ("q", "o", "dO"))
    k, v = (graph.tensor(name, (1, 2, keys, 16)) for name in "kv")
    stats = graph.tensor("stats", (1, 2, 12, 1), "float32")
    for name, t in zip(("dQ", "dK", "dV"), graph.sdpa_backward(q, k, v, o, loss, stats)):
        graph.output(t, name=name)
    return graph


def _product() -> fg.Graph:
    graph = fg.Graph("product")
    a, b, c = graph.tensor("a", (9, 20)), graph.tensor("b", (20, 7)), graph.tensor("c", (7,))
    graph.output(graph.relu(a @ b + c), name="y")
    return graph


def _in_lowering(monkeypatch: pytest.MonkeyPatch, module: Any, refuses: Refuses) -> None:
    """Lets a family decline groups with such a node at lowering."""
    lower = module.LOWERING.lower

    def refused(view: lowering.GroupView, *rest: Any) -> Lowered:
        if any(map(refuses, view.nodes)):
            raise Declined(REASON)
        found: Lowered = lower(view, *rest)
        return found

    monkeypatch.setattr(module.LOWERING, "lower", refused)


def _in_schedules(monkeypatch: pytest.MonkeyPatch, refuses: Refuses) -> None:
    """Lets every form decline such a spec."""

    def chosen(spec: Any, arch: Any) -> Any:
        if refuses(spec):
            raise Declined(REASON)
        return best_schedule(spec, arch)

    monkeypatch.setattr("fusegraph.plan.best_schedule", chosen)


def _families(graph: fg.Graph) -> set[str]:
    return {g.family for g in plan(graph).partition.groups}


def _declined(graph: fg.Graph) -> set[str]:
    return {d.reason for d in plan(graph).partition.decisions if not d.fused}


def test_a_prologue_is_undone_before_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _attention(rope=True)
    assert "pointwise" not in _families(graph)
    _in_lowering(monkeypatch, lowering.attention, lambda n: any(prologues_of(n)))
    assert {"attention", "pointwise"} <= _families(graph)
    assert any(REASON in reason for reason in _declined(graph))
    check_all([graph])


@pytest.mark.parametrize("where", ["lowering", "schedules"])
def test_attention_is_undone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _attention(rope=True)
    if where == "lowering":
        _in_lowering(monkeypatch, lowering.attention, lambda n: n.op.name == "attention")
    else:
        _in_schedules(monkeypatch, lambda spec: isinstance(spec, AttentionSpec))
    assert "attention" not in _families(graph)
    assert any(REASON in reason for reason in _declined(graph))
    check_all([graph])


@pytest.mark.parametrize("where", ["lowering", "schedules"])
@pytest.mark.parametrize("keys", quick(300, 12))
def test_gradients_are_undone(where: str, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _gradients(keys)
    if where == "lowering":
        _in_lowering(monkeypatch, lowering.attention_backward, lambda n: n.op.name == "attention_backward")
    else:
        _in_schedules(monkeypatch, lambda spec: isinstance(spec, AttentionBackwardSpec))
    assert "attention_backward" not in _families(graph)
    check_all([graph])


def test_a_group_without_a_schedule_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _product()
    assert len(plan(graph).kernels) == 1
    _in_schedules(monkeypatch, lambda spec: isinstance(spec, ContractionSpec) and len(spec.program.instructions) > 0)
    found = plan(graph)
    assert len(found.kernels) == 3
    assert any(REASON in d.reason for d in found.partition.decisions)
    check_all([graph])


def test_a_node_of_the_users_without_a_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _in_schedules(monkeypatch, lambda spec: True)
    with pytest.raises(GraphError, match=f"node without a kernel: .*{REASON}"):
        plan(_product())


def test_what_is_undone_changes_no_bits_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two attentions one is undone; the other stays a kernel."""
    graph = _attention()
    q, k, v = (graph.tensor(f"{name}2", (1, 2, 12, 16)) for name in "qkv")
    graph.output(graph.sdpa(q, k, v), name="other")
    _in_lowering(monkeypatch, lowering.attention, lambda n: n.op.name == "attention" and n.output.name != "other")
    families = [g.family for g in plan(graph).partition.groups]
    assert families.count("attention") == 1
    check_all([graph])


def test_places_of_views_are_those_that_kernels_take() -> None:
    """Queries, scaled, are slices of a tensor that another kernel would write in an order of its own."""
    graph = fg.Graph("views")
    x, w = graph.tensor("x", (2, 16, 12)), graph.tensor("w", (16, 48))
    t = graph.transpose(x, (2, 0, 1))
    p = graph.reshape(graph.reshape(t, (24, 16)) @ w, (12, 2, 3, 16))
    parts = graph.transpose(p, (2, 0, 1, 3))
    q, k, v = (graph.transpose(graph.reshape(parts[n], (12, 4, 8)), (1, 0, 2)) for n in range(3))
    s = (q * np.float32(0.25)) @ graph.transpose(k, (0, 2, 1))
    o = graph.softmax(s) @ v
    graph.output(graph.layernorm(t + graph.reshape(graph.transpose(o, (1, 0, 2)), (12, 2, 16)), 1.0, 0.0), name="y")
    check_all([graph])
