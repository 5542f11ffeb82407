"""Pool kernels whose blocks take a few planes and fold their windows in two steps (`codegen.pool.steps`).

First they fold the columns, which neighbouring threads read in vectors, into shared memory, then the rows of those.
"""

from __future__ import annotations

from codegen.buffers import VECTORS, Buffer, Edge
from codegen.declined import Declined
from codegen.iteration import unsigned
from codegen.kernel import Kernel, block_number
from codegen.pool.renderer import PoolRenderer
from codegen.pool.schedule import PoolSchedule
from codegen.pool.space import index_type, normalize
from codegen.pool.steps import SHARED_BYTES, THREADS, in_steps
from codegen.sizes import most
from codegen.spec import KernelSource, PoolSpec


def render(spec: PoolSpec, schedule: PoolSchedule) -> KernelSource:
    """Returns a kernel whose blocks fold planes in two steps."""
    whole, planes = PoolRenderer(spec, schedule), schedule.planes
    w, program, pointers = whole.w, whole.program, whole.pointers
    every = Edge(whole.space.outer[0], planes)
    blocks = every.tiles
    sizes = " x ".join(str(window.count) for _, window in whole.windows)
    many = f"{planes} planes" if planes > 1 else "a plane"
    block = block_number(schedule.itype)
    for operand, pointer in zip(program.operands, (*pointers.loads, *pointers.stores)):
        if operand.strides[0] and most(blocks) > 1:
            w.line(f"{pointer} += {block} * {planes * operand.strides[0]};")
    if every.ragged:
        w.line(f"const uint32 planes = blockIdx.x == {blocks - 1} ? {every.total % planes} : {planes};")
    first, second = in_steps(spec, planes)
    folds = [whole.names.unique(store.operand.name) for store in first.program.stores]
    for store, name in zip(first.program.stores, folds):
        elements = most(planes * store.operand.strides[0])
        if elements * store.operand.dtype.itemsize > SHARED_BYTES:
            raise Declined("the columns of the largest planes do not fit shared memory")
        w.line(Buffer(name, store.operand.dtype.ctype, (elements,), align=VECTORS).static)
    columns = _Step(first, schedule.vector, w, every.ragged)
    columns.pointers.loads, columns.pointers.stores = pointers.loads, folds
    columns.store, columns.beyond = "store_shared", 1
    with columns.scope():
        columns.body()
    w.line("__syncthreads();")
    rows = _Step(second, 1, w, every.ragged)
    rows.pointers.loads, rows.pointers.stores = [*pointers.loads, *folds], pointers.stores
    rows.holds = False
    with rows.scope():
        rows.body()
    details = f"windows of {sizes}; a block folds {many}, columns first"
    return whole.source(details, blocks, barriers=True)


class _Step(PoolRenderer):
    """One step of a block: its threads take all windows in turn."""

    def __init__(self, spec: PoolSpec, vector: int, w: Kernel, ragged: bool) -> None:
        super().__init__(spec, PoolSchedule(vector, index_type(normalize(spec))), w)
        self.ragged = ragged

    def _coordinates(self) -> list[str]:
        """Returns the names of plane, row and column, unless rows of all planes are merged."""
        return ["plane", "row", "col"] if self.space.rank == 3 else super()._coordinates()

    def _number(self, total: int) -> None:
        bound = f"planes * {total // self.spec.outer[0]}" if self.ragged else str(total)
        self.w.open(f"for ({unsigned(self.t)} at = threadIdx.x; at < {bound}; at += {THREADS})")
