"""The cases of a sweep, drawn from distributions that look like the layers of real networks.

A case is torch code over tensors of drawn sizes: a convolution, product, reduction, norm, softmax, pooling, movement,
embedding or attention, with something in front of it and behind it as often as networks have that.  The same seed and
number give the same case, whatever the others are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, prod
from random import Random
from typing import Any

#: Case bounds: bytes of all operands and of the result, and operations, so that a case takes a few milliseconds.
MOST_BYTES, MOST_OPERATIONS = 1 << 29, 4e11
#: What float32 products are computed in: tf32 where torch is told to allow it.
DTYPES = ("bfloat16", "float16", "float32", "tf32")


@dataclass(frozen=True)
class Operand:
    """An operand: its shape, how it lies in memory, and its values where they are not from a normal distribution.

    order   dimensions from the slowest to the fastest in memory; empty: as they are.
    below   int64 values from 0 up to it; 0: floats.
    scale   of normal values.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    below: int = 0
    scale: float = 1.0


@dataclass(frozen=True)
class Case:
    """A case: what it is called, its dtype (one of `DTYPES`), its operands, and the function of torch tensors.

    operations  multiply-adds counted twice.
    """

    name: str
    dtype: str
    operands: tuple[Operand, ...]
    function: Callable[..., Any]
    operations: float = 0.0


class _Refused(Exception):
    """What was drawn is too large, or no such layer exists: draw again."""


def case(seed: int, number: int, kinds: Sequence[str] = (), dtypes: Sequence[str] = ()) -> Case:
    """Returns the case of a seed and a number; of some kinds (keys of `KINDS`) and dtypes, if given."""
    rng = Random(f"{seed} {number}")
    names = list(kinds or KINDS)
    weights = [KINDS[name][0] for name in names]
    kind = rng.choices(names, weights)[0]
    dtype = rng.choice(list(dtypes or DTYPES))
    while True:
        try:
            made = KINDS[kind][1](_Draw(rng, dtype))
        except _Refused:
            continue
        size = sum(prod(o.shape) * (8 if o.below else 2 if "16" in dtype else 4) for o in made.operands)
        if size <= MOST_BYTES and made.operations <= MOST_OPERATIONS:
            return made


class _Draw:
    """Draws sizes; a dtype."""

    def __init__(self, rng: Random, dtype: str) -> None:
        self.rng, self.dtype = rng, dtype

    def size(self, low: int, high: int) -> int:
        """Returns an integer whose logarithm is uniform: mostly a multiple of 8, sometimes any."""
        value = round(exp(self.rng.uniform(log(low), log(high))))
        if value > 8 and self.rng.random() < 0.75:
            unit = self.rng.choice((8, 8, 16, 32, 64))
            value = max(unit, round(value / unit) * unit)
        return min(max(value, low), high)

    def one(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def made(
        self, name: str, function: Callable[..., Any], operands: Sequence[Operand], operations: float = 0.0
    ) -> Case:
        return Case(f"{name} {self.dtype}", self.dtype, tuple(operands), function, operations)


def _activation(draw: _Draw) -> tuple[str, Callable[[Any], Any]]:
    import torch.nn.functional as f

    every: dict[str, Callable[[Any], Any]] = {
        "relu": f.relu,
        "gelu": f.gelu,
        "silu": f.silu,
        "hardswish": f.hardswish,
        "sigmoid": lambda x: x.sigmoid(),
        "relu6": lambda x: x.clamp(0, 6),
        "tanh": lambda x: x.tanh(),
        "leaky_relu": lambda x: f.leaky_relu(x, 0.1),
    }
    name = draw.one(*every)
    return name, every[name]


@dataclass
class _Around:
    """What is in front of a layer and behind it: names, operands, and functions that take what is left of a list."""

    before: str = ""
    after: str = ""
    front: Callable[[Any, list[Any]], Any] = lambda x, _: x
    back: Callable[[Any, list[Any]], Any] = lambda y, _: y
    operands: tuple[Operand, ...] = ()

    @property
    def names(self) -> str:
        return f"{self.before}{self.after}"


def _alone(function: Callable[[Any], Any]) -> Callable[[Any, list[Any]], Any]:
    """Returns the function as a step that takes no further operand."""
    return lambda x, _: function(x)


def _around(
    draw: _Draw, shape: tuple[int, ...], result: tuple[int, ...], channel: int, order: tuple[int, ...]
) -> _Around:
    """Draws a prologue for an operand of a shape and an epilogue for a result, whose channels are dimension
    ``channel``.
    """
    front: list[Callable[[Any, list[Any]], Any]] = []
    back: list[Callable[[Any, list[Any]], Any]] = []
    before = after = ""
    first: list[Operand] = []
    second: list[Operand] = []

    def per_channel(sizes: tuple[int, ...]) -> Operand:
        return Operand(tuple(n if d == channel % len(sizes) else 1 for d, n in enumerate(sizes)))

    if draw.chance(0.15):
        before += "affine+"
        first += [per_channel(shape), per_channel(shape)]
        front.append(lambda x, more: x * more.pop(0) + more.pop(0))
    if draw.chance(0.2):
        name, function = _activation(draw)
        before += f"{name}+"
        front.append(_alone(function))
    if draw.chance(0.5):
        after += "+bias"
        second.append(per_channel(result))
        back.append(lambda y, more: y + more.pop(0))
    if draw.chance(0.15):
        after += "+scale"
        second.append(per_channel(result))
        back.append(lambda y, more: y * more.pop(0))
    if draw.chance(0.5):
        name, function = _activation(draw)
        after += f"+{name}"
        back.append(_alone(function))
    if draw.chance(0.25):
        after += "+residual"
        second.append(Operand(result, order))
        back.append(lambda y, more: y + more.pop(0))

    def all_of(steps: list[Callable[[Any, list[Any]], Any]]) -> Callable[[Any, list[Any]], Any]:
        def run(x: Any, more: list[Any]) -> Any:
            for step in steps:
                x = step(x, more)
            return x

        return run

    return _Around(before, after, all_of(front), all_of(back), (*first, *second))


def _times(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


@dataclass(frozen=True)
class _Convolution:
    """Sizes of a convolution."""

    batch: int
    channels: int
    filters: int
    groups: int
    image: tuple[int, ...]
    taps: tuple[int, ...]
    stride: int
    dilation: int
    padding: int
    last: bool
    transposed: bool = False

    @property
    def out(self) -> tuple[int, ...]:
        reach = [self.dilation * (t - 1) for t in self.taps]
        if self.transposed:
            return tuple((n - 1) * self.stride - 2 * self.padding + r + 1 for n, r in zip(self.image, reach))
        return tuple((n + 2 * self.padding - r - 1) // self.stride + 1 for n, r in zip(self.image, reach))

    @property
    def x(self) -> tuple[int, ...]:
        return (self.batch, self.channels, *self.image)

    @property
    def w(self) -> tuple[int, ...]:
        first, second = (self.channels, self.filters) if self.transposed else (self.filters, self.channels)
        return (first, second // self.groups, *self.taps)

    @property
    def y(self) -> tuple[int, ...]:
        return (self.batch, self.filters, *self.out)

    @property
    def order(self) -> tuple[int, ...]:
        """How images lie in memory."""
        rank = len(self.image) + 2
        return (0, *range(2, rank), 1) if self.last else ()

    @property
    def operations(self) -> float:
        images = self.image if self.transposed else self.out
        each = self.channels * self.filters // self.groups * prod(self.taps)
        return 2.0 * self.batch * prod(images) * each

    @property
    def text(self) -> str:
        more = f" g{self.groups}" if self.groups > 1 else ""
        more += f" s{self.stride}" if self.stride > 1 else ""
        more += f" d{self.dilation}" if self.dilation > 1 else ""
        layout = "NHWC" if self.last else "NCHW"
        return f"{_times(self.x)} {self.filters} of {_times(self.taps)}{more} p{self.padding} {layout}"


def _convolution(draw: _Draw, *, transposed: bool = False) -> _Convolution:
    rank = draw.rng.choices((1, 2, 3), (2, 12, 2))[0]
    tap = draw.rng.choices((1, 2, 3, 4, 5, 7, 9, 11), (8, 2, 12, 2, 3, 2, 1, 1))[0]
    if transposed:
        tap = draw.one(2, 3, 4, 5)
    stride = draw.rng.choices((1, 2, 3, 4), (10, 5, 1, 1))[0] if not transposed else draw.one(1, 2, 2, 2)
    dilation = draw.rng.choices((1, 2, 3), (12, 1, 1))[0] if tap > 1 else 1
    side = (
        draw.one(7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 224) if rank == 2 else draw.size(8, 4096 if rank == 1 else 48)
    )
    if draw.chance(0.15):
        side += draw.one(1, 2, 3, 5)
    image = (side,) * rank
    batch = draw.one(1, 1, 2, 4, 8, 16, 32, 64)
    channels, filters = draw.size(3, 1024), draw.size(8, 1024)
    groups = 1
    kind = draw.rng.random()
    if kind < 0.15:
        groups = filters = channels
    elif kind < 0.27:
        width = draw.one(4, 8, 16, 24, 32, 48, 64, 112, 168, 232)
        groups = draw.one(2, 4, 8, 16, 32)
        channels = filters = groups * width
    padding = draw.rng.choices((dilation * (tap - 1) // 2, 0), (5, 1))[0]
    found = _Convolution(
        batch, channels, filters, groups, image, (tap,) * rank, stride, dilation, padding, draw.chance(0.55), transposed
    )
    if min(found.out) < 1 or prod(found.y) > MOST_BYTES // 4:
        raise _Refused
    return found


def _weight(c: _Convolution) -> Operand:
    order = (0, *range(2, len(c.w)), 1) if c.last else ()
    return Operand(c.w, order, scale=(prod(c.w[1:])) ** -0.5)


def _conv(draw: _Draw) -> Case:
    import torch.nn.functional as f

    c = _convolution(draw)
    around = _around(draw, c.x, c.y, 1, c.order)
    function = (f.conv1d, f.conv2d, f.conv3d)[len(c.image) - 1]

    def run(x: Any, w: Any, *more: Any) -> Any:
        rest = list(more)
        y = function(around.front(x, rest), w, None, c.stride, c.padding, c.dilation, c.groups)
        return around.back(y, rest)

    return draw.made(
        f"{around.before}conv{around.after} {c.text}",
        run,
        (Operand(c.x, c.order), _weight(c), *around.operands),
        c.operations,
    )


def _conv_transposed(draw: _Draw) -> Case:
    import torch.nn.functional as f

    c = _convolution(draw, transposed=True)
    around = _around(draw, c.x, c.y, 1, c.order)
    function = (f.conv_transpose1d, f.conv_transpose2d, f.conv_transpose3d)[len(c.image) - 1]

    def run(x: Any, w: Any, *more: Any) -> Any:
        rest = list(more)
        y = function(around.front(x, rest), w, None, c.stride, c.padding, 0, c.groups, c.dilation)
        return around.back(y, rest)

    return draw.made(
        f"{around.before}conv_transpose{around.after} {c.text}",
        run,
        (Operand(c.x, c.order), _weight(c), *around.operands),
        c.operations,
    )


def _conv_backward(draw: _Draw) -> Case:
    import torch

    c = _convolution(draw)
    wanted = draw.one((True, False, False), (False, True, False), (True, True, False))
    rank = len(c.image)

    def run(loss: Any, x: Any, w: Any) -> Any:
        found = torch.ops.aten.convolution_backward(
            loss,
            x,
            w,
            None,
            [c.stride] * rank,
            [c.padding] * rank,
            [c.dilation] * rank,
            False,
            [0] * rank,
            c.groups,
            wanted,
        )
        return tuple(t for t in found if t is not None)

    which = "+".join(name for name, there in zip(("dgrad", "wgrad"), wanted) if there)
    operands = (Operand(c.y, c.order), Operand(c.x, c.order), _weight(c))
    return draw.made(f"{which} {c.text}", run, operands, c.operations * sum(wanted))


def _matmul(draw: _Draw) -> Case:
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
    around = _around(draw, a, (*batch, m, n), -1, ())

    def run(x: Any, w: Any, *more: Any) -> Any:
        rest = list(more)
        return around.back(around.front(x, rest) @ w, rest)

    letters = "".join("t" if o else "n" for o in orders)
    return draw.made(
        f"{around.before}matmul{around.after} {_times(a)} @ {_times(b)} {letters}",
        run,
        (Operand(a, orders[0]), Operand(b, orders[1], scale=k**-0.5), *around.operands),
        2.0 * prod(batch) * m * n * k,
    )


def _shape(draw: _Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draws a shape, and how it lies in memory: rows of a language model, or images."""
    if draw.chance(0.5):
        return (draw.one(1, 2, 8, 32), draw.size(16, 4096), draw.size(32, 16384)), ()
    side = draw.one(7, 14, 28, 56, 112)
    return (draw.one(1, 8, 32, 64), draw.size(8, 1024), side, side), (0, 2, 3, 1) if draw.chance(0.5) else ()


def _checked(*shapes: tuple[int, ...]) -> None:
    if sum(map(prod, shapes)) > MOST_BYTES // 4:
        raise _Refused


def _reduction(draw: _Draw) -> Case:
    shape, order = _shape(draw)
    _checked(shape)
    count = len(shape)
    axes = draw.one(
        (-1,), (count - 2, count - 1), (0,), tuple(d for d in range(count) if d != 1), (1,), tuple(range(count))
    )
    op = draw.one("sum", "mean", "amax", "var")
    around = _around(draw, shape, shape, -1 if count == 3 else 1, order)

    def run(x: Any, *more: Any) -> Any:
        x = around.front(x, list(more))
        return getattr(x, op)(dim=axes, keepdim=True)

    return draw.made(
        f"{around.before}{op} {_times(shape)} over {','.join(map(str, axes))}{' NHWC' if order else ''}",
        run,
        (Operand(shape, order), *around.operands),
    )


def _norm(draw: _Draw) -> Case:
    import torch.nn.functional as f

    shape, order = _shape(draw)
    _checked(shape, shape)
    name, function = _activation(draw)
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
    return draw.made(f"{text} {_times(shape)}{' NHWC' if order else ''}", run, operands)


def _softmax(draw: _Draw) -> Case:
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
        f"{'scale+mask+' if masked else ''}{'log_' if log_ else ''}softmax {_times(shape)} over {axis}", run, operands
    )


def _pool(draw: _Draw) -> Case:
    import torch.nn.functional as f

    side = draw.one(7, 14, 28, 56, 112, 224)
    shape = (draw.one(1, 8, 32, 64), draw.size(8, 1024), side, side)
    _checked(shape)
    order = (0, 2, 3, 1) if draw.chance(0.5) else ()
    kind = draw.one("max", "avg", "adaptive")
    window, stride = draw.one((2, 2), (3, 2), (3, 1), (5, 1))
    out = draw.one(1, 1, 2, 7)
    around = _around(draw, shape, shape, 1, order)

    def run(x: Any, *more: Any) -> Any:
        x = around.front(x, list(more))
        if kind == "adaptive":
            return f.adaptive_avg_pool2d(x, min(out, side))
        return (f.max_pool2d if kind == "max" else f.avg_pool2d)(x, window, stride, window // 2)

    text = f"adaptive_avg_pool to {out}" if kind == "adaptive" else f"{kind}_pool {window} s{stride}"
    return draw.made(
        f"{around.before}{text} {_times(shape)}{' NHWC' if order else ''}",
        run,
        (Operand(shape, order), *around.operands),
    )


def _movement(draw: _Draw) -> Case:
    """Draws concatenations, slices, shuffles and transposes in front of something that computes."""
    import torch

    shape, order = _shape(draw)
    _checked(shape, shape, shape)
    kind = draw.one("concatenate", "halves", "transpose", "shift", "pad")
    name, function = _activation(draw)
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

    return draw.made(f"{kind}+{name} {_times(shape)}{' NHWC' if order else ''}", run, operands)


def _embedding(draw: _Draw) -> Case:
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


def _attention(draw: _Draw) -> Case:
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
KINDS: dict[str, tuple[float, Callable[[_Draw], Case]]] = {
    "conv": (24, _conv),
    "conv_transposed": (5, _conv_transposed),
    "conv_backward": (12, _conv_backward),
    "matmul": (20, _matmul),
    "reduction": (8, _reduction),
    "norm": (9, _norm),
    "softmax": (4, _softmax),
    "pool": (4, _pool),
    "movement": (5, _movement),
    "embedding": (3, _embedding),
    "attention": (8, _attention),
}
