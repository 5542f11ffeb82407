"""CUDA graphs: work queued on a stream is recorded once and launched again as one unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusegraph.runtime import driver
from fusegraph.runtime.entry_points import context_test


class Replay:
    """A recorded CUDA graph: ``replay()`` or ``replay(stream)`` queues all of it with one driver call.

    `record` makes it.  ``keep`` holds what must stay alive while the graph can be launched.  It reads and writes the
    arrays that it was recorded with: copy new values into them between launches.
    """

    def __init__(self, graph: Any, device: int, keep: object) -> None:
        self._device, self._keep = device, keep
        with driver.using(device):
            self._executable = driver.call("cuGraphInstantiate", graph, 0, doing="instantiate a CUDA graph")
        driver.release_with(self, "cuGraphExecDestroy", self._executable, device)
        self._launch: Callable[[Any, int], tuple[Any]] = driver.bindings().cuGraphLaunch
        self._is_current = context_test(device)

    def __call__(self, stream: int = 0) -> None:
        """Queues the graph on ``stream``.  Raises DeviceError."""
        if self._is_current():
            code = self._launch(self._executable, stream)[0]
        else:
            with driver.using(self._device):
                code = self._launch(self._executable, stream)[0]
        if code:
            raise driver.error("cuGraphLaunch", code, "launch a CUDA graph")


def record(work: Callable[[int], object], device: int = 0, keep: object = None) -> Replay:
    """Records what ``work(stream)`` queues on the stream it is given; nothing runs until the result is called.

    Raises DeviceError if something in ``work`` cannot be captured.
    """
    cuda = driver.bindings()
    mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    flag = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
    with driver.using(device):
        stream = driver.call("cuStreamCreate", flag, doing=f"create a stream on cuda:{device}")
        try:
            driver.call("cuStreamBeginCapture", stream, mode, doing="start capturing a stream")
            try:
                work(int(stream))
            finally:
                graph = driver.call("cuStreamEndCapture", stream, doing="end capturing a stream")
            try:
                return Replay(graph, device, keep)
            finally:
                driver.call("cuGraphDestroy", graph, doing="destroy a CUDA graph")
        finally:
            driver.call("cuStreamDestroy", stream, doing="destroy a stream")
