"""The cudnn engine: runs the same graph through NVIDIA's cuDNN, for comparison."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from codegen.declined import Declined
from fusegraph.engines.base import Executable
from fusegraph.engines.in_place import Pairs
from fusegraph.engines.scratch import random_array
from fusegraph.engines.slots import Slots
from fusegraph.errors import DeviceError, NotSupportedError, WorkspaceError, one_line
from fusegraph.graph import Graph, Node
from fusegraph.lowering import cudnn as lowering
from fusegraph.lowering.base import GroupView, Lowered, Options
from fusegraph.passes.fuse import fuse
from fusegraph.passes.memory import plan_memory
from fusegraph.passes.partition import Group, Partition
from fusegraph.passes.pipeline import Step, Steps, summary
from fusegraph.passes.simplify import simplify
from fusegraph.plan import Plan
from fusegraph.runtime import driver
from fusegraph.runtime.arrays import cuda_device, to_device
from fusegraph.runtime.timing import ColdTimer

#: Autotuning: timed runs of each plan, and the seconds after which no further plan is tried once one has run.  The
#: plans come best guess first, and there can be a hundred, each of which cuDNN has to compile.
_REPEATS = 7
_TUNING_SECONDS = 30.0


@dataclass(frozen=True)
class CudnnPlan:
    """What cuDNN runs for one group: the plan's name as cuDNN reports it, its workspace in bytes, the node names."""

    name: str
    workspace_bytes: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Handle:
    """A cuDNN handle, one per device, where it holds memory.  Only one thread may use it at a time."""

    value: Any
    lock: threading.RLock


@cache
def device_handle(device: int) -> Handle:
    """Returns the handle of a device.  The first call makes it, which loads cuDNN."""
    with driver.using(device):
        return Handle(lowering.frontend().create_handle(), threading.RLock())


#: One cuDNN graph, and the index of the plan that runs.
_Built = tuple[lowering.Described, int]


@dataclass
class _Segment:
    """One built cuDNN graph: which of its plans runs, and where its pointers come from."""

    described: lowering.Described
    index: int
    plan: CudnnPlan
    uids: tuple[int, ...]
    positions: tuple[int, ...]
    fixed: dict[int, int]


class CudnnExecutable(Executable):
    """Runs a graph with cuDNN.

    partition  False: the whole graph is one cuDNN graph; NotSupportedError with cuDNN's reason if it refuses.  True:
               the largest pieces that cuDNN takes run one after another.
    autotune   True times the plans that cuDNN proposes and keeps the fastest; False takes the first that builds, in the
               order of cuDNN's heuristics.

    `plans` names what runs.  Needs a GPU, a driver and the packages of the extra ``cudnn``.
    """

    engine = "cudnn"

    def __init__(
        self,
        graph: Graph,
        options: Options,
        *,
        partition: bool = False,
        autotune: bool = False,
        workspace_limit: int | None = None,
        device: int = 0,
    ) -> None:
        if graph.updates:
            names = ", ".join(repr(x.name) for x in graph.updates.values())
            raise NotSupportedError(f"cuDNN's graphs overwrite no inputs; graph {graph.name!r} assigns to {names}")
        self._cudnn = lowering.frontend()
        driver.properties(device)  # the driver's own error if there is no GPU
        self._ordinal = device
        self._handle = device_handle(device)
        simplified = simplify(graph)
        steps = Steps((Step("simplification", summary(simplify), graph, simplified),))
        with self._handle.lock, driver.using(device):
            self.partition, built = self._built(simplified.graph, options, partition, autotune)
        plan = Plan(graph, steps, self.partition, (), plan_memory(self.partition))
        super().__init__(graph, plan, cuda_device(device))
        self._slots = Slots(plan)
        self._constants = tuple(to_device(t.value, device) for t in self._slots.constants)
        self._constant_pointers = tuple(c.pointer for c in self._constants)
        self._segments = [self._segment(*piece) for piece in zip(self.partition.groups, built, strict=True)]
        self.plans = [s.plan for s in self._segments]
        if workspace_limit is not None and self.workspace_bytes > workspace_limit:
            raise WorkspaceError(
                f"graph {graph.name!r} needs a workspace of {self.workspace_bytes} bytes with cuDNN "
                f"({', '.join(p.name for p in self.plans)}), the limit is {workspace_limit}"
            )
        self._workspaces: dict[int, driver.DeviceBuffer] = {}

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the intermediates between cuDNN's graphs, plus the largest workspace that one of them asks for."""
        return super().workspace_bytes + max((s.plan.workspace_bytes for s in self._segments), default=0)

    # ---- what cuDNN takes

    def _built(self, graph: Graph, options: Options, pieces: bool, autotune: bool) -> tuple[Partition, list[_Built]]:
        """Returns the pieces and what runs each.

        A piece none of whose plans builds counts as refused, and the graph is partitioned again.
        """
        backend = _Lowering(self)
        known: dict[tuple[Node, ...], _Built] = {}
        while True:
            partition = self._partition(graph, options, pieces, backend)
            try:
                for group in partition.groups:
                    if group.nodes not in known:
                        known[group.nodes] = self._choose(group, autotune)
            except NotSupportedError as error:
                if not pieces:
                    raise
                backend.refuse(group.nodes, error.reason)
                continue
            return partition, [known[group.nodes] for group in partition.groups]

    def _partition(self, graph: Graph, options: Options, pieces: bool, backend: _Lowering) -> Partition:
        if pieces:
            try:
                return fuse(graph, options, backend=backend)
            except Declined as refusal:
                raise NotSupportedError(
                    f"cuDNN cannot run graph {graph.name!r} even in pieces: {refusal}", str(refusal)
                ) from None
        order = {n: k for k, n in enumerate(graph.nodes)}
        view = GroupView(graph, graph.nodes, order)
        try:
            lowered = backend.lower(view, options)
        except Declined as refusal:
            raise NotSupportedError(
                f"cuDNN refuses graph {graph.name!r} ({_named(view.nodes)}): {refusal}; "
                "partition=True runs the largest pieces that it takes",
                str(refusal),
            ) from None
        return Partition(graph, (Group(view.nodes, lowered),), ())

    def planned(self, spec: lowering.CudnnSpec) -> lowering.Described:
        """Returns the pygraph of a spec with its execution plans.  Raises Declined with cuDNN's reason."""
        described = lowering.build(spec, self._handle.value)
        graph, modes, notes = described.pygraph, self._cudnn.heur_mode, self._cudnn._compiled_module.numerical_note
        try:
            with driver.using(self._ordinal):
                graph.validate()
                graph.build_operation_graph()
                graph.create_execution_plans([modes.A, modes.FALLBACK])
                if spec.multiplies_float32:
                    # float32 is multiplied as float32, as everywhere in fusegraph, not as tf32.
                    graph.deselect_numeric_notes([notes.TENSOR_CORE, notes.DOWN_CONVERT_INPUTS])
                graph.check_support()
        except Exception as error:  # the type differs by version: cudnnGraphNotSupportedError, RuntimeError, ...
            raise Declined(one_line(error)) from None
        return described

    def _choose(self, group: Group, autotune: bool) -> _Built:
        described = self.planned(group.lowered.spec)
        return described, self._autotuned(group, described) if autotune else self._first(group, described)

    def _segment(self, group: Group, built: _Built) -> _Segment:
        described, index = built
        graph = described.pygraph
        uids = tuple(described.uids.values())
        positions = self._slots.positions(tuple(described.uids))
        plan = CudnnPlan(
            str(graph.get_plan_name_at_index(index)),
            int(graph.get_workspace_size_plan_at_index(index)),
            tuple(n.name for n in group.nodes),
        )
        return _Segment(described, index, plan, uids, positions, _addresses(described))

    def _first(self, group: Group, described: lowering.Described) -> int:
        """Returns the index of the first plan that builds, in the order of cuDNN's heuristics."""
        graph = described.pygraph
        reasons = []
        for index in range(graph.get_execution_plan_count()):
            try:
                graph.build_plan_at_index(index)
            except Exception as error:
                reasons.append(one_line(error))
                continue
            return index
        raise _nothing_works(group, reasons)

    def _autotuned(self, group: Group, described: lowering.Described) -> int:
        """Returns the index of the fastest plan on random data; plans that fail to build or run are skipped."""
        graph = described.pygraph
        buffers = [random_array(t.shape, t.strides, t.dtype, self._ordinal) for t in described.uids]
        pointers = dict(zip(described.uids.values(), (b.pointer for b in buffers)))
        pointers |= _addresses(described)
        timer = ColdTimer(self._ordinal)
        self._cudnn.set_stream(self._handle.value, 0)  # the timer's stream; the last call left its own set
        best, fastest, reasons = -1, float("inf"), []
        end = time.perf_counter() + _TUNING_SECONDS
        for index in range(graph.get_execution_plan_count()):
            if best >= 0 and time.perf_counter() > end:
                break
            try:
                graph.build_plan_at_index(index)
                workspace = driver.allocate(max(int(graph.get_workspace_size_plan_at_index(index)), 1), self._ordinal)

                def run(index: int = index, workspace: driver.DeviceBuffer = workspace) -> None:
                    graph.execute_plan_at_index(pointers, workspace.pointer, index, handle=self._handle.value)

                run()  # the first run of a plan loads its kernels, which takes longer than running them
                if timer.once(run) > 3 * fastest:
                    continue
                median = timer.median(run, repeats=_REPEATS, warmup=0)
            except Exception as error:
                reasons.append(one_line(error))
                continue
            if median < fastest:
                best, fastest = index, median
        if best < 0:
            raise _nothing_works(group, reasons)
        graph.build_plan_at_index(best)
        return best

    # ---- running

    def _run(self, inputs: Sequence[int], outputs: Sequence[int], stream: int, pairs: Pairs) -> None:
        handle = self._handle.value
        with self._handle.lock, driver.using(self._ordinal):
            self._cudnn.set_stream(handle, stream)
            base = self._workspace(stream)
            pointers = self._slots.pointers(inputs, outputs, self._constant_pointers, base)
            scratch = base + super().workspace_bytes
            for segment in self._segments:
                pack = dict(zip(segment.uids, [pointers[k] for k in segment.positions]))
                pack |= segment.fixed
                try:
                    segment.described.pygraph.execute_plan_at_index(pack, scratch, segment.index, handle=handle)
                except Exception as error:
                    raise DeviceError(f"cuDNN's plan {segment.plan.name} failed: {one_line(error)}") from error

    def _workspace(self, stream: int) -> int:
        found = self._workspaces.get(stream)
        if found is None:
            found = self._workspaces[stream] = driver.allocate(max(self.workspace_bytes, 1), self._ordinal)
        return found.pointer


class _Lowering:
    """The backend that lowers groups to cuDNN: accepts a group if cuDNN makes plans for it.  Answers are remembered."""

    def __init__(self, executable: CudnnExecutable) -> None:
        self._executable = executable
        self._answers: dict[frozenset[Node], str | None] = {}

    def accept(self, view: GroupView, options: Options) -> None:
        if view.members not in self._answers:
            self._answers[view.members] = self._ask(view, options)
        reason = self._answers[view.members]
        if reason is not None:
            raise Declined(reason)

    def refuse(self, nodes: Sequence[Node], reason: str) -> None:
        """Withdraws an acceptance: no plan that cuDNN made for these nodes builds."""
        self._answers[frozenset(nodes)] = reason

    def _ask(self, view: GroupView, options: Options) -> str | None:
        try:
            self._executable.planned(lowering.lower(view, options, view.graph.name).spec)
        except Declined as refusal:
            return str(refusal)
        return None

    def lower(self, view: GroupView, options: Options) -> Lowered:
        self.accept(view, options)
        return lowering.lower(view, options, view.graph.name)


def _addresses(described: lowering.Described) -> dict[int, int]:
    """Returns the host addresses of the scalars that cuDNN reads, by uid."""
    return {uid: int(value.__array_interface__["data"][0]) for uid, value in described.scalars.items()}


def _nothing_works(group: Group, reasons: Sequence[str]) -> NotSupportedError:
    nodes = _named(group.nodes)
    why = "; ".join(dict.fromkeys(reasons)) or "it gave no reason"
    failed = "none of them builds and runs"
    return NotSupportedError(
        f"cuDNN proposes plans for {nodes}, but {failed}: {why[:500]}", f"proposes plans, but {failed}: {why[:200]}"
    )


def _named(nodes: Sequence[Node]) -> str:
    return ", ".join(f"{n.op.name} {n.name!r}" for n in nodes[:12]) + (" ..." if len(nodes) > 12 else "")
