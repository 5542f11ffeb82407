"""Scatters: against a loop that puts one update after the other, on the CPU in two orders of threads, for GPUs."""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import check_all, check_on_gpu, compile_for, executables, quick, share, undecided_share

import fusegraph as fg
from fusegraph.dtypes import ALL, as_dtype
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, random_inputs, run

Array = np.ndarray[Any, Any]
REDUCTIONS = ("none", "add", "mul", "max", "min", "mean")
#: x, updates, index, axis: slices alike and not, parts of x, more updates than places, fewer, few, one, rank 1.
SHAPES = (
    ((5, 7, 4), (5, 9, 4), (5, 9, 4), 1),
    ((5, 7, 4), (3, 9, 2), (3, 9, 2), 1),
    ((40, 6), (9, 6), (9, 1), 0),
    ((4, 50), (3, 12), (1, 12), 1),
    ((6, 3, 5), (6, 3, 7), (6, 1, 7), 2),
    ((3, 8), (3, 4), (3, 4), 1),
    ((13,), (1,), (1,), 0),
    ((9,), (300,), (300,), 0),
    ((1, 1), (1, 31), (1, 31), -1),
)


def graph_of(
    shapes: tuple[Any, ...], reduction: str, include_self: bool = True, dtype: str = "float32", index: str = "int64"
) -> fg.Graph:
    x, updates, places, axis = shapes
    g = fg.Graph(f"scatter {reduction} {dtype}")
    operands = g.tensor("x", x, dtype), g.tensor("index", places, index), g.tensor("updates", updates, dtype)
    g.output(g.scatter(*operands, axis, reduction, include_self), name="y")
    return g


def inputs_of(graph: fg.Graph, seed: int = 0, special: float = 0.0) -> dict[str, Array]:
    """Returns inputs with few different indices, so that most occur several times; some are out of range."""
    given = random_inputs(graph, seed, special=special)
    (node,) = graph.nodes
    size = node.inputs[0].shape[node.attributes["axis"]]
    places = np.random.default_rng(seed).integers(-1, size + 1, given["index"].shape)
    given["index"] = np.clip(places, *(np.iinfo(given["index"].dtype).min, 127)).astype(given["index"].dtype)
    return given


def one_by_one(x: Array, index: Array, updates: Array, axis: int, reduction: str, include_self: bool) -> Array:
    """Scatters by definition: updates are applied in order, in float64."""
    y = x.astype(np.float64 if x.dtype.kind not in "iub" else x.dtype)
    met = np.zeros(x.shape, np.int64)
    index = np.broadcast_to(index, updates.shape)
    for place in np.ndindex(*updates.shape):
        to = list(place)
        to[axis] = int(index[place])
        if not 0 <= to[axis] < x.shape[axis]:
            continue
        at, value = tuple(to), y.dtype.type(updates[place])
        met[at] += 1
        if reduction == "none" or (met[at] == 1 and not include_self):
            y[at] = value
        elif reduction in ("add", "mean"):
            y[at] = y[at] | value if y.dtype == bool else y[at] + value
        elif reduction == "mul":
            y[at] = y[at] & value if y.dtype == bool else y[at] * value
        else:
            y[at] = (np.maximum if reduction == "max" else np.minimum)(y[at], value)
    return y / np.maximum(met + include_self, 1) if reduction == "mean" else y


def check_against_the_loop(graphs: list[fg.Graph], special: float = 0.0) -> None:
    for graph, made in zip(graphs, executables(graphs)):
        (node,) = graph.nodes
        given = inputs_of(graph, 3, special if graph.outputs[0].dtype.is_float else 0.0)
        found = run(made, given)
        result = check_executable(made, given, outputs=found)
        assert result.ok, f"{node.attributes}: {result}"
        assert undecided_share([result], [graph]) <= 0.3, node.attributes
        with np.errstate(all="ignore"):
            expected = one_by_one(*given.values(), **node.attributes)
        if found["y"].dtype.kind in "iub":
            np.testing.assert_array_equal(found["y"], expected)
            continue
        dtype = graph.outputs[0].dtype
        near = {"rtol": 64 * dtype.unit_roundoff, "atol": 64 * dtype.unit_roundoff}
        with np.errstate(all="ignore"):
            expected = expected.astype(dtype.numpy).astype(np.float64)
        seen = found["y"].astype(np.float64)
        if dtype.itemsize == 1:  # what saturates there is NaN or infinite in NumPy
            seen, expected = (np.clip(np.nan_to_num(v, nan=1.0), dtype.min, dtype.max) for v in (seen, expected))
        np.testing.assert_allclose(seen, expected, **near)


def takes(dtype: str, reduction: str) -> bool:
    return reduction != "mean" or as_dtype(dtype).is_float


@pytest.mark.parametrize("dtype", quick("int32", "float32"))
def test_against_a_loop(dtype: str) -> None:
    shapes = itertools.cycle(SHAPES)
    every = [(r, i) for r in REDUCTIONS if takes(dtype, r) for i in (True, False) for _ in range(2)]
    check_against_the_loop([graph_of(next(shapes), r, i, dtype) for r, i in every])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [d.name for d in ALL])
def test_every_dtype(dtype: str) -> None:
    cases = ((SHAPES[1], True), (SHAPES[3], False), (SHAPES[5], True))
    check_against_the_loop([graph_of(s, r, i, dtype) for r in REDUCTIONS if takes(dtype, r) for s, i in cases])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_nan_infinity_and_extremes(dtype: str) -> None:
    graphs = [graph_of(SHAPES[n], r, i, dtype) for r in REDUCTIONS for n, i in ((0, True), (2, False))]
    check_all(graphs, inputs=lambda g: inputs_of(g, 5, 0.2))


def test_extremes_of_large_unsigned_numbers() -> None:
    x, index = np.array([2**63 + 5, 7, 0], np.uint64), np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    updates = np.array([2**64 - 1, 3, 2**63, 2**63, 9, 1, 5, 2**63 + 1, 4], np.uint64)
    for reduction, combine in (("max", np.maximum), ("min", np.minimum)):
        g = graph_of(((3,), (9,), (9,), 0), reduction, True, "uint64")
        expected = x.copy()
        combine.at(expected, index, updates)
        np.testing.assert_array_equal(g.compile("cpu")(x, index, updates), expected)


def test_what_sums_of_specials_are() -> None:
    g = graph_of(((8,), (12,), (12,), 0), "add")
    inf, nan, big = np.inf, np.nan, np.finfo(np.float32).max
    index = np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 5, 6])
    updates = np.array([inf, inf, inf, -inf, nan, 1, -inf, 7, 1e-45, big, big, -0.0], np.float32)
    found = g.compile("cpu")(np.zeros(8, np.float32), index, updates)
    np.testing.assert_array_equal(found, np.array([inf, nan, nan, -inf, 1e-45, inf, 0, 0], np.float32))


def test_sums_are_those_of_all_digits() -> None:
    """Where terms cancel nothing is lost but what lies far below the last digit of the largest."""
    g = graph_of(((4,), (10,), (10,), 0), "add")
    updates = np.array([1e30, 3, -1e30, 5, 2.0**60, 1, -(2.0**60), 1e-8, 1, -1], np.float32)
    found = g.compile("cpu")(np.zeros(4, np.float32), np.array([0, 1, 0, 1, 2, 1, 2, 3, 3, 3]), updates)
    np.testing.assert_array_equal(found, np.array([0, 9, 0, 1e-8], np.float32))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_many_updates_of_one_place(reduction: str) -> None:
    """Threads, and what each of them does, are linear in updates and places."""
    count = 1 << 20
    g = graph_of(((70,), (count,), (count,), 0), reduction)
    made = g.compile("cpu")
    x, index = np.ones(70, np.float32), np.full(count, 69)
    updates = np.exp(np.random.default_rng(0).normal(size=count) * 1e-3).astype(np.float32)
    wide = updates.astype(np.float64)
    expected = {
        "none": wide[-1], "add": wide.sum() + 1, "mul": wide.prod(), "max": wide.max(), "min": wide.min(),
        "mean": (wide.sum() + 1) / (count + 1),
    }[reduction]  # fmt: skip
    found = made(x, index, updates)
    np.testing.assert_allclose(found, [1.0] * 69 + [expected], rtol=2e-6 if reduction != "mul" else 1e-3)
    assert made.plan is not None
    for kernel in made.plan.kernels:
        assert prod(kernel.source.grid) * prod(kernel.source.block) <= count + 256


def test_what_memory_it_takes() -> None:
    """A large table with few updates needs no integers for all of it, but one number a row."""
    g = graph_of(((1 << 16, 64), (10, 64), (10, 1), 0), "add")
    assert plan(g).memory.size < 4 * (1 << 16) + (1 << 16)


def test_a_prologue_is_part_of_the_kernels() -> None:
    g = fg.Graph("front")
    x, index, w = g.tensor("x", (50, 8)), g.tensor("index", (90,), "int32"), g.tensor("w", (8, 90))
    g.output(g.relu(g.scatter(x, g.reshape(index + 1, (90, 1)), g.exp(g.transpose(w)), 0, "max")), name="y")
    assert [k.group.family for k in plan(g).kernels] == ["scatter", "pointwise"]
    check_all([g], inputs=lambda g: {**random_inputs(g), "index": np.arange(90, dtype=np.int32) % 60 - 2})
    check_all([g], fusion=False)


def test_an_index_that_is_repeated_and_used_twice() -> None:
    """Why groups are kernels of their own is known from when they were not merged, not from where views lie then."""
    g = fg.Graph("repeated")
    rows = g.reshape(g.broadcast(g.tensor("index", (6, 1), "int64"), (6, 12)), (72, 1))
    count = g.scatter(g.broadcast(g.constant(0), (9, 1)), rows, g.broadcast(g.constant(1), (72, 1)), 0, "add")
    values = g.tensor("values", (72, 5)) / g.cast(g.gather(g.reshape(count, (-1,)), rows[:, 0]), "float32").reshape(
        (72, 1)
    )
    chosen = g.binary_select(-1, rows, g.cmp_eq(rows, 2))
    g.output(g.scatter(g.broadcast(g.constant(0.0), (9, 5)), chosen, values, 0, "add"), name="y")
    check_all([g], inputs=lambda g: {**random_inputs(g), "index": np.array([[3], [2], [3], [8], [0], [2]])})


@pytest.mark.slow
def test_strict_single_kernels_and_double() -> None:
    graphs = [graph_of(SHAPES[n], r, True, "bfloat16") for r in REDUCTIONS for n in (0, 2)]
    check_all(graphs, inputs=inputs_of, strict=True)
    check_all(graphs, inputs=inputs_of, fusion=False)
    wide = fg.Graph("wide", compute_dtype="float64")
    operands = wide.tensor("x", (7, 4)), wide.tensor("index", (20, 1), "int8"), wide.tensor("updates", (20, 4))
    wide.output(wide.scatter(*operands, 0, "add"), name="y")
    check_all([wide], inputs=inputs_of)


@pytest.mark.parametrize("index", ["int8", "uint8", "int32"])
def test_narrow_indices(index: str) -> None:
    check_all([graph_of(((200, 3), (50, 3), (50, 3), 0), "add", index=index)], inputs=inputs_of)


def test_constants_are_folded_to_the_same() -> None:
    """The NumPy meaning of what a scatter is written as, which constants are folded with, is that of the kernels."""
    rng, cases = np.random.default_rng(0), []
    for reduction, dtype in itertools.product(("add", "max", "min", "none"), ("float32", "float64", "int32")):
        arrays = [rng.integers(-9, 9, (9, 4)).astype(dtype), rng.integers(-1, 10, (30, 4))]
        arrays.append(rng.integers(-9, 9, (30, 4)).astype(dtype) / (1 if dtype == "int32" else 7))
        arrays[2] = arrays[2].astype(dtype)
        folded = fg.Graph("folded")
        x = folded.tensor("x", (9, 4), dtype)
        folded.output(folded.scatter(x, folded.constant(arrays[1]), folded.constant(arrays[2]), 0, reduction))
        cases.append((folded, graph_of(((9, 4), (30, 4), (30, 4), 0), reduction, True, dtype), arrays))
    made = executables([g for folded, whole, _ in cases for g in (folded, whole)])
    for folded, whole, (_, _, arrays) in zip(made[::2], made[1::2], cases):
        np.testing.assert_array_equal(folded(arrays[0]), whole(*arrays))


@pytest.mark.parametrize(
    "shapes", [((0, 3), (4, 3), (4, 3), 0), ((5, 3), (0, 3), (0, 3), 0), ((5, 0), (2, 0), (2, 0), 0)]
)
def test_nothing_to_do(shapes: tuple[Any, ...]) -> None:
    check_all([graph_of(shapes, r) for r in ("none", "add")])


def test_scatter_nd() -> None:
    rng = np.random.default_rng(0)
    x, index, updates = rng.normal(size=(4, 5, 6)), rng.integers(-1, 5, (30, 2)), rng.normal(size=(30, 6))
    g = fg.Graph("nd")
    tensors = [g.tensor(n, a.shape, a.dtype) for n, a in (("x", x), ("index", index), ("updates", updates))]
    g.output(g.scatter_nd(*tensors), name="put")
    g.output(g.scatter_nd(*tensors, "add"), name="sum")
    put, total = x.copy(), x.copy()
    for (i, j), row in zip(index, updates):
        if 0 <= i < 4 and 0 <= j < 5:
            put[i, j] = row
            total[i, j] += row
    found = g.compile("cpu")(x, index, updates)
    np.testing.assert_array_equal(found[0], put)
    np.testing.assert_allclose(found[1], total, rtol=1e-14)


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda g, x, i, u: g.scatter(x, i, u, 2), AttributeValueError, "axis 2 is not one of the 2 axes"),
        (lambda g, x, i, u: g.scatter(x, i, u, 0, "sum"), AttributeValueError, "reduction is 'none', 'add'"),
        (lambda g, x, i, u: g.scatter(x, i, u, 0, "add", 1), AttributeValueError, "include_self is True or False"),
        (lambda g, x, i, u: g.scatter(x, u, u), DTypeError, "index holds integers, got float32"),
        (lambda g, x, i, u: g.scatter(x, i, g.cast(u, "float64")), DTypeError, "updates have the dtype of x"),
        (lambda g, x, i, u: g.scatter(i, i, i, 0, "mean"), DTypeError, "the mean of int64 is not exact"),
        (lambda g, x, i, u: g.scatter(x, i[:4], u), ShapeError, "dimension 0 of index has 4 elements"),
        (lambda g, x, i, u: g.scatter(x[:, :2], i, u), ShapeError, "dimension 1 of updates has 3 elements, more than"),
        (lambda g, x, i, u: g.scatter(x, i[0], u), ShapeError, "have one rank"),
        (lambda g, x, i, u: g.scatter_nd(x, u, u), DTypeError, "index holds integers"),
        (lambda g, x, i, u: g.scatter_nd(x, i, u), ShapeError, "has no positions along the dimensions"),
        (lambda g, x, i, u: g.scatter_nd(x, i[:, :1], u[:4]), ShapeError, "updates are"),
    ],
)
def test_refused(build: Any, error: type[Exception], text: str) -> None:
    g = fg.Graph("refused")
    x, index, updates = g.tensor("x", (5, 3)), g.tensor("i", (6, 3), "int64"), g.tensor("u", (6, 3))
    with pytest.raises(error, match=text):
        build(g, x, index, updates)


def test_golden_source() -> None:
    kernels = plan(graph_of(((100, 64), (1000, 64), (1000, 1), 0), "add")).kernels
    check_golden("scatter", "\n".join(k.source.code for k in kernels))


def gpu_graphs() -> list[fg.Graph]:
    return [
        graph_of(SHAPES[n], r, i, d) for r in REDUCTIONS for n, i, d in ((0, True, "float32"), (3, False, "float64"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_compiles_for_gpus(arch: str) -> None:
    assert [k.name for k in compile_for(arch, share(arch, gpu_graphs())) if k.spill_bytes] == []


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    check_on_gpu(gpu_graphs(), inputs=inputs_of)
