"""A run in one sentence: how our times compare with the fastest peer's, over all its workloads.

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
    """Returns the fastest peer's time over ours, by workload, from the rows of a run's JSON: more than 1 is faster
    than it.

    A workload that a peer runs and we do not has 0; one without a peer is left out.
    """
    return {
        s.workload: s.peer["median_us"] / s.ours["median_us"] if s.ours is not None else 0.0
        for s in standings(rows)
        if s.peer is not None
    }


def sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the geometric mean and the worst of the `ratios`, and how many workloads only peers run; "" if nothing
    ran.
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
    """Prints what the module's text says; returns 2 if no file is given, or one that holds no run."""
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
