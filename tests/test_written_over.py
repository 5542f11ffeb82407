"""Intermediates that are written over those that their kernels are the last to read."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

import fusegraph as fg
from codegen import best_schedule
from codegen.target import PORTABLE
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.graph import Graph, Tensor
from fusegraph.lowering.base import Options
from fusegraph.passes import crossing
from fusegraph.passes import fuse as fusing
from fusegraph.plan import Plan, plan
from fusegraph.report.check import check_executable

SIDE = 32


@pytest.fixture(autouse=True)
def _small_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossing, "LEAST_BYTES", 1)


def overwritten(made: Plan) -> dict[str, str]:
    """Returns the results that lie where another intermediate does: by name, that one's."""
    kernels = [(k.group, k.choice.schedule) for k in made.kernels]
    return {new.name: old.name for new, old in crossing.written_over(made.partition, kernels).items()}


def growing(parts: int) -> tuple[Graph, list[Tensor]]:
    """Returns a graph of a sum of products, and the sums so far."""
    graph = fg.Graph("growing")
    sums = []
    for n in range(parts):
        product = graph.matmul(graph.tensor(f"a{n}", (SIDE, SIDE)), graph.tensor(f"b{n}", (SIDE, SIDE)))
        sums.append(graph.add(sums[-1], product, name=f"sum{n}") if sums else product)
    graph.output(graph.softmax(graph.matmul(sums[-1], graph.tensor("last", (SIDE, SIDE)))))
    return graph, sums


def test_a_growing_sum_is_in_memory_once() -> None:
    graph, sums = growing(4)
    made = plan(graph)
    assert list(overwritten(made)) == ["sum1", "sum2", "sum3"]
    places = {made.memory.offsets[t] for t in made.memory.offsets if t.name in {s.name for s in sums}}
    assert len(places) == 1
    assert made.memory.size == 2 * sums[0].nbytes  # and what the softmax reads
    assert wrong([graph]) == 0


def test_what_is_read_later_stays() -> None:
    graph, sums = growing(3)
    graph.output(graph.matmul(sums[0], graph.tensor("other", (SIDE, SIDE))))
    assert list(overwritten(plan(graph))) == ["sum2"]


def test_what_leaves_the_graph_stays() -> None:
    graph, sums = growing(3)
    graph.output(sums[1])
    assert overwritten(plan(graph)) == {}


def test_operands_of_products_stay() -> None:
    graph = fg.Graph("chain")
    x = graph.tensor("x", (SIDE, SIDE))
    for n in range(3):
        x = graph.matmul(x, graph.tensor(f"w{n}", (SIDE, SIDE)))
    graph.output(x)
    made = plan(graph)
    assert len(made.kernels) == 3
    assert overwritten(made) == {}


@pytest.fixture
def _one_kernel_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes intermediates of all nodes."""
    fuse = fusing.fuse
    monkeypatch.setattr("fusegraph.plan.fuse", lambda graph, options, **_: fuse(graph, options, enabled=False))


def drawn(seed: int) -> Graph:
    """Returns a graph whose nodes mostly give tensors of one shape, and take what came lately or before."""
    rng, graph = random.Random(seed), fg.Graph("drawn")
    size = rng.choice((24, 32, 70))
    every = [graph.relu(graph.tensor("x", (size, size)))]
    for n in range(10):
        x = every[-1] if rng.random() < 0.8 else rng.choice(every)
        other = rng.choice(every)
        ops: list[Callable[[], Tensor]] = [
            lambda x=x: graph.tanh(x),
            lambda x=x, other=other: x * 0.5 + other,
            lambda x=x, n=n: x - graph.reduction(x, "avg", [n % 2], keepdims=True),
            lambda x=x, n=n: graph.softmax(x, axis=n % 2),
            lambda x=x, other=other: graph.tanh(graph.matmul(x, other)) + x,
            lambda x=x: graph.transpose(x, (1, 0)) * 2.0,
            lambda x=x: graph.cumsum(x, axis=1) * 0.1,
            lambda x=x, other=other: graph.binary_select(x, other, x > 0.0),
        ]
        every.append(rng.choice(ops)())
    graph.output(every[-1])
    return graph


def wrong(graphs: Sequence[Graph]) -> int:
    """Returns how many of some graphs give wrong results on the CPU engine."""
    executables = [CpuExecutable(graph, Options(), lazy=True) for graph in graphs]
    build_together(executables)
    return sum(not check_executable(e).ok for e in executables)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_kernel_a_node")
def test_random_graphs() -> None:
    graphs = [drawn(seed) for seed in range(24)]
    assert sum(len(overwritten(plan(graph))) for graph in graphs) > 16
    assert wrong(graphs) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("_one_kernel_a_node")
def test_random_graphs_notice_what_is_overwritten_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossing, "crossing", lambda *_: None)
    assert wrong([drawn(seed) for seed in range(12)])


def test_kernels_that_write_over_operands_promise_nothing() -> None:
    graph, _ = growing(3)
    made = plan(graph)
    assert best_schedule(made.kernels[1].group.lowered.spec, PORTABLE) == made.kernels[1].choice.schedule
    promises = ["__restrict__" in k.source.code for k in made.kernels]
    assert promises == [True, False, False, True, True][: len(promises)]
