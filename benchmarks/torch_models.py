"""Known networks in plain torch, with random weights: ResNet-50, MobileNetV3-Large, blocks of ViT-B/16 and GPT-2.

He et al. 2016 (torchvision's variant with the stride in the 3x3), Howard et al. 2019, Dosovitskiy et al. 2021, Radford
et al. 2019.  Every size is a parameter, so that tests can use small ones.  Only torch is needed, not the networks' own
packages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def _conv_norm(
    channels: int, filters: int, taps: int, stride: int = 1, groups: int = 1, activation: type[nn.Module] | None = None
) -> nn.Sequential:
    """Returns a convolution without bias, then batch normalization, then an activation if one is given."""
    layers: list[nn.Module] = [
        nn.Conv2d(channels, filters, taps, stride, taps // 2, groups=groups, bias=False),
        nn.BatchNorm2d(filters),
    ]
    if activation is not None:
        layers.append(activation(inplace=True))
    return nn.Sequential(*layers)


class Bottleneck(nn.Module):  # type: ignore[misc]
    """Convolutions of 1x1, 3x3 and 1x1, and a shortcut around them."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv_norm(channels, width, 1, activation=nn.ReLU),
            _conv_norm(width, width, 3, stride, activation=nn.ReLU),
            _conv_norm(width, 4 * width, 1),
        )
        same = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if same else _conv_norm(channels, 4 * width, 1, stride)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):  # type: ignore[misc]
    """ResNet of bottlenecks; by default ResNet-50: images (N, 3, H, W) to logits (N, classes)."""

    def __init__(self, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv_norm(3, width, 7, 2, activation=nn.ReLU), nn.MaxPool2d(3, 2, 1))
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for number in range(count):
                stages.append(Bottleneck(channels, width << stage, 2 if stage and not number else 1))
                channels = 4 * (width << stage)
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Any) -> Any:
        return self.head(torch.flatten(self.pool(self.stages(self.stem(x))), 1))


def _round(channels: float, divisor: int = 8) -> int:
    """Returns the nearest multiple of ``divisor`` that is not more than a tenth below ``channels``."""
    near = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return near + divisor if near < 0.9 * channels else near


class SqueezeExcite(nn.Module):  # type: ignore[misc]
    """Scales each channel by a function of all channels' means over the image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = _round(channels / 4)
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            nn.ReLU(),
            nn.Conv2d(squeezed, channels, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, x: Any) -> Any:
        return x * self.scale(x)


class InvertedResidual(nn.Module):  # type: ignore[misc]
    """A 1x1 to ``expanded`` channels, a depthwise convolution, squeeze and excite, and a 1x1 to ``filters``."""

    def __init__(
        self, channels: int, taps: int, expanded: int, filters: int, squeeze: bool, hard: bool, stride: int
    ) -> None:
        super().__init__()
        activation = nn.Hardswish if hard else nn.ReLU
        layers: list[nn.Module] = []
        if expanded != channels:
            layers.append(_conv_norm(channels, expanded, 1, activation=activation))
        layers.append(_conv_norm(expanded, expanded, taps, stride, expanded, activation))
        if squeeze:
            layers.append(SqueezeExcite(expanded))
        layers.append(_conv_norm(expanded, filters, 1))
        self.body = nn.Sequential(*layers)
        self.residual = stride == 1 and channels == filters

    def forward(self, x: Any) -> Any:
        return x + self.body(x) if self.residual else self.body(x)


#: taps, expanded, filters, squeeze, hard, stride of each block of MobileNetV3-Large.
_LARGE = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)


class MobileNetV3(nn.Module):  # type: ignore[misc]
    """MobileNetV3-Large, or a network like it of the given blocks: images (N, 3, H, W) to logits (N, classes)."""

    def __init__(self, blocks: Sequence[tuple[Any, ...]] = _LARGE, hidden: int = 1280, classes: int = 1000) -> None:
        super().__init__()
        channels = 16
        layers: list[nn.Module] = [_conv_norm(3, channels, 3, 2, activation=nn.Hardswish)]
        for block in blocks:
            layers.append(InvertedResidual(channels, *block))
            channels = block[2]
        layers.append(_conv_norm(channels, 6 * channels, 1, activation=nn.Hardswish))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Sequential(
            nn.Linear(6 * channels, hidden), nn.Hardswish(inplace=True), nn.Dropout(0.2), nn.Linear(hidden, classes)
        )

    def forward(self, x: Any) -> Any:
        return self.head(torch.flatten(self.pool(self.features(x)), 1))


class Block(nn.Module):  # type: ignore[misc]
    """A pre-norm transformer block, from (batch, sequence, width) to the same: GPT-2's if ``causal``, else ViT's."""

    def __init__(self, width: int = 768, heads: int = 12, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        epsilon = 1e-5 if causal else 1e-6
        self.norm1, self.norm2 = nn.LayerNorm(width, epsilon), nn.LayerNorm(width, epsilon)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        gelu = nn.GELU(approximate="tanh" if causal else "none")
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))

    def forward(self, x: Any) -> Any:
        batch, sequence, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, sequence, self.heads, -1).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.mlp(self.norm2(x))


def vit_block(width: int = 768, heads: int = 12) -> Block:
    """Returns a block of ViT-B/16, which has 197 tokens for an image of 224 x 224."""
    return Block(width, heads)


def gpt2_block(width: int = 768, heads: int = 12) -> Block:
    """Returns a block of GPT-2 (124M)."""
    return Block(width, heads, causal=True)


@dataclass(frozen=True)
class Model:
    """A network at full size: how it is made, and the shape of its input; images are in channels-last layout."""

    name: str
    make: Callable[[], Any]
    shape: tuple[int, ...]

    def module(self, dtype: Any, device: str = "cpu", seed: int = 0) -> Any:
        """Returns the network for inference with random weights, and random statistics of batch normalization."""
        torch.manual_seed(seed)
        made = self.make()
        for layer in made.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_(0, 0.1)
                layer.running_var.uniform_(0.8, 1.2)
        made = made.to(device=device, dtype=dtype)
        return (made.to(memory_format=torch.channels_last) if len(self.shape) == 4 else made).eval()

    def input(self, dtype: Any, device: str = "cpu", seed: int = 1) -> Any:
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)
        return x.to(memory_format=torch.channels_last) if len(self.shape) == 4 else x


MODELS = (
    Model("ResNet-50", ResNet, (64, 3, 224, 224)),
    Model("MobileNetV3-Large", MobileNetV3, (64, 3, 224, 224)),
    Model("ViT-B/16 block", vit_block, (64, 197, 768)),
    Model("GPT-2 block", gpt2_block, (8, 1024, 768)),
)
