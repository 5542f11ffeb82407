"""Operators that AOTAutograd decomposes into simpler ones before the table of operators is used."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch._decomp import core_aten_decompositions

from fusegraph.frontends.torch import exchanged, random
from fusegraph.frontends.torch.foreach import rules as of_lists
from fusegraph.frontends.torch.table import FREE, HANDLERS
from fusegraph.frontends.torch.whole_attention import attended

functional = torch.nn.functional


def decompositions() -> Mapping[Any, Any]:
    """Returns torch's rules, those of this module, and those of a library that a program may load at any time."""
    return {**_known(), **exchanged.rules()}


@functools.cache
def _known() -> Mapping[Any, Any]:
    """Returns the core ATen decompositions except those of operators in the table, and those of this module."""
    aten = torch.ops.aten
    known = HANDLERS.keys() | FREE.keys()
    rules = {op: rule for op, rule in core_aten_decompositions().items() if str(op) not in known}
    return {
        **rules,
        **of_lists(),
        **random.rules(),
        aten._native_multi_head_attention.default: _attention,
        aten._transformer_encoder_layer_fwd.default: _encoder_layer,
        aten.native_batch_norm_backward.default: _batch_norm_backward,
        aten.batch_norm_backward.default: _batch_norm_backward_of_either,
        aten._batch_norm_with_update_functional.default: _batch_norm_training,
        aten._batch_norm_no_update.default: _batch_norm_evaluating,
        aten.addmv.default: _addmv,
        aten.addbmm.default: _addbmm,
        aten.linspace.default: functools.partial(_linspace, rules.pop(aten.linspace.default, None)),
        aten.narrow_copy.default: lambda x, dim, start, length: x.narrow(dim, start, length).clone(),
        aten._assert_tensor_metadata.default: lambda *_, **__: None,  # tracing has fixed what it asserts
    }


def _batch_norm_backward(*given: Any) -> Any:
    """Computes native_batch_norm_backward without arguments that do not count: they need not be kept for it.

    Statistics of the batch count in training, else the running ones.
    """
    grad, x, scale, mean, variance, saved_mean, saved_inverse, train, epsilon, mask = given
    if (mean if train else saved_mean) is None:
        return NotImplemented
    kept = (None, None, saved_mean, saved_inverse) if train else (mean, variance, None, None)
    return torch.ops.aten.native_batch_norm_backward(grad, x, scale, *kept, train, epsilon, mask)


def _batch_norm_backward_of_either(*given: Any) -> Any:
    """Computes batch_norm_backward, whose last argument (a library's reserve) is ignored."""
    *tensors, saved_mean, saved_inverse, train, epsilon, mask, _ = given
    saved = (saved_mean, saved_inverse) if train else (None, None)
    return torch.ops.aten.native_batch_norm_backward(*tensors, *saved, train, epsilon, mask)


def _batch_norm_training(x: Any, *given: Any) -> tuple[Any, ...]:
    """Computes _batch_norm_with_update_functional, with an empty reserve for the gradient."""
    *vectors, momentum, epsilon = given
    y, saved_mean, saved_inverse, *running = torch.ops.aten._native_batch_norm_legit_functional(
        x, *vectors, True, momentum, epsilon
    )
    return y, saved_mean, saved_inverse, x.new_empty(0, dtype=torch.uint8), *running


def _batch_norm_evaluating(x: Any, *given: Any) -> tuple[Any, ...]:
    """Computes _batch_norm_no_update, with an empty reserve for the gradient."""
    results = torch.ops.aten._native_batch_norm_legit_no_training(x, *given)
    return *results, x.new_empty(0, dtype=torch.uint8)


def _linspace(rule: Any, *args: Any, dtype: Any = None, **how: Any) -> Any:
    """Computes linspace by torch's rule; not for integers, which the rule rounds differently from the operator."""
    if rule is None or (dtype is not None and not dtype.is_floating_point):
        return NotImplemented
    return rule(*args, dtype=dtype, **how)


def _addmv(x: Any, matrix: Any, vector: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return _added(x, torch.mv(matrix, vector), beta, alpha)


def _addbmm(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """Computes addbmm; the sum over the batch becomes part of one product."""
    rows, columns = (t.flatten(0, 1) for t in (a.transpose(1, 2), b))
    return _added(x, rows.t() @ columns, beta, alpha)


def _added(x: Any, product: Any, beta: float, alpha: float) -> Any:
    """Returns beta x + alpha product; for integers the factors are integers too."""
    if not (x.is_floating_point() or x.is_complex()):
        beta, alpha = int(beta), int(alpha)
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product  # x is ignored, even NaN
    return (x if beta == 1 else x * beta) + product


def _attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim: int,
    heads: int,
    weight: Any,
    bias: Any,
    out_weight: Any,
    out_bias: Any,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average: bool = True,
    mask_type: int | None = None,
) -> Any:
    """Computes what torch.nn.MultiheadAttention calls for inference, batch first: rows and attention weights."""
    if query.is_nested:
        return NotImplemented
    if query is key and key is value:
        q, k, v = functional.linear(query, weight, bias).chunk(3, -1)
    else:
        parts = zip((query, key, value), weight.chunk(3), bias.chunk(3))
        q, k, v = (functional.linear(x, w, b) for x, w, b in parts)
    q, k, v = (x.unflatten(-1, (heads, embed_dim // heads)).transpose(1, 2) for x in (q, k, v))
    seen = None if mask is None else _seen(mask, mask_type)
    if need_weights:
        scores = (q * (embed_dim // heads) ** -0.5) @ k.mT
        scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-1)
        result = weights @ v
    else:
        weights = None
        result = attended(q, k, v, seen)
    rows = functional.linear(result.transpose(1, 2).flatten(2), out_weight, out_bias)
    return rows, weights.mean(1) if weights is not None and average else weights


def _seen(mask: torch.Tensor, kind: int | None) -> torch.Tensor:
    """Returns the mask of keys that are seen; ``mask`` is true, or not 0 (such as -inf), for those that are not.

    It is for queries and keys if ``kind`` is 0, for the keys of each batch element if 1, for all dimensions if 2.
    """
    hidden = mask if mask.dtype == torch.bool else mask != 0
    return ~(hidden[:, None, None] if kind == 1 else hidden)


def _encoder_layer(
    x: Any,
    embed_dim: int,
    heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    out_weight: Any,
    out_bias: Any,
    gelu: bool,
    norm_first: bool,
    epsilon: float,
    scale_1: Any,
    bias_1: Any,
    scale_2: Any,
    bias_2: Any,
    up_weight: Any,
    up_bias: Any,
    down_weight: Any,
    down_bias: Any,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> Any:
    """Computes what torch.nn.TransformerEncoderLayer calls for inference."""
    if x.is_nested:
        return NotImplemented

    def norm(rows: Any, scale: Any, bias: Any) -> Any:
        return functional.layer_norm(rows, (embed_dim,), scale, bias, epsilon)

    def attention(rows: Any) -> Any:
        factors = (qkv_weight, qkv_bias, out_weight, out_bias)
        return _attention(rows, rows, rows, embed_dim, heads, *factors, mask, False, True, mask_type)[0]

    def feed_forward(rows: Any) -> Any:
        hidden = functional.linear(rows, up_weight, up_bias)
        hidden = functional.gelu(hidden) if gelu else functional.relu(hidden)
        return functional.linear(hidden, down_weight, down_bias)

    if norm_first:
        x = x + attention(norm(x, scale_1, bias_1))
        return x + feed_forward(norm(x, scale_2, bias_2))
    x = norm(x + attention(x), scale_1, bias_1)
    return norm(x + feed_forward(x), scale_2, bias_2)
