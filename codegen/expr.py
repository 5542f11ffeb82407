"""Scalar programs: the expression DAG a kernel evaluates for every element, and its CUDA C.

A program is in static single assignment: instruction i may use loads, literals, indices, the anchor's value (a
matmul's or convolution's accumulator) and the results of instructions before it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from codegen.combiners import Combiner
from codegen.dtypes import DType
from codegen.naming import Names, Writer
from codegen.records import once
from codegen.sizes import Size


@dataclass(frozen=True)
class Begin:
    """How many elements behind its pointer an operand begins in a row: a value of the program, the same for the row.

    It is a multiple of ``step``; no element is ``reach`` or more elements behind the pointer.
    """

    value: Value
    step: int
    reach: int


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel reads or writes.

    strides count elements, one for each iteration dimension; 0 repeats the element along it.  alignment is what the
    base pointer is known to be a multiple of, in bytes.  begin is for loads of the rows family, of which each row has
    another part (a gather): None if all follows from the strides.  start is where the first element lies behind the
    pointer, of loads of the pool family.
    """

    name: str
    dtype: DType
    strides: tuple[int, ...]
    alignment: int = 16
    begin: Begin | None = None
    start: int = 0


@dataclass(frozen=True)
class Load:
    """The value read from the program's n-th load operand, in its compute type."""

    operand: int


@dataclass(frozen=True)
class Literal:
    """A number known at compile time."""

    value: float | int | bool
    ctype: str


@dataclass(frozen=True)
class Result:
    """The value of the n-th instruction."""

    instruction: int


@dataclass(frozen=True)
class Anchor:
    """The n-th value that the kernel's main loop computed for this element, in the anchor's compute type."""

    number: int = 0


@dataclass(frozen=True)
class Index:
    """A position that depends on the element's coordinates: the value of entry n of the program's ``indices``."""

    index: int


@dataclass(frozen=True)
class Reduced:
    """The result of the program's n-th reduction over the row that the element is in."""

    reduction: int


@dataclass(frozen=True)
class Pointer:
    """The pointer to the program's n-th table, for instructions that compute which element they read."""

    table: int


Value: TypeAlias = Load | Literal | Result | Anchor | Index | Reduced | Pointer


@dataclass(frozen=True)
class Instruction:
    """``ctype name = template(args)``; template has placeholders {0}, {1}, ... for the arguments' C expressions.

    thresholds are the numbers that arguments are compared with to be less or not, if nothing else is done with them.
    """

    name: str
    template: str
    args: tuple[Value, ...]
    ctype: str
    thresholds: tuple[int, ...] = ()


@dataclass(frozen=True)
class TableRead(Instruction):
    """Reads an element of a table.

    args are the table's pointer, or the result of an instruction that chooses among pointers to several, the values
    from which the position is computed and, if guarded, whether it exists.

    position   the template of the position.
    indexed    whether the second argument is an index, which is a term as it is; the others are multiplied by numbers.
    multiples  these numbers, and the constant term.
    """

    position: str = ""
    indexed: bool = False
    guarded: bool = False
    multiples: tuple[int, ...] = ()


@dataclass(frozen=True)
class Store:
    """Writes a value to an operand, converted to its dtype."""

    operand: Operand
    value: Value


@dataclass(frozen=True)
class Reduction:
    """``name``: a value combined over all elements of a row, in its compute type.

    With ``at`` it is the place of the first of the largest elements, or of the last that is NaN; -1 if there is none.
    The sort family, whose reductions choose elements by their places, does not ask for the combiner (`SortSpec`).
    """

    name: str
    combiner: Combiner
    value: Value
    ctype: str
    at: Value | None = None

    @property
    def start(self) -> str:
        """The C literal of the result over no elements."""
        return "-1" if self.at is not None else literal(self.combiner.start(self.ctype), self.ctype)

    @property
    def operator(self) -> str:
        """The C operator that combines two parts, "" if there is none."""
        return self.combiner.sign if self.ctype in ("float", "double") else ""

    def into(self, total: str, value: str) -> str:
        """Returns the C statement that combines an element with the total so far."""
        if self.operator:
            return f"{total} {self.operator}= {value};"
        value = f"{self.ctype}({value})" if self.combiner.widens else value
        return f"{total} = {self.combiner.function}({total}, {value});"


@dataclass(frozen=True)
class Program:
    """What is computed for one element of the iteration space.

    indices are pseudo-operands: the value of ``Index(n)`` is the sum of coordinate times ``indices[n][dim]``; itype is
    their C type, int32, or int64 where tables are that large.
    tables are operands that instructions read at positions of their own, through ``Pointer(n)``; without strides.
    real is the C type in which floats of 32 bits or fewer are computed ("float", or "double" on request).
    exact forbids approximate instructions even where they could not be seen in what is stored.
    reductions are those of the rows family; each uses values that do not depend on later ones.
    """

    loads: tuple[Operand, ...] = ()
    indices: tuple[tuple[int, ...], ...] = ()
    instructions: tuple[Instruction, ...] = ()
    stores: tuple[Store, ...] = ()
    notes: tuple[str, ...] = ()
    real: str = "float"
    exact: bool = False
    reductions: tuple[Reduction, ...] = ()
    tables: tuple[Operand, ...] = ()
    itype: str = "int32"

    @property
    def approximate(self) -> bool:
        """Whether approximate instructions cannot be seen: everything is stored as a float of 16 bits or fewer."""
        return not self.exact and all(s.operand.dtype.is_float and s.operand.dtype.itemsize <= 2 for s in self.stores)

    @once
    def operands(self) -> tuple[Operand, ...]:
        """What is read and written along the space: loads, then stores.  (Parameters have the tables in between.)"""
        return self.loads + tuple(store.operand for store in self.stores)

    @property
    def begins(self) -> list[Value]:
        """The values that say where loads begin in a row."""
        return [op.begin.value for op in self.loads if op.begin is not None]

    def read_by(self, read: TableRead) -> tuple[Operand, ...]:
        """Returns the tables of which an instruction reads one; they have the same dtype."""
        first = read.args[0]
        pointers = self.instructions[first.instruction].args if isinstance(first, Result) else (first,)
        return tuple(self.tables[p.table] for p in pointers if isinstance(p, Pointer))

    @property
    def strides(self) -> list[tuple[int, ...]]:
        """The strides of loads, stores and indices, in this order."""
        return [*(op.strides for op in self.operands), *self.indices]

    @once
    def uses(self) -> Counter[Value]:
        """How often each value is used by instructions, reductions and stores."""
        ends = [v for r in self.reductions for v in (r.value, r.at) if v is not None]
        ends += self.begins
        return Counter([*(v for i in self.instructions for v in i.args), *ends, *(s.value for s in self.stores)])

    def needed(self, ends: Iterable[Value], known: Container[Value] = ()) -> set[Value]:
        """Returns the values that are needed to compute ``ends``, but not what ``known`` ones need."""
        found: set[Value] = set()
        stack = list(ends)
        while stack:
            value = stack.pop()
            if value not in found:
                found.add(value)
                if isinstance(value, Result) and value not in known:
                    stack += self.instructions[value.instruction].args
                if isinstance(value, Load) and (begin := self.loads[value.operand].begin) is not None:
                    stack.append(begin.value)
        return found


def literal(value: Any, ctype: str) -> str:
    """Returns a number, NaN or infinity as exact C literal of a compute type (``1.0f``, ``1.0``, ``-5``, ``true``)."""
    if isinstance(value, Size):
        return f"{ctype}({value})"
    if ctype == "bool":
        return "true" if value else "false"
    if ctype in ("float", "double"):
        number = float(value)
        if math.isnan(number):
            return f"quiet_nan<{ctype}>()"
        if math.isinf(number):
            return f"{'-' if number < 0 else ''}infinity<{ctype}>()"
        text = _shortest(repr(number), ctype)
        return text + ("f" if ctype == "float" else "")
    number_ = int(value)
    if ctype == "int64":
        return f"(-{2**63 - 1}ll - 1)" if number_ == -(2**63) else f"{number_}ll"
    if ctype == "int32" and number_ == -(2**31):
        return f"(-{2**31 - 1} - 1)"
    if ctype == "int32":
        return str(number_)
    return f"{ctype}({number_}{'ull' if number_ > 2**31 else ''})"


@lru_cache(1 << 12)
def _shortest(number: str, ctype: str) -> str:
    import numpy as np

    text = str(np.float32(number)) if ctype == "float" else number
    if "e" in text:
        mantissa, exponent = text.split("e")
        return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent)}"
    return text if "." in text else f"{text}.0"


_PLACEHOLDER = re.compile(r"\{(\d+)\}")
_SIMPLE = re.compile(r"[\w.]+(?:\[[\w +*/%()-]+\])*|-?\d[\w.]*|[\w:]+(<\w+>)?\([^()]*\)")


def fill(template: str, arguments: list[str]) -> str:
    """Returns the template with its placeholders replaced; arguments that are no simple terms are parenthesized."""

    def argument(match: re.Match[str]) -> str:
        text = arguments[int(match[1])]
        if text.startswith("-") and not template.startswith("{") and "(" not in template[: match.start()]:
            return f"({text})"
        whole = template[match.start() - 1 : match.end() + 1] == f"[{match[0]}]"
        simple = text.isidentifier() or text.startswith("-") or _SIMPLE.fullmatch(text)
        return text if simple or whole else f"({text})"

    return _PLACEHOLDER.sub(argument, template)


class Emitter:
    """Writes statements, naming values after tensors; in parts, such as what is the same for all passes of a loop."""

    def __init__(self, program: Program, names: Names) -> None:
        self.program = program
        # A result that is stored once and used nowhere else needs no name of its own.
        once = (s.value for s in program.stores if program.uses[s.value] == 1)
        self.inlined = {value.instruction for value in once if isinstance(value, Result)}
        self.names = ["" if n in self.inlined else names.unique(i.name) for n, i in enumerate(program.instructions)]

    def term(self, value: Value, terms: Mapping[Value, str]) -> str:
        """Returns a value in C; ``terms`` gives loads, indices, the anchor, and results named other than their own."""
        if isinstance(value, Literal):
            return literal(value.value, value.ctype)
        if isinstance(value, Result) and value not in terms:
            return self.names[value.instruction] or self.expression(value.instruction, terms)
        return terms[value]

    def read(self, number: int, vector: int, terms: Mapping[Value, str], *, packed: bool = False) -> str:
        """Returns a vector of a table in C, as stored, given the terms of its first element.

        ``packed``: as `Packed` words.  A vector of 1 is an element.
        """
        read = self.program.instructions[number]
        assert isinstance(read, TableRead)
        table = self.program.read_by(read)[0]
        texts = [self.term(value, terms) for value in read.args]
        position = fill(read.position, texts)
        if vector == 1:
            text, kind = f"{texts[0]}[{position}]", table.dtype.ctype
        else:
            load, kind = ("load_packed", "Packed") if packed else ("load", "Vector")
            text, kind = f"{load}<{vector}>({texts[0]} + {position})", f"{kind}<{table.dtype.ctype}, {vector}>"
        return f"{texts[-1]} ? {text} : {kind}{{}}" if read.guarded else text

    def expression(self, number: int, terms: Mapping[Value, str]) -> str:
        """Returns the C expression of an instruction."""
        instruction = self.program.instructions[number]
        return fill(instruction.template, [self.term(value, terms) for value in instruction.args])

    def statements(self, w: Writer, terms: Mapping[Value, str], select: Callable[[int], bool] = lambda _: True) -> None:
        """Writes ``const T name = ...;`` for the selected instructions, in order."""
        for number, instruction in enumerate(self.program.instructions):
            if number not in self.inlined and select(number):
                w.line(f"const {instruction.ctype} {self.names[number]} = {self.expression(number, terms)};")

    def stored(self, store: Store, terms: Mapping[Value, str], given: Callable[[Value], str] | None = None) -> str:
        """Returns what a store writes, in its storage type; ``given`` returns compute types that the program lacks."""
        text, target = self.term(store.value, terms), store.operand.dtype.ctype
        own = given(store.value) if given else ctype_of(self.program, store.value)
        return text if own == target else f"convert<{target}>({text})"


def compute_type(dtype: DType, real: str = "float") -> str:
    """Returns the C type in which values of a dtype are computed."""
    return real if dtype.compute == "float" else dtype.compute


def ctype_of(program: Program, value: Value, anchor: str = "float") -> str:
    """Returns the compute type of a value."""
    if isinstance(value, Load):
        return compute_type(program.loads[value.operand].dtype, program.real)
    if isinstance(value, Literal):
        return value.ctype
    if isinstance(value, Result):
        return program.instructions[value.instruction].ctype
    if isinstance(value, Reduced):
        return program.reductions[value.reduction].ctype
    return program.itype if isinstance(value, Index) else anchor


def varying(program: Program, varies: Callable[[Value], bool]) -> list[bool]:
    """Returns, for every instruction, whether it depends on a value that varies (along what the caller unrolls)."""
    result: list[bool] = []

    def depends(v: Value) -> bool:
        return result[v.instruction] if isinstance(v, Result) else not isinstance(v, Literal) and varies(v)

    for instruction in program.instructions:
        result.append(any(map(depends, instruction.args)))
    return result
