"""bench on the command line: what is printed and written, and what is wrong with its arguments."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from test_bench import ENVIRONMENT, ROOT, ROW_KEYS

from fusegraph.bench.plot import svg
from fusegraph.bench.results import Row
from fusegraph.bench.workloads import board
from fusegraph.cli import main
from fusegraph.errors import DeviceError, FileError
from fusegraph.report import artifacts
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
    monkeypatch.setattr("fusegraph.cli.suites.environment", lambda device: dict(ENVIRONMENT))
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


FIRST, SECOND = "sigmoid(a+b*c) 64Mi fp32", "sigmoid(a+b*c) 64Mi bf16"


@pytest.fixture
def measured(fake, tmp_path, capsys):
    """Returns a file with the rows of two workloads, and the command that made it without --only."""
    path = tmp_path / "r.json"
    command = ["bench", "--peers", "cudnn", "--json", str(path)]
    fake.plan = {name: {"cuda": 7.0, "cudnn": 8.0} for name in (FIRST, SECOND)}
    assert main([*command, "--only", "^sigmoid"]) == 0
    fake.plan = {}
    capsys.readouterr()
    return path, command


def medians(told: dict) -> dict[str, list[float]]:
    rows = told["rows"]
    return {r["workload"]: [x["median_us"] for x in rows if x["workload"] == r["workload"]] for r in rows}


def test_some_rows_are_replaced(capsys, measured, monkeypatch, tmp_path):
    path, command = measured
    picture = tmp_path / "r.svg"
    before = json.loads(path.read_text())
    monkeypatch.setitem(ENVIRONMENT, "date", "2026-01-03")
    update = [*command, "--only", "bf16", "--update", "--commit"]
    assert main([*update, "new", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert SECOND in out
    assert FIRST not in out
    told = json.loads(path.read_text())
    assert picture.read_text() == svg(told)
    assert medians(told) == {FIRST: [7.0, 8.0], SECOND: [20.0, 20.0]}
    old = {"commit": "0123456789ab", "date": "2026-01-02", "workloads": [FIRST]}
    assert told == {**before, "commit": "new", "date": "2026-01-03", "earlier": [old], "rows": told["rows"]}
    assert list(told)[-2:] == ["earlier", "rows"]
    assert main([*update, "newer"]) == 0  # of the run between there are no rows any more
    assert json.loads(path.read_text()) == {**told, "commit": "newer"}
    assert main([*command, "--only", "fp32", "--update", "--commit", "newest"]) == 0
    told = json.loads(path.read_text())
    assert told["earlier"] == [{"commit": "newer", "date": "2026-01-03", "workloads": [SECOND]}]
    assert (told["commit"], medians(told)) == ("newest", {FIRST: [20.0, 20.0], SECOND: [20.0, 20.0]})
    assert main([*command, "--update", "--commit", "newer"]) == 0  # without --only all that the file is of
    assert json.loads(path.read_text()) == {k: v for k, v in told.items() if k != "earlier"} | {"commit": "newer"}


def test_a_run_joins_what_it_has_in_the_file_already(measured):
    path, command = measured
    assert main([*command, "--only", "fp32", "--update", "--commit", "other"]) == 0
    assert main([*command, "--only", "fp32", "--update"]) == 0
    told = json.loads(path.read_text())
    assert "earlier" not in told
    assert (told["commit"], medians(told)) == ("0123456789ab", {FIRST: [20.0, 20.0], SECOND: [7.0, 8.0]})


def test_workloads_that_the_file_had_not_are_added_in_order(measured):
    path, command = measured
    told = json.loads(path.read_text())
    text = artifacts.json_text({**told, "rows": [r for r in told["rows"] if r["workload"] == SECOND]})
    path.write_text(text)
    assert main([*command, "--only", "fp32", "--update"]) == 0
    assert list(medians(json.loads(path.read_text()))) == [FIRST, SECOND]


def test_an_interrupted_update_leaves_a_whole_file(capsys, measured, fake):
    path, command = measured
    fake.plan = {SECOND: {"cudnn": KeyboardInterrupt()}}
    assert main([*command, "--update", "--commit", "new"]) == 130
    assert f"the rows measured so far (2) are in {path}" in capsys.readouterr().err
    told = json.loads(path.read_text())
    assert (told["complete"], medians(told)) == (True, {FIRST: [20.0, 20.0], SECOND: [7.0, 8.0]})
    fake.plan = {FIRST: {"cudnn": KeyboardInterrupt()}}
    assert main([*command, "--update", "--commit", "newer"]) == 130
    assert "so far" not in capsys.readouterr().err
    assert json.loads(path.read_text()) == told


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "Other GPU"}, "device is Pretended GPU, in r.json Other GPU"),
        ({"driver": "12.9"}, "driver is 13.0, in r.json 12.9"),
        ({"python": "3.12.0"}, "python is 3.11.0, in r.json 3.12.0"),
        ({"versions": {"numpy": "2.0", "torch": "2.11.0"}}, "torch is 2.12.0+cu130, in r.json 2.11.0"),
        (
            {"versions": {"torch": "2.12.0+cu128"}},
            "torch is 2.12.0+cu130, in r.json 2.12.0+cu128; numpy is 2.0, in r.json not there; leave out",
        ),
        (
            {"options": "--suite models --peers cudnn"},
            "command is 'fusegraph bench --suite board --peers cudnn', in r.json 'fusegraph bench --suite models",
        ),
        (
            {"options": "--suite board --peers cudnn --autotune"},
            "r.json 'fusegraph bench --suite board --peers cudnn --autotune'; l",
        ),
        ({"repeats": 7}, "repeats is 15, in r.json 7; leave out"),
        ({"options": "--suite board --only bf16 --peers cudnn"}, "--only 'fp32' is found in no workload's name"),
        ({"complete": False}, "is of a run that was interrupted"),
        ({"rows": [{}]}, "is no run of fusegraph bench: TypeError"),
        ({"earlier": [{"commit": "a", "date": "2026-01-01", "workloads": ["x"]}]}, "is no run of fusegraph bench: it"),
        ({"earlier": [{}]}, "is no run of fusegraph bench: KeyError"),
        ({"device": None}, "is no run of fusegraph bench: it does not tell"),
        ({"versions": {"numpy": 2}}, "is no run of fusegraph bench: it does not tell"),
        ({"options": "--suite 'board"}, "is no run of fusegraph bench: ValueError: No closing quotation"),
    ],
)
def test_what_is_of_another_run_is_not_updated(changes, message, capsys, measured, monkeypatch):
    path, command = measured
    now = {"fusegraph": "0.2.0", "numpy": "2.0", "torch": "2.12.0+cu130"}
    monkeypatch.setitem(ENVIRONMENT, "versions", now)
    versions = {"versions": {"numpy": "2.0", "torch": "2.12.0"}}
    path.write_text(artifacts.json_text({**json.loads(path.read_text()), **versions}))
    update = [*command, "--only", "fp32", "--update"]
    assert main(update) == 0
    text = artifacts.json_text({**json.loads(path.read_text()), **changes})
    path.write_text(text)
    capsys.readouterr()
    assert main(update) == 2
    assert message in capsys.readouterr().err
    assert path.read_text() == text


def test_update_needs_a_file_that_is_there(capsys, fake, tmp_path):
    assert main(["bench", "--update"]) == 2
    assert "--update needs --json FILE" in capsys.readouterr().err
    path = tmp_path / "r.json"
    assert main(["bench", "--update", "--json", str(path)]) == 2
    assert f"{path} cannot be read: No such file" in capsys.readouterr().err
    path.write_text("{")
    assert main(["bench", "--update", "--json", str(path)]) == 2
    assert "is no run of fusegraph bench: JSONDecodeError" in capsys.readouterr().err
    assert path.read_text() == "{"


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


def test_devices_pipes_and_links_are_not_replaced(tmp_path):
    """A file is written through a link and to a device; what is neither is refused."""
    null = artifacts.prepare_file(Path("/dev/null"))
    artifacts.write_file(null, "text")
    assert null.is_char_device()
    with pytest.raises(FileError, match="/dev/full cannot be written: No space left"):
        artifacts.write_file(artifacts.prepare_file(Path("/dev/full")), "text")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "loop"):
        with pytest.raises(FileError, match=f"{name} is no file"):
            artifacts.prepare_file(tmp_path / name)
    for name, what in (("pipe", "no regular file"), ("loop", "symbolic links"), ("none", "No such file")):
        with pytest.raises(FileError, match=f"{name} .*{what}"):
            artifacts.read_file(tmp_path / name)
    with pytest.raises(FileError, match="/dev/zero is no regular file"):
        artifacts.read_file(Path("/dev/zero"))
    (tmp_path / "bytes").write_bytes(b"a\xff")
    with pytest.raises(FileError, match="bytes cannot be read as UTF-8: invalid start byte at byte 1"):
        artifacts.read_file(tmp_path / "bytes")
    artifacts.write_file(artifacts.prepare_file(tmp_path / "link"), "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
