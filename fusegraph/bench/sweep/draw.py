"""What cases of a sweep are drawn with: sizes, activations, and what stands in front of a layer and behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, prod
from random import Random
from typing import Any, TypeAlias

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
    kind        a key of `fusegraph.bench.sweep.cases.KINDS`.
    """

    name: str
    dtype: str
    operands: tuple[Operand, ...]
    function: Callable[..., Any]
    operations: float = 0.0
    kind: str = ""


class Refused(Exception):
    """What was drawn is too large, or no such layer exists: draw again."""


def checked(*shapes: tuple[int, ...]) -> None:
    """Raises Refused for shapes that are too large together."""
    if sum(map(prod, shapes)) > MOST_BYTES // 4:
        raise Refused


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

    def weighted(self, choices: Mapping[Any, float]) -> Any:
        """Returns one of the keys, as often as its value says."""
        return self.rng.choices(list(choices), list(choices.values()))[0]

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


#: A function of a tensor and of those operands of it that a list begins with, which it takes from the list.
Function: TypeAlias = Callable[[Any, list[Any]], Any]


@dataclass(frozen=True)
class Beside:
    """What is done beside a layer: how its case is called, a function, and the further operands that it takes."""

    name: str
    function: Function
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class _Step:
    """What may be done beside a layer: how often it is, its name, a function, and the sizes of its further operands.

    Operands have values for each "channel", for each "gate" (an image and a channel), or are "whole" tensors.  Without
    a function it is an activation, to be drawn.
    """

    share: float
    name: str
    function: Callable[..., Any] | None = None
    operands: tuple[str, ...] = ()


_ACTIVATION = "activation"
#: What stands in front of layers: a frozen norm as in DenseNet, a gate as of squeeze and excitation, an activation.
_FRONT = (
    _Step(0.12, "affine", lambda x, scale, bias: x * scale + bias, ("channel", "channel")),
    _Step(0.05, "gate", lambda x, gate: x * gate.sigmoid(), ("gate",)),
    _Step(0.15, _ACTIVATION),
)
#: What stands behind them: a bias or a frozen norm, a residual in front of the activation (ResNet) or behind it.
_BACK = (
    _Step(0.4, "bias", lambda y, bias: y + bias, ("channel",)),
    _Step(0.3, "affine", lambda y, scale, bias: y * scale + bias, ("channel", "channel")),
    _Step(0.15, "residual", lambda y, residual: y + residual, ("whole",)),
    _Step(0.5, _ACTIVATION),
    _Step(0.12, "residual", lambda y, residual: y + residual, ("whole",)),
)


def in_front(draw: Draw, shape: tuple[int, ...], channel: int, order: tuple[int, ...] = ()) -> Beside:
    """Draws what is done to an operand of a shape, whose channels are dimension ``channel``."""
    names, function, operands = _drawn(draw, _FRONT, shape, channel, order)
    return Beside("".join(f"{name}+" for name in names), function, operands)


def behind(draw: Draw, shape: tuple[int, ...], channel: int, order: tuple[int, ...] = ()) -> Beside:
    """Draws what is done to a result of a shape, whose channels are dimension ``channel``."""
    names, function, operands = _drawn(draw, _BACK, shape, channel, order)
    return Beside("".join(f"+{name}" for name in names), function, operands)


def _drawn(
    draw: Draw, steps: Sequence[_Step], shape: tuple[int, ...], channel: int, order: tuple[int, ...]
) -> tuple[list[str], Function, tuple[Operand, ...]]:
    """Draws some steps; returns their names, all of them as one function, and their operands."""
    dims = range(len(shape))
    per_channel = {channel % len(shape)}
    kept = {"channel": per_channel, "gate": per_channel | {0}, "whole": set(dims)}
    names: list[str] = []
    taken: list[tuple[Callable[..., Any], int]] = []
    operands: list[Operand] = []
    for step in steps:
        if not draw.chance(step.share):
            continue
        name, function = (step.name, step.function) if step.function else activation(draw)
        names.append(name)
        taken.append((function, len(step.operands)))
        for kind in step.operands:
            sizes = tuple(shape[d] if d in kept[kind] else 1 for d in dims)
            operands.append(Operand(sizes, order if kind == "whole" else ()))

    def run(x: Any, more: list[Any]) -> Any:
        for function, count in taken:
            x = function(x, *(more.pop(0) for _ in range(count)))
        return x

    return names, run, tuple(operands)


def times(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))
