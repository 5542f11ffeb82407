"""Integers and bools that are known before a graph runs: what is claimed of them holds, and masks become bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fusegraph as fg
from codegen.attention.spec import AttentionSpec, Bound
from fusegraph.passes.known import Known
from fusegraph.passes.positions import place
from fusegraph.passes.ranges import ranges
from fusegraph.plan import plan

# ---- claims


class Integers:
    """A random graph of integers and bools."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.g = g = fg.Graph("integers", io_dtype="int32")
        shape = (2, 3, 4)
        self.found = [
            g.tensor("data", shape, "int32"),
            g.tensor("bytes", (3, 1), "uint8"),
            g.constant(np.arange(4, dtype=np.int32)),
            g.constant(np.array([5, -2], np.int32).reshape(2, 1, 1)),
            *(g.gen_index(g.broadcast(g.constant(0), shape), axis=d) for d in range(3)),
        ]
        for _ in range(24):
            self.found.append(self.more())
        for tensor in self.found[7:]:
            g.output(g.identity(tensor) if tensor in g.outputs or g.producer(tensor) is None else tensor)

    def any(self) -> fg.Tensor:
        return self.found[int(self.rng.integers(len(self.found)))]

    def matching(self, x: fg.Tensor) -> Any:
        """Returns an operand beside x: a tensor that broadcasts with it, or a number."""
        for _ in range(6):
            y = self.any()
            try:
                np.broadcast_shapes(x.shape, y.shape)
            except ValueError:
                continue
            return self.number(y)
        return int(self.rng.integers(-3, 9))

    def number(self, x: fg.Tensor) -> fg.Tensor:
        return self.g.cast(x, "int64") if x.dtype.is_bool or x.dtype.name == "uint8" else x

    def truth(self, x: fg.Tensor) -> fg.Tensor:
        return x if x.dtype.is_bool else self.g.cmp_neq(x, 0)

    def more(self) -> fg.Tensor:
        g, x, kind = self.g, self.any(), int(self.rng.integers(16))
        y = self.matching(x)
        if kind < 4:
            return getattr(g, ("add", "sub", "mul", "max")[kind])(self.number(x), y)
        if kind < 8:
            name = ("cmp_ge", "cmp_lt", "cmp_eq", "cmp_neq")[kind - 4]
            return getattr(g, name)(self.number(x), y)
        if kind == 8:
            b = y if isinstance(y, fg.Tensor) else g.constant(y, dtype="int32")
            return getattr(g, str(self.rng.choice(["logical_and", "logical_or"])))(self.truth(x), self.truth(b))
        if kind == 9:
            return g.logical_not(self.truth(x))
        if kind == 10:
            return x.reshape(-1) if x.size % 4 else x.reshape(2, -1, 2) if x.rank < 3 else x.reshape(-1, x.shape[-1])
        if kind == 11:
            return x.transpose() if x.rank else x
        if kind == 12:
            return g.slice(x, tuple(n // 2 for n in x.shape), x.shape, tuple(1 for _ in x.shape)) if x.rank else x
        if kind == 13:
            return g.concatenate(x, x, axis=0) if x.rank and x.size < 100 else x
        if kind == 14:
            return g.cumsum(self.number(x), axis=-1) if x.rank else x
        return self.gathered(x)

    def gathered(self, x: fg.Tensor) -> fg.Tensor:
        g = self.g
        index = g.clamp(self.number(self.any()), min=0, max=3)
        return g.gather(x, index, axis=x.rank - 1) if x.rank and x.size * index.size < 400 else g.abs(self.number(x))


def holds(known: Known, value: np.ndarray[Any, Any]) -> None:
    value = value.astype(object)
    assert known.least <= value.min()
    assert value.max() <= known.most
    lines = [np.full(value.shape, line.start, object) for line in (known.linear, *(known.conditions or ())) if line]
    for line, total in zip([x for x in (known.linear, *(known.conditions or ())) if x], lines, strict=True):
        for axis, step in enumerate(line.steps):
            total += step * np.arange(value.shape[axis]).reshape(-1, *[1] * (value.ndim - axis - 1))
    if known.linear is not None:
        assert (lines.pop(0) == value).all()
    if known.conditions is not None:
        assert (np.all([line >= 0 for line in lines], axis=0) == value).all()


@pytest.mark.parametrize("seed", range(40))
def test_what_is_claimed_holds(seed: int) -> None:
    made = Integers(seed)
    g, rng = made.g, np.random.default_rng(seed)
    known = ranges(g)
    given = [rng.integers(-9, 9, (2, 3, 4)).astype(np.int32), rng.integers(0, 255, (3, 1)).astype(np.uint8)]
    given = [x for x, t in zip(given, (made.found[0], made.found[1]), strict=True) if t in g.inputs]
    wanted = g.compile(engine="reference")(*given)
    for tensor, value in zip(g.outputs, wanted, strict=True):
        holds(known[tensor], value)
    placed = place(g).graph
    for value, other in zip(wanted, placed.compile(engine="reference")(*given), strict=True):
        np.testing.assert_array_equal(value, other)


def test_sums_that_wrap_around_are_not_known() -> None:
    g = fg.Graph("wraps", io_dtype="int32")
    x = g.gen_index(g.tensor("x", (300,), "int8"), axis=0)
    narrow = g.cast(x, "int8")
    g.output(narrow)
    assert ranges(g)[narrow] == Known(-128, 127)
    assert ranges(g)[x].most == 299


# ---- masks


def spec_of(mask: Callable[[fg.Graph], fg.Tensor | None], *, rows: int = 24, keys: int = 24) -> AttentionSpec:
    """Returns the kernel of an attention with a mask made by a function of the graph."""
    g = fg.Graph("masked", io_dtype="bfloat16")
    q, k, v = (g.tensor(name, (2, 3, n, 32)) for name, n in (("q", rows), ("k", keys), ("v", keys)))
    g.output(g.sdpa(q, k, v, mask=mask(g)), name="o")
    (kernel,) = plan(g).kernels
    spec = kernel.group.lowered.spec
    assert isinstance(spec, AttentionSpec)
    return spec


def positions(g: fg.Graph, count: int, place: int) -> fg.Tensor:
    """Returns int64 positions 0 to count - 1, of which only dimension ``place`` of 4 counts."""
    index = g.cast(g.gen_index(g.broadcast(g.constant(0, dtype="int32"), (count,)), axis=0), "int64") + 0
    return index.reshape(tuple(count if d == place else 1 for d in range(4)))


def causal(g: fg.Graph) -> fg.Tensor:
    return g.cmp_le(positions(g, 24, 3), positions(g, 24, 2))


def repeated(g: fg.Graph) -> fg.Tensor:
    """Makes the causal mask of two dimensions, then repeats it, and adds what is always true."""
    row, key = positions(g, 24, 0).reshape(24, 1), positions(g, 24, 3).reshape(1, 24)
    mask = g.broadcast(g.logical_not(key > row).reshape(1, 1, 24, 24), (2, 1, 24, 24))
    return g.broadcast(row.reshape(1, 1, 24, 1) >= 0, (2, 1, 24, 24)) & mask


def one_sequence(g: fg.Graph) -> fg.Tensor:
    """Numbers the sequences of a batch by where positions do not follow each other, as for packed batches."""
    place = g.broadcast(positions(g, 24, 3).reshape(1, 24), (2, 24))
    before = g.concatenate(place[:, :1] - 1, place, axis=1)
    breaks = g.cmp_neq(before[:, 1:] - before[:, :-1], 1)
    number = g.cumsum(g.cast(breaks, "int64"), axis=1)
    batch = g.gen_index(g.broadcast(g.constant(0, dtype="int32"), (2,)), axis=0)
    picked = g.gather(number, g.binary_select(batch + 2, batch, batch < 0), axis=0)
    return g.cmp_eq(picked.reshape(2, 1, 24, 1), picked.reshape(2, 1, 1, 24)) & causal(g)


def window(g: fg.Graph) -> fg.Tensor:
    return causal(g) & (positions(g, 24, 3) > positions(g, 24, 2) - 5)


def always(g: fg.Graph) -> fg.Tensor:
    return g.broadcast(positions(g, 24, 2) >= 0, (2, 1, 24, 24))


@pytest.mark.parametrize(
    ("mask", "bounds"),
    [
        (always, set()),
        (causal, {Bound(1, -1, 0)}),
        (repeated, {Bound(1, -1, 0)}),
        (one_sequence, {Bound(1, -1, 0)}),
        (window, {Bound(1, -1, 0), Bound(-1, 1, 4)}),
    ],
)
def test_masks_of_positions_are_bounds(mask: Callable[[fg.Graph], fg.Tensor], bounds: set[Bound]) -> None:
    spec = spec_of(mask)
    assert (set(spec.bounds), spec.ranges, spec.loads) == (bounds, (), ())
    assert not spec.inside.instructions


def test_padding_beside_positions_is_read() -> None:
    def padded(g: fg.Graph) -> fg.Tensor:
        kept = g.tensor("kept", (2, 24), "bool")
        taken = g.gather(kept, positions(g, 24, 3).reshape(24), axis=1)
        return causal(g) & g.broadcast(taken.reshape(2, 1, 1, 24), (2, 1, 24, 24))

    spec = spec_of(padded)
    assert spec.bounds == (Bound(1, -1, 0),)
    assert [op.name for op in spec.loads] == ["kept"] or len(spec.loads) == 1
    assert spec.loads[0].strides[-2] == 0  # one number a key


def test_gathering_in_order_is_a_slice() -> None:
    g = fg.Graph("embedding", io_dtype="float32")
    table = g.tensor("table", (32, 8))
    g.output(g.gather(table, positions(g, 24, 3).reshape(1, 24) + 2, axis=0) * 2.0)
    (kernel,) = plan(g).kernels
    assert "gather" not in {n.op.name for n in kernel.group.nodes}
    value = np.arange(256, dtype=np.float32).reshape(32, 8)
    np.testing.assert_array_equal(g.compile(engine="cpu")(value), 2 * value[None, 2:26])
