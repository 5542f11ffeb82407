"""The backend of ``torch.compile``, and what it tells.

    model = torch.compile(model, backend="fusegraph")
    model(x)
    print(fusegraph.torch.report())

    print(fusegraph.torch.explain(model, x))    # the same without a GPU, and without compiling

torch finds the backend by its entry point, where fusegraph is installed; else importing this module makes it known.
Importing it raises ToolchainError where torch is missing.
"""

from __future__ import annotations

from fusegraph.errors import ToolchainError

try:
    import torch as _torch
except ImportError as _missing:
    raise ToolchainError("fusegraph.torch needs torch: pip install 'fusegraph[torch]'") from _missing

from fusegraph.frontends.torch.backend import backend
from fusegraph.frontends.torch.exported import explain
from fusegraph.frontends.torch.report import FunctionReport, PieceReport, Report, report

if "fusegraph" not in _torch._dynamo.list_backends(exclude_tags=None):
    _torch._dynamo.register_backend(backend, name="fusegraph")

__all__ = ["FunctionReport", "PieceReport", "Report", "backend", "explain", "report"]
