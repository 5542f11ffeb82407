"""Sorting: on the CPU against NumPy's stable argsort, fused with what surrounds it, and compiled for GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import check_all, check_on_gpu, compile_for, executables, quick_dtypes, share
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import check_cases

import fusegraph as fg
from codegen import schedules
from codegen.sort import SortSchedule, longest
from fusegraph import dtypes as dt
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.lowering.base import Options
from fusegraph.lowering.sort import longest_row
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, random_inputs, run

Array = np.ndarray[Any, Any]


def sort_of(
    shape: tuple[int, ...], axis: int = -1, dtype: str = "float32", descending: bool = False, **how: Any
) -> fg.Graph:
    """Builds a sort's values and indices."""
    g = fg.Graph(f"sort {shape} {axis} {dtype}")
    x = g.tensor("x", shape, dtype, **how)
    g.output(g.sort(x, axis, descending), name="values")
    g.output(g.sort_index(x, axis, descending, dtype="int64"), name="index")
    return g


def topk_of(shape: tuple[int, ...], k: int, axis: int = -1, dtype: str = "float32", largest: bool = True) -> fg.Graph:
    g = fg.Graph(f"topk {shape} {k} {axis} {dtype}")
    x = g.tensor("x", shape, dtype)
    g.output(g.topk(x, k, axis, largest), name="values")
    g.output(g.topk_index(x, k, axis, largest), name="index")
    return g


def around(dtype: str, axis: int, k: int | None = None) -> fg.Graph:
    """Sorts with pointwise nodes before and after, one operand per row, both kinds of index, and the operand read again
    if it fits.
    """
    g = fg.Graph("around", io_dtype=dtype)
    x, weight, row = g.tensor("x", (6, 72)), g.tensor("weight", (72,)), g.tensor("row", (6, 1))
    h = g.abs(x * weight + row) - g.cast(g.gen_index(x, axis=1), "float32") / 16
    if k is None:
        values, index = g.sort(h, axis), g.sort_index(h, axis)
        values = values + x
    else:
        values, index = g.topk(h, k, axis), g.topk_index(h, k, axis)
    g.output(values * 2.0 + g.gen_index(values, axis=axis), name="y")
    g.output(index + 1, name="index")
    return g


def special(graph: fg.Graph) -> dict[str, Array]:
    """Returns inputs with few different values, signed zeros and non-finite values, so that most elements occur several
    times.
    """
    rng, found = np.random.default_rng(len(graph.name)), random_inputs(graph)
    for t in graph.inputs:
        some = np.array([-3, -1, -0.0, 0.0, 1, 2], np.float64)
        if t.dtype.is_float:
            some = np.append(some, [np.nan, 100, -100] if t.dtype.name == "float8_e4m3" else [np.nan, np.inf, -np.inf])
        else:
            some = np.append(np.abs(some), [float(t.dtype.min) / 2, float(t.dtype.max) // 2])
        with np.errstate(invalid="ignore"):
            found[t.name][...] = rng.choice(some, t.shape).astype(t.dtype.numpy)
    return found


def bits(x: Array) -> Array:
    """Returns numbers that tell signed zeros apart, and NaN from all others."""
    if x.dtype.kind in "iub":
        return x
    wide = x.astype(np.float64)
    return np.where(np.isnan(wide), 7.5, np.where(wide == 0, np.copysign(0.25, wide), wide))


def expected(x: Array, axis: int, descending: bool, keep: int) -> tuple[Array, Array]:
    """Returns the sorted elements and their positions by Python's stable sort, independently of the op's reference."""

    def key(value: Any) -> tuple[bool, Any]:
        missing = bool(value != value)
        return missing, 0 if missing else value + 0

    rows = np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])
    index = np.zeros((len(rows), keep), np.int64)
    for n, row in enumerate(rows.astype(np.float64 if x.dtype.kind not in "iub" else x.dtype).tolist()):
        index[n] = sorted(range(len(row)), key=lambda i, row=row: key(row[i]), reverse=descending)[:keep]
    values = np.take_along_axis(rows, index, -1)
    shape = (*np.moveaxis(x, axis, -1).shape[:-1], keep)
    return tuple(np.moveaxis(a.reshape(shape), -1, axis) for a in (values, index))  # type: ignore[return-value]


def check_bits(graph: fg.Graph, made: CpuExecutable, axis: int, descending: bool, keep: int) -> None:
    inputs = special(graph)
    found = run(made, inputs)
    values, index = expected(inputs["x"], axis, descending, keep)
    np.testing.assert_array_equal(found["index"], index, err_msg=graph.name)
    np.testing.assert_array_equal(bits(found["values"]), bits(values), err_msg=graph.name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", quick_dtypes(dt.ALL, "float32", "float8_e4m3", "int64", "bool"))
def test_every_dtype_bit_by_bit(dtype: dt.DType) -> None:
    """NaN behind (or in front), zeros of both signs and all that is equal in the order in which it was."""
    long = longest_row(dtype, fg.Graph("any")) + 5
    whole = [(sort_of((3, 77), 1, dtype.name, d), d, 77) for d in (False, True)]
    whole += [(sort_of((long,), 0, dtype.name, d), d, long) for d in (False, True)]
    first = [(topk_of((5, 40), 3, 1, dtype.name, d), d, 3) for d in (False, True)]
    cases = whole + first + [(topk_of((long,), 7, 0, dtype.name), True, 7)]
    for (graph, descending, keep), made in zip(cases, executables([g for g, *_ in cases])):
        check_bits(graph, made, graph.inputs[0].rank - 1, descending, keep)


def test_sizes() -> None:
    """Nothing, one, two, ragged, powers of two, what one block takes and more; few rows and many."""
    most = longest("float")
    lengths = [0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 64, 100, 256, 257, 1000, 2049, most]
    check_all([sort_of((3, n), 1) for n in lengths] + [sort_of((0, 4), 1), sort_of((1,), 0), sort_of((700, 5), 1)])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_sizes_of_long_rows(rows: int) -> None:
    most = longest("float")
    lengths = [most + 1, 2 * most, 2 * most + 1, 3 * most - 1, 5 * most + 100]
    check_all([sort_of((rows, n), 1, descending=d) for n in lengths for d in (False, True)])
    check_all([sort_of((n, rows), 0, "float64") for n in lengths])


@pytest.mark.slow
def test_the_first_of_long_rows() -> None:
    """Few are selected of runs and again of what is left; many are merged, no more of them than are kept."""
    most = longest("float")
    counts = [1, 10, most // 4, most // 4 + 1, most - 1, most + 1, 3 * most - 1, 3 * most]
    graphs = [topk_of((2, 3 * most), k, 1) for k in counts]
    graphs += [topk_of((40 * most,), 700, 0), topk_of((3 * most, 3), 9, 0, "int64", False)]
    check_all(graphs)
    assert [k.group.family for k in plan(graphs[1]).kernels] == ["sort"] * 2
    check_all(graphs[3:6], inputs=special)


def test_axes_and_layouts() -> None:
    shape = (3, 4, 5, 16)
    graphs = [sort_of(shape, a, "bfloat16", layout=layout) for a in range(4) for layout in ("NCHW", "NHWC")]
    graphs += [sort_of(shape, a, "float32", strides=(640, 80, 0, 2)) for a in (2, 3)]
    graphs += [topk_of(shape, 2, a) for a in range(4)]
    check_all(graphs, inputs=special)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_graph(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    dtype, descending = data.draw(st.sampled_from(dt.ALL)), data.draw(st.booleans())
    keep = data.draw(st.integers(1, shape[axis]))
    graph = topk_of(shape, keep, axis, dtype.name, descending)
    (made,) = executables([graph])
    check_bits(graph, made, axis, descending, keep)


# ---- fusion


def test_one_kernel_with_what_surrounds_it() -> None:
    graphs = [around("float32", 1), around("bfloat16", 0), around("float32", 1, 5), around("float32", 0, 2)]
    for g in graphs:
        (kernel,) = plan(g).kernels
        assert kernel.group.family == "sort"
    check_all(graphs)


@pytest.mark.slow
def test_strict_and_single_kernels() -> None:
    graphs = [around(d, a, k) for d in ("float32", "bfloat16") for a in (0, 1) for k in (None, 3)]
    graphs += [topk_of((2, 9000), 5), sort_of((9000,), 0)]
    check_all(graphs, strict=True)
    check_all(graphs, fusion=False)


def test_two_orders_are_two_kernels() -> None:
    g = fg.Graph("two")
    x = g.tensor("x", (4, 40))
    g.output(g.sort(x), name="up")
    g.output(g.sort(x, descending=True), name="down")
    g.output(g.sort(g.sort(x, 0), 1), name="both")
    g.output(g.reduction(g.topk(x, 3), "add", 1), name="sum")
    assert sorted(k.group.family for k in plan(g).kernels) == ["rows", "sort", "sort", "sort", "sort", "sort"]
    check_all([g])


def test_what_is_sorted_may_be_needed_in_memory() -> None:
    g = fg.Graph("needed")
    x = g.tensor("x", (4, 40))
    h = g.output(g.relu(x) + 1.0, name="h")
    g.output(g.topk(h, 3), name="first")
    g.output(g.sort(h), name="sorted")
    check_all([g])


def test_only_the_shape_is_asked_for() -> None:
    g = fg.Graph("shape")
    g.output(g.gen_index(g.topk(g.tensor("x", (4, 40)), 3), axis=1), name="y")
    assert [k.group.family for k in plan(g).kernels] == ["pointwise"]
    check_all([g])


def test_constants_and_single_numbers() -> None:
    g = fg.Graph("constants")
    g.output(g.sort(g.constant(np.array([3.0, 1, 2], np.float32)), name="y"))
    g.output(g.sort_index(g.broadcast(g.constant(1.0), (2, 300))), name="z")
    check_all([g])


@pytest.mark.slow
def test_every_schedule_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the cost model and others, and offsets of 64 bits: what each kernel of a graph gets."""
    chosen: list[tuple[fg.Graph, list[SortSchedule]]] = []
    for graph in (around("float32", 1), sort_of((5, 600), 1), sort_of((70, 40), 0, "int64"), topk_of((3, 17), 4, 1)):
        (kernel,) = plan(graph).kernels
        spec = kernel.group.lowered.spec
        lanes = 1 << (spec.run - 1).bit_length()
        others = [SortSchedule(n, max(1, lanes // n), i) for n in (1, 4, 8, 16) for i in ("uint32", "uint64")]
        chosen += [(graph, [schedule]) for schedule in (*schedules(spec), *others)]
    for graph in (sort_of((2, 9000), 1), topk_of((9000, 2), 5, 0)):
        chosen.append((graph, [replace(k.choice.schedule, itype="uint64") for k in plan(graph).kernels]))
    made = []
    for graph, each in chosen:
        left = iter(each)
        monkeypatch.setattr("fusegraph.plan.best_schedule", lambda *_, left=left: next(left))
        made.append(CpuExecutable(graph, Options(), lazy=True))
    build_together(made)
    for executable in made:
        result = check_executable(executable, random_inputs(executable.graph))
        assert result.ok, f"{executable.plan.kernels[0].choice.schedule}: {result}"


def test_nothing_outside_is_touched() -> None:
    """Arrays between inaccessible pages: ragged rows, blocks with rows to spare, runs, merges, what is selected."""
    graphs = [sort_of((5, 7), 1), sort_of((9, 300), 1, "float64"), topk_of((3, 4, 5), 2, 1), around("bfloat16", 1, 3)]
    check_cases([*graphs, sort_of((2, 9001), 1, "int8"), topk_of((2, 9001), 11, 1)], guard=True)


@pytest.mark.parametrize(
    ("op", "how", "error", "text"),
    [
        ("sort", {"axis": 2}, AttributeValueError, "axis 2 is not one of the 2 axes"),
        ("sort", {"axis": (0,)}, AttributeValueError, "axis is an integer"),
        ("sort", {"descending": 1}, AttributeValueError, "descending is True or False"),
        ("sort_index", {"dtype": "uint8"}, DTypeError, "positions are int32 or int64"),
        ("topk", {"k": 5}, AttributeValueError, "k is from 0 to the 4 elements"),
        ("topk", {"k": -1}, AttributeValueError, "k is from 0 to the 4 elements"),
        ("topk", {"k": 1.5}, AttributeValueError, "k is an integer"),
        ("topk_index", {"k": 1, "largest": None}, AttributeValueError, "largest is True or False"),
    ],
)
def test_refused(op: str, how: dict[str, Any], error: type[Exception], text: str) -> None:
    g = fg.Graph("refused")
    with pytest.raises(error, match=text):
        getattr(g, op)(g.tensor("x", (3, 4)), **how)


# ---- binary search


def search_of(count: int, shared: bool, right: bool, dtype: str, other: str | None = None) -> fg.Graph:
    g = fg.Graph(f"search {count} {shared} {right} {dtype} {other}")
    sequence = g.tensor("sequence", (count,) if shared else (3, count), dtype)
    g.output(g.searchsorted(sequence, g.tensor("values", (3, 7), other or dtype), right, "int64"), name="y")
    return g


def searched(sequence: Array, values: Array, right: bool) -> Array:
    wide = np.float64 if sequence.dtype.kind not in "iub" else sequence.dtype
    rows = np.broadcast_to(sequence.astype(wide), (len(values), sequence.shape[-1]))
    side: Any = "right" if right else "left"
    return np.stack([np.searchsorted(a, v.astype(wide), side) for a, v in zip(rows, values)])


@pytest.mark.parametrize("dtype", quick_dtypes(dt.ALL, "float32", "float8_e4m3", "int64", "bool"))
def test_searchsorted_is_numpys(dtype: dt.DType) -> None:
    """Equal elements, values below, between and above all, NaN among both; rows of any length."""
    lengths = [1, 2, 3, 4, 7, 8, 31] if dtype.name == "float32" else []
    ways = [(100, True, False), (3, False, True), *((n, n % 2 == 0, n % 3 > 0) for n in lengths)]
    graphs = [search_of(*way, dtype.name) for way in ways]
    for graph, made in zip(graphs, executables(graphs)):
        assert len(made.plan.kernels) == 1, graph.name
        inputs = special(graph)
        inputs["sequence"] = np.sort(inputs["sequence"].astype(np.float64), -1).astype(dtype.numpy)
        right = graph.name.split()[3] == "True"
        expected = searched(inputs["sequence"], inputs["values"], right)
        np.testing.assert_array_equal(run(made, inputs)["y"], expected, err_msg=graph.name)


def test_searchsorted_at_the_edges() -> None:
    g = fg.Graph("edges")
    x, none = g.tensor("x", (4,), "int32"), g.tensor("none", (0,), "int32")
    g.output(g.searchsorted(none, x), name="of nothing")
    g.output(g.searchsorted(x, none), name="for nothing")

    def inputs(graph: fg.Graph) -> dict[str, Array]:
        return {k: np.sort(v) if k == "sequence" else v for k, v in random_inputs(graph).items()}

    check_all([g, search_of(100_000, True, False, "float32", "int32")], inputs=inputs)
    with pytest.raises(ShapeError, match="are neither one nor those of values"):
        g.searchsorted(g.tensor("rows", (2, 4)), g.tensor("values", (3, 4)))
    with pytest.raises(DTypeError, match="positions are int32 or int64"):
        g.searchsorted(x, x, dtype="float32")


# ---- code


def test_golden_sources() -> None:
    (kernel,) = plan(topk_of((64, 1000), 10, 1, "bfloat16")).kernels
    check_golden("topk", kernel.source.code)
    merging = plan(sort_of((64, 10000), 1)).kernels[1]
    check_golden("merged_runs", merging.source.code)


def gpu_graphs() -> list[fg.Graph]:
    graphs = [sort_of((64, n), 1, d, r) for n in (5, 100, 10000) for d in ("float32", "int64") for r in (False, True)]
    graphs += [sort_of((1000, 64), 0, "float64"), topk_of((64, 50000), 40), topk_of((64, 50000), 3000, 1, "float16")]
    return [*graphs, *(around("bfloat16", a, k) for a in (0, 1) for k in (None, 4))]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_compiles_for_gpus(arch: str) -> None:
    assert [k.name for k in compile_for(arch, share(arch, gpu_graphs())) if k.spill_bytes] == []


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    check_on_gpu(gpu_graphs())
