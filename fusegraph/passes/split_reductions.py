"""Splitting reductions: one with few results, each of many elements, becomes two, so that all of a GPU works on it.

Parts of it are reduced by themselves (`ops.partial`), then the parts; for one target always the same ones in the same
order, so that the same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np

from codegen.arch import SECTOR_BYTES
from codegen.rows.across_schedule import PARTS_WRITTEN
from codegen.sizes import Size, most
from codegen.target import Target
from fusegraph.dtypes import DType
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.choices import Choice, weigh
from fusegraph.lowering.parallelism import LOOKS, Parallelism, axes_of_parts, keeps_whole, parallelism_of, read_for
from fusegraph.lowering.partials import mode_of
from fusegraph.lowering.views import divided, turned_back
from fusegraph.ops import TABLE, Op
from fusegraph.ops.base import Role
from fusegraph.ops.evaluate import compute_dtype
from fusegraph.ops.modes import AVERAGE, COMBINED, MODES, SUM, accumulator, as_number
from fusegraph.ops.partial import PARTIAL
from fusegraph.passes.partition import Partition
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, same
from fusegraph.pattern import followers

#: A reduction stays whole if a kernel for it has blocks for this share of the multiprocessors.  Along rows, also if no
#: block reads more bytes; across rows, if that is estimated to take at most so many times as long as parts: estimates
#: are those of kernels that write as much as they read.
BUSY = 32 / 33
#: What is chosen; with so many blocks for each multiprocessor there is nothing to choose.
CHOICE, WHOLE, PARTS, MANY = "parts of a reduction", "whole", "in parts", 2
SHORT_BYTES = 512 << 10
AS_LONG = 1.6
#: Bytes that a block reads of one part: enough to be worth its beginning and its end, few enough for its cache.
LEAST_PART_BYTES, PART_BYTES = 16 << 10, 32 << 10
#: At most so many bytes of neighbouring rows lie side by side in a block.
SIDE_BYTES = 256
#: Blocks for each multiprocessor that are a few waves, and the most parts that one block can be left to reduce.
BLOCKS = 8
MOST_PARTS = 4096


class Split(NamedTuple):
    """How a reduction is split.

    axes  along which parts are reduced first.
    size  elements of a part, None for all.
    x     what is reduced if it is not the operand, but what that is made of by joining dimensions; ``axes`` are its.
    """

    axes: tuple[int, ...]
    size: int | None
    x: Tensor | None = None


def split_reductions(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Splits long reductions into parts where one kernel would leave most of a GPU idle."""
    target = options.target.planned
    alike: dict[object, list[Node]] = {}
    for node in filter(can_be_split, graph.nodes):
        key = node.inputs[0].shape, node.attributes["axes"], returns(graph, node, target)
        alike.setdefault(key, []).append(node)
    choices: list[Choice] = []
    chunks: dict[Node, Split] = {}
    for nodes in alike.values():
        for node, (choice, size) in _weighed(graph, nodes, options).items():
            choices.append(choice)
            if choice.taken == PARTS:
                chunks[node] = Split(axes_of_parts(graph, nodes[0].inputs[0], node.attributes["axes"]), size)
    return replace(split(graph, chunks), choices=tuple(choices))


def _weighed(graph: Graph, nodes: Sequence[Node], options: Options) -> dict[Node, tuple[Choice, int]]:
    """Returns the choices of whether reductions of one shape are split, and the elements of a part; few have none.

    They have parts of one size: one kernel reads all of them.
    """
    x, axes, target = nodes[0].inputs[0], nodes[0].attributes["axes"], options.target.planned
    whole = parallelism_of(graph, x, axes)
    wanted = [size for node in nodes if (size := chunk(graph, node, target)) is not None]
    along = axes_of_parts(graph, x, axes)
    size = min(wanted or [chunk_of(graph, n.inputs[0], along, target) for n in nodes])
    if not wanted and (whole.blocks >= MANY * target.sms or size >= prod(x.shape[d] for d in along)):
        return {}
    cycles = _estimates(whole, any(_returns(graph, n, n.inputs[0]) for n in nodes), target)
    if any(_turns(graph, n, n.inputs[0]) for n in nodes):
        cycles[WHOLE] = _turned(whole, x, target)
    alike, preferred = f"{x.shape} {axes}", PARTS if wanted else WHOLE
    return {n: (weigh(CHOICE, n.name, cycles, preferred, options.settled, alike), size) for n in nodes}


def _estimates(whole: Parallelism, again: bool, target: Target) -> dict[str, float]:
    """Returns the cycles of kernels that reduce rows, whole or in parts, and read them ``again`` for another result."""
    looks, more = (LOOKS, 2) if again else (1, 1)
    at_once = whole.cycles(target, looks) + (whole.cycles_written(target) if again else 0.0)
    return {WHOLE: target.launch_cycles + at_once, PARTS: target.launch_cycles + whole.cycles_apart(target, more)}


def _turned(whole: Parallelism, x: Tensor, target: Target) -> float:
    """Returns the cycles of a kernel that reduces rows and writes a result as large that lies otherwise.

    Its warps read whole sectors: of neighbouring rows, of each of which they write as many elements as lanes are left,
    or along a row, whose elements they write one by one.
    """
    beside = max(1, 32 * x.dtype.itemsize // SECTOR_BYTES) if whole.across else 1
    written = most(x.size) / beside / (PARTS_WRITTEN * target.sms)
    return target.launch_cycles + whole.cycles(target, LOOKS) + written


def split(graph: Graph, chunks: Mapping[Node, Split]) -> Rewritten:
    """Returns the graph with some of its reductions split, or itself if there are none."""
    if not chunks:
        return same(graph)
    rewrite = Rewrite(graph)
    new, writer = rewrite.new, _Writer(rewrite.graph)
    for node in graph.nodes:
        mean = mean_of_variance(graph, node)
        if mean is not None and chunks.get(mean) is not None and chunks.get(mean) == chunks.get(node):
            writer.variance(node, new[mean.inputs[0]], new[mean.output], rewrite.result(node.output), chunks[node])
        elif node in chunks:
            how = chunks[node]
            how = how if how.x is None else how._replace(x=new[how.x])
            writer.split(node, new[node.inputs[0]], rewrite.result(node.output), how)
        else:
            rewrite.take_over(node)
    return rewrite.done()


def split_for(
    graph: Graph, together: Sequence[Mapping[Node, Split]], takes: Callable[[Any], bool], reason: str
) -> Rewritten:
    """Splits reductions so that kernels of other specifications, those that ``takes`` knows, make the parts.

    Reductions that are ``together`` are declined, for a ``reason``, unless such kernels make the parts of all of them.
    """
    made = split(graph, {node: how for alike in together for node, how in alike.items()})
    halves = {node: half_of(made, node, how.x).name for alike in together for node, how in alike.items()}

    def declined(partition: Partition) -> dict[str, str]:
        taken = partition.nodes_of(takes)
        left = (alike for alike in together if any(halves[node] not in taken for node in alike))
        return {node.name: reason for alike in left for node in alike}

    return replace(made, declined=declined) if together else made


def half_of(simplified: Rewritten, node: Node, x: Tensor | None = None) -> Node:
    """Returns the node that makes the parts of a reduction that `split` has split; of ``x`` as in `Split`."""
    x = simplified.counterparts[node.inputs[0] if x is None else x]
    half = simplified.graph.producer(simplified.counterparts[node.output])
    while half is not None and half.inputs[0] is not x:
        half = simplified.graph.producer(half.inputs[0])
    assert half is not None
    return half


def chunk(graph: Graph, node: Node, target: Target) -> int | None:
    """Returns the elements of a part of a reduction that is to be split, None for other nodes."""
    if not can_be_split(node):
        return None
    x, axes = node.inputs[0], node.attributes["axes"]
    whole = parallelism_of(graph, x, axes)
    if _turns(graph, node, x):
        short = _turned(whole, x, target) <= _estimates(whole, True, target)[PARTS]
    elif returns(graph, node, target):
        return None
    elif not whole.across and whole.moved <= 1:
        short = whole.blocks >= BUSY * target.sms or whole.bytes_each <= SHORT_BYTES
    elif _returns(graph, node, x):
        short = keeps_whole(whole, target)
    else:
        many = whole.across and whole.blocks >= BUSY * target.sms
        short = many or whole.cycles(target, 1) <= AS_LONG * whole.cycles_apart(target, 1)
    if short:
        return None
    along = axes_of_parts(graph, x, axes)
    size = chunk_of(graph, x, along, target)
    return size if size < prod(x.shape[d] for d in along) else None


def chunk_of(graph: Graph, x: Tensor, axes: tuple[int, ...], target: Target) -> int:
    """Returns the elements of a part along axes: a power of two, so that parts begin where memory is aligned.

    Where sizes vary, it is that for the largest.
    """
    length, total = most(prod(x.shape[d] for d in axes)), most(x.size) * x.dtype.itemsize
    wanted = min(max(total // (BLOCKS * target.sms), LEAST_PART_BYTES), PART_BYTES)
    step = x.dtype.itemsize if not parallelism_of(graph, x, axes).across else min(total // length, SIDE_BYTES)
    least = max(wanted // step, -(-length // MOST_PARTS))
    return 1 << (least - 1).bit_length()


def can_be_split(node: Node) -> bool:
    """Returns true if a node is a reduction that can be made of parts."""
    return node.op.role is Role.REDUCE and node.attributes["mode"] in COMBINED and node.inputs[0].size > 0


def of_whole(node: Node) -> bool:
    """Returns true if the parts of a reduction can be made by reductions."""
    return mode_of(node).part.name in MODES


def returns(graph: Graph, node: Node, target: Target) -> bool:
    """Returns true if one kernel may read what is reduced once, for the reduction and for a large result behind it."""
    x = node.inputs[0]
    return keeps_whole(parallelism_of(graph, x, node.attributes["axes"]), target) and _returns(graph, node, x)


def _returns(graph: Graph, node: Node, x: Tensor) -> bool:
    """Returns true if something as large as what is reduced follows from the result."""
    return any(t.size >= x.size for n in followers(graph, node) for t in n.outputs)


def _turns(graph: Graph, node: Node, x: Tensor) -> bool:
    """Returns true if a result as large as what is reduced lies otherwise: its kernel writes elements one by one."""

    def nearest(strides: Sequence[int]) -> int:
        return min((stride, d) for d, stride in enumerate(strides) if x.shape[d] > 1)[1]

    def left(tensor: Tensor) -> Iterator[Sequence[int]]:
        """Yields how a tensor lies as an output, or as what an output is a view of."""
        if tensor in graph.output_numbers:
            yield tensor.strides
        for n in graph.consumers(tensor):
            if n.op.role is Role.RESHAPE and n.output in graph.output_numbers:
                yield turned_back(n, n.output.strides) or tensor.strides

    alike = [t for n in followers(graph, node) for t in n.outputs if t.shape == x.shape]
    read = read_for(graph, x).strides
    return most(x.size) > 1 and any(nearest(s) != nearest(read) for t in alike for s in left(t))


def candidates(graph: Graph, name: str, options: Options) -> list[Node]:
    """Returns the reductions that the pass ``name`` may split so that another kernel makes the parts.

    A variance and its mean are not among them: both are made from one read of memory.
    """
    means = {node: mean_of_variance(graph, node) for node in graph.nodes}
    paired = {node for node, mean in means.items() if mean is not None}.union(means.values())
    left = (n for n in graph.nodes if n not in paired and (name, n.name) not in options.left_out)
    return [n for n in left if can_be_split(n) and not returns(graph, n, options.target.planned)]


def unjoined(graph: Graph, node: Node) -> tuple[Tensor, tuple[int, ...]]:
    """Returns what a reduction reduces, and along which axes: before dimensions are joined along which all is reduced.

    Gradients of biases are sums of rows of a matrix, which rows of norms are before that.
    """
    x, axes = node.inputs[0], node.attributes["axes"]
    reshape = graph.producer(x)
    if reshape is None or reshape.op.role is not Role.RESHAPE or (node.attributes["keepdims"] and axes != (0,)):
        return x, axes
    parts = divided(x.shape, reshape.inputs[0].shape)
    if parts is None or any(len(part) > 1 and axis not in axes for axis, part in enumerate(parts)):
        return x, axes
    starts = [0, *accumulate(map(len, parts))]
    return reshape.inputs[0], tuple(d for axis in axes for d in range(starts[axis], starts[axis + 1]))


def mean_of_variance(graph: Graph, node: Node) -> Node | None:
    """Returns the mean about which a node is the variance, or n times that: the inner one of avg((x - avg(x)) ** 2)."""

    def made_by(tensor: Tensor, role: Role) -> Node | None:
        found = graph.producer(tensor)
        return found if found is not None and found.op.role is role else None

    if not can_be_split(node) or mode_of(node).part is not SUM:
        return None
    square = made_by(node.inputs[0], Role.PRODUCT)
    if square is None or square.inputs[0] is not square.inputs[1]:
        return None
    centred = made_by(square.inputs[0], Role.DIFFERENCE)
    mean = made_by(centred.inputs[1], Role.REDUCE) if centred is not None else None
    if centred is None or mean is None or mean.attributes["mode"] != AVERAGE.name:
        return None
    axes = node.attributes["axes"]
    alike = all(mean.attributes[key] == node.attributes[key] for key in ("axes", "keepdims"))
    alike = alike and (node.attributes["keepdims"] or axes == tuple(range(len(axes))))
    whole = mean.inputs[0] is centred.inputs[0] and centred.output.shape == centred.inputs[0].shape
    return mean if alike and whole else None


class _Writer:
    """Adds the nodes that make the results of reductions from their parts."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        #: (what is reduced, mode, axes, keepdims) -> its parts
        self._parts: dict[object, Tensor] = {}

    def split(self, node: Node, x: Tensor, result: Tensor, cut: Split) -> None:
        """Adds a reduction of any mode, by parts along some of its axes."""
        (axes, size, joined), mode = cut, mode_of(node)
        first, along = mode.part.name, node.attributes["axes"]
        if joined is not None:
            assert size is not None
            parts, along = self._reduced(node, joined, first, axes, size, keepdims=False), axes[:1]
        elif size is None:
            dtype = None if mode.selects else self._accumulator(node)
            how = {**TABLE["reduction"].attributes, "mode": first, "axes": axes, "dtype": dtype}
            parts = self._add(node, "parts", TABLE["reduction"], x, **how)
        else:
            parts = self._reduced(node, x, first, axes, size)
        self._combine(node, x, result, parts, along)

    def _combine(self, node: Node, x: Tensor, result: Tensor, parts: Tensor, axes: tuple[int, ...]) -> None:
        """Adds the result of a reduction, from its parts, which are combined along ``axes``."""
        mode = mode_of(node)
        combine = {"mode": mode.combiner.name, "axes": axes, "keepdims": node.attributes["keepdims"]}
        if (after := mode.after) is None:
            how = {**TABLE["reduction"].attributes, **combine, "dtype": result.dtype}
            self._graph.add_node(Node(TABLE["reduction"], (parts,), how, result))
            return
        total = self._add(node, "total", TABLE["reduction"], parts, **combine, dtype=parts.dtype)
        op, operands = TABLE[after.op], [total]
        if len(op.operands) == 2:
            count = as_number(prod(x.shape[d] for d in node.attributes["axes"]))
            operands.append(self._graph.constant(count, dtype=parts.dtype))
        self._graph.add_node(Node(op, tuple(operands), {}, result))

    def variance(self, node: Node, x: Tensor, mean: Tensor, result: Tensor, cut: Split) -> None:
        """Adds the variance about a mean, for which x need not be read again.

        It is made of the squared deviations from the mean of each part, and of those means from the mean of all.
        """
        axes, size, _ = cut
        assert size is not None
        sums = self._reduced(node, x, "add", axes, size)
        own = self._reduced(node, x, "squared_deviation", axes, size)
        count = self._counts(node, sums, axes[0], prod(x.shape[d] for d in axes), size)
        means = self._add(node, "part means", TABLE["div"], sums, count)
        apart = self._add(node, "apart", TABLE["sub"], means, mean)
        between = self._add(
            node, "between", TABLE["mul"], self._add(node, "apart 2", TABLE["mul"], apart, apart), count
        )
        both = self._add(node, "deviations", TABLE["add"], own, between)
        self._combine(node, x, result, both, node.attributes["axes"])

    def _counts(self, node: Node, parts: Tensor, axis: int, length: int, size: int) -> Tensor:
        """Returns how many elements each part along an axis has: all as many, but the last."""
        if length % size == 0:
            return self._graph.constant(float(size), dtype=parts.dtype)
        if isinstance(length, Size):
            begin = self._add(node, "part", TABLE["gen_index"], parts, axis=axis) * size
            left = self._graph.min(self._graph.constant(length, dtype=begin.dtype) - begin, size)
            return self._add(node, "count", TABLE["identity"], left, dtype=parts.dtype)
        counts = np.full(parts.shape[axis], float(size))
        counts[-1] = length - (len(counts) - 1) * size
        shape = [n if d == axis else 1 for d, n in enumerate(parts.shape)]
        return self._graph.constant(counts.reshape(shape), dtype=parts.dtype)

    def _reduced(
        self, node: Node, x: Tensor, mode: str, axes: tuple[int, ...], size: int, *, keepdims: bool = True
    ) -> Tensor:
        """Returns the parts of a reduction, one behind the other; those of another one if they are the same."""
        key = (x, mode, axes, keepdims, size)
        if key not in self._parts:
            dtype = self._accumulator(node)
            how = {"mode": mode, "axes": axes, "chunk": size, "keepdims": keepdims, "dtype": dtype}
            parts = self._parts[key] = self._add(node, "parts", PARTIAL, x, **how)
            others = (d for d in range(parts.rank) if d != axes[0])
            parts.strides = packed_strides(parts.shape, (axes[0], *others))
        return self._parts[key]

    def _accumulator(self, node: Node) -> DType:
        """Returns the dtype of the parts: that in which they are combined."""
        dtype = accumulator(mode_of(node).combiner, node.inputs[0].dtype, node.output.dtype)
        return compute_dtype(dtype, self._graph.compute_dtype)

    def _add(self, node: Node, name: str, op: Op, *inputs: Tensor, **attributes: object) -> Tensor:
        return named(self._graph.apply(op, inputs, attributes), node.name, name)
