"""Whole networks: what is fused, and that it computes what ONNX's own evaluator does."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("onnx")

from graphs import check_all
from onnx.reference import ReferenceEvaluator
from onnx_networks import convolutional, transformer

import fusegraph as fg
from fusegraph.plan import plan


def test_a_convolutional_network_is_fused() -> None:
    """Batch norms, activations and residual sums are part of the convolutions: 31 nodes in 13 kernels."""
    model = fg.onnx.from_proto(convolutional(), {"batch": 2})
    families = [k.group.family for k in plan(model.graph).kernels]
    assert Counter(families) == {"contraction": 8, "rows": 3, "pool": 1, "direct_convolution": 1}


def test_a_transformer_is_fused() -> None:
    """37 nodes, four of them an attention, in 7 kernels; shapes are computed before there are any."""
    model = fg.onnx.from_proto(transformer(), {"batch": 2})
    families = [k.group.family for k in plan(model.graph).kernels]
    assert Counter(families) == {"contraction": 4, "rows": 2, "attention": 1}


@pytest.mark.parametrize(("proto", "shape"), [(convolutional(), (3, 3, 24, 24)), (transformer(), (3, 32, 64))])
def test_equal_to_the_evaluator_of_onnx(proto, shape) -> None:
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    found = fg.onnx.from_proto(proto, {"batch": 3}).compile("reference")(x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_kernels_equal_the_reference() -> None:
    protos = [make(dtype) for make in (convolutional, transformer) for dtype in (np.float32, np.float16)]
    check_all([fg.onnx.from_proto(proto, {"batch": 2}).graph for proto in protos])


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    for proto, shape in ((convolutional(), (3, 3, 24, 24)), (transformer(), (3, 32, 64))):
        x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
        (expected,) = fg.onnx.Backend.run_model(proto, [x], engine="reference")
        executable = fg.onnx.from_proto(proto, {"batch": 3}).compile("cuda")
        np.testing.assert_allclose(fg.to_numpy(executable(fg.to_device(x))), expected, rtol=1e-3, atol=1e-4)
