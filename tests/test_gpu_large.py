"""Tensors of more than 4 GiB on a real GPU: offsets of more than 32 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fusegraph as fg
from codegen.window.spec import WindowSpec
from fusegraph.runtime import driver
from fusegraph.runtime.arrays import DeviceArray, to_device, to_numpy

pytestmark = pytest.mark.gpu


def _needs(gib: float) -> None:
    have = driver.properties(0).total_memory / 2**30
    if have < gib * 1.25:
        pytest.skip(f"needs {gib:.0f} GiB of device memory, the GPU has {have:.0f}")


def _filled(shape: tuple[int, ...], dtype: str, byte: int) -> DeviceArray:
    """An array whose bytes are all ``byte``."""
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
    """A window kernel (4 channels) and a contraction (8): ones everywhere, so that results count taps inside."""
    height, width = 2**16 // channels * 2 + 1, 2**15
    _needs(channels * height * width / 2**30)
    graph = fg.Graph("huge", io_dtype="int8")
    x, w = graph.tensor("x", (1, channels, height, width)), graph.tensor("w", (8, channels, 3, 3))
    y = graph.conv_fprop(x, w, padding=1, stride=16)
    graph.output(y, name="y")
    executable = graph.compile("cuda")
    spec = executable.plan.kernels[0].group.lowered.spec
    assert isinstance(spec, WindowSpec) == (channels == 4)
    assert "int64" in executable.plan.kernels[0].source.code
    image = _filled((1, channels, height, width), "int8", 1)
    seen = width // 16 * 16 - 16  # the last column that a window has its centre on, in the very last row and channel
    _put(image, channels * height * width - width + seen, np.array([5], np.int8))
    weights = np.random.default_rng(1).integers(-5, 6, (8, channels, 3, 3)).astype(np.int8)
    result = to_numpy(executable(image, to_device(weights)))[0]
    np.testing.assert_array_equal(result, _over_ones(weights, height, width, 5))


def _over_ones(weights: np.ndarray[Any, Any], height: int, width: int, last: int) -> np.ndarray[Any, Any]:
    """What stride 16 and padding 1 give on ones, with ``last`` under the last window's centre in the last channel."""
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
