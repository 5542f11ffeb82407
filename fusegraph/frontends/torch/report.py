"""Reports what the backend has compiled: kernels, fused and declined pairs, what was left to torch, seconds."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from weakref import ref

from fusegraph.errors import FileError, listed
from fusegraph.frontends.torch.cut import Analysis, Piece
from fusegraph.passes.partition import Decision
from fusegraph.phases import Phases
from fusegraph.plan import Plan
from fusegraph.report.drawing import table
from fusegraph.report.explain import count_text, size_text, traffic


@dataclass(frozen=True)
class PieceReport:
    """One piece.

    operators      how many ATen operators it has, without views.
    kernels        how many kernels they became.
    bytes_unfused  device-memory traffic of one kernel per operator; bytes_moved: that of the kernels.
    packed         bytes of what is computed of parameters once, not in every call.
    fused          how many pairs of nodes were fused.
    declined       the pairs that were not, with reasons.
    planned        the plan, as long as what was compiled of it exists.
    """

    name: str
    device: str
    operators: int
    kernels: int
    bytes_unfused: int
    bytes_moved: int
    packed: int
    fused: int
    declined: tuple[Decision, ...]
    planned: Callable[[], Plan | None] = field(default=lambda: None, repr=False, compare=False)

    @property
    def bytes_saved(self) -> int:
        return self.bytes_unfused - self.bytes_moved


@dataclass(frozen=True)
class FunctionReport:
    """One function that torch had compiled.

    name     its phase (inference, forward or backward), or the module's name from `explain`.
    left     the nodes that torch computes: (name, operator, reason).
    seconds  the time spent in fusegraph before it returned.
    phases   the seconds of each phase: of AOTAutograd, and of fusegraph, the wait in the first call included.
    by_size  why sizes that vary are compiled when they come; empty if none are.
    """

    name: str
    pieces: tuple[PieceReport, ...]
    left: tuple[tuple[str, str, str], ...]
    seconds: float
    phases: Phases = field(default_factory=Phases, compare=False)
    by_size: str = ""

    @property
    def operators(self) -> int:
        return sum(p.operators for p in self.pieces)

    @property
    def kernels(self) -> int:
        return sum(p.kernels for p in self.pieces)

    @property
    def fused(self) -> int:
        return sum(p.fused for p in self.pieces)

    @property
    def packed(self) -> int:
        return sum(p.packed for p in self.pieces)

    @property
    def declined(self) -> tuple[Decision, ...]:
        return tuple(d for p in self.pieces for d in p.declined)

    @property
    def bytes_unfused(self) -> int:
        return sum(p.bytes_unfused for p in self.pieces)

    @property
    def bytes_moved(self) -> int:
        return sum(p.bytes_moved for p in self.pieces)

    @property
    def bytes_saved(self) -> int:
        return self.bytes_unfused - self.bytes_moved

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {count_text(self.operators, 'operator')} in {count_text(self.kernels, 'kernel')} of "
            f"{count_text(len(self.pieces), 'piece')}, {size_text(self.bytes_saved)} of traffic saved, "
            + (f"{size_text(self.packed)} of packed parameters, " if self.packed else "")
            + f"{self.seconds:.2f} s"
        ]
        lines += [f"  seconds: {self.phases}"] if str(self.phases) else []
        lines += [
            f"  left to torch: {listed(name for name, op, why in self.left if (op, why) == key)} = {key[0]}: {key[1]}"
            for key in dict.fromkeys((op, why) for _, op, why in self.left)
        ]
        lines += [f"  compiled by size: {self.by_size}"] if self.by_size else []
        lines.append(f"  fused: {count_text(self.fused, 'pair')}; declined: {len(self.declined) or 'none'}")
        reasons = Counter(d.reason for d in self.declined)
        for reason, count in reasons.most_common():
            pairs = (f"{d.producer} -> {d.consumer}" for d in self.declined if d.reason == reason)
            lines.append(f"    {count} x {reason}: {listed(pairs)}")
        return "\n".join(lines)

    def save(self, path: str | Path, *, profile: str | Path | None = None, compiled: bool = True) -> Path:
        """Writes a page of it, as `Report.save`."""
        return Report((self,)).save(path, profile=profile, compiled=compiled)


class Report(tuple[FunctionReport, ...]):
    """The reports of several functions; its text is that of all of them."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing compiled yet"

    def save(self, path: str | Path, *, profile: str | Path | None = None, compiled: bool = True) -> Path:
        """Writes a page that shows the graphs and kernels of all pieces that still exist; returns its absolute path.

        A file ``*.json`` is the data alone.  ``profile`` is a file with measured times of kernels.  Registers are those
        of the kernels as NVRTC compiles them, which takes a while if no GPU has run them; ``compiled=False`` leaves
        them out.  Raises FileError if a file cannot be read or written, or if nothing that was compiled exists any
        more; ToolchainError where a package that pages need is missing.
        """
        from fusegraph.report.page.file import write

        plans = [plan for function in self for piece in function.pieces if (plan := piece.planned()) is not None]
        if not plans:
            raise FileError(f"{path}: there is nothing to show: what was compiled has been freed, or nothing was")
        left = [entry for function in self for entry in function.left]
        title = " and ".join(dict.fromkeys(function.name for function in self))
        return write(
            plans, plans[0].steps.options.target, path, title=title, left=left, profile=profile, compiled=compiled
        )

    def _repr_html_(self) -> str:
        headings = ("function", "operators", "kernels", "pieces", "traffic saved", "left to torch", "seconds")
        rows = []
        for f in self:
            left = listed(f"{name}: {why}" for name, _, why in f.left) or "nothing"
            counts = (str(f.operators), str(f.kernels), str(len(f.pieces)))
            rows.append((f.name, *counts, size_text(f.bytes_saved), left, f"{f.seconds:.2f}"))
        return f"{table(headings, rows)}<details><summary>all of it</summary><pre>{escape(str(self))}</pre></details>"


_logger = logging.getLogger(__name__)
_COMPILED: list[FunctionReport] = []


def report(*, clear: bool = False) -> Report:
    """Reports what ``torch.compile(..., backend="fusegraph")`` has compiled in this process, in order.

    ``clear`` forgets it afterwards.
    """
    result = Report(_COMPILED)
    if clear:
        _COMPILED.clear()
    return result


def add(function: FunctionReport) -> None:
    """Remembers a function that was compiled, and logs its report."""
    _logger.info("%s", function)
    _COMPILED.append(function)


def piece_report(plan: Plan, piece: Piece, analysis: Analysis, *, keep: bool = False) -> PieceReport:
    """Makes the report of a piece with this plan, which it keeps alive if it is to ``keep`` it."""
    decisions = plan.partition.decisions
    return PieceReport(
        plan.graph.name,
        piece.device,
        len(piece.nodes),
        len(plan.kernels),
        analysis.traffic(piece),
        traffic(plan),
        plan.packed_bytes,
        sum(d.fused for d in decisions),
        tuple(d for d in decisions if not d.fused),
        (lambda: plan) if keep else ref(plan),
    )
