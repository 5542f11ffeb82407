"""Torch's own database of operators, forward and backward, on the cpu engine against eager torch.

A sample of it: one input of one dtype of every third operator, of which the seed says the first.
FUSEGRAPH_OPINFO=8 takes eight inputs of every dtype of all operators instead, FUSEGRAPH_OPINFO_SEED others.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("expecttest", reason="torch's tests need expecttest")

import torch_opinfo  # noqa: E402

from fusegraph.frontends.torch.table import HANDLERS  # noqa: E402

#: Parts of the database, which workers share; by default every third one is tested.
PARTS = 33
COUNT, SEED = (int(os.environ.get(name, "0")) for name in ("FUSEGRAPH_OPINFO", "FUSEGRAPH_OPINFO_SEED"))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS) if COUNT else range(SEED % 3, PARTS, 3))
def test_operators_of_the_database(part: int) -> None:
    outcomes = list(torch_opinfo.run(part, PARTS, count=COUNT, seed=SEED))
    bad = [f"{o.kind}: {o.name}: {o.text}" for o in outcomes if o.kind in ("wrong", "crashed")]
    assert not bad, "\n".join(bad)
    right = sum(o.kind == "right" for o in outcomes)
    assert right > 0.8 * len(outcomes), "torch traces nearly all of them"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "broken", "seen"),
    [
        ("aten.exp.default", lambda c, x: c.graph.exp(x * 1.0001), "result 0"),
        ("aten.exp.default", lambda c, x: c.graph.exp(c.graph.max(x, -1.0)), "result 0"),
        ("aten.mul.Tensor", lambda c, x, y: c.graph.mul(x, y) * 1.0001, "gradient 0"),
    ],
)
def test_the_comparison_can_fail(operator: str, broken: Any, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a result that is off by some digits, or in some elements only, and of a gradient."""
    (right,) = torch_opinfo.run(0, 1, [torch.float32], 1, only="^exp$")
    assert right.kind == "right"
    monkeypatch.setitem(HANDLERS, operator, broken)
    (wrong,) = torch_opinfo.run(0, 1, [torch.float32], 1, only="^exp$")
    assert wrong.kind == "wrong"
    assert seen in wrong.text


@pytest.mark.slow
def test_what_raises_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HANDLERS, "aten.exp.default", lambda c, x: x.shape[99])
    (crashed,) = torch_opinfo.run(0, 1, [torch.float32], 1, only="^exp$")
    assert (crashed.kind, "IndexError" in crashed.text) == ("crashed", True)
