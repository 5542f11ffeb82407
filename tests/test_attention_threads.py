"""Attention by single threads' multiply-adds: its schedules, and when three kernels with tensor cores are faster."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
from graphs import ARCHS, check_all, check_on_gpu, compile_for, quick

import fusegraph as fg
from codegen import best_schedule
from codegen.attention import simt
from codegen.attention.simt import AttentionSimtSchedule
from codegen.attention.spec import AttentionSpec
from codegen.declined import Declined
from codegen.target import PORTABLE, target
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.lowering.base import Options
from fusegraph.plan import Choice, Plan, plan
from fusegraph.report.check import check_executable, random_inputs


def graph(
    rows: int, keys: int, depth: int, width: int, dtype: str = "float32", batch: tuple[int, int] = (2, 2), **how: Any
) -> fg.Graph:
    g = fg.Graph("attention", dtype)
    q, k = (g.tensor(name, (*batch, n, depth)) for name, n in (("q", rows), ("k", keys)))
    g.output(g.sdpa(q, k, g.tensor("v", (*batch, keys, width)), attn_scale=depth**-0.5, **how), name="y")
    return g


def with_queries(count: int) -> Any:
    """Returns a chooser of the schedule with so many queries in a warp."""

    def choose(spec: Any, _: Any) -> Choice:
        if not isinstance(spec, AttentionSpec):
            return Choice(best_schedule(spec, PORTABLE))
        return Choice(next(s for s in simt.schedules(spec, PORTABLE) if s.queries == count))

    return choose


#: (rows, keys, depth, width): vectors, none, and rows of keys that begin in the same bank but for their padding.
SIZES = ((49, 70, 32, 32), (33, 31, 13, 5), (5, 64, 6, 36), (64, 33, 64, 64), (1, 1, 4, 1))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", quick("float32", "float64"))
def test_every_schedule(dtype: str) -> None:
    for count in simt.QUERIES:

        def planner(g: fg.Graph, options: Options, count: int = count) -> Plan:
            return plan(g, options, choose=with_queries(count))

        made = [CpuExecutable(graph(*sizes, dtype), Options(), planner=planner, lazy=True) for sizes in SIZES]
        build_together(made)
        for executable in made:
            result = check_executable(executable, random_inputs(executable.graph))
            assert result.ok, result


def test_gradients() -> None:
    graphs = []
    for rows, keys, depth, width in SIZES[:4]:
        g = fg.Graph("gradients")
        sizes = (rows, depth), (keys, depth), (keys, width)
        q, k, v = (g.tensor(name, (1, 2, *size)) for name, size in zip("qkv", sizes))
        y = g.sdpa(q, k, v, attn_scale=0.25)
        loss = g.reduction(y * g.tensor("w", y.shape), mode="add")
        for name, grad in zip("qkv", g.gradients(loss, [q, k, v])):
            g.output(grad, name=f"d{name}")
        graphs.append(g)
    check_all(graphs)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_on_gpu([graph(*sizes, dtype) for sizes in SIZES for dtype in ("float32", "float64")])
    check_on_gpu([graph(300, 500, 64, 96, batch=(3, 5))])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile(arch: str) -> None:
    """The most queries of a warp beside the widest values: registers hold all of it."""
    for count, width in ((8, 128), (4, 256)):
        for kernel in compile_for(arch, [graph(256, 256, width, width)], choose=with_queries(count)):
            assert kernel.spill_bytes == 0, kernel.name


def families(g: fg.Graph, machine: str = "h200") -> list[str]:
    return [k.group.family for k in plan(g, Options(target=target(machine))).kernels]


def test_tensor_cores_multiply_float32_of_long_attention_beside_a_softmax_in_memory() -> None:
    many = graph(512, 512, 64, 64, batch=(16, 12))
    assert families(many).count("contraction") == 2
    assert "attention" not in families(many)
    assert families(many, "sm_80") == ["attention"]  # where single threads multiply float32 in products, too
    for kept in (
        graph(64, 64, 32, 32, batch=(256, 12)),  # a launch, and scores that come and go, take longer
        graph(8, 4096, 64, 64, batch=(16, 12)),  # memory is the limit
        graph(4096, 4096, 64, 64, batch=(2, 12)),  # scores would take 1.6 GB
    ):
        assert set(families(kept)) <= {"attention", "rows"}
    assert families(graph(512, 512, 64, 64, "bfloat16", batch=(16, 12))) == ["attention"]


def test_keys_of_few_queries_are_cut_into_parts() -> None:
    """A step of a decoder in float32: parts of the keys keep all multiprocessors busy, and take a part of the time."""
    h200 = target("h200")
    step = plan(graph(1, 6829, 128, 128, batch=(1, 12)), Options(target=h200)).kernels
    assert [k.group.family for k in step] == ["attention", "rows"]
    spec = step[0].group.lowered.spec
    assert spec.parts * prod(spec.batch[1:]) > h200.sms
    whole = simt.Sizes(128, 128, "float", 12, 1, 6829, 1)
    assert 4 * simt.cost(spec, best_schedule(spec, h200), h200) < simt.least_cycles(whole, h200)
    few = [graph(1, 4100, 8, 8, batch=(1, 2)), graph(2, 2500, 4, 12, "float64", batch=(1, 1))]
    assert all(len(plan(g, Options(target=h200)).kernels) == 2 for g in few)
    check_all(few)


def test_tiles_beyond_shared_memory_are_declined() -> None:
    (kernel,) = plan(graph(8, 8, 64, 64)).kernels
    assert isinstance(kernel.choice.schedule, AttentionSimtSchedule)
    with pytest.raises(Declined, match="do not fit shared memory"):
        simt.schedules(replace(kernel.group.lowered.spec, depth=4096, width=4096), PORTABLE)
