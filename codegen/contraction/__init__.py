"""The contraction family: matrix products and convolutions, in the form that is fastest on an architecture.

thin   a large operand beside one of few rows or columns, read once, straight to registers (`codegen.contraction.thin`).
wgmma  tiles multiplied by warpgroups, brought by TMA (Hopper, `codegen.contraction.wgmma`).
mma    tiles multiplied by warps, brought by asynchronous copies, any strides (`codegen.contraction.mma`).
halo   convolutions in groups of few channels: windows are read from a part of the image (`codegen.contraction.halo`).
stem   convolutions of few channels: words of a part of the image are the terms (`codegen.contraction.stem`).
stream a large operand and few rows of the other one, by multiply-adds of single threads that read the large one once,
       straight to registers (`codegen.contraction.stream`).
simt   multiply-adds of single threads, any dtype, any strides, everywhere (`codegen.contraction.simt`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from math import prod
from typing import TypeVar

from codegen.bf16x6 import BF16X6
from codegen.contraction import (
    halo,
    halo_schedule,
    mma,
    mma_schedule,
    simt,
    simt_schedule,
    stem,
    stem_schedule,
    stream,
    stream_schedule,
    thin,
    thin_schedule,
    wgmma,
    wgmma_schedule,
)
from codegen.contraction.halo_schedule import HaloSchedule
from codegen.contraction.mma_schedule import MmaSchedule
from codegen.contraction.simt_schedule import SimtSchedule
from codegen.contraction.stem_schedule import StemSchedule
from codegen.contraction.stream_schedule import StreamSchedule
from codegen.contraction.thin_schedule import ThinSchedule
from codegen.contraction.wgmma_layout import WgmmaSchedule
from codegen.declined import Declined
from codegen.family import EstimatedFamily, Form
from codegen.operands import ROW_BYTES
from codegen.sizes import most
from codegen.spec import ContractionSpec
from codegen.target import Target
from codegen.tile_path import product_types

T = TypeVar("T")


def _coarse_wgmma(spec: ContractionSpec, schedule: WgmmaSchedule) -> int | None:
    if not wgmma_schedule.multiplied(spec, schedule)[0].startswith("float8"):
        return None
    return ROW_BYTES if wgmma_schedule.adds_up_stages(spec, schedule) else 0


def _coarse_mma(spec: ContractionSpec, schedule: MmaSchedule) -> int | None:
    return 0 if product_types(spec, schedule.widen)[0].startswith("float8") else None


#: Rows or columns of a product that waits for memory.
FEW = 64
#: Columns or rows of a product of float32 which fill no tile of tensor cores.
NARROW = 16


def _may_be_slower(spec: ContractionSpec) -> bool:
    """Tells whether tiles of single threads can be faster than all else.

    Tensor cores multiply float32 in parts, or few columns; what they do not multiply may be streamed.
    """
    try:
        kind = product_types(spec, widen=False)[0]
    except Declined:
        return True
    return kind == BF16X6 or (kind == "tf32" and min(most(prod(spec.m)), most(prod(spec.n))) <= NARROW)


def _dense(function: Callable[..., T]) -> Callable[..., T]:
    """Returns a function of a form that takes no operand of which half is stored."""

    @wraps(function)
    def asked(spec: ContractionSpec, target: Target) -> T:
        if spec.metadata is not None:
            raise Declined("all terms are multiplied: wgmma alone takes an operand of which half is stored, if TMA can")
        return function(spec, target)

    return asked


def _in_memory(function: Callable[..., T]) -> Callable[..., T]:
    """Returns a function of a form whose kernels read several operands B as they lie in memory."""

    @wraps(function)
    def asked(spec: ContractionSpec, target: Target) -> T:
        if spec.others and spec.b.program is not None:
            raise Declined("thin products alone compute several operands B")
        return function(spec, target)

    return asked


def _plain(function: Callable[..., T]) -> Callable[..., T]:
    """Returns a function of a form that takes neither, and no totals of rows."""

    @wraps(function)
    def asked(spec: ContractionSpec, target: Target) -> T:
        if spec.totals:
            raise Declined("totals of rows are added up beside thin products and by warpgroups only")
        return function(spec, target)

    return _dense(_in_memory(asked))


def _waits(spec: ContractionSpec, _: object) -> bool:
    """Tells whether a product waits for memory: it has few rows or columns."""
    return min(most(prod(spec.m)), most(prod(spec.n))) <= FEW


FAMILY = EstimatedFamily(
    "contraction",
    ContractionSpec,
    (
        Form(
            "thin", ThinSchedule, _dense(thin_schedule.schedules), thin.render, _dense(thin_schedule.cycles),
            cost=thin_schedule.cost, early=_waits, behind=thin_schedule.behind,
        ),
        Form(
            "wgmma", WgmmaSchedule, _in_memory(wgmma_schedule.schedules), wgmma.render,
            _in_memory(wgmma_schedule.cycles), _coarse_wgmma,
            cost=wgmma_schedule.cost, best=_in_memory(wgmma_schedule.best), early=lambda *_: True,
        ),
        Form(
            "mma", MmaSchedule, _plain(mma_schedule.schedules), mma.render, _plain(mma_schedule.cycles), _coarse_mma,
            cost=mma_schedule.cost, best=_plain(mma_schedule.best), early=_waits,
        ),
        Form(
            "halo", HaloSchedule, _plain(halo_schedule.schedules), halo.render, _plain(halo_schedule.cycles),
            cost=halo_schedule.cost,
        ),
        Form(
            "stem", StemSchedule, _plain(stem_schedule.schedules), stem.render, _plain(stem_schedule.cycles),
            cost=stem_schedule.cost,
        ),
        Form(
            "stream", StreamSchedule, _plain(stream_schedule.schedules), stream.render, _plain(stream_schedule.cycles),
            cost=stream_schedule.cost, early=_waits,
        ),
        Form(
            "simt", SimtSchedule, _plain(simt_schedule.schedules), simt.render, _plain(simt_schedule.cycles),
            cost=simt_schedule.cost, early=_waits,
        ),
    ),
    last_competes=_may_be_slower,
)  # fmt: skip


def keeps_form(spec: ContractionSpec, target: Target) -> bool:
    """Tells whether a spec that reduces parts of its results has the same form as it would have without them.

    Any form is good enough where single threads would multiply: estimates of small products differ little.
    """
    plain = replace(spec, partials=())
    forms = [(FAMILY.form(spec, x), FAMILY.form(plain, x)) for x in {target, target.planned}]
    return all(a is b or b.name in ("stream", "simt") for a, b in forms)
