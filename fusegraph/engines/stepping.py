"""A plan's kernels run one by one, in the memory of a call, with every tensor in it legible between them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fusegraph.engines.base import NOTHING, Executable
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.engines.slots import Slots
from fusegraph.errors import NotSupportedError
from fusegraph.graph import Tensor
from fusegraph.layout import extent
from fusegraph.ops.base import Array
from fusegraph.passes.memory import ALIGNMENT
from fusegraph.plan import Plan
from fusegraph.runtime import driver
from fusegraph.runtime.packed import pack, unpack


class Steps:
    """The kernels of one call, for which ``launch`` runs a kernel on given addresses of its arguments.

    inputs  the bytes of the partitioned graph's inputs, by name; the call has copies of them.
    """

    def __init__(
        self, plan: Plan, inputs: Mapping[str, Array], launch: Callable[[int, Sequence[int]], None], device: int | None
    ) -> None:
        """``device`` is the ordinal of a GPU, None for memory of the host."""
        self.plan, self._launch, self._device = plan, launch, device
        self._slots, self._held = Slots(plan), list[Any]()
        graph = plan.simplified
        given = [self._memory(inputs[t.name].size, inputs[t.name]) for t in graph.inputs]
        made = [self._memory(_nbytes(t)) for t in graph.made]
        constants = [self._memory(_nbytes(t), _bytes(t, t.value)) for t in plan.constants]
        workspace = self._memory(plan.memory.size)
        self._pointers = self._slots.pointers(given, made, constants, workspace)

    def run(self, number: int) -> None:
        """Runs a kernel, and waits for it."""
        self.launch(number)
        if self._device is not None:
            driver.synchronize(0, self._device)

    def launch(self, number: int) -> None:
        """Queues a kernel, if there is anything for it to do."""
        if 0 not in self.plan.kernels[number].source.grid:
            self._launch(number, self.arguments(number))

    def arguments(self, number: int) -> list[int]:
        """Returns the addresses that a kernel takes."""
        return [self._pointers[k] for k in self._slots.positions(self.plan.kernels[number].arguments)]

    def bytes_of(self, tensor: Tensor) -> Array:
        """Returns a copy of what a tensor's memory holds now, from its first element to its last."""
        address = self._pointers[self._slots.positions((tensor.base,))[0]] + tensor.start * tensor.dtype.itemsize
        count = extent(tensor.shape, tensor.strides)
        raw = np.empty(tensor.dtype.nbytes(count), np.uint8)
        if raw.size and self._device is not None:
            driver.copy_to_host(raw.ctypes.data, address, raw.size, self._device)
        elif raw.size:
            ctypes.memmove(raw.ctypes.data, address, raw.size)
        return raw

    def value(self, tensor: Tensor) -> Array:
        """Returns the same as an array of the tensor's shape, in the NumPy type of its dtype."""
        raw = self.bytes_of(tensor)
        if tensor.dtype.is_packed:
            return unpack(raw, tensor.dtype, tensor.shape, tensor.strides)
        steps = tuple(s * tensor.dtype.itemsize for s in tensor.strides)
        return np.array(np.ndarray(tensor.shape, tensor.dtype.numpy, raw, strides=steps))

    def _memory(self, nbytes: int, contents: Array | None = None) -> int:
        """Returns the address of new memory; without contents it holds NaN patterns."""
        if self._device is not None:
            buffer = driver.allocate(max(nbytes, 1), self._device)
            self._held.append(buffer)
            if contents is None:
                driver.memset(buffer.pointer, 0xFF, nbytes, self._device)
            elif nbytes:
                driver.copy_to_device(buffer.pointer, contents.ctypes.data, nbytes, self._device)
            return buffer.pointer
        raw = np.full(nbytes + ALIGNMENT, 0xFF, np.uint8)
        self._held.append(raw)
        start = -raw.ctypes.data % ALIGNMENT
        if contents is not None:
            raw[start : start + nbytes] = contents
        return int(raw.ctypes.data) + start


def steps_of(executable: Executable, inputs: Mapping[str, Array]) -> Iterator[Steps]:
    """Yields the steps of a call: those that make packed tensors, if there are any, and then the call's own.

    The second needs the results of the first, so its memory is made when the first one's kernels have run.  Raises
    NotSupportedError for engines without kernels.
    """
    launches = _launches(executable)
    plan = executable.plan
    assert plan is not None
    given = {t.name: _bytes(t, inputs[t.name]) for t in executable.graph.inputs}
    if plan.packing is not None:
        count = len(plan.kernels)
        packing = Steps(plan.packing, given, lambda k, pointers: launches(count + k, pointers), _ordinal(executable))
        yield packing
        given |= {t.name: packing.bytes_of(t) for t in plan.packing.simplified.outputs}
    yield Steps(plan, given, launches, _ordinal(executable))


def _ordinal(executable: Executable) -> int | None:
    return executable.device.index if executable.device.is_cuda else None


def _launches(executable: Executable) -> Callable[[int, Sequence[int]], None]:
    """Returns a function that runs a kernel of an executable, those of its packing behind the others."""
    from fusegraph.engines.cuda import CudaExecutable

    if isinstance(executable, CpuExecutable):
        built = executable._variant_for(0, NOTHING)
        sources = [k.source for k in built.plan.every_kernel]
        numbers = [*built.kernels, *range(len(built.plan.kernels), len(sources))]

        def launch(number: int, pointers: Sequence[int]) -> None:
            built.module.launch(numbers[number], list(pointers), order=executable.order, source=sources[number])

        return launch
    if not isinstance(executable, CudaExecutable) or executable.plan is None:
        raise NotSupportedError(f"engine {executable.engine!r} does not run kernels one by one; give cpu or cuda")
    made = executable.launches()

    def queue(number: int, pointers: Sequence[int]) -> None:
        if (one := made[number]) is not None:
            one(pointers)

    return queue


def _bytes(tensor: Tensor, value: Any) -> Array:
    """Returns the bytes that hold a value with the tensor's strides."""
    if tensor.dtype.is_packed:
        return pack(np.asarray(value, tensor.dtype.numpy), tensor.dtype, tensor.strides)
    raw = np.zeros(_nbytes(tensor), np.uint8)
    steps = tuple(s * tensor.dtype.itemsize for s in tensor.strides)
    np.ndarray(tensor.shape, tensor.dtype.numpy, raw, strides=steps)[...] = value
    return raw


def _nbytes(tensor: Tensor) -> int:
    return tensor.dtype.nbytes(extent(tensor.shape, tensor.strides))
