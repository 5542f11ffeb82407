"""The sweep: what is drawn, rows and their figures, and going on where a run stopped; without a GPU."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from fusegraph.bench.sweep.cases import KINDS, case
from fusegraph.bench.sweep.draw import DTYPES, MOST_BYTES, MOST_OPERATIONS, Case
from fusegraph.bench.sweep.run import Row, Sweep, _difference, operands, summary, worst
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
    return [
        Row(0, "conv+bias 1x2 bfloat16", {"eager": 12.0, "inductor": 10.0, "fusegraph": 5.0}, floor_us=4.0),
        Row(1, "dgrad 1x2 tf32", {"eager": 6.0, "inductor": 9.0, "fusegraph": 12.0}, tuned_us=8.0,
            kernels={"fusegraph": [("inference_kernel", 11.5)]}),
        Row(2, "matmul 1x2 tf32", {"eager": 6.0}, {"fusegraph": "GraphError: no"}),
    ]  # fmt: skip


def test_figures() -> None:
    rows = _rows()
    assert [row.ratio for row in rows] == [2.0, 0.5, None]
    assert [row.peer for row in rows] == ["inductor", "eager", "eager"]
    text = summary(rows)
    assert "all                          2  geomean 1.00  below 0.9: 50.0%  below 0.7: 50.0%  worst 0.50" in text
    assert "matmul" in text
    assert "no row of both" in text
    slow = worst(rows).splitlines()
    assert slow[0].startswith("0.50  #1 dgrad 1x2 tf32: ours 12.0, tuned 8.0, eager 6.0")
    assert "11.5 inference_kernel" in slow[1]
    assert slow[-1] == "failed  #2 matmul 1x2 tf32: GraphError: no"


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    made = Sweep(7, ["conv"], [], file)
    made.rows = {row.number: row for row in _rows()}
    made.save()
    again = Sweep(7, ["conv"], [], file)
    assert again.rows == made.rows
    assert again.missing(5) == [3, 4]
    assert not Sweep(8, ["conv"], [], file).rows
    assert json.loads(file.read_text())["seed"] == 7


def test_command(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["bench", "--suite", "sweep", "--only", "matmul", "--count", "3", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all("matmul" in line for line in lines)
    assert main(["bench", "--suite", "sweep", "--only", "nothing"]) == 2
    assert "found in none of conv" in capsys.readouterr().err
    monkeypatch.setattr("fusegraph.runtime.driver.unavailable_reason", lambda: "no driver; use engine='cpu'")
    assert main(["bench", "--suite", "sweep"]) == 2
    assert "there is none: no driver" in capsys.readouterr().err
