"""`from_cudnn`: attention whose scores a callable modifies, that is given a graph and a tensor."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from attention_oracle import attention, gradients  # noqa: E402
from test_from_cudnn import DATA, pygraph  # noqa: E402

from fusegraph.errors import GraphError, NotSupportedError  # noqa: E402
from fusegraph.frontends.cudnn import from_cudnn  # noqa: E402


def normal(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


Q, K, V = normal(2, 4, 6, 8), normal(2, 2, 10, 8, seed=1), normal(2, 2, 10, 16, seed=2)
LOW = -1e9


def indices(g: Any, scores: Any) -> tuple[Any, Any]:
    return tuple(g.gen_index(input=scores, axis=axis).set_data_type(DATA.INT32) for axis in (2, 3))  # type: ignore[return-value]


def later(g: Any, scores: Any, low: Any) -> Any:
    """Gives keys after the query a low score."""
    row, key = indices(g, scores)
    mask = g.cmp_ge(input=row, comparison=key, compute_data_type=DATA.BOOLEAN).set_data_type(DATA.BOOLEAN)
    return g.binary_select(input0=scores, input1=low, mask=mask)


def capped(g: Any, scores: Any, cap: Any, low: Any) -> Any:
    share = g.tanh(input=g.div(a=scores, b=cap))
    return later(g, g.mul(a=share, b=cap), low)


def scalar(g: Any, name: str) -> Any:
    return g.tensor([1, 1, 1, 1], name=name, data_type=DATA.FLOAT, is_pass_by_value=True)


def taken(g: Any, **more: Any) -> tuple[dict[str, Any], dict[Any, Any]]:
    arrays = {g.tensor(list(x.shape), name=n): x for n, x in (("q", Q), ("k", K), ("v", V))}
    return {**dict(zip("qkv", arrays)), "attn_scale": 0.25, **more}, arrays


@pytest.mark.parametrize("engine", ["reference", "cpu"])
def test_numbers_that_a_callable_closes_over(engine):
    g = pygraph(DATA.HALF)
    cap, low = scalar(g, "cap"), scalar(g, "low")
    how, arrays = taken(g, score_mod=partial(capped, cap=cap, low=low), generate_stats=True)
    o, stats = g.sdpa(**how)
    o.set_output(True)
    stats.set_output(True).set_data_type(DATA.FLOAT)
    out, sums = torch.empty(2, 4, 6, 16).half(), torch.empty(2, 4, 6, 1)
    graph = from_cudnn(g)
    graph.build(engine=engine)
    for most in (0.8, 3.0):
        graph.execute({**arrays, cap: most, low: LOW, o: out, stats: sums})

        def modify(s: Any, b: int, h: int, most: float = most) -> Any:
            return torch.where(torch.ones_like(s).tril() > 0, most * torch.tanh(s / most), LOW)

        wanted = attention(Q, K, V, scale=0.25, modify=modify)
        torch.testing.assert_close(out.double(), wanted[0], atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(sums.double(), wanted[1], atol=1e-4, rtol=1e-4)
    assert from_cudnn(g, {"cap": 0.8, low: LOW}).by_value == set()


def test_tensors_and_arrays():
    """A mask of documents: operands of several elements, one of them an array of the callable's own."""
    g = pygraph(DATA.HALF)
    rows, keys = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2])
    numbers = g.tensor([1, 1, 6, 1], name="documents", data_type=DATA.INT32)

    def documents(own: Any, scores: Any) -> Any:
        of_keys = own.tensor([1, 1, 1, 10], [10, 10, 10, 1], name="documents of keys", data_type=DATA.INT32, uid=777)
        _, key = indices(own, scores)
        every = own.cmp_le(input=key, comparison=key).set_data_type(DATA.INT32)
        first, second = (own.scale(input=every, scale=x).set_data_type(DATA.INT32) for x in (numbers, of_keys))
        same = own.cmp_eq(input=first, comparison=second).set_data_type(DATA.INT32)
        return own.binary_select(input0=scores, input1=own.tensor_scalar(LOW, None), mask=same)

    how, arrays = taken(g, score_mod=documents)
    o = g.sdpa(**how)[0].set_output(True)
    graph, out = from_cudnn(g), torch.empty(2, 4, 6, 16).half()
    assert len({t.uid for t in g.tensors.values()}) == len(g.tensors)
    graph.build(engine="reference")
    arrays |= {numbers: rows.int().reshape(1, 1, 6, 1), "documents of keys": keys.int().reshape(1, 1, 1, 10), o: out}
    graph.execute(arrays)
    wanted = attention(Q, K, V, scale=0.25, allowed=(rows[:, None] == keys)[None, None])[0]
    torch.testing.assert_close(out.double(), wanted, atol=2e-3, rtol=2e-3)


def test_nothing_and_what_is_wrong():
    g = pygraph(DATA.HALF)
    g.sdpa(**taken(g, score_mod=lambda own, scores: scores)[0])[0].set_output(True)
    assert [n.op.name for n in from_cudnn(g).nodes].count("matmul") == 2
    other = g.tensor([1, 1, 1, 1])
    for wrong in (lambda own, scores: None, lambda own, scores: other):
        g = pygraph(DATA.HALF)
        g.sdpa(**taken(g, score_mod=wrong)[0])[0].set_output(True)
        with pytest.raises(GraphError, match=r"sdpa 'sdpa\.0': a function that modifies scores returns"):
            from_cudnn(g)
    g = pygraph(DATA.HALF)
    g.sdpa(**taken(g, score_mod=lambda own, scores: own.rope(scores, scores))[0])[0].set_output(True)
    with pytest.raises(GraphError, match=r"rope"):
        from_cudnn(g)
    g = pygraph(DATA.HALF)
    g.sdpa(**taken(g, score_mod=lambda own, scores: own.resample(scores))[0])[0].set_output(True)
    with pytest.raises((NotSupportedError, GraphError)):
        from_cudnn(g)


def test_gradients():
    """As cuDNN, with what score_mod_bprop says of the gradient by scores."""
    g, arrays = pygraph(DATA.HALF), dict[Any, Any]()
    low, zero = scalar(g, "low"), scalar(g, "zero")

    def modify(s: Any, b: int, h: int) -> Any:
        return torch.where(torch.ones_like(s).tril() > 0, s, LOW)

    out, sums, *_ = attention(Q, K, V, scale=0.25, modify=modify)
    loss = normal(*out.shape, seed=4)
    how, arrays = taken(g, score_mod=partial(later, low=low), score_mod_bprop=partial(later, low=zero))
    for name, x in (("o", out.half()), ("dO", loss), ("stats", sums.float())):
        how[name] = g.tensor(list(x.shape), name=name, data_type=DATA.FLOAT if name == "stats" else DATA.HALF)
        arrays[how[name]] = x
    found = [torch.empty_like(x) for x in (Q, K, V)]
    made = g.sdpa_backward(**how)
    graph = from_cudnn(_marked(g, made))
    graph.build(engine="reference")
    graph.execute({**arrays, low: LOW, zero: np.float32(0), **dict(zip(made, found))})
    leaves = [x.double().requires_grad_() for x in (Q, K, V)]
    for x, wanted in zip(found, gradients(loss, leaves, *leaves, scale=0.25, modify=modify)):
        torch.testing.assert_close(x.double(), wanted, atol=6e-3, rtol=6e-3)


def _marked(g: Any, made: Any) -> Any:
    for t in made:
        t.set_output(True)
    return g
