"""``fusegraph bench --suite schedules``: every candidate schedule of the kernels of models and layers, timed."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from fusegraph.bench.measure import environment
from fusegraph.cli.console import note, say
from fusegraph.errors import DeviceError, FusegraphError
from fusegraph.report import artifacts
from fusegraph.runtime import driver
from fusegraph.runtime.targets import DEFAULT, named

#: How many schedules of a kernel are timed: as many as the autotuner times.
MOST = 12


def schedules(
    only: str | None,
    *,
    dtypes: str,
    seed: int,
    count: int,
    minutes: float,
    json_file: str | None,
    names_only: bool = False,
) -> int:
    """Times the schedules of kernels until all are measured or the time is over; prints the regret by family.

    The kernels are those of the zoo's models whose names the regular expression ``only`` is found in, in ``dtypes``
    (names separated by commas), and of the first ``count`` cases of the sweep of a seed.  The JSON file keeps the
    kernels and what was measured; the same command goes on from it.  With ``names_only`` nothing is timed, but the
    kernels are planned, shown and kept; without a GPU for the default target.  Returns 0.  Raises FusegraphError
    without torch or for a wrong expression, DeviceError without a GPU.
    """
    from fusegraph.bench.schedules.kernels import Source
    from fusegraph.bench.schedules.regret import regrets, text
    from fusegraph.bench.schedules.run import Measurements
    from fusegraph.bench.zoo.models import MODELS

    try:
        wanted = re.compile(only or "")
    except re.error as error:
        raise FusegraphError(f"--only {only!r} is no regular expression: {error}") from None
    sources = [Source(name, dtype) for name in MODELS if wanted.search(name) for dtype in dtypes.split(",")]
    sources += [Source(seed=seed, number=n) for n in range(count)]
    reason = driver.unavailable_reason()
    if reason is not None and not names_only:
        raise DeviceError(f"bench times kernels on a GPU, and there is none: {reason.partition('; use engine=')[0]}")
    target = named(DEFAULT) if reason is not None else driver.properties(0).target
    file = None if json_file is None else artifacts.prepare_file(Path(json_file))
    end, processes = time.perf_counter() + 60 * minutes, max(1, (os.cpu_count() or 2) - 1)
    made = Measurements(target, MOST, file)
    if made.rows:
        note(f"going on from {file}: {len(made.rows)} kernels are measured already")
    device = "cpu" if reason is not None else "cuda:0"
    made.plan(sources, device, processes, lambda name, why: note(f"{name} is left out: {why}"))
    note(
        f"{len(made.kernels)} kernels of {len(made.sources)} models and layers, {end - time.perf_counter():.0f} s left"
    )
    if names_only:
        made.save()
        for kernel in made.kernels.values():
            say(f"{kernel.family}: {kernel.ops} ({', '.join(kernel.uses)})")
        return 0
    made.facts = environment()
    timed = made.measure(processes, end)
    note(f"{timed} schedules of {len(made.rows)} kernels are timed, {end - time.perf_counter():.0f} s left")
    say(text(regrets([(made.kernels[key], rows) for key, rows in made.rows.items()]), target))
    return 0
