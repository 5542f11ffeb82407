"""What runs torch code in the suites that measure it: torch itself, inductor, and fusegraph, all through torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fusegraph.bench.time_limit import TooLong, time_limit
from fusegraph.bench.workers import told

#: Engines, as torch.compile knows them; eager torch is cuDNN and cuBLAS beside its own kernels.
ENGINES: Mapping[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {"backend": "inductor"},
    "fusegraph": {"backend": "fusegraph"},
}
OURS = "fusegraph"


def on_engine(engine: str, function: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
    """Returns a function as an engine runs it; it is compiled at its first call, in a mode of torch.compile."""
    import torch

    import fusegraph.torch  # noqa: F401 - the backend's name

    settings = ENGINES[engine]
    if settings is None:
        return function
    torch._dynamo.reset()
    made: Callable[..., Any] = torch.compile(function, dynamic=False, mode=mode, **settings)
    return made


@contextmanager
def kept(why: dict[str, str], what: str, seconds: float) -> Iterator[None]:
    """Keeps the reason in ``why[what]`` if the block fails or takes too long: a row of a suite, not its end."""
    try:
        with time_limit(seconds):
            yield
    except TooLong:
        why[what] = f"not done within {seconds:g} s"
    except Exception as error:
        why[what] = told(error)


def kernels_of_call(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Returns the kernels that a call runs, in order: names and microseconds."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as measured:
        run()
        torch.cuda.synchronize()
    events = [e for e in measured.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.device_time]
    return [(e.name, e.device_time) for e in events]
