"""Every pointwise op of the table, with every dtype it takes: on the CPU against the reference, and compiled for GPUs.

The values hold NaN, infinities, zeros of both signs and the extremes of the dtype.  The cases (attributes of each op)
are those of test_ops_pointwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import QUICK_ARCHS, check_all, check_on_gpu, compile_for, quick_dtypes, share, undecided_share
from test_ops_pointwise import CASES, POINTWISE

import fusegraph as fg
from fusegraph import dtypes as dt
from fusegraph.errors import AttributeValueError
from fusegraph.report.check import random_inputs

SHAPE = (3, 43)
#: Dtypes whose kernels differ most from each other; the others are left to the slow tier.
QUICK = {"float32", "bfloat16", "int8", "bool"}


def kinds(name: str) -> set[str]:
    """Returns the classes of operand dtype an op takes."""
    op = POINTWISE[name]
    return set(op.cuda) if op.reads_values else {"float", "int", "bool"}


def graph_of(name: str, dtype: dt.DType) -> fg.Graph:
    """Returns a graph that applies the op to the same operands once for each of its cases."""
    op = POINTWISE[name]
    g = fg.Graph(f"{name} {dtype}")
    operands = [g.tensor(key, SHAPE, dt.bool_ if key in op.masks else dtype) for key in op.operands]
    for attributes, _ in CASES[name]:
        try:
            g.output(g.apply(op, operands, attributes))
        except AttributeValueError:
            # Fractions and negative numbers are no attributes for integers of some dtypes.
            assert not dtype.is_float, f"{name} refuses {attributes} for {dtype}"
    assert g.outputs, f"no case of {name} is for {dtype}"
    return g


def special_inputs(graph: fg.Graph) -> dict[str, np.ndarray[Any, Any]]:
    inputs = random_inputs(graph, seed=1, special=0.1)
    rng = np.random.default_rng(2)
    for array in inputs.values():
        if array.dtype.kind in "iu":
            info = np.iinfo(array.dtype)
            extremes = np.array([info.min, info.min + 1, info.max, info.max - 1], array.dtype)
            array[...] = np.where(rng.random(array.shape) < 0.2, rng.choice(extremes, array.shape), array)
    return inputs


def taking(dtype: dt.DType) -> list[str]:
    return [name for name in POINTWISE if dtype.kind in kinds(name)]


@pytest.mark.parametrize("dtype", quick_dtypes(dt.ALL, *QUICK))
def test_every_op_of(dtype: dt.DType) -> None:
    graphs = [graph_of(name, dtype) for name in taking(dtype)]
    results = check_all(graphs, inputs=special_inputs)
    for result, graph in zip(results, graphs):
        share = undecided_share([result], [graph])
        assert share < 0.2, f"{graph.name}: nothing is known of {share:.0%} of the results"


def test_every_op_has_a_case() -> None:
    """Every op is covered, with each class of dtype it has an expression for."""
    assert set(CASES) == set(POINTWISE)
    covered = {(name, dtype.kind) for dtype in dt.ALL for name in taking(dtype)}
    assert covered >= {(name, kind) for name, op in POINTWISE.items() for kind in op.cuda}


@pytest.mark.parametrize("arch", QUICK_ARCHS)
def test_some_ops_compile_for_gpus(arch: str) -> None:
    chosen = [
        ("gelu", dt.bfloat16), ("tanh", dt.float32), ("pow", dt.float32), ("sin", dt.float64), ("identity", dt.int64),
        ("add", dt.float8_e4m3), ("mod", dt.int8), ("binary_select", dt.bool_), ("gen_index", dt.float16),
    ]  # fmt: skip
    for kernel in compile_for(arch, [graph_of(*c) for c in chosen]):
        assert kernel.spill_bytes == 0, kernel.name


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_every_op_compiles_for_gpus(arch: str) -> None:
    """All ops with float32, bfloat16, int32 and bool operands, each for one; no kernel spills registers."""
    graphs = [graph_of(n, d) for d in (dt.float32, dt.bfloat16, dt.int32, dt.bool_) for n in taking(d)]
    assert [k.name for k in compile_for(arch, share(arch, graphs)) if k.spill_bytes] == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", dt.ALL, ids=str)
def test_every_op_on_the_gpu(dtype: dt.DType) -> None:
    check_on_gpu([graph_of(name, dtype) for name in taking(dtype)], inputs=special_inputs)
