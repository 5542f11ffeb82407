"""Temporary files and folders that do not outlive their process for long, even where it is killed.

Each is locked (flock) while it is in use; the kernel lets go of the lock when the process ends, however it does.  The
first one of a process removes what others have left: of this user, with a name as here, unlocked, and an hour old.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "fusegraph-"
#: As `tempfile` names them; what is kept for the user (fusegraph-failed-...) is called otherwise.
_NAME = re.compile(r"fusegraph-[a-z0-9_]{8}(\.so)?")
#: Between the making of one and its lock there is a moment, and what an older version made has no lock.
STALE_SECONDS = 3600.0

_swept = threading.Event()


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A new folder, removed at the end with what is in it.  Raises OSError where there can be none."""
    sweep()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name, _in_use(name):
        yield Path(name)


@contextlib.contextmanager
def file(data: bytes) -> Iterator[Path]:
    """A new file that holds some bytes, removed at the end.  Raises OSError where there can be none."""
    sweep()
    descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=".so")
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(data)
        with _in_use(name):
            yield Path(name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def sweep() -> None:
    """Removes, once a process, what processes that were killed have left in the temporary folder."""
    if _swept.is_set():
        return
    _swept.set()
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_left(entry)


def _remove_if_left(entry: os.DirEntry[str]) -> None:
    status = entry.stat(follow_symlinks=False)
    kind = stat.S_IFMT(status.st_mode)
    old = time.time() - status.st_mtime > STALE_SECONDS
    if status.st_uid != os.geteuid() or kind not in (stat.S_IFDIR, stat.S_IFREG) or not old:
        return
    descriptor = _opened(entry.path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError where its process runs
        if kind == stat.S_IFDIR:
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _in_use(path: str) -> Iterator[None]:
    """Holds the lock of a file or folder, where the file system has locks."""
    descriptor = _opened(path)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _opened(path: str) -> int:
    """Returns a descriptor of a file or folder; of no link, and without waiting."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
