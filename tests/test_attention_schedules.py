"""Schedules of attention's kernels: what the cost model chooses, and what every one promises."""

from __future__ import annotations

import re

import pytest
from test_attention import CAUSAL, HOPPER, QUICK, VARIANTS, made

import codegen
import fusegraph as fg
from codegen.attention import backward_mma, backward_simt, mma, simt
from codegen.attention import wgmma_schedule as attention_wgmma_schedule
from codegen.attention.wgmma_schedule import AttentionWgmmaSchedule
from codegen.target import target
from fusegraph.plan import by_cost_model, plan


@pytest.mark.parametrize(
    ("rows", "depth", "heads", "shared"), [(2048, 64, 256, 256), (4096, 128, 16, 4), (8192, 128, 64, 16)]
)
def test_tiles_are_dealt_evenly(rows: int, depth: int, heads: int, shared: int) -> None:
    """No block has much more to do than the others, as far as masks say; a tile of keys is up to 2 % of it."""
    (kernel,) = plan(made(rows=rows, depth=depth, heads=heads, shared=shared, **CAUSAL)).kernels
    spec = kernel.group.lowered.spec
    s = attention_wgmma_schedule.schedules(spec, HOPPER)[0]
    costs = [attention_wgmma_schedule.tiles_met(spec, m, s.rows, s.keys) for m in range(0, rows, s.rows)][::-1]
    longest = attention_wgmma_schedule.longest(costs, heads, s.heads, s.blocks, alternate=s.alternate)
    assert longest <= 1.025 * sum(costs) * heads / s.blocks


def test_schedules_hold_what_they_promise() -> None:
    """Every schedule fits the chip, and data about it stays the same."""
    for how in (*QUICK, *VARIANTS):
        (kernel,) = plan(made(**how)).kernels
        spec = kernel.group.lowered.spec
        for name in ("sm_80", "sm_90a"):
            there = target(name)
            for s in codegen.schedules(spec, there):
                assert codegen.schedule_from_data(codegen.schedule_data(s)) == s
                source = codegen.render(spec, s)
                assert source.dynamic_shared_bytes <= there.arch.shared_bytes_per_block


@pytest.mark.parametrize(
    ("rows", "keys", "causal"), [(512, 128, True), (2048, 128, True), (8192, 160, True), (8192, 176, False)]
)
def test_tiles_of_keys_below_a_diagonal(rows: int, keys: int, causal: bool) -> None:
    """Wide ones reach farther beyond it, which matters the less the longer sequences are."""
    graph = made(name="long", rows=rows, keys=rows, depth=128, heads=32, **(CAUSAL if causal else {}))
    (kernel,) = plan(graph, choose=by_cost_model(HOPPER)).kernels
    assert isinstance(kernel.choice.schedule, AttentionWgmmaSchedule)
    assert kernel.choice.schedule.keys == keys


@pytest.mark.parametrize("pages", [False, True])
def test_places_far_apart(pages: bool) -> None:
    """Where places need 64 bits, none is a product of 32 bits, however few a position's and a stride's own are."""
    g, far = fg.Graph("far", io_dtype="bfloat16"), (1 << 40, 1 << 30, 1, 1 << 27)
    q, k, v, loss = (g.tensor(name, (1, heads, 20, 32), strides=far) for name, heads in zip("qkvl", (4, 1, 1, 4)))
    if pages:
        k, v = (g.tensor(name, (3, 1, 10, 32), strides=(1 << 29, *far[1:])) for name in ("K", "V"))
        tables = {f"page_table_{x}": g.tensor(f"table_{x}", (1, 2), "int32") for x in "kv"}
        g.output(g.sdpa(q, k, v, **tables), name="o")
    else:
        o, stats = g.sdpa(q, k, v, generate_stats=True)
        for name, result in zip(("o", "dQ", "dK", "dV"), (o, *g.sdpa_backward(q, k, v, o, loss, stats))):
            g.output(result, name=name)
    forms = {"attention": (mma, simt), "attention_backward": (backward_mma, backward_simt)}
    found = 0
    for kernel in plan(g).kernels:
        for form in forms.get(kernel.group.family, ()):
            spec = kernel.group.lowered.spec
            code = form.render(spec, form.schedules(spec, target("sm_80"))[0]).code
            ints = {x for text in re.findall(r"\bint (\w+ = [^;]*);", code) for x in re.findall(r"(\w+) =", text)}
            factors = re.findall(r"(\S+) \* \d{9,}", code)
            assert factors, form.__name__
            assert not ints & {x.strip("[(") for x in factors}, form.__name__
            found += 1
    assert found == (2 if pages else 6)
