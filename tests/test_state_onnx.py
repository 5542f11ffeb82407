"""ONNX models with caches that are inputs and outputs: they may be one array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

from onnx import TensorProto, helper

import fusegraph
import fusegraph as fg
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.errors import ModelError
from fusegraph.lowering.base import Options
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


def written(seed: int) -> tuple[Any, list[Any]]:
    """A model that changes a cache some times, by operators that exporters write, and reads what is there between."""
    draw = np.random.default_rng(seed)
    nodes, constants, last = [], [], "past"
    rows = {"x": 2}
    for n in range(int(draw.integers(1, 4))):
        value, new = f"value{n}", "present" if n == 0 else f"present{n}"
        nodes.append(
            helper.make_node(str(draw.choice(["Relu", "Neg", "Tanh"])), [str(draw.choice(list(rows)))], [value])
        )
        begin = int(draw.integers(0, 7))
        for name, number in ((f"b{n}", begin), (f"e{n}", begin + 2)):
            constants.append(helper.make_tensor(name, TensorProto.INT64, [1], [number]))
        if draw.integers(2):
            nodes.append(helper.make_node("ScatterElements", [last, "at", value], [new], axis=1))
        else:
            nodes.append(helper.make_node("Slice", [last, "none", f"b{n}", "one"], [f"head{n}"]))
            nodes.append(helper.make_node("Slice", [last, f"e{n}", "end", "one"], [f"tail{n}"]))
            nodes.append(helper.make_node("Concat", [f"head{n}", value, f"tail{n}"], [new], axis=1))
        nodes.append(helper.make_node("Slice", [(last, new)[draw.integers(2)], f"b{n}", f"e{n}", "one"], [f"read{n}"]))
        rows[f"read{n}"] = 2
        last = new
    for node in nodes:  # the last value has the name that the alias asks for
        for names in (node.input, node.output):
            names[:] = [{"present": "first", last: "present"}.get(name, name) for name in names]
    nodes.append(helper.make_node("Concat", list(rows), ["y"], axis=1))
    constants += [helper.make_tensor(k, TensorProto.INT64, [1], [v]) for k, v in (("none", 0), ("one", 1), ("end", 9))]
    infos = [("past", [3, 9, 4]), ("x", [3, 2, 4]), ("y", [3, 2 * len(rows), 4]), ("present", [3, 9, 4])]
    past, x, y, present = (helper.make_tensor_value_info(k, TensorProto.FLOAT, shape) for k, shape in infos)
    at = helper.make_tensor_value_info("at", TensorProto.INT64, [3, 2, 4])
    graph = helper.make_graph(nodes, "written", [past, x, at], [y, present], constants)
    arrays = [draw.standard_normal(shape).astype(np.float32) for shape in ((3, 9, 4), (3, 2, 4))]
    index = np.broadcast_to(draw.permutation(9)[:2].reshape(1, 2, 1), (3, 2, 4)).copy()
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), [*arrays, index]


@pytest.mark.slow
def test_random_models_with_an_alias() -> None:
    """They compute what they compute without one."""
    shared = []
    for seed in range(24):
        model, given = written(seed)
        y, present = fusegraph.onnx.from_proto(model).compile("reference")(*[x.copy() for x in given])
        made = fusegraph.onnx.from_proto(model, alias={"past": "present"})
        shared.append((CpuExecutable(made.graph, Options(), lazy=True), given, y, present))
    build_together([executable for executable, *_ in shared])
    for executable, (past, x, at), y, present in shared:
        result, new = executable(past, x, at)
        assert new is past
        np.testing.assert_allclose(result, y, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(past, present, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(24, 32))])
def test_random_models_with_an_alias_of_sizes_that_vary(seed: int) -> None:
    model, (_, _, at) = written(seed)
    for info in (*model.graph.input, *model.graph.output):
        for size in info.type.tensor_type.shape.dim:
            if size.dim_value in (3, 4):
                size.dim_param = {3: "batch", 4: "width"}[size.dim_value]
    bounds = {name: fg.Dim(name, max=8) for name in ("batch", "width")}
    made = fusegraph.onnx.from_proto(model, shapes=bounds, alias={"past": "present"})
    assert made.by_size is None
    run = made.compile("cpu")
    draw = np.random.default_rng(seed)
    for batch, width in ((3, 4), (1, 1), (8, 5), (2, 8)):
        past, x = (draw.standard_normal((batch, n, width)).astype(np.float32) for n in (9, 2))
        index = np.broadcast_to(at[:1, :, :1], (batch, 2, width)).copy()
        known = fusegraph.onnx.from_proto(model, shapes={"batch": batch, "width": width})
        y, present = known.compile("reference")(past.copy(), x, index)
        result, new = run(past, x, index)
        assert new is past
        np.testing.assert_allclose(result, y, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(past, present, rtol=1e-5, atol=1e-6)


def test_without_an_alias_caches_are_copied() -> None:
    model = fusegraph.onnx.from_proto(cached())
    assert not model.graph.updates
    assert len(model.graph.results) == 3


def test_aliases_that_cannot_be() -> None:
    with pytest.raises(ModelError, match="no output has an input's name with 'now' in place of 'past'"):
        fusegraph.onnx.from_proto(cached(), alias={"past": "now"})
    with pytest.raises(ModelError, match=r"output 'y', .* cannot overwrite input 'x'"):
        fusegraph.onnx.from_proto(cached(), alias={"x": "y"})
