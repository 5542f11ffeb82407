"""fusegraph: a graph-API fusion compiler.

import fusegraph as fg

graph = fg.Graph("sigmoid_fma")
a, b, c = (graph.tensor(name, (1024, 1024)) for name in "abc")
graph.output(graph.sigmoid(a + b * c), name="y")
y = graph.compile()(x0, x1, x2)
"""

from __future__ import annotations

from fusegraph import errors
from fusegraph.dtypes import (
    DType,
    bfloat16,
    bool_,
    float8_e4m3,
    float8_e5m2,
    float16,
    float32,
    float64,
    int8,
    int32,
    int64,
    uint8,
)
from fusegraph.engines import ENGINES, compile
from fusegraph.engines.base import Executable
from fusegraph.errors import FusegraphError
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.runtime.arrays import DeviceArray, to_device, to_numpy

__version__ = "0.1.0"

__all__ = [
    "ENGINES",
    "DType",
    "DeviceArray",
    "Executable",
    "FusegraphError",
    "Graph",
    "Node",
    "Tensor",
    "bfloat16",
    "bool_",
    "compile",
    "errors",
    "float16",
    "float32",
    "float64",
    "float8_e4m3",
    "float8_e5m2",
    "int32",
    "int64",
    "int8",
    "to_device",
    "to_numpy",
    "uint8",
]
