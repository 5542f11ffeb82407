"""Products of 8-bit floats: with a scale for each row and column, and for each block as DeepSeek-V3 has them."""

from __future__ import annotations

from collections.abc import Iterator

from fusegraph.bench.workload import Input, Workload, transposed
from fusegraph.graph import Graph, Tensor

BLOCK = 128
#: Columns and terms of layers of DeepSeek-V3, and how many tokens meet them.
LAYERS = ((2112, 7168), (24576, 1536), (7168, 16384), (36864, 7168), (7168, 18432), (4096, 7168), (7168, 2048))
TOKENS = (1, 16, 128, 512, 4096)


def _by_rows(g: Graph, a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> Tensor:
    return g.cast(g.matmul(a, b, dtype="float32") * of_a * of_b, "bfloat16")


def _by_blocks(g: Graph, a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> Tensor:
    x = g.block_scale_dequantize(a, of_a, (1, BLOCK), "bfloat16")
    rows = BLOCK if of_b.shape[1] < b.shape[1] else 1
    return x @ g.block_scale_dequantize(b.T, of_b.T, (rows, BLOCK), "bfloat16").T


def scaled() -> Iterator[Workload]:
    """Yields every workload.  Scales of blocks lie as torch wants them: one row or column beside the other."""
    for n in (4096, 6144, 8192):
        yield _product("rows", n, n, n)
        yield _product("blocks", n, n, n)
    yield _product("blocks of rows on both sides", 8192, 8192, 8192)
    for cols, terms in LAYERS:
        for rows in TOKENS:
            yield _product("blocks", rows, cols, terms)


def _product(scales: str, m: int, n: int, k: int) -> Workload:
    codes = "float8_e4m3"
    operands = Input("a", (m, k), dtype=codes), Input("b", (k, n), dtype=codes, strides=transposed("b", k, n).strides)
    if scales == "rows":
        build, of_a, of_b = _by_rows, Input("of_a", (m, 1), dtype="float32"), Input("of_b", (1, n), dtype="float32")
    else:
        build, depth = _by_blocks, -(-k // BLOCK)
        of_a = Input("of_a", (m, depth), dtype="float32", strides=(1, m))
        cols = -(-n // BLOCK) if scales == "blocks" else n
        of_b = Input("of_b", (depth, cols), dtype="float32", strides=(1, depth) if scales == "blocks" else (cols, 1))
    name = f"fp8 matmul {m}x{n}x{k} with scales of {scales}"
    return Workload(name, "bfloat16", (*operands, of_a, of_b), (m, n), "scaled_matmul", 2 * m * n * k, "fp8", build)
