"""The attention family: softmax(scores of queries and keys) times values, in the fastest form an architecture has.

thin   both products by warps, keys and values straight to registers, for at most 16 queries
       (`codegen.attention.thin`).
wgmma  both products by warpgroups, tiles brought by TMA (Hopper, `codegen.attention.wgmma`).
mma    both products by warps, tiles brought by asynchronous copies, any strides (`codegen.attention.mma`).
simt   multiply-adds of single threads, any dtype, any strides, everywhere (`codegen.attention.simt`).
"""

from __future__ import annotations

from codegen.attention import mma, simt, thin, wgmma, wgmma_schedule
from codegen.attention.mma import AttentionMmaSchedule
from codegen.attention.simt import AttentionSimtSchedule
from codegen.attention.spec import AttentionSpec
from codegen.attention.thin import AttentionThinSchedule
from codegen.attention.wgmma_schedule import AttentionWgmmaSchedule
from codegen.family import Family, Form


def _coarse_wgmma(spec: AttentionSpec, schedule: AttentionWgmmaSchedule) -> int | None:
    return max(schedule.keys, spec.depth) if wgmma_schedule.narrow(spec) else None


FAMILY = Family(
    "attention",
    AttentionSpec,
    (
        Form("thin", AttentionThinSchedule, thin.schedules, thin.render, cost=thin.cost, early=lambda *_: True),
        Form(
            "wgmma",
            AttentionWgmmaSchedule,
            wgmma_schedule.schedules,
            wgmma.render,
            coarse_products=_coarse_wgmma,
            compare=wgmma_schedule.compare,
            early=lambda *_: True,
        ),
        Form("mma", AttentionMmaSchedule, mma.schedules, mma.render),
        Form("simt", AttentionSimtSchedule, simt.schedules, simt.render, cost=simt.cost),
    ),
)
