"""Attention to keys and values in pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graphs import check_all, check_on_gpu
from test_attention import BOTTOM, FORMS

import fusegraph as fg
from codegen.attention.spec import AttentionSpec
from codegen.attention.wgmma_schedule import AttentionWgmmaSchedule
from codegen.families import FORMS as CODE_FORMS
from codegen.spec import KernelSource
from fusegraph.engines.reference import evaluate
from fusegraph.errors import AttributeValueError, ShapeError
from fusegraph.ops.attention_paged import TABLES
from fusegraph.passes.decompose import decompose
from fusegraph.plan import plan
from fusegraph.report.check import random_inputs

BATCH, PAGES, BLOCKS = 2, 5, 13


def paged(
    name: str = "paged",
    *,
    dtype: str = "bfloat16",
    heads: int = 2,
    shared: int = 2,
    rows: int = 3,
    size: int = 16,
    pages: int = PAGES,
    depth: int = 32,
    lengths: bool = True,
    tokens_first: bool = False,
    rank: int = 2,
    **how: Any,
) -> fg.Graph:
    g = fg.Graph(name, io_dtype=dtype)
    q = g.tensor("q", (BATCH, heads, rows, depth))
    steps = (shared * size * depth, depth, shared * depth, 1) if tokens_first else None
    k, v = (g.tensor(n, (BLOCKS, shared, size, depth), strides=steps) for n in "kv")
    shape = (BATCH, pages) if rank == 2 else (BATCH, 1, pages, 1)
    tables = {key: g.tensor(key, shape, "int32") for key in TABLES}
    if lengths:
        how["seq_len_kv"] = g.tensor("seq_len_kv", (BATCH,), "int32")
    found: Any = g.sdpa(q, k, v, **tables, **how)
    for n, t in enumerate(found if isinstance(found, tuple) else (found,)):
        g.output(t, name=f"out{n}")
    return g


def inputs(g: fg.Graph) -> dict[str, Any]:
    found, rng = random_inputs(g), np.random.default_rng(5)
    for key in TABLES:
        found[key][...] = rng.integers(0, BLOCKS, found[key].shape)
        found[key].reshape(BATCH, -1)[1, -1] = 99  # clamped
    if "seq_len_kv" in found:
        found["seq_len_kv"][...] = [37, 79]
    return found


VARIANTS: tuple[dict[str, Any], ...] = (
    {"name": "few"},
    {"name": "grouped tokens", "heads": 4, "rows": 1, "tokens_first": True, "rank": 4},
    {"name": "prefill", "rows": 70, "depth": 64, "heads": 4, "tokens_first": True, "generate_stats": True, **BOTTOM},
    {"name": "all", "lengths": False, "size": 24, "paged_attention_max_seq_len_kv": 100},
    {"name": "long", "rows": 1, "pages": 70, "size": 16},
    {"name": "large pages", "size": 256, "pages": 2, "shared": 1, "lengths": False},
    {"name": "odd", "size": 5, "depth": 20},
    {"name": "simt", "dtype": "float32", "rows": 9},
)


@pytest.mark.slow
def test_one_block_has_all_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between tiles of queries with nothing to multiply, a warp may be late (`graphs.executables`)."""
    form = CODE_FORMS[AttentionWgmmaSchedule]
    original = form.render
    alone: list[str] = []

    def render(spec: AttentionSpec, schedule: AttentionWgmmaSchedule) -> KernelSource:
        source = original(spec, replace(schedule, blocks=1))
        alone.append(source.code)
        return source

    monkeypatch.setattr(form, "render", render)
    graphs = [paged("stored", rows=20, heads=4), paged("scaled", rows=20, heads=4)]
    out = graphs[1].outputs[0]
    graphs[1].output(out * 2.0, name="twice")

    def short(g: fg.Graph) -> dict[str, Any]:
        return {**inputs(g), "seq_len_kv": np.array([0, 37], np.int32)}

    check_all(graphs, arch="sm_90a", inputs=short)
    assert len(alone) == 2
    assert any("tma_store" not in code for code in alone)


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_paged(arch: str) -> None:
    graphs = [paged(**how) for how in VARIANTS]
    check_all(graphs, arch=arch, inputs=inputs)


def test_pages_are_read_where_they_lie() -> None:
    for how in VARIANTS:
        kernels = plan(paged(**how)).kernels
        assert kernels[0].group.family == "attention", how
        assert len(kernels[0].group.lowered.spec.arguments) == 5
    g = paged(lengths=False)
    (group,) = [x for x in plan(g).partition.groups if x.family != "view"]
    assert not group.lowered.spec.program.loads


def test_the_reference_is_what_the_nodes_compute() -> None:
    for how in VARIANTS:
        g = paged(**{**how, "dtype": "float64"})
        given = inputs(g)
        parts = decompose(g)
        whole, written_out = evaluate(g, given), evaluate(parts.graph, given)
        for new, old in zip(parts.graph.outputs, g.outputs):
            np.testing.assert_allclose(written_out[new], whole[old], rtol=1e-9, atol=1e-9, err_msg=g.name)


def test_refusals() -> None:
    def made(*tables: tuple[int, ...], **how: Any) -> None:
        g = fg.Graph("refused", io_dtype="bfloat16")
        q, k, v = (g.tensor(n, (2, 2, 16, 32)) for n in "qkv")
        g.sdpa(q, k, v, **{n: g.tensor(n, s, "int32") for n, s in zip(TABLES, tables)}, **how)

    with pytest.raises(AttributeValueError, match="in pages together"):
        made((2, 4))
    with pytest.raises(ShapeError, match="is \\(batches, pages\\)"):
        made((2, 4, 1), (2, 4))
    with pytest.raises(ShapeError, match="4 pages of 16 keys are less than 65"):
        made((2, 4), (2, 4), paged_attention_max_seq_len_kv=65)
    with pytest.raises(AttributeValueError, match="in pages"):
        made(paged_attention_max_seq_len_kv=65)
    with pytest.raises(AttributeValueError, match="a positive integer"):
        made((2, 4), (2, 4), paged_attention_max_seq_len_kv=0)
    with pytest.raises(ShapeError, match="batches differ"):
        made((3, 4), (3, 4))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_on_gpu([paged(**how) for how in VARIANTS], inputs=inputs)
