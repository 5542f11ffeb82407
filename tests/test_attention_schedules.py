"""Schedules of attention's kernels: what the cost model chooses, and what every one promises."""

from __future__ import annotations

import pytest
from test_attention import CAUSAL, HOPPER, QUICK, VARIANTS, made

import codegen
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
