"""Attention of a few queries: its schedules, masks, pages and epilogues, and where it is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from graphs import ARCHS, check_all, check_on_gpu, compile_for, share

import fusegraph as fg
from codegen import best_schedule
from codegen.attention import thin
from codegen.attention.spec import AttentionSpec
from codegen.attention.thin import AttentionThinSchedule
from codegen.declined import Declined
from codegen.target import target
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.lowering.base import Options
from fusegraph.plan import Choice, Plan, plan
from fusegraph.report.check import check_executable, random_inputs

H200 = target("h200")


def graph(
    rows: int,
    keys: int,
    depth: int,
    width: int,
    dtype: str = "bfloat16",
    batch: tuple[int, int] = (2, 3),
    end: str = "",
    **how: Any,
) -> fg.Graph:
    g = fg.Graph("attention", dtype)
    q, k = (g.tensor(name, (*batch, n, depth)) for name, n in (("q", rows), ("k", keys)))
    y = g.sdpa(q, k, g.tensor("v", (*batch, keys, width)), attn_scale=depth**-0.5, **how)
    for t in y if isinstance(y, tuple) else (y,):
        g.output(g.gelu(t) * g.tensor("scale", (width,)) if end else t)
    return g


#: (rows, keys, depth, width): whole tiles and pieces, none, one key, more queries than 8.
SIZES = ((4, 512, 64, 64), (1, 77, 80, 24), (16, 130, 128, 128), (9, 1, 8, 8), (13, 300, 96, 64), (2, 33, 40, 128))


def taken(schedule: AttentionThinSchedule) -> Any:
    """Returns a chooser of a schedule for attention."""

    def choose(spec: Any, _: Any) -> Choice:
        return Choice(schedule if isinstance(spec, AttentionSpec) else best_schedule(spec, H200))

    return choose


@pytest.mark.slow
@pytest.mark.parametrize("cluster", thin.CLUSTERS)
def test_every_schedule(cluster: int) -> None:
    options, made = Options(target=H200), []
    for warps in thin.WARPS:
        for keys in thin.KEYS:
            schedule = AttentionThinSchedule(warps, keys, cluster)

            def planner(g: fg.Graph, options: Options, schedule: AttentionThinSchedule = schedule) -> Plan:
                return plan(g, options, choose=taken(schedule))

            every = [graph(*sizes) for sizes in SIZES[:4]] + [graph(3, 200, 64, 64, use_causal_mask=True)]
            made += [CpuExecutable(g, options, planner=planner, lazy=True) for g in every]
    build_together(made)
    for executable in made:
        result = check_executable(executable, random_inputs(executable.graph))
        assert result.ok, (result, executable.plan.kernels[0].choice)


def thin_ones(g: fg.Graph, machine: str = "h200") -> int:
    chosen = [k.choice.schedule for k in plan(g, Options(target=target(machine))).kernels]
    return sum(isinstance(s, AttentionThinSchedule) for s in chosen)


def with_inputs(sizes: tuple[int, ...], more: dict[str, tuple[tuple[int, ...], str]], **how: Any) -> fg.Graph:
    """Returns attention with further operands, which are called as their parameters."""
    rows, keys, depth, width = sizes
    g = fg.Graph("attention", "bfloat16")
    q, k = (g.tensor(n, (2, 3, count, depth)) for n, count in (("q", rows), ("k", keys)))
    v = g.tensor("v", (2, 3, keys, width))
    g.output(g.sdpa(q, k, v, **{name: g.tensor(name, *of) for name, of in more.items()}, **how), name="y")
    return g


VARIANTS = {
    "float16": lambda: graph(5, 190, 64, 64, "float16"),
    "causal": lambda: graph(7, 100, 64, 64, use_causal_mask=True),
    "window": lambda: graph(
        7, 400, 64, 64, use_causal_mask=True, diagonal_band_left_bound=50, diagonal_alignment="BOTTOM_RIGHT"
    ),
    "epilogue": lambda: graph(6, 300, 64, 72, end="gelu"),
    "statistics": lambda: graph(6, 300, 64, 64, generate_stats=True),
    "one head": lambda: graph(1, 2000, 128, 128, batch=(1, 1)),
    "soft cap": lambda: graph(3, 100, 64, 64, soft_cap=5.0),
    "lengths": lambda: with_inputs((4, 300, 64, 64), {"seq_len_kv": ((2,), "int32")}),
    "bias": lambda: with_inputs((4, 300, 64, 64), {"bias": ((2, 3, 4, 300), "float32")}),
    "mask": lambda: with_inputs((4, 301, 64, 64), {"mask": ((2, 1, 1, 301), "bool")}),
    "sink": lambda: with_inputs((4, 300, 64, 64), {"sink_token": ((1, 3, 1, 1), "float32")}),
    "dropout": lambda: with_inputs(
        (4, 100, 64, 64), dict.fromkeys(("seed", "offset"), ((), "int64")), dropout_probability=0.25
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_have_this_form(name: str) -> None:
    assert thin_ones(VARIANTS[name]()) == 1


@pytest.mark.slow
def test_variants() -> None:
    check_all([make() for make in VARIANTS.values()], arch="h200")


#: Graphs whose threads hold the most: the widest keys and values, and further operands.
FULL = (lambda: graph(16, 512, 128, 128), VARIANTS["dropout"], VARIANTS["bias"])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile(arch: str) -> None:
    machine = target(arch)
    for number, made in enumerate(FULL):
        spec = next(k.group.lowered.spec for k in plan(made(), Options(target=machine)).kernels)
        for schedule in share(arch, thin.schedules(spec, machine), number):
            for kernel in compile_for(arch, [made()], choose=taken(schedule)):
                assert kernel.spill_bytes == 0, (schedule, kernel.name)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_on_gpu([*(graph(*sizes) for sizes in SIZES), *(make() for make in VARIANTS.values())])


def test_what_it_declines() -> None:
    for other in (graph(17, 64, 64, 64), graph(4, 64, 136, 64), graph(4, 64, 60, 64), graph(4, 64, 64, 64, "float32")):
        assert thin_ones(other) == 0
    spec = plan(graph(4, 64, 64, 64), Options(target=H200)).kernels[0].group.lowered.spec
    with pytest.raises(Declined, match="no vectors of 16 bytes"):
        thin.schedules(replace(spec, k=replace(spec.k, alignment=8)), H200)
    with pytest.raises(ValueError, match="a multiple of 16 keys"):
        AttentionThinSchedule(4, 24)
