"""The cases of a sweep, drawn from distributions that look like the layers of real networks.

A case is torch code over tensors of drawn sizes: a convolution, product, reduction, norm, softmax, pooling, movement,
embedding or attention, with something in front of it and behind it as often as networks have that.  The same seed and
number give the same case, whatever the others are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from random import Random
from typing import Any

from fusegraph.bench.sweep.convolutions import conv, conv_backward, conv_transposed
from fusegraph.bench.sweep.draw import (
    DTYPES,
    MOST_BYTES,
    MOST_OPERATIONS,
    Case,
    Draw,
    Operand,
    Refused,
    activation,
    surroundings,
    times,
)


def case(seed: int, number: int, kinds: Sequence[str] = (), dtypes: Sequence[str] = ()) -> Case:
    """Returns the case of a seed and a number; of some kinds (keys of `KINDS`) and dtypes, if given."""
    rng = Random(f"{seed} {number}")
    names = list(kinds or KINDS)
    weights = [KINDS[name][0] for name in names]
    kind = rng.choices(names, weights)[0]
    dtype = rng.choice(list(dtypes or DTYPES))
    while True:
        try:
            made = KINDS[kind][1](Draw(rng, dtype))
        except Refused:
            continue
        size = sum(prod(o.shape) * (8 if o.below else 2 if "16" in dtype else 4) for o in made.operands)
        if size <= MOST_BYTES and made.operations <= MOST_OPERATIONS:
            return made


def _matmul(draw: Draw) -> Case:
    batch = draw.one((), (), (), (draw.size(2, 64),), (draw.one(1, 2, 4, 8), draw.one(8, 12, 16)))
    m, n, k = draw.size(1, 16384), draw.size(8, 16384), draw.size(8, 16384)
    if draw.chance(0.1):
        m = draw.one(1, 2, 4, 8, 16)
    if draw.chance(0.07):
        n = draw.one(50257, 32000, 50272, 30522, 32128)
    if batch:
        m, n, k = min(m, 2048), min(n, 2048), min(k, 2048)
    shared = bool(batch) and draw.chance(0.3)
    a, b = (*batch, m, k), (k, n) if shared or not batch else (*batch, k, n)
    orders = [(*range(len(s) - 2), len(s) - 1, len(s) - 2) if draw.chance(p) else () for s, p in ((a, 0.15), (b, 0.6))]
    around = surroundings(draw, a, (*batch, m, n), -1, ())

    def run(x: Any, w: Any, *more: Any) -> Any:
        rest = list(more)
        return around.back(around.front(x, rest) @ w, rest)

    letters = "".join("t" if o else "n" for o in orders)
    return draw.made(
        f"{around.before}matmul{around.after} {times(a)} @ {times(b)} {letters}",
        run,
        (Operand(a, orders[0]), Operand(b, orders[1], scale=k**-0.5), *around.operands),
        2.0 * prod(batch) * m * n * k,
    )


def _shape(draw: Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draws a shape, and how it lies in memory: rows of a language model, or images."""
    if draw.chance(0.5):
        return (draw.one(1, 2, 8, 32), draw.size(16, 4096), draw.size(32, 16384)), ()
    side = draw.one(7, 14, 28, 56, 112)
    return (draw.one(1, 8, 32, 64), draw.size(8, 1024), side, side), (0, 2, 3, 1) if draw.chance(0.5) else ()


def _checked(*shapes: tuple[int, ...]) -> None:
    if sum(map(prod, shapes)) > MOST_BYTES // 4:
        raise Refused


def _reduction(draw: Draw) -> Case:
    shape, order = _shape(draw)
    _checked(shape)
    count = len(shape)
    axes = draw.one(
        (-1,), (count - 2, count - 1), (0,), tuple(d for d in range(count) if d != 1), (1,), tuple(range(count))
    )
    op = draw.one("sum", "mean", "amax", "var")
    around = surroundings(draw, shape, shape, -1 if count == 3 else 1, order)

    def run(x: Any, *more: Any) -> Any:
        x = around.front(x, list(more))
        return getattr(x, op)(dim=axes, keepdim=True)

    return draw.made(
        f"{around.before}{op} {times(shape)} over {','.join(map(str, axes))}{' NHWC' if order else ''}",
        run,
        (Operand(shape, order), *around.operands),
    )


def _norm(draw: Draw) -> Case:
    import torch.nn.functional as f

    shape, order = _shape(draw)
    _checked(shape, shape)
    name, function = activation(draw)
    add, act = draw.chance(0.3), draw.chance(0.4)
    operands = [Operand(shape, order)]
    operands += [Operand(shape, order)] if add else []
    rows = len(shape) == 3
    kind = draw.one("layer_norm", "rms_norm") if rows else draw.one("batch_norm", "group_norm", "instance_norm")
    width = (shape[-1] if rows else shape[1],)
    groups = draw.one(*(g for g in (1, 2, 4, 8, 16, 32) if width[0] % g == 0))
    operands += [Operand(width), Operand(width)]

    def run(x: Any, *more: Any) -> Any:
        rest = list(more)
        if add:
            x = x + rest.pop(0)
        weight, bias = rest
        y = {
            "layer_norm": lambda: f.layer_norm(x, width, weight, bias),
            "rms_norm": lambda: f.rms_norm(x, width, weight),
            "batch_norm": lambda: f.batch_norm(x, None, None, weight, bias, training=True),
            "group_norm": lambda: f.group_norm(x, groups, weight, bias),
            "instance_norm": lambda: f.instance_norm(x, weight=weight, bias=bias),
        }[kind]()
        return function(y) if act else y

    text = f"{'add+' if add else ''}{kind}{f'+{name}' if act else ''}"
    return draw.made(f"{text} {times(shape)}{' NHWC' if order else ''}", run, operands)


def _softmax(draw: Draw) -> Case:
    shape = draw.one(
        (draw.size(64, 16384), draw.size(8, 65536)),
        (draw.one(1, 4), draw.one(8, 12, 16), draw.size(16, 2048), draw.size(16, 2048)),
    )
    _checked(shape)
    axis = -1 if draw.chance(0.85) else -2
    log_ = draw.chance(0.25)
    masked = draw.chance(0.3)
    operands = [Operand(shape), *([Operand(shape[-2:])] if masked else [])]

    def run(x: Any, *mask: Any) -> Any:
        x = x * 0.125 + mask[0] if masked else x
        return x.log_softmax(axis) if log_ else x.softmax(axis)

    return draw.made(
        f"{'scale+mask+' if masked else ''}{'log_' if log_ else ''}softmax {times(shape)} over {axis}", run, operands
    )


def _pool(draw: Draw) -> Case:
    import torch.nn.functional as f

    side = draw.one(7, 14, 28, 56, 112, 224)
    shape = (draw.one(1, 8, 32, 64), draw.size(8, 1024), side, side)
    _checked(shape)
    order = (0, 2, 3, 1) if draw.chance(0.5) else ()
    kind = draw.one("max", "avg", "adaptive")
    window, stride = draw.one((2, 2), (3, 2), (3, 1), (5, 1))
    out = draw.one(1, 1, 2, 7)
    around = surroundings(draw, shape, shape, 1, order)

    def run(x: Any, *more: Any) -> Any:
        x = around.front(x, list(more))
        if kind == "adaptive":
            return f.adaptive_avg_pool2d(x, min(out, side))
        return (f.max_pool2d if kind == "max" else f.avg_pool2d)(x, window, stride, window // 2)

    text = f"adaptive_avg_pool to {out}" if kind == "adaptive" else f"{kind}_pool {window} s{stride}"
    return draw.made(
        f"{around.before}{text} {times(shape)}{' NHWC' if order else ''}",
        run,
        (Operand(shape, order), *around.operands),
    )


def _movement(draw: Draw) -> Case:
    """Draws concatenations, slices, shuffles and transposes in front of something that computes."""
    import torch

    shape, order = _shape(draw)
    _checked(shape, shape, shape)
    kind = draw.one("concatenate", "halves", "transpose", "shift", "pad")
    name, function = activation(draw)
    operands = [Operand(shape, order)] * (draw.one(2, 3) if kind == "concatenate" else 1)
    width = shape[-1]

    def run(x: Any, *more: Any) -> Any:
        if kind == "concatenate":
            y = torch.cat((x, *more), 1)
        elif kind == "halves":
            y = x[..., : width // 2] * x[..., width - width // 2 :]
        elif kind == "transpose":
            y = x.transpose(1, 2).contiguous()
        elif kind == "shift":
            y = torch.roll(x, (width // 3,), (-1,))
        else:
            y = torch.nn.functional.pad(x, (1, 1, 2, 2))
        return function(y)

    return draw.made(f"{kind}+{name} {times(shape)}{' NHWC' if order else ''}", run, operands)


def _embedding(draw: Draw) -> Case:
    import torch.nn.functional as f

    rows, width = draw.one(512, 30522, 32000, 50257), draw.size(64, 4096)
    batch, length = draw.one(1, 2, 8, 32), draw.size(16, 2048)
    _checked((rows, width), (batch, length, width))
    several, norm = draw.chance(0.5), draw.chance(0.6)
    operands = [
        Operand((batch, length), below=rows),
        Operand((rows, width)),
        Operand((length, width)),
        Operand((width,)),
        Operand((width,)),
    ]

    def run(ids: Any, table: Any, places: Any, weight: Any, bias: Any) -> Any:
        y = f.embedding(ids, table)
        y = y + places if several else y
        return f.layer_norm(y, (width,), weight, bias) if norm else y

    text = f"embedding{'+embedding' if several else ''}{'+layer_norm' if norm else ''}"
    return draw.made(f"{text} {batch}x{length} of {rows}x{width}", run, operands)


def _attention(draw: Draw) -> Case:
    import torch
    import torch.nn.functional as f

    depth = draw.rng.choices((32, 40, 48, 64, 72, 80, 96, 128, 160, 192, 256), (2, 1, 1, 8, 1, 2, 2, 8, 1, 1, 1))[0]
    heads = draw.one(4, 6, 8, 12, 16, 32)
    shares = draw.one(*(n for n in (1, 1, 1, 2, 4, 8) if heads % n == 0))
    batch, rows = draw.one(1, 2, 4, 8, 16, 32), draw.size(1, 4096)
    cross = draw.chance(0.2)
    keys = draw.size(16, 4096) if cross else rows
    if draw.chance(0.1):
        rows, keys = 1, draw.size(64, 8192)
    mask = draw.rng.choices(("", "causal", "bias"), (5, 5, 2))[0]
    if mask == "causal" and (cross or rows != keys):
        mask = ""
    operations = 4.0 * batch * heads * rows * keys * depth
    turned = draw.chance(0.6)
    order = (0, 2, 1, 3) if turned else ()
    operands = [
        Operand((batch, n, size, depth), order)
        for n, size in ((heads, rows), (heads // shares, keys), (heads // shares, keys))
    ]
    operands += [Operand((1, 1, rows, keys))] if mask == "bias" else []
    _checked(*(o.shape for o in operands))

    def run(q: Any, k: Any, v: Any, *bias: Any) -> Any:
        y = f.scaled_dot_product_attention(
            q, k, v, bias[0] if bias else None, is_causal=mask == "causal", enable_gqa=shares > 1
        )
        return y.transpose(1, 2).reshape(batch, rows, heads * depth) if turned else y

    del torch
    sizes = f"b{batch} h{heads}{f'/{heads // shares}' if shares > 1 else ''} {rows}x{keys} d{depth}"
    return draw.made(
        f"attention {mask + ' ' if mask else ''}{sizes}{' BSHD' if turned else ''}", run, operands, operations
    )


#: kind -> how often it is drawn, and what draws it.
KINDS: dict[str, tuple[float, Callable[[Draw], Case]]] = {
    "conv": (24, conv),
    "conv_transposed": (5, conv_transposed),
    "conv_backward": (12, conv_backward),
    "matmul": (20, _matmul),
    "reduction": (8, _reduction),
    "norm": (9, _norm),
    "softmax": (4, _softmax),
    "pool": (4, _pool),
    "movement": (5, _movement),
    "embedding": (3, _embedding),
    "attention": (8, _attention),
}
