"""Packed copies of parameters: what is computed once, when it is computed again, who shares it, when it is freed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import check_all
from test_joined_products import three
from test_packing_launches import layer

import fusegraph as fg
from codegen.target import target
from fusegraph.engines import packing, plans
from fusegraph.engines.plans import planner
from fusegraph.errors import ArgumentError, OutOfMemoryError
from fusegraph.lowering.base import Options
from fusegraph.passes.parameters import memory
from fusegraph.plan import plan
from fusegraph.runtime.cache import DiskCache


def columns() -> Any:
    """Returns a graph in whose packing sums of columns are made by the kernel of the rows."""
    graph = fg.Graph("columns")
    w, s = (graph.tensor(name, (4096, 64), parameter=True) for name in "ws")
    rows, sums = graph.softmax(w, axis=1) * s, graph.reduction(w * s, "add", 0)
    graph.output(graph.tensor("x", (4096, 64)) * rows + sums, name="y")
    return graph


# ---- what is packed


def names(made: Any) -> set[str]:
    return {t.name for t in made.packed}


def test_what_is_packed() -> None:
    graph = fg.Graph("g")
    x, w, s = graph.tensor("x", (8, 16)), *(graph.tensor(n, (16,), parameter=True) for n in "ws")
    halves = graph.tensor("halves", (64, 4096), "float16", parameter=True)
    work = graph.exp(w, name="e") * s  # both are one step of a packed tensor
    wide = graph.cast(halves, "float32", name="wide")  # a kernel widens as it reads
    graph.output(x * work + s, name="y")
    graph.output(graph.tensor("z", (64, 4096)) + wide, name="v")
    graph.output(graph.neg(w), name="u")  # leaves the graph
    made = plan(graph)
    assert [t.shape for t in made.packed] == [(16,)]
    assert list(made.packed.values()) == [("w", "s")]
    assert made.packing is not None
    assert len(made.packing.kernels) == 1
    assert plan(graph, Options(prepack=0)).packing is None
    assert plan(graph, fusion=False).packing is None


@pytest.mark.parametrize("limit", [None, 1 << 20])
def test_what_would_be_a_kernel_of_every_call_is_packed(limit: int | None) -> None:
    """Attention's bias, which is gathered from a table, has more bytes than it is made of."""
    graph = fg.Graph("g", "bfloat16")
    q, k, v = (graph.tensor(name, (2, 4, 512, 64)) for name in "qkv")
    table = graph.tensor("table", (32, 4), parameter=True)
    buckets = graph.constant(np.random.default_rng(0).integers(0, 32, (512, 512)), "buckets")
    bias = graph.gather(table, buckets, axis=0).transpose(2, 0, 1).reshape(1, 4, 512, 512)
    graph.output(graph.sdpa(q, k, v, bias=bias, attn_scale=0.125), name="y")
    made = plan(graph, Options(prepack=limit))
    assert (len(made.kernels), [t.shape for t in made.packed]) == (1, [(512, 512, 4)]) if limit is None else (2, [])


def test_filters_are_laid_out_once() -> None:
    def graph(parameter: bool) -> Any:
        made = fg.Graph("g", "bfloat16")
        x = made.tensor("x", (8, 64, 28, 28), layout="NHWC")
        w = made.tensor("w", (64, 64, 3, 3), parameter=parameter)
        made.output(made.conv_fprop(x, w, padding=1), name="y")
        return made

    hopper = Options(target=target("h200"))
    before, after = plan(graph(False), hopper), plan(graph(True), hopper)
    assert (len(before.kernels), len(after.kernels)) == (2, 1)
    assert names(after) == {"w aligned"}


def test_terms_of_no_dimension_are_no_biases() -> None:
    graph = fg.Graph("g")
    x = graph.tensor("x", (64, 64))
    for name, term in (("y", graph.tensor("s", (), parameter=True)), ("z", graph.constant(np.float32(1), "one"))):
        graph.output(graph.matmul(x, graph.tensor(f"w{name}", (64, 64), parameter=True)) + term, name=name)
    assert sum(n.op.name == "matmul" for n in plan(graph).simplified.nodes) == 2


def test_products_that_epilogues_go_on_with_are_not_joined() -> None:
    graph = fg.Graph("g")
    x = graph.tensor("x", (64, 64))
    a, b = (graph.matmul(x, graph.tensor(n, (64, 64), parameter=True)) for n in "ab")
    graph.output(graph.relu(a).reshape(32, 128), name="y")
    graph.output(graph.tanh(b).reshape(32, 128), name="z")
    assert plan(graph).packing is None


def test_limit() -> None:
    graph = fg.Graph("g")
    x = graph.tensor("x", (64,))
    for name, size in (("small", 64), ("large", 256)):
        w = graph.tensor(name, (size, 64), parameter=True)
        x = x + graph.cumsum(w, axis=0)[size - 32].reshape(64) + graph.reduction(w, mode="max", axes=0, keepdims=False)
    graph.output(x, name="y")
    every = plan(graph)
    assert {name for of in every.packed.values() for name in of} == {"small", "large"}
    least = min(memory(t) for t in every.packed)
    some = plan(graph, Options(prepack=every.packed_bytes - least))
    assert 0 < some.packed_bytes <= every.packed_bytes - least
    with_reason = next(iter(some.steps)).rewritten
    assert len(with_reason.graph.parameters) == 1
    assert plan(graph, Options(prepack=least - 1)).packing is None


def test_constants_are_packed_like_parameters() -> None:
    graph = fg.Graph("g")
    x = graph.tensor("x", (16, 64))
    value = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    graph.output(x @ graph.exp(graph.reduction(graph.constant(value, "w"), mode="add", axes=1)).reshape(64, 1))
    assert names(plan(graph))
    check_all([graph])


# ---- results


def test_results_are_right() -> None:
    check_all([three(), three("constants"), layer()])


def executable_of_layer() -> Any:
    return layer().compile("cpu")


def expected(x: Any, w: Any) -> Any:
    return np.asarray(x) * np.asarray(w).sum(0)


def test_changes_of_numpy_arrays_are_told() -> None:
    rng = np.random.default_rng(0)
    x, w, other = (rng.normal(size=s).astype(np.float32) for s in ((64, 16), (16, 16), (16, 16)))
    executable = executable_of_layer()
    for _ in range(2):
        np.testing.assert_allclose(executable(x, w), expected(x, w), rtol=1e-4)
        np.testing.assert_allclose(executable(x, other), expected(x, other), rtol=1e-4)
    before = expected(x, w)
    w *= 3
    np.testing.assert_allclose(executable(x, w), before, rtol=1e-4)  # nobody has told
    executable.repack()
    np.testing.assert_allclose(executable(x, w), expected(x, w), rtol=1e-4)
    assert executable.packed_bytes == 2 * 64
    del other
    assert executable.packed_bytes == 64


def test_parameters_are_not_overwritten() -> None:
    graph = fg.Graph("g")
    w = graph.tensor("w", (16,), parameter=True)
    graph.output(w + graph.tensor("x", (16,)), name="y")
    x, w = np.ones(16, np.float32), np.ones(16, np.float32)
    with pytest.raises(ArgumentError, match="is a parameter, which calls do not change"):
        graph.compile("cpu")(w, x, out=w)


def test_what_a_graph_assigns_to_is_no_parameter() -> None:
    graph = fg.Graph("g")
    state, w = (graph.tensor(n, (16, 16), parameter=True) for n in ("state", "w"))
    total = graph.reduction(state, mode="add", axes=0, keepdims=True)
    graph.assign(state[2:4], graph.reduction(w, mode="add", axes=0, keepdims=True) + 0 * state[2:4])
    graph.assign(state[:1], graph.reduction(w, mode="max", axes=0, keepdims=True))  # a packed tensor, as it is
    graph.output(total, name="total")
    assert set(plan(graph).packed.values()) == {("w",)}
    executable = graph.compile("cpu")
    rng = np.random.default_rng(0)
    s, w = (rng.normal(size=(16, 16)).astype(np.float32) for _ in range(2))
    for _ in range(2):
        before = s.copy()
        np.testing.assert_allclose(executable(s, w), before.sum(0, keepdims=True), rtol=1e-4, atol=1e-5)
        before[2:4], before[:1] = w.sum(0), w.max(0)
        np.testing.assert_allclose(s, before, rtol=1e-4, atol=1e-5)


def test_torch_counts_versions() -> None:
    torch = pytest.importorskip("torch")
    executable = executable_of_layer()
    x, w = torch.randn(64, 16), torch.nn.Parameter(torch.randn(16, 16))

    def check() -> None:
        with torch.no_grad():
            torch.testing.assert_close(executable(x, w), x * w.sum(0), rtol=1e-4, atol=1e-4)

    check()
    with torch.no_grad():
        w.mul_(2)
    check()
    with torch.inference_mode():
        w.mul_(2)
    check()
    first, second = w.data, torch.randn(16, 16)
    for values in (second, first, second):  # the same memory again, with the same version
        w.data = values
        check()
    for _ in range(3):
        w.data = w.data * 2  # what this frees may be handed out again
        w.data = w.data * 2
        check()
    w.data.mul_(2)
    executable.repack()
    check()
    with torch.inference_mode():
        w = torch.randn(16, 16)  # without a version
        check()
        w.mul_(2)
        check()


def changed_in_place(torch: Any, w: Any) -> Any:
    """Yields after each change of a parameter by ``.data``, with pauses in which nothing changes."""
    w.data.mul_(2)
    yield
    yield
    w.data += 1
    yield
    kept = w.data
    yield
    kept[3] = 5
    yield
    part = kept.view(-1)
    del kept
    yield
    yield
    part[7] = 9
    yield
    given = torch.randn(16, 16)
    w.data = given
    yield
    given.neg_()
    yield
    flat = torch.randn(512)
    w.data = flat[256:].view(16, 16)  # a part of memory that others write
    for _ in range(packing.MOST_CHANGES + 2):
        yield
        flat.mul_(1.5)
    yield


def test_what_data_gives_away_may_be_changed() -> None:
    torch = pytest.importorskip("torch")
    executable = executable_of_layer()
    x, w = torch.randn(64, 16), torch.nn.Parameter(torch.randn(16, 16))
    with torch.no_grad():
        executable(x, w)
        for _ in changed_in_place(torch, w):
            torch.testing.assert_close(executable(x, w), x * w.sum(0), rtol=1e-4, atol=1e-4)
            if executable.packed_bytes:
                executable(x, w)
    assert executable.packed_bytes == 0  # given up when nobody could tell any more


def test_what_executables_write_is_counted() -> None:
    """Results in given arrays, and new values of inputs, may be parameters of other graphs."""
    torch = pytest.importorskip("torch")
    graph = fg.Graph("update")
    state, by = graph.tensor("state", (16, 16)), graph.tensor("by", (16, 16))
    graph.assign(state, state + by)
    graph.output(by * 2, name="y")
    update, executable = graph.compile("cpu"), executable_of_layer()
    graph = fg.Graph("made")
    graph.output(graph.exp(graph.tensor("by", (16, 16))), name="y")
    made = graph.compile("cpu")
    x, w, by = torch.randn(64, 16), torch.randn(16, 16), torch.randn(16, 16)
    for change in (lambda: None, lambda: update(w, by), lambda: made(by, out=w), lambda: made(-by, out=w)):
        change()
        torch.testing.assert_close(executable(x, w), x * w.sum(0), rtol=1e-4, atol=1e-4)


def test_parameters_are_looked_at_once_for_all_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    looked, current = [], packing.Packing.current
    monkeypatch.setattr(packing.Packing, "current", lambda *args: looked.append(args) or current(*args))
    executable, w = executable_of_layer(), torch.randn(16, 16)
    kept = []
    for _ in range(5):
        x = torch.randn(64, 16)
        kept += [x, executable(x, w)]
        torch.testing.assert_close(kept[-1], x * w.sum(0), rtol=1e-4, atol=1e-4)
    assert len(looked) == 1


def test_large_memory_that_is_handed_out_again() -> None:
    torch = pytest.importorskip("torch")
    graph = fg.Graph("g")
    x, w = graph.tensor("x", (16,)), graph.tensor("w", (4096, 16), parameter=True)
    graph.output(x + graph.reduction(w, mode="max", axes=0, keepdims=False), name="y")
    executable = graph.compile("cpu")
    x, w = torch.zeros(16), torch.nn.Parameter(torch.randn(4096, 16), requires_grad=False)
    seen = set()
    for k in range(8):
        torch.testing.assert_close(executable(x, w), w.amax(0), rtol=0, atol=0)
        seen.add(w.data_ptr())
        w.data = torch.zeros(0)
        w.data = torch.randn(4096, 16) + k
    assert len(seen) < 8  # else this would test nothing


def test_copies_are_shared_and_freed() -> None:
    x, w = np.ones((64, 16), np.float32), np.ones((16, 16), np.float32)
    one, two = executable_of_layer(), executable_of_layer()
    before = len(packing._SHARED.copies)
    one(x, w)
    epoch = packing._SHARED.epoch
    two(x, w)
    assert len(packing._SHARED.copies) == before + 1
    assert packing._SHARED.epoch == epoch  # nothing was made
    del w
    assert len(packing._SHARED.copies) == before
    assert one.packed_bytes == two.packed_bytes == 0


def test_parameters_that_change_all_the_time_are_not_packed() -> None:
    torch = pytest.importorskip("torch")
    executable = executable_of_layer()
    x, w = torch.randn(64, 16), torch.randn(16, 16)
    for _ in range(packing.MOST_CHANGES + 2):
        w.mul_(1.1)
        torch.testing.assert_close(executable(x, w), x * w.sum(0), rtol=1e-4, atol=1e-4)
    assert executable.packed_bytes == 0
    torch.testing.assert_close(executable(x, w), x * w.sum(0), rtol=1e-4, atol=1e-4)
    executable = executable_of_layer()
    for _ in range(packing.MOST_CHANGES + 2):
        executable(x, w[:])  # another object in every call
    assert executable._options.prepack == 0
    executable = executable_of_layer()
    others = [torch.randn(16, 16) for _ in range(packing.MOST_CHANGES + 2)]  # as of layers that share their code
    for w in (*others, *others):
        executable(x, w)
    assert executable.packed_bytes == 64 * len(others)


def test_without_memory_for_copies_calls_compute_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    executable = executable_of_layer()
    x, w = np.ones((64, 16), np.float32), np.ones((16, 16), np.float32)

    def fail(*_: object) -> Any:
        raise OutOfMemoryError("for a test")

    monkeypatch.setattr(packing.Copy, "__init__", fail)
    for _ in range(2):
        np.testing.assert_allclose(executable(x, w), expected(x, w))
    assert executable.packed_bytes == 0


def test_threads() -> None:
    torch = pytest.importorskip("torch")
    executable = executable_of_layer()
    x, weights = torch.randn(64, 16), [torch.randn(16, 16) for _ in range(4)]
    wrong = []

    def call(w: Any) -> None:
        for _ in range(20):
            if not torch.allclose(executable(x, w), x * w.sum(0), rtol=1e-4, atol=1e-4):
                wrong.append(w)

    threads = [threading.Thread(target=call, args=(weights[k % 4],)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- models


@pytest.mark.slow
def test_a_compiled_model_follows_its_parameters() -> None:
    torch = pytest.importorskip("torch")
    import fusegraph.torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 8)

        def forward(self, x: Any) -> Any:
            return self.out(torch.relu(self.norm(x)))

    torch._dynamo.reset()
    model = Model().eval()
    model.norm.running_var.uniform_(0.5, 2)
    fusegraph.torch.report(clear=True)
    compiled = torch.compile(model, backend="fusegraph", dynamic=False)

    def check(count: int = 4) -> None:
        x = torch.randn(count, 16)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)

    check()
    assert fusegraph.torch.report()[0].packed == 2 * 16 * 4
    assert "128 B of packed parameters" in str(fusegraph.torch.report(clear=True))
    before = len(packing._SHARED.copies)
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
    check()
    model.norm.weight = torch.nn.Parameter(torch.randn(16))
    check()
    model.norm.running_var.data = torch.rand(16) + 0.5
    check()
    check(5)  # another graph, which has the same copies
    assert len(packing._SHARED.copies) == before
    model.norm.weight.data.mul_(2)
    fusegraph.torch.repack()
    check()
    model.train()  # gradients are recorded: nothing is packed
    loss = compiled(torch.randn(4, 16)).square().mean()
    loss.backward()
    assert not fusegraph.torch.report()[-1].packed
    model.eval()
    check()
    fusegraph.torch.report(clear=True)
    torch._dynamo.reset()


@pytest.mark.parametrize("made", [layer, columns])
def test_plans_with_packing_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    cache, options = DiskCache(tmp_path), Options()
    planned = planner(True, None, cache)
    first = planned(made(), options)
    monkeypatch.setattr(plans, "plan", None)  # it is not planned again
    graph = made()
    again = planned(graph, options)
    assert again.packing is not None
    assert again.graph is graph
    assert [k.source for k in again.every_kernel] == [k.source for k in first.every_kernel]
    monkeypatch.undo()
    without = made()
    without.parameters.clear()
    assert planned(without, options).packing is None
