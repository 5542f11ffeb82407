"""The importer as a backend of the package ``onnx``, for its test suite and for programs that take any backend."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx.backend.base
from onnx import ModelProto, NodeProto

from fusegraph.engines.arguments import as_values
from fusegraph.engines.base import Executable
from fusegraph.errors import ArgumentError, ModelError, UnsupportedModelError
from fusegraph.frontends.onnx.arguments import array_of, instance, named, wrong
from fusegraph.frontends.onnx.model import InputValueError, Model, from_proto
from fusegraph.frontends.onnx.tensors import Array
from fusegraph.runtime import driver
from fusegraph.runtime.arrays import to_device, to_numpy


class BackendRep(onnx.backend.base.BackendRep):  # type: ignore[misc]
    """A model, compiled once for each combination of input shapes and of values on which shapes depend."""

    def __init__(self, model: ModelProto, engine: str, options: Mapping[str, Any]) -> None:
        instance("model", model, ModelProto)
        self._model, self._engine, self._options = model, engine, dict(options)
        self._names = [v.name for v in model.graph.input if v.name not in {t.name for t in model.graph.initializer}]
        #: Inputs found so far on whose values shapes depend.
        self._deciding: tuple[str, ...] = ()
        self._compiled: dict[Any, tuple[Model, Executable]] = {}

    def run(self, inputs: Any, **_: Any) -> tuple[Array, ...]:
        """Returns the outputs for arrays given in the order of the inputs or by name."""
        arrays = self._arrays(inputs)
        model, executable = self._built(arrays)
        if missing := [name for name in model.inputs if name not in arrays]:
            raise ArgumentError(f"the model's input {missing[0][:80]!r} is missing")
        given: list[Any] = [arrays[name] for name in model.inputs]
        if executable.device.is_cuda:
            given = [to_device(array, executable.device.index) for array in given]
        results = executable(*given)
        every = results if isinstance(results, tuple) else (results,)
        tensors = executable.graph.results
        return tuple(as_values(tensor, to_numpy(result)) for tensor, result in zip(tensors, every, strict=True))

    def model(self, inputs: Any) -> Model:
        """Returns the imported model for inputs of these shapes."""
        return self._built(self._arrays(inputs))[0]

    def _arrays(self, inputs: Any) -> dict[str, Array]:
        """Returns inputs by name, without sequences and None, which the importer refuses.  Raises ArgumentError."""
        if not isinstance(inputs, Mapping):
            given = inputs if isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes) else [inputs]
            if len(given) > len(self._names):
                raise ArgumentError(f"the model has {len(self._names)} inputs, got {len(given)}")
            inputs = dict(zip(self._names, given))
        every = named("inputs", inputs, "names to arrays")
        return {
            name: array_of(f"input {name[:80]!r}", x)
            for name, x in every.items()
            if not isinstance(x, list | tuple | None)
        }

    def _built(self, arrays: Mapping[str, Array]) -> tuple[Model, Executable]:
        while True:
            values = {name: arrays[name] for name in self._deciding if name in arrays}
            key = (
                tuple((name, a.shape) for name, a in arrays.items()),
                tuple((name, a.tobytes()) for name, a in values.items()),
            )
            if key in self._compiled:
                return self._compiled[key]
            try:
                model = from_proto(self._model, {name: a.shape for name, a in arrays.items()}, values)
            except InputValueError as error:
                if not set(error.inputs) - set(self._deciding) or not set(error.inputs) <= set(arrays):
                    raise
                self._deciding += tuple(name for name in error.inputs if name not in self._deciding)
                continue
            self._compiled[key] = model, model.compile(self._engine, **self._options)
            return self._compiled[key]


class Backend(onnx.backend.base.Backend):  # type: ignore[misc]
    """ONNX's backend interface.

    Device CPU means engine cpu, CUDA or CUDA:1 engine cuda on that GPU; ``engine=`` asks for another, such as
    reference.
    """

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **options: Any) -> BackendRep:
        """Returns a model that can be run.  Options other than ``engine`` are those of `fusegraph.compile`.

        Raises ArgumentError for an unknown device or if ``model`` is not a ModelProto.
        """
        kind, index = _device(device)
        engine = options.pop("engine", None) or ("cuda" if kind == "CUDA" else "cpu")
        return BackendRep(model, engine, {"device": index, **options} if engine == "cuda" and index else options)

    @classmethod
    def run_model(cls, model: ModelProto, inputs: Any, device: str = "CPU", **options: Any) -> tuple[Any, ...]:
        """Returns the outputs of a model."""
        return cls.prepare(model, device, **options).run(inputs)

    @classmethod
    def run_node(
        cls, node: NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, **options: Any
    ) -> tuple[Any, ...]:
        """Returns the outputs of one node, of operator set ``opset_version=`` (default: the newest).

        Raises ArgumentError for a wrong node, version or array, and the errors of `run_model`.
        """
        instance("node", node, NodeProto)
        newest = onnx.defs.onnx_opset_version()
        version = options.pop("opset_version", newest)
        if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= newest:
            raise wrong("opset_version", version, f"an integer from 1 to {newest}")
        if not isinstance(inputs, list | tuple):
            raise wrong("inputs", inputs, "a list of arrays")
        names = [name for name in node.input if name]
        arrays = {name: array_of(f"input {name[:80]!r}", x) for name, x in zip(names, inputs)}
        given = [onnx.helper.make_tensor_value_info(n, _element(n, x), x.shape) for n, x in arrays.items()]
        made = [onnx.helper.make_tensor_value_info(name, 0, None) for name in node.output if name]
        graph = onnx.helper.make_graph([node], "node", given, made)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(node.domain, version)])
        return cls.run_model(model, list(arrays.values()), device, **options)

    @classmethod
    def is_compatible(cls, model: ModelProto, device: str = "CPU", **_: Any) -> bool:
        """Tells whether every operator and type of a model is supported, as far as is known without its inputs.

        Raises ArgumentError if ``model`` is not a ModelProto, or for an unknown device.
        """
        _device(device)
        try:
            from_proto(model)
        except UnsupportedModelError:
            return False
        except ModelError:  # sizes or values are missing that come with the inputs
            return True
        return True

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Tells whether there is such a device: CPU always, CUDA with a driver and a GPU of that number."""
        try:
            kind, index = _device(device)
        except ArgumentError:
            return False
        return kind == "CPU" or index < driver.device_count()


def _element(name: str, array: Array) -> int:
    """Returns ONNX's element type of an array.  Raises ArgumentError if ONNX has none."""
    try:
        return int(onnx.helper.np_dtype_to_tensor_dtype(array.dtype))
    except ValueError:
        raise wrong(f"input {name[:80]!r}", array, "an array of a type that ONNX has") from None


def _device(name: str) -> tuple[str, int]:
    """Returns the kind and number of a device by its name in ONNX; CPUs have the number 0.  Raises ArgumentError."""
    instance("device", name, str)
    found = re.fullmatch(r"(CPU|CUDA)(?::(\d{1,9}))?", name, re.ASCII)
    if found is None:
        raise ArgumentError(f"device {name[:100]!r} is none of CPU, CUDA, CUDA:1, and so on")
    return found[1], int(found[2] or 0) if found[1] == "CUDA" else 0
