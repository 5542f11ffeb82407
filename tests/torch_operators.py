"""Calls of ATen operators, by the module of the frontend that has them, each with inputs to call them with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch_indices import INDICES, INPUTS
from torch_norms import NORMS

with contextlib.suppress(ImportError):
    import torch._inductor.inductor_prims

aten = torch.ops.aten
F = torch.nn.functional
Case = tuple[str, Callable[..., Any]]


def random(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


_UNARY = (torch.sigmoid, torch.tanh, torch.neg, torch.abs, torch.sign, torch.sin, torch.cos, torch.tan, torch.erf)
_MORE = (torch.exp, torch.expm1, torch.exp2, torch.ceil, torch.floor, torch.round, torch.relu, torch.reciprocal)
_ANGLES = (torch.atan, torch.sinh, torch.cosh, torch.asinh, torch.trunc)
_TRUTH = (torch.isnan, torch.isinf, torch.logical_not)
_POSITIVE = (torch.sqrt, torch.rsqrt, torch.log, torch.log2, torch.log1p)
_ACTIVATIONS = (F.silu, F.mish, F.hardswish, F.hardsigmoid, F.leaky_relu, F.elu, F.selu, F.softplus, F.relu6)

POINTWISE: list[Case] = [
    *[(f.__name__, lambda x, y, p, n, b, f=f: f(x)) for f in (*_UNARY, *_MORE, *_ANGLES, *_TRUTH, *_ACTIVATIONS)],
    *[(f.__name__, lambda x, y, p, n, b, f=f: f(p)) for f in _POSITIVE],
    ("hardtanh", lambda x, y, p, n, b: F.hardtanh(x, -0.5, 0.25)),
    ("gelu", lambda x, y, p, n, b: (F.gelu(y), F.gelu(y, approximate="tanh"))),
    ("gelu_backward", lambda x, y, p, n, b: (aten.gelu_backward(x, y), aten.gelu_backward(x, y, approximate="tanh"))),
    ("silu_backward", lambda x, y, p, n, b: aten.silu_backward(x, y)),
    ("threshold_backward", lambda x, y, p, n, b: aten.threshold_backward(x, y, 0.5)),
    ("add", lambda x, y, p, n, b: (torch.add(x, y, alpha=0.1), x + 3, 0.7 + x, n + 2, n + x, x + b)),
    ("sub", lambda x, y, p, n, b: (torch.sub(x, y, alpha=2), 1 - x, torch.rsub(x, y, alpha=3), n - 1)),
    ("mul", lambda x, y, p, n, b: (x * y, x * 0.1, n * 3, n * 0.5, b * b, x * b)),
    ("div", lambda x, y, p, n, b: (x / p, x / 3, n / 4, 1 / p, n / (n * n + 1))),
    ("pow", lambda x, y, p, n, b: (x**2, x**3, p**0.5, p**-0.5, p**1.5, p**x, 2.0**x, p**-1, n**2)),
    ("fmod", lambda x, y, p, n, b: (torch.fmod(x, 0.3), torch.fmod(x, p))),
    ("remainder", lambda x, y, p, n, b: (y % 0.3, y % -p, n % 3, n % (n + 7), n % -2)),
    ("arcs", lambda x, y, p, n, b: (torch.asin(x), torch.acos(x), torch.atanh(x), torch.acosh(p * 9))),
    (
        "div of modes",
        lambda x, y, p, n, b: (
            *(torch.div(x, v, rounding_mode=m) for m in ("trunc", "floor") for v in (y, 0.3, x * 0)),
            *(torch.div(n, v, rounding_mode=m) for m in ("trunc", "floor") for v in (2, -3, n - 7)),
            torch.div(n, p, rounding_mode="floor"),
            y // p,
        ),
    ),
    (
        "bits",
        lambda x, y, p, n, b: (
            n & 3,
            n | (n + 1),
            n ^ 5,
            ~n,
            n << 2,
            n >> 1,
            n << (n + 2),
            b ^ (x > 0),
            b & True,
            6 & n,
        ),
    ),
    ("shifts", lambda x, y, p, n, b: (torch.bitwise_left_shift(n, n + 2), torch.bitwise_right_shift(n, 1))),
    ("max", lambda x, y, p, n, b: (torch.maximum(x, y), torch.minimum(x, y))),
    (
        "clamp",
        lambda x, y, p, n, b: (
            torch.clamp(x, -0.5, 0.5),
            torch.clamp(x, min=0.1),
            torch.clamp(n, max=1),
            torch.clamp(x, -p, p),
            torch.clamp(x, -torch.inf, 0.5),
            torch.clamp(x, 0.1, torch.inf),
            torch.clamp(x, -torch.inf, torch.inf),
            aten.clamp_min(x, 0.25),
            aten.clamp_max(x, 0.25),
        ),
    ),
    (
        "compare",
        lambda x, y, p, n, b: (
            x > y,
            x >= y,
            x >= 0.1,
            x < 0.5,
            x < n,
            n <= x,
            n <= 1,
            n == 2,
            n != 0.5,
            x == x,
            x != y,
            b == 2,
            b < 1.5,
            b >= 1,
        ),
    ),
    ("add of bools", lambda x, y, p, n, b: (b + b, b + (x > 0), torch.add(b, True))),
    *([("fma", lambda x, y, p, n, b: torch.ops.prims.fma(x, y, p))] if hasattr(torch.ops.prims, "fma") else []),
    ("truth", lambda x, y, p, n, b: (b & (x > 0), b | (x > 0), ~b, torch.logical_xor(b, n), torch.logical_and(n, x))),
    ("logical_or", lambda x, y, p, n, b: torch.logical_or(n, b)),
    ("where", lambda x, y, p, n, b: (torch.where(b, x, y), torch.where(x > 0, x, -1.5), x.masked_fill(b, -torch.inf))),
    ("to", lambda x, y, p, n, b: (x.to(torch.bfloat16).float(), n.float(), x.bool(), y.to(torch.int32), b.long())),
    (
        "to 8 bits",
        lambda x, y, p, n, b: ((y * 300).to(torch.uint8), (y * 300).to(torch.int8), (y * 1e5).to(torch.uint8)),
    ),
    (
        "copy to 8 bits",
        lambda x, y, p, n, b: [torch.zeros(y.shape, dtype=t).copy_(y * 300) for t in (torch.uint8, torch.int8)],
    ),
    ("copy to bool", lambda x, y, p, n, b: torch.zeros(x.shape, dtype=torch.bool).copy_(x)),
    ("clone", lambda x, y, p, n, b: x.clone()),
    ("lerp", lambda x, y, p, n, b: torch.lerp(x, y, 0.3)),
    ("addcmul", lambda x, y, p, n, b: torch.addcmul(x, y, p, value=0.5)),
    ("log10", lambda x, y, p, n, b: (torch.log10(p), torch.log10(p.bfloat16()), torch.log10(x), torch.log10(n))),
    (
        "beside NaN",
        lambda x, y, p, n, b: [
            f(v, w) for f in (torch.fmax, torch.fmin) for v, w in ((x, y), (y, x), (x, x), (n, n * 0))
        ],
    ),
    ("nan_to_num", lambda x, y, p, n, b: torch.nan_to_num(torch.where(b, x / 0, x), nan=1, posinf=2, neginf=3)),
]

MOVEMENT: list[Case] = [
    (
        "grid_sample",
        lambda x, i, y: (
            *(F.grid_sample(x[None], x[None, :, :, :2], mode, align_corners=False) for mode in ("bilinear", "nearest")),
            F.grid_sample(x[None], x[None, :, :, 1:3], "bicubic", "border", align_corners=True),
            F.grid_sample(x[None, None], x[None, None, ..., :3], "bilinear", "reflection", align_corners=False),
        ),
    ),
    ("view", lambda x, i, s: (x.view(6, 20) + 1, aten._unsafe_view(x, [24, 5]) + 1, x.reshape(-1) * 2)),
    ("squeeze", lambda x, i, s: (x[:1].squeeze(0) + 1, aten.squeeze(x[:1]) + 1, x.unsqueeze(1) + 1)),
    ("squeeze.dims", lambda x, i, s: x[:1, :1].squeeze((0, 1)) + 1),
    ("expand", lambda x, i, s: x[:, :1].expand(4, 6, 5) + x),
    ("permute", lambda x, i, s: (x.permute(2, 0, 1) + 1, x.transpose(0, 2) + 1, x[0].t() + 1)),
    ("slice", lambda x, i, s: (x[1:3, ::2] + 1, x[..., -2:] * 2, x[2] + 1, x[:, -1] + 1)),
    (
        "unfold",
        lambda x, i, s: (
            x.unfold(1, 4, 2) + 1,
            x.unfold(-1, 2, 3) * 2,
            x.unfold(-2, 2, 1) * 2,
            x[0, 0, 0].unfold(0, 1, 1) + 1,
        ),
    ),
    ("narrow_copy", lambda x, i, s: torch.narrow_copy(x, 1, 2, 3)),
    ("split", lambda x, i, s: [p + 1 for p in x.split([1, 2, 3], dim=1)] + [p + 1 for p in x.split(4, dim=1)]),
    ("unbind", lambda x, i, s: [p + 1 for p in x.unbind(1)][:2]),
    ("as_strided", lambda x, i, s: (x * 2).as_strided((4, 1, 6, 5), (30, 7, 5, 1)) + 1),
    (
        "as_strided of another order",
        lambda x, i, s: (
            (x.permute(2, 0, 1) + 1).as_strided((24, 5), (5, 1)) * 2,
            (x + 1).as_strided((5, 6, 4), (1, 5, 30)) * 2,
            aten.as_strided_scatter(x.flatten() * 2, x.permute(1, 2, 0) + 1, [6, 5, 4], [5, 1, 30]),
        ),
    ),
    ("detach", lambda x, i, s: aten.detach(x) + aten.alias(x)),
    ("full", lambda x, i, s: x + torch.full((6, 5), 0.3) + torch.full_like(x, 2) + x.new_full((5,), 0.1)),
    ("zeros", lambda x, i, s: x + torch.zeros(5) + torch.zeros_like(x) + x.new_zeros(5)),
    (
        "empty",
        lambda x, i, s: [
            torch.cat([x, y])
            for y in (
                *(torch.empty(0, 6, 5), torch.empty_like(x)[:0], torch.empty_permuted((0, 6, 5), (0, 1, 2))),
                *(torch.empty_strided((0, 6, 5), (30, 5, 1)), x.new_empty(0, 6, 5)),
                x.new_empty_strided((0, 6, 5), (30, 5, 1)),
            )
        ],
    ),
    ("ones", lambda x, i, s: x + torch.ones(5) + torch.ones_like(x) + x.new_ones(5)),
    ("scalar_tensor", lambda x, i, s: x + aten.scalar_tensor(0.3)),
    ("arange", lambda x, i, s: (x + torch.arange(5), x * torch.arange(1, 11, 2), x + torch.arange(0, 1, 0.2))),
    (
        "iota",
        lambda x, i, s: (
            x + torch.ops.prims.iota(5, start=2, step=3, dtype=torch.int64, device="cpu", requires_grad=False)
        ),
    ),
    ("tril", lambda x, i, s: (x.tril(), x.triu(1))),
    (
        "cat",
        lambda x, i, s: (
            torch.cat([x, x * 2], 1),
            torch.cat([torch.zeros(0), x, i.float()[:1, :4, None].expand(1, 4, 5).reshape(4, 1, 5)], 1),
        ),
    ),
    ("stack", lambda x, i, s: torch.stack([x, x + 1], -1)),
    ("flip", lambda x, i, s: (x.flip(0), x.flip(1, 2), x.roll(2, 1))),
    ("repeat", lambda x, i, s: x.repeat(2, 1, 3)),
    ("pad", lambda x, i, s: (F.pad(x, (1, 2), value=0.5), F.pad(x, (-1, 1, 0, 2)), F.pad(i, (1, 0), value=7))),
    ("reflect", lambda x, i, s: (F.pad(x, (1, 2), mode="reflect"), F.pad(x, (2, 1, 1, 0), mode="reflect"))),
    ("replicate", lambda x, i, s: (F.pad(x, (1, 2), mode="replicate"), F.pad(x, (2, 1, 1, 0), mode="replicate"))),
    ("reflect3", lambda x, i, s: F.pad(x[None], (1, 1, 1, 1, 1, 1), mode="reflect")),
    ("replicate3", lambda x, i, s: F.pad(x[None], (1, 1, 1, 1, 1, 1), mode="replicate")),
    ("slice_scatter", lambda x, i, s: (torch.slice_scatter(x, s, 1, 2, 4), torch.select_scatter(x, s[:, 0], 1, -1))),
    (
        "slice_scatter of steps",
        lambda x, i, s: (
            torch.slice_scatter(x, s, 1, 1, 5, 3),
            torch.slice_scatter(x, s[:, :0], 1, 5, 5, 2),
            torch.slice_scatter(x, s, 1, 0, 3, 2),
        ),
    ),
    ("copy", lambda x, i, s: (aten.copy(x, s[:, :1]), aten.copy(x, i[0, 0]))),
    (
        "linear",
        lambda x, i, s: (
            F.interpolate(x, scale_factor=2.0, mode="linear"),
            F.interpolate(x[None], size=(9, 3), mode="bilinear"),
            F.interpolate(x[None], scale_factor=(1.7, 0.6), mode="bilinear"),
            F.interpolate(x[None], size=(9, 1), mode="bilinear", align_corners=True),
            F.interpolate(x[None, None], size=(3, 7, 9), mode="trilinear"),
        ),
    ),
    ("nearest", lambda x, i, s: (F.interpolate(x, scale_factor=2.0), F.interpolate(x[None], size=(9, 7)))),
    ("nearest3", lambda x, i, s: F.interpolate(x[None, None], scale_factor=(1.0, 2.0, 1.5))),
    ("bilinear", lambda x, i, s: F.interpolate(x[None], size=(9, 7), mode="bilinear")),
    ("pixel_shuffle", lambda x, i, s: F.pixel_shuffle(x, 2)),
]

DIAGONALS: list[Case] = [
    ("diagonal", lambda x, v: [x.diagonal(k) + 1 for k in (0, 2, -3, 5, -4)]),
    ("of other axes", lambda x, v: (x.diagonal(1, 2, 0) + 1, x.mT.diagonal(-1, -1, 1) * 2, x[:, :0].diagonal() + 1)),
    ("diagonal_copy", lambda x, v: torch.diagonal_copy(x, 1)),
    ("diag_embed", lambda x, v: (torch.diag_embed(v), torch.diag_embed(v, 1, 0, 2), torch.diag(v[0], -2))),
    (
        "diagonal_scatter",
        lambda x, v: [
            *(torch.diagonal_scatter(x, x.diagonal(k) * 2, k) for k in (0, 2, -3, 5)),
            torch.diagonal_scatter(x, x.diagonal(-1, 2, 0) * 2, -1, 2, 0),
            torch.diagonal_scatter(x.mT, x.mT.diagonal(1, 0, 1) - 1, 1, 0, 1),
        ],
    ),
]

REDUCTIONS: list[Case] = [
    ("sum", lambda x, n: (x.sum(), x.sum(1), x.sum((0, 2), keepdim=True), n.sum(1), (x > 0).sum(0))),
    ("sum of bfloat16", lambda x, n: x.bfloat16().sum(1, dtype=torch.float32)),
    ("mean", lambda x, n: (x.mean(), x.mean((-1, -2)), n.float().mean(0, keepdim=True))),
    ("prod", lambda x, n: (x.prod(), x.prod(1))),
    ("extremes", lambda x, n: (x.amax(1), x.amin((0, 2)), n.amax(0), x.max(), n.min(), (x > 0).max(), (x > 0).amin(1))),
    (
        "of a scalar",
        lambda x, n: (
            *(x[0, 0, 0].sum(), x[0, 0, 0].amax(), torch.softmax(x[0, 0, 0], 0)),
            *(x[0, 0, 0].argmax(), *x[0, 0, 0].min(0), x[0, 0, 0].cumsum(0), n[0, 0, 0].cumsum(0)),
        ),
    ),
    ("truth", lambda x, n: ((x > 1).any(), (x > 1).any(1), (x > -2).all(1, keepdim=True), (n == 0).all())),
    ("norms", lambda x, n: [torch.linalg.vector_norm(x, o, dim=1) for o in (1, 2, torch.inf)] + [x.norm()]),
    (
        "norms of other orders",
        lambda x, n: [torch.linalg.vector_norm(x[:, :3], o, dim=1) for o in (0, 0.5, 3, -1, -torch.inf)],
    ),
    ("norm of bfloat16", lambda x, n: torch.linalg.vector_norm(x.bfloat16().float(), 5, (0, 2), True)),
    ("truth along axes", lambda x, n: (aten.any.dims(x > 1, [0, 2]), aten.all.dims(x > -2, [0, 2]))),
    ("arg of bool", lambda x, n: (*(x > 0).max(1), *(x > 0).min(0))),
    ("arg", lambda x, n: (x.argmax(), x.argmax(1), x.argmin(2, keepdim=True), n.argmin(0))),
    ("max.dim", lambda x, n: (*x.max(1), *n.min(2))),
    ("var", lambda x, n: (x.var(1), x.var((0, 2), correction=0), x.std(1), *torch.var_mean(x, 1))),
    ("cumsum", lambda x, n: (x.cumsum(1), n.cumsum(0), (x > 0).cumsum(2), n.cumsum(1, dtype=torch.int8))),
    ("cumprod", lambda x, n: (x.cumprod(1), n.cumprod(0), (x > 0).cumprod(2), n.cumprod(1, dtype=torch.float64))),
    ("cummax", lambda x, n: (*x.cummax(1), *n.cummax(-1), *(x > 0).cummax(0), *x.round().cummin(1), *n.cummin(0))),
    ("logcumsumexp", lambda x, n: (x.logcumsumexp(1), (x * 30).logcumsumexp(0))),
    ("softmax", lambda x, n: (x.softmax(-1), x.softmax(1), x.log_softmax(-1), x.logsumexp(1))),
    ("softmax of bfloat16", lambda x, n: torch.softmax(x.bfloat16().float(), -1)),
    ("softmax_backward", lambda x, n: aten._softmax_backward_data(x, x.softmax(-1), -1, torch.float32)),
    ("log_softmax_backward", lambda x, n: aten._log_softmax_backward_data(x, x.log_softmax(-1), -1, torch.float32)),
]

CONTRACTIONS: list[Case] = [
    ("mm", lambda x, w, a, b: (a @ b, a @ b[:, 0], torch.addmm(b[0], a, b, beta=0.5, alpha=2))),
    (
        "addmv",
        lambda x, w, a, b: (torch.addmv(b[0, :1], a, b[:, 1], beta=0.5, alpha=2), torch.addmv(a[:, 0], a, b[:, 1])),
    ),
    ("addbmm", lambda x, w, a, b: torch.addbmm(b[:6], x[0, :, :6], x[1, :, :, :5], alpha=0.5)),
    ("bmm", lambda x, w, a, b: (torch.bmm(a[None].expand(2, 6, 8), b.expand(2, 8, 5)), torch.matmul(a, a.t()))),
    ("baddbmm", lambda x, w, a, b: torch.baddbmm(b[:1], a[None], b[None], beta=0, alpha=0.5)),
    ("integers", lambda x, w, a, b: (a * 3).long() @ (b * 3).long()),
    ("linear", lambda x, w, a, b: F.linear(x, a[:, :7], a[:, 0])),
    ("conv2d", lambda x, w, a, b: F.conv2d(x, w, w[:, 0, 0, 0], stride=2, padding=1)),
    ("grouped", lambda x, w, a, b: (F.conv2d(x, w[:, :2], groups=2), F.conv2d(x, w[:4, :1], groups=4, dilation=2))),
    ("conv1d", lambda x, w, a, b: F.conv1d(x[:, :, 0], w[..., 0], padding=1)),
    ("conv3d", lambda x, w, a, b: F.conv3d(x[:, :, None], w[:, :, None])),
    ("conv_transpose2d", lambda x, w, a, b: F.conv_transpose2d(x, w[:4], stride=2, padding=1, output_padding=1)),
    (
        "convolution_backward",
        lambda x, w, a, b: aten.convolution_backward(
            F.conv2d(x, w, padding=1), x, w, [6], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        ),
    ),
    (
        "conv_transpose_backward",
        lambda x, w, a, b: aten.convolution_backward(
            F.conv_transpose2d(x, w[:4], stride=2),
            *(x, w[:4], None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1, [True, True, False]),
        ),
    ),
]

WINDOWS: list[Case] = [
    ("max_pool2d", lambda x: (F.max_pool2d(x, 3, 2, 1), *F.max_pool2d(x, 2, return_indices=True))),
    ("dilated", lambda x: F.max_pool2d(x, 2, 1, dilation=2, ceil_mode=True)),
    (
        "max_pool2d_backward",
        lambda x: aten.max_pool2d_with_indices_backward(
            F.max_pool2d(x, 2), x, [2, 2], [2, 2], [0, 0], [1, 1], False, F.max_pool2d(x, 2, return_indices=True)[1]
        ),
    ),
    ("max_pool3d", lambda x: F.max_pool3d(x, 2)),
    (
        "max_pool3d_backward",
        lambda x: aten.max_pool3d_with_indices_backward(
            *(F.max_pool3d(x[None], 2), x[None], [2] * 3, [2] * 3, [0] * 3, [1] * 3, False),
            F.max_pool3d(x[None], 2, return_indices=True)[1],
        ),
    ),
    (
        "avg_pool",
        lambda x: (F.avg_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2, count_include_pad=False), F.avg_pool3d(x[None], 2)),
    ),
    ("avg_pool1d", lambda x: F.avg_pool1d(x[0], 2)),
    (
        "avg_pool2d_backward",
        lambda x: aten.avg_pool2d_backward(F.avg_pool2d(x, 2), x, [2, 2], [], [0, 0], False, True, None),
    ),
    (
        "avg_pool3d_backward",
        lambda x: aten.avg_pool3d_backward(
            F.avg_pool3d(x[None], 2), x[None], [2] * 3, [2] * 3, [0] * 3, False, True, None
        ),
    ),
    (
        "adaptive",
        lambda x: (F.adaptive_avg_pool2d(x, 3), F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool3d(x[None], 2)),
    ),
    ("adaptive_max_pool", lambda x: (*F.adaptive_max_pool2d(x, 3, True), *F.adaptive_max_pool3d(x[None], 2, True))),
    (
        "adaptive_max_pool2d_backward",
        lambda x: aten.adaptive_max_pool2d_backward(x[..., :3, :2], x, F.adaptive_max_pool2d(x, (3, 2), True)[1]),
    ),
    (
        "adaptive_max_pool3d_backward",
        lambda x: aten.adaptive_max_pool3d_backward(
            x[None, :, :2, :3, :2], x[None], F.adaptive_max_pool3d(x[None], (2, 3, 2), True)[1]
        ),
    ),
    ("adaptive_backward", lambda x: aten._adaptive_avg_pool2d_backward(F.adaptive_avg_pool2d(x, 3), x)),
    ("adaptive3_backward", lambda x: aten._adaptive_avg_pool3d_backward(F.adaptive_avg_pool3d(x[None], 2), x[None])),
]

_cpu_flash = aten._scaled_dot_product_flash_attention_for_cpu


def _attention_gradients(q: torch.Tensor, k: torch.Tensor, **how: Any) -> Any:
    out, stats = _cpu_flash(q, k, k * 2, 0.0, False, **how)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        out * 3 + 1, q, k, k * 2, out, stats, 0.0, False, **how
    )


attention = F.scaled_dot_product_attention
ATTENTION: list[Case] = [
    ("causal", lambda q, k, m: (attention(q, k, k * 2, is_causal=True), *_cpu_flash(q, k, k, scale=0.3))),
    ("masked", lambda q, k, m: attention(q, k, k, attn_mask=m)),
    ("biased", lambda q, k, m: attention(q, k, k, attn_mask=m.float())),
    (
        "gradients",
        lambda q, k, m: (
            *_attention_gradients(q, k),
            *_attention_gradients(q, k, attn_mask=m * q[0, 0, 0, 0], scale=0.4),
        ),
    ),
    ("turned", lambda q, k, m: attention(q.mT.contiguous().mT, k.mT.contiguous().mT, k)),
]

SORTING: list[Case] = [
    ("sort", lambda x, n, r: (*x.sort(), *x.sort(1, descending=True), *n.sort(dim=0, stable=True), *x[0, 0, 0].sort())),
    ("argsort", lambda x, n, r: (x.argsort(0), torch.argsort(n, dim=-1, descending=True, stable=True), x.msort())),
    ("topk", lambda x, n, r: (*x.topk(3), *x.topk(2, 1, largest=False), n.topk(4)[0], *x[0, 0, 0].topk(1))),
    ("kthvalue", lambda x, n, r: (*x.kthvalue(2), *x.kthvalue(3, 1, keepdim=True), *x[0, 0, 0].kthvalue(1))),
    ("median", lambda x, n, r: (x.median(), *x.median(1), *x.median(0, keepdim=True), n.median(), n.median(1)[0])),
    ("nanmedian", lambda x, n, r: (r.nanmedian(), *r.nanmedian(1), *r.median(0), x.median(), *x[0, 0, 0].median(0))),
    (
        "searchsorted",
        lambda x, n, r: (
            torch.searchsorted(x.sort().values, x.flip(-1)),
            torch.searchsorted(n[0, 0].sort().values, n, right=True, out_int32=True),
            torch.searchsorted(n[0, 0], n, side="right", sorter=n[0, 0].argsort()),
            torch.searchsorted(n[0, 0].sort().values, 2.5),
        ),
    ),
    (
        "bucketize",
        lambda x, n, r: (
            torch.bucketize(x, torch.linspace(-1, 1, 5)),
            torch.bucketize(n, n[0, 0].sort().values, right=True, out_int32=True),
            torch.bucketize(0.5, x[0, 0].sort().values),
        ),
    ),
]

_IMAGES = random(2, 4, 5, 6)
_HOLES = random(4, 6, seed=2).where(random(4, 6, seed=3) > 0, torch.nan)
GROUPS: dict[str, tuple[list[Case], tuple[Any, ...]]] = {
    "indices": (INDICES, INPUTS),
    "movement": (MOVEMENT, (random(4, 6, 5), torch.arange(12).reshape(2, 6) * 7 % 6, random(4, 2, 5))),
    "diagonal": (DIAGONALS, (random(4, 6, 5), random(3, 4))),
    "reduction": (REDUCTIONS, (random(4, 6, 5), torch.arange(30).reshape(2, 3, 5) * 7 % 11 - 5)),
    "contraction": (CONTRACTIONS, (random(2, 4, 7, 7), random(6, 4, 3, 3), random(6, 8), random(8, 5))),
    "window": (WINDOWS, (random(2, 4, 7, 6),)),
    "attention": (ATTENTION, (random(2, 3, 5, 8), random(2, 3, 7, 8), torch.arange(35).reshape(5, 7) % 3 != 2)),
    "sorting": (SORTING, (random(4, 6, 5), torch.arange(30).reshape(2, 3, 5) * 7 % 11 - 5, _HOLES)),
    "norm": (NORMS, (_IMAGES, random(6), random(6, seed=1).abs() + 0.5)),
}
