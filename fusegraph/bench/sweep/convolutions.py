"""Convolutions as networks have them, transposed ones, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from fusegraph.bench.sweep.draw import MOST_BYTES, Case, Draw, Operand, Refused, behind, in_front, times


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
    padding: tuple[int, ...]
    last: bool
    transposed: bool = False

    @property
    def out(self) -> tuple[int, ...]:
        reach = [self.dilation * (t - 1) for t in self.taps]
        if self.transposed:
            sizes = zip(self.image, self.padding, reach)
            return tuple((n - 1) * self.stride - 2 * p + r + 1 for n, p, r in sizes)
        return tuple((n + 2 * p - r - 1) // self.stride + 1 for n, p, r in zip(self.image, self.padding, reach))

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
        return (
            f"{times(self.x)} {self.filters} of {times(self.taps)}{more} p{times(dict.fromkeys(self.padding))} {layout}"
        )


#: Taps of a convolution by the number of spatial dimensions, and how often each is drawn: two thirds of the layers of
#: networks of images are 1x1.
_TAPS: dict[int, tuple[tuple[tuple[int, ...], float], ...]] = {
    1: (((1,), 4), ((3,), 6), ((5,), 2), ((7,), 1), ((9,), 1), ((31,), 1)),
    2: (((1, 1), 20), ((3, 3), 12), ((5, 5), 2), ((7, 7), 2), ((2, 2), 1), ((4, 4), 1), ((1, 7), 1), ((7, 1), 1),
        ((1, 3), 0.5), ((3, 1), 0.5), ((11, 11), 0.5), ((8, 8), 0.3), ((16, 16), 0.3)),
    3: (((1, 1, 1), 3), ((3, 3, 3), 6), ((1, 3, 3), 2), ((3, 1, 1), 2), ((5, 5, 5), 1)),
}  # fmt: skip
#: Channels of a group of grouped convolutions: ResNeXt's, RegNet's and others.
_WIDTHS = (4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 112, 120, 128, 168, 232)


def _convolution(draw: Draw, *, transposed: bool = False) -> _Convolution:
    rank = draw.weighted({1: 2, 2: 12, 3: 2})
    taps = draw.weighted(dict(_TAPS[rank]))
    if transposed:
        taps = (draw.one(2, 3, 4, 5),) * rank
    side = (
        draw.one(7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 224) if rank == 2 else draw.size(8, 4096 if rank == 1 else 48)
    )
    if draw.chance(0.15):
        side += draw.one(1, 2, 3, 5)
    batch = draw.one(1, 1, 2, 4, 8, 16, 32, 64)
    channels, filters = draw.size(3, 1024), draw.size(8, 1024)
    groups = 1
    kind = draw.weighted({"dense": 68, "depthwise": 20, "grouped": 12})
    if kind == "depthwise":
        groups = filters = channels
        taps = (draw.weighted({3: 6, 5: 3, 7: 2}),) * rank
    elif kind == "grouped":
        groups = draw.one(2, 4, 8, 16, 32)
        channels = filters = groups * draw.one(*_WIDTHS)
        taps = taps if max(taps) > 1 or draw.chance(0.2) else (3,) * rank
    most = max(taps)
    # Patches of a transformer do not overlap.
    stride = most if most in (4, 8, 16) else draw.weighted({1: 10, 2: 4, 3: 0.3, 4: 0.3} if most > 1 else {1: 20, 2: 1})
    stride = draw.one(1, 2, 2, 2) if transposed else stride
    dilation = draw.weighted({1: 12, 2: 1, 3: 1}) if 1 < min(taps) == most else 1
    padded = 1 < stride < most or (stride == 1 and draw.chance(0.85))
    padding = tuple(dilation * (tap - 1) // 2 if padded else 0 for tap in taps)
    image = (side,) * rank
    found = _Convolution(
        batch, channels, filters, groups, image, taps, stride, dilation, padding, draw.chance(0.55), transposed
    )
    if min(found.out) < 1 or prod(found.y) > MOST_BYTES // 4:
        raise Refused
    return found


def _weight(c: _Convolution) -> Operand:
    order = (0, *range(2, len(c.w)), 1) if c.last else ()
    return Operand(c.w, order, scale=(prod(c.w[1:])) ** -0.5)


def conv(draw: Draw, *, transposed: bool = False) -> Case:
    import torch
    import torch.nn.functional as f

    c = _convolution(draw, transposed=transposed)
    front, back = in_front(draw, c.x, 1, c.order), behind(draw, c.y, 1, c.order)
    name = "conv_transpose" if transposed else "conv"
    function = getattr(f, f"{name}{len(c.image)}d")
    more = (0, c.groups, c.dilation) if transposed else (c.dilation, c.groups)
    parts = _parts(draw, c.channels) if c.groups == 1 and draw.chance(0.1) else [c.channels]

    def run(*operands: Any) -> Any:
        x = operands[0] if len(parts) == 1 else torch.cat(operands[: len(parts)], 1)
        w, rest = operands[len(parts)], list(operands[len(parts) + 1 :])
        return back.function(function(front.function(x, rest), w, None, c.stride, c.padding, *more), rest)

    images = [Operand((c.batch, part, *c.image), c.order) for part in parts]
    concatenated = f"concat {'+'.join(map(str, parts))}+" if len(parts) > 1 else ""
    text = f"{concatenated}{front.name}{name}{back.name} {c.text}"
    return draw.made(text, run, (*images, _weight(c), *front.operands, *back.operands), c.operations)


def _parts(draw: Draw, channels: int) -> list[int]:
    """Draws how channels are put together: two halves, as of a U-Net, or layers of the same width behind a first one,
    as of DenseNet.
    """
    if draw.chance(0.3) and channels % 2 == 0:
        return [channels // 2] * 2
    width = draw.one(16, 32, 48)
    count = min((channels - 1) // width, draw.one(1, 2, 4, 8, 16))
    return [channels - count * width, *[width] * count]


def conv_backward(draw: Draw) -> Case:
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
            list(c.padding),
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
