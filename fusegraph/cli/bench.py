"""``fusegraph bench``: workloads timed on a GPU, ours beside libraries; each row is printed and saved as it comes."""

from __future__ import annotations

import json
import re
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fusegraph.bench import plot, results
from fusegraph.bench.measure import PEERS, Bench, environment
from fusegraph.bench.results import Row
from fusegraph.bench.workload import AnyWorkload, GraphWorkload
from fusegraph.cli.console import NOT_OK, note, say
from fusegraph.errors import DeviceError, FusegraphError
from fusegraph.loader import load_graphs
from fusegraph.report import artifacts
from fusegraph.runtime import driver

SUITE = "board"
REPEATS = 15
#: Peers that can run any graph; the others need torch code, which only the board has.
FILE_PEERS = ("cudnn",)
_HEADINGS = ("workload", "engine", "median us", "floor us", "fraction", "build s", "host us", "note")
_WIDTHS = (0, 8, 9, 9, 8, 8, 8, 0)
_MOST_NOTE = 60


def bench(
    file: str | None,
    *,
    suite: str | None,
    only: str | None,
    peers: Sequence[str] | None,
    repeats: int,
    json_file: str | None,
    plot_file: str | None,
    commit: str | None = None,
    names_only: bool = False,
    autotune: bool = False,
    update: bool = False,
) -> int:
    """Times the graphs of a file, or a suite; returns 1 if one of our own rows could not be measured, else 0.

    The file written for ``json_file`` is one object: `environment` (``device, arch, driver, python, versions, commit,
    date``), ``options`` (of this command, but for file names), ``repeats``, ``complete`` (false until the last row is
    there) and ``rows[]`` with the fields of `Row`: ``workload, engine, median_us, floor_us, floor_fraction, build_s,
    host_us, note``.  It is replaced after every row, so that an interrupted run leaves what it has measured; the same
    command with the same file goes on from there.  ``commit`` is for copies of the tree that are no checkout.

    With ``update`` all rows of the workloads measured take the place of those that the file has, and it is replaced
    after every workload; ``earlier`` then lists the runs that its other rows are of (`results.runs`).  What is measured
    are those workloads of the file's own command that ``only`` finds.

    Raises DeviceError without a GPU, ResultsError for a file of another machine, other libraries or another command.
    """
    if file is not None and suite is not None:
        raise FusegraphError(f"give a file or --suite, not both (got {file!r} and {suite!r})")
    if update and json_file is None:
        raise FusegraphError("--update needs --json FILE, whose rows it replaces")
    every = _workloads(file, suite)
    old = results.read(Path(json_file)) if update and json_file is not None else None
    chosen = _only(only, every if old is None else _only(results.pattern(old), every))
    if names_only:
        for workload in chosen:
            say(workload.name)
        return 0
    rivals = _peers(peers, PEERS if file is None else FILE_PEERS)
    target, picture = (None if name is None else artifacts.prepare_file(Path(name)) for name in (json_file, plot_file))
    reason = driver.unavailable_reason()
    if reason is not None:
        raise DeviceError(f"bench times kernels on a GPU, and there is none: {reason.partition('; use engine=')[0]}")
    measuring = Bench(repeats=repeats, autotune=autotune)
    facts = environment(measuring.device)
    facts["commit"] = commit or facts["commit"]
    options = _options(file, suite, only, rivals, repeats, autotune)
    if old is None or target is None:
        book: _Book = _New(target, facts, options, repeats, ("cuda", *rivals))
    else:
        results.check_same(old, facts, options, repeats, target.name)
        book = _Update(target, facts, old, [w.name for w in every])
    run = _Run(chosen, rivals, measuring, book)
    say(f"{facts['device']} ({facts['arch']}), medians of {repeats} runs, cold L2")
    try:
        run.measure()
    except KeyboardInterrupt:
        if target is not None and book.kept:
            note(f"the rows measured so far ({book.kept}) are in {target}")
        raise
    if picture is not None:
        artifacts.write_file(picture, plot.svg(book.document(complete=True)))
    if run.failed:
        note(f"{len(run.failed)} of {len(chosen)} workloads do not run: {', '.join(run.failed)}")
    return NOT_OK if run.failed else 0


class _Book(ABC):
    """Where the rows of a run go: a JSON document, and its file if there is to be one."""

    def __init__(self, target: Path | None, facts: Mapping[str, Any]) -> None:
        self._target, self._facts = target, facts
        self.rows: list[Row] = []
        #: How many of the rows are in the file.
        self.kept = 0

    @abstractmethod
    def document(self, *, complete: bool) -> dict[str, Any]:
        """What the file is to hold."""

    def add(self, row: Row) -> None:
        """Takes a row; the rows of a workload come one after the other."""
        self.rows.append(row)

    @abstractmethod
    def close(self, *, complete: bool) -> None:
        """After the last row of a workload, or with ``complete`` of all."""

    def _save(self, *, complete: bool) -> None:
        if self._target is not None:
            artifacts.write_file(self._target, artifacts.json_text(self.document(complete=complete)))
            self.kept = len(self.rows)


class _New(_Book):
    """A file that holds this run alone: saved row by row, and gone on with if it was cut short."""

    def __init__(
        self, target: Path | None, facts: Mapping[str, Any], options: str, repeats: int, engines: Sequence[str]
    ) -> None:
        super().__init__(target, facts)
        self._options, self._repeats = options, repeats
        self.rows = self._earlier(engines)
        self.kept = len(self.rows)

    def _earlier(self, engines: Sequence[str]) -> list[Row]:
        """The rows that the same run, cut short, has left in the file."""
        if self._target is None or not self._target.exists():
            return []
        try:
            told = json.loads(self._target.read_text("utf-8"))
        except (OSError, ValueError):
            return []
        rows = results.finished(told, self._facts, self._options, self._repeats, engines)
        if rows:
            note(f"going on from {self._target}: {len(rows) // len(engines)} workloads are measured already")
        return rows

    def document(self, *, complete: bool) -> dict[str, Any]:
        return results.document(self._facts, self._options, self._repeats, self.rows, complete=complete)

    def add(self, row: Row) -> None:
        super().add(row)
        self._save(complete=False)

    def close(self, *, complete: bool) -> None:
        if complete:
            self._save(complete=True)


class _Update(_Book):
    """A file with rows of other runs, of which this one replaces some: saved workload by workload, always whole."""

    def __init__(self, target: Path, facts: Mapping[str, Any], old: Mapping[str, Any], order: Sequence[str]) -> None:
        super().__init__(target, facts)
        self._old, self._order = old, order

    def document(self, *, complete: bool) -> dict[str, Any]:
        return results.updated(self._old, self._facts, self.rows, self._order)

    def close(self, *, complete: bool) -> None:
        self._save(complete=complete)


class _Run:
    """One run: measures, prints, writes down."""

    def __init__(self, workloads: Sequence[AnyWorkload], peers: Sequence[str], measuring: Bench, book: _Book) -> None:
        self._workloads, self._peers, self._bench, self._book = workloads, peers, measuring, book
        self._width = max(len(w.name) for w in workloads)
        self.failed: list[str] = []

    def measure(self) -> None:
        self._line(_HEADINGS)
        rows = self._book.rows
        earlier = {row.workload for row in rows}
        for row in rows:
            self._line(_cells(row))
        for workload in self._workloads:
            if workload.name not in earlier:
                for row in self._rows(workload):
                    self._book.add(row)
                    self._line(_cells(row))
                self._book.close(complete=False)
        ran = {row.workload for row in rows if row.engine == "cuda" and row.median_us is not None}
        self.failed = [w.name for w in self._workloads if w.name not in ran]
        self._book.close(complete=True)

    def _rows(self, workload: AnyWorkload) -> Iterator[Row]:
        try:
            yield from self._bench.rows(workload, self._peers)
        except FusegraphError as error:  # its inputs or its floor: too large for the GPU
            yield Row(workload.name, "cuda", None, None, None, None, None, " ".join(str(error).split()))

    def _line(self, cells: Sequence[str]) -> None:
        name, engine, *numbers, last = cells
        shown = [name.ljust(self._width), engine.ljust(_WIDTHS[1])]
        shown += [cell.rjust(width) for cell, width in zip(numbers, _WIDTHS[2:])]
        say("  ".join([*shown, last]).rstrip())
        sys.stdout.flush()


def _cells(row: Row) -> list[str]:
    numbers = zip((row.median_us, row.floor_us, row.floor_fraction, row.build_s, row.host_us), (1, 1, 3, 3, 1))
    text = row.note if len(row.note) <= _MOST_NOTE else row.note[: _MOST_NOTE - 3] + "..."
    return [row.workload, row.engine, *("-" if v is None else f"{v:.{digits}f}" for v, digits in numbers), text]


def _workloads(file: str | None, suite: str | None) -> list[AnyWorkload]:
    if file is not None:
        names = artifacts.UniqueNames()
        return [GraphWorkload(graph, names.unique(graph.name)) for graph in load_graphs(file)]
    from fusegraph.bench.workloads import SUITES

    make = SUITES.get(suite or SUITE)
    if make is None:
        raise FusegraphError(f"--suite: there is no suite {suite!r}; there are: {', '.join(SUITES)}")
    return list(make())


def _options(
    file: str | None, suite: str | None, only: str | None, peers: Sequence[str], repeats: int, autotune: bool
) -> str:
    """The options that say what is measured, as on a command line; of a file its name alone, not where it is."""
    words = ["--suite", suite or SUITE] if file is None else [Path(file).name]
    words += [results.ONLY, only] if only is not None else []
    words += ["--peers", ",".join(peers) or "none"]
    words += ["--repeats", str(repeats)] if repeats != REPEATS else []
    words += ["--autotune"] if autotune else []
    return shlex.join(words)


def _only(pattern: str | None, workloads: list[AnyWorkload]) -> list[AnyWorkload]:
    if pattern is None:
        return workloads
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise FusegraphError(f"--only {pattern!r} is no regular expression: {error}") from None
    found = [w for w in workloads if wanted.search(w.name)]
    if not found:
        raise FusegraphError(f"--only {pattern!r} is found in no workload's name; --list shows the names")
    return found


def _peers(given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The peers meant by ``--peers``, each once; all that are known if none is given."""
    if given is None:
        return list(known)
    names = [part.strip() for text in given for part in text.split(",")]
    if names == ["none"]:
        return []
    for name in names:
        if name not in known:
            more = "; the others need the torch code of a suite's workloads" if name in PEERS else ""
            raise FusegraphError(f"--peers: {name!r} is none of {', '.join(known)}, none{more}")
    return list(dict.fromkeys(names))
