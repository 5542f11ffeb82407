"""Where the kernel arguments of a plan come from: the call's arrays, constants and the workspace."""

from __future__ import annotations

from collections.abc import Sequence

from fusegraph.graph import Tensor
from fusegraph.plan import Plan


class Slots:
    """Numbers the pointers that a plan's kernels take: into the call's arrays, constants, or the workspace.

    A tensor that lies in the memory of another (a view, or an intermediate in a donated input) is an offset in bytes
    from that one's first byte.
    """

    def __init__(self, plan: Plan) -> None:
        simplified = plan.simplified
        self.constants = plan.constants
        arrays: list[Tensor] = [*simplified.inputs, *simplified.made]
        #: How many arrays a call has: the partitioned graph's inputs, packed tensors behind the user's, and outputs.
        self.arrays = len(arrays)
        inner, hosted = tuple(plan.memory.offsets), plan.memory.hosted
        starts: dict[Tensor, list[int]] = {t: [0] for t in (*arrays, *self.constants, *inner, *hosted)}
        for tensor in (t for kernel in plan.kernels for t in kernel.arguments):
            if tensor.start not in starts[tensor.base]:
                starts[tensor.base].append(tensor.start)
        views = [(t, start) for t in arrays for start in starts[t] if start]
        views += [(t, start) for t in hosted for start in starts[t]]
        fixed = [(t, start) for t in self.constants for start in starts[t]]
        inside = [(t, start) for t in inner for start in starts[t]]
        places = [*((t, 0) for t in arrays), *views, *fixed, *inside]
        self._index = {place: k for k, place in enumerate(places)}
        #: For each tensor in an array of the call: (number of the array, offset in bytes).
        at = {**{t: (t, 0) for t in arrays}, **hosted}
        self.views = [(arrays.index(at[t][0]), at[t][1] + start * t.dtype.itemsize) for t, start in views]
        self._fixed = [(self.constants.index(t), start * t.dtype.itemsize) for t, start in fixed]
        #: Offsets of the intermediates, and of views of them, in the workspace, in bytes.
        self.offsets = [plan.memory.offsets[t] + start * t.dtype.itemsize for t, start in inside]
        parts = [plan.memory.part(t) for t, _ in inside]
        #: The same: (number of the workspace's part, offset in it).
        self.in_parts = [(part, offset - plan.memory.parts[part]) for part, offset in zip(parts, self.offsets)]

    def positions(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Returns the positions of tensors in the list that `pointers` returns."""
        return tuple(self._index[t.base, t.start] for t in tensors)

    def fixed(self, constants: Sequence[int]) -> list[int]:
        """Returns the pointers into constants, given the addresses of the constants."""
        return [constants[k] + offset for k, offset in self._fixed]

    def pointers(
        self, inputs: Sequence[int], outputs: Sequence[int], constants: Sequence[int], workspace: int
    ) -> list[int]:
        """Returns every pointer of one call, given the addresses of its arrays, constants and workspace."""
        arrays = [*inputs, *outputs]
        views = [arrays[k] + offset for k, offset in self.views]
        return [*arrays, *views, *self.fixed(constants), *(workspace + offset for offset in self.offsets)]
