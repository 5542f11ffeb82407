"""Gathers at known positions that are a few runs are slices, one after the other: rolled tensors and the like.

Where each position is taken as often, they are repeated: tensors enlarged to the nearest element.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegraph as fg
from codegen import render
from codegen.pointwise.schedule import PointwiseSchedule
from fusegraph.passes.index_runs import MOST_RUNS
from fusegraph.plan import plan


def rolled(size: int, by: int, axis: int = 1, dtype: str = "float32") -> fg.Graph:
    """Returns a graph of torch.roll as it is written out: positions, a sum, a remainder."""
    graph = fg.Graph("rolled", io_dtype=dtype)
    shape = (3, size) if axis == 1 else (size, 5)
    x = graph.tensor("x", shape)
    places = graph.gen_index(graph.broadcast(graph.constant(0), (size,)), axis=0)
    graph.output(graph.relu(graph.gather(x, graph.mod(places + (size - by), size), axis)), name="y")
    return graph


def gathered(places: list[int], size: int) -> fg.Graph:
    graph = fg.Graph("gathered")
    x = graph.tensor("x", (2, size))
    graph.output(graph.gather(x, graph.constant(np.array(places, np.int64)), 1), name="y")
    return graph


def ops(graph: fg.Graph) -> list[str]:
    return [n.op.name for n in plan(graph).simplified.nodes]


@pytest.mark.parametrize("axis", [0, 1])
def test_rolls_are_slices(axis: int) -> None:
    graph = rolled(16, 5, axis)
    assert "gather" not in ops(graph)
    x = np.random.default_rng(0).standard_normal(graph.inputs[0].shape).astype(np.float32)
    y = fg.compile(graph, engine="cpu")(x)
    assert np.array_equal(y, np.maximum(np.roll(x, 5, axis), 0))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_the_runs_are(data: st.DataObject) -> None:
    """Within the tensor or not, forwards, backwards or repeated: the elements are those that NumPy takes."""
    size = data.draw(st.integers(1, 12))
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=9))
    if data.draw(st.booleans()):
        places = [*range(size // 2, size), *range(size // 2)]
    graph = gathered(places, size)
    x = np.random.default_rng(size).standard_normal((2, size)).astype(np.float32)
    y = fg.compile(graph, engine="cpu")(x)
    assert np.array_equal(y, x[:, places])
    runs = 1 + int((np.diff(places) != 1).sum())
    assert runs > MOST_RUNS or "gather" not in ops(graph)


def enlarged(shape: tuple[int, ...], times: tuple[int, int], dtype: str, **layout: str) -> fg.Graph:
    """Returns a graph of an image enlarged by gathers, with something behind it."""
    graph = fg.Graph("enlarged")
    y = graph.tensor("x", shape, dtype, **layout)  # type: ignore[arg-type]
    for axis, many in zip((2, 3), times):
        y = graph.gather(y, graph.constant(np.arange(shape[axis] * many) // many), axis)
    graph.output(graph.neg(y) + y * 3 if y.dtype.is_float else y + y, name="y")
    return graph


def _check_enlarged(shape: tuple[int, ...], times: tuple[int, int], dtype: str, **layout: str) -> None:
    graph = enlarged(shape, times, dtype, **layout)
    assert "gather" not in ops(graph)
    x = np.random.default_rng(0).integers(-50, 50, shape).astype(dtype)
    if "layout" in layout:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    y = fg.compile(graph, engine="cpu")(x)
    assert np.array_equal(y, x.repeat(times[0], 2).repeat(times[1], 3) * 2)


def test_nearest_elements_are_repeated() -> None:
    _check_enlarged((1, 3, 5, 8), (2, 2), "float32")
    _check_enlarged((1, 8, 5, 7), (2, 3), "float16", layout="NHWC")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int8", "int64"])
@pytest.mark.parametrize("times", [(2, 2), (1, 4), (3, 8), (2, 3), (1, 16)])
def test_nearest_elements_of_every_kind(dtype: str, times: tuple[int, int]) -> None:
    for shape in ((2, 3, 5, 8), (1, 2, 3, 6), (1, 2, 1, 1), (2, 1, 4, 16)):
        _check_enlarged(shape, times, dtype)


def test_repeated_elements_are_read_once() -> None:
    (kernel,) = plan(enlarged((1, 240, 112, 112), (2, 2), "bfloat16")).kernels
    assert isinstance(kernel.choice.schedule, PointwiseSchedule)
    assert kernel.choice.schedule.vector == 8
    assert "load<4>" in render(kernel.group.lowered.spec, kernel.choice.schedule).code


def test_positions_that_are_data_or_outside_are_gathered() -> None:
    graph = fg.Graph("data")
    graph.output(graph.gather(graph.tensor("x", (2, 8)), graph.tensor("index", (8,), "int64"), 1))
    assert "gather" in ops(graph)
    assert "gather" in ops(gathered([6, 7, 8, 9], 8))
    graph = fg.Graph("varying")
    x = graph.tensor("x", (2, fg.Dim("n", min=1, max=16)))
    graph.output(graph.gather(x, graph.constant(np.arange(4)), 1), name="y")
    at = fg.compile(graph, engine="cpu")
    for size in (3, 7):
        given = np.arange(2 * size, dtype=np.float32).reshape(2, size)
        assert np.array_equal(at(given), given[:, np.minimum(np.arange(4), size - 1)])


def test_positions_that_follow_from_floats_are_gathered() -> None:
    """What rounds in float32 need not round so when it is looked at before a graph runs."""
    graph = fg.Graph("floats")
    x = graph.tensor("x", (3, 8))
    line = graph.gen_index(graph.broadcast(graph.constant(0), (8,)), axis=0)
    places = graph.cast(graph.floor(graph.cast(line, "float32") * 0.9), "int64")
    graph.output(graph.gather(x, places, 1))
    assert "gather" in ops(graph)
