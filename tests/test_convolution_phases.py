"""Gradients of strided convolutions on Hopper: phases whose taps are walked one by one by TMA."""

from __future__ import annotations

from typing import Any

import pytest
from golden_files import check_golden
from kernel_cases import Case, check_cases
from test_contraction_wgmma import hopper
from test_convolution_gradients import gradient

import fusegraph as fg
from codegen import contraction, render, target
from codegen.contraction.wgmma_layout import WgmmaSchedule
from codegen.contraction.wgmma_schedule import schedules
from codegen.declined import Declined
from codegen.spec import ContractionSpec
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.plan import by_cost_model, plan
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache

HOPPER = target("sm_90a")


def on_wgmma(made: CpuExecutable) -> None:
    assert made.plan is not None
    (kernel,) = made.plan.kernels
    assert isinstance(kernel.choice.schedule, WgmmaSchedule), kernel.choice


def phased(image: tuple[int, ...], filters: tuple[int, ...], *, special: float = 0.0, **how: Any) -> Case:
    """Returns the gradient of a convolution's input in channels last, as sm_90a runs it."""
    how = {"dtype": "bfloat16", "layout": "channels_last", "other": "channels_last", **how}
    return hopper(gradient("dgrad", image, filters, case={"check": on_wgmma, "special": special}, **how))


def residual(graph: fg.Graph, dx: fg.Tensor) -> None:
    """An epilogue with two outputs: relu(dx + bias) and, in bfloat16, the same plus a residual."""
    y = graph.relu(dx + graph.tensor("bias", (dx.shape[1], 1, 1)))
    graph.output(y, name="before")
    graph.output(y + graph.tensor("residual", dx.shape, layout="NHWC"), name="y", dtype="bfloat16")


def test_phases_and_their_epilogue():
    check_cases(
        [
            phased((1, 64, 14, 14), (64, 64, 3, 3), stride=2, padding=1, special=0.02),
            phased((2, 16, 9, 10), (24, 16, 3, 2), stride=(2, 1), padding=((1, 0), (2, 1)), epilogue=residual),
            phased((1, 24, 9, 8), (72, 24, 1, 1), stride=2),  # three of four phases have no tap
            phased((1, 16, 11, 9), (24, 16, 3, 2), stride=(2, 4), dilation=(2, 6), padding=(1, 2), special=0.02),
        ],
        guard=True,
    )


@pytest.mark.slow
def test_every_rank_and_stride():
    check_cases(
        [
            phased((1, 16, 8, 8), (16, 16, 2, 2), stride=2),
            phased((1, 16, 11, 12), (8, 16, 3, 2), stride=(3, 4), dilation=(2, 3), padding=(1, 2)),
            phased((1, 64, 12, 7), (128, 32, 4, 5), stride=(2, 3), padding=(1, 2), groups=2, mode="convolution"),
            phased((1, 8, 20), (8, 8, 8), stride=5, padding=2, dtype="float16"),
            phased((2, 8, 4, 5, 6), (8, 8, 2, 3, 3), stride=(2, 1, 2), padding=(0, 1, 1)),
            phased((3, 32, 15, 13), (136, 32, 3, 3), stride=2, padding=((2, 1), (0, 1)), result="float32"),
        ],
        guard=True,
    )


def spec_of(image: tuple[int, ...], filters: tuple[int, ...], **how: Any) -> ContractionSpec:
    how = {"dtype": "bfloat16", "layout": "channels_last", "other": "channels_last", **how}
    (kernel,) = plan(gradient("dgrad", image, filters, **how).graph).kernels
    spec: ContractionSpec = kernel.group.lowered.spec
    return spec


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"stride": 2, "other": "contiguous"}, "neither along the reduction nor across it"),
        ({"stride": 2, "dtype": "int8"}, "only 16-bit operands"),
    ],
)
def test_what_is_left_to_the_other_forms(how, reason):
    spec = spec_of((1, 32, 8, 8), (32, 32, 3, 3), padding=2, **how)
    with pytest.raises(Declined, match=reason):
        schedules(spec, HOPPER)
    assert reason in contraction.FAMILY.declined(spec, HOPPER)["wgmma"]


def test_no_cluster_shares_a_phase():
    """Phases have different numbers of stages: a tile is one block's, however few tiles there are."""
    assert {s.split_k for s in schedules(spec_of((1, 64, 14, 14), (512, 64, 3, 3), stride=2, padding=1), HOPPER)} == {1}


def test_golden_source():
    g = fg.Graph("conv_dgrad_phases", io_dtype="bf16")
    loss, w = g.tensor("loss", (64, 512, 28, 28), layout="NHWC"), g.tensor("w", (512, 256, 3, 3), layout="KRSC")
    g.output(g.conv_dgrad(loss, w, size=56, stride=2, padding=1, name="dx"), name="dx")
    (kernel,) = plan(g, choose=by_cost_model(HOPPER)).kernels
    check_golden("conv_dgrad_phases", kernel.source.code)


@pytest.mark.slow
def test_kernels_compile_without_spills():
    specs = [
        spec_of((64, 256, 56, 56), (512, 256, 3, 3), stride=2, padding=1),
        spec_of((2, 16, 9, 10), (24, 16, 3, 2), stride=(2, 1), epilogue=residual),
    ]
    sources = [render(spec, s) for spec in specs for s in schedules(spec, HOPPER)[:2]]
    for kernel in nvrtc.compile_kernels(sources, "sm_90a", cache=default_cache()):
        assert kernel.spill_bytes == kernel.stack_bytes == 0
        assert not kernel.warnings
