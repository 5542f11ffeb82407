"""What an Executable is: a compiled graph that is called with arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fusegraph.engines.arguments import Argument, Reader, bind, bind_outputs, check_overlaps
from fusegraph.graph import Graph
from fusegraph.plan import Plan, check_outputs
from fusegraph.runtime.arrays import Device, allocator, as_stream, hand_over
from fusegraph.runtime.streams import stream_query


@dataclass(frozen=True)
class _Call:
    """How arrays of certain types are read and outputs made for them.

    any_stream says that the outputs can be used on every stream, so that their `makers` serve all calls.
    """

    framework: str
    readers: tuple[Reader, ...]
    current_stream: Callable[[int], int]
    any_stream: bool
    makers: tuple[Callable[[], Any], ...]


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
        check_outputs(graph)
        self.graph = graph
        self.plan = plan
        #: where the arrays must be
        self.device = device
        self._inputs = [Argument(t, "input", self.engine, device) for t in graph.inputs]
        self._outputs = [Argument(t, "output", self.engine, device) for t in graph.outputs]
        self._calls: dict[tuple[type, ...], _Call] = {}

    @property
    def workspace_bytes(self) -> int:
        """Memory for intermediates between kernels."""
        return self.plan.memory.size if self.plan is not None else 0

    @abstractmethod
    def _run(self, inputs: Sequence[int], outputs: Sequence[int], stream: int) -> None:
        """Computes the outputs at these addresses; everything has been checked."""

    def __call__(self, /, *args: Any, out: Any = None, stream: Any = None, **named: Any) -> Any:
        arrays = bind(self.graph, args, named) if named or len(args) != len(self._inputs) else args
        call = self._calls.get(tuple(map(type, arrays))) or self._prepare(arrays)
        handle = call.current_stream(self.device.index) if stream is None else as_stream(stream)
        keep: list[Any] = []
        inputs = []
        for read, argument, x in zip(call.readers, self._inputs, arrays):
            address = read(x)
            inputs.append(address if address >= 0 else argument.pointer(x, handle, keep))
        if out is None:
            results = [make() for make in call.makers] if call.any_stream else self._make(call.framework, handle)
            outputs = [argument.pointer(x, handle, keep) for argument, x in zip(self._outputs, results)]
        else:
            results = bind_outputs(self.graph, out)
            outputs = [argument.pointer(x, handle, keep) for argument, x in zip(self._outputs, results)]
            check_overlaps(self._inputs, inputs, self._outputs, outputs)
        self._run(inputs, outputs, handle)
        if out is None and call.framework in ("jax", "jaxlib"):
            results = [hand_over(x, "jax") for x in results]
        return results[0] if len(results) == 1 else tuple(results)

    def _prepare(self, arrays: Sequence[Any]) -> _Call:
        """What a call with arrays of these types does, worked out once."""
        framework = type(arrays[0]).__module__.partition(".")[0] if arrays else "numpy"
        any_stream = framework in ("torch", "cupy") or not self.device.is_cuda
        call = _Call(
            framework,
            tuple(argument.reader(type(x)) for argument, x in zip(self._inputs, arrays)),
            stream_query(framework) if self.device.is_cuda else _no_stream,
            any_stream,
            self._allocators(framework, 0) if any_stream else (),
        )
        self._calls[tuple(map(type, arrays))] = call
        return call

    def _allocators(self, framework: str, stream: int) -> tuple[Callable[[], Any], ...]:
        """A function an output that makes an array in the caller's framework."""
        return tuple(
            allocator(framework, a.shape, a.strides, a.dtype, self.device, stream=stream) for a in self._outputs
        )

    def _make(self, framework: str, stream: int) -> list[Any]:
        """New outputs that belong to a stream."""
        return [make() for make in self._allocators(framework, stream)]


def _no_stream(_: int) -> int:
    return 0
