"""tf32 whose operands both lie across the sum: lanes read its elements from shared memory by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from graphs import leave_out_pass
from kernel_cases import Case, check_cases

import fusegraph as fg
from codegen.contraction.mma_schedule import MmaSchedule, schedules
from codegen.spec import ContractionSpec
from codegen.target import target
from codegen.tile_path import tile_paths
from fusegraph.layout import layout_strides


@pytest.fixture(autouse=True)
def as_given(monkeypatch: pytest.MonkeyPatch, contractions_in_one_piece: None) -> None:
    """Turns off copies of operands, which would give the cases another form."""
    for name in ("operand layouts", "filter gradients"):
        leave_out_pass(monkeypatch, name)


def with_tile(**wanted: Any) -> Callable[[ContractionSpec], MmaSchedule]:
    """Returns a chooser of the first schedule with these fields, whose operands both lie across the sum."""

    def choose(spec: ContractionSpec) -> MmaSchedule:
        found = tile_paths(spec)
        assert found.a.words
        assert found.b.words
        every = schedules(spec, target("sm_80" if wanted.get("split_k", 1) == 1 else "sm_90"))
        return next(s for s in every if all(getattr(s, name) == value for name, value in wanted.items()))

    return choose


def product(rows: int, cols: int, depth: int, **wanted: Any) -> Case:
    g = fg.Graph("product", compute_dtype="tf32")
    a, b = g.tensor("a", (depth, rows)), g.tensor("b", (depth, cols))
    g.output(g.relu(g.matmul(g.transpose(a, (1, 0)), b)), name="y")
    return Case(g, "contraction", schedule=with_tile(**wanted), label=f"{rows}x{cols}x{depth} {wanted}")


def gradient(channels: int, filters: int, taps: int, stride: int = 1, groups: int = 1, **wanted: Any) -> Case:
    g = fg.Graph("gradient", compute_dtype="tf32")
    side = (9 + 2 * (taps // 2) - taps) // stride + 1
    images = {"x": (2, channels, 9, 7), "loss": (2, filters, side, (7 + 2 * (taps // 2) - taps) // stride + 1)}
    x, loss = (g.tensor(n, shape, strides=layout_strides(shape, "channels_last")) for n, shape in images.items())
    dw = g.conv_wgrad(x, loss, taps, stride=stride, padding=taps // 2, groups=groups)
    g.output(dw, name="dw")
    return Case(g, "contraction", schedule=with_tile(**wanted), label=f"gradient {channels} {filters} {taps} {wanted}")


def test_tiles_whose_rows_lie_across_the_sum():
    cases = [
        product(72, 40, 70, tile_m=64, tile_n=64, tile_k=32),
        product(72, 264, 40, tile_m=64, tile_n=128),
        product(300, 132, 33, tile_m=128, tile_n=128, warps_n=4),
        product(130, 258, 9, tile_m=128, tile_n=64),  # pairs are brought
        product(32, 36, 200, tile_m=32, tile_n=32, split_k=1),
        product(128, 64, 600, tile_m=128, tile_n=64, split_k=2),
        gradient(20, 68, 1, tile_m=32, tile_n=64),
        gradient(12, 64, 3, tile_m=64),
        gradient(8, 40, 3, stride=2, tile_n=32),
        gradient(64, 72, 1, groups=2, tile_m=32),
    ]
    for made in check_cases(cases, guard=True):
        assert all("load_words" in k.source.code for k in made.plan.kernels)


def test_nan_and_infinity_stay_where_they_are():
    case = product(72, 40, 70, tile_m=64, tile_n=64)
    case.special = 0.02
    check_cases([case])
