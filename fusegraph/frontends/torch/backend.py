"""The backend of ``torch.compile(model, backend="fusegraph")``.

torch traces the model; AOTAutograd makes graphs of ATen operators without mutation, forward and backward; each graph is
cut, built and compiled here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext

from codegen.sizes import at
from fusegraph.dims import Dim
from fusegraph.dtypes import float8_e8m0
from fusegraph.engines import compile as compile_graph
from fusegraph.engines.base import Executable
from fusegraph.engines.plans import described
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
    quantized,
    reduction,
    semi_structured,
    sorting,
    whole_gelu,
    whole_heads,
    window,
)
from fusegraph.frontends.torch.build import build
from fusegraph.frontends.torch.counters import makes_counter, take_counters
from fusegraph.frontends.torch.cut import Analysis, Cut, Piece, cut
from fusegraph.frontends.torch.decompositions import decompositions
from fusegraph.frontends.torch.division import chosen, divide, donated_inputs, report_strides, take_strides
from fusegraph.frontends.torch.forms import (
    NUMBER,
    UnknownSizeError,
    dims_of,
    forms_of,
    is_number,
    is_symbolic,
    measures,
    symbols,
)
from fusegraph.frontends.torch.older import round_down_without_guards
from fusegraph.frontends.torch.program import Program, write
from fusegraph.frontends.torch.random import drawn_in_kernels, prepare_random_numbers
from fusegraph.frontends.torch.report import FunctionReport, add, piece_report
from fusegraph.frontends.torch.table import Precision
from fusegraph.frontends.torch.whole_attention import NAMES, keep_whole
from fusegraph.graph import Graph
from fusegraph.phases import Phases, counted, phase, separately, without_collections
from fusegraph.plan import Plan, shared_kernels
from fusegraph.report.explain import count_text
from fusegraph.runtime.arrays import torch_dtype
from fusegraph.sized_graphs import graph_at

round_down_without_guards()

#: The keys of `torch.compile(options=...)`: options of `fusegraph.compile`, and ATen operators to leave to torch.
_OPTIONS = ("strict", "fusion", "autotune", "workspace_limit", "prepack_limit", "jobs", "leave", "fallback_random")
#: Those of them that `fusegraph.compile` does not have.
_OWN = ("leave", "fallback_random")

#: Why sizes that were seen to vary are compiled one by one.
_UNDECLARED = "sizes are compiled ahead where they are declared to vary, by dynamic=True or mark_dynamic"

#: The phases of a graph that is not differentiated, and of one that computes gradients.
INFERENCE, BACKWARD = "inference", "backward"

#: A graph in pieces, and the graphs of these.
Divided: TypeAlias = tuple[Cut, dict[Piece, Graph]]


def backend(
    module: Any, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compiles a graph from torch's tracer; returns the function that computes it.

    ``mode`` "max-autotune" (with or without "-no-cudagraphs") times schedules and choices of kernels on the device.
    ``options`` are those of `fusegraph.compile` (strict, fusion, autotune, workspace_limit, prepack_limit, jobs) and
    leave: a list of names of operators that torch computes, such as "aten.mm.default"; and fallback_random: whether
    random numbers are those of eager mode, which torch draws, not kernels.  Raises ArgumentError for other modes and
    options.
    """
    settings = _settings(mode, options)
    names, floats = _names(module), _floats(module)
    # A size that was seen to change is compiled for each choice: all of them at once take longer.
    every = not torch._dynamo.config.assume_static_by_default or any(
        getattr(x, "_dynamo_dynamic_indices", None) for x in inputs
    )

    def compiler(part: str) -> Callable[[Any, Sequence[Any]], Program]:
        def compiled(traced: Any, given: Sequence[Any]) -> Program:
            if part == BACKWARD:
                take_strides(traced.graph, given)
            return _boxed(_function(traced, part, settings, names, floats, every=every))

        return compiled

    drawn = drawn_in_kernels(not settings.get("fallback_random", False))
    with counted(Phases()), phase("AOTAutograd"), without_collections(), drawn:
        if not any(part in name for name in settings.get("leave", ()) for part in NAMES):
            keep_whole(module)
        if not any(whole_heads.NAME in name for name in settings.get("leave", ())):
            whole_heads.keep_heads_whole(module)
        if not any(whole_gelu.NAME in name for name in settings.get("leave", ())):
            whole_gelu.keep_gelu_whole(module)
        made = aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler(BACKWARD),
            inference_compiler=compiler(INFERENCE),
            decompositions=dict(decompositions()),
            partition_fn=divide,
            keep_inference_input_mutations=True,
        )
        return made(module, inputs)


def _names(module: Any) -> dict[str, str]:
    """Returns AOTAutograd's names of a traced module's tensors and inputs -> readable names.

    AOTAutograd numbers them; the tracer's names are such as l_self_modules_layer1_modules_0_parameters_weight_.
    """
    names: dict[str, str] = {}
    for number, name in enumerate((*_own(module), *(n.name for n in module.graph.nodes if n.op == "placeholder"))):
        short = re.sub(
            r"^([lL]_)?(self_)?|(?<![a-z0-9])(modules|parameters|buffers)_|_+$", "", re.sub(r"[_.]+", "_", name)
        )
        label = short if short and short not in names.values() else name
        names |= dict.fromkeys(_numbered(number), label)
    return names


def _own(module: Any) -> list[str]:
    """Returns the names of a module's parameters and buffers, which AOTAutograd puts before its inputs."""
    own = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [name for name, _ in own]


def _numbered(number: int) -> tuple[str, str]:
    """Returns AOTAutograd's names of an input, without and with gradients."""
    return f"arg{number}_1", f"primals_{number + 1}"


def _floats(module: Any) -> frozenset[str]:
    """Returns AOTAutograd's names of those inputs that are numbers in the program, such as an attribute of a layer."""
    inputs = enumerate((n for n in module.graph.nodes if n.op == "placeholder"), len(_own(module)))
    numbers = [k for k, n in inputs if getattr(n.meta.get("grapharg"), "pass_arg_as_tensor", False)]
    return frozenset(name for number in numbers for name in _numbered(number))


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
    module: Any,
    phase: str,
    settings: Mapping[str, Any],
    names: Mapping[str, str],
    floats: frozenset[str] = frozenset(),
    *,
    every: bool = False,
) -> Program:
    """Returns the function that computes a traced graph.

    With symbolic sizes and ``every``, the kernels of all sizes are compiled in the first call; each choice of sizes has
    a function of its own that launches them.  Else, where other numbers vary, and for sizes beyond what is compiled
    ahead, each choice is compiled.  The inputs ``floats``, and other numbers on the CPU beside tensors on a
    GPU, are constants until they change.
    """
    graph = module.graph
    prepare_random_numbers(graph)
    if phase == INFERENCE:
        take_counters(graph)
    parameters = _parameters(graph) if phase == INFERENCE else ()
    donated = donated_inputs(graph) if phase == BACKWARD else ()
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    on_gpu = any(getattr(node.meta.get("val"), "is_cuda", False) for node in inputs)
    constants: dict[int, float | None] = {
        k: None for k, node in enumerate(inputs) if is_number(node) and (node.name in floats or on_gpu)
    }
    varying = [k for k, node in enumerate(inputs) if is_symbolic(node)]
    if not varying and not constants:
        analysis = Analysis(graph, forms_of(graph, {}), parameters, donated, chosen(graph))
        made = compile_program(analysis, phase, settings, names)
        report_strides(graph, analysis.strides)
        return made
    known: dict[tuple[Any, ...], Program] = {}
    ahead = every and bool(varying)
    #: All sizes, or why they are compiled when they come.
    whole: list[_AllSizes | str] = [] if ahead else [_UNDECLARED if varying else ""]

    def compiled(arguments: list[Any]) -> Program:
        values, reason = symbols(graph, arguments), ""
        if not whole:
            try:
                whole.append(_AllSizes.of(graph, parameters, values, phase, settings, names))
            except (GraphError, UnknownSizeError, ArithmeticError) as error:
                whole.append(str(error))
        if isinstance(whole[0], str):
            reason = whole[0]
        elif (found := whole[0].at(values)) is not None:
            return found
        else:
            reason = "it is beyond the sizes that are compiled ahead"
        analysis = Analysis(graph, forms_of(graph, values), parameters, donated)
        return compile_program(analysis, phase, settings, names, reason)

    def program(arguments: list[Any]) -> Sequence[Any]:
        given = {k: arguments[k].item() for k in constants}
        if given != constants:
            for k, number in given.items():
                if constants[k] is None:
                    constants[k], inputs[k].meta[NUMBER] = number, arguments[k]
                elif constants[k] != number:
                    del constants[k], inputs[k].meta[NUMBER]
                    known.clear()
                    del whole[: int(ahead)]
        key = tuple([measures(arguments[k]) for k in varying])
        if key not in known:
            known[key] = compiled(arguments)
        return known[key](arguments)

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
        cls,
        graph: Any,
        parameters: Sequence[Any],
        values: Mapping[Any, Any],
        phase: str,
        settings: Mapping[str, Any],
        names: Mapping[str, str],
    ) -> _AllSizes:
        """Returns the graph, compiled.

        Raises GraphError or UnknownSizeError if that cannot be done for all sizes, ArithmeticError if one of them is
        divided by what may be 0.
        """
        dims = dims_of(graph, values)
        analysis = Analysis(graph, forms_of(graph, dims), parameters)
        divide = partial(_divided, phase=phase, settings=settings, names=names)
        check = partial(check_sizes, analysis, dims, values, divide)
        division, run = _compiled(analysis, phase, settings, names, check=check)
        return cls(graph, dims, division, run)

    def at(self, values: Mapping[Any, Any]) -> Program | None:
        """Returns the function for values of the symbols; None for sizes that are not compiled ahead."""
        if any(not dim.min <= values[symbol] <= dim.max for symbol, dim in self._dims.items()):
            return None
        sizes = {dim.name: values[symbol] for symbol, dim in self._dims.items()}
        run = {piece: _at(executable, sizes, piece) for piece, executable in self._run.items()}
        return write(Analysis(self._graph, forms_of(self._graph, values)), self._division, run)


def check_sizes(
    analysis: Analysis,
    dims: Mapping[Any, Dim],
    values: Mapping[Any, int],
    divide: Callable[[Analysis], Divided],
    divided: Divided,
) -> None:
    """Raises GraphError unless the pieces of a graph hold for all sizes.

    They do not if torch has to compute more because sizes vary, or if a handler made a plain number of a size: then the
    pieces are others where they are described at other sizes.
    """
    smallest = {dim.name: dim.min for dim in dims.values()}
    known, other = (
        divide(Analysis(analysis.graph, forms_of(analysis.graph, chosen), analysis.parameters))
        for chosen in (values, at(dims, smallest, vary=True))
    )
    for node, why in divided[0].left.items():
        if node not in known[0].left:
            raise GraphError(f"{node.name} = {node.target} would be left to torch: {why}")
    for made, there in zip(divided[1].values(), other[1].values()):
        if described(graph_at(made, smallest, vary=True)[0]) != described(there):
            raise GraphError(f"graph {made.name!r} has numbers that depend on sizes")


def _at(executable: Executable, sizes: Mapping[str, int], piece: Piece) -> Callable[..., Any]:
    """Returns what runs a piece at sizes by the names of Dims."""
    known = executable.at(sizes) if isinstance(executable, SizedExecutable) else executable
    if not piece.inputs:
        return _without_inputs(known, piece.device)
    return _with_powers(known) if any(t.dtype == float8_e8m0 for t in known.graph.made) else known


def _with_powers(executable: Executable) -> Callable[..., Any]:
    """Returns a function that runs a piece and gives results in float8_e8m0 as torch has them, not as bytes."""
    results = [(t, t.dtype == float8_e8m0 and t not in executable.graph.updates) for t in executable.graph.results]

    def run(*arrays: Any) -> Any:
        made = executable(*arrays)
        found = tuple(
            x.view(torch_dtype(torch, t.dtype)).as_strided(t.shape, t.strides) if is_bytes else x
            for x, (t, is_bytes) in zip(made if len(results) > 1 else (made,), results)
        )
        return found if len(results) > 1 else found[0]

    return run


def compile_program(
    analysis: Analysis, phase: str, settings: Mapping[str, Any], names: Mapping[str, str], by_size: str = ""
) -> Program:
    """Cuts a graph, compiles the pieces and writes the function that runs them.

    NVRTC goes on compiling when this returns; the first call waits.  ``by_size`` is why it is not for all sizes.
    """
    division, run = _compiled(analysis, phase, settings, names, by_size)
    return write(analysis, division, {piece: _at(executable, {}, piece) for piece, executable in run.items()})


def _compiled(
    analysis: Analysis,
    phase: str,
    settings: Mapping[str, Any],
    names: Mapping[str, str],
    by_size: str = "",
    check: Callable[[Divided], None] = lambda _: None,
) -> tuple[Cut, dict[Piece, Executable]]:
    """Cuts a graph, and compiles the pieces if ``check`` does not raise."""
    start = time.perf_counter()
    with separately() as phases, without_collections(), shared_kernels():
        with phases.phase("import"):
            divided = division, graphs = _divided(analysis, phase, settings, names)
            check(divided)
        run = {}
        pieces = []
        for piece, part in graphs.items():
            run[piece] = compile_graph(part, **_how(piece.device, settings))
            pieces.append(piece_report(_plan_of(run[piece]), piece, analysis))
            by_size = by_size or _left_to_calls(run[piece])
    computed = ((n, reason) for n, reason in division.left.items() if not makes_counter(n))
    left = tuple((n.name, str(n.target), reason) for n, reason in computed)
    add(FunctionReport(phase, tuple(pieces), left, time.perf_counter() - start, phases, by_size))
    return division, run


def _divided(analysis: Analysis, phase: str, settings: Mapping[str, Any], names: Mapping[str, str]) -> Divided:
    """Cuts a graph into pieces, and builds these; ``names`` has readable names of its inputs."""
    inputs = [node for node in analysis.graph.nodes if node.op == "placeholder"]
    labels = {node: names.get(node.name, node.name) for node in inputs}
    return in_pieces(analysis, phase, labels, settings.get("leave", ()))


def _plan_of(executable: Executable) -> Plan:
    """Returns the plan of a piece; of all sizes that of those that it is described at."""
    if isinstance(executable, SizedExecutable):
        executable = executable.at(executable.described)
    assert executable.plan is not None
    return executable.plan


def _left_to_calls(executable: Executable) -> str:
    """Returns which sizes of a piece are compiled when they come, and why; empty if none are."""
    plans = executable.plans if isinstance(executable, SizedExecutable) else ()
    some = [f"{range_}: {why}" for planned in plans for range_, why in planned.by_size]
    return f"in {count_text(len(some), 'range')}, such as {some[0]}" if some else ""


def _how(device: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `fusegraph.compile` for a piece on a device."""
    kind, _, index = device.partition(":")
    given = {key: value for key, value in settings.items() if key not in _OWN}
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
        several, readers = len(division.pieces) > 1, analysis.readers(division)
        owned = {node for node in analysis.donated if readers[node] == 1}
        movable = {node for node in analysis.movable if not readers[node]}
        built = {}
        for number, piece in enumerate(division.pieces, start=1):
            label = f"{name}_{number}" if several else name
            built[piece] = build(piece, analysis, label, precision(piece.device), names or {}, owned, movable)
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
