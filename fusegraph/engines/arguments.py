"""Arrays given to an Executable: from whatever the caller has to checked pointers.

This is on the path of every call.  Torch and CuPy arrays that are exactly as the graph declares them are recognised
by a function made once for each argument and type; everything else goes through a view and its checks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from fusegraph.errors import ArgumentError, DeviceError
from fusegraph.graph import Graph, Tensor
from fusegraph.layout import extent, same_strides
from fusegraph.runtime.arrays import Device, torch_dtype, view

#: (array) -> its address, or -1 if it is not exactly as declared.
Reader = Callable[[Any], int]


class Argument:
    """One input or output of a compiled graph, as the arrays given for it must be."""

    def __init__(self, tensor: Tensor, role: str, engine: str, device: Device) -> None:
        self.name, self.shape, self.strides, self.dtype = tensor.name, tensor.shape, tensor.strides, tensor.dtype
        self.nbytes = extent(tensor.shape, tensor.strides) * tensor.dtype.itemsize
        self.what = f"{role} {tensor.name!r} of graph {tensor.graph.name!r}"
        self._role, self._engine, self._device = role, engine, device
        self._readers: dict[type, Reader] = {}

    def pointer(self, array: Any, stream: int, keep: list[Any]) -> int:
        """The address of an array's first element, after checking it.

        ``stream`` will use the array.  What must stay alive during the call is appended to ``keep``.  Raises
        ArgumentError or DeviceError.
        """
        address = self.reader(type(array))(array)
        if address >= 0:
            return address
        seen = view(array, name=self.name, stream=stream)
        if seen.device != self._device:
            hint = "copy it with fusegraph.to_device(array)" if self._device.is_cuda else "copy it to the CPU"
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
        if seen.readonly and self._role == "output":
            raise ArgumentError(f"{self.what} is read-only")
        keep.append(seen)
        return seen.pointer

    def reader(self, kind: type) -> Reader:
        """A function that recognises arrays of a type at once; for most types one that never does."""
        found = self._readers.get(kind)
        if found is None:
            package = kind.__module__.partition(".")[0]
            found = _unrecognised
            if kind.__name__ in ("Tensor", "Parameter") and package == "torch":
                found = self._torch_reader(sys.modules["torch"])
            elif kind.__name__ == "ndarray" and package == "cupy" and self._device.is_cuda:
                found = self._cupy_reader()
            self._readers[kind] = found
        return found

    def _torch_reader(self, torch: Any) -> Reader:
        shape, strides, dtype = self.shape, self.strides, torch_dtype(torch, self.dtype)
        mask = self.dtype.itemsize - 1
        device = torch.device("cuda", self._device.index) if self._device.is_cuda else torch.device("cpu")

        def read(x: Any) -> int:
            if (
                x.dtype is dtype
                and x.shape == shape
                and x.device == device
                and x.stride() == strides
                and not x.is_neg()
            ):
                address: int = x.data_ptr()
                return address if address and not address & mask else -1
            return -1

        return read

    def _cupy_reader(self) -> Reader:
        shape, dtype, index = self.shape, self.dtype.numpy, self._device.index
        strides = tuple(s * self.dtype.itemsize for s in self.strides)
        mask = self.dtype.itemsize - 1

        def read(x: Any) -> int:
            if x.shape == shape and x.dtype == dtype and x.strides == strides:
                memory = x.data
                address: int = memory.ptr
                return address if memory.device_id == index and not address & mask else -1
            return -1

        return read


def _unrecognised(_: Any) -> int:
    return -1


def check_overlaps(
    inputs: Sequence[Argument], read: Sequence[int], outputs: Sequence[Argument], written: Sequence[int]
) -> None:
    """Raises ArgumentError if the memory of an output is that of an input or of another output too."""
    for number, (output, address) in enumerate(zip(outputs, written)):
        end = address + output.nbytes
        others = zip(inputs, read) if number == 0 else chain(zip(inputs, read), zip(outputs[:number], written))
        for other, start in others:
            if start < end and address < start + other.nbytes:
                raise ArgumentError(
                    f"{output.what} overlaps {other.what} in memory; "
                    "kernels read and write in no particular order, so give another array"
                )


def bind(graph: Graph, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """One array an input from positional and named arguments.  Raises ArgumentError for missing and extra ones."""
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
    return [values[name] for name in names]


def bind_outputs(graph: Graph, out: Any) -> list[Any]:
    """One array an output from ``out=``: an array, a sequence, or a mapping by name."""
    names = [t.name for t in graph.outputs]
    if isinstance(out, Mapping):
        if set(out) != set(names):
            raise ArgumentError(f"out= of graph {graph.name!r} has one array for each of {names}, got {list(out)}")
        return [out[name] for name in names]
    arrays = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(arrays) != len(names):
        raise ArgumentError(f"graph {graph.name!r} has {len(names)} outputs {names}, out= has {len(arrays)}")
    return arrays
