"""``sparse_2_4_words`` and ``sparse_matmul``: products with a matrix of which two of every four neighbours are stored.

They are not in the op table: users write `matmul` with what `sparse_2_4` made, `passes.sparse_products` writes these.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from codegen.operands import PANEL
from codegen.sparse_tiles import BLOCK_ROWS, BLOCK_WORDS
from fusegraph.dtypes import uint32
from fusegraph.ops.base import REQUIRED, TABLE, Array, Attributes, Kind, Op, Role, TensorType, Types
from fusegraph.ops.composite import Writing
from fusegraph.ops.contraction import accumulator_result

#: The dimensions of a stage of a block's metadata: warps, halves of a word, rows, threads of a row, places in half a
#: word.
_WARPS, _HALVES, _ROWS, _THREADS, _PLACES = 4, 2, 8, 4, 8


def _blocks(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns how many stages and blocks of rows there are of metadata (rows, half the terms)."""
    return -(-shape[1] * 2 // PANEL), -(-shape[0] // BLOCK_ROWS)


def _padding(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    stages, blocks = _blocks(shape)
    return (0, blocks * BLOCK_ROWS - shape[0]), (0, stages * PANEL // 2 - shape[1])


def _parts(shape: tuple[int, ...]) -> tuple[int, ...]:
    stages, blocks = _blocks(shape)
    return blocks, _WARPS, _HALVES, _ROWS, stages, _THREADS, _PLACES


def _words_reference(metadata: Array) -> Array:
    cut = np.pad(metadata.astype(np.uint32), _padding(metadata.shape)).reshape(_parts(metadata.shape))
    place = np.arange(_PLACES, dtype=np.uint32)
    cut = np.maximum(cut, place % 2) << (place * 2)
    halves = np.bitwise_or.reduce(cut, axis=-1)  # blocks, warps, halves, rows, stages, threads
    words = halves[:, :, 0] | halves[:, :, 1] << np.uint32(16)
    return np.asarray(words.transpose(3, 0, 1, 2, 4).reshape(*_blocks(metadata.shape), BLOCK_WORDS))


def _expand_words(write: Writing, metadata: Any) -> Any:
    padding = _padding(metadata.shape)
    whole = write("pad", "whole blocks", metadata, padding=padding) if any(map(any, padding)) else metadata
    cut = write("reshape", "parts", whole, shape=_parts(metadata.shape))
    wide = write("identity", "wide", cut, dtype=uint32)
    place, half = (write("identity", n, write("gen_index", n, cut, axis=d), dtype=uint32) for n, d in _SHIFTS)
    # The second of two places is never 0: where there are no terms, it becomes 1.
    valid = write("max", "valid", wide, write("bitwise_and", "second", place, 1))
    by = write("add", "by", write("mul", "bits", place, 2), write("mul", "upper", half, 16))
    bits = write(
        "reduction", "words", write("shift_left", "shifted", valid, by), mode="add", axes=(2, 6), keepdims=False
    )
    turned = write("transpose", "turned", bits, perm=(3, 0, 1, 2, 4))
    return write("reshape", "", turned, shape=(*_blocks(metadata.shape), BLOCK_WORDS))


_SHIFTS = (("place", 6), ("half", 2))


def unpacked(words: Array, rows: int, terms: int) -> Array:
    """Returns metadata (rows, half the terms), given their words."""
    stages, blocks = words.shape[:2]
    cut = words.reshape(stages, blocks, _WARPS, _ROWS, _THREADS).transpose(1, 2, 3, 0, 4)
    halves = np.stack([cut & np.uint32(0xFFFF), cut >> np.uint32(16)], axis=2)
    places = halves[..., None] >> (np.arange(_PLACES, dtype=np.uint32) * 2) & np.uint32(3)
    return np.asarray(places.reshape(blocks * BLOCK_ROWS, -1)[:rows, : terms // 2])


def _reference(
    values: Array,
    x: Array,
    words: Array,
    dtype: Any = None,
    compute_dtype: str | None = None,
    first: bool = False,
    origin: str = "",
) -> Array:
    terms = x.shape[-1]
    metadata = unpacked(words, values.shape[0], terms)
    whole = TABLE["sparse_2_4"].reference(values[:, : terms // 2], metadata)
    operands = (whole, x.T) if first else (x, whole.T)
    return np.asarray(TABLE["matmul"].reference(*operands, dtype))


def _infer(types: Types, attributes: Attributes) -> TensorType:
    values, x, _ = types
    dtype = accumulator_result((x, values), attributes["dtype"])
    rows = values.shape[:1]
    return TensorType((*rows, *x.shape[:-1]) if attributes["first"] else (*x.shape[:-1], *rows), dtype)


#: Metadata (N, K / 2), places that ascend in every four, as wgmma takes them: (stages, blocks, 128) words.
WORDS = Op(
    name="sparse_2_4_words",
    kind=Kind.COMPOSITE,
    role=Role.SPARSE,
    operands=("metadata",),
    infer=lambda types, _: TensorType((*_blocks(types[0].shape), BLOCK_WORDS), uint32),
    reference=_words_reference,
    expand=_expand_words,
    as_stored=True,
)
#: The product of x (..., T, K) and the transpose of a matrix (N, K) of which values (N, K / 2) are stored: (..., T, N).
#: With ``first`` it is the matrix times the transpose of x, (N, T).  Rows of the values may have more elements than
#: K / 2: they are 0.  ``origin`` is the name of the node that it was.
SPARSE_MATMUL = Op(
    name="sparse_matmul",
    kind=Kind.CONTRACTION,
    role=Role.SPARSE_MATMUL,
    operands=("values", "x", "metadata"),
    integers=("metadata",),
    attributes={"dtype": None, "compute_dtype": None, "first": False, "origin": REQUIRED},
    infer=_infer,
    reference=_reference,
    products=lambda types, _: types[1].shape[-1] // 2,
)
