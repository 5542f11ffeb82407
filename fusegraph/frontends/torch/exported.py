"""Programs of ``torch.export`` as graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusegraph.frontends.torch.backend import decompositions, in_pieces
from fusegraph.frontends.torch.cut import Analysis
from fusegraph.frontends.torch.forms import forms_of
from fusegraph.graph import Graph


@dataclass(frozen=True)
class Imported:
    """The graphs of a program's pieces, in the order in which they run, and the nodes that torch has to compute between
    them, by name, with operator and reason.
    """

    graphs: tuple[Graph, ...]
    left: Mapping[str, tuple[str, str]]


def import_program(program: Any, name: str = "model") -> Imported:
    """The graphs of an ``ExportedProgram``: one, unless operators that fusegraph has not stand between its parts.

    Parameters and buffers are inputs, named as in the module.  Sizes that the program leaves open are those of the
    inputs it was exported with.
    """
    lowered = program.run_decompositions(decompositions())
    graph = lowered.graph_module.graph
    signature = lowered.graph_signature
    inner = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names = {node: inner.get(node.name, node.name) for node in graph.nodes if node.op == "placeholder"}
    analysis = Analysis(graph, forms_of(graph, _hints(graph)))
    division, graphs = in_pieces(analysis, name, names)
    left = {node.name: (str(node.target), reason) for node, reason in division.left.items()}
    return Imported(tuple(graphs.values()), left)


def import_module(module: Any, *inputs: Any, name: str | None = None) -> Imported:
    """The graphs of a module for example inputs, which may be fake: only their types count."""
    with torch.no_grad():
        program = torch.export.export(module, inputs)
    return import_program(program, name or type(module).__name__)


def _hints(graph: Any) -> dict[Any, int]:
    """Each symbol's value in the example."""
    found: dict[Any, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            for size in value.shape:
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.has_hint():
                    found[size.node.expr] = int(size.node.hint)
    return found
