"""Sums of exponentials that are made together with the maximum (`codegen.rows.stages`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graphs import check_on_gpu

import fusegraph as fg
from codegen import best_schedule, render, schedules
from codegen.rows.schedule import RowsSchedule
from codegen.rows.space import normalize
from codegen.rows.stages import stages_along
from codegen.spec import RowsSpec
from codegen.target import target
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, random_inputs

Make = Callable[[fg.Graph, fg.Tensor], Any]


def masked(g: fg.Graph, x: fg.Tensor) -> Any:
    """A causal mask: most threads of the first rows read minus infinity only."""
    causal = g.cmp_ge(g.gen_index(x, axis=0) * 12, g.gen_index(x, axis=1))
    return g.softmax(g.binary_select(x * 0.5, -np.inf, causal))


def entropy(g: fg.Graph, x: fg.Tensor) -> Any:
    """Builds the cross-entropy of a target in each row; its sum is a reduction of its own."""
    target = g.cmp_eq(g.gen_index(x, axis=1), 7)
    return g.logsumexp(x, -1) - g.reduction(g.binary_select(x, 0.0, target), "add", -1)


MADE: dict[str, Make] = {
    "softmax": lambda g, x: g.softmax(x),
    "log_softmax": lambda g, x: g.log_softmax(x),
    "logsumexp": lambda g, x: g.logsumexp(x, -1),
    "dropped": lambda g, x: g.logsumexp(x, -1, keepdims=False),
    "masked": masked,
    "entropy": entropy,
}


def taken_off(g: fg.Graph, x: fg.Tensor, shift: fg.Tensor) -> fg.Tensor:
    return g.reduction(g.exp(x - shift), "add", -1)


def joint(g: fg.Graph, x: fg.Tensor) -> Any:
    """Builds two sums whose elements have the larger of both maxima subtracted."""
    y = x * -0.5
    most = g.max(g.reduction(x, "max", -1), g.reduction(y, "max", -1))
    return taken_off(g, x, most) + taken_off(g, y, most)


OTHER: dict[str, Make] = {
    "finite": lambda g, x: taken_off(g, x, g.min(g.max(g.reduction(x, "max", -1), -1e4), 1e4)),
    "joint": joint,
}


def graph_of(name: str, shape: tuple[int, int], dtype: str) -> fg.Graph:
    g = fg.Graph(f"{name} {shape} {dtype}", io_dtype=dtype)
    g.output((MADE | OTHER)[name](g, g.tensor("x", shape)), name="y")
    return g


def spec_of(graph: fg.Graph) -> RowsSpec:
    (kernel,) = plan(graph).kernels
    spec = kernel.group.lowered.spec
    assert isinstance(spec, RowsSpec)
    return spec


def looks(graph: fg.Graph, form: str, vector: int) -> int:
    return stages_along(normalize(spec_of(graph)), form, vector).loops


def special(graph: fg.Graph) -> Mapping[str, Any]:
    """Returns rows of every kind: infinities of both signs, alone and among others, NaN, slopes, and large offsets."""
    inputs = dict(random_inputs(graph))
    (x,) = graph.inputs
    rows = np.array(inputs["x"], np.float64)
    n = x.shape[1]
    rows[0] = -np.inf
    rows[1, 0], rows[2, n // 2], rows[3, -1] = np.inf, -np.inf, np.nan
    rows[4] = -np.inf
    rows[4, -1] = 3.0
    rows[5], rows[6] = np.linspace(-80, 80, n), np.linspace(300, -300, n)
    rows[7] += 1e4
    rows[8] -= 1e4
    rows[9] = np.inf
    rows[10] = np.where(np.arange(n) % 2, np.inf, -np.inf)
    rows[11] = 2.5
    rows[12] = -np.inf
    rows[12, 0] = np.inf
    rows[13] = np.linspace(0, 0.5, n)
    inputs["x"] = rows.astype(inputs["x"].dtype)
    return inputs


FORMS = [
    {"form": form, "lanes": lanes, "cluster": cluster, "rows": max(1, 64 // lanes) if lanes <= 32 else 1}
    for form, lanes, cluster in (
        ("memory", 64, 1),
        ("memory", 32, 1),
        ("memory", 1, 1),
        ("shared", 64, 1),
        ("shared", 64, 4),
        ("shared", 512, 4),
    )
]


@pytest.mark.slow
def test_special_rows_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements that are infinite or no numbers, wherever a thread meets them; rows that no vector divides, too."""
    graphs = [graph_of(name, (16, 600), "float32") for name in MADE]
    graphs += [graph_of("softmax", (16, 601), "bfloat16"), graph_of("logsumexp", (16, 601), "float64")]
    graphs += [graph_of("softmax", (16, 600), "bfloat16"), graph_of("log_softmax", (16, 2056), "float16")]
    made = []
    for graph in graphs:
        best = best_schedule(spec_of(graph))
        assert isinstance(best, RowsSchedule)
        for form in FORMS:
            schedule = replace(best, **form)
            code = render(spec_of(graph), schedule).code
            assert ("reduce::shift(" in code) == (form["form"] == "memory" or best.vector >= 4)
            monkeypatch.setattr("fusegraph.plan.best_schedule", lambda *_, s=schedule: s)
            made.append(CpuExecutable(graph, Options(), lazy=True))
    build_together(made)
    for executable in made:
        result = check_executable(executable, special(executable.graph))
        assert result.ok, f"{executable.plan.kernels[0].choice.schedule}: {result}"


@pytest.mark.slow
def test_something_else_than_the_maximum_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is finite where the maximum is not, and what two sums share."""
    made = []
    for graph in [graph_of(name, (16, 600), "float32") for name in OTHER]:
        best = best_schedule(spec_of(graph))
        assert isinstance(best, RowsSchedule)
        schedule = replace(best, form="memory", lanes=64, rows=1)
        assert "reduce::shift(" in render(spec_of(graph), schedule).code
        monkeypatch.setattr("fusegraph.plan.best_schedule", lambda *_, s=schedule: s)
        made.append(CpuExecutable(graph, Options(), lazy=True))
    build_together(made)
    for executable in made:
        result = check_executable(executable, special(executable.graph))
        assert result.ok, result


def test_what_is_taken_off_is_known_with_the_maximum() -> None:
    """Where running sums would make a maximum known before what is taken off, there are none."""
    g = fg.Graph("sooner")
    a, b = g.tensor("a", (16, 600)), g.tensor("b", (16, 600))
    greatest = g.reduction(a, "max", -1)
    x = b * taken_off(g, a, greatest)
    later = g.reduction(b * g.reduction(b * greatest, "add", -1), "add", -1)
    g.output(taken_off(g, x, g.reduction(x, "max", -1) + later), name="y")
    assert looks(g, "memory", 4) == looks(g, "registers", 4) == 4


def test_looks() -> None:
    """One look less at rows that do not stay in registers; none is saved where another is for other things."""
    softmax, total = graph_of("softmax", (16, 600), "float32"), graph_of("logsumexp", (16, 600), "float32")
    assert [looks(softmax, form, 4) for form in ("registers", "shared", "memory")] == [3, 2, 2]
    assert [looks(total, form, 4) for form in ("registers", "shared", "memory")] == [2, 1, 1]
    assert [looks(softmax, "shared", 1), looks(softmax, "memory", 1)] == [3, 2]
    g = fg.Graph("weighted")
    x = g.tensor("x", (16, 600))
    e = g.exp(x - g.reduction(x, "max", -1))
    g.output(g.reduction(e, "add", -1) / g.reduction(e * x, "add", -1), name="y")
    assert looks(g, "memory", 4) == 2
    g = fg.Graph("of another")
    x = g.tensor("x", (16, 600))
    g.output(g.reduction(g.exp(x * 0.5 - g.reduction(x, "max", -1)), "add", -1), name="y")
    assert looks(g, "memory", 4) == 2


def test_long_rows_are_read_once() -> None:
    """The logarithm of a sum of exponentials of rows that no registers of a block hold"""
    spec = spec_of(graph_of("logsumexp", (2048, 65536), "bfloat16"))
    for name in ("sm_80", "sm_90a"):
        best = best_schedule(spec, target(name))
        assert isinstance(best, RowsSchedule)
        assert best.form == "memory"
        assert render(spec, best).code.count("load_once<8>(x") == 1
        every = list(schedules(spec, target(name)))
        assert len(set(every)) == len(every)


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    graphs = [graph_of(name, (16, 65536), dtype) for name in MADE for dtype in ("float32", "bfloat16")]
    check_on_gpu([*graphs, graph_of("softmax", (16, 65537), "float32")], inputs=special)
