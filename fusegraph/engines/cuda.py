"""The cuda engine: compiles with NVRTC, loads the cubins and launches the kernels on a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import or_
from threading import Lock, local
from typing import Any

from codegen.target import PORTABLE
from fusegraph.engines.arguments import bind, with_own_memory
from fusegraph.engines.autotune import Choosers, choosers
from fusegraph.engines.base import NOTHING
from fusegraph.engines.kernels import KernelExecutable
from fusegraph.engines.owners import labels
from fusegraph.engines.packing import Packing, Run
from fusegraph.engines.partitions import DeviceClock, PartitionTuner, settling
from fusegraph.engines.plans import Planner
from fusegraph.engines.plans import planner as cached_planner
from fusegraph.engines.slots import Slots
from fusegraph.engines.stages import Stage, stages
from fusegraph.graph import Graph
from fusegraph.lowering.base import Options
from fusegraph.phases import current, phase
from fusegraph.plan import Plan
from fusegraph.runtime import driver, nvrtc, nvtx
from fusegraph.runtime.arrays import DeviceArray, cuda_device, to_device, torch_allocates, torch_memory
from fusegraph.runtime.cache import DiskCache, default_cache
from fusegraph.runtime.launch import Function, Launch, LaunchSequence, Module, one_after_another
from fusegraph.runtime.replay import Replay, record


def nvrtc_options(options: Options) -> tuple[str, ...]:
    """Returns NVRTC's flags for kernels with these options."""
    # A fused multiply-add would leave the product unrounded.
    return ("--fmad=false",) if options.strict else ()


@dataclass(frozen=True)
class _Loaded:
    """A plan loaded on a device: its kernels ready to launch, the constants that they read, and packed tensors."""

    plan: Plan
    queue: Run
    stages: Sequence[tuple[Stage, LaunchSequence]]
    constants: tuple[DeviceArray, ...]
    packing: Packing | None


@dataclass(frozen=True)
class _Steps:
    """The launches of a plan's kernels; None for those that have nothing to do."""

    plan: Plan
    slots: Slots
    steps: Sequence[tuple[Launch, tuple[int, ...]] | None]
    device: int

    def constants(self) -> tuple[DeviceArray, ...]:
        """Returns the plan's constants, copied to the device; also while a stream is captured."""
        with driver.relaxed_capture():
            return tuple(to_device(t.value, self.device, stream=driver.PER_THREAD) for t in self.slots.constants)

    def sequence(self, kernels: Sequence[int], constants: Sequence[DeviceArray]) -> LaunchSequence:
        """Returns what launches some of the kernels."""
        present = [k for k in kernels if self.steps[k] is not None]
        steps = [step for k in present if (step := self.steps[k]) is not None]
        slots, fixed = self.slots, self.slots.fixed([c.pointer for c in constants])
        table = slots.arrays, fixed, slots.in_parts, slots.views
        if not nvtx.wanted():
            return LaunchSequence(steps, *table, device=self.device)
        names = labels(self.plan)
        chosen = [names[k] for k in present]
        return nvtx.RangedSequence(steps, *table, device=self.device, graph=self.plan.graph.name, labels=chosen)


class _Packer:
    """Makes packed tensors with the kernels of a packing."""

    def __init__(self, plan: Plan, steps: _Steps) -> None:
        self._size, self._parts, self._steps, self._device = plan.memory.size, plan.memory.parts, steps, steps.device

    def allocate(self, nbytes: int) -> tuple[object, int]:
        buffer = driver.allocate(nbytes, self._device)
        return buffer, buffer.pointer

    def run(self, kernels: Sequence[int], addresses: Sequence[int], stream: int) -> object:
        workspace, constants = driver.allocate(self._size, self._device), self._steps.constants()
        parts = tuple([workspace.pointer + start for start in self._parts])
        self._steps.sequence(kernels, constants)(tuple(addresses), stream, parts)
        return workspace, constants

    def is_capturing(self, stream: int) -> bool:
        return driver.is_capturing(stream, self._device)

    def wait(self, stream: int) -> None:
        driver.synchronize(stream, self._device)


class CudaExecutable(KernelExecutable[_Loaded]):
    """Runs a plan's kernels on a GPU.

    Compiles for the options' target, by default the device's.  A given target needs no driver: without a driver (or on
    another device) `kernels` has the cubins, and calling the Executable raises DeviceError.  Without ``wait`` this
    returns while kernels are being compiled; the first call waits for them, and raises CompileError.  Calls queue their
    kernels on the stream and do not wait.  On torch's current stream the workspace is memory of torch's allocator that
    a call gives back.  Else each stream has its own; each capture of a CUDA graph has one that lives as long as the
    Executable.  Several threads may call it at once, also on the same stream.
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
        device: int = 0,
        jobs: int | None = None,
        progress: nvrtc.Progress | None = None,
        autotune: bool | None = None,
        wait: bool = True,
        planner: Planner | None = None,
        loaded: dict[str, Function] | None = None,
    ) -> None:
        """``planner`` makes plans otherwise than from the graph; ``loaded`` are functions on the device by their code,
        which executables share.
        """
        self._loaded = {} if loaded is None else loaded
        self._cache = cache or default_cache()
        self._jobs, self._progress = jobs, progress
        self._phases = current()
        self._compiled: Plan | None = None
        if options.target == PORTABLE:  # its kernels run on the CPU alone
            options = replace(options, target=driver.properties(device).target)
        self.target = options.target
        self._nvrtc_options = nvrtc_options(options)
        how = choosers(self.target, device, autotune, self._cache, self._nvrtc_options, jobs)
        super().__init__(
            graph,
            options,
            cuda_device(device),
            planner=planner or self._settling(fusion, how, device),
            later=planner or cached_planner(fusion, how.later),
            workspace_limit=workspace_limit,
        )
        assert self.plan is not None
        self._workspaces = _Workspaces(device)
        if self._compiled is not self.plan:
            self._compile(self.plan)
        if wait:
            self.kernels  # noqa: B018 - waits

    def _settling(self, fusion: bool, how: Choosers, device: int) -> Planner:
        """Returns what plans with the schedules and the choices that were measured, or are measured now."""
        cache = self._cache if how.state is not None else None
        first = cached_planner(fusion, how.first, cache, how.state or "", self._compile)
        if not fusion or how.device_name is None:
            return first
        tuner = None
        if how.state is None:
            clock = DeviceClock(self.target, self._cache, self._nvrtc_options, device, self._jobs)
            tuner = PartitionTuner(cached_planner(fusion, how.later), clock, first)
        return settling(first, tuner, self._cache, how.device_name)

    @property
    def kernels(self) -> list[nvrtc.CompiledKernel]:
        """The compiled kernels, in the order in which they run; waits for those that are still being compiled."""
        assert self.plan is not None
        return self._every_kernel[: len(self.plan.kernels)]

    @property
    def packing_kernels(self) -> list[nvrtc.CompiledKernel]:
        """The compiled kernels that make packed tensors; waits like `kernels`."""
        assert self.plan is not None
        return self._every_kernel[len(self.plan.kernels) :]

    @cached_property
    def _every_kernel(self) -> list[nvrtc.CompiledKernel]:
        with self._phases.phase("NVRTC"):
            return self._compilation.kernels(self._progress)

    def _compile(self, plan: Plan) -> None:
        """Starts to compile the kernels of the first variant."""
        self._compiled, self._compilation = plan, self._started(plan)

    @phase("NVRTC")
    def _started(self, plan: Plan) -> nvrtc.Compilation:
        """Starts to compile a plan's kernels, and those of its packing."""
        sources = [k.source for k in plan.every_kernel]
        return nvrtc.start(
            sources, self.target.arch.name, cache=self._cache, options=self._nvrtc_options, jobs=self._jobs
        )

    def _build(self, plan: Plan) -> _Loaded:
        compiled = self._every_kernel if plan is self.plan else self._started(plan).kernels(self._progress)
        with self._phases.phase("loading"):
            return self._on_device(plan, compiled)

    def _on_device(self, plan: Plan, compiled: Sequence[nvrtc.CompiledKernel]) -> _Loaded:
        """Loads a plan's kernels and constants on the device; those of its packing are behind them."""
        count = len(plan.kernels)
        loaded = self._steps(plan, compiled[:count])
        constants = loaded.constants()
        staged = [(stage, loaded.sequence(stage.kernels, constants)) for stage in stages(plan)]
        size, starts, workspaces = plan.memory.size, plan.memory.parts, self._workspaces
        sequences = [sequence for _, sequence in staged]

        def queue(addresses: tuple[int, ...], stream: int) -> None:
            with workspaces.room(size, stream) as workspace:
                places = tuple([workspace + start for start in starts])
                for sequence in sequences:
                    sequence(addresses, stream, places)

        packing = None
        if plan.packing is not None:
            packer = _Packer(plan.packing, self._steps(plan.packing, compiled[count:]))
            packing = Packing(plan, packer, str(self.device), self._without_packing)
        return _Loaded(plan, queue if size or len(staged) > 1 else sequences[0], staged, constants, packing)

    def consume(self, arrays: list[Any]) -> Any:
        call, stream, addresses = self._read(arrays)
        if addresses is None or not torch_allocates(stream, self._ordinal):
            return super().consume(arrays)
        loaded = self._variant_for(reduce(or_, addresses, 0), NOTHING)
        makers = call.makers or self._allocators(call.framework, stream)
        results: list[Any] = [None] * len(makers)
        sizes = loaded.plan.memory.part_sizes
        parts: list[Any] = [None] * len(sizes)
        places, starts = [*addresses, *[0] * len(makers)], [0] * len(sizes)
        for stage, sequence in loaded.stages:
            for n in stage.makes:
                results[n] = makers[n]()
                places[self._number + n] = call.address_of(results[n])
            for n in stage.opens:
                parts[n] = torch_memory(sizes[n], self._ordinal)
                starts[n] = parts[n].data_ptr()
            sequence(tuple(places), stream, tuple(starts))
            for n in stage.drops:
                arrays[n], places[n] = None, 0
            for n in stage.closes:
                parts[n], starts[n] = None, 0
        arrays.clear()
        return results[0] if self._single else tuple(results)

    def _steps(self, plan: Plan, compiled: Sequence[nvrtc.CompiledKernel]) -> _Steps:
        """Loads kernels on the device."""
        slots = Slots(plan)
        index, has_pdl = self.device.index, self.target.arch.has_pdl
        functions = self._loaded
        steps: list[tuple[Launch, tuple[int, ...]] | None] = []
        for kernel, cubin in zip(plan.kernels, compiled):
            source = kernel.source
            if 0 in source.grid:
                steps.append(None)
                continue
            if source.code not in functions:
                functions[source.code] = Module(cubin.cubin, index).function(source.name)
            positions = slots.positions(kernel.arguments)
            # The first one that has something to do comes behind another's kernels, which it may read the results of.
            overlapping = has_pdl and any(step is not None for step in steps)
            launch = Launch.of(functions[source.code], source, len(positions), overlapping=overlapping)
            steps.append((launch, positions))
        return _Steps(plan, slots, steps, index)

    def launches(self) -> list[Launch | None]:
        """Returns what launches each kernel of a call alone, and behind them those that make packed tensors.

        None stands for a kernel that has nothing to do.
        """
        assert self.plan is not None
        plans = [(self.plan, self.kernels)]
        plans += [(self.plan.packing, self.packing_kernels)] if self.plan.packing is not None else []
        with one_after_another():
            steps = [step for plan, compiled in plans for step in self._steps(plan, compiled).steps]
        return [step[0] if step is not None else None for step in steps]

    def record(self, *args: Any, out: Any = None, **named: Any) -> tuple[Any, Replay]:
        """Records the call as a CUDA graph on these very arrays; returns (outputs, replay).

        ``replay(stream)`` runs the graph again for about the cost of one driver call: copy new inputs into the arrays
        given here, and read the results from ``outputs`` (or ``out``).  The outputs are also computed once now; inputs
        that the graph assigns to then have their new values.
        """
        arrays = bind(self.graph, args, named)
        results = self(*arrays, out=out)
        targets = with_own_memory(self.graph, results)
        driver.synchronize(0, self.device.index)
        replay = record(
            lambda stream: self(*arrays, out=targets, stream=stream), self.device.index, (self, arrays, targets)
        )
        return results, replay


#: CU_STREAM_PER_THREAD: the handle that stands for the calling thread's own default stream.
PER_THREAD = 2


class _Workspaces:
    """Memory for intermediates beside torch's: a buffer for each stream, and one for each capture of a CUDA graph.

    The lock is held while a call asks for its buffer and queues its kernels.
    """

    def __init__(self, device: int) -> None:
        self._lock = Lock()
        self._device = device
        self._of_stream: dict[int, driver.DeviceBuffer] = {}
        self._own = local()  # holds the buffer of a thread's own default stream
        self._captured: list[driver.DeviceBuffer] = []

    @contextmanager
    def room(self, size: int, stream: int) -> Iterator[int]:
        """Holds ``size`` bytes for the intermediates of a call on ``stream`` while it queues its kernels."""
        if torch_allocates(stream, self._device):
            taken = torch_memory(size, self._device)
            yield taken.data_ptr()
            return
        # Kernels that another thread's call queued in between would overwrite the intermediates.
        with self._lock:
            yield self._address(size, stream)

    def _address(self, size: int, stream: int) -> int:
        """Returns the address of ``size`` bytes for the intermediates of a call on ``stream``."""
        if stream and driver.is_capturing(stream, self._device):
            # A captured graph may be replayed while other calls run, so its intermediates are its own.
            buffer = driver.allocate(size, self._device)
            self._captured.append(buffer)
            return buffer.pointer
        if stream == PER_THREAD and not hasattr(self._own, "of_stream"):
            self._own.of_stream = {}
        of_stream: dict[int, driver.DeviceBuffer] = self._own.of_stream if stream == PER_THREAD else self._of_stream
        found = of_stream.get(stream)
        if found is None or found.nbytes < size:
            if found is not None:
                driver.synchronize(stream, self._device)
            found = of_stream[stream] = driver.allocate(size, self._device)
        return found.pointer
