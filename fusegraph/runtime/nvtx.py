"""Ranges that Nsight shows around launches of kernels, by the package nvtx.

They are there if a tool that listens is attached to the process when kernels are loaded, and the package is installed.
``FUSEGRAPH_NVTX=1`` asks for them in any case, ``FUSEGRAPH_NVTX=0`` for none.  Kernels without ranges are launched by
the very same code as ever.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from fusegraph.errors import FusegraphError, ToolchainError, shown
from fusegraph.runtime.launch import Launch, LaunchSequence

#: What tools set in the environment of programs that they start, to be told of ranges (NVTX's documentation).
_INJECTION = "NVTX_INJECTION64_PATH"
_DOMAIN, _LONGEST = "fusegraph", 200


def from_environment() -> bool | None:
    """Returns ``FUSEGRAPH_NVTX``: True for 1, False for 0, None if unset.

    Raises FusegraphError for other text, and ToolchainError for 1 without the package.
    """
    text = os.environ.get("FUSEGRAPH_NVTX", "").strip()
    if text not in ("", "0", "1"):
        raise FusegraphError(f"FUSEGRAPH_NVTX is {shown(text)}; 1 shows ranges to Nsight, 0 shows none")
    if text == "1" and _package() is None:
        raise ToolchainError("FUSEGRAPH_NVTX=1 needs the package nvtx: pip install 'fusegraph[profile]'")
    return text == "1" if text else None


def wanted() -> bool:
    """Tells whether launches have ranges."""
    asked = from_environment()
    return asked if asked is not None else bool(os.environ.get(_INJECTION)) and _package() is not None


def range_of(names: Sequence[str]) -> AbstractContextManager[Any]:
    """Shows the block as a range of these names, if the package is installed."""
    nvtx = _package()
    if nvtx is None:
        return contextlib.nullcontext()
    text = ", ".join(names)
    return nvtx.annotate(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}...", domain=_DOMAIN)  # type: ignore[no-any-return]


def _package() -> Any:
    try:
        import nvtx
    except ImportError:
        return None
    return nvtx


class RangedSequence(LaunchSequence):
    """Kernels that are queued one by one, never as a recording: each within a range, all within that of the graph.

    graph   the name of the graph.
    labels  for each kernel the names of the nodes that it computes.
    """

    __slots__ = ("_graph", "_labels")

    def __init__(
        self,
        steps: Sequence[tuple[Launch, Sequence[int]]],
        *arguments: Any,
        graph: str,
        labels: Sequence[Sequence[str]],
        **more: Any,
    ) -> None:
        super().__init__(steps, *arguments, **more)
        self._graph, self._labels = graph, labels

    def _queue(self, slot: Any) -> None:
        with range_of([self._graph]):
            for step, (launch, names) in enumerate(zip(slot.launches, self._labels)):
                with range_of(names):
                    code = launch()[0]
                if code:
                    raise self._failure(code, step)

    def _count(self, slot: Any, key: Any, stream: int) -> None:
        """Records nothing: tools would show a recording as one kernel."""
