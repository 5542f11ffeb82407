"""Random networks of torch.nn's modules, between which tensors change their layout and shape.

A network is a chain of steps; what flows between them is an image [B, C, H, W] or tokens [L, B, E] or [B, L, E], and
lies in memory as whatever made it left it.  Each step is drawn from those that take what there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

#: Channels of an image and elements of a token.
WIDTH = 32

Module = Callable[[Any], Any]


class Step(nn.Module):  # type: ignore[misc]
    """A function with modules of its own."""

    def __init__(self, function: Any, *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, x: Any) -> Any:
        return self.function(x, *self.parts)


def _mlp(x: Any, up: Any, down: Any) -> Any:
    return x + down(nn.functional.gelu(up(x)))


def _gated(x: Any, project: Any) -> Any:
    gate, value = project(x).chunk(2, -1)
    return nn.functional.silu(gate) * value


def _residual(x: Any, convolution: Any, norm: Any) -> Any:
    return x + nn.functional.relu(norm(convolution(x)))


def _squeeze(x: Any, convolution: Any) -> Any:
    return x * torch.sigmoid(convolution(x.mean((2, 3), keepdim=True)))


def _attend(batch_first: bool, weights: bool, used: bool = False) -> Module:
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)
    if weights:

        def both(x: Any, a: Any) -> Any:
            y, w = a(x, x, x)
            return x + (y + w.sum() if used else y)

        return Step(both, attention)
    return Step(lambda x, a: x + a(x, x, x, need_weights=False)[0], attention)


def _crossed(batch_first: bool) -> Module:
    """Returns attention between two slices of the same tokens."""
    along = 1 if batch_first else 0

    def cross(x: Any, a: Any) -> Any:
        half = -(-x.shape[along] // 2)
        q, kv = x.narrow(along, 0, half), x.narrow(along, x.shape[along] - half, half)
        return torch.cat([a(q, kv, kv, need_weights=False)[0], kv], along)

    return Step(cross, nn.MultiheadAttention(WIDTH, 4, batch_first=batch_first))


def _by_hand(rng: np.random.Generator) -> Module:
    """Returns self-attention with q, k and v from one projection, written out or as scaled_dot_product_attention."""
    heads, scaled, causal = int(rng.choice([1, 2, 4])), bool(rng.integers(2)), bool(rng.integers(2))
    fused = bool(rng.integers(2))

    def attend(x: Any, project: Any) -> Any:
        a, b, _ = x.shape
        q, k, v = (t.view(a, b, heads, WIDTH // heads).transpose(1, 2) for t in project(x).chunk(3, -1))
        if fused:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        else:
            s = q @ k.transpose(-2, -1) * (0.25 if scaled else 1.0)
            if causal:
                s = s.masked_fill(torch.ones(b, b, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
            y = s.softmax(-1) @ v
        return x + y.transpose(1, 2).reshape(a, b, WIDTH)

    return Step(attend, nn.Linear(WIDTH, 3 * WIDTH))


def _encoder(rng: np.random.Generator, batch_first: bool) -> Module:
    first = bool(rng.integers(2))
    return nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=batch_first, norm_first=first)


def _tokens(rng: np.random.Generator, batch_first: bool) -> tuple[Module, str]:
    """Returns a step on tokens, and the layout of its result."""
    kind = "BLE" if batch_first else "LBE"
    other = "LBE" if batch_first else "BLE"
    steps: list[tuple[Callable[[], Module], str]] = [
        (lambda: _attend(batch_first, False), kind),
        (lambda: _attend(batch_first, True), kind),
        (lambda: _attend(batch_first, True, used=True), kind),
        (lambda: _crossed(batch_first), kind),
        (lambda: _by_hand(rng), kind),
        (lambda: _encoder(rng, batch_first), kind),
        (lambda: nn.LayerNorm(WIDTH), kind),
        (lambda: nn.RMSNorm(WIDTH), kind),
        (lambda: Step(_mlp, nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)), kind),
        (lambda: Step(_gated, nn.Linear(WIDTH, 2 * WIDTH)), kind),
        (lambda: Step(lambda x: x.transpose(0, 1)), other),
        (lambda: Step(lambda x: x.transpose(0, 1).contiguous()), other),
        (lambda: Step(lambda x: x.flip(0) * x.softmax(-1)), kind),
        (lambda: Step(lambda x: torch.cat([x, x.roll(1, -1)], 2)[..., ::2]), kind),
        (lambda: Step(lambda x: (x - x.mean((0, 1), keepdim=True)) / (1 + x.var(dim=1, keepdim=True))), kind),
        (lambda: _image_of(batch_first, bool(rng.integers(2))), "BCHW"),
    ]  # fmt: skip
    make, left = steps[int(rng.integers(len(steps)))]
    return make(), left


def _image_of(batch_first: bool, viewed: bool) -> Module:
    """Returns a step that makes tokens an image of one row."""

    def image(x: Any) -> Any:
        x = x if batch_first else x.transpose(0, 1)
        b, n, e = x.shape
        y = x.transpose(1, 2).unsqueeze(2)
        return y if viewed else y.contiguous().view(b, e, 1, n)

    return Step(image)


def _flattened(way: int) -> tuple[Module, str]:
    """Returns a step that makes an image tokens, and the layout of its result."""
    ways: list[tuple[Callable[[Any], Any], str]] = [
        (lambda x: x.flatten(2).transpose(1, 2), "BLE"),
        (lambda x: x.flatten(2).permute(2, 0, 1), "LBE"),
        (lambda x: x.reshape(x.shape[0], x.shape[1], -1).permute(2, 0, 1).contiguous(), "LBE"),
        (lambda x: x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, x.shape[1]), "BLE"),
        (lambda x: x.permute(2, 3, 0, 1).flatten(0, 1), "LBE"),
    ]
    function, left = ways[way % len(ways)]
    return Step(function), left


def _image(rng: np.random.Generator) -> tuple[Module, str]:
    """Returns a step on images, and the layout of its result."""
    same, deep = {"padding": 1}, {"padding": 1, "groups": WIDTH}
    steps: list[tuple[Callable[[], Module], str]] = [
        (lambda: nn.Conv2d(WIDTH, WIDTH, 3, **same), "BCHW"),
        (lambda: nn.Conv2d(WIDTH, WIDTH, 3, **deep), "BCHW"),
        (lambda: nn.Conv2d(WIDTH, WIDTH, 1, groups=4), "BCHW"),
        (lambda: nn.ConvTranspose2d(WIDTH, WIDTH, 3, **same), "BCHW"),
        (lambda: Step(_residual, nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH)), "BCHW"),
        (lambda: nn.BatchNorm2d(WIDTH), "BCHW"),
        (lambda: nn.GroupNorm(4, WIDTH), "BCHW"),
        (lambda: nn.InstanceNorm2d(WIDTH, affine=True), "BCHW"),
        (lambda: nn.AvgPool2d(3, 1, 1), "BCHW"),
        (lambda: nn.MaxPool2d(3, 1, 1), "BCHW"),
        (lambda: Step(_squeeze, nn.Conv2d(WIDTH, WIDTH, 1)), "BCHW"),
        (lambda: Step(lambda x: x.to(memory_format=torch.channels_last)), "BCHW"),
        (lambda: Step(lambda x: x.permute(0, 1, 3, 2)), "BCHW"),
        (lambda: Step(lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)), "BCHW"),
        (lambda: Step(lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)), "BCHW"),
    ]  # fmt: skip
    number = int(rng.integers(2 * len(steps)))
    if number >= len(steps):
        return _flattened(number)
    make, left = steps[number]
    return make(), left


def network(seed: int) -> tuple[Any, Any]:
    """Draws a network of two to five steps and an input for it from a seed."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    kind = str(rng.choice(["BCHW", "LBE", "BLE"]))
    batch, rows, columns = (int(rng.integers(1, 4)) for _ in range(3))
    shape = (batch, WIDTH, rows, columns) if kind == "BCHW" else (2 + rows, 1 + batch, WIDTH)
    x = torch.randn(shape)
    if kind == "BCHW" and rng.integers(2):
        x = x.to(memory_format=torch.channels_last)
    elif rng.integers(2):
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    steps = []
    for _ in range(int(rng.integers(2, 6))):
        made, kind = _image(rng) if kind == "BCHW" else _tokens(rng, kind == "BLE")
        steps.append(made)
    return nn.Sequential(*steps).eval(), x
