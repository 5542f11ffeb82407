"""``fusegraph bench --suite schedules``: every candidate schedule of the kernels of models and layers, timed."""

from __future__ import annotations

import time
from pathlib import Path

from fusegraph.bench.workers import processors
from fusegraph.cli.console import doing, note, say
from fusegraph.cli.suites import check_gpu, check_torch, facts, names_of, pattern
from fusegraph.report import artifacts
from fusegraph.runtime import driver
from fusegraph.runtime.targets import present

#: How many schedules of a kernel are timed: as many as the autotuner times.
MOST = 12


def schedules(
    only: str | None,
    *,
    dtypes: str | None,
    seed: int,
    count: int,
    minutes: float,
    json_file: str | None,
    commit: str | None = None,
    names_only: bool = False,
) -> int:
    """Times the schedules of kernels until all are measured or the time is over; prints the regret by family.

    The kernels are those of the zoo's models whose names the regular expression ``only`` is found in, in ``dtypes``
    (names separated by commas, bf16 if None), and of the first ``count`` cases of the sweep of a seed.  The JSON file
    keeps the kernels and what was measured; the same command goes on from it.  With ``names_only`` nothing is timed,
    but the kernels are planned, shown and kept; without a GPU for the default target.  Returns 0.  Raises
    FusegraphError without torch or for a wrong expression, DeviceError without a GPU.
    """
    check_torch("schedules")
    from fusegraph.bench.schedules.kernels import Source
    from fusegraph.bench.schedules.regret import regrets, text
    from fusegraph.bench.schedules.run import Measurements
    from fusegraph.bench.zoo.models import MODELS

    wanted, kinds = pattern(only), names_of("--dtypes", dtypes or "bf16")
    sources = [Source(name, dtype) for name in MODELS if wanted(name) for dtype in kinds]
    sources += [Source(seed=seed, number=n) for n in range(count)]
    there = driver.available()
    if not names_only:
        check_gpu()
    file = None if json_file is None else artifacts.prepare_file(Path(json_file))
    end, processes = time.perf_counter() + 60 * minutes, max(1, processors() - 1)
    made = Measurements(present(), MOST, file)
    if made.rows:
        note(f"going on from {file}: {len(made.rows)} kernels are measured already")
    doing(f"planning the kernels of {len(sources)} models and layers")
    made.plan(sources, "cuda:0" if there else "cpu", processes, lambda name, why: note(f"{name} is left out: {why}"))
    note(
        f"{len(made.kernels)} kernels of {len(made.sources)} models and layers, {end - time.perf_counter():.0f} s left"
    )
    if names_only:
        made.save()
        for kernel in made.kernels.values():
            say(f"{kernel.family}: {kernel.ops} ({', '.join(kernel.uses)})")
        return 0
    made.facts = facts(commit)
    doing(f"timing the schedules of {len(made.kernels)} kernels")
    timed = made.measure(processes, end)
    note(f"{timed} schedules of {len(made.rows)} kernels are timed, {end - time.perf_counter():.0f} s left")
    say(text(regrets([(made.kernels[key], rows) for key, rows in made.rows.items()]), made.target))
    return 0
