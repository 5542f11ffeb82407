"""Attention: the op sdpa, what is recognised as attention, and the kernels of the family on the CPU against the
reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import check_all, check_on_gpu, compile_for, executables

import fusegraph as fg
from codegen.attention import wgmma_schedule as attention_wgmma_schedule
from codegen.attention.spec import AttentionSpec, Bound
from codegen.attention.wgmma_schedule import AttentionWgmmaSchedule
from codegen.families import FORMS as CODE_FORMS
from codegen.target import PORTABLE, target
from fusegraph.engines.reference import evaluate
from fusegraph.errors import AttributeValueError, DTypeError, GraphError, ShapeError
from fusegraph.ops.attention import alibi_slopes
from fusegraph.passes.decompose import decompose
from fusegraph.plan import by_cost_model, plan
from fusegraph.report.check import random_inputs, run

Extra = Callable[[fg.Graph], Mapping[str, Any]]
FORMS = ("sm_90a", "sm_80")
HOPPER = target("sm_90a")


def made(
    *,
    name: str = "attended",
    dtype: str = "bfloat16",
    batch: int = 1,
    heads: int = 2,
    shared: int | None = None,
    rows: int = 65,
    keys: int | None = None,
    depth: int = 32,
    width: int | None = None,
    layout: str = "BHSD",
    extra: Extra | None = None,
    **attributes: Any,
) -> fg.Graph:
    """Builds an sdpa of tensors in a layout; ``extra`` makes further operands."""
    g = fg.Graph(name, io_dtype=dtype)
    keys = keys or rows

    def tensor(key: str, h: int, length: int, elements: int) -> fg.Tensor:
        strides = {
            "BHSD": (h * length * elements, length * elements, elements, 1),
            "BSHD": (h * length * elements, elements, h * elements, 1),
            "gaps": (h * length * (elements + 3), length * (elements + 3), elements + 3, 1),
            "rows": (h * length * (elements + 4), length * (elements + 4), elements + 4, 1),
            "turned": (h * length * elements, length * elements, 1, length),
        }[layout]
        return g.tensor(key, (batch, h, length, elements), strides=strides)

    q, k, v = (
        tensor("q", heads, rows, depth),
        tensor("k", shared or heads, keys, depth),
        tensor("v", shared or heads, keys, width or depth),
    )
    result = g.sdpa(q, k, v, **(extra(g) if extra else {}), **attributes)
    for key, t in zip(("o", "stats"), result if isinstance(result, tuple) else (result,)):
        g.output(t, name=key)
    return g


def lengths(g: fg.Graph) -> dict[str, Any]:
    return {
        "seq_len_q": g.constant(np.array([65, 7], np.int32)),
        "seq_len_kv": g.constant(np.array([130, 33], np.int32)),
    }


CAUSAL: dict[str, Any] = {"use_causal_mask": True}
BOTTOM: dict[str, Any] = {**CAUSAL, "diagonal_alignment": "BOTTOM_RIGHT"}

QUICK: tuple[dict[str, Any], ...] = (
    {"name": "plain", "rows": 63, "keys": 65, "depth": 40, "heads": 1},
    {"name": "causal", "rows": 130, "heads": 4, "shared": 2, **CAUSAL},
)
VARIANTS: tuple[dict[str, Any], ...] = (
    {"name": "one", "rows": 1},
    {"name": "one row", "rows": 1, "keys": 130, "depth": 64},
    {"name": "bottom", "rows": 63, "keys": 130, "width": 64, "generate_stats": True, **BOTTOM},
    {"name": "rows without keys", "rows": 130, "keys": 63, "use_alibi_mask": True, "heads": 3, **BOTTOM},
    {"name": "window", "rows": 130, "depth": 64, "diagonal_band_left_bound": 20, **CAUSAL},
    {"name": "band", "rows": 130, "diagonal_band_left_bound": 5, "diagonal_band_right_bound": 70},
    {"name": "capped", "dtype": "float16", "keys": 130, "depth": 128, "soft_cap": 5.0, "layout": "BSHD"},
    {"name": "scaled", "attn_scale": -0.3, "heads": 1},
    {"name": "zero", "attn_scale": 0, "heads": 1},
    {"name": "biased", "keys": 66, "extra": lambda g: {"bias": g.tensor("bias", (1, 1, 65, 66))}},
    {"name": "biased keys", "keys": 67, "extra": lambda g: {"bias": g.tensor("bias", (67,), "float32")}},
    {
        "name": "masked",
        "keys": 130,
        "heads": 4,
        "shared": 2,
        "batch": 2,
        "extra": lambda g: {"mask": g.tensor("mask", (2, 4, 65, 130), "bool")},
    },
    {"name": "lengths", "keys": 130, "batch": 2, "extra": lengths, **BOTTOM},
    {
        "name": "sunk",
        "heads": 4,
        "shared": 2,
        "generate_stats": True,
        "extra": lambda g: {"sink_token": g.tensor("sink", (1, 4, 1, 1), "float32")},
        **CAUSAL,
    },
)


@pytest.mark.parametrize(("arch", "how"), list(zip(FORMS, QUICK)))
def test_forms(arch: str, how: dict[str, Any]) -> None:
    check_all([made(**how)], arch=arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_variants(arch: str) -> None:
    graphs = [made(**how) for how in (*QUICK, *VARIANTS)]
    assert [len(plan(g).kernels) for g in graphs] == [1] * len(graphs)
    results = check_all(graphs, arch=arch)
    for result, g in zip(results, graphs):
        if g.name not in ("rows without keys", "lengths"):  # there rounding decides nothing, but 0 / 0 is looked at
            assert not any(o.undecided for o in result.outputs), g.name


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"ahead": 1}, {"ahead": 2, "alternate": True}])
def test_blocks_that_go_on(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has several tiles of queries, some of which meet no key, and its rings go around."""

    def few(spec: AttentionSpec, arch: Any) -> tuple[AttentionWgmmaSchedule, ...]:
        found = attention_wgmma_schedule.schedules(spec, arch)
        return tuple(replace(s, groups=2, keys=16, blocks=2, heads=2, chains=3, **how) for s in found)

    monkeypatch.setattr(CODE_FORMS[AttentionWgmmaSchedule], "schedules", few)
    graphs = [made(name="all", rows=200, keys=50, heads=3), made(name="some", rows=300, keys=70, heads=1, **BOTTOM)]
    graphs.append(made(name="even", rows=200, keys=48, heads=3))  # no mask, and no tile of keys that is not full
    # Rows of results that do not begin at multiples of 16 bytes leave from registers.
    graphs.append(made(name="elements", rows=200, keys=50, heads=3, depth=36, width=20, layout="rows"))
    assert all(k.source.grid == (2, 1, 1) for g in graphs for k in plan(g, choose=by_cost_model(HOPPER)).kernels)
    check_all(graphs, arch="sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_queries_of_nan(arch: str) -> None:
    """Scores of nothing but NaN are no missing keys."""
    graphs = [made(name=k, dtype=k, rows=9, keys=20, generate_stats=True, **CAUSAL) for k in ("bfloat16", "float32")]
    for g, executable in zip(graphs, executables(graphs, arch=arch)):
        given = random_inputs(g)
        given["q"][..., 5, 0] = np.nan
        for array in run(executable, given).values():
            missing = np.isnan(array.astype(np.float32)).any(axis=-1)
            assert (missing == (np.arange(9) == 5)).all()


@pytest.mark.slow
def test_layouts_and_dtypes() -> None:
    """Whatever lies badly for TMA, or is no 16-bit float, has another form."""
    graphs = [made(name=f"lies {k}", layout=k, rows=33, keys=40) for k in ("BSHD", "gaps", "turned")]
    graphs += [made(name=dtype, dtype=dtype, rows=33, keys=40, **CAUSAL) for dtype in ("float32", "float64")]
    graphs.append(made(name="deep", rows=17, keys=33, depth=300, width=20))
    check_all(graphs, arch="sm_90a")
    check_all([made(name="strict", rows=9, keys=12)], strict=True)
    check_all([made(name="unfused", rows=9, keys=12)], fusion=False)


def test_the_reference_is_what_the_nodes_compute() -> None:
    for how in (*QUICK, *VARIANTS):
        g = made(**{**how, "dtype": "float64"})
        inputs = random_inputs(g, 1)
        parts = decompose(g)
        whole, written_out = evaluate(g, inputs), evaluate(parts.graph, inputs)
        for new, old in zip(parts.graph.outputs, g.outputs):
            np.testing.assert_allclose(written_out[new], whole[old], rtol=1e-9, atol=1e-9, err_msg=g.name)


def test_rows_without_keys_are_zero() -> None:
    g = made(name="none", rows=5, keys=3, generate_stats=True, **BOTTOM)
    (executable,) = executables([g])
    found = run(executable, random_inputs(g))
    assert not found["o"][:, :, :2].any()
    assert (found["stats"][:, :, :2] == -inf).all()
    assert np.isfinite(found["stats"][:, :, 2:]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), [("sm_90a", "bfloat16"), ("sm_80", "float16"), ("sm_80", "float32")])
def test_rows_without_keys_are_zero_whatever_the_values(arch: str, dtype: str) -> None:
    """One tile of queries meets no key at all, of the other some queries do not."""
    (executable,) = executables([made(name="none", rows=250, keys=40, dtype=dtype, **BOTTOM)], arch=arch)
    inputs = random_inputs(executable.graph)
    inputs["v"][...] = np.nan
    found = run(executable, inputs)["o"].astype(np.float32)
    assert not found[:, :, :210].any()
    assert np.isnan(found[:, :, 210:]).all()


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_what_is_masked_does_not_leak(arch: str) -> None:
    """NaN and infinity in keys that no query meets and in their bias; scores whose exponentials overflow."""
    masked = made(
        name="nan",
        rows=65,
        keys=130,
        extra=lambda g: {"mask": g.tensor("mask", (130,), "bool"), "bias": g.tensor("bias", (130,), "float32")},
    )
    large = made(name="large", rows=65, keys=130, attn_scale=300.0)
    for executable in executables([masked, large], arch=arch):
        inputs = random_inputs(executable.graph, 3)
        if executable.graph is masked:
            inputs["mask"][...] = np.arange(130) % 3 > 0
            inputs["k"][:, :, ::3] = np.nan
            inputs["k"][:, :, 6] = np.inf
            inputs["bias"][::3] = np.nan
        assert np.isfinite(np.asarray(run(executable, inputs)["o"], np.float32)).all(), executable.graph.name


FAR: tuple[dict[str, Any], ...] = (
    {"name": "band", "diagonal_band_left_bound": 2**31 - 1, "diagonal_band_right_bound": 2**31 - 1},
    {
        "name": "lengths",
        "batch": 2,
        "extra": lambda g: {"seq_len_kv": g.constant(np.array([2**31 - 1, 33], np.int32))},
    },
)


def test_bounds_far_away() -> None:
    """What is further away than any query and key is no bound, and no int runs over."""
    check_all([made(rows=40, keys=70, heads=1, depth=16, **how) for how in FAR])
    endless, plain = (made(rows=3, keys=5, depth=4, **how) for how in ({"diagonal_band_right_bound": 2**63 - 1}, {}))
    inputs = random_inputs(plain)
    found, expected = (evaluate(g, inputs)[g.outputs[0]] for g in (endless, plain))
    np.testing.assert_array_equal(found, expected)


# ---- few queries, many keys

DECODING: tuple[dict[str, Any], ...] = (
    {"name": "grouped", "heads": 8, "shared": 2, "rows": 1, "keys": 2100, "depth": 64, "batch": 2},
    {"name": "wide", "heads": 8, "shared": 2, "rows": 1, "keys": 1100, "depth": 160, "batch": 2},
    {"name": "with stats", "rows": 1, "keys": 1500, "generate_stats": True, **BOTTOM},
    {"name": "a few", "heads": 4, "shared": 2, "rows": 3, "keys": 1100, "generate_stats": True, **BOTTOM},
    {"name": "alibi", "heads": 4, "shared": 2, "rows": 1, "keys": 1100, "use_alibi_mask": True, **BOTTOM},
    {
        "name": "some without keys",
        "heads": 4,
        "shared": 2,
        "rows": 1,
        "keys": 1100,
        "batch": 2,
        "extra": lambda g: {"seq_len_kv": g.constant(np.array([2**31 - 1, 3], np.int32))},
    },
)


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_decoding(arch: str) -> None:
    """Keys are cut into parts; heads that share their keys are rows of one tile."""
    graphs = [made(**how) for how in DECODING]
    check_all(graphs, arch=arch)


def test_keys_are_cut_where_queries_are_few() -> None:
    def specs(**how: Any) -> list[Any]:
        return [k.group.lowered.spec for k in plan(made(**how)).kernels]

    (shared,) = specs(**DECODING[0])  # by the blocks of clusters
    assert (shared.parts, shared.rows) == (1, 4)
    cut, *combining = specs(**DECODING[1])
    assert cut.parts > 1
    assert cut.rows == 4
    assert len(combining) == 1
    (whole,) = specs(rows=4096, keys=4096, heads=32)
    assert whole.parts == 1
    (short,) = specs(rows=1, keys=200, heads=1)
    assert short.parts == 1


# ---- what is recognised


def written_out(
    g: fg.Graph, *, score: Callable[[fg.Graph, fg.Tensor], fg.Tensor] | None = None, keys: int = 40
) -> tuple[fg.Tensor, fg.Tensor]:
    """Returns attention as a user writes it: its probabilities, and the result."""
    q, k, v = (g.tensor(name, (2, 3, n, 32)) for name, n in (("q", 33), ("k", keys), ("v", keys)))
    s = (q @ k.transpose(0, 1, 3, 2)) * 0.25
    p = g.softmax(score(g, s) if score else s)
    return p, p @ v


def documents(g: fg.Graph, s: fg.Tensor) -> fg.Tensor:
    """Masks all but earlier keys of the same document, and adds a bias that depends on the distance."""
    i, j = g.gen_index(s, axis=2), g.gen_index(s, axis=3)
    document = g.tensor("document", (40,), "int32")
    same = g.cmp_eq(g.slice(document, (0,), (33,)).reshape(33, 1), document)
    distance = g.cast(i - j, "float32")
    return g.cast(g.binary_select(s + g.exp(distance * -0.1), -inf, (j <= i) & same), "bfloat16")


def decisions(g: fg.Graph) -> list[str]:
    return [d.reason for d in plan(g).partition.decisions if "attention" in d.reason]


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_written_out(arch: str) -> None:
    graphs = []
    for name, score in (("plain", None), ("documents", documents)):
        g = fg.Graph(name, io_dtype="bfloat16")
        g.output(written_out(g, score=score)[1], name="o")
        assert [x.family for x in plan(g).partition.groups if x.family != "view"] == ["attention"]
        assert "no score is in memory" in decisions(g)[0]
        graphs.append(g)

    def inputs(g: fg.Graph) -> dict[str, Any]:
        found = random_inputs(g)
        if "document" in found:
            found["document"][...] = np.arange(40) // 7
        return found

    check_all(graphs, arch=arch, inputs=inputs)


def test_bounds_follow_from_the_masks() -> None:
    def spec(**how: Any) -> AttentionSpec:
        (kernel,) = plan(made(heads=1, **how)).kernels
        found = kernel.group.lowered.spec
        assert isinstance(found, AttentionSpec)
        return found

    plain = spec()
    assert (plain.bounds, plain.program.instructions, plain.scale) == ((), (), float(np.float32(32**-0.5)))
    assert spec(**CAUSAL).bounds == (Bound(1, -1, 0),)
    window = spec(rows=10, keys=15, diagonal_band_left_bound=4, **BOTTOM)
    assert set(window.bounds) == {Bound(1, -1, 5), Bound(-1, 1, -2)}
    assert not window.inside.instructions
    padded = spec(batch=2, keys=130, extra=lengths, **BOTTOM)
    assert {(b.row, b.key, len(b.loads)) for b in padded.bounds} == {(1, -1, 2), (0, -1, 1), (-1, 0, 1)}
    capped = spec(soft_cap=2.0, **CAUSAL)
    assert capped.scale == 2.0  # what is left of the scale follows the tangent
    assert len(capped.inside.instructions) < len(capped.program.instructions)


def needed_elsewhere(g: fg.Graph) -> fg.Tensor:
    p, o = written_out(g)
    g.output(p, name="p")
    return o


def other_axis(g: fg.Graph) -> fg.Tensor:
    q, k, v = (g.tensor(name, (2, 3, 40, 32)) for name in "qkv")
    return g.softmax(q @ k.transpose(0, 1, 3, 2), axis=2) @ v


def two_products(g: fg.Graph) -> fg.Tensor:
    q, k, v, r = (g.tensor(name, (2, 3, 40, 32)) for name in "qkvr")
    turned = k.transpose(0, 1, 3, 2)
    return g.softmax(q @ turned + r @ turned) @ v


def not_of_a_product(g: fg.Graph) -> fg.Tensor:
    return g.softmax(g.tensor("x", (2, 3, 33, 40))) @ g.tensor("v", (2, 3, 40, 32))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (needed_elsewhere, "'p' is an output of the graph"),
        (other_axis, "not along the keys"),
        (two_products, "depends on 2 products"),
        (not_of_a_product, "depends on 0 products"),
    ],
)
def test_what_only_looks_like_attention(build: Callable[[fg.Graph], fg.Tensor], reason: str) -> None:
    g = fg.Graph("looks", io_dtype="bfloat16")
    g.output(build(g), name="o")
    (text,) = decisions(g)
    assert "left as it is" in text
    assert reason in text
    assert all(x.family != "attention" for x in plan(g).partition.groups)


@pytest.mark.slow
def test_left_alone_it_is_still_right() -> None:
    graphs = []
    for build in (needed_elsewhere, other_axis, two_products):
        g = fg.Graph("looks", io_dtype="bfloat16")
        g.output(build(g), name="o")
        graphs.append(g)
    check_all(graphs)


# ---- the op


@pytest.mark.parametrize(
    ("error", "text", "how"),
    [
        (ShapeError, "not shared evenly", {"heads": 3, "shared": 2}),
        (ShapeError, "queries and keys have no elements", {"depth": 0, "width": 8}),
        (AttributeValueError, "soft_cap is a positive number", {"soft_cap": 0}),
        (AttributeValueError, "TOP_LEFT", {"diagonal_alignment": "left"}),
        (AttributeValueError, "diagonal_band_left_bound is an integer of at least 1", {"diagonal_band_left_bound": -1}),
        (AttributeValueError, "another one was given", {"diagonal_band_right_bound": 3, **CAUSAL}),
        (ShapeError, "bias .* does not broadcast", {"extra": lambda g: {"bias": g.tensor("b", (3, 65))}}),
        (DTypeError, "seq_len_q is an integer", {"extra": lambda g: {"seq_len_q": g.tensor("n", (1,))}}),
        (GraphError, "no attribute|unexpected", {"window": 3}),
    ],
)
def test_refusals(error: type[Exception], text: str, how: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        made(**how)


def test_alibi_slopes() -> None:
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-k for k in range(1, 9)])
    assert len(set(alibi_slopes(12).tolist())) == 12


# ---- the emitted sources


def golden_graphs() -> dict[str, tuple[fg.Graph, str]]:
    """Maps the names of golden files to a graph and the architecture of its kernel."""
    causal = {"rows": 2048, "depth": 128, "heads": 16, "shared": 4, **CAUSAL}
    return {
        "attention_hopper": (made(name="causal attention", **causal), "sm_90a"),
        "attention": (made(name="causal attention", **causal), "sm_80"),
    }


@pytest.mark.parametrize("name", list(golden_graphs()))
def test_golden_source(name: str) -> None:
    graph, arch = golden_graphs()[name]
    (kernel,) = plan(graph, choose=by_cost_model(PORTABLE if arch == "sm_80" else target(arch))).kernels
    check_golden(name, kernel.source.code)


# ---- compiled for GPUs, and on one


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_compiles_without_spills(arch: str) -> None:
    graphs = [made(name=f"d{d}", rows=512, depth=d, **CAUSAL) for d in (64, 128, 256)]
    graphs.append(made(name="capped", rows=509, keys=1021, depth=96, soft_cap=30.0, generate_stats=True))
    graphs.append(made(name="two tiles", rows=197, keys=197, depth=64, heads=12, batch=64))
    for compiled in compile_for(arch, graphs):
        assert compiled.spill_bytes == 0
        assert "C75" not in compiled.log


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_on_gpu([made(**how) for how in (*QUICK, *VARIANTS)])
    sizes = [(1, 1), (63, 65), (509, 2049), (2049, 509)]
    check_on_gpu([made(rows=m, keys=n, depth=64, heads=1, **how) for m, n in sizes for how in ({}, CAUSAL)])
