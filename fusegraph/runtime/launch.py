"""Compiled kernels on the GPU: Module (a loaded cubin), Function (one kernel), Launch (a kernel ready to go).

A Launch does at construction all that does not change from call to call; a call packs the argument values into memory
that is laid out already and enters the driver.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from fusegraph.errors import ArgumentError, DeviceError
from fusegraph.runtime import driver

_DEFAULT_SHARED = 48 * 1024  # shared memory a block may use without asking for more
_MAX_GRID = (2**31 - 1, 65535, 65535)

# Kernel parameter types: struct format, bytes, alignment.  A tensor map (CUtensorMap) is passed by value as 128 bytes.
PARAMETERS: dict[str, tuple[str, int, int]] = {
    "pointer": ("Q", 8, 8),
    "int32": ("i", 4, 4),
    "uint32": ("I", 4, 4),
    "int64": ("q", 8, 8),
    "uint64": ("Q", 8, 8),
    "float32": ("f", 4, 4),
    "float64": ("d", 8, 8),
    "tensor_map": ("128s", 128, 128),
}


class Module:
    """A cubin loaded into the primary context of a device; unloaded when it and its functions are collected."""

    __slots__ = ("__weakref__", "device", "handle")

    def __init__(self, cubin: bytes, device: int = 0) -> None:
        self.device = device
        with driver.using(device), driver.relaxed_capture():
            doing = f"load a kernel image of {len(cubin)} bytes on cuda:{device}"
            self.handle = driver.call("cuModuleLoadData", cubin, doing=doing)
        driver.release_with(self, "cuModuleUnload", self.handle, device)

    def function(self, name: str) -> Function:
        """The kernel ``name`` (as in the cubin: mangled unless ``extern "C"``).  DeviceError if there is none."""
        return Function(self, name)


def load_module(cubin: bytes, device: int = 0) -> Module:
    """Load ``cubin`` on ``device``; legal while a stream is being captured.  Raises DeviceError if it does not fit."""
    return Module(cubin, device)


class Function:
    """One kernel of a Module, with what the compiler gave it: sizes in bytes a block (shared) or a thread (local)."""

    __slots__ = (
        "_dynamic_shared",
        "handle",
        "local_bytes",
        "max_threads",
        "module",
        "name",
        "registers",
        "shared_bytes",
    )

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.name = module, name
        with driver.using(module.device):
            self.handle = driver.call("cuModuleGetFunction", module.handle, name.encode(), doing=f"find kernel {name}")
            self.registers = self._attribute("NUM_REGS")
            self.local_bytes = self._attribute("LOCAL_SIZE_BYTES")
            self.shared_bytes = self._attribute("SHARED_SIZE_BYTES")
            self.max_threads = self._attribute("MAX_THREADS_PER_BLOCK")
        self._dynamic_shared = max(_DEFAULT_SHARED - self.shared_bytes, 0)

    def _attribute(self, name: str) -> int:
        attribute = getattr(driver.bindings().CUfunction_attribute, "CU_FUNC_ATTRIBUTE_" + name)
        return int(driver.call("cuFuncGetAttribute", attribute, self.handle, doing=f"read {name} of {self.name}"))

    def reserve_shared(self, nbytes: int) -> None:
        """Allow launches with ``nbytes`` of dynamic shared memory.  Raises DeviceError if the GPU has not so much."""
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


class _Slot(NamedTuple):
    """Memory for the arguments of one launch: values at ``offset`` in ``buffer``, their addresses at ``addresses``."""

    buffer: ctypes.Array[ctypes.c_char]
    offset: int
    addresses: int
    keep: object


class Launch:
    """A kernel with its grid, block and shared memory: ``launch(pointers, stream)`` queues it.

    ``grid`` and ``block`` are (x, y, z), ``shared_bytes`` the dynamic shared memory of a block.  The parameters are
    ``n_pointers`` pointers or, if ``layout`` is given, what it lists (names from PARAMETERS); values are ints for
    pointers and integers, floats, and 128 bytes for a tensor map.

    A call needs the device's context to be current (``driver.enter``), does not wait, and may be made from several
    threads: cuLaunchKernel copies the arguments before it returns but lets go of the GIL meanwhile, so each call takes
    a slot of argument memory off a list (``list.pop`` and ``append`` are atomic) and puts it back afterwards.

    Raises DeviceError at construction if the GPU cannot run such a grid or block.
    """

    __slots__ = (
        "_free",
        "_launch",
        "_offsets",
        "_pack",
        "_size",
        "block",
        "function",
        "grid",
        "layout",
        "shared_bytes",
    )

    def __init__(
        self,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        n_pointers: int,
        layout: Sequence[str] | None = None,
    ) -> None:
        self.function, self.grid, self.block, self.shared_bytes = function, grid, block, shared_bytes
        self.layout: tuple[str, ...] = ("pointer",) * n_pointers if layout is None else tuple(layout)
        threads = block[0] * block[1] * block[2]
        if any(not 0 < size <= limit for size, limit in zip(grid, _MAX_GRID, strict=True)):
            raise DeviceError(f"kernel {function.name} cannot have a grid of {grid}; each size is 1 to {_MAX_GRID}")
        if min(block) < 1 or block[2] > 64 or threads > function.max_threads:
            raise DeviceError(
                f"kernel {function.name} cannot run in blocks of {block}: {threads} threads, of at most "
                f"{function.max_threads} at its {function.registers} registers a thread"
            )
        function.reserve_shared(shared_bytes)
        format_, self._offsets, self._size = _packing(self.layout)
        self._pack = struct.Struct(format_).pack_into
        self._launch = partial(driver.bindings().cuLaunchKernel, function.handle, *grid, *block, shared_bytes)
        self._free = [self._new_slot()]

    def __call__(self, pointers: Sequence[Any], stream: int = 0) -> None:
        """Queue the kernel on ``stream`` with these arguments.  Raises ArgumentError or DeviceError."""
        try:
            slot = self._free.pop()
        except IndexError:
            slot = self._new_slot()
        try:
            self._pack(slot.buffer, slot.offset, *pointers)
            result = self._launch(stream, slot.addresses, 0)[0]
        except struct.error as failure:
            raise self._bad_arguments(pointers, failure) from failure
        finally:
            self._free.append(slot)
        if result:
            raise driver.error(
                "cuLaunchKernel", result, f"launch {self.function.name}, grid {self.grid}, block {self.block}"
            )

    def _bad_arguments(self, values: Sequence[Any], failure: struct.error) -> ArgumentError:
        if len(values) != len(self.layout):
            return ArgumentError(f"kernel {self.function.name} takes {len(self.layout)} arguments, not {len(values)}")
        return ArgumentError(f"kernel {self.function.name} takes ({', '.join(self.layout)}), not {values!r}: {failure}")

    def _new_slot(self) -> _Slot:
        """Argument memory aligned to 128 bytes, as tensor maps want it, and the array of addresses into it."""
        buffer = ctypes.create_string_buffer(self._size + 127)
        base = ctypes.addressof(buffer)
        offset = -base % 128
        addresses = (ctypes.c_void_p * max(len(self._offsets), 1))(*(base + offset + at for at in self._offsets))
        return _Slot(buffer, offset, ctypes.addressof(addresses), addresses)


def _packing(layout: Sequence[str]) -> tuple[str, tuple[int, ...], int]:
    """The struct format of the parameters, each at its own alignment, with their offsets and the whole size."""
    parts, offsets, at = ["<"], [], 0
    for name in layout:
        if name not in PARAMETERS:
            raise ArgumentError(f"unknown kernel parameter type {name!r}; there are {', '.join(PARAMETERS)}")
        code, size, alignment = PARAMETERS[name]
        padding = -at % alignment
        parts.append(f"{padding}x{code}" if padding else code)
        offsets.append(at + padding)
        at += padding + size
    return "".join(parts), tuple(offsets), at
