"""Direct access to driver functions with as little overhead as possible.

A call enters the driver to ask for the thread's context, and once for each launch.  Both go through ``cuda.bindings``
with objects that were made when the kernel was built, so that nothing has to be converted.  ctypes serves functions
whose structures ``cuda.bindings`` would make anew at every call, and results that some of its releases misread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from fusegraph.errors import DeviceError
from fusegraph.runtime import driver

#: The functions have the signatures of this release of CUDA, the first that has all functions used here.
_VERSION = 12000


@cache
def entry_point(name: str) -> Callable[..., int]:
    """Returns the driver's function ``name``, which must not wait for the device, as it is called with the GIL held.

    Its arguments are ctypes objects or None, its result is a CUresult as an integer.  Raises DeviceError if there is no
    driver, or if it lacks the function.
    """
    found = driver.call("cuGetProcAddress", name.encode(), _VERSION, 0, doing=f"find the driver's {name}")
    address = int(found[0])
    if not address:
        raise DeviceError(f"the CUDA driver has no {name}; update the NVIDIA driver")
    prototype: Any = ctypes.PYFUNCTYPE(ctypes.c_int)
    function: Callable[..., int] = prototype(address)
    return function


def failure(function: str, code: int, doing: str) -> DeviceError:
    """Returns the DeviceError for result ``code`` of an entry point."""
    return driver.error(function, driver.bindings().CUresult(code), doing)


def pointer_device(pointer: int) -> int | None:
    """Returns the CUDA ordinal of the device that holds the memory at ``pointer``; None for memory unknown to CUDA.

    This goes through ctypes because ``cuPointerGetAttribute`` of cuda-bindings 13.3.1 returns 0 for every device.
    """
    cuda = driver.bindings()
    # The query needs some context; any will do, because the address space is unified.
    if not int(driver.call("cuCtxGetCurrent", doing="read the current context")):
        driver.enter(0)  # the thread keeps it
    function, ordinal = "cuPointerGetAttribute", ctypes.c_int(-1)
    attribute = int(cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
    code = entry_point(function)(ctypes.byref(ordinal), attribute, ctypes.c_uint64(pointer))
    if code == int(cuda.CUresult.CUDA_ERROR_INVALID_VALUE):
        return None
    if code:
        raise failure(function, code, f"look up the address {pointer:#x}")
    return None if ordinal.value < 0 else ordinal.value


def context_test(device: int) -> Callable[[], bool]:
    """Returns a function that tells whether the primary context of ``device`` is current in the calling thread.

    It is asked at every call: any library may have changed the context in between, and a kernel launched in the wrong
    context would read another device's memory.
    """
    query: Callable[[], tuple[object, object]] = driver.bindings().cuCtxGetCurrent
    context = driver.primary_context(device).handle

    def is_current() -> bool:
        return bool(query()[1] == context)

    return is_current
