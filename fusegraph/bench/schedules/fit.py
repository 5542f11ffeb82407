"""Fits the constants of cost models to measured schedules, to their times or to which of a kernel's is the fastest.

`fitted` takes the least squares of the logarithms of estimated to measured. `chosen` takes the least regret: an
estimate that is far off does no harm as long as the fastest schedule has the least one.
A constant is a figure of a `codegen.target.Target`, or a number of the module in which a form's cost model is.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import exp, fsum, log, sqrt
from operator import itemgetter
from typing import Any

from codegen import KernelSpec, Schedule, schedule_from_data
from codegen.canonical import canonical
from codegen.families import family_of, form_of
from codegen.target import Target
from fusegraph.bench.schedules.kernels import Kernel
from fusegraph.report.estimates import predicted_us

#: The figures of a target that only measurements tell.
FIGURES = ("memory_share", "l2_rate", "sm_rate")
#: What all forms of direct convolution share.
_DIRECT = {
    "codegen.direct_convolution.cost": (
        "MEMORY_SHARE", "CACHE_RATE", "WRITTEN", "READ", "FETCHED", "START", "RESULT", "OPERATION",
    ),
}  # fmt: skip
_DIRECT_SCHEDULE = "codegen.direct_convolution.schedule"
#: "family form" -> the modules of its cost model, and the constants in them that are fits.
CONSTANTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "contraction wgmma": {
        "codegen.contraction.wgmma_schedule": (
            "SHARE", "LATENCY", "MEMORY_SHARE", "ROUND_TRIP", "OVERLAP", "EPILOGUE", "EPILOGUE_CHUNK",
            "EPILOGUE_OPERAND", "WRITTEN_CHUNK", "WRITTEN_OPERAND", "CARRIED", "CARRIED_CHUNK", "CARRIED_OPERAND",
            "FETCHED_CHUNK", "FETCHED_OPERAND", "EXCHANGE", "EXCHANGE_BLOCK", "EXCHANGE_RATE",
            "BROUGHT",
        ),
        "codegen.contraction.wgmma_stages": ("GATHER", "PANEL_ROW", "PARTIAL_ROW", "SECOND_LINE"),
    },
    "contraction mma": {
        "codegen.contraction.mma_schedule": (
            "L2_SHARE", "LATENCY", "SHARED_RATE", "ISSUE", "BETWEEN_LOADS", "OVERHEAD", "EPILOGUE_RATE", "SINGLE",
            "WINDOWS", "COMPUTED", "CODE", "ROUND", "BEGIN", "ACROSS", "CONVERTED",
        ),
        "codegen.tile_path": ("SCATTERED", "WORD", "LOADED"),
    },
    "contraction stem": {
        "codegen.contraction.stem_schedule": (
            "PRODUCT", "WARPGROUP", "MOVED", "PIECE", "ELEMENT", "ALONE", "RESULT", "LAUNCH", "FILTER", "TILE",
            "BROUGHT", "WAIT", "WAIT_TOGETHER", "EXPOSED",
        ),
    },
    "contraction stream": {
        "codegen.contraction.stream_schedule": (
            "START", "BLOCK", "WAIT", "TERM", "FILL", "CONVERT", "STEP", "RESULT", "ISSUED", "L2_SHARE", "LINE",
        ),
    },
    "contraction simt": {
        "codegen.contraction.simt_schedule": (
            "LATENCY", "SCATTERED_LATENCY", "IN_STEP", "READS", "FETCHES", "BLOCK", "RESULT", "RESULT_OPERAND",
            "RING_START",
        ),
    },
    "direct_convolution strips": _DIRECT | {_DIRECT_SCHEDULE: ("STRIP", "STRIP_FILLED", "STRIP_LATENCY")},
    "direct_convolution flat": _DIRECT | {
        "codegen.direct_convolution.flat_schedule": ("READ", "COPY", "SCATTERED", "FILLED", "LATENCY"),
    },
    "direct_convolution slide": _DIRECT | {
        "codegen.direct_convolution.slide_schedule": ("LOAD", "WEIGHT", "FILLED", "LATENCY", "SECTORS"),
    },
    "direct_convolution planes": _DIRECT | {_DIRECT_SCHEDULE: ("FILL", "FILTER", "LINE", "FILLED", "LATENCY")},
    "direct_convolution channels": _DIRECT | {_DIRECT_SCHEDULE: ("FILL", "COLUMN", "FILLED", "LATENCY")},
}  # fmt: skip
#: A constant stays within this factor of what it is, and a difference counts less from this one on.
FACTOR, OUTLIER = 4.0, 1.5
#: What a search for better choices multiplies a constant by, and the least gain that is worth a change.
MOVES, GAIN = (0.25, 0.5, 0.75, 1.33, 2.0, 4.0), 0.002
#: An estimate is close that differs by less than this factor.
CLOSE = 1.2


@dataclass(frozen=True)
class Triple:
    """A kernel (by its number), a schedule, and the microseconds that were measured."""

    kernel: int
    spec: KernelSpec
    schedule: Schedule
    nbytes: int
    us: float

    @property
    def form(self) -> str:
        """The family and the form."""
        return f"{family_of(self.spec).name} {form_of(self.schedule).name}"

    def estimate(self, target: Target) -> float:
        return predicted_us(self.spec, self.schedule, self.nbytes, target)


def triples(rows: Sequence[tuple[Kernel, list[dict[str, Any]]]]) -> list[Triple]:
    """Returns what was measured of kernels (`fusegraph.bench.schedules.run.read`), of schedules that still exist."""
    found = []
    for number, (kernel, schedules) in enumerate(rows):
        spec = canonical(kernel.spec)
        for told in schedules:
            with suppress(ValueError):  # its form has other fields by now
                if told["us"] is not None:
                    schedule = schedule_from_data(told["schedule"])
                    found.append(Triple(number, spec, schedule, kernel.nbytes, told["us"]))
    return found


# ---- constants

#: (module, name) -> value; the module of a target's figure is "".
Values = dict[tuple[str, str], float]


def constants(target: Target, forms: Sequence[str], figures: Sequence[str] = FIGURES) -> Values:
    """Returns the constants of the cost models of forms, and figures of a target, as they are."""
    found: Values = {("", name): float(getattr(target, name)) for name in figures}
    for form in forms:
        for module, names in CONSTANTS[form].items():
            found |= {(module, name): float(getattr(importlib.import_module(module), name)) for name in names}
    return found


@contextmanager
def using(values: Values, target: Target) -> Iterator[Target]:
    """Sets constants within the block, and gives the target with its figures."""
    before = {(module, name): getattr(importlib.import_module(module), name) for module, name in values if module}
    try:
        for (module, name), value in values.items():
            if module:
                setattr(importlib.import_module(module), name, value)
        figures: dict[str, Any] = {name: value for (module, name), value in values.items() if not module}
        yield replace(target, **figures)
    finally:
        for (module, name), value in before.items():
            setattr(importlib.import_module(module), name, value)


def fitted(every: Sequence[Triple], target: Target, values: Values) -> Values:
    """Returns the values with which the estimates differ least from what was measured.

    Constants that no estimate depends on stay as they are.
    """
    import numpy as np
    from scipy.optimize import least_squares

    names = [name for name, value in values.items() if value > 0]
    start = np.log([values[name] for name in names])
    measured = np.log([t.us for t in every])

    def differences(x: Any) -> Any:
        changed = {**values, **dict(zip(names, map(float, np.exp(x))))}
        with using(changed, target) as on:
            return np.log([t.estimate(on) for t in every]) - measured

    at = differences(start)
    moves = np.array([np.any(differences(start + 0.1 * (np.arange(len(names)) == n)) != at) for n in range(len(names))])
    names, start = [name for name, move in zip(names, moves) if move], start[moves]
    if not names:
        return dict(values)
    bound = log(FACTOR)
    # Estimates are maxima of several times, so a small step sees no slope where another time is the longest.
    found = least_squares(
        differences, start, bounds=(start - bound, start + bound), loss="soft_l1", f_scale=log(OUTLIER), diff_step=0.02
    )
    return {**values, **{name: float(f"{value:.4g}") for name, value in zip(names, np.exp(found.x))}}


def chosen(every: Sequence[Triple], target: Target, values: Values) -> Values:
    """Returns the values with which the schedules with the least estimates take the least time.

    It searches along one constant after the other. What counts is the mean of the logarithms of the regrets, of all
    forms of a kernel together, and half their root mean square: few choices that are far off are worse than many
    that are slightly.
    """
    kernels: dict[int, list[Triple]] = {}
    for t in every:
        kernels.setdefault(t.kernel, []).append(t)
    least = {kernel: min(t.us for t in some) for kernel, some in kernels.items()}

    def loss(of: Values) -> float:
        with using(of, target) as on:
            picked = {kernel: min(some, key=lambda t: t.estimate(on)).us for kernel, some in kernels.items()}
        regrets = [log(us / least[kernel]) for kernel, us in picked.items()]
        return fsum(regrets) / len(regrets) + 0.5 * sqrt(fsum(x * x for x in regrets) / len(regrets))

    best, now = loss(values), dict(values)
    improved = True
    while improved:
        improved = False
        for name in values:
            for value in [now[name] * move for move in MOVES]:
                if values[name] / FACTOR <= value <= values[name] * FACTOR:
                    found = loss({**now, name: float(f"{value:.4g}")})
                    if found < best - GAIN:
                        best, now, improved = found, {**now, name: float(f"{value:.4g}")}, True
    return now


# ---- how close estimates are


@dataclass(frozen=True)
class Closeness:
    """How estimates compare with what was measured.

    bias    geometric mean of estimated / measured; error: of how many times as large the larger is; worst: the most.
    close   share of estimates within `CLOSE`.
    regret  of the schedule that is estimated to be the fastest of a kernel's (the first of several), to that which is:
            geometric mean.
    """

    name: str
    number: int
    bias: float
    error: float
    close: float
    worst: float
    regret: float

    @property
    def cells(self) -> list[str]:
        numbers = (self.bias, self.error)
        return [
            self.name, str(self.number), *(f"{x:.2f}" for x in numbers), f"{self.close:.0%}", f"{self.worst:.1f}",
            f"{self.regret:.3f}",
        ]  # fmt: skip


#: What the cells of a Closeness are.
HEADS = ("estimates", "number", "bias", "error", f"within {CLOSE - 1:.0%}", "worst", "regret")


def closeness(name: str, pairs: Sequence[tuple[int, float, float]]) -> Closeness:
    """Returns how close estimates are: (kernel, estimated, measured) microseconds."""
    logs = [log(estimated / us) for _, estimated, us in pairs]
    kernels: dict[int, list[tuple[float, float]]] = {}
    for kernel, estimated, us in pairs:
        kernels.setdefault(kernel, []).append((estimated, us))
    regrets = [log(min(of, key=itemgetter(0))[1] / min(us for _, us in of)) for of in kernels.values()]
    return Closeness(
        name,
        len(pairs),
        exp(fsum(logs) / len(logs)),
        exp(fsum(map(abs, logs)) / len(logs)),
        sum(abs(x) <= log(CLOSE) for x in logs) / len(logs),
        exp(max(map(abs, logs))),
        exp(fsum(regrets) / len(regrets)),
    )


def by_form(every: Sequence[Triple], target: Target, values: Values | None = None) -> list[Closeness]:
    """Returns how close the estimates are with constants, of each form and of all that have a cost model."""
    with using(values or {}, target) as on:
        pairs = [(t.form, (t.kernel, t.estimate(on), t.us)) for t in every]
    names = sorted({form for form, _ in pairs})
    found = [closeness(name, [p for form, p in pairs if form == name]) for name in names]
    modelled = [p for form, p in pairs if form in CONSTANTS]
    return [*([closeness("all with a cost model", modelled)] if modelled else []), *found]
