"""Registers that warpgroups hand to each other: no more than a block has, or those that ask wait for ever."""

from __future__ import annotations

import pytest

from codegen.arch import arch
from codegen.attention import backward_wgmma_schedule as attention_backward_wgmma_schedule
from codegen.attention import wgmma_schedule as attention_wgmma_schedule
from codegen.contraction import wgmma_layout as contraction_wgmma_layout

GROUP = 128

#: (warpgroups of the producer, consumers, blocks of a multiprocessor, registers of a thread of either)
SHARES = [
    *((1, n, 1, held) for n, held in attention_backward_wgmma_schedule.REGISTERS.items()),
    (1, 2, 1, attention_backward_wgmma_schedule.FEWER),
    *((1, n, 1, held) for n, held in attention_wgmma_schedule.REGISTERS.items()),
    *((1, n, 1, held) for n, held in attention_wgmma_schedule.LISTING_REGISTERS.items()),
    *((1, n, 1, held) for n, held in attention_wgmma_schedule.SPANNED_REGISTERS.items()),
    *((1, n, 1, held) for n, held in contraction_wgmma_layout.REGISTERS.items()),
    *((2, n, 1, held) for n, held in contraction_wgmma_layout.GATHER_REGISTERS.items()),
    *((f, n, 1, held) for f, of in contraction_wgmma_layout.FILL_REGISTERS.items() for n, held in of.items()),
    (2, 2, 1, contraction_wgmma_layout.PARTS_REGISTERS),
]


@pytest.mark.parametrize(("producers", "consumers", "blocks", "held"), SHARES)
def test_no_more_registers_than_a_block_has(producers: int, consumers: int, blocks: int, held: tuple[int, int]) -> None:
    there = arch("sm_90a").registers_at_launch((producers + consumers) * GROUP, blocks)
    assert GROUP * (producers * held[0] + consumers * held[1]) <= there
