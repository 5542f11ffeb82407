"""Attention with dropout, and whatever else is linear in the probabilities before they meet the values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import ARCHS, check_all, check_on_gpu, executables
from test_attention import BOTTOM, CAUSAL, FORMS, made
from test_nvrtc_kernels import compiled

import fusegraph as fg
from codegen.target import target
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.plan import by_cost_model, plan
from fusegraph.report.check import random_inputs, run


def seeded(g: fg.Graph) -> dict[str, Any]:
    return {"seed": g.tensor("seed", (1,), "int64"), "offset": g.tensor("offset", (1, 1, 1, 1), "int32")}


DROPPED: tuple[dict[str, Any], ...] = (
    {"name": "plain", "keys": 130, "dropout_probability": 0.3},
    {"name": "whole", "rows": 130, "keys": 132, "heads": 3, "dropout_probability": 0.4, **CAUSAL},
    {"name": "grouped", "keys": 67, "heads": 4, "shared": 2, "dropout_probability": 0.5,
     "generate_stats": True, **BOTTOM},
    {"name": "decoding", "rows": 1, "keys": 1100, "heads": 4, "shared": 2, "dropout_probability": 0.25},
    {"name": "everything", "rows": 9, "dropout_probability": 1},
    {"name": "simt", "rows": 9, "keys": 41, "dtype": "float32", "dropout_probability": 0.5, **CAUSAL},
)  # fmt: skip


def families(g: fg.Graph) -> list[str]:
    return [x.family for x in plan(g).partition.groups if x.family != "view"]


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_dropout(arch: str) -> None:
    graphs = [made(extra=seeded, **how) for how in DROPPED]
    assert all(families(g)[0] == "attention" for g in graphs)
    check_all(graphs, arch=arch)


@pytest.mark.parametrize("arch", FORMS)
def test_lanes_share_random_words(arch: str) -> None:
    """Where rows of scores begin at multiples of four."""
    for keys, shared in ((132, True), (130, False)):
        g = made(keys=keys, extra=seeded, dropout_probability=0.5)
        (kernel,) = plan(g, choose=by_cost_model(target(arch))).kernels
        assert ("attention::random_words(" in kernel.source.code) == shared
        assert ("philox::at_least(" in kernel.source.code) != shared


def weighted(g: fg.Graph, kind: str) -> fg.Tensor:
    """Builds softmax, a linear op on the probabilities, and the product with the values, as a user writes them."""
    q, k, v = (g.tensor(name, (2, 3, n, 32)) for name, n in (("q", 33), ("k", 40), ("v", 40)))
    p = g.softmax(q @ k.transpose(0, 1, 3, 2) * 0.25)
    if kind == "dropout":
        p = g.dropout(p, 7, 5, probability=0.2)
    elif kind == "mask of heads":
        p = g.tensor("of head", (3, 1, 1), "float32") * p / 2
    elif kind == "of rows":
        p = g.binary_select(0.0, p, g.tensor("left", (2, 1, 33, 1), "float32") > 0)
    elif kind == "of keys":
        p = g.binary_select(0.0, p, g.gen_index(p, axis=3) > g.gen_index(p, axis=2))
    elif kind in ("masked twice", "masked by a bias"):
        mask = g.tensor("masked", (33, 40), "bool")
        s = q @ k.transpose(0, 1, 3, 2) * 0.25
        bias = g.tensor("bias", (33, 40), "float32") if kind == "masked by a bias" else None
        p = g.softmax(g.binary_select(-np.inf, s if bias is None else s + bias, mask))
        p = g.binary_select(0.0, p, mask)
    elif kind == "squared":
        p = p * p
    else:
        p = g.binary_select(p, 0.0, p > 0.01)
    return p @ v


def test_what_is_linear_in_probabilities_is_fused() -> None:
    fused = ("dropout", "mask of heads", "of rows", "of keys", "masked twice")
    for kind in (*fused, "masked by a bias", "squared", "its own"):
        g = fg.Graph(kind, io_dtype="bfloat16")
        g.output(weighted(g, kind), name="o")
        assert (families(g) == ["attention"]) == (kind in fused), kind


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_weights(arch: str) -> None:
    graphs = []
    for kind in ("dropout", "mask of heads", "of rows", "of keys", "masked twice", "squared", "its own"):
        g = fg.Graph(kind, io_dtype="bfloat16")
        g.output(weighted(g, kind), name="o")
        graphs.append(g)
    check_all(graphs, arch=arch)


@pytest.mark.parametrize(("keys", "dtype"), [(40, "float32"), (1100, "bfloat16")])  # the latter in parts
def test_zeros_chosen_in_rows_without_keys_are_zeros(keys: int, dtype: str) -> None:
    """Softmax makes NaN of such a row, of which nothing is left where zeros are chosen instead: for the whole row, or
    key by key.  Rows of which no zeros are chosen stay NaN.
    """
    graphs, rows = [], 5
    for kind in ("whole", "by key", "same"):
        g = fg.Graph(kind, io_dtype=dtype)
        q, k, v = (g.tensor(name, (1, 2, n, 32)) for name, n in (("q", rows), ("k", keys), ("v", keys)))
        masked = g.tensor("masked", (rows, keys), "bool")
        p = g.softmax(g.binary_select(-np.inf, q @ k.transpose(0, 1, 3, 2), masked))
        zeros = masked if kind == "same" else g.tensor("zeros", (rows, 1 if kind == "whole" else keys), "bool")
        g.output(g.binary_select(0.0, p, zeros) @ v, name="o")
        graphs.append(g)
    for g, executable in zip(graphs, executables(graphs)):
        inputs = random_inputs(g)
        for name, some in (("masked", slice(1, 3)), ("zeros", slice(2, 4))):
            if name in inputs:
                inputs[name][...] = False
                inputs[name][some] = True
        found = run(executable, inputs)["o"].astype(np.float32)
        zero, none = ([1, 2], []) if g.name == "same" else ([2, 3], [1])
        assert np.isnan(found[:, :, none]).all()
        assert (found[:, :, zero] == 0).all()
        assert np.isfinite(found[:, :, [0, 4]]).all()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_chosen_zeros_compile_without_spills(arch: str) -> None:
    graphs = [fg.Graph("small", io_dtype="bfloat16"), fg.Graph("twice", io_dtype="bfloat16")]
    for g, kind in zip(graphs, ("of rows", "masked twice")):
        g.output(weighted(g, kind), name="o")
    for depth in (64, 128):
        g = fg.Graph("large", io_dtype="float16")
        q, k, v = (g.tensor(name, (2, 4, 512, depth)) for name in "qkv")
        p = g.softmax(q @ k.transpose(0, 1, 3, 2) * 0.1)
        g.output(g.binary_select(0.0, p, g.tensor("left", (2, 1, 512, 1), "bool")) @ v, name="o")
        graphs.append(g)
    assert compiled([k.source for g in graphs for k in plan(g, choose=by_cost_model(target(arch))).kernels], arch)


def test_the_numbers_are_those_of_rng_uniform() -> None:
    """With values that are the identity the results are the probabilities."""
    g = made(name="ones", rows=5, keys=8, depth=8, dtype="float32", extra=seeded, dropout_probability=0.5)
    (executable,) = executables([g])
    inputs = random_inputs(g)
    inputs["seed"][...], inputs["offset"][...] = 1 << 40, 9
    inputs["v"][...] = np.eye(8)
    random = fg.Graph("random", io_dtype="float32")
    random.output(random.rng_uniform(random.tensor("x", (1, 2, 5, 8)), 1 << 40, 9), name="r")
    kept = run(executables([random])[0], random_inputs(random))["r"] >= 0.5
    np.testing.assert_array_equal(run(executable, inputs)["o"] != 0, kept)


@pytest.mark.parametrize(
    ("error", "text", "how"),
    [
        (AttributeValueError, "between 0 and 1", {"dropout_probability": 1.5, "extra": seeded}),
        (AttributeValueError, "needs a seed and an offset", {"dropout_probability": 0.5}),
        (DTypeError, "seed is an integer", {"extra": lambda g: {"seed": g.tensor("s", (1,), "float32"), "offset": 1}}),
        (ShapeError, "offset .* does not", {"extra": lambda g: {"seed": 1, "offset": g.tensor("s", (2,), "int64")}}),
    ],
)  # fmt: skip
def test_refusals(error: type[Exception], text: str, how: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        made(**how)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_on_gpu([made(extra=seeded, **how) for how in DROPPED])
