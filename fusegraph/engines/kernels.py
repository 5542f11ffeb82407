"""What engines that run generated kernels share: variants by alignment, and the workspace limit."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock
from typing import Generic, Protocol, TypeVar

from fusegraph.engines import in_place
from fusegraph.engines.base import Executable, Queue
from fusegraph.engines.in_place import Pairs
from fusegraph.engines.packing import Bound, Packing, Run
from fusegraph.engines.plans import Planner
from fusegraph.errors import WorkspaceError
from fusegraph.graph import Graph
from fusegraph.lowering.base import Options
from fusegraph.plan import Plan
from fusegraph.runtime.arrays import Device


class Loaded(Protocol):
    """A plan ready to run."""

    @property
    def queue(self) -> Run:
        """Queues the kernels."""

    @property
    def packing(self) -> Packing | None:
        """The packed tensors, which are further inputs of ``queue``; None if there are none."""


Built = TypeVar("Built", bound=Loaded)


class KernelExecutable(Executable, Generic[Built]):
    """An Executable made of kernels.

    Kernels are built for pointers aligned to 16 bytes.  The first call with an array that is not so aligned builds a
    second variant, which reads and writes the given arrays element by element.  ``planner`` plans the first variant,
    ``later`` the second, while a call waits.  The first call with outputs in the memory of inputs
    (`fusegraph.engines.in_place`) builds an in-place version of the variant that it needs.
    """

    def __init__(
        self,
        graph: Graph,
        options: Options,
        device: Device,
        *,
        planner: Planner,
        later: Planner | None = None,
        workspace_limit: int | None = None,
    ) -> None:
        first = planner(graph, options)
        if workspace_limit is not None and first.memory.size > workspace_limit and options.workspace:
            # Algorithms that need a workspace of their own have alternatives that need none.
            options = replace(options, workspace=0)
            first = planner(graph, options)
        self._options, self._planner = options, later or planner
        super().__init__(graph, first, device)
        if workspace_limit is not None and first.memory.size > workspace_limit:
            largest = max(first.memory.offsets, key=lambda t: t.nbytes)
            raise WorkspaceError(
                f"graph {graph.name!r} needs a workspace of {first.memory.size} bytes between its {len(first.kernels)} "
                f"kernels, the limit is {workspace_limit}; the largest intermediate is {largest.name!r} "
                f"{list(largest.shape)} with {largest.nbytes} bytes"
            )
        self._plans: dict[int, Plan] = {options.alignment: first}
        self._built: dict[int, Built] = {}
        self._built_in_place: dict[tuple[int, Pairs], Built] = {}
        self._refusals: dict[tuple[int, Pairs], str | None] = {}
        self._lock = Lock()
        #: What was built with packed tensors, if these were given up: recordings may use it.
        self._retired: list[Built] = []

    def _build(self, plan: Plan) -> Built:
        raise NotImplementedError

    def _select(self, addresses: tuple[int, ...], bits: int, pairs: Pairs) -> Queue:
        built = self._variant_for(bits, pairs)
        if not self._prepacks:
            return built.queue
        if built.packing is not None:
            return Bound(built.packing, addresses, built.queue, (bits, pairs))
        return lambda _, stream: built.queue(addresses, stream)

    @property
    def packed_bytes(self) -> int:
        return sum(p.nbytes for p in self._packings())

    def repack(self) -> None:
        for packing in self._packings():
            packing.forget()

    def _without_packing(self, form: tuple[int, Pairs]) -> Run:
        """Computes everything in every call from now on; returns what queues the kernels of a form (bits, pairs)."""
        with self._lock:
            if self._options.prepack != 0:
                self._options = replace(self._options, prepack=0)
                self._retired = [*self._built.values(), *self._built_in_place.values()]
                for built in self._retired:
                    if built.packing is not None:
                        built.packing.retire()
                for known in (self._plans, self._built, self._built_in_place, self._refusals, self._known):
                    known.clear()
        return self._variant_for(*form).queue

    def _packings(self) -> list[Packing]:
        with self._lock:
            built = [*self._built.values(), *self._built_in_place.values()]
        return [b.packing for b in built if b.packing is not None]

    def _variant_for(self, bits: int, pairs: Pairs) -> Built:
        """Returns the kernels for pointers that, or-ed, are ``bits``, and for these outputs in the memory of inputs."""
        alignment = self._alignment(bits)
        found = self._built.get(alignment) if not pairs else self._built_in_place.get((alignment, pairs))
        return found if found is not None else self._build_variant(alignment, pairs)

    def _alignment(self, bits: int) -> int:
        return self._options.alignment if not bits & (self._options.alignment - 1) else 1

    def _build_variant(self, alignment: int, pairs: Pairs) -> Built:
        with self._lock:
            if pairs:
                key = alignment, pairs
                if key not in self._built_in_place:
                    self._built_in_place[key] = self._build(in_place.shared(self._planned(alignment), pairs))
                return self._built_in_place[key]
            if alignment not in self._built:
                self._built[alignment] = self._build(self._planned(alignment))
            return self._built[alignment]

    def _planned(self, alignment: int) -> Plan:
        """Returns the plan for pointers of an alignment; the caller holds the lock."""
        if alignment not in self._plans:
            prepack = self._options.prepack if self._prepacks else 0
            options = replace(self._options, alignment=alignment, prepack=prepack)
            self._plans[alignment] = self._planner(self.graph, options)
        return self._plans[alignment]

    def _refused(self, bits: int, pairs: Pairs) -> str | None:
        alignment = self._alignment(bits)
        if (alignment, pairs) not in self._refusals:
            with self._lock:
                self._refusals[alignment, pairs] = in_place.refusal(self._planned(alignment), pairs)
        return self._refusals[alignment, pairs]
