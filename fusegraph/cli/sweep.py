"""``fusegraph bench --suite sweep``: random layers of real networks, ours beside torch.compile and torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from fusegraph.bench.measure import Bench, environment
from fusegraph.bench.sweep.run import Sweep, summary, worst
from fusegraph.cli.console import note, say
from fusegraph.report import artifacts

#: Share of the time that compiling may take: timing a case takes about a third of that on one of 16 cores.
PREPARING = 0.55
#: Cases that are compiled before they are timed: caches of many would leave nothing in time.
AT_ONCE = 400


def sweep(
    *,
    seed: int,
    count: int,
    minutes: float,
    kinds: Sequence[str],
    dtypes: Sequence[str],
    processes: int,
    json_file: str | None,
    most: int = 20,
) -> int:
    """Measures cases until the count or the time is reached; prints the figures and the worst rows."""
    file = None if json_file is None else artifacts.prepare_file(Path(json_file))
    made = Sweep(seed, kinds, dtypes, file)
    made.facts = environment()
    bench = Bench()
    end = time.perf_counter() + 60 * minutes
    while (numbers := made.missing(count)) and time.perf_counter() < end:
        left = end - time.perf_counter()
        ready = [n for n, _ in made.prepare(numbers[:AT_ONCE], processes, left * PREPARING)]
        note(f"{len(ready)} of {len(numbers)} cases compiled, {end - time.perf_counter():.0f} s left")
        for n in ready:
            if time.perf_counter() > end:
                break
            made.measure(n, bench)
            if len(made.rows) % 20 == 0:
                made.save()
        made.save()
        if not ready:
            break
    rows = list(made.rows.values())
    say(summary(rows))
    say("")
    say(worst(rows, most))
    return 0
