"""The op table.  Importing this package registers every op."""

from fusegraph.ops import (
    attention,
    composite,
    contraction,
    convolution,
    movement,
    norm,
    norm_backward,
    pointwise_activation,
    pointwise_integer,
    pointwise_math,
    pooling,
    pooling_composite,
    random,
    reduction,
    scan,
)
from fusegraph.ops.base import REQUIRED, TABLE, Kind, Op, TensorType

__all__ = [
    "REQUIRED",
    "TABLE",
    "Kind",
    "Op",
    "TensorType",
    "attention",
    "composite",
    "contraction",
    "convolution",
    "movement",
    "norm",
    "norm_backward",
    "pointwise_activation",
    "pointwise_integer",
    "pointwise_math",
    "pooling",
    "pooling_composite",
    "random",
    "reduction",
    "scan",
]
