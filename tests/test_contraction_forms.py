"""Which form a contraction has: by the cost models, and what the autotuner is given to time."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_cases import Case, check_cases
from test_contraction import convolution, matmul
from test_contraction_wgmma import hopper, spec

import fusegraph as fg
from codegen import schedules, target
from codegen.contraction import FAMILY
from codegen.contraction.mma_schedule import MmaSchedule
from codegen.contraction.simt_schedule import SimtSchedule
from codegen.contraction.stream_schedule import StreamSchedule
from codegen.contraction.wgmma_layout import WgmmaSchedule
from codegen.spec import ContractionSpec
from fusegraph.lowering.base import Options
from fusegraph.plan import plan

HOPPER, AMPERE = target("sm_90a"), target("sm_80")


def first(made: ContractionSpec, arch: Any = HOPPER) -> list[Any]:
    """Returns what the autotuner times at most."""
    found = schedules(made, arch)
    assert len(set(found)) == len(found)
    return list(found[:12])


def test_candidates_are_of_every_form_that_is_not_hopeless():
    small = first(spec(matmul((32, 32), (32, 32), "bfloat16")))
    assert {type(s) for s in small} - {SimtSchedule} == {WgmmaSchedule, MmaSchedule, StreamSchedule}
    large = first(spec(matmul((4096, 4096), (4096, 4096), "bfloat16")))
    assert {type(s) for s in large} == {WgmmaSchedule, MmaSchedule}
    assert {s.pingpong for s in large if isinstance(s, WgmmaSchedule)} == {False, True}
    exact = first(spec(matmul((4096, 4096), (4096, 4096), "float32", options=Options(strict=True))))
    assert {type(s) for s in exact} == {SimtSchedule}
    assert isinstance(first(spec(matmul((4096, 4096), (4096, 4096), "float32")))[0], WgmmaSchedule)


def test_candidates_are_of_every_way_to_bring_tiles():
    deep = first(spec(matmul((512, 4096), (4096, 512), "bfloat16")))
    assert {s.split_k > 1 for s in deep if isinstance(s, WgmmaSchedule)} == {False, True}
    layout = {"layout": "channels_last", "filters": "channels_last"}
    few = first(spec(convolution((8, 40, 28, 28), (64, 40, 5, 5), "bfloat16", **layout)))
    assert {s.gather for s in few if isinstance(s, WgmmaSchedule)} == {False, True}


def test_the_form_with_the_best_estimate_is_taken(monkeypatch: pytest.MonkeyPatch):
    made = spec(matmul((512, 512), (512, 512), "bfloat16"))
    _, wgmma, mma, *_ = FAMILY.forms
    assert FAMILY.form(made, HOPPER) is wgmma
    assert FAMILY.form(made, AMPERE) is mma
    assert FAMILY.declined(made, HOPPER).keys() == {"thin"}
    estimates = {wgmma: 106e3, mma: 100e3}
    monkeypatch.setattr(FAMILY, "_estimates", lambda *_: estimates)
    assert FAMILY.form(made, HOPPER) is wgmma  # not clearly slower
    estimates[wgmma] = 200e3
    assert FAMILY.form(made, HOPPER) is mma
    assert isinstance(schedules(made, HOPPER)[0], MmaSchedule)
    assert FAMILY.cycles(made, HOPPER) == 100e3
    assert FAMILY.declined(made, HOPPER)["wgmma"] == "it is estimated to take 2.00 times as long as mma"


def dequantised(m: int, n: int, k: int) -> fg.Graph:
    graph = fg.Graph("dequantised", io_dtype="bfloat16")
    weights = graph.tensor("b", (k, n), "int8", strides=(1, k)) * graph.tensor("scale", (n,), "float32")
    graph.output(graph.tensor("a", (m, k)) @ graph.cast(weights, "bfloat16"), name="y")
    return graph


@pytest.mark.slow
def test_few_rows_change_places_with_computed_columns(monkeypatch: pytest.MonkeyPatch):
    """The weights become the rows of tiles, and the blocks of a cluster share tiles of 16 columns."""
    assert plan(dequantised(24, 4096, 4096)).kernels[0].group.lowered.spec.m == (4096,)
    monkeypatch.setattr("fusegraph.lowering.contraction.FEW_ROWS", 0)
    cases = []
    for m, n, k, split_k in ((1, 136, 1024, 2), (7, 200, 1040, 4)):
        assert spec(Case(dequantised(m, n, k))).m == (n,)
        pick = lambda s, split_k=split_k: s.computes and s.split_k == split_k  # noqa: E731
        cases.append(hopper(Case(dequantised(m, n, k), "contraction"), pick))
    check_cases(cases, guard=True)


@pytest.mark.slow
def test_tma_brings_filters_of_groups_in_space():
    """A filter has more dimensions than a tensor map: those of its taps, which lie in each other, are one."""
    how = {"layout": "channels_last", "filters": "channels_last", "groups": 2}
    cases = [
        hopper(convolution((2, 128, 5, 6, 7), (96, 64, 3, 2, 3), dtype, **how, **more), lambda s: not s.gather)
        for dtype in ("bfloat16", "float32")
        for more in ({"padding": 1}, {"stride": 2, "padding": 1})
    ]
    check_cases(cases, guard=True)
