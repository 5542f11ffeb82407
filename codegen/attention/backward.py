"""The family of attention's gradients, in the fastest form an architecture has.

fused  all gradients by one kernel, by warpgroups (Hopper, `codegen.attention.backward_fused`); asked for by the spec.
wgmma  all products by warpgroups, tiles brought by TMA (Hopper, `codegen.attention.backward_wgmma`).
mma    all products by warps, tiles brought by asynchronous copies, any strides (`codegen.attention.backward_mma`).
simt   multiply-adds of single threads, any dtype, any strides, everywhere (`codegen.attention.backward_simt`).
"""

from __future__ import annotations

from codegen.attention import backward_fused, backward_mma, backward_simt, backward_wgmma, backward_wgmma_schedule
from codegen.attention.backward_fused import AttentionBackwardFusedSchedule
from codegen.attention.backward_mma import AttentionBackwardMmaSchedule
from codegen.attention.backward_simt import AttentionBackwardSimtSchedule
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.backward_wgmma_schedule import AttentionBackwardWgmmaSchedule
from codegen.family import Family, Form

FAMILY = Family(
    "attention_backward",
    AttentionBackwardSpec,
    (
        Form("fused", AttentionBackwardFusedSchedule, backward_fused.schedules, backward_fused.render),
        Form("wgmma", AttentionBackwardWgmmaSchedule, backward_wgmma_schedule.schedules, backward_wgmma.render),
        Form("mma", AttentionBackwardMmaSchedule, backward_mma.schedules, backward_mma.render),
        Form("simt", AttentionBackwardSimtSchedule, backward_simt.schedules, backward_simt.render),
    ),
)
