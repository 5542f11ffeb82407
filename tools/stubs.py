"""Writes fusegraph/operations.pyi, which declares to type checkers and editors the methods of `Graph` that write nodes.

python tools/stubs.py             writes the file
python tools/stubs.py --check     exits with 1 if it is not what would be written

Operands, attributes, defaults, words and docstrings are those of the op table and of the functions in METHODS.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator, Mapping
from inspect import Parameter
from pathlib import Path
from textwrap import indent
from typing import Any

from fusegraph.errors import DTypeError
from fusegraph.methods import METHODS
from fusegraph.ops import TABLE
from fusegraph.ops.attributes import KINDS
from fusegraph.ops.base import Op
from fusegraph.values import Unfit

STUB = Path(__file__).resolve().parent.parent / "fusegraph" / "operations.pyi"
HEAD = '''"""Written by tools/stubs.py."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, overload

import numpy as np

from fusegraph.calls import Call
from fusegraph.dtypes import DType, float32, int32, int64
from fusegraph.engines.base import Executable
from fusegraph.ops.base import Op
from fusegraph.ops.scatter import Reduction
from fusegraph.resampling import Beyond, Mode
from fusegraph.tensor import Node, Tensor

Operand: TypeAlias = Tensor | float | np.ndarray[Any, Any] | np.generic

class _Known:
    """What else tensors, and the functions that methods are made of, know of a graph."""

    name: str
    compute_dtype: DType
    outputs: list[Tensor]
    losses: list[Tensor]
    tensors: dict[str, Tensor]
    calls: dict[Tensor, Call]
    _written: list[Node] | None
    _automatic: set[Tensor]
    def constant(self, array: Any, name: str | None = None, dtype: Any = None) -> Tensor: ...
    def apply(
        self, op: Op, operands: Sequence[Any], attributes: Mapping[str, Any], name: str | None = None
    ) -> Tensor: ...
    def apply_node(
        self, op: Op, operands: Sequence[Any], attributes: Mapping[str, Any], name: str | None = None
    ) -> Node: ...
    @property
    def nodes(self) -> list[Node]: ...
    def producer(self, tensor: Tensor) -> Node | None: ...
    def compile(self, engine: str | None = None, **options: Any) -> Executable:
        """Compiles the graph for an engine ("cuda", "cpu", "reference"; default: cuda if there is a GPU, else cpu).

        Options are those of `fusegraph.compile`."""
    def to_dot(self) -> str:
        """Returns the graph in DOT, which Graphviz draws."""
    def to_onnx(self, file: Any = None) -> Any:
        """Returns the graph as an ONNX model, and writes it to ``file`` if given.  Needs the package ``onnx``.

        Raises NotSupportedError for assignments, sizes that vary, and ops and dtypes that ONNX has not, by name."""
    def _repr_html_(self) -> str: ...
    def _own(self, tensor: object, label: str) -> None: ...
    def _unique(self, stem: str) -> str: ...
    def _rename(self, tensor: Tensor, name: str) -> None: ...

class Operations(_Known):
'''
#: How kinds describe their values -> the type of these.
TYPES = {"an integer": "int", "a number": "float", "True or False": "bool", "a text": "str"}
#: Attribute -> the value with which an op gives all of its results instead of the first alone.
ALL_RESULTS: dict[str, Any] = {"generate_stats": True, "norm_forward_phase": "training"}


def main(check: bool) -> int:
    text = stub()
    if not check:
        STUB.write_text(text, "utf-8")
    elif STUB.read_text("utf-8") != text:
        print(f"{STUB.name} is not what the op table says; run python tools/stubs.py")
        return 1
    return 0


def stub() -> str:
    """Returns the text of the stub, formatted by ruff."""
    parts = (part for name in METHODS for part in (_op(TABLE[name]) if name in TABLE else [_function(name)]))
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--stdin-filename", STUB, "-"],
        input=HEAD + indent("".join(parts), "    "), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


class _Type(str):
    """An annotation that `inspect.signature` shows without quotes."""

    __repr__ = str.__str__


def _function(name: str) -> str:
    """Returns the text of a method that is a function with annotations of its own."""
    signature = inspect.signature(METHODS[name])
    types = {p.name: str(p.annotation) for p in signature.parameters.values()}
    return _method(name, types, signature.return_annotation)


def _op(op: Op) -> Iterator[str]:
    """Yields the text of an op's method: overloads if an attribute decides whether there are several results."""
    operand = "Operand | Sequence[Operand]" if op.variadic else "Operand"
    types = {n: operand + (" | None" if k >= len(op.operands) - op.optional else "") for k, n in enumerate(op.operands)}
    types |= {name: _attribute(op, name) for name in op.attributes} | {"name": "str | None"}
    count = len(op.results)
    every = f"tuple[{', '.join(['Tensor'] * count)}]" if count > 1 else "Tensor"
    deciding = next((key for key in ALL_RESULTS if key in op.attributes), None)
    if deciding is None:
        yield _method(op.name, types, "tuple[Tensor, ...]" if count > 1 and op.optional else every)
        return
    value, default = ALL_RESULTS[deciding], op.attributes[deciding]
    yield _method(op.name, types | {deciding: f"Literal[{default!r}]"}, "Tensor", "@overload\n")
    yield _method(op.name, types | {deciding: f"Literal[{value!r}]"}, every, "@overload\n", deciding)
    yield _method(op.name, types, f"Tensor | {every}", "@overload\n")


def _attribute(op: Op, name: str) -> str:
    """Returns the type of an attribute."""
    if words := op.words.get(name):
        return f"Literal[{', '.join(map(repr, words))}]"
    kind = KINDS[name]
    try:
        kind(object())
    except Unfit as wanted:
        text = str(wanted)
    except DTypeError:
        return "Any"
    try:
        kind(None)
    except Unfit:
        return _type(text)
    return f"{_type(text.removesuffix(', or None'))} | None"


def _type(text: str) -> str:
    """Returns the type of values from their description in `fusegraph.values`: "an integer, or a sequence of these"."""
    if (one := text.removeprefix("a sequence, each entry ")) != text:
        return f"Sequence[{_type(one)}]"
    for end, more in ((", or None", "None"), (", or a sequence of these", "Sequence[{}]")):
        if (one := text.removesuffix(end)) != text:
            return f"{_type(one)} | {more.format(_type(one))}"
    return TYPES[text]


def _method(name: str, types: Mapping[str, str], result: str, before: str = "", required: str = "") -> str:
    """Returns the text of a method; parameter ``required`` has no default and begins the keyword-only ones."""
    signature = inspect.signature(METHODS[name])
    parameters = []
    for p in signature.parameters.values():
        if p.name == required or (parameters and parameters[-1].kind is Parameter.KEYWORD_ONLY):
            p = p.replace(kind=Parameter.KEYWORD_ONLY)
        default = Parameter.empty if p.name == required else p.default
        own = Parameter.empty if p.name == "self" else _Type(types[p.name])
        parameters.append(p.replace(annotation=own, default=default))
    shown = signature.replace(parameters=parameters, return_annotation=_Type(result))
    doc = indent(f'"""{inspect.getdoc(METHODS[name])}"""', "    ")
    return f"{before}def {name}{shown}:\n{doc}\n"


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
