"""Arrays given to an Executable: from whatever the caller has to checked pointers.

`frameworks` recognises the arrays of most calls; what comes here is everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from fusegraph.dtypes import uint8
from fusegraph.errors import ArgumentError, DeviceError
from fusegraph.graph import Graph, Tensor
from fusegraph.layout import extent, same_strides
from fusegraph.runtime.arrays import Device, view


class Argument:
    """One input or output of a compiled graph, as the arrays given for it must be: bytes for packed elements."""

    def __init__(self, tensor: Tensor, role: str, engine: str, device: Device) -> None:
        self.name, self.shape, self.strides, self.dtype = tensor.name, tensor.shape, tensor.strides, tensor.dtype
        self.nbytes = tensor.dtype.nbytes(extent(tensor.shape, tensor.strides))
        self.what = f"{role} {tensor.name!r} of graph {tensor.graph.name!r}"
        if tensor.dtype.is_packed:
            self.shape, self.strides, self.dtype = (self.nbytes,), (1,), uint8
            self.what += f", {tensor.dtype} {list(tensor.shape)} packed in bytes,"
        self._role, self._engine, self._device = role, engine, device

    def pointer(self, array: Any, stream: int, keep: list[Any]) -> int:
        """The address of an array's first element, after checking it.

        ``stream`` will use the array.  What must stay alive during the call is appended to ``keep``.  Raises
        ArgumentError or DeviceError.
        """
        seen = view(array, name=self.name, stream=stream)
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
        if seen.readonly and self._role == "output":
            raise ArgumentError(f"{self.what} is read-only")
        keep.append(seen)
        return seen.pointer


def exclusive_pairs(inputs: Sequence[Argument], outputs: Sequence[Argument]) -> list[tuple[int, int, int, int]]:
    """(first, second, low, high) for every two arguments, inputs before outputs, that may not share memory: an output
    and anything else.  They do if low < address of the first - address of the second < high."""
    arguments = [*inputs, *outputs]
    return [
        (first, second, -arguments[first].nbytes, arguments[second].nbytes)
        for second in range(len(inputs), len(arguments))
        for first in range(second)
    ]


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


def bind(graph: Graph, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
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
    return tuple([values[name] for name in names])


def bind_outputs(graph: Graph, out: Any) -> tuple[Any, ...]:
    """One array an output from ``out=``: an array, a sequence, or a mapping by name."""
    names = [t.name for t in graph.outputs]
    if isinstance(out, Mapping):
        if set(out) != set(names):
            raise ArgumentError(f"out= of graph {graph.name!r} has one array for each of {names}, got {list(out)}")
        return tuple([out[name] for name in names])
    arrays = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    if len(arrays) != len(names):
        raise ArgumentError(f"graph {graph.name!r} has {len(names)} outputs {names}, out= has {len(arrays)}")
    return arrays
