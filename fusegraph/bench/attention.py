"""Attention workloads.

They are the board's rows, a window, one query per sequence, packed sequences of different lengths, and a mask by
documents with a bias by distance.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from fusegraph.bench.graphs import DOCUMENT, WINDOW
from fusegraph.bench.workload import Input, Workload
from fusegraph.ops.attention_band import positions_met

#: Lengths of the sequences of a packed batch, 16384 tokens in all.
PACKED = (4096, 512, 1024, 300, 2048, 2500, 64, 1800, 3000, 1040)


def attention() -> Iterator[Workload]:
    """Yields every attention workload, those of the board first."""
    yield from board()
    yield _row(2, 32, 32, 8192, 256, causal=True)
    yield _row(2, 32, 32, 8192, 128, causal=True, window=WINDOW)
    yield _decode(8, 32, 8, 32768, 128)
    yield _packed(PACKED, 32, 32, 128)
    yield _packed(PACKED, 32, 8, 128)
    shape = (2, 32, 8192, 128)
    operands = (
        *(Input(name, shape) for name in "qkv"),
        Input("documents", (8192,), dtype="int32", values=tuple(n // DOCUMENT for n in range(8192))),
    )
    name = f"attention b2 h32 s8192 d128 causal, documents of {DOCUMENT} and a bias by distance bf16"
    yield Workload(name, "bfloat16", operands, shape, "sdpa_documents")


def board() -> Iterator[Workload]:
    for batch, heads, shared, length, size, causal in (
        (2, 32, 32, 8192, 128, True),
        (2, 32, 32, 8192, 128, False),
        (2, 32, 8, 8192, 128, True),
        (8, 32, 32, 2048, 64, True),
        (16, 16, 16, 512, 64, False),
    ):
        yield _row(batch, heads, shared, length, size, causal=causal)
    yield _backward(2, 32, 8192, 128)
    yield _backward(8, 32, 2048, 64)


def _row(batch: int, heads: int, shared: int, length: int, size: int, *, causal: bool, window: int = 0) -> Workload:
    shape, keys = (batch, heads, length, size), (batch, shared, length, size)
    band = {
        "diagonal_alignment": "TOP_LEFT",
        "diagonal_band_left_bound": window or None,
        "diagonal_band_right_bound": 0 if causal else None,
    }
    flops = 4 * batch * heads * positions_met(length, length, band) * size
    grouped = f"/{shared}" if shared != heads else ""
    kind = ("causal" if causal else "full") + (f" window {window}" if window else "")
    name = f"sdpa b{batch} h{heads}{grouped} s{length} d{size} {kind} bf16"
    operands = (Input("q", shape), Input("k", keys), Input("v", keys))
    torch = "sdpa_window" if window else "sdpa_grouped" if grouped else "sdpa_causal" if causal else "sdpa"
    return Workload(name, "bfloat16", operands, shape, torch, flops, "bf16")


def _backward(batch: int, heads: int, length: int, size: int) -> Workload:
    shape = (batch, heads, length, size)
    operands = (
        *(Input(key, shape) for key in ("q", "k", "v", "o", "dO")),
        Input("stats", (*shape[:3], 1), dtype="float32"),
    )
    flops = 10 * batch * heads * (length * (length + 1) // 2) * size
    name = f"sdpa backward b{batch} h{heads} s{length} d{size} causal bf16"
    return Workload(name, "bfloat16", operands, shape, "sdpa_backward", flops, "bf16", also=(shape, shape))


def _decode(batch: int, heads: int, shared: int, length: int, size: int) -> Workload:
    shape, keys = (batch, heads, 1, size), (batch, shared, length, size)
    name = f"sdpa b{batch} h{heads}/{shared} 1 query of {length} keys d{size} bf16"
    operands = (Input("q", shape), Input("k", keys), Input("v", keys))
    flops = 4 * batch * heads * length * size
    return Workload(name, "bfloat16", operands, shape, "sdpa_decode", flops, "bf16")


def _packed(lengths: tuple[int, ...], heads: int, shared: int, size: int) -> Workload:
    """Returns attention over packed sequences of these lengths; in memory all heads of a token are adjacent."""
    tokens, offsets = sum(lengths), (0, *accumulate(lengths))
    grouped = f"/{shared}" if shared != heads else ""
    span = f"{min(lengths)} to {max(lengths)}"
    name = f"sdpa packed {len(lengths)} sequences of {span} tokens h{heads}{grouped} d{size} causal bf16"

    def tensor(key: str, count: int) -> Input:
        return Input(key, (1, count, tokens, size), strides=(tokens * count * size, size, count * size, 1))

    q, k, v = tensor("q", heads), tensor("k", shared), tensor("v", shared)
    operands = (q, k, v, Input("offsets", (len(offsets),), dtype="int32", values=offsets))
    flops = 4 * heads * size * sum(n * (n + 1) // 2 for n in lengths)
    return Workload(name, "bfloat16", operands, q.shape, "sdpa_packed", flops, "bf16", output_strides=q.strides)
