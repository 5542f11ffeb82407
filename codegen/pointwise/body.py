"""What every form of a pointwise kernel has in common: its heading, and the program of one vector of elements."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from codegen.expr import Emitter, Index, Load, Operand, Pointer, Program, Result, TableRead, Value, ctype_of, varying
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
        #: instructions whose results are known before the elements
        self._shared: frozenset[int] = frozenset()
        #: what has been read of tables, in C
        self._tabled: dict[int, str] = {}

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
        terms = self._first_terms(done, loaded, indices)
        self._shared = done.shared
        for k in done.reads:
            table = self._table(k)
            name = self.names.unique(table.name, "_v")
            self._tabled[k] = f"{name}[e]"
            kind, words = kept_type(table, vector, packed), packs(table, vector, packed)
            self.w.line(f"const {kind} {name} = {self._emitter.read(k, vector, terms, packed=words)};")

    def _first_terms(self, done: Ahead, loaded: Mapping[int, str], indices: Sequence[str]) -> dict[Value, str]:
        """Writes what is the same for all elements of a vector, given the first one's terms; returns these."""
        terms = dict(self.terms)
        for n, text in loaded.items():
            terms[Load(n)] = converted(self.program.loads[n], text, self.program.real)
        terms |= {Index(n): f"{self.program.itype}({text})" for n, text in enumerate(indices)}
        self._emitter.statements(self.w, terms, lambda k: self._varies[k] and k in done.shared)
        return terms

    def read_at(self, k: int, vector: int, indices: Sequence[str]) -> str:
        """Writes what a read of a table at given indices depends on; returns the read of a vector in C."""
        above = self.program.needed(self.program.instructions[k].args)
        shared = frozenset(v.instruction for v in above if isinstance(v, Result))
        return self._emitter.read(k, vector, self._first_terms(Ahead((k,), shared), {}, indices))

    def given(self, k: int, text: str) -> None:
        """Has a C expression stand for what an instruction reads of a table, as stored."""
        self._tabled[k] = text

    def declare_reads(self, done: Ahead, vector: int, unroll: int) -> None:
        """Declares registers for what is read of tables by all of a thread's vectors ``u``."""
        for k in (*done.reads, *done.single):
            table, wide = self._table(k), k in done.reads
            name = self.names.unique(table.name, "_v")
            self._tabled[k] = f"{name}[u][e]" if vector > 1 else f"{name}[u]"
            self.w.line(f"{kept_type(table, vector, wide)} {name}[{unroll}];")

    def read_tables(
        self,
        done: Ahead,
        vector: int,
        first: tuple[Mapping[int, str], Sequence[str]],
        each: tuple[Mapping[int, str], Callable[[], Sequence[str]]],
    ) -> None:
        """Writes the reads of tables into the registers declared for them, given loads and indices in C.

        ``first`` are those of a vector's first element, ``each`` those of element ``e``.
        """
        if done.reads:
            terms = self._first_terms(done, *first)
            for k in done.reads:
                words = packs(self._table(k), vector, True)
                text = self._emitter.read(k, vector, terms, packed=words)
                self.w.line(f"{self._tabled[k].removesuffix('[e]')} = {text};")
        if not done.single:
            return
        loaded, indices = each
        needed = self.program.needed(v for k in done.single for v in self.program.instructions[k].args)
        with self.w.unrolled(f"for (int e = 0; e < {vector}; ++e)", when=vector > 1):
            terms = self._element_terms(loaded, indices(), needed)
            self._emitter.statements(self.w, terms, lambda k: self._varies[k] and Result(k) in needed)
            for k in done.single:
                self.w.line(f"{self._tabled[k]} = {self._emitter.read(k, 1, terms)};")

    def _element_terms(
        self, loaded: Mapping[int, str], indices: Sequence[str], needed: Container[Value]
    ) -> dict[Value, str]:
        """Writes the conversions of an element's loads and indices; returns them in C."""
        terms = dict(self.terms)
        for n, text in loaded.items():
            operand = self.program.loads[n]
            if Load(n) in needed:
                terms[Load(n)] = self._once(Load(n), converted(operand, text, self.program.real), operand.name)
        for n, text in enumerate(indices):
            if Index(n) in needed:
                terms[Index(n)] = self._once(Index(n), f"{self.program.itype}({text})", "index")
        return terms

    def element(self, loaded: Mapping[int, str], indices: Sequence[str]) -> list[str]:
        """Writes an element's statements, given varying loads as stored, and indices; returns what stores take."""
        known = {Result(k) for k in (*self._shared, *self._tabled)}
        needed = self.program.needed([s.value for s in self.program.stores], known)
        terms = self._element_terms(loaded, indices, needed)
        for k, name in self._tabled.items():
            table = self._table(k)
            text = converted(table, name, self.program.real)
            terms[Result(k)] = self._once(Result(k), text, table.name)
        done = {*self._shared, *self._tabled}
        self._emitter.statements(self.w, terms, lambda k: self._varies[k] and k not in done and Result(k) in needed)
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
        self,
        at: Position,
        place: Callable[[], Place],
        load: Callable[[Place], None],
        compute: Callable[[Place], None],
        tables: Callable[[Place], None] | None = None,
    ) -> None:
        """Writes the loads of a thread's vectors, all before any is used, then its arithmetic, one after the other.

        ``place`` writes where one is; ``tables``, if any, what is read at places that may depend on what is loaded.
        Those outside read the last vector, if whole: no load waits for a condition.
        """
        for body in ([load] if at.loads else []) + ([tables] if tables is not None else []) + [compute]:
            with self.w.unrolled(f"for (int u = 0; u < {at.unroll}; ++u)"):
                clamped = body != compute and at.whole and at.inside != ""
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
