"""ATen's scaled dot-product attention, by the names of all its implementations."""

from __future__ import annotations

from math import inf
from typing import Any

from fusegraph.errors import NotSupportedError
from fusegraph.frontends.torch.table import Call, aten
from fusegraph.graph import Tensor


def _attention(
    c: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor | None]:
    """The result, and the logarithms of the sums of exponentials if they are used."""
    if dropout:
        raise NotSupportedError("attention with dropout, whose random numbers are torch's")
    if q.rank != 4:
        raise NotSupportedError(f"attention of rank {q.rank}")
    if c.form.device.startswith("cuda") and q.dtype.itemsize > 2:
        raise NotSupportedError(f"attention in {q.dtype} has no kernel for tensor cores here; torch's is faster")
    extra: dict[str, Any] = {} if mask is None else {"mask" if mask.dtype.is_bool else "bias": mask}
    how: dict[str, Any] = {"attn_scale": scale, "use_causal_mask": causal}
    results = c.graph.sdpa(q, k, v, generate_stats=1 in c.used, **extra, **how)
    result, stats = results if isinstance(results, tuple) else (results, None)
    result.strides = c.form.strides  # heads lie where torch has them: to join them again moves nothing
    return c.cast(result), None if stats is None else _as_torch(c, stats)


def _as_torch(c: Call, stats: Tensor) -> Tensor:
    """The statistics in torch's shape: some of its kernels append an axis of size one, some round the length up and
    have infinities there, of which the gradient makes probabilities of zero."""
    form, (*heads, rows, _) = c.forms[1], stats.shape
    assert form is not None
    stats = stats.reshape((*heads, rows, *form.shape[3:]))
    padding = [(0, max(size - has, 0)) for size, has in zip(form.shape, stats.shape)]
    return c.graph.pad(stats, padding, value=inf) if any(after for _, after in padding) else stats


@aten("scaled_dot_product_attention.default")
def _sdpa(
    c: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return _attention(c, q, k, v, mask, dropout, causal, scale)[0]


@aten("_scaled_dot_product_flash_attention.default")
def _flash(
    c: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    # The results after the second are seeds and sizes: used by torch's own gradient only.
    return (*_attention(c, q, k, v, None, dropout, causal, scale), *(None,) * 7)


@aten("_scaled_dot_product_flash_attention_for_cpu.default")
def _flash_on_cpu(
    c: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0,
    causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    return _attention(c, q, k, v, attn_mask, dropout, causal, scale)


@aten("_scaled_dot_product_efficient_attention.default")
def _efficient(
    c: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    stats: bool,
    dropout: float = 0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    return (*_attention(c, q, k, v, bias, dropout, causal, scale), None, None)


@aten("_scaled_dot_product_cudnn_attention.default")
def _cudnn(
    c: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    stats: bool,
    dropout: float = 0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    return (*_attention(c, q, k, v, bias, dropout, causal, scale), *(None,) * 7)
