"""Output folders: each is written under a temporary name and swapped into place, and replaces only fusegraph's own.

A folder that fusegraph wrote holds a ``manifest.json`` that lists its files.  A folder without one, or with files that
are not listed, is left alone, and FileError is raised.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from codegen.spec import KernelSource
from fusegraph.errors import FileError
from fusegraph.runtime.nvrtc import headers_of

MANIFEST = "manifest.json"
GENERATOR = "fusegraph"
FORMAT = 1

_MOST_NAME_BYTES = 100
_STALE_SECONDS = 3600.0


# --- names


def safe_name(text: str) -> str:
    """Returns a file name that resembles a text: letters, digits and ``_ . + -``, at most 100 bytes.

    It does not begin with a dot or dash, or end with a dot.
    """
    name = re.sub(r"[^\w.+-]+", "_", text).encode()[:_MOST_NAME_BYTES].decode(errors="ignore")
    return name.lstrip(".-").rstrip(".") or "graph"


class UniqueNames:
    """Makes file names that differ from each other even ignoring case: ``net``, ``net-2``, ``net-3``."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def unique(self, text: str) -> str:
        stem = name = safe_name(text)
        count = 2
        while name.casefold() in self._taken:
            name = f"{stem}-{count}"
            count += 1
        self._taken.add(name.casefold())
        return name


# --- contents


def plain(value: Any) -> Any:
    """Converts a value for JSON: tuples become lists, infinities and NaN None, other objects their text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def json_text(value: Any) -> str:
    """Returns ``value`` as indented JSON text; NaN and infinities, which JSON lacks, become null."""
    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"


def source_files(sources: Iterable[KernelSource]) -> dict[str, bytes]:
    """Returns path in the folder -> contents: the kernels' ``.cu`` files, and device headers under ``include/``."""
    files: dict[str, bytes] = {}
    library: dict[str, str | None] = {}
    for source in sources:
        files[f"{source.name}.cu"] = source.code.encode()
        for name, text in headers_of(source.code, library).items():
            files[f"include/{name}"] = text.encode()
    return files


# --- files and folders


def prepare_file(path: Path) -> Path:
    """Makes the folder that a file goes to and returns the file's absolute path, links resolved.

    Raises FileError if that fails, and if there is something else than a file, or a device such as ``/dev/null``.
    """
    path = Path(os.path.realpath(path))
    with _named(path):
        if path.is_dir():
            raise FileError(f"{path} is a folder; give the name of a file")
        if os.path.lexists(path) and not (path.is_file() or path.is_char_device()):
            raise FileError(f"{path} is no file, but a pipe, a socket or the like; give the name of a file")
        if path.is_char_device():
            return path
    prepare(path.parent)
    return path


def check_readable(path: Path) -> None:
    """Raises FileError unless there is a file that ends: no folder, pipe or device."""
    with _named(path, "read"):
        if not stat.S_ISREG(path.stat().st_mode):
            raise FileError(f"{path} is {'a folder' if path.is_dir() else 'no regular file'}; give the name of a file")


def read_file(path: Path) -> str:
    """Returns the text of a file.  Raises FileError if it is no regular file or cannot be read as UTF-8."""
    check_readable(path)
    with _named(path, "read"):
        try:
            return path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise FileError(f"{path} cannot be read as UTF-8: {error.reason} at byte {error.start}") from None


def write_file(path: Path, text: str) -> None:
    """Writes a file under a hidden name and renames it, so that a reader sees either the old or the new contents.

    A device is written to, never replaced.  Raises FileError if it cannot be written.
    """
    new = _sibling(path)
    with _named(path):
        if path.is_char_device():
            path.write_text(text, "utf-8")
            return
        try:
            new.write_text(text, "utf-8")
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)


def prepare(out: Path) -> Path:
    """Makes the folder that output folders go to and returns its absolute path.  Raises FileError if that fails."""
    out = Path(os.path.abspath(out))
    with _named(out):
        try:
            out.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            blocker = next(p for p in (out, *out.parents) if os.path.lexists(p))
            raise FileError(f"output folder {out}: {blocker} is a file; give a folder or an unused path") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise FileError(f"output folder {out} is read-only; give one that can be written")
    return out


def check_replaceable(folder: Path) -> None:
    """Raises FileError unless the folder is absent, empty, or holds only files that fusegraph wrote."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise FileError(f"{folder} is no folder of fusegraph's and is left alone; remove it or give another --out")
    with _named(folder):
        found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}
        if not found:
            return
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
            listed = set(manifest["files"]) if manifest["generator"] == GENERATOR else None
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            listed = None
    if listed is None:
        raise FileError(
            f"{folder} was not written by fusegraph (it has no {MANIFEST} of ours) and is left alone; "
            "remove it or give another --out"
        )
    if foreign := sorted(found - listed - {MANIFEST}):
        raise FileError(
            f"{folder} holds {foreign[0]!r}, which fusegraph did not write, and is left alone; move that file away or "
            "give another --out"
        )


def write_folder(folder: Path, files: Mapping[str, bytes], manifest: Mapping[str, Any]) -> None:
    """Writes a folder of files (path in the folder -> contents) and its manifest, replacing an older one of fusegraph.

    Everything is written to a hidden sibling folder first and swapped in by one rename, so that a reader sees either
    the old or the new folder, even if the process is killed.  Raises FileError if it cannot be written, or if the
    existing folder is not fusegraph's.
    """
    check_replaceable(folder)
    new = _sibling(folder)
    with _named(folder):
        _remove_stale(folder)
        try:
            new.mkdir()
            for name, contents in files.items():
                target = new / name
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(contents)
            whole = {"generator": GENERATOR, "format": FORMAT, **manifest, "files": sorted(files)}
            (new / MANIFEST).write_text(json_text(whole), "utf-8")
            check_replaceable(folder)
            _swap_in(new, folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def _swap_in(new: Path, folder: Path) -> None:
    """Renames ``new`` to ``folder``; an older folder ends up under the name of ``new``, or is removed."""
    if not os.path.lexists(folder):
        os.rename(new, folder)
    elif not _exchange(new, folder):
        old = _sibling(folder)
        os.rename(folder, old)
        try:
            os.rename(new, folder)
        except BaseException:
            os.rename(old, folder)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two paths in one step (Linux' renameat2); returns False if system or file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):
        return False
    at_working_directory, exchange = -100, 2
    return bool(
        renameat2(at_working_directory, os.fsencode(a), at_working_directory, os.fsencode(b), ctypes.c_uint(exchange))
        == 0
    )


def _sibling(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.partial")


def _remove_stale(folder: Path) -> None:
    """Removes hidden folders over an hour old that killed writers of this folder left behind."""
    pattern = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{16}}\.partial")
    for entry in os.scandir(folder.parent):
        if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS:
                    shutil.rmtree(entry.path, ignore_errors=True)


@contextlib.contextmanager
def _named(path: Path, done: str = "written") -> Iterator[None]:
    """Turns file system errors into a FileError that names the path, and what cannot be done."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path} cannot be {done}: {error.strerror or error}") from None
