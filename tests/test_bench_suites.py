"""The sections of docs on the zoo, sweeps and schedules, and their pictures: of made-up results, and of none."""

from __future__ import annotations

import json
import runpy
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from fusegraph.bench.sweep.rows import Row as SweepRow
from fusegraph.bench.torch_engines import OURS, kept, on_engine
from fusegraph.bench.zoo.run import Figures, Row

ROOT = Path(__file__).resolve().parent.parent
FACTS = {"device": "A GPU", "date": "2026-01-01", "commit": "0123456789abcdef"}


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "suites.py"))


def _write(results: Path, name: str, document: dict[str, Any]) -> None:
    (results / name).mkdir(parents=True)
    (results / name / "gpu.json").write_text(json.dumps(document))


def test_without_results_nothing_is_said(tool: dict[str, Any], tmp_path: Path) -> None:
    assert [tool[name](tmp_path, "../") for name in tool["SECTIONS"]] == [""] * 6
    assert tool["pictures"](tmp_path) == {}


def test_zoo(tool: dict[str, Any], tmp_path: Path) -> None:
    times = {"eager": 30.0, "inductor": 20.0, "fusegraph": 10.0}
    engines = {engine: Figures(9.0, 1.0, us, us, 0.01, 3, 50.0) for engine, us in times.items()}
    rows = [asdict(Row("tv:a", "bf16", 1, engines)), asdict(Row("tv:b", "bf16", 1))]
    _write(tmp_path, "zoo", {**FACTS, "rows": rows})
    said = tool["zoo"](tmp_path, "../")
    assert "A GPU, 2026-01-01, commit 0123456789ab" in said
    assert "- bf16 by replay: geometric mean 2.00 over 1 models, 0 below 1, worst 2.00 (tv:a bf16 b1)." in said
    assert "| tv:a bf16 b1 | 30 | 20 | 10 | 2.00 |" in said
    assert "| tv:b bf16 b1 | - |" in said
    (picture,) = tool["pictures"](tmp_path).values()
    ET.fromstring(picture)
    assert "tv:a" in picture
    assert "tv:b" not in picture


def test_training(tool: dict[str, Any], tmp_path: Path) -> None:
    """Groups of columns without figures are left out; parts have sentences of their own."""
    figures = {"inductor": Figures(call_us=2e3, peak_mb=60.0), OURS: Figures(call_us=1e3, peak_mb=40.0)}
    rows = [
        Row(name, "bf16", 8, figures, mode=mode, flops=int(4e11), rate=8e8, commit=commit)
        for name, mode, commit in (("tv:a", "train", "abc"), ("tv:a", "eval", "def"), ("step:b", "train", None))
    ]
    _write(tmp_path, "training", {**FACTS, "what": "made up", "rows": [asdict(row) for row in rows]})
    said = tool["training"](tmp_path, "../").splitlines()
    assert said[0].startswith("**A GPU, 2026-01-01, commit abc, def, 0123456789ab** ")
    assert said[0].endswith(": made up.")
    assert [line for line in said if line.startswith("- ")] == [
        "- bf16 train by call: geometric mean 2.00 over 1 models, 0 below 1, worst 2.00 (tv:a bf16 b8 train).",
        "- bf16 train by peak memory: geometric mean 1.50 over 1 models, 0 below 1, worst 1.50 (tv:a bf16 b8 train).",
        "- bf16 eval by call: geometric mean 2.00 over 1 models, 0 below 1, worst 2.00 (tv:a bf16 b8 eval).",
        "- bf16 eval by peak memory: geometric mean 1.50 over 1 models, 0 below 1, worst 1.50 (tv:a bf16 b8 eval).",
        "- step:b bf16 b8 train: 2.00 by call, 1.50 by peak memory; MFU of fusegraph 50%, inductor 25%.",
    ]
    assert (
        "| step | call us: eager | inductor | fusegraph | ratio | MB: eager | inductor | fusegraph | ratio | "
        in said[10]
    )
    (picture,) = tool["pictures"](tmp_path).values()
    assert "step:b" in picture


def test_decode(tool: dict[str, Any], tmp_path: Path) -> None:
    engines = {"inductor": Figures(call_us=900.0, replay_us=800.0), OURS: Figures(call_us=620.0, replay_us=500.0)}
    row = Row("llama:1b", "int8", 1, engines, mode="at511", bytes=1_200_000_000, memory=4.8e6, notes=["beside"])
    _write(tmp_path, "decode", {**FACTS, "rows": [asdict(row), asdict(Row("llama:8b", "int8", 1, mode="at511"))]})
    said = tool["decode"](tmp_path, "../")
    assert "| llama:1b int8 b1 at511 | 500 | 800 | 1.60 | 620 | 900 | 1.45 | 2.40 | 1.50 | 50% | 31% | beside |" in said
    assert "| llama:8b int8 b1 at511 | - |" in said
    assert "- int8 at511 by replay: geometric mean 1.60 over 1 models" in said
    (picture,) = tool["pictures"](tmp_path).values()
    assert "inductor 800 us, fusegraph 500 us" in picture


def test_sweep(tool: dict[str, Any], tmp_path: Path) -> None:
    row = SweepRow(0, "conv 1x2 tf32", "conv", "tf32", {"eager": 4.0, "fusegraph": 8.0}, tuned_us=5.0)
    _write(tmp_path, "sweep", {**FACTS, "rows": [asdict(row)]})
    said = tool["sweep"](tmp_path, "../")
    for name in ("all", "conv", "tf32"):
        assert f"| {name} | 1 | 0.50 | 100.0% | 100.0% | 0.50 | 0 | 1 | 0 | 0 | - |" in said


def test_schedules(tool: dict[str, Any], tmp_path: Path) -> None:
    def told(us: float | None, estimated: float) -> dict[str, Any]:
        return {"schedule": {"type": "wgmma"}, "us": us, "predicted_us": estimated, "why": ""}

    row = {"family": "contraction", "schedules": [told(20.0, 10.0), told(None, 1.0), told(10.0, 11.0)]}
    _write(tmp_path, "schedules", {"environment": FACTS, "rows": [row]})
    said = tool["schedules"](tmp_path, "../")
    assert "| contraction wgmma | 1 | 2.000 | 100% | 2.00 |" in said
    assert "| contraction wgmma | 2 | 0.74 | 1.48 | 50% | 2.0 | 2.000 |" in said
    (picture,) = tool["pictures"](tmp_path).values()
    assert len(ET.fromstring(picture).findall("{http://www.w3.org/2000/svg}circle")) == 3  # and one that tells the form


def test_what_fails_or_takes_too_long_is_kept() -> None:
    why: dict[str, str] = {}
    with kept(why, "wrong", 60):
        raise ValueError("of\n two lines")
    with kept(why, "slow", 0.01):
        time.sleep(10)
    with kept(why, "right", 60):
        pass
    assert why == {"wrong": "ValueError: of two lines", "slow": "not done within 0.01 s"}


def test_engines_run_the_same() -> None:
    def call(x: Any) -> Any:
        return x * 2 + 1

    x = torch.arange(6.0)
    assert on_engine("eager", call) is call
    with torch.no_grad():
        torch.testing.assert_close(on_engine(OURS, call)(x), call(x))
