"""Arrays with inaccessible memory around them: an access past either end faults instead of reading a neighbour."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_PAGE = mmap.PAGESIZE
_PATTERN = 0xA5

_live: weakref.WeakSet[GuardedArray] = weakref.WeakSet()


class GuardedArray:
    """A copy of ``array``, of the same shape, dtype and strides, between two inaccessible pages.

    flush       ``"end"``: the last element ends at an inaccessible page, so that reading or writing past it faults;
                ``"start"``: the first element follows one.
    alignment   bytes, a power of two that the address of the array's memory stays a multiple of.  Up to
                ``alignment - 1`` bytes then lie between the array and the page; they, and the rest of the page at the
                other end, hold a pattern that ``damage`` checks.  16 is what 16-byte vector accesses need.
    writable    whether the copy may be written; if not, any write to it faults.
    name        for messages.

    ``array`` is the guarded copy and ``pointer`` the address of its element (0, ..., 0).  Raises ``ValueError`` for an
    alignment that is no power of two of at most a page, ``OSError`` if the memory cannot be had or protected.
    """

    def __init__(
        self,
        array: NDArray[Any],
        *,
        flush: Literal["end", "start"] = "end",
        alignment: int = 16,
        writable: bool = True,
        name: str = "array",
    ) -> None:
        if alignment < 1 or alignment > _PAGE or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment} is not a power of two from 1 to {_PAGE}")
        if flush not in ("end", "start"):
            raise ValueError(f"flush is {flush!r}; 'end' or 'start' is expected")
        low, high = _extent(array)
        span = high - low
        usable = max(-(-span // _PAGE), 1) * _PAGE
        self._memory = mmap.mmap(-1, usable + 2 * _PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        begin = _PAGE if flush == "start" else _PAGE + (usable - span) // alignment * alignment
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._bytes[_PAGE : _PAGE + usable] = _PATTERN
        self.name = name
        self.address = base + begin
        self.span = span
        self._whole = (base, base + usable + 2 * _PAGE)
        self._begin, self._usable = begin, usable
        self.array: NDArray[Any] = np.ndarray(
            array.shape, array.dtype, buffer=self._memory, offset=begin - low, strides=array.strides
        )
        self.array[...] = array
        _protect(base, _PAGE, _PROT_NONE)
        _protect(base + _PAGE + usable, _PAGE, _PROT_NONE)
        if not writable:
            _protect(base + _PAGE, usable, _PROT_READ)
        _live.add(self)

    @property
    def pointer(self) -> int:
        """Address of element (0, ..., 0), as a kernel takes it."""
        return int(self.array.ctypes.data)

    def damage(self) -> str | None:
        """Returns a message about what was written around the array within its pages; None if nothing was."""
        for first, last in ((_PAGE, self._begin), (self._begin + self.span, _PAGE + self._usable)):
            wrong = np.flatnonzero(self._bytes[first:last] != _PATTERN)
            if wrong.size:
                position = first + int(wrong[0])
                return f"{wrong.size} bytes around {self} were written, the first {self._where(position - self._begin)}"
        return None

    def describe(self, address: int) -> str | None:
        """Returns where ``address`` lies relative to the array, or None if it is not in its memory or guard pages."""
        if not self._whole[0] <= address < self._whole[1]:
            return None
        return f"{self._where(address - self.address)} of {self}"

    def _where(self, offset: int) -> str:
        if offset < 0:
            return f"{-offset} bytes before the start"
        if offset >= self.span:
            return f"{offset - self.span} bytes past the end"
        return f"byte {offset}"

    def __str__(self) -> str:
        return f"{self.name} ({self.array.dtype} {list(self.array.shape)}, {self.span} bytes)"


def describe_address(address: int) -> str | None:
    """Returns where ``address`` lies relative to a live ``GuardedArray``, or None."""
    return next((text for array in list(_live) if (text := array.describe(address))), None)


def _extent(array: NDArray[Any]) -> tuple[int, int]:
    """Returns the first and one-past-last byte that the elements occupy, relative to element (0, ..., 0)."""
    if array.size == 0:
        return 0, 0
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides)]
    return sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps) + array.itemsize


def _protect(address: int, size: int, protection: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), protection):
        raise OSError(ctypes.get_errno(), "mprotect failed for a guarded array")
