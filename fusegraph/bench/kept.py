"""Rows of a suite, kept in a file as they come: the same command goes on from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from fusegraph.report import artifacts

_Row = TypeVar("_Row")


class Kept(Generic[_Row]):
    """Rows by name, and the facts of a run (`fusegraph.bench.measure.environment`).

    ``read`` makes a row, a dataclass, from its data; None leaves it out.
    """

    def __init__(
        self, file: Path | None, read: Callable[[Mapping[str, Any]], _Row | None], name: Callable[[_Row], str]
    ) -> None:
        self.file = file
        self.facts: dict[str, Any] = {}
        self.rows: dict[str, _Row] = {}
        if file is not None and file.is_file():
            found = map(read, json.loads(file.read_text("utf-8"))["rows"])
            self.rows = {name(row): row for row in found if row is not None}

    def save(self, *, complete: bool) -> None:
        """Writes all rows to the file; ``complete`` tells whether none that is wanted is missing."""
        if self.file is not None:
            rows = [asdict(row) for row in self.rows.values()]  # type: ignore[call-overload]
            artifacts.write_file(self.file, artifacts.json_text({**self.facts, "complete": complete, "rows": rows}))
