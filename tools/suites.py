"""The sections of docs on suites that have results of a form of their own (`SECTIONS`), and their pictures.

Without results a section is empty.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from math import ceil, exp, floor, fsum, log, log10
from pathlib import Path
from typing import Any

from fusegraph.bench.schedules.fit import HEADS as CLOSENESS_HEADS
from fusegraph.bench.schedules.fit import closeness
from fusegraph.bench.sizes import figures as sizes_figures
from fusegraph.bench.sizes.run import Row as SizesRow
from fusegraph.bench.sweep import figures as sweep_figures
from fusegraph.bench.sweep.rows import row_from_data as sweep_row
from fusegraph.bench.zoo import figures as zoo_figures
from fusegraph.bench.zoo.run import row_from_data as zoo_row

SECTIONS = ("zoo", "training", "decode", "sizes", "sweep", "schedules")
ROOT = Path(__file__).resolve().parent.parent
_SIDE, _LEFT, _TOP, _BOTTOM, _MARGIN = 420, 60, 62, 48, 16
_COLORS = ("#2f6fdf", "#cf222e", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#57606a", "#1b7c83")


def documents(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields the results in a folder, in the order of their names."""
    for path in sorted(folder.glob("*.json")):
        yield path, json.loads(path.read_text("utf-8"))


def zoo(results: Path, root: str) -> str:
    """Returns a table for each run of the zoo."""
    return _sections(results / "zoo", root, partial(_zoo, zoo_figures.INFERENCE))


def training(results: Path, root: str) -> str:
    """Returns a table for each run of steps of training."""
    return _sections(results / "training", root, partial(_zoo, zoo_figures.TRAINING))


def decode(results: Path, root: str) -> str:
    """Returns a table for each run of decoding."""
    return _sections(results / "decode", root, partial(_zoo, zoo_figures.DECODING))


def sweep(results: Path, root: str) -> str:
    """Returns a table for each sweep, by kind and dtype."""
    return _sections(results / "sweep", root, _sweep)


def sizes(results: Path, root: str) -> str:
    """Returns a table for each run over many sizes."""
    return _sections(results / "sizes", root, _sizes)


def schedules(results: Path, root: str) -> str:
    """Returns tables for each run of schedules: regret, and how close estimates are."""
    return _sections(results / "schedules", root, _schedules)


def _sections(folder: Path, root: str, of: Callable[[Mapping[str, Any]], list[str]]) -> str:
    found, drawn = [], pictures(folder.parent)
    for path, document in documents(folder):
        place = f"{root}benchmarks/results/{folder.name}"
        told = f": {document['what']}." if "what" in document else ""
        lines = [f"**{_where(document)}** ([`{path.name}`]({place}/{path.name})){told}", ""]
        if path.with_suffix(".svg") in drawn:
            lines += [f"![{folder.name} of {path.stem}]({place}/{path.stem}.svg)", ""]
        found.append("\n".join([*lines, *of(document)]) + "\n")
    return "\n".join(found)


def _where(document: Mapping[str, Any]) -> str:
    facts = document.get("environment", document)
    commits = dict.fromkeys(row.get("commit") or facts["commit"] or "unknown" for row in document["rows"])
    return f"{facts['device']}, {facts['date']}, commit {', '.join(commit[:12] for commit in commits)}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a Markdown table, the first column of which is text."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _zoo(shown: zoo_figures.Table, document: Mapping[str, Any]) -> list[str]:
    rows = [zoo_row(data) for data in document["rows"]]
    sentences = [f"- {sentence}" for sentence in zoo_figures.sentences(rows, shown)]
    heads, *cells = shown.lines(rows)
    return [*sentences, "", *table(heads, cells)]


def _sweep(document: Mapping[str, Any]) -> list[str]:
    return table(sweep_figures.HEADS, sweep_figures.table([sweep_row(data) for data in document["rows"]]))


def _sizes(document: Mapping[str, Any]) -> list[str]:
    rows = [SizesRow(**data) for data in document["rows"]]
    sentences = [f"- {sentence}" for sentence in sizes_figures.sentences(rows)]
    return [*sentences, "", *table(sizes_figures.HEADS, [sizes_figures.cells(row) for row in rows])]


def _timed(document: Mapping[str, Any]) -> dict[str, list[tuple[int, float, float, bool]]]:
    """Returns "family form" -> (kernel, estimated, measured, whether it was chosen) of every schedule with a time."""
    found: dict[str, list[tuple[int, float, float, bool]]] = {}
    for number, row in enumerate(document["rows"]):
        for place, told in enumerate(row["schedules"]):
            if told["us"] is not None:
                name = f"{row['family']} {told['schedule']['type']}"
                found.setdefault(name, []).append((number, told["predicted_us"], told["us"], place == 0))
    return found


def _schedules(document: Mapping[str, Any]) -> list[str]:
    timed = _timed(document)
    best: dict[int, float] = {}
    for every in timed.values():
        for number, _, us, _ in every:
            best[number] = min(us, best.get(number, us))
    regrets = []
    for name, every in sorted(timed.items()):
        ratios = [us / best[number] for number, _, us, chosen in every if chosen]
        if ratios:
            mean = exp(fsum(map(log, ratios)) / len(ratios))
            wrong = sum(ratio > 1.1 for ratio in ratios) / len(ratios)
            regrets.append([name, str(len(ratios)), f"{mean:.3f}", f"{wrong:.0%}", f"{max(ratios):.2f}"])
    close = [closeness(name, [pair[:3] for pair in every]).cells for name, every in sorted(timed.items())]
    return [
        *table(("chosen", "kernels", "regret", "above 1.1", "worst"), regrets), "", *table(CLOSENESS_HEADS, close),
    ]  # fmt: skip


def pictures(results: Path) -> dict[Path, str]:
    """Returns path -> picture of every run of the zoo, training, decoding and schedules that has something to show."""
    found = {}
    draw = runpy.run_path(str(ROOT / "tools" / "overview.py"))["overview"]
    shown = (("zoo", "replay_us", "replay"), ("training", "call_us", "step of training"),
             ("decode", "replay_us", "replay"))  # fmt: skip
    for suite, figure, what in shown:
        for path, document in documents(results / suite):
            rows = [zoo_row(data) for data in document["rows"]]
            bars = {row.name: (r, r, r, _beside(row, figure)) for row in rows if (r := row.ratio(figure)) is not None}
            if bars:
                title = f"Speed of a {what} relative to inductor's; further right is faster"
                found[path.with_suffix(".svg")] = draw(bars, _where(document), title)
    for path, document in documents(results / "schedules"):
        if timed := _timed(document):
            found[path.with_suffix(".svg")] = scatter(timed, _where(document))
    return found


def _beside(row: Any, figure: str) -> str:
    return ", ".join(f"{engine} {us:.0f} us" for engine in row.engines if (us := row.figure(engine, figure)))


def scatter(timed: Mapping[str, Sequence[tuple[int, float, float, bool]]], subtitle: str) -> str:
    """Returns a picture with a point for each schedule: measured microseconds to the right, estimated ones upwards."""
    values = [x for every in timed.values() for _, estimated, us, _ in every for x in (estimated, us)]
    least, most = floor(log10(min(values))), ceil(log10(max(values)) + 1e-9)
    width, height = _LEFT + _SIDE + 240, _TOP + _SIDE + _BOTTOM

    def x(us: float) -> float:
        return _LEFT + (log10(us) - least) / (most - least) * _SIDE

    def y(us: float) -> float:
        return _TOP + _SIDE - (log10(us) - least) / (most - least) * _SIDE

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>\n{runpy.run_path(str(ROOT / 'tools' / 'overview.py'))['_STYLE']}\n</style>",
        f'<rect class="back" width="{width}" height="{height}"/>',
        f'<text class="title" x="{_MARGIN}" y="22">Estimated (up) and measured (right) microseconds</text>',
        f'<text class="small" x="{_MARGIN}" y="40">{escape(subtitle)}</text>',
    ]
    for power in range(least, most + 1):
        at, up, bottom = x(10.0**power), y(10.0**power), _TOP + _SIDE
        lines += [
            f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}"/>',
            f'<line class="grid" x1="{_LEFT}" y1="{up:.1f}" x2="{_LEFT + _SIDE}" y2="{up:.1f}"/>',
            f'<text class="small" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{10.0**power:g}</text>',
            f'<text class="small" x="{_LEFT - 8}" y="{up + 4:.1f}" text-anchor="end">{10.0**power:g}</text>',
        ]
    lines.append(f'<line class="same" x1="{_LEFT}" y1="{_TOP + _SIDE}" x2="{_LEFT + _SIDE}" y2="{_TOP}"/>')
    for number, (name, every) in enumerate(sorted(timed.items())):
        color = _COLORS[number % len(_COLORS)]
        lines += [f'<circle cx="{x(us):.1f}" cy="{y(estimated):.1f}" r="{3 if chosen else 1.5}" fill="{color}"/>'
                  for _, estimated, us, chosen in every]  # fmt: skip
        up = _TOP + 12 + 20 * number
        lines += [f'<circle cx="{_LEFT + _SIDE + 20}" cy="{up}" r="4" fill="{color}"/>',
                  f'<text x="{_LEFT + _SIDE + 30}" y="{up + 4}">{escape(name)}</text>']  # fmt: skip
    return "\n".join([*lines, "</svg>"]) + "\n"
