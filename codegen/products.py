"""Products of warps by mma.sync: how operands come from shared memory to registers, and the loops around instructions.

A warp has 16 rows of results.  Tiles of operands B lie in a ring of stages: cp.async fills one while another is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from codegen.buffers import every, guard
from codegen.kernel import Kernel

#: Stages of the ring: one is multiplied while the other is filled.
STAGES = 2


@dataclass(frozen=True)
class Fragment:
    """An operand in registers, and how ldmatrix brings it there.

    registers     dimensions of the array of a lane's words.
    load          the function of the device library.
    row, column   of which a lane gives the address, C expressions, from the operand's first ones on.
    """

    registers: str
    load: str
    row: str
    column: str

    def bring(self, k: Kernel, name: str, tile: str, row: str, column: str) -> None:
        """Writes the load of the operand that begins at a row and a column of a tile."""
        k.line(f"uint32 {name}{self.registers};")
        k.line(f"{self.load}({name}, &shared.{tile}[{row} + {self.row}][{column} + {self.column}]);")


@dataclass(frozen=True)
class MmaAtom:
    """An instruction of a warp, for so many rows, columns and terms: two of them share a load of operands B.

    a         operand A, whose rows lie along terms.
    b         two operands B whose columns lie along terms; ``b_across``, whose rows do not.
    """

    m: int
    n: int
    k: int
    a: Fragment
    b: Fragment
    b_across: Fragment

    def multiply(self, k: Kernel, element: str, sums: str, a: str) -> None:
        """Writes the products of ``a`` with the operands ``b``, which are added to sums from column ``j`` on."""
        for half, part in enumerate(("j / 2", f"j / 2 + {self.n // 2}")):
            k.line(f"mma<{element}, {element}>(attention::part({sums}, {part}), {a}, b[{half}]);")


#: mma.sync.m16n8k16 of 16-bit floats, on sm_80 and newer (``mma.cuh``, ``fragments.cuh`` and their twins for a CPU).
MMA_16816 = MmaAtom(
    16,
    8,
    16,
    a=Fragment("[4]", "load_matrices", "lane % 16", "lane / 16 * 8"),
    b=Fragment("[2][2]", "load_matrices", "lane / 16 * 8 + lane % 8", "lane / 8 % 2 * 8"),
    b_across=Fragment("[2][2]", "load_matrices_transposed", "lane % 16", "lane / 16 * 8"),
)


def place_warp(k: Kernel, atom: MmaAtom = MMA_16816) -> None:
    """Writes which rows of the block's tile a thread has."""
    k.line("const int t = threadIdx.x, warp = t / 32, lane = t % 32;")
    k.line(f"const int row = warp * {atom.m} + lane / 4;  // of a thread's first result in the tile")


def multiply(k: Kernel, element: str, sums: str, a: str, b: str, atom: MmaAtom = MMA_16816) -> None:
    """Writes the products of a warp's rows of the buffer ``a`` with the columns, the rows of a stage of ``b``."""
    columns, depth = k.buffers[b].shape
    k.unrolled_line(f"for (int i = 0; i < {columns // 2}; ++i) {sums}[i] = 0.0f;")
    with k.unrolled(f"for (int kk = 0; kk < {depth}; kk += {atom.k})"):
        atom.a.bring(k, "a", a, f"warp * {atom.m}", "kk")
        with k.unrolled(f"for (int j = 0; j < {columns}; j += {2 * atom.n})"):
            atom.b.bring(k, "b", f"{b}[stage]", "j", "kk")
            atom.multiply(k, element, sums, "a")


def add_products(k: Kernel, element: str, sums: str, a: str, b: str, atom: MmaAtom = MMA_16816) -> None:
    """Writes the products of a warp's operands ``a``, which are in registers, with a stage of the buffer ``b``."""
    depth, columns = k.buffers[b].shape
    loops = f"for (int kk = 0; kk < {depth // atom.k}; ++kk)", f"for (int j = 0; j < {columns}; j += {2 * atom.n})"
    with k.unrolled(*loops):
        atom.b_across.bring(k, "b", f"{b}[stage]", f"kk * {atom.k}", "j")
        atom.multiply(k, element, sums, f"{a}[kk]")


@contextmanager
def ring(k: Kernel, *, backwards: bool = False, some: bool = False, producers: str = "") -> Iterator[None]:
    """Writes a loop over the tiles from ``first`` to ``last`` - 1 around what uses one, in ``stage``, while ``fill``, a
    function in C, brings the next one.

    backwards  whether the last tile comes first; ``some``, whether there is at least one.
    producers  the condition of warps that bring tiles while the others use them; without one, all do both.
    """
    begin, more, following = "first", "tile + 1 < last", "tile + 1"
    loop = "for (int tile = first; tile < last; ++tile, stage ^= 1)"
    if backwards:
        begin, more, following = "last - 1", "tile > first", "tile - 1"
        loop = "for (int tile = last - 1; tile >= first; --tile, stage ^= 1)"
    ahead = [f"if ({more}) fill({following}, stage ^ 1);", "copy_async_commit();"]
    k.line(f"{guard(every(producers, '' if some else 'first < last'))}fill({begin}, 0);")
    k.line("copy_async_commit();")
    k.line("int stage = 0;")
    if producers:
        k.line("copy_async_wait<0>();")
        with k.block(loop):
            k.line("__syncthreads();  // this tile is there, that before has been multiplied")
            with k.block(f"if ({producers})"):
                for text in (*ahead, "copy_async_wait<0>();", "continue;  // others multiply"):
                    k.line(text)
            yield
        k.line(f"if ({producers}) return;")
        return
    with k.block(loop):
        for text in ahead:
            k.line(text)
        k.line(f"copy_async_wait<{STAGES - 1}>();  // this tile is there, the next one is on its way")
        k.line("__syncthreads();")
        yield
        k.line("__syncthreads();  // the tile has been used")
