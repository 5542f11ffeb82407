"""Specifications without names: what a kernel computes, whatever its tensors and nodes are called."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from codegen.combiners import Combiner
from codegen.dtypes import DType
from codegen.expr import Operand
from codegen.records import changed

Spec = TypeVar("Spec")

#: What the fields for names and comments become in specifications and their parts.
_SAID = {"name": "", "notes": ()}


def canonical(spec: Spec) -> Spec:
    """Returns a specification in which tensors are numbered as they are first mentioned, and nothing else has a name.

    Specifications that then have the same `repr` share one kernel: a tensor that stands for several arguments does so
    in all of them.  (Equality is not enough: 0.0 and -0.0 are equal.)
    """
    made: Spec = _without_names(spec, {})
    return made


def _without_names(part: Any, numbers: dict[str, str]) -> Any:
    if isinstance(part, tuple):
        return tuple([p if type(p) in _PLAIN else _without_names(p, numbers) for p in part]) if part else part
    kind = type(part)
    if kind not in _FIELDS:
        _FIELDS[kind] = _fields(kind)
    if not (names := _FIELDS[kind]):
        return part
    values = {}
    for name in names:
        old = getattr(part, name)
        if name in _SAID:
            values[name] = _SAID[name]
        elif type(old) not in _PLAIN and (new := _without_names(old, numbers)) is not old:
            values[name] = new
    if isinstance(part, Operand):
        values["name"] = numbers.setdefault(part.name, str(len(numbers)))
    return changed(part, **values) if values else part


#: Classes of most values, which have no parts.
_PLAIN = frozenset({int, str, float, bool, type(None)})
#: Those of classes that were met: asking a class takes longer than all else.
_FIELDS: dict[Any, tuple[str, ...]] = {}


def _fields(kind: type) -> tuple[str, ...]:
    """Returns the fields of a class of parts of specifications; none for other classes."""
    if not is_dataclass(kind) or issubclass(kind, DType | Combiner):
        return ()
    return tuple(f.name for f in fields(kind))
