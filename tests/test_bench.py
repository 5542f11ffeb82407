"""bench: the board's workloads, rows and floors on a device that is pretended, the command, the picture, the tables."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import signal
import threading
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fusegraph as fg
from benchmarks import models, summary
from benchmarks.layouts import calls, layouts
from benchmarks.models import NETWORKS, Conv, Linear
from benchmarks.peers import alone, functions
from benchmarks.refused import refused
from benchmarks.workloads import SUITES, board
from codegen.arch import arch
from fusegraph.cli import main
from fusegraph.engines.reference import evaluate
from fusegraph.errors import DeviceError, FileError, NotSupportedError
from fusegraph.ops import TABLE
from fusegraph.plan import by_cost_model, plan
from fusegraph.report import artifacts, bench
from fusegraph.report.bench import Bench, Row, document
from fusegraph.report.plot import standings, svg
from fusegraph.report.time_limit import TooLong, time_limit
from fusegraph.report.workload import GraphWorkload
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
    workloads = [*board(), *models.layers(), *layouts(), *calls(), *refused()]
    names = [w.name for w in workloads]
    assert len(set(names)) == len(names) > 50
    torch = SimpleNamespace(nn=SimpleNamespace(functional=None))
    known = set(functions(torch))
    assert set(alone(torch)) <= known
    for workload in workloads:
        assert workload.torch in known, workload.name
        assert (workload.build is None) == bool(workload.missing), workload.name
        assert (workload.flops > 0) == (workload.unit in ("bf16", "tf32", "fp32")), workload.name
        graph = workload.graph()
        if graph is not None:
            assert [t.shape for t in graph.inputs] == [i.shape for i in workload.inputs]
            assert graph.outputs[0].shape == workload.output, workload.name
            counted = GraphWorkload(graph)
            assert counted.bytes == workload.bytes - workload.extra_bytes, workload.name
            assert not workload.flops or (counted.flops, counted.unit) == (workload.flops, workload.unit)
    assert sum(w.graph() is not None for w in workloads) >= 20


def test_suites():
    assert [w.name for w in SUITES["board"]()] == [w.name for k in ("memory-bound", "tensor-core") for w in SUITES[k]()]
    assert all(w.flops for w in SUITES["tensor-core"]())
    assert not any(w.flops for w in SUITES["memory-bound"]())


def test_nothing_waits_for_an_op_that_is_there():
    ops = {w.missing.split()[1] for w in board() if w.missing.startswith("no ")}
    assert not ops & set(TABLE), "their workloads can be built now"


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
        if graph is None or workload.torch not in table:
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


def test_the_draw_is_planned_for_hopper():
    """Each is one kernel, of tensor cores unless it is depthwise, and copies of what they do not read well."""
    forms: dict[str, int] = {}
    for workload in models.drawn():
        *copies, kernel = plan(workload.graph(), choose=by_cost_model(arch("sm_90a"))).kernels
        assert all(k.group.nodes[0].op.name == "identity" for k in copies), workload.name
        form = type(kernel.choice.schedule).__name__
        forms[form] = forms.get(form, 0) + 1
        assert ("depthwise" in workload.name) == (form == "RingSchedule"), workload.name
    assert set(forms) == {"WgmmaSchedule", "MmaSchedule", "RingSchedule"}
    assert forms["WgmmaSchedule"] >= 30


class TorchByNumPy:
    """As much of torch as the layers call, in float64."""

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
    """A layer with the same steps, of few elements."""
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
    """A copy takes 10, and what is timed in turns 20, 30 ... in the order of the first turn; what is timed runs."""

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
    """A device on which nothing is measured: `made` decides what engines do, `copies` the sizes that were copied."""
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

    monkeypatch.setattr(bench, "ColdTimer", Timer)
    monkeypatch.setattr(bench, "random_array", random_array)
    monkeypatch.setattr(bench, "compile_graph", compile_graph)
    monkeypatch.setattr(bench.nvrtc, "nvrtc_version", lambda: (13, 0))
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
    assert rest == [a, b] * (bench.WARMUP + 1), "in turns, some of them not counted"


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
    later = next(w for w in board() if w.name == "softmax 8192x8192 bf16")
    if later.graph() is None:
        (row,) = Bench().rows(later, [])
        assert row.note == "no softmax in the op table yet"
        assert pretended.arrays[-1] == ((8192, 8192), (8192, 1), "bfloat16")


def test_what_takes_too_long_is_passed_over(pretended, monkeypatch):
    class Slow(Executable):
        """Goes on whatever goes wrong, as a library that tries one way after another."""

        def __call__(self, *arrays, out=None):
            while True:
                try:
                    time.sleep(0.001)
                except Exception:
                    continue

    monkeypatch.setattr(bench, "LIMIT_S", 0.05)
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


# --- the command


class Fake:
    """A Bench whose rows are made up: ``plan`` maps a workload's name to its rows' medians, or to an error."""

    plan: dict[str, object] = {}  # noqa: RUF012

    def __init__(self, device: int = 0, repeats: int = 15, *, autotune: bool = False) -> None:
        self.device, self.repeats, self.autotune = device, repeats, autotune

    def rows(self, workload, peers):
        for engine in ("cuda", *peers):
            us = self.plan.get(workload.name, {}).get(engine, 20.0)
            if isinstance(us, BaseException):
                raise us
            fraction = None if us is None else 10.0 / us
            yield Row(workload.name, engine, us, 10.0, fraction, 0.05, 3.0, "why | not " * 10 if us is None else "")


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr("fusegraph.cli.bench.Bench", Fake)
    monkeypatch.setattr("fusegraph.cli.bench.environment", lambda device: dict(ENVIRONMENT))
    monkeypatch.setattr(driver, "unavailable_reason", lambda: None)
    monkeypatch.setattr(Fake, "plan", {})
    return Fake


def test_list_needs_no_gpu(capsys, monkeypatch):
    monkeypatch.setattr(driver, "unavailable_reason", lambda: "no driver")
    assert main(["bench", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [w.name for w in board()]
    assert main(["bench", "--list", "--suite", "board", "--only", "^sigmoid.*bf16$"]) == 0
    assert capsys.readouterr().out == "sigmoid(a+b*c) 64Mi bf16\n"
    assert main(["bench", "--list", str(ROOT / "examples" / "sigmoid_fma.py")]) == 0
    assert capsys.readouterr().out == "sigmoid_fma\n"


def test_no_gpu(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "unavailable_reason", lambda: "no CUDA driver; use engine='cpu', which needs no GPU")
    path = tmp_path / "r.json"
    assert main(["bench", "--json", str(path)]) == 2
    assert capsys.readouterr().err.endswith("error: bench times kernels on a GPU, and there is none: no CUDA driver\n")
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "("], "is no regular expression"),
        (["--only", "no such workload"], "is found in no workload's name"),
        (["--peers", "tpu"], "'tpu' is none of cudnn, torch, compile, compile-max, cupy, plain, none"),
        (["--suite", "other"], "there is no suite 'other'; there are: board, memory-bound, tensor-core, models"),
        (["x.py", "--suite", "board"], "give a file or --suite, not both"),
        ([str(ROOT / "examples" / "sigmoid_fma.py"), "--peers", "cudnn,torch"], "'torch' is none of cudnn, none; the"),
        (["--json", "."], "is a folder; give the name of a file"),
    ],
)
def test_mistakes(arguments, message, capsys, fake):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_rows_are_printed_and_written(capsys, fake, tmp_path):
    path, picture = tmp_path / "new" / "r.json", tmp_path / "r.svg"
    fake.plan = {"sigmoid(a+b*c) 64Mi bf16": {"cudnn": None}}
    arguments = ["--only", "^sigmoid", "--peers", "cudnn,torch", "--repeats", "7"]
    assert main(["bench", *arguments, "--json", str(path), "--plot", str(picture)]) == 0
    told = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert {k: told[k] for k in ENVIRONMENT} == ENVIRONMENT
    assert (told["repeats"], told["complete"]) == (7, True)
    assert told["options"] == "--suite board --only '^sigmoid' --peers cudnn,torch --repeats 7"
    assert [r["engine"] for r in told["rows"]] == ["cuda", "cudnn", "torch"] * 2
    assert all(set(r) == ROW_KEYS for r in told["rows"])
    assert told["rows"][4]["median_us"] is None
    assert os.listdir(path.parent) == ["r.json"]
    assert picture.read_text() == svg(told)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Pretended GPU (sm_90a), medians of 7 runs, cold L2"
    assert " ".join(lines[1].split()) == "workload engine median us floor us fraction build s host us note"
    assert " ".join(lines[2].split()) == "sigmoid(a+b*c) 64Mi fp32 cuda 20.0 10.0 0.500 0.050 3.0"
    assert "  -  " in lines[6]
    assert lines[6].endswith("...")


def test_an_interrupted_run_keeps_its_rows(capsys, fake, tmp_path):
    path = tmp_path / "r.json"
    fake.plan = {"sigmoid(a+b*c) 64Mi bf16": {"cudnn": KeyboardInterrupt()}}
    assert main(["bench", "--only", "^sigmoid", "--peers", "cudnn", "--json", str(path)]) == 130
    told = json.loads(path.read_text())
    assert (told["complete"], len(told["rows"])) == (False, 3)
    assert "the rows measured so far (3) are in" in capsys.readouterr().err


def test_the_same_command_goes_on_where_it_was_interrupted(capsys, fake, tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    first, second = "sigmoid(a+b*c) 64Mi fp32", "sigmoid(a+b*c) 64Mi bf16"
    command = ["bench", "--only", "^sigmoid", "--peers", "cudnn", "--json", str(path)]

    def interrupted() -> dict:
        path.unlink(missing_ok=True)
        fake.plan = {first: {"cuda": 7.0}, second: {"cudnn": KeyboardInterrupt()}}
        assert main(command) == 130
        fake.plan = {}
        capsys.readouterr()
        return json.loads(path.read_text())

    def ours() -> list[float]:
        return [r["median_us"] for r in json.loads(path.read_text())["rows"] if r["engine"] == "cuda"]

    interrupted()
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "1 workloads are measured already" in err
    assert " ".join(out.splitlines()[2].split()).startswith(f"{first} cuda 7.0")
    told = json.loads(path.read_text())
    assert told["complete"] is True
    assert [(r["workload"], r["engine"]) for r in told["rows"]] == [
        (name, engine) for name in (first, second) for engine in ("cuda", "cudnn")
    ]
    assert ours() == [7.0, 20.0]
    assert main(command) == 0  # a run that was not cut short is measured anew
    assert ours() == [20.0, 20.0]
    changes = [
        {"commit": "0123456789ab+"},
        {"commit": None},
        {"commit": "fedcba987654"},
        {"repeats": 3},
        {"rows": [{}]},
    ]
    for change in [*changes, {"options": "--suite board"}, {"versions": {}}]:
        path.write_text(artifacts.json_text({**interrupted(), **change}))
        if str(change.get("commit")).endswith("+"):  # the same changes, as far as anybody knows
            monkeypatch.setitem(ENVIRONMENT, "commit", change["commit"])
        assert main(command) == 0
        monkeypatch.setitem(ENVIRONMENT, "commit", "0123456789ab")
        assert ours() == [20.0, 20.0], change
    for text in ("", "[]", '{"complete": false}'):
        path.write_text(text)
        assert main(command) == 0
    interrupted()
    monkeypatch.setitem(ENVIRONMENT, "date", "2026-01-03")
    assert main(command) == 0
    assert ours() == [7.0, 20.0]
    interrupted()
    fake.plan = {first: {"cuda": None}}
    path.write_text(path.read_text().replace('"median_us": 7.0', '"median_us": null'))
    assert main(command) == 1
    assert f"1 of 2 workloads do not run: {first}" in capsys.readouterr().err


def test_a_workload_of_ours_that_fails(capsys, fake, tmp_path):
    path = tmp_path / "r.json"
    fake.plan = {
        "sigmoid(a+b*c) 64Mi fp32": {"cuda": None},
        "sigmoid(a+b*c) 64Mi bf16": {"cuda": DeviceError("CUDA_ERROR_OUT_OF_MEMORY")},
    }
    assert main(["bench", "--only", "^sigmoid", "--peers", "none", "--json", str(path)]) == 1
    assert "2 of 2 workloads do not run: sigmoid(a+b*c) 64Mi fp32, sigmoid" in capsys.readouterr().err
    rows = json.loads(path.read_text())["rows"]
    assert (rows[1]["floor_us"], rows[1]["note"]) == (None, "CUDA_ERROR_OUT_OF_MEMORY")


def test_a_file(capsys, fake, tmp_path):
    path = tmp_path / "r.json"
    file = str(ROOT / "examples" / "sigmoid_fma.py")
    assert main(["bench", file, "--json", str(path), "--commit", "fedcba987654"]) == 0
    told = json.loads(path.read_text())
    assert (told["commit"], told["options"]) == ("fedcba987654", "sigmoid_fma.py --peers cudnn")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [["sigmoid_fma", "cuda"], ["sigmoid_fma", "cudnn"]]


def test_files_are_replaced_whole(tmp_path, monkeypatch):
    path = artifacts.prepare_file(tmp_path / "a" / "b.json")
    artifacts.write_file(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(FileError, match=r"b\.json cannot be written: No space left"):
        artifacts.write_file(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == ["b.json"]


# --- the picture and the tables


def result() -> dict:
    rows = [
        Row("one & <two>", "cuda", 10.0, 9.5, 0.95, 0.1, 4.0, "k"),
        Row("one & <two>", "cudnn", 12.5, 9.5, 0.76, 0.3, 9.0, "engine"),
        Row("one & <two>", "torch", 2500.0, 9.5, 0.0038, 0.3, 9.0, "eager"),
        Row("one & <two>", "plain", 9.0, 9.5, 1.06, 0.3, 9.0, "part"),
        Row("alone", "cuda", 8.0, 10.0, 1.25, 0.3, 6.0, "k"),
        Row("alone", "cudnn", None, 10.0, None, None, None, "refused"),
        Row("later", "cuda", None, 5.0, None, None, None, "not in the op table yet"),
        Row("later", "torch", 7.0, 5.0, 0.71, 0.3, 9.0, "eager"),
    ]
    return document(ENVIRONMENT, "--suite memory-bound", 15, rows, complete=True)


def test_standings():
    first, alone, later = standings(result()["rows"])
    assert (first.ours["median_us"], first.peer["engine"], first.floor_us) == (10.0, "cudnn", 9.5)
    assert first.part["median_us"] == 9.0  # a part is no peer, be it the fastest
    assert (alone.ours["median_us"], alone.peer, alone.part) == (8.0, None, None)
    assert (later.ours, later.peer["engine"]) == (None, "torch")


def test_the_picture():
    text = svg(result())
    assert text == svg(json.loads(artifacts.json_text(result())))
    tree = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    words = [t.text for t in tree.iter(f"{space}text")]
    assert "one & <two>" in words
    assert "10.0 us" in words
    assert "12.5 us  cudnn" in words
    assert "floor" in words
    assert "later" not in words
    assert "1 of 3 workloads are not shown: fusegraph does not run them." in words
    bars = [r for r in tree.iter(f"{space}rect") if float(r.get("height")) == 11 and float(r.get("y")) > 40]
    ours = [float(r.get("width")) for r in bars if r.get("class") == "ours"]
    (peer,) = [float(r.get("width")) for r in bars if r.get("class") == "peer"]
    assert ours[0] / ours[1] == pytest.approx(0.95 / 1.25, rel=1e-2)
    assert peer / ours[0] == pytest.approx(0.76 / 0.95, rel=1e-2)
    (floor,) = (line for line in tree.iter(f"{space}line") if line.get("class") == "floor")
    left = float(bars[0].get("x"))
    assert (float(floor.get("x1")) - left) / ours[1] == pytest.approx(1 / 1.25, rel=1e-2)
    width = float(tree.get("width"))
    assert all(left + w < width for w in ours)


def test_a_run_in_a_sentence(tmp_path, capsys):
    told = result()
    assert summary.ratios(told["rows"]) == {"one & <two>": 1.25, "later": 0.0}
    said = "Over the one row with a peer the ratio's geometric mean is 1.25, the worst 1.25 (one & <two>)"
    assert summary.sentence(told["rows"]) == f"{said}; 1 more runs only on peers."
    rows = [
        {"workload": name, "engine": engine, "median_us": us, "floor_us": 1.0}
        for name, *times in (
            ("a", 10.0, 20.0, 30.0),
            ("b", 10.0, 5.0, None),
            ("c", 10.0, 90.0, 80.0),
            ("d", 1.0, None, None),
        )
        for engine, us in zip(("cuda", "cudnn", "torch"), times)
    ]
    assert summary.ratios(rows) == {"a": 2.0, "b": 0.5, "c": 8.0}
    said = "Over the 3 rows with a peer the ratio's geometric mean is 2.00, the worst 0.50 (b)."
    assert summary.sentence(rows) == said
    assert summary.sentence([]) == summary.sentence(rows[-3:]) == ""
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"rows": rows}))
    assert summary.main([str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: {said}\n  0.50  b\n"
    assert summary.main([]) == 2


def test_the_picture_of_nothing():
    nothing = document(ENVIRONMENT, "--suite memory-bound", 15, [], complete=True)
    assert ElementTree.fromstring(svg(nothing)).tag.endswith("svg")


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """tools/readme.py over a README and results of its own."""
    module = runpy.run_path(str(ROOT / "tools" / "readme.py"))
    readme, results = tmp_path / "README.md", tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    readme.write_text("before\n<!-- generated: measurements -->\nold\n<!-- end -->\nafter\n")
    names = module["main"].__globals__
    monkeypatch.setitem(names, "README", readme)
    monkeypatch.setitem(names, "RESULTS", results)
    monkeypatch.setitem(names, "PAGES", {readme: names["readme_makers"]})  # no other page is written
    return SimpleNamespace(main=module["main"], readme=readme, results=results)


def test_tables_without_results(tool):
    assert tool.main(["--check"]) == 1
    assert tool.main([]) == 0
    assert "Nothing has been measured yet" in tool.readme.read_text()
    assert tool.main(["--check"]) == 0


def test_tables(tool, capsys):
    path = tool.results / "gpu.json"
    path.write_text(artifacts.json_text(result()))
    assert tool.main([]) == 0
    text = tool.readme.read_text()
    assert text.startswith("before\n<!-- generated")
    assert text.endswith("<!-- end -->\nafter\n")
    rows = [re.split(r" \| ", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")]
    assert rows[2:] == [
        ["one & <two>", "10.0", "cudnn", "12.5", "1.25", "0.95", "9.0"],
        ["alone", "8.0", "-", "-", "-", "1.25", "-"],
        ["later", "-", "torch", "7.0", "-", "-", "-"],
    ]
    for word in ("Pretended GPU, 2026-01-02", "`0123456789ab`", "driver 13.0", "fusegraph 0.1.0", "results/gpu.svg",
                 "(benchmarks/results/gpu.json)", "--suite memory-bound --json benchmarks/results/gpu.json", "0.20 s",
                 "5.0 us", summary.sentence(result()["rows"])):  # fmt: skip
        assert word in text
    assert "torch None" not in text
    assert (tool.results / "gpu.svg").read_text() == svg(result())
    assert tool.main(["--check"]) == 0
    capsys.readouterr()
    (tool.results / "gpu.svg").write_text("drawn by hand\n")
    assert tool.main(["--check"]) == 1
    assert "-drawn by hand" in capsys.readouterr().out
    path.unlink()
    assert tool.main(["--check"]) == 1
    assert "gpu.svg: there is no gpu.json" in capsys.readouterr().out
    assert tool.main([]) == 0
    assert os.listdir(tool.results) == []


def test_the_table_of_calls(tool):
    rows = [
        Row("w", "cuda", 3.0, 3.0, 1.0, 0.0456, 6.04, "k", cached_s=0.0019, replay_us=2.2),
        Row("w", "cudnn", 9.0, 3.0, 0.33, 0.25, 10.3, "plan"),
        Row("w", "cupy", None, 3.0, None, None, None, "not installed"),
    ]
    told = document(ENVIRONMENT, "--suite calls", 15, rows, complete=True)
    (tool.results / "gpu.json").write_text(artifacts.json_text(told))
    assert tool.main([]) == 0
    text = tool.readme.read_text()
    assert "| workload | engine | build s | from the disk cache s | host us a call | replay us |" in text
    assert "| w | cuda | 0.046 | 0.0019 | 6.0 | 2.2 |" in text
    assert "| w | cudnn | 0.250 | - | 10.3 | - |" in text
    assert "| w | cupy |" not in text


#: As cuDNN says it.
NO_ENGINE = (
    "no engine proposed a plan for this graph (the backend declined: No valid engine configs for _ {...} "
    "Warning: CUDNN_STATUS_NOT_SUPPORTED_LAYOUT; Reason: !(tensor) Warning: CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH; "
    "Warning: CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN"
)


def test_the_table_of_cudnns_answers(tool):
    rows = [
        Row("softmax", "cuda", 20.0, 18.0, 0.9, 0.1, 5.0, "k", kernels=1),
        Row("softmax", "cudnn", None, 18.0, None, None, None, "cuDNN's graph API has no softmax ('out')"),
        Row("relu|mul", "cuda", 30.0, 15.0, 0.5, 0.1, 5.0, "k, l", kernels=2),
        Row("relu|mul", "cudnn", None, 15.0, None, None, None, NO_ENGINE),
        Row("norm", "cuda", 30.0, 15.0, 0.5, 0.1, 5.0, "k", kernels=1),
        Row("norm", "cudnn", None, 15.0, None, None, None, "proposes plans, but none of them builds and runs: NVRTC"),
        Row("long", "cuda", 30.0, 15.0, 0.5, 0.1, 5.0, "k", kernels=1),
        Row("long", "cudnn", None, 15.0, None, None, None, "word " * 50),
        Row("taken", "cuda", 40.0, 10.0, 0.25, 0.1, 5.0, "k"),
        Row("taken", "cudnn", 50.0, 10.0, 0.2, 0.1, 5.0, "eng0", kernels=1),
        Row("failed", "cuda", None, 10.0, None, None, None, "a defect"),
    ]
    told = document(ENVIRONMENT, "--suite refused --peers cudnn", 15, rows, complete=True)
    (tool.results / "gpu.json").write_text(artifacts.json_text(told))
    assert tool.main([]) == 0
    lines = [line for line in tool.readme.read_text().splitlines() if line.startswith("| ")]
    assert lines == [
        "| graph | cuDNN's answer | kernels here | fusegraph us | floor us | of the floor |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| softmax | refused: cuDNN's graph API has no softmax ('out') | 1 | 20.0 | 18.0 | 0.90 |",
        "| relu\\|mul | refused: no valid engine configs (not supported: layout, graph pattern) | 2 | 30.0 | 15.0 "
        "| 0.50 |",
        "| norm | refused: proposes plans, but none of them builds and runs | 1 | 30.0 | 15.0 | 0.50 |",
        "| long | refused: " + "word " * 24 + "... | 1 | 30.0 | 15.0 | 0.50 |",
        "| taken | runs: 50.0 us | - | 40.0 | 10.0 | 0.25 |",
        "| failed | not asked | - | - | - | - |",
    ]


#: Graphs that cuDNN refuses and that are two kernels: two products in a row.
SEVERAL = {"conv 3x3(relu(conv 3x3)) 64x64x56x56 NHWC": 2, "gelu(x @ up) @ down 8192x1024->4096->1024": 2}


def test_what_cudnn_refuses_takes_few_kernels():
    kernels = {w.name: len(plan(w.graph(), choose=by_cost_model(arch("sm_90a"))).kernels) for w in refused()}
    assert kernels == {name: SEVERAL.get(name, 1) for name in kernels}


def test_several_results_of_a_device(tool):
    """Each file has its table, its picture and its command, in the order of their names."""
    rest = [row for row in result()["rows"] if row["engine"] != "plain"]
    other = {**result(), "rows": rest, "options": "--suite tensor-core --only 'conv 3x3'"}
    (tool.results / "gpu-b.json").write_text(artifacts.json_text(other))
    (tool.results / "gpu-a.json").write_text(artifacts.json_text(result()))
    old = {k: v for k, v in result().items() if k != "options"}
    (tool.results / "gpu-c.json").write_text(artifacts.json_text(old))
    assert tool.main([]) == 0
    text = tool.readme.read_text()
    places = [text.index(f"--json benchmarks/results/gpu-{name}.json") for name in "abc"]
    assert places == sorted(places)
    assert "bench --suite tensor-core --only 'conv 3x3' --json benchmarks/results/gpu-b.json" in text
    assert "bench --suite board --json benchmarks/results/gpu-c.json" in text
    assert text.count("**Pretended GPU, 2026-01-02**") == text.count("| one & <two> |") == 3
    assert text.count("product alone us") == 2  # where there is such a row
    assert sorted(os.listdir(tool.results)) == [f"gpu-{name}.{kind}" for name in "abc" for kind in ("json", "svg")]
    assert tool.main(["--check"]) == 0


def test_runs_cut_short_make_no_table(tool):
    path = tool.results / "gpu.json"
    path.write_text(artifacts.json_text({**result(), "complete": False}))
    with pytest.raises(ValueError, match=r"gpu\.json is of a run that was interrupted"):
        tool.main([])


def test_committed_results_are_whole():
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        told = json.loads(path.read_text())
        assert told["complete"] is True, path.name
        assert set(told) - {"options"} == {*ENVIRONMENT, "repeats", "complete", "rows"}, path.name
        assert not str(told["commit"]).endswith("+"), f"{path.name} is of a checkout with changes"
        for row in told["rows"]:
            assert set(row) | {"kernels"} == ROW_KEYS  # which the first results did not count
            if row["median_us"] is not None:
                assert row["floor_fraction"] == pytest.approx(row["floor_us"] / row["median_us"])


def test_committed_results_of_torch_are_whole():
    folder = ROOT / "benchmarks" / "results" / "torch"
    told = json.loads((folder / "fusion.json").read_text())
    assert {row["model"] for row in told["rows"]} == {"ResNet-50", "MobileNetV3-Large", "ViT-B/16 block", "GPT-2 block"}
    for row in told["rows"]:
        assert row["kernels"] < row["operators"]
        assert row["bytes_moved"] < row["bytes_unfused"]
        assert not row["left"]
    for path in set(folder.glob("*.json")) - {folder / "fusion.json"}:
        timed = json.loads(path.read_text())
        assert timed["complete"] is True, path.name
        assert not str(timed["commit"]).endswith("+"), f"{path.name} is of a checkout with changes"


# --- on a GPU


@pytest.mark.gpu
def test_on_the_gpu(tmp_path):
    path = tmp_path / "r.json"
    assert main(["bench", str(ROOT / "examples" / "sigmoid_fma.py"), "--peers", "none", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert 1 < row["median_us"] < 1000
    assert 0.1 < row["floor_fraction"] < 2
    assert 0 < row["build_s"] < 5
