"""Optimisers as graphs: the same steps as torch's, in place, over parameters of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from graphs import quick

import fusegraph as fg
from fusegraph import optimizers
from fusegraph.errors import AttributeValueError, DTypeError, GraphError, ShapeError
from fusegraph.runtime.strides import empty_numpy

Array = np.ndarray[Any, Any]
SHAPES = ((33, 7), (5,), (1,), (0, 3), (4, 3, 2), (64, 64), (64,))
STEPS = 3


def built(
    rule: Callable[..., optimizers.State], shapes: Any, dtype: Any, clip: float | None = None, **how: Any
) -> tuple[fg.Graph, optimizers.State]:
    g = fg.Graph("step")
    weights = [g.tensor(f"w{n}", s, dtype) for n, s in enumerate(shapes)]
    grads = [g.tensor(f"g{n}", s, dtype) for n, s in enumerate(shapes)]
    lr = g.tensor("lr", (), "float64" if dtype == "float64" else "float32")
    if clip is not None:
        grads, norm = optimizers.clip_by_global_norm(g, grads, clip)
        g.output(norm)
    return g, rule(g, weights, grads, lr, **how)


def values(shapes: Any, dtype: Any, seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


def stepped(
    graph: fg.Graph, state: optimizers.State, shapes: Any, dtype: Any, engine: str = "cpu"
) -> tuple[list[Array], dict[str, Array], list[Any]]:
    """Returns the parameters and what is kept after some steps, and what each call returned."""
    weights = {f"w{n}": x for n, x in enumerate(values(shapes, dtype, 0))}
    kept = state.arrays(weights)
    run = graph.compile(engine=engine)
    found = []
    for step in range(STEPS):
        grads = {f"g{n}": x for n, x in enumerate(values(shapes, dtype, 1 + step))}
        lr = np.asarray(0.1 / (1 + step), graph.tensors["lr"].dtype.numpy)
        found.append(run(**weights, **grads, **kept, lr=lr))
    return list(weights.values()), kept, found


def by_torch(make: Callable[[Any], Any], shapes: Any, clip: float | None = None) -> tuple[list[Array], list[float]]:
    torch = pytest.importorskip("torch")
    weights = [torch.tensor(x, requires_grad=True) for x in values(shapes, "float64", 0)]
    optimizer, norms = make(weights), []
    for step in range(STEPS):
        for w, g in zip(weights, values(shapes, "float64", 1 + step)):
            w.grad = torch.tensor(g)
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(weights, clip)))
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        optimizer.step()
    return [w.detach().numpy() for w in weights], norms


CASES: dict[str, tuple[Any, dict[str, Any], Callable[[Any], Callable[[Any], Any]]]] = {
    "sgd": (optimizers.sgd, {}, lambda o: lambda w: o.SGD(w)),
    "momentum": (
        optimizers.sgd,
        {"momentum": 0.9, "weight_decay": 0.01},
        lambda o: lambda w: o.SGD(w, momentum=0.9, weight_decay=0.01),
    ),
    "nesterov": (
        optimizers.sgd,
        {"momentum": 0.9, "nesterov": True},
        lambda o: lambda w: o.SGD(w, momentum=0.9, nesterov=True),
    ),
    "adamw": (optimizers.adamw, {}, lambda o: lambda w: o.AdamW(w)),
    "adamw of other betas": (
        optimizers.adamw,
        {"betas": (0.0, 0.95), "epsilon": 1e-5, "weight_decay": 0.1},
        lambda o: lambda w: o.AdamW(w, betas=(0.0, 0.95), eps=1e-5, weight_decay=0.1),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "clip"), [*((name, None) for name in CASES), ("momentum", 2.0), ("adamw", 1e6)])
def test_steps_are_torchs(name: str, clip: float | None) -> None:
    rule, how, theirs = CASES[name]
    torch = pytest.importorskip("torch")
    graph, state = built(rule, SHAPES, "float64", clip, **how)
    found, _, results = stepped(graph, state, SHAPES, "float64")
    wanted, norms = by_torch(theirs(torch.optim), SHAPES, clip)
    for mine, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-10, atol=1e-12)
    if clip is not None:
        np.testing.assert_allclose(results, norms, rtol=1e-12)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("name", quick("adamw", "nesterov"))
def test_weights_of_16_bits(name: str, masters: bool) -> None:
    """Their steps are rounded; master weights are those of float32, and the others their copies."""
    rule, how, _ = CASES[name]
    shapes, half = SHAPES[:3], ml_dtypes.bfloat16
    graph, state = built(rule, shapes, half, masters=masters, **how)
    found, kept, _ = stepped(graph, state, shapes, half)
    plain, own = built(rule, shapes, "float32", **how)
    weights = {f"w{n}": x.astype(np.float32) for n, x in enumerate(values(shapes, half, 0))}
    more, run = own.arrays(), plain.compile(engine="cpu")
    for step in range(STEPS):
        grads = {f"g{n}": x.astype(np.float32) for n, x in enumerate(values(shapes, half, 1 + step))}
        run(**weights, **grads, **more, lr=np.float32(0.1 / (1 + step)))
    for n, (mine, other) in enumerate(zip(found, weights.values(), strict=True)):
        np.testing.assert_allclose(mine.astype(np.float32), other, rtol=0.01, atol=0.01)
        if masters:
            np.testing.assert_allclose(kept[f"w{n} master"], other, rtol=1e-6, atol=1e-7)
            np.testing.assert_array_equal(mine, kept[f"w{n} master"].astype(half))


def test_lion() -> None:
    graph, state = built(optimizers.lion, SHAPES, "float64", weight_decay=0.1)
    found, kept, _ = stepped(graph, state, SHAPES, "float64")
    weights = values(SHAPES, "float64", 0)
    moments = [np.zeros(s) for s in SHAPES]
    for step in range(STEPS):
        lr = 0.1 / (1 + step)
        for n, g in enumerate(values(SHAPES, "float64", 1 + step)):
            weights[n] = weights[n] * (1 - lr * 0.1) - lr * np.sign(0.9 * moments[n] + 0.1 * g)
            moments[n] = 0.99 * moments[n] + 0.01 * g
    for n, (mine, other) in enumerate(zip(found, weights, strict=True)):
        np.testing.assert_allclose(mine, other, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(kept[f"w{n} momentum"], moments[n], rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_muon() -> None:
    shapes = ((33, 7), (12, 40), (0, 3))
    torch = pytest.importorskip("torch")
    graph, state = built(optimizers.muon, shapes, "float64")
    found, _, _ = stepped(graph, state, shapes, "float64")
    if hasattr(torch.optim, "Muon"):
        wanted, _ = by_torch(lambda w: torch.optim.Muon(w), shapes[:2])
        for mine, other in zip(found, wanted):
            np.testing.assert_allclose(mine, other, atol=0.02)  # the products of both are of bfloat16


def test_singular_values_are_near_1() -> None:
    for shape in ((24, 10), (10, 24)):
        g = fg.Graph("g")
        g.output(optimizers.orthogonal(g, g.tensor("x", shape, "float64"), dtype="float64"))
        x = np.random.default_rng(0).standard_normal(shape)
        (y,) = [g.compile(engine="cpu")(x)]
        sizes = np.linalg.svd(y)[1]
        assert sizes.min() > 0.6
        assert sizes.max() < 1.3
        u, _, v = np.linalg.svd(x, full_matrices=False)
        assert np.linalg.norm(y - u @ v) < 0.3 * np.linalg.norm(u @ v)


@pytest.mark.parametrize("strides", [(27, 1, 9, 3), (64, 1, 16, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_lie_as_their_tensors_do(dtype: str, strides: tuple[int, ...]) -> None:
    """Which have the strides of parameters, gaps included."""
    g = fg.Graph("g")
    w, d = (g.tensor(name, (4, 3, 3, 3), dtype, strides=strides) for name in "wd")
    state = optimizers.adamw(g, [w], [d], 0.1, masters=True)
    given = {t.name: empty_numpy(t.shape, t.strides, t.dtype.numpy) for t in (w, d)}
    for array in given.values():
        array[...] = np.arange(4).reshape(4, 1, 1, 1)
    kept = state.arrays(given)
    for name in {"w first moment", "w master"} & kept.keys():
        assert kept[name].strides == tuple(4 * s for s in strides)
        np.testing.assert_array_equal(kept[name], given["w"] if name == "w master" else 0)
    g.compile(engine="cpu")(**given, **kept)
    np.testing.assert_allclose(
        given["w"][:, 2, 1, 0].astype(float), 0.999 * np.arange(4) - [0, 0.1, 0.1, 0.1], rtol=0.01
    )


def test_learning_rates_and_norms_of_any_rank() -> None:
    """A tensor of one number may have dimensions."""
    g = fg.Graph("g")
    w, d, one = g.tensor("w", (3,)), g.tensor("d", (3,)), g.tensor("one", (1, 1))
    gradients, _ = optimizers.clip_by_global_norm(g, [d], one)
    optimizers.sgd(g, [w], gradients, one)
    x = np.zeros(3, np.float32)
    g.compile(engine="cpu")(w=x, d=np.array([3, 4, 0], np.float32), one=np.full((1, 1), 0.5, np.float32))
    np.testing.assert_allclose(x, [-0.15, -0.2, 0], rtol=1e-5)


@pytest.mark.parametrize(
    ("rule", "how", "text"),
    [
        ("sgd", {"lr": "x"}, "lr is a number, got 'x'"),
        ("adamw", {"lr": float("nan")}, "lr is a finite number, got nan"),
        ("sgd", {"lr": -0.1}, "lr is at least 0, got -0.1"),
        ("adamw", {"betas": (0.9,)}, r"betas are two numbers, got \(0.9,\)"),
        ("lion", {"betas": 0.9}, "betas is a sequence, each entry a number, got 0.9"),
        ("lion", {"betas": (0.9, "b")}, "each entry a number"),
        ("adamw", {"weight_decay": "a"}, "weight_decay is a number, got 'a'"),
        ("adamw", {"epsilon": None}, "epsilon is a number, got None"),
        ("sgd", {"momentum": "x"}, "momentum is a number, got 'x'"),
        ("muon", {"momentum": None}, "momentum is a number"),
        ("muon", {"steps": "a"}, "steps is an integer, got 'a'"),
        ("muon", {"steps": -1}, "steps is at least 0, got -1"),
        ("muon", {"epsilon": -1}, "epsilon is at least 0"),
    ],
)
def test_numbers_that_are_none(rule: str, how: dict[str, Any], text: str) -> None:
    g = fg.Graph("g")
    w = g.tensor("w", (3, 2))
    with pytest.raises(AttributeValueError, match=text):
        getattr(optimizers, rule)(g, [w], [w], **{"lr": 0.1, **how})
    assert not g.nodes
    assert g.inputs == [w]


def test_errors_of_operands() -> None:
    g = fg.Graph("g")
    w = g.tensor("w", (4, 4))
    for given, text in (([None], "gradients: expected a Tensor, got NoneType"), (w, "gradients are several tensors")):
        with pytest.raises(GraphError, match=text):
            optimizers.adamw(g, [w], given, 0.1)  # type: ignore[arg-type]
        with pytest.raises(GraphError, match=text):
            optimizers.clip_by_global_norm(g, given, 0.1)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="part of a Graph, got None"):
        optimizers.adamw(None, [w], [w], 0.1)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="belongs to graph 'g'"):
        optimizers.adamw(fg.Graph("other"), [w], [w], 0.1)
    with pytest.raises(GraphError, match="belongs to graph 'other'"):
        optimizers.sgd(g, [w], [w], fg.Graph("other").tensor("lr", ()))
    with pytest.raises(ShapeError, match=r"lr is one number, got 'lr' \[4\]"):
        optimizers.adamw(g, [w], [w], g.tensor("lr", (4,)))
    for dtype in ("int8", "float8_e4m3"):
        with pytest.raises(DTypeError, match="dtype is of floats of 16 bits or more, got"):
            optimizers.muon(g, [w], [w], 0.1, dtype=dtype)
    with pytest.raises(ShapeError, match="no matrix"):
        optimizers.orthogonal(g, g.tensor("v", (4,)))
    for norm, text in ((-1.0, "max_norm is at least 0"), ("a", "max_norm is a number"), (float("nan"), "finite")):
        with pytest.raises(AttributeValueError, match=text):
            optimizers.clip_by_global_norm(g, [w], norm)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="norms are of floats"):
        optimizers.clip_by_global_norm(g, [g.tensor("i", (3,), "int32")], 1.0)


def test_errors() -> None:
    g = fg.Graph("g")
    w, b = g.tensor("w", (3, 2)), g.tensor("b", (3,))
    with pytest.raises(GraphError, match="1 parameters have 2 gradients"):
        optimizers.sgd(g, [w], [w, b], 0.1)
    with pytest.raises(ShapeError, match="its gradient"):
        optimizers.sgd(g, [w], [b], 0.1)
    with pytest.raises(DTypeError, match="floats"):
        optimizers.sgd(g, [w], [g.tensor("i", (3, 2), "int32")], 0.1)
    with pytest.raises(AttributeValueError, match="momentum is at least 0"):
        optimizers.sgd(g, [w], [w], 0.1, momentum=1.0)
    with pytest.raises(AttributeValueError, match="momentum, which is 0"):
        optimizers.sgd(g, [w], [w], 0.1, nesterov=True)
    with pytest.raises(ShapeError, match="no matrix"):
        optimizers.muon(g, [b], [b], 0.1)
    state = optimizers.sgd(g, [g.tensor("h", (2,), "float16")], [g.tensor("d", (2,))], 0.1, masters=True)
    with pytest.raises(GraphError, match="'h master' begins as 'h'"):
        state.arrays()
    with pytest.raises(ShapeError, match=r"'h' is \[2\], its array \[3\]"):
        state.arrays({"h": np.zeros(3, np.float16)})
