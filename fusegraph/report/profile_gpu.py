"""Times the kernels of an Executable on a GPU: each alone with a warm and a cold cache, and all within a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusegraph.engines.arguments import with_own_memory
from fusegraph.engines.base import Executable
from fusegraph.engines.stepping import steps_of
from fusegraph.ops.base import Array
from fusegraph.report.check import operands
from fusegraph.report.profile import KernelTime, Profile, described
from fusegraph.runtime import driver
from fusegraph.runtime.nvtx import range_of
from fusegraph.runtime.timing import ColdTimer

#: A kernel that ran: its name, when it began and how long it took, in microseconds.  One that is launched early waits
#: for the one before; it begins when that ends.
Event = tuple[str, float, float]


def measured(executable: Executable, inputs: Mapping[str, Array], repeats: int = 15) -> Profile:
    """Returns the times of the kernels of a call on inputs, by name.

    Within the step they are CUPTI's if torch, whose profiler asks it, is installed; else those with a warm cache, one
    after the other.  Ranges named after each kernel's nodes are shown by Nsight if the package nvtx is installed.
    """
    plan, device = executable.plan, executable.device.index
    assert plan is not None
    properties = driver.properties(device)
    target, timer = properties.target, ColdTimer(device)
    for steps in steps_of(executable, inputs):
        for number in range(len(steps.plan.kernels)):
            steps.run(number)
    found, start = [], 0.0
    every = described(plan, target)
    for number, (kernel, known) in enumerate(zip(plan.kernels, every)):
        if 0 not in kernel.source.grid:
            with range_of(known.nodes):
                steps.run(number)
            cold = timer.median(lambda: steps.launch(number), repeats)  # noqa: B023 - called at once
            warm = timer.median(lambda: steps.launch(number), repeats, before=lambda: steps.launch(number))  # noqa: B023
            known = replace(known, us=warm, warm_us=warm, cold_us=cold, start_us=start)
        start += known.us
        found.append(known)
    arrays = operands(executable.graph, inputs, executable.device)
    out = with_own_memory(executable.graph, executable(*arrays, stream=0))
    events = timeline(lambda: executable(*arrays, out=out, stream=0), device)
    if events is None:
        timing = "measured by events, one kernel at a time, with a warm cache"
        return Profile(properties.name, timing, False, found, start)
    alone = {k.number: k for k in found}
    within = [
        replace(k, warm_us=alone[k.number].warm_us, cold_us=alone[k.number].cold_us) if k.number else k
        for k in matched(events, every)
    ]
    return Profile(properties.name, "measured by CUPTI within a step", False, within, length(within))


def timeline(run: Callable[[], Any], device: int = 0) -> list[Event] | None:
    """Returns the kernels of a call, in order, as CUPTI sees them; None if there is no torch to ask it."""
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            run()
            driver.synchronize(0, device)
            with profiled(torch) as events:
                run()
                driver.synchronize(0, device)
            return events or None
    return None


@contextlib.contextmanager
def profiled(torch: Any) -> Iterator[list[Event]]:
    """Gives a list that holds the kernels of the block, in order, when it is done."""
    found: list[Event] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as measuring:
        yield found
        torch.cuda.synchronize()
    kind = torch.autograd.DeviceType.CUDA
    kernels = [e for e in measuring.events() if e.device_type == kind and e.device_time]
    free = 0.0
    for event in sorted(kernels, key=lambda e: e.time_range.start):
        start, end = max(float(event.time_range.start), free), float(event.time_range.end)
        found.append((event.name, start, max(end - start, 0.0)))
        free = max(free, end)


def matched(events: Sequence[Event], planned: Sequence[KernelTime]) -> list[KernelTime]:
    """Returns kernels that ran with what is known of them.

    ``planned`` are the kernels that were called, in order (`described`); others, such as torch's, may run between them.
    """
    first = events[0][1] if events else 0.0
    found, at = [], 0
    for name, start, us in events:
        place = next((n for n in range(at, len(planned)) if planned[n].name == name), None)
        if place is None:
            found.append(KernelTime("", 0, name, start_us=start - first, us=us))
            continue
        at = place + 1
        found.append(replace(planned[place], start_us=start - first, us=us))
    return found


def length(kernels: Sequence[KernelTime]) -> float:
    """Returns the microseconds from the beginning of the first kernel to the end of the last."""
    return max((k.start_us + k.us for k in kernels), default=0.0)
