"""ONNX models with caches that are inputs and outputs: they may be one array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

from onnx import TensorProto, helper

import fusegraph
from fusegraph.errors import ModelError
from fusegraph.plan import plan
from fusegraph.report.check import check


def cached(dtype: int = TensorProto.FLOAT) -> Any:
    """A model that writes a row into each of two caches, and adds up what is there then."""
    nodes = [helper.make_node("Relu", ["x"], ["row"]), helper.make_node("Expand", ["at", "shape"], ["places"])]
    for n in "01":
        scattered = ["past.key", "places", "row"] if n == "0" else ["past.value", "places", "x"]
        present = "present.key" if n == "0" else "present.value"
        nodes.append(helper.make_node("ScatterElements", scattered, [present], axis=1))
    nodes.append(helper.make_node("Mul", ["present.key", "present.value"], ["both"]))
    nodes.append(helper.make_node("ReduceSum", ["both"], ["y"]))
    cache = [helper.make_tensor_value_info(f"past.{n}", dtype, [2, 16, 64]) for n in ("key", "value")]
    made = [helper.make_tensor_value_info(f"present.{n}", dtype, [2, 16, 64]) for n in ("key", "value")]
    x = helper.make_tensor_value_info("x", dtype, [2, 1, 64])
    at = helper.make_tensor_value_info("at", TensorProto.INT64, [1, 1, 1])
    y = helper.make_tensor_value_info("y", dtype, None)
    shape = helper.make_tensor("shape", TensorProto.INT64, [3], [2, 1, 64])
    graph = helper.make_graph(nodes, "cached", [*cache, x, at], [y, *made], [shape])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def test_caches_are_written_in_place() -> None:
    model = fusegraph.onnx.from_proto(cached(), alias={"past": "present"})
    assert [x.name for x in model.graph.updates.values()] == ["past.key", "past.value"]
    assert check(model.graph, "cpu").ok
    assert "past.key" in {t.base.name for k in plan(model.graph).kernels for t in k.group.writes}
    rng = np.random.default_rng(0)
    keys, values, x = (rng.standard_normal(s).astype(np.float32) for s in ((2, 16, 64), (2, 16, 64), (2, 1, 64)))
    expected = keys.copy()
    expected[:, 5] = np.maximum(x[:, 0], 0)
    y, first, second = model.compile("cpu")(keys, values, x, np.full((1, 1, 1), 5))
    assert first is keys
    assert second is values
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_allclose(y.reshape(()), (keys * values).sum(), rtol=1e-4)


def test_without_an_alias_caches_are_copied() -> None:
    model = fusegraph.onnx.from_proto(cached())
    assert not model.graph.updates
    assert len(model.graph.results) == 3


def test_aliases_that_cannot_be() -> None:
    with pytest.raises(ModelError, match="no output has an input's name with 'now' in place of 'past'"):
        fusegraph.onnx.from_proto(cached(), alias={"past": "now"})
    with pytest.raises(ModelError, match=r"output 'y', .* cannot overwrite input 'x'"):
        fusegraph.onnx.from_proto(cached(), alias={"x": "y"})
