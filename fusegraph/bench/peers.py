"""The workloads in torch, as a torch user would write them, to run eagerly and by torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fusegraph.bench import models

Array = Any


def functions(torch: Any) -> dict[str, Any]:
    """Returns every workload's torch function, by the name `Workload.torch`."""
    f = torch.nn.functional

    def conv_bias_relu(stride: int, padding: int) -> Any:
        def run(x: Array, w: Array, bias: Array) -> Array:
            return torch.relu(f.conv2d(x, w, bias.reshape(-1), stride=stride, padding=padding))

        return run

    def conv_bias_relu_sums(x: Array, w: Array, bias: Array) -> tuple[Array, Array]:
        y = torch.relu(f.conv2d(x, w, bias.reshape(-1), padding=1))
        return y, y.sum((0, 2, 3), keepdim=True)

    def batchnorm_relu(x: Array, weight: Array, bias: Array) -> Array:
        return torch.relu(f.batch_norm(x, None, None, weight.reshape(-1), bias.reshape(-1), training=True))

    def layernorm_gelu_dropout_add(x: Array, residual: Array, weight: Array, bias: Array) -> Array:
        return f.dropout(f.gelu(f.layer_norm(x, x.shape[-1:], weight, bias)), 0.1) + residual

    def layernorm_backward(loss: Array, x: Array, weight: Array, mean: Array, inv_variance: Array) -> Array:
        gradient = torch.ops.aten.native_layer_norm_backward
        return gradient(loss, x, x.shape[-1:], mean, inv_variance, weight, weight, [True, True, True])

    def sdpa_backward(q: Array, k: Array, v: Array, o: Array, loss: Array, stats: Array) -> Array:
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        gradient, rows = torch.ops.aten._scaled_dot_product_flash_attention_backward, q.shape[2]
        return gradient(loss, q, k, v, o, stats[..., 0], None, None, rows, rows, 0.0, True, seed, seed[0])

    def rmsnorm_backward(loss: Array, x: Array, weight: Array, inv_variance: Array) -> Array:
        wide = loss.float()
        normal, g = x.float() * inv_variance, wide * weight.float()
        dx = (g - normal * (g * normal).mean(-1, keepdim=True)) * inv_variance
        return dx.to(x.dtype), (wide * normal).sum(0).to(weight.dtype)

    def dgrad(loss: Array, w: Array) -> Array:
        return torch.nn.grad.conv2d_input(loss.shape, w, loss, padding=1)

    def wgrad(x: Array, loss: Array) -> Array:
        return torch.nn.grad.conv2d_weight(x, (loss.shape[1], x.shape[1], 3, 3), loss, padding=1)

    return {
        **{name: _layer(torch, name) for name in _layers()},
        "add": lambda a, b: a + b,
        "mul_relu": lambda a, b: torch.relu(a * b),
        "conv_relu_conv": lambda x, v, w: f.conv2d(torch.relu(f.conv2d(x, v, padding=1)), w, padding=1),
        "int8_conv": lambda x, w: f.conv2d(x, w),
        "scaled_matmul": lambda a, b, of_a, of_b: torch._scaled_mm(a, b, of_a, of_b, out_dtype=torch.bfloat16),
        "sparse_matmul": _Sparse(torch),
        "relu_matmul": lambda a, b: torch.relu(a) @ b,
        "mlp": lambda x, up, down: f.gelu(x @ up) @ down,
        "row_sums": lambda x: x.sum(-1, keepdim=True, dtype=torch.float32),
        "relu_sums": lambda x: torch.relu(x).sum(-1, keepdim=True, dtype=torch.float32),
        "layernorm_mul": lambda x, w, b: f.layer_norm(x, x.shape[-1:], w, b) * x,
        "add_rmsnorm": lambda x, residual, w: f.rms_norm(x + residual, x.shape[-1:], w),
        "groupnorm": lambda x, w, b: f.group_norm(x, 32, w.reshape(-1), b.reshape(-1)),
        "dropout": lambda x: f.dropout(x, 0.1),
        "transpose": lambda x: x.t().contiguous(),
        "slice": lambda x: x[1024:-1024, 64:-64].contiguous(),
        "concatenate": lambda a, b: torch.cat((a, b), 1),
        "to NHWC": lambda x: x.contiguous(memory_format=torch.channels_last),
        "to NCHW": lambda x: x.contiguous(),
        "sigmoid_fma": lambda a, b, c: torch.sigmoid(a + b * c),
        "gelu_tanh": lambda a, bias, b: f.gelu(a + bias) * torch.tanh(b) + a,
        "softmax": lambda x: torch.softmax(x, -1),
        "layernorm": lambda x, w, b: f.layer_norm(x, x.shape[-1:], w, b),
        "layernorm_gelu": lambda x, w, b: f.gelu(f.layer_norm(x, x.shape[-1:], w, b)),
        "rmsnorm": lambda x, w: f.rms_norm(x, x.shape[-1:], w),
        "batchnorm_relu": batchnorm_relu,
        "layernorm_gelu_dropout_add": layernorm_gelu_dropout_add,
        "layernorm_backward": layernorm_backward,
        "rmsnorm_backward": rmsnorm_backward,
        "softmax_backward": lambda loss, y: torch._softmax_backward_data(loss, y, -1, y.dtype),
        "maxpool": lambda x: f.max_pool2d(x, 3, 2, 1),
        "avgpool": lambda x: f.avg_pool2d(x, 3, 2, 1),
        "conv": lambda x, w: f.conv2d(x, w, padding=1),
        "depthwise": lambda x, w: f.conv2d(x, w, padding=1, groups=w.shape[0]),
        "depthwise_swish": lambda x, w: f.silu(f.conv2d(x, w, padding=1, groups=w.shape[0])),
        "conv1x1_bias_relu": conv_bias_relu(1, 0),
        "conv3x3s1_bias_relu": conv_bias_relu(1, 1),
        "conv3x3s2_bias_relu": conv_bias_relu(2, 1),
        "conv7x7s2_bias_relu": conv_bias_relu(2, 3),
        "matmul": lambda a, b: a @ b,
        "linear_gelu": lambda a, b, bias: f.gelu(a @ b + bias, approximate="tanh"),
        "affine_matmul": lambda a, scale, bias, b: torch.relu(a * scale + bias).to(a.dtype) @ b,
        "affine_conv": lambda x, scale, bias, w: f.conv2d(torch.relu(x * scale + bias).to(x.dtype), w, padding=1),
        "dequantised_matmul": lambda a, b, scale: a @ (b * scale).to(a.dtype),
        "swiglu": lambda x, gate, up: f.silu(x @ gate) * (x @ up),
        "conv_bias_relu_sums": conv_bias_relu_sums,
        "dgrad": dgrad,
        "wgrad": wgrad,
        "sdpa_backward": sdpa_backward,
        "sdpa": lambda q, k, v: f.scaled_dot_product_attention(q, k, v),
        "sdpa_grouped": lambda q, k, v: f.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        "sdpa_causal": lambda q, k, v: f.scaled_dot_product_attention(q, k, v, is_causal=True),
        "sdpa_decode": lambda q, k, v: f.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "sdpa_window": _Flex(torch, _window),
        "sdpa_packed": _Packed(torch),
        "sdpa_documents": _Flex(torch, _same_document, _by_distance),
    }


class _Flex:
    """Attention with a mask and a bias that are functions of positions.

    torch.compile gets `flex_attention`, eager torch adds a dense tensor.  ``prepare`` makes the block mask and that
    tensor, which many calls share.
    """

    def __init__(self, torch: Any, mask: Any, bias: Any = None) -> None:
        self._torch, self._mask, self._bias = torch, mask, bias
        self._blocks: Any = None
        self._dense: Any = None

    def prepare(self, q: Array, k: Array, v: Array, *more: Array) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        torch, rows, keys = self._torch, q.shape[2], k.shape[2]
        mask = self._mask(*more)
        self._blocks = create_block_mask(mask, None, None, rows, keys, device=q.device)
        i, j = torch.arange(rows, device=q.device)[:, None], torch.arange(keys, device=q.device)
        bias = torch.zeros((rows, keys), device=q.device) if self._bias is None else self._bias(0.0, 0, 0, i, j)
        self._dense = bias.masked_fill(~mask(0, 0, i, j), float("-inf")).to(q.dtype)

    def __call__(self, q: Array, k: Array, v: Array, *more: Array) -> Array:
        from torch.nn.attention.flex_attention import flex_attention

        if self._torch.compiler.is_compiling():
            return flex_attention(q, k, v, score_mod=self._bias, block_mask=self._blocks)
        return self._torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self._dense)


class _Packed:
    """Causal attention over packed sequences.

    torch.compile gets `flex_attention`, eager torch the kernel of its `varlen_attn`, whose operands are (tokens, heads,
    d).  ``prepare`` finds the block mask, which many calls share, and the length of the longest sequence.
    """

    def __init__(self, torch: Any) -> None:
        self._torch, self._longest = torch, 0
        self._blocks: Any = None

    def prepare(self, q: Array, k: Array, v: Array, offsets: Array) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        lengths, tokens = offsets.diff(), q.shape[2]
        self._longest = int(lengths.max())
        sequences = self._torch.arange(len(lengths), device=q.device).repeat_interleave(lengths, output_size=tokens)
        self._blocks = create_block_mask(_same_document(sequences), None, None, tokens, tokens, device=q.device)

    def __call__(self, q: Array, k: Array, v: Array, offsets: Array) -> Array:
        from torch.nn.attention.flex_attention import flex_attention

        if self._torch.compiler.is_compiling():
            return flex_attention(q, k, v, block_mask=self._blocks, enable_gqa=q.shape[1] != k.shape[1])
        forward, longest = self._torch.ops.aten._flash_attention_forward, self._longest
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        o, *_ = forward(q, k, v, offsets, offsets, longest, longest, 0.0, True, False)
        return o.transpose(0, 1)[None]


class _Sparse:
    """A linear layer with a 2:4 sparse weight, which ``prepare`` prunes and compresses as torch does by default.

    torch multiplies such a weight, cuSPARSELt's or CUTLASS's product, on the left: the result is transposed.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._weight: Any = None

    def prepare(self, x: Array, w: Array) -> None:
        torch = self._torch
        fours = w.reshape(w.shape[0], -1, 4)
        dropped = fours.abs().float().argsort(dim=-1, stable=True)[..., :2]
        pruned = fours.scatter(-1, dropped, 0).reshape(w.shape)
        self._weight = torch.sparse.to_sparse_semi_structured(pruned)

    def __call__(self, x: Array, w: Array) -> Array:
        return self._torch.nn.functional.linear(x, self._weight)


def _window() -> Any:
    return lambda b, h, i, j: (j <= i) & (j > i - 1024)


def _same_document(documents: Array) -> Any:
    return lambda b, h, i, j: (documents[i] == documents[j]) & (j <= i)


def _by_distance(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score - 0.001 * (i - j)


def alone(torch: Any) -> dict[str, Any]:
    """Returns torch functions for the product or convolution of a workload alone, by the name `Workload.torch`.

    This is the first kernel of a library that fuses nothing.  Operands that only the epilogue needs are ignored.
    """
    f = torch.nn.functional

    def conv(stride: int, padding: int) -> Any:
        return lambda x, w, bias: f.conv2d(x, w, None, stride=stride, padding=padding)

    return {
        **{name: _layer(torch, name, alone=True) for name in _layers() if "+" in name},
        "depthwise_swish": lambda x, w: f.conv2d(x, w, padding=1, groups=w.shape[0]),
        "conv1x1_bias_relu": conv(1, 0),
        "conv3x3s1_bias_relu": conv(1, 1),
        "conv3x3s2_bias_relu": conv(2, 1),
        "conv7x7s2_bias_relu": conv(2, 3),
        "linear_gelu": lambda a, b, bias: a @ b,
        "swiglu": lambda x, gate, up: (x @ gate, x @ up),
        "sparse_matmul": lambda x, w: x @ w.t(),
        "conv_bias_relu_sums": conv(1, 1),
    }


def _layers() -> Iterator[str]:
    """Yields the names `Workload.torch` of `fusegraph.bench.models`, each once."""
    yield from dict.fromkeys(w.torch for w in models.layers())


def _layer(torch: Any, name: str, *, alone: bool = False) -> Callable[..., Array]:
    """Returns a layer's function by its name: ``matmul`` or ``conv s2 p1`` (stride, padding), then any ``+step``.

    A bias as the first step goes into torch's own function, which adds it as cheaply as torch can.
    """
    f = torch.nn.functional
    product, *steps = name.split("+")
    stride, padding = (int(word[1:]) for word in product.split()[1:]) if product != "matmul" else (0, 0)
    biased = steps[:1] == ["bias"] and not alone
    after = [] if alone else steps[biased:]
    functions: dict[str, Callable[[Array, list[Array]], Array]] = {
        "add": lambda y, operands: y + operands.pop(0),
        "scale": lambda y, operands: y * operands.pop(0),
        "mul": lambda y, operands: y * operands.pop(0),
        "relu": lambda y, _: torch.relu(y),
        "swish": lambda y, _: f.silu(y),
        "gelu": lambda y, _: f.gelu(y),
        "gelu(tanh)": lambda y, _: f.gelu(y, approximate="tanh"),
    }

    def run(first: Array, second: Array, *rest: Array) -> Array:
        operands = list(rest)
        bias: Array = operands.pop(0) if biased else None
        if product == "matmul":
            y = torch.addmm(bias, first, second) if biased else first @ second
        else:
            groups = first.shape[1] // second.shape[1]
            flat = bias.reshape(-1) if biased else None
            y = f.conv2d(first, second, flat, stride=stride, padding=padding, groups=groups)
        for step in after:
            y = functions[step](y, operands)
        return y

    return run
