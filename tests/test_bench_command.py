"""bench on the command line: what is printed and written, and what is wrong with its arguments."""

from __future__ import annotations

import json
import os

import pytest
from test_bench import ENVIRONMENT, ROOT, ROW_KEYS

from benchmarks.workloads import board
from fusegraph.cli import main
from fusegraph.errors import DeviceError, FileError
from fusegraph.report import artifacts
from fusegraph.report.bench import Row
from fusegraph.report.plot import svg
from fusegraph.runtime import driver

# --- the command


class Fake:
    """A Bench whose rows are made up: ``plan`` maps a workload's name to its rows' medians, or to an error."""

    plan: dict[str, object] = {}  # noqa: RUF012

    def __init__(self, device: int = 0, repeats: int = 15, *, autotune: bool = False) -> None:
        self.device, self.repeats, self.autotune = device, repeats, autotune

    def rows(self, workload, peers):
        for engine in ("cuda", *peers):
            us = self.plan.get(workload.name, {}).get(engine, 20.0)
            if isinstance(us, BaseException):
                raise us
            fraction = None if us is None else 10.0 / us
            yield Row(workload.name, engine, us, 10.0, fraction, 0.05, 3.0, "why | not " * 10 if us is None else "")


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr("fusegraph.cli.bench.Bench", Fake)
    monkeypatch.setattr("fusegraph.cli.bench.environment", lambda device: dict(ENVIRONMENT))
    monkeypatch.setattr(driver, "unavailable_reason", lambda: None)
    monkeypatch.setattr(Fake, "plan", {})
    return Fake


def test_list_needs_no_gpu(capsys, monkeypatch):
    monkeypatch.setattr(driver, "unavailable_reason", lambda: "no driver")
    assert main(["bench", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [w.name for w in board()]
    assert main(["bench", "--list", "--suite", "board", "--only", "^sigmoid.*bf16$"]) == 0
    assert capsys.readouterr().out == "sigmoid(a+b*c) 64Mi bf16\n"
    assert main(["bench", "--list", str(ROOT / "examples" / "sigmoid_fma.py")]) == 0
    assert capsys.readouterr().out == "sigmoid_fma\n"


def test_no_gpu(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "unavailable_reason", lambda: "no CUDA driver; use engine='cpu', which needs no GPU")
    path = tmp_path / "r.json"
    assert main(["bench", "--json", str(path)]) == 2
    assert capsys.readouterr().err.endswith("error: bench times kernels on a GPU, and there is none: no CUDA driver\n")
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "("], "is no regular expression"),
        (["--only", "no such workload"], "is found in no workload's name"),
        (["--peers", "tpu"], "'tpu' is none of cudnn, torch, compile, compile-max, cupy, plain, none"),
        (["--suite", "other"], "there is no suite 'other'; there are: board, memory-bound, tensor-core, models"),
        (["x.py", "--suite", "board"], "give a file or --suite, not both"),
        ([str(ROOT / "examples" / "sigmoid_fma.py"), "--peers", "cudnn,torch"], "'torch' is none of cudnn, none; the"),
        (["--json", "."], "is a folder; give the name of a file"),
    ],
)
def test_mistakes(arguments, message, capsys, fake):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_rows_are_printed_and_written(capsys, fake, tmp_path):
    path, picture = tmp_path / "new" / "r.json", tmp_path / "r.svg"
    fake.plan = {"sigmoid(a+b*c) 64Mi bf16": {"cudnn": None}}
    arguments = ["--only", "^sigmoid", "--peers", "cudnn,torch", "--repeats", "7"]
    assert main(["bench", *arguments, "--json", str(path), "--plot", str(picture)]) == 0
    told = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert {k: told[k] for k in ENVIRONMENT} == ENVIRONMENT
    assert (told["repeats"], told["complete"]) == (7, True)
    assert told["options"] == "--suite board --only '^sigmoid' --peers cudnn,torch --repeats 7"
    assert [r["engine"] for r in told["rows"]] == ["cuda", "cudnn", "torch"] * 2
    assert all(set(r) == ROW_KEYS for r in told["rows"])
    assert told["rows"][4]["median_us"] is None
    assert os.listdir(path.parent) == ["r.json"]
    assert picture.read_text() == svg(told)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Pretended GPU (sm_90a), medians of 7 runs, cold L2"
    assert " ".join(lines[1].split()) == "workload engine median us floor us fraction build s host us note"
    assert " ".join(lines[2].split()) == "sigmoid(a+b*c) 64Mi fp32 cuda 20.0 10.0 0.500 0.050 3.0"
    assert "  -  " in lines[6]
    assert lines[6].endswith("...")


def test_an_interrupted_run_keeps_its_rows(capsys, fake, tmp_path):
    path = tmp_path / "r.json"
    fake.plan = {"sigmoid(a+b*c) 64Mi bf16": {"cudnn": KeyboardInterrupt()}}
    assert main(["bench", "--only", "^sigmoid", "--peers", "cudnn", "--json", str(path)]) == 130
    told = json.loads(path.read_text())
    assert (told["complete"], len(told["rows"])) == (False, 3)
    assert "the rows measured so far (3) are in" in capsys.readouterr().err


def test_the_same_command_goes_on_where_it_was_interrupted(capsys, fake, tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    first, second = "sigmoid(a+b*c) 64Mi fp32", "sigmoid(a+b*c) 64Mi bf16"
    command = ["bench", "--only", "^sigmoid", "--peers", "cudnn", "--json", str(path)]

    def interrupted() -> dict:
        path.unlink(missing_ok=True)
        fake.plan = {first: {"cuda": 7.0}, second: {"cudnn": KeyboardInterrupt()}}
        assert main(command) == 130
        fake.plan = {}
        capsys.readouterr()
        return json.loads(path.read_text())

    def ours() -> list[float]:
        return [r["median_us"] for r in json.loads(path.read_text())["rows"] if r["engine"] == "cuda"]

    interrupted()
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "1 workloads are measured already" in err
    assert " ".join(out.splitlines()[2].split()).startswith(f"{first} cuda 7.0")
    told = json.loads(path.read_text())
    assert told["complete"] is True
    assert [(r["workload"], r["engine"]) for r in told["rows"]] == [
        (name, engine) for name in (first, second) for engine in ("cuda", "cudnn")
    ]
    assert ours() == [7.0, 20.0]
    assert main(command) == 0  # a run that was not cut short is measured anew
    assert ours() == [20.0, 20.0]
    changes = [
        {"commit": "0123456789ab+"},
        {"commit": None},
        {"commit": "fedcba987654"},
        {"repeats": 3},
        {"rows": [{}]},
    ]
    for change in [*changes, {"options": "--suite board"}, {"versions": {}}]:
        path.write_text(artifacts.json_text({**interrupted(), **change}))
        if str(change.get("commit")).endswith("+"):  # the same changes, as far as anybody knows
            monkeypatch.setitem(ENVIRONMENT, "commit", change["commit"])
        assert main(command) == 0
        monkeypatch.setitem(ENVIRONMENT, "commit", "0123456789ab")
        assert ours() == [20.0, 20.0], change
    for text in ("", "[]", '{"complete": false}'):
        path.write_text(text)
        assert main(command) == 0
    interrupted()
    monkeypatch.setitem(ENVIRONMENT, "date", "2026-01-03")
    assert main(command) == 0
    assert ours() == [7.0, 20.0]
    interrupted()
    fake.plan = {first: {"cuda": None}}
    path.write_text(path.read_text().replace('"median_us": 7.0', '"median_us": null'))
    assert main(command) == 1
    assert f"1 of 2 workloads do not run: {first}" in capsys.readouterr().err


def test_a_workload_of_ours_that_fails(capsys, fake, tmp_path):
    path = tmp_path / "r.json"
    fake.plan = {
        "sigmoid(a+b*c) 64Mi fp32": {"cuda": None},
        "sigmoid(a+b*c) 64Mi bf16": {"cuda": DeviceError("CUDA_ERROR_OUT_OF_MEMORY")},
    }
    assert main(["bench", "--only", "^sigmoid", "--peers", "none", "--json", str(path)]) == 1
    assert "2 of 2 workloads do not run: sigmoid(a+b*c) 64Mi fp32, sigmoid" in capsys.readouterr().err
    rows = json.loads(path.read_text())["rows"]
    assert (rows[1]["floor_us"], rows[1]["note"]) == (None, "CUDA_ERROR_OUT_OF_MEMORY")


def test_a_file(capsys, fake, tmp_path):
    path = tmp_path / "r.json"
    file = str(ROOT / "examples" / "sigmoid_fma.py")
    assert main(["bench", file, "--json", str(path), "--commit", "fedcba987654"]) == 0
    told = json.loads(path.read_text())
    assert (told["commit"], told["options"]) == ("fedcba987654", "sigmoid_fma.py --peers cudnn")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [["sigmoid_fma", "cuda"], ["sigmoid_fma", "cudnn"]]


def test_files_are_replaced_whole(tmp_path, monkeypatch):
    path = artifacts.prepare_file(tmp_path / "a" / "b.json")
    artifacts.write_file(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(FileError, match=r"b\.json cannot be written: No space left"):
        artifacts.write_file(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == ["b.json"]
