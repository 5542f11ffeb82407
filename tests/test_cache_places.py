"""Files, folders and links in the place of a cache entry."""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path

import pytest
from test_cache import KEYS, entry, fresh

from fusegraph.runtime.cache import DiskCache


def in_the_place(path: Path, kind: str) -> None:
    """Puts something else in the place of an entry."""
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "folder with files":
        path.mkdir()
        (path / "mine").write_text("mine")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            before = os.getcwd()
            os.chdir(path.parent)  # names of sockets are short
            try:
                server.bind(path.name[:90])
            finally:
                os.chdir(before)
        (path.parent / path.name[:90]).rename(path)
    elif kind == "unreadable":
        path.write_bytes(b"x" * 200)
        path.chmod(0)
    elif kind == "huge":
        with open(path, "wb") as file:
            file.truncate(1 << 42)
    else:
        target = {"loop": path.name, "dangling": "nowhere", "zeros": "/dev/zero", "terminal": "/dev/tty"}[kind]
        path.symlink_to(target)


PLACES = (
    "fifo", "folder", "folder with files", "socket", "unreadable", "huge", "loop", "dangling", "zeros", "terminal"
)  # fmt: skip


@pytest.mark.parametrize("kind", PLACES)
def test_what_is_no_entry_counts_as_absent(tmp_path: Path, kind: str) -> None:
    """Nothing waits, nothing is said, other entries are as good as before; a new entry takes the place, unless a folder
    has it.
    """
    DiskCache(tmp_path).put(KEYS[0], b"payload")
    in_the_place(entry(tmp_path, KEYS[0]), kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fresh(tmp_path).get(KEYS[0]) is None
        cache = fresh(tmp_path)
        assert cache.get_or_build(KEYS[0], lambda: b"rebuilt") == (b"rebuilt", False)
        cache.put(KEYS[1], b"another")
    assert fresh(tmp_path).get(KEYS[0]) == (None if kind.startswith("folder") else b"rebuilt")
    assert fresh(tmp_path).get(KEYS[1]) == b"another"
    if kind == "folder with files":
        assert (entry(tmp_path, KEYS[0]) / "mine").read_text() == "mine"
