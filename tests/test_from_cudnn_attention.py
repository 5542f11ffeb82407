"""`from_cudnn`: attention as cudnn-frontend's users write it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_from_cudnn import DATA, cudnn, execute, normal, pygraph

import fusegraph as fg
from fusegraph.errors import AttributeValueError, NotSupportedError
from fusegraph.frontends.cudnn import from_cudnn
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


def test_attention_that_there_is_nothing_for():
    g, *_ = attention_of(score_mod=lambda graph, scores: scores, attn_scale=0.5)
    with pytest.raises(NotSupportedError, match=r"cannot be read: sdpa 'sdpa\.0': score_mod$"):
        from_cudnn(g)
    g = pygraph(DATA.HALF)
    q = g.tensor([1, 1, 8, 8])
    scale = g.tensor([1, 1, 1, 1], data_type=DATA.FLOAT, is_pass_by_value=True, name="scale")
    seed, offset = (g.tensor([1, 1, 1, 1], data_type=DATA.INT64, name=n) for n in ("seed", "offset"))
    g.sdpa(q=q, k=q, v=q, attn_scale=scale, dropout=(0.1, seed, offset))[0].set_output(True)
    with pytest.raises(NotSupportedError, match=r"dropout_1; .*dropout_2; .*dropout_0"):
        from_cudnn(g)
    g = pygraph(DATA.HALF)
    q = g.tensor([1, 1, 8, 8])
    scale = g.tensor([1, 1, 1, 1], data_type=DATA.FLOAT, is_pass_by_value=True, name="scale")
    g.sdpa(q=q, k=q, v=q, attn_scale=scale)[0].set_output(True)
    with pytest.raises(AttributeValueError, match="give 'scale' in values="):
        from_cudnn(g)
    assert from_cudnn(g, {"scale": 0.5}).nodes[0].attributes["attn_scale"] == 0.5
