"""Products of float32 made by tensor cores from operands split into three of bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_cases import Case, check_cases, executable
from tensor_kernels import kernel

import fusegraph as fg
from codegen.bf16x6 import LEAST_TERMS
from codegen.contraction import FAMILY
from codegen.contraction.simt_schedule import SimtSchedule
from codegen.contraction.wgmma_layout import WgmmaSchedule
from codegen.schedule import best_schedule
from codegen.spec import ContractionSpec
from codegen.target import target
from fusegraph.lowering.base import Options
from fusegraph.lowering.choices import Settled
from fusegraph.passes import vector_products
from fusegraph.report.bounds_bf16x6 import units
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.host_compiler import build

H200 = target("h200")
PIECES = 4096


def _product(m: int, n: int, k: int, *, rows: bool = True, cols: bool = False, batch: int = 1) -> fg.Graph:
    """Returns a @ b; the operands lie along the reduction (rows, cols) or across it."""
    graph = fg.Graph("split", io_dtype="float32")
    a = graph.tensor("a", (batch, m, k), strides=None if rows else (m * k, 1, m))
    b = graph.tensor("b", (batch, k, n), strides=(n * k, 1, k) if cols else None)
    graph.output(a @ b, name="y")
    return graph


def _split(spec: Any) -> Any:
    """Returns the best schedule of the form that splits."""
    return FAMILY.forms[1].schedules(spec, H200)[0] if isinstance(spec, ContractionSpec) else best_schedule(spec, H200)


def _case(graph: fg.Graph, label: str, **how: Any) -> Case:
    tiled = {(vector_products.NAME, "y"): Settled(vector_products.TILES)}  # not sums of rows
    return Case(graph, "contraction", Options(target=H200, settled=tiled), _split, arch="h200", label=label, **how)


def test_parts_add_up_and_specials_stay() -> None:
    source = kernel(
        "split_parts",
        """#include "bf16x6.cuh"
extern "C" __global__ void NAME(const float* x, float* y) {
  const int first = (blockIdx.x * 64 + threadIdx.x) * 8;
  Vector<bfloat16, 8> parts[3];
  split(load<8>(x + first), parts);
  for (int part = 0; part < 3; ++part)
    for (int e = 0; e < 8; ++e) y[(first + e) * 3 + part] = widen(parts[part][e]);
}
""",
        threads=64,
        grid=PIECES // 64,
    )
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 8 * PIECES, dtype=np.uint32)
    x = bits.view(np.float32)
    x[:8] = [np.inf, -np.inf, np.nan, 0.0, -0.0, np.finfo(np.float32).max, np.finfo(np.float32).tiny, 2.0**-149]
    x[8] = np.uint32(0x7F800001).view(np.float32)  # NaN whose upper half is infinity's
    parts = np.empty((x.size, 3), np.float32)
    build([source], cache=default_cache()).launch(source.name, [x.ctypes.data, parts.ctypes.data])
    finite = np.isfinite(x)
    own, split = x[finite].astype(np.float64), parts[finite].astype(np.float64)
    lost, normal = np.abs(own - split.sum(1)), np.abs(own) >= 2.0**-110
    assert (lost[normal] == 0).all()
    assert (lost <= 2.0**-133).all()
    for part, most in ((1, 2.0**-7), (2, 2.0**-15)):
        assert (np.abs(split[normal, part]) <= most * np.abs(own[normal])).all()
    assert (parts[~finite, 2].view(np.uint32) == x[~finite].view(np.uint32))[~np.isnan(x[~finite])].all()
    assert np.isnan(parts[np.isnan(x), 2]).all()
    assert (np.abs(parts[~finite, 0]) == 1).all()
    assert (parts[~finite, 1] == 0).all()


@pytest.mark.slow
def test_products_of_every_layout() -> None:
    cases = [
        _case(_product(m, n, k, rows=rows, cols=cols, batch=batch), f"{m} {n} {k} {rows} {cols}", special=special)
        for rows in (True, False)
        for cols in (True, False)
        for m, n, k, batch in ((70, 136, 72, 1), (129, 33, 67, 2), (1, 257, 130, 1))
        for special in (0.0, 0.01)
    ]
    check_cases(cases)


@pytest.mark.parametrize("power", [(-130, 20), (-140, -5), (100, 23), (120, -120)])
def test_magnitudes_at_both_ends(power: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    a, b = (
        (rng.standard_normal((1, *shape)) * 2.0**exponent).astype(np.float32)
        for shape, exponent in zip(((40, 96), (96, 24)), power)
    )
    check_cases([_case(_product(40, 24, 96), f"{power}", inputs={"a": a, "b": b})])


def test_what_is_not_finite() -> None:
    """Each row and column has a special value where they meet: results are NaN or infinite as in float32."""
    largest = np.finfo(np.float32).max
    specials = np.array([np.inf, -np.inf, np.nan, largest, -largest, 0.0, 1.0, -3.0, 2.0**-126], np.float32)
    count, terms = specials.size, 70
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((1, count, terms)), rng.standard_normal((1, terms, count))
    for place in (0, 31, 69):
        x, y = a.astype(np.float32), b.astype(np.float32)
        x[0, :, place], y[0, place] = specials, specials
        made = executable(_case(_product(count, count, terms), "specials"))
        assert "bf16x6.cuh" in made.plan.kernels[0].source.code
        seen = np.asarray(made(a=x, b=y))
        with np.errstate(all="ignore"):
            want = (x.astype(np.float64) @ y.astype(np.float64)).astype(np.float32)
        assert (np.isnan(seen) == np.isnan(want)).all()
        assert (np.isinf(seen) == np.isinf(want)).all()
        assert (np.sign(seen) == np.sign(want))[np.isinf(want)].all()


def test_errors_are_bounded_by_those_of_float32() -> None:
    assert all(units(k) <= k for k in range(LEAST_TERMS, 1 << 16))
    assert units(LEAST_TERMS // 2) > LEAST_TERMS // 2


def test_who_has_parts() -> None:
    def form(graph: fg.Graph, **options: Any) -> type:
        made = executable(Case(graph, options=Options(**{"target": H200, **options})))
        return type(made.plan.kernels[-1].choice.schedule)

    def convolved(algorithm: str | None) -> fg.Graph:
        graph = fg.Graph("convolved", io_dtype="float32")
        x, w = graph.tensor("x", (8, 64, 28, 28)), graph.tensor("w", (128, 64, 1, 1))
        graph.output(graph.conv_fprop(x, w, algorithm=algorithm), name="y")
        return graph

    assert form(_product(512, 512, 512)) is WgmmaSchedule
    assert form(_product(512, 512, 512), strict=True) is SimtSchedule
    assert form(_product(512, 512, LEAST_TERMS - 1)) is SimtSchedule
    assert form(_product(512, 512, 512), target=target("a100")) is SimtSchedule
    assert form(convolved(None)) is WgmmaSchedule
    assert form(convolved("direct")) is SimtSchedule


def test_windows_and_gradients() -> None:
    cases = []
    for last in (False, True):
        graph = fg.Graph("windows", io_dtype="float32")
        x = graph.tensor("x", (2, 24, 9, 10), strides=(2160, 1, 240, 24) if last else None)
        w = graph.tensor("w", (40, 24, 3, 3), strides=(216, 1, 72, 24) if last else None)
        how = {"padding": 1, "stride": 1}
        y = graph.conv_fprop(x, w, **how)
        loss = graph.tensor("loss", y.shape)
        graph.output(graph.relu(y), name="y")
        graph.output(graph.conv_dgrad(loss, w, (9, 10), **how), name="dx")
        graph.output(graph.conv_wgrad(x, loss, 3, **how), name="dw")
        cases.append(Case(graph, options=Options(target=H200), schedule=_split, arch="h200", label=f"{last}"))
    for made in check_cases(cases):
        parts = sum("bf16x6.cuh" in k.source.code for k in made.plan.kernels)
        assert parts >= 2  # gradients of filters have kernels of their own where those are faster
