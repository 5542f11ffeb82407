"""The suite of sizes: cases and their sizes, rows that go on, figures, and runs on the cpu engine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fusegraph.bench.sizes import run
from fusegraph.bench.sizes.cases import Case, cases
from fusegraph.bench.sizes.figures import HEADS, cells, ratios, sentences, text
from fusegraph.bench.sizes.run import STATIC, TIMED, Row, Sizes, Task
from fusegraph.bench.torch_engines import OURS
from fusegraph.bench.workers import Failure, each
from fusegraph.bench.zoo.models import MODELS
from fusegraph.cli import main


def _named(name: str) -> Case:
    (found,) = cases(lambda other: other == name, small=True)
    return found


def test_cases_have_models_and_sizes() -> None:
    small, whole = ({case.name: case for case in cases(bool, small=small)} for small in (True, False))
    assert small.keys() == whole.keys()
    for case in (*small.values(), *whole.values()):
        assert case.name in MODELS or case.graph is not None
        assert {name for o in case.operands.values() for name in o.varying.values()} == case.bounds.keys()
        every = [case.drawn(3, number) for number in range(100)]
        assert every == [case.drawn(3, number) for number in range(100)]
        assert all(low <= sizes[name] <= high for sizes in every for name, (low, high) in case.bounds.items())
        assert len({tuple(sizes.values()) for sizes in every}) > 5
    built = _named("graph:conv_bias_relu").built()
    assert [len(t.shape) for t in built.inputs] == [4] * 5


def _row(name: str, **more: Any) -> Row:
    usual = {"sizes": 10, "compiled": 30, "traced": 1, "first_s": 9.0, "slowest_s": 0.5}
    return Row(name, "cuda", 0, **{**usual, **more})


def test_rows_go_on_and_are_told() -> None:
    first, more = _row("a", replay_us={OURS: [2.0]}), _row("a", later=2, wrong=[{"n": 3}], first_s=1.0, slowest_s=0.7)
    both = more.after(first)
    assert (both.sizes, both.compiled, both.later, both.first_s, both.slowest_s) == (20, 30, 2, 9.0, 0.7)
    assert (both.wrong, both.replay_us) == ([{"n": 3}], {OURS: [2.0]})
    times = {OURS: [2.0, 4.0], STATIC: [2.0, 2.0], "inductor": [4.0, 4.0]}
    peer = {"compilations": 2, "first_s": 20.0, "slowest_s": 11.0}
    row = _row("b", replay_us=times, peer=peer, left=["aten.sort.default"])
    assert (ratios(row, STATIC), ratios(row, "inductor")) == ([1.0, 0.5], [2.0, 1.0])
    line = dict(zip(HEADS, cells(row)))
    assert len(cells(row)) == len(cells(both)) == len(HEADS)
    assert (line["notes"], line["inductor: compiled"]) == ("left to torch: sort.default", "2")
    assert sentences([both, row]) == [
        "30 calls of 2 cases on cuda; compiled after the first call: a (2).",
        "Wrong results: a.",
    ]
    assert "Failed: c." in text([_row("c", why={"run": "GraphError: no"})])
    assert [Row(**data) for data in json.loads(json.dumps([asdict(row)]))] == [row]


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Task] = []

    def answers(function: Any, jobs: Any, *_: Any) -> Any:
        for task in jobs:
            asked.append(task)
            yield task, Failure("no") if task.case == "b" else Row(task.case, "cpu", 0, task.count - task.first)

    monkeypatch.setattr(run, "each", answers)
    for count, wanted, done in ((5, ["a"], ["a"]), (8, ["a", "b"], ["a", "b"]), (8, ["a"], [])):
        made = Sizes(wanted, "cpu", 0, tmp_path / "sizes.json", tmp_path)
        assert [row.case for row in made.measure(count, 1e9)] == done
    assert [(task.case, task.first, task.count) for task in asked] == [("a", 0, 5), ("a", 5, 8), ("b", 0, 8)]
    told = json.loads((tmp_path / "sizes.json").read_text())
    assert [(row["case"], row["sizes"], row["why"]) for row in told["rows"]] == [("a", 8, {}), ("b", 0, {"run": "no"})]
    assert not told["complete"]


def test_a_call_that_fails_is_told_of_and_ends_its_case_alone(tmp_path: Path) -> None:
    case = _named("graph:sigmoid_fma")
    row = _row(case.name, sizes=0)
    task = Task(case.name, "cpu", 0, 0, 9, 60.0, str(tmp_path))

    def call(number: int, sizes: Any) -> int:
        if number == 3:
            raise ValueError("no such size")
        return number

    run._Calls(task, case, row).each(call, lambda *_: 0.0)
    sizes = ", ".join(f"{name} = {size}" for name, size in case.drawn(0, 3).items())
    assert (row.sizes, row.why) == (3, {"run": f"at {sizes}: ValueError: no such size"})
    assert f"run failed: at {sizes}" in text([row])


def test_cases_that_are_not_begun_have_rows(tmp_path: Path) -> None:
    made = Sizes(["a", "b"], "cpu", 0, None, tmp_path)
    made.rows["a"] = _row("a", why={"run": "ended", "inductor": "none"})
    assert [row.why for row in made.measure(20, -1e9)] == [
        {"run": "the time was over", "inductor": "none"},
        {"run": "the time was over"},
    ]


def _measured(name: str, count: int, folder: Path, engine: str = "cpu", what: Any = run.measured) -> Row:
    """Returns the row of a case."""
    task = Task(name, engine, 0, 0, count, 3600.0, str(folder))
    ((_, row),) = each(what, [task], 1, 3600.0)
    assert isinstance(row, Row), row
    return row


@pytest.mark.slow
def test_a_graph_compiles_nothing_after_its_first_call(tmp_path: Path) -> None:
    row = _measured("graph:sigmoid_fma", 6, tmp_path)
    assert (row.sizes, row.later, row.wrong) == (6, 0, [])
    assert row.compiled >= 2  # a plan, and its kernels
    assert 0 < row.error < 0.01


def test_command(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegraph.cli.suites.find_spec", lambda name: None if name == "torchvision" else name)
    assert main(["bench", "--suite", "sizes", "--list", "--only", "resnet|gpt2|sigmoid"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == ["hf:gpt2", "graph:sigmoid_fma"]
    assert "torchvision or torch is not installed" in said.err
    assert main(["bench", "--suite", "sizes", "--only", "resnet"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tv:resnet18", "tv:mobilenet_v2", "hf:vit", "hf:bert-base", "hf:gpt2", "hf:llama-1b", "hf:t5-encoder"]
)
def test_models_compile_nothing_after_their_first_call(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchvision" if name.startswith("tv:") else "transformers")
    row = _measured(name, 40, tmp_path)
    assert (row.sizes, row.later, row.traced, row.retraced, row.left, row.wrong) == (40, 0, 1, 0, [], [])
    assert row.error < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["graph:causal_attention", "hf:bert-base"])
def test_replays_are_timed_beside_others(name: str, tmp_path: Path) -> None:
    if name.startswith("hf:"):
        pytest.importorskip("transformers")
    row = _measured(name, 20, tmp_path, "cuda")
    assert (row.sizes, row.later, row.retraced, row.wrong, row.why) == (20, 0, 0, [], {})
    row = _measured(name, 20, tmp_path, "cuda", run.beside)
    assert row.why == {}
    assert len(ratios(row, STATIC)) == TIMED
    if name.startswith("hf:"):
        assert len(ratios(row, "inductor")) == TIMED
        assert row.peer["compilations"] >= 1
