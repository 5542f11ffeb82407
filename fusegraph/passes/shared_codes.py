"""Codes that several products share, each of which makes its operand of them by itself.

Layers quantise what they read once, and multiply it several times.  What makes an operand of 8-bit floats and scales is
part of a product's kernel, where it may cost nothing at all (`codegen.scaled_tiles`): a dequantised tensor for all
products would be written and read instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.lowering.divided import dequantising, multiplies_codes
from fusegraph.ops.base import Role
from fusegraph.passes.partition import Partition
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, replaced, same

#: The name by which the pass is known in `Options.left_out`.
NAME = "shared codes"


def copy_codes(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Dequantises 8-bit floats for each product that takes them, rather than once for all."""
    if options.strict:
        return same(graph)
    left = {name for pass_name, name in options.left_out if pass_name == NAME}
    copies: dict[str, str] = {}  # the last tensor of a copy, and the product that takes it

    def find(node: Node) -> dict[Tensor, tuple[Node, ...]] | None:
        """Returns what makes the operands that a product shares with other nodes, if both operands are such."""
        if node.op.role is not Role.MATMUL or node.name in left or not multiplies_codes(graph, node, options.target):
            return None
        made = {t: dequantising(graph, t) for t in node.inputs}
        return {t: nodes for t, nodes in made.items() if nodes and _is_shared(graph, nodes, node)}

    def write(rewrite: Rewrite, node: Node, made: Mapping[Tensor, Sequence[Node]]) -> None:
        new: dict[Tensor, Tensor] = {}
        for operand, nodes in made.items():
            for n in nodes:
                old = n.output
                result = intermediate(rewrite.graph, old.name, "again", old.shape, old.strides, old.dtype)
                inputs = tuple([new[t] if t in new else rewrite.new[t] for t in n.inputs])
                rewrite.graph.add_node(Node(n.op, inputs, n.attributes, result))
                new[old] = result
            copies[new[operand].name] = node.name
        rewrite.take_over(node, [new[t] if t in new else rewrite.new[t] for t in node.inputs])

    def declined(partition: Partition) -> Mapping[str, str]:
        found = {}
        for group in partition.groups:
            whole = any(n.op.role is Role.MATMUL for n in group.nodes)
            for name in () if whole else {n.output.name for n in group.nodes}.intersection(copies):
                found[copies[name]] = f"{name!r} would be a kernel of its own: one for all products is enough"
        return found

    made = replaced(graph, find, write)
    return replace(made, declined=declined) if copies else made


def _is_shared(graph: Graph, nodes: Sequence[Node], taker: Node) -> bool:
    members = {*nodes, taker}
    return any(not members.issuperset(graph.consumers(n.output)) for n in nodes)
