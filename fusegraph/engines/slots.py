"""Which pointer goes where: the call's arrays, constants and the workspace, as the units of a plan take them."""

from __future__ import annotations

from collections.abc import Sequence

from fusegraph.graph import Tensor
from fusegraph.plan import Plan


class Slots:
    """Where the pointers of a plan's units come from: the call's arrays, constants, or the workspace."""

    def __init__(self, plan: Plan) -> None:
        simplified = plan.simplified
        self.constants = plan.constants
        fixed: list[Tensor] = [*simplified.inputs, *simplified.outputs, *self.constants]
        self._index = {t: k for k, t in enumerate(fixed)}
        self.intermediates = tuple(plan.memory.offsets)
        for tensor in self.intermediates:
            self._index[tensor] = len(self._index)
        #: where the intermediates lie in the workspace, in bytes
        self.offsets = [plan.memory.offsets[t] for t in self.intermediates]

    def positions(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Positions of tensors in what `pointers` returns."""
        return tuple(self._index[t] for t in tensors)

    def pointers(
        self, inputs: Sequence[int], outputs: Sequence[int], constants: Sequence[int], workspace: int
    ) -> list[int]:
        """Every pointer of one call."""
        return [*inputs, *outputs, *constants, *(workspace + offset for offset in self.offsets)]
