"""Builders of small ONNX models."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import fusegraph as fg
from fusegraph.errors import ModelError

F, I64 = TensorProto.FLOAT, TensorProto.INT64


def value(name, shape=None, element=F):
    return helper.make_tensor_value_info(name, element, shape)


def tensor(name, array):
    return numpy_helper.from_array(np.asarray(array), name)


def model(nodes, inputs, outputs, initializers=(), opset=21, functions=(), opsets=()):
    """Builds a model of nodes given as (operator, inputs, outputs, attributes)."""
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
    """Returns a model of one node."""
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


def save(proto, folder, name="net.onnx"):
    """Writes a model (or these bytes) to a file and returns its path."""
    path = folder / name
    path.write_bytes(proto if isinstance(proto, bytes) else proto.SerializeToString())
    return str(path)
