"""Small graphs, in any dtype, of every composite of the op table and of every function that builds several nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import fusegraph as fg
from fusegraph.ops.attention_fp8 import SCALES

Results = fg.Tensor | Iterable[fg.Tensor]
Build = Callable[[fg.Graph], Results]


def _norm(name: str, shape: tuple[int, ...], own: tuple[int, ...], **how: Any) -> Build:
    def build(g: fg.Graph) -> Results:
        weights = [g.tensor(n, own) for n in ("scale", "bias")][: 1 if name == "rmsnorm" else 2]
        result: Results = getattr(g, name)(g.tensor("x", shape), *weights, **how)
        return result

    return build


def _norm_backward(
    name: str, shape: tuple[int, ...], own: tuple[int, ...], shared: tuple[int, ...], **how: Any
) -> Build:
    def build(g: fg.Graph) -> Results:
        loss, x = g.tensor("loss", shape), g.tensor("x", shape)
        wide = "float64" if x.dtype.name == "float64" else "float32"
        statistics = [g.tensor(n, shared, wide) for n in ("mean", "inv_variance")][name == "rmsnorm_backward" :]
        result: Results = getattr(g, name)(loss, x, g.tensor("scale", own), *statistics, **how)
        return result

    return build


def _like(name: str, shape: tuple[int, ...], *operands: str, **how: Any) -> Build:
    return lambda g: getattr(g, name)(*(g.tensor(n, shape) for n in operands), **how)


def _sdpa(rows: int = 9, keys: int = 13, depth: int = 8, **how: Any) -> Build:
    def build(g: fg.Graph) -> Results:
        q, k, v = (g.tensor(n, (2, 2, s, depth)) for n, s in (("q", rows), ("k", keys), ("v", keys)))
        more = dict(how)
        if more.pop("lengths", False):
            more |= {"seq_len_q": g.constant(np.array([rows, 3])), "seq_len_kv": g.constant(np.array([keys, 4]))}
        if more.pop("bias", False):
            more["bias"] = g.tensor("bias", (1, 2, rows, keys))
        if more.pop("sink", False):
            more["sink_token"] = g.tensor("sink", (1, 2, 1, 1), "float32")
        result: Results = g.sdpa(q, k, v, **more)
        return result

    return build


def _sdpa_backward(g: fg.Graph) -> Results:
    q, o, loss = (g.tensor(n, (1, 2, 7, 8)) for n in ("q", "o", "dO"))
    k, v = (g.tensor(n, (1, 2, 9, 8)) for n in "kv")
    stats = g.tensor("stats", (1, 2, 7, 1), "float64" if q.dtype.name == "float64" else "float32")
    return [t for t in g.sdpa_backward(q, k, v, o, loss, stats, use_causal_mask=True) if t is not None][:3]


def _head(backward: bool = False, **how: Any) -> Build:
    def build(g: fg.Graph) -> Results:
        x, w, bias = g.tensor("x", (6, 5)), g.tensor("w", (11, 5)), g.tensor("bias", (11,))
        target = g.constant(np.array([3, 0, -100, 10, 7, 7]))
        loss, lse = g.linear_cross_entropy(x, w, target, bias, **how)
        wanted = (loss.shape, loss.dtype)
        result: Results = (loss, lse)
        if backward:
            result = g.linear_cross_entropy_backward(g.tensor("loss", *wanted), x, w, target, lse, bias, **how)
        return result

    return build


def _sdpa_fp8(g: fg.Graph) -> Results:
    q, k, v = (g.tensor(n, (1, 2, 9, 16), "float8_e4m3") for n in "qkv")
    result: Results = g.sdpa_fp8(q, k, v, *(g.tensor(n, (1, 1, 1, 1), "float32") for n in SCALES), dtype="bfloat16")
    return result


def _batchnorm(g: fg.Graph) -> Results:
    x, own = g.tensor("x", (3, 4, 5, 6)), (1, 4, 1, 1)
    more = [g.tensor(n, own) for n in ("scale", "bias", "mean", "variance")]
    result: Results = g.batchnorm(x, *more, momentum=0.3)
    return result


def _batchnorm_inference(g: fg.Graph) -> Results:
    more = [g.tensor(n, (1, 4, 1, 1)) for n in ("mean", "inv_variance", "scale", "bias")]
    result: Results = g.batchnorm_inference(g.tensor("x", (3, 4, 5, 6)), *more)
    return result


def _rope(name: str) -> Build:
    return lambda g: getattr(g, name)(g.tensor("x", (1, 2, 7, 8)), g.tensor("freqs", (7, 1, 1, 4)), rope_dim=4)


_CHANNELS: dict[str, Any] = {"shape": (3, 4, 5, 6), "own": (1, 4, 1, 1)}


#: Composite of the op table -> graphs of it.
def _compressed(g: fg.Graph) -> Results:
    """Spreads compressed values out: of every four terms the first and the third are kept."""
    places = np.tile(np.array([0, 2], np.int8), (5, 8))
    return g.sparse_2_4(g.tensor("values", (5, 16)), g.constant(places, "places"))


COMPOSITES: dict[str, list[Build]] = {
    "reduction": [_like("reduction", (5, 33), "x", mode=mode, axes=1) for mode in ("var", "argmax", "any")],
    "softmax": [_like("softmax", (5, 33), "x"), _like("softmax", (5, 4, 3), "x", axis=1)],
    "log_softmax": [_like("log_softmax", (5, 33), "x")],
    "logsumexp": [_like("logsumexp", (5, 33), "x"), _like("logsumexp", (5, 4, 3), "x", axes=(0, 2), keepdims=False)],
    "softmax_backward": [_like("softmax_backward", (5, 33), "loss", "y")],
    "log_softmax_backward": [_like("log_softmax_backward", (5, 33), "loss", "y")],
    "dropout": [lambda g: g.dropout(g.tensor("x", (5, 33)), 7, 3, probability=0.3)],
    "dropout_backward": [lambda g: g.dropout_backward(g.tensor("loss", (5, 33)), 7, 3, probability=0.3)],
    "sdpa": [
        _sdpa(),
        _sdpa(use_causal_mask=True, bias=True, generate_stats=True),
        _sdpa(lengths=True, use_alibi_mask=True, use_causal_mask=True),
        _sdpa(sink=True, soft_cap=3.0, generate_stats=True),
        _sdpa(diagonal_band_left_bound=3, use_causal_mask=True, diagonal_alignment="BOTTOM_RIGHT"),
    ],
    "sdpa_backward": [_sdpa_backward],
    "sdpa_fp8": [_sdpa_fp8],
    "layernorm": [
        _norm("layernorm", (5, 33), (1, 33)),
        _norm("layernorm", (3, 4, 5), (1, 4, 5), axes=(1, 2), norm_forward_phase="training"),
    ],
    "adalayernorm": [_norm("adalayernorm", (3, 4, 33), (3, 1, 33), norm_forward_phase="training")],
    "instancenorm": [_norm("instancenorm", norm_forward_phase="training", **_CHANNELS)],
    "rmsnorm": [_norm("rmsnorm", (5, 33), (1, 33), norm_forward_phase="training")],
    "groupnorm": [_norm("groupnorm", groups=2, norm_forward_phase="training", **_CHANNELS)],
    "batchnorm": [_batchnorm],
    "batchnorm_inference": [_batchnorm_inference],
    "sparse_2_4": [_like("sparse_2_4", (5, 32), "x"), _compressed],
    "sparse_2_4_mask": [_like("sparse_2_4_mask", (3, 7, 4), "x")],
    "sparse_2_4_compress": [_like("sparse_2_4_compress", (5, 32), "x")],
    "genstats": [_like("genstats", (3, 4, 5, 6), "x")],
    "layernorm_backward": [_norm_backward("layernorm_backward", (5, 33), (1, 33), (5, 1))],
    "adalayernorm_backward": [_norm_backward("adalayernorm_backward", (3, 4, 33), (3, 1, 33), (3, 4, 1))],
    "instancenorm_backward": [_norm_backward("instancenorm_backward", shared=(3, 4, 1, 1), **_CHANNELS)],
    "batchnorm_backward": [_norm_backward("batchnorm_backward", shared=(1, 4, 1, 1), **_CHANNELS)],
    "groupnorm_backward": [_norm_backward("groupnorm_backward", shared=(3, 2, 1, 1), groups=2, **_CHANNELS)],
    "rmsnorm_backward": [_norm_backward("rmsnorm_backward", (5, 33), (1, 33), (5, 1))],
    "max_pool_backward": [
        lambda g: g.max_pool_backward(g.tensor("loss", (1, 2, 3, 3)), g.tensor("x", (1, 2, 6, 6)), window=2)
    ],
    "adaptive_max_pool_backward": [
        lambda g: g.adaptive_max_pool_backward(g.tensor("loss", (1, 2, 3, 4)), g.tensor("x", (1, 2, 7, 6)))
    ],
    "global_max_pool": [_like("global_max_pool", (2, 3, 4, 5), "x")],
    "global_avg_pool": [_like("global_avg_pool", (2, 3, 4, 5), "x")],
    "local_response_norm": [_like("local_response_norm", (2, 9, 3, 4), "x", alpha=0.1)],
    "local_response_norm_backward": [_like("local_response_norm_backward", (2, 9, 3, 4), "loss", "x", alpha=0.1)],
    "local_contrast_norm": [_like("local_contrast_norm", (2, 3, 7, 8), "x", window=3)],
    "local_contrast_norm_backward": [_like("local_contrast_norm_backward", (2, 3, 7, 8), "loss", "x", window=3)],
    "cummax_index": [_like("cummax_index", (3, 40), "x"), _like("cummax_index", (6, 4), "x", axis=0)],
    "cummin_index": [_like("cummin_index", (3, 40), "x")],
    "linear_cross_entropy": [_head(), _head(reduction="none", label_smoothing=0.2)],
    "linear_cross_entropy_backward": [_head(True), _head(True, reduction="sum", label_smoothing=0.2)],
    "rope": [_rope("rope")],
    "rope_backward": [_rope("rope_backward")],
}  # fmt: skip


def _index(g: fg.Graph, *values: Any) -> fg.Tensor:
    return g.constant(np.array(values, np.int32))


def _einsum(equation: str, *shapes: tuple[int, ...], other: str | None = None) -> Build:
    def build(g: fg.Graph) -> Results:
        last = len(shapes) - 1
        return g.einsum(equation, *(g.tensor(f"x{n}", s, other if n == last else None) for n, s in enumerate(shapes)))

    return build


#: Function that writes several nodes -> graphs of it.
CALLS: dict[str, list[Build]] = {
    "einsum": [
        _einsum("ij,jk->k", (400, 2), (2, 3)),
        _einsum("ij,jk->k", (400, 2), (2, 3), other="float32"),
        _einsum("i,i,i->i", (7,), (7,), (7,), other="float32"),
        _einsum("abc,cd,de->abe", (2, 3, 4), (4, 5), (5, 6)),
        _einsum("iij->j", (30, 30, 2)),
    ],
    "where": [lambda g: g.where(g.tensor("m", (5, 7), "bool"), g.tensor("x", (5, 7)), g.tensor("y", (7,)))],
    "arange": [
        lambda g: g.tensor("x", (300,)) * g.arange(300, dtype=g.io_dtype),
        lambda g: g.arange(300, -3.0, 0.25, dtype=g.io_dtype),
        lambda g: g.arange(3000, 0.5, 0.5, dtype=g.io_dtype),
    ],
    "tril": [lambda g: g.tril(g.tensor("x", (2, 5, 7)), 1)],
    "triu": [lambda g: g.triu(g.tensor("x", (2, 5, 7)), -1)],
    "one_hot": [lambda g: g.one_hot(_index(g, 1, 9, 0, 3), 5, axis=0, on=2.5, off=-1.0, dtype=g.io_dtype)],
    "take_along_axis": [lambda g: g.take_along_axis(g.tensor("x", (3, 7)), _index(g, [0, 6, 9], [2, 2, -1]), 1)],
    "searchsorted": [
        lambda g, r=right, s=shape: g.searchsorted(g.sort(g.tensor("x", s)), g.tensor("v", (3, 7)), r)
        for right in (False, True) for shape in ((3, 20), (20,))
    ],
    "gather_nd": [lambda g: g.gather_nd(g.tensor("x", (3, 4, 5)), _index(g, [[0, 3]], [[2, 9]], [[1, 1]]), batch=0),
                  lambda g: g.gather_nd(g.tensor("x", (3, 4, 5)), _index(g, [[0]], [[2]], [[3]]), batch=1)],
    "scatter_nd": [
        lambda g, m=mode: g.scatter_nd(
            g.tensor("x", (3, 4, 5)), _index(g, [0, 3], [2, 1], [0, 3], [9, 0]), g.tensor("v", (4, 5)), m
        )
        for mode in ("none", "add", "mul", "max", "min")
    ],
    "block_scale_dequantize": [
        lambda g: g.block_scale_dequantize(
            g.tensor("x", (4, 6), "int4"), g.tensor("s", (2, 2)), block_size=(2, 3), dtype=g.io_dtype
        )
    ],
    "dequantize": [
        lambda g: g.dequantize(g.tensor("x", (4, 6), "uint4"), g.tensor("s", (4, 3)), g.tensor("z", (4, 1), "int8")),
        lambda g: g.dequantize(g.tensor("x", (2, 4, 6), "int4"), g.tensor("s", (2, 1))),
        lambda g: g.dequantize(g.tensor("x", (4, 6), "uint2"), g.tensor("s", ()), g.tensor("z", (), "uint2")),
    ],
    "split": [lambda g: [t + 1 for t in g.split(g.tensor("x", (6, 5)), [1, 2, 3])]],
    "flip": [lambda g: g.flip(g.tensor("x", (6, 5)), 1) * 2],
    "squeeze": [lambda g: g.squeeze(g.tensor("x", (1, 5, 1))) * 2],
    "unsqueeze": [lambda g: g.unsqueeze(g.tensor("x", (6, 5)), [0, 2]) * 2],
    "space_to_depth": [lambda g: g.space_to_depth(g.tensor("x", (2, 3, 4, 6)), 2)],
    "depth_to_space": [lambda g: g.depth_to_space(g.tensor("x", (2, 12, 4, 3)), 2)],
    "resample": [
        lambda g: g.resample(g.tensor("x", (3, 9)), 1, [[0, 1], [4, 8], [3, 3]], [[0.25, 0.75], [-1.5, 2.5], [0.1, 2]]),
        lambda g: g.resample(g.tensor("x", (3, 9)), 1, [list(range(9))] * 4, [[0.1 * k for k in range(9)]] * 4),
    ],
    "interpolate": [
        lambda g, m=mode, a=aligned: g.interpolate(g.tensor("x", (1, 2, 5, 6)), (8, 3), m, a)
        for mode in ("nearest", "linear", "cubic") for aligned in (False, True)
    ],
    "grid_sample": [
        lambda g, m=mode, p=padding: g.grid_sample(g.tensor("x", (1, 2, 5, 6)), g.tensor("grid", (1, 3, 4, 2)), m, p)
        for mode in ("nearest", "linear", "cubic") for padding in ("zeros", "border", "reflection")
    ],
    "sample": [
        lambda g, how=how: g.sample(g.tensor("x", (5, 40)), seed=3, **how)
        for how in ({"temperature": 0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.8})
    ],
}  # fmt: skip


def graph_of(build: Build, dtype: str, name: str = "case") -> fg.Graph:
    """Builds a case's graph; the results are its outputs."""
    g = fg.Graph(name, io_dtype=dtype, compute_dtype="float64" if dtype == "float64" else "float32")
    made = build(g)
    for n, t in enumerate([made] if isinstance(made, fg.Tensor) else made):
        g.output(t, name=f"y{n}")
    return g


def graphs(cases: dict[str, list[Build]], dtype: str) -> list[fg.Graph]:
    """Builds the graphs of all cases in a dtype."""
    return [graph_of(b, dtype, f"{name} {n} {dtype}") for name, builds in cases.items() for n, b in enumerate(builds)]
