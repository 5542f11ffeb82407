"""Reports what the backend has compiled: kernels, fused and declined pairs, what was left to torch, seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import ref

from fusegraph.errors import listed
from fusegraph.frontends.torch.cut import Analysis, Piece
from fusegraph.passes.partition import Decision
from fusegraph.phases import Phases
from fusegraph.plan import Plan
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
    """

    name: str
    pieces: tuple[PieceReport, ...]
    left: tuple[tuple[str, str, str], ...]
    seconds: float
    phases: Phases = field(default_factory=Phases, compare=False)

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
        lines.append(f"  fused: {count_text(self.fused, 'pair')}; declined: {len(self.declined) or 'none'}")
        reasons = Counter(d.reason for d in self.declined)
        for reason, count in reasons.most_common():
            pairs = (f"{d.producer} -> {d.consumer}" for d in self.declined if d.reason == reason)
            lines.append(f"    {count} x {reason}: {listed(pairs)}")
        return "\n".join(lines)


class Report(tuple[FunctionReport, ...]):
    """The reports of several functions; its text is that of all of them."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing compiled yet"


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
    """Remembers a function that was compiled."""
    _COMPILED.append(function)


def piece_report(plan: Plan, piece: Piece, analysis: Analysis) -> PieceReport:
    """Makes the report of a piece with this plan."""
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
        ref(plan),
    )
