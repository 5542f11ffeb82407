"""bench: the board's workloads, rows and floors on a device that is pretended, the command, the picture, the tables."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fusegraph as fg
from codegen.target import target
from fusegraph.bench import attention, measure, models
from fusegraph.bench.layouts import calls, layouts
from fusegraph.bench.measure import Bench
from fusegraph.bench.models import NETWORKS, Conv, Linear
from fusegraph.bench.peers import alone, functions
from fusegraph.bench.refused import refused
from fusegraph.bench.results import Row
from fusegraph.bench.time_limit import TooLong, time_limit
from fusegraph.bench.workload import GraphWorkload
from fusegraph.bench.workloads import SUITES, board
from fusegraph.cli import main
from fusegraph.engines.reference import evaluate
from fusegraph.errors import NotSupportedError
from fusegraph.plan import by_cost_model, plan
from fusegraph.runtime import driver

ROOT = Path(__file__).parent.parent
ROW_KEYS = {field.name for field in fields(Row)}
ENVIRONMENT = {
    "device": "Pretended GPU",
    "arch": "sm_90a",
    "driver": "13.0",
    "python": "3.11.0",
    "versions": {"fusegraph": "0.1.0", "torch": None},
    "commit": "0123456789ab",
    "date": "2026-01-02",
}


# --- the board


def test_every_workload_is_whole():
    more = [w for w in attention.attention() if w.name not in {b.name for b in board()}]
    workloads = [*board(), *more, *models.layers(), *layouts(), *calls(), *refused()]
    names = [w.name for w in workloads]
    assert len(set(names)) == len(names) > 50
    torch = SimpleNamespace(nn=SimpleNamespace(functional=None))
    known = set(functions(torch))
    assert set(alone(torch)) <= known
    for workload in workloads:
        assert workload.torch in known, workload.name
        assert (workload.flops > 0) == (workload.unit in ("bf16", "tf32", "fp32")), workload.name
        graph = workload.graph()
        assert [t.shape for t in graph.inputs] == [i.shape for i in workload.inputs]
        assert graph.outputs[0].shape == workload.output, workload.name
        counted = GraphWorkload(graph)
        assert counted.bytes == workload.bytes - workload.extra_bytes, workload.name
        told = (0, "") if workload.torch == "sdpa_packed" else (workload.flops, workload.unit)
        assert not workload.flops or (counted.flops, counted.unit) == told
        assert all(len(i.values) == math.prod(i.shape) for i in workload.inputs if i.values)


def test_products_of_8_bits_are_whole():
    known = functions(SimpleNamespace(nn=SimpleNamespace(functional=None)))
    for workload in SUITES["scaled"]():
        (m, k), (_, n) = (i.shape for i in workload.inputs[:2])
        assert (workload.flops, workload.unit, workload.torch in known) == (2 * m * n * k, "fp8", True)
        graph = workload.graph()
        assert graph.outputs[0].shape == workload.output
        assert GraphWorkload(graph).bytes == workload.bytes


def test_sparse_products_count_what_is_kept():
    known = functions(SimpleNamespace(nn=SimpleNamespace(functional=None)))
    for workload in SUITES["sparse"]():
        (m, k), (n, _) = (i.shape for i in workload.inputs)
        assert (workload.flops, workload.unit, workload.torch in known) == (m * n * k, "bf16", True)
        graph = workload.graph()
        assert {t.name for t in graph.parameters} == {"w"}
        assert graph.outputs[0].shape == workload.output


def test_suites():
    assert [w.name for w in SUITES["board"]()] == [w.name for k in ("memory-bound", "tensor-core") for w in SUITES[k]()]
    assert all(w.flops for w in SUITES["tensor-core"]())
    assert not any(w.flops for w in SUITES["memory-bound"]())


def test_products_alone_are_what_they_say():
    """Of every workload with a product and something after it there is the product alone, with the same operands."""
    seen = []

    class Functional:
        def conv2d(self, x, w, bias=None, **how):
            seen.append(("conv2d", x.name, w.name, bias, how.get("stride", 1), how["padding"], how.get("groups", 1)))

    class Operand:
        def __init__(self, name, shape):
            self.name, self.shape = name, shape

        def __matmul__(self, other):
            seen.append(("matmul", self.name, other.name))

    table = alone(SimpleNamespace(nn=SimpleNamespace(functional=Functional())))
    for workload in [*board(), *models.drawn()]:
        graph = workload.graph()
        if workload.torch not in table:
            continue
        before = len(seen)
        table[workload.torch](*(Operand(i.name, i.shape) for i in workload.inputs))
        nodes = [n for n in graph.nodes if n.op.name in ("matmul", "conv_fprop")]
        assert len(seen) - before == len(nodes)
        for node, call in zip(nodes, seen[before:]):
            assert call[:3] == ({"conv_fprop": "conv2d"}.get(node.op.name, "matmul"), *(t.name for t in node.inputs))
            if node.op.name == "conv_fprop":
                (stride, _), ((padding, _), _) = node.attributes["stride"], node.attributes["padding"]
                assert call[3:] == (None, stride, padding, node.attributes["groups"])
    assert len(seen) > 40


def test_the_draw():
    """The same 40 everywhere and always: the ratios of another draw say nothing about those measured before."""
    drawn = [w.name for w in models.drawn()]
    assert len(set(drawn)) == len(drawn) == 40
    for network in NETWORKS:
        found = [[w.name for w in network.variants(layer) if w.name in drawn] for layer in network.layers]
        assert sum(map(bool, found)) == sum(map(len, found)) == network.draw, "of each layer at most one"
    text = "\n".join(drawn)
    assert sha256(text.encode()).hexdigest()[:16] == "696a8ad9f59bf126", text
    assert all(w.bytes <= 4e9 for w in models.layers())


def test_layers_are_those_of_the_networks():
    """Multiplications of a pass, with as many of each layer as there are, are those published (without norms)."""
    resnet = [1, *(1, 3, 1, 3, 2), *(n for d in (4, 6, 3) for n in (1, 1, 1, d, d - 1, d - 1)), 1]
    convnext = [1, *(3, 3, 3), *(n for d in (3, 9, 3) for n in (1, d, d, d)), 1]
    vgg = [1, 1, 1, 1, 1, 2, 1, 2, 3, 1, 1, 1]
    # Of a language model those of a token are its parameters without the table of embeddings.
    gpt2 = [12, 12, 12, 12, 1, *[0] * 5]
    llama = [32, 64, 32, 32, 32, 32, 1, *[0] * 7]
    published = {
        "ResNet-50": (resnet, 4.09e9),
        "ConvNeXt-T": (convnext, 4.46e9),
        "VGG-16": (vgg, 15.47e9),
        "GPT-2": (gpt2, 124.4e6 - 1024 * 768),  # positions; its embeddings are the head's weight
        "Llama-8B": (llama, 8.03e9 - 128256 * 4096),
    }
    for network in NETWORKS:
        if network.name == "odd":
            continue
        counts, expected = published[network.name]
        firsts = [next(iter(network.variants(layer))) for layer in network.layers]
        flops = [GraphWorkload(w.graph()).flops for w in firsts]
        total = sum(count * f / 2 for count, f in zip(counts, flops, strict=True))
        assert total == pytest.approx(expected, rel=5e-3), network.name


@pytest.mark.slow
def test_the_draw_is_planned_for_hopper():
    """Each is one kernel, of tensor cores unless it is depthwise or has few odd rows, and copies of what they do not
    read well.
    """
    forms: dict[str, int] = {}
    for workload in models.drawn():
        *copies, kernel = plan(workload.graph(), choose=by_cost_model(target("sm_90a"))).kernels
        assert all(k.group.nodes[0].op.name == "identity" for k in copies), workload.name
        form = type(kernel.choice.schedule).__name__
        forms[form] = forms.get(form, 0) + 1
        assert ("depthwise" in workload.name) == (form == "SlideSchedule"), workload.name
    assert set(forms) == {"WgmmaSchedule", "MmaSchedule", "SlideSchedule", "StemSchedule", "StreamSchedule"}
    assert forms["WgmmaSchedule"] >= 30


class TorchByNumPy:
    """Those torch functions that the layers call, in float64 by NumPy."""

    def __init__(self) -> None:
        self.nn = SimpleNamespace(functional=self)

    def addmm(self, bias, a, b):
        return bias + a @ b

    def relu(self, y):
        return np.maximum(y, 0)

    def silu(self, y):
        return y / (1 + np.exp(-y))

    def gelu(self, y, approximate="none"):
        if approximate == "tanh":
            return y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        return y / 2 * (1 + np.vectorize(math.erf)(y / np.sqrt(2)))

    def conv2d(self, x, w, bias, stride, padding, groups):
        side = ((0, 0), (0, 0), (padding, padding), (padding, padding))
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, side), w.shape[2:], (2, 3))
        n, _, height, width, *taps = windows[:, :, ::stride, ::stride].shape
        windows = windows[:, :, ::stride, ::stride].reshape(n, groups, -1, height, width, *taps)
        y = np.einsum("ngchwrs,gkcrs->ngkhw", windows, w.reshape(groups, -1, *w.shape[1:])).reshape(
            n, -1, height, width
        )
        return y if bias is None else y + bias[:, None, None]


def small(layer: Conv | Linear) -> Conv | Linear:
    """Returns a layer with the same steps on few elements."""
    if isinstance(layer, Linear):
        return replace(layer, rows=3, k=5, n=4)
    if layer.groups > 1:
        return replace(layer, channels=4, groups=4, filters=4, size=9)
    return replace(layer, channels=3, filters=4, size=2 * layer.taps + 1)


def test_torch_code_of_layers_computes_what_their_graphs_do():
    torch = TorchByNumPy()
    tables = functions(torch), alone(torch)
    every = {w.torch: w for n in NETWORKS for layer in n.layers for w in [small(layer).workload(n.name, 2, "bf16")]}
    assert set(every) == {w.torch for w in models.layers()}
    rng = np.random.default_rng(0)
    for name, workload in every.items():
        graph = workload.graph()
        arrays = [rng.standard_normal(i.shape).astype(t.dtype.numpy) for i, t in zip(workload.inputs, graph.inputs)]
        values = evaluate(graph, {i.name: a for i, a in zip(workload.inputs, arrays)})
        operands = [a.astype(np.float64) for a in arrays]
        np.testing.assert_allclose(tables[0][name](*operands), values[graph.outputs[0]], rtol=1e-9, err_msg=name)
        if "+" in name:
            product = values[graph.nodes[0].output]
            np.testing.assert_allclose(tables[1][name](*operands), product, rtol=1e-9, err_msg=name)


def test_floors_of_any_graph():
    graph = fg.Graph("g", io_dtype="bfloat16")
    x, w = graph.tensor("x", (2, 8, 6, 6)), graph.tensor("w", (4, 4, 3, 3))
    row = graph.tensor("row", (5, 6), strides=(0, 1))
    y = graph.conv_fprop(x, w, padding=1)
    table = graph.constant(np.ones((6,), np.float32))
    graph.output(graph.matmul(y, graph.tensor("m", (6, 5))) * 2.0, name="y")
    graph.output(row + table, name="z")
    workload = GraphWorkload(graph)
    assert workload.flops == 2 * (2 * 4 * 36) * 36 + 2 * (2 * 4 * 6 * 5) * 6
    assert workload.unit == "bf16"
    read = 2 * 8 * 36 + 4 * 4 * 9 + 6 + 6 * 5
    assert workload.bytes == 2 * read + 4 * 6 + 2 * (2 * 4 * 6 * 5) + 4 * 5 * 6
    ints = fg.Graph("ints", io_dtype="int8")
    ints.output(ints.matmul(ints.tensor("a", (4, 4)), ints.tensor("b", (4, 4))))
    assert (GraphWorkload(ints).flops, GraphWorkload(ints).unit) == (0, "")


# --- rows


class Timer:
    """A stopwatch that gives 10 to copies, and 20, 30 ... to functions timed in turns in the order of their first turn.

    All functions run.
    """

    def __init__(self, device: int = 0) -> None:
        self.times, self.order = {}, []

    def median(self, run, repeats=15, warmup=3):
        run()
        return 10.0

    def reset(self):
        self.times = {}

    def once(self, run):
        run()
        self.order.append(run)
        return self.times.setdefault(run, 20.0 + 10 * len(self.times))


class Executable:
    def __init__(self, error=None):
        self.plan = SimpleNamespace(kernels=(SimpleNamespace(name="k1"), SimpleNamespace(name="k2")))
        self.plans = [SimpleNamespace(name="engine 3")]
        self.error = error

    def __call__(self, *arrays, out=None):
        if self.error is not None:
            raise self.error
        return "out"

    def record(self, *arrays, out):
        return out, lambda: None


@pytest.fixture
def pretended(monkeypatch):
    """Simulates a device: `made` decides what engines do, `copies` collects the sizes that were copied."""
    facts = SimpleNamespace(made={}, copies=[], arrays=[], caches=[])
    buffer = SimpleNamespace(pointer=1)

    def random_array(shape, strides, dtype, device, seed=0):
        facts.arrays.append((tuple(shape), tuple(strides), dtype.name))
        return buffer

    def compile_graph(graph, engine, **options):
        made = facts.made.get(engine, Executable())
        facts.caches += [options["cache"]] if "cache" in options else []
        if isinstance(made, Exception):
            raise made
        return made

    monkeypatch.setattr(measure, "ColdTimer", Timer)
    monkeypatch.setattr(measure, "random_array", random_array)
    monkeypatch.setattr(measure, "compile_graph", compile_graph)
    monkeypatch.setattr(measure.nvrtc, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(driver, "allocate", lambda nbytes, device=0: buffer)
    monkeypatch.setattr(driver, "synchronize", lambda stream=0, device=0: None)
    monkeypatch.setattr(driver, "copy_on_device", lambda to, source, nbytes, device=0: facts.copies.append(nbytes))
    return facts


def add(dtype: str = "float32") -> GraphWorkload:
    graph = fg.Graph("add", io_dtype=dtype)
    graph.output(graph.tensor("a", (6, 4), strides=(1, 6)) + graph.tensor("b", (4,)), name="y")
    return GraphWorkload(graph)


def test_rows(pretended):
    run = Bench(repeats=2)
    ours, cudnn = run.rows(add(), ["cudnn"])
    assert pretended.copies == [2 * (24 + 4 + 24)]  # half of the bytes are read, half written
    assert pretended.arrays[1:] == [((6, 4), (1, 6), "float32"), ((4,), (1,), "float32")]
    assert (ours.workload, ours.engine, ours.median_us, ours.floor_us, ours.floor_fraction) == (
        "add",
        "cuda",
        20,
        10,
        0.5,
    )
    assert (ours.note, cudnn.note) == ("k1, k2", "engine 3")
    assert (ours.kernels, cudnn.kernels) == (2, 1)
    assert ours.build_s >= 0
    assert ours.host_us > 0
    assert ours.cached_s > 0
    assert ours.replay_us > 0
    assert (cudnn.cached_s, cudnn.replay_us) == (None, None)
    first, *again = pretended.caches
    assert len(again) == 3
    assert {c.folder for c in again} == {first.folder}, "what the first build left on disk"
    assert len({id(c) for c in pretended.caches}) == 4, "and not in memory"
    assert cudnn.floor_fraction == pytest.approx(1 / 3)
    assert run.copy_us(add().bytes) == 10.0
    assert len(pretended.copies) == 1, "measured once"
    a, b, *rest = run.timer.order
    assert a is not b
    assert rest == [a, b] * (measure.WARMUP + 1), "in turns, some of them not counted"


def test_packed_batches_through_cudnn(pretended, monkeypatch):
    """By its frontend, with the offsets that the workload has; the arrays of the others are random."""
    (packed, *_) = (w for w in attention.attention() if w.torch == "sdpa_packed")
    seen = []

    def ragged(workload, arrays, timer):
        seen.append((workload.name, len(arrays), arrays[3]))
        return lambda: None, "engine 2"

    monkeypatch.setattr(measure, "random_array", lambda *_, **__: SimpleNamespace(pointer=1, dtype=fg.int32))
    monkeypatch.setattr(measure, "to_device", lambda values, device: values.tolist())
    monkeypatch.setattr("fusegraph.bench.cudnn_peers.functions", lambda: {"sdpa_packed": ragged})
    run = Bench(repeats=1)
    monkeypatch.setattr(run, "flops_per_us", lambda unit: None)
    ours, cudnn = run.rows(packed, ["cudnn"])
    assert (ours.note, cudnn.note, cudnn.kernels) == ("k1, k2", "engine 2", 1)
    ((name, count, offsets),) = seen
    assert (name, count, offsets[:3], offsets[-1]) == (packed.name, 4, [0, 4096, 4608], 16384)


def test_rows_of_what_does_not_run(pretended, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    pretended.made["cudnn"] = NotSupportedError("cuDNN refuses graph 'add' (add 'y')", "no plans\n for it")
    pretended.made["cuda"] = Executable(ZeroDivisionError("a defect"))
    rows = list(Bench().rows(add(), ["cudnn", "torch", "cupy"]))
    assert [r.median_us for r in rows] == [None] * 4
    assert {r.floor_us for r in rows} == {10.0}
    assert rows[0].note == "ZeroDivisionError: a defect"
    assert rows[1].note == "no plans for it"
    assert rows[2].note.startswith("torch is not installed")


def test_what_takes_too_long_is_passed_over(pretended, monkeypatch):
    class Slow(Executable):
        """A function that continues after any error, as a library that tries one way after another."""

        def __call__(self, *arrays, out=None):
            while True:
                try:
                    time.sleep(0.001)
                except Exception:
                    continue

    monkeypatch.setattr(measure, "LIMIT_S", 0.05)
    pretended.made["cudnn"] = Slow()
    before = signal.getsignal(signal.SIGALRM)
    rows = list(Bench().rows(add(), ["cudnn", "cupy"]))
    assert (rows[0].median_us, rows[1].median_us) == (20.0, None)
    assert rows[1].note == "not built within 0.05 s"
    assert rows[2].note == "no CuPy version of this workload"
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    pretended.made["cudnn"] = Executable()
    monkeypatch.setattr(Timer, "once", lambda self, run: time.sleep(0.01) or 1.0)
    for row in Bench(repeats=15).rows(add(), ["cudnn"]):
        assert row.note == "not timed within 0.05 s", "all turns together"


def test_limits():
    with time_limit(60):
        pass
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    with pytest.raises(ZeroDivisionError), time_limit(60):
        raise ZeroDivisionError
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    with pytest.raises(TooLong, match=r"not done after 0\.01 s"), time_limit(0.01):
        time.sleep(5)
    slept = []

    def elsewhere():
        with time_limit(0.001):
            time.sleep(0.02)
            slept.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert slept


def test_the_floor_of_arithmetic(pretended):
    run = Bench()
    run._rates["bf16"] = 1e6
    matmul = next(w for w in board() if w.name == "matmul 8192x8192x8192 bf16")
    assert run.floor_us(matmul) == pytest.approx(2 * 8192**3 / 1e6)
    run._rates["bf16"] = 1e18
    assert run.floor_us(matmul) == 10.0
    run._rates["bf16"] = None  # no torch to measure it with
    assert run.floor_us(matmul) == 10.0


# --- on a GPU


@pytest.mark.gpu
def test_on_the_gpu(tmp_path):
    path = tmp_path / "r.json"
    assert main(["bench", str(ROOT / "examples" / "sigmoid_fma.py"), "--peers", "none", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert 1 < row["median_us"] < 1000
    assert 0.1 < row["floor_fraction"] < 2
    assert 0 < row["build_s"] < 5
