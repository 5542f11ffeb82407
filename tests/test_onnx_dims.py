"""ONNX models with dimensions that are only named: read once for all sizes, or for each choice of sizes that comes."""

from __future__ import annotations

from typing import Any

import pytest

onnx = pytest.importorskip("onnx")

import numpy as np  # noqa: E402
import onnx_node_tests  # noqa: E402
from onnx_models import built, model, perceptron, tensor, value  # noqa: E402
from onnx_networks import convolutional, transformer  # noqa: E402

import fusegraph as fg  # noqa: E402
from codegen.sizes import Size  # noqa: E402
from fusegraph.errors import ArgumentError, FusegraphError  # noqa: E402


def ints(name: str, *numbers: int) -> Any:
    return tensor(name, np.array(numbers, np.int64))


def number(name: str, n: int) -> Any:
    return tensor(name, np.int64(n))


def masked() -> Any:
    """Attention scores of the last positions of a sequence, masked by their positions as exporters write that."""
    nodes = [
        ("MatMul", "q k", "scores"),
        ("Shape", "q", "qs"),
        ("Shape", "k", "ks"),
        ("Gather", "qs one", "length"),
        ("Gather", "ks two", "whole"),
        ("Sub", "whole length", "past"),
        ("Range", "past whole one", "rows"),
        ("Range", "zero whole one", "columns"),
        ("Unsqueeze", "rows last", "down"),
        ("GreaterOrEqual", "down columns", "seen"),
        ("Where", "seen scores low", "masked"),
        ("Softmax", "masked", "y", {"axis": -1}),
    ]
    inputs = [value("q", ["batch", "length", 8]), value("k", ["batch", 8, "past + length"]), value("p", ["past"])]
    constants = [number("zero", 0), number("one", 1), number("two", 2), ints("last", -1)]
    return model(nodes, inputs, [value("y")], [*constants, tensor("low", np.float32(-1e9))])


def shaped() -> Any:
    """Every way to compute a shape: heads split off and joined, an expansion as exporters write it, parts, repeats."""
    nodes = [
        ("Shape", "x", "shape"),
        ("Slice", "shape zero two", "front"),
        ("Concat", "front heads", "split", {"axis": 0}),
        ("Reshape", "x split", "four"),
        ("Transpose", "four", "turned", {"perm": [0, 2, 1, 3]}),
        ("ReduceProd", "front", "rows", {"keepdims": 1}),
        ("Concat", "rows rest", "flat", {"axis": 0}),
        ("Transpose", "turned", "back", {"perm": [0, 2, 1, 3]}),
        ("Reshape", "back flat", "wide"),
        ("Equal", "split rest", "alike"),
        ("ConstantOfShape", "rank", "ones", {"value": tensor("", np.array([1], np.int64))}),
        ("Where", "alike ones split", "chosen"),
        ("Expand", "row chosen", "spread"),
        ("Gather", "shape index", "length"),
        ("Div", "length pair", "half"),
        ("Unsqueeze", "half zero", "stop"),
        ("Slice", "x zero stop one", "first"),
        ("Cast", "length", "count", {"to": 1}),
        ("Div", "first count", "scaled"),
        ("ReduceSum", "spread", "total", {"keepdims": 0}),
        ("Tile", "first repeats", "tiled"),
        ("Mul", "scaled total", "y"),
        ("Gather", "wide index", "z"),
        ("ReduceMax", "tiled", "w", {"keepdims": 0}),
    ]
    constants = [ints("zero", 0), ints("two", 2), ints("heads", 3, 4), ints("rest", -1), ints("rank", 4)]
    constants += [tensor("row", np.ones((1, 1, 4), np.float32)), number("index", 1), number("pair", 2)]
    constants += [ints("one", 1), ints("repeats", 1, 2, 1)]
    return model(nodes, [value("x", ["n", "m", 12])], [value("y"), value("z"), value("w")], constants)


MODELS = {
    "perceptron": (perceptron, [{"batch": n} for n in (1, 5, 12)]),
    "convolutional": (convolutional, [{"batch": n} for n in (1, 3)]),
    "transformer": (transformer, [{"batch": n} for n in (1, 3)]),
    "masked": (masked, [{"batch": 2, "length": a, "past": b} for a, b in ((4, 3), (1, 9), (5, 1))]),
    "shaped": (shaped, [{"n": a, "m": b} for a, b in ((2, 6), (1, 3), (3, 2))]),
}


def arrays(known: Any) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {name: rng.standard_normal(t.shape).astype(t.dtype.numpy) for name, t in known.inputs.items()}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.slow
def test_one_graph_serves_all_sizes(case: str) -> None:
    make, every = MODELS[case]
    bounds = {name: fg.Dim(name, max=16) for name in every[0]}
    for given in ({}, bounds):
        loaded = built(make(), shapes=given)
        assert loaded.by_size is None
        assert any(isinstance(n, Size) for t in loaded.graph.inputs for n in t.shape)
    run = loaded.compile("cpu")
    for sizes in every:
        known = built(make(), shapes=sizes)
        fed = arrays(known)
        expected = known.compile("reference")(*fed.values())
        found = run(*fed.values())
        pairs = zip(found, expected) if isinstance(found, tuple) else [(found, expected)]
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=str(sizes))


def test_what_does_not_follow_is_read_for_every_choice_of_sizes() -> None:
    """Halves of what may be odd; and a sum of inputs whose sizes have no names, so that they may differ."""
    halves = model([("Reshape", "x shape", "y")], [value("x", ["n"])], [value("y")], [ints("shape", 2, -1)])
    loaded = built(halves)
    assert loaded.by_size is not None
    run = loaded.compile("reference")
    for n in (8, 4):
        x = np.arange(n, dtype=np.float32)
        np.testing.assert_array_equal(run(x), x.reshape(2, -1))
    unnamed = built(model([("Add", "a b", "y")], [value("a", [None, 4]), value("b", [None, 4])], [value("y")]))
    assert unnamed.by_size is not None
    np.testing.assert_array_equal(unnamed.compile("cpu")(np.ones((3, 4), "f"), np.ones((3, 4), "f")), 2)


def test_positions_from_the_end_follow_sizes() -> None:
    nodes = [("Gather", "x index", "y"), ("Slice", "x first last", "z")]
    constants = [ints("index", 0, -1), ints("first", -3), ints("last", 5)]
    proto = model(nodes, [value("x", ["n"])], [value("y"), value("z")], constants)
    for bounds in ((1, 9), (3, 9), (1, 2**20)):
        loaded = built(proto, shapes={"n": fg.Dim("n", *bounds)})
        assert loaded.by_size is None
        run = loaded.compile("reference")
        for n in (bounds[0], 4, 9):
            x = np.arange(n, dtype=np.float32)
            for found, expected in zip(run(x), (x[[0, -1]], x[-3:5]), strict=True):
                np.testing.assert_array_equal(found, expected)


def test_sizes_have_bounds_and_expressions() -> None:
    loaded = built(perceptron(), shapes={"batch": fg.Dim("batch", max=4)})
    with pytest.raises(ArgumentError, match="1 to 4"):
        loaded.compile("cpu")(np.ones((5, 8), np.float32))
    tensors = built(masked()).inputs
    assert tensors["k"].shape[2] == tensors["q"].shape[1] + tensors["p"].shape[0]


# ---- the node tests of onnx, with Dims


def with_named_size(test: Any) -> tuple[Any, int] | None:
    """Returns a node test's model in which a size of inputs has a name, and that size; None if there is none."""
    made = onnx.ModelProto()
    made.CopyFrom(test.model)
    sizes = [size for info in made.graph.input for size in info.type.tensor_type.shape.dim if size.dim_value > 1]
    if not sizes:
        return None
    known = sorted(size.dim_value for size in sizes)[len(sizes) // 2]
    for size in sizes:
        if size.dim_value == known:
            size.dim_param = "n"
    for info in (*made.graph.output, *made.graph.value_info):
        info.type.tensor_type.ClearField("shape")
    return made, known


def fed(known: Any, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    numbers = {True: rng.standard_normal, False: lambda shape: rng.integers(0, 2, shape)}
    return [numbers[t.dtype.is_float](t.shape).astype(t.dtype.numpy) for t in known.inputs.values()]


def check_named_size(test: Any) -> bool:
    """Tells whether a node test is one graph for all sizes, which then computes the same as models of known sizes."""
    made = with_named_size(test)
    if made is None:
        return False
    proto, size = made
    try:
        loaded = built(proto)
        if loaded.by_size is not None:
            return False
        run = loaded.compile("reference")
    except FusegraphError:
        return False
    for n in (size, 1, size + 3):
        try:
            known = built(proto, shapes={"n": n})
            expected = known.compile("reference")(*fed(known, n))
        except FusegraphError:  # sizes that do not go together
            continue
        found = run(*fed(known, n))
        pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=f"{test.name} at n = {n}")
    return True


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_node_tests_of_onnx_serve_all_sizes(part: int) -> None:
    """At most four for each operator, as all are run at their own sizes elsewhere."""
    by_operator: dict[str, list[Any]] = {}
    for test in onnx_node_tests.cases():
        by_operator.setdefault(test.model.graph.node[0].op_type, []).append(test)
    tests = [test for same in by_operator.values() for test in same[:: -(-len(same) // 4)]][part::4]
    assert sum(map(check_named_size, tests)) > len(tests) // 3
