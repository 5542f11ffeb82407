"""KernelSpec in, CUDA C out.  Knows nothing of graphs, files, devices or compilers."""

from __future__ import annotations

from codegen.families import family_of, form_of
from codegen.family import Schedule
from codegen.schedule import (
    best_schedule,
    declined,
    distance,
    estimated,
    schedule_data,
    schedule_from_data,
    schedule_text,
    schedules,
)
from codegen.spec import KernelSource, KernelSpec
from codegen.target import PORTABLE, Target, target

__all__ = [
    "PORTABLE",
    "KernelSpec",
    "Schedule",
    "Target",
    "best_schedule",
    "coarse_products",
    "declined",
    "distance",
    "estimated",
    "render",
    "schedule_data",
    "schedule_from_data",
    "schedule_text",
    "schedules",
    "target",
]


def render(spec: KernelSpec, schedule: Schedule | None = None, target: Target = PORTABLE) -> KernelSource:
    """Returns the CUDA C of a kernel specification; without a schedule, with the `best_schedule` for the target.

    Raises TypeError for a schedule of another kernel family.
    """
    chosen = schedule or best_schedule(spec, target)
    form = form_of(chosen)
    if form not in family_of(spec).forms:
        raise TypeError(f"{chosen} is no schedule of a {type(spec).__name__}")
    return form.render(spec, chosen)


def coarse_products(spec: KernelSpec, schedule: Schedule) -> int | None:
    """Returns the ``coarse_products`` of a schedule's form (`codegen.family.Form`): fp8 products added up in fewer bits
    than float32, or None.
    """
    return form_of(schedule).coarse_products(spec, schedule)
