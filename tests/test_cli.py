"""The command line: what each command prints and writes."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

import fusegraph as fg
from codegen.cpu import DEVICE_DIR
from fusegraph.cli import main
from fusegraph.cli.compile import GRAPH_KEYS, KERNEL_KEYS
from fusegraph.report.check import OutputCheck
from fusegraph.runtime import cache, driver, host_compiler

HEAD = "import fusegraph as fg\n"
POINTWISE = (
    HEAD
    + """
graph = fg.Graph("fma")
a, b, c = (graph.tensor(name, (8, 33)) for name in "abc")
graph.output(graph.sigmoid(a + b * c), name="y")
"""
)
TWO = (
    HEAD
    + """
def make(name, dtype):
    graph = fg.Graph(name, io_dtype=dtype)
    graph.output(graph.relu(graph.tensor("a", (40,)) * 2.0), name="y")
    return graph
first = make("net", "float32")
second = make("NET", "bfloat16")
def third() -> fg.Graph: return make("../net [x]", "float32")
"""
)
DIAMOND = (
    HEAD
    + """
graph = fg.Graph("diamond")
a, w = graph.tensor("a", (4, 4)), graph.tensor("w", (4, 4))
p = graph.exp(a, name="p")
r = graph.matmul(graph.matmul(p, w, name="m1"), w, name="m2")
graph.output(graph.add(r, p), name="q")
"""
)
CONV = (
    HEAD
    + """
graph = fg.Graph("conv_block")
x, w, b = graph.tensor("x", (1, 8, 6, 5)), graph.tensor("w", (8, 8, 3, 3)), graph.tensor("b", (1, 8, 1, 1))
graph.output(graph.relu(graph.conv_fprop(x, w, padding=1, name="conv") + b), name="y")
"""
)


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    cache.default_cache.cache_clear()
    yield
    cache.default_cache.cache_clear()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- compile


def test_compile_json(write, out, tell, fresh_cache):
    status, told, _ = tell("compile", write(CONV), "--out", str(out), "--target", "sm_90a")
    assert status == 0
    assert set(told) == {"graphs"}
    (graph,) = told["graphs"]
    assert set(graph) == set(GRAPH_KEYS)
    assert (graph["name"], graph["engine"], graph["arch"]) == ("conv_block", "cuda", "sm_90a")
    (kernel,) = graph["kernels"]
    assert set(kernel) == set(KERNEL_KEYS)
    assert kernel["nodes"] == ["conv", "add", "y"]
    assert kernel["spill_bytes"] == 0
    assert kernel["registers"] > 0
    assert kernel["bytes_saved"] == 4 * 4 * 8 * 6 * 5
    assert kernel["compile_ms"] > 0
    assert kernel["cached"] is False
    for decision in graph["decisions"]:
        assert set(decision) == {"producer", "consumer", "fused", "reason", "bytes_saved", "shared_input"}
    folder = Path(graph["folder"])
    assert folder == out / "conv_block"
    assert (folder / kernel["cubin"]).read_bytes().startswith(b"\x7fELF")
    assert f"{kernel['name']}(" in (folder / kernel["source"]).read_text()

    _, again, _ = tell("compile", write(CONV), "--out", str(out), "--target", "sm_90a")
    (kernel,) = again["graphs"][0]["kernels"]
    assert kernel["cached"] is True


def test_manifest(write, out, tell):
    tell("compile", write(DIAMOND), "--out", str(out))
    folder = out / "diamond"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["generator"] == "fusegraph"
    assert {n["name"] for n in manifest["nodes"]} == {"p", "m1", "m2", "q"}
    assert sorted(manifest["files"]) == sorted(set(contents(folder)) - {"manifest.json"})
    assert manifest["workspace_bytes"] >= 64
    assert set(manifest["versions"]) == {"fusegraph", "python", "nvrtc", "cuda-bindings"}
    assert manifest["options"] == {"strict": False, "fusion": True}
    assert [d for d in manifest["decisions"] if not d["fused"]]


def test_the_folder_is_all_a_compiler_needs(write, out, tell, tmp_path):
    """Sources with the include folder, and nothing else of fusegraph, are what NVRTC takes."""
    from cuda.bindings import nvrtc

    _, told, _ = tell("compile", write(CONV), "--out", str(out))
    folder = Path(told["graphs"][0]["folder"])
    assert str(DEVICE_DIR) not in (folder / "manifest.json").read_text()
    for kernel in told["graphs"][0]["kernels"]:
        code = (folder / kernel["source"]).read_bytes()
        status, program = nvrtc.nvrtcCreateProgram(code, kernel["source"].encode(), 0, [], [])
        options = [b"-I" + str(folder / "include").encode(), b"--gpu-architecture=sm_90a", b"--std=c++17"]
        status, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
        assert int(status) == 0


def test_several_archs(write, out, tell):
    _, told, _ = tell("compile", write(POINTWISE), "--out", str(out), "--target", "sm_80,sm_90a", "--target", "sm_80")
    assert [(g["arch"], Path(g["folder"]).name) for g in told["graphs"]] == [
        ("sm_80", "fma-sm_80"),
        ("sm_90a", "fma-sm_90a"),
    ]
    first, second = (Path(g["folder"], g["kernels"][0]["cubin"]).read_bytes() for g in told["graphs"])
    assert first != second


def test_graph_names_become_folders_of_their_own(write, out, tell):
    _, told, _ = tell("compile", write(TWO), "--out", str(out))
    assert [g["name"] for g in told["graphs"]] == ["net", "NET", "../net [x]"]
    assert [Path(g["folder"]).relative_to(out).name for g in told["graphs"]] == ["net", "NET-2", "_net_x_"]
    assert sorted(os.listdir(out)) == ["NET-2", "_net_x_", "net"]
    assert sorted(os.listdir(out.parent)) == ["graphs.py", "out"]


def test_no_gpu_is_said(write, out, capsys, monkeypatch):
    monkeypatch.setattr(driver, "available", lambda: False)
    assert main(["compile", write(POINTWISE), "--out", str(out)]) == 0
    stdout, stderr = capsys.readouterr()
    assert "sm_90a" in stderr
    assert "fma for sm_90a: 3 nodes in 1 kernel" in stdout
    assert "fma_kernel" in stdout
    assert "nodes: mul, add, y" in stdout
    assert all(len(line) <= 100 for line in stdout.splitlines())


def test_the_gpus_architecture_is_the_default(write, out, tell, monkeypatch):
    class Ampere:
        arch, name = "sm_80", "a GPU"

    monkeypatch.setattr(driver, "available", lambda: True)
    monkeypatch.setattr(driver, "properties", lambda device=0: Ampere)
    _, told, _ = tell("compile", write(POINTWISE), "--out", str(out))
    assert told["graphs"][0]["arch"] == "sm_80"


def test_compile_for_the_cpu(write, out, tell):
    _, told, _ = tell("compile", write(POINTWISE), "--engine", "cpu", "--out", str(out))
    (graph,) = told["graphs"]
    (kernel,) = graph["kernels"]
    assert (graph["engine"], graph["arch"]) == ("cpu", None)
    assert (kernel["cubin"], kernel["registers"], kernel["spill_bytes"]) == (None, None, None)
    assert Path(graph["folder"], kernel["source"]).is_file()
    assert kernel["compile_ms"] > 0


def test_compile_for_the_reference(write, out, tell):
    _, told, _ = tell("compile", write(POINTWISE), "--engine", "reference", "--out", str(out))
    (graph,) = told["graphs"]
    assert (graph["kernels"], graph["decisions"]) == ([], [])
    assert list(contents(out / "fma")) == ["manifest.json"]


def test_runs_without_fusion(write, tell, monkeypatch):
    asked = []
    compiled = fg.compile
    monkeypatch.setattr(fg, "compile", lambda *args, **options: asked.append(options) or compiled(*args, **options))
    for options in ([], ["--no-fusion"]):
        status, told, _ = tell("run", write(POINTWISE), "--engine", "reference", "--check", *options)
        assert (status, told["graphs"][0]["ok"]) == (0, True)
    assert [given["fusion"] for given in asked] == [True, False]


def test_no_fusion_and_strict(write, out, tell):
    _, told, _ = tell("compile", write(POINTWISE), "--no-fusion", "--out", str(out))
    (graph,) = told["graphs"]
    assert [k["nodes"] for k in graph["kernels"]] == [["mul"], ["add"], ["y"]]
    assert {d["fused"] for d in graph["decisions"]} == {False}
    assert graph["workspace_bytes"] > 0
    _, told, _ = tell("compile", write(POINTWISE), "--strict", "--out", str(out))
    assert json.loads((out / "fma" / "manifest.json").read_text())["options"] == {"strict": True, "fusion": True}


# --- output folders


def test_what_is_not_ours_is_left_alone(write, out, tell, tmp_path):
    def refused() -> str:
        before = contents(out)
        status, told, _ = tell("compile", write(POINTWISE), "--out", str(out))
        assert (status, told["error"]["type"]) == (2, "FileError")
        assert contents(out) == before
        return told["error"]["message"]

    folder = out / "fma"
    folder.mkdir(parents=True)
    assert tell("compile", write(POINTWISE), "--out", str(out))[0] == 0  # an empty folder holds nothing to lose
    (folder / "notes.txt").write_text("mine")
    assert "'notes.txt', which fusegraph did not write" in refused()
    for manifest in ("{}", "[1]", "no json", '{"generator": "else", "files": ["notes.txt"]}'):
        (folder / "manifest.json").write_text(manifest)
        assert "was not written by fusegraph" in refused()
    os.rename(folder, tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert "is no folder of fusegraph's" in refused()
    folder.unlink()
    folder.write_text("a file")
    assert "is no folder of fusegraph's" in refused()


def test_no_place_for_output(write, out, tell, tmp_path, monkeypatch):
    def refused(place: Path) -> str:
        status, told, stderr = tell("compile", write(POINTWISE), "--out", str(place))
        assert (status, told["error"]["type"]) == (2, "FileError")
        assert told["error"]["message"] in stderr
        return told["error"]["message"]

    out.write_text("a file")
    assert f"{out} is a file" in refused(out)
    assert f"{out} is a file" in refused(out / "below")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert f"output folder {tmp_path / 'new'} is read-only" in refused(tmp_path / "new")

    def read_only(self: Path, *args: object, **more: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.undo()
    monkeypatch.setattr(Path, "mkdir", read_only)
    assert refused(tmp_path / "other") == f"{tmp_path / 'other'} cannot be written: Read-only file system"


# --- run


def test_run_check_json(write, tell):
    status, told, stderr = tell("run", write(CONV), "--engine", "cpu", "--check", "--seed", "3")
    assert status == 0
    assert stderr == ""
    (graph,) = told["graphs"]
    assert set(graph) == {"name", "engine", "ok", "note", "seed", "ms", "outputs"}
    assert (graph["name"], graph["engine"], graph["ok"], graph["seed"]) == ("conv_block", "cpu", True, 3)
    (output,) = graph["outputs"]
    assert {"name", "max_abs_error", "rel_error", "ok"} <= set(output)
    assert output["ok"] is True
    assert output["shape"] == [1, 8, 6, 5]
    assert 0 <= output["rel_error"] < 1e-6
    assert graph["ms"] > 0


def test_run_without_check(write, tell):
    status, told, _ = tell("run", write(POINTWISE), "--engine", "reference")
    (graph,) = told["graphs"]
    assert (status, graph["ok"], graph["outputs"][0]["max_abs_error"]) == (0, None, None)
    assert 0 < graph["outputs"][0]["min"] < 0.5 < graph["outputs"][0]["max"] < 1


def test_seeds(write, tell):
    file = write(POINTWISE)
    means = [
        tell("run", file, "--engine", "reference", "--seed", seed)[1]["graphs"][0]["outputs"][0]["mean"]
        for seed in ("1", "2", "1")
    ]
    assert means[0] == means[2] != means[1]


def test_the_default_engine_without_a_gpu(write, capsys, monkeypatch):
    monkeypatch.setattr(driver, "available", lambda: False)
    assert main(["run", write(POINTWISE), "--check", "--strict"]) == 0
    out = capsys.readouterr().out
    assert "fma on cpu: " in out
    assert "equals the reference" in out
    assert "max abs error" in out


def test_a_wrong_result_fails_the_check(write, tell, capsys, monkeypatch):
    wrong = OutputCheck("y", float("inf"), float("nan"), 0, 5, "at [0, 0] got 1.0, reference 2.0, bound 0.1")
    monkeypatch.setattr("fusegraph.report.check.compare", lambda *args, **_: (wrong,))
    status, told, stderr = tell("run", write(POINTWISE), "--engine", "reference", "--check")
    (graph,) = told["graphs"]
    assert (status, graph["ok"], graph["outputs"][0]["ok"], graph["outputs"][0]["wrong"]) == (1, False, False, 5)
    assert graph["outputs"][0]["max_abs_error"] is None  # JSON has no infinity
    assert "1 of 1 graphs differ from the reference: fma" in stderr
    assert main(["run", write(POINTWISE), "--engine", "reference", "--check"]) == 1
    out = capsys.readouterr().out
    assert "DIFFERS" in out
    assert "5 elements outside their bound, one at [0, 0] got 1.0" in out


def test_a_checked_run_calls_each_kernel_twice(write, tell, monkeypatch):
    """What is saved and shown is what is checked; the second time the threads take turns the other way round."""
    orders = []
    launch = host_compiler.CpuModule.launch

    def counted(self, index, arguments, *, order="forward", **options):
        orders.append(order)
        return launch(self, index, arguments, order=order, **options)

    monkeypatch.setattr(host_compiler.CpuModule, "launch", counted)
    assert tell("run", write(POINTWISE), "--engine", "cpu", "--check")[0] == 0
    assert orders == ["forward", "reverse"]


def test_saved_outputs(write, out, tell):
    text = POINTWISE + "graph.output(graph.cast(graph.outputs[0] * 4.0, 'bf16'), name='a/b')\n"
    text += "graph.output(graph.cmp_gt(a, b), name='A:B')\n"
    _, told, _ = tell("run", write(text), "--engine", "cpu", "--out", str(out))
    (graph,) = told["graphs"]
    paths = [Path(output["file"]) for output in graph["outputs"]]
    assert [p.name for p in paths] == ["y.npy", "a_b.npy", "A_B-2.npy"]
    arrays = [np.load(path, allow_pickle=False) for path in paths]
    assert [a.dtype for a in arrays] == [np.float32, np.float32, np.bool_]
    assert [a.shape for a in arrays] == [(8, 33)] * 3
    np.testing.assert_allclose(arrays[1], 4 * arrays[0], rtol=2**-8)
    assert tell("run", write(text), "--engine", "cpu", "--out", str(out))[0] == 0
    assert tell("compile", write(text), "--out", str(out))[0] == 0
    assert sorted(os.listdir(out)) == ["fma", "fma-outputs"]


def test_numbers_that_are_none(write, tell, capsys):
    text = POINTWISE + "graph.output(graph.log(a - a), name='minus_infinity')\n"
    _, told, _ = tell("run", write(text), "--engine", "reference")
    output = told["graphs"][0]["outputs"][1]
    assert (output["min"], output["max"], output["mean"], output["nonfinite"]) == (None, None, None, 8 * 33)
    main(["run", write(text), "--engine", "reference"])
    assert "264 elements are not finite" in capsys.readouterr().out


@pytest.mark.gpu
def test_on_the_gpu(write, out, tell):
    for text in (POINTWISE, CONV, DIAMOND):
        _, told, _ = tell("run", write(text), "--check")
        (graph,) = told["graphs"]
        assert (graph["engine"], graph["ok"]) == ("cuda", True)
        assert 0 < graph["ms"] < 100
    _, told, _ = tell("compile", write(POINTWISE), "--out", str(out))
    assert told["graphs"][0]["arch"] == driver.properties(0).arch
