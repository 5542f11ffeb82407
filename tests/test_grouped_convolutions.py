"""Convolutions in groups on tensor cores: what is beyond the channels of a group is another group's, or zero."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from graphs import compile_for, quick
from kernel_cases import Case, check_cases
from test_contraction import convolution, plain, random_windows
from test_contraction_wgmma import channel_bias, hopper
from test_convolution_gradients import gradient

import fusegraph as fg
from codegen import target
from codegen.contraction import halo_schedule
from codegen.contraction.halo_schedule import HaloSchedule
from codegen.spec import ContractionSpec
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.lowering.base import Options
from fusegraph.plan import by_cost_model, plan
from fusegraph.report.check import random_inputs

NHWC = {"layout": "channels_last", "filters": "channels_last"}


def poisoned(case: Case, group: slice, seed: int = 0) -> Case:
    """Returns a case whose image has infinities and NaN in the channels of some groups alone."""
    name = case.graph.inputs[0].name
    given = dict(random_inputs(case.graph, seed))
    values = np.array(given[name], copy=True, order="K")
    values[:, group] = np.where(np.arange(values[:, group].size).reshape(values[:, group].shape) % 2, np.inf, np.nan)
    return Case(case.graph, case.family, schedule=case.schedule, inputs={**given, name: values}, arch=case.arch)


def mapped(case: Case) -> Case:
    """Returns the case on Hopper, TMA bringing both operands: groups are a dimension of the image's map."""

    def check(made: CpuExecutable) -> None:
        assert made.plan is not None
        assert "tma_load_im2col" in made.plan.kernels[0].source.code

    return replace(hopper(case, lambda s: not s.gather), check=check)


WIDTHS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 240, 9, 7), (240, 120, 3, 3), {"padding": 1}),
    ((3, 112, 8, 9), (56, 56, 3, 2), {"padding": ((1, 0), (2, 1)), "stride": (2, 1)}),
    ((2, 48, 11, 6), (96, 24, 3, 3), {"dilation": (2, 1), "padding": (3, 1)}),
    ((1, 32, 5, 6), (48, 8, 2, 2), {"padding": 1}),
    ((2, 96, 40), (48, 48, 15), {"padding": 7}),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_groups_of_any_width_come_by_tma(dtype):
    tf32 = {"compute_dtype": "tf32"} if dtype == "float32" else {}
    cases = [
        mapped(convolution(x, w, dtype, **NHWC, **tf32, epilogue=channel_bias, **how))
        for x, w, how in (WIDTHS if dtype == "float32" else WIDTHS[:3])
    ]
    check_cases(cases, guard=True)


def test_what_is_not_finite_stays_in_its_group():
    x, w, how = WIDTHS[1]
    made = mapped(convolution(x, w, "bfloat16", **NHWC, **how))
    check_cases([poisoned(made, slice(56, None)), poisoned(made, slice(0, 56))])


def test_gradients_of_the_image_in_groups():
    how = {"dtype": "bfloat16", "layout": "channels_last", "other": "channels_last"}
    check_cases(
        [
            mapped(gradient("dgrad", (2, 48, 9, 8), (80, 24, 3, 3), padding=1, groups=2, **how)),
            mapped(gradient("dgrad", (1, 48, 9, 8), (48, 24, 3, 3), padding=1, stride=2, groups=2, **how)),
        ],
        guard=True,
    )


def test_volumes_in_groups_take_too_many_dimensions():
    graph = fg.Graph("volumes")
    x = graph.tensor("x", (1, 48, 4, 5, 6), "bfloat16", layout="channels_last")
    w = graph.tensor("w", (48, 24, 3, 3, 3), "bfloat16", layout="channels_last")
    graph.output(graph.conv_fprop(x, w, padding=1, groups=2), name="y")
    check_cases([Case(graph, "contraction", arch="sm_90a")])


# ---- windows read from a part of the image


def halo(case: Case, random: Random, arch: str = "sm_80", **fields: Any) -> Case:
    """Returns the case with one of the best schedules that read windows from a part of the image, with such fields."""

    def schedule(spec: ContractionSpec) -> HaloSchedule:
        every = halo_schedule.schedules(spec, target(arch))
        return random.choice([s for s in every if all(getattr(s, key) == value for key, value in fields.items())])

    return replace(case, arch=arch, schedule=schedule)


HALOS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 16, 9, 7), (16, 4, 3, 3), {"padding": 1}),
    ((3, 24, 8, 9), (48, 8, 3, 2), {"padding": ((1, 0), (2, 1)), "stride": (2, 1)}),
    ((2, 60, 11, 6), (30, 12, 3, 3), {"dilation": (2, 1), "padding": (3, 1)}),
    ((1, 32, 21, 23), (36, 16, 1, 1), {"stride": (1, 3)}),
    ((2, 72, 40), (24, 24, 5), {"padding": 2}),
    ((1, 80, 7, 7), (80, 40, 4, 5), {"padding": (1, 2), "mode": "convolution"}),
    ((5, 112, 6, 6), (112, 56, 2, 2), {"padding": 1}),
    ((2, 64, 3, 4, 5), (32, 32, 2, 3, 3), {"padding": (0, 1, 1), "stride": (1, 2, 1)}),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8"])
def test_halos(dtype):
    random = Random(dtype)
    tf32 = {"compute_dtype": "tf32"} if dtype == "float32" else {}
    cases = []
    for x, w, how in HALOS:
        if dtype == "int8" and w[1] % 8:
            continue
        for layouts in (NHWC, {}):
            epilogue = plain if dtype == "int8" else channel_bias
            cases.append(halo(convolution(x, w, dtype, **layouts, **tf32, epilogue=epilogue, **how), random))
    check_cases(cases, guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("stages", quick(2, 1))
def test_halos_of_warpgroups(stages):
    random, how = Random(stages), {"wgmma": True, "stages": stages}
    cases = [
        halo(convolution(x, w, "bfloat16", **NHWC, epilogue=channel_bias, **more), random, "sm_90a", **how)
        for x, w, more in (
            ((2, 80, 7, 7), (80, 16, 3, 3), {"padding": 1}),
            ((2, 72, 9, 8), (72, 24, 3, 3), {"dilation": (1, 2), "padding": 2}),
            ((3, 96, 6, 9), (192, 12, 3, 2), {"padding": ((1, 0), (2, 1)), "stride": (2, 1)}),
            ((2, 112, 6, 6), (112, 56, 3, 3), {"padding": 1}),
            ((2, 32, 9, 7), (48, 32, 3, 3), {"padding": 1}),  # one group
        )
    ]
    check_cases([*cases, poisoned(cases[0], slice(16, 48))], guard=True)


def test_halos_keep_apart_what_is_not_finite():
    random = Random(1)
    x, w, how = HALOS[0]
    made = [halo(convolution(x, w, "bfloat16", **layouts, **how), random) for layouts in (NHWC, {})]
    check_cases([poisoned(case, group) for case in made for group in (slice(4, 8), slice(0, 12))])


def test_halos_of_gradients():
    random, how = Random(2), {"dtype": "bfloat16", "layout": "channels_last", "other": "channels_last"}
    check_cases(
        [
            halo(gradient("dgrad", (2, 48, 9, 8), (80, 24, 3, 3), padding=1, groups=2, **how), random),
            halo(gradient("dgrad", (2, 32, 9, 8), (16, 8, 3, 2), padding=(2, 1), groups=4, **how), random),
        ],
        guard=True,
    )


PHASES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 16, 9, 8), (16, 4, 3, 3), {"stride": 2, "padding": 1}),
    ((2, 48, 10, 7), (80, 24, 3, 3), {"stride": 2, "padding": 1}),
    ((1, 32, 11, 9), (32, 8, 5, 2), {"stride": (3, 2), "padding": (2, 0), "mode": "convolution"}),
    ((3, 32, 6, 9), (48, 16, 1, 1), {"stride": 2}),  # most phases have no tap
    ((2, 40, 8, 8), (40, 20, 2, 7), {"stride": (1, 4), "padding": ((1, 0), (3, 2))}),
    ((1, 16, 30), (24, 8, 7), {"stride": 3, "padding": 2}),
    ((2, 24, 9, 10), (16, 24, 3, 3), {"stride": 2, "padding": 1}),  # one group
    ((1, 16, 5, 6, 4), (16, 8, 3, 3, 3), {"stride": (2, 1, 2), "padding": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_halos_of_phases(dtype):
    """Every phase of a strided convolution's gradient has taps of its own, and sees no others."""
    random, how = Random(dtype), {"dtype": dtype}
    how |= {"compute_dtype": "tf32"} if dtype == "float32" else {}
    cases = [
        halo(gradient("dgrad", x, w, layout=layout, other=layout, groups=x[1] // w[1], **how, **more), random)
        for x, w, more in PHASES
        for layout in ("channels_last", "contiguous")
    ]
    check_cases([replace(case, special=0.01 * (n % 3)) for n, case in enumerate(cases)], guard=True)


def random_case(random: Random) -> Case:
    rank = random.choice((1, 2, 2, 2, 3))
    groups, dtype = random.randint(2, 9), random.choice(("bfloat16", "float16", "float32"))
    each, filters = random.choice((4, 4, 8, 12, 16, 24, 32)), 2 * random.randint(1, 12)
    spatial, taps = ([random.choice(sizes) for _ in range(rank)] for sizes in ((1, 2, 5, 7, 13, 16), (1, 2, 3, 3)))
    case = convolution(
        (random.randint(1, 9), groups * each, *spatial),
        (groups * filters, each, *taps),
        dtype,
        epilogue=random.choice((plain, channel_bias)),
        compute_dtype="tf32" if dtype == "float32" else None,
        **random_windows(random, spatial, taps),
    )
    return replace(halo(case, random, random.choice(("sm_80", "sm_90a"))), special=random.choice((0.0, 0.01)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_halos(seed):
    random = Random(seed)
    check_cases([random_case(random) for _ in range(15)], guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_halos_compile_without_spills(arch):
    graphs = []
    for channels, groups, side in ((128, 32, 56), (256, 32, 28), (512, 32, 14), (896, 16, 14), (168, 7, 28)):
        graph = fg.Graph(f"w{channels // groups}", io_dtype="bfloat16")
        x = graph.tensor("x", (64, channels, side, side), layout="channels_last")
        w = graph.tensor("w", (channels, channels // groups, 3, 3), layout="channels_last")
        graph.output(graph.relu(graph.conv_fprop(x, w, padding=1)), name="y", layout="channels_last")
        graphs.append(graph)
    for channels, groups, side in ((128, 32, 56), (256, 32, 56), (64, 4, 112), (72, 3, 112), (512, 32, 28)):
        graph = fg.Graph(f"phases of w{channels // groups}", io_dtype="bfloat16")
        loss = graph.tensor("loss", (64, channels, side // 2, side // 2), layout="channels_last")
        w = graph.tensor("w", (channels, channels // groups, 3, 3), layout="channels_last")
        dx = graph.conv_dgrad(loss, w, (side, side), stride=2, padding=1, groups=groups)
        graph.output(dx, name="dx", layout="channels_last")
        graphs.append(graph)
    made = [plan(g, Options(target=target(arch)), choose=by_cost_model(target(arch))) for g in graphs]
    assert sum(type(p.kernels[0].choice.schedule) is HaloSchedule for p in made) >= 7
    for compiled in compile_for(arch, graphs, choose=by_cost_model(target(arch)), target=target(arch)):
        assert compiled.spill_bytes == 0, compiled.name
        assert "C75" not in compiled.log, compiled.name  # products that wait for each other
