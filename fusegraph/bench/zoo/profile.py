"""Where a model's time goes: our kernels by time beside their memory floor, and those of eager torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from fusegraph.bench.torch_engines import OURS
from fusegraph.bench.torch_timing import kernels_of_call
from fusegraph.bench.workers import Failure, alone, each
from fusegraph.bench.zoo.run import TIME_S, Make, Task, begin

#: A kernel that takes more times its floor than this is shown with its shapes and its schedule.
FAR = 2.0
#: Kernels of a model that are shown, and of eager torch.
SHOWN, SHOWN_EAGER = 16, 6


@dataclass
class Profiled:
    """Kernels of a model that are alike.

    us, count  microseconds of all of them, and how many they are.
    floor_us   of all: what moving their operands and results takes at least.
    family     and all below it: "" for kernels that are not ours.
    """

    name: str
    us: float = 0.0
    count: int = 0
    floor_us: float = 0.0
    family: str = ""
    ops: str = ""
    shapes: str = ""
    schedule: str = ""


@dataclass
class Profile:
    """The kernels of one call of a model, those first that are farthest above their floors; and eager torch's."""

    model: str
    ours: list[Profiled] = field(default_factory=list)
    eager: list[Profiled] = field(default_factory=list)


def profiles(make: Make, tasks: Sequence[Task], caches: Path, end: float) -> Iterator[tuple[Task, Profile | Failure]]:
    """Yields tasks with the profiles of what they measure, each made in a process of its own."""
    placed = [replace(task, caches=str(caches / "profiles")) for task in tasks]
    yield from each(partial(_profile, make), placed, 2, 3 * TIME_S, end)


def _profile(make: Make, task: Task) -> Profile:
    begin(task)
    import torch

    import fusegraph.torch
    from fusegraph.runtime.launch import one_after_another

    with alone(task.caches), one_after_another():
        subject = make(task)
        with torch.set_grad_enabled(subject.gradients):
            eager = kernels_of_call(subject.step("eager"))
            step = subject.step(OURS)
            step()
            pieces = [piece for f in fusegraph.torch.report() for piece in f.pieces]
            kernels = [k for piece in pieces for k in getattr(piece.planned(), "kernels", ())]
            ours = kernels_of_call(step)
    return Profile(task.name, matched(ours, kernels), alike(eager))


def alike(events: Sequence[tuple[str, float]]) -> list[Profiled]:
    """Returns kernels by name, the most time first."""
    found: dict[str, Profiled] = {}
    for name, us in events:
        entry = found.setdefault(name, Profiled(name))
        entry.us, entry.count = entry.us + us, entry.count + 1
    return sorted(found.values(), key=lambda entry: -entry.us)


def matched(events: Sequence[tuple[str, float]], planned: Sequence[Any]) -> list[Profiled]:
    """Returns kernels that ran, each with what is planned of it, alike ones together; the farthest above its floor
    first.

    ``planned`` are `fusegraph.plan.Kernel`s in the order in which they run; torch's own may run between them.
    """
    from codegen import schedule_text
    from fusegraph.report.estimates import memory_us
    from fusegraph.runtime.targets import present

    target, at = present(), 0
    found: dict[tuple[str, ...], Profiled] = {}
    for name, us in events:
        number = next((n for n in range(at, len(planned)) if planned[n].name == name), None)
        if number is None:
            entry = found.setdefault((name,), Profiled(name))
            floor = 0.0
        else:
            at, kernel = number + 1, planned[number]
            group, schedule = kernel.group, schedule_text(kernel.choice.schedule)
            shapes = " ".join(map(_shape, group.reads[:4])) + " -> " + " ".join(map(_shape, group.writes[:2]))
            ops = " ".join(n.op.name for n in group.nodes)
            key = (group.family, ops, shapes, schedule)
            entry = found.setdefault(key, Profiled(name, 0.0, 0, 0.0, *key))
            floor = memory_us(sum(t.nbytes for t in kernel.arguments), target)
        entry.us, entry.count, entry.floor_us = entry.us + us, entry.count + 1, entry.floor_us + floor
    return sorted(found.values(), key=lambda entry: entry.floor_us - entry.us)


def _shape(tensor: Any) -> str:
    """Returns a tensor's dtype, shape, and order in memory where it is not that of its dimensions."""
    order = sorted(range(len(tensor.shape)), key=lambda d: -tensor.strides[d])
    turned = any(a > b for a, b in pairwise(order) if tensor.shape[a] > 1 and tensor.shape[b] > 1)
    return f"{tensor.dtype}[{'x'.join(map(str, tensor.shape))}]{'@' + ''.join(map(str, order)) if turned else ''}"


def text(profile: Profile) -> str:
    """Returns the kernels of a model: microseconds, how many, their floor; of those far above it also what they are."""
    total, floor = (sum(getattr(entry, name) for entry in profile.ours) for name in ("us", "floor_us"))
    eager = sum(entry.us for entry in profile.eager)
    count = sum(entry.count for entry in profile.ours)
    lines = [f"{profile.model}: {count} kernels {total:.0f} us, memory floor {floor:.0f} us, eager {eager:.0f} us"]
    for entry in profile.ours[:SHOWN]:
        ratio = f"{entry.us / entry.floor_us:.1f}x" if entry.floor_us else "torch"
        lines.append(
            f"  {entry.us:8.1f} us  x{entry.count:<3} floor {entry.floor_us:7.1f}  {ratio:>6}  {entry.name[:80]}"
        )
        if entry.family and entry.us > FAR * entry.floor_us:
            lines += [f"      {entry.family}: {entry.ops[:90]}", f"      {entry.shapes}", f"      {entry.schedule}"]
    lines += [f"  eager {e.us:8.1f} us  x{e.count:<3} {e.name[:90]}" for e in profile.eager[:SHOWN_EAGER]]
    return "\n".join(lines)
