"""Fitting cost models: known constants are found again from synthetic measurements, and how close estimates are."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("torch")

import fusegraph as fg
from codegen import schedule_data, schedules
from codegen.contraction import wgmma_schedule
from codegen.target import FITTED, target
from fusegraph.bench.schedules.fit import (
    CONSTANTS,
    FIGURES,
    HEADS,
    Triple,
    by_form,
    chosen,
    closeness,
    constants,
    fitted,
    triples,
    using,
)
from fusegraph.bench.schedules.kernels import Argument, Kernel
from fusegraph.bench.schedules.run import Measurements
from fusegraph.lowering.base import Options
from fusegraph.plan import plan

H200 = target("h200")
WGMMA = "contraction wgmma"
ROOT = Path(__file__).parents[1]


def _kernels() -> list[Kernel]:
    found = []
    shapes = (
        (4096, 256, 64),
        (8192, 1024, 4096),
        (64, 512, 8192),
        (2048, 512, 512),
        (65536, 64, 256),
        (256, 256, 8192),
    )
    for m, n, k in shapes:
        g = fg.Graph("product", io_dtype="bfloat16")
        g.output(g.relu(g.tensor("a", (m, k)) @ g.tensor("b", (k, n))), name="y")
        (kernel,) = plan(g, Options(target=H200)).kernels
        arguments = tuple(Argument(t.shape, t.strides, t.dtype) for t in kernel.arguments)
        nbytes = sum(t.nbytes for t in kernel.arguments)
        found.append(Kernel(kernel.group.lowered.spec, "contraction", "matmul relu", arguments, nbytes, {"here": 1}))
    return found


def _measured(values: dict[Any, float]) -> list[tuple[Kernel, list[dict[str, Any]]]]:
    """Returns rows of a machine whose times are the estimates with other constants."""
    rows = []
    for kernel in _kernels():
        some = [s for s in schedules(kernel.spec, H200) if type(s) is wgmma_schedule.WgmmaSchedule][:12]
        with using(values, H200) as on:
            times = [Triple(0, kernel.spec, s, kernel.nbytes, 1.0).estimate(on) for s in some]
        told = [{"schedule": schedule_data(s), "us": us, "predicted_us": us, "why": ""} for s, us in zip(some, times)]
        rows.append((kernel, told))
    return rows


TRUE = {
    ("codegen.contraction.wgmma_schedule", "EPILOGUE_CHUNK"): 330.0,
    ("codegen.contraction.wgmma_schedule", "SHARE"): 0.7,
    ("", "sm_rate"): 30.0,
}


@pytest.mark.slow
def test_known_constants_are_found_again() -> None:
    every = triples(_measured(TRUE))
    before = {name: constants(H200, [WGMMA])[name] for name in TRUE}
    found = fitted(every, H200, before)
    for name, value in TRUE.items():
        assert found[name] == pytest.approx(value, rel=0.03)
        assert found[name] != pytest.approx(before[name], rel=0.03)
    first, after = (by_form(every, H200, values)[0] for values in (before, found))
    assert after.error < 1.01 < first.error
    assert after.close == 1.0
    assert after.regret == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_choices_follow_the_measurements() -> None:
    every = triples(_measured({}))
    wrong = {("codegen.contraction.wgmma_schedule", "MEMORY_SHARE"): 0.1}
    found = chosen(every, H200, wrong)
    before, after = (by_form(every, H200, values)[0].regret for values in (wrong, found))
    assert after < 1.01
    assert before > 1.02
    right = constants(H200, [WGMMA])
    assert chosen(every, H200, right) == right  # nothing is chosen better than what is chosen best


def test_constants_exist_and_are_restored() -> None:
    values = constants(H200, list(CONSTANTS))
    assert {name for module, name in values if not module} == set(FIGURES) <= set(FITTED)
    with using(dict.fromkeys(values, 7.0), H200) as on:
        assert constants(on, list(CONSTANTS)) == dict.fromkeys(values, 7.0)
    assert constants(H200, list(CONSTANTS)) == values


def test_what_no_estimate_depends_on_stays() -> None:
    every = [t for t in triples(_measured({})) if not t.schedule.gather]  # type: ignore[attr-defined]
    values = {("codegen.contraction.wgmma_stages", "GATHER"): 16.0}
    assert fitted(every, H200, values) == values


def test_closeness() -> None:
    found = closeness("some", [(0, 11.0, 10.0), (0, 9.0, 20.0), (1, 5.0, 10.0), (1, 8.0, 8.0)])
    assert found.number == 4
    assert found.close == 0.5
    assert found.worst == pytest.approx(20 / 9)
    assert found.bias == pytest.approx((1.1 * 0.45 * 0.5) ** 0.25)
    # Of each kernel the schedule with the least estimate takes 20 and 10 microseconds, the best ones 10 and 8.
    assert found.regret == pytest.approx((2.0 * 1.25) ** 0.5)
    assert len(found.cells) == len(HEADS)
    assert closeness("equal", [(0, 5.0, 10.0), (0, 5.0, 8.0)]).regret == pytest.approx(1.25)  # the first is taken


@pytest.mark.slow
def test_tool(tmp_path: Path, capsys: Any) -> None:
    made = Measurements(H200, 12, tmp_path / "schedules.json")
    for kernel, rows in _measured(TRUE):
        made.kernels[kernel.key] = replace(kernel)
        made.rows[kernel.key] = rows
    made.save()
    tool = runpy.run_path(str(ROOT / "tools" / "fit_costs.py"))["main"]
    assert tool([str(tmp_path / "schedules.json")]) == 0
    said = capsys.readouterr().out
    assert "Target(..., " in said
    assert "sm_rate=" in said
    assert "held out" in said
    assert tool([str(tmp_path / "schedules.json"), "--forms", "wgmma"]) == 0
    said = capsys.readouterr().out
    assert "# codegen/contraction/wgmma_schedule.py" in said
    assert "SHARE = 0.7" in said
    with pytest.raises(SystemExit):
        tool([str(tmp_path / "schedules.json"), "--forms", "no such form"])


def test_schedules_of_other_releases_are_left_out() -> None:
    rows = _measured({})
    rows[0][1][0]["schedule"]["gone"] = 1
    assert len(triples(rows)) == sum(len(schedules) for _, schedules in rows) - 1
