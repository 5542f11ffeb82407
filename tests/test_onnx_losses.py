"""Losses in ONNX models: of logits without another use they are one op with the layer, others as ONNX defines them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

import onnx
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from onnx_models import I64, built, model, tensor, value

from fusegraph.frontends.onnx.operators import losses

BATCH, LENGTH, DEPTH, CLASSES = 2, 5, 8, 19
ROWS = BATCH * LENGTH
RNG = np.random.default_rng(3)
WEIGHT, BIAS = RNG.normal(size=(DEPTH, CLASSES)), RNG.normal(size=CLASSES)
X, TARGET = RNG.normal(size=(BATCH, LENGTH, DEPTH)), RNG.integers(0, CLASSES, (BATCH, LENGTH))
Node = tuple[Any, ...]

MEAN: Node = ("SoftmaxCrossEntropyLoss", "z t", "y", {"ignore_index": 3})
ROWED: list[Node] = [("Reshape", "x rows", "xr"), ("Reshape", "target row", "t")]
GEMM: list[Node] = [*ROWED, ("Gemm", "xr turned b", "z", {"transB": 1})]
LIKELY: Node = ("NegativeLogLikelihoodLoss", "l t", "y", {"reduction": "sum", "ignore_index": 3})
NORMAL: Node = ("LogSoftmax", "z", "l", {"axis": 1})
BATCHES: list[Node] = [("MatMul", "x w", "p"), ("Add", "b p", "q"), ("Transpose", "q", "z", {"perm": [0, 2, 1]})]

#: Nodes that are one op.
HEADS: dict[str, list[Node]] = {
    "gemm": [*GEMM, MEAN],
    "rows of a product": [*ROWED, ("MatMul", "x w", "p"), ("Reshape", "p rows", "z"), MEAN],
    "batches": [*BATCHES, ("SoftmaxCrossEntropyLoss", "z target", "y", {"reduction": "none"})],
    "likelihoods": [*GEMM, NORMAL, LIKELY],
    "likelihoods of batches": [*BATCHES, NORMAL, ("NegativeLogLikelihoodLoss", "l target", "y", {"reduction": "none"})],
    "transposed logarithms": [
        *BATCHES[:2],
        ("LogSoftmax", "q", "u"),
        ("Transpose", "u", "l", {"perm": [0, 2, 1]}),
        ("Identity", "target", "t"),
        LIKELY,
    ],
    "shifted": [
        *BATCHES[:2],
        ("Slice", "q zero four one", "s"),
        ("Slice", "target one five one", "st"),
        ("Transpose", "s", "z", {"perm": [0, 2, 1]}),
        ("SoftmaxCrossEntropyLoss", "z st", "y"),
    ],
}
#: Nodes that are not, and their outputs.
OTHERS: dict[str, tuple[list[Node], str]] = {
    "weights": ([*GEMM, ("SoftmaxCrossEntropyLoss", "z t b2", "y")], "y"),
    "logarithms": ([*GEMM, ("SoftmaxCrossEntropyLoss", "z t", "y l")], "y l"),
    "logits are results": ([*GEMM, MEAN], "y z"),
    "logits are used later": ([*GEMM, MEAN, ("ReduceSum", "z", "n")], "y n"),
    "logits of another name": ([*GEMM, ("Identity", "z", "same"), MEAN, ("ReduceMax", "same", "n")], "y n"),
    "logarithms are used": ([*GEMM, NORMAL, LIKELY, ("ReduceSum", "l", "n")], "y n"),
    "not normalised": ([*GEMM, ("Identity", "z", "l"), LIKELY], "y"),
    "along rows": ([*GEMM, ("LogSoftmax", "z", "l", {"axis": 0}), LIKELY], "y"),
    "scaled": ([*ROWED, ("Gemm", "xr w b", "z", {"alpha": 2.0}), MEAN], "y"),
    "bias of rows": ([*GEMM[:2], ("Gemm", "xr w first", "z"), MEAN], "y"),
    "products of batches": ([("MatMul", "x wide", "p"), ("Reshape", "p rows", "z"), ROWED[1], MEAN], "y"),
}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LEAST_LOGITS_BYTES", 0)


def model_of(nodes: list[Node], outputs: str, opset: int = 21) -> onnx.ModelProto:
    constants = {
        "rows": [ROWS, -1],
        "row": [-1],
        **{name: [n] for name, n in (("zero", 0), ("one", 1), ("four", 4), ("five", 5))},
        "w": WEIGHT,
        "turned": WEIGHT.T,
        "wide": np.stack([WEIGHT] * BATCH),
        "b": BIAS,
        "b2": np.abs(BIAS),
        "first": RNG.normal(size=(ROWS, 1)),
    }
    return model(
        nodes,
        [value("x", X.shape, TensorProto.DOUBLE), value("target", TARGET.shape, I64)],
        [value(name, None, 0) for name in outputs.split()],
        [tensor(name, x) for name, x in constants.items() if any(name in n[1].split() for n in nodes)],
        opset=opset,
    )


def check(nodes: list[Node], outputs: str, *, whole: bool, opset: int = 21) -> None:
    """Checks a model's results against ONNX's evaluator, and whether it has the op in place of its product."""
    proto = model_of(nodes, outputs, opset)
    ours = built(proto)
    made = [n.op.name for n in ours.graph.nodes]
    assert ("linear_cross_entropy" in made) == whole
    assert ("matmul" in made) != whole
    assert not whole or all(
        CLASSES not in t.shape or t.size != ROWS * CLASSES for n in ours.graph.nodes for t in n.outputs
    )
    found = ours.compile("reference")(X, TARGET)
    wanted = ReferenceEvaluator(proto).run(None, {"x": X, "target": TARGET})
    for mine, theirs in zip(found if isinstance(found, (list, tuple)) else [found], wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


@pytest.mark.parametrize("head", HEADS)
def test_losses_of_layers_are_one_op(head: str) -> None:
    check(HEADS[head], "y", whole=True)


@pytest.mark.parametrize("opset", [12, 13])
def test_older_operators(opset: int) -> None:
    check(HEADS["gemm"], "y", whole=True, opset=opset)
    check(HEADS["likelihoods"], "y", whole=True, opset=opset)


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_not_a_loss_of_a_layer_alone(other: str) -> None:
    check(*OTHERS[other], whole=False)


def test_small_logits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LEAST_LOGITS_BYTES", 4 * ROWS * CLASSES + 1)
    check(HEADS["gemm"], "y", whole=False)
