"""Gradients through functions that write several nodes, and of whole graphs, against torch.autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gradient_cases import Array, normal

import fusegraph as fg
from fusegraph.errors import GradientError
from fusegraph.plan import plan

INDEX = np.array([[0, 2, 2], [1, 1, 0]])
GRID = np.clip(normal(2, 3, 4, 2) / 2, -0.9, 0.9)
CASES: dict[str, tuple[list[Array], Callable[..., Any], Callable[..., Any]]] = {
    "einsum": (
        [normal(2, 3, 4), normal(4, 5), normal(3, 3)],
        lambda g, a, b, c: g.einsum("bij,jk,ii->bk", a, b, c),
        lambda a, b, c: torch.einsum("bij,jk,ii->bk", a, b, c),
    ),
    "outer": ([normal(3), normal(4)], lambda g, a, b: g.einsum("i,j", a, b), lambda a, b: torch.outer(a, b)),
    "where": (
        [normal(3, 4), normal(4)],
        lambda g, a, b: g.where(a > 0, a * b, b),
        lambda a, b: torch.where(a > 0, a * b, b),
    ),
    "tril": ([normal(3, 4)], lambda g, a: g.tril(a, 1), lambda a: a.tril(1)),
    "flip": ([normal(3, 4)], lambda g, a: g.flip(a, 0), lambda a: a.flip(0)),
    "split": (
        [normal(3, 6)],
        lambda g, a: (lambda p: p[0] * p[2])(g.split(a, 3, 1)),
        lambda a: a[:, :2] * a[:, 4:],
    ),
    "roll": (
        [normal(3, 5)],
        lambda g, a: g.concatenate(a[:, 2:], a[:, :2], axis=1) * a,
        lambda a: a.roll(-2, 1) * a,
    ),
    "index": (
        [normal(4, 5)],
        lambda g, a: a[1:, None, ::-2] * a[0, 1],
        lambda a: a[1:, None].flip(-1)[..., ::2] * a[0, 1],
    ),
    "take_along_axis": (
        [normal(2, 4)],
        lambda g, a: g.take_along_axis(a, g.constant(INDEX), 1),
        lambda a: a.gather(1, torch.tensor(INDEX)),
    ),
    "gather_nd": (
        [normal(4, 3, 2)],
        lambda g, a: g.gather_nd(a, g.constant(INDEX[:, :2])),
        lambda a: a[INDEX[:, 0], INDEX[:, 1]],
    ),
    "scatter_nd": (
        [normal(4, 3, 2), normal(2, 2)],
        lambda g, a, u: g.scatter_nd(a, g.constant(INDEX[:, :2]), u, "add"),
        lambda a, u: a.index_put(tuple(torch.tensor(INDEX[:, :2].T)), u, accumulate=True),
    ),
    "depth_to_space": ([normal(1, 8, 2, 3)], lambda g, a: g.depth_to_space(a, 2), lambda a: F.pixel_shuffle(a, 2)),
    "nearest": (
        [normal(1, 2, 3, 4)],
        lambda g, a: g.interpolate(a, (7, 8), mode="nearest"),
        lambda a: F.interpolate(a, (7, 8), mode="nearest"),
    ),
    "bilinear": (
        [normal(1, 2, 3, 4)],
        lambda g, a: g.interpolate(a, (6, 7), mode="linear"),
        lambda a: F.interpolate(a, (6, 7), mode="bilinear"),
    ),
    "grid_sample": (
        [normal(2, 3, 5, 6), GRID],
        lambda g, a, b: g.grid_sample(a, b),
        lambda a, b: F.grid_sample(a, b, align_corners=False),
    ),
    "network": (
        [normal(2, 3, 8, 8), normal(4, 3, 3, 3), normal(4), normal(64, 5)],
        lambda g, x, w, b, v: g.log_softmax(
            g.reshape(g.max_pool(g.relu(g.conv_fprop(x, w, padding=1) + g.reshape(b, (4, 1, 1))), 2), (2, 64)) @ v
        ),
        lambda x, w, b, v: F.log_softmax(F.max_pool2d(F.conv2d(x, w, b, padding=1).relu(), 2).flatten(1) @ v, -1),
    ),
}  # fmt: skip


def gradients(name: str, dtype: str, engine: str) -> tuple[list[Array], list[Array]]:
    """Returns our gradients of a case, and torch's in float64."""
    arrays, build, of = CASES[name]
    g = fg.Graph(name, io_dtype=dtype, compute_dtype=dtype)
    tensors = [g.tensor(f"x{k}", a.shape) for k, a in enumerate(arrays)]
    y = build(g, *tensors)
    seed = normal(*y.shape, seed=3)
    for gradient in g.gradients(y, tensors, seed.astype(dtype)):
        g.output(gradient)
    found = g.compile(engine=engine)(*(a.astype(dtype) for a in arrays))
    inputs = [torch.tensor(a, requires_grad=True) for a in arrays]
    wanted = torch.autograd.grad(of(*inputs), inputs, torch.tensor(seed))
    return list(found) if isinstance(found, (tuple, list)) else [found], [t.numpy() for t in wanted]


@pytest.mark.parametrize("name", CASES)
def test_gradients_through(name: str) -> None:
    for mine, wanted in zip(*gradients(name, "float64", "reference"), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["network", "bilinear", "take_along_axis"])
def test_kernels_compute_gradients_through(name: str) -> None:
    for mine, wanted in zip(*gradients(name, "float32", "cpu"), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-5)


def test_a_position_taken_once_is_no_sum_over_all_elements() -> None:
    """The gradient of a loss at each row's target is pointwise: no scatter kernel, no exact sums."""
    g = fg.Graph("targets")
    x, target = g.tensor("x", (64, 100)), g.tensor("target", (64, 1), "int64")
    loss = g.neg(g.reduction(g.take_along_axis(g.log_softmax(x), target, 1), "avg"))
    g.output(g.gradients(loss, [x])[0])
    kernels = plan(g).kernels
    assert {k.group.family for k in kernels} <= {"rows", "pointwise"}
    assert len(kernels) == 1


def test_slices_of_a_tensor_come_back_as_one_concatenation() -> None:
    g = fg.Graph("parts", io_dtype="float64", compute_dtype="float64")
    x = g.tensor("x", (3, 9))
    a, b = x[:, 1:4], x[:, 6:9]
    (dx,) = g.gradients(a * b, [x], 1.0)
    g.output(dx)
    made = g.producer(dx)
    assert made is not None
    assert (made.op.name, len(made.inputs)) == ("concatenate", 4)
    value = normal(3, 9)
    wanted = np.zeros((3, 9))
    wanted[:, 1:4], wanted[:, 6:9] = value[:, 6:9], value[:, 1:4]
    np.testing.assert_array_equal(g.compile("reference")(value), wanted)


@pytest.mark.parametrize("keys", [(np.s_[:, :4], np.s_[:, 3:]), (np.s_[:2], np.s_[:, 3:]), (np.s_[::2], np.s_[1::2])])
def test_slices_that_are_no_parts_are_summed_up(keys: tuple[Any, Any]) -> None:
    g = fg.Graph("overlapping", io_dtype="float64", compute_dtype="float64")
    x = g.tensor("x", (4, 7))
    loss = g.reduction(x[keys[0]] * x[keys[0]], "add") + g.reduction(g.exp(x[keys[1]]), "add")
    g.output(g.gradients(loss, [x])[0])
    value = normal(4, 7)
    wanted = np.zeros((4, 7))
    wanted[keys[0]] += 2 * value[keys[0]]
    wanted[keys[1]] += np.exp(value[keys[1]])
    np.testing.assert_allclose(g.compile("reference")(value), wanted, rtol=1e-12)


def test_gradients_through_assignments() -> None:
    """What was overwritten has no gradient; what was assigned has that of the region."""
    g = fg.Graph("assigned", io_dtype="float64", compute_dtype="float64")
    x, u = g.tensor("x", (3, 6)), g.tensor("u", (3, 2))
    new = g.assign(x[:, 1:5:2], g.exp(u))
    for gradient in g.gradients(g.reduction(new * new * new, "add"), [x, u]):
        g.output(gradient)
    values, other = normal(3, 6), normal(3, 2)
    before, changed = values.copy(), np.exp(other)
    by_x, by_u = g.compile("reference")(values, other)
    wanted = 3 * before**2
    wanted[:, 1:5:2] = 0
    np.testing.assert_allclose(by_x, wanted, rtol=1e-12)
    np.testing.assert_allclose(by_u, 3 * changed**2 * changed, rtol=1e-12)
    rows = g.assign(x[g.constant(np.array([2, 2]))], u[:2].reshape(2, 1, 2)[:, 0, :1] * g.constant(np.ones((2, 6))))
    with pytest.raises(GradientError, match="which is assign: it has no rule for this"):
        g.gradients(g.reduction(rows, "add"), u)


def test_gradients_for_sizes_that_vary() -> None:
    batch = fg.Dim("batch", min=1, max=64)
    g = fg.Graph("sizes")
    x, w = g.tensor("x", (batch, 6)), g.tensor("w", (6, 4))
    loss = g.reduction(g.log_softmax(g.gelu(x @ w)[:, ::2]), "avg", keepdims=False)
    for gradient in g.gradients(loss, [x, w]):
        g.output(gradient)
    run = g.compile("cpu")
    for count in (1, 5):
        arrays = [normal(count, 6).astype(np.float32), normal(6, 4).astype(np.float32)]
        inputs = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]
        made = F.log_softmax(F.gelu(inputs[0] @ inputs[1])[:, ::2], -1).mean()
        for mine, wanted in zip(run(*arrays), torch.autograd.grad(made, inputs)):
            np.testing.assert_allclose(mine, wanted.numpy(), rtol=1e-4, atol=1e-6)
