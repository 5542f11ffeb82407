"""What a kernel family is: forms of kernels for one class of specifications, and how a specification's form is chosen.

A form is one way to write such kernels; a schedule says how one of them is tiled and mapped to threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from codegen.canonical import canonical
from codegen.declined import Declined
from codegen.sizes import values
from codegen.spec import KernelSource, KernelSpec
from codegen.target import Target

#: To be preferred to a form in front of it, a form must be estimated to be so many times as fast and to save so many
#: cycles: the estimates are no better than that.
CLEARLY, LEAST_SAVED = 1.15, 3000.0
#: How many schedules of the preferred form, and of each other one, come first.  The last form counts among the others
#: only where it is estimated to take at most so many times as long.
FIRST, OTHERS, HOPELESS = 8, 2, 2.0


@dataclass(frozen=True)
class Schedule:
    """Numbers, flags and names that change a kernel's speed and the order of its sums, but never what it computes."""


SpecT = TypeVar("SpecT", bound=KernelSpec)
ScheduleT = TypeVar("ScheduleT", bound=Schedule)


@dataclass(eq=False)
class Form(Generic[SpecT, ScheduleT]):
    """One way to write the kernels of a family.

    name       what reports call it.
    schedule   the class of its schedules.
    schedules  those worth trying, best guess first; none for specs it is not meant for.  Raises Declined, with the
               reason, for others that it does not take.
    best       the first of these, for forms that find it without ranking all.
    render     the kernel of a spec as CUDA C.
    cycles     that the best schedule is estimated to take, for forms that are chosen by it.  Raises Declined likewise.
    cost       cycles that a schedule is estimated to take with its operands in memory; None for forms without a model.
    compare    likewise, in units of its own, for forms whose schedules can only be compared with each other.
    coarse_products  how many fp8 products a kernel lets tensor cores add up in the 14 bits that some of them keep,
               before it adds up these sums in float32; 0 for all of them, None if there are no such sums.
    early      whether blocks of a kernel may begin while those of the kernel before end, where these leave room: they
               wait for memory, or a multiprocessor has registers for one of them.
    behind     the schedule with which a kernel reads operands before those that were launched before it end, and the
               numbers of its arguments that these are; None if it has to wait.
    """

    name: str
    schedule: type[ScheduleT]
    schedules: Callable[[SpecT, Target], Iterable[ScheduleT]]
    render: Callable[[SpecT, ScheduleT], KernelSource]
    cycles: Callable[[SpecT, Target], float] | None = None
    coarse_products: Callable[[SpecT, ScheduleT], int | None] = lambda spec, schedule: None
    cost: Callable[[SpecT, ScheduleT, Target], float] | None = None
    compare: Callable[[SpecT, ScheduleT, Target], float] | None = None
    best: Callable[[SpecT, Target], ScheduleT] | None = None
    early: Callable[[SpecT, ScheduleT], bool] = lambda spec, schedule: False
    behind: Callable[[SpecT, ScheduleT], tuple[ScheduleT, Sequence[int]] | None] = lambda spec, schedule: None


@dataclass(eq=False)
class Family(Generic[SpecT]):
    """A class of specifications and its forms, in order of preference: a spec gets the first form that takes it."""

    name: str
    spec: type[SpecT]
    forms: tuple[Form[SpecT, Any], ...]

    def schedules(self, spec: SpecT, target: Target) -> Iterator[Schedule]:
        """Yields the schedules worth trying, best first.  Raises Declined, with the last reason, if no form fits."""
        found, last = False, Declined(f"no form of {self.name} is meant for {spec.name}")
        for form in self.forms:
            try:
                for schedule in form.schedules(spec, target):
                    found = True
                    yield schedule
            except Declined as reason:
                last = reason
            if found:
                return
        raise last

    def declined(self, spec: SpecT, target: Target) -> dict[str, str]:
        """Returns by name why the forms in front of the one that a spec gets do not take it."""
        reasons: dict[str, str] = {}
        for form in self.forms:
            try:
                if any(True for _ in form.schedules(spec, target)):
                    break
            except Declined as reason:
                reasons[form.name] = str(reason)
        return reasons


@dataclass(eq=False)
class EstimatedFamily(Family[SpecT]):
    """A family that estimates how long its forms take: a clearly faster one is preferred to those in front of it.

    The last form takes every spec but those that only one form is for, and is used for those that no other form takes;
    ``last_competes`` tells for which others it is estimated beside them.
    """

    last_competes: Callable[[SpecT], bool] = lambda spec: False

    def schedules(self, spec: SpecT, target: Target) -> Iterator[Schedule]:
        """Yields the schedules worth trying, best guess first; the first 12 have some of every form that fits."""
        spec, last = canonical(spec), self.forms[-1]
        estimates = self._estimates(spec, target)
        taken = self._taken(estimates)
        if taken.best is not None:  # most callers want no more
            yield taken.best(spec, target)
        first = tuple(taken.schedules(spec, target))
        yield from first[taken.best is not None : FIRST]
        every = {form: tuple(form.schedules(spec, target)) for form in estimates if form is not taken}
        if taken is not last and _takes_at_most(last, HOPELESS * estimates[taken], spec, target):
            every[last] = tuple(last.schedules(spec, target))
        for schedules in every.values():
            yield from schedules[:OTHERS]
        yield from first[FIRST:]
        for schedules in every.values():
            yield from schedules[OTHERS:]

    def form(self, spec: SpecT, target: Target) -> Form[SpecT, Any]:
        """Returns the form that a spec gets untuned."""
        return self._taken(self._estimates(spec, target))

    def _taken(self, estimates: Mapping[Form[SpecT, Any], float]) -> Form[SpecT, Any]:
        """Returns the form that a spec gets, of these estimated cycles of those that compete."""
        first = next(iter(estimates), self.forms[-1])
        best = min(estimates, key=estimates.__getitem__, default=first)
        clearly = best != first and max(CLEARLY * estimates[best], estimates[best] + LEAST_SAVED) < estimates[first]
        return best if clearly else first

    def cycles(self, spec: SpecT, target: Target) -> float:
        """Returns the cycles that the best schedule is estimated to take, by the form's cost model."""
        estimates = self._estimates(spec, target)
        taken = self._taken(estimates)
        return estimates.get(taken) or _cycles(taken, values(spec), target)

    def declined(self, spec: SpecT, target: Target) -> dict[str, str]:
        """Returns by name why the forms in front of the one that a spec gets are not taken."""
        estimates = self._estimates(spec, target)
        taken, reasons = self._taken(estimates), {}
        for form in self.forms[: self.forms.index(taken)]:
            if form in estimates:
                times = estimates[form] / estimates[taken]
                reasons[form.name] = f"it is estimated to take {times:.2f} times as long as {taken.name}"
                continue
            try:
                _cycles(form, spec, target)
            except Declined as reason:
                reasons[form.name] = str(reason)
        return reasons

    def _estimates(self, spec: SpecT, target: Target) -> Mapping[Form[SpecT, Any], float]:
        """Returns the estimated cycles of the forms that compete, at the sizes that are known here."""
        return _estimates(self, canonical(values(spec)), target)


def _cycles(form: Form[SpecT, Any], spec: SpecT, target: Target) -> float:
    assert form.cycles is not None
    return form.cycles(spec, target)


def _takes_at_most(form: Form[SpecT, Any], cycles: float, spec: SpecT, target: Target) -> bool:
    """Tells whether a form takes a spec, and is estimated to take no more than so many cycles."""
    try:
        return _cycles(form, spec, target) <= cycles
    except Declined:
        return False


@lru_cache(1024)
def _estimates(family: Family[SpecT], spec: SpecT, target: Target) -> Mapping[Form[SpecT, Any], float]:
    """Returns the estimated cycles of the forms that take a canonical spec and compete: equal layers share them."""
    found = {}
    competes = isinstance(family, EstimatedFamily) and family.last_competes(spec)
    for form in family.forms if competes else family.forms[:-1]:
        try:
            found[form] = _cycles(form, spec, target)
        except Declined:
            continue
    return found
