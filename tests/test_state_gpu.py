"""Inputs that graphs assign to, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

import fusegraph as fg
from fusegraph.report.check import check, check_executable, random_inputs
from fusegraph.runtime.arrays import to_device, to_numpy

pytestmark = pytest.mark.gpu


def cache(positions: int, dtype: str = "bfloat16") -> fg.Graph:
    g = fg.Graph("cache", io_dtype=dtype)
    keys, at = g.tensor("keys", (2, 8, 64, 128)), g.tensor("at", (positions,), "int64")
    x, w = g.tensor("x", (2 * positions, 256)), g.tensor("w", (256, 8 * 128))
    k = g.transpose(g.reshape(x @ w, (2, positions, 8, 128)), (0, 2, 1, 3))
    new = g.assign(keys[:, :, at], g.tanh(k))
    g.output(g.reduction(new, mode="add", axes=2), name="y")
    return g


@pytest.mark.parametrize("positions", [1, 5])
def test_caches(positions: int) -> None:
    for fusion in (True, False):
        result = check(cache(positions), "cuda", fusion=fusion)
        assert result.ok, result


@pytest.mark.parametrize("place", [0, 63, -1, 64])
def test_one_kernel_stores_at_one_position_of_two_inputs(place: int) -> None:
    g = fg.Graph("caches", io_dtype="bfloat16")
    x, keys, values = g.tensor("x", (8, 128)), g.tensor("keys", (8, 64, 128)), g.tensor("values", (1, 64, 8, 128))
    at = g.tensor("at", (), "int64")
    y = g.assign(keys[:, at], g.tanh(x)), g.assign(values[0, at], g.exp(x))
    g.output(g.reduction(y[0], mode="max", axes=1), name="y")
    result = check(g, "cuda", {**random_inputs(g), "at": np.asarray(place)})
    assert result.ok, result


def test_regions_and_swaps() -> None:
    g = fg.Graph("regions")
    x, y, v = g.tensor("x", (64, 96)), g.tensor("y", (64, 96)), g.tensor("v", (64, 32))
    g.assign(x, y)
    g.assign(y, x)
    g.assign(x[:, 32:64], g.relu(v))
    g.assign(y[::2], y[1::2] * 0.5)
    result = check(g, "cuda")
    assert result.ok, result


def test_replays_go_on_from_the_last_state() -> None:
    g = fg.Graph("count")
    x, step = g.tensor("x", (1000,)), g.tensor("step", (1000,))
    g.assign(x, x + step)
    executable = g.compile("cuda")
    given = to_device(np.zeros(1000, np.float32)), to_device(np.ones(1000, np.float32))
    _, replay = executable.record(*given)
    np.testing.assert_array_equal(to_numpy(given[0]), 1)
    for _ in range(5):
        replay()
    np.testing.assert_array_equal(to_numpy(given[0]), 6)


def test_tuning_leaves_the_arrays_alone() -> None:
    g = cache(1)
    executable = g.compile("cuda", autotune=True)
    inputs = random_inputs(g)
    before = {name: x.copy() for name, x in inputs.items()}
    result = check_executable(executable, inputs)
    assert result.ok, result
    for name, x in inputs.items():
        np.testing.assert_array_equal(x.view(np.uint8), before[name].view(np.uint8))
