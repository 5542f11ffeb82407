"""Tokens drawn from logits: what may be drawn, how often it is, on the reference and on the CPU engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fusegraph as fg
from fusegraph.dtypes import as_dtype
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.plan import plan


def drawn(logits: Any, engine: str, dtype: str = "float32", **how: Any) -> Any:
    """Returns the positions that are drawn, one a row."""
    graph = fg.Graph("sampling", io_dtype=dtype)
    graph.output(graph.sample(graph.tensor("logits", logits.shape), **how))
    return np.asarray(graph.compile(engine=engine)(logits.astype(as_dtype(dtype).numpy)))


def left(row: Any, temperature: float, top_k: int | None, top_p: float | None) -> Any:
    """Returns the probabilities of what may be drawn of a row, found by sorting it."""
    p = np.exp((row.astype(np.float64) - row.max()) / temperature)
    if top_k is not None:
        p[row < np.sort(row)[-min(top_k, row.size)]] = 0
    p /= p.sum()
    if top_p is not None:
        order = np.argsort(-row, kind="stable")
        count = int(np.searchsorted(np.cumsum(p[order]), top_p * (1 - 1e-6))) + 1
        p[row < row[order[min(count, row.size) - 1]]] = 0
    return p / p.sum()


QUICK, SLOW = [(0.9, 12, 0.6)], [(1.0, None, None), (0.7, 5, None), (1.5, None, 0.8), (1.0, 1, None), (1.0, 99, 1.0)]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [*QUICK, *(pytest.param(*how, marks=pytest.mark.slow) for how in SLOW)]
)
def test_distribution(temperature: float, top_k: int | None, top_p: float | None) -> None:
    rng, draws = np.random.default_rng(1), 4000
    row = np.round(rng.normal(size=37) * 2, 1).astype(np.float32)  # some are equal
    row[3], row[7] = -np.inf, -0.0
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": 5}
    tokens = drawn(np.tile(row, (draws, 1)), "reference", **how)
    expected = left(row, temperature, top_k, top_p) * draws
    found = np.bincount(tokens, minlength=row.size)
    assert not found[expected == 0].any()
    likely = expected > 5
    spread = ((found - expected)[likely] ** 2 / expected[likely]).sum()
    assert spread < likely.sum() + 5 * np.sqrt(2 * likely.sum())  # chi-squared, five deviations
    assert found[likely].all()


@pytest.mark.parametrize(
    ("dtype", "top_k"),
    [("bfloat16", None), *(pytest.param(x, 40, marks=pytest.mark.slow) for x in ("bfloat16", "float32", "float16"))],
)
def test_engines_agree(dtype: str, top_k: int | None) -> None:
    logits = np.random.default_rng(2).normal(size=(16, 100)) * 4
    top_p = None if top_k is None else 0.95
    how = {"temperature": 0.8, "top_k": top_k, "top_p": top_p, "seed": 3, "offset": 11}
    ours, theirs = (drawn(logits, engine, dtype, **how) for engine in ("cpu", "reference"))
    assert (ours == theirs).all()
    assert len(set(ours.tolist())) > 8
    assert (drawn(logits, "cpu", dtype, **{**how, "offset": 12}) != ours).any()


def test_greedy() -> None:
    logits = np.array([[1, 5, 5, -np.inf], [-np.inf] * 4, [0, np.nan, 1, 2]], np.float32)
    for engine in ("cpu", "reference"):
        assert drawn(logits, engine, temperature=0).tolist() == [1, 0, 1]
    assert drawn(logits[:1], "reference", top_k=1).tolist()[0] in (1, 2)
    assert drawn(logits[2:], "reference", top_k=1, top_p=0.5).tolist() == [1]  # NaN


@pytest.mark.slow
def test_what_is_data() -> None:
    """Rows have their own temperatures and limits; a seed given later draws what it would draw if it were a number."""
    logits = np.random.default_rng(4).normal(size=(6, 50)).astype(np.float32) * 3
    limits = np.array([[1], [50], [3]] * 2, np.int32)
    warm, mass = np.array([[0.5], [2.0]] * 3, np.float32), np.array([[1.0], [0.5], [0.9]] * 2, np.float32)
    graph = fg.Graph("sampling")
    names = {"temperature": (warm, "float32"), "top_k": (limits, "int32"), "top_p": (mass, "float32")}
    how = {name: graph.tensor(name, x.shape, dtype) for name, (x, dtype) in names.items()}
    seed = graph.tensor("seed", (), "int64")
    graph.output(graph.sample(graph.tensor("logits", logits.shape), seed=seed, dtype="int32", **how))
    given = {"logits": logits, "seed": np.int64(9), **{name: x for name, (x, _) in names.items()}}
    tokens = graph.compile(engine="cpu")(**given)
    for n, (row, token) in enumerate(zip(logits, tokens)):
        assert left(row, warm[n, 0], limits[n, 0], mass[n, 0])[token] > 0
    assert tokens[0] == logits[0].argmax()
    assert tokens[3] == logits[3].argmax()


@pytest.mark.parametrize("engine", ["reference", pytest.param("cpu", marks=pytest.mark.slow)])
def test_the_least_that_may_be_drawn(engine: str) -> None:
    """Numbers and tensors that leave next to nothing leave the largest logit, which is not the first; rows of one
    tensor may leave everything.
    """
    logits = np.array([[10, 20, 30, -5], [1, 2, 3, -np.inf]], np.float32)
    extremes = [{"temperature": t} for t in (1e-37, 1e-38, 1e-45, 1e-300)] + [{"top_p": 1e-45}, {"top_p": 1e-300}]
    for how in (*extremes, {"temperature": 1e-38, "top_p": 0.5, "top_k": 3}):
        assert drawn(logits, engine, **how).tolist() == [2, 2], how
    assert set(drawn(np.tile(logits, (99, 1)), engine, temperature=1e300).tolist()) == {0, 1, 2, 3}
    few: dict[str, Any] = {
        "temperature": ([[0], [-1], [1e-38], [np.nan], [-np.inf], [1e30]], "float32"),
        "top_k": ([[0], [-1], [1], [-(2**31)], [0], [2**31 - 1]], "int32"),
        "top_p": ([[0], [-1], [1e-38], [1e-45], [-np.inf], [2]], "float32"),
    }
    rows = np.tile(logits[1, :3], (6, 1))
    for name, (values, dtype) in few.items():
        given, found = np.array(values, dtype), []
        for seed in range(8):
            graph = fg.Graph("sampling")
            how = {name: graph.tensor(name, given.shape, dtype), "seed": seed}
            graph.output(graph.sample(graph.tensor("logits", rows.shape), **how))
            found.append(np.asarray(graph.compile(engine=engine)(**{"logits": rows, name: given})))
        assert (np.array(found)[:, :5] == 2).all(), name
        assert (np.array(found)[:, 5] != 2).any(), name


def test_nothing_is_sorted_and_kernels_are_few() -> None:
    for how, most in (({"temperature": 0}, 1), ({"temperature": 0.7}, 1), ({"top_k": 50}, 3)):
        graph = fg.Graph("sampling", io_dtype="bfloat16")
        graph.output(graph.sample(graph.tensor("logits", (1, 32000)), **how))
        families = [kernel.group.family for kernel in plan(graph).kernels]
        assert set(families) == {"rows"}
        assert len(families) <= most


def test_refusals() -> None:
    graph = fg.Graph("sampling")
    logits = graph.tensor("logits", (2, 8))
    for wrong in (
        {"temperature": -1},
        {"temperature": np.inf},
        {"top_k": 0},
        {"top_k": 1.5},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": True},
    ):
        with pytest.raises(AttributeValueError, match="sample"):
            graph.sample(logits, **wrong)
    with pytest.raises(DTypeError, match="floats"):
        graph.sample(graph.tensor("integers", (2, 8), "int32"))
    with pytest.raises(ShapeError, match="no elements"):
        graph.sample(graph.tensor("none", (2, 0)))
    for number, shape in enumerate([(8,), (2, 8), (2,), (3, 1), (1, 2, 1)]):
        for key in ("temperature", "top_k", "top_p"):
            name = f"{key}_{number}"
            with pytest.raises(ShapeError, match=rf"{key} '{name}' .* does not broadcast to \[2, 1\]"):
                graph.sample(logits, **{key: graph.tensor(name, shape)})
