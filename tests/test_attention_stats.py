"""What attention tells of each query, with sinks and alibi, whether the query exists or not."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from attention_oracle import attention  # noqa: E402

import fusegraph as fg  # noqa: E402
from fusegraph.report.check import run  # noqa: E402

Q, K = [0, 3, 3, 4, 9], [0, 5, 7, 7, 8]
ROWS, KEYS = 11, 10


def normal(*shape: int, seed: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def alike(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(torch.from_numpy(np.array(found)).double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("engine", ["reference", "cpu"])
@pytest.mark.parametrize("shared", [1, 2])
def test_of_padded_batches(engine, shared):
    q, k, v = normal(3, 2, 6, 8, seed=0), normal(3, shared, 9, 8, seed=1), normal(3, shared, 9, 8, seed=2)
    lengths, sink = [(6, 9), (2, 0), (0, 4)], torch.tensor([0.5, -1.0])
    g = fg.Graph("padded")
    inputs = {"q": q, "k": k, "v": v, "sink_token": sink.reshape(1, 2, 1, 1)}
    operands = {n: g.tensor(n, tuple(x.shape)) for n, x in inputs.items()}
    for n, key in enumerate(("seq_len_q", "seq_len_kv")):
        inputs[key] = torch.tensor([pair[n] for pair in lengths], dtype=torch.int32)
        operands[key] = g.tensor(key, (3,), "int32")
    band = {"diagonal_alignment": "BOTTOM_RIGHT", "diagonal_band_right_bound": 1}
    for t in g.sdpa(**operands, **band, attn_scale=0.5, use_alibi_mask=True, generate_stats=True):
        g.output(t)
    found = run(g.compile(engine), {n: x.numpy() for n, x in inputs.items()})
    wanted = attention(q, k, v, scale=0.5, lengths=lengths, sink=sink, alibi=True, bottom=True, right=1)
    for x, expected in zip(found.values(), wanted):
        alike(x, expected)
    assert bool((wanted[1][1, :, 2:] == -inf).all())
    assert wanted[1][1, :, :2].isfinite().all()  # no key, but a sink


@pytest.mark.parametrize("engine", ["reference", "cpu"])
def test_of_packed_batches(engine):
    """Positions of alibi are those in the sequence; tokens of none have no sink."""
    q, k, v = normal(1, 2, ROWS, 8, seed=0), normal(1, 2, KEYS, 8, seed=1), normal(1, 2, KEYS, 8, seed=2)
    sink = torch.tensor([0.5, -1.0])
    g = fg.Graph("packed")
    inputs = {"q": q, "k": k, "v": v, "sink_token": sink.reshape(1, 2, 1, 1)}
    operands = {n: g.tensor(n, tuple(x.shape)) for n, x in inputs.items()}
    for key, numbers in (("ragged_offset_q", Q), ("ragged_offset_kv", K)):
        inputs[key], operands[key] = torch.tensor(numbers, dtype=torch.int32), g.tensor(key, (5,), "int32")
    band = {"diagonal_alignment": "BOTTOM_RIGHT", "diagonal_band_left_bound": 4}
    for t in g.sdpa(**operands, **band, attn_scale=0.5, use_alibi_mask=True, generate_stats=True):
        g.output(t)
    out, stats = run(g.compile(engine), {n: x.numpy() for n, x in inputs.items()}).values()
    for q0, q1, k0, k1 in zip(Q, Q[1:], K, K[1:]):
        parts = (q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1])
        wanted = attention(*parts, scale=0.5, sink=sink, alibi=True, bottom=True, left=4)
        alike(out[:, :, q0:q1], wanted[0])
        alike(stats[:, :, q0:q1], wanted[1])
    assert (stats[:, :, Q[-1] :] == -inf).all()
    assert not out[:, :, Q[-1] :].any()
