"""The driver's functions that a call goes through, entered directly.

``cuda.bindings`` turns every argument into what C takes and every result into an object, some microseconds a launch.
Here a function is called through ctypes with arguments that were made when the kernel was built.  Everything else goes
through the ``driver`` module.  Structures are those of cuda.h, whose layout is part of the driver's ABI.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from fusegraph.errors import DeviceError
from fusegraph.runtime import driver

#: The functions' signatures are those of this release of CUDA, the first with all that is used here.
_VERSION = 12000

#: CUlaunchAttributeID
CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: ``value`` is a union of 64 bytes, of which integers are used."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def entry_point(name: str, *, releases_gil: bool = True) -> Callable[..., int]:
    """The driver's function ``name``: arguments are ctypes objects or None, the result is a CUresult as an integer.

    A function that can wait for the device must release the interpreter's lock; for others that is a waste of time.
    Raises DeviceError if there is no driver, or it lacks the function.
    """
    found = driver.call("cuGetProcAddress", name.encode(), _VERSION, 0, doing=f"find the driver's {name}")
    address = int(found[0])
    if not address:
        raise DeviceError(f"the CUDA driver has no {name}; update the NVIDIA driver")
    prototype: Any = (ctypes.CFUNCTYPE if releases_gil else ctypes.PYFUNCTYPE)(ctypes.c_int)
    function: Callable[..., int] = prototype(address)
    return function


def failure(function: str, code: int, doing: str) -> DeviceError:
    """The DeviceError for result ``code`` of an entry point."""
    return driver.error(function, driver.bindings().CUresult(code), doing)


class _Current(threading.local):
    """Where the driver writes the calling thread's context, a place for each thread."""

    def __init__(self) -> None:
        self.context = ctypes.c_void_p()
        self.reference = ctypes.byref(self.context)


_current = _Current()


def context_test(device: int) -> Callable[[], bool]:
    """A function that says whether the primary context of ``device`` is the calling thread's current one."""
    query = entry_point("cuCtxGetCurrent", releases_gil=False)
    address = driver.primary_context(device).address

    def is_current(current: _Current = _current) -> bool:
        query(current.reference)
        return current.context.value == address

    return is_current
