"""Schedules: how a kernel of a family is tiled and mapped to threads, candidates best guess first.

A schedule is a frozen dataclass of numbers, flags and names.  It changes how fast a kernel is and in which order it
sums up, never what it computes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, TypeAlias, get_args

from codegen import arch as archs
from codegen import attention, contraction, pointwise, rows, scan, scatter, sort, winograd
from codegen.arch import Arch
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

#: The target of kernels that are to run everywhere, the CPU included: what every architecture since Ampere has.
PORTABLE = archs.arch("sm_80")


def target(name: str) -> Arch:
    """The architecture that schedules for ``sm_XX`` must respect; of one not listed, the closest that it contains.

    What is older than Ampere has none of the instructions that `Arch` lists.  Raises ValueError for other text.
    """
    if name in archs.KNOWN:
        return archs.KNOWN[name]
    found = re.fullmatch(r"sm_(\d{2,3})[af]?", name)
    number = int(found[1]) if found else 0
    if number < archs.OLDEST:
        raise ValueError(f"{name[:100]!r} is no architecture; one is 'sm_90a'")
    if number < 80:
        return replace(
            PORTABLE,
            name=name,
            major=number // 10,
            minor=number % 10,
            shared_bytes_per_block=64 * archs.KIB,
            shared_bytes_per_sm=64 * archs.KIB,
            max_threads_per_sm=1024,
            max_blocks_per_sm=16,
            has_cp_async=False,
        )
    try:
        return archs.from_compute_capability(number // 10, number % 10)
    except ValueError:
        raise ValueError(f"{name!r} is no architecture known here; known: {', '.join(archs.KNOWN)}") from None


def best_schedule(spec: KernelSpec, arch: Arch = PORTABLE) -> Schedule:
    """The schedule that the family's cost model thinks is the fastest on an architecture."""
    if isinstance(spec, PointwiseSpec):
        return pointwise.best_schedule(spec, arch)
    if isinstance(spec, PoolSpec):
        return next(pool_schedule.schedules(spec, arch))
    if isinstance(spec, RowsSpec):
        return next(rows.schedules(spec, arch))
    if isinstance(spec, ScanSpec):
        return next(scan.schedules(spec, arch))
    if isinstance(spec, SortSpec):
        return next(sort.schedules(spec, arch))
    if isinstance(spec, ScatterSpec):
        return next(scatter.schedules(spec, arch))
    if isinstance(spec, WindowSpec):
        return window_schedule.best_schedule(spec, arch)
    if isinstance(spec, WinogradSpec):
        return winograd.schedules(spec)[0]
    if isinstance(spec, AttentionSpec):
        return attention.schedules(spec, arch)[0]
    if isinstance(spec, AttentionBackwardSpec):
        return attention_backward.schedules(spec, arch)[0]
    return contraction.schedules(spec, arch)[0]


def schedules(spec: KernelSpec, arch: Arch = PORTABLE) -> tuple[Schedule, ...]:
    """The schedules worth trying for a kernel on an architecture, each once, `best_schedule` first."""
    if isinstance(spec, PointwiseSpec):
        return _unique(pointwise.schedules(spec, arch))
    if isinstance(spec, PoolSpec):
        return _unique(pool_schedule.schedules(spec, arch))
    if isinstance(spec, RowsSpec):
        return _unique(rows.schedules(spec, arch))
    if isinstance(spec, ScanSpec):
        return _unique(scan.schedules(spec, arch))
    if isinstance(spec, SortSpec):
        return _unique(sort.schedules(spec, arch))
    if isinstance(spec, ScatterSpec):
        return _unique(scatter.schedules(spec, arch))
    if isinstance(spec, WindowSpec):
        return _unique(window_schedule.schedules(spec, arch))
    if isinstance(spec, WinogradSpec):
        return winograd.schedules(spec)
    if isinstance(spec, AttentionSpec):
        return _unique(attention.schedules(spec, arch))
    if isinstance(spec, AttentionBackwardSpec):
        return _unique(attention_backward.schedules(spec, arch))
    return _unique(contraction.schedules(spec, arch))


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
