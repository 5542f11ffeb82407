"""Convolutions of few channels on tensor cores: the reduction is made of words of rows of the image."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from random import Random
from typing import Any

import pytest
from graphs import compile_for, quick, slow
from kernel_cases import Case, check_cases
from test_contraction import convolution, plain, random_windows
from test_contraction_wgmma import channel_bias, hopper

import fusegraph as fg
from codegen import target
from codegen.contraction import stem_schedule
from codegen.contraction.stem_schedule import StemSchedule, StemTile
from codegen.spec import ContractionSpec
from fusegraph.lowering.base import Options
from fusegraph.plan import by_cost_model, plan

NHWC = {"layout": "channels_last", "filters": "channels_last"}


def stem(case: Case, random: Random, arch: str = "sm_80", **fields: Any) -> Case:
    """Returns the case with one of the best schedules that read words of the image, with such fields."""

    def schedule(spec: ContractionSpec) -> StemSchedule:
        every = stem_schedule.schedules(spec, target(arch))
        return random.choice([s for s in every if all(getattr(s, key) == value for key, value in fields.items())])

    return replace(case, arch=arch, schedule=schedule)


def channels_last(graph: fg.Graph, y: fg.Tensor) -> None:
    """Writes the result with its channels last, whatever the image's layout."""
    bias = graph.tensor("bias", (1, y.shape[1], *(1 for _ in y.shape[2:])), y.dtype)
    graph.output(graph.relu(graph.add(y, bias)), name="y", layout="channels_last")


#: Windows that begin with a word, or within one; vectors of planes, of all channels of columns, and no vectors.
STEMS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 16, 16), (64, 3, 7, 7), {"stride": 2, "padding": 3}),
    ((2, 3, 24, 33), (32, 3, 3, 3), {"stride": 2}),
    ((2, 1, 12, 13), (16, 1, 3, 3), {"padding": 1}),
    ((2, 4, 9, 16), (24, 4, 3, 2), {"padding": 1}),
    ((1, 3, 16, 32), (96, 3, 4, 4), {"stride": 4}),
    ((2, 2, 12, 13), (18, 2, 3, 5), {"padding": 2, "dilation": (1, 2)}),
    ((2, 3, 5, 6, 8), (10, 3, 3, 3, 3), {"padding": 1}),
    ((2, 4, 100), (16, 4, 25), {"padding": 3, "stride": 5, "mode": "convolution"}),
]


@pytest.mark.parametrize("dtype", ["bfloat16", *(pytest.param(d, marks=pytest.mark.slow) for d in ("float16", "int8"))])
def test_stems(dtype):
    random = Random(dtype)
    cases = [
        stem(convolution(x, w, dtype, **layouts, epilogue=plain if dtype == "int8" else channel_bias, **how), random)
        for x, w, how in STEMS
        for layouts in (NHWC, {})
    ]
    check_cases(cases, guard=True)


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "wgmma"), [(False, False), (True, True), *slow((True, False))])
def test_stems_of_float32(parts, wgmma):
    """They are rounded to tf32, or multiplied in parts."""
    random, how = Random(parts + wgmma), {} if parts else {"compute_dtype": "tf32"}
    cases = [
        stem(
            convolution(x, w, "float32", **layouts, epilogue=channels_last, **how, **more),
            random,
            "sm_90a",
            wgmma=wgmma,
        )
        for x, w, more in (STEMS[0], STEMS[7])
        for layouts in (NHWC, {})
    ]
    check_cases([*cases, *(replace(case, special=0.01) for case in cases)], guard=True)


def test_stems_whose_next_part_waits_in_registers():
    random = Random(5)
    cases = [
        stem(convolution(x, w, "bfloat16", **layouts, epilogue=channels_last, **more), random, arch, stages=2)
        for (x, w, more), arch in ((STEMS[0], "sm_80"), (STEMS[4], "sm_90a"))
        for layouts in (NHWC, {})
    ]
    check_cases(cases, guard=True)


def test_what_lies_beside_a_window_is_not_multiplied():
    """A row of seven taps of three channels ends within a word, whose other half is the next column's."""
    x, w, how = STEMS[0]
    cases = [stem(convolution(x, w, "bfloat16", **layouts, **how), Random(4)) for layouts in (NHWC, {})]
    check_cases([replace(case, special=0.02) for case in cases])


def test_few_words_are_no_terms():
    """The first layer of ResNet has 147 terms; padded channels would make 196 of them, padded taps 168."""
    graph = fg.Graph("resnet", io_dtype="bfloat16")
    x, w = graph.tensor("x", (64, 3, 224, 224)), graph.tensor("w", (64, 3, 7, 7))
    graph.output(graph.conv_fprop(x, w, stride=2, padding=3), name="y", layout="channels_last")
    (kernel,) = plan(graph, Options(target=target("h200"))).kernels
    spec = kernel.group.lowered.spec
    assert isinstance(spec, ContractionSpec)
    tile = StemTile(spec, stem_schedule.schedules(spec, target("h200"))[0])
    assert tile.vector
    assert 2 * len(tile.words) == 154


@pytest.mark.parametrize("dtype", quick("bfloat16", "float32"))
def test_patches_of_planes_are_gathered(dtype):
    """A row of a patch is 16 bytes or more: warpgroups multiply what threads copy."""
    how: dict[str, Any] = {"compute_dtype": "tf32"} if dtype == "float32" else {}
    cases = [
        hopper(convolution(x, w, dtype, epilogue=channels_last, **how, **more), lambda s: s.gather)
        for x, w, more in (
            ((3, 3, 48, 64), (40, 3, 16, 16), {"stride": 16}),
            ((2, 2, 30, 48), (64, 2, 5, 8), {"stride": (3, 8), "padding": ((2, 1), (0, 0))}),
            ((1, 2, 4, 9, 24), (32, 2, 2, 3, 8), {"stride": (2, 3, 8)}),
        )
    ]
    check_cases([*cases, *(replace(case, special=0.01) for case in cases)], guard=True)


def random_case(random: Random) -> Case:
    rank = random.choice((1, 2, 2, 2, 3))
    dtype = random.choice(("bfloat16", "bfloat16", "float16", "tf32", "float32"))
    channels, filters = random.randint(1, 4), 2 * random.randint(5, 24)
    spatial = [random.choice((1, 2, 5, 8, 13, 16, 24)) for _ in range(rank)]
    taps = [random.choice((1, 2, 3, 3, 4, 7)) for _ in range(rank)]
    if dtype == "float32":
        taps[-1] = max(taps[-1], -(-64 // (channels * (taps[0] if rank > 1 else 1))))
    if channels * prod(taps) > 512:
        taps[0] = 1
    case = convolution(
        (random.randint(1, 4), channels, *spatial),
        (filters, channels, *taps),
        "float32" if dtype == "tf32" else dtype,
        epilogue=random.choice((plain, channel_bias, channels_last)),
        compute_dtype="tf32" if dtype == "tf32" else None,
        **random_windows(random, spatial, taps),
    )
    arch = "sm_90a" if dtype == "float32" else random.choice(("sm_80", "sm_90a"))
    return replace(stem(case, random, arch), special=random.choice((0.0, 0.01)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_stems(seed):
    random = Random(seed)
    check_cases([random_case(random) for _ in range(25)], guard=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [("sm_80", "bfloat16"), ("sm_90a", "bfloat16"), ("sm_90a", "float32"), ("sm_120", "bfloat16")],
)
def test_stems_compile_without_spills(arch, dtype):
    graphs = []
    every = ((64, 7, 2), (32, 3, 2), (64, 3, 1), (96, 4, 4), (64, 11, 4))
    for filters, taps, stride in every if dtype == "bfloat16" else (every[0], every[4]):
        graph = fg.Graph(f"filters{filters}_{taps}", io_dtype=dtype)
        x, w = graph.tensor("x", (64, 3, 224, 224)), graph.tensor("w", (filters, 3, taps, taps))
        y = graph.relu(graph.conv_fprop(x, w, stride=stride, padding=taps // 2))
        graph.output(y, name="y", layout="channels_last")
        graphs.append(graph)
    made = [plan(g, Options(target=target(arch)), choose=by_cost_model(target(arch))) for g in graphs]
    assert all(type(p.kernels[0].choice.schedule) is StemSchedule for p in made)
    for compiled in compile_for(arch, graphs, choose=by_cost_model(target(arch)), target=target(arch)):
        assert compiled.spill_bytes == 0, compiled.name
        assert "C75" not in compiled.log, compiled.name  # products that wait for each other
