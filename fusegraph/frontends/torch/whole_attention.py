"""Scaled dot-product attention as one operator, whatever torch would decompose it into.

AOTAutograd traces what torch's dispatcher makes of an attention: one of several fused operators, or products in float32
and a softmax if no fused kernel takes the call as it is (a mask whose last dimension is broadcast or transposed is
enough).  Here the call stays whole, forward and backward, and bool masks stay bool.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

from fusegraph.frontends.torch.random import IN_KERNELS, seeds, uniform
from fusegraph.ops.random import kept_scale, threshold

_NAME = "scaled_dot_product_attention"
_sdpa = getattr(torch.nn.functional, _NAME)

#: torch's own names; attention of which an option leaves one of them to torch is torch's altogether.
NAMES = ("scaled_dot_product", "fusegraph.attention")


def _result(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    is_causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    seeds: Any = None,
    number: int = 0,
) -> Any:
    """Returns the result, and the logarithms of the sums of exponentials (batch, heads, queries)."""
    scores, (_, _, v) = _scores(query, key, value, attn_mask, is_causal, scale)
    sums = scores.logsumexp(-1)
    weights = _dropped(_probabilities(scores, sums), dropout_p, seeds, number)
    return _like(query, value.shape[-1]).copy_(weights @ v), sums


def _result_form(query: Any, key: Any, value: Any, *_: Any) -> Any:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return _like(query, value.shape[-1]), query.new_empty(query.shape[:-1], dtype=wide)


def _gradient(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    attn_mask: Any,
    is_causal: bool,
    scale: float,
    by_mask: bool,
    dropout_p: float = 0.0,
    seeds: Any = None,
    number: int = 0,
) -> Any:
    """Returns the gradients by query, key and value, and by the mask if asked for (else an empty tensor)."""
    scores, (q, k, v) = _scores(query, key, value, attn_mask, is_causal, scale)
    weights, grad = _probabilities(scores, logsumexp), grad_out.to(scores.dtype)
    by_weights = _dropped(grad @ v.mT, dropout_p, seeds, number)
    by_scores = weights * (by_weights - (grad * out.to(grad.dtype)).sum(-1, keepdim=True))
    weights = _dropped(weights, dropout_p, seeds, number)
    by_key, by_value = (
        x.unflatten(1, (key.shape[1], -1)).sum(2) for x in (by_scores.mT @ q * scale, weights.mT @ grad)
    )
    found = [_like(x).copy_(by) for x, by in ((query, by_scores @ k * scale), (key, by_key), (value, by_value))]
    mask = by_scores.sum_to_size(attn_mask.shape).to(attn_mask.dtype) if by_mask else query.new_empty(0)
    return (*found, mask)


def _gradient_form(grad_out: Any, query: Any, key: Any, value: Any, *others: Any) -> Any:
    mask, by_mask = others[2], others[5]
    return _like(query), _like(key), _like(value), torch.empty_like(mask) if by_mask else query.new_empty(0)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, mask, ctx.causal, ctx.scale, ctx.dropout, seeds, ctx.number = inputs
    ctx.save_for_backward(query, key, value, mask, seeds, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_out: Any, _: Any) -> Any:
    query, key, value, mask, seeds, out, sums = ctx.saved_tensors
    by_mask = ctx.needs_input_grad[3]
    how = ctx.causal, ctx.scale, by_mask, ctx.dropout, seeds, ctx.number
    *found, last = attention_backward(grad_out, query, key, value, out, sums, mask, *how)
    return (*found, last if by_mask else None, *(None,) * 5)


def _like(x: Any, elements: int | None = None) -> Any:
    """Returns an empty tensor with rows of so many elements, whose other dimensions are ordered in memory as in x."""
    order = sorted((0, 1, 2), key=lambda d: -x.stride(d))
    room = x.new_empty((*(x.shape[d] for d in order), x.shape[-1] if elements is None else elements))
    return room.permute(*(order.index(d) for d in (0, 1, 2)), 3)


def _scores(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float) -> Any:
    """Returns the scores in float32 or wider, and queries, keys and values with as many heads."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v = (x.to(wide) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    return scores, (q, k, v)


def _dropped(x: Any, probability: float, seeds: Any, number: int) -> Any:
    """Returns what dropout leaves of probabilities, or of their gradients."""
    if not probability:
        return x
    return x * (uniform(x.shape, seeds, number) >= threshold(probability)) * kept_scale(probability)


def _probabilities(scores: Any, sums: Any) -> Any:
    """Returns the softmax, given the logarithms of the sums; rows without keys are 0."""
    return (scores - sums.unsqueeze(-1)).exp().masked_fill(scores == -torch.inf, 0)


#: torch computes these operators only where a piece cannot.
attention: Any = torch.library.custom_op(
    "fusegraph::attention",
    _result,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, float scale, float dropout_p=0,"
    " Tensor? seeds=None, int number=0) -> (Tensor, Tensor)",
)
attention_backward: Any = torch.library.custom_op(
    "fusegraph::attention_backward",
    _gradient,
    mutates_args=(),
    schema="(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor? attn_mask,"
    " bool is_causal, float scale, bool by_mask, float dropout_p=0,"
    " Tensor? seeds=None, int number=0)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
attention.register_fake(_result_form)
attention_backward.register_fake(_gradient_form)
attention.register_autograd(_gradients, setup_context=_keep)


def attended(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Computes torch.nn.functional.scaled_dot_product_attention, by the operator that stays whole if that takes it."""
    tensors = [query, key, value, *(() if attn_mask is None else (attn_mask,))]
    device = query.device.type
    if device in _DTYPES and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        tensors = [x.to(dtype) if x.dtype in (torch.float32, torch.float16, torch.bfloat16) else x for x in tensors]
    lead = (1,) * (4 - query.dim())
    q, k, v, *masks = (x.reshape((*lead, *x.shape)) if query.dim() == 3 and n < 3 else x for n, x in enumerate(tensors))
    mask = masks[0] if masks else None
    by_torch = dropout_p and not IN_KERNELS.get()
    if by_torch or (is_causal and masks) or not _is_taken(q, k, v, mask, enable_gqa):
        return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    scale = float(q.shape[-1]) ** -0.5 if scale is None else scale
    own = seeds(1, q.device) if dropout_p else None
    result = attention(q, k, v, mask, is_causal, scale, float(dropout_p), own, 0)[0]
    return result if query.dim() == 4 else result.squeeze(0)


def _is_taken(q: Any, k: Any, v: Any, mask: Any, grouped: bool) -> bool:
    """Tells whether the operator takes the call."""
    floats = [x.dtype for x in (q, k, v)] + ([] if mask is None or mask.dtype == torch.bool else [mask.dtype])
    shapes = [x.shape for x in (q, k, v)]
    if any(len(s) != 4 for s in shapes) or len(set(floats)) > 1 or not _has_kernel(q, k, v, mask):
        return False
    if any(x.device != q.device or x.is_nested for x in (k, v, *(() if mask is None else (mask,)))):
        return False
    (batch, heads, rows, depth), (_, shared, keys, _), _ = shapes
    if any(s[0] != batch for s in shapes) or v.shape[1] != shared or v.shape[2] != keys or k.shape[3] != depth:
        return False
    if 0 in (shared, keys, depth) or (heads % shared if grouped else heads != shared):
        return False
    if mask is None:
        return True
    space = (batch, heads, rows, keys)
    return mask.dim() <= 4 and all(n in (1, m) for n, m in zip(reversed(mask.shape), reversed(space)))


def _has_kernel(q: Any, k: Any, v: Any, mask: Any) -> bool:
    """Tells whether there is a kernel as fast as torch's: on GPUs in float32 for few queries, without gradients."""
    if q.dtype in _DTYPES.get(q.device.type, ()):
        return True
    rows, keys = q.shape[-2], k.shape[-2]
    if q.device.type != "cuda" or q.dtype != torch.float32 or not isinstance(rows, int) or not isinstance(keys, int):
        return False
    learnt = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, mask))
    return few(rows, keys) and not learnt


def few(queries: int, keys: int) -> bool:
    """Tells whether so few queries meet keys that multiply-adds of single threads are faster than torch's kernels."""
    return queries <= FEW or (queries <= SHORT and keys <= SHORT_KEYS)


#: Queries of float32 that are few whatever keys there are, and that are beside so many keys: torch takes 218 us
#: for one of 6 heads and 2,151 keys on an H200, where memory takes 10, and 24 us for two of 192 heads and two keys.
FEW, SHORT, SHORT_KEYS = 16, 64, 128
_HALVES = (torch.float16, torch.bfloat16)
#: The dtypes by devices for which there are kernels as fast as torch's.
_DTYPES = {"cuda": _HALVES, "cpu": (*_HALVES, torch.float32, torch.float64)}


def keep_whole(module: Any) -> None:
    """Makes the attention in a graph from torch's tracer, and in the graphs inside it, stay whole."""
    for part in module.modules():
        for node in getattr(part, "graph", torch.fx.Graph()).nodes:
            if node.op == "call_function" and not any(map(_needs_strides, node.users)):
                node.target = _whole(node.target)
        if isinstance(part, torch.fx.GraphModule):
            part.recompile()


def _whole(function: Any) -> Any:
    """Returns what computes a function with whole attention: attention itself, or torch's functions that call it."""
    if function is _sdpa:
        return attended
    if not isinstance(function, FunctionType) or _NAME not in function.__code__.co_names:
        return function
    names = function.__globals__
    if names.get(_NAME) is not _sdpa:
        return function
    own = {**names, _NAME: attended}
    made = FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__module__ = __name__  # else a graph's code would name torch's function
    own[function.__name__] = made  # it hands itself to modes that see torch's functions, which call it again
    return made


def _needs_strides(node: Any) -> bool:
    """Tells whether a node may fail if its operand lies in memory otherwise than torch's tracer saw it."""
    return node.op == "call_method" and node.target in ("view", "as_strided", "stride")
