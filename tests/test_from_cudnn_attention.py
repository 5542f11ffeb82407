"""`from_cudnn`: attention as cudnn-frontend's users write it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_from_cudnn import DATA, cudnn, execute, normal, pygraph

import fusegraph as fg
from fusegraph.dtypes import BY_NAME
from fusegraph.errors import AttributeValueError, GraphError, NotSupportedError, ShapeError
from fusegraph.frontends.cudnn import from_cudnn
from fusegraph.ops.attention_fp8 import SCALES
from fusegraph.report.check import run


def attention_of(**how: Any) -> tuple[Any, Any, Any]:
    g = pygraph(DATA.BFLOAT16)
    q, k, v = (g.tensor([2, h, s, 16], name=n) for n, h, s in (("q", 4, 6), ("k", 2, 10), ("v", 2, 10)))
    if how.pop("padded", False):
        how["use_padding_mask"] = True
        for name in ("seq_len_q", "seq_len_kv"):
            how[name] = g.tensor([2, 1, 1, 1], name=name, data_type=DATA.INT32)
    if how.pop("biased", False):
        how["bias"] = g.tensor([1, 4, 6, 10], name="bias", data_type=DATA.FLOAT)
    o, stats = g.sdpa(q=q, k=k, v=v, **how)
    return g, o.set_output(True), stats


def test_gradients():
    g = pygraph(DATA.BFLOAT16)
    q, loss, o = (g.tensor([2, 4, 6, 16], name=n) for n in ("q", "dO", "o"))
    k, v = (g.tensor([2, 2, 10, 16], name=n) for n in "kv")
    stats = g.tensor([2, 4, 6, 1], name="stats", data_type=DATA.FLOAT)
    how = {"attn_scale": 0.25, "use_causal_mask": True, "use_deterministic_algorithm": True}
    for t in g.sdpa_backward(q, k, v, o, loss, stats, **how):
        t.set_output(True)
    graph = from_cudnn(g)
    (node,) = graph.nodes
    assert (node.op.name, node.attributes["attn_scale"]) == ("sdpa_backward", 0.25)
    assert node.attributes["diagonal_band_right_bound"] == 0
    assert [t.shape for t in graph.outputs] == [(2, 4, 6, 16), (2, 2, 10, 16), (2, 2, 10, 16)]


def test_the_gradient_by_a_sink():
    g = pygraph(DATA.BFLOAT16)
    q, loss, o = (g.tensor([2, 4, 6, 16], name=n) for n in ("q", "dO", "o"))
    stats = g.tensor([2, 4, 6, 1], name="stats", data_type=DATA.FLOAT)
    sink, by_sink = (g.tensor([1, 4, 1, 1], name=n, data_type=DATA.FLOAT) for n in ("sink", "dSink"))
    found = g.sdpa_backward(q, q, q, o, loss, stats, sink_token=sink, dSink_token=by_sink, attn_scale=0.25)
    for t in (*found, by_sink):
        t.set_output(True)
    graph = from_cudnn(g)
    assert graph.nodes[0].inputs[-1].name == "sink"
    assert [t.shape for t in graph.outputs] == [(1, 4, 1, 1), *[(2, 4, 6, 16)] * 3]  # as they were made


def test_rotary_embeddings():
    g = pygraph(DATA.HALF)
    q, k, v = (g.tensor([2, h, 6, 16], name=n) for n, h in (("q", 4), ("k", 2), ("v", 2)))
    freqs = g.tensor([6, 1, 1, 8], name="freqs", data_type=DATA.FLOAT)
    turned = [g.rope(q, freqs, rope_dim=8, output_scale=0.25, name="turn"), g.rope(k, freqs, rope_dim=8)]
    back = g.rope_backward(turned[0], freqs, rope_dim=8, output_scale=4.0).set_output(True)
    o, _ = g.sdpa(q=turned[0], k=turned[1], v=v, is_inference=True)
    o.set_output(True)
    graph = from_cudnn(g)
    assert [n.op.name for n in graph.nodes if n.op.name.startswith("rope")] == ["rope", "rope", "rope_backward"]
    assert graph.nodes[0].attributes == {"rope_dim": 8, "output_scale": 0.25}
    assert graph.uids[back.uid].strides == (384, 96, 16, 1)
    x, angles = normal((2, 4, 6, 16), np.float16), normal((6, 1, 1, 8)) * 5
    rest = {n: normal((2, 2, 6, 16), np.float16) for n in ("k", "v")}
    found = execute(graph, {"q": x, "freqs": angles, **rest})[0]
    np.testing.assert_allclose(found.astype(float), x.astype(float), rtol=4e-3, atol=4e-3)


ATTENTION: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"attn_scale": 1.0}),
    ({"attn_scale": 0.25, "use_causal_mask": True, "is_inference": True}, {"diagonal_band_right_bound": 0}),
    (
        {"attn_scale": 0.25, "use_causal_mask_bottom_right": True, "sliding_window_length": 3},
        {"diagonal_alignment": "BOTTOM_RIGHT", "diagonal_band_left_bound": 3, "diagonal_band_right_bound": 0},
    ),
    (
        {"diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT, "diagonal_band_right_bound": 2, "padded": True},
        {"attn_scale": 1.0, "diagonal_alignment": "BOTTOM_RIGHT", "diagonal_band_right_bound": 2},
    ),
    (
        {"attn_scale": 0.25, "use_causal_mask": True, "use_alibi_mask": True, "biased": True},
        {"use_alibi_mask": True, "diagonal_band_right_bound": 0},
    ),
]


@pytest.mark.parametrize(("told", "meant"), ATTENTION)
@pytest.mark.parametrize("stats", [False, True])
def test_attention(told, meant, stats):
    g, _, kept = attention_of(**told, generate_stats=stats)
    if stats:
        kept.set_output(True)
    graph = from_cudnn(g)
    (node,) = graph.nodes
    at = {"attn_scale": 0.25, "generate_stats": stats, **meant}
    assert {key: node.attributes[key] for key in at} == at
    assert graph.outputs[0].strides == (384, 96, 16, 1)
    assert [t.dtype.name for t in graph.outputs] == ["bfloat16", "float32"][: 1 + stats]
    arrays: dict[str, Any] = {t.name: normal(t.shape, t.dtype.numpy, len(t.name)) for t in graph.inputs}
    arrays |= {n: np.array([3, 6], np.int32).reshape(2, 1, 1, 1) for n in arrays if n.startswith("seq_len")}
    ours = fg.Graph("ours", io_dtype="bfloat16")
    names = [t.name for t in graph.inputs]
    made = ours.sdpa(**{t.name: ours.tensor(t.name, t.shape, t.dtype) for t in graph.inputs}, **at)
    for t in made if stats else (made,):
        ours.output(t)
    wanted = run(ours.compile("reference"), arrays)
    assert set(names) >= {"q", "k", "v"}
    for found, expected in zip(execute(graph, arrays), wanted.values()):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("amax", [False, True])
def test_attention_of_8_bit_floats(amax):
    """Amax_O is the largest magnitude before it is scaled and rounded."""
    g = pygraph(DATA.FP8_E4M3)
    q, k, v = (g.tensor([2, 3, 5, 16], name=n) for n in "qkv")
    scales = {n: g.tensor([1, 1, 1, 1], name=n, data_type=DATA.FLOAT) for n in SCALES}
    how = {"attn_scale": 0.25, "use_causal_mask": True, "generate_stats": True, "is_inference": False}
    o, stats, _, most = g.sdpa_fp8(q=q, k=k, v=v, **scales, **how)
    o.set_output(True).set_data_type(DATA.FP8_E4M3)
    stats.set_output(True).set_data_type(DATA.FLOAT)
    if amax:
        most.set_output(True).set_data_type(DATA.FLOAT).set_dim([1, 1, 1, 1])
    graph = from_cudnn(g)
    assert graph.nodes[0].op.name == "sdpa_fp8"
    assert [t.dtype.name for t in graph.outputs] == ["float8_e4m3", "float32", "float32"][: 2 + amax]
    arrays: dict[str, Any] = {n: normal((2, 3, 5, 16), BY_NAME["float8_e4m3"].numpy, 1) for n in "qkv"}
    arrays |= {n: np.full((1, 1, 1, 1), 1.0 + 0.25 * i, np.float32) for i, n in enumerate(SCALES)}
    found = execute(graph, arrays)
    ours = fg.Graph("ours")
    made = {n: ours.tensor(n, t.shape, str(t.dtype)) for n, t in arrays.items()}
    out, kept = ours.sdpa_fp8(**made, attn_scale=0.25, use_causal_mask=True, generate_stats=True, dtype="float32")
    ours.output(out)
    ours.output(kept)
    exact, log_sums = run(ours.compile("reference"), arrays).values()
    np.testing.assert_allclose(found[0].astype(float), exact, rtol=0.07, atol=0.02)
    np.testing.assert_allclose(found[1], log_sums, rtol=1e-5)
    if amax:
        np.testing.assert_allclose(found[2].item(), np.abs(exact).max() / arrays["scale_o"].item(), rtol=1e-5)


def test_attention_to_pages():
    g = pygraph(DATA.BFLOAT16)
    q = g.tensor([2, 4, 1, 16], name="q")
    k, v = (g.tensor([9, 2, 8, 16], name=n) for n in "kv")
    tables = {f"paged_attention_{n}_table": g.tensor([2, 1, 3, 1], name=n * 2, data_type=DATA.INT32) for n in "kv"}
    lengths = {n: g.tensor([2, 1, 1, 1], name=n, data_type=DATA.INT32) for n in ("seq_len_q", "seq_len_kv")}
    how = {"use_padding_mask": True, "paged_attention_max_seq_len_kv": 20, "attn_scale": 0.25}
    g.sdpa(q=q, k=k, v=v, **tables, **lengths, **how)[0].set_output(True)
    graph = from_cudnn(g)
    arrays: dict[str, Any] = {t.name: normal(t.shape, t.dtype.numpy, len(t.name)) for t in graph.inputs}
    arrays |= {
        n: np.array([1, size], np.int32).reshape(2, 1, 1, 1) for n, size in (("seq_len_q", 1), ("seq_len_kv", 11))
    }
    arrays |= {
        "kk": np.arange(6, dtype=np.int32).reshape(2, 1, 3, 1),
        "vv": np.arange(6, 0, -1, np.int32).reshape(2, 1, 3, 1),
    }
    (found,) = execute(graph, arrays)
    whole = {
        n: arrays[n][arrays[n * 2].reshape(2, 3)].swapaxes(1, 2).reshape(2, 2, 24, 16)[:, :, :20].copy() for n in "kv"
    }
    ours = fg.Graph("ours", io_dtype="bfloat16")
    shapes = {"q": (2, 4, 1, 16), "k": (2, 2, 20, 16), "v": (2, 2, 20, 16)}
    at = {n: ours.tensor(n, (2,), "int32") for n in lengths}
    ours.output(ours.sdpa(**{n: ours.tensor(n, s) for n, s in shapes.items()}, **at, attn_scale=0.25), name="o")
    (wanted,) = run(
        ours.compile("reference"), {**arrays, **whole, **{n: arrays[n].reshape(2) for n in lengths}}
    ).values()
    np.testing.assert_array_equal(found, wanted)


def test_attention_that_there_is_nothing_for():
    g = pygraph(DATA.HALF)
    q, mask = g.tensor([1, 1, 8, 8]), g.tensor([1, 1, 1, 8], data_type=DATA.BOOLEAN)
    g.sdpa(q=q, k=q, v=q, kv_mask=mask, attn_scale_prefolded=True)[0].set_output(True)
    with pytest.raises(NotSupportedError, match=r"cannot be read: sdpa 'sdpa\.0': kv_mask; .*: attn_scale_prefolded$"):
        from_cudnn(g)


def test_a_scale_that_is_known():
    g = pygraph(DATA.HALF)
    q = g.tensor([1, 1, 8, 8])
    scale = g.tensor([1, 1, 1, 1], data_type=DATA.FLOAT, is_pass_by_value=True, name="scale")
    g.sdpa(q=q, k=q, v=q, attn_scale=scale)[0].set_output(True)
    assert from_cudnn(g, {"scale": 0.5}).nodes[0].attributes["attn_scale"] == 0.5


@pytest.mark.parametrize("heads", [(4, 3), (3, 4), (4, 0)])
def test_heads_that_are_not_shared_evenly(heads):
    g = pygraph(DATA.HALF)
    q, k, v = (g.tensor([1, h, 8, 8], [h * 64 or 64, 64, 8, 1]) for h in (6, *heads))
    g.sdpa(q=q, k=k, v=v)[0].set_output(True)
    with pytest.raises(ShapeError, match=r"6 heads of q are not shared evenly by [04] of [kv]"):
        from_cudnn(g)


@pytest.mark.parametrize("dropout", [(0.5,), (0.5, 1), (2.0, 1, 2)])
def test_dropout_of_another_kind(dropout):
    g = pygraph(DATA.HALF)
    q = g.tensor([1, 1, 8, 8])
    g.sdpa(q=q, k=q, v=q, dropout=dropout)[0].set_output(True)
    with pytest.raises(AttributeValueError, match="dropout"):
        from_cudnn(g)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"diagonal_band_left_bound": -1}, "diagonal_band_left_bound"),
    ({"diagonal_band_right_bound": "many"}, "diagonal_band_right_bound"),
    ({"bias": (1, 1, 7, 8)}, r"bias \[1, 1, 7, 8\] does not broadcast"),
    ({"sink_token": (1, 2, 1, 1)}, r"sink_token \[1, 2, 1, 1\] does not broadcast"),
    ({"q": (1, 3, 8, 4)}, "queries have 4 elements, keys 8"),
    ({"block_mask": (1, 3, 1, 0)}, "block_mask"),
]


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(("how", "reason"), WRONG)
def test_what_is_wrong_is_so_whether_it_is_written_out_or_not(how, reason, told):
    g = pygraph(DATA.HALF)
    kinds = {"sink_token": DATA.FLOAT, "block_mask": DATA.UINT8}

    def given(key: str, value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        return g.tensor(list(value), data_type=kinds.get(key, DATA.HALF), name=key)

    every = {"q": (1, 3, 8, 8), "k": (1, 3, 8, 8), "v": (1, 3, 8, 8), **how}
    if told:
        every["score_max"] = (1, 3, 8, 1)
    operands = {key: given(key, value) for key, value in every.items()}
    if told:
        operands["score_max"].set_output(True).set_data_type(DATA.FLOAT)
    g.sdpa(**operands)[0].set_output(True)
    with pytest.raises(GraphError, match=reason):
        from_cudnn(g)
