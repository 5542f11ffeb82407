"""Tells whether arrays have changed: by their identity, torch's version counters, and where their memory is.

A version counter counts changes in place.  Memory that torch has exchanged (``parameter.data = other``) shows by its
address, unless what was freed is handed out again: for that, storages are told apart, which are kept from being
confused by a weak reference, or if they are small by an alias that keeps them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from fusegraph.engines.frameworks import framework_of

#: Bytes up to which an alias may keep memory that torch would free.
SMALL = 1 << 16

_version = attrgetter("_version")


class Watch:
    """Watches arrays of given types."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._torch = all(framework_of(type(x)) == "torch" for x in arrays)
        self._large: tuple[int, ...] = ()
        self._storage: Callable[[Any], int] = id
        if self._torch and arrays:
            torch: Any = sys.modules["torch"]
            self._storage = torch._C._storage_id
            self._large = tuple(n for n, x in enumerate(arrays) if x.untyped_storage().nbytes() > SMALL)

    def seen(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Returns what differs once the arrays are others, or have other values or memory.

        For arrays without version counters, a change in place makes no difference.
        """
        try:
            if self._torch:
                large = [arrays[n] for n in self._large]
                return (*map(id, arrays), *map(_version, arrays), *map(self._storage, large))
        except RuntimeError:  # made by torch in inference mode: without a counter
            pass
        return (*map(id, arrays), *map(_counted, arrays))

    def states(self, arrays: Sequence[Any], addresses: Sequence[int]) -> list[tuple[Any, ...]]:
        """Returns what differs for each array once it has other values or memory."""
        large = {*self._large}
        return [
            (_counted(x), address, self._storage(x) if n in large else 0)
            for n, (x, address) in enumerate(zip(arrays, addresses))
        ]

    def held(self, arrays: Sequence[Any]) -> list[object]:
        """Returns what to keep, so that other memory does not look like that of these arrays."""
        if not self._torch or not arrays:
            return [None] * len(arrays)
        from torch.multiprocessing.reductions import StorageWeakRef

        large = {*self._large}
        return [StorageWeakRef(x.untyped_storage()) if n in large else x.detach() for n, x in enumerate(arrays)]


def _counted(array: Any) -> object:
    """Returns an array's version; what equals nothing else if torch does not count them."""
    try:
        return getattr(array, "_version", 0)
    except RuntimeError:
        return object()
