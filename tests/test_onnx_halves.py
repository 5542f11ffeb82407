"""Operators in float16 and bfloat16, of which there are few node tests: those of float32 with narrower floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

import ml_dtypes
import onnx
from onnx import TensorProto, numpy_helper
from onnx_node_tests import TOGETHER, array, cases, exactly, floats, inputs, messages

from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.errors import UnsupportedModelError
from fusegraph.lowering.base import Options
from fusegraph.onnx import Backend


def narrowed(model: onnx.ModelProto, element: int, dtype: Any) -> onnx.ModelProto:
    """Returns a model with float32 replaced by another float type."""
    narrow = onnx.ModelProto()
    narrow.CopyFrom(model)
    for message in messages(narrow):
        if isinstance(message, TensorProto) and message.data_type == TensorProto.FLOAT:
            with np.errstate(over="ignore"):
                message.CopyFrom(numpy_helper.from_array(array(message).astype(dtype), message.name))
        elif isinstance(message, onnx.TypeProto.Tensor) and message.elem_type == TensorProto.FLOAT:
            message.elem_type = element
        elif isinstance(message, onnx.AttributeProto) and message.name in ("to", "dtype", "output_datatype"):
            message.i = element if message.i == TensorProto.FLOAT else message.i
    return narrow


def allowed(model: onnx.ModelProto) -> bool:
    """Tells whether ONNX has the operator in these types."""
    try:
        onnx.checker.check_model(model)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    return True


def chosen(attributes: bool) -> list[Any]:
    """Returns the smallest single-node test for each operator, number of inputs and, if asked for, attributes."""
    found: dict[Any, Any] = {}
    for test in cases():
        (node, *more), given = test.model.graph.node, inputs(test)
        if more or node.op_type in ("Cast", "CastLike") or not all(isinstance(x, np.ndarray) for x in given.values()):
            continue
        if any(x.dtype == np.float32 for x in given.values()):
            size = sum(x.size for x in given.values())
            names = tuple(sorted(a.name for a in node.attribute)) if attributes else ()
            key = node.op_type, len(node.input), len(node.output), names
            if key not in found or size < found[key][0]:
                found[key] = size, test
    return [test for _, test in found.values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("element", "dtype", "digits"),
    [(TensorProto.FLOAT16, np.float16, 10), (TensorProto.BFLOAT16, ml_dtypes.bfloat16, 7)],
)
def test_operators_of_16_bit_floats(element: int, dtype: Any, digits: int) -> None:
    """As kernels, held against ONNX's evaluator in float64, from the same inputs: within four units of the last digit
    of an element, or a quarter of one of the largest element's.  Attributes do not hang on which of the two it is.
    """
    ready = []
    for test in chosen(attributes=dtype is np.float16):
        proto = narrowed(test.model, element, dtype)
        given = {name: x.astype(dtype) if x.dtype == np.float32 else x for name, x in inputs(test).items()}
        if allowed(proto):
            try:
                model = Backend.prepare(proto, engine="reference").model(given)
            except UnsupportedModelError:
                continue
            ready.append((test.name, proto, given, model, CpuExecutable(model.graph, Options(), lazy=True)))
    compared = 0
    for first in range(0, len(ready), TOGETHER):
        build_together([executable for *_, executable in ready[first : first + TOGETHER]])
    for name, proto, given, model, executable in ready:
        try:
            exact = exactly(proto, given)
        except Exception:  # the evaluator does not take float64, or inputs that are left out, everywhere
            continue
        compared += 1
        found = executable(*(given[n] for n in model.inputs))
        for y, x in zip(found if isinstance(found, tuple) else (found,), map(np.asarray, exact)):
            assert y.shape == x.shape, name
            if floats(y):
                with np.errstate(over="ignore"):  # a product that is too large is infinite
                    x = np.where(np.isinf(x.astype(dtype)), x.astype(dtype).astype(np.float64), x)
                unit, largest = 2.0**-digits, np.abs(x[np.isfinite(x)]).max(initial=0.0)
                wide = y.astype(np.float64)
                np.testing.assert_allclose(wide, x, rtol=4 * unit, atol=largest * unit / 4, err_msg=name)
            else:
                np.testing.assert_array_equal(y, x, err_msg=name)
    assert compared > (200 if dtype is np.float16 else 120)
