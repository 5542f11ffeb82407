"""The pointwise family: broadcasts, strides, alignment, guards around every array, and the source it emits."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import QUICK_ARCHS, check_all, check_on_gpu, executables

import fusegraph as fg
from codegen.cpu import GuardedArray
from codegen.spec import KernelSource, PointwiseSpec
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, compare, laid_out, random_inputs, rounding_of, run
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache

Array = np.ndarray[Any, Any]
RAGGED = (1, 2, 3, 7, 31, 255, 256, 257, 1023, 1025, 4099)


def one(shapes: dict[str, tuple[int, ...]], body: Callable[..., Any], **how: Any) -> fg.Graph:
    """Builds a graph whose only output is ``body`` of inputs of these shapes."""
    g = fg.Graph("case", **how)
    g.output(body(g, *(g.tensor(name, shape) for name, shape in shapes.items())), name="y")
    return g


def only_spec(graph: fg.Graph, **options: Any) -> PointwiseSpec:
    (group,) = plan(graph, Options(**options)).partition.groups
    assert isinstance(group.lowered.spec, PointwiseSpec)
    return group.lowered.spec


# ---- guards: no access outside of the arrays, everything written


def poison(array: Array) -> Array:
    """Returns an array of the same layout in which every bit is set: NaN in every float dtype."""
    span = sum((n - 1) * s for n, s in zip(array.shape, array.strides)) + array.itemsize if array.size else 0
    filled = np.full(max(span, 1), 0xFF, np.uint8)
    return np.ndarray(array.shape, array.dtype, filled, strides=array.strides)


def check_guarded(made: Sequence[CpuExecutable]) -> None:
    """Runs executables on arrays between inaccessible pages; checks the results, and that nothing else was written."""
    for executable, flush in itertools.product(made, ("end", "start")):
        graph, alignment = executable.graph, executable._options.alignment
        inputs = random_inputs(graph, seed=3)
        guarded = [
            GuardedArray(
                inputs[t.name], flush=flush, alignment=max(alignment, t.dtype.itemsize), writable=False, name=t.name
            )
            for t in graph.inputs
        ]
        outputs = [
            GuardedArray(
                poison(laid_out(np.zeros(t.shape), t)),
                flush=flush,
                alignment=max(alignment, t.dtype.itemsize),
                name=t.name,
            )
            for t in graph.outputs
        ]
        executable(*(g.array for g in guarded), out=[g.array for g in outputs])
        results = {t.name: g.array for t, g in zip(graph.outputs, outputs)}
        wrong = [c for c in compare(graph, inputs, results, rounding_of(executable)) if not c.ok]
        assert not wrong, f"{wrong}\n{executable.plan.kernels[0].source.code}"
        assert [g.damage() for g in (*guarded, *outputs)] == [None] * (len(guarded) + len(outputs))


def guarded_cases() -> Iterator[fg.Graph]:
    for size in (1, 7, 255, 257, 1025, 2051):
        yield one({"a": (size,)}, lambda g, a: g.relu(a) * 2)
    yield one({"a": (64, 257), "b": (257,), "c": (64, 1)}, lambda g, a, b, c: a * b + c)
    yield one({"a": (12, 256), "b": (256,), "c": (12, 1)}, lambda g, a, b, c: a * b + c, io_dtype="fp16")
    yield one({"a": (5, 3, 67), "b": (5, 1, 67)}, lambda g, a, b: a - b, io_dtype="int8")
    yield one({"a": (8, 12, 49), "b": (12, 1), "c": (49,)}, lambda g, a, b, c: a * b + c, io_dtype="bf16")
    yield one({"a": (8191, 3), "b": (3,), "c": (8191, 1)}, lambda g, a, b, c: a * b + c, io_dtype="int8")
    g = fg.Graph("strided")
    a = g.tensor("a", (33, 65), strides=(72, 1))
    b = g.tensor("b", (33, 65), "bf16", strides=(1, 40))
    g.output(a + b, name="y", strides=(80, 1))
    g.output(g.cast(a, "fp8_e4m3"), name="z", strides=(1, 33))
    yield g
    g = fg.Graph("images")
    x = g.tensor("x", (2, 5, 7, 9), layout="NHWC")
    g.output(x * g.tensor("w", (5, 1, 1)) + g.tensor("r", (2, 5, 7, 9)), name="y")
    yield g


@pytest.mark.parametrize("alignment", [16, 1])
def test_no_access_outside_of_arrays(alignment: int) -> None:
    check_guarded(executables(list(guarded_cases()), alignment=alignment))


def test_guards_are_guards() -> None:
    """The check above fails for a kernel that goes one element too far."""
    graph = one({"a": (1024,)}, lambda g, a: g.relu(a))
    executable = CpuExecutable(graph, Options(), lazy=True)
    assert executable.plan is not None
    (kernel,) = executable.plan.kernels
    further = replace(kernel.source, code=kernel.source.code.replace("a + i", "a + i + 4"))
    assert further.code != kernel.source.code
    broken = replace(executable.plan, kernels=(replace(kernel, source=further),))
    executable._built[16] = executable._build(broken)
    with pytest.raises(fg.errors.KernelError, match=r"past the end of a \(float32 \[1024\]"):
        check_guarded([executable])


def test_gaps_of_outputs_are_left_alone() -> None:
    g = fg.Graph("gaps", io_dtype="fp16")
    a = g.tensor("a", (30, 64))
    g.output(g.neg(a), name="y", strides=(80, 1))
    g.output(g.abs(a), name="z", strides=(2, 60))
    (executable,) = executables([g])
    memory = [np.full(30 * 80, 7.0, np.float16), np.full(64 * 60, 7.0, np.float16)]
    y = np.ndarray((30, 64), np.float16, memory[0], strides=(160, 2))
    z = np.ndarray((30, 64), np.float16, memory[1], strides=(4, 120))
    x = random_inputs(g)["a"]
    executable(x, out={"y": y, "z": z})
    np.testing.assert_array_equal(y, -x)
    np.testing.assert_array_equal(z, abs(x))
    y[...], z[...] = 7, 7
    assert (memory[0] == 7).all()
    assert (memory[1] == 7).all()


# ---- shapes and strides


def mixed_cases() -> dict[str, fg.Graph]:
    cases = {
        "flat": one({"a": (1539,), "b": (1539,)}, lambda g, a, b: g.tanh(a) * b, io_dtype="bf16"),
        "rows": one({"a": (37, 64), "b": (64,), "c": (37, 1)}, lambda g, a, b, c: g.gelu(a + b) * c, io_dtype="bf16"),
        "ragged rows": one({"a": (37, 51), "b": (51,), "c": (37, 1), "s": ()}, lambda g, a, b, c, s: a * b + c - s),
        "short rows": one({"a": (999, 3), "b": (3,), "c": (999, 1)}, lambda g, a, b, c: a * b - c, io_dtype="fp16"),
        "planes": one({"a": (4, 6, 7, 7), "b": (6, 1, 1), "c": (4, 1, 1, 1)}, lambda g, a, b, c: a * b - c),
    }
    g = fg.Graph("mixed")
    a = g.tensor("a", (6, 5, 16), "int8")
    b = g.tensor("b", (5, 16), "float64")
    c = g.tensor("c", (6, 1, 16), "bf16")
    total = a + b
    g.output(total > 0, name="positive")
    g.output(total * c + g.gen_index(a, axis=1), name="y")
    g.output(g.cast(total, "fp8_e5m2"), name="z", strides=(100, 1, 5))
    cases["mixed"] = g
    g = fg.Graph("index")
    x = g.tensor("x", (9, 7, 33))
    g.output(g.gen_index(x, axis=1) * 100 + g.gen_index(x, axis=2), name="y")
    cases["index"] = g
    return cases


def ragged_cases() -> list[fg.Graph]:
    graphs = []
    for size in RAGGED:
        g = fg.Graph("ragged")
        a, b = g.tensor("a", (size,)), g.tensor("b", (size,), "int8")
        g.output(a * b + 1, name="y")
        g.output(b - 3, name="z")
        graphs.append(g)
    return graphs


def test_ragged_sizes() -> None:
    check_all(ragged_cases())


def broadcast_cases() -> list[fg.Graph]:
    def add(shape: tuple[int, ...], other: tuple[int, ...], dtype: str = "float32") -> fg.Graph:
        return one({"a": shape, "b": other}, lambda g, a, b: a - 2 * b, io_dtype=dtype)

    full = (4, 6, 40)
    others = [(40,), (6, 1), (6, 40), (4, 1, 1), (4, 1, 40), (4, 6, 1), (1, 6, 1), (1, 1, 40), (1,), (), (1, 1, 1)]
    graphs = [add(full, other, "bf16" if k % 2 else "float32") for k, other in enumerate(others)]
    graphs += [add(other, full) for other in others[:4]]
    graphs += [add((4, 1, 40), (6, 1)), add((5, 1), (1, 7)), add((1, 300), (300, 1)), add((256, 1), (1, 256), "fp16")]
    graphs.append(one({"a": (1, 33), "b": (17, 1), "c": (5, 1, 1)}, lambda g, a, b, c: g.binary_select(a, b, c > 0)))
    return graphs


def test_broadcasts_of_every_kind() -> None:
    check_all(broadcast_cases())


def layout_cases() -> list[fg.Graph]:
    graphs = []
    shape = (3, 8, 10, 12)
    for layouts in itertools.product(("NCHW", "NHWC"), repeat=3):
        g = fg.Graph("layouts", io_dtype="fp16")
        a, b = (g.tensor(n, shape, layout=k) for n, k in zip("ab", layouts))
        g.output(g.sigmoid(a) * b, name="y", layout=layouts[2])
        graphs.append(g)
    g = fg.Graph("strides")
    padded = g.tensor("padded", (64, 60), strides=(64, 1))
    odd = g.tensor("odd", (64, 60), strides=(61, 1))
    transposed = g.tensor("transposed", (64, 60), strides=(1, 64))
    repeated = g.tensor("repeated", (64, 60), strides=(0, 1))
    point = g.tensor("point", (64, 60), strides=(0, 0))
    spread = g.tensor("spread", (64, 60), strides=(240, 4))
    g.output(padded * odd + transposed - repeated * point + spread, name="y")
    g.output(g.neg(transposed), name="z")
    graphs.append(g)
    return graphs


def test_layouts() -> None:
    check_all(layout_cases())


def dimension_cases() -> list[fg.Graph]:
    shape = (2, 3, 2, 3, 2, 2, 3, 2)
    graphs = [
        one({"a": shape, "b": (1, 3, 1, 3, 1, 2, 1, 2)}, lambda g, a, b: a * b),
        one({"a": (2, 1) * 4, "b": (1, 3) * 4}, lambda g, a, b: a + b, io_dtype="int32"),
    ]
    g = fg.Graph("permuted")
    a = g.tensor("a", shape, strides=(144, 1, 72, 6, 36, 18, 2, 432))
    g.output(a + g.tensor("b", shape), name="y", strides=(1, 2, 6, 12, 36, 72, 144, 432))
    graphs.append(g)
    g = fg.Graph("ten")
    a = g.tensor("a", (2,) * 10, strides=tuple(2 ** ((3 * k) % 10) for k in range(10)))
    g.output(a * g.tensor("b", (1, 2) * 5) + g.gen_index(a, axis=5), name="y")
    graphs.append(g)
    return graphs


def test_many_dimensions() -> None:
    check_all(dimension_cases())


def empty_cases() -> list[fg.Graph]:
    shapes = [(0,), (3, 0, 5), (0, 0), (), (1,), (1, 1, 1)]
    graphs = [one({"a": s, "b": s[-1:]}, lambda g, a, b: g.exp(a) + b) for s in shapes]
    graphs.append(one({"a": (3, 1), "b": (0,)}, lambda g, a, b: a + b))
    g = fg.Graph("constants")
    g.output(g.constant(2.0) * g.constant([1.0, 2.0, 3.0]), name="y")
    graphs.append(g)
    g = fg.Graph("empty index", io_dtype="int8")
    g.output(g.gen_index(g.tensor("a", (4, 0)), axis=0), name="y")
    graphs.append(g)
    return graphs


def test_empty_single_and_scalar_tensors() -> None:
    graphs = empty_cases()
    check_all(graphs)
    for engine in ("cpu", "reference"):
        y = graphs[1].compile(engine)(np.zeros((3, 0, 5), np.float32), np.zeros(5, np.float32))
        assert y.shape == (3, 0, 5)


def test_graphs_of_several_outputs_are_one_kernel() -> None:
    g = fg.Graph("dag", io_dtype="bf16")
    a, b, bias = g.tensor("a", (50, 70)), g.tensor("b", (50, 70)), g.tensor("bias", (70,), "float32")
    s = g.sigmoid(a + bias)
    t = s * b
    g.output(t, name="t")
    g.output(t - s, name="difference", dtype="float64")
    g.output((s > 0.5) & (b < 0), name="mask")
    g.output(g.cast(g.round(t * 10), "int8"), name="rounded")
    assert len(plan(g).kernels) == 1
    check_all([g])


def test_misaligned_arrays_take_other_kernels() -> None:
    """Arrays at odd offsets into a buffer: inputs, outputs, and only one of them."""
    g = one({"a": (2048,), "b": (2048,)}, lambda g, a, b: a * b, io_dtype="fp16")
    (executable,) = executables([g])
    inputs = random_inputs(g)

    def moved(array: Array, by: int) -> Array:
        buffer = np.zeros(array.nbytes + 64, np.uint8)
        start = -buffer.ctypes.data % 16 + by
        result = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        result[...] = array
        return result

    expected = executable(inputs["a"], inputs["b"])
    for shifts in [(2, 0, 0), (0, 6, 0), (0, 0, 10), (8, 8, 8), (2, 4, 14)]:
        a, b, y = (moved(x, by) for x, by in zip((inputs["a"], inputs["b"], expected * 0), shifts))
        executable(a, b, out=y)
        np.testing.assert_array_equal(y, expected)
    assert set(executable._built) == {16, 1}


def test_offsets_beyond_32_bits() -> None:
    """Rows 2 GiB apart in memory that was never touched; an offset cut to 32 bits would read another row."""
    stride, no_reserve = 2**31 + 3, 0x4000  # MAP_NORESERVE, which Python 3.11 has no name for
    memory = mmap.mmap(-1, 2 * stride + 64, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    a = np.ndarray((3, 5), np.int8, memory, strides=(stride, 1))
    a[...] = np.arange(15).reshape(3, 5)
    g = fg.Graph("far", io_dtype="int8")
    g.output(g.tensor("a", (3, 5), strides=(stride, 1)) + 1, name="y")
    (executable,) = executables([g])
    assert "uint64" in executable.plan.kernels[0].source.code
    np.testing.assert_array_equal(executable(a), a + 1)
    del a
    memory.close()


# ---- arithmetic


def test_computing_in_float64() -> None:
    def cancel(compute: str) -> Array:
        g = one({"a": (500,)}, lambda g, a: (a + 1e6) - 1e6, compute_dtype=compute)
        (executable,) = executables([g])
        assert check_executable(executable).ok
        x = random_inputs(g)["a"]
        return np.abs(executable(x) - x) / np.abs(x)

    assert cancel("float64").max() < 1e-5
    assert cancel("float32").max() > 1e-3


def test_mixed_integers_and_floats() -> None:
    """Integers meet floats in the compute type: 1001 is no bfloat16, but is not rounded to one on the way."""
    g = fg.Graph("mixed", io_dtype="bf16")
    i = g.tensor("i", (512,), "int32")
    g.output(i * 1001 - g.tensor("x", (512,)), name="y", dtype="float32")
    g.output(g.cast(i * 1234567, "bf16"), name="rounded once")
    g.output(g.tensor("m", (512,), "bool") * g.tensor("u", (512,), "uint8") + i, name="integers")
    g.output(g.cast(g.tensor("l", (512,), "int64") * 2**40 + 1, "float32"), name="from int64")
    check_all([g])


def strict_cases() -> Iterator[fg.Graph]:
    for dtype in ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2"):
        g = fg.Graph("strict", io_dtype=dtype)
        a, b = g.tensor("a", (40, 64)), g.tensor("b", (64,))
        s = g.sigmoid(a * b + a)
        g.output(g.gelu(s - b) * s / 3, name="y")
        g.output(g.cast(s, "float32") * a, name="wide")
        yield g


def test_strict_rounds_every_intermediate() -> None:
    graphs = list(strict_cases())
    strict, alone, fused = (
        executables(graphs, strict=True), executables(graphs, strict=True, fusion=False), executables(graphs)
    )  # fmt: skip
    different = 0
    for one_kernel, many, loose in zip(strict, alone, fused):
        assert (len(one_kernel.plan.kernels), len(many.plan.kernels)) == (1, len(many.graph.nodes))
        inputs = random_inputs(one_kernel.graph)
        results, expected, unrounded = run(one_kernel, inputs), run(many, inputs), run(loose, inputs)
        for name, array in expected.items():
            assert results[name].tobytes() == array.tobytes()
            different += unrounded[name].tobytes() != array.tobytes()
        assert check_executable(one_kernel, strict=True).ok
    assert different  # or the graphs would not tell strict from loose


@pytest.mark.gpu
def test_pointwise_on_the_gpu() -> None:
    graphs = [*ragged_cases(), *broadcast_cases(), *layout_cases(), *dimension_cases(), *empty_cases()]
    graphs += [*guarded_cases(), *mixed_cases().values()]
    check_on_gpu(graphs)
    check_on_gpu(list(guarded_cases()), alignment=1)
    check_on_gpu(list(strict_cases()), strict=True)


# ---- source


def golden_graphs() -> dict[str, fg.Graph]:
    sigmoid = fg.Graph("sigmoid_fma")
    a, b, c = (sigmoid.tensor(name, (1024, 1024)) for name in "abc")
    sigmoid.output(sigmoid.sigmoid(a + b * c), name="y")
    rows = fg.Graph("gelu_bias", io_dtype="bf16")
    a, bias, b = rows.tensor("a", (4096, 1024)), rows.tensor("bias", (1024,)), rows.tensor("b", (4096, 1024))
    rows.output(rows.gelu(a + bias) * rows.tanh(b) + a, name="y")
    ragged = fg.Graph("ragged")
    a, column, b = ragged.tensor("a", (1023, 1021)), ragged.tensor("column", (1023, 1)), ragged.tensor("b", (1021,))
    ragged.output(ragged.relu(a * column + b), name="y")
    images = fg.Graph("images", io_dtype="fp16")
    x = images.tensor("x", (8, 64, 28, 28), layout="NHWC")
    scale, shift = (images.tensor(n, (64, 1, 1), "float32") for n in ("scale", "shift"))
    y = images.relu(x * scale + shift, upper_clip=6.0)
    images.output(y, name="y")
    images.output(y > 0, name="mask")
    return {g.name: g for g in (sigmoid, rows, ragged, images)}


@pytest.mark.parametrize("name", list(golden_graphs()))
def test_golden_source(name: str) -> None:
    (kernel,) = plan(golden_graphs()[name]).kernels
    check_golden(name, kernel.source.code)


def test_source_names_its_nodes_and_has_no_dead_code() -> None:
    g = fg.Graph("net")
    a = g.tensor("activations", (64,))
    g.exp(a)  # used by nothing
    doubled = g.mul(a, 2, name="doubled")
    g.output(doubled + g.constant(1) * g.constant(3.5), name="result")
    (kernel,) = plan(g).kernels
    code = kernel.source.code
    assert "//     doubled = mul(activations, 2.0)" in code
    assert "const float doubled = activations_v * 2.0f;" in code
    assert "result[i] = doubled + 3.5f;" in code
    assert "exp(" not in code


@pytest.mark.parametrize("arch", QUICK_ARCHS)
def test_sources_compile_for_gpus(arch: str) -> None:
    sources = [k.source for g in (*golden_graphs().values(), *mixed_cases().values()) for k in plan(g).kernels]
    for kernel in nvrtc.compile_kernels(sources, arch, cache=default_cache()):
        assert kernel.spill_bytes == 0, kernel.name
        assert kernel.registers <= 128, kernel.name


def test_source_is_deterministic() -> None:
    first, second = (
        [[k.source for k in plan(g).kernels] for g in (*golden_graphs().values(), *guarded_cases())] for _ in range(2)
    )
    assert first == second
    assert all(isinstance(s, KernelSource) for kernels in first for s in kernels)
