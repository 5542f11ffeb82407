"""Schedules of the simt form of a contraction, and what is emitted for them."""

from __future__ import annotations

import pytest
from kernel_cases import Case, check_cases, executable
from test_contraction import convolution, epilogues, matmul, plain, tiles, transposed

import fusegraph as fg
from codegen.contraction.simt_schedule import TILES, SimtSchedule, schedules
from codegen.spec import ContractionSpec

# ---- schedules


def _problems(itype: str) -> list[Case]:
    everything = epilogues()["everything"]
    cases = []
    for wide, dtype in ((False, "float32"), (False, "int8"), (True, "float64")):
        for schedule in tiles(itype, wide):
            cases.append(matmul((129, 19), (19, 131), dtype, schedule=schedule, epilogue=everything))
            cases.append(
                matmul(
                    (2, 40, 17),
                    (2, 17, 36),
                    dtype,
                    a_strides=transposed((2, 40, 17)),
                    b_strides=transposed((2, 17, 36)),
                    schedule=schedule,
                )
            )
            cases.append(
                convolution(
                    (1, 9, 12, 12),
                    (33, 9, 3, 3),
                    dtype,
                    padding=1,
                    case={"schedule": schedule},
                    epilogue=epilogues()["backwards"],
                )
            )
    return cases


def test_some_tiles_and_64_bit_indices():
    for itype in ("int32", "int64"):
        check_cases([c for k, c in enumerate(_problems(itype)) if k % 11 == (itype == "int64")], guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("itype", ["int32", "int64"])
def test_every_tile(itype):
    check_cases(_problems(itype), guard=True)


def test_a_schedule_must_divide_its_tiles():
    for wrong in ((128, 96, 8, 8, 8), (128, 128, 8, 2, 8), (256, 256, 8, 4, 4), (32, 32, 12, 4, 4)):
        with pytest.raises(ValueError, match="SimtSchedule"):
            SimtSchedule(*wrong, "int32")
    for tile in TILES:
        assert SimtSchedule(*tile, "int32").threads in (64, 128, 256)


def test_indices_are_64_bit_when_32_are_not_enough():
    def spec(case: Case) -> ContractionSpec:
        (kernel,) = (k for k in executable(case).plan.kernels if k.group.family == "contraction")
        return kernel.group.lowered.spec

    assert schedules(spec(matmul((1000, 1000), (1000, 1000))))[0].itype == "int32"
    assert schedules(spec(matmul((2**16, 8), (8, 2**16))))[0].itype == "int64"
    assert schedules(spec(matmul((8, 2**30), (2**30, 8), "int8")))[0].itype == "int64"
    assert schedules(spec(matmul((8, 8), (8, 8), a_strides=(2**31, 1))))[0].itype == "int64"
    far = matmul((8, 8), (8, 8), epilogue=lambda g, y: plain(g, y + g.tensor("c", (8, 8), strides=(2**31, 1))))
    assert schedules(spec(far))[0].itype == "int64"
    assert schedules(spec(convolution((2, 64, 2**13, 2**13), (64, 64, 3, 3), padding=1)))[0].itype == "int64"


def test_small_problems_take_small_tiles():
    def tile(m: int, n: int, k: int = 512) -> tuple[int, int]:
        case = matmul((m, k), (k, n))
        s = schedules(executable(case).plan.kernels[0].group.lowered.spec)[0]
        return s.tile_m, s.tile_n

    assert tile(4096, 4096) == (128, 128)
    assert tile(32, 32) == (32, 32)
    assert tile(8192, 32)[1] == 32
    assert tile(32, 8192)[0] == 32


# ---- what is emitted


def _code(case: Case) -> str:
    (kernel,) = executable(case).plan.kernels
    return kernel.source.code


def test_what_need_not_be_tested_is_not():
    """No bounds are checked where tiles fit exactly, and no address is computed of what does not matter."""
    exact = _code(matmul((128, 64), (64, 128)))
    assert "inside" not in exact
    assert "if (m >= " not in exact
    assert "if (n >= " not in exact
    ragged = _code(matmul((127, 63), (63, 126)))
    assert "m >= 127" in ragged
    assert "n >= 126" in ragged
    assert "k < 63" in ragged
    unpadded = _code(convolution((2, 16, 10, 10), (32, 16, 3, 3)))
    assert "uint32(" not in unpadded
    assert "uint32(" in _code(convolution((2, 16, 10, 10), (32, 16, 3, 3), padding=1))
    # A 1x1 convolution of channels that lie together is a plain matrix product.
    assert " % " not in _code(convolution((2, 32, 8, 8), (32, 32, 1, 1), layout="channels_last")).split("a_next")[1]


def test_accesses_of_the_epilogue_are_wide_where_they_can_be():
    def biased(graph: fg.Graph, y: fg.Tensor) -> None:
        graph.output(y + graph.tensor("bias", (y.shape[-1],), y.dtype), name="y")

    wide = _code(matmul((300, 32), (32, 320), "float32", epilogue=biased))
    assert "load<4>(bias + n)" in wide
    assert "store(y + m * 320 + n, " in wide
    odd = _code(matmul((300, 32), (32, 319), "float32", epilogue=biased))
    assert "load<4>(bias" not in odd
    assert "store(" not in odd
    rows = _code(convolution((1, 32, 20, 20), (300, 32, 1, 1)))  # NCHW: pixels are what lies together
    assert "store(y + " in rows
    assert "[ty * 4]" in rows
