"""The sweep: what is drawn, rows and their figures, and going on where a run stopped; without a GPU."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fusegraph.bench.sweep.cases import KINDS, case
from fusegraph.bench.sweep.draw import DTYPES, MOST_BYTES, MOST_OPERATIONS, Case
from fusegraph.bench.sweep.figures import HEADS, choices, summary, table, worst
from fusegraph.bench.sweep.measured import Settings, _difference, operands
from fusegraph.bench.sweep.rows import Row, row_from_data
from fusegraph.bench.sweep.run import Sweep
from fusegraph.cli import main


def test_a_number_has_its_case_whatever_the_others_are() -> None:
    every = [case(3, n) for n in range(40)]
    assert [c.name for c in every] == [case(3, n).name for n in range(40)]
    assert len({c.name for c in every}) == len(every)
    assert [c.name for c in every] != [case(4, n).name for n in range(40)]


def test_all_kinds_and_dtypes_are_drawn_within_bounds() -> None:
    every = [case(0, n) for n in range(300)]
    assert {c.dtype for c in every} == set(DTYPES)
    for c in every:
        size = 2 if "16" in c.dtype else 4
        assert sum(prod(o.shape) * (8 if o.below else size) for o in c.operands) <= MOST_BYTES
        assert c.operations <= MOST_OPERATIONS
    for kind in KINDS:
        assert case(0, 5, (kind,), ("tf32",)).dtype == "tf32"


def test_cases_look_like_layers_of_networks() -> None:
    """Shares of what is in networks: 1x1 convolutions, depthwise ones, concatenations, frozen norms, gates."""
    convs = [c.name for c in (case(0, n, ("conv",)) for n in range(600))]
    share = {words: sum(words in name for name in convs) / len(convs) for words in ("concat ", "affine", "gate+")}
    assert 0.03 < share["concat "] < 0.2
    assert share["affine"] > 0.3
    assert share["gate+"] > 0.02
    taps = [name.partition(" of ")[2].split()[0] for name in convs]
    assert sum(set(t.split("x")) == {"1"} for t in taps) / len(taps) > 0.3
    assert {"1x7", "7x1", "3x3", "5x5", "7x7"} <= set(taps)
    names = {c.name.split()[0] for c in (case(0, n, ("movement", "projections", "rotary")) for n in range(300))}
    assert {name.partition("+")[0] for name in names} >= {"shuffle", "windows", "concatenate", "projections", "rotary"}
    written = [c.name for c in (case(0, n, ("attention",)) for n in range(100)) if "written out" in c.name]
    assert len(written) > 10


def _small(kind: str) -> list[Case]:
    found = (case(1, n, (kind,), ("float32",)) for n in range(400))
    small = [c for c in found if sum(prod(o.shape) for o in c.operands) < 2e5 and c.operations < 1e8]
    return small[:6]


@pytest.mark.parametrize("kind", KINDS)
def test_cases_run_in_torch(kind: str) -> None:
    for drawn in _small(kind) or [case(1, 0, (kind,))][:0]:
        result = drawn.function(*operands(drawn, "cpu"))
        assert _difference({"eager": result, "fusegraph": result}) == 0.0


def test_operands_lie_as_they_are_drawn() -> None:
    drawn = next(c for n in range(100) for c in [case(0, n, ("conv",), ("bfloat16",))] if c.operands[0].order)
    first = operands(drawn, "cpu")[0]
    assert tuple(first.shape) == drawn.operands[0].shape
    assert first.stride(1) == 1
    assert str(first.dtype) == "torch.bfloat16"


def _rows() -> list[Row]:
    ours, theirs = [("inference_kernel", 11.5)], [("implicit_gemm", 5.5)]
    return [
        Row(0, "conv+bias 1x2 bfloat16", "conv", "bfloat16", {"eager": 12.0, "inductor": 10.0, "fusegraph": 5.0},
            floor_us=4.0, predicted_us=10.0),
        Row(1, "dgrad 1x2 tf32", "conv_backward", "tf32", {"eager": 6.0, "inductor": 9.0, "fusegraph": 12.0},
            tuned_us=8.0, kernels={"fusegraph": ours, "eager": theirs}),
        Row(2, "matmul 1x2 tf32", "matmul", "tf32", {"eager": 6.0}, {"fusegraph": "GraphError: no"}),
        Row(3, "wgrad 1x2 tf32", "conv_backward", "tf32", {"eager": 6.0, "fusegraph": 12.0}, tuned_us=11.9,
            kernels={"fusegraph": ours, "eager": theirs}),
        Row(4, "wgrad 1x2 tf32", "conv_backward", "tf32", {"eager": 6.0, "fusegraph": 12.0},
            kernels={"fusegraph": ours * 2, "eager": theirs}),
    ]  # fmt: skip


def test_slow_rows_have_a_cause() -> None:
    assert [row.cause for row in _rows()] == [None, "choice", None, "form", "partition"]


def test_choices_of_slow_rows_have_a_table() -> None:
    def weighed(what: str, preferred: str, **us: float) -> dict[str, Any]:
        estimated = dict.fromkeys(us, 1.5)
        return {"what": what, "node": "y", "taken": preferred, "preferred": preferred, "estimated_us": estimated,
                "measured_us": us}  # fmt: skip

    us = {"eager": 6.0, "fusegraph": 12.0}
    made = [weighed("prologue", "part", part=10.0, own=8.0), weighed("prologue", "own", part=20.0, own=10.0)]
    rows = [Row(0, "a", "conv", "tf32", us, choices=made), Row(1, "b", "norm", "tf32", us)]
    assert choices(rows[1:]) == []
    rows[1].choices = [weighed("parts", "whole", whole=30.0, apart=10.0)]
    assert choices(rows) == [
        ["all", "3", "33.3%", "1.55", "3.00"],
        ["parts", "1", "0.0%", "3.00", "3.00"],
        ["prologue", "2", "50.0%", "1.12", "1.25"],
    ]
    assert "regret" in summary(rows)
    assert "y: parts: apart 10.0, estimated 1.5; whole (chosen) 30.0, estimated 1.5" in worst(rows)
    assert row_from_data(json.loads(json.dumps(asdict(rows[0])))) == rows[0]


def test_figures() -> None:
    rows = _rows()
    assert [row.ratio for row in rows] == [2.0, 0.5, None, 0.5, 0.5]
    assert [row.peer for row in rows] == ["inductor", "eager", "eager", "eager", "eager"]
    lines = {line[0]: dict(zip(HEADS, line)) for line in table(rows)}
    assert list(lines) == ["all", "conv", "conv_backward", "matmul", "bfloat16", "tf32"]
    assert lines["all"] == dict(zip(HEADS, ["all", "4", "0.71", "75.0%", "75.0%", "0.50", "1", "1", "1", "1", "2.00"]))
    assert lines["matmul"]["number"] == "0"
    assert "conv_backward" in summary(rows)
    slow = worst(rows).splitlines()
    assert slow[0].startswith("0.50  #1 dgrad 1x2 tf32: ours 12.0, tuned 8.0, eager 6.0")
    assert slow[0].endswith("; choice")
    assert "11.5 inference_kernel" in slow[1]
    assert slow[-1] == "failed  #2 matmul 1x2 tf32: GraphError: no"


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    made = Sweep(Settings(7, ("conv",)), file)
    made.rows = {row.number: row for row in _rows()}
    made.save()
    again = Sweep(Settings(7, ("conv",)), file)
    assert again.rows == made.rows
    assert again.missing(7) == [5, 6]
    assert not Sweep(Settings(8, ("conv",)), file).rows
    assert json.loads(file.read_text())["seed"] == 7


class _Made:
    """Cases that take no time: every fourth is slow, number 5 fails, number 6 ends its process."""

    def __init__(self, settings: Settings) -> None:
        self._numbers: list[int] = []
        self._slow: list[int] = []

    def examine(self) -> None:
        pass

    def compile(self, number: int) -> None:
        if number == 5:
            raise ValueError("no")
        if number == 6:
            os._exit(7)
        self._numbers.append(number)

    def time(self) -> list[Row]:
        again = [Row(n, "again", us={"eager": 1.0, "fusegraph": 2.0}, tuned_us=1.5) for n in self._slow]
        made = [Row(n, "new", us={"eager": 1.0, "fusegraph": 2.0 if n % 4 == 0 else 1.0}) for n in self._numbers]
        self._slow, self._numbers = [row.number for row in made if row.number % 4 == 0], []
        return again + made


def test_a_run_measures_every_case_whatever_fails(tmp_path: Path) -> None:
    made = Sweep(Settings(7), tmp_path / "sweep.json")
    rows = list(made.measure(12, 2, time.perf_counter() + 60, _Made))
    assert made.missing(12) == []
    assert sorted(row.number for row in rows if row.name == "again") == [0, 4, 8]
    assert {n: row.why for n, row in made.rows.items() if row.why} == {
        5: {"fusegraph": "ValueError: no"},
        6: {"fusegraph": "its process ended with status 7"},
    }
    assert Sweep(Settings(7), tmp_path / "sweep.json").rows == made.rows
    assert list(Sweep(Settings(7)).measure(12, 2, time.perf_counter(), _Made)) == []


def test_command(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["bench", "--suite", "sweep", "--only", "matmul", "--count", "3", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all("matmul" in line for line in lines)
    assert main(["bench", "--suite", "sweep", "--peers", "cupy"]) == 2
    assert "if asked for, cudnn" in capsys.readouterr().err
    assert main(["bench", "--suite", "sweep", "--only", "nothing"]) == 2
    assert "found in none of conv" in capsys.readouterr().err
    monkeypatch.setattr("fusegraph.runtime.driver.unavailable_reason", lambda: "no driver; use engine='cpu'")
    assert main(["bench", "--suite", "sweep"]) == 2
    assert "there is none: no driver" in capsys.readouterr().err
