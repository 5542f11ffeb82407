"""The on-disk cache: entries survive what happens to files; nothing that happens to the folder stops a compilation."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from fusegraph.errors import CacheError
from fusegraph.runtime import cache as cache_module
from fusegraph.runtime.cache import DiskCache, default_cache, digest, parse_bytes

KEYS = [digest(str(index)) for index in range(64)]


@pytest.fixture(autouse=True)
def _no_warning_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resets the one warning per process before each test."""
    monkeypatch.setattr(cache_module, "_warned", False)
    for name in ("FUSEGRAPH_CACHE_DIR", "FUSEGRAPH_CACHE_LIMIT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def entry(folder: Path, key: str) -> Path:
    (path,) = [path for path in folder.iterdir() if path.name.startswith(key)]
    return path


def fresh(folder: Path, limit: int | None = None) -> DiskCache:
    """Returns a cache as another process would see the folder: with nothing in memory."""
    return DiskCache(folder, limit)


def set_age(folder: Path, key: str, seconds: float) -> None:
    when = time.time() - seconds
    os.utime(entry(folder, key), (when, when))


# --- digests and sizes


def test_digest_keeps_parts_apart() -> None:
    assert digest("ab", "c") != digest("a", "bc") != digest("abc")
    assert digest("a", "") != digest("a")
    assert digest("é") == digest("é".encode())
    assert len(digest()) == 64
    assert int(digest("x"), 16) >= 0


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("1000", 1000), ("512MB", 512 * 10**6), ("2 GiB", 2 << 30), ("1.5k", 1500), ("7b", 7), ("1t", 10**12)],
)
def test_parse_bytes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "MB", "-1", "1e9", "12 parsecs", "1..5", "0x10", "٣"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="no number of bytes"):
        parse_bytes(text)


# --- round trips


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000])
def test_round_trip(tmp_path: Path, data: bytes) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    cache = DiskCache(folder)
    assert cache.get(KEYS[0]) is None
    cache.put(KEYS[0], data)
    assert cache.get(KEYS[0]) == data
    assert fresh(folder).get(KEYS[0]) == data
    assert fresh(folder).get(KEYS[1]) is None
    assert cache.size() >= len(data)
    assert [path.name for path in folder.iterdir()] == [entry(folder, KEYS[0]).name], "no temporary file is left"


def test_put_replaces(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.put(KEYS[0], b"old")
    cache.put(KEYS[0], b"new")
    assert cache.get(KEYS[0]) == fresh(tmp_path).get(KEYS[0]) == b"new"


def test_get_or_build(tmp_path: Path) -> None:
    calls = []

    def build() -> bytes:
        calls.append(1)
        return b"built"

    assert DiskCache(tmp_path).get_or_build(KEYS[0], build) == (b"built", False)
    assert DiskCache(tmp_path).get_or_build(KEYS[0], build) == (b"built", True)
    assert len(calls) == 1


def test_failed_build_stores_nothing(tmp_path: Path) -> None:
    def build() -> bytes:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        DiskCache(tmp_path).get_or_build(KEYS[0], build)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "key", ["", "../../etc/passwd", "A" * 64, "0" * 15, "0" * 64 + "/x", "g" * 64, "0" * 32 + "\n"]
)
def test_keys_are_digests(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="hex digits"):
        DiskCache(tmp_path).get(key)
    with pytest.raises(ValueError, match="hex digits"):
        DiskCache(tmp_path).put(key, b"")


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MEMO_LIMIT_BYTES", 1000)
    cache = DiskCache(tmp_path, 0)
    for key in KEYS[:20]:
        cache.put(key, bytes(100))
    held = [key for key in KEYS[:20] if cache.get(key) is not None]
    assert held == KEYS[10:20]
    assert list(tmp_path.iterdir()) == [], "a limit of zero keeps the disk out of it"


# --- damage


def damages(raw: bytes) -> dict[str, bytes]:
    flipped = {
        f"bit of byte {at}": raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :] for at in (0, 9, 20, 40, len(raw) - 1)
    }
    cut = {f"first {length} bytes": raw[:length] for length in (0, 1, 31, 32, len(raw) - 1)}
    return flipped | cut | {"a byte too many": raw + b"\0", "zeros": bytes(len(raw))}


@pytest.mark.parametrize("kind", sorted(damages(bytes(100))))
def test_damaged_entry_is_rebuilt(tmp_path: Path, kind: str) -> None:
    DiskCache(tmp_path).put(KEYS[0], b"payload" * 9)
    path = entry(tmp_path, KEYS[0])
    raw = path.read_bytes()
    assert len(raw) > 41
    kinds = dict(zip(damages(bytes(100)), damages(raw).values()))
    path.write_bytes(kinds[kind])
    assert fresh(tmp_path).get(KEYS[0]) is None
    assert fresh(tmp_path).get_or_build(KEYS[0], lambda: b"rebuilt") == (b"rebuilt", False)
    assert fresh(tmp_path).get(KEYS[0]) == b"rebuilt"


def test_entry_of_another_key_counts_as_absent(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.put(KEYS[0], b"zero")
    cache.put(KEYS[1], b"one")
    entry(tmp_path, KEYS[0]).replace(entry(tmp_path, KEYS[1]))
    assert fresh(tmp_path).get(KEYS[1]) is None


# --- eviction


def test_least_recently_used_goes_first(tmp_path: Path) -> None:
    for index, key in enumerate(KEYS[:8]):
        DiskCache(tmp_path).put(key, bytes(1000))
        set_age(tmp_path, key, 10_000 - index)
    assert fresh(tmp_path).get(KEYS[1]) is not None, "a hit makes the second oldest the most recent"
    size = DiskCache(tmp_path).size()
    fresh(tmp_path, size + 500).put(KEYS[8], bytes(1000))
    kept = {key for key in KEYS[:9] if fresh(tmp_path).get(key) is not None}
    # Nine entries where eight and a half fit: down to nine tenths of the limit are seven.
    assert kept == {KEYS[index] for index in (1, 3, 4, 5, 6, 7, 8)}


def test_an_entry_larger_than_the_limit_is_kept(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1000)
    cache.put(KEYS[0], bytes(500))
    cache.put(KEYS[1], bytes(5000))
    assert fresh(tmp_path).get(KEYS[0]) is None
    assert fresh(tmp_path).get(KEYS[1]) == bytes(5000)


def test_limit_holds_over_many_puts(tmp_path: Path) -> None:
    limit = 100_000
    cache = DiskCache(tmp_path, limit)
    most = 0
    for index in range(400):
        cache.put(digest("many", str(index)), bytes(1000))
        most = max(most, cache.size() if index % 20 == 0 else 0)
    assert most <= limit * 33 / 32 + 2000
    assert cache.size() > limit // 2


def test_recent_entries_are_not_touched_again(tmp_path: Path) -> None:
    DiskCache(tmp_path).put(KEYS[0], b"x")
    set_age(tmp_path, KEYS[0], 30)
    before = entry(tmp_path, KEYS[0]).stat().st_mtime_ns
    assert fresh(tmp_path).get(KEYS[0]) == b"x"
    assert entry(tmp_path, KEYS[0]).stat().st_mtime_ns == before


def test_clear_and_eviction_leave_foreign_files(tmp_path: Path) -> None:
    foreign = [tmp_path / name for name in ("notes.txt", "x.entry", f"{KEYS[0]}.txt", "something.partial")]
    for path in foreign:
        path.write_bytes(bytes(10_000))
    cache = DiskCache(tmp_path, 1000)
    for key in KEYS[:5]:
        cache.put(key, bytes(900))
    cache.clear()
    assert cache.size() == 0
    assert cache.get(KEYS[4]) is None
    assert sorted(tmp_path.iterdir()) == sorted(foreign)


# --- other processes


def child(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)


WRITER = """
import sys
from pathlib import Path
from fusegraph.runtime.cache import DiskCache, digest
cache = DiskCache(Path(sys.argv[1]), 10**9)
print("ready", flush=True)
for turn in range(10**9):
    for index in range(4):
        cache.put(digest(str(index)), bytes([index]) * 3_000_000)
"""


def test_killed_writers(tmp_path: Path) -> None:
    chance = random.Random(7)
    for _ in range(6):
        writer = child(WRITER, str(tmp_path))
        assert writer.stdout is not None
        with writer.stdout:
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(chance.uniform(0.0, 0.05))
            writer.kill()
        assert writer.wait() == -signal.SIGKILL
        for index in range(4):
            assert fresh(tmp_path).get(KEYS[index]) in (None, bytes([index]) * 3_000_000)
    for index in range(4):
        data, _ = fresh(tmp_path).get_or_build(KEYS[index], lambda index=index: bytes([index]) * 3_000_000)  # type: ignore[misc]
        assert fresh(tmp_path).get(KEYS[index]) == data == bytes([index]) * 3_000_000


KILLED_BEFORE_RENAME = """
import os, signal, sys
from pathlib import Path
from fusegraph.runtime.cache import DiskCache, digest
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
DiskCache(Path(sys.argv[1])).put(digest("0"), b"never seen")
"""


def test_temporaries_of_killed_writers_go_after_an_hour(tmp_path: Path) -> None:
    writer = child(KILLED_BEFORE_RENAME, str(tmp_path))
    writer.communicate()
    assert writer.returncode == -signal.SIGKILL
    (temporary,) = tmp_path.iterdir()
    assert fresh(tmp_path).get(KEYS[0]) is None
    fresh(tmp_path).put(KEYS[1], b"x")
    assert temporary.exists(), "its writer may still be at work"
    os.utime(temporary, (time.time() - 3700,) * 2)
    fresh(tmp_path).put(KEYS[2], b"x")
    assert not temporary.exists()


HAMMER = """
import random, sys
from pathlib import Path
from fusegraph.runtime.cache import DiskCache, digest
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
chance = random.Random(seed)
hits = 0
cache = DiskCache(folder, 60_000)
for turn in range(400):
    if turn % 20 == 0:
        cache = DiskCache(folder, 60_000)   # forget what is in memory
    index = int(chance.triangular(0, 100, 0))
    if turn == 200 and seed == 3:
        cache.clear()
    content = bytes([index]) * (500 + 37 * index)
    data, cached = cache.get_or_build(digest(str(index)), lambda: content)
    assert data == content, index
    hits += cached
print(hits)
"""


def test_processes_hammer_one_folder(tmp_path: Path) -> None:
    children = [child(HAMMER, str(tmp_path), str(seed)) for seed in range(8)]
    hits = [int(process.communicate()[0]) for process in children]
    assert [process.returncode for process in children] == [0] * 8
    assert all(count > 0 for count in hits)
    cache = DiskCache(tmp_path, 60_000)
    assert 0 < cache.size() <= 60_000 * (1 + 8 / 32) + 8 * 5000
    for index in range(100):
        assert cache.get(digest(str(index))) in (None, bytes([index]) * (500 + 37 * index))
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".entry"], "no temporary file is left"


def test_threads_share_an_instance(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 50_000)
    wrong = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(100):
            index = chance.randrange(30)
            data, _ = cache.get_or_build(KEYS[index], lambda: bytes([index]) * 3000)  # noqa: B023 - called at once
            if data != bytes([index]) * 3000:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- folders


def test_default_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert DiskCache().folder == tmp_path / ".cache" / "fusegraph"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert DiskCache().folder == tmp_path / ".cache" / "fusegraph"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert DiskCache().folder == tmp_path / "xdg" / "fusegraph"
    monkeypatch.setenv("FUSEGRAPH_CACHE_DIR", str(tmp_path / "own"))
    assert DiskCache().folder == tmp_path / "own"
    assert DiskCache(tmp_path / "given").folder == tmp_path / "given"
    monkeypatch.setenv("FUSEGRAPH_CACHE_DIR", "~/mine")
    assert DiskCache().folder == tmp_path / "mine"


def test_default_cache_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default_cache.cache_clear()
    monkeypatch.setenv("FUSEGRAPH_CACHE_DIR", str(tmp_path))
    try:
        assert default_cache() is default_cache()
        assert default_cache().folder == tmp_path
    finally:
        default_cache.cache_clear()


def test_limit_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert DiskCache(tmp_path).limit_bytes == 512 * 10**6
    monkeypatch.setenv("FUSEGRAPH_CACHE_LIMIT", "3MiB")
    assert DiskCache(tmp_path).limit_bytes == 3 << 20
    assert DiskCache(tmp_path, 17).limit_bytes == 17
    monkeypatch.setenv("FUSEGRAPH_CACHE_LIMIT", "lots")
    with pytest.raises(CacheError, match="FUSEGRAPH_CACHE_LIMIT: 'lots'"):
        DiskCache(tmp_path)
    with pytest.raises(CacheError, match="-5"):
        DiskCache(tmp_path, -5)


def test_given_folder_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(CacheError, match=str(path)):
        DiskCache(path)


def check_works_without_disk(reason: str, folder: Path) -> None:
    """Compiling goes on, remembered in memory; one warning, also over several caches."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            cache = DiskCache()
            assert cache.get(KEYS[0]) is None
            assert cache.get_or_build(KEYS[0], lambda: b"built") == (b"built", False)
            assert cache.get_or_build(KEYS[0], lambda: b"again") == (b"built", True)
            assert cache.get_or_build(KEYS[1], lambda: b"other") == (b"other", False)
    assert [warning.category for warning in caught] == [RuntimeWarning]
    assert str(folder) in str(caught[0].message)
    assert reason in str(caught[0].message)


def test_a_file_in_the_folders_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    monkeypatch.setenv("FUSEGRAPH_CACHE_DIR", str(path))
    check_works_without_disk("Not a directory", path)
    assert path.read_text() == "mine"


def test_a_file_among_the_folders_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("FUSEGRAPH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    check_works_without_disk("Not a directory", tmp_path / "file" / "cache")


@pytest.mark.parametrize("call", ["os.replace", "tempfile.mkstemp", "os.unlink"])
@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setenv("FUSEGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(call, fail)
    if call == "os.unlink":  # entries that cannot be evicted do no harm
        cache = DiskCache(limit_bytes=100)
        for key in KEYS[:3]:
            assert cache.get_or_build(key, lambda: bytes(90)) == (bytes(90), False)
            assert fresh(tmp_path).get(key) == bytes(90)
    else:
        check_works_without_disk(os.strerror(code), tmp_path)
        assert list(tmp_path.iterdir()) == [], "no temporary file is left"


def test_no_space_in_the_middle_of_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = open

    class Full:
        def __init__(self, handle: int) -> None:
            self.file = real(handle, "wb", buffering=0)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: memoryview) -> int:
            if self.file.tell() > 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(data[:7])

    def opened(name: object, mode: str, buffering: int = -1) -> object:
        return Full(name) if isinstance(name, int) else real(name, mode, buffering)  # type: ignore[call-overload]

    monkeypatch.setenv("FUSEGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache_module, "open", opened, raising=False)
    check_works_without_disk(os.strerror(errno.ENOSPC), tmp_path)
    assert list(tmp_path.iterdir()) == [], "no temporary file is left"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_still_serves_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DiskCache(tmp_path).put(KEYS[5], b"shared")
    set_age(tmp_path, KEYS[5], 1000)
    tmp_path.chmod(0o500)
    try:
        monkeypatch.setenv("FUSEGRAPH_CACHE_DIR", str(tmp_path))
        assert DiskCache().get(KEYS[5]) == b"shared"
        check_works_without_disk("Permission denied", tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache = DiskCache(folder)
    cache.put(KEYS[0], b"x")
    entry(folder, KEYS[0]).unlink()
    folder.rmdir()
    cache.put(KEYS[1], b"y")
    assert fresh(folder).get(KEYS[1]) == b"y"


def test_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    check_works_without_disk("home directory", Path("~/.cache/fusegraph"))


def test_a_hit_is_quick(tmp_path: Path) -> None:
    DiskCache(tmp_path).put(KEYS[0], bytes(20_000))
    caches = [fresh(tmp_path) for _ in range(50)]
    times = []
    for cache in caches:
        start = time.perf_counter()
        cache.get(KEYS[0])
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3
