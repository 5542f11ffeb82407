"""The workspace: where intermediates lie, what they share, its limit; what options do to it."""

from __future__ import annotations

from typing import Any

import pytest
from graphs import executables, recipes, seeded
from hypothesis import HealthCheck, given, settings
from test_fuzz import BATCH

import fusegraph as fg
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.errors import WorkspaceError
from fusegraph.layout import extent
from fusegraph.lowering.base import Options
from fusegraph.passes.memory import ALIGNMENT
from fusegraph.plan import Plan, plan
from fusegraph.report.check import check_executable


def chain(length: int, size: int = 1000) -> fg.Graph:
    g = fg.Graph("chain")
    x = g.tensor("x", (size,))
    for k in range(length):
        x = g.sigmoid(x, name=f"step {k}")
    g.output(x)
    return g


def test_intermediates_share_memory() -> None:
    aligned = -(-4000 // ALIGNMENT) * ALIGNMENT
    assert plan(chain(2), fusion=False).memory.size == aligned
    for length in (3, 4, 9):
        assert plan(chain(length), fusion=False).memory.size == 2 * aligned
    assert plan(chain(5)).memory.size == 0


def test_workspace_limit() -> None:
    need = plan(chain(6), fusion=False).memory.size
    assert chain(6).compile("cpu", fusion=False, workspace_limit=need).workspace_bytes == need
    with pytest.raises(WorkspaceError) as raised:
        chain(6).compile("cpu", fusion=False, workspace_limit=need - 1)
    text = str(raised.value)
    assert all(part in text for part in ("graph 'chain'", str(need), str(need - 1), "'step ", "[1000]", "4000 bytes"))
    assert chain(6).compile("cpu", workspace_limit=0).workspace_bytes == 0


def check_memory(found: Plan) -> None:
    """Checks that intermediates are within the workspace, aligned, and share no byte with others alive at the same
    time.
    """
    steps = found.partition.groups
    outputs = set(found.simplified.outputs)
    life: dict[fg.Tensor, list[int]] = {}
    for step, group in enumerate(steps):
        for tensor in (*group.writes, *group.reads):
            made = found.simplified.producer(tensor.base)  # a view lies in the memory of something else
            if found.simplified.producer(tensor) is not None and made is not None and tensor.base not in outputs:
                life.setdefault(tensor.base, []).append(step)
    assert life.keys() == found.memory.offsets.keys()
    spans = {}
    for tensor, at in found.memory.offsets.items():
        end = at + extent(tensor.shape, tensor.strides) * tensor.dtype.itemsize
        assert at % ALIGNMENT == 0
        assert 0 <= at <= end <= found.memory.size
        first, last = spans.get(tensor.base, (at, end))
        spans[tensor.base] = min(first, at), max(last, end)
    tensors = list(life)
    for k, s in enumerate(tensors):
        for t in tensors[:k]:
            together = min(life[s]) <= max(life[t]) and min(life[t]) <= max(life[s])
            shared = spans[s][0] < spans[t][1] and spans[t][0] < spans[s][1]
            assert not (together and shared), f"{s} and {t} share memory"


@settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
@given(recipes())
@pytest.mark.slow
def test_memory_plans_of_random_graphs(recipe: Any) -> None:
    graph = recipe.build()
    check_memory(plan(graph, fusion=False))
    check_memory(plan(graph))


@pytest.mark.slow
def test_memory_plans_use_what_becomes_free() -> None:
    """A plan is not the sum of all intermediates where these live one after another."""
    saved = 0
    for seed in range(60):
        found = plan(seeded(seed).build(), fusion=False)
        total = sum(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in found.memory.offsets)
        saved += found.memory.size < total
    assert saved > 20


@pytest.mark.slow
def test_kernels_do_not_rely_on_their_workspace() -> None:
    """One kernel a node: intermediates in a workspace that holds NaN patterns before every call."""
    given_recipes = [seeded(seed) for seed in range(7000, 7000 + 2 * BATCH)]
    made = executables([r.build() for r in given_recipes], fusion=False)
    assert max(e.workspace_bytes for e in made) > 0
    for recipe, executable in zip(given_recipes, made):
        result = check_executable(executable, recipe.inputs(executable.graph))
        assert result.ok, f"{result}\n{recipe}"


def test_options_reach_the_engine() -> None:
    g = chain(3)
    assert len(g.compile("cpu", fusion=False).plan.kernels) == 3  # type: ignore[union-attr]
    assert len(g.compile("cpu").plan.kernels) == 1  # type: ignore[union-attr]
    strict = g.compile("cpu", strict=True)
    assert strict.plan.partition.groups[0].lowered.spec.program.exact  # type: ignore[union-attr]
    assert CpuExecutable(g, Options(alignment=1)).plan.kernels[0].source.code  # type: ignore[union-attr]
