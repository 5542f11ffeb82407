"""The state of reading a pygraph: which tensor represents which of cuDNN's, with its dtype, shape and strides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from fusegraph.dtypes import DType, float32, float64, int32, int64
from fusegraph.errors import DTypeError, GraphError, ShapeError
from fusegraph.frontends.cudnn.graph import CudnnGraph
from fusegraph.frontends.cudnn.layouts import result_strides
from fusegraph.frontends.cudnn.ragged import LENGTHS, Ragged
from fusegraph.frontends.cudnn.rows import Rows, rows_of
from fusegraph.frontends.cudnn.words import computed, dtype_of, label_of
from fusegraph.graph import Tensor
from fusegraph.layout import packed_strides
from fusegraph.lowering.cudnn import DATA_TYPES, frontend
from fusegraph.ops import TABLE
from fusegraph.ops.base import Op

#: Node types that move elements: their results have their operand's type if none was set.
_MOVEMENT = frozenset({"RESHAPE", "TRANSPOSE", "SLICE", "CONCATENATE"})


def tensors_of(pygraph: Any) -> dict[int, Any]:
    """Returns all tensors of a pygraph by uid: those that nodes take or make, and those that it lists itself."""
    return {t.uid: t for t in _every(pygraph)}


def _every(pygraph: Any) -> list[Any]:
    found = [t for n in pygraph.nodes for t in (*n.inputs.values(), *n.outputs.values()) if t is not None]
    return [*pygraph.tensors.values(), *found, *(t.ragged_offset for t in found if t.ragged_offset is not None)]


class Reading:
    """Builds a `CudnnGraph`.

    values    numbers for scalars that cuDNN reads on the host, by uid: they become part of the graph.
    elements  the size of the memory of ragged tensors in elements, by uid.
    read      a function that adds cuDNN's nodes to the graph.
    """

    def __init__(
        self,
        pygraph: Any,
        graph: CudnnGraph,
        values: Mapping[int, Any],
        elements: Mapping[int, int],
        read: Callable[[Reading, Sequence[Any]], None],
    ) -> None:
        self.graph, self.pygraph = graph, pygraph
        self._context, self._values, self._elements, self._read = pygraph.context, values, elements, read
        self._arrays: Mapping[int, Any] = getattr(pygraph, "_data_bindings", {})
        #: Whether cuDNN has inferred what was not set, so that the shapes and strides in the Python graph are final.
        self._inferred = bool(getattr(pygraph, "_cpp_bog_done", False))
        self._producer = {t.uid: (n, port) for n in pygraph.nodes for port, t in n.outputs.items() if t is not None}
        self._taken = {t.uid for n in pygraph.nodes for t in n.inputs.values() if t is not None}
        self._strides: dict[int, tuple[int, ...]] = {}
        self._casts: dict[tuple[Tensor, DType], Tensor] = {}

    # ---- what cuDNN's graph says

    def operand(self, node: Any, port: str) -> Tensor:
        """Returns an operand of a node, padded if it is ragged.  Raises GraphError if it is missing."""
        if port not in node.inputs:
            raise GraphError(f"{port} is missing")
        tensor = node.inputs[port]
        made = self.taken(tensor)
        if made not in self.graph.ragged:
            return made
        lengths = self.lengths(node, port)
        return self._ragged(tensor, self.graph.ragged[made]).padded(made, lengths)

    def taken(self, tensor: Any) -> Tensor:
        """Returns the tensor that represents one of cuDNN's; an input is added to the graph when it is first taken."""
        if tensor.uid not in self.graph.uids:
            self._keep(tensor, self._input(tensor))
        return self.graph.uids[tensor.uid]

    def lengths(self, node: Any, port: str) -> Tensor:
        """Returns the number of tokens in each batch of a ragged operand, (B, 1, 1, 1)."""
        tensor = node.inputs[port]
        return self._lengths(node, port, tensor, self.graph.ragged[self.taken(tensor)])

    def _lengths(self, node: Any, port: str, tensor: Any, memory: Rows) -> Tensor:
        """Returns the node's operand of sequence lengths if it has one, else the number of tokens between offsets."""
        key = LENGTHS[port]
        return self.taken(node.inputs[key]) if key in node.inputs else self._ragged(tensor, memory).between()

    def _ragged(self, tensor: Any, memory: Rows) -> Ragged:
        return Ragged(self.write, tensor, self.taken(tensor.ragged_offset), memory)

    def modified(self, function: Callable[[Any, Any], Any], x: Tensor) -> Tensor:
        """Applies to a tensor a function that takes a pygraph and one of its tensors, adds nodes and returns a result.

        It gets a pygraph of its own, but may also take tensors of the pygraph that is read.
        """
        known = self.pygraph
        own = type(known)(
            io_data_type=known.context.io_data_type,
            intermediate_data_type=known.context.intermediate_data_type,
            compute_data_type=known.context.compute_data_type,
        )
        kind = getattr(frontend().data_type, DATA_TYPES[x.dtype.name])
        first = own.tensor(dim=list(x.shape), data_type=kind, is_virtual=True, name="scores")
        last = function(own, first)
        every = [first, *_every(own)]  # their uids may be taken by tensors of the pygraph that is read
        if not any(last is t for t in every):
            raise GraphError(f"a function that modifies scores returns what it made of them, got {last!r}")
        uid = max(*self.graph.uids, *tensors_of(known), *(t.uid for t in every))
        for tensor in dict.fromkeys(every):
            if tensor.owner is not None and tensor.owner() is own:
                uid += 1
                tensor.set_uid(uid)
        self._arrays = {**self._arrays, **getattr(own, "_data_bindings", {})}
        self.graph.uids[first.uid] = x
        self._strides[first.uid] = x.strides
        self._producer |= {t.uid: (n, port) for n in own.nodes for port, t in n.outputs.items() if t is not None}
        self._taken |= {t.uid for n in own.nodes for t in n.inputs.values() if t is not None} | {last.uid}
        self._read(self, own.nodes)
        return self.graph.uids[last.uid]

    def dtype(self, node: Any, port: str) -> DType:
        """Returns the dtype of a node's result: its own, else the graph's default, else float32."""
        tensor = node.outputs[port]
        found = dtype_of(tensor.data_type)
        if found is None and node.node_type.name in _MOVEMENT:
            return self.operand(node, next(iter(node.inputs))).dtype
        if found is None and port != "Stats":  # which cuDNN keeps in float32
            default = self._context.intermediate_data_type if tensor.is_virtual else self._context.io_data_type
            found = dtype_of(default)
        return found or float32

    def is_wanted(self, tensor: Any) -> bool:
        """Tells whether a result is used: by a node, or as an output."""
        return not tensor.is_virtual or tensor.uid in self._taken

    def computes_in(self, node: Any) -> DType:
        """Returns the dtype in which a node computes."""
        kind = node.compute_data_type
        return computed(self._context.compute_data_type if kind is None else kind)

    def shape(self, node: Any, port: str) -> tuple[int, ...] | None:
        """Returns the shape of a result; None if the pygraph does not have it."""
        dim = node.outputs[port].dim
        return tuple(map(int, dim)) if dim else None

    def strides(self, tensor: Any) -> tuple[int, ...]:
        """Returns the strides of a cuDNN tensor in elements: as they were set, else as cuDNN infers them."""
        if tensor.uid not in self._strides:
            self._strides[tensor.uid] = self._find_strides(tensor)
        return self._strides[tensor.uid]

    def _find_strides(self, tensor: Any) -> tuple[int, ...]:
        given = tuple(map(int, tensor.stride or ()))
        if tensor.uid not in self._producer:
            return given or packed_strides(tuple(map(int, tensor.dim)))
        if given and (self._inferred or tensor.stride_assigned):
            return given
        node, port = self._producer[tensor.uid]
        made = self.graph.uids.get(tensor.uid)
        shape = made.shape if made is not None else self.shape(node, port)
        assert shape is not None, "asked for before it is made"
        ports = ["input"] if "input" in node.inputs else list(node.inputs)
        operands = [(self.operand(node, p).shape, self.strides(node.inputs[p])) for p in ports]
        return result_strides(node.node_type.name, node.params, shape, operands)

    # ---- what is made of it

    def number(self, node: Any, port: str) -> float | Tensor:
        """Returns a scalar operand: a number if it is known, else the input."""
        tensor = self.operand(node, port)
        return tensor if tensor.value is None else float(tensor.value.reshape(-1)[0])

    def number_tensor(self, value: float, rank: int) -> Tensor:
        """Returns a float32 constant that broadcasts to tensors of a rank."""
        return self.graph.constant(np.full((1,) * rank, value, np.float32))

    def cast(self, tensor: Tensor, dtype: DType) -> Tensor:
        """Returns a tensor cast to a dtype; each cast is made only once."""
        if tensor.dtype == dtype:
            return tensor
        if (tensor, dtype) not in self._casts:
            self._casts[tensor, dtype] = self.graph.cast(tensor, dtype)
        return self._casts[tensor, dtype]

    def composite(self, op: Op, operands: Sequence[Tensor], values: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Returns the results of a composite op.

        It is expanded to several nodes here if a number that it takes, such as epsilon, is an input.
        """
        if not any(isinstance(v, Tensor) for v in values.values()):
            return self.graph.apply_node(op, operands, values).outputs
        assert op.expand is not None
        widest = float64 if any(t.dtype == float64 for t in operands) else float32
        found = op.expand(self.write, *(self.cast(t, widest) for t in operands), **{**op.attributes, **values})
        return found if isinstance(found, tuple) else (found,)

    def write(self, op: str | Op, part: str, *operands: Any, **attributes: Any) -> Tensor:
        """Adds a node of an expanded composite, as `ops.composite.Writing`; ``part``, its name there, is not used."""
        chosen = op if isinstance(op, Op) else TABLE[op]
        return self.graph.apply(chosen, operands, attributes)

    def finish(self, node: Any, port: str, result: Tensor) -> None:
        """Gives a node's result the dtype, shape and name of cuDNN's tensor; makes it an output if it is not virtual.

        Raises ShapeError if the shape that was set does not fit.
        """
        tensor, dtype = node.outputs[port], self.dtype(node, port)
        if result.dtype != dtype:
            result = self.graph.apply(TABLE["identity"], (result,), {"dtype": dtype})
        shape = self.shape(node, port)
        if shape is not None and (tensor.dim_assigned or self._inferred) and shape != result.shape:
            if np.broadcast_shapes(shape, (1,)) != shape or _misfit(result.shape, shape):
                raise ShapeError(f"{port} was set to {list(shape)}, but is {list(result.shape)}")
            result = self.graph.broadcast(result, shape=shape)
        is_ragged = tensor.ragged_offset is not None and not tensor.is_virtual
        if is_ragged:
            self.graph.uids[tensor.uid] = result
            memory = rows_of(result.shape, self.strides(tensor), self._elements.get(tensor.uid))
            lengths = self._lengths(node, port, tensor, memory)
            result, owned = self._ragged(tensor, memory).stored(result, lengths)
            self.graph.ragged[result] = memory
        if result in self.graph.uids.values():  # one that has a name already
            result = self.graph.identity(result)
        self._keep(tensor, result)
        if is_ragged:
            self.graph.output(result, strides=(memory.unit, 1))
            self.graph.owned[result] = self.graph.output(owned, self._free(f"{result.name[:170]} rows"))
        elif not tensor.is_virtual:
            self.graph.output(result, strides=self.strides(tensor))

    def _keep(self, tensor: Any, made: Tensor) -> None:
        self.graph.uids[tensor.uid] = made
        label = label_of(tensor.name)
        if label and made.name != label:
            self.graph._rename(made, self._free(label))

    def _free(self, name: str) -> str:
        """Returns the name, or a similar one if another tensor of cuDNN's has it; automatic names do not count."""
        holder = self.graph.tensors.get(name)
        return name if holder is None or holder in self.graph._automatic else self.graph._unique(name)

    def _input(self, tensor: Any) -> Tensor:
        dtype = dtype_of(tensor.data_type)
        shape = tuple(map(int, tensor.dim)) or (1,)
        name = self._free(label_of(tensor.name) or "input")
        value = tensor.pass_by_value
        if value is None:
            value = self._values.get(tensor.uid)
        bound = self._arrays.get(tensor.uid)
        by_value = tensor.is_pass_by_value and prod(shape) == 1  # set for all arrays on the host, of any size
        if value is None and by_value:
            value = bound
        if value is not None:
            number = np.asarray(value).reshape(-1)
            if number.size != 1:
                raise ShapeError(f"{tensor.name!r} is one number, got {number.size}")
            kind = dtype or (float32 if number.dtype.kind == "f" else int64 if abs(number[0]) > int32.max else int32)
            return self.graph.constant(np.full(shape, number[0]), name=name, dtype=kind)
        if dtype is None:
            raise DTypeError(f"input {tensor.name!r} (uid {tensor.uid}) has no data type")
        strides = self.strides(tensor) or packed_strides(shape)
        if tensor.ragged_offset is not None:
            memory = rows_of(shape, strides, self._elements.get(tensor.uid))
            shape, strides = (memory.count, shape[3]), (memory.unit, 1)
        made = self.graph.tensor(name, shape, dtype, strides=strides)
        if tensor.ragged_offset is not None:
            self.graph.ragged[made] = memory
        if by_value:
            self.graph.by_value.add(made)
        if bound is not None:
            self.graph.bound[made] = bound
        return made


def _misfit(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Tells whether a shape does not broadcast to another."""
    try:
        return np.broadcast_shapes(shape, target) != target
    except ValueError:
        return True
