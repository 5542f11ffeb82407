"""Executables of graphs whose sizes vary: kernels for all sizes, and an Executable for every size that came."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

from codegen.size_expressions import value
from codegen.sizes import Bounds, Size, dimension
from fusegraph.engines.arguments import bind
from fusegraph.engines.base import Executable
from fusegraph.engines.in_place import Pairs
from fusegraph.engines.plans import Planner, sized_planner
from fusegraph.errors import ArgumentError, GraphError
from fusegraph.graph import Graph
from fusegraph.lowering.base import Options
from fusegraph.plan import Plan, check_outputs
from fusegraph.ranges import SizedPlan
from fusegraph.runtime.arrays import CPU, Device, cuda_device, view
from fusegraph.runtime.cache import DiskCache, default_cache
from fusegraph.sized_graphs import OpenGraph, ahead, bounds_in, check_shapes, graph_at

#: Sizes of which Executables are kept.
MOST_KEPT = 256

#: Makes the Executable of a graph of known sizes, whose plans come from a planner (None: from the graph).
Maker = Callable[[Graph, Planner | None], Executable]


class SizedExecutable(Executable):
    """A compiled graph with Dims: call it with arrays of any sizes that they allow.

    make     makes Executables of known sizes.
    plan     plans all sizes; None: each size has a plan of its own.
    prepare  compiles the kernels of such a plan.

    Sizes follow from the shapes of the arrays.  Beside what other Executables raise, a call raises ArgumentError for
    sizes that the Dims do not allow, and GraphError for a graph with a Dim that is in no input's shape: of such a graph
    `at` returns what can be called.
    """

    def __init__(
        self,
        graph: Graph,
        options: Options,
        engine: str,
        device: Device,
        make: Maker,
        plan: Callable[[Graph, Options], SizedPlan] | None = None,
        prepare: Callable[[SizedPlan], None] = lambda _: None,
    ) -> None:
        if not isinstance(graph, OpenGraph):
            check_outputs(graph)
        self.graph, self.engine, self.device, self.plan = graph, engine, device, None
        self._make, self._plan, self._build = make, plan, prepare
        self._bounds = bounds_in(graph)
        self._sources = _told(graph, self._bounds)
        self._values = {name: low for name, (low, _) in self._bounds.items()} | {
            name: (int(graph.inputs[n].shape[axis]) - start) // unit
            for name, (n, axis, unit, start) in self._sources.items()
        }
        self._plans: dict[Options, SizedPlan] = {}
        self._made: OrderedDict[tuple[int, ...], Executable] = OrderedDict()
        self._lock = Lock()
        self._planned(options)

    def _run(self, inputs: Sequence[int], outputs: Sequence[int], stream: int, pairs: Pairs) -> None:
        raise NotImplementedError("the Executable of its sizes runs")

    @property
    def plans(self) -> Sequence[SizedPlan]:
        """The plans of all sizes: one, and another for arrays at odd addresses if such came."""
        return list(self._plans.values())

    @property
    def described(self) -> dict[str, int]:
        """The sizes by symbol at which the graph is described."""
        return {name: self._values[name] for name in self._bounds}

    @property
    def packed_bytes(self) -> int:
        with self._lock:  # sizes share the packed tensors
            return max((made.packed_bytes for made in self._made.values()), default=0)

    def repack(self) -> None:
        with self._lock:
            for made in self._made.values():
                made.repack()

    def __call__(self, /, *args: Any, out: Any = None, stream: Any = None, **named: Any) -> Any:
        arrays = bind(self.graph, args, named)
        return self.at(self._sizes(arrays))(*arrays, out=out, stream=stream)

    def samples(self) -> list[dict[str, int]]:
        """Returns sizes by symbol: the smallest, and two further ones of moderate tensors."""
        found = []
        for most in (1, 8, 64):
            sizes = {name: min(max(most, low), high) for name, (low, high) in ahead(self.graph).items()}
            if sizes not in found:
                found.append(sizes)
        return found

    def at(self, sizes: Mapping[str, int]) -> Executable:
        """Returns the Executable for sizes by symbol; others than its own may be there.

        Raises GraphError or ShapeError for sizes at which a node's operands do not go together.
        """
        key = tuple(sizes[name] for name in self._bounds)
        with self._lock:
            found = self._made.get(key)
            if found is None:
                check_shapes(self.graph, sizes)
                graph, _ = graph_at(self.graph, sizes)
                found = self._made[key] = self._make(graph, self._planner(sizes) if self._plan else None)
                if len(self._made) > MOST_KEPT:
                    self._made.popitem(last=False)
            else:
                self._made.move_to_end(key)
        return found

    def _planned(self, options: Options) -> SizedPlan | None:
        if self._plan is None:
            return None
        if options not in self._plans:
            made = self._plan(self.graph, options)
            self._build(made)
            self._plans[options] = made
        return self._plans[options]

    def _planner(self, sizes: Mapping[str, int]) -> Planner:
        def planner(graph: Graph, options: Options) -> Plan:
            planned = self._planned(options)
            assert planned is not None
            return planned.at(sizes, graph)

        return planner

    def _sizes(self, arrays: Sequence[Any]) -> dict[str, int]:
        """Returns the sizes by symbol of arrays.  Raises ArgumentError."""
        sizes = {}
        told = self._sources if len(self._sources) == len(self._bounds) else _sources(self.graph, self._bounds)
        for name, (number, axis, unit, start) in told.items():
            tensor, array = self.graph.inputs[number], arrays[number]
            shape = getattr(array, "shape", None)
            shape = tuple(view(array, name=tensor.name, stream=0).shape if shape is None else shape)
            what = f"input {tensor.name!r} of graph {self.graph.name!r}"
            if len(shape) != tensor.rank:
                raise ArgumentError(f"{what} has shape {list(shape)}, the graph was built for {tensor.rank} dimensions")
            size, (low, high) = shape[axis], self._bounds[name]
            number, rest = divmod(size - start, unit)
            if rest or not low <= number <= high:
                multiple = f"a multiple of {unit} " if unit > 1 else ""
                multiple = f"{start} less than the size, " * (start != 0) + multiple
                raise ArgumentError(
                    f"{what} has size {size} in dimension {axis}; Dim {name!r} is {multiple}from {low * unit} to "
                    f"{high * unit}"
                )
            sizes[name] = number
        return sizes


def sources_of(graph: Graph) -> dict[str, tuple[int, Bounds, Size]]:
    """Returns for each Dim of a graph, by name: what sizes are multiples of, the bounds of the quotient, and that."""
    bounds = bounds_in(graph)
    units = {name: unit for name, (_, _, unit, _) in _sources(graph, bounds).items()}
    return {n: (units[n], b, dimension(n, b.min, b)) for n, b in bounds.items()}


def sizes_given(graph: Graph, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the sizes of Dims by name, of those by symbol."""
    return {name: sizes[name] * unit for name, (unit, _, _) in sources_of(graph).items()}


def _sources(graph: Graph, bounds: Mapping[str, Bounds]) -> dict[str, tuple[int, int, int, int]]:
    """Returns what `_told` does.  Raises GraphError if there is a symbol that no input tells."""
    found = _told(graph, bounds)
    missing = [name for name in bounds if name not in found]
    if missing:
        raise GraphError(f"graph {graph.name!r}: no input's dimension tells the size of Dim {missing[0]!r}")
    return found


def _told(graph: Graph, bounds: Mapping[str, Bounds]) -> dict[str, tuple[int, int, int, int]]:
    """Returns for symbols an input's number, its dimension, and by what that is the symbol's multiple and more.

    Where there is such, nothing is added to the multiple.  Symbols that no input tells are left out.
    """
    found: dict[str, tuple[int, int, int, int]] = {}
    for number, tensor in enumerate(graph.inputs):
        for axis, size in enumerate(tensor.shape):
            if isinstance(size, Size) and len(size.dims) == 1:
                (name,) = size.dims
                first, second = (value(size.expression, {name: n}) for n in (0, 1))
                unit, start = second - first, first
                fits = unit > 0 and all(value(size.expression, {name: n}) == n * unit + start for n in bounds[name])
                if fits and (name not in found or (start == 0 and found[name][3])):
                    found[name] = number, axis, unit, start
    return found


# ---- engines


def on_cuda(
    graph: Graph, options: Options, *, fusion: bool, cache: DiskCache | None, device: int, **more: Any
) -> SizedExecutable:
    """Returns a graph for all sizes on a GPU; what follows are `CudaExecutable`'s."""
    from codegen.target import PORTABLE
    from fusegraph.engines.autotune import choosers
    from fusegraph.engines.cuda import CudaExecutable, nvrtc_options
    from fusegraph.runtime import driver, nvrtc

    if options.target == PORTABLE:
        options = replace(options, target=driver.properties(device).target)
    kept, loaded = cache or default_cache(), dict[str, Any]()
    flags, jobs = nvrtc_options(options), more["jobs"]
    how = choosers(options.target, device, False, kept, flags, jobs)

    def prepare(planned: SizedPlan) -> None:
        nvrtc.compile_kernels(
            planned.sources, options.target.arch.name, cache=kept, options=flags, jobs=jobs, progress=more["progress"]
        )

    def make(known: Graph, planner: Planner | None) -> Executable:
        return CudaExecutable(
            known, options, fusion=fusion, cache=kept, device=device, planner=planner, loaded=loaded, **more
        )

    planned = sized_planner(fusion, how.first, kept, how.state or "")
    return SizedExecutable(graph, options, "cuda", cuda_device(device), make, planned, prepare)


def on_cpu(graph: Graph, options: Options, *, fusion: bool, cache: DiskCache | None, **more: Any) -> SizedExecutable:
    """Returns a graph for all sizes on the CPU; what follows are `CpuExecutable`'s."""
    from fusegraph.engines.cpu import CpuExecutable
    from fusegraph.runtime import host_compiler

    kept = cache or default_cache()
    modules: dict[str, host_compiler.CpuModule] = {}

    def make(known: Graph, planner: Planner | None) -> Executable:
        return CpuExecutable(known, options, fusion=fusion, cache=kept, planner=planner, built=built, **more)

    def prepare(planned: SizedPlan) -> None:
        module = host_compiler.build(planned.sources, cache=kept)
        modules.update({source.code: module for source in planned.sources})

    def built(plan: Plan) -> host_compiler.CpuModule:
        found = {modules.get(k.source.code) for k in plan.every_kernel}
        if len(found) == 1 and (module := found.pop()) is not None:
            return module
        return host_compiler.build([k.source for k in plan.every_kernel], cache=kept)  # planned by size

    return SizedExecutable(graph, options, "cpu", CPU, make, sized_planner(fusion, None, kept), prepare)


def by_size(
    graph: Graph, options: Options, engine: str, device: int, compile: Callable[[Graph], Executable]
) -> SizedExecutable:
    """Returns a graph that is compiled for every size when it comes."""
    there = cuda_device(device) if engine in ("cuda", "cudnn") else CPU
    return SizedExecutable(graph, options, engine, there, lambda known, _: compile(known))
