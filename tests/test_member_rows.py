"""Reductions of one program over different tensors: one launch of all of them, and one of what combines their parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import QUICK_ARCHS, slow
from kernel_cases import Case, check_cases
from test_nvrtc_kernels import compiled

import fusegraph as fg
from codegen import render, schedules
from codegen.spec import MembersSpec
from codegen.target import target
from fusegraph.lowering.base import Options
from fusegraph.plan import Plan, plan
from fusegraph.report.check import check, random_inputs

RAGGED = ((3, 7), (33, 100), (2049,), (4, 64, 5), (16,))
#: Some of which are reduced in parts, one of them with a ragged last one.
LONG = ((900, 1000), (1 << 19,), (701, 999), (1 << 20,))


def several(shapes: Any = RAGGED, dtype: str = "float32", *modes: str, **how: Any) -> fg.Graph:
    """Returns a graph of reductions of each of several tensors, scaled."""
    g = fg.Graph(f"{' '.join(modes)} {dtype}", **how)
    scale = g.tensor("s", (), dtype)
    for n, shape in enumerate(shapes):
        x = g.tensor(f"x{n}", shape, dtype) * scale
        for mode in modes:
            g.output(g.reduction(x, mode, keepdims=False), name=f"{mode}{n}")
    return g


def global_norm(shapes: Any, dtype: str = "float32") -> fg.Graph:
    """Returns a graph of the norm of the norms of several tensors, which are results as well."""
    g = fg.Graph(f"norm {dtype}")
    each = [g.reduction(g.tensor(f"x{n}", s, dtype), "norm2", keepdims=False) for n, s in enumerate(shapes)]
    for n, own in enumerate(each):
        g.output(own, name=f"norm{n}")
    stack = g.concatenate([g.reshape(own, (1,)) for own in each], axis=0)
    g.output(g.reduction(stack, "norm2", keepdims=False), name="norm")
    return g


def members(made: Plan | None) -> list[int]:
    """Returns how many members each kernel has, 1 for other kernels."""
    assert made is not None
    specs = [k.group.lowered.spec for k in made.kernels]
    return sorted(len(spec.sizes) if isinstance(spec, MembersSpec) else 1 for spec in specs)


CASES = (
    ("bfloat16", "add", "amax"),
    ("int8", "add", "min"),
    ("float32", "logaddexp", "norm1"),
    ("float64", "norm2", "mul"),
    ("float16", "logaddexp"),
    ("uint64", "add"),
)


def test_kernels() -> None:
    made = check_cases([Case(several(RAGGED, *case), special=0.0005) for case in CASES], guard=True)
    assert all(members(exe.plan) == [5] for exe in made)


def test_in_parts() -> None:
    (made,) = check_cases([Case(global_norm((*LONG, (5,), (4, 6), (300,), (7,)), "bfloat16"))], guard=True)
    assert members(made.plan) == [1, 4, 4, 4, 8]


def test_sums_are_stacked() -> None:
    """Sums of sums are one reduction; numbers that are no result of one are added behind."""
    g = fg.Graph("sum of sums")
    total = g.tensor("t", ())
    for n, shape in enumerate(RAGGED):
        x = g.tensor(f"x{n}", shape)
        total = total + g.reduction(x * x, "add", keepdims=False) * 0.5
    g.output(g.sqrt(total), name="y")
    (made,) = check_cases([g])
    assert members(made.plan) == [1, 5]


def test_special_values_reach_the_norm() -> None:
    graph = global_norm(((40,), (3, 5), (8,), (1000,)))
    run = graph.compile(engine="cpu")
    for special in (np.nan, np.inf, -np.inf):
        for n, place in ((0, 39), (1, 2), (3, 500)):
            given = {t.name: np.ones(t.shape, np.float32) for t in graph.inputs}
            given[f"x{n}"].flat[place] = special
            *each, norm = run(**given)
            np.testing.assert_equal(np.float32(norm), np.float32(abs(special)))
            assert [m for m, own in enumerate(each) if not np.isfinite(own)] == [n]


def trust_ratios(shapes: Any, dtype: str, *, adaptive: bool) -> fg.Graph:
    """Returns a graph of updates by ratios of norms: of weights to gradients (LARS), or to adaptive steps (LAMB)."""
    g = fg.Graph(f"ratios {dtype}")
    for n, shape in enumerate(shapes):
        weight, grad = (g.tensor(f"{name}{n}", shape, dtype) for name in ("w", "g"))
        moment, w = g.tensor(f"m{n}", shape), g.cast(weight, "float32")
        step = g.cast(grad, "float32")
        if adaptive:
            step = g.assign(moment, moment * 0.9 + step * 0.1) * 1.5 + w * 0.01
        ratio = g.reduction(w, "norm2") / (g.reduction(step, "norm2") + 1e-6)
        if not adaptive:
            step = g.assign(moment, moment * 0.9 + step * ratio)
            ratio = 0.1
        g.assign(weight, g.cast(w - step * ratio, dtype))
    return g


@pytest.mark.parametrize(("adaptive", "wanted"), [(True, [5]), *slow((False, [4, 4, 5, 8]))])
def test_updates_by_trust_ratios(adaptive: bool, wanted: list[int]) -> None:
    """Tensors are overwritten by kernels that look at them twice, which read nothing that they have written."""
    shapes = RAGGED if adaptive else (*RAGGED, *LONG)
    graph = trust_ratios(shapes, "bfloat16", adaptive=adaptive)
    run = graph.compile(engine="cpu")
    rng = np.random.default_rng(0)
    ours = {t.name: rng.standard_normal(t.shape).astype(t.dtype.numpy) for t in graph.inputs}
    theirs = {name: x.copy() for name, x in ours.items()}
    run(**ours)
    graph.compile(engine="reference")(**theirs)
    for name, x in ours.items():
        near = {"rtol": 2**-6, "atol": 1e-2} if name[0] == "w" else {"rtol": 1e-5, "atol": 1e-6}
        np.testing.assert_allclose(x.astype("f8"), theirs[name].astype("f8"), **near)
    assert members(run.plan) == wanted
    assert run.plan is not None
    assert run.plan.memory.size < 1 << 20


def test_steps_that_wait_in_memory_stay_apart() -> None:
    """The steps of large tensors lie in memory until their ratios are known, one after the other."""
    made = plan(trust_ratios((*RAGGED, *LONG), "float32", adaptive=True))
    assert members(made) == [1] * 3 * len(LONG) + [5]
    assert made.memory.size < 5 << 20


def test_what_is_reduced_otherwise_stays_apart() -> None:
    g = fg.Graph("apart")
    for n in range(4):
        x = g.tensor(f"x{n}", (20, 30 + n))
        g.output(g.reduction(x, "add", axes=1), name=f"rows{n}")
        g.output(g.reduction(g.tensor(f"y{n}", (20, 30), strides=(40 + n, 1)), "add"), name=f"apart{n}")
    assert max(members(plan(g))) == 1


def test_plans_take_seconds() -> None:
    shapes = [s for _ in range(37) for s in ((768,), (768, 2304), (2304,), (768, 768))]
    assert members(plan(global_norm(shapes))) == [1, 74, 74, 74, 148]


@pytest.mark.parametrize("arch", QUICK_ARCHS)
def test_kernels_compile_without_spills(arch: str) -> None:
    graph = global_norm((*LONG, *((n,) for n in range(100, 240))), "bfloat16")
    specs = [k.group.lowered.spec for k in plan(graph, Options(target=target(arch))).kernels]
    every = [(s, schedule) for s in specs if isinstance(s, MembersSpec) for schedule in schedules(s, target(arch))]
    compiled([render(*each) for each in every if each[0].chunks][:6], arch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(dtype: str) -> None:
    shapes = ((3, 7), (1000, 1001), (5,), (1 << 20,), (33, 5), (2000, 3000), (1 << 19,), (2049, 513))
    for special in (0.0, 1e-7):
        result = check(
            global_norm(shapes, dtype), "cuda", random_inputs(global_norm(shapes, dtype), 3, special=special)
        )
        assert result.ok, result
