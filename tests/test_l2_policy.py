"""Loads of what the L2 cache is to evict last: which they are, and that their values are right."""

from __future__ import annotations

import re

import pytest
from graphs import check_all, check_on_gpu, compile_for

import fusegraph as fg
from codegen import l2_policy
from codegen.target import target
from fusegraph.plan import by_cost_model, plan


def normalised(rows: int, cols: int, io: str = "float32") -> fg.Graph:
    g = fg.Graph(f"normalised {io} {cols}", io_dtype=io)
    x, residual, w = g.tensor("x", (rows, cols)), g.tensor("residual", (rows, cols)), g.tensor("w", (cols,))
    g.output(g.rmsnorm(x, w) + residual, name="y")
    return g


def biased(rows: int, cols: int, io: str = "float32") -> fg.Graph:
    g = fg.Graph(f"biased {io} {cols}", io_dtype=io)
    g.output(g.gelu(g.tensor("x", (rows, cols)) + g.tensor("bias", (cols,))), name="y")
    return g


def total(rows: int, cols: int) -> fg.Graph:
    g = fg.Graph("total")
    g.output(g.reduction(g.tensor("x", (rows, cols)), "add", 1), name="y")
    return g


def loaded_to_last(graph: fg.Graph, arch: str = "sm_90a") -> set[str]:
    """Returns the operands that a graph's kernels load with evict_last."""
    codes = [k.source.code for k in plan(graph, choose=by_cost_model(target(arch))).kernels]
    return {name for code in codes for name in re.findall(r"evict_last(?:<\d+>\(|\(.*, )(\w+)", code)}


def test_streams_of_large_kernels_last() -> None:
    assert loaded_to_last(normalised(8192, 4096)) == {"x", "residual"}  # not w, which all rows share
    assert loaded_to_last(normalised(2048, 65536)) == {"x", "residual"}  # a row of several blocks, in shared memory
    assert loaded_to_last(biased(8192, 4096)) == {"x"}
    assert loaded_to_last(normalised(512, 4096)) == set()  # what the cache holds is of use to the next kernel
    assert loaded_to_last(biased(512, 4096)) == set()
    assert loaded_to_last(total(32768, 4096)) == set()  # hardly anything is written
    assert loaded_to_last(normalised(8192, 4096), "sm_80") == set()


#: Rows in registers, twice, and in shared memory.
SIZES = ((512, "float32"), (1000, "bfloat16"), (520, "bfloat16"))


@pytest.mark.slow
def test_values_that_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2_policy, "LEAST", 0)
    graphs = [make(6, cols, io) for make in (normalised, biased) for cols, io in SIZES]
    for graph in graphs:
        assert loaded_to_last(graph) >= {"x"}
    check_all(graphs, arch="sm_90a")
    compile_for("sm_90a", graphs, choose=by_cost_model(target("sm_90a")))


@pytest.mark.gpu
def test_values_that_last_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2_policy, "LEAST", 0)
    check_on_gpu([make(600, cols, io) for make in (normalised, biased) for cols, io in SIZES])
