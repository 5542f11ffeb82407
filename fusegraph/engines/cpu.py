"""The cpu engine: runs the emitted CUDA C on the host, thread for thread, built with the host's C++ compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import numpy as np

from fusegraph.engines.base import NOTHING
from fusegraph.engines.kernels import KernelExecutable
from fusegraph.engines.packing import Packing
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
    """A plan, the numbers of its kernels in a module, and its packed tensors."""

    plan: Plan
    slots: Slots
    module: host_compiler.CpuModule
    kernels: Sequence[int]
    executable: ReferenceType[CpuExecutable]
    packing: Packing | None = None

    def queue(self, addresses: Sequence[int], stream: int) -> None:
        """Runs all kernels."""
        self.run(range(len(self.plan.kernels)), addresses, stream)

    def run(self, kernels: Sequence[int], addresses: Sequence[int], stream: int) -> None:
        """Runs some kernels."""
        size = self.plan.memory.size
        check_room(size, f"the workspace of graph {self.plan.graph.name!r}")
        workspace = _aligned_bytes(size)
        executable = self.executable()
        order = executable.order if executable is not None else "forward"
        constants = [_address(t.value) for t in self.slots.constants]
        pointers = self.slots.pointers(addresses, (), constants, _address(workspace))
        for number, kernel in ((self.kernels[k], self.plan.kernels[k]) for k in kernels):
            if 0 not in kernel.source.grid:
                arguments = [pointers[k] for k in self.slots.positions(kernel.arguments)]
                self.module.launch(number, arguments, order=order, source=kernel.source)

    def allocate(self, nbytes: int) -> tuple[object, int]:
        """Returns memory of so many bytes and its address."""
        memory = _aligned_bytes(nbytes)
        return memory, _address(memory)

    def is_capturing(self, stream: int) -> bool:
        """Returns false: nothing is recorded."""
        return False

    def wait(self, stream: int) -> None:
        """Does nothing: kernels have run."""


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
            self._variant_for(0, NOTHING)

    @phase("C++ compiler")
    def _build(self, plan: Plan) -> _Module:
        if self._all_built is not None:
            module = self._all_built(plan)
            numbers = {source.code: number for number, source in enumerate(module.kernels)}
            return self._loaded(plan, module, [numbers[k.source.code] for k in plan.every_kernel])
        module = host_compiler.build([k.source for k in plan.every_kernel], cache=self._cache)
        return self._loaded(plan, module, range(len(plan.every_kernel)))

    def _loaded(self, plan: Plan, module: host_compiler.CpuModule, kernels: Sequence[int]) -> _Module:
        """Returns a plan whose kernels, and behind them those of its packing, have these numbers in a module."""
        this, packing, count = ref(self), None, len(plan.kernels)
        if plan.packing is not None:
            packer = _Module(plan.packing, Slots(plan.packing), module, kernels[count:], this)
            packing = Packing(plan, packer, str(CPU), self._without_packing)
        return _Module(plan, Slots(plan), module, kernels[:count], this, packing)


def build_together(executables: Sequence[CpuExecutable]) -> None:
    """Builds the kernels of several lazy executables in one run of the host compiler, much faster than one by one."""
    plans = [e.plan for e in executables if e.plan is not None]
    sources = [k.source for p in plans for k in p.every_kernel]
    if not sources:
        return
    module = host_compiler.build(sources, cache=executables[0]._cache)
    first = 0
    for executable, plan in zip(executables, plans):
        numbers = range(first, first + len(plan.every_kernel))
        executable._built[executable._options.alignment] = executable._loaded(plan, module, numbers)
        first = numbers.stop


def _aligned_bytes(size: int) -> np.ndarray[Any, Any]:
    """Returns bytes aligned for intermediates and filled with 0xff, which is NaN in every float dtype."""
    raw = np.full(size + ALIGNMENT, 0xFF, np.uint8)
    start = -_address(raw) % ALIGNMENT
    return raw[start : start + size]


def _address(array: np.ndarray[Any, Any] | None) -> int:
    return 0 if array is None else int(array.__array_interface__["data"][0])
