"""Pointwise programs over several members (`codegen.members`): a thread has one vector of one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from codegen.buffers import Edge
from codegen.declined import Declined
from codegen.family import Form, Schedule
from codegen.kernel import block_number
from codegen.members import MOST_ELEMENTS, Membership
from codegen.pointwise.schedule import THREADS, PointwiseSchedule, best_schedule, normalize
from codegen.pointwise.vectors import VectorsRenderer
from codegen.sizes import Size
from codegen.spec import KernelSource, MembersSpec, PointwiseSpec
from codegen.target import Target


@dataclass(frozen=True)
class MembersSchedule(Schedule):
    """vector: elements of one access; a thread has one vector."""

    vector: int


def _one(spec: MembersSpec, elements: int) -> PointwiseSpec:
    """Returns the program over so many elements, or one more: no vector divides them."""
    return PointwiseSpec(spec.name, (max(elements, 3) | 1,), spec.program)


def schedules(spec: MembersSpec, target: Target) -> Iterator[MembersSchedule]:
    """Yields schedules worth trying, best guess first; none for reductions."""
    vector = best_schedule(_one(spec, sum(spec.sizes)), target).vector if not spec.chunks else 0
    while vector:
        yield MembersSchedule(vector)
        vector //= 2


class MembersRenderer(VectorsRenderer):
    """Writes the kernel of a spec."""

    def __init__(self, spec: MembersSpec, schedule: MembersSchedule) -> None:
        flat = PointwiseSchedule(schedule.vector, 1, "flat", "uint32")
        super().__init__(_one(spec, max(spec.sizes)), flat)
        self.members = spec

    def render(self) -> KernelSource:
        """Returns the kernel."""
        spec, vector, w = self.members, self.schedule.vector, self.w
        blocks = [Edge(n, THREADS * vector).tiles for n in spec.sizes]
        own = Membership(w, spec, self.body.pointers, blocks, {"size": spec.sizes})
        thread = f"({block_number('uint32')} - {own.begin}) * {THREADS} + threadIdx.x"
        self._apart(f"({thread}) * {vector}", Edge(self.total, THREADS * vector))
        details = [f"{len(spec.sizes)} members, {sum(spec.sizes)} elements, {vector} a vector"]
        return w.source(self.program, details, blocks=own.blocks, threads=THREADS)


def render(spec: MembersSpec, schedule: MembersSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return MembersRenderer(spec, schedule).render()


def member(spec: PointwiseSpec) -> MembersSpec:
    """Returns a specification as that of one member.  Raises Declined for what such kernels cannot do."""
    if spec.program.tables or spec.program.indices or any(isinstance(n, Size) for n in spec.shape):
        raise Declined(f"{spec.name} has tables, indices or sizes that vary")
    shape, program = normalize(spec)
    if len(shape) > 1 or not 0 < shape[0] <= MOST_ELEMENTS:
        raise Declined(f"{spec.name} has {' x '.join(map(str, shape))} elements")
    if any(op.strides not in ((0,), (1,)) or op.begin is not None for op in program.operands):
        raise Declined(f"{spec.name} reads or writes elements that lie apart")
    return MembersSpec(spec.name, shape, program, (False,) * len(program.operands))


FORM = Form("members", MembersSchedule, schedules, render)
