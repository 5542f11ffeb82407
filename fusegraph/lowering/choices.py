"""Choices: what estimates decide, and what measurements may decide instead.

Whoever weighs alternatives by what they are estimated to take (a pass, a kernel family) records a `Choice`.  A plan has
all choices that were made for it; each can be settled in advance, by the options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from codegen.declined import Declined

#: What a choice is known by: what is chosen, and the name of the node that it is about.
Key: TypeAlias = tuple[str, str]

#: The alternatives of a rewrite that either is made or is not.
MADE, LEFT = "made", "left"


@dataclass(frozen=True)
class Settled:
    """What a measurement chose, and the microseconds of the alternatives: of all kernels in which plans differ."""

    taken: str
    us: Mapping[str, float] = field(default_factory=dict)


#: What measurements say of choices.
Settling: TypeAlias = Mapping[Key, Settled]


@dataclass(frozen=True)
class Choice:
    """Alternatives that were weighed.

    what       what is chosen, in the words of whoever does.
    node       the name of the node that it is about.
    cycles     what each alternative is estimated to take; None where there is no estimate.
    preferred  the alternative that estimates choose.
    taken      the one that the plan has.
    us         what was measured, in microseconds; nothing if estimates decided.
    alike      what choices of layers that are alike have in common, beside ``what`` and ``cycles``.
    """

    what: str
    node: str
    cycles: Mapping[str, float | None]
    preferred: str
    taken: str
    us: Mapping[str, float] = field(default_factory=dict)
    alike: str = ""

    @property
    def key(self) -> Key:
        return self.what, self.node

    @property
    def others(self) -> list[str]:
        """The alternatives that were not taken, the best by estimates first."""
        others = [name for name in self.cycles if name != self.taken]
        return sorted(others, key=lambda name: self.cycles[name] or 0.0)


class Outweighed(Declined):
    """A group that could be one kernel and should not be, by a choice."""

    def __init__(self, text: str, choice: Choice) -> None:
        super().__init__(text)
        self.choice = choice


def weigh(
    what: str, node: str, cycles: Mapping[str, float | None], preferred: str, settled: Settling, alike: str = ""
) -> Choice:
    """Returns a choice, taken as it is settled, else as estimates prefer."""
    found = settled.get((what, node))
    if found is None or found.taken not in cycles:
        return Choice(what, node, cycles, preferred, preferred, alike=alike)
    return Choice(what, node, cycles, preferred, found.taken, found.us, alike)


def whether(what: str, node: str, settled: Settling, alike: str = "") -> Choice:
    """Returns the choice of whether a rewrite is made of which nobody knows what it takes: it is, unless measured."""
    return weigh(what, node, {MADE: None, LEFT: None}, MADE, settled, alike)


def speculate(what: str, node: str, settled: Settling, choices: list[Choice], alike: str = "") -> None:
    """Adds to ``choices`` whether a rewrite is made.  Raises Outweighed if a measurement says that it is not."""
    choices.append(choice := whether(what, node, settled, alike))
    if choice.taken == LEFT:
        raise Outweighed("without it, it was measured to be faster", choice)


def unique(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Returns the last choice of each key."""
    return tuple({choice.key: choice for choice in choices}.values())
