"""Temporary files: nothing stays of processes that were killed, and everything of those that run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusegraph.runtime import temporary

HELD = """
import sys, time
from fusegraph.runtime import temporary
with temporary.folder() as folder, temporary.file(b"library") as file:
    (folder / "unit.cpp").write_text("text")
    print(folder, file, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield tmp_path
    temporary._swept.set()


def sweep() -> None:
    temporary._swept.clear()
    temporary.sweep()


def age(path: Path, seconds: float = 2 * temporary.STALE_SECONDS) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)


def test_they_are_removed(place: Path) -> None:
    with temporary.folder() as folder, temporary.file(b"some bytes") as file:
        (folder / "more").mkdir()
        assert file.read_bytes() == b"some bytes"
        assert {folder.parent, file.parent} == {place}
    assert list(place.iterdir()) == []


def test_what_a_killed_process_leaves_goes_when_it_is_old(place: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HELD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    held = [Path(name) for name in process.stdout.readline().split()]
    assert [p.exists() for p in held] == [True, True]
    for path in held:
        age(path)
    sweep()
    assert [p.exists() for p in held] == [True, True], "their process runs"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    age(held[0], 60)
    sweep()
    assert [p.exists() for p in held] == [True, False], "one of them is young"
    age(held[0])
    temporary.sweep()
    assert held[0].exists(), "once a process"
    sweep()
    assert list(place.iterdir()) == []


def test_what_is_not_ours_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "target").mkdir()
    (place / "target" / "mine").write_text("mine")
    for name in ("fusegraph-failed-abcdefgh", "fusegraph-Abcdefgh", "fusegraph-abcdefgh.txt", "tmpabcdefgh"):
        (place / name).mkdir()
    (place / "fusegraph-linked_1").symlink_to("target")
    os.mkfifo(place / "fusegraph-fifo_abc")
    for path in place.iterdir():
        age(path)
    before = sorted(place.rglob("*"))
    sweep()
    assert sorted(place.rglob("*")) == before
    (place / "fusegraph-ofothers").mkdir()
    age(place / "fusegraph-ofothers")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    sweep()
    assert (place / "fusegraph-ofothers").exists()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    sweep()
    assert not (place / "fusegraph-ofothers").exists()
