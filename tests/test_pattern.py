"""Patterns: names, numbers, either order, repetition, one consumer, and reasons of what does not match."""

from __future__ import annotations

import pytest

import fusegraph as fg
from codegen.declined import Declined
from fusegraph.pattern import Found, only_consumer, op, repeated


def graph() -> tuple[fg.Graph, fg.Tensor, fg.Tensor]:
    g = fg.Graph("test")
    return g, g.tensor("a", (4,)), g.tensor("b", (4,))


def test_a_name_is_one_tensor() -> None:
    g, a, b = graph()
    swish = op.mul("x", op.sigmoid("x").named("gate"))
    for tensor in (a * g.sigmoid(a), g.sigmoid(a) * a):
        found = swish.match(g, tensor)
        assert found is not None
        assert found["x"] is a
        assert [node.output for node in found.nodes] == [tensor, found["gate"]]
    assert swish.match(g, a * g.sigmoid(b)) is None
    assert swish.match(g, a) is None
    assert op.sub("x", 2.0).match(g, 2.0 - a) is None


def test_numbers_attributes_and_conditions() -> None:
    g, a, b = graph()
    assert op.add("x", 2.0).fits(g, g._producer[2.0 + a])
    assert not op.add("x", 2.0).fits(g, g._producer[3.0 + a])
    assert not op.add("x", 2.0).fits(g, g._producer[a + b])
    relu = g._producer[g.relu(a, upper_clip=6.0)]
    assert op.relu(upper_clip=6.0).fits(g, relu)
    assert not op.relu(upper_clip=5.0).fits(g, relu)
    assert not op.relu().when(lambda _, node: node.output.rank == 2).fits(g, relu)
    with pytest.raises(KeyError):
        op.no_such_op()


def test_all_ways_are_tried() -> None:
    g, a, b = graph()
    negative = repeated("x", op.neg, lambda rest: op.mul(rest, ...))
    assert [found["x"] for found in negative.ways(Found(g), -(a * b))][-2:] == [a, b]
    both = Found(g, {"left": -(a * b), "right": g.exp(b)}).where(left=negative, right=op.exp("x"))
    assert both is not None
    assert both["x"] is b


def test_consumers_and_reasons() -> None:
    g, a, b = graph()
    inner = g.exp(a)
    total = inner + b
    once = op.add(op.exp("x").when(lambda found, node: only_consumer(found.graph, node.output) is not None), ...)
    assert once.match(g, total) is not None
    (onwards,) = Found(g, {"x": a}).onwards("x", once, 2)
    assert onwards.nodes[0].output is total
    g.output(inner, name="e")
    assert once.match(g, total) is None
    found = Found(g, {"total": total}).must("no reason", total=op.add("left", "right"))
    with pytest.raises(Declined, match="'e' is no logarithm"):
        found.must("{left} is no logarithm", left=op.log("y"))
