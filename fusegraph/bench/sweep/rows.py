"""A row of a sweep: what was measured of a case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Below this share of the fastest peer's speed a row has its kernels and the best of the autotuner.
SLOW = 0.9
#: A time of less than this share of another's is faster.
FASTER = 0.95


@dataclass
class Row:
    """A case that was measured.

    us       microseconds of each engine that ran, cold L2, medians; why tells of those that did not.
    floor_us of a device copy of as many bytes, or the operations at the rate of a large product, if longer.
    error    the largest difference to eager torch, relative to the largest result.
    kernels  of a slow row: (name, microseconds) of ours and of the fastest peer's kernels, and ``tuned_us``.
    left     operators that were left to torch.
    predicted_us  what the cost models say of the chosen schedules.
    choices  of a slow row: both sides of each, estimated and measured (`fusegraph.report.explain.describe_choice`).
    """

    number: int
    name: str
    kind: str = ""
    dtype: str = ""
    us: dict[str, float] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    floor_us: float = 0.0
    error: float | None = None
    kernels: dict[str, list[tuple[str, float]]] = field(default_factory=dict)
    tuned_us: float | None = None
    left: list[str] = field(default_factory=list)
    predicted_us: float | None = None
    choices: list[dict[str, Any]] = field(default_factory=list)

    @property
    def peer(self) -> str | None:
        """The fastest engine that is not ours."""
        others = [e for e in self.us if e != "fusegraph"]
        return min(others, key=self.us.__getitem__, default=None)

    @property
    def ratio(self) -> float | None:
        """The fastest peer's time divided by ours."""
        return self.us[self.peer] / self.us["fusegraph"] if self.peer and "fusegraph" in self.us else None

    @property
    def cause(self) -> str | None:
        """Why a row is slow: "choice" (a timed schedule is faster), "partition" (more kernels than the peer's), or
        "form" (none of our kernels is fast enough); None for others.
        """
        if self.ratio is None or self.ratio >= SLOW:
            return None
        if self.tuned_us is not None and self.tuned_us < FASTER * self.us["fusegraph"]:
            return "choice"
        counts = [len(self.kernels.get(engine or "", [])) for engine in ("fusegraph", self.peer)]
        return "partition" if counts[0] > counts[1] > 0 else "form"


def row_from_data(data: Mapping[str, Any]) -> Row:
    """Returns the row of which `dataclasses.asdict` made this data."""
    kernels = {engine: [(name, us) for name, us in every] for engine, every in data["kernels"].items()}
    return Row(**{**data, "kernels": kernels})
