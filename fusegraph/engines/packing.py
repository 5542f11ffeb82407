"""Packed copies at run time: made when a call first has parameters, and again, in place, when these have changed.

A plan's packing falls into parts, each some kernels that make some packed tensors of some parameters.  The copies of a
part belong to the arrays that they were made of: executables that want the same of the same arrays share them, and they
are freed when an array is.  A copy stays at its address, so that recorded launches may read it.

Every call compares the version counters of torch's tensors.  Other arrays have none: that they have changed in place
has to be told (`Executable.repack`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from threading import RLock
from typing import Any, Protocol
from weakref import WeakMethod, WeakValueDictionary, ref

from codegen.canonical import canonical
from fusegraph.engines.versions import Watch
from fusegraph.errors import DeviceError, OutOfMemoryError
from fusegraph.graph import Tensor
from fusegraph.passes.parameters import memory
from fusegraph.plan import Plan
from fusegraph.runtime.cache import digest

#: Parameters that change so many times, with at most so many calls between two changes, had better not be packed.
MOST_CHANGES, CALLS_BETWEEN = 5, 2
#: Of parameters at so many different places it is known what they were in the last call.
KNOWN = 256

#: Queues a plan's kernels for addresses: those of the call's inputs, of packed tensors, of the call's outputs.
Run = Callable[[tuple[int, ...], int], None]


class Packer(Protocol):
    """What an engine does for packed copies."""

    def allocate(self, nbytes: int) -> tuple[object, int]:
        """Returns memory and its address."""

    def run(self, kernels: Sequence[int], addresses: Sequence[int], stream: int) -> object:
        """Queues some kernels of the packing on its inputs and outputs; returns what must stay alive meanwhile."""

    def is_capturing(self, stream: int) -> bool:
        """Tells whether what is queued is recorded instead of run."""

    def wait(self, stream: int) -> None:
        """Waits until what was queued has run."""


@dataclass(frozen=True)
class Part:
    """Kernels of a packing that work on tensors in common; ``inputs`` and ``outputs`` are numbers in its graph.

    ``name`` tells what they compute: alike parts of other graphs have the same.
    """

    name: str
    kernels: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[int, ...]


def parts_of(plan: Plan) -> list[Part]:
    """Returns the parts of a packing."""
    graph = plan.simplified
    given = {*graph.inputs, *plan.constants}
    groups: list[tuple[set[Tensor], list[int]]] = []
    for number, kernel in enumerate(plan.kernels):
        inner = {t.base for t in kernel.arguments} - given
        beside = [g for g in groups if g[0] & inner]
        joined = inner.union(*(g[0] for g in beside)), sorted([number, *(n for g in beside for n in g[1])])
        groups = [g for g in groups if g not in beside] + [joined]
    return [_part(plan, sorted(numbers)) for _, numbers in groups]


def _part(plan: Plan, kernels: Sequence[int]) -> Part:
    graph = plan.simplified
    places: dict[Tensor, int] = {}
    does = []
    for kernel in (plan.kernels[k] for k in kernels):
        reached = [(places.setdefault(t.base, len(places)), t.start) for t in kernel.arguments]
        does.append((repr(canonical(kernel.group.lowered.spec)), reached))
    inputs = [t for t in places if t in graph.input_numbers]
    outputs = [t for t in graph.outputs if t.base in places]
    forms = [(places[t.base], t.start, t.shape, t.strides, t.dtype.name) for t in (*inputs, *outputs)]
    return Part(
        digest("part", repr((does, forms))),
        tuple(kernels),
        tuple(graph.input_numbers[t] for t in inputs),
        tuple(graph.output_numbers[t] for t in outputs),
        tuple(id(t.value) for t in places if t.is_constant),
    )


class Copy:
    """The packed tensors of a part: where they are, what the parameters were when they were made, and what keeps other
    memory from looking like theirs.
    """

    __slots__ = ("__weakref__", "held", "made_of", "memory", "nbytes", "pointers")

    def __init__(self, packer: Packer, sizes: Sequence[int]) -> None:
        self.memory = [packer.allocate(size) for size in sizes]
        self.pointers = tuple(pointer for _, pointer in self.memory)
        self.nbytes = sum(sizes)
        self.made_of: Any = None
        self.held: list[object] = []


class _Shared:
    """What all packings share: copies, a lock, and an epoch, which ends when copies are made or freed."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.epoch = object()
        self.copies: WeakValueDictionary[Any, Copy] = WeakValueDictionary()


_SHARED = _Shared()


@dataclass(eq=False)
class _Set:
    """The copies for some arrays, the names that they are shared by, and references to the arrays."""

    copies: list[Copy]
    pointers: tuple[int, ...]
    keys: list[Any]
    arrays: list[Callable[[], Any]]


def repack() -> None:
    """Says that parameters have changed, unseen by torch's version counters: what is packed of any is made again.

    Changes through ``parameter.data``, or by other libraries, are such.  The next call of a model makes its copies, at
    the same addresses, which recordings by ``torch.cuda.graph`` then read as well.
    """
    with _SHARED.lock:
        for copy in list(_SHARED.copies.values()):
            copy.made_of = None
        _SHARED.epoch = object()


class Packing:
    """The packed tensors of a loaded plan, for whatever parameters it is called with."""

    def __init__(self, plan: Plan, packer: Packer, device: str, give_up: Callable[[Any], Run]) -> None:
        """``give_up`` returns what works without packed tensors, for calls of a form; it is not kept alive."""
        assert plan.packing is not None
        self.packer, self._device = packer, device
        self.give_up = WeakMethod(give_up)
        self.calls = self._changes = 0
        self._dropped = False
        made = plan.packing.simplified
        self.parts = parts_of(plan.packing)
        self._sizes = [memory(t) for t in made.outputs]
        names = [t.name for t in plan.graph.inputs]
        #: Returns those of the call's arrays, or addresses, that copies are made of.
        self.parameters = _picked([names.index(t.name) for t in made.inputs])
        self.inputs = len(names)
        self._sets: dict[tuple[int, ...], _Set] = {}
        self._pinned: list[_Set] = []
        self._recorded: list[object] = []
        self._last: dict[tuple[int, ...], _Last] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all copies that the plan holds."""
        with _SHARED.lock:
            return sum({c: c.nbytes for s in [*self._sets.values(), *self._pinned] for c in s.copies}.values())

    def last(self, addresses: Sequence[int]) -> _Last:
        """Returns what is known of the parameters of calls with arrays at addresses, wherever the others are."""
        if len(self._last) >= KNOWN:
            self._last.clear()
        return self._last.setdefault(self.parameters(addresses), _Last())

    def renew(self, last: _Last, arrays: Sequence[Any], addresses: Sequence[int], stream: int) -> bool:
        """Brings the packed tensors up to date; returns false if that is futile, or memory does not suffice."""
        if self.is_futile:
            return False
        with _SHARED.lock:
            watch = Watch(arrays)
            seen = watch.seen(arrays)
            try:
                last.pointers = self.current(watch, arrays, self.parameters(addresses), stream).pointers
            except (DeviceError, OutOfMemoryError):
                return False
            recorded = self.packer.is_capturing(stream)  # copies made in a recording are not made yet
            last.watch = watch
            last.seen, last.epoch = None if recorded else seen, _SHARED.epoch
        return True

    def current(self, watch: Watch, arrays: Sequence[Any], addresses: Sequence[int], stream: int) -> _Set:
        """Returns the copies for parameters, after making those that are not up to date; the caller holds the lock.

        While a stream is captured, making them becomes part of the recording, which gets copies of its own for that.
        """
        key = tuple(map(id, arrays))
        found = self._sets.get(key)
        is_further = found is None and not self._dropped  # rather than in the place of others
        if found is None:
            found = self._sets[key] = self._new_set(key, arrays)
        states = watch.states(arrays, addresses)
        wanted = [tuple(states[n] for n in part.inputs) for part in self.parts]
        stale = [n for n, copy in enumerate(found.copies) if copy.made_of != wanted[n]]
        if self.packer.is_capturing(stream):
            own = [self._copy(n) if n in stale else copy for n, copy in enumerate(found.copies)]
            found = _Set(own, self._pointers(own), [], found.arrays) if stale else found
            self._pinned.append(found)
            if stale:
                self._recorded.append(self._make(stale, (*addresses, *found.pointers), stream))
        elif stale:
            if not is_further:
                self._changes = self._changes + 1 if self.calls <= CALLS_BETWEEN else 1
                self.calls, self._dropped = 0, False
            held = watch.held(arrays)
            for n in stale:
                found.copies[n].made_of = None  # until they are made
            keep = self._make(stale, (*addresses, *found.pointers), stream)
            self.packer.wait(stream)  # whoever reads them on another stream need not
            del keep
            for n in stale:
                found.copies[n].made_of = wanted[n]
                found.copies[n].held = [held[k] for k in self.parts[n].inputs]
            _SHARED.epoch = object()
        return found

    def _make(self, parts: Sequence[int], addresses: Sequence[int], stream: int) -> object:
        """Queues the kernels of some parts; returns what must stay alive meanwhile."""
        kernels = sorted(k for n in parts for k in self.parts[n].kernels)
        return self.packer.run(kernels, addresses, stream)

    @property
    def is_futile(self) -> bool:
        """Whether the parameters change too often."""
        return self._changes >= MOST_CHANGES

    def pin(self, arrays: Sequence[Any]) -> None:
        """Keeps the copies for parameters as long as the plan: a recording reads them."""
        with _SHARED.lock:
            found = self._sets.get(tuple(map(id, arrays)))
            if found is not None and found not in self._pinned:
                self._pinned.append(found)

    def retire(self) -> None:
        """Frees the copies that no recording reads."""
        with _SHARED.lock:
            self._sets.clear()

    def forget(self) -> None:
        """Makes all copies again when they are needed."""
        with _SHARED.lock:
            for copy in [c for s in self._sets.values() for c in s.copies]:
                copy.made_of = None
            _SHARED.epoch = object()

    def _copy(self, part: int) -> Copy:
        """Returns memory for the packed tensors of a part."""
        return Copy(self.packer, [self._sizes[n] for n in self.parts[part].outputs])

    def _pointers(self, copies: Sequence[Copy]) -> tuple[int, ...]:
        """Returns the addresses of the packed tensors, in the order of the packing's outputs."""
        found = {n: pointer for p, c in zip(self.parts, copies) for n, pointer in zip(p.outputs, c.pointers)}
        return tuple(found[n] for n in range(len(self._sizes)))

    def _new_set(self, key: tuple[int, ...], arrays: Sequence[Any]) -> _Set:
        """Returns copies that are not made yet, or are shared with other executables."""
        keys = [(self._device, p.name, tuple(key[n] for n in p.inputs), p.constants) for p in self.parts]
        copies = []
        for part, name in enumerate(keys):
            copy = _SHARED.copies.get(name)
            if copy is None:
                copy = _SHARED.copies[name] = self._copy(part)
            copies.append(copy)
        this = ref(self)

        def gone(_: object) -> None:
            packing = this()
            if packing is not None:
                packing._drop(key)

        return _Set(copies, self._pointers(copies), keys, [_reference(x, gone) for x in arrays])

    def _drop(self, key: tuple[int, ...]) -> None:
        """Frees the copies for arrays of which one has been freed: its identity may be another one's soon."""
        found = self._sets.pop(key, None)
        self._dropped = True
        for name in found.keys if found is not None else ():
            _SHARED.copies.pop(name, None)
        _SHARED.epoch = object()


class _Last:
    """What parameters at some addresses were in the last call, and the addresses of their packed tensors."""

    __slots__ = ("epoch", "pointers", "seen", "watch")

    def __init__(self) -> None:
        self.pointers: tuple[int, ...] = ()
        self.watch: Watch | None = None
        self.seen: Any = None
        self.epoch: object = None

    def holds(self, arrays: Sequence[Any]) -> bool:
        """Returns true if the packed tensors are up to date."""
        return self.epoch is _SHARED.epoch and self.watch is not None and self.watch.seen(arrays) == self.seen


class Bound:
    """A loaded plan and the addresses of a call: queues its kernels once the packed tensors are up to date."""

    __slots__ = ("_addresses", "_form", "_last", "_packing", "_read", "_run", "_whole")

    def __init__(self, packing: Packing, addresses: tuple[int, ...], run: Run, form: Any) -> None:
        self._packing, self._addresses, self._run, self._form = packing, addresses, run, form
        self._last = packing.last(addresses)
        self._whole: tuple[int, ...] = ()
        self._read: tuple[int, ...] | None = None  # the packed tensors among these

    def __call__(self, arrays: Sequence[Any], stream: int) -> None:
        """Queues the kernels for the call's inputs, which are at the addresses that this was made with."""
        packing, last = self._packing, self._last
        given = packing.parameters(arrays)
        packing.calls += 1
        if not last.holds(given):
            if not packing.renew(last, given, self._addresses, stream):
                without = packing.give_up()
                assert without is not None  # the executable, which is being called
                without(self._form)(self._addresses, stream)
                return
        elif packing.packer.is_capturing(stream):
            packing.pin(given)
        pointers, addresses = last.pointers, self._addresses
        if self._read is not pointers:
            self._whole = (*addresses[: packing.inputs], *pointers, *addresses[packing.inputs :])
            self._read = pointers
        self._run(self._whole, stream)


def _picked(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Returns a function that returns the values at some places of a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[n] for n in places])


def _reference(array: Any, gone: Callable[[object], None]) -> Callable[[], Any]:
    """Returns a weak reference, or one that keeps arrays which have none."""
    try:
        return ref(array, gone)
    except TypeError:
        return lambda: array
