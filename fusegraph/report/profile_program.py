"""``with fusegraph.profile() as p:`` in a user's program: the kernels of all calls within the block."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fusegraph.engines.base import Executable
from fusegraph.report.check import random_inputs
from fusegraph.report.profile import KernelTime, Profile, described, estimated
from fusegraph.report.profile_gpu import Event, length, matched, measured, profiled
from fusegraph.runtime import driver
from fusegraph.runtime.nvtx import range_of, wanted
from fusegraph.runtime.targets import present


@contextlib.contextmanager
def profile() -> Iterator[Profile]:
    """Profiles what runs within the block: models compiled through torch, and Executables.

    The `Profile` that it gives is complete when the block has ended.  With torch and a GPU, times are CUPTI's, of every
    kernel in the block, torch's own included.  With a GPU alone, the kernels of each Executable that was called are
    timed afterwards, on random inputs.  Without a GPU, times are estimates for H200.  What compiles within the block
    runs there once; call models before, to leave that out.
    """
    found = Profile("", "", True)
    torch = sys.modules.get("torch")
    around = range_of(["fusegraph.profile"]) if wanted() else contextlib.nullcontext()
    with _calls() as calls:
        if torch is not None and torch.cuda.is_available():
            with profiled(torch) as events, around:
                yield found
        else:
            events = []
            with around:
                yield found
    if events:
        _matched(found, events, calls)
    else:  # a tool that is attached keeps CUPTI for itself
        _afterwards(found, calls)


@contextlib.contextmanager
def _calls() -> Iterator[list[Executable]]:
    """Gives a list to which the Executables that are called within the block are added, in order."""
    found: list[Executable] = []
    ordinary = Executable.__call__

    def call(self: Executable, /, *args: Any, **keywords: Any) -> Any:
        found.append(self)
        return ordinary(self, *args, **keywords)

    Executable.__call__ = call  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Executable.__call__ = ordinary  # type: ignore[method-assign]


def _matched(found: Profile, events: Sequence[Event], calls: Sequence[Executable]) -> None:
    properties = driver.properties(0)
    plans = [e.plan for e in calls if e.plan is not None and e.device.is_cuda]
    known = {id(plan): described(plan, properties.target) for plan in {id(plan): plan for plan in plans}.values()}
    planned = [kernel for plan in plans for kernel in known[id(plan)]]
    found.device, found.timing, found.estimated = properties.name, "measured by CUPTI", False
    found.kernels = matched(events, planned)
    found.step_us = length(found.kernels)


def _afterwards(found: Profile, calls: Sequence[Executable]) -> None:
    """Times, or estimates, the kernels of each Executable that was called, and puts them in the order of the calls."""
    known: dict[int, Profile] = {}
    kernels: list[KernelTime] = []
    for executable in calls:
        plan = executable.plan
        if plan is None:
            continue
        if id(plan) not in known:
            on_gpu = executable.device.is_cuda and driver.available()
            inputs = random_inputs(executable.graph) if on_gpu else {}
            known[id(plan)] = measured(executable, inputs) if on_gpu else estimated(plan, present())
        one = known[id(plan)]
        kernels += [replace(k, start_us=k.start_us + found.step_us) for k in one.kernels]
        found.step_us += one.step_us
        found.device, found.timing, found.estimated = one.device, one.timing, one.estimated
    found.kernels = kernels
