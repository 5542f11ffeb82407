"""Reductions of whole tensors, each a member (`codegen.members`), or of their parts: a block reduces one part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

from codegen.declined import Declined
from codegen.family import Family, Form, Schedule
from codegen.iteration import Coordinates, restrided
from codegen.members import MOST_ELEMENTS, Membership
from codegen.pointwise.members import FORM
from codegen.rows.along import PASSES, AlongRenderer
from codegen.rows.schedule import RowsSchedule, power
from codegen.rows.space import normalize, widest
from codegen.rows.stages import Stages
from codegen.sizes import Size
from codegen.spec import KernelSource, MembersSpec, RowsSpec
from codegen.target import Target

#: The fewest and the most threads of a block, and what each of them reads of a part of mean size, in vectors.
LEAST_THREADS, MOST_THREADS, EACH = 32, 512, 4
#: The most elements of a tensor that a block looks at more than once.
MOST_AGAIN = 1 << 15
#: The parts of a tensor begin at multiples of so many elements: those of the longest vector.
STEP = 16


@dataclass(frozen=True)
class MemberRowsSchedule(Schedule):
    """vector: elements of one access; threads: those of a block, which reduce one part."""

    vector: int
    threads: int


def _parts(spec: MembersSpec) -> list[int]:
    """Returns how many parts each member has."""
    return [-(-n // chunk) for n, chunk in zip(spec.sizes, spec.chunks)]


def _one(spec: MembersSpec) -> RowsSpec:
    """Returns the program over rows as long as the longest part, or a little longer: all vectors divide them."""
    longest = max(map(min, spec.sizes, spec.chunks))
    return RowsSpec(spec.name, (max(_parts(spec)),), (-(-longest // STEP) * STEP,), spec.program)


def schedules(spec: MembersSpec, target: Target) -> Iterator[MemberRowsSchedule]:
    """Yields schedules worth trying, best guess first."""
    space = normalize(_one(spec))
    vector = widest(space, len(space.outer))
    parts = sum(_parts(spec))
    # Few blocks take as long as the longest part: all of it is read at once.
    vectors = space.length // vector if parts <= target.sms else sum(spec.sizes) // (parts * vector * EACH)
    threads = max(LEAST_THREADS, min(MOST_THREADS, power(vectors + 1) // 2))
    for more in (threads, 2 * threads, threads // 2):
        if LEAST_THREADS <= more <= MOST_THREADS:
            yield MemberRowsSchedule(vector, more)
    if vector > 1:
        yield MemberRowsSchedule(vector // 2, threads)


class LateStages(Stages):
    """The stages of a kernel whose last loop stores all elements: none is read again once it may be overwritten."""

    def stored(self, stage: int) -> list[int]:
        """Returns the stores of a stage that have a value for each element."""
        known = [super(LateStages, self).stored(at) for at in range(self.last + 1)]
        last = max(at for at in range(self.last + 1) if known[at] or self.reduced(at))
        return [n for stores in known for n in stores] if stage == last else []


class MemberRowsRenderer(AlongRenderer):
    """Writes the kernel of a spec.

    The vectors of a part are reduced first, then the elements behind the last whole one.
    """

    def __init__(self, spec: MembersSpec, schedule: MemberRowsSchedule) -> None:
        super().__init__(_one(spec), RowsSchedule("memory", schedule.vector, schedule.threads, 1, "uint32"))
        self.stages = LateStages(self.space)
        self.members = spec
        #: whether some part is no whole number of vectors
        self._rest = any(n % schedule.vector for n in spec.sizes)
        self._over = ("begin", "whole" if self._rest else "end")

    def _details(self) -> list[str]:
        sizes, threads = self.members.sizes, self.s.lanes
        return [f"{len(sizes)} members, {sum(sizes)} elements in {self._blocks()} parts; {threads} threads a part"]

    def _blocks(self) -> int:
        return self._member.blocks

    def _place(self) -> None:
        w, spec = self.w, self.members
        self._member = Membership(w, spec, self.pointers, _parts(spec), {"size": spec.sizes, "chunk": spec.chunks})
        w.line(f"const uint32 row = blockIdx.x - {self._member.begin}, lane = threadIdx.x;")
        w.line("const uint32 begin = row * chunk, end = min(begin + chunk, size);")
        if self._rest:
            w.line(f"const uint32 whole = end - end % {self.s.vector};")

    def _each(self, stage: int, parts: dict[int, str]) -> None:
        super()._each(stage, parts)
        if self._rest:
            vectors = self.s, self._over
            self.s, self._over = replace(self.s, vector=1), ("whole", "end")
            super()._each(stage, parts)
            self.s, self._over = vectors

    @contextmanager
    def _over_row(self, *, loading: bool = False) -> Iterator[None]:
        w, vector, lanes = self.w, self.s.vector, self.s.lanes
        begin, end = self._over
        many = f" * {vector}" if vector > 1 else ""
        if begin == "begin" and self.length // (lanes * vector) >= PASSES:
            w.line(f"#pragma unroll {PASSES}")
        with w.block(f"for (uint32 col = {begin} + lane{many}; col < {end}; col += {lanes * vector})"):
            self.cols = Coordinates(w, "col", self.space.row, "uint32", "col")
            yield


def render(spec: MembersSpec, schedule: MemberRowsSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return MemberRowsRenderer(spec, schedule).render()


def member(spec: RowsSpec) -> MembersSpec:
    """Returns a specification as that of one member.  Raises Declined for what such kernels cannot do."""
    if spec.walk is not None or spec.segments is not None or spec.program.tables or spec.program.indices:
        raise Declined(f"{spec.name} reduces columns or segments as well, or has tables or indices")
    if any(isinstance(n, Size) for n in (*spec.outer, *spec.row)):
        raise Declined(f"{spec.name} has sizes that vary")
    space = normalize(spec)
    parts, size = prod(space.outer), space.total
    chunk = size if spec.chunk is None else spec.chunk
    if len(space.row) > 1 or parts != -(-size // max(chunk, 1)) or not 0 < size <= MOST_ELEMENTS:
        raise Declined(f"{spec.name} reduces several rows, or one of {size} elements")
    if spec.chunk is not None and chunk % STEP:
        raise Declined(f"{spec.name} reduces parts of {chunk} elements")
    if size > MOST_AGAIN and Stages(space).loops > 1:
        raise Declined(f"{spec.name} looks at its elements more than once")
    program = space.program
    places = [(op.strides[0], op.strides[-1]) for op in program.operands]
    count = len(program.loads)
    if parts == 1:  # a result for each part lies at its number
        places[count:] = [(int(not along), along) for _, along in places[count:]]
    apart = any(begin or step not in (0, 1) for begin, step in places[:count])
    if apart or any(place not in ((1, 0), (0, 1)) for place in places[count:]):
        raise Declined(f"{spec.name} reads or writes elements that lie apart")
    if any(op.begin is not None for op in program.operands):
        raise Declined(f"{spec.name} reads at positions that are data")
    return MembersSpec(spec.name, (size,), restrided(program, places), (False,) * len(program.operands), (chunk,))


FAMILY = Family("members", MembersSpec, (FORM, Form("member rows", MemberRowsSchedule, schedules, render)))
