"""ONNX's operators that sort, or select by value, against ONNX's own evaluator."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import quick, slow

onnx = pytest.importorskip("onnx")

from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_models import I64, built, error, model, one, tensor, value  # noqa: E402

from fusegraph.errors import ModelError  # noqa: E402
from fusegraph.frontends.onnx.model import InputValueError  # noqa: E402
from fusegraph.onnx import Backend  # noqa: E402

_RNG = np.random.default_rng(0)


def check(proto, *inputs):
    """Checks the backend (cpu engine) against ONNX's evaluator; it supplies input values where the graph needs them."""
    names = [i.name for i in proto.graph.input]
    wanted = ReferenceEvaluator(proto).run(None, dict(zip(names, inputs)))
    for got, array in zip(Backend.run_model(proto, list(inputs)), wanted, strict=True):
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("largest", [0, 1])
def test_topk(largest):
    """Ties go to the lower index.  K is an initialiser, or an input whose value is given."""
    x = _RNG.integers(-3, 4, (3, 20, 2)).astype(np.float32)
    node = ("TopK", "x k", "y i", {"axis": 1, "largest": largest})
    outputs = [value("y"), value("i", None, I64)]
    check(model([node], [value("x", x.shape)], outputs, [tensor("k", np.int64([4]))]), x)
    proto = model([node], [value("x", x.shape), value("k", [1], I64)], outputs)
    assert "K must be known" in error(proto, InputValueError)
    assert built(proto, values={"k": np.int64([5])}).outputs["y"].shape == (3, 5, 2)
    assert "K is from 0 to the 20 elements of axis 1, got 21" in error(proto, ModelError, values={"k": np.int64([21])})


def test_topk_is_one_kernel_with_what_is_around_it():
    nodes = [("Sigmoid", "x", "s"), ("TopK", "s k", "y i"), ("Neg", "y", "z")]
    proto = model(nodes, [value("x", [8, 100])], [value("z"), value("i", None, I64)], [tensor("k", np.int64([4]))])
    assert [k.group.family for k in built(proto).compile("cpu").plan.kernels] == ["sort"]


@pytest.mark.parametrize("kind", quick(np.float32, np.int64, np.bool_))
def test_nonzero(kind):
    for shape in ((3, 4), (5,), (2, 3, 2), (0, 3)):
        check(one("NonZero", shape, element=onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))), _picked(shape, kind))


def test_nonzero_of_one_number():
    for number, count in ((2.0, 1), (0.0, 0)):
        assert built(one("NonZero", ()), values={"a": np.float32(number)}).outputs["y"].shape == (0, count)


UNIQUE = [((12,), None), ((4, 5), None), ((6, 2), 0), ((2, 3, 5), -1)]


def unique(shape, axis, order):
    outputs = [value("y"), *(value(n, None, I64) for n in ("first", "inverse", "counts"))]
    attributes = {"sorted": order} | ({} if axis is None else {"axis": axis})
    return model([("Unique", "x", "y first inverse counts", attributes)], [value("x", shape)], outputs)


def test_unique():
    for shape, axis in UNIQUE:
        check(unique(shape, axis, 1), _picked(shape, np.float32))


def test_unique_in_the_order_of_the_elements():
    """By what it is to be: ONNX's evaluator does this for one dimension only."""
    for shape, axis in UNIQUE:
        x = _picked(shape, np.float32)
        y, first, inverse, counts = Backend.run_model(unique(shape, axis, 0), [x])
        slices = x.reshape(-1, 1) if axis is None else np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
        ours = y.reshape(-1, 1) if axis is None else np.moveaxis(y, axis, 0).reshape(y.shape[axis], -1)
        np.testing.assert_array_equal(ours[inverse], slices)
        np.testing.assert_array_equal(ours, slices[first])
        np.testing.assert_array_equal(first, [np.flatnonzero(inverse == n)[0] for n in range(len(ours))])
        assert list(first) == sorted(first)
        np.testing.assert_array_equal(counts, np.bincount(inverse))


def test_what_decides_on_shapes_is_asked_for():
    for proto in (one("NonZero", (3,)), one("Unique", (3,)), one("NonMaxSuppression", (1, 2, 4), (1, 1, 2))):
        assert "must be known" in error(proto, InputValueError)
    constant = model([("NonZero", "x", "y")], [], [value("y", None, I64)], [tensor("x", np.float32([0, 1, 1]))])
    np.testing.assert_array_equal(Backend.run_model(constant, [])[0], [[1, 2]])


@pytest.mark.parametrize("centred", [0, 1])
def test_non_max_suppression(centred):
    boxes, scores = _RNG.random((2, 30, 4)).astype(np.float32), _RNG.random((2, 3, 30)).astype(np.float32)
    node = ("NonMaxSuppression", "b s n o t", "y", {"center_point_box": centred})
    inputs = [value("b", boxes.shape), value("s", scores.shape)]
    for most, overlap, least in ((5, 0.3, 0.2), (100, 0.1, 0.0), (0, 0.5, 0.5), (3, 1.0, 0.9)):
        given = [
            tensor("n", np.int64([most])),
            *(tensor(n, np.float32([x])) for n, x in (("o", overlap), ("t", least))),
        ]
        check(model([node], inputs, [value("y", None, I64)], given), boxes, scores)


# ---- sizes that are given


def run_with(proto, shapes, *inputs):
    """Returns the results on the cpu engine, and those computed while the graph is built, from known inputs."""
    made = built(proto, shapes=shapes)
    results = made.compile("cpu")(*inputs)
    known = Backend.run_model(proto, list(inputs))
    return results if isinstance(results, tuple) else (results,), known


@pytest.mark.parametrize("size", [0, 5, 100])
def test_nonzero_of_a_size(size):
    x = _picked((3, 4, 2), np.float32)
    (got,), (wanted,) = run_with(one("NonZero", x.shape), {"y": (3, size)}, x)
    np.testing.assert_array_equal(got, np.pad(wanted, [(0, 0), (0, 100)], constant_values=-1)[:, :size])


@pytest.mark.parametrize(("order", "size"), [(0, 2), (1, 9), *slow((1, 3), (0, 9))])
def test_unique_of_a_size(order, size):
    """Cut off, as many as there are, filled up; NaN are one."""
    x = np.array([3.0, *_RNG.permutation(6 * [np.nan, 1.0, 2.0])], np.float32)
    results, known = run_with(unique(x.shape, None, order), {"y": size}, x)
    count = min(size, len(known[0]))
    assert count == min(size, 4)
    for got, wanted in zip(results[:2] + results[3:], known[:2] + known[3:]):
        assert (got.dtype, got.shape) == (wanted.dtype, (size,))
        if count == len(wanted) or order:
            np.testing.assert_array_equal(got[:count], wanted[:count])
    if count == len(known[0]):
        np.testing.assert_array_equal(results[2], known[2])
    if count < size:
        np.testing.assert_array_equal(results[1][count:], -1)
        np.testing.assert_array_equal(results[3][count:], 0)


@pytest.mark.slow
def test_non_max_suppression_of_a_size():
    boxes, scores = _RNG.random((2, 9, 4)).astype(np.float32), _RNG.random((2, 2, 9)).astype(np.float32)
    scores[0, 0, 3] = -np.inf
    inputs = [value("b", boxes.shape), value("s", scores.shape)]
    for centred, most, overlap, least, size in ((0, 4, 0.3, 0.2, 20), (1, 100, 0.1, 0.0, 7), (0, 0, 0.5, 0.5, 3)):
        node = ("NonMaxSuppression", "b s n o t", "y", {"center_point_box": centred})
        limits = {"n": np.int64([most]), "o": np.float32([overlap]), "t": np.float32([least])}
        given = [tensor(name, limit) for name, limit in limits.items()]
        proto = model([node], inputs, [value("y", None, I64)], given)
        (got,), (wanted,) = run_with(proto, {"y": (size, 3)}, boxes, scores)
        np.testing.assert_array_equal(got, np.pad(wanted, [(0, size), (0, 0)], constant_values=-1)[:size])


def test_what_is_selected_may_be_computed():
    """A network in front of a selection: its values are known only when it runs."""
    nodes = [("MatMul", "x w", "h"), ("NonZero", "h", "y")]
    proto = model(nodes, [value("x", [3, 4])], [value("y", None, I64)], [tensor("w", np.eye(4, dtype=np.float32))])
    assert "or the shape of the result as shapes={'y': ...}" in error(proto, InputValueError)
    assert built(proto, shapes={"y": (2, 5)}).outputs["y"].shape == (2, 5)
    assert "'y' has the shape [2, 'any'], the one given is [3, 5]" in error(proto, ModelError, shapes={"y": (3, 5)})
    assert "no input and no dimension 'h'" in error(proto, ModelError, shapes={"h": (3, 4)})


def test_non_max_suppression_of_other_shapes():
    proto = one("NonMaxSuppression", (1, 2, 4), (1, 1, 3))
    values = {"a": np.zeros((1, 2, 4), np.float32), "b": np.zeros((1, 1, 3), np.float32)}
    assert "boxes are (batches, boxes, 4)" in error(proto, ModelError, values=values)


def _picked(shape, kind):
    return _RNG.integers(0, 2 if kind == np.bool_ else 3, shape).astype(kind)
