"""What an Executable is: a compiled graph that is called with arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from fusegraph.engines.arguments import Argument, bind, bind_outputs, check_overlap
from fusegraph.graph import Graph
from fusegraph.plan import Plan
from fusegraph.runtime.arrays import Device, allocator, as_stream, current_stream, hand_over


class Executable(ABC):
    """A compiled graph.

    Call it with one array an input, in the order of the graph's inputs or by name; NumPy, torch, CuPy, JAX, and
    anything with DLPack or ``__cuda_array_interface__`` are used without copying.  Returns the output array, or a
    tuple of them if the graph has several, in the framework of the first input; ``out=`` (an array, a sequence, or a
    mapping by name) writes to arrays given instead, which must not overlap the inputs or each other.  ``stream`` is a
    CUDA stream (default: the framework's current).

    Raises ArgumentError for missing, extra or unfitting arrays, DeviceError for arrays on another device.
    """

    engine: str

    def __init__(self, graph: Graph, plan: Plan | None, device: Device) -> None:
        self.graph = graph
        self.plan = plan
        #: where the arrays must be
        self.device = device
        self._inputs = [Argument(t, "input", self.engine, device) for t in graph.inputs]
        self._outputs = [Argument(t, "output", self.engine, device) for t in graph.outputs]
        self._allocators: dict[tuple[str, int], list[Callable[[], Any]]] = {}

    @property
    def workspace_bytes(self) -> int:
        """Memory for intermediates between kernels."""
        return self.plan.memory.size if self.plan is not None else 0

    @abstractmethod
    def _run(self, inputs: Sequence[int], outputs: Sequence[int], stream: int) -> None:
        """Computes the outputs at these addresses; everything has been checked."""

    def __call__(self, *args: Any, out: Any = None, stream: Any = None, **named: Any) -> Any:
        arrays = bind(self.graph, args, named) if named or len(args) != len(self._inputs) else args
        framework = type(arrays[0]).__module__.partition(".")[0] if arrays else "numpy"
        handle = as_stream(stream) if stream is not None else current_stream(framework, self.device)
        keep: list[Any] = []
        inputs = [argument.pointer(x, handle, keep) for argument, x in zip(self._inputs, arrays)]
        if out is None:
            results = [make() for make in self._allocator(framework, handle)]
            outputs = [argument.pointer(x, handle, keep) for argument, x in zip(self._outputs, results)]
        else:
            results = bind_outputs(self.graph, out)
            outputs = [argument.pointer(x, handle, keep) for argument, x in zip(self._outputs, results)]
            for number, (argument, address) in enumerate(zip(self._outputs, outputs)):
                check_overlap(argument, address, self._inputs, inputs)
                check_overlap(argument, address, self._outputs[:number], outputs)
        self._run(inputs, outputs, handle)
        if out is None and framework in ("jax", "jaxlib"):
            results = [hand_over(x, "jax") for x in results]
        return results[0] if len(results) == 1 else tuple(results)

    def _allocator(self, framework: str, stream: int) -> list[Callable[[], Any]]:
        """A function an output that makes an array in the caller's framework."""
        key = (framework, 0 if framework in ("torch", "cupy") else stream)
        if key not in self._allocators:
            self._allocators[key] = [
                allocator(framework, a.shape, a.strides, a.dtype, self.device, stream=stream) for a in self._outputs
            ]
        return self._allocators[key]
