"""Graphs of every op of the table in which some sizes are Dims.

A case is a function of a graph and of Dims, which its parameters name: `BOUNDS` has their bounds.  It returns the
outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from test_every_op import kinds
from test_ops_pointwise import CASES as ATTRIBUTES
from test_ops_pointwise import POINTWISE

import fusegraph as fg
from fusegraph import Dim

#: Bounds of the Dims that parameters name: batches, rows, long rows, channels, image sizes, lengths.
BOUNDS: dict[str, tuple[int, int, int]] = {
    "b": (1, 16, 1),
    "n": (1, 512, 1),
    "m": (1, 3000, 1),
    "c": (8, 64, 8),
    "h": (6, 40, 1),
    "w": (6, 40, 1),
    "s": (1, 300, 1),
    "t": (1, 300, 1),
}
#: Cases that take seconds to plan for all of these sizes, though others of their kind have them, and their own bounds.
SMALL = {
    "reduction of all", "conv_fprop planes", "depthwise planes", "conv_dgrad stride", "conv_wgrad float32",
    "max_pool_index", "max_pool_backward", "max_pool_backward_index", "max_pool whole", "local_contrast_norm_backward",
}  # fmt: skip
SMALL_BOUNDS = BOUNDS | {"b": (1, 4, 1), "n": (1, 64, 1), "m": (1, 300, 1), "h": (6, 20, 1), "w": (6, 20, 1)}
Made = fg.Tensor | Sequence[fg.Tensor]
Case = Callable[..., Made]


def build(name: str) -> fg.Graph:
    """Returns the graph of a case."""
    g, bounds = fg.Graph(name), SMALL_BOUNDS if name in SMALL else BOUNDS
    made = CASES[name](g, *(Dim(d, *bounds[d]) for d in [*inspect.signature(CASES[name]).parameters][1:]))
    for output in [made] if isinstance(made, fg.Tensor) else made:
        g.output(output)
    return g


# ---- pointwise ops


def _pointwise(names: Sequence[str]) -> Case:
    def write(g: fg.Graph, n: Dim, m: Dim) -> Made:
        inputs: dict[str, fg.Tensor] = {}
        made = []
        for name in names:
            op = POINTWISE[name]
            dtype = "float32" if "float" in kinds(name) else "int32"
            operands = []
            for key in op.operands:
                own = "bool" if key in op.masks else dtype
                if (label := f"{key} {own}") not in inputs:
                    inputs[label] = g.tensor(label, (n, 1) if key == "b" else (n, m), own)
                operands.append(inputs[label])
            made.append(g.apply(op, operands, ATTRIBUTES[name][0][0]))
        return made

    return write


def _drawn() -> Iterator[tuple[str, Case]]:
    names = list(ATTRIBUTES)
    for start in range(0, len(names), 8):
        yield f"pointwise {names[start]}", _pointwise(names[start : start + 8])


# ---- others


def _x(g: fg.Graph, *shape: int, name: str = "x", dtype: Any = "float32", **how: Any) -> fg.Tensor:
    return g.tensor(name, shape, dtype, **how)


def _reductions(axes: tuple[int, ...], modes: Sequence[str], dtype: str = "float32") -> Case:
    def write(g: fg.Graph, n: Dim, m: Dim) -> Made:
        x = _x(g, n, 6, m, dtype=dtype)
        return [g.reduction(x, mode, axes) for mode in modes]

    return write


def _gradient_of_rows(op: str, count: int) -> Case:
    def write(g: fg.Graph, n: Dim, m: Dim) -> Made:
        kept = [g.tensor(f"kept{k}", (n, 1)) for k in range(count)]
        loss, x, scale = g.tensor("loss", (n, m)), g.tensor("x", (n, m)), g.tensor("scale", (m,))
        return list(getattr(g, op)(loss, x, scale, *kept, 1))

    return write


def _channels(g: fg.Graph, size: int, count: int) -> list[fg.Tensor]:
    return [g.tensor(f"p{k}", (1, size, 1, 1)) for k in range(count)]


def _attention(dtype: str = "float16", heads: tuple[int, int] = (2, 2), depth: int = 32, **how: Any) -> Case:
    def write(g: fg.Graph, b: Dim, s: Dim, t: Dim) -> Made:
        q = g.tensor("q", (b, heads[0], s, depth), dtype)
        k, v = (g.tensor(name, (b, heads[1], t, depth), dtype) for name in "kv")
        found = g.sdpa(q, k, v, **how)
        return [found] if isinstance(found, fg.Tensor) else list(found)

    return write


def _attention_backward(g: fg.Graph, b: Dim, s: Dim) -> Made:
    q, k, v, loss = (g.tensor(name, (b, 2, s, 32), "float16") for name in ("q", "k", "v", "loss"))
    o, stats = g.sdpa(q, k, v, use_causal_mask=True, generate_stats=True)
    return list(g.sdpa_backward(q, k, v, o, loss, stats, use_causal_mask=True))


def _attention_fp8(g: fg.Graph, b: Dim, s: Dim, t: Dim) -> Made:
    q = g.tensor("q", (b, 2, s, 32), "float8_e4m3")
    k, v = (g.tensor(name, (b, 2, t, 32), "float8_e4m3") for name in "kv")
    scales = [g.constant(np.full((1, 1, 1, 1), x), dtype="float32") for x in (0.5, 0.25, 2.0, 1 / 256, 256.0, 4.0)]
    return g.sdpa_fp8(q, k, v, *scales, dtype="bfloat16")


def _packed_attention(g: fg.Graph, s: Dim, b: Dim) -> Made:
    q, k, v = (g.tensor(name, (1, 2, s, 32), "float16") for name in "qkv")
    offsets = g.tensor("offsets", (b + 1,), "int32")
    return g.sdpa(q, k, v, ragged_offset_q=offsets, ragged_offset_kv=offsets)


def _rope(op: str) -> Case:
    return lambda g, b, s: getattr(g, op)(g.tensor("x", (b, 2, s, 32)), g.tensor("freqs", (s, 1, 1, 32)))


def _product(dtype: str) -> Case:
    def write(g: fg.Graph, n: Dim, m: Dim) -> Made:
        a, b, c = g.tensor("a", (n, 64), dtype), g.tensor("b", (64, m), dtype), g.tensor("c", (m,))
        return g.relu(g.matmul(a, b) + c)

    return write


def _inner(dtype: str) -> Case:
    return lambda g, m: g.matmul(g.tensor("a", (24, m), dtype), g.tensor("b", (m, 40), dtype))


def _batched(dtype: str) -> Case:
    return lambda g, b, s, t: g.matmul(g.tensor("a", (b, s, 32), dtype), g.tensor("b", (b, 32, t), dtype))


def _convolution(dtype: str, layouts: tuple[str, str] = ("NHWC", "KRSC"), taps: int = 3, **how: Any) -> Case:
    def write(g: fg.Graph, b: Dim, h: Dim, w: Dim) -> Made:
        x = g.tensor("x", (b, 16, h, w), dtype, layout=layouts[0])
        f = g.tensor("f", (24, 16 // how.get("groups", 1), taps, taps), dtype, layout=layouts[1])
        return g.relu(g.conv_fprop(x, f, **how))

    return write


def _convolution_channels(g: fg.Graph, b: Dim, c: Dim) -> Made:
    x = g.tensor("x", (b, c, 10, 10), "float16", layout="NHWC")
    return g.conv_fprop(x, g.tensor("f", (24, c, 3, 3), "float16", layout="KRSC"), padding=1)


def _convolution_filters(g: fg.Graph, b: Dim, c: Dim) -> Made:
    x = g.tensor("x", (b, 16, 10, 10), "float16", layout="NHWC")
    return g.conv_fprop(x, g.tensor("f", (c, 16, 1, 1), "float16", layout="KRSC"))


def _convolution_1d(g: fg.Graph, b: Dim, s: Dim) -> Made:
    return g.conv_fprop(g.tensor("x", (b, 8, s)), g.tensor("f", (16, 8, 5)), padding=2)


def _convolution_3d(g: fg.Graph, b: Dim, h: Dim) -> Made:
    x = g.tensor("x", (b, 8, 4, h, 6), "float16", layout="channels_last")
    return g.conv_fprop(x, g.tensor("f", (8, 8, 3, 3, 3), "float16"), padding=1)


def _depthwise(dtype: str, layout: str, taps: int = 3, **how: Any) -> Case:
    def write(g: fg.Graph, b: Dim, h: Dim, w: Dim) -> Made:
        x = g.tensor("x", (b, 16, h, w), dtype, layout=layout)
        return g.conv_fprop(x, g.tensor("f", (16, 1, taps, taps), dtype), padding=taps // 2, groups=16, **how)

    return write


def _depthwise_gradients(g: fg.Graph, b: Dim, h: Dim, w: Dim) -> Made:
    loss = g.tensor("loss", (b, 16, (h - 1) // 2 + 1, (w - 1) // 2 + 1))
    x, f = g.tensor("x", (b, 16, h, w)), g.tensor("f", (16, 1, 3, 3))
    how = {"padding": 1, "stride": 2, "groups": 16}
    return g.conv_wgrad(x, loss, taps=(3, 3), **how), g.conv_dgrad(loss, f, size=(h, w), **how)


def _winograd(g: fg.Graph, b: Dim, h: Dim, w: Dim) -> Made:
    x, f = g.tensor("x", (b, 8, h, w)), g.tensor("f", (16, 8, 3, 3))
    return g.conv_fprop(x, f, padding=1, compute_dtype="float32", algorithm="winograd_2x2")


def _input_gradient(dtype: str, stride: int) -> Case:
    def write(g: fg.Graph, b: Dim, h: Dim, w: Dim) -> Made:
        loss = g.tensor("loss", (b, 24, h, w), dtype, layout="NHWC")
        f = g.tensor("f", (24, 16, 3, 3), dtype, layout="KRSC")
        size = [(n - 1) * stride + 1 for n in (h, w)]
        return g.conv_dgrad(loss, f, size=size, padding=1, stride=stride)

    return write


def _filter_gradient(dtype: str, stride: int = 1) -> Case:
    def write(g: fg.Graph, b: Dim, h: Dim, w: Dim) -> Made:
        x = g.tensor("x", (b, 16, h, w), dtype, layout="NHWC")
        out = [(n - 1) // stride + 1 for n in (h, w)]
        loss = g.tensor("loss", (b, 24, *out), dtype, layout="NHWC")
        return g.conv_wgrad(x, loss, taps=(3, 3), padding=1, stride=stride)

    return write


def _channels_last(g: fg.Graph, b: int, h: int, w: int) -> fg.Tensor:
    return g.max_pool(_x(g, b, 16, h, w, dtype="float16", layout="NHWC"), 3, 2, 1)


def _pooled(op: str, **how: Any) -> Case:
    def write(g: fg.Graph, b: Dim, h: Dim, w: Dim) -> Made:
        x = g.tensor("x", (b, 8, h, w))
        forward = op.replace("_backward", "")
        y = getattr(g, forward)(x, **how)
        if forward == op:
            return [y] if isinstance(y, fg.Tensor) else list(y)
        loss = g.tensor("loss", y.shape)
        size = {} if op.endswith("max_pool_backward") else {"size": (h, w)}
        given = (loss, y) if "index" in op else (loss, x) if "max" in op else (loss,)
        if op.startswith("adaptive"):
            return getattr(g, op)(*given, **size)
        return getattr(g, op)(*given, **size, **how)

    return write


def _along(op: str, **how: Any) -> Case:
    return lambda g, n, m: [
        getattr(g, op)(g.tensor("x", (n, m)), axis=1, **how),
        getattr(g, op)(g.tensor("z", (m, n)), axis=0, **how),
    ]


def _scattered(reduction: str) -> Case:
    def write(g: fg.Graph, n: Dim, m: Dim, s: Dim) -> Made:
        x, updates = g.tensor("x", (n, m)), g.tensor("updates", (s, m))
        return g.scatter(x, g.tensor("index", (s, 1), "int32"), updates, 0, reduction)

    return write


WINDOW = {"window": 3, "stride": 2, "padding": 1}
_MODES = ("add", "max", "min", "amax", "norm1", "norm2", "avg", "var", "mul", "mul_no_zeros", "argmin", "argmax")


def _sparse(g: fg.Graph, x: fg.Tensor) -> list[fg.Tensor]:
    values, metadata = g.sparse_2_4_compress(x)
    return [g.sparse_2_4(x), g.cast(g.sparse_2_4_mask(x), "float32"), values, g.sparse_2_4(values, metadata)]


CASES: dict[str, Case] = {
    **dict(_drawn()),
    "random": lambda g, n, m: [g.rng_uniform(_x(g, n, m), 3, 1), g.rng_normal(_x(g, m, n, name="z"), 3, 2)],
    "dropout": lambda g, n, m: [g.dropout(_x(g, n, m), 3, 1), g.dropout_backward(_x(g, n, m, name="loss"), 3, 1)],
    "reduction of rows": _reductions((2,), _MODES[:6]),
    "reduction of rows, others": _reductions((2,), _MODES[6:]),
    "reduction of columns": _reductions((0,), _MODES[:4]),
    "reduction of columns, others": _reductions((0,), _MODES[4:9]),
    "reduction of the middle": _reductions((1,), ("add", "argmax", "var")),
    "reduction of both": _reductions((0, 2), ("add", "max", "var")),
    "reduction of all": _reductions((0, 1, 2), ("add", "norm2", "argmax")),
    "reduction of bools": _reductions((2,), ("any", "all"), "bool"),
    "softmax": lambda g, n, m: g.softmax(_x(g, n, m), 1),
    "softmax of columns": lambda g, n, m: g.softmax(_x(g, n, m), 0),
    "softmax of bfloat16": lambda g, n, m: g.softmax(_x(g, n, m, dtype="bfloat16"), 1),
    "linear_cross_entropy": lambda g, n: g.linear_cross_entropy(
        g.tensor("x", (n, 32)), g.tensor("w", (64, 32)), g.tensor("target", (n,), "int32")
    ),
    "linear_cross_entropy_backward": lambda g, n: g.linear_cross_entropy_backward(
        g.tensor("loss", ()),
        *(g.tensor("x", (n, 32)), g.tensor("w", (64, 32)), g.tensor("target", (n,), "int32"), g.tensor("sums", (n,))),
    ),
    "log_softmax": lambda g, n, m: g.log_softmax(_x(g, n, m), 1),
    "logsumexp": lambda g, n, m: g.logsumexp(_x(g, n, m), 1),
    "softmax_backward": lambda g, n, m: g.softmax_backward(_x(g, n, m, name="loss"), _x(g, n, m), 1),
    "log_softmax_backward": lambda g, n, m: g.log_softmax_backward(_x(g, n, m, name="loss"), _x(g, n, m), 1),
    "sparse_2_4": lambda g, n: _sparse(g, _x(g, n, 24, dtype="bfloat16")),
    "layernorm": lambda g, n, m: g.layernorm(_x(g, n, m), _x(g, m, name="a"), _x(g, m, name="b"), 1, epsilon=0.1),
    "layernorm of known rows": lambda g, n: g.layernorm(
        _x(g, n, 768, dtype="bfloat16"), _x(g, 768, name="a"), _x(g, 768, name="b"), 1, epsilon=0.1
    ),
    "adalayernorm": lambda g, b, s, m: g.adalayernorm(
        _x(g, b, s, m), _x(g, b, 1, m, name="a"), _x(g, b, 1, m, name="b"), 2, epsilon=0.1
    ),
    "rmsnorm": lambda g, n, m: g.rmsnorm(_x(g, n, m), _x(g, m, name="a"), 1, epsilon=0.1),
    "instancenorm": lambda g, b, h, w: g.instancenorm(_x(g, b, 6, h, w), *_channels(g, 6, 2), epsilon=0.1),
    "groupnorm": lambda g, b, h, w: g.groupnorm(_x(g, b, 6, h, w), *_channels(g, 6, 2), 3, epsilon=0.1),
    "batchnorm": lambda g, b, h, w: list(g.batchnorm(_x(g, b, 6, h, w), *_channels(g, 6, 2), epsilon=0.1)),
    "batchnorm_inference": lambda g, b, c, h: g.batchnorm_inference(_x(g, b, c, h, 8), *_channels(g, c, 4)),
    "genstats": lambda g, b, h, w: list(g.genstats(_x(g, b, 6, h, w))),
    "layernorm_backward": _gradient_of_rows("layernorm_backward", 2),
    "adalayernorm_backward": _gradient_of_rows("adalayernorm_backward", 2),
    "rmsnorm_backward": _gradient_of_rows("rmsnorm_backward", 1),
    "instancenorm_backward": lambda g, b, h, w: list(
        g.instancenorm_backward(
            _x(g, b, 6, h, w, name="loss"), _x(g, b, 6, h, w), *_channels(g, 6, 1),
            *(_x(g, b, 6, 1, 1, name=n) for n in ("mean", "inverse")),
        )
    ),
    "batchnorm_backward": lambda g, b, h, w: list(
        g.batchnorm_backward(_x(g, b, 6, h, w, name="loss"), _x(g, b, 6, h, w), *_channels(g, 6, 3))
    ),
    "groupnorm_backward": lambda g, b, h, w: list(
        g.groupnorm_backward(
            _x(g, b, 6, h, w, name="loss"), _x(g, b, 6, h, w), *_channels(g, 6, 1),
            *(_x(g, b, 3, 1, 1, name=n) for n in ("mean", "inverse")), groups=3,
        )
    ),
    "sdpa": _attention(),
    "sdpa causal": _attention(use_causal_mask=True, diagonal_alignment="BOTTOM_RIGHT", heads=(4, 2)),
    "sdpa float32": _attention("float32", depth=24, use_alibi_mask=True, generate_stats=True),
    "sdpa window": _attention("bfloat16", use_causal_mask=True, diagonal_band_left_bound=17, soft_cap=3.0),
    "sdpa dropout": _attention(seed=3, offset=1, dropout_probability=0.25),
    "sdpa mask": lambda g, b, s, t: g.sdpa(
        *(_x(g, b, 2, r, 32, name=n, dtype="float16") for n, r in (("q", s), ("k", t), ("v", t))),
        mask=_x(g, b, 1, s, t, name="mask", dtype="bool"),
    ),
    "sdpa packed": _packed_attention,
    "sdpa_backward": _attention_backward,
    "sdpa_fp8": _attention_fp8,
    "rope": _rope("rope"),
    "rope_backward": _rope("rope_backward"),
    **{f"matmul {d}": _product(d) for d in ("float16", "float32", "float8_e4m3", "float64")},
    **{f"matmul inner {d}": _inner(d) for d in ("float16", "float32", "int8")},
    **{f"matmul batched {d}": _batched(d) for d in ("bfloat16", "float32")},
    "matmul vector": lambda g, n, m: g.matmul(_x(g, 1, m), _x(g, m, n, name="w")),
    "matmul turned": lambda g, n, m: g.matmul(
        g.transpose(_x(g, 64, n, dtype="float16"), (1, 0)), g.transpose(_x(g, m, 64, name="w", dtype="float16"), (1, 0))
    ),
    "conv_fprop": _convolution("float16", padding=1),
    "conv_fprop stride": _convolution("float16", padding=1, stride=2),
    "conv_fprop float32": _convolution("float32", ("NCHW", "KCRS"), padding=1),
    "conv_fprop groups": _convolution("float16", padding=1, groups=2),
    "conv_fprop 1x1": _convolution("float16", taps=1),
    "conv_fprop planes": _convolution("float16", ("NCHW", "KCRS"), padding=1),
    "conv_fprop 5x5": _convolution("bfloat16", taps=5, padding=2, dilation=1),
    "conv_fprop channels": _convolution_channels,
    "conv_fprop filters": _convolution_filters,
    "conv_fprop 1d": _convolution_1d,
    "conv_fprop 3d": _convolution_3d,
    "conv_fprop stem": lambda g, b, h, w: g.conv_fprop(
        _x(g, b, 3, h, w, dtype="float16"), _x(g, 16, 3, 7, 7, name="f", dtype="float16"), padding=3, stride=2
    ),
    "depthwise": _depthwise("float16", "NHWC"),
    "depthwise planes": _depthwise("float32", "NCHW"),
    "depthwise stride": _depthwise("float16", "NHWC", stride=2),
    "depthwise stride 3": _depthwise("float32", "NCHW", taps=5, stride=3),
    "depthwise gradients": _depthwise_gradients,
    "winograd": _winograd,
    "conv_dgrad": _input_gradient("float16", 1),
    "conv_dgrad stride": _input_gradient("float16", 2),
    "conv_dgrad float32": _input_gradient("float32", 2),
    "conv_wgrad": _filter_gradient("float16"),
    "conv_wgrad stride": _filter_gradient("float16", 2),
    "conv_wgrad float32": _filter_gradient("float32"),
    "transpose": lambda g, n, m: g.transpose(_x(g, n, 6, m), (2, 1, 0)) * 2,
    "reshape": lambda g, b, n: g.exp(_x(g, b, n, 6).reshape(b * n, 6)).reshape(b, n * 6),
    "broadcast": lambda g, n, m: g.broadcast(_x(g, n, 1), (n, m)) * _x(g, m, name="z"),
    "slice": lambda g, m: _x(g, m, 4)[::-1, 1:3] * 2,
    "slice from the end": lambda g, n, m: g.slice(_x(g, n, m), (0, m - 1), (n, m), (1, 1)) + 1,
    "pad": lambda g, n, m: g.pad(_x(g, n, m), [(0, 1), (2, 1)]) + 1,
    "pad by edges": lambda g, n, m: g.pad(_x(g, n, m), [(0, 0), (2, 1)], "replicate") + 1,
    "concatenate": lambda g, n, m: g.concatenate(_x(g, n, m), _x(g, n, 5, name="z"), _x(g, n, m, name="v"), axis=1),
    "concatenate rows": lambda g, n, m: g.concatenate(_x(g, n, 24), _x(g, m, 24, name="z"), axis=0) * 2,
    "gather": lambda g, n, m: g.gather(_x(g, m, 48), _x(g, n, name="index", dtype="int32"), 0),
    "gather along": lambda g, n, m: g.gather(_x(g, 8, m), _x(g, n, name="index", dtype="int64"), 1),
    **{
        f"{p}{suffix}": _pooled(f"{p}{suffix}", **WINDOW)
        for p in ("max_pool", "avg_pool")
        for suffix in ("", "_index", "_backward", "_backward_index")
        if not (p == "avg_pool" and "index" in suffix)
    },
    **{
        f"adaptive_{p}{suffix}": _pooled(f"adaptive_{p}{suffix}", size=(3, 5))
        for p in ("max_pool", "avg_pool")
        for suffix in ("", "_index", "_backward", "_backward_index")
        if not (p == "avg_pool" and "index" in suffix)
    },
    "max_pool stride 3": _pooled("max_pool", window=3, stride=3, padding=1),
    "max_pool whole": _pooled("max_pool", window=2, stride=2, ceil_mode=True),
    "max_pool channels last": _channels_last,
    "avg_pool excluding": _pooled("avg_pool", window=3, padding=1, count_include_pad=False),
    "global_max_pool": lambda g, b, h, w: g.global_max_pool(_x(g, b, 6, h, w)),
    "global_avg_pool": lambda g, b, h, w: g.global_avg_pool(_x(g, b, 16, h, w, dtype="bfloat16", layout="NHWC")),
    "local_response_norm": lambda g, b, c, h: g.local_response_norm(_x(g, b, c, h, 5), 3),
    "local_response_norm_backward": lambda g, b, c, h: g.local_response_norm_backward(
        _x(g, b, c, h, 5, name="loss"), _x(g, b, c, h, 5), 3
    ),
    "local_contrast_norm": lambda g, b, h, w: g.local_contrast_norm(_x(g, b, 3, h, w), 3, epsilon=0.1),
    "local_contrast_norm_backward": lambda g, b, h, w: g.local_contrast_norm_backward(
        _x(g, b, 3, h, w, name="loss"), _x(g, b, 3, h, w), 3, epsilon=0.1
    ),
    **{
        op: _along(op)
        for op in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "cummax_index", "cummin_index")
    },
    "cumsum reverse": _along("cumsum", reverse=True),
    **{op: _along(op) for op in ("sort", "sort_index")},
    "topk": lambda g, n, m: g.topk(_x(g, n, m + 4), 5, axis=1),
    "topk_index": lambda g, n, m: g.topk_index(_x(g, n, m + 4), 5, axis=1),
    **{f"scatter {r}": _scattered(r) for r in ("add", "none", "mean", "max")},
    "concatenated convolution": lambda g, b, h, w: g.conv_fprop(
        g.concatenate(
            *(_x(g, b, 16, h, w, name=n, dtype="float16", layout="NHWC") for n in "xy"), axis=1
        ),
        _x(g, 24, 32, 3, 3, name="f", dtype="float16", layout="KRSC"), padding=1,
    ),
}  # fmt: skip
