"""Products, projections, attention and embeddings, as language models have them."""

from __future__ import annotations

from math import prod
from typing import Any

from fusegraph.bench.sweep.draw import Case, Draw, Operand, behind, checked, in_front, times

#: Sizes of vocabularies.
VOCABULARIES = (50257, 32000, 50272, 30522, 32128, 128256)


def matmul(draw: Draw) -> Case:
    batch = draw.one((), (), (), (draw.size(2, 64),), (draw.one(1, 2, 4, 8), draw.one(8, 12, 16)))
    m, n, k = draw.size(1, 16384), draw.size(8, 16384), draw.size(8, 16384)
    if draw.chance(0.1):
        m = draw.one(1, 2, 4, 8, 16)
    if draw.chance(0.07):
        n = draw.one(*VOCABULARIES)
    if batch:
        m, n, k = min(m, 2048), min(n, 2048), min(k, 2048)
    shared = bool(batch) and draw.chance(0.3)
    a, b = (*batch, m, k), (k, n) if shared or not batch else (*batch, k, n)
    orders = [(*range(len(s) - 2), len(s) - 1, len(s) - 2) if draw.chance(p) else () for s, p in ((a, 0.15), (b, 0.6))]
    front, back = in_front(draw, a, -1), behind(draw, (*batch, m, n), -1)

    def run(x: Any, w: Any, *more: Any) -> Any:
        rest = list(more)
        return back.function(front.function(x, rest) @ w, rest)

    letters = "".join("t" if o else "n" for o in orders)
    return draw.made(
        f"{front.name}matmul{back.name} {times(a)} @ {times(b)} {letters}",
        run,
        (Operand(a, orders[0]), Operand(b, orders[1], scale=k**-0.5), *front.operands, *back.operands),
        2.0 * prod(batch) * m * n * k,
    )


def projections(draw: Draw) -> Case:
    """Draws several products of one input: queries, keys and values, or the two halves of a gated MLP, often of the
    input's norm.
    """
    import torch.nn.functional as f

    batch, length = draw.one(1, 1, 2, 8, 32), draw.one(1, 128, 197, 512, 1024, 2048, draw.size(16, 4096))
    depth, heads = draw.one(32, 64, 64, 64, 96, 128), draw.one(4, 8, 12, 16, 32)
    width = depth * heads
    kind = draw.one("qkv", "swiglu", "geglu")
    shares = draw.one(*(n for n in (1, 1, 2, 4, 8) if heads % n == 0))
    inner = draw.one(width * 4, width * 8 // 3 // 64 * 64, draw.size(256, 14336))
    sizes = (width, width // shares, width // shares) if kind == "qkv" else (inner, inner)
    norm, biased = draw.chance(0.4), draw.chance(0.4)
    checked((batch, length, width), *((width, n) for n in sizes), *((batch, length, n) for n in sizes))
    operands = [Operand((batch, length, width))]
    operands += [Operand((width,))] if norm else []
    for n in sizes:
        operands.append(Operand((n, width), scale=width**-0.5))
        operands += [Operand((n,))] if biased else []

    def run(x: Any, *more: Any) -> Any:
        rest = list(more)
        x = f.rms_norm(x, (width,), rest.pop(0)) if norm else x
        made = [f.linear(x, rest.pop(0), rest.pop(0) if biased else None) for _ in sizes]
        if kind == "qkv":
            return tuple(y.view(batch, length, -1, depth).transpose(1, 2) for y in made)
        return (f.silu if kind == "swiglu" else f.gelu)(made[0]) * made[1]

    text = f"{'rms_norm+' if norm else ''}projections {kind}{'+bias' if biased else ''} {batch}x{length}x{width}"
    return draw.made(f"{text} to {times(sizes)}", run, operands, 2.0 * batch * length * width * sum(sizes))


def attention(draw: Draw) -> Case:
    import torch.nn.functional as f

    depth = draw.weighted({32: 2, 40: 1, 48: 1, 64: 8, 72: 1, 80: 2, 96: 2, 128: 8, 160: 1, 192: 1, 256: 1})
    heads = draw.one(4, 6, 8, 12, 16, 32)
    shares = draw.one(*(n for n in (1, 1, 1, 2, 4, 8) if heads % n == 0))
    batch, rows = draw.one(1, 2, 4, 8, 16, 32), draw.size(1, 4096)
    written = draw.chance(0.3)
    if written:
        shares = 1
        if draw.chance(0.4):  # windows of an image
            batch, rows, depth = draw.one(64, 256, 1024, 4096), draw.one(49, 64), 32
    cross = not written and draw.chance(0.2)
    keys = draw.size(16, 4096) if cross else rows
    if not written and draw.chance(0.1):
        rows, keys = 1, draw.size(64, 8192)
    mask = draw.weighted({"": 5, "causal": 5, "bias": 2, "padding": 2})
    if mask == "causal" and (cross or rows != keys):
        mask = ""
    turned = draw.chance(0.6)
    order = (0, 2, 1, 3) if turned else ()
    operands = [
        Operand((batch, n, size, depth), order)
        for n, size in ((heads, rows), (heads // shares, keys), (heads // shares, keys))
    ]
    if mask in ("bias", "padding"):
        operands.append(Operand((1, heads if written else 1, rows, keys) if mask == "bias" else (batch, 1, 1, keys)))
    checked(*(o.shape for o in operands), *([(batch, heads, rows, keys)] if written else []))

    def run(q: Any, k: Any, v: Any, *bias: Any) -> Any:
        if written:
            y = _written(q * depth**-0.5, k, v, bias[0] if bias else None, causal=mask == "causal")
        else:
            y = f.scaled_dot_product_attention(
                q, k, v, bias[0] if bias else None, is_causal=mask == "causal", enable_gqa=shares > 1
            )
        return y.transpose(1, 2).reshape(batch, rows, heads * depth) if turned else y

    sizes = f"b{batch} h{heads}{f'/{heads // shares}' if shares > 1 else ''} {rows}x{keys} d{depth}"
    text = f"attention {'written out ' if written else ''}{mask + ' ' if mask else ''}{sizes}"
    operations = 4.0 * batch * heads * rows * keys * depth
    return draw.made(f"{text}{' BSHD' if turned else ''}", run, operands, operations)


def _written(q: Any, k: Any, v: Any, bias: Any, *, causal: bool) -> Any:
    """Returns attention as a model writes it that does not use torch's own."""
    import torch

    scores = q @ k.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v


def rotary(draw: Draw) -> Case:
    """Draws the turning of queries by their positions, as halves that change places."""
    import torch

    batch, heads, depth = draw.one(1, 2, 8), draw.one(4, 8, 12, 32), draw.one(64, 80, 128)
    length = draw.one(1, 128, 1024, 2048, draw.size(16, 4096))
    shape, turned = (batch, heads, length, depth), draw.chance(0.7)
    checked(shape, shape)

    def run(x: Any, cos: Any, sin: Any) -> Any:
        half = depth // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    operands = (Operand(shape, (0, 2, 1, 3) if turned else ()), Operand((length, depth)), Operand((length, depth)))
    return draw.made(f"rotary {times(shape)}{' BSHD' if turned else ''}", run, operands)


def embedding(draw: Draw) -> Case:
    import torch.nn.functional as f

    rows, width = draw.one(512, *VOCABULARIES), draw.size(64, 4096)
    batch, length = draw.one(1, 2, 8, 32), draw.size(16, 2048)
    checked((rows, width), (batch, length, width))
    several, norm = draw.chance(0.5), draw.one("", "layer_norm", "layer_norm", "rms_norm")
    operands = [Operand((batch, length), below=rows), Operand((rows, width))]
    operands += [Operand((length, width))] if several else []
    operands += [Operand((width,))] if norm else []
    operands += [Operand((width,))] if norm == "layer_norm" else []

    def run(ids: Any, table: Any, *more: Any) -> Any:
        rest = list(more)
        y = f.embedding(ids, table)
        y = y + rest.pop(0) if several else y
        if norm == "rms_norm":
            return f.rms_norm(y, (width,), rest[0])
        return f.layer_norm(y, (width,), *rest) if norm else y

    text = f"embedding{'+embedding' if several else ''}{f'+{norm}' if norm else ''}"
    return draw.made(f"{text} {batch}x{length} of {rows}x{width}", run, operands)
