"""The backend of ``torch.compile``, and its reports.

    model = torch.compile(model, backend="fusegraph")
    model(x)
    print(fusegraph.torch.report())

    print(fusegraph.torch.explain(model, x))    # the same without a GPU, and without compiling

torch finds the backend by its entry point where fusegraph is installed; else importing this module registers it.
Importing it raises ToolchainError where torch is missing.

Operators that stay torch's, between pieces (`report` lists those of a model, each with its reason):

- linear algebra (``inv``, ``solve``, ``lu``, ``qr``, ``svd``, ``eig``, ``cholesky``, ``matrix_exp``) and Fourier
  transforms (``fft``, ``stft``): libraries compute them, and fusegraph has no complex numbers;
- other random numbers (``randperm``, ``randint``, all of float64 or of a generator that is given): they follow
  torch's seed, in the program's order;
- results whose sizes depend on data (``nonzero``, ``masked_select``, ``unique``): kernels are made for known sizes;
- special functions (``lgamma``, ``digamma``, ``erfinv``, ``erfc``, ``i0``, Bessel's, orthogonal polynomials, ``atan2``,
  ``hypot``) and counts (``mode``, ``histc``);
- rare layers: ``embedding_bag``, ``ctc_loss``, ``cdist``, ``segment_reduce``, fractional pooling, pooling with a
  divisor of its own, gradients of ``grid_sample`` and of paddings that repeat, antialiased interpolation;
- sparse and nested tensors, those of quantised dtypes (``quint8``), and products of 8-bit floats with scales for blocks
  of 32 or 16 on both sides;
- ``copy_`` to inputs of what torch computes, and to inputs that another piece or torch reads later: all of these are
  written at the end, by one call, which cuts no piece in two.
"""

from __future__ import annotations

from fusegraph.errors import ToolchainError

try:
    import torch as _torch
except ImportError as _missing:
    raise ToolchainError("fusegraph.torch needs torch: pip install 'fusegraph[torch]'") from _missing

from fusegraph.engines.packing import repack
from fusegraph.frontends.torch.backend import backend
from fusegraph.frontends.torch.exported import explain
from fusegraph.frontends.torch.report import FunctionReport, PieceReport, Report, report

if "fusegraph" not in _torch._dynamo.list_backends(exclude_tags=None):
    _torch._dynamo.register_backend(backend, name="fusegraph")

__all__ = ["FunctionReport", "PieceReport", "Report", "backend", "explain", "repack", "report"]
