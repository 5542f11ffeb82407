"""Graphs on a real GPU: numerics of all families, of empty and odd tensors."""

from __future__ import annotations

import random

import numpy as np
import pytest
from gpu_graphs import (
    LAYOUTS,
    as_numpy,
    convolution,
    network,
    of_every_dtype,
    passes,
    pointwise,
    product,
)

import fusegraph as fg
from codegen import contraction
from codegen.contraction.simt_schedule import TILES, SimtSchedule
from codegen.dtypes import ALL
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.lowering.base import Options
from fusegraph.report.check import random_inputs
from fusegraph.runtime.arrays import to_device

pytestmark = pytest.mark.gpu

DTYPES = [d.name for d in ALL]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_family_of_every_dtype(dtype):
    for graph in of_every_dtype(dtype):
        passes(graph)


@pytest.mark.parametrize("dtype", DTYPES[:6])
def test_special_values(dtype):
    for graph in of_every_dtype(dtype):
        passes(graph, inputs=random_inputs(graph, 1, special=0.02))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3"])
def test_strict(dtype):
    for graph in of_every_dtype(dtype):
        passes(graph, strict=True)


def test_without_fusion():
    passes(network(), fusion=False)
    passes(pointwise(), fusion=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_convolutions_of_every_kind(layout):
    for x, w, attributes in [
        ((2, 5, 19), (7, 5, 3), {"padding": 1}),
        (
            (2, 10, 9, 11),
            (4, 5, 3, 5),
            {"groups": 2, "stride": (2, 1), "dilation": (1, 2), "padding": ((2, 1), (0, 4))},
        ),
        ((2, 5, 4, 5, 6), (9, 5, 3, 2, 3), {"padding": ((1, 1), (0, 1), (2, 0)), "stride": (1, 2, 1)}),
        ((1, 8, 2, 3), (9, 8, 5, 7), {"padding": ((2, 2), (3, 4))}),
        ((2, 64, 56, 56), (64, 64, 1, 1), {}),
        ((1, 32, 7, 7), (37, 32, 3, 3), {"padding": 1, "mode": "convolution"}),
        ((4, 64, 57, 57), (64, 1, 3, 3), {"groups": 64, "padding": 1, "stride": 2}),
        ((4, 33, 40, 41), (33, 1, 7, 7), {"groups": 33, "padding": 3, "mode": "convolution"}),
        ((1, 12, 30, 31), (24, 1, 5, 5), {"groups": 12, "dilation": 2}),
        ((70, 32, 7, 7), (32, 1, 3, 3), {"groups": 32, "padding": 1}),
        ((2, 8, 5, 6, 37), (8, 1, 3, 3, 3), {"groups": 8, "padding": 1}),
        ((2, 16, 500), (16, 1, 31), {"groups": 16, "padding": 15}),
        ((1, 1, 270, 481), (1, 1, 15, 15), {"padding": 7}),
        ((2, 4, 64, 65), (8, 4, 8, 8), {"padding": 3}),
    ]:
        for dtype in ("float32", "bfloat16"):
            passes(convolution(x, w, dtype, layout, **attributes))


@pytest.mark.parametrize("itype", ["int32", "int64"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile, itype, monkeypatch):
    monkeypatch.setattr(contraction.FAMILY, "schedules", lambda spec, arch: iter([SimtSchedule(*tile, itype)]))
    passes(product((257, 65), (65, 260)))
    passes(product((129, 64), (64, 255), "bfloat16", transposed=True))
    passes(convolution((2, 9, 19, 20), (40, 9, 3, 3), padding=1))


def test_random_matmuls_and_convolutions():
    r = random.Random(0)
    for _ in range(20):
        m, n, k = (r.choice([1, 7, 32, 63, 129, 200]) for _ in range(3))
        passes(product((m, k), (k, n), r.choice(DTYPES), transposed=r.random() < 0.5))
    for _ in range(20):
        groups = r.choice([1, 1, 2, 16])
        channels, filters = r.choice([1, 3, 8, 17]), r.choice([1, 2, 8, 33])
        size, taps, dilation = r.choice([5, 14, 33]), r.choice([1, 2, 3, 5]), r.choice([1, 2])
        padding = (r.randint(0, 4), r.randint(max(0, (taps - 1) * dilation + 1 - size), 6))
        passes(
            convolution(
                (r.choice([1, 3]), groups * channels, size, size + 1),
                (groups * filters, channels, taps, taps),
                r.choice(DTYPES),
                r.choice(LAYOUTS),
                groups=groups,
                stride=r.choice([1, 2, 3]),
                dilation=dilation,
                padding=(padding, padding),
                mode=r.choice(["convolution", "cross_correlation"]),
            )
        )


def test_the_same_inputs_give_the_same_bits():
    for graph in (network(), product((130, 1000), (1000, 70), "bfloat16"), pointwise()):
        executable = graph.compile("cuda")
        inputs = [to_device(a) for a in random_inputs(graph).values()]
        first = as_numpy(executable(*inputs))
        for _ in range(5):
            for a, b in zip(first, as_numpy(executable(*inputs))):
                assert a.tobytes() == b.tobytes()


def test_cpu_engine_gives_what_the_gpu_gives():
    """The emitted source is the same: sums run in the same order, so float results agree to the last bits."""
    graph = product((65, 130), (130, 67))
    inputs = random_inputs(graph)
    there = graph.compile("cuda")
    here = CpuExecutable(graph, Options(target=there.target))
    assert there.plan.kernels[0].source == here.plan.kernels[0].source
    for a, b in zip(as_numpy(there(*map(to_device, inputs.values()))), as_numpy(here(*inputs.values()))):
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=1e-4, atol=1e-4)


# ---- empty and odd tensors


def test_empty_tensors():
    for graph in (
        pointwise((0, 5)),
        product((0, 4), (4, 5)),
        product((4, 0), (0, 5)),
        product((0, 4, 3), (0, 3, 5)),
        convolution((0, 5, 8, 8), (7, 5, 3, 3)),
        convolution((2, 0, 8, 8), (7, 0, 3, 3), groups=1),
        convolution((0, 8, 8, 8), (8, 1, 3, 3), groups=8),
    ):
        passes(graph)


def test_non_contiguous_inputs_and_outputs():
    graph = fg.Graph("strided")
    a = graph.tensor("a", (20, 30), strides=(1, 40))
    b = graph.tensor("b", (30, 24), strides=(100, 3))
    y = a @ b + graph.tensor("c", (20, 24), strides=(0, 1))
    graph.output(graph.tanh(y), name="y", strides=(2, 50))
    graph.output(y, name="packed")
    passes(graph)
