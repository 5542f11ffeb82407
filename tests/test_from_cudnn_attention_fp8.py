"""`from_cudnn`: attention of 8-bit floats with the keywords and outputs of cudnn-frontend's, and its gradients."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from attention_oracle import attention, gradients  # noqa: E402
from test_from_cudnn import DATA, cudnn, pygraph  # noqa: E402
from test_from_cudnn_ragged import Ragged, of_lengths  # noqa: E402

from fusegraph.frontends.cudnn import from_cudnn  # noqa: E402
from fusegraph.frontends.cudnn.attention_backward_fp8 import DESCALES  # noqa: E402
from fusegraph.frontends.cudnn.attention_backward_fp8 import SCALES as SCALES_BACK  # noqa: E402
from fusegraph.ops.attention_fp8 import SCALES  # noqa: E402

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = {E4M3: DATA.FP8_E4M3, E5M2: DATA.FP8_E5M2}
BOTTOM = cudnn.diagonal_alignment.BOTTOM_RIGHT
#: Powers of two: they cost no bits.
NUMBERS = {
    **{"descale_q": 0.5, "descale_k": 0.25, "descale_v": 2.0, "descale_s": 1 / 256, "scale_s": 256.0, "scale_o": 4.0},
    **{"descale_o": 0.25, "descale_dO": 0.5, "descale_dP": 1 / 32, "scale_dP": 32.0},
    **{"scale_dQ": 2.0, "scale_dK": 8.0, "scale_dV": 4.0},
}
SCALE = 0.25


def operands(g: Any, dtype: Any, keys: tuple[str, ...], heads: tuple[int, int, int]) -> tuple[dict[str, Any], Any, Any]:
    """Returns queries, keys, values and scales of a graph: the tensors, their arrays, and the numbers that the arrays
    encode.
    """
    how: dict[str, Any] = {"attn_scale": SCALE}
    arrays, means = dict[Any, Any](), {}
    for n, (name, h, s, d) in enumerate(zip("qkv", heads, (6, 11, 11), (16, 16, 8))):
        x = torch.randn(2, h, s, d, generator=torch.Generator().manual_seed(n)).mul(2).to(dtype)
        how[name] = g.tensor(list(x.shape), name=name)
        arrays[how[name]], means[name] = x, x.double() * NUMBERS[f"descale_{name}"]
    for key in keys:
        how[key] = g.tensor([1, 1, 1, 1], name=key, data_type=DATA.FLOAT)
        arrays[how[key]] = torch.full((1, 1, 1, 1), NUMBERS[key])
    return how, arrays, means


def outputs(made: Any, arrays: dict[Any, Any], dtypes: list[Any]) -> list[Any]:
    """Marks a node's results as outputs and returns arrays for them; results of one number have a shape of ones."""
    for t, dtype in zip(made, dtypes):
        if t is not None:
            t.set_output(True).set_data_type(KINDS.get(dtype, DATA.FLOAT))
            arrays[t] = torch.full(t.get_dim(), float("nan")).to(dtype)
    return [None if t is None else arrays[t] for t in made]


CASES: dict[str, dict[str, Any]] = {
    "band": {"left_bound": 3, "right_bound": 1},
    "window at the bottom": {"sliding_window": 4, "diagonal_alignment": BOTTOM, "right_bound": 0},
    "more heads of values": {"heads": (6, 2, 3)},
    "sink": {"sink": True, "heads": (4, 2, 2)},
    "five bits": {"dtype": E5M2, "right_bound": 0},
}


@pytest.mark.parametrize("engine", ["reference", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_forward(name, engine):
    case = dict(CASES[name])
    dtype, heads, sunk = case.pop("dtype", E4M3), case.pop("heads", (4, 4, 4)), case.pop("sink", False)
    g = pygraph(KINDS[dtype])
    how, arrays, means = operands(g, dtype, SCALES, heads)
    sink = torch.linspace(-1, 1, heads[0])
    if sunk:
        how["sink_token"] = g.tensor([1, heads[0], 1, 1], name="sink", data_type=DATA.FLOAT)
        arrays[how["sink_token"]] = sink.reshape(1, -1, 1, 1)
    made = g.sdpa_fp8(**how, **case, generate_stats=True)
    o, stats, amax_s, amax_o = outputs(made, arrays, [dtype, torch.float32, torch.float32, torch.float32])
    graph = from_cudnn(g)
    graph.build(engine=engine)
    graph.execute(arrays)
    left = case.get("left_bound", case.get("sliding_window"))
    meaning = {"scale": SCALE, "left": left, "right": case.get("right_bound"), "sink": sink if sunk else None}
    q, k, v = means.values()
    bottom = "diagonal_alignment" in case
    wanted, logs, *_ = attention(q, k, v, **meaning, bottom=bottom)
    step = 2.0**-4 if dtype == E4M3 else 2.0**-3
    torch.testing.assert_close(o.double() / NUMBERS["scale_o"], wanted, rtol=2 * step, atol=float(v.abs().max()) * step)
    torch.testing.assert_close(stats.double(), logs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(amax_o.item(), wanted.abs().max().item(), rtol=2 * step, atol=0)
    one = attention(q, k, torch.eye(k.shape[2]).expand(2, heads[0], -1, -1), **meaning, bottom=bottom)[0]  # is p
    assert amax_s.item() == pytest.approx(float(one.max()), rel=1e-5)


def test_pages():
    g = pygraph(KINDS[E4M3])
    how, arrays, means = operands(g, E4M3, SCALES, (4, 2, 2))
    for name in "kv":
        x = arrays.pop(how[name])
        whole = torch.zeros(2, 2, 12, x.shape[3]).to(E4M3)
        whole.view(torch.uint8)[:, :, :11] = x.view(torch.uint8)
        blocks = whole.view(torch.uint8).reshape(2, 2, 3, 4, -1).transpose(1, 2).flatten(0, 1).flip(0).contiguous()
        how[name] = g.tensor(list(blocks.shape), name=f"container {name}")
        table = g.tensor([2, 1, 3, 1], name=f"table {name}", data_type=DATA.INT32)
        how[f"paged_attention_{name}_table"] = table
        arrays |= {how[name]: blocks.view(E4M3), table: torch.arange(5, -1, -1).int().reshape(2, 1, 3, 1)}
    lengths = [(6, 11), (2, 0)]
    how |= {**of_lengths(g, arrays, lengths), "paged_attention_max_seq_len_kv": 11}
    o, *_ = outputs(g.sdpa_fp8(**how)[:1], arrays, [E4M3])
    graph = from_cudnn(g)
    graph.build(engine="reference")
    graph.execute(arrays)
    wanted = attention(*means.values(), scale=SCALE, lengths=lengths)[0]
    torch.testing.assert_close(o.double() / 4, wanted, rtol=0.13, atol=0.5)


def test_ragged_forward():
    g = pygraph(KINDS[E4M3])
    how, arrays, means = operands(g, E4M3, SCALES, (4, 2, 2))
    lengths = [(6, 11), (2, 1)]
    for name, n in (("q", 0), ("k", 1), ("v", 1)):
        x = arrays.pop(how[name])
        how[name] = Ragged(x, [pair[n] for pair in lengths], gap=n).tensor(g, arrays, f"ragged {name}")
    made = g.sdpa_fp8(**how, **of_lengths(g, arrays, lengths), generate_stats=False)
    out = Ragged(torch.full((2, 4, 6, 8), float("nan")).to(E4M3), [6, 2])
    out.tensor(g, arrays, "o", made[0], DATA.FP8_E4M3)
    amax = outputs(made[2:], arrays, [torch.float32] * 2)
    graph = from_cudnn(g)
    graph.build(engine="reference")
    graph.execute(arrays)
    wanted = attention(*means.values(), scale=SCALE, lengths=lengths)[0]
    torch.testing.assert_close(out.padded().double() / 4, wanted, rtol=0.13, atol=0.5)
    assert amax[1].item() == pytest.approx(float(wanted.abs().max()), rel=0.1)
    assert out.untouched()


BACKWARD: dict[str, dict[str, Any]] = {
    "plain": {},
    "band": {"left_bound": 4, "right_bound": 1, "diagonal_alignment": BOTTOM},
    "sink": {"sink": True, "heads": (4, 2, 2)},
    "more heads of values": {"heads": (6, 2, 3)},
}


@pytest.mark.parametrize("engine", ["reference", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name, engine):
    case = dict(BACKWARD[name])
    heads, sunk = case.pop("heads", (4, 4, 4)), case.pop("sink", False)
    g = pygraph(KINDS[E4M3])
    how, arrays, means = operands(g, E4M3, (*DESCALES, *SCALES_BACK), heads)
    leaves = [x.clone().requires_grad_() for x in means.values()]
    bounds = {"left": case.get("left_bound"), "right": case.get("right_bound")}
    by_scores = torch.zeros(2, heads[0], 6, 11).requires_grad_()
    meaning = {"scale": SCALE, "bottom": "diagonal_alignment" in case, "bias": by_scores, **bounds}
    leaves.append(by_scores)
    if sunk:
        how["sink_token"], how["dSink_token"] = (
            g.tensor([1, heads[0], 1, 1], name=n, data_type=DATA.FLOAT) for n in ("sink", "dSink")
        )
        how["dSink_token"].set_output(True)
        arrays[how["sink_token"]] = torch.linspace(-1, 1, heads[0]).reshape(1, -1, 1, 1)
        by_sink = arrays[how["dSink_token"]] = torch.full((1, heads[0], 1, 1), float("nan"))
        meaning["sink"] = torch.linspace(-1, 1, heads[0]).requires_grad_()
        leaves.append(meaning["sink"])
    out, stats, *_ = attention(*leaves[:3], **meaning)
    loss = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(E4M3)
    given = {"o": (out.detach() / NUMBERS["descale_o"]).to(E4M3), "dO": loss, "stats": stats.float()}
    for key, x in given.items():
        how[key] = g.tensor(list(x.shape), name=key, data_type=DATA.FLOAT if key == "stats" else DATA.FP8_E4M3)
        arrays[how[key]] = x
    made = g.sdpa_fp8_backward(**how, **case)
    for t, like in zip(made, (*"qkv",)):
        t.set_dim(list(means[like].shape))
    found = outputs(made, arrays, [E4M3] * 3 + [torch.float32] * 4)
    graph = from_cudnn(g)
    graph.build(engine=engine)
    graph.execute(arrays)
    wanted = gradients(loss.double() * NUMBERS["descale_dO"], leaves, *leaves[:3], **meaning)
    for x, key, expected, most in zip(found, ("dQ", "dK", "dV"), wanted, found[3:]):
        largest = float(expected.abs().max())
        torch.testing.assert_close(x.double() / NUMBERS[f"scale_{key}"], expected, rtol=0.13, atol=0.1 * largest)
        assert most.item() == pytest.approx(largest, rel=0.12)
    assert found[6].item() == pytest.approx(float(wanted[3].abs().max()) * SCALE, rel=0.05)
    if sunk:
        torch.testing.assert_close(by_sink.reshape(-1).double(), wanted[4].double(), rtol=0.1, atol=0.05)
