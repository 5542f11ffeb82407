"""ONNX models as graphs: `load` a file, compile it for an engine, call it.

    model = fusegraph.onnx.load("model.onnx", shapes={"batch": 8})
    y = model.compile()(x)

The functions of one table (`table`, `operators`) write the operators with public methods of `Graph`.  Other operators
are expanded if ONNX defines them as functions.  Needs the package ``onnx``.
"""

from __future__ import annotations

from fusegraph.errors import ToolchainError

try:
    import onnx as _onnx  # noqa: F401
except ImportError:
    raise ToolchainError("ONNX models are read with the package onnx: pip install 'fusegraph[onnx]'") from None

from fusegraph.frontends.onnx import operators as _operators  # noqa: F401 - fills the table
from fusegraph.frontends.onnx.model import InputValueError, Model, Shapes, from_proto, load

__all__ = ["InputValueError", "Model", "Shapes", "from_proto", "load"]
