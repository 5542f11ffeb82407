"""Executable: a compiled graph that is called with arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import and_, or_
from typing import Any

import numpy as np

from fusegraph.engines.arguments import Argument, Overlaps, as_bytes, as_values, bind, bind_outputs
from fusegraph.engines.frameworks import Reader, address_of, counter, framework_of, reader
from fusegraph.engines.in_place import Pairs
from fusegraph.graph import Graph
from fusegraph.plan import Plan, check_outputs
from fusegraph.runtime.arrays import Device, allocator, as_stream, hand_over
from fusegraph.runtime.memory import SMALL, check_room, no_room
from fusegraph.runtime.streams import stream_query

#: (addresses of the inputs and outputs, stream): queues the kernels.  Where there may be packed tensors: (arrays of the
#: inputs, stream), for addresses that it knows.
Queue = Callable[[tuple[Any, ...], int], None]

NOTHING: Pairs = frozenset()

_JAX = ("jax", "jaxlib")

#: Of how many calls the checked addresses are remembered: programs use the same few buffers again and again.
_KNOWN = 256


@dataclass(frozen=True, slots=True)
class _Call:
    """What to do in a call whose first array is of some type.

    read_inputs, read   recognize arrays that are as declared: inputs alone; inputs and outputs.
    makers, address_of  an allocator for every output, and the function that reads the address of what it makes; no
                        makers if an output depends on the stream of the call.
    count               tells the framework that arrays have been written; None if it does not ask.
    """

    framework: str
    current_stream: Callable[[int], int]
    read_inputs: Reader
    read: Reader
    makers: tuple[Callable[[], Any], ...]
    address_of: Callable[[Any], int]
    count: Callable[[Sequence[Any]], None] | None


class Executable:
    """A compiled graph.

    Call it with one array per input, in the order of the graph's inputs or by name.  Arrays of NumPy, torch, CuPy, JAX,
    and anything with DLPack or ``__cuda_array_interface__`` are used without copying.  A call returns the output array,
    or a tuple if the graph has several outputs (or none, but new values of inputs), in the framework of the first input
    (NumPy if there are no inputs).  An input that the graph assigns to is written: it may not share memory with another
    array of the call, or be read-only.

    out     an array, a sequence, or a mapping by name to write to instead.  Outputs may not overlap each other or
            inputs, with one exception: an output may lie exactly in the memory of an input of the same shape, strides
            and dtype if no kernel reads the input after it has been overwritten.  New values of inputs, which lie in
            the inputs' memory, are not among them.
    stream  a CUDA stream (default: the framework's current stream).

    Tensors of fewer than 8 bits an element are given as contiguous uint8 arrays of their packed bytes, or as NumPy
    arrays of ml_dtypes' types, which are copied.  Such results are of ml_dtypes' types for callers with NumPy arrays,
    packed bytes for others.

    Raises ArgumentError for missing, extra or unsuitable arrays, and for outputs that may not lie in the memory of
    inputs (the error names the kernel that prevents it); DeviceError for arrays on another device; OutOfMemoryError if
    the host lacks memory for the outputs or for intermediates between kernels.
    """

    engine: str

    def __init__(self, graph: Graph, plan: Plan | None, device: Device) -> None:
        check_outputs(graph)
        self.graph = graph
        self.plan = plan
        #: The device on which the arrays must be.
        self.device = device
        updated = set(graph.updates.values())
        written = updated | graph.donated
        self._inputs = [Argument(t, "input", self.engine, device, assigned=t in written) for t in graph.inputs]
        self._outputs = [Argument(t, "output", self.engine, device) for t in graph.made]
        self._calls: dict[type, _Call] = {}
        self._alignments = [a.dtype.itemsize - 1 for a in (*self._inputs, *self._outputs)]
        self._elements = max(self._alignments, default=0)
        self._overlaps = Overlaps(self._inputs, self._outputs)
        self._prepacks = bool(graph.parameters) or (plan is not None and plan.packing is not None)
        self._packed = any(t.dtype.is_packed for t in (*graph.inputs, *graph.outputs))
        #: For each result that lies in an input's memory, its number, and the input's.
        self._in_inputs = [
            (n, graph.inputs.index(graph.updates[t])) for n, t in enumerate(graph.results) if t in graph.updates
        ]
        #: The inputs that the graph assigns to, as numbers.
        self._assigned = [n for n, t in enumerate(graph.inputs) if t in updated]
        self._names = [t.name for t in graph.inputs]
        self._number, self._single, self._ordinal = len(self._inputs), len(graph.results) == 1, device.index
        #: Checked addresses of a call -> what queues the kernels for them.
        self._known: dict[tuple[int, ...], Queue] = {}

    @property
    def packed_bytes(self) -> int:
        """Bytes that hold what was computed of parameters and constants, for all arrays called with."""
        return 0

    def repack(self) -> None:
        """Says that arrays given for parameters have changed in place: what was computed of them is computed again.

        For torch's tensors that is not necessary, unless they were changed unseen by their version counters, as by
        ``tensor.data`` or by other libraries.  The next call computes it, at the same addresses.
        """

    @property
    def workspace_bytes(self) -> int:
        """Bytes of memory for intermediates between kernels."""
        return self.plan.memory.size if self.plan is not None else 0

    def _run(self, inputs: Sequence[int], outputs: Sequence[int], stream: int, pairs: Pairs) -> None:
        """Computes the outputs at these addresses; everything has been checked.  For engines without `_select`."""
        raise NotImplementedError

    def _select(self, addresses: tuple[int, ...], bits: int, pairs: Pairs) -> Queue | None:
        """Returns what queues the kernels for arrays at addresses, or-ed ``bits``; None leaves it to `_run`."""
        return None

    def _refused(self, bits: int, pairs: Pairs) -> str | None:
        """Returns why these outputs cannot lie in the memory of inputs; None if they can.  ``bits``: see `_select`."""
        return f"engine {self.engine!r} does not say in which order it reads and writes"

    def __call__(self, /, *args: Any, out: Any = None, stream: Any = None, **named: Any) -> Any:
        arrays = self._bind(args, named) if named or len(args) != self._number else args
        if self._packed:
            return self._call_packed(arrays, out, stream)
        kind = type(arrays[0]) if arrays else _kind_of(out)
        call = self._calls.get(kind) or self._prepare(kind)
        handle = call.current_stream(self._ordinal) if stream is None else as_stream(stream)
        # A fast path for the most common call: one output, which is given, and addresses that were checked before.
        if type(out) is kind and self._single and not self._assigned:
            addresses = call.read((*arrays, out), handle)
            if addresses is not None:
                queue = self._known.get(addresses)
                if queue is not None:
                    queue(arrays if self._prepacks else addresses, handle)
                    self._count(call, arrays, (out,))
                    return out
        results = self._results(call, arrays, out, handle)
        self._count(call, arrays, results if out is not None else ())
        if self._in_inputs:
            results = self._with_inputs(results, arrays)
        return results[0] if self._single else results

    def consume(self, arrays: list[Any]) -> Any:
        """Calls with the inputs in a list, and empties it: the graph may give donated ones back before it has ended."""
        results = self(*arrays)
        arrays.clear()
        return results

    def _read(self, arrays: Sequence[Any]) -> tuple[_Call, int, tuple[int, ...] | None]:
        """Returns what to do with inputs, the stream, and their addresses; no addresses if `__call__` has to look."""
        kind = type(arrays[0])
        call = self._calls.get(kind) or self._prepare(kind)
        stream = call.current_stream(self._ordinal)
        plain = not (self._packed or self._prepacks or self._assigned)
        addresses = call.read_inputs(tuple(arrays), stream) if plain else None
        if addresses is None or not self._may_queue(addresses, reduce(or_, addresses, 0)):
            return call, stream, None
        self._overlaps.check_inputs(addresses)
        return call, stream, addresses

    def _may_queue(self, addresses: tuple[int, ...], bits: int) -> bool:
        """Tells whether no address, or-ed ``bits``, is null or misaligned."""
        return 0 not in addresses and not (bits & self._elements and any(map(and_, addresses, self._alignments)))

    def _call_packed(self, arrays: tuple[Any, ...], out: Any, stream: Any) -> Any:
        """Calls a graph with elements of fewer than 8 bits, which are given as bytes or as NumPy arrays."""
        inputs, outputs = self.graph.inputs, self.graph.made
        given = tuple(as_bytes(t, x) for t, x in zip(inputs, arrays))
        results = None if out is None else bind_outputs(self.graph, out)
        written = None if results is None else tuple(as_bytes(t, x, written=True) for t, x in zip(outputs, results))
        kind = type(given[0]) if given else _kind_of(out)
        call = self._calls.get(kind) or self._prepare(kind)
        handle = call.current_stream(self._ordinal) if stream is None else as_stream(stream)
        found = self._results(call, given, written, handle)
        if results is None:
            numpy = call.framework == "numpy"
            results = tuple(as_values(t, x) if numpy else x for t, x in zip(outputs, found))
        else:
            for tensor, x, made in zip(outputs, results, found):
                if x is not made and isinstance(x, np.ndarray) and x.dtype == tensor.dtype.numpy:
                    x[...] = as_values(tensor, made)
        self._count(call, arrays, results if out is not None else ())
        results = self._with_inputs(results, arrays)
        return results[0] if self._single else results

    def _results(self, call: _Call, arrays: tuple[Any, ...], out: Any, stream: int) -> tuple[Any, ...]:
        """Runs the kernels and returns the outputs; ``out`` as in a call."""
        results: tuple[Any, ...]
        if out is not None:
            results = bind_outputs(self.graph, out)
            addresses = call.read((*arrays, *results), stream)
        elif (call.makers or not self._outputs) and (addresses := call.read_inputs(arrays, stream)) is not None:
            results = tuple([make() for make in call.makers])
            addresses += tuple([call.address_of(x) for x in results])
        else:
            addresses = None
        if addresses is None:
            return self._look_and_run(call, arrays, out, stream)
        queue = self._known.get(addresses)
        if queue is not None:
            queue(arrays if self._prepacks else addresses, stream)
        elif not self._queue(arrays, addresses, stream, given=out is not None):
            return self._look_and_run(call, arrays, out, stream)
        return results

    def _count(self, call: _Call, arrays: Sequence[Any], given: Sequence[Any]) -> None:
        """Tells the framework that inputs that the graph assigns to, and ``given`` outputs, have been written."""
        if call.count is not None and (self._assigned or given):
            call.count([*(arrays[n] for n in self._assigned), *given])

    def _with_inputs(self, made: tuple[Any, ...], arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the results of a call: those that were made, and inputs among them."""
        results = list(made)
        for number, given in self._in_inputs:
            results.insert(number, arrays[given])
        return tuple(results)

    def _bind(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Returns one array per input.  Raises ArgumentError."""
        if len(args) + len(named) == len(self._names):
            try:
                return args + tuple([named[name] for name in self._names[len(args) :]])
            except KeyError:
                pass
        return bind(self.graph, args, named)

    def _queue(self, arrays: tuple[Any, ...], addresses: tuple[int, ...], stream: int, given: bool) -> bool:
        """Starts the computation; returns False, having done nothing, if an address is null or misaligned.

        Outputs that are not ``given`` were just allocated and overlap nothing.  The checks depend on the addresses
        alone, so addresses that passed once need no check in later calls.  Raises ArgumentError for an overlap.
        """
        bits = reduce(or_, addresses, 0)
        if not self._may_queue(addresses, bits):
            return False
        self._overlaps.check_inputs(addresses)
        pairs = self._found_in_place(addresses, bits) if given else NOTHING
        queue = self._select(addresses, bits, pairs)
        if queue is not None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[addresses] = queue
        self._start(queue, arrays, addresses, stream, pairs)
        return True

    def _found_in_place(self, addresses: tuple[int, ...], bits: int) -> Pairs:
        """Returns which outputs lie in the memory of which inputs.  Raises ArgumentError for a forbidden overlap."""
        pairs = self._overlaps.found(addresses)
        if pairs and (reason := self._refused(bits, pairs)) is not None:
            raise self._overlaps.in_place(pairs, reason)
        return pairs

    def _start(
        self, queue: Queue | None, arrays: tuple[Any, ...], addresses: tuple[int, ...], stream: int, pairs: Pairs
    ) -> None:
        if queue is not None:
            queue(arrays if self._prepacks else addresses, stream)
        else:
            inputs = len(self._inputs)
            self._run(addresses[:inputs], addresses[inputs:], stream, pairs)

    def _look_and_run(self, call: _Call, arrays: tuple[Any, ...], out: Any, stream: int) -> tuple[Any, ...]:
        """Handles a call with any arrays: checks each of them, raises an error that says what is wrong, or computes."""
        keep: list[Any] = []
        inputs = [argument.pointer(x, stream, keep) for argument, x in zip(self._inputs, arrays)]
        if out is None:
            results = tuple([make() for make in call.makers or self._allocators(call.framework, stream)])
        else:
            results = bind_outputs(self.graph, out)
        outputs = [argument.pointer(x, stream, keep) for argument, x in zip(self._outputs, results)]
        addresses = (*inputs, *outputs)
        bits = reduce(or_, addresses, 0)
        self._overlaps.check_inputs(addresses)
        pairs = self._found_in_place(addresses, bits) if out is not None else NOTHING
        self._start(self._select(addresses, bits, pairs), arrays, addresses, stream, pairs)
        return tuple([hand_over(x, "jax") for x in results]) if out is None and call.framework in _JAX else results

    def _prepare(self, kind: type) -> _Call:
        """Makes and remembers the _Call for calls whose first array is of type ``kind``."""
        framework = framework_of(kind)
        any_stream = framework in ("torch", "cupy") or not self.device.is_cuda
        call = self._calls[kind] = _Call(
            framework,
            stream_query(framework) if self.device.is_cuda else _no_stream,
            reader(framework, self._inputs, self.device),
            reader(framework, [*self._inputs, *self._outputs], self.device),
            self._allocators(framework, 0) if any_stream else (),
            address_of(framework),
            counter(framework),
        )
        return call

    def _allocators(self, framework: str, stream: int) -> tuple[Callable[[], Any], ...]:
        """Returns for each output a function that makes an array in the caller's framework."""
        makers = []
        for a in self._outputs:
            make = allocator(framework, a.shape, a.strides, a.dtype, self.device, stream=stream)
            makers.append(make if self.device.is_cuda or a.nbytes <= SMALL else partial(_made, make, a))
        return tuple(makers)


def _made(make: Callable[[], Any], output: Argument) -> Any:
    """Makes a large array on the host.  Raises OutOfMemoryError."""
    check_room(output.nbytes, f"{output.what}, {output.dtype} {list(output.shape)},")
    try:
        return make()
    except MemoryError:
        raise no_room(output.nbytes, f"{output.what}, {output.dtype} {list(output.shape)},") from None


def _kind_of(out: Any) -> type:
    """Returns the type of the first array in ``out=`` of a graph without inputs; NumPy's if none is given."""
    given = list(out.values()) if isinstance(out, Mapping) else out if isinstance(out, list | tuple) else [out]
    return type(given[0]) if given and given[0] is not None else np.ndarray


def _no_stream(_: int) -> int:
    return 0
