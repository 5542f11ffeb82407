"""Engines: each makes an Executable of a graph."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

from codegen.target import PORTABLE
from fusegraph.engines.base import Executable
from fusegraph.engines.environment import check_environment
from fusegraph.errors import ArgumentError, FusegraphError, shown
from fusegraph.graph import Graph
from fusegraph.lowering.base import Options
from fusegraph.runtime.cache import DiskCache
from fusegraph.runtime.targets import named
from fusegraph.sized_graphs import OpenGraph, varies
from fusegraph.values import Kind, Unfit, flag, integer, optional, word

_logger = logging.getLogger(__name__)

ENGINES = ("cuda", "cpu", "cudnn", "reference")


def default_engine() -> str:
    """Returns "cuda" if there is a driver and a GPU, else "cpu"."""
    from fusegraph.runtime import driver

    return "cuda" if driver.available() else "cpu"


def compile(
    graph: Graph,
    engine: str | None = None,
    *,
    strict: bool = False,
    fusion: bool = True,
    target: str | None = None,
    device: int = 0,
    workspace_limit: int | None = None,
    cache: DiskCache | None = None,
    jobs: int | None = None,
    progress: Callable[..., Any] | None = None,
    partition: bool = False,
    autotune: bool | None = None,
    prepack_limit: int | None = None,
    memory_limit: int | None = None,
    wait: bool = True,
) -> Executable:
    """Compiles a graph.

    engine           "cuda" (compiled by NVRTC, needs a GPU to run), "cpu" (the same kernels through the host's C++
                     compiler), "cudnn" (NVIDIA's cuDNN) or "reference" (NumPy in float64); default: cuda if there is a
                     GPU, else cpu.
    strict           rounds every intermediate to its tensor's dtype, as one kernel per node would.
    fusion           False makes every node a kernel of its own.
    target           a machine such as "h200" (`codegen.target.TARGETS`), or an architecture such as "sm_90a".  cuda:
                     what kernels are planned and compiled for, by default the device.  cpu: the target whose kernels
                     are run, tensor cores and TMA included; default: kernels that run everywhere.
    device           cuda, cudnn: the CUDA ordinal.
    workspace_limit  in bytes; a graph that needs more raises WorkspaceError.
    cache            a DiskCache other than the default one.
    jobs             cuda: how many kernels are compiled at a time.
    progress         cuda: called with (KernelSource, CompiledKernel) as each kernel is done.
    partition        cudnn: runs the largest pieces that cuDNN takes instead of refusing what it does not take whole.
    autotune         cuda: True times several schedules of every kernel on the device, and the alternatives to choices
                     of kernels (`engines.partitions`), and remembers the fastest; None uses what was remembered; False
                     leaves it to cost models.  cudnn: True times all plans that
                     cuDNN proposes and keeps the fastest.
    prepack_limit    cuda, cpu: the most bytes of packed copies of parameters; those of the largest are left out.  0
                     computes everything in every call.  Default: a quarter of the parameters' bytes, or 256 MB if more.
    memory_limit     cuda, cpu: the most bytes that are kept for a backward pass (`Graph.gradients`).  If it would keep
                     more, it computes more again, though that moves more bytes.
    wait             cuda: False returns while kernels are being compiled; the first call waits for them.

    Raises GraphError, ArgumentError (an option has a wrong value), WorkspaceError, CompileError (also for an unknown
    target), ToolchainError (no NVRTC, no C++ compiler), DeviceError (no driver), NotSupportedError (cuDNN refuses the
    graph), and the errors of `check_environment` for environment variables with invalid values.
    """
    if not isinstance(graph, Graph):
        raise ArgumentError(f"compile takes a Graph, got {shown(graph)}")
    if cache is not None and not isinstance(cache, DiskCache):
        raise ArgumentError(f"cache is {shown(cache)}; it may be None or a DiskCache")
    given = (("strict", strict), ("fusion", fusion), ("partition", partition), ("wait", wait))
    strict, fusion, partition, wait = (_option(name, flag, value) for name, value in given)
    engine, target = _option("engine", optional(word), engine), _option("target", optional(word), target)
    autotune, device = _option("autotune", optional(flag), autotune), _option("device", _at_least(0), device)
    workspace_limit = _option("workspace_limit", optional(_at_least(0)), workspace_limit)
    jobs = _option("jobs", optional(_at_least(1)), jobs)
    prepack_limit = _option("prepack_limit", optional(_at_least(0)), prepack_limit)
    memory_limit = _option("memory_limit", optional(_at_least(0)), memory_limit)
    check_environment()
    machine = PORTABLE if target is None else named(target)
    options = Options(strict=strict, target=machine, prepack=prepack_limit, memory=memory_limit)
    engine = default_engine() if engine is None else engine
    if engine not in ENGINES:
        raise FusegraphError(f"unknown engine {shown(engine)}; there are {', '.join(ENGINES)}")
    settings = _Settings(options, fusion, workspace_limit, cache, device, jobs, progress, partition, autotune, wait)
    if not varies(graph):
        began = perf_counter()
        made = _known(graph, engine, settings)
        kernels = len(made.plan.kernels) if made.plan is not None else 0
        told = graph.name, engine, graph.node_count, kernels, perf_counter() - began
        _logger.info("graph %s for %s: %d nodes in %d kernels, %.2f s", *told)
        return made
    from fusegraph.engines import sized

    shared: dict[str, Any] = {"fusion": fusion, "workspace_limit": workspace_limit, "cache": cache}
    _logger.info("graph %s for %s: sizes vary", graph.name, engine)
    if engine not in ("cuda", "cpu") or isinstance(graph, OpenGraph):
        return sized.by_size(graph, options, engine, device, lambda known: _known(known, engine, settings))
    if engine == "cuda":
        return sized.on_cuda(graph, options, **shared, device=device, jobs=jobs, progress=progress)
    return sized.on_cpu(graph, options, **shared)


class _Settings(NamedTuple):
    """The options of `compile`, checked."""

    options: Options
    fusion: bool
    workspace_limit: int | None
    cache: DiskCache | None
    device: int
    jobs: int | None
    progress: Callable[..., Any] | None
    partition: bool
    autotune: bool | None
    wait: bool


def _known(graph: Graph, engine: str, s: _Settings) -> Executable:
    """Compiles a graph of known sizes."""
    kernels: dict[str, Any] = {"fusion": s.fusion, "workspace_limit": s.workspace_limit, "cache": s.cache}
    if engine == "reference":
        from fusegraph.engines.reference import ReferenceExecutable

        return ReferenceExecutable(graph, strict=s.options.strict)
    if engine == "cpu":
        from fusegraph.engines.cpu import CpuExecutable

        return CpuExecutable(graph, s.options, **kernels)
    if engine == "cudnn":
        from fusegraph.engines.cudnn import CudnnExecutable

        return CudnnExecutable(
            graph,
            s.options,
            partition=s.partition,
            autotune=bool(s.autotune),
            workspace_limit=s.workspace_limit,
            device=s.device,
        )
    from fusegraph.engines.cuda import CudaExecutable

    compiled: dict[str, Any] = {"jobs": s.jobs, "progress": s.progress, "autotune": s.autotune, "wait": s.wait}
    return CudaExecutable(graph, s.options, **kernels, device=s.device, **compiled)


def _option(name: str, kind: Kind, value: Any) -> Any:
    try:
        return kind(value)
    except Unfit as wanted:
        raise ArgumentError(f"{name} is {shown(value)}; it should be {wanted}") from None


def _at_least(least: int) -> Kind:
    def check(value: Any) -> int:
        found = integer(value)
        if found < least:
            raise Unfit(f"an integer of at least {least}")
        return found

    return check
