"""``fusegraph bench``: times workloads on a GPU beside libraries; each row is printed and saved as it comes."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fusegraph.bench import plot, results
from fusegraph.bench.measure import PEERS, Bench
from fusegraph.bench.results import Row
from fusegraph.bench.workload import AnyWorkload, GraphWorkload
from fusegraph.cli.benchmarks import MODULES
from fusegraph.cli.console import NOT_OK, doing, note, progress, say
from fusegraph.cli.suites import check_gpu, facts, pattern
from fusegraph.errors import FusegraphError
from fusegraph.loader import load_graphs
from fusegraph.report import artifacts

SUITE = "board"
REPEATS = 15
#: Peers that can run any graph; the others need torch code, which only workloads of suites have.
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
    """Times the graphs of a file, or a suite; returns 1 if fusegraph does not run one of them, else 0.

    The file ``json_file`` holds one object: `environment` (``device, arch, driver, python, versions, commit, date``),
    ``options`` (those of this command, without file names), ``repeats``, ``complete`` (false until the last row is
    there) and ``rows[]`` with the fields of `Row`.  It is replaced after every row, so that an interrupted run leaves
    what it has measured; the same command with the same file resumes from there.  ``commit`` is to be given for copies
    of the tree that are not a checkout.

    With ``update``, the rows of the workloads that are measured replace those in the file, which is saved after every
    workload; ``earlier`` then lists the runs that its other rows come from (`results.runs`).  Only those workloads of
    the file's own command are measured whose names ``only`` matches.

    Raises DeviceError without a GPU, ResultsError for a file of another machine, other libraries or another command,
    FileError for a file that cannot be read or written.
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
    check_gpu()
    measuring = Bench(repeats=repeats, autotune=autotune)
    told = facts(commit, measuring.device)
    options = _options(file, suite, only, rivals, repeats, autotune)
    if old is None or target is None:
        rows = _earlier(target, told, options, repeats, ("cuda", *rivals))
        book = _Book(target, partial(results.document, told, options, repeats), rows)
    else:
        results.check_same(old, told, options, repeats, target.name)
        order = [w.name for w in every]
        book = _Book(target, lambda rows, complete: results.updated(old, told, rows, order), [], whole=True)
    say(f"{told['device']} ({told['arch']}), medians of {repeats} runs, cold L2")
    try:
        failed = _measure(chosen, rivals, measuring, book)
    except KeyboardInterrupt:
        if target is not None and book.kept:
            note(f"the rows measured so far ({book.kept}) are in {target}")
        raise
    if picture is not None:
        artifacts.write_file(picture, plot.svg(book.document(book.rows, complete=True)))
    if failed:
        note(f"{len(failed)} of {len(chosen)} workloads do not run: {', '.join(failed)}")
    return NOT_OK if failed else 0


@dataclass
class _Book:
    """Keeps the rows of a run in a JSON document, and saves it if there is a file ``target``.

    ``document`` makes the document from the rows and the flag ``complete``.  It is saved after every row, or after
    every workload if ``whole``, as it must be with rows of other runs in it.  ``kept`` counts the rows in the file.
    """

    target: Path | None
    document: Callable[..., dict[str, Any]]
    rows: list[Row]
    whole: bool = False

    def __post_init__(self) -> None:
        self.kept = len(self.rows)

    def save(self, *, complete: bool) -> None:
        if self.target is not None:
            artifacts.write_file(self.target, artifacts.json_text(self.document(self.rows, complete=complete)))
            self.kept = len(self.rows)


def _earlier(
    target: Path | None, facts: Mapping[str, Any], options: str, repeats: int, engines: Sequence[str]
) -> list[Row]:
    """Returns the rows that an interrupted run of the same command has left in the file."""
    if target is None or not target.is_file():
        return []
    try:
        told = json.loads(target.read_text("utf-8"))
    except (OSError, ValueError):
        return []
    rows = results.finished(told, facts, options, repeats, engines)
    if rows:
        note(f"going on from {target}: {len(rows) // len(engines)} workloads are measured already")
    return rows


def _measure(workloads: Sequence[AnyWorkload], peers: Sequence[str], measuring: Bench, book: _Book) -> list[str]:
    """Measures, prints and saves the workloads that the book lacks; returns the names of those that do not run."""
    width = max(len(w.name) for w in workloads)
    _print(_HEADINGS, width)
    for row in book.rows:
        _print(_cells(row), width)
    earlier = {row.workload for row in book.rows}
    step = progress(len(workloads))
    for workload in workloads:
        if workload.name not in earlier:
            step(workload.name)
            for row in _rows(workload, peers, measuring):
                book.rows.append(row)
                if not book.whole:
                    book.save(complete=False)
                _print(_cells(row), width)
                step(f"{workload.name}: {row.engine} is measured")
            if book.whole:
                book.save(complete=False)
        step(workload.name, advance=1)
    book.save(complete=True)
    ran = {row.workload for row in book.rows if row.engine == "cuda" and row.median_us is not None}
    return [w.name for w in workloads if w.name not in ran]


def _rows(workload: AnyWorkload, peers: Sequence[str], measuring: Bench) -> Iterator[Row]:
    try:
        yield from measuring.rows(workload, peers)
    except FusegraphError as error:  # inputs, or the copy for the floor, do not fit the GPU
        yield Row(workload.name, "cuda", None, None, None, None, None, " ".join(str(error).split()))


def _print(cells: Sequence[str], width: int) -> None:
    name, engine, *numbers, last = cells
    shown = [name.ljust(width), engine.ljust(_WIDTHS[1])]
    shown += [cell.rjust(least) for cell, least in zip(numbers, _WIDTHS[2:])]
    say("  ".join([*shown, last]).rstrip())
    sys.stdout.flush()


def _cells(row: Row) -> list[str]:
    numbers = zip((row.median_us, row.floor_us, row.floor_fraction, row.build_s, row.host_us), (1, 1, 3, 3, 1))
    text = row.note if len(row.note) <= _MOST_NOTE else row.note[: _MOST_NOTE - 3] + "..."
    return [row.workload, row.engine, *("-" if v is None else f"{v:.{digits}f}" for v, digits in numbers), text]


def _workloads(file: str | None, suite: str | None) -> list[AnyWorkload]:
    if file is not None:
        names = artifacts.UniqueNames()
        doing(f"reading {file}")
        return [GraphWorkload(graph, names.unique(graph.name)) for graph in load_graphs(file, known=True)]
    from fusegraph.bench.workloads import SUITES

    make = SUITES.get(suite or SUITE)
    if make is None:
        raise FusegraphError(f"--suite: there is no suite {suite!r}; there are: {', '.join((*SUITES, *MODULES))}")
    return list(make())


def _options(
    file: str | None, suite: str | None, only: str | None, peers: Sequence[str], repeats: int, autotune: bool
) -> str:
    """Returns the options that say what is measured, as on a command line; of a file, its name without the folder."""
    words = ["--suite", suite or SUITE] if file is None else [Path(file).name]
    words += [results.ONLY, only] if only is not None else []
    words += ["--peers", ",".join(peers) or "none"]
    words += ["--repeats", str(repeats)] if repeats != REPEATS else []
    words += ["--autotune"] if autotune else []
    return shlex.join(words)


def _only(only: str | None, workloads: list[AnyWorkload]) -> list[AnyWorkload]:
    wanted = pattern(only)
    found = [w for w in workloads if wanted(w.name)]
    if not found and only is not None:
        raise FusegraphError(f"--only {only!r} is found in no workload's name; --list shows the names")
    return found


def _peers(given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Returns the peers given by ``--peers``, each once; by default all ``known`` ones.

    Raises FusegraphError for an unknown peer.
    """
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
