"""Outputs beside and over other arguments: memory that interleaves, and results in the memory of an input."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
from graphs import quick
from recipes import seeded

import fusegraph as fg
from codegen import schedules, target
from codegen.pointwise import schedule as pointwise_schedule
from codegen.pointwise import tiling as pointwise_tiling
from codegen.pointwise import unaligned as pointwise_unaligned
from codegen.rows.schedule import RowsSchedule
from codegen.spec import ContractionSpec, PointwiseSpec, RowsSpec
from fusegraph.engines import in_place
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.engines.in_place import Pairs, refusal, shared
from fusegraph.errors import ArgumentError
from fusegraph.layout import same_strides
from fusegraph.lowering.base import Options
from fusegraph.plan import Choice, by_cost_model, plan
from fusegraph.report.check import random_inputs
from fusegraph.runtime import host_compiler, nvrtc, strides
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.strides import share_memory

Array = np.ndarray[Any, Any]
ORDERS = get_args(host_compiler.Order)


# ---- whether two arrays have a byte in common


def touched(pattern: strides.Pattern, start: int) -> set[int]:
    """Returns the addresses of all bytes of an array, computed one by one."""
    shape, steps, itemsize = pattern
    places = (sum(i * s for i, s in zip(index, steps)) for index in product(*map(range, shape)))
    return {start + place * itemsize + byte for place in places for byte in range(itemsize)}


def test_memory_is_shared_if_a_byte_is() -> None:
    draw, found = random.Random(0), Counter[bool]()
    for _ in range(1500):
        patterns = []
        for _ in range(2):
            rank = draw.randint(0, 4)
            shape = tuple(draw.choice((1, 2, 3, 4, 0) if draw.random() < 0.1 else (1, 2, 3, 5)) for _ in range(rank))
            patterns.append((shape, tuple(draw.randint(0, 14) for _ in range(rank)), draw.choice((1, 2, 4, 8))))
        apart = draw.randint(-80, 80)
        first, second = patterns
        expected = bool(touched(first, apart) & touched(second, 0))
        assert share_memory(first, second, apart) is expected, (first, second, apart)
        found[expected] += 1
    assert min(found.values()) > 300


def test_what_takes_too_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    g = fg.Graph("hard")
    x = g.tensor("x", (3, 3, 3, 3), strides=(1009, 307, 97, 29))
    y = g.output(g.relu(x), name="y", strides=(1013, 311, 101, 31))
    memory = np.zeros(9000, np.float32)
    source, result = (
        np.lib.stride_tricks.as_strided(memory[k:], (3,) * 4, [4 * s for s in t.strides]) for k, t in ((0, x), (1, y))
    )
    executable = g.compile("cpu")
    monkeypatch.setattr(strides, "MOST_WORK", 1)
    with pytest.raises(ArgumentError, match=r"output 'y' .* overlaps input 'x' .* takes too long to find out.*1013"):
        executable(source, out=result)


# ---- arrays that interleave


def halves() -> CpuExecutable:
    g = fg.Graph("halves")
    a, b = g.tensor("a", (6, 4), strides=(12, 1)), g.tensor("b", (6, 4), strides=(12, 1))
    g.output(a + b, name="y", strides=(12, 1))
    g.output(a - b, name="z", strides=(12, 1))
    executable = g.compile("cpu")
    assert isinstance(executable, CpuExecutable)
    return executable


def test_arguments_that_interleave() -> None:
    """The gradients of packed queries, keys and values; halves of the rows of a buffer; outputs between inputs."""
    executable = halves()
    buffer = np.arange(6 * 24, dtype=np.float32).reshape(12, 12)[::2]  # strides of two rows are another graph's
    buffer = np.ascontiguousarray(buffer)
    a, b = np.arange(72, dtype=np.float32).reshape(6, 12)[:, :4], buffer[:, 4:8]
    total, difference = a + b, a - b
    executable(a, b, out=(buffer[:, :4], buffer[:, 8:]))
    np.testing.assert_array_equal(buffer[:, :4], total)
    np.testing.assert_array_equal(buffer[:, 8:], difference)
    for wrong in ((buffer[:, 1:5], buffer[:, 8:]), (buffer[:, 8:], buffer[:, 7:11]), (buffer[:, :4], buffer[:, :4])):
        with pytest.raises(ArgumentError, match=r"overlaps (input 'b'|output 'y')"):
            executable(a, b, out=wrong)


# ---- outputs that are inputs


def graph_of(build: Callable[..., Any], *shapes: Sequence[int], dtype: str = "float32") -> fg.Graph:
    g = fg.Graph("inside", io_dtype=dtype)
    results = build(g, *(g.tensor(f"x{n}", shape) for n, shape in enumerate(shapes)))
    for n, y in enumerate(results if isinstance(results, tuple) else (results,)):
        g.output(y, name=f"y{n}")
    return g


def lazily(graph: fg.Graph, arch: str = "sm_80", pick: random.Random | None = None) -> CpuExecutable:
    """Returns an executable whose kernels are not built yet, with the cost model's schedules or random ones."""
    executable = CpuExecutable(graph, Options(target=target(arch)), lazy=True)
    if pick is not None:
        chosen = plan(graph, choose=lambda spec, _: Choice(pick.choice(list(schedules(spec, target(arch))))))
        executable.plan = executable._plans[16] = chosen
    return executable


def build(cases: Sequence[tuple[CpuExecutable, Pairs]]) -> None:
    """Builds all executables, and their forms in place, in one run of the host compiler."""
    plans = [p for executable, pairs in cases for p in (executable._plans[16], shared(executable._plans[16], pairs))]
    module = host_compiler.build([k.source for p in plans for k in p.kernels], cache=default_cache())
    first = 0
    for (executable, pairs), plain, own in zip(cases, plans[::2], plans[1::2]):
        executable._built[16] = executable._loaded(plain, module, range(first, first + len(plain.kernels)))
        first += len(plain.kernels)
        executable._built_in_place[16, pairs] = executable._loaded(own, module, range(first, first + len(own.kernels)))
        first += len(own.kernels)


def wrong_in_place(executable: CpuExecutable, pairs: Pairs) -> str | None:
    """Returns what differs between results written over inputs and results in memory of their own, for all thread
    orders.
    """
    executable.order = "forward"
    given = list(random_inputs(executable.graph, 3).values())
    results = executable(*given)
    expected = results if isinstance(results, tuple) else (results,)
    for order in ORDERS:
        executable.order = order
        inputs = [_copied(x) for x in given]
        outputs = [_copied(x) for x in expected]
        for i, o in pairs:
            outputs[o] = inputs[i]
        executable(*inputs, out=outputs)
        for n, (x, y) in enumerate(zip(expected, outputs)):
            if x.tobytes() != y.tobytes():
                return f"output {n} in order {order}"
    return None


def _copied(x: Array) -> Array:
    """Returns a copy with the same strides."""
    raw = np.empty(sum((n - 1) * s for n, s in zip(x.shape, x.strides)) + x.itemsize + 16, np.uint8)
    start = -raw.ctypes.data % 16
    copy = np.ndarray(x.shape, x.dtype, raw, start, x.strides)
    copy[...] = x
    return copy


CHANNEL = (1, 6, 1, 1)
ALLOWED: dict[str, tuple[fg.Graph, str, set[tuple[int, int]]]] = {
    "relu": (graph_of(lambda g, x: g.relu(x), (33, 5)), "sm_80", {(0, 0)}),
    "two": (graph_of(lambda g, a, b: (a + b, a * b), (64, 64), (64, 64)), "sm_80", {(0, 1), (1, 0)}),
    "turned": (graph_of(lambda g, a, b: g.transpose(a) + b, (64, 96), (96, 64)), "sm_80", {(1, 0)}),
    "softmax": (graph_of(lambda g, x: g.softmax(x), (40, 300)), "sm_90a", {(0, 0)}),
    "long rows": (graph_of(lambda g, x: g.softmax(x), (3, 40000)), "sm_80", {(0, 0)}),
    "residual and norm": (
        graph_of(lambda g, x, r, w: (x + r, g.rmsnorm(x + r, w)), (20, 256), (20, 256), (1, 256)),
        "sm_90a",
        {(1, 0), (0, 1)},
    ),
    "running statistics": (
        graph_of(lambda g, *x: g.batchnorm(*x), (16, 6, 9, 9), *[CHANNEL] * 4),
        "sm_80",
        {(0, 0), (3, 3), (4, 4)},
    ),
    "residual of a product": (
        graph_of(lambda g, a, b, c: g.relu(a @ b + c), (64, 96), (96, 64), (64, 64), dtype="bfloat16"),
        "sm_90a",
        {(2, 0)},
    ),
    "residual of a product in float32": (
        graph_of(lambda g, a, b, c: g.relu(a @ b + c), (40, 96), (96, 48), (40, 48)),
        "sm_80",
        {(2, 0)},
    ),
    "read before": (
        graph_of(lambda g, x, w: g.exp(g.identity(x @ w) @ w), (64, 64), (64, 64)),
        "sm_80",
        {(0, 0)},
    ),
}


def test_results_in_the_memory_of_inputs() -> None:
    cases = [(lazily(graph, arch), frozenset(pairs)) for graph, arch, pairs in ALLOWED.values()]
    build(cases)
    assert {n: wrong_in_place(*case) for n, case in zip(ALLOWED, cases)} == dict.fromkeys(ALLOWED)


@pytest.mark.parametrize(
    ("graph", "pair", "reason"),
    [
        (graph_of(lambda g, x: x[::-1], (64, 96)), (0, 0), "kernel 'inside_kernel' reads elements of 'x0' in other"),
        (graph_of(lambda g, x: g.transpose(x) + x, (64, 64)), (0, 0), "reads elements of 'x0' in other threads"),
        (graph_of(lambda g, x, w: x @ w, (64, 64), (64, 64)), (0, 0), "reads elements of 'x0' in other threads"),
        (graph_of(lambda g, x: g.cumsum(x), (64, 64)), (0, 0), r"\(scan\) reads 'x0' in other threads"),
        (
            graph_of(lambda g, x, f: g.rope(x, f), (2, 3, 8, 16), (8, 1, 1, 16)),
            (0, 0),
            "kernel 'inside_kernel' reads elements of 'x0' in other threads than write those of 'y0'",
        ),
        (
            graph_of(lambda g, x, w: (x * 2.0, g.exp(x * 2.0 @ w) @ x), (64, 64), (64, 64)),
            (0, 0),
            "reads 'x0' after kernel '.*' has written over it|reads elements of 'x0' in other",
        ),
    ],
)  # fmt: skip
def test_kernels_that_do_not_allow_it_are_named(graph: fg.Graph, pair: tuple[int, int], reason: str) -> None:
    executable = graph.compile("cpu")
    given = list(random_inputs(graph).values())
    kept = [x.copy() for x in given]
    outputs = [np.empty(t.shape, np.float32) for t in graph.outputs]
    outputs[pair[1]] = given[pair[0]]
    with pytest.raises(ArgumentError, match=rf"output .* overlaps input 'x0' .* in memory: .*({reason})"):
        executable(*given, out=outputs)
    assert all(np.array_equal(x, y) for x, y in zip(given, kept))


def strided(dtype: str, shape: tuple[int, int], pitch: int) -> tuple[fg.Graph, Pairs]:
    """Returns a graph on rows of any alignment, and the pairs that may share memory."""
    g = fg.Graph("strided", io_dtype=dtype)
    x, w = g.tensor("x", shape, strides=(pitch, 1)), g.tensor("w", shape[1:])
    g.output(g.relu(x * w), name="y", strides=(pitch, 1))
    return g, frozenset({(0, 0)})


def turned(dtype: str, rows: int, columns: int) -> tuple[fg.Graph, Pairs]:
    """Builds relu(a^T + b); b, which has the result's layout, may be overwritten by the result."""
    shapes = (rows, columns), (columns, rows)
    return graph_of(lambda g, a, b: g.relu(g.transpose(a) + b), *shapes, dtype=dtype), frozenset({(1, 0)})


def cut(dtype: str) -> tuple[fg.Graph, Pairs]:
    g = fg.Graph("cut", io_dtype=dtype)
    x, z = g.tensor("x", (40, 127)), g.tensor("z", (40, 130))
    g.output(g.relu(x + z[:, 3:]), name="y")
    return g, frozenset({(0, 0)})


def test_every_form_of_pointwise_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that reach over to the elements of other threads, and tiles that are turned, too."""
    for module in (pointwise_schedule, pointwise_unaligned):
        monkeypatch.setattr(module, "ENOUGH_BLOCKS", 1 / 132)
    monkeypatch.setattr(pointwise_tiling, "ENOUGH_TILES", 1 / 132)
    for module in (pointwise_schedule, pointwise_unaligned):
        monkeypatch.setattr(module, "THREADS", 32)
    monkeypatch.setattr(pointwise_tiling, "ENOUGH_ELEMENTS", 1)
    made = strided("bfloat16", (40, 127), 131), turned("float32", 64, 96), turned("int8", 130, 67), cut("bfloat16")
    cases, forms = [], set()
    for (graph, pairs), alignment in zip(made, (16, 16, 1, 16)):
        options = Options(alignment=alignment)
        (kernel,) = plan(graph, options).kernels
        for schedule in schedules(kernel.group.lowered.spec, target("sm_90a")):
            executable = CpuExecutable(graph, Options(), lazy=True)
            executable.plan = plan(graph, options, choose=lambda *_, at=schedule: Choice(at))
            executable._plans[16] = executable.plan
            cases.append((executable, pairs))
            forms.add(getattr(schedule, "form", type(schedule).__name__))
    assert forms >= {"flat", "unaligned", "TilesSchedule"}
    build(cases)
    assert [e.graph.name for e, pairs in cases if wrong_in_place(e, pairs) is not None] == []


def test_rows_that_are_read_again() -> None:
    """An element that has been written may not be read by a later loop over the row, unless it stays on the chip."""

    def of(form: str) -> tuple[CpuExecutable, Pairs]:
        graph = graph_of(again, (6, 200))
        executable = lazily(graph)
        schedule = RowsSchedule(form, 1, 32, 1, "uint32")
        executable.plan = executable._plans[16] = plan(graph, choose=lambda *_: Choice(schedule))
        assert len(executable.plan.kernels) == 1
        return executable, frozenset({(0, 0)})

    def again(g: fg.Graph, x: fg.Tensor) -> Any:
        y = x - g.reduction(x, "max", 1)
        return y, x * g.reduction(y * y, "add", 1)

    kept, read_again = of("registers"), of("memory")
    assert refusal(kept[0]._plans[16], kept[1]) is None
    assert "reads rows of 'x0' again after it has written those of 'y0'" in str(
        refusal(read_again[0]._plans[16], kept[1])
    )
    build([kept, read_again])
    assert wrong_in_place(*kept) is None
    read_again[0]._refusals[16, read_again[1]] = None
    assert wrong_in_place(*read_again) is not None


def candidates(seeds: range) -> list[tuple[fg.Graph, Pairs]]:
    """Returns random graphs with an output that may overwrite an input."""
    found = []
    for seed in seeds:
        graph = seeded(seed).build()
        for i, x in enumerate(graph.inputs if not graph.updates else ()):
            for o, y in enumerate(graph.outputs):
                alike = x.shape == y.shape and x.dtype == y.dtype and same_strides(x.shape, x.strides, y.strides)
                if alike and x.size > 1 and 0 not in x.strides:
                    found.append((graph, frozenset({(i, o)})))
    return found


@pytest.mark.parametrize("seeds", quick(range(40), range(40, 80)), ids=str)
def test_operands_of_programs_are_arguments_in_order(seeds: range) -> None:
    """By which what a kernel reads and writes is found."""
    seen = Counter[type]()
    for seed in seeds:
        for kernel in plan(seeded(seed).build()).kernels:
            spec, group = kernel.group.lowered.spec, kernel.group
            if isinstance(spec, (PointwiseSpec, RowsSpec, ContractionSpec)):
                first = len(spec.arguments) if isinstance(spec, ContractionSpec) else 0
                loads, stores = [x.name for x in spec.program.loads], [x.operand.name for x in spec.program.stores]
                assert loads == [t.name for t in group.reads[first : first + len(loads)]]
                assert stores == [t.name for t in group.writes[: len(stores)]]
                seen[type(spec)] += 1
    assert min(seen[kind] for kind in (PointwiseSpec, RowsSpec, ContractionSpec)) > 2


@pytest.mark.slow
def test_random_graphs_in_place() -> None:
    """With any schedules: a result in the memory of an input is what it is elsewhere, where it is not refused."""
    pick = random.Random(5)
    cases = [(lazily(graph, pick=pick), pairs) for graph, pairs in candidates(range(70))]
    allowed = [(e, pairs) for e, pairs in cases if refusal(e._plans[16], pairs) is None]
    assert 25 < len(allowed) < len(cases)
    build(allowed)
    for executable, pairs in allowed:
        with np.errstate(all="ignore"):
            assert wrong_in_place(executable, pairs) is None, executable.graph


def test_without_the_rule_results_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(lambda g, x: x[::-1] + 1.0, (640, 96))
    case = lazily(graph), frozenset({(0, 0)})
    build([case])
    with pytest.raises(ArgumentError):
        wrong_in_place(*case)
    case[0]._refusals.clear()
    monkeypatch.setattr(in_place, "refusal", lambda *_: None)
    assert wrong_in_place(*case) is not None


def test_machine_code_in_place() -> None:
    """No kernel that writes over its input reads that by ld.global.nc, which says that nobody writes it."""
    plain, inside = Counter[bool](), Counter[bool]()
    chosen = [ALLOWED[n] for n in ("relu", "softmax", "running statistics", "residual of a product")]
    for graph, arch, pairs in chosen:
        made = plan(graph, choose=by_cost_model(target(arch)))
        for count, other in ((plain, made), (inside, shared(made, frozenset(pairs)))):
            for kernel, before in zip(other.kernels, made.kernels):
                if count is plain or kernel is not before:
                    source = kernel.source
                    unit = nvrtc._Unit(source, nvrtc.headers_of(source.code), arch, nvrtc.BASE_OPTIONS)
                    count["ld.global.nc" in nvrtc._ptx(unit)] += 1
    assert plain[True] > 0
    assert inside[False] >= len(chosen)
    assert inside[True] == 0


def test_kernels_in_place_promise_nothing_of_their_pointers() -> None:
    graph = graph_of(lambda g, x, w: g.exp(g.softmax(x) @ w), (64, 64), (64, 64))
    made = plan(graph)
    assert len(made.kernels) == 2
    assert all("__restrict__" in k.source.code.partition("\n{\n")[0] for k in made.kernels[:1])
    inside = shared(made, frozenset({(0, 0)}))
    assert inside.kernels == made.kernels  # the first one reads x, the second writes y
    graph = graph_of(lambda g, x: g.relu(x), (64, 64))
    made = plan(graph)
    (kernel,) = shared(made, frozenset({(0, 0)})).kernels
    assert "__restrict__" in made.kernels[0].source.code
    assert "__restrict__" not in kernel.source.code
