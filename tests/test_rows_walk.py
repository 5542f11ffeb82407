"""Rows that are walked: the next ones are on their way while one is worked on, by a block or a cluster of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fusegraph as fg
from codegen.rows_schedule import RowsSchedule
from codegen.rows_space import normalize, widest
from codegen.spec import RowsSpec
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, random_inputs

Make = Callable[..., Any]


def graph_of(make: Make, shape: tuple[int, ...], dtype: str = "float32", **how: Any) -> fg.Graph:
    g = fg.Graph(f"walked {shape} {dtype}", io_dtype=dtype)
    made = make(g, g.tensor("x", shape, **how))
    for number, tensor in enumerate(made if isinstance(made, tuple) else (made,)):
        g.output(tensor, name=f"y{number}")
    return g


def softmax(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    return g.softmax(x)


def block(g: fg.Graph, x: fg.Tensor) -> tuple[fg.Tensor, ...]:
    """Weights for every row, values for each of them, and another tensor that is needed at the end only."""
    weight, residual = g.tensor("weight", x.shape[1:]), g.tensor("residual", x.shape)
    own = g.tensor("own", (x.shape[0], 1), "float32")
    y = g.gelu(g.rmsnorm(x, weight)) * own + residual
    return y, g.reduction(x, "max", -1)


def schedules(spec: RowsSpec) -> list[RowsSchedule]:
    space = normalize(spec)
    vector = widest(space, len(space.outer) + len(space.row) - 1)
    every = [
        RowsSchedule(form, False, vector, lanes, 1, "uint32", cluster, 1, stages, walked)
        for form, lanes, cluster, stages, walked in (
            ("registers", 64, 1, 2, 3),
            ("registers", 32, 1, 4, 5),
            ("registers", 64, 2, 3, 4),
            ("registers", 64, 4, 2, 2),
            ("shared", 64, 1, 2, 3),
            ("shared", 32, 2, 3, 4),
            ("shared", 64, 4, 5, 20),
        )
    ]
    return [s for s in every if s.cluster == 1 or s.lanes > 32]


def check_walked(graphs: list[fg.Graph], monkeypatch: pytest.MonkeyPatch, special: float = 0.0) -> None:
    made = []
    for g in graphs:
        (kernel,) = plan(g).kernels
        spec = kernel.group.lowered.spec
        assert isinstance(spec, RowsSpec)
        for schedule in schedules(spec):
            monkeypatch.setattr("fusegraph.plan.best_schedule", lambda s, a, x=schedule: x)
            for order in ("forward", "reverse"):
                made.append(CpuExecutable(g, Options(), order=order, lazy=True, arch="sm_90a"))
    build_together(made)
    for executable in made:
        result = check_executable(executable, random_inputs(executable.graph, 3, special=special))
        assert result.ok, f"{executable.plan.kernels[0].choice.schedule}: {result}"


def test_rows_of_a_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    check_walked([graph_of(softmax, (13, 1000))], monkeypatch)


@pytest.mark.slow
def test_rows_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [graph_of(block, (13, 1000), "bfloat16"), graph_of(block, (7, 2052)), graph_of(softmax, (5, 515))]
    graphs += [graph_of(softmax, (3, 4, 260), strides=(4 * 264, 264, 1)), graph_of(softmax, (6, 520), "float64")]
    check_walked(graphs, monkeypatch)
    check_walked([graph_of(softmax, (13, 1000))], monkeypatch, special=0.002)
