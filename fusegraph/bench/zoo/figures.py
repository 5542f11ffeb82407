"""What a run of the zoo, of training or of decoding says: a line for each model, and means over all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import TypeAlias

from fusegraph.bench.results import columns
from fusegraph.bench.torch_engines import ENGINES, OURS
from fusegraph.bench.zoo.models import LLAMA, TORCHVISION, TRANSFORMERS
from fusegraph.bench.zoo.run import Row

#: The head of a column, and the text of a row in it.
Column: TypeAlias = tuple[str, Callable[[Row], str]]
_BOTH = (OURS, "inductor")


def _number(value: float | None, form: str, times: float = 1) -> str:
    return "-" if value is None else format(value * times, form)


def _figures(
    name: str, figure: str, form: str, engines: Sequence[str] = tuple(ENGINES), *, ratio: bool = False
) -> list[Column]:
    """Returns the columns of a figure: of ours first, under its name, or of all engines; inductor's divided by ours."""
    heads = [name if engines[0] == OURS else f"{name}: {engines[0]}", *engines[1:]]
    found: list[Column] = [
        (head, lambda row, engine=engine: _number(row.figure(engine, figure), form))  # type: ignore[misc]
        for head, engine in zip(heads, engines)
    ]
    return [*found, *([("ratio", lambda row: _number(row.ratio(figure), ".2f"))] if ratio else [])]


def _left(row: Row) -> str:
    failed = [f"{engine} failed: {why}"[:90] for engine, of in row.engines.items() for why in of.why.values()]
    return "; ".join([*(left.removeprefix("aten.") for left in row.left), *failed, *row.notes]) or "-"


@dataclass(frozen=True)
class Table:
    """What is shown of rows: groups of columns, the last of which is text, and figures whose ratios sentences tell.

    A ratio is inductor's figure divided by ours.
    """

    groups: Sequence[Sequence[Column]]
    ratios: tuple[tuple[str, str], ...]

    def lines(self, rows: Sequence[Row]) -> list[list[str]]:
        """Returns the heads and the cells of rows, "-" where there is no figure; no groups of which no row has any."""
        every: list[list[list[str]]] = [
            [[head for head, _ in group], *([text(row) for _, text in group] for row in rows)] for group in self.groups
        ]
        kept = [g for g in every[:-1] if any(cell != "-" for cells in g[1:] for cell in cells)] + every[-1:]
        return [[cell for group in kept for cell in group[n]] for n in range(len(rows) + 1)]


_TIMES = (
    _figures("call us", "call_us", ".0f", ratio=True), _figures("replay us", "replay_us", ".0f", ratio=True),
)  # fmt: skip
_FIRST = (_figures("first s: cold", "cold_s", ".1f", _BOTH), _figures("warm", "warm_s", ".1f", _BOTH))
INFERENCE = Table(
    (
        [("model", lambda row: row.name)], *_TIMES, *_FIRST, _figures("error", "error", ".0e", (OURS,)),
        _figures("kernels", "kernels", ".0f", _BOTH), _figures("MB", "peak_mb", ".0f", _BOTH),
        [("left to torch", _left)],
    ),
    (("call_us", "by call"), ("replay_us", "by replay")),
)  # fmt: skip
TRAINING = Table(
    (
        [("step", lambda row: row.name)], *_TIMES, _figures("MB", "peak_mb", ".0f", ratio=True),
        _figures("pool MB", "pool_mb", ".0f", _BOTH), _figures("error", "error", ".0e"), *_FIRST,
        _figures("kernels", "kernels", ".0f", _BOTH),
        [("MFU", lambda row: _number(row.mfu(OURS), ".0%")),
         ("inductor", lambda row: _number(row.mfu("inductor"), ".0%"))],
        [("left to torch", _left)],
    ),
    (*INFERENCE.ratios, ("peak_mb", "by peak memory"), ("pool_mb", "by peak memory of torch's pool")),
)  # fmt: skip
DECODING = Table(
    (
        [("call", lambda row: row.name)],
        _figures("replay us", "replay_us", ".0f", _BOTH, ratio=True),
        _figures("call us", "call_us", ".0f", _BOTH, ratio=True),
        [("TB/s", lambda row: _number(row.read_rate(OURS), ".2f", 1e-6)),
         ("inductor", lambda row: _number(row.read_rate("inductor"), ".2f", 1e-6))],
        [("of memory's rate", lambda row: _number(row.share(OURS), ".0%")),
         ("inductor", lambda row: _number(row.share("inductor"), ".0%"))],
        [("MFU", lambda row: _number(row.mfu(OURS), ".0%")),
         ("inductor", lambda row: _number(row.mfu("inductor"), ".0%"))],
        _figures("first s", "cold_s", ".1f", _BOTH), _figures("error", "error", ".0e", _BOTH),
        _figures("kernels", "kernels", ".0f", (OURS,)), [("notes", _left)],
    ),
    (("replay_us", "by replay"), ("call_us", "by call")),
)  # fmt: skip


def sentences(rows: Sequence[Row], table: Table = INFERENCE) -> list[str]:
    """Returns sentences on the ratios to inductor of models, by dtype and mode, on each part, and on what failed."""
    models = [row for row in rows if row.model.partition(":")[0] in (TORCHVISION, TRANSFORMERS, LLAMA)]
    found = []
    for dtype, mode in dict.fromkeys((row.dtype, row.mode) for row in models):
        for figure, name in table.ratios:
            every = ((row.name, row.ratio(figure)) for row in models if (row.dtype, row.mode) == (dtype, mode))
            ratios = {name: ratio for name, ratio in every if ratio is not None}
            if ratios:
                worst = min(ratios, key=ratios.__getitem__)
                below = sum(r < 1 for r in ratios.values())
                found.append(
                    f"{f'{dtype} {mode}'.strip()} {name}: geometric mean {geometric_mean(ratios.values()):.2f} over "
                    f"{len(ratios)} models, {below} below 1, worst {ratios[worst]:.2f} ({worst})."
                )
    found += [said for row in rows if row not in models and (said := _part(row, table))]
    failed = [row.name for row in rows if row.figure(OURS, "why")]
    return [*found, *([f"fusegraph failed: {', '.join(failed)}."] if failed else [])]


def _part(row: Row, table: Table) -> str:
    """Returns a sentence on a part of a model; an empty one if there is nothing beside it."""
    told = [f"{ratio:.2f} {name}" for figure, name in table.ratios if (ratio := row.ratio(figure)) is not None]
    used = [f"{engine} {share:.0%}" for engine in _BOTH if (share := row.mfu(engine)) is not None]
    more = f"; MFU of {', '.join(used)}" if used else ""
    return f"{row.name}: {', '.join(told)}{more}." if told else ""


def text(rows: Sequence[Row], table: Table = INFERENCE) -> str:
    """Returns the table in columns, and the sentences."""
    return "\n".join([*columns(table.lines(rows), notes=True), *sentences(rows, table)])
