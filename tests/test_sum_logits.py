"""Losses that are written out of log_softmax: the kernel of the logits' product reduces parts of what they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_cases import Case, check_cases, families

import fusegraph as fg
from codegen.spec import ContractionSpec
from fusegraph.lowering.base import Options
from fusegraph.passes import sum_logits
from fusegraph.plan import plan

DEPTH, CLASSES = 40, 97


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_logits, "LEAST_BYTES", 0)


def logarithms(graph: fg.Graph, rows: tuple[int, ...], dtype: Any) -> fg.Tensor:
    """Returns log_softmax of the logits of so many rows, joined in one dimension."""
    x, w, b = (graph.tensor(n, s, dtype) for n, s in zip("xwb", ((*rows, DEPTH), (CLASSES, DEPTH), (CLASSES,))))
    logits = graph.matmul(x, graph.transpose(w, (1, 0))) + b
    if len(rows) > 1:
        logits = graph.reshape(logits, (-1, CLASSES))
    return graph.log_softmax(logits if dtype in ("float32", "float64") else graph.cast(logits, "float32"))


def at_target(graph: fg.Graph, y: fg.Tensor, turned: bool = False) -> fg.Tensor:
    """Returns the elements at the targets, 0 where there is none."""
    target = graph.tensor("target", (y.shape[0], 1), "int64")
    index = graph.cast(graph.gen_index(y, 1), "int64")
    if turned:
        chosen = graph.binary_select(0.0, y, graph.cmp_neq(index, target))
    else:
        chosen = graph.binary_select(y, 0.0, graph.cmp_eq(index, target))
    return graph.reduction(chosen, "add", 1, keepdims=not turned)


def loss(rows: tuple[int, ...], dtype: Any = "float32", smoothing: float = 0.0, turned: bool = False) -> fg.Graph:
    g = fg.Graph("loss")
    y = logarithms(g, rows, dtype)
    result = -at_target(g, y, turned)
    if smoothing:
        result = result * (1 - smoothing) - g.reduction(y, "add", 1, keepdims=not turned) * (smoothing / CLASSES)
    g.output(result, name="losses")
    return g


def inputs_of(graph: fg.Graph) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found = {t.name: rng.standard_normal(t.shape).astype(t.dtype.numpy) for t in graph.inputs if t.dtype.is_float}
    return {**found, "target": rng.integers(-20, CLASSES, graph.tensors["target"].shape)}


def test_kernels() -> None:
    graphs = [
        loss((70,)),
        loss((7, 10), "bfloat16"),
        loss((7, 10), "float64", 0.1, turned=True),
        loss((70,), "float16", 0.2),
        loss((1,), turned=True),
    ]
    for exe in check_cases([Case(g, inputs=inputs_of(g)) for g in graphs], guard=True)[:4]:
        assert exe.plan is not None
        first = exe.plan.kernels[0].group.lowered.spec
        assert isinstance(first, ContractionSpec)
        assert len(first.partials) >= 3
        assert families(exe).count("contraction") == 1
        assert not any(t.size >= 70 * CLASSES for k in exe.plan.kernels for t in k.group.writes)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_logits_that_are_not_finite(value: float) -> None:
    graph = loss((9,))
    given = inputs_of(graph)
    given["target"][:] = 5
    given["b"][3] = value
    check_cases([Case(graph, inputs=given)])
    given["b"][:] = -np.inf
    check_cases([Case(graph, inputs=given)])


def _kept(g: fg.Graph, y: fg.Tensor) -> None:
    g.output(y)


def _of_exponentials(g: fg.Graph, y: fg.Tensor) -> None:
    g.output(g.reduction(g.exp(y), "add", 1))


@pytest.mark.parametrize("use", [_kept, _of_exponentials])
def test_what_needs_every_logarithm_stays(use: Callable[[fg.Graph, fg.Tensor], None]) -> None:
    g = fg.Graph("kept")
    y = logarithms(g, (70,), "float32")
    g.output(at_target(g, y), name="chosen")
    use(g, y)
    assert sum_logits.sum_logits(g).graph is g


@pytest.mark.parametrize("joined", [False, True])
def test_logits_that_are_kept_have_one_product(joined: bool) -> None:
    g = fg.Graph("kept")
    x, w = g.tensor("x", (7, 10, DEPTH)), g.tensor("w", (DEPTH, CLASSES))
    logits = x @ w
    rows = g.reshape(logits, (70, CLASSES))
    g.output(rows if joined else logits, name="logits")
    g.output(at_target(g, g.log_softmax(rows)), name="chosen")
    (made,) = check_cases([Case(g, inputs={**inputs_of(g)})])
    assert families(made).count("contraction") == 1


def test_neither_strict_nor_small_losses_change(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = loss((70,))
    assert sum_logits.sum_logits(graph, Options(strict=True)).graph is graph
    monkeypatch.setattr(sum_logits, "LEAST_BYTES", 1 << 20)
    assert sum_logits.sum_logits(graph).graph is graph
    assert plan(graph).memory.size
