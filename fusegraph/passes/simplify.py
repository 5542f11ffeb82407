"""Simplification: removes what cannot be seen in the results.

Dead nodes, common subexpressions, nodes of constants only, and what `RULES` replace: identities that hold in floating
point for every input, NaN, infinity and the sign of zero included.  (x + 0 is not x: it turns -0 into +0.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, TypeAlias

import numpy as np

from codegen.sizes import values
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import broadcast, packed_strides
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.views import divided
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Role
from fusegraph.ops.convert import from_reference, to_reference
from fusegraph.ops.evaluate import evaluate
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, named
from fusegraph.pattern import Found, Is, Made, constant, op

#: Constants are folded only if the result is at most this large: source code and memory are not for tables.
MAX_FOLDED_BYTES = 1 << 20


def _forwards(_: Found, node: Node) -> bool:
    """Returns true if a slice of everything has the elements in their order."""
    return all(step == 1 or size <= 1 for step, size in zip(node.attributes["steps"], node.output.shape))


def _in_order(_: Found, node: Node) -> bool:
    """Returns true if a transpose leaves the order of all dimensions of more than one element."""
    moved = [d for d in node.attributes["perm"] if node.inputs[0].shape[d] != 1]
    return moved == sorted(moved)


def _plain_twice(found: Found, node: Node) -> bool:
    """Returns true if a relu has no slope, and its operand is the result of the same relu."""
    inner = found.graph.producer(node.inputs[0])
    return not node.attributes.get("negative_slope") and inner is not None and inner.attributes == node.attributes


def _divided_and_turned(node: Node, found: Found) -> Tensor | None:
    """Returns x with its dimensions in another order, if the outer reshape divides what the inner one joins.

    That is a view, however x lies in memory.  Heads are joined with the batch, and divided again, like this.
    """
    graph, x, joined, turn = found.graph, found["x"], found["joined"], found.nodes[1]
    fine = _refined(x.shape, joined.shape)
    parts = None if fine is None or fine == joined.shape else divided(joined.shape, fine)
    if fine is None or parts is None:
        return None
    starts = [0, *accumulate(map(len, parts))]
    order = tuple(d for at in turn.attributes["perm"] for d in range(starts[at], starts[at + 1]))
    turned = tuple(fine[d] for d in order)
    if [n for n in turned if n != 1] != [n for n in node.output.shape if n != 1]:
        return None
    result = x if x.shape == fine else graph.apply(TABLE["reshape"], (x,), {"shape": fine})
    result = graph.apply(TABLE["transpose"], (result,), {"perm": order})
    if turned != node.output.shape:
        result = graph.apply(TABLE["reshape"], (result,), {"shape": node.output.shape})
    return named(result, node.name, "turned")


def _slices_joined(node: Node, found: Found) -> Tensor | None:
    """Returns the concatenation with slices that were cut next to each other as one slice; None if there are none."""
    axis, graph = node.attributes["axis"], found.graph
    cuts: list[tuple[Tensor, list[int], list[int]]] = []  # of what, from where and up to where
    for tensor in node.inputs:
        cut = graph.producer(tensor)
        if cut is None or cut.op.role is not Role.SLICE or any(step != 1 for step in cut.attributes["steps"]):
            cuts.append((tensor, [0] * tensor.rank, list(tensor.shape)))
            continue
        starts = list(cut.attributes["starts"])
        ends = [start + size for start, size in zip(starts, tensor.shape)]
        before = cuts[-1] if cuts else None
        whole = [*starts[:axis], before[1][axis], *starts[axis + 1 :]] if before is not None else []
        if before is not None and before == (cut.inputs[0], whole, [*ends[:axis], starts[axis], *ends[axis + 1 :]]):
            cuts[-1] = cut.inputs[0], whole, ends
        else:
            cuts.append((cut.inputs[0], starts, ends))
    if len(cuts) == len(node.inputs):
        return None
    parts = [
        x
        if ends == list(x.shape) and not any(starts)
        else graph.apply(TABLE["slice"], (x,), {"starts": starts, "stops": ends, "steps": None})
        for x, starts, ends in cuts
    ]
    return (
        parts[0] if len(parts) == 1 else named(graph.apply(node.op, tuple(parts), node.attributes), node.name, "joined")
    )


def _cut_from_one(node: Node, found: Found) -> Tensor | None:
    """Returns a slice of what was joined as a slice of the one part that it is cut from; None if there are more."""
    graph, joined, how = found.graph, found.graph.producer(found["joined"]), node.attributes
    if joined is None or not node.output.size:
        return None
    axis, end = joined.attributes["axis"], 0
    first, stop = how["starts"][axis], how["stops"][axis]
    if first is None or stop is None or how["steps"][axis] < 1:  # from the end on
        return None
    for part in joined.inputs:
        start, end = end, end + part.shape[axis]
        if start <= first and stop <= end:
            starts, stops = list(how["starts"]), list(how["stops"])
            starts[axis], stops[axis] = first - start, stop - start
            if part.type == node.output.type and all(step == 1 for step in how["steps"]):
                return part
            return graph.apply(node.op, (part,), {"starts": starts, "stops": stops, "steps": how["steps"]})
    return None


def _widened(node: Node, found: Found) -> Tensor | None:
    """Returns what 0 is added to in the shape of the sum of integers: they have no -0."""
    x, out, graph = found["x"], node.output, found.graph
    if not out.dtype.is_int or x.dtype != out.dtype:
        return None
    how = "reshape" if x.size == out.size else "broadcast"
    return x if x.shape == out.shape else graph.apply(TABLE[how], (x,), {"shape": out.shape})


#: What becomes of a node: the tensor x, the result of an op, or what a function makes of it.
Replacement: TypeAlias = "str | Made | Callable[[Node, Found], Tensor | None]"

#: name -> a pattern and what replaces it where x has the type of the result.  The first rule that applies does.
RULES: Mapping[str, tuple[Made, Replacement]] = {
    "power of 2": (op.pow("x", 2.0), op.mul("x", "x")),
    "power of -1": (op.pow("x", -1.0), op.reciprocal("x")),
    "power of 1": (op.pow("x", 1.0), "x"),
    "times 1": (op.mul("x", 1.0), "x"),
    "scale of 1": (op.scale("x", 1.0), "x"),
    "divided by 1": (op.div("x", 1.0), "x"),
    "less 0": (op.sub("x", Is(holds=lambda t: str(constant(t)) == "0.0")), "x"),
    "0 and an integer": (op.add("x", 0.0), _widened),
    "negative twice": (op.neg(op.neg("x")), "x"),
    "not twice": (op.logical_not(op.logical_not("x")), "x"),
    "absolute value twice": (op.abs(op.abs().named("x")), "x"),
    "floor twice": (op.floor(op.floor().named("x")), "x"),
    "ceil twice": (op.ceil(op.ceil().named("x")), "x"),
    "relu twice": (op.relu(op.relu().named("x")).when(_plain_twice), "x"),
    "cast to the same dtype": (op.identity("x"), "x"),
    "transpose in order": (op.transpose("x").when(_in_order), "x"),
    "reshape to the same shape": (op.reshape("x"), "x"),
    "reshape and back": (op.reshape(op.reshape("x")), "x"),
    "broadcast to the same shape": (op.broadcast("x"), "x"),
    "slice of everything": (op.slice("x").when(_forwards), "x"),
    "pad by nothing": (op.pad("x"), "x"),
    "concatenate one": (op.concatenate("x"), "x"),
    "joined and cut": (op.slice(op.concatenate().named("joined")), _cut_from_one),
    "cut and joined": (op.concatenate(), _slices_joined),
    "join, turn, divide": (op.reshape(op.transpose(op.reshape("x").named("joined"))), _divided_and_turned),
}
_OF = {entry: [rule for rule in RULES.values() if entry in rule[0].ops] for entry in TABLE.values()}


def remove_dead_nodes(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Removes the nodes that no output depends on."""
    rewrite = Rewrite(graph)
    for node in graph.nodes:
        rewrite.take_over(node)
    return rewrite.done()


def simplify(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Removes what cannot be seen in the results.

    The note "namesakes" has, by the name of a node that is left, the names of all nodes that it stands for.
    """
    rewrite = Rewrite(graph)
    outputs = set(graph.outputs)
    seen: dict[Any, Tensor] = {}
    for old in graph.nodes:
        node = Node(old.op, tuple(_unrepeated(rewrite.graph, old, rewrite.inputs(old))), old.attributes, *old.outputs)
        free = len(node.outputs) == 1 and node.output not in outputs
        while isinstance(result := _replaced(rewrite.graph, node, free), Node):
            node = result
        if free and result is None:
            result = seen.get(_key(node))
        if free and result is None:
            result = _folded(rewrite.graph, node)
        if result is not None:
            rewrite.new[node.output] = result
            continue
        rewrite.take_over(node, node.inputs)
        if node.output not in outputs or _key(node) not in seen:
            seen[_key(node)] = rewrite.new[node.output]
    made = rewrite.done()
    return replace(made, notes={"namesakes": _namesakes(made.counterparts)})


def _namesakes(counterparts: Mapping[Tensor, Tensor]) -> dict[str, tuple[str, ...]]:
    """Returns the names of the new graph's tensors that stand for one of another name, or for several, and whose."""
    found: dict[str, tuple[str, ...]] = {}
    for old, new in counterparts.items():
        found[new.name] = (*found.get(new.name, ()), old.name)
    return {new: every for new, every in found.items() if every != (new,)}


def _replaced(graph: Graph, node: Node, free: bool) -> Node | Tensor | None:
    """Returns what the first rule that applies makes of a node; None if none does.

    Unless the node is ``free``, only another node with the same result may replace it.
    """
    for pattern, by in _OF.get(node.op, ()):
        found = next(pattern.of(Found(graph), node), None) if free or isinstance(by, Made) else None
        if found is None:
            continue
        if callable(by):
            result: Node | Tensor | None = by(node, found)
        else:
            result = by.built(found, *node.outputs) if isinstance(by, Made) else found[by]
            result = result if found["x"].type == node.output.type else None
        if result is not None:
            return result
    return None


def _unrepeated(graph: Graph, node: Node, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the operands of a node with masks and numbers as they are where a pointwise node repeats them itself."""
    if node.kind is not Kind.POINTWISE or not node.op.reads_values:
        return inputs
    less = {t: x for t in dict.fromkeys(inputs) if (x := _repeats(graph, t)) is not None}
    found = tuple(less.get(t, t) for t in inputs)
    return found if less and broadcast([t.shape for t in found]) == node.output.shape else inputs


def _repeats(graph: Graph, tensor: Tensor) -> Tensor | None:
    """Returns the number, or mask, which a choice of numbers may be, that a tensor repeats; None for other tensors."""
    maker, value = graph.producer(tensor), tensor.value
    if maker is not None and maker.op.role is Role.BROADCAST:
        x, choice = maker.inputs[0], graph.producer(maker.inputs[0])
        chosen = choice is not None and choice.op.role is Role.SELECT
        return x if tensor.dtype.is_bool or constant(x) is not None or chosen else None
    if value is None or tensor.size < 2 or not (value == value.reshape(-1)[0]).all():
        return None
    return intermediate(graph, tensor.name, "number", (), (), tensor.dtype, value.reshape(-1)[0].reshape(()))


def _key(node: Node) -> Any:
    def identity(key: str, t: Tensor) -> Any:
        if key in node.op.shapes:
            return t.shape
        return (t.dtype, t.shape, t.value.tobytes()) if t.value is not None and t.value.nbytes <= 64 else t

    operands = tuple(map(identity, node.op.names(len(node.inputs)), node.inputs))
    attributes = sorted((key, repr(value)) for key, value in node.attributes.items())  # repr tells -0.0 from 0.0
    return (node.op, operands, tuple(attributes), node.output.dtype)


def _refined(shape: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the shape of fewest dimensions of which the dimensions of both shapes are made, None if there is none."""
    if 0 in shape:
        return None
    steps = sorted({*accumulate(reversed(shape), mul), *accumulate(reversed(other), mul), 1})
    if any(after % before for before, after in pairwise(steps)):
        return None
    return tuple(after // before for before, after in pairwise(steps))[::-1]


def _folded(graph: Graph, node: Node) -> Tensor | None:
    """Returns the value of a pointwise or movement node of constants as a constant, if it is small."""
    kinds = (Kind.POINTWISE, Kind.MOVEMENT)
    foldable = node.kind in kinds and node.op.reads_values and all(t.is_constant for t in node.inputs)
    if not foldable or node.output.nbytes > MAX_FOLDED_BYTES:
        return None
    told = (node.output.shape, dict(node.attributes))
    if repr(values(told)) != repr(told):  # sizes that vary make other constants
        return None
    types = tuple(t.type for t in node.inputs)
    operands = [to_reference(np.asarray(t.value), t.dtype) for t in node.inputs]
    (value,) = evaluate(node.op, types, node.attributes, (node.output.dtype,), operands, graph.compute_dtype)
    stored = from_reference(value, node.output.dtype)
    stored = np.array(np.broadcast_to(stored, node.output.shape), order="C")
    stored.setflags(write=False)
    return graph._add_tensor(node.name, node.output.shape, packed_strides(node.output.shape), node.output.dtype, stored)
