"""Recognizes torch objects in a file for the command line, without importing torch."""

from __future__ import annotations

import sys
from typing import Any

from fusegraph.graph import Graph


def is_program(value: Any) -> bool:
    """Tells whether a value is a program of torch.export."""
    kind = type(value)
    return kind.__name__ == "ExportedProgram" and kind.__module__.partition(".")[0] == "torch"


def is_model(value: Any) -> bool:
    """Tells whether a value is a tuple of a torch module and a tuple of example inputs."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, tuple) or len(value) != 2:
        return False
    return isinstance(value[0], torch.nn.Module) and isinstance(value[1], tuple)


def graphs_of(name: str, value: Any) -> list[Graph]:
    """Returns the graphs of a program, or of a module with example inputs; prints on stderr what is left to torch.

    Sizes that a program leaves open and that cannot vary here are also told there.
    """
    from fusegraph.frontends.torch.exported import import_module, import_program

    made = import_program(value, name) if is_program(value) else import_module(value[0], *value[1], name=name)
    for node, (op, reason) in made.left.items():
        print(f"{name}: torch has to compute {node} = {op}: {reason}", file=sys.stderr)
    if made.fixed:
        print(f"{name}: its sizes are those of the inputs that it was exported with: {made.fixed}", file=sys.stderr)
    return list(made.graphs)
