"""The op table.  Importing this package registers every op."""

from fusegraph.ops import (  # noqa: F401
    attention,
    attention_backward,
    attention_fp8,
    composite,
    contraction,
    convolution,
    linear_cross_entropy,
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
    rotary,
    scan,
    scatter,
    sort,
    sparsity,
)
from fusegraph.ops.base import REQUIRED, TABLE, Kind, Op, TensorType

__all__ = ["REQUIRED", "TABLE", "Kind", "Op", "TensorType"]
