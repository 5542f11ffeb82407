"""Calls of ATen operators that read, write or combine elements at positions, with inputs to call them with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
F = torch.nn.functional
Case = tuple[str, Callable[..., Any]]


def _random(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _places(size: int, *shape: int) -> Any:
    return torch.randint(0, size, shape, generator=torch.Generator().manual_seed(size + sum(shape)))


#: x, places along axis 1, what is put there, places of slices, slices, places along axes 0 and 2.
INPUTS = (
    _random(6, 7, 5),
    _places(7, 6, 9, 5),
    _random(6, 9, 5),
    _places(7, 12),
    _random(6, 12, 5),
    _places(6, 4, 3),
    _places(5, 4, 3),
)
_REDUCE = [(r, i) for r in ("sum", "prod", "mean", "amax", "amin") for i in (True, False)]

INDICES: list[Case] = [
    ("embedding", lambda x, i, s, k, w, a, b: F.embedding(a, x[:, 0])),
    (
        "gather",
        lambda x, i, s, k, w, a, b: (
            *(x.gather(1, i), x.gather(1, i[:, :1]), (x * 2).gather(1, i[:, :1])),
            x.log_softmax(1).gather(1, i[:, :1]),
        ),
    ),
    ("unsafe_index", lambda x, i, s, k, w, a, b: aten._unsafe_index(x, [None, k[:, None], b[0]])),
    ("index_select", lambda x, i, s, k, w, a, b: (x.index_select(1, k), x.index_select(-1, b[0]))),
    (
        "index",
        lambda x, i, s, k, w, a, b: (
            *(x[a], x[:, k - 7], x[:, k[:, None], b[0] - 5], x[a[0]], x[a, a], x[a, :, b], x[:, a, b]),
            *(x[a, a - 7, b], x[:, :, b], x[:, a[:2, None], b[0]], x[a[:, :1], :, b]),
        ),
    ),
    (
        "scatter",
        lambda x, i, s, k, w, a, b: (
            *(x.scatter(1, i[:, :1], s[:, :1]), x.scatter(1, i, 0.3), x.scatter(1, i[:3, :2, :4], s)),
            *((x * 9).long().scatter(1, i, 7), x.bfloat16().scatter(1, i[:, :2], 0.3), x.scatter(-1, i[:, :0], s)),
        ),
    ),
    (
        "scatter that combines",
        lambda x, i, s, k, w, a, b: (
            *(
                x.scatter_add(1, i, s),
                x.scatter_add(1, i[:2, :, :3], s),
                (x > 0).int().scatter_add(1, i, (s > 0).int()),
            ),
            aten.scatter.reduce(x, 1, i, s, reduce="multiply"),
            aten.scatter.value_reduce(x, 1, i, 2.0, reduce="add"),
        ),
    ),
    *[
        (f"scatter_reduce {r} {o}", lambda x, i, s, k, w, a, b, r=r, o=o: x.scatter_reduce(1, i, s, r, include_self=o))
        for r, o in _REDUCE
    ],
    *[
        (f"index_reduce {r} {o}", lambda x, i, s, k, w, a, b, r=r, o=o: x.index_reduce(1, k, w, r, include_self=o))
        for r, o in _REDUCE
        if r != "sum"
    ],
    (
        "index_add",
        lambda x, i, s, k, w, a, b: (
            *(x.index_add(1, k, w), x.index_add(1, k, w, alpha=0.5), x.index_add(-1, b[0], x[..., :3])),
            (x * 9).int().index_add(1, k, (w * 9).int(), alpha=2),
        ),
    ),
    (
        "index_copy",
        lambda x, i, s, k, w, a, b: (
            *(aten.index_copy(x, 1, k[:1], w[:, :1]), aten.index_copy(x, 1, k[:0], w[:, :0])),
            aten.index_copy(x, 0, a[0, 0], x[:1]),
        ),
    ),
    (
        "index_fill",
        lambda x, i, s, k, w, a, b: (x.index_fill(1, k[:3] - 7, 2.5), x.index_fill(0, a[0], x[0, 0, 0])),
    ),
    (
        "index_put",
        lambda x, i, s, k, w, a, b: (
            *(aten.index_put(x, [None, k], w, True), aten.index_put(x, [a, a], s[:4, :3], True)),
            *(
                aten.index_put(x, [a, None, b], w[:4, :3, :1], True),
                aten.index_put(x, [a, a - 7, b], s[:4, :3, 0], True),
            ),
            *(
                aten.index_put(x, [None, a, b], s[:, :4, :3], True),
                aten.index_put(x, [None, a[:, :1], b[0]], s[:, :4, :3], True),
            ),
            *(aten.index_put(x, [a[:1, :1]], s[0, 0]), aten.index_put((x * 9).long(), [a], k[:5], True)),
            aten._unsafe_index_put(x, [None, None, b[0] - 5], x[..., :1], True),
        ),
    ),
    (
        "masks",
        lambda x, i, s, k, w, a, b: (
            *(aten.index_put(x, [x > 0], s[0, 0, 0]), aten.index_put(x, [x > 0], s[0, 0, 0], True)),
            aten.index_put(x, [x[..., 0] > 0], s[0, 0]),
            x.masked_scatter(x > 0, w),
            x.masked_scatter(x[0] > 0, w),
            x[0].masked_scatter(x > 0, w),
            aten.masked_scatter_backward(x, x > 0, [6, 40]),
        ),
    ),
    ("put", lambda x, i, s, k, w, a, b: (x.put(k * 9 - 40, w[0, :, 0], accumulate=True), x.take(k * 9))),
    (
        "embedding_backward",
        lambda x, i, s, k, w, a, b: (
            aten.embedding_dense_backward(w, i[:, :1, 0].expand(6, 12), 9, -1, False),
            aten.embedding_dense_backward(w, i[:, :1, 0].expand(6, 12), 9, 2, True),
        ),
    ),
]
