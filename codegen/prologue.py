"""A contraction's operand as its kernels bring it: the reads, and the elements computed from what is read.

A plain operand is read from one tensor.  With a program, its elements are computed from several tensors and positions,
each with strides of its own.  All of them first come to registers, as they lie in memory, and stay there until the
element is needed: in between there is time for other work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from codegen.expr import Emitter, Index, Load, Operand, Value, ctype_of, varying
from codegen.kernel import converted, parameter
from codegen.naming import Names, Writer
from codegen.packed import pair_type
from codegen.spec import Gather, Strides


@dataclass(frozen=True)
class Place:
    """Where a tensor's elements lie: `b . batch + o . outer + i . inner + start`."""

    batch: Strides
    outer: Strides
    inner: Strides
    start: int = 0

    @property
    def steps(self) -> tuple[Strides, Strides, Strides]:
        return self.batch, self.outer, self.inner

    @property
    def moves(self) -> bool:
        """Whether rows (or columns) or batches start at different elements, or not at the first."""
        return any(self.batch) or any(self.outer) or self.start != 0


@dataclass(frozen=True)
class Source:
    """Something that changes from element to element of an operand.

    value      what it is to the program: a load or an index.
    name       with which its C variables begin; ``element`` the C variable of one element in its compute type.
    pointer    C name of the tensor; empty for a position.
    ctype      of an element as it lies in memory.
    place      number of its place in `Prologue.places`.
    alignment  of the tensor, in bytes; ``itemsize`` that of an element.
    """

    value: Value
    name: str
    element: str
    pointer: str
    ctype: str
    place: int
    alignment: int
    itemsize: int


class Prologue:
    """Names, places and the program of one operand; ``label`` ("a" or "b") begins the names of a plain one.

    ``others`` are further operands, which lie in memory as a plain one does.  With ``pairs`` the program is one of
    `codegen.packed`.
    """

    def __init__(
        self,
        w: Writer,
        gather: Gather,
        names: Names,
        label: str,
        others: Sequence[Operand] = (),
        *,
        pairs: bool = False,
    ) -> None:
        self.w, self.gather, self.program, self._names, self._pairs = w, gather, gather.program, names, pairs
        self.operands = (*gather.operands, *others)
        self.pointers = [names.unique(op.name) for op in self.operands]
        self.places = [Place(gather.batch, gather.outer, gather.inner, gather.start)]
        self._terms: dict[Value, str] = {}
        if self.program is None:
            op = gather.operand
            self.name = " and of ".join(self.pointers)
            own = Source(Load(0), label, "", self.pointers[0], op.dtype.ctype, 0, op.alignment, op.dtype.itemsize)
            self.sources = [own]
            return
        program = self.program
        self.name = names.unique(gather.operand.name)
        self._emitter = Emitter(program, names)
        batch, outer, inner = gather.steps()
        count = len(gather.starts)
        every = [Place(*x) for x in zip(batch[1:], outer[1:], inner[1:], gather.starts)]
        self.sources = []
        for n, place in enumerate(every[:count]):
            loaded = n < len(program.loads)
            if loaded and not any((*place.batch, *place.outer, *place.inner)):
                continue  # one value: see `scalars`
            if place not in self.places:
                self.places.append(place)
            at = self.places.index(place)
            if loaded:
                op, pointer = program.loads[n], self.pointers[n]
                names_ = (*self._stem(op.name), pointer, op.dtype.ctype)
                self.sources.append(Source(Load(n), *names_, at, op.alignment, op.dtype.itemsize))
            else:
                index = n - len(program.loads)
                self.sources.append(Source(Index(index), *self._stem(f"{label} index"), "", "int32", at, 4, 4))
        if not any(s.place == 0 for s in self.sources):
            self.places[0] = Place((0,) * len(gather.batch), (0,) * len(gather.outer), (0,) * len(gather.inner))
        found = {source.value for source in self.sources}
        self._constants = [Load(n) for n in range(len(program.loads)) if Load(n) not in found]
        self._varies = varying(program, lambda v: v in found)

    def _stem(self, text: str) -> tuple[str, str]:
        """Returns the stem of the names of a source's variables, and the name of the variable of an element."""
        return self._names.unique(text), self._names.unique(text, "_e")

    def parameters(self) -> list[str]:
        return [parameter(op, name) for op, name in zip(self.operands, self.pointers)]

    @property
    def products(self) -> int:
        """How many operands lie in memory alike and are brought together."""
        return len(self.pointers) if self.program is None else 1

    def place(self, source: Source) -> Place:
        """Returns where a source lies."""
        return self.places[source.place]

    def free(self, source: Source) -> bool:
        """Tells whether a source has an element wherever the operand's coordinates are in range, whatever the limits
        say.
        """
        at, limits = self.place(source), self.gather.limits
        if not limits:
            return True
        shared = (zip(x, y) for limit in limits for x, y in zip((limit.batch, limit.outer, limit.inner), at.steps))
        return at.start == 0 and not any(x and y for pairs in shared for x, y in pairs)

    def scalars(self) -> None:
        """Writes operands with one value, and what depends on them alone; call it first, outside of all loops."""
        program = self.program
        if program is None:
            return
        for value in self._constants:
            op, text = program.loads[value.operand], f"{self.pointers[value.operand]}[0]"
            name = self._names.unique(op.name, "_s")
            if self._pairs:
                self.w.line(f"const {pair_type(op.dtype)} {name} = {text};")
            else:
                self.w.line(f"const {ctype_of(program, value)} {name} = {converted(op, text, program.real)};")
            self._terms[value] = name
        self._emitter.statements(self.w, self._terms, lambda k: not self._varies[k])

    def element(self, read: Mapping[Value, str]) -> str:
        """Writes the program; returns the C expression of the element, in its own type, or of a pair of elements.

        ``read`` has the sources' elements as they lie in memory, or pairs of them.
        """
        program = self.program
        if program is None:
            return read[Load(0)]
        terms = dict(self._terms)
        for source in self.sources:
            text = read[source.value]
            if isinstance(source.value, Load) and not self._pairs:
                ctype = ctype_of(program, source.value)
                if ctype != source.ctype:
                    self.w.line(f"const {ctype} {source.element} = convert<{ctype}>({text});")
                    text = source.element
            terms[source.value] = text
        self._emitter.statements(self.w, terms, lambda k: self._varies[k])
        if self._pairs:
            return self._emitter.term(program.stores[0].value, terms)
        return self._emitter.stored(program.stores[0], terms, lambda v: ctype_of(program, v))
