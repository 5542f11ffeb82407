"""``fusegraph bench --suite sizes``: models and graphs, compiled once, at one random size after another."""

from __future__ import annotations

import time
from pathlib import Path

from fusegraph.cli.console import NOT_OK, note, progress, say
from fusegraph.cli.suites import caches, facts, pattern, there
from fusegraph.report import artifacts
from fusegraph.runtime import driver


def sizes(
    only: str | None,
    *,
    seed: int,
    count: int,
    minutes: float,
    json_file: str | None,
    commit: str | None = None,
    names_only: bool = False,
) -> int:
    """Calls cases at ``count`` random sizes each, or until the time is over; prints the table.

    On a GPU the models are the zoo's, and replays are timed beside those of kernels for one size and beside inductor's.
    Without one the cpu engine runs small models; rows have what their configurations say instead.  ``only`` is a
    regular expression that is found in names of cases.  The JSON file keeps the rows, a folder beside it the caches;
    the same command goes on from them.  Returns 1 if a case fails, is wrong or compiles after its first call, else 0.
    Raises FusegraphError for a wrong option.
    """
    engine = "cpu" if driver.unavailable_reason() else "cuda"
    from fusegraph.bench.sizes.cases import cases

    names = [case.name for case in cases(pattern(only), small=engine == "cpu")]
    found = there(names, only)
    wanted = [name for name in names if name in found]
    if names_only:
        for name in wanted:
            say(name)
        return 0
    file = None if json_file is None else artifacts.prepare_file(Path(json_file))
    from fusegraph.bench.sizes.figures import text
    from fusegraph.bench.sizes.run import Sizes

    with caches(file) as folder:
        made = Sizes(wanted, engine, seed, file, folder)
        made.facts = facts(commit, 0 if engine == "cuda" else None)
        step = progress(len(wanted))
        step("calling cases", advance=sum(n in made.rows and made.rows[n].sizes >= count for n in wanted))
        for row in made.measure(count, time.perf_counter() + 60 * minutes):
            step(f"{row.case} is done", advance=1)
            note(f"{row.case}: {row.sizes} sizes, {row.later + row.retraced} compilations after the first call")
    rows = [made.rows[name] for name in wanted if name in made.rows]
    say(text(rows))
    return NOT_OK if any(row.why or row.wrong or row.later or row.retraced for row in rows) else 0
