"""Elements of fewer than 8 bits written out in bytes, so that nothing behind this pass knows of them.

An input of such a dtype is its bytes, of which the values are taken apart by shifts into a carrier (`codegen.dtypes`);
tensors in between are of the carrier; an output is bytes again, each put together by the one thread that writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import pairwise
from math import inf
from typing import Any

from fusegraph.dtypes import (
    DType,
    bfloat16,
    float4_e2m1,
    float8_e8m0,
    float32,
    float64,
    int8,
    int32,
    int64,
    uint8,
    uint16,
)
from fusegraph.errors import LayoutError
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import extent, packed_strides, same_strides, stride_order
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops.base import Role
from fusegraph.passes.partition import Decision
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, same

#: The numbers halfway between those that float4_e2m1 holds, and whether one that is just there goes up, to the even.
_HALFWAY = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def unpack(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Writes elements of fewer than 8 bits out in bytes: inputs and outputs of such are uint8, in one dimension.

    Raises LayoutError for inputs that overlap or have a stride that is no multiple of the next smaller one, and for
    outputs with gaps.
    """
    if not any(t.dtype.is_packed for t in graph.tensors.values()):
        return same(graph)
    rewrite = _Unpacking(graph)
    for node in graph.nodes:
        rewrite.take_over(node)
    return rewrite.done()


def _carrier(dtype: DType) -> DType:
    return dtype.carrier or dtype


class _Unpacking(Rewrite):
    """The rewrite of a graph with packed elements."""

    def __init__(self, old: Graph) -> None:
        super().__init__(old)
        for tensor in old.inputs:
            if tensor.dtype.is_packed:
                with self._naming(tensor, "unpacked"):
                    self.new[tensor] = self._apart(self.new[tensor], tensor)

    @contextmanager
    def _naming(self, after: Tensor, part: str) -> Iterator[None]:
        """Names the tensors that are made in the meantime after a tensor."""
        before = set(self.graph.tensors)
        yield
        for tensor in [t for name, t in self.graph.tensors.items() if name not in before]:
            named(tensor, after.name, part)

    def result(self, old: Tensor) -> Tensor:
        if old in self.new or not old.dtype.is_packed:
            return super().result(old)
        carrier = _carrier(old.dtype)
        if old in self._old.input_numbers:
            size = old.dtype.nbytes(extent(old.shape, old.strides))
            made = self.graph._add_tensor(old.name, (size,), (1,), uint8)
        else:
            value = None if old.value is None else old.value.astype(float if carrier.is_float else carrier.numpy)
            stored = None if value is None else value.astype(carrier.numpy)
            made = self.graph._add_tensor(old.name, old.shape, old.strides, carrier, stored)
        if old in self._old._automatic:
            self.graph._automatic.add(made)
        self.new[old] = made
        return made

    def take_over(self, node: Node, inputs: Any = None) -> None:
        dtypes = [t.dtype for t in (*node.inputs, *node.outputs)]
        if not any(d.is_packed for d in dtypes):
            super().take_over(node, inputs)
            return
        operands = list(self.inputs(node))
        attributes = dict(node.attributes)
        if node.op.role is Role.CAST:
            source, target = node.inputs[0].dtype, node.output.dtype
            if target.is_packed and source != target:
                with self._naming(node.output, "rounded"):
                    operands = [self._narrowed(operands[0], source, target)]
            attributes = {"dtype": _carrier(target), "saturate": attributes["saturate"]}
        else:
            wanted = node.op.operand_dtypes(tuple(t.type for t in node.inputs))
            with self._naming(node.output, "operand"):
                operands = [self._cast(x, _carrier(d)) for x, d in zip(operands, wanted, strict=True)]
        self.graph.add_node(Node(node.op, tuple(operands), attributes, *map(self.result, node.outputs)))

    def done(self, decisions: Sequence[Decision] = ()) -> Rewritten:
        for tensor in self._old.outputs:
            if tensor.dtype.is_packed:
                with self._naming(tensor, "packed"):
                    bytes_ = self._together(self.new[tensor], tensor)
                named(self.new[tensor], tensor.name, "values")
                self.graph._rename(bytes_, tensor.name)
                self.new[tensor] = bytes_
        return super().done(decisions)

    # ---- values

    def _cast(self, x: Tensor, dtype: DType) -> Tensor:
        cast: Tensor = x if x.dtype == dtype else self.graph.cast(x, dtype)
        return cast

    def _narrowed(self, x: Tensor, source: DType, target: DType) -> Any:
        """Returns what a cast to a packed dtype makes of values, in the carrier."""
        graph: Any = self.graph
        if target == float8_e8m0:
            return self._power(self._exponent_of(x, source))
        if target == float4_e2m1:
            if not source.is_float:
                x = graph.cast(x, float32)
            negative = graph.logical_or(x < 0, graph.isnan(x))
            negative = graph.logical_or(negative, graph.reciprocal(x) < 0)
            return self._of_code(self._code_of(x), negative)
        if source.is_float:  # as `convert`: truncates, saturates, NaN gives 0
            return graph.cast(graph.clamp(x, float(target.min), float(target.max)), _carrier(target))
        if target.holds(source):
            return self._cast(x, _carrier(target))
        return self._signed(graph.bitwise_and(graph.cast(x, uint8), (1 << target.bits) - 1), target)

    def _signed(self, code: Tensor, dtype: DType) -> Any:
        """Returns the integers that the lowest bits of uint8 numbers stand for."""
        if dtype.min == 0:
            return code
        top = -int(dtype.min)
        return self.graph.sub(self.graph.bitwise_xor(self.graph.cast(code, int8), top), top)

    def _exponent_of(self, x: Tensor, source: DType) -> Any:
        """Returns the codes, uint16, of the nearest powers of 2 in float8_e8m0, halfway up."""
        graph: Any = self.graph
        wide = float32 if source.is_float and source != float64 else float64
        x = self._cast(x, wide)
        places, bias, kind = (23, 0, int32) if wide == float32 else (52, 896, int64)
        valid = graph.logical_and(x > 0, x < inf)
        bits = graph.binary_select(graph.bitcast(x, dtype=kind), 0, valid)
        code = graph.shift_right(graph.add(bits, 1 << (places - 1)), places)
        if bias:
            code = graph.clamp(graph.sub(code, bias), 0, 255)
        else:  # a number below the normal ones has no leading 1
            code = graph.binary_select(0, code, bits < 3 << (places - 2))
        return graph.cast(graph.binary_select(code, 255, valid), uint16)

    def _power(self, code: Tensor) -> Any:
        """Returns float8_e8m0's values in the carrier: NaN for 255, a number below the normal ones for 0."""
        graph: Any = self.graph
        least = graph.logical_or(graph.cmp_eq(code, 0), graph.cmp_eq(code, 255))
        low = graph.mul(graph.cast(least, uint16), 1 << 6)
        return graph.bitcast(graph.bitwise_or(graph.shift_left(code, 7), low), dtype=bfloat16)

    def _code_of(self, x: Tensor) -> Any:
        """Returns the number, int8, of the nearest of float4_e2m1's magnitudes; 0 for NaN."""
        graph: Any = self.graph
        magnitude = graph.abs(x)
        steps = [graph.cast(magnitude >= h if up else magnitude > h, int8) for h, up in _HALFWAY]
        return reduce(graph.add, steps)

    def _of_code(self, code: Tensor, negative: Tensor) -> Any:
        """Returns float4_e2m1's values in the carrier: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
        graph: Any = self.graph
        number = graph.cast(code, float32)
        magnitude = graph.max(graph.max(number * 0.5, number - 2), number * 2 - 8)
        return graph.cast(graph.binary_select(graph.neg(magnitude), magnitude, negative), _carrier(float4_e2m1))

    # ---- bytes

    def _apart(self, bytes_: Tensor, tensor: Tensor) -> Any:
        """Returns the values of an input."""
        graph: Any = self.graph
        dtype = tensor.dtype
        each = 8 // dtype.bits
        wide = graph.broadcast(graph.reshape(bytes_, (bytes_.size, 1)), (bytes_.size, each))
        places = graph.cast(graph.gen_index(wide, axis=1), uint8)
        code = graph.bitwise_and(graph.shift_right(wide, graph.mul(places, dtype.bits)), (1 << dtype.bits) - 1)
        if dtype == float8_e8m0:
            values = self._power(graph.cast(bytes_, uint16))
        elif dtype.is_float:
            values = self._of_code(graph.bitwise_and(code, 7), graph.cmp_ge(code, 8))
        else:
            values = self._signed(code, dtype)
        return self._strided(graph.reshape(values, (bytes_.size * each,)), tensor)

    def _strided(self, flat: Tensor, tensor: Tensor) -> Any:
        """Returns the elements of a line that a tensor's strides select, in its shape.

        The line is reshaped to blocks within blocks, of which each dimension takes the first ones.
        """
        graph: Any = self.graph
        shape, strides = tensor.shape, tensor.strides
        if tensor.size == 0:
            return graph.reshape(flat, shape)
        dims = sorted((d for d in range(tensor.rank) if shape[d] > 1 and strides[d]), key=lambda d: -strides[d])
        steps = [strides[d] for d in dims] or [1]
        counts = [shape[d] for d in dims] or [1]
        blocks = [counts[0], *(outer // inner for outer, inner in pairwise(steps)), steps[-1]]
        if any(outer % inner for outer, inner in pairwise(steps)) or any(
            count > block for count, block in zip(counts[1:], blocks[1:])
        ):
            raise LayoutError(
                f"input {tensor.name!r} of {tensor.dtype} {list(shape)} has strides {list(strides)}, of which one "
                "is no multiple of the next; copy it to a packed layout"
            )
        whole = counts[0] * steps[0]
        if flat.size < whole:
            flat = graph.pad(flat, ((0, whole - flat.size),))
        elif flat.size > whole:
            flat = flat[:whole]
        x = graph.reshape(flat, blocks)
        if blocks != [*counts, 1]:
            x = x[(*(slice(n) for n in counts), slice(1))]
        x = graph.reshape(x, counts)
        order = sorted(range(len(dims)), key=lambda k: dims[k])
        if order != list(range(len(dims))):
            x = graph.transpose(x, order)
        spread = [shape[d] if d in dims else 1 for d in range(tensor.rank)]
        return graph.broadcast(graph.reshape(x, spread), shape)

    def _together(self, values: Tensor, tensor: Tensor) -> Any:
        """Returns the bytes of an output."""
        graph: Any = self.graph
        dtype, shape = tensor.dtype, tensor.shape
        order = stride_order(shape, tensor.strides)
        if not same_strides(shape, tensor.strides, packed_strides(shape, order)):
            raise LayoutError(
                f"output {tensor.name!r} of {dtype} {list(shape)} has strides {list(tensor.strides)} with gaps, which "
                "would be in bytes that are written; choose a packed layout"
            )
        if dtype == float8_e8m0:
            code = graph.cast(graph.shift_right(graph.bitcast(values, dtype=uint16), 7), uint8)
        elif dtype.is_float:
            number = graph.cast(values, float32)
            magnitude = graph.abs(number)
            code = graph.min(graph.min(magnitude * 2, magnitude + 2), magnitude * 0.5 + 4)
            negative = graph.logical_or(number < 0, graph.reciprocal(number) < 0)
            code = graph.add(graph.cast(code, uint8), graph.mul(graph.cast(negative, uint8), 8))
        else:
            code = graph.bitwise_and(graph.cast(values, uint8), (1 << dtype.bits) - 1)
        if order != tuple(range(tensor.rank)):
            code = graph.transpose(code, order)
        each = 8 // dtype.bits
        line = graph.reshape(code, (tensor.size,))
        if tensor.size % each:
            line = graph.pad(line, ((0, -tensor.size % each),))
        rows = graph.reshape(line, (line.size // each, each))
        parts = [rows[:, k] for k in range(each)]
        shifted = (graph.shift_left(part, k * dtype.bits) for k, part in enumerate(parts[1:], start=1))
        return reduce(graph.bitwise_or, shifted, parts[0])
