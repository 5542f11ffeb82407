"""Schedules of contractions on mma.sync: which there are, what is refused; NVRTC compiles them without spills."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from graphs import ARCHS, share
from kernel_cases import Case
from test_contraction import convolution, matmul
from test_contraction_mma import as_given, spec_of, tf32  # noqa: F401 - a fixture of every test

import codegen
import fusegraph as fg
from codegen import contraction
from codegen.contraction import mma as contraction_mma
from codegen.contraction.mma_schedule import MmaSchedule, schedules, staged_bytes
from codegen.declined import Declined
from codegen.target import target as named
from codegen.tile_path import tile_paths
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache

pytestmark = pytest.mark.slow


# ---- what is not taken, and what is refused


def test_what_tensor_cores_do_not_compute_says_why():
    def reason(case: Case) -> str:
        return contraction.FAMILY.declined(spec_of(case.graph), named("sm_80")).get("mma", "")

    assert "exact unless" in reason(matmul((8, 8), (8, 8), "float32"))
    assert "do not multiply float64" in reason(matmul((8, 8), (8, 8), "float64"))
    assert "do not multiply int32" in reason(matmul((8, 8), (8, 8), "int32", "int8"))
    assert "in uint64" in reason(matmul((8, 8), (8, 8), "int8", result="int64"))
    assert "nothing to multiply" in reason(matmul((8, 0), (0, 8), "bfloat16"))
    assert not reason(matmul((8, 8), (8, 8), "bfloat16"))
    old = codegen.target("sm_75")
    with pytest.raises(Declined, match="asynchronous copies"):
        schedules(spec_of(matmul((8, 8), (8, 8), "bfloat16").graph), old)


def test_impossible_schedules_are_refused():
    with pytest.raises(ValueError, match="16, 32 or 64"):
        MmaSchedule(128, 256, 64, 1, 2, 3)
    with pytest.raises(ValueError, match="at least 2 stages"):
        MmaSchedule(64, 64, 64, 2, 2, 1)
    with pytest.raises(ValueError, match="split_k"):
        MmaSchedule(64, 64, 64, 2, 2, 3, split_k=4)
    spec = spec_of(matmul((512, 64), (64, 64), "int8").graph)  # columns lie across: a thread for each of the 256
    with pytest.raises(Declined, match="cannot fill"):
        contraction_mma.render(spec, MmaSchedule(64, 256, 64, 1, 4, 2))


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"])
def test_schedules_fit_the_architecture(arch):
    target = named(arch)
    for case in (
        matmul((4096, 4096), (4096, 4096), "bfloat16"),
        matmul((16, 4096), (4096, 64), "int8"),
        matmul((509, 333), (333, 127), "float16"),
        convolution((8, 3, 56, 56), (64, 3, 7, 7), "bfloat16", layout="channels_last", stride=2, padding=3),
    ):
        spec = spec_of(case.graph)
        found = schedules(spec, target)
        assert len(set(found)) == len(found)
        for s in found:
            assert staged_bytes(tile_paths(spec, s.widen), s) <= target.arch.shared_bytes_per_block
            assert codegen.schedule_from_data(codegen.schedule_data(s)) == s
    large = schedules(spec_of(matmul((4096, 4096), (4096, 4096), "bfloat16").graph), target)[0]
    assert large.tile_m * large.tile_n >= 64 * 64
    fast = spec_of(matmul((64, 64), (64, 64), "float8_e4m3", compute="fast_float_for_fp8").graph)
    assert {s.widen for s in schedules(fast, target)} == {not target.arch.has_fp8_mma}
    assert {s.widen for s in schedules(replace(fast, fast_fp8=False), target)} == {True}


# ---- NVRTC


def compile_graphs(every: bool) -> list[fg.Graph]:
    def product(m: int, n: int, k: int, a: str, b: str, **strides: Any) -> fg.Graph:
        def biased(graph: fg.Graph, y: fg.Tensor) -> None:
            graph.output(graph.gelu(y + graph.tensor("bias", (n,), y.dtype)) if y.dtype.is_float else y, name="y")

        return matmul((m, k), (k, n), a, b, epilogue=biased, **strides).graph

    nhwc = {"layout": "channels_last", "filters": "channels_last", "padding": 1}
    graphs = [
        product(4096, 4096, 4096, "bfloat16", "bfloat16"),
        product(4095, 4001, 509, "float16", "float16"),
        product(4096, 4096, 4096, "float8_e4m3", "float8_e5m2", b_strides=(1, 4096)),
        product(4096, 4096, 4096, "int8", "int8"),
        convolution((64, 64, 56, 56), (64, 64, 3, 3), "bfloat16", **nhwc).graph,
        convolution((64, 3, 224, 224), (64, 3, 3, 3), "bfloat16", **nhwc).graph,
    ]
    if every:
        graphs += [
            product(4096, 4096, 4096, "bfloat16", "bfloat16", a_strides=(1, 4096), b_strides=(1, 4096)),
            product(16, 4096, 4096, "bfloat16", "int8"),
            product(4096, 4096, 4096, "bfloat16", "int8"),
            product(1024, 1024, 1024, "float8_e4m3", "float8_e4m3"),
            product(1024, 1024, 1024, "float16", "bfloat16"),
            tf32(4096, 4096, 4096),
            tf32(4095, 4095, 509),
            convolution((64, 64, 56, 56), (64, 64, 3, 3), "float16", padding=1).graph,
            convolution((8, 20, 9, 30, 30), (64, 20, 3, 3, 3), "int8", stride=2, padding=1).graph,
            convolution((8, 64, 30, 30), (64, 64, 3, 3), "float8_e5m2", **nhwc).graph,
        ]
    return graphs


def check_compiled(graphs: Sequence[fg.Graph], arch: str, count: int) -> None:
    target, r = named(arch), random.Random(0)
    chosen = []
    for graph in graphs:
        spec = spec_of(graph)
        every = schedules(spec, target)
        chosen += [(spec, s) for s in dict.fromkeys([every[0], *r.sample(every, min(count, len(every)))])]
    sources = [contraction_mma.render(spec, s) for spec, s in chosen]
    wrong = []
    for kernel, (spec, s) in zip(nvrtc.compile_kernels(sources, arch, cache=default_cache()), chosen):
        if kernel.spill_bytes or kernel.stack_bytes or kernel.registers * s.threads > 65536:
            wrong.append(f"{arch} {spec.a.operand} {s}: {kernel.registers} registers, {kernel.spill_bytes} spilled")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_without_spills(arch):
    check_compiled(compile_graphs(False), arch, 0)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_kind_of_schedule_compiles_without_spills(arch):
    check_compiled(share(arch, compile_graphs(True)), arch, 1)
