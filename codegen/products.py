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


#: Rows, columns and terms of mma.sync.m16n8k16, for 16-bit floats on sm_80 and newer.
ATOM_M, ATOM_N, ATOM_K = 16, 8, 16
#: Operand A, whose rows lie along terms; two operands B, of which columns lie along terms, or rows lie across them.
A = Fragment("[4]", "load_matrices", "lane % 16", "lane / 16 * 8")
B = Fragment("[2][2]", "load_matrices", "lane / 16 * 8 + lane % 8", "lane / 8 % 2 * 8")
B_ACROSS = Fragment("[2][2]", "load_matrices_transposed", "lane % 16", "lane / 16 * 8")


def place_warp(k: Kernel) -> None:
    """Writes which rows of the block's tile a thread has."""
    k.line("const int t = threadIdx.x, warp = t / 32, lane = t % 32;")
    k.line(f"const int row = warp * {ATOM_M} + lane / 4;  // of a thread's first result in the tile")


def _mma(k: Kernel, element: str, sums: str, a: str) -> None:
    """Writes the products of ``a`` with the operands ``b``, which are added to sums from column ``j`` on."""
    for half, part in enumerate(("j / 2", f"j / 2 + {ATOM_N // 2}")):
        k.line(f"mma<{element}, {element}>(attention::part({sums}, {part}), {a}, b[{half}]);")


def multiply(k: Kernel, element: str, sums: str, a: str, b: str) -> None:
    """Writes the products of a warp's rows of the buffer ``a`` with the columns, the rows of a stage of ``b``."""
    columns, depth = k.buffers[b].shape
    k.unrolled_line(f"for (int i = 0; i < {columns // 2}; ++i) {sums}[i] = 0.0f;")
    with k.unrolled(f"for (int kk = 0; kk < {depth}; kk += {ATOM_K})"):
        A.bring(k, "a", a, f"warp * {ATOM_M}", "kk")
        with k.unrolled(f"for (int j = 0; j < {columns}; j += {2 * ATOM_N})"):
            B.bring(k, "b", f"{b}[stage]", "j", "kk")
            _mma(k, element, sums, "a")


def add_products(k: Kernel, element: str, sums: str, a: str, b: str) -> None:
    """Writes the products of a warp's operands ``a``, which are in registers, with a stage of the buffer ``b``."""
    depth, columns = k.buffers[b].shape
    loops = f"for (int kk = 0; kk < {depth // ATOM_K}; ++kk)", f"for (int j = 0; j < {columns}; j += {2 * ATOM_N})"
    with k.unrolled(*loops):
        B_ACROSS.bring(k, "b", f"{b}[stage]", f"kk * {ATOM_K}", "j")
        _mma(k, element, sums, f"{a}[kk]")


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
