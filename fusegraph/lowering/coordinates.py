"""Values of tensors at coordinates: the scalar program of pointwise and movement nodes over one space.

What an element of a result needs is followed back from the tensors that are written: a movement node asks for its
operand's element at other coordinates, a pointwise node for those of all its operands at its own.  So every value is
that of a tensor at coordinates that depend on the kernel's.  Where they are affine, what is read from memory is read
along the space like any operand, whatever nodes lie between.  Other elements are read from tables, at positions that
are computed for each: behind a pad or where tensors are joined, as only some exist; in reverse order; and where
positions come from a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from fusegraph.graph import Node, Tensor
from fusegraph.layout import extent, packed_strides
from fusegraph.lowering.affine import Affine, Split, total
from fusegraph.lowering.base import MAX_NODES, GroupView, Options, TooLarge
from fusegraph.lowering.joined import joined
from fusegraph.lowering.program import ProgramBuilder
from fusegraph.lowering.views import alias, merged, regrouped, source
from fusegraph.ops.base import Kind, Role

#: Tensors with elements further apart than this are read at positions of 64 bits.
FAR = 2**30
#: A program is given up when it has so many instructions: movement behind movement can need very many.
MOST_INSTRUCTIONS = 2 * MAX_NODES


#: A coordinate of a tensor: affine, or an integer that the program computes.
Coordinate: TypeAlias = Affine | Value
Coordinates: TypeAlias = tuple[Coordinate, ...]


class CoordinateBuilder(ProgramBuilder):
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
        everything = [t for n in group.nodes for t in (*n.inputs, n.output)]
        far = max([prod(self.space), *(max(extent(t.shape, t.strides), t.size) for t in everything)]) > FAR
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
        self._moved: dict[Role | None, Callable[[Node, Coordinates, Value | None], Value]] = {
            Role.TRANSPOSE: self._transpose,
            Role.RESHAPE: self._reshape,
            Role.BROADCAST: self._broadcast,
            Role.SLICE: self._slice,
            Role.PAD: self._pad,
            Role.CONCATENATE: self._concatenate,
            Role.GATHER: self._gather,
        }

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
            return self._moved[node.op.role](node, coordinates, guard)
        before, self._here = self._here, (coordinates, guard)
        value = self._apply(node)
        self._here = before
        return value

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
        if guard is None and not computed and min(steps, default=0) >= 0 and plain.start >= 0:
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
            return Literal(int(text), self._itype)
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
            if high < 0 or low >= size:
                return False
            if low >= 0 and high < size:
                continue
            if isinstance(c, Affine) and max(c.steps) > 0:
                shift, args = c.start, [*args, self._number(Affine(c.steps))]
            else:
                shift, args = 0, [*args, self._number(c)]
            term = f"{{{len(args) - 1}}}"
            if low < 0:
                texts.append(f"{term} >= {-shift}")
                thresholds.append(-shift)
            if high >= size:
                texts.append(f"{term} < {size - shift}")
                thresholds.append(size - shift)
        if not texts:
            return guard
        if guard is not None:
            args.append(guard)
            texts.insert(0, f"{{{len(args) - 1}}}")
        return self._integer(name, " && ".join(texts), args, "bool", thresholds)

    # ---- movement

    def _transpose(self, node: Node, at: Coordinates, guard: Value | None) -> Value:
        places = dict(zip(node.attributes["perm"], at))
        return self._at(node.inputs[0], tuple(places[d] for d in range(len(at))), guard)

    def _broadcast(self, node: Node, at: Coordinates, guard: Value | None) -> Value:
        return self._at(node.inputs[0], at[len(at) - node.inputs[0].rank :], guard)

    def _slice(self, node: Node, at: Coordinates, guard: Value | None) -> Value:
        every = zip(at, node.attributes["starts"], node.attributes["steps"])
        return self._at(node.inputs[0], tuple(self._moved_by(c, start, step) for c, start, step in every), guard)

    def _reshape(self, node: Node, at: Coordinates, guard: Value | None) -> Value:
        (operand,), shape = node.inputs, node.output.shape
        source = self._source(operand)
        if source is None:
            return self._at(operand, self._regrouped(shape, at, operand.shape), guard)
        sizes, strides = merged(source.shape, source.strides)  # fewer dimensions to tell apart
        behind = alias(source, source.name, sizes, strides, 0)
        return self._read(behind, self._regrouped(shape, at, sizes), guard)

    def _regrouped(self, shape: Sequence[int], at: Coordinates, target: Sequence[int]) -> Coordinates:
        """Returns the coordinates in another shape of the same elements."""
        result: list[Coordinate] = []
        for dims, others in regrouped(shape, target):
            if len(dims) == len(others) == 1:
                result.append(at[dims[0]])
                continue
            steps = packed_strides([shape[d] for d in dims])
            rest = self._flat([(at[d], step) for d, step in zip(dims, steps) if shape[d] > 1])
            found: list[Coordinate] = []
            for d in reversed(others):
                last = d == others[0] or prod(target[others[0] : d]) == 1
                rest, coordinate = (self._zero, rest) if last else self._divided(rest, target[d])
                found.append(coordinate)
            result += reversed(found)
        return tuple(result)

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

    def _divided(self, c: Coordinate, size: int) -> tuple[Coordinate, Coordinate]:
        """Returns a coordinate's quotient and remainder, affine if they can be.

        Raises Split if they are affine once a dimension of the space is split.
        """
        if isinstance(c, Affine):
            quotient = Affine(tuple(0 if s % size else s // size for s in c.steps), c.start // size)
            rest = Affine(tuple(s if s % size else 0 for s in c.steps), c.start % size)
            low, high = self._range(rest)
            if low >= 0 and high < size:
                return quotient, rest
            for d, (step, count) in enumerate(zip(rest.steps, self.space)):
                if step and size % step == 0:
                    inner = size // abs(step)
                    if inner < count and count % inner == 0:
                        raise Split(d, inner)
        value = self._number(c)
        low, high = self._range(c)
        over = self._integer("place", f"{{0}} / {size}", [value], self._itype)
        left = self._integer("place", f"{{0}} % {size}", [value], self._itype)
        self._ends[over], self._ends[left] = (low // size, high // size), (0, size - 1)
        return over, left

    def _pad(self, node: Node, at: Coordinates, guard: Value | None) -> Value:
        (operand,), mode = node.inputs, node.attributes["mode"]
        places = [self._moved_by(c, -before) for c, (before, _) in zip(at, node.attributes["padding"])]
        if mode != "constant":
            turned = zip(places, operand.shape)
            return self._at(operand, tuple(self._turned(c, size, mode) for c, size in turned), guard)
        number = Literal(node.attributes["value"], compute_type(operand.dtype, self.real))
        inside = self._inside(f"{node.name} inside", list(zip(places, operand.shape)), guard)
        if inside is False:
            return number
        assert not isinstance(inside, bool)
        value = self._at(operand, tuple(places), inside)
        if inside is None or inside is guard:
            return value
        read = self._instructions[value.instruction] if isinstance(value, Result) else None
        zero = literal(number.value, number.ctype) == literal(0, number.ctype)  # which is what is not read, too
        if zero and isinstance(read, TableRead) and read.guarded and read.args[-1] == inside:
            return value
        return self._select(node, inside, value, number)

    def _turned(self, c: Coordinate, size: int, mode: str) -> Coordinate:
        """Moves a coordinate beyond the ends to the outermost element, or to the one that a mirror there shows."""
        low, high = self._range(c)
        if low >= 0 and high < size:
            return c
        over, under = (str(size - 1), "0") if mode == "replicate" else (f"{2 * (size - 1)} - {{0}}", "-{0}")
        text = f"{{0}} > {size - 1} ? {over} : {{0}}" if high >= size else "{0}"
        text = f"{{0}} < 0 ? {under} : {text}" if low < 0 else text
        value = self._integer("place", text, [self._number(c)], self._itype)
        self._ends[value] = 0, size - 1
        return value

    def _concatenate(self, node: Node, at: Coordinates, guard: Value | None) -> Value:
        axis = node.attributes["axis"]
        c, start = at[axis], 0
        low, high = self._range(c)
        parts: list[tuple[int, Tensor]] = []  # those in which an element may be, and their first places
        for tensor in node.inputs:
            if tensor.shape[axis] and low < start + tensor.shape[axis] and high >= start:
                parts.append((start, tensor))
            start += tensor.shape[axis]
        if not parts:
            return Literal(0, compute_type(node.output.dtype, self.real))
        chosen = self._chosen(node, at, parts, guard)
        if chosen is not None:
            return chosen
        values: list[Value] = []
        for start, tensor in parts:
            own = self._moved_by(c, -start)
            inside = self._inside(f"{tensor.name} inside", [(own, tensor.shape[axis])], guard)
            assert not isinstance(inside, bool)
            values.append(self._at(tensor, (*at[:axis], own, *at[axis + 1 :]), inside))
        number, shift = (self._number(Affine(c.steps)), c.start) if isinstance(c, Affine) else (c, 0)
        value = values.pop()
        for (end, _), other in zip(reversed(parts[1:]), reversed(values)):
            condition = self._integer(f"before {end}", f"{{0}} < {end - shift}", [number], "bool", [end - shift])
            value = self._select(node, condition, other, value)
        return value

    def _chosen(
        self, node: Node, at: Coordinates, parts: Sequence[tuple[int, Tensor]], guard: Value | None
    ) -> Value | None:
        """Returns one load of the element, from the part that has it; None unless all parts lie in memory.

        One pointer and one position are chosen among the parts', however many there are, and only one load is made.
        """
        sources = [(start, source) for start, tensor in parts if (source := self._source(tensor)) is not None]
        affine = [c for c in at if isinstance(c, Affine)]
        if len(parts) == 1 or len(sources) < len(parts) or len(affine) < len(at):
            return None
        where = joined(affine, node.attributes["axis"], sources, self.space)
        if where is None:
            return None
        number = self._number(where.counted)
        tables = [self._pointer(source) for _, source in sources]
        element = f"const {node.output.dtype.ctype}*"
        chosen = where.choice(element, self._itype, [f"{{{n + 1}}}" for n in range(len(tables))])
        args = [self._integer(f"{node.name} from", chosen, [number, *tables], "auto", where.edges)]
        if any(where.shared):
            args.append(self._index(where.shared))
        if len(set(where.own)) == 1:
            args.append(self._number(where.own[0]))
        else:
            terms: list[Value] = [number]
            chosen = where.choice(self._itype, self._itype, [self._text(place, terms) for place in where.own])
            args.append(self._integer(f"{node.name} at", chosen, terms, self._itype, where.edges))
        position = " + ".join(f"{{{n}}}" for n in range(1, len(args)))
        indexed, dtype = any(where.shared), node.output.dtype
        return self._table_read(node.name, dtype, args, position, indexed, guard, where.numbers)

    def _gather(self, node: Node, at: Coordinates, guard: Value | None) -> Value:
        (x, index), axis = node.inputs, node.attributes["axis"]
        last = axis + index.rank
        position = self._at(index, at[axis:last], guard)
        size = x.shape[axis]
        text = f"{{0}} < 0 ? 0 : {{0}} > {size - 1} ? {size - 1} : {{0}}"
        if self._ctype(position) != self._itype:
            text = f"{self._itype}({text})"
        value = self._integer(f"{index.name} at", text, [position], self._itype)
        self._ends[value] = 0, size - 1
        return self._at(x, (*at[:axis], value, *at[last:]), guard)

    def _select(self, node: Node, condition: Value, value: Value, other: Value) -> Value:
        ctype = compute_type(node.output.dtype, self.real)
        return self._integer(node.name, "{0} ? {1} : {2}", [condition, value, other], ctype)

    # ---- stores

    def _written_strides(self, tensor: Tensor) -> tuple[int, ...]:
        return self._sum(list(zip(self._identity, tensor.strides))).steps
