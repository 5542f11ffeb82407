"""Attention's gradients by one kernel (Hopper), on the CPU against the reference."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import check_all, check_on_gpu
from test_attention_backward import BOTTOM, CAUSAL, bias, dropout, lengths
from test_attention_backward import made as made_with_bias

import fusegraph as fg
from codegen.spec import KernelSource
from codegen.target import target
from fusegraph.errors import KernelError
from fusegraph.lowering.base import Options
from fusegraph.passes import fuse_gradients
from fusegraph.plan import Plan, by_cost_model, plan
from fusegraph.report.check import random_inputs, run
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.host_compiler import Order, build

HOPPER = by_cost_model(target("sm_90a"))
BAND: dict[str, Any] = {"diagonal_band_left_bound": 90, "diagonal_band_right_bound": 40}


def lengths_of_any_keys(g: fg.Graph) -> dict[str, Any]:
    return {**lengths(g), "seq_len_kv": g.constant(np.array([2**31 - 1, 33], np.int32))}


QUICK: tuple[dict[str, Any], ...] = (
    {"name": "causal", "rows": 140, "heads": 1, "depth": 128, "forward": False, **CAUSAL},
    {"name": "full", "rows": 70, "keys": 200, "heads": 2, "shared": 1, "depth": 40, "forward": False},
)
VARIANTS: tuple[dict[str, Any], ...] = (
    {"name": "grouped", "rows": 140, "heads": 4, "shared": 2, "batch": 2, "depth": 64, **CAUSAL},
    {"name": "band", "rows": 300, "keys": 260, "heads": 1, "depth": 64, **BAND},
    {"name": "later keys", "rows": 200, "keys": 300, "heads": 1, "diagonal_band_left_bound": 20},
    {"name": "bottom", "rows": 63, "keys": 200, "depth": 96, "width": 64, **BOTTOM},
    {"name": "rows without keys", "rows": 200, "keys": 63, "use_alibi_mask": True, **BOTTOM},
    {"name": "lengths", "keys": 130, "batch": 2, "heads": 1, "extra": lengths_of_any_keys, **BOTTOM},
    {"name": "wide", "dtype": "float16", "keys": 130, "depth": 32, "width": 128, "layout": "BSHD"},
    {"name": "biased", "keys": 136, "extra": bias(1, 1, 65, 136, dtype="float32"), "heads": 1},
    {"name": "masked", "keys": 130, "extra": lambda g: {"mask": g.tensor("m", (65, 130), "bool")}, "heads": 1},
    {"name": "sunk", "keys": 130, "shared": 1, "sink": "of sdpa"},
    {"name": "one query", "rows": 1, "keys": 140},
    {"name": "dropped", "keys": 132, "shared": 1, "extra": dropout, "dropout_probability": 0.3, **CAUSAL},
)
#: What is left to two kernels, and why.
APART: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {"name": "capped", "keys": 130, "soft_cap": 5.0}),
    ("the sums of 192 elements do not fit", {"name": "deep", "keys": 130, "depth": 192, "width": 64}),
    ("a stride is 70 bytes", {"name": "gaps", "keys": 130, "layout": "gaps"}),
)


def made(**how: Any) -> fg.Graph:
    """Builds the graph without the gradient of the bias, which needs the gradient of every score."""
    return made_with_bias(results=3, **how)


@pytest.fixture(autouse=True)
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_gradients, "LEAST_KEYS", 1)


def kernels(planned: Plan) -> list[KernelSource]:
    return [k.source for k in planned.kernels if k.group.family == "attention_backward"]


@pytest.mark.slow
def test_forms() -> None:
    check_all([made(**how) for how in QUICK], arch="sm_90a")


@pytest.mark.slow
def test_variants() -> None:
    graphs = [made(**how) for how in VARIANTS]
    for graph in graphs:
        assert len(kernels(plan(graph, choose=HOPPER))) == 1, graph.name
    check_all(graphs, arch="sm_90a")


def test_which_are_fused() -> None:
    graph = made(**QUICK[0])
    planned = plan(graph, choose=HOPPER)
    (kernel,) = kernels(planned)
    assert any(d.fused and d.reason.startswith("one kernel: what both need") for d in planned.partition.decisions)
    # The blocks' numbers and turns begin at 0; every tile of queries is met by keys, and its sums begin with the first.
    assert kernel.zeroed == ((9, 4 * (1 + 3)),)
    (unmet,) = kernels(plan(made(**VARIANTS[4]), choose=HOPPER))
    assert [nbytes for _, nbytes in unmet.zeroed] == [4 * (1 + 2 * 4), 4 * 2 * 200 * 32]
    assert len(kernels(plan(graph))) == 2, "every architecture"
    for reason, how in APART:
        planned = plan(made(**how), choose=HOPPER)
        assert len(kernels(planned)) == 2, how
        found = [d.reason for d in planned.partition.decisions if d.reason.startswith("two kernels")]
        assert len(found) == bool(reason), how
        assert all(reason in text for text in found), found
    assert len(kernels(plan(graph, Options(workspace=1000), choose=HOPPER))) == 2, "no memory for sums"


def test_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_gradients, "LEAST_KEYS", 141)
    assert len(kernels(plan(made(**QUICK[0]), choose=HOPPER))) == 2


@pytest.mark.slow
def test_again() -> None:
    """A second call begins with counters of its own, and gives the same bits."""
    graph = made(**QUICK[1])
    executable = graph.compile("cpu", target="sm_90a")
    inputs = random_inputs(graph)
    first, second = run(executable, inputs), run(executable, inputs)
    assert all(np.array_equal(first[key].view(np.uint16), second[key].view(np.uint16)) for key in first)


def test_golden_source() -> None:
    graph = made(name="gradients", rows=1024, heads=4, shared=2, depth=64, forward=False, **CAUSAL)
    (kernel,) = kernels(plan(graph, choose=HOPPER))
    check_golden("attention_backward_fused_sm_90a", kernel.code)


_TURNS = """
#include "turns.cuh"

extern "C" __global__ void turns(int* counters, int* list)
{
    const int number = take_number(counters);
    turn_wait(counters + 1, number);
    list[number] = number ? list[number - 1] + int(blockIdx.x) + 1 : int(blockIdx.x) + 1;
    turn_end(counters + 1);
}
"""


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_turns(order: Order) -> None:
    """Each block sees what all before it have done; counters are set to zero before the launch."""
    source = KernelSource("turns", _TURNS, (40, 1, 1), (1, 1, 1), 0, True, zeroed=((0, 8),))
    counters, numbers = np.full(2, 7, np.int32), np.zeros(40, np.int32)
    build([source], cache=default_cache()).launch(0, [counters.ctypes.data, numbers.ctypes.data], order=order)
    assert counters.tolist() == [40, 40]
    steps = np.diff(numbers, prepend=0)
    assert sorted(steps) == list(range(1, 41))


_GIVES_UP = """
#include "turns.cuh"

extern "C" __global__ void gives_up(int* counters)
{
    if (threadIdx.x) return;
    const int number = take_number(counters);
    if (number == 0) {
        for (int n = 0; n < 1 << 28 && *static_cast<volatile int*>(counters) < 2; ++n) {}  // the next block has begun
        __trap();
    }
    turn_wait(counters + 1, number);
}
"""


def test_a_block_whose_turn_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks on other host threads wait for it no longer than until it fails."""
    monkeypatch.setenv("FUSEGRAPH_CPU_THREADS", "2")
    source = KernelSource("gives_up", _GIVES_UP, (2, 1, 1), (1024, 1, 1), 0, True, zeroed=((0, 8),))
    module = build([source], cache=default_cache())
    counters = np.zeros(2, np.int32)
    began = time.perf_counter()
    with pytest.raises(KernelError, match=r"__trap\(\)"):
        module.launch(0, [counters.ctypes.data])
    assert counters[0] == 2
    assert time.perf_counter() - began < 20


@pytest.mark.gpu
def test_on_gpu() -> None:
    graphs = [made(**how) for how in (*QUICK, *VARIANTS)]
    graphs.append(made(name="more keys", rows=257, keys=509, depth=128, shared=1, forward=False, **BOTTOM))
    graphs.append(made(name="more rows", rows=509, keys=257, depth=64, forward=False))
    check_on_gpu(graphs)


@pytest.mark.gpu
def test_the_same_bits_on_gpu() -> None:
    """Of as many blocks at a time as there are multiprocessors."""
    for how in (CAUSAL, {}):
        graph = made(name="again", rows=1000, depth=64, heads=16, forward=False, **how)
        executable = graph.compile("cuda", autotune=False)
        inputs = random_inputs(graph)
        first = run(executable, inputs)
        for _ in range(5):
            again = run(executable, inputs)
            assert all(np.array_equal(first[key].view(np.uint16), again[key].view(np.uint16)) for key in first)
