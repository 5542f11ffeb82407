"""The pipeline of passes: what the driver holds and checks, what is run again, and what users are shown of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import fusegraph as fg
from fusegraph.cli import main
from fusegraph.errors import FileError, GraphError
from fusegraph.graph import Graph
from fusegraph.lowering.base import LeftOut, Options
from fusegraph.passes import pipeline
from fusegraph.passes.pipeline import PIPELINE, Pipeline, When, check
from fusegraph.passes.rewrite import Rewrite, Rewritten, same
from fusegraph.passes.speculation import ATTENTION, FUSION, NotAccepted, attempt
from fusegraph.plan import plan


def _graph() -> fg.Graph:
    graph = fg.Graph("layer", io_dtype="float16")
    q, k, v = (graph.tensor(name, (1, 2, 12, 16)) for name in "qkv")
    graph.output(graph.softmax(graph.relu(graph.sdpa(q, k, v)) * 1.0), name="y")
    return graph


def _copied(graph: Graph) -> Rewrite:
    rewrite = Rewrite(graph)
    for node in graph.nodes:
        rewrite.take_over(node)
    return rewrite


def test_passes_are_named_and_described() -> None:
    assert len({p.name for p in PIPELINE}) == len(PIPELINE)
    for each in PIPELINE:
        text = pipeline.summary(each.run)
        assert re.fullmatch(r"[A-Z].{10,300}[.]", text), each.name


def test_the_page_on_architecture_has_the_passes_in_their_order() -> None:
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text("utf-8")
    section = page.partition("## Passes about layouts and parts")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    told = [name for row in rows for name in re.findall("`(.*?)`", row)]
    assert len(told) > 15
    assert [p.name for p in PIPELINE if p.name in told] == told


def test_without_fusion_only_what_kernels_need_runs() -> None:
    ran = [step.name for step in plan(_graph(), fusion=False).steps]
    assert ran == [p.name for p in PIPELINE if p.when is When.ALWAYS]


def test_tensors_are_followed_through_all_passes() -> None:
    graph = _graph()
    found = plan(graph)
    for tensor in (*graph.inputs, *graph.outputs):
        assert found.counterparts[tensor].name == tensor.name
        assert found.counterparts[tensor] in found.simplified.tensors.values()
    parts = {t.name for t in found.counterparts if t.graph is not graph}
    assert any(name.startswith("y ") for name in parts), "those between the nodes of a composite, too"


def _no_output(graph: Graph) -> Rewritten:
    made = _copied(graph).done()
    made.graph.outputs = []
    return made


def _dangling(graph: Graph) -> Rewritten:
    made = _copied(graph).done()
    made.graph.remove_node(made.graph.nodes[-1])
    return made


def _foreign(graph: Graph) -> Rewritten:
    made = _copied(graph).done()
    return Rewritten(made.graph, {t: t for t in graph.tensors.values()})


@pytest.mark.parametrize(
    ("wrong", "what"),
    [(_no_output, "outputs"), (_dangling, "nothing makes its output"), (_foreign, "is no tensor of it")],
)
def test_a_pass_that_makes_a_wrong_graph_is_named(
    wrong: Callable[[Graph], Rewritten], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = pipeline.Pass("bad", lambda graph, _: wrong(graph))
    monkeypatch.setattr(pipeline, "PIPELINE", (*PIPELINE[:4], bad))
    with pytest.raises(GraphError, match=f"'bad'.*'layer'.*{what}"):
        plan(_graph())
    check("good", graph := _graph(), _copied(graph).done())


def test_only_the_passes_behind_what_is_left_out_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def counted(each: pipeline.Pass) -> pipeline.Pass:
        def run(graph: Graph, options: Options) -> Rewritten:
            ran.append(each.name)
            return each.run(graph, options)

        return pipeline.Pass(each.name, run, each.when, each.writes_out)

    monkeypatch.setattr(pipeline, "PIPELINE", tuple(map(counted, PIPELINE)))
    run, names = Pipeline(_graph(), Options(), fusion=True), [p.name for p in PIPELINE]
    first = run({})
    assert ran == names
    ran.clear()
    again = run({(ATTENTION, "layer"): "so"})
    assert ran == names[names.index(ATTENTION) :]
    assert again.steps[0] is first.steps[0]
    ran.clear()
    run({(ATTENTION, "layer"): "so", (FUSION, "y"): "so"})
    assert ran == names, "fusion has changed where tensors lie"


def test_an_attempt_leaves_out_what_is_not_accepted_and_ends() -> None:
    def accepted(left_out: LeftOut) -> int:
        if len(left_out) < 3:
            raise NotAccepted("no", {("pass", str(len(left_out))): "why"})
        return len(left_out)

    made, count = attempt(lambda left_out: left_out, accepted_by=accepted)
    assert count == 3
    assert list(made) == [("pass", "0"), ("pass", "1"), ("pass", "2")]

    def never(_: LeftOut) -> int:
        raise NotAccepted("no", {("pass", "0"): "why"})

    with pytest.raises(NotAccepted):
        attempt(lambda left_out: left_out, accepted_by=never)


def test_the_same_graph_has_the_same_steps() -> None:
    graph = _graph()
    assert same(graph).graph is graph
    assert [s.rewritten.decisions for s in plan(graph).steps] == [s.rewritten.decisions for s in plan(graph).steps]


FILE = """
import fusegraph as fg
def build():
    graph = fg.Graph("layer", io_dtype="float16")
    q, k, v = (graph.tensor(name, (1, 2, 12, 16)) for name in "qkv")
    graph.output(graph.sdpa(q, k, v), name="y")
    return graph
graph = build()
"""


def test_users_see_what_each_pass_rewrote(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "layer.py").write_text(FILE)
    file, out = str(tmp_path / "layer.py"), tmp_path / "dump"
    code = main(["explain", file, "--passes", "--dump", str(out)])
    text = capsys.readouterr().out
    assert code == 0
    assert "attention: 2 nodes behind it" in text
    assert "- y scaled = mul(" in text
    assert "nothing to do for:" in text
    files = sorted(p.name for p in (out / "layer").iterdir())
    assert files[0] == "00-as-built.txt"
    assert len(files) == len(PIPELINE) + 3
    # The files beside those of the pipeline: as built, recomputation, the manifest.
    first, last = (out / "layer" / files[0]).read_text(), (out / "layer" / files[-2]).read_text()
    assert "y = sdpa(q, k, v" in first
    assert "y = attention(q, " in last
    code = main(["explain", file, "--passes", "--json", "--dump", str(out)])
    text = capsys.readouterr().out
    (found,) = json.loads(text)["graphs"]
    assert [p["name"] for p in found["passes"]][:-1] == [p.name for p in PIPELINE]
    assert any(d["fused"] for p in found["passes"] for d in p["decisions"])


def test_a_folder_of_others_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "layer.py").write_text(FILE)
    (tmp_path / "dump" / "layer").mkdir(parents=True)
    (tmp_path / "dump" / "layer" / "notes.txt").write_text("mine")
    code = main(["explain", str(tmp_path / "layer.py"), "--dump", str(tmp_path / "dump")])
    error = capsys.readouterr().err
    assert code == 2
    assert "was not written by fusegraph" in error
    assert FileError.__name__ not in error
