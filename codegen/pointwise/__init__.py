"""The pointwise family: a DAG of pointwise ops over one space, one element read and written once.

Every thread handles vectors of consecutive elements (16-byte accesses) and issues the loads of several of them before
the first is used.  The space is walked in the memory order of its operands, with neighbouring dimensions merged:
`pointwise.vectors` where one order suits them all, `pointwise.unaligned` where rows also begin anywhere, and
`pointwise.tiles` where some operands lie across the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from codegen.family import Family, Form
from codegen.l2_policy import worth_evict_last
from codegen.pointwise import schedule as pointwise_schedule
from codegen.pointwise import tiling as pointwise_tiling
from codegen.pointwise.schedule import PointwiseSchedule
from codegen.pointwise.tiles import TilesRenderer
from codegen.pointwise.tiles_unaligned import UnalignedTilesRenderer
from codegen.pointwise.tiling import TilesSchedule
from codegen.pointwise.unaligned import UnalignedRenderer, unaligned_schedules
from codegen.pointwise.vectors import VectorsRenderer
from codegen.spec import KernelSource, PointwiseSpec
from codegen.target import Target


def schedules(spec: PointwiseSpec, target: Target) -> Iterator[PointwiseSchedule]:
    """Yields schedules without tiles, best first; where it is worth it, the L2 cache evicts last what they stream."""
    worth = worth_evict_last(spec.program, spec.shape, target)
    first = pointwise_schedule.best_schedule(spec, target)
    found = [pointwise_schedule.schedules(spec, target)]
    if pointwise_schedule.narrow(spec, first, 16):
        # Shifting words takes arithmetic, which costs less than reading one or two bytes at a time.
        place = 0 if pointwise_schedule.narrow(spec, first, 4) else 1
        found.insert(place, unaligned_schedules(spec, target))
    for schedule in chain(*found):
        yield replace(schedule, evict_last=worth and schedule.form != "unaligned")


def render(spec: PointwiseSpec, schedule: PointwiseSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return (UnalignedRenderer if schedule.form == "unaligned" else VectorsRenderer)(spec, schedule).render()


def render_tiles(spec: PointwiseSpec, schedule: TilesSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return (UnalignedTilesRenderer if schedule.unaligned else TilesRenderer)(spec, schedule).render()


FAMILY = Family(
    "pointwise",
    PointwiseSpec,
    (
        Form("tiles", TilesSchedule, pointwise_tiling.tiles, render_tiles),
        Form("vectors", PointwiseSchedule, schedules, render),
    ),
)
