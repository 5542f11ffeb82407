"""The command line: what becomes of every kind of error."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from test_cli import HEAD, POINTWISE

from fusegraph.cli import main
from fusegraph.errors import ToolchainError
from fusegraph.runtime import cache, driver, host_compiler


@pytest.mark.parametrize("command", ["compile", "run", "explain"])
@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("x = 1\n", "FileError", "holds no graph"),
        ("x = = 1\n", "FileError", "graphs.py:1: SyntaxError"),
        ("1 / 0\n", "FileError", "ZeroDivisionError"),
        (HEAD + "g = fg.Graph('g')\ng.tensor('a', (2**40, 2**40))\n", "ShapeError", "graphs.py:3: "),
        (HEAD + "g = fg.Graph('empty')\ng.tensor('a', (4,))\n", "GraphError", "'empty' has no outputs"),
        (HEAD + "g = fg.Graph('a\"*/\\n')\n", "GraphError", "graphs.py:2: graph name"),
    ],
)
def test_bad_files(command, text, kind, expected, write, tell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, told, stderr = tell(command, write(text))
    assert status == 2
    assert set(told) == {"error"}
    assert set(told["error"]) == {"type", "message"}
    assert told["error"]["type"] == kind
    assert expected in told["error"]["message"]
    assert "Traceback" not in stderr
    assert expected in stderr


def test_errors_without_json_leave_stdout_empty(write, capsys):
    assert main(["explain", write("1 / 0\n")]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith("fusegraph: error: ")


def test_bad_architectures(write, out, tell):
    file = write(POINTWISE)
    for given, expected in (("sm_1", "no architecture; known: a100"), ("../x", "is no target"), ("sm_80,", "'' is no")):
        status, told, _ = tell("compile", file, "--target", given, "--out", str(out))
        assert (status, told["error"]["type"]) == (2, "CompileError")
        assert expected in told["error"]["message"]
    for given in ("sm_9", "sm_999", "sm_50", "x y", ""):
        status, told, _ = tell("explain", file, "--target", given)
        assert (status, told["error"]["type"]) == (2, "CompileError")
        assert f"{given!r} is no target" in told["error"]["message"]
    assert not out.exists()
    status, told, _ = tell("compile", file, "--engine", "cpu", "--target", "sm_80", "--out", str(out))
    assert status == 2
    assert "is for engine cuda" in told["error"]["message"]


def test_no_driver(write, tell, monkeypatch):
    if driver.available():
        pytest.skip("there is a GPU")
    status, told, _ = tell("run", write(POINTWISE), "--engine", "cuda")
    assert (status, told["error"]["type"]) == (2, "DeviceError")


def test_no_compiler(write, tell, monkeypatch):
    def absent() -> None:
        raise ToolchainError("no C++ compiler: install g++")

    monkeypatch.setattr(host_compiler, "find_compiler", absent)
    status, told, _ = tell("run", write(POINTWISE), "--engine", "cpu")
    assert (status, told["error"]["type"]) == (2, "ToolchainError")


@pytest.mark.slow
def test_a_cache_folder_that_cannot_be_used(write, tmp_path, capsys, monkeypatch):
    """It is said in one line, and the command does its work."""
    monkeypatch.setenv("FUSEGRAPH_CACHE_DIR", write("a file", "cache"))
    monkeypatch.setattr(cache, "_warned", False)
    cache.default_cache.cache_clear()
    warn = "import warnings\nwarnings.warn('of the user')\n"
    with pytest.warns(UserWarning, match="of the user"):
        assert main(["compile", write(warn + POINTWISE), "--engine", "cpu", "--out", str(tmp_path / "out")]) == 0
    cache.default_cache.cache_clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fusegraph: warning: the cache folder {tmp_path / 'cache'} cannot be used")


def test_too_large_for_memory(write, tell):
    text = HEAD + "g = fg.Graph('huge')\ng.output(g.exp(g.tensor('a', (2**20, 2**30))), name='y')\n"
    status, told, _ = tell("run", write(text), "--engine", "reference")
    assert (status, told["error"]["type"]) == (2, "OutOfMemoryError")
    assert "input 'a' of graph 'huge'" in told["error"]["message"]
    assert "takes 8.0 PiB (9007199254740992 bytes)" in told["error"]["message"]
    assert "a process has at most" in told["error"]["message"]


def test_a_defect_shows_its_traceback(write, tell, monkeypatch):
    def broken(*args: object, **more: object) -> None:
        raise AssertionError("this cannot be")

    monkeypatch.setattr("fusegraph.cli.explain.planning", broken)
    status, told, stderr = tell("explain", write(POINTWISE))
    assert (status, told["error"]["type"]) == (70, "AssertionError")
    assert "Traceback" in stderr
    assert "defect of fusegraph" in stderr


@pytest.mark.parametrize("error", ["ImportError('a module is half imported')", "fg.GraphError('x')"])
def test_what_an_interrupt_makes_fail_is_no_error(error, write, capsys):
    text = f"""
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    raise {error} from None
"""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["explain", write(HEAD + text)]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "fusegraph: interrupted\n"


def test_interrupt(write, capsys):
    assert main(["explain", write("raise KeyboardInterrupt\n")]) == 130
    assert capsys.readouterr().err == "fusegraph: interrupted\n"


def test_packages_that_are_missing(write, tell, monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage", None)
    _, told, _ = tell("explain", write("import skimage\n"))
    assert told["error"]["message"].endswith("; install it with: pip install 'fusegraph[examples]'")
    _, told, _ = tell("explain", write("import no_such_module\n"))
    assert "pip install" not in told["error"]["message"]


@pytest.mark.parametrize("command", ["run", "compile"])
def test_nothing_is_timed_on_the_cpu(command, write, tell):
    status, told, _ = tell(command, write(POINTWISE), "--engine", "cpu", "--autotune")
    assert (status, told["error"]["type"]) == (2, "FusegraphError")
    assert "--autotune times kernels on a GPU; engine cpu" in told["error"]["message"]


def test_a_working_folder_that_is_gone(tell, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    status, told, stderr = tell("explain", "graphs.py")
    assert (status, told["error"]["type"]) == (2, "FileError")
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    "arguments", [["compile"], ["run", "f.py", "--seed", "-1"], ["run", "f.py", "--engine", "tpu"], ["nothing"]]
)
def test_usage(arguments, capsys):
    assert main(arguments) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert "Usage" in stderr


def test_control_characters_reach_no_terminal(tmp_path, capsys):
    assert main(["explain", str(tmp_path / "a\x1b[31m\u202eb.py")]) == 2
    stderr = capsys.readouterr().err
    assert "\x1b" not in stderr
    assert "\\x1b[31m\\u202eb.py does not exist" in stderr
    assert main(["explain", str(tmp_path / os.fsdecode(b"\xff.py"))]) == 2
    capsys.readouterr().err.encode()


def test_markup_in_names_is_text(write, out, capsys):
    text = HEAD + "g = fg.Graph('[red]x[/red]')\ng.output(g.exp(g.tensor('[b]', (4,))), name='[link]y[/]')\n"
    file = write(text)
    assert main(["run", file, "--engine", "reference"]) == 0
    assert main(["explain", file]) == 0
    assert main(["compile", file, "--out", str(out)]) == 0
    stdout = capsys.readouterr().out
    assert stdout.count("[link]y[/]") >= 3
    assert stdout.count("[red]x[/red]") == 3


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fusegraph 0")
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("compile", "run", "explain", "doctor"))
