"""Paged caches of attention: keys and values in blocks of a container, which a table puts in order for each batch."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from fusegraph.errors import AttributeValueError, ShapeError
from fusegraph.ops.base import Array, TensorType, Types
from fusegraph.ops.composite import Writing

#: Of keys and of values: (batches, pages), the number of the block that is a page.
TABLES = ("page_table_k", "page_table_v")


def table_shape(t: TensorType) -> tuple[int, int] | None:
    """Returns (batches, pages) of a table; None for the number in place of an omitted one."""
    if len(t.shape) == 4 and t.shape[1] == t.shape[3] == 1:
        return t.shape[0], t.shape[2]
    return (t.shape[0], t.shape[1]) if len(t.shape) == 2 else None


def sizes(
    types: Types, given: Mapping[str, TensorType], longest: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of keys and values once they are in order.  Raises ShapeError or AttributeValueError."""
    k, v = (t.shape for t in types[1:3])
    for key in TABLES:
        if key in given and given[key].shape not in ((), (1,)) and table_shape(given[key]) is None:
            raise ShapeError(f"{key} is (batches, pages), got {list(given[key].shape)}")
    tables = {key: shape for key in TABLES if key in given and (shape := table_shape(given[key])) is not None}
    if not tables:
        if longest is not None:
            raise AttributeValueError("paged_attention_max_seq_len_kv is the length of keys and values in pages")
        return k, v
    if len(tables) == 1:
        raise AttributeValueError(f"keys and values are in pages together, here is {next(iter(tables))} alone")
    found = []
    for (key, (batch, pages)), blocks in zip(tables.items(), (k, v)):
        if len(blocks) != 4 or blocks[0] == 0 or blocks[2] == 0:
            raise ShapeError(f"what {key} is of is (blocks, heads, keys of a block, elements), got {list(blocks)}")
        length = pages * blocks[2]
        if longest is not None and longest > length:
            raise ShapeError(f"{pages} pages of {blocks[2]} keys are less than {longest}")
        found.append((batch, blocks[1], length if longest is None else longest, blocks[3]))
    return found[0], found[1]


def written(write: Writing, given: Mapping[str, Any], k: Any, v: Any, longest: int | None) -> tuple[Any, Any]:
    """Writes keys and values in the order of their tables; as they are without tables."""
    if any(key not in given or table_shape(given[key].type) is None for key in TABLES):
        return k, v
    found = []
    for key, x in zip(TABLES, (k, v)):
        shape = table_shape(given[key].type)
        assert shape is not None
        batch, pages = shape
        table = given[key] if given[key].shape == shape else write("reshape", key, given[key], shape=shape)
        blocks = write("gather", f"blocks {key}", x, table, axis=0)
        ordered = write("transpose", f"heads {key}", blocks, perm=(0, 2, 1, 3, 4))
        _, heads, size, elements = x.shape
        joined = write("reshape", f"pages {key}", ordered, shape=(batch, heads, pages * size, elements))
        if longest is not None and longest != pages * size:
            joined = write("slice", f"keys {key}", joined, starts=(0, 0, 0, 0), stops=(batch, heads, longest, elements))
        found.append(joined)
    return found[0], found[1]


def reference(given: Mapping[str, Array], k: Array, v: Array, longest: int | None) -> tuple[Array, Array]:
    """Returns the same for NumPy arrays; block numbers outside of the container are clamped, as gather's."""
    found = []
    for key, x in zip(TABLES, (k, v)):
        table = given.get(key, np.zeros(1))
        if table.ndim not in (2, 4):
            return k, v
        numbers = np.clip(table.astype(np.int64).reshape(table.shape[0], prod(table.shape[1:])), 0, x.shape[0] - 1)
        taken = x[numbers].swapaxes(1, 2)
        joined = taken.reshape(taken.shape[0], x.shape[1], taken.shape[2] * taken.shape[3], x.shape[3])
        found.append(joined[:, :, :longest])
    return found[0], found[1]
