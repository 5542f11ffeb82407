"""Sparse warpgroup products on a real GPU: the layout of their metadata, and whole layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from graphs import check_on_gpu
from sparse_kernels import Array, operands, source, swizzled, words
from test_sparse_products import KINDS, chooser, is_kind, layer, sparse

from fusegraph.engines.cuda import CudaExecutable
from fusegraph.lowering.base import Options
from fusegraph.passes import sparse_products
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, random_inputs
from fusegraph.runtime import arrays, driver, nvrtc
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.launch import Launch, Module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not driver.available(), reason="no CUDA driver or no GPU"),
]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not driver.properties(0).target.arch.has_wgmma:
        pytest.skip("no warpgroup products")


def multiplied(element: str, image: Array, metadata: Array) -> Array:
    """Returns what the kernel makes of an image of shared memory and of metadata."""
    kernel = source(element)
    (compiled,) = nvrtc.compile_kernels([kernel], "sm_90a", cache=default_cache())
    given = [arrays.to_device(a) for a in (image, metadata, np.full((64, 32), np.nan, np.float32))]
    function = Module(compiled.cubin, 0).function(kernel.name)
    Launch(function, kernel.grid, kernel.block, kernel.dynamic_shared_bytes, 3, None)([a.pointer for a in given])
    driver.synchronize()
    return given[2].to_numpy()


def nibbles(of: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Returns what changes the four-bit parts of words, the lowest first."""

    def changed(metadata: Array) -> Array:
        parts = metadata[:, None] >> (np.arange(8, dtype=np.uint32) * 4) & np.uint32(15)
        return np.asarray((of(parts) << (np.arange(8, dtype=np.uint32) * 4)).sum(axis=1).astype(np.uint32))

    return changed


def threads(order: tuple[int, ...]) -> Callable[[Array], Array]:
    """Returns what exchanges the words of every four threads."""
    return lambda metadata: metadata.reshape(32, 4)[:, list(order)].reshape(128)


#: What else the layout could be, if it is not as `wgmma.cuh` says.
OTHERS: dict[str, Callable[[Array], Array]] = {
    "the selector names the other two threads": threads((2, 3, 0, 1)),
    "the two threads are exchanged": threads((1, 0, 3, 2)),
    "threads 0 and 2, and 1 and 3, have the words of an instruction": threads((0, 2, 1, 3)),
    "rows 8 further are in the lower half": lambda metadata: metadata >> np.uint32(16) | metadata << np.uint32(16),
    "the first terms are in the upper bits of a half": nibbles(lambda p: p[:, [3, 2, 1, 0, 7, 6, 5, 4]]),
    "the lower place is in the upper bits of four": nibbles(lambda p: p >> np.uint32(2) | (p & np.uint32(3)) << 2),
    "halves of words are by fours, not by rows": nibbles(lambda p: p[:, [0, 4, 1, 5, 2, 6, 3, 7]]),
}


@pytest.mark.parametrize("element", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", [0, 1])
def test_metadata_lie_as_the_device_library_says(element: str, seed: int) -> None:
    values, places, b, wanted = operands(element, seed)
    image, metadata = np.concatenate([swizzled(values, 64), swizzled(b, 128)]), words(places)
    found = multiplied(element, image, metadata)
    if not np.array_equal(found, wanted):
        right = [
            n for n, change in OTHERS.items() if np.array_equal(multiplied(element, image, change(metadata)), wanted)
        ]
        first = words(np.tile([0, 1], (64, 16)))  # the same for all, whatever the layout
        dense = np.zeros((64, 64))
        dense[:, 0::4], dense[:, 1::4] = values[:, 0::2].astype(float), values[:, 1::2].astype(float)
        tiles = np.array_equal(multiplied(element, image, first), dense @ b.astype(float).T)
        rows = sorted(set(np.nonzero(found != wanted)[0].tolist()))
        pytest.fail(
            f"rows {rows} differ; tiles of values and of B are {'right' if tiles else 'WRONG'} with places 0 and 1 "
            f"everywhere; right would be: {'; '.join(right) or 'none of the layouts known here'}"
        )


def test_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_products, "MARGIN", 0)
    graphs = [
        layer(300, 520, 1032),
        layer(1024, 1024, 1024, "float16"),
        layer(16, 2048, 2048),
        layer(33, 72, 96, given=True),
        layer(34, 72, 64, end="first"),
        layer(136, 200, 256, end="first and bias"),
        layer(40, 136, 64, end="float"),
        layer(9, 72, 64, end="residual", batch=3),
    ]
    check_on_gpu(graphs, inputs=random_inputs)
    assert all(sparse(plan(g)) <= 1 for g in graphs)


@pytest.mark.parametrize("kind", KINDS)
def test_schedules(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_products, "MARGIN", 0)
    graph = layer(150, 300, 640) if kind == "split" else layer(1500, 2000, 640)
    choose = chooser(kind, driver.properties(0).target)
    made = CudaExecutable(graph, Options(), planner=lambda g, o: plan(g, o, choose=choose))
    assert is_kind(made.plan.kernels[0].choice.schedule, kind)
    result = check_executable(made, random_inputs(graph))
    assert result.ok, result
