"""Draws a benchmark: for every workload a bar for fusegraph and one for the fastest peer, relative to the floor.

The SVG depends on the run's JSON alone: the same JSON gives the same bytes.  Colors follow the reader's light or dark
theme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil
from typing import Any

from fusegraph.bench.results import when

OURS = "cuda"
#: Engines that compute only a part of the workload: they are shown, but are not peers.
PARTS = ("plain",)

_NAMES, _BARS, _TEXT, _MARGIN = 350, 350, 150, 16
_ROW, _BAR, _TOP, _BOTTOM = 30, 11, 62, 48
_STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.back { fill: #ffffff }
.title { font-weight: 600; font-size: 14px }
.small { font-size: 11px; fill: #59636e }
.ours { fill: #2f6fdf }
.peer { fill: #a8b0b9 }
.grid { stroke: #d9dee3 }
.floor { stroke: #cf222e; stroke-width: 1.5 }
.floor-text { fill: #cf222e; font-size: 11px }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.back { fill: #0d1117 }
.small { fill: #9198a1 }
.ours { fill: #6aa1ff }
.peer { fill: #6b747e }
.grid { stroke: #2a313a }
.floor { stroke: #ff7b72 }
.floor-text { fill: #ff7b72 }
}"""


@dataclass(frozen=True)
class Standing:
    """A workload's rows.

    ours       fusegraph's; None if it does not run.
    peer       the fastest peer's; None if none runs.
    part       a library's product or convolution alone; None if there is none.
    floor_us   the floor in microseconds; None if unknown.
    """

    workload: str
    ours: Mapping[str, Any] | None
    peer: Mapping[str, Any] | None
    part: Mapping[str, Any] | None
    floor_us: float | None


def standings(rows: Sequence[Mapping[str, Any]]) -> list[Standing]:
    """Returns the standings of the workloads in the rows of a run's JSON, in their order."""
    by_workload: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_workload.setdefault(row["workload"], []).append(row)
    result = []
    for name, its_rows in by_workload.items():
        ran = [r for r in its_rows if r["median_us"] is not None]
        ours = next((r for r in ran if r["engine"] == OURS), None)
        peers = [r for r in ran if r["engine"] not in (OURS, *PARTS)]
        peer = min(peers, key=lambda r: float(r["median_us"]), default=None)
        part = next((r for r in ran if r["engine"] in PARTS), None)
        result.append(Standing(name, ours, peer, part, next((r["floor_us"] for r in its_rows if r["floor_us"]), None)))
    return result


def svg(document: Mapping[str, Any]) -> str:
    """Returns the picture of a run's JSON.

    Workloads that fusegraph does not run are left out, and counted below the bars.
    """
    every = standings(document["rows"])
    shown = [s for s in every if s.ours is not None]
    bars = [row for s in shown for row in (s.ours, s.peer) if row is not None]
    most = max([1.0, *(row["floor_fraction"] for row in bars)])
    scale = _BARS / most
    width = _MARGIN + _NAMES + _BARS + _TEXT
    height = _TOP + _ROW * len(shown) + _BOTTOM
    bottom = _TOP + _ROW * len(shown)
    left = _MARGIN + _NAMES
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>\n{_STYLE}\n</style>",
        _rectangle("back", 0, 0, width, height),
        _words("title", _MARGIN, 22, "Speed relative to the floor; longer is faster"),
        _words("small", _MARGIN, 40, ", ".join((document["device"], *when(document)))),
        _rectangle("ours", left, 31, 11, 11),
        _words("", left + 16, 41, "fusegraph"),
        _rectangle("peer", left + 90, 31, 11, 11),
        _words("", left + 106, 41, "fastest peer"),
    ]
    for tenths in range(0, int(most * 10) + 1, 2 if most <= 2 else 10 * ceil(most / 10)):
        at = left + scale * tenths / 10
        if tenths != 10:
            parts.append(_line("grid", at, _TOP - 6, bottom))
            parts.append(_words("small", at, bottom + 14, f"{tenths / 10:.1f}", "middle"))
    for number, standing in enumerate(shown):
        top = _TOP + _ROW * number + 2
        parts.append(_words("", left - 8, top + 15, standing.workload, "end"))
        for offset, style, row in ((0, "ours", standing.ours), (_BAR + 1, "peer", standing.peer)):
            if row is not None:
                parts.append(_rectangle(style, left, top + offset, scale * row["floor_fraction"], _BAR))
                label = _microseconds(row["median_us"]) + ("" if style == "ours" else f"  {row['engine']}")
                parts.append(_words("small", left + _BARS + 12, top + offset + 9, label))
    parts.append(_line("floor", left + scale, _TOP - 6, bottom))
    parts.append(_words("floor-text", left + scale, bottom + 14, "floor", "middle"))
    if len(shown) < len(every):
        text = f"{len(every) - len(shown)} of {len(every)} workloads are not shown: fusegraph does not run them."
        parts.append(_words("small", _MARGIN, height - 8, text))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _microseconds(value: float) -> str:
    return f"{value:.1f} us" if value < 1000 else f"{value / 1000:.2f} ms"


def _rectangle(style: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _line(style: str, x: float, top: float, bottom: float) -> str:
    return f'<line class="{style}" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>'


def _words(style: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    name = f' class="{style}"' if style else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
