"""Reads ONNX models into graphs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, ValueInfoProto

from codegen.sizes import at
from fusegraph.dtypes import DType
from fusegraph.engines.base import Executable
from fusegraph.errors import FusegraphError, GraphError, ModelError, UnsupportedModelError
from fusegraph.frontends.onnx.arguments import arrays_of, instance, path_of, sizes_of
from fusegraph.frontends.onnx.dims import Given, difference, shape_of, some_sizes, vary, with_dims
from fusegraph.frontends.onnx.functions import domain_of
from fusegraph.frontends.onnx.importer import MISSING, Importer, Scope, check_text, short
from fusegraph.frontends.onnx.tensors import DTYPES, Array, checked_shape, type_name
from fusegraph.graph import Graph, Tensor
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.runtime import targets
from fusegraph.sized_graphs import OpenGraph, varies

#: The largest size of a protocol buffer.
MAX_BYTES = 2**31 - 1

#: Sizes of dimensions by name, or shapes of inputs and of results of `SELECTED` operators by name.
Shapes = Mapping[str, int | Sequence[int]]
#: Operators whose result's size depends on values.
SELECTED = frozenset({"NonZero", "Unique", "NonMaxSuppression"})


class InputValueError(ModelError):
    """Raised if the values of inputs must be known while the graph is built: give those in ``inputs`` as ``values``."""

    def __init__(self, message: str, inputs: tuple[str, ...]) -> None:
        super().__init__(message)
        self.inputs = inputs


@dataclass(frozen=True)
class Model:
    """A model as a graph.

    graph      its inputs are those of the model; initializers are constants.
    by_size    why shapes do not follow from the Dims that the model's dimensions are, None if they do.  The graph then
               has no nodes and no outputs: `compile` reads and compiles the model for every choice of sizes that comes.
    inputs, outputs, constants  the model's names -> tensors of the graph, whose names may differ: they are limited in
               length and characters.  An input whose value was given is among the constants.
    """

    graph: Graph
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    by_size: str | None = None

    def compile(self, engine: str | None = None, **options: Any) -> Executable:
        """Compiles the graph, as `Graph.compile`; call the result with one array per input, in their order."""
        return self.graph.compile(engine, **options)

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        target: str | None = None,
        strict: bool = False,
        fusion: bool = True,
        profile: str | os.PathLike[str] | None = None,
        compiled: bool = True,
    ) -> Path:
        """Writes a page that shows the graph, its kernels and every decision; returns its absolute path.

        A file ``*.json`` is the data alone.  target, strict and fusion are as for `compile`, which is not needed; the
        default target is the GPU's, or sm_90a without a GPU.  ``profile`` is a file with measured times of kernels.
        Kernels are compiled to show their registers, unless ``compiled`` is False.  Raises FileError if a file cannot
        be read or written, GraphError for a model whose sizes vary, CompileError for an unknown target, ToolchainError
        where a package that pages need is missing.
        """
        from fusegraph.report.page.file import write

        if varies(self.graph):
            raise GraphError(f"graph {self.graph.name!r} has sizes that vary; give them to fusegraph.onnx.load")
        options = Options(strict=strict, target=targets.present() if target is None else targets.named(target))
        made = [plan(self.graph, options, fusion=fusion)]
        measured = None if profile is None else Path(profile)
        return write(
            made, options.target, Path(path), title=self.graph.name, compiled=compiled, profile=measured, fusion=fusion
        )


def load(
    path: str | os.PathLike[str],
    shapes: Shapes | None = None,
    values: Mapping[str, Any] | None = None,
    *,
    alias: dict[str, str] | None = None,
    compute_dtype: Any = "float32",
) -> Model:
    """Reads the model in a file.

    shapes         sizes of dimensions that the model only names ("batch": 8), or whole shapes of inputs.  A size may be
                   a `Dim`: the model then takes all sizes that it allows.  Dimensions without a size are Dims of any
                   size from 1.  Also shapes of results of NonZero, Unique and NonMaxSuppression, whose sizes depend on
                   values: these results are then cut off or filled up, positions with -1, those of Unique with the last
                   element and counts of 0.
    values         arrays for inputs that must be known while the graph is built, such as shapes and axes: they become
                   constants.
    alias          {"past": "present"}: an output whose name is that of an input, with the second text in place of the
                   first, overwrites this input, and lies in its memory (`Graph.assign`): a cache is not copied.
    compute_dtype  that of the graph: float32, float64 or tf32.

    Raises ModelError for a file that is missing, cut short, malformed or beyond a limit, for inputs without a shape,
    and for an alias without such a pair, or of another type; InputValueError, a ModelError, for inputs that must be
    given as ``values``; UnsupportedModelError, which lists all unsupported operators and types; ArgumentError for
    arguments of wrong types.  Nothing outside the file's folder is read.
    """
    file = path_of("path", path)
    try:
        if not file.is_file():
            raise ModelError(f"{file} is {'a folder' if file.is_dir() else 'no file'}; give an ONNX model")
        if file.stat().st_size > MAX_BYTES:
            raise ModelError(f"{file} has {file.stat().st_size} bytes; an ONNX model has at most {MAX_BYTES}")
        text = file.read_bytes()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from None
    model = ModelProto()
    try:
        model.ParseFromString(text)
    except DecodeError:
        raise ModelError(f"{file} is no ONNX model, or is cut short") from None
    return from_proto(
        model,
        shapes,
        values,
        folder=file.parent,
        where=str(file),
        name=file.stem,
        alias=alias,
        compute_dtype=compute_dtype,
    )


def from_proto(
    model: ModelProto,
    shapes: Shapes | None = None,
    values: Mapping[str, Any] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    where: str = "the model",
    name: str | None = None,
    alias: dict[str, str] | None = None,
    compute_dtype: Any = "float32",
) -> Model:
    """Reads a model that is in memory, as `load`.

    folder   where its external data is; None: it may have none.
    where    the model's name in error messages.
    name     the graph's name; default: the model's.
    """
    instance("model", model, ModelProto)
    instance("where", where, str)
    name = None if name is None else instance("name", name, str)
    folder = None if folder is None else path_of("folder", folder)
    sizes, arrays = sizes_of(shapes), arrays_of(values)
    texts = {
        instance("alias", a, str): instance("alias", b, str) for a, b in instance("alias", alias or {}, dict).items()
    }

    def built(given: Given) -> Model:
        return _Building(model, given, arrays, folder, name, texts, compute_dtype).built()

    try:
        return _with_dims(model, sizes, arrays, built)
    except InputValueError as error:
        raise InputValueError(f"{where}: {error}", error.inputs) from None
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{where} {error}", error.reasons) from None
    except (FusegraphError, RecursionError) as error:
        raise ModelError(f"{where}: {error}") from None


def _with_dims(proto: ModelProto, given: Given, values: Mapping[str, Array], build: Callable[[Given], Model]) -> Model:
    """Builds a model with Dims for the sizes that are not given."""
    every = (*proto.graph.input, *proto.graph.output)
    dims = (dim.dim_param for value in every for dim in value.type.tensor_type.shape.dim)
    check_text(proto.graph.name, *(value.name for value in every), *dims, *(o.domain for o in proto.opset_import))
    known = {t.name for t in proto.graph.initializer} | values.keys()
    open_ = [value for value in proto.graph.input if value.name not in known]
    sizes = with_dims(open_, given)
    if not vary(sizes):
        return build(sizes)
    try:
        model = build(sizes)
        reason = difference(lambda other: build(other).graph, sizes, model.graph)
        if not reason:
            return model
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever code makes of a size that is no plain number
        reason = str(error)
    return _by_size(open_, sizes, build, reason)


def _by_size(open_: Sequence[ValueInfoProto], sizes: Given, build: Callable[[Given], Model], reason: str) -> Model:
    """Returns a model that is built for each choice of sizes.  Raises what building it raises, if no sizes do."""
    refused: Exception | None = None
    for some in some_sizes(sizes):
        try:
            sample = build(at(dict(sizes), some))
        except (FusegraphError, RecursionError) as error:
            refused = refused or error
            continue
        graph = OpenGraph(sample.graph.name, lambda known: build(at(dict(sizes), known)).graph, reason)
        shapes = {value.name: shape_of(value, sizes) for value in open_}
        inputs = {name: graph.tensor(t.name, shapes[name], t.dtype) for name, t in sample.inputs.items()}
        return Model(graph, inputs, {}, {}, reason)
    assert refused is not None
    raise refused


class _Building:
    """Builds a `Model` from a ModelProto."""

    def __init__(
        self,
        model: ModelProto,
        shapes: Mapping[str, int | tuple[int, ...]],
        values: Mapping[str, Array],
        folder: Path | None,
        name: str | None,
        alias: Mapping[str, str],
        compute_dtype: Any,
    ) -> None:
        self._model, self._shapes, self._values, self._alias = model, shapes, values, alias
        self._graph = Graph("model", compute_dtype=compute_dtype)
        self._importer = Importer(self._graph, model.functions, folder, shapes)
        self._graph.name = self._importer.free_name(name or model.graph.name or "model").replace("/", "_")

    def built(self) -> Model:
        opsets = self._opsets()
        scope = Scope({}, opsets)
        inputs, constants = self._inputs(scope)
        self._importer.body(self._model.graph, scope)
        if self._importer.refused:
            raise self._unsupported()
        if self._importer.unknown:
            raise self._unknown(inputs)
        constants |= {t.name: scope.values[t.name] for t in self._model.graph.initializer if t.name in scope.values}
        outputs = self._outputs(scope, self._shared(inputs))
        if self._importer.refused:
            raise self._unsupported()
        return Model(self._graph, inputs, outputs, {k: v for k, v in constants.items() if k not in inputs})

    def _opsets(self) -> dict[str, int]:
        """Returns domain -> version of the operator sets.  Raises ModelError if that of ONNX is too new."""
        if not self._model.HasField("graph"):
            raise ModelError("it has no graph: is it an ONNX model?")
        opsets = {domain_of(o.domain): o.version for o in self._model.opset_import}
        newest = onnx.defs.onnx_opset_version()
        version = opsets.get("", newest)
        if not 1 <= version <= newest:
            raise ModelError(f"it is of operator set {version}; the installed package onnx knows those up to {newest}")
        return opsets

    # ---- inputs

    def _inputs(self, scope: Scope) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the inputs of the graph, and those that are constants, by the model's names."""
        defaults = {t.name for t in self._model.graph.initializer}
        declared = [v for v in self._model.graph.input if v.name not in defaults or v.name in self._values]
        unsized: list[str] = []
        inputs: dict[str, Tensor] = {}
        constants: dict[str, Tensor] = {}
        for value in declared:
            if not value.name or value.name in scope.values:
                raise ModelError(f"two inputs have the name {short(value.name)}")
            scope.values[value.name] = MISSING
            dtype = self._dtype(value, f"input {short(value.name)}")
            shape = self._shape(value, unsized) if dtype is not None else None
            if dtype is None or shape is None:
                continue
            if value.name in self._values:
                scope.values[value.name] = constants[value.name] = self._given(value.name, dtype)
            else:
                name = self._importer.free_name(value.name)
                scope.values[value.name] = inputs[value.name] = self._graph.tensor(name, shape, dtype)
        if unsized:
            raise ModelError(
                f"give shapes for {', '.join(unsized)}: shapes={{'an input': (size, ...)}}; on the command line "
                "model.onnx:input=1x3x224x224"
            )
        named = {v.name for v in declared} | {d.dim_param for v in declared for d in v.type.tensor_type.shape.dim}
        named |= {name for n in self._model.graph.node if n.op_type in SELECTED for name in n.output[:1]}
        for key in (*self._shapes, *self._values):
            if key not in named:
                raise ModelError(f"it has no input and no dimension {short(str(key))}")
        return inputs, constants

    def _dtype(self, value: ValueInfoProto, what: str) -> DType | None:
        """Returns the dtype of an input; if it is unsupported, notes that and returns None."""
        kind, element = value.type.WhichOneof("value") or "none", value.type.tensor_type.elem_type
        if kind == "tensor_type" and element in DTYPES:
            return DTYPES[element]
        name = type_name(element) if kind == "tensor_type" else kind.removesuffix("_type")
        self._importer.refuse(f"type {name}", what)
        return None

    def _shape(self, value: ValueInfoProto, unsized: list[str]) -> tuple[int, ...] | None:
        """Returns an input's shape; if sizes are unknown, adds them to ``unsized`` and returns None."""
        what = f"input {short(value.name)}"
        dims = value.type.tensor_type.shape.dim
        has_shape = value.type.tensor_type.HasField("shape")
        given = self._shapes.get(value.name)
        if given is None and value.name in self._values:
            given = self._values[value.name].shape
        if given is not None:
            sizes = checked_shape(what, [given] if isinstance(given, int) else given)
            if has_shape and len(sizes) != len(dims):
                raise ModelError(f"{what} has {len(dims)} dimensions, the shape given has {len(sizes)}")
            for d, (dim, wanted) in enumerate(zip(dims, sizes)):
                fixed = dim.dim_value if dim.HasField("dim_value") else self._shapes.get(dim.dim_param, wanted)
                if fixed != wanted:
                    raise ModelError(f"{what} has size {fixed} along dimension {d}, the shape given has {wanted}")
            return sizes
        if not has_shape:
            unsized.append(f"{what}, which has no shape")
            return None
        return checked_shape(what, shape_of(value, self._shapes))

    def _given(self, name: str, dtype: DType) -> Tensor:
        """Returns a constant for an input whose value was given.  Raises ModelError for another dtype."""
        array = self._values[name]
        if array.dtype != dtype.numpy:
            raise ModelError(f"input {short(name)} is {dtype}, the value given {array.dtype}")
        return self._graph.constant(array, name=self._importer.free_name(name))

    # ---- outputs and errors

    def _shared(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns name of an output -> the input that it overwrites.  Raises ModelError for an alias without a pair."""
        made = {value.name for value in self._model.graph.output}
        found: dict[str, Tensor] = {}
        for past, present in self._alias.items():
            every = {n.replace(past, present): t for n, t in inputs.items() if past and past in n}
            if not (pairs := {name: t for name, t in every.items() if name in made}):
                raise ModelError(f"no output has an input's name with {short(present)} in place of {short(past)}")
            found |= pairs
        return found

    def _outputs(self, scope: Scope, shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = {}
        for value in self._model.graph.output:
            tensor = scope.find(value.name)
            if tensor is None:
                raise ModelError(f"no node makes the output {short(value.name)}")
            if value.name in outputs:
                raise ModelError(f"two outputs have the name {short(value.name)}")
            if value.type.tensor_type.elem_type and DTYPES.get(value.type.tensor_type.elem_type) != tensor.dtype:
                declared = type_name(value.type.tensor_type.elem_type)
                raise ModelError(f"output {short(value.name)} is declared as {declared}, but is {tensor.dtype}")
            if (target := shared.get(value.name)) is not None:
                if tensor.type != target.type:
                    here, there = (f"{t.dtype} {list(t.shape)}" for t in (tensor, target))
                    raise ModelError(
                        f"output {short(value.name)}, {here}, cannot overwrite input {target.name!r}, {there}"
                    )
                tensor = self._graph.assign(target, tensor, name=self._importer.free_name(value.name))
            if tensor in self._graph.outputs and tensor not in self._graph.updates:
                tensor = self._graph.identity(tensor, name=self._importer.free_name(value.name))
            outputs[value.name] = self._graph.output(tensor)
        if not outputs:
            raise ModelError("it has no outputs")
        return outputs

    def _unsupported(self) -> UnsupportedModelError:
        reasons = self._importer.refused
        lines = ["uses what fusegraph does not have:"]
        for what, where in list(reasons.items())[:40]:
            lines.append(f"  {what}: {', '.join(where[:6])}{', ...' if len(where) > 6 else ''}")
        if len(reasons) > 40:
            lines.append(f"  and {len(reasons) - 40} more")
        return UnsupportedModelError("\n".join(lines), tuple(reasons))

    def _unknown(self, inputs: Mapping[str, Tensor]) -> ModelError:
        names = {tensor.name: name for name, tensor in inputs.items()}
        needed = dict.fromkeys(names[n] for roots in self._importer.unknown.values() for n in roots)
        what = "; ".join(list(self._importer.unknown)[:6])
        if not needed:
            return ModelError(f"{what}, but follows from tensors that are too large to be computed before")
        listed = ", ".join(short(n) for n in needed)
        return InputValueError(
            f"{what}, and follows from the values of inputs: a graph is built for one shape; give them as "
            f"values={{{listed}: array}}",
            tuple(needed),
        )
