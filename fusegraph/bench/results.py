"""The JSON of runs of `fusegraph bench`: how it is written, resumed after an interruption, and updated in part.

Rows of one workload never come from two runs, because only times of one run are comparable.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fusegraph.errors import FileError, ResultsError

#: Facts of `measure.environment` that must be equal for rows to stand beside each other, besides package versions.
_MACHINE = ("device", "arch", "driver", "python")
#: The package whose version may differ: the commit identifies it.
_OURS = "fusegraph"
#: The option that says which workloads of a suite are measured.
ONLY = "--only"


@dataclass(frozen=True)
class Row:
    """One workload on one engine; if it does not run there, times are None and note says why.

    median_us       the microseconds of a call, with a cold L2 cache.
    floor_us        the floor; floor_fraction = floor_us / median_us: 1.0 is as fast as the floor.
    build_s         the seconds until the first result, with nothing in fusegraph's disk cache.
    host_us         the least microseconds until a call returns.
    note            what ran: fusegraph's kernels, cuDNN's plans, how torch ran.
    cached_s        fusegraph only: the seconds of building it again with its kernels in the disk cache.
    replay_us       fusegraph only: the microseconds until replaying the call as a CUDA graph returns.
    kernels         how many of fusegraph's kernels, or of cuDNN's plans, a call runs; None if unknown.
    """

    workload: str
    engine: str
    median_us: float | None
    floor_us: float | None
    floor_fraction: float | None
    build_s: float | None
    host_us: float | None
    note: str = ""
    cached_s: float | None = None
    replay_us: float | None = None
    kernels: int | None = None


@dataclass(frozen=True)
class Measured:
    """The commit (None if unknown) and the date (ISO 8601) of a run, and the workloads whose rows in a file are its."""

    commit: str | None
    date: str
    workloads: tuple[str, ...]


def document(
    environment: Mapping[str, Any], options: str, repeats: int, rows: Sequence[Row], *, complete: bool
) -> dict[str, Any]:
    """Returns the JSON of a run: the ``environment`` and the other arguments.

    ``options`` are those of the command line that say what was measured; ``complete`` is False until the last row is
    there.
    """
    facts = {"options": options, "repeats": repeats, "complete": complete}
    return {**environment, **facts, "rows": [asdict(row) for row in rows]}


def finished(
    told: Any, environment: Mapping[str, Any], options: str, repeats: int, engines: Sequence[str]
) -> list[Row]:
    """Returns the rows in the JSON of an interrupted run that the same command need not measure again.

    These are the rows of workloads that have one for every engine.  There are none if the machine, a version, the
    commit or the command line differs, or if the checkout has changes, as these may differ.
    """
    commit = environment.get("commit")
    same = {**environment, "options": options, "repeats": repeats, "complete": False}
    if not isinstance(told, dict) or commit is None or str(commit).endswith("+"):
        return []
    if any(told.get(key) != value for key, value in same.items() if key != "date"):
        return []
    try:
        rows = [Row(**row) for row in told["rows"]]
    except (KeyError, TypeError):
        return []
    have: dict[str, list[str]] = {}
    for row in rows:
        have.setdefault(row.workload, []).append(row.engine)
    return [row for row in rows if have[row.workload] == list(engines)]


# ---- several runs in one file


def runs(told: Mapping[str, Any]) -> list[Measured]:
    """Returns the runs whose rows a file has, the oldest first.

    The last is the one whose commit and date are the file's own.  The key ``earlier`` lists the others with their
    workloads; it is missing if there are none.
    """
    earlier = [Measured(run["commit"], run["date"], tuple(run["workloads"])) for run in told.get("earlier", ())]
    old = {name for run in earlier for name in run.workloads}
    names = dict.fromkeys(row["workload"] for row in told["rows"])
    return [*earlier, Measured(told["commit"], told["date"], tuple(name for name in names if name not in old))]


def when(told: Mapping[str, Any], mark: str = "") -> tuple[str, str]:
    """Returns two texts, the date and the commit of a file's rows; of several, the first and the last.

    ``mark`` is put around every commit.
    """
    every = runs(told)
    dates = sorted({run.date for run in every})
    commits = [f"{mark}{run.commit or 'unknown'}{mark}" for run in every]
    date = dates[0] if len(dates) == 1 else f"{dates[0]}..{dates[-1]}"
    if len(set(commits)) == 1:
        return date, f"commit {commits[0]}"
    return date, f"rows measured at commits {commits[0]}..{commits[-1]}"


def read(path: Path) -> dict[str, Any]:
    """Returns the JSON of a complete run.  Raises FileError for a file that cannot be read or is anything else."""
    try:
        told = json.loads(path.read_text("utf-8"))
        names = sorted({Row(**row).workload for row in told["rows"]})
        whole, listed = told["complete"], sorted(name for run in runs(told) for name in run.workloads)
        texts = (*(told[key] for key in (*_MACHINE, "date")), told.get("options", ""))
        sound = listed == names and all(isinstance(text, str) for text in texts) and "repeats" in told
        versions = dict(told["versions"])
        sound = sound and all(isinstance(version, str | None) for version in versions.values())
        sound = sound and all(isinstance(run.date, str) for run in runs(told))
        shlex.split(told.get("options", ""))
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise FileError(f"{path} is no run of fusegraph bench: {type(error).__name__}: {error}") from None
    if not sound:
        raise FileError(f"{path} is no run of fusegraph bench: it does not tell what was measured, on what and when")
    if whole is not True:
        raise FileError(f"{path} is of a run that was interrupted; give its command again without --update")
    return {**told, "versions": versions}


def pattern(told: Mapping[str, Any]) -> str | None:
    """Returns the regular expression that selected a file's workloads from its suite; None for all."""
    words = shlex.split(told.get("options", ""))
    return words[words.index(ONLY) + 1] if ONLY in words[:-1] else None


def check_same(told: Mapping[str, Any], environment: Mapping[str, Any], options: str, repeats: int, name: str) -> None:
    """Checks that rows measured now may stand beside those of a file: same machine, same command except ``--only``.

    Raises ResultsError that says what differs.
    """
    versions = [document["versions"] for document in (told, environment)]
    packages = [name for name in dict.fromkeys((*versions[0], *versions[1])) if name != _OURS]
    commands = [f"'fusegraph bench {_without_only(text)}'" for text in (told.get("options", ""), options)]
    pairs = {
        **{key: (told[key], environment[key]) for key in _MACHINE},
        **{name: (versions[0].get(name), versions[1].get(name)) for name in packages},
        "repeats": (told["repeats"], repeats),
        "command": (commands[0], commands[1]),
    }
    differing = [
        f"{key} is {now or 'not there'}, in {name} {before or 'not there'}"
        for key, (before, now) in pairs.items()
        if not (_same_version(before, now) if key in packages else before == now)
    ]
    if differing:
        raise ResultsError(
            f"only times of one machine and one command are compared, but {'; '.join(differing)}; "
            "leave out --update to measure all anew"
        )


def _same_version(a: str | None, b: str | None) -> bool:
    """Tells whether two versions are the same.

    One may lack the other's local part (2.11.0+cu130): a package's ``__version__`` and its metadata may differ so.
    """
    if a is None or b is None or ("+" in a) == ("+" in b):
        return a == b
    return a.partition("+")[0] == b.partition("+")[0]


def _without_only(options: str) -> str:
    words = shlex.split(options)
    if ONLY in words:
        del words[words.index(ONLY) : words.index(ONLY) + 2]
    return shlex.join(words)


def updated(
    told: Mapping[str, Any], environment: Mapping[str, Any], rows: Iterable[Row], order: Sequence[str]
) -> dict[str, Any]:
    """Returns a file's JSON in which ``rows`` replace those of the same workloads.

    They get the commit and date of ``environment``; other rows keep those of their own run.  New workloads are inserted
    by ``order``, the names of all workloads.
    """
    fresh: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        fresh.setdefault(row.workload, []).append(asdict(row))
    if not fresh:
        return dict(told)
    by_name: dict[str, list[Any]] = {}
    for row in told["rows"]:
        by_name.setdefault(row["workload"], []).append(row)
    by_name |= fresh
    place = {name: n for n, name in enumerate(order)}
    names = sorted(by_name, key=lambda name: place.get(name, len(place)))
    now = environment["commit"], environment["date"]
    left = [(run.commit, run.date, [w for w in run.workloads if w not in fresh]) for run in runs(told)]
    earlier = [
        {"commit": commit, "date": date, "workloads": workloads}
        for commit, date, workloads in left
        if workloads and (commit, date) != now
    ]
    kept = {key: value for key, value in told.items() if key not in ("earlier", "rows")}
    kept |= {"commit": now[0], "date": now[1]}
    return {**kept, **({"earlier": earlier} if earlier else {}), "rows": [r for name in names for r in by_name[name]]}


def columns(lines: Sequence[Sequence[str]], *, notes: bool = False) -> list[str]:
    """Returns lines of cells in columns: the first is aligned left, the others right; ``notes`` at the end are not."""
    table = [line[:-1] if notes else line for line in lines]
    widths = [max(map(len, column)) for column in zip(*table)]
    shown = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in table]
    return ["  ".join([*cells, *line[len(cells) :]]).rstrip() for cells, line in zip(shown, lines)]
