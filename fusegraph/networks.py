"""networkx, imported when something of it is first asked for: that takes as long as planning a small model."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(import_module("networkx"), name)
