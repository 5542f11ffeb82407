"""A contraction's operand as its kernels bring it: the reads, and the elements computed from what is read.

A plain operand is read from one tensor.  With a program, its elements are computed from several tensors and positions,
each with strides of its own.  All of them first come to registers, as they lie in memory, and stay there until the
element is needed: in between there is time for other work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from codegen.expr import Emitter, Index, Load, Operand, Value, ctype_of, varying
from codegen.iteration import linear, unsigned
from codegen.kernel import constant, parameter
from codegen.naming import Names, Writer
from codegen.packed import pair_type
from codegen.spec import Gather, Limit, Strides


@dataclass(frozen=True)
class Place:
    """Where a tensor's elements lie: `b . batch + o . outer + i . inner + start`."""

    batch: Strides
    outer: Strides
    inner: Strides
    start: int = 0

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
    product    the number of the product, where several operands lie in memory alike; ``of`` its subscript, where what
               is read of them is in one array.
    """

    value: Value
    name: str
    element: str
    pointer: str
    ctype: str
    place: int
    alignment: int
    itemsize: int
    product: int = 0
    of: str = ""

    @property
    def next(self) -> str:
        """The C array of what a thread has read for its next tile."""
        return f"{self.name}_next{self.of}"


class Prologue:
    """Names, places and the program of one operand; ``label`` ("a" or "b") begins the names of a plain one.

    ``others`` are the tensors of further operands, which lie in memory as those of this one do.  With ``pairs`` the
    program is one of `codegen.packed`.
    """

    def __init__(
        self, w: Writer, gather: Gather, names: Names, label: str, others: Sequence[Operand] = (), pairs: bool = False
    ) -> None:
        self.w, self.gather, self.program, self._names, self._pairs = w, gather, gather.program, names, pairs
        self.label = label
        self.operands = (*gather.operands, *others)
        self.pointers = [names.unique(op.name) for op in self.operands]
        self.places = [Place(gather.batch, gather.outer, gather.inner, gather.start)]
        if self.program is None:
            plain = gather.operand
            self.name = " and of ".join(self.pointers)
            read = (plain.dtype.ctype, 0, plain.alignment, plain.dtype.itemsize)
            self.sources = [
                Source(Load(0), label, "", pointer, *read, n, f"[{n}]" if others else "")
                for n, pointer in enumerate(self.pointers)
            ]
            return
        program = self.program
        self.name = names.unique(gather.operand.name)
        each = max(1, len(program.loads))
        #: for each operand: what writes its program, and the C expressions of what is the same for all elements
        self._emitters = [Emitter(program, names) for _ in range(1 + len(others) // each)]
        self._terms: list[dict[Value, str]] = [{} for _ in self._emitters]
        batch, outer, inner = gather.steps()
        self.sources = []
        for n, place in enumerate(map(Place, batch[1:], outer[1:], inner[1:], gather.starts)):
            loaded = n < len(program.loads)
            if loaded and not any((*place.batch, *place.outer, *place.inner)):
                continue  # one value: see `scalars`
            if place not in self.places:
                self.places.append(place)
            at = self.places.index(place)
            value = Load(n) if loaded else Index(n - len(program.loads))
            for product in range(len(self._emitters) if loaded else 1):
                op = self.operands[product * each + n] if loaded else None
                text = op.name if op is not None else f"{label} index"
                called = names.unique(text), names.unique(text, "_e")
                if op is None:
                    self.sources.append(Source(value, *called, "", "int32", at, 4, 4))
                else:
                    pointer, t = self.pointers[product * each + n], op.dtype
                    self.sources.append(Source(value, *called, pointer, t.ctype, at, op.alignment, t.itemsize, product))
        if not any(s.place == 0 for s in self.sources):
            self.places[0] = Place((0,) * len(gather.batch), (0,) * len(gather.outer), (0,) * len(gather.inner))
        found = {source.value for source in self.sources}
        self._constants = [Load(n) for n in range(len(program.loads)) if Load(n) not in found]
        self._varies = varying(program, lambda v: v in found)

    def parameters(self) -> list[str]:
        return [parameter(op, name) for op, name in zip(self.operands, self.pointers)]

    @property
    def products(self) -> int:
        """How many operands lie in memory alike and are brought together."""
        return len(self.pointers) if self.program is None else 1

    @property
    def starts(self) -> list[tuple[str, Place | Limit]]:
        """C variables of where a row (or column) starts in each place, and of the numbers that limits bound."""
        moving = [(f"{self.label}_base{n or ''}", x) for n, x in enumerate(self.places) if n == 0 or x.moves]
        return [*moving, *((f"{self.label}_start{n}", x) for n, x in enumerate(self.gather.limits))]

    def begin(self, t: str, at: str, batch: Sequence[str], outer: Sequence[str]) -> None:
        """Writes `starts` at these coordinates: constants, or with a subscript ``at`` elements of arrays."""
        for name, x in self.starts:
            text = linear([*zip(batch, x.batch), *zip(outer, x.outer)], x.start)
            self.w.line(f"{'' if at else f'const {t} '}{name}{at} = {text};")

    def kept(self, t: str, at: str, inner: Sequence[str]) -> list[str]:
        """Returns the C conditions that the limits are kept at these coordinates of the reduction."""
        found = []
        for n, x in enumerate(self.gather.limits):
            text = linear([(f"{self.label}_start{n}{at}", 1), *zip(inner, x.inner)])
            found.append(f"{unsigned(t)}({text}) < {x.size}")
        return found

    def start(self, source: Source, at: str) -> tuple[str, int]:
        """Returns the C expression of where a source's row or column starts, and its factor."""
        moves = source.place == 0 or self.place(source).moves
        return f"{self.label}_base{source.place or ''}{at}" if moves else "0", 1

    def place(self, source: Source) -> Place:
        """Returns where a source lies."""
        return self.places[source.place]

    def free(self, source: Source) -> bool:
        """Tells whether a source has an element at all coordinates of the operand, whatever the limits say."""
        at, limits = self.place(source), self.gather.limits
        if not limits:
            return True
        steps = (*at.batch, *at.outer, *at.inner)
        shared = any(x and y for limit in limits for x, y in zip((*limit.batch, *limit.outer, *limit.inner), steps))
        return at.start == 0 and not shared

    def scalars(self) -> None:
        """Writes operands with one value, and what depends on them alone; call it first, outside of all loops."""
        program = self.program
        if program is None:
            return
        for product, (emitter, terms) in enumerate(zip(self._emitters, self._terms)):
            for value in self._constants:
                n, text = value.operand, f"{self.pointers[product * len(program.loads) + value.operand]}[0]"
                if self._pairs:
                    terms[value] = self._names.unique(program.loads[n].name, "_s")
                    own, made = program.loads[n].dtype, self.gather.operand.dtype
                    text = text if own == made else f"convert<{made.ctype}>({text})"
                    self.w.line(f"const {pair_type(made)} {terms[value]} = {text};")
                else:
                    terms[value] = constant(self.w, self._names, program, n, text, "_s")
            emitter.statements(self.w, terms, lambda k: not self._varies[k])

    def element(self, read: Mapping[Value, str], product: int = 0) -> str:
        """Writes the program; returns the C expression of the element, in its own type, or of a pair of elements.

        ``read`` has the sources' elements as they lie in memory, or pairs of them, for the operand of a ``product``.
        """
        program = self.program
        if program is None:
            return read[Load(0)]
        terms, emitter = dict(self._terms[product]), self._emitters[product]
        for source in self.sources_of(product):
            text = read[source.value]
            if isinstance(source.value, Load) and not self._pairs:
                ctype = ctype_of(program, source.value)
                if ctype != source.ctype:
                    self.w.line(f"const {ctype} {source.element} = convert<{ctype}>({text});")
                    text = source.element
            terms[source.value] = text
        emitter.statements(self.w, terms, lambda k: self._varies[k])
        if self._pairs:
            return emitter.term(program.stores[0].value, terms)
        return emitter.stored(program.stores[0], terms, lambda v: ctype_of(program, v))

    def sources_of(self, product: int) -> list[Source]:
        """Returns the sources of one of several operands: those of its tensors, and the positions, which all have."""
        return [source for source in self.sources if source.product == product or not source.pointer]
