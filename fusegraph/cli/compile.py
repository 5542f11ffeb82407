"""``fusegraph compile``: writes a folder of sources, cubins and a manifest for every graph and target."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import fusegraph
from codegen.spec import KernelSource
from codegen.target import PORTABLE, Target
from fusegraph.cli.console import check_autotune, doing, note, print_json, print_table, progress, say
from fusegraph.engines.cuda import CudaExecutable, nvrtc_options
from fusegraph.engines.environment import check_environment
from fusegraph.errors import FusegraphError, GraphError
from fusegraph.graph import Graph
from fusegraph.loader import load_graphs
from fusegraph.lowering.base import Options
from fusegraph.plan import Plan
from fusegraph.plan import plan as plan_graph
from fusegraph.report import artifacts
from fusegraph.report.explain import count_text, describe, describe_graph, size_text
from fusegraph.report.explain_sized import describe_sized, ranges_of, sizes_text
from fusegraph.runtime import driver, host_compiler, nvrtc
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.targets import DEFAULT, named
from fusegraph.sized_graphs import varies

#: Keys of a kernel in ``compile --json``.
KERNEL_KEYS = (
    "number",
    "name",
    "family",
    "nodes",
    "source",
    "cubin",
    "registers",
    "spill_bytes",
    "shared_bytes",
    "bytes_saved",
    "compile_ms",
    "cached",
    "schedule",
    "chosen_by",
)
#: Keys of a graph in ``compile --json``.
GRAPH_KEYS = ("name", "engine", "arch", "folder", "kernels", "decisions", "workspace_bytes")
#: Keys of a graph whose sizes vary: ``ranges`` and those behind it as `describe_sized` has them.
SIZED_KEYS = ("name", "engine", "arch", "folder", "kernels", "symbols", "ranges", "by_size", "aligned")

Step = Callable[..., None]


@dataclass(frozen=True)
class _Job:
    """One graph for one target, and the folder it is written to."""

    graph: Graph
    engine: str
    target: str | None
    folder: Path
    strict: bool
    fusion: bool
    autotune: bool | None

    @property
    def title(self) -> str:
        return f"{self.graph.name} for {self.target or self.engine}"

    @property
    def planned(self) -> Target:
        return named(self.target) if self.target else PORTABLE


def compile_file(
    file: str,
    engine: str,
    targets: Sequence[str] | None,
    *,
    out: str,
    strict: bool,
    no_fusion: bool,
    autotune: bool | None = None,
    as_json: bool,
    dims: Sequence[str] | None = None,
) -> int:
    """Compiles every graph of a file, writes the folders and prints a summary; returns 0.

    Registers and spills are per thread; ``shared_bytes`` is the static and dynamic shared memory of a block; ``arch``
    and ``cubin`` are None for engines that run on the CPU.  Engine cpu builds all kernels of a graph in one run of the
    host's compiler: each has the time of that run as ``compile_ms``, and None for registers and spills.  Engine
    reference has no kernels.  Raises FusegraphError for targets with an engine other than cuda, FileError for folders
    that cannot be written.
    """
    if engine != "cuda" and targets:
        raise FusegraphError(f"--target {targets[0]} is for engine cuda; engine {engine} runs on this machine's CPU")
    check_autotune(engine, autotune)
    check_environment()
    doing(f"reading {file}")
    graphs = load_graphs(file, dims)
    chosen: list[str | None] = list(_targets(targets or ())) if engine == "cuda" else [None]
    folder = artifacts.prepare(Path(out))
    names = artifacts.UniqueNames()
    jobs = []
    for graph in graphs:
        for target in chosen:
            name = graph.name if len(chosen) == 1 else f"{artifacts.safe_name(graph.name)}-{target}"
            jobs.append(_Job(graph, engine, target, folder / names.unique(name), strict, not no_fusion, autotune))
    for job in jobs:
        artifacts.check_replaceable(job.folder)
    entries = []
    step = progress(len(jobs))
    for job in jobs:
        step(job.title)
        entries.append((_compile_sized if varies(job.graph) else _MAKERS[engine])(job, step))
        step(job.title, advance=1)
    if as_json:
        print_json({"graphs": [_json_entry(entry) for entry in entries]})
    else:
        for number, (job, entry) in enumerate(zip(jobs, entries)):
            if number:
                say()
            _print(job, entry, Path(out) / job.folder.name)
    return 0


def _targets(given: Sequence[str]) -> list[str]:
    """Returns the targets given by ``--target``, each once; by default the GPU's, or sm_90a without a GPU.

    Raises CompileError for an unknown target, and for one that NVRTC does not know.
    """
    targets = list(dict.fromkeys(part.strip() for text in given for part in text.split(",")))
    for target in targets:
        nvrtc.compile_kernels([], named(target).arch.name)
    if targets:
        return targets
    if driver.available():
        return [driver.properties(0).arch]
    note(f"no GPU here: compiling for {DEFAULT} (another: --target)")
    return [DEFAULT]


# --- engines


def _compile_cuda(job: _Job, step: Step) -> dict[str, Any]:
    executable = fusegraph.compile(
        job.graph,
        "cuda",
        target=job.target,
        strict=job.strict,
        fusion=job.fusion,
        autotune=job.autotune,
        progress=lambda source, _: step(f"{job.title}: {source.name}"),
    )
    assert isinstance(executable, CudaExecutable)
    assert executable.plan is not None
    built = [_facts_of(k.source, compiled) for k, compiled in zip(executable.plan.kernels, executable.kernels)]
    cubins = {f"{c.name}.cubin": c.cubin for c in (*executable.kernels, *executable.packing_kernels)}
    return _write(job, executable.plan, built, cubins, _cuda_versions())


def _compile_cpu(job: _Job, step: Step) -> dict[str, Any]:
    plan = plan_graph(job.graph, Options(strict=job.strict), fusion=job.fusion)
    step(f"{job.title}: {count_text(len(plan.kernels), 'kernel')}")
    module = host_compiler.build([k.source for k in plan.every_kernel], cache=default_cache())
    built = [_facts_on_cpu(kernel.source, module) for kernel in plan.kernels]
    return _write(job, plan, built, {}, _cpu_versions())


def _compile_reference(job: _Job, step: Step) -> dict[str, Any]:
    if not job.graph.outputs:
        raise GraphError(f"graph {job.graph.name!r} has no outputs; mark its results with graph.output(tensor)")
    facts = {**describe_graph(job.graph), "kernels": [], "decisions": [], "workspace_bytes": 0}
    return _finish(job, facts, {}, {})


def _compile_sized(job: _Job, step: Step) -> dict[str, Any]:
    """Compiles the kernels for all sizes of a graph with Dims."""
    planned = ranges_of(job.graph, Options(strict=job.strict, target=job.planned), job.fusion)
    sources = planned.sources if job.engine != "reference" else []
    step(f"{job.title}: {count_text(len(sources), 'kernel')}")
    cubins, versions = dict[str, bytes](), dict[str, str]()
    built: list[dict[str, Any]] = []
    if job.engine == "cuda":
        compiled = nvrtc.compile_kernels(
            sources,
            job.planned.arch.name,
            cache=default_cache(),
            options=nvrtc_options(Options(strict=job.strict)),
            progress=lambda source, _: step(f"{job.title}: {source.name}"),
        )
        cubins, versions = {f"{c.name}.cubin": c.cubin for c in compiled}, _cuda_versions()
        built = [_facts_of(source, c) for source, c in zip(sources, compiled)]
    elif job.engine == "cpu":
        module, versions = host_compiler.build(sources, cache=default_cache()), _cpu_versions()
        built = [_facts_on_cpu(source, module) for source in sources]
    kernels = [{"name": s.name, "source": f"{s.name}.cu", **facts} for s, facts in zip(sources, built)]
    facts = {**describe_sized(planned), "kernels": kernels}
    return _finish(job, facts, {**artifacts.source_files(sources), **cubins}, versions)


def _facts_of(source: KernelSource, compiled: nvrtc.CompiledKernel) -> dict[str, Any]:
    return {
        "cubin": f"{compiled.name}.cubin",
        "registers": compiled.registers,
        "spill_bytes": compiled.spill_bytes,
        "shared_bytes": compiled.shared_bytes + source.dynamic_shared_bytes,
        "compile_ms": compiled.compile_ms,
        "cached": compiled.cached,
        "warnings": list(compiled.warnings),
    }


def _facts_on_cpu(source: KernelSource, module: host_compiler.CpuModule) -> dict[str, Any]:
    return {
        "cubin": None,
        "registers": None,
        "spill_bytes": None,
        "shared_bytes": source.dynamic_shared_bytes,
        "compile_ms": module.build_seconds * 1e3,
        "cached": module.cached,
        "warnings": [],
    }


def _cuda_versions() -> dict[str, str]:
    return {"nvrtc": ".".join(map(str, nvrtc.nvrtc_version())), "cuda-bindings": metadata.version("cuda-bindings")}


def _cpu_versions() -> dict[str, str]:
    return {"compiler": " ".join(host_compiler.find_compiler().command)}


_MAKERS = {"cuda": _compile_cuda, "cpu": _compile_cpu, "reference": _compile_reference}


# --- what is written and printed


def _write(
    job: _Job, plan: Plan, built: Sequence[Mapping[str, Any]], cubins: Mapping[str, bytes], versions: Mapping[str, str]
) -> dict[str, Any]:
    facts = describe(plan, job.planned)
    for kernel, its_facts, more in zip(plan.kernels, facts["kernels"], built):
        its_facts.update(source=f"{kernel.name}.cu", **more)
    return _finish(job, facts, {**artifacts.source_files([k.source for k in plan.every_kernel]), **cubins}, versions)


def _finish(
    job: _Job, facts: Mapping[str, Any], files: Mapping[str, bytes], versions: Mapping[str, str]
) -> dict[str, Any]:
    manifest = {
        **facts,
        "engine": job.engine,
        "arch": job.planned.arch.name if job.target else None,
        "options": {"strict": job.strict, "fusion": job.fusion},
        "versions": {"fusegraph": fusegraph.__version__, "python": platform.python_version(), **versions},
    }
    artifacts.write_folder(job.folder, files, manifest)
    return {**manifest, "folder": str(job.folder)}


def _json_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    if "ranges" in entry:
        return {key: entry[key] for key in SIZED_KEYS}
    kernels = [{key: kernel[key] for key in KERNEL_KEYS} for kernel in entry["kernels"]]
    return {key: kernels if key == "kernels" else entry[key] for key in GRAPH_KEYS}


def _print(job: _Job, entry: Mapping[str, Any], folder: Path) -> None:
    kernels = entry["kernels"]
    if "ranges" in entry:
        _print_sized(job, entry)
    else:
        saved = size_text(sum(k["bytes_saved"] for k in kernels))
        nodes = count_text(len(entry["nodes"]), "node")
        say(f"{job.title}: {nodes} in {count_text(len(kernels), 'kernel')}, {saved} of traffic saved")
        _print_kernels(
            kernels,
            {"family": lambda k: k["family"], "saved": lambda k: size_text(k["bytes_saved"])},
            [_details(k) for k in kernels],
        )
        declined = sum(not d["fused"] for d in entry["decisions"])
        if declined:
            say(f"{count_text(declined, 'fusion')} declined; 'fusegraph explain' shows why")
    say(f"written to {folder}")


def _print_sized(job: _Job, entry: Mapping[str, Any]) -> None:
    ranges = [r for plan in (entry, *(each["plan"] for each in entry["aligned"])) for r in plan["ranges"]]
    kernels = entry["kernels"]
    say(
        f"{job.title}: {count_text(len(kernels), 'kernel')} for {count_text(len(ranges), 'range')} of sizes; "
        "'fusegraph explain' shows which is for which"
    )
    _print_kernels(kernels, {}, [])
    for each in entry["by_size"]:
        say(f"planned for each choice of sizes: {sizes_text(each['sizes'])}: {each['reason']}")


def _print_kernels(
    kernels: Sequence[Mapping[str, Any]], more: Mapping[str, Callable[[Mapping[str, Any]], str]], details: Sequence[str]
) -> None:
    """Prints a table of kernels, with ``more`` columns by their headings, and a text below each."""
    rows = [
        (
            k["name"],
            *(text(k) for text in more.values()),
            *(_number(k[key]) for key in ("registers", "spill_bytes", "shared_bytes")),
            f"{k['compile_ms']:.1f}",
            "yes" if k["cached"] else "no",
        )
        for k in kernels
    ]
    if rows:
        headings = ("kernel", *more, "regs", "spills", "shared", "ms", "cached")
        print_table(headings, rows, right=range(2 if more else 1, len(headings) - 1), details=details)


def _details(kernel: Mapping[str, Any]) -> str:
    """Returns the text below a kernel's row: its nodes, and the reason for its schedule if it was tuned."""
    nodes = f"nodes: {', '.join(kernel['nodes'])}"
    return nodes if kernel["chosen_by"] == "cost model" else f"{nodes}; {kernel['chosen_by']}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
