"""The cpu engine: runs the emitted CUDA C on the host, thread for thread, built with the host's C++ compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusegraph.engines.in_place import Pairs
from fusegraph.engines.kernels import KernelExecutable
from fusegraph.engines.plans import Planner
from fusegraph.engines.plans import planner as cached_planner
from fusegraph.engines.slots import Slots
from fusegraph.graph import Graph
from fusegraph.lowering.base import Options
from fusegraph.passes.memory import ALIGNMENT
from fusegraph.phases import phase
from fusegraph.plan import Plan
from fusegraph.runtime import host_compiler
from fusegraph.runtime.arrays import CPU
from fusegraph.runtime.cache import DiskCache, default_cache
from fusegraph.runtime.memory import check_room


@dataclass(frozen=True)
class _Module:
    plan: Plan
    slots: Slots
    module: host_compiler.CpuModule
    kernels: Sequence[int]


class CpuExecutable(KernelExecutable[_Module]):
    """Runs a plan's kernels on the CPU.

    ``order`` is the order in which the threads of a block take turns (`CpuModule.launch` of
    `fusegraph.runtime.host_compiler`): a result that depends on it shows a missing barrier.  Shared memory and
    intermediates are filled with NaN patterns before use.  The kernels are those of the options' target.  If ``lazy``,
    they are built at the first call, or by `build_together`.
    """

    engine = "cpu"

    def __init__(
        self,
        graph: Graph,
        options: Options,
        *,
        fusion: bool = True,
        workspace_limit: int | None = None,
        cache: DiskCache | None = None,
        order: host_compiler.Order = "forward",
        lazy: bool = False,
        planner: Planner | None = None,
        built: Callable[[Plan], host_compiler.CpuModule] | None = None,
    ) -> None:
        """``planner`` makes plans otherwise than from the graph, of kernels in the module that ``built`` returns."""
        self._all_built = built
        planner = planner or cached_planner(fusion, None)
        super().__init__(graph, options, CPU, planner=planner, workspace_limit=workspace_limit)
        self._cache = cache or default_cache()
        self.order = order
        if not lazy:
            self._variant(())

    @phase("C++ compiler")
    def _build(self, plan: Plan) -> _Module:
        if self._all_built is not None:
            module = self._all_built(plan)
            numbers = {source.code: number for number, source in enumerate(module.kernels)}
            return _Module(plan, Slots(plan), module, [numbers[k.source.code] for k in plan.kernels])
        module = host_compiler.build([k.source for k in plan.kernels], cache=self._cache)
        return _Module(plan, Slots(plan), module, range(len(plan.kernels)))

    def _run(self, inputs: Sequence[int], outputs: Sequence[int], stream: int, pairs: Pairs) -> None:
        built = self._variant((*inputs, *outputs), pairs)
        size = built.plan.memory.size
        check_room(size, f"the workspace of graph {self.graph.name!r}")
        workspace = _aligned_bytes(size)
        constants = [_address(t.value) for t in built.slots.constants]
        pointers = built.slots.pointers(inputs, outputs, constants, _address(workspace))
        for number, kernel in zip(built.kernels, built.plan.kernels):
            if 0 not in kernel.source.grid:
                arguments = [pointers[k] for k in built.slots.positions(kernel.arguments)]
                built.module.launch(number, arguments, order=self.order, source=kernel.source)


def build_together(executables: Sequence[CpuExecutable]) -> None:
    """Builds the kernels of several lazy executables in one run of the host compiler, much faster than one by one."""
    plans = [e.plan for e in executables if e.plan is not None]
    sources = [k.source for p in plans for k in p.kernels]
    if not sources:
        return
    module = host_compiler.build(sources, cache=executables[0]._cache)
    first = 0
    for executable, plan in zip(executables, plans):
        executable._built[executable._options.alignment] = _Module(
            plan, Slots(plan), module, range(first, first + len(plan.kernels))
        )
        first += len(plan.kernels)


def _aligned_bytes(size: int) -> np.ndarray[Any, Any]:
    """Returns bytes aligned for intermediates and filled with 0xff, which is NaN in every float dtype."""
    raw = np.full(size + ALIGNMENT, 0xFF, np.uint8)
    start = -_address(raw) % ALIGNMENT
    return raw[start : start + size]


def _address(array: np.ndarray[Any, Any] | None) -> int:
    return 0 if array is None else int(array.__array_interface__["data"][0])
