"""Reductions over one set of axes, and pointwise nodes around them -> a `RowsSpec`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

from codegen.combiners import Combiner
from codegen.declined import Declined
from codegen.expr import Begin, Index, Load, Operand, Reduced, Reduction, Value, compute_type, literal
from codegen.spec import RowsSpec, Segments, Walk
from codegen.target import Target
from fusegraph.graph import Node, Tensor
from fusegraph.layout import extent
from fusegraph.lowering import gathered
from fusegraph.lowering.base import FamilyLowering, GroupView, Lowered, Options
from fusegraph.lowering.choices import Choice, Outweighed, weigh
from fusegraph.lowering.parallelism import FEW_ROWS, LOOKS, keeps_whole, parallelism, parallelism_of
from fusegraph.lowering.partials import mode_of, steps
from fusegraph.lowering.pointwise import check_size
from fusegraph.lowering.program import ProgramBuilder, StridesOf, broadcast_strides, check_broadcasts
from fusegraph.lowering.views import Strides
from fusegraph.ops.base import Kind, Role
from fusegraph.ops.modes import accumulator

#: What is chosen of results that are as large as what is reduced.
NAME, JOINED, APART = "results beside a reduction", "in its kernel", "apart"
#: Columns that are combined beside rows: words of sums in the registers of a block, and the fewest rows of a part.
MOST_COLUMN_WORDS, LEAST_ROWS = 24 * 1024, 8
#: The fewest elements of a part of a row that a warp reduces, and the most such parts of a row.
LEAST_SEGMENT, MOST_SEGMENTS = 64, 256


class _Space:
    """The space of a group: the shape that is reduced and along which axes; and how its tensors lie in it.

    Results of reductions that drop their axes have fewer dimensions, and so have the nodes that follow from them
    (`dropped`), except where the axes are the leading ones: then broadcasting puts back what was dropped.
    """

    def __init__(self, view: GroupView) -> None:
        self.view = view
        nodes = view.of(Kind.REDUCTION)
        #: reductions of columns, in parts, beside those of whole rows
        self.columns = columns(view)
        nodes = [n for n in nodes if n not in self.columns]
        first = max(nodes, key=lambda n: len(n.attributes["axes"]))
        self.shape = first.inputs[0].shape
        self.axes: tuple[int, ...] = first.attributes["axes"]
        self.chunk = _chunk(first)
        #: reductions of segments of rows, along some of their axes
        self.segments = [n for n in nodes if self.chunk is None and set(n.attributes["axes"]) < set(self.axes)]
        self.segment_axes: tuple[int, ...] = self.segments[0].attributes["axes"] if self.segments else ()
        self.row_order = (*(d for d in self.axes if d not in self.segment_axes), *self.segment_axes)
        #: results of reductions of parts, which nothing else in the kernel can read
        parts = (n for n in view.of(Kind.REDUCTION) if n.op.role is Role.PARTIAL or n in self.segments)
        self.parts = {node.output: node for node in parts}
        for node in view.nodes if self.parts else ():
            for tensor in self.parts.keys() & set(node.inputs):
                who = "several blocks make" if self.parts[tensor].op.role is Role.PARTIAL else "several warps make"
                raise Declined(f"{node.name!r} needs all parts of {tensor.name!r}, which {who}")
        for node in nodes:
            if node in self.segments:
                continue
            if _chunk(node) != self.chunk:
                raise Declined(
                    f"{node.name!r} reduces {_parts_text(_chunk(node))}, {first.name!r} {_parts_text(self.chunk)}"
                )
            if (node.inputs[0].shape, node.attributes["axes"]) != (self.shape, self.axes):
                raise Declined(
                    f"{node.name!r} reduces {list(node.inputs[0].shape)} along {list(node.attributes['axes'])}, "
                    f"{first.name!r} {list(self.shape)} along {list(self.axes)}: one kernel has one kind of rows"
                )
        rank = len(self.shape)
        self.kept = tuple(d for d in range(rank) if d not in self.axes)
        self.kept_shape = tuple(1 if d in self.axes else n for d, n in enumerate(self.shape))
        self.dropped_shape = tuple(self.shape[d] for d in self.kept)
        #: the kept dimensions in the order of the kernel's space: those along which columns are reduced come last
        self.walked = self.columns[0].attributes["axes"] if self.columns else ()
        self.outer_order = (*(d for d in self.kept if d not in self.walked), *self.walked)
        #: all of them in that order
        self.order = (*self.outer_order, *self.row_order)
        leading = self.axes == tuple(range(len(self.axes)))
        self.dropped: set[Tensor] = set()
        for node in view.nodes:
            if node.kind is Kind.REDUCTION:
                whole = self.chunk is None and node.output not in self.parts
                if whole and not node.attributes["keepdims"] and not leading:
                    self.dropped.add(node.output)
            elif any(t in self.dropped for t in node.inputs):
                self.dropped.add(node.output)
        self._check()

    def _check(self) -> None:
        view, inner = self.view, {n.output for n in self.view.nodes}
        read_dropped: set[Tensor] = set()
        read_full: set[Tensor] = set()
        for node in view.nodes:
            if node.kind is Kind.CONTRACTION:
                raise Declined(f"{node.op.name} {node.name!r} is not pointwise")
            if node.kind is Kind.MOVEMENT:
                if node.op.role is Role.GATHER:
                    gathered.check(view, node, self.shape, self.axes)
                if self.columns or self.segments or self.chunk is not None:
                    raise Declined(f"{node.name!r} takes rows that are reduced in parts, or beside columns")
                continue
            after = node.output in self.dropped and node.kind is Kind.POINTWISE
            shape = self.dropped_shape if after else self.shape
            if node.kind is Kind.POINTWISE:
                check_broadcasts(node, shape, f"{'the results' if after else 'the space'} of the reduction")
            if after and node.op.shapes and node.op.role is not Role.SIZE:
                raise Declined(f"{node.name!r} asks for positions in the result of the reduction")
            for tensor in node.inputs:
                if tensor.is_constant and tensor.size == 1:
                    continue
                if tensor not in inner:
                    (read_dropped if after else read_full).add(tensor)
                elif after != (tensor in self.dropped):
                    raise Declined(
                        f"{node.name!r} {list(node.output.shape)} takes {tensor.name!r} {list(tensor.shape)}, which "
                        f"{'still has' if after else 'no longer has'} the dimensions that are reduced"
                    )
        self._dropped_reads = read_dropped
        for tensor in read_dropped & read_full:
            raise Declined(f"{tensor.name!r} is read before the reduction and after it, along different dimensions")
        for tensor in view.writes:
            if tensor in self.parts:
                continue
            if tensor not in self.dropped and not self._covers(tensor):
                raise Declined(
                    f"{tensor.name!r} {list(tensor.shape)} is needed in memory: it is neither all of "
                    f"{list(self.shape)} nor a result of the reduction {list(self.kept_shape)}"
                )
            if tensor in self.dropped and tensor.shape != self.dropped_shape:
                raise Declined(
                    f"{tensor.name!r} {list(tensor.shape)} is needed in memory but is smaller than the result "
                    f"{list(self.dropped_shape)}"
                )

    def _covers(self, tensor: Tensor) -> bool:
        """Returns true if a written tensor has an element for each of the space, or for each row."""
        missing = len(self.shape) - len(tensor.shape)
        shape = (1,) * missing + tensor.shape
        return shape == self.shape or (shape == self.kept_shape and self.chunk is None)

    def strides(self, tensor: Tensor) -> tuple[int, ...]:
        """Returns a tensor's strides over the parts, if rows have any, the kept dimensions, and the reduced ones."""
        if self.chunk is None:
            found = self._columns(self.parts[tensor]) if tensor in self.parts else self._strides(tensor)
            return tuple(found[d] for d in self.order)
        if tensor not in self.parts:
            found = self._strides(tensor)
            return (0, *(found[d] for d in (*self.kept, *self.axes)))
        part, over = steps(self.parts[tensor])
        return (part, *(over[d] for d in (*self.kept, *self.axes)))

    def _strides(self, tensor: Tensor) -> tuple[int, ...]:
        """Returns a tensor's strides over the shape that is reduced."""
        if tensor in self.dropped or tensor in self._dropped_reads:
            over = dict(zip(self.kept, broadcast_strides(tensor, self.dropped_shape)))
            return tuple(over.get(d, 0) for d in range(len(self.shape)))
        return broadcast_strides(tensor, self.shape)

    def _columns(self, node: Node) -> tuple[int, ...]:
        """Returns the strides of one part of a reduction of columns, or of a reduction of segments."""
        reduced = node.attributes["axes"]
        if node.op.role is Role.PARTIAL:
            strides = steps(node)[1]
        else:
            own = iter(node.output.strides)
            gone = () if node.attributes["keepdims"] else reduced
            strides = tuple(0 if d in gone else next(own) for d in range(len(self.shape)))
        return tuple(s if n > 1 and d not in reduced else 0 for d, (n, s) in enumerate(zip(self.shape, strides)))

    @property
    def segmented(self) -> Segments | None:
        """Which parts of a row are reduced as well, for a program that stores what the group writes."""
        if not self.segments:
            return None
        return Segments(len(self.segment_axes), tuple(n for n, t in enumerate(self.view.writes) if t in self.parts))

    @property
    def walk(self) -> Walk | None:
        """Which rows a block walks, for a program that stores what the group writes."""
        if not self.columns:
            return None
        writes = enumerate(self.view.writes)
        sums = tuple((n, steps(self.parts[t])[0]) for n, t in writes if t in self.parts)
        return Walk(len(self.walked), self.columns[0].attributes["chunk"], sums)

    @property
    def row(self) -> tuple[int, ...]:
        return tuple(self.shape[d] for d in self.row_order)

    @property
    def outer(self) -> tuple[int, ...]:
        """Sizes of the parts, if there are any, and the kept dimensions."""
        if self.chunk is None:
            return tuple(self.shape[d] for d in self.outer_order)
        return (-(-prod(self.row) // self.chunk), *self.dropped_shape)


def columns(view: GroupView) -> list[Node]:
    """Returns the reductions in parts of a group that reduces whole rows as well: they must be of its columns."""
    nodes = view.of(Kind.REDUCTION)
    parts = [n for n in nodes if n.op.role is Role.PARTIAL]
    return parts if len(parts) < len(nodes) else []


def _check_columns(space: _Space, target: Target) -> None:
    """Raises Declined unless the kernel of some rows can reduce columns as well."""
    first = space.columns[0]
    row = next(n for n in space.view.of(Kind.REDUCTION) if n not in space.columns)
    for node in space.columns:
        x, axes, chunk = node.inputs[0], node.attributes["axes"], node.attributes["chunk"]
        if axes != space.walked or chunk != first.attributes["chunk"]:
            raise Declined(
                f"{node.name!r} reduces parts of {chunk} along {list(axes)}, {first.name!r} of "
                f"{first.attributes['chunk']} along {list(space.walked)}: one kernel walks one kind of parts"
            )
        if x.shape != space.shape or set(axes) & set(space.axes):
            raise Declined(
                f"{node.name!r} reduces parts of {list(x.shape)} along {list(axes)}, {row.name!r} whole rows of "
                f"{list(space.shape)} along {list(space.axes)}"
            )
        if mode_of(node).looks_twice:
            raise Declined(f"{node.name!r} looks at each part twice ({node.attributes['mode']})")
        if chunk != walk_chunk(space.view.reads, space.shape, space.axes, axes, target):
            raise Declined(f"{node.name!r} reduces parts of {chunk} rows: not what a kernel of these rows walks")
    length = prod(space.row)
    words = length * sum(-(-t.dtype.itemsize // 4) for t in space.parts)
    if words > MOST_COLUMN_WORDS:
        raise Declined(f"{first.name!r}: rows of {length} elements have no registers left for the sums of columns")


def _check_segments(space: _Space, target: Target) -> None:
    """Raises Declined unless the kernel of some rows can reduce segments of them as well."""
    row = next(n for n in space.view.of(Kind.REDUCTION) if n.output not in space.parts)
    for node in space.segments:
        x, axes = node.inputs[0], node.attributes["axes"]
        if (x.shape, axes) != (space.shape, space.segment_axes) or space.columns:
            raise Declined(
                f"{node.name!r} reduces {list(x.shape)} along {list(axes)}, {row.name!r} {list(space.shape)} along "
                f"{list(space.axes)}: one kernel has one kind of rows, and one kind of parts of them"
            )
        if mode_of(node).after is not None:
            raise Declined(f"{node.name!r} needs more than one step after its reduction")
    if not has_segments(space.view.reads, space.shape, space.axes, space.segment_axes, target):
        raise Declined(
            f"{space.segments[0].name!r} reduces along {list(space.segment_axes)}, {row.name!r} along "
            f"{list(space.axes)}: no parts of rows for warps"
        )


def has_segments(
    read: Iterable[Tensor], shape: tuple[int, ...], axes: tuple[int, ...], inner: tuple[int, ...], target: Target
) -> bool:
    """Returns true if a kernel that reduces rows along ``axes`` can reduce parts of them as well, along ``inner``.

    There have to be enough rows for blocks, and parts for their warps, and neighbours in memory have to be in one part.
    """
    length, size = (prod(shape[d] for d in which) for which in (axes, inner))
    whole = [t for t in read if t.shape == shape]
    if not prod(shape) or not whole or any(parallelism(t, inner).across for t in whole):
        return False
    rows = prod(shape) // length
    return rows >= target.sms and size >= LEAST_SEGMENT and 4 <= length // size <= MOST_SEGMENTS


def walk_chunk(
    read: Iterable[Tensor], shape: tuple[int, ...], axes: tuple[int, ...], walked: tuple[int, ...], target: Target
) -> int | None:
    """Returns the rows of a part, where a kernel of rows along ``axes`` reduces columns as well, along ``walked``.

    There are about as many parts as the target has multiprocessors.  None if the kernel had better not: if there are
    few rows, or neighbours in memory are in several.
    """
    whole = [t for t in read if t.shape == shape]
    length, rows = (prod(shape[d] for d in which) for which in (axes, walked))
    if length <= 1 or not prod(shape) or not whole or any(parallelism(t, axes).across for t in whole):
        return None
    others = prod(shape) // (length * rows)
    chunk = -(-rows // max(1, target.sms // others))
    return chunk if chunk >= LEAST_ROWS else None


def _chunk(node: Node) -> int | None:
    """Returns the elements of a part of a reduction that is split, None for a whole one."""
    return node.attributes["chunk"] if node.op.role is Role.PARTIAL else None


def _parts_text(chunk: int | None) -> str:
    return "whole rows" if chunk is None else f"parts of {chunk} elements"


def accept(view: GroupView, options: Options) -> list[Choice]:
    """Raises Declined with the reason unless the group is reductions of one space, and pointwise nodes around them.

    They are along the same axes, but for reductions of columns or of segments beside them.  Returns the choice of
    whether the kernel of few blocks writes as much as it reads.
    """
    space = _Space(view)
    if space.columns:
        _check_columns(space, options.target.planned)
    if space.segments:
        _check_segments(space, options.target.planned)
    check_size(view)
    row, target = view.of(Kind.REDUCTION)[0], options.target.planned
    found = parallelism_of(view.graph, row.inputs[0], space.axes)
    full = [t for t in view.writes if t.size == prod(space.shape) and t not in space.parts]
    if not full or len(view.nodes) == 1 or space.chunk is not None or (not found.across and found.blocks >= FEW_ROWS):
        return []
    preferred = JOINED if keeps_whole(found, target) else APART
    cycles = {JOINED: found.cycles(target, LOOKS), APART: found.cycles_apart(target, 2)}
    if not found.across:
        cycles[JOINED] = found.bytes_each * target.sms / target.bytes_per_cycle
    alike = f"{row.inputs[0].type} {space.axes}"
    choice = weigh(NAME, row.name, cycles, preferred, options.settled, alike)
    if choice.taken == APART:
        raise Outweighed(
            f"{full[0].name!r} {list(full[0].shape)} would be written by as few blocks as the reduction has, "
            f"{found.blocks}",
            choice,
        )
    return [choice]


class RowsBuilder(ProgramBuilder):
    """The program of a group with reductions."""

    def __init__(
        self,
        view: GroupView,
        options: Options,
        strides: StridesOf,
        *anchors: Node,
        beside: frozenset[Node] = frozenset(),
        gathers: Callable[[Node], tuple[Strides, Strides]] | None = None,
    ) -> None:
        """beside: reductions of columns or of segments.

        gathers: the strides of what a gather takes, and of its index, over the kernel's space.
        """
        super().__init__(view, options, strides, *anchors)
        self._columns, self._gathers = beside, gathers
        #: the numbers of their reductions in the program
        self._of_columns: set[int] = set()

    def _add(self, node: Node) -> None:
        if node.kind is not Kind.MOVEMENT:
            super()._add(node)
        elif node.op.role is Role.GATHER and self._gathers is not None:
            self._values[node.output] = self._taken(node, *self._gathers(node))

    def _anchor(self, node: Node) -> Value:
        found = super()._anchor(node)
        after = mode_of(node).after if node.kind is Kind.REDUCTION and node.op.role is not Role.PARTIAL else None
        if after is None:
            return found
        count = prod(node.inputs[0].shape[d] for d in node.attributes["axes"])
        return self._emit(node.name, after.cuda(count, "float"), [found], "float")

    def _taken(self, node: Node, taken: Strides, along: Strides) -> Value:
        """Returns an element of the row that a gather takes."""
        x, index = gathered.operands(self._view, node)
        axis, reach = node.attributes["axis"], extent(x.shape, x.strides)
        last, itype = x.shape[axis] - 1, "int64" if reach > gathered.FAR else "int32"
        place = f"{{0}} < 0 ? 0 : {{0}} > {last} ? {last} : {{0}}"
        text = f"{itype}({place}) * {x.strides[axis]}"
        begin = self._emit(f"{index.name} row", text, [self._loaded(index, along)], itype)
        return self._loaded(x, taken, Begin(begin, x.strides[axis], reach))

    def _loaded(self, tensor: Tensor, strides: tuple[int, ...], begin: Begin | None = None) -> Load:
        alignment = self._view.alignment(tensor, self._options)
        operand = Operand(tensor.name, tensor.dtype, strides, alignment, begin)
        place = tensor.base, tensor.start, operand
        every = ((t.base, t.start, op) for t, op in zip(self._reads, self._loads))
        known = [n for n, other in enumerate(every) if other == place]
        if not known:
            self._loads.append(operand)
            self._reads.append(tensor)
        return Load(known[0] if known else len(self._loads) - 1)

    def _apply(self, node: Node) -> Value:
        if node.kind is not Kind.REDUCTION:
            return super()._apply(node)
        source, result, mode = node.inputs[0], node.output, mode_of(node)
        combiner, before, after = mode.combiner, mode.before, mode.after
        value = self._value(source)
        own = compute_type(source.dtype, self.real)
        total = compute_type(accumulator(combiner, source.dtype, result.dtype), self.real)
        value = self._typed(source.name, value, own, total)
        if before is not None and before.centred:
            mean = self._part_mean(node, self._reduce(f"{node.name} sum", combiner, value, total), total)
            value = self._emit(f"{node.name} centred", "{0} - {1}", [value, mean], total)
        if before is not None:
            text = before.floats if source.dtype.is_float else before.integers
            value = self._emit(f"{node.name} {before.name}", text, [value], total)
        of_columns = node in self._columns
        name = f"{node.name} {combiner.name}" if after is not None else node.name
        found: Value = self._reduce(name, combiner, value, total, of_columns)
        wanted = compute_type(result.dtype, self.real)
        count = prod(source.shape[d] for d in node.attributes["axes"])
        if after is not None:
            found = self._emit(node.name, after.cuda(count, total), [found], total)
        return self._rounded(result, self._typed(node.name, found, total, wanted))

    def _part_mean(self, node: Node, total: Value, ctype: str) -> Value:
        """Returns the mean of a part's elements; the last part may have fewer of them."""
        length, chunk = prod(node.inputs[0].shape[d] for d in node.attributes["axes"]), node.attributes["chunk"]
        if length % chunk == 0:
            return self._emit(f"{node.name} mean", f"{{0}} / {literal(chunk, ctype)}", [total], ctype)
        rank = 1 + node.inputs[0].rank
        self._indices.append(tuple(int(d == 0) for d in range(rank)))
        part = Index(len(self._indices) - 1)
        count = self._emit(
            f"{node.name} count",
            f"{ctype}(min({chunk}ll, {literal(length, 'int64')} - {{0}} * {chunk}ll))",
            [part],
            ctype,
        )
        return self._emit(f"{node.name} mean", "{0} / {1}", [total, count], ctype)

    def _reduce(self, name: str, combiner: Combiner, value: Value, ctype: str, of_columns: bool = False) -> Reduced:
        """Returns a reduction, or the one that combines the same already (with its axes dropped, or not)."""
        for k, known in enumerate(self._reductions):
            same = (known.combiner, known.value, known.ctype) == (combiner, value, ctype)
            if same and of_columns == (k in self._of_columns):
                return Reduced(k)
        self._reductions.append(Reduction(name, combiner, value, ctype))
        found = Reduced(len(self._reductions) - 1)
        if of_columns:
            self._of_columns.add(found.reduction)
        return found


def lower(view: GroupView, options: Options, name: str) -> Lowered:
    """Returns the kernel of a group that `accept` takes."""
    space = _Space(view)
    beside = frozenset(space.parts.values()) if space.chunk is None else frozenset()

    def gathers(node: Node) -> tuple[Strides, Strides]:
        taken, along = gathered.strides(view, node, space.shape)
        return tuple(taken[d] for d in space.order), tuple(along[d] for d in space.order)

    builder = RowsBuilder(view, options, space.strides, beside=beside, gathers=gathers)
    program, reads, writes = builder.build()
    spec = RowsSpec(name, space.outer, space.row, program, space.chunk, space.walk, space.segmented)
    return Lowered("rows", spec, reads, writes)


LOWERING: FamilyLowering = FamilyLowering(lambda view: view.of(Kind.REDUCTION), accept, lower)
