"""Keys and values in pages: blocks that a table takes out of a container, one behind the other.

The container is (blocks, heads, rows of a block, elements); the table (batches, pages) holds the number of the block
that is each page.
"""

from __future__ import annotations

from fusegraph.graph import Node
from fusegraph.passes.attention_parts import turned
from fusegraph.pattern import Found, Pattern, op


def _joins(_: Found, node: Node) -> bool:
    """Returns true if (batches, heads, pages, rows of a block, elements) becomes (batches, heads, rows, elements)."""
    shape = node.inputs[0].shape
    return len(shape) == 5 and node.output.shape == (*shape[:2], shape[2] * shape[3], shape[4])


def _first_rows(_: Found, node: Node) -> bool:
    """Returns true if a slice takes the first rows of (batches, heads, rows, elements)."""
    (*batch, _rows, width), whole = node.output.shape, node.inputs[0].shape
    first = not any(node.attributes["starts"]) and all(step == 1 for step in node.attributes["steps"])
    return first and whole == (*batch, whole[-2], width)


def _grouped(_: Found, node: Node) -> bool:
    """Returns true if a reshape only adds a dimension of one element behind batches and heads."""
    shape = node.output.shape
    return len(shape) == 5 and shape[2] == 1 and node.inputs[0].shape == (*shape[:2], *shape[3:])


_TAKEN = op.gather("container", "table", axis=0).when(lambda _, node: node.inputs[1].rank == 2)
_JOINED = op.reshape(op.transpose(_TAKEN, perm=(0, 2, 1, 3, 4))).when(_joins)
_ROWS = op.slice(_JOINED).when(_first_rows) | _JOINED
#: (batches, heads[, 1], rows, elements), and the same with the last two dimensions exchanged.
PAGES: Pattern = op.reshape(_ROWS).when(_grouped) | _ROWS
TURNED_PAGES: Pattern = turned(PAGES)
