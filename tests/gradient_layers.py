"""The same as gradient_cases.py for what is made of many sums: norms, scans, scatters, attention, pooling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gradient_cases import VALUES, Array, Case, Function, between, normal

# ---- norms


def _centred(t: Any, dims: Sequence[int], epsilon: float = 1e-5) -> Any:
    return (t - t.mean(dims, keepdim=True)) * (t.var(dims, correction=0, keepdim=True) + epsilon).rsqrt()


def _statistics(t: Any, dims: Sequence[int]) -> tuple[Any, Any]:
    return t.mean(dims, keepdim=True), (t.var(dims, correction=0, keepdim=True) + 1e-5).rsqrt()


def _groups(t: Any) -> Any:
    return t.reshape(2, 3, 2, *t.shape[2:])


def _group_norm(x: Any, w: Any, b: Any) -> Any:
    return _centred(_groups(x), (2, 3, 4)).reshape(x.shape) * w + b


def _group_backward(loss: Any, x: Any, w: Any, mean: Any, inverse: Any) -> Any:
    normal = ((_groups(x) - mean[:, :, None]) * inverse[:, :, None]).reshape(x.shape)
    return _gradients(loss, normal, w, inverse, x, lambda t: _groups(t).mean((2, 3, 4), keepdim=True), _groups)


def _gradients(loss: Any, normal: Any, w: Any, inverse: Any, x: Any, mean: Function, parts: Function) -> Any:
    """The gradients by x, scale and bias of a norm, as the ops that compute them define them."""
    g, wide = loss * w, inverse[:, :, None] if parts is _groups else inverse
    inner = parts(g) - mean(g) - parts(normal) * mean(g * normal)
    every = tuple(d for d, n in enumerate(w.shape) if n == 1)
    by_scale, by_bias = ((t.sum(every, keepdim=True) if every else t) for t in (loss * normal, loss))
    return (inner * wide).reshape(x.shape), by_scale, by_bias


def _backward(dims: Sequence[int]) -> Function:
    def of(loss: Any, x: Any, w: Any, mean: Any, inverse: Any) -> Any:
        every = partial(torch.mean, dim=dims, keepdim=True)
        return _gradients(loss, (x - mean) * inverse, w, inverse, x, every, lambda t: t)

    return of


def _rms(x: Any, w: Any) -> tuple[Any, Any]:
    inverse = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return x * inverse * w, inverse


def _rms_backward(loss: Any, x: Any, w: Any, inverse: Any) -> Any:
    g, normal = loss * w, x * inverse
    dx = (g - normal * (g * normal).mean(-1, keepdim=True)) * inverse
    return dx, (loss * normal).sum((0, 1))


def _batch_norm(x: Any, w: Any, b: Any, mean: Any, var: Any) -> tuple[Any, ...]:
    dims, more = (0, 2, 3), x.numel() // x.shape[1]
    fresh = x.mean(dims, keepdim=True), x.var(dims, correction=0, keepdim=True) * (more / (more - 1))
    moved = (0.9 * old + 0.1 * new for old, new in zip((mean, var), fresh))
    return _centred(x, dims) * w + b, *_statistics(x, dims), *moved


def norms() -> dict[str, list[Case]]:
    rows, one = [normal(2, 3, 5), normal(5), normal(5, seed=1)], {"norm_forward_phase": "training"}
    image, wide = normal(2, 6, 3, 4), [normal(1, 6, 1, 1), normal(1, 6, 1, 1, seed=1)]
    every, sample = (0, 1, 2), [normal(2, 1, 5), normal(2, 1, 5, seed=1)]
    spatial, batch = (2, 3), (0, 2, 3)

    def layer(x: Any, w: Any, b: Any) -> Any:
        return _centred(x, (-1,)) * w + b

    def instance(x: Any, w: Any, b: Any) -> Any:
        return _centred(x, spatial) * w + b

    def stats(x: Array, dims: Sequence[int]) -> list[Array]:
        return [t.numpy() for t in _statistics(torch.tensor(x), dims)]

    loss, losses = normal(2, 3, 5, seed=3), normal(2, 6, 3, 4, seed=3)
    running = [normal(1, 6, 1, 1, seed=2), between(0.5, 2, 1, 6, 1, 1)]
    grouped = [t[:, :, 0].numpy() for t in _statistics(_groups(torch.tensor(image)), (2, 3, 4))]
    return {
        "layernorm": [
            Case(rows, layer),
            Case(rows, layer, one),
            Case([rows[0], rows[1], np.array(0.5)], layer),
            Case([rows[0], np.array(2.0), rows[1]], layer),
            Case([rows[0], rows[1][:1], rows[1][1:2]], lambda x, w, b: _centred(x, every) * w + b, {"axes": None}),
            Case(rows, lambda x, w, b: (layer(x, w, b), *_statistics(x, (-1,))), one, results=(0, 1, 2)),
        ],
        "adalayernorm": [Case([rows[0], *sample], layer)],
        "instancenorm": [Case([image, *wide], instance), Case([image, *wide], instance, one)],
        "rmsnorm": [
            Case(rows[:2], lambda x, w: _rms(x, w)[0]),
            Case(rows[:2], _rms, one, results=(0, 1)),
        ],
        "groupnorm": [
            Case([image, *wide], _group_norm, {"groups": 3}),
            Case([image, *wide], _group_norm, {"groups": 3, **one}),
        ],
        "batchnorm": [
            Case([image, *wide], lambda x, w, b: _centred(x, batch) * w + b),
            Case([image, *wide, *running], _batch_norm, results=(0,)),
            Case([image, *wide, *running], _batch_norm, results=(0, 1, 2, 3, 4)),
        ],
        "batchnorm_inference": [
            Case([image, *running, *wide], lambda x, mean, inverse, w, b: (x - mean) * inverse * w + b)
        ],
        "genstats": [
            Case([image], lambda x: (x.sum(batch, keepdim=True), x.square().sum(batch, keepdim=True)), results=(0, 1))
        ],
        "layernorm_backward": [
            Case([loss, rows[0], sample[0], *stats(rows[0], (-1,))], _backward((-1,)), results=(0,))
        ],
        "adalayernorm_backward": [
            Case([loss, rows[0], sample[0], *stats(rows[0], (-1,))], _backward((-1,)), results=(0, 2))
        ],
        "instancenorm_backward": [
            Case([losses, image, wide[0], *stats(image, spatial)], _backward(spatial), results=(0, 1, 2))
        ],
        "batchnorm_backward": [
            Case([losses, image, wide[0], *stats(image, batch)], _backward(batch), results=(0, 1, 2))
        ],
        "groupnorm_backward": [
            Case([losses, image, wide[0], *grouped], _group_backward, {"groups": 3}, results=(0, 1))
        ],
        "rmsnorm_backward": [
            Case([loss, *rows[:2], normal(2, 3, 1)], _rms_backward, results=(0, 1))
        ],
    }  # fmt: skip


# ---- scans, places


def _scatter(reduce: str, include_self: bool = True) -> Function:
    return lambda x, i, u: x.scatter_reduce(1, i, u, reduce, include_self=include_self)


def scatters() -> list[Case]:
    x, updates = normal(3, 4), normal(2, 5, seed=1)
    index = np.array([[0, 2, 2, 1, 0], [3, 3, 3, 0, 1]])
    cases = [
        Case(
            [x, index, updates], _scatter(torch_name, include), {"axis": 1, "reduction": mode, "include_self": include}
        )
        for mode, torch_name in (("add", "sum"), ("mul", "prod"), ("max", "amax"), ("min", "amin"), ("mean", "mean"))
        for include in (True, False)
    ]
    ties, zeros = np.round(updates), np.where(updates > 0, updates, 0)
    last = np.array([[-1, 1, 0, 1], [5, 0, 2, 2]])
    return [
        *cases,
        Case([np.round(x), index, ties], _scatter("amax"), {"axis": 1, "reduction": "max"}),
        Case([np.where(x > 0, x, 0), index, zeros], _scatter("prod"), {"axis": 1, "reduction": "mul"}),
        Case([x, last, normal(2, 4)], None, {"axis": 1}),
        Case([normal(6, 2), np.array([[1], [5], [9]]), normal(3, 2)], None, {"reduction": "add"}),
    ]


def scans() -> dict[str, list[Case]]:
    x = normal(3, 5)
    zeros = np.array([[2.0, 0.0, 3.0, 0.5, 2.0], [1.0, 0.0, 3.0, 0.0, 2.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
    ties = np.array([[1.0, 1.0, 0.0, 2.0, 2.0], [0.0, -1.0, -1.0, -2.0, 3.0]])
    functions: dict[str, tuple[Function, list[Array]]] = {
        "cumsum": (torch.cumsum, [x]),
        "cumprod": (torch.cumprod, [x, zeros]),
        "cummax": (lambda t, d: torch.cummax(t, d)[0], [x, ties]),
        "cummin": (lambda t, d: torch.cummin(t, d)[0], [x, ties]),
        "logcumsumexp": (torch.logcumsumexp, [x]),
    }

    def backwards(of: Function) -> Function:
        return lambda t: of(t.flip(1), 1).flip(1)

    found: dict[str, list[Case]] = {}
    for name, (of, arrays) in functions.items():
        found[name] = [Case([a], partial(lambda of, t: of(t, 1), of)) for a in arrays]
        found[name] += [Case([a], backwards(of), {"reverse": True}) for a in arrays]
    return found


# ---- attention


def _scores(q: Any, k: Any) -> Any:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) / q.shape[-1] ** 0.5


def _attended(scores: Any, v: Any, mask: Any = None) -> Any:
    scores = scores if mask is None else scores.masked_fill(~mask, -1e300)
    return torch.softmax(scores, -1) @ v.repeat_interleave(scores.shape[1] // v.shape[1], 1)


def attention() -> dict[str, list[Case]]:
    q, k, v = normal(2, 4, 3, 8), normal(2, 2, 5, 8), normal(2, 2, 5, 6)
    bias, sink, mask = normal(1, 4, 3, 5), normal(1, 4, 1, 1), between(-1, 2, 2, 1, 3, 5) > 0
    causal = torch.ones(3, 5, dtype=torch.bool).tril()
    lengths = np.array([5, 2], np.int32), np.array([3, 2], np.int32)

    def with_sink(q: Any, k: Any, v: Any, sink: Any) -> Any:
        scores = torch.cat([_scores(q, k), sink.expand(2, 4, 3, 1)], -1)
        return _attended(scores, torch.cat([v, torch.zeros_like(v[:, :, :1])], 2))

    def with_stats(q: Any, k: Any, v: Any) -> Any:
        scores = _scores(q, k)
        return _attended(scores, v), scores.logsumexp(-1, keepdim=True)

    def capped(q: Any, k: Any, v: Any) -> Any:
        return _attended(2 * torch.tanh(_scores(q, k) / 2), v)

    def sdpa(of: Function | None, *more: Array, **how: Any) -> Case:
        names = how.pop("names", ())
        return Case([q, k, v, *more], of, {"operands": ("q", "k", "v", *names), **how})

    def backward(q: Any, k: Any, v: Any, o: Any, loss: Any, stats: Any) -> Any:
        wide_k, wide_v = (t.repeat_interleave(2, 1) for t in (k, v))
        p = torch.exp(_scores(q, k) - stats)
        by_scores = p * (loss @ wide_v.transpose(-1, -2) - (o * loss).sum(-1, keepdim=True)) / 8**0.5
        by_k, by_v = by_scores.transpose(-1, -2) @ q, p.transpose(-1, -2) @ loss
        return by_scores @ wide_k, *(t.reshape(2, 2, 2, *t.shape[2:]).sum(2) for t in (by_k, by_v))

    every = [normal(2, 4, 3, 6, seed=2), normal(2, 4, 3, 6, seed=3), normal(2, 4, 3, 1) + 3]
    pages = np.array([[2, 0], [1, 1]], np.int32)
    return {
        "sdpa": [
            sdpa(lambda q, k, v: _attended(_scores(q, k), v)),
            sdpa(lambda q, k, v: _attended(_scores(q, k), v, causal), use_causal_mask=True),
            sdpa(lambda q, k, v, b: _attended(_scores(q, k) + b, v), bias, names=("bias",)),
            sdpa(lambda q, k, v, m: _attended(_scores(q, k), v, m), mask, names=("mask",)),
            sdpa(with_sink, sink, names=("sink_token",)),
            sdpa(capped, soft_cap=2.0),
            Case([q, k, v], with_stats, {"operands": ("q", "k", "v"), "generate_stats": True}, results=(0, 1)),
            sdpa(None, *lengths, names=("seq_len_kv", "seq_len_q"), use_alibi_mask=True),
            sdpa(None, seed=3, offset=4, dropout_probability=0.4, diagonal_band_left_bound=2),
            Case(
                [normal(2, 2, 3, 4), normal(3, 1, 2, 4), normal(3, 1, 2, 4), pages, pages, np.array([3, 4], np.int32)],
                None,
                {"operands": ("q", "k", "v", "page_table_k", "page_table_v", "seq_len_kv")},
            ),
        ],
        "sdpa_backward": [Case([q, k, v, *every], backward, results=(0, 1, 2))],
    }


def _rope(x: Any, freqs: Any, sign: int = 1, width: int = 4) -> Any:
    rest, angles = x.shape[-1] - width, freqs[:, 0, 0, : width // 2]
    low, high = x[..., rest : rest + width // 2], x[..., rest + width // 2 :]
    cos, sin = angles.cos(), sign * angles.sin()
    return torch.cat([x[..., :rest], low * cos - high * sin, high * cos + low * sin], -1)


# ---- pooling

_WINDOWS = (
    {"window": 2},
    {"window": (3, 2), "stride": (2, 1), "padding": (1, 0)},
    {"window": 3, "stride": 2, "padding": 1, "ceil_mode": True},
)


def _named(how: Mapping[str, Any]) -> dict[str, Any]:
    return {"kernel_size" if key == "window" else key: value for key, value in how.items()}


def pools() -> dict[str, list[Case]]:
    x = normal(2, 3, 6, 5)
    found: dict[str, list[Case]] = {
        name: [] for name in ("max_pool", "avg_pool", "avg_pool_backward", "max_pool_backward")
    }
    for how in (*_WINDOWS, {"window": 2, "dilation": 2}):
        most = partial(F.max_pool2d, **_named(how))
        loss = normal(*most(torch.tensor(x)).shape)

        def by_loss(loss: Any, x: Any, most: Function = most) -> Any:
            fixed = x.detach().requires_grad_()
            return torch.autograd.grad(most(fixed), fixed, loss, create_graph=True)[0]

        found["max_pool"].append(Case([x], most, how))
        found["max_pool_backward"].append(Case([loss, x], by_loss, how))
        if "dilation" not in how:
            for include in (True, False):
                mean = partial(F.avg_pool2d, count_include_pad=include, **_named(how))
                at = {**how, "count_include_pad": include}
                found["avg_pool"].append(Case([x], mean, at))
                found["avg_pool_backward"].append(
                    Case([loss], lambda d, f=mean: torch.func.vjp(f, torch.tensor(x))[1](d)[0], {**at, "size": (6, 5)})
                )
    size = (4, 2)
    adaptive = partial(F.adaptive_avg_pool2d, output_size=size)
    largest = partial(F.adaptive_max_pool2d, output_size=size)
    loss = normal(2, 3, *size)
    return {
        **found,
        "adaptive_avg_pool": [Case([x], adaptive, {"size": size})],
        "adaptive_max_pool": [Case([x], largest, {"size": size})],
        "adaptive_avg_pool_backward": [
            Case([loss], lambda d: torch.func.vjp(adaptive, torch.tensor(x))[1](d)[0], {"size": (6, 5)})
        ],
        "adaptive_max_pool_backward": [Case([loss, x], None)],
        "global_max_pool": [Case([x], lambda t: t.amax((2, 3), keepdim=True))],
        "global_avg_pool": [Case([x], lambda t: t.mean((2, 3), keepdim=True))],
        "local_response_norm": [Case([x], lambda t: F.local_response_norm(t, 2, 0.5), {"window": 2, "alpha": 0.5})],
        "local_response_norm_backward": [Case([normal(2, 3, 2, 1), normal(2, 3, 2, 1, seed=1)], None, {"window": 3})],
        "local_contrast_norm": [Case([normal(1, 2, 4, 5)], None, {"window": 3})],
        "local_contrast_norm_backward": [Case([normal(1, 1, 4, 4), normal(1, 1, 4, 4, seed=1)], None, {"window": 3})],
    }  # fmt: skip


def _slopes(of: Function) -> Function:
    """Returns the function (loss, x) -> the gradient of a function of each element."""
    return lambda loss, x: loss * torch.func.vmap(torch.func.grad(of))(x)


def _activations() -> dict[str, list[Case]]:
    of: dict[str, tuple[Function, dict[str, Any]]] = {
        "relu": (torch.relu, {}),
        "leaky_relu": (lambda t: torch.where(t > 0, t, 0.2 * t), {"negative_slope": 0.2}),
        "elu": (lambda t: torch.where(t > 0, t, 0.7 * torch.expm1(t)), {"alpha": 0.7}),
        "sigmoid": (torch.sigmoid, {}),
        "tanh": (torch.tanh, {}),
        "softplus": (lambda t: torch.log1p(torch.exp(1.5 * t)) / 1.5, {"beta": 1.5}),
        "swish": (lambda t: t * torch.sigmoid(1.5 * t), {"beta": 1.5}),
        "gelu": (F.gelu, {}),
        "gelu_approx_tanh": (lambda t: F.gelu(t, approximate="tanh"), {}),
    }
    return {
        f"{name}_backward": [Case([normal(24, seed=5), VALUES], _slopes(function), how)]
        for name, (function, how) in of.items()
    }


def _pruned(t: torch.Tensor) -> torch.Tensor:
    fours = t.unflatten(-1, (-1, 4))
    return (fours * torch.zeros_like(fours).scatter(-1, fours.detach().abs().topk(2)[1], 1.0)).flatten(-2)


#: op -> where it is differentiated.
LAYERS: dict[str, list[Case]] = {
    **norms(),
    **scans(),
    **attention(),
    **pools(),
    **_activations(),
    "scatter": scatters(),
    "sort": [
        Case([normal(3, 5)], lambda t: t.sort(-1)[0]),
        Case(
            [np.array([[1.0, 2.0, 1.0], [0.0, 0.0, 0.0]])],
            lambda t: t.sort(dim=0, descending=True, stable=True)[0],
            {"axis": 0, "descending": True},
        ),
    ],
    "topk": [
        Case([normal(3, 5)], lambda t: t.topk(2)[0], {"k": 2}),
        Case([normal(3, 5)], lambda t: t.topk(2, 0, False)[0], {"k": 2, "axis": 0, "largest": False}),
    ],
    "softmax": [
        Case([normal(3, 4)], lambda t: t.softmax(-1)),
        Case([normal(3, 4)], lambda t: t.softmax(0), {"axis": 0}),
    ],
    "log_softmax": [Case([normal(3, 4)], lambda t: t.log_softmax(-1))],
    "softmax_backward": [
        Case([normal(3, 4), normal(3, 4, seed=1)], lambda d, y: y * (d - (d * y).sum(-1, keepdim=True)))
    ],
    "log_softmax_backward": [
        Case([normal(3, 4), normal(3, 4, seed=1)], lambda d, y: d - y.exp() * d.sum(-1, keepdim=True))
    ],
    "logsumexp": [
        Case([normal(3, 4)], lambda t: t.logsumexp(1), {"axes": 1, "keepdims": False}),
        Case([normal(3, 4)], lambda t: t.logsumexp((0, 1), True), {"axes": None}),
    ],
    "sparse_2_4": [Case([normal(3, 8)], _pruned)],
    "dropout": [Case([normal(20, 3)], None, {"seed": 1, "offset": 2, "probability": 0.3})],
    "dropout_backward": [Case([normal(20, 3)], None, {"seed": 1, "offset": 2, "probability": 0.3})],
    "rope": [
        Case([normal(2, 2, 3, 6), np.tile(normal(3, 1, 1, 2), 2)], _rope, {"rope_dim": 4}, still=(1,)),
        Case([normal(2, 2, 3, 4), normal(3, 1, 1, 4)], _rope),
    ],
    "rope_backward": [Case([normal(2, 2, 3, 4), normal(3, 1, 1, 4)], partial(_rope, sign=-1))],
}
