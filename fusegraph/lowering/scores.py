"""What can be known of attention's scores: a scale of all of them, and where a mask rules them out.

A score graph (`ops.attention_nodes.Score`) is looked at from its end: masks are selections of minus infinity, a scale
is a product with a positive number.  Conditions that compare positions, sums of positions, numbers and integers of a
batch become `Bound`s; whatever else there is stays part of the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np

from codegen.attention.spec import WIDEST, Bound
from fusegraph.dtypes import DType, float32, int32, int64
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind
from fusegraph.pattern import Found, Is, constant, op

Affine = dict[Tensor | str, int]

#: The terms of a sum of positions that are no tensors.
ROW, KEY, ONE = "row", "key", "one"
#: Dtypes in which sums of positions do not overflow.
LARGE = (int32, int64)


@dataclass(frozen=True)
class Condition:
    """row * i + key * j + start + sum of coefficient * tensor >= 0."""

    terms: tuple[tuple[Tensor | str, int], ...]

    @property
    def varies(self) -> bool:
        """Whether it has tensors that depend on the query or the key."""
        return any(isinstance(t, Tensor) and any(n > 1 for n in t.shape[-2:]) for t, _ in self.terms)

    def bound(self, loads: Mapping[Tensor, int]) -> Bound:
        """Returns the condition as a kernel knows it; ``loads`` numbers the tensors that its program reads."""
        known = dict(self.terms)
        rest = tuple((loads[t], c) for t, c in self.terms if isinstance(t, Tensor))
        return Bound(known.get(ROW, 0), known.get(KEY, 0), known.get(ONE, 0), rest)


def _positive(tensor: Tensor) -> bool:
    """Returns true if a tensor is a positive number."""
    value = constant(tensor)
    return value is not None and 0 < value < inf


CAST, _SUM, _DIFFERENCE = op.identity("x"), op.add("a", "b"), op.sub("a", "b")
_SCALED = op.mul("x", Is("factor", _positive)) | op.div(
    "x", Is("divisor", lambda t: _positive(t) and isfinite(1 / (constant(t) or inf)))
)
_NOTHING = op.add("x", 0.0)
_MASKED = op.binary_select("x", -inf, "kept") | op.binary_select(-inf, "x", "gone")


def unscaled(graph: Graph) -> tuple[float, Graph]:
    """Returns a positive number, and a graph of scores: times that number they are the scores of the given graph."""
    scale = 1.0
    replaced: dict[Tensor, Tensor] = {}
    tensor = graph.outputs[0]
    while (node := graph.producer(tensor)) is not None:
        if len(readers(graph, tensor)) > (tensor is not graph.outputs[0]):
            break
        factor, rest = _factor(graph, node)
        if factor is not None:
            assert rest is not None
            scale *= factor
            replaced[tensor] = rest
            tensor = rest
        elif (masked := masked_by(graph, node)) is not None:
            tensor = masked[0]
        elif CAST.fits(graph, node) and node.inputs[0].dtype.is_float and node.output.dtype.itemsize >= 4:
            tensor = node.inputs[0]
        else:
            break
    return scale, rebuilt(graph, replaced)


def _factor(graph: Graph, node: Node) -> tuple[float | None, Tensor | None]:
    """Returns a positive number and what it multiplies; 1 where nothing is added."""
    for found in _NOTHING.of(Found(graph), node):
        if found["x"].shape == node.output.shape:
            return 1.0, found["x"]
    for found in _SCALED.of(Found(graph), node):
        if found["x"].shape == node.output.shape:
            factor = constant(found["factor"]) if "factor" in found else 1 / (constant(found["divisor"]) or inf)
            return factor, found["x"]
    return None, None


def masked_by(graph: Graph, node: Node) -> tuple[Tensor, Tensor, bool] | None:
    """Returns (x, condition, value) of a selection: x where the condition has this value, minus infinity elsewhere."""
    for found in _MASKED.of(Found(graph), node):
        if found["x"].shape == node.output.shape:
            return found["x"], found["kept" if "kept" in found else "gone"], "kept" in found
    return None


def readers(graph: Graph, tensor: Tensor) -> list[Node]:
    """Returns the nodes that read a tensor's values."""
    return [node for node in graph.consumers(tensor) if tensor in node.values]


def bounded(graph: Graph, *, varying: bool) -> tuple[tuple[Condition, ...], Graph]:
    """Returns the conditions without which scores are minus infinity, and the graph of scores where they all hold.

    Conditions with tensors that depend on the query or the key are among them only if ``varying``.
    """
    found: list[Condition] = []
    replaced: dict[Tensor, Tensor] = {}
    tensor = graph.outputs[0]
    rank = tensor.rank
    while (node := graph.producer(tensor)) is not None:
        masked = masked_by(graph, node)
        if masked is None and CAST.fits(graph, node) and node.inputs[0].dtype.is_float and node.output.dtype.is_float:
            tensor = node.inputs[0]  # minus infinity in any dtype of scores (8-bit floats have none, and no kernel)
            continue
        if masked is None:
            break
        x, mask, value = masked
        if split(graph, mask, value, rank, varying, found, replaced):
            replaced[tensor] = x
        tensor = x
    return tuple(dict.fromkeys(found)), rebuilt(graph, replaced)


def split(
    graph: Graph,
    mask: Tensor,
    value: bool,
    rank: int,
    varying: bool,
    found: list[Condition],
    replaced: dict[Tensor, Tensor],
) -> bool:
    """Adds the conditions that are necessary for a mask to have a value; returns whether they are sufficient."""
    node = graph.producer(mask)
    if node is None:
        return False
    if op.logical_not().fits(graph, node):
        return split(graph, node.inputs[0], not value, rank, varying, found, replaced)
    if (op.logical_and() if value else op.logical_or()).fits(graph, node):
        first, second = node.inputs
        known = [split(graph, t, value, rank, varying, found, replaced) for t in (first, second)]
        if known[0] != known[1] and mask.shape == (rest := second if known[0] else first).shape:
            replaced[mask] = rest
        return all(known)
    conditions = _comparisons(graph, node, value, rank)
    if conditions is None or (not varying and any(c.varies for c in conditions)):
        return False
    found += conditions
    return True


_LE, _LT, _GE, _GT = (-1, 1, 0), (-1, 1, -1), (1, -1, 0), (1, -1, -1)
#: (op, value) -> (coefficient of the first operand, of the second, a number) of sums that are not negative.
_COMPARISONS = {
    (TABLE[f"cmp_{name}"], value): sums
    for name, value, sums in (
        ("le", True, (_LE,)),
        ("lt", True, (_LT,)),
        ("ge", True, (_GE,)),
        ("gt", True, (_GT,)),
        ("gt", False, (_LE,)),
        ("ge", False, (_LT,)),
        ("lt", False, (_GE,)),
        ("le", False, (_GT,)),
        ("eq", True, (_LE, _GE)),
        ("neq", False, (_LE, _GE)),
    )
}


def _comparisons(graph: Graph, node: Node, value: bool, rank: int) -> list[Condition] | None:
    """Returns the conditions for a comparison to have a value; None unless it compares positions and integers."""
    sums = _COMPARISONS.get((node.op, value))
    sides = [_affine(graph, t, rank) for t in node.inputs] if sums is not None else []
    if sums is None or None in sides:
        return None
    found = []
    for signs in sums:
        total: Affine = {ONE: signs[2]}
        for sign, side in zip(signs, sides):
            for term, coefficient in (side or {}).items():
                total[term] = total.get(term, 0) + sign * coefficient
        if total.get(KEY, 0) not in (-1, 0, 1) or abs(total.get(ROW, 0)) > 1 or not _fits(total):
            return None
        found.append(Condition(tuple((term, c) for term, c in total.items() if c)))
    return found


def _fits(total: Affine) -> bool:
    """Tells whether kernels, which hold integers of 64 bits between -`WIDEST` and `WIDEST`, find the same sign."""
    tensors = [t for t in total if isinstance(t, Tensor)]
    if all(t.dtype.itemsize <= 4 for t in tensors):
        return True
    return len(tensors) == 1 and abs(total[tensors[0]]) == 1 and abs(total.get(ONE, 0)) < WIDEST >> 1


def _affine(graph: Graph, tensor: Tensor, rank: int) -> Affine | None:
    """Returns a tensor as a sum of positions, integers of a batch and a number, each times a number."""
    if not tensor.dtype.is_int:
        return None
    value = constant(tensor)
    if value is not None:
        return {ONE: int(value)}
    node = graph.producer(tensor)
    if node is None:
        rows, keys = (1, 1, *tensor.shape)[-2:]
        wide = tensor.dtype == int64 and keys == 1  # numbers of 64 bits of keys take too long to look at
        return {tensor: 1} if 1 in (rows, keys) and (tensor.dtype.itemsize <= 4 or wide) else None
    if op.gen_index().fits(graph, node):
        shape, axis = node.inputs[0].shape, node.attributes["axis"]
        place = rank - len(shape) + axis
        if shape[axis] == 1:
            return {}
        return {ROW: 1} if place == rank - 2 else {KEY: 1} if place == rank - 1 else None
    if CAST.fits(graph, node):
        return _affine(graph, node.inputs[0], rank) if _keeps(node.inputs[0].dtype, tensor.dtype) else None
    added, less = _SUM.fits(graph, node), _DIFFERENCE.fits(graph, node)
    if not (added or less) or tensor.dtype not in LARGE:  # smaller ones, and unsigned ones, wrap around
        return None
    first, second = (_affine(graph, t, rank) for t in node.inputs)
    if first is None or second is None:
        return None
    sign = 1 if added else -1
    return {t: first.get(t, 0) + sign * second.get(t, 0) for t in {**first, **second}}


def _keeps(source: DType, target: DType) -> bool:
    """Returns true if integers that are positions, or differences of them, keep their values in another dtype."""
    return source.is_int and (np.can_cast(source.name, target.name) or (source in LARGE and target in LARGE))


#: Positions and their differences are the same in float32 below this.
EXACT = 1 << 24


def with_real_positions(graph: Graph) -> Graph:
    """Returns the graph with differences of positions computed as floats, where they are cast to floats.

    A position is converted once for a whole row or column of scores, a difference for every score.
    """
    rank, sizes = graph.outputs[0].rank, graph.outputs[0].shape[-2:]
    if max(sizes) >= EXACT:
        return graph
    replaced: dict[Tensor, Tensor] = {}
    added: dict[Node, tuple[Node, ...]] = {}
    for node in graph.nodes:
        source = node.inputs[0]
        cast = CAST.fits(graph, node) and source.dtype.is_int and node.output.dtype == float32
        made = graph.producer(source)
        if not cast or made is None or not (_SUM | _DIFFERENCE).fits(graph, made):
            continue
        sides = [(_affine(graph, t, rank), t) for t in made.inputs]
        # Each side a position, or a number; anything else stays as it is.
        if any(side not in ({ROW: 1}, {KEY: 1}) and constant(t) is None for side, t in sides):
            continue
        if any((number := constant(t)) is not None and abs(number) >= EXACT for _, t in sides):
            continue
        real, new = [], []
        for n, (_, t) in enumerate(sides):
            as_float = Tensor(graph, f"{node.name[:180]} {n}", t.shape, t.strides, float32)
            new.append(Node(node.op, (t,), node.attributes, as_float))
            real.append(as_float)
        result = Tensor(graph, node.output.name, node.output.shape, node.output.strides, float32)
        new.append(Node(made.op, tuple(real), made.attributes, result))
        replaced[node.output] = result
        added[node] = tuple(new)
    return rebuilt(graph, replaced, added)


def rebuilt(
    graph: Graph, replaced: Mapping[Tensor, Tensor], added: Mapping[Node, tuple[Node, ...]] | None = None
) -> Graph:
    """Returns what is left of a graph of scores if some tensors are replaced by others.

    These are its own, or those of nodes that are ``added`` in front of some of its nodes.
    """
    new = added or {}
    makers = {t: n for nodes in new.values() for n in nodes for t in n.outputs}

    def resolved(tensor: Tensor) -> Tensor:
        while tensor in replaced:
            tensor = replaced[tensor]
        return tensor

    needed = {n for n in graph.nodes if n.kind is Kind.CONTRACTION}
    stack = [resolved(t) for t in graph.outputs]
    while stack:
        tensor = stack.pop()
        node = makers.get(tensor) or graph.producer(tensor)
        if node is not None and node not in needed:
            needed.add(node)
            stack += [resolved(t) for t in node.inputs]
    result = Graph(graph.name, compute_dtype=graph.compute_dtype)
    # Tensors stay themselves: what a lowering knows of them holds for all graphs of the same scores.
    result.tensors, result.inputs = graph.tensors, graph.inputs
    for node in [n for old in graph.nodes for n in (*new.get(old, ()), old)]:
        if node in needed:
            inputs = tuple(resolved(t) for t in node.inputs)
            result.add_node(node if inputs == node.inputs else Node(node.op, inputs, node.attributes, *node.outputs))
    result.outputs = [resolved(t) for t in graph.outputs]
    return result
