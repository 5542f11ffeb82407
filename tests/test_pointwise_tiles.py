"""Pointwise kernels in tiles: operands that lie across each other in memory, of every shape, dtype and combination."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import QUICK_ARCHS, check_all, check_on_gpu, share
from kernel_cases import Case, check_cases

import fusegraph as fg
from codegen import best_schedule, render, schedule_data, schedule_from_data, schedules
from codegen.dtypes import ALL
from codegen.pointwise import schedule as pointwise_schedule
from codegen.pointwise import tiling as pointwise_tiling
from codegen.pointwise.tiling import TilesSchedule, Tiling
from codegen.spec import KernelSource, PointwiseSpec
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache

pytestmark = pytest.mark.slow

Shape = tuple[int, ...]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets small tensors take the tiles of large ones."""
    monkeypatch.setattr(pointwise_tiling, "ENOUGH_ELEMENTS", 1)
    monkeypatch.setattr(pointwise_tiling, "ENOUGH_TILES", 1 / 132)
    monkeypatch.setattr(pointwise_schedule, "ENOUGH_BLOCKS", 1 / 132)


def strides(shape: Shape, order: Sequence[int], pad: int = 0) -> Shape:
    """Returns the strides of a tensor stored in the dimension order ``order``, slowest first, with ``pad`` elements
    after each row.
    """
    result, step = [0] * len(shape), 1
    for dim in reversed(order):
        result[dim] = step
        step = step * shape[dim] + (pad if dim == order[-1] else 0)
    return tuple(result)


def permuted(shape: Shape, order: Sequence[int], dtype: str = "float32", pad: int = 0) -> fg.Graph:
    """Builds y = -x, with x in another dimension order than y."""
    g = fg.Graph("permuted", io_dtype=dtype)
    x = g.tensor("x", shape, strides=strides(shape, order, pad))
    g.output(g.logical_not(x) if dtype == "bool" else g.neg(x), name="y", strides=strides(shape, range(len(shape))))
    return g


def added(shape: Shape, dtype: str = "float32", other: str | None = None) -> fg.Graph:
    """Builds y = a + b, b transposed."""
    g = fg.Graph("added", io_dtype=dtype)
    a = g.tensor("a", shape)
    b = g.tensor("b", shape, other or dtype, strides=strides(shape, (*range(len(shape) - 2), -1, -2)))
    y = g.logical_or(a, b) if dtype == "bool" else a + b
    g.output(y, name="y", dtype=dtype, strides=strides(shape, range(len(shape))))
    return g


def only_spec(graph: fg.Graph, **options: Any) -> PointwiseSpec:
    (group,) = plan(graph, Options(**options)).partition.groups
    assert isinstance(group.lowered.spec, PointwiseSpec)
    return group.lowered.spec


def chosen(graph: fg.Graph) -> Tiling:
    """Returns the tiles chosen for a graph's only kernel."""
    spec = only_spec(graph)
    schedule = best_schedule(spec)
    assert isinstance(schedule, TilesSchedule), schedule
    return Tiling(spec, schedule)


# ---- numbers


def shape_cases() -> list[fg.Graph]:
    sizes = [(1, 700), (2, 300), (3, 1000), (1000, 3), (7, 130), (130, 7), (11, 200), (49, 64), (64, 49), (65, 63),
             (64, 64), (128, 72), (257, 33), (16, 2050)]  # fmt: skip
    graphs = [permuted(shape, (1, 0), dtype) for shape in sizes for dtype in ("float32", "bfloat16")]
    threes = [(5, 8, 8), (300, 3, 5), (2, 33, 100), (9, 49, 64), (4, 64, 49), (40, 3, 130)]
    graphs += [permuted(shape, order, "float16") for shape in threes for order in ((0, 2, 1), (2, 1, 0), (1, 2, 0))]
    graphs += [permuted((4, 6, 10, 12), order, "int8") for order in itertools.permutations(range(4)) if order[-1] != 3]
    return graphs


def test_shapes(small: None) -> None:
    graphs = shape_cases()
    forms = {type(best_schedule(only_spec(g))) for g in graphs[2:]}
    assert forms == {TilesSchedule}
    check_all(graphs)


def dtype_cases() -> list[fg.Graph]:
    graphs = [permuted(s, (1, 0), d.name) for d in ALL for s in ((96, 144), (33, 70))]
    graphs += [added((72, 136), d.name) for d in ALL]
    pairs = [("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "int8"), ("int8", "int64"), ("bool", "bool")]
    graphs += [added((65, 130), first, second) for first, second in pairs]
    return graphs


def test_dtypes(small: None) -> None:
    check_all(dtype_cases())


def combination_cases() -> list[fg.Graph]:
    """Builds graphs with several operands in either order, with more outputs, broadcasts and indices."""
    graphs = []
    for dtype, layouts in itertools.product(("bf16", "float32"), itertools.product(("NCHW", "NHWC"), repeat=4)):
        g = fg.Graph("images", io_dtype=dtype)
        a, b = (g.tensor(n, (2, 24, 5, 7), layout=k) for n, k in zip("ab", layouts))
        scale = g.tensor("scale", (24, 1, 1))
        g.output(g.sigmoid(a * scale) + b, name="y", layout=layouts[2])
        g.output(a - g.tensor("row", (5, 7)), name="z", layout=layouts[3])
        graphs.append(g)
    g = fg.Graph("three orders")
    shape = (12, 20, 28)
    x, y, z = (g.tensor(n, shape, strides=strides(shape, o)) for n, o in zip("xyz", ((0, 1, 2), (1, 2, 0), (0, 2, 1))))
    g.output(x + y * z, name="out")
    graphs.append(g)
    g = fg.Graph("indices", io_dtype="bf16")
    x = g.tensor("x", (30, 3, 50), strides=strides((30, 3, 50), (0, 2, 1)))
    g.output(x + g.gen_index(x, axis=0) * 4 + g.gen_index(x, axis=2), name="y")
    g.output(g.gen_index(x, axis=1) - x, name="z", strides=strides((30, 3, 50), (0, 2, 1)))
    graphs.append(g)
    for pads in itertools.product((0, 1, 8), repeat=3):
        g = fg.Graph("padded", io_dtype="fp16")
        a = g.tensor("a", (40, 72), strides=strides((40, 72), (0, 1), pads[0]))
        b = g.tensor("b", (40, 72), strides=strides((40, 72), (1, 0), pads[1]))
        g.output(a - b, name="y", strides=strides((40, 72), (0, 1), pads[2]))
        g.output(a + b, name="z", strides=strides((40, 72), (1, 0), pads[0]))
        graphs.append(g)
    g = fg.Graph("repeated")  # b is the same for every image
    a, b = g.tensor("a", (6, 33, 40)), g.tensor("b", (33, 40), strides=(1, 33))
    g.output(a * b + g.tensor("s", ()) - g.tensor("image", (6, 1, 1)) + g.tensor("col", (40,)), name="y")
    graphs.append(g)
    return graphs


def test_combinations(small: None) -> None:
    check_all(combination_cases())


def test_strict_and_computing_in_float64(small: None) -> None:
    check_all([added((40, 72), "bf16", "fp16")], strict=True)
    g = fg.Graph("wide", compute_dtype="float64")
    a, b = g.tensor("a", (40, 72)), g.tensor("b", (40, 72), strides=(1, 40))
    g.output((a + 1e6) - 1e6 + b, name="y")
    check_all([g])


@pytest.mark.parametrize("alignment", [16, 4, 1])
def test_no_access_outside_of_arrays(small: None, alignment: int) -> None:
    graphs = [g for g in combination_cases()[::5] if "wide" not in g.name]
    graphs += [permuted((33, 70), (1, 0), d) for d in ("bfloat16", "int8", "float64")]
    graphs += [permuted((50, 3, 100), (0, 2, 1), pad=1), permuted((9, 49, 24), (0, 2, 1), "fp16"), added((65, 130))]
    check_cases([Case(g, options=Options(alignment=alignment)) for g in graphs], guard=True)


def test_empty_and_single_elements(small: None) -> None:
    shapes: list[Shape] = [(0, 5), (5, 0), (1, 1), (3, 0, 2), (1, 1, 4), (4, 1, 1)]
    check_all([permuted(s, tuple(reversed(range(len(s))))) for s in shapes])


def test_offsets_beyond_32_bits(small: None) -> None:
    spec = only_spec(permuted((2**16, 2**16 + 8), (1, 0), "int8"))
    schedule = best_schedule(spec)
    assert isinstance(schedule, TilesSchedule)
    assert schedule.itype == "uint64"
    graph = added((40, 72), "bf16")
    schedule = best_schedule(only_spec(graph))
    check_schedules(graph, [TilesSchedule(**{**schedule.__dict__, "itype": "uint64"})])


# ---- every schedule


def check_schedules(graph: fg.Graph, schedules: Sequence[TilesSchedule]) -> None:
    """Runs a graph's kernel with each schedule, in both orders of threads."""
    from test_pointwise_schedules import run_source

    from fusegraph.engines.cpu import CpuExecutable
    from fusegraph.runtime import host_compiler

    executable = CpuExecutable(graph, Options(), lazy=True)
    spec = only_spec(graph)
    sources = [render(spec, s) for s in schedules]
    module = host_compiler.build(sources, cache=default_cache())
    for number, (schedule, source) in enumerate(zip(schedules, sources)):
        wrong = run_source(executable, module, number)
        assert not wrong, f"{schedule}: {wrong[0]}\n{source.code}"


def test_schedules_to_try(small: None) -> None:
    graphs = [added((136, 264), "bf16"), permuted((2, 300, 3), (0, 2, 1)), permuted((150, 270), (1, 0), "int8")]
    for graph in graphs:
        spec = only_spec(graph)
        every = list(schedules(spec))
        assert every[0] == best_schedule(spec)
        assert len(set(every)) == len(every) >= 2
        assert all(schedule_from_data(json.loads(json.dumps(schedule_data(s)))) == s for s in every)
        check_schedules(graph, [s for s in every if isinstance(s, TilesSchedule)])


def test_tiles_are_taken_where_they_help() -> None:
    def form(graph: fg.Graph) -> str:
        return type(best_schedule(only_spec(graph))).__name__

    assert form(permuted((1024, 1024), (1, 0))) == "TilesSchedule"
    assert form(permuted((16, 16), (1, 0))) == "PointwiseSchedule"  # nothing to gain
    assert form(permuted((1024, 1024), (0, 1), pad=3)) == "PointwiseSchedule"
    assert form(permuted((16, 512, 16, 64), (0, 2, 1, 3))) == "PointwiseSchedule"  # rows of 64 stay together
    g = fg.Graph("column")
    g.output(g.tensor("a", (1024, 1024)) + g.tensor("c", (1024, 1)), name="y")
    assert form(g) == "PointwiseSchedule"


def test_the_majority_is_read_directly() -> None:
    g = fg.Graph("mostly transposed")
    shape = (1024, 1024)
    a, b, c = (g.tensor(n, shape, strides=(1, 1024)) for n in "abc")
    g.output(a + b + c, name="y", strides=(1024, 1))
    tiling = chosen(g)
    assert [tiling.program.operands[n].name for n in tiling.stages] == ["y"]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int8"])
def test_tiles_suit_every_extent(dtype: str) -> None:
    """Threads and shared memory are not wasted on shapes with short sides, and accesses are wide where they can be."""
    size = fg.Graph("s", io_dtype=dtype).tensor("t", (1,)).dtype.itemsize
    wide = [(1 << 20, 2), (1 << 20, 3), (3, 1 << 20), (1 << 20, 7), (100000, 96), (8192, 8192), (4000, 1008)]
    cases = [(s, (1, 0)) for s in wide] + [((1000, 72, 72), (0, 2, 1)), ((50000, 16, 16), (0, 2, 1)),
                                           ((256, 512, 49), (0, 2, 1)), ((256, 49, 512), (0, 2, 1))]  # fmt: skip
    for shape, order in cases:
        tiling = chosen(permuted(shape, order, dtype))
        s = tiling.schedule
        blocks = prod(tiling.shape[: s.outer]) * -(-tiling.height // s.rows) * -(-tiling.width // s.cols)
        assert blocks * s.rows * s.cols <= 1.15 * prod(shape), (shape, s)
        assert tiling.shared_bytes <= 32768 * 1.1
        (stage,) = tiling.stages.values()
        least = 8 if dtype == "int8" else 16
        assert s.vector * size >= least, (shape, s)
        assert stage.vector * size >= least, (shape, s)


# ---- shared memory


def bank_ways(addresses: Sequence[int], width: int) -> int:
    """Returns the largest number of different words of one bank that a warp's accesses of ``width`` bytes ask for."""
    phase = min(32, 128 // width)  # lanes served at once
    most = 1
    for start in range(0, 32, phase):
        banks: dict[int, set[int]] = {}
        for address in addresses[start : start + phase]:
            for byte in range(address, address + width):
                banks.setdefault(byte // 4 % 32, set()).add(byte // 128)
        most = max(most, *(len(lines) for lines in banks.values()))
    return most


def shared_accesses(source: KernelSource) -> Iterator[tuple[str, list[int], int]]:
    """Yields every access to shared memory in a kernel's source: its line, the addresses of each warp's lanes, its
    width.
    """
    sizes = {"double": 8, "int64": 8, "float": 4, "int32": 4, "float16": 2, "bfloat16": 2}
    tiles = {n: sizes.get(t, 1) for t, n in re.findall(r"__shared__ __align__\(16\) (\w+) (\w+)\[", source.code)}
    values: list[tuple[str, str]] = []
    for line in source.code.splitlines():
        values += re.findall(r"(\w+) = ([^=;<>?]*?)(?:, (?=col)|;)", line) if "const uint32" in line else []
        if line.strip().startswith("for (int u"):
            values = [(n, v) for n, v in values if n in ("block", "row0", "col0")]
        for name, size in tiles.items():
            found = re.search(rf"(load|store)_shared(?:<(\d+)>)?\({name} \+ (.*?)(?:, \w+)?\)", line)
            single = re.search(rf"\b{name}\[([^\]]*)\]", line)
            if (found is None and single is None) or "__shared__" in line:
                continue
            wide = re.search(r"Vector<\w+, (\d+)> \w+ = load_shared", line)
            count = int(wide[1]) if wide else 16 // size if found else 1
            text = found[3] if found else single[1]  # type: ignore[index]
            for u, warp, e in itertools.product((0, 1), range(8), (0, 1)):
                addresses = []
                for lane in range(32):
                    scope: dict[str, Any] = {"u": u, "e": e, "row0": 0, "col0": 0, "threadIdx_x": warp * 32 + lane}
                    for known, value in values:
                        if known not in ("block", "row0", "col0"):
                            scope[known] = eval(_python(value), {}, scope)
                    addresses.append(eval(_python(text), {}, scope) * size)
                yield line.strip(), addresses, min(16, count * size)


def _python(text: str) -> str:
    return text.replace("threadIdx.x", "threadIdx_x").replace("/", "//")


def conflicts(graph: fg.Graph) -> dict[str, int]:
    ways: dict[str, int] = {}
    for line, addresses, width in shared_accesses(only_source(graph)):
        ways[line] = max(ways.get(line, 1), bank_ways(addresses, width))
    return ways


def only_source(graph: fg.Graph) -> KernelSource:
    return render(only_spec(graph))


def test_bank_ways_counts() -> None:
    assert bank_ways([4 * lane for lane in range(32)], 4) == 1
    assert bank_ways([128 * lane for lane in range(32)], 4) == 32
    assert bank_ways([16 * lane for lane in range(32)], 4) == 4
    assert bank_ways([16 * lane for lane in range(32)], 16) == 1
    assert bank_ways([2 * lane for lane in range(32)], 2) == 1


FREE: dict[str, Callable[[], fg.Graph]] = {
    **{f"square {d}": partial(added, (2048, 2048), d) for d in ("float64", "float32", "bfloat16", "int8")},
    **{f"odd {d}": partial(added, (2047, 2049), d) for d in ("float64", "float32", "bfloat16", "int8")},
    **{f"odd rows {d}": partial(added, (2047, 2048), d) for d in ("float32", "bfloat16")},
    **{f"odd cols {d}": partial(added, (2048, 2047), d) for d in ("float32", "bfloat16")},
    "4 divides": partial(added, (2044, 2044), "bfloat16"),
    "mixed": partial(added, (2048, 2048), "bfloat16", "float32"),
    "mixed the other way": partial(added, (2048, 2048), "float32", "bfloat16"),
    "images": partial(permuted, (64, 256, 56, 56), (0, 2, 3, 1), "bfloat16"),
    "images to NHWC": partial(permuted, (64, 56, 56, 256), (0, 3, 1, 2), "float32"),
    "planes of 49": partial(permuted, (64, 256, 49), (0, 2, 1), "float32"),
}


@pytest.mark.parametrize("name", list(FREE))
def test_no_bank_is_asked_twice(name: str) -> None:
    ways = conflicts(FREE[name]())
    assert len(ways) >= 2  # or nothing was found in the source
    wide = name == "mixed"  # 8 floats a vector: 32 bytes from one lane's to the next one's
    assert set(ways.values()) == ({1, 2} if wide else {1}), ways


@pytest.mark.parametrize("cols", [2, 3, 5, 6, 7, 12, 16, 49])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_conflicts_with_short_rows(cols: int, dtype: str) -> None:
    ways = conflicts(permuted((1 << 18, cols), (1, 0), dtype))
    assert max(ways.values()) <= 2, ways


# ---- source


def golden_graphs() -> dict[str, fg.Graph]:
    images = fg.Graph("nchw_to_nhwc", io_dtype="bf16")
    x = images.tensor("x", (64, 256, 56, 56))
    images.output(images.identity(x), name="y", layout="NHWC")
    rgb = fg.Graph("rgb_planes")
    x = rgb.tensor("pixels", (16, 3, 225, 225), "uint8", layout="NHWC")
    mean = rgb.tensor("mean", (3, 1, 1))
    rgb.output((x - mean) / 255.0, name="planes", layout="NCHW")
    added_ = fg.Graph("add_transposed")
    a, b = added_.tensor("a", (8192, 8192)), added_.tensor("b", (8192, 8192), strides=(1, 8192))
    added_.output(a + b, name="y")
    return {g.name: g for g in (images, rgb, added_)}


@pytest.mark.parametrize("name", list(golden_graphs()))
def test_golden_source(name: str) -> None:
    (kernel,) = plan(golden_graphs()[name]).kernels
    check_golden(name, kernel.source.code)


def compiled(sources: Sequence[KernelSource], arch: str) -> list[nvrtc.CompiledKernel]:
    kernels = nvrtc.compile_kernels(sources, arch, cache=default_cache())
    wrong = [
        f"{k.registers} registers, {k.spill_bytes} spilled, stack {k.stack_bytes}\n{s.code}"
        for k, s in zip(kernels, sources)
        if k.spill_bytes or k.stack_bytes or k.registers > 128 or k.shared_bytes > 49152
    ]
    assert not wrong, "\n".join(wrong)
    return kernels


@pytest.mark.parametrize("arch", QUICK_ARCHS)
def test_sources_compile_without_spills(arch: str) -> None:
    compiled([only_source(g) for g in (*golden_graphs().values(), added((2047, 2049), "int8"))], arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_every_case_compiles_without_spills(small: None, arch: str) -> None:
    graphs = [make() for make in FREE.values()] + dtype_cases()[::2] + combination_cases()[::3]
    compiled([render(only_spec(g)) for g in share(arch, graphs)], arch)


@pytest.mark.gpu
def test_tiles_on_the_gpu(small: None) -> None:
    check_on_gpu([*shape_cases(), *dtype_cases(), *combination_cases()])
    check_on_gpu(combination_cases()[::4], alignment=1)
    large = [permuted((16, 256, 28, 28), (0, 2, 3, 1), "bfloat16"), added((1023, 1025)), added((1024, 2048), "int8")]
    check_on_gpu(large)


def test_names_of_a_graph_do_not_meet_those_of_the_kernel(small: None) -> None:
    g = fg.Graph("row")
    shape = (40, 72)
    names = ["row", "col", "at", "t", "y_tile", "row0", "end", "block", "k", "u", "piece"]
    total = g.tensor("r", shape, strides=(1, 40))
    for n, name in enumerate(names):
        total = total + g.tensor(name, shape, strides=(1, 40) if n % 2 else None)
    g.output(total, name="y", strides=(1, 40))
    g.output(total * 2, name="c")
    check_all([g])
    compiled([only_source(g)], "sm_90a")


def test_inputs_of_numpy_in_either_order(small: None) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((70, 90), np.float32), rng.standard_normal((90, 70), np.float32)
    g = fg.Graph("numpy")
    g.output(g.tensor("a", (70, 90)) + g.tensor("b", (70, 90), strides=(1, 70)), name="y")
    np.testing.assert_array_equal(g.compile("cpu")(a, np.ascontiguousarray(b).T), a + b.T)
