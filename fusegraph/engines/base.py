"""What an Executable is: a compiled graph that is called with arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from fusegraph.errors import ArgumentError, DeviceError
from fusegraph.graph import Graph, Tensor
from fusegraph.layout import extent, same_strides
from fusegraph.plan import Plan
from fusegraph.runtime.arrays import ArrayView, Device, as_stream, current_stream, empty_like_framework, hand_over, view


class Executable(ABC):
    """A compiled graph.

    Call it with one array an input, in the order of the graph's inputs or by name; NumPy, torch, CuPy, JAX, and
    anything with DLPack or ``__cuda_array_interface__`` are used without copying.  Returns the output array, or a
    tuple of them if the graph has several, in the framework of the first input; ``out=`` (an array, a sequence, or a
    mapping by name) writes to arrays given instead, which must not overlap the inputs.  ``stream`` is a CUDA stream
    (default: the framework's current).

    Raises ArgumentError for missing, extra or unfitting arrays, DeviceError for arrays on another device.
    """

    engine: str

    def __init__(self, graph: Graph, plan: Plan | None) -> None:
        self.graph = graph
        self.plan = plan
        self._specs = [(t.name, t.shape, t.strides, t.dtype) for t in graph.inputs]
        self._names = {t.name: k for k, t in enumerate(graph.inputs)}

    @property
    def workspace_bytes(self) -> int:
        """Device memory for intermediates between kernels."""
        return self.plan.memory.size if self.plan is not None else 0

    @property
    @abstractmethod
    def device(self) -> Device:
        """Where the arrays must be."""

    @abstractmethod
    def _run(self, inputs: Sequence[ArrayView], outputs: Sequence[ArrayView], stream: int) -> None:
        """Computes the outputs; everything has been checked."""

    def __call__(self, *args: Any, out: Any = None, stream: Any = None, **named: Any) -> Any:
        arrays = self._bind(args, named) if named or len(args) != len(self._specs) else args
        device = self.device
        framework = "numpy"
        handle = 0
        if device.is_cuda:
            handle = as_stream(stream) if stream is not None else -1
        views = []
        for array, spec in zip(arrays, self._specs):
            if handle < 0:
                handle = current_stream(_framework_of(array), device)
            seen = view(array, name=spec[0], stream=handle)
            if seen.shape != spec[1] or seen.strides != spec[2] or seen.dtype is not spec[3] or seen.device != device:
                self._check("input", seen, spec, device)
            views.append(seen)
        handle = max(handle, 0)
        if views:
            framework = views[0].framework
        results: list[Any]
        if out is None:
            results = [
                empty_like_framework(framework, t.shape, t.strides, t.dtype, device, stream=handle)
                for t in self.graph.outputs
            ]
            targets = [view(a, name=t.name, stream=handle) for a, t in zip(results, self.graph.outputs)]
        else:
            results = self._outputs(out)
            targets = [self._target(a, t, views, device, handle) for a, t in zip(results, self.graph.outputs)]
        self._run(views, targets, handle)
        if out is None and framework == "jax":
            results = [hand_over(a, framework) for a in results]
        return results[0] if len(results) == 1 else tuple(results)

    def _bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """One array an input from positional and named arguments."""
        if len(args) > len(self._specs):
            raise ArgumentError(
                f"graph {self.graph.name!r} takes {len(self._specs)} arrays ({', '.join(self._names)}), got {len(args)}"
            )
        values = dict(zip(self._names, args))
        for name, array in named.items():
            if name not in self._names:
                raise ArgumentError(
                    f"graph {self.graph.name!r} has no input {name!r}; it has {', '.join(self._names) or 'none'}"
                )
            if name in values:
                raise ArgumentError(f"input {name!r} of graph {self.graph.name!r} was given twice")
            values[name] = array
        missing = [name for name in self._names if name not in values]
        if missing:
            raise ArgumentError(f"graph {self.graph.name!r} needs {', '.join(map(repr, missing))}")
        return [values[name] for name in self._names]

    def _check(self, role: str, seen: ArrayView, spec: tuple[str, Any, Any, Any], device: Device) -> None:
        """Raises the error that says what is wrong with an array, if something is."""
        name, shape, strides, dtype = spec
        what = f"{role} {name!r} of graph {self.graph.name!r}"
        if seen.device != device:
            hint = "copy it with fusegraph.to_device(array)" if device.is_cuda else "copy it to the CPU"
            raise DeviceError(f"{what} is on {seen.device}, but engine {self.engine!r} runs on {device}; {hint}")
        if tuple(seen.shape) != shape:
            raise ArgumentError(f"{what} has shape {list(seen.shape)}, the graph was built for {list(shape)}")
        if seen.dtype != dtype:
            raise ArgumentError(f"{what} has dtype {seen.dtype}, the graph was built for {dtype}")
        if not same_strides(shape, seen.strides, strides):
            raise ArgumentError(
                f"{what} has strides {list(seen.strides)} (elements), the graph was built for {list(strides)}; "
                "copy the array to that layout, or give tensor() the array's strides"
            )

    def _outputs(self, out: Any) -> list[Any]:
        tensors = self.graph.outputs
        if isinstance(out, Mapping):
            unknown = set(out) - {t.name for t in tensors}
            missing = [t.name for t in tensors if t.name not in out]
            if unknown or missing:
                raise ArgumentError(
                    f"out= of graph {self.graph.name!r} has one array for each of "
                    f"{[t.name for t in tensors]}, got {sorted(out)}"
                )
            return [out[t.name] for t in tensors]
        arrays = list(out) if isinstance(out, (tuple, list)) else [out]
        if len(arrays) != len(tensors):
            raise ArgumentError(f"graph {self.graph.name!r} has {len(tensors)} outputs, out= has {len(arrays)}")
        return arrays

    def _target(
        self, array: Any, tensor: Tensor, inputs: Sequence[ArrayView], device: Device, stream: int
    ) -> ArrayView:
        seen = view(array, name=tensor.name, stream=stream)
        self._check("output", seen, (tensor.name, tensor.shape, tensor.strides, tensor.dtype), device)
        if seen.readonly:
            raise ArgumentError(f"output {tensor.name!r} of graph {self.graph.name!r} is read-only")
        start, end = _range(seen)
        for spec, other in zip(self._specs, inputs):
            first, last = _range(other)
            if start < last and first < end:
                raise ArgumentError(
                    f"output {tensor.name!r} of graph {self.graph.name!r} overlaps input {spec[0]!r} in memory; "
                    "kernels read and write in no particular order, so give another array"
                )
        return seen


def _range(seen: ArrayView) -> tuple[int, int]:
    """First address of an array and the one past its last."""
    return seen.pointer, seen.pointer + extent(seen.shape, seen.strides) * seen.dtype.itemsize


def _framework_of(array: Any) -> str:
    return type(array).__module__.partition(".")[0]
