"""``fusegraph bench --suite zoo``, ``training`` and ``decode``: whole models, steps of their training, and of decoding.

All run through torch.compile, ours beside inductor and eager torch.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from fusegraph.bench.decode import steps as decoding
from fusegraph.bench.decode.run import Decodings, processes_for
from fusegraph.bench.decode.sizes import WEIGHTS
from fusegraph.bench.torch_engines import OURS
from fusegraph.bench.training import steps
from fusegraph.bench.workers import Failure, processors
from fusegraph.bench.zoo.models import AUTOCAST, DTYPES
from fusegraph.bench.zoo.run import Make, Subject, Task, Zoo, tasks
from fusegraph.cli.console import NOT_OK, note, progress, say
from fusegraph.cli.suites import caches, check_gpu, check_torch, facts, names_of, pattern, there
from fusegraph.errors import FusegraphError
from fusegraph.report import artifacts
from fusegraph.runtime import driver

USUAL = "usual"
#: Bytes of device memory for each step of training that is compiled beside others.
_STEP_BYTES = 16 << 30
#: What decoding is measured beside.
_PEERS = ("compile", "none")
#: What makes what the tasks of a suite measure.
_MAKES: dict[str, Make] = {"zoo": Subject, "training": steps.subject, "decode": decoding.Decoding}


def zoo(
    suite: str,
    only: str | None,
    *,
    dtypes: str | None,
    batches: str | None,
    modes: str | None,
    minutes: float,
    json_file: str | None,
    commit: str | None = None,
    peers: Sequence[str] | None = None,
    names_only: bool = False,
    kernels: bool = False,
) -> int:
    """Times models until all have rows or the time is over; prints the table.  With ``kernels`` it prints our kernels
    by time instead, and keeps nothing.

    suite    "zoo", "training" or "decode".
    only     a regular expression that is found in the names of models, and of parts of training.
    dtypes   names of `fusegraph.bench.zoo.models.DTYPES`, of training also "amp", separated by commas; None: bf16, on
             the cpu engine fp32.  Of decoding `fusegraph.bench.decode.sizes.WEIGHTS`; None: all.
    batches  numbers separated by commas; "usual" is the model's own.  None: 1 and that one, of training that one.
    modes    of `fusegraph.bench.training.steps.MODES`, or of decoding positions and prompts such as "at511" and
             "prefill2048", separated by commas; None: all.  Of the zoo there are none.
    peers    of decoding: "compile", inductor, or "none"; None: that one.

    Without a GPU it takes small models on the cpu engine, but for the zoo, and times first calls alone.

    The JSON file keeps the rows, a folder beside it the compilers' caches until all is done; the same command goes on
    from them.  Returns 1 if a model does not run on fusegraph, or none was measured, else 0.  Raises FusegraphError
    without torch or for a wrong option, DeviceError without a GPU for inference.
    """
    check_torch(suite)
    beside = names_of("--peers", ",".join(peers or _PEERS), _PEERS) != ["none"]
    wanted = _tasks(suite, only, dtypes, batches, modes)
    if names_only:
        for task in wanted:
            say(task.name)
        return 0
    on_gpu = wanted[0].device == "cuda"
    if kernels or suite == "zoo":
        check_gpu()
    make = _MAKES[suite]
    file = None if json_file is None else artifacts.prepare_file(Path(json_file))
    end = time.perf_counter() + 60 * minutes
    with caches(file) as folder:
        if kernels:
            return _kernels(make, wanted, folder, end)
        made = Decodings(wanted, file, folder, peers=beside) if suite == "decode" else Zoo(wanted, file, folder, make)
        made.facts = facts(commit, 0 if on_gpu else None)
        step = progress(len(wanted))
        step("compiling models", advance=sum(task.name in made.rows and made.rows[task.name].timed for task in wanted))
        for row in made.measure(_processes(suite) if on_gpu else 1, end):
            step(f"{row.name} is {'timed' if row.timed else 'compiled'}", advance=int(row.timed))
            shown = ("replay_us" if suite == "decode" else "call_us") if row.timed and on_gpu else "cold_s"
            every = ", ".join(f"{engine} {getattr(of, shown)}" for engine, of in row.engines.items())
            note(f"{row.name}: {shown} {every}, {end - time.perf_counter():.0f} s are left")
        rows = [made.rows[task.name] for task in wanted if task.name in made.rows]
        if file is not None and len(rows) == len(wanted) and all(row.timed for row in rows):
            shutil.rmtree(folder, ignore_errors=True)
    if not rows:
        say(f"nothing was measured within {minutes:g} minutes; the same command goes on")
        return NOT_OK
    from fusegraph.bench.zoo.figures import DECODING, INFERENCE, TRAINING, text

    say(text(rows, {"training": TRAINING, "decode": DECODING}.get(suite, INFERENCE)))
    return NOT_OK if any(of.why for row in rows for e, of in row.engines.items() if e == OURS) else 0


def _processes(suite: str) -> int:
    """Returns how many models are compiled at a time; steps of training need much memory."""
    if suite == "decode":
        return processes_for("cuda")
    most = max(1, processors() // 2)
    return most if suite == "zoo" else min(most, max(1, driver.properties(0).total_memory // _STEP_BYTES))


def _tasks(suite: str, only: str | None, dtypes: str | None, batches: str | None, modes: str | None) -> list[Task]:
    device = "cpu" if driver.unavailable_reason() and suite != "zoo" else "cuda"
    wanted = pattern(only)
    if suite == "decode":
        every = decoding.BATCHES if device == "cuda" else decoding.SMALL_BATCHES
        kinds = dtypes.split(",") if dtypes else list(WEIGHTS)
        asked = modes.split(",") if modes else decoding.MODES if device == "cuda" else decoding.SMALL_MODES
        found = decoding.tasks(wanted, kinds, _numbers(batches) if batches else every, asked, device)
    elif suite == "training":
        kinds = names_of("--dtypes", dtypes or ("bf16" if device == "cuda" else "fp32"), (*DTYPES, AUTOCAST))
        asked = names_of("--modes", modes, steps.MODES) if modes else steps.MODES
        found = steps.tasks(wanted, kinds, _numbers(batches or USUAL, usual=True), asked, device)
    else:
        numbers = _numbers(batches or f"1,{USUAL}", usual=True)
        found = tasks(wanted, names_of("--dtypes", dtypes or "bf16"), numbers)
    names = there([task.model for task in found], only)
    return [task for task in found if task.model in names]


def _numbers(batches: str, *, usual: bool = False) -> list[int]:
    """Returns the numbers of ``--batches``; 0 stands for the usual one of a model, if there is one."""
    words = batches.split(",")
    if wrong := [text for text in words if not (usual and text == USUAL) and (not text.isdecimal() or int(text) < 1)]:
        more = f"neither a positive number nor {USUAL!r}" if usual else "no positive number"
        raise FusegraphError(f"--batches: {wrong[0]!r} is {more}")
    return [0 if text == USUAL else int(text) for text in words]


def _kernels(make: Make, wanted: Sequence[Task], folder: Path, end: float) -> int:
    from fusegraph.bench.zoo.profile import profiles, text

    failed, step = False, progress(len(wanted))
    step("compiling models")
    for task, profile in profiles(make, wanted, folder, end):
        failed |= isinstance(profile, Failure)
        step(f"{task.name} is profiled", advance=1)
        say(f"{task.name}: {profile.reason}" if isinstance(profile, Failure) else text(profile))
    return NOT_OK if failed else 0
