"""fusegraph.functional against SciPy, NumPy and, where it is installed, torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fusegraph as fg
from fusegraph import functional
from fusegraph.errors import ArgumentError, AttributeValueError, DTypeError, ShapeError
from fusegraph.functional import (
    avg_pool2d,
    conv2d,
    conv2d_graph,
    conv2d_input,
    conv2d_weight,
    conv_transpose2d,
    linear,
    matmul,
    max_pool2d,
)

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(7)


def normal(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.standard_normal(shape).astype(dtype)


def expected_conv2d(
    x: Array, w: Array, stride: Sequence[int], padding: Sequence[Sequence[int]], dilation: Sequence[int], groups: int
) -> Array:
    """Computes a convolution with one scipy.signal.correlate2d per pair of channels, in float64; dilated filters are
    filled with zeros.
    """
    signal = pytest.importorskip("scipy.signal")
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), *padding))
    filters, channels, *taps = w.shape
    spread = np.zeros((filters, channels, *(d * (t - 1) + 1 for d, t in zip(dilation, taps))))
    spread[:, :, :: dilation[0], :: dilation[1]] = w
    images = []
    for image in padded:
        maps = []
        for k in range(filters):
            first = k // (filters // groups) * channels
            total = sum(signal.correlate2d(image[first + c], spread[k, c], mode="valid") for c in range(channels))
            maps.append(total[:: stride[0], :: stride[1]])
        images.append(maps)
    return np.array(images)


CASES = [
    # x, w, stride, padding, its meaning, dilation, groups
    ((2, 5, 9, 11), (7, 5, 3, 3), 1, 1, ((1, 1), (1, 1)), 1, 1),
    ((1, 6, 12, 10), (4, 3, 3, 2), (2, 1), (0, 1), ((0, 0), (1, 1)), (1, 2), 2),
    ((2, 8, 8, 7), (8, 1, 3, 3), 1, "same", ((1, 1), (1, 1)), 1, 8),
    ((1, 3, 9, 9), (4, 3, 4, 2), 1, "same", ((1, 2), (0, 1)), 1, 1),
    ((1, 3, 9, 9), (4, 3, 2, 2), 1, "same", ((1, 2), (1, 2)), 3, 1),
    ((1, 3, 9, 9), (4, 3, 3, 3), 3, "valid", ((0, 0), (0, 0)), 1, 1),
    ((1, 17, 5, 6), (20, 17, 1, 1), 1, ((2, 0), (0, 3)), ((2, 0), (0, 3)), 1, 1),
]


@pytest.mark.parametrize(("x_shape", "w_shape", "stride", "padding", "pads", "dilation", "groups"), CASES)
def test_conv2d_equals_scipy(
    x_shape: Any, w_shape: Any, stride: Any, padding: Any, pads: Any, dilation: Any, groups: int
) -> None:
    x, w = normal(*x_shape), normal(*w_shape)
    y = conv2d(x, w, stride, padding, dilation, groups)
    pair = [v if isinstance(v, tuple) else (v, v) for v in (stride, dilation)]
    expected = expected_conv2d(x, w, pair[0], pads, pair[1], groups)
    assert type(y) is np.ndarray
    assert y.dtype == np.float32
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_conv2d_with_bias_and_activation() -> None:
    x, w, bias = normal(2, 4, 6, 6), normal(5, 4, 3, 3), normal(5)
    y = conv2d(x, w, padding=1, bias=bias, activation="relu")
    sums = expected_conv2d(x, w, (1, 1), ((1, 1), (1, 1)), (1, 1), 1) + bias[:, None, None]
    np.testing.assert_allclose(y, np.maximum(sums, 0), rtol=1e-5, atol=1e-4)
    graph = conv2d_graph(x, w, padding=1, bias=bias, activation="relu")
    plan = graph.compile("cpu").plan
    assert plan is not None
    assert len(plan.kernels) == 1


def scattered(
    x: Array, w: Array, stride: Sequence[int], padding: Sequence[Sequence[int]], more: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> Array:  # fmt: skip
    """Computes a transposed convolution by definition: each element adds itself times the filter to the result."""
    (n, c, *size), (_, per_group, *taps) = x.shape, w.shape
    whole = [(s - 1) * a + (t - 1) * d + 1 + m for s, a, t, d, m in zip(size, stride, taps, dilation, more)]
    y = np.zeros((n, groups * per_group, *whole))
    for image, channel, row, col in np.ndindex(*x.shape):
        first = channel // (c // groups) * per_group
        for k, r, s in np.ndindex(*w.shape[1:]):
            at = (row * stride[0] + r * dilation[0], col * stride[1] + s * dilation[1])
            y[(image, first + k, *at)] += float(x[image, channel, row, col]) * float(w[channel, k, r, s])
    (top, bottom), (left, right) = padding
    return y[:, :, top : whole[0] - bottom, left : whole[1] - right]


@pytest.mark.parametrize(
    ("x_shape", "w_shape", "stride", "padding", "more", "dilation", "groups"),
    [
        ((2, 3, 4, 5), (3, 4, 3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), (1, 1), 1),
        ((1, 4, 3, 4), (4, 3, 4, 2), (2, 3), ((1, 0), (0, 2)), (0, 2), (1, 2), 2),
        ((1, 2, 5, 3), (2, 1, 2, 2), (1, 1), ((0, 0), (1, 1)), (0, 0), (1, 1), 2),
        ((1, 3, 3, 3), (3, 2, 1, 1), (3, 2), ((0, 0), (0, 0)), (2, 0), (1, 1), 1),
    ],
)
def test_conv_transpose2d_adds_up_filters(
    x_shape: Any, w_shape: Any, stride: Any, padding: Any, more: Any, dilation: Any, groups: int
) -> None:
    x, w = normal(*x_shape), normal(*w_shape)
    y = conv_transpose2d(x, w, stride, padding, more, dilation, groups)
    expected = scattered(x, w, stride, padding, more, dilation, groups)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    bias = normal(expected.shape[1])
    y = conv_transpose2d(x, w, stride, padding, more, dilation, groups, bias=bias, activation="relu")
    np.testing.assert_allclose(y, np.maximum(expected + bias[:, None, None], 0), rtol=1e-5, atol=1e-4)


def test_gradients_of_conv2d() -> None:
    """conv2d is linear in x and in w: <conv2d(x, w), loss> = <x, conv2d_input> = <w, conv2d_weight>."""
    x, w = normal(2, 6, 9, 8).astype(np.float64), normal(4, 3, 3, 2).astype(np.float64)
    how: dict[str, Any] = {"stride": (2, 1), "padding": ((1, 0), (2, 1)), "dilation": (1, 2), "groups": 2}
    y = conv2d(x, w, **how)
    loss = RNG.standard_normal(y.shape)
    dx = conv2d_input((9, 8), w, loss, **how)
    dw = conv2d_weight(x, (3, 2), loss, **how)
    assert (dx.shape, dw.shape) == (x.shape, w.shape)
    np.testing.assert_allclose([(x * dx).sum(), (w * dw).sum()], (y * loss).sum(), rtol=1e-12)


def test_memory_order_is_kept_and_gaps_are_read_over() -> None:
    w = normal(4, 3, 3, 3)
    wide = normal(2, 9, 11, 8)
    channels_last = wide[..., ::2][..., :3].transpose(0, 3, 1, 2)  # (2, 3, 9, 11) with gaps between the channels
    assert channels_last.shape == (2, 3, 9, 11)
    packed = np.ascontiguousarray(channels_last)
    from_gaps, from_packed = conv2d(channels_last, w), conv2d(packed, w)
    np.testing.assert_array_equal(from_gaps, from_packed)
    assert from_packed.flags.c_contiguous
    assert from_gaps.transpose(0, 2, 3, 1).flags.c_contiguous
    w_last = np.ascontiguousarray(w.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(conv2d(packed, w_last), from_packed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_dtypes(dtype: Any) -> None:
    x, w = normal(1, 3, 6, 6, dtype=dtype), normal(4, 3, 3, 3, dtype=dtype)
    y = conv2d(x, w, bias=normal(4))  # a float32 bias does not widen the result
    assert y.dtype == np.dtype(dtype)
    tolerance = {np.float64: 1e-12, np.float16: 1e-3}.get(dtype, 8e-3)
    bias_free = conv2d(x, w).astype(np.float64)
    expected = expected_conv2d(x.astype(np.float64), w.astype(np.float64), (1, 1), ((0, 0), (0, 0)), (1, 1), 1)
    np.testing.assert_allclose(bias_free, expected, rtol=tolerance, atol=tolerance)


def test_integers_are_exact() -> None:
    x = RNG.integers(-128, 128, (1, 40, 5, 5)).astype(np.int8)
    w = RNG.integers(-128, 128, (3, 40, 3, 3)).astype(np.int8)
    y = conv2d(x, w, bias=np.array([1, -2, 3], np.int32))
    expected = expected_conv2d(x, w, (1, 1), ((0, 0), (0, 0)), (1, 1), 1) + np.array([1, -2, 3])[:, None, None]
    assert y.dtype == np.int32
    np.testing.assert_array_equal(y, expected)


def test_matmul_and_linear() -> None:
    a, b, bias = normal(2, 7, 13), normal(13, 5), normal(5)
    np.testing.assert_allclose(matmul(a, b), a @ b, rtol=1e-5, atol=1e-5)
    expected = np.tanh(a.astype(np.float64) @ b + bias)
    np.testing.assert_allclose(matmul(a, b, bias=bias, activation="tanh"), expected, rtol=1e-4, atol=1e-5)
    w = np.ascontiguousarray(b.T)
    np.testing.assert_allclose(linear(a, w, bias, activation="tanh"), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(linear(a[0], w), a[0] @ b, rtol=1e-5, atol=1e-5)


def test_what_was_built_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    original = functional.compile_graph
    monkeypatch.setattr(functional, "compile_graph", lambda g, *a, **k: built.append(g) or original(g, *a, **k))
    functional.clear_cache()
    w = normal(2, 2, 1, 1)
    for _ in range(3):
        conv2d(normal(1, 2, 4, 4), w)
    assert len(built) == 1
    conv2d(normal(1, 2, 4, 4), w, (1, 1))  # spelt differently: another entry, the same result
    conv2d(normal(1, 2, 5, 4), w)
    conv2d(normal(1, 2, 4, 4, dtype=np.float64), w)
    conv2d(normal(1, 4, 2, 4).transpose(0, 2, 1, 3), w)
    assert len(built) == 5
    conv2d(normal(1, 2, 4, 4), w)
    assert len(built) == 5
    assert functional._executable.cache_info().maxsize == functional.CACHE_SIZE


# ---- bad input


X, W = np.zeros((1, 4, 6, 6), np.float32), np.zeros((3, 4, 3, 3), np.float32)
BIAS = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: conv2d([1.0], W), ArgumentError, "input 'x' is of type builtins.list"),
        (lambda: conv2d(X, "w"), ArgumentError, "input 'w' is of type builtins.str"),
        (lambda: conv2d(X[0], W), ShapeError, r"conv2d takes x \(N, C, H, W\) .* got x \[4, 6, 6\]"),
        (lambda: conv2d(X, W[:, :3]), ShapeError, "4 channels of x are not 1 groups of the filter's 3 channels"),
        (lambda: conv2d(X, np.zeros((3, 4, 7, 7), np.float32)), ShapeError, "reaching over 7 does not fit 6"),
        (lambda: conv2d(X, W, BIAS), AttributeValueError, "stride .* got ndarray; a bias is given by name"),
        (lambda: conv2d(X, W, None), AttributeValueError, "stride .* got NoneType"),
        (lambda: conv2d(X, W, 0), AttributeValueError, "stride is an integer of at least 1"),
        (lambda: conv2d(X, W, True), AttributeValueError, "stride is an integer"),
        (lambda: conv2d(X, W, 1.0), AttributeValueError, "stride is an integer"),
        (lambda: conv2d(X, W, (1, 1, 1)), AttributeValueError, "stride is an integer of at least 1, or 2 of them"),
        (lambda: conv2d(X, W, padding=-1), AttributeValueError, "padding"),
        (lambda: conv2d(X, W, padding="full"), AttributeValueError, "'same' or 'valid', got 'full'"),
        (lambda: conv2d(X, W, 2, "same"), AttributeValueError, "'same' goes with stride 1, got stride 2"),
        (lambda: conv2d(X, W, groups=0), AttributeValueError, "groups is a positive integer"),
        (lambda: conv2d(X, W, groups=(1,)), AttributeValueError, "groups is an integer, or None"),
        (lambda: conv2d(X, W, bias=np.zeros(4, np.float32)), ShapeError, "each of the 3 channels, got 4"),
        (lambda: conv2d(X, W, bias=np.zeros((1, 3), np.float32)), ShapeError, "bias has one dimension"),
        (lambda: conv2d(X.astype(np.int8), W.astype(np.int8), bias=BIAS), DTypeError, "bias is float32, the sums are"),
        (
            lambda: conv_transpose2d(X, W[:, :2]),
            ShapeError,
            "loss has 4 channels, one for each filter, but there are 3",
        ),
        (lambda: conv_transpose2d(X, X[:4], padding="same"), AttributeValueError, "conv_transpose2d: padding is an in"),
        (lambda: conv_transpose2d(X[:, :1], W[:1], 2, 0, 2), ShapeError, "sizes that fit are 13 to 14"),
        (lambda: conv_transpose2d(X[:, :1], W[:1], 1, 5), ShapeError, "over padding 5 \\+ 5 alone"),
        (lambda: conv_transpose2d(X[:, :1], W[:1], bias=BIAS), ShapeError, "each of the 4 channels, got 3"),
        (lambda: conv2d_input(9, W, X), ShapeError, "loss has 4 channels"),
        (lambda: conv2d_weight(X, 2, X), ShapeError, "1 taps fit"),
        (lambda: conv2d_weight(X, None, X), AttributeValueError, "conv2d_weight: taps is an integer"),
        (lambda: conv2d(X, W, activation="softmax"), AttributeValueError, "activation is None or one of relu"),
        (lambda: conv2d(X, W, activation=len), AttributeValueError, "activation is None or one of relu"),
        (lambda: conv2d(X[:, :, ::-1], W), ArgumentError, "input 'x' has a negative stride"),
        (lambda: matmul(X[0, 0], W), ShapeError, "the inner sizes differ: 6 columns against 3 rows"),
        (lambda: matmul(BIAS, BIAS), ShapeError, "at least 2 dimensions"),
        (lambda: matmul(X[0, 0], X[0, 0], bias=BIAS), ShapeError, r"bias has shape \[3\], the result has 6 columns"),
        (lambda: linear(X[0, 0], W), ShapeError, r"linear takes w \(N, K\)"),
        (lambda: linear(X[0, 0], X[0, 0], activation="none"), AttributeValueError, "linear: activation"),
    ],
)
def test_bad_input(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


# ---- other frameworks


class Exported:
    """An array that offers DLPack and nothing else."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_dlpack_arrays() -> None:
    x, w = normal(1, 2, 5, 5), normal(3, 2, 2, 2)
    np.testing.assert_array_equal(conv2d(Exported(x), Exported(w)), conv2d(x, w))
    with pytest.raises(ArgumentError, match="bias is a Exported, which has no reshape"):
        conv2d(x, w, bias=Exported(normal(3)))
    with pytest.raises(ArgumentError, match="w is a Exported, which has no T"):
        linear(x[0, 0], Exported(normal(4, 5)))


def test_torch_gradients_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for torch's switches, so that this is tested where torch is not installed."""

    class Tensor(np.ndarray[Any, Any]):
        requires_grad = True

    forward = SimpleNamespace(_current_level=-1)
    autograd = SimpleNamespace(forward_ad=forward)
    torch = SimpleNamespace(Tensor=Tensor, is_grad_enabled=lambda: True, autograd=autograd)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(ArgumentError, match=r"'w' is a torch tensor that requires a gradient.*w\.detach\(\)"):
        conv2d(X, W.view(Tensor))
    torch.is_grad_enabled = lambda: False
    assert conv2d(X, W.view(Tensor)).shape == (1, 3, 4, 4)


def test_torch_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    x, w, bias = (torch.randn(shape) for shape in ((2, 6, 9, 8), (4, 3, 3, 3), (4,)))
    own = torch.nn.functional.conv2d(x, w, bias, stride=(2, 1), padding=1, dilation=(1, 2), groups=2)
    y = conv2d(x, w, (2, 1), 1, (1, 2), 2, bias=bias)
    assert isinstance(y, torch.Tensor)
    torch.testing.assert_close(y, own, rtol=1e-4, atol=1e-4)

    last = x.to(memory_format=torch.channels_last)
    y = conv2d(last, w, padding="same", groups=2)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, torch.nn.functional.conv2d(x, w, padding="same", groups=2), rtol=1e-4, atol=1e-4)

    half = conv2d(x.bfloat16(), w.bfloat16(), groups=2)
    assert half.dtype == torch.bfloat16
    own = torch.nn.functional.conv2d(x.bfloat16(), w.bfloat16(), groups=2)
    torch.testing.assert_close(half, own, rtol=2e-2, atol=2e-2)

    a, b, c = torch.randn(3, 10), torch.randn(7, 10), torch.randn(7)
    torch.testing.assert_close(linear(a, b, c), torch.nn.functional.linear(a, b, c), rtol=1e-4, atol=1e-4)

    layer = torch.nn.Conv2d(6, 4, 3)
    with pytest.raises(ArgumentError, match="'w' is a torch tensor that requires a gradient"):
        conv2d(x, layer.weight)
    with torch.no_grad():
        torch.testing.assert_close(conv2d(x, layer.weight, bias=layer.bias), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_arrays_on_a_gpu() -> None:
    x, w, bias = normal(2, 4, 9, 8), normal(5, 4, 3, 3), normal(5)
    on_device = [fg.to_device(a) for a in (x, w, bias)]
    y = conv2d(on_device[0], on_device[1], padding=1, bias=on_device[2])
    assert isinstance(y, fg.DeviceArray)
    np.testing.assert_allclose(fg.to_numpy(y), conv2d(x, w, padding=1, bias=bias), rtol=1e-5, atol=1e-5)
    a, b = normal(3, 10), normal(7, 10)
    product = linear(fg.to_device(a), fg.to_device(b))
    np.testing.assert_allclose(fg.to_numpy(product), a @ b.T, rtol=1e-5, atol=1e-5)
    with pytest.raises(fg.errors.DeviceError, match="input 'w' of graph 'conv2d' is on cpu"):
        conv2d(on_device[0], w)


@pytest.mark.gpu
def test_torch_on_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    x, w = torch.randn(2, 6, 9, 8, device="cuda"), torch.randn(4, 6, 3, 3, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = conv2d(x * 2, w, padding=1)
    side.synchronize()
    own = torch.nn.functional.conv2d((x * 2).double(), w.double(), padding=1)
    torch.testing.assert_close(y.double(), own, rtol=1e-4, atol=1e-4)


# ---- pooling


def test_pooling() -> None:
    x = normal(2, 3, 8, 12)
    tiles = x.reshape(2, 3, 4, 2, 4, 3)
    assert np.array_equal(max_pool2d(x, (2, 3)), tiles.max((3, 5)))
    np.testing.assert_allclose(avg_pool2d(x, (2, 3)), tiles.mean((3, 5)), rtol=1e-5, atol=1e-6)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    shifted = [padded[:, :, i : i + 7 : 2, j : j + 11 : 2] for i in range(3) for j in range(3)]
    channels_last = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    y = max_pool2d(channels_last, 3, 2, 1)
    assert np.array_equal(y, np.max(shifted, axis=0))
    assert y.strides[1] == 4
    assert avg_pool2d(x, 3, 3, 1, ceil_mode=True, count_include_pad=False).shape == (2, 3, 3, 5)
    assert max_pool2d(x.astype(np.int8), 3, dilation=2).dtype == np.int8


def test_pooling_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"max_pool2d takes x \(N, C, H, W\)"):
        max_pool2d(normal(3, 8, 12), 2)
    with pytest.raises(AttributeValueError, match="window is an integer or a sequence of integers, got float"):
        avg_pool2d(normal(1, 3, 8, 12), 2.0)
    with pytest.raises(AttributeValueError, match="stride is an integer of at least 1"):
        max_pool2d(normal(1, 3, 8, 12), 2, 0)
