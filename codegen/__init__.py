"""KernelSpec in, CUDA C out.  Knows nothing of graphs, files, devices or compilers."""

from __future__ import annotations

from codegen import attention, contraction, pointwise, pool, rows, scan, scatter, sort, window, winograd
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
from codegen.pool.schedule import PoolSchedule
from codegen.rows.schedule import RowsSchedule
from codegen.scan import ScanSchedule
from codegen.scatter import ScatterSchedule, ScatterSpec
from codegen.schedule import (
    KernelSpec,
    Schedule,
    best_schedule,
    schedule_data,
    schedule_from_data,
    schedule_text,
    schedules,
)
from codegen.sort import SortSchedule
from codegen.spec import (
    AttentionSpec,
    ContractionSpec,
    KernelSource,
    PointwiseSpec,
    PoolSpec,
    RowsSpec,
    ScanSpec,
    SortSpec,
)
from codegen.target import PORTABLE, Target, target
from codegen.window.schedule import WindowSchedule
from codegen.window.spec import WindowSpec, WinogradSpec
from codegen.winograd import WinogradSchedule

__all__ = [
    "PORTABLE",
    "KernelSpec",
    "Schedule",
    "Target",
    "best_schedule",
    "render",
    "schedule_data",
    "schedule_from_data",
    "schedule_text",
    "schedules",
    "target",
]


def render(spec: KernelSpec, schedule: Schedule | None = None, target: Target = PORTABLE) -> KernelSource:
    """The CUDA C of a kernel specification; without a schedule, with the `best_schedule` for the target.

    Raises TypeError for a schedule of another kernel family.
    """
    s = schedule or best_schedule(spec, target)
    if isinstance(spec, PointwiseSpec) and isinstance(s, PointwiseSchedule | TilesSchedule):
        return pointwise.render(spec, s)
    if isinstance(spec, PoolSpec) and isinstance(s, PoolSchedule):
        return pool.render(spec, s)
    if isinstance(spec, RowsSpec) and isinstance(s, RowsSchedule):
        return rows.render(spec, s)
    if isinstance(spec, ScanSpec) and isinstance(s, ScanSchedule):
        return scan.render(spec, s)
    if isinstance(spec, SortSpec) and isinstance(s, SortSchedule):
        return sort.render(spec, s)
    if isinstance(spec, ScatterSpec) and isinstance(s, ScatterSchedule):
        return scatter.render(spec, s)
    if isinstance(spec, WindowSpec) and isinstance(s, WindowSchedule):
        return window.render(spec, s)
    if isinstance(spec, WinogradSpec) and isinstance(s, WinogradSchedule):
        return winograd.render(spec, s)
    if isinstance(spec, ContractionSpec) and isinstance(s, WgmmaSchedule | MmaSchedule | SimtSchedule):
        return contraction.render(spec, s)
    if isinstance(spec, AttentionSpec) and isinstance(
        s, AttentionWgmmaSchedule | AttentionMmaSchedule | AttentionSimtSchedule
    ):
        return attention.render(spec, s)
    if isinstance(spec, AttentionBackwardSpec) and isinstance(
        s,
        AttentionBackwardJoinedSchedule
        | AttentionBackwardWgmmaSchedule
        | AttentionBackwardMmaSchedule
        | AttentionBackwardSimtSchedule,
    ):
        return attention_backward.render(spec, s)
    raise TypeError(f"{s} is no schedule of a {type(spec).__name__}")
