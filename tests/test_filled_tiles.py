"""Tiles that threads fill: every schedule of the Hopper form fills all of its tiles, whichever way an operand lies."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_cases import Case, check_cases, executable

import fusegraph as fg
from codegen.contraction.wgmma_schedule import _ranked
from codegen.target import target
from fusegraph.lowering.base import Options
from fusegraph.passes import tap_products

H200 = target("h200")


def _graph(dtype: str, rows: bool, cols: bool, *, small: bool = False) -> fg.Graph:
    """Returns (x * scale) @ w whose operands lie along the reduction (rows, cols) or across it."""
    m, n, k = 40, 200, 160
    compute = "tf32" if dtype == "float32" else "float32"
    graph = fg.Graph("filled", io_dtype=dtype, compute_dtype=compute)
    x = graph.tensor("x", (2, m, k), strides=None if rows else (m * k, 1, m))
    scale = graph.tensor("scale", (2, m, 1))
    w = graph.tensor("w", (2, k, n), "int8" if small else None, strides=(n * k, 1, k) if cols else None)
    graph.output(graph.relu(x * scale) @ (graph.cast(w, dtype) if small else w))
    return graph


def _cases(dtype: str, rows: bool, cols: bool, *, small: bool = False) -> list[Case]:
    made = executable(Case(_graph(dtype, rows, cols, small=small), arch="h200"))
    assert made.plan is not None
    spec = next(k.group.lowered.spec for k in made.plan.kernels if k.group.family == "contraction")
    by_tile: dict[Any, Any] = {}
    for _, s in _ranked(spec, H200):
        by_tile.setdefault((s.groups, s.tile_n, s.producer_warpgroups, s.computes), s)
    assert by_tile
    options = Options(target=H200)
    return [
        Case(_graph(dtype, rows, cols, small=small), options=options, schedule=lambda _, s=s: s, label=f"{s}")
        for s in by_tile.values()
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("prologues_in_products")
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("cols", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_schedule_fills_its_tiles(dtype: str, rows: bool, cols: bool, small: bool) -> None:
    check_cases(_cases(dtype, rows, cols, small=small))


@pytest.mark.parametrize("compute", [None, "tf32"])
def test_phases_of_strided_gradients_are_filled(compute: str | None) -> None:
    """Float32 in parts, and tf32 whose filters lie across the sum; a phase has some of the taps, or none."""
    found = 0

    def fills(spec: Any) -> Any:
        nonlocal found
        s = next((s for _, s in _ranked(spec, H200) if s.producer_warpgroups), None)
        found += s is not None
        return s

    def case(loss: tuple[int, ...], w: tuple[int, ...], **how: Any) -> Case:
        graph = fg.Graph("phases")
        dy, filters = graph.tensor("loss", loss, layout="NHWC"), graph.tensor("w", w)
        dx = graph.conv_dgrad(dy, filters, compute_dtype=compute, name="dx", **how)
        graph.output(graph.relu(dx + graph.tensor("bias", (1, w[1], 1, 1))), name="y")
        return Case(graph, options=Options(target=H200), schedule=fills, special=0.01)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tap_products, "_may_be", lambda *_: False)
        check_cases(
            [
                case((2, 70, 5, 4), (70, 96, 3, 3), stride=2, padding=1),
                case((1, 64, 4, 6), (64, 72, 1, 1), stride=2),
                case((1, 66, 3, 5), (66, 65, 4, 2), stride=(3, 2), padding=((1, 0), (0, 1)), size=(9, 10)),
            ],
            guard=True,
        )
    assert found == 3
