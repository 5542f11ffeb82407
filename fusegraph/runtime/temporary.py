"""Temporary files and folders that do not outlive their process for long, even if it is killed.

Each is locked (flock) while it is in use; the operating system releases the lock however the process ends.  The first
use in a process removes what others have left behind: files and folders of this user, named as here, unlocked, and more
than an hour old.
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
#: The names that `tempfile` makes; what is kept for the user (fusegraph-failed-...) is named differently.
_NAME = re.compile(r"fusegraph-[a-z0-9_]{8}(\.so)?")
#: Younger ones are never removed: one may have been made but not yet locked, or by an older version without locks.
STALE_SECONDS = 3600.0

_swept = threading.Event()


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Makes a new folder, removed at the end with its contents.  Raises OSError if it cannot be made."""
    sweep()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name, _in_use(name):
        yield Path(name)


@contextlib.contextmanager
def file(data: bytes) -> Iterator[Path]:
    """Makes a new file that holds ``data``, removed at the end.  Raises OSError if it cannot be made."""
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
    """Removes, once per process, what killed processes have left in the temporary folder."""
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
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError if its process still runs
        if kind == stat.S_IFDIR:
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _in_use(path: str) -> Iterator[None]:
    """Holds the lock of a file or folder, if the file system has locks."""
    descriptor = _opened(path)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _opened(path: str) -> int:
    """Returns a descriptor of a file or folder, without following a link and without blocking."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
