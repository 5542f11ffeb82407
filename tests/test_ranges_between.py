"""What holds at the ends of a range holds between them: kernels are the same at sizes at which nobody looked."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from graphs import quick

import fusegraph as fg
from codegen import Schedule
from codegen.sizes import Bounds, at
from codegen.spec import KernelSource
from fusegraph import variants
from fusegraph.lowering.base import Options
from fusegraph.plan import source_of
from fusegraph.ranges import plan_ranges
from fusegraph.runtime.targets import named
from fusegraph.size_ranges import RESIDUES, Range
from fusegraph.sized_graphs import graph_at
from fusegraph.variants import Variants

#: (least, most, multiple_of): what divides both ends divides few sizes between; narrow, wide, and of one size but one.
BOUNDS = ((120, 128, 1), (7, 11, 1), (2, 3, 1), (1, 300, 1), (16, 400, 8), (60, 66, 3), (31, 33, 1), (127, 257, 2))

Write = Callable[[fg.Graph, fg.Dim, fg.Dim], None]


def channels(g: fg.Graph, n: fg.Dim, m: fg.Dim) -> None:
    x = g.tensor("x", (2, n, 9, 8), "float16", layout="NHWC")
    w = g.tensor("w", (m, n, 3, 3), "float16", layout="KRSC")
    g.output(g.relu(g.conv_fprop(x, w, padding=1, stride=2)), name="y")


def images(g: fg.Graph, n: fg.Dim, m: fg.Dim) -> None:
    x = g.tensor("x", (2, 8, n, m), "float16", layout="NHWC")
    g.output(g.conv_fprop(x, g.tensor("w", (8, 8, 3, 3), "float16", layout="KRSC"), padding=1, stride=2), name="y")


def joined_rows(g: fg.Graph, n: fg.Dim, m: fg.Dim) -> None:
    x = g.concatenate(g.tensor("a", (n, 40), "float16"), g.tensor("b", (m, 40), "float16"), axis=0)
    g.output(g.softmax(x @ g.tensor("w", (40, 24), "float16"), axis=0), name="y")


def joined_terms(g: fg.Graph, n: fg.Dim, m: fg.Dim) -> None:
    x = g.concatenate(g.tensor("a", (33, n), "float16"), g.tensor("b", (33, m), "float16"), axis=1)
    g.output(x @ g.tensor("w", (n + m, 24), "float16"), name="y")


def merged(g: fg.Graph, n: fg.Dim, m: fg.Dim) -> None:
    x = g.transpose(g.tensor("x", (n, m, 12), "float16"), perm=(1, 0, 2)).reshape(m * n, 12)
    g.output(g.reduction(g.exp(x), mode="max", axes=(0,)), name="y")
    g.output(x @ g.tensor("w", (12, 16), "float16"), name="z")


def halved(g: fg.Graph, n: fg.Dim, m: fg.Dim) -> None:
    x = g.slice(g.tensor("x", (n + 2, m)), starts=(0, 0), stops=((n + 2) // 2, m))
    g.output(g.softmax(x, axis=1), name="y")


def products(g: fg.Graph, n: fg.Dim, m: fg.Dim) -> None:
    g.output(g.relu(g.tensor("a", (20, n), "float16") @ g.tensor("b", (n, m), "float16")), name="y")


def padded(g: fg.Graph, n: fg.Dim, m: fg.Dim) -> None:
    x = g.tensor("x", (n, m), "float16", strides=(m + 8, 1))
    g.output(g.exp(x) + 1.0, name="y")
    g.output(g.reduction(x, mode="add", axes=(1,)), name="z")


def attention(g: fg.Graph, n: fg.Dim, m: fg.Dim) -> None:
    q = g.tensor("q", (2, 2, n, 32), "float16")
    k, v = (g.tensor(name, (2, 2, m, 32), "float16") for name in "kv")
    g.output(g.sdpa(q, k, v), name="y")


WRITERS = (channels, images, joined_rows, joined_terms, merged, halved, products, padded, attention)


def built(write: Write, seed: int) -> fg.Graph:
    rng, graph = random.Random(seed), fg.Graph(write.__name__)
    write(graph, *(fg.Dim(name, *rng.choice(BOUNDS)) for name in ("n", "m")))
    return graph


def sizes_within(range_: Range, rng: random.Random) -> dict[str, int]:
    return {name: rng.choice((low, high, rng.randint(low, high))) for name, (low, high) in range_.bounds.items()}


@pytest.mark.slow
@pytest.mark.parametrize("target", quick("h200", "portable"))
@pytest.mark.parametrize("write", WRITERS, ids=lambda f: f.__name__)
def test_kernels_are_the_same_at_all_sizes_of_their_range(
    write: Write, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At sizes within a range, the kernel of each schedule that serves it is rendered again, and has the same code."""
    rng, found, checked = random.Random(write.__name__), Variants._source, []

    def source(self: Variants, range_: Range, schedule: Schedule) -> KernelSource | None:
        made = found(self, range_, schedule)
        for sizes in [sizes_within(range_, rng) for _ in range(3)] if made is not None else ():
            spec = at(self._spec, sizes, vary=bool(range_.varying), within=range_.bounds)
            again = self._named(source_of(self._group, spec, schedule, self._place))
            assert again is made, f"{self._spec.name} for {range_} at {sizes}: {schedule}"
            checked.append(sizes)
        return made

    monkeypatch.setattr(variants.Variants, "_source", source)
    for seed in range(2):
        plan_ranges(built(write, seed), Options() if target == "portable" else Options(target=named(target)))
    assert checked


def test_what_depends_on_remainders_is_not_taken_from_the_ends() -> None:
    """Both ends, which are primes, are 3 more than multiples of the stride: no window there goes too far."""
    graph = fg.Graph("remainders")
    n = fg.Dim("n", min=23, max=31)
    x = graph.tensor("x", (2, 8, n, n), layout="NHWC")
    graph.output(graph.avg_pool(x, window=5, stride=4, padding=2), name="y")
    executable = graph.compile("cpu")
    for size in (23, 25, 26, 28, 29, 31):
        known, _ = graph_at(graph, {"n": size})
        x = np.random.default_rng(size).random((2, size, size, 8), np.float32).transpose(0, 3, 1, 2)
        np.testing.assert_allclose(executable(x), known.compile("reference")(x), rtol=1e-5, err_msg=str(size))


def test_probes_have_all_remainders_and_corners() -> None:
    range_ = Range({"n": Bounds(5, 900), "m": Bounds(2, 3), "k": Bounds(4, 4)})
    assert all(sizes in range_ for sizes in range_.probes)
    for sizes in ({"n": 5, "m": 3, "k": 4}, {"n": 900, "m": 2, "k": 4}):
        assert sizes in range_.probes
    assert {sizes["n"] % RESIDUES for sizes in range_.probes} == set(range(RESIDUES))


def test_kernels_that_write_over_inputs_have_schedules_that_may(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fg.Graph("over")
    x = graph.tensor("x", (6, fg.Dim("n", max=400)))
    graph.assign(x, graph.softmax(x, axis=-1))
    asked: list[Schedule] = []
    check = variants.check_overwriting

    def checked(known: fg.Graph, kernels: list) -> None:
        asked.extend(schedule for _, schedule in kernels)
        check(known, kernels)

    monkeypatch.setattr(variants, "check_overwriting", checked)
    planned = plan_ranges(graph, Options())
    used = [v.choice.schedule for p in planned.plans for _, vs in p.kernels for v in vs if v.range.varying]
    assert used
    assert set(used) <= set(asked)


def test_what_is_single_at_both_ends_may_be_more_between() -> None:
    """The last of three parts of 3, 5 and 7 elements is one element, that of 6 is two."""
    n = fg.Dim("n", 2, 40)
    g = fg.Graph("g")
    g.output(g.sin(g.tensor("x", (n, 5))[2 * ((n + 2) // 3) :]), name="y")
    executable = g.compile("cpu")
    for size in (5, 6, 7, 8, 9, 10, 11, 12, 33, 40):
        x = np.random.default_rng(size).random((size, 5), np.float32)
        np.testing.assert_allclose(executable(x), np.sin(x[2 * ((size + 2) // 3) :]), atol=1e-6)
