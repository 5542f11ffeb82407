"""``fusegraph bench --suite sweep``: random layers of real networks, ours beside torch.compile and torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from fusegraph.bench.workers import processors
from fusegraph.cli.console import NOT_OK, note, progress, say
from fusegraph.cli.suites import check_gpu, check_torch, facts, pattern
from fusegraph.errors import FusegraphError
from fusegraph.report import artifacts


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
    from fusegraph.bench.sweep.measured import Settings
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
    made = Sweep(Settings(seed, tuple(kinds), tuple(dtypes), "cudnn" in more), file)
    made.facts = facts(commit)
    if made.rows:
        note(f"going on from {file}: {len(made.rows)} cases are measured already")
    step, end = progress(len(made.missing(count))), time.perf_counter() + 60 * minutes
    for row in made.measure(count, processors(), end):
        step(row.name, advance=int(not row.kernels))
    rows = [made.rows[n] for n in sorted(made.rows)]
    say(summary(rows))
    say("")
    say(worst(rows))
    return NOT_OK if any("fusegraph" in row.why for row in rows) else 0
