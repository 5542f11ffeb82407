"""The graph that `from_cudnn` makes: a `Graph` that can also be run like a pygraph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from fusegraph.dtypes import uint8
from fusegraph.engines.base import Executable
from fusegraph.engines.frameworks import framework_of
from fusegraph.errors import ArgumentError
from fusegraph.frontends.cudnn.put import Put, Selects
from fusegraph.frontends.cudnn.rows import Rows
from fusegraph.frontends.cudnn.shapes import Shapes, told
from fusegraph.graph import Graph, Tensor
from fusegraph.layout import extent
from fusegraph.lowering.cudnn import frontend
from fusegraph.runtime.arrays import Device, DeviceArray, current_stream, to_device, view
from fusegraph.runtime.strides import numpy_over

#: How many values of host scalars are kept on the GPU, and how many versions of the graph for other shapes or sizes.
_KEPT = 64
#: Addresses have 64 bits.
_LAST_ADDRESS = 1 << 64


class CudnnGraph(Graph):
    """A graph read from cudnn-frontend, with its uids; it is compiled, explained and compared like any other.

    It can also be run like a pygraph: `execute` takes arrays by uid, by cuDNN's tensor or by name.  The methods that
    prepare a pygraph exist too, but only `build` and `build_plans` do anything: they compile.
    """

    def __init__(self, name: str, io_dtype: Any, compute_dtype: Any) -> None:
        super().__init__(name, io_dtype=io_dtype, compute_dtype=compute_dtype)
        #: cuDNN's uid -> tensor of this graph, for all tensors of cuDNN's graph.
        self.uids: dict[int, Tensor] = {}
        #: cuDNN's name of a tensor -> its uid, for names that are unique.
        self.labels: dict[str, int] = {}
        #: Inputs that cuDNN reads on the host; given as numbers, or as arrays of one element on the host or the GPU.
        self.by_value: set[Tensor] = set()
        #: Arrays that came with the graph, used in calls that do not give others.
        self.bound: dict[Tensor, Any] = {}
        #: Inputs and outputs that are the rows of ragged tensors.
        self.ragged: dict[Tensor, Rows] = {}
        #: Ragged output -> the output that says which of its rows are to be written.
        self.owned: dict[Tensor, Tensor] = {}
        #: Reads the graph again for other sizes (elements, by uid) of the memory of ragged tensors.
        self.of_sizes: Callable[[Mapping[int, int]], CudnnGraph] | None = None
        self._sized: dict[tuple[tuple[int, int], ...], CudnnGraph] = {}
        #: Reads the graph again for other shapes; None unless the graph allows them.
        self.of_shapes: Callable[[Shapes], CudnnGraph] | None = None
        self._shaped: dict[tuple[Any, ...], CudnnGraph] = {}
        self._built: tuple[str | None, dict[str, Any]] = (None, {})
        self._selects: Selects = {}
        self._executable: Executable | None = None
        self._scalars: dict[tuple[Tensor, bytes], Any] = {}

    # ---- as a pygraph

    def validate(self) -> None:
        """Does nothing: the graph was checked when it was read."""

    def build_operation_graph(self) -> None:
        """Does nothing."""

    def create_execution_plans(self, heuristics: Any = None) -> None:
        """Does nothing: schedules are chosen by `build`."""

    def check_support(self) -> None:
        """Does nothing: every graph is supported."""

    def build_plans(self, *policy: Any) -> None:
        """Compiles the graph."""
        self.build()

    def build(self, heuristics: Any = None, *, engine: str | None = None, **options: Any) -> Executable:
        """Compiles the graph for `execute`, unless that was done and no engine or options are given.

        Engine and options are those of `Graph.compile`.  cuDNN's ``heuristics`` are ignored.
        """
        if self._executable is None or engine is not None or options:
            self._executable = self.compile(engine, **options)
            self._built = engine, options
            self._scalars.clear()
            self._sized.clear()
            self._shaped.clear()
        return self._executable

    def get_workspace_size(self) -> int:
        """Returns 0: `execute` needs no memory from the caller."""
        return 0

    def execute(
        self,
        variant_pack: Mapping[Any, Any],
        workspace: Any = None,
        handle: Any = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Runs the graph on input and output arrays, given by uid, by tensor (cuDNN's or this graph's) or by name.

        An array has the tensor's dtype (for BOOLEAN also uint8, 0 or 1) and holds its elements at the tensor's strides.
        Its shape may differ in dimensions of size 1, or be any shape of as many elements without gaps; an output's may
        have more elements, of which the first are written.

        Scalars that cuDNN reads on the host may be numbers.  Any other integer is an address of memory, on the GPU or,
        for engines that run there, on the host; for a ragged tensor it has as much memory as the sequences need without
        gaps.  Arrays for unknown uids and the workspace are ignored.  The kernels are queued on the stream of cuDNN's
        ``handle`` if one is given, else on the framework's current stream.

        override_uids, override_shapes and override_strides give tensors other shapes.  The graph is then read and
        compiled for these, once for all calls with the same; the pygraph must have is_override_shape_enabled.

        Raises ArgumentError (an array is missing or does not fit), DeviceError, and the errors of `from_cudnn`.
        """
        if override_uids is not None:
            other = self._of_shapes(told(override_uids, override_shapes, override_strides))
            uids = {t: uid for uid, t in self.uids.items()}
            keys = {key: self._meant(key) if isinstance(key, (str, Tensor)) else None for key in variant_pack}
            pack = {uids[t] if (t := keys[key]) is not None else key: array for key, array in variant_pack.items()}
            other.execute(pack, workspace, handle)
            return
        given = dict(self.bound)
        for key, array in variant_pack.items():
            tensor = None if key is None else self._meant(key)
            if tensor is not None and tensor.value is not None:
                self._check_constant(tensor, array)
            elif tensor is not None:
                given[tensor] = array
        wanted = [t for t in (*self.inputs, *self.outputs) if t not in self.owned.values()]
        for tensor in wanted:
            if given.get(tensor) is None:
                uid = next((str(u) for u, t in self.uids.items() if t is tensor), "none")
                raise ArgumentError(f"graph {self.name!r} needs an array for {tensor.name!r} (uid {uid})")
        fitting = self._fitting(given)
        if fitting is not self:
            fitting.execute({uid: given[t] for uid, t in self.uids.items() if t in given}, workspace, handle)
            return
        executable = self.build()
        device = executable.device
        if handle is not None:
            stream = frontend().get_stream(handle)
        else:
            held = (given[t] for t in wanted if t not in self.by_value and not _is_address(given[t]))
            stream = current_stream(framework_of(type(next(held, None))), device)
        for tensor in self.by_value & given.keys():
            given[tensor] = self._staged(tensor, given[tensor], device)
        outs = set(self.outputs)
        arrays = {
            t: _as_declared(t, given[t], device, stream, any_size=t in self.ragged, larger=t in outs) for t in wanted
        }
        inputs, put = [arrays[t] for t in self.inputs], Put(self.owned, self._selects, device, stream)
        outputs = [put.instead(t, arrays) for t in self.outputs]
        executable(*inputs, out=tuple(outputs), stream=stream)
        put.done(arrays)

    def _of_shapes(self, shapes: Shapes) -> CudnnGraph:
        """Returns the graph with other shapes, compiled like this one.  Raises ArgumentError if it has none."""
        if self.of_shapes is None:
            raise ArgumentError(f"graph {self.name!r} has its shapes; others need is_override_shape_enabled=True")
        return self._read_again(self._shaped, self.of_shapes, shapes)

    def _fitting(self, given: Mapping[Tensor, Any]) -> CudnnGraph:
        """Returns the graph for arrays of these sizes: this one, or another if ragged tensors have other sizes."""
        if self.of_sizes is None:
            return self
        uids = {t: uid for uid, t in self.uids.items()}
        sizes = {}
        for tensor, rows in self.ragged.items():
            seen = None if _is_address(given[tensor]) else view(given[tensor], name=tensor.name)
            sizes[uids[tensor]] = rows.elements if seen is None else extent(seen.shape, seen.strides)
        if all(sizes[uids[t]] == rows.elements for t, rows in self.ragged.items()):
            return self
        return self._read_again(self._sized, self.of_sizes, sizes)

    def _read_again(
        self, known: dict[Any, CudnnGraph], read: Callable[[Any], CudnnGraph], what: Mapping[int, Any]
    ) -> CudnnGraph:
        """Returns the graph for other shapes or sizes, read and compiled like this one once and then remembered."""
        key = tuple(sorted(what.items()))
        if key not in known:
            if len(known) >= _KEPT:
                known.clear()
            known[key] = read(what)
            engine, options = self._built
            known[key].build(engine=engine, **options)
        return known[key]

    # ---- what is given

    def _meant(self, key: Any) -> Tensor | None:
        """Returns the tensor of a variant pack's key; None for a uid that this graph does not have.

        Raises ArgumentError for other keys that it does not have.
        """
        if isinstance(key, Tensor):
            if key.graph is not self:
                raise ArgumentError(f"tensor {key.name!r} of graph {key.graph.name!r} is not of graph {self.name!r}")
            return key
        if isinstance(key, str):
            if key not in self.labels and key not in self.tensors:
                known = sorted({*self.labels, *(t.name for t in (*self.inputs, *self.outputs))})
                raise ArgumentError(f"graph {self.name!r} has no one tensor named {key!r}; it has {', '.join(known)}")
            return self.uids[self.labels[key]] if key in self.labels else self.tensors[key]
        if isinstance(key, (int, np.integer)):
            return self.uids.get(int(key))
        if hasattr(key, "get_uid"):
            return self.uids.get(int(key.get_uid()))
        raise ArgumentError(f"arrays are given by uid, tensor or name, not by {type(key).__name__}")

    def _check_constant(self, tensor: Tensor, given: Any) -> None:
        """Raises ArgumentError if a number that is part of the graph is given with another value."""
        try:
            number = np.asarray(given).reshape(-1)
        except TypeError:  # it is on a GPU
            return
        assert tensor.value is not None
        if number.size != 1 or number.astype(tensor.value.dtype)[0] != tensor.value.reshape(-1)[0]:
            raise ArgumentError(
                f"{tensor.name!r} is {tensor.value.reshape(-1)[0]} in graph {self.name!r}, got {given}; read the graph "
                "again for another value, or leave it out of values= to give one with every call"
            )

    def _staged(self, tensor: Tensor, given: Any, device: Device) -> Any:
        """Returns a scalar on the engine's device: for a GPU, numbers and host arrays are copied to it."""
        if isinstance(given, (bool, int, float, np.generic)):
            given = np.array([given], tensor.dtype.numpy)
        seen = view(given, name=tensor.name)
        if not device.is_cuda or seen.device.is_cuda:
            return given
        host = numpy_over(seen.pointer, seen.shape, seen.strides, seen.dtype.numpy, seen.owner)
        if seen.dtype != tensor.dtype or host.size != 1:
            return given  # refused later, with a message
        key = (tensor, host.tobytes())
        if key not in self._scalars:
            if len(self._scalars) >= _KEPT:
                self._scalars.clear()
            self._scalars[key] = to_device(np.array(host), device.index)
        return self._scalars[key]


def _as_declared(tensor: Tensor, array: Any, device: Device, stream: int, *, any_size: bool, larger: bool) -> Any:
    """Returns the memory of an array, or at an address, as an array with the tensor's shape and strides.

    cuDNN takes addresses and ignores shapes; here the shape of an array is checked as far as possible.  ``any_size``
    skips the check, as the size was checked before; ``larger`` allows arrays with more elements.  Raises ArgumentError.
    """
    what = f"{tensor.name!r} of graph {tensor.graph.name!r}"
    if _is_address(array):
        return _over(tensor, _address(what, tensor, int(array)), device, None, stream)
    seen = view(array, name=tensor.name, stream=stream)
    bytes_of_truth = tensor.dtype.is_bool and seen.dtype == uint8
    if tuple(seen.shape) == tensor.shape and not bytes_of_truth and not any_size:
        return array  # the executable checks the rest
    if seen.dtype != tensor.dtype and not bytes_of_truth:
        raise ArgumentError(f"{what} has dtype {tensor.dtype}, got {seen.dtype}")
    held = tuple((n, s) for n, s in zip(seen.shape, seen.strides) if n != 1)
    wanted = tuple((n, s) for n, s in zip(tensor.shape, tensor.strides) if n != 1)
    alike = [n for n, _ in held] == [n for n, _ in wanted]
    room, needed = extent(seen.shape, seen.strides), extent(tensor.shape, tensor.strides)
    enough = room == prod(seen.shape) and (room == needed or (larger and room > needed))
    if alike and held != wanted and not any_size:
        raise ArgumentError(
            f"{what} has shape {list(tensor.shape)} and strides {list(tensor.strides)}, "
            f"got {list(seen.shape)} with strides {list(seen.strides)}"
        )
    if not alike and not any_size and not enough:
        raise ArgumentError(
            f"{what} lies in {needed} elements of memory ({list(tensor.shape)}, strides {list(tensor.strides)}), "
            f"got {list(seen.shape)} with strides {list(seen.strides)}"
        )
    found = _over(tensor, seen.pointer, seen.device, array if seen.device.is_cuda else seen.owner, stream)
    if not seen.device.is_cuda:
        found.flags.writeable = not seen.readonly
    return found


def _is_address(array: Any) -> bool:
    return isinstance(array, (int, np.integer)) and not isinstance(array, bool)


def _address(what: str, tensor: Tensor, address: int) -> int:
    """Checks the range and alignment of a tensor's address; whether memory is there cannot be known.

    Raises ArgumentError.
    """
    nbytes = extent(tensor.shape, tensor.strides) * tensor.dtype.itemsize
    if not nbytes:
        return address
    if not 0 < address <= _LAST_ADDRESS - nbytes:
        raise ArgumentError(f"{what} is {nbytes} bytes of memory, which {address} is no address of")
    if address % tensor.dtype.itemsize:
        raise ArgumentError(
            f"{what} has dtype {tensor.dtype}, whose addresses are multiples of {tensor.dtype.itemsize}; "
            f"got 0x{address:x}"
        )
    return address


def _over(tensor: Tensor, pointer: int, device: Device, owner: Any, stream: int) -> Any:
    """Returns the memory at ``pointer`` as an array of a tensor's shape, strides and dtype."""
    if device.is_cuda:
        return DeviceArray(pointer, tensor.shape, tensor.strides, tensor.dtype, device, owner, stream)
    return numpy_over(pointer, tensor.shape, tensor.strides, tensor.dtype.numpy, owner)
