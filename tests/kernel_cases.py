"""Many graphs at once on the cpu engine: kernels are built in one run of the host compiler, then checked one by one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import codegen
from codegen.cpu.guarded import GuardedArray
from codegen.spec import KernelSource
from codegen.target import target
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.graph import Graph, Tensor
from fusegraph.layout import extent
from fusegraph.lowering.base import Options
from fusegraph.passes.single_elements import combine_single_elements
from fusegraph.report.check import check_executable, random_inputs, run

PATTERN = 0xA5  # what guarded memory holds before it is written


@dataclass
class Case:
    """One graph to build and check.

    family    what the kernel of its contraction must be; None: anything.
    schedule  spec -> schedule for that kernel, and for Winograd's transforms; None: the best one.
    special   share of NaN, infinities and extremes among the inputs.
    check     more to assert, given the Executable.
    arch      the architecture whose kernels are run.
    """

    graph: Graph
    family: str | None = None
    options: Options = field(default_factory=Options)
    schedule: Callable[[Any], Any] | None = None
    inputs: Mapping[str, Any] | None = None
    special: float = 0.0
    fusion: bool = True
    label: str = ""
    check: Callable[[CpuExecutable], None] | None = None
    arch: str | None = None


def executable(case: Case) -> CpuExecutable:
    """Returns the case's Executable, not yet built, with its schedule."""
    options = replace(case.options, target=target(case.arch)) if case.arch else case.options
    made = CpuExecutable(case.graph, options, fusion=case.fusion, lazy=True)
    assert made.plan is not None
    if case.schedule is not None:
        kernels = []
        for kernel in made.plan.kernels:
            spec = kernel.group.lowered.spec
            if kernel.group.family in ("contraction", "direct_convolution", "filter_gradient", "winograd"):
                spec = replace(spec, name=kernel.name)
                schedule = case.schedule(spec)
                choice = kernel.choice if schedule is None else replace(kernel.choice, schedule=schedule)
                kernel = replace(kernel, source=rendered(spec, schedule), choice=choice)
            kernels.append(kernel)
        made.plan = replace(made.plan, kernels=tuple(kernels))
        made._plans[made._options.alignment] = made.plan
    return made


def rendered(spec: Any, schedule: Any) -> KernelSource:
    """Renders the kernel of a spec with the given schedule."""
    return codegen.render(spec, schedule)


def families(made: CpuExecutable) -> list[str]:
    assert made.plan is not None
    return [k.group.family for k in made.plan.kernels]


def check_cases(cases: Iterable[Case | Graph], *, guard: bool = False) -> list[CpuExecutable]:
    """Builds and checks every case against the reference; raises AssertionError naming all that are wrong.

    guard runs each with its arrays between inaccessible pages, at either end: any access outside faults, inputs cannot
    be written, and the outputs must be the same at both.
    """
    every = [c if isinstance(c, Case) else Case(c) for c in cases]
    made = [executable(c) for c in every]
    build_together(made)
    wrong = []
    for number, (case, exe) in enumerate(zip(every, made)):
        name = f"{number}: {case.label or describe(case.graph)}"
        single = combine_single_elements(case.graph).graph is not case.graph  # sums of one product are pointwise
        if case.family not in (None, *families(exe)) and not single:
            wrong.append(f"{name}: families {families(exe)}, expected {case.family}")
        given = case.inputs if case.inputs is not None else random_inputs(case.graph, number, special=case.special)
        outputs, found = run_guarded(exe, given) if guard else (run(exe, given), [])
        wrong += [f"{name}: {text}" for text in found]
        result = check_executable(exe, given, outputs=outputs, strict=case.options.strict)
        if not result.ok:
            wrong.append(f"{name}: {result}")
        if case.check is not None:
            case.check(exe)
    assert not wrong, "\n".join([f"{len(wrong)} of {len(every)} wrong", *wrong[:20]])
    return made


def run_guarded(exe: CpuExecutable, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Runs an Executable on guarded arrays; returns the outputs, and its accesses outside its memory and the output
    elements left unwritten.
    """
    outputs: dict[str, Any] = {}
    found = []
    for flush in ("end", "start"):
        inputs = [
            GuardedArray(given[t.name], flush=flush, writable=False, name=t.name)  # type: ignore[arg-type]
            for t in exe.graph.inputs
        ]
        results = [
            GuardedArray(_untouched(t), flush=flush, name=t.name)  # type: ignore[arg-type]
            for t in exe.graph.outputs
        ]
        exe(*(a.array for a in inputs), out=[a.array for a in results])
        found += [text for a in (*inputs, *results) if (text := a.damage()) is not None]
        for tensor, guarded in zip(exe.graph.outputs, results):
            first = outputs.setdefault(tensor.name, guarded.array.copy())
            if guarded.array.tobytes() != first.tobytes():
                found.append(f"output {tensor.name!r} differs from one place in memory to another")
            guarded.array[...] = _untouched(tensor)
            if any(byte != PATTERN for byte in set(ctypes.string_at(guarded.pointer, guarded.span))):
                found.append(f"bytes between the elements of output {tensor.name!r} were written")
    return outputs, found


def _untouched(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Returns an array in a tensor's layout with every byte, gaps included, set to the pattern."""
    size = tensor.dtype.itemsize
    base = np.full(max(extent(tensor.shape, tensor.strides), 1) * size, PATTERN, np.uint8)
    return np.ndarray(tensor.shape, tensor.dtype.numpy, base, strides=tuple(s * size for s in tensor.strides))


def describe(graph: Graph) -> str:
    """Returns inputs, ops and attributes of a graph in one line."""
    inputs = ", ".join(f"{t.name} {t.dtype} {list(t.shape)}/{list(t.strides)}" for t in graph.inputs)
    nodes = "; ".join(
        f"{n.name} = {n.op.name}({', '.join(t.name for t in n.inputs)}"
        f"{''.join(f', {k}={v}' for k, v in n.attributes.items() if v is not None)})"
        for n in graph.nodes
    )
    return f"{inputs}: {nodes}"
