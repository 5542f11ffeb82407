"""The program on the results of a main loop: what the contraction and window families do with every sum.

An anchor's sums lie in registers.  A thread runs the program on them one at a time, or on several that are neighbours
in memory: those are read and written with accesses of up to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from codegen.expr import Anchor, Emitter, Index, Load, Operand, Program, Result, Value, ctype_of, varying
from codegen.iteration import Strides, linear, unsigned
from codegen.kernel import Pointers, constant
from codegen.naming import Names, Writer
from codegen.partials import Sink
from codegen.spec import Limit

#: Runs whose operands a thread loads together, at most, and their elements; instructions of programs that are short
#: enough for so many; and bytes of operands that it holds.
MOST_RUNS, MOST_TOGETHER, SHORT_PROGRAM, MOST_HELD = 8, 32, 6, 128


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


def batches(sizes: Sequence[int]) -> list[str]:
    """Returns the C variables of the coordinates of the batch whose number is ``batch``."""
    if prod(sizes) <= 1:
        return ["0"] * len(sizes)
    return ["batch"] if len(sizes) == 1 else [f"b{d}" for d in range(len(sizes))]


def in_order(results: Sequence[Limit], rows: int) -> bool:
    """Tells whether neighbouring rows of a contraction, of so many dimensions, are neighbours of its program, too."""
    if not results:
        return True
    last = results[-1]
    return not any(last.batch) and last.start == 0 and last.outer == (*(0,) * (rows - 1), 1)


def one_access(operand: Operand, space: Sequence[int], count: int, along: int) -> bool:
    """Tells whether ``count`` neighbours along a dimension, from a multiple of it on, are one access or whole ones."""
    if count == 1 or operand.strides[along] != 1:
        return False
    size = operand.dtype.itemsize
    width = min(16, count * size)
    others = [s for d, (s, many) in enumerate(zip(operand.strides, space)) if d != along and many > 1]
    return operand.alignment % width == 0 and all(s * size % width == 0 for s in others)


def placed(
    w: Writer, itype: str, results: Sequence[Limit], batch: Sequence[tuple[str, int]], rows: Sequence[tuple[str, int]]
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
    clamped  C expression of the coordinate along the run, held inside the space; given if results that do not exist may
             be computed like others: none is left out then.
    """

    count: int
    along: int
    element: str
    missing: Callable[[str], str] | None = None
    clamped: str | None = None


@dataclass(frozen=True)
class _At:
    """Where a result lies, or with a run the first one of it."""

    position: Sequence[str]
    run: Run | None

    def first(self, strides: Strides) -> str:
        """Returns the C expression of the offset of the first result in an operand."""
        return linear(list(zip(self.position, strides)))

    def offset(self, strides: Strides) -> str:
        """Returns the C expression of the offset of the result."""
        terms, run = list(zip(self.position, strides)), self.run
        if run and run.missing is not None and run.clamped is not None and strides[run.along]:
            terms[run.along] = (run.clamped, strides[run.along])
        elif run:
            terms.append((run.element, strides[run.along]))
        return linear(terms)


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

    def scalars(self, fixed: Mapping[int, str] | None = None) -> None:
        """Writes operands with one value, and what depends on them alone; call it first, outside of all loops.

        ``fixed`` are C expressions of coordinates that all results share, by their dimensions.
        """
        program, fixed = self.program, fixed or {}
        for n, operand in enumerate(program.loads):
            if not any(step for d, step in enumerate(operand.strides) if d not in fixed):
                text = f"{self.pointers.loads[n]}[{linear([(at, operand.strides[d]) for d, at in fixed.items()])}]"
                self._terms[Load(n)] = constant(self.w, self.names, program, n, text, "_s")
        self._varies = varying(program, lambda v: v not in self._terms)
        self._emitter.statements(self.w, self._terms, lambda k: not self._varies[k])

    def constant(self, value: Value) -> str:
        """Returns the C expression of a value that is the same for all results; call it after `scalars`."""
        return self._emitter.term(value, self._terms)

    def wide(self, operand: Operand, count: int, along: int) -> bool:
        """Tells whether ``count`` neighbours along a dimension of the program's space are one access."""
        return one_access(operand, self.space, count, along)

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
        w, at = self.w, _At(position, run if run is not None and run.count > 1 else None)
        run, vectors, stored = at.run, dict(given or {}), {}
        if run and run.missing is None:
            self._load(at, run, vectors)
            stored = self._declare(run) if staged is None else {}
        with w.scope():
            if run:
                operands = self.program.operands if staged is None else self.program.loads
                reach = max((op.strides[run.along] * run.count for op in operands), default=0)
                w.each(run.element, run.count, "int" if reach < 2**31 else "int64")
                if run.missing is not None and run.clamped is None:
                    w.leave(run.missing(run.element))
            terms = self._read(at, vectors)
            terms |= {Anchor(n): sum_value(text, self.accumulate, self.result) for n, text in enumerate(sums)}
            terms |= self.known
            self._emitter.statements(w, terms, lambda k: self._varies[k] and Result(k) not in self.known)
            self._store(at, terms, dict(enumerate(staged)) if staged is not None else stored)
            for sink in sinks:
                value, reduction = self._emitter.term(sink.reduction.value, terms), sink.reduction
                if sink.within:  # no branch: elements do not depend on each other's conditions
                    value = f"{sink.within} ? {value} : {reduction.start}"
                w.line(f"reduce::{sink.how}<{reduction.combiner.functor}>({sink.own}, {value});")
        for n, name in stored.items():
            w.line(f"store({self.pointers.stores[n]} + {at.first(self.program.stores[n].operand.strides)}, {name});")

    @property
    def differing(self) -> bool:
        """Whether some operands differ from result to result; call it after `scalars`."""
        return any(Load(n) not in self._terms for n in range(len(self.program.loads)))

    def together(self, run: Run) -> int:
        """Returns of how many runs a thread loads the operands together; call it after `scalars`.

        Longer programs of fewer elements: their code has a copy for each.
        """
        loads = [op for n, op in enumerate(self.program.loads) if Load(n) not in self._terms]
        held = sum(op.dtype.itemsize * (run.count if op.strides[run.along] else 1) for op in loads)
        most = MOST_TOGETHER if len(self.program.instructions) <= SHORT_PROGRAM else MOST_TOGETHER // 2
        return max(1, min(MOST_RUNS, most // run.count, MOST_HELD // held)) if held else 1

    def declare(self, run: Run, runs: int) -> dict[int, str]:
        """Declares arrays for so many runs of the loads that differ, with an element of those that are the same along
        a run; returns their C names.
        """
        found = {}
        for n, operand in enumerate(self.program.loads):
            if Load(n) not in self._terms:
                found[n] = self.names.unique(operand.name, "_v")
                count = run.count if operand.strides[run.along] else 1
                self.w.line(f"Vector<{operand.dtype.ctype}, {count}> {found[n]}[{runs}];")
        return found

    def bring(self, position: Sequence[str], run: Run, vectors: Mapping[int, str], inside: str = "") -> None:
        """Writes the loads of a run to ``vectors``, as `results` is given them.

        All of its elements may be read, under the condition ``inside`` if there is one.
        """
        at, single = _At(position, run), []
        for n, name in vectors.items():
            operand, pointer = self.program.loads[n], self.pointers.loads[n]
            step = operand.strides[run.along]
            if run.missing is None and (not step or run.count == 1 or self.wide(operand, run.count, run.along)):
                count = run.count if step else 1
                source = f"load<{count}>({pointer} + {at.first(operand.strides)})"
                none = f"Vector<{operand.dtype.ctype}, {count}>{{}}"
                self.w.line(f"{name} = {f'{inside} ? {source} : {none}' if inside else source};")
            elif not step:
                self.w.line(f"{name}[0] = {pointer}[{at.offset(operand.strides)}];")
            else:
                single.append((n, name, operand.dtype.ctype))
        if not single:
            return
        with self.w.scope():
            self.w.each(run.element, run.count, "int")
            for n, name, ctype in single:
                element = f"{self.pointers.loads[n]}[{at.offset(self.program.loads[n].strides)}]"
                element = f"{inside} ? {element} : {ctype}{{}}" if inside else element
                self.w.line(f"{name}[{run.element}] = {element};")

    def _load(self, at: _At, run: Run, vectors: dict[int, str]) -> None:
        """Writes the loads of whole runs, and adds their C names to ``vectors``."""
        for n, operand in enumerate(self.program.loads):
            if n not in vectors and Load(n) not in self._terms and self.wide(operand, run.count, run.along):
                vectors[n] = self.names.unique(operand.name, "_v")
                source = f"{self.pointers.loads[n]} + {at.first(operand.strides)}"
                self.w.line(f"const auto {vectors[n]} = load<{run.count}>({source});")

    def _declare(self, run: Run) -> dict[int, str]:
        """Declares vectors for the stores of whole runs; returns their C names."""
        found = {}
        for n, store in enumerate(self.program.stores):
            if self.wide(store.operand, run.count, run.along):
                found[n] = self.names.unique(store.operand.name, "_v")
                self.w.line(f"Vector<{store.operand.dtype.ctype}, {run.count}> {found[n]};")
        return found

    def _read(self, at: _At, vectors: Mapping[int, str]) -> dict[Value, str]:
        """Writes the reads of a result's operands that are not in ``vectors``; returns the terms of the program."""
        terms = dict(self._terms)
        for n, operand in enumerate(self.program.loads):
            if Load(n) not in terms:
                element = f"{self.pointers.loads[n]}[{at.offset(operand.strides)}]"
                if n in vectors:
                    element = f"{vectors[n]}[{at.run.element if at.run and operand.strides[at.run.along] else 0}]"
                terms[Load(n)] = constant(self.w, self.names, self.program, n, element, "_e")
        return terms | {Index(n): f"int32({at.offset(x)})" for n, x in enumerate(self.program.indices)}

    def _store(self, at: _At, terms: dict[Value, str], vectors: Mapping[int, str]) -> None:
        """Writes the stores of a result, to the vectors of those outputs that have one."""
        for n, (store, pointer) in enumerate(zip(self.program.stores, self.pointers.stores)):
            value = self._emitter.stored(store, terms, lambda v: ctype_of(self.program, v, self.result))
            to = f"{pointer}[{at.offset(store.operand.strides)}]"
            if n in vectors:
                to = f"{vectors[n]}[{at.run.element if at.run else 0}]"
            self.w.line(f"{to} = {value};")
