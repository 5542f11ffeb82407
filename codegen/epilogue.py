"""The program on the results of a main loop: what the contraction and window families do with every sum.

An anchor's sums lie in registers.  A thread runs the program on them one at a time, or on several that are neighbours
in memory: those are read and written with accesses of up to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from codegen.expr import Anchor, Emitter, Index, Load, Operand, Program, Result, Value, ctype_of, varying
from codegen.iteration import Strides, linear, unsigned
from codegen.kernel import Pointers, constant
from codegen.naming import Names, Writer
from codegen.partials import Sink
from codegen.spec import Limit


def operand_value(operand: Operand, text: str, accumulate: str) -> str:
    """Returns the C expression of an operand's element in the accumulator's type (integers modulo 2^32 or 2^64)."""
    if operand.dtype.ctype == accumulate:
        return text
    return f"{accumulate}({text})" if accumulate.startswith("uint") else f"convert<{accumulate}>({text})"


def sum_value(text: str, accumulate: str, result: str) -> str:
    """Returns the C expression of a sum in the type in which the program sees it.

    Sums modulo 2^32 or 2^64 become the signed numbers of that size.
    """
    if accumulate.startswith("uint"):
        accumulate = accumulate.removeprefix("u")
        text = f"{accumulate}({text})"
    return text if accumulate == result else f"convert<{result}>({text})"


def placed(
    w: Writer,
    itype: str,
    results: Sequence[Limit],
    batch: Sequence[tuple[str, int]],
    rows: Sequence[tuple[str, int]],
) -> tuple[list[str], list[str]]:
    """Writes the program's row coordinates of a contraction whose ``results`` say where its results lie.

    ``batch`` and ``rows`` are (C expression, size) of their coordinates.  Returns the row coordinates as C expressions,
    and the conditions under which there is no result.
    """
    found, outside = [], []
    for d, x in enumerate(results):
        terms = [(text, step) for (text, _), step in zip((*batch, *rows), (*x.batch, *x.outer))]
        text = linear(terms, x.start)
        if not text.isidentifier() and not text.isdecimal():
            w.line(f"const {itype} h{d} = {text};")
            text = f"h{d}"
        found.append(text)
        low, high = x.ends([size for _, size in batch], [size for _, size in rows], ())
        if low < 0 or high >= x.size:
            outside.append(f"{unsigned(itype)}({text}) >= {x.size}")
    return found, outside


@dataclass(frozen=True)
class Run:
    """Results that one thread handles together: ``count`` neighbours along dimension ``along`` of the space.

    element  C variable that counts them.
    missing  the condition under which one does not exist, given its number; None if all of them always do.
    clamped  C expression of the coordinate along the run, held inside, if what becomes of a missing result does not
             matter: none is left out then.
    """

    count: int
    along: int
    element: str
    missing: Callable[[str], str] | None = None
    clamped: str | None = None


class Epilogue:
    """Writes the program of an anchor's kernel; ``space`` has one size for each stride of the program's operands."""

    def __init__(
        self, w: Writer, program: Program, names: Names, space: Sequence[int], accumulate: str, result: str
    ) -> None:
        self.w, self.program, self.names, self.space = w, program, names, tuple(space)
        self.accumulate, self.result = accumulate, result
        self.pointers = Pointers(program, names)
        self._emitter = Emitter(program, names)
        self._terms: dict[Value, str] = {}
        #: C expressions of instructions whose results the caller has computed
        self.known: dict[Value, str] = {}
        self._varies: list[bool] = []

    def scalars(self) -> None:
        """Writes operands with one value, and what depends on them alone; call it first, outside of all loops."""
        program = self.program
        for n, operand in enumerate(program.loads):
            if not any(operand.strides):
                self._terms[Load(n)] = self._constant(n, f"{self.pointers.loads[n]}[0]", "_s")
        self._varies = varying(program, lambda v: v not in self._terms)
        self._emitter.statements(self.w, self._terms, lambda k: not self._varies[k])

    def constant(self, value: Value) -> str:
        """Returns the C expression of a value that is the same for all results; call it after `scalars`."""
        return self._emitter.term(value, self._terms)

    def wide(self, operand: Operand, count: int, along: int) -> bool:
        """Tells whether ``count`` neighbours along a dimension can be one access, starting at any multiple of
        ``count``.
        """
        if count == 1 or operand.strides[along] != 1:
            return False
        width = min(16, count * operand.dtype.itemsize)
        others = [s for d, (s, size) in enumerate(zip(operand.strides, self.space)) if d != along and size > 1]
        return operand.alignment % width == 0 and all(s * operand.dtype.itemsize % width == 0 for s in others)

    def results(
        self,
        position: Sequence[str],
        sums: Sequence[str],
        run: Run | None = None,
        staged: Sequence[str] | None = None,
        sinks: Sequence[Sink] = (),
        given: Mapping[int, str] | None = None,
    ) -> None:
        """Writes the program for the result at ``position``, one C expression per dimension, given its ``sums``, one
        per product.

        With a run, ``position`` is that of its first result, and ``sums`` may use its element.  ``staged`` are C
        variables, a vector for each output, that take the run's results instead of memory.  ``sinks`` combine values of
        the program.  ``given`` are C variables, vectors of the run's elements, of loads by their numbers.
        """
        w, program = self.w, self.program
        run = run if run is not None and run.count > 1 else None

        def first(strides: Strides) -> str:
            return linear(list(zip(position, strides)))

        missing = run.missing if run and run.clamped is None else None
        clamped = run is not None and run.missing is not None and run.clamped is not None

        def offset(strides: Strides) -> str:
            terms = list(zip(position, strides))
            if run and clamped and strides[run.along]:
                terms[run.along] = (str(run.clamped), strides[run.along])
                return linear(terms)
            return linear([*terms, (run.element, strides[run.along])] if run else terms)

        vectors = dict(given or {})
        stored: dict[int, str] = {}
        if run and run.missing is None:
            for n, operand in enumerate(program.loads):
                if n not in vectors and Load(n) not in self._terms and self.wide(operand, run.count, run.along):
                    vectors[n] = self.names.unique(operand.name, "_v")
                    source = f"{self.pointers.loads[n]} + {first(operand.strides)}"
                    w.line(f"const auto {vectors[n]} = load<{run.count}>({source});")
            for n, store in enumerate(program.stores):
                if staged is None and self.wide(store.operand, run.count, run.along):
                    stored[n] = self.names.unique(store.operand.name, "_v")
                    w.line(f"Vector<{store.operand.dtype.ctype}, {run.count}> {stored[n]};")
        if run:
            w.line("#pragma unroll")
            operands = program.operands if staged is None else program.loads
            reach = max((op.strides[run.along] * run.count for op in operands), default=0)
            small = "int" if reach < 2**31 else "int64"
            w.open(f"for ({small} {run.element} = 0; {run.element} < {run.count}; ++{run.element})")
            if missing is not None:
                w.line(f"if ({missing(run.element)}) continue;")
        terms = dict(self._terms)
        for n, operand in enumerate(program.loads):
            if Load(n) in terms:
                continue
            if run and n in vectors:
                terms[Load(n)] = self._constant(n, f"{vectors[n]}[{run.element}]", "_e")
            else:
                terms[Load(n)] = self._constant(n, f"{self.pointers.loads[n]}[{offset(operand.strides)}]", "_e")
        for n, strides in enumerate(program.indices):
            terms[Index(n)] = f"int32({offset(strides)})"
        for n, text in enumerate(sums):
            terms[Anchor(n)] = sum_value(text, self.accumulate, self.result)
        terms |= self.known
        self._emitter.statements(w, terms, lambda k: self._varies[k] and Result(k) not in self.known)
        for n, (store, pointer) in enumerate(zip(program.stores, self.pointers.stores)):
            value = self._emitter.stored(store, terms, lambda v: ctype_of(program, v, self.result))
            if staged is not None:
                w.line(f"{staged[n]}[{run.element if run else 0}] = {value};")
            elif run and n in stored:
                w.line(f"{stored[n]}[{run.element}] = {value};")
            else:
                w.line(f"{pointer}[{offset(store.operand.strides)}] = {value};")
        for sink in sinks:
            condition = f"if ({sink.within}) " if sink.within else ""
            value = self._emitter.term(sink.reduction.value, terms)
            w.line(f"{condition}reduce::into<{sink.reduction.combiner.functor}>({sink.own}, {value});")
        if run:
            w.close()
        for n, name in stored.items():
            w.line(f"store({self.pointers.stores[n]} + {first(program.stores[n].operand.strides)}, {name});")

    def _constant(self, n: int, source: str, suffix: str) -> str:
        """Writes the n-th load's value as a constant; returns its C name."""
        return constant(self.w, self.names, self.program, n, source, suffix)
