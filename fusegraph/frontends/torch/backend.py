"""The backend of ``torch.compile(model, backend="fusegraph")``.

torch traces the model; AOTAutograd makes graphs of ATen operators without mutation, forward and backward; each graph is
cut, built and compiled here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext

from fusegraph.engines import compile as compile_graph
from fusegraph.engines.base import Executable
from fusegraph.errors import ArgumentError
from fusegraph.frontends.torch import (  # noqa: F401 - they fill the table
    attention,
    contraction,
    diagonal,
    indices,
    movement,
    norm,
    pointwise,
    reduction,
    sorting,
    window,
)
from fusegraph.frontends.torch.build import build
from fusegraph.frontends.torch.cut import Analysis, Cut, Piece, cut
from fusegraph.frontends.torch.decompositions import decompositions
from fusegraph.frontends.torch.forms import forms_of, is_symbolic, measures, symbols
from fusegraph.frontends.torch.program import Program, write
from fusegraph.frontends.torch.report import FunctionReport, add, piece_report
from fusegraph.frontends.torch.table import Precision
from fusegraph.frontends.torch.whole_attention import NAMES, keep_whole
from fusegraph.graph import Graph
from fusegraph.runtime.arrays import torch_dtype

#: The keys of `torch.compile(options=...)`: options of `fusegraph.compile`, and ATen operators to leave to torch.
_OPTIONS = ("strict", "fusion", "autotune", "workspace_limit", "prepack_limit", "jobs", "leave")

#: The phase of a graph that is not differentiated.
INFERENCE = "inference"


def backend(
    module: Any, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compiles a graph from torch's tracer; returns the function that computes it.

    ``mode`` "max-autotune" (with or without "-no-cudagraphs") times schedules on the device.  ``options`` are those of
    `fusegraph.compile` (strict, fusion, autotune, workspace_limit, prepack_limit, jobs) and leave: a list of names of
    operators that torch computes, such as "aten.mm.default".  Raises ArgumentError for other modes and options.
    """
    settings = _settings(mode, options)
    names = _names(module.graph)
    if not any(part in name for name in settings.get("leave", ()) for part in NAMES):
        keep_whole(module)

    def compiler(phase: str) -> Callable[[Any, Sequence[Any]], Program]:
        return lambda traced, _: _boxed(_function(traced, phase, settings, names))

    made = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler(INFERENCE),
        decompositions=dict(decompositions()),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return made(module, inputs)


def _names(graph: Any) -> dict[str, str]:
    """Returns AOTAutograd's names of a traced graph's inputs -> readable names.

    AOTAutograd numbers inputs; the tracer's names are such as l_self_modules_layer1_modules_0_parameters_weight_.
    """
    names: dict[str, str] = {}
    for number, node in enumerate(n for n in graph.nodes if n.op == "placeholder"):
        short = re.sub(
            r"^[lL]_(self_)?|(?<![a-z0-9])(modules|parameters|buffers)_|_+$", "", node.name.replace("__", "_")
        )
        label = short if short and short not in names.values() else node.name
        names |= {f"arg{number}_1": label, f"primals_{number + 1}": label}
    return names


def _settings(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    settings = dict(options or {})
    for key in settings:
        if key not in _OPTIONS:
            raise ArgumentError(f"backend fusegraph has no option {key!r}; it has: {', '.join(_OPTIONS)}")
    modes = (None, "default", "max-autotune", "max-autotune-no-cudagraphs")
    if mode not in modes:
        raise ArgumentError(f"backend fusegraph has no mode {mode!r}; it has: {', '.join(map(str, modes))}")
    if mode is not None and mode.startswith("max-autotune"):
        settings.setdefault("autotune", True)
    leave = settings.get("leave", ())
    if not isinstance(leave, list | tuple | set | frozenset) or not all(_is_operator(name) for name in leave):
        raise ArgumentError(f"option leave is {leave!r}; it may be a list of torch's operators: ['aten.mm.default']")
    return settings


def _is_operator(name: object) -> bool:
    """Tells whether torch has an operator of this name, such as "aten.mm.default"."""
    found: Any = torch.ops
    parts = name.split(".") if isinstance(name, str) else []
    for part in parts:
        found = getattr(found, part, None)
    return len(parts) == 3 and found is not None


def _boxed(program: Program) -> Program:
    """Marks a function as one that takes its arguments in a list, which it may clear."""
    program._boxed_call = True  # type: ignore[attr-defined]
    return program


def _function(module: Any, phase: str, settings: Mapping[str, Any], names: Mapping[str, str]) -> Program:
    """Returns the function that computes a traced graph; with symbolic sizes, it compiles for each choice of them."""
    graph = module.graph
    parameters = _parameters(graph) if phase == INFERENCE else ()
    if not is_symbolic(graph):
        return compile_program(Analysis(graph, forms_of(graph, {}), parameters), phase, settings, names)
    known: dict[tuple[Any, ...], Program] = {}

    def program(arguments: list[Any]) -> Sequence[Any]:
        key = tuple([measures(x) for x in arguments])
        found = known.get(key)
        if found is None:
            forms = forms_of(graph, symbols(graph, arguments))
            found = known[key] = compile_program(Analysis(graph, forms, parameters), phase, settings, names)
        return found(arguments)

    return program


def _parameters(graph: Any) -> list[Any]:
    """Returns the inputs of the graph that is being compiled that are parameters and buffers, as torch knows them."""
    context: Any = TracingContext.try_get()
    known = getattr(context.fw_metadata, "static_input_indices", None) if context is not None else None
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return [inputs[n] for n in known or () if n < len(inputs)]


def compile_program(analysis: Analysis, phase: str, settings: Mapping[str, Any], names: Mapping[str, str]) -> Program:
    """Cuts a graph, compiles the pieces and writes the function that runs them."""
    start = time.perf_counter()
    labels = {node: names.get(node.name, node.name) for node in analysis.graph.nodes if node.op == "placeholder"}
    division, graphs = in_pieces(analysis, phase, labels, settings.get("leave", ()))
    run = {}
    pieces = []
    for piece, part in graphs.items():
        kind, _, index = piece.device.partition(":")
        engine: dict[str, Any] = {"engine": "cuda", "device": int(index or 0)} if kind == "cuda" else {"engine": "cpu"}
        how = {
            key: value
            for key, value in settings.items()
            if key != "leave" and (kind == "cuda" or key not in ("autotune", "jobs"))
        }
        executable = compile_graph(part, **engine, **how)
        assert executable.plan is not None
        run[piece] = executable if piece.inputs else _without_inputs(executable, piece.device)
        pieces.append(piece_report(executable.plan, piece, analysis))
    program = write(analysis, division, run)
    left = tuple((n.name, str(n.target), reason) for n, reason in division.left.items())
    add(FunctionReport(phase, tuple(pieces), left, time.perf_counter() - start))
    return program


def _without_inputs(executable: Executable, device: str) -> Callable[[], Any]:
    """Returns a function that runs a piece without inputs and gives torch tensors, as no input tells the framework."""
    outputs = [(t.shape, t.strides, torch_dtype(torch, t.dtype)) for t in executable.graph.outputs]

    def run() -> Any:
        made = [torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in outputs]
        return executable(out=made)

    return run


def in_pieces(
    analysis: Analysis, name: str, names: Mapping[Any, str] | None = None, leave: Sequence[str] = ()
) -> tuple[Cut, dict[Piece, Graph]]:
    """Cuts a graph so that every piece can be built, and builds these; operators in ``leave`` are left to torch."""
    refused = {node: "left by an option" for node in analysis.graph.nodes if str(node.target) in leave}
    while True:
        division = cut(analysis, refused)
        several = len(division.pieces) > 1
        built = {
            piece: build(piece, analysis, f"{name}_{number}" if several else name, precision(piece.device), names or {})
            for number, piece in enumerate(division.pieces, start=1)
        }
        fresh = {node: reason for b in built.values() for node, reason in b.refused.items()}
        if not fresh:
            return division, {piece: b.graph for piece, b in built.items()}
        refused |= fresh


def precision(device: str) -> Precision:
    """Returns whether torch's settings for CUDA allow tf32 in products and in convolutions; on others they do not."""
    if not device.startswith("cuda"):
        return Precision()
    return Precision(_allows_tf32(torch.backends.cuda.matmul), _allows_tf32(torch.backends.cudnn, "conv"))


def _allows_tf32(settings: Any, part: str | None = None) -> bool:
    """Reads the setting of newer releases of torch, or the older one that it replaced."""
    newer: Any = getattr(settings, part, None) if part else settings
    if hasattr(newer, "fp32_precision"):
        return bool(newer.fp32_precision == "tf32")
    return bool(settings.allow_tf32)
