"""ONNX models: what is loaded, and what there is nothing for."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402
from onnx_models import I64, built, error, expected, model, one, perceptron, save, tensor, value  # noqa: E402

import fusegraph as fg  # noqa: E402
from fusegraph.cli import main  # noqa: E402
from fusegraph.errors import ArgumentError, FileError, ModelError, UnsupportedModelError  # noqa: E402
from fusegraph.frontends.onnx import importer  # noqa: E402
from fusegraph.loader import load_graphs  # noqa: E402


@pytest.fixture
def saved(tmp_path):
    return lambda proto, name="net.onnx": save(proto, tmp_path, name)


# ---- what is loaded


def test_a_model_is_a_graph(saved):
    proto = perceptron()
    loaded = fg.onnx.load(saved(proto), shapes={"batch": 5})
    assert loaded.graph.name == "net"
    assert [(n, t.name, t.shape) for n, t in loaded.inputs.items()] == [("x", "x", (5, 8))]
    assert [(n, t.shape) for n, t in loaded.outputs.items()] == [("y", (5, 16))]
    assert {n: t.is_constant for n, t in loaded.constants.items()} == {"w/1": True, "b": True}
    assert [n.name for n in loaded.graph.nodes] == ["product", "sum", "hidden", "y"]
    x = np.random.default_rng(2).normal(size=(5, 8)).astype(np.float32)
    np.testing.assert_allclose(loaded.compile("reference")(x), expected(x, proto), rtol=1e-6)


def test_shapes_may_be_those_of_inputs():
    assert built(perceptron(), shapes={"x": (3, 8)}).outputs["y"].shape == (3, 16)
    assert "has size 8 along dimension 1, the shape given has 9" in error(perceptron(), shapes={"x": (3, 9)})
    assert "no input and no dimension 'rows'" in error(perceptron(), shapes={"batch": 2, "rows": 3})


def test_shapes_that_are_open_are_asked_for():
    nodes = [("Add", "a b", "y")]
    proto = model(nodes, [value("a", ["n", "m"]), value("b")], [value("y")])
    assert "give shapes for input 'b', which has no shape" in error(proto)
    assert built(proto, shapes={"n": 2, "m": 3, "b": (1, 3)}).outputs["y"].shape == (2, 3)


def test_shapes_that_are_computed_are_known():
    """x reshaped to (batch, everything else), as exporters write it."""
    nodes = [
        ("Shape", "x", "shape"),
        ("Gather", "shape zero", "batch", {"axis": 0}),
        ("Unsqueeze", "batch zeros", "row"),
        ("Concat", "row rest", "target", {"axis": 0}),
        ("Reshape", "x target", "y"),
    ]
    constants = [tensor("zero", np.int64(0)), tensor("zeros", [0]), tensor("rest", [-1])]
    loaded = built(model(nodes, [value("x", [4, 3, 2])], [value("y")], constants))
    assert loaded.outputs["y"].shape == (4, 6)


def test_values_of_inputs_that_decide_on_shapes(saved):
    proto = model([("Reshape", "x target", "y")], [value("x", [6]), value("target", [2], I64)], [value("y")])
    with pytest.raises(fg.onnx.InputValueError, match="give them as values") as caught:
        built(proto)
    assert caught.value.inputs == ("target",)
    loaded = built(proto, values={"target": np.array([2, 3])})
    assert list(loaded.inputs) == ["x"]
    assert loaded.outputs["y"].shape == (2, 3)
    assert "is int64, the value given float64" in error(proto, values={"target": np.array([2.0, 3.0])})


def test_names_are_those_of_the_model_as_far_as_they_can_be():
    nodes = [("Relu", "/in|put", "/layer/Relu_output_0"), ("Exp", "/layer/Relu_output_0", "ünï")]
    loaded = built(model(nodes, [value("/in|put", [2])], [value("ünï")]))
    assert [t.name for t in loaded.inputs.values()] == ["in_put"]
    assert [n.name for n in loaded.graph.nodes] == ["layer/Relu_output_0", "_n_"]
    assert list(loaded.outputs) == ["ünï"]


def test_outputs_may_be_inputs_constants_and_repeated():
    nodes = [("Identity", "x", "a"), ("Identity", "x", "b"), ("Relu", "x", "c"), ("Identity", "c", "d")]
    loaded = built(model(nodes, [value("x", [2])], [value(n) for n in "abcdk"], [tensor("k", np.float32([7]))]))
    results = loaded.compile("reference")(np.float32([-1, 2]))
    assert [r.tolist() for r in results] == [[-1, 2], [-1, 2], [0, 2], [0, 2], [7]]


def test_initialisers_are_defaults_of_inputs():
    proto = model(
        [("Add", "x k", "y")], [value("x", [2]), value("k", [2])], [value("y")], [tensor("k", np.ones(2, "f"))]
    )
    assert list(built(proto).inputs) == ["x"]
    given = built(proto, values={"k": np.float32([5, 6])})
    assert given.compile("reference")(np.zeros(2, "f")).tolist() == [5, 6]


def test_branches_of_known_conditions_and_functions():
    def branch(name, operator):
        return helper.make_graph([helper.make_node(operator, ["x"], ["r"])], name, [], [value("r")])

    double = helper.make_function(
        "own", "Twice", ["a"], ["b"], [helper.make_node("Mul", ["a", "k"], ["b"])], [helper.make_opsetid("", 21)]
    )
    double.node.insert(0, helper.make_node("Constant", [], ["k"]))
    double.attribute.append("factor")
    reference = double.node[0].attribute.add()
    reference.name, reference.ref_attr_name, reference.type = "value_float", "factor", onnx.AttributeProto.FLOAT
    nodes = [
        helper.make_node("If", ["flag"], ["z"], then_branch=branch("t", "Neg"), else_branch=branch("e", "Exp")),
        helper.make_node("Twice", ["z"], ["y"], domain="own", factor=3.0),
    ]
    proto = model(
        nodes,
        [value("x", [2])],
        [value("y")],
        [tensor("flag", True)],
        functions=[double],
        opsets=[helper.make_opsetid("own", 1)],
    )
    assert built(proto).compile("reference")(np.float32([1, 2])).tolist() == [-3, -6]


def test_operators_that_onnx_defines_by_others():
    """The loss is not in the table: it is written out as ONNX says, with the attributes of the node."""
    proto = model(
        [("SoftmaxCrossEntropyLoss", "x t", "y", {"reduction": "sum"})],
        [value("x", [3, 5]), value("t", [3], I64)], [value("y")],
    )  # fmt: skip
    x, t = np.random.default_rng(1).normal(size=(3, 5)).astype("f"), np.array([1, 4, 0])
    logarithms = x - np.log(np.exp(x).sum(1, keepdims=True))
    y = built(proto).compile("reference")(x, t)
    np.testing.assert_allclose(y, -logarithms[np.arange(3), t].sum(), rtol=1e-5)


def test_attention_is_one_op():
    shape = (1, 2, 3, 4)
    loaded = built(one("Attention", shape, shape, shape, opset=24, attributes={"is_causal": 1}))
    assert [n.op.name for n in loaded.graph.nodes] == ["sdpa"]
    q, k, v = (np.random.default_rng(n).normal(size=shape).astype("f") for n in range(3))
    e = np.exp(q @ k.swapaxes(2, 3) / 2.0) * np.tril(np.ones((3, 3)))
    np.testing.assert_allclose(loaded.compile("reference")(q, k, v), e / e.sum(-1, keepdims=True) @ v, rtol=1e-5)


def body(nodes, inputs, outputs):
    made = [helper.make_node(n, a.split(), b.split()) for n, a, b in nodes]
    return helper.make_graph(
        made, "body", [value(n, None, 0) for n in inputs.split()], [value(n) for n in outputs.split()]
    )


def looped(count, condition=True, ends="c"):
    """Builds a Loop that doubles x; returns the last value and those of all iterations."""
    step = body([("Add", "v v", "w"), ("Identity", ends, "d"), ("Identity", "w", "all")], "i c v", "d w all")
    node = helper.make_node("Loop", ["n", "go", "x"], ["y", "every"], body=step)
    numbers = [tensor("n", np.int64(count)), tensor("go", np.bool_(condition))]
    return model([node], [value("x", [2])], [value("y"), value("every")], numbers)


def test_loops_are_written_once_an_iteration(monkeypatch):
    monkeypatch.setattr(importer, "MAX_NODES", 500)
    y, every = built(looped(3)).compile("reference")(np.float32([1, 2]))
    assert y.tolist() == [8, 16]
    assert every.tolist() == [[2, 4], [4, 8], [8, 16]]
    assert "Loop: results of no iteration" in error(looped(3, False), UnsupportedModelError)
    assert "there are more than" in error(looped(2**62))
    dynamic = looped(3)
    del dynamic.graph.initializer[0]
    dynamic.graph.input.append(value("n", [], I64))
    assert "the number of iterations must be known" in error(dynamic, fg.onnx.InputValueError)


def test_scans_go_along_sequences():
    step = body([("Add", "s x", "t"), ("Identity", "t", "out")], "s x", "t out")
    node = helper.make_node("Scan", ["zero", "x"], ["last", "sums"], body=step, num_scan_inputs=1)
    proto = model([node], [value("x", [4, 2])], [value("last"), value("sums")], [tensor("zero", np.zeros(2, "f"))])
    x = np.arange(8, dtype="f").reshape(4, 2)
    last, sums = built(proto).compile("reference")(x)
    np.testing.assert_array_equal(sums, np.cumsum(x, 0))
    np.testing.assert_array_equal(last, x.sum(0))


def test_shapes_that_are_scattered_are_known():
    """As models compute that replace a size in a shape."""
    nodes = [
        helper.make_node("ScatterElements", ["shape", "place", "size"], ["first"]),
        helper.make_node("ScatterND", ["first", "places", "size"], ["both"]),
        helper.make_node("Reshape", ["x", "both"], ["y"]),
    ]
    known = [("shape", [7, 7]), ("place", [1]), ("size", [3]), ("places", [[0]])]
    initializers = [tensor(name, np.array(numbers, np.int64)) for name, numbers in known]
    loaded = built(model(nodes, [value("x", [9])], [value("y")], initializers))
    assert loaded.graph.outputs[0].shape == (3, 3)


@pytest.mark.parametrize(
    ("operator", "expected"),
    [("ReduceMean", [-2, 2]), ("ReduceL2", [5, 5]), ("ReduceLogSumExp", [1, 5]), ("ReduceSumSquare", [26, 26])],
)
def test_reductions_of_integers(operator, expected):
    """Rounded towards zero."""
    proto = one(operator, [2, 2], element=TensorProto.INT32, attributes={"axes": [1], "keepdims": 0}, opset=13)
    x = np.array([[-5, 1], [5, -1]], np.int32)
    assert built(proto).compile("reference")(x).tolist() == expected


# ---- what there is nothing for


def test_all_that_is_unsupported_is_listed_at_once():
    nodes = [
        helper.make_node("Multinomial", ["x"], ["h"], "distinct"),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Fancy", ["r"], ["f"], "mine", domain="com.example"),
        helper.make_node("RandomNormalLike", ["x"], ["n"]),
    ]
    proto = model(
        nodes, [value("x", [2, 2, 2]), value("w", [1, 8, 2]), value("u", [3], TensorProto.COMPLEX64)], [value("f")],
        opsets=[helper.make_opsetid("com.example", 1)],
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError) as caught:
        built(proto)
    assert str(caught.value) == (
        "the model uses what fusegraph does not have:\n"
        "  type complex64: input 'u'\n"
        "  operator Multinomial: node 'distinct' (Multinomial)\n"
        "  operator com.example.Fancy: node 'mine' (com.example.Fancy)\n"
        "  operator RandomNormalLike: the node of 'n' (RandomNormalLike)"
    )
    assert caught.value.reasons == (
        "type complex64",
        "operator Multinomial",
        "operator com.example.Fancy",
        "operator RandomNormalLike",
    )


def test_types_that_an_operator_does_not_take_are_unsupported():
    message = error(one("Erf", [2], element=I64), UnsupportedModelError)
    assert "Erf: erf: erf does not take int64; cast to one of float64, float32" in message


# ---- as a backend, and on the command line


def test_the_backend():
    backend = fg.onnx.Backend
    assert backend.supports_device("CPU")
    proto = perceptron()
    for device in ("TPU", "CUDAX", "CUDA:-1", "CUDA:one", "CUDA:", "cuda"):
        assert not backend.supports_device(device)
        with pytest.raises(ArgumentError, match="is none of CPU, CUDA, CUDA:1"):
            backend.prepare(proto, device)
    rep = backend.prepare(proto, "CUDA:1", engine="reference")
    for batch in (2, 3, 2):
        x = np.random.default_rng(batch).normal(size=(batch, 8)).astype(np.float32)
        np.testing.assert_allclose(rep.run([x])[0], expected(x, proto), rtol=1e-6)
        np.testing.assert_allclose(rep.run({"x": x})[0], expected(x, proto), rtol=1e-6)
    reshape = model([("Reshape", "x to", "y")], [value("x", [6]), value("to", None, I64)], [value("y")])
    for shape in ((2, 3), (3, 2, 1)):
        (y,) = backend.run_model(reshape, [np.arange(6, dtype="f"), np.array(shape)], engine="reference")
        assert y.shape == shape


def test_the_backend_runs_nodes_and_knows_what_it_can() -> None:
    backend = fg.onnx.Backend
    node = helper.make_node("Clip", ["x", "", "most"], ["y"])
    (y,) = backend.run_node(node, [np.float32([1, 5, 9]), np.float32(6)], engine="reference")
    assert y.tolist() == [1, 5, 6]
    assert backend.is_compatible(perceptron())
    assert not backend.is_compatible(one("Multinomial", [3]))


def test_without_the_package() -> None:
    code = "import sys; sys.modules['onnx'] = None; import fusegraph as fg; fg.onnx"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ToolchainError: ONNX models are read with the package onnx: pip install 'fusegraph[onnx]'" in done.stderr


def test_the_command_line(saved, tmp_path, capsys):
    file = saved(perceptron())
    assert main(["explain", f"{file}:batch=4", "--target", "sm_90a", "--json"]) == 0
    (graph,) = json.loads(capsys.readouterr().out)["graphs"]
    assert graph["name"] == "net"
    assert main(["run", f"{file}:x=4x8", "--engine", "reference", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["graphs"][0]["outputs"][0]["shape"] == [4, 16]
    out = str(tmp_path / "out")
    assert main(["compile", f"{file}:batch=4", "--engine", "reference", "--out", out]) == 0
    capsys.readouterr()
    assert main(["explain", str(file), "--dim", "batch=1..16", "--json"]) == 0
    (graph,) = json.loads(capsys.readouterr().out)["graphs"]
    assert {"batch": [1, 1]} in [each["sizes"] for each in graph["ranges"]]
    assert main(["run", str(file), "--engine", "cpu", "--check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["graphs"]
    assert [g["sizes"] for g in found] == [{"batch": 1}, {"batch": 8}, {"batch": 64}]
    assert main(["compile", str(file), "--engine", "cpu", "--out", out]) == 0


def test_sizes_on_the_command_line(saved):
    file = saved(perceptron())
    (graph,) = load_graphs(f"{file}:batch=3")
    assert graph.outputs[0].shape == (3, 16)
    with pytest.raises(FileError, match="'batch=many' is no size"):
        load_graphs(f"{file}:batch=many")
    with pytest.raises(ModelError, match="no input and no dimension 'rows'"):
        load_graphs(f"{file}:batch=3,rows=4")
