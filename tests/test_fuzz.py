"""Random graphs of pointwise nodes, reductions, convolutions, their gradients and matmuls: fused kernels against the
reference.

A failing graph is printed as builder code, as small as it can be made.  With FUSEGRAPH_FUZZ=random in the environment
the graphs differ from run to run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from graphs import (
    DTYPES,
    Recipe,
    WrongGraph,
    check_recipes,
    compile_for,
    failure,
    gpu_executables,
    recipes,
    seeded,
    share,
    undecided_share,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from recipes import varying

from codegen.families import FORMS
from codegen.pointwise import PointwiseSchedule, TilesSchedule
from codegen.pointwise import schedule as pointwise_schedule
from codegen.pointwise import vectors as pointwise_vectors
from codegen.spec import KernelSource, PointwiseSpec
from fusegraph.engines.base import Executable
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.lowering.base import Options
from fusegraph.lowering.program import ProgramBuilder
from fusegraph.ops import TABLE, Kind
from fusegraph.ops.assign import ASSIGN
from fusegraph.passes import fuse as fusing
from fusegraph.passes import memory, simplify
from fusegraph.pattern import op
from fusegraph.report.check import check_executable, run

#: Graphs built by one call of the host compiler.
BATCH = 12
#: More undecided elements than this, and the fuzz would be a test that cannot fail.
MOST_UNDECIDED = 0.2

FUZZ = settings(
    max_examples=17,
    deadline=None,
    derandomize=os.environ.get("FUSEGRAPH_FUZZ") != "random",
    phases=(Phase.explicit, Phase.generate),  # failing graphs are made smaller by `graphs.smaller`
    suppress_health_check=list(HealthCheck),
)


def batches(seeds: range, **how: Sequence[str]) -> list[list[Recipe]]:
    every = [seeded(seed, **how) for seed in seeds]
    return [every[k : k + BATCH] for k in range(0, len(every), BATCH)]


def test_a_few_random_graphs() -> None:
    given = [seeded(seed) for seed in range(24)]
    results = check_recipes(given)
    assert undecided_share(results, [r.build() for r in given]) < MOST_UNDECIDED


@pytest.mark.slow
def test_random_graphs_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few threads a block, these small tensors take the schedules of large ones."""
    for module in (pointwise_schedule, pointwise_vectors):
        monkeypatch.setattr(module, "THREADS", 32)
    monkeypatch.setattr(pointwise_schedule, "ENOUGH_BLOCKS", 1 / 132)
    for batch in batches(range(1000, 1032)):
        check_recipes(batch)


def varied(seeds: range) -> list[Recipe]:
    """Returns random graphs in which some sizes are Dims."""
    found = [made for seed in seeds if (made := varying(seeded(seed, themes=("pointwise", "rows")))) is not None]
    assert len(found) > len(seeds) // 2
    return found


def test_a_random_graph_of_sizes_that_vary() -> None:
    check_recipes(varied(range(6001, 6003)))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(6000, 6040, 8))
def test_random_graphs_of_sizes_that_vary(start: int) -> None:
    check_recipes(varied(range(start, start + 8)))


@pytest.mark.slow
def test_random_graphs() -> None:
    checked, shares = 0, []

    @FUZZ
    @given(st.lists(recipes(), min_size=BATCH, max_size=BATCH))
    def some(given: list[Recipe]) -> None:
        nonlocal checked
        results = check_recipes(given)
        checked += len(given)
        shares.append(undecided_share(results, [r.build() for r in given]))

    some()
    assert checked >= 200
    assert sum(shares) / len(shares) < MOST_UNDECIDED


@pytest.mark.slow
def test_the_generator_reaches_everything() -> None:
    """Every op, dtype and special feature comes up within some hundred graphs."""
    ops, dtypes, several, shared, anchors, masks, layouts, strict = set(), set(), 0, 0, 0, 0, 0, 0
    for seed in range(900):
        recipe = seeded(seed)
        graph = recipe.build()
        ops |= {n.op.name for n in graph.nodes}
        dtypes |= {t.dtype.name for t in graph.tensors.values()}
        several += len(graph.outputs) > 1
        shared += any(len(graph.consumers(n.output)) > 1 for n in graph.nodes)
        anchors += any(n.kind is Kind.CONTRACTION for n in graph.nodes)
        masks += any(n.op.name == "binary_select" for n in graph.nodes)
        layouts += "strides=" in str(recipe) or "channels_last" in str(recipe)
        strict += recipe.strict
    # Targets of those are classes, of which random integers are none; which elements these prune hangs on roundings.
    heads = {"linear_cross_entropy", "linear_cross_entropy_backward"}
    assert {*TABLE, ASSIGN.name} - ops == heads | {"sparse_2_4", "sparse_2_4_mask", "sparse_2_4_compress"}
    assert len(dtypes) == len(DTYPES)
    assert min(several, shared, anchors, masks, layouts, strict) > 60


def check_same_bits(recipe: Recipe, one: Executable, other: Executable) -> None:
    """Checks that two executables give the same bits, NaN aside."""
    inputs = recipe.inputs(one.graph)
    results, expected = run(one, inputs), run(other, inputs)
    for tensor in one.graph.outputs:
        a, b = results[tensor.name], expected[tensor.name]
        same = (a.view(f"u{a.itemsize}") == b.view(f"u{b.itemsize}")) | ((a != a) & (b != b))
        assert same.all(), f"{tensor.name} differs in {(~same).sum()} elements\n{recipe}"


@pytest.mark.slow
def test_strict_gives_the_bits_of_unfused_kernels() -> None:
    """Fused in strict mode and one kernel a node: the same bits, NaN aside, for graphs of pointwise nodes."""
    kernels = [0, 0]
    for batch in batches(range(5000, 5048), themes=("pointwise",)):
        graphs = [recipe.build() for recipe in batch]
        fused = [CpuExecutable(g, Options(strict=True), lazy=True) for g in graphs]
        alone = [CpuExecutable(g, Options(strict=True), fusion=False, lazy=True) for g in graphs]
        build_together([*fused, *alone])
        for recipe, one, other in zip(batch, fused, alone):
            check_same_bits(recipe, one, other)
            kernels[0] += len(one.plan.kernels)
            kernels[1] += len(other.plan.kernels)
    assert kernels[0] * 2 < kernels[1]


# ---- the fuzz notices


def no_rounding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProgramBuilder, "_round", lambda self, name, value, dtype: value)


def product_slightly_off(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(TABLE["mul"].cuda, "float", "{a} * {b} * 1.000001f")


def select_swapped(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(TABLE["binary_select"].cuda, "float", "{mask} ? {input1} : {input0}")


def intermediates_overlap(patch: pytest.MonkeyPatch) -> None:
    """Makes intermediates overlap, in graphs that are not fused: fused ones rarely have two intermediates at a time."""
    original, fuse = memory.plan_memory, fusing.fuse
    patch.setattr("fusegraph.plan.fuse", lambda graph, options, **_: fuse(graph, options, enabled=False))
    patch.setattr("fusegraph.plan.plan_memory", lambda *given: _all_at_zero(original(*given)))


def _all_at_zero(found: memory.MemoryPlan) -> memory.MemoryPlan:
    return memory.MemoryPlan(found.size, dict.fromkeys(found.offsets, 0), parts=(0,))


def subtracting_one_is_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(simplify._OF, TABLE["sub"], [(op.sub("x", ...), "x")])


def last_block_missing(patch: pytest.MonkeyPatch) -> None:
    for form in (FORMS[PointwiseSchedule], FORMS[TilesSchedule]):

        def shorter(spec: PointwiseSpec, schedule: Any, original: Any = form.render) -> KernelSource:
            source: KernelSource = original(spec, schedule)
            blocks = source.grid[0]
            return replace(source, grid=(max(blocks - 1, min(blocks, 1)), *source.grid[1:]))

        patch.setattr(form, "render", shorter)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation",
    [
        no_rounding, product_slightly_off, select_swapped, intermediates_overlap, subtracting_one_is_nothing,
        last_block_missing,
    ],
)  # fmt: skip
def test_a_defect_is_found(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    for start in count(0, BATCH):
        assert start < 20 * BATCH, "a few hundred random graphs pass in spite of the defect"
        found = None
        try:
            check_recipes([seeded(seed) for seed in range(start, start + BATCH)])
        except WrongGraph as error:
            found = error
        if found is not None:
            assert failure(found.recipe)
            assert len(found.recipe.lines) <= 12, f"this can be made smaller:\n{found.recipe}"
            assert "\n".join(found.recipe.lines) in str(found)
            return


# ---- CUDA


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_random_graphs_compile_for_gpus(arch: str) -> None:
    compiled = compile_for(arch, share(arch, [seeded(seed).build() for seed in range(15)]))
    assert len(compiled) > 5
    # Known: on sm_80 the SIMT kernel of attention's gradients spills one register, with 32 in use.
    assert [k.name for k in compiled if k.spill_bytes > 8] == []


@pytest.mark.gpu
def test_random_graphs_on_the_gpu() -> None:
    results, graphs, wrong = [], [], []
    for strict in (False, True):
        given = [r for r in map(seeded, range(300)) if r.strict == strict]
        made = gpu_executables([r.build() for r in given], strict=strict)
        for recipe, executable in zip(given, made):
            result = check_executable(executable, recipe.inputs(executable.graph), strict=strict)
            results.append(result)
            graphs.append(executable.graph)
            if not result.ok:
                wrong.append(f"{result}\n{recipe}")
    assert not wrong, "\n\n".join(wrong[:5])
    assert len(results) == 300
    assert undecided_share(results, graphs) < MOST_UNDECIDED


@pytest.mark.gpu
def test_strict_gives_the_bits_of_unfused_kernels_on_the_gpu() -> None:
    given = [seeded(seed, themes=("pointwise",)) for seed in range(5000, 5096)]
    graphs = [r.build() for r in given]
    fused, alone = (gpu_executables(graphs, strict=True, fusion=fusion) for fusion in (True, False))
    for recipe, one, other in zip(given, fused, alone):
        check_same_bits(recipe, one, other)
