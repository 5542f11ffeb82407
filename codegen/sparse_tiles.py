"""Tiles of a product whose operand A has two of every four terms (2:4 sparsity), as TMA brings them for Hopper.

A stage has 128 bytes of the rows of operand B, 64 terms; of operand A the 32 that are stored, and for every 64 rows 128
words of metadata: the word of thread t of a warpgroup is of 16 terms, those from 16 * (t % 4) on, of two rows.  Both
instructions that multiply a stage find their terms in it, one in the words of the first two of every four threads.
"""

from __future__ import annotations

from dataclasses import replace

from codegen.declined import Declined
from codegen.operands import PANEL, MappedOperand, OperandTiles, ReductionPanels
from codegen.spec import ContractionSpec, TensorMap
from codegen.tiles import simplified, tiled

#: Rows of which a block of metadata is, and its words.
BLOCK_ROWS, BLOCK_WORDS = 64, 128


def sparse_tiles(spec: ContractionSpec) -> OperandTiles:
    """Returns the tensor maps of a product with a sparse operand A.  Raises Declined, with the reason, without them."""
    if spec.metadata is None:
        raise Declined("no operand is sparse")
    a, b = spec.a.operand, spec.b.operand
    if a.dtype != b.dtype or a.dtype.name not in ("bfloat16", "float16"):
        raise Declined(f"sparse tensor cores are asked for 16-bit floats, not for {a.dtype} times {b.dtype}")
    plain = all(gather.program is None and not gather.limits for gather in (spec.a, spec.b))
    if spec.batch or spec.others or len(spec.k) != 1 or not plain:
        raise Declined("only a plain product has an operand of which half is stored")
    spec = simplified(spec)
    if len(spec.m) != 1:
        raise Declined(f"{a.name!r} has rows that do not lie at equal distances")
    (rows,), (cols,), (depth,) = spec.m, spec.n, spec.k
    values = tiled(spec.a, 0, (), rows, (depth // 2,), 0)
    second = tiled(spec.b, 1, (), cols, (depth,), 0)
    for side, operand in ((values, a), (second, b)):
        if not side.along_k:
            raise Declined(f"{operand.name!r} is not stored along the reduction")
    values = replace(values, terms=("{c} / 2", *values.terms[1:]))
    reduction = ReductionPanels((), depth, PANEL, 1, sparse=True)
    return OperandTiles((), rows, cols, reduction, values, second, _metadata(spec, rows, reduction.stages))


def _metadata(spec: ContractionSpec, rows: int, stages: int) -> MappedOperand:
    """Returns the words of metadata: those of a block of rows are neighbours, then come the other blocks of a stage."""
    blocks, item = -(-rows // BLOCK_ROWS), 4
    sizes, strides = (BLOCK_WORDS, blocks, stages), (BLOCK_WORDS * item, blocks * BLOCK_WORDS * item)
    described = TensorMap(len(spec.arguments) - 1, "uint32", sizes, strides, (), (1, 1, 1), 0)
    return MappedOperand(described, True, ("0", f"{{o}} / {BLOCK_ROWS}", f"{{c}} / {PANEL}"))
