"""Assignments to inputs: what they mean, in which order kernels run, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from graphs import quick, slow
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegraph as fg
from fusegraph.dtypes import BY_NAME
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.engines.reference import apply
from fusegraph.errors import ArgumentError, DTypeError, GraphError, LayoutError, NotSupportedError, ShapeError
from fusegraph.layout import extent
from fusegraph.lowering.base import Options
from fusegraph.ops.base import Kind
from fusegraph.plan import Plan, plan
from fusegraph.report.check import check, check_executable, random_inputs
from fusegraph.runtime.targets import named

Array = np.ndarray[Any, Any]


def kernels(graph: fg.Graph) -> list[tuple[str, list[str]]]:
    """Returns the family of each kernel, and the memory that it writes."""
    return [(k.group.family, [t.base.name for t in k.group.writes]) for k in plan(graph).kernels]


def agrees(graph: fg.Graph, **options: Any) -> None:
    for fusion in (True, False):
        result = check(graph, "cpu", fusion=fusion, **options)
        assert result.ok, result


# ---- a sequential interpreter, and one of memory


class Script:
    """Statements that are built into a graph, and run by NumPy one after the other."""

    def __init__(self, pick: Callable[[int], int]) -> None:
        self.pick, self.graph = pick, fg.Graph("script", io_dtype="int32")
        self.shape = (4, 6)
        rng = np.random.default_rng(pick(100))
        self.inputs = {n: rng.integers(-9, 10, self.shape).astype(np.int32) for n in "abc"}
        self.inputs["p"], self.inputs["i"] = np.asarray(pick(9) - 2, np.int32), rng.integers(-1, 7, 3).astype(np.int32)
        self.tensors = {n: self.graph.tensor(n, x.shape, "int32") for n, x in self.inputs.items()}
        self.state = {n: x.copy() for n, x in self.inputs.items()}
        #: tensors of the full shape, and their values
        self.known = [(self.tensors[n], self.inputs[n].copy()) for n in "abc"]
        self.assigned: list[int] = []
        for _ in range(2 + pick(5)):
            (self.compute, self.assign, self.assign)[pick(3)]()
        for n in dict.fromkeys((pick(len(self.known)), pick(len(self.known)))):
            self.graph.output(self.graph.identity(self.known[n][0]), name=f"y{n}")
            self.assigned.append(n)

    def any(self) -> tuple[fg.Tensor, Array]:
        return self.known[-1 - self.pick(min(len(self.known), 4))]

    def compute(self) -> None:
        (a, x), (b, y) = self.any(), self.any()
        g = self.graph
        self.known.append(
            (
                lambda: (a + b, x + y),
                lambda: (g.transpose(g.reshape(a * 2 - b, (6, 4))), (x * 2 - y).reshape(6, 4).T),
                lambda: (
                    a + g.reduction(b, mode="add", axes=1, keepdims=True),
                    x + y.sum(1, keepdims=True, dtype=np.int32),
                ),
                lambda: (g.concatenate([a[2:], b[:2]], axis=0), np.concatenate([x[2:], y[:2]])),
                lambda: (a[::-1] * 3, x[::-1] * 3),
            )[self.pick(5)]()
        )

    def assign(self) -> None:
        name = "abc"[self.pick(3)]
        x, state, (value, array) = self.tensors[name], self.state[name], self.any()
        p, i = self.inputs["p"], self.inputs["i"]
        how = self.pick(6)
        target, source = (
            lambda: (x, value),
            lambda: (x[1:3], value[:2]),
            lambda: (x[:, ::2], value[:, 3:]),
            lambda: (x[::-1, 2], value[:, 0]),
            lambda: (x[:, self.tensors["p"]], value[:, 1]),
            lambda: (x[:, self.tensors["i"]], value[:, :3]),
        )[how]()
        new = self.graph.assign(target, source)
        if how == 4 and 0 <= p < 6:
            state[:, p] = array[:, 1]
        elif how == 5:
            for k, place in enumerate(i):
                if 0 <= place < 6:
                    state[:, place] = array[:, k]
        elif how < 4:
            where: Any = ((), slice(1, 3), (slice(None), slice(None, None, 2)), (slice(None, None, -1), 2))[how]
            state[where] = (array, array[:2], array[:, 3:], array[:, 0])[how]
        self.known.append((new, state.copy()))

    def expected(self) -> dict[str, Array]:
        updates = {new.name: self.state[x.name] for new, x in self.graph.updates.items()}
        return updates | {f"y{n}": self.known[n][1] for n in self.assigned}


def simulated(made: Plan, inputs: dict[str, Array]) -> dict[str, Array]:
    """Runs the groups of a plan one after the other in memory: each reads, computes in NumPy, and writes."""
    memory: dict[fg.Tensor, Array] = {}
    graph = made.simplified
    if made.packing is not None:
        inputs = inputs | simulated(made.packing, inputs)

    def places(t: fg.Tensor) -> Array:
        """Returns where a tensor's elements lie in its base's memory, -1 where nobody writes them."""
        size = extent(t.base.shape, t.base.strides)
        memory.setdefault(t.base, np.full(size, 77, t.dtype.numpy))
        steps = [np.arange(n) * s for n, s in zip(t.shape, t.strides)]
        found = np.asarray(t.start + sum(np.ix_(*steps)) if steps else t.start)
        if t.position is not None:
            at = int(memory[t.position.index.base][places(t.position.index)].reshape(-1)[0])
            found = found + at * t.position.step if 0 <= at < t.position.size else found * 0 - 1
        return found

    for tensor in graph.tensors.values():
        if tensor.value is not None:
            memory[tensor] = np.ascontiguousarray(tensor.value).reshape(-1)
        elif tensor in graph.inputs:
            where = places(tensor)
            memory[tensor][where] = inputs[tensor.name]
    for group in made.partition.groups:
        if group.family == "view":
            continue
        values: dict[fg.Tensor, Array] = {}
        for node in group.nodes:
            operands = [values[t] if t in values else memory[t.base][places(t)] for t in node.inputs if [places(t)]]
            values[node.output] = apply(node, operands)
        for t in (n.output for n in group.nodes if n.output in group.writes or n.kind is Kind.ASSIGN):
            where = places(t)
            value = np.broadcast_to(values[t], t.shape)
            memory[t.base][where[where >= 0]] = value[where >= 0]
    return {t.name: memory[t.base][places(t)] for t in graph.outputs}


def planned(graph: fg.Graph) -> Plan | None:
    """Returns the plan of a graph, None if a node takes both the old and the new value of a region."""
    try:
        return plan(graph)
    except GraphError as error:
        if "takes what" not in str(error):
            raise
        return None


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_kernels_keep_the_order_of_statements(data: st.DataObject) -> None:
    script = Script(lambda n: data.draw(st.integers(0, n - 1)))
    made = planned(script.graph)
    if made is None:
        return
    found = simulated(made, script.inputs)
    for name, array in script.expected().items():
        np.testing.assert_array_equal(found[name], array, name)


def test_what_kernels_compute_is_what_statements_say() -> None:
    draw = random.Random(1)
    runs: list[tuple[Script, CpuExecutable]] = []
    while len(runs) < 12:
        script = Script(draw.randrange)
        if planned(script.graph) is not None:
            runs.append((script, CpuExecutable(script.graph, Options(), lazy=True)))
    build_together([executable for _, executable in runs])
    for script, executable in runs:
        result = check_executable(executable, script.inputs)
        assert result.ok, result
        given = {n: x.copy() for n, x in script.inputs.items()}
        executable(**given)
        for new, x in script.graph.updates.items():
            np.testing.assert_array_equal(given[x.name], script.expected()[new.name])


# ---- the builder's forms


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", ["float32", "bool", "float8_e4m3", *quick("uint64", "float16", "bfloat16", "float64", "int8")]
)
def test_every_dtype(dtype: str) -> None:
    g = fg.Graph("dtypes", io_dtype=dtype)
    x, v = g.tensor("x", (5, 7)), g.tensor("v", (2, 7))
    i, p = g.tensor("i", (3,), "int64"), g.tensor("p", (), "int32")
    g.assign(x[1:3], v)
    g.assign(x[:, i], v[1, :3])
    g.output(g.assign(x[p], g.identity(v[0])), name="y")
    assert BY_NAME[dtype] == x.dtype
    agrees(g)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 3, 4), (1, 2, 6)), ((0, 4), (4, 1)), *slow(((1,), (1,)), ((3, 1), (4, 9)), ((2, 3), (8, 2)))],
)
def test_strides_one_element_and_none(shape: Sequence[int], strides: Sequence[int]) -> None:
    g = fg.Graph("strides")
    x, v, i = g.tensor("x", shape, strides=strides), g.tensor("v", shape), g.tensor("i", (2,), "int32")
    g.assign(x[:1], g.relu(v[:1]))
    g.assign(x[..., 0], g.reduction(v, mode="max", axes=-1, keepdims=False) if 0 not in shape else 1.0)
    g.assign(g.gather(x, i, axis=len(shape) - 1), 2.5)
    agrees(g)


def test_numbers_arrays_and_nothing() -> None:
    g = fg.Graph("numbers")
    x, i = g.tensor("x", (4, 3)), g.tensor("i", (0,), "int32")
    g.assign(x[0], 1.5)
    g.assign(x[1:1], 9.0)
    g.assign(x[i], 9.0)
    g.assign(x[2:, None], np.arange(3, dtype=np.float32))
    executable = g.compile("cpu")
    array = np.zeros((4, 3), np.float32)
    assert executable(array, np.zeros(0, np.int32)) == ()
    np.testing.assert_array_equal(array, [[1.5] * 3, [0] * 3, [0, 1, 2], [0, 1, 2]])


def test_results_may_lie_in_inputs() -> None:
    g = fg.Graph("returned")
    x, v = g.tensor("x", (4,)), g.tensor("v", (4,))
    g.output(x * 2.0, name="before")
    g.output(g.assign(x, x + v), name="after")
    for engine in ("cpu", "reference"):
        array = np.arange(4, dtype=np.float32)
        before, after = g.compile(engine)(array, np.ones(4, np.float32))
        assert after is array
        np.testing.assert_array_equal(before, [0, 2, 4, 6])
        np.testing.assert_array_equal(after, [1, 2, 3, 4])
        out = np.zeros(4, np.float32)
        assert g.compile(engine)(array, np.ones(4, np.float32), out=out)[0] is out


def test_the_last_of_several_values_stays() -> None:
    g = fg.Graph("again")
    x, v, i = g.tensor("x", (6,)), g.tensor("v", (8,)), g.tensor("i", (8,), "int32")
    g.assign(x[i], v)
    array = np.zeros(6, np.float32)
    g.compile("cpu")(array, np.arange(8, dtype=np.float32), np.array([1, 1, 7, -1, 0, 3, 1, 3], np.int32))
    np.testing.assert_array_equal(array, [4, 6, 0, 7, 0, 0])


# ---- who writes


def test_makers_write_where_values_belong() -> None:
    g = fg.Graph("makers")
    x, a, b = g.tensor("x", (6, 64)), g.tensor("a", (4, 32)), g.tensor("b", (32, 64))
    g.assign(x[2:], a @ b)
    assert kernels(g) == [("contraction", ["x"])]
    g = fg.Graph("rows")
    x, a = g.tensor("x", (8, 2)), g.tensor("a", (8, 32))
    g.assign(x[:, 1], g.reduction(a, mode="add", axes=1, keepdims=False))
    assert kernels(g) == [("rows", ["x"])]
    g = fg.Graph("position")
    x, a, b, p = g.tensor("x", (9, 4, 64)), g.tensor("a", (4, 32)), g.tensor("b", (32, 64)), g.tensor("p", (), "int32")
    g.output(g.reduction(g.assign(x[p], a @ b), mode="add", axes=0), name="y")
    assert kernels(g) == [("contraction", ["x"]), ("rows", ["y"])]
    agrees(g)


def test_products_by_tensor_cores_store_at_a_position() -> None:
    g = fg.Graph("heads", io_dtype="bfloat16")
    x, w, cache = g.tensor("x", (1, 128)), g.tensor("w", (128, 128)), g.tensor("cache", (2, 9, 64))
    at = g.tensor("at", (), "int64")
    heads = g.reshape(x @ g.transpose(w), (2, 64))
    g.output(g.reduction(g.assign(cache[:, at], heads), mode="max", axes=1), name="y")
    made = plan(g, Options(target=named("h200")))
    assert [k.group.family for k in made.kernels] == ["contraction", "rows"]
    inputs = random_inputs(g)
    for place in (0, 8, -1, 9):
        result = check(g, "cpu", {**inputs, "at": np.asarray(place)}, target="h200")
        assert result.ok, result


def test_one_kernel_stores_at_one_position_of_several_inputs() -> None:
    g = fg.Graph("caches")
    x, keys, values = g.tensor("x", (2, 64)), g.tensor("keys", (2, 9, 64)), g.tensor("values", (2, 5, 64))
    at, other = g.tensor("at", (), "int64"), g.tensor("other", (), "int64")
    made = [g.assign(keys[:, at], g.tanh(x)), g.assign(values[:, 0], g.exp(x)), g.assign(keys[:, other], g.sin(x))]
    g.output(g.reduction(made[-1], mode="max", axes=1), name="y")
    agrees(g)
    g = fg.Graph("caches")
    x, keys, values = g.tensor("x", (2, 64)), g.tensor("keys", (2, 9, 64)), g.tensor("values", (1, 9, 2, 64))
    at = g.tensor("at", (), "int64")
    y = g.assign(keys[:, at], g.tanh(x)), g.assign(values[0, at], g.exp(x))
    g.output(g.reduction(y[0], mode="max", axes=1), name="y")
    assert kernels(g)[0] == ("pointwise", ["keys", "values"])
    inputs = random_inputs(g)
    for place in (0, 8, -1, 9):
        result = check(g, "cpu", {**inputs, "at": np.asarray(place)})
        assert result.ok, result


def test_optimizers_are_one_kernel() -> None:
    g = fg.Graph("momentum")
    w, m, d = (g.tensor(n, (100,)) for n in "wmd")
    g.assign(w, w - g.assign(m, m * 0.9 + d) * 0.1)
    assert kernels(g) == [("pointwise", ["m", "w"])]
    agrees(g)


def test_scatters_and_joins_become_assignments() -> None:
    g = fg.Graph("scatter")
    x, v, i = g.tensor("x", (9, 64)), g.tensor("v", (1, 64)), g.tensor("i", (1,), "int64")
    new = g.scatter(x, g.reshape(i, (1, 1)), g.relu(v), 0)
    g.assign(x, new)
    g.output(g.reduction(new, mode="add", axes=0), name="y")
    assert kernels(g) == [("pointwise", ["x"]), ("rows", ["y"])]
    agrees(g)
    g = fg.Graph("join")
    x, v = g.tensor("x", (9, 64)), g.tensor("v", (2, 60))
    row = x[3:5]
    g.assign(x, g.concatenate([x[:3], g.concatenate([row[:, :4], g.relu(v)], axis=1), x[5:]], axis=0))
    assert kernels(g) == [("pointwise", ["x"])]
    agrees(g)
    g = fg.Graph("read", io_dtype="float32")  # the old value is needed beside the new one
    x, v = g.tensor("x", (9, 64)), g.tensor("v", (2, 64))
    new = g.concatenate([x[:3], g.relu(v), x[5:]], axis=0)
    g.assign(x, new)
    g.output(g.reduction(x * new, mode="add", axes=1), name="y")
    agrees(g)


def test_what_cannot_be_written_in_place_is_copied_first() -> None:
    g = fg.Graph("matmul")
    x, w = g.tensor("x", (64, 64)), g.tensor("w", (64, 64))
    g.assign(x, x @ w)
    made = [writes for _, writes in kernels(g)]
    assert made[-1] == ["x"]
    assert len(made) == 2
    (decision,) = [d for d in plan(g).partition.decisions if d.consumer == "assign" and not d.fused]
    assert "its values are copied: the kernel reads elements of 'x' in other threads" in decision.reason
    agrees(g)
    g = fg.Graph("transpose")
    x = g.tensor("x", (33, 33))
    g.assign(x, g.transpose(x))
    agrees(g)
    g = fg.Graph("softmax")
    x = g.tensor("x", (7, 3000))
    g.assign(x, g.softmax(x, axis=-1))
    agrees(g)


def test_plans_are_kept(tmp_path: Any) -> None:
    from fusegraph.engines.plans import planner
    from fusegraph.runtime.cache import DiskCache

    cache = DiskCache(tmp_path)
    made = []
    for _ in range(2):
        g = fg.Graph("kept")
        x, p, v = g.tensor("x", (9, 64)), g.tensor("p", (), "int32"), g.tensor("v", (64,))
        g.assign(x[p], g.relu(v))
        made.append(planner(True, None, cache, "test")(g, Options()))
    first, second = ([(t.base.name, t.start, t.position is None) for k in m.kernels for t in k.arguments] for m in made)
    assert first == second
    assert made[0].kernels[0].source == made[1].kernels[0].source


# ---- what is refused


def test_refusals() -> None:
    g = fg.Graph("refused")
    x, f, i = g.tensor("x", (4, 6)), g.tensor("f", (4, 6), "float16"), g.tensor("i", (2,), "int32")
    wide, packed = g.tensor("wide", (4, 6), strides=(0, 1)), g.tensor("packed", (8,), "int4")
    new = g.assign(x, 0.0)
    g.assign(x[0], 1.0)
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: g.assign(g.relu(x), 0.0), GraphError, "no input of the graph"),
        (lambda: g.assign(g.constant([1.0, 2.0]), 0.0), GraphError, "no input of the graph"),
        (lambda: g.assign(new[0], 0.0), GraphError, "has been overwritten; assign to 'x'"),
        (lambda: g.assign(x, f), DTypeError, "'x' is float32, the value float16"),
        (lambda: g.assign(x, g.tensor("v", (5,))), ShapeError, "broadcast"),
        (lambda: g.assign(wide, 0.0), LayoutError, "share an address"),
        (lambda: g.assign(packed, 1), DTypeError, "share bytes"),
        (lambda: g.assign(g.tensor("small", (4,), "int8"), 300, name="new"), DTypeError, "'new'.*300 .* int8.*-128 to"),
        (lambda: g.assign(g.tensor("whole", (2,), "int32"), np.array([1, np.nan])), DTypeError, "nan does not fit"),
        (lambda: g.assign(x.reshape(24), 0.0), GraphError, "its own shape"),
        (lambda: g.assign(x[1:, :][i], 0.0), GraphError, "along an axis that is sliced"),
        (lambda: g.assign(x[i][:1], 0.0), GraphError, "slice the index"),
        (lambda: g.assign(g.gather(x[i], i, axis=1), 0.0), GraphError, "one axis may have one index"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()
    g = fg.Graph("twice")
    x = g.tensor("x", (4,))
    g.output(g.assign(x, 0.0), name="y")
    with pytest.raises(GraphError, match="return the last value"):
        g.assign(x, 1.0)


def test_old_and_new_values_of_a_region() -> None:
    g = fg.Graph("both")
    x, v = g.tensor("x", (4, 6)), g.tensor("v", (6,))
    new = g.assign(x[1], v)
    g.output(x * new, name="y")
    with pytest.raises(GraphError, match="'y' takes what 'x' is before 'assign' overwrites it"):
        plan(g)


def test_arrays_that_share_memory() -> None:
    g = fg.Graph("shared")
    x, y = g.tensor("x", (4,)), g.tensor("y", (4,))
    g.assign(x, x + y)
    z = g.output(y * 2.0, name="z")
    assert z in g.results
    executable = g.compile("cpu")
    memory = np.arange(8, dtype=np.float32)
    with pytest.raises(ArgumentError, match=r"input 'y' .* overlaps input 'x'"):
        executable(memory[:4], memory[2:6])
    with pytest.raises(ArgumentError, match=r"output 'z' .* overlaps input 'x'"):
        executable(memory[:4], memory[4:], out=memory[:4])
    with pytest.raises(ArgumentError, match=r"input 'y' .* overlaps input 'x'"):
        g.compile("reference")(memory[:4], memory[:4])
    fixed = np.zeros(4, np.float32)
    fixed.setflags(write=False)
    with pytest.raises(ArgumentError, match="read-only, and calls write to it"):
        executable(fixed, memory[4:])
    executable(memory[:4], memory[4:])
    np.testing.assert_array_equal(memory[:4], [4, 6, 8, 10])


def _prefix(g: fg.Graph, x: fg.Tensor, v: fg.Tensor, rows: Any) -> Any:
    g.assign(x[:, :rows], g.relu(v))
    return lambda x, v, i: x.__setitem__((slice(None), slice(0, v.shape[1])), v)


def _positions(g: fg.Graph, x: fg.Tensor, v: fg.Tensor, rows: Any) -> Any:
    g.assign(x[:, g.tensor("i", (rows,), "int64")], g.relu(v))
    return lambda x, v, i: x.__setitem__((slice(None), i), v)


def _place(g: fg.Graph, x: fg.Tensor, v: fg.Tensor, rows: Any) -> Any:
    g.assign(x[:, g.tensor("i", (), "int64")], g.relu(v)[:, 0])
    return lambda x, v, i: x.__setitem__((slice(None), i), v[:, 0])


@pytest.mark.parametrize("how", [_prefix, _positions, _place])
def test_sizes_that_vary(how: Any) -> None:
    """Regions of caches whose batch and length vary, at as many positions as the call says."""
    g = fg.Graph("varying")
    batch, length, rows = fg.Dim("batch", min=1, max=40), fg.Dim("length", min=16, max=300), fg.Dim("rows", max=16)
    x, v = g.tensor("x", (batch, length, 8)), g.tensor("v", (batch, rows, 8))
    expected = how(g, x, v, rows)
    executable = g.compile("cpu")
    rng = np.random.default_rng(0)
    for n, size, count in ((3, 16, 5), (1, 300, 16), (40, 17, 1)):
        cache, values = (rng.standard_normal(shape).astype(np.float32) for shape in ((n, size, 8), (n, count, 8)))
        at = rng.permutation(size)[:count] if how is _positions else np.asarray(size - 1)
        wanted = cache.copy()
        expected(wanted, np.maximum(values, 0), at)
        executable(cache, values, *([at] if "i" in g.tensors else []))
        np.testing.assert_array_equal(cache, wanted)


def test_checks_leave_arrays_alone() -> None:
    g = fg.Graph("alone")
    x = g.tensor("x", (4,))
    g.assign(x, x + 1.0)
    inputs = random_inputs(g)
    before = inputs["x"].copy()
    assert check(g, "cpu", inputs).ok
    assert check(g, "reference", inputs).ok
    np.testing.assert_array_equal(inputs["x"], before)
    with pytest.raises(NotSupportedError, match="cuDNN"):
        g.compile("cudnn")


def test_parts_that_are_copied_are_read_before_they_are_written() -> None:
    g = fg.Graph("g")
    x, y = g.tensor("x", (4, 5)), g.tensor("y", (4, 5))
    g.assign(x[:2], g.identity(y[2:]))
    g.assign(y[:2], g.identity(x[2:]))
    a, b = np.random.default_rng(0).random((2, 4, 5), np.float32)
    old = a.copy(), b.copy()
    g.compile("cpu")(a, b)
    np.testing.assert_array_equal(a[:2], old[1][2:])
    np.testing.assert_array_equal(b[:2], old[0][2:])
