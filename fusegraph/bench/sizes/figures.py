"""What a run over many sizes says: a line for each case."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from fusegraph.bench.results import columns
from fusegraph.bench.sizes.run import STATIC, Row
from fusegraph.bench.torch_engines import OURS

#: Columns of the table: counts, seconds of calls, and how many times as fast as another engine a replay is.
HEADS = (
    "case", "sizes", "compiled at first", "later", "torch traced", "later", "wrong", "error",
    "first s", "slowest later",
    "inductor: compiled", "first s", "slowest later", "speed, static = 1", "worst", "inductor = 1", "worst", "notes",
)  # fmt: skip


#: Characters of the reason of a failure in the table; the file has all of it.
_REASON = 200


def ratios(row: Row, engine: str) -> list[float]:
    """Returns how many times as long as ours for all sizes an engine's replays take, at each size that was timed."""
    return [theirs / ours for ours, theirs in zip(row.replay_us.get(OURS, ()), row.replay_us.get(engine, ()))]


def cells(row: Row) -> list[str]:
    """Returns a row's cells under `HEADS`; "-" where there is no figure, as of the seconds that an emulation takes."""
    found = [row.case, str(row.sizes), *map(str, (row.compiled, row.later, row.traced, row.retraced, len(row.wrong)))]
    seconds = (row.first_s, row.slowest_s) if row.engine == "cuda" else (None, None)
    found += [f"{row.error:.0e}", *map(_seconds, seconds)]
    found += [f"{row.peer['compilations']:.0f}" if row.peer else "-"]
    found += [_seconds(row.peer.get(name)) for name in ("first_s", "slowest_s")]
    for engine in (STATIC, "inductor"):
        every = ratios(row, engine)
        found += [f"{geometric_mean(every):.2f}", f"{min(every):.2f}"] if every else ["-", "-"]
    told = [f"left to torch: {name.removeprefix('aten.')}" for name in row.left]
    told += [f"{what} failed: {why}"[:_REASON] for what, why in row.why.items()]
    return [*found, "; ".join(told) or "-"]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def sentences(rows: Sequence[Row]) -> list[str]:
    """Returns what is true of all rows: sizes, compilations after the first call, wrong results, failures."""
    calls = sum(row.sizes for row in rows)
    again = [f"{row.case} ({row.later + row.retraced})" for row in rows if row.later or row.retraced]
    wrong = [row.case for row in rows if row.wrong]
    failed = [row.case for row in rows if row.why]
    engines = ", ".join(sorted({row.engine for row in rows}))
    found = [f"{calls} calls of {len(rows)} cases on {engines}; compiled after the first call: {_listed(again)}."]
    found += [f"Wrong results: {_listed(wrong)}."]
    return [*found, *([f"Failed: {_listed(failed)}."] if failed else [])]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def text(rows: Sequence[Row]) -> str:
    """Returns the table in columns, and the sentences."""
    return "\n".join([*columns([HEADS, *map(cells, rows)], notes=True), *sentences(rows)])
