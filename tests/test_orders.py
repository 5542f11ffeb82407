"""Gathers in an order that is known: views, if positions count digit by digit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegraph as fg
from fusegraph.passes.orders import order_by_views

RNG = np.random.default_rng(0)


def gathers(graph: fg.Graph) -> int:
    return sum(n.op.name == "gather" for n in order_by_views(graph).graph.nodes)


def check(x: Any, index: Any, axis: int, left: int = 0) -> None:
    g = fg.Graph("order")
    g.output(g.gather(g.tensor("x", x.shape, str(x.dtype)), g.constant(index), axis=axis))
    assert gathers(g) == left
    made = order_by_views(g).graph
    np.testing.assert_array_equal(made.compile("reference")(x), np.take(x, index, axis))


def test_orders_that_programs_write() -> None:
    x = RNG.normal(size=(3, 24)).astype(np.float32)
    places = np.arange(24)
    check(x, places, 1)
    check(x, places.reshape(4, 6).T.reshape(-1), 1)  # channels shuffled
    check(x, places.reshape(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(-1), 1)
    check(x, places.reshape(2, 3, 4).transpose(2, 0, 1).reshape(-1), 1)
    check(x, places.reshape(2, 3, 4).transpose(2, 1, 0), 1)  # an index of several dimensions
    check(x.T.copy(), places.reshape(4, 6).T.reshape(-1), 0)


@pytest.mark.parametrize(
    "index",
    [
        [1, 0, 2, 3, 4, 5],
        [5, 4, 3, 2, 1, 0],
        [0, 1, 2, 3, 4, 4],
        [0, 0, 1, 1, 2, 2],
        [0, 2, 4, 1, 3],
        [0, 1, 2, 3, 4, 5, 0],
        [0, 3, 1, 4, 2, 9],
        [-6, -5, -4, -3, -2, -1],
    ],
    ids=str,
)
def test_others_are_gathered(index: list[int]) -> None:
    x = RNG.normal(size=(6, 2)).astype(np.float32)
    g = fg.Graph("others")
    g.output(g.gather(g.tensor("x", x.shape), g.constant(np.array(index)), axis=0))
    assert gathers(g) == 1


def test_an_index_that_is_computed_of_positions() -> None:
    """As programs of torch write it: positions in rows, columns of these in another order."""
    x = RNG.integers(-9, 9, (5, 32)).astype(np.int8)
    g = fg.Graph("computed")
    a, order = g.tensor("x", x.shape, "int8"), g.constant(np.array([0, 4, 1, 5, 2, 6, 3, 7]))
    places = g.gather(g.arange(32, dtype="int32").reshape(4, 8), order, axis=1).reshape(32)
    places = g.where(g.cmp_lt(places, 0), g.add(places, 32), places)
    g.output(g.mul(g.gather(a, places, axis=1), 2))
    made = order_by_views(g).graph
    assert [n.op.name for n in made.nodes] == ["reshape", "transpose", "reshape", "mul"]
    index = np.arange(32).reshape(4, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(-1)
    for engine in ("cpu", "reference"):
        np.testing.assert_array_equal(g.compile(engine)(x), 2 * x[:, index])


def test_an_index_that_is_an_input_is_not_known() -> None:
    g = fg.Graph("unknown")
    g.output(g.gather(g.tensor("x", (4, 2)), g.add(g.tensor("i", (4,), "int32"), 1), axis=0))
    assert gathers(g) == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, 4), min_size=1, max_size=4), st.data())
def test_digits_in_any_order(sizes: list[int], data: st.DataObject) -> None:
    turned = data.draw(st.permutations(range(len(sizes))))
    count = int(np.prod(sizes))
    index = np.arange(count).reshape(sizes).transpose(turned).reshape(-1)
    check(RNG.integers(0, 99, (2, count, 3)), index, 1)
