"""Reductions behind reshapes that join dimensions: one kernel with what is around them."""

from __future__ import annotations

import pytest
from graphs import check_all, leave_out_pass

import fusegraph as fg
from fusegraph.plan import plan


def instance_norm(layout: str, *, added: bool, dtype: str = "float32", size: int = 7, after: bool = True) -> fg.Graph:
    """Returns an instance norm as torch writes it out: a batch norm of one image, with its weights repeated."""
    g = fg.Graph(f"instance norm {layout} {added} {dtype} {size} {after}", io_dtype=dtype)
    x = g.tensor("x", (4, 24, size, size), layout=layout)
    weights = [g.tensor(name, (24,)) for name in ("scale", "bias")]
    y = x + g.tensor("other", x.shape, layout=layout) if added else x
    repeated = [g.reshape(g.broadcast(g.reshape(w, (1, 24)), (4, 24)), (1, 96, 1, 1)) for w in weights]
    y = g.batchnorm(g.reshape(y, (1, 96, size, size)), *repeated)[0]
    if after:
        y = g.relu(g.reshape(y, x.shape))
    g.output(y, name="y")
    return g


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_an_instance_norm_is_one_kernel(layout: str, added: bool, after: bool) -> None:
    assert len(plan(instance_norm(layout, added=added, after=after)).kernels) == 1


def test_it_was_more(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_pass(monkeypatch, "joined reductions")
    assert len(plan(instance_norm("NHWC", added=True)).kernels) >= 4


def flat(axis: int, keepdims: bool) -> fg.Graph:
    """Returns a softmax of images as rows, and a reduction of these."""
    g = fg.Graph(f"flat {axis} {keepdims}")
    x = g.tensor("x", (5, 6, 7, 8), layout="NHWC")
    rows = g.reshape(g.gelu(x), (5, 336))
    g.output(g.reduction(rows, "max", axis, keepdims=keepdims), name="most")
    g.output(g.softmax(rows, axis), name="y")
    return g


def halves() -> fg.Graph:
    """Returns a norm over a dimension that is half of one behind the reshape: nothing that is joined is divided."""
    g = fg.Graph("halves")
    x = g.tensor("x", (6, 10, 12))
    y = g.reshape(g.relu(x), (3, 20, 12))
    g.output(y - g.reduction(y, "avg", 1, keepdims=True), name="y")
    return g


@pytest.mark.slow
def test_results_are_right() -> None:
    graphs = [
        instance_norm(layout, added=added, dtype=dtype, size=size, after=after)
        for layout, added, dtype, size, after in (
            ("NCHW", True, "float32", 7, True), ("NHWC", True, "bfloat16", 7, False),
            ("NHWC", False, "float16", 8, True), ("NCHW", False, "float32", 1, True),
            ("NHWC", True, "float32", 16, False),
        )
    ]  # fmt: skip
    check_all([*graphs, halves(), *(flat(axis, keep) for axis in (0, 1) for keep in (False, True))])
