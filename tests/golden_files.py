"""Kernels that a person has read: the files of tests/golden.

With FUSEGRAPH_UPDATE_GOLDEN=1 in the environment they are written instead of compared: read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

from device_headers import missing_headers

FOLDER = Path(__file__).parent / "golden"


def check_golden(name: str, code: str) -> None:
    """Checks that a kernel's source is that of golden/NAME.cu and includes all headers it uses."""
    path = FOLDER / f"{name}.cu"
    if os.environ.get("FUSEGRAPH_UPDATE_GOLDEN"):
        path.write_text(code, "utf-8")
    assert not missing_headers(code), name
    assert code == path.read_text("utf-8"), f"if this is meant, write {path.name} with FUSEGRAPH_UPDATE_GOLDEN=1"
