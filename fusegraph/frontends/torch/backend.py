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

from fusegraph.dims import Dim
from fusegraph.engines import compile as compile_graph
from fusegraph.engines.base import Executable
from fusegraph.engines.sized import SizedExecutable
from fusegraph.errors import ArgumentError, GraphError
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
from fusegraph.frontends.torch.forms import (
    Forms,
    UnknownSizeError,
    dims_of,
    forms_of,
    is_symbolic,
    measures,
    symbols,
)
from fusegraph.frontends.torch.program import Program, write
from fusegraph.frontends.torch.report import FunctionReport, add, piece_report
from fusegraph.frontends.torch.table import Precision
from fusegraph.frontends.torch.whole_attention import NAMES, keep_whole
from fusegraph.graph import Graph
from fusegraph.phases import Phases, counted, phase, separately, without_collections
from fusegraph.plan import Plan
from fusegraph.runtime.arrays import torch_dtype

#: The keys of `torch.compile(options=...)`: options of `fusegraph.compile`, and ATen operators to leave to torch.
_OPTIONS = ("strict", "fusion", "autotune", "workspace_limit", "prepack_limit", "jobs", "leave")

#: The phase of a graph that is not differentiated.
INFERENCE = "inference"


def backend(
    module: Any, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compiles a graph from torch's tracer; returns the function that computes it.

    ``mode`` "max-autotune" (with or without "-no-cudagraphs") times schedules and choices of kernels on the device.
    ``options`` are those of `fusegraph.compile` (strict, fusion, autotune, workspace_limit, prepack_limit, jobs) and
    leave: a list of names of operators that torch computes, such as "aten.mm.default".  Raises ArgumentError for other
    modes and options.
    """
    settings = _settings(mode, options)
    names = _names(module)
    # A size that was seen to change is compiled for each choice: all of them at once take longer.
    every = not torch._dynamo.config.assume_static_by_default or any(
        getattr(x, "_dynamo_dynamic_indices", None) for x in inputs
    )

    def compiler(part: str) -> Callable[[Any, Sequence[Any]], Program]:
        return lambda traced, _: _boxed(_function(traced, part, settings, names, every=every))

    with counted(Phases()), phase("AOTAutograd"), without_collections():
        if not any(part in name for name in settings.get("leave", ()) for part in NAMES):
            keep_whole(module)
        made = aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler(INFERENCE),
            decompositions=dict(decompositions()),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
        return made(module, inputs)


def _names(module: Any) -> dict[str, str]:
    """Returns AOTAutograd's names of a traced module's tensors and inputs -> readable names.

    AOTAutograd numbers them; the tracer's names are such as l_self_modules_layer1_modules_0_parameters_weight_.
    """
    names: dict[str, str] = {}
    own = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    every = [name for name, _ in own] + [n.name for n in module.graph.nodes if n.op == "placeholder"]
    for number, name in enumerate(every):
        short = re.sub(
            r"^([lL]_)?(self_)?|(?<![a-z0-9])(modules|parameters|buffers)_|_+$", "", re.sub(r"[_.]+", "_", name)
        )
        label = short if short and short not in names.values() else name
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


def _function(
    module: Any, phase: str, settings: Mapping[str, Any], names: Mapping[str, str], *, every: bool = False
) -> Program:
    """Returns the function that computes a traced graph.

    With symbolic sizes and ``every``, the kernels of all sizes are compiled in the first call; each choice of sizes has
    a function of its own that launches them.  Else, where other numbers vary, and for sizes beyond what is compiled
    ahead, each choice is compiled.
    """
    graph = module.graph
    parameters = _parameters(graph) if phase == INFERENCE else ()
    if not is_symbolic(graph):
        return compile_program(Analysis(graph, forms_of(graph, {}), parameters), phase, settings, names)
    known: dict[tuple[Any, ...], Program] = {}
    whole: list[_AllSizes | None] = [] if every else [None]

    def program(arguments: list[Any]) -> Sequence[Any]:
        key = tuple([measures(x) for x in arguments])
        found = known.get(key)
        if found is None:
            values = symbols(graph, arguments)
            if not whole:
                whole.append(_AllSizes.of(graph, values, phase, settings, names))
            found = whole[0].at(values) if whole[0] is not None else None
            if found is None:
                found = compile_program(Analysis(graph, forms_of(graph, values), parameters), phase, settings, names)
            known[key] = found
        return found(arguments)

    return program


def _parameters(graph: Any) -> list[Any]:
    """Returns the inputs of the graph that is being compiled that are parameters and buffers, as torch knows them."""
    context: Any = TracingContext.try_get()
    known = getattr(context.fw_metadata, "static_input_indices", None) if context is not None else None
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return [inputs[n] for n in known or () if n < len(inputs)]


class _AllSizes:
    """A traced graph whose pieces are compiled for all sizes."""

    def __init__(self, graph: Any, dims: Mapping[Any, Dim], division: Cut, run: Mapping[Piece, Executable]) -> None:
        self._graph, self._dims, self._division, self._run = graph, dims, division, run

    @classmethod
    def of(
        cls, graph: Any, values: Mapping[Any, Any], phase: str, settings: Mapping[str, Any], names: Mapping[str, str]
    ) -> _AllSizes | None:
        """Returns the graph, compiled; None if it cannot be compiled for all sizes."""
        dims = dims_of(graph, values)
        if not dims:
            return None
        leave = settings.get("leave", ())
        try:
            forms = forms_of(graph, dims)
            if len(_left(graph, forms, leave)) > len(_left(graph, forms_of(graph, values), leave)):
                return None  # sizes are used as numbers, say
            division, run = _compiled(Analysis(graph, forms), phase, settings, names)
        except (GraphError, UnknownSizeError):
            return None
        return cls(graph, dims, division, run)

    def at(self, values: Mapping[Any, Any]) -> Program | None:
        """Returns the function for values of the symbols; None for sizes that are not compiled ahead."""
        if any(not dim.min <= values[symbol] <= dim.max for symbol, dim in self._dims.items()):
            return None
        sizes = {dim.name: values[symbol] for symbol, dim in self._dims.items()}
        run = {piece: _at(executable, sizes, piece) for piece, executable in self._run.items()}
        return write(Analysis(self._graph, forms_of(self._graph, values)), self._division, run)


def _left(graph: Any, forms: Forms, leave: Sequence[str]) -> Mapping[Any, str]:
    """Returns the nodes of a graph that torch has to compute, with the reasons."""
    return in_pieces(Analysis(graph, forms), "sizes", leave=leave)[0].left


def _at(executable: Executable, sizes: Mapping[str, int], piece: Piece) -> Callable[..., Any]:
    """Returns what runs a piece at sizes by the names of Dims."""
    known = executable.at(sizes) if isinstance(executable, SizedExecutable) else executable
    return known if piece.inputs else _without_inputs(known, piece.device)


def compile_program(analysis: Analysis, phase: str, settings: Mapping[str, Any], names: Mapping[str, str]) -> Program:
    """Cuts a graph, compiles the pieces and writes the function that runs them.

    NVRTC goes on compiling when this returns; the first call waits.
    """
    division, run = _compiled(analysis, phase, settings, names)
    return write(analysis, division, {piece: _at(executable, {}, piece) for piece, executable in run.items()})


def _compiled(
    analysis: Analysis, phase: str, settings: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[Cut, dict[Piece, Executable]]:
    """Cuts a graph and compiles the pieces."""
    start = time.perf_counter()
    with separately() as phases, without_collections():
        with phases.phase("import"):
            inputs = [node for node in analysis.graph.nodes if node.op == "placeholder"]
            labels = {node: names.get(node.name, node.name) for node in inputs}
            division, graphs = in_pieces(analysis, phase, labels, settings.get("leave", ()))
        run = {}
        pieces = []
        for piece, part in graphs.items():
            run[piece] = compile_graph(part, **_how(piece.device, settings))
            pieces.append(piece_report(_plan_of(run[piece]), piece, analysis))
    left = tuple((n.name, str(n.target), reason) for n, reason in division.left.items())
    add(FunctionReport(phase, tuple(pieces), left, time.perf_counter() - start, phases))
    return division, run


def _plan_of(executable: Executable) -> Plan:
    """Returns the plan of a piece; of all sizes that of those that it is described at."""
    if isinstance(executable, SizedExecutable):
        executable = executable.at(executable.described)
    assert executable.plan is not None
    return executable.plan


def _how(device: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `fusegraph.compile` for a piece on a device."""
    kind, _, index = device.partition(":")
    given = {key: value for key, value in settings.items() if key != "leave"}
    if kind == "cuda":
        return {**given, "engine": "cuda", "device": int(index or 0), "wait": False}
    return {**{key: value for key, value in given.items() if key not in ("autotune", "jobs")}, "engine": "cpu"}


def _without_inputs(executable: Executable, device: str) -> Callable[[], Any]:
    """Returns a function that runs a piece without inputs and gives torch tensors, as no input tells the framework."""
    outputs = [(t.shape, t.strides, torch_dtype(torch, t.dtype)) for t in executable.graph.results]

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
