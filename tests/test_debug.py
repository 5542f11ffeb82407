"""debug and reduce: kernels, passes and memory broken on purpose are named, written down, and made small."""

from __future__ import annotations

import json
import os
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import quick, seeded

import fusegraph as fg
import fusegraph.plan
from fusegraph.cli import main
from fusegraph.errors import FileError
from fusegraph.graph import Graph
from fusegraph.lowering.base import Options
from fusegraph.ops import TABLE
from fusegraph.passes import pipeline
from fusegraph.passes.pipeline import Pass, When
from fusegraph.passes.rewrite import Rewrite, Rewritten, replaced
from fusegraph.report import walk
from fusegraph.report.check import check, laid_out, random_inputs
from fusegraph.report.debug import Setup, first_not_finite, first_wrong
from fusegraph.report.parts import builder_code, part, restored, saved_arrays
from fusegraph.report.reduce import fewest, reduced
from fusegraph.report.reproducer import load_arrays

SETUP = Setup("cpu")


def layers(count: int, special: str = "tanh", dtype: str = "float32") -> fg.Graph:
    """Returns layers of a product, a norm, and a function that is another one in layer 2."""
    graph = fg.Graph("layers", io_dtype=dtype)
    x, w = graph.tensor("x", (8, 32)), graph.tensor("w", (32, 32))
    ones, zeros = (graph.constant(np.full(32, k), name=f"c{k}", dtype=dtype) for k in (1.0, 0.0))
    h = x
    for k in range(count):
        h = graph.layernorm(graph.matmul(h, w, name=f"m{k}"), ones, zeros, axes=(1,), name=f"n{k}")
        h = getattr(graph, special if k == 2 else "relu")(h, name=f"f{k}")
        h = graph.add(h, x, name=f"a{k}")
    graph.output(h)
    return graph


def broken(monkeypatch: pytest.MonkeyPatch, op: str = "tanh", factor: str = "1.01f") -> None:
    """Makes the kernels of an op compute something else."""
    for kind, code in TABLE[op].cuda.items():
        monkeypatch.setitem(TABLE[op].cuda, kind, f"({code}) * {factor}")


def test_a_right_graph() -> None:
    graph = layers(2)
    assert first_wrong(graph, random_inputs(graph), SETUP) is None
    assert first_not_finite(graph, random_inputs(graph), SETUP) is None


@pytest.mark.parametrize("dtype", quick("bfloat16", "float32"))
def test_a_broken_kernel_in_the_middle(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    graph = layers(5, dtype=dtype)
    inputs = random_inputs(graph)
    broken(monkeypatch, factor="1.1f")
    found = first_wrong(graph, inputs, SETUP)
    assert found is not None
    assert (found.kind, found.node, found.op, found.alone) == ("differs", "f2", "tanh", True)
    assert "f2" in found.kernel_nodes
    assert found.part is not None
    assert [n.name for n in found.part.nodes] == ["f2"]
    assert found.inputs.keys() == {"n2"}


def test_images_in_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fg.Graph("images", io_dtype="float16")
    x = graph.tensor("x", (1, 8, 6, 5), layout="NHWC")
    for k in range(2):
        x = graph.conv_fprop(x, graph.tensor(f"w{k}", (8, 8, 3, 3), layout="NHWC"), padding=1, name=f"conv{k}")
        x = graph.tanh(x, name=f"f{k}") if k else x
    graph.output(x)
    broken(monkeypatch)
    found = first_wrong(graph, random_inputs(graph), SETUP)
    assert found is not None
    assert (found.kind, found.node, found.alone) == ("differs", "f1", True)


@pytest.mark.slow
@pytest.mark.parametrize("against", ["unfused", "torch"])
def test_against_others(monkeypatch: pytest.MonkeyPatch, against: str) -> None:
    """Where kernels of one node are just as wrong, only torch tells; other bounds add up to little."""
    graph = layers(3)
    inputs = random_inputs(graph)
    assert first_wrong(graph, inputs, SETUP, against=against) is None
    broken(monkeypatch)
    found = first_wrong(graph, inputs, SETUP, against=against)
    assert (found and found.node) == (None if against == "unfused" else "f2")


def test_a_broken_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def subtract(graph: Graph, _: Options) -> Rewritten:
        """Subtracts instead of adding in one place."""

        def write(rewrite: Rewrite, node: fg.Node, _: Any) -> None:
            made = rewrite.graph.apply(TABLE["sub"], rewrite.inputs(node), {})
            rewrite.graph._rename(made, node.name)
            rewrite.new[node.output] = made

        return replaced(graph, lambda node: node.name == "a1", write)

    monkeypatch.setattr(pipeline, "PIPELINE", (Pass("subtracts", subtract, When.FUSING), *pipeline.PIPELINE))
    graph = layers(3)
    for against in ("reference", "unfused"):
        found = first_wrong(graph, random_inputs(graph), SETUP, against=against)
        assert found is not None
        assert found.node == "a1"


def test_outputs_are_compared_when_every_kernel_seems_right(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fg.Graph("unknown")
    graph.output(graph.tanh(graph.tensor("x", (4, 8)), name="y"))
    monkeypatch.setattr(walk.Origins, "names", lambda self, tensor: [])
    assert first_wrong(graph, random_inputs(graph), SETUP) is None
    broken(monkeypatch)
    found = first_wrong(graph, random_inputs(graph), SETUP)
    assert found is not None
    assert (found.node, found.kernel) == ("y", "")
    assert "every kernel is right by itself" in found.detail


def test_ops_that_torch_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fg.Graph("bits")
    graph.output(graph.tanh(graph.bitcast(graph.tensor("x", (4, 8), "int32"), dtype="float32"), name="y"))
    inputs = {"x": np.arange(32, dtype=np.int32).reshape(4, 8) << 25}
    assert first_wrong(graph, inputs, SETUP, against="torch") is None


def test_memory_that_another_kernel_overwrites(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_memory = fusegraph.plan.plan_memory

    def in_one_place(*given: Any) -> Any:
        planned = plan_memory(*given)
        return replace(planned, offsets=dict.fromkeys(planned.offsets, 0))

    graph = fg.Graph("crossed")
    x, w = graph.tensor("x", (16, 16)), graph.tensor("w", (16, 16))
    early = graph.matmul(x, w, name="early")
    later = graph.softmax(graph.matmul(graph.softmax(early), w, name="later"))
    graph.output(graph.matmul(early, later))
    inputs = random_inputs(graph)
    assert first_wrong(graph, inputs, SETUP) is None
    monkeypatch.setattr(fusegraph.plan, "plan_memory", in_one_place)
    found = first_wrong(graph, inputs, SETUP)
    assert found is not None
    assert (found.kind, found.node) == ("overwritten", "early")


def test_what_is_computed_once_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fg.Graph("packed")
    x, w = graph.tensor("x", (4, 16)), graph.tensor("w", (16, 16), parameter=True)
    graph.output(graph.matmul(graph.relu(x), graph.tanh(graph.softmax(w), name="packed w"), name="y"))
    inputs = random_inputs(graph)
    plan = SETUP.compile(graph).plan
    assert plan is not None
    assert plan.packing is not None
    assert first_wrong(graph, inputs, SETUP) is None
    broken(monkeypatch)
    found = first_wrong(graph, inputs, SETUP)
    assert found is not None
    assert found.node == "packed w"


def test_the_first_nan() -> None:
    graph = layers(4, "log")
    found = first_not_finite(graph, random_inputs(graph), SETUP)
    assert found is not None
    assert (found.kind, found.node, found.alone) == ("not finite", "f2", True)
    assert "is nan, of n2 = -" in found.detail


def test_an_infinity_among_the_operands_is_no_news() -> None:
    graph = fg.Graph("masked")
    x, mask = graph.tensor("x", (4, 40)), graph.tensor("mask", (4, 40), "bool")
    hidden = graph.binary_select(x, float("-inf"), mask, name="hidden")
    weights = graph.softmax(hidden, name="weights")
    graph.output(graph.log(weights * 0.0, name="bad"))
    inputs = random_inputs(graph)
    inputs["mask"][:, :2] = True
    found = first_not_finite(graph, inputs, SETUP)
    assert found is not None
    assert found.node == "bad"


def test_an_onnx_model_that_is_read_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnx")
    file = str(tmp_path / "layers.onnx")
    layers(3, "elu").to_onnx(file)
    options = [file, "--against", "onnx", "--engine", "cpu", "--out", str(tmp_path / "out")]
    assert main(["debug", *options]) == 0
    from fusegraph.frontends.onnx.table import TABLE as READERS

    monkeypatch.setitem(READERS, ("", "Elu"), READERS["", "LeakyRelu"])
    assert main(["debug", *options]) == 1
    said = capsys.readouterr().out
    assert "leaky_relu" in said
    assert "onnx" in said


# --- files


def _graph_file(folder: Path) -> Path:
    file = folder / "net.py"
    file.write_text("from test_debug import layers\ngraph = layers(4)\n")
    return file


def test_the_command_writes_a_reproducer_that_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(_graph_file(tmp_path)), "--engine", "cpu", "--out", str(tmp_path / "out")]
    assert main(["debug", *options]) == 0
    assert "layers: every kernel's results are within their bounds" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        broken(patch)
        assert main(["debug", *options, "--json"]) == 1
        (entry,) = json.loads(capsys.readouterr().out)["graphs"]
        assert entry["found"]["node"] == "f2"
        assert main(["debug", *options]) == 1
        said = capsys.readouterr().out
        assert "layers: tanh f2: differs" in said
        assert f"python {entry['reproducer']}" in said
        with pytest.raises(SystemExit, match="1"):
            runpy.run_path(entry["reproducer"], run_name="__main__")
        assert "wrong" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(entry["reproducer"], run_name="__main__")
    assert main(["run", entry["reproducer"], "--engine", "cpu"]) == 0  # the file is one like any other
    lines = Path(entry["reproducer"]).read_text().split("arrays_beside(__file__)\n")[1].split("\n\nif")[0]
    assert len(lines.splitlines()) <= 5


def test_reduce(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [str(_graph_file(tmp_path)), "--engine", "cpu", "--out", str(tmp_path / "out"), "--json"]
    assert main(["reduce", *options]) == 0
    assert json.loads(capsys.readouterr().out)["graphs"][0]["failure"] is None

    monkeypatch.setitem(TABLE["tanh"].cuda, "float", "{nothing}")
    assert main(["reduce", *options]) == 1
    (entry,) = json.loads(capsys.readouterr().out)["graphs"]
    assert (entry["failure"], entry["nodes"]) == ("KeyError", 1)
    assert "(1, 1)" in Path(entry["reproducer"]).read_text()


def test_reduce_takes_nodes_away_until_none_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = layers(6)

    def fails(made: Graph, given: Any) -> bool:
        """A defect of two functions, and of at least 5 columns."""
        ops = {n.op.name for n in made.nodes}
        return {"tanh", "matmul"} <= ops and max(t.shape[-1] for t in made.inputs) >= 5

    found = reduced(graph, random_inputs(graph), fails)
    assert sorted(n.op.name for n in found.graph.nodes) == ["matmul", "tanh"]
    assert max(n for t in found.graph.tensors.values() for n in t.shape) == 5
    assert all(found.inputs[t.name].shape == t.shape for t in found.graph.inputs)
    with pytest.raises(fg.errors.GraphError, match="does not fail"):
        reduced(graph, random_inputs(graph), lambda *_: False)


@pytest.mark.parametrize("wanted", [{3}, {0, 99}, {5, 6, 70}, set(range(0, 100, 9))])
def test_fewest(wanted: set[int]) -> None:
    tried = []

    def fails(items: Any) -> bool:
        tried.append(items)
        return wanted <= set(items)

    assert set(fewest(range(100), fails)) == wanted
    assert len(tried) < 400


def _rebuilt(graph: Graph, arrays: dict[str, np.ndarray]) -> Graph:
    scope: dict[str, Any] = {"fg": fg, "np": np, "arrays": arrays}
    exec(builder_code(graph), scope)
    return scope["graph"]


def _bytes_of(graph: Graph, inputs: dict[str, np.ndarray]) -> list[bytes]:
    """Returns what inputs and results hold after a call, which may change copies of the former."""
    state = {t.name: laid_out(inputs[t.name].copy(), t) for t in graph.inputs}
    found = graph.compile("reference")(**state)
    return [v.tobytes() for v in (*state.values(), *(found if isinstance(found, tuple) else (found,)))]


def test_code_builds_the_same_graph() -> None:
    """Random graphs, with assignments to whole inputs, to slices, at positions and by an index."""
    updated = 0
    for seed in range(60):
        graph = seeded(seed).build()
        inputs = random_inputs(graph)
        arrays = saved_arrays(graph, inputs)
        assert all(a.dtype.kind in "fiub" for a in arrays.values())
        again = _rebuilt(graph, arrays)
        assert builder_code(again) == builder_code(graph)
        given = {t.name: restored(arrays, t) for t in again.inputs}
        assert all(given[name].tobytes() == np.ascontiguousarray(x).tobytes() for name, x in inputs.items())
        assert _bytes_of(graph, given) == _bytes_of(again, given)
        assert [t.name for t in again.updates] == [t.name for t in graph.updates]
        updated += len(graph.updates)
    assert updated > 10


def test_code_of_assignments() -> None:
    graph = fg.Graph("state")
    x, y, z = (graph.tensor(name, (4, 6, 5)) for name in "xyz")
    row, at = graph.tensor("row", (6, 5)), graph.tensor("at", (3,), "int32")
    first = graph.assign(x[1], row, name="first")
    graph.assign(x[:, 4:0:-2, 1:2], graph.exp(first[:, :2, :1], name="e"), name="second")
    graph.assign(graph.gather(y, at, axis=1)[::3], 2.0, name="third")
    graph.output(graph.assign(z, x + y, name="whole"))
    graph.output(graph.relu(first))
    arrays = saved_arrays(graph, random_inputs(graph))
    again = _rebuilt(graph, arrays)
    code = builder_code(graph)
    assert builder_code(again) == code
    assert "first = graph.assign(x[1:2, :, :]," in code
    assert "graph.assign(first[:, 2:5:2, 1:2]," in code
    assert "third = graph.assign(graph.gather(y, at, axis=1)[0:4:3, :, :]," in code
    assert "whole = graph.assign(z, " in code
    given = {t.name: restored(arrays, t) for t in again.inputs}
    assert _bytes_of(graph, given) == _bytes_of(again, given)


@pytest.mark.slow
@pytest.mark.parametrize("where", quick("index", "slice"))
def test_a_wrong_assignment_has_a_reproducer(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.py"
    target = {"slice": "keys[:, 3:7]", "index": "fg.Graph.gather(graph, keys, at, axis=1)"}[where]
    file.write_text(
        "import fusegraph as fg\n\ngraph = fg.Graph('step')\n"
        "keys, at = graph.tensor('keys', (2, 8, 16)), graph.tensor('at', (4,), 'int32')\n"
        "row = graph.softmax(graph.tensor('row', (2, 4, 16)), axis=-1, name='soft')\n"
        f"new = graph.assign({target}, graph.tanh(row, name='value'), name='new')\n"
        "graph.output(graph.reduction(new, mode='max', axes=1), name='y')\n"
    )
    options = [str(file), "--engine", "cpu", "--out", str(tmp_path / "out"), "--json"]
    assert main(["debug", *options]) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        broken(patch, factor="1.1f")
        for command in (["debug"], ["reduce"]):
            assert main([*command, *options]) == 1
            (entry,) = json.loads(capsys.readouterr().out)["graphs"]
            with pytest.raises(SystemExit, match="1"):
                runpy.run_path(entry["reproducer"], run_name="__main__")
            capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(entry["reproducer"], run_name="__main__")


def test_graphs_that_assign_are_reduced() -> None:
    graph = fg.Graph("step")
    keys, row = graph.tensor("keys", (4, 16, 8)), graph.tensor("row", (4, 8))
    new = graph.assign(keys[:, 5], graph.exp(graph.relu(row, name="r"), name="e"), name="new")
    graph.output(graph.reduction(new, mode="max", axes=1), name="y")
    found = reduced(graph, random_inputs(graph), lambda made, given: any(n.op.name == "assign" for n in made.nodes))
    assert [n.name for n in found.graph.nodes] == ["new"]
    assert [t.name for t in found.graph.updates] == ["new"]
    assert check(found.graph, inputs=found.inputs).ok


def test_parts_of_a_graph() -> None:
    graph = layers(3)
    made = part(graph, [n for n in graph.nodes if n.name in ("n1", "f1")], ["n1"])
    assert [t.name for t in made.inputs] == ["m1"]
    assert [t.name for t in made.outputs] == ["n1", "f1"]
    assert {t.name for t in made.tensors.values() if t.is_constant} == {"c1.0", "c0.0"}


def test_each_kernel_is_judged_by_what_it_read() -> None:
    """What lies between is little, also where kernels read views, or what another one computes again."""
    graph = fg.Graph("views")
    x = graph.tensor("x", (16, 64))
    h = x
    for k in range(12):
        h = graph.gelu(graph.softmax(h, axis=-1) + x + h, name=f"g{k}")
        h = graph.transpose(graph.transpose(h, (1, 0)) * 0.5, (1, 0))
    graph.output(h)
    with walk.fixed_names(graph):
        steps = walk.Walk(SETUP.compile(graph), graph, random_inputs(graph))
        for kernel, known in steps.kernels():
            for name in (n for t in kernel.group.writes for n in steps.origins.names(t)[:1]):
                assert steps.behind(name, known)[0].node_count <= len(kernel.group.nodes)


def test_no_alarm_for_attention_with_as_many_keys_as_channels() -> None:
    """Scores are of the result's shape then, and part of the node that passes make of it."""
    graph = fg.Graph("attention")
    q, k, v = (graph.tensor(name, (1, 2, 16, 16)) for name in "qkv")
    graph.output(graph.sdpa(q, k, v, name="fused"))
    weights = graph.softmax(graph.matmul(k, graph.transpose(q, (0, 1, 3, 2)), name="scores") * 0.25, axis=-1)
    graph.output(graph.matmul(weights, v, name="written"))
    assert first_wrong(graph, random_inputs(graph), SETUP) is None


def test_no_alarm_for_random_graphs() -> None:
    """Assignments, composites and views among them: what they read and write is told right."""
    for seed in (0, 1, 15):
        recipe = seeded(seed)
        graph = recipe.build()
        assert first_wrong(graph, recipe.inputs(graph), Setup("cpu", strict=recipe.strict)) is None


def test_no_alarm_for_memory_of_other_kinds() -> None:
    """Donated inputs, packed elements, state, tensors without elements and without dimensions."""
    graph = fg.Graph("kinds")
    x, w = graph.tensor("x", (16, 16), donated=True), graph.tensor("w", (16, 16))
    graph.output(graph.softmax(graph.matmul(graph.softmax(graph.matmul(x, w)), w)))
    graph.output(graph.cast(graph.tensor("packed", (8, 16), "int4"), "float32") * 2.0)
    state, none = graph.tensor("state", (4, 8)), graph.tensor("none", (0, 8))
    graph.assign(state[1], graph.tensor("row", (8,)) * 2)
    graph.output(graph.relu(none))
    graph.output(graph.exp(graph.tensor("one", ())))
    inputs = random_inputs(graph)
    assert first_wrong(graph, inputs, SETUP) is None
    assert first_not_finite(graph, inputs, SETUP) is None


@pytest.mark.slow
def test_many_nodes_take_seconds() -> None:
    graph = layers(125)
    assert graph.node_count == 500
    began = sum(os.times()[:4])  # of this process and the compilers that it starts, whatever else the machine does
    assert first_wrong(graph, random_inputs(graph), SETUP) is None
    assert sum(os.times()[:4]) - began < 30


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = layers(4)
    inputs = random_inputs(graph)
    assert first_wrong(graph, inputs, Setup("cuda")) is None
    assert first_wrong(graph, inputs, Setup("cuda"), against="cpu") is None
    broken(monkeypatch)
    graph = layers(5)  # the plan of the other one is kept
    inputs = random_inputs(graph)
    found = first_wrong(graph, inputs, Setup("cuda"))
    assert found is not None
    assert found.node == "f2"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_arrays_are_refused_by_name(tmp_path, save):
    """Files of arrays that were cut short or changed are read, or refused with the file's name."""
    path, rng = tmp_path / "x.npz", np.random.default_rng(1)
    save(path, a=np.arange(30.0), b=np.ones((3, 4), "i4"))
    whole = path.read_bytes()
    told = []
    for _ in range(300):
        data = bytearray(whole[: rng.integers(len(whole))] if rng.random() < 0.3 else whole)
        for at in rng.integers(len(whole), size=3):
            data[at : at + 1] = rng.bytes(1)
        path.write_bytes(data)
        try:
            load_arrays(path)
        except FileError as error:
            told.append(str(error))
    assert len(told) > 200
    assert all(str(path) in text for text in told)
