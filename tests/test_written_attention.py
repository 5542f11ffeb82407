"""Attention as programs write it out: batches and heads joined around products, masks that are added to scores."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
from graphs import check_all, slow

import fusegraph as fg
from codegen.attention.spec import AttentionSpec, Bound
from codegen.attention.wgmma_schedule import AttentionWgmmaSchedule
from codegen.target import target
from fusegraph.plan import Plan, by_cost_model, plan

BATCH, HEADS, LENGTH, DEPTH = 2, 3, 24, 32
#: The lowest numbers of bfloat16 and of float32.
LOWEST = -3.3895313892515355e38, -3.4028234663852886e38


def mask_of(g: fg.Graph, kind: str) -> fg.Tensor:
    """Returns whether queries meet keys: those before them or also their own, or those that data say."""
    if kind == "data":
        return g.tensor("kept", (BATCH, 1, 1, LENGTH), "bool")
    every = g.broadcast(g.constant(0, dtype="int32"), (1, 1, LENGTH, LENGTH))
    i, j = g.gen_index(every, axis=2), g.gen_index(every, axis=3)
    return {"causal": j <= i, "before": j < i, "always": i >= 0}[kind]


def written(dtype: str, kind: str, low: float, how: str = "added", *, joined: bool = False) -> fg.Graph:
    """Returns attention of projections with heads beside each other, whose result is put there again.

    how     the mask is "added" to scores, alone or with a "bias", or "chosen".
    joined  whether products have one batch dimension.
    """
    g = fg.Graph("written", io_dtype=dtype)
    rows = [g.tensor(name, (BATCH, LENGTH, HEADS * DEPTH)) for name in "qkv"]
    q, k, v = (x.reshape(BATCH, LENGTH, HEADS, DEPTH).transpose(0, 2, 1, 3) for x in rows)

    def product(a: fg.Tensor, b: fg.Tensor) -> fg.Tensor:
        if not joined:
            return a @ b
        result = a.reshape(-1, *a.shape[2:]) @ b.reshape(-1, *b.shape[2:])
        return result.reshape(BATCH, HEADS, *result.shape[1:])

    scores, mask = product(q, k.transpose(0, 1, 3, 2)) * 0.25, mask_of(g, kind)
    lowest = g.constant(low, dtype=dtype)
    if how == "chosen":
        scores = g.binary_select(scores, lowest, mask)
    else:
        kept = g.tensor("bias", (1, HEADS, LENGTH, LENGTH)) if how == "bias" else g.constant(0.0, dtype=dtype)
        scores = scores + g.broadcast(g.binary_select(kept, lowest, mask), (BATCH, *g_shape(how), LENGTH, LENGTH))
    weights = g.cast(g.softmax(g.cast(scores, "float32")), dtype)
    result = product(weights, v).transpose(0, 2, 1, 3).reshape(BATCH * LENGTH, HEADS * DEPTH)
    g.output(result @ g.tensor("weight", (HEADS * DEPTH, 8)))
    return g


def g_shape(how: str) -> tuple[int]:
    return (HEADS if how == "bias" else 1,)


def only_spec(made: Plan) -> AttentionSpec:
    kernel, _ = made.kernels  # the other one multiplies the result
    spec = kernel.group.lowered.spec
    assert isinstance(spec, AttentionSpec)
    return spec


CAUSAL = (Bound(1, -1, 0),)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("kind", "low", "how", "bounds", "loads"),
    [
        ("causal", -inf, "added", CAUSAL, 0),
        ("causal", LOWEST[0], "added", CAUSAL, 0),
        ("causal", LOWEST[0], "bias", CAUSAL, 1),
        ("causal", LOWEST[0], "chosen", CAUSAL, 0),
        ("always", LOWEST[0], "added", (), 0),
        ("always", -inf, "bias", (), 1),
        ("before", LOWEST[0], "added", (), 0),  # the first query meets no key: all of them weigh the same
        ("data", LOWEST[0], "added", (), 1),
    ],
)
def test_added_masks_are_bounds(
    kind: str, low: float, how: str, bounds: tuple[Bound, ...], loads: int, joined: bool
) -> None:
    spec = only_spec(plan(written("bfloat16", kind, low, how, joined=joined)))
    assert (spec.bounds, len(spec.loads)) == (bounds, loads)
    assert spec.q.strides[-2:] == spec.out.strides[-2:] == (HEADS * DEPTH, 1)  # nothing is moved before or after


@pytest.mark.parametrize(
    ("kind", "low", "how"),  # minus infinity makes NaN where a query meets no key
    [
        ("causal", -inf, "added"),
        ("always", -inf, "chosen"),
        ("causal", LOWEST[1], "bias"),
        ("before", LOWEST[1], "added"),
        ("data", LOWEST[1], "chosen"),
        *slow(
            ("before", LOWEST[1], "chosen"),
            ("always", LOWEST[1], "bias"),
            ("data", LOWEST[1], "added"),
            ("data", LOWEST[1], "bias"),
        ),
    ],
)
def test_added_masks_in_numbers(kind: str, low: float, how: str) -> None:
    g = written("float32", kind, low, how, joined=True)
    assert len(plan(g).kernels) == 2
    rng = np.random.default_rng(0)
    given: list[Any] = [
        rng.random(t.shape) > 0.4 if t.dtype.is_bool else rng.standard_normal(t.shape).astype(np.float32)
        for t in g.inputs
    ]
    for x in given:
        if x.dtype == bool:
            x[0] = False  # no query of the first batch meets a key
    ours, wanted = (g.compile(engine=engine)(*given) for engine in ("cpu", "reference"))
    np.testing.assert_allclose(np.asarray(ours), np.asarray(wanted, np.float32), rtol=2e-4, atol=2e-5)


def test_computed_keys_lie_as_warpgroups_read_them() -> None:
    """Keys divided by a number behind their transpose are written with their elements beside each other."""
    g = fg.Graph("divided", io_dtype="bfloat16")
    rows = [g.tensor(name, (BATCH, 128, HEADS * 64)) for name in "qkv"]
    q, k, v = (x.reshape(BATCH, 128, HEADS, 64).transpose(0, 2, 1, 3).reshape(-1, 128, 64) for x in rows)
    scores = (q @ (k.transpose(0, 2, 1) / g.tensor("scale", ()))).reshape(BATCH, HEADS, 128, 128)
    result = g.softmax(scores).reshape(-1, 128, 128) @ v
    g.output(result.reshape(BATCH, HEADS, 128, 64))
    kernels = plan(g, choose=by_cost_model(target("sm_90a"))).kernels
    assert len(kernels) == 2
    assert isinstance(kernels[-1].choice.schedule, AttentionWgmmaSchedule)


def test_batches_that_no_reshape_divides_again() -> None:
    """torch multiplies in three dimensions, and leaves the shape of a result to whoever takes it."""
    g = fg.Graph("windows", io_dtype="bfloat16")
    q, k, v = (g.tensor(name, (BATCH, HEADS, LENGTH, DEPTH)) for name in "qkv")
    scores = (q * 0.25).reshape(-1, LENGTH, DEPTH) @ k.transpose(0, 1, 3, 2).reshape(-1, DEPTH, LENGTH)
    weights = g.cast(g.softmax(g.cast(scores.reshape(BATCH, HEADS, LENGTH, LENGTH), "float32")), "bfloat16")
    g.output(weights.reshape(-1, LENGTH, LENGTH) @ v.reshape(-1, LENGTH, DEPTH))
    assert [k.group.family for k in plan(g).kernels] == ["attention"]
    check_all([g])


def test_products_needed_elsewhere_keep_their_batch() -> None:
    g = fg.Graph("both", io_dtype="float32")
    a, b = (g.tensor(name, (2, 3, 4, 4)) for name in "ab")
    product = a.reshape(6, 4, 4) @ b.reshape(6, 4, 4)
    g.output(product.reshape(2, 3, 4, 4) * 2.0)
    g.output(product)
    assert sum(n.op.name == "matmul" for k in plan(g).kernels for n in k.group.nodes) == 1


def test_computed_biases_lie_along_the_keys() -> None:
    """A table of numbers for each distance and head gives a bias whose last dimension is the heads."""
    g = fg.Graph("relative", io_dtype="bfloat16")
    q, k, v = (g.tensor(name, (BATCH, HEADS, 64, 64)) for name in "qkv")
    every = g.broadcast(g.constant(0, dtype="int32"), (64, 64))
    distance = g.abs(g.gen_index(every, axis=1) - g.gen_index(every, axis=0))
    bias = g.gather(g.tensor("table", (64, HEADS)), distance, axis=0).transpose(2, 0, 1).reshape(1, HEADS, 64, 64)
    first = g.sdpa(q, k, v, bias=g.broadcast(bias, (BATCH, HEADS, 64, 64)))
    g.output(g.sdpa(first, k, v, bias=bias))
    specs = [kernel.group.lowered.spec for kernel in plan(g).kernels]
    found = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    assert len(found) == 2
    assert {op.strides[-1] for spec in found for op in spec.program.loads} == {1}
