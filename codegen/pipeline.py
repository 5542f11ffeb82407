"""Pipelines of asynchronous kernels: rings of stages, barriers, and products of warpgroups.

A `Pipeline` is a ring of stages in shared memory that producers fill and consumers release, each with two mbarriers, as
CUTLASS has it.  Products of warpgroups are asynchronous too: they are committed in groups, which are awaited in order.
What a kernel does with both is written down in its `Trace`, and checked when it is complete (`codegen.trace`).
"""

from __future__ import annotations

from collections.abc import Sequence

from codegen.buffers import Buffer, guard
from codegen.kernel import Kernel
from codegen.naming import Scope

#: Threads of a warpgroup.
GROUP = 128


class _Barriers:
    """Barriers in shared memory under a name: what happens to them is written, and noted in the kernel's trace."""

    releases = 0

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
