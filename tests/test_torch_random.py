"""Random numbers that kernels draw for torch.compile: distributions, seeds, gradients, attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import fusegraph.torch  # noqa: E402

functional = torch.nn.functional


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    fusegraph.torch.report(clear=True)
    yield
    fusegraph.torch.report(clear=True)


def _compiled(function: Any) -> Any:
    return torch.compile(function, backend="fusegraph", fullgraph=True)


def _left() -> list[str]:
    return [op for report in fusegraph.torch.report() for _, op, _ in report.left]


@pytest.mark.slow
def test_dropout_draws_by_torchs_seed_and_its_gradient_has_the_same_mask() -> None:
    layer = _compiled(torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Dropout(0.25)))
    x = torch.rand(64, 48, requires_grad=True)
    torch.manual_seed(3)
    first = layer(x)
    second = layer(x)
    torch.manual_seed(3)
    again = layer(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    dropped = first == 0
    assert 0.2 < dropped.float().mean() < 0.3
    torch.testing.assert_close(first[~dropped], (x.tanh() / 0.75)[~dropped])
    first.sum().backward()
    assert torch.equal(x.grad == 0, dropped)


def _numbers(x: Any) -> dict[str, Any]:
    return {
        "rand": torch.rand(64, 48),
        "rand_like": torch.rand_like(x),
        "half": torch.rand(64, 48, dtype=torch.bfloat16),
        "randn": torch.randn(64, 48),
        "randn_like": torch.randn_like(x.t()),
        "uniform": torch.empty_like(x).uniform_(-1, 3),
        "normal": torch.empty_like(x).normal_(2, 0.5),
        "bernoulli": torch.empty_like(x).bernoulli_(0.3),
        "bernoulli tensor": torch.bernoulli(torch.full_like(x, 0.3)),
        "dropout": functional.dropout(torch.ones_like(x), 0.3),
        "dropout2d": functional.dropout2d(torch.ones_like(x)[None, :, :, None], 0.3),
    }


@pytest.mark.slow
def test_numbers_have_their_distributions_and_are_drawn_anew() -> None:
    run, x = _compiled(_numbers), torch.randn(64, 48)
    first, second = run(x), run(x)
    assert _left() == ["fusegraph.seeds.default"]  # all at once
    expected = {
        **dict.fromkeys(("rand", "rand_like", "half"), (0.5, 12**-0.5)),
        **dict.fromkeys(("randn", "randn_like"), (0, 1)),
        "uniform": (1, 4 * 12**-0.5),
        "normal": (2, 0.5),
        **dict.fromkeys(("bernoulli", "bernoulli tensor"), (0.3, 0.21**0.5)),
        "dropout": (1, (0.3 / 0.7) ** 0.5),
        "dropout2d": (1, (0.3 / 0.7) ** 0.5),
    }
    for name, (mean, deviation) in expected.items():
        found = first[name].float()
        count = 64 if name == "dropout2d" else found.numel()
        assert abs(found.mean() - mean) < 5 * deviation / count**0.5, name
        assert abs(found.std() / deviation - 1) < 5 / count**0.5, name
        assert not torch.equal(found, second[name].float()), name
    assert all(first[name].min() >= 0 and first[name].max() < 1 for name in ("rand", "rand_like", "half"))
    assert first["half"].unique().numel() > 100
    drawn = torch.stack([first[name].flatten().float() for name in expected if first[name].numel() == 64 * 48])
    assert (drawn.corrcoef() - torch.eye(len(drawn))).abs().max() < 5 / (64 * 48) ** 0.5  # none is another's


@pytest.mark.slow
def test_nothing_is_kept_of_a_mask_and_checkpoints_compute_it_again() -> None:
    def layer(x: Any) -> Any:
        return functional.dropout(x.tanh(), 0.5)

    def block(x: Any) -> Any:
        return layer(checkpoint(lambda x: layer(x).exp(), x, use_reentrant=False)) + functional.dropout(x, 0.2)

    x = torch.randn(32, 24, requires_grad=True)
    y = _compiled(block)(x)
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert not any(t.dtype == torch.bool for t in saved)
    assert sorted(t.numel() for t in saved if t.dtype == torch.int64) == [3]
    numbers = {"seeds": next(t for t in saved if t.dtype == torch.int64)}
    first, second, third = (torch.ops.fusegraph.uniform((32, 24), numbers["seeds"], n) for n in range(3))
    other = x.detach().double().requires_grad_()
    inner = (other.tanh() * (first >= 0.5) * 2).exp()
    wanted = inner.tanh() * (second >= 0.5) * 2 + other * (third >= 0.2) / 0.8
    torch.testing.assert_close(y.double(), wanted, atol=1e-5, rtol=1e-5)
    grad = torch.randn(32, 24)
    y.backward(grad)
    wanted.backward(grad.double())
    torch.testing.assert_close(x.grad.double(), other.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_dropout_is_one_kernel_and_so_are_its_gradients(dtype: Any) -> None:
    def function(q: Any, k: Any, v: Any, mask: Any) -> Any:
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.25)
        return y, functional.scaled_dot_product_attention(y, k, v, dropout_p=0.5)

    q, k, v = (torch.randn(2, 4, n, 16, dtype=dtype, requires_grad=True) for n in (33, 40, 40))
    mask = torch.randn(2, 1, 33, 40, dtype=dtype)
    torch.manual_seed(5)
    y, z = _compiled(function)(q, k, v, mask)
    grad = torch.randn_like(y)
    (y * grad + z).sum().backward()
    assert _left() == ["fusegraph.seeds.default"]
    torch.manual_seed(5)
    seeds = torch.ops.fusegraph.seeds(2, torch.device("cpu"))
    kept = [torch.ops.fusegraph.uniform((2, 4, 33, 40), seeds, n) >= p for n, p in enumerate((0.25, 0.5))]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    weights = (wide[0] @ wide[1].mT / 4 + mask.double()).softmax(-1)
    first = (weights * kept[0] / 0.75) @ wide[2]
    second = ((first @ wide[1].mT / 4).softmax(-1) * kept[1] * 2) @ wide[2]
    (first * grad.double() + second).sum().backward()
    tolerance = 4e-5 if dtype == torch.float32 else 8e-2
    for ours, theirs in ((y, first), (z, second), *((a.grad, b.grad) for a, b in zip((q, k, v), wide))):
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.slow
def test_the_operators_compute_what_kernels_do() -> None:
    """Where torch has to compute them, gradients still find the same numbers."""
    seeds = torch.tensor([3, 1 << 62])

    def function(seeds: Any) -> Any:
        return torch.ops.fusegraph.uniform((5, 7), seeds, 1), torch.ops.fusegraph.normal((5, 7), seeds, 0)

    for ours, theirs in zip(_compiled(function)(seeds), function(seeds)):
        torch.testing.assert_close(ours, theirs)


def _by_threshold(logits: Any) -> Any:
    """The five largest, and a race of exponential numbers."""
    logits = logits / 0.8
    least = torch.topk(logits, 5).values[..., -1:]
    p = torch.where(logits < least, -torch.inf, logits).softmax(-1)
    return torch.argmax(p / torch.empty_like(p).exponential_(1), dim=-1, keepdim=True)


def _in_nucleus(logits: Any) -> Any:
    """Nine tenths of the probabilities, found by sorting."""
    ordered, index = torch.sort(logits, descending=False)
    gone = ordered.softmax(-1).cumsum(-1) <= 0.1
    gone[..., -1:] = False
    logits = logits.masked_fill(gone.scatter(1, index, gone), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1)


@pytest.mark.parametrize("draw", [_in_nucleus, pytest.param(_by_threshold, marks=pytest.mark.slow)])
def test_tokens_are_drawn_in_one_piece(draw: Any) -> None:
    row = torch.randn(24) * 3
    tokens = _compiled(draw)(row.expand(2000, 24).contiguous())
    assert _left() == ["fusegraph.seeds.default"]
    (report,) = fusegraph.torch.report()
    assert len(report.pieces) == 1
    p = row.softmax(-1)
    ordered, index = p.sort(descending=True)
    count = int((ordered.cumsum(-1) < 0.9).sum()) + 1
    if draw is _by_threshold:
        p, count = (row / 0.8).softmax(-1), 5
    may = torch.zeros(24).scatter(0, index[:count], 1)
    expected, found = p * may / (p * may).sum() * 2000, torch.bincount(tokens[:, 0], minlength=24)
    assert tokens.shape == (2000, 1)
    assert not found[may == 0].any()
    assert ((found - expected).abs() < 5 * expected.sqrt() + 2).all()


@pytest.mark.slow
def test_several_tokens() -> None:
    weights = torch.tensor([[1.0, 2.0, 0.0, 5.0, 0.5]]).expand(3000, 5).contiguous()
    first, both, again = _compiled(
        lambda w: (torch.multinomial(w[0], 3), torch.multinomial(w, 4), torch.multinomial(w, 2, replacement=True))
    )(weights)
    assert set(first.tolist()) <= {0, 1, 3, 4}
    assert sorted(both[17].tolist()) == [0, 1, 3, 4]  # each once
    share = torch.bincount(both[:, 0], minlength=5) / 3000
    torch.testing.assert_close(share, weights[0] / 8.5, atol=0.05, rtol=0)
    torch.testing.assert_close(
        torch.bincount(again.reshape(-1), minlength=5) / 6000, weights[0] / 8.5, atol=0.04, rtol=0
    )
