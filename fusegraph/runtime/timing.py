"""Timing on a GPU: median of several runs between events, with a cold L2 cache."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from fusegraph.runtime import driver

#: Written before every run, so that nothing the run reads is still in the L2 cache.
FLUSH_BYTES = 256 * 2**20


class ColdTimer:
    """Times what is queued on a stream of one device."""

    def __init__(self, device: int = 0, stream: int = 0) -> None:
        self._device, self._stream = device, stream
        self._flush = driver.allocate(FLUSH_BYTES, device)
        self._start, self._end = driver.Event(device), driver.Event(device)

    def once(self, run: Callable[[], object]) -> float:
        """Microseconds from before the first to after the last thing that ``run`` queues, with a cold L2 cache."""
        driver.memset(self._flush.pointer, 0, FLUSH_BYTES, self._device, self._stream)
        self._start.record(self._stream)
        run()
        self._end.record(self._stream)
        self._end.synchronize()
        return self._end.elapsed_ms(self._start) * 1e3

    def median(self, run: Callable[[], object], repeats: int = 15, warmup: int = 3) -> float:
        """Median microseconds of several runs, after some that do not count."""
        for _ in range(warmup):
            run()
        return median(self.once(run) for _ in range(repeats))
