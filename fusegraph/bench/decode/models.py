"""Llama-like decoders in plain torch, with a static cache, as people write them for torch.compile.

Weights and caches are random: times do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fusegraph.bench.decode.sizes import GROUP, Size

#: How far elements of random matrices are from 0, about.
_DEVIATION = 0.02
_THETA = 5e5


class Wide(nn.Module):
    """A matrix (out, in) in bfloat16."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns, dtype=torch.bfloat16).mul_(_DEVIATION))

    def forward(self, x: Any) -> Any:
        return functional.linear(x, self.weight)


class Int8(nn.Module):
    """A matrix (out, in) of 8-bit integers, with a scale for each row."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (rows, columns), dtype=torch.int8))
        self.register_buffer("scale", torch.full((rows,), _DEVIATION / 73, dtype=torch.bfloat16))

    def forward(self, x: Any) -> Any:
        return functional.linear(x, self.weight.to(x.dtype)) * self.scale


class Int4(nn.Module):
    """A matrix (out, in) of 4-bit integers from -8 to 7, two in a byte, with a scale for each group of a row."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8))
        scale = torch.full((rows, columns // GROUP), _DEVIATION / 4.6, dtype=torch.bfloat16)
        self.register_buffer("scale", scale)

    def forward(self, x: Any) -> Any:
        codes = torch.stack((self.weight & 15, self.weight >> 4), -1).view(*self.scale.shape, GROUP)
        return functional.linear(x, ((codes.to(x.dtype) - 8) * self.scale[..., None]).flatten(1))


MATRICES: Mapping[str, Callable[[int, int], Any]] = {"bf16": Wide, "int8": Int8, "int4": Int4}


class Norm(nn.Module):
    """RMS norm, computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))

    def forward(self, x: Any) -> Any:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def turned(x: Any, cos: Any, sin: Any) -> Any:
    """Turns pairs of elements of heads, one of the first half and one of the second, as rotary embeddings do; in
    float32, the dtype of the cosines and sines.
    """
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Attends by torch's operator."""
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def products(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Attends by two products with a softmax between them."""
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1).to(v.dtype) @ v


class Layer(nn.Module):
    """Attention over a cache that it updates in place, and a gated perceptron."""

    def __init__(self, size: Size, matrix: Callable[[int, int], Any], batch: int, length: int) -> None:
        super().__init__()
        self.depth, heads = size.depth, (size.heads, size.shared, size.shared)
        self.norm1, self.norm2 = Norm(size.width), Norm(size.width)
        self.q, self.k, self.v = (matrix(n * size.depth, size.width) for n in heads)
        self.out = matrix(size.width, size.width)
        self.gate, self.up = (matrix(size.hidden, size.width) for _ in range(2))
        self.down = matrix(size.width, size.hidden)
        for name in ("keys", "values"):
            cache = torch.randn(batch, size.shared, length, size.depth, dtype=torch.bfloat16)
            self.register_buffer(name, cache)

    def forward(self, x: Any, position: Any, cos: Any, sin: Any, mask: Any, attend: Callable[..., Any]) -> Any:
        rows, tokens, width = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(rows, tokens, -1, self.depth).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        if tokens == 1:  # heads that share keys are as rows: no key is repeated for them
            y = attend(q.reshape(rows, k.shape[1], -1, self.depth), self.keys, self.values, mask)
            y = y.reshape(rows, 1, width)
        else:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            y = y.transpose(1, 2).reshape(rows, tokens, width)
        x = x + self.out(y)
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """A decoder in evaluation mode, with caches of ``length`` tokens of ``batch`` texts."""

    def __init__(self, size: Size, weights: str, batch: int, length: int) -> None:
        super().__init__()
        matrix = MATRICES[weights]
        self.embedding = nn.Parameter(torch.randn(size.vocabulary, size.width, dtype=torch.bfloat16))
        self.layers = nn.ModuleList(Layer(size, matrix, batch, length) for _ in range(size.layers))
        self.norm, self.head = Norm(size.width), matrix(size.vocabulary, size.width)
        self.register_buffer("rates", _THETA ** (-torch.arange(0, size.depth, 2) / size.depth))
        self.register_buffer("places", torch.arange(length))
        self.requires_grad_(False).eval()

    def forward(self, tokens: Any, position: Any, attend: Callable[..., Any] = attention) -> Any:
        """Returns the logits (batch, 1, vocabulary) after ``tokens`` (batch, n), which are at these positions (n,).

        A single token attends, in the way of ``attend``, to all up to its position, several to one another.
        """
        x = self.embedding[tokens]
        angle = position[:, None] * self.rates
        cos, sin = angle.cos(), angle.sin()
        mask = self.places <= position[:, None]
        for layer in self.layers:
            x = layer(x, position, cos, sin, mask, attend)
        return self.head(self.norm(x[:, -1:]))

    def bytes_read(self, position: int) -> int:
        """Returns how many bytes a step at a position has to read: all matrices, and what the caches are filled with.

        Of the embedding it reads a row a text.
        """
        matrices = [*self.layers, self.norm, self.head]
        caches = [cache for layer in self.layers for cache in (layer.keys, layer.values)]
        total = sum(t.nbytes for m in matrices for t in (*m.parameters(), *m.buffers()))
        unread = sum(cache.nbytes // cache.shape[2] * (cache.shape[2] - position - 1) for cache in caches)
        return int(total - unread)
