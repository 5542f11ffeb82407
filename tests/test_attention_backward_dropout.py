"""The gradients of attention with dropout, and with whatever else is linear in the probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from graphs import check_all, check_on_gpu
from test_attention_backward import BOTTOM, CAUSAL, bias, made

import fusegraph as fg
from codegen.target import target
from fusegraph.lowering.base import Options
from fusegraph.plan import by_cost_model, plan
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache

FORMS = ("sm_80", "sm_90a")


def seeded(g: fg.Graph) -> dict[str, Any]:
    return {"seed": g.tensor("seed", (1,), "int64"), "offset": g.tensor("offset", (1, 1, 1, 1), "int32")}


def dropped(*, extra: Callable[[fg.Graph], Any] | None = None, **how: Any) -> fg.Graph:
    def given(g: fg.Graph) -> dict[str, Any]:
        return {**(extra(g) if extra else {}), **seeded(g)}

    g = made(extra=given, **{"dropout_probability": 0.3, **how})
    if extra is None:
        del g.outputs[3:]  # of a bias that adds nothing
    return g


VARIANTS: tuple[dict[str, Any], ...] = (
    {"name": "grouped", "rows": 20, "heads": 4, "shared": 2, **CAUSAL},
    {"name": "whole", "rows": 130, "keys": 132, "heads": 3, "depth": 64, **BOTTOM},
    {"name": "odd", "keys": 67, "forward": False},
    {"name": "capped", "rows": 70, "keys": 200, "soft_cap": 3.0, "dropout_probability": 0.5, "forward": False},
    {"name": "single", "dtype": "float32", "heads": 4, "shared": 2, "rows": 20, "keys": 41, **CAUSAL},
    {"name": "biased", "rows": 33, "keys": 36, "extra": bias(1, 1, 33, 36)},
    {"name": "everything", "rows": 9, "keys": 12, "forward": False, "dropout_probability": 1},
)


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_dropout(arch: str) -> None:
    graphs = [dropped(**how) for how in VARIANTS if arch == "sm_80" or how.get("dtype") != "float32"]
    for g in graphs:
        assert [x.family for x in plan(g).partition.groups].count("attention_backward") == 2, g.name
    check_all(graphs, arch=arch)


@pytest.mark.parametrize("arch", FORMS)
def test_lanes_share_random_words(arch: str) -> None:
    """Where rows of scores begin at multiples of four; the numbers above are of scores that are many."""
    for keys, batch, shared in ((1024, 1, True), (1022, 1, False), (32768, 4, True)):
        g = dropped(rows=keys, keys=keys, batch=batch, forward=False)
        every = plan(g, choose=by_cost_model(target(arch))).kernels
        sources = [k.source.code for k in every if k.group.family == "attention_backward"]
        functions = ("random_words(", "random_words_of_columns(")[-len(sources) :]  # Hopper has one kernel
        for function, source in zip(functions, sources, strict=True):
            assert (f"attention::{function}" in source) == shared
            assert ("philox::at_least(" in source) != shared


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_numbers_above_those_of_a_head(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of tensors of 2^31 scores and more, of which this makes small ones."""
    for module in ("fusegraph.lowering.program", "fusegraph.ops.random"):
        monkeypatch.setattr(f"{module}.inner_dims", lambda shape: min(2, len(shape)))
    how: dict[str, Any] = {"batch": 2, "heads": 4, "shared": 2, "rows": 20, "keys": 24}
    graphs = [dropped(name="half", **how), dropped(name="single", dtype="float32", **how)]
    (source,) = {
        k.source.code
        for k in plan(graphs[0], choose=by_cost_model(target(arch))).kernels
        if "_columns(" in k.source.code
    }
    assert "random_words_of_columns(uint32((c0 + j * 2) * 24" in source
    check_all(graphs if arch == "sm_80" else graphs[:1], arch=arch)


def test_no_score_is_in_memory() -> None:
    memory = [plan(dropped(rows=n, forward=False)).memory.size for n in (1024, 4096)]
    assert memory[1] <= 4 * memory[0] < 1 << 20


def written(g: fg.Graph, kind: str) -> None:
    """Builds the gradients of attention with a softmax and a linear op on it, as a user writes them."""
    q, k, v, loss = (g.tensor(name, (2, 3, n, 32)) for name, n in (("q", 33), ("k", 40), ("v", 40), ("dO", 33)))
    stats, delta = (g.tensor(name, (2, 3, 33, 1), "float32") for name in ("stats", "delta"))
    p = g.exp(g.matmul(q, k.transpose(0, 1, 3, 2), dtype="float32") * 0.25 - stats)
    by_p = g.matmul(loss, v.transpose(0, 1, 3, 2), dtype="float32")
    heads = g.tensor("of head", (3, 1, 1), "float32")
    keys = g.gen_index(p, axis=3)
    weigh: Callable[[fg.Tensor], fg.Tensor] = {
        "of heads": lambda x: heads * x / 2,
        "of keys": lambda x: x * g.tensor("of keys", (40,), "float32") if x is p else x * g.tensors["of keys"],
        "chosen": lambda x: g.binary_select(0.0, x, keys > g.gen_index(p, axis=2)),
        "another": lambda x: x * heads if x is p else heads * 0.5 * x,
        "of one": lambda x: x * heads if x is p else x,
    }[kind]
    weights, by_p = weigh(p), weigh(by_p)
    by_score = g.cast(p * (by_p - delta) * 0.25, "bfloat16")
    g.output(by_score @ k, name="dQ")
    g.output(by_score.transpose(0, 1, 3, 2) @ q, name="dK")
    g.output(g.cast(weights, "bfloat16").transpose(0, 1, 3, 2) @ loss, name="dV")


KINDS = {"of heads": True, "of keys": True, "chosen": True, "another": False, "of one": False}


def test_what_is_linear_in_probabilities_is_fused() -> None:
    for kind, fused in KINDS.items():
        g = fg.Graph(kind, io_dtype="bfloat16")
        written(g, kind)
        found = plan(g).partition
        assert [x.family for x in found.groups].count("attention_backward") == 2 * fused, kind
        assert fused or any("is not made of" in d.reason for d in found.decisions), kind


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_weights(arch: str) -> None:
    graphs = []
    for kind in KINDS:
        g = fg.Graph(kind, io_dtype="bfloat16")
        written(g, kind)
        graphs.append(g)
    check_all(graphs, arch=arch)


@pytest.mark.slow
def test_registers() -> None:
    sources = []
    for depth, shared in ((64, 16), (128, 4)):
        g = dropped(name=f"d{depth}s{shared}", rows=4096, heads=16, shared=shared, depth=depth, forward=False, **CAUSAL)
        for options in (Options(), Options(workspace=1 << 20)):  # by one kernel, and by two
            every = plan(g, options, choose=by_cost_model(target("sm_90a"))).kernels
            sources += [k.source for k in every if k.group.family == "attention_backward"]
    assert len(sources) == 6
    for compiled in nvrtc.compile_kernels(sources, "sm_90a", cache=default_cache()):
        assert compiled.spill_bytes == 0, compiled.name
        assert not compiled.warnings, compiled.warnings


@pytest.mark.gpu
def test_on_gpu() -> None:
    graphs = [dropped(**how) for how in VARIANTS]
    graphs += [dropped(name="long", rows=509, keys=1024, depth=128, heads=4, shared=2, **BOTTOM)]
    check_on_gpu(graphs)
