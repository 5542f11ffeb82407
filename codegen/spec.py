"""Kernel specifications: what a kernel computes, independent of graphs and of how it is scheduled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelSource:
    """One rendered kernel: CUDA C, and how to launch it.

    name                  the ``extern "C"`` symbol, a C identifier.
    code                  the whole translation unit; includes headers of ``codegen/device`` by name (``#include "types.cuh"``).
    grid, block           launch dimensions (x, y, z).  A grid with a zero means there is nothing to launch.
    dynamic_shared_bytes  dynamic shared memory of a block, in bytes.
    uses_barriers         whether threads of a block depend on each other (barriers, shuffles): the CPU run needs fibers then.
    """

    name: str
    code: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared_bytes: int = 0
    uses_barriers: bool = False
