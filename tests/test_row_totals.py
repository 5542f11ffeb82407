"""Norms in front of products of few rows: the product's kernel adds up the squares, in every form that can."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import check_all, check_on_gpu, compile_for
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Case, check_cases

import fusegraph as fg
from codegen.contraction.thin_schedule import ThinSchedule
from codegen.contraction.wgmma_layout import WgmmaSchedule
from codegen.contraction.wgmma_schedule import schedules
from codegen.target import target
from fusegraph.lowering.base import Options
from fusegraph.plan import Plan, plan


def normed(
    rows: int,
    depth: int,
    width: int,
    dtype: str = "bfloat16",
    *,
    lead: tuple[int, ...] = (),
    count: int = 1,
    scaled: bool = True,
    mean: bool = True,
    across: bool = False,
    **product: Any,
) -> fg.Graph:
    """Returns a norm of rows, products of it with one or two matrices, and what follows them."""
    g = fg.Graph("normed")
    x = g.tensor("x", (*lead, rows, depth), dtype)
    wide = g.cast(x, "float32")
    total = g.reduction(wide * wide, mode="avg" if mean else "add", axes=(-1,))
    y = g.cast(wide * g.rsqrt(total + 1e-5), dtype)
    if scaled:
        y = y * g.tensor("scale", (depth,), dtype)
    results = []
    for n in range(count):
        w = g.tensor(f"w{n}", (depth, width) if across else (width, depth), dtype)
        results.append(g.matmul(y, w if across else g.transpose(w, perm=(1, 0)), **product))
    out = g.swish(results[0]) * results[1] if count > 1 else results[0] + g.tensor("bias", (width,), dtype)
    g.output(out, name="out")
    return g


def planned(graph: fg.Graph, arch: str = "sm_90a", **options: Any) -> Plan:
    return plan(graph, Options(target=target(arch), **options))


CASES = [
    normed(1, 2048, 96),
    normed(3, 1000, 72, mean=False),
    normed(16, 256, 40, scaled=False),
    normed(9, 72, 136),
    normed(1, 64, 8, lead=(5,)),
    normed(1, 8, 8),
    normed(2, 512, 64, count=2),
    normed(4, 264, 48, lead=(2, 1), count=2),
    normed(1, 1, 8),
    normed(8, 96, 64, "float32", compute_dtype="tf32"),
    normed(5, 136, 64, across=True),
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_results(arch: str):
    check_all(CASES, arch=arch)


@pytest.mark.parametrize("graph", CASES[:8])
def test_one_kernel(graph: fg.Graph):
    (kernel,) = planned(graph).kernels
    assert {"reduction", "matmul"} <= {n.op.name for n in kernel.group.nodes}


def test_forms():
    """Weights that lie along the reduction are read to registers, or brought by TMA where they are many."""
    few, many = (planned(normed(1, 2048, n, count=2, scaled=False)).kernels for n in (64, 16384))
    assert [type(k.choice.schedule) for k in few] == [ThinSchedule]
    assert [type(k.choice.schedule) for k in many] == [WgmmaSchedule]
    compile_for("sm_90a", [normed(16, 2048, 16384, count=2), normed(1, 2048, 64)], target=target("sm_90a"))


@pytest.mark.parametrize("blocks", [1, 3])
def test_of_warpgroups(blocks: int):
    """The same products where a warpgroup multiplies, of whose 64 rows few exist, or one of each block of a cluster."""

    def by_tma(spec: Any) -> WgmmaSchedule | None:
        return next(s for s in schedules(spec, target("sm_90a")) if s.split_k == blocks) if spec.totals else None

    sizes = ((1, 1024, 96, 2), (16, 1160, 64, 1), (3, 1024, 40, 1))
    graphs = [normed(m, k, n, count=count, scaled=False) for m, k, n, count in sizes]
    made = check_cases([Case(g, schedule=by_tma, arch="sm_90a") for g in graphs])
    assert all(isinstance(exe.plan.kernels[-1].choice.schedule, WgmmaSchedule) for exe in made)


@pytest.mark.parametrize(
    "graph",
    [
        normed(17, 256, 64),  # more rows
        normed(4, 256, 64, "float16"),  # x * scale might be infinite
        normed(4, 256, 64, "float32"),  # no tensor cores
    ],
)
def test_kept_in_front(graph: fg.Graph):
    kernels = planned(graph).kernels
    assert all(len({"reduction", "matmul"} & {n.op.name for n in k.group.nodes}) < 2 for k in kernels)
    check_all([graph], arch="sm_90a")


def test_strictly_in_front():
    assert len(planned(normed(1, 256, 64), strict=True).kernels) > 1


def test_needed_elsewhere():
    """What else is done with the norm, or the sum of squares, keeps it in a kernel of its own."""
    g = fg.Graph("both")
    x, w = g.tensor("x", (2, 256), "bfloat16"), g.tensor("w", (64, 256), "bfloat16")
    wide = g.cast(x, "float32")
    scale = g.rsqrt(g.reduction(wide * wide, mode="avg", axes=(-1,)) + 1e-6)
    y = g.cast(wide * scale, "bfloat16")
    g.output(g.matmul(y, g.transpose(w, perm=(1, 0))), name="product")
    g.output(g.relu(y), name="other")
    h = fg.Graph("scale")
    x, w = h.tensor("x", (2, 256), "bfloat16"), h.tensor("w", (64, 256), "bfloat16")
    wide = h.cast(x, "float32")
    scale = h.rsqrt(h.reduction(wide * wide, mode="avg", axes=(-1,)) + 1e-6)
    h.output(h.matmul(h.cast(wide * scale, "bfloat16"), h.transpose(w, perm=(1, 0))), name="product")
    h.output(scale, name="scale")
    check_all([g, h], arch="sm_90a")


def test_special_values():
    """NaN and infinity in a row stay in its results; a row of zeros, or of large numbers, is finite."""
    g = normed(5, 64, 16)
    exe = g.compile("cpu", target="sm_90a")
    rng = np.random.default_rng(1)
    arrays = {t.name: rng.standard_normal(t.shape).astype(t.dtype.numpy) for t in g.inputs}
    x = arrays["x"]
    x[0, 3], x[1, 5], x[2], x[3] = np.nan, np.inf, 0, x[3] * np.float32(1e15)
    out = np.asarray(exe(**arrays), np.float64)
    wide = np.asarray(x, np.float64)
    with np.errstate(invalid="ignore"):
        y = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(arrays["scale"], np.float64)
    wanted = y @ np.asarray(arrays["w0"], np.float64).T + np.asarray(arrays["bias"], np.float64)
    assert np.isnan(out[:2]).all()
    np.testing.assert_allclose(out[2:], wanted[2:], rtol=0.03, atol=0.15)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 16),
    st.sampled_from([8, 24, 64, 200, 1024]),
    st.sampled_from([8, 16, 40, 100]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2),
    st.sampled_from([(), (1,), (2,)]),
)
def test_random(rows: int, depth: int, width: int, scaled: bool, mean: bool, count: int, lead: tuple[int, ...]):
    check_all([normed(rows, depth, width, scaled=scaled, mean=mean, count=count, lead=lead)], arch="sm_90a")


@pytest.mark.gpu
def test_on_gpu():
    check_on_gpu([*CASES, normed(1, 2048, 16384, count=2), normed(16, 2048, 8192), normed(8, 4096, 14336, count=2)])
