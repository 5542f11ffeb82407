"""Concatenations: one load for an element whatever the number of parts, on the CPU, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from graphs import check_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fusegraph as fg
from fusegraph.plan import plan

FUZZ = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def joined(draw: Callable[[Any], Any], number: int) -> fg.Graph:
    """Returns a graph that joins tensors, views of them and the same ones again, with other work around that."""
    dtype = draw(st.sampled_from(["bfloat16", "float32", "int8", "float64"]))
    g = fg.Graph(f"joined {number}", io_dtype=dtype)
    layout = draw(st.sampled_from(["NCHW", "NHWC"]))
    axis = draw(st.sampled_from([1, 1, 1, 0, 2, 3]))
    shape = [draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 4))]
    unit = draw(st.sampled_from([1, 3, 8, 16]))
    parts: list[fg.Tensor] = []
    for k in range(draw(st.integers(2, 9))):
        again = draw(st.integers(0, 9))
        own = list(shape)
        own[axis] = unit * draw(st.integers(0, 3))
        if again == 0 and parts:
            parts.append(draw(st.sampled_from(parts)))
        elif again == 1:  # a view that begins somewhere
            large = [n + d for n, d in zip(own, (1, 3, 0, 2))]
            x = g.tensor(f"x{k}", large, layout=layout)
            parts.append(x[1:, 3 : 3 + own[1], : own[2], 2:])
        elif again == 2:
            parts.append(g.neg(g.tensor(f"x{k}", own)))
        elif again == 3:
            parts.append(g.flip(g.tensor(f"x{k}", own, layout=layout), draw(st.sampled_from([axis, 3]))))
        else:
            parts.append(g.tensor(f"x{k}", own, layout=layout))
    x = g.concatenate(parts, axis=axis)
    how = draw(st.sampled_from(["plain", "pad", "slice", "turn", "relu"]))
    if how == "pad":
        x = g.pad(x, [0, (2, 1), 0, (1, 0)], value=1)
    if how == "slice" and x.shape[axis] > 2:
        keys = [slice(None)] * 4
        keys[axis] = slice(1, -1, draw(st.sampled_from([1, 2])))
        x = x[tuple(keys)]
    if how == "turn":
        x = g.transpose(x, (0, 2, 3, 1)) * 2
    g.output(g.neg(x), name="y")
    return g


@given(st.data())
@FUZZ
def test_parts_of_any_kind(data: Any) -> None:
    check_all([joined(data.draw, number) for number in range(8)])


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_one_load_of_many_parts(layout: str) -> None:
    g = fg.Graph(f"many {layout}", io_dtype="bfloat16")
    parts = [g.tensor(f"x{k}", (2, 8 * (k % 3 + 1), 3, 5), layout=layout) for k in range(25)]
    g.output(g.relu(g.concatenate(parts, axis=1)), name="y")
    check_all([g])
    (kernel,) = plan(g).kernels
    assert kernel.source.code.count("load<8>(") == 1
