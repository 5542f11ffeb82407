"""Schedules of any kernel: which are worth trying, best guess first, and what is stored and shown of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from typing import Any

from codegen import arch as archs
from codegen.arch import Arch
from codegen.families import FORMS, family_of, form_of
from codegen.family import Schedule
from codegen.spec import KernelSpec

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
    return next(family_of(spec).schedules(spec, arch))


def schedules(spec: KernelSpec, arch: Arch = PORTABLE) -> tuple[Schedule, ...]:
    """The schedules worth trying for a kernel on an architecture, each once, `best_schedule` first."""
    return tuple(dict.fromkeys(family_of(spec).schedules(spec, arch)))


def declined(spec: KernelSpec, schedule: Schedule, arch: Arch = PORTABLE) -> dict[str, str]:
    """Why a kernel has none of the forms that are faster than that of its schedule, by their names."""
    taken = form_of(schedule).name
    return {form: reason for form, reason in family_of(spec).declined(spec, arch).items() if form != taken}


def schedule_data(schedule: Schedule) -> dict[str, Any]:
    """A schedule as plain data for JSON: ``type`` (the class's name without "Schedule", in lower case), its fields."""
    return {"type": _type(type(schedule)), **asdict(schedule)}


def schedule_from_data(data: Mapping[str, Any]) -> Schedule:
    """The schedule that `schedule_data` made data of.  Raises ValueError for other data."""
    name, given = data.get("type"), {key: value for key, value in data.items() if key != "type"}
    for cls in FORMS:
        if _type(cls) == name and set(given) == {f.name for f in fields(cls)}:
            made: Schedule = cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in given.items()})
            return made
    raise ValueError(f"{data!r} is no schedule")


def schedule_text(schedule: Schedule) -> str:
    """A schedule for a reader, with what is not as usual: ``"planes rows=4 cols=4 lanes=32 down=8 planes=1"``."""
    facts = {f.name: getattr(schedule, f.name) for f in fields(schedule) if f.name != "itype"}
    usual = {f.name: f.default for f in fields(schedule) if f.default is not MISSING}
    shown = (f"{name}={value}" for name, value in facts.items() if name not in usual or value != usual[name])
    return " ".join([_type(type(schedule)), *shown])


def _type(cls: type[Schedule]) -> str:
    return cls.__name__.removesuffix("Schedule").lower()
