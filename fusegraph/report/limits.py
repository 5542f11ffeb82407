"""What a kernel takes at least on a machine: the time of its bytes in memory, and that of its operations."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.spec import AttentionSpec
from codegen.target import Target
from fusegraph.dtypes import DType, float32, float64
from fusegraph.graph import Node
from fusegraph.ops.base import Kind
from fusegraph.ops.contraction import TF32
from fusegraph.plan import Kernel
from fusegraph.report.estimates import memory_us

#: Rows of which the pairs of query and key are counted; of more, every so manieth.
_MOST_ROWS = 512


class Limit(NamedTuple):
    """A kernel's bytes, operations (multiply-adds count twice), and the least microseconds, with what sets them."""

    nbytes: int
    operations: float
    us: float
    by: str


def limit_of(kernel: Kernel, target: Target) -> Limit:
    """Returns what a kernel takes at least; ``by`` is "memory" or "arithmetic"."""
    nbytes = sum(t.nbytes for t in kernel.arguments)
    counted = [_counted(node) for node in kernel.group.nodes]
    spec = kernel.group.lowered.spec
    if isinstance(spec, AttentionSpec | AttentionBackwardSpec):
        counted.append(_attention(spec))
    memory = memory_us(nbytes, target)
    arithmetic = target.launch_us + sum(number / _rate(dtype, target, wide) for number, dtype, wide in counted)
    operations = sum(number for number, _, _ in counted)
    return Limit(nbytes, operations, max(memory, arithmetic), "memory" if memory >= arithmetic else "arithmetic")


def _counted(node: Node) -> tuple[float, DType, bool]:
    """Returns the operations of a node, the dtype of their operands, and whether tensor cores may do them."""
    dtype = node.inputs[0].dtype if node.inputs else node.output.dtype
    if node.kind is Kind.CONTRACTION:
        assert node.op.products is not None
        types = tuple(t.type for t in node.inputs)
        common = node.op.promoted(types)
        tensor_cores = common != float32 or node.attributes.get("compute_dtype") == TF32
        return 2.0 * node.output.size * node.op.products(types, node.attributes), common, tensor_cores
    if node.kind in (Kind.REDUCTION, Kind.POOLING, Kind.SCAN):
        return float(node.inputs[0].size), dtype, False
    return float(node.output.size if node.kind is Kind.POINTWISE else 0), dtype, False


def _attention(spec: AttentionSpec | AttentionBackwardSpec) -> tuple[float, DType, bool]:
    """Returns the operations of attention's products, over the pairs of query and key that meet."""
    forward = spec if isinstance(spec, AttentionSpec) else spec.attention
    kept = 1.0
    step = -(-forward.rows // _MOST_ROWS)
    row, key = np.arange(0, forward.rows, step)[:, None], np.arange(forward.keys)
    met = np.ones((row.size, forward.keys), bool)
    for bound in (*forward.bounds, *forward.ranges):
        if not bound.loads:
            met &= bound.row * row + bound.key * key + bound.start >= 0
    kept = float(met.mean()) if met.size else 0.0
    widths = float(forward.depth + forward.width)
    if isinstance(spec, AttentionBackwardSpec):  # the scores again, the loss by the values, and what is wanted
        widths += forward.depth * (spec.first is not None) + forward.width * (spec.second is not None)
        widths += forward.depth * (spec.by_queries is not None)
    pairs = prod(forward.batch) / max(forward.parts, 1) * forward.rows * forward.keys * kept
    return 2.0 * pairs * widths, forward.q.dtype, forward.q.dtype != float32


def _rate(dtype: DType, target: Target, tensor_cores: bool) -> float:
    """Returns how many operations in a dtype the machine does in a microsecond."""
    if dtype == float64:
        return target.fma * target.clock * target.sms  # half of those in float32
    fma = 2 * target.fma * target.sms * target.clock
    sixteen = 2 * max(target.mma, target.wgmma) * target.sms * target.clock
    if dtype == float32:
        return sixteen / 2 if tensor_cores else max(fma, sixteen / 6)  # in six products of parts in bfloat16
    return sixteen * (2 if dtype.itemsize == 1 else 1) if tensor_cores else fma
