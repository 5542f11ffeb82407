"""Output folders: names, whole replacement, and what is left when writing fails."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fusegraph.report import artifacts


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_folder_names():
    names = artifacts.UniqueNames()
    given = ["net", "NET", "../net [x]", "..", ".hidden", "-rf", "a/b", "", "net-2", "x" * 300, "網" * 60]
    made = [names.unique(name) for name in given]
    assert made[:9] == ["net", "NET-2", "_net_x_", "graph", "hidden", "rf", "a_b", "graph-2", "net-2-2"]
    assert all(len(name.encode()) <= 110 and "/" not in name and not name.startswith((".", "-")) for name in made)


def test_folders_are_replaced_whole(tmp_path):
    folder = tmp_path / "net"
    artifacts.write_folder(folder, {"a.cu": b"1", "include/b.cuh": b"2"}, {"n": 1})
    artifacts.write_folder(folder, {"c.cu": b"3"}, {"n": float("inf")})
    assert set(contents(folder)) == {"c.cu", "manifest.json"}
    assert json.loads((folder / "manifest.json").read_text())["n"] is None
    assert os.listdir(tmp_path) == ["net"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_rename_leaves_the_old_folder(failing, tmp_path, monkeypatch):
    folder = tmp_path / "net"
    artifacts.write_folder(folder, {"a": b"old"}, {})
    before = contents(folder)
    real, calls = os.rename, []

    def rename(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == failing:
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(artifacts, "_exchange", lambda a, b: False)
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(artifacts.FileError, match="net cannot be written: Input/output error"):
        artifacts.write_folder(folder, {"a": b"new"}, {})
    assert contents(folder) == before
    assert os.listdir(tmp_path) == ["net"]
    artifacts.write_folder(folder, {"a": b"newer"}, {})
    assert contents(folder)["a"] == b"newer"
    assert os.listdir(tmp_path) == ["net"]


def test_a_failed_write_leaves_the_old_folder(tmp_path, monkeypatch):
    folder = tmp_path / "net"
    artifacts.write_folder(folder, {"a": b"old"}, {})
    before = contents(folder)

    def full(self: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(artifacts.FileError, match="No space left"):
        artifacts.write_folder(folder, {"a": b"new"}, {})
    assert contents(folder) == before
    assert os.listdir(tmp_path) == ["net"]


def test_a_killed_writer_leaves_the_old_folder(tmp_path):
    folder = tmp_path / "net"
    artifacts.write_folder(folder, {"a": b"old"}, {})
    before = contents(folder)
    script = (
        "import os, signal, sys; from pathlib import Path; from fusegraph.report import artifacts\n"
        "artifacts._swap_in = lambda new, folder: os.kill(os.getpid(), signal.SIGKILL)\n"
        "artifacts.write_folder(Path(sys.argv[1]), {'a': b'new'}, {})\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(folder)]).returncode == -signal.SIGKILL
    assert contents(folder) == before
    (left,) = set(os.listdir(tmp_path)) - {"net"}
    artifacts.write_folder(folder, {"a": b"newer"}, {})
    assert left in os.listdir(tmp_path)  # it might be a writer at work
    os.utime(tmp_path / left, (0, 0))
    artifacts.write_folder(folder, {"a": b"newest"}, {})
    assert os.listdir(tmp_path) == ["net"]
    assert contents(folder)["a"] == b"newest"
