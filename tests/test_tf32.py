"""Products and convolutions of float32 whose operands may be rounded to tf32: who asks for it, and what it allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_cases import check_cases

import fusegraph as fg
from fusegraph.plan import plan
from fusegraph.report.bounds import Rounding, bounded
from fusegraph.report.check import compare, random_inputs

pytestmark = pytest.mark.slow


def tf32(graph: fg.Graph) -> list[str | None]:
    return [n.attributes["compute_dtype"] for n in graph.nodes if "compute_dtype" in n.attributes]


def test_a_graph_or_a_node_asks_for_tf32():
    def all_three(compute: str, io: str = "float32", **how: Any) -> fg.Graph:
        g = fg.Graph("tf32", io_dtype=io, compute_dtype=compute)
        x, w, loss = g.tensor("x", (1, 4, 6)), g.tensor("w", (5, 4, 3)), g.tensor("loss", (1, 5, 4))
        for y in (g.conv_fprop(x, w, **how), g.conv_dgrad(loss, w, **how), g.conv_wgrad(x, loss, **how)):
            g.output(g.exp(y))
        g.output(g.matmul(g.tensor("a", (3, 4)), g.tensor("b", (4, 5)), **how))
        return g

    assert tf32(all_three("tf32")) == ["tf32"] * 4
    assert tf32(all_three("float32")) == [None] * 4
    assert tf32(all_three("tf32", compute_dtype="float32")) == [None] * 4
    assert tf32(all_three("float32", compute_dtype="tf32")) == ["tf32"] * 4
    assert tf32(all_three("tf32", "bfloat16")) == tf32(all_three("tf32", "float64")) == [None] * 4
    asked = all_three("tf32")
    assert asked.compute_dtype.name == "float32"
    made = plan(asked)  # simplifying the graph keeps what was asked for
    assert tf32(made.simplified) == ["tf32"] * 4
    specs = [k.group.lowered.spec for k in made.kernels if k.group.family == "contraction"]
    assert specs
    assert all(s.tf32 for s in specs)
    check_cases([asked])


@pytest.mark.parametrize(("asked", "slack"), [("tf32", True), ("float32", False)])
def test_operands_may_be_rounded_where_tf32_was_asked_for(asked, slack):
    """Operands rounded to 10 bits are within the bound of tf32 and far beyond that of float32."""
    g = fg.Graph("rounded", compute_dtype=asked)
    g.output(g.conv_wgrad(g.tensor("x", (2, 4, 12)), g.tensor("loss", (2, 5, 10))), name="dw")
    inputs = random_inputs(g, 1)
    rounded = {n: (a.view(np.uint32) + 0x1000 & np.uint32(0xFFFFE000)).view(np.float32) for n, a in inputs.items()}
    values = bounded(g, rounded, Rounding())[g.outputs[0]][0]
    (result,) = compare(g, inputs, {"dw": values.astype(np.float32)}, Rounding())
    assert result.ok is slack
    if slack:  # two bits fewer are too few
        rough = {n: (a.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for n, a in inputs.items()}
        values = bounded(g, rough, Rounding())[g.outputs[0]][0]
        (result,) = compare(g, inputs, {"dw": values.astype(np.float32)}, Rounding())
        assert not result.ok
