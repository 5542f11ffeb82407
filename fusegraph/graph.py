"""The builder: an operation graph of typed tensors and nodes, with networkx behind it.

    graph = Graph("sigmoid_fma")
    a, b, c = (graph.tensor(name, (1024, 1024)) for name in "abc")
    graph.output(graph.sigmoid(a + b * c), name="y")

There is one method for each op of the table (`Graph.sigmoid`, `Graph.conv_fprop`, ...): operands first, then the op's
attributes, then ``name`` for the result.  Shapes and dtypes are inferred and checked as each method is called.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from codegen.sizes import Size, least, most
from fusegraph import networks as nx
from fusegraph import origins
from fusegraph.calls import Call
from fusegraph.dtypes import BY_NUMPY, DType, as_dtype, float32, float64, int32, int64, scalar_dtype
from fusegraph.errors import AttributeValueError, DTypeError, GraphError, LayoutError, ShapeError, shown
from fusegraph.layout import check_shape, given_strides, overlaps, packed_strides, stride_order
from fusegraph.methods import METHODS
from fusegraph.operations import Operations
from fusegraph.ops import TABLE
from fusegraph.ops.attributes import checked
from fusegraph.ops.base import REQUIRED, Kind, Op, check_stored_only
from fusegraph.ops.contraction import COMPUTE_DTYPES
from fusegraph.ops.convert import check_fits, convert, from_reference, to_reference
from fusegraph.ops.size import SIZE
from fusegraph.origins import Origin
from fusegraph.state import assigned, origin, region
from fusegraph.tensor import Node, Tensor, check_name

__all__ = ["Graph", "Node", "Tensor"]


class Graph(Operations):
    """An operation graph.

    name           names the output folder and the kernels.
    io_dtype       dtype of `tensor` when none is given.
    compute_dtype  float32, or float64: the type in which floats of 32 bits or fewer are computed and accumulated.
                   "tf32" is float32, but lets matrix products and convolutions round float32 operands to the 11
                   significant bits of tf32, for tensor cores; "fast_float_for_fp8" is float32, but leaves sums of fp8
                   products to the tensor cores.  A node's own compute_dtype comes before the graph's.
    """

    def __init__(self, name: str = "graph", io_dtype: Any = float32, compute_dtype: Any = float32) -> None:
        self.name = check_name("graph", name)
        self.io_dtype = as_dtype(io_dtype)
        fast = isinstance(compute_dtype, str) and compute_dtype in COMPUTE_DTYPES
        self._products: str | None = compute_dtype if fast else None
        self.compute_dtype = float32 if fast else as_dtype(compute_dtype)
        if self.compute_dtype not in (float32, float64):
            known = ", ".join(("float32", "float64", *COMPUTE_DTYPES))
            raise DTypeError(f"graph {name!r}: compute_dtype is one of {known}; got {self.compute_dtype}")
        self.tensors: dict[str, Tensor] = {}
        self._automatic: set[Tensor] = set()  # named by us: such a name yields to one that the user gives
        self.inputs: list[Tensor] = []
        #: Inputs that seldom change between calls: what depends on them alone is computed when they do.
        self.parameters: set[Tensor] = set()
        #: Inputs whose memory is the graph's own once they have been read.
        self.donated: set[Tensor] = set()
        #: Further inputs of a graph that passes made, in our memory -> the names of the parameters they are made of.
        self.packed: dict[Tensor, tuple[str, ...]] = {}
        #: What is computed: results of calls, and the new values of inputs, which lie in the inputs' memory.
        self.outputs: list[Tensor] = []
        #: New value of an input, one of the outputs -> the input
        self.updates: dict[Tensor, Tensor] = {}
        self._returned: set[Tensor] = set()  # new values that are results of calls as well
        self._nodes: dict[Node, None] = {}
        self._network: nx.MultiDiGraph | None = None  # made when it is asked for
        self._producer: dict[Tensor, Node] = {}
        self.readers: dict[Tensor, list[Node]] = {}  # the nodes that take a tensor, for passes: they look up thousands
        #: What `gradients` were taken of: what these follow from is the forward pass.
        self.losses: list[Tensor] = []
        #: result of a function that writes several nodes -> the call (`fusegraph.calls`)
        self.calls: dict[Tensor, Call] = {}
        self._written: list[Node] | None = None  # by the call that is under way
        #: Where nodes come from, as far as somebody asked while they were added (`fusegraph.origins`).
        self.origins: dict[Node, Origin] = {}
        self._numbered: dict[str, tuple[list[Tensor], int, dict[Tensor, int]]] = {}

    # ---- tensors

    def tensor(
        self,
        name: str,
        shape: Iterable[int],
        dtype: Any = None,
        layout: str | None = None,
        strides: Iterable[int] | None = None,
        parameter: bool = False,
        donated: bool = False,
    ) -> Tensor:
        """Adds an input to the graph, and returns it.

        A ``parameter`` seldom changes, as a model's weights: what depends on parameters alone is computed in the first
        call with an array and kept.  `Executable.repack` says that arrays without version counters have changed.
        An array that is ``donated`` is not needed any more: calls may write intermediates over it, to need less memory.
        shape is logical (N, C, H, W for images).  layout is a name ("NCHW", "NHWC", "contiguous", "channels_last",
        ...); strides, counted in elements, may be given instead; 0 repeats an element along a dimension.
        Raises GraphError (name taken or not allowed), ShapeError, DTypeError, LayoutError.
        """
        check_name("tensor", name)
        sizes = check_shape(shape)
        try:
            steps = given_strides(sizes, layout, strides) or packed_strides(sizes)
        except LayoutError as error:
            raise LayoutError(f"tensor {name!r}: {error}") from None
        result = self._add_tensor(name, sizes, steps, as_dtype(dtype) if dtype is not None else self.io_dtype)
        self.inputs.append(result)
        if parameter and donated:
            raise GraphError(f"tensor {name!r} is a parameter, which calls do not change: it cannot be donated")
        if parameter:
            self.parameters.add(result)
        if donated:
            self.donated.add(result)
        return result

    def constant(self, array: Any, name: str | None = None, dtype: Any = None) -> Tensor:
        """Returns a tensor whose value is known now: a number or an array, copied.  Folded into kernels where possible.

        Python numbers, and lists of them, take the graph's io_dtype (integers in a graph of bool int32, floats in one
        of integers float32); NumPy arrays keep theirs; ``dtype`` converts either.  The tensor has the array's shape, in
        C order.  A Size is computed where it is used, as Python's integers are.  Raises ShapeError (ragged lists),
        DTypeError, GraphError (name taken or not allowed).
        """
        if isinstance(array, Size):
            return self._size(array, name, dtype)
        label = "a constant" if name is None else f"constant {check_name('tensor', name)!r}"
        try:
            value = np.asarray(array)
        except ValueError as error:
            raise ShapeError(f"{label}: {error}") from None
        except Exception:  # NumPy asks an object for its array
            raise DTypeError(f"{label}: {shown(array)} is no array") from None
        if value.dtype not in BY_NUMPY:
            raise DTypeError(f"{label}: NumPy dtype {value.dtype} is not one of fusegraph's")
        source = BY_NUMPY[value.dtype]
        if dtype is not None:
            kind = as_dtype(dtype)
        elif isinstance(array, (np.ndarray, np.generic)) or source.is_bool:
            kind = source
        elif source.is_int:
            kind = self.io_dtype if not self.io_dtype.is_bool else int32
        else:
            kind = self.io_dtype if self.io_dtype.is_float else float32
        if kind != source:
            value = from_reference(convert(to_reference(value, source), source, kind), kind)
        stored = np.array(value, order="C")
        stored.setflags(write=False)
        tensor = self._add_tensor(
            name or self._unique("constant"), stored.shape, packed_strides(stored.shape), kind, value=stored
        )
        if name is None:
            self._automatic.add(tensor)
        return tensor

    def _size(self, size: Size, name: str | None, dtype: Any) -> Tensor:
        """Returns a size that varies as a tensor of rank 0."""
        kind = as_dtype(dtype) if dtype is not None else self.io_dtype if not self.io_dtype.is_bool else int32
        whole = int32 if int32.min <= least(size) and most(size) <= int32.max else int64
        number = self.apply(SIZE, (self.constant(0, dtype=whole),), {"number": size})
        return self.apply(TABLE["identity"], (number,), {"dtype": kind}, name)

    def output(
        self,
        tensor: Tensor,
        name: str | None = None,
        dtype: Any = None,
        layout: str | None = None,
        strides: Iterable[int] | None = None,
    ) -> Tensor:
        """Marks a tensor as a result of the graph, in order of the calls; returns the tensor that was marked.

        name renames it; dtype adds a cast; layout or strides say how it lies in memory (default: like the inputs it was
        made from).  The new value of an input (`assign`) is returned as it lies, in the input's memory.  Raises
        GraphError for a tensor of another graph or one that is already an output.
        """
        self._own(tensor, "output")
        if tensor in self.updates and (dtype, layout, strides) == (None, None, None):
            return self._return_update(tensor, name)
        if dtype is not None and as_dtype(dtype) != tensor.dtype:
            tensor = self.apply(TABLE["identity"], (tensor,), {"dtype": as_dtype(dtype)})
        elif tensor not in self._producer or self._producer[tensor].kind is Kind.ASSIGN:
            tensor = self.apply(TABLE["identity"], (tensor,), {})
        if tensor in self.outputs:
            raise GraphError(f"tensor {tensor.name!r} is an output already; use identity to return it twice")
        try:
            tensor.strides = given_strides(tensor.shape, layout, strides) or tensor.strides
            if overlaps(tensor.shape, tensor.strides):
                raise LayoutError(f"strides {tensor.strides} of shape {tensor.shape} make elements share an address")
        except LayoutError as error:
            raise LayoutError(f"output {tensor.name!r}: {error}") from None
        if name is not None:
            self.rename(tensor, name)
        self.outputs.append(tensor)
        return tensor

    def assign(self, target: Tensor, value: Any, name: str | None = None) -> Tensor:
        """Gives an input of the graph, or elements of it, new values when the graph runs; returns its new value.

        target is the input, its newest value, or what they are indexed to: slices, integers, and along one axis a
        tensor of positions (rank 0 or 1), of which those outside of the axis are left out.  value is a tensor of its
        dtype, or a number or array, broadcast to its shape.  The input itself stays the name of what was there when the
        graph was called: all that reads it comes first.  Raises GraphError (no input, a value that was overwritten or
        returned), DTypeError (another dtype, packed elements, numbers that the dtype has no place for), LayoutError
        (elements share memory), ShapeError.
        """
        label = "assign" if name is None else f"assign {check_name('tensor', name)!r}"
        self._own(target, f"{label}, target")
        found = region(target)
        x = origin(found.of)
        newest = {old: new for new, old in self.updates.items()}
        if x not in self.inputs:
            raise GraphError(f"{label}: {x.name!r} is no input of the graph; only inputs have memory of their own")
        if found.of not in (x, newest.get(x)):
            raise GraphError(f"{label}: {found.of.name!r} has been overwritten; assign to {x.name!r}")
        if x.dtype.is_packed:
            raise DTypeError(f"{label}: elements of {x.name!r} share bytes, being {x.dtype}; assign to a wider dtype")
        if overlaps(x.shape, x.strides):
            raise LayoutError(f"{label}: strides {x.strides} of {x.name!r} {x.shape} make elements share an address")
        found.of = before = newest.get(x, x)
        if before in self._returned:
            raise GraphError(f"{label}: {before.name!r} is returned in the memory of {x.name!r}; return the last value")
        values = value
        if not isinstance(value, Tensor):
            if not isinstance(value, Size):
                check_fits(f"{label}, value for {x.name!r}", value, x.dtype)
            values = self.constant(value, dtype=x.dtype)
        self._own(values, f"{label}, value")
        if values.dtype != x.dtype:
            raise DTypeError(f"{label}: {x.name!r} is {x.dtype}, the value {values.dtype}; cast it")
        if values.shape != target.shape:
            values = self.apply(TABLE["broadcast"], (values,), {"shape": target.shape})
        made = assigned(found, values, name)
        if before in self.updates:
            self.outputs.remove(before)
            del self.updates[before]
        self.outputs.append(made)
        self.updates[made] = x
        return made

    @property
    def results(self) -> list[Tensor]:
        """What a call returns: the outputs, but not the new values of inputs that `output` was not called for."""
        return [t for t in self.outputs if t not in self.updates or t in self._returned]

    @property
    def made(self) -> list[Tensor]:
        """The outputs that have memory of their own: all but the new values of inputs."""
        return [t for t in self.outputs if t not in self.updates]

    def _return_update(self, tensor: Tensor, name: str | None) -> Tensor:
        if tensor in self._returned:
            raise GraphError(f"tensor {tensor.name!r} is an output already; use identity to return it twice")
        if name is not None:
            self.rename(tensor, name)
        self._returned.add(tensor)
        self.outputs.remove(tensor)
        self.outputs.append(tensor)
        return tensor

    def rename(self, tensor: Tensor, name: str) -> Tensor:
        """Gives a tensor another name and returns it.  Raises GraphError (name taken or not allowed)."""
        self._own(tensor, "rename")
        if check_name("tensor", name) != tensor.name:
            self._rename(tensor, name)
        return tensor

    # ---- nodes

    def apply(self, op: Op, operands: Sequence[Any], attributes: Mapping[str, Any], name: str | None = None) -> Tensor:
        """Applies an op of the table and returns its (first) result.  The operators call this."""
        return self.apply_node(op, operands, attributes, name).output

    def apply_node(
        self, op: Op, operands: Sequence[Any], attributes: Mapping[str, Any], name: str | None = None
    ) -> Node:
        """Applies an op of the table and returns its node.  The methods call this.

        Operands are tensors of this graph, Python numbers (which take the dtype of the first tensor, if they can), or
        arrays, which become constants.  Raises GraphError (wrong number or kind of operands; unknown or missing
        attributes) and what the op's shape rule raises, with the operands' shapes and dtypes appended.
        """
        if name is not None:
            check_name("tensor", name)
        label = f"{op.name} {name!r}" if name else op.name
        names = op.operands * len(operands) if op.variadic else op.operands
        if not max(len(names) - op.optional, 1) <= len(operands) <= len(names):
            least = f"{len(names) - op.optional} to " if op.optional else ""
            wanted = "one or more" if op.variadic else f"{least}{len(names)}"
            raise GraphError(f"{label} takes {wanted} tensors ({', '.join(op.operands)}), got {len(operands)}")
        unknown = set(attributes) - set(op.attributes)
        if unknown:
            known = ", ".join(op.attributes) or "none"
            raise GraphError(f"{label} has no attribute {min(map(shown, unknown))}; it has: {known}")
        values = {**op.attributes, **attributes}
        missing = [key for key, value in values.items() if value is REQUIRED]
        if missing:
            raise GraphError(f"{label} needs the attribute {missing[0]!r}")
        tensors = tuple(self._operands(label, op, operands))
        types = tuple(t.type for t in tensors)
        try:
            values |= checked(attributes)
            for key, words in op.words.items():
                if values[key] not in words:
                    *others, last = map(repr, words)
                    raise AttributeValueError(f"{key} is {', '.join(others)} or {last}, got {values[key]!r}")
            if self._products and values.get("compute_dtype", self) is None:
                values["compute_dtype"] = self._products
            if op.normalize is not None:
                values = op.normalize(types, values)
            inferred = op.infer(types, values)
            results = inferred if isinstance(inferred, tuple) else (inferred,)
            check_stored_only(op, [t.dtype for t in (*types, *results)])
            shapes = [check_shape(result.shape) for result in results]
        except GraphError as error:
            keys = op.names(len(tensors))
            seen = ", ".join(f"{k} = {t.name!r} {t.dtype} {list(t.shape)}" for k, t in zip(keys, tensors))
            raise type(error)(f"{label}: {error} ({seen})") from None
        outputs: list[Tensor] = []
        for part, shape, result in zip(op.results, shapes, results):
            stem = f"{outputs[0].name[:180]} {part}" if outputs else op.name
            given = name if not outputs else None
            strides = _result_strides(op, shape, tensors)
            outputs.append(self._add_tensor(given or self._unique(stem), shape, strides, result.dtype))
            if given is None:
                self._automatic.add(outputs[-1])
        return self.add_node(Node(op, tensors, values, *outputs))

    def add_node(self, node: Node) -> Node:
        """Adds a node whose tensors are in this graph already.  For passes; users call the op methods."""
        self._nodes[node], self._network = None, None
        if self._written is not None:
            self._written.append(node)
        if (origin := origins.present()) is not None:
            self.origins[node] = origin
        for tensor in dict.fromkeys(node.inputs):
            self.readers.setdefault(tensor, []).append(node)
        self._producer.update(dict.fromkeys(node.outputs, node))
        return node

    def remove_node(self, node: Node) -> None:
        """Removes a node whose results nothing takes any more, and its results.  For passes."""
        del self._nodes[node]
        self._network = None
        for tensor in dict.fromkeys(node.inputs):
            self.readers[tensor].remove(node)
        for tensor in node.outputs:
            del self.tensors[tensor.name], self._producer[tensor]

    @property
    def nodes(self) -> list[Node]:
        """All nodes in topological order (the order in which they were added)."""
        return list(self._nodes)

    @property
    def node_count(self) -> int:
        return len(self._nodes)

    @property
    def network(self) -> nx.MultiDiGraph:
        """Node -> Node for every tensor that one makes and another takes (edge attribute ``tensor``)."""
        if self._network is None:
            self._network = nx.MultiDiGraph()
            self._network.add_nodes_from(self._nodes)
            for node in self._nodes:
                for tensor in node.inputs:
                    if tensor in self._producer:
                        self._network.add_edge(self._producer[tensor], node, tensor=tensor)
        return self._network

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_network": None, "_numbered": {}}

    @property
    def input_numbers(self) -> Mapping[Tensor, int]:
        """Input -> its position in `inputs`.  For passes, which look up thousands."""
        return self._numbers("inputs", self.inputs)

    @property
    def output_numbers(self) -> Mapping[Tensor, int]:
        """Output -> its position in `outputs`."""
        return self._numbers("outputs", self.outputs)

    def _numbers(self, which: str, tensors: list[Tensor]) -> Mapping[Tensor, int]:
        known = self._numbered.get(which)
        if known is None or known[0] is not tensors or known[1] != len(tensors):
            known = self._numbered[which] = tensors, len(tensors), {t: k for k, t in enumerate(tensors)}
        return known[2]

    def producer(self, tensor: Tensor) -> Node | None:
        """Returns the node that makes a tensor, None for inputs and constants."""
        return self._producer.get(tensor)

    def consumers(self, tensor: Tensor) -> list[Node]:
        """Returns the nodes that take a tensor, each once, in the order they were added."""
        return list(self.readers.get(tensor, ()))

    def __repr__(self) -> str:
        return f"<Graph {self.name!r}: {len(self.inputs)} inputs, {self.node_count} nodes, {len(self.outputs)} outputs>"

    # ---- helpers

    def _operands(self, label: str, op: Op, operands: Sequence[Any]) -> Iterable[Tensor]:
        tensors = [x for x in operands if isinstance(x, Tensor)]
        names = op.names(len(operands))
        for index, operand in enumerate(operands):
            if isinstance(operand, Tensor):
                self._own(operand, f"{label}, operand {names[index]!r}")
                yield operand
            elif isinstance(operand, int) and names[index] in op.integers:
                if not int64.min <= operand <= int64.max:
                    raise DTypeError(f"{label}, operand {names[index]!r}: {shown(operand)} does not fit in int64")
                yield self.constant(operand, dtype=int64)
            elif isinstance(operand, (bool, int, float)) and tensors:
                dtype = scalar_dtype(operand, tensors[0].dtype)
                if not dtype.min <= operand <= dtype.max and (isinstance(operand, int) or math.isfinite(operand)):
                    raise DTypeError(
                        f"{label}, operand {names[index]!r}: {shown(operand)} does not fit in {dtype}, "
                        f"whose values go from {dtype.min} to {dtype.max}"
                    )
                exact = isinstance(operand, Size) or not dtype.is_float
                yield self.constant(operand if exact else float(operand), dtype=dtype)
            elif isinstance(operand, (bool, int, float, np.ndarray, np.generic)):
                yield self.constant(operand)
            else:
                raise GraphError(
                    f"{label}: operand {names[index]!r} is a {type(operand).__name__}; "
                    "give a Tensor of this graph, a number or a NumPy array"
                )

    def _own(self, tensor: object, label: str) -> None:
        if not isinstance(tensor, Tensor):
            raise GraphError(f"{label}: expected a Tensor, got {type(tensor).__name__}")
        if tensor.graph is not self:
            raise GraphError(
                f"{label}: tensor {tensor.name!r} belongs to graph {tensor.graph.name!r}, "
                f"not to this graph {self.name!r}"
            )

    def _add_tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: DType,
        value: np.ndarray[Any, Any] | None = None,
    ) -> Tensor:
        self._free_name(name)
        tensor = Tensor(self, name, shape, strides, dtype, value)
        self.tensors[name] = tensor
        return tensor

    def _rename(self, tensor: Tensor, name: str) -> None:
        self._free_name(name)
        del self.tensors[tensor.name]
        tensor.name = name
        self.tensors[name] = tensor
        self._automatic.discard(tensor)

    def _free_name(self, name: str) -> None:
        """Makes sure that a name can be given: raises GraphError if it is not allowed or the user gave it already."""
        check_name("tensor", name)
        holder = self.tensors.get(name)
        if holder is None:
            return
        if holder not in self._automatic:
            raise GraphError(f"graph {self.name!r} has a tensor {name!r} already {list(holder.shape)}")
        holder.name = self._unique(name)
        self.tensors[holder.name] = self.tensors.pop(name)

    def _unique(self, stem: str) -> str:
        if stem not in self.tensors:
            return stem
        count = len(self.tensors)
        while f"{stem}_{count}" in self.tensors:
            count += 1
        return f"{stem}_{count}"


def _result_strides(op: Op, shape: tuple[int, ...], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns packed strides in the memory order of the operand that decides the layout.

    Pointwise: the largest operand of the result's rank (the first of equals).  Contractions: their first operand if
    it has the rank of an image, as convolutions keep NHWC in NHWC; matrix products are row-major.
    """
    if op.kind is Kind.POINTWISE:
        same = [t for t in tensors if len(t.shape) == len(shape) and not t.is_constant]
        leader = max(same, key=lambda t: t.size, default=None)
    else:
        leader = tensors[0] if op.keeps_layout and tensors[0].rank == len(shape) else None
    if leader is None or overlaps(leader.shape, leader.strides):
        return packed_strides(shape)
    return packed_strides(shape, stride_order(leader.shape, leader.strides))


for _name, _function in METHODS.items():
    setattr(Operations, _name, _function)
