"""Donated inputs: intermediates lie in their memory, once they have been read."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegraph as fg
from fusegraph.engines import compile as compile_graph
from fusegraph.engines.stages import stages
from fusegraph.errors import ArgumentError, GraphError
from fusegraph.plan import plan


def _chain(sizes: list[int], donated: set[int], seed: int = 0) -> tuple[fg.Graph, list[np.ndarray]]:
    """Returns a chain of matrix products with an input for each, some of them donated, and arrays for it."""
    rng = np.random.default_rng(seed)
    graph = fg.Graph("chain", io_dtype="float32")
    x = graph.tensor("x", (4, sizes[0]))
    arrays = [rng.standard_normal((4, sizes[0]), dtype=np.float32)]
    for n, (rows, cols) in enumerate(pairwise(sizes)):
        x = x @ graph.tensor(f"w{n}", (rows, cols), donated=n in donated)
        arrays.append(rng.standard_normal((rows, cols), dtype=np.float32))
    graph.output(x, name="y")
    return graph, arrays


def test_intermediates_lie_in_donated_inputs() -> None:
    graph, arrays = _chain([16] * 6, {0, 1})
    plain, _ = _chain([16] * 6, set())
    compiled, other = compile_graph(graph, engine="cpu"), compile_graph(plain, engine="cpu")
    assert other.workspace_bytes > 0
    assert compiled.workspace_bytes < other.workspace_bytes
    assert compiled.plan is not None
    hosts = {host.name for host, _ in compiled.plan.memory.hosted.values()}
    assert hosts <= {"w0", "w1"}
    expected = other(*arrays)
    before = [a.copy() for a in arrays]
    np.testing.assert_array_equal(compiled(*arrays), expected)
    changed = {i for i, (a, b) in enumerate(zip(arrays, before)) if not np.array_equal(a, b)}
    assert changed == {int(name[1:]) + 1 for name in hosts}  # and no other input


@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_results_are_those_without_donations(data: Any) -> None:
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=3, max_size=8))
    donated = data.draw(st.sets(st.integers(0, len(sizes) - 2)))
    graph, arrays = _chain(sizes, donated, data.draw(st.integers(0, 99)))
    compiled = compile_graph(graph, engine="cpu")
    memory = compiled.plan.memory  # type: ignore[union-attr]
    groups = [k.group for k in compiled.plan.kernels]  # type: ignore[union-attr]
    for tensor, (host, at) in memory.hosted.items():
        assert at % 16 == 0
        assert at + tensor.nbytes <= host.nbytes
        written = next(n for n, g in enumerate(groups) if tensor in g.writes)
        assert all(n < written for n, g in enumerate(groups) if host in g.reads)
    expected = arrays[0].astype(np.float64)
    for w in arrays[1:]:
        expected = expected @ w.astype(np.float64)
    np.testing.assert_allclose(compiled(*arrays), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


def test_what_may_not_be_donated() -> None:
    graph = fg.Graph("bad")
    with pytest.raises(GraphError, match="'w' is a parameter, which calls do not change"):
        graph.tensor("w", (4, 4), parameter=True, donated=True)
    graph, arrays = _chain([16] * 4, {0})
    compiled = compile_graph(graph, engine="cpu")
    arrays[1].flags.writeable = False
    with pytest.raises(ArgumentError, match=r"'w0'.* is read-only, and calls write to it"):
        compiled(*arrays)
    shared = [arrays[0], arrays[2], arrays[2], arrays[3]]
    with pytest.raises(ArgumentError, match=r"'w1' .* overlaps input 'w0'"):
        compiled(*shared)


@pytest.mark.slow
def test_gradients_of_torch_need_no_more_memory_than_what_was_kept() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import fusegraph.torch  # noqa: F401
    from fusegraph.frontends.torch import backend

    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64))]
    model = torch.nn.Sequential(*layers)
    made: list[Any] = []
    original = backend.compile_graph

    def spy(graph: Any, **how: Any) -> Any:
        made.append(original(graph, **how))
        return made[-1]

    backend.compile_graph = spy  # type: ignore[assignment]
    try:
        x = torch.randn(256, 64, requires_grad=True)
        y = torch.compile(model, backend="fusegraph")(x)
        grad = torch.randn_like(y)
        y.backward(grad)
    finally:
        backend.compile_graph = original
    got = [x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    model(x).backward(grad)
    for ours, theirs in zip(got, [x.grad, *(p.grad for p in model.parameters())]):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    backward = made[-1]
    hosted = sum(t.nbytes for t in backward.plan.memory.hosted)
    assert hosted > 8 * 256 * 64 * 4
    assert backward.workspace_bytes <= 4 * 256 * 64 * 4


def test_stages_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result is made before it is written, and each input dropped after its last use, in as few stages as told."""
    graph, _ = _chain([64] * 9, set(range(8)))
    graph.output(graph.relu(graph.inputs[3]), name="early")
    made = plan(graph)
    assert len(stages(made)) == 1
    monkeypatch.setattr("fusegraph.passes.memory.LEAST", 1)
    made = plan(graph)
    memory, found = made.memory, stages(made)
    assert 2 < len(found) <= 8
    assert sum(memory.part_sizes) == memory.size
    assert [n for s in found for n in s.kernels] == list(range(len(made.kernels)))
    inputs, results = made.simplified.inputs, made.simplified.made
    place: dict[Any, Any] = {t: host for t, (host, _) in memory.hosted.items()} | {
        t: memory.part(t) for t in memory.offsets
    }
    held: set[Any] = {*inputs}
    for stage in found:
        held |= {results[n] for n in stage.makes} | {*stage.opens}
        for n in stage.kernels:
            assert {place.get(t.base, t.base) for t in made.kernels[n].arguments} <= held
        held -= {inputs[n] for n in stage.drops} | {*stage.closes}
    assert held == {*results}
    assert found[0].drops
    assert found[-1].makes
