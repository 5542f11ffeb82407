"""What commands are doing is shown on a terminal, and nowhere else."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_bench_command import fake  # noqa: F401 - a fixture
from test_doctor import refuse

from fusegraph.cli import console, main
from fusegraph.runtime import host_compiler, nvrtc


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, kind: str = "xterm") -> Terminal:
    """Makes stderr a terminal, and returns what it shows."""
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def shown(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_doctor_says_what_it_looks_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(nvrtc, "nvrtc_version", refuse)
    monkeypatch.setattr(host_compiler, "find_compiler", refuse)
    assert main(["doctor"]) == 1
    assert "looking for cache folder" in shown(terminal.getvalue())
    assert "cannot compile kernels for GPUs" in capsys.readouterr().out
    assert terminal.getvalue().rstrip("\r").endswith("\x1b[2K")  # the line is gone


def test_bench_counts_workloads(fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    terminal = on_terminal(monkeypatch)
    assert main(["bench", "--only", "^sigmoid.*6Mi|^sigmoid.*bf16$", "--peers", "none"]) == 0
    said = shown(terminal.getvalue())
    assert re.search(r"sigmoid\(a\+b\*c\).* 0/\d", said)
    out = capsys.readouterr().out
    assert "sigmoid(a+b*c) 64Mi bf16" in out
    assert "\x1b" not in out


def test_bench_counts_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from fusegraph.bench.zoo.run import Figures, Row, Task, Zoo
    from fusegraph.cli import zoo

    def measure(self: Zoo, *_: object) -> Iterator[Row]:
        for timed in (False, True):
            for task in self.tasks:
                self.rows[task.name] = Row(
                    task.model, "fp32", 1, {"fusegraph": Figures(1.5)}, timed=timed, device="cpu"
                )
                yield self.rows[task.name]

    monkeypatch.setattr(zoo, "_tasks", lambda *_: [Task(name, "fp32", 1, device="cpu") for name in ("one", "two")])
    monkeypatch.setattr(Zoo, "measure", measure)
    terminal = on_terminal(monkeypatch)
    assert main(["bench", "--suite", "training"]) == 0
    said = shown(terminal.getvalue())
    assert re.search(r"compiling models .* 0/2", said)
    assert re.search(r"two fp32 b1 cpu is timed .* 2/2", said)
    assert "\x1b" not in capsys.readouterr().out


def test_a_file_of_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = on_terminal(monkeypatch)
    file = tmp_path / "model.py"
    file.write_text(
        "import fusegraph as fg\nprint('half', end='')\nmine = fg.Graph('mine')\n"
        "mine.output(mine.relu(mine.tensor('x', (4,))))\n"
    )
    assert main(["explain", str(file)]) == 0
    said = shown(terminal.getvalue())
    assert f"reading {file}"[:60] in said
    assert "mine: planning" in said
    assert "\x1b" not in capsys.readouterr().out


def test_notes_stand_above_and_errors_below(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with console._line.of_command():
        console.doing("first")
        console.note("a note")
        step = console.progress(3)
        step("second")
        step("third", advance=2)
    text = shown(terminal.getvalue())
    assert "fusegraph: a note\n" in text
    assert "2/3" in text
    assert sys.stderr is terminal
    console.note("later")
    assert terminal.getvalue().endswith("fusegraph: later\n")


@pytest.mark.parametrize("dumb", [True, False])
def test_nothing_is_shown_elsewhere(
    dumb: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = on_terminal(monkeypatch, "dumb") if dumb else None
    main(["cache", "size"])
    assert capsys.readouterr().err == ""
    assert terminal is None or terminal.getvalue() == ""


@pytest.mark.slow
def test_a_process_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fusegraph", "cache", "size"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    ) as process:
        out = process.communicate(timeout=120)[0]
    assert out.strip().isdigit()
    assert b"starting" in os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)
