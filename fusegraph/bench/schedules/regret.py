"""Regret: how much longer a kernel takes with the schedule that the cost model chose than with the fastest one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from typing import Any

from codegen import schedule_from_data, schedule_text
from codegen.families import form_of
from codegen.target import Target
from fusegraph.bench.results import columns
from fusegraph.bench.schedules.kernels import Kernel
from fusegraph.report.estimates import memory_us

#: From this regret on a choice counts as wrong.
WRONG = 1.1


@dataclass(frozen=True)
class Regret:
    """A kernel's chosen schedule beside the fastest of those timed: data of `fusegraph.bench.schedules.run`.

    lost_us  microseconds that the choice costs, in all uses of the kernel.
    """

    kernel: Kernel
    chosen: dict[str, Any]
    best: dict[str, Any]

    @property
    def ratio(self) -> float:
        return float(self.chosen["us"] / self.best["us"])

    @property
    def lost_us(self) -> float:
        return float(self.chosen["us"] - self.best["us"]) * sum(self.kernel.uses.values())

    @property
    def form(self) -> str:
        """The family, and the form that was chosen."""
        return f"{self.kernel.family} {form_of(schedule_from_data(self.chosen['schedule'])).name}"


def regrets(rows: Sequence[tuple[Kernel, list[dict[str, Any]]]]) -> list[Regret]:
    """Returns the regrets of the kernels whose chosen schedule ran, the largest first."""
    found = []
    for kernel, schedules in rows:
        timed = [s for s in schedules if s["us"] is not None]
        if timed and schedules[0]["us"] is not None:
            found.append(Regret(kernel, schedules[0], min(timed, key=lambda s: s["us"])))
    return sorted(found, key=lambda r: -r.ratio)


def table(every: Sequence[Regret], target: Target) -> list[list[str]]:
    """Returns a line for all kernels, one for each family, and one for each form: the cells that `HEADS` names."""
    names = {r.form for r in every}
    groups = [("all", list(every))]
    for family in sorted({r.kernel.family for r in every}):
        groups.append((family, [r for r in every if r.kernel.family == family]))
        forms = sorted(name for name in names if name.partition(" ")[0] == family)
        groups += [(name, [r for r in every if r.form == name]) for name in forms if len(forms) > 1]
    return [_line(name, some, target) for name, some in groups if some]


#: What the columns of `table` are.
HEADS = (
    "kernels", "number", "regret", f"above {WRONG}", "worst", "us chosen", "us best", "best / floor"
)  # fmt: skip


def _line(name: str, some: Sequence[Regret], target: Target) -> list[str]:
    regret = exp(fsum(log(r.ratio) for r in some) / len(some))
    wrong = sum(r.ratio > WRONG for r in some) / len(some)
    chosen, best = (sum(s["us"] * sum(r.kernel.uses.values()) for r, s in each) for each in _sides(some))
    floor = exp(fsum(log(r.best["us"] / memory_us(r.kernel.nbytes, target)) for r in some) / len(some))
    return [
        name, str(len(some)), f"{regret:.3f}", f"{wrong:.0%}", f"{max(r.ratio for r in some):.2f}", f"{chosen:.0f}",
        f"{best:.0f}", f"{floor:.2f}",
    ]  # fmt: skip


def _sides(some: Sequence[Regret]) -> tuple[list[tuple[Regret, Any]], list[tuple[Regret, Any]]]:
    return [(r, r.chosen) for r in some], [(r, r.best) for r in some]


def text(every: Sequence[Regret], target: Target, count: int = 30) -> str:
    """Returns the table, then the kernels with the largest regret and those that lose the most time."""
    lines = columns([HEADS, *table(every, target)])
    lines += ["", "largest regret:", *(line for r in every[:count] for line in describe(r, target))]
    lost = sorted((r for r in every[count:] if r.ratio > 1), key=lambda r: -r.lost_us)[: count // 3]
    lines += ["", "most time lost, of the others:", *(line for r in lost for line in describe(r, target))]
    return "\n".join(lines)


def describe(r: Regret, target: Target) -> list[str]:
    """Returns lines on a kernel: both schedules with their times, measured and estimated, and what it computes."""
    kernel, uses = r.kernel, sum(r.kernel.uses.values())
    shapes = " ".join(
        "x".join(map(str, a.shape)) + ("" if _dense(a.shape, a.strides) else "'") for a in kernel.arguments[:4]
    )
    sources = ", ".join(list(kernel.uses)[:2])
    head = f"{r.ratio:5.2f}  {kernel.family}: {kernel.ops[:60]} [{kernel.arguments[0].dtype}] {shapes}"
    return [
        f"{head} x{uses} ({sources}), floor {memory_us(kernel.nbytes, target):.1f} us",
        *(f"       {name} {s['us']:8.1f} us, estimated {s['predicted_us']:8.1f}: {_schedule(s)}"
          for name, s in (("chosen", r.chosen), ("best  ", r.best))),
    ]  # fmt: skip


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tells whether elements lie in the order of the dimensions, one behind the other."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _schedule(told: dict[str, Any]) -> str:
    return schedule_text(schedule_from_data(told["schedule"]))
