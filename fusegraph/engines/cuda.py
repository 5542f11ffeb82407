"""The cuda engine: compiles with NVRTC, loads the cubins and launches the kernels on a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from codegen.spec import KernelSource
from fusegraph.engines.arguments import bind
from fusegraph.engines.kernels import KernelExecutable
from fusegraph.engines.slots import Slots
from fusegraph.graph import Graph
from fusegraph.lowering.base import Options
from fusegraph.plan import Plan
from fusegraph.runtime import driver, nvrtc
from fusegraph.runtime.arrays import DeviceArray, cuda_device, to_device
from fusegraph.runtime.autotune import choosers
from fusegraph.runtime.cache import DiskCache, default_cache
from fusegraph.runtime.launch import Launch, load_module
from fusegraph.runtime.replay import Replay, record

#: The architecture of kernels that are looked at where there is no GPU.
DEFAULT_ARCH = "sm_90a"

Progress = Callable[[KernelSource, nvrtc.CompiledKernel], None]


def nvrtc_options(options: Options) -> tuple[str, ...]:
    """What NVRTC is told for kernels that keep these promises."""
    # A multiply-add in one instruction would leave the product unrounded.
    return ("--fmad=false",) if options.strict else ()


@dataclass(frozen=True)
class _Loaded:
    """A plan on a device: each kernel's launch with the positions of its pointers."""

    plan: Plan
    slots: Slots
    steps: tuple[tuple[Launch, tuple[int, ...]], ...]
    constants: tuple[DeviceArray, ...]
    constant_pointers: tuple[int, ...]


class CudaExecutable(KernelExecutable[_Loaded]):
    """Runs a plan's kernels on a GPU.

    Compiling needs no driver: without one (or for another architecture) `kernels` has the cubins, and calling the
    Executable raises DeviceError.  Kernels are queued on the stream; nothing waits for them.  Each stream has its own
    workspace, and each capture of a CUDA graph one that stays with the Executable.
    """

    engine = "cuda"

    def __init__(
        self,
        graph: Graph,
        options: Options,
        *,
        fusion: bool = True,
        workspace_limit: int | None = None,
        cache: DiskCache | None = None,
        arch: str | None = None,
        device: int = 0,
        jobs: int | None = None,
        progress: Progress | None = None,
        autotune: bool | None = None,
    ) -> None:
        self._cache = cache or default_cache()
        self._jobs, self._progress = jobs, progress
        self.arch = arch or driver.properties(device).arch
        self._nvrtc_options = nvrtc_options(options)
        choose, later = choosers(self.arch, device, autotune, self._cache, self._nvrtc_options, jobs)
        super().__init__(
            graph,
            options,
            cuda_device(device),
            fusion=fusion,
            workspace_limit=workspace_limit,
            choose=choose,
            choose_later=later,
        )
        assert self.plan is not None
        #: the compiled kernels, in the order in which they run
        self.kernels = self._compile(self.plan)
        self._workspaces: dict[int, driver.DeviceBuffer] = {}
        self._captured: list[driver.DeviceBuffer] = []

    def _compile(self, plan: Plan) -> list[nvrtc.CompiledKernel]:
        return nvrtc.compile_kernels(
            [k.source for k in plan.kernels],
            self.arch,
            cache=self._cache,
            options=self._nvrtc_options,
            jobs=self._jobs,
            progress=self._progress,
        )

    def _build(self, plan: Plan) -> _Loaded:
        compiled = self.kernels if plan is self.plan else self._compile(plan)
        slots = Slots(plan)
        steps = []
        for kernel, cubin in zip(plan.kernels, compiled):
            source = kernel.source
            if 0 in source.grid:
                continue
            function = load_module(cubin.cubin, self.device.index).function(source.name)
            positions = slots.positions(kernel.arguments)
            steps.append(
                (Launch(function, source.grid, source.block, source.dynamic_shared_bytes, len(positions)), positions)
            )
        constants = tuple(to_device(t.value, self.device.index) for t in slots.constants)
        if constants:
            driver.synchronize(0, self.device.index)
        return _Loaded(plan, slots, tuple(steps), constants, tuple(c.pointer for c in constants))

    def _run(self, inputs: Sequence[int], outputs: Sequence[int], stream: int) -> None:
        loaded = self._variant(inputs, outputs)
        pushed = driver.enter(self.device.index)
        try:
            workspace = self._workspace(loaded.plan.memory.size, stream)
            pointers = loaded.slots.pointers(inputs, outputs, loaded.constant_pointers, workspace)
            for launch, positions in loaded.steps:
                launch([pointers[k] for k in positions], stream)
        finally:
            if pushed:
                driver.leave()

    def record(self, *args: Any, out: Any = None, **named: Any) -> tuple[Any, Replay]:
        """(outputs, replay): the call as a CUDA graph on these very arrays.

        ``replay(stream)`` runs it again for about the cost of one driver call: copy new inputs into the arrays given
        here, read the results from ``outputs`` (or ``out``).  The outputs are computed once now.
        """
        arrays = bind(self.graph, args, named)
        results = self(*arrays, out=out)
        targets = results if isinstance(results, tuple) else (results,)
        driver.synchronize(0, self.device.index)
        replay = record(
            lambda stream: self(*arrays, out=targets, stream=stream), self.device.index, (self, arrays, targets)
        )
        return results, replay

    def _workspace(self, size: int, stream: int) -> int:
        if not size:
            return 0
        if driver.is_capturing(stream, self.device.index):
            # A captured graph may be replayed beside other calls: its intermediates are its own.
            buffer = driver.allocate(size, self.device.index)
            self._captured.append(buffer)
            return buffer.pointer
        found = self._workspaces.get(stream)
        if found is None or found.nbytes < size:
            if found is not None:
                driver.synchronize(stream, self.device.index)
            found = self._workspaces[stream] = driver.allocate(size, self.device.index)
        return found.pointer
