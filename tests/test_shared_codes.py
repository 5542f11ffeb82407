"""8-bit floats that several products take: each makes its operand of them, where kernels multiply the 8-bit floats."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fusegraph as fg
from codegen import target
from fusegraph.lowering.base import Options
from fusegraph.passes.shared_codes import NAME
from fusegraph.plan import plan


def layers(rows: int, columns: int, terms: int, block: int = 128, quantised: bool = True) -> fg.Graph:
    """Returns swish(x @ gate) * (x @ up) of x in blocks of terms, which the graph quantises itself or is given."""
    g = fg.Graph("layers", "bfloat16")
    if quantised:
        codes = g.tensor("x", (rows, terms), "float8_e4m3")
        scale = g.tensor("sx", (rows, terms // block), "float32")
    else:
        fine = g.cast(g.tensor("x", (rows, terms)), "float32").reshape((rows, terms // block, block))
        largest = g.max(g.reduction(g.abs(fine), "max", -1), 1e-12) * (1 / 448)
        codes = g.cast(fine / largest, "float8_e4m3").reshape((rows, terms))
        scale = largest.reshape((rows, terms // block))
    x, sums = g.block_scale_dequantize(codes, scale, block, dtype="bfloat16"), []
    for name in ("gate", "up"):
        w = g.tensor(name, (columns, terms), "float8_e4m3", parameter=True)
        s = g.tensor(f"s{name}", (columns // block, terms // block), "float32", parameter=True)
        sums.append(x @ g.block_scale_dequantize(w, s, (block, block), dtype="bfloat16").T)
    g.output(g.swish(sums[0]) * sums[1], name="y")
    return g


def of_codes(graph: fg.Graph, **options: object) -> list[bool]:
    """Returns for each kernel of a plan for Hopper whether it multiplies codes."""
    planned = plan(graph, Options(target=target("sm_90a"), **options))  # type: ignore[arg-type]
    return [getattr(k.choice.schedule, "scales", False) for k in planned.kernels]


@pytest.mark.parametrize("rows", [16, 4096])
def test_each_product_takes_codes(rows: int) -> None:
    assert of_codes(layers(rows, 2048, 7168)) == [True, True]
    assert of_codes(layers(rows, 2048, 7168, quantised=False)) == [False, True, True]


def test_what_is_no_part_of_a_product_is_made_once() -> None:
    """Where blocks are too small for the sums of a stage, or everything is rounded, one kernel dequantises for both."""
    for graph, options in ((layers(4096, 4096, 4096, 32), {}), (layers(256, 256, 256), {"strict": True})):
        planned = plan(graph, Options(target=target("sm_90a"), **options))
        written = [t.name for group in planned.partition.groups for t in group.writes if "again" in t.name]
        assert written == []
    step = next(s for s in plan(layers(256, 256, 256), Options(target=target("sm_80"))).steps if s.name == NAME)
    assert not step.changed


@pytest.mark.slow
@pytest.mark.parametrize("quantised", [True, False])
def test_results(quantised: bool) -> None:
    graph, r = layers(24, 128, 256, quantised=quantised), np.random.default_rng(0)
    given = {t.name: r.normal(0, 1, t.shape).astype(np.float32) for t in graph.inputs}
    given |= {name: np.abs(x) + 0.5 for name, x in given.items() if name[0] == "s"}
    given = {t.name: given[t.name].astype(t.dtype.numpy) for t in graph.inputs}
    made = graph.compile("cpu", target="sm_90a")
    assert made.plan is not None
    assert [getattr(k.choice.schedule, "scales", False) for k in made.plan.kernels][-2:] == [True, True]
    x = given["x"].astype(np.float64)
    if quantised:
        x = x * np.repeat(given["sx"], 128, 1)
    else:
        fine = given["x"].astype(np.float32).reshape(24, 2, 128)
        scale = np.abs(fine).max(-1, keepdims=True) * np.float32(1 / 448)
        x = ((fine / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(24, 256)
    gate, up = (
        x @ (given[n].astype(np.float64) * np.repeat(np.repeat(given[f"s{n}"], 128, 0), 128, 1)).T
        for n in ("gate", "up")
    )
    expected = gate / (1 + np.exp(-gate)) * up
    found = np.asarray(made(*(given[t.name] for t in graph.inputs)), np.float64)
    np.testing.assert_allclose(found, expected, rtol=2**-6, atol=2**-8 * np.abs(expected).max())
