"""The simt form of a contraction where an operand is fetched four neighbours at a time, and the schedules for plain
products.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from graphs import check_on_gpu
from kernel_cases import Case, check_cases, executable, rendered
from test_contraction import convolution, epilogues, matmul, plain, transposed

from codegen import contraction
from codegen.contraction.simt_schedule import PAIR_TILE, PLAIN_TILE, SimtSchedule, schedules
from codegen.spec import ContractionSpec
from codegen.target import target
from fusegraph.lowering.base import Options
from fusegraph.runtime import nvrtc

Shape = tuple[int, ...]

HOPPER = target("sm_90a")


def turned(a: Shape, b: Shape, dtype: str = "float32", **how: Any) -> Case:
    """Returns a product whose operand B is contiguous along the reduction, like the weights of linear layers."""
    return matmul(a, b, dtype, b_strides=transposed(b), **how)


def spec_of(case: Case) -> ContractionSpec:
    (kernel,) = (k for k in executable(case).plan.kernels if k.group.family == "contraction")
    spec: ContractionSpec = replace(kernel.group.lowered.spec, name=kernel.name)
    return spec


def with_tile(tile: tuple[int, ...]) -> Callable[[ContractionSpec], SimtSchedule]:
    return lambda spec: next(s for s in schedules(spec, HOPPER) if s.tile == tile)


def test_plain_products():
    """Ragged rows and columns, reductions that end within a tile or before the first, batches, every transposition."""
    first = with_tile(PLAIN_TILE)
    everything = epilogues()["everything"]
    cases = [
        turned((97, 20), (20, 131), schedule=first, epilogue=everything),
        turned((2, 40, 36), (2, 36, 129), schedule=first),
        matmul((193, 52), (52, 132), schedule=first),
        matmul((3, 50, 4), (4, 260), schedule=first, epilogue=everything),
        turned((5, 16), (16, 7), schedule=first),
    ]
    check_cases(cases, guard=True)


@pytest.mark.slow
def test_every_schedule_of_a_product_in_vectors():
    cases = []
    for number, name in enumerate(epilogues()):
        along_a, along_b = bool(number & 1), bool(number & 2)
        a, b = (68 + 4 * number, 44), (44, 136)
        strides = {"a_strides": None if along_a else transposed(a), "b_strides": transposed(b) if along_b else None}
        every = schedules(spec_of(matmul(a, b, epilogue=epilogues()[name], **strides)), HOPPER)
        for nth in range(number % 4, len(every), 4):
            chosen = with_tile(every[nth].tile)
            cases.append(matmul(a, b, epilogue=epilogues()[name], schedule=chosen, special=0.02, **strides))
    check_cases(cases, guard=True)


def test_images_whose_channels_lie_together():
    shapes = ((2, 32, 24, 22), (36, 32, 3, 3))
    last = {"layout": "channels_last", "filters": "channels_last"}
    forms = [{}, {"padding": 1}, {"padding": (2, 0), "stride": 2, "dilation": (1, 2)}]
    cases = [convolution(*shapes, **how, **last) for how in forms]
    cases += [convolution((2, 64, 19, 19), (72, 32, 3, 3), groups=2, padding=1, **last)]
    made = check_cases([replace(c, schedule=lambda spec: schedules(spec, HOPPER)[0]) for c in cases], guard=True)
    # Of the third the channels are dealt out one by one: each is a part of the sums.
    assert [any("load<4>(x + " in k.source.code for k in m.plan.kernels) for m in made] == [True, True, False, True]


def test_what_is_fetched_four_at_a_time():
    def fetched(case: Case) -> list[bool]:
        case = replace(case, schedule=with_tile((32, 32, 16, 4, 4)))
        (kernel,) = executable(case).plan.kernels
        return [re.search(rf"{side}_next\[i\] = (.* \? )?load<4>", kernel.source.code) is not None for side in "ab"]

    assert fetched(matmul((64, 32), (32, 64))) == [True, True]
    assert fetched(turned((64, 32), (32, 64))) == [True, True]
    assert fetched(matmul((64, 30), (30, 64))) == [False, True], "fours of a row would end in the next one"
    assert fetched(matmul((64, 32), (32, 62))) == [True, False]
    assert fetched(matmul((64, 32), (32, 64), a_strides=(33, 1))) == [False, True], "not on a boundary of 16 bytes"
    assert fetched(matmul((64, 32), (32, 64), a_strides=(64, 2))) == [False, True], "not neighbours"
    assert fetched(matmul((64, 32), (32, 64), "float64")) == [False, False]
    assert fetched(matmul((64, 32), (32, 64), "float16")) == [False, False], "they are converted one by one"
    assert fetched(replace(matmul((64, 32), (32, 64)), options=Options(alignment=4))) == [False, False]
    assert fetched(convolution((4, 32, 64, 64), (40, 32, 3, 3), padding=1))[0] is False, "padding between neighbours"


def test_plain_products_are_those_of_matrices():
    def is_plain(case: Case) -> bool:
        return PLAIN_TILE in [s.tile for s in schedules(spec_of(case), HOPPER)]

    assert is_plain(turned((12608, 768), (768, 768)))
    assert is_plain(matmul((4096, 512), (512, 4096)))
    assert not is_plain(matmul((512, 512), (512, 512), a_strides=transposed((512, 512)))), "96 rows, 128 threads"
    assert not is_plain(matmul((512, 512), (512, 512), "float64"))
    assert not is_plain(matmul((8, 8), (8, 8), a_strides=(2**31, 1))), "addresses take twice the registers"
    last = {"layout": "channels_last", "filters": "channels_last"}
    assert not is_plain(convolution((1, 32, 8, 8), (32, 32, 3, 3), padding=1, **last))
    (best, *_) = schedules(spec_of(turned((12608, 768), (768, 768))), HOPPER)
    assert (best.tile, best.blocks, best.apart) == (PLAIN_TILE, 3, True)
    # Of these one block is left over on each multiprocessor, where it is alone; of larger ones there are two then.
    (best, *_) = schedules(spec_of(turned((8192, 768), (768, 768))), HOPPER)
    assert (best.tile, best.blocks) == (PAIR_TILE, 2)
    assert with_tile(PAIR_TILE)(spec_of(matmul((512, 512), (512, 512), a_strides=transposed((512, 512))))).blocks == 2
    assert with_tile(PAIR_TILE)(spec_of(matmul((512, 510), (510, 512)))).blocks == 1, "elements one by one"


@pytest.mark.slow
def test_registers_are_rationed_without_spills():
    """Those of the small tile on Hopper: elsewhere there is no such schedule."""
    small, large = [], []
    for number, name in enumerate(("plain", "everything", "several", "reused")):
        along = number % 2 == 0
        strides = transposed((4096, 4096)) if along else None
        case = matmul((4100, 4096), (4096, 4096), b_strides=strides, epilogue=epilogues().get(name, plain))
        spec = replace(spec_of(case), name=f"product_{name}")
        assert PLAIN_TILE not in [s.tile for s in schedules(spec, target("sm_80"))]
        small.append(rendered(spec, with_tile(PLAIN_TILE)(spec)))
        large.append(rendered(spec, with_tile(PAIR_TILE)(spec)))
    for sources, arch in ((small, "sm_90a"), (large[1:3], "sm_90a"), (large[1:2], "sm_80")):
        made = nvrtc.compile_kernels(sources, arch)
        assert [(k.name, arch, k.spill_bytes) for k in made if k.spill_bytes] == []
        assert max(k.registers for k in made) <= (168 if sources is small else 128)


@pytest.mark.gpu
def test_plain_products_on_the_gpu(monkeypatch: pytest.MonkeyPatch):
    chosen = with_tile(PLAIN_TILE)
    monkeypatch.setattr(contraction.FAMILY, "schedules", lambda spec, arch: iter([chosen(spec)]))
    shapes = [((4004, 768), (768, 772)), ((2, 1000, 256), (2, 256, 1028)), ((9600, 64), (64, 128)), ((7, 20), (20, 4))]
    check_on_gpu([make(*s, epilogue=epilogues()["everything"]).graph for s in shapes for make in (matmul, turned)])
