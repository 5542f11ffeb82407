"""Pointwise kernels of one program over different tensors: one launch of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import QUICK_ARCHS
from kernel_cases import Case, check_cases
from test_nvrtc_kernels import compiled

import fusegraph as fg
from codegen.pointwise import members
from codegen.spec import MembersSpec
from codegen.target import target
from fusegraph import optimizers
from fusegraph.lowering.base import Options
from fusegraph.passes import launched_together
from fusegraph.plan import Plan, plan
from fusegraph.report.check import check, random_inputs

#: Sizes of 1 are apart: they say nothing of strides.
RAGGED = ((3, 7), (1,), (), (2049,), (4, 64, 5), (8,))


def several(
    shapes: Any = RAGGED, dtype: Any = "float32", *, common: bool = True, twice: bool = False, **how: Any
) -> fg.Graph:
    """Returns a graph of gelu(x * s) + y for each shape, s being one number for all or for each."""
    g = fg.Graph(f"members {dtype}", **how)
    scale = g.tensor("s", (), dtype)
    for n, shape in enumerate(shapes):
        x, y = g.tensor(f"x{n}", shape, dtype), g.tensor(f"y{n}", shape, dtype)
        own = scale if common else g.tensor(f"s{n}", (), dtype)
        z = g.gelu(x * own) + y if not str(dtype).startswith("int") else x * own + y
        g.output(z, name=f"z{n}")
        if twice:
            g.output(g.relu(z), name=f"relu{n}")
    return g


def counts(made: Plan) -> list[int]:
    """Returns how many members each pointwise kernel has, 1 for other kernels."""
    specs = [k.group.lowered.spec for k in made.kernels]
    return sorted(len(spec.sizes) if isinstance(spec, MembersSpec) and not spec.chunks else 1 for spec in specs)


def test_kernels() -> None:
    graphs = [several(dtype=dtype) for dtype in ("float32", "bfloat16", "float64", "int8", "int32")]
    graphs += [several(common=False, dtype="float16"), several(twice=True), several(((),) * 5)]
    made = check_cases([Case(g, special=0.1 if n == 0 else 0.0) for n, g in enumerate(graphs)], guard=True)
    for exe in made:
        assert exe.plan is not None
        assert max(counts(exe.plan)) >= 4


def test_arrays_begin_anywhere() -> None:
    graph = several()
    exe = graph.compile(engine="cpu")
    rng = np.random.default_rng(0)
    given = {}
    for t in graph.inputs:
        room = np.zeros(t.size + 1, np.float32)
        given[t.name] = room[1:].reshape(t.shape)
        given[t.name][...] = rng.standard_normal(t.shape)
    wanted = graph.compile(engine="reference")(**given)
    for mine, other in zip(exe(**given), wanted, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_most_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = several(((3,), (300,)) * 6)
    assert counts(plan(graph)) == [12]
    monkeypatch.setattr(launched_together, "MOST_POINTERS", 20)
    assert counts(plan(graph)) == [4, 4, 4]


def test_few_stay_apart() -> None:
    assert counts(plan(several(RAGGED[:2]))) == [1, 1]
    assert max(counts(plan(several(((0, 3), (2, 0), (1,), (2,), (3,)))))) == 1


def shares(graph: fg.Graph, x: fg.Tensor) -> fg.Tensor:
    """Returns what a pointwise kernel of its own makes."""
    return graph.exp(x / graph.reduction(x, "add"))


def test_what_needs_another_is_not_beside_it() -> None:
    g = fg.Graph("chain")
    x = g.tensor("x", (1000, 1000))
    for _ in range(6):
        x = shares(g, x @ x)
        g.output(x)
    assert max(counts(plan(g))) == 1


def test_intermediates_stay_where_they_are_read() -> None:
    g = fg.Graph("intermediates")
    made = [shares(g, g.tensor(f"x{n}", (1000, 1000))) for n in range(6)]
    for n, x in enumerate(made):
        g.output(x @ made[-1 - n], name=f"y{n}")
    assert max(counts(plan(g))) == 1


def test_nothing_waits_that_would_take_memory() -> None:
    """Each result is of an intermediate that is free again before the next one is made: they stay apart."""
    g = fg.Graph("waiting")
    for n in range(6):
        g.output(shares(g, g.cumsum(g.tensor(f"x{n}", (1000, 1000)), 0)), name=f"y{n}")
    made = plan(g)
    assert max(counts(made)) == 1
    assert made.memory.size < 2 * 4 * 1000 * 1000


def test_all_parameters_in_few_launches() -> None:
    g = fg.Graph("step")
    shapes = [s for _ in range(12) for s in ((768,), (768, 2304), (2304,), (768, 768))]
    weights = [g.tensor(f"w{n}", s, "bfloat16") for n, s in enumerate(shapes)]
    grads = [g.tensor(f"g{n}", s, "bfloat16") for n, s in enumerate(shapes)]
    optimizers.adamw(g, weights, grads, g.tensor("lr", (), "float32"), masters=True)
    made = plan(g, Options(target=target("sm_90a")))
    assert len(made.kernels) <= 5
    assert made.memory.size <= 4096


@pytest.mark.parametrize("arch", QUICK_ARCHS)
def test_kernels_compile_without_spills(arch: str) -> None:
    made = plan(several(((3,), (300,)) * 40, "bfloat16"), Options(target=target(arch)))
    specs = [k.group.lowered.spec for k in made.kernels]
    assert any(isinstance(spec, MembersSpec) for spec in specs)
    compiled([members.render(s, schedule) for s in specs for schedule in members.schedules(s, target(arch))][:3], arch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(dtype: str) -> None:
    graph = several(((3, 7), (1000, 1001), (5,), (1 << 20,), (33, 5)), dtype, twice=True)
    result = check(graph, "cuda", random_inputs(graph, 3, special=0.05))
    assert result.ok, result
