"""The gradients of ATen's scaled dot-product attention, by the names of all its implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusegraph.errors import NotSupportedError
from fusegraph.frontends.torch.table import Call, aten, ignores
from fusegraph.graph import Tensor


def _gradients(
    c: Call,
    loss: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor | None, ...]:
    """Those by q, k and v, and by a bias if there is one."""
    if dropout:
        raise NotSupportedError("the gradient of attention with dropout, whose random numbers are torch's")
    if q.rank != 4:
        raise NotSupportedError(f"the gradient of attention of rank {q.rank}")
    if c.form.device.startswith("cuda") and q.dtype.itemsize > 2:
        raise NotSupportedError(f"attention in {q.dtype} has no kernel for tensor cores here; torch's is faster")
    if stats.rank == 3:
        stats = stats.reshape((*stats.shape, 1))
    if stats.shape[2] != q.shape[2]:  # some of torch's kernels round the length up
        stats = c.graph.slice(stats, starts=(0, 0, 0, 0), stops=(*q.shape[:3], 1))
    extra: dict[str, Any] = {} if mask is None else {"mask" if mask.dtype.is_bool else "bias": mask}
    how: dict[str, Any] = {"attn_scale": scale, "use_causal_mask": causal}
    results = c.graph.sdpa_backward(q, k, v, out, loss, stats, **extra, **how)
    for tensor, form in zip(results[:3], c.forms):
        if form is not None:
            tensor.strides = form.strides  # heads lie where torch has them: to join them again moves nothing
    return (*results[:3], results[3] if "bias" in extra else None)


@aten("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def _flash_on_cpu(
    c: Call,
    loss: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    return _gradients(c, loss, q, k, v, out, stats, attn_mask, dropout, causal, scale)[:3]


@ignores(6, 7, 8, 9, 12, 13)
@aten("_scaled_dot_product_flash_attention_backward.default")
def _flash(
    c: Call,
    loss: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: None,
    max_k: None,
    dropout: float,
    causal: bool,
    seed: None,
    offset: None,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    return _gradients(c, loss, q, k, v, out, stats, None, dropout, causal, scale)[:3]


@ignores(7, 8)
@aten("_scaled_dot_product_efficient_attention_backward.default")
def _efficient(
    c: Call,
    loss: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    stats: Tensor,
    seed: None,
    offset: None,
    dropout: float,
    wanted: Sequence[bool],
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    results = _gradients(c, loss, q, k, v, out, stats, bias, dropout, causal, scale)
    return tuple(x if asked else None for x, asked in zip(results, wanted))


@ignores(6, 7, 9, 10, 11, 12)
@aten("_scaled_dot_product_cudnn_attention_backward.default")
def _cudnn(
    c: Call,
    loss: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    seed: None,
    offset: None,
    bias: Tensor | None,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: None,
    max_k: None,
    dropout: float,
    causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    return _gradients(c, loss, q, k, v, out, stats, bias, dropout, causal, scale)[:3]
