"""KernelSpec in, CUDA C out.  Knows nothing of graphs, files, devices or compilers."""

from __future__ import annotations

from typing import TypeAlias

from codegen import contraction, pointwise, window
from codegen.spec import ContractionSpec, KernelSource, PointwiseSpec, WindowSpec

KernelSpec: TypeAlias = PointwiseSpec | WindowSpec | ContractionSpec


def render(spec: KernelSpec) -> KernelSource:
    """The CUDA C of a kernel specification, with the best schedule that is known untuned."""
    if isinstance(spec, PointwiseSpec):
        return pointwise.render(spec)
    if isinstance(spec, WindowSpec):
        return window.render(spec)
    return contraction.render(spec)
