"""Group -> a graph of cudnn-frontend: the sibling of the kernel families, for the cudnn engine.

The same nodes are described to NVIDIA's cuDNN through the Python API of nvidia-cudnn-frontend.  Building a `pygraph`
and reading it needs neither a driver nor a GPU; whether cuDNN takes it is only known when plans are made
(`engines.cudnn`).

cuDNN wants all tensors of a graph to have one rank, at least 3: dimensions of size 1 are put in front, and before the
last one for 1-D convolutions, which cuDNN knows as 2-D ones of height 1.  Ops that cuDNN lacks are written as several
of its own where that gives the same numbers (`_COMPOSED`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from codegen.declined import Declined
from fusegraph.dtypes import DType, float32, int32, int64
from fusegraph.errors import ToolchainError
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import cudnn_attention as attention
from fusegraph.lowering import cudnn_attention_backward as attention_backward
from fusegraph.lowering import cudnn_attention_fp8 as attention_fp8
from fusegraph.lowering import cudnn_norms as norms
from fusegraph.lowering.base import GroupView, Lowered, Options
from fusegraph.lowering.program import broadcast_strides
from fusegraph.ops.base import Kind
from fusegraph.ops.evaluate import compute_dtype, widens
from fusegraph.ops.modes import MODES

#: dtype name -> name in cudnn.data_type.
DATA_TYPES = {
    "float64": "DOUBLE",
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BFLOAT16",
    "float8_e4m3": "FP8_E4M3",
    "float8_e5m2": "FP8_E5M2",
    "int8": "INT8",
    "uint8": "UINT8",
    "int32": "INT32",
    "int64": "INT64",
    "bool": "BOOLEAN",
}
#: Convolutions: cuDNN's keywords for the operands.
CONVOLUTIONS = {
    "conv_fprop": ("image", "weight"),
    "conv_dgrad": ("loss", "filter"),
    "conv_wgrad": ("image", "loss"),
}
#: op -> {our attribute: cuDNN's keyword} for the attributes cuDNN's method takes.
KEYWORDS: dict[str, dict[str, str]] = {
    "relu": {"negative_slope": "negative_slope", "lower_clip": "lower_clip", "upper_clip": "upper_clip"},
    "relu_backward": {"negative_slope": "negative_slope", "lower_clip": "lower_clip", "upper_clip": "upper_clip"},
    "leaky_relu": {"negative_slope": "negative_slope"},
    "leaky_relu_backward": {"negative_slope": "negative_slope"},
    "swish": {"beta": "swish_beta"},
    "swish_backward": {"beta": "swish_beta"},
}
#: Attention op -> the module that describes it to cuDNN.
_ATTENTION: dict[str, Any] = {
    "sdpa": attention,
    "sdpa_fp8": attention_fp8,
    "sdpa_backward": attention_backward,
}


class _Words:
    """cuDNN's methods, for writing one node as several of its own: ``words.mul(x, words.number(2.0))``."""

    def __init__(self, builder: _Builder, node: Node) -> None:
        self._builder, self._node, self._count = builder, node, 0
        self._dtype = builder.kept_dtype(node)

    def number(self, value: float) -> Any:
        """Returns a scalar of the type in which the node is computed and values between cuDNN's nodes are kept."""
        name, array = f"{self._node.name} {self._next()}", np.array([value], self._dtype.numpy)
        return self._builder.scalar(name, array, self._builder.type(self._dtype))

    def __getattr__(self, word: str) -> Callable[..., Any]:
        def apply(*operands: Any, **keywords: Any) -> Any:
            name, kind = f"{word} {self._node.name} {self._next()}", self._builder.type(self._dtype)
            result = getattr(self._builder.graph, word)(*operands, name=name, compute_data_type=kind, **keywords)
            return result.set_data_type(kind)

        return apply

    def _next(self) -> int:
        self._count += 1
        return self._count


def _hardsigmoid(words: _Words, x: Any) -> Any:
    return words.mul(words.relu(words.add(x, words.number(3.0)), upper_clip=6.0), words.number(1 / 6))


def _clamp(words: _Words, x: Any, min: float | None, max: float | None) -> Any:
    x = x if min is None else words.max(x, words.number(min))
    return x if max is None else words.min(x, words.number(max))


#: Ops written as several of cuDNN's, with as many roundings as the op's own formula has, give or take one.  The others
#: that cuDNN lacks (expm1, log1p, exp2, ...) would lose digits.
_COMPOSED: dict[str, Callable[..., Any]] = {
    "mish": lambda words, x: words.mul(x, words.tanh(words.softplus(x))),
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda words, x: words.mul(x, _hardsigmoid(words, x)),
    "clamp": _clamp,
    "narrow": lambda words, x, dtype: words.identity(x),
}


def frontend() -> Any:
    """Returns the module ``cudnn``.  Raises ToolchainError, saying what to install, if it cannot be imported."""
    try:
        import cudnn
    except Exception as error:
        raise ToolchainError(
            f"engine 'cudnn' needs NVIDIA's cudnn-frontend, which cannot be imported ({error}); "
            "install it with: pip install 'fusegraph[cudnn]'"
        ) from error
    return cudnn


@dataclass(frozen=True)
class CudnnSpec:
    """The nodes cuDNN gets as one graph; `build` makes the pygraph."""

    name: str
    graph: Graph
    nodes: tuple[Node, ...]
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]

    @property
    def multiplies_float32(self) -> bool:
        """Whether float32 is multiplied by a node that does not ask for tf32."""
        contractions = [n for n in self.nodes if n.kind is Kind.CONTRACTION and n.attributes["compute_dtype"] != "tf32"]
        return any(t.dtype == float32 for n in contractions for t in n.inputs)


@dataclass(frozen=True)
class Described:
    """A pygraph with the uids of the tensors that cross its border, and its scalars, which cuDNN reads on the host."""

    pygraph: Any
    uids: Mapping[Tensor, int]
    scalars: Mapping[int, np.ndarray[Any, Any]]


def accept(view: GroupView, options: Options) -> None:
    """Raises Declined, naming the node, for what cuDNN's graph API does not have."""
    if options.strict:
        raise Declined("cuDNN does not round every intermediate to its tensor's dtype (strict)")
    for node in view.nodes:
        composed = node.op.name in _COMPOSED
        if node.kind is Kind.POOLING:
            raise Declined(f"cuDNN's Python API has no pooling ({node.op.name} {node.name!r})")
        if node.kind is Kind.MOVEMENT and node.op.cudnn is not None:
            raise Declined(f"cuDNN 9 makes no plans for a {node.op.name} by itself ({node.name!r})")
        if node.op.name in norms.OPERANDS:
            norms.check(node)
        if node.op.name in _ATTENTION:
            _ATTENTION[node.op.name].check(node)
        if node.op.cudnn is None and not composed:
            raise Declined(f"cuDNN's graph API has no {node.op.name} ({node.name!r})")
        if composed and not node.output.dtype.is_float:
            raise Declined(
                f"cuDNN's graph API has {node.op.name} of floats only ({node.name!r} is {node.output.dtype})"
            )
        known = node.attributes if composed else KEYWORDS.get(node.op.name, {})
        for key, value in node.attributes.items():
            structural = node.kind is not Kind.POINTWISE or key in ("dtype", "axis")
            if key not in known and not structural and value != node.op.attributes.get(key):
                raise Declined(f"cuDNN's {node.op.cudnn} has no {key} ({node.name!r} has {key}={value!r})")
        if node.kind is Kind.REDUCTION and not MODES[node.attributes["mode"]].cudnn:
            raise Declined(f"cuDNN's reduction has no mode {node.attributes['mode']} ({node.name!r})")
        if node.kind is Kind.REDUCTION and not node.attributes["keepdims"]:
            raise Declined(f"cuDNN's reduction keeps the dimensions that are reduced ({node.name!r} drops them)")
        if node.op.name.startswith("conv_") and node.output in view.writes and node.output.dtype.name == "int32":
            raise Declined(
                "cuDNN 9 takes convolutions of int8 that store their int32 sums, but writes other numbers "
                f"({node.name!r}); cast the sums to float32"
            )
        _check_rank(node, view.nodes)
        for tensor in (*node.inputs, *node.outputs):
            if tensor.size == 0:
                raise Declined(f"cuDNN takes no empty tensors ({tensor.name!r} {list(tensor.shape)})")
            if tensor.dtype.name not in DATA_TYPES:
                raise Declined(f"cuDNN's graph API has no {tensor.dtype} ({tensor.name!r})")
    _leading_merge(view.nodes)


def lower(view: GroupView, options: Options, name: str) -> Lowered:
    """Returns the group as one cuDNN graph."""
    accept(view, options)
    spec = CudnnSpec(name, view.graph, view.nodes, view.reads, view.writes)
    return Lowered("cudnn", spec, view.reads, view.writes)


def _check_rank(node: Node, nodes: Sequence[Node]) -> None:
    """Raises Declined where a node for which the first dimensions are images and channels would get others in front."""
    places = node.op.name.startswith("conv_") or (node.op.name in norms.OPERANDS and "axes" not in node.attributes)
    if not (places or node.op.name.startswith("adalayernorm")):
        return
    x = node.inputs[node.op.operands.index("x") if "x" in node.op.operands else 0]
    other = max((t for n in nodes for t in (*n.inputs, *n.outputs)), key=lambda t: t.rank)
    if other.rank > x.rank:
        raise Declined(
            f"cuDNN's graphs have tensors of one rank, and {node.op.name} {node.name!r} is of {x.rank} dimensions, "
            f"{other.name!r} {list(other.shape)} has {other.rank}"
        )


def _leading_merge(nodes: Sequence[Node]) -> bool:
    """Returns true if the first two of three dimensions must be merged.

    cuDNN (seen with 9.19) computes wrong values for a pointwise graph in three dimensions in which a tensor repeats
    along the first and one more.  Merging the first two avoids it; where strides forbid that, the graph is refused.
    """
    tensors = {t for n in nodes for t in (*n.inputs, *n.outputs) if t.size > 1}
    if any(n.kind is not Kind.POINTWISE for n in nodes) or max((t.rank for t in tensors), default=0) != 3:
        return False
    try:
        shape = np.broadcast_shapes(*(t.shape for t in tensors))
    except ValueError:
        shapes = ", ".join(sorted({str(list(t.shape)) for t in tensors}))
        raise Declined(f"cuDNN gets pointwise nodes over one shape, these are over {shapes}") from None
    every = [(t, broadcast_strides(t, shape)) for t in tensors]
    repeated = [
        t
        for t, (first, *rest) in every
        if shape[0] > 1 and not first and any(k > 1 and not x for k, x in zip(shape[1:], rest))
    ]
    if not repeated:
        return False
    stuck = [t for t, s in every if s[0] != s[1] * shape[1]]
    if stuck:
        raise Declined(
            f"cuDNN computes wrong values where a tensor ({repeated[0].name!r} {list(repeated[0].shape)}) repeats "
            f"along the first of three dimensions and another, and {stuck[0].name!r} {list(stuck[0].shape)} does not "
            "let the first two be merged"
        )
    return True


def build(spec: CudnnSpec, handle: Any = None) -> Described:
    """Returns the pygraph of a spec.  Needs no driver."""
    return _Builder(spec, handle).build()


class _Builder:
    def __init__(self, spec: CudnnSpec, handle: Any) -> None:
        self.cudnn = frontend()
        self.spec = spec
        self.one_dimensional = any(n.op.name in CONVOLUTIONS and n.inputs[0].rank == 3 for n in spec.nodes)
        every = {t for n in spec.nodes for t in (*n.inputs, *n.outputs)}
        vectors = {t.shape[0] for t in every if t.rank == 1 and t.size > 1}
        alone = len(vectors) == 1 and all(t.rank <= 1 for t in every)
        alone = alone and all(n.kind is Kind.POINTWISE and n.op.name != "gen_index" for n in spec.nodes)
        #: columns into which the only length of a graph of vectors is folded, 0 for other graphs
        self.flat = gcd(*vectors, 8192) if alone else 0
        self.merged = _leading_merge(spec.nodes)
        self.rank = max(3, *(t.rank for t in every), 4 if self.one_dimensional else 0)
        #: dimensions of size 1 put behind the others: cuDNN's norms are of images
        self.behind = 0
        if any(n.op.name in norms.OPERANDS for n in spec.nodes):
            self.rank = max(4, self.rank)
            self.behind = self.rank - max(t.rank for t in every) - self.one_dimensional
        compute = self.type(spec.graph.compute_dtype)
        self.graph = self.cudnn.pygraph(
            name=spec.name,
            io_data_type=self.type(spec.graph.io_dtype),
            intermediate_data_type=compute,
            compute_data_type=compute,
            handle=handle,
        )
        self.tensors: dict[Tensor, Any] = {}
        self.uids: dict[Tensor, int] = {}
        self.scalars: dict[int, np.ndarray[Any, Any]] = {}

    def build(self) -> Described:
        for tensor in self.spec.reads:
            self.tensors[tensor] = self._input(tensor)
        for node in self.spec.nodes:
            made = self._apply(node)
            for tensor, result in zip(node.outputs, made if isinstance(made, (list, tuple)) else (made,)):
                self.tensors[tensor] = self._result(node, tensor, result)
        return Described(self.graph, self.uids, self.scalars)

    def type(self, dtype: DType) -> Any:
        return getattr(self.cudnn.data_type, DATA_TYPES[dtype.name])

    def _stored_type(self, dtype: DType) -> Any:
        """Returns the type of a tensor in memory: cuDNN's BOOLEAN packs 8 in a byte, ours are bytes."""
        return self.cudnn.data_type.UINT8 if dtype.is_bool else self.type(dtype)

    def _shaped(self, shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns a shape and strides with dimensions of size 1 added up to the graph's rank."""
        sizes, steps = list(shape), list(strides)
        if self.flat and sizes:
            # cuDNN spreads blocks over dimensions and cannot launch enough of them along a single long one.
            rows, step = sizes[0] // self.flat if sizes[0] > 1 else 1, steps[0]
            sizes, steps = [rows, min(self.flat, sizes[0])], [step * self.flat, step]
        if self.merged and len(sizes) == 3:
            sizes, steps = [sizes[0] * sizes[1], sizes[2]], steps[1:]
        if self.one_dimensional and sizes:
            sizes.insert(-1, 1)
            steps.insert(-1, steps[-1] * sizes[-1])
        outer = max((size * step for size, step in zip(sizes, steps)), default=1)
        missing = self.rank - self.behind - len(sizes)
        last = sizes[-1] * steps[-1] if sizes else 1
        sizes, steps = [1] * missing + sizes, [outer] * missing + steps
        return sizes + [1] * self.behind, steps + [last] * self.behind

    def scalar(self, name: str, value: np.ndarray[Any, Any], kind: Any) -> Any:
        """Returns a tensor of one element that cuDNN reads on the host, from an array of one element."""
        uid = self._next_uid()
        self.scalars[uid] = value
        ones = [1] * self.rank
        return self.graph.tensor(ones, ones, data_type=kind, is_pass_by_value=True, name=name, uid=uid)

    def _number(self, name: str, value: np.ndarray[Any, Any]) -> Any:
        """Returns a scalar of float32."""
        return self.scalar(name, value, self.type(float32))

    def _next_uid(self) -> int:
        return len(self.uids) + len(self.scalars) + 1

    def _input(self, tensor: Tensor) -> Any:
        if tensor.value is not None and tensor.size == 1:
            value = np.ascontiguousarray(tensor.value.reshape(-1))
            return self.scalar(tensor.name, value, self._stored_type(tensor.dtype))
        uid = self.uids[tensor] = self._next_uid()
        sizes, steps = self._shaped(tensor.shape, tensor.strides)
        return self.graph.tensor(
            dim=sizes, stride=steps, data_type=self._stored_type(tensor.dtype), name=tensor.name, uid=uid
        )

    def _apply(self, node: Node) -> Any:
        operands = [self.tensors[t] for t in node.inputs]
        name = f"{node.op.name} {node.name}"
        how = {"name": name, "compute_data_type": self._compute_type(node)}
        if node.op.name == "matmul":
            return self.graph.matmul(*operands, **how)
        if node.op.name in CONVOLUTIONS:
            attributes = node.attributes
            one, zero = (1,) * self.one_dimensional, (0,) * self.one_dimensional
            return getattr(self.graph, node.op.name)(
                **dict(zip(CONVOLUTIONS[node.op.name], operands)),
                pre_padding=[*zero, *(p[0] for p in attributes["padding"])],
                post_padding=[*zero, *(p[1] for p in attributes["padding"])],
                stride=[*one, *attributes["stride"]],
                dilation=[*one, *attributes["dilation"]],
                convolution_mode=self._convolution_mode(attributes["mode"]),
                **how,
            )
        if node.op.name in norms.OPERANDS:
            method, phases = getattr(self.graph, node.op.name), self.cudnn.norm_forward_phase
            return norms.describe(node, method, operands, self._number, phases, **how)
        if node.op.name in _ATTENTION:
            method, alignments = getattr(self.graph, node.op.name), self.cudnn.diagonal_alignment
            return _ATTENTION[node.op.name].describe(node, method, operands, alignments, **how)
        if node.kind is Kind.REDUCTION:
            mode = getattr(self.cudnn.reduction_mode, node.attributes["mode"].upper())
            return self.graph.reduction(*operands, mode=mode, **how)
        if node.op.name == "identity" and node.output.dtype.is_bool and not node.inputs[0].dtype.is_bool:
            # Whether it is not 0: an identity would convert the number to the bytes in which booleans are stored.
            zero = self._number(f"{node.name} zero", np.zeros(1, np.float32))
            return self.graph.cmp_neq(*operands, zero, compute_data_type=self.type(float32), name=name)
        if node.op.name in _COMPOSED:
            return _COMPOSED[node.op.name](_Words(self, node), *operands, **node.attributes)
        keywords = {
            word: node.attributes[key]
            for key, word in KEYWORDS.get(node.op.name, {}).items()
            if node.attributes[key] != node.op.attributes[key]
        }
        if node.op.name == "gen_index":
            keywords["axis"] = self._axis(node)
        return getattr(self.graph, str(node.op.cudnn))(*operands, **how, **keywords)

    def _compute_type(self, node: Node) -> Any:
        """Returns the type that a node is computed in.

        Floats and booleans are computed in float32, or float64 if the graph or an operand is of it.  Sums and products
        of integers are exact, in 64 bits if an operand or the result has as many, else in 32.
        """
        operands, result = node.op.operand_dtypes(tuple(t.type for t in node.inputs)), node.output.dtype
        if operands[0].is_float or not (result.is_int or node.kind is Kind.CONTRACTION):
            floats = [d for d in (operands[0], result) if d.is_float]
            return self.type(compute_dtype(floats[0] if floats else float32, self.spec.graph.compute_dtype))
        return self.type(int64 if 64 in [d.bits for d in (*operands, result)] else int32)

    def kept_dtype(self, node: Node, tensor: Tensor | None = None) -> DType:
        """Returns the dtype of a virtual result: only a cast that narrows rounds floats that are not stored."""
        source, result = node.inputs[0].dtype, (node.output if tensor is None else tensor).dtype
        if node.op.name == "identity" and source != result and not widens(source, result):
            return result
        return compute_dtype(result, self.spec.graph.compute_dtype)

    def _convolution_mode(self, mode: str) -> Any:
        """Returns cuDNN's mode, whose enumeration is in the compiled module only."""
        modes = self.cudnn._compiled_module.convolution_mode
        return modes.CONVOLUTION if mode == "convolution" else modes.CROSS_CORRELATION

    def _axis(self, node: Node) -> int:
        rank, axis = node.inputs[0].rank, int(node.attributes["axis"])
        inserted = self.one_dimensional and axis == rank - 1
        return axis + self.rank - self.behind - rank - (self.one_dimensional and not inserted)

    def _result(self, node: Node, tensor: Tensor, result: Any) -> Any:
        sizes, steps = self._shaped(tensor.shape, tensor.strides)
        if tensor in self.spec.writes:
            uid = self.uids[tensor] = self._next_uid()
            result.set_output(True).set_uid(uid).set_name(tensor.name)
            result.set_dim(sizes).set_stride(steps).set_data_type(self._stored_type(tensor.dtype))
        else:
            result.set_data_type(self.type(self.kept_dtype(node, tensor)))
            # Of several sizes that fit, cuDNN cannot know which.
            if node.kind is Kind.REDUCTION or node.op.name in ("conv_dgrad", "conv_wgrad"):
                result.set_dim(sizes).set_stride(steps)
        return result
