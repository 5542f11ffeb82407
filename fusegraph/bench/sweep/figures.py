"""What a sweep says: means and shares of slow cases by kind and dtype, why they are slow, and the slowest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from fusegraph.bench.results import columns
from fusegraph.bench.sweep.rows import SLOW, Row

#: Columns of `table`: of the cases that both run, the geometric mean of the fastest peer's time over ours, the share of
#: those below 0.9 and 0.7, the worst; how many do not run; how many slow ones are so for which reason; and the
#: geometric mean of the time that cost models say over that measured.
HEADS = (
    "cases", "number", "ratio", f"below {SLOW}", "below 0.7", "worst", "failed", "choice", "form", "partition",
    "estimate",
)  # fmt: skip


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Returns a line for all cases, for each kind and for each dtype: the cells that `HEADS` names."""

    def groups(key: Callable[[Row], str]) -> list[list[str]]:
        return [_line(name, [r for r in rows if key(r) == name]) for name in sorted({key(row) for row in rows})]

    return [_line("all", rows), *groups(lambda row: row.kind), *groups(lambda row: row.dtype)]


def _line(name: str, rows: Sequence[Row]) -> list[str]:
    ratios = [r for row in rows if (r := row.ratio) is not None]
    failed = sum("fusegraph" in row.why for row in rows)
    causes = Counter(row.cause for row in rows)
    ends = [str(failed), *(str(causes[cause]) for cause in ("choice", "form", "partition"))]
    estimates = [row.predicted_us / row.us["fusegraph"] for row in rows if row.predicted_us and "fusegraph" in row.us]
    ends.append(f"{geometric_mean(estimates):.2f}" if estimates else "-")
    if not ratios:
        return [name, "0", "-", "-", "-", "-", *ends]
    below = [f"{sum(r < x for r in ratios) / len(ratios):.1%}" for x in (SLOW, 0.7)]
    return [name, str(len(ratios)), f"{geometric_mean(ratios):.2f}", *below, f"{min(ratios):.2f}", *ends]


#: Columns of `choices`: of those that were timed, how many there are, the share of which estimates chose the faster
#: alternative, the geometric mean of the time of what they chose over the fastest, and the largest.
CHOICE_HEADS = ("choices", "number", "right", "regret", "worst")
#: A choice is right if it is at most so much slower than the fastest.
RIGHT = 1.02


def choices(rows: Sequence[Row]) -> list[list[str]]:
    """Returns a line for each kind of choice: the cells that `CHOICE_HEADS` names."""
    regrets: dict[str, list[float]] = {}
    for choice in (choice for row in rows for choice in row.choices):
        us = choice["measured_us"]
        if choice["preferred"] in us:
            regrets.setdefault(choice["what"], []).append(us[choice["preferred"]] / min(us.values()))
    found = [("all", [x for every in regrets.values() for x in every]), *sorted(regrets.items())] if regrets else []
    return [
        [what, str(len(x)), f"{sum(r <= RIGHT for r in x) / len(x):.1%}", f"{geometric_mean(x):.2f}", f"{max(x):.2f}"]
        for what, x in found
    ]


def summary(rows: Sequence[Row]) -> str:
    """Returns the tables in columns."""
    lines = choices(rows)
    tables = ([HEADS, *table(rows)], *([[CHOICE_HEADS, *lines]] if lines else []))
    return "\n\n".join("\n".join(columns(each)) for each in tables)


def worst(rows: Sequence[Row], count: int = 20) -> str:
    """Returns the slowest rows: times, floor, reason, what the autotuner finds, the kernels of both sides."""
    slow = sorted((row for row in rows if row.ratio is not None), key=lambda row: row.ratio or 0.0)[:count]
    lines = []
    for row in slow:
        peer = row.peer or ""
        tuned = "" if row.tuned_us is None else f", tuned {row.tuned_us:.1f}"
        estimated = "" if row.predicted_us is None else f", estimated {row.predicted_us:.1f}"
        lines.append(
            f"{row.ratio:.2f}  #{row.number} {row.name}: ours {row.us['fusegraph']:.1f}{tuned}{estimated}, "
            f"{peer} {row.us[peer]:.1f}, floor {row.floor_us:.1f} us"
            f"{f'; {row.cause}' if row.cause else ''}{f'; left to torch: {row.left}' if row.left else ''}"
        )
        for engine, kernels in row.kernels.items():
            lines += [f"      {engine}: {us:.1f} {name}" for name, us in kernels[:6]]
        lines += [f"      {choice['node']}: {choice['what']}: {_sides(choice)}" for choice in row.choices]
    lines += [f"failed  #{row.number} {row.name}: {row.why['fusegraph']}" for row in rows if "fusegraph" in row.why]
    return "\n".join(lines)


def _sides(choice: Mapping[str, Any]) -> str:
    """Returns what was measured of each alternative, and estimated; that which estimates choose is marked."""
    texts = []
    for name, us in sorted(choice["measured_us"].items(), key=lambda item: item[1]):
        guess = choice["estimated_us"].get(name)
        mark = " (chosen)" if name == choice["preferred"] else ""
        texts.append(f"{name}{mark} {us:.1f}" + ("" if guess is None else f", estimated {guess:.1f}"))
    return "; ".join(texts)
