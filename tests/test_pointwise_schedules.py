"""Every schedule of pointwise kernels, on small tensors; the one that is thought to be best."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from graphs import check_all
from test_pointwise import mixed_cases, one, only_spec, poison

import fusegraph as fg
from codegen import render
from codegen.pointwise import PointwiseSchedule
from codegen.pointwise import schedule as pointwise_schedule
from codegen.pointwise import vectors as pointwise_vectors
from codegen.pointwise.schedule import best_schedule, normalize
from codegen.spec import PointwiseSpec
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.lowering.base import Options
from fusegraph.report.check import compare, laid_out, random_inputs, rounding_of
from fusegraph.runtime import host_compiler
from fusegraph.runtime.cache import default_cache


def schedules(spec: PointwiseSpec) -> Iterator[PointwiseSchedule]:
    shape, program = normalize(spec)
    widest = 64 // max(op.dtype.itemsize for op in program.operands)
    for vector, unroll, itype in itertools.product((1, 2, 4, 8), (1, 2, 3), ("uint32", "uint64")):
        if vector <= widest:
            yield PointwiseSchedule(vector, unroll, "flat", itype)
            if len(shape) > 1 and shape[-1] % vector == 0:
                yield PointwiseSchedule(vector, unroll, "rows", itype)
            if len(shape) > 1:
                yield PointwiseSchedule(vector, unroll, "cycles", itype)


def run_source(executable: CpuExecutable, module: host_compiler.CpuModule, number: int) -> list[str]:
    """Runs a kernel of the module on the executable's arguments, in both thread orders; returns what is wrong."""
    graph, (kernel,) = executable.graph, executable.plan.kernels
    inputs = random_inputs(graph, seed=5)
    wrong = []
    for order in ("forward", "reverse"):
        outputs = {t.name: poison(laid_out(np.zeros(t.shape), t)) for t in graph.outputs}
        arrays = {**inputs, **outputs}
        module.launch(number, [arrays[t.name].ctypes.data for t in kernel.arguments], order=order)
        checks = compare(graph, inputs, outputs, rounding_of(executable))
        wrong += [f"{order}: {c.name} {c.worst}" for c in checks if not c.ok]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", list(mixed_cases()))
def test_every_schedule(name: str) -> None:
    graph = mixed_cases()[name]
    executable = CpuExecutable(graph, Options(), lazy=True)
    spec = only_spec(graph)
    every = list(schedules(spec))
    assert len(every) >= 12
    sources = [render(spec, s) for s in every]
    module = host_compiler.build(sources, cache=default_cache())
    for number, (schedule, source) in enumerate(zip(every, sources)):
        wrong = run_source(executable, module, number)
        assert not wrong, f"{schedule}: {wrong[0]}\n{source.code}"


def test_some_schedules() -> None:
    graph = mixed_cases()["mixed"]
    executable = CpuExecutable(graph, Options(), lazy=True)
    spec = only_spec(graph)
    chosen = [PointwiseSchedule(v, u, f, i) for v, u, f, i in (
        (1, 1, "flat", "uint32"), (8, 2, "flat", "uint64"), (4, 3, "rows", "uint32"), (2, 1, "rows", "uint64"),
    )]  # fmt: skip
    module = host_compiler.build([render(spec, s) for s in chosen], cache=default_cache())
    for number, schedule in enumerate(chosen):
        assert run_source(executable, module, number) == [], schedule


def test_best_schedules() -> None:
    def best(shapes: dict[str, tuple[int, ...]], **how: Any) -> PointwiseSchedule:
        return best_schedule(only_spec(one(shapes, lambda g, *xs: g.relu(sum(xs[1:], xs[0])), **how)))

    large = (4096, 4096)
    assert best({"a": large, "b": large}) == PointwiseSchedule(4, 1, "flat", "uint32")
    assert best({"a": large, "b": large}, io_dtype="bf16").vector == 8
    assert best({"a": large, "b": (4096,)}, io_dtype="bf16") == PointwiseSchedule(8, 1, "flat", "uint32")
    assert best({"a": (4096, 4097), "b": (4097,)}) == PointwiseSchedule(4, 1, "flat", "uint32")
    assert best({"a": (4096, 4097), "b": (4097,)}, io_dtype="bf16") == PointwiseSchedule(8, 2, "cycles", "uint32")
    assert best({"a": (2**22, 3), "b": (3,)}).form == "cycles"
    several = {"a": large, **dict.fromkeys("bcde", (4096,))}
    assert best(several, io_dtype="bf16") == PointwiseSchedule(8, 1, "flat", "uint32")
    assert best({**several, "f": (4096,)}, io_dtype="bf16") == PointwiseSchedule(8, 2, "rows", "uint32")
    assert best({"a": (4096, 4097), "b": (4096, 1)}) == PointwiseSchedule(4, 1, "flat", "uint32")
    assert best({"a": (3, 4097), "b": (4097,)}).form == "flat"
    assert best({"a": (64,)}).vector == 1
    assert best({"a": (2**16, 2**16)}).itype == "uint64"
    assert best({"a": (2**15, 2**16)}).itype == "uint32"


def test_small_blocks_meet_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few threads a block, small tensors take the vectors, unrolled loops and rows form of large ones."""
    monkeypatch.setattr(pointwise_schedule, "THREADS", 32)
    monkeypatch.setattr(pointwise_vectors, "THREADS", 32)
    monkeypatch.setattr(pointwise_schedule, "ENOUGH_BLOCKS", 1 / 132)
    graphs = [one({"a": (size,), "b": (size,)}, lambda g, a, b: a * b, io_dtype=t) for size in (511, 512, 1025, 2048)
              for t in ("fp32", "int8")]  # fmt: skip
    graphs += mixed_cases().values()
    graphs += [one({"a": (67, size), "b": (size,), "c": (67, 1)}, lambda g, a, b, c: a * b - c, io_dtype=t)
               for size in (3, 5, 41, 67) for t in ("fp32", "bf16", "int8", "float64")]  # fmt: skip
    padded = fg.Graph("padded")
    padded.output(padded.relu(padded.tensor("a", (67, 641), strides=(643, 1)) + padded.tensor("b", (641,))), name="y")
    graphs.append(padded)  # rows that begin anywhere: single elements, of which a thread takes several
    seen = {(s.form, s.unroll > 1, s.vector > 1) for s in map(best_schedule, map(only_spec, graphs))}
    assert seen >= {("cycles", True, True), ("flat", False, True)}
    assert any(unrolled and not vectors for _, unrolled, vectors in seen), seen
    check_all(graphs)
