"""Weights of few bits as programs of torch write them, each with the same weight in float64.

A case is the function of an input and of buffers, these buffers, and the weight (columns, terms) that they mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

F = torch.nn.functional
#: Columns, terms, and terms of a group.
N, K, G = 64, 96, 32


@dataclass(frozen=True)
class Weight:
    """A way to write a product: of the input and buffers, these, and what they mean."""

    product: Callable[..., Any]
    buffers: dict[str, Any]
    meant: Callable[..., Any]


def _seeded(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


def integers(dtype: Any, *shape: int, least: int | None = None, most: int | None = None) -> Any:
    info = torch.iinfo(dtype)
    low, high = info.min if least is None else least, info.max if most is None else most
    return torch.randint(low, high + 1, shape, generator=_seeded(sum(shape)), dtype=torch.int64).to(dtype)


def scales(*shape: int) -> Any:
    """Scales that bfloat16 holds, so that what is multiplied by them is rounded once."""
    return (torch.rand(shape, generator=_seeded(len(shape))) * 0.1 + 0.01).bfloat16()


def floats(*shape: int) -> Any:
    return torch.randn(shape, generator=_seeded(sum(shape))).to(torch.float8_e4m3fn)


def in_groups(w: Any, s: Any, z: Any = 0.0) -> Any:
    """The weight in float64: numbers (columns, terms), scales and zero points (columns, groups)."""
    rows = w.shape[0]
    z = z.double()[..., None] if isinstance(z, torch.Tensor) else z
    return ((w.double().reshape(rows, s.shape[1], -1) - z) * s.double()[..., None]).reshape(rows, -1)


# ---- 8 bits

_BYTES = integers(torch.int8, N, K)
EIGHT: dict[str, Weight] = {
    "scales behind the product": Weight(
        lambda x, w, s: F.linear(x, w.to(x.dtype)) * s,
        {"w": _BYTES, "s": scales(N)},
        lambda w, s: w.double() * s.double()[:, None],
    ),
    "scales of rows": Weight(
        lambda x, w, s: x @ (w.to(x.dtype) * s[:, None]).t(),
        {"w": _BYTES, "s": scales(N)},
        lambda w, s: w.double() * s.double()[:, None],
    ),
    "the other way around": Weight(
        lambda x, w, s: x @ (w.to(x.dtype) * s),
        {"w": _BYTES.t().contiguous(), "s": scales(1, N)},
        lambda w, s: (w.double() * s.double()).t(),
    ),
    "groups": Weight(
        lambda x, w, s: F.linear(x, (w.to(x.dtype).view(N, -1, G) * s[..., None]).view(N, K)),
        {"w": _BYTES, "s": scales(N, K // G)},
        in_groups,
    ),
    "groups, repeated scales": Weight(
        lambda x, w, s: F.linear(x, w.to(x.dtype) * s.repeat_interleave(G, 1)),
        {"w": _BYTES, "s": scales(N, K // G)},
        in_groups,
    ),
    "groups with zero points, in float32": Weight(
        lambda x, w, s, z: F.linear(
            x, ((w.float().view(N, -1, G) - z.float()[..., None]) * s.float()[..., None]).view(N, K).to(x.dtype)
        ),
        {"w": _BYTES, "s": scales(N, K // G), "z": integers(torch.int8, N, K // G)},
        in_groups,
    ),
    "8-bit floats": Weight(
        lambda x, w, s: F.linear(x, w.to(x.dtype) * s[:, None]),
        {"w": floats(N, K), "s": scales(N)},
        lambda w, s: w.double() * s.double()[:, None],
    ),
    "8-bit floats in blocks": Weight(
        lambda x, w, s: F.linear(
            x, (w.float() * s.float().repeat_interleave(32, 0).repeat_interleave(32, 1)).to(x.dtype)
        ),
        {"w": floats(N, K), "s": scales(N // 32, K // 32)},
        lambda w, s: w.double() * s.double().repeat_interleave(32, 0).repeat_interleave(32, 1),
    ),
    "_weight_int8pack_mm": Weight(
        lambda x, w, s: torch._weight_int8pack_mm(x, w, s.to(x.dtype)),
        {"w": _BYTES, "s": scales(N)},
        lambda w, s: w.double() * s.double()[:, None],
    ),
}

# ---- fewer bits


def _nibbles(p: Any) -> Any:
    """Two numbers of each byte, the low bits first: (..., 2)."""
    wide = p.to(torch.int64)
    return torch.stack([wide % 16, wide // 16 % 16], -1)


def _words(q: Any) -> Any:
    """Eight numbers of each word of 32 bits, the low bits first: (..., 8)."""
    wide = q.to(torch.int64) % 2**32
    return torch.stack([wide // 16**k % 16 for k in range(8)], -1)


def _strided(x: Any, p: Any, s: Any) -> Any:
    w = torch.empty(N, K, dtype=torch.uint8)
    w[:, ::2], w[:, 1::2] = p & 15, p >> 4
    return F.linear(x, (w.to(x.dtype) - 8) * s)


def _quarters(x: Any, p: Any, s: Any, z: Any) -> Any:
    """As HQQ unpacks numbers of 2 bits: group by group, with the highest bits in front."""
    w = torch.empty(4 * len(p), G, dtype=x.dtype)
    for k in range(4):
        w[k * len(p) : (k + 1) * len(p)] = (p & (3 << (6 - 2 * k))) >> (6 - 2 * k)
    return F.linear(x, ((w - z) * s).reshape(N, K))


def _gptq(x: Any, q: Any, zeros: Any, s: Any) -> Any:
    """As GPTQ's layers compute it: words along the terms, zero points along the columns, one less than they are."""
    places = torch.arange(0, 32, 4, dtype=torch.int32)
    z = torch.bitwise_right_shift(zeros.unsqueeze(2).expand(-1, -1, 8), places.view(1, 1, 8)).to(torch.int16)
    z = torch.bitwise_and(z, 15).reshape(K // G, 1, N) + 1
    w = torch.bitwise_right_shift(q.unsqueeze(1).expand(-1, 8, -1), places.view(1, 8, 1)).to(torch.int16)
    w = torch.bitwise_and(w, 15).reshape(K // G, G, N)
    return x @ (s.view(K // G, 1, N) * (w - z)).reshape(K, N)


def _meant_by_gptq(q: Any, zeros: Any, s: Any) -> Any:
    w, z = _words(q).transpose(1, 2).reshape(K, N), _words(zeros).reshape(K // G, N) + 1
    return in_groups(w.t(), s.t(), z.t())


def _of_blocks(w: Any, pairs: Any) -> Any:
    """The weight of numbers 0 to 15 (columns, terms), and pairs (groups, columns, 2), as tinygemm means them."""
    s, z = (pairs[..., k].double().t()[..., None] for k in range(2))
    return ((w.double().reshape(N, K // G, G) - 8) * s + z).reshape(N, K)


def _of_tiles(packed: Any, pairs: Any) -> Any:
    """Element by element, as torch's `matrix_to_m16n8k16_Bint4_layout` packs a weight for tensor cores."""
    w, words = torch.zeros(N, K), _words(packed)
    for tile, block, lane in product(range(N // 8), range(K // 32), range(32)):
        first = block * 32 + lane % 4 * 2
        terms = [first + 16 * (k // 4) + 8 * (k // 2 % 2) + k % 2 for k in range(8)]
        for place, k in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            w[tile * 8 + lane // 4, terms[k]] = words[tile, block, lane, 0, place]
    return _of_blocks(w, pairs)


_HALF, _ROW = integers(torch.uint8, N, K // 2), scales(N, 1)
_NUMBERS = integers(torch.int32, N, K, least=0, most=15)
_PAIRS = torch.stack([scales(K // G, N), scales(K // G, N) - 0.05], -1)
FEW: dict[str, Weight] = {
    "stacked": Weight(
        lambda x, p, s: F.linear(x, (torch.stack([p & 15, p >> 4], -1).reshape(N, K).to(x.dtype) - 8) * s),
        {"p": _HALF, "s": _ROW},
        lambda p, s: (_nibbles(p).reshape(N, K).double() - 8) * s.double(),
    ),
    "stacked, the high bits first, groups with zero points": Weight(
        lambda x, p, s, z: F.linear(
            x, ((torch.stack([p >> 4, p & 15], -1).view(N, -1, G).to(x.dtype) - z[..., None]) * s[..., None]).view(N, K)
        ),
        {"p": _HALF, "s": scales(N, K // G), "z": integers(torch.uint8, N, K // G, most=15)},
        lambda p, s, z: in_groups(_nibbles(p).flip(-1).reshape(N, K), s, z),
    ),
    "signed": Weight(
        lambda x, p, s: F.linear(x, torch.stack([(p << 4) >> 4, p >> 4], -1).reshape(N, K).to(x.dtype) * s),
        {"p": _HALF.view(torch.int8), "s": _ROW},
        lambda p, s: ((_nibbles(p.view(torch.uint8)).reshape(N, K) + 8) % 16 - 8).double() * s.double(),
    ),
    "halves of the terms": Weight(
        lambda x, p, s: F.linear(x, (torch.cat([p & 15, p >> 4], -1).to(x.dtype) - 8) * s),
        {"p": _HALF, "s": _ROW},
        lambda p, s: (_nibbles(p).transpose(1, 2).reshape(N, K).double() - 8) * s.double(),
    ),
    "halves of the columns": Weight(
        lambda x, p, s: F.linear(x, (torch.cat([p & 15, p >> 4]).to(x.dtype) - 8) * s),
        {"p": integers(torch.uint8, N // 2, K), "s": _ROW},
        lambda p, s: (_nibbles(p).permute(2, 0, 1).reshape(N, K).double() - 8) * s.double(),
    ),
    "every second element": Weight(
        _strided, {"p": _HALF, "s": _ROW}, lambda p, s: (_nibbles(p).reshape(N, K).double() - 8) * s.double()
    ),
    "quarters": Weight(
        _quarters,
        {"p": integers(torch.uint8, N * K // G // 4, G), "s": scales(N * K // G, 1), "z": scales(N * K // G, 1)},
        lambda p, s, z: (
            (torch.cat([p // 4 ** (3 - k) % 4 for k in range(4)]).double() - z.double()) * s.double()
        ).reshape(N, K),
    ),
    "words of GPTQ": Weight(
        _gptq,
        {
            "q": integers(torch.int32, K // 8, N),
            "zeros": integers(torch.int32, K // G, N // 8),
            "s": scales(K // G, N),
        },
        _meant_by_gptq,
    ),
    "_weight_int4pack_mm": Weight(
        lambda x, p, s: torch.ops.aten._weight_int4pack_mm(x, p, G, s),
        {"p": integers(torch.int32, N // 8, K // 32, 32, 1), "s": _PAIRS},
        _of_tiles,
    ),
    "_weight_int4pack_mm_for_cpu": Weight(
        lambda x, p, s, w: torch.ops.aten._weight_int4pack_mm_for_cpu(x, p, G, s),
        {"p": torch._convert_weight_to_int4pack_for_cpu(_NUMBERS, 2), "s": _PAIRS, "w": _NUMBERS},
        lambda p, s, w: _of_blocks(w, s),
    ),
}


# ---- numbers in another order

_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


def _awq(x: Any, q: Any, zeros: Any, s: Any) -> Any:
    """As AWQ's layers compute it: words along the columns, whose numbers an index puts in order."""
    places = torch.arange(0, 32, 4, dtype=torch.int32)
    w = torch.bitwise_right_shift(q[:, :, None], places[None, None, :]).to(torch.int8).view(K, -1)
    z = torch.bitwise_right_shift(zeros[:, :, None], places[None, None, :]).to(torch.int8).view(K // G, -1)
    order = torch.arange(N, dtype=torch.int32).view(-1, 8)[:, _ORDER].view(-1)
    w, z = w[:, order] & 15, z[:, order] & 15
    return x @ ((w - z.repeat_interleave(G, 0)) * s.repeat_interleave(G, 0))


def _meant_by_awq(q: Any, zeros: Any, s: Any) -> Any:
    w, z = (_words(t)[..., _ORDER].reshape(len(t), N) for t in (q, zeros))
    return in_groups(w.t(), s.t(), z.t())


ORDERED: dict[str, Weight] = {
    "words of AWQ": Weight(
        _awq,
        {
            "q": integers(torch.int32, K, N // 8),
            "zeros": integers(torch.int32, K // G, N // 8),
            "s": scales(K // G, N),
        },
        _meant_by_awq,
    )
}
