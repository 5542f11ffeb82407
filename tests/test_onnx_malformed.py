"""ONNX models that are malformed or hostile: each is answered with an error that names what is wrong."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402
from onnx_models import I64, F, built, error, model, one, perceptron, save, tensor, value  # noqa: E402

import fusegraph as fg  # noqa: E402
from fusegraph.errors import ModelError  # noqa: E402
from fusegraph.frontends.onnx import importer, table  # noqa: E402


@pytest.fixture
def saved(tmp_path):
    return lambda proto, name="net.onnx": save(proto, tmp_path, name)


# ---- what is malformed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no graph"),
        (b"\xff" * 100, "is no ONNX model, or is cut short"),
        (b"import fusegraph\n", "is no ONNX model, or is cut short"),
        (perceptron().SerializeToString()[:-20], "is no ONNX model, or is cut short"),
    ],
)
def test_files_that_are_none(saved, content, message):
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        fg.onnx.load(saved(content))
    assert "net.onnx" in str(caught.value)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ModelError, match=r"is no file; give an ONNX model"):
        fg.onnx.load(tmp_path / "none.onnx")
    with pytest.raises(ModelError, match=r"is a folder"):
        fg.onnx.load(tmp_path)


X = [value("x", [2, 2])]
MALFORMED = {
    "cycle": (model([("Add", "x b", "a"), ("Relu", "a", "b")], X, [value("b")]), "its input 'b' is no input"),
    "itself": (model([("Add", "x a", "a")], X, [value("a")]), "its input 'a' is no input"),
    "twice": (model([("Relu", "x", "a"), ("Exp", "x", "a")], X, [value("a")]), "'a' is defined twice"),
    "no output": (model([("Relu", "x", "a")], X, [value("b")]), "no node makes the output 'b'"),
    "no outputs": (model([("Relu", "x", "a")], X, []), "it has no outputs"),
    "two inputs": (model([("Relu", "x", "a")], X * 2, [value("a")]), "two inputs have the name 'x'"),
    "negative": (one("Relu", [2, -3]), "has a negative size: [2, -3]"),
    "ranks": (one("Relu", [1] * 65), "has 65 dimensions; at most 64 are possible"),
    "attribute": (one("Elu", [2], attributes={"alpha": 2}), "attribute 'alpha' has type 2, not 1"),
    "unknown attribute": (one("Elu", [2], attributes={"beta": 2.0}), "it has no attribute 'beta' in version 6"),
    "no attribute": (one("Concat", [2]), "its attribute 'axis' is missing"),
    "inputs": (one("Relu", [2], [2]), "it has 1 to 1 inputs, got 2"),
    "left out": (model([helper.make_node("Add", ["x", ""], ["y"])], X, [value("y")]), "its input 'B' is left out"),
    "outputs": (one("Relu", [2], outputs="y z"), "it has at most 1 outputs, got 2"),
    "shapes": (one("Add", [2], [3]), "do not broadcast"),
    "declared": (model([("Relu", "x", "y")], X, [value("y", [2, 2], I64)]), "is declared as int64, but is float32"),
    "opset": (one("Relu", [2], opset=1000), "it is of operator set 1000; the installed package onnx knows those up to"),
    "axis": (one("Softmax", [2], attributes={"axis": 5}), "(Softmax): axis 5 is not one of the 1 axes"),
    "strides": (one("Conv", [1, 1, 4, 4], [1, 1, 3, 3], attributes={"strides": [0, 1]}), "strides has 2 numbers of at"),
    "pads": (one("Conv", [1, 1, 4, 4], [1, 1, 3, 3], attributes={"pads": [-1] * 4}), "padding"),
    "equation": (one("Einsum", [2], attributes={"equation": "a" * 200_000}), "(Einsum): einsum 'aaaa"),
    "large pads": (one("Conv", [1, 1, 4, 4], [1, 1, 3, 3], attributes={"pads": [2**62] * 4}), "at most 64 bits"),
    "no graph": (onnx.ModelProto(), "it has no graph"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_models(case):
    proto, message = MALFORMED[case]
    assert message in error(proto)


def raw(name, dims, data=b"", element=F, **fields):
    return TensorProto(name=name, dims=dims, data_type=element, raw_data=data, **fields)


@pytest.mark.parametrize(
    ("initializer", "message"),
    [
        (raw("k", [2], b"1234"), "initialiser 'k' [2] of float32 has 4 bytes, not 8"),
        (raw("k", [2**40, 2**20]), "has 0 bytes, not"),
        (raw("k", [-1]), "initialiser 'k' has a negative size"),
        (TensorProto(name="k", dims=[3], data_type=F, float_data=[1, 2]), "[3] of float32 has 2 elements, not 3"),
        (TensorProto(name="k", dims=[1], data_type=F, int32_data=[1]), "has 0 elements, not 1"),
        (raw("k", [1], b"1234", TensorProto.STRING), "type string: initialiser 'k'"),
        (raw("k", [1], b"1234", 1234), "type number 1234: initialiser 'k'"),
    ],
)
def test_malformed_tensors(initializer, message):
    assert message in error(model([("Add", "x k", "y")], X, [value("y")], [initializer]))


# ---- external data


def external(location, length=8, offset=0):
    proto = TensorProto(name="k", dims=[2], data_type=F, data_location=TensorProto.EXTERNAL)
    for key, content in (("location", location), ("offset", str(offset)), ("length", str(length))):
        entry = proto.external_data.add()
        entry.key, entry.value = key, content
    return model([("Add", "x k", "y")], X, [value("y")], [proto])


def test_external_data(saved, tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"junk" + np.float32([3, 4]).tobytes())
    loaded = fg.onnx.load(saved(external("weights.bin", offset=4)))
    assert loaded.compile("reference")(np.zeros((2, 2), "f")).tolist() == [[3, 4], [3, 4]]
    assert "load the model from its file" in error(external("weights.bin"))


@pytest.mark.parametrize(
    ("location", "options", "message"),
    [
        ("../secret.bin", {}, "is not inside of the model's folder"),
        ("/etc/hostname", {}, "is not inside of the model's folder"),
        ("link.bin", {}, "is not inside of the model's folder"),
        ("", {}, "is not inside of the model's folder"),
        ("a\0b", {}, "malformed entries"),
        ("none.bin", {}, "is no file"),
        (".", {}, "is no file"),
        ("weights.bin", {"offset": 8}, "bytes 8 to 16 are not all in"),
        ("weights.bin", {"offset": -4}, "bytes -4 to 4 are not all in"),
        ("weights.bin", {"length": 4}, "has 4 bytes of external data, not 8"),
        ("weights.bin", {"length": "many"}, "malformed entries"),
    ],
)
def test_external_data_that_is_refused(saved, tmp_path, location, options, message):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    (folder / "weights.bin").write_bytes(bytes(12))
    os.symlink(tmp_path / "secret.bin", folder / "link.bin")
    with pytest.raises(ModelError, match=re.escape(message)):
        fg.onnx.load(saved(external(location, **options), "model/net.onnx"))


# ---- what would take forever


def function(name, body):
    nodes = [helper.make_node(n, [a], [b], domain=d) for n, a, b, d in body]
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["a"], ["b"], nodes, imports)


def calling(functions):
    node = helper.make_node(functions[-1].name, ["x"], ["y"], domain="own")
    return model([node], X, [value("y")], functions=functions, opsets=[helper.make_opsetid("own", 1)])


def test_functions_that_call_themselves():
    assert "more than 32 deep, or call themselves" in error(calling([function("F", [("F", "a", "b", "own")])]))


def test_functions_that_double(monkeypatch):
    monkeypatch.setattr(importer, "MAX_NODES", 2000)
    layers = [function("F0", [("Relu", "a", "b", "")])]
    for n in range(25):
        layers.append(function(f"F{n + 1}", [(f"F{n}", "a", "m", "own"), (f"F{n}", "m", "b", "own")]))
    assert "there are more than 2000 nodes" in error(calling(layers))


def test_tensors_that_are_huge_are_not_made():
    """A terabyte as a result is a graph, and takes nothing until it runs; as a shape it is refused."""
    nodes = [("ConstantOfShape", "shape", "big"), ("Add", "big x", "y")]
    shape = tensor("shape", np.array([2**20, 2**20, 1]))
    loaded = built(model(nodes, [value("x", [1])], [value("y")], [shape]))
    assert loaded.outputs["y"].nbytes == 2**42
    nodes = [("ConstantOfShape", "shape", "big"), ("Cast", "big", "sizes", {"to": I64}), ("Reshape", "x sizes", "y")]
    shape = tensor("shape", np.array([2**30]))
    assert "too large to be computed before" in error(model(nodes, [value("x", [1])], [value("y")], [shape]))


def test_sequences_that_are_too_long(monkeypatch):
    monkeypatch.setattr(table, "MAX_WRITTEN", 300)
    proto = one("GRU", [2**30, 1, 4], [1, 12, 4], [1, 12, 4], attributes={"hidden_size": 4})
    assert "more than 300 nodes would be written" in error(proto)


def test_branches_within_branches():
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["r0"])], "g", [], [value("r0")])
    for n in range(40):
        node = helper.make_node("If", ["flag"], [f"r{n + 1}"], then_branch=graph, else_branch=graph)
        graph = helper.make_graph([node], "g", [], [value(f"r{n + 1}")]) if n < 8 else graph
    loaded = built(model(list(graph.node), X, [value(graph.output[0].name)], [tensor("flag", True)]))
    assert len(loaded.graph.nodes) == 1
