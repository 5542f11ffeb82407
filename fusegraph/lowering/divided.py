"""Operands of matrix products that movement and pointwise nodes make of fewer bytes than they have.

A weight of 8 or 4 bits with a scale for each group of the reduction is computed over a space with more dimensions than
the product: N x K is N x K / 64 x 64.  Movement is followed back from the operand to what lies in memory
(`lowering.coordinates`); where a coordinate is affine only once a dimension is split, that dimension of the product
(rows, columns, the reduction) is split for all that takes part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from codegen.declined import Declined
from codegen.expr import Operand, Program
from codegen.iteration import packed
from codegen.sizes import varies
from codegen.spec import Gather, Strides
from codegen.target import Target
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.affine import Split
from fusegraph.lowering.base import GroupView, Options, Part
from fusegraph.lowering.convolution import Product
from fusegraph.lowering.moved import CoordinateBuilder
from fusegraph.ops.base import Kind, Role

#: An operand has at most so many times the bytes that it is made of: elements of 2 bits become ones of 32.
MOST_GROWTH = 16
#: Movement that only says where elements are: behind others they would be at computed positions.
_VIEWS = (Role.TRANSPOSE, Role.RESHAPE, Role.BROADCAST, Role.SLICE)
#: A dimension of a product: of its "batch", "rows", "cols" or "inner" ones, and its number among these.
Place: TypeAlias = tuple[str, int]
#: The sizes that dimensions are split into.
Cuts: TypeAlias = Mapping[Place, tuple[int, ...]]
_BATCH, _INNER, _OUTER = "batch", "inner", ("rows", "cols")


def made_of_less(
    graph: Graph, operand: Tensor, taker: Node, *, narrowed: bool = False, beside: Container[Tensor] = ()
) -> tuple[Node, ...]:
    """Returns the nodes that make an operand for one node alone of fewer bytes than it has; none if there are none.

    They are pointwise nodes and views.  With ``narrowed`` they may begin at results that have fewer bytes than what
    they are made of, as numbers do that have just been quantised.  Others may take what is ``beside``, too.
    """
    outputs = graph.output_numbers
    for stops in (False, True) if narrowed else (False,):
        members: set[Node] = set()
        stack = [operand]
        while stack:
            tensor = stack.pop()
            node = graph.producer(tensor)
            if node is None or node in members or tensor in outputs or not _is_simple(node):
                continue
            if stops and tensor.nbytes < max((t.nbytes for t in node.inputs), default=0):
                continue
            if tensor in beside or all(n in members or n is taker for n in graph.consumers(tensor)):
                members.add(node)
                stack += node.inputs
        if is_smaller(operand, members) and _computes(members):
            return tuple(n for n in graph.nodes if n in members)
    return ()


def dequantising(graph: Graph, operand: Tensor) -> tuple[Node, ...] | None:
    """Returns the nodes that make an operand of 8-bit floats of its size, whoever else takes their results: casts,
    products with smaller tensors, views and what these take.  None if there are no such 8-bit floats.
    """
    members: set[Node] = set()
    stack, found = [operand], False
    while stack:
        tensor = stack.pop()
        codes = tensor.dtype.is_float and tensor.dtype.itemsize == 1 and tensor.size == operand.size
        node = graph.producer(tensor)
        if codes or node is None or node in members:
            found = found or codes
            continue
        if tensor.size >= operand.size:
            if not (_is_simple(node) and (node.kind is Kind.MOVEMENT or node.op.role in (Role.CAST, Role.PRODUCT))):
                return None
        elif not _is_simple(node):
            continue
        members.add(node)
        stack += node.inputs
    return tuple(n for n in graph.nodes if n in members) if found else None


def multiplies_codes(graph: Graph, product: Node, target: Target) -> bool:
    """Returns true if both operands of a product are made of 8-bit floats, which kernels may multiply themselves."""
    return target.planned.arch.has_wgmma and all(dequantising(graph, t) is not None for t in product.inputs)


def is_stored(graph: Graph, operand: Tensor, nodes: Sequence[Node]) -> bool:
    """Returns true if nodes make an operand of fewer bytes, all of which are parameters or constants.

    Its values are to stay as few bytes as they are stored in, whatever that takes.
    """
    fixed = all(t.is_constant or t in graph.parameters or t in graph.packed for t in _read(nodes))
    return fixed and is_smaller(operand, nodes)


def is_smaller(operand: Tensor, nodes: Iterable[Node]) -> bool:
    """Returns true if what nodes read has fewer bytes than the operand that they make, `MOST_GROWTH` times at most."""
    read = sum(t.nbytes for t in _read(nodes))
    return read < operand.nbytes <= MOST_GROWTH * read


def _read(nodes: Iterable[Node]) -> set[Tensor]:
    made = {n.output for n in nodes}
    return {t for n in nodes for t in n.inputs if t not in made and n.op.reads_values}


def _is_simple(node: Node) -> bool:
    return node.kind is Kind.POINTWISE or (node.kind is Kind.MOVEMENT and node.op.role in _VIEWS)


def _computes(nodes: Iterable[Node]) -> bool:
    return any(n.kind is Kind.POINTWISE for n in nodes)


def moves(view: GroupView) -> bool:
    """Returns true for groups of matrix products whose movement is all in front of them."""
    anchors, moved = view.contractions, view.of(Kind.MOVEMENT)
    if not moved or not anchors or any(n.op.role is not Role.MATMUL for n in anchors):
        return False
    return view.before(t for n in anchors for t in n.inputs).issuperset(moved)


def check(view: GroupView, anchor: Node, operand: Tensor, nodes: Sequence[Node]) -> None:
    """Raises Declined unless the nodes in front of a product, movement among them, make an operand of fewer bytes."""
    for node in nodes:
        if not _is_simple(node):
            raise Declined(
                f"{node.op.name} {node.name!r} comes before {anchor.op.name} {anchor.name!r} and is no pointwise op "
                "or view"
            )
        if node.output in view.writes:
            raise Declined(
                f"{node.output.name!r} is needed in memory as well: {anchor.op.name} {anchor.name!r} reads it there"
            )
    if not is_smaller(operand, nodes) or not _computes(nodes):
        moved = next(n for n in reversed(nodes) if n.kind is Kind.MOVEMENT)
        raise Declined(
            f"{moved.op.name} {moved.name!r} comes before {anchor.op.name} {anchor.name!r}, which reads the result "
            "where it lies"
        )


@dataclass(frozen=True)
class _Made:
    """An operand as its prologue computes it: over its dimensions, each in ``parts``."""

    parts: tuple[tuple[int, ...], ...]
    program: Program
    reads: tuple[Tensor, ...]


@dataclass(frozen=True)
class Divided:
    """The operands of a product over dimensions that are split.

    cuts     the sizes that dimensions of the product are split into.
    places   for each operand the dimension of the product that each of its own is; None for those that repeat.
    lead     how many dimensions the first one of the reduction was cut into for a product in parts: which part it is.
    """

    cuts: Cuts
    places: tuple[tuple[Place | None, ...], tuple[Place | None, ...]]
    made: tuple[_Made | None, _Made | None]
    lead: int

    def product(self, whole: Product, part: Callable[[Tensor], Tensor]) -> Product:
        """Returns a product, which is not in parts, over the split dimensions, and in its parts."""
        rows, cols = (self._sizes(kind, sizes) for kind, sizes in zip(_OUTER, (whole.rows, whole.cols)))
        batch, inner = self._sizes(_BATCH, whole.batch), self._sizes(_INNER, whole.inner)
        lead = inner[: self.lead]
        kinds = [(_BATCH, whole.batch), (_OUTER[0], whole.rows), (_OUTER[1], whole.cols)]

        def strides(tensor: Tensor) -> Strides:
            steps = iter(whole.strides(part(tensor) if lead else tensor))
            found = [self._steps(kind, [next(steps) for _ in sizes]) for kind, sizes in kinds]
            first = tuple(tensor.strides[0] * s for s in packed(lead)) if lead else ()
            return (*first, *(s for each in found for s in each))

        return Product(
            (*lead, *batch),
            rows,
            cols,
            inner[self.lead :],
            self._plain(whole.a, _OUTER[0]),
            self._plain(whole.b, _OUTER[1]),
            strides,
        )

    def computed(self, number: int, plain: Gather, whole: Product) -> tuple[Gather, tuple[Tensor, ...]]:
        """Returns an operand with its prologue, and the tensors that are read."""
        made = self.made[number]
        assert made is not None
        own = (whole.rows, whole.cols)[number]
        kinds = ((_BATCH, whole.batch), (_OUTER[number], own), (_INNER, whole.inner))
        first = [sum(map(len, made.parts[:d])) for d in range(len(made.parts))]
        dims = {place: d for d, place in enumerate(self.places[number]) if place is not None}

        def over(steps: Strides) -> tuple[Strides, Strides, Strides]:
            found = []
            for kind, sizes in kinds:
                each: list[int] = []
                for n, size in enumerate(sizes):
                    parts, d = self.cuts.get((kind, n), (size,)), dims.get((kind, n))
                    each += [0] * len(parts) if d is None else steps[first[d] : first[d] + len(parts)]
                found.append(tuple(each))
            return self._in_parts(*found)

        program = made.program
        every = [over(s) for s in (*(op.strides for op in program.loads), *program.indices)]
        flat = [b + o + i for b, o, i in every]
        loads = tuple(replace(op, strides=s) for op, s in zip(program.loads, flat))
        largest = max(range(len(made.reads)), key=lambda n: (made.reads[n].size, -n), default=None)
        if largest is not None:
            batch, outer, inner = every[largest]
            plain = replace(plain, batch=batch, outer=outer, inner=inner, start=0)
        program = replace(program, loads=loads, indices=tuple(flat[len(loads) :]))
        return replace(plain, program=program, starts=(0,) * len(every)), made.reads

    def _sizes(self, kind: str, sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(part for n, size in enumerate(sizes) for part in self.cuts.get((kind, n), (size,)))

    def _steps(self, kind: str, steps: Sequence[int]) -> Strides:
        """Returns the steps of split dimensions, of those of whole ones."""
        return tuple(s * step for n, step in enumerate(steps) for s in packed(self.cuts.get((kind, n), (1,))))

    def _plain(self, gather: Gather, kind: str) -> Gather:
        steps = self._in_parts(
            self._steps(_BATCH, gather.batch), self._steps(kind, gather.outer), self._steps(_INNER, gather.inner)
        )
        return replace(gather, batch=steps[0], outer=steps[1], inner=steps[2])

    def _in_parts(self, batch: Strides, outer: Strides, inner: Strides) -> tuple[Strides, Strides, Strides]:
        return inner[: self.lead] + batch, outer, inner[self.lead :]


def divided(
    view: GroupView, options: Options, anchor: Node, whole: Callable[[Operand, Operand], Product]
) -> Divided | None:
    """Returns the operands of a product of a group with movement in front of it; None if there is none.

    ``whole`` returns the product, not in parts, of operands as they lie.  Raises Declined if an element of them
    would be read at a position that is computed.
    """
    if not view.of(Kind.MOVEMENT):
        return None
    places = _places(anchor, whole)
    count, cuts = anchor.attributes.get("parts", 1), dict[Place, tuple[int, ...]]()
    if count > 1:
        size = anchor.inputs[0].shape[-1]
        cuts[_INNER, 0] = count, size // count
    found: list[_Made | None] = [None, None]
    known: object = None
    while known != cuts:  # a dimension that one operand splits is split for the other
        known = dict(cuts)
        for n, operand in enumerate(anchor.inputs):
            if nodes := view.before([operand]):
                found[n] = _made(view, options, operand, nodes, places[n], cuts)
    lead, left = 0, count
    while left > 1:
        size = cuts[_INNER, 0][lead]
        if left % size:
            raise Declined(f"parts of {anchor.name!r} are not whole groups")
        lead, left = lead + 1, left // size
    return Divided(cuts, places, (found[0], found[1]), lead)


def _places(
    anchor: Node, whole: Callable[[Operand, Operand], Product]
) -> tuple[tuple[Place | None, ...], tuple[Place | None, ...]]:
    """Returns for each operand which dimension of the product each of its own is."""
    found: list[tuple[Place | None, ...]] = []
    for n, tensor in enumerate(anchor.inputs):
        each: list[Place | None] = []
        for d in range(tensor.rank):
            unit = tuple(int(k == d) for k in range(tensor.rank))
            operands = [
                Operand(t.name, t.dtype, unit if k == n else (0,) * t.rank) for k, t in enumerate(anchor.inputs)
            ]
            product = whole(operands[0], operands[1])
            gather = (product.a, product.b)[n]
            kinds = zip((_BATCH, _OUTER[n], _INNER), (gather.batch, gather.outer, gather.inner))
            each.append(next(((kind, i) for kind, steps in kinds for i, step in enumerate(steps) if step), None))
        found.append(tuple(each))
    return found[0], found[1]


def _made(
    view: GroupView,
    options: Options,
    operand: Tensor,
    nodes: set[Node],
    places: Sequence[Place | None],
    cuts: dict[Place, tuple[int, ...]],
) -> _Made:
    """Returns an operand as its prologue computes it; adds what that splits to ``cuts``."""
    part = Part(view, [n for n in view.nodes if n in nodes], operand)
    parts = [list((cuts.get(place) if place else None) or (size,)) for place, size in zip(places, operand.shape)]
    while True:
        builder = CoordinateBuilder(part, options, parts)
        try:
            program, reads, _ = builder.build()
            break
        except Split as split:
            if varies(operand.shape[split.place(parts)[0]]):
                raise Declined(f"a dimension of {operand.name!r} that varies would be split") from None
            split.split(parts)
    if program.tables or program.itype != "int32":
        raise Declined(f"{operand.name!r} would be computed of elements at computed positions")
    for place, sizes in zip(places, parts):
        if len(sizes) > 1:
            assert place is not None
            cuts[place] = tuple(sizes)
    return _Made(tuple(map(tuple, parts)), program, reads)
