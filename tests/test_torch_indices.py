"""Compiled models that write to their inputs and buffers at positions: one piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import fusegraph.torch  # noqa: E402

PLACES, ROWS = torch.tensor([1, 1, 3]), torch.arange(12.0).reshape(3, 4)


def _put(x: Any) -> Any:
    x[PLACES[1:]] = ROWS[1:]
    return (x * 2).relu()


def _add(x: Any) -> Any:
    x.index_add_(0, PLACES, ROWS)
    y = x.sin()
    x.index_put_((PLACES,), ROWS, accumulate=True)
    return y + x


def _mask(x: Any) -> Any:
    x[x > 0] = 0.5
    x[:, 1] += 2
    return x * 1


@pytest.mark.parametrize("function", [_put, _add, _mask])
def test_writing_to_an_input_is_no_cut(function: Callable[[Any], Any]) -> None:
    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)
    given = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    changed = given.clone()
    found = torch.compile(function, backend="fusegraph", fullgraph=True)(changed)
    torch.testing.assert_close(found, function(given))
    torch.testing.assert_close(changed, given)
    (report,) = fusegraph.torch.report()
    assert len(report.pieces) == 1
    assert not report.left


class _Cache(torch.nn.Module):
    """A table of embeddings, whose gradient is a scatter, and a buffer to which rows are written."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(20, 8, padding_idx=3)
        self.register_buffer("rows", torch.zeros(2, 16, 8))

    def forward(self, tokens: Any, places: Any) -> Any:
        self.rows.index_copy_(1, places, self.table(tokens))
        best, _ = self.rows.cummax(1)
        return best.sum(1) * self.rows.cumprod(2)[:, 5]


def test_training_through_a_cache() -> None:
    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)
    torch.manual_seed(0)
    eager, ours = _Cache(), _Cache()
    ours.load_state_dict(eager.state_dict())
    tokens, places = torch.tensor([[1, 3, 1], [7, 1, 3]]), torch.tensor([4, 5, 9])
    compiled = torch.compile(ours, backend="fusegraph", fullgraph=True)
    wanted, found = eager(tokens, places), compiled(tokens, places)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(ours.rows, eager.rows)
    for result in (wanted, found):
        result.square().sum().backward()
    torch.testing.assert_close(ours.table.weight.grad, eager.table.weight.grad)
    assert all(len(report.pieces) == 1 for report in fusegraph.torch.report())
