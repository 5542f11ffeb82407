"""Frozen data classes that are made by the thousand: copies with other values, and what is computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Generic, TypeVar, overload

R = TypeVar("R")
T = TypeVar("T")


def changed(record: R, **values: Any) -> R:
    """Returns a frozen data class with other values of some fields, as `dataclasses.replace`, which takes long.

    What the class checks when it is made is not checked again.
    """
    kind = type(record)
    if (names := _NAMES.get(kind)) is None:
        names = _NAMES[kind] = tuple(f.name for f in fields(record))  # type: ignore[arg-type]
    made = object.__new__(kind)
    own, every = made.__dict__, record.__dict__
    if len(every) == len(names):
        own.update(every)
    else:  # what was computed once may be otherwise
        own.update({name: every[name] for name in names})
    own.update(values)
    assert len(own) == len(names), f"{kind.__name__} has no such fields: {', '.join(values.keys() - set(names))}"
    return made


_NAMES: dict[type, tuple[str, ...]] = {}


class once(Generic[T]):
    """A property that is computed once, as `functools.cached_property`, which takes locks before Python 3.12."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> once[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> once[T] | T:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._function(instance)
        return value
