"""Queries, keys and values that are computed in their attention's kernel; rotary embeddings are in `test_rope`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import check_all, check_on_gpu
from test_attention import BOTTOM, CAUSAL, FORMS
from test_attention_paged import inputs as paged_inputs

import fusegraph as fg
from codegen.attention import wgmma_schedule
from codegen.attention.spec import AttentionSpec
from codegen.attention.wgmma_schedule import AttentionWgmmaSchedule
from codegen.families import FORMS as CODE_FORMS
from codegen.target import target
from fusegraph.plan import by_cost_model, plan
from fusegraph.report.check import random_inputs
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache

Write = Callable[[fg.Graph, fg.Tensor], fg.Tensor]
HOPPER = target("sm_90a")


def turned(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    """Returns halves of rows turned by angles, as rotary embeddings do."""
    low, high = g.split(x, 2, axis=x.rank - 1)
    cos, sin = (g.tensor(g._unique(n), (x.shape[2], x.shape[3])) for n in ("cos", "sin"))
    return x * cos + g.concatenate(-high, low, axis=x.rank - 1) * sin


def swapped(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    """Swaps adjacent elements."""
    pairs = x.reshape((*x.shape[:-1], x.shape[-1] // 2, 2))
    even, odd = g.split(pairs, 2, axis=x.rank)
    return x + g.concatenate(-odd, even, axis=x.rank).reshape(x.shape) * 0.5


def scaled(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    """Returns a factor for each element and a bias for each head."""
    return x * g.tensor("factor", (x.shape[-1],)) + g.tensor("bias", (1, x.shape[1], 1, 1), "float32")


def masked(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    return g.binary_select(x, 0.25, g.tensor("some", (x.shape[2], 1), "bool"))


def placed(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    """Returns halves turned by rows of tables, at positions that each batch has."""
    batch, _, length, depth = x.shape
    low, high = g.split(x, 2, axis=3)
    at = g.tensor("positions", (batch, length), "int32")
    cos, sin = (g.gather(g.tensor(n, (90, depth)), at).reshape((batch, 1, length, depth)) for n in ("cos", "sin"))
    return x * cos + g.concatenate(-high, low, axis=3) * sin


def partly(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    return g.rope(x, g.tensor("freqs", (x.shape[2], 1, 1, 16), "float32"), rope_dim=16, output_scale=0.3)


def doubled(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    return x + x * 0.5


def built(
    name: str,
    *,
    dtype: str = "bfloat16",
    of: str | None = None,
    batch: int = 1,
    heads: int = 2,
    shared: int | None = None,
    rows: int = 65,
    keys: int | None = None,
    depth: int = 32,
    q: Write | None = turned,
    k: Write | None = None,
    v: Write | None = None,
    layout: str = "BHSD",
    extra: Callable[[fg.Graph], dict[str, Any]] | None = None,
    **how: Any,
) -> fg.Graph:
    """Returns an attention with prologues of its queries, keys and values, which are of the dtype ``of``."""
    g = fg.Graph(name, io_dtype=dtype)
    keys = keys or rows
    tensors = []
    for key, h, length, write in (
        ("q", heads, rows, q),
        ("k", shared or heads, keys, k),
        ("v", shared or heads, keys, v),
    ):
        strides = (h * length * depth, depth, h * depth, 1) if layout == "BSHD" else None
        x = g.tensor(key, (batch, h, length, depth), of if write else None, strides=strides)
        x = write(g, x) if write else x
        tensors.append(x if x.dtype.name == dtype else g.cast(x, dtype))
    result = g.sdpa(*tensors, **(extra(g) if extra else {}), **how)
    for n, t in enumerate(result if isinstance(result, tuple) else (result,)):
        g.output(t, name=f"out{n}")
    return g


def families(g: fg.Graph) -> list[str]:
    return [x.family for x in plan(g).partition.groups if x.family != "view"]


#: Small sizes of everything that differs: the program, the layout, what else the kernel does.
CASES: tuple[dict[str, Any], ...] = (
    {"name": "turned", **CAUSAL},
    {"name": "swapped", "q": swapped, "shared": 1, "depth": 40, "layout": "BSHD", "generate_stats": True},
    {"name": "scaled", "q": scaled, "batch": 2, "depth": 24, "of": "float32", **BOTTOM, "keys": 40},
    {"name": "both", "k": turned, "v": doubled, "rows": 33, "keys": 90, "depth": 72},
    {"name": "masked", "q": masked, "rows": 130, "depth": 80},
    {"name": "odd", "q": doubled, "depth": 21, "dtype": "float16"},
    {"name": "one token", "k": swapped, "v": scaled, "heads": 4, "shared": 2, "rows": 1, "keys": 70},
    {
        "name": "integers",
        "q": None,
        "k": lambda g, x: g.cast(x, "bfloat16") * 0.01,
        "of": "int8",
        "rows": 9,
        "keys": 70,
    },
    {"name": "placed", "q": placed, "batch": 2, "rows": 3, "keys": 90, **BOTTOM},
    {"name": "partly", "q": partly, "depth": 48, "batch": 2, "rows": 20},
    {"name": "sink", "extra": lambda g: {"sink_token": g.tensor("sink", (1, 2, 1, 1), "float32")}, "depth": 16},
    {"name": "bias", "extra": lambda g: {"bias": g.tensor("added", (65, 65), "float32")}},
    {"name": "lengths", "batch": 2, "extra": lambda g: {"seq_len_kv": g.tensor("length", (2,), "int32")}},
)


@pytest.mark.parametrize(("arch", "how"), list(zip(FORMS, (CASES[0], CASES[3]))))
def test_forms(arch: str, how: dict[str, Any]) -> None:
    check_all([built(**how)], arch=arch)


def lengths(g: fg.Graph) -> dict[str, Any]:
    found = random_inputs(g)
    if "length" in found:
        found["length"][...] = [65, 20]
    if "positions" in found:
        found["positions"][...] = [[5, 6, 7], [87, 88, 200]]  # clamped
    return found


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_cases(arch: str) -> None:
    graphs = [built(**how) for how in CASES]
    kernels = [families(g) for g in graphs]
    assert kernels == [[*["pointwise"] * (g.name == "partly"), "attention"] for g in graphs]  # cosines and sines
    check_all(graphs, arch=arch, inputs=lengths)


@pytest.mark.slow
def test_wide_numbers_and_small_ones() -> None:
    """Kernels of single threads; 8-bit floats by both kinds of tensor cores."""
    wide = ("float32", "float64")
    graphs = [built(**{**how, "name": f"{how['name']} {d}", "dtype": d}) for d in wide for how in CASES[:4]]
    check_all([*graphs, built("narrow", dtype="float8_e4m3", of="bfloat16", depth=64, q=doubled)])
    check_all([built("narrow", dtype="float8_e4m3", of="bfloat16", rows=70, depth=64, q=swapped)], arch="sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [1, 2])
def test_blocks_that_go_on(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block computes the queries of one tile after the other, where those before have been multiplied and results
    have left; some meet no key.
    """

    def few(spec: AttentionSpec, arch: Any) -> tuple[AttentionWgmmaSchedule, ...]:
        found = wgmma_schedule.schedules(spec, arch)
        return tuple(replace(s, groups=2, keys=16, blocks=2, ahead=ahead, heads=2, alternate=ahead > 1) for s in found)

    monkeypatch.setattr(CODE_FORMS[AttentionWgmmaSchedule], "schedules", few)
    graphs = [
        built("all", rows=200, keys=50, heads=3),
        built("some", rows=300, keys=70, heads=1, **BOTTOM),
        built("even", rows=200, keys=48, heads=3, q=swapped),
        built("ranges", rows=200, keys=50, heads=3, extra=lambda g: {"bias": g.tensor("b", (1, 3, 1, 50))}),
        built("listed", rows=300, keys=96, heads=1, **BOTTOM, extra=_documents),
    ]
    graphs.append(built("from registers", rows=200, keys=50, heads=3))
    out = graphs[-1].outputs[0]
    graphs[-1].output(out * 2.0, name="twice")
    every = [k for g in graphs for k in plan(g, choose=by_cost_model(HOPPER)).kernels if k.group.family == "attention"]
    assert [k.source.grid for k in every] == [(2, 1, 1)] * len(graphs)
    assert all("compute_queries" in k.source.code for k in every)
    check_all(graphs, arch="sm_90a", inputs=_sorted)


def _documents(g: fg.Graph) -> dict[str, Any]:
    q, k = g.tensor("document_q", (1, 1, 300, 1), "int32"), g.tensor("document_k", (1, 1, 1, 96), "int32")
    return {"mask": g.cmp_eq(q, k)}


def _sorted(g: fg.Graph) -> dict[str, Any]:
    found = random_inputs(g)
    for key in ("document_q", "document_k"):
        if key in found:
            n = found[key].size
            found[key][...] = (np.arange(n) * 4 // n).reshape(found[key].shape)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_pages_and_parts(arch: str) -> None:
    """Queries in front of a paged cache, and of one so long that parts of it are worked on by blocks of their own."""
    g = fg.Graph("paged", io_dtype="bfloat16")
    q = turned(g, g.tensor("q", (2, 4, 3, 32)))
    k, v = (g.tensor(n, (13, 2, 16, 32)) for n in "kv")
    tables = {f"page_table_{n}": g.tensor(f"page_table_{n}", (2, 5), "int32") for n in "kv"}
    g.output(g.sdpa(q, k, v, **tables, seq_len_kv=g.tensor("seq_len_kv", (2,), "int32")), name="o")
    assert families(g) == ["attention"]
    check_all([g], arch=arch, inputs=paged_inputs)
    how: dict[str, Any] = {"heads": 4, "shared": 2, "rows": 1, "keys": 2100}
    parts = [built("parts", depth=160, **how), built("all in parts", k=turned, dtype="float32", depth=16, **how)]
    assert [families(x) for x in parts] == [["pointwise", "attention", "rows"]] * 2  # each part has all queries
    assert ["computes its keys" in d.reason for x in parts for d in plan(x).partition.decisions].count(True) == 1
    check_all(parts, arch=arch)


def test_no_numbers_stay_in_their_rows() -> None:
    """Rows that are computed of NaN and infinity spoil nothing but their own results; behind the last row and element
    nothing is read.
    """
    g = built("no numbers", rows=70, depth=40, heads=1)

    def spoiled(g: fg.Graph) -> dict[str, Any]:
        found = random_inputs(g)
        found["q"][0, 0, 3, 0], found["q"][0, 0, 69, 39] = np.nan, np.inf
        return found

    check_all([g], arch="sm_90a", inputs=spoiled)


def behind_a_product(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    product = x @ g.tensor("w", (x.shape[3], x.shape[3]))
    return product + g.tensor("b", (x.shape[3],))


@pytest.mark.parametrize(
    ("write", "kernels", "why"),
    [
        (lambda g, x: g.exp(x), ["pointwise", "attention"], "exp takes many instructions"),
        (lambda g, x: g.exp(x) * (g.tensor("f", (32,)) * 2.0), ["pointwise", "attention"], "to compute"),
        (behind_a_product, ["contraction", "attention"], ""),
        (lambda g, x: turned(g, behind_a_product(g, x)), ["contraction", "attention"], "computes its queries"),
        (lambda g, x: turned(g, g.exp(x)), ["pointwise", "attention"], "does the rest as well"),
        (lambda g, x: g.output(doubled(g, x), name="y"), ["pointwise", "attention"], "is needed in memory as well"),
        (lambda g, x: x.reshape((1, 65, 2, 32)).transpose((0, 2, 1, 3)), ["attention"], ""),
    ],
)  # fmt: skip
def test_what_is_computed_where(write: Write, kernels: list[str], why: str) -> None:
    g = built("where", q=write)
    assert families(g) == kernels
    reasons = [d.reason for d in plan(g).partition.decisions]
    assert not why or any(why in r for r in reasons), reasons


def shifted(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    """Returns both what a product's kernel does behind it and what is left for the attention take the same."""
    factor = g.tensor("factor", (x.shape[3],)) * 2.0
    x = x @ g.tensor("w", (x.shape[3], x.shape[3])) + factor
    low, high = g.split(x, 2, axis=3)
    return x * (g.tensor("cos", x.shape[2:]) * factor) + g.concatenate(-high, low, axis=3) * g.tensor(
        "sin", x.shape[2:]
    )


def numbered(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    return g.cast(g.gen_index(x, axis=3) - 16, "bfloat16") * 0.125


def test_what_others_take_or_nothing_is_read_for_stays_in_front() -> None:
    graphs = [built("shared", q=shifted, rows=20), built("numbers", q=numbered, rows=20)]
    assert [families(g) for g in graphs] == [["pointwise", "contraction", "attention"], ["pointwise", "attention"]]
    first, second = ([d.reason for d in plan(g).partition.decisions] for g in graphs)
    assert any("computes its queries on their way" in r for r in first)
    assert any("is computed of numbers alone" in r for r in second)
    check_all(graphs, arch="sm_90a")


def test_values_lie_along_the_keys_whatever_queries_are_computed_of() -> None:
    def small(g: fg.Graph, x: fg.Tensor) -> fg.Tensor:
        return g.cast(x * 0.25, "float8_e4m3")

    how: dict[str, Any] = {"dtype": "float8_e4m3", "rows": 4096, "heads": 16, "depth": 128}
    for q, of in ((None, None), (small, "bfloat16"), (doubled, None)):
        graph = built("narrow", q=q, of=of, **how)
        assert families(graph) == ["pointwise", "attention"]  # the values are copied
        (*_, kernel) = plan(graph, choose=by_cost_model(HOPPER)).kernels
        assert isinstance(kernel.choice.schedule, AttentionWgmmaSchedule)


def test_several_tiles_of_queries_read_keys_from_memory() -> None:
    assert families(built("keys", q=None, k=turned, rows=300)) == ["pointwise", "attention"]
    assert families(built("values", q=None, v=doubled, heads=4, shared=2)) == ["pointwise", "attention"]
    assert families(built("few", q=None, k=turned, v=doubled, rows=100)) == ["attention"]


@pytest.mark.slow
@pytest.mark.parametrize("how", CASES, ids=lambda how: how["name"])
def test_renders_for_hopper_as_the_cost_model_chooses(how: dict[str, Any]) -> None:
    assert "attention" in families(built(**how))
    assert plan(built(**how), choose=by_cost_model(HOPPER)).kernels


def test_golden_source() -> None:
    graph = built("turned queries", rows=2048, depth=64, heads=16, shared=4, **CAUSAL)
    (kernel,) = plan(graph, choose=by_cost_model(HOPPER)).kernels
    check_golden("attention_turned_hopper", kernel.source.code)


@pytest.mark.slow
def test_compiles_without_spills() -> None:
    how: dict[str, Any] = {"heads": 4, "shared": 2, "rows": 1000, **CAUSAL}
    graphs = [built("large", depth=d, q=q, **how) for d, q in ((64, turned), (128, swapped), (256, turned))]
    graphs.append(built("keys", depth=128, k=turned, **{**how, "rows": 1}))
    sources = [k.source for g in graphs for k in plan(g, choose=by_cost_model(HOPPER)).kernels]
    for compiled in nvrtc.compile_kernels(sources, HOPPER.arch.name, cache=default_cache()):
        assert compiled.spill_bytes == 0
        assert "C75" not in compiled.log  # products are not made one after the other


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    """One tile of queries a block, several, and rows that are no whole tile."""
    sizes = ((65, 140, 64, turned), (17, 140, 128, swapped), (259, 2, 128, turned), (130, 1, 256, turned))
    large = [built(f"large {n} {d}", heads=h, rows=n, depth=d, q=q, **CAUSAL) for n, h, d, q in sizes]
    check_on_gpu([*large, *(built(**how) for how in CASES)], inputs=lengths)
