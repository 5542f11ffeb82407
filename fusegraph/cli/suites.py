"""What the commands of all suites of ``fusegraph bench`` share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fusegraph.bench.measure import environment
from fusegraph.bench.training.steps import WHOLE
from fusegraph.bench.zoo.models import DTYPES, TORCHVISION, TRANSFORMERS
from fusegraph.cli.console import note
from fusegraph.errors import DeviceError, FusegraphError
from fusegraph.runtime import driver, temporary

#: What models are of, by how their names begin.
PACKAGES = {TORCHVISION: "torchvision", TRANSFORMERS: "transformers", WHOLE: "transformers"}


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


def names_of(option: str, text: str, known: Sequence[str] = DTYPES) -> list[str]:
    """Returns the names of an option, separated by commas.  Raises FusegraphError for others than those known."""
    names = text.split(",")
    if wrong := [name for name in names if name not in known]:
        raise FusegraphError(f"{option}: {wrong[0]!r} is none of {', '.join(known)}")
    return names


def there(names: Sequence[str], only: str | None) -> set[str]:
    """Returns the names of which nothing is a model of a package that is missing, which a note tells.

    Raises FusegraphError if there are none.
    """
    missing = {
        prefix: package for prefix, package in PACKAGES.items() if not (find_spec(package) and find_spec("torch"))
    }
    for prefix in sorted({name.partition(":")[0] for name in names} & missing.keys()):
        note(f"models {prefix}:... are left out: {missing[prefix]} or torch is not installed")
    found = {name for name in names if name.partition(":")[0] not in missing}
    if not found:
        raise FusegraphError(f"--only {only or ''!r} is found in no name; --list shows the names")
    return found


@contextmanager
def caches(file: Path | None) -> Iterator[Path]:
    """Gives the folder beside a file of rows where compilers keep what they make; without a file it is temporary."""
    if file is not None:
        yield file.with_name(f"{file.name}.caches")
    else:
        with temporary.folder() as folder:
            yield Path(folder)


def check_gpu() -> None:
    """Raises DeviceError without a GPU."""
    reason = driver.unavailable_reason()
    if reason is not None:
        raise DeviceError(f"bench times kernels on a GPU, and there is none: {reason.partition('; use engine=')[0]}")


def facts(commit: str | None, device: int | None = 0) -> dict[str, Any]:
    """Returns what results depend on (`fusegraph.bench.measure.environment`), with the commit of ``--commit``."""
    found = environment(device)
    return {**found, "commit": commit or found["commit"]}
