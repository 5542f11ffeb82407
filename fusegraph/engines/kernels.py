"""What the engines that run kernels share: variants by alignment and the workspace limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from threading import Lock
from typing import Generic, TypeVar

from fusegraph.engines.base import Executable
from fusegraph.errors import WorkspaceError
from fusegraph.graph import Graph
from fusegraph.lowering.base import Options
from fusegraph.plan import Chooser, Plan, plan
from fusegraph.runtime.arrays import Device

Built = TypeVar("Built")


class KernelExecutable(Executable, Generic[Built]):
    """An Executable made of kernels.

    Kernels are built for pointers aligned to 16 bytes; the first call with an array that is not builds a second variant
    that reads and writes single elements of the arrays given.  ``choose`` decides on the schedules of the first
    variant, ``choose_later`` on those of the second, for which a call waits.
    """

    def __init__(
        self,
        graph: Graph,
        options: Options,
        device: Device,
        *,
        fusion: bool = True,
        workspace_limit: int | None = None,
        choose: Chooser | None = None,
        choose_later: Chooser | None = None,
    ) -> None:
        first = plan(graph, options, fusion=fusion, choose=choose)
        if workspace_limit is not None and first.memory.size > workspace_limit and options.workspace:
            # Algorithms that need a workspace of their own have another that needs none.
            options = replace(options, workspace=0)
            first = plan(graph, options, fusion=fusion, choose=choose)
        self._options, self._fusion, self._choose = options, fusion, choose_later
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
        self._lock = Lock()

    def _build(self, plan: Plan) -> Built:
        raise NotImplementedError

    def _variant(self, inputs: Sequence[int], outputs: Sequence[int]) -> Built:
        """The kernels for these pointers, built now if it is the first call that needs them."""
        return self._variant_for(reduce(or_, outputs, reduce(or_, inputs, 0)))

    def _variant_for(self, bits: int) -> Built:
        """The kernels for pointers that are ``bits`` when or-ed."""
        alignment = self._options.alignment if not bits & (self._options.alignment - 1) else 1
        found = self._built.get(alignment)
        return found if found is not None else self._build_variant(alignment)

    def _build_variant(self, alignment: int) -> Built:
        with self._lock:
            if alignment not in self._built:
                if alignment not in self._plans:
                    options = replace(self._options, alignment=alignment)
                    self._plans[alignment] = plan(self.graph, options, fusion=self._fusion, choose=self._choose)
                self._built[alignment] = self._build(self._plans[alignment])
            return self._built[alignment]
