"""Outputs beside and over other arguments: memory that interleaves, and results in the memory of an input."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
from recipes import seeded

import fusegraph as fg
from codegen import schedules, target
from fusegraph.engines.cpu import CpuExecutable, _Module
from fusegraph.engines.slots import Slots
from fusegraph.errors import ArgumentError
from fusegraph.layout import same_strides
from fusegraph.lowering.base import Options
from fusegraph.passes import in_place
from fusegraph.passes.in_place import Pairs, refusal, shared
from fusegraph.plan import Choice, plan
from fusegraph.report.check import random_inputs
from fusegraph.runtime import host_compiler, strides
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.strides import share_memory

Array = np.ndarray[Any, Any]
ORDERS = get_args(host_compiler.Order)


# ---- whether two arrays have a byte in common


def touched(pattern: strides.Pattern, start: int) -> set[int]:
    """Every byte of an array, one by one."""
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
    """An executable whose kernels are not built yet, with the schedules of the cost model or with any."""
    executable = CpuExecutable(graph, Options(), lazy=True, arch=arch)
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
        executable._built[16] = _Module(plain, Slots(plain), module, first)
        first += len(plain.kernels)
        executable._built_in_place[16, pairs] = _Module(own, Slots(own), module, first)
        first += len(own.kernels)


def wrong_in_place(executable: CpuExecutable, pairs: Pairs) -> str | None:
    """What differs between results in the memory of inputs and in memory of their own, in any order of the threads."""
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
    """A copy with the strides of the array."""
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


def candidates(seeds: range) -> list[tuple[fg.Graph, Pairs]]:
    """Random graphs with an output that may be an input."""
    found = []
    for seed in seeds:
        graph = seeded(seed).build()
        for i, x in enumerate(graph.inputs):
            for o, y in enumerate(graph.outputs):
                alike = x.shape == y.shape and x.dtype == y.dtype and same_strides(x.shape, x.strides, y.strides)
                if alike and x.size > 1 and 0 not in x.strides:
                    found.append((graph, frozenset({(i, o)})))
    return found


def test_random_graphs_in_place() -> None:
    """With any schedules: a result in the memory of an input is what it is elsewhere, where it is not refused."""
    pick = random.Random(5)
    cases = [(lazily(graph, pick=pick), pairs) for graph, pairs in candidates(range(120))]
    allowed = [(e, pairs) for e, pairs in cases if refusal(e._plans[16], pairs) is None]
    assert 40 < len(allowed) < len(cases)
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
