"""Pipelines of asynchronous kernels, and what is checked of them before a kernel is printed.

A `Pipeline` is a ring of stages in shared memory that producers fill and consumers release, each with two mbarriers, as
CUTLASS has it.  Products of warpgroups are asynchronous too: they are committed in groups, which are awaited in order.
What a kernel does with both is written down in its `Trace`.  A mistake in it would be a hang or a wrong result on the
device; here it is a `PipelineError` when the kernel is written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from codegen.buffers import Buffer, guard
from codegen.naming import Scope

if TYPE_CHECKING:
    from codegen.kernel import Kernel

#: Threads of a warpgroup.
GROUP = 128


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


@dataclass
class Trace:
    """What the roles of a kernel do, in the order in which it is written."""

    events: list[Event] = field(default_factory=list)
    pipelines: dict[str, _Barriers] = field(default_factory=dict)
    meetings: dict[str, Meeting] = field(default_factory=dict)
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
            if isinstance(pipeline, Pipeline):
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


def _check_fills(pipeline: _Barriers, events: Sequence[Event]) -> None:
    kinds = {e.what for e in events}
    if "wait" in kinds and kinds.isdisjoint(("arrive", "expect")):
        raise PipelineError(f"{pipeline} is waited for, and nothing fills it")
    fills: list[list[int]] = [[0, 0, 0]] if isinstance(pipeline, Signals) else []  # arrivals, bytes expected and copied
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


def _check_releases(pipeline: Pipeline, events: Sequence[Event]) -> None:
    parts = {(e.role, e.count) for e in events if e.what == "release"}  # several roles may release a stage together
    count = sum(count for _, count in parts)
    if parts and (count != pipeline.releases or len(parts) > len({role for role, _ in parts})):
        raise PipelineError(f"{count} arrivals release a stage of {pipeline}, which expects {pipeline.releases}")
    if parts and "acquire" not in [e.what for e in events]:
        raise PipelineError(f"stages of {pipeline} are released, and nobody waits for that")


def _check_meeting(meeting: Meeting, events: Sequence[Event]) -> None:
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


class _Barriers:
    """Barriers in shared memory under a name: what happens to them is written, and noted in the kernel's trace."""

    def __init__(self, k: Kernel, name: str, count: int, *, fills: int = 1) -> None:
        self._k, self.name, self._count, self.fills = k, name, count, fills
        k.trace.pipelines[name] = self

    def _write(self, what: str, stage: str, text: str, count: int = 0, condition: str = "", note: str = "") -> None:
        self._k.trace.add(what, self.name, stage, count)
        self._k.line(f"{guard(condition)}{text};{f'  // {note}' if note else ''}")

    def copied(self, count: int, stage: str = "stage") -> None:
        """Notes that so many bytes are copied to a stage by what is written next to it."""
        self._k.trace.add("copy", self.name, stage, count)


class Signals(_Barriers):
    """Barriers without stages to release: who arrives knows by itself that nobody waits for the phase before.

    k         the kernel.
    name      of the barriers in shared memory.
    count     how many there are.
    fills     arrivals that complete a phase, beside the bytes that are expected.
    """

    def __repr__(self) -> str:
        return f"the barriers {self.name!r}"

    def init(self) -> None:
        """Writes the initialisation of all."""
        self._k.line(f"for (int i = 0; i < {self._count}; ++i) barrier_init({self.at('i')}, {self.fills});")

    def at(self, index: str) -> str:
        """Returns one of the barriers."""
        return f"shared.{self.name}[{index}]"

    def expect(self, count: int, index: str) -> None:
        """Writes that so many bytes will be copied; this arrives, too."""
        self._write("expect", index, f"barrier_expect({self.at(index)}, {count})", count)

    def arrive(self, index: str, *, condition: str, note: str = "") -> None:
        """Writes the arrival of the thread for which the condition holds."""
        self._write("arrive", index, f"barrier_arrive({self.at(index)})", 1, condition, note)

    def wait(self, index: str, parity: str) -> None:
        """Writes what waits until the phase of a parity is complete."""
        self._write("wait", index, f"barrier_wait({self.at(index)}, {parity})")


def barriers(name: str, stages: int) -> tuple[Buffer, Buffer]:
    """Returns the barriers of a pipeline of this name, as they lie in shared memory."""
    full, empty = (Buffer(f"{name}_{what}" if name else what, "Barrier", (), stages) for what in ("full", "empty"))
    return full, empty


class Pipeline(_Barriers):
    """A ring of stages with mbarriers: a stage is full once all fill it, and empty once all have released it.

    k         the kernel.
    name      the prefix of its barriers, ``NAME_full`` and ``NAME_empty``; without one they are ``full`` and ``empty``.
    stages    how many there are.
    fills     arrivals that complete a fill, beside the bytes that are expected.
    releases  arrivals that complete a release.
    """

    def __init__(self, k: Kernel, name: str, stages: int, *, fills: int = 1, releases: int = 1) -> None:
        super().__init__(k, name, stages, fills=fills)
        self.stages, self.releases = stages, releases
        self._full, self._empty = (f"shared.{barrier.name}" for barrier in barriers(name, stages))

    def __repr__(self) -> str:
        return f"pipeline {self.name!r}" if self.name else "the pipeline"

    def init(self) -> None:
        """Writes the initialisation of the barriers of stage ``i``."""
        self._k.line(f"barrier_init({self._full}[i], {self.fills});")
        self._k.line(f"barrier_init({self._empty}[i], {self.releases});")

    def full(self, stage: str = "stage") -> str:
        """Returns the barrier that copies to a stage arrive at."""
        return f"{self._full}[{stage}.index]"

    # ---- producers

    def acquire(self, stage: str = "stage") -> None:
        """Writes what waits until a stage is empty, to fill it."""
        self._k.trace.add("acquire", self.name, stage)
        self.await_empty(stage)

    def await_empty(self, stage: str = "stage", *, condition: str = "") -> None:
        """Writes what waits until a stage is empty, where this is not to fill it."""
        self._k.line(f"{guard(condition)}barrier_wait({self._empty}[{stage}.index], {stage}.parity ^ 1);")

    def expect(self, count: int, stage: str = "stage", barrier: str = "", *, condition: str = "") -> None:
        """Writes that a thread, that for which the condition holds, expects so many bytes in a stage, and arrives."""
        self._write("expect", stage, f"barrier_expect({barrier or self.full(stage)}, {count})", count, condition)

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
        self._write("arrive", stage, f"{call}({barrier or self.full(stage)})", count, condition)

    # ---- consumers

    def wait(self, stage: str = "stage", note: str = "") -> None:
        """Writes what waits until a stage is full."""
        self._write("wait", stage, f"barrier_wait({self.full(stage)}, {stage}.parity)", note=note)

    def release(
        self, stage: str = "stage", *, condition: str = "t == 0", count: int | None = None, at: str = ""
    ) -> None:
        """Writes that a stage may be filled again.

        condition  of the threads that arrive; ``count`` are those of all consumers, if they are not one of each of the
                   role's groups (`Kernel.role`).
        at         the stage's number, if it is not ``stage``'s.
        """
        arrivals = (self._k.trace.groups or self.releases) if count is None else count
        text = f"barrier_arrive({self._empty}[{at or f'{stage}.index'}])"
        self._write("release", stage, text, arrivals, condition)


class Relay(Pipeline):
    """A pipeline whose stages threads fill: one is full once all who fill it and who wait for it have come to a named
    barrier of its own.  Only the barriers ``NAME_empty`` lie in shared memory.

    first    the number of the first stage's named barrier.
    waiting  how many threads wait for a stage.
    """

    def __init__(self, k: Kernel, name: str, stages: int, *, first: int, fills: int, waiting: int) -> None:
        super().__init__(k, name, stages, fills=fills)
        self._first, self._threads = first, fills + waiting

    def init(self) -> None:
        """Writes the initialisation of all barriers."""
        self._k.line(f"for (int i = 0; i < {self.stages}; ++i) barrier_init({self._empty}[i], {self.releases});")

    def fill(self, stage: str = "stage") -> None:
        """Writes that a stage is filled, by all threads that fill it."""
        text = f"named_barrier_arrive({self._first} + {stage}.index, {self._threads})"
        self._write("arrive", stage, text, GROUP * self._k.trace.groups)

    def wait(self, stage: str = "stage", note: str = "", *, at: str = "") -> None:
        """Writes what waits until a stage is full; ``at`` is its number, if that is not ``stage``'s."""
        text = f"named_barrier_sync({self._first} + {at or f'{stage}.index'}, {self._threads})"
        self._write("wait", stage, text, note=note)


class Meeting:
    """A named barrier, or several from a number on, to which all threads of some roles come.

    number   of the first.
    threads  how many of each role come to one.
    """

    def __init__(self, k: Kernel, name: str, number: int, **threads: int) -> None:
        self._k, self.name, self._number, self.threads = k, name, number, threads
        k.trace.meetings[name] = self

    def sync(self, at: str = "", *, condition: str = "", note: str = "") -> None:
        """Writes what waits until all have come; ``at`` counts from the first barrier, if there are several."""
        self._k.trace.add("meet", self.name, condition, self._k.trace.inside.count("loop"))
        barrier, comment = f"{self._number} + {at}" if at else self._number, f"  // {note}" if note else ""
        self._k.line(f"{guard(condition)}named_barrier_sync({barrier}, {sum(self.threads.values())});{comment}")


def initialize(k: Kernel, *rings: Sequence[Pipeline]) -> None:
    """Writes the initialisation of pipelines, by one thread; those of a ring have equally many stages."""
    with k.block("if (threadIdx.x == 0)"):
        for ring in filter(None, rings):
            with k.block(f"for (int i = 0; i < {ring[0].stages}; ++i)"):
                for pipeline in ring:
                    pipeline.init()
        k.line("barrier_fence_init();")
    k.line("__syncthreads();")
    k.line()


def products(k: Kernel, sums: str, *reads: tuple[Pipeline, str], registers: str = "") -> Scope:
    """Writes a group of asynchronous products around what is written inside: they are added to ``sums``, of stages of
    pipelines and of operands in ``registers``.
    """
    stages = [(pipeline.name, stage) for pipeline, stage in reads]

    def commit() -> None:
        k.line("wgmma_commit();")
        k.trace.add("commit", sums, reads=(*stages, (registers, "")) if registers else tuple(stages))

    k.line("wgmma_fence();")
    return k.scope(commit)


def await_products(k: Kernel, groups: int = 0, note: str = "") -> None:
    """Writes what waits until at most so many groups of products, the last ones, are not done."""
    k.trace.add("await", count=groups)
    k.line(f"wgmma_wait<{groups}>();{f'  // {note}' if note else ''}")


def use(k: Kernel, *sums: str) -> None:
    """Writes that the results of awaited products are read from here on, and not before."""
    k.reads(*sums)
    for name in sums:
        k.line(f"wgmma_hold({name});")


def results(k: Kernel, sums: str, note: str = "") -> None:
    """Writes what waits until the products in ``sums`` are done, and no later ones, and that they are read then."""
    await_products(k, k.trace.behind(sums), note)
    use(k, sums)
