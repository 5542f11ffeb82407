"""``fusegraph bench --suite zoo``: whole models through torch.compile, ours beside inductor and eager torch."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from fusegraph.bench.workers import Failure
from fusegraph.bench.zoo.models import TORCHVISION, TRANSFORMERS
from fusegraph.bench.zoo.run import Task, Zoo, tasks
from fusegraph.cli.console import NOT_OK, note, say
from fusegraph.cli.suites import check_gpu, check_torch, dtypes_of, facts, pattern
from fusegraph.errors import FusegraphError
from fusegraph.report import artifacts
from fusegraph.runtime import temporary

#: What the models are of, as they are called in `fusegraph.bench.zoo.models`.
PACKAGES = {TORCHVISION: "torchvision", TRANSFORMERS: "transformers"}
USUAL = "usual"


def zoo(
    only: str | None,
    *,
    dtypes: str,
    batches: str,
    minutes: float,
    json_file: str | None,
    commit: str | None = None,
    names_only: bool = False,
    kernels: bool = False,
) -> int:
    """Times models until all have rows or the time is over; prints the table.  With ``kernels`` it prints our kernels
    by time instead, and keeps nothing.

    only     a regular expression that is found in the models' names.
    dtypes   names of `fusegraph.bench.zoo.models.DTYPES`, separated by commas.
    batches  numbers separated by commas; "usual" is the model's own.

    The JSON file keeps the rows, a folder beside it the compilers' caches until all is done; the same command goes on
    from them.  Returns 1 if a model does not run on fusegraph, else 0.  Raises FusegraphError without torch or for a
    wrong option, DeviceError without a GPU.
    """
    wanted = _tasks(only, dtypes_of(dtypes), batches.split(","))
    if names_only:
        for task in wanted:
            say(task.name)
        return 0
    check_gpu()
    file = None if json_file is None else artifacts.prepare_file(Path(json_file))
    end = time.perf_counter() + 60 * minutes
    with ExitStack() as stack:
        kept = None if file is None else file.with_name(f"{file.name}.caches")
        folder = Path(stack.enter_context(temporary.folder())) if kept is None else kept
        if kernels:
            return _kernels(wanted, folder, end)
        made = Zoo(wanted, file, folder)
        made.facts = facts(commit)
        for row in made.compile(max(1, (os.cpu_count() or 2) // 2), end):
            cold = {engine: of.cold_s for engine, of in row.engines.items()}
            note(f"{row.name}: first calls {cold}, {end - time.perf_counter():.0f} s are left")
        for row in made.time(end):
            note(f"{row.name}: {', '.join(f'{e} {of.call_us} us' for e, of in row.engines.items())}")
        rows = [made.rows[task.name] for task in wanted if task.name in made.rows]
        if kept is not None and len(rows) == len(wanted) and all(row.timed for row in rows):
            shutil.rmtree(kept, ignore_errors=True)
    from fusegraph.bench.zoo.figures import text

    say(text(rows))
    return NOT_OK if any(of.why for row in rows for e, of in row.engines.items() if e == "fusegraph") else 0


def _tasks(only: str | None, dtypes: Sequence[str], batches: Sequence[str]) -> list[Task]:
    check_torch("zoo")
    if wrong := [text for text in batches if text != USUAL and (not text.isdecimal() or int(text) < 1)]:
        raise FusegraphError(f"--batches: {wrong[0]!r} is neither a positive number nor {USUAL!r}")
    found = tasks(pattern(only), dtypes, [0 if text == USUAL else int(text) for text in batches])
    there = {prefix for prefix, package in PACKAGES.items() if find_spec(package) is not None}
    for prefix in sorted({task.model.partition(":")[0] for task in found} - there):
        note(f"models {prefix}:... are left out: {PACKAGES[prefix]} is not installed")
    found = [task for task in found if task.model.partition(":")[0] in there]
    if not found:
        raise FusegraphError(f"--only {only or ''!r} is found in no model's name; --list shows the names")
    return found


def _kernels(wanted: Sequence[Task], folder: Path, end: float) -> int:
    from fusegraph.bench.zoo.profile import profiles, text

    failed = False
    for task, profile in profiles(wanted, folder, end):
        failed |= isinstance(profile, Failure)
        say(f"{task.name}: {profile.reason}" if isinstance(profile, Failure) else text(profile))
    return NOT_OK if failed else 0
