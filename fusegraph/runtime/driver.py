"""The CUDA driver, as far as fusegraph needs it: devices, contexts, memory, streams and events.

Everything goes through ``cuda.bindings.driver``, which is imported at the first use, so that a machine without a GPU
can do all the rest.  Streams are plain integers (``CUstream`` handles; 0 is the legacy default stream), and so are
addresses of device memory.  Every result code is checked; a failure is a DeviceError that names what was attempted,
the call, and the driver's own name and description of the code.

Functions that need a context use the primary context of the device, the one that torch, CuPy, JAX and the CUDA runtime
share, and leave the calling thread's current context as they found it.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

from codegen.target import Target, of_device
from fusegraph.errors import DeviceError

# Codes after which the context is lost for good: every later call in the process fails with the same code.
_STICKY = {
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK",
}
_HINTS = {
    "CUDA_ERROR_NOT_INITIALIZED": "CUDA cannot be used in a process forked after CUDA was initialised: start workers "
    "with the 'spawn' method",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the kernel was compiled for another architecture than this GPU's",
    "CUDA_ERROR_INVALID_HANDLE": "a stream that was given may be another device's, or destroyed",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "the kernel needs more registers for a block than the GPU has",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "the operation is not permitted while the stream is being captured",
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": "the legacy default stream cannot be used while another stream is captured",
}

_lock = threading.Lock()
_cuda: Any = None  # cuda.bindings.driver, once cuInit has succeeded
_reason: str | None = None  # why it is not available


# --- loading -------------------------------------------------------------------------------------------------------


def bindings() -> Any:
    """Returns the module ``cuda.bindings.driver`` with CUDA initialized.  Raises DeviceError that says why it fails."""
    if _cuda is not None:
        return _cuda
    reason = unavailable_reason()
    if reason is not None:
        raise DeviceError(reason)
    return _cuda


def available() -> bool:
    """Tells whether a CUDA driver and at least one GPU can be used."""
    return _cuda is not None or unavailable_reason() is None


def unavailable_reason() -> str | None:
    """Returns None if CUDA can be used, else a sentence on what is missing and what to do; found once per process."""
    global _cuda, _reason
    with _lock:
        if _cuda is None and _reason is None:
            found = _load()
            if isinstance(found, str):
                _reason = found + "; use engine='cpu', which needs no GPU"
            else:
                _cuda = found
        return _reason


def _load() -> Any:
    """Returns cuda.bindings.driver after a successful cuInit, else a sentence that says what failed."""
    try:
        from cuda.bindings import driver
    except Exception as error:  # an extension module can fail to load in more ways than ImportError
        return f"cuda.bindings cannot be imported ({_one_line(error)}): install cuda-python 13"
    try:
        code = driver.cuInit(0)[0]
        if not code:
            code, count = driver.cuDeviceGetCount()
            if not code:
                return driver if count else "the CUDA driver reports no GPU"
        name, text = _name_of(driver, code)
    except Exception as error:  # the exception for a missing library differs between releases of cuda-bindings
        return f"no CUDA driver (libcuda.so.1) could be loaded ({_one_line(error)})"
    return f"the CUDA driver (libcuda.so.1) did not start: {name} ({int(code)}): {text}"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _name_of(cuda: Any, code: Any) -> tuple[str, str]:
    """Returns the driver's name and description of a result code."""
    name, text = cuda.cuGetErrorName(code)[1], cuda.cuGetErrorString(code)[1]
    return (name or str(code).encode()).decode(), (text or b"unknown error").decode()


def error(call: str, code: Any, doing: str) -> DeviceError:
    """Returns the DeviceError for result ``code`` of driver function ``call``, while ``doing`` ("allocate 5 bytes")."""
    name, text = _name_of(bindings(), code)
    hint = _HINTS.get(name, "")
    if name in _STICKY:
        hint = "an earlier kernel may be the cause; CUDA is unusable in this process from here on"
    return DeviceError(f"cannot {doing}: {call} returned {name} ({int(code)}): {text}{hint and '; ' + hint}")


def call(function: str, *arguments: Any, doing: str) -> Any:
    """Calls a driver function and returns its values without the result code (None, one value, or a tuple).

    ``doing`` is what error messages say could not be done.  Raises DeviceError for any result but success.
    """
    cuda = bindings()
    try:
        code, *values = getattr(cuda, function)(*arguments)
    except (AttributeError, RuntimeError) as failure:  # the binding or the installed driver lacks the function
        raise DeviceError(
            f"cannot {doing}: {function} is not usable with this driver ({_one_line(failure)}); "
            "update the NVIDIA driver or cuda-python"
        ) from failure
    if code:
        raise error(function, code, doing)
    if len(values) == 1:
        return values[0]
    return tuple(values) if values else None


# --- devices -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceProperties:
    """What the compiler and the cost model need to know about a GPU.

    Sizes are in bytes, ``clock`` in cycles per microsecond, ``memory_rate`` in bytes per microsecond.
    """

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    l2_bytes: int
    shared_optin_bytes: int
    total_memory: int
    clock: float
    memory_rate: float

    @property
    def target(self) -> Target:
        """The target that kernels for this GPU are planned for.  Raises DeviceError for an unsupported GPU."""
        try:
            return of_device(
                self.name, self.compute_capability, self.sm_count, self.l2_bytes, self.clock, self.memory_rate
            )
        except ValueError as error:
            raise DeviceError(f"{self.name}: {error}") from None

    @property
    def arch(self) -> str:
        """The architecture to compile for: ``"sm_90a"`` for compute capability 9.0."""
        return self.target.arch.name


def driver_version() -> tuple[int, int]:
    """Returns the CUDA version the driver supports, as (major, minor)."""
    version = call("cuDriverGetVersion", doing="read the driver's version")
    return version // 1000, version % 1000 // 10


def device_count() -> int:
    """Returns the number of GPUs that this process can use; 0 without a driver."""
    return int(call("cuDeviceGetCount", doing="count the GPUs")) if available() else 0


@cache
def properties(device: int = 0) -> DeviceProperties:
    """Returns the properties of the GPU with ordinal ``device``; needs no context."""
    handle = _handle(device)
    attributes = bindings().CUdevice_attribute

    def get(name: str) -> int:
        attribute = getattr(attributes, "CU_DEVICE_ATTRIBUTE_" + name)
        return int(call("cuDeviceGetAttribute", attribute, handle, doing=f"read {name} of cuda:{device}"))

    name = call("cuDeviceGetName", 256, handle, doing=f"read the name of cuda:{device}")
    return DeviceProperties(
        ordinal=device,
        name=name.split(b"\0")[0].decode(),
        compute_capability=(get("COMPUTE_CAPABILITY_MAJOR"), get("COMPUTE_CAPABILITY_MINOR")),
        sm_count=get("MULTIPROCESSOR_COUNT"),
        l2_bytes=get("L2_CACHE_SIZE"),
        shared_optin_bytes=get("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        total_memory=int(call("cuDeviceTotalMem", handle, doing=f"read the memory size of cuda:{device}")),
        clock=get("CLOCK_RATE") / 1e3,
        memory_rate=2 * get("MEMORY_CLOCK_RATE") / 1e3 * get("GLOBAL_MEMORY_BUS_WIDTH") / 8,
    )


@cache
def _handle(device: int) -> Any:
    bindings()
    count = device_count()
    if not 0 <= device < count:
        raise DeviceError(f"there is no cuda:{device}; this process sees {count} GPU(s), numbered from 0")
    return call("cuDeviceGet", device, doing=f"open cuda:{device}")


# --- contexts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Context:
    """The primary context of a device; ``address`` is the value of ``handle``."""

    handle: Any
    address: int


_contexts: dict[int, Context] = {}


def primary_context(device: int = 0) -> Context:
    """Returns the primary context, retained at the first call and never released (as torch and CuPy do)."""
    context = _contexts.get(device)
    if context is None:
        ordinal = _handle(device)
        with _lock:
            context = _contexts.get(device)
            if context is None:
                handle = call("cuDevicePrimaryCtxRetain", ordinal, doing=f"start CUDA on cuda:{device}")
                context = _contexts[device] = Context(handle, int(handle))
    return context


def enter(device: int) -> bool:
    """Makes the primary context of ``device`` current; returns True if the caller must ``leave()`` when done.

    Does nothing if it is current already.  A thread without a context keeps that of device 0, which the CUDA runtime
    would give it too.  Any other context is pushed and popped, because the runtime's current device (and so torch's)
    follows the context.
    """
    context = _contexts.get(device) or primary_context(device)
    code, current = _cuda.cuCtxGetCurrent()
    if code:
        raise error("cuCtxGetCurrent", code, "read the current context")
    address = int(current)
    if address == context.address:
        return False
    if address == 0 and device == 0:
        call("cuCtxSetCurrent", context.handle, doing="make cuda:0 current")
        return False
    call("cuCtxPushCurrent", context.handle, doing=f"make cuda:{device} current")
    return True


def leave() -> None:
    """Undoes an ``enter`` that returned True."""
    call("cuCtxPopCurrent", doing="restore the current context")


class using:
    """``with using(device):`` makes the device's primary context current inside."""

    __slots__ = ("_device", "_pushed")

    def __init__(self, device: int) -> None:
        self._device = device
        self._pushed = False

    def __enter__(self) -> Self:
        self._pushed = enter(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            leave()


class relaxed_capture:
    """A context manager inside which this thread may make calls (allocate, free, load) that a stream capture forbids.

    This is safe: none of these calls is ordered against work in streams, so the capture misses nothing.
    """

    __slots__ = ("_mode",)

    def __enter__(self) -> Self:
        mode = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._mode = call("cuThreadExchangeStreamCaptureMode", mode, doing="relax the stream capture mode")
        return self

    def __exit__(self, *_: object) -> None:
        call("cuThreadExchangeStreamCaptureMode", self._mode, doing="restore the stream capture mode")


def release(function: str, handle: Any, device: int) -> None:
    """Releases a driver object from a finalizer: in any thread, during a capture, or after the context has died.

    Result codes are ignored: what cannot be released has gone with its context.
    """
    try:
        with using(device), relaxed_capture():
            getattr(_cuda, function)(handle)
    except DeviceError:
        pass


def release_with(owner: object, function: str, handle: Any, device: int) -> None:
    """Releases ``handle`` when ``owner`` is collected; not at interpreter exit, where the driver cleans up itself."""
    weakref.finalize(owner, release, function, handle, device).atexit = False


# --- memory --------------------------------------------------------------------------------------------------------


class DeviceBuffer:
    """``nbytes`` of device memory at ``pointer``; freed when collected, after the device has finished with it."""

    __slots__ = ("__weakref__", "device", "nbytes", "pointer")

    def __init__(self, pointer: int, nbytes: int, device: int) -> None:
        self.pointer, self.nbytes, self.device = pointer, nbytes, device
        # cuMemFree waits for the device, so that kernels still in flight on the buffer finish first.
        release_with(self, "cuMemFree", pointer, device)

    def __repr__(self) -> str:
        return f"DeviceBuffer({self.nbytes} bytes at {self.pointer:#x} on cuda:{self.device})"


def allocate(nbytes: int, device: int = 0) -> DeviceBuffer:
    """Allocates device memory, 256-byte aligned and uninitialized; works while a stream is being captured.

    With ``nbytes`` 0 the buffer still has a valid address.  Raises DeviceError if the device lacks free memory.
    """
    with using(device), relaxed_capture():
        code, pointer = bindings().cuMemAlloc(max(nbytes, 1))
        if code:
            free, total = call("cuMemGetInfo", doing="read the free memory")
            raise error("cuMemAlloc", code, f"allocate {nbytes} bytes on cuda:{device} ({free} of {total} free)")
    return DeviceBuffer(int(pointer), nbytes, device)


def copy_to_device(pointer: int, host: int, nbytes: int, device: int = 0, stream: int = 0) -> None:
    """Copies ``nbytes`` from host address ``host`` to device address ``pointer`` in stream order, and waits."""
    _copy("cuMemcpyHtoDAsync", pointer, host, nbytes, device, stream)


def copy_to_host(host: int, pointer: int, nbytes: int, device: int = 0, stream: int = 0) -> None:
    """Copies ``nbytes`` from device address ``pointer`` to host address ``host`` in stream order, and waits."""
    _copy("cuMemcpyDtoHAsync", host, pointer, nbytes, device, stream)


def _copy(function: str, target: int, source: int, nbytes: int, device: int, stream: int) -> None:
    if nbytes:
        with using(device):
            call(function, target, source, nbytes, stream, doing=f"copy {nbytes} bytes to or from cuda:{device}")
            synchronize(stream, device)


def copy_on_device(target: int, source: int, nbytes: int, device: int = 0, stream: int = 0) -> None:
    """Copies ``nbytes`` from device address ``source`` to ``target`` in stream order; does not wait."""
    if nbytes:
        with using(device):
            call("cuMemcpyDtoDAsync", target, source, nbytes, stream, doing=f"copy {nbytes} bytes on cuda:{device}")


def memset(pointer: int, value: int, nbytes: int, device: int = 0, stream: int = 0) -> None:
    """Sets ``nbytes`` bytes to ``value`` (0..255) in stream order; does not wait."""
    if nbytes:
        with using(device):
            call("cuMemsetD8Async", pointer, value, nbytes, stream, doing=f"fill {nbytes} bytes on cuda:{device}")


# --- streams and events --------------------------------------------------------------------------------------------


def synchronize(stream: int = 0, device: int = 0) -> None:
    """Waits until the work queued on ``stream`` is done.  Raises DeviceError if a kernel on it has failed."""
    with using(device):
        call("cuStreamSynchronize", stream, doing="wait for the stream")


#: The calling thread's own default stream, which waits for no other stream that is captured.
PER_THREAD = 2


def is_capturing(stream: int, device: int = 0) -> bool:
    """Tells whether work queued on ``stream`` is being captured into a CUDA graph instead of run."""
    if stream in (0, 1):  # the legacy default stream can never be captured, and asking may be an error
        return False
    status = bindings().CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    with using(device):
        return bool(call("cuStreamIsCapturing", stream, doing="ask whether the stream is being captured") != status)


def order(first: int, then: int, device: int = 0) -> None:
    """Makes work queued on stream ``then`` from now on wait for the work queued on stream ``first`` so far.

    Does not block, unless ``then`` is being captured and ``first`` is not: a captured graph cannot wait for work
    outside it, so the host waits for that work here.
    """
    if first == then:
        return
    if is_capturing(then, device) and not is_capturing(first, device):
        with relaxed_capture():
            synchronize(first, device)
        return
    event = Event(device, timing=False)
    event.record(first)
    with using(device):
        call("cuStreamWaitEvent", then, event.handle, 0, doing="order one stream after another")


class Event:
    """A point in a stream: ``record`` it, then ``synchronize``, or measure ``elapsed_ms`` between two."""

    __slots__ = ("__weakref__", "device", "handle")

    def __init__(self, device: int = 0, *, timing: bool = True) -> None:
        flags = bindings().CUevent_flags
        flag = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        self.device = device
        with using(device):
            self.handle = call("cuEventCreate", int(flag), doing=f"create an event on cuda:{device}")
        release_with(self, "cuEventDestroy", self.handle, device)

    def record(self, stream: int = 0) -> None:
        """Places the event after the work queued on ``stream`` so far."""
        with using(self.device):
            call("cuEventRecord", self.handle, stream, doing="record an event")

    def synchronize(self) -> None:
        """Waits until the event has been reached."""
        with using(self.device):
            call("cuEventSynchronize", self.handle, doing="wait for an event")

    def elapsed_ms(self, start: Event) -> float:
        """Returns the milliseconds from ``start`` to this event (resolution about 0.5 us).

        Both must have been reached, and made with ``timing``; else DeviceError is raised.
        """
        with using(self.device):
            return float(call("cuEventElapsedTime", start.handle, self.handle, doing="measure the time between events"))
