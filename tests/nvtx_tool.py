"""A tool that NVTX tells of ranges (nvtx_tool.c), as it tells Nsight: what it was told of is in a file."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def environment(folder: Path) -> dict[str, str]:
    """Compiles the tool in a folder; returns what the environment of a process has to be for it to be loaded there."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    library = folder / "nvtx_tool.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "nvtx_tool.c"], check=True)
    return {"NVTX_INJECTION64_PATH": str(library), "NVTX_TOOL_LOG": str(folder / "ranges.txt")}


def ranges(folder: Path, domain: str) -> list[tuple[str, ...]]:
    """Returns the ranges of a domain in the order in which they began, each behind those that it lies within."""
    found, around = [], list[str]()
    for line in (folder / "ranges.txt").read_text().splitlines():
        if line.startswith(f"+ {domain}: "):
            around.append(line.removeprefix(f"+ {domain}: "))
            found.append(tuple(around))
        elif line == f"- {domain}":
            around.pop()
    assert around == []
    return found
