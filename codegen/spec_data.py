"""Specifications as data for JSON: what was measured of a kernel can be estimated again with other constants."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from codegen.canonical import canonical
from codegen.combiners import COMBINERS, Combiner
from codegen.dtypes import BY_NAME, DType
from codegen.families import FAMILIES
from codegen.spec import KernelSpec

#: Keys of objects: a dataclass by its name, a dtype and a combiner by theirs.
_CLASS, _DTYPE, _COMBINER = "is", "dtype", "combiner"


def spec_data(spec: KernelSpec) -> dict[str, Any]:
    """Returns a specification without names (`codegen.canonical`) as data: its fields that are not the usual ones."""
    data: dict[str, Any] = _data(canonical(spec))
    return data


def spec_from_data(data: Any) -> KernelSpec:
    """Returns the specification of which `spec_data` made this data.  Raises ValueError for other data."""
    try:
        made = _part(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this data is no specification: {error}") from None
    if not isinstance(made, KernelSpec):
        raise ValueError("this data is no specification")
    return made


def _data(part: Any) -> Any:
    if isinstance(part, tuple):
        return [_data(p) for p in part]
    if isinstance(part, DType):
        return {_DTYPE: part.name}
    if isinstance(part, Combiner):
        return {_COMBINER: part.name}
    if not is_dataclass(part):
        return part
    values = [(f, getattr(part, f.name)) for f in fields(part)]
    # The texts are compared because 0.0 equals False and -0.0.
    unusual = {f.name: _data(value) for f, value in values if f.default is MISSING or repr(value) != repr(f.default)}
    return {_CLASS: type(part).__name__, **unusual}


def _part(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_part(d) for d in data)
    if not isinstance(data, dict):
        return data
    if _DTYPE in data and _CLASS not in data:
        return BY_NAME[data[_DTYPE]]
    if _COMBINER in data and _CLASS not in data:
        return COMBINERS[data[_COMBINER]]
    return _classes()[data[_CLASS]](**{key: _part(value) for key, value in data.items() if key != _CLASS})


@cache
def _classes() -> dict[str, type[Any]]:
    """Returns the classes of specifications and of their parts, by name."""
    found: dict[str, type[Any]] = {}

    def look(kind: Any) -> None:
        for inner in get_args(kind):
            look(inner)
        if isinstance(kind, type) and is_dataclass(kind) and kind.__name__ not in found:
            found[kind.__name__] = kind
            for hint in get_type_hints(kind).values():
                look(hint)
            for special in kind.__subclasses__():
                look(special)

    for family in FAMILIES:
        look(family.spec)
    return found
