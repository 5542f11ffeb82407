"""Movement nodes in programs of coordinates: where the element that each of them asks for is in its operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from codegen.expr import Literal, Result, TableRead, Value, compute_type, literal
from codegen.sizes import below
from fusegraph.graph import Node, Tensor
from fusegraph.layout import packed_strides
from fusegraph.lowering.affine import Affine, Split
from fusegraph.lowering.base import GroupView, Options
from fusegraph.lowering.coordinates import Coordinate, CoordinateProgram, Coordinates
from fusegraph.lowering.joined import choice, joined
from fusegraph.lowering.views import alias, merged, regrouped
from fusegraph.ops.base import Role


class CoordinateBuilder(CoordinateProgram):
    """The program of a group; ``parts`` has for each dimension of the written tensors its parts in the space."""

    def __init__(self, group: GroupView, options: Options, parts: Sequence[Sequence[int]]) -> None:
        super().__init__(group, options, parts)
        self._moved: dict[Role | None, Callable[[Node, Coordinates, Value | None], Value]] = {
            Role.TRANSPOSE: self._transpose,
            Role.RESHAPE: self._reshape,
            Role.BROADCAST: self._broadcast,
            Role.SLICE: self._slice,
            Role.PAD: self._pad,
            Role.CONCATENATE: self._concatenate,
            Role.GATHER: self._gather,
        }

    def _element(self, node: Node, coordinates: Coordinates, guard: Value | None) -> Value:
        return self._moved[node.op.role](node, coordinates, guard)

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

    def _divided(self, c: Coordinate, size: int) -> tuple[Coordinate, Coordinate]:
        """Returns a coordinate's quotient and remainder, affine if they can be.

        Raises Split if they are affine once a dimension of the space is split.
        """
        if isinstance(c, Affine):
            quotient = Affine(tuple(0 if s % size else s // size for s in c.steps), c.start // size)
            rest = Affine(tuple(s if s % size else 0 for s in c.steps), c.start % size)
            low, high = self._range(rest)
            if below(-1, low) and below(high, size):
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
        above, inside = below(-1, low), below(high, size)
        if above and inside:
            return c
        over, under = (str(size - 1), "0") if mode == "replicate" else (f"{2 * (size - 1)} - {{0}}", "-{0}")
        text = f"{{0}} > {size - 1} ? {over} : {{0}}" if not inside else "{0}"
        text = f"{{0}} < 0 ? {under} : {text}" if not above else text
        value = self._integer("place", text, [self._number(c)], self._itype)
        self._ends[value] = 0, size - 1
        return value

    def _concatenate(self, node: Node, at: Coordinates, guard: Value | None) -> Value:
        axis = node.attributes["axis"]
        c, start = at[axis], 0
        low, high = self._range(c)
        parts: list[tuple[int, Tensor]] = []  # those in which an element may be, and their first places
        for tensor in node.inputs:
            end = start + tensor.shape[axis]
            if tensor.shape[axis] and not below(end - 1, low) and not below(high, start):
                parts.append((start, tensor))
            start = end
        if not parts:
            return Literal(0, compute_type(node.output.dtype, self.real))
        for how in (self._chosen, self._shifted):
            found = how(node, at, parts, guard)
            if found is not None:
                return found
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
        pointers = [f"{{{n + 1}}}" for n in range(len(tables))]
        chosen = choice(element, self._itype, pointers, where.edges)
        args = [self._integer(f"{node.name} from", chosen, [number, *tables], "auto", where.edges)]
        if any(where.shared):
            args.append(self._index(where.shared))
        if len(set(where.own)) == 1:
            args.append(self._number(where.own[0]))
        else:
            terms: list[Value] = [number]
            places = [self._text(place, terms) for place in where.own]
            chosen = choice(self._itype, self._itype, places, where.edges)
            args.append(self._integer(f"{node.name} at", chosen, terms, self._itype, where.edges))
        position = " + ".join(f"{{{n}}}" for n in range(1, len(args)))
        indexed, dtype = any(where.shared), node.output.dtype
        return self._table_read(node.name, dtype, args, position, indexed, guard, where.numbers)

    def _shifted(
        self, node: Node, at: Coordinates, parts: Sequence[tuple[int, Tensor]], guard: Value | None
    ) -> Value | None:
        """Returns the element of what all parts are slices of, at a coordinate that is chosen; None if they are not.

        Shifts of a tensor around its ends, along several axes, are one load like this.
        """
        axis = node.attributes["axis"]
        made = (self._view.graph.producer(tensor) for _, tensor in parts)
        cuts = [n for n in made if n is not None and n in self._view.members and n.op.role is Role.SLICE]
        if len(parts) == 1 or len(cuts) < len(parts):
            return None
        first = cuts[0]
        starts, steps = first.attributes["starts"], first.attributes["steps"]
        for cut in cuts:
            others = enumerate(zip(cut.attributes["starts"], starts))
            if (
                cut.inputs != first.inputs
                or cut.attributes["steps"] != steps
                or any(a != b for d, (a, b) in others if d != axis)
            ):
                return None
        (x,), step = first.inputs, steps[axis]
        moved = [cut.attributes["starts"][axis] - start * step for cut, (start, _) in zip(cuts, parts)]
        text = choice(self._itype, self._itype, [str(m) for m in moved], [start for start, _ in parts[1:]])
        times = f"{{0}} * {step}" if step != 1 else "{0}"
        place = self._integer(f"{node.name} at", f"{times} + {text}", [self._number(at[axis])], self._itype)
        self._ends[place] = 0, x.shape[axis] - 1
        own = [self._moved_by(c, first, by) for c, first, by in zip(at, starts, steps)]
        return self._at(x, (*own[:axis], place, *own[axis + 1 :]), guard)

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
