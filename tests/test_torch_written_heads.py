"""Losses that torch programs write out of products, sums and logarithms become one operator with the layer, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from test_torch_whole_heads import BATCH, CLASSES, DEPTH, LENGTH, check, of_any_size, operands  # noqa: E402, F401

from fusegraph.frontends.torch import whole_heads  # noqa: E402

F = torch.nn.functional
#: Ways to write logits [BATCH * LENGTH, CLASSES], and losses of them.
LOGITS = {
    "product": lambda x, w, b: (x @ w.T + b).view(-1, CLASSES),
    "matmul": lambda x, w, b: (b + torch.matmul(x, w.t())).flatten(0, 1).float(),
    "mm": lambda x, w, b: torch.mm(x.flatten(0, 1), w.t()).add(b),
    "addmm": lambda x, w, b: torch.addmm(b, x.reshape(-1, DEPTH), w.T),
}
LOSSES = {
    "functions": lambda z, t: F.nll_loss(F.log_softmax(z, -1), t, ignore_index=-100, reduction="mean"),
    "modules": lambda z, t: torch.nn.NLLLoss(reduction="sum")(torch.nn.LogSoftmax(dim=1)(z), t),
    "methods": lambda z, t: F.nll_loss(z.view(BATCH, LENGTH, -1).log_softmax(dim=-1).flatten(0, 1), t),
    "sums": lambda z, t: F.nll_loss(z - z.logsumexp(-1, keepdim=True), t, reduction="none"),
}


#: Losses of logits [BATCH, LENGTH, CLASSES] with targets [BATCH, LENGTH].
IN_BATCHES = {
    "transposed": lambda z, t: F.cross_entropy(z.transpose(1, 2), t, reduction="none", label_smoothing=0.1),
    "normalised transposed": lambda z, t: F.nll_loss(F.log_softmax(z.permute(0, 2, 1), 1), t),
    "transposed normalised": lambda z, t: F.nll_loss(torch.log_softmax(z, 2).movedim(2, 1), t, reduction="sum"),
    "shifted": lambda z, t: F.nll_loss(z[:, :-1].flatten(0, 1).log_softmax(1), t[:, 1:].flatten(), ignore_index=3),
}


def doubled(z: Any, t: Any) -> Any:
    shares = F.log_softmax(z, -1)
    return F.nll_loss(shares, t) + shares.mean()


def of_itself(z: Any, t: Any) -> Any:
    return F.nll_loss(z - z.logsumexp(-1, keepdim=True) + z.mean(), t)


def repeated(x: Any, w: Any, b: Any) -> Any:
    return (x @ w.T.expand(BATCH, -1, -1) + b).flatten(0, 1)


PLAIN, MEAN = LOGITS["product"], LOSSES["functions"]
#: What is no loss of a layer alone: logits and losses.
OTHERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "weights": (PLAIN, lambda z, t: F.nll_loss(F.log_softmax(z, -1), t, weight=torch.arange(CLASSES, dtype=z.dtype))),
    "logits are used": (PLAIN, of_itself),
    "logarithms are used": (PLAIN, doubled),
    "along rows": (PLAIN, lambda z, t: F.nll_loss(F.log_softmax(z, 0), t)),
    "not normalised": (PLAIN, lambda z, t: F.nll_loss(z, t)),
    "normalised by another": (PLAIN, lambda z, t: F.nll_loss(z - (2 * z).logsumexp(-1, keepdim=True), t)),
    "scaled sum": (lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w.T, beta=2), MEAN),
    "scaled bias": (lambda x, w, b: torch.add(x @ w.T, b, alpha=2).flatten(0, 1), MEAN),
    "bias of rows": (lambda x, w, b: (x @ w.T + x[..., :1]).flatten(0, 1) + 0 * b, MEAN),
    "two biases": (lambda x, w, b: (F.linear(x, w, b) + b).flatten(0, 1), MEAN),
    "products of batches": (repeated, MEAN),
    "vectors": (lambda x, w, b: x.flatten(0, 1)[:, None].expand(-1, CLASSES, -1) @ w[0] + b, MEAN),
    "integers": (lambda x, w, b: (F.linear(x, w, b).to(torch.int64).flatten(0, 1)).float() + b, MEAN),
}


@pytest.mark.parametrize(("logits", "loss"), list(zip(LOGITS, LOSSES)))
def test_forms(logits: str, loss: str) -> None:
    check(lambda x, w, b, t: LOSSES[loss](LOGITS[logits](x, w, b), t.flatten()), operands())


def of_graph(call: Callable[..., Any], given: list[Any]) -> tuple[bool, Any, list[Any]]:
    """Returns whether the tracer's graph has the operator, and what torch makes of that graph, with gradients."""
    seen: list[Any] = []

    def changed(module: Any, _: Any) -> Any:
        whole_heads.keep_heads_whole(module)
        seen.extend(module.graph.nodes)
        return module.forward

    ours = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in given]
    loss = torch.compile(call, backend=changed, dynamic=False, fullgraph=True)(*ours)
    grads = torch.autograd.grad(loss.sum(), ours[:3], allow_unused=True)
    return any(n.target is whole_heads._loss for n in seen), loss, list(grads)


def check_graph(call: Callable[..., Any], whole: bool) -> None:
    given = [x.double() if x.is_floating_point() else x for x in operands()]
    found, *results = of_graph(call, given)
    theirs = [x.requires_grad_() if x.is_floating_point() else x for x in given]
    wanted = call(*theirs)
    assert found == whole
    by = torch.autograd.grad(wanted.sum(), theirs[:3], allow_unused=True)
    torch.testing.assert_close(results, [wanted, list(by)])


@pytest.mark.parametrize("loss", IN_BATCHES)
def test_batches_of_rows(loss: str) -> None:
    def call(x: Any, w: Any, b: Any, t: Any) -> Any:
        return IN_BATCHES[loss](F.linear(x, w, b), t.clamp(min=0) if loss == "shifted" else t)

    check_graph(call, True)


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_not_a_loss_of_a_layer_alone(other: str) -> None:
    logits, loss = OTHERS[other]
    check_graph(lambda x, w, b, t: loss(logits(x, w, b), t.flatten()), False)


def test_small_logits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_heads, "LEAST_LOGITS_BYTES", 4 * BATCH * LENGTH * CLASSES + 1)
    check_graph(lambda x, w, b, t: MEAN(PLAIN(x, w, b), t.flatten()), False)
