"""Large problems on a real GPU: tensors of more than 4 GiB, with offsets of more than 32 bits, and long attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fusegraph as fg
from codegen.direct_convolution.spec import DirectConvolutionSpec
from fusegraph.runtime import driver
from fusegraph.runtime.arrays import DeviceArray, to_device, to_numpy

pytestmark = pytest.mark.gpu


def _needs(gib: float) -> None:
    have = driver.properties(0).total_memory / 2**30
    if have < gib * 1.25:
        pytest.skip(f"needs {gib:.0f} GiB of device memory, the GPU has {have:.0f}")


def _filled(shape: tuple[int, ...], dtype: str, byte: int) -> DeviceArray:
    """Returns an array whose bytes are all ``byte``."""
    array = DeviceArray.empty(shape, dtype)
    driver.memset(array.pointer, byte, array.nbytes)
    return array


def _put(array: DeviceArray, start: int, values: np.ndarray[Any, Any]) -> None:
    values = np.ascontiguousarray(values)
    driver.copy_to_device(array.pointer + start * values.itemsize, values.ctypes.data, values.nbytes)


def _get(array: DeviceArray, start: int, count: int) -> np.ndarray[Any, Any]:
    values = np.empty(count, array.dtype.numpy)
    driver.copy_to_host(values.ctypes.data, array.pointer + start * values.itemsize, values.nbytes)
    return values


@pytest.mark.parametrize(("dtype", "width"), [("int8", 1), ("bfloat16", 2)])
def test_pointwise_of_more_than_4_gib_elements(dtype, width):
    count = 2**32 + 12345
    _needs(2 * count * width / 2**30)
    graph = fg.Graph("huge", io_dtype=dtype)
    graph.output(graph.neg(graph.tensor("x", (count,))), name="y")
    executable = graph.compile("cuda")
    x, y = _filled((count,), dtype, 0), _filled((count,), dtype, 0x55)
    places = [0, 2**31 - 50, 2**32 - 50, count - 100]
    values = np.arange(1, 101).astype(x.dtype.numpy)
    for place in places:
        _put(x, place, values)
    executable(x, out=y)
    for place in places:
        np.testing.assert_array_equal(_get(y, place, 100).astype(np.float32), -values.astype(np.float32))
    for place in (1000, 2**31 + 1000, 2**32 + 1000):
        assert not _get(y, place, 100).astype(np.float32).any()


def test_matmul_of_more_than_4_gib_elements():
    m, k = 2**16 + 3, 2**16
    _needs(m * k * 2 / 2**30)
    graph = fg.Graph("huge", io_dtype="bfloat16")
    graph.output(graph.matmul(graph.tensor("a", (m, k)), graph.tensor("b", (k, 8)), dtype="float32"), name="y")
    executable = graph.compile("cuda")
    rng = np.random.default_rng(0)
    a, b = _filled((m, k), "bfloat16", 0), rng.integers(-3, 4, (k, 8)).astype(fg.bfloat16.numpy)
    rows = {r: rng.integers(-3, 4, k).astype(fg.bfloat16.numpy) for r in (0, 2**15 - 1, 2**15, 2**16 - 1, 2**16, m - 1)}
    for row, values in rows.items():
        _put(a, row * k, values)
    y = to_numpy(executable(a, to_device(b)))
    for row, values in rows.items():
        np.testing.assert_array_equal(y[row], values.astype(np.float32) @ b.astype(np.float32))
    assert np.count_nonzero(y.any(axis=1)) == len(rows)


@pytest.mark.parametrize("channels", [4, 8])
def test_convolution_of_more_than_4_gib_elements(channels):
    """A direct convolution (4 channels) and a contraction (8): ones everywhere, so that results count taps inside."""
    height, width = 2**16 // channels * 2 + 1, 2**15
    _needs(channels * height * width / 2**30)
    graph = fg.Graph("huge", io_dtype="int8")
    x, w = graph.tensor("x", (1, channels, height, width)), graph.tensor("w", (8, channels, 3, 3))
    y = graph.conv_fprop(x, w, padding=1, stride=16)
    graph.output(y, name="y")
    executable = graph.compile("cuda")
    spec = executable.plan.kernels[0].group.lowered.spec
    assert isinstance(spec, DirectConvolutionSpec) == (channels == 4)
    assert "int64" in executable.plan.kernels[0].source.code
    image = _filled((1, channels, height, width), "int8", 1)
    seen = width // 16 * 16 - 16  # the last column that a window has its centre on, in the very last row and channel
    _put(image, channels * height * width - width + seen, np.array([5], np.int8))
    weights = np.random.default_rng(1).integers(-5, 6, (8, channels, 3, 3)).astype(np.int8)
    result = to_numpy(executable(image, to_device(weights)))[0]
    np.testing.assert_array_equal(result, _over_ones(weights, height, width, 5))


def _over_ones(weights: np.ndarray[Any, Any], height: int, width: int, last: int) -> np.ndarray[Any, Any]:
    """Returns the convolution, with stride 16 and padding 1, of an image of ones in which ``last`` is the element under
    the last window's center in the last channel.
    """
    assert height % 16 == 1  # so that the last windows reach below the image
    assert width % 16 == 0
    wide = weights.astype(np.int32)
    result = np.empty((weights.shape[0], height // 16 + 1, width // 16), np.int32)
    result[:] = wide.sum((1, 2, 3))[:, None, None]
    result[:, 0] = wide[:, :, 1:].sum((1, 2, 3))[:, None]
    result[:, -1] = wide[:, :, :2].sum((1, 2, 3))[:, None]
    result[:, :, 0] = wide[:, :, :, 1:].sum((1, 2, 3))[:, None]
    result[:, 0, 0] = wide[:, :, 1:, 1:].sum((1, 2, 3))
    result[:, -1, 0] = wide[:, :, :2, 1:].sum((1, 2, 3))
    result[:, -1, -1] += (last - 1) * wide[:, -1, 1, 1]
    return result


def test_attention_of_65536_queries_and_keys():
    """Scores would take 16 GiB a head in float32; some rows of each result against float64."""
    length, heads, depth = 2**16, 2, 64
    shape, scale = (1, heads, length, depth), depth**-0.5
    forward, backward = (fg.Graph(name, io_dtype="bfloat16") for name in ("long", "long_gradients"))
    tensors = [forward.tensor(name, shape) for name in "qkv"]
    result, stats = forward.sdpa(*tensors, use_causal_mask=True, generate_stats=True)
    forward.output(result, name="o")
    forward.output(stats, name="stats")
    given = [backward.tensor(name, shape) for name in ("q", "k", "v", "o", "dO")]
    given.append(backward.tensor("stats", (1, heads, length, 1), "float32"))
    for name, tensor in zip(("dQ", "dK", "dV"), backward.sdpa_backward(*given, use_causal_mask=True), strict=True):
        backward.output(tensor, name=name)
    kernels = [graph.compile("cuda") for graph in (forward, backward)]
    assert all(k.workspace_bytes < 20 * heads * length * depth for k in kernels), "more than a few tensors like q"

    rng = np.random.default_rng(0)
    q, k, v, loss = (rng.standard_normal(shape).astype(fg.bfloat16.numpy) for _ in range(4))
    on_gpu = [to_device(x) for x in (q, k, v)]
    o, logs = kernels[0](*on_gpu)
    gradients = [to_numpy(x)[0] for x in kernels[1](*on_gpu, o, to_device(loss), logs)]
    o, logs = to_numpy(o)[0], to_numpy(logs)[0, :, :, 0]
    q, k, v, loss, o = (x.reshape(heads, length, depth).astype(np.float64) for x in (q, k, v, loss, o))
    delta = (loss * o).sum(-1)
    rows = [0, 1, 127, 128, 4095, 2**15, 2**15 + 1, length - 129, length - 1]
    for head in range(heads):
        scores = np.where(np.arange(length) <= np.array(rows)[:, None], q[head, rows] @ k[head].T * scale, -np.inf)
        top = scores.max(-1, keepdims=True)
        sums = np.exp(scores - top).sum(-1, keepdims=True)
        probabilities = np.exp(scores - top) / sums
        np.testing.assert_allclose(logs[head, rows], (top + np.log(sums))[:, 0], rtol=0, atol=1e-3)
        _near(o[head, rows], probabilities @ v[head])
        slopes = probabilities * (loss[head, rows] @ v[head].T - delta[head, rows, None])
        _near(gradients[0][head, rows], slopes @ k[head] * scale)
        scores = np.where(np.arange(length)[:, None] >= rows, q[head] @ k[head, rows].T * scale, -np.inf)
        probabilities = np.exp(scores - logs[head].astype(np.float64)[:, None])
        _near(gradients[2][head, rows], probabilities.T @ loss[head])
        slopes = probabilities * (loss[head] @ v[head, rows].T - delta[head, :, None])
        _near(gradients[1][head, rows], slopes.T @ q[head] * scale)


def _near(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Checks that each row is within three roundings to bfloat16 of its largest element or, where terms cancel, of
    float32.
    """
    error = np.abs(got.astype(np.float64) - expected).max(-1)
    assert np.all(error <= 3 * 2.0**-9 * np.abs(expected).max(-1) + 1e-5), (error, np.abs(expected).max(-1))
