"""The zoo: its models, jobs in processes, rows and their figures, going on where a run stopped; without a GPU."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusegraph.bench.workers import Failure, each
from fusegraph.cli import main
from fusegraph.cli.suites import pattern

pytest.importorskip("torch")

import torch

import fusegraph as fg
from fusegraph.bench.precision import allow_tf32
from fusegraph.bench.zoo import profile, run
from fusegraph.bench.zoo.figures import INFERENCE, sentences, text
from fusegraph.bench.zoo.models import MODELS, first
from fusegraph.bench.zoo.run import Figures, Row, Task, Zoo, row_from_data, tasks
from fusegraph.plan import plan


@pytest.mark.slow
def test_jobs_that_fail_crash_or_take_too_long_are_told() -> None:
    found = dict(each(math.sqrt, [4.0, -1.0, 9.0], 2, 60.0))
    assert (found[4.0], found[9.0]) == (2.0, 3.0)
    assert found[-1.0].reason.startswith("ValueError")
    assert dict(each(os._exit, [3], 1, 60.0)) == {3: Failure("its process ended with status 3")}
    assert dict(each(time.sleep, [50.0], 1, 0.5)) == {50.0: Failure("not done within 0.5 s")}
    assert not list(each(time.sleep, [50.0], 1, 60.0, end=time.perf_counter() + 0.5))


def _tasks(only: str, dtypes: list[str], batches: list[int]) -> list[Task]:
    return tasks(pattern(only), dtypes, batches)


def test_models_have_names_and_tasks() -> None:
    assert all(name == model.name for name, model in MODELS.items())
    found = _tasks(r"tv:resnet|hf:gpt2$", ["bf16", "fp32"], [1, 0])
    assert Task("tv:resnet18", "bf16", 1) in found
    assert Task("hf:gpt2", "fp32", MODELS["hf:gpt2"].batch) in found
    assert len(found) == len(set(found)) == 2 * 2 * 3
    assert not [t for t in _tasks("prefill1", ["bf16"], [1, 0]) if t.batch != 1]
    assert len(_tasks("prefill1", ["bf16"], [1, 0])) == 1  # its own batch is 1


def test_tf32_is_allowed_as_torch_does() -> None:
    settings = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [of.allow_tf32 for of in settings]
    try:
        for dtype, allowed in (("bf16", [False] * 2), ("fp32", [False, True]), ("tf32", [True] * 2)):
            allow_tf32(dtype)
            assert [of.allow_tf32 for of in settings] == allowed
    finally:
        for of, value in zip(settings, before):
            of.allow_tf32 = value


def test_first_tensor_of_a_result() -> None:
    x = torch.zeros(2)
    assert first(x) is x
    assert first({"none": None, "hidden": (x, None)}) is x
    assert first(SimpleNamespace(to_tuple=lambda: (None, [x]))) is x


def _row(name: str, **times: tuple[float, float]) -> Row:
    engines = {e: Figures(1.0, 0.5, call, replay, 0.01, 9, 80.0) for e, (call, replay) in times.items()}
    return Row(name, "bf16", 1, engines, ["aten.sort.default"], True)


def _rows() -> list[Row]:
    broken = _row("tv:c", eager=(9.0, 9.0), inductor=(9.0, 9.0))
    broken.engines["fusegraph"] = Figures(why={"time": "GraphError: no"})
    return [
        _row("tv:a", eager=(40.0, 30.0), inductor=(20.0, 8.0), fusegraph=(10.0, 10.0)),
        _row("tv:b", eager=(40.0, 30.0), inductor=(20.0, 8.0), fusegraph=(40.0, 2.0)),
        broken,
    ]


def test_figures() -> None:
    rows = _rows()
    assert [row.ratio("call_us") for row in rows] == [2.0, 0.5, None]
    assert [row.ratio("replay_us") for row in rows] == [0.8, 4.0, None]
    heads, first_line, *_ = INFERENCE.lines(rows)
    line = dict(zip(heads, first_line, strict=True))
    assert (line["left to torch"], line["error"]) == ("sort.default", "1e-02")
    said = sentences(rows)
    assert said[0] == "bf16 by call: geometric mean 1.00 over 2 models, 1 below 1, worst 0.50 (tv:b bf16 b1)."
    assert said[-1] == "fusegraph failed: tv:c bf16 b1."
    assert "fusegraph failed: GraphError: no" in text(rows)
    assert [row_from_data(json.loads(json.dumps(asdict(row)))) for row in rows] == rows


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked, cut = tmp_path / "zoo.json", [], ["tv:resnet18"]

    def answers(function: Any, jobs: Any, *_: Any) -> Any:
        for job in jobs:
            if function.func is run._times and job.model in cut:
                return
            asked.append((function.func, job.name))
            Path(job.caches).mkdir(exist_ok=True)
            if job.model == "tv:vgg16":
                yield job, Failure("its process ended with status -11")
            elif function.func is run._first_calls:
                yield job, {engine: Figures(cold_s=7.0) for engine in run.ENGINES}
            else:
                figures = {engine: Figures(call_us=3.0) for engine in run.ENGINES}
                yield job, {"engines": figures, "left": ["aten.sort.default"], "flops": 5}

    monkeypatch.setattr(run, "each", answers)
    wanted = _tasks(r"tv:(resnet18|vgg16)$", ["bf16"], [1])
    made = Zoo(wanted[:1], file, tmp_path)
    assert [row.timed for row in made.measure(2, 1e9)] == [False]
    cut.clear()
    again = Zoo(wanted, file, tmp_path)
    again.facts = {"commit": "abc"}
    assert [row.timed for row in again.measure(2, 1e9)] == [False, True, True]
    assert [name for function, name in asked if function is run._first_calls] == [task.name for task in wanted]
    row = again.rows["tv:resnet18 bf16 b1"]
    assert row.engines["fusegraph"] == Figures(cold_s=7.0, call_us=3.0)
    assert (row.left, row.flops, row.commit) == (["aten.sort.default"], 5, "abc")
    assert again.rows["tv:vgg16 bf16 b1"].engines["eager"].why == {
        "compile": "its process ended with status -11",
        "time": "its process ended with status -11",
    }
    told = json.loads(file.read_text())
    assert told["complete"]
    asked.clear()
    assert not list(Zoo(wanted, file, tmp_path).measure(2, 1e9))
    assert not asked


def test_what_needs_much_memory_is_compiled_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def answers(function: Any, jobs: Any, *_: Any) -> Any:
        if function.func is run._first_calls:
            asked.append([job.model for job in jobs])
        yield from ((job, Failure("no")) for job in jobs)

    monkeypatch.setattr(run, "each", answers)
    wanted = [Task(name, "bf16", 1, single=name == "c") for name in "abcde"]
    list(Zoo(wanted, None, tmp_path).measure(4, 1e9))
    assert asked == [["a", "b"], ["c"], ["d", "e"]]


def test_kernels_are_matched_with_their_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    g = fg.Graph("net", io_dtype="bfloat16")
    x = g.tensor("x", (2, 64, 64, 64), layout="NHWC")
    for number in range(2):
        x = g.relu(g.conv_fprop(x, g.tensor(f"w{number}", (64, 64, 3, 3)), padding=1))
    g.output(x, name="y")
    kernels = plan(g).kernels
    events = [(kernels[0].name, 100.0), ("torch's own", 5.0), *((k.name, 50.0) for k in kernels[1:])]
    found = profile.matched(events, kernels)
    assert sum(entry.us for entry in found) == sum(us for _, us in events)
    assert sum(entry.count for entry in found) == len(events)
    assert found[0].us - found[0].floor_us == max(entry.us - entry.floor_us for entry in found)
    mine = [entry for entry in found if entry.family]
    assert all(entry.floor_us > 0 for entry in mine)
    assert any("bfloat16[2x64x64x64]@0231" in entry.shapes for entry in mine)
    assert profile.alike([("a", 1.0), ("b", 5.0), ("a", 2.0)])[1].us == 3.0
    said = profile.text(profile.Profile("m", found, profile.alike(events)))
    assert said.splitlines()[0].startswith(f"m: {len(events)} kernels")
    assert "torch's own" in said
    assert found[0].schedule in said


def test_command(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["bench", "--suite", "zoo", "--only", "resnet18$"]
    monkeypatch.setattr("fusegraph.cli.suites.find_spec", lambda name: None if name == "transformers" else name)
    assert main([*command, "--list", "--dtypes", "bf16,fp32"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"tv:resnet18 {dtype} b{batch}" for dtype in ("bf16", "fp32") for batch in (1, 64)
    ]
    for more, words in (
        (["--dtypes", "int8"], "'int8' is none of bf16"),
        (["--batches", "0"], "neither a positive number"),
        (["--only", "("], "no regular expression"),
        (["--only", "hf:gpt2"], "in no name"),
    ):
        assert main([*command, *more]) == 2
        assert words in capsys.readouterr().err
    monkeypatch.setattr("fusegraph.runtime.driver.unavailable_reason", lambda: "no driver; use engine='cpu'")
    assert main(command) == 2
    assert "there is none: no driver" in capsys.readouterr().err
