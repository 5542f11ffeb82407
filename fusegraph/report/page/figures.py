"""What a kernel has to do at least: bytes, operations, and the microseconds below which no kernel gets."""

from __future__ import annotations

from typing import Any

from codegen.target import Target
from fusegraph.graph import Node
from fusegraph.ops.base import Kind
from fusegraph.plan import Kernel
from fusegraph.report.estimates import memory_us, predicted_us

#: Products of queries, keys, values and gradients that an attention kernel computes, by what it walks over.
_ATTENTION_PRODUCTS = {None: 2, "queries": 3, "keys": 4}
_MASKED = (Kind.ATTENTION, Kind.ATTENTION_BACKWARD)
#: Ops of tensor cores on elements of so many bits, relative to those of 16 bits.
_TENSOR_CORES = {8: 2.0, 16: 1.0}
#: Float32 products of six products of bfloat16 each, and of tf32, relative to those of 16 bits.
_SIX_PRODUCTS, _TF32 = 1 / 6, 1 / 2


def operations(node: Node) -> int:
    """Returns how many operations a node is: two for each product that is summed up, one for each element otherwise.

    Products with masked scores of attention are counted.  Movement is none.
    """
    if products := _products(node):
        return 2 * products
    if node.kind in (Kind.MOVEMENT, Kind.ASSIGN):
        return 0
    return max([t.size for t in (*node.inputs, *node.outputs)])


def _products(node: Node) -> int:
    """Returns how many products a node sums up."""
    types, op = tuple(t.type for t in node.inputs), node.op
    if node.kind in _MASKED:
        q, keys = node.inputs[:2]
        length = keys.size // keys.shape[-2] if node.attributes.get("paged") else keys.shape[-1]
        return int(_ATTENTION_PRODUCTS[node.attributes.get("over")] * q.size * length)
    if op.multiplications is not None:
        return int(op.multiplications(types, node.attributes))
    if op.products is not None:
        return int(op.products(types, node.attributes) * node.output.size)
    return 0


def peak(node: Node, target: Target) -> float:
    """Returns the most operations of a node in a microsecond: of tensor cores for products that they take."""
    tensor = max(target.wgmma, target.mma)
    dtype = node.op.promoted(tuple(t.type for t in node.inputs[:2]))
    each = float(target.fma)
    if _products(node):
        bits = dtype.itemsize * 8
        if bits in _TENSOR_CORES:
            each = tensor * _TENSOR_CORES[bits]
        elif bits == 32:
            tf32 = "tf32" in (node.attributes.get("compute_dtype"), getattr(node.output.graph, "_products", None))
            each = max(target.fma, tensor * (_TF32 if tf32 else _SIX_PRODUCTS))
    return 2 * each * target.sms * target.clock


def kernel_figures(kernel: Kernel, target: Target) -> dict[str, Any]:
    """Returns what a kernel has to do on a target, as plain data.

    bytes         that it reads and writes, each tensor once.
    operations    of its nodes.
    memory_us, compute_us  what moving the bytes takes at least, and what the operations take at the rate of the units:
                  without those of attention, of which masks may leave out any.
    floor_us      the larger of both.
    estimated_us  what the cost model says; measured_us what the autotuner measured, None if it did not.
    """
    machine = target.planned
    moved = sum(t.memory_bytes for t in kernel.arguments)
    bound = (n for n in kernel.group.nodes if n.kind not in _MASKED)
    compute = machine.launch_us + sum(operations(n) / peak(n, machine) for n in bound)
    memory = memory_us(moved, machine)
    return {
        "bytes": moved,
        "operations": sum(map(operations, kernel.group.nodes)),
        "memory_us": round(memory, 3),
        "compute_us": round(compute, 3),
        "floor_us": round(max(memory, compute), 3),
        "estimated_us": round(predicted_us(kernel.group.lowered.spec, kernel.choice.schedule, moved, machine), 3),
        "measured_us": kernel.choice.us,
    }
