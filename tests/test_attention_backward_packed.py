"""The gradients of attention to packed batches: sequences of different lengths one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import check_all, check_on_gpu, executables
from test_attention_backward import BOTTOM, CAUSAL, made
from test_attention_packed import KEYS, ROWS, K, Q, inputs, offsets

import fusegraph as fg
from codegen.declined import Declined
from fusegraph.engines.reference import evaluate
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.lowering import cudnn_attention_backward
from fusegraph.ops.attention_packed import OFFSETS
from fusegraph.passes.decompose import decompose
from fusegraph.plan import plan
from fusegraph.report.check import random_inputs, run

FORMS = ("sm_80", "sm_90a")


def packed(**how: Any) -> fg.Graph:
    g = made(extra=offsets, **{"rows": ROWS, "keys": KEYS, "layout": "BSHD", "forward": False, **how})
    del g.outputs[3:]  # of a bias that adds nothing
    return g


VARIANTS: tuple[dict[str, Any], ...] = (
    {"name": "plain"},
    {"name": "grouped", "heads": 4, "shared": 2, "depth": 64, "forward": True, **CAUSAL},
    {"name": "bottom", "heads": 1, "use_alibi_mask": True, **BOTTOM},
    {"name": "window", "heads": 1, "diagonal_band_left_bound": 20, "soft_cap": 3.0, **CAUSAL},
    {"name": "simt", "dtype": "float32", "heads": 1, "forward": True, **CAUSAL},
)


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_packed(arch: str) -> None:
    graphs = [packed(**how) for how in (VARIANTS[::2] if arch == "sm_80" else VARIANTS[:4])]
    for g in graphs:
        assert [x.family for x in plan(g).partition.groups].count("attention_backward") == 2, g.name
    check_all(graphs, arch=arch, inputs=inputs)


def test_the_reference_is_that_of_each_sequence() -> None:
    for how in VARIANTS:
        g = packed(**{**how, "dtype": "float64", "forward": False})
        given = inputs(g)
        whole = evaluate(g, given)
        parts = decompose(g)
        written_out = evaluate(parts.graph, given)
        for new, old in zip(parts.graph.outputs, g.outputs):
            np.testing.assert_allclose(written_out[new], whole[old], rtol=1e-9, atol=1e-9, err_msg=g.name)
        found = {t.name: x for t, x in whole.items()}
        rest = {k: v for k, v in how.items() if k not in ("dtype", "forward")}
        for q0, q1, k0, k1 in zip(Q, Q[1:], K, K[1:]):
            if q1 == q0 or k1 == k0:
                assert not found["dQ"][:, :, q0:q1].any()
                assert not found["dK"][:, :, k0:k1].any()
                continue
            one = made(**{**rest, "dtype": "float64", "forward": False, "rows": q1 - q0, "keys": k1 - k0})
            queries, keys = slice(q0, q1), slice(k0, k1)
            cut = {n: x[:, :, keys if n in "kv" else queries] for n, x in given.items() if x.ndim == 4}
            made_alone = evaluate(one, cut)
            for t in one.outputs[:3]:
                own = found[t.name][:, :, queries if t.name == "dQ" else keys]
                np.testing.assert_allclose(made_alone[t], own, rtol=1e-9, atol=1e-9)
        assert not found["dQ"][:, :, Q[-1] :].any()
        assert not any(found[key][:, :, K[-1] :].any() for key in ("dK", "dV"))


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_tiles_of_other_sequences_are_not_read(arch: str) -> None:
    """They are NaN, in tiles that no row of a tile meets."""
    numbers: dict[str, Any] = {"rows": 512, "keys": 512, "heads": 2, "shared": 1, "layout": "BHSD"}
    half, single = packed(name="half", depth=64, **numbers, **CAUSAL), packed(name="single", dtype="float32", **numbers)
    graphs = [half, single] if arch == "sm_80" else [half]
    for g, executable in zip(graphs, executables(graphs, arch=arch)):
        for key, results in (("v", ("dQ",)), ("dO", ("dK", "dV"))):
            given = random_inputs(g)
            for offset in OFFSETS:
                given[offset][...] = [0, 128, 256, 384, 512]
            given[key][:, :, 256:384] = np.nan
            found = run(executable, given)
            for result in results:
                x = found[result].astype(np.float32)
                assert np.isfinite(np.delete(x, np.s_[256:384], 2)).all(), (g.name, result)
                assert np.isnan(x[:, :, 256:384]).any(), (g.name, result)
            # Tokens of no sequence, in the tile of the last one, do not make it meet the first one.
            for offset in OFFSETS:
                given[offset][...] = [0, 128, 256, 256, 300]
            given[key] = np.roll(given[key], -256, 2)
            found = run(executable, given)
            assert all(np.isfinite(found[result][:, :, 128:].astype(np.float32)).all() for result in results), g.name


@pytest.mark.slow
def test_sizes() -> None:
    """One token, none, and sequences of a few."""

    def of(sequences: int) -> Callable[[fg.Graph], dict[str, Any]]:
        return lambda g: {key: g.tensor(key, (sequences + 1,), "int32") for key in OFFSETS}

    def spread(g: fg.Graph) -> dict[str, Any]:
        given = random_inputs(g)
        for key, x in zip(OFFSETS, "qk"):
            given[key][...] = np.linspace(0, g.tensors[x].shape[2], given[key].size).astype(int)
        return given

    sizes: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
        (1, 1, 1, {"heads": 1, "depth": 1}),
        (0, 6, 2, CAUSAL),
        (5, 7, 1, BOTTOM),
        (6, 9, 3, {"dtype": "float32", "soft_cap": 2.0}),
    )
    graphs = [
        made(name=f"s{n}", extra=of(count), rows=rows, keys=keys, forward=False, results=3, **how)
        for n, (rows, keys, count, how) in enumerate(sizes)
    ]
    check_all(graphs, arch="sm_90a", inputs=spread)


@pytest.mark.parametrize(
    ("error", "text", "extra"),
    [
        (AttributeValueError, "queries and of keys", lambda g: {OFFSETS[0]: g.tensor("a", (3,), "int32")}),
        (ShapeError, "3 and 4 offsets", lambda g: {n: g.tensor(n, (3 + k,), "int32") for k, n in enumerate(OFFSETS)}),
        (DTypeError, "is an integer", lambda g: {n: g.tensor(n, (3,), "float32") for n in OFFSETS}),
    ],
)
def test_refusals(error: type[Exception], text: str, extra: Any) -> None:
    with pytest.raises(error, match=text):
        made(extra=extra, forward=False)


def test_cudnn_is_not_asked() -> None:
    (node,) = packed().nodes
    with pytest.raises(Declined, match="packed batches"):
        cudnn_attention_backward.check(node)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_on_gpu([packed(**how) for how in VARIANTS], inputs=inputs)
