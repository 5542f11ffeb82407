"""What people see around the compiler: pictures, notebooks, logs, completion, the cache; and graphs as ONNX."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from graphs import seeded

import fusegraph as fg
from fusegraph.cli import main
from fusegraph.engines.reference import evaluate
from fusegraph.errors import NotSupportedError
from fusegraph.report.check import check, random_inputs
from fusegraph.report.compare import compare_engines
from fusegraph.runtime import cache as caches

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"


def small() -> fg.Graph:
    graph = fg.Graph("small")
    x, w = graph.tensor("x [1]", (4, 8)), graph.tensor("w", (8, 8), parameter=True)
    h = graph.matmul(x, w, name="a (long) name")
    graph.output(graph.softmax(graph.relu(h) * 2.0 + np.arange(8, dtype=np.float32)), name="y")
    return graph


# --- pictures


def test_dot() -> None:
    text = small().to_dot()
    assert text.startswith('digraph "small" {')
    assert r'label="a (long) name\nmatmul"' in text
    assert "cylinder" in text  # of the parameter
    assert "mul (2.0)" in text
    places = set(re.findall(r"^  (\w+) \[label", text, re.MULTILINE))
    edges = re.findall(r"^  (\w+) -> (\w+)", text, re.MULTILINE)
    assert {end for edge in edges for end in edge} <= places
    assert len(edges) == 1 + 1 + 1 + 1 + 2 + 1 + 1  # x, w, relu, mul, add, softmax, y
    if shutil.which("dot"):
        subprocess.run(["dot", "-Tsvg"], input=text, text=True, check=True, capture_output=True)


def test_graphs_and_reports_in_notebooks() -> None:
    graph = small()
    html = graph._repr_html_()
    assert "x [1] float32 4x8" in html
    assert html.count("<tr>") == 1 + graph.node_count
    assert "max abs error" in check(graph, "cpu")._repr_html_()
    assert "reference" in compare_engines(graph, ["reference"])._repr_html_()


def test_the_report_of_torch_in_a_notebook() -> None:
    pytest.importorskip("torch")
    from fusegraph.frontends.torch.report import FunctionReport, PieceReport, Report
    from fusegraph.phases import Phases

    piece = PieceReport("net", "cpu", 5, 2, 4000, 1000, 0, 3, ())
    function = FunctionReport("inference", (piece,), (("sort", "aten.sort", "no <kernel>"),), 0.5, Phases())
    html = Report([function])._repr_html_()
    assert "<td>5</td><td>2</td><td>1</td><td>3.0 kB</td><td>sort: no &lt;kernel&gt;</td><td>0.50</td>" in html


# --- ONNX


def test_graphs_as_onnx_models(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    graph = small()
    inputs = random_inputs(graph)
    model = graph.to_onnx(tmp_path / "small.onnx")
    assert [i.name for i in model.graph.input] == ["x [1]", "w"]
    (expected,) = (evaluate(graph, inputs)[t] for t in graph.outputs)
    (found,) = ReferenceEvaluator(onnx.load(tmp_path / "small.onnx")).run(None, inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert main(["run", str(tmp_path / "small.onnx"), "--engine", "cpu", "--check"]) == 0


def test_random_graphs_go_to_onnx_and_back() -> None:
    """Those whose ops ONNX has; what comes back computes the same, to the rounding of intermediates."""
    pytest.importorskip("onnx")
    known = named = 0
    for seed in range(40):
        graph = seeded(seed).build()
        inputs = random_inputs(graph)
        try:
            model = fg.onnx.from_proto(graph.to_onnx())
        except NotSupportedError as refusal:
            named += bool(re.search("ONNX (has no|models|pools)", str(refusal)))
            continue
        known += 1
        expected = evaluate(graph, inputs)
        found = evaluate(model.graph, {t.name: inputs[name] for name, t in model.inputs.items()})
        for tensor, back in zip(graph.outputs, model.outputs.values()):
            assert back.type == tensor.type
            wanted = expected[tensor].astype(np.float64)
            scale = np.abs(np.where(np.isfinite(wanted), wanted, 0)).max(initial=1)
            np.testing.assert_allclose(found[back].astype(np.float64), wanted, rtol=1e-2, atol=1e-3 * scale)
    assert known > 10
    assert known + named == 40


def test_what_onnx_has_not_is_named() -> None:
    pytest.importorskip("onnx")
    graph = fg.Graph("g")
    graph.output(graph.log1p(graph.tensor("x", (4,)), name="small logarithm"))
    with pytest.raises(NotSupportedError, match="log1p 'small logarithm'"):
        graph.to_onnx()
    graph = fg.Graph("g")
    graph.assign(graph.tensor("state", (4,)), 1.0)
    with pytest.raises(NotSupportedError, match="assigns to inputs"):
        graph.to_onnx()


# --- logs, completion, the cache


@pytest.fixture
def loggers() -> None:
    """Enables our loggers: import-linter, which another test runs in this process, disables all that there are."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("fusegraph"):
            logging.getLogger(name).disabled = False


@pytest.mark.usefixtures("loggers")
def test_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="fusegraph"):
        small().compile("cpu")
    assert any(re.match(r"graph small for cpu: 5 nodes in \d kernels", r.getMessage()) for r in caplog.records)
    assert all(r.name.startswith("fusegraph.") for r in caplog.records)


@pytest.mark.usefixtures("loggers")
def test_the_command_logs_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "net.py"
    file.write_text("from test_notebooks import small\ngraph = small()\n")
    root, ours = logging.getLogger(), logging.getLogger("fusegraph")
    monkeypatch.setattr(root, "handlers", [])
    level = ours.level
    try:
        assert main(["-v", "run", str(file), "--engine", "cpu", "--json"]) == 0
    finally:
        ours.setLevel(level)
    said = capsys.readouterr()
    assert "fusegraph: graph small for cpu: 5 nodes in" in said.err
    assert json.loads(said.out)["graphs"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_FUSEGRAPH_COMPLETE", f"source_{shell}")
    main([])
    assert "complete_" in capsys.readouterr().out


def test_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGRAPH_CACHE_DIR", str(tmp_path))
    caches.default_cache.cache_clear()
    try:
        caches.default_cache().put("0" * 32, b"x" * 1000)
        (tmp_path / "of the user").write_text("stays")
        assert main(["cache"]) == 0
        assert f"{tmp_path}: 1 file, 1.0 kB of at most" in capsys.readouterr().out
        assert main(["cache", "size"]) == 0
        assert int(capsys.readouterr().out) > 1000
        assert main(["cache", "clear", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["entries"], facts["bytes"]) == (0, 0)
        assert facts["freed"] > 1000
        assert [p.name for p in tmp_path.iterdir()] == ["of the user"]
    finally:
        caches.default_cache.cache_clear()


# --- the tutorial


@pytest.mark.slow
def test_the_tutorial_notebook_runs() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs are not kept: they would grow old"
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute(cwd=str(NOTEBOOK.parents[1]))
    made = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("text/html" in output.get("data", {}) for output in made) == 3  # the graph, the check, the profile
