"""Imports programs of ``torch.export`` as graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusegraph.errors import GraphError
from fusegraph.frontends.torch.backend import Divided, check_sizes, in_pieces
from fusegraph.frontends.torch.cut import Analysis, Cut, Piece
from fusegraph.frontends.torch.decompositions import decompositions
from fusegraph.frontends.torch.forms import SYMBOLIC, UnknownSizeError, dims_of, forms_of, measures
from fusegraph.frontends.torch.report import FunctionReport, piece_report
from fusegraph.graph import Graph
from fusegraph.lowering.base import Options
from fusegraph.phases import Phases, counted, phase, without_collections
from fusegraph.plan import plan, shared_kernels
from fusegraph.runtime.targets import DEFAULT, named


@dataclass(frozen=True)
class Imported:
    """An imported program.

    graphs  those of its pieces, in the order in which they run.
    left    the nodes that torch has to compute between them: name -> (operator, reason).
    fixed   why sizes that the program leaves open are those of its example; empty if none are.
    """

    graphs: tuple[Graph, ...]
    left: Mapping[str, tuple[str, str]]
    fixed: str = ""


def _cut(program: Any, name: str) -> tuple[Analysis, Cut, dict[Piece, Graph], str]:
    """Cuts a program into pieces; returns the analysis, the pieces, their graphs, and why no size varies in these."""
    with phase("tracing"):
        lowered = program.run_decompositions(dict(decompositions()))
    graph, signature = lowered.graph_module.graph, lowered.graph_signature
    _write_changes(graph, signature)
    inner = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names = {node: inner.get(node.name, node.name) for node in graph.nodes if node.op == "placeholder"}
    parameters = [n for n in names if n.name in inner or n.name in signature.inputs_to_lifted_tensor_constants]
    values, why = _hints(graph), ""
    divide = partial(in_pieces, name=name, names=names)
    if values:
        try:
            return (*_for_all_sizes(graph, values, parameters, divide), "")
        except (GraphError, UnknownSizeError) as error:
            why = str(error)
    analysis = Analysis(graph, forms_of(graph, values), parameters)
    return analysis, *divide(analysis), why


def _for_all_sizes(
    graph: Any, values: Mapping[Any, Any], parameters: Sequence[Any], divide: Callable[[Analysis], Divided]
) -> tuple[Analysis, Cut, dict[Piece, Graph]]:
    """Cuts a graph whose open sizes are Dims.  Raises GraphError or UnknownSizeError if pieces depend on them."""
    dims = dims_of(graph, values)
    analysis = Analysis(graph, forms_of(graph, dims), parameters)
    divided = divide(analysis)
    check_sizes(analysis, dims, values, divide, divided)
    return analysis, *divided


def import_program(program: Any, name: str = "model") -> Imported:
    """Imports an ``ExportedProgram``: as one graph, unless operators that fusegraph lacks separate its parts.

    Parameters and buffers are inputs, named as in the module; those that the program changes are assigned to.  Sizes
    that the program leaves open are Dims of its names and bounds; if its graphs depend on them, they are those of the
    inputs that it was exported with.
    """
    _, division, graphs, fixed = _cut(program, name)
    left = {node.name: (str(node.target), reason) for node, reason in division.left.items()}
    return Imported(tuple(graphs.values()), left, fixed)


def import_module(module: Any, *inputs: Any, name: str | None = None) -> Imported:
    """Imports a module for example inputs, which may be fake tensors: only their shapes and dtypes count."""
    with torch.no_grad():
        program = torch.export.export(module, inputs)
    return import_program(program, name or type(module).__name__)


def explain(module: Any, *inputs: Any, target: str = DEFAULT) -> FunctionReport:
    """Reports what the backend makes of a module for example inputs, which may be fake tensors.

    The pieces are planned for ``target`` but not compiled; `FunctionReport.save` writes a page of them.  Raises
    CompileError for an unknown target.
    """
    began = time.perf_counter()
    phases = Phases()
    with counted(phases), without_collections(), shared_kernels():
        with phase("tracing"), torch.no_grad():
            program = torch.export.export(module, inputs)
        name = type(module).__name__
        analysis, division, graphs, _ = _cut(program, name)
        options = Options(target=named(target))
        reports = [piece_report(plan(graph, options), piece, analysis, keep=True) for piece, graph in graphs.items()]
    left = tuple((n.name, str(n.target), reason) for n, reason in division.left.items())
    return FunctionReport(name, tuple(reports), left, time.perf_counter() - began, phases)


def _write_changes(graph: Any, signature: Any) -> None:
    """Replaces the new values of buffers and inputs among a program's results by copies into these."""
    names = {t: n for n, t in {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.items()}
    inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    output = graph.output_node()
    results = []
    for spec, value in zip(signature.output_specs, output.args[0], strict=True):
        if not spec.kind.name.endswith("_MUTATION"):
            results.append(value)
            continue
        target = inputs[names.get(spec.target, spec.target)]
        with graph.inserting_before(output):
            copy = graph.call_function(torch.ops.aten.copy_.default, (target, value))
        copy.meta["val"] = target.meta["val"]
    output.args = (tuple(results),)


def _hints(graph: Any) -> dict[Any, Any]:
    """Returns the values in the example of symbols, and of expressions of them."""
    found: dict[Any, Any] = {}
    for node in graph.nodes:
        for measure in measures(node.meta.get("val")) if node.op == "placeholder" else ():
            if isinstance(measure, SYMBOLIC) and measure.node.has_hint():
                found.setdefault(measure.node.expr, measure.node.hint)
    return found
