"""Pipelines of asynchronous kernels, and what is checked of them before a kernel is printed.

A `Pipeline` is a ring of stages in shared memory that producers fill and consumers release, each with two mbarriers, as
CUTLASS has it.  Products of warpgroups are asynchronous too: they are committed in groups, which are awaited in order.
What a kernel does with both is written down in its `Trace`.  A mistake in it would be a hang or a wrong result on the
device; here it is a `PipelineError` when the kernel is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from codegen.buffers import Buffer

if TYPE_CHECKING:
    from codegen.kernel import Kernel


class PipelineError(AssertionError):
    """A kernel's barriers, copies or products do not fit together: a mistake of who wrote its form."""


@dataclass(frozen=True)
class Event:
    """Something that a role does: ``what`` it is, with which pipeline or result, at which stage, and how much of it."""

    role: str
    what: str
    name: str = ""
    stage: str = ""
    count: int = 0
    reads: tuple[tuple[str, str], ...] = ()


@dataclass
class Trace:
    """What the roles of a kernel do, in the order in which it is written."""

    events: list[Event] = field(default_factory=list)
    pipelines: dict[str, Pipeline | Signals] = field(default_factory=dict)
    role: str = ""

    def add(
        self, what: str, name: str = "", stage: str = "", count: int = 0, reads: Iterable[tuple[str, str]] = ()
    ) -> None:
        self.events.append(Event(self.role, what, name, stage, count, tuple(reads)))

    def of(self, name: str, *what: str) -> list[Event]:
        """Returns what of some kinds happens to a pipeline."""
        return [e for e in self.events if e.name == name and e.what in what]

    def check(self) -> None:
        """Raises PipelineError if something is awaited that nobody issues, or read before it is there; if a stage is
        never released, or while products still read it; if arrivals are not as many as a barrier expects, or bytes not
        those that are copied.
        """
        for pipeline in self.pipelines.values():
            self._check_fills(pipeline)
            if isinstance(pipeline, Pipeline):
                self._check_releases(pipeline)
        for role in dict.fromkeys(e.role for e in self.events):
            _Products([e for e in self.events if e.role == role]).check()

    def _check_fills(self, pipeline: Pipeline | Signals) -> None:
        name = pipeline.name
        if self.of(name, "wait") and not self.of(name, "arrive", "expect"):
            raise PipelineError(f"{pipeline} is waited for, and nothing fills it")
        fills: list[list[Event]] = [[]] if isinstance(pipeline, Signals) else []
        for event in self.of(name, "acquire", "expect", "copy", "arrive"):
            if event.what == "acquire":
                fills.append([])
            elif not fills:
                raise PipelineError(f"a stage of {pipeline} is filled before it is acquired")
            else:
                fills[-1].append(event)
        for fill in fills:
            arrivals = sum(e.count if e.what == "arrive" else 1 for e in fill if e.what != "copy")
            if arrivals != pipeline.fills:
                raise PipelineError(f"{arrivals} arrivals fill a stage of {pipeline}, which expects {pipeline.fills}")
            expected, copied = (sum(e.count for e in fill if e.what == what) for what in ("expect", "copy"))
            if expected != copied:
                raise PipelineError(f"{expected} bytes of a stage of {pipeline} are expected, and {copied} copied")

    def _check_releases(self, pipeline: Pipeline) -> None:
        name = pipeline.name
        for release in self.of(name, "release"):
            if release.count != pipeline.releases:
                raise PipelineError(
                    f"{release.count} arrivals release a stage of {pipeline}, which expects {pipeline.releases}"
                )
        for role in dict.fromkeys(e.role for e in self.of(name, "wait")):
            done = [e.what for e in self.of(name, "wait", "release") if e.role == role]
            if done[-1] != "release":
                raise PipelineError(f"the {role} waits for a stage of {pipeline} and does not release it")
        if self.of(name, "release") and not self.of(name, "acquire"):
            raise PipelineError(f"stages of {pipeline} are released, and nobody waits for that")


class _Products:
    """The groups of asynchronous products that a role has committed, and not yet awaited."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self._pending: list[Event] = []

    def check(self) -> None:
        self._run(0, len(self._events))

    def _run(self, begin: int, end: int) -> None:
        """Follows some events; the body of a loop twice, for what one pass leaves to the next."""
        at = begin
        while at < end:
            event = self._events[at]
            if event.what == "loop":
                stop = self._end(at)
                self._run(at + 1, stop)
                self._run(at + 1, stop)
                at = stop
            else:
                self._step(event)
            at += 1

    def _end(self, begin: int) -> int:
        depth = 0
        for at in range(begin, len(self._events)):
            depth += {"loop": 1, "end": -1}.get(self._events[at].what, 0)
            if not depth:
                return at
        raise PipelineError("a loop is not closed")

    def _step(self, event: Event) -> None:
        if event.what == "commit":
            self._pending.append(event)
        elif event.what == "await":
            del self._pending[: max(0, len(self._pending) - event.count)]
        elif event.what == "rename":
            renamed = [(n, event.stage if s == event.name else s) for e in self._pending for n, s in e.reads]
            every = iter(renamed)
            self._pending = [
                Event(e.role, e.what, e.name, e.stage, e.count, tuple(next(every) for _ in e.reads))
                for e in self._pending
            ]
        elif event.what == "read" and any(e.name == event.name for e in self._pending):
            raise PipelineError(f"the {event.role} reads {event.name!r}, which products are still added to")
        elif event.what == "release":
            for e in self._pending:
                if (event.name, event.stage) in e.reads:
                    raise PipelineError(
                        f"the {event.role} releases {event.stage!r} of {event.name!r}, which {e.name!r} still needs"
                    )


class Signals:
    """Barriers without stages to release: who arrives knows by itself that nobody waits for the phase before.

    k         the kernel.
    name      of the barriers in shared memory.
    count     how many there are.
    fills     arrivals that complete a phase, beside the bytes that are expected.
    """

    def __init__(self, k: Kernel, name: str, count: int, *, fills: int = 1) -> None:
        self._k, self.name, self.count, self.fills = k, name, count, fills
        k.trace.pipelines[name] = self

    def __repr__(self) -> str:
        return f"the barriers {self.name!r}"

    def init(self) -> None:
        """Writes the initialisation of all."""
        self._k.line(f"for (int i = 0; i < {self.count}; ++i) barrier_init(shared.{self.name}[i], {self.fills});")

    def at(self, index: str) -> str:
        """Returns one of the barriers."""
        return f"shared.{self.name}[{index}]"

    def expect(self, count: int, index: str) -> None:
        """Writes that so many bytes will be copied; this arrives, too."""
        self._k.trace.add("expect", self.name, index, count)
        self._k.line(f"barrier_expect({self.at(index)}, {count});")

    def copied(self, count: int, index: str) -> None:
        """Notes that so many bytes are copied by what is written next to it."""
        self._k.trace.add("copy", self.name, index, count)

    def arrive(self, index: str, *, condition: str, note: str = "") -> None:
        """Writes the arrival of the thread for which the condition holds."""
        self._k.trace.add("arrive", self.name, index, 1)
        self._k.line(f"if ({condition}) barrier_arrive({self.at(index)});{f'  // {note}' if note else ''}")

    def wait(self, index: str, parity: str) -> None:
        """Writes what waits until the phase of a parity is complete."""
        self._k.trace.add("wait", self.name, index)
        self._k.line(f"barrier_wait({self.at(index)}, {parity});")


def ring_barriers(name: str, stages: int) -> tuple[Buffer, Buffer]:
    """Returns the barriers of a pipeline as they lie in shared memory: of full stages, and of empty ones."""
    full, empty = (Buffer(f"{name}_{what}" if name else what, "Barrier", (), stages) for what in ("full", "empty"))
    return full, empty


class Pipeline:
    """A ring of stages with mbarriers: a stage is full once all fill it, and empty once all have released it.

    k         the kernel.
    name      the prefix of its barriers, ``NAME_full`` and ``NAME_empty``; without one they are ``full`` and ``empty``.
    stages    how many there are.
    fills     arrivals that complete a fill, beside the bytes that are expected.
    releases  arrivals that complete a release.
    """

    def __init__(self, k: Kernel, name: str, stages: int, *, fills: int = 1, releases: int = 1) -> None:
        self._k, self.name, self.stages, self.fills, self.releases = k, name, stages, fills, releases
        k.trace.pipelines[name] = self

    def __repr__(self) -> str:
        return f"pipeline {self.name!r}" if self.name else "the pipeline"

    def _barrier(self, what: str) -> str:
        return f"{self.name}_{what}" if self.name else what

    @property
    def barriers(self) -> tuple[Buffer, Buffer]:
        """The barriers, as they lie in shared memory."""
        return ring_barriers(self.name, self.stages)

    def init(self) -> None:
        """Writes the initialisation of the barriers of stage ``i``."""
        self._k.line(f"barrier_init(shared.{self._barrier('full')}[i], {self.fills});")
        self._k.line(f"barrier_init(shared.{self._barrier('empty')}[i], {self.releases});")

    def full(self, stage: str = "stage") -> str:
        """Returns the barrier that copies to a stage arrive at."""
        return f"shared.{self._barrier('full')}[{stage}.index]"

    # ---- producers

    def acquire(self, stage: str = "stage") -> None:
        """Writes what waits until a stage is empty."""
        self._k.trace.add("acquire", self.name, stage)
        self._k.line(f"barrier_wait(shared.{self._barrier('empty')}[{stage}.index], {stage}.parity ^ 1);")

    def expect(self, count: int, stage: str = "stage", barrier: str = "") -> None:
        """Writes that so many bytes will be copied to a stage; this arrives, too."""
        self._k.trace.add("expect", self.name, stage, count)
        self._k.line(f"barrier_expect({barrier or self.full(stage)}, {count});")

    def copied(self, count: int, stage: str = "stage") -> None:
        """Notes that so many bytes are copied to a stage by what is written next to it."""
        self._k.trace.add("copy", self.name, stage, count)

    def arrive(
        self,
        stage: str = "stage",
        *,
        count: int = 1,
        condition: str = "",
        barrier: str = "",
        call: str = "barrier_arrive",
    ) -> None:
        """Writes that a stage is filled, by so many threads: those for which the condition holds.

        call  the function of the device library by which they arrive.
        """
        self._k.trace.add("arrive", self.name, stage, count)
        self._k.line(f"{f'if ({condition}) ' if condition else ''}{call}({barrier or self.full(stage)});")

    # ---- consumers

    def wait(self, stage: str = "stage", note: str = "") -> None:
        """Writes what waits until a stage is full."""
        self._k.trace.add("wait", self.name, stage)
        comment = f"  // {note}" if note else ""
        self._k.line(f"barrier_wait({self.full(stage)}, {stage}.parity);{comment}")

    def release(
        self, stage: str = "stage", *, condition: str = "t == 0", count: int | None = None, at: str = ""
    ) -> None:
        """Writes that a stage may be filled again.

        condition  of the threads that arrive; ``count`` are those of all consumers, if not those that are expected.
        at         the stage's number, if it is not ``stage``'s.
        """
        self._k.trace.add("release", self.name, stage, self.releases if count is None else count)
        index = at or f"{stage}.index"
        when = f"if ({condition}) " if condition else ""
        self._k.line(f"{when}barrier_arrive(shared.{self._barrier('empty')}[{index}]);")


@contextmanager
def products(k: Kernel, sums: str, *reads: tuple[Pipeline, str]) -> Iterator[None]:
    """Writes a group of asynchronous products around what is written inside: they are added to ``sums``, of stages of
    pipelines.
    """
    k.line("wgmma_fence();")
    yield
    k.line("wgmma_commit();")
    k.trace.add("commit", sums, reads=((pipeline.name, stage) for pipeline, stage in reads))


def await_products(k: Kernel, groups: int = 0, note: str = "") -> None:
    """Writes what waits until at most so many groups of products, the last ones, are not done."""
    k.trace.add("await", count=groups)
    k.line(f"wgmma_wait<{groups}>();{f'  // {note}' if note else ''}")
