"""The builder: an operation graph of typed tensors and nodes, with networkx behind it.

    graph = Graph("sigmoid_fma")
    a, b, c = (graph.tensor(name, (1024, 1024)) for name in "abc")
    graph.output(graph.sigmoid(a + b * c), name="y")

There is one method an op of the table (`Graph.sigmoid`, `Graph.conv_fprop`, ...): operands first, then the op's
attributes, then ``name`` for the result.  Shapes and dtypes are inferred and checked as each method is called.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np

from fusegraph import composed, indexing, resampling
from fusegraph.dtypes import BY_NUMPY, DType, as_dtype, bool_, float32, float64, int32, int64
from fusegraph.errors import DTypeError, GraphError, LayoutError
from fusegraph.layout import check_shape, check_strides, layout_strides, overlaps, packed_strides, stride_order
from fusegraph.ops import TABLE
from fusegraph.ops.base import REQUIRED, Kind, Op, TensorType
from fusegraph.ops.contraction import COMPUTE_DTYPES
from fusegraph.ops.convert import convert, from_reference, to_reference

if TYPE_CHECKING:
    from fusegraph.engines.base import Executable

_NAME = re.compile(r"[\w .:/\[\](),+@#-]{1,200}")


def check_name(what: str, name: object) -> str:
    """A name as given.  Raises GraphError unless it is a short text of letters, digits and ``_ . : / [ ] ( ) , + @ #
    -``.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise GraphError(
            f"{what} name {name!r} is not allowed: "
            "use 1 to 200 letters, digits, spaces or any of _ . : / [ ] ( ) , + @ # -"
        )
    return name


class Tensor:
    """An edge of the graph: name, logical shape, strides in elements, dtype; virtual unless an input or output.

    Tensors are made by a Graph, compare by identity, and support ``+ - * / @ ** abs``, unary minus, ``> >= < <=``
    and, for booleans, ``& | ~``.  Other operands may be Python numbers or NumPy arrays.  Use ``graph.cmp_eq`` for
    equality.
    """

    __array_ufunc__ = None  # NumPy arrays on the left of an operator defer to ours

    def __init__(
        self,
        graph: Graph,
        name: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: DType,
        value: np.ndarray[Any, Any] | None = None,
    ) -> None:
        self.graph = graph
        self.name = name
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.value = value
        #: Whose memory it lies in, and how many elements after that one's first: its own, unless `passes.views` says
        #: otherwise, which leaves here the strides that it would have in its own.
        self.base: Tensor = self
        self.start = 0
        self.own_strides: tuple[int, ...] | None = None

    @property
    def type(self) -> TensorType:
        return TensorType(self.shape, self.dtype)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, without gaps."""
        return self.size * self.dtype.itemsize

    @property
    def is_constant(self) -> bool:
        return self.value is not None

    def __repr__(self) -> str:
        return f"<Tensor {self.name!r} {self.dtype} {list(self.shape)} strides {list(self.strides)}>"

    def __bool__(self) -> bool:
        raise GraphError(f"tensor {self.name!r} has no truth value while the graph is being built; use binary_select")

    def _op(self, name: str, *operands: Any) -> Tensor:
        return self.graph.apply(TABLE[name], operands, {})

    def __add__(self, other: Any) -> Tensor:
        return self._op("add", self, other)

    def __radd__(self, other: Any) -> Tensor:
        return self._op("add", other, self)

    def __sub__(self, other: Any) -> Tensor:
        return self._op("sub", self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return self._op("sub", other, self)

    def __mul__(self, other: Any) -> Tensor:
        return self._op("mul", self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return self._op("mul", other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return self._op("div", self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return self._op("div", other, self)

    def __pow__(self, other: Any) -> Tensor:
        return self._op("pow", self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return self._op("pow", other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return self._op("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return self._op("matmul", other, self)

    def __neg__(self) -> Tensor:
        return self._op("neg", self)

    def __abs__(self) -> Tensor:
        return self._op("abs", self)

    def __gt__(self, other: Any) -> Tensor:
        return self._op("cmp_gt", self, other)

    def __ge__(self, other: Any) -> Tensor:
        return self._op("cmp_ge", self, other)

    def __lt__(self, other: Any) -> Tensor:
        return self._op("cmp_lt", self, other)

    def __le__(self, other: Any) -> Tensor:
        return self._op("cmp_le", self, other)

    def __and__(self, other: Any) -> Tensor:
        return self._op("logical_and", self, other)

    def __rand__(self, other: Any) -> Tensor:
        return self._op("logical_and", other, self)

    def __or__(self, other: Any) -> Tensor:
        return self._op("logical_or", self, other)

    def __ror__(self, other: Any) -> Tensor:
        return self._op("logical_or", other, self)

    def __invert__(self) -> Tensor:
        return self._op("logical_not", self)

    __iter__ = None  # indexing would make one, of a slice an element

    def __getitem__(self, key: Any) -> Tensor:
        """Basic indexing as in NumPy: slices (negative steps too), integers, ``...`` and None; not with arrays (see
        `Graph.gather`).  Raises AttributeValueError.
        """
        return indexing.index(self, key)

    def reshape(self, *shape: Any) -> Tensor:
        """`Graph.reshape`, of a shape or of so many sizes."""
        given = shape[0] if len(shape) == 1 and hasattr(shape[0], "__iter__") else shape
        return self.graph.apply(TABLE["reshape"], (self,), {"shape": given})

    def transpose(self, *perm: Any) -> Tensor:
        """`Graph.transpose`, of a permutation or of so many dimensions; without any the dimensions are reversed."""
        given = perm[0] if len(perm) == 1 and hasattr(perm[0], "__iter__") else perm or None
        return self.graph.apply(TABLE["transpose"], (self,), {"perm": given})

    @property
    def T(self) -> Tensor:
        """The dimensions in reverse."""
        return self.transpose()


class Node:
    """An op of the table applied to tensors.  Named after its result, the first where there are several."""

    __slots__ = ("attributes", "inputs", "op", "outputs")

    def __init__(self, op: Op, inputs: tuple[Tensor, ...], attributes: Mapping[str, Any], *outputs: Tensor) -> None:
        self.op = op
        self.inputs = inputs
        self.attributes = MappingProxyType(dict(attributes))
        self.outputs = outputs

    @property
    def output(self) -> Tensor:
        """The first result: for all but some composites the only one."""
        return self.outputs[0]

    @property
    def name(self) -> str:
        return self.output.name

    @property
    def kind(self) -> Kind:
        return self.op.kind

    def __repr__(self) -> str:
        return f"<Node {self.name!r} = {self.op.name}({', '.join(t.name for t in self.inputs)})>"


class Graph:
    """An operation graph.

    name           names the output folder and the kernels.
    io_dtype       dtype of `tensor` when none is given.
    compute_dtype  float32, or float64: the type in which floats of 32 bits or fewer are computed and accumulated.
                   "tf32" is float32, but lets matrix products and convolutions round float32 factors to the 11
                   significant bits of tf32, for tensor cores; "fast_float_for_fp8" is float32, but leaves sums of fp8
                   products to the tensor cores.  A node's own compute_dtype says otherwise for it.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

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
        self.outputs: list[Tensor] = []
        #: Node -> Node for every tensor that one makes and another takes (edge attribute ``tensor``).
        self.network: nx.MultiDiGraph = nx.MultiDiGraph()
        self._producer: dict[Tensor, Node] = {}

    # ---- tensors

    def tensor(
        self,
        name: str,
        shape: Iterable[int],
        dtype: Any = None,
        layout: str | None = None,
        strides: Iterable[int] | None = None,
    ) -> Tensor:
        """An input of the graph.

        shape is logical (N, C, H, W for images).  layout is a name ("NCHW", "NHWC", "contiguous", "channels_last",
        ...); strides, counted in elements, may be given instead; 0 repeats an element along a dimension.
        Raises GraphError (name taken or not allowed), ShapeError, DTypeError, LayoutError.
        """
        check_name("tensor", name)
        sizes = check_shape(shape)
        if layout is not None and strides is not None:
            raise LayoutError(f"tensor {name!r}: give a layout or strides, not both")
        try:
            if strides is not None:
                steps = check_strides(sizes, strides)
            else:
                steps = layout_strides(sizes, layout if layout is not None else "contiguous")
        except LayoutError as error:
            raise LayoutError(f"tensor {name!r}: {error}") from None
        result = self._add_tensor(name, sizes, steps, as_dtype(dtype) if dtype is not None else self.io_dtype)
        self.inputs.append(result)
        return result

    def constant(self, array: Any, name: str | None = None, dtype: Any = None) -> Tensor:
        """A tensor whose value is known now: a number or an array.  Copied; folded into the kernels where it can be.

        Python numbers, and lists of them, take the graph's io_dtype; NumPy arrays keep theirs.
        """
        value = np.asarray(array)
        if value.dtype not in BY_NUMPY:
            raise DTypeError(f"constant {name or ''!r}: NumPy dtype {value.dtype} is not one of fusegraph's")
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
        made from).  Raises GraphError for a tensor of another graph or one that is already an output.
        """
        self._own(tensor, "output")
        if dtype is not None and as_dtype(dtype) != tensor.dtype:
            tensor = self.apply(TABLE["identity"], (tensor,), {"dtype": as_dtype(dtype)})
        elif tensor not in self._producer:
            tensor = self.apply(TABLE["identity"], (tensor,), {})
        if tensor in self.outputs:
            raise GraphError(f"tensor {tensor.name!r} is an output already; use identity to return it twice")
        if layout is not None and strides is not None:
            raise LayoutError(f"output {tensor.name!r}: give a layout or strides, not both")
        try:
            if strides is not None:
                tensor.strides = check_strides(tensor.shape, strides)
            elif layout is not None:
                tensor.strides = layout_strides(tensor.shape, layout)
            if overlaps(tensor.shape, tensor.strides):
                raise LayoutError(f"strides {tensor.strides} of shape {tensor.shape} make elements share an address")
        except LayoutError as error:
            raise LayoutError(f"output {tensor.name!r}: {error}") from None
        if name is not None:
            self.rename(tensor, name)
        self.outputs.append(tensor)
        return tensor

    def rename(self, tensor: Tensor, name: str) -> Tensor:
        """Gives a tensor another name and returns it.  Raises GraphError (name taken or not allowed)."""
        self._own(tensor, "rename")
        if name != tensor.name:
            self._rename(tensor, name)
        return tensor

    # ---- nodes

    def apply(self, op: Op, operands: Sequence[Any], attributes: Mapping[str, Any], name: str | None = None) -> Tensor:
        """Applies an op of the table and returns its (first) result.  The operators call this."""
        return self.apply_node(op, operands, attributes, name).output

    def apply_node(
        self, op: Op, operands: Sequence[Any], attributes: Mapping[str, Any], name: str | None = None
    ) -> Node:
        """Applies an op of the table and returns its node.  The methods call this."""
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
            raise GraphError(f"{label} has no attribute {sorted(unknown)[0]!r}; it has: {known}")
        values = {**op.attributes, **attributes}
        missing = [key for key, value in values.items() if value is REQUIRED]
        if missing:
            raise GraphError(f"{label} needs the attribute {missing[0]!r}")
        if self._products and op.kind is Kind.CONTRACTION and values["compute_dtype"] is None:
            values["compute_dtype"] = self._products
        tensors = tuple(self._operands(label, op, operands))
        types = tuple(t.type for t in tensors)
        try:
            if op.normalize is not None:
                values = op.normalize(types, values)
            inferred = op.infer(types, values)
            results = inferred if isinstance(inferred, tuple) else (inferred,)
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
        """Adds a node whose tensors are this graph's already.  For passes; users call the op methods."""
        self.network.add_node(node)
        for tensor in node.inputs:
            if tensor in self._producer:
                self.network.add_edge(self._producer[tensor], node, tensor=tensor)
        self._producer |= dict.fromkeys(node.outputs, node)
        return node

    @property
    def nodes(self) -> list[Node]:
        """All nodes in topological order (the order in which they were added)."""
        return list(self.network.nodes)

    def producer(self, tensor: Tensor) -> Node | None:
        """The node that makes a tensor, None for inputs and constants."""
        return self._producer.get(tensor)

    def consumers(self, tensor: Tensor) -> list[Node]:
        """The nodes that take a tensor, each once, in the order they were added."""
        node = self._producer.get(tensor)
        if node is not None:
            return [n for n in self.network.successors(node) if tensor in n.inputs]
        return [n for n in self.network.nodes if tensor in n.inputs]

    def compile(self, engine: str | None = None, **options: Any) -> Executable:
        """Compiles the graph for an engine ("cuda", "cpu", "reference"; default: cuda if there is a GPU, else cpu).

        Options are those of `fusegraph.compile`.
        """
        from fusegraph.engines import compile as compile_graph

        return compile_graph(self, engine=engine, **options)

    def __repr__(self) -> str:
        return (
            f"<Graph {self.name!r}: {len(self.inputs)} inputs, {len(self.network)} nodes, {len(self.outputs)} outputs>"
        )

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
                    raise DTypeError(f"{label}, operand {names[index]!r}: {operand} does not fit in int64")
                yield self.constant(operand, dtype=int64)
            elif isinstance(operand, (bool, int, float)) and tensors:
                dtype = _scalar_dtype(operand, tensors[0].dtype)
                if not dtype.min <= operand <= dtype.max and math.isfinite(operand):
                    raise DTypeError(
                        f"{label}, operand {names[index]!r}: {operand} does not fit in {dtype}, "
                        f"whose values go from {dtype.min} to {dtype.max}"
                    )
                yield self.constant(float(operand) if dtype.is_float else operand, dtype=dtype)
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


def _scalar_dtype(value: bool | int | float, like: DType) -> DType:
    """The dtype of a Python number next to a tensor: the tensor's own unless that cannot hold the kind of number."""
    if isinstance(value, bool):
        return bool_
    if isinstance(value, int):
        if like.is_bool:
            return int32
        if like.is_int and not like.min <= value <= like.max:
            return int32 if -(2**31) <= value < 2**31 else int64
        return like
    return like if like.is_float else float32


def _result_strides(op: Op, shape: tuple[int, ...], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Packed strides in the memory order of the operand that decides the layout.

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


def _named(op: Op, operands: Sequence[Any]) -> Iterable[tuple[str, Any]]:
    return zip(op.names(len(operands)), operands)


def _method(op: Op) -> Callable[..., Any]:
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    one = inspect.Parameter.VAR_POSITIONAL if op.variadic else inspect.Parameter.POSITIONAL_OR_KEYWORD
    least = len(op.operands) - op.optional
    parameters += [
        inspect.Parameter(n, one, annotation=Tensor, default=None if k >= least else inspect.Parameter.empty)
        for k, n in enumerate(op.operands)
    ]
    how = inspect.Parameter.KEYWORD_ONLY if op.variadic else inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters += [
        inspect.Parameter(key, how, default=inspect.Parameter.empty if default is REQUIRED else default)
        for key, default in sorted(op.attributes.items(), key=lambda item: item[1] is not REQUIRED)
    ]
    parameters.append(inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, default=None))
    several = len(op.results) > 1
    signature = inspect.Signature(parameters, return_annotation=tuple[Tensor, ...] if several else Tensor)

    def method(self: Graph, *args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise GraphError(f"{op.name}{str(signature).replace('self, ', '')}: {error}") from None
        given = dict(bound.arguments)
        del given["self"]
        name = given.pop("name", None)
        operands = [given.pop(key, None) for key in op.operands]
        if op.variadic:
            operands = list(operands[0] or ())
            if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
                (operands,) = operands
        while op.optional and len(operands) > least and operands[-1] is None:
            operands.pop()
        operands = [
            op.neutral.get(n) if x is None and k >= least else x for k, (n, x) in enumerate(_named(op, operands))
        ]
        outputs = self.apply_node(op, operands, given, name).outputs
        return outputs[0] if len(outputs) == 1 else outputs

    method.__name__ = op.name
    method.__qualname__ = f"Graph.{op.name}"
    method.__doc__ = op.doc
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method


def _cast(self: Graph, x: Tensor, dtype: Any, *, name: str | None = None) -> Tensor:
    """The tensor in another dtype: rounds to nearest even, floats to integers truncate and saturate, NaN gives 0."""
    return self.apply(TABLE["identity"], (x,), {"dtype": as_dtype(dtype)}, name)


for _entry in TABLE.values():
    setattr(Graph, _entry.name, _method(_entry))
for _function in (
    indexing.split,
    indexing.flip,
    indexing.squeeze,
    indexing.unsqueeze,
    indexing.space_to_depth,
    indexing.depth_to_space,
    *composed.FUNCTIONS,
    resampling.resample,
    resampling.interpolate,
    resampling.grid_sample,
):
    setattr(Graph, _function.__name__, _function)
setattr(Graph, "cast", _cast)  # noqa: B010 - declared like the others, by __getattr__ for type checkers
