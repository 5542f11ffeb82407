"""What cases of a sweep are drawn with: sizes, activations, and what stands in front of a layer and behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
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


class Refused(Exception):
    """What was drawn is too large, or no such layer exists: draw again."""


class Draw:
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


def activation(draw: Draw) -> tuple[str, Callable[[Any], Any]]:
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
class Around:
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


def surroundings(
    draw: Draw, shape: tuple[int, ...], result: tuple[int, ...], channel: int, order: tuple[int, ...]
) -> Around:
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
        name, function = activation(draw)
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
        name, function = activation(draw)
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

    return Around(before, after, all_of(front), all_of(back), (*first, *second))


def times(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
