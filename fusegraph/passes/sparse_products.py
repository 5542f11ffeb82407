"""Products with weights of which two of every four neighbours are kept, on sparse tensor cores.

`sparse_2_4` marks such a weight.  Everywhere its zeros are multiplied as any numbers, in the kernel of a dense product.
Hopper's wgmma leaves them out: it takes the elements that are kept and their places, which are packed once, where the
weight depends on parameters and constants alone.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

import numpy as np

from codegen.declined import Declined
from codegen.sizes import varies
from fusegraph.dtypes import bfloat16, float16, uint32
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.choices import Choice, weigh
from fusegraph.ops import TABLE
from fusegraph.ops.base import Role
from fusegraph.ops.sparse_products import SPARSE_MATMUL, WORDS
from fusegraph.passes import estimates
from fusegraph.passes.parameters import fixed
from fusegraph.passes.partition import Decision
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, replaced, same
from fusegraph.passes.speculation import SPARSE

#: What is chosen: whether sparse tensor cores multiply.
NAME, SPARSELY, DENSELY = "products with 2:4 sparsity", "sparse", "dense"
#: How many times as fast as the dense product the sparse one must be estimated to be, to be taken.
MARGIN = 1.05
#: Rows of what is stored begin at multiples of so many elements, 16 bytes.
UNIT = 8


@dataclass(frozen=True)
class _Product:
    """A matmul with a sparse matrix: ``pruned`` is the node that made it, ``x`` (..., T, K) what it is multiplied by.

    first  whether the sparse matrix is operand a, and the transpose of x operand b; else x is operand a, and the
           transpose of the matrix operand b.
    """

    pruned: Node
    x: Tensor
    first: bool


def multiply_sparsely(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Leaves products with the zeros of 2:4 sparse weights to sparse tensor cores, where these are there and faster.

    The note "pruned" has for each node that prunes what that removes (`removed`), by its name.
    """
    notes = {"pruned": {n.name: removed(n) for n in graph.nodes if _prunes(n) and len(n.inputs) == 1}}
    known = fixed(graph, options)
    found: dict[Node, tuple[_Product, Choice]] = {}
    decisions: list[Decision] = []
    for node in graph.nodes:
        product = _product(graph, node)
        if product is None:
            continue
        reason = _declined(graph, node, product, options, known)
        try:
            choice = _weighed(graph, node, product, options) if not reason else None
        except Declined as refusal:
            reason, choice = str(refusal), None
        if choice is not None:
            found[node] = product, choice
            factor = (choice.cycles[DENSELY] or 0.0) / (choice.cycles[SPARSELY] or 1.0)
            reason = f"estimated to be {factor:.2f} times as fast as the dense product"
        taken = choice is not None and choice.taken == SPARSELY
        told = f"on sparse tensor cores: {reason}" if taken else f"zeros are multiplied: {reason}"
        decisions.append(Decision(product.pruned.name, node.name, False, told))
    chosen = {node: product for node, (product, choice) in found.items() if choice.taken == SPARSELY}
    made = replaced(graph, chosen.get, _Writer().write) if chosen else same(graph)
    choices = tuple(choice for _, choice in found.values())
    return replace(made, choices=choices, notes=notes, decisions=tuple(decisions))


def removed(node: Node) -> float | None:
    """Returns the share of the norm of a constant that a node prunes away; None where the values are not known."""
    value = node.inputs[0].value
    if value is None:
        return None
    wide = np.asarray(value).astype(np.float64)
    total = float(np.linalg.norm(wide))
    left = np.where(TABLE["sparse_2_4_mask"].reference(wide), 0.0, wide)
    return float(np.linalg.norm(left)) / total if total else 0.0


def _prunes(node: Node) -> bool:
    return node.op.role is Role.SPARSE and len(node.outputs) == 1


def _product(graph: Graph, node: Node) -> _Product | None:
    """Returns what a matmul with a sparse matrix of two dimensions is; None for other nodes."""
    if node.op.role is not Role.MATMUL or "parts" in node.attributes:
        return None
    a, b = node.inputs
    turned = graph.producer(b)
    if turned is None or turned.op.role is not Role.TRANSPOSE or b.rank != 2:
        return None
    of_a, of_b = graph.producer(a), graph.producer(turned.inputs[0])
    if of_b is not None and _prunes(of_b):
        return _Product(of_b, a, False)
    if of_a is not None and _prunes(of_a) and a.rank == 2:
        return _Product(of_a, turned.inputs[0], True)
    return None


def _declined(graph: Graph, node: Node, product: _Product, options: Options, known: Container[Tensor]) -> str:
    """Returns why a product cannot be one of sparse tensor cores; nothing if nothing speaks against it so far."""
    if (SPARSE, node.name) in options.left_out:
        return options.left_out[SPARSE, node.name]
    if not options.target.planned.arch.has_wgmma:
        return f"{options.target.planned.arch} has no sparse warpgroup products"
    weight = product.pruned.output
    if weight.dtype not in (float16, bfloat16) or product.x.dtype != weight.dtype:
        return f"{product.x.dtype} times {weight.dtype}: sparse products are of 16-bit floats of one dtype"
    if options.strict:
        return "the graph is strict: NaN and infinity times zero are NaN"
    if varies([t.shape for t in graph.tensors.values()]):
        return "sizes vary: nothing is packed"
    if weight not in known:
        return f"{weight.name!r} depends on more than parameters and constants: it would be packed in every call"
    return "" if node.output.size and product.x.shape[-1] else "there is nothing to multiply"


def _weighed(graph: Graph, node: Node, product: _Product, options: Options) -> Choice:
    """Returns the choice, by what either kernel takes alone.  Raises Declined if there is no sparse one."""
    dense, sparse = (Graph("alone", graph.io_dtype, graph.compute_dtype) for _ in range(2))
    (rows, terms), x = product.pruned.output.shape, product.x
    attributes = {"dtype": node.output.dtype, "compute_dtype": node.attributes["compute_dtype"]}
    for alone in (dense, sparse):
        alone._add_tensor("x", x.shape, x.strides, x.dtype)
    matrix = dense._add_tensor("matrix", (terms, rows), (1, terms), x.dtype)
    dense.inputs = [dense.tensors["x"], matrix]
    dense.outputs = [dense.apply(TABLE["matmul"], tuple(dense.inputs), attributes)]
    width = -(-terms // (2 * UNIT)) * UNIT
    values = sparse._add_tensor("values", (rows, width), (width, 1), x.dtype)
    words = WORDS.infer((replace(values.type, shape=(rows, terms // 2)),), {})
    assert not isinstance(words, tuple)
    metadata = sparse._add_tensor("metadata", words.shape, (words.shape[1] * words.shape[2], words.shape[2], 1), uint32)
    sparse.inputs = [values, sparse.tensors["x"], metadata]
    how = {**attributes, "first": product.first, "origin": node.name}
    sparse.outputs = [sparse.apply(SPARSE_MATMUL, tuple(sparse.inputs), how)]
    cycles = {SPARSELY: estimates.cycles(sparse, options), DENSELY: estimates.cycles(dense, options)}
    preferred = SPARSELY if cycles[DENSELY] > MARGIN * cycles[SPARSELY] else DENSELY
    alike = f"{node.op.name} {[t.type for t in node.inputs]}"
    return weigh(NAME, node.name, cycles, preferred, options.settled, alike)


class _Writer:
    """Writes sparse products; those with a matrix in common share what is packed."""

    def __init__(self) -> None:
        self._packed: dict[Node, tuple[Tensor, Tensor]] = {}

    def write(self, rewrite: Rewrite, node: Node, product: _Product) -> None:
        graph, old = rewrite.graph, node.output
        if product.pruned not in self._packed:
            self._packed[product.pruned] = self._pack(rewrite, product.pruned)
        values, words = self._packed[product.pruned]
        attributes = {"dtype": old.dtype, "compute_dtype": node.attributes["compute_dtype"]}
        attributes |= {"first": product.first, "origin": node.name}
        made = graph.apply(SPARSE_MATMUL, (values, rewrite.new[product.x], words), attributes)
        made.strides = old.strides
        graph._rename(made, old.name)
        rewrite.new[old] = made

    def _pack(self, rewrite: Rewrite, pruned: Node) -> tuple[Tensor, Tensor]:
        """Adds the values of a sparse matrix, in rows of a multiple of 16 bytes, and the words of its metadata."""
        graph, inputs, name = rewrite.graph, rewrite.inputs(pruned), pruned.name
        if len(inputs) == 1:
            values, metadata = graph.apply_node(TABLE["sparse_2_4_compress"], inputs, {}).outputs
            named(values, name, "values")
            named(metadata, name, "metadata")
        else:
            values, metadata = inputs
        words = named(graph.apply(WORDS, (metadata,), {}), name, "words")
        if values.shape[1] % UNIT:
            padding = ((0, 0), (0, -values.shape[1] % UNIT))
            values = named(graph.apply(TABLE["pad"], (values,), {"padding": padding}), name, "whole rows")
        return values, words
