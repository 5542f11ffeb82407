"""Choices: what was weighed is listed, can be settled either way with equal results, and is settled by time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from graphs import seeded

import fusegraph as fg
from codegen.target import target
from fusegraph.engines import partitions, plans
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.engines.partitions import PartitionTuner, compared, settling
from fusegraph.errors import DeviceError
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.choices import Choice, Settled
from fusegraph.passes.rewrite import as_given
from fusegraph.plan import Kernel, Plan, plan
from fusegraph.report.check import check_executable, random_inputs
from fusegraph.report.estimates import plan_us
from fusegraph.report.explain import describe, explain_text
from fusegraph.runtime.cache import DiskCache

H200 = Options(target=target("h200"))


def prologue(layers: int = 1, dtype: str = "float16") -> fg.Graph:
    graph = fg.Graph("prologue", io_dtype=dtype)
    for n in range(layers):
        x, w = graph.tensor(f"x{n}", (40, 24)), graph.tensor(f"w{n}", (24, 24))
        graph.output(graph.matmul(graph.gelu(x), w, name=f"product {n}"))
    return graph


def pooled() -> fg.Graph:
    graph = fg.Graph("pooled")
    x = graph.gelu(graph.tensor("x", (2, 4, 12, 12)))
    graph.output(graph.max_pool(x, window=3, stride=1, padding=1, name="pool"), name="y")
    return graph


def long_product() -> fg.Graph:
    graph = fg.Graph("long")
    graph.output(graph.matmul(graph.tensor("a", (40, 8192)), graph.tensor("b", (8192, 24)), name="y"))
    return graph


def filter_gradient() -> fg.Graph:
    graph = fg.Graph("gradient")
    x, loss = graph.tensor("x", (2, 4, 14, 14), layout="NHWC"), graph.tensor("dy", (2, 8, 14, 14), layout="NHWC")
    graph.output(graph.conv_wgrad(x, loss, (3, 3), padding=1, name="dw"))
    return graph


def three_by_three() -> fg.Graph:
    graph = fg.Graph("three by three")
    x = graph.tensor("x", (1, 32, 12, 12))
    graph.output(graph.conv_fprop(x, graph.tensor("w", (32, 32, 3, 3)), padding=1, name="y"))
    return graph


def batch_norm() -> fg.Graph:
    graph = fg.Graph("norm")
    x = graph.tensor("x", (8, 8, 32, 32), layout="NHWC")
    mean = graph.reduction(x, "avg", (0, 2, 3), keepdims=True, name="mean")
    centred = x - mean
    variance = graph.reduction(centred * centred, "avg", (0, 2, 3), keepdims=True, name="variance")
    graph.output(centred / graph.sqrt(variance + 1e-5), name="y")
    return graph


def attention(queries: int = 1, keys: int = 512) -> fg.Graph:
    graph = fg.Graph("attention", io_dtype="float16")
    q = graph.tensor("q", (1, 1, queries, 16))
    k, v = (graph.tensor(name, (1, 1, keys, 16)) for name in "kv")
    graph.output(graph.sdpa(graph.relu(q), k, v, attn_scale=0.25, name="o"))
    return graph


def misaligned() -> fg.Graph:
    graph = fg.Graph("misaligned", io_dtype="float16")
    a, b = graph.tensor("a", (256, 1023)), graph.tensor("b", (1023, 256))
    graph.output(graph.matmul(a, b, name="y"))
    return graph


def misaligned_parameter() -> fg.Graph:
    graph = fg.Graph("misaligned parameter", io_dtype="float16")
    x, w = graph.tensor("x", (256, 1024)), graph.tensor("w", (1024, 511), parameter=True)
    graph.output(graph.matmul(x, w, name="y"))
    return graph


def parameters_of_one_tensor() -> fg.Graph:
    graph = fg.Graph("parameters of one tensor", io_dtype="float16")
    x = graph.tensor("x", (32, 64))
    for name in "qkv":
        made = graph.matmul(x, graph.tensor(f"w{name}", (64, 32), parameter=True), name=name)
        graph.output(graph.concatenate(*[made.reshape(32, 2, 16).transpose(1, 0, 2)] * 2, axis=0))
    return graph


def gated() -> fg.Graph:
    graph = fg.Graph("gated", io_dtype="float16")
    both = graph.matmul(graph.tensor("x", (32, 24)), graph.tensor("w", (24, 32)), name="both")
    gate, up = (graph.slice(both, (0, at), (32, at + 16)) for at in (0, 16))
    graph.output(graph.gelu(gate) * up, name="y")
    return graph


def two_convolutions() -> fg.Graph:
    graph = fg.Graph("two convolutions", io_dtype="float16")
    x, v, w = graph.tensor("x", (1, 16, 10, 10)), graph.tensor("v", (16, 16, 3, 3)), graph.tensor("w", (16, 16, 3, 3))
    graph.output(graph.conv_fprop(graph.relu(graph.conv_fprop(x, v, padding=1)), w, padding=1, name="y"))
    return graph


def norm_gradient() -> fg.Graph:
    graph = fg.Graph("columns")
    x, dy = graph.tensor("x", (4096, 64)), graph.tensor("dy", (4096, 64))
    graph.output(graph.softmax(x, axis=1) * dy, name="dx")
    graph.output(graph.reduction(x * dy, "add", 0, name="dw"))
    return graph


#: What is chosen -> a graph in which it is.
GRAPHS: dict[str, Callable[[], fg.Graph]] = {
    "prologue of operand A": prologue,
    "prologue of a pool": pooled,
    "parts of a sum of products": long_product,
    "gradient of a filter": filter_gradient,
    "algorithm": three_by_three,
    "parts of a reduction": batch_norm,
    "parts of an attention": attention,
    "attention": attention,
    "attention's operands": attention,
    "layouts of operands": misaligned,
    "products with parameters": parameters_of_one_tensor,
    "products of parts": gated,
    "products of one operand": gated,
    "images with channels last": two_convolutions,
    "reductions of columns": norm_gradient,
}


def settle(graph: fg.Graph, options: Options, choices: Sequence[Choice], other: str) -> Plan:
    return plan(as_given(graph), replace(options, settled={c.key: Settled(other) for c in choices}))


def alternatives(graph: fg.Graph, options: Options) -> Iterator[Options]:
    """Yields options that settle each choice otherwise, and all those of a kind together."""
    choices = plan(as_given(graph), options).choices
    for choice in choices:
        for other in choice.others:
            yield replace(options, settled={choice.key: Settled(other)})
    together = {c.key: Settled(c.others[0]) for c in choices if c.others}
    if len(together) > 1:
        yield replace(options, settled=together)


def kernels(found: Plan) -> list[str]:
    return sorted(repr((k.group.lowered.spec, k.choice.schedule)) for k in found.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("what", GRAPHS)
def test_what_was_weighed_is_listed_and_can_be_settled(what: str) -> None:
    graph = GRAPHS[what]()
    first = plan(as_given(graph), H200)
    choices = [c for c in first.choices if c.what == what]
    assert choices, [c.key for c in first.choices]
    for choice in choices:
        assert choice.taken == choice.preferred
        assert not choice.us
        assert len(choice.cycles) == 1 + len(choice.others) > 1
    found = settle(graph, H200, choices, choices[0].others[0])
    assert [c.taken for c in found.choices if c.key == choices[0].key] == [choices[0].others[0]]
    assert kernels(found) != kernels(first)
    assert kernels(settle(graph, H200, choices, choices[0].taken)) == kernels(first)
    assert kernels(settle(graph, H200, choices, "nonsense")) == kernels(first)


@pytest.mark.parametrize("options", [pytest.param(DEFAULTS, marks=pytest.mark.slow), H200], ids=["portable", "h200"])
@pytest.mark.slow
def test_results_are_equal_either_way(options: Options) -> None:
    graphs = [make() for make in dict.fromkeys([*GRAPHS.values(), misaligned_parameter])]
    check_alternatives([(graph, random_inputs(graph), options) for graph in graphs])


@pytest.mark.slow
def test_results_of_random_graphs_are_equal_either_way() -> None:
    assert check_alternatives(_seeded(range(7100, 7200))) > 50


@pytest.mark.slow
def test_results_of_a_few_random_graphs_are_equal_either_way() -> None:
    assert check_alternatives(_seeded(range(7300, 7324), themes=("matmul", "conv", "pool", "rows"))) > 10


#: A graph, its inputs and options.
Given = tuple[fg.Graph, Mapping[str, Any], Options]


def _seeded(seeds: range, **how: Any) -> list[Given]:
    recipes = [seeded(seed, **how) for seed in seeds]
    graphs = [recipe.build() for recipe in recipes]
    return [(g, r.inputs(g), replace(DEFAULTS, strict=r.strict)) for g, r in zip(graphs, recipes)]


def check_alternatives(given: Sequence[Given]) -> int:
    """Checks all alternatives of graphs against the reference; returns how many there are."""
    made = [
        (CpuExecutable(as_given(g), settled, lazy=True), inputs)
        for g, inputs, options in given
        for settled in alternatives(g, options)
    ]
    build_together([executable for executable, _ in made])
    for executable, inputs in made:
        options = executable._options
        found = check_executable(executable, inputs, strict=options.strict)
        assert found.ok, f"{found}\n{options.settled}"
    return len(made)


# --- measured


class Clock:
    """Says that kernels take what cost models estimate, times a factor if one of their nodes has such a name."""

    def __init__(self, slow: str = "", factor: float = 1.0, own: float = 1.0) -> None:
        self.slow, self.factor, self.own = slow, factor, own
        self.timed: list[list[str]] = []

    def __call__(self, sequence: Sequence[Kernel]) -> Callable[[], float]:
        self.timed.append([n.name for k in sequence for n in k.group.nodes])
        us = sum(self.us(k) for k in sequence)
        return lambda: us

    def us(self, kernel: Kernel) -> float:
        spec = type(kernel.group.lowered.spec).__name__
        return self.factor if spec == self.slow else self.own


def made_by(clock: Clock, **more: Any) -> PartitionTuner:
    return PartitionTuner(plans.planner(True, None), clock, **more)


def test_the_faster_alternative_is_kept() -> None:
    graph = prologue()
    key = "prologue of operand A", "product 0"
    (before,) = (c for c in plan(as_given(graph), H200).choices if c.key == key)
    found = made_by(Clock("ContractionSpec", 10.0)).tune(graph, H200)
    assert found[key] == Settled(before.taken, found[key].us)
    (other,) = before.others
    assert found[key].us[before.taken] < found[key].us[other]

    class Backwards(Clock):
        def __call__(self, sequence: Sequence[Kernel]) -> Callable[[], float]:
            return lambda: 100.0 / len(sequence) ** 2

    found = made_by(Backwards()).tune(graph, H200)
    assert found[key].taken == other
    settled = plan(as_given(graph), replace(H200, settled=found))
    (choice,) = (c for c in settled.choices if c.key == key)
    assert (choice.taken, choice.preferred) == (other, before.taken)
    assert set(choice.us) == {other, before.taken}


def test_layers_that_are_alike_are_timed_once() -> None:
    clock = Clock()
    found = made_by(clock).tune(prologue(layers=4), H200)
    settled = [key for key in found if key[0] == "prologue of operand A"]
    assert len(settled) == 4
    assert len({tuple(found[key].us.items()) for key in settled}) == 1
    one = Clock()
    made_by(one).tune(prologue(layers=1), H200)
    assert len(clock.timed) == len(one.timed)


def test_nothing_is_tried_when_the_time_is_over() -> None:
    times = iter((0.0, 100.0))
    clock = Clock()
    assert made_by(clock, limit_s=10.0, now=lambda: next(times)).tune(prologue(), H200) == {}
    assert not clock.timed


def test_an_alternative_that_cannot_run_is_none() -> None:
    def refuses(_: Sequence[Kernel]) -> Callable[[], float]:
        raise DeviceError("out of memory")

    assert made_by(refuses).tune(prologue(), H200) == {}  # type: ignore[arg-type]


def test_plans_that_are_alike_have_nothing_to_time() -> None:
    graph, clock = prologue(), Clock()
    assert compared(plan(as_given(graph), H200), plan(as_given(graph), H200), clock) is None
    assert not clock.timed


def test_far_alternatives_are_not_tried_and_promising_ones_come_first() -> None:
    def choice(node: str, now: float | None, then: float | None) -> Choice:
        return Choice("c", node, {"a": now, "b": then}, "a", "a")

    near, large, far, unknown = (
        choice("n", 10, 11),
        choice("l", 1000, 1300),
        choice("f", 1, 50),
        choice("u", None, None),
    )
    tried: set[Any] = set()
    order = []
    while (trial := partitions._next([unknown, far, near, large], tried)) is not None:
        ((found,), other) = trial
        tried.add((found.key, other))
        order.append(found.node)
    assert order == ["l", "n", "u"]


def test_what_was_measured_is_found_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, clock = DiskCache(tmp_path / "cache"), Clock()
    first = settling(plans.planner(True, None), made_by(clock), cache, "A GPU")(prologue(), H200)
    timed = len(clock.timed)
    assert timed
    measured = {c.key: c.us for c in first.choices if c.us}
    assert measured
    for tuner in (made_by(clock), None):
        again = settling(plans.planner(True, None, cache), tuner, cache, "A GPU")(prologue(), H200)
        assert {c.key: c.us for c in again.choices if c.us} == measured
        assert kernels(again) == kernels(first)
    assert len(clock.timed) == timed
    other = settling(plans.planner(True, None), None, cache, "another GPU")(prologue(), H200)
    assert not any(c.us for c in other.choices)
    monkeypatch.setattr(cache, "get", lambda _: b"nonsense")
    assert not any(c.us for c in settling(plans.planner(True, None), None, cache, "A GPU")(prologue(), H200).choices)


@pytest.mark.gpu
def test_choices_are_timed_on_a_gpu_and_found_again(tmp_path: Any) -> None:
    cache = DiskCache(tmp_path / "cache")
    first = batch_norm().compile("cuda", autotune=True, cache=cache)
    assert first.plan is not None
    measured = {c.key: c.us for c in first.plan.choices if c.us}
    assert measured
    again = batch_norm().compile("cuda", cache=cache)
    assert again.plan is not None
    assert {c.key: c.us for c in again.plan.choices if c.us} == measured
    assert kernels(again.plan) == kernels(first.plan)
    assert check_executable(again).ok


def test_explain_tells_of_each_choice() -> None:
    graph = prologue()
    words = " ".join(explain_text(describe(plan(as_given(graph), H200), H200.target)).split())
    assert "product 0: prologue of operand A: part of the product" in words
    assert "a kernel of its own: " in words
    assert "us estimated" in words
    assert "not measured" in words
    found = made_by(Clock()).tune(graph, H200)
    facts = describe(plan(as_given(graph), replace(H200, settled=found)), H200.target)
    (told,) = (c for c in facts["choices"] if c["what"] == "prologue of operand A")
    assert set(told["measured_us"]) == set(told["estimated_us"])
    assert "us measured" in explain_text(facts)
    assert plan_us(plan(as_given(graph), H200), H200.target) > 0
