"""``fusegraph bench --suite zoo`` and ``--suite training``: whole models, and steps of their training.

Both run through torch.compile, ours beside inductor and eager torch.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from fusegraph.bench.torch_engines import OURS
from fusegraph.bench.training import steps
from fusegraph.bench.workers import Failure
from fusegraph.bench.zoo.models import AUTOCAST, DTYPES
from fusegraph.bench.zoo.run import Make, Subject, Task, Zoo, tasks
from fusegraph.cli.console import NOT_OK, note, say
from fusegraph.cli.suites import caches, check_gpu, check_torch, facts, names_of, pattern, there
from fusegraph.errors import FusegraphError
from fusegraph.report import artifacts
from fusegraph.runtime import driver

USUAL = "usual"
#: Bytes of device memory for each step of training that is compiled beside others.
_STEP_BYTES = 16 << 30


def zoo(
    only: str | None,
    *,
    dtypes: str | None,
    batches: str | None,
    modes: str | None,
    minutes: float,
    json_file: str | None,
    commit: str | None = None,
    names_only: bool = False,
    kernels: bool = False,
) -> int:
    """Times models until all have rows or the time is over; prints the table.  With ``kernels`` it prints our kernels
    by time instead, and keeps nothing.

    only     a regular expression that is found in the names of models, and of parts of training.
    dtypes   names of `fusegraph.bench.zoo.models.DTYPES`, of training also "amp", separated by commas; None: bf16, on
             the cpu engine fp32.
    batches  numbers separated by commas; "usual" is the model's own.  None: 1 and that one, of training that one.
    modes    of `fusegraph.bench.training.steps.MODES`, separated by commas; None: inference.

    Without a GPU it takes steps of training of small models on the cpu engine, of which it times first calls alone.

    The JSON file keeps the rows, a folder beside it the compilers' caches until all is done; the same command goes on
    from them.  Returns 1 if a model does not run on fusegraph, else 0.  Raises FusegraphError without torch or for a
    wrong option, DeviceError without a GPU for inference.
    """
    check_torch("training" if modes else "zoo")
    wanted = _tasks(only, dtypes, (batches or (USUAL if modes else f"1,{USUAL}")).split(","), modes)
    if names_only:
        for task in wanted:
            say(task.name)
        return 0
    on_gpu = wanted[0].device == "cuda"
    if kernels or not modes:
        check_gpu()
    make: Make = steps.subject if modes else Subject
    file = None if json_file is None else artifacts.prepare_file(Path(json_file))
    end = time.perf_counter() + 60 * minutes
    with caches(file) as folder:
        if kernels:
            return _kernels(make, wanted, folder, end)
        made = Zoo(wanted, file, folder, make)
        made.facts = facts(commit, 0 if on_gpu else None)
        for row in made.measure(_processes(modes) if on_gpu else 1, end):
            shown = "call_us" if row.timed and on_gpu else "cold_s"
            every = ", ".join(f"{engine} {getattr(of, shown)}" for engine, of in row.engines.items())
            note(f"{row.name}: {shown} {every}, {end - time.perf_counter():.0f} s are left")
        rows = [made.rows[task.name] for task in wanted if task.name in made.rows]
        if file is not None and len(rows) == len(wanted) and all(row.timed for row in rows):
            shutil.rmtree(folder, ignore_errors=True)
    from fusegraph.bench.zoo.figures import INFERENCE, TRAINING, text

    say(text(rows, TRAINING if modes else INFERENCE))
    return NOT_OK if any(of.why for row in rows for e, of in row.engines.items() if e == OURS) else 0


def _processes(modes: str | None) -> int:
    """Returns how many models are compiled at a time; steps of training need much memory."""
    most = max(1, (os.cpu_count() or 2) // 2)
    return min(most, max(1, driver.properties(0).total_memory // _STEP_BYTES)) if modes else most


def _tasks(only: str | None, dtypes: str | None, batches: Sequence[str], modes: str | None) -> list[Task]:
    if wrong := [text for text in batches if text != USUAL and (not text.isdecimal() or int(text) < 1)]:
        raise FusegraphError(f"--batches: {wrong[0]!r} is neither a positive number nor {USUAL!r}")
    numbers = [0 if text == USUAL else int(text) for text in batches]
    if modes is None:
        found = tasks(pattern(only), names_of("--dtypes", dtypes or "bf16"), numbers)
    else:
        device = "cpu" if driver.unavailable_reason() else "cuda"
        kinds = names_of("--dtypes", dtypes or ("bf16" if device == "cuda" else "fp32"), (*DTYPES, AUTOCAST))
        found = steps.tasks(pattern(only), kinds, numbers, names_of("--modes", modes, steps.MODES), device)
    names = there([task.model for task in found], only)
    return [task for task in found if task.model in names]


def _kernels(make: Make, wanted: Sequence[Task], folder: Path, end: float) -> int:
    from fusegraph.bench.zoo.profile import profiles, text

    failed = False
    for task, profile in profiles(make, wanted, folder, end):
        failed |= isinstance(profile, Failure)
        say(f"{task.name}: {profile.reason}" if isinstance(profile, Failure) else text(profile))
    return NOT_OK if failed else 0
