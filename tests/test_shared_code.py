"""Kernels that compute the same of other tensors are one code, compiled once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from graphs import check_all

import fusegraph as fg
from codegen import best_schedule
from codegen.canonical import canonical
from codegen.cpu import translation_unit
from fusegraph.passes import recompute
from fusegraph.plan import Choice, plan
from fusegraph.report.explain import describe, explain_text


def layers(count: int) -> fg.Graph:
    """Builds the layers of a network, all but the last alike."""
    graph = fg.Graph("layers", io_dtype="float16")
    x = graph.tensor("x", (40, 24))
    for number in range(count):
        w = graph.tensor(f"w{number}", (24, 24 if number < count - 1 else 7))
        b = graph.tensor(f"b{number}", (1, w.shape[1]))
        x = graph.relu(x @ w + b)
    graph.output(x, name="y")
    return graph


def test_layers_that_are_alike_are_one_code() -> None:
    graph = layers(6)
    chosen: list[str] = []

    def choose(spec: Any, _: Any) -> Choice:
        chosen.append(spec.name)
        return Choice(best_schedule(spec))

    kernels = plan(graph, choose=choose).kernels
    names = [k.name for k in kernels]
    # The first waits for no other, and what it reads is aligned otherwise; the last is of another size.
    assert len(kernels) == 6
    assert len({k.source for k in kernels}) == len(set(names)) == 3
    assert len(set(names[1:-1])) == 1
    assert len(chosen) == 2, "one choice for each specification"
    assert all(a.arguments != b.arguments for a, b in pairwise(kernels))


@pytest.mark.slow
def test_they_compute_what_each_is_to() -> None:
    check_all([layers(5)])


def test_one_code_is_compiled_once_for_the_cpu() -> None:
    sources = [k.source for k in plan(layers(6)).kernels]
    unit = translation_unit(sources)
    assert unit.count('extern "C" __global__') == 3
    assert unit.count("fusegraph_cpu::Entry<") == 6


def test_explain_tells_whose_code_it_is() -> None:
    text = explain_text(describe(plan(layers(4))))
    assert "the same code as kernel 2" in text
    assert text.count("the same code as") == 1
    assert text.count("schedule ") == 3


def _two(first: str, second: str) -> fg.Graph:
    """Builds two independent kernels among others."""
    graph = fg.Graph("two")
    a, b, c, d = (graph.tensor(name, (16, 16)) for name in "abcd")
    scope = {"graph": graph, "a": a, "b": b, "c": c, "d": d}
    graph.output(graph.reduction(graph.tensor("z", (2, 3)), axes=(0,)))
    for number, expression in enumerate((first, second)):
        graph.output(eval(expression, scope))
        graph.output(graph.exp(graph.tensor(f"between {number}", (3 + number,))))
    return graph


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a * 0.0", "b * -0.0"),
        ("a + 1", "b + 2"),
        ("a @ a", "b @ c"),
        ("a * a + b", "c * d + d"),
        ("graph.cast(a, 'float16')", "graph.cast(b, 'bfloat16')"),
        ("a @ b", "c @ d.T"),
        ("a[1:]", "b[:-1] * 1.5"),
    ],
)
def test_what_is_not_the_same(first: str, second: str) -> None:
    kernels = plan(_two(first, second)).kernels
    assert len({k.source for k in kernels}) == len(kernels)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a * float('nan')", "b * float('nan')"),
        ("a @ a", "b @ b"),
        ("a @ a.T", "b @ c.T"),
        ("a * a + b", "c * c + d"),
        ("a.T @ b", "c.T @ d"),
    ],
)
def test_what_is_the_same(first: str, second: str) -> None:
    kernels = plan(_two(first, second)).kernels
    shared = [k for k in kernels if sum(k.source is other.source for other in kernels) == 2]
    assert len(shared) == 2, [k.name for k in kernels]
    for a, b in zip(*(k.arguments for k in shared)):
        assert (a.shape, a.strides, a.dtype) == (b.shape, b.strides, b.dtype)


def test_specifications_without_names() -> None:
    (group,) = plan(_only("x")).partition.groups
    (other,) = plan(_only("something else")).partition.groups
    spec = group.lowered.spec
    assert spec != other.lowered.spec
    assert canonical(spec) == canonical(other.lowered.spec) == canonical(canonical(spec))
    assert canonical(spec).program.loads[0].dtype is spec.program.loads[0].dtype


def _only(name: str) -> fg.Graph:
    graph = fg.Graph(name)
    graph.output(graph.sigmoid(graph.tensor(name, (8, 4)) * 2), name=f"{name} y")
    return graph


def test_nothing_is_fused_twice_where_computing_again_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel keeps to itself would have to be written for another to begin with; views read nothing."""
    graph = fg.Graph("network", io_dtype="float16")
    x, w = graph.tensor("x", (2, 16, 8, 8), layout="NHWC"), graph.tensor("w", (16, 16, 3, 3), layout="KRSC")
    factors = graph.sigmoid(graph.tensor("factors", (32,)))
    y = graph.relu(graph.conv_fprop(x, w, padding=1) * factors[:16].reshape((1, 16, 1, 1)))
    y = graph.max_pool(y, (2, 2))
    graph.output(graph.conv_fprop(y, w) * factors[16:].reshape((1, 16, 1, 1)))

    def never(*_: object) -> None:
        raise AssertionError("fused again")

    monkeypatch.setattr(recompute, "fuse", never)
    assert len(plan(graph).kernels) == 4
