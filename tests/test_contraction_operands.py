"""The Hopper form of the contraction family: operands of the epilogue that come by TMA."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_cases import Case, check_cases
from test_contraction import matmul
from test_contraction_wgmma import hopper, image, in_pingpong, shape

import fusegraph as fg
from codegen import render, schedules, target
from codegen.contraction.wgmma_layout import Layout, WgmmaSchedule
from fusegraph.plan import by_cost_model, plan

HOPPER = target("sm_90a")


def residual(graph: fg.Graph, y: fg.Tensor) -> None:
    graph.output(graph.relu(y + graph.tensor("full", y.shape, y.dtype)), name="y")


def nhwc_residual(graph: fg.Graph, y: fg.Tensor) -> None:
    full = graph.tensor("full", y.shape, y.dtype, layout="channels_last")
    graph.output(graph.relu(y + full), name="y", layout="channels_last")


def two(graph: fg.Graph, y: fg.Tensor) -> None:
    """An epilogue with as many outputs as operands."""
    full, other = (graph.tensor(name, y.shape, y.dtype) for name in ("full", "other"))
    z = y * full + graph.tensor("row", (y.shape[-1],), y.dtype)
    graph.output(graph.gelu(z + other), name="first")
    graph.output(z, name="second")


def three(graph: fg.Graph, y: fg.Tensor) -> None:
    """An epilogue with one operand more than there are buffers, and one of another type."""
    one, other = (graph.tensor(name, y.shape, y.dtype) for name in ("one", "other"))
    graph.output(y * one + other + graph.tensor("wide", y.shape, "float32"), name="y")


def sums(graph: fg.Graph, y: fg.Tensor) -> None:
    z = y + graph.tensor("full", y.shape, y.dtype)
    graph.output(z, name="y")
    graph.output(graph.reduction(z, mode="add", axes=(0,)), name="sums")


def brought(case: Case) -> int:
    """Returns how many operands come by TMA."""
    made = plan(case.graph, choose=by_cost_model(HOPPER))
    spec = next(k for k in made.kernels if k.group.family == "contraction").group.lowered.spec
    schedule: Any = case.schedule(spec) if case.schedule else schedules(spec, HOPPER)[0]
    assert isinstance(schedule, WgmmaSchedule)
    found = len(Layout(spec, schedule.operand_tiles(spec), schedule).operand_maps)
    assert bool(found) == ("shared.operands" in render(spec, schedule).code)
    return found


def test_a_residual_comes_by_tma():
    several = {"blocks": 2, "stages": 2}
    cases = [
        hopper(matmul((70, 64), (64, 72), "bfloat16", epilogue=residual), shape(groups=1, cols=64), **several),
        hopper(matmul((150, 64), (64, 200), "float16", epilogue=residual), in_pingpong(64), pingpong=True, **several),
    ]
    assert [brought(c) for c in cases] == [1, 1]
    check_cases(cases)


@pytest.mark.slow
def test_operands_by_tma():
    several = {"blocks": 3, "stages": 2}
    cases = [
        hopper(
            matmul((320, 192), (192, 256), "bfloat16", epilogue=residual), in_pingpong(128), pingpong=True, **several
        ),
        hopper(
            matmul((300, 128), (128, 320), "float16", epilogue=two), shape(groups=2, cols=128, split_k=1), **several
        ),
        hopper(matmul((300, 128), (128, 512), "bfloat16", epilogue=residual), shape(2, 256, 1), **several),
        hopper(matmul((70, 1024), (1024, 96), "bfloat16", epilogue=residual), shape(1, 96, 3)),
        hopper(matmul((70, 640), (640, 72), "float16", epilogue=two), shape(1, 64, 2)),
        hopper(matmul((3, 130, 96), (3, 96, 128), "bfloat16", epilogue=residual), shape(1, 64, 1), **several),
        hopper(matmul((3, 130, 96), (3, 96, 128), "bfloat16", epilogue=two), shape(2, 128, 1), **several),
        hopper(matmul((130, 96), (96, 136), "bfloat16", epilogue=sums), shape(2, 128, 1), **several),
        hopper(
            image((2, 64, 9, 7), (64, 64, 3, 3), epilogue=nhwc_residual, padding=(1, 1)), shape(1, 64, 1), **several
        ),
        hopper(matmul((130, 96), (96, 136), "bfloat16", epilogue=three), shape(2, 64, 1), **several),
    ]
    assert [brought(c) for c in cases] == [1, 2, 1, 1, 2, 1, 2, 1, 1, 1]
    check_cases(cases)


def test_others_are_read_by_the_threads():
    def of(make: Any) -> Any:
        return lambda graph, y: graph.output(graph.relu(y + make(graph, y)), name="y", dtype=y.dtype)

    others = [
        of(lambda g, y: g.tensor("full", y.shape, "float32")),  # the buffers' elements are smaller
        of(lambda g, y: g.tensor("full", y.shape, "float16")),  # they are of another type
        of(lambda g, y: g.tensor("row", (y.shape[-1],), y.dtype)),
        of(lambda g, y: g.tensor("column", (y.shape[-2], 1), y.dtype)),
        of(lambda g, y: g.tensor("full", y.shape, y.dtype, strides=(1, y.shape[0]))),
        of(lambda g, y: g.tensor("full", y.shape, y.dtype, strides=(y.shape[1] + 1, 1))),
    ]
    cases = [hopper(matmul((96, 64), (64, 96), "bfloat16", epilogue=x)) for x in others]
    assert [brought(c) for c in cases] == [0] * len(cases)


def test_buffers_leave_stages_to_the_operands():
    """Two outputs as wide as the tile and their operands would leave no room for three stages."""
    case = hopper(matmul((256, 512), (512, 512), "bfloat16", epilogue=two), shape(groups=2, cols=256, split_k=1))
    assert brought(case) == 0
