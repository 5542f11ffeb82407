"""profile: estimates without a GPU, measurements against a double of the driver, tables, JSON and traces."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from driver_double import double, library, log, run_double, run_python
from nvtx_tool import environment, ranges

import fusegraph as fg
from codegen.target import target
from fusegraph.cli import main
from fusegraph.engines.owners import labels
from fusegraph.errors import FusegraphError, ToolchainError
from fusegraph.lowering.base import Options
from fusegraph.origins import Origin, written_for
from fusegraph.plan import plan
from fusegraph.report.check import random_inputs
from fusegraph.report.limits import limit_of
from fusegraph.report.profile import KernelTime, Profile, described, estimated
from fusegraph.report.profile_gpu import matched, measured
from fusegraph.runtime import driver, nvtx, timing

H200 = target("h200")


def mlp(size: int = 256, dtype: str = "bfloat16") -> fg.Graph:
    graph = fg.Graph("mlp", io_dtype=dtype)
    x, w = graph.tensor("x", (size, size)), graph.tensor("w", (size, size))
    h = graph.gelu(graph.matmul(x, w, name="up"), name="act")
    graph.output(graph.softmax(graph.matmul(h, w, name="down"), name="y"))
    return graph


def _planned(graph: fg.Graph):
    return plan(graph, Options(target=H200))


# --- floors


def test_products_are_limited_by_arithmetic_and_copies_by_memory() -> None:
    graph = fg.Graph("g", io_dtype="bfloat16")
    x, w = (graph.tensor(name, (4096, 4096)) for name in "xw")
    graph.output(graph.matmul(x, w))
    (kernel,) = _planned(graph).kernels
    limit = limit_of(kernel, H200)
    assert (limit.by, limit.operations, limit.nbytes) == ("arithmetic", 2 * 4096**3, 3 * 2 * 4096**2)
    assert limit.us == pytest.approx(2 * 4096**3 / 950e6, rel=0.05)  # some 950 TFLOP/s
    copy = fg.Graph("copy")
    copy.output(copy.relu(copy.tensor("x", (1 << 24,))))
    (kernel,) = _planned(copy).kernels
    limit = limit_of(kernel, H200)
    assert (limit.by, limit.operations, limit.nbytes) == ("memory", 1 << 24, 8 << 24)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_the_pairs_that_meet(causal: bool) -> None:
    graph = fg.Graph("attention", io_dtype="bfloat16")
    q, k, v = (graph.tensor(name, (2, 4, 1024, 64)) for name in "qkv")
    bound = {"diagonal_band_right_bound": 0} if causal else {}
    graph.output(graph.sdpa(q, k, v, **bound))
    (kernel,) = _planned(graph).kernels
    pairs = 2 * 4 * 1024 * (1025 / 2 if causal else 1024)
    assert limit_of(kernel, H200).operations == pytest.approx(2 * pairs * 128, rel=0.05)


# --- estimates


def test_estimates_say_so() -> None:
    found = estimated(_planned(mlp()), H200)
    assert found.estimated
    assert "not measured" in found.summary()
    assert found.kernels_us == pytest.approx(found.step_us)
    assert found.gaps_us == pytest.approx(0)
    assert all(k.us >= 0.99 * H200.launch_us and k.floor_us > 0 for k in found.kernels)
    assert {n for k in found.kernels for n in k.nodes} >= {"up", "act", "down", "y"}


def test_the_command_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.py"
    file.write_text("from test_profile import mlp\nfirst, second = mlp(), mlp(64)\n")
    trace = tmp_path / "t.json"
    arguments = ["profile", str(file), "--target", "h200", "--trace", str(trace)]
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [g["estimated"] for g in data["graphs"]] == [True, True]
    assert all(k["name"] and k["us"] > 0 for k in data["kernels"])
    shares = [k["share"] for k in data["kernels"]]
    assert sum(shares) == pytest.approx(2)
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(data["kernels"])
    starts = [e["ts"] for e in events]
    assert starts == sorted(starts)
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "estimated by cost models, not measured (NVIDIA H200)" in said
    assert "nodes: up, act" in said


def test_a_profile_is_sorted_and_made_of_plain_text(tmp_path: Path) -> None:
    first = KernelTime("g", 1, "small", us=1.0, nbytes=1000, floor_us=0.5)
    second = KernelTime("g", 2, "<large>", nodes=("a",), start_us=3.0, us=4.0, operations=8e6)
    found = Profile("a GPU", "measured", False, [first, second], 7.0)
    assert (found.kernels_us, found.gaps_us) == (5.0, 2.0)
    assert [row[0] for row in found.table()[1]] == ["2: <large>", "1: small"]
    assert (first.gb_s, first.percent, second.tflop_s) == (1.0, 50.0, 2.0)
    assert "&lt;large&gt;" in found._repr_html_()
    assert "2.0 us between them" in str(found)
    found.save(tmp_path / "p.json")
    assert [k["name"] for k in json.loads((tmp_path / "p.json").read_text())["kernels"]] == ["small", "<large>"]
    found.save(tmp_path / "p.trace.json")
    assert "traceEvents" in json.loads((tmp_path / "p.trace.json").read_text())


# --- measurements


def test_kernels_that_ran_are_matched_with_those_planned() -> None:
    kernels = described(_planned(mlp()), H200)
    planned = [replace(k, number=n) for n, k in enumerate((*kernels, *kernels), 1)]
    events = [("other", 5.0, 1.0), *((k.name, 10.0 + n, 0.5) for n, k in enumerate(kernels)), ("copy", 30.0, 1.0)]
    found = matched(events, planned)
    assert [k.number for k in found] == [0, *range(1, len(kernels) + 1), 0]
    assert [k.start_us for k in found][:2] == [0.0, 5.0]
    assert found[1].nodes == kernels[0].nodes == ("up", "act")


def double_profile() -> None:
    """Runs every kernel, timed alone, and the step."""
    lib = library()
    timing.FLUSH_BYTES = 256  # the double's memory is the host's
    names = []
    nvtx = types.ModuleType("nvtx")
    nvtx.annotate = lambda name, domain: (names.append(name), contextlib.nullcontext())[1]
    sys.modules["nvtx"], sys.modules["torch"] = nvtx, None
    graph = fg.Graph("two")
    graph.output(graph.relu(graph.tensor("x", (4, 8)), name="act"))
    graph.output(graph.relu(graph.tensor("z", (300, 7)), name="other"))
    executable = fg.compile(graph, "cuda")
    found = measured(executable, random_inputs(graph), repeats=2)
    assert not found.estimated
    assert "by events" in found.timing
    assert len(found.kernels) == len(executable.plan.kernels) == len(names)
    assert names == ["act", "other"]
    assert all(k.us == k.warm_us and k.cold_us is not None for k in found.kernels)
    launched = [line for line in log(lib) if line.startswith("launch")]
    assert len(launched) > 10 * len(found.kernels)
    with fg.profile() as p:
        out = executable(*(fg.to_device(x) for x in random_inputs(graph).values()))
        assert out is not None
    assert [k.name for k in p.kernels] == [k.name for k in executable.plan.kernels]
    assert not p.estimated


@pytest.mark.slow
def test_measurements_against_a_double_of_the_driver() -> None:
    run_double("test_profile", "double_profile")


def double_ranges() -> None:
    """Calls graphs of several kernels again and again, with and without a tool that is told of ranges."""
    timing.FLUSH_BYTES = 256  # the double's memory is the host's
    open_ranges, told = [], []

    @contextlib.contextmanager
    def annotate(name: str, domain: str):
        told.append(" > ".join([*open_ranges, name]))
        open_ranges.append(name)
        yield
        open_ranges.pop()

    nvtx = types.ModuleType("nvtx")
    nvtx.annotate = annotate
    sys.modules["nvtx"], sys.modules["torch"] = nvtx, None
    graph = fg.Graph("chain")
    x = graph.tensor("x", (64, 64))
    for n in range(5):
        x = graph.softmax(graph.matmul(x, x, name=f"product{n}"), name=f"soft{n}")
    graph.output(x)
    array = fg.to_device(np.ones((64, 64), np.float32))
    plain = graph.compile("cuda")
    plain(array)
    os.environ["NVTX_INJECTION64_PATH"] = "/a/tool.so"
    plain(array)
    assert told == []  # what is loaded before has none
    shown = graph.compile("cuda")
    nodes = {name for known in described(shown.plan, H200) for name in known.nodes}
    assert nodes == {f"{name}{n}" for n in range(5) for name in ("product", "soft")}
    lib = library()
    for _ in range(6):
        told.clear()
        shown(array)
        assert told[0] == "chain"
        assert set(", ".join(line.removeprefix("chain > ") for line in told[1:]).split(", ")) == nodes
        assert len(told) == 1 + len(shown.plan.kernels) > 4
    assert sum(line.startswith("launch") for line in log(lib)) == 6 * len(shown.plan.kernels)
    with fg.profile():
        shown(array)
    assert f"fusegraph.profile > chain > {told[-1].rpartition(' > ')[2]}" in told


@pytest.mark.slow
def test_ranges_of_kernels_against_a_double_of_the_driver() -> None:
    run_double("test_profile", "double_ranges")


def ranged_program() -> None:
    """Calls a graph three times, as a user's program that knows nothing of ranges, and prints the kernels' nodes."""
    graph = fg.Graph("chain")
    x = graph.tensor("x", (64, 64))
    for n in range(3):
        x = graph.softmax(graph.matmul(x, x, name=f"product{n}"), name=f"soft{n}")
    graph.output(x)
    executable = graph.compile("cuda")
    array = fg.to_device(np.ones((64, 64), np.float32))
    for _ in range(3):
        executable(array)
    print(json.dumps(labels(executable.plan)))


def check_ranges(folder: Path, **more: str) -> None:
    """Runs `ranged_program` with a tool attached, by the package nvtx, and checks what the tool is told of."""
    pytest.importorskip("nvtx")
    said = run_python("import test_profile; test_profile.ranged_program()", **environment(folder), **more)
    kernels = [", ".join(names) for names in json.loads(said)]
    assert sorted(name for text in kernels for name in text.split(", ")) == [
        f"{of}{n}" for of in ("product", "soft") for n in range(3)
    ]
    call = [("chain",), *(("chain", text) for text in kernels)]
    assert ranges(folder, "fusegraph") == 3 * call


def test_a_tool_is_told_of_ranges_by_the_package_nvtx(tmp_path: Path) -> None:
    check_ranges(tmp_path, LD_LIBRARY_PATH=double())


@pytest.mark.gpu
def test_a_tool_is_told_of_ranges_on_a_gpu(tmp_path: Path) -> None:
    check_ranges(tmp_path)


def test_what_the_environment_says_of_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", types.ModuleType("nvtx"))
    for tool, asked, wanted in (("", "", False), ("t.so", "", True), ("t.so", "0", False), ("", "1", True)):
        monkeypatch.setenv("NVTX_INJECTION64_PATH", tool)
        monkeypatch.setenv("FUSEGRAPH_NVTX", asked)
        assert nvtx.wanted() is wanted
    monkeypatch.setitem(sys.modules, "nvtx", None)
    graph = mlp(8)
    with pytest.raises(ToolchainError, match=r"FUSEGRAPH_NVTX=1 needs the package nvtx"):
        graph.compile("cpu")
    monkeypatch.setenv("FUSEGRAPH_NVTX", "yes")
    with pytest.raises(FusegraphError, match="FUSEGRAPH_NVTX is 'yes'"):
        graph.compile("cpu")
    monkeypatch.setenv("FUSEGRAPH_NVTX", "")
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "t.so")
    assert not nvtx.wanted()


def test_nodes_of_models_are_named_by_module() -> None:
    graph = fg.Graph("net")
    x = graph.tensor("x", (4, 8))
    with written_for(lambda: Origin("L['self'].layers[1].act", "relu_1", "aten.relu_.default")):
        x = graph.relu(x)
    graph.output(graph.exp(x, name="last"))
    (names,) = labels(_planned(graph))
    assert names == ("layers.1.act relu", "last")


@pytest.mark.gpu
def test_measured_times_are_above_their_floors() -> None:
    graph = mlp(4096)
    found = measured(fg.compile(graph, "cuda"), random_inputs(graph))
    assert found.step_us >= found.kernels_us > 0
    for kernel in found.kernels:
        assert kernel.cold_us is not None
        assert kernel.warm_us is not None
        assert 0.5 * kernel.floor_us < kernel.us < 50 * kernel.floor_us


# --- programs


@pytest.mark.skipif(driver.available(), reason="on a GPU, times are measured")
def test_a_program_on_the_cpu_is_estimated() -> None:
    graph = fg.Graph("small")
    graph.output(graph.relu(graph.tensor("x", (4, 8))))
    executable = fg.compile(graph, "cpu")
    arrays = random_inputs(graph).values()
    before = type(executable).__call__
    with fg.profile() as p:
        executable(*arrays)
        executable(*arrays)
    assert type(executable).__call__ is before
    assert p.estimated
    assert [k.name for k in p.kernels] == 2 * [k.name for k in executable.plan.kernels]
    starts = np.array([k.start_us for k in p.kernels])
    assert (np.diff(starts) > 0).all()
    with pytest.raises(ZeroDivisionError), fg.profile():
        _ = 1 / 0
    assert type(executable).__call__ is before


@pytest.mark.gpu
def test_a_torch_model_in_a_program() -> None:
    torch = pytest.importorskip("torch")
    import fusegraph.torch  # noqa: F401

    model = torch.compile(lambda x: torch.softmax(x * 2, -1), backend="fusegraph")
    x = torch.randn(256, 256, device="cuda")
    model(x)
    with fg.profile() as p:
        model(x)
    assert "CUPTI" in p.timing
    assert any(k.number and k.us > 0 for k in p.kernels)
