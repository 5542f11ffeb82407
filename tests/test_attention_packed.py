"""Attention to packed batches: sequences of different lengths one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import check_all, check_on_gpu, executables
from test_attention import BOTTOM, CAUSAL, FORMS, HOPPER, made

import fusegraph as fg
from codegen.attention import wgmma_schedule as attention_wgmma_schedule
from codegen.attention.spec import AttentionSpec
from codegen.attention.wgmma_schedule import AttentionWgmmaSchedule
from codegen.declined import Declined
from codegen.families import FORMS as CODE_FORMS
from fusegraph.engines.reference import evaluate
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.lowering import cudnn_attention
from fusegraph.ops.attention_packed import OFFSETS
from fusegraph.passes.decompose import decompose
from fusegraph.plan import by_cost_model, plan
from fusegraph.report.check import random_inputs, run
from fusegraph.runtime import nvrtc

Q, K = [0, 70, 70, 71, 150], [0, 40, 45, 45, 200]
ROWS, KEYS = 160, 210  # more than there are tokens


def offsets(g: fg.Graph) -> dict[str, Any]:
    return {key: g.tensor(key, (5,), dtype) for key, dtype in zip(OFFSETS, ("int32", "int64"))}


def inputs(g: fg.Graph) -> dict[str, Any]:
    found = random_inputs(g)
    for key, numbers in zip(OFFSETS, (Q, K)):
        found[key][...] = numbers
    return found


def packed(**how: Any) -> fg.Graph:
    return made(**{"extra": offsets, "rows": ROWS, "keys": KEYS, "layout": "BSHD", **how})


VARIANTS: tuple[dict[str, Any], ...] = (
    {"name": "plain", "generate_stats": True},
    {"name": "grouped", "heads": 4, "shared": 2, "depth": 64, **CAUSAL},
    {"name": "bottom", "heads": 1, "use_alibi_mask": True, **BOTTOM},
    {"name": "window", "heads": 1, "diagonal_band_left_bound": 20, **CAUSAL},
    {"name": "simt", "dtype": "float64", "heads": 1, **CAUSAL},
)


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_packed(arch: str) -> None:
    graphs = [packed(**how) for how in VARIANTS]
    assert all("attention" in [k.group.family for k in plan(g).kernels] for g in graphs)
    check_all(graphs, arch=arch, inputs=inputs)


def test_the_reference_is_that_of_each_sequence() -> None:
    for how in VARIANTS:
        g = packed(**{**how, "dtype": "float64"})
        given = inputs(g)
        whole = evaluate(g, given)
        parts = decompose(g)
        written_out = evaluate(parts.graph, given)
        for new, old in zip(parts.graph.outputs, g.outputs):
            np.testing.assert_allclose(written_out[new], whole[old], rtol=1e-9, atol=1e-9, err_msg=g.name)
        o = whole[g.outputs[0]]
        rest = {k: v for k, v in how.items() if k not in ("dtype", "rows", "keys")}
        for q0, q1, k0, k1 in zip(Q, Q[1:], K, K[1:]):
            if q1 > q0 and k1 > k0:
                one = made(**{**rest, "dtype": "float64", "rows": q1 - q0, "keys": k1 - k0})
                cut = {"q": given["q"][:, :, q0:q1], **{n: given[n][:, :, k0:k1] for n in "kv"}}
                np.testing.assert_allclose(evaluate(one, cut)[one.outputs[0]], o[:, :, q0:q1], rtol=1e-9, atol=1e-9)
            elif q1 > q0:
                assert not o[:, :, q0:q1].any()
        assert not o[:, :, Q[-1] :].any()


@pytest.mark.slow
def test_blocks_take_tiles_as_they_come_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks, which count the tiles of queries that they have taken, and of which rings go around."""

    def few(spec: AttentionSpec, arch: Any) -> tuple[AttentionWgmmaSchedule, ...]:
        found = attention_wgmma_schedule.schedules(spec, arch)
        ahead = 1 if spec.depth > 32 else 2
        return tuple(replace(s, groups=2, keys=32, blocks=2, heads=2, chains=2, ahead=ahead) for s in found)

    def more(name: str, *shape: int) -> Any:
        return lambda g: {**offsets(g), name: g.tensor(name, shape, "float32")}

    monkeypatch.setattr(CODE_FORMS[AttentionWgmmaSchedule], "schedules", few)
    graphs = [
        packed(name="bottom", heads=4, shared=2, generate_stats=True, **BOTTOM),
        packed(name="biased", heads=2, extra=more("bias", 1, 1, 1, KEYS), **CAUSAL),
        packed(name="sunk", heads=2, extra=more("sink_token", 1, 2, 1, 1)),
        packed(name="elements", heads=2, depth=36, width=20, layout="rows"),  # results leave from registers
    ]
    for g in graphs:
        (kernel,) = [k for k in plan(g, choose=by_cost_model(HOPPER)).kernels if k.group.family == "attention"]
        assert kernel.source.grid == (2, 1, 1)
        assert kernel.source.zeroed == ((len(kernel.arguments) - 1, 4),)
    check_all(graphs, arch="sm_90a", inputs=inputs)


@pytest.mark.slow
def test_one_query_of_each_sequence() -> None:
    """Keys are cut into parts, of which a sequence has some of the last and of the first."""
    count, keys = 4, 1500
    begin = [0, 5, 700, 701, keys]

    def several(g: fg.Graph) -> dict[str, Any]:
        return {key: g.tensor(key, (count + 1,), "int32") for key in OFFSETS}

    def own(g: fg.Graph) -> dict[str, Any]:
        found = random_inputs(g)
        found[OFFSETS[0]][...], found[OFFSETS[1]][...] = range(count + 1), begin
        return found

    g = made(name="decode", rows=count, keys=keys, heads=1, depth=160, extra=several)
    specs = [k.group.lowered.spec for k in plan(g).kernels if k.group.family == "attention"]
    assert [s.parts > 1 for s in specs] == [True]
    check_all([g], arch="sm_90a", inputs=own)


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_keys_of_other_sequences_are_not_read(arch: str) -> None:
    """Their values are NaN, in tiles that no query of a tile meets."""
    g = made(name="skipped", extra=offsets, rows=512, keys=512, heads=1)
    (executable,) = executables([g], arch=arch)
    given = random_inputs(g)
    for key in OFFSETS:
        given[key][...] = [0, 128, 256, 384, 512]
    given["v"][:, :, 256:384] = np.nan
    found = run(executable, given)["o"].astype(np.float32)[0, 0]
    assert np.isfinite(np.delete(found, np.s_[256:384], 0)).all()
    assert np.isnan(found[256:384]).all()
    # Tokens of no sequence, in the tile of the last one, do not make it meet the first one.
    for key in OFFSETS:
        given[key][...] = [0, 128, 256, 256, 300]
    given["v"] = np.roll(given["v"], -256, 2)
    found = run(executable, given)["o"].astype(np.float32)[0, 0, 128:]
    assert np.isfinite(found).all()


@pytest.mark.parametrize(
    ("error", "text", "extra"),
    [
        (AttributeValueError, "queries and of keys", lambda g: {OFFSETS[0]: g.tensor("a", (3,), "int32")}),
        (ShapeError, "one offset more", lambda g: {n: g.tensor(n, (3, 2), "int32") for n in OFFSETS}),
        (ShapeError, "3 and 4 offsets", lambda g: {n: g.tensor(n, (3 + k,), "int32") for k, n in enumerate(OFFSETS)}),
        (DTypeError, "is an integer", lambda g: {n: g.tensor(n, (3,), "float32") for n in OFFSETS}),
        (
            AttributeValueError,
            "both say how long",
            lambda g: {n: g.tensor(n, (3,) if n in OFFSETS else (1, 1), "int32") for n in ("seq_len_kv", *OFFSETS)},
        ),
    ],
)
def test_refusals(error: type[Exception], text: str, extra: Any) -> None:
    with pytest.raises(error, match=text):
        made(extra=extra)


def layers(name: str, *, packs: bool, how: Sequence[dict[str, Any]] = (CAUSAL, CAUSAL)) -> fg.Graph:
    """Builds attention whose queries are the result of attention, under masks that are partly the same."""
    g = fg.Graph(name, io_dtype="bfloat16")
    more = offsets(g) if packs else {}
    q, k, v = (g.tensor(key, (1, 2, ROWS, 32)) for key in "qkv")
    for one in how:
        q = g.sdpa(q, k, v, **more, **one)
    g.output(q, name="o")
    return g


def test_layers_share_their_masks() -> None:
    """What depends on no product is computed by each layer's kernel, not once in memory, which would have the scores
    there as well.
    """
    for packs in (False, True):
        g = layers("layers", packs=packs)
        families = [k.group.family for k in plan(g, choose=by_cost_model(HOPPER)).kernels]
        assert families.count("attention") == 2
        assert "contraction" not in families


@pytest.mark.slow
def test_layers() -> None:
    """Kernels of one graph that count the tiles that they have taken, each for itself."""
    check_all([layers("layers", packs=True, how=[CAUSAL, BOTTOM])], arch="sm_90a", inputs=inputs)


def test_cudnn_is_not_asked() -> None:
    (node,) = packed().nodes
    with pytest.raises(Declined, match="packed batches"):
        cudnn_attention.check(node)


def test_one_batch_of_all_tokens() -> None:
    with pytest.raises(ShapeError, match="one of all tokens, got 2"):
        made(batch=2, extra=offsets)


def test_golden_source() -> None:
    graph = packed(name="packed attention", rows=16384, keys=16384, depth=128, heads=16, shared=4, **CAUSAL)
    *_, kernel = plan(graph, choose=by_cost_model(HOPPER)).kernels
    check_golden("attention_packed_hopper", kernel.source.code)


@pytest.mark.slow
def test_compiles_without_spills() -> None:
    graphs = [packed(name="plain", rows=1000, keys=1000, depth=128, **CAUSAL)]
    graphs.append(packed(name="sloped", rows=1000, keys=1000, depth=64, use_alibi_mask=True, generate_stats=True))
    kernels = [k.source for g in graphs for k in plan(g, choose=by_cost_model(HOPPER)).kernels]
    for compiled in nvrtc.compile_kernels(kernels, "sm_90a"):
        assert compiled.spill_bytes == 0, compiled.name
        assert not compiled.warnings, compiled.name


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_on_gpu([packed(**how) for how in VARIANTS], inputs=inputs)
