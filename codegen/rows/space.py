"""The space that a rows kernel walks: its dimensions as they lie in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from codegen.expr import Operand, Program, Reduced
from codegen.iteration import aligned, collapse, extent, memory_order, restrided, widest_vector
from codegen.spec import RowsSpec, Segments, Walk

#: Most bytes of a vector of the widest operand: two accesses.
MAX_VECTOR_BYTES = 32


@dataclass(frozen=True)
class Space:
    """A spec with neighbouring dimensions merged, the outer ones and those of the row each in memory order."""

    outer: tuple[int, ...]
    row: tuple[int, ...]
    program: Program
    chunk: int | None = None
    walk: Walk | None = None
    segments: Segments | None = None

    def along(self, operand: Operand) -> tuple[int, ...]:
        """Returns an operand's strides within the row."""
        return operand.strides[len(self.outer) :]

    def varies(self, operand: Operand) -> bool:
        """Tells whether an operand has more than one element in a row."""
        return any(self.along(operand))

    def differs(self, operand: Operand) -> bool:
        """Tells whether an operand has other elements in other rows."""
        return operand.begin is not None or any(operand.strides[: len(self.outer)])

    @property
    def sums(self) -> dict[int, int]:
        """The stores that take reductions of columns or of segments: the store's number -> the reduction's."""
        stores = [n for n, _ in self.walk.sums] if self.walk is not None else []
        found = {}
        for n in (*stores, *(self.segments.sums if self.segments is not None else ())):
            value = self.program.stores[n].value
            assert isinstance(value, Reduced)
            found[n] = value.reduction
        return found

    @property
    def total(self) -> int:
        """Elements along all reduced dimensions."""
        return prod(self.row)

    def bounds(self) -> list[int]:
        """Returns the extents for `index_type`: numbers of rows and of elements of a row, and extents of operands."""
        shape = (*self.outer, *self.row)
        parts = -(-prod(self.outer[-self.walk.dims :]) // self.walk.chunk) if self.walk is not None else 0
        sums = [step * (parts + 1) for _, step in (self.walk.sums if self.walk is not None else ())]
        extents = [extent(shape, op.strides) for op in self.program.operands]
        reaches = [op.begin.reach for op in self.program.loads if op.begin is not None]
        return [prod(self.outer), self.total, *sums, *extents, *reaches]

    @property
    def length(self) -> int:
        """Elements of a row, or of a part if rows are reduced in parts (the last part may have fewer)."""
        return self.total if self.chunk is None else min(self.chunk, self.total)


def normalize(spec: RowsSpec) -> Space:
    """Returns the space that a kernel walks, in any order of the elements, or rows, that reductions combine."""
    program, n, walk = spec.program, len(spec.outer), spec.walk
    parts = 0 if spec.chunk is None else 1  # the outer dimension that must stay by itself
    walked = n - walk.dims if walk is not None else n
    every = program.strides
    shape = (*spec.outer, *spec.row)
    leader = max(
        program.operands, key=lambda op: (sum(s > 1 and t != 0 for s, t in zip(shape, op.strides)), op.dtype.itemsize)
    )

    def merged(first: int, last: int) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        sizes = shape[first:last]
        order = memory_order(sizes, leader.strides[first:last])
        return collapse(sizes, [s[first:last] for s in every], order)

    kept, over_kept = merged(parts, walked)
    segments = spec.segments
    row, inside = merged(n, len(shape) - (segments.dims if segments is not None else 0))
    if segments is not None:
        own, over_own = merged(len(shape) - segments.dims, len(shape))
        row, inside = (*row, *own), [(*a, *b) for a, b in zip(inside, over_own)]
        segments = replace(segments, dims=len(own))
    if walk is None:
        outer, outside = kept, over_kept
    else:
        rows, over_rows = merged(walked, n)
        if kept == (1,):
            kept, over_kept = (), [() for _ in every]
        outer, outside = (*kept, *rows), [(*a, *b) for a, b in zip(over_kept, over_rows)]
        walk = replace(walk, dims=len(rows))
    outer = (*spec.outer[:parts], *outer)
    strides = [(*s[:parts], *a, *b) for s, a, b in zip(every, outside, inside)]
    return Space(outer, row, restrided(program, strides), spec.chunk, walk, segments)


def segments_of_block(segments: int, lanes: int, cluster: int) -> int:
    """Returns how many segments the warps of each block of a row take at most."""
    warps = lanes // 32
    return -(-segments // (warps * cluster)) * warps


def repeated(space: Space) -> list[int]:
    """Returns the loads of a walk that are the same for all rows of a block, but not for all elements of one."""
    return [n for n, op in enumerate(space.program.loads) if space.varies(op) and not _walked(space, op)]


def streamed(space: Space) -> list[int]:
    """Returns the loads of a walk that have elements of their own in each row."""
    return [n for n, op in enumerate(space.program.loads) if space.varies(op) and _walked(space, op)]


def _walked(space: Space, operand: Operand) -> bool:
    assert space.walk is not None
    n = len(space.outer)
    return any(operand.strides[n - space.walk.dims : n])


def widest(space: Space, dim: int) -> int:
    """Returns the widest vector along a dimension that suits all operands which are contiguous along it."""
    size = (*space.outer, *space.row)[dim]
    varying = [op for op in space.program.operands if space.varies(op)]
    contiguous = [op for op in varying if op.strides[dim] == 1]
    if not contiguous or space.length == 0:
        return 1
    along = dim >= len(space.outer)
    # Stores of results for each row are vectors, too, where neighbouring threads have neighbouring rows.
    beside = [op for op in space.program.operands if op.strides[dim] == 1] if not along else contiguous

    def suits(vector: int) -> bool:
        small = all(vector * op.dtype.itemsize <= MAX_VECTOR_BYTES for op in varying)
        whole = size % vector == 0 and (not along or space.length % vector == 0)
        begins = all(op.begin.step % vector == 0 for op in beside if op.begin is not None)
        return small and whole and begins and all(aligned(op, vector, dim) for op in beside)

    return widest_vector(16 // min(op.dtype.itemsize for op in contiguous), suits)
