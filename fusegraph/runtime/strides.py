"""Arithmetic on strides, and NumPy arrays over memory at a given address."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from fusegraph.runtime.memory import check_room

NDArray = np.ndarray[Any, np.dtype[Any]]


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides, in elements, of a C-contiguous array of ``shape``."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Returns how many elements of memory an array spans, first to last; strides are 0 or more, in elements."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def empty_numpy(shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray:
    """Returns a new NumPy array with undefined contents and ``strides`` (in elements, 0 or more).

    Raises OutOfMemoryError if it is larger than the host's memory.
    """
    check_room(span(shape, strides) * dtype.itemsize, f"an array, {dtype} {list(shape)},")
    base = np.empty(span(shape, strides), dtype)
    if not base.size:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, base, strides=[stride * dtype.itemsize for stride in strides])


def numpy_over(
    pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], owner: object
) -> NDArray:
    """Returns a NumPy array on the memory at ``pointer`` (strides in elements, 0 or more), which keeps ``owner`` alive.

    The memory is not accessed here.  An array without elements has memory of its own.
    """
    nbytes = span(shape, strides) * dtype.itemsize
    memory: Any = (ctypes.c_char * nbytes).from_address(pointer) if nbytes else (ctypes.c_char * 1)()
    memory.owner = owner
    return np.ndarray(shape, dtype, memory, strides=[stride * dtype.itemsize for stride in strides])


#: How many candidate solutions `share_memory` examines before it gives up, after about a millisecond.
MOST_WORK = 20_000
#: The address at which `share_memory` places the second array; any will do, as nothing is read there.
_PLACE = 1 << 44


#: Shape, strides in elements, bytes of an element.
Pattern = tuple[tuple[int, ...], tuple[int, ...], int]


def share_memory(first: Pattern, second: Pattern, apart: int) -> bool | None:
    """Tells whether two strided arrays have a byte in common; None if that takes too long to find out.

    apart  bytes from the first element of ``second`` to the first element of ``first``.

    The answer is exact: NumPy decides whether a bounded linear Diophantine equation has a solution.
    """
    one, other = (
        numpy_over(_PLACE + start, shape, strides, np.dtype((np.void, itemsize)), None)
        for start, (shape, strides, itemsize) in ((apart, first), (0, second))
    )
    try:
        shares: Any = np.shares_memory  # its stub allows only particular constants for max_work
        return bool(shares(one, other, max_work=MOST_WORK))
    except np.exceptions.TooHardError:
        return None
