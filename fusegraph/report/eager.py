"""Runs a graph op by op with torch, as a torch user would, for comparison with fused kernels.

It supports only ops that are one torch function or a short sequence of them; a graph with another op is refused with
its name.  An op that takes several torch functions is computed in float32 instead of 16-bit floats, as torch's own
functions do inside.  Products of float32 are not computed in tf32, unless the graph allows it for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np

from fusegraph.dtypes import DType, bfloat16, float32, float64, promote
from fusegraph.errors import NotSupportedError, ToolchainError
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.base import Array, Kind, Role
from fusegraph.ops.evaluate import compute_dtype
from fusegraph.ops.modes import MODES
from fusegraph.ops.sort import order_of
from fusegraph.report.bounds import Rounding
from fusegraph.report.eager_pooling import POOLING_COMPOSITES, pooling, response_norm
from fusegraph.report.eager_reductions import REDUCTIONS
from fusegraph.runtime.arrays import torch_dtype

#: Names, the same in torch, of the dtypes in which torch computes.
DTYPES = ("float64", "float32", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool")
#: Operands of norms that torch takes in the type in which it computes, whatever the dtypes of the others.
STATISTICS = frozenset({"mean", "inv_variance", "in_running_mean", "in_running_var"})


def load_torch() -> Any:
    """Returns the module ``torch``.  Raises ToolchainError if it cannot be imported."""
    try:
        import torch
    except Exception as error:  # a broken installation raises OSError and others
        raise ToolchainError(f"torch cannot be imported ({error}); install it to compare with it") from None
    return torch


def pointwise(torch: Any) -> dict[str, Callable[..., Any]]:
    """Returns op name -> torch function, for pointwise ops; it takes operands, and attributes as keywords."""
    f = torch.nn.functional

    def gen_index(x: Any, axis: int) -> Any:
        shape = [1] * x.ndim
        shape[axis] = -1
        return torch.arange(x.shape[axis], dtype=torch.int32, device=x.device).reshape(shape).expand(x.shape)

    plain = """abs acos acosh asin asinh atan atanh ceil cos cosh erf exp exp2 expm1 floor isnan log log1p log2
        logical_not neg reciprocal round sigmoid sin sinh sqrt tan tanh trunc pow logical_and logical_or
        bitwise_and bitwise_or bitwise_xor bitwise_not add sub mul div clamp"""
    table = {name: getattr(torch, name) for name in plain.split()}
    table |= {f"cmp_{name}": getattr(torch, name) for name in ("eq", "gt", "ge", "lt", "le")}
    table |= {name: getattr(f, name) for name in ("mish", "hardsigmoid", "hardswish", "leaky_relu", "elu", "gelu")}
    return table | {
        "bias": torch.add,
        "scale": torch.mul,
        "max": torch.maximum,
        "min": torch.minimum,
        "cmp_neq": torch.ne,
        "softplus": lambda x, beta: f.softplus(x, beta, threshold=80),
        "gelu_approx_tanh": lambda x: f.gelu(x, approximate="tanh"),
        "gen_index": gen_index,
        "binary_select": lambda input0, input1, mask: torch.where(mask, input0, input1),
    }


def composed(torch: Any) -> dict[str, Callable[..., Any]]:
    """Returns the same for ops that take several torch functions, or that torch computes in steps on the CPU."""

    def relu(x: Any, negative_slope: float, lower_clip: float, upper_clip: float | None) -> Any:
        if negative_slope == 0:
            return torch.clamp(x, lower_clip, upper_clip)
        y = torch.where(x > lower_clip, x, lower_clip + negative_slope * (x - lower_clip))
        return y if upper_clip is None else torch.clamp(y, max=upper_clip)

    def divided(function: Any, a: Any, b: Any) -> Any:
        return torch.where(b == 0, torch.zeros_like(a), function(a, torch.where(b == 0, torch.ones_like(b), b)))

    def shift(function: Any, beyond: Any) -> Any:
        def shifted(a: Any, b: Any) -> Any:
            inside = (b >= 0) & (b < 8 * a.element_size())
            return torch.where(inside, function(a, torch.where(inside, b, torch.zeros_like(b))), beyond(a))

        return shifted

    return {
        "relu": relu,
        "swish": lambda x, beta: torch.nn.functional.silu(x) if beta == 1 else x * torch.sigmoid(beta * x),
        "mod": lambda a, b: torch.fmod(a, b) if a.is_floating_point() else divided(torch.fmod, a, b),
        "quotient": lambda a, b: divided(partial(torch.div, rounding_mode="trunc"), a, b),
        "shift_left": shift(torch.bitwise_left_shift, torch.zeros_like),
        "shift_right": shift(torch.bitwise_right_shift, lambda a: -(a < 0).to(a.dtype)),
        "sign": lambda x: torch.where(torch.isnan(x), x, torch.sign(x)),
        "add_square": lambda a, b: a + b * b,
        "rsqrt": torch.rsqrt,
    }


def composites(torch: Any) -> dict[str, Callable[..., Any]]:
    """Returns the same for composite ops."""
    f = torch.nn.functional
    every = [True, True, True]

    def layernorm(x: Any, scale: Any, bias: Any, axes: tuple[int, ...], epsilon: float, norm_forward_phase: str) -> Any:
        if norm_forward_phase == "inference":
            return f.layer_norm(x, x.shape[axes[0] :], scale, bias, epsilon)
        return torch.native_layer_norm(x, x.shape[axes[0] :], scale, bias, epsilon)

    def rmsnorm(x: Any, scale: Any, axes: tuple[int, ...], epsilon: float, norm_forward_phase: str) -> Any:
        y = f.rms_norm(x, x.shape[axes[0] :], scale, epsilon)
        if norm_forward_phase == "inference":
            return y
        return y, torch.rsqrt((x.float() ** 2).mean(dim=axes, keepdim=True) + epsilon)

    def batchnorm(x: Any, scale: Any, bias: Any, *running: Any, epsilon: float, momentum: float) -> Any:
        moved = [r.clone() for r in running]  # torch overwrites them
        old = [r.reshape(-1) for r in moved] or [None, None]
        weights = (scale.reshape(-1), bias.reshape(-1))
        y, *statistics = torch.native_batch_norm(x, *weights, *old, True, momentum, epsilon)
        shape = [1, -1] + [1] * (x.ndim - 2)
        return y, *(s.reshape(shape) for s in statistics), *moved

    def groupnorm(x: Any, scale: Any, bias: Any, groups: int, epsilon: float, norm_forward_phase: str) -> Any:
        weights, sizes = (scale.reshape(-1), bias.reshape(-1)), (*x.shape[:2], x[0, 0].numel())
        y, *statistics = torch.native_group_norm(x, *weights, *sizes, groups, epsilon)
        kept = (s.reshape(x.shape[0], groups, *(1 for _ in x.shape[2:])) for s in statistics)
        return (y, *kept) if norm_forward_phase == "training" else y

    def layernorm_backward(loss: Any, x: Any, scale: Any, mean: Any, inv_variance: Any, axes: tuple[int, ...]) -> Any:
        gradient = torch.ops.aten.native_layer_norm_backward
        return gradient(loss, x, x.shape[axes[0] :], mean, inv_variance, scale, scale, every)

    def batchnorm_backward(loss: Any, x: Any, scale: Any, mean: Any, inv_variance: Any) -> Any:
        gradient = torch.ops.aten.native_batch_norm_backward
        flat = (t.reshape(-1) for t in (mean, inv_variance))
        dx, *rest = gradient(loss, x, scale.reshape(-1), None, None, *flat, True, 0.0, every)
        return dx, *(t.reshape(scale.shape) for t in rest)

    return {
        "softmax": lambda x, axis: torch.softmax(x, dim=axis),
        "log_softmax": lambda x, axis: torch.log_softmax(x, dim=axis),
        "logsumexp": lambda x, axes, keepdims: torch.logsumexp(x, dim=axes, keepdim=keepdims),
        "layernorm": layernorm,
        "rmsnorm": rmsnorm,
        "batchnorm": batchnorm,
        "groupnorm": groupnorm,
        "batchnorm_inference": lambda x, mean, inv, scale, bias: (x - mean) * inv * scale + bias,
        "layernorm_backward": layernorm_backward,
        "batchnorm_backward": batchnorm_backward,
        "softmax_backward": lambda loss, y, axis: torch._softmax_backward_data(loss, y, axis, y.dtype),
        "log_softmax_backward": lambda loss, y, axis: torch._log_softmax_backward_data(loss, y, axis, y.dtype),
    }


def _known_to_torch(dtype: DType) -> np.dtype[Any]:
    """Returns the NumPy type, of the same size, in which values of a dtype are passed to and from torch."""
    return np.dtype(np.int16) if dtype == bfloat16 else dtype.numpy


def _weights(node: Node) -> list[Tensor]:
    return [t for key, t in zip(node.op.operands, node.inputs) if key in ("scale", "bias")]


def _check_last(node: Node) -> None:
    """Raises NotSupportedError unless a norm is over the last dimensions, with weights of their shape, as in torch."""
    x, axes = node.outputs[0], node.attributes["axes"]
    first = x.rank - len(axes)
    if axes != tuple(range(first, x.rank)) or not axes or any(w.shape != x.shape[first:] for w in _weights(node)):
        raise NotSupportedError(
            f"torch normalizes the last dimensions, with weights of their shape; {node.op.name} {node.name!r} is along "
            f"{list(axes)}"
        )


def _check_channels(node: Node) -> None:
    """Raises NotSupportedError unless a batchnorm has one weight per channel, as in torch."""
    channels = (node.outputs[0].shape[1], *(1 for _ in node.outputs[0].shape[2:]))
    for weight in _weights(node):
        if weight.shape not in (channels, (1, *channels)):
            raise NotSupportedError(
                f"torch has one weight a channel, {list(channels)}; {node.op.name} {node.name!r} has {weight.name!r} "
                f"{list(weight.shape)}"
            )


#: Op name -> check that refuses nodes that torch's function for the op does not support.
_CHECKS = dict.fromkeys(("layernorm", "rmsnorm", "layernorm_backward"), _check_last) | dict.fromkeys(
    ("batchnorm", "batchnorm_backward", "groupnorm"), _check_channels
)


def movement(torch: Any) -> dict[str, Callable[[Node], Callable[..., Any]]]:
    """Returns op name -> function that makes the torch function of a movement node."""
    f = torch.nn.functional

    def sliced(node: Node) -> Callable[..., Any]:
        at = node.attributes
        back = [d for d, step in enumerate(at["steps"]) if step < 0]
        bounds = []
        for first, step, count in zip(at["starts"], at["steps"], node.output.shape):
            low, high = sorted((first, first + (count - 1) * step)) if count else (0, -1)
            bounds.append(slice(low, high + 1, abs(step)))  # torch has no negative steps
        return lambda x: x[tuple(bounds)].flip(back)

    def padded(node: Node) -> Callable[..., Any]:
        at = node.attributes
        around = [side for pair in reversed(at["padding"]) for side in pair]
        if at["mode"] == "constant":
            return lambda x: f.pad(x, around, value=at["value"])

        def pad(x: Any) -> Any:
            for d, (before, after) in enumerate(at["padding"]):
                n = x.shape[d]
                places = torch.arange(-before, n + after, device=x.device)
                places = places.clamp(0, n - 1) if at["mode"] == "replicate" else (n - 1) - (n - 1 - places.abs()).abs()
                x = x.index_select(d, places)
            return x

        return pad

    def gathered(node: Node) -> Callable[..., Any]:
        axis = node.attributes["axis"]

        def gather(x: Any, index: Any) -> Any:
            places = index.long().clamp(0, max(x.shape[axis] - 1, 0)).reshape(-1)
            return x.index_select(axis, places).reshape(node.output.shape)

        return gather

    return {
        "transpose": lambda node: lambda x: x.permute(node.attributes["perm"]),
        "reshape": lambda node: lambda x: x.reshape(node.attributes["shape"]),
        "broadcast": lambda node: lambda x: x.expand(node.attributes["shape"]),
        "slice": sliced,
        "pad": padded,
        "concatenate": lambda node: lambda *xs: torch.cat(xs, node.attributes["axis"]),
        "gather": gathered,
    }


class Eager:
    """A graph as a sequence of torch calls, on torch's GPU if it has one, else on the CPU.

    Call it with tensors (`tensors` makes them) in the order of the graph's inputs; it returns a tuple of one tensor per
    output.  Raises ToolchainError without torch, NotSupportedError if torch does not support an op or dtype.
    """

    def __init__(self, graph: Graph, device: int = 0) -> None:
        self.graph = graph
        self._torch = torch = load_torch()
        self.is_cuda: bool = torch.cuda.is_available()
        self.device = f"cuda:{device}" if self.is_cuda else "cpu"
        if graph.compute_dtype == float64:
            raise NotSupportedError("torch computes in the tensors' own dtypes; the graph asks for float64")
        self._functions, self._composed = pointwise(torch) | composites(torch), composed(torch)
        self._of_node: dict[Any, Callable[[Node], Callable[..., Any]]] = {
            Kind.CONTRACTION: self._contraction,
            Kind.REDUCTION: self._reduction,
            Kind.SCAN: self._scan,
            Kind.SORT: self._sort,
            Kind.POOLING: partial(pooling, torch),
            **dict.fromkeys(POOLING_COMPOSITES, partial(pooling, torch)),
            "local_response_norm": partial(response_norm, torch),
            **dict.fromkeys(("identity", "narrow"), lambda node: lambda x: self._cast(x, node.output.dtype)),
            "bitcast": lambda node: lambda x: x.view(self._dtypes[node.output.dtype]),
            **movement(torch),
        }
        self._dtypes = {t.dtype: self._dtype(t) for t in graph.tensors.values()}
        self._constants = {t: self.tensor(t.value, t.dtype) for t in graph.tensors.values() if t.value is not None}
        self._steps = [(node, self._step(node)) for node in graph.nodes]

    @property
    def rounding(self) -> Rounding:
        """Where torch rounds: every op rounds to its tensor's dtype, and may use approximate instructions."""
        return Rounding(approximate=frozenset(n.name for n in self.graph.nodes), strict=True)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        values = {**self._constants, **dict(zip(self.graph.inputs, inputs))}
        for node, step in self._steps:
            found = step(*(values[t] for t in node.inputs))
            values |= zip(node.outputs, found if isinstance(found, tuple) else (found,))
        return tuple(values[t] for t in self.graph.outputs)

    def tensor(self, array: Array, dtype: DType) -> Any:
        """Returns a NumPy array as a tensor on the device, with the same order of elements in memory."""
        tensor = self._torch.from_numpy(np.array(array, order="K").view(_known_to_torch(dtype)))
        return tensor.view(torch_dtype(self._torch, dtype)).to(self.device)

    def tensors(self, inputs: Mapping[str, Array]) -> list[Any]:
        """Converts the graph's inputs, given by name, to tensors in the graph's order."""
        return [self.tensor(inputs[t.name], t.dtype) for t in self.graph.inputs]

    def arrays(self, results: Sequence[Any]) -> dict[str, Array]:
        """Converts the outputs to NumPy arrays by name."""
        arrays = {}
        for tensor, result in zip(self.graph.outputs, results):
            bits = result.cpu().contiguous().view(getattr(self._torch, _known_to_torch(tensor.dtype).name))
            arrays[tensor.name] = bits.numpy().view(tensor.dtype.numpy)
        return arrays

    # ---- one op

    def _dtype(self, tensor: Tensor) -> Any:
        if tensor.dtype.name not in DTYPES:
            raise NotSupportedError(f"torch has no arithmetic in {tensor.dtype}, the dtype of {tensor.name!r}")
        return torch_dtype(self._torch, tensor.dtype)

    def _step(self, node: Node) -> Callable[..., Any]:
        of_node = self._of_node.get(node.kind) or self._of_node.get(node.op.name)
        if of_node is not None:
            return of_node(node)
        if (check := _CHECKS.get(node.op.name)) is not None:
            check(node)
        several = self._composed.get(node.op.name)
        function = several or self._functions.get(node.op.name)
        if function is None:
            raise NotSupportedError(f"no torch function for {node.op.name} {node.name!r}")
        types, real = tuple(t.type for t in node.inputs), self.graph.compute_dtype
        promoted = node.op.promoted(types)
        mixed = promoted.is_float and any(t.dtype.is_int for t in types)
        if mixed or (promoted.is_float and several is not None):
            promoted = compute_dtype(promoted, real)
        wanted = [d if d.is_bool else promoted for d in node.op.operand_dtypes(types)]
        if node.kind is Kind.COMPOSITE and self.is_cuda:  # torch's statistics are wider than its other operands
            narrow = [t.dtype for k, t in zip(node.op.operands, types) if k not in STATISTICS]
            wanted = [t.dtype if k in STATISTICS else reduce(promote, narrow) for k, t in zip(node.op.operands, types)]
        elif node.kind is Kind.COMPOSITE:  # as wide as the widest result, which torch would round otherwise
            wanted = [reduce(promote, (t.dtype for t in node.outputs), promoted)] * len(types)
        kinds = [torch_dtype(self._torch, d) for d in wanted]
        results = [self._dtypes[t.dtype] for t in node.outputs]

        def run(*xs: Any) -> Any:
            found = function(*(x.to(k) for x, k in zip(xs, kinds)), **node.attributes)
            return tuple(y.to(d) for y, d in zip(found if isinstance(found, tuple) else (found,), results))

        return run

    def _contraction(self, node: Node) -> Callable[..., Any]:
        promoted = node.op.promoted(tuple(t.type for t in node.inputs))
        if not promoted.is_float:
            raise NotSupportedError(f"torch has no {node.op.name} of {promoted} ({node.name!r})")
        # If the result is wider than the operands, widen these: torch would round the result to their dtype first.
        wider = node.output.dtype if node.output.dtype.unit_roundoff < promoted.unit_roundoff else promoted
        kind, result = torch_dtype(self._torch, wider), self._dtypes[node.output.dtype]
        function = self._torch.matmul if node.op.role is Role.MATMUL else self._convolution(node)
        return lambda *xs: function(*(x.to(kind) for x in xs)).to(result)

    def _reduction(self, node: Node) -> Callable[..., Any]:
        torch, at, source = self._torch, node.attributes, node.inputs[0].dtype
        mode, axes, result = MODES[at["mode"]], at["axes"], self._dtypes[node.output.dtype]
        if not axes:
            raise NotSupportedError(f"torch reduces no axes as all of them ({node.name!r})")
        if mode.position and len(axes) > 1:
            raise NotSupportedError(f"torch's {mode.name} is along one axis or all ({node.name!r})")
        how = {"dim": axes[0] if mode.position else axes, "keepdim": at["keepdims"]}
        if mode.corrects:
            how["correction"] = at["correction"]
        wide = result if not source.is_float else torch_dtype(torch, compute_dtype(source, float32))
        return lambda x: REDUCTIONS[mode.name](torch, x, wide, **how).to(result)

    def _scan(self, node: Node) -> Callable[..., Any]:
        axis, reverse, result = node.attributes["axis"], node.attributes["reverse"], node.output.dtype
        wide = torch_dtype(self._torch, compute_dtype(result, float32))

        def run(x: Any) -> Any:
            total = getattr(self._torch, node.op.name)((x.flip(axis) if reverse else x).to(wide), axis)
            total = total if isinstance(total, self._torch.Tensor) else total.values
            return (total.flip(axis) if reverse else total).to(self._dtypes[result])

        return run

    def _sort(self, node: Node) -> Callable[..., Any]:
        """Makes the function that gives sorted elements or their positions.  (torch's topk takes any of equal ones.)"""
        axis, descending, keep = order_of(node.inputs[0].type, node.attributes)
        part, result = int(node.attributes.get("dtype") is not None), self._dtypes[node.output.dtype]

        def run(x: Any) -> Any:
            found = self._torch.sort(x, dim=axis, descending=descending, stable=True)[part]
            return found.narrow(axis, 0, keep).to(result)

        return run

    def _convolution(self, node: Node) -> Callable[..., Any]:
        f, gradients = self._torch.nn.functional, self._torch.nn.grad
        at, pads = node.attributes, node.attributes["padding"]
        rank = len(pads)
        even = all(before == after for before, after in pads)  # torch adds the same on both sides by itself
        how = at["stride"], tuple(before if even else 0 for before, _ in pads), at["dilation"], at["groups"]

        def padded(x: Any) -> Any:
            return x if even else f.pad(x, [side for pair in reversed(pads) for side in pair])

        def turned(w: Any) -> Any:
            return w.flip(tuple(range(2, 2 + rank))) if at["mode"] == "convolution" else w

        if node.op.role is Role.FPROP:
            convolve = getattr(f, f"conv{rank}d")
            return lambda x, w: convolve(padded(x), turned(w), None, *how)
        if node.op.role is Role.WGRAD:
            of_filter = getattr(gradients, f"conv{rank}d_weight")
            return lambda x, loss: turned(of_filter(padded(x), node.output.shape, loss, *how))
        # For uneven padding: the gradient of the padded input, of which the inner part is returned.
        ends = ((0, 0),) * rank if even else pads
        sizes = [size + before + after for size, (before, after) in zip(at["size"], ends)]
        shape = (*node.output.shape[:2], *sizes)
        inside = (..., *(slice(before, before + size) for size, (before, _) in zip(at["size"], ends)))
        of_input = getattr(gradients, f"conv{rank}d_input")
        return lambda loss, w: of_input(shape, turned(w), loss, *how)[inside]

    def _cast(self, x: Any, target: DType) -> Any:
        """Casts as the op table does: floats become integers by truncation and saturation, NaN becomes 0."""
        if target.is_int and x.is_floating_point():
            x = x.nan_to_num(nan=0.0).clamp(float(target.min), float(target.max))
        return x.to(self._dtypes[target])

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Makes torch compute products of float32 in float32, as the other engines do, or in tf32 if all may be.

        Sums of 16-bit products are also kept in float32.  These are settings of the whole process; they are restored
        afterwards.
        """
        every = [n for n in self.graph.nodes if n.kind is Kind.CONTRACTION]
        products = [n for n in every if n.op.promoted(tuple(t.type for t in n.inputs)) == float32]
        tf32 = bool(products) and all(n.attributes["compute_dtype"] == "tf32" for n in products)
        backends = self._torch.backends
        matmul = backends.cuda.matmul
        names = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
        before = [getattr(matmul, name) for name in names]
        try:
            for name in names:
                setattr(matmul, name, tf32 and name == "allow_tf32")
            with backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=tf32):
                yield
        finally:
            for name, value in zip(names, before):
                setattr(matmul, name, value)
