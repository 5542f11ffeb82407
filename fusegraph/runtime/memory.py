"""How much memory the host has, and errors for what needs more.

A system that overcommits memory kills the process that uses too much, so a request for more than there is must be
refused beforehand.
"""

from __future__ import annotations

import os
from pathlib import Path

from fusegraph.errors import OutOfMemoryError

#: Requests of up to so many bytes are not checked.
SMALL = 1 << 28


def check_room(nbytes: int, what: str) -> None:
    """Raises OutOfMemoryError if ``nbytes`` are more than the host has; ``what`` begins the message."""
    if nbytes > SMALL and nbytes > host_bytes():
        raise no_room(nbytes, what)


def no_room(nbytes: int, what: str) -> OutOfMemoryError:
    """Returns the error which says that ``what`` takes so many bytes."""
    return OutOfMemoryError(f"{what} takes {size_text(nbytes)}; a process has at most {size_text(host_bytes())} here")


def host_bytes() -> int:
    """Returns how many bytes a process can have: the machine's memory and swap, or its cgroup's limit if less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + _swap()
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text("ascii")))
        except (OSError, ValueError):  # no such group, or one without a limit
            continue
    return total


def _swap() -> int:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("SwapTotal:"))
    except (OSError, ValueError, IndexError):
        return 0


def size_text(nbytes: int) -> str:
    """Formats a number of bytes: ``4.0 TiB (4398046511104 bytes)``."""
    value, unit = float(nbytes), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{nbytes} bytes" if unit == "bytes" else f"{value:.1f} {unit} ({nbytes} bytes)"
