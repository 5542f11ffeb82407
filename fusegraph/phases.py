"""Where the seconds of a compilation go: those of each phase, without those of phases within it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter


class Phases:
    """The seconds of phases, by name, in the order in which they first began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the seconds of a block; they do not count for the phase that it is within."""
        self._turn()
        self._open.append(name)
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        now = perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items() if seconds >= 0.005)


_CURRENT: ContextVar[Phases | None] = ContextVar("phases", default=None)


@contextmanager
def counted(phases: Phases) -> Iterator[None]:
    """Lets `phase` count for these while the block runs."""
    token = _CURRENT.set(phases)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> Phases:
    """Returns the phases that are being counted; new ones, which nobody asks for, if none are."""
    return _CURRENT.get() or Phases()


@contextmanager
def separately() -> Iterator[Phases]:
    """Counts in a block for new phases: they begin with what was counted so far, which is forgotten there."""
    outer, made = current(), Phases()
    outer._turn()
    made.seconds, outer.seconds = outer.seconds, dict.fromkeys(outer._open, 0.0)
    try:
        with counted(made):
            yield made
    finally:
        outer._since = perf_counter()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Counts the seconds of a block, or of a function that it decorates, as a phase of what is being compiled."""
    with current().phase(name):
        yield


@contextmanager
def without_collections() -> Iterator[None]:
    """Keeps the garbage collector from running: it would look at all that torch has loaded, again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
