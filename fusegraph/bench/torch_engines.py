"""What runs torch code in the suites that measure it: torch itself, inductor, and fusegraph, all through torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
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


def on_engine(
    engine: str, function: Callable[..., Any], mode: str | None = None, *, dynamic: bool = False, forget: bool = True
) -> Callable[..., Any]:
    """Returns a function as an engine runs it; it is compiled at its first call, in a mode of torch.compile.

    If ``dynamic``, sizes and numbers may vary from call to call.  With ``forget`` what other engines have compiled by
    now is compiled again when it is called.
    """
    import torch

    import fusegraph.torch  # noqa: F401 - the backend's name

    settings = ENGINES[engine]
    if settings is None:
        return function
    if forget:
        torch._dynamo.reset()
    made: Callable[..., Any] = torch.compile(function, dynamic=dynamic, mode=mode, **settings)
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


def use_caches(folder: str) -> None:
    """Lets both compilers keep what they make in a folder; before torch is imported."""
    os.environ["FUSEGRAPH_CACHE_DIR"] = f"{folder}/fusegraph"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
    os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"


def difference(expected: Sequence[Any], got: Sequence[Any]) -> float:
    """Returns the largest difference of tensors, each relative to its largest element; computed where ``got`` is.

    A tensor that is all but zero beside the largest one counts as a thousandth of that, because it consists of rounding
    errors.  What is not a number is infinitely far off.
    """
    largest = [x.double().abs().max().item() if x.numel() else 0.0 for x in expected]
    least, found = max(largest, default=0.0) / 1000 or 1.0, 0.0
    for x, y, most in zip(expected, got, largest, strict=True):
        off = (x.to(y.device).double() - y.double()).abs().max().item() if x.numel() else 0.0
        found = max(found, off / max(most, least) if off == off else inf)
    return found
