"""Random products with weights of few bits: storage, layout, groups, zero points and sizes, against NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from graphs import executables
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import fusegraph as fg
from codegen.target import target
from fusegraph import dtypes as dt
from fusegraph.lowering.base import Options
from fusegraph.plan import plan

#: Numbers that are stored as what they are.
PLAIN = ("int8", "uint8", "int4", "uint4", "int2", "uint2", "float8_e4m3", "float8_e5m2", "float4_e2m1")
#: Words that have several numbers, each of some bits.
WORDS = ("uint8 4", "uint8 2", "int8 4", "int32 4", "int32 8", "uint16 4")
ROWS = (1, 2, 7, 16, 17, 40, 130)
#: Plans are for as many at least.
MOST_ROWS, MACHINES = (1, 1, 1024, 5000), ("h200", "sm_80", "sm_120")


@dataclass(frozen=True)
class Case:
    """A product of (rows, terms) with a weight (columns, terms), or ``across``: (terms, columns).

    stored   a dtype, or a dtype of words and the bits of each number in them.
    inner    words have numbers of the last dimension, else of the first.
    beside   the numbers of a word lie side by side, else one whole part behind the other.
    low      the lowest bits come first.
    grid     how many scales there are for the columns and for the terms: each divides the size.
    zeros    the dtype of zero points, and whether there is one for each scale or one for each column; "" for none.
    narrow   zero points and scales are applied in the dtype of the product.
    behind   the product is multiplied by the scales of columns.
    """

    stored: str
    rows: int
    columns: int
    terms: int
    across: bool
    inner: bool
    beside: bool
    low: bool
    grid: tuple[int, int]
    zeros: str
    every: bool
    narrow: bool
    behind: bool
    io: str
    seed: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.terms, self.columns) if self.across else (self.columns, self.terms)

    def turned(self, grid: tuple[int, int]) -> tuple[int, int]:
        return grid[::-1] if self.across else grid

    @property
    def bits(self) -> int:
        word, _, bits = self.stored.partition(" ")
        return int(bits) if bits else dt.BY_NAME[word].bits

    @property
    def each(self) -> int:
        """How many numbers a word has; 1 where they are stored as what they are."""
        word, _, bits = self.stored.partition(" ")
        return dt.BY_NAME[word].bits // int(bits) if bits else 1

    @property
    def regular(self) -> bool:
        """Whether positions are sums of positions: no byte has numbers of two rows, or of two groups."""
        if self.each == 1:
            return self.shape[1] // self.turned(self.grid)[1] * self.bits % 8 == 0
        axis = int(self.inner)
        size, group = self.shape[axis], self.shape[axis] // self.turned(self.grid)[axis]
        part = self.each if self.beside else size // self.each
        return group % part == 0 or (part % group == 0 and not self.beside)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    stored, across, inner = draw(st.sampled_from(PLAIN + WORDS)), draw(st.booleans()), draw(st.booleans())
    word, _, bits = stored.partition(" ")
    each = dt.BY_NAME[word].bits // int(bits) if bits else 1
    group = draw(st.sampled_from([4, 8, 12, 16, 32, 64]))
    terms, columns = group * draw(st.integers(1, 5)), draw(st.integers(1, 70))
    if each > 1 and inner == across:  # the columns are in words
        columns = each * -(-columns // each)
    elif each > 1:
        terms = np.lcm(terms, each).item()
    grid = (
        draw(st.sampled_from([n for n in (1, 2, columns // 4, columns) if n and columns % n == 0])),
        draw(st.sampled_from([1, 1, terms // group, terms // group, terms])),
    )
    zeros = draw(st.sampled_from(["", "", "uint8", "int8", "float32"]))
    behind = grid[1] == 1 and not zeros and draw(st.booleans())
    return Case(
        stored, draw(st.sampled_from(ROWS)), columns, terms, across, inner, draw(st.booleans()), draw(st.booleans()),
        grid, zeros, draw(st.booleans()), draw(st.booleans()), behind,
        draw(st.sampled_from(["bfloat16", "float16", "float32"])), draw(st.integers(0, 99)),
    )  # fmt: skip


def numbers_of(case: Case) -> Any:
    """Returns the numbers of a weight, in its shape."""
    rng = np.random.default_rng(case.seed)
    kind = dt.BY_NAME[case.stored] if case.each == 1 else None
    if kind is not None and kind.is_float:
        return rng.normal(0, 1, case.shape).astype(np.float32).astype(kind.numpy)
    if kind is not None:
        return rng.integers(int(kind.min), int(kind.max), case.shape, endpoint=True).astype(kind.numpy)
    return rng.integers(0, 2**case.bits, case.shape)


def words_of(case: Case, numbers: Any) -> Any:
    """Returns the words that have some numbers, in the order that a case says."""
    axis, kind = int(case.inner), dt.BY_NAME[case.stored.split()[0]]
    count = case.shape[axis] // case.each
    found = np.zeros([count if d == axis else n for d, n in enumerate(case.shape)], np.uint64)
    for k in range(case.each):
        places = np.arange(count) * case.each + k if case.beside else np.arange(count) + k * count
        shift = k if case.low else case.each - 1 - k
        found |= np.take(numbers, places, axis).astype(np.uint64) << np.uint64(shift * case.bits)
    return found.astype(f"u{kind.itemsize}").view(kind.numpy)


def unpacked(case: Case, g: fg.Graph, w: fg.Tensor) -> fg.Tensor:
    """Writes the numbers in words as programs do: masks and shifts of each, joined."""
    axis, parts = int(case.inner), []
    for k in range(case.each):
        shift = (k if case.low else case.each - 1 - k) * case.bits
        parts.append(g.bitwise_and(g.shift_right(w, shift) if shift else w, 2**case.bits - 1))
    if case.beside:
        parts = [g.unsqueeze(part, axis + 1) for part in parts]
    return g.reshape(g.concatenate(*parts, axis=axis + case.beside), case.shape)


def built(case: Case) -> fg.Graph:
    g = fg.Graph("fuzz", case.io)
    x = g.tensor("x", (case.rows, case.terms))
    kind = case.stored.split()[0]
    shape = case.shape if case.each == 1 else words_of(case, np.zeros(case.shape, np.int64)).shape
    w = g.tensor("w", shape, kind, parameter=True)
    q = w if case.each == 1 else unpacked(case, g, w)
    s = g.tensor("s", case.turned(case.grid), parameter=True)
    zero = case.turned(case.grid if case.every else (case.grid[0], 1))
    z = g.tensor("z", zero, case.zeros, parameter=True) if case.zeros else None
    if case.behind:
        made = g.cast(q, case.io)
    elif not case.narrow:
        made = g.dequantize(q, s, z)
    else:
        fine = [p for n, c in zip(case.shape, case.turned(case.grid)) for p in (c, n // c)]
        made = g.reshape(g.cast(q, case.io), fine)
        if z is not None:
            made = made - g.cast(z.reshape([p for c in zero for p in (c, 1)]), case.io)
        made = (made * s.reshape([p for c in case.turned(case.grid) for p in (c, 1)])).reshape(case.shape)
    y = x @ (made if case.across else made.T)
    if case.behind:
        wide = g.broadcast(s.reshape((case.grid[0], 1)), (case.grid[0], case.columns // case.grid[0]))
        y = y * wide.reshape((case.columns,))
    g.output(y, name="y")
    return g


def spread(numbers: Any, shape: tuple[int, int]) -> Any:
    wide = numbers.astype(np.float64)
    for d, size in enumerate(shape):
        wide = np.repeat(wide, size // wide.shape[d], d)
    return wide


def fed(case: Case) -> tuple[dict[str, Any], Any, Any]:
    """Returns the inputs, the result in float64, and what its error is relative to."""
    rng, io = np.random.default_rng(case.seed + 1), dt.BY_NAME[case.io].numpy
    q = numbers_of(case)
    given = {"x": rng.normal(size=(case.rows, case.terms)).astype(io), "w": q if case.each == 1 else words_of(case, q)}
    given["s"] = (rng.random(case.turned(case.grid)) / 8 + 0.01).astype(io)
    less = np.zeros((1, 1))
    if case.zeros:
        less = rng.integers(0, 2**case.bits // 2, case.turned(case.grid if case.every else (case.grid[0], 1)))
        given["z"] = less = less.astype(case.zeros)
    wide, s, z = q.astype(np.float64), spread(given["s"], case.shape), spread(less, case.shape)
    w, largest = (wide - z) * s, (np.abs(wide) + np.abs(z)) * s
    x = given["x"].astype(np.float64)
    turned = [m if case.across else m.T for m in (w, largest)]
    return given, x @ turned[0], np.abs(x) @ turned[1]


def check(every: list[Case]) -> None:
    for case, executable in zip(every, executables([built(case) for case in every])):
        given, expected, largest = fed(case)
        found = np.asarray(executable(*(given[t.name] for t in executable.graph.inputs))).astype(np.float64)
        unit = dt.BY_NAME[case.io].unit_roundoff
        wrong = np.abs(found - expected) > 6 * unit * largest + 2 * unit * np.abs(expected) + 1e-5 * largest
        assert not wrong.any(), (case, np.argwhere(wrong)[:4])


def check_plan(case: Case, machine: str) -> None:
    """Checks that no more of a weight lies in memory than what is stored, on a GPU."""
    graph = built(case)
    made = plan(graph, Options(target=target(machine)))
    inner = [t for k in made.kernels for t in k.group.writes if t.name != "y" and t.shape[-2:] == case.shape]
    packed = sum(t.nbytes for t in made.packing.graph.outputs) if made.packing is not None else 0
    stored = sum(t.nbytes for t in graph.parameters)
    if case.regular and stored < case.columns * case.terms * graph.io_dtype.itemsize:
        assert inner == [], case
        assert packed <= 4 * (np.prod(case.grid) + case.columns + case.terms), (case, packed)


HOW = settings(deadline=None, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck))


def test_halves_of_short_rows() -> None:
    """Terms of the first half are in the low bits, so that a piece of the other operand is in another order."""
    every = [
        Case("uint8 4", rows, 32, terms, False, True, False, True, (8, 1), "", False, True, True, io, 20)
        for rows, terms, io in ((7, 16, "bfloat16"), (1, 32, "float16"), (3, 48, "bfloat16"))
    ]
    check(every)


def test_weights_of_one_row_in_float32_stay_as_they_are_stored() -> None:
    case = Case("int4", 1, 63, 128, False, False, False, False, (1, 1), "", False, True, False, "float32", 32)
    for machine in MACHINES:
        check_plan(case, machine)


def test_rows_of_one_word() -> None:
    case = Case("int32 4", 7, 23, 8, True, False, False, False, (23, 1), "uint8", False, True, False, "float16", 64)
    check([case])
    for machine in MACHINES:
        check_plan(case, machine)


@pytest.mark.slow
@settings(HOW, max_examples=2)
@given(st.lists(cases(), min_size=8, max_size=8))
def test_random_weights(every: list[Case]) -> None:
    check(every)


@pytest.mark.slow
@settings(HOW, max_examples=5)
@given(st.lists(cases(), min_size=12, max_size=12))
def test_many_random_weights(every: list[Case]) -> None:
    check(every)


@settings(HOW, max_examples=25)
@given(cases(), st.sampled_from(MOST_ROWS), st.sampled_from(MACHINES))
def test_random_weights_stay_as_they_are_stored(case: Case, most: int, machine: str) -> None:
    check_plan(replace(case, rows=max(case.rows, most)), machine)


@pytest.mark.slow
@settings(HOW, max_examples=40)
@given(cases(), st.sampled_from(MOST_ROWS), st.sampled_from(MACHINES))
def test_many_random_weights_stay_as_they_are_stored(case: Case, most: int, machine: str) -> None:
    check_plan(replace(case, rows=max(case.rows, most)), machine)
