"""Convolutions as networks have them, transposed ones, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from fusegraph.bench.sweep.draw import MOST_BYTES, Case, Draw, Operand, Refused, surroundings, times


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
        return f"{times(self.x)} {self.filters} of {times(self.taps)}{more} p{self.padding} {layout}"


def _convolution(draw: Draw, *, transposed: bool = False) -> _Convolution:
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
        raise Refused
    return found


def _weight(c: _Convolution) -> Operand:
    order = (0, *range(2, len(c.w)), 1) if c.last else ()
    return Operand(c.w, order, scale=(prod(c.w[1:])) ** -0.5)


def conv(draw: Draw) -> Case:
    import torch.nn.functional as f

    c = _convolution(draw)
    around = surroundings(draw, c.x, c.y, 1, c.order)
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


def conv_transposed(draw: Draw) -> Case:
    import torch.nn.functional as f

    c = _convolution(draw, transposed=True)
    around = surroundings(draw, c.x, c.y, 1, c.order)
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
