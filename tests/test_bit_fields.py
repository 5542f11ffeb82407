"""Bit fields of one tensor that are joined: one expression of the field's number, which products take as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import quick
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegraph as fg
from codegen.target import target
from fusegraph import dtypes as dt
from fusegraph.lowering.base import Options
from fusegraph.passes.bit_fields import MOST_PARTS
from fusegraph.plan import plan

RNG = np.random.default_rng(0)


def random(dtype: str, *shape: int) -> Any:
    kind = dt.BY_NAME[dtype]
    return RNG.integers(int(kind.min), int(kind.max), shape, kind.numpy, endpoint=True)


def left(graph: fg.Graph) -> list[str]:
    """The ops of a graph's kernels that join."""
    made = plan(graph, Options(target=target("h200")))
    return [n.op.name for k in made.kernels for n in k.group.nodes if n.op.name == "concatenate"]


def ran(body: Callable[[fg.Graph, fg.Tensor], fg.Tensor], x: Any, joins: bool = False) -> Any:
    g = fg.Graph("fields")
    g.output(body(g, g.tensor("x", x.shape, str(x.dtype))))
    assert bool(left(g)) == joins
    return np.asarray(g.compile("cpu")(x))


def interleaved(parts: list[Any]) -> Any:
    return np.stack(parts, -1).reshape(*parts[0].shape[:-1], -1)


@pytest.mark.parametrize("dtype", ["uint8", *quick("int32", "int8", "uint16")])
def test_nibbles_one_beside_the_other(dtype: str) -> None:
    x = random(dtype, 3, 5)

    def low(g: fg.Graph, x: fg.Tensor) -> Any:
        return g.bitwise_and(x, 15).reshape(3, 5, 1), g.bitwise_and(g.shift_right(x, 4), 15).reshape(3, 5, 1)

    found = ran(lambda g, x: g.concatenate(*low(g, x), axis=2).reshape(3, 10), x)
    np.testing.assert_array_equal(found, interleaved([x & 15, (x >> 4) & 15]))
    found = ran(lambda g, x: g.concatenate(*reversed(low(g, x)), axis=2).reshape(3, 10), x)
    np.testing.assert_array_equal(found, interleaved([(x >> 4) & 15, x & 15]))


def test_a_byte_has_no_more_bits_than_its_own() -> None:
    x = random("uint8", 4, 6)
    found = ran(lambda g, x: g.concatenate(g.bitwise_and(x, 15), g.shift_right(x, 4), axis=1), x)
    np.testing.assert_array_equal(found, np.concatenate([x & 15, x >> 4], 1))
    masked = ran(lambda g, x: g.concatenate(g.bitwise_and(x, 15), g.shift_right(g.bitwise_and(x, 240), 4), axis=0), x)
    np.testing.assert_array_equal(masked, np.concatenate([x & 15, x >> 4]))


def test_signed_nibbles() -> None:
    x = random("int8", 7, 3)
    found = ran(lambda g, x: g.concatenate(g.shift_right(g.shift_left(x, 4), 4), g.shift_right(x, 4), axis=0), x)
    np.testing.assert_array_equal(found, np.concatenate([(x << 4) >> 4, x >> 4]))


def test_fields_of_a_word_and_what_follows_each() -> None:
    """Eight numbers of 4 bits in 32, as floats less 8, times a scale of each row."""
    x, s = random("int32", 6, 2), RNG.random((6, 1)).astype(np.float32)
    g = fg.Graph("words")
    a, scale = g.tensor("x", x.shape, "int32"), g.tensor("s", s.shape)
    each = [(g.cast(g.bitwise_and(g.shift_right(a, 4 * k), 15), "float32") - 8.0) * scale for k in range(8)]
    g.output(g.concatenate(*each, axis=1))
    assert left(g) == []
    expected = np.concatenate([(((x >> 4 * k) & 15).astype(np.float32) - 8) * s for k in range(8)], 1)
    np.testing.assert_array_equal(g.compile("cpu")(x, s), expected)


def test_tensors_filled_piece_by_piece() -> None:
    """Numbers of 2 bits, written one quarter after the other, as functions without assignment see it."""
    x = random("uint8", 2, 9)

    def filled(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
        made = g.broadcast(g.constant(0, dtype="uint8"), (8, 9))
        for k in range(4):
            part = g.shift_right(g.bitwise_and(x, 3 << (2 * k)), 2 * k)
            before, behind = made[: 2 * k], made[2 * k + 2 :]
            made = g.concatenate(*(t for t in (before, part, behind) if t.shape[0]), axis=0)
        return made

    np.testing.assert_array_equal(ran(filled, x), np.concatenate([(x >> 2 * k) & 3 for k in range(4)]))


def test_the_sign_of_zero_counts() -> None:
    x = random("uint8", 4)
    g = fg.Graph("zeros")
    a = g.tensor("x", (4,), "uint8")
    first, last = (g.cast(part, "float32") for part in (g.bitwise_and(a, 15), g.shift_right(a, 4)))
    g.output(g.concatenate(first * 0.0, last * -0.0, axis=0))
    found = np.asarray(g.compile("cpu")(x))
    assert np.signbit(found).tolist() == [False] * 4 + [True] * 4


LEFT_ALONE: dict[str, Callable[[fg.Graph, fg.Tensor], list[fg.Tensor]]] = {
    "another tensor": lambda g, x: [g.bitwise_and(x, 15), g.shift_right(g.add(x, 1), 4)],
    "fields of other sizes": lambda g, x: [g.bitwise_and(x, 7), g.shift_right(x, 4)],
    "the same field": lambda g, x: [g.bitwise_and(x, 15), g.bitwise_and(x, 15)],
    "no regular steps": lambda g, x: [g.bitwise_and(g.shift_right(x, k), 3) for k in (0, 2, 3)],
    "no fields": lambda g, x: [g.add(x, 1), g.add(x, 2)],
    "more behind one": lambda g, x: [g.bitwise_and(x, 15) + 1, g.shift_right(x, 4) + 2],
    "parts of other sizes": lambda g, x: [g.bitwise_and(x, 15), g.shift_right(x, 4)[:1]],
    "many": lambda g, x: [g.bitwise_and(g.shift_right(x, k % 2), 1) for k in range(MOST_PARTS + 1)],
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name: str) -> None:
    x = random("uint8", 3, 4)
    g = fg.Graph("alone")
    g.output(g.concatenate(*LEFT_ALONE[name](g, g.tensor("x", x.shape, "uint8")), axis=0))
    assert "concatenate" in [
        n.op.name for s in plan(g).steps for n in s.rewritten.graph.nodes if s.name == "bit fields"
    ]
    (whole,) = (np.asarray(g.compile(e)(x)) for e in ("cpu",))
    np.testing.assert_array_equal(whole, np.asarray(g.compile("reference")(x)))


def test_numbers_beyond_the_53_bits_of_a_float() -> None:
    x = random("int64", 5)
    masks = (2**60 + 1, 2**60)
    g = fg.Graph("wide")
    a = g.tensor("x", (5,), "int64")
    g.output(g.concatenate(*(g.bitwise_and(g.shift_right(a, k), m) for k, m in enumerate(masks)), axis=0))
    np.testing.assert_array_equal(g.compile("cpu")(x), np.concatenate([(x >> k) & m for k, m in enumerate(masks)]))


def test_long_chains_end() -> None:
    """Nodes one behind the other, and the same one twice: neither depth nor number of paths is followed to the end."""
    g = fg.Graph("deep")
    x = g.tensor("x", (4,), "uint8")
    parts = []
    for k in range(2):
        part = g.bitwise_and(g.shift_right(x, 4 * k), 15)
        for n in range(300):
            part = g.bitwise_xor(part, part) if n % 2 else g.bitwise_and(part, 15)
        parts.append(part)
    g.output(g.concatenate(*parts, axis=0))
    assert len(plan(g).kernels) >= 1


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@settings(max_examples=25, deadline=None)
@given(shapes(), st.data())
def test_any_fields_of_any_axis(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Fields of some bits from some bit on, every so many bits, backwards or not, along a new axis or an old one."""
    dtype = data.draw(st.sampled_from(["uint8", "int8", "int16", "uint32", "int32", "int64"]))
    bits, width, step = dt.BY_NAME[dtype].bits, data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    count = data.draw(st.integers(2, max(2, min(8, (bits - 1) // step))))
    first = data.draw(st.integers(0, max(0, bits - 1 - step * (count - 1))))
    places = [min(first + k * step, bits - 1) for k in range(count)]
    places = places[::-1] if data.draw(st.booleans()) else places
    axis, stacked = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.booleans())
    x, mask = random(dtype, *shape), (1 << width) - 1
    g = fg.Graph("any")
    a = g.tensor("x", shape, dtype)
    parts = [g.bitwise_and(g.shift_right(a, place), mask) for place in places]
    g.output(g.concatenate(*(g.unsqueeze(p, axis) if stacked else p for p in parts), axis=axis))
    values = [(x >> x.dtype.type(place)) & x.dtype.type(mask) for place in places]
    expected = np.stack(values, axis) if stacked else np.concatenate(values, axis)
    np.testing.assert_array_equal(g.compile("reference")(x), expected)
    made = next(s.rewritten.graph for s in plan(g).steps if s.name == "bit fields")
    np.testing.assert_array_equal(made.compile("reference")(x), expected)
