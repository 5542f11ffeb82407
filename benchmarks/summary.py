"""Summarizes a run in one sentence: how fusegraph's times compare with the fastest peer's over all workloads.

python -m benchmarks.summary FILE.json...    prints it, and every row that is slower than the fastest peer, worst first
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from math import exp, fsum, log
from pathlib import Path
from typing import Any

from fusegraph.bench.plot import standings
from fusegraph.bench.results import when


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns workload -> the fastest peer's time over fusegraph's, from the rows of a run's JSON.

    Above 1, fusegraph is faster.  A workload that a peer runs and fusegraph does not has 0; one that no peer runs is
    left out.
    """
    return {
        s.workload: s.peer["median_us"] / s.ours["median_us"] if s.ours is not None else 0.0
        for s in standings(rows)
        if s.peer is not None
    }


def sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a sentence on the geometric mean and the worst of the `ratios`, and on how many workloads only peers run.

    It is empty if there are no ratios.
    """
    every = ratios(rows)
    ran = {name: ratio for name, ratio in every.items() if ratio}
    if not ran:
        return ""
    mean = exp(fsum(map(log, ran.values())) / len(ran))
    worst = min(ran, key=ran.__getitem__)
    what = f"the {len(ran)} rows with a peer" if len(ran) > 1 else "the one row with a peer"
    text = f"Over {what} the ratio's geometric mean is {mean:.2f}, the worst {ran[worst]:.2f} ({worst})"
    missing = len(every) - len(ran)
    if missing:
        text += f"; {missing} more {'run' if missing > 1 else 'runs'} only on peers"
    return text + "."


def main(files: Sequence[str]) -> int:
    """Prints the summaries of files; returns 2 if no file is given or one is not a run's, else 0."""
    if not files:
        print(__doc__, file=sys.stderr)
        return 2
    for file in files:
        try:
            told = json.loads(Path(file).read_text("utf-8"))
            said, found = sentence(told["rows"]), ratios(told["rows"])
            several = f" ({when(told)[1]})" if told.get("earlier") else ""
        except OSError as error:
            print(f"{file} cannot be read: {error.strerror or error}", file=sys.stderr)
            return 2
        except (ValueError, TypeError, LookupError) as error:
            print(f"{file} is no run of fusegraph bench: {type(error).__name__}: {error}", file=sys.stderr)
            return 2
        print(f"{file}{several}: {said or 'nothing to compare.'}")
        for name, ratio in sorted(found.items(), key=lambda item: item[1]):
            if ratio < 1:
                print(f"  {ratio:.2f}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
