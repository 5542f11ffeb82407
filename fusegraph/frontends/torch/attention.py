"""torch's scaled dot-product attention and its gradients, under the names of all implementations."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from codegen.sizes import most
from fusegraph.errors import NotSupportedError
from fusegraph.frontends.torch import whole_attention
from fusegraph.frontends.torch.random import seed_at
from fusegraph.frontends.torch.table import Call, aten_by_name
from fusegraph.graph import Tensor


def _keywords(
    c: Call,
    what: str,
    q: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
    seeds: Tensor | None,
    number: int,
    *,
    few: bool = False,
) -> dict[str, Any]:
    """Returns keywords for sdpa and its gradient; ``few`` tells whether there are few queries.  Raises
    NotSupportedError for what torch has to compute.
    """
    if dropout and seeds is None:
        raise NotSupportedError(f"{what} with dropout, whose random numbers are torch's")
    if q.rank != 4:
        raise NotSupportedError(f"{what} of rank {q.rank}")
    if c.form.device.startswith("cuda") and q.dtype.itemsize > 2 and not few:
        raise NotSupportedError(f"attention in {q.dtype} has no kernel for tensor cores here; torch's is faster")
    extra: dict[str, Any] = {} if mask is None else {"mask" if mask.dtype.is_bool else "bias": mask}
    if dropout and seeds is not None:
        extra |= {"dropout_probability": dropout, "seed": seed_at(seeds, number), "offset": 0}
    return {"attn_scale": scale, "use_causal_mask": causal, **extra}


@aten_by_name(
    "scaled_dot_product_attention.default",
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_cudnn_attention.default",
    "fusegraph.attention.default",
)
def _attention(
    c: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    seeds: Tensor | None = None,
    number: int = 0,
) -> Tensor | tuple[Tensor | None, ...]:
    """Returns the result; for all names but the first also the logarithms of the sums of exponentials, if used.

    Later results are seeds and sizes, which only torch's own gradient uses: they are None.
    """
    mask = attn_bias if attn_mask is None else attn_mask
    few = 1 not in c.used and query.rank == 4 and whole_attention.few(most(query.shape[-2]), most(key.shape[-2]))
    how = _keywords(c, "attention", query, mask, is_causal, scale, dropout_p, seeds, number, few=few)
    results = c.graph.sdpa(query, key, value, generate_stats=1 in c.used, **how)
    result, stats = results if isinstance(results, tuple) else (results, None)
    result.strides = c.form.strides  # torch's order of heads in memory: joining them again moves nothing
    if len(c.forms) == 1:
        return c.cast(result)
    return c.cast(result), None if stats is None else _as_torch(c, stats), *(None for _ in c.forms[2:])


def _as_torch(c: Call, stats: Tensor) -> Tensor:
    """Returns the statistics in torch's shape.

    Some of its kernels append an axis of size 1.  Some round the length up and pad with infinities, from which the
    gradient computes probabilities of 0.
    """
    form, (*heads, rows, _) = c.forms[1], stats.shape
    assert form is not None
    stats = stats.reshape((*heads, rows, *form.shape[3:]))
    padding = [(0, max(size - has, 0)) for size, has in zip(form.shape, stats.shape)]
    return c.graph.pad(stats, padding, value=inf) if any(after for _, after in padding) else stats


@aten_by_name(
    "_scaled_dot_product_flash_attention_for_cpu_backward.default",
    "_scaled_dot_product_flash_attention_backward.default",
    "_scaled_dot_product_efficient_attention_backward.default",
    "_scaled_dot_product_cudnn_attention_backward.default",
    "fusegraph.attention_backward.default",
)
def _gradients(
    c: Call,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float = 0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    scale: float | None = None,
    grad_input_mask: Sequence[bool] = (True, True, True),
    by_mask: bool = False,
    seeds: Tensor | None = None,
    number: int = 0,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients by query, key and value, and by a bias if that is asked for."""
    mask = attn_bias if attn_mask is None else attn_mask
    how = _keywords(c, "the gradient of attention", query, mask, is_causal, scale, dropout_p, seeds, number)
    stats = logsumexp if logsumexp.rank == 4 else logsumexp.reshape((*logsumexp.shape, 1))
    if stats.shape[2] != query.shape[2]:  # some of torch's kernels round the length up
        stats = c.graph.slice(stats, starts=(0, 0, 0, 0), stops=(*query.shape[:3], 1))
    results = c.graph.sdpa_backward(query, key, value, out, grad_out, stats, **how)
    for tensor, form in zip(results[:3], c.forms):
        if form is not None:
            tensor.strides = form.strides  # torch's order of heads in memory: joining them again moves nothing
    by_bias = results[3] if "bias" in how else None
    asked_for = (*grad_input_mask, by_mask)[:4]
    return tuple(x if asked else None for x, asked in zip((*results[:3], by_bias), asked_for))
