"""fusegraph: a graph-API fusion compiler.

import fusegraph as fg

graph = fg.Graph("sigmoid_fma")
a, b, c = (graph.tensor(name, (1024, 1024)) for name in "abc")
graph.output(graph.sigmoid(a + b * c), name="y")
y = graph.compile()(x0, x1, x2)

Names are imported from their modules when they are first used (PEP 562), so that ``import fusegraph`` and the command
line's ``--help`` do not wait for NumPy and networkx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fusegraph.installation import codegen_folder
from fusegraph.operations import Operations
from fusegraph.version import __version__ as __version__

if TYPE_CHECKING:
    from fusegraph import errors, onnx
    from fusegraph.dims import Dim
    from fusegraph.dtypes import (
        DType,
        bfloat16,
        bool_,
        float4_e2m1,
        float8_e4m3,
        float8_e4m3fnuz,
        float8_e5m2,
        float8_e5m2fnuz,
        float8_e8m0,
        float16,
        float32,
        float64,
        int2,
        int4,
        int8,
        int16,
        int32,
        int64,
        uint2,
        uint4,
        uint8,
        uint16,
        uint32,
        uint64,
    )
    from fusegraph.engines import ENGINES, compile
    from fusegraph.engines.base import Executable
    from fusegraph.errors import FusegraphError
    from fusegraph.frontends.cudnn import from_cudnn
    from fusegraph.graph import Graph, Node, Tensor
    from fusegraph.report.profile_program import profile
    from fusegraph.runtime.arrays import DeviceArray, to_device, to_numpy

codegen_folder()  # before anything of codegen is imported

__all__ = [
    "ENGINES",
    "DType",
    "DeviceArray",
    "Dim",
    "Executable",
    "FusegraphError",
    "Graph",
    "Node",
    "Tensor",
    "bfloat16",
    "bool_",
    "compile",
    "errors",
    "float4_e2m1",
    "float8_e4m3",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0",
    "float16",
    "float32",
    "float64",
    "from_cudnn",
    "int2",
    "int4",
    "int8",
    "int16",
    "int32",
    "int64",
    "onnx",
    "profile",
    "to_device",
    "to_numpy",
    "uint2",
    "uint4",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]

#: Public name -> the module that defines it.
_HOME = {
    **dict.fromkeys(("ENGINES", "compile"), "fusegraph.engines"),
    **dict.fromkeys(("DeviceArray", "to_device", "to_numpy"), "fusegraph.runtime.arrays"),
    **dict.fromkeys(("Graph", "Node", "Tensor"), "fusegraph.graph"),
    "Dim": "fusegraph.dims",
    "Executable": "fusegraph.engines.base",
    "FusegraphError": "fusegraph.errors",
    "from_cudnn": "fusegraph.frontends.cudnn",
    "profile": "fusegraph.report.profile_program",
}

if not TYPE_CHECKING:  # a type checker that saw this would take every name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in ("errors", "onnx"):
            return import_module(f"fusegraph.{name}")
        value = getattr(import_module(_HOME.get(name, "fusegraph.dtypes")), name)
        globals()[name] = value
        return value


def _compile(self: Operations, engine: str | None = None, **options: Any) -> Executable:
    """Compiles the graph for an engine ("cuda", "cpu", "reference"; default: cuda if there is a GPU, else cpu).

    Options are those of `fusegraph.compile`.
    """
    executable: Executable = import_module(_HOME["compile"]).compile(self, engine=engine, **options)
    return executable


def _to_dot(self: Operations) -> str:
    """Returns the graph in DOT, which Graphviz draws."""
    text: str = import_module("fusegraph.report.drawing").to_dot(self)
    return text


def _to_onnx(self: Operations, file: Any = None) -> Any:
    """Returns the graph as an ONNX model, and writes it to ``file`` if given.  Needs the package ``onnx``.

    Raises NotSupportedError for assignments, sizes that vary, and ops and dtypes that ONNX has not, by name.
    """
    return import_module("fusegraph.frontends.onnx.exporter").to_onnx(self, file)


def _repr_html_(self: Operations) -> str:
    text: str = import_module("fusegraph.report.drawing").to_html(self)
    return text


#: Methods of `Graph` that layers above it have.
for _name, _method in {"compile": _compile, "to_dot": _to_dot, "to_onnx": _to_onnx, "_repr_html_": _repr_html_}.items():
    _method.__name__, _method.__qualname__ = _name, f"Graph.{_name}"
    setattr(Operations, _name, _method)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
