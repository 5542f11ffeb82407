"""What the roles of a kernel do with barriers, copies and asynchronous products, and what is checked of that.

A mistake in it would be a hang or a wrong result on the device; here it is a `PipelineError` when the kernel is
written.  `codegen.pipeline` writes what is traced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class PipelineError(AssertionError):
    """A kernel's barriers, copies or products do not fit together: a mistake of who wrote its form."""


@dataclass(slots=True)
class Event:
    """Something that a role does: ``what`` it is, with which pipeline or result, at which stage, and how much of it."""

    role: str
    what: str
    name: str = ""
    stage: str = ""
    count: int = 0
    reads: tuple[tuple[str, str], ...] = ()


class Barriers(Protocol):
    """Barriers whose use is traced: arrivals that complete a fill and a release; 0 releases: there are no stages."""

    name: str
    fills: int
    releases: int


class Met(Protocol):
    """A barrier to which all threads of some roles come: how many of each."""

    name: str
    threads: dict[str, int]


@dataclass
class Trace:
    """What the roles of a kernel do, in the order in which it is written."""

    events: list[Event] = field(default_factory=list)
    pipelines: dict[str, Barriers] = field(default_factory=dict)
    meetings: dict[str, Met] = field(default_factory=dict)
    role: str = ""
    groups: int = 0
    inside: list[str] = field(default_factory=list)  # loops and branches around what is written next

    def add(
        self, what: str, name: str = "", stage: str = "", count: int = 0, reads: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.events.append(Event(self.role, what, name, stage, count, reads))

    def begin(self, what: str) -> None:
        self.add(what)
        self.inside.append(what)

    def end(self) -> None:
        self.add("end")
        self.inside.pop()

    def behind(self, sums: str) -> int:
        """Returns how many groups of products the role has committed behind the last one that adds to ``sums``."""
        groups = [e.name for e in self.events if e.role == self.role and e.what == "commit"]
        if sums not in groups:
            raise PipelineError(f"the {self.role} waits for {sums!r}, to which no products are added")
        return groups[::-1].index(sums)

    def check(self) -> None:
        """Raises PipelineError if something is awaited that nobody issues, or read before it is there; if a stage is
        never released, or while products still read it; if arrivals are not as many as a barrier expects, or bytes not
        those that are copied; if operands are overwritten that products still read; or if roles do not meet equally
        often.
        """
        named: defaultdict[str, list[Event]] = defaultdict(list)
        roles: defaultdict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            named[event.name].append(event)
            roles[event.role].append(event)
        for pipeline in self.pipelines.values():
            _check_fills(pipeline, named[pipeline.name])
            if pipeline.releases:
                _check_releases(pipeline, named[pipeline.name])
        for meeting in self.meetings.values():
            _check_meeting(meeting, named[meeting.name])
        acquired = {e.name for e in self.events if e.what == "acquire"}
        for role, events in roles.items():
            passes = _passes(events)
            self._check_waits(role, passes, acquired)
            _check_products(role, passes)

    def _check_waits(self, role: str, passes: Sequence[Event], acquired: Container[str]) -> None:
        """Raises PipelineError unless a role releases each stage that it waits for, other than in branches; it may keep
        the last one, which is not filled again.

        A stage of another name than any has, such as that of the tile before, is the one held longest.
        """
        events = [e for e in passes if e.what in _WAITING]
        named = {e.stage for e in events if e.what in ("wait", "rename")}
        awaited, released = ({e.name for e in events if e.what == what} for what in ("wait", "release"))
        for name in released - awaited:
            raise PipelineError(f"the {role} releases stages of {self.pipelines[name]} without waiting for one")
        held: list[tuple[str, str]] = []
        branches = 0
        for event in events:
            name, stage = event.name, event.stage
            if event.what == "wait":
                if not branches and name in acquired:
                    held.append((name, stage))
            elif event.what == "release":
                fits = (h for h in held if h[0] == name and (h[1] == stage or stage not in named))
                if (first := next(fits, None)) is not None:
                    held.remove(first)
            elif event.what == "rename":
                held = [(n, stage if s == name else s) for n, s in held]
            else:
                branches += 1 if event.what == "branch" else -1
        for name, _ in held:
            if name not in released or sum(name == other for other, _ in held) > 1:
                raise PipelineError(f"the {role} waits for a stage of {self.pipelines[name]} and does not release it")


#: What concerns the stages that a role holds.
_WAITING = frozenset(("wait", "release", "rename", "branch", "end"))


def _check_fills(pipeline: Barriers, events: Sequence[Event]) -> None:
    kinds = {e.what for e in events}
    if "wait" in kinds and kinds.isdisjoint(("arrive", "expect")):
        raise PipelineError(f"{pipeline} is waited for, and nothing fills it")
    fills: list[list[int]] = [[0, 0, 0]] if not pipeline.releases else []  # arrivals, bytes expected and copied
    for event in events:
        if event.what == "acquire":
            fills.append([0, 0, 0])
        elif event.what in ("expect", "copy", "arrive"):
            if not fills:
                raise PipelineError(f"a stage of {pipeline} is filled before it is acquired")
            if event.what != "copy":
                fills[-1][0] += event.count if event.what == "arrive" else 1
            if event.what != "arrive":
                fills[-1][1 if event.what == "expect" else 2] += event.count
    for arrivals, expected, copied in fills:
        if arrivals != pipeline.fills:
            raise PipelineError(f"{arrivals} arrivals fill a stage of {pipeline}, which expects {pipeline.fills}")
        if expected != copied:
            raise PipelineError(f"{expected} bytes of a stage of {pipeline} are expected, and {copied} copied")


def _check_releases(pipeline: Barriers, events: Sequence[Event]) -> None:
    parts = {(e.role, e.count) for e in events if e.what == "release"}  # several roles may release a stage together
    count = sum(count for _, count in parts)
    if parts and (count != pipeline.releases or len(parts) > len({role for role, _ in parts})):
        raise PipelineError(f"{count} arrivals release a stage of {pipeline}, which expects {pipeline.releases}")
    if parts and "acquire" not in [e.what for e in events]:
        raise PipelineError(f"stages of {pipeline} are released, and nobody waits for that")


def _check_meeting(meeting: Met, events: Sequence[Event]) -> None:
    """Raises PipelineError unless all its roles come there in the same loops and under the same conditions."""
    met: dict[str, list[tuple[int, str]]] = {role: [] for role in meeting.threads}
    for event in events:
        if event.what == "meet":
            if event.role not in met:
                raise PipelineError(f"the {event.role} is not expected at {meeting.name!r}")
            met[event.role].append((event.count, event.stage))
    if len({tuple(sorted(each)) for each in met.values()}) > 1:
        raise PipelineError(f"the {' and the '.join(met)} do not meet equally often at {meeting.name!r}")


def _passes(events: Iterable[Event]) -> list[Event]:
    """Returns events as they happen: those of a loop twice, for what one pass leaves to the next."""
    found: list[Event] = []
    begins: list[int | None] = []  # of loops; None for branches
    for event in events:
        if event.what == "loop":
            begins.append(len(found))
        elif event.what == "end" and (begin := begins.pop()) is not None:
            found += found[begin:]
        else:
            found.append(event)
            if event.what == "branch":
                begins.append(None)
    return found


#: What concerns the groups of asynchronous products that a role has committed, and not yet awaited.
_MULTIPLYING = _WAITING | {"otherwise", "commit", "await", "read", "write"}


def _check_products(role: str, passes: Iterable[Event]) -> None:
    """Raises PipelineError if products read stages that their role does not hold, or use what changes meanwhile."""
    pending: list[tuple[str, list[tuple[str, str]]]] = []  # what is added to, and what is read
    held: set[tuple[str, str]] = set()  # stages of pipelines that the role has waited for
    beside: list[
        list[tuple[str, list[tuple[str, str]]]]
    ] = []  # what is pending where the other branches of conditions are taken
    for event in passes:
        what, place = event.what, (event.name, event.stage)
        if what not in _MULTIPLYING:
            continue
        if what == "wait":
            held.add(place)
        elif what == "release":
            held.discard(place)
            for sums, reads in pending:
                if place in reads:
                    name, stage = event.name, event.stage
                    raise PipelineError(f"the {role} releases {stage!r} of {name!r}, which {sums!r} still needs")
        elif what == "commit":
            for name, stage in event.reads:
                if stage and (name, stage) not in held:
                    raise PipelineError(f"the {role} multiplies {stage!r} of {name!r} before it waits for it")
            pending.append((event.name, list(event.reads)))
        elif what == "await":
            del pending[: max(0, len(pending) - event.count)]
        elif what == "read":
            if event.name in [sums for sums, _ in pending]:
                raise PipelineError(f"the {role} reads {event.name!r}, which products are still added to")
        elif what == "write":
            if any(place in reads for _, reads in pending):  # registers have no stages
                raise PipelineError(f"the {role} overwrites {event.name!r}, which products still read")
        elif what == "rename":
            for name, stage in held:
                if stage == event.stage:
                    raise PipelineError(f"the {role} loses {stage!r} of {name!r} and has not released it")
            old, new = place
            held = {(n, new if s == old else s) for n, s in held}
            pending = [(sums, [(n, new if s == old else s) for n, s in reads]) for sums, reads in pending]
        elif what == "branch":
            beside.append(list(pending))
        elif what == "otherwise":
            pending, beside[-1] = beside[-1], pending
        else:
            pending += [group for group in beside.pop() if group not in pending]
