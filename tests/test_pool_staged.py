"""Pool kernels whose blocks stage a tile in shared memory: tiles of every kind, on the CPU against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import fusegraph as fg
from codegen import best_schedule, render, schedules, target
from codegen.pool.boxes import StagedSchedule, Tiles
from codegen.pool.space import index_type, normalize, widest
from codegen.spec import PoolSpec
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, random_inputs

NHWC = {"layout": "NHWC"}


def pools(shape: tuple[int, ...], dtype: str = "bfloat16", out: str | None = None, **how: Any) -> fg.Graph:
    """Builds two or three reductions of windows, each with pointwise ops around it, in one kernel."""
    layout = NHWC if how.pop("layout", None) else {}
    g = fg.Graph(f"pools {shape} {dtype} {out} {layout} {how}".translate(str.maketrans("{}'", "() ")))
    x, b = g.tensor("x", shape, dtype, **layout), g.tensor("b", (1, shape[1], *(1 for _ in shape[2:])), dtype)
    y = g.max_pool(x, **how)
    g.output(y, name="max", layout=out)
    if dtype == "int8":
        return g
    if "dilation" not in how:
        also = g.tensor("also", y.shape, dtype, strides=y.strides)
        g.output(g.avg_pool(g.relu(x + b), **how, count_include_pad=False) * also, name="mean")
    else:
        g.output(g.max_pool_index(x, **how), name="index")
    return g


def gradients(shape: tuple[int, ...], dtype: str, window: int, stride: int, **layout: Any) -> fg.Graph:
    g = fg.Graph(f"gradients {shape} {dtype} {window} {stride}")
    x = g.tensor("x", shape, dtype, **layout)
    y, how = g.max_pool(x, window, stride, 1), (window, stride, 1)
    loss = g.tensor("loss", y.shape, dtype, strides=y.strides)
    index = g.tensor("index", y.shape, "int32", strides=y.strides)
    g.output(g.max_pool_backward_index(loss, index, shape[2:], *how), name="largest")
    g.output(g.avg_pool_backward(loss, shape[2:], *how), name="mean")
    return g


def uneven(shape: tuple[int, ...], dtype: str, size: tuple[int, ...]) -> fg.Graph:
    g = fg.Graph(f"uneven {shape} {dtype} {size}")
    x, b = g.tensor("x", shape, dtype), g.tensor("b", (1, shape[1], *(1 for _ in shape[2:])), dtype)
    g.output(g.adaptive_max_pool(x, size) + b, name="max")
    if dtype != "int8":
        g.output(g.adaptive_avg_pool(g.relu(x + b), size), name="mean")
        g.output(g.adaptive_max_pool_index(x, size), name="index")
    return g


def run_staged(monkeypatch: pytest.MonkeyPatch, cases: Sequence[tuple[fg.Graph, dict[str, int]]]) -> None:
    """Runs graphs of one pool kernel each with tiles of the given sizes, in vectors if several neighbours suit."""
    made = []
    for graph, sizes in cases:

        def chosen(spec: Any, *_: Any, sizes: dict[str, int] = sizes) -> Any:
            if not isinstance(spec, PoolSpec):
                return best_schedule(spec)
            space = normalize(spec)
            itype = "int64" if sizes.get("wide") else index_type(space)
            known = {name: size for name, size in sizes.items() if name != "wide"}
            schedule = StagedSchedule(**{"vector": widest(space), "itype": itype, **known})  # type: ignore[arg-type]
            assert Tiles(space, schedule).loads
            return schedule

        monkeypatch.setattr("fusegraph.plan.best_schedule", chosen)
        executable = CpuExecutable(graph, Options(), lazy=True)
        assert executable.plan is not None
        assert any(isinstance(k.choice.schedule, StagedSchedule) for k in executable.plan.kernels)
        made.append(executable)
    build_together(made)
    for executable in made:
        result = check_executable(executable, random_inputs(executable.graph, special=0.02))
        assert result.ok, f"{executable.graph.name}: {result}"


def test_planes_with_uneven_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        (uneven((3, 7, 7, 7), "bfloat16", (6, 6)), {"planes": 4, "band": 6}),
        (uneven((2, 5, 9, 11), "float32", (4, 7)), {"planes": 3, "band": 4, "wide": 1}),
    ]
    run_staged(monkeypatch, cases)


@pytest.mark.slow
def test_planes_with_uneven_windows_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((2, 3, 9, 13), (4, 7)), ((2, 3, 5, 12), (3, 24)), ((2, 3, 6, 9), (12, 4)), ((1, 9, 13), (5,)),
        ((1, 2, 5, 7, 6), (3, 3, 4)), ((1, 1, 3, 5), (2, 2)),
    ]  # fmt: skip
    run_staged(
        monkeypatch,
        [
            (uneven(shape, dtype, size), {"planes": planes, "band": size[-2] if len(size) > 1 else size[0]})
            for shape, size in shapes
            for dtype, planes in (("float32", 2), ("bfloat16", 1), ("float64", 3), ("int8", 4))
        ],
    )


def test_small_uneven_windows_are_staged() -> None:
    def staged(shape: tuple[int, ...], size: int, **layout: Any) -> bool:
        g = fg.Graph("g")
        g.output(g.adaptive_avg_pool(g.tensor("x", shape, "bfloat16", **layout), size), name="y")
        return isinstance(best_schedule(plan(g).kernels[0].group.lowered.spec, target("h200")), StagedSchedule)

    assert staged((64, 624, 7, 7), 6)
    assert not staged((64, 624, 7, 7), 6, **NHWC)
    assert not staged((64, 32, 56, 56), 5)  # columns are folded first
    assert not staged((1, 3, 255, 255), 3)  # threads share windows


def test_tiles_of_planes_and_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes begin anywhere between two vectors; the last tile has fewer planes, or fewer rows."""
    whole = {"window": 3, "stride": 1, "padding": 1}
    halves = {"window": 3, "stride": 2, "padding": 1, "ceil_mode": True}
    run_staged(
        monkeypatch,
        [
            (pools((3, 3, 9, 11), **whole), {"planes": 4, "band": 9, "rows": 4, "cols": 5}),
            (pools((3, 3, 9, 11), "float32", **whole), {"planes": 2, "band": 4, "rows": 2, "cols": 3, "wide": 1}),
            (pools((2, 3, 9, 12), "int8", **halves), {"planes": 1, "band": 2, "rows": 2}),
            (pools((2, 3, 9, 11), "float64", **halves), {"planes": 3, "band": 4, "rows": 2, "cols": 3}),
            (pools((2, 2, 9, 11), "float16", window=3, stride=2, dilation=(2, 1)), {"planes": 1, "band": 2}),
        ],
    )


def test_tiles_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours in memory are channels: those of what is read, or of what is written alone."""
    whole = {"window": 3, "stride": 1, "padding": 1}
    run_staged(
        monkeypatch,
        [
            (pools((2, 24, 7, 9), **NHWC, **whole), {"planes": 16, "band": 4, "rows": 2, "cols": 2}),
            (pools((2, 24, 7, 9), "float32", **NHWC, window=5, stride=2, padding=2), {"planes": 24, "band": 2}),
            (pools((2, 37, 7, 9), out="NHWC", **whole), {"planes": 16, "band": 2, "rows": 2, "cols": 3}),
            (pools((2, 16, 8, 12), "float32", "NHWC", window=2), {"planes": 16, "band": 2}),
        ],
    )


def test_tiles_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks take several tiles, one, or as many as there are."""
    whole = {"window": 3, "stride": 1, "padding": 1}
    run_staged(
        monkeypatch,
        [
            (pools((3, 3, 9, 11), **whole), {"planes": 4, "band": 9, "rows": 4, "cols": 5, "blocks": 2}),
            (pools((2, 37, 7, 9), out="NHWC", **whole), {"planes": 16, "band": 2, "rows": 2, "cols": 3, "blocks": 7}),
            (pools((2, 24, 7, 9), **NHWC, **whole), {"planes": 8, "band": 2, "rows": 2, "blocks": 1}),
            (gradients((2, 3, 9, 11), "float32", 3, 2), {"planes": 1, "band": 4, "blocks": 18}),
        ],
    )


def test_largest_halves_two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of 16-bit floats, with NaN, infinities and windows of padding alone; others have one fold an element."""

    def largest(shape: tuple[int, ...], dtype: str, **how: Any) -> fg.Graph:
        g = fg.Graph(f"largest {shape} {dtype}")
        g.output(g.max_pool(g.tensor("x", shape, dtype, **NHWC), **how), name="y")
        return g

    cases = [
        (largest((2, 16, 7, 9), "bfloat16", window=3, stride=1, padding=1), {"planes": 16, "band": 4, "rows": 4}),
        (largest((2, 12, 7, 9), "float16", window=2, stride=1, padding=2), {"planes": 12, "band": 4, "cols": 3}),
        (largest((2, 6, 7, 9), "bfloat16", window=3, stride=2, padding=1), {"planes": 2, "band": 4}),
    ]
    for graph, sizes in cases:
        space = normalize(plan(graph).kernels[0].group.lowered.spec)
        assert Tiles(space, StagedSchedule(widest(space), "int32", sizes["planes"], sizes["band"])).pairs
    run_staged(monkeypatch, cases)


def test_gradients_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    run_staged(
        monkeypatch,
        [
            (gradients((2, 3, 9, 11), "bfloat16", 3, 2), {"planes": 2, "band": 4, "rows": 2, "cols": 2}),
            (gradients((2, 3, 9, 11), "float32", 3, 1), {"planes": 1, "band": 3, "rows": 3, "cols": 3}),
            (gradients((2, 8, 9, 11), "bfloat16", 3, 2, **NHWC), {"planes": 8, "band": 4, "rows": 2, "cols": 2}),
        ],
    )


def test_tiles_of_one_and_three_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    run_staged(
        monkeypatch,
        [
            (pools((2, 3, 45), window=3, stride=1, padding=1), {"planes": 2, "band": 12, "cols": 3}),
            (pools((2, 3, 45), "float16", window=4, stride=3), {"planes": 4, "band": 14}),
            (pools((2, 3, 4, 5, 7), window=2, stride=1, padding=1), {"planes": 2, "band": 6, "rows": 2, "cols": 3}),
            (pools((1, 2, 4, 8, 8), window=3, stride=2, padding=1), {"planes": 2, "band": 2, "rows": 2}),
        ],
    )


def test_where_tiles_are_staged() -> None:
    """Where rows begin anywhere, windows share much, or results lie otherwise; not where threads read vectors alone."""

    def staged(size: int, window: int, stride: int, out: str | None = None, arch: str = "h200", **layout: Any) -> bool:
        g = fg.Graph("g", io_dtype="bfloat16")
        g.output(g.avg_pool(g.tensor("x", (64, 64, size, size), **layout), window, stride), name="y", layout=out)
        (kernel,) = plan(g).kernels
        return isinstance(best_schedule(kernel.group.lowered.spec, target(arch)), StagedSchedule)

    assert staged(35, 3, 1)
    assert staged(35, 3, 2)
    assert not staged(56, 2, 2)
    assert staged(56, 2, 2, "NHWC")
    assert staged(35, 3, 1, **NHWC)
    assert not staged(35, 3, 2, **NHWC)
    assert not staged(35, 3, 1, arch="sm_75")


def test_tiles_fit_shared_memory() -> None:
    """Every schedule that is proposed fits the architecture, and has a block for every tile, or fewer blocks."""
    graphs = [pools((64, 64, 112, 113), window=3, stride=2), pools((64, 64, 56, 56), out="NHWC", window=2)]
    graphs += [gradients((8, 128, 57, 57), "float32", 3, 2), pools((8, 24, 17, 17), "float64", window=5, stride=1)]
    for graph in graphs:
        for kernel in plan(graph).kernels:
            spec = kernel.group.lowered.spec
            for name in ("sm_80", "h200", "sm_120") if isinstance(spec, PoolSpec) else ():
                for schedule in schedules(spec, target(name)):
                    source = render(spec, schedule)
                    assert source.dynamic_shared_bytes <= target(name).arch.shared_bytes_per_block
                    if isinstance(schedule, StagedSchedule) and schedule.blocks:
                        assert source.grid[0] == schedule.blocks < Tiles(normalize(spec), schedule).count
