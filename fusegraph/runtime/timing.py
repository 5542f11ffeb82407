"""Timing on a GPU: the median of several runs between events, with a cold L2 cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from fusegraph.runtime import driver

#: So many bytes are written before every run, so that nothing that the run reads is still in the L2 cache.
FLUSH_BYTES = 256 * 2**20
#: The least microseconds that one such flush takes, on today's fastest memory, and the most flushes before one run.
FLUSH_US, MOST_FLUSHES = 30.0, 100


class ColdTimer:
    """Times work queued on a stream of one device."""

    def __init__(self, device: int = 0, stream: int = 0) -> None:
        self._device, self._stream = device, stream
        self._flush = driver.allocate(FLUSH_BYTES, device)
        self._start, self._end = driver.Event(device), driver.Event(device)
        self._flushes = 1

    def once(self, run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """Returns the microseconds that the work queued by ``run`` takes on the device.

        Nothing is in the L2 cache but what the work queued by ``before`` leaves there, which is not timed.

        The device must not wait for the host in between, so repeated flushes keep it busy for longer than ``run`` takes
        to return.  This does not help if ``run`` itself waits for the device.
        """
        while True:
            for _ in range(self._flushes):
                driver.memset(self._flush.pointer, 0, FLUSH_BYTES, self._device, self._stream)
            began = time.perf_counter()
            before()
            self._start.record(self._stream)
            run()
            host_us = (time.perf_counter() - began) * 1e6
            self._end.record(self._stream)
            self._end.synchronize()
            needed = min(int(host_us / FLUSH_US) + 1, MOST_FLUSHES)
            if needed <= self._flushes:
                return self._end.elapsed_ms(self._start) * 1e3
            self._flushes = needed

    def reset(self) -> None:
        """Forgets how many flushes `once` needed: the next function to time may return sooner."""
        self._flushes = 1

    def median(
        self, run: Callable[[], object], repeats: int = 15, warmup: int = 3, before: Callable[[], object] = lambda: None
    ) -> float:
        """Returns the median microseconds of ``repeats`` runs (`once`), after ``warmup`` runs that do not count."""
        self.reset()
        for _ in range(warmup):
            run()
        return median(self.once(run, before) for _ in range(repeats))
