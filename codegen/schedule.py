"""Schedules: how a kernel of a family is tiled and mapped to threads, candidates best guess first.

A schedule is a frozen dataclass of numbers, flags and names.  It changes how fast a kernel is and in which order it
sums up, never what it computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeAlias, get_args

from codegen import attention, contraction, pointwise, rows, scan, scatter, sort, winograd
from codegen.attention import backward as attention_backward
from codegen.attention.backward_joined import AttentionBackwardJoinedSchedule
from codegen.attention.backward_mma import AttentionBackwardMmaSchedule
from codegen.attention.backward_simt import AttentionBackwardSimtSchedule
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.backward_wgmma_schedule import AttentionBackwardWgmmaSchedule
from codegen.attention.mma import AttentionMmaSchedule
from codegen.attention.simt import AttentionSimtSchedule
from codegen.attention.wgmma_schedule import AttentionWgmmaSchedule
from codegen.contraction.mma_schedule import MmaSchedule
from codegen.contraction.simt_schedule import SimtSchedule
from codegen.contraction.wgmma_layout import WgmmaSchedule
from codegen.pointwise import PointwiseSchedule, TilesSchedule
from codegen.pool import schedule as pool_schedule
from codegen.pool.schedule import PoolSchedule
from codegen.rows.schedule import RowsSchedule
from codegen.scan import ScanSchedule
from codegen.scatter import ScatterSchedule, ScatterSpec
from codegen.sort import SortSchedule
from codegen.spec import AttentionSpec, ContractionSpec, PointwiseSpec, PoolSpec, RowsSpec, ScanSpec, SortSpec
from codegen.target import PORTABLE, Target
from codegen.window import schedule as window_schedule
from codegen.window.schedule import WindowSchedule
from codegen.window.spec import WindowSpec, WinogradSpec
from codegen.winograd import WinogradSchedule

KernelSpec: TypeAlias = (
    PointwiseSpec
    | PoolSpec
    | RowsSpec
    | ScanSpec
    | SortSpec
    | ScatterSpec
    | WindowSpec
    | ContractionSpec
    | WinogradSpec
    | AttentionSpec
    | AttentionBackwardSpec
)
Schedule: TypeAlias = (
    PointwiseSchedule
    | TilesSchedule
    | PoolSchedule
    | RowsSchedule
    | ScanSchedule
    | SortSchedule
    | ScatterSchedule
    | WindowSchedule
    | WgmmaSchedule
    | MmaSchedule
    | SimtSchedule
    | WinogradSchedule
    | AttentionWgmmaSchedule
    | AttentionMmaSchedule
    | AttentionSimtSchedule
    | AttentionBackwardJoinedSchedule
    | AttentionBackwardWgmmaSchedule
    | AttentionBackwardMmaSchedule
    | AttentionBackwardSimtSchedule
)


def best_schedule(spec: KernelSpec, target: Target = PORTABLE) -> Schedule:
    """The schedule that the family's cost model thinks is the fastest on a target."""
    if isinstance(spec, PointwiseSpec):
        return pointwise.best_schedule(spec, target)
    if isinstance(spec, PoolSpec):
        return next(pool_schedule.schedules(spec, target))
    if isinstance(spec, RowsSpec):
        return next(rows.schedules(spec, target))
    if isinstance(spec, ScanSpec):
        return next(scan.schedules(spec, target))
    if isinstance(spec, SortSpec):
        return next(sort.schedules(spec, target))
    if isinstance(spec, ScatterSpec):
        return next(scatter.schedules(spec, target))
    if isinstance(spec, WindowSpec):
        return window_schedule.best_schedule(spec, target)
    if isinstance(spec, WinogradSpec):
        return winograd.schedules(spec)[0]
    if isinstance(spec, AttentionSpec):
        return attention.schedules(spec, target)[0]
    if isinstance(spec, AttentionBackwardSpec):
        return attention_backward.schedules(spec, target)[0]
    return contraction.schedules(spec, target)[0]


def schedules(spec: KernelSpec, target: Target = PORTABLE) -> tuple[Schedule, ...]:
    """The schedules worth trying for a kernel on a target, each once, `best_schedule` first."""
    if isinstance(spec, PointwiseSpec):
        return _unique(pointwise.schedules(spec, target))
    if isinstance(spec, PoolSpec):
        return _unique(pool_schedule.schedules(spec, target))
    if isinstance(spec, RowsSpec):
        return _unique(rows.schedules(spec, target))
    if isinstance(spec, ScanSpec):
        return _unique(scan.schedules(spec, target))
    if isinstance(spec, SortSpec):
        return _unique(sort.schedules(spec, target))
    if isinstance(spec, ScatterSpec):
        return _unique(scatter.schedules(spec, target))
    if isinstance(spec, WindowSpec):
        return _unique(window_schedule.schedules(spec, target))
    if isinstance(spec, WinogradSpec):
        return winograd.schedules(spec)
    if isinstance(spec, AttentionSpec):
        return _unique(attention.schedules(spec, target))
    if isinstance(spec, AttentionBackwardSpec):
        return _unique(attention_backward.schedules(spec, target))
    return _unique(contraction.schedules(spec, target))


def _unique(candidates: Iterable[Schedule]) -> tuple[Schedule, ...]:
    return tuple(dict.fromkeys(candidates))


def schedule_data(schedule: Schedule) -> dict[str, Any]:
    """A schedule as plain data for JSON: ``type`` (the class's name without "Schedule", in lower case), its fields."""
    return {"type": _type(type(schedule)), **asdict(schedule)}


def schedule_from_data(data: Mapping[str, Any]) -> Schedule:
    """The schedule that `schedule_data` made data of.  Raises ValueError for other data."""
    name, given = data.get("type"), {key: value for key, value in data.items() if key != "type"}
    for cls in get_args(Schedule):
        if _type(cls) == name and set(given) == {f.name for f in fields(cls)}:
            return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in given.items()})  # type: ignore[no-any-return]
    raise ValueError(f"{data!r} is no schedule")


def schedule_text(schedule: Schedule) -> str:
    """A schedule for a reader: ``"planes rows=4 cols=4 lanes=32 down=8 planes=1"``."""
    facts = asdict(schedule)
    facts.pop("itype", None)
    return " ".join([_type(type(schedule)), *(f"{key}={value}" for key, value in facts.items())])


def _type(cls: type) -> str:
    return cls.__name__.removesuffix("Schedule").lower()
