"""Compiled kernels on the GPU.

Module is a loaded cubin, Function one kernel, Launch a kernel with its grid, LaunchSequence several launches.

A LaunchSequence prepares at construction all that does not change from call to call.  A call writes the addresses that
have changed into argument memory that is already laid out, and enters the driver once for each kernel; or once for all
of them, if it has seen the same addresses before.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from math import prod
from typing import Any

from codegen.spec import KernelSource, Scalar, TensorMap
from fusegraph.errors import ArgumentError, DeviceError
from fusegraph.runtime import driver, tensor_map
from fusegraph.runtime.entry_points import context_test
from fusegraph.runtime.replay import Replay, record

_DEFAULT_SHARED = 48 * 1024  # shared memory a block may use without asking for more
_MAX_GRID = (2**31 - 1, 65535, 65535)
_SCALARS = {"int32": ctypes.c_int32, "int64": ctypes.c_int64}
_PORTABLE_CLUSTER = 8  # cluster size in blocks that every GPU with clusters supports

#: Blocks that start early are spread over a GPU if that makes at most so many for each multiprocessor.
_SPREAD = 2
#: Kernels from which on a sequence is recorded as a CUDA graph, at the so many-th call with the same addresses; the
#: most graphs that are kept (a loop whose last result is still alive alternates between two), and addresses counted.
_LEAST_RECORDED, _RECORDED_AT, _MOST_RECORDED, _MOST_COUNTED = 4, 3, 4, 64


class Module:
    """A cubin loaded into the primary context of a device; unloaded when it and its functions are collected.

    Loading works while a stream is being captured.  Raises DeviceError if the driver does not load the cubin.
    """

    __slots__ = ("__weakref__", "device", "handle")

    def __init__(self, cubin: bytes, device: int = 0) -> None:
        self.device = device
        with driver.using(device), driver.relaxed_capture():
            doing = f"load a kernel image of {len(cubin)} bytes on cuda:{device}"
            self.handle = driver.call("cuModuleLoadData", cubin, doing=doing)
        driver.release_with(self, "cuModuleUnload", self.handle, device)

    def function(self, name: str) -> Function:
        """Returns kernel ``name`` (as in the cubin: mangled unless ``extern "C"``).  Raises DeviceError without it."""
        return Function(self, name)


class Function:
    """One kernel of a Module, with its registers per thread, static shared bytes and most threads per block."""

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.name = module, name
        with driver.using(module.device):
            self.handle = driver.call("cuModuleGetFunction", module.handle, name.encode(), doing=f"find kernel {name}")
            self.registers = self._attribute("NUM_REGS")
            self.shared_bytes = self._attribute("SHARED_SIZE_BYTES")
            self.max_threads = self._attribute("MAX_THREADS_PER_BLOCK")
        self._dynamic_shared = max(_DEFAULT_SHARED - self.shared_bytes, 0)

    def _attribute(self, name: str) -> int:
        attribute = getattr(driver.bindings().CUfunction_attribute, "CU_FUNC_ATTRIBUTE_" + name)
        return int(driver.call("cuFuncGetAttribute", attribute, self.handle, doing=f"read {name} of {self.name}"))

    def reserve_shared(self, nbytes: int) -> None:
        """Allows launches with ``nbytes`` of dynamic shared memory.  Raises DeviceError if the GPU has less."""
        if nbytes <= self._dynamic_shared:
            return
        limit = driver.properties(self.module.device).shared_optin_bytes - self.shared_bytes
        if nbytes > limit:
            raise DeviceError(
                f"kernel {self.name} wants {nbytes} bytes of dynamic shared memory; cuda:{self.module.device} has "
                f"{limit} for it"
            )
        attribute = driver.bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with driver.using(self.module.device):
            doing = f"reserve {nbytes} bytes of shared memory for {self.name}"
            driver.call("cuFuncSetAttribute", self.handle, attribute, nbytes, doing=doing)
        self._dynamic_shared = nbytes

    def allow_large_clusters(self) -> None:
        """Allows clusters of more than 8 blocks, which not every GPU with clusters supports."""
        attribute = driver.bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        with driver.using(self.module.device):
            driver.call("cuFuncSetAttribute", self.handle, attribute, 1, doing=f"allow {self.name} large clusters")


_OVERLAPPING: ContextVar[bool] = ContextVar("overlapping", default=True)


@contextmanager
def one_after_another() -> Iterator[None]:
    """Makes kernels whose `Launch` is made within the block start when the one before is done, for a profile of each:
    a kernel that starts early waits, and its time counts the wait.
    """
    before = _OVERLAPPING.set(False)
    try:
        yield
    finally:
        _OVERLAPPING.reset(before)


class Launch:
    """A kernel with its launch configuration.

    grid, block   (x, y, z).
    shared_bytes  dynamic shared memory of a block, in bytes.
    n_pointers    how many arguments the kernel takes: addresses of tensors.
    parameters    the kernel's parameters, as in `codegen.spec.KernelSource`: a tensor map, or n for the address of the
                  n-th argument.  None: the addresses in order.
    cluster       blocks of a cluster (x, y, z).
    dependent     the kernel may start before the one queued before it is done (programmatic dependent launch); it
                  waits by itself before it accesses memory.
    zeroed        pairs (argument, bytes) to set to zero before the kernel starts; ``dependent`` then has no effect.

    Raises DeviceError if the GPU cannot run it.
    """

    def __init__(
        self,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        n_pointers: int,
        parameters: Sequence[int | TensorMap | Scalar] | None = None,
        *,
        cluster: tuple[int, int, int] = (1, 1, 1),
        dependent: bool = False,
        zeroed: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.function, self.grid, self.block, self.shared_bytes = function, grid, block, shared_bytes
        self.n_pointers = n_pointers
        self.parameters = tuple(range(n_pointers) if parameters is None else parameters)
        threads, blocks = block[0] * block[1] * block[2], cluster[0] * cluster[1] * cluster[2]
        if any(not 0 < size <= limit for size, limit in zip(grid, _MAX_GRID, strict=True)):
            raise DeviceError(f"kernel {function.name} cannot have a grid of {grid}; each size is 1 to {_MAX_GRID}")
        if min(block) < 1 or block[2] > 64 or threads > function.max_threads:
            raise DeviceError(
                f"kernel {function.name} cannot run in blocks of {block}: {threads} threads, of at most "
                f"{function.max_threads} at its {function.registers} registers a thread"
            )
        if min(cluster) < 1 or any(size % part for size, part in zip(grid, cluster)):
            raise DeviceError(f"kernel {function.name} cannot run a grid of {grid} in clusters of {cluster}")
        function.reserve_shared(shared_bytes)
        if blocks > _PORTABLE_CLUSTER:
            function.allow_large_clusters()
        self.zeroed = tuple(zeroed)
        self.cluster, self.dependent = cluster, dependent and not self.zeroed and _OVERLAPPING.get()
        self._alone: LaunchSequence | None = None

    @classmethod
    def of(cls, function: Function, source: KernelSource, n_pointers: int, *, overlapping: bool = False) -> Launch:
        """Returns a rendered kernel with its configuration; if ``overlapping``, it may start early where it can."""
        shared, dependent = source.dynamic_shared_bytes, source.dependent and overlapping
        if dependent and prod(source.cluster) == 1:
            shared = max(shared, _spreading(prod(source.grid), function.module.device) - function.shared_bytes)
        return cls(
            function,
            source.grid,
            source.block,
            shared,
            n_pointers,
            source.parameters,
            cluster=source.cluster,
            dependent=dependent,
            zeroed=source.zeroed,
        )

    def __call__(self, pointers: Sequence[int], stream: int = 0) -> None:
        """Queues the kernel alone, as a LaunchSequence does.  Raises ArgumentError or DeviceError."""
        if self._alone is None:
            step = self, range(self.n_pointers)
            self._alone = LaunchSequence([step], self.n_pointers, device=self.function.module.device)
        self._alone(tuple(pointers), stream)


def _spreading(blocks: int, device: int) -> int:
    """Returns the shared bytes of a block with which few blocks are spread evenly over a device; 0 for many.

    Blocks that start early go where others leave room, as many as fit: one multiprocessor might have several, while
    others had none.
    """
    found = driver.properties(device)
    each = -(-blocks // found.sm_count)
    return found.target.arch.least_shared_bytes(each) if found.sm_count <= 2 * blocks and each <= _SPREAD else 0


class LaunchSequence:
    """Kernels queued one after another on a stream: ``sequence(addresses, stream, parts)``.

    Their arguments come from one table of addresses.  It holds the ``n_arrays`` addresses of the call's arrays, then
    one for each of ``views`` (array, offset in bytes), then the ``fixed`` ones, then one for each of ``offsets`` (part
    of the call's workspace, offset in bytes); ``parts`` are the addresses of its parts.  ``steps`` pairs each launch
    with the positions of its arguments in the table.  ``device`` is the kernels' CUDA ordinal.

    A call does not wait, and may be made from several threads.  The driver copies the arguments before it returns, but
    releases the GIL meanwhile.  So each call takes a slot of argument memory off a list (``list.pop`` and ``append``
    are atomic) and puts it back afterwards.  A slot keeps what its last call wrote, and writes only what differs:
    addresses should be given as a tuple, which can be compared with those of the last call.

    Programs call with the same few buffers again and again.  A sequence of several kernels that comes with addresses
    for the third time is recorded as a CUDA graph, and from then on queued as a whole; not while its stream is being
    captured.
    """

    __slots__ = (
        *("_counted", "_device", "_free", "_is_current", "_replays"),
        *("fixed", "n_arrays", "offsets", "steps", "views"),
    )

    def __init__(
        self,
        steps: Sequence[tuple[Launch, Sequence[int]]],
        n_arrays: int,
        fixed: Sequence[int] = (),
        offsets: Sequence[tuple[int, int]] = (),
        views: Sequence[tuple[int, int]] = (),
        *,
        device: int,
    ) -> None:
        self.steps = tuple((launch, tuple(positions)) for launch, positions in steps)
        self.n_arrays, self.fixed, self.offsets = n_arrays, tuple(fixed), tuple(offsets)
        self.views = tuple(views)
        size = n_arrays + len(self.views) + len(self.fixed) + len(self.offsets)
        for launch, positions in self.steps:
            if len(positions) != launch.n_pointers or not all(0 <= position < size for position in positions):
                raise ArgumentError(
                    f"kernel {launch.function.name} takes {launch.n_pointers} arguments, not {positions} of {size}"
                )
        self._device, self._is_current = device, context_test(device)
        self._free = [_Slot(self)]
        self._counted: dict[tuple[Sequence[int], tuple[int, ...]], int] = {}
        self._replays: dict[tuple[Sequence[int], tuple[int, ...]], Replay] = {}

    def __call__(self, addresses: Sequence[int], stream: int, parts: tuple[int, ...] = ()) -> None:
        """Queues the kernels on ``stream`` for arrays at these addresses.  Raises ArgumentError or DeviceError."""
        if not self._is_current():
            with driver.using(self._device):
                return self(addresses, stream, parts)
        known = self._replays and type(addresses) is tuple
        replay = self._replays.get((addresses, parts)) if known else None
        if replay is not None and not driver.is_capturing(stream, self._device):
            return replay(stream)
        try:
            slot = self._free.pop()
        except IndexError:
            slot = _Slot(self)
        try:
            if slot.addresses != addresses:
                slot.write(addresses)
            if slot.parts != parts:
                slot.write_parts(parts)
            if slot.stream != stream:
                slot.write_stream(stream)
            self._queue(slot)
            if len(self.steps) >= _LEAST_RECORDED and type(addresses) is tuple:
                self._count(slot, (addresses, parts), stream)
        finally:
            self._free.append(slot)

    def _queue(self, slot: _Slot) -> None:
        for launch in slot.launches:
            code = launch()[0]
            if code:
                raise self._failure(code, slot.launches.index(launch))

    def _count(self, slot: _Slot, key: tuple[tuple[int, ...], tuple[int, ...]], stream: int) -> None:
        """Counts calls with the same addresses; records what the slot has in its last one as a CUDA graph."""
        count = self._counted.get(key, 0) + 1
        if count < _RECORDED_AT or driver.is_capturing(stream, self._device):
            if len(self._counted) >= _MOST_COUNTED:
                self._counted.clear()
            self._counted[key] = count
            return

        def work(capturing: int) -> None:
            slot.write_stream(capturing)
            self._queue(slot)

        try:
            with driver.relaxed_capture():  # another thread's capture does not mind
                made = record(work, self._device)
        except DeviceError:  # no memory for it, say: the kernels have been queued, and will be as they were
            self._counted[key] = -sys.maxsize
            return
        self._counted.pop(key, None)
        if len(self._replays) >= _MOST_RECORDED:
            self._replays.pop(next(iter(self._replays), key), None)
        self._replays[key] = made

    def _failure(self, code: Any, step: int) -> DeviceError:
        launch = self.steps[step][0]
        doing = f"launch {launch.function.name}, grid {launch.grid}, block {launch.block}"
        return driver.error("cuLaunchKernelEx", code, doing)


class _Slot:
    """The argument memory of one call: the table, and for every kernel its configuration, parameters and tensor maps.

    ``launches`` has one function per kernel, which calls the driver and returns a CUresult in a tuple.  A kernel's
    parameters point to entries of the table, so each address is written once however many kernels take it.
    """

    def __init__(self, sequence: LaunchSequence) -> None:
        self._n_arrays, self._offsets = sequence.n_arrays, sequence.offsets
        self._views = sequence.views
        first = sequence.n_arrays + len(sequence.views)
        self._start = first + len(sequence.fixed)
        self._table: Any = (ctypes.c_uint64 * (self._start + len(self._offsets)))()
        self._table[first : self._start] = [*sequence.fixed]
        self.addresses: tuple[int, ...] | None = None
        self.parts: tuple[int, ...] = ()
        self.stream = 0
        self._maps: list[_Map] = []
        self._keep: list[object] = []
        self.configs = [_config(launch) for launch, _ in sequence.steps]
        self.launches = [
            self._prepared(config, launch, positions)
            for config, (launch, positions) in zip(self.configs, sequence.steps)
        ]

    def _prepared(self, config: Any, launch: Launch, positions: tuple[int, ...]) -> Callable[[], tuple[Any]]:
        """Returns a function that queues a kernel, after setting the arguments in ``launch.zeroed`` to zero."""
        cuda, parameters = driver.bindings(), self._parameters(launch, positions)
        kernel: Callable[[], tuple[Any]] = partial(cuda.cuLaunchKernelEx, config, launch.function.handle, parameters, 0)
        if not launch.zeroed:
            return kernel
        memset, table = cuda.cuMemsetD8Async, self._table
        places = [(positions[argument], nbytes) for argument, nbytes in launch.zeroed]

        def both() -> tuple[Any]:
            for position, nbytes in places:
                code: tuple[Any] = memset(table[position], 0, nbytes, config.hStream)
                if code[0]:
                    return code
            return kernel()

        return both

    def _parameters(self, launch: Launch, positions: tuple[int, ...]) -> int:
        """Returns the address of an array with the address of every parameter of a kernel."""
        table = ctypes.addressof(self._table)
        found = []
        for parameter in launch.parameters:
            if isinstance(parameter, TensorMap):
                self._maps.append(_Map(parameter, positions[parameter.argument], launch.function.name))
                found.append(self._maps[-1].block)
            elif isinstance(parameter, Scalar):
                number = _SCALARS[parameter.ctype](parameter.value)
                self._keep.append(number)
                found.append(ctypes.addressof(number))
            else:
                found.append(table + 8 * positions[parameter])
        array = (ctypes.c_void_p * max(len(found), 1))(*found)
        self._keep.append(array)
        return ctypes.addressof(array)

    def write(self, addresses: Sequence[int]) -> None:
        """Writes the arrays' addresses, and those of views of them."""
        self.addresses = None  # until all of them are written
        if len(addresses) != self._n_arrays:
            raise ArgumentError(f"a launch takes {self._n_arrays} addresses, not {len(addresses)}")
        try:
            self._table[: self._n_arrays] = addresses
        except TypeError as error:
            raise ArgumentError(f"a launch takes addresses, not {list(addresses)}: {error}") from error
        for position, (array, offset) in enumerate(self._views, self._n_arrays):
            self._table[position] = addresses[array] + offset
        for item in self._maps:
            if item.position < self._start:
                item.write(self._table[item.position])
        self.addresses = tuple(addresses)

    def write_parts(self, parts: tuple[int, ...]) -> None:
        """Writes the addresses of intermediates."""
        self.parts = ()
        self._table[self._start :] = [parts[part] + offset for part, offset in self._offsets]
        for item in self._maps:
            if item.position >= self._start:
                item.write(self._table[item.position])
        self.parts = parts

    def write_stream(self, stream: int) -> None:
        """Writes the stream of every kernel."""
        for config in self.configs:
            config.hStream = stream
        self.stream = stream


class _Map:
    """A tensor map in a slot: ``block`` is its address, ``position`` the place of its tensor in the table."""

    __slots__ = ("_address", "_described", "_kernel", "_memory", "block", "position")

    def __init__(self, described: TensorMap, position: int, kernel: str) -> None:
        self._described, self._kernel, self.position = described, kernel, position
        self._memory = ctypes.create_string_buffer(tensor_map.BYTES + tensor_map.ALIGNMENT - 1)
        start = ctypes.addressof(self._memory)
        self.block = start + -start % tensor_map.ALIGNMENT
        self._address = 0

    def write(self, tensor: int) -> None:
        """Points the map to a tensor at this address."""
        address = tensor + self._described.offset
        if address == self._address:
            return
        encoded, self._address = self._address != 0, 0
        if encoded:
            tensor_map.move(self.block, address, self._kernel)
        else:
            tensor_map.encode(self.block, self._described, address, self._kernel)
        self._address = address


def _config(launch: Launch) -> Any:
    """Returns a kernel's CUlaunchConfig, for stream 0."""
    cuda = driver.bindings()
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
    config.sharedMemBytes = launch.shared_bytes
    attributes = []
    if launch.cluster != (1, 1, 1):
        cluster = cuda.CUlaunchAttribute()
        cluster.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = cluster.value.clusterDim
        size.x, size.y, size.z = launch.cluster
        attributes.append(cluster)
    if launch.dependent:
        dependent = cuda.CUlaunchAttribute()
        dependent.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        dependent.value.programmaticStreamSerializationAllowed = 1
        attributes.append(dependent)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config
