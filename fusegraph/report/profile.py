"""How long each kernel takes, beside what it takes at least; as a table, JSON, and a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from codegen.target import Target
from fusegraph.engines.owners import labels
from fusegraph.errors import listed
from fusegraph.plan import Plan
from fusegraph.report.artifacts import json_text, prepare_file, write_file
from fusegraph.report.drawing import table
from fusegraph.report.estimates import predicted_us
from fusegraph.report.explain import count_text
from fusegraph.report.limits import limit_of

#: Nodes that a row of the table names.
_MOST_NAMED = 6


@dataclass(frozen=True)
class KernelTime:
    """A kernel that ran once.

    graph, number, name, family, nodes  what it computes: its graph, its number there from 1, its code's name, its
                 kernel family, and the nodes that it computes as the user calls them (`fusegraph.engines.owners`).
                 Kernels of others have a name alone, and the number 0.
    start_us     when it began, from the beginning of the profile.
    us           how long it took within the step; ``warm_us, cold_us`` alone, with what it reads in the L2 cache as
                 far as it fits, and with nothing there; None if not measured.
    nbytes, operations  what it moves through memory and computes.
    floor_us     what it takes at least, by the machine's rates; ``limited_by`` "memory" or "arithmetic".
    """

    graph: str
    number: int
    name: str
    family: str = ""
    nodes: tuple[str, ...] = ()
    start_us: float = 0.0
    us: float = 0.0
    warm_us: float | None = None
    cold_us: float | None = None
    nbytes: int = 0
    operations: float = 0.0
    floor_us: float = 0.0
    limited_by: str = ""

    @property
    def gb_s(self) -> float:
        """Gigabytes a second."""
        return self.nbytes / self.us / 1e3 if self.us else 0.0

    @property
    def tflop_s(self) -> float:
        """Tera-operations a second."""
        return self.operations / self.us / 1e6 if self.us else 0.0

    @property
    def percent(self) -> float:
        """Its floor as a percentage of its time."""
        return 100 * self.floor_us / self.us if self.us else 0.0


@dataclass
class Profile:
    """The kernels of a step in the order in which they ran.

    device, timing  what they ran on, and how their times were found.
    estimated       whether nothing was measured: the times are those of cost models.
    step_us         from the beginning of the first kernel to the end of the last.
    """

    device: str
    timing: str
    estimated: bool
    kernels: Sequence[KernelTime] = ()
    step_us: float = 0.0

    @property
    def kernels_us(self) -> float:
        """The microseconds of all kernels."""
        return sum(k.us for k in self.kernels)

    @property
    def gaps_us(self) -> float:
        """The microseconds of the step in which no kernel ran."""
        ends = [k.start_us + k.us for k in self.kernels]
        return sum(max(0.0, after.start_us - end) for end, (_, after) in zip(ends, pairwise(self.kernels)))

    def data(self) -> dict[str, Any]:
        """Returns the profile as plain data.

        device, timing, estimated, step_us, kernels_us, gaps_us  as the attributes.
        kernels  in the order in which they ran: ``graph, number, name, family, nodes, start_us, us, warm_us, cold_us,
                 share`` (of the kernels' time), ``bytes, operations, gb_s, tflop_s, floor_us, limited_by, percent``.
        """
        total = self.kernels_us or 1.0
        return {
            "device": self.device,
            "timing": self.timing,
            "estimated": self.estimated,
            "step_us": self.step_us,
            "kernels_us": self.kernels_us,
            "gaps_us": self.gaps_us,
            "kernels": [
                {
                    **{key: value for key, value in vars(k).items() if key != "nbytes"},
                    "bytes": k.nbytes,
                    "share": k.us / total,
                    "gb_s": k.gb_s,
                    "tflop_s": k.tflop_s,
                    "percent": k.percent,
                }
                for k in self.kernels
            ],
        }

    def table(self) -> tuple[Sequence[str], list[list[str]], list[str]]:
        """Returns headings, a row for each kernel, the costliest first, and the nodes of each."""
        headings = ["kernel", "us", "share", "warm", "cold", "floor", "limit", "% of it", "GB/s", "TFLOP/s"]
        total = self.kernels_us or 1.0
        ordered = sorted(self.kernels, key=lambda k: -k.us)
        rows = [
            [
                f"{k.number}: {k.name}" if k.number else k.name[:60],
                f"{k.us:.2f}",
                f"{100 * k.us / total:.1f} %",
                *("-" if us is None else f"{us:.2f}" for us in (k.warm_us, k.cold_us)),
                f"{k.floor_us:.2f}" if k.floor_us else "-",
                k.limited_by or "-",
                f"{k.percent:.0f}" if k.floor_us else "-",
                f"{k.gb_s:.0f}" if k.nbytes else "-",
                f"{k.tflop_s:.2f}" if k.operations else "-",
            ]
            for k in ordered
        ]
        return headings, rows, [f"nodes: {listed(k.nodes, _MOST_NAMED)}" if k.nodes else "" for k in ordered]

    def summary(self) -> str:
        """Returns a line: how many kernels take how long, and how that was found."""
        gaps = "" if self.estimated else f", {self.gaps_us:.1f} us between them"
        return (
            f"{count_text(len(self.kernels), 'kernel')}, {self.kernels_us:.1f} us{gaps}; {self.timing} ({self.device})"
        )

    def trace(self) -> str:
        """Returns the profile in Chrome's trace format, which Perfetto (ui.perfetto.dev) opens."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": self.device}},
            {"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": self.timing}},
        ]
        for k in self.kernels:
            told = {"kernel": k.name, "number": k.number, "family": k.family, "nodes": list(k.nodes)}
            told |= {"bytes": k.nbytes, "operations": k.operations, "floor_us": k.floor_us, "percent": k.percent}
            name = listed(k.nodes, _MOST_NAMED) if k.nodes else k.name
            event = {"ph": "X", "pid": 0, "tid": 0, "cat": k.family or "other", "name": name}
            events.append({**event, "ts": k.start_us, "dur": k.us, "args": told})
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})

    def save(self, file: str | Path) -> None:
        """Writes ``data`` as JSON, or the trace if the name ends with ``.trace.json``.  Raises FileError."""
        path = prepare_file(Path(file))
        write_file(path, self.trace() if path.name.endswith(".trace.json") else json_text(self.data()))

    def __str__(self) -> str:
        headings, rows, _ = self.table()
        widths = [max(map(len, column)) for column in zip(headings, *rows)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in (headings, *rows)]
        return "\n".join([self.summary(), *lines])

    def _repr_html_(self) -> str:
        headings, rows, nodes = self.table()
        named = [[*row, text.removeprefix("nodes: ")] for row, text in zip(rows, nodes)]
        return f"<p>{escape(self.summary())}</p>{table([*headings, 'nodes'], named)}"


def described(plan: Plan, target: Target) -> list[KernelTime]:
    """Returns what is known of a plan's kernels before they run: all but their times."""
    found = []
    for number, (kernel, nodes) in enumerate(zip(plan.kernels, labels(plan)), start=1):
        limit = limit_of(kernel, target)
        known = KernelTime(plan.graph.name, number, kernel.name, kernel.group.family, nodes)
        known = replace(known, nbytes=limit.nbytes, operations=limit.operations)
        found.append(replace(known, floor_us=limit.us, limited_by=limit.by))
    return found


def estimated(plan: Plan, target: Target) -> Profile:
    """Returns what cost models estimate of a plan's kernels on a target, in which none overlap."""
    found: list[KernelTime] = []
    start = 0.0
    for kernel, known in zip(plan.kernels, described(plan, target)):
        us = predicted_us(kernel.group.lowered.spec, kernel.choice.schedule, known.nbytes, target)
        found.append(replace(known, start_us=start, us=us))
        start += us
    return Profile(target.title, "estimated by cost models, not measured", True, found, start)
