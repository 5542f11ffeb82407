"""What every form of a pointwise kernel has in common: its heading, and the program of one vector of elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from codegen.expr import (
    Emitter,
    Index,
    Load,
    Operand,
    Pointer,
    Program,
    Result,
    TableRead,
    Value,
    ctype_of,
    varying,
)
from codegen.iteration import at_most, linear
from codegen.kernel import Kernel, Pointers, constant, converted
from codegen.naming import Names, Writer
from codegen.pointwise.tables import Ahead

#: Where a vector is, as a form of kernels sees it.
Place = TypeVar("Place")


@dataclass(frozen=True)
class Position:
    """A C variable that says where vector ``u`` of ``unroll`` is, and its value.

    inside   the condition that the vector is in the space, "" if all are; ``largest`` is the last one's value.
    loads    whether there is something to load; whole, whether the last vector is.
    """

    itype: str
    name: str
    value: str
    unroll: int
    inside: str = ""
    largest: int = 0
    loads: bool = True
    whole: bool = True


class Elements:
    """Writes the values of a program that are the same for all elements, and the statements of one element.

    Loads are numbered as in the program.  ``terms`` has the C expressions of what is known before any loop.
    """

    def __init__(self, w: Writer, program: Program, names: Names) -> None:
        self.w, self.program, self.names = w, program, names
        self.pointers = Pointers(program, self.names)
        self.terms: dict[Value, str] = {Pointer(n): name for n, name in enumerate(self.pointers.tables)}
        self._emitter = Emitter(program, self.names)
        self._registers: dict[int, str] = {}
        self._varies: list[bool] = []
        #: instructions whose results are known before the elements: shared ones, and vectors of tables
        self._shared: frozenset[int] = frozenset()
        self._vectors: dict[int, str] = {}

    def scalars(self) -> None:
        """Writes operands with one value, and what can be computed from them alone, before any loop."""
        for n, operand in enumerate(self.program.loads):
            if not any(operand.strides):
                text = f"{self.pointers.loads[n]}[0]"
                self.terms[Load(n)] = constant(self.w, self.names, self.program, n, text, "_s")
        self._varies = varying(self.program, lambda v: v not in self.terms)
        self._emitter.statements(self.w, self.terms, lambda k: not self._varies[k])

    def varying_loads(self) -> list[int]:
        """Returns the numbers of the loads that are not the same for all elements."""
        return [n for n, operand in enumerate(self.program.loads) if any(operand.strides)]

    def register(self, n: int) -> str:
        """Returns the name of the registers that hold a load's elements as stored."""
        if n not in self._registers:
            self._registers[n] = self.names.unique(self.program.loads[n].name, "_v")
        return self._registers[n]

    def ahead(
        self, done: Ahead, vector: int, loaded: Mapping[int, str], indices: Sequence[str], *, packed: bool = False
    ) -> None:
        """Writes reads of vectors of tables, given the first element's terms; ``packed``: small ones as `Packed`."""
        terms = dict(self.terms)
        for n, text in loaded.items():
            terms[Load(n)] = converted(self.program.loads[n], text, self.program.real)
        terms |= {Index(n): f"{self.program.itype}({text})" for n, text in enumerate(indices)}
        self._shared = done.shared
        self._emitter.statements(self.w, terms, lambda k: self._varies[k] and k in done.shared)
        for k in done.reads:
            table = self._table(k)
            name = self._vectors[k] = self.names.unique(table.name, "_v")
            kind, words = kept_type(table, vector, packed), packs(table, vector, packed)
            self.w.line(f"const {kind} {name} = {self._emitter.read(k, vector, terms, packed=words)};")

    def element(self, loaded: Mapping[int, str], indices: Sequence[str]) -> list[str]:
        """Writes an element's statements, given varying loads as stored, and indices; returns what stores take."""
        terms = dict(self.terms)
        for n, text in loaded.items():
            operand = self.program.loads[n]
            terms[Load(n)] = self._once(Load(n), converted(operand, text, self.program.real), operand.name)
        done = {*self._shared, *self._vectors}
        left = {v for k, i in enumerate(self.program.instructions) if k not in done for v in i.args}
        left |= {s.value for s in self.program.stores}
        for n, text in enumerate(indices):
            if Index(n) in left:
                terms[Index(n)] = self._once(Index(n), f"{self.program.itype}({text})", "index")
        for k, name in self._vectors.items():
            table = self._table(k)
            text = converted(table, f"{name}[e]", self.program.real)
            terms[Result(k)] = self._once(Result(k), text, table.name)
        self._emitter.statements(self.w, terms, lambda k: self._varies[k] and k not in done)
        return [self._emitter.stored(s, terms) for s in self.program.stores]

    def elements(self, count: int, loaded: Mapping[int, str], indices: Callable[[], Sequence[str]]) -> list[str]:
        """Writes a vector's elements ``e``, whose indices ``indices`` writes; returns the results' C names."""
        names = [self.names.unique(store.operand.name, "_v") for store in self.program.stores]
        for store, name in zip(self.program.stores, names):
            self.w.line(f"{vector_type(store.operand, count)} {name};")
        with self.w.unrolled(f"for (int e = 0; e < {count}; ++e)"):
            for name, text in zip(names, self.element(loaded, indices())):
                self.w.line(f"{name}[e] = {text};")
        return names

    def _table(self, number: int) -> Operand:
        """Returns the table that an instruction reads, one of them if it chooses."""
        read = self.program.instructions[number]
        assert isinstance(read, TableRead)
        return self.program.read_by(read)[0]

    def _once(self, value: Value, text: str, stem: str) -> str:
        """Writes a constant for a converted value that is used more than once; returns its C expression."""
        if self.program.uses[value] < 2 or ("(" not in text and "?" not in text):
            return text
        name = self.names.unique(stem, "_e")
        self.w.line(f"const {ctype_of(self.program, value)} {name} = {text};")
        return name


class Body(Elements):
    """Has a kernel of its own, with the program's operands as parameters."""

    w: Kernel

    def __init__(self, name: str, program: Program) -> None:
        kernel = Kernel(name)
        super().__init__(kernel, program, kernel.names)
        kernel.parameters += self.pointers.parameters()

    def in_flight(
        self, at: Position, place: Callable[[], Place], load: Callable[[Place], None], compute: Callable[[Place], None]
    ) -> None:
        """Writes the loads of a thread's vectors, all before any is used, then its arithmetic, one after the other.

        ``place`` writes where one is.  Those outside read the last vector, if whole: no load waits for a condition.
        """
        for body in (load, compute) if at.loads else (compute,):
            with self.w.unrolled(f"for (int u = 0; u < {at.unroll}; ++u)"):
                clamped = body == load and at.whole and at.inside != ""
                value = at_most(at.value, at.largest, at.itype) if clamped else at.value
                self.w.line(f"const {at.itype} {at.name} = {value};")
                with self.w.guarded("" if clamped else at.inside):
                    body(place())


def vector_type(operand: Operand, count: int) -> str:
    """Returns the C type of ``count`` neighbouring elements in registers."""
    return operand.dtype.ctype if count == 1 else f"Vector<{operand.dtype.ctype}, {count}>"


def kept_type(operand: Operand, count: int, guarded: bool) -> str:
    """Returns the C type of elements that are loaded well before their use; ``guarded``: under a condition."""
    kind = vector_type(operand, count)
    return kind.replace("Vector", "Packed") if packs(operand, count, guarded) else kind


def packs(operand: Operand, count: int, guarded: bool) -> bool:
    """Tells whether elements are kept as `Packed` words (``codegen/device/memory.cuh``)."""
    return guarded and count > 1 and operand.dtype.itemsize < 4


def registers(k: Kernel, operand: Operand, count: int, array: str = "") -> str:
    """Declares registers for neighbouring elements of an operand, or an array of them; returns their C name."""
    name = k.names.unique(operand.name, "_v")
    k.line(f"{vector_type(operand, count)} {name}{array};")
    return name


def read(
    w: Writer, target: str, pointer: str, offset: str, count: int, step: int = 1, load: str = "load", more: str = ""
) -> None:
    """Writes the read of elements, ``step`` apart, into registers; contiguous ones by ``load``, unless it is empty."""
    if count == 1:
        w.line(f"{target} = {pointer}[{offset}];")
    elif step == 1 and load:
        w.line(f"{target} = {load}<{count}>({plus(pointer, offset)}{more});")
    else:
        if target.startswith("const "):  # it is declared first
            w.line(f"{target.removeprefix('const ')};")
            target = target.rpartition(" ")[2]
        w.each_element(count, f"{target}[e] = {pointer}[{apart(offset, step)}];")


def write(
    w: Writer, pointer: str, offset: str, value: str, count: int, step: int = 1, store: str = "store", guard: str = ""
) -> None:
    """Writes the guarded store of elements, ``step`` apart; contiguous ones by ``store``, unless it is empty."""
    if count == 1:
        w.line(f"{guard}{pointer}[{offset}] = {value};")
    elif step == 1 and store:
        w.line(f"{guard}{store}({plus(pointer, offset)}, {value});")
    else:
        w.each_element(count, f"{guard}{pointer}[{apart(offset, step)}] = {value}[e];")


def apart(offset: str, step: int) -> str:
    """Returns the C expression of the offset of element ``e`` of some that are ``step`` apart."""
    elements = linear([("e", step)])
    return elements if offset == "0" else offset if step == 0 else f"{offset} + {elements}"


def plus(pointer: str, offset: str) -> str:
    """Returns ``pointer + offset``."""
    return pointer if offset == "0" else f"{pointer} + {offset}"
