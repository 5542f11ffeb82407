"""Gradients of every op of the table against torch.autograd in float64, or against differences where torch lacks it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from gradient_cases import CASES as SIMPLE
from gradient_cases import Array, Case, normal
from gradient_layers import LAYERS

import fusegraph as fg
from fusegraph.errors import DTypeError, GradientError, GraphError, ShapeError
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind


def built(name: str, case: Case) -> tuple[fg.Graph, list[fg.Tensor], list[fg.Tensor]]:
    """Returns the graph of a case, its inputs and the results that are differentiated."""
    g = fg.Graph(name, io_dtype="float64", compute_dtype="float64")
    tensors = [g.tensor(f"x{k}", x.shape, str(x.dtype)) for k, x in enumerate(case.arrays)]
    attributes = dict(case.attributes)
    named = dict(zip(attributes.pop("operands", ()), tensors))
    made = getattr(g, name)(*([] if named else tensors), **named, **attributes)
    return g, tensors, [(made if isinstance(made, tuple) else (made,))[k] for k in case.results]


def ours(name: str, case: Case, engine: str) -> tuple[list[Array], list[Array]]:
    """Returns the gradients by the arrays of floats, and the seeds that weigh the results."""
    g, tensors, results = built(name, case)
    wanted = [t for k, t in enumerate(tensors) if t.dtype.is_float and k not in case.still]
    weights = [g.tensor(f"weights {k}", y.shape) for k, y in enumerate(results)]
    loss = sum((g.reduction(g.cast(y, "float64") * w, "add") for y, w in zip(results, weights)), g.constant(0.0))
    for gradient in g.gradients(g.reshape(loss, ()), wanted):
        g.output(gradient)
    seeds = [normal(*y.shape, seed=7) for y in results]
    found = g.compile(engine=engine)(*case.arrays, *seeds)
    return list(found) if isinstance(found, (tuple, list)) else [found], seeds


def by_torch(case: Case, seeds: Sequence[Array]) -> list[Array]:
    assert case.of is not None
    tensors = [torch.tensor(x) for x in case.arrays]
    wanted = [t for k, t in enumerate(tensors) if t.dtype.is_floating_point and k not in case.still]
    for t in wanted:
        t.requires_grad_()
    made = case.of(*tensors)
    results = [made[k] for k in case.results] if isinstance(made, tuple) else [made]
    loss = sum(((y.double() * torch.tensor(s)).sum() for y, s in zip(results, seeds)), torch.zeros(()))
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [np.zeros(t.shape) if d is None else d.numpy() for d, t in zip(found, wanted)]


def by_differences(name: str, case: Case, seeds: Sequence[Array]) -> list[Array]:
    """Returns central differences of the sum of the weighted results."""
    g, _, results = built(name, case)
    for y in results:
        g.output(y)
    run = g.compile(engine="reference")

    def loss(arrays: Sequence[Array]) -> float:
        made = run(*arrays)
        return sum(float((y * s).sum()) for y, s in zip(made if len(results) > 1 else (made,), seeds))

    found, step = [], 1e-5
    for k, x in enumerate(case.arrays):
        if x.dtype.kind != "f" or k in case.still:
            continue
        slope = np.zeros(x.shape)
        for place in np.ndindex(*x.shape):
            sides = []
            for sign in (1, -1):
                moved = [np.array(a) for a in case.arrays]
                moved[k][place] += sign * step
                sides.append(loss(moved))
            slope[place] = (sides[0] - sides[1]) / (2 * step)
        found.append(slope)
    return found


def check(name: str, case: Case, engine: str = "reference") -> None:
    found, seeds = ours(name, case, engine)
    exact = case.of is not None
    wanted = by_torch(case, seeds) if exact else by_differences(name, case, seeds)
    assert len(found) == len(wanted) > 0
    for a, b in zip(found, wanted):
        np.testing.assert_allclose(a, b, rtol=1e-9 if exact else 1e-5, atol=1e-11 if exact else 1e-6, err_msg=str(case))


CASES = {**SIMPLE, **LAYERS}
#: Ops whose results are never floats of floats.
EXACT = frozenset(
    {"quotient", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left", "shift_right", "gen_index"}
    | {"cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le", "logical_and", "logical_or", "logical_not", "isnan"}
    | {"max_pool_index", "adaptive_max_pool_index", "sort_index", "topk_index", "cummax_index", "cummin_index"}
    | {"sparse_2_4_mask"}
)


@pytest.mark.parametrize("name", [name for name in TABLE if name not in EXACT])
def test_gradients_of(name: str) -> None:
    op = TABLE[name]
    if isinstance(op.gradient, str):
        assert name not in CASES
        return
    assert op.gradient is not None or op.kind is Kind.COMPOSITE, f"{name} has no gradient, and no reason for that"
    for case in CASES[name]:
        check(name, case)


@pytest.mark.parametrize("name", ["matmul", "gelu", "slice", "gather", "reduction"])
def test_kernels_compute_gradients(name: str) -> None:
    check(name, CASES[name][-1], "cpu")


# ---- graphs


def run(graph: fg.Graph, *arrays: Array, engine: str = "reference") -> list[Array]:
    found = graph.compile(engine=engine)(*arrays)
    return list(found) if isinstance(found, (tuple, list)) else [found]


def test_a_tensor_that_is_used_twice_sums_its_gradients() -> None:
    g = fg.Graph("twice", io_dtype="float64", compute_dtype="float64")
    x = g.tensor("x", (3,))
    y = x * x + g.sin(x) * x
    (dx,) = g.gradients(g.reduction(y, "add"), [x])
    g.output(dx)
    value = normal(3)
    np.testing.assert_allclose(run(g, value)[0], 2 * value + np.sin(value) + value * np.cos(value), rtol=1e-12)
    assert dx.name == "d x"


def test_gradients_stop_at_integers_and_jumps() -> None:
    """Rounding, comparisons and positions are flat; what depends on nothing else has zeros, whatever its dtype."""
    g = fg.Graph("jumps")
    x, other = g.tensor("x", (4,)), g.tensor("other", (2, 3), "bfloat16")
    index = g.cast(g.reduction(x, "argmax"), "int32")
    y = g.floor(x) + g.cast(g.cast(x, "int32"), "float32") + g.cast(x > 0, "float32") + g.cast(index, "float32")
    dx, d_other = g.gradients(g.reduction(y, "add"), [x, other])
    assert (dx.shape, d_other.shape, d_other.dtype) == ((4,), (2, 3), fg.bfloat16)
    for gradient in (dx, d_other):
        g.output(gradient)
    assert not any(
        np.any(np.asarray(a, np.float32)) for a in run(g, np.ones(4, np.float32), np.ones((2, 3), d_other.dtype.numpy))
    )


def test_gradients_by_intermediates_and_by_the_loss() -> None:
    g = fg.Graph("between", io_dtype="float64", compute_dtype="float64")
    x = g.tensor("x", (3,))
    h = g.exp(x)
    loss = g.reduction(h * h, "add", keepdims=False)
    for gradient in g.gradients(loss, [h, x, loss, h]):
        g.output(gradient)
    value = normal(3)
    by_h, by_x, by_loss, again = run(g, value)
    np.testing.assert_allclose(by_h, 2 * np.exp(value), rtol=1e-12)
    np.testing.assert_allclose(by_x, 2 * np.exp(2 * value), rtol=1e-12)
    assert by_loss == 1
    np.testing.assert_array_equal(by_h, again)


def test_gradients_have_the_dtype_of_their_tensors() -> None:
    g = fg.Graph("dtypes")
    x, w = g.tensor("x", (4, 8), "bfloat16"), g.tensor("w", (8, 3), "float32")
    loss = g.reduction(g.matmul(x, w, dtype="float32") + g.tensor("b", (3,), "float16"), "add")
    found = g.gradients(loss, [x, w, g.tensors["b"]])
    assert [t.dtype for t in found] == [fg.bfloat16, fg.float32, fg.float16]
    assert [t.shape for t in found] == [(4, 8), (8, 3), (3,)]


def test_what_cannot_be_differentiated_is_said() -> None:
    g = fg.Graph("refused")
    x, whole, other = g.tensor("x", (4,)), g.tensor("n", (4,), "int32"), fg.Graph("other").tensor("x", (4,))
    y = g.reduction(x, "add")
    with pytest.raises(ShapeError, match=r"'x' \[4\] is not one number; sum it up, or give a seed"):
        g.gradients(x, [x])
    with pytest.raises(ShapeError, match=r"seed is \[2\]"):
        g.gradients(x, [x], np.ones(2))
    with pytest.raises(DTypeError, match="'n' is int32; gradients are by tensors of floats"):
        g.gradients(y, [whole])
    with pytest.raises(DTypeError, match="the loss 'n' is int32"):
        g.gradients(whole, [x])
    with pytest.raises(GraphError, match="wrt is a tensor or several, got 5"):
        g.gradients(y, 5)
    with pytest.raises(GraphError, match="belongs to graph 'other'"):
        g.gradients(y, [other])
    bits = g.bitcast(x * 2.0, "float32", name="bits")
    with pytest.raises(GradientError, match=r"none through 'bits', which is bitcast: .*; take gradients by tensors"):
        g.gradients(g.reduction(bits, "add"), [x])


def test_second_derivatives() -> None:
    """The gradient of a gradient, by ops whose gradients have rules."""
    g = fg.Graph("second", io_dtype="float64", compute_dtype="float64")
    x, w = g.tensor("x", (3, 4)), g.tensor("w", (4, 2))
    h = g.tanh(x @ w)
    (dx,) = g.gradients(g.reduction(g.gelu(h) * g.sigmoid(h) + g.swish(h) * g.softplus(h), "add"), [x])
    for gradient in g.gradients(g.reduction(dx * dx, "add"), [x, w]):
        g.output(gradient)
    values = [normal(3, 4), normal(4, 2)]
    a, b = (torch.tensor(v, requires_grad=True) for v in values)
    t, f = torch.tanh(a @ b), torch.nn.functional
    loss = (f.gelu(t) * torch.sigmoid(t) + f.silu(t) * f.softplus(t, threshold=1e9)).sum()
    (da,) = torch.autograd.grad(loss, a, create_graph=True)
    for mine, wanted in zip(run(g, *values), torch.autograd.grad((da * da).sum(), [a, b])):
        np.testing.assert_allclose(mine, wanted.numpy(), rtol=1e-9, atol=1e-12)
