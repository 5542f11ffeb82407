"""Converts CUDA streams of other libraries to the integers that the driver module takes."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

from fusegraph.errors import ArgumentError, shown
from fusegraph.runtime.device import Device


def as_stream(stream: Any) -> int:
    """Returns the CUstream handle of ``stream`` as an integer.

    ``stream`` is None (0, the legacy default stream), an integer handle, any object with ``__cuda_stream__``, or a
    stream of torch (``cuda_stream``), CuPy (``ptr``) or cuda.core (``handle``).  The caller keeps it alive.  Raises
    ArgumentError for anything else.
    """
    if stream is None:
        return 0
    try:
        handle = stream if type(stream) is int else _handle(stream)
    except ArgumentError:
        raise
    except Exception:  # whatever the object's attributes raise
        handle = None
    if handle is None:
        raise ArgumentError(
            f"{shown(stream)} is not a CUDA stream; give an integer handle, a torch, CuPy or cuda.core stream, or an "
            "object with __cuda_stream__"
        )
    if not 0 <= handle < 1 << 64:
        raise ArgumentError(f"a stream handle is 0 or more, of at most 64 bits, not {shown(handle)}")
    return handle


def _handle(stream: Any) -> int | None:
    """Returns the handle of a stream object; None for other objects."""
    if isinstance(stream, bool):
        return None
    if hasattr(type(stream), "__index__"):
        return operator.index(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        pair = protocol() if callable(protocol) else protocol  # a property in the protocol's first drafts
        version, handle = pair
        if version != 0:
            raise ArgumentError(
                f"{type(stream).__name__}.__cuda_stream__ has version {shown(version)}; 0 is understood"
            )
        return int(handle)
    for attribute in ("cuda_stream", "ptr", "handle"):
        value = getattr(stream, attribute, None)
        if value is not None:
            return int(value)
    # cuda.bindings CUstream
    return int(stream) if type(stream).__module__.startswith("cuda.") else None


def current_stream(framework: str, device: Device) -> int:
    """Returns the current stream of ``framework`` for the calling thread and ``device``.

    It is 0, the legacy default stream, on the CPU and for frameworks without a current stream.
    """
    return 0 if device.kind == "cpu" else stream_query(framework)(device.index)


def stream_query(framework: str) -> Callable[[int], int]:
    """Returns the function (CUDA ordinal) -> handle of the framework's current stream."""
    query = _queries.get(framework)
    if query is None:
        maker = _QUERY_MAKERS.get(framework)
        query = _queries[framework] = maker(sys.modules[framework]) if maker else _default_stream
    return query


def _default_stream(index: int) -> int:
    return 0


def _torch_query(torch: Any) -> Callable[[int], int]:
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is not None:
        return raw  # torch's own compiler calls it too: it makes no Stream object
    return lambda index: int(torch.cuda.current_stream(index).cuda_stream)


def _cupy_query(cupy: Any) -> Callable[[int], int]:
    current = cupy.cuda.get_current_stream
    return lambda index: int(current(index).ptr)


_queries: dict[str, Callable[[int], int]] = {}
_QUERY_MAKERS: dict[str, Callable[[Any], Callable[[int], int]]] = {"torch": _torch_query, "cupy": _cupy_query}
