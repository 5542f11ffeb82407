"""What a run of the zoo says: a line for each model, and means over all."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from fusegraph.bench.torch_engines import ENGINES, OURS
from fusegraph.bench.zoo.run import Figures, Row

#: Columns of a table of the zoo: figures of all engines beside each other, and ratios of inductor's to ours.
HEADS = (
    "model", "call us: eager", "inductor", "fusegraph", "ratio", "replay us: eager", "inductor", "fusegraph", "ratio",
    "first s: cold", "inductor", "warm", "inductor", "error", "kernels", "inductor", "MB", "inductor", "left to torch",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    """Returns a row's cells under `HEADS`; "-" where there is no figure."""
    every = {engine: row.engines.get(engine, Figures()) for engine in ENGINES}
    ours, inductor = every[OURS], every["inductor"]
    found = [row.name]
    for figure in ("call_us", "replay_us"):
        found += [_number(getattr(of, figure), 0) for of in every.values()]
        found.append(_number(row.ratio(figure), 2))
    for figure in ("cold_s", "warm_s"):
        found += [_number(getattr(of, figure), 1) for of in (ours, inductor)]
    found.append("-" if ours.error is None else f"{ours.error:.0e}")
    for figure in ("kernels", "peak_mb"):
        found += [_number(getattr(of, figure), 0) for of in (ours, inductor)]
    failed = [f"{engine} failed: {why}"[:90] for engine, of in every.items() for why in of.why.values()]
    return [*found, "; ".join([*(left.removeprefix("aten.") for left in row.left), *failed]) or "-"]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def sentences(rows: Sequence[Row]) -> list[str]:
    """Returns a sentence for each dtype on the ratios to inductor, and one on what failed."""
    found = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        for figure, name in (("call_us", "by call"), ("replay_us", "by replay")):
            ratios = {row.name: r for row in rows if row.dtype == dtype and (r := row.ratio(figure)) is not None}
            if ratios:
                worst = min(ratios, key=ratios.__getitem__)
                below = sum(r < 1 for r in ratios.values())
                found.append(
                    f"{dtype} {name}: geometric mean {geometric_mean(ratios.values()):.2f} over {len(ratios)} models, "
                    f"{below} below 1, worst {ratios[worst]:.2f} ({worst})."
                )
    failed = [row.name for row in rows if OURS in row.engines and row.engines[OURS].why]
    return [*found, *([f"fusegraph failed: {', '.join(failed)}."] if failed else [])]


def text(rows: Sequence[Row]) -> str:
    """Returns the table in columns, and the sentences."""
    lines = [list(HEADS), *map(cells, rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(HEADS) - 1)]
    shown = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:])), line[-1]])
        for line in lines
    ]
    return "\n".join([*shown, *sentences(rows)])
