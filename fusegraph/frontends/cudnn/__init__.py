"""Reads graphs of cudnn-frontend's Python API into a `Graph`: `from_cudnn`."""

from fusegraph.frontends.cudnn.graph import CudnnGraph
from fusegraph.frontends.cudnn.importer import from_cudnn, is_pygraph

__all__ = ["CudnnGraph", "from_cudnn", "is_pygraph"]
