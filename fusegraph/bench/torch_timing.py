"""What calls of torch code cost on a GPU: microseconds of calls and of replays, kernels, memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from fusegraph.report.profile_gpu import timeline

#: Seconds of runs that are timed, and the fewest and the most of these.
TIMED_S, FEWEST, MOST = 0.5, 5, 50
#: Bytes that are written before every run, so that nothing that it reads is still in the L2 cache.
FLUSH_BYTES = 256 << 20


def median_us(run: Callable[[], Any]) -> float:
    """Returns the median microseconds from the moment that a call begins to queue its work to the end of that work."""
    import torch

    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    until = time.perf_counter() + TIMED_S
    for _ in range(2):
        run()
    while len(times) < FEWEST or (len(times) < MOST and time.perf_counter() < until):
        flush.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return round(median(times), 1)


def recorded(run: Callable[[], Any]) -> tuple[Any, Any]:
    """Returns the CUDA graph of a call, and what the call returned, which replays write."""
    import torch

    graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        held = run()
    return graph, held


def replay_us(run: Callable[[], Any]) -> float:
    """Returns the median microseconds of a replay of a call's CUDA graph, on the device alone.

    The host has queued the whole graph before the device comes to it: launches of large graphs take it milliseconds.
    """
    from fusegraph.runtime.timing import ColdTimer

    graph, _held = recorded(run)
    return round(ColdTimer().median(graph.replay), 1)


def kernels_of_call(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Returns the kernels that a call runs, in order: names and microseconds."""
    return [(name, us) for name, _, us in timeline(run) or ()]


def other_bytes() -> int:
    """Returns how many bytes of the device are taken, but not by torch's pool: kernels, packed parameters."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())


def peaks_mb(run: Callable[[], Any], other: int) -> tuple[float, float, float]:
    """Returns megabytes that a call takes at most: in torch's pool, on the whole, and on the whole with what the pool
    holds but does not use.

    What else is taken of the device counts, but for the ``other`` bytes that were taken before.
    """
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    pool, held, more = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), other_bytes() - other
    pool_mb, peak_mb, held_mb = (round(x / 2**20, 1) for x in (pool, pool + max(0, more), held + max(0, more)))
    return pool_mb, peak_mb, held_mb
