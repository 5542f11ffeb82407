"""Generates the function that runs the pieces, and torch's operators between them, as straight-line Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fusegraph.frontends.torch.cut import COPY, Analysis, Cut, Piece
from fusegraph.frontends.torch.forms import is_projection
from fusegraph.runtime.arrays import torch_dtype

#: A function of the list of all arguments, which it clears, that returns all results.
Program = Callable[[list[Any]], Sequence[Any]]


def write(analysis: Analysis, cut: Cut, run: Mapping[Piece, Callable[..., Any]]) -> Program:
    """Returns the function that computes a graph.

    ``run`` maps each piece to a function of its inputs that returns its output, or a tuple of outputs.
    """
    return _Writer(analysis, cut, run).write()


class _Writer:
    def __init__(self, analysis: Analysis, cut: Cut, run: Mapping[Piece, Callable[..., Any]]) -> None:
        self._analysis, self._cut, self._run = analysis, cut, run
        self._names: dict[Any, str] = {}
        self._scope: dict[str, Any] = {"as_declared": _as_declared}
        self._lines: list[tuple[str, tuple[Any, ...]]] = []  # text, and the nodes whose values it mentions

    def write(self) -> Program:
        graph = self._analysis.graph
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        for node in placeholders:
            self._name(node)
        for node in graph.nodes:
            if node.op == "get_attr":
                self._scope[self._name(node)] = attrgetter(node.target)(graph.owning_module)
        copies = [n for n in self._cut.left if str(n.target) == COPY]
        left = [n for n in graph.nodes if n in self._cut.left and n not in copies]
        for level in sorted({*self._cut.levels.values()}):
            for node in left:
                if self._cut.levels[node] == level:
                    self._torch(node)
            for piece in self._cut.pieces:
                if piece.level == level:
                    self._piece(piece)
        if copies:  # the model changes inputs: they are written after everything has been read
            targets, sources = ([self._text(n.args[k]) for n in copies] for k in (0, 1))
            self._scope["copy_all"] = torch._foreach_copy_
            self._line(f"copy_all([{', '.join(targets)}], [{', '.join(sources)}])", copies)
            self._names |= {n: self._names[n.args[0]] for n in copies}
        output = next(n for n in graph.nodes if n.op == "output")
        results = self._text(output.args[0])
        names = [self._names[n] for n in placeholders]
        body = [f"    {', '.join(names)}, = arguments"] if names else []
        body += ["    arguments.clear()", *self._with_deletions(output), f"    return {results}"]
        exec("\n".join(["def program(arguments):", *body]), self._scope)
        program: Program = self._scope["program"]
        return program

    def _with_deletions(self, output: Any) -> list[str]:
        """Returns the lines, each followed by a deletion of values that are not needed any more, to free memory."""
        last: dict[str, int] = {}
        for number, (_, nodes) in enumerate(self._lines):
            last |= {self._names[n]: number for n in nodes}
        kept = {self._names[n] for n in output.all_input_nodes if n in self._names}
        kept |= {n for n in last if n in self._scope}
        result = []
        for number, (text, _) in enumerate(self._lines):
            gone = [name for name, at in last.items() if at == number and name not in kept]
            result += [f"    {text}"] + ([f"    del {', '.join(gone)}"] if gone else [])
        return result

    def _name(self, node: Any) -> str:
        return self._names.setdefault(node, f"v{len(self._names)}")

    def _line(self, text: str, nodes: Sequence[Any]) -> None:
        self._lines.append((text, tuple(n for m in nodes for n in (m, *m.all_input_nodes) if n in self._names)))

    def _piece(self, piece: Piece) -> None:
        inputs = [self._text(n) for n in piece.inputs]
        target = f"piece{len(self._scope)}"
        self._scope[target] = self._run[piece]
        outputs = [self._name(n) for n in piece.outputs]
        call, nodes = f"{target}({', '.join(inputs)})", (*piece.inputs, *piece.outputs)
        if any(n in self._analysis.donated for n in piece.inputs) and hasattr(self._run[piece], "consume"):
            self._lines.append((f"given = [{', '.join(inputs)}]", piece.inputs))  # their names go, so their memory can
            call, nodes = f"{target}.consume(given)", piece.outputs
        self._lines.append((f"{', '.join(outputs)} = {call}" if outputs else call, nodes))

    def _torch(self, node: Any) -> None:
        """Writes a call of one of torch's operators."""
        args = [self._text(a) for a in node.args] + [f"{k}={self._text(v)}" for k, v in node.kwargs.items()]
        target = f"op{len(self._scope)}"
        self._scope[target] = node.target
        call = f"{target}({', '.join(args)})"
        self._line(f"{self._name(node)} = {self._declared(node, call)}", [node])

    def _declared(self, node: Any, call: str) -> str:
        """Wraps torch's call so that its result has the strides and dtype for which pieces that take it were built."""
        form = self._analysis.forms.of(node)
        if form is None or form.dtype is None or not any(node in piece.inputs for piece in self._cut.pieces):
            return call
        return f"as_declared({call}, {form.strides!r}, {self._literal(torch_dtype(torch, form.dtype))})"

    def _made(self, node: Any) -> str:
        """Returns the text of a node's value; a view, a constant or one of several results is made now."""
        if node in self._analysis.forms.numbers and node not in self._names:
            return self._number(node)
        if node not in self._names:
            if is_projection(node):
                source = self._made(node.args[0])
                call = f"{source}[{node.args[1]}]"
                self._line(f"{self._name(node)} = {self._declared(node, call)}", [node])
            else:
                self._torch(node)
        return self._names[node]

    def _number(self, node: Any) -> str:
        """Returns a number that is known; a fresh tensor where the graph has it as one, as callers may write to it."""
        number, form = self._analysis.forms.numbers[node], node.meta.get("val")
        if not isinstance(form, torch.Tensor):
            return self._literal(number)
        with _disable_current_modes():  # torch may be tracing
            made = torch.tensor(number, dtype=form.dtype)
        return f"{self._literal(made)}.clone()"

    def _text(self, value: Any) -> str:
        """Returns an argument as Python source."""
        if isinstance(value, tuple | list):
            inner = "".join(f"{self._text(v)}, " for v in value)
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
        if isinstance(value, dict):
            return "{" + "".join(f"{k!r}: {self._text(v)}, " for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self._text(value.start)}, {self._text(value.stop)}, {self._text(value.step)})"
        return self._made(value) if hasattr(value, "all_input_nodes") else self._literal(value)

    def _literal(self, value: Any) -> str:
        if value is None or type(value) in (bool, int):
            return repr(value)
        name = f"constant{len(self._scope)}"
        self._scope[name] = value
        return name


def _as_declared(x: Any, strides: tuple[int, ...], dtype: Any) -> Any:
    """Returns a tensor with the strides and dtype that a piece was built for, copied if necessary.

    torch's operators promise these but do not always keep the promise.
    """
    if x.dtype is dtype and (x.stride() == strides or x.numel() == 0):
        return x
    return torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device).copy_(x)
