"""The op table.  Importing this package registers every op."""

from fusegraph.ops import contraction, pointwise_activation, pointwise_math
from fusegraph.ops.base import REQUIRED, TABLE, Kind, Op, TensorType

__all__ = ["REQUIRED", "TABLE", "Kind", "Op", "TensorType", "contraction", "pointwise_activation", "pointwise_math"]
