"""Values of tensors at coordinates: the scalar program of pointwise and movement nodes over one space.

What an element of a result needs is followed back from the tensors that are written: a movement node asks for its
operand's element at other coordinates, a pointwise node for those of all its operands at its own.  So every value is
that of a tensor at coordinates that depend on the kernel's.  Where they are affine, what is read from memory is read
along the space like any operand, whatever nodes lie between.  Other elements are read from tables, at positions that
are computed for each: behind a pad or where tensors are joined, as only some exist; in reverse order; and where
positions come from a tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import TypeAlias

from codegen.dtypes import DType
from codegen.expr import (
    Index,
    Instruction,
    Literal,
    Load,
    Operand,
    Pointer,
    Result,
    TableRead,
    Value,
    compute_type,
    literal,
)
from codegen.sizes import below
from fusegraph.graph import Node, Tensor
from fusegraph.layout import extent, packed_strides
from fusegraph.lowering.affine import Affine, total
from fusegraph.lowering.base import MAX_NODES, GroupView, Options, TooLarge
from fusegraph.lowering.program import ProgramBuilder
from fusegraph.lowering.views import alias, source
from fusegraph.ops.base import Kind

#: Tensors with elements further apart than this are read at positions of 64 bits.
FAR = 2**30
#: A program is given up when it has so many instructions: movement behind movement can need very many.
MOST_INSTRUCTIONS = 2 * MAX_NODES


#: A coordinate of a tensor: affine, or an integer that the program computes.
Coordinate: TypeAlias = Affine | Value
Coordinates: TypeAlias = tuple[Coordinate, ...]


class CoordinateProgram(ProgramBuilder, ABC):
    """The program of a group; ``parts`` has for each dimension of the written tensors its parts in the space."""

    def __init__(self, group: GroupView, options: Options, parts: Sequence[Sequence[int]]) -> None:
        super().__init__(group, options, self._written_strides)
        self.space = tuple(size for sizes in parts for size in sizes)
        self._identity: tuple[Affine, ...] = ()
        place = 0
        for sizes in parts:
            steps = [0] * len(self.space)
            steps[place : place + len(sizes)] = packed_strides(sizes)
            place += len(sizes)
            self._identity += (Affine(tuple(steps)),)
        self._zero = Affine((0,) * len(self.space))
        every = {t for n in group.nodes for t in (*n.inputs, n.output)}
        places = {(tuple(map(int, t.shape)), tuple(map(int, t.strides))) for t in every}
        far = max([prod(map(int, self.space)), *(max(extent(*place), prod(place[0])) for place in places)]) > FAR
        self._itype = "int64" if far else "int32"
        self._memo: dict[tuple[Tensor, Coordinates, Value | None], Value] = {}
        self._here: tuple[Coordinates, Value | None] = (self._identity, None)
        self._ends: dict[Value, tuple[int, int]] = {}
        self._emitted: dict[tuple[str, tuple[Value, ...], str], Value] = {}
        self._views: dict[Tensor, Tensor | None] = {}
        #: tensors that stand for some of the group's
        self._given: dict[Tensor, Tensor] = {}
        self._loaded: dict[tuple[Tensor, int, tuple[int, ...]], Load] = {}
        self._pointers: dict[tuple[Tensor, int], Pointer] = {}

    # ---- values of tensors at coordinates

    def _evaluate(self) -> None:
        for tensor in self._view.writes:
            self._values[tensor] = self._at(tensor, self._identity, None)

    def _at(self, tensor: Tensor, coordinates: Coordinates, guard: Value | None) -> Value:
        """Returns the value of a tensor's element; where the guard is false, any number, but nothing is read."""
        if tensor.value is not None and tensor.size == 1:
            return super()._value(tensor)
        own = tuple(self._zero if size == 1 else c for c, size in zip(coordinates, tensor.shape))
        key = tensor, own, guard
        if key not in self._memo:
            self._memo[key] = self._found(tensor, own, guard)
        return self._memo[key]

    def _found(self, tensor: Tensor, coordinates: Coordinates, guard: Value | None) -> Value:
        source = self._source(tensor)
        if source is not None:
            return self._read(source, coordinates, guard)
        node = self._view.graph.producer(tensor)
        assert node is not None
        if node.kind is Kind.MOVEMENT:
            if 0 in self.space:
                return Literal(0, compute_type(tensor.dtype, self.real))
            return self._element(node, coordinates, guard)
        before, self._here = self._here, (coordinates, guard)
        value = self._apply(node)
        self._here = before
        return value

    @abstractmethod
    def _element(self, node: Node, coordinates: Coordinates, guard: Value | None) -> Value:
        """Returns the value of an element of a movement node's result."""

    def _value(self, tensor: Tensor) -> Value:
        """Returns the value of an operand of the pointwise node that is evaluated, broadcast to the node's result."""
        coordinates, guard = self._here
        return self._at(tensor, coordinates[len(coordinates) - tensor.rank :], guard)

    def _numbered(self, tensor: Tensor, strides: tuple[int, ...]) -> Value:
        coordinates, _ = self._here
        own = zip(coordinates[len(coordinates) - tensor.rank :], strides, tensor.shape)
        value = self._number(self._flat([(c, stride) for c, stride, size in own if stride and size > 1]))
        return value if self._itype == "int32" else self._integer("place", "int32({0})", [value], "int32")

    # ---- memory

    def _source(self, tensor: Tensor) -> Tensor | None:
        """Returns where a tensor's elements lie in memory: itself, or a view of another; None if it is computed."""
        if tensor not in self._views:
            self._views[tensor] = source(self._view.graph, self._view.members, tensor, self._given)
        return self._views[tensor]

    def _read(self, source: Tensor, coordinates: Coordinates, guard: Value | None) -> Value:
        """Returns an element of a tensor in memory."""
        if 0 in source.shape:
            return Literal(0, compute_type(source.dtype, self.real))
        every = [(c, stride) for c, stride, size in zip(coordinates, source.strides, source.shape) if size > 1]
        plain = self._sum([(c, stride) for c, stride in every if isinstance(c, Affine)])
        computed = [(c, stride) for c, stride in every if not isinstance(c, Affine)]
        steps = tuple(step if size > 1 else 0 for step, size in zip(plain.steps, self.space))
        if guard is None and not computed and min(steps, default=0) >= 0 and below(-1, plain.start):
            return self._load_along(source, plain.start, steps)
        return self._load_at(source, plain, computed, guard)

    def _load_along(self, source: Tensor, start: int, steps: tuple[int, ...]) -> Load:
        """Returns a load of the elements from number ``start`` on, with these steps along the space."""
        key = source.base, source.start + start, steps
        if key not in self._loaded:
            read = source
            if start or source not in self._view.reads:
                shape = tuple(size if step else 1 for size, step in zip(self.space, steps))
                read = alias(source, source.name, shape, steps, start)
            self._loads.append(Operand(source.name, source.dtype, steps, self._view.alignment(read, self._options)))
            self._reads.append(read)
            self._loaded[key] = Load(len(self._loads) - 1)
        return self._loaded[key]

    def _load_at(
        self, source: Tensor, plain: Affine, computed: Sequence[tuple[Value, int]], guard: Value | None
    ) -> Value:
        """Returns a load of the element at a computed position."""
        args: list[Value] = [self._pointer(source)]
        position = self._text(plain, args)
        indexed = len(args) > 1 and max(plain.steps) > 0
        for value, stride in computed:
            args.append(value)
            term = f"{{{len(args) - 1}}}{f' * {stride}' if stride != 1 else ''}"
            position = term if position == "0" else f"{term} + {position}"
        multiples = (plain.start, *(stride for _, stride in computed))
        return self._table_read(source.name, source.dtype, args, position, indexed, guard, multiples)

    def _pointer(self, source: Tensor) -> Pointer:
        """Returns the pointer to a tensor in memory as a table."""
        key = source.base, source.start
        if key not in self._pointers:
            self._pointers[key] = Pointer(len(self._tables))
            self._tables.append(Operand(source.name, source.dtype, (), self._view.alignment(source, self._options)))
            self._table_reads.append(source)
        return self._pointers[key]

    def _table_read(
        self,
        name: str,
        dtype: DType,
        args: list[Value],
        position: str,
        indexed: bool,
        guard: Value | None,
        multiples: tuple[int, ...],
    ) -> Value:
        """Returns the value of a `TableRead`; it is in the compute type, and 0 where the guard is false."""
        wanted, text = compute_type(dtype, self.real), f"{{0}}[{position}]"
        text = text if dtype.ctype == wanted else f"convert<{wanted}>({text})"
        if guard is not None:
            args.append(guard)
            text = f"{{{len(args) - 1}}} ? {text} : {literal(0, wanted)}"
        return self._once(
            TableRead(f"{name} e", text, tuple(args), wanted, (), position, indexed, guard is not None, multiples)
        )

    # ---- numbers

    def _integer(
        self, name: str, template: str, args: Sequence[Value], ctype: str, thresholds: Sequence[int] = ()
    ) -> Value:
        """Returns the value of an instruction, which is written once."""
        return self._once(Instruction(name, template, tuple(args), ctype, tuple(thresholds)))

    def _once(self, instruction: Instruction) -> Value:
        key = instruction.template, instruction.args, instruction.ctype
        if key not in self._emitted:
            if len(self._instructions) >= MOST_INSTRUCTIONS:
                raise TooLarge(f"one kernel would compute more than {MOST_INSTRUCTIONS} values for every element")
            self._instructions.append(instruction)
            self._emitted[key] = Result(len(self._instructions) - 1)
        return self._emitted[key]

    def _sum(self, terms: Sequence[tuple[Affine, int]], start: int = 0) -> Affine:
        """Returns the sum of coordinates times numbers."""
        return total(terms, len(self.space), start)

    def _text(self, c: Affine, args: list[Value], start: int = 0) -> str:
        """Returns the template of a coordinate plus a number; what it takes is appended to ``args``."""
        start += c.start
        steps = tuple(step if size > 1 else 0 for step, size in zip(c.steps, self.space))
        if not any(steps):
            return str(start)
        backwards = max(steps) <= 0
        args.append(self._index(tuple(-step for step in steps) if backwards else steps))
        term = f"{{{len(args) - 1}}}"
        if backwards:
            return f"{start} - {term}"
        return f"{term} {'+' if start > 0 else '-'} {abs(start)}" if start else term

    def _index(self, steps: tuple[int, ...]) -> Index:
        if steps not in self._indices:
            self._indices.append(steps)
        return Index(self._indices.index(steps))

    def _number(self, c: Coordinate) -> Value:
        """Returns a coordinate as a value of the program."""
        if not isinstance(c, Affine):
            return c
        args: list[Value] = []
        text = self._text(c, args)
        if not args:
            return Literal(c.start, self._itype)
        return args[0] if text == "{0}" else self._integer("place", text, args, self._itype)

    def _range(self, c: Coordinate) -> tuple[int, int]:
        """Returns the least and the largest that a coordinate can be."""
        if not isinstance(c, Affine):
            return self._ends[c]
        return c.ends(self.space)

    def _moved_by(self, c: Coordinate, start: int, step: int = 1) -> Coordinate:
        """Returns start + step * c."""
        if isinstance(c, Affine):
            return self._sum([(c, step)], start)
        if (start, step) == (0, 1):
            return c
        times = f"{{0}} * {step}" if step != 1 else "{0}"
        value = self._integer("place", f"{times} {'-' if start < 0 else '+'} {abs(start)}", [c], self._itype)
        ends = [start + step * end for end in self._range(c)]
        self._ends[value] = min(ends), max(ends)
        return value

    def _inside(self, name: str, every: Sequence[tuple[Coordinate, int]], guard: Value | None) -> Value | bool | None:
        """Returns a condition: the guard, and 0 <= coordinate < size for every (coordinate, size).

        None if that always holds, False if it never does.
        """
        texts: list[str] = []
        args: list[Value] = []
        thresholds: list[int] = []
        for c, size in every:
            low, high = self._range(c)
            if below(high, 0) or below(size - 1, low):
                return False
            above, under = below(-1, low), below(high, size)
            if above and under:
                continue
            if isinstance(c, Affine) and max(c.steps) > 0:
                shift, args = c.start, [*args, self._number(Affine(c.steps))]
            else:
                shift, args = 0, [*args, self._number(c)]
            term = f"{{{len(args) - 1}}}"
            if not above:
                texts.append(f"{term} >= {-shift}")
                thresholds.append(-shift)
            if not under:
                texts.append(f"{term} < {size - shift}")
                thresholds.append(size - shift)
        if not texts:
            return guard
        if guard is not None:
            args.append(guard)
            texts.insert(0, f"{{{len(args) - 1}}}")
        return self._integer(name, " && ".join(texts), args, "bool", thresholds)

    def _flat(self, terms: Sequence[tuple[Coordinate, int]]) -> Coordinate:
        """Returns the sum of coordinates times numbers."""
        plain = self._sum([(c, step) for c, step in terms if isinstance(c, Affine)])
        computed = [(c, step) for c, step in terms if not isinstance(c, Affine)]
        if not computed:
            return plain
        args: list[Value] = []
        texts = [self._text(plain, args)]
        for value, step in computed:
            args.append(value)
            texts.insert(0, f"{{{len(args) - 1}}}{f' * {step}' if step != 1 else ''}")
        result = self._integer("place", " + ".join(t for t in texts if t != "0"), args, self._itype)
        ends = [(step * low, step * high) for c, step in terms for low, high in [self._range(c)]]
        self._ends[result] = sum(min(e) for e in ends), sum(max(e) for e in ends)
        return result

    # ---- stores

    def _written_strides(self, tensor: Tensor) -> tuple[int, ...]:
        return self._sum(list(zip(self._identity, tensor.strides))).steps
