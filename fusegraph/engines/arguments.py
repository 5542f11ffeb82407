"""Turns the arrays given to an Executable into checked pointers.

`frameworks` handles the arrays of most calls; this module handles all others.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusegraph.dtypes import uint8
from fusegraph.engines.in_place import Pairs
from fusegraph.errors import ArgumentError, DeviceError
from fusegraph.graph import Graph, Tensor
from fusegraph.layout import extent, same_strides
from fusegraph.runtime.arrays import Device, refuse_gradient, view
from fusegraph.runtime.packed import pack, unpack
from fusegraph.runtime.strides import NDArray, share_memory

#: How many answers to "do these two arrays overlap?" are remembered.
MOST_KNOWN = 1024


class Argument:
    """What the array given for one input or output of a compiled graph must be; bytes for packed elements."""

    def __init__(self, tensor: Tensor, role: str, engine: str, device: Device, *, assigned: bool = False) -> None:
        self.name, self.shape, self.strides, self.dtype = tensor.name, tensor.shape, tensor.strides, tensor.dtype
        self.nbytes = tensor.dtype.nbytes(extent(tensor.shape, tensor.strides))
        self.what = f"{role} {tensor.name!r} of graph {tensor.graph.name!r}"
        if tensor.dtype.is_packed:
            self.shape, self.strides, self.dtype = (self.nbytes,), (1,), uint8
            self.what += f", {tensor.dtype} {list(tensor.shape)} packed in bytes,"
        self.pattern = self.shape, self.strides, self.dtype.itemsize
        self._is_output = role == "output"
        self.written = assigned or self._is_output
        self._engine, self._device = engine, device

    def same_elements(self, other: Argument) -> bool:
        """Tells whether all elements of both coincide in memory once their first elements do."""
        alike = (self.shape, self.dtype) == (other.shape, other.dtype)
        return alike and same_strides(self.shape, self.strides, other.strides)

    def pointer(self, array: Any, stream: int, keep: list[Any]) -> int:
        """Returns the address of an array's first element, after checking it.

        ``stream`` is the one that will use the array.  What must stay alive during the call is appended to ``keep``.
        Raises ArgumentError, or DeviceError for an array on another device.
        """
        seen = view(array, name=self.name, stream=stream)
        refuse_gradient(array, self.name)
        if seen.device != self._device:
            here = f"array, {self._device.index}" if self._device.index else "array"
            hint = f"copy it with fusegraph.to_device({here})" if self._device.is_cuda else "copy it to the CPU"
            raise DeviceError(
                f"{self.what} is on {seen.device}, but engine {self._engine!r} runs on {self._device}; {hint}"
            )
        if tuple(seen.shape) != self.shape:
            raise ArgumentError(f"{self.what} has shape {list(seen.shape)}, the graph was built for {list(self.shape)}")
        if seen.dtype != self.dtype:
            raise ArgumentError(f"{self.what} has dtype {seen.dtype}, the graph was built for {self.dtype}")
        if not same_strides(self.shape, seen.strides, self.strides):
            raise ArgumentError(
                f"{self.what} has strides {list(seen.strides)} (elements), the graph was built for "
                f"{list(self.strides)}; copy the array to that layout, or give tensor() the array's strides"
            )
        if seen.readonly and self.written:
            raise ArgumentError(f"{self.what} is read-only{'' if self._is_output else ', and calls write to it'}")
        keep.append(seen)
        return seen.pointer


class Overlaps:
    """Finds arguments of a graph that share memory.

    An output must be disjoint from other outputs, and either disjoint from an input or exactly in its place.  An input
    that is assigned to must be disjoint from all others.  Answers are remembered by the distance between the two
    addresses.
    """

    def __init__(self, inputs: Sequence[Argument], outputs: Sequence[Argument]) -> None:
        self._arguments, self._inputs = [*inputs, *outputs], len(inputs)
        self._assigned = any(argument.written for argument in inputs)
        #: (first, second, low, high): their ranges meet if low < address of the first - address of the second < high
        self._near = [
            (first, second, -self._arguments[first].nbytes, self._arguments[second].nbytes)
            for second in range(len(inputs), len(self._arguments))
            for first in range(second)
        ]
        self._known: dict[tuple[int, int, int], bool | None] = {}
        self._apart: set[tuple[int, ...]] = set()  # addresses of inputs that were checked

    def check_inputs(self, addresses: Sequence[int]) -> None:
        """Raises ArgumentError if an input that is assigned to shares memory with another input."""
        given = tuple(addresses[: self._inputs])
        if not self._assigned or given in self._apart:
            return
        ranges = sorted((start, start + a.nbytes, n) for n, (start, a) in enumerate(zip(given, self._arguments)))
        end, near = 0, False
        for start, stop, _ in ranges:
            near = near or start < end
            end = max(end, stop)
        for second in range(self._inputs) if near else ():
            for first in range(second):
                one, other = self._arguments[first], self._arguments[second]
                apart = given[first] - given[second]
                close = (one.written or other.written) and -one.nbytes < apart < other.nbytes
                if close and self._meet(first, second, apart):
                    raise self._overlap(first, second)
        if len(self._apart) >= MOST_KNOWN:
            self._apart.clear()
        self._apart.add(given)

    def found(self, addresses: Sequence[int]) -> Pairs:
        """Returns (number of the input, number of the output) for each output that lies in the memory of an input.

        The two have the same shape, strides and dtype.  Raises ArgumentError for any other overlap of an output.
        """
        pairs = set()
        for first, second, low, high in self._near:
            apart = addresses[first] - addresses[second]
            if low < apart < high and self._meet(first, second, apart):
                one, other = self._arguments[first], self._arguments[second]
                if apart or one.written or not one.same_elements(other):
                    raise self._overlap(first, second)
                pairs.add((first, second - self._inputs))
        return frozenset(pairs)

    def _overlap(self, first: int, second: int) -> ArgumentError:
        return ArgumentError(
            f"{self._arguments[second].what} overlaps {self._arguments[first].what} in memory; "
            "kernels read and write in no particular order, so give another array"
        )

    def in_place(self, pairs: Pairs, reason: str) -> ArgumentError:
        """Returns the error for outputs that cannot lie in the memory of inputs."""
        given, made = min(pairs)
        target, source = self._arguments[self._inputs + made], self._arguments[given]
        return ArgumentError(f"{target.what} overlaps {source.what} in memory: {reason}; give another array")

    def _meet(self, first: int, second: int, apart: int) -> bool:
        """Tells whether two arguments have a byte in common; ``apart`` is the first address minus the second."""
        key = first, second, apart
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = share_memory(self._arguments[first].pattern, self._arguments[second].pattern, apart)
        answer = self._known[key]
        if answer is None:
            raise ArgumentError(
                f"whether {self._arguments[second].what} overlaps {self._arguments[first].what} in memory takes too "
                f"long to find out: their strides are {list(self._arguments[second].strides)} and "
                f"{list(self._arguments[first].strides)}; give arrays whose ranges of addresses are apart"
            )
        return answer


def bind(graph: Graph, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns one array per input from positional and named arguments.

    Raises ArgumentError for missing and extra ones.
    """
    names = [t.name for t in graph.inputs]
    if len(args) > len(names):
        raise ArgumentError(f"graph {graph.name!r} takes {len(names)} arrays ({', '.join(names)}), got {len(args)}")
    values = dict(zip(names, args))
    for name, array in named.items():
        if name not in names:
            raise ArgumentError(f"graph {graph.name!r} has no input {name!r}; it has {', '.join(names) or 'none'}")
        if name in values:
            raise ArgumentError(f"input {name!r} of graph {graph.name!r} was given twice")
        values[name] = array
    missing = [name for name in names if name not in values]
    if missing:
        raise ArgumentError(f"graph {graph.name!r} needs {', '.join(map(repr, missing))}")
    return tuple([values[name] for name in names])


def bind_outputs(graph: Graph, out: Any) -> tuple[Any, ...]:
    """Returns one array per output from ``out=``: an array, a tuple, a list, or a mapping by name."""
    names = [t.name for t in graph.made]
    if isinstance(out, Mapping):
        if set(out) != set(names):
            raise ArgumentError(f"out= of graph {graph.name!r} has one array for each of {names}, got {list(out)}")
        return tuple([out[name] for name in names])
    arrays = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    if len(arrays) != len(names):
        raise ArgumentError(f"graph {graph.name!r} has {len(names)} outputs {names}, out= has {len(arrays)}")
    return arrays


def with_own_memory(graph: Graph, results: Any) -> tuple[Any, ...]:
    """Returns those results of a call that can be given to the next one in ``out=``: all that lie in no input."""
    every = results if isinstance(results, tuple) else (results,)
    return tuple([x for t, x in zip(graph.results, every) if t not in graph.updates])


#: torch's dtypes of elements that are packed: DLPack has no word for some, and none of them in bytes.
_TORCH = ("torch.float8_e8m0fnu", "torch.float4_e2m1fn_x2")


def as_bytes(tensor: Tensor, array: Any, *, written: bool = False) -> Any:
    """Returns what a kernel takes in place of an array: for packed elements their contiguous bytes.

    An array in the dtype's NumPy type is packed into new bytes; the caller unpacks them again if the array is to be
    ``written``.  Other arrays are left to the usual checks.  Raises ArgumentError for a wrong shape or a read-only
    output.
    """
    if not tensor.dtype.is_packed:
        return array
    if isinstance(array, np.ndarray) and array.dtype == tensor.dtype.numpy:
        if array.shape != tensor.shape:
            raise ArgumentError(
                f"{tensor.name!r} of graph {tensor.graph.name!r} has shape {list(array.shape)}, "
                f"the graph was built for {list(tensor.shape)}"
            )
        if written and not array.flags.writeable:
            raise ArgumentError(f"output {tensor.name!r} of graph {tensor.graph.name!r} is read-only")
        return pack(array, tensor.dtype, tensor.strides)
    if isinstance(array, np.ndarray):
        return array.reshape(-1) if array.flags.c_contiguous else array
    if str(getattr(array, "dtype", "")) in _TORCH:
        array = array.view(sys.modules["torch"].uint8)
        if tensor.dtype.bits == 8 and array.shape == tensor.shape:
            as_declared = same_strides(tensor.shape, array.stride(), tensor.strides)
            return array.as_strided((extent(tensor.shape, tensor.strides),), (1,)) if as_declared else array
    contiguous = getattr(array, "is_contiguous", None)  # torch's
    return array.reshape(-1) if contiguous is not None and contiguous() else array


def as_values(tensor: Tensor, array: NDArray) -> NDArray:
    """Returns the result for a tensor in the dtype's NumPy type; packed bytes are unpacked."""
    if not tensor.dtype.is_packed or array.dtype == tensor.dtype.numpy:
        return array
    return unpack(array, tensor.dtype, tensor.shape, tensor.strides)
