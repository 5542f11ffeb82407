"""Shared by the tests: many graphs through one run of the host compiler; random graphs are in `recipes`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from device_headers import missing_headers
from random_nodes import DTYPES, FLOATS, INTEGERS
from recipes import Recipe, WrongGraph, check_recipes, failure, recipes, seeded, smaller

import fusegraph as fg
from codegen.target import target
from fusegraph.dtypes import DType
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.engines.cuda import CudaExecutable
from fusegraph.lowering.base import Options
from fusegraph.passes import pipeline
from fusegraph.plan import Chooser, plan
from fusegraph.report.check import CheckResult, check_executable, random_inputs
from fusegraph.runtime import driver, nvrtc
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.host_compiler import Order

__all__ = [
    "ARCHS", "DTYPES", "FLOATS", "INTEGERS", "QUICK_ARCHS", "Recipe", "WrongGraph", "are_right", "check_all",
    "check_on_gpu", "check_recipes", "compile_for", "executables", "failure", "gpu_executables", "leave_out_pass",
    "quick", "quick_dtypes", "recipes", "results_of", "seeded", "share", "show", "slow", "smaller",
    "undecided_share",
]  # fmt: skip

T = TypeVar("T")
Array = np.ndarray[Any, Any]

#: Architectures that tests compile for: before Hopper, Hopper, and after.
ARCHS = ("sm_80", "sm_90a", "sm_120")


def leave_out_pass(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Plans graphs without one of the passes."""
    left = tuple(p for p in pipeline.PIPELINE if p.name != name)
    assert len(left) == len(pipeline.PIPELINE) - 1
    monkeypatch.setattr(pipeline, "PIPELINE", left)


def executables(
    graphs: Sequence[fg.Graph], *, fusion: bool = True, arch: str | None = None, **options: Any
) -> list[CpuExecutable]:
    """Returns CPU executables of several graphs, their kernels built by one call of the host compiler.  options:
    `Options`.
    """
    order: Order = "late" if arch == "sm_90a" else "forward"  # where warpgroups work together one warp may be late
    if arch is not None:
        options["target"] = target(arch)
    made = [CpuExecutable(g, Options(**options), fusion=fusion, lazy=True, order=order) for g in graphs]
    missing = {k.name: m for e in made for k in e.plan.kernels if (m := missing_headers(k.source.code))}
    assert not missing, missing
    build_together(made)
    return made


def check_all(
    graphs: Sequence[fg.Graph],
    *,
    inputs: Callable[[fg.Graph], Mapping[str, Array]] = random_inputs,
    fusion: bool = True,
    arch: str | None = None,
    **options: Any,
) -> list[CheckResult]:
    """Checks every graph's kernels, built together, on the CPU against the reference.

    Raises AssertionError if one is wrong.
    """
    made = executables(graphs, fusion=fusion, arch=arch, **options)
    return are_right(made, inputs=inputs, strict=bool(options.get("strict")))


def are_right(
    made: Sequence[CpuExecutable],
    *,
    inputs: Callable[[fg.Graph], Mapping[str, Array]] = random_inputs,
    strict: bool = False,
) -> list[CheckResult]:
    """Checks executables against the reference.  Raises AssertionError if one is wrong."""
    results = [check_executable(e, inputs(e.graph), strict=strict) for e in made]
    wrong = [f"{r}\n{show(e.graph)}" for r, e in zip(results, made) if not r.ok]
    assert not wrong, "\n\n".join(wrong)
    return results


def results_of(body: Callable[..., Iterable[fg.Tensor]], *inputs: Any) -> tuple[Any, ...]:
    """Runs a graph on the cpu engine: ``body`` makes its outputs, given the graph and a tensor for each input."""
    g = fg.Graph("made")
    for made in body(g, *(g.tensor(f"x{k}", x.shape, x.dtype) for k, x in enumerate(inputs))):
        g.output(made)
    found = g.compile("cpu")(*inputs)
    return found if isinstance(found, tuple) else (found,)


def check_on_gpu(
    graphs: Sequence[fg.Graph],
    *,
    inputs: Callable[[fg.Graph], Mapping[str, Array]] = random_inputs,
    fusion: bool = True,
    **options: Any,
) -> list[CheckResult]:
    """Does the same as `check_all` on the first GPU."""
    made = gpu_executables(graphs, fusion=fusion, **options)
    results = [check_executable(e, inputs(e.graph), strict=bool(options.get("strict"))) for e in made]
    wrong = [f"{r}\n{show(e.graph)}" for r, e in zip(results, made) if not r.ok]
    assert not wrong, "\n\n".join(wrong)
    return results


def gpu_executables(graphs: Sequence[fg.Graph], *, fusion: bool = True, **options: Any) -> list[CudaExecutable]:
    """Returns CUDA executables of several graphs, their kernels compiled in parallel."""
    here = driver.properties(0).target
    compile_for(here.arch.name, graphs, fusion=fusion, target=here, **options)
    return [CudaExecutable(g, Options(**options), fusion=fusion) for g in graphs]


def compile_for(
    arch: str, graphs: Sequence[fg.Graph], *, fusion: bool = True, choose: Chooser | None = None, **options: Any
) -> list[nvrtc.CompiledKernel]:
    """Compiles all kernels of the graphs for an architecture, in parallel, and leaves them in the cache.

    ``choose`` picks the schedules, by default as for the target.
    """
    sources = [k.source for g in graphs for k in plan(g, Options(**options), fusion=fusion, choose=choose).kernels]
    flags = ("--fmad=false",) if options.get("strict") else ()
    return nvrtc.compile_kernels(sources, arch, cache=default_cache(), options=flags)


def elementary(g: fg.Graph, rows: int, columns: int) -> fg.Tensor:
    """Adds outputs of the families that read a matrix's elements once or a few times; returns the matrix."""
    x = g.tensor("x", (rows, columns))
    g.output(g.relu(x), name="y")
    g.output(g.reduction(x, "add", 1), name="sums")
    g.output(g.cumsum(x, 1), name="running")
    g.output(g.sort(x, 1), name="sorted")
    where = g.tensor("index", (9, 1), "int32")
    g.output(g.scatter(x, where, g.tensor("values", (9, columns)), 0, "add"), name="scattered")
    return x


def filtered(g: fg.Graph, x: fg.Tensor, layout: str) -> None:
    """Adds outputs of the families of convolutions channel by channel."""
    filters, loss = g.tensor("w", (x.shape[1], 1, 3, 3)), g.tensor("loss", x.shape, layout=layout)
    g.output(g.conv_fprop(x, filters, padding=1, groups=x.shape[1]), name="filtered")
    g.output(g.conv_wgrad(x, loss, padding=1, groups=x.shape[1]), name="gradient")


def quick(first: T, *others: T) -> list[Any]:
    """Marks all but the first parameters of a test as slow."""
    return [first, *(pytest.param(x, marks=pytest.mark.slow) for x in others)]


def slow(*cases: tuple[Any, ...]) -> list[Any]:
    """Marks cases of several parameters of a test as slow."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def quick_dtypes(dtypes: Iterable[DType], *names: str) -> list[Any]:
    """Marks dtypes as slow, but those of some names."""
    return [pytest.param(d, marks=() if d.name in names else pytest.mark.slow, id=d.name) for d in dtypes]


#: `ARCHS` as parameters of a test; all but Hopper are left to the slow tier.
QUICK_ARCHS = quick("sm_90a", "sm_80", "sm_120")


def share(arch: str, items: Sequence[T], shift: int = 0) -> list[T]:
    """Returns the third of the items that is compiled for an architecture; each of `ARCHS` gets another third.

    For sources that do not depend on the architecture: each of them is compiled, and some of each kind everywhere.
    ``shift`` changes which, where several lists are much alike.
    """
    return list(items[(ARCHS.index(arch) + shift) % len(ARCHS) :: len(ARCHS)])


def undecided_share(results: Sequence[CheckResult], graphs: Sequence[fg.Graph]) -> float:
    """Returns the share of output elements for which the error analysis accepts any value."""
    undecided = sum(o.undecided for r in results for o in r.outputs)
    return undecided / max(sum(t.size for g in graphs for t in g.outputs), 1)


def show(graph: fg.Graph) -> str:
    """Returns a graph's tensors and nodes, one per line."""
    tensors = [f"  {t!r}{' constant' if t.is_constant else ''}" for t in graph.tensors.values()]
    nodes = [f"  {n!r} {dict(n.attributes)}" for n in graph.nodes]
    return "\n".join([repr(graph), *tensors, *nodes])
