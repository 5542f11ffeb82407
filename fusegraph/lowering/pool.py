"""Pooling over windows of one form, and pointwise nodes around it -> a `PoolSpec`."""

from __future__ import annotations

from dataclasses import replace
from math import inf, prod

from codegen.combiners import ADD, MAX
from codegen.declined import Declined
from codegen.expr import Index, Operand, Reduced, Reduction, Value, compute_type, literal
from codegen.sizes import least, most, varies
from codegen.spec import PoolSpec, RowsSpec
from codegen.windows import Adaptive, Covering, Sliding, Window
from fusegraph.graph import Node, Tensor
from fusegraph.lowering.base import FamilyLowering, GroupView, Lowered, Options
from fusegraph.lowering.choices import Choice, Outweighed, weigh
from fusegraph.lowering.pointwise import check_size
from fusegraph.lowering.program import ProgramBuilder, StridesOf, broadcast_strides, check_broadcasts
from fusegraph.ops.base import Kind, Role
from fusegraph.ops.columns import COLUMNS, parts
from fusegraph.ops.pooling import Windows, counts, forward_of, padded_ends

#: The instructions of a pointwise op that is a function rather than one, and of an element of a window.
FUNCTION_COST, FOLD = 12, 1.5
#: Windows beside each other that a thread folds at once.
AT_ONCE = 4
#: Instructions that are done for each one at the rate of data sheets; the share of a launch that another kernel takes.
INSTRUCTIONS, LAUNCH = 0.9713, 0.585
#: What is chosen: nodes before the windows are part of the pool's kernel, or a kernel of their own.
NAME, PART, OWN = "prologue of a pool", "part of the pool", "a kernel of its own"


def geometry(node: Node) -> tuple[Windows, tuple[int, ...]]:
    """Returns a node's windows and its result's shape."""
    assert node.op.windows is not None
    return node.op.windows(tuple(t.type for t in node.inputs), node.attributes)


class _Space:
    """The two spaces of a group: the elements, for which the nodes before the windows are computed, and the windows.

    before  nodes that windows are made of.
    after   all others, and nodes of ``before`` that each window needs too: they are computed in both spaces.
    """

    def __init__(self, view: GroupView, options: Options) -> None:
        self.view = view
        nodes = view.of(Kind.POOLING)
        first = nodes[0]
        self.windows, self.shape = geometry(first)
        #: of which windows take each tap from another place, or None
        self.columns = first.inputs[0] if first.op.fold == COLUMNS else None
        self.elements = first.inputs[0].shape
        if self.columns is not None:
            self.elements = (*self.shape[:2], *parts(self.elements)[1])
        for node in nodes[1:]:
            if (node.inputs[0].shape, *geometry(node)) != (self.elements, self.windows, self.shape):
                raise Declined(
                    f"{node.op.name} {node.name!r} and {first.op.name} {first.name!r} have different windows: one "
                    "kernel has windows of one form"
                )
        self.before = view.before(t for node in nodes for t in node.inputs)
        if self.columns is not None and (self.before or len(nodes) > 1):
            raise Declined(f"{first.op.name} {first.name!r} reads columns from memory, and has a kernel to itself")
        for node in nodes:
            if node in self.before:
                raise Declined(f"{node.op.name} {node.name!r} comes before windows of its result")
        self.after = self._after()
        self._check()
        self.choices = self._weighed(options)

    def _after(self) -> set[Node]:
        view = self.view
        found = {n for n in view.nodes if n not in self.before}
        found |= {n for t in view.writes if (n := view.graph.producer(t)) is not None}
        windows = view.of(Kind.POOLING)
        return found | view.before((t for n in found.difference(windows) for t in n.inputs), windows)

    def _check(self) -> None:
        for node in self.view.nodes:
            if node.kind is Kind.POOLING:
                continue
            if node.kind is not Kind.POINTWISE:
                raise Declined(f"{node.op.name} {node.name!r} is not pointwise")
            places = [("the elements", self.elements)] * (node in self.before)
            places += [("the windows", self.shape)] * (node in self.after)
            for what, shape in places:
                check_broadcasts(node, shape, what)
        for tensor in self.view.writes:
            if tensor.shape != self.shape:
                raise Declined(
                    f"{tensor.name!r} {list(tensor.shape)} is needed in memory; the windows' results are "
                    f"{list(self.shape)}"
                )
        check_size(self.view)

    def _weighed(self, options: Options) -> list[Choice]:
        """Returns the choice of what comes before the windows; none if nothing does.

        Raises Outweighed if a kernel of its own would take less than computing it anew for the windows that hold an
        element, as far as one thread does not fold them.
        """
        if not self.before:
            return []
        target, again = options.target.planned, 1.0
        for axis, window in self.windows.items():
            again *= max(1.0, window.count * self.shape[axis] / max(self.elements[axis], 1))
        spans = (w.span(AT_ONCE) / (AT_ONCE * w.count) for w in self.windows.values() if isinstance(w, Sliding))
        times = max(1.0, again * min(spans, default=1.0))
        pools, graph = self.view.of(Kind.POOLING), self.view.graph
        made = [t for node in pools for t in node.inputs if graph.producer(t) in self.before]
        size, itemsize = max(t.size for t in made), max(t.dtype.itemsize for t in made)
        instructions, bytes_moved = INSTRUCTIONS * target.fma * target.sms, target.memory_share * target.bytes_per_cycle
        moved = sum(t.nbytes for t in (*self.view.reads, *self.view.writes)) / bytes_moved
        fold, computed = FOLD * again * size / instructions, times * sum(map(_cost, self.before)) * size / instructions
        apart = 2 * itemsize * size / bytes_moved + LAUNCH * target.launch_cycles
        cycles = {PART: max(moved, fold + computed), OWN: max(moved, fold) + apart}
        node = max(self.before, key=lambda n: (_cost(n), n.name))
        preferred = OWN if cycles[PART] > cycles[OWN] else PART
        choice = weigh(NAME, pools[0].name, cycles, preferred, options.settled, f"{node.op.name} {self.windows}")
        if choice.taken == OWN:
            raise Outweighed(
                f"{node.op.name} {node.name!r} would be computed {times:.2g} times for every element, for the windows "
                "that hold it",
                choice,
            )
        return [choice]

    def strides(self, tensor: Tensor, elements: bool) -> tuple[int, ...]:
        """Returns a tensor's strides over the windows, then over the elements of each.

        ``elements``: whether the tensor is read for every element, or else for every window.
        """
        if not elements:
            return broadcast_strides(tensor, self.shape) + (0,) * len(self.windows)
        if tensor is self.columns:
            return self._taps()
        steps = broadcast_strides(tensor, self.elements)
        outer = (0 if d in self.windows else s for d, s in enumerate(steps))
        return (*outer, *(steps[d] for d in self.windows))

    def _taps(self) -> tuple[int, ...]:
        """Returns the strides of columns: the tap of window p over position y is y + before - p * stride."""
        assert self.columns is not None
        (image, channel, *rest), windows = self.columns.strides, self.windows.values()
        taps, positions = rest[: len(windows)], rest[len(windows) :]
        inner = (s - w.stride * tap for s, tap, w in zip(positions, taps, windows) if isinstance(w, Covering))
        return (image, channel, *taps, *inner)

    def start(self, tensor: Tensor) -> int:
        """Returns where the first tap of the first window would lie over the first position."""
        if tensor is not self.columns:
            return 0
        windows = zip(self.windows.values(), tensor.strides[2:])
        return sum(w.before * tap for w, tap in windows if isinstance(w, Covering))


def _cost(node: Node) -> float:
    """Estimates the instructions of a pointwise node."""
    if not node.op.reads_values or node.op.role is Role.CAST:
        return 1
    text = node.op.expression(node.op.promoted(tuple(t.type for t in node.inputs)).kind, node.attributes)
    simple = ("math::abs", "math::maximum", "math::minimum", "math::relu")
    functions = text.count("math::") - sum(text.count(s) for s in simple)
    return 1 + FUNCTION_COST * (functions + text.count(" / "))


def accept(view: GroupView, options: Options) -> list[Choice]:
    """Raises Declined with the reason unless the group is pooling over windows of one form and pointwise nodes.

    Returns the choice by which some are in front of the windows.
    """
    return _Space(view, options).choices


class _Builder(ProgramBuilder):
    """The program of a group with windows: the nodes before them are computed for every element."""

    def __init__(self, view: GroupView, options: Options, space: _Space) -> None:
        self._space = space
        self._known: dict[bool, dict[Tensor, Value]] = {True: {}, False: {}}
        self._of: dict[bool, StridesOf] = {
            True: lambda t: space.strides(t, True),
            False: lambda t: space.strides(t, False),
        }
        super().__init__(view, options, self._of[False])
        self._enter(elements=False)

    def _enter(self, *, elements: bool) -> None:
        """Lets nodes from now on be computed for every element, or for every window."""
        self._values, self._strides = self._known[elements], self._of[elements]

    def _operand(self, tensor: Tensor) -> Operand:
        return replace(super()._operand(tensor), start=self._space.start(tensor))

    def _add(self, node: Node) -> None:
        if node in self._space.before:
            self._enter(elements=True)
            super()._add(node)
            self._enter(elements=False)
        if node in self._space.after:
            super()._add(node)

    def _apply(self, node: Node) -> Value:
        if node.kind is not Kind.POOLING:
            return super()._apply(node)
        self._enter(elements=True)
        values = [self._value(t) for t in node.inputs]
        self._enter(elements=False)
        fold: Value = getattr(self, f"_{node.op.fold}")(node, values)
        return self._rounded(node.output, fold)

    # ---- what is made of a window

    def _max(self, node: Node, values: list[Value]) -> Value:
        return self._reduce(Reduction(node.name, MAX, values[0], self._ctype(values[0])))

    def _index(self, node: Node, values: list[Value]) -> Value:
        found = self._reduce(Reduction(node.name, MAX, values[0], "int32", self._position(elements=True)))
        wanted = compute_type(node.output.dtype)
        return found if wanted == "int32" else self._emit(node.name, f"{wanted}({{0}})", [found], wanted)

    def _columns(self, node: Node, values: list[Value]) -> Value:
        return self._reduce(Reduction(node.name, ADD, values[0], self._ctype(values[0])))

    def _mean(self, node: Node, values: list[Value]) -> Value:
        real = self._ctype(values[0])
        total = self._reduce(Reduction(f"{node.name} sum", ADD, values[0], real))
        windows, shape = self._space.windows, self._space.shape
        return self._divided(node, total, windows, shape, padded_ends(self._space.elements, node.attributes), real)

    def _shares(self, node: Node, values: list[Value]) -> Value:
        real, loss = self._ctype(values[0]), self._space.elements
        image, windows, _ = forward_of(loss, node.attributes)
        ends = padded_ends(image, node.attributes)
        if _constant(windows, loss, ends) is not None:
            total = self._reduce(Reduction(f"{node.name} sum", ADD, values[0], real))
            return self._divided(node, total, windows, loss, ends, real)
        self._enter(elements=True)
        share = self._divided(node, values[0], windows, loss, ends, real, "share")
        self._enter(elements=False)
        return self._reduce(Reduction(node.name, ADD, share, real))

    def _chosen(self, node: Node, values: list[Value]) -> Value:
        real = self._ctype(values[0])
        own = self._position(elements=False)
        text = f"{{1}} == {{2}} ? {{0}} : {literal(0, real)}"
        chosen = self._emit(f"{node.name} chosen", text, [*values, own], real)
        return self._reduce(Reduction(node.name, ADD, chosen, real))

    def _reduce(self, reduction: Reduction) -> Reduced:
        for k, known in enumerate(self._reductions):
            if replace(known, name=reduction.name) == reduction:
                return Reduced(k)
        self._reductions.append(reduction)
        return Reduced(len(self._reductions) - 1)

    def _index_of(self, steps: dict[int, int], *, elements: bool) -> Index:
        """Returns the number that coordinates along the windows' axes give: of an element, or of a window."""
        outer = tuple(0 if elements else steps.get(d, 0) for d in range(len(self._space.shape)))
        indices = (*outer, *(steps.get(d, 0) if elements else 0 for d in self._space.windows))
        if indices not in self._indices:
            self._indices.append(indices)
        return Index(self._indices.index(indices))

    def _position(self, *, elements: bool) -> Index:
        """Returns an element's position, flattened over the windows' axes."""
        sizes = self._space.elements if elements else self._space.shape
        steps, step = {}, 1
        for axis in reversed(self._space.windows):
            steps[axis] = step
            step *= sizes[axis]
        return self._index_of(steps, elements=elements)

    def _divided(
        self,
        node: Node,
        total: Value,
        windows: Windows,
        pooled: tuple[int, ...],
        ends: dict[int, int | None],
        real: str,
        part: str = "",
    ) -> Value:
        """Returns a sum divided by the number of elements that its window counts."""
        name = f"{node.name} {part}".rstrip()
        constant = _constant(windows, pooled, ends)
        if constant is not None:
            # The product with the reciprocal rounds once more than the quotient; of nothing it is 0 times infinity.
            text = f"{{0}} * {literal(1 / constant if constant else inf, real)}"
            return self._emit(name, text, [total], real) if constant != 1 else total
        elements = self._values is self._known[True]
        fixed, factors = 1, []
        for axis, window in windows.items():
            alike, fewest = _counted(window, pooled[axis], ends[axis])
            if alike is not None:
                fixed *= alike
            else:
                text = _count(window, ends[axis], fewest)
                at = self._index_of({axis: 1}, elements=elements)
                factors.append(self._emit(f"{node.name} count", text, [at], "int32"))
        product = " * ".join([*(f"{{{k}}}" for k in range(len(factors))), *([str(fixed)] if fixed != 1 else [])])
        weight = self._emit(f"{node.name} weight", f"{literal(1, real)} / {real}({product})", list(factors), real)
        return self._emit(name, "{0} * {1}", [total, weight], real)


def _constant(windows: Windows, pooled: tuple[int, ...], ends: dict[int, int | None]) -> int | None:
    """Returns the number of elements that every window counts, None if they differ."""
    every = [_counted(w, pooled[a], ends[a])[0] for a, w in windows.items()]
    return None if None in every else prod(n for n in every if n is not None)


def _counted(window: Window, positions: int, padded: int | None) -> tuple[int | None, int]:
    """Returns the number of elements that a window at each position counts, None if they differ, and the least number.

    If sizes vary, that is what holds at all of them.
    """
    if not varies((window, positions, padded)):
        many = counts(window, positions, padded)
        return int(many[0]) if len(many) and (many == many[0]).all() else None, int(many.min(initial=window.count))
    if isinstance(window, Adaptive):
        return None, 1
    assert isinstance(window, Sliding)
    last = (positions - 1) * window.stride - window.before
    beyond = most(last + window.taps - (window.size if padded is None else padded)) > 0
    alike = not beyond and (padded is not None or window.before <= 0)
    fewest = min(least(window.size), window.taps - max(window.before, 0), least(window.size - last))
    return window.taps if alike else None, fewest


def _count(window: Window, padded: int | None, least: int) -> str:
    """Returns the C template for the number of elements that the window at a position counts."""
    if isinstance(window, Adaptive):
        at = "{0}" if most(window.size * (window.positions + 1)) < 2**31 else "int64({0})"
        end = f"(({at} + 1) * {window.size} + {window.positions - 1}) / {window.positions}"
        return f"int32({end} - {at} * {window.size} / {window.positions})"
    assert isinstance(window, Sliding)
    if padded is not None:
        return f"min({window.taps}, {padded + window.before} - {{0}} * {window.stride})"
    end = f"min({{0}} * {window.stride} + {window.taps}, {window.size + window.before})"
    text = f"{end} - max({{0}} * {window.stride}, {window.before})"
    return text if least > 0 else f"max({text}, 0)"


def _is_whole(window: Window, positions: int) -> bool:
    """Returns true if there is one window, of all elements: a row that is reduced."""
    if isinstance(window, Sliding):
        first, end = -window.before, window.taps - window.before
        return positions == 1 and window.dilation == 1 and first <= 0 and end >= window.size
    return isinstance(window, Adaptive) and positions == 1


def lower(view: GroupView, options: Options, name: str) -> Lowered:
    """Returns the kernel of a group that `accept` takes."""
    space = _Space(view, options)
    program, reads, writes = _Builder(view, options, space).build()
    whole = all(_is_whole(window, space.shape[axis]) for axis, window in space.windows.items())
    if whole and all(reduction.at is None for reduction in program.reductions):
        row = tuple(space.elements[axis] for axis in space.windows)
        return Lowered("rows", RowsSpec(name, space.shape, row, program), reads, writes)
    return Lowered("pool", PoolSpec(name, space.shape, tuple(space.windows.items()), program), reads, writes)


LOWERING: FamilyLowering = FamilyLowering(lambda view: view.of(Kind.POOLING), accept, lower)
