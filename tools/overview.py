"""Draws one picture of all runs in benchmarks/results: fusegraph's speed relative to the fastest peer, by suite.

The SVG depends on the results alone: the same results give the same bytes.  Colors follow the reader's light or dark
theme.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from math import ceil, floor, log, log2

_NAMES, _BARS, _TEXT, _MARGIN = 150, 360, 370, 16
_ROW, _BAR, _TOP, _BOTTOM = 34, 14, 62, 40
_STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.back { fill: #ffffff }
.title { font-weight: 600; font-size: 14px }
.small { font-size: 11px; fill: #59636e }
.bar { fill: #2f6fdf }
.range { stroke: #1f2328; stroke-width: 1.5 }
.same { stroke: #cf222e; stroke-width: 1.5 }
.grid { stroke: #d9dee3 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.back { fill: #0d1117 }
.small { fill: #9198a1 }
.bar { fill: #6aa1ff }
.range { stroke: #e6edf3 }
.same { stroke: #ff7b72 }
.grid { stroke: #2a313a }
}"""


_TITLE = "Speed relative to the fastest of the other libraries; further right is faster"


def overview(suites: Mapping[str, tuple[float, float, float, str]], subtitle: str, title: str = _TITLE) -> str:
    """Returns the picture of suites: name -> (geometric mean, worst and best ratio, text on rows and peers)."""
    least = min([0.7, *(worst for _, worst, *_ in suites.values())])
    most = max([2.0, *(best for _, _, best, _ in suites.values())])
    left, width = _MARGIN + _NAMES, _MARGIN + _NAMES + _BARS + _TEXT
    bottom = _TOP + _ROW * len(suites)

    def x(ratio: float) -> float:
        return left + log(ratio / least) / log(most / least) * _BARS

    def text(at: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
        name = f' class="{kind}"' if kind else ""
        return f'<text{name} x="{at:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + _BOTTOM}" '
        f'viewBox="0 0 {width} {bottom + _BOTTOM}">',
        f"<style>\n{_STYLE}\n</style>",
        f'<rect class="back" width="{width}" height="{bottom + _BOTTOM}"/>',
        text(_MARGIN, 22, title, "title"),
        text(_MARGIN, 40, subtitle, "small"),
    ]
    for power in range(ceil(log2(least)), floor(log2(most)) + 1):
        lines += [
            f'<line class="grid" x1="{x(2.0**power):.1f}" y1="{_TOP - 6}" x2="{x(2.0**power):.1f}" y2="{bottom}"/>',
            text(x(2.0**power), bottom + 14, "as fast" if power == 0 else f"{2.0**power:g}", "small", "middle"),
        ]
    for number, (name, (mean, worst, best, beside)) in enumerate(suites.items()):
        y = _TOP + _ROW * number
        middle = y + _BAR / 2
        begin, end = sorted((x(1), x(mean)))
        lines += [
            text(left - 8, y + 11, name, anchor="end"),
            f'<rect class="bar" x="{begin:.1f}" y="{y}" width="{end - begin:.1f}" height="{_BAR}"/>',
            f'<line class="range" x1="{x(worst):.1f}" y1="{middle}" x2="{x(best):.1f}" y2="{middle}"/>',
            text(left + _BARS + 8, y + 11, f"{mean:.2f} ({worst:.2f} to {best:.2f}; {beside})"),
        ]
    lines += [
        f'<line class="same" x1="{x(1):.1f}" y1="{_TOP - 6}" x2="{x(1):.1f}" y2="{bottom}"/>',
        text(
            _MARGIN,
            bottom + 30,
            "Bars are geometric means over a suite's rows, lines its slowest and fastest.",
            "small",
        ),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
