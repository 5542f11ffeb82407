"""Calls of ATen's norms and their gradients, on images (batch, height, width, channels) and vectors of channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
F = torch.nn.functional
Case = tuple[str, Callable[..., Any]]

NORMS: list[Case] = [
    ("layer_norm", lambda x, c, v: (F.layer_norm(x, (6,), v, c), F.layer_norm(x, (5, 6)), F.layer_norm(x, (6,), v))),
    (
        "layer_norm_backward",
        lambda x, c, v: aten.native_layer_norm_backward(
            x, x * 2, [6], *aten.native_layer_norm(x * 2, [6], v, c, 1e-5)[1:], v, c, [True, True, True]
        ),
    ),
    ("group_norm", lambda x, c, v: (F.group_norm(x.transpose(1, 3).contiguous(), 2, v, c), F.group_norm(x, 4))),
    (
        "instance_norm",
        lambda x, c, v: (
            F.instance_norm(x),
            F.instance_norm(x.transpose(1, 3).contiguous(), weight=v, bias=c),
            F.batch_norm(x.transpose(1, 3).contiguous(), None, None, v, c, training=True),
        ),
    ),
    (
        "batch_norm",
        lambda x, c, v: (
            F.batch_norm(x.transpose(1, 3).contiguous(), c, v, v, c),
            F.batch_norm(x.transpose(1, 3).contiguous(), c, v),
        ),
    ),
    (
        "training",
        lambda x, c, v: aten._native_batch_norm_legit_functional(
            x.transpose(1, 3).contiguous(), v, c, c, v, True, 0.1, 1e-5
        ),
    ),
    (
        "evaluating",
        lambda x, c, v: aten._native_batch_norm_legit_functional(
            x.transpose(1, 3).contiguous(), v, c, c, v, False, 0.1, 1e-5
        )[0],
    ),
    (
        "batch_norm_backward",
        lambda x, c, v: aten.native_batch_norm_backward(
            *(
                x.transpose(1, 3).contiguous(),
                x.transpose(1, 3).contiguous() * 2,
                v,
                c,
                v,
                c * 2,
                v * 3,
                True,
                1e-5,
                [True, True, True],
            )
        ),
    ),
    (
        "evaluating_backward",
        lambda x, c, v: aten.native_batch_norm_backward(
            *(
                x.transpose(1, 3).contiguous(),
                x.transpose(1, 3).contiguous() * 2,
                v,
                c,
                v,
                None,
                None,
                False,
                1e-5,
                [True, True, True],
            )
        ),
    ),
]


def _of_newer_names(x: torch.Tensor, c: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Computes batch normalization by the operators that are for all of torch's libraries, and their gradient."""
    x = x.transpose(1, 3).contiguous()
    results = []
    for training, forward in ((True, aten._batch_norm_with_update_functional), (False, aten._batch_norm_no_update)):
        y, mean, inverse, reserve, *running = forward(x, v, c, c, v, 0.1, 1e-5)
        gradients = aten.batch_norm_backward(
            *(x * 2, x, v, c, v, mean, inverse, training, 1e-5, [True, True, True], reserve)
        )
        results += [y, *running, *gradients]
    return results


NORMS.append(("of newer names", _of_newer_names))
