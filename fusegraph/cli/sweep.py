"""``fusegraph bench --suite sweep``: random layers of real networks, ours beside torch.compile and torch."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from fusegraph.bench.measure import Bench
from fusegraph.cli.console import NOT_OK, note, progress, say
from fusegraph.cli.suites import check_gpu, check_torch, facts, pattern
from fusegraph.errors import FusegraphError
from fusegraph.report import artifacts

#: The share of the time that is for compiling; and the cases that are compiled before they are timed, so that a run
#: that is cut short has timed most of what it compiled.
COMPILING, AT_ONCE = 0.55, 400


def sweep(
    only: str | None,
    *,
    peers: Sequence[str] | None,
    seed: int,
    count: int,
    minutes: float,
    json_file: str | None,
    commit: str | None = None,
    names_only: bool = False,
) -> int:
    """Times cases of a seed until so many have rows or the time is over; prints figures and the slowest rows.

    only is a regular expression: kinds of cases (`fusegraph.bench.sweep.cases.KINDS`) and dtypes that it is found in;
    of either all, if it is found in none.  ``peers`` may have "cudnn", for cases as graphs of cuDNN's API.  The JSON
    file keeps the rows; the same command goes on from it.  Returns 1 if a case does not run, else 0.  Raises
    FusegraphError without torch or for a wrong option, DeviceError without a GPU.
    """
    check_torch("sweep")
    from fusegraph.bench.sweep.cases import KINDS, case
    from fusegraph.bench.sweep.draw import DTYPES
    from fusegraph.bench.sweep.figures import summary, worst
    from fusegraph.bench.sweep.run import Sweep

    wanted = pattern(only)
    kinds, dtypes = ([name for name in names if wanted(name)] for names in (KINDS, DTYPES))
    if not kinds and not dtypes:
        raise FusegraphError(f"--only {only!r} is found in none of {', '.join((*KINDS, *DTYPES))}")
    kinds, dtypes = (sorted(names) if only else [] for names in (kinds, dtypes))
    if names_only:
        for n in range(count):
            say(f"{n} {case(seed, n, kinds, dtypes).name}")
        return 0
    more = {name for text in peers or () for name in text.split(",")} - {"none"}
    if more - {"cudnn"}:
        raise FusegraphError(f"--peers: a sweep has torch, torch.compile and, if asked for, cudnn; got {peers}")
    check_gpu()
    file = None if json_file is None else artifacts.prepare_file(Path(json_file))
    made = Sweep(seed, kinds, dtypes, file, cudnn="cudnn" in more)
    made.facts = facts(commit)
    if made.rows:
        note(f"going on from {file}: {len(made.rows)} cases are measured already")
    bench, end = Bench(), time.perf_counter() + 60 * minutes
    while (numbers := made.missing(count)[:AT_ONCE]) and time.perf_counter() < end:
        ready = []
        step = progress(len(numbers))
        step("compiling cases")
        seconds = (end - time.perf_counter()) * COMPILING
        for n, _ in made.prepare(numbers, max(1, (os.cpu_count() or 2) - 1), seconds):
            ready.append(n)
            step("compiling cases", advance=1)
        note(f"{len(ready)} of {len(numbers)} cases are compiled, {end - time.perf_counter():.0f} s are left")
        step = progress(len(ready))
        for n in ready:
            if time.perf_counter() < end:
                step(f"timing case {n}")
                made.measure(n, bench)
                made.save()
                step(f"timing case {n}", advance=1)
        if not ready:
            break
    rows = [made.rows[n] for n in sorted(made.rows)]
    say(summary(rows))
    say("")
    say(worst(rows))
    return NOT_OK if any("fusegraph" in row.why for row in rows) else 0
