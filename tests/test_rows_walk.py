"""Rows that are walked: the next ones are on their way while one is worked on, by a block or a cluster of blocks.

With FUSEGRAPH_UPDATE_GOLDEN=1 in the environment the file in tests/golden is written instead of compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from graphs import check_on_gpu

import fusegraph as fg
from codegen import render
from codegen import schedules as every_schedule
from codegen.arch import arch
from codegen.rows_schedule import RowsSchedule
from codegen.rows_space import normalize, widest
from codegen.spec import RowsSpec
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, random_inputs
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache

GOLDEN = Path(__file__).parent / "golden" / "softmax_walked.cu"
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


def spec_of(graph: fg.Graph) -> RowsSpec:
    (kernel,) = plan(graph).kernels
    spec = kernel.group.lowered.spec
    assert isinstance(spec, RowsSpec)
    return spec


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
        for schedule in schedules(spec_of(g)):
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


# ---- long rows


def long_rows() -> list[fg.Graph]:
    graphs = [graph_of(softmax, (2048, 65536), d) for d in ("bfloat16", "float32")]
    graphs += [graph_of(softmax, (1000, 131072), "float16"), graph_of(softmax, (700, 65540), "bfloat16")]
    return [*graphs, graph_of(block, (2048, 65536), "bfloat16")]


def tried(graph: fg.Graph, name: str) -> list[RowsSchedule]:
    """The schedules of a kernel whose blocks walk rows."""
    found = every_schedule(spec_of(graph), arch(name))
    return [s for s in found if isinstance(s, RowsSchedule) and s.walked]


def test_which_rows_are_walked() -> None:
    """Those that a block cannot have in registers, where several blocks can have them together."""
    made = [tried(graph, "sm_90a") for graph in long_rows()]
    assert all(made)
    assert {(s.form, s.cluster) for one in made for s in one} >= {("registers", 2), ("registers", 4), ("shared", 4)}
    assert not any(tried(graph_of(softmax, (8192, 8192), d), "sm_90a") for d in ("bfloat16", "float32"))
    assert not tried(long_rows()[0], "sm_80")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_90a", "sm_120"])
def test_compiles_for_gpus(name: str) -> None:
    sources = [render(spec_of(g), s) for g in long_rows() for s in tried(g, name)]
    for source, kernel in zip(sources, nvrtc.compile_kernels(sources, name, cache=default_cache()), strict=True):
        assert kernel.spill_bytes == 0, source.code
        assert source.dynamic_shared_bytes + kernel.shared_bytes <= arch(name).shared_bytes_per_block


def test_golden_source() -> None:
    graph = long_rows()[0]
    code = render(spec_of(graph), tried(graph, "sm_90a")[0]).code
    if os.environ.get("FUSEGRAPH_UPDATE_GOLDEN"):
        GOLDEN.write_text(code)
    assert code == GOLDEN.read_text()


@pytest.mark.gpu
def test_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for graph in (
        graph_of(softmax, (1000, 4096), "bfloat16"),
        graph_of(softmax, (77, 5000)),
        graph_of(block, (99, 2056)),
    ):
        for schedule in schedules(spec_of(graph)):
            monkeypatch.setattr("fusegraph.plan.best_schedule", lambda s, a, x=schedule: x)
            check_on_gpu([graph])
