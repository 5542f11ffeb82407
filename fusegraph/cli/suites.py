"""What the commands of all suites of ``fusegraph bench`` share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fusegraph.bench.measure import environment
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


def check_gpu() -> None:
    """Raises DeviceError without a GPU."""
    reason = driver.unavailable_reason()
    if reason is not None:
        raise DeviceError(f"bench times kernels on a GPU, and there is none: {reason.partition('; use engine=')[0]}")


def facts(commit: str | None, device: int = 0) -> dict[str, Any]:
    """Returns what results depend on (`fusegraph.bench.measure.environment`), with the commit of ``--commit``."""
    found = environment(device)
    return {**found, "commit": commit or found["commit"]}
