"""The on-disk cache: bytes stored under a digest, safe to share among processes; its failures never fail a compilation.

An entry is one file: a magic number, the payload's length, a checksum over key and payload, the payload.  Writers fill
a temporary file in the same folder and rename it, so a reader sees an old entry, a new entry or none.  Nothing is
flushed to disk: an entry damaged by a power cut fails its checksum and counts as absent.  Two processes that miss
the same key both build it; the later rename wins, and both hold the right bytes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import stat
import struct
import tempfile
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from fusegraph.errors import CacheError, shown

DEFAULT_LIMIT_BYTES = 512 * 10**6
MEMO_LIMIT_BYTES = 32 * 10**6

#: Errors of opening something that is not an entry but has the name of one: a loop of links, a socket, an unreadable
#: file.  It counts as absent, and the next entry of that name replaces it.
_NO_ENTRY = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EACCES, errno.EPERM})

_MAGIC = b"FGCACHE1"
_HEADER = struct.Struct("<8sQ16s")
_SUFFIX = ".entry"
_TEMPORARY = ".partial"
_KEY = re.compile(r"[0-9a-f]{16,128}")
_ENTRY_NAME = re.compile(r"[0-9a-f]{16,128}\.entry")
_TEMPORARY_NAME = re.compile(r"[0-9a-f]{16,128}-[A-Za-z0-9_]+\.partial")
_STALE_SECONDS = 3600.0
_TOUCH_SECONDS = 60.0
_EVICT_TO = 0.9
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}

_warn_lock = threading.Lock()
_warned = False


def digest(*parts: str | bytes) -> str:
    """Returns the key made of the parts: 64 hex digits.

    Each part is hashed behind its length, so that ``("ab", "c")`` and ``("a", "bc")`` differ.
    """
    state = hashlib.blake2b(digest_size=32)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(struct.pack("<Q", len(raw)))
        state.update(raw)
    return state.hexdigest()


def parse_bytes(text: str) -> int:
    """Parses a number of bytes: ``"1000000"``, ``"512MB"`` (MB: 10**6), ``"0.5 GiB"`` (GiB: 2**30).

    Raises ValueError for other text.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is no number of bytes; write 512000000, 512MB or 0.5GiB")
    if len(match[1]) > 30:
        raise ValueError(f"{text[:40]!r}... is no number of bytes that a disk has")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


@functools.cache
def default_cache() -> DiskCache:
    """Returns the process's cache.  The first call takes its folder and limit from the environment."""
    return DiskCache()


class DiskCache:
    """Bytes by key in a folder of at most ``limit_bytes``; the least recently used entries are evicted first.

    ``folder`` defaults to ``$FUSEGRAPH_CACHE_DIR``, else ``$XDG_CACHE_HOME/fusegraph``, else ``~/.cache/fusegraph``;
    ``limit_bytes`` to ``$FUSEGRAPH_CACHE_LIMIT``, else 512 MB; 0 keeps nothing on disk.  Each process checks the
    folder's size only after writing 1/32 of the limit, so the total may exceed the limit by that much per process.  The
    most recent entries are also kept in memory.  Instances may be shared by threads.

    A folder that cannot be used causes one warning per process; the cache then works in memory alone.  Raises
    CacheError if ``folder`` is not a path or is a file, and if the limit is negative or not a number of bytes.
    """

    def __init__(self, folder: Path | None = None, limit_bytes: int | None = None) -> None:
        if limit_bytes is not None and (not isinstance(limit_bytes, int) or limit_bytes < 0):
            raise CacheError(f"a cache limit of {shown(limit_bytes)} bytes: give 0 for no cache on disk, or more")
        self.limit_bytes = environment_limit() if limit_bytes is None else limit_bytes
        self.folder: Path | None
        if folder is not None:
            try:
                self.folder = Path(os.path.abspath(folder))
            except (TypeError, ValueError):
                raise CacheError(f"a cache folder is a path, got {shown(folder)}") from None
            if os.path.exists(self.folder) and not os.path.isdir(self.folder):
                raise CacheError(f"the cache folder {self.folder} is a file; give a folder, or a path yet unused")
        else:
            self.folder = environment_folder()
        self._memo: OrderedDict[str, bytes] = OrderedDict()
        self._memo_bytes = 0
        self._lock = threading.Lock()
        self._writable = True
        self._unseen_bytes: int | None = None  # written since the folder was last scanned; None before the first scan

    def get(self, key: str) -> bytes | None:
        """Returns the bytes stored under ``key``, or None; a damaged entry counts as absent.

        Raises ValueError if ``key`` is not 16 to 128 lower-case hex digits, as ``digest`` makes them.
        """
        path = self._path(key)
        with self._lock:
            if key in self._memo:
                self._memo.move_to_end(key)
                return self._memo[key]
        if path is None:
            return None
        data = self._read(key, path)
        if data is not None:
            self._remember(key, data)
        return data

    def put(self, key: str, data: bytes) -> None:
        """Stores ``data`` under ``key``, replacing what was there; evicts other entries that no longer fit."""
        path = self._path(key)
        self._remember(key, data)
        if path is None or not self._writable or self.limit_bytes == 0:
            return
        try:
            try:
                self._write(key, path, data)
            except FileNotFoundError:  # the folder does not exist yet, or was removed under us
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._write(key, path, data)
            self._evict_if_due(keep=path, written=len(data) + _HEADER.size)
        except IsADirectoryError:  # a folder has this entry's name; other entries are not affected
            return
        except OSError as error:
            self._writable = False
            _warn_unusable(path.parent, error)

    def get_or_build(self, key: str, build: Callable[[], bytes]) -> tuple[bytes, bool]:
        """Returns the bytes of ``key`` and whether they were cached; if not, ``build()`` makes them to be stored.

        Exceptions of ``build`` pass through, and nothing is stored.
        """
        data = self.get(key)
        if data is not None:
            return data, True
        data = build()
        self.put(key, data)
        return data, False

    def clear(self) -> None:
        """Removes every entry and every temporary file.  Other files in the folder stay."""
        with self._lock:
            self._memo.clear()
            self._memo_bytes = 0
            self._unseen_bytes = None
        for entry in self._scan():
            if _ENTRY_NAME.fullmatch(entry.name) or _TEMPORARY_NAME.fullmatch(entry.name):
                _unlink(entry)

    def size(self) -> int:
        """Returns the total size of all entries on disk, in bytes."""
        return sum(status.st_size for entry in self._scan() if (status := _entry_status(entry)) is not None)

    def count(self) -> int:
        """Returns how many entries there are on disk."""
        return sum(_entry_status(entry) is not None for entry in self._scan())

    def _path(self, key: str) -> Path | None:
        if not _KEY.fullmatch(key):
            raise ValueError(f"cache key {key!r}: 16 to 128 hex digits wanted, as digest() makes them")
        return None if self.folder is None else self.folder / (key + _SUFFIX)

    def _read(self, key: str, path: Path) -> bytes | None:
        try:
            # Anything may have the entry's name: with these flags opening a FIFO or a terminal device does not block.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in _NO_ENTRY:
                _warn_unusable(path.parent, error)
            return None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                os.close(descriptor)
                return None
            with open(descriptor, "rb", buffering=0) as file:
                head = file.read(_HEADER.size)
                if head is None or len(head) < _HEADER.size:
                    return None
                magic, length, checksum = _HEADER.unpack(head)
                if magic != _MAGIC or length != status.st_size - _HEADER.size:
                    return None  # checked before the payload is read, which may be of any length
                data = file.read()
                if time.time() - status.st_mtime > _TOUCH_SECONDS:
                    with contextlib.suppress(OSError):  # recency is a hint: a read-only folder still serves hits
                        os.utime(descriptor)
        except OSError as error:
            _warn_unusable(path.parent, error)
            return None
        return data if len(data) == length and checksum == _checksum(key, data) else None

    def _write(self, key: str, path: Path, data: bytes) -> None:
        handle, temporary = tempfile.mkstemp(prefix=key + "-", suffix=_TEMPORARY, dir=path.parent)
        try:
            with open(handle, "wb", buffering=0) as file:
                whole = memoryview(_HEADER.pack(_MAGIC, len(data), _checksum(key, data)) + data)
                while whole:
                    whole = whole[file.write(whole) :]
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _remember(self, key: str, data: bytes) -> None:
        with self._lock:
            self._memo_bytes += len(data) - len(self._memo.pop(key, b""))
            self._memo[key] = data
            while self._memo_bytes > MEMO_LIMIT_BYTES:
                self._memo_bytes -= len(self._memo.popitem(last=False)[1])

    def _evict_if_due(self, keep: Path, written: int) -> None:
        """Evicts old entries, once enough was written since the last scan: a scan costs a stat for every entry."""
        with self._lock:
            if self._unseen_bytes is not None:
                self._unseen_bytes += written
                if self._unseen_bytes <= self.limit_bytes // 32:
                    return
            self._unseen_bytes = 0
        entries = []
        for entry in self._scan():
            if _TEMPORARY_NAME.fullmatch(entry.name):
                _unlink_if_stale(entry)
            elif (status := _entry_status(entry)) is not None:
                entries.append((status.st_mtime_ns, status.st_size, entry))
        total = sum(size for _, size, _ in entries)
        if total <= self.limit_bytes:
            return
        # Evicting to somewhat below the limit leaves room for the next entries.
        for _, size, entry in sorted(entries, key=lambda item: (item[0], item[2].name)):
            if total <= self.limit_bytes * _EVICT_TO:
                break
            if entry.name != keep.name:
                _unlink(entry)
                total -= size

    def _scan(self) -> list[os.DirEntry[str]]:
        if self.folder is None:
            return []
        try:
            with os.scandir(self.folder) as entries:
                return list(entries)
        except OSError:
            return []


def _checksum(key: str, data: bytes) -> bytes:
    state = hashlib.blake2b(key.encode() + b":", digest_size=16)
    state.update(data)
    return state.digest()


def _entry_status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Returns the status of an entry's file; None for other files, and for one that another process has removed."""
    if not _ENTRY_NAME.fullmatch(entry.name):
        return None
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None


def _unlink_if_stale(entry: os.DirEntry[str]) -> None:
    """Removes a temporary file if it is so old that its writer must have been killed."""
    with contextlib.suppress(OSError):
        if time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS:
            os.unlink(entry.path)


def _unlink(entry: os.DirEntry[str]) -> None:
    with contextlib.suppress(OSError):  # another process evicted it first
        os.unlink(entry.path)


def environment_limit() -> int:
    text = os.environ.get("FUSEGRAPH_CACHE_LIMIT")
    if not text:
        return DEFAULT_LIMIT_BYTES
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise CacheError(f"FUSEGRAPH_CACHE_LIMIT: {error}") from None


def environment_folder() -> Path | None:
    """Returns the cache folder by the environment; None, with a warning, if it needs a home directory and has none.

    Raises CacheError if ``FUSEGRAPH_CACHE_DIR`` names the home directory of an unknown user.
    """
    if named := os.environ.get("FUSEGRAPH_CACHE_DIR"):
        path = os.path.expanduser(named)
        if path.startswith("~"):
            raise CacheError(f"FUSEGRAPH_CACHE_DIR is {named!r}, but there is no such home directory; give a path")
        return Path(os.path.abspath(path))
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification: a relative path is invalid and to be ignored
        return Path(base) / "fusegraph"
    try:
        return Path.home() / ".cache" / "fusegraph"
    except RuntimeError as error:
        _warn_unusable(Path("~/.cache/fusegraph"), error)
        return None


def _warn_unusable(folder: Path, error: Exception) -> None:
    global _warned
    with _warn_lock:
        if _warned:
            return
        _warned = True
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    warnings.warn(
        f"the cache folder {folder} cannot be used ({reason}): kernels will be compiled anew in every process; "
        f"set FUSEGRAPH_CACHE_DIR to a folder that can be written",
        RuntimeWarning,
        stacklevel=3,
    )
