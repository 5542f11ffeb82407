"""Tells whether arrays have changed: by their identity, torch's version counters, and where their memory is.

A version counter counts changes in place.  Memory that torch has exchanged (``parameter.data = other``) shows by its
address, unless what was freed is handed out again: for that, storages are told apart, which are kept from being
confused by a weak reference, or, if they are small, by keeping them.

What ``parameter.data`` returns shares the parameter's memory, but has a counter of its own.  So ``torch.Tensor.data``
is replaced, as soon as a tensor is watched, by a property that remembers what watched tensors gave away or were given.
Parts of a storage that torch does not know as views (``parameter.data = flat[:n]``) count as changed in every call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any
from weakref import finalize, ref

from fusegraph.engines.frameworks import framework_of

#: Bytes up to which memory is kept that torch would free.
SMALL = 1 << 16

_version = attrgetter("_version")


class _Data:
    """What ``.data`` of a watched tensor returned, or was set to, as far as somebody still has it."""

    #: How often that of any watched tensor was read or set, and what of it is left.
    total, left = 0, list[Any]()

    def __init__(self) -> None:
        self.count, self.aliases = 0, list[Any]()

    def add(self, alias: Any) -> None:
        self.count += 1
        _Data.total += 1
        for aliases in (self.aliases, _Data.left):
            aliases[:] = [a for a in aliases if a() is not None]
            aliases.append(ref(alias))

    def state(self) -> tuple[object, ...]:
        return self.count, *_versions(self.aliases)


#: By the identities of the watched tensors.
_DATA: dict[int, _Data] = {}


@cache
def _note_data(torch: Any) -> None:
    """Replaces ``torch.Tensor.data``."""
    plain = torch.Tensor.data

    def read(tensor: Any) -> Any:
        alias = plain.__get__(tensor)
        if (data := _DATA.get(id(tensor))) is not None:
            data.add(alias)
        return alias

    def write(tensor: Any, other: Any) -> None:
        plain.__set__(tensor, other)
        if (data := _DATA.get(id(tensor))) is not None:
            data.add(other)

    torch.Tensor.data = property(read, write, doc=plain.__doc__)


class Watch:
    """Watches arrays of given types."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._torch = bool(arrays) and {framework_of(kind) for kind in set(map(type, arrays))} == {"torch"}
        self._large: tuple[int, ...] = ()
        self._storage: Callable[[Any], int] = id
        self._uncounted: set[int] = set()
        if self._torch:
            torch: Any = sys.modules["torch"]
            _note_data(torch)
            self._storage = torch._C._storage_id
            sizes = [x.untyped_storage().nbytes() for x in arrays]
            self._large = tuple(n for n, size in enumerate(sizes) if size > SMALL)
            # Parts of a storage that may be changed without a count of their own versions.
            self._uncounted = {n for n, x in enumerate(arrays) if sizes[n] > x.nbytes and not x._is_view()}
            for x in arrays:
                if id(x) not in _DATA:
                    _DATA[id(x)] = _Data()
                    finalize(x, _DATA.pop, id(x), None).atexit = False

    def seen(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Returns what differs once the arrays are others, or have other values or memory.

        For arrays without version counters, a change in place makes no difference.
        """
        try:
            if self._torch and not self._uncounted:
                large = [arrays[n] for n in self._large]
                data = (_Data.total, *_versions(_Data.left))
                return (*map(id, arrays), *map(_version, arrays), *map(self._storage, large), *data)
        except RuntimeError:  # made by torch in inference mode: without a counter
            pass
        return (*map(id, arrays), *map(_counted, arrays), *(object() for _ in self._uncounted))

    def states(self, arrays: Sequence[Any], addresses: Sequence[int]) -> list[tuple[Any, ...]]:
        """Returns what differs for each array once it has other values or memory."""
        large = {*self._large}
        return [
            (
                object() if n in self._uncounted else _counted(x),
                address,
                self._storage(x) if n in large else 0,
                *(_DATA[id(x)].state() if self._torch else ()),
            )
            for n, (x, address) in enumerate(zip(arrays, addresses))
        ]

    def held(self, arrays: Sequence[Any]) -> list[object]:
        """Returns what to keep, so that other memory does not look like that of these arrays."""
        if not self._torch:
            return [None] * len(arrays)
        from torch.multiprocessing.reductions import StorageWeakRef

        large = {*self._large}
        storages = [x.untyped_storage() for x in arrays]
        return [StorageWeakRef(s) if n in large else s for n, s in enumerate(storages)]


def _versions(references: Sequence[Callable[[], Any]]) -> list[object]:
    """Returns the versions of arrays that still exist."""
    return [_counted(x) for reference in references if (x := reference()) is not None]


def _counted(array: Any) -> object:
    """Returns an array's version; what equals nothing else if torch does not count them."""
    try:
        return getattr(array, "_version", 0)
    except RuntimeError:
        return object()
