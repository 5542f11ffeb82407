"""Checks what callers give besides a model: paths, sizes, arrays."""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from codegen.sizes import Size
from fusegraph.errors import ArgumentError
from fusegraph.frontends.onnx.tensors import Array

T = TypeVar("T")


def wrong(name: str, given: object, wanted: str) -> ArgumentError:
    """Returns the error that argument ``name`` is not what is ``wanted``."""
    return ArgumentError(f"{name} is {wanted}, got {type(given).__name__} {reprlib.repr(given)[:100]}")


def instance(name: str, given: object, kind: type[T]) -> T:
    """Returns an argument if it is of this type.  Raises ArgumentError otherwise."""
    if not isinstance(given, kind):
        raise wrong(name, given, f"a {kind.__name__}")
    return given


def path_of(name: str, given: object) -> Path:
    """Returns an argument as an absolute path.  Raises ArgumentError if it is not a path."""
    try:
        text = os.fsdecode(given)  # type: ignore[arg-type]
    except TypeError:
        raise wrong(name, given, "a path: str or os.PathLike") from None
    if "\0" in text:
        raise wrong(name, given, "a path, which has no NUL")
    return Path(os.path.abspath(text))


def named(name: str, given: object, what: str) -> dict[str, Any]:
    """Returns a mapping whose keys are names, empty for None.  Raises ArgumentError for anything else."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise wrong(name, given, f"a mapping of {what}")
    for key in given:
        if not isinstance(key, str):
            raise wrong(f"a key of {name}", key, "a name")
    return dict(given)


def sizes_of(given: object) -> dict[str, int | tuple[int, ...]]:
    """Checks ``shapes``: sizes of dimensions by name, or shapes of inputs by name.  Raises ArgumentError."""
    found: dict[str, int | tuple[int, ...]] = {}
    for key, size in named("shapes", given, "names to sizes").items():
        what = f"shapes[{key[:80]!r}]"
        several = size.ndim > 0 if isinstance(size, np.ndarray) else isinstance(size, Sequence)
        if several and not isinstance(size, str | bytes | bytearray):
            found[key] = tuple(_size(what, number) for number in size)
        else:
            found[key] = _size(what, size)
    return found


def _size(what: str, given: Any) -> int:
    wanted = "a size, an integer from 0 to 2^63 - 1 or a Dim, or a sequence of such"
    if isinstance(given, Size):
        return given
    try:
        size = operator.index(given)
    except TypeError:
        raise wrong(what, given, wanted) from None
    if isinstance(given, bool) or not 0 <= size < 2**63:
        raise wrong(what, given, wanted)
    return size


def arrays_of(given: object) -> dict[str, Array]:
    """Checks ``values``: arrays of numbers by the names of inputs.  Raises ArgumentError."""
    found = {key: array_of(f"values[{key[:80]!r}]", x) for key, x in named("values", given, "names to arrays").items()}
    for key, x in found.items():
        if x.dtype.kind not in "biufcV":  # numbers, those of ml_dtypes included
            raise wrong(f"values[{key[:80]!r}]", x, "an array of numbers")
    return found


def array_of(what: str, given: object) -> Array:
    """Returns an argument as a NumPy array of any type.  Raises ArgumentError."""
    try:
        return np.asarray(given)
    except Exception:  # whatever an array of another framework, or a ragged list, raises
        raise wrong(what, given, "an array") from None
