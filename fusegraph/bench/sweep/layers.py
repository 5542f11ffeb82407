"""Reductions, norms, softmax, pools and movements: what networks have between their products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusegraph.bench.sweep.draw import Case, Draw, Operand, activation, checked, in_front, times


def shape_of(draw: Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draws a shape, and how it lies in memory: rows of a language model, or images."""
    if draw.chance(0.5):
        return (draw.one(1, 2, 8, 32), draw.size(16, 4096), draw.size(32, 16384)), ()
    return image(draw, 7, 14, 28, 56, 112)


def image(draw: Draw, *sides: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draws the shape of images, and how they lie in memory."""
    side = draw.one(*sides)
    return (draw.one(1, 8, 32, 64), draw.size(8, 1024), side, side), (0, 2, 3, 1) if draw.chance(0.5) else ()


def _folded(
    draw: Draw, shape: tuple[int, ...], order: tuple[int, ...], name: str, function: Callable[[Any], Any]
) -> Case:
    """Returns the case of a function of one operand, with something in front of it."""
    front = in_front(draw, shape, -1 if len(shape) == 3 else 1, order)

    def run(x: Any, *more: Any) -> Any:
        return function(front.function(x, list(more)))

    operands = (Operand(shape, order), *front.operands)
    return draw.made(f"{front.name}{name.format(times(shape))}{' NHWC' if order else ''}", run, operands)


def reduction(draw: Draw) -> Case:
    shape, order = shape_of(draw)
    checked(shape)
    count = len(shape)
    images = tuple(d for d in range(count) if d != 1)
    axes = draw.one((-1,), (count - 2, count - 1), (count - 2, count - 1), (0,), images, (1,), tuple(range(count)))
    op = draw.one("sum", "mean", "mean", "amax", "var")
    over = ",".join(map(str, axes))
    return _folded(draw, shape, order, f"{op} {{}} over {over}", lambda x: getattr(x, op)(dim=axes, keepdim=True))


def pool(draw: Draw) -> Case:
    import torch.nn.functional as f

    shape, order = image(draw, 7, 14, 28, 56, 112, 224)
    checked(shape)
    if draw.chance(0.35):
        out = min(draw.one(1, 1, 1, 2, 6, 7), shape[-1])
        return _folded(draw, shape, order, f"adaptive_avg_pool to {out} {{}}", lambda x: f.adaptive_avg_pool2d(x, out))
    kind = draw.one("max", "max", "avg")
    window, stride = draw.weighted({(2, 2): 3, (3, 2): 5, (3, 1): 4, (5, 1): 1})
    padding = window // 2 if stride == 1 or draw.chance(0.4) else 0
    function = f.max_pool2d if kind == "max" else f.avg_pool2d
    name = f"{kind}_pool {window} s{stride} p{padding} {{}}"
    return _folded(draw, shape, order, name, lambda x: function(x, window, stride, padding))


def norm(draw: Draw) -> Case:
    import torch.nn.functional as f

    shape, order = shape_of(draw)
    checked(shape, shape)
    name, function = activation(draw)
    add, act = draw.chance(0.3), draw.chance(0.4)
    operands = [Operand(shape, order)]
    operands += [Operand(shape, order)] if add else []
    rows = len(shape) == 3
    kind = (
        draw.one("layer_norm", "rms_norm")
        if rows
        else draw.one("batch_norm", "frozen batch_norm", "group_norm", "instance_norm")
    )
    width = (shape[-1] if rows else shape[1],)
    groups = draw.one(*(g for g in (1, 2, 4, 8, 16, 32) if width[0] % g == 0))
    operands += [Operand(width)] * (4 if kind == "frozen batch_norm" else 2)

    def run(x: Any, *operands: Any) -> Any:
        rest = list(operands)
        if add:
            x = x + rest.pop(0)
        weight, bias, *more = rest
        y = {
            "layer_norm": lambda: f.layer_norm(x, width, weight, bias),
            "rms_norm": lambda: f.rms_norm(x, width, weight),
            "batch_norm": lambda: f.batch_norm(x, None, None, weight, bias, training=True),
            # Of running means and variances.
            "frozen batch_norm": lambda: f.batch_norm(x, more[0], more[1].abs(), weight, bias),
            "group_norm": lambda: f.group_norm(x, groups, weight, bias),
            "instance_norm": lambda: f.instance_norm(x, weight=weight, bias=bias),
        }[kind]()
        return function(y) if act else y

    text = f"{'add+' if add else ''}{kind}{f'+{name}' if act else ''}"
    return draw.made(f"{text} {times(shape)}{' NHWC' if order else ''}", run, operands)


def softmax(draw: Draw) -> Case:
    shape = draw.one(
        (draw.size(64, 16384), draw.size(8, 65536)),
        (draw.one(1, 4), draw.one(8, 12, 16), draw.size(16, 2048), draw.size(16, 2048)),
    )
    checked(shape)
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


def movement(draw: Draw) -> Case:
    """Draws concatenations, slices, shuffles, windows and transposes in front of something that computes."""
    shape, order = shape_of(draw)
    checked(shape, shape, shape)
    kinds = _MOVEMENTS if len(shape) == 4 else {name: of for name, of in _MOVEMENTS.items() if name not in _OF_IMAGES}
    kind = draw.one(*kinds)
    if kind in _OF_IMAGES and (shape[-1] % 7 or shape[1] % 8):
        kind = "transpose"
    name, function = activation(draw)
    operands = [Operand(shape, order)] * (draw.one(2, 3, 4) if kind == "concatenate" else 1)

    def run(*tensors: Any) -> Any:
        return function(_MOVEMENTS[kind](*tensors))

    return draw.made(f"{kind}+{name} {times(shape)}{' NHWC' if order else ''}", run, operands)


def _halves(x: Any) -> Any:
    width = x.shape[-1]
    return x[..., : width // 2] * x[..., width - width // 2 :]


def _shuffle(x: Any) -> Any:
    batch, channels, *image = x.shape
    return x.view(batch, 2, channels // 2, *image).transpose(1, 2).reshape(x.shape)


def _windows(x: Any) -> Any:
    """Returns shifted windows of 7 x 7, channels last, as rows."""
    batch, channels, high, wide = x.shape
    x = x.permute(0, 2, 3, 1).roll((-3, -3), (1, 2)).reshape(batch, high // 7, 7, wide // 7, 7, channels)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, channels)


def _concatenate(*tensors: Any) -> Any:
    import torch

    return torch.cat(tensors, 1)


def _pad(x: Any) -> Any:
    import torch

    return torch.nn.functional.pad(x, (1, 1, 2, 2))


def _nearest(x: Any) -> Any:
    import torch

    return torch.nn.functional.interpolate(x, scale_factor=2)


#: Movements by name; those that need the height and width of images, multiples of 7, and channels, a multiple of 8.
_MOVEMENTS: dict[str, Callable[..., Any]] = {
    "concatenate": _concatenate,
    "halves": _halves,
    "transpose": lambda x: x.transpose(1, 2).contiguous(),
    "shift": lambda x: x.roll((x.shape[-1] // 3,), (-1,)),
    "pad": _pad,
    "shuffle": _shuffle,
    "windows": _windows,
    "nearest": _nearest,
}
_OF_IMAGES = ("shuffle", "windows", "nearest")
