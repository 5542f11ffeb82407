"""Packed copies of parameters in graphs whose sizes vary."""

from __future__ import annotations

import numpy as np

import fusegraph as fg


def test_parameters_are_packed_once_for_all_sizes() -> None:
    graph = fg.Graph("sized")
    n, rng = fg.Dim("n", max=300), np.random.default_rng(0)
    x, w = graph.tensor("x", (n, 64)), graph.tensor("w", (64, 64), parameter=True)
    graph.output(x * graph.reduction(w, mode="max", axes=0, keepdims=False), name="y")
    executable = graph.compile("cpu")
    values = rng.normal(size=(64, 64)).astype(np.float32)
    for rows in (1, 2, 7, 300):
        a = rng.normal(size=(rows, 64)).astype(np.float32)
        np.testing.assert_array_equal(executable(a, values), a * values.max(0))
        assert executable.packed_bytes == 64 * 4
    values *= 2
    executable.repack()
    np.testing.assert_array_equal(executable(a, values), a * values.max(0))


def test_what_is_packed_may_not_depend_on_sizes_that_vary() -> None:
    graph = fg.Graph("moved")
    n = fg.Dim("n", max=16)
    x, w = graph.tensor("x", (n, 64)), graph.tensor("w", (1, 64), parameter=True)
    graph.output(x + graph.cumsum(graph.broadcast(w, (n, 64)), axis=0), name="y")
    executable = graph.compile("cpu")
    a = np.ones((16, 64), np.float32)
    for rows in (1, 5, 16):
        np.testing.assert_allclose(executable(a[:rows], a[:1]), 1 + np.cumsum(a[:rows], 0))


def test_what_is_sliced_to_a_size_that_varies_is_not_packed() -> None:
    graph = fg.Graph("positions", io_dtype="float32")
    x = graph.tensor("x", (fg.Dim("n", max=32), 4))
    table, w = graph.tensor("table", (32, 4), parameter=True), graph.tensor("w", (4, 4), parameter=True)
    graph.output((x + table[: x.shape[0]] * 2.0) @ graph.reduction(w, "add", axes=1, keepdims=True), name="y")
    executable = graph.compile("cpu")
    rng = np.random.default_rng(0)
    for n in (1, 5, 32):
        arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in ((n, 4), (32, 4), (4, 4))]
        expected = (arrays[0] + 2 * arrays[1][:n]) @ arrays[2].sum(1, keepdims=True)
        np.testing.assert_allclose(executable(*arrays), expected, rtol=1e-5, atol=1e-5)
