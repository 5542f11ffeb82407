"""Values that users give, as plain Python values of a declared kind: code behind this need not check their types.

A kind is a function of a value that returns it as bool, int, float, str, None, DType or a tuple of those, or raises
`Unfit`, whose text says what the value should have been.  Objects are asked once, by ``__index__`` or ``__float__`` or
by iteration; whatever they raise meanwhile makes them unfit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from operator import index
from typing import Any, TypeAlias

import numpy as np

from codegen.sizes import Size
from fusegraph.dtypes import DType, as_dtype
from fusegraph.errors import DTypeError

#: Entries of a sequence: more than any tensor has dimensions or an axis is cut into.
MOST_ENTRIES = 65536
_LONGEST = 2**63

Kind: TypeAlias = Callable[[Any], Any]


class Unfit(Exception):
    """A value is not of a kind; the text says what it should be."""


def integer(value: Any) -> int:
    """Returns an integer of at most 64 bits, from anything with ``__index__`` but truth values; a Size as it is."""
    if isinstance(value, Size):
        return value
    if type(value) is not int:
        if isinstance(value, (bool, np.bool_)) or not hasattr(type(value), "__index__"):
            raise Unfit("an integer")
        value = _asked(lambda: index(value), "an integer")
    if not -_LONGEST <= value < _LONGEST:
        raise Unfit("an integer of at most 64 bits")
    return int(value)


def position(value: Any) -> int:
    """Returns an integer, clamped to 64 bits: slices may begin and end anywhere."""
    if type(value) is int and not -_LONGEST <= value < _LONGEST:
        return _LONGEST - 1 if value > 0 else -_LONGEST
    return integer(value)


def number(value: Any) -> float | int:
    """Returns a number that is not NaN: an integer of at most 64 bits, signed or unsigned, or a float."""
    if isinstance(value, Size):
        return value
    if isinstance(value, (bool, np.bool_)):
        raise Unfit("a number")
    if hasattr(type(value), "__index__"):
        whole = int(_asked(lambda: index(value), "a number"))
        return whole if -_LONGEST <= whole < 2 * _LONGEST else _real(whole)
    if not isinstance(value, (float, np.floating)) and not _is_extended(value):
        raise Unfit("a number")
    return _real(value)


def _is_extended(value: Any) -> bool:
    """Returns true if a value is a number of ml_dtypes: NumPy scalars that are no `np.floating`."""
    return isinstance(value, np.generic) and value.dtype.kind == "V" and hasattr(value, "__float__")


def _real(value: Any) -> float:
    result = float(_asked(lambda: float(value), "a number that float64 holds"))
    if math.isnan(result):
        raise Unfit("a finite number")
    return result


def any_number(value: Any) -> float | int | bool:
    """Returns a number, NaN among them, or a truth value."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (float, np.floating)) and value != value:
        return math.nan
    return number(value)


def flag(value: Any) -> bool:
    """Returns True or False, from Python's or NumPy's booleans alone."""
    if not isinstance(value, (bool, np.bool_)):
        raise Unfit("True or False")
    return bool(value)


def word(value: Any) -> str:
    """Returns a text."""
    if not isinstance(value, str):
        raise Unfit("a text")
    return str(value)


def dtype(value: Any) -> DType:
    """Returns a dtype.  Raises DTypeError, too."""
    try:
        return as_dtype(value)
    except DTypeError:
        raise
    except Exception:
        raise Unfit("a dtype") from None


def array(value: Any) -> np.ndarray[Any, Any]:
    """Returns numbers or booleans, as a NumPy array."""
    found: np.ndarray[Any, Any] = _asked(lambda: np.asarray(value), "an array of numbers")
    if found.dtype.kind not in "biuf":
        raise Unfit("an array of numbers")
    return found


def optional(kind: Kind) -> Kind:
    """Returns the kind of values of a kind, or None."""

    def check(value: Any) -> Any:
        if value is None:
            return None
        try:
            return kind(value)
        except Unfit as wanted:
            raise Unfit(f"{wanted}, or None") from None

    return check


def several(kind: Kind) -> Kind:
    """Returns the kind of sequences of values of a kind, as tuples."""

    def check(value: Any) -> tuple[Any, ...]:
        wanted = f"a sequence, each entry {_name(kind)}"
        if isinstance(value, (str, bytes, bytearray, dict)) or not hasattr(type(value), "__iter__"):
            raise Unfit(wanted)
        entries: list[Any] = _asked(lambda: list(islice(iter(value), MOST_ENTRIES + 1)), wanted)
        if len(entries) > MOST_ENTRIES:
            raise Unfit(f"a sequence of at most {MOST_ENTRIES}")
        try:
            return tuple([kind(entry) for entry in entries])
        except Unfit as entry:
            raise Unfit(f"a sequence, each entry {entry}") from None

    return check


def one_or_several(kind: Kind) -> Kind:
    """Returns the kind of values of a kind, or of sequences of such values."""
    many = several(kind)

    def check(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.ndim:
            return many(value)  # arrays of one element have __index__ as well
        try:
            return kind(value)
        except Unfit as wanted:
            try:
                return many(value)
            except Unfit:
                raise Unfit(f"{wanted}, or a sequence of these") from None

    return check


def plain(value: Any, depth: int = 3) -> Any:
    """Returns a plain value of any of these kinds, for attributes without a declared one."""
    if value is None or isinstance(value, DType):
        return value
    for kind in (flag, number, word, dtype):
        try:
            return kind(value)
        except (Unfit, DTypeError):
            continue
    if not depth:
        raise Unfit("a plain value")
    return several(lambda entry: plain(entry, depth - 1))(value)


def _name(kind: Kind) -> str:
    """Returns what the values of a kind are called in messages, from what it says of a wrong one."""
    try:
        kind(object())
    except Unfit as wanted:
        return str(wanted)
    except DTypeError:
        return "a dtype"
    return "a value"


def _asked(question: Callable[[], Any], wanted: str) -> Any:
    """Returns what an object answers.  Raises Unfit if it raises anything."""
    try:
        return question()
    except Exception:
        raise Unfit(wanted) from None
