"""Attention by its definition, head by head in torch and float64; shares no code with the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import floor, inf, log2
from typing import Any

import torch

Tensor = torch.Tensor


def slope(head: int, heads: int) -> float:
    """The ALiBi slope of a head, by Press, Smith and Lewis: powers of 2^(-8/n), with n the largest power of 2 up to the
    number of heads, then every other slope of those for 2n heads.
    """
    n = 2 ** floor(log2(heads))
    return float(2 ** (-8 * (head + 1) / n)) if head < n else float(2 ** (-8 * (2 * (head - n) + 1) / (2 * n)))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float = 1.0,
    lengths: Sequence[tuple[int, int]] | None = None,
    bias: Tensor | None = None,
    alibi: bool = False,
    left: int | None = None,
    right: int | None = None,
    bottom: bool = False,
    allowed: Tensor | None = None,
    sink: Tensor | None = None,
    weigh: Tensor | None = None,
    modify: Callable[[Tensor, int, int], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the result, and of each query the logarithm of the sum of exponentials, the largest score and the sum.

    lengths: (queries, keys) of each batch; left: keys must be after query - left, right: and not after query + right,
    counted from the ends if at the bottom; allowed and weigh, (B, H, Sq, Skv): which keys may be met, and what
    probabilities are multiplied with; modify: of the scaled scores of a batch and head.
    """
    batch, heads, rows, _ = q.shape
    keys = k.shape[2]
    out = torch.zeros(batch, heads, rows, v.shape[3], dtype=torch.float64)
    stats, largest = (torch.full((batch, heads, rows, 1), -inf, dtype=torch.float64) for _ in range(2))
    total = torch.zeros(batch, heads, rows, 1, dtype=torch.float64)
    for b in range(batch):
        n, m = lengths[b] if lengths is not None else (rows, keys)
        i, j = torch.arange(n)[:, None], torch.arange(m)[None, :]
        diagonal = i + m - n if bottom else i
        for h in range(heads):
            key, value = (x[b, h * x.shape[1] // heads, :m].double() for x in (k, v))
            s = q[b, h, :n].double() @ key.T * scale
            s = s if modify is None else modify(s, b, h)
            if bias is not None:
                whole = bias.double().expand(batch, heads, rows, keys)
                s = s + whole[b, h, :n, :m]
            if alibi:
                s = s + slope(h, heads) * (j - i)
            meets = torch.ones(n, m, dtype=torch.bool)
            if left is not None:
                meets &= j > diagonal - left
            if right is not None:
                meets &= j <= diagonal + right
            if allowed is not None:
                meets &= allowed.expand(batch, heads, rows, keys)[b, h, :n, :m]
            s = torch.where(meets, s, -inf)
            if sink is not None:
                s = torch.cat([s, sink.double().reshape(-1)[h].expand(n, 1)], dim=1)
            if n == 0 or s.shape[1] == 0:
                continue
            largest[b, h, :n] = s.detach().amax(dim=1, keepdim=True)
            shift = torch.where(largest[b, h, :n] == -inf, 0.0, largest[b, h, :n])
            e = torch.exp(s - shift)
            total[b, h, :n] = e.detach().sum(dim=1, keepdim=True)
            stats[b, h, :n] = torch.log(total[b, h, :n]) + shift
            sums = e.sum(dim=1, keepdim=True)
            p = (e / torch.where(sums == 0, 1.0, sums))[:, :m]
            if weigh is not None:
                p = p * weigh[b, h, :n, :m].double()
            out[b, h, :n] = p @ value
    return out, stats, largest, total


def gradients(loss: Tensor, wanted: Sequence[Tensor], *operands: Tensor, **how: Any) -> list[Tensor]:
    """Returns the gradients of `attention` with respect to some of its arguments, which require one."""
    out = attention(*operands, **how)[0]
    if not out.requires_grad:  # there is no query
        return [torch.zeros_like(x) for x in wanted]
    found = torch.autograd.grad(out, list(wanted), loss.double(), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found)]
