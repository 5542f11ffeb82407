"""ONNX models: `fusegraph.onnx.load`, and a `Backend` as the package ``onnx`` defines one."""

from fusegraph.frontends.onnx import InputValueError, Model, from_proto, load
from fusegraph.frontends.onnx.backend import Backend

__all__ = ["Backend", "InputValueError", "Model", "from_proto", "load"]
