"""Schedules of any kernel: which are worth trying, best guess first, and how they are stored and shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from math import log2
from typing import Any

from codegen.declined import Declined
from codegen.families import FORMS, family_of, form_of
from codegen.family import Schedule
from codegen.spec import KernelSpec
from codegen.target import PORTABLE, Target


def best_schedule(spec: KernelSpec, target: Target = PORTABLE) -> Schedule:
    """Returns the schedule that the family's cost model estimates to be the fastest on a target."""
    return next(family_of(spec).schedules(spec, target))


def schedules(spec: KernelSpec, target: Target = PORTABLE) -> tuple[Schedule, ...]:
    """Returns the schedules worth trying for a kernel on a target, each once, `best_schedule` first."""
    return tuple(dict.fromkeys(family_of(spec).schedules(spec, target)))


#: What is said of schedules that take no time, at sizes of 0: estimates are divided by each other.
_NO_TIME = 1e-9


def estimated(spec: KernelSpec, schedule: Schedule, target: Target = PORTABLE) -> float | None:
    """Returns how long a schedule is estimated to take, in units in which those of its form can be compared.

    None without a cost model, and for schedules that are none of the kernel's; never 0.
    """
    form = form_of(schedule)
    cost = form.cost or form.compare
    try:
        return max(cost(spec, schedule, target), _NO_TIME) if cost is not None else None
    except (Declined, ValueError, ArithmeticError, LookupError, AssertionError):
        return None


def distance(a: Schedule, b: Schedule) -> float:
    """Returns how far apart two schedules are: the doublings between their numbers, 8 for what is another word or form.

    So those of forms without a cost model can be compared with the best one.
    """
    if type(a) is not type(b):
        return 8.0
    found = 0.0
    for f in fields(a):
        one, other = getattr(a, f.name), getattr(b, f.name)
        numbers = all(type(x) is int and x > 0 for x in (one, other))
        found += abs(log2(one / other)) if numbers else 8.0 * (one != other)
    return found


def declined(spec: KernelSpec, schedule: Schedule, target: Target = PORTABLE) -> dict[str, str]:
    """Returns by name why a kernel has none of the forms preferred to that of its schedule."""
    taken = form_of(schedule).name
    return {form: reason for form, reason in family_of(spec).declined(spec, target).items() if form != taken}


def schedule_data(schedule: Schedule) -> dict[str, Any]:
    """Returns a schedule as data for JSON: its fields, and ``type``, the class without "Schedule" in lower case."""
    return {"type": _type(type(schedule)), **asdict(schedule)}


def schedule_from_data(data: Mapping[str, Any]) -> Schedule:
    """Returns the schedule of which `schedule_data` made this data.  Raises ValueError for other data."""
    name, given = data.get("type"), {key: value for key, value in data.items() if key != "type"}
    for cls in FORMS:
        if _type(cls) == name and set(given) == {f.name for f in fields(cls)}:
            made: Schedule = cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in given.items()})
            return made
    raise ValueError(f"{data!r} is no schedule")


def schedule_text(schedule: Schedule) -> str:
    """Returns a schedule as text without defaults, such as ``planes rows=4 cols=4 lanes=32 down=8 planes=1``."""
    facts = {f.name: getattr(schedule, f.name) for f in fields(schedule) if f.name != "itype"}
    usual = {f.name: f.default for f in fields(schedule) if f.default is not MISSING}
    shown = (f"{name}={value}" for name, value in facts.items() if name not in usual or value != usual[name])
    return " ".join([_type(type(schedule)), *shown])


def _type(cls: type[Schedule]) -> str:
    return cls.__name__.removesuffix("Schedule").lower()
