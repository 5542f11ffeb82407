"""Outputs that are only partly written: in a ragged tensor, cuDNN leaves alone what belongs to no sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusegraph.engines.base import Executable
from fusegraph.graph import Graph, Tensor
from fusegraph.layout import extent
from fusegraph.runtime import driver
from fusegraph.runtime.arrays import Device, DeviceArray, allocator

#: (output, CUDA ordinal) -> the compiled graph that selects between new and old rows.
Selects = dict[tuple[Tensor, int], Executable]


class Put:
    """Receives those outputs of a call that must be written only in part, and copies the right rows to their places.

    owned    such an output -> the output that says which of its rows are to be written.
    selects  what `_select` compiled, kept from call to call.
    """

    def __init__(self, owned: Mapping[Tensor, Tensor], selects: Selects, device: Device, stream: int) -> None:
        self._owned, self._selects, self._device, self._stream = owned, selects, device, stream
        self._made: dict[Tensor, Any] = {}

    def instead(self, tensor: Tensor, arrays: dict[Tensor, Any]) -> Any:
        """Returns the array that the kernels write an output to: the given one, or a new one in its place."""
        if tensor in arrays and tensor not in self._owned:
            return arrays[tensor]
        self._made[tensor] = self._empty(tensor)
        return self._made[tensor]

    def done(self, arrays: dict[Tensor, Any]) -> None:
        """Copies the rows that are to be written to the given arrays, one output after the other.

        The order matters because rows of several outputs may alternate in memory.
        """
        for tensor, owned in self._owned.items():
            target, values, which = arrays[tensor], self._made[tensor], self._made[owned]
            if not self._device.is_cuda:
                np.copyto(target, values, where=which)
            elif values.shape[0]:
                self._on_device(tensor, target, values, which)

    def _empty(self, tensor: Tensor) -> Any:
        """Returns a new array of a tensor's shape, strides and dtype."""
        return allocator("numpy", tensor.shape, tensor.strides, tensor.dtype, self._device, stream=self._stream)()

    def _on_device(self, tensor: Tensor, target: DeviceArray, values: Any, which: Any) -> None:
        nbytes = extent(tensor.shape, tensor.strides) * tensor.dtype.itemsize
        index, stream, merged = self._device.index, self._stream, self._empty(tensor)
        driver.copy_on_device(merged.pointer, target.pointer, nbytes, index, stream)  # keeps what lies between rows
        _select(self._selects, tensor, index)(values, target, which, out=merged, stream=stream)
        driver.copy_on_device(target.pointer, merged.pointer, nbytes, index, stream)


def _select(selects: Selects, tensor: Tensor, index: int) -> Executable:
    """Returns the compiled graph that selects each row of an output: the new one if it is to be written, or the old."""
    if (tensor, index) not in selects:
        how = Graph(f"rows of {tensor.graph.name}"[:180])
        new, old = (how.tensor(n, tensor.shape, tensor.dtype, strides=tensor.strides) for n in ("new", "old"))
        chosen = how.binary_select(new, old, how.tensor("which", (tensor.shape[0], 1), "bool"))
        how.output(chosen, strides=tensor.strides)
        selects[tensor, index] = how.compile("cuda", device=index)
    return selects[tensor, index]
