"""What the commands of all suites of ``fusegraph bench`` share."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from fusegraph.bench.measure import environment
from fusegraph.bench.zoo.models import DTYPES
from fusegraph.errors import DeviceError, FusegraphError
from fusegraph.runtime import driver


def pattern(only: str | None) -> Callable[[str], Any]:
    """Returns the search of the regular expression of ``--only``, which finds everything if it is None.

    Raises FusegraphError for text that is no regular expression.
    """
    try:
        return re.compile(only or "").search
    except re.error as error:
        raise FusegraphError(f"--only {only!r} is no regular expression: {error}") from None


def check_torch(suite: str) -> None:
    """Raises FusegraphError without torch."""
    if find_spec("torch") is None:
        raise FusegraphError(f"--suite {suite} compares with torch, which is not installed")


def dtypes_of(text: str) -> list[str]:
    """Returns the names of ``--dtypes``.  Raises FusegraphError for others than those of models of the zoo."""
    names = text.split(",")
    if wrong := [name for name in names if name not in DTYPES]:
        raise FusegraphError(f"--dtypes: {wrong[0]!r} is none of {', '.join(DTYPES)}")
    return names


def check_gpu() -> None:
    """Raises DeviceError without a GPU."""
    reason = driver.unavailable_reason()
    if reason is not None:
        raise DeviceError(f"bench times kernels on a GPU, and there is none: {reason.partition('; use engine=')[0]}")


def facts(commit: str | None, device: int = 0) -> dict[str, Any]:
    """Returns what results depend on (`fusegraph.bench.measure.environment`), with the commit of ``--commit``."""
    found = environment(device)
    return {**found, "commit": commit or found["commit"]}
