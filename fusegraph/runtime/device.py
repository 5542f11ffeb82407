"""Where an array lives: the host, or one of the machine's GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Device:
    """``kind`` is ``"cpu"`` or ``"cuda"``, ``index`` the CUDA ordinal (0 for the CPU)."""

    kind: str
    index: int = 0

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"


CPU = Device("cpu", 0)


@cache
def cuda_device(index: int) -> Device:
    """Returns the Device of CUDA ordinal ``index``, the same object at every call."""
    return Device("cuda", index)
