"""The pointwise family: a DAG of pointwise ops over one space, one element read and written once.

Every thread handles vectors of consecutive elements (16-byte accesses) and issues the loads of several of them before
the first is used.  The space is walked in the memory order of its operands, with neighbouring dimensions merged:
`pointwise.vectors` where one order suits them all, `pointwise.unaligned` where rows also begin anywhere, and
`pointwise.tiles` where some operands lie across the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from codegen.lasting import worth_lasting
from codegen.pointwise import schedule as pointwise_schedule
from codegen.pointwise import tiles as pointwise_tiles
from codegen.pointwise import tiles_unaligned as pointwise_tiles_unaligned
from codegen.pointwise import tiling as pointwise_tiling
from codegen.pointwise import unaligned as pointwise_unaligned
from codegen.pointwise import vectors as pointwise_vectors
from codegen.pointwise.schedule import PointwiseSchedule
from codegen.pointwise.tiling import TilesSchedule
from codegen.spec import KernelSource, PointwiseSpec
from codegen.target import PORTABLE, Target

__all__ = ["PointwiseSchedule", "TilesSchedule", "best_schedule", "render", "schedules"]


def best_schedule(spec: PointwiseSpec, target: Target = PORTABLE) -> PointwiseSchedule | TilesSchedule:
    """The schedule used when nothing was tuned."""
    return pointwise_tiling.best_tiles(spec, target) or next(_lasting(spec, target))


def schedules(spec: PointwiseSpec, target: Target = PORTABLE) -> Iterator[PointwiseSchedule | TilesSchedule]:
    """Schedules worth trying, best guess first."""
    tiles = list(pointwise_tiling.tiles(spec, target))
    yield from tiles or _lasting(spec, target)


def _lasting(spec: PointwiseSpec, target: Target) -> Iterator[PointwiseSchedule]:
    """Schedules without tiles, of kernels whose streams are evicted last where that is worth it."""
    worth = worth_lasting(spec.program, spec.shape, target)
    for schedule in _vectors(spec, target):
        yield replace(schedule, lasting=worth and schedule.form != "unaligned")


def _vectors(spec: PointwiseSpec, target: Target) -> Iterator[PointwiseSchedule]:
    """Schedules without tiles, best guess first."""
    every = pointwise_schedule.schedules(spec, target)
    unaligned = pointwise_unaligned.unaligned_schedules(spec, target)
    first = pointwise_schedule.best_schedule(spec, target)
    # Shifting words takes arithmetic, which costs less than reading one or two bytes at a time.
    if pointwise_schedule.narrow(spec, first, 4):
        yield from unaligned
        yield from every
    else:
        yield from every
        if pointwise_schedule.narrow(spec, first, 16):
            yield from unaligned


def render(spec: PointwiseSpec, schedule: PointwiseSchedule | TilesSchedule | None = None) -> KernelSource:
    """The kernel of a spec as CUDA C."""
    chosen = schedule or best_schedule(spec)
    if isinstance(chosen, TilesSchedule):
        if chosen.unaligned:
            return pointwise_tiles_unaligned.render(spec, chosen)
        return pointwise_tiles.render(spec, chosen)
    if chosen.form == "unaligned":
        return pointwise_unaligned.render(spec, chosen)
    return pointwise_vectors.render(spec, chosen)
