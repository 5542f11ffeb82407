"""ONNX models: what is loaded, and what a model that is unsupported, malformed or hostile is answered with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

import fusegraph as fg  # noqa: E402
from fusegraph.cli import main  # noqa: E402
from fusegraph.errors import FileError, ModelError, UnsupportedModelError  # noqa: E402
from fusegraph.frontends.onnx import importer  # noqa: E402
from fusegraph.loader import load_graphs  # noqa: E402

F, I64 = TensorProto.FLOAT, TensorProto.INT64


def value(name, shape=None, element=F):
    return helper.make_tensor_value_info(name, element, shape)


def tensor(name, array):
    return numpy_helper.from_array(np.asarray(array), name)


def model(nodes, inputs, outputs, initializers=(), opset=21, functions=(), opsets=()):
    """A model of nodes given as (operator, inputs, outputs, attributes)."""
    made = [
        node
        if isinstance(node, onnx.NodeProto)
        else helper.make_node(node[0], node[1].split(), node[2].split(), **(node[3] if len(node) > 3 else {}))
        for node in nodes
    ]
    graph = helper.make_graph(made, "g", inputs, outputs, list(initializers))
    imports = [helper.make_opsetid("", opset), *opsets]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions))


def built(proto, **options):
    return fg.onnx.from_proto(proto, **options)


def error(proto, kind=ModelError, **options):
    with pytest.raises(kind) as caught:
        built(proto, **options)
    return str(caught.value)


def one(operator, *shapes, attributes=None, opset=21, element=F, inputs="abcdef", outputs="y"):
    """A model of one node."""
    names = inputs[: len(shapes)]
    return model(
        [(operator, " ".join(names), outputs, attributes or {})],
        [value(n, s, element) for n, s in zip(names, shapes)],
        [value(n, None, 0) for n in outputs.split()],
        opset=opset,
    )


def perceptron(batch="batch"):
    rng = np.random.default_rng(1)
    weights = [tensor("w/1", rng.normal(size=(8, 16)).astype(np.float32)), tensor("b", np.ones(16, np.float32))]
    nodes = [
        ("MatMul", "x w/1", "product"),
        ("Add", "product b", "sum"),
        ("Relu", "sum", "hidden"),
        ("Softmax", "hidden", "y", {"axis": -1}),
    ]
    return model(nodes, [value("x", [batch, 8])], [value("y", [batch, 16])], weights)


def expected(x, proto):
    w, b = (numpy_helper.to_array(t).astype(np.float64) for t in proto.graph.initializer)
    hidden = np.maximum(x @ w + b, 0)
    e = np.exp(hidden - hidden.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.fixture
def saved(tmp_path):
    def save(proto, name="net.onnx"):
        path = tmp_path / name
        path.write_bytes(proto if isinstance(proto, bytes) else proto.SerializeToString())
        return str(path)

    return save


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


def test_sizes_that_are_open_are_asked_for():
    nodes = [("Add", "a b", "y")]
    proto = model(nodes, [value("a", ["n", "m"]), value("b", [None, "m"])], [value("y")])
    message = error(proto)
    assert "give sizes for dimension 'n', dimension 'm', dimension 0 of input 'b'" in message
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
    """x doubled in every iteration, and all of them."""
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
        helper.make_node("Unique", ["x"], ["h"], "distinct"),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Fancy", ["r"], ["f"], "mine", domain="com.example"),
        helper.make_node("NonZero", ["x"], ["n"]),
    ]
    proto = model(
        nodes, [value("x", [2, 2, 2]), value("w", [1, 8, 2]), value("u", [3], TensorProto.UINT16)], [value("f")],
        opsets=[helper.make_opsetid("com.example", 1)],
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError) as caught:
        built(proto)
    assert str(caught.value) == (
        "the model uses what fusegraph does not have:\n"
        "  type uint16: input 'u'\n"
        "  operator Unique: node 'distinct' (Unique)\n"
        "  operator com.example.Fancy: node 'mine' (com.example.Fancy)\n"
        "  operator NonZero: the node of 'n' (NonZero)"
    )
    assert caught.value.reasons == ("type uint16", "operator Unique", "operator com.example.Fancy", "operator NonZero")


def test_types_that_an_operator_does_not_take_are_unsupported():
    message = error(one("Erf", [2], element=I64), UnsupportedModelError)
    assert "Erf: erf: erf does not take int64; cast to one of float64, float32" in message


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
    "large pads": (one("Conv", [1, 1, 4, 4], [1, 1, 3, 3], attributes={"pads": [2**62] * 4}), "overflows"),
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


def test_branches_within_branches():
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["r0"])], "g", [], [value("r0")])
    for n in range(40):
        node = helper.make_node("If", ["flag"], [f"r{n + 1}"], then_branch=graph, else_branch=graph)
        graph = helper.make_graph([node], "g", [], [value(f"r{n + 1}")]) if n < 8 else graph
    loaded = built(model(list(graph.node), X, [value(graph.output[0].name)], [tensor("flag", True)]))
    assert len(loaded.graph.nodes) == 1


# ---- as a backend, and on the command line


def test_the_backend():
    backend = fg.onnx.Backend
    assert backend.supports_device("CPU")
    assert not backend.supports_device("TPU")
    proto = perceptron()
    rep = backend.prepare(proto, engine="reference")
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
    assert not backend.is_compatible(one("Unique", [3]))


def test_without_the_package() -> None:
    code = "import sys; sys.modules['onnx'] = None; import fusegraph as fg; fg.onnx"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ToolchainError: ONNX models are read with the package onnx: pip install 'fusegraph[onnx]'" in done.stderr


def test_the_command_line(saved, tmp_path, capsys):
    file = saved(perceptron())
    assert main(["explain", f"{file}:batch=4", "--arch", "sm_90a", "--json"]) == 0
    (graph,) = json.loads(capsys.readouterr().out)["graphs"]
    assert graph["name"] == "net"
    assert main(["run", f"{file}:x=4x8", "--engine", "reference", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["graphs"][0]["outputs"][0]["shape"] == [4, 16]
    out = str(tmp_path / "out")
    assert main(["compile", f"{file}:batch=4", "--engine", "reference", "--out", out]) == 0
    capsys.readouterr()
    assert main(["explain", file]) == 2
    assert "give sizes for dimension 'batch'" in capsys.readouterr().err


def test_sizes_on_the_command_line(saved):
    file = saved(perceptron())
    (graph,) = load_graphs(f"{file}:batch=3")
    assert graph.outputs[0].shape == (3, 16)
    with pytest.raises(FileError, match="'batch=many' is no size"):
        load_graphs(f"{file}:batch=many")
    with pytest.raises(ModelError, match="no input and no dimension 'rows'"):
        load_graphs(f"{file}:batch=3,rows=4")
