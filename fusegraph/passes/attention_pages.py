"""Recognising keys and values in pages: blocks that a table takes out of a container, one behind the other."""

from __future__ import annotations

from dataclasses import dataclass

from fusegraph.graph import Graph, Node, Tensor


@dataclass(frozen=True)
class Pages:
    """container (blocks, heads, rows of a block, elements), table (batches, pages): page n of a batch is the block of
    this number.
    """

    container: Tensor
    table: Tensor


def pages_of(graph: Graph, tensor: Tensor, *, turned: bool) -> Pages | None:
    """What a tensor (batches, heads[, 1], rows, elements) is taken from, if it is; ``turned``: its last two dimensions
    are exchanged.
    """

    def made(x: Tensor, name: str) -> Node | None:
        node = graph.producer(x)
        return node if node is not None and node.op.name == name else None

    if turned:
        node = made(tensor, "transpose")
        if node is None or node.attributes["perm"] != (*range(tensor.rank - 2), tensor.rank - 1, tensor.rank - 2):
            return None
        tensor = node.inputs[0]
    if tensor.rank == 5:
        node = made(tensor, "reshape")
        if node is None or tensor.shape[2] != 1 or node.inputs[0].shape != (*tensor.shape[:2], *tensor.shape[3:]):
            return None
        tensor = node.inputs[0]
    if tensor.rank != 4:
        return None
    node = made(tensor, "slice")
    if node is not None:
        whole = node.inputs[0]
        kept = whole.shape[:2] == tensor.shape[:2] and whole.shape[3] == tensor.shape[3]
        if not kept or any(node.attributes["starts"]) or any(step != 1 for step in node.attributes["steps"]):
            return None
        tensor = whole
    joined = made(tensor, "reshape")
    if joined is None or joined.inputs[0].rank != 5:
        return None
    batch, heads, count, size, elements = joined.inputs[0].shape
    if tensor.shape != (batch, heads, count * size, elements):
        return None
    moved = made(joined.inputs[0], "transpose")
    if moved is None or moved.attributes["perm"] != (0, 2, 1, 3, 4):
        return None
    taken = made(moved.inputs[0], "gather")
    if taken is None or taken.attributes["axis"] != 0 or taken.inputs[1].rank != 2:
        return None
    return Pages(taken.inputs[0], taken.inputs[1])
